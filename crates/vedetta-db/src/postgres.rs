//! A PostgreSQL database: its tables at the newest version, a pool of connections, and what it announces.
//!
//! ```text
//! client ──► pool ──► connection ─┐
//! client ──► pool ──► connection ─┼─► PostgreSQL ── NOTIFY ──► connection of its own ──► Listener
//!            (bounded)            ┘
//! ```
//!
//! A connection that the server ended is replaced when it is next asked for; so a server that comes back
//! is used again by itself. What is stored, and what is done again after a failure, is the caller's business.

mod error;
mod listen;
mod tls;
mod url;

use std::fmt;
use std::future::Future;
use std::time::Duration;

use deadpool_postgres::{
    Manager, ManagerConfig, Object, Pool, PoolError, RecyclingMethod, Runtime,
};

pub use deadpool_postgres::{Client, GenericClient, Transaction};
pub use error::PostgresError;
pub use listen::{Heard, Listener};
/// What a [`Client`] takes and returns.
pub use tokio_postgres;

use crate::Schema;
use url::Target;

/// Connections in a pool unless said otherwise. A server allows 100 by default, and several may share it.
const CONNECTIONS: usize = 16;
/// Whoever brings the tables up holds this advisory lock. "VEDT".
const MIGRATION: i64 = 0x5645_4454;

/// A database on a PostgreSQL server; clones share it.
#[derive(Clone)]
pub struct Postgres {
    pool: Pool,
    target: Target,
}

impl Postgres {
    /// Connects, and brings the tables to the newest version. Several processes may do so at once.
    ///
    /// The URL is `postgres://user:password@host:port/database`. With `?sslmode=require&sslrootcert=FILE`
    /// it speaks TLS, to a server whose certificate is for that host and signed by one in the file; else
    /// it speaks plainly. It has to be called where tokio runs.
    pub async fn open(url: &str, schemas: &[Schema]) -> Result<Self, PostgresError> {
        Self::open_with(url, CONNECTIONS, schemas).await
    }

    /// The same with a pool of so many connections at most, one at least.
    pub async fn open_with(
        url: &str,
        connections: usize,
        schemas: &[Schema],
    ) -> Result<Self, PostgresError> {
        let target = Target::parse(url)?;
        let postgres = Self { pool: pool(&target, connections), target };
        postgres.migrate(schemas).await?;
        Ok(postgres)
    }

    /// A connection of the pool; waits for one when all are taken. It goes back when dropped.
    ///
    /// One that the server has ended a moment ago may not be known as such yet: then the first use of it
    /// fails, and that [is transient](PostgresError::is_transient).
    pub async fn client(&self) -> Result<Client, PostgresError> {
        self.pool.get().await.map_err(|error| match error {
            PoolError::Backend(error) => self.target.failed(error),
            other => self.target.unreachable(other.into()),
        })
    }

    /// Hears what is announced with `pg_notify` on this channel, until dropped.
    ///
    /// The channel is taken as written: `NOTIFY Jobs` without quotes is on the channel `jobs`. It has to be
    /// called where tokio runs.
    pub fn listen(&self, channel: &str) -> Listener {
        Listener::start(self.target.clone(), channel)
    }

    async fn migrate(&self, schemas: &[Schema]) -> Result<(), PostgresError> {
        // Taken out of the pool: with the connection ends the lock, however this ends.
        let mut client = Object::take(self.client().await?);
        if schemas.is_empty() {
            return Ok(()); // it can be reached, and there is nothing to change
        }
        client.execute("SELECT pg_advisory_lock($1)", &[&MIGRATION]).await?;
        let noted = "SELECT to_regclass('vedetta_schema') IS NOT NULL";
        let noted: bool = client.query_one(noted, &[]).await?.get(0);
        let mut found = Vec::with_capacity(schemas.len());
        for schema in schemas {
            let version = "SELECT version FROM vedetta_schema WHERE component = $1";
            let row =
                if noted { client.query_opt(version, &[&schema.component]).await? } else { None };
            found.push(row.map_or(0, |row| row.get::<_, i64>(0)));
        }
        // All are looked at before anything is changed.
        for (schema, &found) in schemas.iter().zip(&found) {
            let known = i64::try_from(schema.steps.len()).unwrap_or(i64::MAX);
            if found > known {
                let what = schema.component.to_owned();
                return Err(PostgresError::Newer { what, found, known });
            }
        }
        if !noted {
            let create =
                "CREATE TABLE vedetta_schema (component text PRIMARY KEY, version bigint NOT NULL)";
            client.batch_execute(create).await?;
        }
        for (schema, found) in schemas.iter().zip(found) {
            for (version, sql) in (1_i64..).zip(schema.steps).filter(|(v, _)| *v > found) {
                let step = client.transaction().await?;
                step.batch_execute(sql).await?;
                let note = "INSERT INTO vedetta_schema VALUES ($1, $2)
                            ON CONFLICT (component) DO UPDATE SET version = excluded.version";
                step.execute(note, &[&schema.component, &version]).await?;
                step.commit().await?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Postgres").field("at", &self.target.at).finish_non_exhaustive()
    }
}

fn pool(target: &Target, connections: usize) -> Pool {
    let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
    let manager = Manager::from_config((*target.config).clone(), target.tls.clone(), recycling);
    let pool = Pool::builder(manager).max_size(connections.max(1));
    let pool = pool.create_timeout(Some(target.patience)).runtime(Runtime::Tokio1);
    pool.build().expect("nothing is missing when a runtime is given")
}

/// Fails when there is no answer in time.
async fn within<T>(
    patience: Duration,
    answer: impl Future<Output = Result<T, tokio_postgres::Error>>,
) -> Result<T, PostgresError> {
    match tokio::time::timeout(patience, answer).await {
        Ok(answer) => Ok(answer?),
        Err(late) => Err(PostgresError::Lost(late.into())),
    }
}
