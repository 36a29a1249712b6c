//! The folder a running Vedetta owns: private to its user, held by one process at a time.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// A data folder, locked for this process until dropped.
#[derive(Debug)]
pub struct DataFolder {
    path: PathBuf,
    _lock: File,
}

/// Why a data folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FolderError {
    /// Stop that process first, or use another folder.
    #[error("{} is in use by the process {pid}; stop it or choose another folder with --data", path.display())]
    Held {
        /// The folder.
        path: PathBuf,
        /// Who holds it, as far as its lock file says.
        pid: String,
    },
    /// Check that the path is a folder this user may write.
    #[error("cannot use {} as the data folder", path.display())]
    Unusable {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

impl DataFolder {
    /// Creates the folder if it is missing (readable by its owner only) and takes it for this process.
    pub fn open(path: &Path) -> Result<Self, FolderError> {
        let unusable = |source| FolderError::Unusable { path: path.to_owned(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(unusable)?;
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path.join("lock"))
            .map_err(unusable)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(FolderError::Held { path: path.to_owned(), pid: read_pid(&mut lock) });
            }
            Err(TryLockError::Error(e)) => return Err(unusable(e)),
        }
        let note_pid = |lock: &mut File| {
            lock.set_len(0)?;
            lock.rewind()?;
            write!(lock, "{}", std::process::id())
        };
        note_pid(&mut lock).map_err(unusable)?;
        Ok(Self { path: path.to_owned(), _lock: lock })
    }

    /// The process that has the folder at `path`, as far as its lock file says; `None` when nobody has
    /// it. Changes nothing.
    pub fn holder(path: &Path) -> io::Result<Option<String>> {
        let mut lock = match File::open(path.join("lock")) {
            Ok(lock) => lock,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        match lock.try_lock_shared() {
            Ok(()) => Ok(None),
            Err(TryLockError::WouldBlock) => Ok(Some(read_pid(&mut lock))),
            Err(TryLockError::Error(e)) => Err(e),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The database file in it.
    pub fn database(&self) -> PathBuf {
        self.path.join("vedetta.db")
    }
}

fn read_pid(lock: &mut File) -> String {
    let mut pid = String::new();
    let _ = lock.read_to_string(&mut pid);
    if pid.is_empty() { "(unknown)".into() } else { pid.trim().to_owned() }
}

/// Makes the entries of `folder` durable.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    fs::File::open(folder)?.sync_all()
}

/// The folder a file lies in.
pub(crate) fn parent(file: &Path) -> &Path {
    match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}
