//! One stream of writes, many watchers in the same process.
//!
//! Prediction: events are shared, so handing out costs a wake-up and a look at the keys per watcher and
//! batch: events delivered per second grow with the watchers until that cost fills the cores. Writers never
//! wait for watchers, but callers, watchers and the writer thread share those cores, so past that point
//! writes give way.
//!
//! The floor hands the same number of records, appended to a plain log, to as many tasks over tokio's broadcast
//! channel: nobody chooses what to watch there, nobody resumes, and who is slow loses.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::broadcast;
use tokio::task::JoinSet;
use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{Put, WatchOptions};

use crate::figures::{millis, rate, resident};
use crate::floor::Floor;
use crate::setup;

/// Keys that are written.
const KEYS: u64 = 10_000;
/// Who write at the same time.
const CALLERS: u64 = 64;
/// Bytes of a value.
const VALUE: usize = 128;

pub(crate) const COLUMNS: &str = "\
Columns:
  watchers       watchers, each read by a task of its own
  writes/s       durable puts per second of the 64 callers, from the first to the answer of the last
  delivered/s    events per second that watchers were handed, from the first write to the last event
  floor/s        the same of a plain log and a broadcast channel, which has no ranges: not with --distinct
  ratio          delivered/s over floor/s
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
    /// So many more watch the prefix and never read.
    #[arg(long, default_value_t = 0)]
    stuck: u64,
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
        "{:>9} {:>10} {:>12} {:>12} {:>6} {:>14} {:>12}",
        "watchers", "writes/s", "delivered/s", "floor/s", "ratio", "all behind by", "B/watcher"
    );
    for watchers in &args.watchers {
        let [watchers, writes, stuck] = [*watchers, args.writes, args.stuck].map(|n| n.to_string());
        let mut one = vec!["fanout", "--here", "--watchers", &watchers, "--writes", &writes];
        one.extend(["--stuck", &stuck]);
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

    let stuck = (0..args.stuck)
        .map(|_| store.watch(KeyRange::prefix("/bench/"), WatchOptions::default()))
        .collect::<Result<Vec<_>, _>>()?;

    let (stored, distinct) = (store.clone(), args.distinct);
    let write = move || {
        let store = stored.clone();
        async move {
            let n = fastrand::u64(..KEYS);
            store.put(Put::new(key(n), vec![7; VALUE])).await?;
            Ok(if distinct { u64::from(n < watchers) } else { watchers })
        }
    };
    let ours = write_and_wait(args.writes, &delivered, write).await?;
    drop(stuck);
    store.close().await;
    while let Some(done) = reading.join_next().await {
        done?;
    }
    anyhow::ensure!(delivered.load(Ordering::Relaxed) == ours.owed, "events came twice");
    let floor = if args.distinct { None } else { Some(floor(args.writes, watchers).await?) };
    let floored = |figure: fn(f64, f64) -> f64, digits: usize| {
        floor.as_ref().map_or("-".into(), |floor| {
            format!("{:.digits$}", figure(ours.delivered(), floor.delivered()))
        })
    };
    println!(
        "{watchers:>9} {:>10.0} {:>12.0} {:>12} {:>6} {:>11.0} ms {each:>12}",
        rate(args.writes, ours.written),
        ours.delivered(),
        floored(|_, floor| floor, 0),
        floored(|ours, floor| ours / floor, 2),
        millis(ours.all.saturating_sub(ours.written)),
    );
    Ok(())
}

/// The same without a store.
async fn floor(writes: u64, watchers: u64) -> anyhow::Result<Done> {
    let folder = setup::folder()?;
    let log = Arc::new(Floor::open(folder.path())?);
    // Nobody is to fall behind so far that it loses something.
    let (told, _) = broadcast::channel::<Arc<Event>>(usize::try_from(writes)?);
    let delivered = Arc::new(AtomicU64::new(0));
    let mut reading = JoinSet::new();
    for _ in 0..watchers {
        let (mut watcher, delivered) = (told.subscribe(), Arc::clone(&delivered));
        reading.spawn(async move {
            while let Ok(event) = watcher.recv().await {
                let mut count = u64::from(key_of(&event).starts_with("/bench/"));
                while let Ok(event) = watcher.try_recv() {
                    count += u64::from(key_of(&event).starts_with("/bench/"));
                }
                delivered.fetch_add(count, Ordering::Relaxed);
            }
        });
    }
    let write = move || {
        let (log, told) = (Arc::clone(&log), told.clone());
        async move {
            let event: Arc<Event> = Arc::new((key(fastrand::u64(..KEYS)), vec![7; VALUE]));
            let mut record = event.0.clone().into_bytes();
            record.extend_from_slice(&event.1);
            log.append(record).await;
            told.send(event).map_err(|_| anyhow::anyhow!("nobody watches"))?;
            Ok(watchers)
        }
    };
    write_and_wait(writes, &delivered, write).await
}

type Event = (String, Vec<u8>);

fn key_of(event: &Event) -> &str {
    &event.0
}

/// How long it took to write, and until all had it.
struct Done {
    written: Duration,
    all: Duration,
    owed: u64,
}

impl Done {
    fn delivered(&self) -> f64 {
        rate(self.owed, self.all)
    }
}

/// Writes with all callers, and waits until what each write owes to watchers is delivered.
async fn write_and_wait<F, Fut>(
    writes: u64,
    delivered: &AtomicU64,
    write: F,
) -> anyhow::Result<Done>
where
    F: Fn() -> Fut + Clone + Send + 'static,
    Fut: Future<Output = anyhow::Result<u64>> + Send,
{
    let started = Instant::now();
    let mut writing = JoinSet::new();
    for caller in 0..CALLERS {
        let write = write.clone();
        let share = writes / CALLERS + u64::from(caller < writes % CALLERS);
        writing.spawn(async move {
            let mut owed = 0;
            for _ in 0..share {
                owed += write().await?;
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
        let late = started.elapsed() > written + Duration::from_secs(60);
        anyhow::ensure!(!late, "events are missing");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(Done { written, all: started.elapsed(), owed })
}

fn key(n: u64) -> String {
    format!("/bench/{n:08}")
}
