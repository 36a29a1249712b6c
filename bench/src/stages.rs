//! Runs of a stage, on SQLite and on PostgreSQL, and jobs of graphile-worker on the same PostgreSQL.
//!
//! Prediction: on PostgreSQL the server's work decides, as both sides claim and remove in batches: for each
//! record an update and a deletion. Ours also reads the entity, but runs it for a microsecond where
//! JavaScript needs twenty. On SQLite no other process is asked, so several times as many. A run that
//! updates costs a second claim and settling, that of the system stage, and a save: a third of the rate.
//! An update reaches its stage through the system stage: five round trips to PostgreSQL after the commit,
//! three commits on SQLite. A backlog that is not due is not looked at; only the trees are deeper. One that is due
//! stands behind, in the order of its times: nor is that.

mod ours;

use std::process::{Child, Command};

use clap::ValueEnum;
use testing::postgres::Server;
use tokio_util::sync::CancellationToken;
use vedetta_core::KeyRange;
use vedetta_etcd::Endpoint;
use vedetta_kv::{KeyValue, Range};

use self::ours::What;
use crate::npm::Package;
use crate::setup;
use crate::turns::{Rounds, figures, in_a_fresh_database, of, ratio};

pub(crate) use self::ours::{Args as Ours, run as ours};

pub(crate) const ROWS: &str = "\
Runs per second, from the start of a process's workers until a queue that was filled before is empty:
  untouched  the stage changes nothing; of graphile-worker: a job that does nothing
  updating   each run saves its entity, and the system stage asks about it once more

Milliseconds until the work starts, when nothing else is to do, p50 and p99; from the call, and from its return:
  update   a change of an entity, through the system stage, to the only stage that wants it
  enqueue  a record put directly into the stage's queue; of graphile-worker: a job added

Backlog: untouched runs per second, alone, beside a million records that are not due, and before a million that are
due, too; of as many entities each time.

Processes: runs of 5 ms each per second, 16 at once in a process, by 1, 2 and 4 processes that share 16 shards.

One PostgreSQL for all, on the disk and flushed at each commit; each measurement in a process and a database of
its own, by turns. Each figure is the median of the rounds, a ratio the median of the ratios of the rounds.";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to measure; all of it unless said.
    what: Vec<Scenario>,
    /// Measurements of each, taken in turns; the median counts.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Records or jobs that are due.
    #[arg(long, default_value_t = 100_000)]
    count: u64,
    /// Samples of a latency.
    #[arg(long, default_value_t = 500)]
    samples: u64,
    /// Records that are not, and again as many that are due behind the others, for the backlog.
    #[arg(long, default_value_t = 1_000_000)]
    waiting: u64,
    /// Fail when a target is missed, and say which.
    #[arg(long)]
    check: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Scenario {
    /// Runs per second.
    Runs,
    /// From a change to the start.
    Latency,
    /// With a million records that are not due, or due later than the others.
    Backlog,
    /// Shared by several processes.
    Processes,
}

/// How many times graphile-worker's jobs our untouched runs must be, on each database.
const RUNS_ON_POSTGRES: f64 = 1.0;
const RUNS_ON_SQLITE: f64 = 2.0;
/// And the p99 from the call that updates to the start, of that from the call that adds a job, at most.
/// It is shown from the return, too; but a job may begin before its caller has the answer.
const LATENCY: f64 = 1.0;

/// How many times the runs of one process two and four must have, so that more of them are of use. And four must have more
/// than two.
const GROWTH: f64 = 1.5;

/// As many as graphile-worker's page on performance has.
const PARALLEL: u32 = 24;

/// PostgreSQL's own default: tests have less.
const SETTINGS: [&str; 1] = ["shared_buffers=128MB"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Sqlite,
    Postgres,
    Graphile,
}

/// What is in the queue.
#[derive(Debug, Clone, Copy)]
struct Load {
    /// Records that count, or samples.
    count: u64,
    /// Records that are not due.
    waiting: u64,
    /// Records that are due after those that count.
    behind: u64,
    /// Entities that have none.
    spare: u64,
}

impl Load {
    fn of(count: u64) -> Self {
        Self { count, waiting: 0, behind: 0, spare: 0 }
    }
}

struct Bench {
    server: Server,
    graphile: Package,
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let is_chosen = |scenario| args.what.is_empty() || args.what.contains(&scenario);
    anyhow::ensure!(
        !args.check
            || args.what.is_empty()
            || args.what.iter().any(|what| *what != Scenario::Backlog),
        "--check looks at runs, latency and processes, and none of them is measured"
    );
    let target = setup::target()?;
    let graphile = Package::graphile_worker(&target)?;
    let server = Server::start_on(&target, &SETTINGS).await;
    let bench = Bench { server, graphile };
    let mut missed = Vec::new();
    for &scenario in Scenario::value_variants() {
        if is_chosen(scenario) {
            match scenario {
                Scenario::Runs => bench.runs(&args, &mut missed).await?,
                Scenario::Latency => bench.latency(&args, &mut missed).await?,
                Scenario::Backlog => bench.backlog(&args).await?,
                Scenario::Processes => bench.processes(&args, &mut missed).await?,
            }
            println!();
        }
    }
    anyhow::ensure!(!args.check || missed.is_empty(), "Missed:\n  {}", missed.join("\n  "));
    Ok(())
}

impl Bench {
    async fn runs(&self, args: &Args, missed: &mut Vec<String>) -> anyhow::Result<()> {
        let rows = [
            ("graphile-worker", Side::Graphile, What::Untouched, None),
            ("PostgreSQL, untouched", Side::Postgres, What::Untouched, Some(RUNS_ON_POSTGRES)),
            ("PostgreSQL, updating", Side::Postgres, What::Updating, None),
            ("SQLite, untouched", Side::Sqlite, What::Untouched, Some(RUNS_ON_SQLITE)),
            ("SQLite, updating", Side::Sqlite, What::Updating, None),
        ];
        let each = rows.map(|(_, side, what, _)| (side, what, Load::of(args.count)));
        let rounds = self.by_turns(args.rounds, &each).await?;
        println!("{:<24} {:>10} {:>8}", format!("{} records", args.count), "runs/s", "ratio");
        for (row, (name, _, _, least)) in rows.iter().enumerate() {
            let (rate, ratio) = (of(&rounds, row, 0), ratio(&rounds, (row, 0), (0, 0)));
            println!("{name:<24} {rate:>10.0} {ratio:>8.2}");
            if let Some(least) = least.filter(|least| ratio < *least) {
                missed.push(format!("{name}: {ratio:.2} times graphile-worker, not {least}"));
            }
        }
        Ok(())
    }

    async fn latency(&self, args: &Args, missed: &mut Vec<String>) -> anyhow::Result<()> {
        let rows = [
            ("graphile-worker, add", Side::Graphile, What::Enqueue, false),
            ("PostgreSQL, update", Side::Postgres, What::Update, true),
            ("PostgreSQL, enqueue", Side::Postgres, What::Enqueue, true),
            ("SQLite, update", Side::Sqlite, What::Update, true),
            ("SQLite, enqueue", Side::Sqlite, What::Enqueue, true),
        ];
        let each = rows.map(|(_, side, what, _)| (side, what, Load::of(args.samples)));
        let rounds = self.by_turns(args.rounds, &each).await?;
        println!("{:<24} {:^25}   {:^25}", "ms to the start", "from the call", "from its return");
        println!(
            "{:<24} {:>8} {:>8} {:>7}   {:>8} {:>8} {:>7}",
            "", "p50", "p99", "ratio", "p50", "p99", "ratio"
        );
        for (row, (name, _, _, checked)) in rows.iter().enumerate() {
            let figure = |column| of(&rounds, row, column);
            let ratios = [1, 3].map(|column| ratio(&rounds, (row, column), (0, column)));
            println!(
                "{name:<24} {:>8.2} {:>8.2} {:>7.2}   {:>8.2} {:>8.2} {:>7.2}",
                figure(0),
                figure(1),
                ratios[0],
                figure(2),
                figure(3),
                ratios[1],
            );
            if *checked && ratios[0] > LATENCY {
                missed.push(format!("{name}, p99: {:.2} times graphile-worker's", ratios[0]));
            }
        }
        Ok(())
    }

    async fn backlog(&self, args: &Args) -> anyhow::Result<()> {
        let alone = Load::of(args.count);
        let loads = [
            Load { spare: args.waiting, ..alone },
            Load { waiting: args.waiting, ..alone },
            Load { behind: args.waiting, ..alone },
        ];
        let sides = [("PostgreSQL", Side::Postgres), ("SQLite", Side::Sqlite)];
        let each = sides.map(|(_, side)| loads.map(|load| (side, What::Untouched, load)));
        let rounds = self.by_turns(args.rounds, each.as_flattened()).await?;
        println!(
            "{:<24} {:>10} {:>10} {:>8} {:>10} {:>8}",
            "untouched runs/s", "alone", "not due", "ratio", "due", "ratio"
        );
        for (side, (name, _)) in sides.iter().enumerate() {
            let row = side * loads.len();
            let [alone, waiting, behind] = [0, 1, 2].map(|load| of(&rounds, row + load, 0));
            let [beside, before] = [1, 2].map(|load| ratio(&rounds, (row + load, 0), (row, 0)));
            println!(
                "{name:<24} {alone:>10.0} {waiting:>10.0} {beside:>8.2} {behind:>10.0} {before:>8.2}"
            );
        }
        Ok(())
    }

    async fn processes(&self, args: &Args, missed: &mut Vec<String>) -> anyhow::Result<()> {
        let counts = [1, 2, 4];
        let mut rounds = Vec::with_capacity(args.rounds);
        for _ in 0..args.rounds {
            let mut round = Vec::with_capacity(counts.len());
            for processes in counts {
                round.push(vec![self.share(processes, args.count / 5).await?]);
            }
            rounds.push(round);
        }
        println!("{:<24} {:>10} {:>8}", "processes", "runs/s", "ratio");
        for (row, processes) in counts.iter().enumerate() {
            let (rate, ratio) = (of(&rounds, row, 0), ratio(&rounds, (row, 0), (0, 0)));
            println!("{processes:<24} {rate:>10.0} {ratio:>8.2}");
            if *processes > 1 && ratio < GROWTH {
                missed.push(format!("{processes} processes: {ratio:.2} times one, not {GROWTH}"));
            }
        }
        let more = ratio(&rounds, (2, 0), (1, 0));
        if more <= 1.0 {
            missed.push(format!("4 processes: {more:.2} times two, not more than 1"));
        }
        Ok(())
    }

    /// Runs per second of so many processes.
    async fn share(&self, processes: u32, count: u64) -> anyhow::Result<f64> {
        let url = self.server.database().await;
        ours::make_things(&url).await?;
        let folder = setup::folder()?;
        let store = setup::open(folder.path()).await?;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let registry = format!("etcd://{}", listener.local_addr()?);
        let (endpoint, stop) = (Endpoint::new(store.clone()), CancellationToken::new());
        let serving = tokio::spawn(vedetta_etcd::serve(listener, endpoint, stop.clone()));
        let mut children = Children(Vec::new());
        for process in 0..processes {
            let mut ours = Command::new(std::env::current_exe()?);
            ours.args(["stages-ours", "shared", "--count", "0", "--parallel", "16"]);
            ours.args(["--url", &url, "--registry", &registry, "--name", &process.to_string()]);
            children.0.push(ours.spawn()?);
        }
        let owned = async || {
            let shards = store.range(Range::new(KeyRange::prefix("/things/shards/"))).await?;
            let mut owners: Vec<_> = shards.keys.iter().map(KeyValue::value).collect();
            let count = owners.len();
            owners.sort_unstable();
            owners.dedup();
            // It begins when each has its share.
            Ok(if owners.len() == processes as usize { count } else { 0 })
        };
        let rate = ours::shared(&url, count, owned).await?;
        drop(children);
        stop.cancel();
        serving.await?;
        store.close().await;
        Ok(rate)
    }

    /// The figures of each round, of each measurement.
    async fn by_turns(&self, rounds: usize, each: &[(Side, What, Load)]) -> anyhow::Result<Rounds> {
        let mut all = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            let mut round = Vec::with_capacity(each.len());
            for (side, what, load) in each {
                round.push(self.measure(*side, *what, *load).await?);
            }
            all.push(round);
        }
        Ok(all)
    }

    async fn measure(&self, side: Side, what: What, load: Load) -> anyhow::Result<Vec<f64>> {
        let Load { count, waiting, behind, spare } = load;
        let mut ours = Command::new(std::env::current_exe()?);
        let name = what.to_possible_value().expect("none is skipped");
        ours.args(["stages-ours", name.get_name(), "--parallel", &PARALLEL.to_string()]);
        ours.args(["--count", &count.to_string(), "--waiting", &waiting.to_string()]);
        ours.args(["--behind", &behind.to_string(), "--spare", &spare.to_string()]);
        if side == Side::Sqlite {
            let folder = setup::folder()?;
            return figures(ours.arg("--folder").arg(folder.path()));
        }
        let graphile = |what, url: &str| self.graphile.measure(what, url, &[count.to_string()]);
        in_a_fresh_database(&self.server, |url| match (side, what) {
            (Side::Graphile, What::Untouched) => graphile("runs", url),
            (Side::Graphile, _) => graphile("latency", url),
            _ => figures(ours.args(["--url", url])),
        })
        .await
    }
}

/// Ended with what needs them.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
