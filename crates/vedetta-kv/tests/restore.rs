//! Starting on a backup.

use std::path::Path;
use std::time::Duration;

use vedetta_core::{KeyRange, Revision};
use vedetta_db::Db;
use vedetta_kv::{KvError, Options, Put, Range, SCHEMA, Store, WatchError, WatchOptions};

async fn open(folder: &Path) -> Store {
    let mut options = vedetta_db::Options::new(folder.join("vedetta.db"));
    options.ballast = 0;
    Store::open(Db::open(&options, &[SCHEMA]).unwrap(), Options::default()).await.unwrap()
}

/// Copies the store of `from` and opens the copy in a folder of its own.
async fn restore(from: &Path) -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    vedetta_db::backup(&from.join("vedetta.db"), &folder.path().join("vedetta.db")).unwrap();
    let store = open(folder.path()).await;
    (folder, store)
}

#[tokio::test]
async fn whoever_saw_the_time_after_a_backup_is_told_to_list_again() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    for n in 0..50 {
        store.put(Put::new(format!("k{}", n % 7), n.to_string())).await.unwrap();
    }
    let (_copy, restored) = restore(folder.path()).await;
    for n in 0..500 {
        store.put(Put::new("after", n.to_string())).await.unwrap();
    }
    let seen = store.status().revision;
    assert!(restored.status().revision > Revision(seen.0 + 1_000_000_000), "well after them");
    for from in [Revision(2), seen, seen.next()] {
        let options = WatchOptions { from: Some(from), ..WatchOptions::default() };
        let watch = restored.watch(KeyRange::all(), options);
        assert!(matches!(watch, Err(WatchError::Compacted { .. })), "from {from}");
        let mut range = Range::new(KeyRange::all());
        range.at = Some(from);
        assert!(matches!(restored.range(range).await, Err(KvError::Compacted { .. })));
    }
    assert_eq!(restored.range(Range::new(KeyRange::all())).await.unwrap().count, 7);
    store.close().await;
    restored.close().await;
}

#[tokio::test]
async fn a_backup_of_a_restored_store_can_be_restored_too() {
    let first = tempfile::tempdir().unwrap();
    let store = open(first.path()).await;
    for n in 0..2_000 {
        store.put(Put::new(format!("k{}", n % 7), n.to_string())).await.unwrap();
    }
    // Taken at once, while the rows before the jump are still being swept, with and without a write.
    let (second, restored) = restore(first.path()).await;
    let (third, again) = restore(second.path()).await;
    again.put(Put::new("new", "v")).await.unwrap();
    let (_fourth, last) = restore(third.path()).await;
    assert_eq!(last.range(Range::new(KeyRange::all())).await.unwrap().count, 8);
    for store in [store, restored, again, last] {
        store.close().await;
    }
    let reopened = open(third.path()).await;
    assert_eq!(reopened.range(Range::new(KeyRange::all())).await.unwrap().count, 8);
    reopened.close().await;
}

#[tokio::test]
async fn files_of_others_beside_the_store_stay_and_what_a_crash_left_goes() {
    let folder = tempfile::tempdir().unwrap();
    let beside = ["snapshot.db", "snapshot.db.partial", "vedetta-snapshot"];
    for name in beside {
        std::fs::write(folder.path().join(name), "precious").unwrap();
    }
    let left = folder.path().join(".vedetta-snapshot.1-2.partial");
    std::fs::write(&left, "half a copy").unwrap();
    let store = open(folder.path()).await;
    assert!(!left.exists());
    std::fs::write(&left, "half a copy").unwrap();
    drop(store.snapshot().await.unwrap());
    assert!(!left.exists());
    store.close().await;
    for name in beside {
        assert_eq!(std::fs::read(folder.path().join(name)).unwrap(), b"precious", "{name}");
    }
}

#[tokio::test]
async fn there_is_one_snapshot_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let first = store.snapshot().await.unwrap();
    let mut second = tokio::spawn({
        let store = store.clone();
        async move { store.snapshot().await }
    });
    let early = tokio::time::timeout(Duration::from_millis(100), &mut second).await;
    assert!(early.is_err(), "there were two");
    drop(first);
    let second = tokio::time::timeout(Duration::from_secs(60), second).await;
    second.expect("the first is gone").unwrap().unwrap();
    store.close().await;
}
