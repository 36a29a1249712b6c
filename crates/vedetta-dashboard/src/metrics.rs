//! `GET /metrics`: numbers for Prometheus, as text; the same are told to a sink, if there is one.
//!
//! Names of queues are labels: of the first 100 in their order, and what is beyond together as `other`. Nothing
//! else that people can name without bound is one.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{MatchedPath, Request, State};
use axum::http::header;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use parking_lot::Mutex;
use vedetta_core::measure::FamilyKind::{self, Counter, Gauge, Histogram};
use vedetta_core::measure::{Family, Sample, Value};
use vedetta_jobs::Ledger as _;
use vedetta_jobs::wire::QueueInfo;

use crate::api::Context;
use crate::error::ApiError;
use crate::input::Query;
use crate::stats::{Durations, OTHER};

/// Queues that are told apart.
const QUEUES: usize = 100;

/// Numbers that take longer to find are not told.
const LONGEST: Duration = Duration::from_secs(2);

/// Requests that were answered, by route and class of status.
#[derive(Debug, Default)]
pub(crate) struct Requests(Mutex<BTreeMap<(String, u16), u64>>);

/// Counts a request. There are as many routes as the program has.
pub(crate) async fn count(
    State(context): State<Context>,
    request: Request,
    next: Next,
) -> Response {
    let route = request.extensions().get::<MatchedPath>();
    let route = route.map_or_else(|| "none".to_owned(), |path| path.as_str().to_owned());
    let route = format!("{} {route}", method(request.method().as_str()));
    let response = next.run(request).await;
    let class = response.status().as_u16() / 100;
    *context.live.requests.0.lock().entry((route, class)).or_default() += 1;
    response
}

/// Those that there are; a client may send any word.
fn method(name: &str) -> &str {
    match name {
        "GET" | "HEAD" | "POST" | "PUT" | "DELETE" | "PATCH" | "OPTIONS" => name,
        _ => "other",
    }
}

/// All numbers there are.
#[derive(Default)]
struct Numbers(Vec<Family>);

impl Numbers {
    /// Those that are added next are of this kind.
    fn family(&mut self, name: &'static str, kind: FamilyKind, help: &'static str) {
        self.0.push(Family::new(name, kind, help));
    }

    fn add(&mut self, labels: &[(&'static str, &str)], value: impl Into<Value>) {
        if let Some(family) = self.0.last_mut() {
            family.add(labels, value);
        }
    }

    /// A number without labels.
    fn one(
        &mut self,
        name: &'static str,
        kind: FamilyKind,
        help: &'static str,
        value: impl Into<Value>,
    ) {
        self.family(name, kind, help);
        self.add(&[], value);
    }
}

/// Families as Prometheus reads them.
fn text(families: &[Family]) -> String {
    let mut text = String::new();
    for Family { name, kind, help, samples } in families {
        let kind = match kind {
            Gauge => "gauge",
            Counter => "counter",
            Histogram => "histogram",
        };
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for Sample { labels, value } in samples {
            match value {
                Value::Whole(number) => line(&mut text, name, labels, number),
                Value::Real(number) => line(&mut text, name, labels, number),
                Value::Sizes { bounds, counts, sum } => {
                    let (buckets, mut labels) = (format!("{name}_bucket"), labels.clone());
                    let bounds = bounds.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
                    for (bound, count) in bounds.zip(counts) {
                        labels.push(("le", bound));
                        line(&mut text, &buckets, &labels, count);
                        labels.pop();
                    }
                    line(&mut text, &format!("{name}_sum"), &labels, sum);
                    let all = counts.last().unwrap_or(&0);
                    line(&mut text, &format!("{name}_count"), &labels, all);
                }
            }
        }
    }
    text
}

fn line(text: &mut String, name: &str, labels: &[(&str, String)], value: impl std::fmt::Display) {
    text.push_str(name);
    for (place, (label, value)) in labels.iter().enumerate() {
        text.push(if place == 0 { '{' } else { ',' });
        let _ = write!(text, "{label}=\"{}\"", escaped(value));
    }
    if !labels.is_empty() {
        text.push('}');
    }
    let _ = writeln!(text, " {value}");
}

fn sizes(durations: &Durations) -> Value {
    let (mut bounds, mut counts) = (Vec::new(), Vec::new());
    for (bound, count) in durations.cumulative() {
        bounds.extend(bound.map(|ms| seconds(Duration::from_millis(ms))));
        counts.push(count);
    }
    Value::Sizes { bounds, counts, sum: seconds(durations.sum) }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}

pub(crate) async fn metrics(
    State(context): State<Context>,
    query: Query,
) -> Result<Response, ApiError> {
    query.end()?;
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text(&families(&context).await)).into_response())
}

/// All numbers, as they are now.
async fn families(context: &Context) -> Vec<Family> {
    let mut all = Numbers::default();
    all.family("vedetta_build_info", Gauge, "The version that runs.");
    all.add(&[("version", env!("CARGO_PKG_VERSION"))], 1_u64);
    jobs(context, &mut all).await;
    store(context, &mut all);
    watchers(context, &mut all);
    process(&mut all);
    requests(context, &mut all);
    all.0
}

/// Who gets the numbers, beside those who ask for them.
pub(crate) type Sink = Arc<dyn Fn(Vec<Family>) + Send + Sync>;

/// Tells the numbers again and again, and once more at the end.
pub(crate) async fn tell(context: Context, every: Duration, sink: Sink) {
    loop {
        let is_last = tokio::select! {
            () = tokio::time::sleep(every) => false,
            () = context.stop.cancelled() => true,
        };
        // A database that is away does not hold up the end.
        if let Ok(families) = tokio::time::timeout(LONGEST, families(&context)).await {
            sink(families);
        }
        if is_last {
            return;
        }
    }
}

/// The first queues as they are, the rest as one.
fn bounded(mut queues: Vec<QueueInfo>) -> Vec<QueueInfo> {
    if queues.len() <= QUEUES {
        return queues;
    }
    let rest = queues.split_off(QUEUES);
    // One may be called so itself.
    let there = queues.iter().position(|queue| queue.name == OTHER).map(|at| queues.remove(at));
    let named = || QueueInfo { name: OTHER.into(), ..QueueInfo::default() };
    let mut other = there.unwrap_or_else(named);
    for queue in rest {
        other.ready += queue.ready;
        other.scheduled += queue.scheduled;
        other.running += queue.running;
        other.done += queue.done;
        other.dead += queue.dead;
        other.cancelled += queue.cancelled;
        other.slots += queue.slots;
        other.capacity += queue.capacity;
        other.oldest_ms = other.oldest_ms.max(queue.oldest_ms);
    }
    queues.push(other);
    queues
}

/// A number of a queue.
type Of = fn(&QueueInfo) -> u64;

async fn jobs(context: &Context, all: &mut Numbers) {
    let Some(observed) = &context.live.observed else { return };
    let answered = observed.queues().await;
    all.one(
        "vedetta_jobs_up",
        Gauge,
        "Whether the database of the jobs answered.",
        u64::from(answered.is_ok()),
    );
    let live = &context.live;
    let queues = bounded(live.with_rates(answered.unwrap_or_default(), &live.workers()));
    let states: [(&str, Of); 6] = [
        ("ready", |queue| queue.ready),
        ("scheduled", |queue| queue.scheduled),
        ("running", |queue| queue.running),
        ("done", |queue| queue.done),
        ("dead", |queue| queue.dead),
        ("cancelled", |queue| queue.cancelled),
    ];
    all.family("vedetta_jobs", Gauge, "Jobs that are kept, by queue and state.");
    for queue in &queues {
        for (state, of) in states {
            all.add(&[("queue", &queue.name), ("state", state)], of(queue));
        }
    }
    let name = "vedetta_queue_oldest_ready_seconds";
    all.family(name, Gauge, "How long the job that waits the longest has been due.");
    for queue in &queues {
        let oldest = Duration::from_millis(queue.oldest_ms.unwrap_or(0));
        all.add(&[("queue", &queue.name)], seconds(oldest));
    }
    let gauges: [(&'static str, &'static str, Of); 2] = [
        ("vedetta_queue_slots_in_use", "Slots of the jobs that run.", |queue| queue.slots),
        (
            "vedetta_queue_capacity_slots",
            "Slots of the workers of this queue that beat, or took jobs here lately.",
            |queue| queue.capacity,
        ),
    ];
    for (name, help, of) in gauges {
        all.family(name, Gauge, help);
        for queue in &queues {
            all.add(&[("queue", &queue.name)], of(queue));
        }
    }
    if let Some(spans) = observed.spans() {
        let help = "Spans that were given up because nobody took them in time.";
        all.one("vedetta_telemetry_dropped_spans_total", Counter, help, spans.dropped());
    }
    let totals = observed.totals();
    all.family("vedetta_jobs_done_total", Counter, "Jobs that were done since the start.");
    for (queue, totals) in &totals {
        all.add(&[("queue", queue)], totals.done);
    }
    all.family("vedetta_jobs_failed_total", Counter, "Attempts that failed since the start.");
    for (queue, totals) in &totals {
        all.add(&[("queue", queue)], totals.failed);
    }
    all.family("vedetta_job_run_seconds", Histogram, "How long attempts took.");
    for (queue, totals) in &totals {
        all.add(&[("queue", queue)], sizes(&totals.ran));
    }
    let help = "How long jobs that were due waited, of up to 20 a second.";
    all.family("vedetta_job_wait_seconds", Histogram, help);
    for (queue, totals) in &totals {
        all.add(&[("queue", queue)], sizes(&totals.waited));
    }
}

fn store(context: &Context, all: &mut Numbers) {
    let status = context.store.status();
    all.one("vedetta_store_revision", Gauge, "The newest revision.", status.revision.0);
    let help = "The oldest revision that can be read.";
    all.one("vedetta_store_oldest_revision", Gauge, help, status.compacted.0);
    all.one("vedetta_store_keys", Gauge, "Keys that exist.", status.existing);
    all.one("vedetta_store_leases", Gauge, "Leases that live.", status.leases);
    all.one("vedetta_store_watches", Gauge, "Watches that are open.", status.watchers);
    all.one("vedetta_store_bytes", Gauge, "Bytes in use in the file.", status.size);
}

/// They are declared, so there are as many as there are.
fn watchers(context: &Context, all: &mut Numbers) {
    let rows: Vec<_> = context
        .watchers
        .iter()
        .map(|(name, watched)| {
            let status = watched.handle.status();
            let stands = watched.is_here.then(|| context.store.revision().0);
            (name, stands.map(|stands| stands.saturating_sub(status.revision.0)), status)
        })
        .collect();
    if rows.is_empty() {
        return;
    }
    let name = "vedetta_watcher_behind_revisions";
    all.family(name, Gauge, "Revisions of this store that a watcher has not seen.");
    for (watcher, behind, _) in &rows {
        if let Some(behind) = behind {
            all.add(&[("watcher", watcher)], *behind);
        }
    }
    all.family("vedetta_watcher_ids", Gauge, "Ids of a watcher, by what they are at.");
    for (watcher, _, status) in &rows {
        let states = [
            ("all", status.ids),
            ("running", status.running),
            ("waiting", status.waiting),
            ("failing", status.failing),
        ];
        for (state, count) in states {
            all.add(&[("watcher", watcher), ("state", state)], count);
        }
    }
    all.family("vedetta_watcher_runs_total", Counter, "Runs of a watcher since its start.");
    for (watcher, _, status) in &rows {
        for (outcome, count) in [("done", status.done), ("failed", status.failed)] {
            let labels = [("watcher", watcher.as_str()), ("outcome", outcome)];
            all.add(&labels, count);
        }
    }
    let name = "vedetta_watcher_lost_total";
    all.family(name, Counter, "Times a watcher lost its source.");
    for (watcher, _, status) in &rows {
        all.add(&[("watcher", watcher)], status.lost);
    }
}

/// As far as the system tells: on Linux.
fn process(all: &mut Numbers) {
    /// The unit of times in `/proc`, and of pages, on all that this runs on.
    const TICKS: u32 = 100;
    const PAGE: u64 = 4096;
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // After the name, which may have anything in it.
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .map(|(_, rest)| rest.split_whitespace().collect())
        .unwrap_or_default();
    let number = |place: usize| fields.get(place).and_then(|field| field.parse::<u64>().ok());
    if let (Some(user), Some(system)) = (number(11), number(12)) {
        let cpu = Duration::from_secs(user + system) / TICKS;
        let help = "Processor time that was used.";
        all.one("process_cpu_seconds_total", Counter, help, seconds(cpu));
    }
    if let Some(pages) = number(21) {
        all.one("process_resident_memory_bytes", Gauge, "Memory in use.", pages * PAGE);
    }
    if let Ok(files) = std::fs::read_dir("/proc/self/fd") {
        all.one("process_open_fds", Gauge, "Open files.", files.count());
    }
}

fn requests(context: &Context, all: &mut Numbers) {
    let name = "vedetta_http_requests_total";
    all.family(name, Counter, "Requests that were answered, by route and class of status.");
    for ((route, class), count) in &*context.live.requests.0.lock() {
        let (method, route) = route.split_once(' ').unwrap_or(("", route));
        let status = format!("{class}xx");
        all.add(&[("method", method), ("route", route), ("status", &status)], *count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped() {
        let mut all = Numbers::default();
        all.family("a", Gauge, "It.");
        all.add(&[("x", "q\"u\\o\nte"), ("y", "")], 1_u64);
        let line = "a{x=\"q\\\"u\\\\o\\nte\",y=\"\"} 1\n";
        assert_eq!(text(&all.0), format!("# HELP a It.\n# TYPE a gauge\n{line}"));
    }

    #[test]
    fn queues_beyond_the_bound_are_one() {
        let queue =
            |n: usize| QueueInfo { name: format!("q{n:04}"), ready: 1, ..QueueInfo::default() };
        let queues = bounded((0..1000).map(queue).collect());
        assert_eq!(queues.len(), QUEUES + 1);
        assert_eq!((queues[QUEUES].name.as_str(), queues[QUEUES].ready), (OTHER, 900));
        // One of the first is called so itself.
        let named = QueueInfo { name: OTHER.into(), ready: 7, ..QueueInfo::default() };
        let queues = bounded(std::iter::once(named).chain((1..1000).map(queue)).collect());
        let others: Vec<u64> =
            queues.iter().filter(|queue| queue.name == OTHER).map(|queue| queue.ready).collect();
        assert_eq!((queues.len(), others), (QUEUES, vec![7 + 900]));
    }
}
