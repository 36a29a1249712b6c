//! Watchers: how they are doing, what is wrong with which id, and running all ids again.

use std::sync::Arc;

use axum::extract::State;
use axum::extract::{FromRequestParts, Path};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;
use vedetta_runtime::told::{self, Board, Report, Told, TroubleReport};

use crate::api::{Context, Watched};
use crate::error::ApiError;
use crate::input::Query;
use crate::json::Json;
use crate::redact;

#[derive(Serialize)]
struct Listed {
    watchers: Vec<Watcher>,
}

#[derive(Serialize)]
struct Watcher {
    name: String,
    /// Which process tells of it, if it is not a watcher of ours.
    #[serde(skip_serializing_if = "Option::is_none")]
    process: Option<String>,
    #[serde(flatten)]
    report: Report,
    #[serde(skip_serializing_if = "Option::is_none")]
    behind: Option<u64>,
}

impl Watcher {
    fn ours(name: &str, watched: &Watched, context: &Context) -> Self {
        let report = shown(Report::of(&watched.handle));
        // Looked at after the watcher, which is never ahead.
        let stands = watched.is_here.then(|| context.store.revision().0);
        let behind = stands.map(|stands| stands.saturating_sub(report.revision));
        Self { name: name.to_owned(), process: None, report, behind }
    }

    fn told(name: String, told: &Told) -> Self {
        let process = told::parts(&name).map(|(_, process)| process.to_owned());
        Self { name, process, report: shown(told.report.clone()), behind: None }
    }
}

/// How a watcher is, as people see it: errors may have anything in them.
fn shown(mut report: Report) -> Report {
    report.last_error.iter_mut().for_each(redact::hide_in);
    report
}

/// Ours, then those that other processes tell of.
fn all(context: &Context) -> Vec<Watcher> {
    let ours = context.watchers.iter();
    let ours = ours.map(|(name, watched)| Watcher::ours(name, watched, context));
    let told = context.board.iter().flat_map(Board::all);
    ours.chain(told.map(|(name, told)| Watcher::told(name, &told))).collect()
}

pub(crate) async fn list(
    State(context): State<Context>,
    query: Query,
) -> Result<Response, ApiError> {
    query.end()?;
    Ok(Json(Listed { watchers: all(&context) }).into_response())
}

/// All of them, as they are listed.
pub(crate) fn rows(context: &Context) -> Vec<serde_json::Value> {
    all(context).into_iter().map(|watcher| serde_json::json!(watcher)).collect()
}

/// Up to `limit` ids of a watcher that are not as they should be.
pub(crate) fn troubles(context: &Context, name: &str, limit: usize) -> Vec<TroubleReport> {
    find(context, name).map(|found| found.troubles(limit)).unwrap_or_default()
}

#[derive(Serialize)]
struct Shown {
    #[serde(flatten)]
    watcher: Watcher,
    troubles: Vec<TroubleReport>,
}

pub(crate) async fn show(
    State(context): State<Context>,
    NamePath(name): NamePath,
    mut query: Query,
) -> Result<Response, ApiError> {
    let limit = query.page()?;
    query.end()?;
    let found = find(&context, &name)?;
    let troubles = found.troubles(limit);
    let watcher = match found {
        Found::Ours(watched) => Watcher::ours(&name, watched, &context),
        Found::Told(_, full, told) => Watcher::told(full, &told),
    };
    Ok(Json(Shown { watcher, troubles }).into_response())
}

#[derive(Serialize)]
pub(crate) struct Resynced {
    pub(crate) ids: u64,
}

pub(crate) async fn resync(
    State(context): State<Context>,
    NamePath(name): NamePath,
) -> Result<Json<Resynced>, ApiError> {
    let closed = |message: String| {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "closed", message)
            .hint("try again when it is up")
    };
    match find(&context, &name)? {
        Found::Ours(Watched { handle, .. }) => {
            let ids = Report::of(handle).ids;
            if handle.resync().await {
                return Ok(Json(Resynced { ids }));
            }
            Err(closed("the watcher has stopped".to_owned()))
        }
        Found::Told(board, full, told) => match board.resync(&full).await {
            Ok(()) => Ok(Json(Resynced { ids: told.report.ids })),
            Err(error) => Err(closed(format!("the wish cannot be written: {error}"))),
        },
    }
}

/// A watcher of ours, or one that another process tells of, with its full name.
enum Found<'a> {
    Ours(&'a Watched),
    Told(&'a Board, String, Arc<Told>),
}

impl Found<'_> {
    fn troubles(&self, limit: usize) -> Vec<TroubleReport> {
        let mut troubles: Vec<TroubleReport> = match self {
            Self::Ours(watched) => {
                let troubles = watched.handle.troubles(limit).into_iter();
                troubles.map(|(id, trouble)| TroubleReport::new(&id, trouble)).collect()
            }
            Self::Told(_, _, told) => told.troubles.iter().take(limit).cloned().collect(),
        };
        for trouble in &mut troubles {
            let unreadable = trouble.unreadable.iter_mut().map(|bad| &mut bad.error);
            trouble.error.iter_mut().chain(unreadable).for_each(redact::hide_in);
        }
        troubles
    }
}

fn find<'a>(context: &'a Context, name: &str) -> Result<Found<'a>, ApiError> {
    if let Some(ours) = context.watchers.get(name) {
        return Ok(Found::Ours(ours));
    }
    let told = context.board.as_ref().and_then(|board| Some((board, board.find(name)?)));
    if let Some((board, (full, told))) = told {
        return Ok(Found::Told(board, full, told));
    }
    Err(ApiError::not_found(format!("there is no watcher {name:?}")).hint(
        "watchers are declared in vedetta.toml, as [watch.NAME], or told of by programs, as NAME@PROCESS",
    ))
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
