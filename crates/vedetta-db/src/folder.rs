//! The folder a running Vedetta owns: private to its user, held by one process at a time.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use crate::space::is_full;

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
    /// Creates the folder if it is missing (readable by its owner only) and takes it for this process. On a full disk,
    /// too, if it is there.
    pub fn open(path: &Path) -> Result<Self, FolderError> {
        let unusable = |source| FolderError::Unusable { path: path.to_owned(), source };
        make(path, sync_folder).map_err(unusable)?;
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
        match note_pid(&mut lock) {
            // It only helps to tell who has the folder, and then that is not known.
            Err(full) if is_full(&full) => drop(lock.set_len(0)),
            noted => noted.map_err(unusable)?,
        }
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

/// Over what is there, which needs no more room.
fn note_pid(lock: &mut File) -> io::Result<()> {
    let pid = std::process::id().to_string();
    lock.rewind()?;
    lock.write_all(pid.as_bytes())?;
    lock.set_len(pid.len() as u64)
}

fn read_pid(lock: &mut File) -> String {
    let mut pid = String::new();
    let _ = lock.read_to_string(&mut pid);
    if pid.is_empty() { "(unknown)".into() } else { pid.trim().to_owned() }
}

/// Makes a folder if it is missing, and those above it. `sync` is to make the entries of a folder durable.
fn make(path: &Path, mut sync: impl FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
    let is_missing = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
    let missing: Vec<&Path> = path.ancestors().take_while(is_missing).collect();
    DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    missing.into_iter().rev().try_for_each(|made| match sync(parent(made)) {
        // One that may be written to and not read: then it is as durable as the system makes it.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        synced => synced,
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_is_made_is_synced_into_the_one_above_and_so_are_those_on_the_way() {
        let here = tempfile::tempdir().unwrap();
        let here = here.path();
        let synced = |path: &str| {
            let mut synced = Vec::new();
            make(&here.join(path), |folder| {
                assert!(folder.is_dir());
                synced.push(folder.strip_prefix(here).unwrap().to_owned());
                sync_folder(folder)
            })
            .unwrap();
            assert!(here.join(path).is_dir());
            synced
        };
        assert_eq!(synced("a/b/c"), ["", "a", "a/b"].map(PathBuf::from));
        assert_eq!(synced("a/b/c"), [""; 0].map(PathBuf::from), "nothing was made");
        assert_eq!(synced("a/d"), ["a"].map(PathBuf::from));
    }

    #[test]
    fn on_a_full_disk_a_folder_is_taken_though_it_cannot_be_noted_by_whom() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/full", folder.path().join("lock")).unwrap();
        assert!(DataFolder::open(folder.path()).is_ok());
    }

    #[test]
    fn a_shorter_number_of_a_process_replaces_a_longer_one() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("lock"), "99999999999999").unwrap();
        let held = DataFolder::open(folder.path()).unwrap();
        let holder = DataFolder::holder(folder.path()).unwrap();
        assert_eq!(holder, Some(std::process::id().to_string()));
        drop(held);
    }
}
