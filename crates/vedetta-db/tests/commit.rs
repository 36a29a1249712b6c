//! What a write is promised: its own fate, a shared commit, and the truth.

mod support;

use std::sync::{Arc, Mutex, mpsc};

use support::{Reason, aside, close, hold, insert, line_up, numbers, open, options, soon, write};
use vedetta_db::rusqlite::Connection;
use vedetta_db::{CommitError, Db, Mirror, Purpose, Rows, Stop, Tx, WriteError};

/// Writes down what it hears.
#[derive(Clone, Default)]
struct Diary(Arc<Mutex<Vec<&'static str>>>);

impl Diary {
    fn read(&self) -> Vec<&'static str> {
        self.0.lock().unwrap().clone()
    }

    fn note(&self, word: &'static str) {
        self.0.lock().unwrap().push(word);
    }
}

impl Mirror for Diary {
    fn seal(&self) -> Rows {
        self.note("seal");
        Rows::none()
    }
    fn keep(&self) {
        self.note("keep");
    }
    fn undo(&self) {
        self.note("undo");
    }
    fn publish(&self) {
        self.note("publish");
    }
    fn discard(&self) {
        self.note("discard");
    }
}

async fn attach(db: &Db) -> Diary {
    let (diary, db) = (Diary::default(), db.clone());
    let mirror = Box::new(diary.clone());
    aside(move || db.attach(mirror)).await.unwrap();
    diary
}

/// Writes a number and then thinks better of it.
async fn refuse(db: Db, n: i64) -> Result<i64, WriteError<Reason>> {
    db.write(Purpose::Store, move |connection| {
        insert(connection, n)?;
        Err(Stop::Refused("changed my mind"))
    })
    .await
}

/// Writes a number and then panics.
async fn panics(db: Db, n: i64) -> Result<i64, WriteError<Reason>> {
    db.write(Purpose::Store, move |connection| {
        insert(connection, n)?;
        panic!("this panic is part of the test")
    })
    .await
}

/// Writes what makes the commit fail: a promise that nobody keeps.
async fn spoil(db: Db) -> Result<i64, WriteError<Reason>> {
    db.write(Purpose::Store, |connection| {
        connection.execute("INSERT INTO promise VALUES (-1)", [])?;
        Ok(-1)
    })
    .await
}

#[tokio::test]
async fn a_failing_write_is_undone_alone_while_the_others_of_its_commit_stand() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    let diary = attach(&db).await;
    let busy = hold(&db).await;
    let first = line_up(write(db.clone(), 1)).await;
    let refused = line_up(refuse(db.clone(), 2)).await;
    let second = line_up(write(db.clone(), 3)).await;
    let broken = line_up(write(db.clone(), 1)).await; // a number that is there already
    let third = line_up(write(db.clone(), 4)).await;
    drop(busy);
    assert_eq!(soon(first).await.unwrap(), 1);
    assert!(matches!(soon(refused).await, Err(WriteError::Refused("changed my mind"))));
    assert_eq!(soon(second).await.unwrap(), 3);
    assert!(matches!(soon(broken).await, Err(WriteError::Lost(CommitError::Failed(_)))));
    assert_eq!(soon(third).await.unwrap(), 4);
    assert_eq!(numbers(&db).await, [1, 3, 4]);
    let held = "undo"; // the write that kept the writer busy
    assert_eq!(diary.read(), [held, "keep", "undo", "keep", "undo", "keep", "seal", "publish"]);
    close(&db).await;
}

#[tokio::test]
async fn a_panicking_write_is_undone_alone_and_the_writer_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    let diary = attach(&db).await;
    let busy = hold(&db).await;
    let first = line_up(write(db.clone(), 1)).await;
    let panicked = line_up(panics(db.clone(), 2)).await;
    let second = line_up(write(db.clone(), 3)).await;
    drop(busy);
    assert_eq!(soon(first).await.unwrap(), 1);
    assert!(matches!(soon(panicked).await, Err(WriteError::Lost(CommitError::Panicked))));
    assert_eq!(soon(second).await.unwrap(), 3);
    assert_eq!(diary.read(), ["undo", "keep", "undo", "keep", "seal", "publish"]);
    assert!(soon(panics(db.clone(), 4)).await.is_err(), "alone in its commit");
    // It leaves no transaction open: somebody else may write.
    let other = Connection::open(db.file()).unwrap();
    other.execute("INSERT INTO number VALUES (5)", []).unwrap();
    assert_eq!(soon(write(db.clone(), 2)).await.unwrap(), 2);
    assert_eq!(numbers(&db).await, [1, 2, 3, 5]);
    close(&db).await;
}

#[tokio::test]
async fn a_failing_commit_fails_everyone_in_it_and_stores_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    let diary = attach(&db).await;
    let busy = hold(&db).await;
    let first = line_up(write(db.clone(), 1)).await;
    let spoiled = line_up(spoil(db.clone())).await;
    let refused = line_up(refuse(db.clone(), 2)).await;
    let second = line_up(write(db.clone(), 3)).await;
    drop(busy);
    // A refusal is lost, too: it may rest on a write that is.
    for lost in [first, spoiled, second, refused] {
        assert!(matches!(soon(lost).await, Err(WriteError::Lost(CommitError::Failed(_)))));
    }
    assert_eq!(numbers(&db).await, [0; 0]);
    assert_eq!(diary.read(), ["undo", "keep", "keep", "undo", "keep", "seal", "discard"]);
    assert_eq!(soon(write(db.clone(), 1)).await.unwrap(), 1, "the next one is not concerned");
    assert_eq!(numbers(&db).await, [1]);
    close(&db).await;
}

#[tokio::test]
async fn nobody_is_answered_before_the_mirrors_have_published() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    let diary = attach(&db).await;
    let mut writers = tokio::task::JoinSet::new();
    for n in 0..50 {
        let (db, diary) = (db.clone(), diary.clone());
        writers.spawn(async move {
            write(db, n).await.unwrap();
            diary.note("answer");
        });
    }
    while let Some(done) = soon(writers.join_next()).await {
        done.unwrap();
    }
    let (mut kept, mut published, mut answered) = (0, 0, 0);
    for word in diary.read() {
        match word {
            "keep" => kept += 1,
            "seal" => {}
            "publish" => published = kept,
            "answer" => answered += 1,
            other => panic!("{other}"),
        }
        // Each answer is to a write of its own, which must have been published by then.
        assert!(answered <= published, "{answered} answers, {published} published");
    }
    assert_eq!((kept, published, answered), (50, 50, 50));
    close(&db).await;
}

#[tokio::test]
async fn a_commit_is_shared_by_no_more_than_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(folder.path());
    options.batch = 2;
    let db = Db::open(&options, &[support::NUMBERS]).unwrap();
    let diary = attach(&db).await;
    let busy = hold(&db).await;
    let mut asked = Vec::new();
    for n in 0..5 {
        asked.push(line_up(write(db.clone(), n)).await);
    }
    drop(busy);
    for asked in asked {
        soon(asked).await.unwrap();
    }
    // A batch may be published while the next is under way.
    let (published, rest): (Vec<_>, Vec<_>) =
        diary.read().into_iter().partition(|entry| *entry == "publish");
    let expected = ["undo", "keep", "keep", "seal", "keep", "keep", "seal", "keep", "seal"];
    assert_eq!(rest, expected);
    assert_eq!(published.len(), 3);
    close(&db).await;
}

/// Writes a number, if there is one, without need to have it on the disk.
async fn write_lazily(db: Db, n: Option<i64>) -> Result<(), WriteError<Reason>> {
    db.write_lazily(Purpose::Store, move |connection| {
        let found = connection.query_row("SELECT count(*) FROM number", [], |_| Ok(()));
        Ok(n.map_or(found, |n| insert(connection, n))?)
    })
    .await
}

#[tokio::test]
async fn a_lazy_write_shares_the_commit_of_others() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    let diary = attach(&db).await;
    let busy = hold(&db).await;
    let first = line_up(write_lazily(db.clone(), Some(1))).await;
    let second = line_up(write(db.clone(), 2)).await;
    let third = line_up(write_lazily(db.clone(), Some(3))).await;
    drop(busy);
    soon(first).await.unwrap();
    soon(second).await.unwrap();
    soon(third).await.unwrap();
    assert_eq!(diary.read(), ["undo", "keep", "keep", "keep", "seal", "publish"]);
    close(&db).await;
}

#[tokio::test]
async fn a_lazy_write_can_be_read_at_once_and_is_there_after_closing() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    let diary = attach(&db).await;
    for n in 1..=3 {
        soon(write_lazily(db.clone(), Some(n))).await.unwrap();
        assert_eq!(numbers(&db).await, (1..=n).collect::<Vec<_>>());
    }
    soon(write(db.clone(), 4)).await.unwrap();
    soon(write_lazily(db.clone(), Some(5))).await.unwrap();
    soon(write_lazily(db.clone(), Some(6))).await.unwrap();
    assert_eq!(diary.read(), ["keep", "seal", "publish"].repeat(6));
    close(&db).await;

    let again = open(folder.path());
    assert_eq!(numbers(&again).await, [1, 2, 3, 4, 5, 6]);
    close(&again).await;
}

/// Somebody may ask again and again whether there is something to do.
#[tokio::test]
async fn a_lazy_write_that_changes_nothing_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    soon(write_lazily(db.clone(), Some(1))).await.unwrap();
    let log = || std::fs::metadata(folder.path().join("test.db-wal")).unwrap().len();
    let before = log();
    for _ in 0..10 {
        soon(write_lazily(db.clone(), None)).await.unwrap();
    }
    assert_eq!(log(), before);
    soon(write_lazily(db.clone(), Some(2))).await.unwrap();
    assert!(log() > before);
    close(&db).await;
}

#[tokio::test]
async fn when_the_line_is_full_writes_wait_to_get_into_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(folder.path());
    options.queue = 2;
    let db = Db::open(&options, &[support::NUMBERS]).unwrap();
    let busy = hold(&db).await;
    let first = line_up(write(db.clone(), 1)).await;
    let second = line_up(write(db.clone(), 2)).await;
    let outside = line_up(write(db.clone(), 3)).await;
    let waiting = line_up(write(db.clone(), 4)).await;
    // Given up, the one in line is written all the same; the one outside never was in it.
    drop((second, outside));
    drop(busy);
    assert_eq!(soon(first).await.unwrap(), 1);
    assert_eq!(soon(waiting).await.unwrap(), 4);
    assert_eq!(numbers(&db).await, [1, 2, 4]);
    close(&db).await;
}

#[tokio::test]
async fn a_read_sees_the_last_commit_and_waits_for_no_write() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    write(db.clone(), 1).await.unwrap();
    let (started, has_started) = tokio::sync::oneshot::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let writing = db.clone();
    let second = tokio::spawn(async move {
        let work = move |connection: &Tx<'_>| {
            insert(connection, 2)?;
            let _ = started.send(());
            let _ = released.recv();
            Ok::<_, Stop<Reason>>(())
        };
        writing.write(Purpose::Store, work).await
    });
    soon(has_started).await.unwrap();
    assert_eq!(numbers(&db).await, [1], "written, not committed");
    drop(release);
    soon(second).await.unwrap().unwrap();
    assert_eq!(numbers(&db).await, [1, 2], "answered, so committed");
    close(&db).await;
}

#[tokio::test]
async fn a_read_sees_one_state_from_its_beginning_to_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    let (started, has_started) = tokio::sync::oneshot::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let reading = db.clone();
    let counted = tokio::spawn(async move {
        reading
            .read(move |connection| {
                let count = || {
                    connection
                        .query_row("SELECT count(*) FROM number", [], |row| row.get::<_, i64>(0))
                };
                let before = count()?;
                let _ = started.send(());
                let _ = released.recv();
                Ok((before, count()?))
            })
            .await
    });
    soon(has_started).await.unwrap();
    write(db.clone(), 1).await.unwrap();
    drop(release);
    assert_eq!(soon(counted).await.unwrap().unwrap(), (0, 0));
    assert_eq!(numbers(&db).await, [1]);
    close(&db).await;
}

#[tokio::test]
async fn a_reader_that_panics_gives_its_connection_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(folder.path());
    options.readers = 1;
    let db = Db::open(&options, &[support::NUMBERS]).unwrap();
    write(db.clone(), 1).await.unwrap();
    let reading = db.clone();
    let panicked = tokio::spawn(async move {
        reading.read(|_| -> vedetta_db::rusqlite::Result<()> { panic!("part of the test") }).await
    });
    assert!(soon(panicked).await.is_err());
    assert_eq!(numbers(&db).await, [1]);
    close(&db).await;
}

#[tokio::test]
async fn closing_writes_what_is_in_line_and_answers_closed_from_then_on() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    let busy = hold(&db).await;
    let mut asked = Vec::new();
    for n in 0..3 {
        asked.push(line_up(write(db.clone(), n)).await);
    }
    let closing = db.clone();
    let closed = tokio::task::spawn_blocking(move || closing.close_blocking());
    drop(busy);
    for (n, asked) in (0..).zip(asked) {
        assert_eq!(soon(asked).await.unwrap(), n);
    }
    soon(closed).await.unwrap();
    close(&db).await; // once more does nothing
    assert!(matches!(soon(write(db.clone(), 9)).await, Err(WriteError::Lost(CommitError::Closed))));
    let refused = aside({
        let db = db.clone();
        move || db.write_blocking(Purpose::Reclaim, |_| Ok::<_, Stop<Reason>>(()))
    });
    assert!(matches!(refused.await, Err(WriteError::Lost(CommitError::Closed))));

    let again = open(folder.path());
    assert_eq!(numbers(&again).await, [0, 1, 2]);
    close(&again).await;
}

#[tokio::test]
async fn pages_that_were_freed_do_not_count_as_used() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    write(db.clone(), 0).await.unwrap();
    let reclaim = |sql: &'static str| {
        let work = move |connection: &Tx<'_>| {
            connection.execute_batch(sql)?;
            Ok::<_, Stop<Reason>>(())
        };
        db.write(Purpose::Reclaim, work)
    };
    reclaim("CREATE TABLE large (body BLOB)").await.unwrap();
    let empty = db.size();
    reclaim("INSERT INTO large VALUES (zeroblob(1000000))").await.unwrap();
    let full = db.size();
    assert!(full > empty + 900_000, "{empty} {full}");
    reclaim("DELETE FROM large").await.unwrap();
    assert_eq!(db.size(), empty);
    close(&db).await;
}

/// Its commits wait to be let on, and fail when told so.
struct Weir {
    sealed: mpsc::Sender<()>,
    verdicts: Arc<Mutex<mpsc::Receiver<bool>>>,
}

impl Mirror for Weir {
    fn keep(&self) {}
    fn undo(&self) {}
    fn seal(&self) -> Rows {
        let (sealed, verdicts) = (self.sealed.clone(), Arc::clone(&self.verdicts));
        Rows::new(0, 0, move |_| {
            let _ = sealed.send(());
            match verdicts.lock().unwrap().recv() {
                Ok(false) => Err(vedetta_db::rusqlite::Error::InvalidQuery),
                _ => Ok(()),
            }
        })
    }
    fn publish(&self) {}
    fn discard(&self) {}
}

#[tokio::test]
async fn what_ran_while_the_commit_before_it_failed_is_lost_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    let (sealed, is_sealed) = mpsc::channel();
    let (verdict, verdicts) = mpsc::channel();
    let weir = Weir { sealed, verdicts: Arc::new(Mutex::new(verdicts)) };
    let attaching = db.clone();
    aside(move || attaching.attach(Box::new(weir))).await.unwrap();

    // After a few nothing runs until they are committed.
    let busy = hold(&db).await;
    let mut lost = Vec::new();
    for n in 10..20 {
        lost.push(line_up(write(db.clone(), n)).await);
    }
    drop(busy);
    let is_sealed = aside(move || is_sealed.recv().map(|()| is_sealed)).await.unwrap();
    // They are being committed. The next runs meanwhile, as it wants nothing of the file.
    let (ran, has_run) = mpsc::channel();
    let preparing = db.clone();
    let prepare = move |_: &Tx<'_>| {
        ran.send(()).unwrap();
        Ok::<_, Stop<Reason>>(2)
    };
    lost.push(line_up(async move { preparing.write(Purpose::Store, prepare).await }).await);
    aside(move || has_run.recv()).await.unwrap();
    verdict.send(false).unwrap();
    for lost in lost {
        let lost = soon(lost).await;
        assert!(matches!(lost, Err(WriteError::Lost(CommitError::Failed(_)))), "{lost:?}");
    }

    let third = line_up(write(db.clone(), 3)).await;
    aside(move || is_sealed.recv()).await.unwrap();
    verdict.send(true).unwrap();
    assert_eq!(soon(third).await.unwrap(), 3);
    assert_eq!(numbers(&db).await, [3]);
    drop(verdict);
    close(&db).await;
}
