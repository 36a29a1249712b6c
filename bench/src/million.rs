//! A million keys.
//!
//! Prediction: opening reads every row once and is bound by decoding and building the index, so it grows
//! with the rows; memory is about the keys and values plus a fixed cost per key; a point read and a small
//! range cost a walk down the tree; a count looks at every key of its range.

use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use vedetta_core::KeyRange;
use vedetta_kv::{Op, Put, Range, Txn};

use crate::figures::resident;
use crate::setup;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many keys.
    #[arg(long, value_delimiter = ',', default_value = "100000,1000000")]
    keys: Vec<u64>,
    /// Bytes of a value.
    #[arg(long, default_value_t = 100)]
    value: usize,
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    for &keys in &args.keys {
        one_size(keys, args.value).await?;
    }
    Ok(())
}

async fn one_size(keys: u64, value: usize) -> anyhow::Result<()> {
    let folder = setup::folder()?;
    let before = resident()?;
    let store = setup::open(folder.path()).await?;
    let started = Instant::now();
    let mut loading = JoinSet::new();
    for caller in 0..16 {
        let store = store.clone();
        loading.spawn(async move {
            let mut n = caller * 100;
            while n < keys {
                let put = |n| Op::Put(Put::new(key(n, keys), vec![7; value]));
                let then = (n..keys.min(n + 100)).map(put).collect();
                store.txn(Txn { then, ..Txn::default() }).await.expect("puts work");
                n += 1600;
            }
        });
    }
    while loading.join_next().await.is_some() {}
    let loaded = started.elapsed();
    let size = store.status().size;
    let after_loading = resident()? - before;
    store.close().await;
    drop(store);

    let started = Instant::now();
    let store = setup::open(folder.path()).await?;
    let opened = started.elapsed();

    println!("{keys} keys with values of {value} bytes:");
    println!("  loaded {:.0} keys/s, 100 in a transaction", crate::figures::rate(keys, loaded));
    println!("  opened in {:.2} s; the file has {} MB", opened.as_secs_f64(), size >> 20);
    println!(
        "  resident after loading {} MB, {} bytes a key",
        after_loading >> 20,
        after_loading / keys
    );

    let point = time_each(
        20_000,
        || Range::new(KeyRange::One(key(fastrand::u64(..keys), keys).into())),
        &store,
    )
    .await?;
    let ten = time_each(
        20_000,
        || {
            let mut range = Range::new(KeyRange::From(key(fastrand::u64(..keys), keys).into()));
            range.range = KeyRange::Between(range.range.start().clone(), "/bench0".into());
            range.limit = Some(10);
            range.range =
                KeyRange::prefix(range.range.start().slice(..range.range.start().len() - 1));
            range
        },
        &store,
    )
    .await?;
    let mut count = Range::new(KeyRange::all());
    count.count_only = true;
    let count = time_each(5, || count.clone(), &store).await?;
    let all = time_each(3, || Range::new(KeyRange::all()), &store).await?;
    println!(
        "  a point read {point:.1?}, ten keys by prefix {ten:.1?}, counting all {count:.1?}, reading all {all:.1?}"
    );
    store.close().await;
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
