//! An etcd elsewhere as a source: the real one, and ours.

mod support;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use etcd_client::{Client, Txn, TxnOp};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use support::{Ours, http, soon};
use testing::etcd;
use vedetta_core::{
    Change, Changes, Feed as _, KeyRange, Page, Revision, Source as _, SourceError,
};
use vedetta_etcd::{BadEndpoint, ClientTls, Cluster, ClusterFeed, TlsError, TlsFiles};

/// So that what is silent is noticed soon; and still more than anybody needs to answer.
const IMPATIENT: Duration = Duration::from_secs(2);

fn source(address: SocketAddr) -> Cluster {
    Cluster::new([format!("http://{address}")]).unwrap()
}

async fn writer(address: SocketAddr) -> Client {
    Client::connect([address.to_string()], None).await.unwrap()
}

/// Writes all in one transaction and tells its revision.
async fn write(client: &mut Client, ops: impl IntoIterator<Item = TxnOp>) -> Revision {
    let ops = ops.into_iter().collect::<Vec<_>>();
    let done = client.txn(Txn::new().and_then(ops)).await.unwrap();
    Revision(done.header().unwrap().revision().cast_unsigned())
}

async fn put(client: &mut Client, key: &str, value: &str) -> Revision {
    write(client, [TxnOp::put(key, value, None)]).await
}

fn op(key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> TxnOp {
    TxnOp::put(key, value, None)
}

/// Tells the story of the real etcd, then of ours.
async fn of_both(story: impl AsyncFn(SocketAddr)) {
    let etcd = etcd::Cluster::start(1).await;
    Box::pin(story(etcd.node(0).address())).await;
    let ours = Ours::start().await;
    Box::pin(story(ours.address)).await;
}

/// All pages, the way the core asks for them.
async fn list(source: &Cluster, range: &KeyRange) -> Page {
    let mut all = soon("a list", source.list(range.clone(), None)).await.unwrap();
    while all.more {
        let rest = range.after(&all.entries.last().unwrap().key);
        let page = soon("a page", source.list(rest, Some(all.revision))).await.unwrap();
        assert_eq!(page.revision, all.revision);
        all.entries.extend(page.entries);
        all.more = page.more;
    }
    all
}

/// The changes up to a revision. None of a revision is in two parts.
async fn read_to(feed: &mut ClusterFeed, to: Revision) -> Vec<Change> {
    let mut all: Vec<Change> = Vec::new();
    loop {
        let Changes { changes, revision } = soon("changes", feed.next()).await.unwrap();
        if let (Some(before), Some(first)) = (all.last(), changes.first()) {
            assert!(before.revision < first.revision, "part of {first:?}");
        }
        assert!(changes.iter().all(|change| change.revision <= revision));
        all.extend(changes);
        if revision >= to {
            return all;
        }
    }
}

fn tell(changes: &[Change]) -> Vec<String> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let tell = |change: &Change| {
        let value = change.value.as_ref().map_or("gone".to_owned(), |value| text(value));
        format!("{} {} {value}", change.revision, text(&change.key))
    };
    changes.iter().map(tell).collect()
}

/// What a lost line says, its causes included.
fn lost<T>(outcome: Result<T, SourceError>) -> String {
    match outcome {
        Err(error @ SourceError::Lost(..)) => {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            format!("{error}: {}", cause.unwrap_or_default())
        }
        Err(other) => panic!("not lost: {other:?}"),
        Ok(_) => panic!("it went well"),
    }
}

#[tokio::test]
async fn a_list_is_of_one_revision_though_writes_go_on() {
    of_both(async |address| {
        let mut client = writer(address).await;
        let key = |n: usize| format!("r/{n:05}");
        for block in 0..25 {
            write(&mut client, (0..100).map(|n| op(key(block * 100 + n), "old"))).await;
        }
        let then = put(&mut client, "s", "not in the range").await;
        let source = source(address);
        let range = KeyRange::prefix("r/");
        let first = source.list(range.clone(), None).await.unwrap();
        assert_eq!((first.entries.len(), first.revision, first.more), (1_000, then, true));

        write(&mut client, [op(key(1_500), "new"), TxnOp::delete(key(1_600), None)]).await;
        write(&mut client, [op("r/01000x", "new")]).await;
        let (mut rest, mut all) = (range.clone(), first);
        while all.more {
            rest = rest.after(&all.entries.last().unwrap().key);
            let page = source.list(rest.clone(), Some(then)).await.unwrap();
            assert_eq!(page.revision, then);
            all = Page { entries: [all.entries, page.entries].concat(), ..page };
        }
        assert_eq!(all.entries.len(), 2_500);
        for (n, entry) in all.entries.iter().enumerate() {
            assert_eq!((&entry.key[..], &entry.value[..]), (key(n).as_bytes(), &b"old"[..]));
            assert!(entry.modified <= then);
        }
        assert_eq!(list(&source, &range).await.entries.len(), 2_500, "one more and one less");
    })
    .await;
}

#[tokio::test]
async fn changes_come_from_a_revision_on_with_transactions_whole_and_deletes() {
    of_both(async |address| {
        let mut client = writer(address).await;
        let base = put(&mut client, "before", "1").await.0;
        write(&mut client, [op("r/a", "1"), op("r/b", "1"), op("s", "1")]).await;
        write(&mut client, [op("r/a", "2"), TxnOp::delete("r/b", None)]).await;
        let source = source(address);
        let from = Revision(base + 2);
        let (mut feed, stands) = source.follow(KeyRange::prefix("r/"), from).await.unwrap();
        assert_eq!(stands.0, base + 2);
        put(&mut client, "s", "2").await;
        let last = write(&mut client, [TxnOp::delete("r/a", None), op("r/c", "")]).await;

        let at = |n: u64| base + n;
        let told = tell(&read_to(&mut feed, last).await);
        let (a, c) = (format!("{} r/a gone", at(4)), format!("{} r/c ", at(4)));
        assert_eq!(told, [format!("{} r/a 2", at(2)), format!("{} r/b gone", at(2)), a, c]);
    })
    .await;
}

#[tokio::test]
async fn what_is_large_comes_in_parts_but_no_revision_does() {
    of_both(async |address| {
        let mut client = writer(address).await;
        let large = vec![b'x'; 150_000];
        let mut last = Revision(0);
        for n in 0..20 {
            let ops = (0..7).map(|part| op(format!("r/{part}"), [&[n], &large[..]].concat()));
            last = write(&mut client, ops).await;
        }
        let source = source(address);
        let (mut feed, _) = source.follow(KeyRange::prefix("r/"), Revision(2)).await.unwrap();
        let changes = read_to(&mut feed, last).await;
        let mut parts = BTreeMap::<_, Vec<_>>::new();
        for Change { key, value, revision } in &changes {
            assert_eq!(value.as_ref().unwrap().len(), large.len() + 1);
            parts.entry(revision.0).or_default().push(key.clone());
        }
        assert_eq!(parts.len(), 20);
        assert!(parts.values().all(|keys| keys.len() == 7), "{parts:?}");
    })
    .await;
}

#[tokio::test]
async fn a_page_that_is_too_large_is_asked_for_in_parts() {
    let ours = Ours::start().await;
    let mut client = writer(ours.address).await;
    let large = vec![b'x'; 100_000];
    for block in 0..80 {
        write(&mut client, (0..10).map(|n| op(format!("{block:02}{n}"), &large[..]))).await;
    }
    let source = source(ours.address);
    let first = soon("a page", source.list(KeyRange::all(), None)).await.unwrap();
    assert!(first.more && first.entries.len() < 800, "80 MB are more than one page");
    assert_eq!(list(&source, &KeyRange::all()).await.entries.len(), 800);
}

#[tokio::test]
async fn keys_and_values_are_any_bytes_and_ranges_what_they_say() {
    of_both(async |address| {
        let mut client = writer(address).await;
        let keys: [&[u8]; 7] =
            [b"\0", b"\0\0", b"\x01", b"a", b"a\0", &[0xc3, 0x28, 0xff], &[0xff, 0xff]];
        let last = write(&mut client, keys.iter().map(|key| op(*key, *key))).await;
        let source = source(address);
        let bytes = |key: &[u8]| key.to_vec().into();
        for range in [
            KeyRange::all(),
            KeyRange::prefix("a"),
            KeyRange::prefix(vec![0xff]),
            KeyRange::One(bytes(b"a")),
            KeyRange::From(bytes(b"a\0")),
            KeyRange::Between(bytes(b""), bytes(b"\x01")),
            KeyRange::Between(bytes(b""), bytes(b"\0")),
            KeyRange::Between(bytes(b"b"), bytes(b"a")),
            KeyRange::One(bytes(b"")),
        ] {
            let expected: Vec<_> = keys.iter().filter(|key| range.contains(key)).collect();
            let page = list(&source, &range).await;
            let listed: Vec<_> = page.entries.iter().map(|entry| &entry.key[..]).collect();
            assert!(listed.iter().eq(expected.iter().copied()), "{range:?}: {listed:?}");
            assert!(page.entries.iter().all(|entry| entry.key == entry.value));
            assert_eq!(page.revision, last);
            if expected.is_empty() {
                continue;
            }
            let (mut feed, _) = source.follow(range.clone(), last).await.unwrap();
            let changes = read_to(&mut feed, last).await;
            let mut followed: Vec<_> = changes.iter().map(|change| &change.key[..]).collect();
            followed.sort_unstable();
            assert!(followed.iter().eq(expected.iter().copied()), "{range:?}: {followed:?}");
        }
    })
    .await;
}

#[tokio::test]
async fn history_that_is_gone_is_told_as_such() {
    of_both(async |address| {
        let mut client = writer(address).await;
        put(&mut client, "r/a", "1").await;
        let old = put(&mut client, "r/a", "2").await;
        put(&mut client, "r/a", "3").await;
        let now = put(&mut client, "r/a", "4").await;
        client.compact(now.0.cast_signed(), None).await.unwrap();
        let (source, range) = (source(address), KeyRange::prefix("r/"));
        let compacted = |error: &SourceError| {
            matches!(error, SourceError::Compacted { asked } if *asked == old)
        };
        let error = source.list(range.clone(), Some(old)).await.unwrap_err();
        assert!(compacted(&error), "{error:?}");
        let error = match source.follow(range.clone(), old).await {
            Ok((mut feed, _)) => soon("the end", feed.next()).await.unwrap_err(),
            Err(error) => error,
        };
        assert!(compacted(&error), "{error:?}");
        let future = source.list(range, Some(Revision(now.0 + 9))).await;
        assert!(lost(future).contains("future revision"));
    })
    .await;
}

#[tokio::test]
async fn a_server_that_comes_back_is_followed_on() {
    let mut etcd = etcd::Cluster::start(1).await;
    let address = etcd.node(0).address();
    let source_of_etcd = source(address);
    let mut client = writer(address).await;
    let range = KeyRange::prefix("r/");
    let seen = put(&mut client, "r/a", "1").await;
    let (mut feed, _) = source_of_etcd.follow(range.clone(), seen).await.unwrap();
    assert_eq!(read_to(&mut feed, seen).await.len(), 1);
    put(&mut client, "r/b", "2").await; // maybe read, maybe not: whoever asks says from where
    etcd.node_mut(0).kill();
    let told = loop {
        match soon("the end", feed.next()).await {
            Ok(_) => {}
            ended => break lost(ended),
        }
    };
    assert!(told.contains(&address.to_string()), "{told}");
    let told = lost(source_of_etcd.list(range.clone(), None).await);
    assert!(told.contains(&address.to_string()) && told.contains("refused"), "{told}");

    etcd.node_mut(0).restart().await;
    let last = put(&mut client, "r/c", "3").await;
    let (mut feed, stands) = source_of_etcd.follow(range.clone(), seen.next()).await.unwrap();
    assert_eq!(stands, last);
    let told = tell(&read_to(&mut feed, last).await);
    assert_eq!(told, [format!("{} r/b 2", seen.0 + 1), format!("{} r/c 3", seen.0 + 2)]);

    let ours = Ours::start().await;
    let source_of_ours = source(ours.address);
    let seen = put(&mut writer(ours.address).await, "r/a", "1").await;
    let (mut feed, _) = source_of_ours.follow(range.clone(), seen.next()).await.unwrap();
    let ours = ours.restart().await;
    lost(soon("the end", feed.next()).await);
    let last = put(&mut writer(ours.address).await, "r/b", "2").await;
    let (mut feed, _) = source_of_ours.follow(range, seen.next()).await.unwrap();
    assert_eq!(tell(&read_to(&mut feed, last).await), [format!("{last} r/b 2")]);
}

#[tokio::test]
async fn a_source_that_lost_its_data_stands_at_a_lower_revision() {
    let mut etcd = etcd::Cluster::start(1).await;
    let address = etcd.node(0).address();
    let mut client = writer(address).await;
    put(&mut client, "r/a", "1").await;
    let seen = put(&mut client, "r/a", "2").await;
    let source = source(address);
    source.list(KeyRange::all(), None).await.unwrap();
    etcd.node_mut(0).kill();
    etcd.node_mut(0).wipe();
    etcd.node_mut(0).restart().await;
    let (_, stands) = source.follow(KeyRange::all(), seen.next()).await.unwrap();
    assert_eq!(stands, Revision::FRESH);
}

#[tokio::test]
async fn a_watch_with_nothing_to_tell_says_that_it_is_there() {
    of_both(async |address| {
        let seen = put(&mut writer(address).await, "s", "1").await;
        let source = source(address).patience(IMPATIENT);
        let (mut feed, _) = source.follow(KeyRange::prefix("r/"), seen.next()).await.unwrap();
        for _ in 0..2 {
            let Changes { changes, revision } = soon("a sign", feed.next()).await.unwrap();
            assert_eq!((changes, revision), (vec![], seen));
        }
    })
    .await;
}

#[tokio::test]
async fn etcds_own_word_on_progress_moves_a_quiet_watch_on() {
    let every = ["--experimental-watch-progress-notify-interval", "100ms"];
    let etcd = etcd::Cluster::start_with(1, &every).await;
    let mut client = writer(etcd.node(0).address()).await;
    let source = source(etcd.node(0).address());
    let (mut feed, stands) = source.follow(KeyRange::prefix("r/"), Revision(1)).await.unwrap();
    assert_eq!(stands, Revision::FRESH);
    let last = put(&mut client, "elsewhere", "1").await;
    assert_eq!(read_to(&mut feed, last).await, []);
}

#[tokio::test]
async fn a_frozen_server_is_given_up_even_by_who_asks_in_small_bites() {
    let mut etcd = etcd::Cluster::start(1).await;
    let address = etcd.node(0).address();
    let seen = put(&mut writer(address).await, "r/a", "1").await;
    let source = source(address).patience(IMPATIENT);
    let range = KeyRange::prefix("r/");
    let (mut patient, _) = source.follow(range.clone(), seen.next()).await.unwrap();
    let (mut hasty, _) = source.follow(range.clone(), seen.next()).await.unwrap();
    etcd.node_mut(0).freeze();
    let told = lost(soon("silence is noticed", patient.next()).await);
    assert!(told.contains("silent") && told.contains(&address.to_string()), "{told}");
    let bites = async {
        loop {
            let bite = tokio::time::timeout(Duration::from_millis(20), hasty.next()).await;
            if let Ok(outcome) = bite {
                return outcome;
            }
        }
    };
    let told = lost(soon("silence is noticed in small bites", bites).await);
    assert!(told.contains("silent"), "{told}");
    let told = lost(soon("a list ends", source.list(range.clone(), None)).await);
    assert!(told.contains("no answer"), "{told}");
    lost(soon("an opening ends", source.follow(range.clone(), seen)).await);
    etcd.node_mut(0).thaw();
    assert_eq!(list(&source, &range).await.revision, seen);
}

#[tokio::test]
async fn a_wait_for_changes_that_is_dropped_loses_none() {
    of_both(async |address| {
        let source = source(address);
        let range = KeyRange::prefix("r/");
        let (mut feed, stands) = source.follow(range, Revision(1)).await.unwrap();
        let writing = tokio::spawn(async move {
            let mut client = writer(address).await;
            for n in 0..200 {
                put(&mut client, "r/n", &n.to_string()).await;
            }
        });
        let mut values = Vec::new();
        let all = async {
            while values.len() < 200 {
                let bite = tokio::time::timeout(Duration::from_micros(300), feed.next()).await;
                if let Ok(read) = bite {
                    values.extend(read.unwrap().changes.into_iter().filter_map(|c| c.value));
                }
            }
        };
        soon("all changes", all).await;
        assert!((0..200).map(|n: u32| n.to_string()).eq(values), "after {stands}");
        writing.await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_dropped_feed_ends_its_watch() {
    let etcd = etcd::Cluster::start(1).await;
    let address = etcd.node(0).address();
    let watches = async |wanted: &str| {
        soon("the number of watches", async {
            loop {
                let metrics = http::get(address, "/metrics").await.unwrap().text();
                let line = metrics.lines().find(|l| l.starts_with("etcd_debugging_mvcc_watcher_t"));
                if line.unwrap().ends_with(wanted) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
    };
    let source = source(address);
    let first = source.follow(KeyRange::all(), Revision(1)).await.unwrap();
    let second = source.follow(KeyRange::all(), Revision(1)).await.unwrap();
    watches(" 2").await;
    drop(first);
    watches(" 1").await;
    drop(second);
    watches(" 0").await;
}

#[tokio::test]
async fn a_user_is_who_it_says_and_stays_so_when_its_token_expires() {
    let etcd = etcd::Cluster::start_with(1, &["--auth-token-ttl", "1"]).await;
    let node = etcd.node(0);
    let address = node.address();
    let seen = put(&mut writer(address).await, "r/a", "1").await;
    let range = KeyRange::prefix("r/");
    let early = source(address).user("root", "hush-hush");
    assert_eq!(list(&early, &range).await.revision, seen, "nobody asks yet");
    for told in [
        &["user", "add", "root:hush-hush"][..],
        &["user", "grant-role", "root", "root"],
        &["auth", "enable"],
    ] {
        node.ctl(told).await.unwrap();
    }
    let told = lost(source(address).list(range.clone(), None).await);
    assert!(told.contains("user name is empty"), "{told}");
    let wrong = source(address).user("root", "not-this");
    let told = lost(wrong.list(range.clone(), None).await);
    assert!(told.contains("authentication failed") && told.contains(&address.to_string()));
    assert!(!format!("{told} {wrong:?}").contains("not-this"), "{told}");
    assert!(!format!("{:?}", source(address).user("root", "hush-hush")).contains("hush"));

    for source in [early, source(address).user("root", "hush-hush")] {
        assert_eq!(list(&source, &range).await.entries.len(), 1);
        // A token lives a second, and trying whether it still does would prolong that.
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(list(&source, &range).await.entries.len(), 1);
        tokio::time::sleep(Duration::from_secs(3)).await;
        let (mut feed, _) = source.follow(range.clone(), seen).await.unwrap();
        assert_eq!(read_to(&mut feed, seen).await.len(), 1);
    }
}

#[tokio::test]
async fn over_tls_both_sides_show_who_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    std::fs::write(file("ca"), authority.pem()).unwrap();
    for name in ["localhost", "client"] {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        std::fs::write(file(name), params.signed_by(&key, &authority).unwrap().pem()).unwrap();
        std::fs::write(file(&format!("{name}-key")), key.serialize_pem()).unwrap();
    }
    let (cert, key) = (file("localhost"), file("localhost-key"));
    let served = TlsFiles { cert, key, client_ca: Some(file("ca")) }.load().unwrap();
    let ours = Ours::start_with(|endpoint| endpoint.tls(served)).await;
    let port = ours.address.port();
    let (cert, key) = (Some(file("client")), Some(file("client-key")));
    let known = ClientTls { ca: file("ca"), cert, key };
    let anonymous = ClientTls { ca: file("ca"), cert: None, key: None };

    for text in [format!("https://localhost:{port}"), format!("etcd://localhost:{port}")] {
        let to = || text.parse::<Cluster>().unwrap();
        let source = to().tls(&known).unwrap();
        let (mut feed, stands) = source.follow(KeyRange::all(), Revision(1)).await.unwrap();
        let put = ours.store.put(vedetta_kv::Put::new("a", "1")).await.unwrap();
        assert!(put.revision > stands);
        assert_eq!(list(&source, &KeyRange::all()).await.entries.len(), 1);
        assert!(!read_to(&mut feed, put.revision).await.is_empty());
        let told = lost(to().tls(&anonymous).unwrap().list(KeyRange::all(), None).await);
        assert!(told.contains(&format!("https://localhost:{port}")), "{told}");
    }
    let told = lost(
        Cluster::new([format!("https://localhost:{port}")])
            .unwrap()
            .list(KeyRange::all(), None)
            .await,
    );
    assert!(told.contains("no certificates are given"), "{told}");
    let other = Cluster::new([format!("https://127.0.0.1:{port}")]).unwrap().tls(&known).unwrap();
    let told = lost(other.list(KeyRange::all(), None).await);
    assert!(told.contains("certificate"), "the certificate is of another name: {told}");
    let half = ClientTls { key: None, ..known };
    assert!(matches!(source(ours.address).tls(&half).unwrap_err(), TlsError::HalfAnIdentity));
}

#[test]
fn a_cluster_is_written_as_a_list_of_endpoints() {
    let nodes = |text: &str| text.parse::<Cluster>().map(|cluster| format!("{cluster:?}"));
    assert!(nodes("etcd://a:1,b").unwrap().contains(r#"["a:1", "b:2379"]"#));
    assert!(nodes("http://a:1,http://b:2").unwrap().contains(r#"["http://a:1", "http://b:2"]"#));
    assert_eq!(nodes("etcd://").unwrap_err(), BadEndpoint::Form(String::new()));
    assert_eq!(nodes("etcd://a,,b").unwrap_err(), BadEndpoint::Form(String::new()));
    assert_eq!(Cluster::new::<&str>([]).unwrap_err(), BadEndpoint::Missing);
}

#[tokio::test]
async fn any_node_of_a_cluster_will_do_but_not_one_without_a_leader() {
    let mut etcd = etcd::Cluster::start(3).await;
    let source = Cluster::new(etcd.endpoints()).unwrap().patience(IMPATIENT);
    let range = KeyRange::prefix("r/");
    let mut client = writer(etcd.node(1).address()).await;
    let mut seen = put(&mut client, "r/n", "0").await;
    let (mut feed, _) = source.follow(range.clone(), seen.next()).await.unwrap();

    // The link to the first node is cut; the second takes over.
    etcd.node(0).proxy().cut();
    let told = lost(soon("a cut link is noticed", feed.next()).await);
    assert!(told.contains(&etcd.node(0).endpoint()), "{told}");
    let (mut feed, _) = soon("the next", source.follow(range.clone(), seen.next())).await.unwrap();
    seen = put(&mut client, "r/n", "1").await;
    assert_eq!(tell(&read_to(&mut feed, seen).await), [format!("{seen} r/n 1")]);

    // The second is killed; the third takes over.
    etcd.node_mut(1).kill();
    let told = lost(soon("a killed node is noticed", feed.next()).await);
    assert!(told.contains(&etcd.node(1).endpoint()), "{told}");
    etcd.leader().await;
    let mut client = writer(etcd.node(2).address()).await;
    seen = put(&mut client, "r/n", "2").await;
    let (mut feed, _) = soon("the next", source.follow(range.clone(), seen)).await.unwrap();
    assert_eq!(tell(&read_to(&mut feed, seen).await), [format!("{seen} r/n 2")]);

    // The third runs, but the first is frozen: it has no leader and says so, though it answers.
    etcd.node_mut(0).freeze();
    let noticed = async {
        loop {
            match feed.next().await {
                Ok(_) => {}
                ended => return lost(ended),
            }
        }
    };
    let told = soon("a node without a leader is noticed", noticed).await;
    assert!(told.contains("no leader"), "{told}");
    assert!(told.contains(&etcd.node(2).endpoint()), "{told}");

    // All are back, and so is the first node's turn.
    etcd.node_mut(0).thaw();
    etcd.node(0).proxy().mend();
    etcd.node_mut(1).restart().await;
    let page = soon("all are well", async {
        loop {
            if let Ok(page) = source.list(range.clone(), None).await {
                return page;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    assert_eq!((page.revision, &page.entries[0].value[..]), (seen, &b"2"[..]));
}

#[tokio::test]
async fn a_node_that_lags_behind_is_not_taken_for_a_source_that_went_back() {
    let mut etcd = etcd::Cluster::start(3).await;
    let leader = etcd.leader().await;
    let (late, mut client) = ((leader + 1) % 3, writer(etcd.node(leader).address()).await);
    let source = source(etcd.node(late).address());
    source.list(KeyRange::all(), None).await.unwrap();
    for round in 0..5 {
        etcd.node_mut(late).freeze();
        for n in 0..200 {
            put(&mut client, "r/n", &format!("{round} {n}")).await;
        }
        let seen = put(&mut client, "r/n", "last").await;
        etcd.node_mut(late).thaw();
        let opened = soon("the late node answers", async {
            loop {
                if let Ok(opened) = source.follow(KeyRange::all(), seen.next()).await {
                    return opened;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        let (mut feed, stands) = opened.await;
        assert!(stands >= seen, "{stands} is before {seen}");
        let next = put(&mut client, "r/n", "next").await;
        assert_eq!(tell(&read_to(&mut feed, next).await), [format!("{next} r/n next")]);
    }
}
