//! One stream of writes, many watchers in the same process.
//!
//! Prediction: events are shared, so handing out costs a wake-up and a look at the keys per watcher and
//! batch: events delivered per second grow with the watchers until that cost fills the cores, and the
//! writers keep their share whatever the number of watchers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{Put, WatchOptions};

use crate::figures::rate;
use crate::setup;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many watchers.
    #[arg(long, value_delimiter = ',', default_value = "1,100,1000,10000")]
    watchers: Vec<u64>,
    /// Writes, by 64 callers at once.
    #[arg(long, default_value_t = 20_000)]
    writes: u64,
    /// Every watcher has a key of its own, instead of all watching the prefix.
    #[arg(long)]
    distinct: bool,
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    println!(
        "{:>9} {:>10} {:>12} {:>14} {:>12}",
        "watchers", "writes/s", "delivered/s", "all behind by", "B/watcher"
    );
    for &watchers in &args.watchers {
        let folder = setup::folder()?;
        let store = setup::open(folder.path()).await?;
        let end = Revision(Revision::FRESH.0 + args.writes);
        let delivered = Arc::new(AtomicU64::new(0));
        let before = crate::figures::resident()?;
        let mut reading = JoinSet::new();
        for n in 0..watchers {
            let range = if args.distinct {
                KeyRange::One(format!("/bench/{n:08}").into())
            } else {
                KeyRange::prefix("/bench/")
            };
            let mut watcher = store.watch(range, WatchOptions::default())?;
            let delivered = Arc::clone(&delivered);
            let distinct = args.distinct;
            reading.spawn(async move {
                // A watcher of one key does not see the last write: it reads until it is cut off.
                let mut last = Revision(0);
                while distinct || last < end {
                    let Ok(batch) = watcher.next().await else { return };
                    let mut count = 0;
                    for event in batch.iter() {
                        assert!(event.revision > last, "in order, once each");
                        last = event.revision;
                        count += 1;
                    }
                    delivered.fetch_add(count, Ordering::Relaxed);
                }
            });
        }
        let each = crate::figures::resident()?.saturating_sub(before) / watchers;

        let started = Instant::now();
        let mut writing = JoinSet::new();
        for caller in 0..64 {
            let store = store.clone();
            let share = args.writes / 64 + u64::from(caller < args.writes % 64);
            writing.spawn(async move {
                for _ in 0..share {
                    let key = format!("/bench/{:08}", fastrand::u64(..10_000));
                    store.put(Put::new(key, vec![7; 128])).await.expect("puts work");
                }
            });
        }
        while writing.join_next().await.is_some() {}
        let written = started.elapsed();
        if args.distinct {
            tokio::time::sleep(Duration::from_millis(200)).await;
            store.close().await;
        }
        while reading.join_next().await.is_some() {}
        let all = started.elapsed();
        println!(
            "{watchers:>9} {:>10.0} {:>12.0} {:>11.0} ms {each:>12}",
            rate(args.writes, written),
            rate(delivered.load(Ordering::Relaxed), all),
            all.saturating_sub(written).as_secs_f64() * 1e3,
        );
        store.close().await;
    }
    Ok(())
}
