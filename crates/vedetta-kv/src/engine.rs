//! Evaluates requests on the writer thread and appends their rows.

use std::cmp::Ordering;
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use vedetta_core::{KeyRange, Revision};
use vedetta_db::Stop;
use vedetta_db::rusqlite::Connection;

use crate::index::{Found, Index};
use crate::lease::Leases;
use crate::load;
use crate::pending::{LeaseChange, Pending};
use crate::range::{self, FetchError, lease_number};
use crate::request::{
    Compare, CompareOp, CompareTarget, Delete, Deleted, KvError, Op, OpReply, Put, PutDone,
    PutLease, PutValue, Range, Ranged, Txn, TxnDone,
};
use crate::store::Limits;
use crate::update::WITH_DIRECTORY;
use crate::{Cause, Change, Event, KeyValue, LeaseId, Stamps};

/// How deep transactions may be nested. Evaluation recurses, so there must be an end.
const DEPTH: usize = 32;
/// The longest lease: what etcd allows, about 285 years.
pub(crate) const TTL_LIMIT: Duration = Duration::from_secs(9_000_000_000);

/// A put made ready by its caller, so that the writer thread need not allocate, copy or search for it.
pub(crate) struct Draft {
    /// The key and its value, if that is given; the numbers are still missing.
    record: KeyValue,
    /// Where the key was in the index.
    place: Option<usize>,
}

impl Draft {
    pub(crate) fn of(put: &Put, index: Option<&Index>) -> Self {
        let value = match &put.value {
            PutValue::Set(value) => &value[..],
            PutValue::Keep => &[],
        };
        let record = KeyValue::new(Stamps::default(), &put.key, value);
        Self { record, place: index.and_then(|index| index.place(&put.key, None)) }
    }
}

/// One closure's view of the store: what is published, what waits, and its own revision.
pub(crate) struct Engine<'a> {
    /// For what is not in memory: leases, marks, the past.
    file: Option<&'a Connection>,
    pub(crate) index: &'a Index,
    pub(crate) pending: &'a mut Pending,
    pub(crate) leases: &'a Leases,
    /// The revision being made, once something changed.
    making: Option<Making>,
}

/// What sets one put apart from others.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Manner {
    /// As if the key had not been there.
    pub(crate) anew: bool,
    pub(crate) tag: u8,
}

struct Making {
    revision: Revision,
    /// Where in the batch its events start.
    first: usize,
}

type Evaluated<T> = Result<T, Stop<KvError>>;

fn refuse<T>(why: KvError) -> Evaluated<T> {
    Err(Stop::Refused(why))
}

impl<'a> Engine<'a> {
    pub(crate) fn new(
        file: Option<&'a Connection>,
        index: &'a Index,
        pending: &'a mut Pending,
        leases: &'a Leases,
    ) -> Self {
        Self { file, index, pending, leases, making: None }
    }

    pub(crate) fn file(&self) -> &'a Connection {
        self.file.expect("who uses the file says so")
    }

    /// The revision the changes go into; there is one per transaction.
    fn making(&mut self) -> Revision {
        let first = self.pending.events();
        let pending = &mut *self.pending;
        self.making
            .get_or_insert_with(|| {
                pending.revision = pending.revision.next();
                Making { revision: pending.revision, first }
            })
            .revision
    }

    /// Ends the revision being made, if any; the next change begins another.
    pub(crate) fn seal(&mut self) -> Revision {
        if let Some(Making { revision, first }) = self.making.take() {
            self.pending.encode(revision, first);
        }
        self.pending.revision
    }

    pub(crate) fn put(&mut self, put: &Put, draft: Draft) -> Evaluated<PutDone> {
        self.put_as(put, draft, Manner::default())
    }

    pub(crate) fn put_as(&mut self, put: &Put, draft: Draft, manner: Manner) -> Evaluated<PutDone> {
        let place = self.index.place(draft.record.key(), draft.place);
        let before = self.pending.latest_at(self.index, draft.record.key(), place);
        let missing = || Stop::Refused(KvError::KeyNotFound(put.key.clone()));
        let mut now = match &put.value {
            PutValue::Set(_) => draft.record,
            PutValue::Keep => {
                let value = before.as_ref().ok_or_else(missing)?.value();
                KeyValue::new(Stamps::default(), &put.key, value)
            }
        };
        let lease = match put.lease {
            PutLease::Set(lease) => lease,
            PutLease::Keep => before.as_ref().ok_or_else(missing)?.lease(),
        };
        if let Some(lease) = lease
            && !self.has_lease(lease)
        {
            return refuse(KvError::LeaseNotFound(lease));
        }
        let revision = self.making();
        let going_on = before.as_ref().filter(|_| !manner.anew);
        let stamps = Stamps {
            created: going_on.map_or(revision, KeyValue::created),
            modified: revision,
            version: going_on.map_or(0, KeyValue::version) + 1,
            lease,
        };
        now.stamp(stamps);
        let previous = put.previous.then(|| before.clone()).flatten();
        let change = Change::Put(now);
        let event = Event { revision, change, previous: before, tag: manner.tag };
        self.pending.record(event, place);
        Ok(PutDone { revision, previous })
    }

    pub(crate) fn delete(&mut self, delete: &Delete) -> Evaluated<Deleted> {
        let gone = self.now(&delete.range)?;
        let count = gone.len();
        let previous = if delete.previous { gone.clone() } else { Vec::new() };
        for key in gone {
            self.remove(key, Cause::Asked, 0);
        }
        Ok(Deleted { revision: self.pending.revision, count, previous })
    }

    fn remove(&mut self, before: KeyValue, cause: Cause, tag: u8) {
        let key = Bytes::copy_from_slice(before.key());
        self.record_gone(key, Some(before), cause, tag);
    }

    pub(crate) fn record_gone(
        &mut self,
        key: Bytes,
        previous: Option<KeyValue>,
        cause: Cause,
        tag: u8,
    ) {
        let revision = self.making();
        let place = self.index.place(&key, None);
        let change = Change::Delete { key, cause };
        self.pending.record(Event { revision, change, previous, tag }, place);
    }

    /// The keys of a range, as they are now.
    pub(crate) fn now(&self, range: &KeyRange) -> Evaluated<Vec<KeyValue>> {
        if let KeyRange::One(key) = range {
            return Ok(self.pending.latest(self.index, key).into_iter().collect());
        }
        self.values(self.pending.collect(self.index, range, self.pending.revision))
    }

    fn values(&self, found: Vec<Found>) -> Evaluated<Vec<KeyValue>> {
        if found.iter().all(|found| matches!(found, Found::Here(_))) {
            return Ok(range::all_here(found));
        }
        range::fetch_all(found, self.file()).map_err(|error| match error {
            FetchError::Sql(error) => Stop::Sql(error),
            other => Stop::Refused(other.into()),
        })
    }

    pub(crate) fn range(&self, request: &Range) -> Evaluated<Ranged> {
        let current = self.pending.revision;
        let at =
            range::resolve(request.at, current, self.pending.compacted).map_err(Stop::Refused)?;
        let mut found = self.pending.collect(self.index, &request.range, at);
        let count = if request.uncounted { 0 } else { found.len() };
        found.truncate(range::enough(request));
        Ok(range::finish(request, self.values(found)?, count, current))
    }

    pub(crate) fn txn(&mut self, txn: &Txn) -> Evaluated<TxnDone> {
        let mut decisions = VecDeque::new();
        self.decide(txn, &mut decisions)?;
        self.execute(txn, &mut decisions)
    }

    /// Which branch is taken, of it and of those nested in that branch, in the order they are met. All
    /// compares see what was there before any of the writes, so a nested one does not see the outer's.
    fn decide(&self, txn: &Txn, decisions: &mut VecDeque<bool>) -> Evaluated<()> {
        let mut held = true;
        for compare in &txn.when {
            held = held && holds(compare, &self.now(&compare.range)?);
        }
        decisions.push_back(held);
        for op in txn.branch(held) {
            if let Op::Txn(txn) = op {
                self.decide(txn, decisions)?;
            }
        }
        Ok(())
    }

    fn execute(&mut self, txn: &Txn, decisions: &mut VecDeque<bool>) -> Evaluated<TxnDone> {
        let held = decisions.pop_front().unwrap_or(false);
        let mut replies = Vec::new();
        for op in txn.branch(held) {
            replies.push(match op {
                Op::Range(range) => OpReply::Range(self.range(range)?),
                Op::Put(put) => OpReply::Put(self.put(put, Draft::of(put, None))?),
                Op::Delete(delete) => OpReply::Delete(self.delete(delete)?),
                Op::Txn(txn) => OpReply::Txn(self.execute(txn, decisions)?),
            });
        }
        Ok(TxnDone { revision: self.pending.revision, held, replies })
    }

    pub(crate) fn has_lease(&self, id: LeaseId) -> bool {
        self.pending.lease(id).unwrap_or_else(|| self.leases.exists(id))
    }

    /// Ends a lease: its keys go in one revision.
    pub(crate) fn end_lease(&mut self, id: LeaseId, cause: Cause) -> Evaluated<()> {
        let keys = self.pending.keys_of(self.index, id, self.leases.keys(id));
        let tree = self.is_tree(id);
        for key in keys {
            if let Some(before) = self.pending.latest(self.index, &key) {
                self.remove(before, cause, 0);
            }
            if tree && let Some(hidden) = key.strip_suffix(b"/") {
                if let Some(hidden) = self.pending.latest(self.index, hidden) {
                    self.remove(hidden, cause, WITH_DIRECTORY);
                }
                for below in self.now(&KeyRange::prefix(key))? {
                    self.remove(below, cause, WITH_DIRECTORY);
                }
            }
        }
        self.forget_lease(id)
    }

    /// Whether what is below the keys of a lease goes with them.
    pub(crate) fn is_tree(&self, id: LeaseId) -> bool {
        self.pending.granted(id).map_or_else(|| self.leases.is_tree(id), |(_, tree)| tree)
    }

    /// Grants a lease; without a wished id, one is chosen. `age_ms` is the store's.
    pub(crate) fn grant(
        &mut self,
        id: Option<LeaseId>,
        ttl: Duration,
        tree: bool,
        age_ms: i64,
    ) -> Evaluated<LeaseId> {
        if ttl > TTL_LIMIT {
            return refuse(KvError::TtlTooLarge { limit: TTL_LIMIT.as_secs() });
        }
        let id = match id {
            Some(id) if self.has_lease(id) => return refuse(KvError::LeaseExists(id)),
            Some(id) => id,
            None => loop {
                // The upper half is for callers who choose ids: etcd's v2 API has something to say in them.
                match LeaseId::new(fastrand::i64(1..1 << 62)) {
                    Some(id) if !self.has_lease(id) => break id,
                    _ => {}
                }
            },
        };
        let ttl_ms = i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX);
        let deadline = age_ms.saturating_add(ttl_ms);
        let sql = "INSERT INTO lease (id, ttl_ms, deadline_ms, renewed, tree, checksum)
                   VALUES (?1, ?2, ?3, 0, ?4, ?5)";
        let checksum = load::lease_checksum(id.get(), ttl_ms, deadline, tree);
        let mut insert = self.file().prepare_cached(sql)?;
        insert.execute((id.get(), ttl_ms, deadline, tree, checksum))?;
        self.pending.change_lease(LeaseChange::Granted { id, ttl, tree, at_ms: age_ms });
        Ok(id)
    }

    /// The lease itself, without its keys.
    pub(crate) fn forget_lease(&mut self, id: LeaseId) -> Evaluated<()> {
        self.pending.change_lease(LeaseChange::Ended { id });
        self.file().prepare_cached("DELETE FROM lease WHERE id = ?1")?.execute([id.get()])?;
        Ok(())
    }
}

/// Whether a compare is true of the keys of its range.
pub(crate) fn holds(compare: &Compare, keys: &[KeyValue]) -> bool {
    if keys.is_empty() {
        return holds_for(compare, None);
    }
    keys.iter().all(|key| holds_for(compare, Some(key)))
}

fn holds_for(compare: &Compare, key: Option<&KeyValue>) -> bool {
    let order = match &compare.target {
        CompareTarget::Version(want) => key.map_or(0, KeyValue::version).cmp(want),
        CompareTarget::Created(want) => key.map_or(Revision(0), KeyValue::created).cmp(want),
        CompareTarget::Modified(want) => key.map_or(Revision(0), KeyValue::modified).cmp(want),
        CompareTarget::Lease(want) => lease_number(key.and_then(KeyValue::lease)).cmp(want),
        CompareTarget::Value(want) => match key {
            Some(key) => key.value().cmp(&want[..]),
            None => return false,
        },
    };
    match compare.op {
        CompareOp::Equal => order == Ordering::Equal,
        CompareOp::NotEqual => order != Ordering::Equal,
        CompareOp::Greater => order == Ordering::Greater,
        CompareOp::Less => order == Ordering::Less,
    }
}

/// Refuses what is malformed or over a limit, before it reaches the writer.
pub(crate) fn check_put(put: &Put, limits: &Limits) -> Result<usize, KvError> {
    if put.key.is_empty() {
        return Err(KvError::EmptyKey);
    }
    if put.key.len() > limits.key {
        return Err(KvError::KeyTooLarge { size: put.key.len(), limit: limits.key });
    }
    let value = match &put.value {
        PutValue::Set(value) => value.len(),
        PutValue::Keep => 0,
    };
    if value > limits.value {
        return Err(KvError::ValueTooLarge { size: value, limit: limits.value });
    }
    check_size(put.key.len() + value, limits)
}

pub(crate) fn check_size(size: usize, limits: &Limits) -> Result<usize, KvError> {
    if size > limits.request {
        return Err(KvError::RequestTooLarge { size, limit: limits.request });
    }
    Ok(size)
}

/// An empty single key can never exist; asking for it is a mistake worth telling.
pub(crate) fn check_range(range: &KeyRange) -> Result<usize, KvError> {
    match range {
        KeyRange::One(key) if key.is_empty() => Err(KvError::EmptyKey),
        KeyRange::One(key) | KeyRange::From(key) => Ok(key.len()),
        KeyRange::Between(start, end) => Ok(start.len() + end.len()),
    }
}

/// The same for a transaction, all branches included.
pub(crate) fn check_txn(txn: &Txn, limits: &Limits) -> Result<(), KvError> {
    check_size(check_branches(txn, limits, limits.ops, 0)?, limits)?;
    claims(&txn.then)?;
    claims(&txn.otherwise)?;
    Ok(())
}

/// `left` is how many operations the transactions around it leave: a nested one counts its own.
fn check_branches(txn: &Txn, limits: &Limits, left: usize, depth: usize) -> Result<usize, KvError> {
    if depth == DEPTH {
        return Err(KvError::TooDeep { limit: DEPTH });
    }
    let ops = txn.when.len().max(txn.then.len()).max(txn.otherwise.len());
    if ops > left {
        return Err(KvError::TooManyOps { ops: limits.ops - left + ops, limit: limits.ops });
    }
    let left = left - ops;
    let mut size = 0;
    for compare in &txn.when {
        size += check_range(&compare.range)?;
        if let CompareTarget::Value(value) = &compare.target {
            size += value.len();
        }
    }
    for op in txn.then.iter().chain(&txn.otherwise) {
        size += match op {
            Op::Range(range) => check_range(&range.range)?,
            Op::Put(put) => check_put(put, limits)?,
            Op::Delete(delete) => check_range(&delete.range)?,
            Op::Txn(txn) => check_branches(txn, limits, left, depth + 1)?,
        };
    }
    Ok(size)
}

/// The keys a list of steps puts and the ranges it deletes. No key may be changed twice; of two
/// branches of a nested transaction only one runs, so those may meet.
#[derive(Default)]
struct Claims {
    puts: BTreeSet<Bytes>,
    deletes: Vec<KeyRange>,
}

impl Claims {
    fn clash(&self, key: &Bytes) -> Result<(), KvError> {
        if self.puts.contains(key) || self.deletes.iter().any(|range| range.contains(key)) {
            return Err(KvError::DuplicateKey(key.clone()));
        }
        Ok(())
    }

    fn covers_put(&self, range: &KeyRange) -> Result<(), KvError> {
        let Some(bounds) = range.bounds() else { return Ok(()) };
        match self.puts.range::<[u8], _>(bounds).next() {
            Some(key) => Err(KvError::DuplicateKey(key.clone())),
            None => Ok(()),
        }
    }
}

fn claims(ops: &[Op]) -> Result<Claims, KvError> {
    let mut all = Claims::default();
    for op in ops {
        match op {
            Op::Range(_) => {}
            Op::Put(put) => {
                all.clash(&put.key)?;
                all.puts.insert(put.key.clone());
            }
            Op::Delete(delete) => {
                all.covers_put(&delete.range)?;
                all.deletes.push(delete.range.clone());
            }
            Op::Txn(txn) => {
                let (then, otherwise) = (claims(&txn.then)?, claims(&txn.otherwise)?);
                for key in then.puts.iter().chain(&otherwise.puts) {
                    all.clash(key)?;
                }
                for range in then.deletes.iter().chain(&otherwise.deletes) {
                    all.covers_put(range)?;
                }
                all.puts.extend(then.puts.into_iter().chain(otherwise.puts));
                all.deletes.extend(then.deletes.into_iter().chain(otherwise.deletes));
            }
        }
    }
    Ok(all)
}
