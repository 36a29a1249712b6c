//! Many writers and a few watchers at once, noting what they do.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::task::JoinSet;
use vedetta_core::{KeyRange, Revision};
use vedetta_db::CommitError;
use vedetta_kv::{
    Compare, CompareOp, CompareTarget, Delete, KvError, LeaseId, Op, Purpose, Put, Range, Store,
    Txn, Update, WatchError, WatchOptions, Write,
};

use crate::note::{Note, What, now_ms, value};
use crate::story::{LONG, WATCHED, by_revision};

/// Where notes go, each before the next step is taken.
pub type Notes = Arc<dyn Fn(Note) + Send + Sync>;

/// How much to do.
#[derive(Debug, Clone)]
pub struct Workload {
    /// Decides everything but the timing.
    pub seed: u64,
    /// The first id to use; all later ones must be free, too.
    pub first_id: u64,
    /// Writers at the same time.
    pub writers: u64,
    /// Writes of each.
    pub writes: u64,
    /// Whether leases short enough to expire are among them.
    pub short_leases: bool,
    /// What to do when the database fails.
    pub failing: Failing,
}

/// What to do when the database fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failing {
    /// Complain: there is no reason to.
    Wrong,
    /// Stop, without a complaint.
    Ends,
    /// Go on, without a complaint.
    Endured,
}

/// What a writer needs.
struct Writer {
    store: Store,
    notes: Notes,
    ids: Arc<AtomicU64>,
    rng: fastrand::Rng,
    short_leases: bool,
    failing: Failing,
    /// Leases it granted.
    leases: Vec<i64>,
    /// Leases of directories it made.
    trees: Vec<i64>,
}

/// The database is of no more use.
struct Over;

impl Workload {
    /// Runs the writers to their end, or to the first write that fails. Watchers of [`WATCHED`] start at
    /// `resume` and go on until the store is closed.
    ///
    /// # Panics
    ///
    /// If a writer does.
    pub async fn run(&self, store: &Store, resume: &[u64], notes: &Notes) {
        for (watcher, &from) in resume.iter().enumerate() {
            let (store, notes, failing) = (store.clone(), Arc::clone(notes), self.failing);
            tokio::spawn(async move { watch(watcher, from, &store, &notes, failing).await });
        }
        let ids = Arc::new(AtomicU64::new(self.first_id));
        let mut tasks = JoinSet::new();
        for number in 0..self.writers {
            let mut writer = Writer {
                store: store.clone(),
                notes: Arc::clone(notes),
                ids: Arc::clone(&ids),
                rng: fastrand::Rng::with_seed(self.seed.wrapping_mul(31).wrapping_add(number)),
                short_leases: self.short_leases,
                failing: self.failing,
                leases: Vec::new(),
                trees: Vec::new(),
            };
            let steps = self.writes;
            tasks.spawn(async move {
                for _ in 0..steps {
                    if writer.step().await.is_err() {
                        return;
                    }
                }
            });
        }
        while let Some(ended) = tasks.join_next().await {
            ended.expect("a writer does not panic");
        }
    }
}

impl Writer {
    async fn step(&mut self) -> Result<(), Over> {
        match self.rng.u8(..100) {
            0..30 => self.put().await,
            30..48 => self.txn().await,
            48..54 => self.compare_and_put().await,
            54..63 => self.delete().await,
            63..68 => self.grant().await,
            68..75 => self.put_leased().await,
            75..79 => self.renew().await,
            79..82 => self.revoke().await,
            82..87 => self.update().await,
            87..90 => self.make_directory().await,
            90..93 => self.put_below().await,
            93..94 => self.release().await,
            94..97 => self.read_the_past().await,
            _ => self.compact().await,
        }
    }

    fn key(&mut self) -> String {
        format!("k/{:02}", self.rng.u8(..24))
    }

    fn tried(&self, what: What) -> u64 {
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        (self.notes)(Note::Tried { id, what });
        id
    }

    /// Notes the answer: the revision of what was done, `None` for "nothing to do".
    fn answered(&self, id: u64, answer: Result<Option<Revision>, KvError>) -> Result<(), Over> {
        self.answered_to(&[id], answer)
    }

    /// The same for tries that are one for the store.
    #[expect(clippy::needless_pass_by_value, reason = "an answer is noted once")]
    fn answered_to(
        &self,
        ids: &[u64],
        answer: Result<Option<Revision>, KvError>,
    ) -> Result<(), Over> {
        let lost = matches!(answer, Err(KvError::Lost(_)));
        for &id in ids {
            let note = match &answer {
                Ok(Some(Revision(revision))) => Note::Done { id, revision: *revision },
                Ok(None) => Note::Refused { id, why: String::new() },
                Err(error) => {
                    let why = crate::bed::explain(error);
                    match error {
                        KvError::Lost(CommitError::Failed(_)) => Note::Failed { id, why },
                        _ => Note::Refused { id, why },
                    }
                }
            };
            if lost && self.failing == Failing::Wrong {
                (self.notes)(Note::Trouble(format!("a write was lost: {note}")));
            }
            (self.notes)(note);
        }
        if lost && self.failing != Failing::Endured { Err(Over) } else { Ok(()) }
    }

    async fn put(&mut self) -> Result<(), Over> {
        let key = self.key();
        let id = self.tried(What::Write {
            puts: vec![key.clone()],
            deletes: vec![],
            lease: 0,
            anew: false,
        });
        let answer = self.store.put(Put::new(key, value(id))).await;
        self.answered(id, answer.map(|done| Some(done.revision)))
    }

    /// Several keys get the same value, another may go.
    async fn txn(&mut self) -> Result<(), Over> {
        let mut numbers: Vec<u8> = (0..24).collect();
        self.rng.shuffle(&mut numbers);
        let mut keys: Vec<_> =
            numbers.iter().take(self.rng.usize(2..8)).map(|n| format!("k/{n:02}")).collect();
        let deletes = if self.rng.bool() { keys.pop().into_iter().collect() } else { vec![] };
        let id = self.tried(What::Write {
            puts: keys.clone(),
            deletes: deletes.clone(),
            lease: 0,
            anew: false,
        });
        let value = value(id);
        let mut then: Vec<Op> =
            keys.into_iter().map(|key| Op::Put(Put::new(key, value.clone()))).collect();
        then.extend(
            deletes.into_iter().map(|key| {
                Op::Delete(Delete { range: KeyRange::One(key.into()), previous: false })
            }),
        );
        let answer = self.store.txn(Txn { then, ..Txn::default() }).await;
        self.answered(id, answer.map(|done| Some(done.revision)))
    }

    /// Puts two keys if one of them is new.
    async fn compare_and_put(&mut self) -> Result<(), Over> {
        let (key, other) = (self.key(), format!("c/{}", self.rng.u8(..4)));
        let puts = vec![key.clone(), other.clone()];
        let id = self.tried(What::Write { puts, deletes: vec![], lease: 0, anew: false });
        let when = vec![Compare {
            range: KeyRange::One(key.clone().into()),
            op: CompareOp::Equal,
            target: CompareTarget::Version(0),
        }];
        let put = |key: String| Op::Put(Put::new(key, value(id)));
        let txn = Txn { when, then: vec![put(key), put(other)], otherwise: vec![] };
        let answer = self.store.txn(txn).await;
        self.answered(id, answer.map(|done| done.held.then_some(done.revision)))
    }

    async fn delete(&mut self) -> Result<(), Over> {
        let key = self.key();
        let id = self.tried(What::Write {
            puts: vec![],
            deletes: vec![key.clone()],
            lease: 0,
            anew: false,
        });
        let delete = Delete { range: KeyRange::One(key.into()), previous: false };
        let answer = self.store.delete(delete).await;
        self.answered(id, answer.map(|done| (done.count > 0).then_some(done.revision)))
    }

    /// A lease to be granted. It has the number of its try.
    fn new_lease(&mut self) -> (u64, i64, Duration) {
        let short = self.short_leases && self.rng.bool();
        let ttl = if short { Duration::from_millis(self.rng.u64(5..60)) } else { LONG };
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        let lease = id.cast_signed();
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        (self.notes)(Note::Tried { id, what: What::Grant { lease, ttl_ms, at_ms: now_ms() } });
        (id, lease, ttl)
    }

    async fn grant(&mut self) -> Result<(), Over> {
        let (id, lease, ttl) = self.new_lease();
        let answer = self.store.grant(LeaseId::new(lease), ttl).await;
        if answer.is_ok() {
            self.leases.push(lease);
        }
        let revision = Revision::FRESH; // granting makes none
        self.answered(id, answer.map(|_| Some(revision)))
    }

    async fn put_leased(&mut self) -> Result<(), Over> {
        let Some(&lease) = self.rng.choice(&self.leases) else { return self.grant().await };
        let Some(named) = LeaseId::new(lease) else { return Ok(()) };
        let puts: Vec<_> =
            (0..self.rng.u8(1..4)).map(|number| format!("l/{lease}/{number}")).collect();
        let id =
            self.tried(What::Write { puts: puts.clone(), deletes: vec![], lease, anew: false });
        let value = value(id);
        let put = |key| Op::Put(Put::new(key, value.clone()).lease(named));
        let txn = Txn { then: puts.into_iter().map(put).collect(), ..Txn::default() };
        let answer = self.store.txn(txn).await;
        self.answered(id, answer.map(|done| Some(done.revision)))
    }

    async fn renew(&mut self) -> Result<(), Over> {
        let leases: Vec<i64> = self.leases.iter().chain(&self.trees).copied().collect();
        let Some(&lease) = self.rng.choice(&leases) else { return self.grant().await };
        let Some(named) = LeaseId::new(lease) else { return Ok(()) };
        let id = self.tried(What::Renew { lease, at_ms: now_ms() });
        let answer = self.store.keep_alive(named).await;
        let revision = Revision::FRESH; // renewing makes none
        self.answered(id, answer.map(|_| Some(revision)))
    }

    /// What the v2 API does: looks and writes in one step, on the writer thread. `false` is "nothing to do".
    async fn run_update(
        &self,
        work: impl FnOnce(&mut Update<'_>) -> Result<bool, KvError> + Send + 'static,
    ) -> Result<Option<Revision>, KvError> {
        let work = |update: &mut Update<'_>| Ok(work(update)?.then(|| update.revision()));
        self.store.update(Purpose::Store, work).await
    }

    /// Some keys are made anew, another goes, if it is there or not.
    async fn update(&mut self) -> Result<(), Over> {
        let mut numbers: Vec<u8> = (0..24).collect();
        self.rng.shuffle(&mut numbers);
        let mut puts: Vec<_> =
            numbers.iter().take(self.rng.usize(2..5)).map(|n| format!("k/{n:02}")).collect();
        let gone = puts.pop().filter(|_| self.rng.bool());
        let deletes: Vec<String> = gone.into_iter().collect();
        let what =
            What::Write { puts: puts.clone(), deletes: deletes.clone(), lease: 0, anew: true };
        let id = self.tried(what);
        let answer = self.run_update(move |update| {
            for key in puts {
                update.put(key, value(id), Write { anew: true, tag: 3, ..Write::default() })?;
            }
            for key in deletes {
                update.delete(key, 4)?;
            }
            Ok(true)
        });
        let answer = answer.await;
        self.answered(id, answer)
    }

    /// A directory and the lease that it and all below it go with.
    async fn make_directory(&mut self) -> Result<(), Over> {
        let (granted, lease, ttl) = self.new_lease();
        let Some(named) = LeaseId::new(lease) else { return Ok(()) };
        let key = format!("t/{lease}/");
        let puts = vec![key.clone()];
        let id = self.tried(What::Write { puts, deletes: vec![], lease, anew: true });
        let answer = self.run_update(move |update| {
            update.grant_tree(named, ttl)?;
            update.put(key, value(id), Write { anew: true, lease: Some(named), tag: 1 })?;
            Ok(true)
        });
        let answer = answer.await;
        if answer.is_ok() {
            self.trees.push(lease);
        }
        self.answered_to(&[granted, id], answer)
    }

    /// A key in a directory, if that is still there.
    async fn put_below(&mut self) -> Result<(), Over> {
        let Some(&lease) = self.rng.choice(&self.trees) else {
            return self.make_directory().await;
        };
        let (directory, key) = (format!("t/{lease}/"), format!("t/{lease}/{}", self.rng.u8(..3)));
        let puts = vec![key.clone()];
        let id = self.tried(What::Write { puts, deletes: vec![], lease: 0, anew: true });
        let answer = self.run_update(move |update| {
            if update.get(directory.as_bytes()).is_none() {
                return Ok(false);
            }
            update.put(key, value(id), Write { anew: true, ..Write::default() })?;
            Ok(true)
        });
        let answer = answer.await;
        self.answered(id, answer)
    }

    /// A directory that is to stay: its lease goes, it does not.
    async fn release(&mut self) -> Result<(), Over> {
        if self.trees.is_empty() {
            return self.make_directory().await;
        }
        let at = self.rng.usize(..self.trees.len());
        let lease = self.trees.swap_remove(at);
        let Some(named) = LeaseId::new(lease) else { return Ok(()) };
        let key = format!("t/{lease}/");
        let released = self.tried(What::Revoke { lease });
        let puts = vec![key.clone()];
        let id = self.tried(What::Write { puts, deletes: vec![], lease: 0, anew: true });
        let answer = self.run_update(move |update| {
            if update.get(key.as_bytes()).is_none() {
                return Ok(false);
            }
            update.put(key, value(id), Write { anew: true, ..Write::default() })?;
            update.release(&[named].into())?;
            Ok(true)
        });
        let answer = answer.await;
        self.answered_to(&[released, id], answer)
    }

    /// Two reads at one revision are the same, or fail with a reason.
    async fn read_the_past(&mut self) -> Result<(), Over> {
        let at = Revision(self.store.revision().0.saturating_sub(self.rng.u64(..30)));
        let read =
            || self.store.range(Range { at: Some(at), ..Range::new(KeyRange::prefix("k/")) });
        match (read().await, read().await) {
            (Ok(first), Ok(second)) if first.keys != second.keys => {
                (self.notes)(Note::Trouble(format!("two reads at {} differ", at.0)));
            }
            (Err(KvError::Unreadable(why)), _) | (_, Err(KvError::Unreadable(why)))
                if self.failing == Failing::Wrong =>
            {
                (self.notes)(Note::Trouble(format!("cannot read at {}: {why}", at.0)));
            }
            _ => {} // compacted, before the first revision, or not to be read
        }
        Ok(())
    }

    async fn revoke(&mut self) -> Result<(), Over> {
        // Of a key or of a directory, with all that is below it.
        let of_keys = self.rng.usize(..=self.leases.len() + self.trees.len()) < self.leases.len();
        let leases = if of_keys { &mut self.leases } else { &mut self.trees };
        if leases.is_empty() {
            return self.put().await;
        }
        let lease = leases.swap_remove(self.rng.usize(..leases.len()));
        let Some(named) = LeaseId::new(lease) else { return Ok(()) };
        let id = self.tried(What::Revoke { lease });
        let answer = self.store.revoke(named).await;
        self.answered(id, answer.map(Some))
    }

    async fn compact(&mut self) -> Result<(), Over> {
        let back = self.rng.u64(..30);
        let revision = Revision(self.store.status().revision.0.saturating_sub(back));
        let id = self.tried(What::Compact { revision: revision.0 });
        let answer = self.store.compact(revision, self.rng.bool()).await;
        self.answered(id, answer.map(|()| Some(revision)))
    }
}

async fn watch(watcher: usize, from: u64, store: &Store, notes: &Notes, failing: Failing) {
    let mut from = Revision(from);
    loop {
        let range = KeyRange::prefix(WATCHED[watcher]);
        let options = WatchOptions { from: Some(from), ..WatchOptions::default() };
        let ended = match store.watch(range, options) {
            Err(error) => error,
            Ok(mut watching) => loop {
                let batch = match watching.next().await {
                    Ok(batch) => batch,
                    Err(error) => break error,
                };
                for (revision, events) in by_revision(batch.iter()) {
                    notes(Note::Seen { watcher, at_ms: now_ms(), revision, events });
                }
            },
        };
        match ended {
            WatchError::Compacted { oldest, .. } => {
                notes(Note::Compacted { watcher, oldest: oldest.0 });
                from = oldest;
            }
            WatchError::Closed => return,
            other => {
                if failing == Failing::Wrong {
                    let why = format!("watcher {watcher} ended: {}", crate::bed::explain(&other));
                    notes(Note::Trouble(why));
                }
                return;
            }
        }
    }
}
