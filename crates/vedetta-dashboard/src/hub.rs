//! The stream of all that changes, for pages and programs that want to see it live.
//!
//! ```text
//!  touched jobs ─┐
//!  every second ─┼─► look: what differs from the last look? ──► ring of events ──► client, client, client
//!  the store ────┘                                              (bounded)          each is a cursor in it
//! ```
//!
//! One task looks for all clients, at most ten times a second, never for more than a tenth of the time, and only while
//! somebody listens. A look reads a bounded number of rows, so it works the same wherever the jobs are kept.
//! A client that is too slow, or comes back too late, is told `reset`: it reads what it shows anew and goes on.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, header};
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::stream;
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use vedetta_core::{JobState, KeyRange};
use vedetta_fleet::wire::SupervisorInfo;
use vedetta_jobs::{Filter, JobId, Ledger as _};
use vedetta_kv::{Batch, Change, Event as KvEvent, WatchOptions, Watcher};

use crate::api::Context;
use crate::error::ApiError;
use crate::input::Query;
use crate::json::Text;
use crate::live::{JobRow, Overview};
use crate::observe::Observed;
use crate::{redact, stages, watchers};

/// Events that are kept for who comes back, and their bytes.
const KEPT: usize = 4096;
const KEPT_BYTES: usize = 4 << 20;
/// A client is handed about so many bytes at a time.
const PIECE: usize = 64 << 10;
/// A client that lost the line comes back after this many milliseconds.
const RETRY_MS: u32 = 1000;

/// Nobody is told sooner again than this.
const WINDOW: Duration = Duration::from_millis(100);
/// All is looked at this often.
const FULL: Duration = Duration::from_secs(1);
/// It goes on for so long for somebody who lost the line.
const LINGER: Duration = Duration::from_secs(5);
/// Looking takes one part of so many of the time.
const SHARE: u32 = 10;
/// The queues are counted this often for the statistics when nobody listens.
const COUNTED: Duration = Duration::from_secs(5);

/// Jobs that are looked at: the newest, those that run, and those that stopped running.
const NEWEST: u32 = 100;
const RUNNING: u32 = 200;
const LEFT: usize = 100;
/// Queues, watchers, stages, supervisors and workers of which changes are told.
const ROWS: usize = 200;
/// Changes of keys that one event tells.
const KEYS: usize = 50;
/// Bytes of a value in it.
const VALUE: usize = 200;

/// What an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Topic {
    Job,
    Queue,
    Worker,
    Supervisor,
    Stage,
    Watcher,
    Kv,
    Stats,
}

impl Topic {
    const ALL: [Self; 8] = [
        Self::Job,
        Self::Queue,
        Self::Worker,
        Self::Supervisor,
        Self::Stage,
        Self::Watcher,
        Self::Kv,
        Self::Stats,
    ];

    fn word(self) -> &'static str {
        match self {
            Self::Job => "job",
            Self::Queue => "queue",
            Self::Worker => "worker",
            Self::Supervisor => "supervisor",
            Self::Stage => "stage",
            Self::Watcher => "watcher",
            Self::Kv => "kv",
            Self::Stats => "stats",
        }
    }
}

/// Where events are put, and read from.
pub(crate) struct Hub {
    /// Which run of the server its numbers are of.
    boot: String,
    ring: Mutex<Ring>,
    newest: watch::Sender<u64>,
    listeners: AtomicUsize,
    arrived: Notify,
    /// The first look is over: what changes from here on is told.
    following: watch::Sender<bool>,
}

#[derive(Default)]
struct Ring {
    /// The number of the last event; the first is 1.
    last: u64,
    events: VecDeque<(Topic, Bytes)>,
    bytes: usize,
}

impl Ring {
    /// The oldest event that is kept.
    fn first(&self) -> u64 {
        self.last + 1 - self.events.len() as u64
    }
}

impl Default for Hub {
    fn default() -> Self {
        Self {
            boot: format!("{:08x}", fastrand::u32(..)),
            ring: Mutex::default(),
            newest: watch::Sender::new(0),
            listeners: AtomicUsize::new(0),
            arrived: Notify::new(),
            following: watch::Sender::new(false),
        }
    }
}

impl Hub {
    fn tell(&self, topic: Topic, data: &impl Serialize) {
        let mut ring = self.ring.lock();
        ring.last += 1;
        let mut event = format!("event: {}\nid: {}-{}\ndata: ", topic.word(), self.boot, ring.last)
            .into_bytes();
        serde_json::to_writer(&mut event, data).expect("strings and numbers are always JSON");
        event.extend_from_slice(b"\n\n");
        ring.bytes += event.len();
        ring.events.push_back((topic, event.into()));
        while ring.events.len() > KEPT || ring.bytes > KEPT_BYTES {
            let Some((_, gone)) = ring.events.pop_front() else { break };
            ring.bytes -= gone.len();
        }
        let last = ring.last;
        drop(ring);
        self.newest.send_replace(last);
    }

    /// The next events after `at`, which goes on with them; nothing if there are none.
    fn read(&self, at: &mut u64, topics: &[Topic]) -> Option<Bytes> {
        let ring = self.ring.lock();
        if *at + 1 < ring.first() {
            *at = ring.last;
            return Some(reset(&self.boot, *at, "too slow").into());
        }
        let mut out = Vec::new();
        while *at < ring.last && out.len() < PIECE {
            let place = usize::try_from(*at + 1 - ring.first()).ok()?;
            let (topic, event) = &ring.events[place];
            if topics.contains(topic) {
                out.extend_from_slice(event);
            }
            *at += 1;
        }
        (!out.is_empty()).then(|| out.into())
    }

    /// Nobody looks from here on: who comes back after it has missed something.
    fn break_off(&self) {
        self.following.send_replace(false);
        let ring = &mut *self.ring.lock();
        *ring = Ring { last: ring.last + 1, ..Ring::default() };
    }

    fn is_listened_to(&self) -> bool {
        self.listeners.load(Ordering::Acquire) > 0
    }
}

/// Somebody who listens, while it lives.
struct Listener(Arc<crate::live::Live>);

impl Listener {
    fn new(live: &Arc<crate::live::Live>) -> Self {
        live.hub.listeners.fetch_add(1, Ordering::AcqRel);
        live.hub.arrived.notify_one();
        Self(Arc::clone(live))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.0.hub.listeners.fetch_sub(1, Ordering::AcqRel);
    }
}

pub(crate) async fn events(
    State(context): State<Context>,
    mut query: Query,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let topics = match query.text("topics")? {
        None => Topic::ALL.to_vec(),
        Some(words) => {
            let topic = |word: &str| {
                let found = Topic::ALL.into_iter().find(|topic| topic.word() == word);
                found.ok_or_else(|| {
                    let all = Topic::ALL.map(Topic::word).join(", ");
                    ApiError::invalid(format!("{word:?} is no topic: those are {all}"))
                })
            };
            words.split(',').map(topic).collect::<Result<_, _>>()?
        }
    };
    query.end()?;
    let listener = Listener::new(&context.live);
    // Who reads something now is told of all that changes after it. If that takes long, what is looked at is
    // not there, and will be told when it is.
    let mut following = context.live.hub.following.subscribe();
    let _ = timeout(2 * FULL, following.wait_for(|following| *following)).await;

    let hub = &context.live.hub;
    let newest = hub.newest.subscribe();
    let ring = hub.ring.lock();
    let seen = headers.get("last-event-id").map(|seen| seen.to_str().unwrap_or("?"));
    let (at, lost) = match seen {
        None | Some("") => (ring.last, false),
        Some(seen) => {
            let ours = seen.strip_prefix(&*hub.boot).and_then(|rest| rest.strip_prefix('-'));
            let number: Option<u64> = ours.and_then(|number| number.parse().ok());
            match number.filter(|number| (ring.first() - 1..=ring.last).contains(number)) {
                Some(number) => (number, false),
                None => (ring.last, true),
            }
        }
    };
    drop(ring);
    let hello = json!({
        "now": humantime::format_rfc3339_millis(SystemTime::now()).to_string(),
        "version": env!("CARGO_PKG_VERSION"),
        "topics": topics.iter().map(|topic| topic.word()).collect::<Vec<_>>(),
    });
    let mut greeting =
        format!("retry: {RETRY_MS}\nevent: hello\nid: {}-{at}\ndata: {hello}\n\n", hub.boot);
    if lost {
        greeting += &reset(&hub.boot, at, "too late");
    }
    let greeting = Some(greeting.into());
    let feed = Feed { greeting, at, topics, newest, _listener: listener, context };
    let body = Body::from_stream(stream::unfold(feed, Feed::next));
    let unbuffered = HeaderName::from_static("x-accel-buffering");
    Ok(([(header::CONTENT_TYPE, "text/event-stream"), (unbuffered, "no")], body).into_response())
}

/// Something was missed: read anew what you show, and go on.
fn reset(boot: &str, at: u64, why: &str) -> String {
    format!("event: reset\nid: {boot}-{at}\ndata: {}\n\n", json!({ "reason": why }))
}

/// A client's place in the ring.
struct Feed {
    greeting: Option<Bytes>,
    at: u64,
    topics: Vec<Topic>,
    newest: watch::Receiver<u64>,
    _listener: Listener,
    context: Context,
}

impl Feed {
    async fn next(mut self) -> Option<(Result<Bytes, Infallible>, Self)> {
        if let Some(greeting) = self.greeting.take() {
            return Some((Ok(greeting), self));
        }
        let stop = self.context.stop.clone();
        loop {
            if stop.is_cancelled() {
                return None;
            }
            if let Some(piece) = self.piece() {
                return Some((Ok(piece), self));
            }
            tokio::select! {
                () = stop.cancelled() => return None,
                changed = self.newest.changed() => changed.ok()?,
                () = sleep(self.context.limits.sign_of_life) => {
                    return Some((Ok(Bytes::from_static(b":\n\n")), self));
                }
            }
        }
    }

    /// What there is for it; nothing if there is none.
    fn piece(&mut self) -> Option<Bytes> {
        self.newest.mark_unchanged();
        self.context.live.hub.read(&mut self.at, &self.topics)
    }
}

/// Counts for the statistics, and tells who listens what changed, until `stop`.
pub(crate) async fn run(context: Context, stop: CancellationToken) {
    tokio::select! {
        () = stop.cancelled() => {}
        () = watch_over(&context) => {}
    }
}

async fn watch_over(context: &Context) {
    let (live, observed) = (&context.live, context.live.observed.as_deref());
    loop {
        if !live.hub.is_listened_to() {
            if let Some(observed) = observed {
                if let Ok(counts) = observed.queues().await {
                    observed.counted(&counts);
                }
                observed.sample().await;
            }
            tokio::select! {
                () = live.hub.arrived.notified() => {}
                () = sleep(COUNTED) => {}
            }
            continue;
        }
        if let Some(observed) = observed {
            observed.listen(true);
        }
        let mut look = Look { context, known: None, jobs: HashMap::new(), keys: Keys::default() };
        look.follow(observed).await;
        live.hub.break_off();
        if let Some(observed) = observed {
            observed.listen(false);
        }
    }
}

/// What was seen when it was last looked.
struct Look<'a> {
    context: &'a Context,
    /// Rows as they were told; none before the first look.
    known: Option<BTreeMap<(Topic, String), Value>>,
    jobs: HashMap<JobId, JobRow>,
    keys: Keys,
}

/// Changes of keys that are to be told.
#[derive(Default)]
struct Keys {
    watcher: Option<Watcher>,
    changes: VecDeque<Value>,
    left_out: u64,
    revision: u64,
}

impl Keys {
    /// The next changes. Does not return if there is nothing to follow.
    async fn next(&mut self) -> Option<Batch> {
        let Some(watcher) = &mut self.watcher else { return std::future::pending().await };
        match watcher.next().await {
            Ok(batch) => Some(batch),
            Err(_) => {
                self.watcher = None;
                None
            }
        }
    }

    fn add(&mut self, batch: &Batch) {
        for event in batch.iter() {
            self.revision = event.revision.0;
            if self.changes.len() == KEYS {
                self.changes.pop_front();
                self.left_out += 1;
            }
            self.changes.push_back(told(event));
        }
    }
}

/// Supervisors by name, without what changes with every beat.
fn supervisors(context: &Context) -> Vec<(String, Value)> {
    let all = context.fleet.as_ref().map(vedetta_fleet::Fleet::supervisors).unwrap_or_default();
    let row = |one: SupervisorInfo| {
        let (name, mut row) = (one.name.clone(), json!(redact::supervisor(one)));
        row.as_object_mut().and_then(|row| row.remove("seen_ms"));
        (name, row)
    };
    all.into_iter().map(row).collect()
}

/// A change of a key, its value cut short.
fn told(event: &KvEvent) -> Value {
    #[derive(Serialize)]
    struct Told<'a> {
        revision: u64,
        #[serde(rename = "type")]
        kind: &'static str,
        #[serde(flatten)]
        key: Text<'a>,
        #[serde(flatten)]
        value: Option<Text<'a>>,
        #[serde(skip_serializing_if = "Option::is_none")]
        bytes: Option<usize>,
    }
    let (kind, key, value): (_, &[u8], _) = match &event.change {
        Change::Put(now) => ("put", now.key(), Some(now.value())),
        Change::Delete { key, cause: vedetta_kv::Cause::Asked } => ("delete", key, None),
        Change::Delete { key, .. } => ("expire", key, None),
    };
    let cut = value.map(|value| {
        let start = &value[..VALUE.min(value.len())];
        // Not in the middle of a character, where there are characters.
        match std::str::from_utf8(start) {
            Err(wrong) if wrong.error_len().is_none() => &start[..wrong.valid_up_to()],
            _ => start,
        }
    });
    let told = Told {
        revision: event.revision.0,
        kind,
        key: Text::key(key),
        value: cut.map(Text::value),
        bytes: value.map(<[u8]>::len),
    };
    serde_json::to_value(told).unwrap_or_default()
}

impl Look<'_> {
    /// While somebody listens.
    async fn follow(&mut self, observed: Option<&Observed>) {
        let hub = &self.context.live.hub;
        let (mut full, mut heard) = (Instant::now(), Instant::now());
        loop {
            let began = Instant::now();
            if hub.is_listened_to() {
                heard = began;
            } else if began > heard + LINGER {
                return;
            }
            if self.keys.watcher.is_none() {
                let watch = self.context.store.watch(KeyRange::prefix(""), WatchOptions::default());
                self.keys.watcher = watch.ok();
            }
            let is_full = began >= full;
            if is_full {
                full = began + FULL;
            }
            self.look(observed, is_full).await;
            hub.following.send_replace(true);
            let ended = Instant::now();
            let rested = ended + WINDOW.max(SHARE * (ended - began));
            full = full.max(rested);
            // What comes close together is told together.
            loop {
                tokio::select! {
                    () = sleep_until(rested) => break,
                    batch = self.keys.next() => if let Some(batch) = batch { self.keys.add(&batch) },
                }
            }
            if self.keys.changes.is_empty() {
                tokio::select! {
                    () = sleep_until(full) => {}
                    () = async { match observed {
                        Some(observed) => observed.bell.notified().await,
                        None => std::future::pending().await,
                    }} => {}
                    batch = self.keys.next() => if let Some(batch) = batch { self.keys.add(&batch) },
                }
            }
        }
    }

    async fn look(&mut self, observed: Option<&Observed>, is_full: bool) {
        let hub = &self.context.live.hub;
        let is_first = self.known.is_none();
        if let Some(observed) = observed {
            self.look_at_jobs(observed, is_full).await;
        }
        let mut rows: BTreeMap<(Topic, String), Value> = BTreeMap::new();
        // Also those that there is no room for; of what could be read, since what could not is not gone.
        let mut there: BTreeSet<(Topic, String)> = BTreeSet::new();
        let mut read = vec![Topic::Watcher, Topic::Supervisor];
        let mut overview = None;
        let live = &self.context.live;
        let workers = live.workers();
        if let Some(observed) = observed
            && let Ok(counts) = observed.queues().await
        {
            observed.counted(&counts);
            let queues = live.with_rates(counts, &workers);
            overview = Some(Overview::with(&self.context.store, live, Some(&queues), &workers));
            read.push(Topic::Queue);
            there.extend(queues.iter().map(|queue| (Topic::Queue, queue.name.clone())));
            for queue in queues.into_iter().take(ROWS) {
                let name = queue.name.clone();
                rows.insert((Topic::Queue, name), json!(queue));
            }
        }
        let watchers = watchers::rows(self.context);
        let watcher = |row: &Value| (Topic::Watcher, row["name"].to_string());
        there.extend(watchers.iter().map(watcher));
        rows.extend(watchers.into_iter().take(ROWS).map(|row| (watcher(&row), row)));
        let supervisors = supervisors(self.context);
        there.extend(supervisors.iter().map(|(name, _)| (Topic::Supervisor, name.clone())));
        for (name, supervisor) in supervisors.into_iter().take(ROWS) {
            rows.insert((Topic::Supervisor, name), supervisor);
        }
        if is_full {
            if let Ok(stages) = stages::listed(self.context).await {
                let stage =
                    |row: &Value| (Topic::Stage, format!("{} {}", row["entity"], row["stage"]));
                read.push(Topic::Stage);
                there.extend(stages.iter().map(stage));
                rows.extend(stages.into_iter().take(ROWS).map(|row| (stage(&row), row)));
            }
            read.push(Topic::Worker);
            there.extend(workers.iter().map(|worker| (Topic::Worker, worker.id.clone())));
            for worker in workers.into_iter().take(ROWS) {
                rows.insert((Topic::Worker, worker.id.clone()), json!(worker));
            }
            if let Some(observed) = observed {
                observed.sample().await;
            }
        }
        let known = self.known.get_or_insert_default();
        known.retain(|place, row| {
            let is_there = !read.contains(&place.0) || there.contains(place);
            if !is_there {
                let by = match place.0 {
                    Topic::Worker => &["id"][..],
                    Topic::Stage => &["entity", "stage"],
                    _ => &["name"],
                };
                let mut told = json!({ "gone": true });
                by.iter().for_each(|by| told[by] = row[by].clone());
                hub.tell(place.0, &told);
            }
            is_there
        });
        for (place, row) in rows {
            if !is_first && known.get(&place) != Some(&row) {
                hub.tell(place.0, &row);
            }
            known.insert(place, row);
        }
        if known.len() > 8 * ROWS {
            known.clear();
        }
        let changes = std::mem::take(&mut self.keys.changes);
        if !changes.is_empty() {
            let left_out = std::mem::take(&mut self.keys.left_out);
            let revision = self.keys.revision;
            hub.tell(
                Topic::Kv,
                &json!({ "revision": revision, "changes": changes, "left_out": left_out }),
            );
        }
        if is_full {
            // A server that keeps no jobs has none.
            let none = observed.is_none().then_some(&[][..]);
            let overview =
                overview.unwrap_or_else(|| Overview::new(&self.context.store, live, none));
            hub.tell(Topic::Stats, &overview);
        }
    }

    /// Tells of jobs that are not as they were.
    async fn look_at_jobs(&mut self, observed: &Observed, is_full: bool) {
        let is_first = self.known.is_none();
        let touched = observed.touched();
        let mut gone = Vec::new();
        let mut seen: BTreeMap<JobId, JobRow> = BTreeMap::new();
        if is_full || touched.more {
            let all = Filter::default();
            let running = Filter { status: Some(JobState::Running), ..Filter::default() };
            // If they cannot be read now, the next look tells what changed.
            let Ok(newest) = observed.list(&all, None, NEWEST).await else { return };
            let Ok(running) = observed.list(&running, None, RUNNING).await else { return };
            let floor = newest.next.and_then(|_| newest.jobs.last()).map_or(JobId(0), |job| job.id);
            let jobs = newest.jobs.into_iter().chain(running.jobs);
            seen.extend(jobs.map(|job| (job.id, JobRow::from(job))));
            let missing: Vec<JobId> = self
                .jobs
                .values()
                .filter(|job| {
                    let ran = job.is(JobState::Running);
                    (ran || job.id >= floor) && !seen.contains_key(&job.id)
                })
                .map(|job| job.id)
                .take(LEFT)
                .collect();
            for id in missing {
                match observed.job(id).await {
                    Ok(Some(job)) => drop(seen.insert(id, job.into())),
                    Ok(None) => gone.push(id),
                    Err(_) => {}
                }
            }
        }
        let unseen: Vec<JobId> =
            touched.ids.into_iter().filter(|id| !seen.contains_key(id)).collect();
        for id in unseen {
            match observed.job(id).await {
                Ok(Some(job)) => drop(seen.insert(id, job.into())),
                Ok(None) => gone.push(id),
                Err(_) => {}
            }
        }
        let hub = &self.context.live.hub;
        if !is_first {
            for id in &gone {
                hub.tell(Topic::Job, &json!({ "id": id, "gone": true }));
            }
            for (id, job) in &seen {
                if self.jobs.get(id) != Some(job) {
                    hub.tell(Topic::Job, job);
                }
            }
        }
        gone.iter().for_each(|id| drop(self.jobs.remove(id)));
        if is_full {
            // What has moved out of sight is forgotten.
            self.jobs = seen.into_iter().collect();
        } else {
            self.jobs.extend(seen);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_keeps_the_newest_events_within_its_bounds() {
        let hub = Hub::default();
        for n in 0..KEPT + 10 {
            hub.tell(Topic::Job, &json!({ "id": n }));
        }
        let ring = hub.ring.lock();
        assert_eq!((ring.events.len(), ring.first()), (KEPT, 11));
        drop(ring);
        let large = "x".repeat(KEPT_BYTES / 4);
        for _ in 0..10 {
            hub.tell(Topic::Kv, &large);
        }
        let ring = hub.ring.lock();
        assert!(ring.bytes <= KEPT_BYTES && ring.events.len() < 5, "{}", ring.events.len());
        assert_eq!(ring.bytes, ring.events.iter().map(|(_, event)| event.len()).sum::<usize>());
    }

    #[test]
    fn a_slow_reader_is_told_and_goes_on_with_what_comes() {
        let (hub, mut at) = (Hub::default(), 0);
        for n in 0..KEPT + 10 {
            hub.tell(Topic::Job, &json!({ "id": n }));
        }
        let told = |piece: Option<Bytes>| String::from_utf8(piece.unwrap().to_vec()).unwrap();
        let reset = told(hub.read(&mut at, &Topic::ALL));
        let place = format!("id: {}-{}\n", hub.boot, KEPT + 10);
        assert!(reset.starts_with("event: reset\n") && reset.contains(&place), "{reset}");
        assert_eq!(hub.read(&mut at, &Topic::ALL), None);
        hub.tell(Topic::Kv, &1);
        hub.tell(Topic::Job, &2);
        let onward = told(hub.read(&mut at, &[Topic::Job]));
        assert!(onward.starts_with("event: job\n") && onward.ends_with("data: 2\n\n"), "{onward}");
        hub.break_off();
        assert!(told(hub.read(&mut at, &Topic::ALL)).contains("reset"), "there is a gap");
    }

    #[test]
    fn a_reader_is_handed_a_bounded_piece_at_a_time() {
        let (hub, mut at) = (Hub::default(), 0);
        let large = "x".repeat(PIECE / 3);
        (0..30).for_each(|_| hub.tell(Topic::Job, &large));
        let mut pieces = 0;
        while let Some(piece) = hub.read(&mut at, &Topic::ALL) {
            assert!(piece.len() < 2 * PIECE);
            pieces += 1;
        }
        assert!(at == 30 && pieces >= 8, "{pieces}");
    }
}
