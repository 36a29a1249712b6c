//! Where the jobs wait: in the data folder unless a URL is given. The worker is the same.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use vedetta::db::{DataFolder, Db};
use vedetta::jobs::jetstream::{self, JetStream};
use vedetta::jobs::remote::RemoteJobs;
use vedetta::jobs::sqlite::{SCHEMA, SqliteJobs};
use vedetta::jobs::{Enqueued, Jobs, LEASE, LONGEST_KEY, NewJob, Worker};

use crate::job::{Asked, KIND, worker};
use crate::media::Tools;

/// What the queue is called.
const NAME: &str = "transcode";

/// Which queue.
#[derive(Debug, Clone, Args)]
pub struct Place {
    /// The folder of the embedded queue; one process at a time has it
    #[arg(long, global = true, default_value = "transcode-data")]
    pub data: PathBuf,
    /// A queue elsewhere: http://… of a running `vedetta up`, or nats://… of a JetStream
    #[arg(long, global = true, env = "TRANSCODE_QUEUE")]
    pub queue: Option<String>,
    /// The stream of a JetStream; made if there is none
    #[arg(long, global = true, default_value = "MEDIA")]
    pub stream: String,
    /// The subject of the events in it: each is {"file": …}
    #[arg(long, global = true, default_value = "media.files")]
    pub subject: String,
    /// The consumer that all workers of it share; made if there is none
    #[arg(long, global = true, default_value = "transcode-worker")]
    pub durable: String,
    /// How many jobs all workers of the consumer can hold together [default: the slots of this one]
    #[arg(long, global = true)]
    pub max_ack_pending: Option<NonZeroU32>,
    /// A worker that is not heard of for so long loses its jobs [default: 30s, on a JetStream 5m]
    #[arg(long, global = true, value_parser = humantime::parse_duration)]
    pub lease: Option<Duration>,
}

/// An open queue.
pub struct Queue {
    jobs: Arc<dyn Jobs>,
    lease: Duration,
    heartbeat: Duration,
    kept: Kept,
}

/// Where it is kept, to be closed.
enum Kept {
    Here(Db, DataFolder),
    Server,
    Stream(Arc<JetStream>),
}

impl Queue {
    /// Opens it.
    pub async fn open(place: &Place) -> anyhow::Result<Self> {
        let lease = place.lease.unwrap_or(LEASE);
        let heartbeat = lease / 3;
        match place.queue.as_deref() {
            None => {
                let folder = DataFolder::open(&place.data)?;
                let db = Db::open(&vedetta::db::Options::new(folder.database()), &[SCHEMA])?;
                let jobs = Arc::new(SqliteJobs::open(db.clone()).await?);
                Ok(Self { jobs, lease, heartbeat, kept: Kept::Here(db, folder) })
            }
            Some(url) if url.starts_with("http://") => {
                let jobs = Arc::new(RemoteJobs::new(url, None)?);
                Ok(Self { jobs, lease, heartbeat, kept: Kept::Server })
            }
            Some(url) if url.starts_with("nats://") => {
                let options = place.stream_options();
                let (lease, heartbeat) = (options.ack_wait, options.heartbeat);
                let jobs = Arc::new(JetStream::open(url, options, None).await?);
                Ok(Self {
                    jobs: Arc::clone(&jobs) as _,
                    lease,
                    heartbeat,
                    kept: Kept::Stream(jobs),
                })
            }
            Some(_) => anyhow::bail!("--queue is neither an http:// nor a nats:// URL"),
        }
    }

    /// A worker of it, in so many slots or in as many as the machine has.
    pub fn worker(&self, tools: Tools, capacity: Option<NonZeroU32>) -> Worker {
        worker(NAME, tools, capacity).lease(self.lease).heartbeat(self.heartbeat)
    }

    /// For a worker.
    pub fn jobs(&self) -> Arc<dyn Jobs> {
        Arc::clone(&self.jobs)
    }

    /// Asks for a file to be made into what it can. The same that waits already is asked for once; but for a
    /// stream, where the second finds all of it there.
    pub async fn add(&self, asked: &Asked) -> anyhow::Result<Enqueued> {
        let mut job = NewJob::new(KIND).queue(NAME).payload(asked)?;
        let key = job.payload.get().to_owned();
        if key.len() <= LONGEST_KEY && !matches!(self.kept, Kept::Stream(_)) {
            job.unique_key = Some(key);
        }
        let added = self.jobs.enqueue(&[job]).await?;
        added.into_iter().next().context("it was not taken on")
    }

    /// To be called at the end.
    pub async fn close(self) -> anyhow::Result<()> {
        drop(self.jobs);
        match self.kept {
            Kept::Here(db, folder) => {
                tokio::task::spawn_blocking(move || db.close_blocking()).await?;
                drop(folder);
            }
            Kept::Server => {}
            Kept::Stream(jobs) => jobs.close().await,
        }
        Ok(())
    }
}

impl Place {
    fn stream_options(&self) -> jetstream::Options {
        let most = self.max_ack_pending.unwrap_or_else(Worker::width);
        let usual = jetstream::Options::new(&self.stream, &self.subject, &self.durable, most);
        let mut options =
            jetstream::Options { queue: NAME.into(), default_kind: Some(KIND.into()), ..usual };
        if let Some(lease) = self.lease {
            (options.ack_wait, options.heartbeat) = (lease, lease / 3);
        }
        options
    }
}
