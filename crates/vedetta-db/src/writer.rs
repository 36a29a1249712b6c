//! The one thread that writes.
//!
//! It owns the only writing connection. Everything else holds a sender to its bounded queue: when the
//! queue is full, callers wait. A batch is what had gathered while the batch before it was committed,
//! so batches grow with the load and a lone caller never waits for company.

use std::cell::{Cell, RefCell};
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use rusqlite::{Connection, ErrorCode, Statement};
use tokio::sync::{mpsc, oneshot};

use crate::failpoint;
use crate::space::Space;
use crate::wal::{WalKeeper, is_failed_fsync};

/// Commits after which the file's size is looked at again, under load.
const MEASURE_EVERY: u32 = 64;

/// What a write does to the disk, which decides whether it may run when the disk is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Takes room.
    Store,
    /// Frees room: deletes, compaction.
    Reclaim,
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
/// costs no SQL at all.
pub struct Tx<'c> {
    connection: &'c Connection,
    standing: Cell<Savepoint>,
    failed: RefCell<Option<rusqlite::Error>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Savepoint {
    None,
    Open,
}

impl Deref for Tx<'_> {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        if self.standing.get() == Savepoint::None {
            self.standing.set(Savepoint::Open);
            let open = self.connection.prepare_cached("SAVEPOINT unit");
            if let Err(error) = open.and_then(|mut open| open.execute([])) {
                // Whatever the closure does now is undone with the whole batch.
                self.failed.borrow_mut().get_or_insert(error);
            }
        }
        self.connection
    }
}

/// State in memory that must move in step with the file.
///
/// Closures prepare changes; they become visible only in `publish`, when they are on the disk. All
/// methods are called on the writer thread.
pub trait Mirror: Send {
    /// All closures of the batch have run: write to the file what they prepared.
    fn store(&mut self, connection: &Connection) -> rusqlite::Result<()>;
    /// The closure that just ran stands: its changes are part of the batch.
    fn keep(&mut self);
    /// The closure that just ran was undone: drop its changes.
    fn undo(&mut self);
    /// The batch is durable: show it.
    fn publish(&mut self);
    /// The batch is lost: drop all of it.
    fn discard(&mut self);
}

/// One caller's write, with the caller's types hidden.
pub(crate) trait Unit: Send {
    fn purpose(&self) -> Purpose;
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
    work: Option<F>,
    outcome: Option<Result<T, E>>,
    reply: oneshot::Sender<Result<T, WriteError<E>>>,
}

/// What a [`Task`] answers on.
pub(crate) type Answer<T, E> = oneshot::Receiver<Result<T, WriteError<E>>>;

impl<F, T, E> Task<F, T, E> {
    pub(crate) fn new(purpose: Purpose, work: F) -> (Self, Answer<T, E>) {
        let (reply, answer) = oneshot::channel();
        (Self { purpose, work: Some(work), outcome: None, reply }, answer)
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

/// Everything the writer thread owns beside the connection.
pub(crate) struct Writer {
    pub(crate) inbox: mpsc::Receiver<Message>,
    pub(crate) batch_limit: usize,
    pub(crate) space: Space,
    pub(crate) wal: WalKeeper,
    pub(crate) answers: Answers,
    pub(crate) size: Arc<std::sync::atomic::AtomicU64>,
    pub(crate) mirrors: Vec<Box<dyn Mirror>>,
    pub(crate) halted: bool,
    /// Commits since the size was last looked at.
    pub(crate) since_measured: u32,
    /// A planted bug, for the torture suite: answer before the commit.
    pub(crate) answer_early: bool,
}

/// Tells callers that their writes are stored. For many at once a thread of its own does it: waking them
/// costs about as much as writing for them, and the next batch need not wait for that.
pub(crate) struct Answers {
    aside: SyncSender<Vec<Box<dyn Unit>>>,
    thread: JoinHandle<()>,
}

impl Answers {
    /// Batches from this size on are answered aside; for smaller ones the detour would cost more.
    const MANY: usize = 32;

    pub(crate) fn start() -> std::io::Result<Self> {
        let (aside, inbox) = sync_channel::<Vec<Box<dyn Unit>>>(4);
        let answer = move || inbox.iter().flatten().for_each(|unit| unit.answer(Ok(())));
        let thread = std::thread::Builder::new().name("vedetta-answers".into()).spawn(answer)?;
        Ok(Self { aside, thread })
    }

    /// Waits for the thread when it is four batches behind.
    fn give(&self, batch: Vec<Box<dyn Unit>>) {
        if batch.len() < Self::MANY {
            batch.into_iter().for_each(|unit| unit.answer(Ok(())));
        } else {
            // It is there as long as we are.
            let _ = self.aside.send(batch);
        }
    }

    fn finish(self) {
        drop(self.aside);
        let _ = self.thread.join();
    }
}

/// The statements of a batch, prepared once.
struct Statements<'c> {
    begin: Statement<'c>,
    commit: Statement<'c>,
    rollback: Statement<'c>,
    release: Statement<'c>,
    undo: Statement<'c>,
    size: Statement<'c>,
    free: Statement<'c>,
}

impl<'c> Statements<'c> {
    fn prepare(connection: &'c Connection) -> rusqlite::Result<Self> {
        Ok(Self {
            begin: connection.prepare("BEGIN IMMEDIATE")?,
            commit: connection.prepare("COMMIT")?,
            rollback: connection.prepare("ROLLBACK")?,
            release: connection.prepare("RELEASE unit")?,
            undo: connection.prepare("ROLLBACK TO unit")?,
            size: connection.prepare(
                "SELECT (p.page_count - f.freelist_count) * s.page_size
                 FROM pragma_page_count p, pragma_freelist_count f, pragma_page_size s",
            )?,
            free: connection.prepare(
                "SELECT f.freelist_count * s.page_size
                 FROM pragma_freelist_count f, pragma_page_size s",
            )?,
        })
    }
}

impl Writer {
    /// Writes until told to close; what is queued by then is still written.
    pub(crate) fn run(mut self, connection: &mut Connection) -> rusqlite::Result<()> {
        self.wal.observe(connection)?;
        let connection = &*connection;
        let mut statements = Statements::prepare(connection)?;
        self.measure(&mut statements);
        let mut messages = Vec::with_capacity(self.batch_limit);
        let mut batch = Vec::with_capacity(self.batch_limit);
        while self.inbox.blocking_recv_many(&mut messages, self.batch_limit) > 0 {
            for message in messages.drain(..) {
                match message {
                    Message::Write(unit) => batch.push(unit),
                    Message::Attach(mirror) => {
                        self.write(connection, &mut statements, std::mem::take(&mut batch));
                        self.mirrors.push(mirror);
                    }
                    Message::Close => self.inbox.close(),
                }
            }
            self.write(connection, &mut statements, std::mem::take(&mut batch));
        }
        self.wal.finish(connection, self.halted);
        self.answers.finish();
        Ok(())
    }

    /// One batch: run, commit, publish, answer.
    fn write(
        &mut self,
        connection: &Connection,
        statements: &mut Statements<'_>,
        batch: Vec<Box<dyn Unit>>,
    ) {
        let batch = self.admit(connection, statements, batch);
        if batch.is_empty() {
            return;
        }
        let (kept, batch) = match self.store(connection, statements, batch) {
            Ok(done) => done,
            Err((error, batch)) => {
                if !connection.is_autocommit() {
                    let _ = statements.rollback.execute([]);
                }
                self.mirrors.iter_mut().for_each(|m| m.discard());
                let reclaiming = batch.iter().all(|unit| unit.purpose() == Purpose::Reclaim);
                let error = self.classify(error, reclaiming);
                batch.into_iter().for_each(|unit| unit.answer(Err(error.clone())));
                return;
            }
        };
        failpoint("db.committed");
        if kept > 0 {
            self.mirrors.iter_mut().for_each(|m| m.publish());
        }
        failpoint("db.published");
        // Who freed room is told when it counts as free; others need not wait for the measuring.
        let reclaims = batch.iter().any(|unit| unit.purpose() == Purpose::Reclaim);
        if reclaims {
            self.measure(statements);
        }
        self.answers.give(batch);
        self.wal.committed(connection);
        self.since_measured += 1;
        if !reclaims && (self.since_measured >= MEASURE_EVERY || self.inbox.is_empty()) {
            self.measure(statements);
        }
    }

    /// Turns away what may not run now.
    fn admit(
        &mut self,
        connection: &Connection,
        statements: &mut Statements<'_>,
        mut batch: Vec<Box<dyn Unit>>,
    ) -> Vec<Box<dyn Unit>> {
        let refuse = |batch: Vec<Box<dyn Unit>>, why: &CommitError| {
            batch.into_iter().for_each(|unit| unit.answer(Err(why.clone())));
        };
        if self.halted || self.wal.broken() {
            refuse(batch, &CommitError::Halted);
            return Vec::new();
        }
        let wal = &self.wal;
        let shrink = || {
            wal.shrink(connection);
            statements.free.query_row([], |row| row.get::<_, i64>(0)).map_or(0, i64::unsigned_abs)
        };
        if !batch.is_empty() && !self.space.may_store(shrink) {
            let (storing, reclaiming): (Vec<_>, Vec<_>) =
                batch.into_iter().partition(|unit| unit.purpose() == Purpose::Store);
            refuse(storing, &CommitError::Full);
            batch = reclaiming;
            if !batch.is_empty() {
                self.space.make_room();
            }
        }
        batch
    }

    /// Runs the units and commits. On error the units come back, to be told.
    #[expect(clippy::type_complexity, reason = "the units travel with the error")]
    fn store(
        &mut self,
        connection: &Connection,
        statements: &mut Statements<'_>,
        batch: Vec<Box<dyn Unit>>,
    ) -> Result<(usize, Vec<Box<dyn Unit>>), (rusqlite::Error, Vec<Box<dyn Unit>>)> {
        let mut done: Vec<Box<dyn Unit>> = Vec::with_capacity(batch.len());
        let mut kept = 0;
        let mut waiting = batch.into_iter();
        if let Err(error) = statements.begin.execute([]) {
            return Err((error, waiting.collect()));
        }
        while let Some(mut unit) = waiting.next() {
            match self.run_unit(connection, statements, &mut *unit) {
                Ok(UnitRan::Kept) => {
                    kept += 1;
                    done.push(unit);
                }
                Ok(UnitRan::Undone) => done.push(unit),
                Ok(UnitRan::Failed(why)) => unit.answer(Err(why)),
                Err(error) => {
                    done.push(unit);
                    done.extend(waiting);
                    return Err((error, done));
                }
            }
        }
        if kept > 0 {
            for mirror in &mut self.mirrors {
                if let Err(error) = mirror.store(connection) {
                    return Err((error, done));
                }
            }
        }
        failpoint("db.before_commit");
        if self.answer_early {
            done.drain(..).for_each(|unit| unit.answer(Ok(())));
        }
        match statements.commit.execute([]) {
            Ok(_) => Ok((kept, done)),
            Err(error) => Err((error, done)),
        }
    }

    /// One unit in its savepoint. An error means that the whole transaction is gone.
    fn run_unit(
        &mut self,
        connection: &Connection,
        statements: &mut Statements<'_>,
        unit: &mut dyn Unit,
    ) -> rusqlite::Result<UnitRan> {
        let tx =
            Tx { connection, standing: Cell::new(Savepoint::None), failed: RefCell::new(None) };
        let ran = catch_unwind(AssertUnwindSafe(|| unit.run(&tx)));
        failpoint("db.unit");
        let Tx { standing, failed, .. } = tx;
        if let Some(error) = failed.into_inner() {
            return Err(error);
        }
        let opened = standing.get() == Savepoint::Open;
        if let Ok(Ran::Stored) = ran {
            if opened {
                statements.release.execute([])?;
            }
            self.mirrors.iter_mut().for_each(|m| m.keep());
            return Ok(UnitRan::Kept);
        }
        self.mirrors.iter_mut().for_each(|m| m.undo());
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
        if opened {
            statements.undo.execute([])?;
            statements.release.execute([])?;
        }
        Ok(match ran {
            Ok(Ran::Broke(error)) => {
                UnitRan::Failed(self.classify(error, unit.purpose() == Purpose::Reclaim))
            }
            Ok(_) => UnitRan::Undone,
            Err(_) => UnitRan::Failed(CommitError::Panicked),
        })
    }

    fn classify(&mut self, error: rusqlite::Error, reclaiming: bool) -> CommitError {
        if error.sqlite_error_code() == Some(ErrorCode::DiskFull) {
            self.space.ran_out(reclaiming);
            return CommitError::Full;
        }
        self.halted = self.halted || is_failed_fsync(&error);
        tracing::error!(%error, halted = self.halted, "a write to the database failed");
        CommitError::Failed(Arc::new(error))
    }

    fn measure(&mut self, statements: &mut Statements<'_>) {
        self.since_measured = 0;
        if let Ok(size) = statements.size.query_row([], |row| row.get::<_, i64>(0)) {
            self.size.store(size.unsigned_abs(), std::sync::atomic::Ordering::Relaxed);
        }
    }
}

/// What became of one unit inside the batch.
enum UnitRan {
    /// Part of the batch.
    Kept,
    /// It refused, and is undone; its caller hears when the batch ends, after those before it.
    Undone,
    /// It could not run, and is undone.
    Failed(CommitError),
}
