//! The audit log: written while requests go on, shown in pages.

use std::time::{Duration, SystemTime};

use axum::extract::State;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use vedetta_access::{Access, Entry, Gathered, Recorded};

use crate::api::Context;
use crate::error::ApiError;
use crate::input::Query;
use crate::json::{Json, stamp};

/// What happens again within this time becomes one entry.
const GATHER: Duration = Duration::from_secs(10);
/// Entries that are written at once.
const BATCH: usize = 256;

/// Writes entries until `stop`, and what is left then. Without a file it lets them go.
pub(crate) async fn write(
    access: Option<Access>,
    mut entries: mpsc::Receiver<Entry>,
    stop: CancellationToken,
) {
    let (mut gathered, mut batch) = (Gathered::default(), Vec::new());
    let mut gather = interval(GATHER);
    gather.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let mut due = Vec::new();
        let ends = tokio::select! {
            count = entries.recv_many(&mut batch, BATCH) => {
                due.extend(batch.drain(..).flat_map(|entry| gathered.add(entry)));
                count == 0
            }
            _ = gather.tick() => {
                due = gathered.flush();
                false
            }
            () = stop.cancelled(), if !entries.is_closed() => {
                // Those that were sent are still read.
                entries.close();
                false
            }
        };
        if ends {
            due.extend(gathered.flush());
        }
        if let Some(access) = access.clone().filter(|_| !due.is_empty()) {
            let write = move || access.record(&due, SystemTime::now());
            match tokio::task::spawn_blocking(write).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    let error = vedetta_core::explain(&error);
                    tracing::error!(%error, "entries of the audit log are lost");
                }
                Err(error) => tracing::error!(%error, "entries of the audit log are lost"),
            }
        }
        if ends {
            return;
        }
    }
}

#[derive(Serialize)]
struct Shown {
    id: i64,
    at: String,
    who: String,
    from: String,
    action: String,
    target: String,
    outcome: String,
    count: u64,
}

impl From<Recorded> for Shown {
    fn from(one: Recorded) -> Self {
        Self {
            id: one.id,
            at: stamp(one.at),
            who: one.who,
            from: one.source,
            action: one.action,
            target: one.target,
            outcome: one.outcome,
            count: one.count,
        }
    }
}

#[derive(Serialize)]
pub(crate) struct Page {
    entries: Vec<Shown>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<String>,
}

pub(crate) async fn list(
    State(context): State<Context>,
    mut query: Query,
) -> Result<Json<Page>, ApiError> {
    let limit = query.page()?;
    let cursor = query.number("cursor")?;
    query.end()?;
    let before = cursor.map(|cursor| i64::try_from(cursor).unwrap_or(i64::MAX));
    let Some(access) = context.door.access.clone() else {
        return Err(ApiError::not_found("this server keeps no audit log"));
    };
    let read = tokio::task::spawn_blocking(move || access.audit(before, limit + 1)).await;
    let read = read.map_err(|_| ApiError::unavailable("reading the audit log broke off"))?;
    let mut entries: Vec<Shown> = read?.into_iter().map(Into::into).collect();
    let more = entries.len() > limit;
    entries.truncate(limit);
    let cursor = entries.last().filter(|_| more).map(|last| last.id.to_string());
    Ok(Json(Page { entries, cursor }))
}
