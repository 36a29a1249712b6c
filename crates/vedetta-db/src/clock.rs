use std::time::{Duration, Instant, SystemTime};

use rusqlite::{Connection, OptionalExtension as _};

/// The time that is stored: the wall clock of the start plus what went by since, in milliseconds since 1970.
/// A clock that is set meanwhile neither ends a lease nor brings work forward. Nor does one that is set back between
/// two runs of the program hold work up, or bring a command back to life: the clock of a file goes on where it
/// stood, until the machine is restarted.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    wall: i64,
    started: Instant,
}

/// What the machine tells beside the wall clock.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Machine {
    /// Differs after each start of it.
    boot: String,
    /// Milliseconds since then.
    up: i64,
}

/// How exactly it tells how long it is up.
const GRAIN: i64 = 10;
/// A wall clock that is ahead by less is being brought into line, and was not set.
const AHEAD: i64 = 1_000;

impl Machine {
    /// Linux tells.
    fn ask() -> Option<Self> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let up = std::fs::read_to_string("/proc/uptime").ok()?;
        let (seconds, hundredths) = up.split_whitespace().next()?.split_once('.')?;
        let up = seconds.parse::<i64>().ok()? * 1000 + hundredths.parse::<i64>().ok()? * GRAIN;
        Some(Self { boot: boot.trim().to_owned(), up })
    }
}

/// What a file remembers: at these times the machine was up for so long.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Anchor {
    machine: Machine,
    wall: i64,
    steady: i64,
}

/// With what to begin, and what is to be remembered from now on.
fn begin(wall: i64, machine: &Machine, last: Option<&Anchor>) -> (Anchor, bool) {
    let is_same =
        |last: &&Anchor| last.machine.boot == machine.boot && last.machine.up <= machine.up;
    let now = |wall, steady| Anchor { machine: machine.clone(), wall, steady };
    let Some(last) = last.filter(is_same) else { return (now(wall, wall), true) };
    let went_by = (machine.up - last.machine.up).saturating_add(GRAIN);
    let (walls, steady) = (last.wall.saturating_add(went_by), last.steady.saturating_add(went_by));
    if wall > walls.saturating_add(AHEAD) {
        return (now(wall, steady), true);
    }
    (now(wall.max(walls), steady), false)
}

impl Clock {
    /// From now on.
    pub fn start() -> Self {
        Self { wall: Self::at(SystemTime::now()), started: Instant::now() }
    }

    /// Those of a file: that of times, and a steady one for how long ago something was, which is never set while the
    /// machine runs.
    pub(crate) fn of(file: &Connection) -> rusqlite::Result<(Self, Self)> {
        let clock = Self::start();
        let Some(machine) = Machine::ask() else { return Ok((clock, clock)) };
        let sql = "SELECT boot, up, wall, steady FROM vedetta_clock";
        let last = file.query_row(sql, [], |row| {
            let machine = Machine { boot: row.get(0)?, up: row.get(1)? };
            Ok(Anchor { machine, wall: row.get(2)?, steady: row.get(3)? })
        });
        let (now, is_new) = begin(clock.wall, &machine, last.optional()?.as_ref());
        if is_new {
            let tx = file.unchecked_transaction()?;
            tx.execute("DELETE FROM vedetta_clock", [])?;
            let sql = "INSERT INTO vedetta_clock (boot, up, wall, steady) VALUES (?1, ?2, ?3, ?4)";
            tx.execute(sql, (&machine.boot, machine.up, now.wall, now.steady))?;
            tx.commit()?;
        }
        if now.wall > clock.wall.saturating_add(AHEAD) {
            let behind = Self::delay(now.wall.saturating_sub(clock.wall));
            tracing::warn!(
                ?behind,
                "the clock was set back: times go on from where they were until the machine is restarted"
            );
        }
        Ok((Self { wall: now.wall, ..clock }, Self { wall: now.steady, ..clock }))
    }

    /// Now.
    pub fn now(&self) -> i64 {
        self.wall.saturating_add(Self::millis(self.started.elapsed()))
    }

    /// After a delay.
    pub fn after(&self, delay: Duration) -> i64 {
        self.now().saturating_add(Self::millis(delay))
    }

    /// How long it is until then; nothing if it is. Not in whole milliseconds, as a difference of two times is.
    pub fn until(&self, at: i64) -> Duration {
        let Ok(whole @ 1..) = u64::try_from(at.saturating_sub(self.wall)) else {
            return Duration::ZERO;
        };
        // Rounded up, a millisecond begins when the one before it is over.
        let begins = Duration::from_millis(whole - 1) + Duration::from_nanos(1);
        begins.saturating_sub(self.started.elapsed())
    }

    /// How it stores a time.
    pub fn at(time: SystemTime) -> i64 {
        match time.duration_since(SystemTime::UNIX_EPOCH) {
            Ok(since) => Self::millis(since),
            Err(before) => -Self::millis(before.duration()),
        }
    }

    /// The time that it stored.
    pub fn time(millis: i64) -> SystemTime {
        let since = Duration::from_millis(millis.unsigned_abs());
        let time = if millis < 0 {
            SystemTime::UNIX_EPOCH.checked_sub(since)
        } else {
            SystemTime::UNIX_EPOCH.checked_add(since)
        };
        time.unwrap_or(SystemTime::UNIX_EPOCH)
    }

    /// Rounded up: nothing is early.
    pub fn millis(delay: Duration) -> i64 {
        i64::try_from(delay.as_nanos().div_ceil(1_000_000)).unwrap_or(i64::MAX)
    }

    /// The delay of so many; none if it is over.
    pub fn delay(millis: i64) -> Duration {
        Duration::from_millis(u64::try_from(millis).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_until_a_millisecond_is_over_when_it_begins() {
        let started = Instant::now().checked_sub(Duration::from_micros(2_700)).unwrap();
        let clock = Clock { wall: 1_000, started };
        assert!(clock.now() >= 1_003);
        for over in [i64::MIN, 0, 1_000, 1_002, 1_003] {
            assert_eq!(clock.until(over), Duration::ZERO, "{over}");
        }
        let hour = clock.until(1_000 + 3_600_000);
        // It began 2.7 ms ago, and a millisecond begins when the one before it is over.
        let most = Duration::from_millis(3_600_000 - 1) - Duration::from_micros(2_699);
        assert!(hour < most && hour + Duration::from_secs(60) > most, "{hour:?}");
        assert!(clock.until(i64::MAX) > 1_000_000 * hour);

        let next = clock.now() + 2;
        let left = clock.until(next);
        assert!(left <= Duration::from_millis(2), "{left:?}");
        std::thread::sleep(left);
        assert!(clock.now() >= next && clock.until(next).is_zero());
    }

    #[test]
    fn a_clock_that_was_set_back_goes_on_until_the_machine_is_restarted_and_a_steady_one_either_way()
     {
        const HOUR: i64 = 3_600_000;
        let at = |boot: &str, up| Machine { boot: boot.into(), up };
        let last = Some(Anchor { machine: at("a", 1_000), wall: 50 * HOUR, steady: 40 * HOUR });
        let later = || at("a", HOUR + 1_000);
        for (what, wall, machine, last, times) in [
            ("the first time", 50 * HOUR, at("a", 1_000), &None, (50 * HOUR, 50 * HOUR, true)),
            ("nothing was set", 51 * HOUR, later(), &last, (51 * HOUR + 10, 41 * HOUR + 10, false)),
            (
                "a little ahead",
                51 * HOUR + 900,
                later(),
                &last,
                (51 * HOUR + 900, 41 * HOUR + 10, false),
            ),
            ("set back", 50 * HOUR, later(), &last, (51 * HOUR + 10, 41 * HOUR + 10, false)),
            ("set forward", 60 * HOUR, later(), &last, (60 * HOUR, 41 * HOUR + 10, true)),
            ("another start of the machine", 7, at("b", HOUR), &last, (7, 7, true)),
            ("a file from elsewhere", 7, at("a", 500), &last, (7, 7, true)),
        ] {
            let (now, is_new) = begin(wall, &machine, last.as_ref());
            assert_eq!((now.wall, now.steady, is_new), times, "{what}");
            assert_eq!(now.machine, machine);
        }
    }

    #[test]
    fn this_machine_tells_how_long_it_is_up() {
        let (first, second) = (Machine::ask().unwrap(), Machine::ask().unwrap());
        assert!(first.boot == second.boot && first.up > 0 && first.up <= second.up);
    }
}
