//! Jobs: asked for, shown, and changed by hand; and kept and settled by who works on them. How a worker gets
//! them is said in `queues`.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Path, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use vedetta_core::{JobState, Trace, queue};
use vedetta_jobs::wire::{
    Added, Changed, Deleted, Keep, Kept, Listed, MOST_AT_ONCE, OneOrMany, Retried, Settle,
    Settlement, Verdict, Which,
};
use vedetta_jobs::{
    Asked, Change, Claim, Filter, Job, JobId, JobsError, Ledger, Page, status, wire,
};
use vedetta_kv::{CommitError, KvError};

use crate::api::Context;
use crate::error::ApiError;
use crate::input::{JsonBody, Query};
use crate::json::{Json, millis};
use crate::redact;

/// A page ends after about so many bytes, whatever its limit.
const PAGE_BYTES: usize = 1 << 20;
/// Jobs are read so many at a time, as each may be large.
const READ: u32 = 50;
/// Jobs that one request has retried at most, and at once.
const RETRIED: u32 = 500;
const AT_ONCE: usize = 64;

impl From<JobsError> for ApiError {
    fn from(error: JobsError) -> Self {
        let message = vedetta_core::explain(&error);
        match error {
            JobsError::Invalid(_) => Self::invalid(message),
            JobsError::Draining(_) => {
                Self::conflict(message).hint("resume it, or use another queue")
            }
            JobsError::Unavailable(cause) | JobsError::Failed(cause)
                if cause.is::<CommitError>() =>
            {
                match cause.downcast::<CommitError>() {
                    Ok(lost) => KvError::Lost(*lost).into(),
                    Err(_) => unreachable!("it is one"),
                }
            }
            JobsError::Unavailable(_) => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message).hint("try again")
            }
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, "failed", message),
        }
    }
}

/// The jobs that are served.
pub(crate) fn ledger(context: &Context) -> Result<&Arc<dyn Ledger>, ApiError> {
    context.jobs.as_ref().ok_or_else(|| ApiError::not_found("this server keeps no jobs"))
}

/// The job named in a path.
pub(crate) struct JobPath(pub(crate) JobId);

impl<S: Send + Sync> FromRequestParts<S> for JobPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let wrong = || ApiError::invalid("the id of a job is a whole number");
        let id = Path::<String>::from_request_parts(parts, state).await;
        let Path(id) = id.map_err(|_| wrong())?;
        id.parse().map(Self).map_err(|_| wrong())
    }
}

pub(crate) fn no_such(id: JobId) -> ApiError {
    ApiError::not_found(format!("there is no job {id}"))
        .hint("those that are over are removed after a while")
}

/// Some at once, each of which is right.
fn bounded<T>(items: Vec<T>) -> Result<Vec<T>, ApiError> {
    if items.len() > MOST_AT_ONCE {
        return Err(ApiError::invalid(format!("give {MOST_AT_ONCE} at most at once")));
    }
    Ok(items)
}

pub(crate) async fn add(
    State(context): State<Context>,
    headers: HeaderMap,
    JsonBody(body): JsonBody<OneOrMany<Asked>>,
) -> Result<(StatusCode, Json<OneOrMany<Added>>), ApiError> {
    let ledger = ledger(&context)?;
    // One that cannot be read is as good as none.
    let caller = headers.get("traceparent").and_then(|value| value.to_str().ok()?.parse().ok());
    let complete = |asked: Asked| {
        let trace: Option<Trace> = asked.trace.or(caller);
        context.kinds.complete(Asked { trace, ..asked })
    };
    let (jobs, alone) = match body {
        OneOrMany::One(asked) => (vec![complete(asked)?], true),
        OneOrMany::Many(asked) => {
            let each = bounded(asked)?.into_iter().enumerate().map(|(place, asked)| {
                let job = complete(asked);
                job.map_err(|wrong| ApiError::invalid(wire::number(place + 1, &wrong)))
            });
            (each.collect::<Result<_, _>>()?, false)
        }
    };
    let enqueued = ledger.enqueue(&jobs).await?;
    let any_new = enqueued.iter().any(|enqueued| enqueued.is_new);
    let status = if any_new { StatusCode::CREATED } else { StatusCode::OK };
    let added = jobs.iter().zip(enqueued);
    let mut added: Vec<Added> =
        added.map(|(job, enqueued)| Added::new(job, enqueued, &context.kinds)).collect();
    let body = match added.pop() {
        Some(only) if alone => OneOrMany::One(only),
        last => {
            added.extend(last);
            OneOrMany::Many(added)
        }
    };
    Ok((status, Json(body)))
}

pub(crate) async fn list(
    State(context): State<Context>,
    mut query: Query,
) -> Result<Json<Listed>, ApiError> {
    let limit = query.page()?;
    let which = Which {
        status: query.text("status")?,
        queue: query.text("queue")?,
        kind: query.text("kind")?,
        tag: query.text("tag")?,
        q: query.text("q")?,
        cursor: query.text("cursor")?,
    };
    query.end()?;
    let page = page_of(ledger(&context)?, which, limit).await?;
    Ok(Json(Listed { jobs: page.jobs, cursor: page.next.map(|id| id.to_string()) }))
}

/// A page of jobs, shorter if they are large.
pub(crate) async fn page_of(
    ledger: &Arc<dyn Ledger>,
    which: Which,
    limit: usize,
) -> Result<Page, ApiError> {
    let (filter, mut before) = which.parse()?;
    if let Some(text) = &filter.text {
        return search(ledger, &filter, text, before, limit).await;
    }
    let (mut jobs, mut bytes) = (Vec::new(), 0);
    while jobs.len() < limit && bytes < PAGE_BYTES {
        let wanted = READ.min(u32::try_from(limit - jobs.len()).unwrap_or(READ));
        let page = ledger.list(&filter, before, wanted).await?;
        let found = page.jobs.len();
        bytes += page.jobs.iter().map(size).sum::<usize>();
        jobs.extend(page.jobs.into_iter().map(redact::job));
        before = page.next;
        // A long search goes on with the next page.
        if before.is_none() || found < wanted as usize {
            break;
        }
    }
    Ok(Page { jobs, next: before })
}

/// A page of jobs with a text in what is shown of them.
///
/// What is hidden is not found, nor does it show in where a page ends: a search would tell it letter by letter. So a
/// page ends after a job that is shown, or where one ends that finds nothing.
async fn search(
    ledger: &Arc<dyn Ledger>,
    filter: &Filter,
    text: &str,
    start: Option<JobId>,
    limit: usize,
) -> Result<Page, ApiError> {
    let (mut jobs, mut bytes): (Vec<Job>, usize) = (Vec::new(), 0);
    let (mut before, mut end) = (start, None);
    loop {
        let found = ledger.list(filter, before, READ).await?;
        if found.next.is_some() && end.is_none() {
            end = Some(end_of_search(ledger, filter, start).await?);
        }
        let floor = end.flatten();
        let is_within = |id: JobId| floor.is_none_or(|floor| id >= floor);
        for job in found.jobs.into_iter().filter(|job| is_within(job.id)).map(redact::job) {
            if !has(&job, text) {
                continue;
            }
            if jobs.len() >= limit || bytes >= PAGE_BYTES {
                let next = jobs.last().map(|job| job.id);
                return Ok(Page { jobs, next });
            }
            bytes += size(&job);
            jobs.push(job);
        }
        before = found.next.filter(|next| floor.is_none_or(|floor| *next > floor));
        if before.is_none() {
            return Ok(Page { jobs, next: floor });
        }
    }
}

/// Where a search from there on would be cut if nothing were found.
async fn end_of_search(
    ledger: &Arc<dyn Ledger>,
    filter: &Filter,
    start: Option<JobId>,
) -> Result<Option<JobId>, ApiError> {
    let nowhere = format!("{:032x}", fastrand::u128(..));
    let filter = Filter { text: Some(nowhere), ..filter.clone() };
    Ok(ledger.list(&filter, start, 1).await?.next)
}

/// Whether a text is in what is searched.
fn has(job: &Job, text: &str) -> bool {
    let texts = [Some(job.payload.get()), job.error.as_deref(), job.unique_key.as_deref()];
    texts.into_iter().flatten().chain([job.kind.as_str()]).any(|all| all.contains(text))
}

/// About how long it is as JSON.
fn size(job: &Job) -> usize {
    let result = job.result.as_ref().map_or(0, |result| result.get().len());
    job.payload.get().len() + result + job.log.len()
}

pub(crate) async fn show(
    State(context): State<Context>,
    JobPath(id): JobPath,
    mut query: Query,
) -> Result<Json<Job>, ApiError> {
    let reveal = query.flag("reveal")?;
    query.end()?;
    let job = ledger(&context)?.job(id).await?.ok_or_else(|| no_such(id))?;
    Ok(Json(if reveal { job } else { redact::job(job) }))
}

/// Whether a change by hand was made.
pub(crate) fn made(id: JobId, change: Change, hint: &str) -> Result<(), ApiError> {
    match change {
        Change::Made => Ok(()),
        Change::NoSuch => Err(no_such(id)),
        Change::Not(state) => {
            let message = format!("job {id} is {}", status::word(state));
            Err(ApiError::conflict(message).hint(hint))
        }
    }
}

pub(crate) async fn delete(
    State(context): State<Context>,
    JobPath(id): JobPath,
) -> Result<Json<Deleted>, ApiError> {
    made(id, ledger(&context)?.delete(id).await?, "cancel it first")?;
    Ok(Json(Deleted { id, deleted: true }))
}

pub(crate) async fn retry(
    State(context): State<Context>,
    JobPath(id): JobPath,
) -> Result<Json<Changed>, ApiError> {
    let change = ledger(&context)?.retry(id).await?;
    made(id, change, "only a job that is dead or was cancelled can be retried")?;
    Ok(Json(Changed { id, status: JobState::Waiting }))
}

pub(crate) async fn cancel(
    State(context): State<Context>,
    JobPath(id): JobPath,
) -> Result<Json<Changed>, ApiError> {
    let change = ledger(&context)?.cancel(id).await?;
    made(id, change, "only a job that waits or runs can be cancelled")?;
    Ok(Json(Changed { id, status: JobState::Cancelled }))
}

/// As many as one request may take, and where to go on.
pub(crate) async fn retry_all(
    State(context): State<Context>,
    JsonBody(which): JsonBody<Which>,
) -> Result<Json<Retried>, ApiError> {
    retry_matching(ledger(&context)?, which).await.map(Json)
}

pub(crate) async fn retry_matching(
    ledger: &Arc<dyn Ledger>,
    which: Which,
) -> Result<Retried, ApiError> {
    let (mut filter, mut before) = which.parse()?;
    match *filter.status.get_or_insert(JobState::Dead) {
        JobState::Dead | JobState::Cancelled => {}
        state => {
            let message = format!("jobs that are {} cannot be retried", status::word(state));
            return Err(ApiError::invalid(message).hint("give the status dead or cancelled"));
        }
    }
    let (mut retried, mut looked_at) = (0, 0);
    while looked_at < RETRIED {
        let page = ledger.list(&filter, before, READ).await?;
        before = page.next;
        // An empty page was a long search, too.
        looked_at += READ;
        let each = stream::iter(page.jobs).map(|job| async move {
            match ledger.retry(job.id).await {
                // Others may have been faster, or another waits under its key: on to the next.
                Ok(change) => Ok(u64::from(change == Change::Made)),
                Err(JobsError::Invalid(_)) => Ok(0),
                Err(error) => Err(error),
            }
        });
        let made: Vec<u64> = each.buffer_unordered(AT_ONCE).try_collect().await?;
        retried += made.into_iter().sum::<u64>();
        if before.is_none() {
            break;
        }
    }
    Ok(Retried { retried, cursor: before.map(|id| id.to_string()) })
}

/// What of many belongs to which job.
fn each<T>(items: Vec<T>, id: impl Fn(&T) -> Option<JobId>) -> Result<Vec<(JobId, T)>, ApiError> {
    let with_id = |item| match id(&item) {
        Some(id) => Ok((id, item)),
        None => Err(ApiError::invalid("each of them needs its id")),
    };
    bounded(items)?.into_iter().map(with_id).collect()
}

fn alone(id: Option<JobId>) -> Result<(), ApiError> {
    match id {
        None => Ok(()),
        Some(_) => Err(ApiError::invalid("the id is in the path already")),
    }
}

pub(crate) async fn keep(
    State(context): State<Context>,
    JobPath(id): JobPath,
    JsonBody(note): JsonBody<Keep>,
) -> Result<Json<Kept>, ApiError> {
    alone(note.id)?;
    let ledger = ledger(&context)?;
    let kept = keep_each(ledger, vec![(id, note)]).await?[0];
    if kept.stale { Err(lost(ledger, id).await?) } else { Ok(Json(kept)) }
}

pub(crate) async fn keep_all(
    State(context): State<Context>,
    JsonBody(notes): JsonBody<Vec<Keep>>,
) -> Result<Json<Vec<Kept>>, ApiError> {
    keep_each(ledger(&context)?, each(notes, |note| note.id)?).await.map(Json)
}

async fn keep_each(
    ledger: &Arc<dyn Ledger>,
    notes: Vec<(JobId, Keep)>,
) -> Result<Vec<Kept>, ApiError> {
    let mut held = Vec::with_capacity(notes.len());
    let mut leases = Vec::with_capacity(notes.len());
    for (id, keep) in notes {
        let token = keep.token;
        held.push((Claim { id, token: token.token }, keep.note()?));
        leases.push(millis(token.lease));
    }
    let kept = ledger.keep(&held).await?;
    let mut answers = Vec::with_capacity(kept.len());
    for (((claim, _), lease_ms), kept) in held.iter().zip(leases).zip(kept) {
        answers.push(match kept {
            queue::Kept::Ours | queue::Kept::Unknown => {
                Kept { cancel: false, stale: false, lease_ms }
            }
            queue::Kept::Lost => {
                let job = ledger.job(claim.id).await?;
                let cancel = job.is_some_and(|job| job.status == JobState::Cancelled);
                Kept { cancel, stale: !cancel, lease_ms: 0 }
            }
        });
    }
    Ok(answers)
}

/// Why a claim no longer stands.
async fn lost(ledger: &Arc<dyn Ledger>, id: JobId) -> Result<ApiError, ApiError> {
    Ok(match ledger.job(id).await? {
        None => no_such(id),
        Some(job) if job.status == JobState::Cancelled => {
            ApiError::conflict(format!("job {id} was cancelled")).hint("end it")
        }
        Some(_) => ApiError::conflict(format!("job {id} is no longer yours: the token is stale"))
            .hint("end it; to have it for longer, keep it before lease_ms are over"),
    })
}

pub(crate) async fn settle(
    State(context): State<Context>,
    JobPath(id): JobPath,
    JsonBody(end): JsonBody<Settle>,
) -> Result<Json<Settlement>, ApiError> {
    alone(end.id)?;
    let ledger = ledger(&context)?;
    match settle_each(ledger, vec![(id, end)]).await?[0] {
        Settlement::Stale => Err(lost(ledger, id).await?),
        settled => Ok(Json(settled)),
    }
}

pub(crate) async fn settle_all(
    State(context): State<Context>,
    JsonBody(ends): JsonBody<Vec<Settle>>,
) -> Result<Json<Vec<Settlement>>, ApiError> {
    settle_each(ledger(&context)?, each(ends, |end| end.id)?).await.map(Json)
}

async fn settle_each(
    ledger: &Arc<dyn Ledger>,
    ends: Vec<(JobId, Settle)>,
) -> Result<Vec<Settlement>, ApiError> {
    let mut ended = Vec::with_capacity(ends.len());
    for (id, end) in ends {
        let claim = Claim { id, token: end.token.token };
        let fate = match end.verdict()? {
            Verdict::Clear(fate) => fate,
            failed @ Verdict::Failed { .. } => {
                let job = ledger.job(id).await?;
                // Of one that is gone nothing is stored, whatever it is.
                let (attempts, most) = job.map_or((1, 1), |job| (job.attempts, job.max_attempts));
                failed.fate(attempts, most, fastrand::f64())
            }
        };
        ended.push((claim, fate));
    }
    Ok(ledger.settle(&ended).await?.into_iter().map(Settlement::from).collect())
}
