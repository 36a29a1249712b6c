use std::ops::Add;
use std::time::Duration;

/// A point in time: whole milliseconds since whoever keeps the clock began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Moment(u64);

impl Moment {
    /// When the clock began.
    pub const ZERO: Self = Self(0);

    /// That many milliseconds after the beginning.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis)
    }

    /// Milliseconds since the beginning.
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// The last whole millisecond of a clock that shows `elapsed`.
    pub fn reached(elapsed: Duration) -> Self {
        Self(u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX))
    }

    /// How far away this is from `now`, nothing if it is past.
    pub fn since(self, now: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(now.0))
    }
}

/// Later by a duration, rounded up: what waits is never early.
impl Add<Duration> for Moment {
    type Output = Self;

    fn add(self, delay: Duration) -> Self {
        let millis = delay.as_nanos().div_ceil(1_000_000);
        Self(self.0.saturating_add(u64::try_from(millis).unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delay_is_rounded_up_and_a_clock_down() {
        let start = Moment::from_millis(5);
        assert_eq!(start + Duration::from_micros(1), Moment::from_millis(6));
        assert_eq!(start + Duration::from_millis(2), Moment::from_millis(7));
        assert_eq!(start + Duration::MAX, Moment::from_millis(u64::MAX));
        assert_eq!(Moment::reached(Duration::from_micros(5_999)), start);
        assert_eq!(Moment::ZERO.since(start), Duration::ZERO);
    }
}
