//! A disk that fails when a test says so.
//!
//! ```text
//!           SQLite ──► shim ──► real files          what a running program sees
//!                       │
//!                       ▼
//!    write, truncate ─► pending ──sync──► durable   what a power cut leaves
//!                          └───── images ────┘
//! ```
//!
//! A [`Disk`] is a SQLite VFS under a name of its own. It passes every call on to the default VFS and
//! notes what has been synced, so that at any moment it can build the directories a power cut may
//! leave behind ([`Disk::images`]). It also refuses operations on request: from a moment on, once, or
//! for lack of space.
//!
//! An *operation* is a call which changes a file: a write, a sync, a truncate, a delete, or an open
//! that creates. They count from 1. Locks and nameless temporary files are none. Reads of named files are counted
//! apart, and fail on request apart ([`Disk::fail_read_at`]): they change nothing, so they are no moments to cut the power at.
//!
//! What the disk promises its users is what a real one does, and no more:
//!
//! - A synced file keeps what was written, and its name.
//! - Unsynced writes are kept whole, in part, or not at all, by 512-byte sectors and in any order.
//! - A file never synced may be missing; a deleted one may be back. Syncing the directory settles
//!   this for all its files. SQLite does so at the first sync of a journal or WAL it may have
//!   created, and when it deletes with the sync flag.
//! - What a failed sync left unwritten is not written by a later one: the system has dropped it. As on
//!   Linux since 4.13, whoever has the file open is told of the failure once, at its own next sync.
//!
//! One disk serves one directory, which only SQLite touches, and only through this disk. The real
//! files are never synced: nothing reads them after a power cut.
//! `-shm` files are not recorded, for memory does not outlive a power cut.

mod record;
#[expect(unsafe_code, reason = "SQLite calls a VFS through C pointers")]
mod shim;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::{fmt, fs};

use parking_lot::{Mutex, RwLock, RwLockWriteGuard};
use rusqlite::ffi;

pub use self::record::{Image, Images};
use self::record::{Node, Operation, Record};

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The operation fails with the I/O error of its kind, `SQLITE_IOERR_WRITE` for a write.
    Error,
    /// A write fails with `SQLITE_FULL`; other operations are spared.
    Full,
}

/// How often it goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Times {
    /// The first time it can.
    Once,
    /// Until [`Disk::heal`].
    ForGood,
}

/// A database that waits, see [`Disk::hold_database`].
pub struct Held {
    _gate: RwLockWriteGuard<'static, ()>,
}

/// A handle of a registered disk; clones are the same disk.
///
/// Dropping the last one pulls the plug: the name is gone, the record is freed, and connections still
/// open get I/O errors.
#[derive(Clone)]
pub struct Disk {
    registration: Arc<shim::Registration>,
}

impl Disk {
    /// Registers a new disk with SQLite under a name which starts with `name` and is unique in this
    /// process.
    ///
    /// `seed` decides which unsynced sectors a failed sync still wrote.
    ///
    /// # Panics
    ///
    /// If `name` contains a NUL, or SQLite has no VFS to wrap.
    pub fn register(name: &str, seed: u64) -> Self {
        let registration = Arc::new(shim::Registration::new(name, Device::new(seed)));
        Self { registration }
    }

    /// The name to open connections with.
    pub fn name(&self) -> &str {
        self.registration.name()
    }

    /// How many operations were asked for so far.
    pub fn operations(&self) -> u64 {
        self.device().state.lock().operations
    }

    /// Cuts the power during operation `operation`, or during the next one if that is past.
    ///
    /// That operation fails, yet images may contain its effect. From then on nothing changes and every
    /// call fails.
    pub fn crash_at(&self, operation: u64) {
        self.device().state.lock().crash_at = Some(operation);
    }

    /// Cuts the power now, between two operations.
    pub fn crash_now(&self) {
        self.device().crash();
    }

    /// Whether the power was cut.
    pub fn crashed(&self) -> bool {
        self.device().crashed()
    }

    /// Lets the first operation from `operation` on which `fault` can hit go wrong. Replaces an earlier
    /// fault.
    pub fn fail_at(&self, operation: u64, fault: Fault, times: Times) {
        self.device().state.lock().armed = Some(Armed { operation, fault, times });
    }

    /// Takes back [`Disk::fail_at`] and [`Disk::fail_read_at`]; all succeeds again.
    pub fn heal(&self) {
        self.device().state.lock().armed = None;
        self.device().reads.fail_from.store(u64::MAX, Ordering::Relaxed);
    }

    /// How many reads were asked for so far.
    pub fn reads(&self) -> u64 {
        self.device().reads.asked.load(Ordering::Relaxed)
    }

    /// Lets the read number `read`, counted from 1, go wrong with `SQLITE_IOERR_READ`, or all from there on. Replaces an
    /// earlier fault of reads; [`Disk::heal`] takes it back, too.
    pub fn fail_read_at(&self, read: u64, times: Times) {
        let reads = &self.device().reads;
        let last = if times == Times::Once { read } else { u64::MAX };
        reads.fail_to.store(last, Ordering::Relaxed);
        reads.fail_from.store(read, Ordering::Relaxed);
    }

    /// The names of the threads that wrote to the database itself, and not to its log, since this was last asked.
    pub fn take_writers(&self) -> BTreeSet<String> {
        std::mem::take(&mut *self.device().writers.lock())
    }

    /// How often the log was asked to be synced so far.
    pub fn log_syncs(&self) -> u64 {
        self.device().log_syncs.load(Ordering::Relaxed)
    }

    /// How often syncing the log failed so far.
    pub fn failed_log_syncs(&self) -> u64 {
        self.device().failed_log_syncs.load(Ordering::Relaxed)
    }

    /// Until the answer is dropped, whoever writes to the database itself waits. What is written to the log does not.
    pub fn hold_database(&self) -> Held {
        Held { _gate: self.device().database.write() }
    }

    /// Holds all files together to `bytes`. A write that would need more fails with `SQLITE_FULL` and
    /// changes nothing; writing over what is there always works.
    pub fn limit(&self, bytes: Option<u64>) {
        self.device().state.lock().limit = bytes;
    }

    /// Lets a file that is not on this disk count for [`Disk::limit`] as if it were.
    pub fn count_beside(&self, path: &Path) {
        self.device().state.lock().beside = Some(path.to_owned());
    }

    /// The size of all files together, as [`Disk::limit`] counts it.
    pub fn used(&self) -> u64 {
        self.device().state.lock().used()
    }

    /// Makes the disk claim from now on that syncs succeed, without doing them.
    pub fn lie(&self, lying: bool) {
        self.device().state.lock().lying = lying;
    }

    /// What a power cut may leave behind, `how_many` times; if the power is still on, as of now.
    pub fn images(&self, seed: u64, how_many: usize) -> Images {
        Images::new(self.device().state.lock().record.snapshot(), seed, how_many)
    }

    fn device(&self) -> &'static Device {
        self.registration.device()
    }
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk")
            .field("name", &self.name())
            .field("operations", &self.operations())
            .field("crashed", &self.crashed())
            .finish_non_exhaustive()
    }
}

/// A SQLite result code.
type Code = std::ffi::c_int;

/// The disk as the shim sees it: decides which operations happen, and notes those which do.
struct Device {
    /// Outside of the lock, so that reads need not wait for a write.
    crashed: AtomicBool,
    reads: Reads,
    /// See [`Disk::take_writers`].
    writers: Mutex<BTreeSet<String>>,
    /// Shared by those who write to the database, see [`Disk::hold_database`].
    database: RwLock<()>,
    log_syncs: AtomicU64,
    failed_log_syncs: AtomicU64,
    state: Mutex<State>,
}

/// Outside of the lock, too.
struct Reads {
    asked: AtomicU64,
    /// The first and the last that fail.
    fail_from: AtomicU64,
    fail_to: AtomicU64,
}

impl Reads {
    /// One more is asked for: whether it is to fail.
    fn fails(&self) -> bool {
        let number = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        (self.fail_from.load(Ordering::Relaxed)..=self.fail_to.load(Ordering::Relaxed))
            .contains(&number)
    }
}

struct State {
    record: Record,
    operations: u64,
    crash_at: Option<u64>,
    armed: Option<Armed>,
    limit: Option<u64>,
    beside: Option<PathBuf>,
    lying: bool,
    rng: fastrand::Rng,
}

#[derive(Clone, Copy)]
struct Armed {
    operation: u64,
    fault: Fault,
    times: Times,
}

impl Device {
    fn new(seed: u64) -> Self {
        let state = State {
            record: Record::default(),
            operations: 0,
            crash_at: None,
            armed: None,
            limit: None,
            beside: None,
            lying: false,
            rng: fastrand::Rng::with_seed(seed),
        };
        let never = || AtomicU64::new(u64::MAX);
        let reads = Reads { asked: AtomicU64::new(0), fail_from: never(), fail_to: never() };
        Self {
            crashed: AtomicBool::new(false),
            reads,
            writers: Mutex::default(),
            database: RwLock::default(),
            log_syncs: AtomicU64::new(0),
            failed_log_syncs: AtomicU64::new(0),
            state: Mutex::new(state),
        }
    }

    /// Somebody writes to the database itself, and may have to wait.
    fn note_writer(&self) {
        let name = std::thread::current().name().unwrap_or("nameless").to_owned();
        self.writers.lock().insert(name);
        drop(self.database.read());
    }

    fn crashed(&self) -> bool {
        self.crashed.load(Ordering::Acquire)
    }

    /// Waits for the operation under way, so that none is noted after this returns.
    fn crash(&self) {
        let _state = self.state.lock();
        self.crashed.store(true, Ordering::Release);
    }

    /// Nobody will ask for images any more.
    fn retire(&self) {
        self.crash();
        self.state.lock().record = Record::default();
    }

    /// Does `operation` by calling `real`, unless the test has other plans.
    fn perform(&self, operation: Operation<'_>, real: impl FnOnce() -> Code) -> Code {
        self.perform_in(&mut self.state.lock(), operation, real)
    }

    /// The lock is held over `real`, so the record has the order in which things really happened.
    fn perform_in(
        &self,
        state: &mut State,
        operation: Operation<'_>,
        real: impl FnOnce() -> Code,
    ) -> Code {
        if self.crashed() {
            return error_of(operation);
        }
        state.operations += 1;
        if state.crash_at.is_some_and(|at| state.operations >= at) {
            if !matches!(operation, Operation::Sync { .. }) {
                state.record.apply(operation);
            }
            self.crashed.store(true, Ordering::Release);
            return error_of(operation);
        }
        if let Some(code) = state.refuse(operation) {
            return code;
        }
        let code = real();
        if code == ffi::SQLITE_OK && !(state.lying && matches!(operation, Operation::Sync { .. })) {
            state.record.apply(operation);
        }
        code
    }

    /// Opens a named file by calling `real`. An open which creates the file is an operation.
    fn open(&self, path: &Path, flags: Code, real: impl FnOnce() -> Code) -> Result<Node, Code> {
        let mut state = self.state.lock();
        if self.crashed() || state.record.adopt(path).is_err() {
            return Err(ffi::SQLITE_CANTOPEN);
        }
        if flags & ffi::SQLITE_OPEN_MAIN_DB != 0 {
            // SQLite may not look at these before the first image.
            for suffix in ["-wal", "-journal"] {
                let mut sibling = path.as_os_str().to_owned();
                sibling.push(suffix);
                if state.record.adopt(sibling.as_ref()).is_err() {
                    return Err(ffi::SQLITE_CANTOPEN);
                }
            }
        }
        let may_create = flags & ffi::SQLITE_OPEN_CREATE != 0;
        let code = if may_create && !state.record.exists(path) {
            self.perform_in(&mut state, Operation::Create { path }, real)
        } else {
            real()
        };
        if code == ffi::SQLITE_OK { Ok(state.record.open(path)) } else { Err(code) }
    }

    /// How many syncs of the file failed so far.
    fn failed_syncs(&self, node: Node) -> u64 {
        self.state.lock().record.failed_syncs(node)
    }

    fn close(&self, node: Node) {
        self.state.lock().record.close(node);
    }

    /// Deletes a file by calling `real`. Deleting one that is not there is no operation.
    fn delete(&self, path: &Path, sync_directory: bool, real: impl FnOnce() -> Code) -> Code {
        let mut state = self.state.lock();
        if self.crashed() || state.record.adopt(path).is_err() {
            return ffi::SQLITE_IOERR_DELETE;
        }
        if state.record.exists(path) {
            self.perform_in(&mut state, Operation::Delete { path, sync_directory }, real)
        } else {
            real()
        }
    }
}

impl State {
    /// The code to fail `operation` with, if it is to fail.
    fn refuse(&mut self, operation: Operation<'_>) -> Option<Code> {
        if let Some(armed) = self.armed.filter(|armed| self.operations >= armed.operation) {
            let code = match armed.fault {
                Fault::Error => Some(error_of(operation)),
                Fault::Full => {
                    matches!(operation, Operation::Write { .. }).then_some(ffi::SQLITE_FULL)
                }
            };
            if code.is_some() {
                if armed.times == Times::Once {
                    self.armed = None;
                }
                if let Operation::Sync { node, .. } = operation {
                    self.record.sync_failed(node, &mut self.rng);
                }
                return code;
            }
        }
        if let Operation::Sync { node, told, .. } = operation
            && told < self.record.failed_syncs(node)
        {
            if !self.lying {
                self.record.apply(operation); // what was written since is written all the same
            }
            return Some(error_of(operation));
        }
        let growth = self.record.growth(operation);
        let full = growth > 0 && self.limit.is_some_and(|limit| self.used() + growth > limit);
        full.then_some(ffi::SQLITE_FULL)
    }

    fn used(&self) -> u64 {
        let beside = self.beside.as_ref().and_then(|path| fs::metadata(path).ok());
        self.record.used() + beside.map_or(0, |beside| beside.len())
    }
}

/// What SQLite's own VFS answers when the system call behind `operation` fails.
fn error_of(operation: Operation<'_>) -> Code {
    match operation {
        Operation::Create { .. } => ffi::SQLITE_CANTOPEN,
        Operation::Write { .. } => ffi::SQLITE_IOERR_WRITE,
        Operation::Truncate { .. } => ffi::SQLITE_IOERR_TRUNCATE,
        Operation::Sync { .. } => ffi::SQLITE_IOERR_FSYNC,
        Operation::Delete { .. } => ffi::SQLITE_IOERR_DELETE,
    }
}
