//! What the batch in the writer has changed so far and nobody may see yet.
//!
//! It lies over the index: the writer's closures read through it, so each sees those before it. A
//! closure that is undone takes its part back; the rest is published when it is durable, or dropped.

use std::collections::BTreeMap;
use std::hash::BuildHasher as _;
use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use hashbrown::hash_table::Entry;
use hashbrown::{DefaultHashBuilder, HashTable};
use rusqlite::Connection;
use vedetta_core::{KeyRange, Revision};
use vedetta_db::rusqlite;

use crate::codec;
use crate::index::{Found, Index};
use crate::{Event, KeyValue, LeaseId};

#[derive(Debug, Default)]
pub(crate) struct Pending {
    /// The newest revision given out, published or not.
    pub(crate) revision: Revision,
    /// The compaction mark, published or not.
    pub(crate) compacted: Revision,
    /// The events of the batch, in order.
    pub(crate) events: Vec<Event>,
    /// For each event, where the index had its key.
    places: Vec<Option<usize>>,
    /// For each event, the one before it that changed the same key in this batch.
    earlier: Vec<Option<usize>>,
    /// The last event of each key of the batch, found by its key.
    keys: HashTable<usize>,
    hasher: DefaultHashBuilder,
    /// Leases of the batch, in order.
    pub(crate) leases: Vec<LeaseChange>,
    /// The rows of the batch: where in `encoded` each lies.
    rows: Vec<(Revision, Range<usize>)>,
    encoded: Vec<u8>,
    /// Where the running closure started.
    unit: Mark,
    /// Where the batch started.
    batch: Mark,
}

/// What a durable batch changed.
pub(crate) struct Batch {
    pub(crate) events: Vec<Event>,
    /// For each event, where the index had its key when it was recorded.
    pub(crate) places: Vec<Option<usize>>,
    pub(crate) leases: Vec<LeaseChange>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Mark {
    revision: Revision,
    compacted: Revision,
    events: usize,
    leases: usize,
    rows: usize,
}

#[derive(Debug, Clone)]
pub(crate) enum LeaseChange {
    Granted { id: LeaseId, ttl: Duration, tree: bool },
    Renewed { id: LeaseId },
    Ended { id: LeaseId },
}

impl Pending {
    pub(crate) fn new(revision: Revision, compacted: Revision) -> Self {
        let mark = Mark { revision, compacted, ..Mark::default() };
        Self { revision, compacted, unit: mark, batch: mark, ..Self::default() }
    }

    fn mark(&self) -> Mark {
        Mark {
            revision: self.revision,
            compacted: self.compacted,
            events: self.events.len(),
            leases: self.leases.len(),
            rows: self.rows.len(),
        }
    }

    /// `place` is where the index has the key, if it has it.
    pub(crate) fn record(&mut self, event: Event, at: Option<usize>) {
        self.places.push(at);
        let place = self.events.len();
        let (events, hasher) = (&self.events, &self.hasher);
        let hash = |key: &[u8]| hasher.hash_one(key);
        let same = |&other: &usize| events[other].key() == event.key();
        let earlier = match self.keys.entry(hash(event.key()), same, |&p| hash(events[p].key())) {
            Entry::Occupied(mut last) => Some(std::mem::replace(last.get_mut(), place)),
            Entry::Vacant(free) => {
                free.insert(place);
                None
            }
        };
        self.earlier.push(earlier);
        self.events.push(event);
    }

    /// Turns the events from `first` on into the row of `revision`.
    pub(crate) fn seal(&mut self, revision: Revision, first: usize) {
        let start = self.encoded.len();
        codec::encode(revision, &self.events[first..], &mut self.encoded);
        self.rows.push((revision, start..self.encoded.len()));
    }

    /// Appends the rows of the batch to the file.
    pub(crate) fn store(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        if self.rows.is_empty() {
            return Ok(());
        }
        let sql = "INSERT INTO event (revision, body) VALUES (?1, ?2)";
        let mut insert = connection.prepare_cached(sql)?;
        for (revision, place) in self.rows.drain(..) {
            insert.execute((revision.0.cast_signed(), &self.encoded[place]))?;
        }
        self.encoded.clear();
        Ok(())
    }

    /// Closure done, its changes stand.
    pub(crate) fn keep(&mut self) {
        self.unit = self.mark();
    }

    /// Closure undone.
    pub(crate) fn undo(&mut self) {
        while self.events.len() > self.unit.events {
            let (Some(event), Some(earlier)) = (self.events.pop(), self.earlier.pop()) else {
                break;
            };
            let (place, hash) = (self.events.len(), self.hasher.hash_one(event.key()));
            let Ok(mut last) = self.keys.find_entry(hash, |&other| other == place) else {
                continue;
            };
            match earlier {
                Some(earlier) => *last.get_mut() = earlier,
                None => drop(last.remove()),
            }
        }
        if let Some((_, first)) = self.rows.get(self.unit.rows) {
            self.encoded.truncate(first.start);
            self.rows.truncate(self.unit.rows);
        }
        self.places.truncate(self.unit.events);
        self.leases.truncate(self.unit.leases);
        self.revision = self.unit.revision;
        self.compacted = self.unit.compacted;
    }

    /// Batch durable: hands out what is to be shown.
    pub(crate) fn take(&mut self) -> Batch {
        // The next batch will most likely be about as large.
        let room = Vec::with_capacity(self.events.len());
        let events = std::mem::replace(&mut self.events, room);
        let leases = std::mem::take(&mut self.leases);
        let places = std::mem::take(&mut self.places);
        self.clear();
        self.unit = self.mark();
        self.batch = self.unit;
        Batch { events, places, leases }
    }

    /// Batch lost.
    pub(crate) fn discard(&mut self) {
        self.clear();
        self.revision = self.batch.revision;
        self.compacted = self.batch.compacted;
        self.unit = self.batch;
    }

    fn clear(&mut self) {
        self.keys.clear();
        self.earlier.clear();
        self.places.clear();
        self.events.clear();
        self.leases.clear();
        self.rows.clear();
        self.encoded.clear();
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
        let hash = self.hasher.hash_one(key);
        match self.keys.find(hash, |&place| self.events[place].key() == key) {
            Some(&place) => self.events[place].now().cloned(),
            None => index.now(at?).cloned(),
        }
    }

    /// The last event of a key in this batch at or before `at`.
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

    /// All keys of `range` as of `at`, in order.
    pub(crate) fn collect(&self, index: &Index, range: &KeyRange, at: Revision) -> Vec<Found> {
        let mut touched: BTreeMap<&[u8], Option<Found>> = BTreeMap::new();
        for &last in &self.keys {
            let key = self.events[last].key();
            if range.contains(key)
                && let Some(event) = self.event_at(last, at)
            {
                touched.insert(key, event.now().cloned().map(Found::Here));
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
        let here = self.keys.iter().filter_map(|&last| self.events[last].now());
        let attached = here.filter(|now| now.lease() == Some(lease));
        keys.extend(attached.map(|now| Bytes::copy_from_slice(now.key())));
        keys.sort_unstable();
        keys.dedup();
        keys.retain(|key| self.latest(index, key).is_some_and(|now| now.lease() == Some(lease)));
        keys
    }

    /// Whether a lease exists as far as this batch knows; `None` when it did not touch it.
    pub(crate) fn lease(&self, id: LeaseId) -> Option<bool> {
        self.leases.iter().rev().find_map(|change| match change {
            LeaseChange::Granted { id: other, .. } if *other == id => Some(true),
            LeaseChange::Ended { id: other } if *other == id => Some(false),
            _ => None,
        })
    }

    /// If this batch grants a lease: for how long, and whether what is below its keys goes with them.
    pub(crate) fn granted(&self, id: LeaseId) -> Option<(Duration, bool)> {
        self.leases.iter().rev().find_map(|change| match *change {
            LeaseChange::Granted { id: other, ttl, tree } if other == id => Some((ttl, tree)),
            _ => None,
        })
    }

    /// The first key of `range` as the next closure should see it, without walking the whole of it.
    pub(crate) fn first(&self, index: &Index, range: &KeyRange) -> Option<KeyValue> {
        let changed = self.events.iter().filter(|event| range.contains(event.key()));
        let ours = changed.filter_map(|event| self.latest(index, event.key()));
        let ours = ours.min_by(|a, b| a.key().cmp(b.key()));
        let published = index.first(range, |key| self.latest(index, key));
        ours.into_iter().chain(published).min_by(|a, b| a.key().cmp(b.key()))
    }

    /// Whether this batch gives a lease a new deadline, by renewing it or by granting it anew.
    pub(crate) fn extends(&self, id: LeaseId) -> bool {
        self.leases.iter().any(|change| match change {
            LeaseChange::Granted { id: other, .. } | LeaseChange::Renewed { id: other } => {
                *other == id
            }
            LeaseChange::Ended { .. } => false,
        })
    }
}
