//! Jobs on PostgreSQL and on SQLite, and those of graphile-worker, pg-boss and apalis on the same PostgreSQL.
//!
//! Prediction: on PostgreSQL the server's work decides, as all take and settle in batches. graphile-worker
//! updates a row and deletes it; pg-boss updates it twice; ours updates it, deletes it and writes what is kept
//! of it to another table, which is more, but has fewer indexes to keep and nothing to do in JavaScript for
//! each. apalis updates twice, too, and asks for one batch after the other. On SQLite no other process is
//! asked: several times as many. Jobs that are added one by one by many callers wait for the disk together
//! with ours, and alone with the others. An idle start is a commit and two round trips with each of them; on
//! SQLite two commits. On JetStream each job is acknowledged by itself and confirmed by the server, which costs
//! a message more than the bare client's, and the job itself a microsecond. What waits behind or is for later is not looked at: only the trees are deeper.

mod apalis;
mod measure;
mod nats;
mod ours;

use std::process::Command;

use clap::ValueEnum;
use testing::postgres::Server;

use self::apalis::Apalis;
use self::measure::{Counts, What};
use self::ours::On;
use crate::npm::Package;
use crate::turns::{Rounds, figures, flush, in_a_fresh_database, of, of_each, ratio};
use crate::{setup, turns};

pub(crate) use self::ours::{Args as Ours, run as work};

pub(crate) const ROWS: &str = "\
Runs: jobs per second that do nothing, from the start of one process's workers until a queue that was filled
before is empty. Ours, pg-boss and apalis keep what is done; graphile-worker deletes it.

Enqueue: jobs per second that are taken on:
  single  a job a call, 20 callers at once
  bulk    a thousand jobs a call, one caller

Latency: milliseconds until a job starts when nothing else is to do, p50 and p99; from the call that adds it, and
from its return. Beside it what the disk needs to flush one page.

Backlog: jobs per second that do nothing, as many as in runs, while a million
  behind  more are ready, and wait behind them
  later   are for tomorrow
  single  the same, and jobs taken on, a job a call, 20 callers at once
  bulk    and a thousand jobs a call, one caller
And the latency while they are for tomorrow.

Jetstream: jobs per second that do nothing on NATS JetStream, and messages per second that its bare client pulls
from the same stream and acknowledges, without and with the server's confirmation, which ours waits for. Four times
as many as in runs.

One PostgreSQL for all, on the disk and flushed at each commit; each measurement in a process and a database of
its own, by turns. Each figure is the median of the rounds, a ratio that to the best of the others: the median of
the ratios of the rounds.";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to measure; all of it unless said.
    what: Vec<Scenario>,
    /// Measurements of each, taken in turns; the median counts.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Jobs that are run, or taken on in bulk; of single ones a fifth.
    #[arg(long, default_value_t = 100_000)]
    count: u64,
    /// Samples of a latency.
    #[arg(long, default_value_t = 500)]
    samples: u64,
    /// Jobs that wait, for the backlog.
    #[arg(long, default_value_t = 1_000_000)]
    waiting: u64,
    /// Fail when a target is missed, and say which.
    #[arg(long)]
    check: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Scenario {
    /// Jobs that do nothing.
    Runs,
    /// Jobs taken on.
    Enqueue,
    /// From the call to the start.
    Latency,
    /// All of that with a million jobs that wait.
    Backlog,
    /// Ours on NATS JetStream, against its bare client.
    Jetstream,
}

/// How many times the best of the others our jobs on PostgreSQL must be, in runs, whatever else waits.
const RUNS_ON_POSTGRES: f64 = 1.5;
/// And our own on PostgreSQL those on SQLite.
const RUNS_ON_SQLITE: f64 = 3.0;
/// How many times the best of the others all other rates must be, and the p50 and the p99 from the call to the
/// start at most.
const AHEAD: f64 = 1.0;
/// Milliseconds from the call to the start on SQLite, p99, flushing included.
const START_ON_SQLITE: f64 = 5.0;

/// How many times as many a stream has: else it would be over within half a second, of which the start is a part.
const IN_A_STREAM: u64 = 4;
/// How many times the bare client's messages our jobs on JetStream must be.
const RUNS_ON_JETSTREAM: f64 = 0.8;

/// PostgreSQL's own default: tests have less.
const SETTINGS: [&str; 1] = ["shared_buffers=128MB"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Queue {
    Graphile,
    Boss,
    Apalis,
    Ours(On),
}

/// The others first.
const QUEUES: [(Queue, &str); 5] = [
    (Queue::Graphile, "graphile-worker"),
    (Queue::Boss, "pg-boss"),
    (Queue::Apalis, "apalis"),
    (Queue::Ours(On::Postgres), "ours, PostgreSQL"),
    (Queue::Ours(On::Sqlite), "ours, SQLite"),
];
const OTHERS: usize = 3;
/// Of those on JetStream, the bare client that has its messages confirmed.
const CONFIRMED: usize = 1;
const POSTGRES: usize = 3;
const SQLITE: usize = 4;

/// A column of a table of rates.
struct Rate {
    name: &'static str,
    what: What,
    counts: Counts,
    /// How many times the best of the others ours on PostgreSQL must be.
    least: f64,
}

struct Bench {
    server: Server,
    graphile: Package,
    boss: Package,
    apalis: Apalis,
    missed: Vec<String>,
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let target = setup::target()?;
    let graphile = Package::graphile_worker(&target)?;
    let boss = Package::pg_boss(&target)?;
    let apalis = Apalis::build(&target)?;
    let server = Server::start_on(&target, &SETTINGS).await;
    let mut bench = Bench { server, graphile, boss, apalis, missed: Vec::new() };
    for &scenario in Scenario::value_variants() {
        if args.what.is_empty() || args.what.contains(&scenario) {
            match scenario {
                Scenario::Runs => bench.runs(&args).await?,
                Scenario::Enqueue => bench.enqueue(&args).await?,
                Scenario::Latency => bench.latency(&args).await?,
                Scenario::Backlog => bench.backlog(&args).await?,
                Scenario::Jetstream => bench.jetstream(&args).await?,
            }
            println!();
        }
    }
    let missed = bench.missed;
    anyhow::ensure!(!args.check || missed.is_empty(), "Missed:\n  {}", missed.join("\n  "));
    Ok(())
}

impl Bench {
    async fn runs(&mut self, args: &Args) -> anyhow::Result<()> {
        let counts = Counts { jobs: args.count, ..Counts::default() };
        let runs = Rate { name: "runs", what: What::Runs, counts, least: RUNS_ON_POSTGRES };
        let rounds = self.rates(args, &[runs]).await?;
        let sqlite = ratio(&rounds, (SQLITE, 0), (POSTGRES, 0));
        println!("{:<20} {sqlite:>10.2} times PostgreSQL", "SQLite");
        self.expect("runs, SQLite to PostgreSQL", sqlite, RUNS_ON_SQLITE);
        Ok(())
    }

    async fn enqueue(&mut self, args: &Args) -> anyhow::Result<()> {
        let rate = |name, what, jobs| {
            let counts = Counts { jobs, ..Counts::default() };
            Rate { name, what, counts, least: AHEAD }
        };
        let single = rate("single", What::Single, args.count / 5);
        let bulk = rate("bulk", What::Bulk, args.count);
        self.rates(args, &[single, bulk]).await?;
        Ok(())
    }

    async fn backlog(&mut self, args: &Args) -> anyhow::Result<()> {
        let rate = |name, what, counts, least| Rate { name, what, counts, least };
        let (jobs, waiting) = (args.count, args.waiting);
        let behind = Counts { jobs, behind: waiting, later: 0 };
        let later = |jobs| Counts { jobs, behind: 0, later: waiting };
        let columns = [
            rate("behind", What::Runs, behind, RUNS_ON_POSTGRES),
            rate("later", What::Runs, later(jobs), RUNS_ON_POSTGRES),
            rate("single", What::Single, later(jobs / 5), AHEAD),
            rate("bulk", What::Bulk, later(jobs), AHEAD),
        ];
        self.rates(args, &columns).await?;
        println!();
        self.starts(args, "start while many are for later", later(args.samples)).await
    }

    /// Jobs per second, of each queue a row.
    async fn rates(&mut self, args: &Args, columns: &[Rate]) -> anyhow::Result<Rounds> {
        let mut rounds = Rounds::new();
        for _ in 0..args.rounds {
            let mut round = Vec::with_capacity(QUEUES.len());
            for (queue, _) in QUEUES {
                let mut figures = Vec::with_capacity(columns.len());
                for column in columns {
                    figures.extend(self.measure(queue, column.what, column.counts).await?);
                }
                round.push(figures);
            }
            rounds.push(round);
        }
        print!("{:<20}", "jobs/s");
        columns.iter().for_each(|column| print!(" {:>10} {:>6}", column.name, "ratio"));
        println!();
        for (row, (_, name)) in QUEUES.iter().enumerate() {
            print!("{name:<20}");
            for (column, rate) in columns.iter().enumerate() {
                let best = |round: &[Vec<f64>]| {
                    round[..OTHERS].iter().map(|figures| figures[column]).fold(0.0, f64::max)
                };
                let ratio = of_each(&rounds, |round| round[row][column] / best(round));
                print!(" {:>10.0} {ratio:>6.2}", of(&rounds, row, column));
                match row {
                    POSTGRES => self.expect(&format!("{}, {name}", rate.name), ratio, rate.least),
                    SQLITE => self.expect(&format!("{}, {name}", rate.name), ratio, AHEAD),
                    _ => {}
                }
            }
            println!();
        }
        Ok(rounds)
    }

    fn expect(&mut self, what: &str, ratio: f64, least: f64) {
        if ratio < least {
            self.missed.push(format!("{what}: {ratio:.2}, not {least:.2}"));
        }
    }

    async fn latency(&mut self, args: &Args) -> anyhow::Result<()> {
        let samples = Counts { jobs: args.samples, ..Counts::default() };
        self.starts(args, "start", samples).await
    }

    /// Milliseconds to the start, of each queue a row.
    async fn starts(&mut self, args: &Args, what: &str, samples: Counts) -> anyhow::Result<()> {
        let mut rounds = Rounds::new();
        for _ in 0..args.rounds {
            let mut round = Vec::with_capacity(QUEUES.len() + 1);
            for (queue, _) in QUEUES {
                round.push(self.measure(queue, What::Latency, samples).await?);
            }
            round.push(self.measure(Queue::Ours(On::Disk), What::Latency, samples).await?);
            rounds.push(round);
        }
        println!("{:<20} {:^33}   {:^33}", "ms to the start", "from the call", "from its return");
        let head = format!(" {:>8} {:>7} {:>8} {:>7}", "p50", "ratio", "p99", "ratio");
        println!("{:<20}{head}   {head}", "");
        for (row, (_, name)) in QUEUES.iter().enumerate() {
            let best = |round: &[Vec<f64>], column: usize| {
                round[..OTHERS].iter().map(|figures| figures[column]).fold(f64::INFINITY, f64::min)
            };
            let figures = [0, 1, 2, 3].map(|column| {
                let to_the_best = |round: &[Vec<f64>]| round[row][column] / best(round, column);
                (of(&rounds, row, column), of_each(&rounds, to_the_best))
            });
            print!("{name:<20}");
            for (column, (figure, ratio)) in figures.iter().enumerate() {
                let gap = if column == 2 { "   " } else { "" };
                print!("{gap} {figure:>8.2} {ratio:>7.2}");
            }
            println!();
            if row < OTHERS {
                continue;
            }
            for (share, (_, ratio)) in ["p50", "p99"].iter().zip(figures) {
                if ratio > AHEAD {
                    self.missed
                        .push(format!("{what}, {name}, {share}: {ratio:.2} times the best's"));
                }
            }
            let p99 = figures[1].0;
            if row == SQLITE && p99 > START_ON_SQLITE {
                self.missed
                    .push(format!("{what}, {name}, p99: {p99:.2} ms, not {START_ON_SQLITE}"));
            }
        }
        let flush = |column| of(&rounds, QUEUES.len(), column);
        println!("{:<20} {:>8.2} {:>7} {:>8.2}", "a flush of the disk", flush(0), "", flush(1));
        Ok(())
    }

    async fn jetstream(&mut self, args: &Args) -> anyhow::Result<()> {
        let rows = [
            (On::Nats, "bare client"),
            (On::NatsConfirmed, "  confirmed"),
            (On::Jetstream, "ours"),
        ];
        let counts = Counts { jobs: args.count * IN_A_STREAM, ..Counts::default() };
        let mut rounds = Rounds::new();
        for _ in 0..args.rounds {
            let mut round = Vec::with_capacity(rows.len());
            for (on, _) in rows {
                let server = testing::nats::Server::start().await;
                round.push(ours(on, What::Runs, &server.url(), counts)?);
            }
            rounds.push(round);
        }
        println!("{:<20} {:>10} {:>6}", "JetStream", "jobs/s", "ratio");
        for (row, (on, name)) in rows.iter().enumerate() {
            let ratio = ratio(&rounds, (row, 0), (0, 0));
            println!("{name:<20} {:>10.0} {ratio:>6.2}", of(&rounds, row, 0));
            if *on == On::Jetstream {
                let confirmed = turns::ratio(&rounds, (row, 0), (CONFIRMED, 0));
                println!("{:<20} {:>10} {confirmed:>6.2} times the confirmed", "", "");
                self.expect("JetStream", ratio, RUNS_ON_JETSTREAM);
            }
        }
        Ok(())
    }

    /// In a process of its own, and a database.
    async fn measure(&self, queue: Queue, what: What, counts: Counts) -> anyhow::Result<Vec<f64>> {
        if let Queue::Ours(on @ (On::Sqlite | On::Disk)) = queue {
            let folder = setup::folder()?;
            let place = folder.path().to_str().expect("a folder whose name is text");
            let measured = ours(on, what, place, counts)?;
            folder.close()?;
            flush()?;
            return Ok(measured);
        }
        in_a_fresh_database(&self.server, |url| match queue {
            Queue::Graphile => self.graphile.measure(what.name(), url, &counts.arguments()),
            Queue::Boss => self.boss.measure(what.name(), url, &counts.arguments()),
            Queue::Apalis => self.apalis.measure(what, url, counts),
            Queue::Ours(on) => ours(on, what, url, counts),
        })
        .await
    }
}

/// Our side, in a process of its own.
fn ours(on: On, what: What, place: &str, counts: Counts) -> anyhow::Result<Vec<f64>> {
    let on = on.to_possible_value().expect("none is skipped");
    let mut ours = Command::new(std::env::current_exe()?);
    ours.args(["jobs-ours", on.get_name(), what.name(), place]);
    figures(ours.args(counts.arguments()))
}
