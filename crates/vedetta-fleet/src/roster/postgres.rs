//! The roster in a PostgreSQL, which several servers may share. Signs of life are counted by the database's
//! clock alone.

use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use vedetta_db::Clock;
use vedetta_db::postgres::tokio_postgres::{Error, Row};
use vedetta_db::postgres::{Postgres, PostgresError, Transaction};

use super::{
    All, HALTED, Roster, RosterError, Status, SupervisorRecord, WorkerRecord, joined, split,
};

/// The roster of one database; clones share it.
#[derive(Clone)]
pub struct PostgresRoster(Postgres);

impl PostgresRoster {
    /// The roster of a database that was opened with [`crate::postgres::SCHEMA`].
    pub fn new(db: Postgres) -> Self {
        Self(db)
    }
}

impl From<PostgresError> for RosterError {
    fn from(error: PostgresError) -> Self {
        if error.is_transient() {
            Self::Unavailable(Box::new(error))
        } else {
            Self::Failed(Box::new(error))
        }
    }
}

impl From<Error> for RosterError {
    fn from(error: Error) -> Self {
        PostgresError::from(error).into()
    }
}

const SAVE: &str = "
    INSERT INTO vedetta_worker (id, supervisor, queues, pid, host, version, status, inside, birth,
        capacity, note, started_at, last_heartbeat, created_at, updated_at)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12,
        clock_timestamp() - make_interval(secs => $13), $14, $15)
    ON CONFLICT (id) DO UPDATE SET supervisor = excluded.supervisor, queues = excluded.queues,
        pid = excluded.pid, host = excluded.host, version = excluded.version,
        status = excluded.status, inside = excluded.inside, birth = excluded.birth,
        capacity = excluded.capacity, note = excluded.note, started_at = excluded.started_at,
        last_heartbeat = excluded.last_heartbeat, updated_at = excluded.updated_at";

const SAVE_SUPERVISOR: &str = "
    INSERT INTO vedetta_supervisor (name, host, last_heartbeat, halted)
    VALUES ($1, $2, clock_timestamp() - make_interval(secs => $3), $4)
    ON CONFLICT (name) DO UPDATE SET host = excluded.host, last_heartbeat = excluded.last_heartbeat,
        halted = excluded.halted";

const ALL: &str = "
    SELECT id, supervisor, queues, pid, host, version, status, inside, birth, capacity, note, started_at,
        extract(epoch FROM clock_timestamp() - last_heartbeat)::float8, created_at, updated_at
    FROM vedetta_worker ORDER BY id COLLATE \"C\"";

const SUPERVISORS: &str = "
    SELECT name, host, extract(epoch FROM clock_timestamp() - last_heartbeat)::float8, halted
    FROM vedetta_supervisor ORDER BY name COLLATE \"C\"";

/// None if it is in the future.
fn ago(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

fn natural(number: i64) -> u32 {
    u32::try_from(number).unwrap_or(0)
}

fn worker(row: &Row) -> Result<WorkerRecord, Error> {
    Ok(WorkerRecord {
        id: row.try_get(0)?,
        supervisor: row.try_get(1)?,
        queues: split(row.try_get(2)?),
        pid: natural(row.try_get(3)?),
        host: row.try_get(4)?,
        version: row.try_get(5)?,
        status: Status::of(row.try_get(6)?),
        inside: row.try_get(7)?,
        birth: row.try_get(8)?,
        capacity: natural(row.try_get(9)?),
        note: row.try_get(10)?,
        started: Clock::time(row.try_get(11)?),
        seen: ago(row.try_get(12)?),
        created: row.try_get::<_, SystemTime>(13)?,
        updated: row.try_get::<_, SystemTime>(14)?,
    })
}

async fn save_supervisors(
    tx: &Transaction<'_>,
    supervisors: &[SupervisorRecord],
) -> Result<(), Error> {
    let insert = tx.prepare_cached(SAVE_SUPERVISOR).await?;
    for SupervisorRecord { name, host, halted, seen } in supervisors {
        tx.execute(&insert, &[name, host, &seen.as_secs_f64(), halted]).await?;
    }
    Ok(())
}

#[async_trait]
impl Roster for PostgresRoster {
    async fn save(
        &self,
        workers: &[WorkerRecord],
        supervisors: &[SupervisorRecord],
    ) -> Result<(), RosterError> {
        if workers.is_empty() && supervisors.is_empty() {
            return Ok(());
        }
        let mut client = self.0.client().await?;
        let tx = client.transaction().await?;
        tx.execute("SET LOCAL synchronous_commit = off", &[]).await?;
        let insert = tx.prepare_cached(SAVE).await?;
        for worker in workers {
            let (pid, capacity) = (i64::from(worker.pid), i64::from(worker.capacity));
            tx.execute(
                &insert,
                &[
                    &worker.id,
                    &worker.supervisor,
                    &joined(&worker.queues),
                    &pid,
                    &worker.host,
                    &worker.version,
                    &worker.status.word(),
                    &worker.inside,
                    &worker.birth,
                    &capacity,
                    &worker.note,
                    &Clock::at(worker.started),
                    &worker.seen.as_secs_f64(),
                    &worker.created,
                    &worker.updated,
                ],
            )
            .await?;
        }
        save_supervisors(&tx, supervisors).await?;
        tx.commit().await?;
        Ok(())
    }

    async fn keep(&self, supervisors: &[SupervisorRecord]) -> Result<(), RosterError> {
        let mut client = self.0.client().await?;
        let tx = client.transaction().await?;
        save_supervisors(&tx, supervisors).await?;
        tx.commit().await?;
        Ok(())
    }

    async fn all(&self) -> Result<All, RosterError> {
        let client = self.0.client().await?;
        let workers = client.query(&client.prepare_cached(ALL).await?, &[]).await?;
        let supervisors = client.query(&client.prepare_cached(SUPERVISORS).await?, &[]).await?;
        let supervisors = supervisors.iter().map(|row| {
            let seen = ago(row.try_get(2)?);
            let (name, host, halted) = (row.try_get(0)?, row.try_get(1)?, row.try_get(3)?);
            Ok(SupervisorRecord { name, host, halted, seen })
        });
        Ok(All {
            workers: workers.iter().map(worker).collect::<Result<_, Error>>()?,
            supervisors: supervisors.collect::<Result<_, Error>>()?,
        })
    }

    async fn prune(&self, silent: Duration) -> Result<u64, RosterError> {
        let client = self.0.client().await?;
        let mut removed = 0;
        for (table, which, seconds) in [
            ("vedetta_worker", "true", silent),
            ("vedetta_supervisor", "NOT halted", silent),
            ("vedetta_supervisor", "halted", silent.max(HALTED)),
        ] {
            let delete = format!(
                "DELETE FROM {table} WHERE {which}
                 AND last_heartbeat < clock_timestamp() - make_interval(secs => $1)"
            );
            let delete = client.prepare_cached(&delete).await?;
            removed += client.execute(&delete, &[&seconds.as_secs_f64()]).await?;
        }
        Ok(removed)
    }
}
