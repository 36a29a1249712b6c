use std::time::{Duration, Instant, SystemTime};

/// The time that is stored: the wall clock of the start plus what went by since, in milliseconds since 1970.
/// A clock that is set meanwhile neither ends a lease nor brings work forward.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    wall: i64,
    started: Instant,
}

impl Clock {
    /// From now on.
    pub fn start() -> Self {
        Self { wall: Self::at(SystemTime::now()), started: Instant::now() }
    }

    /// Now.
    pub fn now(&self) -> i64 {
        self.wall.saturating_add(Self::millis(self.started.elapsed()))
    }

    /// After a delay.
    pub fn after(&self, delay: Duration) -> i64 {
        self.now().saturating_add(Self::millis(delay))
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
