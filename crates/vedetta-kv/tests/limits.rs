//! Every limit, and every error that tells of one.

mod support;

use std::time::Duration;

use bytes::Bytes;
use support::{get, get_at, hold, line_up, one, open, open_db, put, soon};
use vedetta_core::{KeyRange, Revision};
use vedetta_db::CommitError;
use vedetta_kv::{
    Compare, CompareOp, CompareTarget, Delete, KvError, LeaseId, Limits, Op, Options, Purpose, Put,
    PutLease, PutValue, Range, Store, Txn, Update, WatchError, WatchOptions, Write,
};

const HOUR: Duration = Duration::from_secs(3600);

fn then(ops: impl IntoIterator<Item = Op>) -> Txn {
    Txn { then: ops.into_iter().collect(), ..Txn::default() }
}

fn puts(key: &str) -> Op {
    Op::Put(Put::new(key.to_owned(), "v"))
}

fn deletes(range: KeyRange) -> Op {
    Op::Delete(Delete { range, previous: false })
}

fn reads(range: KeyRange) -> Op {
    Op::Range(Range::new(range))
}

fn lease(id: i64) -> LeaseId {
    LeaseId::new(id).unwrap()
}

/// A transaction inside `depth` others.
fn nested(depth: usize) -> Txn {
    (0..depth).fold(then([puts("k")]), |inner, _| then([Op::Txn(inner)]))
}

/// Opens a store, and makes sure in the end that it was never changed.
async fn refusing<F: Future<Output = ()>>(tests: impl FnOnce(Store) -> F) {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    tests(store.clone()).await;
    assert_eq!(store.status().revision, Revision::FRESH, "what was refused changed something");
    store.close().await;
}

#[tokio::test]
async fn an_empty_key_is_refused_wherever_it_stands() {
    refusing(|store| async move {
        let delete = Delete { range: one(""), previous: false };
        assert!(matches!(store.put(Put::new("", "v")).await, Err(KvError::EmptyKey)));
        assert!(matches!(store.delete(delete).await, Err(KvError::EmptyKey)));
        assert!(matches!(store.range(Range::new(one(""))).await, Err(KvError::EmptyKey)));
        let op = CompareOp::Equal;
        let compare = Compare { range: one(""), op, target: CompareTarget::Version(0) };
        let inside = Txn { when: vec![compare], ..Txn::default() };
        let otherwise = Txn { otherwise: vec![puts("")], ..Txn::default() };
        for txn in [
            inside.clone(),
            otherwise,
            then([deletes(one(""))]),
            then([reads(one(""))]),
            then([puts("k"), Op::Txn(inside)]),
        ] {
            assert!(matches!(store.txn(txn).await, Err(KvError::EmptyKey)));
        }
    })
    .await;
}

#[tokio::test]
async fn a_key_may_be_as_long_as_the_limit_and_not_longer() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let limit = Limits::default().key;
    put(&store, vec![b'k'; limit], "v").await;
    let long = Put::new(vec![b'k'; limit + 1], "v");
    for refused in
        [store.put(long.clone()).await.map(drop), store.txn(then([Op::Put(long)])).await.map(drop)]
    {
        match refused {
            Err(KvError::KeyTooLarge { size, limit: told }) => {
                assert_eq!((size, told), (limit + 1, limit));
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(store.status().revision, Revision(2));
    store.close().await;
}

#[tokio::test]
async fn a_request_may_be_as_large_as_the_limit_and_not_larger() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let limit = Limits::default().request;
    let sized = |size: usize| Put::new("k", vec![b'v'; size - 1]);
    store.put(sized(limit)).await.unwrap();
    let halves = |first: usize, second: usize| {
        let put = |key, size| Op::Put(Put::new(key, vec![b'v'; size - 1]));
        let inner = Txn { otherwise: vec![put("b", second)], ..Txn::default() };
        then([put("a", first), Op::Txn(inner)])
    };
    store.txn(halves(limit / 2, limit / 2)).await.unwrap();
    let range = |size: usize| Delete {
        range: KeyRange::Between(vec![b'k'; size - 1].into(), "l".into()),
        previous: false,
    };
    store.delete(range(limit)).await.unwrap();
    let target = CompareTarget::Value(vec![b'v'; limit].into());
    let compare = Compare { range: one("k"), op: CompareOp::Equal, target };
    for refused in [
        store.put(sized(limit + 1)).await.map(drop),
        store.txn(halves(limit / 2, limit / 2 + 1)).await.map(drop),
        store.txn(Txn { when: vec![compare], ..Txn::default() }).await.map(drop),
        store.delete(range(limit + 1)).await.map(drop),
    ] {
        match refused {
            Err(KvError::RequestTooLarge { size, limit: told }) => {
                assert_eq!((size, told), (limit + 1, limit));
            }
            other => panic!("{other:?}"),
        }
    }
    store.close().await;
}

#[tokio::test]
async fn a_branch_may_have_as_many_operations_as_the_limit_and_not_more() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let limit = Limits::default().ops;
    let many = |n: usize| (0..n).map(|n| puts(&format!("k{n}"))).collect::<Vec<_>>();
    store.txn(then(many(limit))).await.unwrap();
    let op = CompareOp::Equal;
    let compare = Compare { range: one("k"), op, target: CompareTarget::Version(0) };
    for txn in [
        then(many(limit + 1)),
        Txn { otherwise: many(limit + 1), ..Txn::default() },
        Txn { when: vec![compare; limit + 1], ..Txn::default() },
        // A nested one counts together with those around it.
        then([Op::Txn(then(many(limit)))]),
    ] {
        match store.txn(txn).await {
            Err(KvError::TooManyOps { ops, limit: told }) => {
                assert_eq!((ops, told), (limit + 1, limit));
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(store.status().revision, Revision(2));
    store.close().await;
}

#[tokio::test]
async fn transactions_may_be_nested_to_a_depth_and_not_deeper() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let Err(KvError::TooDeep { limit }) = store.txn(nested(1_000)).await else {
        panic!("a thousand deep")
    };
    assert!(matches!(store.txn(nested(limit)).await, Err(KvError::TooDeep { .. })));
    assert_eq!(store.status().revision, Revision::FRESH);
    store.txn(nested(limit - 1)).await.unwrap();
    assert_eq!(get(&store, "k").await.as_deref(), Some(&b"v"[..]));
    store.close().await;
}

#[tokio::test]
async fn a_transaction_that_changes_a_key_twice_is_refused() {
    refusing(|store| async move {
        let inner = |ops: &[Op]| Op::Txn(then(ops.iter().cloned()));
        let either =
            |a: Op, b: Op| Op::Txn(Txn { then: vec![a], otherwise: vec![b], ..Txn::default() });
        let prefix = || deletes(KeyRange::prefix("k"));
        for ops in [
            vec![puts("k"), puts("k")],
            vec![puts("k1"), prefix()],
            vec![prefix(), puts("k1")],
            vec![deletes(KeyRange::From("a".into())), puts("k")],
            vec![puts("k"), inner(&[puts("k")])],
            vec![inner(&[puts("k")]), puts("k")],
            vec![inner(&[puts("k")]), inner(&[prefix()])],
            vec![inner(&[inner(&[puts("k"), puts("k")])])],
            vec![either(puts("j"), puts("k")), puts("k")],
            vec![puts("k"), either(puts("j"), deletes(one("k")))],
        ] {
            let told = format!("{ops:?}");
            let branches = [
                Txn { then: ops.clone(), ..Txn::default() },
                Txn { otherwise: ops, ..Txn::default() },
            ];
            for txn in branches {
                match store.txn(txn).await {
                    Err(KvError::DuplicateKey(key)) => assert!(key.starts_with(b"k"), "{told}"),
                    other => panic!("{told}: {other:?}"),
                }
            }
        }
    })
    .await;
}

#[tokio::test]
async fn what_only_looks_like_changing_a_key_twice_is_done() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    let between = |a: &'static str, b: &'static str| KeyRange::Between(a.into(), b.into());
    let either = Txn { then: vec![puts("k")], otherwise: vec![puts("k")], ..Txn::default() };
    for ops in [
        vec![puts("k"), deletes(between("a", "k"))],
        vec![puts("k"), deletes(between("z", "a"))],
        vec![deletes(KeyRange::prefix("k")), deletes(one("k"))],
        vec![puts("k"), reads(one("k")), reads(KeyRange::all())],
        vec![Op::Txn(either)],
    ] {
        let told = format!("{ops:?}");
        let done = store.txn(then(ops)).await;
        assert!(done.is_ok(), "{told}: {done:?}");
    }
    store.close().await;
}

#[tokio::test]
async fn keeping_the_value_or_the_lease_needs_the_key() {
    refusing(|store| async move {
        let keep_value = Put { value: PutValue::Keep, ..Put::new("k", "") };
        let keep_lease = Put { lease: PutLease::Keep, ..Put::new("k", "v") };
        for put in [keep_value, keep_lease] {
            let alone = store.put(put.clone()).await.map(drop);
            let inside = store.txn(then([puts("j"), Op::Put(put)])).await.map(drop);
            for refused in [alone, inside] {
                assert!(matches!(refused, Err(KvError::KeyNotFound(key)) if key == "k"));
            }
        }
        assert_eq!(get(&store, "j").await, None, "a transaction is done whole or not at all");
    })
    .await;
}

#[tokio::test]
async fn a_lease_that_is_missing_taken_or_too_long_is_refused() {
    refusing(|store| async move {
        let unknown = lease(9);
        for refused in [
            store.put(Put::new("k", "v").lease(unknown)).await.map(drop),
            store.revoke(unknown).await.map(drop),
            store.keep_alive(unknown).await.map(drop),
        ] {
            assert!(matches!(refused, Err(KvError::LeaseNotFound(id)) if id == unknown));
        }
        assert_eq!(store.lease(unknown), None);
        assert_eq!(store.grant(Some(unknown), HOUR).await.unwrap(), unknown);
        let again = store.grant(Some(unknown), HOUR).await;
        assert!(matches!(again, Err(KvError::LeaseExists(id)) if id == unknown));
        let Err(KvError::TtlTooLarge { limit }) = store.grant(None, Duration::MAX).await else {
            panic!("longer than time itself")
        };
        let longest = Duration::from_secs(limit);
        assert!(store.grant(None, longest + Duration::from_nanos(1)).await.is_err());
        let chosen = store.grant(None, longest).await.unwrap();
        assert_eq!(store.lease(chosen).unwrap().ttl, longest);
    })
    .await;
}

#[tokio::test]
async fn revisions_to_come_and_revisions_forgotten_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    for n in 2..=10 {
        assert_eq!(put(&store, "k", format!("{n}")).await, Revision(n));
    }
    store.compact(Revision(5), true).await.unwrap();
    let future = |refused: Result<(), KvError>| {
        assert!(matches!(
            refused,
            Err(KvError::Future { asked: Revision(11), current: Revision(10) })
        ));
    };
    let compacted = |refused: Result<(), KvError>, asked: u64| match refused {
        Err(KvError::Compacted { asked: told, oldest }) => {
            assert_eq!((told, oldest), (Revision(asked), Revision(5)));
        }
        other => panic!("{other:?}"),
    };
    let at = |at: u64| Range { at: Some(Revision(at)), ..Range::new(KeyRange::all()) };
    future(get_at(&store, "k", 11).await.map(drop));
    future(store.range(at(11)).await.map(drop));
    future(store.txn(then([Op::Range(at(11))])).await.map(drop));
    future(store.compact(Revision(11), false).await);
    compacted(get_at(&store, "k", 4).await.map(drop), 4);
    compacted(store.range(at(4)).await.map(drop), 4);
    compacted(store.txn(then([Op::Range(at(4))])).await.map(drop), 4);
    compacted(store.compact(Revision(4), false).await, 4);
    compacted(store.compact(Revision(5), false).await, 5);
    assert_eq!(get_at(&store, "k", 5).await.unwrap().as_deref(), Some(&b"5"[..]));
    // Inside a transaction that has changed something, its own revision is the present.
    store.txn(then([puts("j"), Op::Range(at(11))])).await.unwrap();
    store.close().await;
}

#[tokio::test]
async fn over_its_quota_the_store_takes_only_what_frees_room_until_there_is_room() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { quota: Some(300 << 10), ..Options::default() };
    let store = Store::open(open_db(folder.path()), options).await.unwrap();
    let page = || Bytes::from(vec![b'v'; 8 << 10]);
    let kept = store.grant(None, HOUR).await.unwrap();
    for round in 0..3 {
        let mut stored = 0;
        let refused = loop {
            match store.put(Put::new(format!("{round}/{stored}"), page())).await {
                Ok(_) => stored += 1,
                Err(refused) => break refused,
            }
            assert!(stored < 1_000, "the quota does not hold");
        };
        let KvError::QuotaExceeded { used, quota } = refused else { panic!("{refused:?}") };
        assert!(used > quota && quota == 300 << 10 && stored > 10);
        let also = store.txn(then([reads(one("k")), puts("k")])).await.map(drop);
        assert!(matches!(also, Err(KvError::QuotaExceeded { .. })));
        let also = store.grant(None, HOUR).await.map(drop);
        assert!(matches!(also, Err(KvError::QuotaExceeded { .. })));

        // Reading, keeping alive, deleting and compacting go on.
        assert!(get(&store, &format!("{round}/0")).await.is_some());
        store.keep_alive(kept).await.unwrap();
        let most = Delete { range: KeyRange::prefix(format!("{round}/")), previous: false };
        assert_eq!(store.delete(most).await.unwrap().count, stored);
        store.txn(then([deletes(KeyRange::all())])).await.unwrap();
        store.compact(store.status().revision, true).await.unwrap();
        put(&store, "small", "v").await;
    }
    store.close().await;
}

/// Puts and updates that are let in while there is room, and wait.
#[tokio::test]
async fn writes_that_wait_while_the_quota_is_passed_are_refused_but_for_one_or_two_batches() {
    const BATCH: usize = 4;
    const WRITES: usize = 64;
    const SIZE: usize = 64 << 10;
    let folder = tempfile::tempdir().unwrap();
    let mut options = vedetta_db::Options::new(folder.path().join("vedetta.db"));
    (options.ballast, options.batch) = (0, BATCH);
    let db = vedetta_db::Db::open(&options, &[vedetta_kv::SCHEMA]).unwrap();
    let quota = 512 << 10;
    let options = Options { quota: Some(quota), ..Options::default() };
    let store = Store::open(db.clone(), options).await.unwrap();

    let held = hold(&db).await;
    let mut waiting = Vec::new();
    for n in 0..WRITES {
        let (store, key, value) = (store.clone(), format!("{n}"), Bytes::from(vec![b'v'; SIZE]));
        waiting.push(if n % 2 == 0 {
            line_up(async move { store.put(Put::new(key, value)).await.map(drop) }).await
        } else {
            let update = move |update: &mut Update<'_>| update.put(key, value, Write::default());
            line_up(async move { store.update(Purpose::Store, update).await }).await
        });
    }
    drop(held);
    let mut stored = 0;
    for answer in waiting {
        match soon(answer).await {
            Ok(()) => stored += 1,
            Err(refused) => assert!(matches!(refused, KvError::QuotaExceeded { .. }), "{refused}"),
        }
    }
    let most = usize::try_from(quota).unwrap() / SIZE + 2 * BATCH;
    assert!((BATCH..=most).contains(&stored), "{stored} were stored, {most} at most may be");
    assert_eq!(store.status().existing, stored);
    store.close().await;
}

#[tokio::test]
async fn a_closed_store_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    store.grant(Some(lease(7)), HOUR).await.unwrap();
    put(&store, "k", "v").await;
    let mut watcher = store.watch(one("k"), WatchOptions::default()).unwrap();
    store.close().await;
    store.close().await;
    let delete = Delete { range: one("k"), previous: false };
    for refused in [
        soon(store.put(Put::new("k", "w"))).await.map(drop),
        soon(store.delete(delete)).await.map(drop),
        soon(store.txn(then([puts("k")]))).await.map(drop),
        soon(store.compact(Revision(2), true)).await,
        soon(store.grant(None, HOUR)).await.map(drop),
        soon(store.keep_alive(lease(7))).await.map(drop),
        soon(store.revoke(lease(7))).await.map(drop),
    ] {
        assert!(matches!(refused, Err(KvError::Lost(CommitError::Closed))), "{refused:?}");
    }
    assert!(matches!(soon(watcher.next()).await, Err(WatchError::Closed)));
    // What is in memory can be read.
    assert!(get(&store, "k").await.is_some());
    soon(store.txn(then([reads(one("k"))]))).await.unwrap();

    let store = open(folder.path()).await;
    assert_eq!(store.status().revision, Revision(2));
    assert_eq!(get(&store, "k").await.as_deref(), Some(&b"v"[..]));
    store.close().await;
}

#[tokio::test]
async fn a_value_may_be_so_large_and_no_larger() {
    let folder = tempfile::tempdir().unwrap();
    let limits = Limits { value: 10, ..Limits::default() };
    let options = Options { limits, ..Options::default() };
    let store = Store::open(open_db(folder.path()), options).await.unwrap();
    store.put(Put::new("k", vec![7; 10])).await.unwrap();
    let refused = store.put(Put::new("k", vec![7; 11])).await;
    assert!(matches!(refused, Err(KvError::ValueTooLarge { size: 11, limit: 10 })));
    store.close().await;
}

#[tokio::test]
async fn a_page_can_be_read_without_counting_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path()).await;
    for n in 0..2_000 {
        put(&store, format!("{n:04}"), "v").await;
    }
    let mut page = Range::new(KeyRange::all());
    (page.limit, page.uncounted) = (Some(10), true);
    let read = store.range(page.clone()).await.unwrap();
    assert_eq!((read.keys.len(), read.more, read.count), (10, true, 0));
    let inside = store.txn(then([Op::Range(page)])).await.unwrap();
    assert!(format!("{:?}", inside.replies).contains("more: true, count: 0"));
    store.close().await;
}
