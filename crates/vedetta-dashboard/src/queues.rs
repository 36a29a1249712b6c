//! Queues: what is in them, whether they take and give, and how a worker gets jobs out of them.
//!
//! A take may wait until there is something, which others use as one call that blocks; our own workers read
//! the stream of wake-ups, and take when it says so. Whoever hangs up takes nothing along: what a take finds
//! for somebody who is gone goes back at once, and what was on the line when it broke when its lease lapses.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequestParts, Path, State};
use axum::http::header;
use axum::http::request::Parts;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::{FutureExt as _, poll, stream};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until};
use vedetta_core::queue::Woken;
use vedetta_jobs::wire::{
    GivenJob, LEASES, LONGEST_WAIT, MOST_TAKEN, QueueMode, Queues, Take, Taken,
};
use vedetta_jobs::{Ear, Fate, JobsError, LEASE, Ledger, Mode, Wanted, check_name};

use crate::api::Context;
use crate::error::ApiError;
use crate::input::{JsonBody, Query};
use crate::jobs::ledger;
use crate::json::{Json, millis};

/// The queue named in a path.
pub(crate) struct QueuePath(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for QueuePath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let name = Path::<String>::from_request_parts(parts, state).await;
        let Path(name) = name.map_err(|_| ApiError::invalid("the name of a queue is text"))?;
        check_name("queue", &name)?;
        Ok(Self(name))
    }
}

pub(crate) async fn list(
    State(context): State<Context>,
    query: Query,
) -> Result<Json<Queues>, ApiError> {
    query.end()?;
    let counts = ledger(&context)?.queues().await?;
    let queues = context.live.with_rates(counts, &context.live.workers());
    Ok(Json(Queues { queues }))
}

pub(crate) async fn pause(context: State<Context>, queue: QueuePath) -> Answer {
    set(context, queue, Mode::Paused).await
}

pub(crate) async fn resume(context: State<Context>, queue: QueuePath) -> Answer {
    set(context, queue, Mode::Open).await
}

pub(crate) async fn drain(context: State<Context>, queue: QueuePath) -> Answer {
    set(context, queue, Mode::Draining).await
}

type Answer = Result<Json<QueueMode>, ApiError>;

async fn set(State(context): State<Context>, QueuePath(name): QueuePath, mode: Mode) -> Answer {
    set_mode(&context, &name, mode).await?;
    Ok(Json(QueueMode { name, mode }))
}

/// A name that nobody has heard of is mistyped, more often than meant for later.
pub(crate) async fn set_mode(context: &Context, name: &str, mode: Mode) -> Result<(), ApiError> {
    let ledger = ledger(context)?;
    let is_known = context.queues.contains(name)
        || ledger.queues().await?.iter().any(|counts| counts.name == name);
    if !is_known {
        return Err(ApiError::not_found(format!("there is no queue {name:?}"))
            .hint("there is one once it is declared, or had a job"));
    }
    Ok(ledger.set_mode(name, mode).await?)
}

/// What a worker asks for, checked.
#[derive(Clone)]
struct Asked {
    queue: String,
    worker: String,
    room: u32,
    capacity: u32,
    lease: Duration,
}

pub(crate) async fn take(
    State(context): State<Context>,
    QueuePath(queue): QueuePath,
    JsonBody(take): JsonBody<Take>,
) -> Result<Json<Taken>, ApiError> {
    check_name("worker", &take.worker)?;
    let lease = take.lease_ms.map_or(LEASE, Duration::from_millis);
    if !LEASES.contains(&lease) {
        let (from, to) = (millis(*LEASES.start()), millis(*LEASES.end()));
        return Err(ApiError::invalid(format!("lease_ms is from {from} to {to}")));
    }
    if take.max == 0 || take.capacity == Some(0) {
        return Err(ApiError::invalid("max and capacity are 1 or more"));
    }
    // Who does not count slots counts jobs.
    let capacity = take.capacity.unwrap_or(1);
    let room = take.max.min(MOST_TAKEN);
    let asked = Asked { queue, worker: take.worker, room, capacity, lease };
    let ledger = ledger(&context)?;
    let until = Instant::now() + Duration::from_millis(take.wait_ms).min(LONGEST_WAIT);
    let ear = Ear::default();
    // What was rung before the first look is of no interest.
    while ledger.woken(&asked.queue, &ear).now_or_never().is_some() {}
    loop {
        // Before the look, so that nothing falls between the two.
        let mut woken = std::pin::pin!(ledger.woken(&asked.queue, &ear));
        let was_woken = poll!(woken.as_mut()).is_ready();
        let found = hand_out(Arc::clone(ledger), asked.clone()).await?;
        let now = Instant::now();
        if !found.jobs.is_empty() || now >= until || context.stop.is_cancelled() {
            let jobs = found.jobs.into_iter().map(|given| GivenJob::new(given, lease)).collect();
            return Ok(Json(Taken { jobs, rest_ms: found.rest.map(millis) }));
        }
        let rest = found.rest.unwrap_or_default().clamp(SOON, LONGEST_WAIT);
        tokio::select! {
            _ = woken, if !was_woken => {}
            () = sleep_until(until.min(now + if was_woken { SOON } else { rest })) => {}
            () = context.stop.cancelled() => {}
        }
    }
}

/// Nobody looks again sooner than that for nothing.
const SOON: Duration = Duration::from_millis(1);

/// Takes; and gives back what nobody is there for any more.
async fn hand_out(ledger: Arc<dyn Ledger>, asked: Asked) -> Result<vedetta_jobs::Taken, JobsError> {
    let (answer, heard) = oneshot::channel();
    tokio::spawn(async move {
        let Asked { queue, worker, room, capacity, lease } = &asked;
        let (room, capacity, lease) = (*room, *capacity, *lease);
        let taken = ledger.take(&Wanted { queue, worker, room, capacity, lease }).await;
        if let Err(Ok(unheard)) = answer.send(taken)
            && !unheard.jobs.is_empty()
        {
            let back = unheard.jobs.iter().map(|given| (given.claim, Fate::Released));
            if let Err(error) = ledger.settle(&back.collect::<Vec<_>>()).await {
                tracing::warn!(%error, "jobs were not given back: they come when their leases lapse");
            }
        }
    });
    heard.await.unwrap_or_else(|broken| Err(JobsError::Failed(Box::new(broken))))
}

/// Says when there may be more to take, or a job may have been called off: a message without anything in it,
/// `more` or `look`.
pub(crate) async fn wake(
    State(context): State<Context>,
    QueuePath(queue): QueuePath,
    query: Query,
) -> Result<Response, ApiError> {
    query.end()?;
    let ledger = Arc::clone(ledger(&context)?);
    let mut bell = Bell { ledger, queue, ear: Arc::default(), next: None, context };
    // From now on, and not from when the client has read this much.
    bell.listen().await;
    let body = Body::from_stream(stream::unfold(bell, Bell::next));
    Ok(([(header::CONTENT_TYPE, "text/event-stream")], body).into_response())
}

struct Bell {
    ledger: Arc<dyn Ledger>,
    queue: String,
    ear: Arc<Ear>,
    next: Option<Next>,
    context: Context,
}

/// What it says next.
enum Next {
    Known(Woken),
    Coming(Pin<Box<dyn Future<Output = Woken> + Send>>),
}

impl Bell {
    /// Begins to wait for the next wake-up.
    async fn listen(&mut self) {
        let (ledger, queue) = (Arc::clone(&self.ledger), self.queue.clone());
        let ear = Arc::clone(&self.ear);
        let mut coming: Pin<Box<dyn Future<Output = Woken> + Send>> =
            Box::pin(async move { ledger.woken(&queue, &ear).await });
        self.next = Some(match poll!(coming.as_mut()) {
            std::task::Poll::Ready(woken) => Next::Known(woken),
            std::task::Poll::Pending => Next::Coming(coming),
        });
    }

    async fn next(mut self) -> Option<(Result<Bytes, Infallible>, Self)> {
        let said = match self.next.take() {
            None => return None,
            Some(Next::Known(woken)) => Some(woken),
            Some(Next::Coming(mut coming)) => tokio::select! {
                () = self.context.stop.cancelled() => return None,
                woken = &mut coming => Some(woken),
                () = sleep(self.context.limits.sign_of_life) => {
                    self.next = Some(Next::Coming(coming));
                    None
                }
            },
        };
        let message = match said {
            Some(Woken::More) => "event: more\ndata: {}\n\n",
            Some(Woken::Look) => "event: look\ndata: {}\n\n",
            None => ":\n\n",
        };
        if said.is_some() {
            self.listen().await;
        }
        Some((Ok(Bytes::from_static(message.as_bytes())), self))
    }
}
