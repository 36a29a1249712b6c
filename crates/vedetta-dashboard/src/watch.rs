//! Watches as server-sent events.
//!
//! One message is one revision: `id` is the revision, so a client that comes back with `Last-Event-ID`
//! gets the revisions after it, each whole and once. A message that has only an `id` tells nothing but how
//! far the watch has come; it is sent at the start and as the sign of life, so that a watch which is quiet
//! for long can be resumed too after the history it slept through was compacted.

use std::convert::Infallible;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use serde::Serialize;
use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{Batch, Cause, Change, Event, WatchError, WatchOptions, Watcher};

use crate::api::Context;
use crate::error::ApiError;
use crate::input::Query;
use crate::json::{Entry, Text};

/// A client that lost the line comes back after this many milliseconds.
const RETRY_MS: u32 = 1000;
/// A client is handed about so many bytes at a time; a revision is never split.
const PIECE: usize = 64 << 10;

pub(crate) async fn watch(
    State(context): State<Context>,
    mut query: Query,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let range = match (query.bytes("key"), query.bytes("prefix")) {
        (Some(key), None) if key.is_empty() => return Err(vedetta_kv::KvError::EmptyKey.into()),
        (Some(key), None) => KeyRange::One(key.into()),
        (None, Some(prefix)) => KeyRange::prefix(prefix),
        _ => return Err(ApiError::invalid("give either key or prefix; prefix= is all keys")),
    };
    let mut from = query.number("from")?.map(Revision);
    query.end()?;
    // A browser that reconnects asks the same address again, and adds how far it came.
    if let Some(seen) = headers.get("last-event-id").filter(|seen| !seen.is_empty()) {
        let seen: Option<u64> = seen.to_str().ok().and_then(|seen| seen.parse().ok());
        let seen = seen.ok_or_else(|| ApiError::invalid("Last-Event-ID must be a revision"))?;
        from = Some(Revision(seen.saturating_add(1)));
    }
    let options = WatchOptions { from, ..WatchOptions::default() };
    let feed = match context.store.watch(range, options) {
        Ok(watcher) => {
            let hello = format!("retry: {RETRY_MS}\nid: {}\n\n", watcher.progress());
            Feed { hello: Some(hello.into()), watcher: Some(watcher), rest: None, context }
        }
        Err(error) => Feed { hello: Some(farewell(&error)), watcher: None, rest: None, context },
    };
    let body = Body::from_stream(stream::unfold(feed, Feed::next));
    Ok(([(header::CONTENT_TYPE, "text/event-stream")], body).into_response())
}

/// A watch on its way to a client. It is asked for more only when the client has taken what came before,
/// so a client has one piece in memory, whatever became durable at once.
struct Feed {
    hello: Option<Bytes>,
    watcher: Option<Watcher>,
    rest: Option<Rest>,
    context: Context,
}

/// What the watcher handed out, from a revision on.
struct Rest {
    batch: Batch,
    from: Revision,
}

impl Feed {
    async fn next(mut self) -> Option<(Result<Bytes, Infallible>, Self)> {
        if self.context.stop.is_cancelled() {
            return None;
        }
        if let Some(hello) = self.hello.take() {
            return Some((Ok(hello), self));
        }
        loop {
            if let Some(rest) = &mut self.rest {
                if let Some(piece) = rest.piece() {
                    return Some((Ok(piece), self));
                }
                self.rest = None;
            }
            let watcher = self.watcher.as_mut()?;
            let quiet = tokio::time::sleep(self.context.limits.sign_of_life);
            let message = tokio::select! {
                () = self.context.stop.cancelled() => return None,
                next = watcher.next() => match next {
                    Ok(batch) => {
                        self.rest = Some(Rest { batch, from: Revision(0) });
                        continue;
                    }
                    Err(error) => {
                        self.watcher = None;
                        farewell(&error)
                    }
                },
                () = quiet => format!("id: {}\n\n", watcher.progress()).into(),
            };
            return Some((Ok(message), self));
        }
    }
}

impl Rest {
    /// The next messages, one for each revision; `None` when there are no more.
    fn piece(&mut self) -> Option<Bytes> {
        let mut out = Vec::new();
        let from = self.from;
        let mut events = self.batch.iter().skip_while(|event| event.revision < from).peekable();
        while out.len() < PIECE
            && let Some(first) = events.next()
        {
            let revision = first.revision;
            let mut told = vec![Told::from(first)];
            while let Some(event) = events.next_if(|event| event.revision == revision) {
                told.push(Told::from(event));
            }
            out.extend_from_slice(format!("event: kv\nid: {revision}\ndata: ").as_bytes());
            write_json(&mut out, &Message { revision: revision.0, events: told });
            out.extend_from_slice(b"\n\n");
            self.from = revision.next();
        }
        (!out.is_empty()).then(|| out.into())
    }
}

#[derive(Serialize)]
struct Message<'a> {
    revision: u64,
    events: Vec<Told<'a>>,
}

#[derive(Serialize)]
struct Told<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(flatten)]
    what: What<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    previous: Option<Entry<'a>>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum What<'a> {
    Put(Entry<'a>),
    Gone(Text<'a>),
}

impl<'a> From<&'a Event> for Told<'a> {
    fn from(event: &'a Event) -> Self {
        let (kind, what) = match &event.change {
            Change::Put(now) => ("put", What::Put(Entry::new(now, false))),
            Change::Delete { key, cause } => {
                let kind = match cause {
                    Cause::Asked => "delete",
                    Cause::Expired => "expire",
                };
                (kind, What::Gone(Text::key(key)))
            }
        };
        let previous = event.previous.as_ref().map(|before| Entry::new(before, false));
        Self { kind, what, previous }
    }
}

#[derive(Serialize)]
struct Oldest {
    oldest: u64,
}

#[derive(Serialize)]
struct Failed {
    message: String,
}

/// The last message of a watch that cannot go on.
fn farewell(error: &WatchError) -> Bytes {
    let mut out = Vec::new();
    match error {
        WatchError::Compacted { oldest, .. } => {
            out.extend_from_slice(b"event: compacted\ndata: ");
            write_json(&mut out, &Oldest { oldest: oldest.0 });
        }
        WatchError::Closed => return Bytes::new(),
        other => {
            tracing::error!(error = %other, "a watch failed");
            out.extend_from_slice(b"event: failed\ndata: ");
            write_json(&mut out, &Failed { message: other.to_string() });
        }
    }
    out.extend_from_slice(b"\n\n");
    out.into()
}

/// JSON has no line breaks of its own, so it fits the one line of a message.
fn write_json(out: &mut Vec<u8>, value: &impl Serialize) {
    serde_json::to_writer(out, value).expect("strings and numbers are always JSON");
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::Arc;

    use tokio_util::sync::CancellationToken;
    use vedetta_kv::{Put, SCHEMA, Store};

    use super::*;
    use crate::api::Limits;

    #[tokio::test]
    async fn what_became_durable_at_once_is_handed_out_in_pieces_of_whole_revisions() {
        let folder = tempfile::tempdir().unwrap();
        let options = vedetta_db::Options::new(folder.path().join("vedetta.db"));
        let db = vedetta_db::Db::open(&options, &[SCHEMA]).unwrap();
        let store = Store::open(db, vedetta_kv::Options::default()).await.unwrap();
        let value = "v".repeat(PIECE / 4);
        let puts = (0..64).map(|n| store.put(Put::new(format!("k{n}"), value.clone())));
        futures_util::future::try_join_all(puts).await.unwrap();

        let from = WatchOptions { from: Some(Revision(2)), ..WatchOptions::default() };
        let watcher = store.watch(KeyRange::prefix(""), from).unwrap();
        let mut feed = Feed {
            hello: None,
            watcher: Some(watcher),
            rest: None,
            context: Context {
                store: store.clone(),
                watchers: Arc::default(),
                stages: None,
                jobs: None,
                fleet: None,
                kinds: Arc::default(),
                ending: CancellationToken::new(),
                limits: Arc::new(Limits::default()),
                stop: CancellationToken::new(),
                listening: Ipv4Addr::LOCALHOST.into(),
            },
        };
        let mut told = Vec::new();
        while told.len() < 64 {
            let (piece, rest) = feed.next().await.unwrap();
            feed = rest;
            let piece = piece.unwrap();
            assert!(piece.len() < 2 * PIECE, "{} bytes at once", piece.len());
            let text = std::str::from_utf8(&piece).unwrap();
            let ids = text.lines().filter_map(|line| line.strip_prefix("id: "));
            told.extend(ids.map(|id| id.parse::<u64>().unwrap()));
            assert!(text.ends_with("\n\n"));
        }
        assert_eq!(told, (2..66).collect::<Vec<_>>(), "each once, in order");
        feed.context.stop.cancel();
        assert!(feed.next().await.is_none(), "a stop ends it");
        store.close().await;
    }
}
