//! Our side, in a process of its own: any backend, through the worker that everybody has.

use std::convert::Infallible;
use std::fs::File;
use std::io::Write as _;
use std::num::NonZeroU32;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::ValueEnum;
use vedetta_db::Db;
use vedetta_db::postgres::Postgres;
use vedetta_jobs::jetstream::{JetStream, Options};
use vedetta_jobs::postgres::{self, PostgresJobs};
use vedetta_jobs::sqlite::{self, SqliteJobs};
use vedetta_jobs::{DEFAULT_QUEUE, Jobs, NewJob, When, Worker, Working};

use super::measure::{Begun, Measured, Nothing, WARM_UP, What, measure, pause, quantiles, told};
use super::nats;
use crate::setup;

const KIND: &str = "nothing";

/// How many jobs run at once: as many as graphile-worker's page on performance has.
const PARALLEL: NonZeroU32 = NonZeroU32::new(24).expect("more than none");

pub(super) const STREAM: &str = "NOTHING";
pub(super) const DURABLE: &str = "workers";
/// Messages pulled at once, by ours and by the bare client.
pub(super) const PULLED: usize = 1_000;
/// Messages that may be delivered and not acknowledged: more than a worker holds ahead and settles meanwhile, so that the
/// server does not wait for it.
const PENDING: NonZeroU32 = NonZeroU32::new(16_384).expect("more than none");

#[derive(clap::Args)]
pub(crate) struct Args {
    on: On,
    /// What to measure, where, and how many of each.
    told: Vec<String>,
}

/// What it is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum On {
    Postgres,
    Sqlite,
    Jetstream,
    /// The bare client of NATS, which acknowledges.
    Nats,
    /// The same, and the server confirms it.
    NatsConfirmed,
    /// No queue at all: what a flush takes.
    Disk,
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let told = told(args.told.into_iter());
    let (what, place, counts) = told.context("tell what to measure, where, and how many")?;
    match args.on {
        On::Postgres => measure(Ours::on_postgres(&place, what).await?, what, counts).await,
        On::Sqlite => measure(Ours::on_sqlite(Path::new(&place)).await?, what, counts).await,
        On::Jetstream => measure(Ours::on_jetstream(&place).await?, what, counts).await,
        On::Nats => nats::bare(&place, counts.jobs, false).await,
        On::NatsConfirmed => nats::bare(&place, counts.jobs, true).await,
        On::Disk => flushes(Path::new(&place), counts.jobs),
    }
}

#[derive(Clone)]
pub(super) struct Ours {
    jobs: Arc<dyn Jobs>,
    /// Through which jobs are added.
    adder: Arc<dyn Jobs>,
    postgres: Option<Postgres>,
}

impl Ours {
    async fn on_postgres(url: &str, what: What) -> anyhow::Result<Self> {
        let db = Postgres::open(url, &[postgres::SCHEMA]).await?;
        let mut ours = Self::of(PostgresJobs::new(db.clone()), Some(db));
        // Who adds is another process as a rule: the worker hears of it by NOTIFY, as those of the others do.
        if what == What::Latency {
            let db = Postgres::open(url, &[postgres::SCHEMA]).await?;
            ours.adder = Arc::new(PostgresJobs::new(db));
        }
        Ok(ours)
    }

    fn of(jobs: impl Jobs, postgres: Option<Postgres>) -> Self {
        let jobs: Arc<dyn Jobs> = Arc::new(jobs);
        Self { adder: Arc::clone(&jobs), jobs, postgres }
    }

    async fn on_sqlite(folder: &Path) -> anyhow::Result<Self> {
        let mut options = vedetta_db::Options::new(setup::file(folder));
        options.ballast = 0;
        let db = Db::open(&options, &[sqlite::SCHEMA])?;
        Ok(Self::of(SqliteJobs::open(db).await?, None))
    }

    pub(super) async fn on_jetstream(url: &str) -> anyhow::Result<Self> {
        let mut options = Options::new(STREAM, "nothing", DURABLE, PENDING);
        options.fetch_batch = u32::try_from(PULLED)?.try_into()?;
        Ok(Self::of(JetStream::open(url, options, None).await?, None))
    }
}

impl Measured for Ours {
    type Working = Working;

    async fn add(&self, ids: Range<u64>, later: Option<Duration>) -> anyhow::Result<()> {
        let when = later.map_or(When::Now, When::After);
        let job = |id| NewJob::new(KIND).when(when).payload(&Nothing { id });
        let jobs = ids.map(job).collect::<Result<Vec<_>, _>>()?;
        self.adder.enqueue(&jobs).await?;
        Ok(())
    }

    async fn settle_down(&self) -> anyhow::Result<()> {
        if let Some(db) = &self.postgres {
            let client = db.client().await?;
            client.batch_execute("VACUUM ANALYZE").await?;
            client.batch_execute("CHECKPOINT").await?;
        }
        Ok(())
    }

    async fn start(&self, begun: Arc<Begun>) -> anyhow::Result<Working> {
        let worker = Worker::new(DEFAULT_QUEUE).capacity(PARALLEL);
        let worker = worker.handler(KIND, move |_, nothing: Nothing| {
            begun.job(nothing.id);
            async { Ok::<_, Infallible>(()) }
        });
        Ok(worker.start(Arc::clone(&self.jobs))?)
    }

    async fn are_over(&self, working: &Working, jobs: u64) -> anyhow::Result<bool> {
        Ok(working.status().flow.done >= jobs)
    }
}

/// Prints what it takes to write a page to the end of a file and flush it, in milliseconds: p50, p99.
fn flushes(folder: &Path, samples: u64) -> anyhow::Result<()> {
    let mut file = File::create(folder.join("log"))?;
    let mut times = Vec::new();
    for sample in 0..samples + WARM_UP {
        std::thread::sleep(pause());
        let called = Instant::now();
        file.write_all(&[1; 4096])?;
        file.sync_data()?;
        if sample >= WARM_UP {
            times.push(called.elapsed());
        }
    }
    quantiles(times).iter().for_each(|figure| println!("{figure}"));
    Ok(())
}
