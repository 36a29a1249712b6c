//! A million keys: memory, and how long a restart takes.

use std::time::{Duration, Instant};

use super::calls::{end_of, load};
use super::client::{Connection, RANGE};
use super::proto;
use super::server::{Kind, Memory, Server};
use crate::figures::rate;

const KEYS: u64 = 1_000_000;
/// Bytes of a value.
const VALUE: usize = 100;
/// For memory to come to rest.
const REST: Duration = Duration::from_secs(2);

pub(crate) struct Figures {
    /// Keys per second.
    pub(crate) loaded: f64,
    /// Seconds from the start of the process to the first read.
    pub(crate) restarted: f64,
    pub(crate) idle: Memory,
    pub(crate) full: Memory,
    pub(crate) reopened: Memory,
}

pub(crate) async fn measure(kind: Kind) -> anyhow::Result<Figures> {
    let mut server = Server::start(kind).await?;
    tokio::time::sleep(REST).await;
    let idle = server.memory()?;
    let connections = Connection::open_many(server.address, 4).await?;
    let started = Instant::now();
    load(&connections, KEYS, VALUE).await?;
    let loaded = rate(KEYS, started.elapsed());
    drop(connections);
    tokio::time::sleep(REST).await;
    let full = server.memory()?;
    let restarted = server.restart().await?.as_secs_f64();
    tokio::time::sleep(REST).await;
    let reopened = server.memory()?;
    let all = proto::RangeRequest {
        key: "/".into(),
        range_end: end_of("/"),
        count_only: true,
        ..Default::default()
    };
    let mut connection = Connection::open(server.address).await?;
    let there: proto::RangeResponse = connection.call(RANGE, &all).await?;
    anyhow::ensure!(there.count == KEYS.cast_signed(), "{} keys are left", there.count);
    server.stop().await?;
    Ok(Figures { loaded, restarted, idle, full, reopened })
}
