//! Callers that ask again and again, each waiting for its answer.

use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::task::JoinSet;

use super::client::{Connection, ECHO, PUT, RANGE, TXN};
use super::proto;
use super::server::Server;
use super::sides::Figures;

/// Bytes of a value.
const VALUE: usize = 256;
/// Keys that are written.
const WRITTEN: u64 = 100_000;
/// Keys that are there to be read.
const READ: u64 = 10_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Put,
    /// One key as of now, which is the default.
    Get,
    /// One key as the member knows it, perhaps a little old.
    GetSerializable,
    /// The hundred keys with the same beginning.
    GetHundred,
    /// One put after four reads, on average.
    Mixed,
    /// Nothing, which only the ceiling answers.
    Echo,
}

/// What is there before it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    Empty,
    /// Keys to read, put one by one just before.
    Written,
    /// The same keys, and the server started anew. etcd's reads copy a buffer that is as large as the
    /// largest batch of writes was since its start, and none has been after this.
    Restarted,
}

/// What `callers` get done over so many connections, after a quarter of the time to get going.
pub(crate) async fn measure(
    server: &mut Server,
    start: Start,
    call: Call,
    (callers, connections): (usize, usize),
    time: Duration,
) -> anyhow::Result<Figures> {
    if start != Start::Empty {
        put_each(&Connection::open_many(server.address, 8).await?).await?;
    }
    if start == Start::Restarted {
        server.restart().await?;
    }
    let connections = Connection::open_many(server.address, connections).await?;
    let begin = Instant::now() + time / 4;
    let end = begin + time;
    let mut calling = JoinSet::new();
    for caller in 0..callers {
        let mut connection = connections[caller % connections.len()].clone();
        calling.spawn(async move {
            let mut took = Vec::new();
            loop {
                let asked = Instant::now();
                if asked >= end {
                    return anyhow::Ok(took);
                }
                ask(&mut connection, call).await?;
                let answered = Instant::now();
                if answered >= begin && answered <= end {
                    took.push(answered - asked);
                }
            }
        });
    }
    tokio::time::sleep_until(begin.into()).await;
    let before = server.cpu()?;
    tokio::time::sleep_until(end.into()).await;
    let used = server.cpu()?.since(&before);
    let mut took = Vec::new();
    while let Some(some) = calling.join_next().await {
        took.append(&mut some??);
    }
    Figures::new(&mut took, time, used)
}

async fn ask(connection: &mut Connection, call: Call) -> anyhow::Result<()> {
    let found = match call {
        Call::Put => return put(connection, fastrand::u64(..WRITTEN)).await,
        Call::Mixed if fastrand::u8(..5) == 0 => {
            return put(connection, fastrand::u64(..READ)).await;
        }
        Call::Echo => {
            connection.call::<proto::Empty>(ECHO, &proto::Empty {}).await?;
            return Ok(());
        }
        Call::Get | Call::GetSerializable | Call::Mixed => {
            let serializable = call == Call::GetSerializable;
            let key = key(fastrand::u64(..READ)).into();
            let question = proto::RangeRequest { key, serializable, ..Default::default() };
            (connection.call::<proto::RangeResponse>(RANGE, &question).await?.count, 1)
        }
        Call::GetHundred => {
            let first = key(fastrand::u64(..READ / 100) * 100);
            let prefix = &first[..first.len() - 2];
            let question = proto::RangeRequest {
                key: prefix.to_owned().into(),
                range_end: end_of(prefix),
                ..Default::default()
            };
            (connection.call::<proto::RangeResponse>(RANGE, &question).await?.count, 100)
        }
    };
    anyhow::ensure!(found.0 == found.1, "found {} keys instead of {}", found.0, found.1);
    Ok(())
}

async fn put(connection: &mut Connection, n: u64) -> anyhow::Result<()> {
    let key = key(n).into();
    let question = proto::PutRequest { key, value: vec![7; VALUE].into(), lease: 0 };
    connection.call::<proto::Empty>(PUT, &question).await?;
    Ok(())
}

/// Puts the keys to read, by 64 callers.
async fn put_each(connections: &[Connection]) -> anyhow::Result<()> {
    let mut putting = JoinSet::new();
    for caller in 0..64 {
        let mut connection = connections[caller % connections.len()].clone();
        putting.spawn(async move {
            for n in (caller as u64..READ).step_by(64) {
                put(&mut connection, n).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(done) = putting.join_next().await {
        done??;
    }
    Ok(())
}

/// Puts so many keys, a hundred in a transaction.
pub(crate) async fn load(
    connections: &[Connection],
    keys: u64,
    value: usize,
) -> anyhow::Result<()> {
    let mut loading = JoinSet::new();
    let value = Bytes::from(vec![7; value]);
    for caller in 0..16 {
        let mut connection = connections[caller % connections.len()].clone();
        let value = value.clone();
        loading.spawn(async move {
            let mut n = caller as u64 * 100;
            while n < keys {
                let put = |n| {
                    // Keys in no order, so that the tree is built as it would be in life.
                    let key = key(n * 7_919 % keys).into();
                    let put = proto::PutRequest { key, value: value.clone(), lease: 0 };
                    proto::RequestOp { request_put: Some(put) }
                };
                let txn = proto::TxnRequest { success: (n..keys.min(n + 100)).map(put).collect() };
                connection.call::<proto::Empty>(TXN, &txn).await?;
                n += 1600;
            }
            anyhow::Ok(())
        });
    }
    while let Some(done) = loading.join_next().await {
        done??;
    }
    Ok(())
}

pub(crate) fn key(n: u64) -> String {
    format!("/bench/{n:09}")
}

/// The end of the range of all keys with this prefix.
pub(crate) fn end_of(prefix: &str) -> Bytes {
    let mut end = prefix.as_bytes().to_vec();
    *end.last_mut().expect("a prefix has bytes") += 1;
    end.into()
}
