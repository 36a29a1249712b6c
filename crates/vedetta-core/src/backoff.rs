use std::time::Duration;

use crate::Moment;

/// How long to wait after a failure: twice as long each time, up to a limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Backoff {
    /// After the first failure.
    pub first: Duration,
    /// At most.
    pub most: Duration,
    /// The share of a delay, from 0 to 1, that is left to chance: 0.2 makes 10 s anything from 8 s to
    /// 10 s. Many that failed together then do not come back together.
    pub jitter: f64,
}

impl Default for Backoff {
    /// 100 ms, 200 ms, 400 ms … 6.4 s, 10 s, 10 s, always exactly.
    fn default() -> Self {
        Self { first: Duration::from_millis(100), most: Duration::from_secs(10), jitter: 0.0 }
    }
}

impl Backoff {
    /// The wait after `failures` failures before this one. `chance` is from 0 to 1 and matters only
    /// where there is jitter.
    pub fn delay(&self, failures: u32, chance: f64) -> Duration {
        let factor = 1_u32.checked_shl(failures).unwrap_or(u32::MAX);
        let delay = self.first.saturating_mul(factor).min(self.most);
        let left = 1.0 - self.jitter.clamp(0.0, 1.0) * chance.clamp(0.0, 1.0);
        if left < 1.0 { delay.mul_f64(left) } else { delay }
    }
}

/// What became of a key's runs, as far as the next one depends on it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tries {
    failures: u32,
    not_before: Moment,
}

impl Tries {
    /// A run ended badly `now`: when to try again.
    pub fn failed(&mut self, now: Moment, backoff: &Backoff, chance: f64) -> Moment {
        let again = now + backoff.delay(self.failures, chance);
        self.failures = self.failures.saturating_add(1);
        self.not_before = again.min(now + backoff.first);
        again
    }

    /// A run ended well.
    pub fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// What is wanted changed: the next wait is the first again. When to run: at once, but a key that
    /// failed not before the first wait is over, so that changes cannot make it a busy loop.
    pub fn changed(&mut self, now: Moment) -> Moment {
        self.failures = 0;
        self.earliest(now)
    }

    /// The earliest it may run.
    pub fn earliest(&self, now: Moment) -> Moment {
        now.max(self.not_before)
    }

    /// Failures since the last success or change.
    pub fn failures(&self) -> u32 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_doubles_from_100_ms_to_10_s_and_stays_there() {
        let waits = [100, 200, 400, 800, 1_600, 3_200, 6_400, 10_000, 10_000];
        let backoff = Backoff::default();
        for (failures, wait) in (0..).zip(waits) {
            assert_eq!(backoff.delay(failures, 0.7), Duration::from_millis(wait), "{failures}");
        }
        for failures in [31, 32, 33, 63, 64, 65, u32::MAX] {
            assert_eq!(backoff.delay(failures, 0.0), Duration::from_secs(10), "{failures}");
        }
        let endless = Backoff { first: Duration::MAX, most: Duration::MAX, jitter: 0.0 };
        assert_eq!(endless.delay(u32::MAX, 0.0), Duration::MAX);
    }

    #[test]
    fn jitter_only_shortens_a_wait_and_by_its_share_at_most() {
        let backoff = Backoff { jitter: 0.2, ..Backoff::default() };
        assert_eq!(backoff.delay(9, 0.0), Duration::from_secs(10));
        assert_eq!(backoff.delay(9, 0.5), Duration::from_secs(9));
        assert_eq!(backoff.delay(9, 1.0), Duration::from_secs(8));
        assert_eq!(backoff.delay(9, 7.0), Duration::from_secs(8));
    }

    #[test]
    fn a_change_resets_the_counter_but_brings_a_failing_key_no_nearer_than_the_first_wait() {
        let (backoff, at) = (Backoff::default(), Moment::from_millis);
        let mut tries = Tries::default();
        assert_eq!(tries.changed(at(3)), at(3));
        for (now, again) in [(1_000, 1_100), (2_000, 2_200), (3_000, 3_400)] {
            assert_eq!(tries.failed(at(now), &backoff, 0.0), at(again));
        }
        assert_eq!(tries.changed(at(3_010)), at(3_100));
        assert_eq!(tries.changed(at(3_020)), at(3_100), "a second change neither");
        assert_eq!(tries.changed(at(3_300)), at(3_300));
        assert_eq!(tries.failures(), 0);
        assert_eq!(tries.failed(at(4_000), &backoff, 0.0), at(4_100), "the first wait again");
        tries.succeeded();
        assert_eq!(tries.changed(at(4_001)), at(4_001));
    }
}
