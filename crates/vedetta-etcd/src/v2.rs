//! The v2 keys API: a tree of nodes, seen in the flat keyspace that v3 has too.
//!
//! ```text
//! key in the store      node
//! /a/b                  the file /a/b
//! /a/                   the directory /a: its marker, without a value
//! /a/c/d, no /a/c/      the file /a/c/d, in a directory /a/c that is there as long as it has something in it
//! ```
//!
//! What v2 writes has a marker for every directory. A path that v3 uses both as a key and as the beginning
//! of others is a directory here. Keys that no path can name, since they do not begin with a slash or have an
//! empty segment, are not seen. The index of v2 is the store's revision.

mod about;
mod error;
mod form;
mod json;
mod path;
mod read;
mod tree;
mod ttl;
mod watch;
mod write;

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use tokio_util::sync::CancellationToken;
use vedetta_core::Revision;
use vedetta_kv::{KvError, Store};

use self::about::{Stats, of_cluster};
use self::error::{Code, Error};
use self::form::{Ask, unescape};
use self::path::{Path, is_too_deep};
use self::watch::Watch;
use self::write::Verb;
use crate::Endpoint;

/// There is one member and no election, so this never changes.
const RAFT_TERM: &str = "2";
/// Where keys are.
const KEYS: &[u8] = b"/v2/keys";

/// What Go leaves as it is in a path.
const IN_A_PATH: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~')
    .remove(b'$')
    .remove(b'&')
    .remove(b'+')
    .remove(b',')
    .remove(b'/')
    .remove(b':')
    .remove(b';')
    .remove(b'=')
    .remove(b'@');

/// What answering takes.
struct Api {
    store: Store,
    name: String,
    scheme: &'static str,
    cluster_id: String,
    member_id: String,
    stats: Stats,
    stop: CancellationToken,
}

/// Answers whatever no other route does.
pub(crate) fn router(endpoint: &Endpoint, stop: &CancellationToken) -> Router {
    let api = Api {
        store: endpoint.store.clone(),
        name: endpoint.name.clone(),
        scheme: endpoint.scheme(),
        cluster_id: format!("{:x}", endpoint.cluster_id()),
        member_id: format!("{:x}", endpoint.member_id()),
        stats: Stats::default(),
        stop: stop.clone(),
    };
    Router::new().fallback(answer).with_state(Arc::new(api))
}

/// What a client hears that has to come back later.
pub(crate) fn too_many() -> Response {
    Error::from(KvError::Busy).into_response()
}

async fn answer(State(api): State<Arc<Api>>, request: Request) -> Response {
    if request.method() == Method::OPTIONS {
        return StatusCode::OK.into_response();
    }
    let Ok(path) = unescape(request.uri().path().as_bytes(), false) else {
        return plain(StatusCode::BAD_REQUEST, "400 Bad Request");
    };
    if let Some(elsewhere) = detour(&path) {
        return moved(&request, &elsewhere);
    }
    match path.strip_prefix(KEYS) {
        Some(rest @ ([] | [b'/', ..])) => keys(&api, Path::clean(rest), request).await,
        _ => {
            // A body may not be shared between threads, so it is not held while this waits.
            let (head, _) = request.into_parts();
            about::answer(&api, &path, &head).await
        }
    }
}

async fn keys(api: &Api, path: Path, request: Request) -> Response {
    let method = request.method().clone();
    if !matches!(method, Method::HEAD | Method::GET | Method::PUT | Method::POST | Method::DELETE) {
        return not_allowed("HEAD,GET,PUT,POST,DELETE");
    }
    let answer = match parse(path, request).await {
        Ok(ask) => serve(api, &method, ask).await,
        Err(error) => Err(error),
    };
    of_cluster(api, answer.unwrap_or_else(Error::into_response))
}

async fn parse(path: Path, request: Request) -> Result<Ask, Error> {
    let (head, body) = request.into_parts();
    let named = usize::from(head.method == Method::POST);
    if is_too_deep(path.depth() + named) {
        return Err(Error::request(Code::InvalidForm, "the path is too deep"));
    }
    // It is here already, and not larger than the endpoint takes.
    let body = to_bytes(body, usize::MAX).await;
    let body = body.map_err(|error| Error::request(Code::InvalidForm, error.to_string()))?;
    let query = head.uri.query().unwrap_or_default().as_bytes();
    Ask::parse(path, &head.method, &head.headers, query, &body)
}

async fn serve(api: &Api, method: &Method, ask: Ask) -> Result<Response, Error> {
    if ask.wait {
        let (mut watch, index) = Watch::begin(&api.store, &ask, &api.stop)?;
        watch.catch_up(index).await?;
        return Ok(told(StatusCode::OK, index, Body::from_stream(watch.lines())));
    }
    if matches!(*method, Method::GET | Method::HEAD) {
        let read = read::get(&api.store, &ask).await;
        api.stats.count(None, read.is_ok());
        return read.map(|(body, index)| told(StatusCode::OK, index, body.into()));
    }
    let verb = Verb::of(method, &ask);
    let deletes = matches!(verb, Verb::Delete | Verb::CompareAndDelete);
    let short = ask.no_value && !deletes;
    let written = write::write(&api.store, verb, ask).await;
    api.stats.count(Some(verb), written.is_ok());
    let (event, index) = written?;
    let created =
        matches!(verb, Verb::Create | Verb::Post) || verb == Verb::Set && event.previous.is_none();
    let status = if created { StatusCode::CREATED } else { StatusCode::OK };
    let line = if short {
        Bytes::from(format!("{{\"action\":\"{}\"}}\n", event.action))
    } else {
        event.line()
    };
    Ok(told(status, index, line.into()))
}

/// An answer of the store, at an index.
fn told(status: StatusCode, index: Revision, body: Body) -> Response {
    let json = HeaderValue::from_static("application/json");
    let index = index.to_string();
    let headers = [
        (HeaderName::from_static("x-etcd-index"), index.clone()),
        (HeaderName::from_static("x-raft-index"), index),
        (HeaderName::from_static("x-raft-term"), RAFT_TERM.into()),
    ];
    (status, [(header::CONTENT_TYPE, json)], headers, body).into_response()
}

/// Where a path leads that is not the shortest to there.
fn detour(path: &[u8]) -> Option<Vec<u8>> {
    let mut clean = Path::clean(path).bytes().to_vec();
    if clean.is_empty() || path.ends_with(b"/") {
        clean.push(b'/');
    }
    (clean != path).then_some(clean)
}

fn moved(request: &Request, path: &[u8]) -> Response {
    let mut place = percent_encode(path, IN_A_PATH).to_string();
    if let Some(query) = request.uri().query() {
        place = format!("{place}?{query}");
    }
    let status = StatusCode::MOVED_PERMANENTLY;
    let location = [(header::LOCATION, place.clone())];
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return (status, location).into_response();
    }
    let escaped = place.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let escaped = escaped.replace('"', "&#34;").replace('\'', "&#39;");
    let html = [(header::CONTENT_TYPE, "text/html; charset=utf-8")];
    let body = format!("<a href=\"{escaped}\">Moved Permanently</a>.\n\n");
    (status, location, html, body).into_response()
}

fn plain(status: StatusCode, text: &'static str) -> Response {
    (status, [(header::X_CONTENT_TYPE_OPTIONS, "nosniff")], text).into_response()
}

fn not_found() -> Response {
    plain(StatusCode::NOT_FOUND, "404 page not found\n")
}

fn not_allowed(allow: &'static str) -> Response {
    let allow = [(header::ALLOW, allow)];
    (allow, plain(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed\n")).into_response()
}
