//! Ids under a watcher, from a change to its handler: ours against kube-rs's Controller.
//!
//! Both read the same changes from memory as fast as they take them, parse the same JSON, keep every id
//! and run at most 64 handlers at once, each on a task. Each runs in a process of its own.
//!
//! Prediction: a change costs us one hash lookup, the parsing and a link in the schedule, and a run a task;
//! kube's adds a hash map of ids per stage and a stream per step, so it is several times slower.

mod kube;
mod ours;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bytes::Bytes;
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::sync::Notify;

use crate::figures::{Cpu, median, millis, quantile};

pub(crate) const FIGURES: &str = "\
Figures:
  changes/s   all changes, until the last state of every id was handled
  µs          CPU of the whole process per change
  runs        handlers that ran: changes of an id that waits are one run
  p50, p99    from a change to its handler, at a pace both can keep
  B/id        resident memory per id";

/// Handlers at once.
const PARALLEL: NonZeroU32 = NonZeroU32::new(64).expect("not zero");
/// How many changes arrive together, at most.
const TOGETHER: u32 = 256;
/// What `--check` takes.
const FASTER: f64 = 3.0;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Ids.
    #[arg(long, default_value_t = 100_000)]
    ids: u32,
    /// Changes, spread evenly over the ids.
    #[arg(long, default_value_t = 1_000_000)]
    changes: u32,
    /// Changes per second while delays are measured.
    #[arg(long, default_value_t = 10_000)]
    pace: u32,
    /// How often both are measured, by turns.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Fail unless ours takes three times the changes of kube's in the same time.
    #[arg(long)]
    check: bool,
    /// Measure one, in this process.
    #[arg(long, hide = true)]
    only: Option<Who>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Who {
    Vedetta,
    Store,
    Kube,
}

/// The changes: round after round over all ids, each time in the same order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Script {
    ids: u32,
    changes: u32,
    /// Per second; without one as fast as they are taken.
    pace: Option<u32>,
}

impl Script {
    /// The id of a change, as a number.
    fn id(self, change: u32) -> u32 {
        // A prime spreads neighbours, as real changes come.
        u32::try_from(u64::from(change) * 7_919 % u64::from(self.ids)).unwrap_or(0)
    }

    fn key(self, change: u32) -> String {
        format!("/things/{}/spec", self.id(change))
    }

    fn value(change: u32) -> String {
        format!(r#"{{"change":{change},"node":"node-{}","size":{}}}"#, change % 97, change % 1013)
    }

    /// When a change is due, after the beginning.
    fn due(self, change: u32) -> Duration {
        self.pace.map_or(Duration::ZERO, |pace| Duration::from_secs(change.into()) / pace)
    }

    /// Waits until `change` is due: which changes come now.
    async fn next(self, began: Instant, change: u32) -> std::ops::Range<u32> {
        if change >= self.changes {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep_until((began + self.due(change)).into()).await;
        let mut end = change + 1;
        let passed = began.elapsed();
        while end < self.changes && end - change < TOGETHER && self.due(end) <= passed {
            end += 1;
        }
        change..end
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct Spec {
    change: u32,
    #[expect(dead_code, reason = "parsed as any field is")]
    node: String,
    #[expect(dead_code, reason = "parsed as any field is")]
    size: u32,
}

/// The changes as they lie in memory, made before anything is measured.
struct Tape(Vec<(Bytes, Bytes)>);

impl Tape {
    fn of(script: Script) -> Self {
        let changes = 0..script.changes;
        Self(changes.map(|n| (script.key(n).into(), Script::value(n).into())).collect())
    }

    fn key(&self, change: u32) -> &Bytes {
        &self.0[change as usize].0
    }

    fn value(&self, change: u32) -> &Bytes {
        &self.0[change as usize].1
    }
}

/// What the handlers saw.
pub(crate) struct Seen {
    script: Script,
    tape: Tape,
    began: Instant,
    runs: AtomicU64,
    /// Ids whose last state was handled.
    settled: AtomicU32,
    delays: Mutex<Vec<Duration>>,
    done: Notify,
}

impl Seen {
    fn new(script: Script) -> Arc<Self> {
        Arc::new(Self {
            script,
            tape: Tape::of(script),
            began: Instant::now(), // the last to be made
            runs: AtomicU64::new(0),
            settled: AtomicU32::new(0),
            delays: Mutex::default(),
            done: Notify::new(),
        })
    }

    /// A handler runs for the state that `change` led to.
    fn handled(&self, change: u32) {
        self.runs.fetch_add(1, Ordering::Relaxed);
        if self.script.pace.is_some() {
            let due = self.script.due(change);
            self.delays.lock().push(self.began.elapsed().saturating_sub(due));
        }
        if change >= self.script.changes - self.script.ids
            && self.settled.fetch_add(1, Ordering::Relaxed) + 1 == self.script.ids
        {
            self.done.notify_one();
        }
    }
}

/// What a process measured, one line of it.
#[derive(Debug, Clone, Copy, Default)]
struct Measured {
    rate: f64,
    cpu: f64,
    runs: f64,
    p50: f64,
    p99: f64,
    bytes: f64,
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    anyhow::ensure!(
        args.ids > 0 && args.changes.is_multiple_of(args.ids) && args.changes > 0,
        "the changes must be a multiple of the ids"
    );
    if let Some(who) = args.only {
        let Measured { rate, cpu, runs, p50, p99, bytes } = measure(&args, who).await?;
        println!("{rate} {cpu} {runs} {p50} {p99} {bytes}");
        return Ok(());
    }
    let mut all: Vec<(Who, Vec<Measured>)> =
        [Who::Vedetta, Who::Kube, Who::Store].map(|who| (who, Vec::new())).into();
    for _ in 0..args.rounds {
        for (who, measured) in &mut all {
            measured.push(child(&args, *who)?);
        }
    }
    let ratios = all[0].1.iter().zip(&all[1].1).map(|(ours, kube)| ours.rate / kube.rate);
    let ratio = median(&mut ratios.collect::<Vec<_>>());
    println!(
        "{:<26}{:>10}{:>8}{:>10}{:>9}{:>9}{:>7}",
        "", "changes/s", "µs", "runs", "p50 ms", "p99 ms", "B/id"
    );
    for (who, measured) in &all {
        let of = |figure: fn(&Measured) -> f64| {
            median(&mut measured.iter().map(figure).collect::<Vec<_>>())
        };
        let name = match who {
            Who::Vedetta => "watcher",
            Who::Kube => "kube's Controller",
            Who::Store => "watcher, durable puts",
        };
        println!(
            "{name:<26}{:>10.0}{:>8.2}{:>10.0}{:>9.2}{:>9.2}{:>7.0}",
            of(|m| m.rate),
            of(|m| m.cpu),
            of(|m| m.runs),
            of(|m| m.p50),
            of(|m| m.p99),
            of(|m| m.bytes)
        );
    }
    println!("\n{ratio:.2} times kube's changes");
    anyhow::ensure!(!args.check || ratio >= FASTER, "It should be at least {FASTER} times.");
    Ok(())
}

fn child(args: &Args, who: Who) -> anyhow::Result<Measured> {
    let who = format!("{who:?}").to_lowercase();
    let output = std::process::Command::new(std::env::current_exe()?)
        .args(["watch", "--only", &who])
        .args(["--ids", &args.ids.to_string(), "--changes", &args.changes.to_string()])
        .args(["--pace", &args.pace.to_string()])
        .output()?;
    anyhow::ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout)?;
    let figures: Result<Vec<f64>, _> = text.split_whitespace().map(str::parse).collect();
    let [rate, cpu, runs, p50, p99, bytes] = figures?[..] else {
        anyhow::bail!("not the figures of a measurement: {text}")
    };
    Ok(Measured { rate, cpu, runs, p50, p99, bytes })
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
async fn measure(args: &Args, who: Who) -> anyhow::Result<Measured> {
    let fast = Script { ids: args.ids, changes: args.changes, pace: None };
    let seen = Seen::new(fast);
    let (before, cpu) = (resident()?, Cpu::now()?);
    let running = start(who, &seen).await?;
    seen.done.notified().await;
    let (took, used) = (seen.began.elapsed(), Cpu::now()?.since(&cpu));
    let bytes = resident()?.saturating_sub(before) as f64 / f64::from(args.ids);
    drop(running);

    // Every id once, then changes at a pace, of which the first second is not counted.
    let paced =
        Script { ids: args.ids.min(args.pace), changes: args.pace * 5, pace: Some(args.pace) };
    let changes = paced.changes / paced.ids * paced.ids;
    let slow = Seen::new(Script { changes, ..paced });
    let running = start(who, &slow).await?;
    slow.done.notified().await;
    drop(running);
    let mut delays = std::mem::take(&mut *slow.delays.lock()).split_off(args.pace as usize);
    Ok(Measured {
        rate: f64::from(args.changes) / took.as_secs_f64(),
        cpu: millis(used) * 1e3 / f64::from(args.changes),
        runs: seen.runs.load(Ordering::Relaxed) as f64,
        p50: millis(quantile(&mut delays, 0.5)),
        p99: millis(quantile(&mut delays, 0.99)),
        bytes,
    })
}

/// Something that runs until it is dropped.
type Running = Box<dyn std::any::Any>;

async fn start(who: Who, seen: &Arc<Seen>) -> anyhow::Result<Running> {
    match who {
        Who::Vedetta => Ok(ours::start(seen)),
        Who::Store => ours::start_on_store(seen).await,
        Who::Kube => Ok(kube::start(seen)),
    }
}

fn resident() -> anyhow::Result<u64> {
    let pages = std::fs::read_to_string("/proc/self/statm")?;
    let pages: u64 =
        pages.split_whitespace().nth(1).context("statm has a second field")?.parse()?;
    Ok(pages * rustix::param::page_size() as u64)
}
