//! Jobs under load while workers, servers and connections fail: none is lost, and none runs again without
//! a reason.
//!
//! ```text
//!  driver ──enqueue, cancel──► link ──► server: killed, started again
//!    │                     cut ▲
//!    │ kill, freeze            │ take, keep, settle
//!    └──────► worker processes ┘ ──► a log each: taken, begun, ended, settled
//!
//!  asked for + logs + faults + what the server keeps ──► check ──► violations
//! ```
//!
//! The workers are [`vedetta_jobs::Worker`]s in processes of their own, on PostgreSQL, on NATS JetStream, or
//! over HTTP on a server of the embedded queue. What becomes of a stream's jobs they tell the driver, who keeps the
//! records: like a ledger's, each must have ended, once and as its kind does.

mod check;
mod child;
mod desk;
mod driver;
mod log;
mod records;
mod world;

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;

pub use child::{ServerProcess, WorkerProcess};

/// What keeps the jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// The embedded file, served over HTTP.
    Sqlite,
    /// A PostgreSQL.
    Postgres,
    /// A NATS server with `JetStream`.
    Nats,
}

impl Backend {
    fn name(self) -> &'static str {
        match self {
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
            Self::Nats => "nats",
        }
    }
}

/// What is done wrong on purpose, to see that it is noticed: with one job of fifty, or every effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Lie {
    /// A worker says that a job is done, and has not begun it.
    Skip,
    /// A worker does a job twice.
    Twice,
    /// The backend acknowledges an end and does not store it.
    Forget,
    /// The backend acknowledges a job and does not store it.
    Lose,
    /// A handler commits its effect and fails, and has another when it is tried again.
    Careless,
}

impl Lie {
    fn name(self) -> &'static str {
        match self {
            Self::Skip => "skip",
            Self::Twice => "twice",
            Self::Forget => "forget",
            Self::Lose => "lose",
            Self::Careless => "careless",
        }
    }

    fn is_about(number: u64) -> bool {
        number % 50 == 7
    }
}

/// What a job does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Instant,
    Short,
    FailsOnce,
    FailsAlways,
    SnoozesOnce,
    /// One waits at a time of those with its key.
    Keyed,
    /// The driver calls it off, at some moment.
    CalledOff,
    /// It has an effect in the database, in the transaction that settles it.
    Effect,
}

impl Kind {
    const ALL: [Self; 8] = [
        Self::Instant,
        Self::Short,
        Self::FailsOnce,
        Self::FailsAlways,
        Self::SnoozesOnce,
        Self::Keyed,
        Self::CalledOff,
        Self::Effect,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Instant => "instant",
            Self::Short => "short",
            Self::FailsOnce => "fails-once",
            Self::FailsAlways => "fails-always",
            Self::SnoozesOnce => "snoozes-once",
            Self::Keyed => "keyed",
            Self::CalledOff => "called-off",
            Self::Effect => "effect",
        }
    }

    /// How often it may begin.
    fn max_attempts(self) -> u32 {
        // The others must not die of faults, however many there are.
        if self == Self::FailsAlways { 3 } else { 1000 }
    }
}

/// Slots of a worker, unless said otherwise.
pub const SLOTS: NonZeroU32 = NonZeroU32::new(16).expect("not zero");

/// What is to happen.
#[derive(Debug, Clone)]
pub struct Setup {
    /// What keeps the jobs.
    pub on: Backend,
    /// So many at least are acknowledged.
    pub jobs: u64,
    /// In a second, at most; more are asked for until there was a fault of each kind.
    pub per_second: u64,
    /// About so long passes between two faults; nothing said: there are none.
    pub between_faults: Option<Duration>,
    /// Worker processes.
    pub workers: usize,
    /// Slots of each; as many messages are pulled from a stream at once, up to 256.
    pub slots: NonZeroU32,
    /// How long a job is a worker's without a sign of life of it.
    pub lease: Duration,
    /// Decides about jobs and faults.
    pub seed: u64,
    /// The program of this package, which is each of the processes.
    pub program: PathBuf,
    /// What is done wrong on purpose.
    pub lie: Option<Lie>,
}

/// Torture a queue of jobs: worker and server processes are killed, frozen and cut off under load.
#[derive(Debug, clap::Args)]
pub struct Command {
    /// What keeps the jobs.
    #[arg(long)]
    on: Backend,
    /// How many, at least.
    #[arg(long, default_value_t = 100_000)]
    jobs: u64,
    /// How long passes between two faults, about.
    #[arg(long, default_value_t = 1.0)]
    seconds_between_faults: f64,
    /// Slots of each of the four workers; as many messages are pulled from a stream at once, up to 256.
    #[arg(long, default_value_t = SLOTS)]
    slots: NonZeroU32,
    /// Decides about jobs and faults.
    #[arg(long, default_value_t = 0x5eed)]
    seed: u64,
    /// Something to do wrong on purpose, which must be noticed.
    #[arg(long)]
    lie: Option<Lie>,
}

impl Command {
    /// Runs it, prints the figures, and says whether all was well.
    pub async fn run(self) -> anyhow::Result<bool> {
        let setup = Setup {
            on: self.on,
            jobs: self.jobs,
            per_second: u64::MAX,
            between_faults: Some(Duration::try_from_secs_f64(self.seconds_between_faults)?),
            workers: 4,
            slots: self.slots,
            lease: Duration::from_secs(3),
            seed: self.seed,
            program: std::env::current_exe()?,
            lie: self.lie,
        };
        let report = run(&setup).await;
        println!("{report}");
        Ok(report.violations.is_empty())
    }
}

/// What happened.
#[derive(Debug, Default)]
pub struct Report {
    /// How long all of it took.
    pub took: Duration,
    /// Counts, by what is counted.
    pub figures: BTreeMap<&'static str, u64>,
    /// How often something befell them, by what.
    pub faults: BTreeMap<&'static str, u64>,
    /// How often a job began again, by why.
    pub repeats: BTreeMap<&'static str, u64>,
    /// What cannot be.
    pub violations: Vec<String>,
}

/// The first few of them tell enough.
const SHOWN: usize = 20;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |counts: &BTreeMap<&'static str, u64>| {
            let counts: Vec<String> =
                counts.iter().map(|(what, count)| format!("{count} {what}")).collect();
            counts.join(", ")
        };
        writeln!(f, "in {:.1} s: {}", self.took.as_secs_f64(), list(&self.figures))?;
        writeln!(f, "faults: {}", list(&self.faults))?;
        writeln!(f, "begun again: {}", list(&self.repeats))?;
        write!(f, "violations: {}", self.violations.len())?;
        self.violations.iter().take(SHOWN).try_for_each(|violation| write!(f, "\n  {violation}"))
    }
}

/// Makes it happen, and checks what is left when all is quiet again.
///
/// # Panics
///
/// If the processes that it needs cannot be had.
pub async fn run(setup: &Setup) -> Report {
    driver::run(setup).await
}
