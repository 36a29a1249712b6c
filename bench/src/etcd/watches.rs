//! Watchers on a few connections, and a steady stream of writes that they see.
//!
//! A writer puts again when all who watch its key have its last event: so the writes go as fast as the
//! events arrive, and no side gets ahead of its watchers to be faster.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use prost::Message as _;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::calls::{end_of, key};
use super::client::{Connection, PUT, WATCH};
use super::line::{FIRST_WINDOW, Line, framed, next_message};
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
    for n in 0..CONNECTIONS {
        let listener = Listener::open(server.address).await?;
        opening.spawn(created(listener, watched(fanout, n as u64)));
    }
    let mut listeners = Vec::new();
    while let Some(listener) = opening.join_next().await {
        listeners.push(listener??);
    }

    let begin = Instant::now() + time / 4;
    let end = begin + time;
    let mut reading = JoinSet::new();
    for listener in listeners {
        let writers = Arc::clone(&writers);
        reading.spawn(read(listener, writers, owed, clock, begin, end));
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

/// A connection with one stream, on which answers come.
struct Listener {
    line: Line,
    stream: u32,
    came: BytesMut,
}

impl Listener {
    async fn open(address: SocketAddr) -> anyhow::Result<Self> {
        let mut line = Line::open(address).await?;
        let stream = line.begin(WATCH);
        Ok(Self { line, stream, came: BytesMut::new() })
    }

    /// Waits for answers, and hands each to `each`, with when they came.
    async fn read(
        &mut self,
        mut each: impl FnMut(proto::WatchResponse, Instant) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        self.line.flush_and_read().await?;
        let now = Instant::now();
        while let Some(came) = self.line.next()? {
            anyhow::ensure!(!came.is_over, "the server ended the stream");
            self.came.unsplit(came.data);
            while let Some(message) = next_message(&mut self.came) {
                let answer = proto::WatchResponse::decode(message)?;
                anyhow::ensure!(!answer.canceled, "a watcher was refused, or cut off");
                each(answer, now)?;
            }
        }
        Ok(())
    }
}

/// Makes the watchers of one stream, and waits until they are there.
async fn created(
    mut listener: Listener,
    watched: Vec<proto::WatchRequest>,
) -> anyhow::Result<Listener> {
    let requests: Vec<Bytes> = watched.iter().map(framed).collect();
    let all: usize = requests.iter().map(Bytes::len).sum();
    anyhow::ensure!(all <= FIRST_WINDOW, "these are too many watchers for one stream");
    for request in &requests {
        listener.line.send(listener.stream, request, false);
    }
    let mut created = 0;
    while created < requests.len() {
        let reading = listener.read(|answer, _| {
            anyhow::ensure!(answer.created, "events before a watcher is there");
            created += 1;
            Ok(())
        });
        tokio::time::timeout(PATIENCE, reading).await??;
    }
    Ok(listener)
}

/// How long the events of the time measured took.
async fn read(
    mut listener: Listener,
    writers: Arc<[Writer]>,
    owed: u64,
    clock: Instant,
    begin: Instant,
    end: Instant,
) -> anyhow::Result<Vec<Duration>> {
    let mut took = Vec::new();
    let mut take = |answer: proto::WatchResponse, now: Instant| -> anyhow::Result<()> {
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
        Ok(())
    };
    let reading = async {
        loop {
            listener.read(&mut take).await?;
        }
    };
    match tokio::time::timeout_at(end.into(), reading).await {
        Ok(failed) => failed,
        Err(_) => Ok(took),
    }
}
