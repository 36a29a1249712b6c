//! One stream of writes, many watchers in the same process.
//!
//! Prediction: events are shared, so handing out costs a wake-up and a look at the keys per watcher and
//! batch: events delivered per second grow with the watchers until that cost fills the cores. Writers never
//! wait for watchers, but callers, watchers and the writer thread share those cores, so past that point
//! writes give way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{Put, WatchOptions};

use crate::figures::{millis, rate, resident};
use crate::setup;

/// Keys that are written.
const KEYS: u64 = 10_000;

pub(crate) const COLUMNS: &str = "\
Columns:
  watchers       watchers, each read by a task of its own
  writes/s       durable puts per second of the 64 callers, from the first to the answer of the last
  delivered/s    events per second that watchers were handed, from the first write to the last event
  all behind by  from the answer to the last write until the last watcher has its last event
  B/watcher      resident memory a new watcher takes with its task, before the first write; not for few
                 watchers, which are charged what the first one starts

Every number of watchers runs in a process of its own.";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many watchers.
    #[arg(long, value_delimiter = ',', default_value = "1,100,1000,10000")]
    watchers: Vec<u64>,
    /// Writes, by 64 callers at once, to 10,000 keys at random.
    #[arg(long, default_value_t = 20_000)]
    writes: u64,
    /// Every watcher has a key of its own, instead of all watching the prefix.
    #[arg(long)]
    distinct: bool,
    /// Measure here, without a heading.
    #[arg(long, hide = true)]
    here: bool,
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    if args.here {
        for &watchers in &args.watchers {
            measure(&args, watchers).await?;
        }
        return Ok(());
    }
    println!(
        "{:>9} {:>10} {:>12} {:>14} {:>12}",
        "watchers", "writes/s", "delivered/s", "all behind by", "B/watcher"
    );
    for watchers in &args.watchers {
        let (watchers, writes) = (watchers.to_string(), args.writes.to_string());
        let mut one = vec!["fanout", "--here", "--watchers", &watchers, "--writes", &writes];
        if args.distinct {
            one.push("--distinct");
        }
        setup::in_a_fresh_process(one)?;
    }
    Ok(())
}

async fn measure(args: &Args, watchers: u64) -> anyhow::Result<()> {
    let folder = setup::folder()?;
    let store = setup::open(folder.path()).await?;
    let delivered = Arc::new(AtomicU64::new(0));
    let before = resident()?;
    let mut reading = JoinSet::new();
    for n in 0..watchers {
        let range =
            if args.distinct { KeyRange::One(key(n).into()) } else { KeyRange::prefix("/bench/") };
        let mut watcher = store.watch(range, WatchOptions::default())?;
        let delivered = Arc::clone(&delivered);
        reading.spawn(async move {
            let mut last = Revision(0);
            // Until it is cut off.
            while let Ok(batch) = watcher.next().await {
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
    let gained = resident()?.saturating_sub(before);
    let each = if watchers < 1_000 { "-".into() } else { (gained / watchers).to_string() };

    let started = Instant::now();
    let mut writing = JoinSet::new();
    for caller in 0..64 {
        let (store, distinct) = (store.clone(), args.distinct);
        let share = args.writes / 64 + u64::from(caller < args.writes % 64);
        writing.spawn(async move {
            let mut owed = 0;
            for _ in 0..share {
                let n = fastrand::u64(..KEYS);
                store.put(Put::new(key(n), vec![7; 128])).await?;
                owed += if distinct { u64::from(n < watchers) } else { watchers };
            }
            anyhow::Ok(owed)
        });
    }
    let mut owed = 0;
    while let Some(done) = writing.join_next().await {
        owed += done??;
    }
    let written = started.elapsed();
    while delivered.load(Ordering::Relaxed) < owed {
        anyhow::ensure!(
            started.elapsed() < written + Duration::from_secs(60),
            "events are missing"
        );
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let all = started.elapsed();
    store.close().await;
    while let Some(done) = reading.join_next().await {
        done?;
    }
    anyhow::ensure!(delivered.load(Ordering::Relaxed) == owed, "events came twice");
    println!(
        "{watchers:>9} {:>10.0} {:>12.0} {:>11.0} ms {each:>12}",
        rate(args.writes, written),
        rate(owed, all),
        millis(all.saturating_sub(written)),
    );
    Ok(())
}

fn key(n: u64) -> String {
    format!("/bench/{n:08}")
}
