//! Watchers: how they are doing, what is wrong with which id, and running all ids again.

use axum::extract::State;
use axum::extract::{FromRequestParts, Path};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;
use vedetta_runtime::watcher::{Status, Trouble};

use crate::api::{Context, Watched};
use crate::error::ApiError;
use crate::input::Query;
use crate::json::{Json, Text, millis};

#[derive(Serialize)]
struct Listed<'a> {
    watchers: Vec<Watcher<'a>>,
}

#[derive(Serialize)]
struct Watcher<'a> {
    name: &'a str,
    #[serde(flatten)]
    prefix: Text<'a>,
    phase: String,
    revision: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    behind: Option<u64>,
    ids: usize,
    running: usize,
    waiting: usize,
    failing: usize,
    done: u64,
    failed: u64,
    malformed: u64,
    unreadable: u64,
    lists: u64,
    lost: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<String>,
}

impl<'a> Watcher<'a> {
    fn new(name: &'a str, watched: &'a Watched, context: &Context) -> Self {
        let handle = &watched.handle;
        let status: Status = handle.status();
        // Looked at after the watcher, which is never ahead.
        let stands = watched.is_here.then(|| context.store.revision().0);
        let behind = stands.map(|stands| stands.saturating_sub(status.revision.0));
        Self {
            name,
            prefix: Text::prefix(handle.prefix()),
            phase: status.phase.to_string(),
            revision: status.revision.0,
            behind,
            ids: status.ids,
            running: status.running,
            waiting: status.waiting,
            failing: status.failing,
            done: status.done,
            failed: status.failed,
            malformed: status.malformed,
            unreadable: status.unreadable,
            lists: status.lists,
            lost: status.lost,
            last_error: status.last_error,
        }
    }
}

pub(crate) async fn list(
    State(context): State<Context>,
    query: Query,
) -> Result<Response, ApiError> {
    query.end()?;
    let each = context.watchers.iter();
    let watchers = each.map(|(name, watched)| Watcher::new(name, watched, &context)).collect();
    Ok(Json(Listed { watchers }).into_response())
}

/// All of them, as they are listed.
pub(crate) fn rows(context: &Context) -> Vec<serde_json::Value> {
    let each = context.watchers.iter();
    each.map(|(name, watched)| serde_json::json!(Watcher::new(name, watched, context))).collect()
}

#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    watcher: Watcher<'a>,
    troubles: Vec<InTrouble<'a>>,
}

#[derive(Serialize)]
struct InTrouble<'a> {
    #[serde(flatten)]
    id: Text<'a>,
    failures: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_in_ms: Option<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unreadable: Vec<Unreadable<'a>>,
}

#[derive(Serialize)]
struct Unreadable<'a> {
    key_type: &'a str,
    error: &'a str,
}

impl<'a> InTrouble<'a> {
    fn new(id: &'a [u8], trouble: &'a Trouble) -> Self {
        let unreadable = trouble.unreadable.iter();
        Self {
            id: Text::id(id),
            failures: trouble.failures,
            error: trouble.error.as_deref(),
            retry_in_ms: trouble.retry_in.map(millis),
            unreadable: unreadable
                .map(|(key_type, error)| Unreadable { key_type, error })
                .collect(),
        }
    }
}

pub(crate) async fn show(
    State(context): State<Context>,
    NamePath(name): NamePath,
    mut query: Query,
) -> Result<Response, ApiError> {
    let limit = query.page()?;
    query.end()?;
    let found = find(&context, &name)?;
    let troubles = found.handle.troubles(limit);
    let troubles = troubles.iter().map(|(id, trouble)| InTrouble::new(id.as_bytes(), trouble));
    let watcher = Watcher::new(&name, found, &context);
    Ok(Json(Shown { watcher, troubles: troubles.collect() }).into_response())
}

#[derive(Serialize)]
pub(crate) struct Resynced {
    pub(crate) ids: usize,
}

pub(crate) async fn resync(
    State(context): State<Context>,
    NamePath(name): NamePath,
) -> Result<Json<Resynced>, ApiError> {
    let handle = &find(&context, &name)?.handle;
    let ids = handle.status().ids;
    if handle.resync().await {
        Ok(Json(Resynced { ids }))
    } else {
        let message = "the watcher has stopped";
        Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "closed", message)
            .hint("try again when it is up"))
    }
}

fn find<'a>(context: &'a Context, name: &str) -> Result<&'a Watched, ApiError> {
    context.watchers.get(name).ok_or_else(|| {
        ApiError::not_found(format!("there is no watcher {name:?}"))
            .hint("watchers are declared in vedetta.toml, as [watch.NAME]")
    })
}

/// The watcher named in a path.
pub(crate) struct NamePath(String);

impl<S: Send + Sync> FromRequestParts<S> for NamePath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let name = Path::<String>::from_request_parts(parts, state).await;
        let Path(name) = name.map_err(|_| ApiError::invalid("the name of a watcher is text"))?;
        Ok(Self(name))
    }
}
