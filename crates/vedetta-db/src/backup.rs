//! A copy of the database while it is written to.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags};

use crate::folder::{parent, sync_folder};

/// Why there is no backup.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackupError {
    /// Choose another name: a backup never overwrites.
    #[error("{} exists already", .0.display())]
    Exists(PathBuf),
    /// SQLite takes names in UTF-8 only: choose another.
    #[error("{} is not a name in UTF-8", .0.display())]
    Unspeakable(PathBuf),
    /// There is nothing to back up at that place.
    #[error("there is no database at {}", .0.display())]
    Missing(PathBuf),
    /// The database cannot be read or the copy cannot be written.
    #[error("cannot copy the database")]
    Sql(#[from] rusqlite::Error),
    /// The copy cannot be put in place.
    #[error("cannot write the backup")]
    Io(#[from] io::Error),
    /// What was copied is damaged, and so is most likely the original.
    #[error("the copy is damaged: {0}")]
    Damaged(String),
}

/// Copies the state of the last commit into `target`, checked and durable, or leaves nothing there.
///
/// Works while another process writes. The copy carries a mark, table `vedetta_backup`, which tells the
/// program that first starts on it that time has passed since: see [`crate::Db::restored`].
pub fn backup(database: &Path, target: &Path) -> Result<(), BackupError> {
    if target.exists() {
        return Err(BackupError::Exists(target.to_owned()));
    }
    if !database.exists() {
        return Err(BackupError::Missing(database.to_owned()));
    }
    // A name that nobody else has: what lies there is not ours to remove.
    let mut draft = target.as_os_str().to_owned();
    draft.push(format!(".{}-{:016x}.partial", std::process::id(), fastrand::u64(..)));
    let draft = PathBuf::from(draft);
    // SQLite takes an empty file as it is, so the copy is as private as the original.
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft)?;
    let written = write_draft(database, &draft).and_then(|()| {
        File::open(&draft)?.sync_all()?;
        // Not a rename: a file that appeared meanwhile must not be replaced.
        fs::hard_link(&draft, target).map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => BackupError::Exists(target.to_owned()),
            _ => e.into(),
        })?;
        Ok(sync_folder(parent(target))?)
    });
    let _ = fs::remove_file(&draft);
    written
}

fn write_draft(database: &Path, draft: &Path) -> Result<(), BackupError> {
    let source = Connection::open_with_flags(database, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    source.busy_timeout(std::time::Duration::from_secs(5))?;
    let name = draft.to_str().ok_or_else(|| BackupError::Unspeakable(draft.to_owned()))?;
    source.execute("VACUUM INTO ?1", [name])?;
    let copy = Connection::open_with_flags(draft, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    copy.execute_batch(
        "CREATE TABLE IF NOT EXISTS vedetta_backup (taken_at TEXT NOT NULL) STRICT;
         DELETE FROM vedetta_backup;
         INSERT INTO vedetta_backup VALUES (datetime('now'));",
    )?;
    drop(copy);
    match crate::damage(draft)?.into_iter().next() {
        None => Ok(()),
        Some(first) => Err(BackupError::Damaged(first)),
    }
}
