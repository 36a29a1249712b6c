//! Our side, in a process of its own: one kind of entity and one stage, on either database.

use std::convert::Infallible;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use tokio::sync::mpsc;
use vedetta_db::postgres::tokio_postgres::types::ToSql;
use vedetta_db::postgres::{GenericClient, Postgres, Transaction, tokio_postgres};
use vedetta_db::rusqlite::{self, Connection, OptionalExtension as _, params};
use vedetta_db::{Db, Purpose, Schema, Stop};
use vedetta_etcd::Cluster;
use vedetta_stage::{
    Backend, BoxError, Entities, Entity, Limits, Processing, Processor, Records, Shards, Stage,
    Version, Visit, postgres, sqlite,
};

use crate::figures::{millis, quantile, rate};
use crate::setup;

const NAME: &str = "thing";
const STAGE: &str = "stage";
/// Records enqueued at once when the queue is filled.
const BATCH: usize = 10_000;
/// Samples before those that count, which find connections and statements still to be made.
const WARM_UP: u64 = 50;
/// When what waits in the backlog is due.
const LATER: Duration = Duration::from_secs(24 * 3600);

#[derive(clap::Args)]
pub(crate) struct Args {
    what: What,
    /// A database on a PostgreSQL; else SQLite in this folder.
    #[arg(long)]
    url: Option<String>,
    #[arg(long, default_value = ".")]
    folder: PathBuf,
    /// Runs, or samples.
    #[arg(long)]
    count: u64,
    /// Records that wait and are not due.
    #[arg(long, default_value_t = 0)]
    waiting: u64,
    /// Records that are due after those that count.
    #[arg(long, default_value_t = 0)]
    behind: u64,
    /// Entities without a record.
    #[arg(long, default_value_t = 0)]
    spare: u64,
    /// How many run at once.
    #[arg(long, default_value = "24")]
    parallel: NonZeroU32,
    /// The store through which processes share the shards.
    #[arg(long)]
    registry: Option<String>,
    /// Which process this is.
    #[arg(long, default_value = "one")]
    name: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum What {
    /// Runs that change nothing.
    Untouched,
    /// Runs that each save the entity, which takes it through the system stage once more.
    Updating,
    /// From an update to the start.
    Update,
    /// From an enqueue to the start.
    Enqueue,
    /// Runs that take their time, in one of several processes, until it is ended.
    Shared,
}

/// Shards that processes share, and how long a run takes then.
const SHARDS: u16 = 16;
const TAKES: Duration = Duration::from_millis(5);

/// One of several processes that share the shards.
async fn share(args: &Args) -> anyhow::Result<()> {
    let (Some(url), Some(registry)) = (&args.url, &args.registry) else {
        anyhow::bail!("shared work needs a PostgreSQL and a registry");
    };
    let db = Postgres::open(url, &[postgres::SCHEMA]).await?;
    let things = Entities::new(postgres::Records::new(db), NAME, Things).await?.sharded(SHARDS);
    let ttl = Duration::from_secs(30);
    let registry: Cluster = registry.parse()?;
    let shards = Shards::join(registry, "/things/", &args.name, SHARDS, ttl)?;
    let work = Work { updates: false, parallel: args.parallel, tell: None, takes: TAKES };
    let _working = Processor::new(things).shards(&shards).stage(work).start().await?;
    std::future::pending().await
}

/// What processes share the work on: so many things in a database, each with a record that is due. When
/// all shards are owned it begins, and tells how many a second are done.
pub(super) async fn shared(
    url: &str,
    count: u64,
    owned: impl AsyncFn() -> anyhow::Result<usize>,
) -> anyhow::Result<f64> {
    let db = Postgres::open(url, &[postgres::SCHEMA]).await?;
    while owned().await? < usize::from(SHARDS) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let records = postgres::Records::new(db.clone());
    let lane = records.lane(NAME, STAGE).await?;
    let make =
        format!("INSERT INTO thing SELECT n, 1, false FROM generate_series(0, {count} - 1) n");
    db.client().await?.batch_execute(&make).await?;
    let ids: Vec<String> = (0..count).map(|id| id.to_string()).collect();
    let began = Instant::now();
    for ids in ids.chunks(BATCH) {
        let shards = (0..SHARDS).cycle();
        let visits: Vec<_> = ids
            .iter()
            .zip(shards)
            .map(|(id, shard)| (id.as_str(), shard, Duration::ZERO))
            .collect();
        records.enqueue(lane, &visits).await?;
    }
    while records.counts().await?.iter().any(|lane| lane.records > 0) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(rate(count, began.elapsed()))
}

/// The table of the things, before any process looks for it.
pub(super) async fn make_things(url: &str) -> anyhow::Result<()> {
    let db = Postgres::open(url, &[postgres::SCHEMA]).await?;
    let make = "CREATE TABLE thing (
                    id bigint PRIMARY KEY, version bigint NOT NULL, visited boolean NOT NULL)";
    Ok(db.client().await?.batch_execute(make).await?)
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    if args.what == What::Shared {
        return share(&args).await;
    }
    let things = args.count + args.waiting + args.behind + args.spare + WARM_UP;
    let things = things.cast_signed();
    let figures = match &args.url {
        Some(url) => {
            let db = Postgres::open(url, &[postgres::SCHEMA]).await?;
            let make = format!(
                "CREATE TABLE thing (
                     id bigint PRIMARY KEY, version bigint NOT NULL, visited boolean NOT NULL);
                 INSERT INTO thing SELECT n, 1, false FROM generate_series(0, {things} - 1) n"
            );
            db.client().await?.batch_execute(&make).await?;
            let things = Entities::new(postgres::Records::new(db), NAME, Things).await?;
            // Who changes them is another process as a rule: the stage hears of it by NOTIFY.
            let other = if matches!(args.what, What::Update | What::Enqueue) {
                let db = Postgres::open(url, &[postgres::SCHEMA]).await?;
                Entities::new(postgres::Records::new(db), NAME, Things).await?
            } else {
                things.clone()
            };
            measure(&args, things, other).await?
        }
        None => {
            let mut options = vedetta_db::Options::new(setup::file(&args.folder));
            options.ballast = 0;
            let db = Db::open(&options, &[sqlite::SCHEMA, THINGS])?;
            let fill = db.write(Purpose::Store, move |tx| {
                let mut insert = tx.prepare("INSERT INTO thing VALUES (?1, 1, 0)")?;
                for id in 0..things {
                    insert.execute([id])?;
                }
                Ok::<_, Stop<Infallible>>(())
            });
            fill.await?;
            let things = Entities::new(sqlite::Records::open(db).await?, NAME, Things).await?;
            measure(&args, things.clone(), things).await?
        }
    };
    figures.iter().for_each(|figure| println!("{figure}"));
    Ok(())
}

async fn measure<B: Database>(args: &Args, db: B, other: B) -> anyhow::Result<Vec<f64>> {
    match args.what {
        What::Untouched | What::Updating => Ok(vec![runs(args, db).await?]),
        _ => latency(args, db, other).await,
    }
}

/// Fills the queue, then works until what counts is done.
async fn runs<B: Database>(args: &Args, db: B) -> anyhow::Result<f64> {
    let records = db.records().clone();
    let lane = records.lane(NAME, STAGE).await?;
    let due = args.count + args.behind;
    for (range, delay) in [(0..due, Duration::ZERO), (due..due + args.waiting, LATER)] {
        let ids: Vec<String> = range.map(|id| id.to_string()).collect();
        for ids in ids.chunks(BATCH) {
            let visits: Vec<_> = ids.iter().map(|id| (id.as_str(), 0, delay)).collect();
            records.enqueue(lane, &visits).await?;
        }
    }
    db.settle_down().await?;

    let began = Instant::now();
    let (working, _starts) = start(args, db).await?;
    let sorted = if args.what == What::Updating { args.count } else { 0 };
    let done = loop {
        let [system, stage] = &working.status()[..] else { unreachable!("there is one stage") };
        if system.pull.flow.done >= sorted && stage.pull.flow.done >= args.count {
            break stage.pull.flow.done;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    };
    let took = began.elapsed();
    working.stop(Duration::ZERO).await;
    let left: u64 = records.counts().await?.iter().map(|lane| lane.records).sum();
    let rest = args.waiting..=args.waiting + args.behind;
    anyhow::ensure!(rest.contains(&left), "{left} records are left, and not {rest:?}");
    Ok(rate(done, took))
}

/// In milliseconds from a call, and from its return, to the start of what it brings about: p50, p99, p50, p99.
async fn latency<B: Database>(args: &Args, db: B, other: B) -> anyhow::Result<Vec<f64>> {
    let records = other.records().clone();
    let lane = records.lane(NAME, STAGE).await?;
    db.settle_down().await?;
    let (working, mut starts) = start(args, db).await?;
    let (mut from_call, mut from_return) = (Vec::new(), Vec::new());
    for id in 0..args.count + WARM_UP {
        tokio::time::sleep(Duration::from_micros(fastrand::u64(5_000..15_000))).await;
        let called = Instant::now();
        match args.what {
            What::Enqueue => {
                records.enqueue(lane, &[(&id.to_string(), 0, Duration::ZERO)]).await?;
            }
            _ => other.touch(id).await?,
        }
        let returned = Instant::now();
        let (started, at) = starts.recv().await.expect("the stage has the other end");
        anyhow::ensure!(started == id, "{started} ran instead of {id}");
        if id >= WARM_UP {
            from_call.push(at - called);
            from_return.push(at.saturating_duration_since(returned));
        }
    }
    working.stop(Duration::ZERO).await;
    let quantiles = [from_call, from_return]
        .map(|mut times| [0.5, 0.99].map(|share| millis(quantile(&mut times, share))));
    Ok(quantiles.concat())
}

async fn start<B: Database>(
    args: &Args,
    db: B,
) -> anyhow::Result<(Processing, mpsc::UnboundedReceiver<(u64, Instant)>)> {
    let (tell, starts) = mpsc::unbounded_channel();
    let tell = matches!(args.what, What::Update | What::Enqueue).then_some(tell);
    let updates = args.what == What::Updating;
    let work = Work { updates, parallel: args.parallel, tell, takes: Duration::ZERO };
    Ok((Processor::new(db).stage(work).start().await?, starts))
}

struct Work {
    updates: bool,
    parallel: NonZeroU32,
    /// What has started, and when.
    tell: Option<mpsc::UnboundedSender<(u64, Instant)>>,
    takes: Duration,
}

impl Stage<Thing> for Work {
    fn name(&self) -> &str {
        STAGE
    }

    fn should_process_now(&self, thing: &Thing) -> bool {
        !thing.visited
    }

    async fn process(&self, thing: Thing) -> Result<Visit<Thing>, BoxError> {
        if let Some(tell) = &self.tell {
            tell.send((thing.id, Instant::now()))?;
        }
        if !self.takes.is_zero() {
            tokio::time::sleep(self.takes).await;
        }
        if self.updates {
            return Ok(Visit::updated(Thing { visited: true, ..thing }));
        }
        Ok(Visit::untouched())
    }

    fn limits(&self) -> Limits {
        Limits { parallel: self.parallel, ..Limits::default() }
    }
}

#[derive(Debug, Clone)]
struct Thing {
    id: u64,
    version: Version,
    visited: bool,
}

impl Entity for Thing {
    type Id = u64;

    fn id(&self) -> u64 {
        self.id
    }

    fn version(&self) -> Version {
        self.version
    }

    fn set_version(&mut self, version: Version) {
        self.version = version;
    }
}

/// What a measurement needs of a database.
trait Database: Backend<Thing> {
    /// Does what a database would do by itself after so many writes, and then might do meanwhile.
    async fn settle_down(&self) -> anyhow::Result<()>;

    /// Saves a thing as it is.
    async fn touch(&self, id: u64) -> anyhow::Result<()>;
}

struct Things;

impl Database for Entities<Thing, postgres::Records, Things> {
    async fn settle_down(&self) -> anyhow::Result<()> {
        let client = self.records().db().client().await?;
        client.batch_execute("VACUUM ANALYZE").await?;
        Ok(client.batch_execute("CHECKPOINT").await?)
    }

    async fn touch(&self, id: u64) -> anyhow::Result<()> {
        anyhow::ensure!(self.update(&id, |_| ()).await?.is_some(), "there is no {id}");
        Ok(())
    }
}

impl postgres::Table<Thing> for Things {
    async fn load(
        &self,
        db: &impl GenericClient,
        ids: &[u64],
    ) -> Result<Vec<Thing>, tokio_postgres::Error> {
        let sql = "SELECT id, version, visited FROM thing WHERE id = ANY ($1)";
        let ids: Vec<i64> = ids.iter().map(|id| id.cast_signed()).collect();
        let rows = db.query(&db.prepare_cached(sql).await?, &[&ids]).await?;
        let thing = |row: &tokio_postgres::Row| Thing {
            id: row.get::<_, i64>(0).cast_unsigned(),
            version: Version(row.get(1)),
            visited: row.get(2),
        };
        Ok(rows.iter().map(thing).collect())
    }

    async fn save(
        &self,
        tx: &Transaction<'_>,
        thing: &Thing,
        read: Version,
    ) -> Result<bool, tokio_postgres::Error> {
        let sql = "UPDATE thing SET version = $3, visited = $4 WHERE id = $1 AND version = $2";
        let id = thing.id.cast_signed();
        let statement = tx.prepare_cached(sql).await?;
        let values: [&(dyn ToSql + Sync); 4] = [&id, &read.0, &thing.version.0, &thing.visited];
        Ok(tx.execute(&statement, &values).await? == 1)
    }

    async fn save_all(
        &self,
        tx: &Transaction<'_>,
        changed: &[(Thing, Version)],
    ) -> Result<Vec<bool>, tokio_postgres::Error> {
        let sql = "UPDATE thing SET version = u.version, visited = u.visited
                   FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::boolean[])
                        AS u (id, read, version, visited)
                   WHERE thing.id = u.id AND thing.version = u.read RETURNING thing.id";
        let column = |of: fn(&(Thing, Version)) -> i64| changed.iter().map(of).collect::<Vec<_>>();
        let ids = column(|(thing, _)| thing.id.cast_signed());
        let (read, versions) = (column(|(_, read)| read.0), column(|(thing, _)| thing.version.0));
        let visited: Vec<bool> = changed.iter().map(|(thing, _)| thing.visited).collect();
        let statement = tx.prepare_cached(sql).await?;
        let rows = tx.query(&statement, &[&ids, &read, &versions, &visited]).await?;
        let saved: std::collections::HashSet<i64> = rows.iter().map(|row| row.get(0)).collect();
        Ok(ids.iter().map(|id| saved.contains(id)).collect())
    }
}

const THINGS: Schema = Schema {
    component: "things",
    steps: &["CREATE TABLE thing (id INTEGER PRIMARY KEY, version INTEGER NOT NULL,
                                  visited INTEGER NOT NULL) STRICT"],
};

impl Database for Entities<Thing, sqlite::Records, Things> {
    async fn settle_down(&self) -> anyhow::Result<()> {
        Ok(())
    }

    async fn touch(&self, id: u64) -> anyhow::Result<()> {
        anyhow::ensure!(self.update(&id, |_| ()).await?.is_some(), "there is no {id}");
        Ok(())
    }
}

impl sqlite::Table<Thing> for Things {
    fn load(&self, db: &Connection, ids: &[u64]) -> rusqlite::Result<Vec<Thing>> {
        let mut find = db.prepare_cached("SELECT version, visited FROM thing WHERE id = ?1")?;
        let mut found = Vec::with_capacity(ids.len());
        for id in ids {
            let thing = find.query_row([id.cast_signed()], |row| {
                Ok(Thing { id: *id, version: Version(row.get(0)?), visited: row.get(1)? })
            });
            found.extend(thing.optional()?);
        }
        Ok(found)
    }

    fn save(&self, tx: &Connection, thing: &Thing, read: Version) -> rusqlite::Result<bool> {
        let sql = "UPDATE thing SET version = ?3, visited = ?4 WHERE id = ?1 AND version = ?2";
        let values = params![thing.id.cast_signed(), read.0, thing.version.0, thing.visited];
        Ok(tx.prepare_cached(sql)?.execute(values)? == 1)
    }
}
