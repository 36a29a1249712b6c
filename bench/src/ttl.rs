//! How late keys with a TTL go.
//!
//! Prediction: a commit after the deadline, so a few milliseconds, whatever the number of leases; and
//! leases that wait for a far deadline cost nothing.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use vedetta_core::KeyRange;
use vedetta_kv::{Cause, Change, Put, Store, WatchOptions, Watcher};

use crate::figures::{Cpu, millis, quantile};
use crate::setup;

/// What `--check` takes.
const LATE: Duration = Duration::from_millis(20);
const DISORDER: Duration = Duration::from_millis(5);
const IDLE: Duration = Duration::from_millis(20);

/// Tasks that grant at the same time.
const GRANTING: u64 = 64;

pub(crate) const FIGURES: &str = "\
Figures:
  late by       from the store's own deadline to when a watcher has the deletion
  asked         the same, from when the lease was asked for plus its TTL; has the time of the grant in it
  out of order  the most by which a key went after another with a later deadline
  idle          CPU of the whole process over ten seconds in which nothing is asked of it";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Keys, each with a lease of its own.
    #[arg(long, default_value_t = 10_000)]
    keys: u64,
    /// The TTLs are spread over so many milliseconds.
    #[arg(long, default_value_t = 10_000)]
    spread: u64,
    /// Live leases while measuring what ten seconds of doing nothing cost.
    #[arg(long, default_value_t = 100_000)]
    idle_leases: u64,
    /// Fail when the p99 is later than 20 ms, when keys go out of order by more than 5 ms, or when the
    /// idle leases cost more than 20 ms of CPU in ten seconds.
    #[arg(long)]
    check: bool,
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let mut missed = lateness(&args).await?;
    missed.extend(idle(&args).await?);
    anyhow::ensure!(!args.check || missed.is_empty(), "{}", missed.join(" "));
    Ok(())
}

/// A key with a TTL.
struct Granted {
    key: String,
    /// The TTL, from when the lease was asked for.
    asked: Instant,
    /// When the store means to end it.
    deadline: Instant,
}

async fn lateness(args: &Args) -> anyhow::Result<Vec<String>> {
    let folder = setup::folder()?;
    let store = setup::open(folder.path()).await?;
    let watcher = store.watch(KeyRange::all(), WatchOptions::default())?;
    let reading = tokio::spawn(expiries(watcher, args.keys));
    let mut granting = JoinSet::new();
    for task in 0..GRANTING {
        let (store, keys, spread) = (store.clone(), args.keys, args.spread);
        granting.spawn(async move {
            let mut granted = Vec::new();
            let mut n = task;
            while n < keys {
                // Long enough that all are granted before the first goes.
                let ttl = Duration::from_millis(3_000 + fastrand::u64(..spread));
                granted.push(grant(&store, format!("/ttl/{n}"), ttl).await?);
                n += GRANTING;
            }
            anyhow::Ok(granted)
        });
    }
    let mut granted = HashMap::new();
    while let Some(some) = granting.join_next().await {
        granted.extend(some??.into_iter().map(|one| (one.key.clone(), one)));
    }

    let (mut late, mut late_asked) = (Vec::new(), Vec::new());
    let mut disorder = Duration::ZERO;
    let mut latest: Option<Instant> = None;
    for (key, gone) in reading.await?? {
        let Granted { asked, deadline, .. } = granted[&key];
        anyhow::ensure!(gone >= deadline, "{key} went {:?} early", deadline - gone);
        late.push(gone - deadline);
        late_asked.push(gone - asked);
        let after = latest.map_or(deadline, |latest| latest.max(deadline));
        disorder = disorder.max(after - deadline);
        latest = Some(after);
    }
    store.close().await;

    let p99 = quantile(&mut late, 0.99);
    println!("{} keys over {} ms:", args.keys, args.spread);
    for (from, late) in [("late by", &mut late), ("asked", &mut late_asked)] {
        println!(
            "  {from:<13} p50 {:.1} ms, p99 {:.1} ms, most {:.1} ms",
            millis(quantile(late, 0.5)),
            millis(quantile(late, 0.99)),
            millis(quantile(late, 1.0)),
        );
    }
    println!("  out of order  {:.1} ms", millis(disorder));

    let mut missed = Vec::new();
    if p99 > LATE {
        missed.push(format!("The p99 is late by {p99:.1?} and should be by at most {LATE:?}."));
    }
    if disorder > DISORDER {
        missed
            .push(format!("Out of order by {disorder:.1?}, which should be at most {DISORDER:?}."));
    }
    Ok(missed)
}

/// A key with a lease of its own.
async fn grant(store: &Store, key: String, ttl: Duration) -> anyhow::Result<Granted> {
    let asked = Instant::now() + ttl;
    let lease = store.grant(None, ttl).await?;
    // The store counts from the commit of the grant, some time before we are woken, so a deadline counted
    // from here would hide that much lateness. What the store says is left of the lease hides nothing: the
    // clock is read before asking, so that a pause between the two makes the deadline too early, not too
    // late.
    let now = Instant::now();
    let Some(info) = store.lease(lease) else {
        anyhow::bail!("a lease went before its key was put: grants take longer than the TTL");
    };
    let deadline = now + info.remaining;
    store.put(Put::new(key.clone(), "v").lease(lease)).await?;
    Ok(Granted { key, asked, deadline })
}

/// The keys that expire, as a watcher gets them, and when.
async fn expiries(mut watcher: Watcher, keys: u64) -> anyhow::Result<Vec<(String, Instant)>> {
    let mut gone = Vec::new();
    while (gone.len() as u64) < keys {
        let batch = watcher.next().await?;
        let now = Instant::now();
        for event in batch.iter() {
            if let Change::Delete { key, cause: Cause::Expired } = &event.change {
                gone.push((std::str::from_utf8(key)?.to_owned(), now));
            }
        }
    }
    Ok(gone)
}

async fn idle(args: &Args) -> anyhow::Result<Vec<String>> {
    let folder = setup::folder()?;
    let store = setup::open(folder.path()).await?;
    let empty = cpu_while_idle().await?;
    let mut granting = JoinSet::new();
    for task in 0..GRANTING {
        let store = store.clone();
        let share = args.idle_leases / GRANTING + u64::from(task < args.idle_leases % GRANTING);
        granting.spawn(async move {
            for _ in 0..share {
                store.grant(None, Duration::from_secs(3600)).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(done) = granting.join_next().await {
        done??;
    }
    let full = cpu_while_idle().await?;
    let more = full.saturating_sub(empty);
    println!(
        "idle for 10 s: {:.1} ms of CPU without leases, {:.1} ms with {}",
        millis(empty),
        millis(full),
        store.leases().len(),
    );
    store.close().await;
    let missed = format!("Idle leases cost {more:.1?} of CPU and should cost at most {IDLE:?}.");
    Ok(if more > IDLE { vec![missed] } else { Vec::new() })
}

/// CPU time of this process over ten seconds of doing nothing.
async fn cpu_while_idle() -> anyhow::Result<Duration> {
    // What was asked before may still be moved from the log to the file.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = Cpu::now()?;
    tokio::time::sleep(Duration::from_secs(10)).await;
    Ok(Cpu::now()?.since(&before))
}
