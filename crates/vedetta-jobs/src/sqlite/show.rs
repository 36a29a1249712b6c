//! What is shown.

use vedetta_core::{JobState, Trace};
use vedetta_db::Clock;
use vedetta_db::rusqlite::types::Value;
use vedetta_db::rusqlite::{self, Connection, OptionalExtension as _, Row, params_from_iter};

use super::index::{Lane, Run, over_index};
use super::{Desk, state_of};
use crate::job::{Filter, Job, JobId, Json, Page, QueueCounts};

/// What a list looks at in one go, in ids.
const WINDOW: u64 = 50_000;
/// Up to so many of a kind are looked up one by one, wherever they are.
const FEW: usize = 10_000;

/// The columns of a job, in the order that [`Desk::shown`] reads them.
const COLUMNS: &str = "id, queue, kind, state, cost, priority, attempts, max_attempts, run_at, \
    queued_at, updated_at, started_at, ended_at, timeout, progress, unique_key, worker, tags, \
    message, error, payload, result, log, token, connection, foreign_id, trace";

impl Desk {
    /// One job. Whether it runs is asked before its row: what ends between is then seen in the row.
    pub(super) fn one(&self, db: &Connection, id: JobId) -> rusqlite::Result<Option<Job>> {
        let run = self.index.lock().run(id).cloned();
        let sql = format!("SELECT {COLUMNS} FROM job WHERE id = ?1");
        let number = i64::try_from(id.0).unwrap_or(0);
        let mut find = db.prepare_cached(&sql)?;
        find.query_row([number], |row| self.shown(row, run.as_ref())).optional()
    }

    /// One of a list. What ended since the list was begun may look as if it waited, see [`Self::is_sure`].
    fn job(&self, row: &Row<'_>) -> rusqlite::Result<Job> {
        let id = JobId(row.get::<_, i64>(0)?.unsigned_abs());
        let run = self.index.lock().run(id).cloned();
        self.shown(row, run.as_ref())
    }

    /// Whether it stands where it seems to, or has gone on since its row was read.
    pub(super) fn is_sure(&self, job: &Job) -> bool {
        let index = self.index.lock();
        let waits = |lane| index.waits(lane, job.id, Clock::at(job.run_at), job.priority);
        job.status != JobState::Waiting || index.lane(&job.queue).is_some_and(waits)
    }

    fn shown(&self, row: &Row<'_>, run: Option<&Run>) -> rusqlite::Result<Job> {
        let id = JobId(row.get::<_, i64>(0)?.unsigned_abs());
        let (number, mut status): (i64, _) = (row.get(1)?, state_of(row.get(3)?));
        let mut attempts: u32 = row.get(6)?;
        let mut started_at: Option<i64> = row.get(11)?;
        let mut updated_at: i64 = row.get(10)?;
        let mut worker: Option<String> = row.get(16)?;
        let index = self.index.lock();
        let queue = index.lane_of(number).map(|lane| index.lanes[lane].name.clone());
        drop(index);
        let given_back = row.get::<_, Option<i64>>(23)?.map(i64::abs);
        let connection = match (row.get::<_, Option<String>>(24)?, row.get::<_, Option<i64>>(25)?) {
            (Some(connection), Some(id)) => format!("{connection}/{id}"),
            // Its number there is another job's by now.
            (Some(connection), None) => connection,
            (None, _) => "sqlite".into(),
        };
        let runs = |run: &&Run| status == JobState::Waiting && Some(run.token) != given_back;
        if let Some(run) = run.filter(runs) {
            status = JobState::Running;
            attempts += 1;
            started_at = Some(run.started_at);
            updated_at = updated_at.max(run.started_at);
            worker = Some(run.worker.to_string());
        }
        let tags: Option<String> = row.get(17)?;
        Ok(Job {
            id,
            kind: row.get(2)?,
            queue: queue.unwrap_or_default(),
            connection,
            status,
            payload: json(row.get(20)?),
            cost: row.get(4)?,
            priority: row.get(5)?,
            attempts,
            max_attempts: row.get(7)?,
            timeout: row.get::<_, Option<i64>>(13)?.map(Clock::delay),
            unique_key: row.get(15)?,
            tags: tags_of(tags.as_deref()),
            trace: trace_of(row.get(26)?),
            progress: row.get(14)?,
            message: row.get(18)?,
            log: row.get::<_, Option<String>>(22)?.unwrap_or_default(),
            result: row.get::<_, Option<String>>(21)?.map(json),
            error: row.get(19)?,
            worker,
            queued_at: Clock::time(row.get(9)?),
            run_at: Clock::time(row.get(8)?),
            started_at: started_at.map(Clock::time),
            ended_at: row.get::<_, Option<i64>>(12)?.map(Clock::time),
            updated_at: Clock::time(updated_at),
        })
    }

    /// The ids of those that wait or run, here and elsewhere, if they are few.
    fn few(&self, db: &Connection, status: JobState) -> rusqlite::Result<Option<Vec<i64>>> {
        // One more than few.
        let elsewhere = match status {
            JobState::Running => "SELECT id FROM job WHERE state > 9 AND state = 11 LIMIT 10001",
            JobState::Waiting => "SELECT id FROM job WHERE state > 9 AND state = 10 LIMIT 10001",
            _ => return Ok(None),
        };
        let mut elsewhere = db.prepare_cached(elsewhere)?;
        let elsewhere = elsewhere.query_map([], |row| row.get::<_, i64>(0))?;
        let elsewhere = elsewhere.collect::<rusqlite::Result<Vec<i64>>>()?;
        if elsewhere.len() > FEW {
            return Ok(None);
        }
        let index = self.index.lock();
        let mut ids: Vec<i64> = match status {
            JobState::Running => index.runs.keys().map(|id| id.0.cast_signed()).collect(),
            _ => {
                let count = |lane: &Lane| lane.ready.len() + lane.later.len();
                if index.lanes.iter().map(count).sum::<usize>() > FEW {
                    return Ok(None);
                }
                let waiting = index.lanes.iter().flat_map(|lane| {
                    lane.ready.keys().chain(lane.later.keys()).map(|(_, id)| id.0.cast_signed())
                });
                waiting.collect()
            }
        };
        ids.extend(elsewhere);
        ids.sort_unstable_by(|a, b| b.cmp(a));
        Ok(Some(ids))
    }

    pub(super) fn list(
        &self,
        db: &Connection,
        filter: &Filter,
        before: Option<JobId>,
        limit: usize,
    ) -> rusqlite::Result<Page> {
        let before = before.map_or(i64::MAX, |id| i64::try_from(id.0).unwrap_or(i64::MAX));
        let mut sql = format!("SELECT {COLUMNS} FROM job WHERE id < ?");
        let mut values = vec![Value::Integer(before)];
        if let Some(status) = filter.status {
            // SQLite takes an index only if its condition stands here word for word.
            sql += match status {
                JobState::Waiting => " AND state IN (0, 10)",
                JobState::Running => " AND state IN (0, 11)",
                JobState::Done => " AND state = 2",
                JobState::Dead => " AND state IN (3, 4) AND state = 3",
                JobState::Cancelled => " AND state IN (3, 4) AND state = 4",
            };
        }
        if let Some(queue) = &filter.queue {
            let number = {
                let index = self.index.lock();
                index.lane(queue).map(|lane| index.lanes[lane].number)
            };
            let Some(number) = number else { return Ok(Page::default()) };
            // Not by its index: what ended is in another order there.
            sql += " AND +queue = ?";
            values.push(Value::Integer(number));
        }
        if let Some(kind) = &filter.kind {
            sql += " AND kind = ?";
            values.push(Value::Text(kind.clone()));
        }
        if let Some(tag) = &filter.tag {
            // Names have no quotes in them.
            sql += " AND instr(tags, ?) > 0";
            values.push(Value::Text(format!("\"{tag}\"")));
        }
        if let Some(text) = &filter.text {
            sql += " AND (instr(payload, ?) > 0 OR instr(error, ?) > 0 OR instr(unique_key, ?) > 0
                          OR instr(kind, ?) > 0)";
            values.extend(std::iter::repeat_n(Value::Text(text.clone()), 4));
        }
        let fits = |job: &Job| filter.status.is_none_or(|status| job.status == status);
        let few = match filter.status {
            Some(status) => self.few(db, status)?,
            None => None,
        };
        if let Some(ids) = few {
            sql += " AND id = ?";
            let mut one = db.prepare_cached(&sql)?;
            let mut page = Page::default();
            for id in ids.into_iter().filter(|id| *id < before) {
                let values = values.iter().cloned().chain([Value::Integer(id)]);
                let job = one.query_row(params_from_iter(values), |row| self.job(row));
                if let Some(job) = job.optional()?.filter(fits) {
                    if page.jobs.len() == limit {
                        page.next = page.jobs.last().map(|job| job.id);
                        break;
                    }
                    page.jobs.push(job);
                }
            }
            return Ok(page);
        }
        let top: i64 =
            db.query_row("SELECT coalesce(max(id), 0) FROM job", [], |row| row.get(0))?;
        // What failed has an index by id; the rest is looked at in windows.
        let indexed = matches!(filter.status, Some(JobState::Dead | JobState::Cancelled));
        let narrowed = filter.text.is_some() || filter.kind.is_some() || filter.tag.is_some();
        let window = i64::try_from(WINDOW).expect("a small number");
        let floor = if indexed && !narrowed && filter.queue.is_none() {
            0
        } else {
            (before.min(top.saturating_add(1)) - window).max(0)
        };
        sql += " AND id >= ? ORDER BY id DESC LIMIT ?";
        values.push(Value::Integer(floor));
        let more = i64::try_from(limit).unwrap_or(i64::MAX - 1) + 1;
        values.push(Value::Integer(more));
        let mut list = db.prepare_cached(&sql)?;
        let rows = list.query_map(params_from_iter(values), |row| self.job(row))?;
        let mut page = Page::default();
        let mut seen = None;
        for (count, job) in rows.enumerate() {
            let job = job?;
            if count == limit {
                page.next = seen;
                return Ok(page);
            }
            seen = Some(job.id);
            if fits(&job) {
                page.jobs.push(job);
            }
        }
        page.next = (floor > 1).then(|| JobId(floor.unsigned_abs()));
        Ok(page)
    }

    pub(super) fn queues(&self, db: &Connection) -> rusqlite::Result<Vec<QueueCounts>> {
        /// Of the first so many that are ready the oldest is looked for.
        const LOOKED_AT: usize = 100;
        let sql = "SELECT queue, state, count(*), sum(cost) FROM job WHERE state > 9 GROUP BY state, queue";
        let mut elsewhere = db.prepare_cached(sql)?;
        let elsewhere = elsewhere.query_map([], |row| {
            let count = |column| row.get::<_, i64>(column).map(i64::unsigned_abs);
            Ok((row.get::<_, i64>(0)?, state_of(row.get(1)?), count(2)?, count(3)?))
        })?;
        let elsewhere = elsewhere.collect::<rusqlite::Result<Vec<_>>>()?;
        let (index, now) = (self.index.lock(), self.clock.now());
        let mut queues: Vec<QueueCounts> = index
            .lanes
            .iter()
            .map(|lane| {
                let due = lane.later.range(..=(now, JobId(u64::MAX)));
                let promoted = due.count() as u64;
                let oldest = lane.ready.values().take(LOOKED_AT).copied();
                let oldest = oldest.chain(lane.later.keys().next().map(|(at, _)| *at)).min();
                let oldest = oldest.filter(|at| *at <= now);
                let over = |state| lane.over[over_index(state)];
                let of = |state| {
                    let found =
                        elsewhere.iter().find(|(n, s, ..)| *n == lane.number && *s == state);
                    found.map_or((0, 0), |(_, _, count, cost)| (*count, *cost))
                };
                let (running, slots) = of(JobState::Running);
                QueueCounts {
                    name: lane.name.clone(),
                    mode: lane.mode,
                    ready: lane.ready.len() as u64 + promoted + of(JobState::Waiting).0,
                    scheduled: lane.later.len() as u64 - promoted,
                    running: lane.leases.len() as u64 + running,
                    done: over(JobState::Done),
                    dead: over(JobState::Dead),
                    cancelled: over(JobState::Cancelled),
                    oldest: oldest.map(|at| Clock::delay(now.saturating_sub(at))),
                    slots: lane.slots + slots,
                }
            })
            .collect();
        queues.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(queues)
    }
}

/// What was stored was JSON.
pub(super) fn json(text: String) -> Json {
    serde_json::value::RawValue::from_string(text)
        .unwrap_or_else(|_| serde_json::value::RawValue::NULL.to_owned())
}

/// What was stored was one.
pub(super) fn trace_of(text: Option<String>) -> Option<Trace> {
    text?.parse().ok()
}

pub(super) fn tags_of(text: Option<&str>) -> Vec<String> {
    text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use vedetta_db::rusqlite::Connection;

    use crate::sqlite::SCHEMA;

    /// SQLite uses an index with a condition only where it finds that very condition in the query.
    #[test]
    fn lists_of_what_failed_and_of_what_is_elsewhere_use_their_indexes() {
        let db = Connection::open_in_memory().unwrap();
        SCHEMA.steps.iter().for_each(|step| db.execute_batch(step).unwrap());
        for (index, sql) in [
            ("job_failed", "id < 9 AND state IN (3, 4) AND state = 3 AND id >= 0 ORDER BY id DESC"),
            ("job_failed", "id < 9 AND state IN (3, 4) AND state = 4 AND id >= 0 ORDER BY id DESC"),
            ("job_elsewhere", "state > 9 AND state = 11 LIMIT 10001"),
            ("job_elsewhere", "state > 9 AND state = 10 LIMIT 10001"),
        ] {
            let explain = format!("EXPLAIN QUERY PLAN SELECT id FROM job WHERE {sql}");
            let plan: String = db.query_row(&explain, [], |row| row.get(3)).unwrap();
            assert!(plan.contains(index), "{sql}: {plan}");
        }
    }
}
