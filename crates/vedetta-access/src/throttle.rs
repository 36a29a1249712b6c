//! How often somebody may try.
//!
//! ```text
//!  try ──► fewer than `most` in the last `window`? ──► go on, and count it
//!                        └── no ──► wait until the oldest is out of the window
//! ```

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Names and peers that are remembered. With more of them the whole world tries, and everybody waits.
const KEYS: usize = 10_000;

/// Counts tries, of each key for itself.
#[derive(Debug)]
pub struct Throttle {
    most: usize,
    window: Duration,
    tries: HashMap<String, Vec<Instant>>,
}

impl Throttle {
    /// `most` tries within `window`.
    pub fn new(most: usize, window: Duration) -> Self {
        Self { most, window, tries: HashMap::new() }
    }

    /// Counts a try for all of these keys, or says how long to wait, and counts none.
    pub fn attempt(&mut self, keys: &[String], now: Instant) -> Result<(), Duration> {
        let (most, window) = (self.most, self.window);
        let is_recent = |at: &Instant| now.saturating_duration_since(*at) < window;
        for key in keys {
            if let Some(tries) = self.tries.get_mut(key) {
                tries.retain(is_recent);
                if tries.len() >= most
                    && let Some(oldest) = tries.first()
                {
                    return Err(window.saturating_sub(now.saturating_duration_since(*oldest)));
                }
            }
        }
        if self.tries.len() + keys.len() > KEYS {
            self.tries.retain(|_, tries| tries.last().is_some_and(is_recent));
            if self.tries.len() + keys.len() > KEYS {
                return Err(window);
            }
        }
        for key in keys {
            self.tries.entry(key.clone()).or_default().push(now);
        }
        Ok(())
    }

    /// The last try of these keys was right, and does not count.
    pub fn forgive(&mut self, keys: &[String]) {
        for key in keys {
            if let Some(tries) = self.tries.get_mut(key) {
                tries.pop();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_tries_a_minute_for_each_key() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut throttle = Throttle::new(5, Duration::from_secs(60));
        let key = |name: &str| vec![name.to_owned()];
        for second in 0..5 {
            assert_eq!(throttle.attempt(&key("a"), at(second)), Ok(()));
        }
        assert_eq!(throttle.attempt(&key("a"), at(10)), Err(Duration::from_secs(50)));
        assert_eq!(throttle.attempt(&key("b"), at(10)), Ok(()), "another is not held up");
        // Either is enough to be held up, and then neither counts.
        let both = ["b".to_owned(), "a".to_owned()];
        for _ in 0..9 {
            assert!(throttle.attempt(&both, at(11)).is_err());
        }
        assert_eq!(throttle.attempt(&key("b"), at(11)), Ok(()));
        assert_eq!(throttle.attempt(&key("a"), at(60)), Ok(()), "the first is out of the window");
        assert_eq!(throttle.attempt(&key("a"), at(60)), Err(Duration::from_secs(1)));
    }

    #[test]
    fn a_right_one_does_not_count_and_the_memory_is_bounded() {
        let start = Instant::now();
        let mut throttle = Throttle::new(1, Duration::from_secs(60));
        let anna = vec!["anna".to_owned()];
        for _ in 0..9 {
            assert_eq!(throttle.attempt(&anna, start), Ok(()));
            throttle.forgive(&anna);
        }
        for number in 0..3 * KEYS {
            let _ = throttle.attempt(&[number.to_string()], start);
        }
        assert!(throttle.tries.len() <= KEYS);
        let later = start + Duration::from_secs(60);
        assert_eq!(throttle.attempt(&anna, later), Ok(()), "there is room again");
        assert_eq!(throttle.tries.len(), 1);
    }
}
