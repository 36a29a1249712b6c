//! Commands in a PostgreSQL, which several servers may share. Time is the database's alone.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tokio::sync::broadcast;
use tokio_util::task::AbortOnDropHandle;
use vedetta_db::postgres::tokio_postgres::{Error, Row};
use vedetta_db::postgres::{Heard, Postgres, PostgresError};

use super::{
    Bus, BusError, CommandId, KEPT, MOST, Order, Record, State, Taken, Target, WAKES, Wake,
    in_time, state_of,
};

/// On it goes for whom there is something.
const CHANNEL: &str = "vedetta_command";

/// The commands of one database; clones share them.
#[derive(Clone)]
pub struct PostgresBus {
    db: Postgres,
    wakes: broadcast::Sender<Wake>,
    /// Wakes for what others do, as long as somebody is left to hear it.
    _listener: Arc<AbortOnDropHandle<()>>,
}

impl PostgresBus {
    /// The commands of a database that was opened with [`crate::postgres::SCHEMA`]. It has to be called where
    /// tokio runs.
    pub fn new(db: Postgres) -> Self {
        let wakes = broadcast::Sender::new(WAKES);
        let (mut listener, tell) = (db.listen(CHANNEL), wakes.clone());
        let listener = tokio::spawn(async move {
            loop {
                let wake = match listener.next().await {
                    Heard::Notified(target) => Wake::Of(Target::from_key(target)),
                    Heard::Again => Wake::Any,
                };
                // Nobody has to listen.
                let _ = tell.send(wake);
            }
        });
        Self { db, wakes, _listener: Arc::new(AbortOnDropHandle::new(listener)) }
    }
}

impl From<PostgresError> for BusError {
    fn from(error: PostgresError) -> Self {
        if error.is_transient() {
            Self::Unavailable(Box::new(error))
        } else {
            Self::Failed(Box::new(error))
        }
    }
}

impl From<Error> for BusError {
    fn from(error: Error) -> Self {
        PostgresError::from(error).into()
    }
}

fn seconds(duration: Duration) -> f64 {
    duration.as_secs_f64()
}

/// What was stored was a command.
fn order(row: &Row, column: usize) -> Result<Order, BusError> {
    let text: &str = row.try_get(column)?;
    text.parse().map_err(|error: String| BusError::Failed(error.into()))
}

#[async_trait]
impl Bus for PostgresBus {
    async fn put(&self, target: &Target, order: &Order, ttl: Duration) -> Result<Record, BusError> {
        let id = CommandId::random();
        let mut client = self.db.client().await?;
        let tx = client.transaction().await?;
        tx.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", &[&target.key()])
            .await?;
        let old =
            "DELETE FROM vedetta_command WHERE expires_at < now() - make_interval(secs => $1)";
        tx.execute(old, &[&seconds(KEPT)]).await?;
        let (replaces, yields_to) = (order.replaces(), order.yields_to());
        let stands = "SELECT EXISTS (SELECT FROM vedetta_command WHERE target = $1 AND state = 0
                      AND expires_at > clock_timestamp() AND word = ANY ($2))";
        let stands: bool = tx.query_one(stands, &[&target.key(), &yields_to]).await?.try_get(0)?;
        if !stands {
            let replace = "UPDATE vedetta_command SET state = 3
                           WHERE target = $1 AND state = 0 AND word = ANY ($2)";
            tx.execute(replace, &[&target.key(), &replaces]).await?;
            let count = "SELECT count(*) FROM vedetta_command
                         WHERE target = $1 AND state = 0 AND expires_at > clock_timestamp()";
            let count: i64 = tx.query_one(count, &[&target.key()]).await?.try_get(0)?;
            if usize::try_from(count).unwrap_or(usize::MAX) >= MOST {
                return Err(BusError::TooMany);
            }
        }
        let state = if stands { State::Replaced } else { State::Requested };
        let insert = "INSERT INTO vedetta_command
                          (id, target, word, value, state, expires_at, created_at)
                      SELECT $1, $2, $3, $4, $5, now + make_interval(secs => $6), now
                      FROM (SELECT clock_timestamp() AS now) AS clock
                      RETURNING created_at, expires_at";
        let number: i16 = if stands { 3 } else { 0 };
        let (word, value) = (order.word(), order.to_string());
        let row = tx
            .query_one(insert, &[&id.0, &target.key(), &word, &value, &number, &seconds(ttl)])
            .await?;
        if !stands {
            tx.execute("SELECT pg_notify($1, $2)", &[&CHANNEL, &target.key()]).await?;
        }
        tx.commit().await?;
        Ok(Record {
            id,
            target: target.clone(),
            order: order.clone(),
            state,
            created: row.try_get(0)?,
            expires: row.try_get(1)?,
        })
    }

    async fn take(&self, target: &Target) -> Result<Vec<Taken>, BusError> {
        let client = self.db.client().await?;
        let take = "UPDATE vedetta_command SET state = 1, taken_at = clock_timestamp()
                    WHERE target = $1 AND state = 0 AND expires_at > clock_timestamp()
                    RETURNING seq, id, value,
                        (extract(epoch FROM expires_at - clock_timestamp()) * 1000)::bigint";
        let rows = client.query(&client.prepare_cached(take).await?, &[&target.key()]).await?;
        let mut taken = Vec::with_capacity(rows.len());
        for row in &rows {
            let left: i64 = row.try_get(3)?;
            // Rounded down: what has no time left is not handed out.
            let Some(left) = u64::try_from(left).ok().filter(|left| *left > 0) else { continue };
            let (id, left) = (CommandId(row.try_get(1)?), Duration::from_millis(left));
            taken.push((row.try_get::<_, i64>(0)?, Taken { id, order: order(row, 2)?, left }));
        }
        taken.sort_by_key(|(seq, _)| *seq);
        Ok(taken.into_iter().map(|(_, taken)| taken).collect())
    }

    async fn applied(&self, ids: &[CommandId]) -> Result<(), BusError> {
        if ids.is_empty() {
            return Ok(());
        }
        let ids: Vec<&str> = ids.iter().map(|id| id.0.as_str()).collect();
        let client = self.db.client().await?;
        let apply = "UPDATE vedetta_command SET state = 2, applied_at = clock_timestamp()
                     WHERE id = ANY ($1) AND state = 1";
        client.execute(&client.prepare_cached(apply).await?, &[&ids]).await?;
        Ok(())
    }

    async fn command(&self, id: &CommandId) -> Result<Option<Record>, BusError> {
        let client = self.db.client().await?;
        let find = "SELECT target, value, state, created_at, expires_at,
                        expires_at <= clock_timestamp()
                    FROM vedetta_command WHERE id = $1";
        let Some(row) = client.query_opt(&client.prepare_cached(find).await?, &[&id.0]).await?
        else {
            return Ok(None);
        };
        let (state, is_over) = (state_of(row.try_get::<_, i16>(2)?.into()), row.try_get(5)?);
        Ok(Some(Record {
            id: id.clone(),
            target: Target::from_key(row.try_get::<_, String>(0)?),
            order: order(&row, 1)?,
            state: in_time(state, is_over),
            created: row.try_get::<_, SystemTime>(3)?,
            expires: row.try_get::<_, SystemTime>(4)?,
        }))
    }

    async fn waiting(&self, targets: &[Target]) -> Result<Vec<Target>, BusError> {
        if targets.is_empty() {
            return Ok(Vec::new());
        }
        let keys: Vec<&str> = targets.iter().map(Target::key).collect();
        let client = self.db.client().await?;
        let waiting = "SELECT DISTINCT target FROM vedetta_command WHERE state = 0
                       AND expires_at > clock_timestamp() AND target = ANY ($1)";
        let rows = client.query(&client.prepare_cached(waiting).await?, &[&keys]).await?;
        let keys = rows.iter().map(|row| Ok(Target::from_key(row.try_get::<_, String>(0)?)));
        keys.collect()
    }

    fn wakes(&self) -> broadcast::Receiver<Wake> {
        self.wakes.subscribe()
    }
}
