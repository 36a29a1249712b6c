//! Jobs on PostgreSQL: several processes share the queues of one database.
//!
//! ```text
//! enqueue ──► vedetta_job: waits ◄─► runs ──► vedetta_job_over: done, dead, cancelled
//!                 │ ▲                                │ ▲
//!                 │ └──────────── retry ─────────────┘ │
//!                 └────────────── cancel ──────────────┘
//! ```
//!
//! The table that workers look at holds no job that is over, so it stays small however many there were. Time
//! is the database's alone: no two processes compare their clocks. Who enqueues says so with `NOTIFY` after
//! the commit, so that others look at once and no commit waits for another's.
//!
//! A claim does not wait for the disk: one that is lost with the server is as if it had not been made.

mod enqueue;
mod ledger;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use parking_lot::Mutex;
use serde_json::value::RawValue;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;
use vedetta_core::queue::{Kept, Settled, Woken};
use vedetta_core::{Trace, explain};
use vedetta_db::Schema;
use vedetta_db::postgres::tokio_postgres::{Error, Row};
use vedetta_db::postgres::{GenericClient, Heard, Postgres, PostgresError, Transaction};
use vedetta_runtime::{Bells, Ear};

use self::enqueue::{Asked, FEW};
use crate::job::{
    Claim, Enqueued, Fate, Given, JobId, JobsError, Json, LOG_TAIL, LONGEST_NAME, LONGEST_TEXT,
    NewJob, Note, PRIORITY_STEP, QueueCounts, shortened, tail,
};
use crate::port::{Jobs, Taken, Wanted};

/// The tables of the jobs, for [`Postgres::open`].
pub const SCHEMA: Schema = Schema {
    component: "jobs",
    steps: &[
        include_str!("postgres/schema.sql"),
        include_str!("postgres/functions.sql"),
        include_str!("postgres/keep.sql"),
    ],
};

const _: () = assert!(PRIORITY_STEP.as_secs() == 60, "the statements say so, too");

/// On it goes what there is to look at in which queue, and who said so.
const CHANNEL: &str = "vedetta_job";

/// After so many jobs what is left of their rows is cleared away, or after a quarter of those that wait. The
/// server does it itself, but every minute at best, and a million dead rows slow down who looks for live ones.
const CLEAR_AFTER: i64 = 200_000;

/// What cannot be noted as somebody has the job locked is told again this often, for so long: who tells of it at the
/// same time is mostly done by then. No longer, as the leases of others are prolonged after it.
const LOOK_AGAIN: Duration = Duration::from_millis(5);
const PATIENCE: Duration = Duration::from_millis(100);
/// After that it is told with what is told next, or at the end. Of so many jobs at most; of those that nobody tells of any more
/// it is forgotten after so long.
const UNSAID: usize = 1024;
const FORGOTTEN: Duration = Duration::from_secs(600);

const _: () = assert!(LOG_TAIL == 16_384, "the statements say so, too");

/// Of so many settlements one sums up what the others counted.
const SUM_UP: u32 = 200;

// The states of rows, see the schema.
const RUNNING: i16 = 2;
const DEAD: i16 = 3;
const CANCELLED: i16 = 4;
const DONE: i16 = 5;

const TELL: &str = "SELECT pg_notify('vedetta_job', news) FROM unnest($1::text[]) AS n (news)";

const TAKE: &str = "SELECT * FROM vedetta_job_take($1, $2, $3, $4, $5, $6)";

const KEEP: &str = "SELECT * FROM vedetta_job_keep($1, $2, $3, $4, $5)";

const OVER: &str = "SELECT * FROM vedetta_job_over($1, $2, $3, $4, $5)";

const AGAIN: &str = "SELECT * FROM vedetta_job_again($1, $2, $3, $4)";

/// The jobs of one database; clones share them.
#[derive(Clone)]
pub struct PostgresJobs {
    desk: Arc<Desk>,
    gather: mpsc::UnboundedSender<Asked>,
    /// Wakes for what others do, as long as somebody is left to hear it.
    _listener: Arc<AbortOnDropHandle<()>>,
}

/// What all that is done here needs.
struct Desk {
    db: Postgres,
    /// Tells what we said ourselves from what others say.
    ours: u64,
    bells: Bells<String>,
    /// Those whose rows are committed; none is ever removed.
    queues: Mutex<HashMap<String, i32>>,
    counted: tokio::sync::Mutex<Option<Counted>>,
    /// What could not be noted, and since when.
    unsaid: Mutex<HashMap<Claim, (Instant, Note)>>,
    /// How many more jobs may end before the rows they leave behind are cleared away.
    clear_after: AtomicI64,
}

/// A count that took long.
struct Counted {
    until: Instant,
    queues: Vec<QueueCounts>,
}

impl From<PostgresError> for JobsError {
    fn from(error: PostgresError) -> Self {
        if error.is_transient() {
            Self::Unavailable(Box::new(error))
        } else {
            Self::Failed(Box::new(error))
        }
    }
}

impl From<Error> for JobsError {
    fn from(error: Error) -> Self {
        PostgresError::from(error).into()
    }
}

fn micros(delay: Duration) -> i64 {
    // What is asked for later than in a thousand years is asked for then.
    const MOST: i64 = 1_000 * 366 * 24 * 3600 * 1_000_000;
    i64::try_from(delay.as_micros()).unwrap_or(MOST).min(MOST)
}

fn delay(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

/// Microseconds since 1970.
fn since_epoch(at: SystemTime) -> i64 {
    match at.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => micros(after),
        Err(before) => -micros(before.duration()),
    }
}

/// What no row has if it is none of ours.
fn number(id: JobId) -> i64 {
    i64::try_from(id.0).unwrap_or(0)
}

fn natural(number: i32) -> u32 {
    u32::try_from(number).unwrap_or(0)
}

/// What was stored was JSON.
fn json(text: String) -> Json {
    RawValue::from_string(text).unwrap_or_else(|_| RawValue::NULL.to_owned())
}

/// Names have no commas.
fn tags(text: Option<&str>) -> Vec<String> {
    text.map(|text| text.split(',').map(str::to_owned).collect()).unwrap_or_default()
}

/// What was stored was one.
fn trace(text: Option<&str>) -> Option<Trace> {
    text?.parse().ok()
}

/// Ids and tokens of claims, as arrays.
fn columns<'c>(claims: impl IntoIterator<Item = &'c Claim>) -> (Vec<i64>, Vec<i64>) {
    claims.into_iter().map(|claim| (number(claim.id), claim.token)).unzip()
}

impl PostgresJobs {
    /// The jobs of a database that was opened with [`SCHEMA`]. It has to be called where tokio runs.
    pub fn new(db: Postgres) -> Self {
        let mut listener = db.listen(CHANNEL);
        let desk = Arc::new(Desk {
            db,
            ours: fastrand::u64(1..),
            bells: Bells::default(),
            queues: Mutex::default(),
            counted: tokio::sync::Mutex::default(),
            unsaid: Mutex::default(),
            clear_after: AtomicI64::new(CLEAR_AFTER),
        });
        let rung = Arc::clone(&desk);
        let listener = tokio::spawn(async move {
            loop {
                rung.heard(&listener.next().await);
            }
        });
        let (gather, asked) = mpsc::unbounded_channel();
        // It ends when nobody is left to ask.
        tokio::spawn(Arc::clone(&desk).gather(asked));
        Self { desk, gather, _listener: Arc::new(AbortOnDropHandle::new(listener)) }
    }

    /// The database.
    pub fn db(&self) -> &Postgres {
        &self.desk.db
    }

    /// Takes jobs on in a transaction of the caller's own, with all else that is done in it, or not at all.
    /// Workers hear of it when it is committed. An error other than [`JobsError::Failed`] and
    /// [`JobsError::Unavailable`] leaves the transaction as it was.
    ///
    /// A job with a key keeps others of the same key waiting until the transaction ends.
    pub async fn enqueue_in(
        &self,
        tx: &Transaction<'_>,
        jobs: &[NewJob],
    ) -> Result<Vec<Enqueued>, JobsError> {
        self.desk.enqueue_in(tx, jobs).await
    }

    /// Settles a job as done in a transaction of its handler's own, so that what else is done in it happens
    /// once: roll it back if this says no, as then somebody else may have the job. Once it is committed,
    /// what is said of this claim later changes nothing. Let it be the last before the commit: until then the
    /// job is locked and its lease cannot be prolonged.
    pub async fn done_in(
        &self,
        tx: &Transaction<'_>,
        claim: Claim,
        result: Option<Json>,
    ) -> Result<bool, JobsError> {
        let fate = Fate::Done { result };
        Ok(!over(tx, &[&(claim, fate)]).await?.is_empty())
    }
}

impl Desk {
    fn heard(&self, news: &Heard) {
        match news {
            Heard::Again => self.bells.ring_all(),
            Heard::Notified(news) => {
                let mut words = news.split(' ');
                let what = match words.next() {
                    Some("look") => Woken::Look,
                    _ => Woken::More,
                };
                let (queue, who) = (words.next(), words.next());
                if let Some(queue) = queue
                    && who.and_then(|who| who.parse().ok()) != Some(self.ours)
                {
                    self.bells.ring(queue, what);
                }
            }
        }
    }

    /// Wakes those who work these queues: here at once, elsewhere when what `db` is in is committed.
    async fn tell(
        &self,
        db: &impl GenericClient,
        queues: &[&str],
        what: Woken,
    ) -> Result<(), Error> {
        queues.iter().for_each(|queue| self.bells.ring(*queue, what));
        tell(db, queues, what, self.ours).await
    }

    /// Takes note that jobs ended, and clears away what they left when it is time.
    fn ended(self: &Arc<Self>, count: usize) {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        let before = self.clear_after.fetch_sub(count, Ordering::Relaxed);
        if before > 0 && before <= count {
            let desk = Arc::clone(self);
            tokio::spawn(async move {
                let waiting = desk.clear().await.unwrap_or_else(|error| {
                    tracing::debug!(error = explain(&error), "dead rows are left to the server");
                    0
                });
                desk.clear_after.store(CLEAR_AFTER.max(waiting / 4), Ordering::Relaxed);
            });
        }
    }

    /// How many rows are left.
    async fn clear(&self) -> Result<i64, PostgresError> {
        let client = self.db.client().await?;
        client.batch_execute("VACUUM (SKIP_LOCKED, TRUNCATE off) vedetta_job").await?;
        let sql = "SELECT reltuples::bigint FROM pg_class WHERE oid = 'vedetta_job'::regclass";
        Ok(client.query_one(sql, &[]).await?.try_get(0)?)
    }

    /// What could not be noted so far of these.
    fn unsaid<'c>(&self, claims: impl Iterator<Item = &'c Claim>) -> Unsaid<'_> {
        let mut unsaid = self.unsaid.lock();
        if unsaid.is_empty() {
            return Unsaid { desk: self, notes: Vec::new() };
        }
        let take = |claim: &Claim| Some((*claim, unsaid.remove(claim)?));
        Unsaid { desk: self, notes: claims.filter_map(take).collect() }
    }

    /// These are to be told later.
    fn leave_unsaid(&self, left: &[&(Claim, Note)]) {
        let (mut unsaid, now) = (self.unsaid.lock(), Instant::now());
        if unsaid.len() + left.len() > UNSAID {
            unsaid.retain(|_, (since, _)| now.duration_since(*since) < FORGOTTEN);
        }
        let room = UNSAID.saturating_sub(unsaid.len());
        if room < left.len() {
            let lost = left.len() - room;
            tracing::warn!(jobs = lost, "what is told of jobs is lost: they are locked");
        }
        unsaid.extend(left.iter().take(room).map(|(claim, note)| (*claim, (now, note.clone()))));
    }

    /// The number of a queue, if there is one of this name.
    async fn queue(&self, db: &impl GenericClient, name: &str) -> Result<Option<i32>, Error> {
        if let Some(queue) = self.queues.lock().get(name) {
            return Ok(Some(*queue));
        }
        let sql = "SELECT queue FROM vedetta_job_queue WHERE name = $1";
        let found = db.query_opt(&db.prepare_cached(sql).await?, &[&name]).await?;
        let queue = found.map(|row| row.try_get(0)).transpose()?;
        if let Some(queue) = queue {
            self.queues.lock().insert(name.to_owned(), queue);
        }
        Ok(queue)
    }
}

/// What is told once more. It is left unsaid again unless it was, also if nobody waits for that any more.
struct Unsaid<'d> {
    desk: &'d Desk,
    notes: Vec<(Claim, (Instant, Note))>,
}

impl Unsaid<'_> {
    /// With what there is to tell now.
    fn before<'h>(&self, held: &'h [(Claim, Note)]) -> Cow<'h, [(Claim, Note)]> {
        if self.notes.is_empty() {
            return Cow::Borrowed(held);
        }
        let mut held = held.to_vec();
        for (claim, note) in &mut held {
            if let Some((_, (_, old))) = self.notes.iter().find(|(left, _)| left == claim) {
                note.add_older(old.clone());
            }
        }
        Cow::Owned(held)
    }

    fn forget(mut self) {
        self.notes.clear();
    }
}

impl Drop for Unsaid<'_> {
    fn drop(&mut self) {
        if self.notes.is_empty() {
            return;
        }
        let mut unsaid = self.desk.unsaid.lock();
        for (claim, (since, note)) in self.notes.drain(..) {
            let (_, newer) = unsaid.entry(claim).or_insert_with(|| (since, Note::default()));
            newer.add_older(note);
        }
    }
}

/// Tells who listens, but for `who`, once what `db` is in is committed.
async fn tell(
    db: &impl GenericClient,
    queues: &[&str],
    what: Woken,
    who: u64,
) -> Result<(), Error> {
    let word = match what {
        Woken::More => "more",
        Woken::Look => "look",
    };
    let news: Vec<String> = queues.iter().map(|queue| format!("{word} {queue} {who}")).collect();
    db.execute(&db.prepare_cached(TELL).await?, &[&news]).await?;
    Ok(())
}

/// The claim that a row begins with.
fn claim(row: &Row) -> Result<Claim, Error> {
    let id: i64 = row.try_get(0)?;
    Ok(Claim { id: JobId(id.unsigned_abs()), token: row.try_get(1)? })
}

/// Prolongs leases, and notes what there is to tell. Those that were still held, and whether it was noted.
async fn keep(
    db: &impl GenericClient,
    held: &[&(Claim, Note)],
) -> Result<HashMap<Claim, bool>, Error> {
    let (ids, tokens) = columns(held.iter().map(|(claim, _)| claim));
    let progress = |(_, note): &&(Claim, Note)| {
        note.progress.filter(|progress| !progress.is_nan()).map(|progress| progress.clamp(0.0, 1.0))
    };
    let message = |(_, note): &&(Claim, Note)| {
        note.message.as_deref().map(|message| shortened(message, LONGEST_TEXT))
    };
    let log = |(_, note): &&(Claim, Note)| (!note.log.is_empty()).then(|| tail("", &note.log));
    let progress: Vec<Option<f32>> = held.iter().map(progress).collect();
    let messages: Vec<Option<String>> = held.iter().map(message).collect();
    let logs: Vec<Option<String>> = held.iter().map(log).collect();
    let statement = db.prepare_cached(KEEP).await?;
    let rows = db.query(&statement, &[&ids, &tokens, &progress, &messages, &logs]).await?;
    rows.iter().map(|row| Ok((claim(row)?, row.try_get(2)?))).collect()
}

/// Has jobs be over that are done or dead. Those that were still held.
async fn over(db: &impl GenericClient, ends: &[&(Claim, Fate)]) -> Result<Vec<Claim>, Error> {
    let mut states: Vec<i16> = Vec::with_capacity(ends.len());
    let mut results: Vec<Option<&str>> = Vec::with_capacity(ends.len());
    let mut errors: Vec<Option<String>> = Vec::with_capacity(ends.len());
    for (_, fate) in ends {
        states.push(if let Fate::Dead { .. } = fate { DEAD } else { DONE });
        results.push(match fate {
            Fate::Done { result: Some(result) } => Some(result.get()),
            _ => None,
        });
        errors.push(match fate {
            Fate::Dead { error } => Some(shortened(error, LONGEST_TEXT)),
            _ => None,
        });
    }
    let (ids, tokens) = columns(ends.iter().map(|(claim, _)| claim));
    let statement = db.prepare_cached(OVER).await?;
    let rows = db.query(&statement, &[&ids, &tokens, &states, &results, &errors]).await?;
    rows.iter().map(claim).collect()
}

impl Desk {
    async fn settle(
        &self,
        db: &impl GenericClient,
        ends: &[(Claim, Fate)],
    ) -> Result<Vec<Settled>, Error> {
        let (ending, returning): (Vec<_>, Vec<_>) = ends
            .iter()
            .partition(|(_, fate)| matches!(fate, Fate::Done { .. } | Fate::Dead { .. }));
        let mut answers: HashMap<Claim, Settled> = HashMap::with_capacity(ends.len());
        if !ending.is_empty() {
            let ended = over(db, &ending).await?;
            answers.extend(ended.into_iter().map(|claim| (claim, Settled::Gone)));
            for (claim, fate) in &ending {
                if let (Fate::Dead { .. }, Some(settled)) = (fate, answers.get_mut(claim)) {
                    *settled = Settled::Parked;
                }
            }
        }
        if !returning.is_empty() {
            answers.extend(self.give_back(db, &returning).await?);
        }
        let missing = ends.iter().filter(|(claim, _)| !answers.contains_key(claim));
        let missing: Vec<Claim> = missing.map(|(claim, _)| *claim).collect();
        if !missing.is_empty() {
            answers.extend(said_before(db, &missing).await?);
        }
        let answer = |(claim, _): &(Claim, Fate)| answers.get(claim).copied();
        Ok(ends.iter().map(|end| answer(end).unwrap_or(Settled::Stale)).collect())
    }

    /// Has jobs wait again. Those that were still held, and when they are due.
    async fn give_back(
        &self,
        db: &impl GenericClient,
        ends: &[&(Claim, Fate)],
    ) -> Result<Vec<(Claim, Settled)>, Error> {
        let mut delays: Vec<Option<i64>> = Vec::with_capacity(ends.len());
        let mut errors: Vec<Option<String>> = Vec::with_capacity(ends.len());
        for (_, fate) in ends {
            let (after, error) = match fate {
                Fate::Again { after, error } => (Some(after), Some(error)),
                Fate::Snooze(after) => (Some(after), None),
                _ => (None, None),
            };
            delays.push(after.map(|after| micros(*after)));
            errors.push(error.map(|error| shortened(error, LONGEST_TEXT)));
        }
        let (ids, tokens) = columns(ends.iter().map(|(claim, _)| claim));
        let statement = db.prepare_cached(AGAIN).await?;
        let rows = db.query(&statement, &[&ids, &tokens, &delays, &errors]).await?;
        let mut queues: Vec<&str> = Vec::new();
        let mut answers = Vec::with_capacity(rows.len());
        for row in &rows {
            queues.push(row.try_get(2)?);
            let due: Option<i64> = row.try_get(3)?;
            let settled = due.map_or(Settled::Gone, |due| Settled::Again(delay(due)));
            answers.push((claim(row)?, settled));
        }
        queues.sort_unstable();
        queues.dedup();
        if !queues.is_empty() {
            self.tell(db, &queues, Woken::More).await?;
        }
        Ok(answers)
    }
}

/// What became of claims that were settled before, if that still stands.
async fn said_before(
    db: &impl GenericClient,
    claims: &[Claim],
) -> Result<Vec<(Claim, Settled)>, Error> {
    let sql = "
        SELECT u.place, j.state, (extract(epoch FROM j.run_at - now()) * 1000000)::bigint
        FROM unnest($1::bigint[], $2::bigint[]) WITH ORDINALITY AS u (id, token, place)
            CROSS JOIN LATERAL (
                SELECT state, run_at, token FROM vedetta_job WHERE id = u.id AND state <> 2
                UNION ALL
                SELECT state, run_at, token FROM vedetta_job_over WHERE id = u.id
            ) AS j
        WHERE j.token = u.token";
    let (ids, tokens) = columns(claims);
    let mut found = Vec::new();
    for row in db.query(sql, &[&ids, &tokens]).await? {
        let (place, state, due): (i64, i16, i64) =
            (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
        let settled = match state {
            DONE | CANCELLED => Settled::Gone,
            DEAD => Settled::Parked,
            _ => Settled::Again(delay(due)),
        };
        let claim = usize::try_from(place - 1).ok().and_then(|place| claims.get(place));
        found.extend(claim.map(|claim| (*claim, settled)));
    }
    Ok(found)
}

#[async_trait]
impl Jobs for PostgresJobs {
    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, JobsError> {
        jobs.iter().try_for_each(NewJob::check)?;
        if jobs.is_empty() {
            return Ok(Vec::new());
        }
        // One with a key may have to wait for somebody, and the others would wait with it.
        if jobs.len() > FEW || jobs.iter().any(|job| job.unique_key.is_some()) {
            return self.desk.enqueue(jobs).await;
        }
        let (asked, answer) = Asked::new(jobs.to_vec());
        let gone = || JobsError::Unavailable("the runtime is shutting down".into());
        self.gather.send(asked).map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }

    async fn take(&self, wanted: &Wanted<'_>) -> Result<Taken, JobsError> {
        let nothing = || Taken { jobs: Vec::new(), rest: Some(Duration::MAX) };
        if wanted.room == 0 {
            return Ok(nothing());
        }
        let client = self.desk.db.client().await?;
        let Some(queue) = self.desk.queue(&client, wanted.queue).await? else {
            return Ok(nothing());
        };
        let capacity = i32::try_from(wanted.capacity.max(1)).unwrap_or(i32::MAX);
        let (lease, seed) = (micros(wanted.lease).max(1), fastrand::i64(..));
        let worker = shortened(wanted.worker, LONGEST_NAME);
        let take = client.prepare_cached(TAKE).await?;
        let rows = client
            .query(&take, &[&queue, &i64::from(wanted.room), &capacity, &lease, &seed, &worker])
            .await?;
        let mut rest = None;
        let mut jobs: Vec<(SystemTime, Given)> = Vec::with_capacity(rows.len());
        for row in &rows {
            match given(row)? {
                Some(given) => jobs.push((row.try_get(9)?, given)),
                None => {
                    rest = Some(row.try_get::<_, Option<i64>>(10)?.map_or(Duration::MAX, delay));
                }
            }
        }
        jobs.sort_unstable_by_key(|(rank, given)| (*rank, given.claim.id));
        Ok(Taken { jobs: jobs.into_iter().map(|(_, given)| given).collect(), rest })
    }

    async fn keep(&self, held: &[(Claim, Note)]) -> Result<Vec<Kept>, JobsError> {
        if held.is_empty() {
            return Ok(Vec::new());
        }
        let client = self.desk.db.client().await?;
        let mut ours: HashSet<Claim> = HashSet::with_capacity(held.len());
        let unsaid = self.desk.unsaid(held.iter().map(|(claim, _)| claim));
        let held = unsaid.before(held);
        let mut left: Vec<&(Claim, Note)> = held.iter().collect();
        let began = Instant::now();
        loop {
            let kept = keep(&client, &left).await?;
            for (claim, _) in &left {
                if kept.contains_key(claim) {
                    ours.insert(*claim)
                } else {
                    ours.remove(claim)
                };
            }
            left.retain(|(claim, note)| !note.is_empty() && kept.get(claim) == Some(&false));
            if left.is_empty() || began.elapsed() > PATIENCE {
                break;
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        unsaid.forget();
        if !left.is_empty() {
            self.desk.leave_unsaid(&left);
        }
        let answer = |held| if ours.contains(held) { Kept::Ours } else { Kept::Lost };
        Ok(held.iter().map(|(claim, _)| answer(claim)).collect())
    }

    async fn settle(&self, ended: &[(Claim, Fate)]) -> Result<Vec<Settled>, JobsError> {
        if ended.is_empty() {
            return Ok(Vec::new());
        }
        let client = self.desk.db.client().await?;
        if fastrand::u32(..SUM_UP) == 0 {
            ledger::sum_up(&client).await?;
        }
        self.desk.ended(ended.len());
        let unsaid = self.desk.unsaid(ended.iter().map(|(claim, _)| claim));
        if !unsaid.notes.is_empty() {
            let notes = unsaid.notes.iter().map(|(claim, (_, note))| (*claim, note.clone()));
            let notes: Vec<(Claim, Note)> = notes.collect();
            keep(&client, &notes.iter().collect::<Vec<_>>()).await?;
        }
        unsaid.forget();
        match self.desk.settle(&client, ended).await.map_err(JobsError::from) {
            Err(JobsError::Failed(_)) if ended.len() > 1 => {}
            settled => return settled,
        }
        // One that cannot be settled must not hold up the others: its lease will lapse.
        let mut settled = Vec::with_capacity(ended.len());
        for end in ended {
            let one = self.desk.settle(&client, std::slice::from_ref(end)).await;
            settled.push(match one.map_err(JobsError::from) {
                Ok(one) => one[0],
                Err(error) if error.is_transient() => return Err(error),
                Err(error) => {
                    let why = explain(&error);
                    tracing::error!(job = end.0.id.0, error = why, "cannot be settled");
                    Settled::Stale
                }
            });
        }
        Ok(settled)
    }

    async fn woken(&self, queue: &str, ear: &Ear) -> Woken {
        self.desk.bells.rung(queue, ear).await
    }
}

/// A row of a take; nothing if it says how long to rest.
fn given(row: &Row) -> Result<Option<Given>, Error> {
    let Some(id) = row.try_get::<_, Option<i64>>(0)? else { return Ok(None) };
    Ok(Some(Given {
        claim: Claim { id: JobId(id.unsigned_abs()), token: row.try_get(1)? },
        kind: row.try_get(2)?,
        payload: json(row.try_get(3)?),
        cost: natural(row.try_get(4)?),
        attempt: natural(row.try_get(5)?),
        max_attempts: natural(row.try_get(6)?),
        timeout: row.try_get::<_, Option<i64>>(7)?.map(delay),
        tags: tags(row.try_get(8)?),
        trace: trace(row.try_get(11)?),
        waited: row.try_get::<_, Option<i64>>(12)?.map(delay),
    }))
}
