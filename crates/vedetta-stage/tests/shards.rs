//! Processes that share shards: at the embedded store, at our server and at a real etcd. The processes of
//! a test are threads of it, each with a line of its own to the store, which can be cut.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tempfile::TempDir;
use testing::{Proxy, etcd, soon};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use vedetta_core::{Changes, Feed, KeyRange, Page, Registry, Revision, Source, SourceError};
use vedetta_db::Db;
use vedetta_etcd::{Cluster, Endpoint};
use vedetta_kv::{Delete, LeaseId, Options, SCHEMA, Store, StoreFeed};
use vedetta_stage::Shards;

const COUNT: u16 = 16;
const ALL: usize = COUNT as usize;
const PREFIX: &str = "orders/";
/// Short enough to wait for, and long enough for a machine with other things to do.
const TTL: Duration = Duration::from_secs(3);
/// How long a server may be silent.
const SILENCE: Duration = Duration::from_millis(400);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

type Owned = watch::Receiver<Arc<[u16]>>;

/// Where the shards are shared.
trait Place {
    type Registry: Registry;

    /// A line to the store, and the means to cut it.
    async fn line(&self) -> (Self::Registry, Link);
}

/// A line that can be cut: nothing passes, and nobody is told.
enum Link {
    Tcp(Proxy),
    Inside(Arc<watch::Sender<bool>>),
}

impl Link {
    fn cut(&self) {
        match self {
            Self::Tcp(proxy) => proxy.cut(),
            Self::Inside(whole) => drop(whole.send_replace(false)),
        }
    }

    fn mend(&self) {
        match self {
            Self::Tcp(proxy) => proxy.mend(),
            Self::Inside(whole) => drop(whole.send_replace(true)),
        }
    }
}

/// A server that speaks etcd's protocol.
impl Place for SocketAddr {
    type Registry = Cluster;

    async fn line(&self) -> (Cluster, Link) {
        let proxy = Proxy::to(*self).await;
        let cluster = Cluster::new([proxy.address().to_string()]).unwrap().patience(SILENCE);
        (cluster, Link::Tcp(proxy))
    }
}

/// The store in this process.
struct Embedded {
    store: Store,
    _folder: TempDir,
}

impl Embedded {
    async fn open() -> Self {
        let folder = TempDir::new().unwrap();
        let mut options = vedetta_db::Options::new(folder.path().join("vedetta.db"));
        options.ballast = 0;
        let db = Db::open(&options, &[SCHEMA]).unwrap();
        Self { store: Store::open(db, Options::default()).await.unwrap(), _folder: folder }
    }
}

impl Place for Embedded {
    type Registry = Line;

    async fn line(&self) -> (Line, Link) {
        let whole = Arc::new(watch::Sender::new(true));
        (Line { store: self.store.clone(), whole: whole.subscribe() }, Link::Inside(whole))
    }
}

/// A line to the store in this process. While it is cut, what is said waits, and so do the answers.
struct Line {
    store: Store,
    whole: watch::Receiver<bool>,
}

impl Line {
    async fn pass<T>(&self, call: impl Future<Output = T>) -> T {
        whole(&self.whole).await;
        let answer = call.await;
        whole(&self.whole).await;
        answer
    }
}

async fn whole(line: &watch::Receiver<bool>) {
    let _ = line.clone().wait_for(|whole| *whole).await;
}

impl Source for Line {
    type Feed = LineFeed;

    async fn list(&self, range: KeyRange, at: Option<Revision>) -> Result<Page, SourceError> {
        self.pass(self.store.list(range, at)).await
    }

    async fn follow(
        &self,
        range: KeyRange,
        from: Revision,
    ) -> Result<(LineFeed, Revision), SourceError> {
        let (feed, revision) = self.pass(self.store.follow(range, from)).await?;
        Ok((LineFeed { feed, whole: self.whole.clone() }, revision))
    }
}

struct LineFeed {
    feed: StoreFeed,
    whole: watch::Receiver<bool>,
}

impl Feed for LineFeed {
    fn owed(&self) -> Revision {
        self.feed.owed()
    }

    async fn next(&mut self) -> Result<Changes, SourceError> {
        let changes = self.feed.next().await;
        whole(&self.whole).await;
        changes
    }
}

impl Registry for Line {
    type Lease = LeaseId;

    async fn begin(&self, ttl: Duration) -> Result<LeaseId, SourceError> {
        self.pass(self.store.begin(ttl)).await
    }

    async fn renew(&self, lease: &LeaseId) -> Result<bool, SourceError> {
        self.pass(self.store.renew(lease)).await
    }

    async fn end(&self, lease: &LeaseId) -> Result<(), SourceError> {
        self.pass(self.store.end(lease)).await
    }

    async fn hold(
        &self,
        lease: &LeaseId,
        key: Bytes,
        value: Bytes,
    ) -> Result<Option<Revision>, SourceError> {
        self.pass(self.store.hold(lease, key, value)).await
    }

    async fn let_go(&self, key: Bytes, made: Revision) -> Result<Option<Revision>, SourceError> {
        self.pass(self.store.let_go(key, made)).await
    }
}

/// A process that has joined.
struct Process {
    shards: Shards,
    link: Link,
}

/// Those that share, and somebody who looks at what they say all the time.
struct Company<'a, P> {
    place: &'a P,
    processes: BTreeMap<String, Process>,
    watched: Arc<Mutex<Vec<(String, Owned)>>>,
    /// What was seen that may not be.
    fault: Arc<Mutex<Option<String>>>,
    stop: Arc<AtomicBool>,
    looking: Option<JoinHandle<u64>>,
}

impl<'a, P: Place> Company<'a, P> {
    fn at(place: &'a P) -> Self {
        let watched = Arc::<Mutex<Vec<(String, Owned)>>>::default();
        let fault = Arc::<Mutex<Option<String>>>::default();
        let stop = Arc::<AtomicBool>::default();
        let looking = thread::spawn({
            let (watched, fault, stop) =
                (Arc::clone(&watched), Arc::clone(&fault), Arc::clone(&stop));
            move || {
                let mut looks = 0;
                while !stop.load(Ordering::Relaxed) {
                    if let Some(seen) = owned_twice(&watched.lock()) {
                        *fault.lock() = Some(seen);
                    }
                    looks += 1;
                    thread::sleep(Duration::from_micros(300));
                }
                looks
            }
        });
        let looking = Some(looking);
        Self { place, processes: BTreeMap::new(), watched, fault, stop, looking }
    }

    async fn joins(&mut self, name: &str) {
        let (registry, link) = self.place.line().await;
        let shards = Shards::join(registry, PREFIX, name, COUNT, TTL).unwrap();
        // Also of those that are no more: they may have nothing.
        self.watched.lock().push((name.to_owned(), shards.owned()));
        assert!(self.processes.insert(name.to_owned(), Process { shards, link }).is_none());
    }

    async fn leaves(&mut self, name: &str) {
        let Process { shards, .. } = self.processes.remove(name).unwrap();
        let owned = shards.owned();
        soon("it leaves", shards.leave()).await;
        assert!(owned.borrow().is_empty());
    }

    fn dies(&mut self, name: &str) {
        self.processes.remove(name).unwrap();
    }

    fn link(&self, name: &str) -> &Link {
        &self.processes[name].link
    }

    fn has(&self, name: &str) -> BTreeSet<u16> {
        self.processes[name].shards.owned().borrow().iter().copied().collect()
    }

    fn shares(&self) -> BTreeMap<String, BTreeSet<u16>> {
        self.processes.keys().map(|name| (name.clone(), self.has(name))).collect()
    }

    async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let wait = async {
            while !holds(self) {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        };
        let came = tokio::time::timeout(testing::PATIENCE, wait).await.is_ok();
        assert!(came, "it never comes to that: {what}: {:?}", self.shares());
        assert_eq!(*self.fault.lock(), None, "{what}");
    }

    /// Waits until these, and nobody else, have fair shares of all that there is.
    async fn share(&self, names: &[&str]) {
        self.until(&format!("{names:?} share"), |now| {
            let all: Vec<u16> = now.shares().into_values().flatten().collect();
            let distinct: BTreeSet<u16> = all.iter().copied().collect();
            let fair = ALL / names.len()..=ALL.div_ceil(names.len());
            let fair = |name: &&str| fair.contains(&now.has(name).len());
            all.len() == ALL && distinct.len() == ALL && names.iter().all(fair)
        })
        .await;
    }

    fn end(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let looks = self.looking.take().unwrap().join().unwrap();
        assert!(looks > 100, "somebody looked");
        assert_eq!(*self.fault.lock(), None);
    }
}

impl<P> Drop for Company<'_, P> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// A shard that two say to be theirs at this instant: while all are looked at, none can say anything.
fn owned_twice(watched: &[(String, Owned)]) -> Option<String> {
    let now: Vec<_> = watched.iter().map(|(name, owned)| (name, owned.borrow())).collect();
    let mut owners = BTreeMap::new();
    for (name, shards) in &now {
        for shard in shards.iter() {
            if let Some(other) = owners.insert(*shard, *name) {
                return Some(format!("{shard} is owned by {other} and {name}"));
            }
        }
    }
    None
}

async fn shares_as_processes_come_and_go(place: &impl Place) {
    let names = ["a", "b", "c", "d", "e"];
    let mut company = Company::at(place);
    for count in 1..=names.len() {
        let before = company.shares();
        company.joins(names[count - 1]).await;
        company.share(&names[..count]).await;
        for (name, before) in before {
            assert!(company.has(&name).is_subset(&before), "only the newcomer gets something");
        }
    }
    let before = company.shares();
    company.leaves("b").await;
    company.share(&["a", "c", "d", "e"]).await;
    company.dies("d");
    company.share(&["a", "c", "e"]).await;
    for name in ["a", "c", "e"] {
        assert!(before[name].is_subset(&company.has(name)), "who stays loses nothing");
    }
    company.leaves("a").await;
    company.dies("c");
    company.share(&["e"]).await;
    // Three at once; one of them has the name of one that died.
    for name in ["f", "c", "g"] {
        company.joins(name).await;
    }
    company.share(&["c", "e", "f", "g"]).await;
    company.end();
}

async fn gives_up_what_it_cannot_be_sure_of(place: &impl Place) {
    let mut company = Company::at(place);
    for name in ["a", "b", "c"] {
        company.joins(name).await;
    }
    company.share(&["a", "b", "c"]).await;

    company.link("b").cut();
    company.until("who is cut off has nothing", |now| now.has("b").is_empty()).await;
    company.share(&["a", "c"]).await;
    assert!(company.has("b").is_empty());
    company.link("b").mend();
    company.share(&["a", "b", "c"]).await;

    // The store is away for all, and back before and after their leases are over.
    for until_over in [false, true] {
        for name in ["a", "b", "c"] {
            company.link(name).cut();
        }
        company
            .until("nobody has anything", |now| now.shares().values().all(BTreeSet::is_empty))
            .await;
        if until_over {
            tokio::time::sleep(TTL).await;
        }
        for name in ["a", "b", "c"] {
            company.link(name).mend();
        }
        company.share(&["a", "b", "c"]).await;
    }

    // Who is cut off and dies is not waited for longer than its lease.
    company.link("a").cut();
    company.dies("a");
    company.share(&["b", "c"]).await;
    // Who is cut off can still leave.
    company.link("c").cut();
    company.leaves("c").await;
    company.share(&["b"]).await;
    company.end();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_shard_comes_to_one_owner_at_the_embedded_store() {
    let place = Embedded::open().await;
    Box::pin(shares_as_processes_come_and_go(&place)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_shard_comes_to_one_owner_at_our_server() {
    let ours = Ours::start().await;
    Box::pin(shares_as_processes_come_and_go(&ours.address)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_shard_comes_to_one_owner_at_an_etcd() {
    let etcd = etcd::Cluster::start(1).await;
    Box::pin(shares_as_processes_come_and_go(&etcd.node(0).address())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_cannot_be_sure_of_its_lease_at_the_embedded_store_owns_nothing() {
    let place = Embedded::open().await;
    Box::pin(gives_up_what_it_cannot_be_sure_of(&place)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_cannot_be_sure_of_its_lease_at_our_server_owns_nothing() {
    let ours = Ours::start().await;
    Box::pin(gives_up_what_it_cannot_be_sure_of(&ours.address)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_cannot_be_sure_of_its_lease_at_an_etcd_owns_nothing() {
    let etcd = etcd::Cluster::start(1).await;
    Box::pin(gives_up_what_it_cannot_be_sure_of(&etcd.node(0).address())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_etcd_that_is_frozen_killed_and_emptied_ends_with_every_shard_owned_once() {
    let mut etcd = etcd::Cluster::start(1).await;
    let address = etcd.node(0).address();
    let mut company = Company::at(&address);
    let names = ["a", "b", "c"];
    for name in names {
        company.joins(name).await;
    }
    company.share(&names).await;
    for what in ["frozen", "killed", "emptied", "emptied and filled"] {
        names.iter().for_each(|name| company.link(name).cut());
        match what {
            "frozen" => etcd.node_mut(0).freeze(),
            _ => etcd.node_mut(0).kill(),
        }
        company.until(what, |now| now.shares().values().all(BTreeSet::is_empty)).await;
        match what {
            "frozen" => etcd.node_mut(0).thaw(),
            "killed" => etcd.node_mut(0).restart().await,
            _ => {
                etcd.node_mut(0).wipe();
                etcd.node_mut(0).restart().await;
            }
        }
        if what == "emptied and filled" {
            // One is away until the revision is higher than any it has seen.
            names[..2].iter().for_each(|name| company.link(name).mend());
            company.share(&names[..2]).await;
            let cluster = Cluster::new([address.to_string()]).unwrap();
            let lease = cluster.begin(testing::PATIENCE).await.unwrap();
            for key in 0..500 {
                cluster.hold(&lease, format!("{key}").into(), "".into()).await.unwrap().unwrap();
            }
        }
        names.iter().for_each(|name| company.link(name).mend());
        company.share(&names).await;
    }
    company.end();
}

#[tokio::test] // one thread, which is blocked
async fn stages_that_block_their_thread_do_not_lose_the_shards() {
    let place = Embedded::open().await;
    let shards = Shards::join(place.store.clone(), PREFIX, "a", COUNT, TTL).unwrap();
    let mut owned = shards.owned();
    soon("all are owned", owned.wait_for(|owned| owned.len() == ALL)).await.unwrap();
    thread::sleep(TTL * 2);
    assert!(!owned.has_changed().unwrap(), "the lease was renewed meanwhile");
    assert_eq!(owned.borrow().len(), ALL);
}

#[tokio::test]
async fn what_somebody_deletes_in_the_store_is_made_again() {
    let store = Embedded::open().await.store;
    let both = ["a", "b"].map(|name| {
        let shards = Shards::join(store.clone(), PREFIX, name, COUNT, TTL).unwrap();
        (shards.owned(), shards)
    });
    let halves = async |what: &str| {
        soon(what, async {
            while both.iter().any(|(owned, _)| owned.borrow().len() != ALL / 2)
                || store.list(KeyRange::prefix(PREFIX), None).await.unwrap().entries.len() < 2 + ALL
            {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        })
        .await;
    };
    halves("both join").await;
    for prefix in ["orders/shards/", "orders/members/", "orders/"] {
        let deleted = Delete { range: KeyRange::prefix(prefix), previous: false };
        assert!(store.delete(deleted).await.unwrap().count > 0);
        halves(prefix).await;
    }
}

#[tokio::test]
async fn shards_fewer_than_processes_are_owned_by_some_of_them() {
    let place = Embedded::open().await;
    let join = |name: &str| Shards::join(place.store.clone(), PREFIX, name, 1, TTL).unwrap();
    let (first, second) = (join("a"), join("b"));
    let either = async {
        let (mut one, mut other) = (first.owned(), second.owned());
        tokio::select! {
            _ = one.wait_for(|owned| **owned == [0]) => (first, second),
            _ = other.wait_for(|owned| **owned == [0]) => (second, first),
        }
    };
    let (first, heir) = either.await;
    soon("it leaves", first.leave()).await;
    let mut owned = heir.owned();
    soon("the other has it", owned.wait_for(|owned| **owned == [0])).await.unwrap();
}

/// Our server in this process; it ends with this value.
struct Ours {
    address: SocketAddr,
    _serving: AbortOnDropHandle<()>,
    _store: Embedded,
}

impl Ours {
    async fn start() -> Self {
        let store = Embedded::open().await;
        let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let endpoint = Endpoint::new(store.store.clone());
        let serving =
            tokio::spawn(vedetta_etcd::serve(listener, endpoint, CancellationToken::new()));
        Self { address, _serving: AbortOnDropHandle::new(serving), _store: store }
    }
}
