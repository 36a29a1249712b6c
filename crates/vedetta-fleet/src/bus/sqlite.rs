//! Commands in the embedded SQLite file.

use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::broadcast;
use vedetta_db::rusqlite::{self, Connection, OptionalExtension as _, Row, params};
use vedetta_db::{Clock, CommitError, Db, Purpose, ReadError, Stop, WriteError};

use super::{
    Bus, BusError, CommandId, KEPT, MOST, Order, Record, State, Taken, Target, WAKES, Wake,
    in_time, state_of,
};

/// The commands of one file, which one process has; clones share them.
#[derive(Clone)]
pub struct SqliteBus {
    db: Db,
    clock: Clock,
    wakes: broadcast::Sender<Wake>,
}

impl SqliteBus {
    /// The commands of a file that was opened with [`crate::sqlite::SCHEMA`].
    pub fn new(db: Db) -> Self {
        Self { clock: db.clock(), db, wakes: broadcast::Sender::new(WAKES) }
    }

    async fn write<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection, i64) -> Result<T, Stop<BusError>> + Send + 'static,
    ) -> Result<T, BusError> {
        let clock = self.clock;
        self.db.write(Purpose::Store, move |tx| work(tx, clock.now())).await.map_err(|error| {
            match error {
                WriteError::Refused(error) => error,
                WriteError::Lost(error) => error.into(),
                error => BusError::Failed(error.to_string().into()),
            }
        })
    }
}

impl From<CommitError> for BusError {
    fn from(error: CommitError) -> Self {
        match error {
            CommitError::Full | CommitError::Failed(_) => Self::Unavailable(Box::new(error)),
            error => Self::Failed(Box::new(error)),
        }
    }
}

impl From<ReadError> for BusError {
    fn from(error: ReadError) -> Self {
        Self::Failed(Box::new(error))
    }
}

/// What was stored was a command.
fn order(row: &Row<'_>, column: usize) -> rusqlite::Result<Order> {
    let text: String = row.get(column)?;
    text.parse().map_err(|error: String| {
        rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, error.into())
    })
}

fn list(words: &[&str]) -> String {
    serde_json::to_string(words).unwrap_or_default()
}

fn put(
    db: &Connection,
    now: i64,
    mut record: Record,
    ttl: Duration,
) -> Result<Record, Stop<BusError>> {
    db.prepare_cached("DELETE FROM fleet_command WHERE expires_at < ?")?
        .execute([now - Clock::millis(KEPT)])?;
    let (target, order) = (record.target.key(), &record.order);
    let waits = "FROM fleet_command WHERE target = ? AND state = 0 AND expires_at > ?";
    let stands: bool = db
        .prepare_cached(&format!(
            "SELECT EXISTS (SELECT 1 {waits} AND word IN (SELECT value FROM json_each(?)))"
        ))?
        .query_row(params![target, now, list(order.yields_to())], |row| row.get(0))?;
    if stands {
        record.state = State::Replaced;
    } else {
        db.prepare_cached(
            "UPDATE fleet_command SET state = 3 WHERE target = ? AND state = 0
             AND word IN (SELECT value FROM json_each(?))",
        )?
        .execute(params![target, list(order.replaces())])?;
        let count: i64 = db
            .prepare_cached(&format!("SELECT count(*) {waits}"))?
            .query_row(params![target, now], |row| row.get(0))?;
        if usize::try_from(count).is_ok_and(|count| count >= MOST) {
            return Err(Stop::Refused(BusError::TooMany));
        }
    }
    let expires = now.saturating_add(Clock::millis(ttl));
    (record.created, record.expires) = (Clock::time(now), Clock::time(expires));
    db.prepare_cached(
        "INSERT INTO fleet_command (id, target, word, value, state, expires_at, created_at)
         VALUES (?, ?, ?, ?, ?, ?, ?)",
    )?
    .execute(params![
        record.id.0,
        target,
        order.word(),
        order.to_string(),
        if stands { 3 } else { 0 },
        expires,
        now
    ])?;
    Ok(record)
}

#[async_trait]
impl Bus for SqliteBus {
    async fn put(&self, target: &Target, order: &Order, ttl: Duration) -> Result<Record, BusError> {
        let record = Record {
            id: CommandId::random(),
            target: target.clone(),
            order: order.clone(),
            state: State::Requested,
            created: std::time::SystemTime::UNIX_EPOCH,
            expires: std::time::SystemTime::UNIX_EPOCH,
        };
        let record = self.write(move |db, now| put(db, now, record, ttl)).await?;
        if record.state == State::Requested {
            // Nobody has to listen.
            let _ = self.wakes.send(Wake::Of(target.clone()));
        }
        Ok(record)
    }

    async fn take(&self, target: &Target) -> Result<Vec<Taken>, BusError> {
        let target = target.clone();
        // On the disk before it is handed out: a crash must not hand it out again.
        self.write(move |db, now| {
            let mut take = db.prepare_cached(
                "UPDATE fleet_command SET state = 1, taken_at = ?2
                 WHERE target = ?1 AND state = 0 AND expires_at > ?2
                 RETURNING seq, id, value, expires_at - ?2",
            )?;
            let taken = take.query_map(params![target.key(), now], |row| {
                let left = Clock::delay(row.get(3)?);
                let taken = Taken { id: CommandId(row.get(1)?), order: order(row, 2)?, left };
                Ok((row.get::<_, i64>(0)?, taken))
            })?;
            let mut taken = taken.collect::<rusqlite::Result<Vec<_>>>()?;
            taken.sort_by_key(|(seq, _)| *seq);
            Ok(taken.into_iter().map(|(_, taken)| taken).collect())
        })
        .await
    }

    async fn applied(&self, ids: &[CommandId]) -> Result<(), BusError> {
        if ids.is_empty() {
            return Ok(());
        }
        let ids = ids.to_vec();
        self.write(move |db, now| {
            let mut apply = db.prepare_cached(
                "UPDATE fleet_command SET state = 2, applied_at = ? WHERE id = ? AND state = 1",
            )?;
            for id in ids {
                apply.execute(params![now, id.0])?;
            }
            Ok(())
        })
        .await
    }

    async fn command(&self, id: &CommandId) -> Result<Option<Record>, BusError> {
        let (id, now) = (id.clone(), self.clock.now());
        let read = move |db: &Connection| {
            db.prepare_cached(
                "SELECT target, value, state, created_at, expires_at FROM fleet_command WHERE id = ?",
            )?
            .query_row([&id.0], |row| {
                let expires: i64 = row.get(4)?;
                Ok(Record {
                    id: id.clone(),
                    target: Target::from_key(row.get::<_, String>(0)?),
                    order: order(row, 1)?,
                    state: in_time(state_of(row.get(2)?), expires <= now),
                    created: Clock::time(row.get(3)?),
                    expires: Clock::time(expires),
                })
            })
            .optional()
        };
        Ok(self.db.read(read).await?)
    }

    async fn waiting(&self, targets: &[Target]) -> Result<Vec<Target>, BusError> {
        if targets.is_empty() {
            return Ok(Vec::new());
        }
        let now = self.clock.now();
        let read = move |db: &Connection| {
            let mut waiting = db.prepare_cached(
                "SELECT DISTINCT target FROM fleet_command WHERE state = 0 AND expires_at > ?",
            )?;
            let waiting = waiting.query_map([now], |row| row.get(0))?;
            waiting.collect::<rusqlite::Result<Vec<String>>>()
        };
        let waiting = self.db.read(read).await?;
        Ok(targets
            .iter()
            .filter(|target| waiting.iter().any(|key| key == target.key()))
            .cloned()
            .collect())
    }

    fn wakes(&self) -> broadcast::Receiver<Wake> {
        self.wakes.subscribe()
    }
}
