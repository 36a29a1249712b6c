//! Watchers on a few connections, and a steady stream of writes that they see.
//!
//! A writer puts again when all who watch its key have its last event: so the writes go as fast as the
//! events arrive, and no side gets ahead of its watchers to be faster.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::calls::{end_of, key};
use super::client::{Connection, PUT, Stream, WATCH};
use super::proto;
use super::server::Server;
use super::sides::Figures;

/// Bytes of a value: the time, the writer, and what fills it up.
const VALUE: usize = 128;
/// Connections of the watchers. All on a connection share a stream, as etcd's own client has it.
const CONNECTIONS: usize = 10;
/// An event that takes longer is missing.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy)]
pub(crate) struct Fanout {
    pub(crate) watchers: u64,
    /// Each watches a key of its own, instead of all the same prefix.
    pub(crate) distinct: bool,
    /// Who write at the same time.
    pub(crate) writers: usize,
}

pub(crate) async fn measure(
    server: &Server,
    fanout: Fanout,
    time: Duration,
) -> anyhow::Result<Figures> {
    let owed = if fanout.distinct { 1 } else { fanout.watchers };
    let clock = Instant::now();
    let writers: Arc<[Writer]> = (0..fanout.writers).map(|_| Writer::default()).collect();
    let mut opening = JoinSet::new();
    for (n, mut connection) in
        Connection::open_many(server.address, CONNECTIONS).await?.into_iter().enumerate()
    {
        let stream = connection.stream(WATCH).await?;
        opening.spawn(created(stream, watched(fanout, n as u64)));
    }
    let mut streams = Vec::new();
    while let Some(stream) = opening.join_next().await {
        streams.push(stream??);
    }

    let begin = Instant::now() + time / 4;
    let end = begin + time;
    let mut reading = JoinSet::new();
    for stream in streams {
        let writers = Arc::clone(&writers);
        reading.spawn(read(stream, writers, owed, clock, begin, end));
    }
    let connections = Connection::open_many(server.address, fanout.writers.min(8)).await?;
    let mut writing: JoinSet<anyhow::Result<()>> = JoinSet::new();
    for id in 0..fanout.writers {
        let (mut connection, writers) =
            (connections[id % connections.len()].clone(), Arc::clone(&writers));
        writing.spawn(async move {
            loop {
                let mut value = BytesMut::with_capacity(VALUE);
                value.put_u64(u64::try_from(clock.elapsed().as_nanos())?);
                value.put_u64(id as u64);
                value.resize(VALUE, 7);
                let key = key(fastrand::u64(..10_000)).into();
                let put = proto::PutRequest { key, value: value.freeze(), lease: 0 };
                connection.call::<proto::Empty>(PUT, &put).await?;
                let all_have_it = writers[id].all_have_it.notified();
                tokio::time::timeout(PATIENCE, all_have_it).await.context("events are missing")?;
            }
        });
    }
    tokio::time::sleep_until(begin.into()).await;
    let before = server.cpu()?;
    tokio::select! {
        () = tokio::time::sleep_until(end.into()) => {}
        Some(failed) = writing.join_next() => failed??,
    }
    let used = server.cpu()?.since(&before);
    let mut took = Vec::new();
    while let Some(some) = reading.join_next().await {
        took.append(&mut some??);
    }
    Figures::new(&mut took, time, used)
}

#[derive(Default)]
struct Writer {
    /// Watchers that have its last event.
    have_it: AtomicU64,
    all_have_it: Notify,
}

/// What the watchers of one stream watch.
fn watched(fanout: Fanout, first: u64) -> Vec<proto::WatchRequest> {
    let request = |n| {
        let (key, range_end) = if fanout.distinct {
            (key(n).into(), Bytes::new())
        } else {
            ("/bench/".into(), end_of("/bench/"))
        };
        let create = proto::WatchCreateRequest { key, range_end };
        proto::WatchRequest { create_request: Some(create) }
    };
    (first..fanout.watchers).step_by(CONNECTIONS).map(request).collect()
}

/// Makes the watchers of one stream, and waits until they are there.
async fn created(mut stream: Stream, watched: Vec<proto::WatchRequest>) -> anyhow::Result<Stream> {
    for request in &watched {
        stream.send(request)?;
    }
    for _ in watched {
        let answer: proto::WatchResponse = tokio::time::timeout(PATIENCE, stream.next()).await??;
        anyhow::ensure!(answer.created && !answer.canceled, "a watcher was refused");
    }
    Ok(stream)
}

/// How long the events of the time measured took.
async fn read(
    mut stream: Stream,
    writers: Arc<[Writer]>,
    owed: u64,
    clock: Instant,
    begin: Instant,
    end: Instant,
) -> anyhow::Result<Vec<Duration>> {
    let mut took = Vec::new();
    let reading = async {
        loop {
            let answer: proto::WatchResponse = stream.next().await?;
            anyhow::ensure!(!answer.canceled, "a watcher was cut off");
            let now = Instant::now();
            for event in answer.events {
                let mut value = event.kv.context("an event without its key")?.value;
                anyhow::ensure!(value.len() == VALUE, "another value than was put");
                let sent = clock + Duration::from_nanos(value.get_u64());
                let writer = &writers[usize::try_from(value.get_u64())?];
                if now >= begin {
                    took.push(now - sent);
                }
                if writer.have_it.fetch_add(1, Ordering::Relaxed) + 1 == owed {
                    writer.have_it.store(0, Ordering::Relaxed);
                    writer.all_have_it.notify_one();
                }
            }
        }
    };
    match tokio::time::timeout_at(end.into(), reading).await {
        Ok(failed) => failed,
        Err(_) => Ok(took),
    }
}
