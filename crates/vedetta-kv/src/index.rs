//! Every key, its current value, and the revisions it was changed in.
//!
//! ```text
//! put(2) put(5) delete(7) put(9) on "k", nothing compacted:      older [2 5 7x]   head: the value of 9
//! compacted at 6: what is visible at 6 stays                     older [5 7x]     head: the value of 9
//! compacted at 8: at 8 the key is gone, so nothing older stays   older []         head: the value of 9
//! ```

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasher as _;
use std::ops::Bound;

use bytes::Bytes;
use hashbrown::{DefaultHashBuilder, HashTable};
use parking_lot::Mutex;
use slab::Slab;
use vedetta_core::{KeyRange, Revision};

use crate::{Change, Event, KeyValue};

/// Keys looked at together when one is enough.
const FEW: usize = 16;

/// The published state. Readers hold its lock for a bounded number of keys at a time.
///
/// A key is found by its hash, which costs the same however many there are; the trees are for order, and
/// touched only when a key comes or goes.
#[derive(Debug, Default)]
pub(crate) struct Index {
    chains: Slab<Chain>,
    by_key: HashTable<usize>,
    /// The keys that exist now.
    in_order: BTreeMap<Box<[u8]>, usize>,
    /// Those that only have a history. Apart, so that nobody who asks for the present walks over them.
    gone: BTreeMap<Box<[u8]>, usize>,
    hasher: DefaultHashBuilder,
    walks: Mutex<Walks>,
    /// How many keys exist now.
    pub(crate) existing: usize,
    /// The newest revision published.
    pub(crate) revision: Revision,
    /// The oldest revision that can be read or watched from.
    pub(crate) compacted: Revision,
}

/// Those who read the present a part at a time, and the values that were replaced before they came there.
#[derive(Debug, Default)]
struct Walks {
    /// By the revision that they see.
    seeing: BTreeMap<Revision, Seeing>,
    /// What they may still come to, by the key's place and the revision of the value.
    replaced: HashMap<(usize, Revision), KeyValue>,
}

#[derive(Debug, Default)]
struct Seeing {
    walks: usize,
    /// What these may come to, and none that began later.
    kept: Vec<(usize, Revision)>,
}

impl Walks {
    /// Keeps a value that is replaced, if somebody may come to it.
    fn keep(&mut self, place: usize, value: &KeyValue) {
        let Some(mut newest) = self.seeing.last_entry() else { return };
        if value.modified() <= *newest.key() {
            let what = (place, value.modified());
            self.replaced.insert(what, value.clone());
            newest.get_mut().kept.push(what);
        }
    }

    /// One that sees `at` has ended. Returns what nobody can come to any more.
    fn end(&mut self, at: Revision) -> Vec<KeyValue> {
        let Entry::Occupied(mut seeing) = self.seeing.entry(at) else { return Vec::new() };
        seeing.get_mut().walks -= 1;
        if seeing.get().walks > 0 {
            return Vec::new();
        }
        let mut done = Vec::new();
        for what in seeing.remove().kept {
            match self.seeing.range_mut(what.1..at).next_back() {
                Some((_, older)) => older.kept.push(what),
                None => done.extend(self.replaced.remove(&what)),
            }
        }
        if self.replaced.is_empty() {
            self.replaced = HashMap::new();
        }
        done
    }
}

/// The life of one key.
#[derive(Debug)]
struct Chain {
    /// The last change.
    stamp: Stamp,
    /// The key now; when it is gone, nothing but its name.
    head: KeyValue,
    /// Earlier changes, oldest first.
    older: Vec<Stamp>,
}

/// A revision in which a key changed, and whether it was deleted then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp(u64);

impl Stamp {
    fn of(event: &Event) -> Self {
        Self(event.revision.0 << 1 | u64::from(matches!(event.change, Change::Delete { .. })))
    }
    fn revision(self) -> Revision {
        Revision(self.0 >> 1)
    }
    fn gone(self) -> bool {
        self.0 & 1 == 1
    }
}

fn head(change: &Change) -> KeyValue {
    match change {
        Change::Put(now) => now.clone(),
        Change::Delete { key, .. } => KeyValue::bare(key),
    }
}

/// A key as of some revision.
#[derive(Debug, Clone)]
pub(crate) enum Found {
    /// Its value is in memory.
    Here(KeyValue),
    /// Its value is in the row of that revision.
    InRow(Bytes, Revision),
}

impl Chain {
    fn new(event: &Event) -> Self {
        Self { stamp: Stamp::of(event), head: head(&event.change), older: Vec::new() }
    }

    fn push(&mut self, event: &Event) {
        self.older.push(self.stamp);
        self.stamp = Stamp::of(event);
        self.head = head(&event.change);
    }

    fn now(&self) -> Option<&KeyValue> {
        (!self.stamp.gone()).then_some(&self.head)
    }

    /// The key as of revision `at`; `None` when it did not exist then.
    fn at(&self, at: Revision) -> Option<Found> {
        if self.stamp.revision() <= at {
            return self.now().cloned().map(Found::Here);
        }
        self.in_row(self.last_before(at.next())?)
    }

    fn in_row(&self, stamp: Stamp) -> Option<Found> {
        let key = || Bytes::copy_from_slice(self.head.key());
        (!stamp.gone()).then(|| Found::InRow(key(), stamp.revision()))
    }

    fn exists_at(&self, at: Revision) -> bool {
        if self.stamp.revision() <= at {
            return !self.stamp.gone();
        }
        self.last_before(at.next()).is_some_and(|stamp| !stamp.gone())
    }

    /// The last earlier change before `revision`.
    fn last_before(&self, revision: Revision) -> Option<Stamp> {
        let count = self.older.partition_point(|stamp| stamp.revision() < revision);
        self.older[..count].last().copied()
    }
}

impl Index {
    /// Where a key is. A guess, from an earlier look, saves the search when it is still right.
    pub(crate) fn place(&self, key: &[u8], guess: Option<usize>) -> Option<usize> {
        if let Some(guess) = guess
            && self.chains.get(guess).is_some_and(|chain| chain.head.key() == key)
        {
            return Some(guess);
        }
        let hash = self.hasher.hash_one(key);
        self.by_key.find(hash, |&place| self.chains[place].head.key() == key).copied()
    }

    fn chain(&self, key: &[u8]) -> Option<&Chain> {
        self.place(key, None).map(|place| &self.chains[place])
    }

    /// The key at a place, now.
    pub(crate) fn now(&self, place: usize) -> Option<&KeyValue> {
        self.chains.get(place)?.now()
    }

    /// The key as of revision `at`.
    pub(crate) fn get_at(&self, key: &[u8], at: Revision) -> Option<Found> {
        self.found(self.place(key, None)?, at)
    }

    /// The key at a place as of revision `at`.
    fn found(&self, place: usize, at: Revision) -> Option<Found> {
        let found = self.chains[place].at(at)?;
        let Found::InRow(_, revision) = &found else { return Some(found) };
        let kept = self.walks.lock().replaced.get(&(place, *revision)).cloned();
        Some(kept.map_or(found, Found::Here))
    }

    /// Makes an event part of the state.
    pub(crate) fn apply(&mut self, event: &Event, guess: Option<usize>) {
        let (key, exists) = (event.key(), event.now().is_some());
        let (place, existed) = self.push(event, guess);
        let (mut here, mut there) = (&mut self.in_order, &mut self.gone);
        if !exists {
            std::mem::swap(&mut here, &mut there);
        }
        match existed {
            None => drop(here.insert(Box::from(key), place)),
            Some(existed) if existed != exists => here.extend(there.remove_entry(key)),
            Some(_) => {}
        }
    }

    /// The same without keeping the order, for loading: [`Index::set_order`] must follow.
    pub(crate) fn apply_unordered(&mut self, event: &Event) {
        self.push(event, None);
    }

    /// Puts all keys in order.
    pub(crate) fn set_order(&mut self) {
        let all = |exist: bool| {
            let chains = self.chains.iter().filter(move |(_, chain)| chain.stamp.gone() != exist);
            chains.map(|(place, chain)| (Box::from(chain.head.key()), place)).collect()
        };
        (self.in_order, self.gone) = (all(true), all(false));
    }

    /// Returns the place of the key and, if it had one before, whether it existed then.
    fn push(&mut self, event: &Event, guess: Option<usize>) -> (usize, Option<bool>) {
        self.existing += usize::from(event.now().is_some());
        if let Some(place) = self.place(event.key(), guess) {
            let chain = &mut self.chains[place];
            let replaced = chain.now();
            if let Some(replaced) = replaced {
                self.existing -= 1;
                self.walks.get_mut().keep(place, replaced);
            }
            let existed = replaced.is_some();
            chain.push(event);
            return (place, Some(existed));
        }
        let place = self.chains.insert(Chain::new(event));
        let (chains, hasher) = (&self.chains, &self.hasher);
        let hash = |key: &[u8]| hasher.hash_one(key);
        self.by_key.insert_unique(hash(event.key()), place, |&p| hash(chains[p].head.key()));
        (place, None)
    }

    /// Visits the keys of `range` that exist at `at`, in order from `from` on, looking at `most` at
    /// most. Returns where to go on, if there is more.
    pub(crate) fn visit(
        &self,
        range: &KeyRange,
        from: Option<&[u8]>,
        at: Revision,
        most: usize,
        mut visit: impl FnMut(Visit<'_>),
    ) -> Option<Box<[u8]>> {
        let (start, end) = range.bounds()?;
        let bounds = (from.map_or(start, Bound::Included), end);
        let mut here = self.in_order.range::<[u8], _>(bounds).peekable();
        let past = at < self.revision;
        let gone = past.then(|| self.gone.range::<[u8], _>(bounds));
        let mut gone = gone.into_iter().flatten().peekable();
        let keys = std::iter::from_fn(|| match (here.peek(), gone.peek()) {
            (Some((here, _)), Some((key, _))) if key < here => gone.next(),
            (None, _) => gone.next(),
            _ => here.next(),
        });
        for (seen, (key, &place)) in keys.enumerate() {
            if seen == most {
                return Some(key.clone());
            }
            let chain = &self.chains[place];
            if chain.exists_at(at) {
                visit(Visit { index: self, key, place, at });
            }
        }
        None
    }

    /// Has what is replaced from now on kept in memory for one who reads the present a part at a time.
    /// [`Index::end_walk`] must follow.
    pub(crate) fn begin_walk(&self) -> Revision {
        self.walks.lock().seeing.entry(self.revision).or_default().walks += 1;
        self.revision
    }

    /// Returns what was kept for it: to be dropped when the index is let go.
    #[must_use]
    pub(crate) fn end_walk(&self, at: Revision) -> Vec<KeyValue> {
        self.walks.lock().end(at)
    }

    /// What `look` finds at the first key of `range` where it finds something. Not all of them are
    /// looked at.
    pub(crate) fn first<T>(
        &self,
        range: &KeyRange,
        mut look: impl FnMut(&[u8]) -> Option<T>,
    ) -> Option<T> {
        let (mut found, mut from) = (None, None);
        loop {
            from = self.visit(range, from.as_deref(), self.revision, FEW, |visit| {
                if found.is_none() {
                    found = look(visit.key());
                }
            });
            if found.is_some() || from.is_none() {
                return found;
            }
        }
    }

    /// Where the value is that a key had before the event of `revision`, if it is still kept.
    pub(crate) fn before(&self, key: &[u8], revision: Revision) -> Option<Found> {
        let chain = self.chain(key)?;
        chain.in_row(chain.last_before(revision)?)
    }

    /// The change of `key` before the one in `revision`, whatever it was.
    pub(crate) fn change_before(&self, key: &[u8], revision: Revision) -> Option<Revision> {
        self.chain(key)?.last_before(revision).map(Stamp::revision)
    }

    /// Forgets what `key` was before `revision`; and the key itself if it was deleted then for good.
    pub(crate) fn forget(&mut self, key: &[u8], revision: Revision, drop_tombstone: bool) {
        let Some(place) = self.place(key, None) else { return };
        let chain = &mut self.chains[place];
        let keep_from = if drop_tombstone { revision.next() } else { revision };
        chain.older.retain(|stamp| stamp.revision() >= keep_from);
        chain.older.shrink_to_fit();
        if chain.stamp.gone() && chain.stamp.revision() < keep_from {
            let hash = self.hasher.hash_one(key);
            if let Ok(entry) = self.by_key.find_entry(hash, |&other| other == place) {
                entry.remove();
            }
            self.gone.remove(key);
            self.chains.remove(place);
        }
    }

    /// Every key that exists now, in no order.
    pub(crate) fn live(&self) -> impl Iterator<Item = &KeyValue> {
        self.chains.iter().filter_map(|(_, chain)| chain.now())
    }

    /// How many keys are in memory, deleted ones with a history included.
    pub(crate) fn len(&self) -> usize {
        self.chains.len()
    }
}

/// A key met on a walk.
pub(crate) struct Visit<'a> {
    index: &'a Index,
    key: &'a [u8],
    place: usize,
    at: Revision,
}

impl Visit<'_> {
    pub(crate) fn key(&self) -> &[u8] {
        self.key
    }

    pub(crate) fn found(&self) -> Found {
        self.index.found(self.place, self.at).expect("only keys that exist are visited")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cause;
    use crate::Stamps;

    /// `"2 5 7x 9"`: puts in 2, 5 and 9, a delete in 7.
    fn index(life: &str) -> Index {
        let mut index = Index::default();
        live(&mut index, "k", life);
        index
    }

    fn live(index: &mut Index, key: &'static str, life: &str) {
        for word in life.split_whitespace() {
            let gone = word.ends_with('x');
            let revision = Revision(word.trim_end_matches('x').parse().unwrap());
            let change = if gone {
                Change::Delete { key: key.into(), cause: Cause::Asked }
            } else {
                let stamps = Stamps { modified: revision, ..Stamps::default() };
                Change::Put(KeyValue::new(stamps, key.as_bytes(), b"v"))
            };
            index.apply(&Event { revision, change, previous: None, tag: 0 }, None);
            index.revision = index.revision.max(revision);
        }
    }

    fn seen(index: &Index, at: u64) -> Option<u64> {
        index.get_at(b"k", Revision(at)).map(|found| match found {
            Found::Here(now) => now.modified().0,
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

    #[test]
    fn what_is_replaced_before_a_walk_comes_there_stays_in_memory_until_it_ends() {
        let mut index = Index::default();
        let lives = [("a", "2"), ("b", "3"), ("c", "4"), ("d", "5")];
        lives.into_iter().for_each(|(key, life)| live(&mut index, key, life));
        let (first, second) = (index.begin_walk(), index.begin_walk());
        live(&mut index, "a", "6 7");
        live(&mut index, "b", "8x");
        let third = index.begin_walk();
        live(&mut index, "b", "9");
        live(&mut index, "c", "10");
        live(&mut index, "a", "11");
        live(&mut index, "e", "12 13");
        let held = |index: &Index, at| {
            let mut held = Vec::new();
            index.visit(&KeyRange::all(), None, at, 99, |visit| {
                held.push(match visit.found() {
                    Found::Here(now) => now.modified().to_string(),
                    Found::InRow(_, revision) => format!("({revision})"),
                });
            });
            held.join(" ")
        };
        assert_eq!((first, second, third), (Revision(5), Revision(5), Revision(8)));
        assert_eq!((held(&index, first), held(&index, third)), ("2 3 4 5".into(), "7 4 5".into()));
        assert_eq!(index.end_walk(first).len(), 0, "the second still sees it");
        assert_eq!(held(&index, second), "2 3 4 5");
        assert_eq!(
            index.end_walk(second).len(),
            2,
            "what the third does not see: a of 2 and b of 3"
        );
        assert_eq!(
            (held(&index, second), held(&index, third)),
            ("(2) (3) 4 5".into(), "7 4 5".into())
        );
        assert_eq!(index.end_walk(third).len(), 2);
        live(&mut index, "d", "14");
        let walks = index.walks.get_mut();
        assert!(walks.seeing.is_empty() && walks.replaced.is_empty());
    }

    #[test]
    fn a_long_walk_keeps_nothing_that_only_short_ones_could_come_to() {
        let mut index = index("2");
        live(&mut index, "other", "3");
        let long = index.begin_walk();
        for revision in 4..99_u64 {
            let short = index.begin_walk();
            live(&mut index, "k", &revision.to_string());
            let kept = usize::from(revision != 4);
            assert_eq!(index.end_walk(short).len(), kept, "the value of {}", revision - 1);
        }
        assert_eq!(index.walks.get_mut().replaced.len(), 1, "what the long one sees");
        assert_eq!(index.end_walk(long).len(), 1);
    }

    #[test]
    fn the_present_is_walked_without_what_is_gone_and_the_past_with_it() {
        let mut index = Index::default();
        let lives = [("a", "2 9x"), ("b", "3"), ("c", "4x"), ("d", "5 6x 7"), ("e", "8 10x")];
        for (key, life) in lives {
            live(&mut index, key, life);
        }
        for _ in 0..2 {
            for (at, expected) in
                [(2, "a"), (5, "abd"), (6, "ab"), (8, "abde"), (9, "bde"), (10, "bd"), (99, "bd")]
            {
                let (mut keys, mut from) = (Vec::new(), None);
                loop {
                    let visit = |visit: Visit<'_>| keys.extend_from_slice(visit.key());
                    from = index.visit(&KeyRange::all(), from.as_deref(), Revision(at), 2, visit);
                    if from.is_none() {
                        break;
                    }
                }
                assert_eq!(keys, expected.as_bytes(), "at {at}");
            }
            let mut looks = 0;
            let more = index.visit(&KeyRange::all(), None, index.revision, 2, |_| looks += 1);
            assert_eq!((looks, more), (2, None), "no other is walked over");
            index.set_order(); // as after loading
        }
        index.forget(b"a", Revision(9), true);
        assert_eq!((index.gone.len(), index.in_order.len(), index.len()), (2, 2, 4));
    }
}
