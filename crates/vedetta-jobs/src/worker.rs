//! Works a queue of jobs: the same on every backend.
//!
//! ```text
//!  Jobs ──take──► Work ──► your handler ──► Outcome ──settle──► Jobs
//!                   │ progress, log ──keep──────────────────────▲
//!                   └ slots(cost): parts of a job, side by side
//! ```
//!
//! A job takes as many slots as it costs, or none, if its handler is made of parts that take their own. What
//! it tells while it runs is stored with the next prolonging of its lease, which it hastens.

use std::future::Future;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use hashbrown::{HashMap, HashSet};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, broadcast};
use tokio::time::{Instant, sleep_until, timeout};
use vedetta_core::queue::{End, Handed, Kept, Settled, Woken};
use vedetta_core::{
    Backoff, Command, Failure, Handler, Queue, QueueError, RunEvent, Spans, Trace, explain, queue,
    slots::capacity_of,
};
use vedetta_runtime::{Ear, Hold, Limits, PullStatus, Puller, Pulling, Room};

use crate::job::{
    Claim, Fate, Given, JobId, JobsError, Json, LARGEST, LONGEST_TEXT, Note, check_name, shortened,
    tail,
};
use crate::port::{Jobs, Wanted};
use crate::traced::Attempt;

/// What a handler may fail with.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The waits between tries unless said otherwise: a second, then twice as long each time, up to ten minutes.
pub const BACKOFF: Backoff =
    Backoff { first: Duration::from_secs(1), most: Duration::from_secs(600), jitter: 0.2 };

/// A job that nobody here can do waits so many times as long as one that failed: there may soon be somebody who can.
const UNKNOWN: u32 = 60;

/// And at most so long.
const UNKNOWN_MOST: Duration = Duration::from_secs(3600);

/// How long a job is a worker's without a sign of life of it.
pub const LEASE: Duration = Duration::from_secs(30);

/// A queue is looked at after so long without a wake-up, unless said otherwise.
const POLL: Duration = Duration::from_secs(1);

/// Events a slow reader of [`Working::events`] may be behind before it misses some.
const EVENTS_KEPT: usize = 1024;

/// After so many tries to tell what jobs said last their ends are stored without it.
const IN_VAIN: u32 = 5;

/// The log is told of a job that failed this often at most.
const COMPLAIN: Duration = Duration::from_secs(1);

/// What is told of a job is stored this often at most.
const TELL: Duration = Duration::from_millis(500);

/// What came of a job.
#[derive(Debug, Clone)]
pub enum Outcome {
    /// It is done, with this.
    Done(Option<Json>),
    /// Try it later; this attempt does not count.
    Snooze(Duration),
    /// It failed, and there is no point in trying it again.
    Dead(String),
    /// Its handler has settled it itself, with the backend's `done_in`.
    Settled,
}

impl From<()> for Outcome {
    fn from((): ()) -> Self {
        Self::Done(None)
    }
}

impl From<Json> for Outcome {
    fn from(result: Json) -> Self {
        Self::Done(Some(result))
    }
}

pub(crate) type Running = Pin<Box<dyn Future<Output = Result<Outcome, Failure>> + Send>>;
pub(crate) type Run = Arc<dyn Fn(Work) -> Running + Send + Sync>;

/// What does the jobs of a kind.
#[derive(Clone)]
struct Doing {
    run: Run,
    manner: Manner,
    timeout: Option<Duration>,
}

/// How a handler deals with slots and time.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Manner {
    /// A job takes its slots, and is dropped when its time is up.
    Whole,
    /// The parts of a job take slots.
    InParts,
    /// It sees to its [limit](Work::limit) itself, so that what it started has ended when the slots are free.
    KeepsTime,
}

/// Works a queue with the handlers it has.
#[derive(Clone)]
pub struct Worker {
    queue: String,
    name: String,
    capacity: NonZeroU32,
    lease: Duration,
    heartbeat: Option<Duration>,
    backoff: Backoff,
    tries: u32,
    rest: Duration,
    poll: Duration,
    spans: Option<Arc<dyn Spans>>,
    doing: HashMap<String, Doing>,
}

impl Worker {
    /// The slots of this machine: see [`capacity_of`].
    pub fn width() -> NonZeroU32 {
        let cores = std::thread::available_parallelism();
        capacity_of(cores.unwrap_or(std::num::NonZeroUsize::MIN))
    }

    /// A worker of this queue, with as many slots as the machine has.
    pub fn new(queue: impl Into<String>) -> Self {
        Self {
            queue: queue.into(),
            name: format!("{}-{:08x}", std::process::id(), fastrand::u32(..)),
            capacity: Self::width(),
            lease: LEASE,
            heartbeat: None,
            backoff: BACKOFF,
            tries: u32::MAX,
            rest: Duration::ZERO,
            poll: POLL,
            spans: None,
            doing: HashMap::new(),
        }
    }

    /// The same under this name, which nobody else has.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// The same with so many slots.
    #[must_use]
    pub fn capacity(mut self, capacity: NonZeroU32) -> Self {
        self.capacity = capacity;
        self
    }

    /// The same with leases of this length: so long after it went away others may have its jobs.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// The same with a sign of life this often: a third of the lease at most, which it is unless said.
    #[must_use]
    pub fn heartbeat(mut self, heartbeat: Duration) -> Self {
        self.heartbeat = Some(heartbeat);
        self
    }

    /// The same with other waits between tries.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = backoff;
        self
    }

    /// The same, and what failed so often here is dead, even if its job would allow more.
    #[must_use]
    pub fn tries(mut self, tries: NonZeroU32) -> Self {
        self.tries = tries.get();
        self
    }

    /// The same with a rest after each job, during which it takes nothing. With one it works on one job at a
    /// time.
    #[must_use]
    pub fn rest(mut self, rest: Duration) -> Self {
        self.rest = rest;
        self
    }

    /// The same, and the queue is looked at after so long without a wake-up: what those that were lost would have
    /// told waits until then.
    #[must_use]
    pub fn poll(mut self, poll: Duration) -> Self {
        self.poll = poll;
        self
    }

    /// The same, and what becomes of jobs here is told as spans of their traces.
    #[must_use]
    pub fn spans(mut self, spans: Arc<dyn Spans>) -> Self {
        self.spans = Some(spans);
        self
    }

    /// What it works.
    pub fn queue(&self) -> &str {
        &self.queue
    }

    /// The slots it would have alone.
    pub fn slots(&self) -> NonZeroU32 {
        self.capacity
    }

    /// The same with a handler for a kind of jobs, whose payload is a `P`.
    #[must_use]
    pub fn handler<P, F, O, E>(
        self,
        kind: impl Into<String>,
        handler: impl Fn(Work, P) -> F + Send + Sync + 'static,
    ) -> Self
    where
        P: DeserializeOwned + Send + 'static,
        F: Future<Output = Result<O, E>> + Send + 'static,
        O: Into<Outcome>,
        E: Into<BoxError>,
    {
        self.add(kind.into(), Manner::Whole, typed(handler))
    }

    /// The same with a handler whose jobs take no slots themselves: their parts do, see [`Work::slots`].
    #[must_use]
    pub fn handler_in_parts<P, F, O, E>(
        self,
        kind: impl Into<String>,
        handler: impl Fn(Work, P) -> F + Send + Sync + 'static,
    ) -> Self
    where
        P: DeserializeOwned + Send + 'static,
        F: Future<Output = Result<O, E>> + Send + 'static,
        O: Into<Outcome>,
        E: Into<BoxError>,
    {
        self.add(kind.into(), Manner::InParts, typed(handler))
    }

    /// The same, and an attempt at a job of this kind may take so long, unless the job says otherwise.
    #[must_use]
    pub fn timeout(mut self, kind: &str, timeout: Duration) -> Self {
        if let Some(doing) = self.doing.get_mut(kind) {
            doing.timeout = Some(timeout);
        }
        self
    }

    /// The same for every kind that has no such limit yet.
    #[must_use]
    pub fn timeout_of_all(mut self, timeout: Duration) -> Self {
        self.doing.values_mut().for_each(|doing| doing.timeout = doing.timeout.or(Some(timeout)));
        self
    }

    pub(crate) fn add(mut self, kind: String, manner: Manner, run: Run) -> Self {
        self.doing.insert(kind, Doing { run, manner, timeout: None });
        self
    }

    /// Works `jobs` until stopped.
    pub fn start(self, jobs: Arc<dyn Jobs>) -> Result<Working, JobsError> {
        let room = Room::new(self.capacity);
        self.start_within(room, jobs)
    }

    /// The same with slots that are shared with workers of other queues.
    pub fn start_within(
        mut self,
        room: Arc<Room>,
        jobs: Arc<dyn Jobs>,
    ) -> Result<Working, JobsError> {
        check_name("queue", &self.queue)?;
        check_name("worker", &self.name)?;
        self.capacity = NonZeroU32::new(room.capacity()).unwrap_or(self.capacity);
        let limits = Limits { capacity: self.capacity, timeout: None };
        let beat = self.heartbeat.unwrap_or(self.lease / 3);
        if beat.is_zero() || beat > self.lease / 3 {
            return Err(JobsError::Invalid(format!(
                "a heartbeat every {beat:?} would lose jobs that run: give a third of the lease, {:?}, or less",
                self.lease
            )));
        }
        let puller = Puller { limits, lease: self.lease, beat, poll: self.poll };
        let (name, queue) = (self.name.clone(), self.queue.clone());
        let events = broadcast::Sender::new(EVENTS_KEPT);
        let running = Arc::<Mutex<HashSet<JobId>>>::default();
        let line = Arc::new(Line {
            jobs,
            worker: self,
            room: Arc::clone(&room),
            news: Arc::default(),
            ear: Ear::default(),
            told_at: Mutex::new(None),
            pace: Mutex::default(),
            running: Arc::clone(&running),
            complaints: Mutex::default(),
            in_vain: AtomicU32::new(0),
            telling: tokio::sync::Mutex::default(),
            events: events.clone(),
        });
        let pulling = puller.start_within(&room, Feed(Arc::clone(&line)), Does(line));
        Ok(Working { name, queue, room, running, events, pulling })
    }
}

fn typed<P, F, O, E>(handler: impl Fn(Work, P) -> F + Send + Sync + 'static) -> Run
where
    P: DeserializeOwned + Send + 'static,
    F: Future<Output = Result<O, E>> + Send + 'static,
    O: Into<Outcome>,
    E: Into<BoxError>,
{
    Arc::new(move |work: Work| match work.payload::<P>() {
        Ok(payload) => {
            let running = handler(work, payload);
            Box::pin(async move {
                let ended = running.await.map(Into::into);
                ended.map_err(|error| Failure::Error(explain(&*error.into())))
            })
        }
        // It will not become another.
        Err(error) => Box::pin(async move {
            Ok(Outcome::Dead(format!("the payload is not what its handler takes: {error}")))
        }),
    })
}

/// A worker at work. Dropped, it ends at once, and what it held comes back when its leases lapse.
pub struct Working {
    name: String,
    queue: String,
    room: Arc<Room>,
    running: Arc<Mutex<HashSet<JobId>>>,
    events: broadcast::Sender<JobEvent>,
    pulling: Pulling,
}

/// What happens to a job, in this worker.
#[derive(Debug, Clone)]
pub struct JobEvent {
    /// As it was handed out.
    pub job: Arc<Given>,
    /// What.
    pub event: RunEvent,
}

impl Working {
    /// What happens from now on. A reader that is more than 1,024 events behind misses some and is told.
    pub fn events(&self) -> broadcast::Receiver<JobEvent> {
        self.events.subscribe()
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it works.
    pub fn queue(&self) -> &str {
        &self.queue
    }

    /// What it is at.
    pub fn status(&self) -> PullStatus {
        self.pulling.status()
    }

    /// Slots in use, of how many.
    pub fn slots(&self) -> (u32, u32) {
        let capacity = self.room.capacity();
        (capacity - self.room.free(), capacity)
    }

    /// The jobs that run.
    pub fn running(&self) -> Vec<JobId> {
        let mut running: Vec<JobId> = self.running.lock().iter().copied().collect();
        running.sort_unstable();
        running
    }

    /// Tells it to pause, to resume or to stop.
    pub async fn tell(&self, command: Command) {
        self.pulling.tell(command).await;
    }

    /// Takes nothing more, gives back what was not begun, lets jobs end within `grace`, ends the rest, and
    /// settles it all. How many had to be ended.
    pub async fn stop(self, grace: Duration) -> usize {
        self.pulling.stop(grace).await
    }
}

/// A job, for its handler. Dropped with it when its time is up, it was called off or its lease is lost.
#[derive(Clone)]
pub struct Work {
    given: Arc<Given>,
    notes: Arc<Notes>,
    room: Arc<Room>,
    attempt: Option<Arc<Attempt>>,
    limit: Option<Duration>,
}

impl Work {
    /// Which job.
    pub fn id(&self) -> JobId {
        self.given.claim.id
    }

    /// The proof that it is this worker's, for the backend's `done_in`.
    pub fn claim(&self) -> Claim {
        self.given.claim
    }

    /// What is to be done.
    pub fn kind(&self) -> &str {
        &self.given.kind
    }

    /// The how manieth attempt it is, from 1.
    pub fn attempt(&self) -> u32 {
        self.given.attempt
    }

    /// How long this attempt may take, if that is limited.
    pub fn limit(&self) -> Option<Duration> {
        self.limit
    }

    /// How many slots it takes: what it costs, but no more than there are.
    pub fn cost(&self) -> u32 {
        self.given.cost.min(self.room.capacity())
    }

    /// What it is given.
    pub fn payload<P: DeserializeOwned>(&self) -> serde_json::Result<P> {
        serde_json::from_str(self.given.payload.get())
    }

    /// The same, as it was written.
    pub fn json(&self) -> &str {
        self.given.payload.get()
    }

    /// To find it by.
    pub fn tags(&self) -> &[String] {
        &self.given.tags
    }

    /// The place in a trace that what it does is below of, for what it asks of others.
    pub fn trace(&self) -> Option<Trace> {
        self.attempt.as_ref().map(|attempt| attempt.place()).or(self.given.trace)
    }

    /// How much of it is done, from 0 to 1.
    pub fn progress(&self, progress: f32) {
        if progress.is_finite() {
            self.notes.tell(|note| note.progress = Some(progress.clamp(0.0, 1.0)));
        }
    }

    /// What it is at.
    pub fn message(&self, message: &str) {
        self.notes.tell(|note| note.message = Some(shortened(message, LONGEST_TEXT)));
    }

    /// A line for its log.
    pub fn log(&self, line: &str) {
        self.notes.tell(|note| note.log = tail(&note.log, &format!("{line}\n")));
    }

    /// Waits for so many slots, for a part of it. Only for a handler that is made of parts.
    pub async fn slots(&self, cost: u32) -> Hold {
        self.room.hold(cost).await
    }

    /// All slots there are.
    pub fn capacity(&self) -> u32 {
        self.room.capacity()
    }
}

/// What there is to tell of a job that was not told yet.
struct Notes {
    note: Mutex<Note>,
    news: Arc<News>,
}

/// Whether anybody has something to tell.
#[derive(Default)]
struct News {
    is_there: AtomicBool,
    bell: Notify,
}

impl Notes {
    fn tell(&self, change: impl FnOnce(&mut Note)) {
        change(&mut self.note.lock());
        if !self.news.is_there.swap(true, Ordering::Relaxed) {
            self.news.bell.notify_one();
        }
    }

    fn is_any(&self) -> bool {
        !self.note.lock().is_empty()
    }

    fn take(&self) -> Note {
        std::mem::take(&mut self.note.lock())
    }

    /// It could not be told: what was told since is newer.
    fn put_back(&self, old: Note) {
        self.note.lock().add_older(old);
    }
}

/// What is being told. It is put back unless it was, also if nobody waits for that any more.
struct Untold<'h> {
    told: Vec<(Claim, Note)>,
    by: Vec<&'h Notes>,
}

impl<'h> Untold<'h> {
    fn of(held: impl Iterator<Item = &'h Holding>) -> Self {
        let take = |held: &'h Holding| ((held.given.claim, held.notes.take()), &*held.notes);
        let (told, by) = held.map(take).unzip();
        Self { told, by }
    }

    async fn tell(mut self, jobs: &dyn Jobs) -> Result<Vec<Kept>, JobsError> {
        let kept = jobs.keep(&self.told).await?;
        self.told.clear();
        Ok(kept)
    }
}

impl Drop for Untold<'_> {
    fn drop(&mut self) {
        for (notes, (_, note)) in self.by.iter().zip(self.told.drain(..)) {
            notes.put_back(note);
        }
    }
}

/// What the queue and the handler share.
struct Line {
    jobs: Arc<dyn Jobs>,
    worker: Worker,
    room: Arc<Room>,
    news: Arc<News>,
    ear: Ear,
    told_at: Mutex<Option<Instant>>,
    pace: Mutex<Pace>,
    running: Arc<Mutex<HashSet<JobId>>>,
    complaints: Mutex<Complaints>,
    /// How often in a row what jobs said last could not be told.
    in_vain: AtomicU32,
    /// What is said of jobs is said in turn: a log that is written twice at once loses lines.
    telling: tokio::sync::Mutex<()>,
    events: broadcast::Sender<JobEvent>,
}

/// What the log is told of jobs that failed: of one a second, and how many more there were.
#[derive(Default)]
struct Complaints {
    last: Option<Instant>,
    untold: u64,
}

impl Complaints {
    /// How many were not told before the next one, if that is to be.
    fn next(&mut self) -> Option<u64> {
        if self.last.is_some_and(|last| last.elapsed() < COMPLAIN) {
            self.untold += 1;
            return None;
        }
        self.last = Some(Instant::now());
        Some(std::mem::take(&mut self.untold))
    }
}

/// For those who rest between jobs.
#[derive(Default)]
struct Pace {
    /// Those that are gone are over.
    held: Vec<Weak<Given>>,
    ended: Option<Instant>,
}

impl Line {
    /// How long to take nothing yet.
    fn rests(&self) -> Option<Duration> {
        let rest = self.worker.rest;
        if rest.is_zero() {
            return None;
        }
        let mut pace = self.pace.lock();
        pace.held.retain(|given| given.strong_count() > 0);
        if !pace.held.is_empty() {
            return Some(rest);
        }
        let left = rest.saturating_sub(pace.ended?.elapsed());
        (!left.is_zero()).then_some(left)
    }

    fn doing(&self, kind: &str) -> Option<&Doing> {
        self.worker.doing.get(kind)
    }

    /// Tells the log that a job failed, without the reason: there may be a secret in that.
    fn log(&self, given: &Given, fate: Option<&Fate>, answer: Settled) {
        let (Some(Fate::Dead { .. } | Fate::Again { .. }), Settled::Parked | Settled::Again(_)) =
            (fate, answer)
        else {
            return;
        };
        // Of many at once a few: whoever reads the log must not hold up the work.
        let Some(untold) = self.complaints.lock().next() else { return };
        let Given { claim: Claim { id, .. }, kind, attempt, .. } = given;
        let (queue, is_unknown) = (&self.worker.queue, self.doing(kind).is_none());
        match answer {
            Settled::Again(after) if is_unknown => {
                tracing::warn!(%id, kind, queue, attempt, ?after, untold, "nobody here has a handler for the kind of a job");
            }
            Settled::Again(after) => {
                tracing::info!(%id, kind, queue, attempt, ?after, untold, "a job failed, and is tried again");
            }
            _ => tracing::warn!(%id, kind, queue, attempt, is_unknown, untold, "a job is dead"),
        }
    }

    fn fate(&self, held: &Holding, end: &End<Outcome>) -> Option<Fate> {
        let failed = |error: String| {
            let (attempt, most) =
                (held.given.attempt, held.given.max_attempts.min(self.worker.tries));
            if attempt >= most {
                return Fate::Dead { error };
            }
            let after = self.worker.backoff.delay(attempt.saturating_sub(1), fastrand::f64());
            let after = match self.doing(&held.given.kind) {
                Some(_) => after,
                None => after.saturating_mul(UNKNOWN).min(UNKNOWN_MOST).max(after),
            };
            Fate::Again { after, error }
        };
        Some(match end {
            End::Done(Outcome::Done(Some(result))) if result.get().len() > LARGEST => {
                let error = format!("its result has more than {LARGEST} bytes");
                Fate::Dead { error }
            }
            End::Done(Outcome::Done(result)) => Fate::Done { result: result.clone() },
            End::Done(Outcome::Snooze(after)) => Fate::Snooze(*after),
            End::Done(Outcome::Dead(error)) => Fate::Dead { error: error.clone() },
            End::Done(Outcome::Settled) => return None,
            End::Failed(failure) => failed(failure.to_string()),
            End::Released => Fate::Released,
        })
    }
}

/// A job in work, for the puller.
#[derive(Clone)]
struct Holding {
    given: Arc<Given>,
    notes: Arc<Notes>,
    attempt: Option<Arc<Attempt>>,
}

struct Feed(Arc<Line>);

fn failed(what: &str, error: JobsError) -> QueueError {
    QueueError::new(what, Some(Box::new(error) as BoxError))
}

impl Queue for Feed {
    type Claim = Holding;
    type Item = Work;
    type Outcome = Outcome;

    async fn take(&self, room: u32) -> Result<queue::Taken<Holding, Work>, QueueError> {
        let line = &*self.0;
        if let Some(rest) = line.rests() {
            return Ok(queue::Taken { items: Vec::new(), rest: Some(rest) });
        }
        let room = if line.worker.rest.is_zero() { room } else { 1 };
        let wanted = Wanted {
            queue: &line.worker.queue,
            worker: &line.worker.name,
            room,
            capacity: line.worker.capacity.get(),
            lease: line.worker.lease,
        };
        let taken = line.jobs.take(&wanted).await;
        let taken = taken.map_err(|error| failed("taking jobs", error))?;
        let items = taken.jobs.into_iter().map(|given| {
            let doing = line.doing(&given.kind);
            let in_parts = doing.is_some_and(|doing| doing.manner == Manner::InParts);
            let cost = if in_parts { 0 } else { given.cost.max(1) };
            let limit = given.timeout.or(doing.and_then(|doing| doing.timeout));
            let (queue, name) = (&line.worker.queue, &line.worker.name);
            let spans = line.worker.spans.as_ref();
            let attempt = spans.and_then(|spans| Attempt::new(spans, &given, queue, name));
            let attempt = attempt.map(Arc::new);
            let given = Arc::new(given);
            if !line.worker.rest.is_zero() {
                line.pace.lock().held.push(Arc::downgrade(&given));
            }
            let news = Arc::clone(&line.news);
            let notes = Arc::new(Notes { note: Mutex::default(), news });
            let work = Work {
                given: Arc::clone(&given),
                notes: Arc::clone(&notes),
                room: Arc::clone(&line.room),
                attempt: attempt.clone(),
                limit,
            };
            Handed { claim: Holding { given, notes, attempt }, item: work, cost }
        });
        Ok(queue::Taken { items: items.collect(), rest: taken.rest })
    }

    async fn keep(&self, held: &[&Holding]) -> Result<Vec<Kept>, QueueError> {
        self.0.news.is_there.store(false, Ordering::Relaxed);
        let news = Untold::of(held.iter().copied());
        *self.0.told_at.lock() = Some(Instant::now());
        let _turn = self.0.telling.lock().await;
        let kept = news.tell(&*self.0.jobs).await;
        kept.map_err(|error| failed("prolonging leases", error))
    }

    async fn settle(&self, ended: &[(Holding, End<Outcome>)]) -> Result<Vec<Settled>, QueueError> {
        {
            // What they said last, after what was said before: that may be on its way, and must be there before the end.
            let _turn = self.0.telling.lock().await;
            let talkative = ended.iter().map(|(held, _)| held);
            let last_words = Untold::of(talkative.filter(|held| held.notes.is_any()));
            if !last_words.told.is_empty() {
                match last_words.tell(&*self.0.jobs).await {
                    Ok(_) => self.0.in_vain.store(0, Ordering::Relaxed),
                    // Once its end is stored nothing more can be told of a job; but there may be room for ends only.
                    Err(error)
                        if error.is_transient()
                            && self.0.in_vain.fetch_add(1, Ordering::Relaxed) < IN_VAIN =>
                    {
                        return Err(failed("telling what jobs said last", error));
                    }
                    Err(error) => {
                        tracing::warn!(error = explain(&error), "what jobs said last is lost");
                    }
                }
            }
        }
        let fates: Vec<Option<Fate>> =
            ended.iter().map(|(held, end)| self.0.fate(held, end)).collect();
        let told: Vec<(Claim, Fate)> = ended
            .iter()
            .zip(&fates)
            .filter_map(|((held, _), fate)| Some((held.given.claim, fate.clone()?)))
            .collect();
        let mut settled = if told.is_empty() {
            Vec::new()
        } else {
            self.0.jobs.settle(&told).await.map_err(|error| failed("settling jobs", error))?
        }
        .into_iter();
        self.0.pace.lock().ended = Some(Instant::now());
        let answers = ended.iter().zip(&fates).map(|((held, _), fate)| {
            let answer = match fate {
                Some(_) => settled.next().unwrap_or(Settled::Stale),
                None => Settled::Gone,
            };
            if let Some(attempt) = &held.attempt {
                attempt.settled(fate.as_ref(), answer);
            }
            self.0.log(&held.given, fate.as_ref(), answer);
            answer
        });
        Ok(answers.collect())
    }

    async fn woken(&self) -> Woken {
        let line = &*self.0;
        let news = async {
            while !line.news.is_there.load(Ordering::Relaxed) {
                line.news.bell.notified().await;
            }
            let last = *line.told_at.lock();
            sleep_until(last.map_or_else(Instant::now, |last| last + TELL)).await;
            line.news.is_there.store(false, Ordering::Relaxed);
        };
        tokio::select! {
            biased;
            woken = line.jobs.woken(&line.worker.queue, &line.ear) => woken,
            () = news => Woken::Look,
        }
    }

    fn failures(&self, held: &Holding) -> u32 {
        held.given.attempt.saturating_sub(1)
    }

    fn told(&self, held: &Holding, event: RunEvent) {
        if self.0.events.receiver_count() > 0 {
            // Nobody has to listen.
            let _ = self.0.events.send(JobEvent { job: Arc::clone(&held.given), event });
        }
    }
}

struct Does(Arc<Line>);

/// A job is seen to run until this is dropped.
struct Seen(Arc<Mutex<HashSet<JobId>>>, JobId);

impl Seen {
    fn new(running: &Arc<Mutex<HashSet<JobId>>>, id: JobId) -> Self {
        running.lock().insert(id);
        Self(Arc::clone(running), id)
    }
}

impl Drop for Seen {
    fn drop(&mut self) {
        self.0.lock().remove(&self.1);
    }
}

impl Handler<Work> for Does {
    type Outcome = Outcome;

    fn handle(
        &self,
        work: Work,
    ) -> impl Future<Output = Result<Outcome, Failure>> + Send + 'static {
        let line = Arc::clone(&self.0);
        async move {
            let mut run = work.attempt.as_ref().map(Attempt::start);
            let ended = line.run(work).await;
            if let Some(run) = &mut run {
                run.end(&ended);
            }
            ended
        }
    }
}

impl Line {
    async fn run(&self, work: Work) -> Result<Outcome, Failure> {
        let _seen = Seen::new(&self.running, work.id());
        let Some(doing) = self.doing(work.kind()).cloned() else {
            let kind = work.kind();
            let why = format!("this worker has no handler for jobs of the kind {kind:?}");
            return Err(Failure::Error(why));
        };
        let limit = work.limit.filter(|_| doing.manner != Manner::KeepsTime);
        let running = (doing.run)(work);
        match limit {
            None => running.await,
            Some(limit) => match timeout(limit, running).await {
                Ok(ended) => ended,
                Err(_) => Err(Failure::Timeout(limit)),
            },
        }
    }
}
