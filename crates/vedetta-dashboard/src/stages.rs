//! Stages: what is in their queues, what is wrong with which record, and trying one again.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;
use tokio::time::Instant;
use vedetta_stage::{LaneCounts, Page, Record, Records, StageError, Which};

use crate::api::Context;
use crate::error::ApiError;
use crate::input::Query;
use crate::json::{Json, millis};
use crate::redact;

/// The queues that are shown.
pub(crate) struct Stages {
    queues: Box<dyn Queues>,
    counted: Mutex<Option<Counted>>,
}

/// To count is to look at every record.
struct Counted {
    at: Instant,
    took: Duration,
    lanes: Vec<LaneCounts>,
}

impl Stages {
    pub(crate) fn new(records: impl Records) -> Self {
        Self { queues: Box::new(records), counted: Mutex::new(None) }
    }

    /// What is in the queues; counted again only when that was a while ago: long enough that counting,
    /// however many ask, takes a twentieth of the time at most.
    async fn counts(&self) -> Result<Vec<LaneCounts>, StageError> {
        const FRESH: Duration = Duration::from_millis(250);
        let mut counted = self.counted.lock().await;
        if let Some(counted) = &*counted
            && counted.at.elapsed() < FRESH.max(20 * counted.took)
        {
            return Ok(counted.lanes.clone());
        }
        let began = Instant::now();
        let lanes = self.queues.counts().await?;
        let now = Instant::now();
        *counted = Some(Counted { at: now, took: now - began, lanes: lanes.clone() });
        Ok(lanes)
    }
}

/// The queues of some database.
trait Queues: Send + Sync {
    fn counts(&self) -> Answer<'_, Vec<LaneCounts>>;
    fn list<'a>(&'a self, entity: &'a str, which: &'a Which, limit: u32) -> Answer<'a, Page>;
    fn retry<'a>(&'a self, entity: &'a str, stage: &'a str, id: &'a str) -> Answer<'a, bool>;
}

type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, StageError>> + Send + 'a>>;

impl<R: Records> Queues for R {
    fn counts(&self) -> Answer<'_, Vec<LaneCounts>> {
        Box::pin(Records::counts(self))
    }

    fn list<'a>(&'a self, entity: &'a str, which: &'a Which, limit: u32) -> Answer<'a, Page> {
        Box::pin(Records::list(self, entity, which, limit))
    }

    fn retry<'a>(&'a self, entity: &'a str, stage: &'a str, id: &'a str) -> Answer<'a, bool> {
        Box::pin(Records::retry(self, entity, stage, id))
    }
}

impl From<StageError> for ApiError {
    fn from(error: StageError) -> Self {
        let message = vedetta_core::explain(&error);
        if error.is_transient() {
            Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message).hint("try again")
        } else {
            Self::new(StatusCode::INTERNAL_SERVER_ERROR, "failed", message)
        }
    }
}

#[derive(Serialize)]
struct Listed {
    stages: Vec<Stage>,
}

#[derive(Serialize)]
#[allow(clippy::struct_field_names, reason = "the name of the stage is what the API calls it")]
struct Stage {
    entity: String,
    stage: String,
    records: u64,
    due: u64,
    held: u64,
    failing: u64,
    parked: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    oldest_due_ms: Option<u64>,
    done: u64,
    failed: u64,
    conflicts: u64,
}

impl From<LaneCounts> for Stage {
    fn from(lane: LaneCounts) -> Self {
        Self {
            entity: lane.entity,
            stage: lane.stage,
            records: lane.records,
            due: lane.due,
            held: lane.held,
            failing: lane.failing,
            parked: lane.parked,
            oldest_due_ms: lane.oldest_due.map(millis),
            done: lane.tally.done,
            failed: lane.tally.failed,
            conflicts: lane.tally.conflicts,
        }
    }
}

pub(crate) async fn list(
    State(context): State<Context>,
    query: Query,
) -> Result<Response, ApiError> {
    query.end()?;
    let lanes = match &context.stages {
        Some(stages) => stages.counts().await?,
        None => Vec::new(),
    };
    Ok(Json(Listed { stages: lanes.into_iter().map(Into::into).collect() }).into_response())
}

/// All of them, as they are listed.
pub(crate) async fn listed(context: &Context) -> Result<Vec<serde_json::Value>, ApiError> {
    let Some(stages) = &context.stages else { return Ok(Vec::new()) };
    let lanes = stages.counts().await?;
    Ok(lanes.into_iter().map(|lane| serde_json::json!(Stage::from(lane))).collect())
}

/// The first records of a stage that were set aside.
pub(crate) async fn parked(
    context: &Context,
    entity: &str,
    stage: &str,
    limit: u32,
) -> Result<Vec<Record>, ApiError> {
    let which = Which { stage: Some(stage.into()), parked: true, ..Which::default() };
    let queues = queues(context, entity, Some(stage)).await?;
    let mut records = queues.list(entity, &which, limit).await?.records;
    let errors = records.iter_mut().filter_map(|record| record.error.as_mut());
    errors.for_each(redact::hide_in);
    Ok(records)
}

/// An error as people see it.
fn shown(mut error: Option<String>) -> Option<String> {
    error.iter_mut().for_each(redact::hide_in);
    error
}

#[derive(Serialize)]
struct Shown {
    records: Vec<Entry>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<String>,
}

#[derive(Serialize)]
struct Entry {
    stage: String,
    id: String,
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    due_in_ms: Option<u64>,
    failures: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    age_ms: u64,
}

impl From<Record> for Entry {
    fn from(record: Record) -> Self {
        let state = match &record {
            Record { is_held: true, .. } => "held",
            Record { is_parked: true, .. } => "parked",
            Record { due_in: None, .. } => "due",
            Record { failures: 1.., .. } => "failing",
            _ => "waiting",
        };
        Self {
            stage: record.stage,
            id: record.id,
            state,
            due_in_ms: record.due_in.map(millis),
            failures: record.failures,
            error: shown(record.error),
            age_ms: millis(record.age),
        }
    }
}

/// The stage and the id that a page ended with, as text that says nothing to anybody else.
#[derive(Serialize, Deserialize)]
struct Cursor(String, String);

impl Cursor {
    fn encode(&self) -> String {
        BASE64_URL_SAFE_NO_PAD.encode(serde_json::to_vec(self).unwrap_or_default())
    }

    fn decode(text: &str) -> Result<Self, ApiError> {
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(text).ok();
        bytes
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .ok_or_else(|| ApiError::invalid("the cursor is not one of this list"))
    }
}

/// The queues, if there are any of this entity, and this stage among them.
async fn queues<'c>(
    context: &'c Context,
    entity: &str,
    stage: Option<&str>,
) -> Result<&'c dyn Queues, ApiError> {
    let lanes = match &context.stages {
        Some(stages) => stages.counts().await?,
        None => Vec::new(),
    };
    let mut ours = lanes.iter().filter(|lane| lane.entity == entity).peekable();
    let message = match (&context.stages, ours.peek(), stage) {
        (Some(stages), Some(_), None) => return Ok(&*stages.queues),
        (Some(stages), Some(_), Some(stage)) => {
            if ours.any(|lane| lane.stage == stage) {
                return Ok(&*stages.queues);
            }
            format!("{entity:?} has no stage {stage:?}")
        }
        _ => format!("there are no stages of {entity:?}"),
    };
    let hint = "`vedetta stage list` and GET /api/v1/stages have those that there are";
    Err(ApiError::not_found(message).hint(hint))
}

pub(crate) async fn entity(
    State(context): State<Context>,
    Path(entity): Path<String>,
    mut query: Query,
) -> Result<Response, ApiError> {
    let limit = u32::try_from(query.page()?).unwrap_or(u32::MAX);
    let after = query.text("cursor")?.map(|text| Cursor::decode(&text)).transpose()?;
    let which = Which {
        stage: query.text("stage")?,
        id: None,
        parked: query.flag("parked")?,
        after: after.map(|Cursor(stage, id)| (stage, id)),
    };
    query.end()?;
    let queues = queues(&context, &entity, which.stage.as_deref()).await?;
    let page = queues.list(&entity, &which, limit).await?;
    let last = page.records.last().filter(|_| page.more);
    let cursor = last.map(|last| Cursor(last.stage.clone(), last.id.clone()).encode());
    let records = page.records.into_iter().map(Into::into).collect();
    Ok(Json(Shown { records, cursor }).into_response())
}

pub(crate) async fn show(
    State(context): State<Context>,
    Path((entity, id)): Path<(String, String)>,
    query: Query,
) -> Result<Response, ApiError> {
    query.end()?;
    let which = Which { id: Some(id), ..Which::default() };
    let page = queues(&context, &entity, None).await?.list(&entity, &which, STAGES).await?;
    let records = page.records.into_iter().map(Into::into).collect();
    Ok(Json(Shown { records, cursor: None }).into_response())
}

/// More than any entity has.
const STAGES: u32 = 1_000;

#[derive(Serialize)]
pub(crate) struct Retried {
    retried: bool,
}

pub(crate) async fn retry(
    State(context): State<Context>,
    Path((entity, stage, id)): Path<(String, String, String)>,
) -> Result<Json<Retried>, ApiError> {
    let queues = queues(&context, &entity, Some(&stage)).await?;
    if queues.retry(&entity, &stage, &id).await? {
        Ok(Json(Retried { retried: true }))
    } else {
        let message = format!("{entity} {id:?} has no record in stage {stage:?}");
        Err(ApiError::not_found(message).hint("it may be done by now"))
    }
}
