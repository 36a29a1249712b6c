//! Jobs in the embedded SQLite file.

#[macro_use]
mod suite;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use suite::{ALL, Ask as _, AskLedger as _, HOUR, SHORT, World, again, eventually, lapse};
use tempfile::TempDir;
use tokio::sync::Notify;
use vedetta_core::JobState::{Done, Running, Waiting};
use vedetta_core::queue::{Kept, Settled, Woken};
use vedetta_db::rusqlite::Connection;
use vedetta_db::{Db, Options, Purpose, Schema, Stop, WriteError};
use vedetta_jobs::sqlite::{SCHEMA, SqliteJobs};
use vedetta_jobs::{
    Claim, DEFAULT_QUEUE, Ear, Enqueued, Fate, Filter, Jobs, JobsError, NewJob, Note, Taken,
    Wanted, Work, Worker,
};

jobs_suite!(crate::Sqlite);
ledger_suite!(crate::Sqlite);

/// A table of somebody else in the same file.
const SHOP: Schema =
    Schema { component: "shop", steps: &["CREATE TABLE parcel (id INTEGER) STRICT"] };

struct Sqlite {
    folder: Arc<TempDir>,
    db: Db,
    jobs: Arc<SqliteJobs>,
}

impl Sqlite {
    async fn open(folder: Arc<TempDir>) -> Self {
        let mut options = Options::new(folder.path().join("jobs.db"));
        options.ballast = 0;
        let db = Db::open(&options, &[SCHEMA, SHOP]).unwrap();
        let jobs = Arc::new(SqliteJobs::open(db.clone()).await.unwrap());
        Self { folder, db, jobs }
    }

    /// Writes a parcel, and what else is to be written with it.
    async fn write<T: Send + 'static>(
        &self,
        also: impl FnOnce(&Connection, &SqliteJobs) -> Result<T, JobsError> + Send + 'static,
    ) -> Result<T, WriteError<JobsError>> {
        let jobs = Arc::clone(&self.jobs);
        let write = move |tx: &vedetta_db::Tx<'_>| {
            tx.execute("INSERT INTO parcel VALUES (1)", []).map_err(Stop::Sql)?;
            also(tx, &jobs).map_err(Stop::Refused)
        };
        self.db.write(Purpose::Store, write).await
    }

    async fn parcels(&self) -> i64 {
        let count =
            |db: &Connection| db.query_row("SELECT count(*) FROM parcel", [], |row| row.get(0));
        self.db.read(count).await.unwrap()
    }
}

impl World for Sqlite {
    type Jobs = SqliteJobs;

    async fn new() -> Self {
        Self::open(Arc::new(TempDir::new().unwrap())).await
    }

    async fn neighbour(&self) -> Self {
        // One process has the file.
        let (folder, db, jobs) =
            (Arc::clone(&self.folder), self.db.clone(), Arc::clone(&self.jobs));
        Self { folder, db, jobs }
    }

    async fn reopened(self) -> Self {
        let Self { folder, db, jobs } = self;
        drop(jobs);
        tokio::task::spawn_blocking(move || db.close_blocking()).await.unwrap();
        Self::open(folder).await
    }

    fn jobs(&self) -> &Arc<SqliteJobs> {
        &self.jobs
    }
}

fn changed_my_mind<T>(_: T) -> Result<(), JobsError> {
    Err(JobsError::Invalid("I changed my mind".into()))
}

#[tokio::test]
async fn jobs_are_taken_on_with_what_else_is_written_or_not_at_all() {
    let world = Sqlite::new().await;
    let jobs = [NewJob::new("pack").unique("order-7"), NewJob::new("ship").queue("new")];
    let ear = world.falls_silent().await;
    let enqueue = {
        let jobs = jobs.clone();
        move |tx: &Connection, desk: &SqliteJobs| desk.enqueue_in(tx, &jobs)
    };
    let refuse = enqueue.clone();
    let refused = world.write(move |tx, desk| refuse(tx, desk).and_then(changed_my_mind)).await;
    assert!(matches!(refused, Err(WriteError::Refused(_))));
    assert!(world.all(&Filter::default()).await.is_empty());
    world.rests().await;

    let (enqueued, ()) = tokio::join!(world.write(enqueue), world.wakes(&ear, Woken::More));
    let enqueued: Vec<Enqueued> = enqueued.unwrap();
    assert!(enqueued.iter().all(|enqueued| enqueued.is_new), "the key was left to nobody");
    assert_eq!(world.parcels().await, 1);
    assert_eq!(world.take_one().await.claim.id, enqueued[0].id);
    let invalid = world.write(|tx, desk| desk.enqueue_in(tx, &[NewJob::new("")])).await;
    assert!(matches!(invalid, Err(WriteError::Refused(JobsError::Invalid(_)))));
    assert_eq!(world.parcels().await, 1);
}

#[tokio::test]
async fn a_job_is_done_with_what_it_wrote_or_not_at_all() {
    let world = Sqlite::new().await;
    let done =
        |claim: Claim| move |tx: &Connection, desk: &SqliteJobs| desk.done_in(tx, claim, None);
    let id = world.add_many(1).await[0];
    let claim = world.comes(HOUR).await.claim;
    let undone = done(claim);
    let refused = world.write(move |tx, desk| undone(tx, desk).and_then(changed_my_mind)).await;
    assert!(matches!(refused, Err(WriteError::Refused(_))));
    assert_eq!(world.state(id).await, Running);
    assert!(world.write(done(claim)).await.unwrap());
    assert_eq!((world.state(id).await, world.parcels().await), (Done, 1));
    assert!(!world.write(done(claim)).await.unwrap(), "its parcel would be there twice");

    let id = world.add_many(1).await[0];
    let late = world.comes(SHORT).await.claim;
    lapse(SHORT).await;
    assert!(!world.write(done(late)).await.unwrap(), "its lease is over");
    let claim = world.comes(HOUR).await.claim;
    assert!(!world.write(done(late)).await.unwrap(), "another has it");
    let settled = world.settle(claim, again(HOUR)).await;
    assert_eq!(settled, Settled::Again(HOUR));
    assert_eq!(world.state(id).await, Waiting);
    assert!(world.take(ALL).await.is_empty());
}

#[tokio::test]
async fn what_was_handed_out_and_given_back_again_and_again_waits_after_a_restart() {
    let world = Sqlite::new().await;
    let id = world.add_many(1).await[0];
    // What it was handed out with runs on each time, so that all these takes are still known.
    for _ in 0..50 {
        world.add_many(1).await;
        let given = world.take(ALL).await;
        assert_eq!((given.len(), given[0].claim.id), (2, id));
        world.settle(given[0].claim, Fate::Released).await;
        lapse(Duration::ZERO).await;
    }
    let world = world.reopened().await;
    let given = world.take_one().await;
    assert_eq!((given.claim.id, given.attempt), (id, 1));
}

#[tokio::test]
async fn a_file_from_before_jobs_had_traces_goes_on_as_it_was() {
    let folder = Arc::new(TempDir::new().unwrap());
    let before = Schema { steps: &SCHEMA.steps[..1], ..SCHEMA };
    let file = folder.path().join("jobs.db");
    let mut options = Options::new(&file);
    options.ballast = 0;
    let db = Db::open(&options, &[before, SHOP]).unwrap();
    tokio::task::spawn_blocking(move || db.close_blocking()).await.unwrap();
    let old = "INSERT INTO job_queue (name) VALUES ('default');
               INSERT INTO job (id, queue, kind, cost, priority, max_attempts, run_at, queued_at,
                                updated_at, payload)
               VALUES (7, 1, 'pack', 1, 0, 5, 0, 0, 0, 'null')";
    Connection::open(file).unwrap().execute_batch(old).unwrap();
    let world = Sqlite::open(folder).await;
    let given = world.take_one().await;
    assert_eq!((given.claim.id.0, given.trace), (7, None));
    world.finish(given.claim).await;
    assert_eq!(world.job(given.claim.id).await.trace, None);
}

/// Jobs whose notes take their time, and what came before them that should not have.
struct Slow {
    jobs: Arc<SqliteJobs>,
    /// A note is on its way.
    telling: AtomicBool,
    told: Notify,
    ended: Notify,
    overtaken: AtomicBool,
}

#[async_trait]
impl Jobs for Slow {
    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, JobsError> {
        self.jobs.enqueue(jobs).await
    }

    async fn take(&self, wanted: &Wanted<'_>) -> Result<Taken, JobsError> {
        self.jobs.take(wanted).await
    }

    async fn keep(&self, held: &[(Claim, Note)]) -> Result<Vec<Kept>, JobsError> {
        if held.iter().any(|(_, note)| !note.log.is_empty()) {
            self.telling.store(true, Ordering::SeqCst);
            self.told.notify_one();
            self.ended.notified().await;
            // On the one thread there is whoever would not wait has had its turn by then.
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
        }
        let kept = self.jobs.keep(held).await;
        self.telling.store(false, Ordering::SeqCst);
        kept
    }

    async fn settle(&self, ended: &[(Claim, Fate)]) -> Result<Vec<Settled>, JobsError> {
        self.overtaken.fetch_or(self.telling.load(Ordering::SeqCst), Ordering::SeqCst);
        self.jobs.settle(ended).await
    }

    async fn woken(&self, queue: &str, ear: &Ear) -> Woken {
        self.jobs.woken(queue, ear).await
    }
}

#[tokio::test]
async fn what_a_job_said_is_there_before_its_end_also_if_it_ends_meanwhile() {
    let world = Sqlite::new().await;
    let slow = Arc::new(Slow {
        jobs: Arc::clone(&world.jobs),
        telling: AtomicBool::new(false),
        told: Notify::new(),
        ended: Notify::new(),
        overtaken: AtomicBool::new(false),
    });
    let while_told = Arc::clone(&slow);
    let worker = Worker::new(DEFAULT_QUEUE).handler("say", move |work: Work, (): ()| {
        let slow = Arc::clone(&while_told);
        async move {
            work.log("a word");
            slow.told.notified().await;
            slow.ended.notify_one();
            Ok::<_, JobsError>(())
        }
    });
    let working = worker.start(Arc::clone(&slow) as Arc<dyn Jobs>).unwrap();
    let id = world.add(NewJob::new("say")).await;
    eventually("its end", async || world.state(id).await == Done).await;
    assert!(!slow.overtaken.load(Ordering::SeqCst), "the end waits for what is on its way");
    assert_eq!(world.job(id).await.log, "a word\n");
    working.stop(Duration::ZERO).await;
}

/// Jobs that do not take every note.
struct Deaf {
    jobs: Arc<SqliteJobs>,
    /// So many notes are refused,
    refuses: AtomicU32,
    /// and before that one is never answered.
    hangs: AtomicBool,
    told: Notify,
}

#[async_trait]
impl Jobs for Deaf {
    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, JobsError> {
        self.jobs.enqueue(jobs).await
    }

    /// For longer than the worker knows: what it could not keep in time is still its own.
    async fn take(&self, wanted: &Wanted<'_>) -> Result<Taken, JobsError> {
        self.jobs.take(&Wanted { lease: HOUR, ..*wanted }).await
    }

    async fn keep(&self, held: &[(Claim, Note)]) -> Result<Vec<Kept>, JobsError> {
        if held.iter().any(|(_, note)| !note.log.is_empty()) {
            self.told.notify_one();
            if self.hangs.swap(false, Ordering::SeqCst) {
                std::future::pending::<()>().await;
            }
            let less = |left: u32| left.checked_sub(1);
            if self.refuses.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok() {
                return Err(JobsError::Unavailable("the line is down".into()));
            }
        }
        self.jobs.keep(held).await
    }

    async fn settle(&self, ended: &[(Claim, Fate)]) -> Result<Vec<Settled>, JobsError> {
        self.jobs.settle(ended).await
    }

    async fn woken(&self, queue: &str, ear: &Ear) -> Woken {
        self.jobs.woken(queue, ear).await
    }
}

/// What is in the log of a job that says a word and ends, which need not be heard at once.
async fn heard(refuses: u32, hangs: bool) -> String {
    let world = Sqlite::new().await;
    let deaf = Arc::new(Deaf {
        jobs: Arc::clone(&world.jobs),
        refuses: AtomicU32::new(refuses),
        hangs: AtomicBool::new(hangs),
        told: Notify::new(),
    });
    let while_told = Arc::clone(&deaf);
    let worker =
        Worker::new(DEFAULT_QUEUE).lease(SHORT).handler("say", move |work: Work, (): ()| {
            let deaf = Arc::clone(&while_told);
            async move {
                work.log("a word");
                if hangs {
                    deaf.told.notified().await;
                }
                Ok::<_, JobsError>(())
            }
        });
    let working = worker.start(Arc::clone(&deaf) as Arc<dyn Jobs>).unwrap();
    let id = world.add(NewJob::new("say")).await;
    eventually("its end", async || world.state(id).await == Done).await;
    working.stop(Duration::ZERO).await;
    world.job(id).await.log
}

#[tokio::test]
async fn what_a_job_said_last_is_told_again_if_the_line_drops_at_its_end() {
    assert_eq!(heard(3, false).await, "a word\n");
}

#[tokio::test]
async fn a_job_ends_although_nothing_can_be_told_of_it() {
    assert_eq!(heard(u32::MAX, false).await, "");
}

#[tokio::test]
async fn what_was_being_told_when_nobody_waited_for_it_any_more_is_told_again() {
    assert_eq!(heard(0, true).await, "a word\n");
}

#[tokio::test]
async fn what_nobody_can_do_waits_longer_than_what_failed() {
    let world = Sqlite::new().await;
    let handler = async |_: Work, (): ()| Err::<(), _>("no");
    let worker = Worker::new(DEFAULT_QUEUE).handler("fail", handler);
    let (failing, unknown) =
        (world.add(NewJob::new("fail")).await, world.add(NewJob::new("unknown")).await);
    let working = worker.start(Arc::clone(&world.jobs) as Arc<dyn Jobs>).unwrap();
    let wait = async |id| {
        eventually("it failed", async || world.job(id).await.error.is_some()).await;
        let job = world.job(id).await;
        job.run_at.duration_since(job.updated_at).unwrap()
    };
    let (failing, unknown) = (wait(failing).await, wait(unknown).await);
    assert!(unknown > failing * 30, "{failing:?} and {unknown:?}");
    working.stop(Duration::ZERO).await;
}
