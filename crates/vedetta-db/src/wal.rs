//! Keeps the write-ahead log short without standing in the way of commits.
//!
//! A thread of its own moves pages from the log to the file whenever the log has grown by a step. Under
//! a steady load it never catches up entirely, so the log would not start over: past a limit it then takes the
//! writers' turn with the file and moves the little that came meanwhile. The next commit waits for that, since a log
//! that is written to cannot start over; no answer does. What was moved before is flushed before, so the wait is for
//! the flush of that little alone.
//!
//! When the fsync of a checkpoint fails, there is no second try. SQLite syncs the file only when all of the
//! log was moved; pages moved before, in part of a checkpoint, are lost with that fsync and not moved
//! again. The log still has them, so it stays as it is, and the next start moves it from its beginning.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rusqlite::Connection;

use crate::failpoint;

/// Pages the log grows by between two checkpoints (4 MiB).
const STEP: i32 = 1_000;
/// Pages above which no commit may begin before the log is moved, so that it starts over (12 MiB). Short
/// on purpose: overwriting a log costs one write per fsync, a growing one two.
const LIMIT: i32 = 3_000;
/// How often what was moved is flushed before commits have to wait for the rest.
const FLUSHES: usize = 2;

/// How long a connection waits for another one.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// The writers' side of it.
pub(crate) struct WalKeeper {
    /// `None` at the end.
    nudge: Option<SyncSender<()>>,
    step: i32,
    /// Pages in the log after the last commit.
    logged: Arc<AtomicI32>,
    /// The fsync of a checkpoint failed.
    broken: Arc<AtomicBool>,
    /// The log's length when a checkpoint was last asked for.
    asked: i32,
}

/// The side of the thread that moves pages.
pub(crate) struct Checkpoints {
    /// Its own.
    connection: Connection,
    nudged: Receiver<()>,
    limit: i32,
    logged: Arc<AtomicI32>,
    broken: Arc<AtomicBool>,
    file: Option<Arc<File>>,
}

impl Checkpoints {
    /// Starts the thread. Nobody commits while it has `file`, and it ends when the keeper in it does.
    pub(crate) fn start<F: Send + 'static>(
        self,
        file: Weak<Mutex<F>>,
    ) -> std::io::Result<JoinHandle<()>> {
        let thread = std::thread::Builder::new().name("vedetta-checkpoint".into());
        thread.spawn(move || self.run(&file))
    }

    fn run<F>(&self, file: &Weak<Mutex<F>>) {
        while self.nudged.recv().is_ok() {
            checkpoint(&self.connection, "PASSIVE", &self.broken);
            if self.logged.load(Ordering::Relaxed) < self.limit {
                continue;
            }
            // Each time less is left.
            for _ in 0..FLUSHES {
                self.flush();
                checkpoint(&self.connection, "PASSIVE", &self.broken);
            }
            let Some(file) = file.upgrade() else { return };
            let _turn = file.lock();
            checkpoint(&self.connection, "PASSIVE", &self.broken);
        }
    }

    /// Has what was moved reach the disk. If that fails SQLite hears of it, too, when it flushes the file itself.
    fn flush(&self) {
        if let Some(error) = self.file.as_ref().and_then(|file| file.sync_data().err()) {
            self.broken.store(true, Ordering::Release);
            tracing::error!(%error, "the fsync of a checkpoint failed: writing stops");
        }
    }
}

impl WalKeeper {
    /// The two sides. A test may ask for a shorter step. `file` is the database, open beside SQLite: nobody may close
    /// it while a connection of this process is open, or the system lets go of SQLite's locks.
    pub(crate) fn new(
        connection: Connection,
        step: Option<i32>,
        file: Option<Arc<File>>,
    ) -> (Self, Checkpoints) {
        let (nudge, nudged) = sync_channel(1);
        let (logged, broken) = (Arc::new(AtomicI32::new(0)), Arc::new(AtomicBool::new(false)));
        let (step, limit) = step.map_or((STEP, LIMIT), |step| (step, step * (LIMIT / STEP)));
        let checkpoints = Checkpoints {
            connection,
            nudged,
            limit,
            logged: Arc::clone(&logged),
            broken: Arc::clone(&broken),
            file,
        };
        (Self { nudge: Some(nudge), step, logged, broken, asked: 0 }, checkpoints)
    }

    /// Makes the writer's connection report the log's length.
    pub(crate) fn observe(&self, connection: &mut Connection) -> rusqlite::Result<()> {
        let logged = Arc::clone(&self.logged);
        connection.wal_hook(Some(move |_: &mut _, pages| {
            logged.store(pages, Ordering::Relaxed);
            Ok(())
        }))
    }

    /// A commit is done: asks for a checkpoint when the log has grown by a step.
    pub(crate) fn committed(&mut self) {
        let pages = self.logged.load(Ordering::Relaxed);
        if pages < self.asked {
            self.asked = 0; // the log started over
        }
        if pages >= self.asked + self.step {
            // Full means that one is already asked for.
            let _ = self.nudge.as_ref().map(|nudge| nudge.try_send(()));
            self.asked = pages;
        }
    }

    /// Lets the thread end.
    pub(crate) fn stop(&mut self) {
        self.nudge = None;
    }

    /// Gives the log's room back to the disk, unless somebody reads just now.
    pub(crate) fn shrink(&self, connection: &Connection) {
        let _ = connection.busy_timeout(Duration::ZERO);
        checkpoint(connection, "TRUNCATE", &self.broken);
        let _ = connection.busy_timeout(PATIENCE);
    }

    /// Whether the fsync of a checkpoint failed: nothing may be written any more.
    pub(crate) fn broken(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.broken)
    }

    /// The last checkpoint, when nothing writes any more. It leaves an empty log: SQLite takes a damaged
    /// one for the end of the log, and older pages in it would hide newer ones in the file.
    /// A writer that has `halted` leaves the log as it is.
    pub(crate) fn finish(&self, connection: &Connection, halted: bool) {
        if !halted {
            checkpoint(connection, "TRUNCATE", &self.broken);
        }
    }
}

/// Moves all that an earlier run left in the log, before anything is added to it.
///
/// After a failed fsync the system shows what it has dropped as if it were on the disk, and so does
/// SQLite. Commits after that in the same log would be lost with it in a power cut.
pub(crate) fn start_over(connection: &Connection) -> rusqlite::Result<()> {
    let sql = "PRAGMA wal_checkpoint(TRUNCATE)";
    let busy: i64 = connection.query_row(sql, [], |row| row.get(0))?;
    if busy == 0 {
        return Ok(());
    }
    let cause = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_BUSY);
    let what = "a backup or a check is reading it: try again when that is done";
    Err(rusqlite::Error::SqliteFailure(cause, Some(what.into())))
}

/// Writes a log out beyond its limit before anything is in it, so that no commit has to make it longer: see
/// [`LIMIT`]. SQLite takes zeros for the end of a log. Without the room it works all the same.
pub(crate) fn make_room(database: &Path) {
    const FRAME: u64 = 4096 + 24;
    let mut name = database.as_os_str().to_owned();
    name.push("-wal");
    let Ok(mut log) = File::options().write(true).open(name) else { return };
    let mut zeros = io::repeat(0).take(FRAME * u64::from((LIMIT + STEP).unsigned_abs()));
    if io::copy(&mut zeros, &mut log).and_then(|_| log.sync_all()).is_err() {
        let _ = log.set_len(0);
    }
}

/// Moves pages; a passive one moves what it can without waiting for anybody. A failure is not lost
/// data: the log still has it.
fn checkpoint(connection: &Connection, how: &str, broken: &AtomicBool) {
    if broken.load(Ordering::Acquire) {
        return;
    }
    failpoint("db.checkpoint");
    let sql = format!("PRAGMA wal_checkpoint({how})");
    let moved = connection.query_row(&sql, [], |_| Ok(()));
    failpoint("db.checkpointed");
    if let Err(error) = moved {
        if is_failed_fsync(&error) {
            broken.store(true, Ordering::Release);
            tracing::error!(%error, "the fsync of a checkpoint failed: writing stops");
        } else {
            tracing::warn!(%error, "a checkpoint failed; the log keeps growing until one succeeds");
        }
    }
}

/// After which nothing can be trusted to reach the disk.
pub(crate) fn is_failed_fsync(error: &rusqlite::Error) -> bool {
    let failed = [rusqlite::ffi::SQLITE_IOERR_FSYNC, rusqlite::ffi::SQLITE_IOERR_DIR_FSYNC];
    matches!(error, rusqlite::Error::SqliteFailure(cause, _) if failed.contains(&cause.extended_code))
}

#[cfg(test)]
mod tests {
    use crate::open::Torture;
    use crate::{CommitError, Db, Options, Purpose, Schema, Stop, WriteError};

    const NUMBERS: Schema =
        Schema { component: "numbers", steps: &["CREATE TABLE number (n INTEGER PRIMARY KEY)"] };

    #[test]
    fn a_flush_that_fails_stops_the_writing_and_loses_nothing() {
        const ENOUGH: u32 = 10_000;
        let folder = tempfile::tempdir().unwrap();
        let mut options = Options::new(folder.path().join("test.db"));
        options.ballast = 0;
        options.torture =
            Torture { flush_fails: true, checkpoint_step: Some(2), ..Torture::default() };
        let db = Db::open(&options, &[NUMBERS]).unwrap();
        let write = |n: u32| {
            db.write_blocking(Purpose::Store, move |tx| -> Result<(), Stop<()>> {
                tx.execute("INSERT INTO number VALUES (?1)", [n])?;
                Ok(())
            })
        };
        let refused = (0..ENOUGH).find(|n| write(*n).is_err());
        let acknowledged = refused.expect("it stops");
        assert!(acknowledged > 0);
        for n in ENOUGH..ENOUGH + 2 {
            let stopped = matches!(write(n), Err(WriteError::Lost(CommitError::Halted)));
            assert!(stopped, "it has stopped for good");
        }
        db.close_blocking();
        options.torture = Torture::default();
        let db = Db::open(&options, &[NUMBERS]).unwrap();
        let sql = "SELECT count(*) FROM number WHERE n < ?1";
        let stored = db.read_blocking(|file| file.query_row(sql, [acknowledged], |row| row.get(0)));
        assert_eq!(stored.ok(), Some(acknowledged));
        db.close_blocking();
    }
}
