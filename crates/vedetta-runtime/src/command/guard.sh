trap '' HUP INT TERM PIPE
exec 3<&- 4<&- 5<&- 6<&- 7<&- 8<&- 9<&-
{ [ -r /proc/$$/environ ] && command -v xargs && command -v grep && command -v sleep; } >/dev/null || exit
echo ready
exec >/dev/null
while read -r _; do :; done
unseen=0
while [ $unseen -lt 2 ]; do
    unseen=$((unseen + 1))
    for path in $(printf '%s\n' /proc/[0-9]*/environ | xargs grep -lsF -e "$1"); do
        unseen=0
        pid=${path#/proc/}
        pid=${pid%/environ}
        kill -s KILL -- "-$pid" "$pid"
    done
    sleep 0.1 || sleep 1
done
