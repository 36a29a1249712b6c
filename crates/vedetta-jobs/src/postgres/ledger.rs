//! What is shown, and changed by hand. Its statements are planned anew each time.

use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use vedetta_core::JobState;
use vedetta_core::queue::Woken;
use vedetta_db::postgres::tokio_postgres::error::SqlState;
use vedetta_db::postgres::tokio_postgres::types::ToSql;
use vedetta_db::postgres::tokio_postgres::{Error, IsolationLevel, Row};
use vedetta_db::postgres::{Client, GenericClient};

use super::{
    CANCELLED, Counted, DEAD, DONE, Desk, PostgresJobs, RUNNING, delay, json, micros, natural,
    number, since_epoch, tags, trace,
};
use crate::job::{
    Change, Enqueued, Filter, Job, JobId, JobsError, Mode, NewJob, Page, QueueCounts, check_name,
};
use crate::port::Ledger;

/// Jobs that one pruning removes of each kind.
const PRUNED: i64 = 1_000;
/// Jobs of one table that a list looks at in one go; fewer if it looks into their payloads.
const LOOKED_AT: i64 = 20_000;
const READ: i64 = 2_000;
/// Jobs of one page.
const LONGEST_PAGE: u32 = 1_000;
/// A count that takes longer is used for a while: so many times as long.
const QUICK: Duration = Duration::from_millis(50);
const WHILE: u32 = 10;

/// The columns of a job as [`job`] reads them, after its state and times.
macro_rules! columns {
    () => {
        "id, queue, made_at, run_at, started_at, payload, cost, priority, attempts, max_attempts, timeout,
         unique_key, tags, progress, message, log, error, worker, kind, trace"
    };
}

/// Of a job that waits or runs.
const HERE: &str = concat!(
    columns!(),
    ", CASE WHEN state = 2 AND wake_at > now() THEN 2 ELSE 1 END AS state, changed_at,
       NULL::timestamptz AS ended_at, NULL::text AS result"
);

/// Of one that is over.
const OVER: &str =
    concat!(columns!(), ", state::integer AS state, ended_at AS changed_at, ended_at, result");

/// Whether somebody holds it.
const IS_HELD: &str = "(state = 2 AND wake_at > now())";

fn state(number: i16) -> JobState {
    match number {
        RUNNING => JobState::Running,
        DEAD => JobState::Dead,
        CANCELLED => JobState::Cancelled,
        DONE => JobState::Done,
        _ => JobState::Waiting,
    }
}

fn mode(number: i16) -> Mode {
    match number {
        1 => Mode::Paused,
        2 => Mode::Draining,
        _ => Mode::Open,
    }
}

fn job(row: &Row) -> Result<Job, Error> {
    let number: i32 = row.try_get("state")?;
    Ok(Job {
        id: id(row.try_get("id")?),
        kind: row.try_get("kind")?,
        queue: row.try_get("name")?,
        connection: "postgres".into(),
        status: state(i16::try_from(number).unwrap_or(0)),
        payload: json(row.try_get("payload")?),
        cost: natural(row.try_get("cost")?),
        priority: row.try_get("priority")?,
        attempts: natural(row.try_get("attempts")?),
        max_attempts: natural(row.try_get("max_attempts")?),
        timeout: row.try_get::<_, Option<i64>>("timeout")?.map(delay),
        unique_key: row.try_get("unique_key")?,
        tags: tags(row.try_get("tags")?),
        trace: trace(row.try_get("trace")?),
        progress: row.try_get("progress")?,
        message: row.try_get("message")?,
        log: row.try_get::<_, Option<String>>("log")?.unwrap_or_default(),
        result: row.try_get::<_, Option<String>>("result")?.map(json),
        error: row.try_get("error")?,
        worker: row.try_get("worker")?,
        queued_at: row.try_get("made_at")?,
        run_at: row.try_get("run_at")?,
        started_at: row.try_get("started_at")?,
        ended_at: row.try_get("ended_at")?,
        updated_at: row.try_get("changed_at")?,
    })
}

fn id(number: i64) -> JobId {
    JobId(number.unsigned_abs())
}

/// Puts counts of jobs that are over together, so that there are few to sum.
pub(super) async fn sum_up(db: &impl GenericClient) -> Result<(), Error> {
    let sql = "
        WITH gone AS (
            DELETE FROM vedetta_job_tally WHERE ctid = ANY (ARRAY (
                SELECT ctid FROM vedetta_job_tally LIMIT 10000 FOR UPDATE SKIP LOCKED))
            RETURNING queue, state, count)
        INSERT INTO vedetta_job_tally
        SELECT queue, state, sum(count) FROM gone GROUP BY queue, state";
    db.execute(sql, &[]).await?;
    Ok(())
}

/// Where a list looks: what of a table, in which order it comes, and what it finds there.
struct Place {
    /// `$1` is the id to go on from.
    rows: &'static str,
    columns: &'static str,
}

const HERE_ALL: Place = Place { rows: "vedetta_job WHERE id < $1 ORDER BY id DESC", columns: HERE };
/// By the index of what wakes up: few run, whatever waits.
const HERE_RUNNING: Place = Place {
    rows: "(SELECT * FROM vedetta_job
            WHERE state = 2 AND queue = ANY (ARRAY (SELECT queue FROM vedetta_job_queue))
                  AND wake_at > now() OFFSET 0) AS running
           WHERE id < $1 ORDER BY id DESC",
    columns: HERE,
};
const OVER_ALL: Place =
    Place { rows: "vedetta_job_over WHERE id < $1 ORDER BY id DESC", columns: OVER };
const OVER_DEAD: Place = Place {
    rows: "vedetta_job_over WHERE id < $1 AND state = 3 ORDER BY state DESC, id DESC",
    columns: OVER,
};
const OVER_CANCELLED: Place = Place {
    rows: "vedetta_job_over WHERE id < $1 AND state = 4 ORDER BY state DESC, id DESC",
    columns: OVER,
};

impl Desk {
    async fn list(
        &self,
        client: &mut Client,
        filter: &Filter,
        before: Option<JobId>,
        limit: u32,
    ) -> Result<Page, Error> {
        let limit = limit.clamp(1, LONGEST_PAGE);
        let before = before.map_or(i64::MAX, |id| i64::try_from(id.0).unwrap_or(i64::MAX));
        let looked_at = if filter.text.is_some() { READ } else { LOOKED_AT };
        let one_more = i64::from(limit) + 1;
        let mut params: Vec<&(dyn ToSql + Sync)> = vec![&before, &looked_at, &one_more];
        let mut fits: Vec<String> = Vec::new();

        let queue;
        if let Some(name) = &filter.queue {
            let Some(found) = self.queue(&*client, name).await? else {
                return Ok(Page::default());
            };
            queue = found;
            params.push(&queue);
            fits.push(format!("queue = ${}", params.len()));
        }
        if let Some(kind) = &filter.kind {
            params.push(kind);
            fits.push(format!("kind = ${}", params.len()));
        }
        if let Some(tag) = &filter.tag {
            params.push(tag);
            fits.push(format!("${} = ANY (string_to_array(tags, ','))", params.len()));
        }
        if let Some(text) = &filter.text {
            params.push(text);
            let found = ["payload", "error", "unique_key", "kind"]
                .map(|field| format!("strpos({field}, ${}) > 0", params.len()));
            fits.push(format!("({})", found.join(" OR ")));
        }
        let places: &[Place] = match filter.status {
            None => &[HERE_ALL, OVER_ALL],
            Some(JobState::Waiting) => {
                fits.push(format!("NOT {IS_HELD}"));
                &[HERE_ALL]
            }
            Some(JobState::Running) => &[HERE_RUNNING],
            Some(JobState::Done) => {
                fits.push(format!("state = {DONE}"));
                &[OVER_ALL]
            }
            Some(JobState::Dead) => &[OVER_DEAD],
            Some(JobState::Cancelled) => &[OVER_CANCELLED],
        };
        let is_search = !fits.is_empty();
        let fits = if is_search { fits.join(" AND ") } else { "true".into() };

        // Both tables as they are at one moment: a job goes from one to the other.
        let tx = client.build_transaction().isolation_level(IsolationLevel::RepeatableRead);
        let tx = tx.read_only(true).start().await?;
        tx.batch_execute("SET LOCAL enable_seqscan = off; SET LOCAL jit = off").await?;
        let found = places.iter().map(|Place { rows, columns }| {
            format!(
                "(SELECT {columns} FROM (SELECT * FROM {rows} LIMIT $2) AS looked_at
                  WHERE {fits} ORDER BY id DESC LIMIT $3)"
            )
        });
        let found = found.collect::<Vec<_>>().join(" UNION ALL ");
        let sql = format!(
            "SELECT j.*, q.name FROM ({found}) AS j JOIN vedetta_job_queue AS q USING (queue)
             ORDER BY j.id DESC LIMIT $3"
        );
        let rows = tx.query(&sql, &params).await?;
        let mut jobs = rows.iter().map(job).collect::<Result<Vec<Job>, Error>>()?;

        // Down to this one all were looked at.
        let mut floor: Option<JobId> = None;
        for Place { rows, .. } in places.iter().filter(|_| is_search) {
            let sql = format!(
                "SELECT min(id), count(*) FROM (SELECT id FROM {rows} LIMIT $2) AS looked_at"
            );
            let row = tx.query_one(&sql, &[&before, &looked_at]).await?;
            if row.try_get::<_, i64>(1)? >= looked_at {
                let last = row.try_get::<_, Option<i64>>(0)?.map(id);
                floor = floor.max(last);
            }
        }
        tx.commit().await?;
        let mut next = floor;
        if let Some(floor) = floor {
            jobs.retain(|job| job.id >= floor);
        }
        if jobs.len() > limit as usize {
            jobs.truncate(limit as usize);
            next = jobs.last().map(|job| job.id);
        }
        Ok(Page { jobs, next })
    }

    async fn count(&self, client: &Client) -> Result<Vec<QueueCounts>, Error> {
        let sql = "
            SELECT name, mode, coalesce(ready, 0), coalesce(scheduled, 0), coalesce(running, 0),
                   coalesce(done, 0)::bigint, coalesce(dead, 0)::bigint, coalesce(cancelled, 0)::bigint,
                   (extract(epoch FROM now() - oldest) * 1000000)::bigint, coalesce(slots, 0)::bigint
            FROM vedetta_job_queue LEFT JOIN (
                SELECT queue,
                       count(*) FILTER (WHERE state = 1 OR wake_at <= now()) AS ready,
                       count(*) FILTER (WHERE state = 0 AND wake_at > now()) AS scheduled,
                       count(*) FILTER (WHERE state = 2 AND wake_at > now()) AS running,
                       min(run_at) FILTER (WHERE state = 1 OR wake_at <= now()) AS oldest,
                       sum(cost) FILTER (WHERE state = 2 AND wake_at > now()) AS slots
                FROM vedetta_job GROUP BY queue
            ) AS here USING (queue) LEFT JOIN (
                SELECT queue,
                       sum(count) FILTER (WHERE state = 5) AS done,
                       sum(count) FILTER (WHERE state = 3) AS dead,
                       sum(count) FILTER (WHERE state = 4) AS cancelled
                FROM vedetta_job_tally GROUP BY queue
            ) AS over USING (queue)
            ORDER BY name";
        let count =
            |row: &Row, column| Ok::<_, Error>(row.try_get::<_, i64>(column)?.unsigned_abs());
        let rows = client.query(sql, &[]).await?;
        let queue = |row: &Row| {
            Ok(QueueCounts {
                name: row.try_get(0)?,
                mode: mode(row.try_get(1)?),
                ready: count(row, 2)?,
                scheduled: count(row, 3)?,
                running: count(row, 4)?,
                done: count(row, 5)?,
                dead: count(row, 6)?,
                cancelled: count(row, 7)?,
                oldest: row.try_get::<_, Option<i64>>(8)?.map(delay),
                slots: count(row, 9)?,
            })
        };
        rows.iter().map(queue).collect()
    }
}

/// Why a change could not be made.
async fn standing(db: &impl GenericClient, id: JobId) -> Result<Change, Error> {
    let sql = format!(
        "SELECT CASE WHEN {IS_HELD} THEN 2 ELSE 1 END::smallint FROM vedetta_job WHERE id = $1
         UNION ALL SELECT state FROM vedetta_job_over WHERE id = $1"
    );
    let found = db.query_opt(&sql, &[&number(id)]).await?;
    Ok(match found {
        Some(row) => Change::Not(state(row.try_get(0)?)),
        None => Change::NoSuch,
    })
}

#[async_trait]
impl Ledger for PostgresJobs {
    async fn job(&self, id: JobId) -> Result<Option<Job>, JobsError> {
        let client = self.desk.db.client().await?;
        let sql = format!(
            "SELECT j.*, q.name FROM (
                 SELECT {HERE} FROM vedetta_job WHERE id = $1
                 UNION ALL SELECT {OVER} FROM vedetta_job_over WHERE id = $1
             ) AS j JOIN vedetta_job_queue AS q USING (queue)"
        );
        let found = client.query_opt(&sql, &[&number(id)]).await?;
        Ok(found.as_ref().map(job).transpose()?)
    }

    async fn list(
        &self,
        filter: &Filter,
        before: Option<JobId>,
        limit: u32,
    ) -> Result<Page, JobsError> {
        let mut client = self.desk.db.client().await?;
        // What no row can hold would be refused.
        let asked = [&filter.queue, &filter.kind, &filter.tag, &filter.text];
        if asked.into_iter().flatten().any(|text| text.contains('\0')) {
            return Ok(Page::default());
        }
        Ok(self.desk.list(&mut client, filter, before, limit).await?)
    }

    async fn retry(&self, id: JobId) -> Result<Change, JobsError> {
        let client = self.desk.db.client().await?;
        let sql = "
            WITH gone AS (
                DELETE FROM vedetta_job_over WHERE id = $1 AND state IN (3, 4) RETURNING *
            ), counted AS (
                INSERT INTO vedetta_job_tally SELECT queue, state, -1 FROM gone
            ), put AS (
                INSERT INTO vedetta_job (id, rank, wake_at, run_at, made_at, changed_at, queue, cost,
                                         max_attempts, state, priority, timeout, kind, payload,
                                         unique_key, tags, error, log, trace)
                SELECT id, now() - priority * interval '1 minute', now(), now(), made_at, now(), queue,
                       cost, max_attempts, 1, priority, timeout, kind, payload, unique_key, tags, error,
                       log, trace
                FROM gone
            )
            SELECT name FROM gone JOIN vedetta_job_queue USING (queue)";
        match client.query_opt(sql, &[&number(id)]).await {
            Ok(Some(row)) => {
                self.desk.tell(&client, &[row.try_get(0)?], Woken::More).await?;
                Ok(Change::Made)
            }
            Ok(None) => Ok(standing(&client, id).await?),
            Err(error) if error.code() == Some(&SqlState::UNIQUE_VIOLATION) => {
                Err(JobsError::Invalid("another job waits under its key already".into()))
            }
            Err(error) => Err(error.into()),
        }
    }

    async fn cancel(&self, id: JobId) -> Result<Change, JobsError> {
        let client = self.desk.db.client().await?;
        let sql = "
            WITH gone AS (
                DELETE FROM vedetta_job WHERE id = $1 RETURNING *
            ), moved AS (
                INSERT INTO vedetta_job_over
                SELECT id, run_at, made_at, now(), 0, queue, cost, attempts, max_attempts, progress, 4,
                       priority, started_at, timeout, kind, payload, unique_key, tags, worker, message,
                       error, log, NULL, trace
                FROM gone
            ), counted AS (
                INSERT INTO vedetta_job_tally SELECT queue, 4, 1 FROM gone
            )
            SELECT name, state = 2 FROM gone JOIN vedetta_job_queue USING (queue)";
        let Some(row) = client.query_opt(sql, &[&number(id)]).await? else {
            return Ok(standing(&client, id).await?);
        };
        if row.try_get(1)? {
            self.desk.tell(&client, &[row.try_get(0)?], Woken::Look).await?;
        }
        Ok(Change::Made)
    }

    async fn delete(&self, id: JobId) -> Result<Change, JobsError> {
        let client = self.desk.db.client().await?;
        let sql = format!(
            "WITH here AS (
                 DELETE FROM vedetta_job WHERE id = $1 AND NOT {IS_HELD} RETURNING id
             ), over AS (
                 DELETE FROM vedetta_job_over WHERE id = $1 RETURNING queue, state
             ), counted AS (
                 INSERT INTO vedetta_job_tally SELECT queue, state, -1 FROM over
             )
             SELECT FROM here UNION ALL SELECT FROM over"
        );
        if client.query_opt(&sql, &[&number(id)]).await?.is_some() {
            return Ok(Change::Made);
        }
        Ok(standing(&client, id).await?)
    }

    /// Where there are so many that counting them takes a while, what was counted is told for a while; but
    /// how many are over is known without counting.
    async fn queues(&self) -> Result<Vec<QueueCounts>, JobsError> {
        let mut counted = self.desk.counted.lock().await;
        if let Some(counted) = counted.as_ref().filter(|counted| counted.until > Instant::now()) {
            return Ok(counted.queues.clone());
        }
        let began = Instant::now();
        let queues = self.desk.count(&self.desk.db.client().await?).await?;
        let (ended, took) = (Instant::now(), began.elapsed());
        let keep = || Counted { until: ended + took * WHILE, queues: queues.clone() };
        *counted = (took > QUICK).then(keep);
        Ok(queues)
    }

    async fn set_mode(&self, queue: &str, mode: Mode) -> Result<(), JobsError> {
        check_name("queue", queue)?;
        let client = self.desk.db.client().await?;
        let sql = "INSERT INTO vedetta_job_queue (name, mode) VALUES ($1, $2)
                   ON CONFLICT (name) DO UPDATE SET mode = excluded.mode";
        let number: i16 = match mode {
            Mode::Open => 0,
            Mode::Paused => 1,
            Mode::Draining => 2,
        };
        client.execute(sql, &[&queue, &number]).await?;
        *self.desk.counted.lock().await = None;
        Ok(self.desk.tell(&client, &[queue], Woken::More).await?)
    }

    async fn prune(&self, done: Duration, dead: Duration) -> Result<u64, JobsError> {
        let client = self.desk.db.client().await?;
        let sql = "
            WITH gone AS (
                DELETE FROM vedetta_job_over WHERE ctid = ANY (ARRAY (
                    SELECT ctid FROM vedetta_job_over
                    WHERE state = $1 AND ended_at < now() - $2::bigint * interval '1 microsecond'
                    ORDER BY ended_at LIMIT $3 FOR UPDATE SKIP LOCKED))
                RETURNING queue
            ), counted AS (
                INSERT INTO vedetta_job_tally SELECT queue, $1, -count(*) FROM gone GROUP BY queue
            )
            SELECT count(*) FROM gone";
        let mut pruned = 0;
        for (state, age) in [(DONE, done), (CANCELLED, done), (DEAD, dead)] {
            let row = client.query_one(sql, &[&state, &micros(age), &PRUNED]).await?;
            pruned += row.try_get::<_, i64>(0)?.unsigned_abs();
        }
        sum_up(&client).await?;
        Ok(pruned)
    }

    async fn tick(
        &self,
        name: &str,
        at: SystemTime,
        job: &NewJob,
    ) -> Result<Option<Enqueued>, JobsError> {
        let mut client = self.desk.db.client().await?;
        let tx = client.transaction().await?;
        let sql = "
            INSERT INTO vedetta_job_tick AS t (name, at)
            VALUES ($1, timestamptz 'epoch' + $2::bigint * interval '1 microsecond')
            ON CONFLICT (name) DO UPDATE SET at = excluded.at WHERE t.at < excluded.at";
        if tx.execute(sql, &[&name, &since_epoch(at)]).await? == 0 {
            return Ok(None);
        }
        let enqueued = self.enqueue_in(&tx, std::slice::from_ref(job)).await?.pop();
        tx.commit().await?;
        Ok(enqueued)
    }

    async fn last_tick(&self, name: &str) -> Result<Option<SystemTime>, JobsError> {
        let client = self.desk.db.client().await?;
        let sql = "SELECT at FROM vedetta_job_tick WHERE name = $1";
        let found = client.query_opt(sql, &[&name]).await?;
        Ok(found.map(|row| row.try_get(0)).transpose()?)
    }
}
