//! Callers that ask again and again, each waiting for its answer.

use std::time::{Duration, Instant};

use bytes::Bytes;
use prost::Message as _;
use tokio::task::JoinSet;

use super::callers::{Callers, Question};
use super::client::{Connection, ECHO, LOG, PUT, RANGE, TXN};
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
    /// A put that goes to a plain log, which only the ceiling has.
    Log,
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
    let mut lines = Vec::new();
    for _ in 0..connections {
        lines.push(Callers::open(server.address).await?);
    }
    let begin = Instant::now() + time / 4;
    let end = begin + time;
    let mut calling = JoinSet::new();
    for (n, line) in lines.into_iter().enumerate() {
        let share = (callers + connections - 1 - n) / connections;
        calling.spawn(line.run(share, move || question(call), begin, end));
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

/// What a caller asks next.
fn question(call: Call) -> Question {
    let get = |key: String, range_end, serializable, check| {
        let question =
            proto::RangeRequest { key: key.into(), range_end, serializable, ..Default::default() };
        Question::new(RANGE, &question, check)
    };
    match call {
        Call::Put => Question::new(PUT, &put_of(fastrand::u64(..WRITTEN)), empty),
        Call::Mixed if fastrand::u8(..5) == 0 => {
            Question::new(PUT, &put_of(fastrand::u64(..READ)), empty)
        }
        Call::Echo => Question::new(ECHO, &proto::Empty {}, empty),
        Call::Log => Question::new(LOG, &put_of(fastrand::u64(..WRITTEN)), empty),
        Call::Get | Call::GetSerializable | Call::Mixed => {
            let key = key(fastrand::u64(..READ));
            get(key, Bytes::new(), call == Call::GetSerializable, found::<1>)
        }
        Call::GetHundred => {
            let first = key(fastrand::u64(..READ / 100) * 100);
            let prefix = &first[..first.len() - 2];
            get(prefix.to_owned(), end_of(prefix), false, found::<100>)
        }
    }
}

fn empty(answer: Bytes) -> anyhow::Result<()> {
    proto::Empty::decode(answer)?;
    Ok(())
}

/// That so many keys are there.
fn found<const KEYS: i64>(answer: Bytes) -> anyhow::Result<()> {
    let found = proto::RangeResponse::decode(answer)?.count;
    anyhow::ensure!(found == KEYS, "found {found} keys instead of {KEYS}");
    Ok(())
}

fn put_of(n: u64) -> proto::PutRequest {
    proto::PutRequest { key: key(n).into(), value: vec![7; VALUE].into(), lease: 0 }
}

async fn put(connection: &mut Connection, n: u64) -> anyhow::Result<()> {
    connection.call::<proto::Empty>(PUT, &put_of(n)).await?;
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
