//! The routes.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::middleware;
use axum::routing::{get, post};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use vedetta_core::Revision;
use vedetta_kv::Store;
use vedetta_runtime::Handle;

use crate::error::ApiError;
use crate::input::JsonBody;
use crate::json::Json;
use crate::stages::{self, Stages};
use crate::{guard, kv, leases, page, watch, watchers};

/// Bytes of a request's body.
const BODY: usize = 2 << 20;

/// What is served.
#[derive(Clone)]
pub struct Api {
    pub(crate) store: Store,
    pub(crate) watchers: BTreeMap<String, Watched>,
    pub(crate) stages: Option<Arc<Stages>>,
    pub(crate) ending: CancellationToken,
    pub(crate) limits: Limits,
}

/// A watcher that is shown.
#[derive(Clone)]
pub(crate) struct Watched {
    pub(crate) handle: Handle,
    /// It follows the store that is served, so the two can be compared.
    pub(crate) is_here: bool,
}

/// How much of the server clients may take.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Connections at once; further ones wait to be accepted.
    pub connections: usize,
    /// Time to send the head of a request, and how long a connection may be silent before it.
    pub head: Duration,
    /// Time to send the body of a request.
    pub body: Duration,
    /// A watch that has nothing to say gives a sign of life this often.
    pub sign_of_life: Duration,
    /// A client that takes no byte of what is sent to it for so long is let go.
    pub stall: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            head: Duration::from_secs(10),
            body: Duration::from_secs(30),
            sign_of_life: Duration::from_secs(15),
            stall: Duration::from_secs(60),
        }
    }
}

impl Api {
    /// Serves `store`.
    pub fn new(store: Store) -> Self {
        Self {
            store,
            watchers: BTreeMap::new(),
            stages: None,
            ending: CancellationToken::new(),
            limits: Limits::default(),
        }
    }

    /// The same with a watcher of that store, under a name.
    #[must_use]
    pub fn watcher(mut self, name: impl Into<String>, handle: Handle) -> Self {
        self.watchers.insert(name.into(), Watched { handle, is_here: true });
        self
    }

    /// The same with a watcher of another store, under a name.
    #[must_use]
    pub fn watcher_elsewhere(mut self, name: impl Into<String>, handle: Handle) -> Self {
        self.watchers.insert(name.into(), Watched { handle, is_here: false });
        self
    }

    /// The same with the queues of a database's stages.
    #[must_use]
    pub fn stages(mut self, records: impl vedetta_stage::Records) -> Self {
        self.stages = Some(Arc::new(Stages::new(records)));
        self
    }

    /// The same, and no longer ready once `ending` is cancelled, although it still serves.
    #[must_use]
    pub fn ending(mut self, ending: CancellationToken) -> Self {
        self.ending = ending;
        self
    }

    /// The same with other limits.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }
}

/// What a handler may use.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) store: Store,
    pub(crate) watchers: Arc<BTreeMap<String, Watched>>,
    pub(crate) stages: Option<Arc<Stages>>,
    pub(crate) ending: CancellationToken,
    pub(crate) limits: Arc<Limits>,
    pub(crate) stop: CancellationToken,
    /// The address we listen on: with the loopback names, what a `Host` may say.
    pub(crate) listening: IpAddr,
}

pub(crate) fn router(context: Context) -> Router {
    let v1 = Router::new()
        .route("/kv", get(kv::list))
        .route("/kv/", get(kv::get).put(kv::put).delete(kv::delete))
        .route("/kv/{*key}", get(kv::get).put(kv::put).delete(kv::delete))
        .route("/leases", get(leases::list).post(leases::grant))
        .route("/leases/{id}", get(leases::show).delete(leases::revoke))
        .route("/leases/{id}/keep", post(leases::keep))
        .route("/watch", get(watch::watch))
        .route("/watchers", get(watchers::list))
        .route("/watchers/{name}", get(watchers::show))
        .route("/watchers/{name}/resync", post(watchers::resync))
        .route("/stages", get(stages::list))
        .route("/stages/{entity}", get(stages::entity))
        .route("/stages/{entity}/{id}", get(stages::show))
        .route("/stages/{entity}/{stage}/{id}/retry", post(stages::retry))
        .route("/compact", post(compact))
        .route("/overview", get(overview));
    Router::new()
        .nest("/api/v1", v1)
        .merge(page::routes())
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .fallback(async || ApiError::no_such_route())
        .method_not_allowed_fallback(async || ApiError::wrong_method())
        .layer(DefaultBodyLimit::max(BODY))
        .layer(middleware::from_fn_with_state(context.clone(), guard::check))
        .with_state(context)
}

#[derive(Serialize)]
struct Health {
    status: &'static str,
    program: &'static str,
    version: &'static str,
}

impl Health {
    fn new(status: &'static str) -> Self {
        Self { status, program: "vedetta", version: env!("CARGO_PKG_VERSION") }
    }
}

/// The process is alive.
async fn healthz() -> Json<Health> {
    Json(Health::new("ok"))
}

/// It takes requests, and will for a while.
async fn readyz(State(context): State<Context>) -> (StatusCode, Json<Health>) {
    if context.stop.is_cancelled() || context.ending.is_cancelled() {
        (StatusCode::SERVICE_UNAVAILABLE, Json(Health::new("stopping")))
    } else {
        (StatusCode::OK, Json(Health::new("ready")))
    }
}

#[derive(Serialize)]
struct Overview {
    revision: u64,
    oldest: u64,
    keys: usize,
    leases: usize,
    watchers: usize,
    size: u64,
}

async fn overview(State(context): State<Context>) -> Json<Overview> {
    let status = context.store.status();
    Json(Overview {
        revision: status.revision.0,
        oldest: status.compacted.0,
        keys: status.existing,
        leases: status.leases,
        watchers: status.watchers,
        size: status.size,
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Compact {
    revision: u64,
}

#[derive(Serialize)]
struct Compacted {
    oldest: u64,
}

async fn compact(
    State(context): State<Context>,
    JsonBody(Compact { revision }): JsonBody<Compact>,
) -> Result<Json<Compacted>, ApiError> {
    context.store.compact(Revision(revision), false).await?;
    Ok(Json(Compacted { oldest: revision }))
}
