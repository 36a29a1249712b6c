//! Watchers at a real etcd of three nodes, each of which can be killed, frozen and cut off.

mod real;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use etcd_client::{Client, Error, GetOptions, Txn, TxnOp};
use real::{LOOK_AGAIN, Pen, Place, Stage, Write, suite, until};
use testing::{Proxy, etcd, soon};
use vedetta_core::Revision;
use vedetta_etcd::Cluster;
use vedetta_runtime::watcher::Phase;

/// How long a node may be silent before the next one is asked.
const SILENCE: Duration = Duration::from_millis(500);

/// The watcher goes through the proxies, the pen past them.
struct Etcd {
    cluster: etcd::Cluster,
    pen: Clients,
}

impl Etcd {
    async fn start() -> Self {
        let cluster = etcd::Cluster::start(3).await;
        let mut clients = Vec::new();
        for node in cluster.nodes() {
            clients.push(Client::connect([node.address().to_string()], None).await.unwrap());
        }
        let pen = Clients { clients: clients.into(), turn: Arc::default() };
        Self { cluster, pen }
    }

    fn proxies(&self) -> impl Iterator<Item = &Proxy> {
        self.cluster.nodes().iter().map(etcd::Node::proxy)
    }

    /// The node that the watcher, the only one there is, is connected to.
    async fn watched_node<P: Pen>(&self, stage: &Stage<P>) -> usize {
        let mut found = None;
        until("the watcher follows one node", || {
            let mut used = (0..3).filter(|at| self.cluster.node(*at).proxy().is_used());
            found = used.next().filter(|_| used.next().is_none());
            found.is_some() && stage.watching.status().phase == Phase::Following
        })
        .await;
        found.unwrap()
    }
}

/// A client for each node; one after another is asked until one answers.
#[derive(Clone)]
struct Clients {
    clients: Arc<[Client]>,
    turn: Arc<AtomicUsize>,
}

impl Clients {
    async fn ask<T, F>(&self, ask: impl Fn(Client) -> F + Sync) -> T
    where
        F: Future<Output = Result<T, Error>> + Send,
    {
        soon("some node answers", async {
            loop {
                let turn = self.turn.load(Ordering::Relaxed);
                let client = self.clients[turn % self.clients.len()].clone();
                if let Ok(Ok(answer)) = tokio::time::timeout(SILENCE, ask(client)).await {
                    return answer;
                }
                self.turn.store(turn + 1, Ordering::Relaxed);
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        })
        .await
    }
}

impl Pen for Clients {
    async fn write(&self, writes: Vec<Write>) -> Revision {
        let op = |(key, value): Write| match value {
            Some(value) => TxnOp::put(key, value, None),
            None => TxnOp::delete(key, None),
        };
        let txn = Txn::new().and_then(writes.into_iter().map(op).collect::<Vec<_>>());
        let ask = |mut client: Client| {
            let txn = txn.clone();
            async move { client.txn(txn).await }
        };
        let done = self.ask(ask).await;
        Revision(done.header().unwrap().revision().cast_unsigned())
    }

    async fn keys(&self, prefix: &str) -> BTreeMap<Bytes, Bytes> {
        let ask = |mut client: Client| async move {
            client.get(prefix, Some(GetOptions::new().with_prefix())).await
        };
        let mut found = self.ask(ask).await;
        let both = |kv: etcd_client::KeyValue| {
            let (key, value) = kv.into_key_value();
            (Bytes::from(key), Bytes::from(value))
        };
        found.take_kvs().into_iter().map(both).collect()
    }

    async fn compact(&self) {
        let last = self.ask(|mut client| async move { client.get("/", None).await }).await;
        let last = last.header().unwrap().revision();
        let ask = |mut client: Client| async move {
            match client.compact(last, None).await {
                // The answer to an earlier try was late.
                Err(Error::GRpcStatus(status)) if status.message().contains("compacted") => Ok(()),
                done => done.map(drop),
            }
        };
        self.ask(ask).await;
    }
}

impl Place for Etcd {
    type Source = Cluster;
    type Pen = Clients;
    const PAGE: usize = 1_000;

    fn source(&self) -> Cluster {
        Cluster::new(self.cluster.endpoints()).unwrap().patience(SILENCE)
    }

    fn pen(&self) -> &Clients {
        &self.pen
    }

    fn cut(&self) {
        self.proxies().for_each(Proxy::cut);
        self.proxies().for_each(Proxy::hang_up);
    }

    fn mend(&self) {
        self.proxies().for_each(Proxy::mend);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_of_an_etcd_holds_what_it_promises() {
    let place = Etcd::start().await;
    suite::holds_at(&place).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_happens_to_an_etcd_its_watcher_ends_as_it_says() {
    let mut place = Etcd::start().await;
    let stage = Stage::ready(&place, "/rooms/").await;
    stage.reality.is_clumsy(10);

    stage
        .chapter("the leader is killed", async |writer| {
            let leader = place.cluster.leader().await;
            place.cluster.node_mut(leader).kill();
            assert_ne!(place.cluster.leader().await, leader);
            writer.goes_on().await;
            place.cluster.node_mut(leader).restart().await;
        })
        .await;
    stage
        .chapter("its node is killed", async |writer| {
            let node = place.watched_node(&stage).await;
            stage.loses_its_line(async || place.cluster.node_mut(node).kill()).await;
            writer.goes_on().await;
            assert_ne!(place.watched_node(&stage).await, node);
            place.cluster.node_mut(node).restart().await;
        })
        .await;
    stage
        .chapter("its node is frozen", async |writer| {
            let node = place.watched_node(&stage).await;
            stage.loses_its_line(async || place.cluster.node_mut(node).freeze()).await;
            writer.goes_on().await;
            assert_ne!(place.watched_node(&stage).await, node);
            place.cluster.node_mut(node).thaw();
        })
        .await;
    stage
        .chapter("the network hangs up", async |writer| {
            for _ in 0..3 {
                place.watched_node(&stage).await;
                stage.loses_its_line(async || place.proxies().for_each(Proxy::hang_up)).await;
                writer.goes_on().await;
            }
        })
        .await;
    stage
        .chapter("its node has no leader", async |_| {
            let node = place.watched_node(&stage).await;
            let others = [(node + 1) % 3, (node + 2) % 3];
            let kill_others =
                async || others.iter().for_each(|other| place.cluster.node_mut(*other).kill());
            stage.loses_its_line(kill_others).await;
            others.iter().for_each(|other| place.cluster.node_mut(*other).spawn());
            for other in others {
                assert!(place.cluster.node_mut(other).healthy().await);
            }
        })
        .await;
    assert_eq!(stage.watching.status().lists, 1, "all of it was in the history");

    stage.crowd(true).await;
    stage
        .chapter("keys go while it is away, and their history", async |writer| {
            // Nobody is told.
            stage.loses_its_line(async || place.proxies().for_each(Proxy::cut)).await;
            stage.crowd(false).await;
            writer.goes_on().await;
            stage.pen.compact().await;
            place.mend();
        })
        .await;
    assert_eq!(stage.watching.status().lists, 2);
    stage.end().await;
}
