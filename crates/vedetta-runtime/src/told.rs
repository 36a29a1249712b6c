//! Watchers of other processes: what they tell of themselves in a store, and those who read it.
//!
//! ```text
//!  a program ──{prefix}{name}@{process}/status, under a lease──► store ──► Board ──► lists, pages
//!            ◄──{prefix}{name}@{process}/resync─────────────────  store ◄── Board ◄── somebody asks
//! ```
//!
//! Nothing that is told is trusted: what cannot be read, or is too large, is left out. What a process told goes with
//! its lease.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};
use tokio_util::task::AbortOnDropHandle;
use vedetta_core::{Backoff, Registry, SourceError};

use crate::watcher::{BoxError, Effect, Handle, Id, Next, Reconcile, State, Trouble, Wanted};
use crate::{Watcher, Watching};

/// Where watchers are told of.
pub const PREFIX: &str = "/vedetta/watchers/";
/// What one process tells of one watcher may be so large,
pub const LARGEST: usize = 64 << 10;
/// and so many are shown.
const SHOWN: usize = 1000;
/// A wish that nobody follows is forgotten after this.
const WISH: Duration = Duration::from_secs(60);
/// Wishes that may wait.
const WISHES: usize = 16;

/// How a watcher is doing, as it is shown. See [`Status`](crate::watcher::Status).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "they are those of the status")]
pub struct Report {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix_b64: Option<String>,
    pub phase: String,
    pub revision: u64,
    pub ids: u64,
    pub running: u64,
    pub waiting: u64,
    pub failing: u64,
    pub done: u64,
    pub failed: u64,
    pub malformed: u64,
    pub unreadable: u64,
    pub lists: u64,
    pub lost: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// What is wrong with an id, as it is shown. See [`Trouble`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "they are those of the trouble")]
pub struct TroubleReport {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id_b64: Option<String>,
    pub failures: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_in_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<Unreadable>,
}

/// A value that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "it is short")]
pub struct Unreadable {
    pub key_type: String,
    pub error: String,
}

/// All that a process tells of a watcher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Told {
    /// How it is doing.
    #[serde(flatten)]
    pub report: Report,
    /// The first of its troubles.
    #[serde(default)]
    pub troubles: Vec<TroubleReport>,
}

/// Bytes as text, or as base64.
fn text(bytes: &[u8]) -> (Option<String>, Option<String>) {
    match str::from_utf8(bytes) {
        Ok(text) => (Some(text.to_owned()), None),
        Err(_) => (None, Some(BASE64_STANDARD.encode(bytes))),
    }
}

fn count(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

impl Report {
    /// How a watcher is doing now.
    pub fn of(handle: &Handle) -> Self {
        let status = handle.status();
        let (prefix, prefix_b64) = text(handle.prefix());
        Self {
            prefix,
            prefix_b64,
            phase: status.phase.to_string(),
            revision: status.revision.0,
            ids: count(status.ids),
            running: count(status.running),
            waiting: count(status.waiting),
            failing: count(status.failing),
            done: status.done,
            failed: status.failed,
            malformed: status.malformed,
            unreadable: status.unreadable,
            lists: status.lists,
            lost: status.lost,
            last_error: status.last_error,
        }
    }
}

impl TroubleReport {
    /// What is wrong with an id.
    pub fn new(id: &Id, trouble: Trouble) -> Self {
        let (id, id_b64) = text(id.as_bytes());
        let millis = |wait: Duration| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
        let unreadable = trouble.unreadable.into_iter();
        Self {
            id,
            id_b64,
            failures: trouble.failures,
            error: trouble.error,
            retry_in_ms: trouble.retry_in.map(millis),
            unreadable: unreadable
                .map(|(key_type, error)| Unreadable { key_type, error })
                .collect(),
        }
    }
}

/// The key under which a watcher is told of, by its full name.
pub fn status_key(name: &str) -> String {
    format!("{PREFIX}{name}/status")
}

/// The key under which somebody wishes that it runs all again.
pub fn wish_key(name: &str) -> String {
    format!("{PREFIX}{name}/resync")
}

/// The parts of a full name, `name@process`: the process is what comes after the last `@`.
pub fn parts(name: &str) -> Option<(&str, &str)> {
    name.rsplit_once('@').filter(|(name, process)| !name.is_empty() && !process.is_empty())
}

/// What other processes tell of their watchers in a store, kept up to date. Clones are the same board.
#[derive(Clone)]
pub struct Board {
    told: Arc<Mutex<BTreeMap<String, Arc<Told>>>>,
    wishes: mpsc::Sender<Wish>,
}

struct Wish {
    name: String,
    answer: oneshot::Sender<Result<(), SourceError>>,
}

/// Keeps a [`Board`] up to date until it is dropped.
#[must_use = "the board is kept up to date only while this value lives"]
pub struct Reading {
    watching: Watching<Heard>,
    _wishes: AbortOnDropHandle<()>,
}

impl Board {
    /// Reads what is told in this store.
    pub fn start<R: Registry + Clone>(store: &R) -> (Self, Reading) {
        let told = Arc::default();
        let (wishes, inbox) = mpsc::channel(WISHES);
        let backoff = Backoff::default();
        let watcher = Watcher::new(PREFIX).key_types(["status"]).backoff(backoff);
        let watching = watcher.start(store.clone(), Notes(Arc::clone(&told)));
        let passing = AbortOnDropHandle::new(tokio::spawn(pass_on(store.clone(), inbox)));
        (Self { told, wishes }, Reading { watching, _wishes: passing })
    }

    /// All that is told, by full name: `name@process`.
    pub fn all(&self) -> Vec<(String, Arc<Told>)> {
        let told = self.told.lock();
        told.iter().map(|(name, told)| (name.clone(), Arc::clone(told))).collect()
    }

    /// What is told under a full name; or under a short one that only one process has. With that full name.
    pub fn find(&self, name: &str) -> Option<(String, Arc<Told>)> {
        let told = self.told.lock();
        if let Some(exact) = told.get(name) {
            return Some((name.to_owned(), Arc::clone(exact)));
        }
        let mut same = told.iter().filter(|(full, _)| parts(full).is_some_and(|(n, _)| n == name));
        match (same.next(), same.next()) {
            (Some((full, only)), None) => Some((full.clone(), Arc::clone(only))),
            _ => None,
        }
    }

    /// Wishes, by full name, that a watcher runs all its ids again: written when this returns, and followed by
    /// the process soon after.
    pub async fn resync(&self, name: &str) -> Result<(), SourceError> {
        let (answer, told) = oneshot::channel();
        let ended = || SourceError::lost("nobody reads the board any more");
        let wish = Wish { name: name.to_owned(), answer };
        self.wishes.send(wish).await.map_err(|_| ended())?;
        told.await.map_err(|_| ended())?
    }
}

impl Reading {
    /// Ends it. First this, then the store.
    pub async fn stop(self) {
        self.watching.stop(Duration::ZERO).await;
    }
}

/// Writes wishes down, one after the other. Each goes by itself when nobody follows it.
async fn pass_on<R: Registry>(store: R, mut inbox: mpsc::Receiver<Wish>) {
    while let Some(Wish { name, answer }) = inbox.recv().await {
        let written = async {
            let lease = store.begin(WISH).await?;
            // If there is one already, it is for both.
            store.hold(&lease, wish_key(&name).into(), "".into()).await.map(drop)
        };
        let _ = answer.send(written.await);
    }
}

/// What was heard of a watcher.
#[derive(Debug, Clone, Default)]
struct Heard(Option<Arc<Told>>);

impl State for Heard {
    fn apply(&mut self, _: &str, value: Option<&[u8]>) -> Result<Effect, BoxError> {
        self.0 = match value {
            None => None,
            Some(value) if value.len() > LARGEST => {
                return Err(
                    format!("{} bytes are more than a watcher can tell", value.len()).into()
                );
            }
            Some(value) => Some(Arc::new(serde_json::from_slice(value)?)),
        };
        Ok(Effect::Wanted)
    }
}

struct Notes(Arc<Mutex<BTreeMap<String, Arc<Told>>>>);

impl Notes {
    /// One that can be shown, and under what name.
    fn read(id: &Id, heard: &Heard) -> Option<(String, Arc<Told>)> {
        let name = str::from_utf8(id.as_bytes()).ok()?;
        parts(name)?;
        Some((name.to_owned(), Arc::clone(heard.0.as_ref()?)))
    }
}

impl Reconcile for Notes {
    type State = Heard;

    async fn rebuild(&self, wanted: &Wanted<Heard>) -> Result<(), BoxError> {
        let all = wanted.iter().filter_map(|(id, heard)| Self::read(id, heard)).take(SHOWN);
        *self.0.lock() = all.collect();
        Ok(())
    }

    async fn reconcile(&self, id: &Id, heard: Option<&Heard>) -> Result<Next, BoxError> {
        let found = heard.and_then(|heard| Self::read(id, heard));
        let mut told = self.0.lock();
        match found {
            Some((name, now)) if told.len() < SHOWN || told.contains_key(&name) => {
                told.insert(name, now);
            }
            Some(_) => {}
            None => {
                str::from_utf8(id.as_bytes()).ok().and_then(|name| told.remove(name));
            }
        }
        Ok(Next::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_name_has_a_name_and_a_process() {
        for (full, expected) in [
            ("rooms@host-1", Some(("rooms", "host-1"))),
            ("a@b@host-1", Some(("a@b", "host-1"))),
            ("rooms", None),
            ("@host-1", None),
            ("rooms@", None),
            ("", None),
        ] {
            assert_eq!(parts(full), expected, "{full:?}");
        }
    }
}
