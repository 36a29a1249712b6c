//! A thread that only waits for its own writes may do them.

mod support;

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::thread::ThreadId;

use support::{Reason, close, hold, insert, numbers, open, soon, write};
use vedetta_db::{CommitError, Db, Mirror, Purpose, Rows, WriteError};

/// What a write came to, and on which thread it was done.
type Done = Result<ThreadId, WriteError<Reason>>;

/// Asks for a write in a round, as a connection does that has one call; also tells whether it helped, and where.
async fn in_a_round(db: &Db, n: i64) -> (Done, bool, ThreadId) {
    let asked = db.write(Purpose::Store, move |connection| {
        insert(connection, n)?;
        Ok(std::thread::current().id())
    });
    let mut asked = pin!(asked);
    let (mut helped, mut here) = (false, std::thread::current().id());
    let done = poll_fn(|cx| {
        let round = db.round();
        loop {
            if let Poll::Ready(done) = asked.as_mut().poll(cx) {
                return Poll::Ready(done);
            }
            if !round.help() {
                return Poll::Pending;
            }
            (helped, here) = (true, std::thread::current().id());
        }
    });
    (soon(done).await, helped, here)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lone_write_is_done_by_who_waits_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    // A runtime's own thread: the one that a test blocks is none.
    let task = db.clone();
    let writing = tokio::spawn(async move {
        let (mut n, mut times) = (0, 0);
        while times < 10 {
            let (done, helped, here) = in_a_round(&task, n).await;
            // Some may come while the writers are still on their way to their beds.
            let is_done_here = done.unwrap() == here;
            assert!(helped || !is_done_here, "{n}");
            (n, times) = (n + 1, times + i32::from(is_done_here));
        }
        n
    });
    let count = soon(writing).await.unwrap();
    assert_eq!(numbers(&db).await, (0..count).collect::<Vec<_>>());
    close(&db).await;
    assert!(matches!(in_a_round(&db, -1).await.0, Err(WriteError::Lost(CommitError::Closed))));
}

#[tokio::test]
async fn without_another_thread_for_its_tasks_a_runtime_lets_the_writers_do_it() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    let (done, helped, _) = in_a_round(&db, 1).await;
    assert!(!helped && done.unwrap() != std::thread::current().id());
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_of_a_round_that_ends_without_help_are_done_by_the_writers() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    let mut asked: Vec<_> = (0..3).map(|n| Box::pin(write(db.clone(), n))).collect();
    poll_fn(|cx| {
        let _round = db.round();
        for asked in &mut asked {
            assert!(asked.as_mut().poll(cx).is_pending(), "they only gather");
        }
        Poll::Ready(())
    })
    .await;
    for (n, asked) in (0..).zip(asked) {
        assert_eq!(soon(asked).await.unwrap(), n);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_comes_while_others_write_leaves_it_to_them() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    let held = hold(&db).await;
    let mut writing = std::pin::pin!(in_a_round(&db, 1));
    tokio::select! {
        biased;
        _ = &mut writing => panic!("somebody else has the desk"),
        () = std::future::ready(()) => {}
    }
    drop(held);
    let (done, helped, _) = writing.await;
    assert!(!helped);
    done.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_many_who_help_and_many_who_do_not_everybody_is_answered() {
    const EACH: i64 = 300;
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..8 {
        let db = db.clone();
        tasks.spawn(async move {
            for n in task * EACH..(task + 1) * EACH {
                match task % 2 {
                    0 => drop(in_a_round(&db, n).await.0.unwrap()),
                    _ => drop(soon(write(db.clone(), n)).await.unwrap()),
                }
                // Now one writes, and now many.
                if n % 7 == task % 7 {
                    tokio::time::sleep(std::time::Duration::from_millis(2)).await;
                }
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    assert_eq!(numbers(&db).await, (0..8 * EACH).collect::<Vec<_>>());
}

/// Has whoever commits die once it is told to.
struct Deadly(Arc<AtomicBool>);

impl Mirror for Deadly {
    fn keep(&self) {}
    fn undo(&self) {}
    fn seal(&self) -> Rows {
        Rows::none()
    }
    fn publish(&self) {
        assert!(!self.0.load(Ordering::Relaxed), "planted: whoever commits dies");
    }
    fn discard(&self) {}
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_dies_on_who_helped_halts_the_writing_for_all() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    let deadly = Arc::new(AtomicBool::new(false));
    let (mirror, attached) = (Box::new(Deadly(Arc::clone(&deadly))), db.clone());
    support::aside(move || attached.attach(mirror)).await.unwrap();
    in_a_round(&db, 1).await.0.unwrap();
    deadly.store(true, Ordering::Relaxed);
    in_a_round(&db, 2).await.0.unwrap_err();
    for _ in 0..3 {
        let halted = in_a_round(&db, 3).await.0;
        assert!(matches!(halted, Err(WriteError::Lost(CommitError::Halted))), "{halted:?}");
        let halted = soon(write(db.clone(), 3)).await;
        assert!(matches!(halted, Err(WriteError::Lost(CommitError::Halted))), "{halted:?}");
    }
    close(&db).await;
}
