//! A change worked out on the writer thread: what it reads cannot change before what it writes is there.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use vedetta_core::{KeyRange, Revision};
use vedetta_db::{Purpose, Stop, WriteError, rusqlite};

use crate::engine::{self, Draft, Engine, Manner};
use crate::request::{KvError, Put};
use crate::store::{Limits, Store};
use crate::{Cause, KeyValue, LeaseId};

/// The tag of a key that went because the directory above it did, see [`Update::grant_tree`].
pub const WITH_DIRECTORY: u8 = u8::MAX;

/// How an update puts a key.
#[derive(Debug, Clone, Copy, Default)]
pub struct Write {
    /// As if the key had not been there: it is made in this revision, and this is its first version.
    pub anew: bool,
    /// The lease it goes with.
    pub lease: Option<LeaseId>,
    /// A note kept with the event; the store does not read it.
    pub tag: u8,
}

/// The store as an update sees it, its own changes included. What it changes is one revision.
pub struct Update<'a> {
    engine: Engine<'a>,
    limits: &'a Limits,
    age_ms: i64,
    changed: HashSet<Bytes>,
    /// Bytes put so far.
    size: usize,
    /// What SQLite said, if it failed: then nothing of this stands, whatever the closure answers.
    failed: Option<rusqlite::Error>,
}

impl Store {
    /// Runs `work` on the writer thread. What it changes becomes one revision, or, when it refuses,
    /// nothing does. Everybody else's writes wait for it, so it should be short.
    pub async fn update<T, E>(
        &self,
        purpose: Purpose,
        work: impl FnOnce(&mut Update<'_>) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<KvError> + Send + 'static,
    {
        self.check_queue()?;
        if purpose == Purpose::Store {
            self.shared.quota.check()?;
        }
        let (shared, options) = (Arc::clone(&self.shared), Arc::clone(&self.options));
        let updated = self.db.write(purpose, move |tx| {
            if purpose == Purpose::Store {
                shared.quota.check().map_err(|full| Stop::Refused(E::from(full)))?;
            }
            // Before the locks, as in `evaluate`.
            let file: &rusqlite::Connection = tx;
            let mut pending = shared.pending.lock();
            let index = shared.index.read();
            let mut update = Update {
                engine: Engine::new(Some(file), &index, &mut pending, &shared.leases),
                limits: &options.limits,
                age_ms: shared.age.now_ms(),
                changed: HashSet::new(),
                size: 0,
                failed: None,
            };
            let answer = work(&mut update);
            if let Some(error) = update.failed {
                return Err(Stop::Sql(error));
            }
            let answer = answer.map_err(Stop::Refused)?;
            update.engine.seal();
            Ok(answer)
        });
        updated.await.map_err(|error| match error {
            WriteError::Refused(why) => why,
            WriteError::Lost(lost) => E::from(KvError::Lost(lost)),
            _ => unreachable!("a write ends in one of two ways"),
        })
    }

    /// What is left of a lease; `None` when there is none of that id.
    pub fn remaining(&self, id: LeaseId) -> Option<Duration> {
        self.shared.leases.remaining(id)
    }
}

impl Update<'_> {
    /// The store's revision; once this update has changed something, the one it makes.
    pub fn revision(&self) -> Revision {
        self.engine.pending.revision
    }

    /// A key as it is.
    pub fn get(&self, key: &[u8]) -> Option<KeyValue> {
        self.engine.pending.latest(self.engine.index, key)
    }

    /// The first key of a range; found without looking at the others.
    pub fn first(&self, range: &KeyRange) -> Option<KeyValue> {
        self.engine.pending.first(self.engine.index, range)
    }

    /// All keys of a range, in order.
    pub fn list(&mut self, range: &KeyRange) -> Result<Vec<KeyValue>, KvError> {
        let found = self.engine.now(range);
        self.settle(found)
    }

    /// Gives a key a value.
    pub fn put(
        &mut self,
        key: impl Into<Bytes>,
        value: impl Into<Bytes>,
        write: Write,
    ) -> Result<(), KvError> {
        let mut put = Put::new(key, value);
        self.size += engine::check_put(&put, self.limits)?;
        engine::check_size(self.size, self.limits)?;
        put.lease = crate::PutLease::Set(write.lease);
        self.once(&put.key)?;
        let manner = Manner { anew: write.anew, tag: write.tag };
        let done = self.engine.put_as(&put, Draft::of(&put, None), manner);
        self.settle(done).map(drop)
    }

    /// Removes a key. Who watches it is told in any case, even when it was not there.
    pub fn delete(&mut self, key: impl Into<Bytes>, tag: u8) -> Result<(), KvError> {
        let key = key.into();
        self.once(&key)?;
        let before = self.get(&key);
        self.engine.record_gone(key, before, Cause::Asked, tag);
        Ok(())
    }

    /// Grants a lease that takes along what is below its keys, where these are directories: when it
    /// ends, the key `a/` goes and with it, in the same revision and with the tag [`WITH_DIRECTORY`],
    /// the key `a` that it hid and every key that begins with `a/`.
    pub fn grant_tree(&mut self, id: LeaseId, ttl: Duration) -> Result<(), KvError> {
        let granted = self.engine.grant(Some(id), ttl, true, self.age_ms);
        self.settle(granted).map(drop)
    }

    /// Ends those of these leases that are of [`Update::grant_tree`] and that no key goes with any more.
    pub fn release(&mut self, ids: &HashSet<LeaseId>) -> Result<(), KvError> {
        if ids.is_empty() {
            return Ok(());
        }
        let Engine { pending, leases, index, .. } = &self.engine;
        let lease_of = |key: &[u8]| pending.latest(index, key).and_then(|key| key.lease());
        let attached = pending.changes().filter_map(|event| {
            let id = event.now()?.lease()?;
            (ids.contains(&id) && lease_of(event.key()) == Some(id)).then_some(id)
        });
        let in_use: HashSet<LeaseId> = attached.collect();
        let free = |id: &LeaseId| {
            !in_use.contains(id)
                && self.engine.has_lease(*id)
                && self.engine.is_tree(*id)
                && leases.keys(*id).iter().all(|key| lease_of(key) != Some(*id))
        };
        let free: Vec<LeaseId> = ids.iter().copied().filter(free).collect();
        for id in free {
            let forgotten = self.engine.forget_lease(id);
            self.settle(forgotten)?;
        }
        Ok(())
    }

    /// What is left of a lease; `None` when there is none of that id.
    pub fn remaining(&self, id: LeaseId) -> Option<Duration> {
        let Engine { pending, leases, .. } = &self.engine;
        match pending.lease(id) {
            Some(true) => pending.granted(id).map(|(ttl, _)| ttl),
            Some(false) => None,
            None => leases.remaining(id),
        }
    }

    /// A revision changes a key once.
    fn once(&mut self, key: &Bytes) -> Result<(), KvError> {
        if self.changed.insert(key.clone()) {
            return Ok(());
        }
        Err(KvError::DuplicateKey(key.clone()))
    }

    fn settle<T>(&mut self, result: Result<T, Stop<KvError>>) -> Result<T, KvError> {
        result.map_err(|stop| match stop {
            Stop::Refused(why) => why,
            Stop::Sql(error) => {
                let told = KvError::Unreadable(error.to_string());
                self.failed = Some(error);
                told
            }
        })
    }
}
