//! The store as its users hold it.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use vedetta_core::{KeyRange, Revision};
use vedetta_db::{
    BackupError, CommitError, Db, Mirror, Purpose, Round, Rows, Schema, Size, Stop, WriteError,
    backup, failpoint, rusqlite,
};

use crate::compact::{Keep, Sweeper};
use crate::engine::{self, Draft, Engine};
use crate::index::{Found, Index};
use crate::lease::{Leases, Renewal};
use crate::load;
use crate::pending::{LeaseChange, Pending};
use crate::range;
use crate::request::{
    Delete, Deleted, KvError, Op, OpReply, Put, PutDone, Range, Ranged, Txn, TxnDone,
};
use crate::watch::{Block, Hub};
use crate::{Cause, LeaseId, LeaseInfo, WatchError, WatchOptions, Watcher};

/// The store's tables; give it to [`Db::open`].
pub const SCHEMA: Schema = Schema {
    component: "kv",
    steps: &["CREATE TABLE event (revision INTEGER PRIMARY KEY, body BLOB NOT NULL) STRICT;
         CREATE TABLE lease (id INTEGER PRIMARY KEY, ttl_ms INTEGER NOT NULL,
                             deadline_ms INTEGER NOT NULL, renewed INTEGER NOT NULL,
                             tree INTEGER NOT NULL, checksum INTEGER NOT NULL) STRICT;
         CREATE TABLE mark (at_ms INTEGER PRIMARY KEY, revision INTEGER NOT NULL) STRICT;
         CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;"],
};

/// A snapshot while it is made, beside the database: how the names of its files begin.
const SNAPSHOT: &str = ".vedetta-snapshot";
/// Keys a reader looks at before it lets the lock go for a moment.
const CHUNK: usize = 512;
/// Leases ended by one write.
const ENDED_AT_ONCE: usize = 256;
/// How often the store notes its age while there are leases; after a crash they live longer by up to
/// this much.
const AGE_EVERY: Duration = Duration::from_secs(5);
/// How long to wait before ending leases again when that failed.
const RETRY: Duration = Duration::from_millis(100);

/// How a store is to be run.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// What a request may ask for.
    pub limits: Limits,
    /// Bytes the file may use before only deletes and compaction are taken.
    pub quota: Option<u64>,
    /// How much history to keep.
    pub keep: Keep,
}

/// What a request may ask for.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Bytes of a key.
    pub key: usize,
    /// Bytes of a value.
    pub value: usize,
    /// Bytes of a whole request: its keys and values.
    pub request: usize,
    /// Operations in a branch of a transaction.
    pub ops: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { key: 64 << 10, value: 3 << 19, request: 3 << 19, ops: 128 }
    }
}

/// Why a store cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// What is stored is not what was written: restore a backup.
    #[error("the row of revision {0} is damaged; restore a backup")]
    Damaged(Revision),
    /// Rows are gone: restore a backup.
    #[error("the history has a gap at revision {0}; restore a backup")]
    Gap(Revision),
    /// The rows that survived compaction are not those that should have: restore a backup.
    #[error("rows of the compacted history are missing or were added; restore a backup")]
    Miscounted,
    /// The file cannot be read.
    #[error("cannot read the store")]
    Unreadable(#[from] vedetta_db::ReadError),
    /// The file cannot be written.
    #[error("cannot write to the store")]
    Lost(#[from] CommitError),
    /// A thread cannot be started.
    #[error("cannot start the store")]
    Threads(#[from] std::io::Error),
}

/// Where the store stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// The newest revision.
    pub revision: Revision,
    /// The oldest revision that can be read or watched from.
    pub compacted: Revision,
    /// Keys in memory, deleted ones with a history included.
    pub keys: usize,
    /// Keys that exist now.
    pub existing: usize,
    /// Live leases.
    pub leases: usize,
    /// Watchers.
    pub watchers: usize,
    /// Bytes in use in the file.
    pub size: u64,
}

/// What the store's threads and handles share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Who wants to change it takes `pending` first.
    pub(crate) index: RwLock<Index>,
    /// Whoever evaluates has it.
    pub(crate) pending: Mutex<Pending>,
    pub(crate) leases: Leases,
    pub(crate) hub: Hub,
    pub(crate) quota: Quota,
    pub(crate) age: Age,
}

/// How large the file may become.
#[derive(Debug)]
pub(crate) struct Quota {
    pub(crate) bytes: Option<u64>,
    pub(crate) used: Size,
}

impl Quota {
    /// Whether what takes room may still run. To be asked before a write waits, and again when its turn has come: all
    /// that wait were let in by what was known then.
    pub(crate) fn check(&self) -> Result<(), KvError> {
        let used = self.used.bytes();
        match self.bytes {
            Some(quota) if used > quota => Err(KvError::QuotaExceeded { used, quota }),
            _ => Ok(()),
        }
    }
}

/// How long the store has been serving in all its life.
#[derive(Debug)]
pub(crate) struct Age {
    pub(crate) before: Duration,
    pub(crate) started: Instant,
}

impl Age {
    pub(crate) fn now_ms(&self) -> i64 {
        i64::try_from((self.before + self.started.elapsed()).as_millis()).unwrap_or(i64::MAX)
    }
}

/// The store; clones share it. It has threads of its own, which end with [`Store::close`] and not before.
#[derive(Clone)]
pub struct Store {
    pub(crate) shared: Arc<Shared>,
    pub(crate) db: Db,
    pub(crate) options: Arc<Options>,
    sweeper: Sweeper,
    /// Who has it has the one that may be there.
    snapshots: Arc<tokio::sync::Mutex<()>>,
    /// Whether writes of this handle are refused when the queue is full.
    impatient: bool,
    threads: Arc<Threads>,
}

/// A copy of a store; its file has no name and is gone with it.
#[derive(Debug)]
pub struct Snapshot {
    file: File,
    _turn: tokio::sync::OwnedMutexGuard<()>,
}

impl Snapshot {
    /// How many bytes there are to read.
    pub fn size(&self) -> std::io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }
}

impl Read for Snapshot {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.file.read(buffer)
    }
}

#[derive(Default)]
struct Threads(Mutex<Vec<JoinHandle<()>>>);

impl Store {
    /// Opens the store in `db`, which must have been opened with [`SCHEMA`]. Reads all rows, checks
    /// them, and starts the store's threads.
    pub async fn open(db: Db, options: Options) -> Result<Self, OpenError> {
        off_the_runtime(move || Self::open_blocking(db, options)).await
    }

    /// [`Store::open`] for a thread of one's own.
    pub fn open_blocking(db: Db, options: Options) -> Result<Self, OpenError> {
        forget_snapshots(db.file())?;
        let shared = Arc::new(load::load(&db, options.quota)?);
        db.attach(Box::new(Publisher(Arc::clone(&shared))))?;
        let (sweeper, sweeping) =
            Sweeper::start(Arc::clone(&shared), db.clone(), options.keep.clone())?;
        let hub = Arc::clone(&shared);
        let fan_out = spawn("vedetta-fan-out", move || hub.hub.fan_out())?;
        let (keeper, keeper_db) = (Arc::clone(&shared), db.clone());
        let leases = spawn("vedetta-leases", move || keep_leases(&keeper, &keeper_db))?;
        Ok(Self {
            shared,
            db,
            options: Arc::new(options),
            sweeper,
            snapshots: Arc::default(),
            impatient: false,
            threads: Arc::new(Threads(Mutex::new(vec![sweeping, fan_out, leases]))),
        })
    }

    /// The same store, but what this handle writes is refused with [`KvError::Busy`] when more waits than the
    /// queue takes: for a server, whose clients are many and can be told to come back.
    #[must_use]
    pub fn impatient(mut self) -> Self {
        self.impatient = true;
        self
    }

    /// Has the writes that this thread asks for gather: see [`Db::round`].
    pub fn round(&self) -> Round<'_> {
        self.db.round()
    }

    /// Whether a put would be taken now, and why not: asks the writer, which stores nothing for it. The
    /// answer takes as long as a write's would, the disk left out.
    pub async fn takes_writes(&self) -> Result<(), KvError> {
        self.shared.quota.check()?;
        // Refused by itself, it leaves nothing to commit.
        let nothing = |_: &vedetta_db::Tx<'_>| Err::<(), _>(Stop::Refused(()));
        match self.db.write(Purpose::Store, nothing).await {
            Err(WriteError::Lost(lost)) => Err(KvError::Lost(lost)),
            _ => Ok(()),
        }
    }

    /// A copy of the last commit's state, which [`vedetta_db::backup`] explains. There is one at a time, since
    /// each takes as much room as the store: this waits until the one before is dropped.
    pub async fn snapshot(&self) -> Result<Snapshot, BackupError> {
        let database = self.db.file().to_owned();
        let turn = Arc::clone(&self.snapshots).lock_owned().await;
        off_the_runtime(move || {
            let target = database.with_file_name(SNAPSHOT);
            forget_snapshots(&database)?;
            backup(&database, &target)?;
            let opened = File::open(&target);
            fs::remove_file(&target)?;
            Ok(Snapshot { file: opened?, _turn: turn })
        })
        .await
    }

    /// Ends all watches, then the store's threads, then the database below, in that order; returns
    /// when all have ended. What was acknowledged is on the disk anyway.
    pub async fn close(&self) {
        let store = self.clone();
        off_the_runtime(move || store.close_blocking()).await;
    }

    /// [`Store::close`] for a thread of one's own.
    pub fn close_blocking(&self) {
        self.shared.hub.close();
        self.shared.leases.close();
        self.sweeper.close();
        for thread in self.threads.0.lock().drain(..) {
            let _ = thread.join();
        }
        let shared = Arc::clone(&self.shared);
        let noted = self.db.write_blocking(Purpose::Reclaim, move |connection| {
            // So that rows missing at the end are noticed.
            let revision = shared.pending.lock().revision;
            load::set_meta(connection, "closed_at", revision.0.cast_signed())?;
            note_age(connection, &shared)
        });
        if let Err(error) = noted {
            tracing::warn!(%error, "could not note how old the store is; leases will live longer");
        }
        self.db.close_blocking();
    }

    /// Reads keys: the present from memory, the past from the file.
    pub async fn range(&self, request: Range) -> Result<Ranged, KvError> {
        engine::check_range(&request.range)?;
        loop {
            match self.range_as_of(&request, None).await {
                Err(KvError::Compacted { .. }) if request.at.is_none() => {}
                done => return done,
            }
        }
    }

    /// Reads keys as if the store stood where it stood then: now, if nothing is said.
    async fn range_as_of(
        &self,
        request: &Range,
        then: Option<Revision>,
    ) -> Result<Ranged, KvError> {
        let gathered = self.gather(request, then).await?;
        let in_memory = gathered.found.iter().all(|found| matches!(found, Found::Here(_)));
        let Gathered { found, count, at, revision } = gathered;
        let keys = if in_memory {
            Ok(range::all_here(found))
        } else {
            let read = self.db.read(move |c| Ok(range::fetch_all(found, c))).await;
            read.map_err(|e| KvError::Unreadable(e.to_string()))?.map_err(KvError::from)
        };
        // Compaction may have passed while we read: then what is missing is not damage.
        let oldest = self.shared.index.read().compacted;
        if at < oldest {
            return Err(KvError::Compacted { asked: at, oldest });
        }
        Ok(range::finish(request, keys?, count, revision))
    }

    /// Walks the index, a bounded number of keys at a time.
    async fn gather(&self, request: &Range, then: Option<Revision>) -> Result<Gathered, KvError> {
        let mut begun = None::<(Revision, Revision, Option<Walk<'_>>)>;
        let (mut found, mut count, mut from) = (Vec::new(), 0, None::<Box<[u8]>>);
        let enough = range::enough(request);
        loop {
            {
                let index = self.shared.index.read();
                let (at, revision) = match begun {
                    Some((at, revision, _)) => (at, revision),
                    None => {
                        let revision = then.unwrap_or(index.revision);
                        (range::resolve(request.at, revision, index.compacted)?, revision)
                    }
                };
                if let KeyRange::One(key) = &request.range {
                    let mut found: Vec<_> = index.get_at(key, at).into_iter().collect();
                    let count = found.len();
                    found.truncate(enough);
                    return Ok(Gathered { found, count, at, revision });
                }
                from = index.visit(&request.range, from.as_deref(), at, CHUNK, |visit| {
                    count += 1;
                    if found.len() < enough {
                        found.push(visit.found());
                    }
                });
                let done = request.uncounted && found.len() >= enough;
                if from.is_none() || done {
                    let count = if request.uncounted { 0 } else { count };
                    return Ok(Gathered { found, count, at, revision });
                }
                if begun.is_none() {
                    let is_present = at == index.revision && found.len() < enough;
                    let walk = is_present.then(|| Walk::begin(&self.shared, &index));
                    begun = Some((at, revision, walk));
                }
            }
            tokio::task::coop::consume_budget().await;
        }
    }

    /// Gives a key a value.
    pub async fn put(&self, put: Put) -> Result<PutDone, KvError> {
        engine::check_put(&put, &self.options.limits)?;
        self.check_queue()?;
        self.shared.quota.check()?;
        let draft = Draft::of(&put, Some(&self.shared.index.read()));
        // The request comes back to be freed here, not on the writer thread.
        let put = move |engine: &mut Engine<'_>| Ok((engine.put(&put, draft)?, put));
        let (done, _put) = self.evaluate(Purpose::Store, Uses::Memory, put).await?;
        Ok(done)
    }

    /// Removes keys.
    pub async fn delete(&self, delete: Delete) -> Result<Deleted, KvError> {
        engine::check_size(engine::check_range(&delete.range)?, &self.options.limits)?;
        self.check_queue()?;
        self.reclaim(Uses::Memory, move |engine| engine.delete(&delete)).await
    }

    /// Does a transaction. One that could change nothing is read like a range, without the writer.
    pub async fn txn(&self, txn: Txn) -> Result<TxnDone, KvError> {
        engine::check_txn(&txn, &self.options.limits)?;
        if only_reads(&txn) {
            loop {
                let walk = Walk::begin(&self.shared, &self.shared.index.read());
                match self.read_txn(&txn, walk.at).await {
                    // Compaction has passed it.
                    Err(KvError::Compacted { oldest, .. }) if oldest > walk.at => {}
                    done => return done,
                }
            }
        }
        self.check_queue()?;
        let uses = if reads_the_past(&txn) { Uses::File } else { Uses::Memory };
        if stores(&txn) {
            self.shared.quota.check()?;
            let txn = move |engine: &mut Engine<'_>| engine.txn(&txn);
            return self.evaluate(Purpose::Store, uses, txn).await;
        }
        self.reclaim(uses, move |engine| engine.txn(&txn)).await
    }

    /// All of it sees the store as it was at one revision.
    async fn read_txn(&self, txn: &Txn, at: Revision) -> Result<TxnDone, KvError> {
        let mut held = true;
        for compare in &txn.when {
            let range = Range::new(compare.range.clone());
            held = held && engine::holds(compare, &self.range_as_of(&range, Some(at)).await?.keys);
        }
        let mut replies = Vec::new();
        for op in txn.branch(held) {
            replies.push(match op {
                Op::Range(range) => OpReply::Range(self.range_as_of(range, Some(at)).await?),
                Op::Txn(txn) => OpReply::Txn(Box::pin(self.read_txn(txn, at)).await?),
                Op::Put(_) | Op::Delete(_) => unreachable!("it only reads"),
            });
        }
        Ok(TxnDone { revision: at, held, replies })
    }

    /// Forgets what was before `revision`: it becomes the oldest that can be read or watched from.
    /// Returns once that is durable; with `swept`, once the room is free too. If that fails, the error says why, and
    /// that history is forgotten all the same: [`Status::compacted`] is `revision`, and the next compaction frees what is left.
    pub async fn compact(&self, revision: Revision, swept: bool) -> Result<(), KvError> {
        self.check_queue()?;
        let mark = move |engine: &mut Engine<'_>| {
            let (current, oldest) = (engine.pending.revision, engine.pending.compacted);
            if revision > current {
                return Err(Stop::Refused(KvError::Future { asked: revision, current }));
            }
            if revision <= oldest {
                return Err(Stop::Refused(KvError::Compacted { asked: revision, oldest }));
            }
            load::set_meta(engine.file(), "compacted", revision.0.cast_signed())?;
            engine.pending.compacted = revision;
            failpoint("kv.compact");
            Ok(())
        };
        self.reclaim(Uses::File, mark).await?;
        if swept {
            // Closed meanwhile: the next start goes on with it.
            return self.sweeper.sweep().await.unwrap_or(Ok(()));
        }
        self.sweeper.nudge();
        Ok(())
    }

    /// Grants a lease; without a wished id, one is chosen.
    pub async fn grant(&self, id: Option<LeaseId>, ttl: Duration) -> Result<LeaseId, KvError> {
        self.check_queue()?;
        self.shared.quota.check()?;
        let shared = Arc::clone(&self.shared);
        let grant =
            move |engine: &mut Engine<'_>| engine.grant(id, ttl, false, shared.age.now_ms());
        self.evaluate(Purpose::Store, Uses::File, grant).await
    }

    /// Renews a lease; returns how long it now lasts.
    pub async fn keep_alive(&self, id: LeaseId) -> Result<Duration, KvError> {
        match self.shared.leases.renew(id) {
            Renewal::Done(ttl) => return Ok(ttl),
            Renewal::Unknown => return Err(KvError::LeaseNotFound(id)),
            Renewal::FirstTime => {}
        }
        let note = move |engine: &mut Engine<'_>| {
            if !engine.has_lease(id) {
                return Err(Stop::Refused(KvError::LeaseNotFound(id)));
            }
            let sql = "UPDATE lease SET renewed = 1, checksum = checksum + 1
                       WHERE id = ?1 AND renewed = 0";
            engine.file().prepare_cached(sql)?.execute([id.get()])?;
            engine.pending.change_lease(LeaseChange::Renewed { id });
            Ok(())
        };
        // Not a matter of room: who cannot renew loses its keys.
        self.reclaim(Uses::File, note).await?;
        match self.shared.leases.renew(id) {
            Renewal::Done(ttl) => Ok(ttl),
            _ => Err(KvError::LeaseNotFound(id)),
        }
    }

    /// Ends a lease; its keys go in one revision.
    pub async fn revoke(&self, id: LeaseId) -> Result<Revision, KvError> {
        self.check_queue()?;
        self.reclaim(Uses::File, move |engine| {
            if !engine.has_lease(id) {
                return Err(Stop::Refused(KvError::LeaseNotFound(id)));
            }
            engine.end_lease(id, Cause::Asked)?;
            Ok(engine.seal())
        })
        .await
    }

    /// A lease as it stands; `None` when there is none of that id.
    pub fn lease(&self, id: LeaseId) -> Option<LeaseInfo> {
        self.shared.leases.info(id)
    }

    /// All leases.
    pub fn leases(&self) -> Vec<LeaseId> {
        self.shared.leases.ids()
    }

    /// Follows the changes of a range of keys.
    pub fn watch(&self, range: KeyRange, options: WatchOptions) -> Result<Watcher, WatchError> {
        self.watch_all(vec![range], options)
    }

    /// Follows the changes of several ranges of keys at once, in one order.
    pub fn watch_all(
        &self,
        ranges: Vec<KeyRange>,
        options: WatchOptions,
    ) -> Result<Watcher, WatchError> {
        Watcher::new(Arc::clone(&self.shared), self.db.clone(), ranges.into(), options)
    }

    /// The newest revision.
    pub fn revision(&self) -> Revision {
        self.shared.index.read().revision
    }

    /// Where the store stands.
    pub fn status(&self) -> Status {
        let index = self.shared.index.read();
        Status {
            revision: index.revision,
            compacted: index.compacted,
            keys: index.len(),
            existing: index.existing,
            leases: self.shared.leases.len(),
            watchers: self.shared.hub.watchers(),
            size: self.db.size(),
        }
    }

    /// What keeps a lease alive is not asked: who cannot renew loses its keys.
    pub(crate) fn check_queue(&self) -> Result<(), KvError> {
        if self.impatient && self.db.is_crowded() { Err(KvError::Busy) } else { Ok(()) }
    }

    /// Runs on the writer thread; what it changed is one revision.
    async fn evaluate<T: Send + 'static>(
        &self,
        purpose: Purpose,
        uses: Uses,
        work: impl FnOnce(&mut Engine<'_>) -> Result<T, Stop<KvError>> + Send + 'static,
    ) -> Result<T, KvError> {
        let shared = Arc::clone(&self.shared);
        let evaluated = self.db.write(purpose, move |tx| {
            if purpose == Purpose::Store {
                shared.quota.check().map_err(Stop::Refused)?;
            }
            // Before the locks: whoever commits takes them, too.
            let file = (uses == Uses::File).then(|| &**tx);
            let mut pending = shared.pending.lock();
            let index = shared.index.read();
            let mut engine = Engine::new(file, &index, &mut pending, &shared.leases);
            let answer = work(&mut engine)?;
            engine.seal();
            Ok(answer)
        });
        evaluated.await.map_err(lost)
    }

    /// The same for what frees room. The write that finds the disk full is lost with its batch; tried
    /// again it may use the room kept for it.
    async fn reclaim<T: Send + 'static>(
        &self,
        uses: Uses,
        work: impl Fn(&mut Engine<'_>) -> Result<T, Stop<KvError>> + Send + Sync + 'static,
    ) -> Result<T, KvError> {
        let work = Arc::new(work);
        let again = Arc::clone(&work);
        match self.evaluate(Purpose::Reclaim, uses, move |engine| work(engine)).await {
            Err(KvError::Lost(CommitError::Full)) => {
                self.evaluate(Purpose::Reclaim, uses, move |engine| again(engine)).await
            }
            other => other,
        }
    }
}

/// Removes what a crash left behind of snapshots.
fn forget_snapshots(database: &Path) -> std::io::Result<()> {
    let folder = database.parent().filter(|folder| !folder.as_os_str().is_empty());
    for entry in fs::read_dir(folder.unwrap_or(Path::new(".")))? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(SNAPSHOT.as_bytes()) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Runs what may block where that holds nobody up.
async fn off_the_runtime<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(value) => value,
        Err(stopped) => std::panic::resume_unwind(stopped.into_panic()),
    }
}

pub(crate) fn lost(error: WriteError<KvError>) -> KvError {
    match error {
        WriteError::Refused(why) => why,
        WriteError::Lost(lost) => KvError::Lost(lost),
        _ => unreachable!("a write ends in one of two ways"),
    }
}

/// Whether some branch puts.
fn stores(txn: &Txn) -> bool {
    txn.then.iter().chain(&txn.otherwise).any(|op| match op {
        Op::Put(_) => true,
        Op::Txn(txn) => stores(txn),
        Op::Range(_) | Op::Delete(_) => false,
    })
}

/// Whether no branch puts or deletes.
fn only_reads(txn: &Txn) -> bool {
    txn.then.iter().chain(&txn.otherwise).all(|op| match op {
        Op::Range(_) => true,
        Op::Txn(txn) => only_reads(txn),
        Op::Put(_) | Op::Delete(_) => false,
    })
}

/// Whether some branch reads at a revision of its own.
fn reads_the_past(txn: &Txn) -> bool {
    txn.then.iter().chain(&txn.otherwise).any(|op| match op {
        Op::Range(range) => range.at.is_some(),
        Op::Txn(txn) => reads_the_past(txn),
        Op::Put(_) | Op::Delete(_) => false,
    })
}

/// What an evaluation needs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Uses {
    Memory,
    File,
}

/// What a walk over the index found.
struct Gathered {
    found: Vec<Found>,
    count: usize,
    /// The revision it is of.
    at: Revision,
    /// Where the store was.
    revision: Revision,
}

/// A read of the present that lets the index go meanwhile. What is replaced before it comes there stays in memory until
/// it is dropped, which must not be while it has the index.
struct Walk<'s> {
    shared: &'s Shared,
    at: Revision,
}

impl<'s> Walk<'s> {
    fn begin(shared: &'s Shared, index: &Index) -> Self {
        Self { shared, at: index.begin_walk() }
    }
}

impl Drop for Walk<'_> {
    fn drop(&mut self) {
        let kept = self.shared.index.read().end_walk(self.at);
        drop(kept); // not while writers wait for the index
    }
}

/// Shows batches once they are durable.
struct Publisher(Arc<Shared>);

impl Mirror for Publisher {
    fn keep(&self) {
        self.0.pending.lock().keep();
    }

    fn undo(&self) {
        self.0.pending.lock().undo();
    }

    fn seal(&self) -> Rows {
        self.0.pending.lock().seal()
    }

    fn publish(&self) {
        // Whoever evaluates has this lock as well as a share of the index. Without it we could wait for the index while
        // a closure takes its time, and whoever wants to read would wait behind us.
        let mut pending = self.0.pending.lock();
        let Some(layer) = pending.oldest() else { return };
        {
            let mut index = self.0.index.write();
            let changes = layer.events.iter().zip(&layer.places);
            changes.for_each(|(event, place)| index.apply(event, *place));
            index.revision = layer.end.revision;
            index.compacted = layer.end.compacted;
        }
        // Closures of the next batches see it there or here. A lease at just one of the two: one that is
        // due, but granted or renewed by a batch still to be published, is not ended.
        self.0.leases.publish(&layer.leases, &layer.events, &self.0.age);
        pending.forget_oldest();
        drop(pending);
        let events = Arc::into_inner(layer).map(|layer| layer.events).unwrap_or_default();
        if let Some(last) = events.last().map(|event| event.revision) {
            Block::cut(last, events).into_iter().for_each(|block| self.0.hub.publish(block));
        }
    }

    fn discard(&self) {
        self.0.pending.lock().discard();
    }
}

pub(crate) fn spawn(
    name: &str,
    work: impl FnOnce() + Send + 'static,
) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(work)
}

/// Notes how old the store is, for the next start: by what is left from there on, no lease is shorter than it was
/// promised, however long its grant has waited for its commit.
fn note_age(connection: &rusqlite::Connection, shared: &Shared) -> Result<(), Stop<KvError>> {
    let granting = shared.pending.lock().first_grant_ms();
    // After that: what was published meanwhile has told its lag.
    let age = (shared.age.now_ms() - shared.leases.lag_ms()).max(0);
    let age = granting.map_or(age, |granting| age.min(granting));
    Ok(load::set_meta(connection, "age_ms", age)?)
}

/// The thread that ends leases when their time is up, and notes the store's age.
fn keep_leases(shared: &Arc<Shared>, db: &Db) {
    let mut age_due = Instant::now() + AGE_EVERY;
    let mut ending = Ending::default();
    while let Some(due) = shared.leases.wait_due(age_due, ENDED_AT_ONCE) {
        if !due.is_empty() {
            let ended = end_leases(shared, db, &due);
            if let Some(error) = ending.news(&ended) {
                tracing::error!(error, leases = due.len(), "could not end leases; trying again");
            }
            if ended.is_err() {
                shared.leases.still_due(&due);
                std::thread::sleep(RETRY);
            }
        }
        if Instant::now() >= age_due {
            age_due = Instant::now() + AGE_EVERY;
            if !shared.leases.is_empty() {
                let noting = Arc::clone(shared);
                let noted = db.write_blocking(Purpose::Store, move |tx| note_age(tx, &noting));
                if let Err(error) = noted {
                    tracing::warn!(%error, "could not note the store's age");
                }
            }
        }
    }
}

/// How the ending of leases goes. It is tried again soon, for as long as a halted store is not restarted.
#[derive(Debug, Default)]
struct Ending {
    /// What was told last, if it still holds.
    told: Option<String>,
}

impl Ending {
    /// What is to be told of one more try, if it is not what was told.
    fn news(&mut self, ended: &Result<(), WriteError<KvError>>) -> Option<&str> {
        let error = ended.as_ref().err().map(WriteError::to_string);
        let is_news = error != self.told;
        self.told = error;
        self.told.as_deref().filter(|_| is_news)
    }
}

fn end_leases(shared: &Arc<Shared>, db: &Db, due: &[LeaseId]) -> Result<(), WriteError<KvError>> {
    let (in_writer, ending) = (Arc::clone(shared), due.to_vec());
    db.write_blocking(Purpose::Reclaim, move |tx| {
        let file: &rusqlite::Connection = tx;
        let mut pending = in_writer.pending.lock();
        let index = in_writer.index.read();
        let leases = &in_writer.leases;
        let mut engine = Engine::new(Some(file), &index, &mut pending, leases);
        for id in ending {
            // Renewed, revoked or granted anew on the way here?
            if engine.has_lease(id) && leases.is_due(id) && !engine.pending.extends(id) {
                engine.end_lease(id, Cause::Expired)?;
                engine.seal();
                failpoint("kv.expired");
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn that_leases_cannot_be_ended_is_told_once_until_it_changes() {
        let lost = |why| Err(WriteError::Lost(why));
        let mut ending = Ending::default();
        for (ended, told) in [
            (Ok(()), None),
            (lost(CommitError::Full), Some(CommitError::Full)),
            (lost(CommitError::Full), None),
            (lost(CommitError::Halted), Some(CommitError::Halted)),
            (lost(CommitError::Halted), None),
            (lost(CommitError::Halted), None),
            (Ok(()), None),
            (lost(CommitError::Halted), Some(CommitError::Halted)),
        ] {
            let told = told.map(|why| why.to_string());
            assert_eq!(ending.news(&ended), told.as_deref(), "{ended:?}");
        }
    }
}
