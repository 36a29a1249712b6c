//! Where the jobs wait: in the data folder unless a URL is given. The worker is the same.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use vedetta::db::{DataFolder, Db, Options};
use vedetta::jobs::sqlite::{SCHEMA, SqliteJobs};
use vedetta::jobs::{Enqueued, Jobs, LONGEST_KEY, NewJob};

use crate::job::{Asked, KIND};

/// What the queue is called.
pub(crate) const NAME: &str = "transcode";

/// Which queue.
#[derive(Debug, Clone, Args)]
pub struct Place {
    /// The folder of the embedded queue; one process at a time has it
    #[arg(long, global = true, default_value = "transcode-data")]
    pub data: PathBuf,
}

/// An open queue.
pub struct Queue {
    jobs: Arc<dyn Jobs>,
    db: Db,
    _folder: DataFolder,
}

impl Queue {
    /// Opens it.
    pub async fn open(place: &Place) -> anyhow::Result<Self> {
        let folder = DataFolder::open(&place.data)?;
        let db = Db::open(&Options::new(folder.database()), &[SCHEMA])?;
        let jobs = Arc::new(SqliteJobs::open(db.clone()).await?);
        Ok(Self { jobs, db, _folder: folder })
    }

    /// For a worker.
    pub fn jobs(&self) -> Arc<dyn Jobs> {
        Arc::clone(&self.jobs)
    }

    /// What it is called.
    pub fn name(&self) -> &'static str {
        NAME
    }

    /// Asks for a file to be made into all that it can. The same that waits already is asked for once.
    pub async fn add(&self, asked: &Asked) -> anyhow::Result<Enqueued> {
        let mut job = NewJob::new(KIND).queue(NAME).payload(asked)?;
        let key = job.payload.get().to_owned();
        job.unique_key = (key.len() <= LONGEST_KEY).then_some(key);
        let added = self.jobs.enqueue(&[job]).await?;
        added.into_iter().next().context("it was not taken on")
    }

    /// To be called at the end.
    pub async fn close(self) -> anyhow::Result<()> {
        let Self { jobs, db, _folder } = self;
        drop(jobs);
        Ok(tokio::task::spawn_blocking(move || db.close_blocking()).await?)
    }
}
