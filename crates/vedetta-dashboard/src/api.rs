//! The routes.

use std::collections::{BTreeMap, BTreeSet};
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
use vedetta_access::Access;
use vedetta_core::Revision;
use vedetta_core::measure::Family;
use vedetta_fleet::Fleet;
use vedetta_jobs::{DEFAULT_QUEUE, Kinds, Ledger, wire};
use vedetta_kv::Store;
use vedetta_net::tls::Tls;
use vedetta_runtime::Handle;
use vedetta_runtime::told::Board;

use crate::access::Needs::{self, Admin, Anyone, Operator, Viewer};
use crate::access::{Door, Table};
use crate::error::ApiError;
use crate::guard::{self, Guard};
use crate::input::JsonBody;
use crate::json::Json;
use crate::live::{self, Live};
use crate::observe::Observed;
use crate::stages::{self, Stages};
use crate::{
    audit, hub, jobs, kv, leases, login, metrics, openapi, page, queues, watch, watchers, workers,
};

/// Bytes of a request's body.
const BODY: usize = 2 << 20;

/// What is served.
#[derive(Clone)]
pub struct Api {
    pub(crate) store: Store,
    pub(crate) watchers: BTreeMap<String, Watched>,
    pub(crate) board: Option<Board>,
    pub(crate) stages: Option<Arc<Stages>>,
    pub(crate) jobs: Option<Arc<Observed>>,
    pub(crate) fleet: Option<Fleet>,
    pub(crate) kinds: Kinds,
    pub(crate) queues: BTreeSet<String>,
    pub(crate) ending: CancellationToken,
    pub(crate) limits: Limits,
    pub(crate) access: Option<Access>,
    pub(crate) signs_in: bool,
    pub(crate) hosts: Vec<String>,
    pub(crate) tls: Option<Tls>,
    pub(crate) numbers: Option<(Duration, metrics::Sink)>,
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
    /// Streams at once of one caller; further ones are refused. Those who share a name, whoever is local and all that the
    /// server started, have all connections but an eighth.
    pub streams: usize,
    /// Whether somebody may still listen to a stream is looked up this often, where people sign in.
    pub recheck: Duration,
    /// Time for the TLS handshake.
    pub handshake: Duration,
    /// Time to send the head of a request, and how long a connection may be silent before it.
    pub head: Duration,
    /// Time to send the body of a request.
    pub body: Duration,
    /// A watch that has nothing to say gives a sign of life this often.
    pub sign_of_life: Duration,
    /// A client that takes no byte of what is sent to it for so long is let go.
    pub stall: Duration,
}

impl Limits {
    /// Streams at once of those who share a name. The rest is for what they ask beside them, and for others.
    pub(crate) fn shared_streams(&self) -> usize {
        (self.connections - self.connections / 8).max(self.streams)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            streams: 512,
            recheck: Duration::from_secs(15),
            handshake: Duration::from_secs(5),
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
            board: None,
            stages: None,
            jobs: None,
            fleet: None,
            kinds: Kinds::default(),
            queues: [DEFAULT_QUEUE.to_owned()].into(),
            ending: CancellationToken::new(),
            limits: Limits::default(),
            access: None,
            signs_in: false,
            hosts: Vec::new(),
            tls: None,
            numbers: None,
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

    /// The same with the watchers that other processes tell of.
    #[must_use]
    pub fn board(mut self, board: Board) -> Self {
        self.board = Some(board);
        self
    }

    /// The same with the queues of a database's stages.
    #[must_use]
    pub fn stages(mut self, records: impl vedetta_stage::Records) -> Self {
        self.stages = Some(Arc::new(Stages::new(records)));
        self
    }

    /// The same with the jobs of a database, in which others may work, too.
    #[must_use]
    pub fn jobs(self, jobs: Arc<dyn Ledger>) -> Self {
        self.observed(Observed::new(jobs))
    }

    /// The same with jobs that are seen at work by whoever else was given them.
    #[must_use]
    pub fn observed(mut self, jobs: Arc<Observed>) -> Self {
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

    /// The same, and these queues are there, even if they had no job yet.
    #[must_use]
    pub fn queues(mut self, names: impl IntoIterator<Item = String>) -> Self {
        self.queues.extend(names);
        self
    }

    /// The same, and no longer ready once `ending` is cancelled, although it still serves.
    #[must_use]
    pub fn ending(mut self, ending: CancellationToken) -> Self {
        self.ending = ending;
        self
    }

    /// The same with an audit log of what is changed. If people are to sign in, everything needs a session or
    /// a token of `access`; if not, whoever reaches the port may do everything.
    #[must_use]
    pub fn access(mut self, access: Access, signs_in: bool) -> Self {
        (self.access, self.signs_in) = (Some(access), signs_in);
        self
    }

    /// The same under these names, too. Requests for names that are not known are refused.
    #[must_use]
    pub fn hosts(mut self, names: impl IntoIterator<Item = String>) -> Self {
        self.hosts.extend(names);
        self
    }

    /// The same over TLS only.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// The same, and the numbers of `/metrics` are told this often, and once more at the end.
    #[must_use]
    pub fn numbers(
        mut self,
        every: Duration,
        tell: impl Fn(Vec<Family>) + Send + Sync + 'static,
    ) -> Self {
        self.numbers = Some((every, Arc::new(tell)));
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
    pub(crate) board: Option<Board>,
    pub(crate) stages: Option<Arc<Stages>>,
    pub(crate) jobs: Option<Arc<dyn Ledger>>,
    pub(crate) live: Arc<Live>,
    pub(crate) fleet: Option<Fleet>,
    pub(crate) kinds: Arc<Kinds>,
    pub(crate) queues: Arc<BTreeSet<String>>,
    pub(crate) ending: CancellationToken,
    pub(crate) limits: Arc<Limits>,
    pub(crate) stop: CancellationToken,
    pub(crate) door: Arc<Door>,
}

/// A method, a path, what it takes to use them, and who answers. [`crate::openapi`] describes each; [`guard`]
/// lets nobody through to one that is not declared so.
pub(crate) struct Route {
    pub(crate) method: &'static str,
    pub(crate) path: &'static str,
    pub(crate) needs: Needs,
    /// A parameter of the query that needs more.
    pub(crate) more: Option<(&'static str, Needs)>,
    /// What programs do all day: the audit log does not tell of it.
    pub(crate) is_work: bool,
    handler: MethodRouter<Context>,
}

fn route(
    method: &'static str,
    needs: Needs,
    path: &'static str,
    handler: MethodRouter<Context>,
) -> Route {
    Route { method, path, needs, more: None, is_work: false, handler }
}

pub(crate) fn get<H, T>(needs: Needs, path: &'static str, handler: H) -> Route
where
    H: Handler<T, Context>,
    T: 'static,
{
    route("GET", needs, path, routing::get(handler))
}

fn put<H: Handler<T, Context>, T: 'static>(needs: Needs, path: &'static str, handler: H) -> Route {
    route("PUT", needs, path, routing::put(handler))
}

pub(crate) fn post<H, T>(needs: Needs, path: &'static str, handler: H) -> Route
where
    H: Handler<T, Context>,
    T: 'static,
{
    route("POST", needs, path, routing::post(handler))
}

fn delete<H, T>(needs: Needs, path: &'static str, handler: H) -> Route
where
    H: Handler<T, Context>,
    T: 'static,
{
    route("DELETE", needs, path, routing::delete(handler))
}

/// The same for larger bodies.
fn large(route: Route) -> Route {
    let handler = route.handler.layer(DefaultBodyLimit::max(wire::LARGEST_BODY));
    Route { handler, ..route }
}

/// The same for what programs do all day.
fn work(route: Route) -> Route {
    Route { is_work: true, ..route }
}

/// The same with a parameter that needs more.
pub(crate) fn more(parameter: &'static str, needs: Needs, route: Route) -> Route {
    Route { more: Some((parameter, needs)), ..route }
}

/// All of the API; the pages are not part of it.
pub(crate) fn routes() -> Vec<Route> {
    vec![
        get(Viewer, "/api/v1/kv", kv::list),
        // No key at all.
        get(Viewer, "/api/v1/kv/", kv::get),
        put(Admin, "/api/v1/kv/", kv::put),
        delete(Admin, "/api/v1/kv/", kv::delete),
        get(Viewer, "/api/v1/kv/{*key}", kv::get),
        put(Admin, "/api/v1/kv/{*key}", kv::put),
        delete(Admin, "/api/v1/kv/{*key}", kv::delete),
        get(Viewer, "/api/v1/leases", leases::list),
        post(Admin, "/api/v1/leases", leases::grant),
        get(Viewer, "/api/v1/leases/{id}", leases::show),
        delete(Admin, "/api/v1/leases/{id}", leases::revoke),
        work(post(Admin, "/api/v1/leases/{id}/keep", leases::keep)),
        get(Viewer, "/api/v1/watch", watch::watch),
        get(Viewer, "/api/v1/watchers", watchers::list),
        get(Viewer, "/api/v1/watchers/{name}", watchers::show),
        post(Operator, "/api/v1/watchers/{name}/resync", watchers::resync),
        get(Viewer, "/api/v1/stages", stages::list),
        get(Viewer, "/api/v1/stages/{entity}", stages::entity),
        get(Viewer, "/api/v1/stages/{entity}/{id}", stages::show),
        post(Operator, "/api/v1/stages/{entity}/{stage}/{id}/retry", stages::retry),
        large(post(Operator, "/api/v1/jobs", jobs::add)),
        get(Viewer, "/api/v1/jobs", jobs::list),
        post(Operator, "/api/v1/jobs/retry", jobs::retry_all),
        work(large(post(Operator, "/api/v1/jobs/keep", jobs::keep_all))),
        work(large(post(Operator, "/api/v1/jobs/settle", jobs::settle_all))),
        more("reveal", Operator, get(Viewer, "/api/v1/jobs/{id}", jobs::show)),
        delete(Operator, "/api/v1/jobs/{id}", jobs::delete),
        post(Operator, "/api/v1/jobs/{id}/retry", jobs::retry),
        post(Operator, "/api/v1/jobs/{id}/cancel", jobs::cancel),
        work(post(Operator, "/api/v1/jobs/{id}/keep", jobs::keep)),
        work(post(Operator, "/api/v1/jobs/{id}/settle", jobs::settle)),
        get(Viewer, "/api/v1/queues", queues::list),
        post(Operator, "/api/v1/queues/{queue}/pause", queues::pause),
        post(Operator, "/api/v1/queues/{queue}/resume", queues::resume),
        post(Operator, "/api/v1/queues/{queue}/drain", queues::drain),
        work(post(Operator, "/api/v1/queues/{queue}/take", queues::take)),
        get(Viewer, "/api/v1/queues/{queue}/wake", queues::wake),
        get(Viewer, "/api/v1/workers", workers::list),
        post(Operator, "/api/v1/workers", workers::start),
        post(Operator, "/api/v1/workers/terminate", workers::terminate),
        post(Operator, "/api/v1/workers/restart", workers::restart),
        work(delete(Operator, "/api/v1/workers/{id}", workers::leave)),
        work(post(Operator, "/api/v1/workers/{id}/beat", workers::beat)),
        get(Operator, "/api/v1/workers/{id}/wake", workers::wake),
        post(Operator, "/api/v1/workers/{id}/stop", workers::stop),
        post(Operator, "/api/v1/workers/{id}/pause", workers::pause),
        post(Operator, "/api/v1/workers/{id}/resume", workers::resume),
        delete(Operator, "/api/v1/supervisors/{name}", workers::retire),
        work(post(Operator, "/api/v1/supervisors/{name}/beat", workers::supervise)),
        get(Operator, "/api/v1/supervisors/{name}/wake", workers::wake_supervisor),
        get(Viewer, "/api/v1/commands/{id}", workers::command),
        post(Admin, "/api/v1/compact", compact),
        get(Viewer, "/api/v1/overview", live::overview),
        get(Viewer, "/api/v1/stats", live::stats),
        get(Viewer, "/api/v1/events", hub::events),
        get(Viewer, "/api/v1/session", login::session),
        get(Admin, "/api/v1/audit", audit::list),
        get(Viewer, "/api/v1/openapi.json", openapi::document),
        get(Anyone, "/healthz", healthz),
        get(Anyone, "/readyz", readyz),
        get(Viewer, "/metrics", metrics::metrics),
    ]
}

/// What people sign in with. Not in the description of the API, as it is for browsers.
fn sign_in() -> Vec<Route> {
    vec![
        get(Anyone, "/login", login::form),
        post(Anyone, "/login", login::sign_in),
        post(Viewer, "/logout", login::sign_out),
    ]
}

pub(crate) fn router(context: Context) -> Router {
    guarded([routes(), sign_in(), page::routes()].into_iter().flatten().collect(), context, |all| {
        all
    })
}

/// The routes behind the guard, which knows only them; `with` may add others, that nobody reaches.
fn guarded(
    routes: Vec<Route>,
    context: Context,
    with: impl FnOnce(Router<Context>) -> Router<Context>,
) -> Router {
    let table = Arc::new(Table::of(&routes));
    let guard = Guard { context: context.clone(), table };
    let all =
        routes.into_iter().fold(Router::new(), |all, route| all.route(route.path, route.handler));
    with(all)
        .fallback(async || ApiError::no_such_route())
        .layer(DefaultBodyLimit::max(BODY))
        .layer(middleware::from_fn_with_state(guard, guard::check))
        .layer(middleware::from_fn_with_state(context.clone(), metrics::count))
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

#[cfg(test)]
impl Context {
    /// A store and nothing else, where nobody signs in.
    pub(crate) fn alone(store: Store) -> Self {
        let (audit, _) = tokio::sync::mpsc::channel(1);
        let listening = ([127, 0, 0, 1], 7070).into();
        let door = Door::new(None, false, Vec::new(), listening, false, audit).unwrap();
        Self {
            store,
            watchers: Arc::default(),
            board: None,
            stages: None,
            jobs: None,
            live: Arc::default(),
            fleet: None,
            kinds: Arc::default(),
            queues: Arc::default(),
            ending: CancellationToken::new(),
            limits: Arc::default(),
            stop: CancellationToken::new(),
            door: Arc::new(door),
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::Request;
    use hyper::service::Service as _;
    use hyper_util::service::TowerToHyperService;

    use super::*;
    use crate::access::{Within, within};

    /// The route of the API that does what a form does.
    fn counterpart(method: &str, path: &str) -> Option<(&'static str, String)> {
        Some(match (method, path) {
            // It sets a cookie of the browser, and nothing here.
            ("POST", "/theme") => return None,
            ("POST", "/failed/retry") => ("POST", "/api/v1/jobs/retry".into()),
            ("POST", "/workers/start") => ("POST", "/api/v1/workers".into()),
            ("POST", "/jobs/{id}/delete") => ("DELETE", "/api/v1/jobs/{id}".into()),
            ("POST", path) => ("POST", format!("/api/v1{path}")),
            ("GET", "/" | "/insights") => ("GET", "/api/v1/stats".into()),
            ("GET", "/failed") => ("GET", "/api/v1/jobs".into()),
            // What it looks like is everybody's.
            ("GET", path) if path.starts_with("/assets/") => return None,
            (_, path) => ("GET", format!("/api/v1{path}")),
        })
    }

    #[test]
    fn a_page_and_its_forms_need_what_the_api_needs_for_the_same() {
        let api = routes();
        for page in page::routes() {
            let Some((method, path)) = counterpart(page.method, page.path) else { continue };
            let route = api.iter().find(|route| route.method == method && route.path == path);
            let route = route.unwrap_or_else(|| panic!("{} has no {method} {path}", page.path));
            assert_eq!(page.needs, route.needs, "{} {}", page.method, page.path);
            assert_eq!(page.more, route.more, "{} {}", page.method, page.path);
            // The first page shows more than numbers.
            if page.path != "/" {
                assert_eq!(within(page.path), within(route.path), "{}", page.path);
            }
        }
    }

    #[test]
    fn every_route_is_in_an_area_or_every_tokens() {
        let mut every = Vec::new();
        for route in [routes(), sign_in(), page::routes()].into_iter().flatten() {
            match within(route.path) {
                Some(Within::Every) => every.push(route.path),
                Some(Within::Area(_)) => {}
                // Nobody is asked who they are.
                None => assert_eq!(route.needs, Anyone, "{} is in no area", route.path),
            }
        }
        every.sort_unstable();
        let known = ["/api/v1/openapi.json", "/api/v1/session", "/logout", "/theme"];
        assert_eq!(every, known, "what tells nothing of what is kept here");
        assert_eq!(within("/api/v1/planted"), None);
    }

    #[tokio::test]
    async fn a_route_that_is_planted_without_a_declaration_is_not_reached() {
        let folder = tempfile::tempdir().unwrap();
        let options = vedetta_db::Options::new(folder.path().join("vedetta.db"));
        let db = vedetta_db::Db::open(&options, &[vedetta_kv::SCHEMA]).unwrap();
        let store = Store::open(db, vedetta_kv::Options::default()).await.unwrap();
        let context = Context::alone(store.clone());
        let router = guarded(routes(), context, |all| {
            all.route("/api/v1/planted", routing::get(async || "planted"))
                .route("/healthz", routing::post(async || "planted"))
        });
        let router = TowerToHyperService::new(router);
        for (method, path, status) in [
            ("GET", "/healthz", 200),
            ("POST", "/healthz", 405),
            ("GET", "/api/v1/planted", 404),
            ("HEAD", "/api/v1/planted", 404),
            ("GET", "/api/v1/overview", 200),
        ] {
            let request = Request::builder().method(method).uri(path).header("Host", "localhost");
            let answer = router.call(request.body(Body::empty()).unwrap()).await.unwrap();
            assert_eq!(answer.status().as_u16(), status, "{method} {path}");
        }
        store.close().await;
    }
}
