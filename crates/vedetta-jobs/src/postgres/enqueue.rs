//! Taking jobs on: those of many callers with one statement, and one commit.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use vedetta_core::queue::Woken;
use vedetta_db::postgres::tokio_postgres::Error;
use vedetta_db::postgres::tokio_postgres::types::ToSql;
use vedetta_db::postgres::{Client, GenericClient, PostgresError, Transaction};

use super::{Desk, TELL, micros, since_epoch, tell};
use crate::job::{Enqueued, JobId, JobsError, NewJob, When};

/// Who asks for more at once has a statement of their own.
pub(super) const FEW: usize = 50;
/// Jobs of one statement for many callers.
const GROUP: usize = 1_000;

/// The columns of jobs as arrays, as rows again; with when they are due.
macro_rules! input {
    () => {
        "(SELECT *, coalesce(timestamptz 'epoch' + time * interval '1 microsecond',
                             now() + delay * interval '1 microsecond') AS at
          FROM unnest($1::integer[], $2::text[], $3::text[], $4::integer[], $5::smallint[],
                      $6::bigint[], $7::bigint[], $8::integer[], $9::bigint[], $10::text[],
                      $11::text[])
               AS u (queue, kind, payload, cost, priority, time, delay, max_attempts, timeout, tags,
                     trace)
          WHERE NOT EXISTS (SELECT FROM vedetta_job_queue AS q
                            WHERE q.queue = ANY ($1) AND q.mode = 2)) AS u"
    };
}

/// Jobs without keys. Nothing is stored, and nothing returned, if one of the queues is draining. Ids are given in
/// the order of the jobs.
const ENQUEUE: &str = concat!(
    "INSERT INTO vedetta_job (rank, wake_at, run_at, made_at, changed_at, queue, cost, max_attempts,
                              state, priority, timeout, kind, payload, tags, trace)
     SELECT at - priority * interval '1 minute', at, at, now(), now(), queue, cost, max_attempts,
            CASE WHEN at > now() THEN 0 ELSE 1 END, priority, timeout, kind, payload, tags, trace
     FROM ",
    input!(),
    " RETURNING id"
);

/// The same where some have keys; each also says which is the first of its key among them, itself or another.
/// They are stored in the order of their keys, so that no two who do this wait for each other.
const ENQUEUE_KEYED: &str = "
    WITH input AS MATERIALIZED (
        SELECT *,
               coalesce(timestamptz 'epoch' + time * interval '1 microsecond',
                        now() + delay * interval '1 microsecond') AS at
        FROM unnest($1::integer[], $2::text[], $3::text[], $4::integer[], $5::smallint[],
                    $6::bigint[], $7::bigint[], $8::integer[], $9::bigint[], $10::text[],
                    $11::text[], $12::text[], $13::bigint[]) WITH ORDINALITY
             AS u (queue, kind, payload, cost, priority, time, delay, max_attempts, timeout, tags,
                   trace, key, first, place)
        WHERE NOT EXISTS (SELECT FROM vedetta_job_queue AS q WHERE q.queue = ANY ($1) AND q.mode = 2)
    ), new AS MATERIALIZED (
        SELECT nextval(pg_get_serial_sequence('vedetta_job', 'id')) AS id, *
        FROM (SELECT *, min(at) OVER (PARTITION BY first) AS earliest FROM input) AS input
        WHERE place = first ORDER BY place
    ), put AS (
        INSERT INTO vedetta_job AS j (id, rank, wake_at, run_at, made_at, changed_at, queue, cost,
                                      max_attempts, state, priority, timeout, kind, payload, tags,
                                      trace, unique_key)
        SELECT id, earliest - priority * interval '1 minute', earliest, earliest, now(), now(), queue,
               cost, max_attempts, CASE WHEN earliest > now() THEN 0 ELSE 1 END, priority, timeout,
               kind, payload, tags, trace, key
        FROM new ORDER BY queue, key COLLATE \"C\"
        ON CONFLICT (queue, unique_key) WHERE unique_key IS NOT NULL AND state <> 2 DO UPDATE SET
            run_at = least(j.run_at, excluded.run_at),
            wake_at = least(j.run_at, excluded.run_at),
            rank = least(j.run_at, excluded.run_at) - j.priority * interval '1 minute',
            state = greatest(j.state, excluded.state),
            changed_at = CASE WHEN j.run_at > excluded.run_at THEN now() ELSE j.changed_at END
        RETURNING id, queue, unique_key
    )
    SELECT new.first, coalesce(put.id, new.id), put.id IS NULL OR put.id = new.id
    FROM new LEFT JOIN put ON put.queue = new.queue AND put.unique_key = new.key";

/// What a caller asks for.
pub(super) struct Asked {
    jobs: Vec<NewJob>,
    answer: oneshot::Sender<Result<Vec<Enqueued>, JobsError>>,
}

impl Asked {
    pub(super) fn new(
        jobs: Vec<NewJob>,
    ) -> (Self, oneshot::Receiver<Result<Vec<Enqueued>, JobsError>>) {
        let (answer, answered) = oneshot::channel();
        (Self { jobs, answer }, answered)
    }

    fn answer(self, answer: Result<Vec<Enqueued>, JobsError>) {
        // Who asked may have gone meanwhile.
        let _ = self.answer.send(answer);
    }
}

impl Desk {
    /// Stores what is asked for while the last is stored, with one statement.
    pub(super) async fn gather(self: Arc<Self>, mut asked: mpsc::UnboundedReceiver<Asked>) {
        while let Some(first) = asked.recv().await {
            let mut count = first.jobs.len();
            let mut group = vec![first];
            while count < GROUP
                && let Ok(more) = asked.try_recv()
            {
                count += more.jobs.len();
                group.push(more);
            }
            let is_alone = group.len() == 1;
            if let Some(left) = self.enqueue_group(group, is_alone).await {
                // One of them cannot be stored, and the others must not suffer from it.
                for asked in left {
                    self.enqueue_group(vec![asked], true).await;
                }
            }
        }
    }

    /// Answers all of them, or gives them back if the database refuses one and they are not `alone`.
    async fn enqueue_group(&self, mut group: Vec<Asked>, alone: bool) -> Option<Vec<Asked>> {
        while !group.is_empty() {
            let jobs: Vec<&NewJob> = group.iter().flat_map(|asked| &asked.jobs).collect();
            let stored = async {
                let client = self.db.client().await?;
                match self.enqueue_all(&client, &jobs).await? {
                    Some(enqueued) => Ok(Ok(enqueued)),
                    None => Ok(Err(draining(&client).await?)),
                }
            };
            match stored.await {
                Ok(Ok(enqueued)) => {
                    let mut enqueued = enqueued.into_iter();
                    for asked in group {
                        let some = enqueued.by_ref().take(asked.jobs.len()).collect();
                        asked.answer(Ok(some));
                    }
                    return None;
                }
                Ok(Err(draining)) => {
                    let mut left = Vec::with_capacity(group.len());
                    for asked in group {
                        match asked.jobs.iter().find(|job| draining.contains(&job.queue)) {
                            None => left.push(asked),
                            Some(job) => {
                                let refused = JobsError::Draining(job.queue.clone());
                                asked.answer(Err(refused));
                            }
                        }
                    }
                    group = left;
                }
                Err(error) => {
                    let error: PostgresError = error;
                    if error.stood_in_the_way() {
                        continue;
                    }
                    if !error.is_transient() && !alone {
                        return Some(group);
                    }
                    let error = Arc::new(error);
                    for asked in group {
                        let error = Box::new(Arc::clone(&error));
                        asked.answer(Err(if error.is_transient() {
                            JobsError::Unavailable(error)
                        } else {
                            JobsError::Failed(error)
                        }));
                    }
                    return None;
                }
            }
        }
        None
    }

    /// Stores these with a statement of their own.
    pub(super) async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, JobsError> {
        let client = self.db.client().await?;
        let jobs: Vec<&NewJob> = jobs.iter().collect();
        loop {
            match self.enqueue_all(&client, &jobs).await.map_err(PostgresError::from) {
                Ok(Some(enqueued)) => return Ok(enqueued),
                Ok(None) => {}
                Err(error) if error.stood_in_the_way() => continue,
                Err(error) => return Err(error.into()),
            }
            let draining = draining(&client).await?;
            if let Some(job) = jobs.iter().find(|job| draining.contains(&job.queue)) {
                return Err(JobsError::Draining(job.queue.clone()));
            }
        }
    }

    /// Stores jobs and wakes workers; nothing if one of the queues is draining.
    async fn enqueue_all(
        &self,
        client: &Client,
        jobs: &[&NewJob],
    ) -> Result<Option<Vec<Enqueued>>, Error> {
        let mut queues = HashMap::new();
        for name in names(jobs) {
            let queue = match self.queue(client, name).await? {
                Some(queue) => queue,
                None => {
                    let queue = make_queue(client, name).await?;
                    self.queues.lock().insert(name.to_owned(), queue);
                    queue
                }
            };
            queues.insert(name, queue);
        }
        let names: Vec<&str> = queues.keys().copied().collect();
        // Sent together, done one after the other: others hear of what is committed. Prepared before, so that
        // none of the two has to wait.
        let is_keyed = jobs.iter().any(|job| job.unique_key.is_some());
        client.prepare_cached(if is_keyed { ENQUEUE_KEYED } else { ENQUEUE }).await?;
        client.prepare_cached(TELL).await?;
        let (enqueued, ()) = tokio::try_join!(
            insert(client, jobs, &queues),
            tell(client, &names, Woken::More, self.ours)
        )?;
        if enqueued.is_some() {
            names.iter().for_each(|name| self.bells.ring(&**name, Woken::More));
        }
        Ok(enqueued)
    }

    /// Stores jobs in a transaction of somebody's, and tells all, here too, when that is committed.
    pub(super) async fn enqueue_in(
        &self,
        tx: &Transaction<'_>,
        jobs: &[NewJob],
    ) -> Result<Vec<Enqueued>, JobsError> {
        jobs.iter().try_for_each(NewJob::check)?;
        if jobs.is_empty() {
            return Ok(Vec::new());
        }
        let jobs: Vec<&NewJob> = jobs.iter().collect();
        let mut queues = HashMap::new();
        for name in names(&jobs) {
            // One that is made here is known to nobody if the transaction is rolled back.
            let known = self.queues.lock().get(name).copied();
            let queue = match known {
                Some(queue) => queue,
                None => make_queue(tx, name).await?,
            };
            queues.insert(name, queue);
        }
        let names: Vec<&str> = queues.keys().copied().collect();
        match insert(tx, &jobs, &queues).await? {
            Some(enqueued) => {
                tell(tx, &names, Woken::More, 0).await?;
                Ok(enqueued)
            }
            None => {
                let draining = draining(tx).await?;
                let job = jobs.iter().find(|job| draining.contains(&job.queue)).unwrap_or(&jobs[0]);
                Err(JobsError::Draining(job.queue.clone()))
            }
        }
    }
}

fn names<'j>(jobs: &[&'j NewJob]) -> BTreeSet<&'j str> {
    jobs.iter().map(|job| job.queue.as_str()).collect()
}

/// The number of this queue, made if there is none.
async fn make_queue(db: &impl GenericClient, name: &str) -> Result<i32, Error> {
    let make = "INSERT INTO vedetta_job_queue (name) VALUES ($1) ON CONFLICT DO NOTHING";
    let find = "SELECT queue FROM vedetta_job_queue WHERE name = $1";
    loop {
        if let Some(row) = db.query_opt(find, &[&name]).await? {
            return row.try_get(0);
        }
        db.execute(make, &[&name]).await?;
    }
}

async fn draining(db: &impl GenericClient) -> Result<Vec<String>, Error> {
    let rows = db.query("SELECT name FROM vedetta_job_queue WHERE mode = 2", &[]).await?;
    rows.iter().map(|row| row.try_get(0)).collect()
}

/// Stores jobs, of queues that are there; nothing if one of these is draining.
async fn insert(
    db: &impl GenericClient,
    jobs: &[&NewJob],
    queues: &HashMap<&str, i32>,
) -> Result<Option<Vec<Enqueued>>, Error> {
    let columns = Columns::of(jobs, queues);
    let mut enqueued = Vec::with_capacity(jobs.len());
    if columns.keys.iter().all(Option::is_none) {
        let rows = db.query(&db.prepare_cached(ENQUEUE).await?, &columns.params()[..11]).await?;
        for row in rows {
            let id: i64 = row.try_get(0)?;
            enqueued.push(Enqueued { id: JobId(id.unsigned_abs()), is_new: true });
        }
        enqueued.sort_unstable_by_key(|enqueued| enqueued.id);
    } else {
        let rows = db.query(&db.prepare_cached(ENQUEUE_KEYED).await?, &columns.params()).await?;
        let mut stored: HashMap<i64, Enqueued> = HashMap::with_capacity(rows.len());
        for row in rows {
            let (first, id, is_new): (i64, i64, bool) =
                (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
            stored.insert(first, Enqueued { id: JobId(id.unsigned_abs()), is_new });
        }
        for (first, place) in columns.firsts.iter().zip(1..) {
            enqueued.extend(
                stored
                    .get(first)
                    .map(|stored| Enqueued { is_new: stored.is_new && *first == place, ..*stored }),
            );
        }
    }
    Ok((enqueued.len() == jobs.len()).then_some(enqueued))
}

/// Jobs by column.
#[derive(Default)]
struct Columns<'j> {
    queues: Vec<i32>,
    kinds: Vec<&'j str>,
    payloads: Vec<&'j str>,
    costs: Vec<i32>,
    priorities: Vec<i16>,
    times: Vec<Option<i64>>,
    delays: Vec<i64>,
    max_attempts: Vec<i32>,
    timeouts: Vec<Option<i64>>,
    tags: Vec<Option<String>>,
    traces: Vec<Option<String>>,
    keys: Vec<Option<&'j str>>,
    firsts: Vec<i64>,
}

impl<'j> Columns<'j> {
    fn of(jobs: &[&'j NewJob], queues: &HashMap<&str, i32>) -> Self {
        let mut columns = Self::default();
        let mut seen: HashMap<(i32, &str), i64> = HashMap::new();
        for (job, place) in jobs.iter().zip(1..) {
            let queue = queues[job.queue.as_str()];
            let (time, delay) = match job.run_at {
                When::Now => (None, 0),
                When::After(delay) => (None, micros(delay)),
                When::At(at) => (Some(since_epoch(at)), 0),
            };
            let key = job.unique_key.as_deref();
            let first = key.map_or(place, |key| *seen.entry((queue, key)).or_insert(place));
            columns.queues.push(queue);
            columns.kinds.push(&job.kind);
            columns.payloads.push(job.payload.get());
            columns.costs.push(job.cost.cast_signed());
            columns.priorities.push(job.priority);
            columns.times.push(time);
            columns.delays.push(delay);
            columns.max_attempts.push(job.max_attempts.cast_signed());
            columns.timeouts.push(job.timeout.map(|timeout| micros(timeout).max(1)));
            columns.tags.push((!job.tags.is_empty()).then(|| job.tags.join(",")));
            columns.traces.push(job.trace.map(|trace| trace.to_string()));
            columns.keys.push(key);
            columns.firsts.push(first);
        }
        columns
    }

    fn params(&self) -> [&(dyn ToSql + Sync); 13] {
        [
            &self.queues,
            &self.kinds,
            &self.payloads,
            &self.costs,
            &self.priorities,
            &self.times,
            &self.delays,
            &self.max_attempts,
            &self.timeouts,
            &self.tags,
            &self.traces,
            &self.keys,
            &self.firsts,
        ]
    }
}
