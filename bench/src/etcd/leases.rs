//! Leases with a key each, and how late the keys go.
//!
//! Leases are granted at a steady pace, so they fall due at the same pace. Lateness runs from when the
//! lease was asked for plus its TTL, so the time of the grant is in it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::task::JoinSet;

use super::calls::end_of;
use super::client::{Connection, GRANT, PUT, Stream, WATCH};
use super::proto;
use super::server::Server;
use super::sides::Figures;

/// Long enough that the last is granted before the first is due.
const TTL: i64 = 10;
/// Granted per second.
const PACE: u32 = 2_000;
const CALLERS: u32 = 64;
const CONNECTIONS: usize = 8;
const PREFIX: &str = "/lease/";
const DELETED: i32 = 1;

pub(crate) async fn measure(server: &Server, leases: u32) -> anyhow::Result<Figures> {
    let connections = Connection::open_many(server.address, CONNECTIONS).await?;
    let mut watch = connections[0].clone().stream(WATCH).await?;
    let create = proto::WatchCreateRequest { key: PREFIX.into(), range_end: end_of(PREFIX) };
    watch.send(&proto::WatchRequest { create_request: Some(create) })?;
    let answer: proto::WatchResponse = watch.next().await?;
    anyhow::ensure!(answer.created, "the watcher was refused");
    let reading = tokio::spawn(deletions(watch, leases));

    let before = server.cpu()?;
    let started = Instant::now();
    let connections: Arc<[Connection]> = connections.into();
    let mut granting = JoinSet::new();
    for caller in 0..CALLERS {
        let mut connection = connections[caller as usize % CONNECTIONS].clone();
        granting.spawn(async move {
            let mut due = Vec::new();
            for n in (caller..leases).step_by(CALLERS as usize) {
                tokio::time::sleep_until((started + Duration::from_secs(n.into()) / PACE).into())
                    .await;
                due.push((n, grant(&mut connection, n).await?));
            }
            anyhow::Ok(due)
        });
    }
    let mut due = Vec::new();
    while let Some(some) = granting.join_next().await {
        due.append(&mut some??);
    }
    let gone = reading.await??;
    let used = server.cpu()?.since(&before);
    let mut late = Vec::new();
    for (n, due) in due {
        let gone = gone[n as usize].context("a key went that has no lease")?;
        late.push(gone.checked_duration_since(due).context("a key went before its time")?);
    }
    Figures::new(&mut late, started.elapsed(), used)
}

/// A lease with its key: when the key should go.
async fn grant(connection: &mut Connection, n: u32) -> anyhow::Result<Instant> {
    let asked = Instant::now();
    let grant = proto::LeaseGrantRequest { ttl: TTL };
    let lease: proto::LeaseGrantResponse = connection.call(GRANT, &grant).await?;
    anyhow::ensure!(lease.ttl == TTL, "another TTL than was asked for");
    let key = format!("{PREFIX}{n}").into();
    let put = proto::PutRequest { key, value: "v".into(), lease: lease.id };
    connection.call::<proto::Empty>(PUT, &put).await?;
    Ok(asked + Duration::from_secs(TTL.unsigned_abs()))
}

/// When each key went.
async fn deletions(mut watch: Stream, leases: u32) -> anyhow::Result<Vec<Option<Instant>>> {
    let mut gone = vec![None; leases as usize];
    let mut left = leases;
    while left > 0 {
        let answer: proto::WatchResponse = watch.next().await?;
        anyhow::ensure!(!answer.canceled, "the watcher was cut off");
        let now = Instant::now();
        for event in answer.events.into_iter().filter(|event| event.r#type == DELETED) {
            let key = event.kv.context("an event without its key")?.key;
            let n: usize = std::str::from_utf8(&key)?.trim_start_matches(PREFIX).parse()?;
            gone[n] = Some(now);
            left -= 1;
        }
    }
    Ok(gone)
}
