//! A batch of files made into all their resolutions by the worker of `examples/transcode`, and by the two
//! ways that come to mind first: how much of the cores each uses, and with how many threads at once.
//!
//! Prediction: one file at a time leaves cores idle where FFmpeg does: as it begins and ends, and with small
//! pictures. A semaphore keeps them busy until only large files are left, and pays with an FFmpeg for each of
//! them, each with threads for the whole machine. Ours is as busy as the semaphore with no more threads
//! than slots.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use futures_util::future::try_join_all;
use tokio::sync::Semaphore;
use transcode::{Asked, Media, Part, Tools, ladder, run_part};
use vedetta_db::Db;
use vedetta_jobs::sqlite::{SCHEMA, SqliteJobs};
use vedetta_jobs::{Jobs, Ledger as _, NewJob, Worker};
use vedetta_runtime::Watch;

use crate::figures::median;

/// The films of the batch: lines of the picture and seconds.
const FILMS: [(u32, u32); 10] = [
    (1080, 6),
    (240, 10),
    (480, 8),
    (144, 20),
    (720, 6),
    (360, 10),
    (240, 20),
    (480, 4),
    (144, 10),
    (360, 5),
];
const RATE: u32 = 25;

const SEMAPHORE: &str = "semaphore";
const WAYS: [&str; 3] = ["ours", "one at a time", SEMAPHORE];

pub(crate) const FIGURES: &str = "\
Figures:
  took     from the first file to the last output
  used     CPU time of all FFmpegs, of what the cores had in that time
  at once  the most slots or threads that were asked of FFmpeg at one time

Ways:
  ours            `examples/transcode` on the embedded queue: a part a resolution, each with its slots
  one at a time   a file after the other, all its resolutions in turn, FFmpeg with a thread for each core
  semaphore       as many files at once as there are cores, otherwise the same";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How often each way is measured; the median counts.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Slots of ours; as many as the machine has cores for it if not said.
    #[arg(long)]
    slots: Option<NonZeroU32>,
    /// Fail when ours uses less of the cores than one file at a time, or takes longer; or, with more than two
    /// slots, takes longer than the semaphore. With two nearly every part of ours has to have both.
    #[arg(long)]
    check: bool,
}

/// What a way came to.
struct Batch {
    took: Duration,
    used: f64,
    at_once: u64,
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let tools = Tools::default();
    let mut films = Vec::new();
    for (number, (height, seconds)) in FILMS.into_iter().enumerate() {
        let film = folder.path().join(format!("{number}-{height}.mp4"));
        let made = transcode::sample(&tools, &film, height, RATE, seconds).await;
        made.context("FFmpeg makes a film; apt-get install ffmpeg")?;
        films.push(film);
    }
    let cores = std::thread::available_parallelism()?;
    let slots = args.slots.unwrap_or(NonZeroU32::try_from(cores)?);
    let mut batches: [Vec<Batch>; 3] = [const { Vec::new() }; 3];
    for round in 0..args.rounds {
        for (way, batches) in batches.iter_mut().enumerate() {
            let outputs = folder.path().join(format!("{round}-{way}"));
            std::fs::create_dir(&outputs)?;
            let threads = AtThatTime::default();
            let (start, used) = (Instant::now(), children()?);
            match way {
                0 => ours(folder.path(), &films, &outputs, slots, &threads).await?,
                1 => plain(&tools, &films, &outputs, 1, &threads).await?,
                _ => plain(&tools, &films, &outputs, cores.get(), &threads).await?,
            }
            let took = start.elapsed();
            let used = children()?.saturating_sub(used).as_secs_f64() / took.as_secs_f64();
            let at_once = threads.most.load(Ordering::Relaxed);
            check(&films, &outputs)?;
            std::fs::remove_dir_all(&outputs)?;
            #[expect(clippy::cast_precision_loss, reason = "a few cores")]
            batches.push(Batch { took, used: used / cores.get() as f64, at_once });
        }
    }
    println!(
        "{} films on {cores} cores, {slots} slots; medians of {} rounds",
        films.len(),
        args.rounds
    );
    println!("{:<16}{:>9}{:>9}{:>9}{:>14}", "", "took", "used", "at once", "ours is so long");
    let took = |batches: &[Batch]| median_of(batches, |batch| batch.took.as_secs_f64());
    let used = |batches: &[Batch]| median_of(batches, |batch| batch.used) * 100.0;
    let mut missed = Vec::new();
    for (name, way) in WAYS.into_iter().zip(&batches) {
        let used = used(way);
        let at_once = way.iter().map(|batch| batch.at_once).max().unwrap_or_default();
        let pairs = batches[0].iter().zip(way);
        let ratios = pairs.map(|(ours, other)| ours.took.as_secs_f64() / other.took.as_secs_f64());
        let ratio = median(&mut ratios.collect::<Vec<_>>());
        println!("{name:<16}{:>7.1} s{used:>7.0} %{at_once:>9}{ratio:>14.2}", took(way));
        let is_fair = name != SEMAPHORE || slots.get() > 2;
        if is_fair && ratio > 1.0 {
            missed.push(format!("Ours takes {ratio:.2} times as long as {name}."));
        }
    }
    let [ours, alone, _] = batches.each_ref().map(|way| used(way));
    if ours < alone {
        missed.push(format!("Ours uses {ours:.1} % of the cores, one at a time {alone:.1} %."));
    }
    anyhow::ensure!(!args.check || missed.is_empty(), "{}", missed.join(" "));
    Ok(())
}

fn median_of(batches: &[Batch], figure: impl Fn(&Batch) -> f64) -> f64 {
    median(&mut batches.iter().map(figure).collect::<Vec<_>>())
}

/// The example's worker.
async fn ours(
    folder: &Path,
    films: &[PathBuf],
    outputs: &Path,
    slots: NonZeroU32,
    threads: &AtThatTime,
) -> anyhow::Result<()> {
    let queue = tempfile::tempdir_in(folder)?;
    let db = Db::open(&vedetta_db::Options::new(queue.path().join("jobs")), &[SCHEMA])?;
    let jobs = Arc::new(SqliteJobs::open(db.clone()).await?);
    let asked = films.iter().map(|film| {
        let asked = Asked {
            file: film.clone(),
            outputs: Some(outputs.to_owned()),
            resolutions: Vec::new(),
        };
        NewJob::new(transcode::KIND).queue("bench").payload(&asked)
    });
    jobs.enqueue(&asked.collect::<Result<Vec<_>, _>>()?).await?;
    let worker: Worker = transcode::worker("bench", Tools::default(), Some(slots));
    let working = worker.start(Arc::clone(&jobs) as Arc<dyn Jobs>)?;
    let ended = async {
        let mut ended = 0;
        while ended < FILMS.len() as u64 {
            tokio::time::sleep(Duration::from_millis(5)).await;
            threads.see(u64::from(working.slots().0));
            let counts = jobs.queues().await?;
            ended = counts.iter().map(|queue| queue.done).sum::<u64>();
            anyhow::ensure!(counts.iter().all(|queue| queue.dead == 0), "a film was not made");
        }
        Ok(())
    };
    ended.await?;
    working.stop(Duration::ZERO).await;
    tokio::task::spawn_blocking(move || db.close_blocking()).await?;
    Ok(())
}

/// So many files at once, each with a thread for each core.
async fn plain(
    tools: &Tools,
    films: &[PathBuf],
    outputs: &Path,
    at_once: usize,
    threads: &AtThatTime,
) -> anyhow::Result<()> {
    let permits = Semaphore::new(at_once);
    let each = u32::try_from(std::thread::available_parallelism()?.get())?;
    let made = films.iter().map(|film| {
        let permits = &permits;
        async move {
            let _permit = permits.acquire().await?;
            let source = Arc::new(Media::probe(tools, film).await?);
            for rung in ladder(source.height) {
                threads.add(u64::from(each));
                run_part(tools, &Part::new(&source, rung, outputs), each, &Unseen).await?;
                threads.remove(u64::from(each));
            }
            anyhow::Ok(())
        }
    });
    try_join_all(made).await.map(drop)
}

/// All of it is there.
fn check(films: &[PathBuf], outputs: &Path) -> anyhow::Result<()> {
    let wanted: usize = FILMS.iter().map(|(height, _)| ladder(*height).count()).sum();
    let made = std::fs::read_dir(outputs)?.count();
    anyhow::ensure!(made == wanted, "{made} of {wanted} outputs of {} films", films.len());
    Ok(())
}

/// The CPU time of the children that have ended and been waited for, with theirs.
fn children() -> anyhow::Result<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let (_, after_name) = stat.rsplit_once(')').context("/proc/self/stat has a name in it")?;
    let mut ticks = 0;
    for field in after_name.split_ascii_whitespace().skip(13).take(2) {
        ticks += field.parse::<u64>()?;
    }
    Ok(Duration::from_secs(ticks) / u32::try_from(rustix::param::clock_ticks_per_second())?)
}

#[derive(Default)]
struct AtThatTime {
    now: AtomicU64,
    most: AtomicU64,
}

impl AtThatTime {
    fn see(&self, threads: u64) {
        self.most.fetch_max(threads, Ordering::Relaxed);
    }

    fn add(&self, threads: u64) {
        self.see(self.now.fetch_add(threads, Ordering::Relaxed) + threads);
    }

    fn remove(&self, threads: u64) {
        self.now.fetch_sub(threads, Ordering::Relaxed);
    }
}

struct Unseen;

impl Watch for Unseen {
    fn progress(&self, _: f64, _: Option<&str>) {}

    fn log(&self, _: &str) {}
}
