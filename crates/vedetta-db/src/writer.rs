//! The two threads that write, in turns.
//!
//! Everything else holds a sender to their bounded queue: when the queue is full, callers wait. A batch is
//! what had gathered while the batch before it was committed, so batches grow with the load and a lone
//! caller never waits for company.
//!
//! ```text
//!  one    run n ┐ commit n ───────┐ publish n, answer ┐ run n+2 ···┐ commit n+2 …
//!  other        └ run n+1 ········┴ commit n+1 ──────┴─────────────┘ publish n+1, answer
//! ```
//!
//! With a few writes at a time there is nothing to gain from that: then one thread keeps the desk, and no time is
//! lost with waking the other. And a thread that has nothing else to do than to wait for its own write may do what is
//! on the desk itself ([`Round`]).
//!
//! A thread takes the desk (the queue) and runs the closures of a batch; then it takes the file (the only
//! writing connection), leaves the desk to the other one, commits, lets go of it, publishes, and answers. So the closures
//! of a batch run while the batch before it is on its way to the disk, and see what that one prepared. A closure
//! that wants SQL waits for the file. When a commit fails, the batch after it rests on what is lost, so it is
//! lost, too.
//!
//! A batch of lazy writes only is committed without an fsync. The next fsync of the log is for all that is in
//! it, so what is on the disk is always a beginning of all commits.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};
use rusqlite::{Connection, ErrorCode};
use tokio::runtime::RuntimeFlavor;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::{mpsc, oneshot};

use crate::failpoint;
use crate::log::{PAGE, UNSYNCED};
use crate::open::{FILE_VERSION, Options};
use crate::space::Space;
use crate::wal::{Checkpoints, WalKeeper, is_failed_fsync};

/// So many writes are run in no time: what comes while they are committed may wait for its turn, and the other
/// thread need not be woken for it.
const FEW: usize = 4;

/// Bytes that single statements may write before it is looked again at how many are in use.
const UNMEASURED: usize = 64 << 10;

/// A task may keep its thread for so long: less than a timer of the runtime is late.
const SWIFT: Duration = Duration::from_micros(500);

/// What a write does to the disk, which decides whether it may run when the disk is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Takes room.
    Store,
    /// Frees room: deletes, compaction.
    Reclaim,
}

/// Whether a write is on the disk when it is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Durability {
    Synced,
    /// It gets there with the next one that is synced.
    Lazy,
}

/// Why a closure stops without storing anything.
#[derive(Debug)]
pub enum Stop<E> {
    /// It decided so; the caller gets the reason.
    Refused(E),
    /// SQLite failed.
    Sql(rusqlite::Error),
}

impl<E> From<rusqlite::Error> for Stop<E> {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sql(error)
    }
}

/// Why a write was not stored. In every case but [`CommitError::Failed`] it is certain that it was not.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError<E> {
    /// The closure itself refused; what it had written is undone.
    #[error(transparent)]
    Refused(E),
    /// The database could not store it.
    #[error(transparent)]
    Lost(#[from] CommitError),
}

/// Why the database could not store a write.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    /// Free some space, or delete and compact; then try again.
    #[error("the disk is full")]
    Full,
    /// SQLite or the disk under it failed. It was not acknowledged to anybody, but may be there after a restart.
    #[error("the database failed while writing")]
    Failed(#[source] Arc<rusqlite::Error>),
    /// An earlier fsync failed, and after that nothing can be trusted to reach the disk: restart.
    #[error("writing has stopped because an fsync failed; check the disk, then restart")]
    Halted,
    /// The closure panicked; what it had written is undone.
    #[error("the write panicked")]
    Panicked,
    /// The database is closed.
    #[error("the database is closed")]
    Closed,
}

/// What a closure writes to: the connection, inside a savepoint of the closure's own.
///
/// The savepoint is opened by the first use, so a closure that only prepares changes in a [`Mirror`]
/// costs no SQL at all and does not wait for a commit under way.
pub struct Tx<'c> {
    turn: &'c dyn Connect,
    standing: Cell<Savepoint>,
    failed: RefCell<Option<rusqlite::Error>>,
}

/// Where a closure gets the connection from.
trait Connect {
    fn connection(&self) -> &Connection;
    /// Begins the batch's transaction, if it has not begun.
    fn begin(&self) -> rusqlite::Result<()>;
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Savepoint {
    None,
    Open,
}

impl Deref for Tx<'_> {
    type Target = Connection;

    /// The first use may wait for a commit, and so for [`Mirror::publish`]: whoever takes a lock that a
    /// mirror takes, too, must do so afterwards.
    fn deref(&self) -> &Connection {
        let connection = self.turn.connection();
        if self.standing.get() == Savepoint::None {
            self.standing.set(Savepoint::Open);
            let begun = self.turn.begin();
            // In any case: it is a transaction of its own where none could begin, so whatever the closure does
            // now is undone with the whole batch. Without one each statement would commit by itself.
            let saved = run(connection, "SAVEPOINT unit");
            if let Err(error) = begun.and(saved) {
                self.failed.borrow_mut().get_or_insert(error);
            }
        }
        connection
    }
}

/// What is to be written for a batch, before its commit.
pub struct Rows {
    /// How many statements that takes.
    statements: usize,
    /// About how many bytes.
    bytes: usize,
    write: Box<Write>,
}

type Write = dyn FnOnce(&Connection) -> rusqlite::Result<()> + Send;

impl Rows {
    /// Exactly so many statements, for about so many bytes. With none it neither writes nor fails: a single statement of
    /// a batch is committed by itself.
    pub fn new(
        statements: usize,
        bytes: usize,
        write: impl FnOnce(&Connection) -> rusqlite::Result<()> + Send + 'static,
    ) -> Self {
        Self { statements, bytes, write: Box::new(write) }
    }

    /// Nothing is to be written.
    pub fn none() -> Self {
        Self::new(0, 0, |_| Ok(()))
    }
}

/// State in memory that must move in step with the file.
///
/// Closures prepare changes; they become visible only in `publish`, when they are committed. Closures of
/// one batch may run while the batch before it is committed and published.
pub trait Mirror: Send + Sync {
    /// The closure that just ran stands: its changes are part of the batch.
    fn keep(&self);
    /// The closure that just ran was undone: drop its changes.
    fn undo(&self);
    /// All closures of the batch have run, and its commit begins: says what to write to the file for it.
    fn seal(&self) -> Rows;
    /// The oldest sealed batch is committed, and durable unless all of it is lazy: show it.
    fn publish(&self);
    /// All that was not published is lost: drop it.
    fn discard(&self);
}

/// One caller's write, with the caller's types hidden.
pub(crate) trait Unit: Send {
    fn purpose(&self) -> Purpose;
    fn durability(&self) -> Durability;
    fn run(&mut self, tx: &Tx<'_>) -> Ran;
    fn answer(self: Box<Self>, commit: Result<(), CommitError>);
}

/// How a unit's closure ended.
pub(crate) enum Ran {
    Stored,
    Refused,
    Broke(rusqlite::Error),
}

pub(crate) enum Message {
    Write(Box<dyn Unit>),
    Attach(Box<dyn Mirror>),
    Close,
}

pub(crate) struct Task<F, T, E> {
    purpose: Purpose,
    durability: Durability,
    work: Option<F>,
    outcome: Option<Result<T, E>>,
    reply: oneshot::Sender<Result<T, WriteError<E>>>,
}

/// What a [`Task`] answers on.
pub(crate) type Answer<T, E> = oneshot::Receiver<Result<T, WriteError<E>>>;

impl<F, T, E> Task<F, T, E> {
    pub(crate) fn new(purpose: Purpose, durability: Durability, work: F) -> (Self, Answer<T, E>) {
        let (reply, answer) = oneshot::channel();
        (Self { purpose, durability, work: Some(work), outcome: None, reply }, answer)
    }
}

impl<F, T, E> Unit for Task<F, T, E>
where
    F: FnOnce(&Tx<'_>) -> Result<T, Stop<E>> + Send,
    T: Send,
    E: Send,
{
    fn purpose(&self) -> Purpose {
        self.purpose
    }

    fn durability(&self) -> Durability {
        self.durability
    }

    fn run(&mut self, tx: &Tx<'_>) -> Ran {
        let work = self.work.take().expect("a unit runs once");
        match work(tx) {
            Ok(value) => {
                self.outcome = Some(Ok(value));
                Ran::Stored
            }
            Err(Stop::Refused(reason)) => {
                self.outcome = Some(Err(reason));
                Ran::Refused
            }
            Err(Stop::Sql(error)) => Ran::Broke(error),
        }
    }

    fn answer(self: Box<Self>, commit: Result<(), CommitError>) {
        let answer = match (self.outcome, commit) {
            // A refusal may rest on writes that were lost with the commit.
            (_, Err(lost)) => Err(WriteError::Lost(lost)),
            (Some(Err(reason)), Ok(())) => Err(WriteError::Refused(reason)),
            (Some(Ok(value)), Ok(())) => Ok(value),
            (None, Ok(())) => unreachable!("a unit without an outcome is answered with an error"),
        };
        // The caller may have stopped waiting; the write stands all the same.
        let _ = self.reply.send(answer);
    }
}

/// The way to the writers' desk. When it is gone they write what is there, and end.
pub(crate) struct Queue {
    /// There until it is dropped.
    sender: Option<mpsc::Sender<Message>>,
    bell: Arc<Bell>,
    /// Nothing is ever sent; it ends when the file is let go.
    let_go: Mutex<std::sync::mpsc::Receiver<()>>,
}

impl Queue {
    /// The way to a desk on which `limit` writes may wait, and what is at its end.
    pub(crate) fn new(limit: usize) -> (Self, Inbox) {
        let ((sender, messages), (held, let_go)) =
            (mpsc::channel(limit), std::sync::mpsc::channel());
        let bell = Arc::<Bell>::default();
        let queue =
            Self { sender: Some(sender), bell: Arc::clone(&bell), let_go: Mutex::new(let_go) };
        (queue, Inbox { messages, bell, held })
    }

    fn sender(&self) -> &mpsc::Sender<Message> {
        self.sender.as_ref().expect("it is there until it is dropped")
    }

    /// Waits for a place.
    pub(crate) async fn send(&self, unit: Box<dyn Unit>) -> Result<(), CommitError> {
        let sent = self.sender().send(Message::Write(unit)).await;
        sent.map_err(|_| CommitError::Closed)?;
        self.bell.brought();
        Ok(())
    }

    pub(crate) fn send_blocking(&self, message: Message) -> Result<(), CommitError> {
        self.sender().blocking_send(message).map_err(|_| CommitError::Closed)?;
        self.bell.brought();
        Ok(())
    }

    pub(crate) fn is_full(&self) -> bool {
        self.sender().capacity() == 0
    }

    /// Waits until nobody has the file any more.
    pub(crate) fn until_let_go(&self) {
        let _ = self.let_go.lock().recv();
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.sender.take();
        self.bell.ring();
    }
}

/// The end of a [`Queue`].
pub(crate) struct Inbox {
    messages: mpsc::Receiver<Message>,
    bell: Arc<Bell>,
    held: std::sync::mpsc::Sender<()>,
}

/// What the two threads share, and whoever helps them.
pub(crate) struct Writer {
    desk: Mutex<Desk>,
    bell: Arc<Bell>,
    file: Arc<Mutex<File>>,
    /// The thread that moves the log into the file.
    checkpoints: Mutex<Option<JoinHandle<()>>>,
    /// Who has it publishes. Taken before the file is let go, so that batches are published in order.
    publishing: Mutex<()>,
    mirrors: RwLock<Vec<Box<dyn Mirror>>>,
    /// How often what was not published was lost.
    losses: AtomicU64,
    /// The next batch must look at the file before it runs: the disk was full, or has failed.
    trouble: AtomicBool,
    /// The fsync of a checkpoint failed, or a thread died.
    broken: Arc<AtomicBool>,
    size: Arc<AtomicU64>,
    batch_limit: usize,
    /// The last batch was one write: there are not many who write.
    is_quiet: AtomicBool,
    /// What the slowest of the last commits took, in µs; it fades.
    lately: AtomicU64,
    /// A planted bug, for the torture suite: answer before the commit.
    answer_early: bool,
    /// Another: one lazy write makes its batch lazy.
    share_lazily: bool,
    /// The last to go, when the file is closed.
    _held: std::sync::mpsc::Sender<()>,
}

/// Wakes a writer thread. Rung while none sleeps, it wakes the next one that would.
#[derive(Default)]
struct Bell {
    /// Nobody has the desk: whoever brings something has to see to it that somebody comes.
    is_unattended: AtomicBool,
    rung: Mutex<bool>,
    heard: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.rung.lock() = true;
        self.heard.notify_one();
    }

    fn wait(&self) {
        let mut rung = self.rung.lock();
        self.heard.wait_while(&mut rung, |rung| !*rung);
        *rung = false;
    }

    /// To be called when something was brought.
    fn brought(&self) {
        if !self.is_mine() {
            return;
        }
        match DEFERRED.get() {
            Some((bell, _)) if std::ptr::eq(bell, self) => DEFERRED.set(Some((bell, true))),
            _ => self.ring(),
        }
    }

    /// After something was brought: whether it is the caller who has to see to it that somebody comes.
    fn is_mine(&self) -> bool {
        // Whoever leaves says so and then looks once more; here it is the other way round. So one of both sees the other.
        fence(Ordering::SeqCst);
        self.is_unattended.load(Ordering::Relaxed)
            && self.is_unattended.swap(false, Ordering::AcqRel)
    }
}

thread_local! {
    /// The bell that is not rung on this thread at once, and whether it has to be.
    static DEFERRED: Cell<Option<(*const Bell, bool)>> = const { Cell::new(None) };
}

/// A time on one thread in which the writes that are asked for only gather: see [`crate::Db::round`].
pub struct Round<'d> {
    bell: &'d Bell,
    writer: &'d Weak<Writer>,
    outer: Option<(*const Bell, bool)>,
    /// It is a matter of this thread.
    here: PhantomData<*const ()>,
}

impl<'d> Round<'d> {
    pub(crate) fn begin(queue: &'d Queue, writer: &'d Weak<Writer>) -> Self {
        let bell = &*queue.bell;
        let outer = DEFERRED.replace(Some((std::ptr::from_ref(bell), false)));
        Self { bell, writer, outer, here: PhantomData }
    }

    /// Does the writes that have gathered on this thread, if nobody else is about to and hardly anybody writes, and tells
    /// whether it did. That takes as long as the disk does. Where that is longer than a task may keep its thread, the runtime's
    /// other tasks go on elsewhere; where they cannot it does nothing.
    pub fn help(&self) -> bool {
        let may_block = || {
            let runtime = tokio::runtime::Handle::try_current();
            runtime.is_ok_and(|runtime| runtime.runtime_flavor() == RuntimeFlavor::MultiThread)
        };
        if !matches!(DEFERRED.get(), Some((_, true))) || !may_block() {
            return false;
        }
        let Some(writer) = self.writer.upgrade() else { return false };
        if !writer.is_quiet.load(Ordering::Relaxed) {
            return false;
        }
        DEFERRED.set(Some((std::ptr::from_ref(self.bell), false)));
        if Duration::from_micros(writer.lately.load(Ordering::Relaxed)) < SWIFT {
            writer.help();
        } else {
            tokio::task::block_in_place(|| writer.help());
        }
        true
    }
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        if let Some((_, true)) = DEFERRED.replace(self.outer) {
            self.bell.ring();
        }
    }
}

/// Who has it runs closures.
struct Desk {
    inbox: mpsc::Receiver<Message>,
    /// Received, not looked at yet.
    waiting: VecDeque<Message>,
    /// Nothing more will come.
    is_closed: bool,
}

/// Who has it commits.
pub(crate) struct File {
    connection: Connection,
    space: Space,
    wal: WalKeeper,
    halted: bool,
    /// Why what was not published was last lost.
    lost: Option<CommitError>,
    /// SQLite's word for commits that are synced.
    synchronous: &'static str,
    /// What to run before a transaction begins; for the torture suite.
    before: Option<&'static str>,
    /// How the connection commits now.
    set_to: Cell<Durability>,
    /// Rows changed before the transaction began.
    changes: Cell<u64>,
    /// The last commit was lazy.
    unsynced: bool,
    /// The file has the mark [`UNSYNCED`].
    marked: bool,
    /// Bytes in use when last looked at.
    size: u64,
    /// About how many were written since.
    unmeasured: usize,
    /// Closed after the connection: see [`WalKeeper::new`].
    _flushed: Option<Arc<std::fs::File>>,
}

/// A batch's turn with the file: taken by the first closure that wants it, at the latest for the commit.
struct Turn<'w> {
    durability: Durability,
    file: &'w Mutex<File>,
    taken: OnceCell<MutexGuard<'w, File>>,
}

impl<'w> Turn<'w> {
    fn get(&self) -> &File {
        self.taken.get_or_init(|| self.file.lock())
    }

    fn get_mut(&mut self) -> &mut File {
        self.get();
        self.taken.get_mut().expect("it is taken")
    }

    fn is_free(&self) -> bool {
        self.taken.get().is_some()
            || self.file.try_lock().is_some_and(|file| self.taken.set(file).is_ok())
    }

    fn keep(self) -> MutexGuard<'w, File> {
        self.get();
        self.taken.into_inner().expect("it is taken")
    }
}

impl Connect for Turn<'_> {
    fn connection(&self) -> &Connection {
        &self.get().connection
    }

    fn begin(&self) -> rusqlite::Result<()> {
        self.get().begin(self.durability)
    }
}

/// Writes that share a commit.
#[derive(Default)]
struct Batch {
    units: Vec<Box<dyn Unit>>,
    /// How many of them stand.
    kept: usize,
    /// What broke the transaction they share.
    broke: Option<rusqlite::Error>,
}

impl Batch {
    fn answer(self, commit: &Result<(), CommitError>) {
        self.units.into_iter().for_each(|unit| unit.answer(commit.clone()));
    }

    /// To free room, if some of it does.
    fn purpose(&self) -> Purpose {
        let reclaims = self.units.iter().any(|unit| unit.purpose() == Purpose::Reclaim);
        if reclaims { Purpose::Reclaim } else { Purpose::Store }
    }
}

/// Which writes may run now.
#[derive(Clone, Copy)]
enum Admitted {
    All,
    /// The disk is full.
    Reclaiming,
    /// An fsync has failed.
    Nothing,
}

/// What became of one unit inside the batch.
enum UnitRan {
    /// Part of the batch.
    Kept,
    /// It refused, and is undone; its caller hears when the batch ends, after those before it.
    Undone,
    /// SQLite could not do what it wanted; it is undone.
    Broke(rusqlite::Error),
    /// It panicked, and is undone.
    Panicked,
}

impl Desk {
    /// Takes in what has come; whether there is something to do.
    fn receive(&mut self, limit: usize) -> bool {
        while self.waiting.len() < limit && !self.is_closed {
            match self.inbox.try_recv() {
                Ok(message) => self.waiting.push_back(message),
                Err(nothing) => {
                    self.is_closed = nothing == TryRecvError::Disconnected;
                    break;
                }
            }
        }
        !self.waiting.is_empty()
    }
}

impl File {
    pub(crate) fn new(
        connection: Connection,
        space: Space,
        wal: WalKeeper,
        synchronous: &'static str,
        before: Option<&'static str>,
        flushed: Option<Arc<std::fs::File>>,
    ) -> Self {
        Self {
            connection,
            space,
            wal,
            halted: false,
            lost: None,
            synchronous,
            before,
            set_to: Cell::new(Durability::Synced),
            changes: Cell::new(0),
            unsynced: false,
            marked: false,
            size: 0,
            unmeasured: 0,
            _flushed: flushed,
        }
    }

    /// Begins a batch's transaction, if it has not begun. How it will be committed cannot change later.
    fn begin(&self, durability: Durability) -> rusqlite::Result<()> {
        if !self.connection.is_autocommit() {
            return Ok(());
        }
        self.prepare(durability)?;
        self.changes.set(self.connection.total_changes());
        run(&self.connection, "BEGIN IMMEDIATE")
    }

    /// Sees to how the next transaction will be committed.
    fn prepare(&self, durability: Durability) -> rusqlite::Result<()> {
        if self.set_to.get() != durability {
            let synchronous = match durability {
                Durability::Synced => self.synchronous,
                Durability::Lazy => "NORMAL",
            };
            self.connection.pragma_update(None, "synchronous", synchronous)?;
            self.set_to.set(durability);
        }
        self.before.map_or(Ok(()), |sql| run(&self.connection, sql))
    }

    /// Writes the rows of a batch and commits it. How many bytes are in use then, or were not long before.
    fn commit(&mut self, durability: Durability, rows: Vec<Rows>) -> rusqlite::Result<u64> {
        let unmeasured = self.unmeasured + rows.iter().map(|rows| rows.bytes).sum::<usize>();
        let is_one = rows.iter().map(|rows| rows.statements).sum::<usize>() == 1;
        let mut rows = rows.into_iter().map(|rows| rows.write);
        // A statement is a transaction by itself.
        if is_one
            && unmeasured <= UNMEASURED
            && durability == Durability::Synced
            && !(self.unsynced || self.marked)
            && self.connection.is_autocommit()
        {
            self.prepare(durability)?;
            failpoint("db.before_commit");
            rows.try_for_each(|write| write(&self.connection))?;
            self.unmeasured = unmeasured;
            return Ok(self.size);
        }
        self.begin(durability)?;
        rows.try_for_each(|write| write(&self.connection))?;
        // One that is synced takes what it saw along, even if it has changed nothing itself.
        let writes = durability == Durability::Synced
            || self.connection.total_changes() != self.changes.get();
        if writes && (self.unsynced || self.marked) {
            let mark = if self.unsynced { UNSYNCED } else { 0 };
            self.connection.pragma_update(None, "user_version", FILE_VERSION | mark)?;
        }
        // As part of the transaction it takes no locks.
        let size = self.measure()?;
        failpoint("db.before_commit");
        run(&self.connection, "COMMIT")?;
        if writes {
            (self.marked, self.unsynced) = (self.unsynced, durability == Durability::Lazy);
        }
        (self.size, self.unmeasured) = (size, 0);
        Ok(size)
    }

    /// Bytes in use.
    fn measure(&self) -> rusqlite::Result<u64> {
        let pages = |sql: &str| {
            let mut count = self.connection.prepare_cached(sql)?;
            count.query_row([], |row| row.get::<_, i64>(0)).map(i64::unsigned_abs)
        };
        let used = pages("PRAGMA page_count")?.saturating_sub(pages("PRAGMA freelist_count")?);
        Ok(used * PAGE as u64)
    }

    /// Gives the log's room back, and tells how many bytes are free inside the file.
    fn shrink(wal: &WalKeeper, connection: &Connection) -> u64 {
        wal.shrink(connection);
        let sql = "SELECT f.freelist_count * s.page_size
                   FROM pragma_freelist_count f, pragma_page_size s";
        let free = connection.query_row(sql, [], |row| row.get::<_, i64>(0));
        free.map_or(0, i64::unsigned_abs)
    }
}

fn run(connection: &Connection, sql: &str) -> rusqlite::Result<()> {
    connection.prepare_cached(sql)?.execute([]).map(|_| ())
}

fn roll_back(connection: &Connection) {
    if !connection.is_autocommit() {
        let _ = run(connection, "ROLLBACK");
    }
}

/// One unit in its savepoint. An error means that the whole transaction is gone.
fn run_unit(
    turn: &Turn<'_>,
    mirrors: &[Box<dyn Mirror>],
    unit: &mut dyn Unit,
) -> rusqlite::Result<UnitRan> {
    let tx = Tx { turn, standing: Cell::new(Savepoint::None), failed: RefCell::new(None) };
    let ran = catch_unwind(AssertUnwindSafe(|| unit.run(&tx)));
    failpoint("db.unit");
    let Tx { standing, failed, .. } = tx;
    if let Some(error) = failed.into_inner() {
        return Err(error);
    }
    let opened = standing.get() == Savepoint::Open;
    if let Ok(Ran::Stored) = ran {
        if opened {
            run(&turn.get().connection, "RELEASE unit")?;
        }
        mirrors.iter().for_each(|mirror| mirror.keep());
        return Ok(UnitRan::Kept);
    }
    mirrors.iter().for_each(|mirror| mirror.undo());
    if opened {
        let connection = &turn.get().connection;
        if connection.is_autocommit() {
            // SQLite gave up the whole transaction, as it may when the disk fails.
            return Err(match ran {
                Ok(Ran::Broke(error)) => error,
                _ => rusqlite::Error::SqliteFailure(
                    rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_ABORT),
                    Some("the transaction was rolled back".into()),
                ),
            });
        }
        run(connection, "ROLLBACK TO unit")?;
        run(connection, "RELEASE unit")?;
    }
    Ok(match ran {
        Ok(Ran::Broke(error)) => UnitRan::Broke(error),
        Ok(_) => UnitRan::Undone,
        Err(_) => UnitRan::Panicked,
    })
}

/// A thread that dies may leave anything half done: then nothing is written any more.
struct HaltOnPanic<'w>(&'w Writer);

impl Drop for HaltOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.broken.store(true, Ordering::Release);
        }
    }
}

impl Writer {
    /// Starts the thread that moves the log.
    pub(crate) fn new(
        Inbox { messages, bell, held }: Inbox,
        file: File,
        checkpoints: Checkpoints,
        size: Arc<AtomicU64>,
        options: &Options,
    ) -> std::io::Result<Self> {
        let broken = file.wal.broken();
        let file = Arc::new(Mutex::new(file));
        let writer = Self {
            desk: Mutex::new(Desk { inbox: messages, waiting: VecDeque::new(), is_closed: false }),
            bell,
            checkpoints: Mutex::new(Some(checkpoints.start(Arc::downgrade(&file))?)),
            file,
            publishing: Mutex::new(()),
            mirrors: RwLock::default(),
            losses: AtomicU64::new(0),
            // At the start the disk may be full.
            trouble: AtomicBool::new(true),
            broken,
            size,
            batch_limit: options.batch,
            is_quiet: AtomicBool::new(true),
            // Not known yet.
            lately: AtomicU64::new(1_000_000),
            answer_early: options.torture.answer_early,
            share_lazily: options.torture.share_lazily,
            _held: held,
        };
        {
            let mut file = writer.file.lock();
            file.size = file.measure().unwrap_or(0);
            writer.size.store(file.size, Ordering::Relaxed);
        }
        Ok(writer)
    }

    /// Writes until told to close; what is queued by then is still written.
    pub(crate) fn run(&self) {
        std::thread::scope(|scope| {
            let other = std::thread::Builder::new().name("vedetta-writer".into());
            if let Err(error) = other.spawn_scoped(scope, || self.take_turns()) {
                tracing::warn!(%error, "no room for a second writer thread: writing with one");
            }
            self.take_turns();
        });
        self.sync(&mut self.file.lock());
        self.file.lock().wal.stop();
        if let Some(checkpoints) = self.checkpoints.lock().take() {
            let _ = checkpoints.join();
        }
        let File { connection, wal, halted, .. } = &*self.file.lock();
        wal.finish(connection, *halted);
    }

    /// Makes the last lazy writes durable. The last checkpoint may not: it leaves out what somebody reads.
    fn sync(&self, file: &mut File) {
        if file.unsynced
            && !file.halted
            && !self.broken.load(Ordering::Acquire)
            && let Err(error) = file.commit(Durability::Synced, Vec::new())
        {
            roll_back(&file.connection);
            self.classify(file, error, Purpose::Store);
        }
    }

    fn take_turns(&self) {
        // One that panicked has halted the writing, and tells everybody so.
        while catch_unwind(AssertUnwindSafe(|| self.take_turns_until_closed())).is_err() {}
    }

    fn take_turns_until_closed(&self) {
        let mut kept = None;
        loop {
            let mut desk = kept.take().unwrap_or_else(|| self.desk.lock());
            if desk.receive(self.batch_limit) {
                kept = self.attend(desk);
            } else if desk.is_closed {
                // The other one is to look, too.
                self.bell.ring();
                return;
            } else {
                self.leave(desk);
                self.bell.wait();
            }
        }
    }

    /// Does the next thing on the desk, which comes back if it was not left to the other thread.
    fn attend<'w>(&'w self, mut desk: MutexGuard<'w, Desk>) -> Option<MutexGuard<'w, Desk>> {
        if !matches!(desk.waiting.front(), Some(Message::Attach(_))) {
            return self.write(desk);
        }
        // Nothing is under way that it would see half of.
        let (_file, _publishing) = (self.file.lock(), self.publishing.lock());
        if let Some(Message::Attach(mirror)) = desk.waiting.pop_front() {
            self.mirrors.write().push(mirror);
        }
        Some(desk)
    }

    /// Leaves the desk; what is on it by now is for somebody else.
    fn leave(&self, mut desk: MutexGuard<'_, Desk>) {
        self.bell.is_unattended.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let is_work = desk.receive(self.batch_limit) || desk.is_closed;
        drop(desk);
        if is_work && self.bell.is_mine() {
            self.bell.ring();
        }
    }

    /// Does what is on the desk, as the writer threads would: for one who has found that it is unattended.
    pub(crate) fn help(&self) {
        // Whoever is leaving the desk may have looked before the last of it came.
        let Some(mut desk) = self.desk.try_lock() else { return self.bell.ring() };
        let helped = catch_unwind(AssertUnwindSafe(|| {
            let is_work = desk.receive(self.batch_limit);
            let desk = if is_work { self.attend(desk) } else { Some(desk) };
            desk.into_iter().for_each(|desk| self.leave(desk));
        }));
        if helped.is_err() {
            self.bell.ring();
        }
    }

    /// One batch: run, commit, publish, answer. The desk comes back if it was not left to the other thread.
    fn write<'w>(&'w self, mut desk: MutexGuard<'w, Desk>) -> Option<MutexGuard<'w, Desk>> {
        let mirrors = self.mirrors.read();
        let mirrors = &**mirrors;
        let mut batch = Batch::default();
        // Not before the batch, whose callers hear of a panic when it is dropped: they must find it halted.
        let _guard = HaltOnPanic(self);
        // What is lost from here on takes this batch along.
        let losses = self.losses.load(Ordering::Acquire);
        let durability = self.durability(&desk);
        let mut turn = Turn { durability, file: &self.file, taken: OnceCell::new() };
        let admitted = self.admit(&mut turn, &desk);
        self.run_units(&mut desk, &mut turn, mirrors, admitted, &mut batch);
        if !turn.is_free() {
            turn.get();
            desk.receive(self.batch_limit - batch.units.len());
            self.run_units(&mut desk, &mut turn, mirrors, admitted, &mut batch);
        }
        let mut file = turn.keep();
        if batch.units.is_empty() {
            // Those that failed were told so at once.
            roll_back(&file.connection);
            return Some(desk);
        }
        if let Some(error) = batch.broke.take() {
            let lost = self.classify(&mut file, error, batch.purpose());
            self.lose(file, mirrors, batch, lost);
            return Some(desk);
        }
        if losses != self.losses.load(Ordering::Acquire)
            && let Some(lost) = file.lost.clone()
        {
            if matches!(lost, CommitError::Full) && batch.purpose() == Purpose::Reclaim {
                file.space.ran_out(true);
            }
            self.lose(file, mirrors, batch, lost);
            return Some(desk);
        }
        if batch.kept == 0 {
            roll_back(&file.connection);
            // What was refused may rest on the batch before: its caller must be able to see that.
            let publishing = self.publishing.lock();
            drop((publishing, file));
            batch.answer(&Ok(()));
            return Some(desk);
        }
        self.is_quiet.store(batch.units.len() == 1, Ordering::Relaxed);
        let rows = mirrors.iter().map(|mirror| mirror.seal()).collect();
        let desk = if batch.units.len() <= FEW {
            Some(desk)
        } else {
            self.leave(desk);
            None
        };
        if self.answer_early {
            std::mem::take(&mut batch).answer(&Ok(()));
        }
        let began = Instant::now();
        let committed = file.commit(durability, rows);
        self.took(began.elapsed());
        match committed {
            Ok(size) => self.size.store(size, Ordering::Relaxed),
            Err(error) => {
                let lost = self.classify(&mut file, error, batch.purpose());
                self.lose(file, mirrors, batch, lost);
                return desk;
            }
        }
        failpoint("db.committed");
        file.wal.committed();
        let publishing = self.publishing.lock();
        drop(file);
        mirrors.iter().for_each(|mirror| mirror.publish());
        drop(publishing);
        failpoint("db.published");
        batch.answer(&Ok(()));
        desk
    }

    /// Notes how long a commit took.
    fn took(&self, time: Duration) {
        let time = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let lately = self.lately.load(Ordering::Relaxed);
        self.lately.store(time.max(lately - lately / 32), Ordering::Relaxed);
    }

    /// How to commit a batch of what waits: a write that must reach the disk takes the others along.
    fn durability(&self, desk: &Desk) -> Durability {
        let is_lazy = |message: &Message| matches!(message, Message::Write(unit) if unit.durability() == Durability::Lazy);
        let mut waiting = desk.waiting.iter().take(self.batch_limit);
        let lazy = if self.share_lazily { waiting.any(is_lazy) } else { waiting.all(is_lazy) };
        if lazy { Durability::Lazy } else { Durability::Synced }
    }

    /// Whether a message may be part of a batch: one that must reach the disk ends a lazy one.
    fn belongs(&self, message: &Message, durability: Durability) -> bool {
        match message {
            Message::Write(unit) => {
                durability == Durability::Synced
                    || unit.durability() == Durability::Lazy
                    || self.share_lazily
            }
            Message::Attach(_) => false,
            Message::Close => true,
        }
    }

    /// What may run now.
    fn admit(&self, turn: &mut Turn<'_>, desk: &Desk) -> Admitted {
        if !self.trouble.load(Ordering::Acquire) && !self.broken.load(Ordering::Acquire) {
            return Admitted::All;
        }
        let file = turn.get_mut();
        if file.halted || self.broken.load(Ordering::Acquire) {
            return Admitted::Nothing;
        }
        let File { space, wal, connection, .. } = file;
        let reclaims = |message: &Message| matches!(message, Message::Write(unit) if unit.purpose() == Purpose::Reclaim);
        // Before the disk is looked at: one that tried already has the reserve, whatever is free elsewhere.
        if desk.waiting.iter().any(reclaims) && space.make_room() {
            return Admitted::Reclaiming;
        }
        if space.may_store(|| File::shrink(wal, connection)) {
            self.trouble.store(false, Ordering::Release);
            return Admitted::All;
        }
        Admitted::Reclaiming
    }

    /// Runs what waits on the desk, up to a batch of it.
    fn run_units(
        &self,
        desk: &mut Desk,
        turn: &mut Turn<'_>,
        mirrors: &[Box<dyn Mirror>],
        admitted: Admitted,
        batch: &mut Batch,
    ) {
        while batch.units.len() < self.batch_limit
            && batch.broke.is_none()
            && desk.waiting.front().is_some_and(|next| self.belongs(next, turn.durability))
        {
            let Some(Message::Write(mut unit)) = desk.waiting.pop_front() else {
                desk.inbox.close();
                continue;
            };
            match admitted {
                Admitted::Nothing => unit.answer(Err(CommitError::Halted)),
                Admitted::Reclaiming if unit.purpose() == Purpose::Store => {
                    unit.answer(Err(CommitError::Full));
                }
                Admitted::All | Admitted::Reclaiming => {
                    match run_unit(turn, mirrors, &mut *unit) {
                        Ok(UnitRan::Kept) => batch.kept += 1,
                        Ok(UnitRan::Undone) => {}
                        Ok(UnitRan::Panicked) => {
                            unit.answer(Err(CommitError::Panicked));
                            continue;
                        }
                        Ok(UnitRan::Broke(error)) => {
                            let why = self.classify(turn.get_mut(), error, unit.purpose());
                            unit.answer(Err(why));
                            continue;
                        }
                        Err(error) => batch.broke = Some(error),
                    }
                    batch.units.push(unit);
                }
            }
        }
    }

    /// Nothing of what is not published stands; `batch` is told so.
    fn lose(
        &self,
        mut file: MutexGuard<'_, File>,
        mirrors: &[Box<dyn Mirror>],
        batch: Batch,
        why: CommitError,
    ) {
        roll_back(&file.connection);
        file.lost = Some(why.clone());
        let publishing = self.publishing.lock();
        mirrors.iter().for_each(|mirror| mirror.discard());
        // Not before: what ran on what is dropped now must notice.
        self.losses.fetch_add(1, Ordering::AcqRel);
        drop((publishing, file));
        batch.answer(&Err(why));
    }

    fn classify(&self, file: &mut File, error: rusqlite::Error, purpose: Purpose) -> CommitError {
        self.trouble.store(true, Ordering::Release);
        if error.sqlite_error_code() == Some(ErrorCode::DiskFull) {
            file.space.ran_out(purpose == Purpose::Reclaim);
            return CommitError::Full;
        }
        file.halted = file.halted || is_failed_fsync(&error);
        tracing::error!(%error, halted = file.halted, "a write to the database failed");
        CommitError::Failed(Arc::new(error))
    }
}
