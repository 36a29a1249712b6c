//! What the stories have in common.
#![allow(dead_code, reason = "each story uses its share")]

use std::future::{Future, poll_fn};
use std::path::Path;
use std::pin::Pin;
use std::sync::mpsc;
use std::task::Poll;
use std::time::Duration;

use vedetta_db::rusqlite::{self, Connection};
use vedetta_db::{Db, Options, Purpose, Schema, Stop, WriteError};

/// A table of numbers, and one whose promise is looked at only when it is committed.
pub(crate) const NUMBERS: Schema = Schema {
    component: "numbers",
    steps: &["CREATE TABLE number (n INTEGER PRIMARY KEY) STRICT;
              CREATE TABLE promise (n INTEGER REFERENCES number (n) DEFERRABLE INITIALLY DEFERRED) STRICT;"],
};

/// What a closure gives as its reason.
pub(crate) type Reason = &'static str;

pub(crate) fn options(folder: &Path) -> Options {
    let mut options = Options::new(folder.join("test.db"));
    options.ballast = 0;
    options
}

pub(crate) fn open(folder: &Path) -> Db {
    Db::open(&options(folder), &[NUMBERS]).unwrap()
}

/// Fails instead of hanging.
pub(crate) async fn soon<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), work).await.expect("it hangs")
}

/// Runs what blocks on a thread of its own.
pub(crate) async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    soon(tokio::task::spawn_blocking(work)).await.unwrap()
}

pub(crate) async fn close(db: &Db) {
    let db = db.clone();
    aside(move || db.close_blocking()).await;
}

pub(crate) fn insert(connection: &Connection, n: i64) -> rusqlite::Result<()> {
    connection.execute("INSERT INTO number VALUES (?1)", [n]).map(drop)
}

/// Writes a number.
pub(crate) async fn write(db: Db, n: i64) -> Result<i64, WriteError<Reason>> {
    db.write(Purpose::Store, move |connection| {
        insert(connection, n)?;
        Ok(n)
    })
    .await
}

/// The numbers stored.
pub(crate) async fn numbers(db: &Db) -> Vec<i64> {
    soon(db.read(|connection| {
        let mut select = connection.prepare("SELECT n FROM number ORDER BY n")?;
        select.query_map([], |row| row.get(0))?.collect()
    }))
    .await
    .unwrap()
}

/// Keeps the writer busy until dropped.
pub(crate) struct Hold {
    _release: mpsc::Sender<()>,
}

/// The writes asked for while it holds wait, and then share a commit.
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

/// Asks without waiting for the answer.
pub(crate) async fn line_up<T>(request: impl Future<Output = T> + Send + 'static) -> Asked<T> {
    let mut asked: Asked<T> = Box::pin(request);
    let first = poll_fn(|context| Poll::Ready(asked.as_mut().poll(context))).await;
    assert!(first.is_pending(), "it was to wait in line");
    asked
}
