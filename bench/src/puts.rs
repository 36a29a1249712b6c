//! Durable puts per second.
//!
//! Prediction: at 1 caller both are bound by the fsync; at 64 and 256 ours by the CPU of the writer
//! thread (evaluate, encode, one B-tree insert), the floor by waking its callers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use vedetta_kv::Put;

use crate::figures::{Cpu, median, millis, quantile, rate};
use crate::floor::Floor;
use crate::setup;

/// The least share of the floor that `--check` takes, and with how many callers it looks.
const TARGET: f64 = 0.5;
const CHECKED: [usize; 3] = [1, 64, 256];

pub(crate) const COLUMNS: &str = "\
Columns, each the median of the rounds:
  callers    who write at the same time
  floor/s    records per second of the floor: appended to a file, one fdatasync for all that wait
  vedetta/s  puts per second of the store, answered when durable
  ratio      vedetta/s over floor/s of the same round
  p99 ms     how long a record of the floor takes at most, and a put of the store, but for one in a hundred:
             so with the commits that wait for a checkpoint
  floor µs   CPU of the floor's one thread per record; it also wakes the callers
  writer µs  CPU of the store's two writer threads per put; they also wake the callers";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Concurrent callers, each waiting for its answer before it writes again.
    #[arg(long, value_delimiter = ',', default_value = "1,8,64,256")]
    callers: Vec<usize>,
    /// Bytes of a value.
    #[arg(long, default_value_t = 256)]
    value: usize,
    /// Seconds of each measurement.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Measurements of each, taken in turns; the median counts.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Distinct keys.
    #[arg(long, default_value_t = 100_000)]
    keys: u64,
    /// Fail when the ratio with 1, 64 or 256 callers is below 0.5.
    #[arg(long)]
    check: bool,
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    anyhow::ensure!(
        !args.check || args.callers.iter().any(|callers| CHECKED.contains(callers)),
        "--check looks at 1, 64 and 256 callers, and none of these is measured"
    );
    println!(
        "{:>8} {:>10} {:>10} {:>6} {:>12} {:>14} {:>9} {:>10}",
        "callers",
        "floor/s",
        "vedetta/s",
        "ratio",
        "floor p99 ms",
        "vedetta p99 ms",
        "floor µs",
        "writer µs"
    );
    let mut missed = Vec::new();
    for &callers in &args.callers {
        let mut rounds = Vec::new();
        for _ in 0..args.rounds {
            rounds.push(round(&args, callers).await?);
        }
        let of =
            |figure: fn(&Round) -> f64| median(&mut rounds.iter().map(figure).collect::<Vec<_>>());
        let ratio = of(|round| round.ours / round.floor);
        println!(
            "{callers:>8} {:>10.0} {:>10.0} {ratio:>6.2} {:>12.2} {:>14.2} {:>9.1} {:>10.1}",
            of(|round| round.floor),
            of(|round| round.ours),
            of(|round| round.floor_p99),
            of(|round| round.our_p99),
            of(|round| round.floor_cpu),
            of(|round| round.writer_cpu),
        );
        if CHECKED.contains(&callers) && ratio < TARGET {
            missed.push(format!("{ratio:.3} with {callers}"));
        }
    }
    anyhow::ensure!(
        !args.check || missed.is_empty(),
        "The ratio should be at least {TARGET} and is {} callers.",
        missed.join(", ")
    );
    Ok(())
}

/// Calls per second, the p99 of a call in ms, and CPU per call in µs.
struct Round {
    floor: f64,
    ours: f64,
    floor_p99: f64,
    our_p99: f64,
    floor_cpu: f64,
    writer_cpu: f64,
}

async fn round(args: &Args, callers: usize) -> anyhow::Result<Round> {
    let time = Duration::from_secs_f64(args.seconds);
    let (keys, value) = (args.keys, vec![7_u8; args.value]);

    let folder = setup::folder()?;
    let floor = Arc::new(Floor::open(folder.path())?);
    let (appending, bytes) = (Arc::clone(&floor), value.clone());
    let floor_done = measure(callers, time, move || {
        let (floor, value) = (Arc::clone(&appending), bytes.clone());
        async move {
            let mut record = key(keys).into_bytes();
            record.extend_from_slice(&value);
            floor.append(record).await;
        }
    })
    .await?;
    let floor_cpu = Cpu::now()?.of("floor");
    // Not before: its thread goes with it.
    drop(floor);

    let folder = setup::folder()?;
    let store = setup::open(folder.path()).await?;
    let writing = store.clone();
    let our_done = measure(callers, time, move || {
        let (store, value) = (writing.clone(), value.clone());
        async move {
            let put = store.put(Put::new(key(keys), value)).await;
            assert!(put.is_ok(), "{put:?}");
        }
    })
    .await?;
    let cpu = Cpu::now()?;
    store.close().await;

    Ok(Round {
        floor: floor_done.rate,
        ours: our_done.rate,
        floor_p99: floor_done.p99,
        our_p99: our_done.p99,
        floor_cpu: floor_done.each(floor_cpu),
        writer_cpu: our_done.each(cpu.of("vedetta-writer")),
    })
}

fn key(keys: u64) -> String {
    format!("/bench/{:012}", fastrand::u64(..keys))
}

struct Done {
    count: u64,
    rate: f64,
    p99: f64,
}

impl Done {
    /// The share of one call, in µs.
    fn each(&self, cpu: Duration) -> f64 {
        1e6 / rate(self.count, cpu)
    }
}

/// What `callers` get done who call again and again.
async fn measure<F, Fut>(callers: usize, time: Duration, call: F) -> anyhow::Result<Done>
where
    F: Fn() -> Fut + Clone + Send + 'static,
    Fut: Future<Output = ()> + Send,
{
    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    let started = Instant::now();
    for _ in 0..callers {
        let (stop, call) = (Arc::clone(&stop), call.clone());
        tasks.spawn(async move {
            let mut took = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let called = Instant::now();
                call().await;
                took.push(called.elapsed());
            }
            took
        });
    }
    tokio::time::sleep(time).await;
    stop.store(true, Ordering::Relaxed);
    let mut of_each = Vec::new();
    while let Some(done) = tasks.join_next().await {
        of_each.push(done?);
    }
    let elapsed = started.elapsed();
    let mut took = of_each.concat();
    anyhow::ensure!(!took.is_empty(), "nothing was done in the time given");
    let count = took.len() as u64;
    let p99 = millis(quantile(&mut took, 0.99));
    Ok(Done { count, rate: rate(count, elapsed), p99 })
}
