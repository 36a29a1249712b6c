//! What leases promise about time. Nothing here asks how late something happens, only that it is never
//! early and in order.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use bytes::Bytes;
use support::{get, hold, line_up, one, open, open_db, put, reopen, soon, story, take};
use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{
    Cause, Change, Delete, KvError, LeaseId, Options, Put, PutLease, PutValue, Store, WatchOptions,
};

/// The file knows time in milliseconds; three times rounded.
const ROUNDING: Duration = Duration::from_millis(3);
/// Never up in a test.
const LONG: Duration = Duration::from_secs(3600);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn id(n: i64) -> LeaseId {
    LeaseId::new(n).unwrap()
}

fn all_from(revision: u64) -> WatchOptions {
    WatchOptions { from: Some(Revision(revision)), ..WatchOptions::default() }
}

async fn put_on(store: &Store, key: impl Into<Bytes>, lease: LeaseId) {
    store.put(Put::new(key, "v").lease(lease)).await.unwrap();
}

/// A lease that was granted: between `called` and `returned`, for `ttl`.
struct Granted {
    called: Instant,
    returned: Instant,
    ttl: Duration,
}

#[tokio::test]
async fn leases_expire_in_the_order_of_their_deadlines_and_never_early() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let deletes = WatchOptions { no_puts: true, ..WatchOptions::default() };
    let mut watcher = store.watch(KeyRange::all(), deletes).unwrap();
    let random = fastrand_times(200, 20..300);
    let mut granted = BTreeMap::new();
    for (n, ttl) in random.into_iter().enumerate() {
        let called = Instant::now();
        let lease = store.grant(None, ttl).await.unwrap();
        let returned = Instant::now();
        let key = Bytes::from(format!("{n}"));
        match store.put(Put::new(key.clone(), "v").lease(lease)).await {
            Ok(_) => drop(granted.insert(key, Granted { called, returned, ttl })),
            // Slow machine: its time was up before the key came.
            Err(KvError::LeaseNotFound(_)) => assert!(called.elapsed() >= ttl),
            Err(other) => panic!("{other:?}"),
        }
    }
    let mut order = Vec::new();
    while order.len() < granted.len() {
        let batch = soon(watcher.next()).await.unwrap();
        for event in batch.iter() {
            assert!(matches!(event.change, Change::Delete { cause: Cause::Expired, .. }));
            let lease = &granted[event.key()];
            assert!(lease.called.elapsed() >= lease.ttl, "{:?} went early", event.key());
            order.push((event.revision, lease));
        }
    }
    assert!(order.is_sorted_by(|(a, _), (b, _)| a < b), "each lease is a revision of its own");
    for (n, (_, earlier)) in order.iter().enumerate() {
        for (_, later) in &order[n + 1..] {
            // Where the deadlines lie exactly only the store knows.
            let at_least = earlier.called + earlier.ttl;
            let at_most = later.returned + later.ttl;
            assert!(at_least <= at_most, "a later deadline came first");
        }
    }
    assert_eq!(store.leases(), []);
    store.close().await;
}

fn fastrand_times(count: usize, ms: std::ops::Range<u64>) -> Vec<Duration> {
    let mut random = fastrand::Rng::with_seed(7);
    (0..count).map(|_| Duration::from_millis(random.u64(ms.clone()))).collect()
}

#[tokio::test]
async fn the_keys_of_an_expired_lease_go_together_in_one_revision() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let leases = [(id(1), ms(150)), (id(2), ms(100)), (id(3), LONG)];
    for (lease, ttl) in leases {
        store.grant(Some(lease), ttl).await.unwrap();
    }
    // The keys are lined up together so that they are there before their time is up.
    let keys: Vec<_> = (0..15).map(|n| (format!("k{n:02}"), id(n % 3 + 1))).collect();
    let puts = keys.iter().map(|(key, lease)| Put::new(key.clone(), "v").lease(*lease));
    let then = puts.map(vedetta_kv::Op::Put).collect();
    store.txn(vedetta_kv::Txn { then, ..Default::default() }).await.unwrap();

    let mut watcher = store.watch(KeyRange::all(), all_from(3)).unwrap();
    for (revision, lease) in [(3, id(2)), (4, id(1))] {
        let mine = keys.iter().filter(|(_, of)| *of == lease).map(|(key, _)| format!("-{key}"));
        let batch = soon(watcher.next()).await.unwrap();
        let (now, rest): (Vec<_>, Vec<_>) =
            batch.iter().cloned().partition(|event| event.revision == Revision(revision));
        assert_eq!(story(&now), mine.collect::<Vec<_>>());
        assert!(
            now.iter().all(|e| matches!(e.change, Change::Delete { cause: Cause::Expired, .. }))
        );
        assert!(now.iter().all(|event| event.previous.as_ref().unwrap().lease() == Some(lease)));
        if !rest.is_empty() {
            // Both at once, on a slow machine.
            assert_eq!(rest.len(), 5);
            break;
        }
    }
    assert_eq!(store.leases(), [id(3)]);
    assert_eq!(store.lease(id(3)).unwrap().keys.len(), 5);
    store.close().await;
}

#[tokio::test]
async fn a_lease_kept_alive_lasts_anew_each_time() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let ttl = ms(700);
    let granted = |n: i64| store.grant(Some(id(n)), ttl);
    granted(1).await.unwrap();
    put_on(&store, "kept", id(1)).await;
    granted(2).await.unwrap();
    put_on(&store, "second", id(2)).await;
    assert_eq!(store.keep_alive(id(1)).await.unwrap(), ttl); // the first one is written down
    granted(3).await.unwrap();
    put_on(&store, "third", id(3)).await;
    let before = Instant::now();
    assert_eq!(store.keep_alive(id(1)).await.unwrap(), ttl); // the others are in memory
    let remaining = store.lease(id(1)).unwrap().remaining;
    assert!(remaining <= ttl && remaining + before.elapsed() >= ttl);

    let mut watcher = store.watch(KeyRange::all(), all_from(5)).unwrap();
    assert_eq!(story(&take(&mut watcher, 3).await), ["-second", "-third", "-kept"]);
    assert!(before.elapsed() >= ttl);
    let late = store.keep_alive(id(1)).await;
    assert!(matches!(late, Err(KvError::LeaseNotFound(_))));
    store.close().await;
}

#[tokio::test]
async fn a_key_put_again_without_its_lease_or_with_another_stays() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    store.grant(Some(id(1)), ms(600)).await.unwrap();
    store.grant(Some(id(2)), LONG).await.unwrap();
    for key in ["freed", "gone", "kept", "moved", "remade", "updated"] {
        put_on(&store, key, id(1)).await;
    }
    let delete = |key| store.delete(Delete { range: one(key), previous: false });
    put(&store, "freed", "v").await;
    put_on(&store, "moved", id(2)).await;
    delete("gone").await.unwrap();
    delete("remade").await.unwrap();
    put(&store, "remade", "v").await;
    let lease = PutLease::Keep;
    store.put(Put { lease, ..Put::new("updated", "w") }).await.unwrap();
    store.put(Put { lease, value: PutValue::Keep, ..Put::new("kept", "") }).await.unwrap();
    assert_eq!(store.lease(id(1)).unwrap().keys, ["kept", "updated"]);
    assert_eq!(store.lease(id(2)).unwrap().keys, ["moved"]);

    let now = store.status().revision;
    let mut watcher = store.watch(KeyRange::all(), all_from(now.0 + 1)).unwrap();
    assert_eq!(story(&take(&mut watcher, 2).await), ["-kept", "-updated"]);
    for key in ["freed", "moved", "remade"] {
        assert!(get(&store, key).await.is_some(), "{key}");
    }
    assert_eq!(store.leases(), [id(2)]);
    store.close().await;
}

#[tokio::test]
async fn revoking_a_lease_deletes_its_keys_in_one_revision() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    store.grant(Some(id(1)), LONG).await.unwrap();
    for key in ["b", "a", "c"] {
        put_on(&store, key, id(1)).await;
    }
    put(&store, "other", "v").await;
    let mut watcher = store.watch(KeyRange::all(), WatchOptions::default()).unwrap();
    assert_eq!(store.revoke(id(1)).await.unwrap(), Revision(6));
    let batch = soon(watcher.next()).await.unwrap();
    let events: Vec<_> = batch.iter().cloned().collect();
    assert_eq!(story(&events), ["-a", "-b", "-c"]);
    for event in events {
        assert_eq!(event.revision, Revision(6));
        assert!(matches!(event.change, Change::Delete { cause: Cause::Asked, .. }));
    }
    assert!(matches!(store.revoke(id(1)).await, Err(KvError::LeaseNotFound(_))));
    assert_eq!(store.lease(id(1)), None);

    store.grant(Some(id(1)), LONG).await.unwrap();
    assert_eq!(store.lease(id(1)).unwrap().keys, [""; 0], "a new lease owns nothing of the old");
    assert_eq!(store.revoke(id(1)).await.unwrap(), Revision(6), "nothing to delete, no revision");
    store.close().await;
}

#[tokio::test]
async fn a_restart_never_shortens_a_lease_however_long_the_store_was_down() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let ttl = ms(400);
    let called = Instant::now();
    let lease = store.grant(None, ttl).await.unwrap();
    put_on(&store, "k", lease).await;
    store.close().await;
    let served = called.elapsed();
    std::thread::sleep(ttl); // down for longer than the lease had left

    let opening = Instant::now();
    let store = open(folder.path()).await;
    let left = ttl.saturating_sub(served + ROUNDING);
    let mut watcher = store.watch(KeyRange::all(), all_from(3)).unwrap();
    assert_eq!(story(&take(&mut watcher, 1).await), ["-k"]);
    assert!(opening.elapsed() >= left, "it had {left:?} left");
    store.close().await;
}

#[tokio::test]
async fn after_a_restart_a_renewed_lease_has_its_whole_time_and_another_what_was_left() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let ttl = Duration::from_secs(100);
    let granting = Instant::now();
    store.grant(Some(id(1)), ttl).await.unwrap();
    store.grant(Some(id(2)), ttl).await.unwrap();
    store.keep_alive(id(2)).await.unwrap();
    put_on(&store, "k", id(1)).await;
    let granted = Instant::now();
    std::thread::sleep(ms(50));
    let served_least = granted.elapsed();
    store.close().await;
    let served_most = granting.elapsed();

    let opening = Instant::now();
    let store = open(folder.path()).await;
    let unrenewed = store.lease(id(1)).unwrap();
    let renewed = store.lease(id(2)).unwrap();
    let opened = opening.elapsed();
    assert_eq!((unrenewed.ttl, renewed.ttl), (ttl, ttl));
    assert_eq!(unrenewed.keys, ["k"]);
    assert!(renewed.remaining <= ttl && renewed.remaining + opened >= ttl);
    // Up to the longest wait of a grant for its commit is given again.
    let most = ttl + (granted - granting) + ROUNDING;
    assert!(unrenewed.remaining + served_least <= most, "time served counts");
    assert!(unrenewed.remaining + served_most + opened + ROUNDING >= ttl);

    // The same once more: what is left is not filled up by restarting.
    let store = reopen(&store, folder.path()).await;
    assert!(store.lease(id(1)).unwrap().remaining + served_least <= most);
    store.close().await;
}

#[tokio::test]
async fn a_restart_does_not_shorten_a_lease_by_the_time_its_grant_waited_for_the_disk() {
    const WAIT: Duration = Duration::from_millis(400);
    let folder = tempfile::tempdir().unwrap();
    let db = open_db(folder.path());
    let store = Store::open(db.clone(), Options::default()).await.unwrap();
    let ttl = Duration::from_secs(100);
    // The grant is worked out, then its commit takes a while: another write of the batch does.
    let busy = hold(&db).await;
    let granting = store.clone();
    let granted = line_up(async move { granting.grant(Some(id(1)), ttl).await }).await;
    let slow = line_up(async move {
        let wait = |_: &vedetta_db::Tx<'_>| {
            std::thread::sleep(WAIT);
            Ok::<_, vedetta_db::Stop<()>>(())
        };
        db.write(vedetta_db::Purpose::Store, wait).await
    });
    let slow = slow.await;
    let lined_up = Instant::now();
    drop(busy);
    granted.await.unwrap();
    slow.await.unwrap();
    assert!(lined_up.elapsed() >= WAIT, "they did not share a commit");

    let before = Instant::now();
    let promised = store.lease(id(1)).unwrap().remaining;
    assert!(promised + lined_up.elapsed() >= ttl + WAIT, "it counts from when it is on the disk");
    let store = reopen(&store, folder.path()).await;
    let left = store.lease(id(1)).unwrap().remaining;
    assert!(left + before.elapsed() >= promised, "{promised:?} became {left:?}");
    store.close().await;
}

#[tokio::test]
async fn after_a_crash_that_noted_no_age_a_lease_lives_longer_and_not_shorter() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let ttl = Duration::from_secs(100);
    store.grant(Some(id(1)), ttl).await.unwrap();
    store.grant(Some(id(2)), ttl).await.unwrap();
    store.keep_alive(id(2)).await.unwrap();
    store.grant(Some(id(3)), ms(100)).await.unwrap();
    put_on(&store, "k", id(3)).await;
    std::thread::sleep(ms(30));
    // What a power cut would leave: the file and its log as they are now.
    let crashed = tempfile::tempdir().unwrap();
    for file in ["vedetta.db", "vedetta.db-wal"] {
        fs::copy(folder.path().join(file), crashed.path().join(file)).unwrap();
    }
    let opening = Instant::now();
    let copy = Store::open(open_db(crashed.path()), Options::default()).await.unwrap();
    for lease in [id(1), id(2)] {
        let remaining = copy.lease(lease).unwrap().remaining;
        assert!(remaining + opening.elapsed() + ROUNDING >= ttl, "{lease}: {remaining:?}");
    }
    let expired = take(&mut copy.watch(KeyRange::all(), all_from(3)).unwrap(), 1).await;
    assert_eq!(story(&expired), ["-k"]);
    assert!(opening.elapsed() + ROUNDING >= ms(100));
    copy.close().await;
    store.close().await;
}

#[tokio::test]
async fn a_lease_granted_again_is_not_ended_by_the_deadline_of_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    let db = open_db(folder.path());
    let store = Store::open(db.clone(), Options::default()).await.unwrap();
    let ttl = ms(200);
    store.grant(Some(id(1)), ttl).await.unwrap();
    put_on(&store, "old", id(1)).await;
    // All of this waits for the writer and shares a commit; the expiry comes last.
    let busy = hold(&db).await;
    let [first, second, third] = [store.clone(), store.clone(), store.clone()];
    let revoked = line_up(async move { first.revoke(id(1)).await }).await;
    let granted = line_up(async move { second.grant(Some(id(1)), LONG).await }).await;
    let placed = line_up(async move { third.put(Put::new("new", "v").lease(id(1))).await }).await;
    std::thread::sleep(ttl * 2);
    drop(busy);
    revoked.await.unwrap();
    granted.await.unwrap();
    placed.await.unwrap();
    put(&store, "after", "v").await;
    assert_eq!(get(&store, "old").await, None);
    assert!(get(&store, "new").await.is_some(), "it went with a lease it never had");
    assert_eq!(store.lease(id(1)).unwrap().keys, ["new"]);
    store.close().await;
}

#[tokio::test]
async fn leases_that_are_due_as_soon_as_they_are_granted_all_end() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let mut granting = tokio::task::JoinSet::new();
    for _ in 0..300 {
        let store = store.clone();
        granting.spawn(async move { store.grant(None, Duration::ZERO).await.unwrap() });
    }
    soon(granting.join_all()).await;
    let ended = async {
        while store.status().leases > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    soon(ended).await;
    store.close().await;
}
