//! What is measured of a queue in Rust, the same for each. `npm/measure.mjs` is its twin for those in JavaScript.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::time::sleep;

use crate::figures::{millis, quantile, rate};

/// Jobs added at once when the queue is filled, and in bulk.
const FILLED: u64 = 10_000;
const BULK: u64 = 1_000;
/// Callers that add one by one.
const CALLERS: usize = 20;
/// Samples before those that count, which find connections and statements still to be made.
pub(crate) const WARM_UP: u64 = 50;
/// When what is for later is due.
const LATER: Duration = Duration::from_secs(24 * 3600);

/// What to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    /// Jobs that do nothing, until none is left or as many have begun as were asked for.
    Runs,
    /// Jobs added one by one.
    Single,
    /// Jobs added a thousand at a time.
    Bulk,
    /// From the call that adds a job to its start.
    Latency,
}

impl What {
    pub(crate) const ALL: [Self; 4] = [Self::Runs, Self::Single, Self::Bulk, Self::Latency];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Runs => "runs",
            Self::Single => "single",
            Self::Bulk => "bulk",
            Self::Latency => "latency",
        }
    }
}

/// How many of each.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counts {
    /// Jobs, or samples.
    pub(crate) jobs: u64,
    /// Jobs that wait behind them.
    pub(crate) behind: u64,
    /// And for later.
    pub(crate) later: u64,
}

impl Counts {
    pub(crate) fn arguments(self) -> [String; 3] {
        [self.jobs, self.behind, self.later].map(|count| count.to_string())
    }
}

/// Reads what a process was told: what to measure, where, and how many of each.
pub(crate) fn told(mut arguments: impl Iterator<Item = String>) -> Option<(What, String, Counts)> {
    let name = arguments.next()?;
    let what = What::ALL.into_iter().find(|what| what.name() == name)?;
    let place = arguments.next()?;
    let mut count = || arguments.next()?.parse().ok();
    let counts = Counts { jobs: count()?, behind: count()?, later: count()? };
    Some((what, place, counts))
}

/// A job that does nothing.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Nothing {
    pub(crate) id: u64,
}

/// What has begun.
pub(crate) struct Begun {
    count: AtomicU64,
    /// Which, and when, for who wants to know.
    tell: Option<mpsc::UnboundedSender<(u64, Instant)>>,
}

impl Begun {
    /// All that a job does.
    pub(crate) fn job(&self, id: u64) {
        self.count.fetch_add(1, Ordering::Relaxed);
        if let Some(tell) = &self.tell {
            // It is over for whom it is too late.
            let _ = tell.send((id, Instant::now()));
        }
    }

    fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

/// A queue that can be measured.
pub(crate) trait Measured: Clone + Send + Sync + 'static {
    /// Ends its workers when dropped.
    type Working;

    /// Adds jobs: one with a call for one.
    fn add(
        &self,
        ids: Range<u64>,
        later: Option<Duration>,
    ) -> impl Future<Output = anyhow::Result<()>> + Send;

    /// Does what a database would do by itself after so many writes, and then might do meanwhile.
    async fn settle_down(&self) -> anyhow::Result<()>;

    /// Starts its workers.
    async fn start(&self, begun: Arc<Begun>) -> anyhow::Result<Self::Working>;

    /// Whether so many are over, when so many have begun.
    async fn are_over(&self, working: &Self::Working, jobs: u64) -> anyhow::Result<bool>;
}

/// Measures, and prints a figure a line.
pub(crate) async fn measure(
    queue: impl Measured,
    what: What,
    counts: Counts,
) -> anyhow::Result<()> {
    let figures = match what {
        What::Runs => vec![runs(queue, counts).await?],
        What::Single => vec![single(queue, counts).await?],
        What::Bulk => vec![bulk(queue, counts).await?],
        What::Latency => latency(queue, counts).await?,
    };
    figures.iter().for_each(|figure| println!("{figure}"));
    Ok(())
}

async fn runs(queue: impl Measured, counts: Counts) -> anyhow::Result<f64> {
    let Counts { jobs, behind, later } = counts;
    let due = jobs + behind;
    fill(&queue, 0..due, None).await?;
    fill(&queue, due..due + later, Some(LATER)).await?;
    queue.settle_down().await?;

    let begun = Arc::new(Begun { count: AtomicU64::new(0), tell: None });
    let start = Instant::now();
    let working = queue.start(Arc::clone(&begun)).await?;
    while begun.count() < jobs {
        sleep(Duration::from_millis(1)).await;
    }
    // What waits behind them is begun before they are all over.
    while behind == 0 && !queue.are_over(&working, jobs).await? {
        sleep(Duration::from_millis(1)).await;
    }
    let took = start.elapsed();
    let ran = begun.count();
    anyhow::ensure!(behind > 0 || ran == jobs, "{ran} jobs ran, of {jobs}");
    Ok(rate(jobs, took))
}

/// Has jobs wait.
pub(crate) async fn fill(
    queue: &impl Measured,
    ids: Range<u64>,
    later: Option<Duration>,
) -> anyhow::Result<()> {
    for ids in batches(ids, FILLED) {
        queue.add(ids, later).await?;
    }
    Ok(())
}

/// Has jobs wait for later, with numbers from `first` on.
async fn put_off(queue: &impl Measured, first: u64, later: u64) -> anyhow::Result<()> {
    if later > 0 {
        fill(queue, first..first + later, Some(LATER)).await?;
        queue.settle_down().await?;
    }
    Ok(())
}

async fn single(queue: impl Measured, counts: Counts) -> anyhow::Result<f64> {
    let Counts { jobs, later, .. } = counts;
    put_off(&queue, jobs, later).await?;
    let next = Arc::new(AtomicU64::new(0));
    let began = Instant::now();
    let callers = (0..CALLERS).map(|_| {
        let (queue, next) = (queue.clone(), Arc::clone(&next));
        tokio::spawn(async move {
            loop {
                let id = next.fetch_add(1, Ordering::Relaxed);
                if id >= jobs {
                    return anyhow::Ok(());
                }
                queue.add(id..id + 1, None).await?;
            }
        })
    });
    let callers: Vec<_> = callers.collect();
    for caller in callers {
        caller.await??;
    }
    Ok(rate(jobs, began.elapsed()))
}

async fn bulk(queue: impl Measured, counts: Counts) -> anyhow::Result<f64> {
    let Counts { jobs, later, .. } = counts;
    put_off(&queue, jobs, later).await?;
    let began = Instant::now();
    for ids in batches(0..jobs, BULK) {
        queue.add(ids, None).await?;
    }
    Ok(rate(jobs, began.elapsed()))
}

/// In milliseconds from a call, and from its return, to the start of the job: p50, p99, p50, p99.
async fn latency(queue: impl Measured, counts: Counts) -> anyhow::Result<Vec<f64>> {
    let samples = counts.jobs;
    put_off(&queue, samples + WARM_UP, counts.later).await?;
    let (tell, mut starts) = mpsc::unbounded_channel();
    let begun = Arc::new(Begun { count: AtomicU64::new(0), tell: Some(tell) });
    let _working = queue.start(begun).await?;
    let (mut from_call, mut from_return) = (Vec::new(), Vec::new());
    for id in 0..samples + WARM_UP {
        sleep(pause()).await;
        let called = Instant::now();
        queue.add(id..id + 1, None).await?;
        let returned = Instant::now();
        let (started, at) = starts.recv().await.expect("the workers have the other end");
        anyhow::ensure!(started == id, "{started} ran instead of {id}");
        if id >= WARM_UP {
            from_call.push(at - called);
            from_return.push(at.saturating_duration_since(returned));
        }
    }
    Ok([from_call, from_return].map(quantiles).concat())
}

/// Between two samples nothing is to do.
pub(crate) fn pause() -> Duration {
    Duration::from_micros(fastrand::u64(5_000..15_000))
}

pub(crate) fn quantiles(mut times: Vec<Duration>) -> Vec<f64> {
    [0.5, 0.99].map(|share| millis(quantile(&mut times, share))).to_vec()
}

fn batches(all: Range<u64>, size: u64) -> impl Iterator<Item = Range<u64>> {
    let step = usize::try_from(size).expect("a batch fits into memory");
    let end = all.end;
    all.step_by(step).map(move |first| first..end.min(first + size))
}
