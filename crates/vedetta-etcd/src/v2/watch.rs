//! Waiting for what happens to a node.

use std::collections::VecDeque;

use bytes::Bytes;
use futures_util::Stream;
use futures_util::stream;
use tokio_util::sync::CancellationToken;
use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{
    Cause, Change, Event as Raw, KeyValue, Store, WITH_DIRECTORY, WatchError, WatchOptions, Watcher,
};

use super::error::{Code, Error};
use super::form::Ask;
use super::json::{Event, Node};
use super::path::{Path, is_hidden};
use super::read::expiry;
use super::write::{action, tag};

/// Follows a node.
pub(crate) struct Watch {
    store: Store,
    watcher: Watcher,
    scope: Scope,
    /// Whether to go on after the first event.
    stream: bool,
    ready: VecDeque<Bytes>,
    stop: CancellationToken,
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
        let watcher = store.watch_all(scope.ranges(), options).map_err(|error| match error {
            WatchError::Compacted { asked, oldest } => {
                let text = format!("the requested history has been cleared [{oldest}/{asked}]");
                Error::new(Code::EventIndexCleared, text, index)
            }
            other => Error::request(Code::Internal, other.to_string()),
        })?;
        let (store, stop) = (store.clone(), stop.clone());
        let ready = VecDeque::new();
        Ok((Self { store, watcher, scope, stream: ask.stream, ready, stop }, index))
    }

    /// The events, one line each: one, or all that come. Dropping it ends the watch.
    pub(crate) fn lines(self) -> impl Stream<Item = Result<Bytes, std::convert::Infallible>> {
        stream::unfold(Some(self), async |watch| {
            let mut watch = watch?;
            let line = watch.next().await?;
            let more = watch.stream.then_some(watch);
            Some((Ok(line), more))
        })
    }

    /// `None` when the server stops, or when the history that this needs is gone.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(line) = self.ready.pop_front() {
                return Some(line);
            }
            let batch = tokio::select! {
                () = self.stop.cancelled() => return None,
                batch = self.watcher.next() => batch.ok()?,
            };
            let events: Vec<&Raw> = batch.iter().collect();
            for revision in events.chunk_by(|a, b| a.revision == b.revision) {
                let shown = self.scope.shown(&self.store, revision);
                self.ready.extend(shown.iter().map(Event::line));
            }
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
    fn shown(&self, store: &Store, events: &[&Raw]) -> Vec<Event> {
        let mains = events
            .iter()
            .filter(|event| !matches!(event.tag, tag::REFRESH | tag::PART | WITH_DIRECTORY));
        let shown = mains.filter_map(|event| {
            let (path, dir) = Path::of_key(event.key())?;
            let concerns = path == self.path
                || self.path.rest_of(&path).is_some_and(|rest| self.recursive && !hidden(rest))
                || path.rest_of(&self.path).is_some() && self.went_with(events);
            concerns.then(|| show(store, event, &path, dir, events))
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
