//! A million keys.
//!
//! Prediction: opening reads every row once and is bound by decoding and building the index, so it grows
//! with the rows; memory is about the keys and values plus a fixed cost per key; a point read and a small
//! range cost a walk down the tree; a count looks at every key of its range.
//!
//! The floor is a file of the same records and an ordered map of them: what it takes to read a million records back and to
//! find them in memory, without revisions, history, leases and checksums.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use vedetta_core::KeyRange;
use vedetta_kv::{Op, Put, Range, Txn};

use crate::figures::{rate, resident};
use crate::setup;

/// How often few keys are read, and all.
const POINTS: u32 = 20_000;
const WHOLES: u32 = 5;

pub(crate) const FIGURES: &str = "\
Loading and opening each run in a process of their own. Resident memory is what the process gained from
before the store was opened; a read is one call after the other, from one caller. The floor, a file of the same
records that is read into an ordered map, has a process of its own, too; a ratio is ours over the floor's.";

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
    /// Measure the floor here.
    #[arg(long, hide = true)]
    floor: Option<PathBuf>,
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    for &keys in &args.keys {
        match (&args.load, &args.open, &args.floor) {
            (Some(folder), ..) => load(folder, keys, args.value).await?,
            (_, Some(folder), _) => open(folder, keys).await?.print(),
            (.., Some(folder)) => floor(folder, keys, args.value)?.print(),
            (None, None, None) => compare(keys, args.value)?,
        }
    }
    Ok(())
}

/// Loads, opens, and holds the figures against those of the floor.
fn compare(keys: u64, value: usize) -> anyhow::Result<()> {
    println!("{keys} keys with values of {value} bytes:");
    let folder = setup::folder()?;
    let (keys, value) = (keys.to_string(), value.to_string());
    let part = |part: &'static str| {
        let part = [part.as_ref(), folder.path().as_os_str()];
        let size = ["million", "--keys", &keys, "--value", &value].map(AsRef::as_ref);
        size.into_iter().chain(part).map(ToOwned::to_owned).collect::<Vec<_>>()
    };
    setup::in_a_fresh_process(part("--load"))?;
    let ours = Figures::read(&setup::told_by_a_fresh_process(part("--open"))?)?;
    let floor = Figures::read(&setup::told_by_a_fresh_process(part("--floor"))?)?;
    println!("  {:<24} {:>12} {:>12} {:>6}", "", "floor", "vedetta", "ratio");
    for (name, unit, figure) in [
        ("opened in", "ms", (|f| f.opened_ms) as fn(&Figures) -> f64),
        ("resident, a key", "B", |f| f.bytes_a_key),
        ("a point read", "µs", |f| f.point_us),
        ("ten keys by prefix", "µs", |f| f.ten_us),
        ("counting all", "ms", |f| f.count_ms),
        ("reading all", "ms", |f| f.all_ms),
    ] {
        let (floor, ours) = (figure(&floor), figure(&ours));
        let show = |figure: f64| format!("{figure:.1} {unit}");
        println!("  {name:<24} {:>12} {:>12} {:>6.2}", show(floor), show(ours), ours / floor);
    }
    Ok(())
}

/// What one side takes.
#[derive(serde::Serialize, serde::Deserialize)]
struct Figures {
    opened_ms: f64,
    bytes_a_key: f64,
    point_us: f64,
    ten_us: f64,
    count_ms: f64,
    all_ms: f64,
}

impl Figures {
    /// For [`compare`], which reads it.
    fn print(&self) {
        println!("{}", serde_json::to_string(self).expect("numbers"));
    }

    fn read(told: &str) -> anyhow::Result<Self> {
        Ok(serde_json::from_str(told)?)
    }
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
    println!("  resident after loading, {:.0} bytes a key", bytes_a_key(before, keys)?);
    store.close().await;
    println!("  the file has {} MB", setup::file(folder).metadata()?.len() >> 20);
    Ok(())
}

async fn open(folder: &Path, keys: u64) -> anyhow::Result<Figures> {
    let before = resident()?;
    let started = Instant::now();
    let store = setup::open(folder).await?;
    let opened = started.elapsed();
    let bytes_a_key = bytes_a_key(before, keys)?;
    let one = || Range::new(KeyRange::One(some_key(keys).into()));
    let point = time_each(POINTS, one, &store).await?;
    let ten = time_each(POINTS, || Range::new(KeyRange::prefix(some_prefix(keys))), &store).await?;
    let all = Range::new(KeyRange::all());
    let count = Range { count_only: true, ..all.clone() };
    let count = time_each(WHOLES, || count.clone(), &store).await?;
    let all = time_each(WHOLES, || all.clone(), &store).await?;
    store.close().await;
    Ok(figures(opened, bytes_a_key, point, ten, count, all))
}

/// The same of a file that is read into an ordered map.
fn floor(folder: &Path, keys: u64, value: usize) -> anyhow::Result<Figures> {
    let path = folder.join("floor");
    let mut file = std::io::BufWriter::new(std::fs::File::create(&path)?);
    for n in 0..keys {
        let (key, value) = (key(n, keys), vec![7_u8; value]);
        for part in [key.as_bytes(), &value] {
            file.write_all(&u32::try_from(part.len())?.to_le_bytes())?;
            file.write_all(part)?;
        }
    }
    file.into_inner()?.sync_all()?;

    let before = resident()?;
    let started = Instant::now();
    let mut map = BTreeMap::<Box<[u8]>, Box<[u8]>>::new();
    let mut rest = &std::fs::read(&path)?[..];
    while !rest.is_empty() {
        let key = take(&mut rest).into();
        map.insert(key, take(&mut rest).into());
    }
    let opened = started.elapsed();
    let bytes_a_key = bytes_a_key(before, keys)?;
    let point = time(POINTS, || usize::from(map.contains_key(some_key(keys).as_bytes())))?;
    let ten = time(POINTS, || {
        let prefix = some_prefix(keys);
        let from = (Bound::Included(prefix.as_bytes()), Bound::Unbounded);
        let found =
            map.range::<[u8], _>(from).take_while(|(key, _)| key.starts_with(prefix.as_bytes()));
        found.map(|(key, value)| (key.clone(), value.clone())).collect::<Vec<_>>().len()
    })?;
    let count = time(WHOLES, || map.range::<[u8], _>(..).count())?;
    let all = time(WHOLES, || {
        let all = map.iter().map(|(key, value)| (key.clone(), value.clone()));
        all.collect::<Vec<_>>().len()
    })?;
    Ok(figures(opened, bytes_a_key, point, ten, count, all))
}

/// The next of what has its length before it.
fn take<'a>(rest: &mut &'a [u8]) -> &'a [u8] {
    let (length, after) = rest.split_first_chunk().expect("the file is whole");
    let (part, after) = after.split_at(u32::from_le_bytes(*length) as usize);
    *rest = after;
    part
}

fn figures(
    opened: Duration,
    bytes_a_key: f64,
    point: Duration,
    ten: Duration,
    count: Duration,
    all: Duration,
) -> Figures {
    let (ms, us) =
        (|time: Duration| time.as_secs_f64() * 1e3, |time: Duration| time.as_secs_f64() * 1e6);
    Figures {
        opened_ms: ms(opened),
        bytes_a_key,
        point_us: us(point),
        ten_us: us(ten),
        count_ms: ms(count),
        all_ms: ms(all),
    }
}

fn some_key(keys: u64) -> String {
    key(fastrand::u64(..keys), keys)
}

/// Of all keys that differ in the last digit.
fn some_prefix(keys: u64) -> String {
    let mut prefix = some_key(keys);
    prefix.pop();
    prefix
}

#[allow(clippy::cast_precision_loss, reason = "far less than 2^52")]
fn bytes_a_key(before: u64, keys: u64) -> anyhow::Result<f64> {
    Ok(resident()?.saturating_sub(before) as f64 / keys as f64)
}

/// Keys in no order, so that the tree is built as it would be in life.
fn key(n: u64, keys: u64) -> String {
    format!("/bench/{:09}", (n * 7_919) % keys)
}

fn time(times: u32, find: impl Fn() -> usize) -> anyhow::Result<Duration> {
    let started = Instant::now();
    for _ in 0..times {
        anyhow::ensure!(find() > 0, "the keys are there");
    }
    Ok(started.elapsed() / times)
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
