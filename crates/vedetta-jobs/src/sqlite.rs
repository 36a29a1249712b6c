//! Jobs in the embedded SQLite file.
//!
//! One process has the file, and keeps in memory which jobs wait and which run; so a job is found without a
//! search, however many wait. A job is one row from its beginning to its end. That it runs
//! is not written to its row: those that were handed out together are one small row of their own, and what
//! says how long their leases last is in memory. After a restart each lease begins anew, so that a worker in
//! another process keeps what it has.

mod desk;
mod index;
mod show;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use parking_lot::Mutex;
use vedetta_core::JobState;
use vedetta_core::queue::{Kept, Settled, Woken};
use vedetta_db::rusqlite::{self, Connection, OptionalExtension as _, Row, params};
use vedetta_db::{
    Clock, CommitError, Db, Mirror, Purpose, ReadError, Rows, Schema, Stop, WriteError,
};
use vedetta_runtime::{Bells, Ear};

use self::index::{Index, LaneNo, Op};
use crate::job::{
    Change, Claim, Enqueued, Fate, Filter, Job, JobId, JobsError, Json, Mode, NewJob, Note, Page,
    QueueCounts,
};
use crate::monitor::{Ended, Monitor};
use crate::port::{Jobs, Ledger, Taken, Wanted};

/// The tables of the jobs, for [`Db::open`].
pub const SCHEMA: Schema = Schema {
    component: "jobs",
    steps: &["
        CREATE TABLE job_queue (
            queue INTEGER PRIMARY KEY,
            name  TEXT NOT NULL UNIQUE,
            mode  INTEGER NOT NULL DEFAULT 0
        ) STRICT;
        -- Times are milliseconds since 1970. A job that runs is still 0, waiting; see job_take.
        CREATE TABLE job (
            id           INTEGER PRIMARY KEY,
            queue        INTEGER NOT NULL,
            kind         TEXT NOT NULL,
            state        INTEGER NOT NULL DEFAULT 0,
            cost         INTEGER NOT NULL,
            priority     INTEGER NOT NULL,
            attempts     INTEGER NOT NULL DEFAULT 0,
            max_attempts INTEGER NOT NULL,
            run_at       INTEGER NOT NULL,
            queued_at    INTEGER NOT NULL,
            updated_at   INTEGER NOT NULL,
            started_at   INTEGER,
            ended_at     INTEGER,
            timeout      INTEGER,
            -- The last take it came back from or ended in; negative unless its worker settled it.
            token        INTEGER,
            progress     REAL NOT NULL DEFAULT 0,
            unique_key   TEXT,
            worker       TEXT,
            tags         TEXT,
            message      TEXT,
            error        TEXT,
            payload      TEXT NOT NULL,
            result       TEXT,
            log          TEXT,
            -- Of a job that is kept elsewhere, and this its record: where, and its id there.
            connection   TEXT,
            foreign_id   INTEGER
        ) STRICT;
        CREATE INDEX job_over ON job (queue, state, ended_at) WHERE ended_at IS NOT NULL;
        CREATE INDEX job_failed ON job (state, id) WHERE state IN (3, 4);
        -- 10 and 11: waiting and running elsewhere.
        CREATE INDEX job_elsewhere ON job (state, queue, cost) WHERE state > 9;
        CREATE UNIQUE INDEX job_foreign ON job (connection, foreign_id) WHERE connection IS NOT NULL;
        -- Jobs that were handed out together: ids one after the other, 8 bytes each, the highest first.
        CREATE TABLE job_take (
            token  INTEGER PRIMARY KEY,
            worker TEXT NOT NULL,
            at     INTEGER NOT NULL,
            lease  INTEGER NOT NULL,
            ids    BLOB NOT NULL
        ) STRICT;
        CREATE TABLE job_tick (name TEXT PRIMARY KEY, at INTEGER NOT NULL) STRICT, WITHOUT ROWID;
        -- An id is never given twice, even if the last job is removed.
        CREATE TABLE job_last (id INTEGER NOT NULL) STRICT;
        INSERT INTO job_last VALUES (0);
    ", "
        -- The place in a trace that its attempts are below of.
        ALTER TABLE job ADD COLUMN trace TEXT;
    "],
};

/// For so long after its end the record of a job that is kept elsewhere stays, unless said otherwise: it keeps the job
/// from being run when it comes again.
pub const RECORDED: Duration = Duration::from_secs(3600);

fn state_number(state: JobState) -> i64 {
    match state {
        JobState::Waiting | JobState::Running => 0,
        JobState::Done => 2,
        JobState::Dead => 3,
        JobState::Cancelled => 4,
    }
}

fn state_of(number: i64) -> JobState {
    match number {
        2 => JobState::Done,
        3 => JobState::Dead,
        4 => JobState::Cancelled,
        11 => JobState::Running,
        _ => JobState::Waiting,
    }
}

fn mode_number(mode: Mode) -> i64 {
    match mode {
        Mode::Open => 0,
        Mode::Paused => 1,
        Mode::Draining => 2,
    }
}

fn mode_of(number: i64) -> Mode {
    match number {
        1 => Mode::Paused,
        2 => Mode::Draining,
        _ => Mode::Open,
    }
}

/// The jobs of one file; clones share them.
#[derive(Clone)]
pub struct SqliteJobs {
    db: Db,
    desk: Arc<Desk>,
}

/// What the statements need beside the connection.
struct Desk {
    clock: Clock,
    index: Mutex<Index>,
    bells: Bells<String>,
    rings: Mutex<Rings>,
}

/// Whom to wake once it is on the disk.
#[derive(Default)]
struct Rings {
    /// By the closure that runs.
    now: Vec<(LaneNo, Woken)>,
    /// By those of its batch before it.
    batch: Vec<(LaneNo, Woken)>,
    /// By batches on their way.
    sealed: std::collections::VecDeque<Vec<(LaneNo, Woken)>>,
}

struct Hook(Arc<Desk>);

impl Mirror for Hook {
    fn keep(&self) {
        self.0.index.lock().keep();
        let rings = &mut *self.0.rings.lock();
        rings.batch.append(&mut rings.now);
    }

    fn undo(&self) {
        self.0.index.lock().undo();
        self.0.rings.lock().now.clear();
    }

    fn seal(&self) -> Rows {
        self.0.index.lock().seal();
        let rings = &mut *self.0.rings.lock();
        rings.batch.dedup();
        rings.sealed.push_back(std::mem::take(&mut rings.batch));
        Rows::none()
    }

    fn publish(&self) {
        let durable = self.0.rings.lock().sealed.pop_front().unwrap_or_default();
        let mut index = self.0.index.lock();
        index.publish();
        for (lane, what) in durable {
            if let Some(lane) = index.lanes.get(lane) {
                self.0.bells.ring(&*lane.name, what);
            }
        }
    }

    fn discard(&self) {
        self.0.index.lock().discard();
        *self.0.rings.lock() = Rings::default();
    }
}

impl From<CommitError> for JobsError {
    fn from(error: CommitError) -> Self {
        match error {
            // It is this write that can never be made. All else ends, by a restart at the latest.
            CommitError::Panicked => Self::Failed(Box::new(error)),
            _ => Self::Unavailable(Box::new(error)),
        }
    }
}

impl From<ReadError> for JobsError {
    fn from(error: ReadError) -> Self {
        Self::Failed(Box::new(error))
    }
}

impl From<rusqlite::Error> for JobsError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Failed(Box::new(error))
    }
}

/// A refusal is what the closure answers.
fn answered<T>(answer: Result<T, WriteError<JobsError>>) -> Result<T, JobsError> {
    answer.map_err(|error| match error {
        WriteError::Refused(refused) => refused,
        WriteError::Lost(lost) => lost.into(),
        _ => unreachable!("a write is refused or lost"),
    })
}

/// A disk that is full or fails is the database's to deal with, all else its caller's.
impl From<JobsError> for Stop<JobsError> {
    fn from(error: JobsError) -> Self {
        match error {
            JobsError::Failed(cause) => match cause.downcast::<rusqlite::Error>() {
                Ok(error) => Stop::Sql(*error),
                Err(cause) => Stop::Refused(JobsError::Failed(cause)),
            },
            error => Stop::Refused(error),
        }
    }
}

impl SqliteJobs {
    /// The jobs of a database that was opened with [`SCHEMA`].
    pub async fn open(db: Db) -> Result<Self, JobsError> {
        let desk = Desk {
            clock: db.clock(),
            index: Mutex::default(),
            bells: Bells::default(),
            rings: Mutex::default(),
        };
        let jobs = Self { db, desk: Arc::new(desk) };
        let this = jobs.clone();
        let loaded = tokio::task::spawn_blocking(move || {
            this.db.attach(Box::new(Hook(Arc::clone(&this.desk))))?;
            let desk = Arc::clone(&this.desk);
            let loaded = this.db.read_blocking(move |db| desk.load(db));
            Ok::<_, JobsError>(loaded?)
        });
        loaded.await.map_err(|stopped| JobsError::Failed(Box::new(stopped)))??;
        Ok(jobs)
    }

    async fn write<T: Send + 'static>(
        &self,
        purpose: Purpose,
        work: impl FnOnce(&Connection, &Desk) -> Result<T, JobsError> + Send + 'static,
    ) -> Result<T, JobsError> {
        let desk = Arc::clone(&self.desk);
        answered(self.db.write(purpose, move |tx| Ok(work(tx, &desk)?)).await)
    }

    /// The same for what does no harm if it is lost with the machine: who has what, and what it tells.
    async fn write_lazily<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection, &Desk) -> Result<T, JobsError> + Send + 'static,
    ) -> Result<T, JobsError> {
        let desk = Arc::clone(&self.desk);
        answered(self.db.write_lazily(Purpose::Store, move |tx| Ok(work(tx, &desk)?)).await)
    }

    /// Takes jobs on in a closure of [`Db::write`], with all else that it writes, or not at all.
    pub fn enqueue_in(&self, tx: &Connection, jobs: &[NewJob]) -> Result<Vec<Enqueued>, JobsError> {
        jobs.iter().try_for_each(NewJob::check)?;
        self.desk.enqueue(tx, jobs)
    }

    /// The numbers here of jobs that are kept elsewhere, by what keeps them and their ids there; nothing for
    /// one of which nothing was told.
    pub async fn records_of(
        &self,
        connection: &str,
        ids: &[JobId],
    ) -> Result<Vec<Option<JobId>>, JobsError> {
        let (connection, ids) = (connection.to_owned(), ids.to_owned());
        let read = self.db.read(move |db| {
            let sql = "SELECT id FROM job
                       WHERE connection = ?1 AND foreign_id = ?2 AND connection IS NOT NULL";
            let mut find = db.prepare_cached(sql)?;
            let found = ids.iter().map(|id| {
                let row = params![connection, id.0.cast_signed()];
                let found = find.query_row(row, |row| row.get::<_, i64>(0)).optional()?;
                Ok(found.map(|id| JobId(id.unsigned_abs())))
            });
            found.collect()
        });
        Ok(read.await?)
    }

    /// Notes that a job which is kept elsewhere was called off: what is told of it later changes nothing. It
    /// may be known only now when exactly it was asked for.
    pub async fn cancel_record(
        &self,
        id: JobId,
        queued_at: Option<SystemTime>,
    ) -> Result<Change, JobsError> {
        self.write(Purpose::Reclaim, move |tx, desk| desk.cancel_record(tx, id, queued_at, None))
            .await
    }

    /// Jobs that are kept elsewhere and have not ended, of which nothing was told for so long: the next few after
    /// this one.
    pub async fn unheard(
        &self,
        silence: Duration,
        after: JobId,
        limit: u32,
    ) -> Result<Vec<JobId>, JobsError> {
        let before = self.desk.clock.now().saturating_sub(Clock::millis(silence));
        let read = self.db.read(move |db| {
            // Those that are open are fewer than all there are.
            let sql = "SELECT id FROM job INDEXED BY job_elsewhere
                       WHERE state > 9 AND updated_at <= ?1 AND id > ?2 ORDER BY id LIMIT ?3";
            let mut find = db.prepare_cached(sql)?;
            let after = i64::try_from(after.0).unwrap_or(i64::MAX);
            let found =
                find.query_map(params![before, after, limit], |row| row.get::<_, i64>(0))?;
            found.map(|id| Ok(JobId(id?.unsigned_abs()))).collect()
        });
        Ok(read.await?)
    }

    /// Notes that a job which was kept elsewhere is gone from there, and nobody told how it ended.
    pub async fn end_record(&self, id: JobId) -> Result<Change, JobsError> {
        let end = move |tx: &Connection, desk: &Desk| desk.end_record(tx, id);
        self.write(Purpose::Reclaim, end).await
    }

    /// The same as [`Ledger::prune`], but what is kept elsewhere stays for `elsewhere` after its end, however short
    /// the other times are: its record keeps it from being run when it comes again.
    pub async fn prune_but(
        &self,
        done: Duration,
        dead: Duration,
        elsewhere: Duration,
    ) -> Result<u64, JobsError> {
        let prune = move |tx: &Connection, desk: &Desk| {
            let before = |age| desk.clock.now().saturating_sub(Clock::millis(age));
            desk.prune(tx, before(done), before(dead), before(elsewhere))
        };
        self.write(Purpose::Reclaim, prune).await
    }

    /// Settles a job as done in a closure of [`Db::write`], so that what else is written there happens once:
    /// refuse the closure if this says no, as then somebody else has the job.
    pub fn done_in(
        &self,
        tx: &Connection,
        claim: Claim,
        result: Option<Json>,
    ) -> Result<bool, JobsError> {
        Ok(self.desk.settle_once(tx, claim, &Fate::Done { result })? == Settled::Gone)
    }
}

/// What is wanted, for a closure.
struct Owned {
    queue: String,
    worker: String,
    room: u32,
    capacity: u32,
    lease: Duration,
}

#[async_trait]
impl Jobs for SqliteJobs {
    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, JobsError> {
        jobs.iter().try_for_each(NewJob::check)?;
        let jobs = jobs.to_owned();
        self.write(Purpose::Store, move |tx, desk| desk.enqueue(tx, &jobs)).await
    }

    async fn take(&self, wanted: &Wanted<'_>) -> Result<Taken, JobsError> {
        let wanted = Owned {
            queue: wanted.queue.into(),
            worker: wanted.worker.into(),
            room: wanted.room,
            capacity: wanted.capacity,
            lease: wanted.lease,
        };
        self.write_lazily(move |tx, desk| desk.take(tx, &wanted)).await
    }

    async fn keep(&self, held: &[(Claim, Note)]) -> Result<Vec<Kept>, JobsError> {
        let kept: Vec<Kept> = {
            let (mut index, now) = (self.desk.index.lock(), self.desk.clock.now());
            let keep = |(claim, _): &(Claim, Note)| match index.runs.get(&claim.id) {
                Some(run) if run.token == claim.token && run.until > now => {
                    let until = now.saturating_add(run.lease);
                    index.prolong(claim.id, until);
                    Kept::Ours
                }
                _ => Kept::Lost,
            };
            held.iter().map(keep).collect()
        };
        let told = held
            .iter()
            .zip(&kept)
            .filter(|((_, note), kept)| **kept == Kept::Ours && !note.is_empty());
        let told: Vec<(Claim, Note)> = told.map(|(told, _)| told.clone()).collect();
        if !told.is_empty() {
            let note = move |tx: &Connection, desk: &Desk| {
                told.iter().try_for_each(|(claim, note)| desk.note(tx, claim.id, note))
            };
            self.write_lazily(note).await?;
        }
        Ok(kept)
    }

    async fn settle(&self, ended: &[(Claim, Fate)]) -> Result<Vec<Settled>, JobsError> {
        let ended = ended.to_owned();
        let settle = move |tx: &Connection, desk: &Desk| {
            ended.iter().map(|(claim, fate)| desk.settle(tx, *claim, fate)).collect()
        };
        self.write(Purpose::Reclaim, settle).await
    }

    async fn woken(&self, queue: &str, ear: &Ear) -> Woken {
        self.desk.bells.rung(queue, ear).await
    }
}

#[async_trait]
impl Ledger for SqliteJobs {
    async fn job(&self, id: JobId) -> Result<Option<Job>, JobsError> {
        let desk = Arc::clone(&self.desk);
        Ok(self.db.read(move |db| desk.one(db, id)).await?)
    }

    async fn list(
        &self,
        filter: &Filter,
        before: Option<JobId>,
        limit: u32,
    ) -> Result<Page, JobsError> {
        let (desk, filter) = (Arc::clone(&self.desk), filter.clone());
        let status = filter.status;
        let list = self.db.read(move |db| desk.list(db, &filter, before, limit as usize));
        let mut page = list.await?;
        for job in &mut page.jobs {
            if !self.desk.is_sure(job)
                && let Some(now) = self.job(job.id).await?
            {
                *job = now;
            }
        }
        page.jobs.retain(|job| status.is_none_or(|status| job.status == status));
        Ok(page)
    }

    async fn retry(&self, id: JobId) -> Result<Change, JobsError> {
        self.write(Purpose::Store, move |tx, desk| desk.retry(tx, id)).await
    }

    async fn cancel(&self, id: JobId) -> Result<Change, JobsError> {
        self.write(Purpose::Reclaim, move |tx, desk| desk.cancel(tx, id)).await
    }

    async fn delete(&self, id: JobId) -> Result<Change, JobsError> {
        self.write(Purpose::Reclaim, move |tx, desk| desk.delete(tx, id)).await
    }

    async fn queues(&self) -> Result<Vec<QueueCounts>, JobsError> {
        let desk = Arc::clone(&self.desk);
        Ok(self.db.read(move |db| desk.queues(db)).await?)
    }

    async fn set_mode(&self, queue: &str, mode: Mode) -> Result<(), JobsError> {
        let queue = queue.to_owned();
        let set = move |tx: &Connection, desk: &Desk| {
            let lane = desk.lane(tx, &queue)?;
            let number = desk.index.lock().lanes[lane].number;
            let sql = "UPDATE job_queue SET mode = ?2 WHERE queue = ?1";
            tx.prepare_cached(sql)?.execute(params![number, mode_number(mode)])?;
            desk.index.lock().change(Op::Mode { lane, mode });
            desk.ring(lane, Woken::More);
            Ok(())
        };
        self.write(Purpose::Store, set).await
    }

    async fn prune(&self, done: Duration, dead: Duration) -> Result<u64, JobsError> {
        self.prune_but(done, dead, RECORDED).await
    }

    async fn tick(
        &self,
        name: &str,
        at: SystemTime,
        job: &NewJob,
    ) -> Result<Option<Enqueued>, JobsError> {
        job.check()?;
        let (name, job) = (name.to_owned(), job.clone());
        let tick = move |tx: &Connection, desk: &Desk| {
            let sql = "INSERT INTO job_tick VALUES (?1, ?2)
                       ON CONFLICT (name) DO UPDATE SET at = excluded.at WHERE excluded.at > at";
            if tx.prepare_cached(sql)?.execute(params![name, Clock::at(at)])? == 0 {
                return Ok(None);
            }
            Ok(desk.enqueue(tx, std::slice::from_ref(&job))?.pop())
        };
        self.write(Purpose::Store, tick).await
    }

    async fn last_tick(&self, name: &str) -> Result<Option<SystemTime>, JobsError> {
        let name = name.to_owned();
        let read = self.db.read(move |db| {
            let sql = "SELECT at FROM job_tick WHERE name = ?1";
            let at: Option<i64> =
                db.prepare_cached(sql)?.query_row([name], |row| row.get(0)).optional()?;
            Ok(at.map(Clock::time))
        });
        Ok(read.await?)
    }
}

/// It is told that a job was asked for, and no more.
fn is_asked_for(job: &Job) -> bool {
    job.status == JobState::Waiting && job.started_at.is_none()
}

#[async_trait]
impl Monitor for SqliteJobs {
    async fn tell(&self, jobs: &[Job]) -> Result<Vec<bool>, JobsError> {
        let jobs = jobs.to_owned();
        let has_end = jobs.iter().any(|job| job.status.is_over());
        // Whoever asked for it is told the number of its record, which must not be given twice.
        let is_asked_for = jobs.iter().any(is_asked_for);
        let record = move |tx: &Connection, desk: &Desk| desk.record(tx, &jobs);
        if has_end {
            self.write(Purpose::Reclaim, record).await
        } else if is_asked_for {
            self.write(Purpose::Store, record).await
        } else {
            self.write_lazily(record).await
        }
    }

    async fn ended(
        &self,
        connection: &str,
        jobs: &[(JobId, SystemTime)],
    ) -> Result<Vec<Option<Ended>>, JobsError> {
        let (connection, jobs) = (connection.to_owned(), jobs.to_owned());
        let read = self.db.read(move |db| {
            let sql = "SELECT state, error FROM job
                       WHERE connection = ?1 AND foreign_id = ?2 AND connection IS NOT NULL
                             AND queued_at = ?3 AND state < 10";
            let mut find = db.prepare_cached(sql)?;
            let ended = jobs.iter().map(|(id, queued_at)| {
                let row = params![connection, id.0.cast_signed(), Clock::at(*queued_at)];
                let ended =
                    |row: &Row<'_>| Ok(Ended { status: state_of(row.get(0)?), error: row.get(1)? });
                find.query_row(row, ended).optional()
            });
            ended.collect()
        });
        Ok(read.await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_write_that_panics_is_never_tried_again() {
        let failed = CommitError::Failed(Arc::new(rusqlite::Error::InvalidQuery));
        for error in [CommitError::Full, failed, CommitError::Halted, CommitError::Closed] {
            assert!(JobsError::from(error.clone()).is_transient(), "{error}");
        }
        assert!(!JobsError::from(CommitError::Panicked).is_transient());
    }
}
