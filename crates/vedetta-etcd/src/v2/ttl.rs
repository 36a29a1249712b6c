//! Times to live. Each is a lease of its own, and the lease's id has the moment in it when it should end: so
//! events of long ago still know it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use vedetta_kv::LeaseId;

/// The bit of an id that says that there is a moment in it. The store does not set it in ids that it chooses; a client of
/// v3 that does, or that chooses one below 0, has its lease taken for one of ours.
const HAS_MOMENT: i64 = 1 << 62;
/// Bits of an id that keep those of the same moment apart.
const RANDOM_BITS: u32 = 20;
/// The same in ids of older files. They are negative, which `etcdctl` takes for options.
const OLD_RANDOM_BITS: u32 = 21;
/// The last moment that has room in an id: in the year 2109.
const LAST_MS: u64 = (1 << (62 - RANDOM_BITS)) - 1;
/// How far the lease may be from what its id says before the lease is believed: it does not count the time
/// in which the store was stopped.
const DRIFT_MS: u64 = 1_000;

/// When a node goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Expiry {
    at_ms: u64,
    /// Seconds left.
    pub(crate) ttl: i64,
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The time to live that `seconds` asks for; `None` when it would end after etcd's time, which is for ever.
pub(crate) fn lasting(seconds: u64) -> Option<Duration> {
    let end = now_ms().checked_add(seconds.checked_mul(1000)?)?;
    (end <= i64::MAX.cast_unsigned() / 1_000_000).then(|| Duration::from_secs(seconds))
}

/// An id for a lease that begins now. If it is taken, ask for another: there always is one. A lease that ends when there is no
/// room for the moment has none in its id.
pub(crate) fn lease_id(ttl: Duration) -> LeaseId {
    let end = now_ms().saturating_add(whole_ms(ttl));
    let bits = end << RANDOM_BITS | fastrand::u64(..1 << RANDOM_BITS);
    let id =
        if end > LAST_MS { fastrand::i64(1..HAS_MOMENT) } else { HAS_MOMENT | bits.cast_signed() };
    LeaseId::new(id).expect("it is not zero")
}

fn end_in(id: LeaseId) -> Option<u64> {
    match id.get() {
        old @ ..0 => Some((!old).cast_unsigned() >> OLD_RANDOM_BITS),
        ours @ HAS_MOMENT.. => Some((ours - HAS_MOMENT).cast_unsigned() >> RANDOM_BITS),
        _ => None,
    }
}

/// When a key with this lease goes or, if the lease is gone, was to go. `remaining` is what is left of it.
pub(crate) fn expiry(id: LeaseId, remaining: Option<Duration>) -> Option<Expiry> {
    let now = now_ms();
    let Some(left) = remaining else {
        let at_ms = end_in(id)?;
        return Some(Expiry { at_ms, ttl: seconds(at_ms.saturating_sub(now)) });
    };
    let real = now.saturating_add(whole_ms(left));
    let said = end_in(id).filter(|said| said.abs_diff(real) < DRIFT_MS);
    let up = u64::from(left.subsec_nanos() > 0);
    let ttl = i64::try_from(left.as_secs() + up).unwrap_or(i64::MAX);
    Some(Expiry { at_ms: said.unwrap_or(real), ttl })
}

/// Begun seconds count.
fn seconds(ms: u64) -> i64 {
    i64::try_from(ms.div_ceil(1000)).unwrap_or(i64::MAX)
}

impl Expiry {
    /// As Go writes it.
    pub(crate) fn timestamp(self) -> String {
        timestamp(UNIX_EPOCH + Duration::from_millis(self.at_ms))
    }
}

/// A moment as Go writes it: no zeros at the end of the fraction.
pub(crate) fn timestamp(at: SystemTime) -> String {
    let full = humantime::format_rfc3339_nanos(at).to_string();
    let (seconds, fraction) = full.trim_end_matches('Z').split_once('.').unwrap_or((&full, ""));
    match fraction.trim_end_matches('0') {
        "" => format!("{seconds}Z"),
        fraction => format!("{seconds}.{fraction}Z"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_lease_tells_when_it_ends_also_when_it_is_gone() {
        let ttl = Duration::from_secs(100);
        let (before, id, after) = (now_ms(), lease_id(ttl), now_ms());
        let gone = expiry(id, None).unwrap();
        assert!((before + 100_000..=after + 100_000).contains(&gone.at_ms));
        assert_eq!(expiry(id, Some(ttl)).unwrap(), Expiry { at_ms: gone.at_ms, ttl: 100 });
        let late = expiry(id, Some(2 * ttl)).unwrap();
        assert!(late.at_ms >= before + 200_000, "a store that was stopped in between");
        assert_eq!(late.ttl, 200);
        assert_eq!(expiry(id, Some(ttl / 3)).unwrap().ttl, 34);
        assert!(id.get() > 0, "a client can say it: {}", id.get());
        let old = LeaseId::new(!(gone.at_ms << OLD_RANDOM_BITS | 7).cast_signed()).unwrap();
        assert_eq!(expiry(old, None).unwrap().at_ms, gone.at_ms, "one of an older file");
        assert_eq!(expiry(LeaseId::new(5).unwrap(), None), None, "not one of ours");
        assert!(expiry(LeaseId::new(5).unwrap(), Some(ttl)).is_some());
    }

    #[test]
    fn there_is_no_end_of_ids_for_what_lasts_beyond_the_last_moment() {
        let ttl = Duration::from_secs(7_000_000_000);
        let some = (1 << RANDOM_BITS) + 1;
        let ids: HashSet<_> = (0..some).map(|_| lease_id(ttl)).collect();
        assert!(ids.len() > some - 100, "{} of {some}", ids.len());
        for id in ids.into_iter().take(100) {
            assert_eq!(expiry(id, None), None, "nothing is made up");
            assert_eq!(expiry(id, Some(ttl)).unwrap().ttl, 7_000_000_000);
        }
    }

    #[test]
    fn what_etcd_cannot_count_is_for_ever() {
        assert_eq!(lasting(0), Some(Duration::ZERO));
        assert!(lasting(5_000_000_000).is_some());
        for seconds in [8_000_000_000, 99_999_999_999, u64::MAX] {
            assert_eq!(lasting(seconds), None);
        }
    }

    #[test]
    fn timestamps_are_gos() {
        for (ms, expected) in [
            (0, "1970-01-01T00:00:00Z"),
            (1_500, "1970-01-01T00:00:01.5Z"),
            (1_045, "1970-01-01T00:00:01.045Z"),
        ] {
            assert_eq!(Expiry { at_ms: ms, ttl: 0 }.timestamp(), expected);
        }
    }
}
