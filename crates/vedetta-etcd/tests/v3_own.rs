//! The v3 API, as a client over the wire sees it. What is expected is what etcd 3.4 answers.

use std::path::Path;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint as Client, Identity};
use tonic::{Code, Status, Streaming};
use vedetta_db::{DataFolder, Db};
use vedetta_etcd::{Endpoint, Limits, TlsError, TlsFiles, serve};
use vedetta_kv::{Options, SCHEMA, Store};

use etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use etcdserverpb::kv_client::KvClient;
use etcdserverpb::lease_client::LeaseClient;
use etcdserverpb::maintenance_client::MaintenanceClient;
use etcdserverpb::request_op::Request as Do;
use etcdserverpb::watch_client::WatchClient;
use etcdserverpb::watch_request::RequestUnion;
use etcdserverpb::*;

#[allow(clippy::all, clippy::pedantic, missing_docs, unreachable_pub, dead_code)]
mod etcdserverpb {
    include!(concat!(env!("OUT_DIR"), "/client/etcdserverpb.rs"));
}

#[allow(clippy::all, clippy::pedantic, missing_docs, unreachable_pub, dead_code)]
mod mvccpb {
    include!(concat!(env!("OUT_DIR"), "/client/mvccpb.rs"));
}

/// Long enough for whatever must happen.
const PATIENCE: Duration = Duration::from_secs(30);

/// A server on a folder of its own.
struct Server {
    url: String,
    store: Store,
    stop: CancellationToken,
    serving: JoinHandle<()>,
    _folder: tempfile::TempDir,
}

impl Server {
    async fn start() -> Self {
        Self::with(|endpoint| endpoint).await
    }

    async fn with(change: impl FnOnce(Endpoint) -> Endpoint) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = open(folder.path()).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let stop = CancellationToken::new();
        let endpoint = change(Endpoint::new(store.clone()));
        let serving = tokio::spawn(serve(listener, endpoint, stop.clone()));
        Self { url, store, stop, serving, _folder: folder }
    }

    async fn channel(&self) -> Channel {
        Client::from_shared(self.url.clone()).unwrap().connect().await.unwrap()
    }

    async fn kv(&self) -> KvClient<Channel> {
        KvClient::new(self.channel().await)
    }

    async fn watch(&self) -> Watching {
        let (requests, mut taken) = mpsc::channel(64);
        let mut client = WatchClient::new(self.channel().await);
        let requests_out = async_stream(move |cx| taken.poll_recv(cx));
        let answers = client.watch(requests_out).await.unwrap().into_inner();
        Watching { requests, answers }
    }

    async fn stop(self) {
        self.stop.cancel();
        tokio::time::timeout(PATIENCE, self.serving).await.expect("it stops").unwrap();
        self.store.close().await;
    }
}

async fn open(folder: &Path) -> Store {
    let folder = DataFolder::open(folder).unwrap();
    let options = vedetta_db::Options::new(folder.database());
    Store::open(Db::open(&options, &[SCHEMA]).unwrap(), Options::default()).await.unwrap()
}

fn async_stream<T>(
    poll: impl FnMut(&mut std::task::Context<'_>) -> std::task::Poll<Option<T>> + Send + 'static,
) -> impl futures_util::Stream<Item = T> + Send + 'static {
    futures_util::stream::poll_fn(poll)
}

struct Watching {
    requests: mpsc::Sender<WatchRequest>,
    answers: Streaming<WatchResponse>,
}

impl Watching {
    async fn create(&mut self, request: WatchCreateRequest) {
        self.ask(RequestUnion::CreateRequest(request)).await;
    }

    async fn ask(&mut self, request: RequestUnion) {
        self.requests.send(WatchRequest { request_union: Some(request) }).await.unwrap();
    }

    async fn next(&mut self) -> WatchResponse {
        let next = tokio::time::timeout(PATIENCE, self.answers.message()).await;
        next.expect("an answer").unwrap().expect("the stream goes on")
    }
}

fn put(key: &str, value: &str) -> PutRequest {
    PutRequest {
        key: key.as_bytes().to_vec(),
        value: value.as_bytes().to_vec(),
        ..Default::default()
    }
}

fn get(key: &str) -> RangeRequest {
    RangeRequest { key: key.as_bytes().to_vec(), ..Default::default() }
}

fn prefix(key: &str, end: &str) -> RangeRequest {
    RangeRequest { range_end: end.as_bytes().to_vec(), ..get(key) }
}

fn follow(key: &str) -> WatchCreateRequest {
    WatchCreateRequest { key: key.as_bytes().to_vec(), ..Default::default() }
}

fn op(request: Do) -> RequestOp {
    RequestOp { request: Some(request) }
}

fn refused<T>(answer: Result<T, Status>) -> (Code, String) {
    let status = answer.err().expect("a refusal");
    (status.code(), status.message().to_owned())
}

/// `+key=value@revision` for a put, `-key@revision` for a delete.
fn told(answer: &WatchResponse) -> Vec<String> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let tell = |event: &mvccpb::Event| {
        let kv = event.kv.as_ref().expect("an event has its key");
        let (key, at) = (text(&kv.key), kv.mod_revision);
        match event.r#type() {
            mvccpb::event::EventType::Put => format!("+{key}={}@{at}", text(&kv.value)),
            mvccpb::event::EventType::Delete => format!("-{key}@{at}"),
        }
    };
    answer.events.iter().map(tell).collect()
}

#[tokio::test]
async fn keys_are_put_read_and_deleted() {
    let server = Server::start().await;
    let mut kv = server.kv().await;
    let done = kv.put(put("a", "1")).await.unwrap().into_inner();
    let header = done.header.unwrap();
    assert_eq!((header.revision, header.raft_term), (2, 2));
    assert!(header.cluster_id != 0 && header.member_id != 0 && done.prev_kv.is_none());
    let again = PutRequest { prev_kv: true, ..put("a", "2") };
    let before = kv.put(again).await.unwrap().into_inner().prev_kv.unwrap();
    assert_eq!((&before.value[..], before.version, before.mod_revision), (&b"1"[..], 1, 2));
    kv.put(put("b", "x")).await.unwrap();
    let all = RangeRequest { limit: 1, ..prefix("a", "\0") };
    let all = kv.range(all).await.unwrap().into_inner();
    assert_eq!((all.count, all.more, all.kvs.len()), (2, true, 1));
    let a = &all.kvs[0];
    assert_eq!((&a.key[..], &a.value[..]), (&b"a"[..], &b"2"[..]));
    assert_eq!((a.create_revision, a.mod_revision, a.version, a.lease), (2, 3, 2, 0));
    let old = kv.range(RangeRequest { revision: 2, ..get("a") }).await.unwrap().into_inner();
    assert_eq!((&old.kvs[0].value[..], old.header.unwrap().revision), (&b"1"[..], 4));
    let gone = DeleteRangeRequest { key: "a".into(), range_end: "c".into(), prev_kv: true };
    let gone = kv.delete_range(gone).await.unwrap().into_inner();
    assert_eq!((gone.deleted, gone.prev_kvs.len(), gone.header.unwrap().revision), (2, 2, 5));
    server.stop().await;
}

#[tokio::test]
async fn a_transaction_is_one_revision_and_answers_each_step() {
    let server = Server::start().await;
    let mut kv = server.kv().await;
    let missing = Compare {
        result: CompareResult::Equal.into(),
        target: CompareTarget::Create.into(),
        key: "a".into(),
        target_union: Some(TargetUnion::CreateRevision(0)),
        range_end: Vec::new(),
    };
    let txn = TxnRequest {
        compare: vec![missing],
        success: vec![op(Do::RequestPut(put("a", "1"))), op(Do::RequestPut(put("b", "2")))],
        failure: vec![op(Do::RequestRange(get("a")))],
    };
    let first = kv.txn(txn.clone()).await.unwrap().into_inner();
    assert!(first.succeeded);
    assert_eq!((first.header.unwrap().revision, first.responses.len()), (2, 2));
    let second = kv.txn(txn).await.unwrap().into_inner();
    assert!(!second.succeeded);
    let Some(response_op::Response::ResponseRange(range)) = &second.responses[0].response else {
        panic!("a range was asked for: {second:?}");
    };
    let header = range.header.unwrap();
    assert_eq!((header.revision, header.cluster_id, range.count), (2, 0, 1));
    server.stop().await;
}

#[tokio::test]
async fn refusals_have_the_codes_and_words_of_etcd() {
    use Code::{FailedPrecondition, InvalidArgument, NotFound, OutOfRange, ResourceExhausted};
    let server = Server::start().await;
    let mut kv = server.kv().await;
    let mut lease = LeaseClient::new(server.channel().await);
    let key = || PutRequest { key: "k".into(), ..Default::default() };
    let txn = |steps: Vec<Do>| TxnRequest {
        success: steps.into_iter().map(op).collect(),
        ..Default::default()
    };
    let twice = || vec![Do::RequestPut(put("a", "1")), Do::RequestPut(put("a", "2"))];
    let many = (0..129).map(|n| Do::RequestPut(put(&format!("{n}"), ""))).collect();
    let large = |bytes| PutRequest { value: vec![0; bytes], ..key() };
    let grant = |ttl, id| LeaseGrantRequest { ttl, id };
    lease.lease_grant(grant(60, 7)).await.unwrap();
    kv.put(key()).await.unwrap();
    kv.put(key()).await.unwrap();
    kv.compact(CompactionRequest { revision: 3, physical: true }).await.unwrap();
    for (answer, code, words) in [
        (refused(kv.put(put("", "")).await), InvalidArgument, "key is not provided"),
        (refused(kv.range(get("")).await), InvalidArgument, "key is not provided"),
        (
            refused(kv.put(PutRequest { ignore_value: true, ..put("k", "v") }).await),
            InvalidArgument,
            "value is provided",
        ),
        (
            refused(kv.put(PutRequest { ignore_lease: true, lease: 7, ..key() }).await),
            InvalidArgument,
            "lease is provided",
        ),
        (
            refused(kv.put(PutRequest { ignore_value: true, ..put("none", "") }).await),
            InvalidArgument,
            "key not found",
        ),
        (
            refused(kv.put(PutRequest { lease: 8, ..key() }).await),
            NotFound,
            "requested lease not found",
        ),
        (refused(kv.put(large(3 << 19)).await), InvalidArgument, "request is too large"),
        (
            refused(kv.txn(txn(twice())).await),
            InvalidArgument,
            "duplicate key given in txn request",
        ),
        (refused(kv.txn(txn(many)).await), InvalidArgument, "too many operations in txn request"),
        (
            refused(kv.range(RangeRequest { revision: 2, ..get("k") }).await),
            OutOfRange,
            "mvcc: required revision has been compacted",
        ),
        (
            refused(kv.range(RangeRequest { revision: 9, ..get("k") }).await),
            OutOfRange,
            "mvcc: required revision is a future revision",
        ),
        (
            refused(kv.compact(CompactionRequest { revision: 3, physical: false }).await),
            OutOfRange,
            "mvcc: required revision has been compacted",
        ),
        (
            refused(lease.lease_grant(grant(60, 7)).await),
            FailedPrecondition,
            "lease already exists",
        ),
        (
            refused(lease.lease_grant(grant(9_000_000_001, 0)).await),
            OutOfRange,
            "too large lease TTL",
        ),
        (
            refused(lease.lease_revoke(LeaseRevokeRequest { id: 8 }).await),
            NotFound,
            "requested lease not found",
        ),
    ] {
        assert_eq!(answer, (code, format!("etcdserver: {words}")));
    }
    let (code, words) = refused(kv.put(large(3 << 20)).await);
    assert_eq!(code, ResourceExhausted, "{words}");
    assert!(words.starts_with("grpc: received message larger than max ("), "{words}");
    server.stop().await;
}

#[tokio::test]
async fn calls_that_are_not_served_say_so() {
    let server = Server::start().await;
    for path in ["/etcdserverpb.Cluster/MemberAdd", "/v3lockpb.Lock/Lock", "/nonsense"] {
        let mut client = tonic::client::Grpc::new(server.channel().await);
        client.ready().await.unwrap();
        let codec = tonic_prost::ProstCodec::<MemberListRequest, MemberListResponse>::default();
        let request = tonic::Request::new(MemberListRequest::default());
        let answer = client.unary(request, path.parse().unwrap(), codec).await;
        let (code, words) = refused(answer);
        assert_eq!(code, Code::Unimplemented, "{path}");
        assert!(words.contains("does not serve"), "{path}: {words}");
    }
    server.stop().await;
}

#[tokio::test]
async fn watches_on_one_stream_tell_their_own_events() {
    let server = Server::start().await;
    let (mut kv, mut watching) = (server.kv().await, server.watch().await);
    watching.create(WatchCreateRequest { prev_kv: true, ..follow("a") }).await;
    let created = watching.next().await;
    assert!(created.created && !created.canceled && created.events.is_empty());
    assert_eq!((created.watch_id, created.header.unwrap().revision), (0, 1));
    watching.create(WatchCreateRequest { watch_id: 7, range_end: "c".into(), ..follow("b") }).await;
    assert_eq!(watching.next().await.watch_id, 7);
    let no_puts = vec![watch_create_request::FilterType::Noput.into()];
    watching.create(WatchCreateRequest { filters: no_puts, ..follow("a") }).await;
    assert_eq!(watching.next().await.watch_id, 1);
    kv.put(put("a", "1")).await.unwrap();
    let first = watching.next().await;
    assert_eq!((first.watch_id, told(&first)), (0, vec!["+a=1@2".to_owned()]));
    assert!(first.events[0].prev_kv.is_none());
    kv.put(put("b", "x")).await.unwrap();
    let second = watching.next().await;
    assert_eq!((second.watch_id, told(&second)), (7, vec!["+b=x@3".to_owned()]));
    kv.delete_range(DeleteRangeRequest { key: "a".into(), ..Default::default() }).await.unwrap();
    let mut both = [watching.next().await, watching.next().await];
    both.sort_by_key(|answer| answer.watch_id);
    for (answer, id) in both.iter().zip([0, 1]) {
        assert_eq!((answer.watch_id, told(answer)), (id, vec!["-a@4".to_owned()]));
        assert_eq!(answer.header.unwrap().revision, 4);
    }
    let kv_of = |answer: &WatchResponse| answer.events[0].kv.clone().unwrap();
    assert_eq!((kv_of(&both[0]).create_revision, kv_of(&both[0]).version), (0, 0));
    let before = both[0].events[0].prev_kv.as_ref().expect("asked for");
    assert_eq!((&before.value[..], before.version), (&b"1"[..], 1));
    assert!(both[1].events[0].prev_kv.is_none(), "not asked for");
    server.stop().await;
}

#[tokio::test]
async fn a_watch_starts_in_the_past_or_in_the_future() {
    let server = Server::start().await;
    let (mut kv, mut watching) = (server.kv().await, server.watch().await);
    for n in 2..=4 {
        kv.put(put("a", &n.to_string())).await.unwrap();
    }
    watching.create(WatchCreateRequest { start_revision: 3, ..follow("a") }).await;
    assert!(watching.next().await.created);
    assert_eq!(told(&watching.next().await), ["+a=3@3", "+a=4@4"]);
    watching.ask(RequestUnion::CancelRequest(WatchCancelRequest { watch_id: 0 })).await;
    let cancelled = watching.next().await;
    assert!(cancelled.canceled && !cancelled.created);
    watching.create(WatchCreateRequest { start_revision: 6, ..follow("a") }).await;
    assert_eq!(watching.next().await.watch_id, 1);
    for n in 5..=6 {
        kv.put(put("a", &n.to_string())).await.unwrap();
    }
    assert_eq!(told(&watching.next().await), ["+a=6@6"]);
    server.stop().await;
}

#[tokio::test]
async fn a_watch_from_compacted_history_is_cancelled_with_the_oldest_revision() {
    let server = Server::start().await;
    let (mut kv, mut watching) = (server.kv().await, server.watch().await);
    for _ in 2..=5 {
        kv.put(put("a", "")).await.unwrap();
    }
    kv.compact(CompactionRequest { revision: 4, physical: true }).await.unwrap();
    watching.create(WatchCreateRequest { start_revision: 2, ..follow("a") }).await;
    assert!(watching.next().await.created);
    let end = watching.next().await;
    assert_eq!((end.canceled, end.compact_revision, end.watch_id), (true, 4, 0));
    assert_eq!(server.store.status().watchers, 0);
    server.stop().await;
}

#[tokio::test]
async fn a_watch_that_cannot_be_made_is_answered_as_cancelled() {
    let server = Server::start().await;
    let mut watching = server.watch().await;
    watching.create(WatchCreateRequest { watch_id: 3, ..follow("a") }).await;
    assert_eq!(watching.next().await.watch_id, 3);
    let empty = WatchCreateRequest { range_end: "a".into(), ..follow("b") };
    for (request, why) in [
        (
            WatchCreateRequest { watch_id: 3, ..follow("b") },
            "mvcc: duplicate watch ID provided on the WatchStream",
        ),
        (empty, "mvcc: watcher range is empty"),
    ] {
        watching.create(request).await;
        let answer = watching.next().await;
        assert!(answer.created && answer.canceled);
        assert_eq!((answer.watch_id, &answer.cancel_reason[..]), (-1, why));
    }
    server.stop().await;
}

#[tokio::test]
async fn progress_is_told_on_request() {
    let server = Server::start().await;
    let (mut kv, mut watching) = (server.kv().await, server.watch().await);
    watching.create(follow("a")).await;
    watching.next().await;
    for _ in 2..=9 {
        kv.put(put("other", "")).await.unwrap();
    }
    watching.ask(RequestUnion::ProgressRequest(WatchProgressRequest {})).await;
    let progress = watching.next().await;
    assert_eq!((progress.watch_id, progress.events.len()), (-1, 0));
    assert_eq!(progress.header.unwrap().revision, 9);
    server.stop().await;
}

#[tokio::test]
async fn every_request_for_progress_is_answered_by_those_who_are_behind_too() {
    let server = Server::start().await;
    let (mut kv, mut watching) = (server.kv().await, server.watch().await);
    for n in 0..20 {
        // More than is kept in memory: what is watched from the beginning is read from the file.
        kv.put(put(&format!("k{n}"), &"v".repeat(1 << 20))).await.unwrap();
    }
    let all = WatchCreateRequest { range_end: "l".into(), start_revision: 2, ..follow("k") };
    watching.create(all).await;
    for _ in 0..3 {
        watching.ask(RequestUnion::ProgressRequest(WatchProgressRequest {})).await;
    }
    let (mut events, mut progress) = (0, 0);
    while events < 20 || progress < 3 {
        let answer = watching.next().await;
        events += answer.events.len();
        if answer.watch_id == -1 {
            progress += 1;
            assert_eq!((events, answer.header.unwrap().revision), (20, 21), "all was told before");
        }
    }
    server.stop().await;
}

#[tokio::test]
async fn a_transaction_stays_together_unless_fragments_are_taken() {
    let server = Server::start().await;
    let mut kv = server.kv().await;
    // Each of the two is over half of what a fragment holds, with the values before them.
    for value in ["a", "b"] {
        let value = value.repeat(700 << 10);
        let steps = [put("k1", &value), put("k2", &value)].map(|put| op(Do::RequestPut(put)));
        kv.txn(TxnRequest { success: steps.into(), ..Default::default() }).await.unwrap();
    }
    let whole = WatchCreateRequest {
        range_end: "l".into(),
        start_revision: 3,
        prev_kv: true,
        ..follow("k")
    };
    let mut watching = server.watch().await;
    watching.answers = {
        let (requests, mut taken) = mpsc::channel(4);
        watching.requests = requests;
        let client = WatchClient::new(server.channel().await);
        let mut client = client.max_decoding_message_size(64 << 20);
        client.watch(async_stream(move |cx| taken.poll_recv(cx))).await.unwrap().into_inner()
    };
    watching.create(whole.clone()).await;
    watching.next().await;
    let all = watching.next().await;
    assert_eq!((all.events.len(), all.fragment), (2, false));
    watching.create(WatchCreateRequest { fragment: true, ..whole }).await;
    watching.next().await;
    let (first, second) = (watching.next().await, watching.next().await);
    assert_eq!((first.events.len(), first.fragment), (1, true));
    assert_eq!((second.events.len(), second.fragment), (1, false));
    assert_eq!([first.events, second.events].concat(), all.events);
    server.stop().await;
}

#[tokio::test]
async fn a_client_that_goes_away_leaves_no_watcher() {
    let server = Server::start().await;
    let mut watching = server.watch().await;
    for n in 0..50 {
        watching.create(follow(&n.to_string())).await;
        watching.next().await;
    }
    assert_eq!(server.store.status().watchers, 50);
    watching.ask(RequestUnion::CancelRequest(WatchCancelRequest { watch_id: 9 })).await;
    assert!(watching.next().await.canceled);
    until(|| server.store.status().watchers == 49).await;
    drop(watching);
    until(|| server.store.status().watchers == 0).await;
    server.stop().await;
}

async fn until(done: impl Fn() -> bool) {
    let wait = async {
        while !done() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("it happens");
}

#[tokio::test]
async fn many_watches_of_many_streams_get_all_events_in_order() {
    let server = Server::start().await;
    let mut kv = server.kv().await;
    let mut streams = Vec::new();
    for _ in 0..8 {
        let mut watching = server.watch().await;
        for _ in 0..25 {
            watching.create(WatchCreateRequest { range_end: "l".into(), ..follow("k") }).await;
            watching.next().await;
        }
        streams.push(watching);
    }
    let readers: Vec<_> = streams
        .into_iter()
        .map(|mut watching| {
            tokio::spawn(async move {
                let mut told_each = vec![Vec::new(); 25];
                while told_each.iter().any(|told| told.len() < 100) {
                    let answer = watching.next().await;
                    let id = usize::try_from(answer.watch_id).unwrap();
                    told_each[id].extend(told(&answer));
                }
                told_each
            })
        })
        .collect();
    for n in 0..100 {
        kv.put(put(&format!("k{n}"), "v")).await.unwrap();
    }
    let want: Vec<_> = (0..100).map(|n| format!("+k{n}=v@{}", n + 2)).collect();
    for reader in readers {
        for told in reader.await.unwrap() {
            assert_eq!(told, want);
        }
    }
    server.stop().await;
}

#[tokio::test]
async fn leases_are_granted_kept_and_revoked() {
    let server = Server::start().await;
    let (mut kv, mut lease) = (server.kv().await, LeaseClient::new(server.channel().await));
    let grant = LeaseGrantRequest { ttl: 600, id: 0 };
    let granted = lease.lease_grant(grant).await.unwrap().into_inner();
    assert_eq!(granted.ttl, 600);
    let id = granted.id;
    assert_ne!(id, 0);
    kv.put(PutRequest { lease: id, ..put("a", "1") }).await.unwrap();
    assert_eq!(kv.range(get("a")).await.unwrap().into_inner().kvs[0].lease, id);
    let ask = |id| LeaseTimeToLiveRequest { id, keys: true };
    let live = lease.lease_time_to_live(ask(id)).await.unwrap().into_inner();
    assert_eq!((live.granted_ttl, live.keys), (600, vec![b"a".to_vec()]));
    assert!((590..=600).contains(&live.ttl), "{}", live.ttl);
    let none = lease.lease_time_to_live(ask(4)).await.unwrap().into_inner();
    assert_eq!((none.id, none.ttl, none.granted_ttl), (4, -1, 0));
    let ids = [id, 4].map(|id| LeaseKeepAliveRequest { id });
    let kept = lease.lease_keep_alive(futures_util::stream::iter(ids)).await;
    let mut kept = kept.unwrap().into_inner();
    assert_eq!(kept.message().await.unwrap().unwrap().ttl, 600);
    assert_eq!(kept.message().await.unwrap().unwrap().ttl, 0);
    assert!(kept.message().await.unwrap().is_none(), "nothing more was asked");
    let all = lease.lease_leases(LeaseLeasesRequest {}).await.unwrap().into_inner();
    assert_eq!(all.leases, [LeaseStatus { id }]);
    let gone = lease.lease_revoke(LeaseRevokeRequest { id }).await.unwrap().into_inner();
    assert_eq!(gone.header.unwrap().revision, 3);
    assert_eq!(kv.range(get("a")).await.unwrap().into_inner().count, 0);
    server.stop().await;
}

#[tokio::test]
async fn large_values_of_many_revisions_come_in_answers_that_clients_take() {
    let server = Server::start().await;
    let mut kv = server.kv().await;
    for n in 0..10 {
        kv.put(put(&format!("k{n}"), &"v".repeat(900 << 10))).await.unwrap();
    }
    // A client with the usual limit of 4 MiB.
    let mut watching = server.watch().await;
    let all = WatchCreateRequest { range_end: "l".into(), start_revision: 2, ..follow("k") };
    watching.create(all).await;
    watching.next().await;
    let mut seen = Vec::new();
    while seen.len() < 10 {
        let answer = watching.next().await;
        assert!(!answer.fragment);
        let revisions = answer.events.iter().map(|event| event.kv.as_ref().unwrap().mod_revision);
        seen.extend(revisions);
        assert!(answer.header.unwrap().revision >= *seen.last().unwrap());
    }
    assert_eq!(seen, (2..12).collect::<Vec<_>>());
    server.stop().await;
}

#[tokio::test]
async fn a_watch_of_a_key_that_cannot_be_is_refused_with_the_reason() {
    let server = Server::start().await;
    let mut watching = server.watch().await;
    watching.create(follow(&"k".repeat(100 << 10))).await;
    let refused = watching.next().await;
    assert!(refused.created && refused.canceled, "{refused:?}");
    assert!(refused.cancel_reason.contains("longer than any"), "{refused:?}");
    assert_eq!(server.store.status().watchers, 0);
    server.stop().await;
}

#[tokio::test]
async fn a_store_starts_from_a_snapshot() {
    use sha2::Digest as _;
    let server = Server::start().await;
    server.kv().await.put(put("a", "1")).await.unwrap();
    let mut maintenance = MaintenanceClient::new(server.channel().await);
    let mut pieces = maintenance.snapshot(SnapshotRequest {}).await.unwrap().into_inner();
    let (mut file, mut remaining) = (Vec::new(), u64::MAX);
    while let Some(piece) = pieces.message().await.unwrap() {
        assert!(piece.remaining_bytes <= remaining);
        remaining = piece.remaining_bytes;
        file.extend(piece.blob);
    }
    let (database, hash) = file.split_at(file.len() - 32);
    assert_eq!((remaining, database.len() % 512), (0, 0), "etcdctl checks that");
    assert_eq!(hash, &sha2::Sha256::digest(database)[..]);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("vedetta.db"), &file).unwrap();
    let copy = open(folder.path()).await;
    assert_eq!(copy.status().existing, 1);
    copy.close().await;
    server.stop().await;
}

#[tokio::test]
async fn a_snapshot_that_nobody_reads_is_the_only_one() {
    let server = Server::start().await;
    let mut kv = server.kv().await;
    for n in 0..4 {
        // More than is on its way without being read.
        kv.put(put(&format!("k{n}"), &"v".repeat(1 << 20))).await.unwrap();
    }
    let mut maintenance = MaintenanceClient::new(server.channel().await);
    let unread = maintenance.snapshot(SnapshotRequest {}).await.unwrap().into_inner();
    let mut other = MaintenanceClient::new(server.channel().await);
    let mut second = tokio::spawn(async move { other.snapshot(SnapshotRequest {}).await });
    let early = tokio::time::timeout(Duration::from_millis(300), &mut second).await;
    assert!(early.is_err(), "there were two");
    drop(unread);
    let second = tokio::time::timeout(Duration::from_secs(60), second).await;
    let mut pieces = second.expect("the first is gone").unwrap().unwrap().into_inner();
    while pieces.message().await.unwrap().is_some() {}
    server.stop().await;
}

#[tokio::test]
async fn stopping_ends_watches_and_keep_alives() {
    let server = Server::start().await;
    let mut watching = server.watch().await;
    watching.create(follow("a")).await;
    watching.next().await;
    let mut lease = LeaseClient::new(server.channel().await);
    let kept = lease.lease_keep_alive(futures_util::stream::pending()).await;
    let mut kept = kept.unwrap().into_inner();
    server.stop().await;
    assert_eq!(watching.answers.message().await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(kept.message().await.unwrap_err().code(), Code::Unavailable);
}

/// An authority, what it signed, and their files.
struct Signed {
    folder: tempfile::TempDir,
    authority: String,
    client: (String, String),
}

impl Signed {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let sign = |name: &str| {
            let key = KeyPair::generate().unwrap();
            let params = CertificateParams::new([name.to_owned()]).unwrap();
            (params.signed_by(&key, &authority).unwrap().pem(), key.serialize_pem())
        };
        let folder = tempfile::tempdir().unwrap();
        let (cert, key) = sign("localhost");
        for (name, text) in [("cert", &cert), ("key", &key), ("ca", &authority.pem())] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        Self { folder, authority: authority.pem(), client: sign("client") }
    }

    fn files(&self, client_ca: bool) -> TlsFiles {
        let file = |name| self.folder.path().join(name);
        TlsFiles { cert: file("cert"), key: file("key"), client_ca: client_ca.then(|| file("ca")) }
    }

    async fn put(&self, server: &Server, identity: bool) -> Result<(), String> {
        let authority = Certificate::from_pem(&self.authority);
        let mut tls = ClientTlsConfig::new().ca_certificate(authority).domain_name("localhost");
        if identity {
            tls = tls.identity(Identity::from_pem(&self.client.0, &self.client.1));
        }
        let url = server.url.replace("http:", "https:");
        let client = Client::from_shared(url).unwrap().tls_config(tls).unwrap();
        let channel = client.connect().await.map_err(|error| error.to_string())?;
        let done = KvClient::new(channel).put(put("a", "1")).await;
        done.map(|_| ()).map_err(|status| status.to_string())
    }
}

#[tokio::test]
async fn tls_serves_and_asks_for_a_certificate_when_told_to() {
    let signed = Signed::new();
    let open = Server::with(|endpoint| endpoint.tls(signed.files(false).load().unwrap())).await;
    signed.put(&open, false).await.unwrap();
    assert!(
        KvClient::connect(open.url.clone()).await.is_err() || {
            open.kv().await.put(put("a", "1")).await.is_err()
        }
    );
    open.stop().await;
    let closed = Server::with(|endpoint| endpoint.tls(signed.files(true).load().unwrap())).await;
    signed.put(&closed, true).await.unwrap();
    signed.put(&closed, false).await.unwrap_err();
    assert_eq!(closed.store.status().revision.0, 2, "only one got in");
    closed.stop().await;
}

#[test]
fn files_that_are_no_use_for_tls_are_named() {
    let (signed, other) = (Signed::new(), Signed::new());
    let load = |files: TlsFiles| files.load().err().unwrap();
    let good = || signed.files(true);
    let missing = signed.folder.path().join("missing");
    let error = load(TlsFiles { cert: missing.clone(), ..good() });
    assert!(matches!(&error, TlsError::Unreadable { path, .. } if *path == missing), "{error:?}");
    let error = load(TlsFiles { cert: good().key, ..good() });
    assert!(matches!(error, TlsError::NoCertificate(_)), "{error:?}");
    let error = load(TlsFiles { key: good().cert, ..good() });
    assert!(matches!(error, TlsError::Unreadable { .. }), "{error:?}");
    let error = load(TlsFiles { key: other.files(false).key, ..good() });
    assert!(matches!(error, TlsError::Unusable { .. }), "{error:?}");
}

/// A connection on which the version was asked for.
async fn asking(server: &Server) -> TcpStream {
    let address = server.url.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).await.unwrap();
    let get = format!("GET /version HTTP/1.1\r\nhost: {address}\r\n\r\n");
    stream.write_all(get.as_bytes()).await.unwrap();
    stream
}

/// The first byte of an answer.
async fn first_byte(stream: &mut TcpStream, within: Duration) -> Option<u8> {
    tokio::time::timeout(within, stream.read_u8()).await.ok().map(|read| read.expect("it stays"))
}

#[tokio::test]
async fn a_connection_too_many_waits_for_its_place() {
    // Longer than an answer takes: the others show that.
    let a_while = Duration::from_millis(500);
    for (connections, waits) in [(1, true), (2, false)] {
        let limits = Limits { connections, ..Limits::default() };
        let server = Server::with(|endpoint| endpoint.limits(limits)).await;
        let mut first = asking(&server).await;
        assert_eq!(first_byte(&mut first, PATIENCE).await, Some(b'H'));
        let mut second = asking(&server).await;
        if waits {
            assert_eq!(first_byte(&mut second, a_while).await, None, "it has to wait");
            drop(first);
        }
        assert_eq!(first_byte(&mut second, PATIENCE).await, Some(b'H'));
        server.stop().await;
    }
}

#[tokio::test]
async fn one_that_says_nothing_is_let_go() {
    let short = Duration::from_millis(50);
    let limits = Limits { handshake: short, head: short, ..Limits::default() };
    let server = Server::with(|endpoint| endpoint.limits(limits)).await;
    for begin in ["", "PRI * HT", "GET / HT"] {
        let address = server.url.strip_prefix("http://").unwrap();
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(begin.as_bytes()).await.unwrap();
        let mut rest = Vec::new();
        let end = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut rest)).await;
        assert!(end.is_ok(), "{begin:?} is let go");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_call_that_is_never_sent_whole_is_ended() {
    let limits = Limits { upload: Duration::from_millis(50), ..Limits::default() };
    let server = Server::with(|endpoint| endpoint.limits(limits)).await;
    let address = server.url.strip_prefix("http://").unwrap();
    let (client, connection) =
        h2::client::handshake(TcpStream::connect(address).await.unwrap()).await.unwrap();
    let connection = tokio::spawn(connection);
    let request = axum::http::Request::post(format!("{}/etcdserverpb.KV/Put", server.url))
        .header("content-type", "application/grpc")
        .body(())
        .unwrap();
    let (answer, mut body) = client.ready().await.unwrap().send_request(request, false).unwrap();
    body.send_data("\0\0\0\u{1}\0 half".into(), false).unwrap();
    let answer = tokio::time::timeout(PATIENCE, answer).await.expect("it is ended").unwrap();
    assert_ne!(answer.headers().get("grpc-status").unwrap(), "0");
    assert_eq!(server.store.status().existing, 0);
    drop((answer, body));
    server.stop().await;
    connection.abort();
}

/// Sends a request over HTTP/1.1 and hands out what comes back.
async fn post(server: &Server, path: &str, headers: &str, body: &str) -> BufReader<TcpStream> {
    let address = server.url.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!("POST {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n{headers}");
    let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
    stream.write_all(request.as_bytes()).await.unwrap();
    BufReader::new(stream)
}

/// The status and the body of an answer.
async fn answer(server: &Server, path: &str, headers: &str, body: &str) -> (u16, String) {
    let mut all = String::new();
    let mut stream = post(server, path, headers, body).await;
    let read = tokio::time::timeout(PATIENCE, stream.read_to_string(&mut all)).await;
    read.expect("it ends").unwrap();
    let (head, body) = all.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// The header without what differs from server to server.
fn without_ids(json: &str) -> String {
    let mut json: serde_json::Value = serde_json::from_str(json).unwrap();
    if let Some(header) = json.get_mut("header").and_then(serde_json::Value::as_object_mut) {
        header.remove("cluster_id").unwrap();
        header.remove("member_id").unwrap();
    }
    json.to_string()
}

#[tokio::test]
async fn the_gateway_answers_in_json_as_etcd_does() {
    let server = Server::start().await;
    let refusal = |text: &str, code: u32| {
        serde_json::json!({"error": text, "message": text, "code": code}).to_string()
    };
    let header =
        |revision: &str| format!(r#""header":{{"raft_term":"2","revision":"{revision}"}}"#);
    for (path, body, status, want) in [
        (
            "/v3/kv/put",
            r#"{"key":"Zm9v","value":"YmFy","unknown":1}"#,
            200,
            format!("{{{}}}", header("2")),
        ),
        (
            "/v3beta/kv/range",
            r#"{"key":"Zm9v","sortTarget":"MOD","sort_order":"DESCEND","limit":"9"}"#,
            200,
            format!(
                r#"{{"count":"1",{},"kvs":[{{"create_revision":"2","key":"Zm9v","mod_revision":"2","value":"YmFy","version":"1"}}]}}"#,
                header("2")
            ),
        ),
        (
            "/v3/kv/txn",
            r#"{"success":[{"request_delete_range":{"key":"Zm9v"}}]}"#,
            200,
            format!(
                r#"{{{},"responses":[{{"response_delete_range":{{"deleted":"1","header":{{"revision":"3"}}}}}}],"succeeded":true}}"#,
                header("3")
            ),
        ),
        ("/v3/kv/range", "", 400, refusal("etcdserver: key is not provided", 3)),
        ("/v3/kv/range", "{", 400, refusal("unexpected EOF", 3)),
        (
            "/v3/kv/range",
            r#"{"key":"Zm9v","revision":99}"#,
            400,
            refusal("etcdserver: mvcc: required revision is a future revision", 11),
        ),
        (
            "/v3/kv/lease/revoke",
            r#"{"ID":"5"}"#,
            404,
            refusal("etcdserver: requested lease not found", 5),
        ),
        (
            "/v3/auth/authenticate",
            "{}",
            412,
            refusal("etcdserver: authentication is not enabled", 9),
        ),
    ] {
        let (got_status, got) = answer(&server, path, "", body).await;
        let want: serde_json::Value = serde_json::from_str(&want).unwrap();
        assert_eq!((got_status, without_ids(&got)), (status, want.to_string()), "{path} {body}");
    }
    assert_eq!(answer(&server, "/v3/kv/nothing", "", "{}").await, (404, "Not Found\n".into()));
    let evil = "origin: http://evil.example\r\n";
    assert_eq!(answer(&server, "/v3/kv/put", evil, r#"{"key":"Zm9v"}"#).await.0, 403);
    assert_eq!(server.store.status().revision.0, 3, "the page got nothing done");
    server.stop().await;
}

#[tokio::test]
async fn a_watch_over_the_gateway_goes_on_line_by_line() {
    let server = Server::start().await;
    let body = r#"{"create_request":{"key":"Zm9v"}}"#;
    let stream = post(&server, "/v3/watch", "", body).await;
    let mut lines = stream.lines();
    let mut next = async || loop {
        let line = tokio::time::timeout(PATIENCE, lines.next_line()).await.expect("a line");
        let line = line.unwrap().expect("it goes on");
        if line.starts_with("{\"result\":") {
            let json: serde_json::Value = serde_json::from_str(&line).unwrap();
            break json["result"].clone();
        }
    };
    assert_eq!(next().await["created"], true);
    let mut kv = server.kv().await;
    kv.put(put("foo", "bar")).await.unwrap();
    assert_eq!(next().await["events"][0]["kv"]["value"], "YmFy");
    kv.delete_range(DeleteRangeRequest { key: "foo".into(), ..Default::default() }).await.unwrap();
    let gone = next().await;
    assert_eq!(gone["events"][0]["type"], "DELETE");
    assert_eq!(gone["events"][0]["kv"], serde_json::json!({"key": "Zm9v", "mod_revision": "3"}));
    drop(lines);
    until(|| server.store.status().watchers == 0).await;
    server.stop().await;
}
