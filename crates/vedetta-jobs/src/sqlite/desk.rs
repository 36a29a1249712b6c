//! What is written: the rows and the index, in step.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use vedetta_core::JobState;
use vedetta_core::queue::{Settled, Woken};
use vedetta_db::Clock;
use vedetta_db::rusqlite::{self, Connection, OptionalExtension as _, Row, params};

use super::index::{Lane, LaneNo, Op, Run};
use super::show::{json, tags_of, trace_of};
use super::{Desk, Owned, is_asked_for, mode_of, state_number, state_of};
use crate::job::{
    Change, Claim, Enqueued, Fate, Given, Job, JobId, JobsError, LONGEST_TEXT, Mode, NewJob, Note,
    When, check_name, shortened, tail,
};
use crate::port::Taken;

/// Jobs that one pruning removes.
const PRUNED: i64 = 1_000;

/// The fields of a job that a change needs.
struct Brief {
    lane: LaneNo,
    state: JobState,
    priority: i16,
    run_at: i64,
    attempts: u32,
    max_attempts: u32,
    key: Option<String>,
    /// It is kept elsewhere, and this its record.
    is_elsewhere: bool,
    ended_at: Option<i64>,
}

/// Why a job goes back to wait.
enum Back<'a> {
    /// It failed: after so long.
    Failed(Duration, &'a str),
    Snoozed(Duration),
    Released,
    Lapsed,
}

/// How a job that ran is over.
struct Over<'a> {
    state: JobState,
    error: Option<&'a str>,
    result: Option<&'a str>,
    /// It was an attempt.
    counts: bool,
    /// Its worker said so, and may ask again what it was answered.
    is_settled: bool,
}

impl Desk {
    pub(super) fn load(&self, db: &Connection) -> rusqlite::Result<()> {
        let (mut index, now) = (self.index.lock(), self.clock.now());
        let mut queues = db.prepare("SELECT queue, name, mode FROM job_queue ORDER BY queue")?;
        let queues = queues.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
        for queue in queues {
            let (number, name, mode) = queue?;
            index.change(Op::AddLane(Box::new(Lane::new(number, name, mode_of(mode)))));
        }
        let sql = "SELECT queue, state, count(*) FROM job WHERE ended_at IS NOT NULL GROUP BY queue, state";
        let mut over = db.prepare(sql)?;
        let over = over.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
        for counted in over {
            let (queue, state, count) = counted?;
            let Some(lane) = index.lane_of(queue) else { continue };
            index.change(Op::Over { lane, state: state_of(state), count });
        }
        let mut held: HashMap<JobId, (i64, Arc<str>, i64, i64)> = HashMap::new();
        // A job that was handed out again is in both takes: the last counts.
        let sql = "SELECT token, worker, at, lease, ids FROM job_take ORDER BY at";
        let mut takes = db.prepare(sql)?;
        let mut takes = takes.query([])?;
        while let Some(take) = takes.next()? {
            let worker: Arc<str> = take.get::<_, String>(1)?.into();
            let ids: Vec<u8> = take.get(4)?;
            for id in ids.chunks_exact(8) {
                let id = JobId(u64::from_be_bytes(id.try_into().expect("eight bytes")));
                held.insert(id, (take.get(0)?, Arc::clone(&worker), take.get(2)?, take.get(3)?));
            }
        }
        let sql =
            "SELECT id, queue, priority, run_at, token, cost, unique_key FROM job WHERE state = 0";
        let mut waiting = db.prepare(sql)?;
        let mut waiting = waiting.query([])?;
        while let Some(row) = waiting.next()? {
            let id = JobId(row.get::<_, i64>(0)?.unsigned_abs());
            let Some(lane) = index.lane_of(row.get(1)?) else { continue };
            let given_back = row.get::<_, Option<i64>>(4)?.map(i64::abs);
            match held.remove(&id).filter(|(token, ..)| Some(*token) != given_back) {
                Some((token, worker, started_at, lease)) => {
                    let until = now.saturating_add(lease);
                    let cost = row.get(5)?;
                    let run = Run { lane, token, until, lease, started_at, worker, cost };
                    index.change(Op::Run { id, run: Some(run) });
                }
                None => {
                    index.wait(lane, id, row.get(3)?, row.get(2)?, now);
                    if let Some(key) = row.get::<_, Option<String>>(6)? {
                        index.change(Op::Key { lane, key: key.into(), id: Some(id) });
                    }
                }
            }
        }
        let sql = "SELECT max((SELECT id FROM job_last), (SELECT coalesce(max(id), 0) FROM job))";
        index.last_id = db.query_row(sql, [], |row| row.get::<_, i64>(0))?.unsigned_abs();
        index.loaded();
        Ok(())
    }

    pub(super) fn ring(&self, lane: LaneNo, what: Woken) {
        let mut rings = self.rings.lock();
        if rings.now.last() != Some(&(lane, what)) {
            rings.now.push((lane, what));
        }
    }

    /// The queue of this name, made if there is none.
    pub(super) fn lane(&self, tx: &Connection, name: &str) -> Result<LaneNo, JobsError> {
        let found = self.index.lock().lane(name);
        if let Some(found) = found {
            return Ok(found);
        }
        check_name("queue", name)?;
        let sql = "INSERT INTO job_queue (name) VALUES (?1) RETURNING queue";
        let number = tx.prepare_cached(sql)?.query_row([name], |row| row.get(0))?;
        let mut index = self.index.lock();
        index.change(Op::AddLane(Box::new(Lane::new(number, name.into(), Mode::Open))));
        Ok(index.lanes.len() - 1)
    }

    pub(super) fn enqueue(
        &self,
        tx: &Connection,
        jobs: &[NewJob],
    ) -> Result<Vec<Enqueued>, JobsError> {
        let sql =
            "INSERT INTO job (id, queue, kind, cost, priority, max_attempts, run_at, queued_at,
                       updated_at, timeout, unique_key, tags, payload, trace)
                   VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?8, ?9, ?10, ?11, ?12, ?13)";
        let mut insert = tx.prepare_cached(sql)?;
        let now = self.clock.now();
        let mut enqueued = Vec::with_capacity(jobs.len());
        for job in jobs {
            let lane = self.lane(tx, &job.queue)?;
            let run_at = match job.run_at {
                When::Now => now,
                When::After(delay) => now.saturating_add(Clock::millis(delay)),
                When::At(at) => Clock::at(at),
            };
            let (number, waiting, id) = {
                let index = &mut *self.index.lock();
                let waits = &index.lanes[lane];
                if waits.mode == Mode::Draining {
                    return Err(JobsError::Draining(job.queue.clone()));
                }
                let key = job.unique_key.as_deref();
                let waiting = key.and_then(|key| waits.keys.get(key).copied());
                let id = waiting.unwrap_or_else(|| {
                    // Of a write that is undone an id is lost; nobody has seen it.
                    index.last_id += 1;
                    JobId(index.last_id)
                });
                (waits.number, waiting, id)
            };
            if waiting.is_some() {
                self.bring_forward(tx, id, run_at)?;
                enqueued.push(Enqueued { id, is_new: false });
            } else {
                let tags = written(&job.tags);
                insert.execute(params![
                    id.0.cast_signed(),
                    number,
                    job.kind,
                    job.cost,
                    job.priority,
                    job.max_attempts,
                    run_at,
                    now,
                    job.timeout.map(Clock::millis),
                    job.unique_key,
                    tags,
                    job.payload.get(),
                    job.trace.map(|trace| trace.to_string()),
                ])?;
                let mut index = self.index.lock();
                index.wait(lane, id, run_at, job.priority, now);
                if let Some(key) = &job.unique_key {
                    index.change(Op::Key { lane, key: key.as_str().into(), id: Some(id) });
                }
                enqueued.push(Enqueued { id, is_new: true });
            }
            self.ring(lane, Woken::More);
        }
        Ok(enqueued)
    }

    /// A job that waits is due then, if that is earlier.
    fn bring_forward(&self, tx: &Connection, id: JobId, run_at: i64) -> Result<(), JobsError> {
        let Some(job) = self.brief(tx, id)? else { return Ok(()) };
        if run_at >= job.run_at {
            return Ok(());
        }
        let now = self.clock.now();
        let sql = "UPDATE job SET run_at = ?2, updated_at = ?3 WHERE id = ?1";
        tx.prepare_cached(sql)?.execute(params![id.0.cast_signed(), run_at, now])?;
        let mut index = self.index.lock();
        index.leave(job.lane, id, job.run_at, job.priority);
        index.wait(job.lane, id, run_at, job.priority, now);
        drop(index);
        self.ring(job.lane, Woken::More);
        Ok(())
    }

    fn brief(&self, tx: &Connection, id: JobId) -> Result<Option<Brief>, JobsError> {
        let sql = "SELECT queue, state, priority, run_at, attempts, max_attempts, unique_key,
                          connection IS NOT NULL, ended_at
                   FROM job WHERE id = ?1";
        let brief = |row: &Row<'_>| {
            let number = row.get(0)?;
            Ok(Brief {
                lane: self.index.lock().lane_of(number).expect("every job is in a queue"),
                state: state_of(row.get(1)?),
                priority: row.get(2)?,
                run_at: row.get(3)?,
                attempts: row.get(4)?,
                max_attempts: row.get(5)?,
                key: row.get(6)?,
                is_elsewhere: row.get(7)?,
                ended_at: row.get(8)?,
            })
        };
        let number = i64::try_from(id.0).unwrap_or(0);
        Ok(tx.prepare_cached(sql)?.query_row([number], brief).optional()?)
    }

    pub(super) fn take(&self, tx: &Connection, wanted: &Owned) -> Result<Taken, JobsError> {
        let now = self.clock.now();
        let sql = "SELECT kind, payload, cost, attempts, max_attempts, timeout, tags, unique_key, \
                          run_at, priority, trace
                   FROM job WHERE id = ?1";
        // Used before the index is locked, see `Tx`.
        let mut read = tx.prepare_cached(sql)?;
        let Some(lane) = self.index.lock().lane(&wanted.queue) else {
            return Ok(Taken { jobs: Vec::new(), rest: Some(Duration::MAX) });
        };
        self.lapse(tx, lane, now)?;
        let mut index = self.index.lock();
        index.promote(lane, now);
        if index.lanes[lane].mode == Mode::Paused {
            return Ok(Taken { jobs: Vec::new(), rest: Some(Duration::MAX) });
        }
        let worker: Arc<str> = wanted.worker.as_str().into();
        let token = fastrand::i64(1..);
        let lease = Clock::millis(wanted.lease).max(1);
        let (mut jobs, mut used, mut ids) = (Vec::new(), 0_u32, Vec::new());
        while used < wanted.room
            && let Some((&(_, id), _)) = index.lanes[lane].ready.first_key_value()
        {
            let mut key: Option<String> = None;
            let given = read.query_row([id.0.cast_signed()], |row| {
                key = row.get(7)?;
                let run_at: i64 = row.get(8)?;
                index.leave(lane, id, run_at, row.get(9)?);
                let tags: Option<String> = row.get(6)?;
                Ok(Given {
                    claim: Claim { id, token },
                    kind: row.get(0)?,
                    payload: json(row.get(1)?),
                    cost: row.get(2)?,
                    attempt: row.get::<_, u32>(3)? + 1,
                    max_attempts: row.get(4)?,
                    timeout: row.get::<_, Option<i64>>(5)?.map(Clock::delay),
                    tags: tags_of(tags.as_deref()),
                    trace: trace_of(row.get(10)?),
                    waited: Some(Clock::delay(now.saturating_sub(run_at))),
                })
            })?;
            if let Some(key) = key {
                index.change(Op::Key { lane, key: key.into(), id: None });
            }
            let run = Run {
                lane,
                token,
                until: now.saturating_add(lease),
                lease,
                started_at: now,
                worker: Arc::clone(&worker),
                cost: given.cost,
            };
            index.change(Op::Run { id, run: Some(run) });
            used = used.saturating_add(given.cost.min(wanted.capacity.max(1)));
            ids.extend_from_slice(&id.0.to_be_bytes());
            jobs.push(given);
        }
        let queue = &index.lanes[lane];
        let rest = if queue.ready.is_empty() {
            let later = queue.later.first_key_value().map(|((at, _), _)| *at);
            let lapse = queue.leases.first().map(|(until, _)| *until);
            let next = later.into_iter().chain(lapse).min();
            Some(next.map_or(Duration::MAX, |at| Clock::delay(at.saturating_sub(now))))
        } else {
            None
        };
        drop(index);
        if !jobs.is_empty() {
            let sql =
                "INSERT INTO job_take (token, worker, at, lease, ids) VALUES (?1, ?2, ?3, ?4, ?5)";
            let take = params![token, &*worker, now, lease, ids];
            tx.prepare_cached(sql)?.execute(take)?;
        }
        Ok(Taken { jobs, rest })
    }

    /// Has those wait again whose leases have lapsed.
    fn lapse(&self, tx: &Connection, lane: LaneNo, now: i64) -> Result<(), JobsError> {
        loop {
            let first = self.index.lock().lanes[lane].leases.first().copied();
            let Some((_, id)) = first.filter(|(until, _)| *until <= now) else { return Ok(()) };
            self.give_back(tx, id, &Back::Lapsed, now)?;
        }
    }

    /// Ends a run. Which take it was of, if that is over now.
    fn end_run(&self, tx: &Connection, id: JobId) -> Result<Option<Run>, JobsError> {
        let (run, is_last) = {
            let mut index = self.index.lock();
            let Some(run) = index.runs.get(&id).cloned() else { return Ok(None) };
            index.change(Op::Run { id, run: None });
            let is_last = !index.takes.contains_key(&run.token);
            (run, is_last)
        };
        if is_last {
            tx.prepare_cached("DELETE FROM job_take WHERE token = ?1")?.execute([run.token])?;
        }
        Ok(Some(run))
    }

    /// Has a job that runs wait again. After how long; nothing if it is over instead.
    fn give_back(
        &self,
        tx: &Connection,
        id: JobId,
        why: &Back<'_>,
        now: i64,
    ) -> Result<Settled, JobsError> {
        let (Some(run), Some(job)) = (self.end_run(tx, id)?, self.brief(tx, id)?) else {
            return Ok(Settled::Stale);
        };
        let counts = matches!(why, Back::Failed(..) | Back::Lapsed);
        let is_settled = !matches!(why, Back::Lapsed);
        let attempts = job.attempts + u32::from(counts);
        let (run_at, error) = match why {
            Back::Failed(after, error) => {
                (now.saturating_add(Clock::millis(*after)), Some(shortened(error, LONGEST_TEXT)))
            }
            Back::Snoozed(after) => (now.saturating_add(Clock::millis(*after)), None),
            Back::Released => (job.run_at, None),
            Back::Lapsed => {
                let error = format!("its worker {} went away", run.worker);
                if attempts >= job.max_attempts {
                    let error = format!("{error} in attempt {attempts} of {}", job.max_attempts);
                    let dead = Over {
                        state: JobState::Dead,
                        error: Some(&error),
                        result: None,
                        counts,
                        is_settled: false,
                    };
                    self.over(tx, id, &run, &dead)?;
                    return Ok(Settled::Parked);
                }
                (now, Some(error))
            }
        };
        let other = job
            .key
            .as_deref()
            .and_then(|key| self.index.lock().lanes[job.lane].keys.get(key).copied());
        if let Some(other) = other {
            self.bring_forward(tx, other, run_at)?;
            let instead = format!("job {other} of the same key goes on in its place");
            let error = error.map_or(instead.clone(), |error| format!("{error}; {instead}"));
            let cancelled = Over {
                state: JobState::Cancelled,
                error: Some(&error),
                result: None,
                counts,
                is_settled,
            };
            self.over(tx, id, &run, &cancelled)?;
            return Ok(Settled::Gone);
        }
        let sql = "UPDATE job SET attempts = ?2, run_at = ?3, updated_at = ?4, token = ?5,
                       worker = ?6, started_at = ?7, error = coalesce(?8, error)
                   WHERE id = ?1";
        let row = params![
            id.0.cast_signed(),
            attempts,
            run_at,
            now,
            token_of(&run, is_settled),
            &*run.worker,
            run.started_at,
            error,
        ];
        tx.prepare_cached(sql)?.execute(row)?;
        let mut index = self.index.lock();
        index.wait(job.lane, id, run_at, job.priority, now);
        if let Some(key) = job.key {
            index.change(Op::Key { lane: job.lane, key: key.into(), id: Some(id) });
        }
        drop(index);
        self.ring(job.lane, Woken::More);
        Ok(Settled::Again(Clock::delay(run_at.saturating_sub(now))))
    }

    /// A job that ran is over.
    fn over(
        &self,
        tx: &Connection,
        id: JobId,
        run: &Run,
        over: &Over<'_>,
    ) -> Result<(), JobsError> {
        let sql =
            "UPDATE job SET state = ?2, attempts = attempts + ?3, worker = ?4, started_at = ?5,
                       ended_at = ?6, updated_at = ?6, error = ?7, result = ?8, token = ?9,
                       progress = CASE WHEN ?2 = 2 THEN 1 ELSE progress END
                   WHERE id = ?1";
        let row = params![
            id.0.cast_signed(),
            state_number(over.state),
            over.counts,
            &*run.worker,
            run.started_at,
            self.clock.now(),
            over.error.map(|error| shortened(error, LONGEST_TEXT)),
            over.result,
            token_of(run, over.is_settled),
        ];
        tx.prepare_cached(sql)?.execute(row)?;
        self.index.lock().change(Op::Over { lane: run.lane, state: over.state, count: 1 });
        Ok(())
    }

    /// Takes note of how a job ended. Told again after an answer that was lost, it is answered as it was.
    pub(super) fn settle(
        &self,
        tx: &Connection,
        claim: Claim,
        fate: &Fate,
    ) -> Result<Settled, JobsError> {
        match self.settle_once(tx, claim, fate)? {
            Settled::Stale => self.said_before(tx, claim),
            settled => Ok(settled),
        }
    }

    /// The same, and what was settled before is refused.
    pub(super) fn settle_once(
        &self,
        tx: &Connection,
        claim: Claim,
        fate: &Fate,
    ) -> Result<Settled, JobsError> {
        let (now, id) = (self.clock.now(), claim.id);
        let held = |run: &Run| run.token == claim.token && run.until > now;
        if !self.index.lock().runs.get(&id).is_some_and(held) {
            return Ok(Settled::Stale);
        }
        let (state, error, result, settled) = match fate {
            Fate::Done { result } => {
                let result = result.as_ref().map(|result| result.get());
                (JobState::Done, None, result, Settled::Gone)
            }
            Fate::Dead { error } => (JobState::Dead, Some(&**error), None, Settled::Parked),
            Fate::Again { after, error } => {
                return self.give_back(tx, id, &Back::Failed(*after, error), now);
            }
            Fate::Snooze(after) => return self.give_back(tx, id, &Back::Snoozed(*after), now),
            Fate::Released => return self.give_back(tx, id, &Back::Released, now),
        };
        let Some(run) = self.end_run(tx, id)? else { return Ok(Settled::Stale) };
        self.over(tx, id, &run, &Over { state, error, result, counts: true, is_settled: true })?;
        Ok(settled)
    }

    /// What became of a claim that was settled before, if that still stands.
    fn said_before(&self, tx: &Connection, claim: Claim) -> Result<Settled, JobsError> {
        if self.index.lock().runs.contains_key(&claim.id) {
            return Ok(Settled::Stale);
        }
        let sql = "SELECT state, run_at FROM job WHERE id = ?1 AND token = ?2";
        let number = i64::try_from(claim.id.0).unwrap_or(0);
        let stands = |row: &Row<'_>| Ok((state_of(row.get(0)?), row.get::<_, i64>(1)?));
        let found = tx.prepare_cached(sql)?.query_row([number, claim.token], stands).optional()?;
        Ok(match found {
            None => Settled::Stale,
            Some((JobState::Done | JobState::Cancelled, _)) => Settled::Gone,
            Some((JobState::Dead, _)) => Settled::Parked,
            Some((JobState::Waiting | JobState::Running, run_at)) => {
                Settled::Again(Clock::delay(run_at.saturating_sub(self.clock.now())))
            }
        })
    }

    pub(super) fn note(&self, tx: &Connection, id: JobId, note: &Note) -> Result<(), JobsError> {
        let number = id.0.cast_signed();
        let log: Option<String> = if note.log.is_empty() {
            None
        } else {
            let sql = "SELECT log FROM job WHERE id = ?1";
            let log: Option<Option<String>> =
                tx.prepare_cached(sql)?.query_row([number], |row| row.get(0)).optional()?;
            Some(tail(&log.flatten().unwrap_or_default(), &note.log))
        };
        let sql =
            "UPDATE job SET progress = coalesce(?2, progress), message = coalesce(?3, message),
                       log = coalesce(?4, log), updated_at = ?5
                   WHERE id = ?1";
        let message = note.message.as_deref().map(|message| shortened(message, LONGEST_TEXT));
        let progress = note.progress.map(|progress| f64::from(progress.clamp(0.0, 1.0)));
        let row = params![number, progress, message, log, self.clock.now()];
        tx.prepare_cached(sql)?.execute(row)?;
        Ok(())
    }

    pub(super) fn retry(&self, tx: &Connection, id: JobId) -> Result<Change, JobsError> {
        let Some(job) = self.brief(tx, id)? else { return Ok(Change::NoSuch) };
        if !matches!(job.state, JobState::Dead | JobState::Cancelled) {
            return Ok(Change::Not(self.standing(id, job.state)));
        }
        is_here(id, &job)?;
        let waiting = job
            .key
            .as_deref()
            .and_then(|key| self.index.lock().lanes[job.lane].keys.get(key).copied());
        if let Some(waiting) = waiting {
            return Err(JobsError::Invalid(format!("job {waiting} waits under its key already")));
        }
        let now = self.clock.now();
        let sql = "UPDATE job SET state = 0, attempts = 0, run_at = ?2, updated_at = ?2,
                       token = -abs(token), ended_at = NULL, started_at = NULL, worker = NULL, progress = 0,
                       message = NULL
                   WHERE id = ?1";
        tx.prepare_cached(sql)?.execute(params![id.0.cast_signed(), now])?;
        let mut index = self.index.lock();
        index.change(Op::Over { lane: job.lane, state: job.state, count: -1 });
        index.wait(job.lane, id, now, job.priority, now);
        if let Some(key) = job.key {
            index.change(Op::Key { lane: job.lane, key: key.into(), id: Some(id) });
        }
        drop(index);
        self.ring(job.lane, Woken::More);
        Ok(Change::Made)
    }

    /// Where a job stands whose row has that state.
    fn standing(&self, id: JobId, state: JobState) -> JobState {
        let runs = state == JobState::Waiting && self.index.lock().runs.contains_key(&id);
        if runs { JobState::Running } else { state }
    }

    pub(super) fn cancel(&self, tx: &Connection, id: JobId) -> Result<Change, JobsError> {
        let Some(job) = self.brief(tx, id)? else { return Ok(Change::NoSuch) };
        if job.state.is_over() {
            return Ok(Change::Not(job.state));
        }
        is_here(id, &job)?;
        if let Some(run) = self.end_run(tx, id)? {
            let cancelled = Over {
                state: JobState::Cancelled,
                error: None,
                result: None,
                counts: true,
                is_settled: false,
            };
            self.over(tx, id, &run, &cancelled)?;
            self.ring(job.lane, Woken::Look);
            return Ok(Change::Made);
        }
        self.leave(id, &job);
        let sql = "UPDATE job SET state = 4, ended_at = ?2, updated_at = ?2, token = -abs(token)
                   WHERE id = ?1";
        tx.prepare_cached(sql)?.execute(params![id.0.cast_signed(), self.clock.now()])?;
        let cancelled = Op::Over { lane: job.lane, state: JobState::Cancelled, count: 1 };
        self.index.lock().change(cancelled);
        Ok(Change::Made)
    }

    /// Notes that a job which is kept elsewhere was called off.
    pub(super) fn cancel_record(
        &self,
        tx: &Connection,
        id: JobId,
        queued_at: Option<SystemTime>,
        why: Option<&str>,
    ) -> Result<Change, JobsError> {
        let Some(job) = self.brief(tx, id)? else { return Ok(Change::NoSuch) };
        if job.state.is_over() || !job.is_elsewhere {
            return Ok(Change::Not(self.standing(id, job.state)));
        }
        let sql = "UPDATE job SET state = 4, ended_at = ?2, updated_at = ?2,
                       queued_at = coalesce(?3, queued_at), error = coalesce(?4, error)
                   WHERE id = ?1";
        let row = params![id.0.cast_signed(), self.clock.now(), queued_at.map(Clock::at), why];
        tx.prepare_cached(sql)?.execute(row)?;
        let cancelled = Op::Over { lane: job.lane, state: JobState::Cancelled, count: 1 };
        self.index.lock().change(cancelled);
        Ok(Change::Made)
    }

    /// Notes that a job which was kept elsewhere is gone from there, and nobody told how it ended.
    pub(super) fn end_record(&self, tx: &Connection, id: JobId) -> Result<Change, JobsError> {
        self.cancel_record(tx, id, None, Some("it left the stream, and nobody here was told how"))
    }

    /// Ends a record, and leaves the number that its job had elsewhere to another.
    fn detach(&self, tx: &Connection, id: i64) -> Result<(), JobsError> {
        self.end_record(tx, JobId(id.unsigned_abs()))?;
        tx.prepare_cached("UPDATE job SET foreign_id = NULL WHERE id = ?1")?.execute([id])?;
        Ok(())
    }

    /// A job that waits no longer does.
    fn leave(&self, id: JobId, job: &Brief) {
        let mut index = self.index.lock();
        index.leave(job.lane, id, job.run_at, job.priority);
        if let Some(key) = &job.key {
            index.change(Op::Key { lane: job.lane, key: key.as_str().into(), id: None });
        }
    }

    pub(super) fn delete(&self, tx: &Connection, id: JobId) -> Result<Change, JobsError> {
        let Some(job) = self.brief(tx, id)? else { return Ok(Change::NoSuch) };
        if self.standing(id, job.state) == JobState::Running {
            return Ok(Change::Not(JobState::Running));
        }
        if !job.state.is_over() {
            is_here(id, &job)?;
        }
        let kept = self.clock.now().saturating_sub(Clock::millis(super::RECORDED));
        if job.is_elsewhere && job.ended_at.is_some_and(|at| at > kept) {
            return Err(JobsError::Invalid(format!(
                "job {id} was in a stream, and might be run again without its record: remove it an hour after its end"
            )));
        }
        if job.state == JobState::Waiting {
            self.leave(id, &job);
        } else {
            let op = Op::Over { lane: job.lane, state: job.state, count: -1 };
            self.index.lock().change(op);
        }
        let number = id.0.cast_signed();
        tx.prepare_cached("UPDATE job_last SET id = max(id, ?1)")?.execute([number])?;
        tx.prepare_cached("DELETE FROM job WHERE id = ?1")?.execute([number])?;
        Ok(Change::Made)
    }

    /// Removes what ended before these times: done or called off, dead, and kept elsewhere.
    pub(super) fn prune(
        &self,
        tx: &Connection,
        done: i64,
        dead: i64,
        elsewhere: i64,
    ) -> Result<u64, JobsError> {
        let sql = "DELETE FROM job WHERE id IN (
                       SELECT id FROM job WHERE queue = ?1 AND state = ?2 AND ended_at < ?3
                           AND ended_at IS NOT NULL
                           AND (connection IS NULL OR ended_at < ?5) LIMIT ?4)
                   RETURNING id";
        let mut prune = tx.prepare_cached(sql)?;
        let lanes: Vec<(LaneNo, i64)> = {
            let index = self.index.lock();
            index.lanes.iter().enumerate().map(|(lane, queue)| (lane, queue.number)).collect()
        };
        let (mut pruned, mut last) = (0_i64, 0_i64);
        for (lane, number) in lanes {
            for (state, before) in
                [(JobState::Done, done), (JobState::Cancelled, done), (JobState::Dead, dead)]
            {
                let left = PRUNED - pruned;
                let wanted = params![number, state_number(state), before, left, elsewhere];
                let ids = prune.query_map(wanted, |row| row.get::<_, i64>(0))?;
                let mut count = 0;
                for id in ids {
                    last = last.max(id?);
                    count += 1;
                }
                self.index.lock().change(Op::Over { lane, state, count: -count });
                pruned += count;
            }
        }
        tx.prepare_cached("UPDATE job_last SET id = max(id, ?1)")?.execute([last])?;
        Ok(pruned.unsigned_abs())
    }

    /// Writes down how jobs stand that are kept elsewhere. Whether each is so: what has ended stays as it is.
    pub(super) fn record(&self, tx: &Connection, jobs: &[Job]) -> Result<Vec<bool>, JobsError> {
        let find = "SELECT id, state, queued_at, updated_at, worker, started_at FROM job
                    WHERE connection = ?1 AND foreign_id = ?2 AND connection IS NOT NULL";
        let write = "INSERT OR REPLACE INTO job (id, queue, kind, state, cost, priority, attempts,
                         max_attempts, run_at, queued_at, updated_at, started_at, ended_at, timeout,
                         progress, worker, tags, message, error, payload, result, log, connection,
                         foreign_id, trace)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16,
                         ?17, ?18, ?19, ?20, ?21, ?22, ?23, ?24, ?25)";
        let (mut find, mut write) = (tx.prepare_cached(find)?, tx.prepare_cached(write)?);
        let mut answers = Vec::with_capacity(jobs.len());
        for job in jobs {
            let lane = self.lane(tx, &job.queue)?;
            let foreign = job.id.0.cast_signed();
            let known = |row: &Row<'_>| {
                Ok(Known {
                    id: row.get(0)?,
                    state: row.get(1)?,
                    queued_at: row.get(2)?,
                    updated_at: row.get(3)?,
                    worker: row.get(4)?,
                    started_at: row.get(5)?,
                })
            };
            let mut known = find.query_row(params![job.connection, foreign], known).optional()?;
            if let Some(another) = known.take_if(|known| known.is_another(job)) {
                self.detach(tx, another.id)?;
            }
            // That it was asked for may be told after it began.
            if known.is_some() && is_asked_for(job) {
                answers.push(false);
                continue;
            }
            if let Some(known) = known.as_ref().filter(|known| known.state < 10) {
                answers.push(known.is_told_again(job));
                continue;
            }
            answers.push(true);
            let (id, number) = {
                let mut index = self.index.lock();
                let id = known.as_ref().map_or_else(
                    || {
                        index.last_id += 1;
                        index.last_id.cast_signed()
                    },
                    |known| known.id,
                );
                (id, index.lanes[lane].number)
            };
            let state = match job.status {
                JobState::Waiting => 10,
                JobState::Running => 11,
                over => state_number(over),
            };
            write.execute(params![
                id,
                number,
                job.kind,
                state,
                job.cost,
                job.priority,
                job.attempts,
                job.max_attempts,
                Clock::at(job.run_at),
                Clock::at(job.queued_at),
                Clock::at(job.updated_at),
                job.started_at.map(Clock::at),
                job.ended_at.map(Clock::at),
                job.timeout.map(Clock::millis),
                f64::from(job.progress),
                job.worker,
                written(&job.tags),
                job.message,
                job.error,
                job.payload.get(),
                job.result.as_ref().map(|result| result.get()),
                job.log,
                job.connection,
                foreign,
                job.trace.map(|trace| trace.to_string()),
            ])?;
            if job.ended_at.is_some() {
                self.index.lock().change(Op::Over { lane, state: job.status, count: 1 });
            }
        }
        Ok(answers)
    }
}

/// As it is written to the row of a job: the one of a claim that was settled is as it was, so that it is known again.
fn token_of(run: &Run, is_settled: bool) -> i64 {
    if is_settled { run.token } else { -run.token }
}

/// What was told before of a job that is kept elsewhere.
struct Known {
    id: i64,
    state: i64,
    queued_at: i64,
    updated_at: i64,
    worker: Option<String>,
    started_at: Option<i64>,
}

impl Known {
    /// Ids are given again there, and that was another job of this one.
    fn is_another(&self, job: &Job) -> bool {
        let queued_at = Clock::at(job.queued_at);
        if is_asked_for(job) {
            // It was asked for after that; when exactly is known when it begins.
            return self.updated_at < queued_at;
        }
        let is_sure = self.state < 10 || self.started_at.is_some();
        is_sure && self.queued_at != queued_at
    }

    /// This very end was told before, and the answer got lost.
    fn is_told_again(&self, job: &Job) -> bool {
        job.status.is_over()
            && self.state == state_number(job.status)
            && self.worker == job.worker
            && self.started_at == job.started_at.map(Clock::at)
    }
}

/// Refuses what can only be done where a job is kept.
fn is_here(id: JobId, job: &Brief) -> Result<(), JobsError> {
    if job.is_elsewhere {
        let what = format!(
            "job {id} is or was kept in a stream, and this is only its record: ask for it anew"
        );
        return Err(JobsError::Invalid(what));
    }
    Ok(())
}

fn written(tags: &[String]) -> Option<String> {
    (!tags.is_empty()).then(|| serde_json::to_string(tags).expect("names can be written"))
}
