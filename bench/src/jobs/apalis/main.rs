//! apalis with its PostgreSQL backend, set up as its example `basic.rs` and its page of `Config` advise: large
//! batches, no second claim of what was claimed (`lock_tasks`), `parallelize`, and `LISTEN` for a quick start.
//! It keeps what is done.

#![expect(dead_code, reason = "others need it")]

mod figures;
mod measure;

use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use apalis::prelude::*;
use apalis_postgres::{Config, PgPool, PostgresStorage};
use futures_util::stream;
use sqlx::postgres::PgPoolOptions;

use measure::{Begun, Measured, Nothing};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const QUEUE: &str = "nothing";
const WORKER: &str = "bench";
const BATCH: usize = 1_000;
const CONNECTIONS: u32 = 25;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let told = measure::told(std::env::args().skip(1));
    let (what, url, counts) = told.context("tell what to measure, where, and how many")?;
    let pool = PgPoolOptions::new().max_connections(CONNECTIONS).connect(&url).await?;
    PostgresStorage::setup(&pool).await?;
    measure::measure(Apalis(pool), what, counts).await?;
    // Its worker does not end with the runtime, but breaks down.
    std::process::exit(0)
}

#[derive(Clone)]
struct Apalis(PgPool);

impl Apalis {
    fn storage(&self) -> PostgresStorage<Nothing> {
        let config = Config::default().queue(QUEUE).batch_size(BATCH).lock_tasks(false);
        PostgresStorage::new(&self.0).with_config(config)
    }
}

async fn work(nothing: Nothing, begun: Data<Arc<Begun>>) -> Result<(), BoxDynError> {
    begun.job(nothing.id);
    Ok(())
}

impl Measured for Apalis {
    type Working = JoinHandle<()>;

    async fn add(&self, ids: Range<u64>, later: Option<Duration>) -> anyhow::Result<()> {
        let mut storage = self.storage();
        let is_one = ids.end - ids.start == 1;
        let mut jobs = ids.map(|id| Nothing { id });
        match later {
            Some(delay) => {
                let later = jobs.map(|job| TaskBuilder::new(job).run_after(delay).build());
                storage.push_all(stream::iter(later)).await?;
            }
            None if is_one => storage.push(jobs.next().expect("there is one")).await?,
            None => storage.push_bulk(jobs.collect()).await?,
        }
        Ok(())
    }

    async fn settle_down(&self) -> anyhow::Result<()> {
        sqlx::query("VACUUM ANALYZE").execute(&self.0).await?;
        sqlx::query("CHECKPOINT").execute(&self.0).await?;
        Ok(())
    }

    async fn start(&self, begun: Arc<Begun>) -> anyhow::Result<JoinHandle<()>> {
        let worker = WorkerBuilder::new(WORKER)
            .backend(self.storage().with_pubsub())
            .data(begun)
            .parallelize(tokio::spawn)
            .build(work);
        // As in its examples it is not a task: what spawns jobs for it cannot be sent.
        let runtime = tokio::runtime::Handle::current();
        Ok(std::thread::spawn(move || runtime.block_on(worker.run()).expect("its worker runs")))
    }

    async fn are_over(&self, _: &JoinHandle<()>, jobs: u64) -> anyhow::Result<bool> {
        let sql = "SELECT count(*) FROM apalis.jobs WHERE lock_by = $1 AND done_at IS NOT NULL";
        let over: i64 = sqlx::query_scalar(sql).bind(WORKER).fetch_one(&self.0).await?;
        Ok(over.unsigned_abs() >= jobs)
    }
}
