//! What the batch in the writer has changed so far and nobody may see yet.
//!
//! It lies over the index: the writer's closures read through it, so each sees those before it. A
//! closure that is undone takes its part back; the rest is published when it is durable, or dropped.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use vedetta_core::{KeyRange, Revision};

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
    /// Keys of the batch: where in `events` each was changed, oldest first.
    keys: BTreeMap<Bytes, Vec<usize>>,
    /// Leases of the batch, in order.
    pub(crate) leases: Vec<LeaseChange>,
    /// Where the running closure started.
    unit: Mark,
    /// Where the batch started.
    batch: Mark,
    /// The row being encoded; kept for its capacity.
    pub(crate) row: Vec<u8>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Mark {
    revision: Revision,
    compacted: Revision,
    events: usize,
    leases: usize,
}

#[derive(Debug, Clone)]
pub(crate) enum LeaseChange {
    Granted { id: LeaseId, ttl: Duration },
    Renewed { id: LeaseId },
    Ended { id: LeaseId },
}

impl Pending {
    pub(crate) fn new(revision: Revision, compacted: Revision) -> Self {
        let mark = Mark { revision, compacted, events: 0, leases: 0 };
        Self { revision, compacted, unit: mark, batch: mark, ..Self::default() }
    }

    fn mark(&self) -> Mark {
        Mark {
            revision: self.revision,
            compacted: self.compacted,
            events: self.events.len(),
            leases: self.leases.len(),
        }
    }

    pub(crate) fn record(&mut self, event: Event) {
        self.keys.entry(event.key().clone()).or_default().push(self.events.len());
        self.events.push(event);
    }

    /// Closure done, its changes stand.
    pub(crate) fn keep(&mut self) {
        self.unit = self.mark();
    }

    /// Closure undone.
    pub(crate) fn undo(&mut self) {
        for event in self.events.drain(self.unit.events..) {
            if let Some(places) = self.keys.get_mut(event.key()) {
                places.pop();
                if places.is_empty() {
                    self.keys.remove(event.key());
                }
            }
        }
        self.leases.truncate(self.unit.leases);
        self.revision = self.unit.revision;
        self.compacted = self.unit.compacted;
    }

    /// Batch durable: hands out what is to be shown.
    pub(crate) fn take(&mut self) -> (Vec<Event>, Vec<LeaseChange>) {
        self.keys.clear();
        let taken = (std::mem::take(&mut self.events), std::mem::take(&mut self.leases));
        self.unit = self.mark();
        self.batch = self.unit;
        taken
    }

    /// Batch lost.
    pub(crate) fn discard(&mut self) {
        self.keys.clear();
        self.events.clear();
        self.leases.clear();
        self.revision = self.batch.revision;
        self.compacted = self.batch.compacted;
        self.unit = self.batch;
    }

    /// The key as the next closure should see it.
    pub(crate) fn latest(&self, index: &Index, key: &[u8]) -> Option<Arc<KeyValue>> {
        match self.keys.get(key).and_then(|places| places.last()) {
            Some(&place) => self.events[place].now().cloned(),
            None => index.get(key).cloned(),
        }
    }

    /// All keys of `range` as of `at`, in order.
    pub(crate) fn collect(&self, index: &Index, range: &KeyRange, at: Revision) -> Vec<Found> {
        let mut found: BTreeMap<Bytes, Found> = BTreeMap::new();
        let mut plain = Vec::new();
        let touched = range.bounds().is_some_and(|bounds| {
            self.keys.range::<[u8], (Bound<&[u8]>, Bound<&[u8]>)>(bounds).next().is_some()
        });
        index.visit(range, None, at, usize::MAX, |visit| {
            if touched {
                found.insert(visit.key().clone(), visit.found());
            } else {
                plain.push(visit.found());
            }
        });
        if !touched {
            return plain;
        }
        let bounds = range.bounds().expect("a touched range is not empty");
        for (key, places) in self.keys.range::<[u8], _>(bounds) {
            let before = places.iter().rev().find(|&&place| self.events[place].revision <= at);
            match before.map(|&place| self.events[place].now()) {
                Some(Some(now)) => drop(found.insert(key.clone(), Found::Here(Arc::clone(now)))),
                Some(None) => drop(found.remove(key)),
                None => {}
            }
        }
        found.into_values().collect()
    }

    /// The keys that have `lease`, given those that had it when last published.
    pub(crate) fn keys_of(
        &self,
        index: &Index,
        lease: LeaseId,
        published: impl IntoIterator<Item = Bytes>,
    ) -> Vec<Bytes> {
        let mut keys: Vec<Bytes> = published.into_iter().collect();
        keys.extend(self.keys.keys().cloned());
        keys.sort_unstable();
        keys.dedup();
        keys.retain(|key| self.latest(index, key).is_some_and(|now| now.lease == Some(lease)));
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
