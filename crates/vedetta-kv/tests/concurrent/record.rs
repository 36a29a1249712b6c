//! Doing things to a store and writing down what was seen.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{
    Compare, CompareOp, CompareTarget, Delete, KvError, Op, OpReply, Put, Range, Ranged, Store,
    Txn, WatchError, WatchOptions,
};

use crate::check::{Call, Did, Effect, Stretch, Watch};
use crate::support::soon;

/// Ticks once whenever somebody calls or returns.
#[derive(Debug, Clone, Default)]
pub(crate) struct Clock(Arc<AtomicU64>);

impl Clock {
    fn tick(&self) -> u64 {
        self.0.fetch_add(1, Ordering::SeqCst)
    }
}

/// Calls the store, one thing after the other.
pub(crate) struct Caller {
    pub(crate) store: Store,
    pub(crate) clock: Clock,
    pub(crate) random: Rng,
    /// Makes its values its own.
    pub(crate) name: usize,
    pub(crate) calls: Vec<Call>,
    /// The revisions it compacted at.
    pub(crate) marks: BTreeSet<Revision>,
}

impl Caller {
    pub(crate) fn new(store: &Store, clock: &Clock, name: usize) -> Self {
        Self {
            store: store.clone(),
            clock: clock.clone(),
            random: Rng::with_seed(name as u64),
            name,
            calls: Vec::new(),
            marks: BTreeSet::new(),
        }
    }

    pub(crate) async fn act(&mut self) {
        let called = self.clock.tick();
        let Some((revision, did)) = soon(self.ask()).await else { return };
        self.calls.push(Call { called, returned: self.clock.tick(), revision, did });
    }

    async fn ask(&mut self) -> Option<(Revision, Did)> {
        let chance = self.random.u32(..100);
        match chance {
            0..35 => Some(self.put().await),
            35..50 => Some(self.delete().await),
            50..70 => Some(self.swap().await),
            70..85 => self.range(None).await,
            85..98 => {
                let now = self.store.status().revision.0;
                let at = now.saturating_sub(self.random.u64(..40)).max(1);
                self.range(Some(Revision(at))).await
            }
            _ => self.compact().await,
        }
    }

    async fn put(&mut self) -> (Revision, Did) {
        let (key, value) = (self.key(), self.value());
        let put = Put { previous: true, ..Put::new(key.clone(), value.clone()) };
        let done = self.store.put(put).await.unwrap();
        (done.revision, Did::Wrote(vec![Effect::Put { key, value, previous: done.previous }]))
    }

    async fn delete(&mut self) -> (Revision, Did) {
        let range = self.keys();
        let delete = Delete { range: range.clone(), previous: true };
        let done = self.store.delete(delete).await.unwrap();
        assert_eq!(done.count, done.previous.len());
        let did = if done.count == 0 {
            Did::Read { at: done.revision, range, keys: Vec::new() }
        } else {
            Did::Wrote(vec![Effect::Delete { range, previous: done.previous }])
        };
        (done.revision, did)
    }

    /// Two keys change together if one of them is as it was when last read; else all keys are read.
    async fn swap(&mut self) -> (Revision, Did) {
        let (first, second) = (self.key(), self.key());
        let seen = self.store.range(Range::new(KeyRange::One(first.clone()))).await.unwrap();
        let version = seen.keys.first().map_or(0, vedetta_kv::KeyValue::version);
        let value = self.value();
        let keys = if first == second { vec![first.clone()] } else { vec![first.clone(), second] };
        let put = |key: &Bytes| Put { previous: true, ..Put::new(key.clone(), value.clone()) };
        let txn = Txn {
            when: vec![Compare {
                range: KeyRange::One(first.clone()),
                op: CompareOp::Equal,
                target: CompareTarget::Version(version),
            }],
            then: keys.iter().map(|key| Op::Put(put(key))).collect(),
            otherwise: vec![Op::Range(Range::new(KeyRange::all()))],
        };
        let done = self.store.txn(txn).await.unwrap();
        let mut effects = vec![Effect::Found { key: first, version }];
        for (reply, key) in done.replies.into_iter().zip(keys) {
            match reply {
                OpReply::Put(put) => {
                    let (value, previous) = (value.clone(), put.previous);
                    effects.push(Effect::Put { key, value, previous });
                }
                OpReply::Range(Ranged { revision, keys, .. }) => {
                    return (revision, Did::Read { at: revision, range: KeyRange::all(), keys });
                }
                other => panic!("{other:?}"),
            }
        }
        (done.revision, Did::Wrote(effects))
    }

    async fn range(&mut self, at: Option<Revision>) -> Option<(Revision, Did)> {
        let range = self.keys();
        let read = self.store.range(Range { at, ..Range::new(range.clone()) }).await;
        match read {
            Ok(Ranged { revision, keys, .. }) => {
                Some((revision, Did::Read { at: at.unwrap_or(revision), range, keys }))
            }
            Err(KvError::Compacted { asked, oldest }) => {
                assert!(Some(asked) == at && asked < oldest);
                None
            }
            Err(other) => panic!("{other:?}"),
        }
    }

    async fn compact(&mut self) -> Option<(Revision, Did)> {
        let at = Revision(self.store.status().revision.0.saturating_sub(self.random.u64(..60)));
        match self.store.compact(at, self.random.bool()).await {
            Ok(()) => drop(self.marks.insert(at)),
            Err(KvError::Compacted { asked, oldest }) => assert!(asked == at && at <= oldest),
            Err(other) => panic!("{other:?}"),
        }
        None
    }

    fn key(&mut self) -> Bytes {
        Bytes::from(format!("{}/{}", self.random.choice(["a", "b"]).unwrap(), self.random.u8(..4)))
    }

    fn keys(&mut self) -> KeyRange {
        match self.random.u8(..6) {
            0 => KeyRange::all(),
            1 => KeyRange::prefix("a/"),
            2 => KeyRange::Between("a/2".into(), "b/2".into()),
            _ => KeyRange::One(self.key()),
        }
    }

    /// One that nobody else writes.
    fn value(&mut self) -> Bytes {
        Bytes::from(format!("{} at {}", self.name, self.clock.0.load(Ordering::SeqCst)))
    }
}

/// A watcher's way of reading.
#[derive(Debug, Clone)]
pub(crate) struct Habit {
    pub(crate) range: KeyRange,
    pub(crate) from: Option<Revision>,
    /// How long it does something else after each batch.
    pub(crate) pause: Duration,
}

/// Follows the store until all that was written by the `end` was handed out. What it sees are calls too.
pub(crate) async fn follow(
    store: Store,
    clock: Clock,
    habit: Habit,
    mut end: tokio::sync::watch::Receiver<Option<Revision>>,
) -> (Watch, Vec<Call>) {
    let Habit { range, from, pause } = habit;
    let (mut stretches, mut calls) = (Vec::new(), Vec::new());
    let mut from = from.unwrap_or(store.status().revision.next());
    'anew: loop {
        let mut stretch = Stretch { from, batches: Vec::new() };
        let options = WatchOptions { from: Some(from), ..WatchOptions::default() };
        let mut watcher = match store.watch(range.clone(), options) {
            Ok(watcher) => watcher,
            Err(WatchError::Compacted { asked, oldest }) => {
                assert!(asked == from && asked < oldest);
                stretches.push(stretch);
                from = oldest;
                continue 'anew;
            }
            Err(other) => panic!("{other:?}"),
        };
        let mut moment = Duration::from_millis(1);
        loop {
            let end = *end.borrow_and_update();
            if let Some(end) = end.filter(|&end| watcher.progress() >= end) {
                stretches.push(stretch);
                return (Watch { range, end, stretches }, calls);
            }
            let called = clock.tick();
            match tokio::time::timeout(moment, watcher.next()).await {
                Ok(Ok(batch)) => {
                    let batch: Vec<_> = batch.iter().cloned().collect();
                    let revision = batch.last().expect("a batch is never empty").revision;
                    calls.push(Call { called, returned: clock.tick(), revision, did: Did::Saw });
                    stretch.batches.push(batch);
                    tokio::time::sleep(pause).await;
                }
                Ok(Err(WatchError::Compacted { asked, oldest })) => {
                    assert!(asked >= from && asked < oldest);
                    stretches.push(stretch);
                    from = oldest;
                    continue 'anew;
                }
                Ok(Err(other)) => panic!("{other:?}"),
                Err(_) => moment = (moment * 2).min(Duration::from_millis(50)),
            }
        }
    }
}
