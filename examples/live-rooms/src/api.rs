//! The HTTP API of the rooms.
//!
//! ```text
//! POST   /rooms {"title"?, "id"?}       create one: 201, and 409 if the id is taken
//! GET    /rooms, /rooms/{id}
//! POST   /rooms/{id}/start, /stop       200, and 409 if it is being removed
//! DELETE /rooms/{id}                    202: it goes when nobody runs it any more
//! GET    /mixers, /januses
//! POST   /mixers/{id}/ready, /cordon, /uncordon, /drain      the same for /januses
//! ```
//!
//! Nobody signs in, so it is for this machine only; and a web page that somebody on it has open cannot use it
//! in their name: it comes under a name that is not ours or from another origin, and is refused.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Path, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use vedetta::Revision;
use vedetta::core::explain;
use vedetta::etcd::Cluster;
use vedetta::runtime::Watching;

use crate::model::{Kind, LiveMeta, Marks, Module, Room, Status, is_id, now, room_key};
use crate::place::{Modules as _, loads};
use crate::rooms::Table;
use crate::store::{StoreError, update};

/// More rooms than that are not created.
const MOST_ROOMS: usize = 10_000;
/// Bytes of a body.
const BODY: usize = 16 << 10;
/// Characters of a title.
const TITLE: usize = 200;
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(15);

/// What the handlers use.
#[derive(Clone)]
pub(crate) struct App {
    pub(crate) store: Cluster,
    pub(crate) table: Table,
    pub(crate) rooms: Arc<Watching<Room>>,
}

/// Serves until `stop`; then finishes the requests that run, for as long as `grace`.
pub(crate) async fn serve(
    listener: TcpListener,
    app: App,
    stop: CancellationToken,
    grace: Duration,
) -> std::io::Result<()> {
    let ended = stop.clone();
    let serving = axum::serve(listener, router(app))
        .with_graceful_shutdown(async move { ended.cancelled().await });
    let late = async {
        stop.cancelled().await;
        tokio::time::sleep(grace).await;
    };
    tokio::select! {
        served = async { serving.await } => served,
        () = late => Ok(()),
    }
}

fn router(app: App) -> Router {
    Router::new()
        .route("/rooms", get(list_rooms).post(create))
        .route("/rooms/{id}", get(show_room).delete(remove))
        .route("/rooms/{id}/start", post(start))
        .route("/rooms/{id}/stop", post(stop_room))
        .route("/mixers", get(async |app: State<App>| list_modules(&app, Kind::Mixer)))
        .route("/januses", get(async |app: State<App>| list_modules(&app, Kind::Janus)))
        .route(
            "/mixers/{id}/{mark}",
            post(async |app: State<App>, at: Path<(String, String)>| {
                mark(&app, Kind::Mixer, &at).await
            }),
        )
        .route(
            "/januses/{id}/{mark}",
            post(async |app: State<App>, at: Path<(String, String)>| {
                mark(&app, Kind::Janus, &at).await
            }),
        )
        .layer(DefaultBodyLimit::max(BODY))
        .layer(middleware::from_fn(guard))
        .with_state(app)
}

/// Refuses what a web page of somebody else may have sent, and what takes too long.
async fn guard(request: Request, next: Next) -> Result<Response, ApiError> {
    let headers = request.headers();
    if !is_ours(headers) {
        return Err(ApiError::new(
            StatusCode::FORBIDDEN,
            "only from this machine, by its own name",
        ));
    }
    let late =
        || ApiError::new(StatusCode::GATEWAY_TIMEOUT, "it took too long; it may be done yet");
    tokio::time::timeout(PATIENCE, next.run(request)).await.map_err(|_| late())
}

/// Whether a request is for a name of this machine and from none of another origin.
fn is_ours(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    let Some(host) = text(header::HOST) else { return false };
    let name = host.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok());
    let name = name.map_or(host, |(name, _)| name);
    let is_local = matches!(name, "localhost" | "127.0.0.1" | "[::1]");
    let origin = text(header::ORIGIN);
    let is_same = origin.is_none_or(|origin| origin.strip_prefix("http://") == Some(host));
    let site = headers.get("sec-fetch-site");
    is_local && is_same && site.is_none_or(|site| site == "same-origin" || site == "none")
}

/// Why not, for people and programs.
struct ApiError {
    status: StatusCode,
    message: String,
}

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    fn no_such(what: &str, id: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, format!("there is no {what} {id}"))
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, explain(&error))
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(json!({ "error": self.message }))).into_response()
    }
}

/// A room as it is shown.
#[derive(Serialize)]
struct Shown<'a> {
    id: &'a str,
    #[serde(flatten)]
    meta: &'a LiveMeta,
    mixer: &'a Option<crate::model::MixerAt>,
    janus: &'a Option<crate::model::JanusAt>,
}

fn shown(id: &str, room: &Room) -> Option<Value> {
    let meta = room.meta.as_ref()?;
    serde_json::to_value(Shown { id, meta, mixer: &room.mixer, janus: &room.janus }).ok()
}

impl App {
    /// A room as it is now, with what was just written.
    async fn show(&self, id: &str, written: Revision, meta: &LiveMeta) -> Value {
        // The line to the store may be down, while that of the writes is not.
        let _ = tokio::time::timeout(Duration::from_secs(2), self.rooms.caught_up(written)).await;
        let room = self.rooms.get(id).and_then(|room| shown(id, &room));
        let alone = || shown(id, &Room { meta: Some(meta.clone()), ..Room::default() });
        room.or_else(alone).unwrap_or_default()
    }

    /// Changes a room that is there.
    async fn change(
        &self,
        id: &str,
        change: impl Fn(LiveMeta) -> Result<LiveMeta, ApiError>,
    ) -> Result<Value, ApiError> {
        if !is_id(id) {
            return Err(ApiError::no_such("room", id));
        }
        let (key, mut refused) = (room_key(id, "livemeta"), None);
        let changed = update(&self.store, &key, |meta: Option<LiveMeta>| {
            match meta.ok_or_else(|| ApiError::no_such("room", id)).and_then(&change) {
                Ok(meta) => Some(meta),
                Err(error) => {
                    refused = Some(error);
                    None
                }
            }
        });
        let changed = changed.await?;
        match (changed, refused) {
            (Some((meta, written)), _) => Ok(self.show(id, written, &meta).await),
            (None, Some(error)) => Err(error),
            (None, None) => Err(ApiError::no_such("room", id)),
        }
    }
}

/// What may be said of a new room.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Asked {
    id: Option<String>,
    title: Option<String>,
}

async fn create(
    State(app): State<App>,
    body: bytes::Bytes,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    let bad = |why: String| ApiError::new(StatusCode::BAD_REQUEST, why);
    let asked = if body.is_empty() { Ok(Asked::default()) } else { serde_json::from_slice(&body) };
    let Asked { id, title } = asked.map_err(|error| bad(error.to_string()))?;
    let id = id.unwrap_or_else(|| format!("r{:012x}", fastrand::u64(..1 << 48)));
    if !is_id(&id) {
        return Err(bad("an id is 1 to 64 letters, digits, - and _".into()));
    }
    if title.as_ref().is_some_and(|title| title.chars().count() > TITLE) {
        return Err(bad(format!("a title has at most {TITLE} characters")));
    }
    if app.rooms.status().ids >= MOST_ROOMS {
        let full = format!("there are {MOST_ROOMS} rooms: remove some");
        return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, full));
    }
    let create =
        |there: Option<LiveMeta>| there.is_none().then(|| LiveMeta::new(title.clone(), now()));
    let created = update(&app.store, &room_key(&id, "livemeta"), create).await?;
    let Some((meta, written)) = created else {
        return Err(ApiError::new(StatusCode::CONFLICT, format!("there is a room {id}")));
    };
    Ok((StatusCode::CREATED, Json(app.show(&id, written, &meta).await)))
}

async fn list_rooms(State(app): State<App>) -> Json<Value> {
    let all = app.rooms.all();
    let mut rooms: Vec<_> = all.iter().collect();
    rooms.sort_unstable_by_key(|(id, _)| *id);
    let rooms = rooms.into_iter().filter_map(|(id, room)| shown(&id.to_string(), room));
    Json(json!({ "rooms": rooms.collect::<Vec<_>>() }))
}

async fn show_room(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let room = app.rooms.get(&id).and_then(|room| shown(&id, &room));
    room.map(Json).ok_or_else(|| ApiError::no_such("room", &id))
}

fn not_removing(meta: LiveMeta) -> Result<LiveMeta, ApiError> {
    if meta.status == Status::Removing {
        return Err(ApiError::new(StatusCode::CONFLICT, "the room is being removed"));
    }
    Ok(meta)
}

async fn start(State(app): State<App>, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    let started = app.change(&id, |meta| {
        let mut meta = not_removing(meta)?;
        if meta.status != Status::OnAir {
            (meta.status, meta.started_at) = (Status::OnAir, Some(now()));
        }
        Ok(meta)
    });
    started.await.map(Json)
}

async fn stop_room(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let stopped = app.change(&id, |meta| {
        let mut meta = not_removing(meta)?;
        // It may be started again, by any mixer.
        (meta.status, meta.mixer_id) = (Status::Stopped, None);
        Ok(meta)
    });
    stopped.await.map(Json)
}

async fn remove(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    let removed = app.change(&id, |meta| Ok(meta.removing(now()))).await?;
    Ok((StatusCode::ACCEPTED, Json(removed)))
}

fn show_module(id: &str, module: &Module, assigned: u32) -> Value {
    json!({
        "id": id,
        "alive": module.is_alive(),
        "state": module.marks,
        "heartbeat": module.heartbeat,
        "rooms": assigned,
    })
}

fn list_modules(app: &App, kind: Kind) -> Json<Value> {
    let rooms = app.rooms.all();
    let loads = loads(rooms.iter().map(|(_, room)| &**room), kind);
    let all = app.table.of(kind).all();
    let mut modules: Vec<_> = all.iter().map(|(id, module)| (id.to_string(), module)).collect();
    modules.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
    let shown = modules
        .iter()
        .map(|(id, module)| show_module(id, module, loads.get(id.as_str()).copied().unwrap_or(0)));
    Json(json!({ (&kind.prefix()[1..kind.prefix().len() - 1]): shown.collect::<Vec<_>>() }))
}

async fn mark(
    app: &App,
    kind: Kind,
    Path((id, mark)): &Path<(String, String)>,
) -> Result<Json<Value>, ApiError> {
    let change: fn(&mut Marks) = match mark.as_str() {
        "ready" => |marks| marks.ready = true,
        "cordon" => |marks| marks.cordoned = true,
        "uncordon" => |marks| (marks.cordoned, marks.draining) = (false, false),
        "drain" => |marks| (marks.cordoned, marks.draining) = (true, true),
        _ => return Err(ApiError::new(StatusCode::NOT_FOUND, format!("nothing is called {mark}"))),
    };
    if !is_id(id) || app.table.of(kind).get(id).is_none() {
        return Err(ApiError::no_such(&kind.to_string(), id));
    }
    let set = |marks: Option<Marks>| {
        let mut marks = marks.unwrap_or_default();
        change(&mut marks);
        Some(marks)
    };
    let written = update(&app.store, &kind.key(id, "state"), set).await?;
    let module = app.table.module(kind, id);
    let marks = written.map(|(marks, _)| marks).unwrap_or_default();
    let rooms = app.rooms.all();
    let loads = loads(rooms.iter().map(|(_, room)| &**room), kind);
    let load = loads.get(id.as_str()).copied().unwrap_or(0);
    Ok(Json(show_module(id, &Module { marks, ..module }, load)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_requests_for_this_machine_from_no_other_origin_are_served() {
        let ask = |pairs: &[(&'static str, &str)]| {
            let pairs = pairs.iter().map(|(name, value)| {
                (header::HeaderName::from_static(name), value.parse().unwrap())
            });
            is_ours(&pairs.collect())
        };
        for host in ["localhost", "localhost:80", "127.0.0.1:7", "[::1]:7", "[::1]"] {
            assert!(ask(&[("host", host)]), "{host}");
        }
        for host in ["", "example.org", "example.org:80", "127.0.0.1.example.org", "localhost:x"] {
            assert!(!ask(&[("host", host)]), "{host}");
        }
        assert!(!ask(&[]));
        let host = ("host", "localhost:7");
        assert!(ask(&[host, ("origin", "http://localhost:7"), ("sec-fetch-site", "same-origin")]));
        assert!(!ask(&[host, ("origin", "http://localhost:8")]));
        assert!(!ask(&[host, ("origin", "http://example.org")]));
        assert!(!ask(&[host, ("origin", "null")]));
        assert!(!ask(&[host, ("sec-fetch-site", "cross-site")]));
    }
}
