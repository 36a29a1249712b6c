//! Where a store is tortured: which folder, opened how.

use std::error::Error;
use std::path::Path;
use std::time::Duration;
use std::{env, fmt};

use tempfile::TempDir;
use vedetta_db::{Db, Schema, Torture};
use vedetta_kv::{Keep, Store};

/// The database file in a folder.
pub const FILE: &str = "vedetta.db";

/// The number in an environment variable, or a default.
///
/// # Panics
///
/// If it is set to something else than a number.
pub fn number(name: &str, default: u64) -> u64 {
    match env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text}")),
        Err(_) => default,
    }
}

/// The seed of this run: `TORTURE_SEED`, or always the same.
pub fn seed() -> u64 {
    number("TORTURE_SEED", 0x5eed)
}

/// A folder in memory where there is one: these tests sync a lot and look at what was synced, but not
/// on the real disk.
///
/// # Panics
///
/// If no folder can be made.
pub fn memory_folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.or_else(|_| tempfile::tempdir()).expect("a temporary folder can be made")
}

/// Why a store did not open.
#[derive(Debug)]
pub enum OpenError {
    /// The database did not.
    Db(vedetta_db::OpenError),
    /// The store in it did not.
    Kv(vedetta_kv::OpenError),
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error: &(dyn Error + 'static) = match self {
            Self::Db(error) => error,
            Self::Kv(error) => error,
        };
        f.write_str(&explain(error))
    }
}

pub use vedetta_core::explain;

/// How to open a store.
#[derive(Debug, Clone, Default)]
pub struct How {
    /// Bytes kept in reserve.
    pub ballast: u64,
    /// How old history may become; otherwise all is kept.
    pub keep: Option<Duration>,
    /// Faults to plant.
    pub torture: Torture,
}

impl How {
    /// Through a disk of [`crate::vfs`], with frequent checkpoints.
    pub fn on(disk: &crate::vfs::Disk) -> Self {
        let torture = Torture {
            vfs: Some(disk.name().to_owned()),
            checkpoint_step: Some(12),
            look_again: Some(Duration::from_millis(1)),
            ..Torture::default()
        };
        Self { torture, ..Self::default() }
    }

    /// Opens the store in `folder`.
    ///
    /// # Panics
    ///
    /// If opening does, which is a bug.
    pub async fn open(&self, folder: &Path) -> Result<Store, OpenError> {
        let (store, _) = self.open_with(&[vedetta_kv::SCHEMA], folder).await?;
        Ok(store)
    }

    /// Opens the store in `folder` with tables beside it. Closing the store closes the database.
    ///
    /// # Panics
    ///
    /// If opening does, which is a bug.
    pub async fn open_with(
        &self,
        schemas: &'static [Schema],
        folder: &Path,
    ) -> Result<(Store, Db), OpenError> {
        let mut options =
            vedetta_db::Options::new(folder.join(FILE)).with_torture(self.torture.clone());
        options.ballast = self.ballast;
        options.readers = 2;
        let keep = Keep { revisions: None, age: self.keep };
        let opened = tokio::task::spawn_blocking(move || {
            let db = Db::open(&options, schemas).map_err(OpenError::Db)?;
            let options = vedetta_kv::Options { keep, ..vedetta_kv::Options::default() };
            match Store::open_blocking(db.clone(), options) {
                Ok(store) => Ok((store, db)),
                Err(error) => {
                    db.close_blocking();
                    Err(OpenError::Kv(error))
                }
            }
        });
        opened.await.expect("opening does not panic")
    }
}
