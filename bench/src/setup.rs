//! A store in a folder of its own, and a process of its own.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;
use vedetta_db::Db;
use vedetta_kv::{Keep, Options, SCHEMA, Store};

/// Where the data goes: on a real disk, beside the build, not in a memory file system.
pub(crate) fn folder() -> anyhow::Result<TempDir> {
    Ok(tempfile::Builder::new().prefix("bench-").tempdir_in(target()?)?)
}

/// The folder beside the build.
pub(crate) fn target() -> anyhow::Result<PathBuf> {
    let base = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target");
    std::fs::create_dir_all(&base)?;
    Ok(base.canonicalize()?)
}

/// The store's file.
pub(crate) fn file(folder: &Path) -> PathBuf {
    folder.join("vedetta.db")
}

pub(crate) async fn open(folder: &Path) -> anyhow::Result<Store> {
    let options = vedetta_db::Options::new(file(folder));
    let keep = Keep { revisions: None, age: None };
    let db = Db::open(&options, &[SCHEMA])?;
    Ok(Store::open(db, Options { keep, ..Options::default() }).await?)
}

/// Runs this program with other arguments and waits for it: memory that earlier measurements left to the
/// allocator would be in the figures of the later ones.
pub(crate) fn in_a_fresh_process<S: AsRef<OsStr>>(
    args: impl IntoIterator<Item = S>,
) -> anyhow::Result<()> {
    let status = Command::new(std::env::current_exe()?).args(args).status()?;
    anyhow::ensure!(status.success(), "a measurement in a process of its own failed: {status}");
    Ok(())
}

/// The same, with what it prints.
pub(crate) fn told_by_a_fresh_process<S: AsRef<OsStr>>(
    args: impl IntoIterator<Item = S>,
) -> anyhow::Result<String> {
    let mut command = Command::new(std::env::current_exe()?);
    let told = command.args(args).stderr(Stdio::inherit()).output()?;
    let status = told.status;
    anyhow::ensure!(status.success(), "a measurement in a process of its own failed: {status}");
    Ok(String::from_utf8(told.stdout)?)
}
