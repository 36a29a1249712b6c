//! Durable puts per second.
//!
//! Prediction: at 1 caller both are bound by the fsync; at 64 and 256 ours by the CPU of the writer
//! thread (evaluate, encode, one B-tree insert), the floor by waking its callers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use vedetta_kv::Put;

use crate::figures::{cpu_of, median, rate};
use crate::floor::Floor;
use crate::setup;

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
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let time = Duration::from_secs_f64(args.seconds);
    println!(
        "{:>8} {:>12} {:>12} {:>7} {:>26}",
        "callers", "floor/s", "vedetta/s", "ratio", "CPU of its writer per put"
    );
    for &callers in &args.callers {
        let (mut floors, mut ours, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        let (mut floor_cpus, mut cpus) = (Vec::new(), Vec::new());
        for _ in 0..args.rounds {
            let folder = setup::folder()?;
            let floor = Arc::new(Floor::open(folder.path())?);
            let value = vec![7_u8; args.value];
            let floor_rate = measure(callers, time, move || {
                let (floor, value) = (Arc::clone(&floor), value.clone());
                async move {
                    let mut record = key(args.keys).into_bytes();
                    record.extend_from_slice(&value);
                    floor.append(record).await;
                }
            })
            .await;
            let floor_cpu = cpu_of(Some("floor"))?.as_secs_f64() / (floor_rate * args.seconds);

            let folder = setup::folder()?;
            let store = setup::open(folder.path()).await?;
            let (writing, value) = (store.clone(), vec![7_u8; args.value]);
            let our_rate = measure(callers, time, move || {
                let (store, value) = (writing.clone(), value.clone());
                async move {
                    let put = store.put(Put::new(key(args.keys), value)).await;
                    assert!(put.is_ok(), "{put:?}");
                }
            })
            .await;
            let our_cpu = cpu_of(Some("vedetta-writer"))?.as_secs_f64() / (our_rate * args.seconds);
            floor_cpus.push(floor_cpu * 1e6);
            cpus.push(our_cpu * 1e6);
            store.close().await;
            floors.push(floor_rate);
            ours.push(our_rate);
            ratios.push(our_rate / floor_rate);
        }
        println!(
            "{callers:>8} {:>12.0} {:>12.0} {:>7.2} {:>11.1} and {:>6.1} µs",
            median(&mut floors),
            median(&mut ours),
            median(&mut ratios),
            median(&mut floor_cpus),
            median(&mut cpus)
        );
    }
    Ok(())
}

fn key(keys: u64) -> String {
    format!("/bench/{:012}", fastrand::u64(..keys))
}

/// Calls per second of `callers` who call again and again.
async fn measure<F, Fut>(callers: usize, time: Duration, call: F) -> f64
where
    F: Fn() -> Fut + Clone + Send + 'static,
    Fut: Future<Output = ()> + Send,
{
    let (stop, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut tasks = JoinSet::new();
    let started = Instant::now();
    for _ in 0..callers {
        let (stop, count, call) = (Arc::clone(&stop), Arc::clone(&count), call.clone());
        tasks.spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                call().await;
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    tokio::time::sleep(time).await;
    stop.store(true, Ordering::Relaxed);
    while tasks.join_next().await.is_some() {}
    rate(count.load(Ordering::Relaxed), started.elapsed())
}
