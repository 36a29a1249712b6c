//! What is shown at a glance: the numbers of the overview, rows of jobs and queues without what is long, and
//! series. The pages, the API and the stream of events tell the same.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;
use vedetta_core::JobState;
use vedetta_fleet::Fleet;
use vedetta_fleet::wire::WorkerInfo;
use vedetta_jobs::wire::QueueInfo;
use vedetta_jobs::{Job, JobId, JobsError, Ledger as _, QueueCounts, stamp, status};
use vedetta_kv::Store;

use crate::api::Context;
use crate::error::ApiError;
use crate::hub::Hub;
use crate::input::Query;
use crate::json::{Json, millis};
use crate::metrics::Requests;
use crate::observe::Observed;
use crate::redact;
use crate::stats::Span;

/// What the pages and the stream of events live on.
#[derive(Default)]
pub(crate) struct Live {
    pub(crate) observed: Option<Arc<Observed>>,
    pub(crate) fleet: Option<Fleet>,
    pub(crate) hub: Hub,
    pub(crate) requests: Requests,
}

/// A worker, for people.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct WorkerRow {
    pub(crate) id: String,
    /// What it works.
    pub(crate) queue: String,
    #[serde(skip)]
    pub(crate) queues: Vec<String>,
    pub(crate) status: &'static str,
    /// It can be told what to do.
    pub(crate) beats: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) supervisor: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) host: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pid: Option<u32>,
    /// Slots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) capacity: Option<u32>,
    pub(crate) jobs: u64,
    /// Its last sign of life was so long ago.
    pub(crate) silent_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) note: Option<String>,
}

impl WorkerRow {
    /// It works, or may again.
    pub(crate) fn is_there(&self) -> bool {
        !matches!(self.status, "stopped" | "silent")
    }
}

impl From<WorkerInfo> for WorkerRow {
    fn from(worker: WorkerInfo) -> Self {
        Self {
            id: worker.id,
            queue: worker.queues.join(", "),
            queues: worker.queues,
            status: worker.status.word(),
            beats: true,
            supervisor: worker.supervisor,
            host: Some(worker.host),
            pid: Some(worker.pid),
            capacity: Some(worker.slots.capacity),
            jobs: worker.running.len() as u64,
            silent_ms: worker.seen_ms,
            note: worker.note,
        }
    }
}

impl Live {
    /// Who works: those that beat, and those that only took jobs from this server in the last minute.
    pub(crate) fn workers(&self) -> Vec<WorkerRow> {
        let known = self.fleet.as_ref().map(Fleet::workers).unwrap_or_default();
        let known = known.into_iter().map(redact::worker);
        let mut rows: Vec<WorkerRow> = known.map(WorkerRow::from).collect();
        let Some(observed) = &self.observed else { return rows };
        for seen in observed.workers() {
            let (queue, jobs) = (seen.queue.to_string(), u64::from(seen.holds));
            match rows.iter_mut().find(|row| *row.id == *seen.name) {
                Some(row) if row.beats => {}
                // It takes from several queues.
                Some(row) => {
                    row.queues.push(queue);
                    row.queue = row.queues.join(", ");
                    row.capacity = row.capacity.max(Some(seen.capacity));
                    row.jobs += jobs;
                    row.silent_ms = row.silent_ms.min(millis(seen.silent));
                }
                None => rows.push(WorkerRow {
                    id: seen.name.to_string(),
                    queue: queue.clone(),
                    queues: vec![queue],
                    status: "running",
                    beats: false,
                    supervisor: None,
                    host: None,
                    pid: None,
                    capacity: Some(seen.capacity),
                    jobs,
                    silent_ms: millis(seen.silent),
                    note: None,
                }),
            }
        }
        rows
    }

    /// Queues with what their numbers alone do not tell.
    pub(crate) fn with_rates(
        &self,
        counts: Vec<QueueCounts>,
        workers: &[WorkerRow],
    ) -> Vec<QueueInfo> {
        let mut queues: Vec<QueueInfo> = counts.into_iter().map(QueueInfo::from).collect();
        let Some(observed) = &self.observed else { return queues };
        for info in &mut queues {
            let ours =
                |worker: &&WorkerRow| worker.is_there() && worker.queues.contains(&info.name);
            let slots = workers.iter().filter(ours).filter_map(|worker| worker.capacity);
            info.capacity = slots.sum::<u32>().into();
            (info.done_per_minute, info.failed_per_minute) = observed.last_minute(Some(&info.name));
        }
        queues
    }

    /// Every queue.
    pub(crate) async fn queues(&self) -> Result<Vec<QueueInfo>, JobsError> {
        let Some(observed) = &self.observed else { return Ok(Vec::new()) };
        let counts = observed.queues().await?;
        Ok(self.with_rates(counts, &self.workers()))
    }
}

/// The numbers of the overview.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Overview {
    pub(crate) revision: u64,
    pub(crate) oldest: u64,
    pub(crate) keys: usize,
    pub(crate) leases: usize,
    pub(crate) watchers: usize,
    pub(crate) size: u64,
    /// Nothing while they cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) jobs: Option<JobsNow>,
    #[serde(with = "stamp")]
    pub(crate) now: SystemTime,
}

/// The jobs of all queues together.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct JobsNow {
    pub(crate) queues: usize,
    pub(crate) paused: usize,
    pub(crate) ready: u64,
    pub(crate) scheduled: u64,
    pub(crate) running: u64,
    pub(crate) slots: u64,
    pub(crate) capacity: u64,
    pub(crate) done: u64,
    pub(crate) dead: u64,
    pub(crate) cancelled: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) oldest_ms: Option<u64>,
    pub(crate) done_per_minute: u64,
    pub(crate) failed_per_minute: u64,
    pub(crate) workers: usize,
}

impl Overview {
    /// Without queues that could be read nothing is said of jobs.
    pub(crate) fn new(store: &Store, live: &Live, queues: Option<&[QueueInfo]>) -> Self {
        Self::with(store, live, queues, &live.workers())
    }

    /// The same where it is known who works.
    pub(crate) fn with(
        store: &Store,
        live: &Live,
        queues: Option<&[QueueInfo]>,
        workers: &[WorkerRow],
    ) -> Self {
        let status = store.status();
        Self {
            revision: status.revision.0,
            oldest: status.compacted.0,
            keys: status.existing,
            leases: status.leases,
            watchers: status.watchers,
            size: status.size,
            jobs: queues.map(|queues| JobsNow::new(live, queues, workers)),
            now: SystemTime::now(),
        }
    }
}

impl JobsNow {
    fn new(live: &Live, queues: &[QueueInfo], workers: &[WorkerRow]) -> Self {
        let sum = |of: fn(&QueueInfo) -> u64| queues.iter().map(of).sum();
        let (done_per_minute, failed_per_minute) =
            live.observed.as_ref().map_or((0, 0), |observed| observed.last_minute(None));
        let workers: Vec<&WorkerRow> = workers.iter().filter(|worker| worker.is_there()).collect();
        let capacity: u32 = workers.iter().filter_map(|worker| worker.capacity).sum();
        let paused = queues.iter().filter(|queue| queue.mode != vedetta_jobs::Mode::Open);
        Self {
            queues: queues.len(),
            paused: paused.count(),
            ready: sum(|queue| queue.ready),
            scheduled: sum(|queue| queue.scheduled),
            running: sum(|queue| queue.running),
            slots: sum(|queue| queue.slots),
            capacity: capacity.into(),
            done: sum(|queue| queue.done),
            dead: sum(|queue| queue.dead),
            cancelled: sum(|queue| queue.cancelled),
            oldest_ms: queues.iter().filter_map(|queue| queue.oldest_ms).max(),
            done_per_minute,
            failed_per_minute,
            workers: workers.len(),
        }
    }
}

/// Where the jobs are may be away: the store is told of all the same.
pub(crate) async fn overview(
    State(context): State<Context>,
    query: Query,
) -> Result<Response, ApiError> {
    query.end()?;
    let queues = context.live.queues().await.ok();
    Ok(Json(Overview::new(&context.store, &context.live, queues.as_deref())).into_response())
}

/// The range that is told unless another is asked for.
const RANGE: Duration = Duration::from_secs(3600);

/// A length of time in a query.
fn time(query: &mut Query, name: &str) -> Result<Option<Duration>, ApiError> {
    let Some(text) = query.text(name)? else { return Ok(None) };
    let time = humantime::parse_duration(&text);
    time.map(Some).map_err(|_| ApiError::invalid(format!("{name} is a time such as 15m or 1h")))
}

pub(crate) async fn stats(
    State(context): State<Context>,
    mut query: Query,
) -> Result<Response, ApiError> {
    let (range, step) = (time(&mut query, "range")?, time(&mut query, "step")?);
    let only = query.text("queue")?;
    query.end()?;
    let span = Span::new(range.unwrap_or(RANGE), step).map_err(ApiError::invalid)?;
    let observed = context.live.observed.as_ref();
    let observed = observed.ok_or_else(|| ApiError::not_found("this server keeps no jobs"))?;
    Ok(Json(observed.read(span, only.as_deref())).into_response())
}

/// Characters of an error or a message in a row.
const SHORT: usize = 300;

/// A job without what is long.
#[derive(Debug, Clone, Serialize, PartialEq)]
pub(crate) struct JobRow {
    pub(crate) id: JobId,
    pub(crate) kind: String,
    pub(crate) queue: String,
    pub(crate) status: &'static str,
    pub(crate) cost: u32,
    pub(crate) attempts: u32,
    pub(crate) max_attempts: u32,
    pub(crate) progress: f32,
    pub(crate) message: Option<String>,
    pub(crate) error: Option<String>,
    pub(crate) worker: Option<String>,
    pub(crate) tags: Vec<String>,
    #[serde(with = "stamp")]
    pub(crate) queued_at: SystemTime,
    #[serde(with = "stamp")]
    pub(crate) run_at: SystemTime,
    #[serde(with = "stamp::maybe")]
    pub(crate) started_at: Option<SystemTime>,
    #[serde(with = "stamp::maybe")]
    pub(crate) ended_at: Option<SystemTime>,
    #[serde(with = "stamp")]
    pub(crate) updated_at: SystemTime,
}

fn redacted(text: String) -> String {
    redact::text(&text).unwrap_or(text)
}

fn short(text: String) -> String {
    match text.char_indices().nth(SHORT) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

impl From<Job> for JobRow {
    fn from(job: Job) -> Self {
        Self {
            id: job.id,
            kind: job.kind,
            queue: job.queue,
            status: status::word(job.status),
            cost: job.cost,
            attempts: job.attempts,
            max_attempts: job.max_attempts,
            progress: job.progress,
            message: job.message.map(redacted).map(short),
            error: job.error.map(redacted).map(short),
            worker: job.worker,
            tags: job.tags,
            queued_at: job.queued_at,
            run_at: job.run_at,
            started_at: job.started_at,
            ended_at: job.ended_at,
            updated_at: job.updated_at,
        }
    }
}

impl JobRow {
    /// The word that people are shown: of those that wait, why.
    pub(crate) fn look(&self, now: SystemTime) -> &'static str {
        match self.status {
            "waiting" if self.run_at <= now + Duration::from_secs(1) => "waiting",
            "waiting" if self.attempts > 0 => "retrying",
            "waiting" => "scheduled",
            other => other,
        }
    }

    pub(crate) fn is(&self, state: JobState) -> bool {
        self.status == status::word(state)
    }
}
