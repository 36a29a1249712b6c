//! How late keys with a TTL go.
//!
//! Prediction: a commit after the deadline, so a few milliseconds, whatever the number of leases.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use vedetta_core::KeyRange;
use vedetta_kv::{Cause, Change, Put, WatchOptions};

use crate::figures::{cpu_of, quantile};
use crate::setup;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Keys, each with a lease of its own.
    #[arg(long, default_value_t = 10_000)]
    keys: u64,
    /// The TTLs are spread over so many milliseconds.
    #[arg(long, default_value_t = 10_000)]
    spread: u64,
    /// Live leases that measure what idling costs, with this many seconds of doing nothing.
    #[arg(long, default_value_t = 100_000)]
    idle_leases: u64,
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    lateness(&args).await?;
    idle(&args).await
}

async fn lateness(args: &Args) -> anyhow::Result<()> {
    let folder = setup::folder()?;
    let store = setup::open(folder.path()).await?;
    let mut watcher = store.watch(KeyRange::all(), WatchOptions::default())?;
    // Long enough that all are granted before the first goes.
    let first = Duration::from_secs(3);
    let mut granting = JoinSet::new();
    for n in 0..args.keys {
        let store = store.clone();
        let ttl = first + Duration::from_millis(fastrand::u64(..args.spread));
        granting.spawn(async move {
            let lease = store.grant(None, ttl).await.expect("grants work");
            // The store counts from within the call, so the deadline is at or before this.
            let deadline = Instant::now() + ttl;
            let key = format!("/ttl/{n}");
            store.put(Put::new(key.clone(), "v").lease(lease)).await.expect("puts work");
            (key, deadline)
        });
    }
    let mut deadlines = HashMap::new();
    while let Some(granted) = granting.join_next().await {
        let (key, deadline) = granted?;
        deadlines.insert(key, deadline);
    }
    let mut late = Vec::new();
    let mut disorder = Duration::ZERO;
    let mut latest: Option<Instant> = None;
    while late.len() < deadlines.len() {
        let batch = watcher.next().await?;
        let now = Instant::now();
        for event in batch.iter() {
            if let Change::Delete { key, cause: Cause::Expired } = &event.change {
                let deadline = deadlines[std::str::from_utf8(key)?];
                late.push(now.saturating_duration_since(deadline));
                if let Some(latest) = latest {
                    disorder = disorder.max(latest.saturating_duration_since(deadline));
                }
                latest = Some(latest.map_or(deadline, |latest| latest.max(deadline)));
            }
        }
    }
    println!(
        "{} keys over {} ms: late by p50 {:.1} ms, p99 {:.1} ms, most {:.1} ms; out of order by at most {:.1} ms",
        args.keys,
        args.spread,
        quantile(&mut late, 0.5).as_secs_f64() * 1e3,
        quantile(&mut late, 0.99).as_secs_f64() * 1e3,
        quantile(&mut late, 1.0).as_secs_f64() * 1e3,
        disorder.as_secs_f64() * 1e3,
    );
    store.close().await;
    Ok(())
}

async fn idle(args: &Args) -> anyhow::Result<()> {
    let folder = setup::folder()?;
    let store = setup::open(folder.path()).await?;
    let empty = cpu_while_idle().await?;
    let mut granting = JoinSet::new();
    for _ in 0..64 {
        let (store, share) = (store.clone(), args.idle_leases / 64);
        granting.spawn(async move {
            for _ in 0..share {
                store.grant(None, Duration::from_secs(3600)).await.expect("grants work");
            }
        });
    }
    while granting.join_next().await.is_some() {}
    let full = cpu_while_idle().await?;
    println!(
        "idle for 10 s: {:.1} ms of CPU without leases, {:.1} ms with {}",
        empty.as_secs_f64() * 1e3,
        full.as_secs_f64() * 1e3,
        store.leases().len(),
    );
    store.close().await;
    Ok(())
}

/// CPU time of this process over ten seconds of doing nothing.
async fn cpu_while_idle() -> anyhow::Result<Duration> {
    let before = cpu_of(None)?;
    tokio::time::sleep(Duration::from_secs(10)).await;
    Ok(cpu_of(None)?.saturating_sub(before))
}
