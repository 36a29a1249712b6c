//! A store in a folder of its own.

use std::path::{Path, PathBuf};

use tempfile::TempDir;
use vedetta_db::Db;
use vedetta_kv::{Keep, Options, SCHEMA, Store};

/// Where the data goes: on a real disk, beside the build, not in a memory file system.
pub(crate) fn folder() -> anyhow::Result<TempDir> {
    let base = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target");
    std::fs::create_dir_all(&base)?;
    Ok(tempfile::Builder::new().prefix("bench-").tempdir_in(base)?)
}

pub(crate) async fn open(folder: &Path) -> anyhow::Result<Store> {
    let mut options = vedetta_db::Options::new(folder.join("vedetta.db"));
    options.ballast = 0;
    let keep = Keep { revisions: None, age: None };
    let db = Db::open(&options, &[SCHEMA])?;
    Ok(Store::open(db, Options { keep, ..Options::default() }).await?)
}
