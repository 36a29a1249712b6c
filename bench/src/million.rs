//! A million keys.
//!
//! Prediction: opening reads every row once and is bound by decoding and building the index, so it grows
//! with the rows; memory is about the keys and values plus a fixed cost per key; a point read and a small
//! range cost a walk down the tree; a count looks at every key of its range.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use vedetta_core::KeyRange;
use vedetta_kv::{Op, Put, Range, Txn};

use crate::figures::{rate, resident};
use crate::setup;

pub(crate) const FIGURES: &str = "\
Loading and opening each run in a process of their own. Resident memory is what the process gained from
before the store was opened; a read is one call after the other, from one caller.";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many keys.
    #[arg(long, value_delimiter = ',', default_value = "100000,1000000")]
    keys: Vec<u64>,
    /// Bytes of a value.
    #[arg(long, default_value_t = 100)]
    value: usize,
    /// Load this folder and end.
    #[arg(long, hide = true)]
    load: Option<PathBuf>,
    /// Measure this loaded folder.
    #[arg(long, hide = true)]
    open: Option<PathBuf>,
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    for &keys in &args.keys {
        match (&args.load, &args.open) {
            (Some(folder), _) => load(folder, keys, args.value).await?,
            (_, Some(folder)) => open(folder, keys).await?,
            (None, None) => {
                println!("{keys} keys with values of {} bytes:", args.value);
                let folder = setup::folder()?;
                let (keys, value) = (keys.to_string(), args.value.to_string());
                for part in ["--load", "--open"] {
                    let part = [part.as_ref(), folder.path().as_os_str()];
                    let size = ["million", "--keys", &keys, "--value", &value].map(AsRef::as_ref);
                    setup::in_a_fresh_process(size.into_iter().chain(part))?;
                }
            }
        }
    }
    Ok(())
}

async fn load(folder: &Path, keys: u64, value: usize) -> anyhow::Result<()> {
    let before = resident()?;
    let store = setup::open(folder).await?;
    let started = Instant::now();
    let mut loading = JoinSet::new();
    for caller in 0..16 {
        let store = store.clone();
        loading.spawn(async move {
            let mut n = caller * 100;
            while n < keys {
                let put = |n| Op::Put(Put::new(key(n, keys), vec![7; value]));
                let then = (n..keys.min(n + 100)).map(put).collect();
                store.txn(Txn { then, ..Txn::default() }).await?;
                n += 1600;
            }
            anyhow::Ok(())
        });
    }
    while let Some(done) = loading.join_next().await {
        done??;
    }
    let loaded = started.elapsed();
    println!("  loaded {:.0} keys/s, 100 in a transaction", rate(keys, loaded));
    print_memory("loading", before, keys)?;
    store.close().await;
    println!("  the file has {} MB", setup::file(folder).metadata()?.len() >> 20);
    Ok(())
}

async fn open(folder: &Path, keys: u64) -> anyhow::Result<()> {
    let before = resident()?;
    let started = Instant::now();
    let store = setup::open(folder).await?;
    let opened = started.elapsed();
    println!(
        "  opened in {:.2} s, {:.0} keys/s, from the file system's cache",
        opened.as_secs_f64(),
        rate(keys, opened)
    );
    print_memory("opening", before, keys)?;

    let some_key = || key(fastrand::u64(..keys), keys);
    let one = || Range::new(KeyRange::One(some_key().into()));
    let point = time_each(20_000, one, &store).await?;
    // All keys that differ in the last digit.
    let by_prefix = || {
        let mut prefix = some_key();
        prefix.pop();
        Range::new(KeyRange::prefix(prefix))
    };
    let ten = time_each(20_000, by_prefix, &store).await?;
    let all = Range::new(KeyRange::all());
    let count = Range { count_only: true, ..all.clone() };
    let count = time_each(5, || count.clone(), &store).await?;
    let all = time_each(3, || all.clone(), &store).await?;
    println!("  a point read {point:.1?}, ten keys by prefix {ten:.1?}");
    println!("  counting all {count:.1?}, reading all {all:.1?}");
    store.close().await;
    Ok(())
}

fn print_memory(after: &str, before: u64, keys: u64) -> anyhow::Result<()> {
    let gained = resident()?.saturating_sub(before);
    println!("  resident after {after} {} MB, {} bytes a key", gained >> 20, gained / keys);
    Ok(())
}

/// Keys in no order, so that the tree is built as it would be in life.
fn key(n: u64, keys: u64) -> String {
    format!("/bench/{:09}", (n * 7_919) % keys)
}

async fn time_each(
    times: u32,
    request: impl Fn() -> Range,
    store: &vedetta_kv::Store,
) -> anyhow::Result<Duration> {
    let started = Instant::now();
    for _ in 0..times {
        let found = store.range(request()).await?;
        anyhow::ensure!(found.count > 0, "the keys are there");
    }
    Ok(started.elapsed() / times)
}
