//! Writing to an etcd elsewhere: the real one, and ours.

mod support;

use std::error::Error as _;
use std::time::Duration;

use support::{Ours, soon};
use testing::{Proxy, etcd};
use vedetta_core::{KeyRange, Revision, Source as _};
use vedetta_etcd::{Cluster, Is, Lease, LeaseId, Write, WriteError, Written};

/// So that what is silent is noticed soon; and still more than anybody needs to answer.
const IMPATIENT: Duration = Duration::from_secs(2);
/// Longer than any test.
const LONG: Duration = Duration::from_secs(600);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Tells the story of a real etcd of three nodes, then of ours.
async fn of_both(story: impl AsyncFn(Cluster)) {
    let etcd = etcd::Cluster::start(3).await;
    Box::pin(story(Cluster::new(etcd.endpoints()).unwrap())).await;
    let ours = Ours::start().await;
    Box::pin(story(Cluster::new([ours.address.to_string()]).unwrap())).await;
}

async fn value(cluster: &Cluster, key: &'static str) -> Option<String> {
    let found = cluster.get(key).await.unwrap();
    found.map(|entry| String::from_utf8_lossy(&entry.value).into_owned())
}

/// Waits until a key is gone, on whichever node answers.
async fn gone(cluster: &Cluster, key: &'static str) {
    soon("a key goes", async {
        while !matches!(cluster.get(key).await, Ok(None)) {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    })
    .await;
}

/// Waits until a write is answered.
async fn written(cluster: &Cluster, write: &Write) -> Written {
    soon("a write is answered", async {
        loop {
            match cluster.write(write.clone()).await {
                Ok(written) => return written,
                Err(_) => tokio::time::sleep(LOOK_AGAIN).await,
            }
        }
    })
    .await
}

/// What an error says, its causes included.
fn told(error: &WriteError) -> String {
    let cause = error.source().map(|cause| format!("{cause}: {:?}", cause.source()));
    format!("{error}: {}", cause.unwrap_or_default())
}

async fn hold(cluster: &Cluster, key: &'static str, lease: &Lease) -> Written {
    let write = Write::new().when(key, Is::Missing).put_leased(key, "held", lease);
    cluster.write(write).await.unwrap()
}

#[tokio::test]
async fn a_key_is_put_read_and_deleted() {
    of_both(async |cluster| {
        assert_eq!(cluster.get("a").await.unwrap(), None);
        assert!(!cluster.delete("a").await.unwrap());
        let first = cluster.put("a", "1").await.unwrap();
        let second = cluster.put("a", vec![0xff, 0]).await.unwrap();
        assert_eq!(second, first.next());
        let entry = cluster.get("a").await.unwrap().unwrap();
        assert_eq!((&entry.key[..], &entry.value[..]), (&b"a"[..], &[0xff, 0][..]));
        assert_eq!(entry.modified, second);
        assert_eq!(cluster.clone().get("ab").await.unwrap(), None, "one key, not a prefix");
        assert!(cluster.delete("a").await.unwrap());
        assert_eq!(cluster.get("a").await.unwrap(), None);
        let page = cluster.list(KeyRange::all(), None).await.unwrap();
        assert_eq!((page.entries.len(), page.revision), (0, second.next()));
    })
    .await;
}

#[tokio::test]
async fn a_write_is_done_whole_if_all_its_conditions_hold_and_else_not_at_all() {
    of_both(async |cluster| {
        let at = cluster.put("there", "1").await.unwrap();
        let before = Revision(at.0 - 1);
        for (key, is, holds) in [
            ("there", Is::Present, true),
            ("there", Is::Missing, false),
            ("there", Is::At(at), true),
            ("there", Is::At(before), false),
            ("there", Is::Value("1".into()), true),
            ("there", Is::Value("2".into()), false),
            ("none", Is::Present, false),
            ("none", Is::Missing, true),
            ("none", Is::Value("".into()), false),
            ("none", Is::At(at), false),
        ] {
            let write = Write::new().when(key, is.clone());
            let empty = cluster.write(write.clone()).await.unwrap();
            assert_eq!(empty.done, holds, "{key} {is:?}");
            // Beside one that holds, with a change.
            let write = write.when("there", Is::Present).put("told", key);
            let done = cluster.write(write).await.unwrap();
            assert_eq!(done.done, holds, "{key} {is:?}");
            assert_eq!(value(&cluster, "told").await, holds.then(|| key.to_owned()));
            assert_eq!(cluster.delete("told").await.unwrap(), holds);
        }
        let all = Write::new().put("a", "1").put("b", "2").delete("there").delete("none");
        let all = cluster.write(all.when("there", Is::At(at))).await.unwrap();
        assert!(all.done);
        assert_eq!(all.deleted, 1);
        let page = cluster.list(KeyRange::all(), None).await.unwrap();
        assert_eq!(page.revision, all.revision);
        assert!(page.entries.iter().all(|entry| entry.modified == all.revision), "one revision");
        assert_eq!(page.entries.len(), 2);
    })
    .await;
}

#[tokio::test]
async fn what_the_server_refuses_changes_nothing_and_says_so() {
    of_both(async |cluster| {
        let large = cluster.put("a", vec![b'x'; 4 << 20]).await.unwrap_err();
        assert!(matches!(&large, WriteError::Refused(_)), "{large:?}");
        let nameless = cluster.put("", "1").await.unwrap_err();
        assert!(matches!(&nameless, WriteError::Refused(_)), "{nameless:?}");
        let twice = cluster.write(Write::new().put("a", "1").put("a", "2")).await.unwrap_err();
        assert!(told(&twice).contains("duplicate key"), "{twice:?}");
        let over = Write::new().put_leased("a", "1", LeaseId::new(77).unwrap());
        let over = cluster.write(over).await.unwrap_err();
        assert!(matches!(over, WriteError::LeaseOver), "{over:?}");
        assert_eq!(cluster.get("a").await.unwrap(), None);
    })
    .await;
    let secret = Write::new().put("a", "hush-hush").when("b", Is::Value("hush-hush".into()));
    assert!(!format!("{secret:?} {:?}", Is::Value("hush-hush".into())).contains("hush"));
}

#[tokio::test]
async fn a_lease_lives_with_its_value_and_its_keys_with_it() {
    of_both(async |cluster| {
        let short = Duration::from_secs(2);
        let (kept, dropped) =
            (cluster.lease(short).await.unwrap(), cluster.lease(short).await.unwrap());
        assert!(kept.ttl() >= short && kept.id() != dropped.id());
        assert!(hold(&cluster, "kept", &kept).await.done);
        assert!(hold(&cluster, "dropped", &dropped).await.done);
        assert!(!hold(&cluster, "kept", &dropped).await.done, "it is somebody else's");
        drop(dropped);
        gone(&cluster, "dropped").await;
        // As long again, and nobody but the task has said anything.
        tokio::time::sleep(short * 2).await;
        assert!(!kept.is_lost());
        assert_eq!(value(&cluster, "kept").await.as_deref(), Some("held"));
        // No longer under the lease when it ends.
        hold(&cluster, "freed", &kept).await;
        cluster.put("freed", "by itself").await.unwrap();
        hold(&cluster, "also", &kept).await;

        let before = cluster.list(KeyRange::all(), None).await.unwrap().revision;
        kept.revoke().await.unwrap();
        let after = cluster.list(KeyRange::all(), None).await.unwrap();
        let left: Vec<_> = after.entries.iter().map(|entry| &entry.key[..]).collect();
        assert_eq!(left, [b"freed"]);
        assert_eq!(after.revision, before.next(), "both keys in one revision");
    })
    .await;
}

#[tokio::test]
async fn a_lease_that_the_cluster_no_longer_knows_is_lost() {
    of_both(async |cluster| {
        let lease = cluster.lease(Duration::from_secs(2)).await.unwrap();
        hold(&cluster, "a", &lease).await;
        vedetta_core::Registry::end(&cluster, &lease.id().get()).await.unwrap();
        soon("it is told", lease.lost()).await;
        assert!(lease.is_lost());
        let late = cluster.write(Write::new().put_leased("a", "", &lease)).await.unwrap_err();
        assert!(matches!(late, WriteError::LeaseOver), "{late:?}");
        lease.revoke().await.unwrap(); // said again it does no harm
    })
    .await;
}

#[tokio::test]
async fn a_lease_is_lost_after_a_cut_longer_than_its_time() {
    let ours = Ours::start().await;
    let etcd = etcd::Cluster::start(1).await;
    for address in [ours.address, etcd.node(0).address()] {
        let near = Cluster::new([address.to_string()]).unwrap();
        let proxy = Proxy::to(address).await;
        let far = Cluster::new([proxy.address().to_string()]).unwrap().patience(IMPATIENT);
        let lease = far.lease(Duration::from_secs(4)).await.unwrap();
        hold(&far, "a", &lease).await;

        // A short one is borne.
        proxy.cut();
        tokio::time::sleep(Duration::from_secs(1)).await;
        proxy.mend();
        tokio::time::sleep(lease.ttl()).await;
        assert!(!lease.is_lost());
        assert!(value(&near, "a").await.is_some());

        proxy.cut();
        soon("it is lost", lease.lost()).await;
        gone(&near, "a").await;
        let unknown = far.put("b", "1").await.unwrap_err();
        assert!(matches!(unknown, WriteError::Unknown(_) | WriteError::NotReached(_)));

        // It does not come back with the line; another one does.
        proxy.mend();
        let again = soon("the line is back", async {
            loop {
                match far.lease(LONG).await {
                    Ok(lease) => return lease,
                    Err(_) => tokio::time::sleep(LOOK_AGAIN).await,
                }
            }
        })
        .await;
        assert!(lease.is_lost());
        assert!(hold(&far, "a", &again).await.done);
    }
}

#[tokio::test]
async fn a_lease_and_writes_outlive_the_node_that_leads() {
    let mut etcd = etcd::Cluster::start(3).await;
    let leader = etcd.leader().await;
    // The one that leads is asked first.
    let endpoints = [leader, (leader + 1) % 3, (leader + 2) % 3];
    let endpoints = endpoints.map(|at| etcd.node(at).endpoint());
    let cluster = Cluster::new(endpoints).unwrap().patience(IMPATIENT);
    let lease = cluster.lease(Duration::from_secs(8)).await.unwrap();
    hold(&cluster, "held", &lease).await;
    let first = cluster.put("n", "0").await.unwrap();
    etcd.node_mut(leader).kill();

    // Said again until it is answered, it is done once: the condition holds only the first time.
    let write = Write::new().when("n", Is::At(first)).put("n", "1");
    let answer = written(&cluster, &write).await;
    assert_eq!(value(&cluster, "n").await.as_deref(), Some("1"));
    let now = cluster.get("n").await.unwrap().unwrap().modified;
    assert!(now > first);
    assert!(!answer.done || answer.revision == now);
    assert!(!cluster.write(write).await.unwrap().done);

    tokio::time::sleep(lease.ttl() + Duration::from_secs(1)).await;
    assert!(!lease.is_lost());
    assert_eq!(value(&cluster, "held").await.as_deref(), Some("held"));
    lease.revoke().await.unwrap();
    assert_eq!(value(&cluster, "held").await, None);
}

#[tokio::test]
async fn a_write_that_no_node_took_is_told_apart_from_one_that_nobody_answered() {
    let mut etcd = etcd::Cluster::start(1).await;
    let cluster = Cluster::new([etcd.node(0).address().to_string()]).unwrap().patience(IMPATIENT);
    cluster.put("a", "1").await.unwrap();
    etcd.node_mut(0).freeze();
    let unanswered = soon("it ends", cluster.put("a", "2")).await.unwrap_err();
    assert!(matches!(unanswered, WriteError::Unknown(_)), "{unanswered:?}");
    assert!(told(&unanswered).contains("silent"), "{unanswered:?}");
    etcd.node_mut(0).thaw();
    etcd.node_mut(0).kill();
    let refused = soon("it ends", async {
        loop {
            match cluster.put("a", "3").await.unwrap_err() {
                WriteError::Unknown(_) => {} // the connection was not known to be broken
                other => return other,
            }
        }
    })
    .await;
    assert!(matches!(refused, WriteError::NotReached(_)), "{refused:?}");
    assert!(told(&refused).contains("cannot connect"), "{refused:?}");
    etcd.node_mut(0).restart().await;
    assert_ne!(value(&cluster, "a").await.as_deref(), Some("3"));
}

#[tokio::test]
async fn a_clone_with_another_user_has_a_line_of_its_own() {
    let etcd = etcd::Cluster::start(1).await;
    for told in [
        &["user", "add", "root:secret"][..],
        &["user", "grant-role", "root", "root"],
        &["user", "add", "guest:secret"],
        &["auth", "enable"],
    ] {
        etcd.node(0).ctl(told).await.unwrap();
    }
    let root = Cluster::new(etcd.endpoints()).unwrap().user("root", "secret");
    root.put("a", "1").await.unwrap();
    let guest = root.clone().user("guest", "secret");
    let refused = guest.put("a", "2").await.unwrap_err();
    assert!(told(&refused).contains("permission denied"), "{refused:?}");
    root.clone().put("a", "3").await.unwrap();
    assert_eq!(value(&root, "a").await.as_deref(), Some("3"));
}
