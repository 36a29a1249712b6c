//! What the store promises, told as stories.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vedetta_core::{KeyRange, Revision};
use vedetta_db::{Db, rusqlite};
use vedetta_kv::{
    Cause, Change, Delete, KvError, Op, OpReply, OpenError, Options, Purpose, Put, Range, SCHEMA,
    Store, Txn, Update, WatchOptions,
};

async fn open(folder: &Path) -> Store {
    let mut options = vedetta_db::Options::new(folder.join("vedetta.db"));
    options.ballast = 0;
    Store::open(Db::open(&options, &[SCHEMA]).unwrap(), Options::default()).await.unwrap()
}

async fn get(store: &Store, key: &'static str) -> Option<String> {
    let found = store.range(Range::new(KeyRange::One(key.into()))).await.unwrap();
    found.keys.first().map(|key| String::from_utf8_lossy(key.value()).into_owned())
}

async fn get_at(store: &Store, key: &'static str, at: u64) -> Result<Option<String>, KvError> {
    let mut range = Range::new(KeyRange::One(key.into()));
    range.at = Some(Revision(at));
    let found = store.range(range).await?;
    Ok(found.keys.first().map(|key| String::from_utf8_lossy(key.value()).into_owned()))
}

#[tokio::test]
async fn what_is_put_is_there_after_a_restart_and_so_is_its_past() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    for value in ["one", "two", "three"] {
        store.put(Put::new("k", value)).await.unwrap();
    }
    store.delete(Delete { range: KeyRange::One("k".into()), previous: false }).await.unwrap();
    store.put(Put::new("k", "again")).await.unwrap();
    for _ in 0..2 {
        let store = open_again(&store, folder.path()).await;
        assert_eq!(store.status().revision, Revision(6));
        assert_eq!(get(&store, "k").await.as_deref(), Some("again"));
        assert_eq!(get_at(&store, "k", 3).await.unwrap().as_deref(), Some("two"));
        assert_eq!(get_at(&store, "k", 5).await.unwrap(), None);
        store.close().await;
    }
}

async fn open_again(store: &Store, folder: &Path) -> Store {
    store.close().await;
    open(folder).await
}

#[tokio::test]
async fn a_watcher_sees_everything_in_order_and_resumes_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let mut live = store.watch(KeyRange::prefix("a/"), WatchOptions::default()).unwrap();
    for n in 0..100 {
        store.put(Put::new(format!("a/{}", n % 7), format!("{n}"))).await.unwrap();
        store.put(Put::new(format!("b/{n}"), "x")).await.unwrap();
    }
    let mut seen = Vec::new();
    while seen.len() < 100 {
        let batch = live.next().await.unwrap();
        seen.extend(batch.iter().cloned());
    }
    drop(live);
    let store = open_again(&store, folder.path()).await;
    let from = WatchOptions { from: Some(Revision(2)), ..WatchOptions::default() };
    let mut resumed = store.watch(KeyRange::prefix("a/"), from).unwrap();
    let mut again = Vec::new();
    while again.len() < 100 {
        again.extend(resumed.next().await.unwrap().iter().cloned());
    }
    assert_eq!(seen, again);
    assert_eq!(seen[50].previous.as_ref().unwrap().value(), b"43");
    store.close().await;
}

#[tokio::test]
async fn a_lease_takes_its_keys_along_in_one_revision() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let lease = store.grant(None, Duration::from_millis(50)).await.unwrap();
    for key in ["x", "y"] {
        store.put(Put::new(key, "v").lease(lease)).await.unwrap();
    }
    let from = WatchOptions { from: Some(Revision(4)), ..WatchOptions::default() };
    let mut watcher = store.watch(KeyRange::all(), from).unwrap();
    let gone = watcher.next().await.unwrap();
    let gone: Vec<_> = gone.iter().collect();
    assert_eq!(gone.len(), 2);
    for event in gone {
        assert_eq!(event.revision, Revision(4));
        assert!(matches!(event.change, Change::Delete { cause: Cause::Expired, .. }));
    }
    assert!(matches!(store.keep_alive(lease).await, Err(KvError::LeaseNotFound(_))));
    store.close().await;
}

#[tokio::test]
async fn compaction_drops_the_past_and_keeps_the_present() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path()).await;
    for n in 0..1000 {
        store.put(Put::new(format!("k{}", n % 10), format!("{n}"))).await.unwrap();
    }
    store.compact(Revision(900), true).await.unwrap();
    for _ in 0..2 {
        assert!(matches!(get_at(&store, "k1", 899).await, Err(KvError::Compacted { .. })));
        assert_eq!(get_at(&store, "k1", 900).await.unwrap().as_deref(), Some("891"));
        assert_eq!(get(&store, "k1").await.as_deref(), Some("991"));
        let from = WatchOptions { from: Some(Revision(900)), ..WatchOptions::default() };
        let mut watcher = store.watch(KeyRange::all(), from).unwrap();
        assert_eq!(watcher.next().await.unwrap().iter().next().unwrap().revision, Revision(900));
        store = open_again(&store, folder.path()).await;
    }
    store.close().await;
}

/// As a disk leaves it that lost a page and kept a newer one. Who watched from the mark would wait for ever.
#[tokio::test]
async fn a_killed_store_without_the_row_that_it_was_compacted_at_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    for n in 0..5 {
        store.put(Put::new("k", format!("{n}"))).await.unwrap();
    }
    store.compact(Revision(6), true).await.unwrap();
    let killed = tempfile::tempdir().unwrap();
    for name in ["vedetta.db", "vedetta.db-wal"] {
        std::fs::copy(folder.path().join(name), killed.path().join(name)).unwrap();
    }
    store.close().await;

    let options = vedetta_db::Options::new(killed.path().join("vedetta.db"));
    let file = rusqlite::Connection::open(&options.file).unwrap();
    assert_eq!(file.execute("DELETE FROM event WHERE revision = 6", []), Ok(1));
    drop(file);
    let db = Db::open(&options, &[SCHEMA]).unwrap();
    let opened = Store::open(db.clone(), Options::default()).await;
    assert!(matches!(opened, Err(OpenError::Gap(Revision(6)))));
    tokio::task::spawn_blocking(move || db.close_blocking()).await.unwrap();
}

/// A batch that is to be published waits for the closure that is stuck; whoever reads must not wait behind it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_present_is_read_while_a_closure_is_stuck_and_another_batch_is_to_be_published() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    store.put(Put::new("k", "value")).await.unwrap();
    for round in 0..150 {
        let (stuck, is_stuck) = tokio::sync::oneshot::channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let putting = store.clone();
        let put = tokio::spawn(async move { putting.put(Put::new("other", "value")).await });
        if round % 3 > 0 {
            tokio::task::yield_now().await; // so that at times they are two batches
        }
        let updating = store.clone();
        let update = tokio::spawn(async move {
            let hold = move |_: &mut Update<'_>| {
                let _ = stuck.send(());
                let _ = released.recv();
                Ok::<_, KvError>(())
            };
            updating.update(Purpose::Store, hold).await
        });
        is_stuck.await.unwrap();
        // Until the put is published, or would be if it had not to wait for the closure.
        for _ in 0..20 {
            let read = tokio::time::timeout(Duration::from_secs(30), get(&store, "k")).await;
            assert_eq!(read.expect("a read waits for no writer").as_deref(), Some("value"));
            std::thread::sleep(Duration::from_micros(50));
        }
        release.send(()).unwrap();
        update.await.unwrap().unwrap();
        put.await.unwrap().unwrap();
    }
    store.close().await;
}

/// The only connection that could read the file is taken: whoever wants it waits for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_keys_are_read_without_the_file_while_they_are_overwritten() {
    const KEYS: usize = 20_000;
    let folder = tempfile::tempdir().unwrap();
    let mut options = vedetta_db::Options::new(folder.path().join("vedetta.db"));
    (options.ballast, options.readers) = (0, 1);
    let db = Db::open(&options, &[SCHEMA]).unwrap();
    let store = Store::open(db.clone(), Options::default()).await.unwrap();
    let key = |n: usize| format!("k/{n:05}");
    for some in (0..KEYS).collect::<Vec<_>>().chunks(100) {
        let then = some.iter().map(|n| Op::Put(Put::new(key(*n), "old"))).collect();
        store.txn(Txn { then, ..Txn::default() }).await.unwrap();
    }
    let (taken, is_taken) = tokio::sync::oneshot::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let held = tokio::task::spawn_blocking(move || {
        db.read_blocking(|_| {
            let _ = taken.send(());
            let _ = released.recv();
            Ok(())
        })
    });
    is_taken.await.unwrap();

    let (overwriting, done) = (store.clone(), Arc::new(AtomicBool::new(false)));
    let until = Arc::clone(&done);
    let overwriter = tokio::spawn(async move {
        // The last first, as a walk comes to them last.
        for n in (0..KEYS).rev().cycle().take_while(|_| !until.load(Ordering::Relaxed)) {
            let gone = KeyRange::One(key(n).into());
            overwriting.delete(Delete { range: gone, previous: false }).await.unwrap();
            overwriting.put(Put::new(key(n), "new")).await.unwrap();
        }
    });
    let all = Range::new(KeyRange::prefix("k/"));
    for _ in 0..40 {
        let then = vec![Op::Range(all.clone()), Op::Range(all.clone())];
        let read = async {
            let range = store.range(all.clone()).await.unwrap();
            let txn = store.txn(Txn { then, ..Txn::default() }).await.unwrap();
            let [OpReply::Range(first), OpReply::Range(second)] = &txn.replies[..] else {
                panic!("two ranges were asked for");
            };
            assert!(first.keys == second.keys, "both are of one revision");
            [range.keys.len(), first.keys.len()]
        };
        let found = tokio::time::timeout(Duration::from_secs(60), read).await;
        let found = found.expect("the present is read without the file");
        assert!(found.iter().all(|found| (KEYS - 1..=KEYS).contains(found)), "{found:?}");
    }
    done.store(true, Ordering::Relaxed);
    overwriter.await.unwrap();
    release.send(()).unwrap();
    held.await.unwrap().unwrap();
    store.close().await;
}

#[tokio::test]
async fn the_present_is_read_while_the_writer_is_stuck() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = vedetta_db::Options::new(folder.path().join("vedetta.db"));
    options.ballast = 0;
    let db = Db::open(&options, &[SCHEMA]).unwrap();
    let store = Store::open(db.clone(), Options::default()).await.unwrap();
    store.put(Put::new("k", "before")).await.unwrap();

    let (stuck, is_stuck) = tokio::sync::oneshot::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let held = tokio::spawn(async move {
        let hold = move |_: &vedetta_db::Tx<'_>| {
            let _ = stuck.send(());
            let _ = released.recv();
            Ok::<_, vedetta_db::Stop<()>>(())
        };
        db.write(vedetta_db::Purpose::Store, hold).await
    });
    is_stuck.await.unwrap();
    let other = store.clone();
    let waiting = tokio::spawn(async move { other.put(Put::new("k", "after")).await });

    let read = tokio::time::timeout(Duration::from_secs(30), get(&store, "k")).await;
    assert_eq!(read.expect("a read waits for no writer").as_deref(), Some("before"));
    assert!(!waiting.is_finished());

    release.send(()).unwrap();
    held.await.unwrap().unwrap();
    waiting.await.unwrap().unwrap();
    assert_eq!(get(&store, "k").await.as_deref(), Some("after"));
    store.close().await;
}
