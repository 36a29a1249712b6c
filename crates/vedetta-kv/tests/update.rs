//! What an update promises: all of it or nothing, in one revision, and what it says of its changes is kept.

mod support;

use std::time::Duration;

use support::{get, one, open, open_db, put, reopen, soon, story, take};
use vedetta_core::{KeyRange, Revision};
use vedetta_db::rusqlite;
use vedetta_kv::{
    Cause, Change, Delete, Event, KvError, LeaseId, Options, Purpose, Put, Range, Store, Update,
    WITH_DIRECTORY, WatchOptions, Write,
};

const LONG: Duration = Duration::from_secs(3600);

fn id(n: i64) -> LeaseId {
    LeaseId::new(n).unwrap()
}

fn tagged(tag: u8) -> Write {
    Write { tag, ..Write::default() }
}

fn from(revision: u64) -> WatchOptions {
    WatchOptions { from: Some(Revision(revision)), ..WatchOptions::default() }
}

async fn update<T: Send + 'static>(
    store: &Store,
    work: impl FnOnce(&mut Update<'_>) -> Result<T, KvError> + Send + 'static,
) -> Result<T, KvError> {
    store.update(Purpose::Store, work).await
}

/// All that happened from `revision` on, at least so much.
async fn since(store: &Store, revision: u64, least: usize) -> Vec<Event> {
    take(&mut store.watch(KeyRange::all(), from(revision)).unwrap(), least).await
}

#[tokio::test]
async fn an_update_sees_its_own_changes_and_is_one_revision() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    put(&store, "a/2", "old").await;
    let seen = update(&store, |update| {
        assert_eq!(update.revision(), Revision(2));
        update.put("a/1", "new", Write::default())?;
        update.delete("a/2", 0)?;
        update.put("a/3", "new", Write::default())?;
        let range = KeyRange::prefix("a/");
        let keys = update.list(&range)?.iter().map(|key| key.key().to_vec()).collect::<Vec<_>>();
        assert_eq!(update.first(&range).unwrap().key(), b"a/1");
        assert_eq!(update.first(&KeyRange::prefix("a/2")), None, "it is gone");
        assert_eq!(update.first(&KeyRange::prefix("b")), None);
        Ok((update.revision(), keys, update.get(b"a/2")))
    });
    assert_eq!(seen.await.unwrap(), (Revision(3), vec![b"a/1".to_vec(), b"a/3".to_vec()], None));
    let events = since(&store, 3, 3).await;
    assert_eq!(story(&events), ["a/1=new", "-a/2", "a/3=new"]);
    assert!(events.iter().all(|event| event.revision == Revision(3)));
    store.close().await;
}

#[tokio::test]
async fn the_present_is_seen_without_what_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    for n in 0..100 {
        put(&store, format!("a/{n:02}"), "1").await;
    }
    let gone = KeyRange::Between("a/".into(), "a/98".into());
    store.delete(Delete { range: gone, previous: false }).await.unwrap();
    store.present(|present| {
        assert_eq!(present.revision(), Revision(102));
        assert_eq!(present.first(&KeyRange::prefix("a/")).unwrap().key(), b"a/98");
        assert_eq!(present.first(&KeyRange::prefix("a/1")), None);
        assert_eq!(present.get(b"a/99").unwrap().value(), b"1");
        assert_eq!((present.get(b"a/10"), present.get(b"b")), (None, None));
    });
    store.close().await;
}

#[tokio::test]
async fn an_update_that_refuses_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    put(&store, "a", "1").await;
    let refused = update(&store, |update| {
        update.grant_tree(id(7), LONG)?;
        update.put("b", "2", Write { lease: Some(id(7)), ..Write::default() })?;
        update.delete("a", 0)?;
        Err::<(), _>(KvError::EmptyKey)
    });
    assert!(matches!(refused.await, Err(KvError::EmptyKey)));
    let twice = update(&store, |update| {
        update.put("b", "2", Write::default())?;
        update.delete("b", 0)
    });
    assert!(matches!(twice.await, Err(KvError::DuplicateKey(key)) if key == "b"));
    let large = update(&store, |update| update.put("b", vec![0; 2 << 20], Write::default()));
    assert!(matches!(large.await, Err(KvError::ValueTooLarge { .. })));
    let much = update(&store, |update| {
        (0..2).try_for_each(|n| update.put(format!("b{n}"), vec![0; 1 << 20], Write::default()))
    });
    assert!(matches!(much.await, Err(KvError::RequestTooLarge { .. })));
    assert_eq!((get(&store, "a").await, get(&store, "b").await), (Some("1".into()), None));
    assert_eq!((store.status().revision, store.status().leases), (Revision(2), 0));
    let store = reopen(&store, folder.path()).await;
    assert_eq!((store.status().revision, store.status().leases), (Revision(2), 0));
    store.close().await;
}

#[tokio::test]
async fn a_key_put_anew_is_as_if_made_then() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    put(&store, "k", "1").await;
    put(&store, "k", "2").await;
    update(&store, |update| update.put("k", "3", Write { anew: true, ..Write::default() }))
        .await
        .unwrap();
    put(&store, "k", "4").await;
    for (at, created, version) in [(3, 2, 2), (4, 4, 1), (5, 4, 2)] {
        let range = Range { at: Some(Revision(at)), ..Range::new(one("k")) };
        let key = &store.range(range).await.unwrap().keys[0];
        assert_eq!((key.created(), key.version()), (Revision(created), version), "at {at}");
    }
    store.close().await;
}

#[tokio::test]
async fn tags_are_kept_through_history_and_restarts() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path()).await;
    put(&store, "k", "1").await;
    update(&store, |update| {
        update.put("k", "2", tagged(5))?;
        update.delete("never there", 9)
    })
    .await
    .unwrap();
    for _ in 0..2 {
        let events = since(&store, 2, 3).await;
        let told: Vec<_> = events.iter().map(|event| (event.revision.0, event.tag)).collect();
        assert_eq!(told, [(2, 0), (3, 5), (3, 9)]);
        assert_eq!(story(&events)[2], "-never there");
        store = reopen(&store, folder.path()).await;
    }
    assert_eq!(store.status().existing, 1);
    store.compact(Revision(3), true).await.unwrap();
    assert_eq!(since(&store, 3, 2).await[0].tag, 5);
    store.close().await;
}

/// A directory with a lease that takes all of it along, and things beside it.
async fn with_tree(store: &Store, ttl: Duration) {
    update(store, move |update| {
        update.grant_tree(id(-7), ttl)?;
        let lease = Some(id(-7));
        update.put("/d/", "", Write { lease, ..Write::default() })?;
        for beside in ["/d-", "/d0", "/e/x"] {
            update.put(beside, "stays", Write::default())?;
        }
        update.put("/d", "hidden by the directory", Write::default())?;
        update.put("/d/a", "1", Write::default())?;
        update.put("/d/s/", "", Write::default())?;
        update.put("/d/s/b", "2", Write::default())
    })
    .await
    .unwrap();
}

fn assert_tree_went(events: &[Event], cause: Cause) {
    let told: Vec<_> = events.iter().map(|event| (event.key(), event.tag)).collect();
    let below = WITH_DIRECTORY;
    let expected: [(&[u8], u8); 5] =
        [(b"/d/", 0), (b"/d", below), (b"/d/a", below), (b"/d/s/", below), (b"/d/s/b", below)];
    assert_eq!(told, expected);
    for event in events {
        assert_eq!(event.revision, events[0].revision);
        assert!(matches!(event.change, Change::Delete { cause: why, .. } if why == cause));
    }
}

#[tokio::test]
async fn a_directory_whose_time_is_up_goes_with_all_below_in_one_revision() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    with_tree(&store, Duration::from_millis(1)).await;
    assert_tree_went(&since(&store, 3, 5).await, Cause::Expired);
    assert_eq!((store.status().existing, store.status().leases), (3, 0));
    store.close().await;
}

#[tokio::test]
async fn a_tree_lease_is_one_after_a_restart_and_when_revoked() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    with_tree(&store, LONG).await;
    let plain = store.grant(None, LONG).await.unwrap();
    store.put(Put::new("/e/", "").lease(plain)).await.unwrap();
    let store = reopen(&store, folder.path()).await;
    store.revoke(id(-7)).await.unwrap();
    assert_tree_went(&since(&store, 4, 5).await, Cause::Asked);
    store.revoke(plain).await.unwrap();
    assert_eq!(story(&since(&store, 5, 1).await), ["-/e/"], "any other lease takes its keys only");
    store.close().await;

    let db = rusqlite::Connection::open(folder.path().join("vedetta.db")).unwrap();
    db.execute("INSERT INTO lease VALUES (1, 1, 1, 0, 1, 0)", []).unwrap();
    drop(db);
    assert!(Store::open(open_db(folder.path()), Options::default()).await.is_err());
}

#[tokio::test]
async fn a_lease_is_released_once_no_key_has_it() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let lease = Some(id(-1));
    update(&store, move |update| {
        update.grant_tree(id(-1), LONG)?;
        assert_eq!(update.remaining(id(-1)), Some(LONG));
        update.put("a", "", Write { lease, ..Write::default() })?;
        update.put("b", "", Write { lease, ..Write::default() })
    })
    .await
    .unwrap();
    update(&store, |update| {
        assert!(update.remaining(id(-1)).is_some_and(|left| left <= LONG && !left.is_zero()));
        update.put("a", "", Write::default())?;
        update.release(&[id(-1)].into())
    })
    .await
    .unwrap();
    assert_eq!(store.leases(), [id(-1)], "b still goes with it");
    update(&store, |update| {
        update.delete("b", 0)?;
        update.release(&[id(-1)].into())?;
        assert_eq!(update.remaining(id(-1)), None);
        Ok(())
    })
    .await
    .unwrap();
    assert!(store.leases().is_empty());
    let plain = store.grant(None, LONG).await.unwrap();
    update(&store, move |update| update.release(&[plain].into())).await.unwrap();
    assert_eq!(store.leases(), [plain], "not one of ours to end");
    store.close().await;
}

#[tokio::test]
async fn one_watcher_follows_several_ranges_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let ranges = || vec![one("/a/"), one("/a/b"), KeyRange::prefix("/a/b/")];
    let mut live = store.watch_all(ranges(), WatchOptions::default()).unwrap();
    let alone = store.watch(one("/a/"), WatchOptions::default()).unwrap();
    assert_eq!(store.status().watchers, 2);
    for key in ["/a/b/c", "/a/x", "/a/", "/a/b", "/a/b0", "/a/b/"] {
        put(&store, key, "1").await;
    }
    drop(alone);
    let expected = ["/a/b/c=1", "/a/=1", "/a/b=1", "/a/b/=1"];
    assert_eq!(story(&take(&mut live, 4).await), expected);
    put(&store, "/a/", "2").await;
    assert_eq!(story(&take(&mut live, 1).await), ["/a/=2"], "after another of a range had left");
    drop(live);
    assert_eq!(store.status().watchers, 0);
    let store = reopen(&store, folder.path()).await;
    let mut past = store.watch_all(ranges(), from(2)).unwrap();
    assert_eq!(story(&take(&mut past, 4).await)[..4], expected);
    drop(soon(async { past }).await);
    store.close().await;
}
