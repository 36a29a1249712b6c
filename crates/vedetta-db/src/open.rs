//! Opening the file: who may, in which version, with which connections.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension as _};
use tokio::sync::Semaphore;

use crate::clock::Clock;
use crate::folder::{parent, sync_folder};
use crate::log::{self, UNSYNCED};
use crate::readers::{ReadError, Reader, Readers};
use crate::space::{Space, is_full};
use crate::wal::{PATIENCE, WalKeeper, make_room, start_over};
use crate::writer::{
    Answer, CommitError, Durability, File, Message, Mirror, Purpose, Queue, Round, Stop, Task, Tx,
    WriteError, Writer,
};

/// "VEDT": tells our files from other SQLite files.
const APPLICATION: i64 = 0x5645_4454;
/// The layout of the file itself; tables have versions of their own.
pub(crate) const FILE_VERSION: i64 = 1;
/// Pages of [`Torture::small_cache`]: less SQLite does not take.
const SMALL_CACHE: i64 = 10;

/// How to open a database.
#[derive(Debug, Clone)]
pub struct Options {
    /// The file; created, readable by its owner only, if missing.
    pub file: PathBuf,
    /// Writes that may wait in line; beyond that callers wait to get into it.
    pub queue: usize,
    /// Writes that share a commit at most.
    pub batch: usize,
    /// Connections for reads.
    pub readers: usize,
    /// Bytes kept in reserve beside the file for the day the disk is full. With 0 there is none, and the log is not written
    /// out beforehand, either: for short-lived files.
    pub ballast: u64,
    /// Faults to plant; see [`Torture`].
    pub(crate) torture: Torture,
}

/// Faults planted by the torture suite, which must notice each of them. The product has no way to ask
/// for one: the setter exists under the feature `torture` only.
#[derive(Debug, Clone, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fault of its own")]
pub struct Torture {
    /// Open files through this SQLite VFS.
    pub vfs: Option<String>,
    /// Tell callers "done" before the commit.
    pub answer_early: bool,
    /// `synchronous=NORMAL`: commits without an fsync.
    pub skip_fsync: bool,
    /// Commit all of a batch lazily if some of it is lazy.
    pub share_lazily: bool,
    /// Pages between two checkpoints, so that a short run has some.
    pub checkpoint_step: Option<i32>,
    /// Hardly a page is kept in memory, and none by the writer from one transaction to the next: so a short run
    /// reads, and every write does.
    pub small_cache: bool,
    /// What a checkpoint has moved cannot be flushed.
    pub flush_fails: bool,
    /// How soon a full disk is looked at again, so that a run with many full disks is short.
    pub look_again: Option<Duration>,
}

impl Options {
    /// The defaults for a file.
    pub fn new(file: impl Into<PathBuf>) -> Self {
        Self {
            file: file.into(),
            queue: 4096,
            batch: 512,
            readers: 4,
            ballast: 64 << 20,
            torture: Torture::default(),
        }
    }

    fn connect(&self, flags: OpenFlags) -> rusqlite::Result<Connection> {
        let flags = flags | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = match &self.torture.vfs {
            Some(vfs) => Connection::open_with_flags_and_vfs(&self.file, flags, vfs.as_str())?,
            None => Connection::open_with_flags(&self.file, flags)?,
        };
        // A refused or newer file must be left as it was, so closing never checkpoints by itself.
        connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
        connection.busy_timeout(PATIENCE)?;
        if self.torture.small_cache {
            connection.pragma_update(None, "cache_size", SMALL_CACHE)?;
        }
        Ok(connection)
    }

    /// Pages, or KiB if negative, that a connection which writes keeps in memory.
    fn cache(&self) -> i64 {
        if self.torture.small_cache { SMALL_CACHE } else { -16_384 }
    }

    fn synchronous(&self) -> &'static str {
        if self.torture.skip_fsync { "NORMAL" } else { "FULL" }
    }

    /// Plants faults.
    #[cfg(feature = "torture")]
    #[must_use]
    pub fn with_torture(mut self, torture: Torture) -> Self {
        self.torture = torture;
        self
    }
}

/// The tables of one component and how they came to be: step N brings version N - 1 to N.
#[derive(Debug, Clone, Copy)]
pub struct Schema {
    /// Whose tables these are.
    pub component: &'static str,
    /// SQL of each step; never changed once released, only added to.
    pub steps: &'static [&'static str],
}

/// Why a database cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Use the program that wrote it, or a newer one.
    #[error(
        "{} was written by a newer Vedetta ({what} version {found}, this one knows {known}); nothing was changed",
        file.display()
    )]
    Newer {
        /// The database.
        file: PathBuf,
        /// The part that is newer.
        what: String,
        /// Its version in the file.
        found: i64,
        /// The newest version this program knows.
        known: i64,
    },
    /// It is somebody else's file: choose another.
    #[error("{} is not a Vedetta database; nothing was changed", file.display())]
    Foreign {
        /// The file.
        file: PathBuf,
    },
    /// Check the path and its permissions.
    #[error("cannot open {}", file.display())]
    Unreadable {
        /// The database.
        file: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Committed writes are in the log, but cannot be read any more: restore a backup. Or delete the
    /// log, whose name is the file's with `-wal`, and do without all that is in it.
    #[error("the log of {} is damaged, and writes in it are lost; restore a backup; nothing was changed", file.display())]
    DamagedLog {
        /// The database.
        file: PathBuf,
    },
    /// The file cannot be read as a database: restore a backup.
    #[error("cannot use {} as a database", file.display())]
    Sql {
        /// The database.
        file: PathBuf,
        /// What SQLite said.
        #[source]
        source: rusqlite::Error,
    },
}

impl OpenError {
    fn is_for_lack_of_room(&self) -> bool {
        match self {
            Self::Sql { source, .. } => {
                // The second is told when the index of the log, a file of its own, finds no room.
                source.sqlite_error_code() == Some(ErrorCode::DiskFull)
                    || source.sqlite_error().is_some_and(|cause| {
                        cause.extended_code == rusqlite::ffi::SQLITE_IOERR_SHMSIZE
                    })
            }
            Self::Unreadable { source, .. } => is_full(source),
            _ => false,
        }
    }
}

/// A handle to an open database; clones share it.
#[derive(Clone)]
pub struct Db {
    inner: Arc<Inner>,
}

/// How large a database is, see [`Db::size`].
#[derive(Debug, Clone)]
pub struct Size(Arc<AtomicU64>);

impl Size {
    /// Bytes in use.
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

struct Inner {
    queue: Queue,
    writer: Weak<Writer>,
    readers: Readers,
    /// One for each connection that reads.
    turns: Arc<Semaphore>,
    size: Arc<AtomicU64>,
    file: PathBuf,
    restored: bool,
    clock: Clock,
    steady: Clock,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Db {
    /// Opens the file, brings the tables to the newest version and starts the writer.
    pub fn open(options: &Options, schemas: &[Schema]) -> Result<Self, OpenError> {
        let unreadable = |source| OpenError::Unreadable { file: options.file.clone(), source };
        let sql = |source| OpenError::Sql { file: options.file.clone(), source };

        let ballast = parent(&options.file).join("ballast");
        let give_up = || options.ballast > 0 && fs::remove_file(&ballast).is_ok();
        let (connection, (clock, steady)) = match make_ready(options, schemas) {
            // What has to be written before anything else may use the room kept for deletes.
            Err(full) if full.is_for_lack_of_room() && give_up() => {
                tracing::warn!("gave up the ballast file so that the database can be opened");
                make_ready(options, schemas)
            }
            done => done,
        }?;
        let restored = has_table(&connection, "vedetta_backup").map_err(sql)?;

        // The disk of a test is SQLite's alone.
        let flushed: Option<&Path> = match &options.torture {
            Torture { vfs: Some(_), .. } => None,
            Torture { flush_fails: true, .. } => Some(Path::new("/dev/null")),
            _ => Some(&*options.file),
        };
        let flushed = flushed.map(|file| fs::File::open(file).map(Arc::new)).transpose();
        let flushed = flushed.map_err(unreadable)?;
        // Whatever goes wrong from here on, what comes behind the file is closed before it.
        let mut connection = connection;
        let count = options.readers.max(1);
        let mut readers = Vec::with_capacity(count);
        for _ in 0..count {
            let connection = options.connect(OpenFlags::SQLITE_OPEN_READ_ONLY).map_err(sql)?;
            readers.push(Reader { connection, _flushed: flushed.clone() });
        }
        let checkpoints = options.connect(OpenFlags::SQLITE_OPEN_READ_WRITE).map_err(sql)?;
        prepare(&checkpoints, options.synchronous(), options.cache()).map_err(sql)?;

        let (queue, desk) = Queue::new(options.queue);
        let size = Arc::new(AtomicU64::new(0));
        let space = Space::new(ballast, options.ballast, options.torture.look_again);
        let step = options.torture.checkpoint_step;
        let (wal, checkpoints) = WalKeeper::new(checkpoints, step, flushed.clone());
        wal.observe(&mut connection).map_err(sql)?;
        let forget = options.torture.small_cache.then_some("PRAGMA shrink_memory");
        let file = File::new(connection, space, wal, options.synchronous(), forget, flushed);
        let writer =
            Writer::new(desk, file, checkpoints, Arc::clone(&size), options).map_err(unreadable)?;
        let writer = Arc::new(writer);
        let helped = Arc::downgrade(&writer);
        let thread = std::thread::Builder::new()
            .name("vedetta-writer".into())
            .spawn(move || writer.run())
            .map_err(unreadable)?;

        Ok(Self {
            inner: Arc::new(Inner {
                queue,
                writer: helped,
                readers: Readers::new(readers),
                turns: Arc::new(Semaphore::new(count)),
                size,
                file: options.file.clone(),
                restored,
                clock,
                steady,
                thread: Mutex::new(Some(thread)),
            }),
        })
    }

    /// Runs `work` in a savepoint of its own and returns once it is on the disk.
    ///
    /// Cancel safety: a future dropped after its first poll may still be stored.
    pub async fn write<T, E, F>(&self, purpose: Purpose, work: F) -> Result<T, WriteError<E>>
    where
        F: FnOnce(&Tx<'_>) -> Result<T, Stop<E>> + Send + 'static,
        T: Send + 'static,
        E: Send + 'static,
    {
        self.ask(Task::new(purpose, Durability::Synced, work)).await
    }

    /// [`Db::write`] for rows whose loss does no harm: returns once they are committed, which all can see
    /// from then on, but not for the disk. A power cut may take them back, the last ones first, and none
    /// that came before a [`Db::write`] that was answered.
    pub async fn write_lazily<T, E, F>(&self, purpose: Purpose, work: F) -> Result<T, WriteError<E>>
    where
        F: FnOnce(&Tx<'_>) -> Result<T, Stop<E>> + Send + 'static,
        T: Send + 'static,
        E: Send + 'static,
    {
        self.ask(Task::new(purpose, Durability::Lazy, work)).await
    }

    async fn ask<T, E, F>(
        &self,
        (task, answer): (Task<F, T, E>, Answer<T, E>),
    ) -> Result<T, WriteError<E>>
    where
        F: FnOnce(&Tx<'_>) -> Result<T, Stop<E>> + Send + 'static,
        T: Send + 'static,
        E: Send + 'static,
    {
        self.inner.queue.send(Box::new(task)).await?;
        answer.await.map_err(|_| CommitError::Closed)?
    }

    /// Until it is dropped, the writes that this thread asks for only gather: for one that has several things to do before it
    /// waits. Then the writers are woken, unless [`Round::help`] has done without them.
    pub fn round(&self) -> Round<'_> {
        Round::begin(&self.inner.queue, &self.inner.writer)
    }

    /// [`Db::write`] for a thread of one's own; it panics on a thread that drives a runtime.
    pub fn write_blocking<T, E, F>(&self, purpose: Purpose, work: F) -> Result<T, WriteError<E>>
    where
        F: FnOnce(&Tx<'_>) -> Result<T, Stop<E>> + Send + 'static,
        T: Send + 'static,
        E: Send + 'static,
    {
        let (task, answer) = Task::new(purpose, Durability::Synced, work);
        self.inner.queue.send_blocking(Message::Write(Box::new(task)))?;
        answer.blocking_recv().map_err(|_| CommitError::Closed)?
    }

    /// Whether as many writes wait as the queue takes, so that the next one would wait to get into it.
    pub fn is_crowded(&self) -> bool {
        self.inner.queue.is_full()
    }

    /// Reads the last committed state. Never waits for the writer.
    pub async fn read<T, F>(&self, work: F) -> Result<T, ReadError>
    where
        F: FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
        T: Send + 'static,
    {
        let inner = Arc::clone(&self.inner);
        // Threads are only taken by those who will get a connection at once.
        let turn = Arc::clone(&inner.turns).acquire_owned().await;
        let read = move || {
            let _turn = turn;
            inner.readers.read(work)
        };
        match tokio::task::spawn_blocking(read).await {
            Ok(answer) => answer,
            Err(stopped) => std::panic::resume_unwind(stopped.into_panic()),
        }
    }

    /// [`Db::read`] for a thread that may block.
    pub fn read_blocking<T>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, ReadError> {
        self.inner.readers.read(work)
    }

    /// Lets `mirror` follow all writes queued from now on. For a thread of one's own, too.
    pub fn attach(&self, mirror: Box<dyn Mirror>) -> Result<(), CommitError> {
        self.inner.queue.send_blocking(Message::Attach(mirror))
    }

    /// Bytes in use in the file, free pages not counted; as of a commit not long ago: single rows are counted when there
    /// are 64 KiB of them.
    pub fn size(&self) -> u64 {
        self.inner.size.load(Ordering::Relaxed)
    }

    /// [`Db::size`] for closures, which must not keep the database open.
    pub fn sized(&self) -> Size {
        Size(Arc::clone(&self.inner.size))
    }

    /// Where it is.
    pub fn file(&self) -> &Path {
        &self.inner.file
    }

    /// Whether this file is a backup that nobody has started on yet. See [`crate::backup()`].
    pub fn restored(&self) -> bool {
        self.inner.restored
    }

    /// The time to store in it.
    pub fn clock(&self) -> Clock {
        self.inner.clock
    }

    /// The same for what only matters by how long ago it was. While the machine runs it is not set, neither back nor
    /// forward.
    pub fn steady_clock(&self) -> Clock {
        self.inner.steady
    }

    /// Writes what is queued, then stops the writer and lets go of the file. Later writes answer
    /// [`CommitError::Closed`], later reads an error, too.
    ///
    /// Blocks until the writer has ended, so it wants a thread of one's own; a second call does nothing.
    pub fn close_blocking(&self) {
        if let Some(thread) = self.inner.thread.lock().take() {
            let _ = self.inner.queue.send_blocking(Message::Close);
            let _ = thread.join();
            self.inner.queue.until_let_go();
            // SQLite forgets how far it had moved the log when nobody has it open: see `wal`.
            self.inner.readers.close();
        }
    }
}

impl fmt::Debug for Db {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Db").field("file", &self.inner.file).finish_non_exhaustive()
    }
}

/// What SQLite's own check finds wrong with the file; empty when it is sound.
pub fn damage(file: &Path) -> rusqlite::Result<Vec<String>> {
    let connection = Connection::open_with_flags(file, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    let mut check = connection.prepare("PRAGMA integrity_check")?;
    let rows = check.query_map([], |row| row.get::<_, String>(0))?;
    rows.filter(|row| !matches!(row, Ok(line) if line == "ok")).collect()
}

/// Opens a file to look at it, changing nothing; works beside the process that has it. Refuses what
/// [`Db::open`] refuses. The log can only be judged when nobody writes to it: `idle` says so.
pub fn inspect(file: &Path, schemas: &[Schema], idle: bool) -> Result<Connection, OpenError> {
    let options = Options::new(file);
    let unreadable = |source| OpenError::Unreadable { file: options.file.clone(), source };
    fs::File::open(file).map_err(unreadable)?;
    if idle && log::is_damaged(file).map_err(unreadable)? {
        return Err(OpenError::DamagedLog { file: options.file.clone() });
    }
    let connection = options
        .connect(OpenFlags::SQLITE_OPEN_READ_ONLY)
        .map_err(|source| OpenError::Sql { file: options.file.clone(), source })?;
    check_versions(&options, &connection, schemas)?;
    Ok(connection)
}

/// SQLite gives its other files the mode of the main one, so that one is made by us.
pub(crate) fn create_private(file: &Path) -> io::Result<()> {
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(file) {
        Ok(_) => sync_folder(parent(file)),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => fs::metadata(file).map(drop),
        Err(e) => Err(e),
    }
}

/// The connection that is to write, to a file as this program wants it, and the clocks in that.
fn make_ready(
    options: &Options,
    schemas: &[Schema],
) -> Result<(Connection, (Clock, Clock)), OpenError> {
    let unreadable = |source| OpenError::Unreadable { file: options.file.clone(), source };
    let sql = |source| OpenError::Sql { file: options.file.clone(), source };
    create_private(&options.file).map_err(unreadable)?;
    if log::is_damaged(&options.file).map_err(unreadable)? {
        return Err(OpenError::DamagedLog { file: options.file.clone() });
    }
    let connection = options.connect(OpenFlags::SQLITE_OPEN_READ_WRITE).map_err(sql)?;
    check_versions(options, &connection, schemas)?;
    prepare(&connection, options.synchronous(), options.cache()).map_err(sql)?;
    start_over(&connection).map_err(sql)?;
    if options.ballast > 0 {
        make_room(&options.file);
    }
    migrate(&connection, schemas).map_err(sql)?;
    let clocks = Clock::of(&connection).map_err(sql)?;
    Ok((connection, clocks))
}

/// Refuses what this program must not touch, before anything is touched.
fn check_versions(
    options: &Options,
    connection: &Connection,
    schemas: &[Schema],
) -> Result<(), OpenError> {
    let sql = |source| OpenError::Sql { file: options.file.clone(), source };
    let pragma = |name: &str| {
        connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0)).map_err(sql)
    };
    let tables: i64 = connection
        .query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))
        .map_err(sql)?;
    if tables == 0 {
        return Ok(());
    }
    if pragma("application_id")? != APPLICATION {
        return Err(OpenError::Foreign { file: options.file.clone() });
    }
    let newer = |what: &str, found, known| {
        Err(OpenError::Newer { file: options.file.clone(), what: what.into(), found, known })
    };
    let found = pragma("user_version")? & !UNSYNCED;
    if found > FILE_VERSION {
        return newer("file", found, FILE_VERSION);
    }
    for schema in schemas {
        let found = version(connection, schema).map_err(sql)?;
        let known = i64::try_from(schema.steps.len()).unwrap_or(i64::MAX);
        if found > known {
            return newer(schema.component, found, known);
        }
    }
    Ok(())
}

fn prepare(connection: &Connection, synchronous: &str, cache: i64) -> rusqlite::Result<()> {
    // Stepped to its end: the switch is committed after the first row, and `pragma_update` would drop
    // an error there and leave a connection that only says it is in WAL mode.
    let mut switch = connection.prepare("PRAGMA journal_mode = WAL")?;
    switch.query_map([], |_| Ok(()))?.collect::<rusqlite::Result<()>>()?;
    connection.pragma_update(None, "synchronous", synchronous)?;
    connection.pragma_update(None, "wal_autocheckpoint", 0)?;
    // A reader that stays long, such as a backup, lets the log grow; this cuts it back.
    connection.pragma_update(None, "journal_size_limit", 64 << 20)?;
    connection.pragma_update(None, "cache_size", cache)?;
    connection.pragma_update(None, "temp_store", "MEMORY")
}

fn migrate(connection: &Connection, schemas: &[Schema]) -> rusqlite::Result<()> {
    // Where nothing has to be written a full disk does not matter.
    if !is_laid_out(connection)? {
        let tx = connection.unchecked_transaction()?;
        tx.pragma_update(None, "application_id", APPLICATION)?;
        tx.pragma_update(None, "user_version", FILE_VERSION)?;
        tx.execute_batch(
            "CREATE TABLE IF NOT EXISTS vedetta_schema (component TEXT PRIMARY KEY, version INTEGER NOT NULL) STRICT;
             CREATE TABLE IF NOT EXISTS vedetta_clock (
                 boot TEXT NOT NULL, up INTEGER NOT NULL, wall INTEGER NOT NULL, steady INTEGER NOT NULL) STRICT",
        )?;
        tx.commit()?;
    }
    for schema in schemas {
        let done = usize::try_from(version(connection, schema)?).unwrap_or(0);
        for (step, sql) in schema.steps.iter().enumerate().skip(done) {
            let tx = connection.unchecked_transaction()?;
            tx.execute_batch(sql)?;
            crate::failpoint("db.migration");
            tx.execute(
                "INSERT INTO vedetta_schema VALUES (?1, ?2)
                 ON CONFLICT (component) DO UPDATE SET version = excluded.version",
                (schema.component, i64::try_from(step + 1).unwrap_or(i64::MAX)),
            )?;
            tx.commit()?;
        }
    }
    Ok(())
}

/// Whether it is a file of this layout, without the mark [`UNSYNCED`], which a new log must not begin with.
fn is_laid_out(connection: &Connection) -> rusqlite::Result<bool> {
    let pragma = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    Ok(pragma("application_id")? == APPLICATION
        && pragma("user_version")? == FILE_VERSION
        && has_table(connection, "vedetta_schema")?
        && has_table(connection, "vedetta_clock")?)
}

fn version(connection: &Connection, schema: &Schema) -> rusqlite::Result<i64> {
    if !has_table(connection, "vedetta_schema")? {
        return Ok(0);
    }
    let sql = "SELECT version FROM vedetta_schema WHERE component = ?1";
    let version = connection.query_row(sql, [schema.component], |row| row.get(0)).optional()?;
    Ok(version.unwrap_or(0))
}

fn has_table(connection: &Connection, name: &str) -> rusqlite::Result<bool> {
    let sql = "SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = ?1";
    connection.query_row(sql, [name], |row| row.get::<_, i64>(0)).map(|n| n > 0)
}
