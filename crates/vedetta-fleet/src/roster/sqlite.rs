//! The roster in the embedded SQLite file.

use std::time::Duration;

use async_trait::async_trait;
use vedetta_db::rusqlite::{self, Connection, Row, params};
use vedetta_db::{Clock, Db, Purpose, ReadError, Stop, WriteError};

use super::{
    All, HALTED, Roster, RosterError, Status, SupervisorRecord, WorkerRecord, joined, split,
};

/// The roster of one file; clones share it.
#[derive(Clone)]
pub struct SqliteRoster {
    db: Db,
    clock: Clock,
}

impl SqliteRoster {
    /// The roster of a file that was opened with [`crate::sqlite::SCHEMA`].
    pub fn new(db: Db) -> Self {
        Self { clock: db.steady_clock(), db }
    }
}

type Refused = std::convert::Infallible;

impl From<WriteError<Refused>> for RosterError {
    fn from(error: WriteError<Refused>) -> Self {
        Self::Unavailable(Box::new(error))
    }
}

impl From<ReadError> for RosterError {
    fn from(error: ReadError) -> Self {
        Self::Failed(Box::new(error))
    }
}

const SAVE: &str = "
    INSERT INTO fleet_worker (id, supervisor, queues, pid, host, version, status, inside, birth,
        capacity, note, started_at, last_heartbeat, created_at, updated_at)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (id) DO UPDATE SET supervisor = excluded.supervisor, queues = excluded.queues,
        pid = excluded.pid, host = excluded.host, version = excluded.version,
        status = excluded.status, inside = excluded.inside, birth = excluded.birth,
        capacity = excluded.capacity, note = excluded.note, started_at = excluded.started_at,
        last_heartbeat = excluded.last_heartbeat, updated_at = excluded.updated_at";

fn save(
    db: &Connection,
    now: i64,
    workers: &[WorkerRecord],
    supervisors: &[SupervisorRecord],
) -> rusqlite::Result<()> {
    let mut insert = db.prepare_cached(SAVE)?;
    for worker in workers {
        insert.execute(params![
            worker.id,
            worker.supervisor,
            joined(&worker.queues),
            worker.pid,
            worker.host,
            worker.version,
            worker.status.word(),
            worker.inside,
            worker.birth,
            worker.capacity,
            worker.note,
            Clock::at(worker.started),
            now - Clock::millis(worker.seen),
            Clock::at(worker.created),
            Clock::at(worker.updated),
        ])?;
    }
    let mut insert = db.prepare_cached(
        "INSERT INTO fleet_supervisor (name, host, last_heartbeat, halted) VALUES (?, ?, ?, ?)
         ON CONFLICT (name) DO UPDATE SET host = excluded.host,
             last_heartbeat = excluded.last_heartbeat, halted = excluded.halted",
    )?;
    for supervisor in supervisors {
        let seen = now - Clock::millis(supervisor.seen);
        insert.execute(params![supervisor.name, supervisor.host, seen, supervisor.halted])?;
    }
    Ok(())
}

fn worker(row: &Row<'_>, now: i64) -> rusqlite::Result<WorkerRecord> {
    Ok(WorkerRecord {
        id: row.get(0)?,
        supervisor: row.get(1)?,
        queues: split(&row.get::<_, String>(2)?),
        pid: row.get(3)?,
        host: row.get(4)?,
        version: row.get(5)?,
        status: Status::of(&row.get::<_, String>(6)?),
        inside: row.get(7)?,
        birth: row.get(8)?,
        capacity: row.get(9)?,
        note: row.get(10)?,
        started: Clock::time(row.get(11)?),
        seen: Clock::delay(now - row.get::<_, i64>(12)?),
        created: Clock::time(row.get(13)?),
        updated: Clock::time(row.get(14)?),
    })
}

#[async_trait]
impl Roster for SqliteRoster {
    async fn save(
        &self,
        workers: &[WorkerRecord],
        supervisors: &[SupervisorRecord],
    ) -> Result<(), RosterError> {
        let (workers, supervisors, clock) = (workers.to_vec(), supervisors.to_vec(), self.clock);
        let write = move |tx: &vedetta_db::Tx<'_>| {
            save(tx, clock.now(), &workers, &supervisors).map_err(Stop::<Refused>::Sql)
        };
        Ok(self.db.write_lazily(Purpose::Store, write).await?)
    }

    async fn keep(&self, supervisors: &[SupervisorRecord]) -> Result<(), RosterError> {
        let (supervisors, clock) = (supervisors.to_vec(), self.clock);
        let write = move |tx: &vedetta_db::Tx<'_>| {
            save(tx, clock.now(), &[], &supervisors).map_err(Stop::<Refused>::Sql)
        };
        Ok(self.db.write(Purpose::Store, write).await?)
    }

    async fn all(&self) -> Result<All, RosterError> {
        let now = self.clock.now();
        let read = move |db: &Connection| {
            let mut workers = db.prepare_cached(
                "SELECT id, supervisor, queues, pid, host, version, status, inside, birth, capacity,
                    note, started_at, last_heartbeat, created_at, updated_at
                 FROM fleet_worker ORDER BY id",
            )?;
            let workers = workers.query_map([], |row| worker(row, now))?;
            let mut supervisors = db.prepare_cached(
                "SELECT name, host, last_heartbeat, halted FROM fleet_supervisor ORDER BY name",
            )?;
            let supervisors = supervisors.query_map([], |row| {
                let seen = Clock::delay(now - row.get::<_, i64>(2)?);
                let (name, host, halted) = (row.get(0)?, row.get(1)?, row.get(3)?);
                Ok(SupervisorRecord { name, host, halted, seen })
            })?;
            Ok(All {
                workers: workers.collect::<rusqlite::Result<_>>()?,
                supervisors: supervisors.collect::<rusqlite::Result<_>>()?,
            })
        };
        Ok(self.db.read(read).await?)
    }

    async fn prune(&self, silent: Duration) -> Result<u64, RosterError> {
        let before = self.clock.now() - Clock::millis(silent);
        let long_before = before.min(self.clock.now() - Clock::millis(HALTED));
        let write = move |tx: &vedetta_db::Tx<'_>| {
            let workers =
                tx.execute("DELETE FROM fleet_worker WHERE last_heartbeat < ?", [before])?;
            let supervisors = tx.execute(
                "DELETE FROM fleet_supervisor WHERE last_heartbeat < iif(halted, ?, ?)",
                [long_before, before],
            )?;
            Ok::<_, Stop<Refused>>(workers + supervisors)
        };
        let removed = self.db.write_lazily(Purpose::Reclaim, write).await?;
        Ok(u64::try_from(removed).unwrap_or(u64::MAX))
    }
}
