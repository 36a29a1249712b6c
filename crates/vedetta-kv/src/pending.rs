//! What the writer has changed and nobody may see yet.
//!
//! It lies over the index: the writer's closures read through it, so each sees those before it. A
//! closure that is undone takes its part back; a batch is sealed when its commit begins, and published
//! when it is durable. Closures of the next batches run meanwhile, over the sealed layers.

use std::collections::{BTreeMap, VecDeque};
use std::hash::BuildHasher as _;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hashbrown::hash_table::Entry;
use hashbrown::{DefaultHashBuilder, HashTable};
use rusqlite::Connection;
use vedetta_core::{KeyRange, Revision};
use vedetta_db::{Rows, rusqlite};

use crate::codec;
use crate::index::{Found, Index};
use crate::{Event, KeyValue, LeaseId};

#[derive(Debug, Default)]
pub(crate) struct Pending {
    /// The newest revision given out, published or not.
    pub(crate) revision: Revision,
    /// The compaction mark, published or not.
    pub(crate) compacted: Revision,
    /// The batch whose closures run now.
    now: Layer,
    /// The batches in commit or being published, the oldest first.
    sealed: VecDeque<Arc<Layer>>,
    hasher: DefaultHashBuilder,
    /// Where the running closure started.
    unit: Mark,
    /// What is published.
    published: Mark,
}

/// The changes of one batch.
#[derive(Debug, Default)]
pub(crate) struct Layer {
    /// The events, in order.
    pub(crate) events: Vec<Event>,
    /// For each event, where the index had its key when it was recorded.
    pub(crate) places: Vec<Option<usize>>,
    /// For each event, the one before it that changed the same key in this batch.
    earlier: Vec<Option<usize>>,
    /// The last event of each key, found by its key.
    keys: HashTable<usize>,
    /// Leases, in order.
    pub(crate) leases: Vec<LeaseChange>,
    /// The rows: where in `encoded` each lies.
    rows: Vec<(Revision, Range<usize>)>,
    encoded: Vec<u8>,
    /// Where the store is after it.
    pub(crate) end: Mark,
}

impl Layer {
    /// The last event of a key.
    fn last(&self, hash: u64, key: &[u8]) -> Option<&Event> {
        let place = self.keys.find(hash, |&place| self.events[place].key() == key)?;
        Some(&self.events[*place])
    }

    /// The last event of each key.
    fn lasts(&self) -> impl Iterator<Item = &Event> {
        self.keys.iter().map(|&last| &self.events[last])
    }

    /// The last event at or before `at` of a key whose last event is at `last`.
    fn event_at(&self, last: usize, at: Revision) -> Option<&Event> {
        let mut place = Some(last);
        while let Some(found) = place {
            let event = &self.events[found];
            if event.revision <= at {
                return Some(event);
            }
            place = self.earlier[found];
        }
        None
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Mark {
    pub(crate) revision: Revision,
    pub(crate) compacted: Revision,
    events: usize,
    leases: usize,
    rows: usize,
}

#[derive(Debug, Clone)]
pub(crate) enum LeaseChange {
    /// `at_ms` is the store's age when it was granted: the file counts from there, the memory from when it is
    /// published.
    Granted {
        id: LeaseId,
        ttl: Duration,
        tree: bool,
        at_ms: i64,
    },
    Renewed {
        id: LeaseId,
    },
    Ended {
        id: LeaseId,
    },
}

impl Pending {
    pub(crate) fn new(revision: Revision, compacted: Revision) -> Self {
        let mark = Mark { revision, compacted, ..Mark::default() };
        Self { revision, compacted, unit: mark, published: mark, ..Self::default() }
    }

    fn mark(&self) -> Mark {
        Mark {
            revision: self.revision,
            compacted: self.compacted,
            events: self.now.events.len(),
            leases: self.now.leases.len(),
            rows: self.now.rows.len(),
        }
    }

    /// How many events the batch has so far.
    pub(crate) fn events(&self) -> usize {
        self.now.events.len()
    }

    /// All events that are not published yet.
    pub(crate) fn changes(&self) -> impl Iterator<Item = &Event> {
        self.layers().flat_map(|layer| &layer.events)
    }

    pub(crate) fn change_lease(&mut self, change: LeaseChange) {
        self.now.leases.push(change);
    }

    /// `at` is where the index has the key, if it has it.
    pub(crate) fn record(&mut self, event: Event, at: Option<usize>) {
        let Layer { events, places, earlier, keys, .. } = &mut self.now;
        places.push(at);
        let place = events.len();
        let hash = |key: &[u8]| self.hasher.hash_one(key);
        let same = |&other: &usize| events[other].key() == event.key();
        earlier.push(match keys.entry(hash(event.key()), same, |&p| hash(events[p].key())) {
            Entry::Occupied(mut last) => Some(std::mem::replace(last.get_mut(), place)),
            Entry::Vacant(free) => {
                free.insert(place);
                None
            }
        });
        events.push(event);
    }

    /// Turns the events from `first` on into the row of `revision`.
    pub(crate) fn encode(&mut self, revision: Revision, first: usize) {
        let Layer { events, rows, encoded, .. } = &mut self.now;
        let start = encoded.len();
        codec::encode(revision, &events[first..], encoded);
        rows.push((revision, start..encoded.len()));
    }

    /// Closure done, its changes stand.
    pub(crate) fn keep(&mut self) {
        self.unit = self.mark();
    }

    /// Closure undone.
    pub(crate) fn undo(&mut self) {
        let now = &mut self.now;
        while now.events.len() > self.unit.events {
            let (Some(event), Some(earlier)) = (now.events.pop(), now.earlier.pop()) else {
                break;
            };
            let (place, hash) = (now.events.len(), self.hasher.hash_one(event.key()));
            let Ok(mut last) = now.keys.find_entry(hash, |&other| other == place) else {
                continue;
            };
            match earlier {
                Some(earlier) => *last.get_mut() = earlier,
                None => drop(last.remove()),
            }
        }
        if let Some((_, first)) = now.rows.get(self.unit.rows) {
            now.encoded.truncate(first.start);
            now.rows.truncate(self.unit.rows);
        }
        now.places.truncate(self.unit.events);
        now.leases.truncate(self.unit.leases);
        self.revision = self.unit.revision;
        self.compacted = self.unit.compacted;
    }

    /// The commit of the batch begins: hands out its rows.
    pub(crate) fn seal(&mut self) -> Rows {
        // The next batch will most likely be about as large.
        let room = Vec::with_capacity(self.now.events.len());
        let mut layer = std::mem::take(&mut self.now);
        self.now.events = room;
        let rows = std::mem::take(&mut layer.rows);
        let encoded = std::mem::take(&mut layer.encoded);
        self.unit = self.mark();
        layer.end = self.unit;
        self.sealed.push_back(Arc::new(layer));
        Rows::new(rows.len(), encoded.len(), move |connection| append(connection, rows, &encoded))
    }

    /// The oldest sealed batch, which is durable and to be shown.
    pub(crate) fn oldest(&self) -> Option<Arc<Layer>> {
        self.sealed.front().cloned()
    }

    /// The oldest sealed batch is shown.
    pub(crate) fn forget_oldest(&mut self) {
        if let Some(shown) = self.sealed.pop_front() {
            self.published = shown.end;
        }
    }

    /// All that is not published is lost.
    pub(crate) fn discard(&mut self) {
        self.now = Layer::default();
        self.sealed.clear();
        self.revision = self.published.revision;
        self.compacted = self.published.compacted;
        self.unit = self.mark();
    }

    /// The key as the next closure should see it.
    pub(crate) fn latest(&self, index: &Index, key: &[u8]) -> Option<KeyValue> {
        self.latest_at(index, key, index.place(key, None))
    }

    /// The same when it is known where the index has the key, if it has it.
    pub(crate) fn latest_at(
        &self,
        index: &Index,
        key: &[u8],
        at: Option<usize>,
    ) -> Option<KeyValue> {
        match self.last(key) {
            Some(event) => event.now().cloned(),
            None => index.now(at?).cloned(),
        }
    }

    /// The last event of a key.
    fn last(&self, key: &[u8]) -> Option<&Event> {
        let hash = self.hasher.hash_one(key);
        self.layers().rev().find_map(|layer| layer.last(hash, key))
    }

    /// The oldest first.
    fn layers(&self) -> impl DoubleEndedIterator<Item = &Layer> {
        self.sealed.iter().map(|layer| &**layer).chain([&self.now])
    }

    /// All keys of `range` as of `at`, in order.
    pub(crate) fn collect(&self, index: &Index, range: &KeyRange, at: Revision) -> Vec<Found> {
        let mut touched: BTreeMap<&[u8], Option<Found>> = BTreeMap::new();
        for layer in self.layers() {
            for &last in &layer.keys {
                let key = layer.events[last].key();
                if range.contains(key)
                    && let Some(event) = layer.event_at(last, at)
                {
                    touched.insert(key, event.now().cloned().map(Found::Here));
                }
            }
        }
        let mut all = Vec::new();
        let mut waiting = touched.into_iter().peekable();
        index.visit(range, None, at, usize::MAX, |visit| {
            while let Some((_, found)) = waiting.next_if(|(key, _)| *key < visit.key()) {
                all.extend(found);
            }
            match waiting.next_if(|(key, _)| *key == visit.key()) {
                Some((_, found)) => all.extend(found),
                None => all.push(visit.found()),
            }
        });
        all.extend(waiting.filter_map(|(_, found)| found));
        all
    }

    /// The keys that have `lease`, given those that had it when last published.
    pub(crate) fn keys_of(
        &self,
        index: &Index,
        lease: LeaseId,
        published: impl IntoIterator<Item = Bytes>,
    ) -> Vec<Bytes> {
        let mut keys: Vec<Bytes> = published.into_iter().collect();
        let here = self.layers().flat_map(Layer::lasts).filter_map(Event::now);
        let attached = here.filter(|now| now.lease() == Some(lease));
        keys.extend(attached.map(|now| Bytes::copy_from_slice(now.key())));
        keys.sort_unstable();
        keys.dedup();
        keys.retain(|key| self.latest(index, key).is_some_and(|now| now.lease() == Some(lease)));
        keys
    }

    /// Lease changes, the last first.
    fn lease_changes(&self) -> impl Iterator<Item = &LeaseChange> {
        self.layers().rev().flat_map(|layer| layer.leases.iter().rev())
    }

    /// Whether a lease exists as far as is known here; `None` when it was not touched.
    pub(crate) fn lease(&self, id: LeaseId) -> Option<bool> {
        self.lease_changes().find_map(|change| match change {
            LeaseChange::Granted { id: other, .. } if *other == id => Some(true),
            LeaseChange::Ended { id: other } if *other == id => Some(false),
            _ => None,
        })
    }

    /// If a lease is granted here: for how long, and whether what is below its keys goes with them.
    pub(crate) fn granted(&self, id: LeaseId) -> Option<(Duration, bool)> {
        self.lease_changes().find_map(|change| match *change {
            LeaseChange::Granted { id: other, ttl, tree, .. } if other == id => Some((ttl, tree)),
            _ => None,
        })
    }

    /// The store's age when the first of the leases was granted that are not published yet.
    pub(crate) fn first_grant_ms(&self) -> Option<i64> {
        let granted = self.lease_changes().filter_map(|change| match *change {
            LeaseChange::Granted { at_ms, .. } => Some(at_ms),
            _ => None,
        });
        granted.min()
    }

    /// The first key of `range` as the next closure should see it, without walking the whole of it.
    pub(crate) fn first(&self, index: &Index, range: &KeyRange) -> Option<KeyValue> {
        let changed =
            self.layers().flat_map(Layer::lasts).filter(|event| range.contains(event.key()));
        let ours = changed.filter_map(|event| self.latest(index, event.key()));
        let ours = ours.min_by(|a, b| a.key().cmp(b.key()));
        let published = index.first(range, |key| self.latest(index, key));
        ours.into_iter().chain(published).min_by(|a, b| a.key().cmp(b.key()))
    }

    /// Whether a lease is given a new deadline, by renewing it or by granting it anew.
    pub(crate) fn extends(&self, id: LeaseId) -> bool {
        self.lease_changes().any(|change| match change {
            LeaseChange::Granted { id: other, .. } | LeaseChange::Renewed { id: other } => {
                *other == id
            }
            LeaseChange::Ended { .. } => false,
        })
    }
}

/// Appends the rows of a batch to the file.
fn append(
    connection: &Connection,
    rows: Vec<(Revision, Range<usize>)>,
    encoded: &[u8],
) -> rusqlite::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let sql = "INSERT INTO event (revision, body) VALUES (?1, ?2)";
    let mut insert = connection.prepare_cached(sql)?;
    for (revision, place) in rows {
        insert.execute((revision.0.cast_signed(), &encoded[place]))?;
    }
    Ok(())
}
