//! Waiting for what happens to a node.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream;
use futures_util::stream;
use tokio_util::sync::CancellationToken;
use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{
    Batch, Cause, Change, Event as Raw, KeyValue, Line, Store, WITH_DIRECTORY, WatchError,
    WatchOptions, Watcher,
};

use super::error::{Code, Error};
use super::form::Ask;
use super::json::{Event, Node};
use super::path::{Path, is_hidden};
use super::read::expiry;
use super::write::{action, tag};

/// How often to look whether a watch has caught up: when nothing in the history is for it, it is not woken.
const LOOK: Duration = Duration::from_millis(10);

/// Follows a node.
pub(crate) struct Watch {
    store: Store,
    watcher: Watcher,
    scope: Scope,
    /// Whether to go on after the first event.
    stream: bool,
    ready: VecDeque<Told>,
    stop: CancellationToken,
}

/// What a watch is going to tell.
enum Told {
    /// Another watch has made the line, and it is the same here.
    Made(Bytes),
    /// The line is kept for the other watches, if it is the same for them: what is left of a lease is not.
    Event(Box<Event>, Option<Line>),
}

impl Told {
    fn line(self) -> Bytes {
        match self {
            Self::Made(line) => line,
            Self::Event(event, Some(line)) => line.get_or_init(|| event.line()).clone(),
            Self::Event(event, None) => event.line(),
        }
    }
}

impl Watch {
    /// Begins to watch; answers the index it begins at.
    pub(crate) fn begin(
        store: &Store,
        ask: &Ask,
        stop: &CancellationToken,
    ) -> Result<(Self, Revision), Error> {
        let index = store.status().revision;
        let from = if ask.wait_index == 0 { index.next() } else { Revision(ask.wait_index) };
        let options = WatchOptions { from: Some(from), ..WatchOptions::default() };
        let scope = Scope { path: ask.path.clone(), recursive: ask.recursive };
        let watcher = store.watch_all(scope.ranges(), options);
        let watcher = watcher.map_err(|error| ended(error, index))?;
        let (store, stop) = (store.clone(), stop.clone());
        let ready = VecDeque::new();
        Ok((Self { store, watcher, scope, stream: ask.stream, ready, stop }, index))
    }

    /// Looks through the history, up to `index` or to something for it: as long as nothing has been answered,
    /// it can be told that the history is gone.
    pub(crate) async fn catch_up(&mut self, index: Revision) -> Result<(), Error> {
        while self.ready.is_empty() && self.watcher.progress() < index && !self.stop.is_cancelled()
        {
            let look = poll_fn(|cx| match self.watcher.poll_next(cx) {
                Poll::Pending if self.watcher.progress() >= index => Poll::Ready(None),
                other => other.map(Some),
            });
            if let Ok(Some(batch)) = tokio::time::timeout(LOOK, look).await {
                self.take(&batch.map_err(|error| ended(error, index))?);
            }
        }
        Ok(())
    }

    /// The events, one line each: one, or all that come. Dropping it ends the watch.
    pub(crate) fn lines(self) -> impl Stream<Item = Result<Bytes, std::convert::Infallible>> {
        stream::unfold(Some(self), async |watch| {
            let mut watch = watch?;
            let line = watch.next().await?.line();
            let more = watch.stream.then_some(watch);
            Some((Ok(line), more))
        })
    }

    /// `None` when the server stops, or when the history that this needs is gone.
    async fn next(&mut self) -> Option<Told> {
        loop {
            if let Some(told) = self.ready.pop_front() {
                return Some(told);
            }
            let batch = tokio::select! {
                () = self.stop.cancelled() => return None,
                batch = self.watcher.next() => batch,
            };
            // Too late to answer anything else.
            self.take(&batch.map_err(|error| ended(error, Revision(0))).ok()?);
        }
    }

    /// Finds what is for this watch, as much as it is going to tell.
    fn take(&mut self, batch: &Batch) {
        let (events, lines): (Vec<&Raw>, Vec<&Line>) = batch.with_lines().unzip();
        let mut lines = &lines[..];
        for revision in events.chunk_by(|a, b| a.revision == b.revision) {
            let (of_it, rest) = lines.split_at(revision.len());
            lines = rest;
            self.ready.extend(self.scope.shown(&self.store, revision, of_it));
            if !self.stream && !self.ready.is_empty() {
                return;
            }
        }
    }
}

/// What to answer when a watch ends.
fn ended(error: WatchError, index: Revision) -> Error {
    match error {
        WatchError::Compacted { asked, oldest } => {
            let text = format!("the requested history has been cleared [{oldest}/{asked}]");
            Error::new(Code::EventIndexCleared, text, index)
        }
        WatchError::Closed => Error::request(Code::Internal, error.to_string()),
        other => {
            tracing::error!(error = &other as &dyn std::error::Error, "a watch failed");
            Error::request(Code::Internal, other.to_string())
        }
    }
}

/// What is watched.
struct Scope {
    path: Path,
    recursive: bool,
}

impl Scope {
    /// The keys that matter: the node, what is in it, and the directories it would go with.
    fn ranges(&self) -> Vec<KeyRange> {
        let mut ranges: Vec<_> = self.path.markers_above().map(KeyRange::One).collect();
        if !self.path.is_root() {
            ranges.push(KeyRange::One(self.path.file()));
        }
        ranges.push(if self.recursive {
            self.path.below()
        } else {
            KeyRange::One(self.path.marker())
        });
        ranges
    }

    /// What the events of one revision are to this watch.
    fn shown(&self, store: &Store, events: &[&Raw], lines: &[&Line]) -> Vec<Told> {
        let mains = events
            .iter()
            .zip(lines)
            .filter(|(event, _)| !matches!(event.tag, tag::REFRESH | tag::PART | WITH_DIRECTORY));
        let shown = mains.filter_map(|(event, line)| {
            let (path, dir) = Path::of_key(event.key())?;
            let concerns = path == self.path
                || self.path.rest_of(&path).is_some_and(|rest| self.recursive && !hidden(rest))
                || path.rest_of(&self.path).is_some() && self.went_with(events);
            concerns.then(|| match line.get() {
                Some(line) => Told::Made(line.clone()),
                None => {
                    let shown = show(store, event, &path, dir, events);
                    let line = is_lasting(event, &shown).then(|| Line::clone(line));
                    Told::Event(Box::new(shown), line)
                }
            })
        });
        shown.collect()
    }

    /// Whether the node itself went because a directory above it did.
    fn went_with(&self, events: &[&Raw]) -> bool {
        let marker = self.path.marker();
        events.iter().any(|event| {
            let key = event.key();
            event.tag == WITH_DIRECTORY && (key == self.path.bytes() || key.starts_with(&marker))
        })
    }
}

/// Whether an event is told in the same bytes at any time: nothing in it has a lease, which would run down.
fn is_lasting(event: &Raw, shown: &Event) -> bool {
    let replaced = shown.previous.as_ref().and_then(|previous| previous.value.as_ref());
    let mut keys = [event.now(), event.previous.as_ref(), replaced].into_iter().flatten();
    keys.all(|key| key.lease().is_none())
}

fn hidden(rest: &[u8]) -> bool {
    rest.split(|&byte| byte == b'/').any(is_hidden)
}

fn show(store: &Store, event: &Raw, path: &Path, dir: bool, others: &[&Raw]) -> Event {
    let node = |key: &KeyValue, dir: bool| Node {
        path: path.clone(),
        value: (!dir).then(|| key.clone()),
        dir,
        expiry: expiry(store, key),
        modified: key.modified().0,
        created: key.created().0,
    };
    let mut previous = event.previous.as_ref().map(|key| node(key, dir));
    if let Some(previous) = previous.as_mut().filter(|_| dir) {
        previous.modified = previous.created;
    }
    match &event.change {
        Change::Put(now) => {
            if dir && previous.is_none() {
                // It may have replaced a file.
                let file = others.iter().find(|other| {
                    other.tag == tag::PART && other.key() == path.bytes() && other.now().is_none()
                });
                let file = file.and_then(|file| file.previous.as_ref());
                previous = file.map(|key| node(key, false));
            }
            Event { action: action(event.tag), node: node(now, dir), previous }
        }
        Change::Delete { cause, .. } => {
            let action = match (cause, event.tag) {
                (Cause::Expired, _) => "expire",
                (Cause::Asked, tag::COMPARE_AND_DELETE) => action(event.tag),
                (Cause::Asked, _) => action(tag::DELETE),
            };
            let created = previous.as_ref().map_or(0, |previous| previous.created);
            let (modified, path) = (event.revision.0, path.clone());
            let node = Node { path, value: None, dir, expiry: None, modified, created };
            Event { action, node, previous }
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderMap, Method};
    use vedetta_db::Db;
    use vedetta_kv::{Keep, Options, Put, SCHEMA};

    use super::*;

    async fn open(folder: &std::path::Path) -> Store {
        let mut options = vedetta_db::Options::new(folder.join("vedetta.db"));
        options.ballast = 0;
        let keep = Keep { revisions: None, age: None };
        let db = Db::open(&options, &[SCHEMA]).unwrap();
        Store::open(db, Options { keep, ..Options::default() }).await.unwrap()
    }

    fn begin(store: &Store, query: &str) -> (Watch, Revision) {
        let (path, headers) = (Path::clean(b"/a"), HeaderMap::new());
        let ask = Ask::parse(path, &Method::GET, &headers, query.as_bytes(), &[]).unwrap();
        Watch::begin(store, &ask, &CancellationToken::new()).unwrap()
    }

    /// The index of what is told.
    fn modified(told: Option<Told>) -> u64 {
        let line: serde_json::Value = serde_json::from_slice(&told.unwrap().line()).unwrap();
        line["node"]["modifiedIndex"].as_u64().unwrap()
    }

    #[tokio::test]
    async fn an_event_is_encoded_once_for_all_its_watchers_unless_it_has_a_lease() {
        let folder = tempfile::tempdir().unwrap();
        let store = open(folder.path()).await;
        let (mut first, _) = begin(&store, "wait=true&stream=true");
        let (mut second, _) = begin(&store, "wait=true&stream=true&recursive=true");
        store.put(Put::new("/a", "1")).await.unwrap();
        let lines = [first.next().await.unwrap().line(), second.next().await.unwrap().line()];
        assert_eq!(lines[0], lines[1]);
        assert_eq!(lines[0].as_ptr(), lines[1].as_ptr(), "the same bytes, not a copy");

        let lease = store.grant(None, Duration::from_secs(100)).await.unwrap();
        store.put(Put::new("/a", "2").lease(lease)).await.unwrap();
        let lines = [first.next().await.unwrap().line(), second.next().await.unwrap().line()];
        assert!(lines.iter().all(|line| line.windows(6).any(|part| part == b"\"ttl\":")));
        assert_ne!(lines[0].as_ptr(), lines[1].as_ptr(), "what is left of it is told anew");
        store.close().await;
    }

    #[tokio::test]
    async fn history_that_goes_before_it_was_read_is_told_as_gone() {
        let folder = tempfile::tempdir().unwrap();
        let store = open(folder.path()).await;
        for key in ["/a", "/b", "/a", "/b"] {
            store.put(Put::new(key, "")).await.unwrap();
        }
        store.close().await;
        drop(store);
        // Now it is in the file only.
        let store = open(folder.path()).await;
        let (mut finds, index) = begin(&store, "wait=true&waitIndex=3");
        finds.catch_up(index).await.unwrap();
        assert_eq!(modified(finds.ready.pop_front()), 4);
        let (mut waits, index) = begin(&store, "wait=true&waitIndex=5");
        waits.catch_up(index).await.unwrap();
        assert!(waits.ready.is_empty(), "it is caught up, and what it waits for is to come");

        let (mut late, index) = begin(&store, "wait=true&waitIndex=2");
        store.compact(Revision(4), true).await.unwrap();
        let cause = "the requested history has been cleared [4/2]";
        let gone = Error::new(Code::EventIndexCleared, cause, Revision(5));
        assert_eq!(late.catch_up(index).await, Err(gone));
        store.put(Put::new("/a", "")).await.unwrap();
        assert_eq!(modified(waits.next().await), 6);
        store.close().await;
    }

    #[tokio::test]
    async fn no_more_is_prepared_than_will_be_told() {
        let folder = tempfile::tempdir().unwrap();
        let store = open(folder.path()).await;
        for _ in 0..3 {
            store.put(Put::new("/a", "")).await.unwrap();
        }
        for (query, count) in
            [("wait=true&waitIndex=2", 1), ("wait=true&stream=true&waitIndex=2", 3)]
        {
            let (mut watch, index) = begin(&store, query);
            watch.catch_up(index).await.unwrap();
            assert_eq!(watch.ready.len(), count, "{query}");
        }
        store.close().await;
    }
}
