//! One SQLite file, one writer, one fsync for all who wait.
//!
//! ```text
//!  write(f) ──┐                     ┌─ SAVEPOINT f  RELEASE ─┐
//!  write(g) ──┼─► queue ─► BEGIN ───┼─ SAVEPOINT g  ROLLBACK ┼──► COMMIT ──► mirrors publish ──► answers
//!  write(h) ──┘  (bounded)          └─ SAVEPOINT h  RELEASE ─┘   (one fsync)
//! ```
//!
//! A write is a closure. Each runs in a savepoint of its own, so one that fails is undone alone;
//! all that wait share one commit, and nobody is told "done" before that commit is on the disk, but who
//! [does not need it there](Db::write_lazily).
//! What is stored is not this crate's business. A database on a PostgreSQL server is [`postgres`]' part.

mod backup;
mod clock;
mod failpoint;
mod folder;
mod log;
mod open;
pub mod postgres;
mod readers;
mod space;
mod wal;
mod writer;

pub use backup::{BackupError, backup};
pub use clock::Clock;
pub use failpoint::failpoint;
pub use folder::{DataFolder, FolderError};
pub use open::{Db, OpenError, Options, Schema, Size, Torture, damage, inspect};
pub use readers::ReadError;
pub use writer::{CommitError, Mirror, Purpose, Round, Rows, Stop, Tx, WriteError};

/// The connection a closure works on, and what it returns.
pub use rusqlite;
