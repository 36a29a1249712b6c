//! Leases. Times are in milliseconds and their names say so.

use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use serde::{Deserialize, Serialize};
use vedetta_kv::KvError;

use crate::api::Context;
use crate::error::ApiError;
use crate::input::{JsonBody, LeasePath, Query, lease_id};
use crate::json::{Json, Text, millis};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Grant {
    ttl_ms: u64,
    id: Option<String>,
}

#[derive(Serialize)]
pub(crate) struct Granted {
    id: String,
    ttl_ms: u64,
}

pub(crate) async fn grant(
    State(context): State<Context>,
    JsonBody(Grant { ttl_ms, id }): JsonBody<Grant>,
) -> Result<Json<Granted>, ApiError> {
    if ttl_ms == 0 {
        return Err(ApiError::invalid("ttl_ms must be at least 1"));
    }
    let id = id.as_deref().map(lease_id).transpose()?;
    let id = context.store.grant(id, Duration::from_millis(ttl_ms)).await?;
    Ok(Json(Granted { id: id.to_string(), ttl_ms }))
}

#[derive(Serialize)]
pub(crate) struct Listed {
    leases: Vec<Lease>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<String>,
}

#[derive(Serialize)]
struct Lease {
    id: String,
    ttl_ms: u64,
    remaining_ms: u64,
}

pub(crate) async fn list(
    State(context): State<Context>,
    mut query: Query,
) -> Result<Json<Listed>, ApiError> {
    let limit = query.page()?;
    let after = query.text("cursor")?.as_deref().map(lease_id).transpose()?;
    query.end()?;
    let mut ids = context.store.leases();
    ids.retain(|id| after.is_none_or(|after| *id > after));
    let more = ids.len() > limit;
    ids.truncate(limit);
    let cursor = ids.last().filter(|_| more).map(ToString::to_string);
    // One may have gone meanwhile.
    let infos = ids.into_iter().filter_map(|id| context.store.lease(id));
    let leases = infos.map(|info| Lease {
        id: info.id.to_string(),
        ttl_ms: millis(info.ttl),
        remaining_ms: millis(info.remaining),
    });
    Ok(Json(Listed { leases: leases.collect(), cursor }))
}

#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    lease: Lease,
    keys: Vec<Text<'a>>,
}

pub(crate) async fn show(
    State(context): State<Context>,
    LeasePath(id): LeasePath,
) -> Result<Response, ApiError> {
    let info = context.store.lease(id).ok_or(KvError::LeaseNotFound(id))?;
    let shown = Json(Shown {
        lease: Lease {
            id: id.to_string(),
            ttl_ms: millis(info.ttl),
            remaining_ms: millis(info.remaining),
        },
        keys: info.keys.iter().map(|key| Text::key(key)).collect(),
    });
    Ok(shown.into_response())
}

pub(crate) async fn keep(
    State(context): State<Context>,
    LeasePath(id): LeasePath,
) -> Result<Json<Granted>, ApiError> {
    let ttl = context.store.keep_alive(id).await?;
    Ok(Json(Granted { id: id.to_string(), ttl_ms: millis(ttl) }))
}

#[derive(Serialize)]
pub(crate) struct Revoked {
    revision: u64,
}

pub(crate) async fn revoke(
    State(context): State<Context>,
    LeasePath(id): LeasePath,
) -> Result<Json<Revoked>, ApiError> {
    let revision = context.store.revoke(id).await?;
    Ok(Json(Revoked { revision: revision.0 }))
}
