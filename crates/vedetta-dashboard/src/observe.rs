//! Jobs as they pass through this server, seen on their way.
//!
//! ```text
//!  API, workers ──► Observed ──► ledger
//!                      │ which jobs were touched ──► who listens
//!                      │ how attempts ended, and after how long ──► statistics
//!                      └ who took jobs, with how many slots ──► capacity
//! ```
//!
//! What other processes do with the same database does not pass here; who listens looks there, too.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::Notify;
use vedetta_core::Spans;
use vedetta_core::queue::{Kept, Settled, Woken};
use vedetta_jobs::{
    Asking, Change, Claim, Ear, Enqueued, Fate, Filter, Given, Job, JobId, Jobs, JobsError, Ledger,
    Mode, NewJob, Note, Page, QueueCounts, Taken, Wanted,
};

use crate::stats::{Depth, Ended, Read, Span, Stats, Totals};

/// Jobs that were taken and not yet settled, of which it is known since when.
const HELD: usize = 65_536;
/// Touched jobs that wait to be looked at.
const TOUCHED: usize = 256;
/// Jobs that are looked up in a second to see how long they waited.
const SAMPLES: usize = 20;
/// Workers that are remembered.
const WORKERS: usize = 1000;
/// Ends of jobs that were taken before this server started are looked up, so many of one call.
const LOOKED_UP: usize = 16;
/// Who was not heard of for so long is gone.
const SILENT: Duration = Duration::from_secs(60);

/// A ledger that is seen at work. Whoever works in this process is given this one, so that it is seen, too.
pub struct Observed {
    ledger: Arc<dyn Ledger>,
    /// All that is settled passes here.
    alone: bool,
    book: Mutex<Book>,
    /// Rung when something was touched while somebody listens.
    pub(crate) bell: Notify,
    started: (Instant, u64),
    spans: OnceLock<Arc<dyn Spans>>,
}

#[derive(Default)]
struct Book {
    stats: Stats,
    held: HashMap<Claim, Held>,
    workers: HashMap<(Arc<str>, Arc<str>), Seen>,
    /// Somebody listens.
    touched: Option<Touched>,
    /// Of which it is not known how long they waited.
    samples: Vec<JobId>,
    /// What was over when it was last counted, by queue; nothing before the first time.
    over: Option<BTreeMap<String, (u64, u64)>>,
}

struct Held {
    queue: Arc<str>,
    worker: Arc<str>,
    since: Instant,
}

struct Seen {
    capacity: u32,
    holds: u32,
    at: Instant,
}

/// Jobs that changed; if there were too many, that there were more.
#[derive(Default)]
pub(crate) struct Touched {
    pub(crate) ids: BTreeSet<JobId>,
    pub(crate) more: bool,
}

/// A worker that took jobs here.
#[derive(Debug, Clone)]
pub(crate) struct SeenWorker {
    pub(crate) name: Arc<str>,
    pub(crate) queue: Arc<str>,
    pub(crate) capacity: u32,
    pub(crate) holds: u32,
    pub(crate) silent: Duration,
}

impl Observed {
    /// Where other processes may settle jobs, too: what is done and dead is then counted by how the numbers of
    /// those that are kept change.
    pub fn new(ledger: Arc<dyn Ledger>) -> Arc<Self> {
        Self::with(ledger, false)
    }

    /// Where all that becomes of jobs passes here: each end is counted when it is durable.
    pub fn alone(ledger: Arc<dyn Ledger>) -> Arc<Self> {
        Self::with(ledger, true)
    }

    fn with(ledger: Arc<dyn Ledger>, alone: bool) -> Arc<Self> {
        let epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let started = (Instant::now(), u64::try_from(epoch.as_millis()).unwrap_or(0));
        let (book, bell, spans) = (Mutex::default(), Notify::new(), OnceLock::new());
        Arc::new(Self { ledger, alone, book, bell, started, spans })
    }

    /// From now on it is told that jobs were asked for, as spans of their traces.
    pub fn tell(&self, spans: Arc<dyn Spans>) {
        // Whoever was first stays.
        let _ = self.spans.set(spans);
    }

    pub(crate) fn spans(&self) -> Option<&dyn Spans> {
        self.spans.get().map(|spans| &**spans)
    }

    /// Seconds since 1970, by a clock that does not jump.
    fn second(&self) -> u64 {
        let (began, epoch) = self.started;
        (epoch + u64::try_from(began.elapsed().as_millis()).unwrap_or(0)) / 1000
    }

    /// From now on what is touched is remembered, or no longer.
    pub(crate) fn listen(&self, on: bool) {
        self.book.lock().touched = on.then(Touched::default);
    }

    /// What was touched since the last call.
    pub(crate) fn touched(&self) -> Touched {
        let mut book = self.book.lock();
        book.touched.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn touch(&self, ids: impl IntoIterator<Item = JobId>) {
        let mut book = self.book.lock();
        let Some(touched) = &mut book.touched else { return };
        let mut ids = ids.into_iter().peekable();
        if ids.peek().is_none() {
            return;
        }
        for id in ids {
            if touched.ids.len() < TOUCHED {
                touched.ids.insert(id);
            } else {
                touched.more = true;
                // The newest are of most interest.
                touched.ids.pop_first();
                touched.ids.insert(id);
            }
        }
        drop(book);
        self.bell.notify_one();
    }

    fn took(&self, wanted: &Wanted<'_>, jobs: &[Given]) {
        let now = Instant::now();
        let mut book = self.book.lock();
        let key = (Arc::from(wanted.queue), Arc::from(wanted.worker));
        let (queue, worker) = (Arc::clone(&key.0), Arc::clone(&key.1));
        if book.workers.len() >= WORKERS {
            book.workers.retain(|_, seen| seen.at.elapsed() < SILENT);
        }
        if book.workers.len() < WORKERS || book.workers.contains_key(&key) {
            let seen = book.workers.entry(key).or_insert(Seen { capacity: 0, holds: 0, at: now });
            seen.capacity = wanted.capacity;
            seen.at = now;
            seen.holds = seen.holds.saturating_add(u32::try_from(jobs.len()).unwrap_or(u32::MAX));
        }
        for given in jobs {
            if book.held.len() >= HELD {
                const HOUR: Duration = Duration::from_secs(3600);
                book.held.retain(|_, held| held.since.elapsed() < HOUR);
            }
            if book.held.len() < HELD {
                let (queue, worker) = (Arc::clone(&queue), Arc::clone(&worker));
                book.held.insert(given.claim, Held { queue, worker, since: now });
            }
            if book.samples.len() < SAMPLES {
                book.samples.push(given.claim.id);
            }
        }
    }

    /// A job is no longer held here.
    fn let_go(book: &mut Book, claim: Claim) -> Option<Held> {
        let held = book.held.remove(&claim)?;
        let key = (Arc::clone(&held.queue), Arc::clone(&held.worker));
        if let Some(seen) = book.workers.get_mut(&key) {
            seen.holds = seen.holds.saturating_sub(1);
            seen.at = Instant::now();
        }
        Some(held)
    }

    /// Counts an end.
    fn ended(&self, queue: &str, ran: Option<Duration>, fate: &Fate) {
        let how = match fate {
            Fate::Done { .. } => Ended::Done,
            Fate::Again { .. } | Fate::Dead { .. } => Ended::Failed,
            Fate::Snooze(_) | Fate::Released => return,
        };
        let second = self.second();
        let stats = &mut self.book.lock().stats;
        if self.alone || matches!(fate, Fate::Again { .. }) {
            stats.ended(queue, second, how, 1);
        }
        if let Some(ran) = ran {
            stats.ran(queue, second, ran);
        }
    }

    /// How much is in the queues now.
    pub(crate) fn counted(&self, queues: &[QueueCounts]) {
        let second = self.second();
        let mut book = self.book.lock();
        for queue in queues {
            let depth = Depth { ready: queue.ready, running: queue.running, oldest: queue.oldest };
            book.stats.holds(&queue.name, second, depth);
        }
        if !self.alone {
            let now = queues.iter().map(|queue| (queue.name.clone(), (queue.done, queue.dead)));
            // What was over before the first look did not end while this server was there.
            if let Some(before) = book.over.replace(now.collect()) {
                for queue in queues {
                    let (done, dead) = before.get(&queue.name).copied().unwrap_or_default();
                    // Fewer are left where some were removed.
                    let done = queue.done.saturating_sub(done);
                    let dead = queue.dead.saturating_sub(dead);
                    book.stats.ended(&queue.name, second, Ended::Done, done);
                    book.stats.ended(&queue.name, second, Ended::Failed, dead);
                }
            }
        }
        book.workers.retain(|_, seen| seen.at.elapsed() < SILENT);
    }

    /// Looks up how long some of those that were taken lately had waited.
    pub(crate) async fn sample(&self) {
        let ids = std::mem::take(&mut self.book.lock().samples);
        for id in ids {
            let Ok(Some(job)) = self.ledger.job(id).await else { continue };
            let due = job.run_at.max(job.queued_at);
            if let Some(waited) = job.started_at.and_then(|began| began.duration_since(due).ok()) {
                let second = self.second();
                self.book.lock().stats.waited(&job.queue, second, waited);
            }
        }
    }

    pub(crate) fn read(&self, span: Span, only: Option<&str>) -> Read {
        let second = self.second();
        let steps = self.book.lock().stats.steps(span, second, only);
        steps.read(self.started.1)
    }

    /// For how long it has been counting.
    pub(crate) fn age(&self) -> Duration {
        self.started.0.elapsed()
    }

    pub(crate) fn totals(&self) -> BTreeMap<String, Totals> {
        self.book.lock().stats.totals.clone()
    }

    /// What ended in the last minute, in a queue or in all: done, and failed.
    pub(crate) fn last_minute(&self, queue: Option<&str>) -> (u64, u64) {
        let second = self.second();
        self.book.lock().stats.last_minute(queue, second)
    }

    /// Who took jobs here and was heard of lately, in the order of queues and names.
    pub(crate) fn workers(&self) -> Vec<SeenWorker> {
        let book = self.book.lock();
        let seen = book.workers.iter().filter(|(_, seen)| seen.at.elapsed() < SILENT);
        let mut workers: Vec<SeenWorker> = seen
            .map(|((queue, name), seen)| SeenWorker {
                name: Arc::clone(name),
                queue: Arc::clone(queue),
                capacity: seen.capacity,
                holds: seen.holds,
                silent: seen.at.elapsed(),
            })
            .collect();
        workers.sort_by(|a, b| (&a.queue, &a.name).cmp(&(&b.queue, &b.name)));
        workers
    }
}

#[async_trait]
impl Jobs for Observed {
    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, JobsError> {
        let enqueued = match self.spans() {
            None => self.ledger.enqueue(jobs).await?,
            Some(spans) => {
                let mut jobs = jobs.to_owned();
                let asking: Vec<_> = jobs.iter_mut().map(|job| Asking::begin(job, spans)).collect();
                let enqueued = self.ledger.enqueue(&jobs).await?;
                for ((asking, job), enqueued) in asking.into_iter().zip(&jobs).zip(&enqueued) {
                    asking.end(job, *enqueued, spans);
                }
                enqueued
            }
        };
        self.touch(enqueued.iter().map(|enqueued| enqueued.id));
        Ok(enqueued)
    }

    async fn take(&self, wanted: &Wanted<'_>) -> Result<Taken, JobsError> {
        let taken = self.ledger.take(wanted).await?;
        self.took(wanted, &taken.jobs);
        self.touch(taken.jobs.iter().map(|given| given.claim.id));
        Ok(taken)
    }

    async fn keep(&self, held: &[(Claim, Note)]) -> Result<Vec<Kept>, JobsError> {
        let kept = self.ledger.keep(held).await?;
        {
            let mut book = self.book.lock();
            for ((claim, _), kept) in held.iter().zip(&kept) {
                if *kept == Kept::Lost {
                    Self::let_go(&mut book, *claim);
                } else if let Some(held) = book.held.get(claim) {
                    let key = (Arc::clone(&held.queue), Arc::clone(&held.worker));
                    if let Some(seen) = book.workers.get_mut(&key) {
                        seen.at = Instant::now();
                    }
                }
            }
        }
        self.touch(held.iter().filter(|(_, note)| !note.is_empty()).map(|(claim, _)| claim.id));
        Ok(kept)
    }

    async fn settle(&self, ended: &[(Claim, Fate)]) -> Result<Vec<Settled>, JobsError> {
        let settled = self.ledger.settle(ended).await?;
        let mut unknown = 0;
        for ((claim, fate), settled) in ended.iter().zip(&settled) {
            let held = Self::let_go(&mut self.book.lock(), *claim);
            if *settled == Settled::Stale {
                continue;
            }
            if let Some(held) = held {
                self.ended(&held.queue, Some(held.since.elapsed()), fate);
            } else if unknown < LOOKED_UP {
                unknown += 1;
                if let Ok(Some(job)) = self.ledger.job(claim.id).await {
                    self.ended(&job.queue, None, fate);
                }
            }
        }
        self.touch(ended.iter().map(|(claim, _)| claim.id));
        Ok(settled)
    }

    async fn woken(&self, queue: &str, ear: &Ear) -> Woken {
        self.ledger.woken(queue, ear).await
    }
}

#[async_trait]
impl Ledger for Observed {
    async fn job(&self, id: JobId) -> Result<Option<Job>, JobsError> {
        self.ledger.job(id).await
    }

    async fn list(
        &self,
        filter: &Filter,
        before: Option<JobId>,
        limit: u32,
    ) -> Result<Page, JobsError> {
        self.ledger.list(filter, before, limit).await
    }

    async fn retry(&self, id: JobId) -> Result<Change, JobsError> {
        let change = self.ledger.retry(id).await?;
        self.touch([id]);
        Ok(change)
    }

    async fn cancel(&self, id: JobId) -> Result<Change, JobsError> {
        let change = self.ledger.cancel(id).await?;
        self.touch([id]);
        Ok(change)
    }

    async fn delete(&self, id: JobId) -> Result<Change, JobsError> {
        let change = self.ledger.delete(id).await?;
        self.touch([id]);
        Ok(change)
    }

    async fn queues(&self) -> Result<Vec<QueueCounts>, JobsError> {
        self.ledger.queues().await
    }

    async fn set_mode(&self, queue: &str, mode: Mode) -> Result<(), JobsError> {
        self.ledger.set_mode(queue, mode).await?;
        self.bell.notify_one();
        Ok(())
    }

    async fn prune(&self, done: Duration, dead: Duration) -> Result<u64, JobsError> {
        self.ledger.prune(done, dead).await
    }

    async fn tick(
        &self,
        name: &str,
        at: SystemTime,
        job: &NewJob,
    ) -> Result<Option<Enqueued>, JobsError> {
        let ticked = match self.spans() {
            None => self.ledger.tick(name, at, job).await?,
            Some(spans) => {
                let mut job = job.clone();
                let asking = Asking::begin(&mut job, spans);
                let ticked = self.ledger.tick(name, at, &job).await?;
                if let Some(enqueued) = ticked {
                    asking.end(&job, enqueued, spans);
                }
                ticked
            }
        };
        self.touch(ticked.iter().map(|enqueued| enqueued.id));
        Ok(ticked)
    }

    async fn last_tick(&self, name: &str) -> Result<Option<SystemTime>, JobsError> {
        self.ledger.last_tick(name).await
    }
}
