//! What watchers are promised, told as stories.

mod support;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use support::{get, hold, is_quiet, line_up, one, open, open_db, put, reopen, soon, story, take};
use vedetta_core::{KeyRange, Revision};
use vedetta_db::{Mirror, Rows};
use vedetta_kv::{Delete, Event, Op, Options, Put, Store, Txn, WatchError, WatchOptions, Watcher};

/// Together more than is kept in memory for watchers.
const MANY: usize = 300;
const LARGE: usize = 64 << 10;

fn from(revision: u64) -> WatchOptions {
    WatchOptions { from: Some(Revision(revision)), ..WatchOptions::default() }
}

fn watch(store: &Store, range: KeyRange) -> Watcher {
    store.watch(range, WatchOptions::default()).unwrap()
}

/// The `n`th large value.
fn large(n: usize) -> Vec<u8> {
    let mut value = vec![b'.'; LARGE];
    value[..8].copy_from_slice(&n.to_be_bytes());
    value
}

fn number(value: &[u8]) -> usize {
    usize::from_be_bytes(value[..8].try_into().unwrap())
}

/// Puts more than memory keeps, on a few keys.
async fn flood(store: &Store) {
    for n in 0..MANY {
        put(store, format!("large/{}", n % 7), large(n)).await;
    }
}

/// Makes sure that the events are those of [`flood`], each once, in order, with what was before.
fn assert_flood(events: &[Event]) {
    assert_eq!(events.len(), MANY);
    for (n, event) in events.iter().enumerate() {
        let now = event.now().unwrap();
        assert_eq!((number(now.value()), now.value().len()), (n, LARGE));
        assert_eq!(usize::try_from(now.version()), Ok(n / 7 + 1));
        let before = event.previous.as_ref().map(|before| number(before.value()));
        assert_eq!(before, n.checked_sub(7));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_that_fell_far_behind_reads_everything_once_and_holds_up_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let mut slow = watch(&store, KeyRange::prefix("large/"));
    let mut fast = watch(&store, KeyRange::prefix("large/"));
    let mut narrow = watch(&store, one("large/3"));
    let following = tokio::spawn(async move { take(&mut fast, MANY).await });
    flood(&store).await; // and the slow one reads nothing
    assert_flood(&following.await.unwrap());
    assert_eq!(take(&mut narrow, MANY / 7 + 1).await.len(), MANY / 7 + 1);

    put(&store, "large/end", "x").await;
    let mut seen = take(&mut slow, MANY + 1).await;
    assert_eq!(story(&seen.split_off(MANY)), ["large/end=x"]);
    assert_flood(&seen);
    assert!(is_quiet(&mut slow, store.status().revision).await);
    store.close().await;
}

#[tokio::test]
async fn a_watcher_whose_history_was_compacted_is_told_the_oldest_revision_kept() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let mut slow = watch(&store, KeyRange::all());
    let mut current = watch(&store, KeyRange::all());
    flood(&store).await;
    take(&mut current, MANY).await;
    store.compact(Revision(200), true).await.unwrap();
    for _ in 0..2 {
        match soon(slow.next()).await {
            Err(WatchError::Compacted { asked, oldest }) => {
                assert_eq!((asked, oldest), (Revision(2), Revision(200)));
            }
            other => panic!("{other:?}"),
        }
    }
    let refused = store.watch(one("k"), from(199));
    assert!(matches!(
        refused,
        Err(WatchError::Compacted { asked: Revision(199), oldest: Revision(200) })
    ));
    assert_eq!(store.status().watchers, 2, "a refused watch leaves nothing behind");

    let mut resumed = store.watch(KeyRange::all(), from(200)).unwrap();
    let rest = take(&mut resumed, MANY - 198).await;
    assert_eq!(rest.first().map(|event| event.revision), Some(Revision(200)));
    assert_eq!(rest.last().map(|event| event.revision), Some(store.status().revision));
    put(&store, "k", "v").await;
    assert_eq!(story(&take(&mut current, 1).await), ["k=v"], "who had read it is not concerned");
    store.close().await;
}

#[tokio::test]
async fn a_transaction_larger_than_a_batch_comes_whole() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path()).await;
    let mut live = watch(&store, KeyRange::all());
    let puts = |n| Op::Put(Put::new(format!("t/{n:03}"), vec![b'v'; 11 << 10]));
    for _ in 0..3 {
        put(&store, "small", "x").await;
        let then = (0..128).map(puts).collect();
        store.txn(Txn { then, ..Txn::default() }).await.unwrap();
    }
    for _ in 0..2 {
        let mut whole = Vec::new();
        while whole.len() < 3 {
            let batch = soon(live.next()).await.unwrap();
            let mut sizes = BTreeMap::<Revision, usize>::new();
            batch.iter().for_each(|event| *sizes.entry(event.revision).or_default() += 1);
            whole.extend(sizes.into_values().filter(|&events| events != 1));
        }
        assert_eq!(whole, [128; 3]);
        store = reopen(&store, folder.path()).await;
        live = store.watch(KeyRange::all(), from(2)).unwrap();
    }
    store.close().await;
}

#[tokio::test]
async fn a_dropped_watcher_leaves_nothing_behind_and_its_neighbours_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let ranges = || {
        let odd = KeyRange::Between("a".into(), "c".into());
        [one("b"), KeyRange::prefix("b"), KeyRange::all(), odd, KeyRange::From("b".into())]
    };
    let mut watchers: Vec<_> = (0..10).flat_map(|_| ranges()).map(|r| watch(&store, r)).collect();
    assert_eq!(store.status().watchers, 50);
    let mut nth = 0;
    watchers.retain(|_| {
        nth += 1;
        nth % 3 == 0
    });
    assert_eq!(store.status().watchers, 16);
    put(&store, "b", "v").await;
    for watcher in &mut watchers {
        assert_eq!(story(&take(watcher, 1).await), ["b=v"]);
    }
    drop(watchers);
    assert_eq!(store.status().watchers, 0);
    store.close().await;
}

#[tokio::test]
async fn a_thousand_watchers_on_keys_of_their_own_get_just_theirs() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let name = |n: usize| format!("key/{n}");
    let mut watchers: Vec<_> = (0..1_000).map(|n| watch(&store, one(&name(n)))).collect();
    for n in (0..1_000).rev() {
        if n % 50 == 0 {
            let then = (n..n + 50).map(|n| Op::Put(Put::new(name(n), "v"))).collect();
            store.txn(Txn { then, ..Txn::default() }).await.unwrap();
        }
    }
    let end = store.status().revision;
    for (n, watcher) in watchers.iter_mut().enumerate() {
        assert_eq!(story(&take(watcher, 1).await), [format!("{}=v", name(n))]);
        assert!(is_quiet(watcher, end).await);
    }
    store.close().await;
}

#[tokio::test]
async fn ranges_that_are_no_prefix_are_watched_exactly() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path()).await;
    let keys: [&[u8]; 8] = [b"\0", b"a", b"a\0", b"b", b"b\xff", b"c", b"\xff", b"\xff\xff"];
    let ranges = [
        (KeyRange::Between("a".into(), "c".into()), &keys[1..5]),
        (KeyRange::Between("a\0".into(), "b\0".into()), &keys[2..4]),
        (KeyRange::Between("c".into(), "a".into()), &keys[..0]),
        (KeyRange::Between("a".into(), "a".into()), &keys[..0]),
        (KeyRange::From("b".into()), &keys[3..]),
        (KeyRange::From(vec![0xff].into()), &keys[6..]),
        (KeyRange::From(vec![0xff, 0xff].into()), &keys[7..]),
        (KeyRange::prefix("b"), &keys[3..5]),
        (KeyRange::prefix(""), &keys[..]),
    ];
    let follow = |store: &Store, options: &WatchOptions| -> Vec<_> {
        ranges
            .iter()
            .map(|(range, _)| store.watch(range.clone(), options.clone()).unwrap())
            .collect()
    };
    let mut live = follow(&store, &WatchOptions::default());
    for key in keys {
        put(&store, key, "v").await;
    }
    store.delete(Delete { range: KeyRange::all(), previous: false }).await.unwrap();
    let end = store.status().revision;
    for _ in 0..2 {
        for (watcher, (range, wanted)) in live.iter_mut().zip(&ranges) {
            let events = take(watcher, wanted.len() * 2).await;
            let seen: Vec<_> = events.iter().map(vedetta_kv::Event::key).collect();
            let wanted: Vec<_> = wanted.iter().chain(*wanted).copied().collect();
            assert_eq!(seen, wanted, "{range:?}");
            assert!(is_quiet(watcher, end).await, "{range:?}");
        }
        store = reopen(&store, folder.path()).await;
        live = follow(&store, &from(2));
    }
    store.close().await;
}

#[tokio::test]
async fn progress_passes_over_what_does_not_concern_a_watcher() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let mut watcher = watch(&store, one("mine"));
    for _ in 0..10 {
        put(&store, "other", "x").await;
    }
    assert!(is_quiet(&mut watcher, Revision(11)).await);
    assert_eq!(watcher.progress(), Revision(11));

    put(&store, "mine", "x").await;
    put(&store, "other", "x").await;
    // Owed, not handed out: the promise must not reach past it, however long one looks.
    let mut bystander = watch(&store, one("other"));
    put(&store, "other", "x").await;
    take(&mut bystander, 1).await;
    assert_eq!(watcher.progress(), Revision(11));
    take(&mut watcher, 1).await;
    assert!(is_quiet(&mut watcher, Revision(14)).await);
    store.close().await;
}

#[tokio::test]
async fn a_watch_may_begin_in_the_future() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let mut watcher = store.watch(KeyRange::all(), from(5)).unwrap();
    for n in 2..8 {
        assert_eq!(put(&store, "k", format!("{n}")).await, Revision(n));
    }
    assert_eq!(story(&take(&mut watcher, 3).await), ["k=5", "k=6", "k=7"]);
    store.close().await;
}

#[tokio::test]
async fn events_left_out_by_a_filter_are_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = open(folder.path()).await;
    let no_puts = WatchOptions { no_puts: true, ..from(2) };
    let no_deletes = WatchOptions { no_deletes: true, ..from(2) };
    for n in 0..3 {
        put(&store, "k", format!("{n}")).await;
        store.delete(Delete { range: one("k"), previous: false }).await.unwrap();
    }
    for _ in 0..2 {
        let mut deletes = store.watch(one("k"), no_puts.clone()).unwrap();
        let mut puts = store.watch(one("k"), no_deletes.clone()).unwrap();
        assert_eq!(story(&take(&mut deletes, 3).await), ["-k"; 3]);
        assert_eq!(story(&take(&mut puts, 3).await), ["k=0", "k=1", "k=2"]);
        let end = store.status().revision;
        assert!(is_quiet(&mut deletes, end).await && is_quiet(&mut puts, end).await);
        store = reopen(&store, folder.path()).await;
    }
    store.close().await;
}

#[tokio::test]
async fn a_watcher_whose_reads_are_given_up_again_and_again_still_gets_everything() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    for n in 0..2_500 {
        // Several to a commit, to be quicker.
        let then = (0..4).map(|k| Op::Put(Put::new(format!("k{k}"), format!("{n}")))).collect();
        if n % 25 == 0 {
            store.txn(Txn { then, ..Txn::default() }).await.unwrap();
        } else if n % 5 == 0 {
            put(&store, "k0", format!("{n}")).await;
        }
    }
    let written = usize::try_from(store.status().revision.0 - 1).unwrap();
    let store = reopen(&store, folder.path()).await;
    let mut watcher = store.watch(one("k0"), from(2)).unwrap();
    let mut seen = Vec::new();
    let reading = async {
        while seen.len() < written {
            tokio::select! {
                biased;
                batch = watcher.next() => seen.extend(batch.unwrap().iter().cloned()),
                () = tokio::task::yield_now() => {} // given up: reading the file takes longer
            }
        }
    };
    soon(reading).await;
    let revisions: Vec<_> = seen.iter().map(|event| event.revision.0).collect();
    assert_eq!(revisions, (2..2 + written as u64).collect::<Vec<_>>());
    store.close().await;
}

#[tokio::test]
async fn closing_the_store_ends_every_watch() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let mut idle = watch(&store, one("k"));
    let mut owed = store.watch(KeyRange::all(), from(1)).unwrap();
    put(&store, "other", "v").await;
    let waiting = tokio::spawn(async move { soon(idle.next()).await });
    store.close().await;
    assert!(matches!(waiting.await.unwrap(), Err(WatchError::Closed)));
    assert!(matches!(soon(owed.next()).await, Err(WatchError::Closed)));
    let mut late = watch(&store, one("k"));
    assert!(matches!(soon(late.next()).await, Err(WatchError::Closed)));
}

/// Stands in line before the store: a batch is on the disk, and the store has not shown it yet.
struct Gate {
    shut: Arc<AtomicBool>,
    reached: mpsc::Sender<()>,
    open: Mutex<mpsc::Receiver<()>>,
}

impl Mirror for Gate {
    fn seal(&self) -> Rows {
        Rows::none()
    }
    fn keep(&self) {}
    fn undo(&self) {}
    fn discard(&self) {}
    fn publish(&self) {
        if self.shut.load(Ordering::SeqCst) {
            let _ = self.reached.send(());
            let _ = self.open.lock().unwrap().recv();
        }
    }
}

#[tokio::test]
async fn a_watcher_reading_history_is_not_ahead_of_readers_and_knows_the_previous_value() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    put(&store, "k", "one").await;
    put(&store, "k", "two").await;
    store.close().await;

    let (reached, has_reached) = mpsc::channel();
    let (pass, passes) = mpsc::channel();
    let shut = Arc::new(AtomicBool::new(false));
    let gate = Gate { shut: Arc::clone(&shut), reached, open: Mutex::new(passes) };
    let db = open_db(folder.path());
    let attaching = db.clone();
    tokio::task::spawn_blocking(move || attaching.attach(Box::new(gate))).await.unwrap().unwrap();
    let store = Store::open(db, Options::default()).await.unwrap();
    let mut watcher = store.watch(one("k"), from(2)).unwrap();

    shut.store(true, Ordering::SeqCst);
    let writing = store.clone();
    let written = tokio::spawn(async move { put(&writing, "k", "three").await });
    tokio::task::spawn_blocking(move || has_reached.recv()).await.unwrap().unwrap();
    let seen = take(&mut watcher, 2).await;
    assert_eq!(store.status().revision, Revision(3));
    assert_eq!(get(&store, "k").await.as_deref(), Some(&b"two"[..]));
    assert_eq!(story(&seen), ["k=one", "k=two"]);

    shut.store(false, Ordering::SeqCst);
    drop(pass);
    written.await.unwrap();
    let last = take(&mut watcher, 1).await;
    assert_eq!(story(&last), ["k=three"]);
    assert_eq!(last[0].previous.as_ref().unwrap().value(), b"two");
    store.close().await;
}

#[tokio::test]
async fn an_event_is_encoded_once_for_all_its_watchers() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let mut watchers: Vec<_> = (0..3).map(|_| watch(&store, KeyRange::prefix("k"))).collect();
    watchers.push(watch(&store, one("k2")));
    for key in ["k1", "k2", "other"] {
        put(&store, key, "v").await;
    }
    let encoded = Mutex::new(Vec::new());
    let encode = |form: &str, event: &Event| {
        let text = format!("{form} {}", event.key().escape_ascii());
        encoded.lock().unwrap().push(text.clone());
        text.into()
    };
    for (n, mut watcher) in watchers.into_iter().enumerate() {
        let keys = if n == 3 { vec!["k2"] } else { vec!["k1", "k2"] };
        let (mut plain, mut with) = (Vec::new(), Vec::new());
        while plain.len() < keys.len() {
            let batch = soon(watcher.next()).await.unwrap();
            plain.extend(
                batch
                    .encoded(false, |event| encode("plain", event))
                    .map(|(_, bytes)| bytes.clone()),
            );
            with.extend(
                batch.encoded(true, |event| encode("with", event)).map(|(_, bytes)| bytes.clone()),
            );
            assert!(batch.last() >= batch.iter().last().unwrap().revision);
        }
        for (form, got) in [("plain", plain), ("with", with)] {
            assert_eq!(got, keys.iter().map(|key| format!("{form} {key}")).collect::<Vec<_>>());
        }
    }
    let mut encoded = encoded.into_inner().unwrap();
    encoded.sort();
    assert_eq!(encoded, ["plain k1", "plain k2", "with k1", "with k2"]);
    store.close().await;
}

#[tokio::test]
async fn a_watch_of_the_future_has_made_no_progress_beyond_the_present() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    put(&store, "k", "one").await;
    let watcher = store.watch(one("k"), from(1000)).unwrap();
    assert_eq!(watcher.progress(), Revision(2));
    store.close().await;
}

#[tokio::test]
async fn a_commit_of_many_large_writes_comes_in_several_batches() {
    let folder = tempfile::tempdir().unwrap();
    let db = open_db(folder.path());
    let store = Store::open(db.clone(), Options::default()).await.unwrap();
    let mut watcher = store.watch(KeyRange::all(), WatchOptions::default()).unwrap();
    let busy = hold(&db).await;
    let mut asked = Vec::new();
    for n in 0..12 {
        let (store, value) = (store.clone(), vec![b'x'; 1 << 20]);
        let put = async move { store.put(Put::new(format!("k{n:02}"), value)).await };
        asked.push(line_up(put).await);
    }
    drop(busy);
    for put in asked {
        soon(put).await.unwrap();
    }
    let (mut keys, mut most) = (Vec::new(), 0);
    while keys.len() < 12 {
        let batch = soon(watcher.next()).await.unwrap();
        most = most.max(batch.iter().map(|event| event.now().unwrap().value().len()).sum());
        keys.extend(batch.iter().map(|event| event.key().to_vec()));
    }
    assert!(keys.is_sorted(), "{keys:?}");
    assert!(most < 3 << 20, "{most} bytes at once");
    store.close().await;
}

#[tokio::test]
async fn history_with_large_previous_values_comes_in_several_batches() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    for n in 0..8 {
        put(&store, format!("k{n}"), "x".repeat(400 << 10)).await;
    }
    let keys = (0..8).map(|n| one(&format!("k{n}")));
    for range in keys {
        store.delete(Delete { range, previous: false }).await.unwrap();
    }
    // From the file, not from what is in memory.
    let store = reopen(&store, folder.path()).await;
    let mut watcher = store.watch(KeyRange::all(), from(10)).unwrap();
    let (mut gone, mut batches) = (Vec::new(), 0);
    while gone.len() < 8 {
        let batch = soon(watcher.next()).await.unwrap();
        let bytes = |event: &Event| event.previous.as_ref().unwrap().value().len();
        assert!(batch.iter().map(bytes).sum::<usize>() < 2 << 20);
        gone.extend(batch.iter().map(|event| event.revision.0));
        batches += 1;
    }
    assert_eq!(gone, (10..18).collect::<Vec<_>>());
    assert!(batches > 1, "{batches}");
    store.close().await;
}
