//! What happens to jobs, as spans of traces.
//!
//! ```text
//! enqueue ─┬─ wait ── attempt 1 ── settle: again
//!          └─ wait ── attempt 2 ── settle: done
//! ```
//!
//! The place of `enqueue` travels with the job, so that one trace holds all of it, whichever processes it passes
//! through. Payloads, results and errors, which may quote them, are not told.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use vedetta_core::Failure;
use vedetta_core::queue::Settled;
use vedetta_core::trace::{Label, Span, SpanKind, Spans, Trace};

use crate::job::{Enqueued, Fate, Given, JobId, NewJob};
use crate::worker::Outcome;

/// A clock time, and how long it is since, by a clock that does not jump.
#[derive(Debug, Clone, Copy)]
struct Began(SystemTime, Instant);

impl Began {
    fn now() -> Self {
        Self(SystemTime::now(), Instant::now())
    }

    fn earlier(self, by: Duration) -> SystemTime {
        self.0.checked_sub(by).unwrap_or(SystemTime::UNIX_EPOCH)
    }
}

/// The place of something new: below another, or at the beginning of a trace.
fn place(parent: Option<Trace>, spans: &dyn Spans) -> Trace {
    let span = fastrand::u64(..);
    parent.map_or_else(
        || {
            let id = fastrand::u128(..);
            Trace::new(id, span, spans.samples(id))
        },
        |parent| parent.below(span),
    )
}

fn labels(kind: &str, queue: &str, id: JobId, operation: &str) -> Vec<(&'static str, Label)> {
    vec![
        ("messaging.system", "vedetta".into()),
        ("messaging.operation.type", operation.into()),
        ("messaging.destination.name", queue.into()),
        ("messaging.message.id", Label::Text(id.to_string())),
        ("vedetta.job.kind", kind.into()),
    ]
}

/// A job that is being asked for.
pub struct Asking {
    parent: Option<Trace>,
    began: Began,
}

impl Asking {
    /// Gives the job a place of its own, below the one it has, if any.
    pub fn begin(job: &mut NewJob, spans: &dyn Spans) -> Self {
        let parent = job.trace;
        job.trace = Some(place(parent, spans));
        Self { parent, began: Began::now() }
    }

    /// It is there.
    pub fn end(self, job: &NewJob, enqueued: Enqueued, spans: &dyn Spans) {
        let Some(place) = job.trace.filter(|place| place.is_sampled()) else { return };
        let mut labels = labels(&job.kind, &job.queue, enqueued.id, "send");
        labels.push(("vedetta.job.new", enqueued.is_new.into()));
        spans.ended(Span {
            name: format!("enqueue {}", job.kind),
            kind: SpanKind::Producer,
            place,
            parent: self.parent.map(Trace::span),
            began: self.began.0,
            took: self.began.1.elapsed(),
            labels,
            failed: None,
        });
    }
}

/// An attempt at a job, from when it was handed out until it is settled.
pub(crate) struct Attempt {
    spans: Arc<dyn Spans>,
    place: Trace,
    parent: Option<Trace>,
    taken: Began,
    waited: Option<Duration>,
    labels: Vec<(&'static str, Label)>,
    kind: String,
    /// When its handler was done.
    ended: Mutex<Option<Began>>,
}

impl Attempt {
    /// Nothing if nobody wants to see it.
    pub(crate) fn new(
        spans: &Arc<dyn Spans>,
        given: &Given,
        queue: &str,
        worker: &str,
    ) -> Option<Self> {
        let place = place(given.trace, &**spans);
        if !place.is_sampled() {
            return None;
        }
        let mut labels = labels(&given.kind, queue, given.claim.id, "process");
        labels.push(("vedetta.job.attempt", given.attempt.into()));
        labels.push(("vedetta.worker", worker.into()));
        Some(Self {
            spans: Arc::clone(spans),
            place,
            parent: given.trace,
            taken: Began::now(),
            waited: given.waited,
            labels,
            kind: given.kind.clone(),
            ended: Mutex::default(),
        })
    }

    pub(crate) fn place(&self) -> Trace {
        self.place
    }

    /// It begins to run, and waits no more.
    pub(crate) fn start(self: &Arc<Self>) -> Run {
        let began = Began::now();
        if let Some(waited) = self.waited {
            let took = waited.saturating_add(self.taken.1.elapsed());
            self.spans.ended(Span {
                name: format!("wait {}", self.kind),
                kind: SpanKind::Internal,
                place: self.place.below(fastrand::u64(..)),
                parent: Some(self.parent.unwrap_or(self.place).span()),
                began: began.earlier(took),
                took,
                labels: self.labels.clone(),
                failed: None,
            });
        }
        Run { attempt: Arc::clone(self), began, is_over: false, failed: None }
    }

    /// It was settled.
    pub(crate) fn settled(&self, fate: Option<&Fate>, settled: Settled) {
        let Began(began, since) = self.ended.lock().unwrap_or(self.taken);
        let mut labels = self.labels.clone();
        labels[1].1 = "settle".into();
        let outcome = match (settled, fate) {
            (Settled::Stale, _) => "stale",
            (_, Some(Fate::Done { .. }) | None) => "done",
            (_, Some(Fate::Again { .. })) => "again",
            (_, Some(Fate::Dead { .. })) => "dead",
            (_, Some(Fate::Snooze(_))) => "snooze",
            (_, Some(Fate::Released)) => "released",
        };
        labels.push(("vedetta.job.outcome", outcome.into()));
        if let Some(Fate::Again { after, .. } | Fate::Snooze(after)) = fate {
            let ms = u64::try_from(after.as_millis()).unwrap_or(u64::MAX);
            labels.push(("vedetta.job.retry_ms", ms.into()));
        }
        self.spans.ended(Span {
            name: format!("settle {}", self.kind),
            kind: SpanKind::Internal,
            place: self.place.below(fastrand::u64(..)),
            parent: Some(self.place.span()),
            began,
            took: since.elapsed(),
            labels,
            failed: None,
        });
    }
}

/// The run of a handler; over when it is dropped.
pub(crate) struct Run {
    attempt: Arc<Attempt>,
    began: Began,
    is_over: bool,
    /// One word for why it failed, if it did.
    failed: Option<&'static str>,
}

impl Run {
    pub(crate) fn end(&mut self, ended: &Result<Outcome, Failure>) {
        self.is_over = true;
        self.failed = match ended {
            Ok(Outcome::Dead(_)) | Err(Failure::Error(_)) => Some("error"),
            Ok(_) => None,
            Err(Failure::Timeout(_)) => Some("timeout"),
            Err(Failure::Panic(_)) => Some("panic"),
        };
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let Self { attempt, began, is_over, failed } = self;
        *attempt.ended.lock() = Some(Began::now());
        let cut = if std::thread::panicking() { "panic" } else { "interrupted" };
        attempt.spans.ended(Span {
            name: format!("attempt {}", attempt.kind),
            kind: SpanKind::Consumer,
            place: attempt.place,
            parent: attempt.parent.map(Trace::span),
            began: began.0,
            took: began.1.elapsed(),
            labels: attempt.labels.clone(),
            failed: if *is_over { *failed } else { Some(cut) },
        });
    }
}
