use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use vedetta::core::explain;
use vedetta::db::rusqlite::{self, ErrorCode};
use vedetta::{db, kv};

/// Copy the database to a file, also while a server runs on it
///
/// The copy has everything that was committed when it was taken, and every row of it is checked. To restore it, copy it to
/// `vedetta.db` in an empty folder and start `vedetta up --data` on that folder.
#[derive(Debug, Args)]
pub(crate) struct Backup {
    /// The copy; it must not exist yet
    file: PathBuf,
    /// The data folder
    #[arg(long, value_name = "DIR", env = "VEDETTA_DATA", default_value = "vedetta-data")]
    data: PathBuf,
}

impl Backup {
    pub(crate) fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        let database = self.data.join("vedetta.db");
        if !database.exists() {
            let at = database.display();
            anyhow::bail!("no backup was made: there is no database at {at}: check --data");
        }
        db::backup(&database, &self.file).context("no backup was made")?;
        if let Err(error) = rows(&self.file) {
            std::fs::remove_file(&self.file)
                .with_context(|| format!("{} is damaged: remove it", self.file.display()))?;
            return Err(error.context("no backup was made"));
        }
        Ok(writeln!(out, "{} is a backup of {}", self.file.display(), database.display())?)
    }
}

/// Checks every row of the copy, as `vedetta doctor` does.
fn rows(file: &Path) -> anyhow::Result<()> {
    // Nobody writes to it, and it has no log.
    kv::check(&db::inspect(file, crate::up::SCHEMAS, false)?)?;
    Ok(())
}

/// What is wrong with a database; if it is damaged, also what to do.
pub(crate) fn advised(error: &anyhow::Error) -> String {
    if error.chain().any(is_damage) { with_advice(error) } else { explain(error.as_ref()) }
}

/// The same where it is known to be damaged.
pub(crate) fn with_advice(error: &anyhow::Error) -> String {
    let error = explain(error.as_ref());
    format!(
        "{error}; to start on a backup: mkdir -m 700 NEW && cp BACKUP NEW/vedetta.db && vedetta up --data NEW \
         (and copy access.db, if people sign in)"
    )
}

fn is_damage(cause: &(dyn std::error::Error + 'static)) -> bool {
    use kv::OpenError::{Damaged, Gap, Miscounted};
    let code = cause.downcast_ref().and_then(rusqlite::Error::sqlite_error_code);
    matches!(code, Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase))
        || matches!(cause.downcast_ref(), Some(db::OpenError::DamagedLog { .. }))
        || matches!(cause.downcast_ref(), Some(Damaged(_) | Gap(_) | Miscounted))
}
