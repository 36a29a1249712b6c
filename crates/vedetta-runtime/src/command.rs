//! Runs a command once, and leaves nothing of it behind when it is ended from outside.
//!
//! ```text
//! input ──stdin──► ┌─────────────────────────┐ ──stdout, stderr──► progress, a result, lines of log
//!                  │ a process group its own │ ──exit code 0──► done
//!                  └─────────────────────────┘ ──anything else──► the end of stderr, as the error
//!                     ▲ SIGTERM, if it may be asked to end; SIGKILL to all of it: time is up, the run
//!                       was dropped, or this process ended
//! ```
//!
//! On Linux "all of it" is what has the run's mark in its environment, too, whatever group or session it is in.
//! What a command that ended by itself leaves in the background goes on as long as this process does; then a
//! guard ends it, together with all that runs. Elsewhere, what left the group goes on, and what runs when this
//! process is killed. Neither the arguments nor the input nor the output are
//! ever logged here: they may hold secrets.

mod guard;
#[cfg(target_os = "linux")]
mod hunt;
mod output;

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::future::{Ready, pending};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::value::RawValue;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Child;
use tokio::time::timeout;

use guard::{Gone, Mark};
pub use output::Watch;
use output::{Stderr, Stdout};

/// What a command wrote before its end is there at once; what it left in the background may hold its
/// output open for ever.
const REST: Duration = Duration::from_millis(100);

/// A command that may be run.
#[derive(Clone)]
pub struct Command {
    program: OsString,
    arguments: Vec<OsString>,
    variables: Vec<(OsString, OsString)>,
    limit: Duration,
}

/// Its variables by name only: a token may be among them.
impl fmt::Debug for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.variables.iter().map(|(name, _)| name).collect();
        f.debug_struct("Command")
            .field("program", &self.program)
            .field("arguments", &self.arguments)
            .field("variables", &names)
            .field("limit", &self.limit)
            .finish()
    }
}

/// Why a command did not do what it should. For people to read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// It was not started: nothing would end it if this process were killed.
    #[error("cannot start the guard that ends commands when this process ends")]
    Guard(#[source] std::io::Error),
    /// It is not there, or may not be run.
    #[error("cannot start {}", .0.display())]
    Start(OsString, #[source] std::io::Error),
    /// It said no.
    #[error("it ended with {}{}", ending(*.status), after_colon(.stderr))]
    Failed {
        /// How it ended.
        status: ExitStatus,
        /// The last it wrote to stderr.
        stderr: String,
    },
    /// Its time was up; nothing of it is left, but for what had not ended a second after it was killed.
    #[error("it took longer than {limit:?} and was killed{}", after_colon(.stderr))]
    Timeout {
        /// How long it had.
        limit: Duration,
        /// The last it wrote to stderr.
        stderr: String,
    },
    /// There is no telling how it ended.
    #[error("cannot wait for its end")]
    Wait(#[source] std::io::Error),
}

impl CommandError {
    /// The same without what the command wrote: for logs.
    pub fn briefly(&self) -> String {
        match self {
            Self::Failed { status, .. } => format!("it ended with {}", ending(*status)),
            Self::Timeout { limit, .. } => format!("it took longer than {limit:?} and was killed"),
            Self::Guard(error) => format!("{self}: {error}"),
            Self::Start(program, error) => format!("cannot start {}: {error}", program.display()),
            Self::Wait(error) => format!("cannot wait for its end: {error}"),
        }
    }
}

fn ending(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt as _;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

fn after_colon(stderr: &str) -> String {
    if stderr.is_empty() { String::new() } else { format!(": {stderr}") }
}

impl Command {
    /// Runs `program` with these arguments, without a shell. With a slash in it, it is a path, from the
    /// working directory if it is relative; otherwise it is looked up in `PATH`. It may take `limit`.
    pub fn new<T: Into<OsString>>(
        program: T,
        arguments: impl IntoIterator<Item = T>,
        limit: Duration,
    ) -> Self {
        let arguments = arguments.into_iter().map(Into::into).collect();
        Self { program: program.into(), arguments, variables: Vec::new(), limit }
    }

    /// Sets a variable of its environment, beside those of this process.
    #[must_use]
    pub fn variable(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.variables.push((name.into(), value.as_ref().to_owned()));
        self
    }

    /// Lets it take so long at most, and no longer than it might.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = self.limit.min(limit);
        self
    }

    /// Runs it to its end, with `input` on stdin; what it prints to stdout is dropped.
    ///
    /// Cancel safety: a dropped future kills the command and all that it started.
    pub async fn run(&self, input: &[u8]) -> Result<(), CommandError> {
        self.execute(input, None, None::<Ready<&[Duration]>>).await.map(drop)
    }

    /// The same, and `watch` is told what it says meanwhile. On stdout these lines mean something, alone or
    /// as one; one that is no object is told as it is, and one of 1 MiB or more is ignored:
    ///
    /// ```json
    /// {"progress": 0.4, "message": "halfway, nearly"}
    /// {"result": {"frames": 1200}}
    /// ```
    ///
    /// Returns the last result, if there was one.
    pub async fn run_watched(
        &self,
        input: &[u8],
        watch: &dyn Watch,
    ) -> Result<Option<Box<RawValue>>, CommandError> {
        self.execute(input, Some(watch), None::<Ready<&[Duration]>>).await
    }

    /// The same for what runs until it is told to end. When `stop` is there, it and all of its process group
    /// get SIGTERM, once before each of the waits that `stop` says; what is left after the last is killed. Once
    /// it was asked, any end is a good one.
    ///
    /// Cancel safety: a dropped future kills the command and all that it started.
    pub async fn run_until<'a>(
        &self,
        input: &[u8],
        watch: &dyn Watch,
        stop: impl Future<Output = &'a [Duration]> + Send,
    ) -> Result<Option<Box<RawValue>>, CommandError> {
        self.execute(input, Some(watch), Some(stop)).await
    }

    async fn execute<'a>(
        &self,
        input: &[u8],
        watch: Option<&dyn Watch>,
        stop: Option<impl Future<Output = &'a [Duration]> + Send>,
    ) -> Result<Option<Box<RawValue>>, CommandError> {
        let mark = Mark::new();
        let guarded = guard::ids(&mark).map_err(CommandError::Guard)?;
        let child = tokio::process::Command::new(&self.program)
            .args(&self.arguments)
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .env(guard::VARIABLE, guarded)
            .stdin(Stdio::piped())
            .stdout(if watch.is_some() { Stdio::piped() } else { Stdio::null() })
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true) // after the group, which has no other way to be waited for
            .spawn()
            .map_err(|error| CommandError::Start(self.program.clone(), error))?;
        let mut group = Group(child, mark);
        let stdin = group.0.stdin.take();
        let pipes = (group.0.stdout.take(), group.0.stderr.take());
        let (mut stdout, mut stderr) = (Stdout::new(watch), Stderr::new(watch));
        let (pid, mut is_asked, mut is_killed) = (group.pid(), false, false);
        let ended = {
            let feed = async move {
                if let Some(mut stdin) = stdin {
                    // It need not read all of it.
                    let _ = stdin.write_all(input).await;
                }
            };
            let read = async {
                let stdout = output::read(pipes.0, |bytes| stdout.take(bytes));
                let stderr = output::read(pipes.1, |bytes| stderr.take(bytes));
                tokio::join!(stdout, stderr);
            };
            let ask = async {
                let Some(stop) = stop else { return pending().await };
                let waits = stop.await;
                is_asked = true;
                for wait in waits {
                    signal(pid, Signal::TERM);
                    tokio::time::sleep(*wait).await;
                }
                is_killed = true;
                signal(pid, Signal::KILL);
                pending::<()>().await;
            };
            let (mut feed, mut read) = (std::pin::pin!(feed), std::pin::pin!(read));
            let mut ask = std::pin::pin!(ask); // polled only while it has not been waited for
            let (mut is_fed, mut is_read) = (false, false);
            let whole = async {
                loop {
                    tokio::select! {
                        status = group.0.wait() => break status,
                        () = &mut feed, if !is_fed => is_fed = true,
                        () = &mut read, if !is_read => is_read = true,
                        () = &mut ask => {}
                    }
                }
            };
            let ended = timeout(self.limit, whole).await;
            if ended.is_err() {
                let gone = group.kill();
                group.0.wait().await.map_err(CommandError::Wait)?;
                if let Some(gone) = gone {
                    gone.wait().await;
                }
            }
            let is_done = matches!(&ended, Ok(Ok(status)) if status.success());
            if !is_read && (watch.is_some() || !is_done) {
                let _ = timeout(REST, read).await;
            }
            ended
        };
        if is_killed {
            group.1.kill().wait().await;
        }
        let (result, stderr) = (stdout.end(), stderr.end());
        match ended {
            Ok(Ok(status)) if status.success() || is_asked => Ok(result),
            Ok(Ok(status)) => Err(CommandError::Failed { status, stderr }),
            Ok(Err(error)) => Err(CommandError::Wait(error)),
            Err(_) => Err(CommandError::Timeout { limit: self.limit, stderr }),
        }
    }
}

/// A command and all it started, as long as it has not been waited for: until then its number is not
/// given to another.
struct Group(Child, Mark);

impl Group {
    fn pid(&self) -> Option<Pid> {
        self.0.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw)
    }

    /// Nothing if it has been waited for.
    fn kill(&self) -> Option<Gone> {
        let pid = self.pid()?;
        signal(Some(pid), Signal::KILL);
        Some(self.1.kill())
    }
}

/// To all of a group.
fn signal(pid: Option<Pid>, signal: Signal) {
    if let Some(pid) = pid {
        // It may just have ended by itself.
        let _ = kill_process_group(pid, signal);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Nobody can wait for it here.
        let _ = self.kill();
    }
}

#[cfg(test)]
mod tests {
    use output::KEPT;
    use parking_lot::Mutex;

    use super::*;

    fn shell(script: &str) -> Command {
        Command::new("sh", ["-c", script], Duration::from_secs(60))
    }

    fn alive(pid: &str) -> bool {
        // A zombie has ended too, though nobody has asked how.
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
        stat.is_ok_and(|stat| !stat.contains(") Z "))
    }

    async fn until(what: &str, condition: impl Fn() -> bool) {
        let wait = async {
            while !condition() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        timeout(Duration::from_secs(30), wait).await.unwrap_or_else(|_| panic!("no {what}"));
    }

    #[tokio::test]
    async fn a_command_gets_its_input_and_environment_and_says_how_it_ended() {
        let check = r#"test "$(cat)" = "the input" && test "$COLOR" = blue"#;
        let command = shell(check).variable("COLOR", "blue");
        command.run(b"the input").await.unwrap();
        let error = command.run(b"another").await.unwrap_err();
        assert_eq!(error.to_string(), "it ended with exit code 1");
        let error = shell("echo out; echo first >&2; echo why >&2; exit 3").run(b"").await;
        assert_eq!(error.unwrap_err().to_string(), "it ended with exit code 3: first\nwhy");
        let error = shell("kill -s KILL $$").run(b"").await.unwrap_err();
        assert_eq!(error.to_string(), "it ended with signal 9");
        let error = Command::new("./no-such-program", [], REST).run(b"").await.unwrap_err();
        assert_eq!(error.to_string(), "cannot start ./no-such-program");
    }

    #[tokio::test]
    async fn more_input_and_output_than_a_pipe_holds_is_no_standstill() {
        let input = vec![b'x'; 1 << 20];
        let flood =
            r#"test "$(cat | tee /dev/stderr | wc -c)" = 1048576 && echo the end >&2; exit 1"#;
        let error = shell(flood).run(&input).await.unwrap_err().to_string();
        assert!(error.ends_with("the end") && error.contains(": …xxx"), "{error:.80}");
        assert!(error.len() < KEPT + 100, "{} bytes", error.len());
        shell("exit 0").run(&input).await.expect("it need not read it");
    }

    #[tokio::test]
    async fn when_the_time_is_up_all_of_it_is_killed() {
        let folder = tempfile::tempdir().unwrap();
        let pid = folder.path().join("pid");
        let script = format!("sleep 600 & echo $! >{}; echo stuck >&2; wait", pid.display());
        let command = Command::new("sh", ["-c", &script], Duration::from_secs(3));
        let error = command.run(b"").await.unwrap_err().to_string();
        assert_eq!(error, "it took longer than 3s and was killed: stuck");
        let pid = std::fs::read_to_string(pid).unwrap();
        until("end of the child", || !alive(&pid)).await;
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn when_it_is_said_to_be_killed_nothing_of_it_is_left_in_any_session() {
        let many = "for n in 1 2 3 4 5 6 7 8; do setsid sleep 600 & echo $! >&2; done; wait";
        let left = |told: &Told| {
            let pids = told.log.lock().clone();
            assert_eq!(pids.len(), 8);
            pids.into_iter().filter(|pid| alive(pid)).count()
        };
        let told = Told::default();
        let command = Command::new("sh", ["-c", many], Duration::from_secs(2));
        let killed = command.run_watched(b"", &told).await.unwrap_err();
        assert!(matches!(killed, CommandError::Timeout { .. }), "{killed}");
        assert_eq!(left(&told), 0);

        let told = Told::default();
        let stop = async {
            until("start", || told.log.lock().len() == 8).await;
            &[] as &[Duration]
        };
        shell(many).run_until(b"", &told, stop).await.unwrap();
        assert_eq!(left(&told), 0);
    }

    #[tokio::test]
    async fn a_run_that_is_dropped_is_killed_and_what_it_left_by_itself_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let pid = folder.path().join("pid");
        let read = || std::fs::read_to_string(&pid).unwrap_or_default();
        let script = format!("sleep 600 & echo $! >{}; wait", pid.display());
        let run = tokio::spawn(async move { shell(&script).run(b"").await });
        until("start", || read().ends_with('\n')).await;
        run.abort();
        until("end of the child", || !alive(&read())).await;

        std::fs::remove_file(&pid).unwrap();
        let script = format!("sleep 600 & echo $! >{}; exit 7", pid.display());
        assert!(shell(&script).run(b"").await.is_err());
        assert!(alive(&read()), "it ended by itself, so nothing of it is killed");
        std::process::Command::new("kill").arg(read().trim()).status().unwrap();
    }

    /// Writes down what it is told.
    #[derive(Default)]
    struct Told {
        progress: Mutex<Vec<(f64, Option<String>)>>,
        log: Mutex<Vec<String>>,
        lines: Mutex<Vec<String>>,
    }

    impl Watch for Told {
        fn progress(&self, progress: f64, message: Option<&str>) {
            self.progress.lock().push((progress, message.map(str::to_owned)));
        }

        fn log(&self, line: &str) {
            self.log.lock().push(line.to_owned());
        }

        fn line(&self, line: &str) {
            self.lines.lock().push(line.to_owned());
        }
    }

    #[tokio::test]
    async fn progress_and_the_last_result_are_heard_and_other_lines_are_told_as_they_are() {
        let said = r#"
            {"progress": 0.25, "message": "a \u00e4", "more": [1]}
            starting
              {"progress": -3, "message": 7}
            [0.5, "a list"]
            {"progress": NaN}
            {"progress": 1e999}
            {"progress": "0.5"}
            {"progress": null}
            {"message": "no progress"}
            {"result": "first"}
            {"progress": 17, "result": {"b": 1.0, "a": [ ]}}
            {"result": "not the
            {"progress": 0.75}"#;
        let told = Told::default();
        let result = shell("cat").run_watched(said.as_bytes(), &told).await.unwrap().unwrap();
        assert_eq!(result.get(), r#"{"b": 1.0, "a": [ ]}"#);
        let progress = std::mem::take(&mut *told.progress.lock());
        let message = Some("a ä".to_owned());
        assert_eq!(progress, [(0.25, message), (0.0, None), (1.0, None), (0.75, None)]);
        let lines = std::mem::take(&mut *told.lines.lock());
        let lines: Vec<&str> = lines.iter().map(|line| line.trim()).collect();
        let unheard = ["", "starting", r#"[0.5, "a list"]"#, r#"{"progress": NaN}"#];
        assert_eq!(lines, [&unheard[..], &[r#"{"result": "not the"#]].concat());

        let null = shell("cat").run_watched(b"{\"result\": 1}\n{\"result\": null}", &told).await;
        assert_eq!(null.unwrap().unwrap().get(), "null");
        assert!(shell("echo").run_watched(b"", &told).await.unwrap().is_none());
        let failed = shell("cat; exit 1").run_watched(br#"{"result": 1}"#, &told).await;
        assert_eq!(failed.unwrap_err().to_string(), "it ended with exit code 1");

        let long = format!(r#"{{"progress": 0, "message": "{}"}}"#, "ä".repeat(5000));
        shell("cat").run_watched(long.as_bytes(), &told).await.unwrap();
        assert_eq!(told.progress.lock()[0].1.as_ref().unwrap(), &"ä".repeat(512));
    }

    #[tokio::test]
    async fn a_line_is_told_while_the_command_runs() {
        let told = Told::default();
        let script = r#"echo '{"progress": 0.5}'; echo one >&2; sleep 600"#;
        let command = shell(script);
        tokio::select! {
            ended = command.run_watched(b"", &told) => panic!("{ended:?}"),
            () = until("line", || !told.log.lock().is_empty() && !told.progress.lock().is_empty()) => {}
        }
        assert_eq!(*told.log.lock(), ["one"]);
    }

    #[tokio::test]
    async fn what_is_asked_to_end_has_its_time_and_is_then_killed() {
        let waits = [Duration::from_millis(100), Duration::from_secs(60)];
        let begun = |told: &Told| !told.log.lock().is_empty();
        // The first time is not heard.
        let script = "n=0; trap 'n=$((n+1)); [ $n = 2 ] && echo bye >&2 && exit 5' TERM; \
                      echo here >&2; while :; do sleep 0.01; done";
        let told = Told::default();
        let stop = async {
            until("start", || begun(&told)).await;
            &waits[..]
        };
        shell(script).run_until(b"", &told, stop).await.unwrap();
        let log = told.log.lock().clone(); // the shell may tell of what it waited for
        assert_eq!((log[0].as_str(), log[log.len() - 1].as_str()), ("here", "bye"));

        let told = Told::default();
        let deaf = shell("trap '' TERM; sleep 600 & echo $! >&2; wait; sleep 600");
        let stop = async {
            until("start", || begun(&told)).await;
            &waits[..1]
        };
        deaf.run_until(b"", &told, stop).await.unwrap();
        let pid = told.log.lock()[0].clone();
        until("end of the child", || !alive(&pid)).await;

        // One that ends by itself is as good or bad as ever.
        let error = shell("exit 3").run_until(b"", &told, pending()).await.unwrap_err();
        assert_eq!(error.to_string(), "it ended with exit code 3");
    }

    #[tokio::test]
    async fn lines_of_any_length_and_bytes_are_told_in_bounded_pieces() {
        let told = Told::default();
        let input = [&b"a\r\n\n\xff\n"[..], &"ä".repeat(5000).into_bytes(), b"\nlast"].concat();
        let error = shell("cat >&2; exit 2").run_watched(&input, &told).await.unwrap_err();
        assert!(error.to_string().ends_with("ä\nlast"), "{error:.40}");
        let log = std::mem::take(&mut *told.log.lock());
        assert_eq!(log[..3], ["a", "", "\u{fffd}"]);
        assert_eq!(log[3..6].concat(), "ä".repeat(5000));
        assert!(log.iter().all(|line| line.len() <= 4096), "a long piece");
        assert_eq!(log[6..], ["last"]);

        // One byte more than the limit: the piece before ends between two characters.
        let input = format!("x{}", "ä".repeat(2048));
        shell("cat >&2").run_watched(input.as_bytes(), &told).await.unwrap();
        assert_eq!(std::mem::take(&mut *told.log.lock()).concat(), input);
        // Exactly the limit: no empty rest.
        shell("cat >&2").run_watched(&[b'x'; 4097][..4096], &told).await.unwrap();
        assert_eq!(*told.log.lock(), ["x".repeat(4096)]);
    }

    #[tokio::test]
    async fn a_line_of_stdout_without_an_end_is_ignored_and_what_follows_it_is_heard() {
        let told = Told::default();
        let script = r#"echo '{"result": 1}'; printf '{"result": "%05000000d"}\n' 0; cat"#;
        let result = shell(script).run_watched(b"{\"progress\": 1}", &told).await.unwrap();
        assert_eq!(result.unwrap().get(), "1");
        assert_eq!(*told.progress.lock(), [(1.0, None)]);
    }

    #[tokio::test]
    async fn what_is_left_in_the_background_does_not_hold_up_a_watched_command() {
        let told = Told::default();
        let script = r#"sleep 600 & echo $! >&2; echo '{"result": 1}'"#;
        let result = shell(script).run_watched(b"", &told).await.unwrap();
        assert_eq!(result.unwrap().get(), "1");
        let pid = told.log.lock()[0].clone();
        assert!(alive(&pid), "it goes on");
        std::process::Command::new("kill").arg(pid).status().unwrap();
    }
}
