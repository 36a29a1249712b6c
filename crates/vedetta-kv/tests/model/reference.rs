//! The store as one would explain it on paper: every state there ever was, every event there ever was.
//!
//! It is slow, forgets nothing, and shares no code with the store but the types of requests and answers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{
    Cause, Change, Compare, CompareOp, CompareTarget, Delete, Deleted, Event, KeyValue, KvError,
    LeaseId, Op, OpReply, Order, Put, PutDone, PutLease, PutValue, Range, Ranged, SortBy, Stamps,
    Txn, TxnDone, WatchOptions,
};

/// All keys at one revision.
pub(crate) type State = BTreeMap<Bytes, KeyValue>;

pub(crate) type Answer<T> = Result<T, Refusal>;

/// The errors the model foresees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    Compacted {
        asked: Revision,
        oldest: Revision,
    },
    Future {
        asked: Revision,
        current: Revision,
    },
    EmptyKey,
    DuplicateKey,
    KeyNotFound(Bytes),
    LeaseNotFound(LeaseId),
    LeaseExists(LeaseId),
    /// The store said something the model never says.
    Unforeseen(String),
}

impl From<KvError> for Refusal {
    fn from(error: KvError) -> Self {
        match error {
            KvError::Compacted { asked, oldest } => Self::Compacted { asked, oldest },
            KvError::Future { asked, current } => Self::Future { asked, current },
            KvError::EmptyKey => Self::EmptyKey,
            KvError::DuplicateKey(_) => Self::DuplicateKey,
            KvError::KeyNotFound(key) => Self::KeyNotFound(key),
            KvError::LeaseNotFound(id) => Self::LeaseNotFound(id),
            KvError::LeaseExists(id) => Self::LeaseExists(id),
            other => Self::Unforeseen(format!("{other:?}")),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Model {
    /// `states[r]` is the store at revision `r`.
    states: Vec<State>,
    pub(crate) events: Vec<Event>,
    pub(crate) compacted: Revision,
    pub(crate) leases: BTreeMap<LeaseId, Duration>,
}

impl Model {
    pub(crate) fn new() -> Self {
        Self {
            states: vec![State::new(), State::new()], // revision 0 never was, 1 is the fresh store
            events: Vec::new(),
            compacted: Revision(0),
            leases: BTreeMap::new(),
        }
    }

    pub(crate) fn revision(&self) -> Revision {
        Revision(self.states.len() as u64 - 1)
    }

    pub(crate) fn state(&self, at: Revision) -> &State {
        &self.states[usize::try_from(at.0).unwrap()]
    }

    pub(crate) fn now(&self) -> &State {
        self.state(self.revision())
    }

    pub(crate) fn put(&mut self, put: &Put) -> Answer<PutDone> {
        if put.key.is_empty() {
            return Err(Refusal::EmptyKey);
        }
        self.change(|draft| draft.put(put))
    }

    pub(crate) fn delete(&mut self, delete: &Delete) -> Answer<Deleted> {
        if is_empty_key(&delete.range) {
            return Err(Refusal::EmptyKey);
        }
        self.change(|draft| Ok(draft.delete(delete)))
    }

    pub(crate) fn range(&self, range: &Range) -> Answer<Ranged> {
        if is_empty_key(&range.range) {
            return Err(Refusal::EmptyKey);
        }
        Draft::new(self).range(range)
    }

    pub(crate) fn txn(&mut self, txn: &Txn) -> Answer<TxnDone> {
        if names_empty_key(txn) {
            return Err(Refusal::EmptyKey);
        }
        if changes_twice(&txn.then) || changes_twice(&txn.otherwise) {
            return Err(Refusal::DuplicateKey);
        }
        self.change(|draft| draft.txn(txn))
    }

    pub(crate) fn compact(&mut self, at: Revision) -> Answer<()> {
        let (current, oldest) = (self.revision(), self.compacted);
        if at > current {
            return Err(Refusal::Future { asked: at, current });
        }
        if at <= oldest {
            return Err(Refusal::Compacted { asked: at, oldest });
        }
        self.compacted = at;
        Ok(())
    }

    pub(crate) fn grant(&mut self, id: LeaseId, ttl: Duration) -> Answer<LeaseId> {
        if self.leases.contains_key(&id) {
            return Err(Refusal::LeaseExists(id));
        }
        self.leases.insert(id, ttl);
        Ok(id)
    }

    pub(crate) fn keep_alive(&self, id: LeaseId) -> Answer<Duration> {
        self.leases.get(&id).copied().ok_or(Refusal::LeaseNotFound(id))
    }

    pub(crate) fn revoke(&mut self, id: LeaseId) -> Answer<Revision> {
        self.end_lease(id, Cause::Asked)
    }

    pub(crate) fn expire(&mut self, id: LeaseId) -> Answer<Revision> {
        self.end_lease(id, Cause::Expired)
    }

    fn end_lease(&mut self, id: LeaseId, cause: Cause) -> Answer<Revision> {
        if self.leases.remove(&id).is_none() {
            return Err(Refusal::LeaseNotFound(id));
        }
        let keys = self.keys_of(id);
        self.change(|draft| {
            keys.iter().for_each(|key| draft.remove(key, cause));
            Ok(draft.revision())
        })
    }

    /// The keys that go with a lease, in order.
    pub(crate) fn keys_of(&self, id: LeaseId) -> Vec<Bytes> {
        let all = self.now().values();
        all.filter(|key| key.lease() == Some(id))
            .map(|key| Bytes::copy_from_slice(key.key()))
            .collect()
    }

    /// How many keys have a life that can still be read or watched: those that exist, and those whose
    /// end is not older than everything kept.
    pub(crate) fn remembered(&self) -> usize {
        let ended = |event: &&Event| {
            event.revision >= self.compacted && !self.now().contains_key(event.key())
        };
        let ended: BTreeSet<_> = self.events.iter().filter(ended).map(Event::key).collect();
        self.now().len() + ended.len()
    }

    /// What a watcher that has everything before `next` is still owed.
    pub(crate) fn owed(
        &self,
        range: &KeyRange,
        options: &WatchOptions,
        next: Revision,
    ) -> Vec<Event> {
        let wanted = |event: &&Event| {
            let filtered = match event.change {
                Change::Put(_) => options.no_puts,
                Change::Delete { .. } => options.no_deletes,
            };
            event.revision >= next && holds(range, event.key()) && !filtered
        };
        self.events.iter().filter(wanted).cloned().collect()
    }

    /// Whether a watcher may be handed this event without the key's previous value: only when the
    /// value it replaced is older than everything that is kept.
    pub(crate) fn may_lack_previous(&self, event: &Event) -> bool {
        event.revision <= self.compacted
    }

    /// Runs `work`; what it changed becomes one revision, unless it fails.
    fn change<T>(&mut self, work: impl FnOnce(&mut Draft<'_>) -> Answer<T>) -> Answer<T> {
        let mut draft = Draft::new(self);
        let answer = work(&mut draft)?;
        let Draft { now, events, .. } = draft;
        if !events.is_empty() {
            self.states.push(now);
            self.events.extend(events);
        }
        Ok(answer)
    }
}

/// A revision in the making.
struct Draft<'m> {
    model: &'m Model,
    now: State,
    events: Vec<Event>,
}

impl<'m> Draft<'m> {
    fn new(model: &'m Model) -> Self {
        Self { model, now: model.now().clone(), events: Vec::new() }
    }

    /// Where the store stands for whoever asks in the middle of it.
    fn revision(&self) -> Revision {
        if self.events.is_empty() { self.model.revision() } else { self.making() }
    }

    fn making(&self) -> Revision {
        Revision(self.model.revision().0 + 1)
    }

    fn put(&mut self, put: &Put) -> Answer<PutDone> {
        let before = self.now.get(&put.key).cloned();
        let missing = Refusal::KeyNotFound(put.key.clone());
        let value = match (&put.value, &before) {
            (PutValue::Set(value), _) => &value[..],
            (PutValue::Keep, Some(before)) => before.value(),
            (PutValue::Keep, None) => return Err(missing),
        };
        let lease = match (put.lease, &before) {
            (PutLease::Set(lease), _) => lease,
            (PutLease::Keep, Some(before)) => before.lease(),
            (PutLease::Keep, None) => return Err(missing),
        };
        if let Some(lease) = lease
            && !self.model.leases.contains_key(&lease)
        {
            return Err(Refusal::LeaseNotFound(lease));
        }
        let revision = self.making();
        let (created, version) = match &before {
            Some(before) => (before.created(), before.version() + 1),
            None => (revision, 1),
        };
        let stamps = Stamps { created, modified: revision, version, lease };
        let now = KeyValue::new(stamps, &put.key, value);
        self.now.insert(put.key.clone(), now.clone());
        self.events.push(Event {
            revision,
            change: Change::Put(now),
            previous: before.clone(),
            tag: 0,
        });
        Ok(PutDone { revision, previous: before.filter(|_| put.previous) })
    }

    fn remove(&mut self, key: &Bytes, cause: Cause) {
        let previous = self.now.remove(key);
        let change = Change::Delete { key: key.clone(), cause };
        self.events.push(Event { revision: self.making(), change, previous, tag: 0 });
    }

    fn delete(&mut self, delete: &Delete) -> Deleted {
        let gone = within(&self.now, &delete.range);
        gone.iter().for_each(|key| self.remove(&Bytes::copy_from_slice(key.key()), Cause::Asked));
        let count = gone.len();
        let previous = if delete.previous { gone } else { Vec::new() };
        Deleted { revision: self.revision(), count, previous }
    }

    fn range(&self, range: &Range) -> Answer<Ranged> {
        let (current, oldest) = (self.revision(), self.model.compacted);
        let state = match range.at {
            None => &self.now,
            Some(asked) if asked > current => return Err(Refusal::Future { asked, current }),
            Some(asked) if asked < oldest => return Err(Refusal::Compacted { asked, oldest }),
            Some(asked) if asked > self.model.revision() => &self.now,
            Some(asked) => self.model.state(asked),
        };
        let mut keys = within(state, &range.range);
        let count = keys.len();
        if range.count_only {
            return Ok(Ranged { revision: current, more: false, count, keys: Vec::new() });
        }
        keys.retain(|key| {
            let at_least = |min: Option<Revision>, is| min.is_none_or(|min| is >= min);
            let at_most = |max: Option<Revision>, is| max.is_none_or(|max| is <= max);
            at_least(range.min_modified, key.modified())
                && at_most(range.max_modified, key.modified())
                && at_least(range.min_created, key.created())
                && at_most(range.max_created, key.created())
        });
        if let Some((by, order)) = range.sort {
            keys = sorted(keys, by, order);
        }
        let more = range.limit.is_some_and(|limit| keys.len() > limit);
        keys.truncate(range.limit.unwrap_or(usize::MAX));
        if range.keys_only {
            let bare = |key: &KeyValue| {
                let stamps = Stamps {
                    created: key.created(),
                    modified: key.modified(),
                    version: key.version(),
                    lease: key.lease(),
                };
                KeyValue::new(stamps, key.key(), &[])
            };
            keys = keys.iter().map(bare).collect();
        }
        Ok(Ranged { revision: current, keys, more, count })
    }

    fn txn(&mut self, txn: &Txn) -> Answer<TxnDone> {
        let before = self.now.clone();
        self.nested(txn, &before)
    }

    /// All compares are of what was there before, however deep they are.
    fn nested(&mut self, txn: &Txn, before: &State) -> Answer<TxnDone> {
        let held = txn.when.iter().all(|compare| agrees(before, compare));
        let mut replies = Vec::new();
        for op in if held { &txn.then } else { &txn.otherwise } {
            replies.push(match op {
                Op::Range(range) => OpReply::Range(self.range(range)?),
                Op::Put(put) => OpReply::Put(self.put(put)?),
                Op::Delete(delete) => OpReply::Delete(self.delete(delete)),
                Op::Txn(txn) => OpReply::Txn(self.nested(txn, before)?),
            });
        }
        Ok(TxnDone { revision: self.revision(), held, replies })
    }
}

fn agrees(state: &State, compare: &Compare) -> bool {
    let keys = within(state, &compare.range);
    if keys.is_empty() {
        return agrees_with_nothing(compare);
    }
    keys.iter().all(|key| match &compare.target {
        CompareTarget::Version(want) => compares(compare.op, &key.version(), want),
        CompareTarget::Created(want) => compares(compare.op, &key.created(), want),
        CompareTarget::Modified(want) => compares(compare.op, &key.modified(), want),
        CompareTarget::Value(want) => compares(compare.op, &key.value(), &&want[..]),
        CompareTarget::Lease(want) => {
            compares(compare.op, &key.lease().map_or(0, LeaseId::get), want)
        }
    })
}

fn agrees_with_nothing(compare: &Compare) -> bool {
    match &compare.target {
        CompareTarget::Version(want) => compares(compare.op, &0, want),
        CompareTarget::Created(want) | CompareTarget::Modified(want) => {
            compares(compare.op, &Revision(0), want)
        }
        CompareTarget::Lease(want) => compares(compare.op, &0, want),
        CompareTarget::Value(_) => false,
    }
}

fn compares<T: Ord>(op: CompareOp, is: &T, want: &T) -> bool {
    match op {
        CompareOp::Equal => is == want,
        CompareOp::NotEqual => is != want,
        CompareOp::Greater => is > want,
        CompareOp::Less => is < want,
    }
}

/// Sorted by what was asked for; equals by key, ascending.
fn sorted(mut keys: Vec<KeyValue>, by: SortBy, order: Order) -> Vec<KeyValue> {
    let compare = |a: &KeyValue, b: &KeyValue| match by {
        SortBy::Key => a.key().cmp(b.key()),
        SortBy::Version => a.version().cmp(&b.version()),
        SortBy::Created => a.created().cmp(&b.created()),
        SortBy::Modified => a.modified().cmp(&b.modified()),
        SortBy::Value => a.value().cmp(b.value()),
    };
    keys.sort_by(|a, b| {
        let first = match order {
            Order::Ascending => compare(a, b),
            Order::Descending => compare(a, b).reverse(),
        };
        first.then_with(|| a.key().cmp(b.key()))
    });
    keys
}

pub(crate) fn holds(range: &KeyRange, key: &[u8]) -> bool {
    match range {
        KeyRange::One(only) => key == &only[..],
        KeyRange::Between(start, end) => key >= &start[..] && key < &end[..],
        KeyRange::From(start) => key >= &start[..],
    }
}

fn within(state: &State, range: &KeyRange) -> Vec<KeyValue> {
    state.values().filter(|key| holds(range, key.key())).cloned().collect()
}

fn is_empty_key(range: &KeyRange) -> bool {
    matches!(range, KeyRange::One(key) if key.is_empty())
}

fn names_empty_key(txn: &Txn) -> bool {
    txn.when.iter().any(|compare| is_empty_key(&compare.range))
        || txn.then.iter().chain(&txn.otherwise).any(|op| match op {
            Op::Range(range) => is_empty_key(&range.range),
            Op::Put(put) => put.key.is_empty(),
            Op::Delete(delete) => is_empty_key(&delete.range),
            Op::Txn(txn) => names_empty_key(txn),
        })
}

/// What a step would change, whichever way it goes.
#[derive(Clone)]
enum Claim {
    Put(Bytes),
    Delete(KeyRange),
}

fn claims(op: &Op) -> Vec<Claim> {
    match op {
        Op::Range(_) => Vec::new(),
        Op::Put(put) => vec![Claim::Put(put.key.clone())],
        Op::Delete(delete) => vec![Claim::Delete(delete.range.clone())],
        Op::Txn(txn) => txn.then.iter().chain(&txn.otherwise).flat_map(claims).collect(),
    }
}

/// Whether two steps of one list change the same key, or two steps of a list inside it. Two deletes may
/// meet: the second finds nothing.
fn changes_twice(ops: &[Op]) -> bool {
    let clash = |a: &Claim, b: &Claim| match (a, b) {
        (Claim::Put(a), Claim::Put(b)) => a == b,
        (Claim::Put(key), Claim::Delete(range)) | (Claim::Delete(range), Claim::Put(key)) => {
            holds(range, key)
        }
        (Claim::Delete(_), Claim::Delete(_)) => false,
    };
    let all: Vec<Vec<Claim>> = ops.iter().map(claims).collect();
    let meet = all
        .iter()
        .enumerate()
        .any(|(n, a)| all[n + 1..].iter().any(|b| a.iter().any(|a| b.iter().any(|b| clash(a, b)))));
    meet || ops.iter().any(|op| match op {
        Op::Txn(txn) => changes_twice(&txn.then) || changes_twice(&txn.otherwise),
        _ => false,
    })
}
