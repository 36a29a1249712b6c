//! The routes.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use axum::handler::Handler;
use axum::http::StatusCode;
use axum::middleware;
use axum::routing::{self, MethodRouter};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use vedetta_core::Revision;
use vedetta_fleet::Fleet;
use vedetta_jobs::{Kinds, Ledger, wire};
use vedetta_kv::Store;
use vedetta_runtime::Handle;

use crate::error::ApiError;
use crate::input::JsonBody;
use crate::json::Json;
use crate::stages::{self, Stages};
use crate::{guard, jobs, kv, leases, openapi, page, queues, watch, watchers, workers};

/// Bytes of a request's body.
const BODY: usize = 2 << 20;

/// What is served.
#[derive(Clone)]
pub struct Api {
    pub(crate) store: Store,
    pub(crate) watchers: BTreeMap<String, Watched>,
    pub(crate) stages: Option<Arc<Stages>>,
    pub(crate) jobs: Option<Arc<dyn Ledger>>,
    pub(crate) fleet: Option<Fleet>,
    pub(crate) kinds: Kinds,
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
            jobs: None,
            fleet: None,
            kinds: Kinds::default(),
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

    /// The same with the jobs of a database.
    #[must_use]
    pub fn jobs(mut self, jobs: Arc<dyn Ledger>) -> Self {
        self.jobs = Some(jobs);
        self
    }

    /// The same with workers and their supervisors.
    #[must_use]
    pub fn fleet(mut self, fleet: Fleet) -> Self {
        self.fleet = Some(fleet);
        self
    }

    /// The same, and what is known of these kinds of jobs is added to those that are asked for with less.
    #[must_use]
    pub fn kinds(mut self, kinds: Kinds) -> Self {
        self.kinds = kinds;
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
    pub(crate) jobs: Option<Arc<dyn Ledger>>,
    pub(crate) fleet: Option<Fleet>,
    pub(crate) kinds: Arc<Kinds>,
    pub(crate) ending: CancellationToken,
    pub(crate) limits: Arc<Limits>,
    pub(crate) stop: CancellationToken,
    /// The address we listen on: with the loopback names, what a `Host` may say.
    pub(crate) listening: IpAddr,
}

/// A method, a path, and who answers. [`crate::openapi`] describes each.
pub(crate) type Route = (&'static str, &'static str, MethodRouter<Context>);

fn get<H: Handler<T, Context>, T: 'static>(path: &'static str, handler: H) -> Route {
    ("GET", path, routing::get(handler))
}

fn put<H: Handler<T, Context>, T: 'static>(path: &'static str, handler: H) -> Route {
    ("PUT", path, routing::put(handler))
}

fn post<H: Handler<T, Context>, T: 'static>(path: &'static str, handler: H) -> Route {
    ("POST", path, routing::post(handler))
}

fn delete<H: Handler<T, Context>, T: 'static>(path: &'static str, handler: H) -> Route {
    ("DELETE", path, routing::delete(handler))
}

/// The same for larger bodies.
fn large((method, path, handler): Route) -> Route {
    (method, path, handler.layer(DefaultBodyLimit::max(wire::LARGEST_BODY)))
}

/// All of the API; the pages are not part of it.
pub(crate) fn routes() -> Vec<Route> {
    vec![
        get("/api/v1/kv", kv::list),
        // No key at all.
        get("/api/v1/kv/", kv::get),
        put("/api/v1/kv/", kv::put),
        delete("/api/v1/kv/", kv::delete),
        get("/api/v1/kv/{*key}", kv::get),
        put("/api/v1/kv/{*key}", kv::put),
        delete("/api/v1/kv/{*key}", kv::delete),
        get("/api/v1/leases", leases::list),
        post("/api/v1/leases", leases::grant),
        get("/api/v1/leases/{id}", leases::show),
        delete("/api/v1/leases/{id}", leases::revoke),
        post("/api/v1/leases/{id}/keep", leases::keep),
        get("/api/v1/watch", watch::watch),
        get("/api/v1/watchers", watchers::list),
        get("/api/v1/watchers/{name}", watchers::show),
        post("/api/v1/watchers/{name}/resync", watchers::resync),
        get("/api/v1/stages", stages::list),
        get("/api/v1/stages/{entity}", stages::entity),
        get("/api/v1/stages/{entity}/{id}", stages::show),
        post("/api/v1/stages/{entity}/{stage}/{id}/retry", stages::retry),
        large(post("/api/v1/jobs", jobs::add)),
        get("/api/v1/jobs", jobs::list),
        post("/api/v1/jobs/retry", jobs::retry_all),
        large(post("/api/v1/jobs/keep", jobs::keep_all)),
        large(post("/api/v1/jobs/settle", jobs::settle_all)),
        get("/api/v1/jobs/{id}", jobs::show),
        delete("/api/v1/jobs/{id}", jobs::delete),
        post("/api/v1/jobs/{id}/retry", jobs::retry),
        post("/api/v1/jobs/{id}/cancel", jobs::cancel),
        post("/api/v1/jobs/{id}/keep", jobs::keep),
        post("/api/v1/jobs/{id}/settle", jobs::settle),
        get("/api/v1/queues", queues::list),
        post("/api/v1/queues/{queue}/pause", queues::pause),
        post("/api/v1/queues/{queue}/resume", queues::resume),
        post("/api/v1/queues/{queue}/drain", queues::drain),
        post("/api/v1/queues/{queue}/take", queues::take),
        get("/api/v1/queues/{queue}/wake", queues::wake),
        get("/api/v1/workers", workers::list),
        post("/api/v1/workers", workers::start),
        post("/api/v1/workers/terminate", workers::terminate),
        post("/api/v1/workers/restart", workers::restart),
        delete("/api/v1/workers/{id}", workers::leave),
        post("/api/v1/workers/{id}/beat", workers::beat),
        get("/api/v1/workers/{id}/wake", workers::wake),
        post("/api/v1/workers/{id}/stop", workers::stop),
        post("/api/v1/workers/{id}/pause", workers::pause),
        post("/api/v1/workers/{id}/resume", workers::resume),
        delete("/api/v1/supervisors/{name}", workers::retire),
        post("/api/v1/supervisors/{name}/beat", workers::supervise),
        get("/api/v1/supervisors/{name}/wake", workers::wake_supervisor),
        get("/api/v1/commands/{id}", workers::command),
        post("/api/v1/compact", compact),
        get("/api/v1/overview", overview),
        get("/api/v1/openapi.json", openapi::document),
        get("/healthz", healthz),
        get("/readyz", readyz),
    ]
}

pub(crate) fn router(context: Context) -> Router {
    let routes = routes().into_iter();
    routes
        .fold(Router::new(), |router, (_, path, handler)| router.route(path, handler))
        .merge(page::routes())
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
