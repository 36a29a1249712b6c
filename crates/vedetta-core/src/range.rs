use std::fmt;
use std::ops::Bound;

use bytes::Bytes;

/// Where a walk starts and ends.
type Bounds<K> = (Bound<K>, Bound<K>);

/// A set of keys that lie next to each other in byte order.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum KeyRange {
    /// One key.
    One(Bytes),
    /// From the first key (included) to the second (excluded). Empty when they are not in order.
    Between(Bytes, Bytes),
    /// A key and everything after it.
    From(Bytes),
}

impl KeyRange {
    /// Every key there is.
    pub const fn all() -> Self {
        Self::From(Bytes::new())
    }

    /// Every key that starts with `prefix`.
    pub fn prefix(prefix: impl Into<Bytes>) -> Self {
        let prefix = prefix.into();
        match successor(&prefix) {
            Some(end) => Self::Between(prefix, end),
            None => Self::From(prefix),
        }
    }

    /// The first key that could be in it.
    pub fn start(&self) -> &Bytes {
        match self {
            Self::One(start) | Self::Between(start, _) | Self::From(start) => start,
        }
    }

    /// What of it lies after `key`.
    #[must_use]
    pub fn after(&self, key: &[u8]) -> Self {
        let start = [key, b"\0"].concat().into();
        match self {
            Self::One(_) => Self::Between(Bytes::new(), Bytes::new()),
            Self::Between(_, end) => Self::Between(start, end.clone()),
            Self::From(_) => Self::From(start),
        }
    }

    /// Whether `key` is in it.
    pub fn contains(&self, key: &[u8]) -> bool {
        match self {
            Self::One(only) => only == key,
            Self::Between(start, end) => &start[..] <= key && key < &end[..],
            Self::From(start) => &start[..] <= key,
        }
    }

    /// Whether no key can be in it.
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Between(start, end) if start >= end)
    }

    /// Whether some key could be in both.
    pub fn overlaps(&self, other: &Self) -> bool {
        let starts_before_end = |a: &Self, b: &Self| match b {
            Self::One(only) => a.start() <= only,
            Self::Between(_, end) => a.start() < end,
            Self::From(_) => true,
        };
        !self.is_empty()
            && !other.is_empty()
            && starts_before_end(self, other)
            && starts_before_end(other, self)
    }

    /// The prefix whose keys these are, if it is such a set.
    pub fn as_prefix(&self) -> Option<&Bytes> {
        match self {
            Self::Between(start, end) => (successor(start).as_ref() == Some(end)).then_some(start),
            Self::From(start) => start.iter().all(|&b| b == u8::MAX).then_some(start),
            Self::One(_) => None,
        }
    }

    /// The bounds for a walk over an ordered map; `None` when it is empty (such a walk would panic).
    pub fn bounds(&self) -> Option<Bounds<&[u8]>> {
        match self {
            _ if self.is_empty() => None,
            Self::One(only) => Some((Bound::Included(only), Bound::Included(only))),
            Self::Between(start, end) => Some((Bound::Included(start), Bound::Excluded(end))),
            Self::From(start) => Some((Bound::Included(start), Bound::Unbounded)),
        }
    }
}

/// The first key after all that start with `prefix`; `None` when there is none.
fn successor(prefix: &[u8]) -> Option<Bytes> {
    let last = prefix.iter().rposition(|&b| b != u8::MAX)?;
    let mut end = prefix[..=last].to_vec();
    end[last] += 1;
    Some(end.into())
}

impl fmt::Debug for KeyRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.as_prefix(), self) {
            (Some(prefix), _) => write!(f, "{prefix:?}…"),
            (None, Self::One(only)) => write!(f, "{only:?}"),
            (None, Self::Between(start, end)) => write!(f, "{start:?}..{end:?}"),
            (None, Self::From(start)) => write!(f, "{start:?}.."),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn between(a: &'static str, b: &'static str) -> KeyRange {
        KeyRange::Between(a.into(), b.into())
    }

    #[test]
    fn a_range_holds_just_its_keys() {
        for (range, inside, outside) in [
            (KeyRange::One("b".into()), vec!["b"], vec!["a", "b0", ""]),
            (between("b", "d"), vec!["b", "b9", "c"], vec!["a", "d", ""]),
            (between("d", "b"), vec![], vec!["a", "b", "c", "d"]),
            (KeyRange::prefix("b/"), vec!["b/", "b/x"], vec!["b", "b0", "c"]),
            (KeyRange::From("b".into()), vec!["b", "z"], vec!["a", ""]),
            (KeyRange::all(), vec!["", "a", "\u{7f}"], vec![]),
        ] {
            for key in inside {
                assert!(range.contains(key.as_bytes()), "{key:?} is in {range:?}");
            }
            for key in outside {
                assert!(!range.contains(key.as_bytes()), "{key:?} is not in {range:?}");
            }
        }
    }

    #[test]
    fn a_prefix_of_highest_bytes_has_no_end() {
        let range = KeyRange::prefix(vec![0xff, 0xff]);
        assert_eq!(range, KeyRange::From(vec![0xff, 0xff].into()));
        assert!(range.contains(&[0xff, 0xff, 0]) && !range.contains(&[0xff, 0xfe]));
        assert_eq!(
            KeyRange::prefix(vec![1, 0xff]),
            KeyRange::Between(vec![1, 0xff].into(), vec![2].into())
        );
    }

    #[test]
    fn a_prefix_is_recognised_again() {
        for prefix in [&b""[..], b"a", b"/rooms/", &[7, 0xff], &[0xff]] {
            let range = KeyRange::prefix(prefix.to_vec());
            assert_eq!(range.as_prefix().map(|p| &p[..]), Some(prefix));
        }
        assert_eq!(between("a", "c").as_prefix(), None);
        assert_eq!(KeyRange::From("a".into()).as_prefix(), None);
        assert_eq!(KeyRange::One("a".into()).as_prefix(), None);
    }

    #[test]
    fn ranges_overlap_when_some_key_fits_both() {
        let one = |k: &'static str| KeyRange::One(k.into());
        for (a, b, expected) in [
            (one("a"), one("a"), true),
            (one("a"), one("b"), false),
            (one("b"), between("a", "c"), true),
            (one("c"), between("a", "c"), false),
            (between("a", "c"), between("b", "d"), true),
            (between("a", "b"), between("b", "c"), false),
            (between("b", "a"), KeyRange::all(), false),
            (KeyRange::From("m".into()), between("a", "m"), false),
            (KeyRange::From("m".into()), between("a", "n"), true),
        ] {
            assert_eq!(a.overlaps(&b), expected, "{a:?} and {b:?}");
            assert_eq!(b.overlaps(&a), expected, "{b:?} and {a:?}");
        }
    }
}
