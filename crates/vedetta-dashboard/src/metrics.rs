//! `GET /metrics`: numbers for Prometheus, as text.
//!
//! Names of queues are labels: of the first 100 in their order, and what is beyond together as `other`. Nothing
//! else that people can name without bound is one.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use axum::extract::{MatchedPath, Request, State};
use axum::http::header;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use parking_lot::Mutex;
use vedetta_jobs::Ledger as _;
use vedetta_jobs::wire::QueueInfo;

use crate::api::Context;
use crate::error::ApiError;
use crate::input::Query;
use crate::stats::{Durations, OTHER};

/// Queues that are told apart.
const QUEUES: usize = 100;

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

/// What Prometheus reads.
struct Text(String);

impl Text {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn line(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        self.0.push_str(name);
        for (place, (label, text)) in labels.iter().enumerate() {
            self.0.push(if place == 0 { '{' } else { ',' });
            let _ = write!(self.0, "{label}=\"{}\"", escaped(text));
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {value}");
    }

    /// A number without labels.
    fn one(&mut self, name: &str, kind: &str, help: &str, value: impl std::fmt::Display) {
        self.family(name, kind, help);
        self.line(name, &[], value);
    }

    fn durations(&mut self, name: &str, queue: &str, durations: &Durations) {
        let (buckets, mut all) = (format!("{name}_bucket"), 0);
        for (bound, count) in durations.cumulative() {
            let bound = bound.map_or("+Inf".to_owned(), |ms| seconds(Duration::from_millis(ms)));
            self.line(&buckets, &[("queue", queue), ("le", &bound)], count);
            all = count;
        }
        self.line(&format!("{name}_sum"), &[("queue", queue)], seconds(durations.sum));
        self.line(&format!("{name}_count"), &[("queue", queue)], all);
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn seconds(time: Duration) -> String {
    time.as_secs_f64().to_string()
}

pub(crate) async fn metrics(
    State(context): State<Context>,
    query: Query,
) -> Result<Response, ApiError> {
    query.end()?;
    let mut text = Text(String::new());
    text.family("vedetta_build_info", "gauge", "The version that runs.");
    text.line("vedetta_build_info", &[("version", env!("CARGO_PKG_VERSION"))], 1);
    jobs(&context, &mut text).await;
    store(&context, &mut text);
    watchers(&context, &mut text);
    process(&mut text);
    requests(&context, &mut text);
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text.0).into_response())
}

/// The first queues as they are, the rest as one.
fn bounded(mut queues: Vec<QueueInfo>) -> Vec<QueueInfo> {
    if queues.len() <= QUEUES {
        return queues;
    }
    let rest = queues.split_off(QUEUES);
    let mut other = QueueInfo { name: OTHER.into(), ..QueueInfo::default() };
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
    // One may be called so itself.
    match queues.iter_mut().find(|queue| queue.name == OTHER) {
        Some(there) => *there = other,
        None => queues.push(other),
    }
    queues
}

/// A number of a queue.
type Of = fn(&QueueInfo) -> u64;

async fn jobs(context: &Context, text: &mut Text) {
    let Some(observed) = &context.live.observed else { return };
    let answered = observed.queues().await;
    text.one(
        "vedetta_jobs_up",
        "gauge",
        "Whether the database of the jobs answered.",
        u8::from(answered.is_ok()),
    );
    let queues = answered.unwrap_or_default().into_iter().map(|counts| context.live.queue(counts));
    let queues = bounded(queues.collect());
    let states: [(&str, Of); 6] = [
        ("ready", |queue| queue.ready),
        ("scheduled", |queue| queue.scheduled),
        ("running", |queue| queue.running),
        ("done", |queue| queue.done),
        ("dead", |queue| queue.dead),
        ("cancelled", |queue| queue.cancelled),
    ];
    text.family("vedetta_jobs", "gauge", "Jobs that are kept, by queue and state.");
    for queue in &queues {
        for (state, of) in states {
            text.line("vedetta_jobs", &[("queue", &queue.name), ("state", state)], of(queue));
        }
    }
    let name = "vedetta_queue_oldest_ready_seconds";
    text.family(name, "gauge", "How long the job that waits the longest has been due.");
    for queue in &queues {
        let oldest = Duration::from_millis(queue.oldest_ms.unwrap_or(0));
        text.line(name, &[("queue", &queue.name)], seconds(oldest));
    }
    let gauges: [(&str, &str, Of); 2] = [
        ("vedetta_queue_slots_in_use", "Slots of the jobs that run.", |queue| queue.slots),
        (
            "vedetta_queue_capacity_slots",
            "Slots of the workers that took jobs here lately.",
            |queue| queue.capacity,
        ),
    ];
    for (name, help, of) in gauges {
        text.family(name, "gauge", help);
        for queue in &queues {
            text.line(name, &[("queue", &queue.name)], of(queue));
        }
    }
    let totals = observed.totals();
    text.family("vedetta_jobs_done_total", "counter", "Jobs that were done since the start.");
    for (queue, totals) in &totals {
        text.line("vedetta_jobs_done_total", &[("queue", queue)], totals.done);
    }
    text.family("vedetta_jobs_failed_total", "counter", "Attempts that failed since the start.");
    for (queue, totals) in &totals {
        text.line("vedetta_jobs_failed_total", &[("queue", queue)], totals.failed);
    }
    text.family("vedetta_job_run_seconds", "histogram", "How long attempts took.");
    for (queue, totals) in &totals {
        text.durations("vedetta_job_run_seconds", queue, &totals.ran);
    }
    let help = "How long jobs that were due waited, of up to 20 a second.";
    text.family("vedetta_job_wait_seconds", "histogram", help);
    for (queue, totals) in &totals {
        text.durations("vedetta_job_wait_seconds", queue, &totals.waited);
    }
}

fn store(context: &Context, text: &mut Text) {
    let status = context.store.status();
    text.one("vedetta_store_revision", "gauge", "The newest revision.", status.revision.0);
    let help = "The oldest revision that can be read.";
    text.one("vedetta_store_oldest_revision", "gauge", help, status.compacted.0);
    text.one("vedetta_store_keys", "gauge", "Keys that exist.", status.existing);
    text.one("vedetta_store_leases", "gauge", "Leases that live.", status.leases);
    text.one("vedetta_store_watches", "gauge", "Watches that are open.", status.watchers);
    text.one("vedetta_store_bytes", "gauge", "Bytes in use in the file.", status.size);
}

/// They are declared, so there are as many as there are.
fn watchers(context: &Context, text: &mut Text) {
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
    text.family(name, "gauge", "Revisions of this store that a watcher has not seen.");
    for (watcher, behind, _) in &rows {
        if let Some(behind) = behind {
            text.line(name, &[("watcher", watcher)], behind);
        }
    }
    text.family("vedetta_watcher_ids", "gauge", "Ids of a watcher, by what they are at.");
    for (watcher, _, status) in &rows {
        let states = [
            ("all", status.ids),
            ("running", status.running),
            ("waiting", status.waiting),
            ("failing", status.failing),
        ];
        for (state, count) in states {
            text.line("vedetta_watcher_ids", &[("watcher", watcher), ("state", state)], count);
        }
    }
    text.family("vedetta_watcher_runs_total", "counter", "Runs of a watcher since its start.");
    for (watcher, _, status) in &rows {
        for (outcome, count) in [("done", status.done), ("failed", status.failed)] {
            let labels = [("watcher", watcher.as_str()), ("outcome", outcome)];
            text.line("vedetta_watcher_runs_total", &labels, count);
        }
    }
    let name = "vedetta_watcher_lost_total";
    text.family(name, "counter", "Times a watcher lost its source.");
    for (watcher, _, status) in &rows {
        text.line(name, &[("watcher", watcher)], status.lost);
    }
}

/// As far as the system tells: on Linux.
fn process(text: &mut Text) {
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
        text.one("process_cpu_seconds_total", "counter", help, seconds(cpu));
    }
    if let Some(pages) = number(21) {
        text.one("process_resident_memory_bytes", "gauge", "Memory in use.", pages * PAGE);
    }
    if let Ok(files) = std::fs::read_dir("/proc/self/fd") {
        text.one("process_open_fds", "gauge", "Open files.", files.count());
    }
}

fn requests(context: &Context, text: &mut Text) {
    let name = "vedetta_http_requests_total";
    text.family(name, "counter", "Requests that were answered, by route and class of status.");
    for ((route, class), count) in &*context.live.requests.0.lock() {
        let (method, route) = route.split_once(' ').unwrap_or(("", route));
        let status = format!("{class}xx");
        text.line(name, &[("method", method), ("route", route), ("status", &status)], count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped() {
        let mut text = Text(String::new());
        text.line("a", &[("x", "q\"u\\o\nte"), ("y", "")], 1);
        assert_eq!(text.0, "a{x=\"q\\\"u\\\\o\\nte\",y=\"\"} 1\n");
    }

    #[test]
    fn queues_beyond_the_bound_are_one() {
        let queue =
            |n: usize| QueueInfo { name: format!("q{n:04}"), ready: 1, ..QueueInfo::default() };
        let queues = bounded((0..1000).map(queue).collect());
        assert_eq!(queues.len(), QUEUES + 1);
        assert_eq!((queues[QUEUES].name.as_str(), queues[QUEUES].ready), (OTHER, 900));
    }
}
