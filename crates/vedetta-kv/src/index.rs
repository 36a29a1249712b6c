//! Every key, its current value, and the revisions it was changed in.
//!
//! ```text
//! put(2) put(5) delete(7) put(9) on "k", nothing compacted:      older [2 5 7x]   head: the value of 9
//! compacted at 6: what is visible at 6 stays                     older [5 7x]     head: the value of 9
//! compacted at 8: at 8 the key is gone, so nothing older stays   older []         head: the value of 9
//! ```

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use bytes::Bytes;
use vedetta_core::{KeyRange, Revision};

use crate::{Change, Event, KeyValue};

/// The published state. Readers hold its lock for a bounded number of keys at a time.
#[derive(Debug, Default)]
pub(crate) struct Index {
    keys: BTreeMap<Bytes, Chain>,
    /// How many of them exist now.
    existing: usize,
    /// The newest revision published.
    pub(crate) revision: Revision,
    /// The oldest revision that can be read or watched from.
    pub(crate) compacted: Revision,
}

/// The life of one key.
#[derive(Debug)]
pub(crate) struct Chain {
    head: Head,
    /// Earlier changes, oldest first. Boxed: most keys have none, and a key should be small.
    #[expect(clippy::box_collection, reason = "8 bytes instead of 24 in every key")]
    older: Option<Box<Vec<Stamp>>>,
}

#[derive(Debug, Clone)]
enum Head {
    Live(Arc<KeyValue>),
    Gone(Revision),
}

/// A revision in which a key changed, and whether it was deleted then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp(u64);

impl Stamp {
    fn new(revision: Revision, gone: bool) -> Self {
        Self(revision.0 << 1 | u64::from(gone))
    }
    fn revision(self) -> Revision {
        Revision(self.0 >> 1)
    }
    fn gone(self) -> bool {
        self.0 & 1 == 1
    }
}

impl Head {
    fn of(change: &Change, revision: Revision) -> Self {
        match change {
            Change::Put(now) => Self::Live(Arc::clone(now)),
            Change::Delete { .. } => Self::Gone(revision),
        }
    }
    fn stamp(&self) -> Stamp {
        match self {
            Self::Live(now) => Stamp::new(now.modified, false),
            Self::Gone(revision) => Stamp::new(*revision, true),
        }
    }
}

/// A key as of some revision.
#[derive(Debug, Clone)]
pub(crate) enum Found {
    /// Its value is in memory.
    Here(Arc<KeyValue>),
    /// Its value is in the row of that revision.
    InRow(Bytes, Revision),
}

impl Chain {
    pub(crate) fn new(event: &Event) -> Self {
        Self { head: Head::of(&event.change, event.revision), older: None }
    }

    pub(crate) fn push(&mut self, event: &Event) {
        let before = std::mem::replace(&mut self.head, Head::of(&event.change, event.revision));
        self.older.get_or_insert_default().push(before.stamp());
    }

    /// The key as of revision `at`; `None` when it did not exist then.
    fn at(&self, key: &Bytes, at: Revision) -> Option<Found> {
        let head = self.head.stamp();
        if head.revision() <= at {
            return match &self.head {
                Head::Live(now) => Some(Found::Here(Arc::clone(now))),
                Head::Gone(_) => None,
            };
        }
        let stamp = self.last_before(at.next())?;
        (!stamp.gone()).then(|| Found::InRow(key.clone(), stamp.revision()))
    }

    fn exists_at(&self, at: Revision) -> bool {
        let head = self.head.stamp();
        if head.revision() <= at {
            return !head.gone();
        }
        self.last_before(at.next()).is_some_and(|stamp| !stamp.gone())
    }

    /// The last earlier change before `revision`.
    fn last_before(&self, revision: Revision) -> Option<Stamp> {
        let older = self.older.as_deref()?;
        let count = older.partition_point(|stamp| stamp.revision() < revision);
        older[..count].last().copied()
    }
}

impl Index {
    /// For loading: all keys at once.
    pub(crate) fn from_chains(
        keys: BTreeMap<Bytes, Chain>,
        revision: Revision,
        compacted: Revision,
    ) -> Self {
        let mut index = Self { keys, existing: 0, revision, compacted };
        index.existing = index.live().count();
        index
    }

    /// The key now.
    pub(crate) fn get(&self, key: &[u8]) -> Option<&Arc<KeyValue>> {
        match &self.keys.get(key)?.head {
            Head::Live(now) => Some(now),
            Head::Gone(_) => None,
        }
    }

    /// The key as of revision `at`.
    pub(crate) fn get_at(&self, key: &[u8], at: Revision) -> Option<Found> {
        let (key, chain) = self.keys.get_key_value(key)?;
        chain.at(key, at)
    }

    /// Makes an event part of the state.
    pub(crate) fn apply(&mut self, event: &Event) {
        let existed = match self.keys.get_mut(event.key()) {
            Some(chain) => {
                let existed = matches!(chain.head, Head::Live(_));
                chain.push(event);
                existed
            }
            None => {
                self.keys.insert(event.key().clone(), Chain::new(event));
                false
            }
        };
        self.existing += usize::from(event.now().is_some());
        self.existing -= usize::from(existed);
    }

    /// The keys of `range` in order, from `from` on, those that do not exist now included.
    fn walk<'a>(
        &'a self,
        range: &'a KeyRange,
        from: Option<&'a Bytes>,
    ) -> impl Iterator<Item = (&'a Bytes, &'a Chain)> {
        let bounds = range
            .bounds()
            .map(|(start, end)| (from.map_or(start, |from| Bound::Included(&from[..])), end));
        bounds.into_iter().flat_map(|bounds| self.keys.range::<[u8], _>(bounds))
    }

    /// Visits up to `most` keys of `range` that exist at `at`, in order from `from` on. Returns where
    /// to go on, if there is more. It looks at no more than a fixed number of keys in one go.
    pub(crate) fn visit(
        &self,
        range: &KeyRange,
        from: Option<&Bytes>,
        at: Revision,
        most: usize,
        mut visit: impl FnMut(Visit<'_>),
    ) -> Option<Bytes> {
        for (seen, (key, chain)) in self.walk(range, from).enumerate() {
            if seen == most {
                return Some(key.clone());
            }
            if chain.exists_at(at) {
                visit(Visit { key, chain, at });
            }
        }
        None
    }

    /// The value a key had before the event of `revision`, if it is still kept: where it is.
    pub(crate) fn before(&self, key: &[u8], revision: Revision) -> Option<Found> {
        let (key, chain) = self.keys.get_key_value(key)?;
        let stamp = chain.last_before(revision)?;
        (!stamp.gone()).then(|| Found::InRow(key.clone(), stamp.revision()))
    }

    /// The change of `key` before the one in `revision`, whatever it was.
    pub(crate) fn change_before(&self, key: &[u8], revision: Revision) -> Option<Revision> {
        self.keys.get(key)?.last_before(revision).map(Stamp::revision)
    }

    /// Forgets what `key` was before `revision`; and the key itself if it was deleted then for good.
    pub(crate) fn forget(&mut self, key: &[u8], revision: Revision, drop_tombstone: bool) {
        let Some(chain) = self.keys.get_mut(key) else { return };
        let keep_from = if drop_tombstone { revision.next() } else { revision };
        if let Some(older) = &mut chain.older {
            older.retain(|stamp| stamp.revision() >= keep_from);
            if older.is_empty() {
                chain.older = None;
            }
        }
        let head = chain.head.stamp();
        if head.gone() && head.revision() < keep_from {
            self.keys.remove(key);
        }
    }

    /// Every key that exists now.
    pub(crate) fn live(&self) -> impl Iterator<Item = &Arc<KeyValue>> {
        self.keys.values().filter_map(|chain| match &chain.head {
            Head::Live(now) => Some(now),
            Head::Gone(_) => None,
        })
    }

    /// How many keys are in memory, deleted ones with a history included.
    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }

    /// How many keys exist now.
    pub(crate) fn existing(&self) -> usize {
        self.existing
    }
}

/// A key met on a walk.
pub(crate) struct Visit<'a> {
    key: &'a Bytes,
    chain: &'a Chain,
    at: Revision,
}

impl Visit<'_> {
    pub(crate) fn key(&self) -> &Bytes {
        self.key
    }

    pub(crate) fn found(&self) -> Found {
        self.chain.at(self.key, self.at).expect("only keys that exist are visited")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cause;
    use crate::codec::packed;

    /// `"2 5 7x 9"`: puts in 2, 5 and 9, a delete in 7.
    fn index(life: &str) -> Index {
        let mut index = Index::default();
        for word in life.split_whitespace() {
            let gone = word.ends_with('x');
            let revision = Revision(word.trim_end_matches('x').parse().unwrap());
            let change = if gone {
                Change::Delete { key: "k".into(), cause: Cause::Asked }
            } else {
                Change::Put(Arc::new(KeyValue { modified: revision, ..packed(b"k", b"v") }))
            };
            index.apply(&Event { revision, change, previous: None });
        }
        index
    }

    fn seen(index: &Index, at: u64) -> Option<u64> {
        index.get_at(b"k", Revision(at)).map(|found| match found {
            Found::Here(now) => now.modified.0,
            Found::InRow(_, revision) => revision.0,
        })
    }

    #[test]
    fn a_key_is_seen_as_it_was_at_each_revision() {
        let index = index("2 5 7x 9");
        let at = [(1, None), (2, Some(2)), (4, Some(2)), (5, Some(5)), (6, Some(5)), (7, None)];
        for (at, expected) in at.into_iter().chain([(8, None), (9, Some(9)), (99, Some(9))]) {
            assert_eq!(seen(&index, at), expected, "at {at}");
        }
        let before = |revision| index.before(b"k", Revision(revision)).is_some();
        assert!(before(5) && before(7) && !before(9) && !before(2));
    }

    #[test]
    fn what_is_forgotten_is_gone_and_the_rest_stays() {
        let mut kept = index("2 5 7x 9");
        kept.forget(b"k", Revision(5), false);
        assert_eq!((seen(&kept, 4), seen(&kept, 5), seen(&kept, 9)), (None, Some(5), Some(9)));
        kept.forget(b"k", Revision(7), true);
        assert_eq!((seen(&kept, 6), seen(&kept, 8), seen(&kept, 9)), (None, None, Some(9)));

        let mut gone = index("2 5x");
        gone.forget(b"k", Revision(5), false);
        assert_eq!(gone.len(), 1, "a tombstone that can still be watched from stays");
        gone.forget(b"k", Revision(5), true);
        assert_eq!(gone.len(), 0);
    }
}
