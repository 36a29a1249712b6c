//! Leases: promises to be renewed, or the keys go.
//!
//! Deadlines are moments of the monotonic clock, kept in a heap. Renewing only moves the deadline in the
//! lease; the heap's entry is put right when its time comes, so renewing is cheap and nothing is swept.
//! What the file holds is in the store's *age*, the time it has been serving: neither a jump of the wall
//! clock nor time spent stopped can shorten a lease. Nor can the time a grant waits for its commit: that is known
//! only afterwards, so the age that is noted lags behind by the longest such wait.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap};
use std::fmt;
use std::num::NonZeroI64;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};

use crate::pending::LeaseChange;
use crate::store::Age;
use crate::{Event, KeyValue};

/// Names a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(NonZeroI64);

impl LeaseId {
    /// `None` for 0, which means "no lease".
    pub fn new(id: i64) -> Option<Self> {
        NonZeroI64::new(id).map(Self)
    }

    /// The number.
    pub fn get(self) -> i64 {
        self.0.get()
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.get())
    }
}

/// A lease as it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseInfo {
    /// Its name.
    pub id: LeaseId,
    /// What was granted.
    pub ttl: Duration,
    /// What is left of it.
    pub remaining: Duration,
    /// The keys that go with it, in order.
    pub keys: Vec<Bytes>,
}

#[derive(Debug, Default)]
pub(crate) struct Leases {
    state: Mutex<State>,
    /// Woken when an earlier deadline comes in, or at the end.
    changed: Condvar,
    /// The longest time, in milliseconds, from a grant to when it was published.
    lag_ms: AtomicI64,
}

#[derive(Debug, Default)]
struct State {
    live: HashMap<LeaseId, Lease>,
    /// Every lease that is not ending has one entry, at its deadline or before.
    deadlines: BinaryHeap<Reverse<(Instant, LeaseId)>>,
    closed: bool,
}

#[derive(Debug)]
struct Lease {
    ttl: Duration,
    deadline: Instant,
    /// Whether the file knows that it was renewed.
    renewed: bool,
    /// What is below its keys goes with them.
    tree: bool,
    /// Its time is up and its keys are being deleted; too late to renew.
    ending: bool,
    keys: BTreeSet<Bytes>,
}

/// A lease as the file has it.
pub(crate) struct Loaded {
    pub(crate) ttl: Duration,
    pub(crate) remaining: Duration,
    pub(crate) renewed: bool,
    pub(crate) tree: bool,
}

/// What became of a renewal.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Renewal {
    Done(Duration),
    /// The first renewal must be on the disk before it is promised.
    FirstTime,
    Unknown,
}

impl Leases {
    /// For loading.
    pub(crate) fn load(&self, id: LeaseId, loaded: &Loaded) {
        let &Loaded { ttl, remaining, renewed, tree } = loaded;
        let deadline = Instant::now() + remaining;
        let keys = BTreeSet::new();
        let lease = Lease { ttl, deadline, renewed, tree, ending: false, keys };
        let mut state = self.state.lock();
        state.live.insert(id, lease);
        state.deadlines.push(Reverse((deadline, id)));
    }

    /// For loading. `false` when the key's lease is not there.
    pub(crate) fn load_key(&self, key: &KeyValue) -> bool {
        let Some(id) = key.lease() else { return true };
        let mut state = self.state.lock();
        let Some(lease) = state.live.get_mut(&id) else { return false };
        lease.keys.insert(Bytes::copy_from_slice(key.key()));
        true
    }

    /// Makes a durable batch visible.
    pub(crate) fn publish(&self, changes: &[LeaseChange], events: &[Event], age: &Age) {
        let concerns = |event: &Event| {
            event.now().is_some_and(|now| now.lease().is_some())
                || event.previous.as_ref().is_some_and(|before| before.lease().is_some())
        };
        if changes.is_empty() && !events.iter().any(concerns) {
            return;
        }
        let mut state = self.state.lock();
        let earliest = state.deadlines.peek().map(|Reverse((at, _))| *at);
        changes.iter().for_each(|change| state.change(change));
        for change in changes {
            if let LeaseChange::Granted { at_ms, .. } = *change {
                // Both are rounded down.
                self.lag_ms.fetch_max(age.now_ms() - at_ms + 1, Ordering::Relaxed);
            }
        }
        state.tidy();
        events.iter().for_each(|event| state.attach(event));
        if state.deadlines.peek().map(|Reverse((at, _))| *at) != earliest {
            self.changed.notify_all();
        }
    }

    /// By how much the deadlines in the file may be too early.
    pub(crate) fn lag_ms(&self) -> i64 {
        self.lag_ms.load(Ordering::Relaxed)
    }

    pub(crate) fn exists(&self, id: LeaseId) -> bool {
        self.state.lock().live.contains_key(&id)
    }

    /// Whether what is below its keys goes with them, as published.
    pub(crate) fn is_tree(&self, id: LeaseId) -> bool {
        self.state.lock().live.get(&id).is_some_and(|lease| lease.tree)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.state.lock().live.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.state.lock().live.len()
    }

    pub(crate) fn keys(&self, id: LeaseId) -> BTreeSet<Bytes> {
        self.state.lock().live.get(&id).map(|lease| lease.keys.clone()).unwrap_or_default()
    }

    pub(crate) fn info(&self, id: LeaseId) -> Option<LeaseInfo> {
        let state = self.state.lock();
        let lease = state.live.get(&id)?;
        Some(LeaseInfo {
            id,
            ttl: lease.ttl,
            remaining: lease.deadline.saturating_duration_since(Instant::now()),
            keys: lease.keys.iter().cloned().collect(),
        })
    }

    pub(crate) fn remaining(&self, id: LeaseId) -> Option<Duration> {
        let state = self.state.lock();
        Some(state.live.get(&id)?.deadline.saturating_duration_since(Instant::now()))
    }

    pub(crate) fn ids(&self) -> Vec<LeaseId> {
        let mut ids: Vec<_> = self.state.lock().live.keys().copied().collect();
        ids.sort_unstable();
        ids
    }

    pub(crate) fn renew(&self, id: LeaseId) -> Renewal {
        match self.state.lock().live.get_mut(&id) {
            None => Renewal::Unknown,
            Some(lease) if lease.ending => Renewal::Unknown,
            Some(lease) if !lease.renewed => Renewal::FirstTime,
            Some(lease) => {
                lease.deadline = Instant::now() + lease.ttl;
                Renewal::Done(lease.ttl)
            }
        }
    }

    /// Whether its time is up, as published.
    pub(crate) fn is_due(&self, id: LeaseId) -> bool {
        let state = self.state.lock();
        state.live.get(&id).is_some_and(|lease| lease.deadline <= Instant::now())
    }

    /// Waits for leases whose time is up, the earliest first, and marks them as ending; or for `until`,
    /// and then returns none. `None` when closed.
    pub(crate) fn wait_due(&self, until: Instant, most: usize) -> Option<Vec<LeaseId>> {
        let mut state = self.state.lock();
        loop {
            if state.closed {
                return None;
            }
            let now = Instant::now();
            let due = state.take_due(now, most);
            if !due.is_empty() || now >= until {
                return Some(due);
            }
            let next = state.deadlines.peek().map_or(until, |Reverse((at, _))| until.min(*at));
            self.changed.wait_until(&mut state, next);
        }
    }

    /// They could not be ended after all: they stay due.
    pub(crate) fn still_due(&self, ids: &[LeaseId]) {
        let mut state = self.state.lock();
        for id in ids {
            if let Some(lease) = state.live.get_mut(id).filter(|lease| lease.ending) {
                lease.ending = false;
                let entry = Reverse((lease.deadline, *id));
                state.deadlines.push(entry);
            }
        }
    }

    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }
}

impl State {
    fn change(&mut self, change: &LeaseChange) {
        match *change {
            LeaseChange::Granted { id, ttl, tree, .. } => {
                let deadline = Instant::now() + ttl;
                let keys = BTreeSet::new();
                let lease = Lease { ttl, deadline, renewed: false, tree, ending: false, keys };
                self.live.insert(id, lease);
                self.deadlines.push(Reverse((deadline, id)));
            }
            LeaseChange::Renewed { id } => {
                let Some(lease) = self.live.get_mut(&id) else { return };
                lease.deadline = Instant::now() + lease.ttl;
                lease.renewed = true;
                if std::mem::take(&mut lease.ending) {
                    self.deadlines.push(Reverse((lease.deadline, id)));
                }
            }
            LeaseChange::Ended { id } => {
                self.live.remove(&id);
            }
        }
    }

    /// Drops the entries of leases that were revoked long before their time, when they are many.
    fn tidy(&mut self) {
        if self.deadlines.len() > 2 * self.live.len() + 1024 {
            let live = self.live.iter().filter(|(_, lease)| !lease.ending);
            self.deadlines = live.map(|(id, lease)| Reverse((lease.deadline, *id))).collect();
        }
    }

    fn attach(&mut self, event: &Event) {
        let before = event.previous.as_ref().and_then(KeyValue::lease);
        let now = event.now().and_then(KeyValue::lease);
        if before != now
            && let Some(lease) = before.and_then(|id| self.live.get_mut(&id))
        {
            lease.keys.remove(event.key());
        }
        if let Some(lease) = now.and_then(|id| self.live.get_mut(&id)) {
            lease.keys.insert(Bytes::copy_from_slice(event.key()));
        }
    }

    fn take_due(&mut self, now: Instant, most: usize) -> Vec<LeaseId> {
        let mut due = Vec::new();
        while due.len() < most
            && let Some(&Reverse((at, id))) = self.deadlines.peek()
            && at <= now
        {
            self.deadlines.pop();
            match self.live.get_mut(&id) {
                // Renewed since. If it is due all the same, then in its new place.
                Some(lease) if lease.deadline > at => {
                    self.deadlines.push(Reverse((lease.deadline, id)));
                }
                // A lease granted again under the same id may have two entries for a while.
                Some(lease) if !lease.ending => {
                    lease.ending = true;
                    due.push(id);
                }
                _ => {}
            }
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: i64) -> LeaseId {
        LeaseId::new(n).unwrap()
    }

    fn grant(leases: &Leases, n: i64, ms: u64) {
        let ttl = Duration::from_millis(ms);
        publish(leases, LeaseChange::Granted { id: id(n), ttl, tree: false, at_ms: 0 });
    }

    fn publish(leases: &Leases, change: LeaseChange) {
        let age = Age { before: Duration::ZERO, started: Instant::now() };
        leases.publish(&[change], &[], &age);
    }

    #[test]
    fn leases_come_due_in_the_order_of_their_deadlines() {
        let leases = Leases::default();
        for (n, ms) in [(1, 30), (2, 10), (3, 20), (4, 3_600_000)] {
            grant(&leases, n, ms);
        }
        let later = Instant::now() + Duration::from_secs(3000);
        let due = leases.state.lock().take_due(later, 99);
        assert_eq!(due, [id(2), id(3), id(1)]);
        assert_eq!(leases.renew(id(1)), Renewal::Unknown, "too late");
        leases.still_due(&due);
        assert_eq!(
            leases.state.lock().take_due(later, 2),
            [id(2), id(3)],
            "not more than asked for"
        );
    }

    #[test]
    fn revoked_leases_leave_nothing_behind() {
        let leases = Leases::default();
        for n in 1..10_000 {
            grant(&leases, n, 3_600_000);
            publish(&leases, LeaseChange::Ended { id: id(n) });
        }
        assert!(leases.state.lock().deadlines.len() <= 1025);
    }

    #[test]
    fn a_renewed_lease_is_not_due_at_its_old_deadline() {
        let leases = Leases::default();
        grant(&leases, 1, 1000);
        assert_eq!(leases.renew(id(1)), Renewal::FirstTime);
        publish(&leases, LeaseChange::Renewed { id: id(1) });
        let old = leases.state.lock().deadlines.peek().unwrap().0.0;
        assert_eq!(leases.renew(id(1)), Renewal::Done(Duration::from_secs(1)));
        assert!(leases.state.lock().take_due(old, 9).is_empty());
        let new = leases.state.lock().live[&id(1)].deadline;
        assert_eq!(leases.state.lock().take_due(new, 9), [id(1)]);
    }

    #[test]
    fn a_renewed_lease_that_is_long_due_comes_in_the_order_of_its_new_deadline() {
        let leases = Leases::default();
        grant(&leases, 1, 1000);
        grant(&leases, 2, 1500);
        publish(&leases, LeaseChange::Renewed { id: id(1) });
        leases.state.lock().live.get_mut(&id(1)).unwrap().deadline += Duration::from_secs(1);
        let late = Instant::now() + Duration::from_secs(60);
        assert_eq!(leases.state.lock().take_due(late, 9), [id(2), id(1)]);
    }
}
