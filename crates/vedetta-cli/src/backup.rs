use std::io::Write;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use vedetta::db;

/// Copy the database to a file, also while a server runs on it
///
/// The copy has everything that was committed when it was taken, and is checked. To restore it, copy it to
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
        db::backup(&database, &self.file).context("no backup was made")?;
        Ok(writeln!(out, "{} is a backup of {}", self.file.display(), database.display())?)
    }
}
