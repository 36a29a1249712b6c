//! Keys that are held for as long as somebody lives: in the embedded store, in our server and in a real
//! etcd. This is what a registry must do.

mod support;

use std::time::Duration;

use support::{Ours, soon};
use testing::etcd;
use vedetta_core::{Changes, Feed as _, KeyRange, Registry, Revision};
use vedetta_etcd::Cluster;

/// Longer than any test.
const LONG: Duration = Duration::from_secs(600);
const SHORT: Duration = Duration::from_secs(1);

async fn value<R: Registry>(registry: &R, key: &'static str) -> Option<String> {
    let page = registry.list(KeyRange::One(key.into()), None).await.unwrap();
    page.entries.first().map(|entry| String::from_utf8_lossy(&entry.value).into_owned())
}

/// Follows a range from now on.
async fn follow<R: Registry>(registry: &R, prefix: &'static str) -> R::Feed {
    let range = KeyRange::prefix(prefix);
    let now = registry.list(range.clone(), None).await.unwrap().revision;
    registry.follow(range, now.next()).await.unwrap().0
}

async fn holds_a_key_for_one_lease_only<R: Registry>(registry: &R) {
    let ours = registry.begin(LONG).await.unwrap();
    let theirs = registry.begin(LONG).await.unwrap();
    let hold = async |lease: &R::Lease, value: &'static str| {
        registry.hold(lease, "a/1".into(), value.into()).await.unwrap()
    };
    let made = hold(&ours, "ours").await.expect("it was free");
    assert_eq!(hold(&theirs, "theirs").await, None);
    assert_eq!(hold(&ours, "again").await, Some(made), "what is ours is ours, as it was made");
    assert_eq!(value(registry, "a/1").await.as_deref(), Some("ours"));

    let before = Revision(made.0 - 1);
    assert_eq!(registry.let_go("a/1".into(), before).await.unwrap(), None, "another one");
    assert_eq!(value(registry, "a/1").await.as_deref(), Some("ours"));
    let gone = registry.let_go("a/1".into(), made).await.unwrap().expect("it was there");
    assert!(gone > made);
    assert_eq!(registry.let_go("a/1".into(), made).await.unwrap(), None, "gone already");

    let made_by_them = hold(&theirs, "theirs").await.expect("it is free");
    assert!(made_by_them > gone);
    assert_eq!(hold(&ours, "ours").await, None);
    let late = registry.let_go("a/1".into(), made).await.unwrap();
    assert_eq!(late, None, "a call that comes late does no harm");
    assert_eq!(value(registry, "a/1").await.as_deref(), Some("theirs"));
    registry.end(&theirs).await.unwrap();
    registry.end(&ours).await.unwrap();
}

async fn lets_all_go_at_once_when_a_lease_ends<R: Registry>(registry: &R) {
    let lease = registry.begin(LONG).await.unwrap();
    let mut feed = follow(registry, "b/").await;
    for key in ["b/1", "b/2", "b/3"] {
        registry.hold(&lease, key.into(), "".into()).await.unwrap().unwrap();
    }
    assert!(registry.renew(&lease).await.unwrap());
    registry.end(&lease).await.unwrap();
    let mut gone = Vec::new();
    while gone.len() < 3 {
        let Changes { changes, .. } = soon("the changes", feed.next()).await.unwrap();
        gone.extend(changes.into_iter().filter(|change| change.value.is_none()));
    }
    assert!(gone.iter().all(|change| change.revision == gone[0].revision), "{gone:?}");

    assert!(!registry.renew(&lease).await.unwrap(), "it does not come back");
    assert_eq!(registry.hold(&lease, "b/4".into(), "".into()).await.unwrap(), None);
    registry.end(&lease).await.unwrap(); // said again it does no harm
}

async fn lets_all_go_when_nobody_renews<R: Registry>(registry: &R) {
    let (dies, lives) = (registry.begin(SHORT).await.unwrap(), registry.begin(LONG).await.unwrap());
    let mut feed = follow(registry, "c/").await;
    registry.hold(&dies, "c/1".into(), "".into()).await.unwrap().unwrap();
    registry.hold(&lives, "c/2".into(), "".into()).await.unwrap().unwrap();
    let gone = loop {
        let Changes { changes, .. } = soon("the end of a lease", feed.next()).await.unwrap();
        if let Some(gone) = changes.into_iter().find(|change| change.value.is_none()) {
            break gone;
        }
    };
    assert_eq!(gone.key, "c/1");
    assert!(!registry.renew(&dies).await.unwrap());
    assert!(registry.renew(&lives).await.unwrap());
    assert!(value(registry, "c/2").await.is_some());
    registry.end(&lives).await.unwrap();
}

async fn is_a_registry<R: Registry>(registry: &R) {
    Box::pin(holds_a_key_for_one_lease_only(registry)).await;
    Box::pin(lets_all_go_at_once_when_a_lease_ends(registry)).await;
    Box::pin(lets_all_go_when_nobody_renews(registry)).await;
}

#[tokio::test]
async fn the_embedded_store_is_a_registry() {
    is_a_registry(&Ours::start().await.store).await;
}

#[tokio::test]
async fn our_server_is_a_registry() {
    let ours = Ours::start().await;
    is_a_registry(&Cluster::new([ours.address.to_string()]).unwrap()).await;
}

#[tokio::test]
async fn an_etcd_is_a_registry() {
    let etcd = etcd::Cluster::start(1).await;
    is_a_registry(&Cluster::new(etcd.endpoints()).unwrap()).await;
}

#[tokio::test]
async fn an_etcd_that_asks_who_we_are_is_a_registry() {
    let etcd = etcd::Cluster::start_with(1, &["--auth-token-ttl", "1"]).await;
    let root = ["user", "add", "root:secret"];
    for told in [&root[..], &["user", "grant-role", "root", "root"], &["auth", "enable"]] {
        etcd.node(0).ctl(told).await.unwrap();
    }
    let cluster = Cluster::new(etcd.endpoints()).unwrap().user("root", "secret");
    is_a_registry(&cluster).await;
}

#[tokio::test]
async fn a_lease_outlives_a_node_that_is_frozen() {
    let mut etcd = etcd::Cluster::start(3).await;
    let leader = etcd.leader().await;
    let node = (leader + 1) % 3;
    // The node that is frozen is asked first.
    let endpoints = [node, (leader + 2) % 3, leader].map(|at| etcd.node(at).endpoint());
    let cluster = Cluster::new(endpoints).unwrap().patience(Duration::from_secs(1));
    let lease = cluster.begin(LONG).await.unwrap();
    cluster.hold(&lease, "a".into(), "".into()).await.unwrap().unwrap();
    etcd.node_mut(node).freeze();
    soon("the next node", async { while cluster.renew(&lease).await.is_err() {} }).await;
    assert!(cluster.renew(&lease).await.unwrap());
    assert!(cluster.hold(&lease, "a".into(), "".into()).await.unwrap().is_some());
    etcd.node_mut(node).thaw();
}
