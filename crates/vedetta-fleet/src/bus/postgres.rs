//! Commands in a PostgreSQL, which several servers may share. Time is the database's alone.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tokio::sync::broadcast;
use tokio_util::task::AbortOnDropHandle;
use vedetta_db::postgres::tokio_postgres::{Error, Row};
use vedetta_db::postgres::{Heard, Postgres, PostgresError};

use super::{
    Bus, BusError, CommandId, KEPT, MOST, Order, Record, Taken, Target, WAKES, Wake, in_time,
    state_of,
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

/// What was stored was a command.
fn order(row: &Row, column: usize) -> Result<Order, BusError> {
    let text: &str = row.try_get(column)?;
    text.parse().map_err(|error: String| BusError::Failed(error.into()))
}

#[async_trait]
impl Bus for PostgresBus {
    async fn put(&self, target: &Target, order: &Order, ttl: Duration) -> Result<Record, BusError> {
        let id = CommandId::random();
        let client = self.db.client().await?;
        let put = "SELECT * FROM vedetta_command_put($1, $2, $3, $4, $5, $6, $7, $8, $9)";
        let (word, value) = (order.word(), order.to_string());
        let (replaces, yields_to) = (order.replaces(), order.yields_to());
        let most = i64::try_from(MOST).unwrap_or(i64::MAX);
        let row = client
            .query_opt(
                &client.prepare_cached(put).await?,
                &[
                    &id.0,
                    &target.key(),
                    &word,
                    &value,
                    &ttl.as_secs_f64(),
                    &KEPT.as_secs_f64(),
                    &replaces,
                    &yields_to,
                    &most,
                ],
            )
            .await?;
        let row = row.ok_or(BusError::TooMany)?;
        Ok(Record {
            id,
            target: target.clone(),
            order: order.clone(),
            state: state_of(row.try_get::<_, i16>(0)?.into()),
            created: row.try_get(1)?,
            expires: row.try_get(2)?,
        })
    }

    async fn take(&self, target: &Target) -> Result<Vec<Taken>, BusError> {
        let client = self.db.client().await?;
        // If the clock was set back since it was put, more seems to be left than there ever was.
        let take = "UPDATE vedetta_command SET state = 1, taken_at = clock_timestamp()
                    WHERE target = $1 AND state = 0 AND expires_at > clock_timestamp()
                    RETURNING seq, id, value,
                        (extract(epoch FROM LEAST(expires_at - clock_timestamp(),
                            expires_at - created_at)) * 1000)::bigint";
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
