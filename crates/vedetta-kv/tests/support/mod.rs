//! What the stories have in common.
#![allow(dead_code, reason = "each story uses its share")]

use std::future::{Future, poll_fn};
use std::path::Path;
use std::pin::Pin;
use std::sync::mpsc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use vedetta_core::{KeyRange, Revision};
use vedetta_db::{Db, Purpose, Stop};
use vedetta_kv::{Change, Event, KvError, Options, Put, Range, SCHEMA, Store, Watcher};

/// What takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn open_db(folder: &Path) -> Db {
    let mut options = vedetta_db::Options::new(folder.join("vedetta.db"));
    options.ballast = 0;
    Db::open(&options, &[SCHEMA]).unwrap()
}

pub(crate) async fn open(folder: &Path) -> Store {
    Store::open(open_db(folder), Options::default()).await.unwrap()
}

pub(crate) async fn reopen(store: &Store, folder: &Path) -> Store {
    store.close().await;
    open(folder).await
}

pub(crate) async fn put(store: &Store, key: impl Into<Bytes>, value: impl Into<Bytes>) -> Revision {
    store.put(Put::new(key, value)).await.unwrap().revision
}

/// The value a key has.
pub(crate) async fn get(store: &Store, key: &str) -> Option<Bytes> {
    let found = store.range(Range::new(one(key))).await.unwrap();
    found.keys.first().map(|key| Bytes::copy_from_slice(key.value()))
}

/// The value a key had.
pub(crate) async fn get_at(store: &Store, key: &str, at: u64) -> Result<Option<Bytes>, KvError> {
    let found = store.range(Range { at: Some(Revision(at)), ..Range::new(one(key)) }).await?;
    Ok(found.keys.first().map(|key| Bytes::copy_from_slice(key.value())))
}

pub(crate) fn one(key: &str) -> KeyRange {
    KeyRange::One(Bytes::copy_from_slice(key.as_bytes()))
}

/// Fails instead of hanging.
pub(crate) async fn soon<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.expect("it hangs")
}

/// The next events of a watcher, at least so many.
pub(crate) async fn take(watcher: &mut Watcher, least: usize) -> Vec<Event> {
    let mut events = Vec::new();
    while events.len() < least {
        events.extend(soon(watcher.next()).await.unwrap().iter().cloned());
    }
    events
}

/// Whether nothing comes from a watcher until it has passed `revision`.
pub(crate) async fn is_quiet(watcher: &mut Watcher, revision: Revision) -> bool {
    let passed = async {
        let mut moment = Duration::ZERO;
        loop {
            let progress = watcher.progress();
            if tokio::time::timeout(moment, watcher.next()).await.is_ok() {
                return false;
            }
            if progress >= revision {
                return true;
            }
            moment = moment * 2 + Duration::from_micros(100);
        }
    };
    soon(passed).await
}

/// `key=value` for a put, `-key` for a delete.
pub(crate) fn told(event: &Event) -> String {
    let lossy = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match &event.change {
        Change::Put(now) => format!("{}={}", lossy(now.key()), lossy(now.value())),
        Change::Delete { key, .. } => format!("-{}", lossy(key)),
    }
}

pub(crate) fn story(events: &[Event]) -> Vec<String> {
    events.iter().map(told).collect()
}

/// Keeps the writer busy until dropped; what is asked of it meanwhile waits and shares a commit.
pub(crate) struct Hold {
    _release: mpsc::Sender<()>,
}

pub(crate) async fn hold(db: &Db) -> Hold {
    let (started, has_started) = tokio::sync::oneshot::channel();
    let (release, released) = mpsc::channel();
    let db = db.clone();
    tokio::spawn(async move {
        db.write(Purpose::Store, move |_| {
            let _ = started.send(());
            let _ = released.recv();
            Err::<(), _>(Stop::Refused(()))
        })
        .await
    });
    soon(has_started).await.unwrap();
    Hold { _release: release }
}

/// Something asked for, whose answer is awaited later.
pub(crate) type Asked<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Puts a request in line without waiting for its answer.
pub(crate) async fn line_up<T>(request: impl Future<Output = T> + Send + 'static) -> Asked<T> {
    let mut asked: Asked<T> = Box::pin(request);
    let first = poll_fn(|context| Poll::Ready(asked.as_mut().poll(context))).await;
    assert!(first.is_pending(), "it was to wait in line");
    asked
}
