//! Forgetting the past.
//!
//! Compacting at a revision is a mark, durable at once: what is older can no longer be read. The rows go
//! afterwards, some at a time, on a thread of their own. A row goes when a later change of the same key,
//! at or before the mark, has replaced it; a delete goes itself once it is older than the mark. The row
//! at the mark stays whole: a watch may start there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use rusqlite::{Connection, OptionalExtension as _};
use tokio::sync::oneshot;
use vedetta_core::Revision;
use vedetta_db::{CommitError, Db, Purpose, Stop, Tx, WriteError, failpoint, rusqlite};

use crate::codec;
use crate::index::Index;
use crate::load::{Meta, set_meta};
use crate::range::FetchError;
use crate::request::KvError;
use crate::store::{Shared, lost, spawn};
use crate::{Change, Event};

/// Rows swept by one write.
const ROWS: u32 = 256;
/// How often the policy is looked at.
const POLICY_EVERY: Duration = Duration::from_secs(10);

/// How much history to keep. A revision is dropped when it is beyond either bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keep {
    /// The newest so many revisions.
    pub revisions: Option<u64>,
    /// What happened so recently.
    pub age: Option<Duration>,
}

impl Default for Keep {
    /// A million revisions, however old.
    fn default() -> Self {
        Self { revisions: Some(1_000_000), age: None }
    }
}

/// Asks the sweeping thread for work.
#[derive(Clone)]
pub(crate) struct Sweeper {
    orders: SyncSender<Order>,
    waiting: Arc<Waiting>,
    closing: Arc<AtomicBool>,
}

/// Who is told how a sweep ended that begins after they came; `None` when none will.
type Waiting = Mutex<Option<Vec<oneshot::Sender<Swept>>>>;

/// How a sweep ended.
type Swept = Result<(), KvError>;

enum Order {
    Sweep,
    Close,
}

impl Sweeper {
    pub(crate) fn start(
        shared: Arc<Shared>,
        db: Db,
        keep: Keep,
    ) -> std::io::Result<(Self, JoinHandle<()>)> {
        let (orders, inbox) = sync_channel(1);
        let sweep = Sweep::new(shared, db, keep);
        let (waiting, closing) = (Arc::clone(&sweep.waiting), Arc::clone(&sweep.closing));
        let thread = spawn("vedetta-compact", move || sweep.run(&inbox))?;
        Ok((Self { orders, waiting, closing }, thread))
    }

    /// Sweeps up to the mark.
    pub(crate) fn nudge(&self) {
        // A full line means that a sweep is about to start, which will see our mark, and who waits, too.
        let _ = self.orders.try_send(Order::Sweep);
    }

    /// The same; the answer comes when that is done.
    pub(crate) fn sweep(&self) -> oneshot::Receiver<Swept> {
        let (done, answer) = oneshot::channel();
        if let Some(waiting) = &mut *self.waiting.lock() {
            waiting.push(done);
        }
        self.nudge();
        answer
    }

    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);
        let _ = self.orders.send(Order::Close);
    }
}

struct Sweep {
    shared: Arc<Shared>,
    db: Db,
    keep: Keep,
    /// How often the policy is looked at.
    every: Duration,
    waiting: Arc<Waiting>,
    closing: Arc<AtomicBool>,
}

/// Why a sweep stopped early.
#[derive(Debug, thiserror::Error)]
enum SweepError {
    #[error(transparent)]
    Kv(#[from] KvError),
    #[error(transparent)]
    Read(#[from] vedetta_db::ReadError),
}

impl From<SweepError> for KvError {
    fn from(error: SweepError) -> Self {
        match error {
            SweepError::Kv(error) => error,
            SweepError::Read(error) => Self::Unreadable(error.to_string()),
        }
    }
}

impl Sweep {
    fn new(shared: Arc<Shared>, db: Db, keep: Keep) -> Self {
        let (waiting, closing) = (Arc::new(Mutex::new(Some(Vec::new()))), Arc::default());
        Self { shared, db, keep, every: POLICY_EVERY, waiting, closing }
    }

    fn run(&self, inbox: &Receiver<Order>) {
        let _ = self.sweep_logged(); // what the last run left
        let mut policy_due = Instant::now() + self.every;
        loop {
            match inbox.recv_timeout(policy_due.saturating_duration_since(Instant::now())) {
                Ok(Order::Sweep) => {
                    // Before it begins: who comes later may have a mark that it does not see.
                    let waiting = self.waiting.lock().as_mut().map(std::mem::take);
                    let swept = self.sweep_logged();
                    waiting.into_iter().flatten().for_each(|done| {
                        let _ = done.send(swept.clone());
                    });
                }
                Err(RecvTimeoutError::Timeout) => {}
                Ok(Order::Close) | Err(RecvTimeoutError::Disconnected) => break,
            }
            // However many orders come, the policy has its turn.
            if Instant::now() >= policy_due {
                self.follow_policy(self.db.steady_clock().now());
                policy_due = Instant::now() + self.every;
            }
        }
        *self.waiting.lock() = None;
    }

    fn sweep_logged(&self) -> Swept {
        self.sweep().map_err(KvError::from).inspect_err(|error| {
            tracing::error!(%error, "compaction stopped; it goes on with the next one");
        })
    }

    fn sweep(&self) -> Result<(), SweepError> {
        let mut met_full_disk = false;
        loop {
            let compacted = self.shared.index.read().compacted;
            let plan = self.db.read_blocking(|c| Ok(plan(c, &self.shared, compacted)))?;
            let plan = plan.map_err(KvError::from)?;
            let finished = plan.finished;
            match self.carry_out(plan) {
                // The next try may use the room kept for it.
                Err(SweepError::Kv(KvError::Lost(CommitError::Full))) if !met_full_disk => {
                    met_full_disk = true;
                    continue;
                }
                done => done?,
            }
            if finished || self.closing.load(Ordering::Relaxed) {
                return Ok(()); // the next start goes on with what is left
            }
        }
    }

    fn carry_out(&self, plan: Plan) -> Result<(), SweepError> {
        let Plan { rows, meta, passed, is_new, .. } = plan;
        let write = move |connection: &Tx<'_>| {
            for (revision, body) in rows {
                let revision = revision.0.cast_signed();
                match body {
                    None => connection
                        .prepare_cached("DELETE FROM event WHERE revision = ?1")?
                        .execute([revision])?,
                    Some(body) => connection
                        .prepare_cached("UPDATE event SET body = ?2 WHERE revision = ?1")?
                        .execute((revision, body))?,
                };
            }
            failpoint("kv.sweep");
            set_meta(connection, "swept", meta.swept.0.cast_signed())?;
            set_meta(connection, "rows", meta.rows.cast_signed())?;
            set_meta(connection, "sum", i64::from(meta.sum))?;
            Ok::<_, Stop<KvError>>(())
        };
        // A start on a full disk is not to take from the room that is kept for deletes.
        if is_new {
            self.db.write_blocking(Purpose::Reclaim, write).map_err(lost)?;
        }
        let _nobody_evaluates = self.shared.pending.lock();
        let mut index = self.shared.index.write();
        for Passed { key, revision, drop_tombstone } in passed {
            index.forget(&key, revision, drop_tombstone);
        }
        Ok(())
    }

    /// Compacts what the policy no longer wants, if that is worth the work.
    fn follow_policy(&self, now_ms: i64) {
        let (current, oldest) = {
            let index = self.shared.index.read();
            (index.revision, index.compacted)
        };
        let by_count = self.keep.revisions.and_then(|keep| {
            let target = current.0.saturating_sub(keep);
            (target >= oldest.0 + (keep / 20).max(1)).then_some(Revision(target))
        });
        let by_age = self.keep.age.and_then(|age| self.revision_before(now_ms, age));
        let Some(target) = by_count.max(by_age).map(|target| target.min(current)) else { return };
        if target <= oldest {
            return;
        }
        let marked = match self.mark(target) {
            // The next try may use the room kept for it.
            Err(WriteError::Lost(CommitError::Full)) => self.mark(target),
            done => done,
        };
        match marked {
            Ok(()) => drop(self.sweep_logged()),
            Err(error) => tracing::warn!(%error, "could not compact by policy"),
        }
    }

    fn mark(&self, target: Revision) -> Result<(), WriteError<KvError>> {
        let shared = Arc::clone(&self.shared);
        self.db.write_blocking(Purpose::Reclaim, move |tx| {
            let file: &rusqlite::Connection = tx;
            let mut pending = shared.pending.lock();
            if pending.compacted < target {
                set_meta(file, "compacted", target.0.cast_signed())?;
                pending.compacted = target;
            }
            Ok(())
        })
    }

    /// Notes when the store was at which revision, and answers which one it had passed `age` ago. That is known on a
    /// full disk, too, where nothing can be noted.
    fn revision_before(&self, now_ms: i64, age: Duration) -> Option<Revision> {
        let current = self.shared.index.read().revision;
        let then_ms = now_ms.saturating_sub(i64::try_from(age.as_millis()).unwrap_or(i64::MAX));
        let read = self.db.read_blocking(|file| Noted::read(file, now_ms, then_ms, current));
        let Noted { last, passed } = read
            .inspect_err(|error| tracing::warn!(%error, "could not read when the store was where"))
            .ok()?;
        let passed_ms = passed.map_or(i64::MIN, |(at_ms, _)| at_ms);
        let noted = self.db.write_blocking(Purpose::Store, move |file| {
            if last != Some(current) {
                let sql = "INSERT OR REPLACE INTO mark (at_ms, revision) VALUES (?1, ?2)";
                file.execute(sql, [now_ms, current.0.cast_signed()])?;
            }
            file.execute("DELETE FROM mark WHERE at_ms < ?1", [passed_ms])?;
            Ok::<_, Stop<KvError>>(())
        });
        if let Err(error) = noted {
            tracing::warn!(%error, "could not note the revision of now");
        }
        passed.map(|(_, revision)| revision)
    }
}

/// What the table `mark` tells of the past. Its rows have no checksum: what cannot be is not believed, so that a damaged
/// one has too much kept for a while, and not too little.
struct Noted {
    /// The revision noted last.
    last: Option<Revision>,
    /// The last one that was noted by then, and when.
    passed: Option<(i64, Revision)>,
}

impl Noted {
    fn read(
        file: &Connection,
        now_ms: i64,
        then_ms: i64,
        current: Revision,
    ) -> rusqlite::Result<Self> {
        let revision = |row: &rusqlite::Row<'_>| row.get(0).map(i64::cast_unsigned).map(Revision);
        let sql = "SELECT revision FROM mark WHERE at_ms <= ?1 ORDER BY at_ms DESC LIMIT 1";
        let last = file.query_row(sql, [now_ms], revision).optional()?;
        // The store goes on: it was never beyond where it stood later, nor beyond where it stands.
        let sql = "SELECT at_ms, revision FROM mark WHERE at_ms <= ?1 ORDER BY at_ms DESC";
        let mut noted = file.prepare_cached(sql)?;
        let mut noted = noted.query([now_ms])?;
        let (mut passed, mut later) = (None, current.0.cast_signed().saturating_add(1));
        while let Some(row) = noted.next()? {
            let (at_ms, revision) = (row.get::<_, i64>(0)?, row.get::<_, i64>(1)?);
            if at_ms <= then_ms && (0..later).contains(&revision) {
                passed = Some((at_ms, Revision(revision.cast_unsigned())));
                break;
            }
            later = later.min(revision);
        }
        Ok(Self { last, passed })
    }
}

/// One step of a sweep, worked out beside the writer: rows at or below the mark change by sweeping only.
struct Plan {
    /// Rows to rewrite, or to delete.
    rows: Vec<RowChange>,
    meta: Meta,
    /// Whether the file has to be told.
    is_new: bool,
    passed: Vec<Passed>,
    finished: bool,
}

/// A row and what it is to be; `None` when it is to go.
type RowChange = (Revision, Option<Vec<u8>>);

/// A change the sweep has passed: the index need not know what the key was before.
struct Passed {
    key: Bytes,
    revision: Revision,
    drop_tombstone: bool,
}

fn plan(connection: &Connection, shared: &Shared, mark: Revision) -> Result<Plan, FetchError> {
    let before = Meta::read(connection)?;
    let (mut meta, swept) = (before, before.swept);
    let sql = "SELECT revision, body FROM event WHERE revision > ?1 AND revision <= ?2
               ORDER BY revision LIMIT ?3";
    let mut select = connection.prepare_cached(sql)?;
    let mut rows = select.query((swept.0.cast_signed(), mark.0.cast_signed(), ROWS))?;
    let (mut passed, mut doomed) = (Vec::new(), BTreeMap::<Revision, Vec<Bytes>>::new());
    let (mut seen, mut last) = (0, swept);
    while let Some(row) = rows.next()? {
        let revision = Revision(row.get::<_, i64>(0)?.cast_unsigned());
        let body = row.get_ref(1)?.as_blob().map_err(rusqlite::Error::from)?;
        (seen, last) = (seen + 1, revision);
        if revision < mark {
            meta.rows += 1;
            meta.sum ^= codec::stamp(body).ok_or(FetchError::Missing(revision))?;
        }
        let index = shared.index.read();
        codec::decode(revision, body, |event| {
            condemn(&index, &event, mark, &mut doomed);
            let gone = matches!(event.change, Change::Delete { .. });
            passed.push(Passed {
                key: Bytes::copy_from_slice(event.key()),
                revision,
                drop_tombstone: gone && revision < mark,
            });
        })
        .map_err(FetchError::Damaged)?;
    }
    let finished = seen < ROWS;
    // The row at the mark is looked at again next time, when its deletes may go. A mark without a row is
    // where a restored store jumped to.
    meta.swept = match () {
        () if last == mark => Revision(mark.0 - 1).max(swept),
        () if finished => mark.max(swept),
        () => last,
    };
    let mut changed = Vec::new();
    for (revision, keys) in doomed {
        changed.extend(strike(connection, &mut meta, revision, &keys)?);
    }
    let is_new = !changed.is_empty() || meta != before;
    Ok(Plan { rows: changed, meta, is_new, passed, finished })
}

/// Which rows an event lets go.
fn condemn(
    index: &Index,
    event: &Event,
    mark: Revision,
    doomed: &mut BTreeMap<Revision, Vec<Bytes>>,
) {
    if let Some(before) = index.change_before(event.key(), event.revision) {
        doomed.entry(before).or_default().push(Bytes::copy_from_slice(event.key()));
    }
    if matches!(event.change, Change::Delete { .. }) && event.revision < mark {
        doomed.entry(event.revision).or_default().push(Bytes::copy_from_slice(event.key()));
    }
}

/// Takes keys out of a row.
fn strike(
    connection: &Connection,
    meta: &mut Meta,
    revision: Revision,
    keys: &[Bytes],
) -> Result<Option<RowChange>, FetchError> {
    let mut select = connection.prepare_cached("SELECT body FROM event WHERE revision = ?1")?;
    let body: Option<Vec<u8>> =
        select.query_row([revision.0.cast_signed()], |row| row.get(0)).optional()?;
    let Some(body) = body else { return Ok(None) };
    let mut kept = Vec::new();
    codec::decode(revision, &body, |event| {
        if !keys.iter().any(|key| key == event.key()) {
            kept.push(event);
        }
    })
    .map_err(FetchError::Damaged)?;
    meta.sum ^= codec::stamp(&body).ok_or(FetchError::Missing(revision))?;
    if kept.is_empty() {
        meta.rows -= 1;
        return Ok(Some((revision, None)));
    }
    let mut row = Vec::new();
    codec::encode(revision, &kept, &mut row);
    meta.sum ^= codec::stamp(&row).unwrap_or_default();
    Ok(Some((revision, Some(row))))
}

#[cfg(test)]
mod tests {
    use vedetta_core::KeyRange;

    use super::*;
    use crate::{Options, Put, SCHEMA, Store, WatchOptions};

    /// A store with 100 revisions, and a sweep with that policy whose thread does not run.
    async fn store(keep: Keep) -> (tempfile::TempDir, Store, Sweep) {
        let folder = tempfile::tempdir().unwrap();
        let mut options = vedetta_db::Options::new(folder.path().join("vedetta.db"));
        options.ballast = 0;
        let db = Db::open(&options, &[SCHEMA]).unwrap();
        let off = Options { keep: Keep { revisions: None, age: None }, ..Options::default() };
        let store = Store::open(db.clone(), off).await.unwrap();
        write(&store, 100).await;
        let shared = Arc::clone(&store.shared);
        (folder, store, Sweep::new(shared, db, keep))
    }

    async fn write(store: &Store, puts: u32) {
        for n in 0..puts {
            store.put(Put::new("k", n.to_string())).await.unwrap();
        }
    }

    async fn follow(sweep: Sweep, now_ms: i64) -> Sweep {
        let followed = tokio::task::spawn_blocking(move || {
            sweep.follow_policy(now_ms);
            sweep
        });
        followed.await.unwrap()
    }

    #[tokio::test]
    async fn the_policy_keeps_the_newest_revisions() {
        let (_folder, store, sweep) = store(Keep { revisions: Some(60), age: None }).await;
        let sweep = follow(sweep, 0).await;
        assert_eq!(store.status().compacted, Revision(41));
        write(&store, 2).await;
        let sweep = follow(sweep, 0).await;
        assert_eq!(store.status().compacted, Revision(41), "two more are not worth the work");
        write(&store, 10).await;
        follow(sweep, 0).await;
        assert_eq!(store.status().compacted, Revision(53));
        store.close().await;
    }

    /// Lets the thread of a sweep run, and gives what orders it.
    fn start(sweep: Sweep) -> (Sweeper, impl FnOnce() -> JoinHandle<()>) {
        let (orders, inbox) = sync_channel(1);
        let (waiting, closing) = (Arc::clone(&sweep.waiting), Arc::clone(&sweep.closing));
        let run = move || std::thread::spawn(move || sweep.run(&inbox));
        (Sweeper { orders, waiting, closing }, run)
    }

    #[tokio::test]
    async fn the_policy_has_its_turn_however_often_somebody_compacts() {
        let (_folder, store, mut sweep) = store(Keep { revisions: Some(60), age: None }).await;
        sweep.every = Duration::from_millis(100);
        let (sweeper, run) = start(sweep);
        let thread = run();
        let followed = async {
            while store.status().compacted == Revision(0) {
                sweeper.sweep().await.unwrap().unwrap();
            }
        };
        let followed = tokio::time::timeout(Duration::from_secs(60), followed).await;
        followed.expect("orders that come one after the other hold the policy up");
        assert_eq!(store.status().compacted, Revision(41));
        sweeper.close();
        thread.join().unwrap();
        store.close().await;
    }

    #[tokio::test]
    async fn however_many_wait_for_a_sweep_each_is_told_when_it_is_done_or_never_will_be() {
        let (_folder, store, sweep) = store(Keep { revisions: None, age: None }).await;
        let rows = || async {
            let count = "SELECT count(*) FROM event";
            let rows = store.db.read(|c| c.query_row(count, [], |row| row.get::<_, i64>(0)));
            rows.await.unwrap()
        };
        // As if by `compact`, whose own thread must not sweep here.
        let mark = |tx: &Tx<'_>| Ok::<_, Stop<()>>(set_meta(tx, "compacted", 101)?);
        store.db.write(Purpose::Reclaim, mark).await.unwrap();
        store.shared.index.write().compacted = Revision(101);
        assert_eq!(rows().await, 100);

        let (sweeper, run) = start(sweep);
        let answers: Vec<_> = (0..1000).map(|_| sweeper.sweep()).collect();
        let thread = run();
        for answer in answers {
            answer.await.expect("it is told").expect("all goes well");
            assert_eq!(rows().await, 1, "told before it was done");
        }
        sweeper.close();
        thread.join().unwrap();
        assert!(sweeper.sweep().await.is_err(), "nobody sweeps any more");
        store.close().await;
    }

    /// Both what is kept by default, and that it is there after a restart: etcd's v2 keeps 1,000 in memory.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_hundred_thousand_revisions_are_kept_by_default_and_watched_from_the_first_after_a_restart()
     {
        const WRITERS: u64 = 64;
        const REVISIONS: u64 = 100_001;
        let folder = tempfile::tempdir().unwrap();
        let options = vedetta_db::Options::new(folder.path().join("vedetta.db"));
        let open = || async {
            let db = Db::open(&options, &[SCHEMA]).unwrap();
            Store::open(db, Options::default()).await.unwrap()
        };
        let store = open().await;
        let mut writers = tokio::task::JoinSet::new();
        for writer in 0..WRITERS {
            let store = store.clone();
            writers.spawn(async move {
                for n in (writer..REVISIONS).step_by(usize::try_from(WRITERS).unwrap()) {
                    store.put(Put::new(format!("k{}", n % 1000), n.to_string())).await.unwrap();
                }
            });
        }
        writers.join_all().await;
        let last = Revision(REVISIONS + 1);
        assert_eq!(store.status().revision, last);
        let now = store.db.steady_clock().now();
        let policy = Sweep::new(Arc::clone(&store.shared), store.db.clone(), Keep::default());
        follow(policy, now).await;
        store.close().await;

        let store = open().await;
        assert_eq!((store.status().revision, store.status().compacted), (last, Revision(0)));
        let from = WatchOptions { from: Some(Revision(2)), ..WatchOptions::default() };
        let mut watcher = store.watch(KeyRange::all(), from).unwrap();
        let (mut next, mut written) =
            (Revision(2), vec![false; usize::try_from(REVISIONS).unwrap()]);
        while next <= last {
            for event in watcher.next().await.unwrap().iter() {
                assert_eq!(event.revision, next);
                next = next.next();
                let value = std::str::from_utf8(event.now().unwrap().value()).unwrap();
                let value: usize = value.parse().unwrap();
                assert!(!std::mem::replace(&mut written[value], true), "{value} came twice");
            }
        }
        assert!(written.iter().all(|written| *written));
        store.close().await;
    }

    #[tokio::test]
    async fn the_policy_keeps_what_is_young() {
        let keep = Keep { revisions: None, age: Some(Duration::from_secs(60)) };
        let (_folder, store, sweep) = store(keep).await;
        let sweep = follow(sweep, 1_000_000).await; // the store is at 101
        assert_eq!(store.status().compacted, Revision(0), "nothing is known to be old");
        write(&store, 10).await;
        let sweep = follow(sweep, 1_030_000).await; // and at 111 half a minute later
        assert_eq!(store.status().compacted, Revision(0));
        let sweep = follow(sweep, 1_061_000).await;
        assert_eq!(store.status().compacted, Revision(101), "that was more than a minute ago");
        follow(sweep, 1_091_000).await;
        assert_eq!(store.status().compacted, Revision(111));
        store.close().await;
    }

    #[test]
    fn a_note_that_cannot_be_true_has_nothing_forgotten_too_soon() {
        const NOW: i64 = 1_000;
        for (what, notes, passed) in [
            ("sound", &[(100, 10), (200, 20), (900, 30)][..], Some((200, 20))),
            ("nothing is so old", &[(600, 10)], None),
            ("above the current revision", &[(100, 10), (200, 99)], Some((100, 10))),
            ("negative, which keeps more", &[(100, 10), (200, -5)], None),
            ("beyond where it was later", &[(100, 10), (200, 35), (900, 30)], Some((100, 10))),
            ("from when it was young", &[(5, 30), (200, 20), (900, 30)], Some((200, 20))),
            ("a young one made old", &[(100, 30), (200, 10), (300, 20)], Some((300, 20))),
            ("too low, which keeps more", &[(100, 10), (200, 3), (900, 30)], Some((200, 3))),
            ("from the future", &[(100, 10), (200, 20), (5_000, 1)], Some((200, 20))),
        ] {
            let file = Connection::open_in_memory().unwrap();
            SCHEMA.steps.iter().for_each(|step| file.execute_batch(step).unwrap());
            for note in notes {
                file.execute("INSERT INTO mark (at_ms, revision) VALUES (?1, ?2)", *note).unwrap();
            }
            let found = Noted::read(&file, NOW, NOW - 500, Revision(40)).unwrap();
            assert_eq!(found.passed.map(|(at, Revision(it))| (at, it)), passed, "{what}");
        }
    }
}
