//! What hostile and broken clients do: the server never panics, keeps nothing of theirs, and the others go
//! on meanwhile.

mod support;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use axum::http::Request;
use fastrand::Rng;
use futures_util::stream::{self, StreamExt as _};
use prost_reflect::{DynamicMessage, Value};
use support::grpc::{self, Client};
use support::http::{Connection, request};
use support::http2::{frame, grpc_call, hpack, preface};
use support::{Ours, PATIENCE, memory, soon};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::{Mutex, MutexGuard};
use tokio::task::JoinHandle;
use vedetta_etcd::Limits;

/// How long an attacker waits for an answer; whether one comes is not the question.
const GLANCE: Duration = Duration::from_millis(20);
/// Mutated requests of each protocol.
const MUTATIONS: u64 = 10_000;
/// They come in so many rounds.
const ROUNDS: u64 = 4;
/// Bytes by which the process may have grown since the first round: less than a few KiB for each request
/// since, and more than allocators and the history of the bystander's key make of it.
const GROWS: u64 = 32 << 20;

static PANICKED: AtomicBool = AtomicBool::new(false);
/// Sockets, panics and memory are the process's: one test at a time.
static ALONE: Mutex<()> = Mutex::const_new(());

/// A server that loses patience soon, with somebody who uses it properly all the while.
struct Siege {
    ours: Ours,
    ended: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    bystander: JoinHandle<()>,
    /// Sockets of the process before any attack.
    sockets: usize,
    /// Watchers of the bystander.
    watchers: usize,
    alone: MutexGuard<'static, ()>,
}

impl Siege {
    async fn begin() -> Self {
        let alone = ALONE.lock().await;
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICKED.store(true, Ordering::Relaxed);
            before(panic);
        }));
        let short = Duration::from_secs(1);
        let limits = Limits {
            handshake: short,
            head: short,
            upload: short,
            silence: short,
            stall: short,
            connections: 500,
            ..Limits::default()
        };
        let ours = Ours::start_with(|endpoint| endpoint.limits(limits)).await;
        let (ended, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let work = bystander(ours.address, Arc::clone(&ended), Arc::clone(&rounds));
        let bystander = tokio::spawn(work);
        // It has all its connections and watches before anything is counted.
        soon("the bystander begins", async {
            while rounds.load(Ordering::Relaxed) < 3 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        let (sockets, watchers) = (sockets(), ours.store.status().watchers);
        Self { ours, ended, rounds, bystander, sockets, watchers, alone }
    }

    /// The bystander goes on. Answers the memory that the process has then, in bytes.
    async fn calm(&self) -> u64 {
        let rounds = self.rounds.load(Ordering::Relaxed);
        soon("the bystander goes on", async {
            while self.rounds.load(Ordering::Relaxed) < rounds + 10 {
                assert!(!self.bystander.is_finished(), "the bystander was disturbed");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        memory()
    }

    /// All that the attackers had is given back, nothing panicked, and the bystander never noticed.
    async fn end(self) {
        self.calm().await;
        let left = || {
            let status = self.ours.store.status();
            let watchers = status.watchers.abs_diff(self.watchers);
            (watchers, status.leases, sockets().saturating_sub(self.sockets))
        };
        let given_back = async {
            while left() != (0, 0, 0) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let given_back = tokio::time::timeout(PATIENCE / 2, given_back).await;
        assert!(given_back.is_ok(), "watchers, leases and sockets are left: {:?}", left());
        self.ended.store(true, Ordering::Relaxed);
        soon("the bystander ends", self.bystander).await.expect("the bystander saw what it should");
        assert!(!PANICKED.load(Ordering::Relaxed), "something panicked");
        drop(self.alone);
    }
}

/// Sockets that this process has, both ends of each connection.
fn sockets() -> usize {
    let open = std::fs::read_dir("/proc/self/fd").expect("a process has descriptors");
    let of = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    of.filter(|name| name.to_string_lossy().starts_with("socket:")).count()
}

/// Writes with each API and sees it with the other, over and over; watches with each of them see it too.
async fn bystander(address: SocketAddr, ended: Arc<AtomicBool>, rounds: Arc<AtomicU64>) {
    let mut v3 = Client::connect(address).await.unwrap();
    let mut v2 = Connection::open(address).await.unwrap();
    let mut stream = Connection::open(address).await.unwrap();
    let target = "/v2/keys/by?wait=true&stream=true&recursive=true";
    let begun = stream.begin(&request(address, "GET", target, None, b"")).await.unwrap();
    assert_eq!(begun.status, 200);
    let mut create = DynamicMessage::new(grpc::message("WatchCreateRequest"));
    create.set_field_by_name("key", Value::Bytes("/by/stander".into()));
    let mut watch = DynamicMessage::new(grpc::message("WatchRequest"));
    watch.set_field_by_name("create_request", Value::Message(create));
    let mut watch = v3.line("Watch/Watch", &watch).await.unwrap();
    soon("a watch meanwhile", watch.next()).await.unwrap().unwrap();
    let form = Some("application/x-www-form-urlencoded");
    while !ended.load(Ordering::Relaxed) {
        let round = rounds.load(Ordering::Relaxed);
        let put = request(
            address,
            "PUT",
            "/v2/keys/by/stander",
            form,
            format!("value={round}").as_bytes(),
        );
        let answer = soon("a v2 put meanwhile", v2.exchange(&put)).await.unwrap();
        assert!(answer.status < 300, "{}", answer.text());
        let mut range = grpc::request("KV/Range");
        range.set_field_by_name("key", Value::Bytes("/by/stander".into()));
        let found = soon("a v3 range meanwhile", v3.unary("KV/Range", &range)).await.unwrap();
        let keys = found.get_field_by_name("kvs").unwrap().into_owned();
        let key = keys.as_list().unwrap()[0].as_message().unwrap().clone();
        let value = key.get_field_by_name("value").unwrap().as_bytes().unwrap().clone();
        assert_eq!(value, round.to_string());
        let told = soon("a v2 event meanwhile", stream.chunk()).await.unwrap().unwrap();
        let told = String::from_utf8(told).unwrap();
        let node = format!("\"node\":{{\"key\":\"/by/stander\",\"value\":\"{round}\"");
        assert!(told.contains(&node), "round {round}: {told}");
        let told = soon("a v3 event meanwhile", watch.next()).await.unwrap().unwrap();
        let events = told.get_field_by_name("events").unwrap().into_owned();
        let event = events.as_list().unwrap()[0].as_message().unwrap().clone();
        let key = event.get_field_by_name("kv").unwrap().into_owned();
        let value = key.as_message().unwrap().get_field_by_name("value").unwrap().into_owned();
        assert_eq!(value.as_bytes().unwrap(), &round.to_string());
        rounds.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Sends bytes on a connection of their own, looks whether something comes back, and hangs up.
async fn throw(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let Ok(mut stream) = TcpStream::connect(address).await else { return Vec::new() };
    // The server may close while we still send.
    let _ = tokio::time::timeout(Duration::from_secs(5), stream.write_all(bytes)).await;
    let mut answer = vec![0; 4096];
    let read = tokio::time::timeout(GLANCE, stream.read(&mut answer)).await;
    answer.truncate(read.ok().and_then(Result::ok).unwrap_or(0));
    answer
}

/// Sends bytes, also when the server has had enough before the last of them, and waits for an answer.
async fn answered(address: SocketAddr, bytes: Vec<u8>) -> Vec<u8> {
    let (mut read, mut write) = TcpStream::connect(address).await.unwrap().into_split();
    let sending = tokio::spawn(async move {
        let _ = write.write_all(&bytes).await;
        write
    });
    let mut answer = vec![0; 4096];
    let count = soon("an answer", read.read(&mut answer)).await.unwrap();
    answer.truncate(count);
    sending.abort();
    answer
}

/// Many at a time.
async fn throw_all(address: SocketAddr, requests: impl IntoIterator<Item = Vec<u8>>) {
    let thrown = stream::iter(requests).map(|bytes| async move { throw(address, &bytes).await });
    thrown.buffer_unordered(16).for_each(async |_| {}).await;
}

/// A head with this target, and nothing wrong with it otherwise.
fn get(target: &[u8]) -> Vec<u8> {
    [b"GET ", target, b" HTTP/1.1\r\nHost: localhost\r\n\r\n"].concat()
}

fn http1_nonsense() -> Vec<Vec<u8>> {
    let head = |lines: &str| {
        format!("PUT /v2/keys/x HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n").into_bytes()
    };
    let mut all = vec![
        b"\r\n\r\n\r\n".to_vec(),
        b"\0\0\0\0\0\0\0\0".to_vec(),
        b"GET".to_vec(),
        b"GET / HTTP/1.1".to_vec(),
        b"GET /\r\n\r\n".to_vec(),
        b"GET / HTTP/9.9\r\n\r\n".to_vec(),
        b"GET / FTP/1.1\r\n\r\n".to_vec(),
        b"GET  /  HTTP/1.1\r\n\r\n".to_vec(),
        b"GET http://[::1 HTTP/1.1\r\n\r\n".to_vec(),
        b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(),
        b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n".to_vec(),
        b"PRI * HTTP/1.1\r\n\r\n".to_vec(),
        head("Content-Length: -1\r\n"),
        head("Content-Length: 99999999999999999999\r\n"),
        head("Content-Length: 5\r\nContent-Length: 6\r\n"),
        head("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"),
        head("Content-Length: 18446744073709551615\r\n"),
        head("Transfer-Encoding: chunked\r\n\r\nzz\r\n"),
        head("Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx"),
        head("Transfer-Encoding: gzip, nonsense\r\n"),
        head("Expect: 200-ok\r\n"),
        head(
            "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
        ),
        head(": no name\r\n"),
        head("No colon\r\n"),
        head("Bad\u{1}Name: x\r\n"),
        head("Content-Type: application/grpc\r\nContent-Length: 5\r\n\r\n\0\0\0\0\0"),
        head(&format!("X: {}\r\n", "x".repeat(1 << 20))),
        head(&"X: y\r\n".repeat(50_000)),
        [b"GET /v2/keys/".to_vec(), vec![b'a'; 1 << 20], b" HTTP/1.1\r\n\r\n".to_vec()].concat(),
        [vec![b'M'; 100_000], b" / HTTP/1.1\r\n\r\n".to_vec()].concat(),
    ];
    // The start of a good request, over and over on one connection, and then nothing.
    all.push(b"GET /v2/keys/x HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(200));
    all
}

fn hostile_paths() -> Vec<Vec<u8>> {
    let long = "k".repeat(100_000);
    let deep = "/d".repeat(25_000);
    let mut paths: Vec<Vec<u8>> = [
        "/v2/keys/../../../../etc/passwd",
        "/v2/keys/%2e%2e/%2e%2e/x",
        "/v2/keys/%00",
        "/v2/keys/a%00b/%00",
        "/v2/keys/%ff%fe%c0%80",
        "/v2/keys/%",
        "/v2/keys/%zz",
        "/v2/keys/a?wait=true&waitIndex=18446744073709551615",
        "/v2/keys/a?wait=true&stream=true&recursive=true&waitIndex=1",
        "/v2/keys/?recursive=true&sorted=true&%00=%00",
        "/v2/keys/a?ttl=18446744073709551615",
        "/v2/keys//////////////",
        "/v2/keys/a;b;c?;;;&&&===",
        "/v3/kv/range/../../x",
        "/v2/stats/%73elf",
        "*",
        "//",
        "/\\..\\..\\x",
        "/v2/keys/\u{202e}\u{feff}",
    ]
    .map(|path| path.as_bytes().to_vec())
    .into();
    paths.push(format!("/v2/keys/{long}").into_bytes());
    paths.push(format!("/v2/keys{deep}").into_bytes());
    paths.push(b"/v2/keys/\xff\xfe\x80".to_vec());
    paths.push(b"/v2/keys/a\0b".to_vec());
    paths.push([b"/v2/keys/".to_vec(), b"%2f".repeat(10_000)].concat());
    paths
}

fn http2_nonsense() -> Vec<Vec<u8>> {
    let begun = |rest: Vec<u8>| [preface(), rest].concat();
    let headers =
        frame(1, 4, 1, &hpack(&[(":method", "GET"), (":path", "/"), (":scheme", "http")]));
    let continuation: Vec<u8> = (0..2_000).flat_map(|_| frame(9, 0, 1, &[0; 64])).collect();
    let resets: Vec<u8> = (0..2_000u32)
        .flat_map(|n| {
            [grpc_call(2 * n + 1, "KV/Range", b""), frame(3, 0, 2 * n + 1, &[0, 0, 0, 8])].concat()
        })
        .collect();
    vec![
        preface()[..10].to_vec(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        begun(vec![0xff; 1_000]),
        begun(frame(0, 0, 0, b"data on no stream")),
        begun(frame(1, 4, 1, &[0xff; 100])),
        begun(frame(1, 0, 1, b"")),
        begun([frame(1, 0, 1, &hpack(&[(":method", "GET")])), continuation].concat()),
        begun(frame(9, 4, 1, b"a continuation of nothing")),
        begun(frame(8, 0, 0, &[0, 0, 0, 0])),
        begun(frame(8, 0, 0, &[0x7f, 0xff, 0xff, 0xff]).repeat(3)),
        begun(frame(4, 0, 0, &[0, 4, 0xff, 0xff, 0xff, 0xff])),
        begun(frame(4, 0, 0, &[0; 5])),
        begun(frame(4, 0, 0, b"").repeat(20_000)),
        begun(frame(6, 0, 0, &[0; 8]).repeat(20_000)),
        begun(frame(5, 4, 1, &[0, 0, 0, 2])),
        begun(frame(7, 0, 0, &[0; 8])),
        begun(frame(0x77, 0xff, 3, &[1; 500])),
        begun([headers.clone(), headers.clone()].concat()),
        begun(frame(1, 4, 2, b"even")),
        begun([&headers[..], &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]].concat()),
        begun(resets),
        begun(frame(
            1,
            5,
            1,
            &hpack(&[(":method", "GET"), (":path", "nowhere"), (":scheme", "x")]),
        )),
        begun(frame(1, 5, 1, &hpack(&[("no", "method")]))),
        // A window of nothing, so that no answer can be sent.
        begun(
            [frame(4, 0, 0, &[0, 4, 0, 0, 0, 0]), grpc_call(1, "Maintenance/Snapshot", b"")]
                .concat(),
        ),
    ]
}

const CALLS: &[&str] = &[
    "KV/Range",
    "KV/Put",
    "KV/DeleteRange",
    "KV/Txn",
    "KV/Compact",
    "Watch/Watch",
    "Lease/LeaseRevoke",
    "Lease/LeaseKeepAlive",
    "Lease/LeaseTimeToLive",
    "Lease/LeaseLeases",
    "Cluster/MemberList",
    "Cluster/MemberAdd",
    "Maintenance/Alarm",
    "Maintenance/Status",
    "Maintenance/HashKV",
    "Maintenance/Snapshot",
    "Auth/Authenticate",
    "Nothing/Nothing",
];

/// A transaction in a transaction in a transaction, with lengths that are right.
fn deep_txn(levels: usize) -> Vec<u8> {
    let mut message: Vec<u8> = Vec::new();
    for _ in 0..levels {
        for tag in [0x22, 0x12] {
            let mut length = message.len();
            let mut wrapped = vec![tag];
            while length >= 0x80 {
                wrapped.push(u8::try_from(length & 0x7f).unwrap() | 0x80);
                length >>= 7;
            }
            wrapped.push(u8::try_from(length).unwrap());
            wrapped.extend(&message);
            message = wrapped;
        }
    }
    message
}

/// Long ones are more than a stream may send before it is let: they are cut off.
const LONGEST: usize = 16_000;

fn protobuf_nonsense() -> Vec<Vec<u8>> {
    let deep = deep_txn(2_500);
    assert!(deep.len() <= LONGEST, "cut off it is no longer deep: {}", deep.len());
    let mut rng = Rng::with_seed(7);
    let mut all = Vec::new();
    for call in CALLS {
        let mut messages = vec![
            vec![0xff; 40],
            vec![0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
            vec![0x0a, 0x05, b'a'],
            vec![0x0b, 0x0c, 0x0b, 0x0b],
            vec![0x0a, 0x80],
            vec![0x08; 9_000],
            vec![0x0b; 9_000],
            deep.clone(),
            deep_txn(40),
        ];
        messages.extend((0..20).map(|_| (0..rng.usize(..200)).map(|_| rng.u8(..)).collect()));
        all.extend(messages.into_iter().map(|message| {
            let message = &message[..message.len().min(LONGEST)];
            [preface(), grpc_call(1, call, message)].concat()
        }));
        // A length that does not come, a compression nobody agreed on, two messages where one is taken.
        let cut = grpc_call(1, call, b"");
        let head = &cut[..cut.len() - 14];
        let ends = |data: &[u8]| [preface(), head.to_vec(), frame(0, 1, 1, data)].concat();
        all.extend([
            ends(&[0, 0xff, 0xff, 0xff, 0xff]),
            ends(&[1, 0, 0, 0, 1, 0]),
            ends(&[9, 0, 0, 0, 0]),
            ends(&[0, 0, 0]),
            ends(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            ends(b""),
        ]);
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_is_refused_by_its_depth_before_anything_follows_it_down() {
    let siege = Siege::begin().await;
    let mut v3 = Client::connect(siege.ours.address).await.unwrap();
    for (levels, code, words) in [
        (40, tonic::Code::InvalidArgument, "transactions are nested more than 32 deep"),
        // Whoever reads messages refuses these.
        (2_500, tonic::Code::Internal, "recursion limit"),
        (100_000, tonic::Code::Internal, "recursion limit"),
    ] {
        let asked = soon("an answer", v3.plain("KV/Txn", deep_txn(levels).into())).await;
        let refused = asked.unwrap_err();
        assert_eq!(refused.code(), code, "{levels}: {refused:?}");
        assert!(refused.message().contains(words), "{levels}: {refused:?}");
    }
    drop(v3);
    siege.end().await;
}

/// Requests that are good, to be spoilt. None grants a lease.
fn good_requests() -> Vec<Vec<u8>> {
    let form = |method: &str, target: &str, body: &str| {
        let length = body.len();
        format!(
            "{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .into_bytes()
    };
    let http2 = |path: &str, message: &[u8]| [preface(), grpc_call(1, path, message)].concat();
    vec![
        form("PUT", "/v2/keys/m/a", "value=some%20thing&prevExist=false"),
        form("PUT", "/v2/keys/m/a?prevIndex=5", "value=x"),
        form("POST", "/v2/keys/m", "value=x"),
        form("DELETE", "/v2/keys/m?recursive=true&dir=true", ""),
        get(b"/v2/keys/m?recursive=true&sorted=true"),
        get(b"/v2/keys/m?wait=true&recursive=true&stream=true&waitIndex=3"),
        form("POST", "/v3/kv/range", r#"{"key":"L20vYQ==","range_end":"L3o=","limit":"5","sort_order":"DESCEND"}"#),
        form("POST", "/v3/kv/txn", r#"{"compare":[{"target":"VERSION","key":"YQ==","version":"0"}],"success":[{"request_put":{"key":"YQ==","value":"MQ=="}}]}"#),
        form("POST", "/v3/watch", r#"{"create_request":{"key":"YQ=="}}"#),
        http2("KV/Range", b"\x0a\x02/m\x12\x02/n\x18\x05\x28\x02"),
        http2("KV/Put", b"\x0a\x04/m/b\x12\x05value\x20\x01"),
        http2("KV/DeleteRange", b"\x0a\x04/m/b\x18\x01"),
        http2("KV/Txn", b"\x0a\x08\x10\x03\x1a\x01a\x3a\x01x\x12\x08\x12\x06\x0a\x01a\x12\x01y\x1a\x05\x0a\x03\x0a\x01a"),
        http2("Watch/Watch", b"\x0a\x08\x0a\x02/m\x12\x02/n"),
        http2("Lease/LeaseKeepAlive", b"\x08\x05"),
        http2("Maintenance/Status", b""),
    ]
}

fn mutated(seed: u64) -> Vec<u8> {
    let mut rng = Rng::with_seed(seed);
    let good = good_requests();
    let mut bytes = good[rng.usize(..good.len())].clone();
    for _ in 0..rng.usize(1..5) {
        let at = rng.usize(..bytes.len().max(1));
        match rng.u8(..7) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << rng.u8(..8),
            1 if !bytes.is_empty() => bytes[at] = rng.u8(..),
            2 => bytes.insert(at, rng.u8(..)),
            3 if !bytes.is_empty() => drop(bytes.remove(at)),
            4 => bytes.truncate(at),
            5 => {
                let end = (at + rng.usize(..40)).min(bytes.len());
                let again = bytes[at.min(end)..end].to_vec();
                bytes.splice(at.min(end)..at.min(end), again);
            }
            _ => bytes.extend(&good[rng.usize(..good.len())]),
        }
    }
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn nonsense_in_http_and_protobuf_disturbs_nobody() {
    let siege = Siege::begin().await;
    let address = siege.ours.address;
    throw_all(address, http1_nonsense()).await;
    for target in hostile_paths() {
        for method in ["GET", "PUT", "POST", "DELETE"] {
            let request = [method.as_bytes(), &get(&target)[3..]].concat();
            throw(address, &request).await;
        }
    }
    throw_all(address, http2_nonsense()).await;
    throw_all(address, protobuf_nonsense()).await;
    siege.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_spoilt_requests_disturb_nobody() {
    let siege = Siege::begin().await;
    let mut before = None;
    for round in 0..ROUNDS {
        let seeds = round * MUTATIONS / ROUNDS..(round + 1) * MUTATIONS / ROUNDS;
        throw_all(siege.ours.address, seeds.map(mutated)).await;
        let after = siege.calm().await;
        // The first round has whatever is made once and kept.
        let grown = after.saturating_sub(*before.get_or_insert(after));
        assert!(grown < GROWS, "round {round} has left {grown} bytes behind");
    }
    siege.end().await;
}

/// What is too large is refused, and by what it is known before all of it was sent.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_too_large_is_refused() {
    let siege = Siege::begin().await;
    let address = siege.ours.address;
    let body = [b"value=".to_vec(), vec![b'x'; 20 << 20]].concat();
    let form = Some("application/x-www-form-urlencoded");
    let large = request(address, "PUT", "/v2/keys/large", form, &body);
    let answer = answered(address, large).await;
    assert!(answer.starts_with(b"HTTP/1.1 413"), "{}", answer.escape_ascii());
    let chunks = [&b"PUT /v2/keys/large HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1400000\r\n"[..], &body].concat();
    let answer = answered(address, chunks).await;
    assert!(answer.starts_with(b"HTTP/1.1 413"), "{}", answer.escape_ascii());
    let endless =
        b"PUT /v2/keys/large HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            .to_vec();
    let endless = [endless, b"1\r\nx\r\n".repeat(5 << 20)].concat();
    let answer = answered(address, endless).await;
    // Byte by byte it may be late before it is too large.
    let refused =
        [&b"HTTP/1.1 413"[..], b"HTTP/1.1 408"].iter().any(|head| answer.starts_with(head));
    assert!(refused, "{}", answer.escape_ascii());
    let mut v3 = Client::connect(address).await.unwrap();
    let mut put = grpc::request("KV/Put");
    put.set_field_by_name("key", Value::Bytes("/large".into()));
    for (bytes, code) in
        [(1_600_000, tonic::Code::InvalidArgument), (8 << 20, tonic::Code::ResourceExhausted)]
    {
        put.set_field_by_name("value", Value::Bytes(vec![b'x'; bytes].into()));
        let refused = soon("a large put", v3.unary("KV/Put", &put)).await.unwrap_err();
        assert_eq!(refused.code(), code, "{refused:?}");
    }
    put.set_field_by_name("key", Value::Bytes(vec![b'k'; 100_000].into()));
    put.set_field_by_name("value", Value::Bytes("x".into()));
    let refused = soon("a large key", v3.unary("KV/Put", &put)).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    drop(v3);
    siege.end().await;
}

/// Watchers that do not read, of each API.
const UNREAD: usize = 15;

/// Watchers of both APIs of what `flood` writes.
async fn watch_the_flood(siege: &Siege) -> Vec<TcpStream> {
    let watch = get(b"/v2/keys/flood?wait=true&stream=true&recursive=true");
    let v3_watch =
        [preface(), grpc_call(1, "Watch/Watch", b"\x0a\x0f\x0a\x06/flood\x12\x05/flop")].concat();
    let mut held = Vec::new();
    for bytes in [watch, v3_watch] {
        for _ in 0..UNREAD {
            let mut stream = TcpStream::connect(siege.ours.address).await.unwrap();
            stream.write_all(&bytes).await.unwrap();
            held.push(stream);
        }
    }
    soon("all of them watch", async {
        while siege.ours.store.status().watchers < siege.watchers + 2 * UNREAD {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    held
}

/// Writes more than any buffer takes; whoever watches and does not read it costs little meanwhile.
async fn flood(siege: &Siege) {
    let (before, mut most) = (memory(), 0);
    let mut v3 = Client::connect(siege.ours.address).await.unwrap();
    let mut put = grpc::request("KV/Put");
    put.set_field_by_name("key", Value::Bytes("/flood/x".into()));
    put.set_field_by_name("value", Value::Bytes(vec![b'x'; 1 << 20].into()));
    for _ in 0..24 {
        soon("a put beside slow readers", v3.unary("KV/Put", &put)).await.unwrap();
        most = most.max(memory());
    }
    // Without a bound each of them would have 24 MiB, or more.
    let grown = most.saturating_sub(before) >> 20;
    assert!(grown < 64 + 4 * 2 * UNREAD as u64, "{grown} MiB more with {UNREAD} of each");
}

/// Clients that send nothing, or do not read, are let go; others need not wait.
#[tokio::test(flavor = "multi_thread")]
async fn silent_and_half_open_clients_are_let_go() {
    let siege = Siege::begin().await;
    let address = siege.ours.address;
    let mut held = Vec::new();
    let beginnings: Vec<Vec<u8>> = vec![
        Vec::new(),
        b"GET /v2/keys/slow HTTP/1.1\r\nHost: loc".to_vec(),
        b"PUT /v2/keys/slow HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nvalue="
            .to_vec(),
        b"PRI * HTTP/2.0\r\n".to_vec(),
        preface(),
        [preface(), grpc_call(1, "KV/Put", b"\x0a\x04/m/b")[..60].to_vec()].concat(),
        // Answered, and then there is nothing more.
        get(b"/version"),
    ];
    for beginning in &beginnings {
        for _ in 0..20 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(beginning).await.unwrap();
            held.push(stream);
        }
    }
    // Half of them say that nothing more comes, and listen.
    for stream in held.iter_mut().step_by(2) {
        let _ = stream.shutdown().await;
    }
    held.extend(watch_the_flood(&siege).await);
    flood(&siege).await;
    // Everybody is let go, although none of them hangs up: only our own ends are left.
    soon("the server lets go of them", async {
        loop {
            let ours = held.len();
            if sockets() <= siege.sockets + ours {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    drop(held);
    siege.end().await;
}

/// A connection that was answered is let go when nothing more is asked on it.
#[tokio::test(flavor = "multi_thread")]
async fn who_is_answered_and_then_silent_is_let_go() {
    let siege = Siege::begin().await;
    let mut stream = TcpStream::connect(siege.ours.address).await.unwrap();
    for _ in 0..2 {
        stream.write_all(&get(b"/version")).await.unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"}") {
            answer.push(soon("an answer", stream.read_u8()).await.expect("it is kept"));
        }
        assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", answer.escape_ascii());
    }
    let mut rest = Vec::new();
    let ended = soon("it is let go", stream.read_to_end(&mut rest)).await;
    assert!(ended.is_ok() && rest.is_empty(), "{ended:?} {}", rest.escape_ascii());
    drop(stream);
    siege.end().await;
}

/// A byte now and then is no sign of life: what must be sent in time is a whole head, body or frame.
#[tokio::test(flavor = "multi_thread")]
async fn who_sends_a_byte_now_and_then_is_let_go() {
    let siege = Siege::begin().await;
    // Sends the beginning at once, and of the rest a byte now and then; answers what came until it was let go.
    let slowly = async |name: &str, begin: &[u8], rest: &[u8]| {
        let (mut read, mut write) =
            TcpStream::connect(siege.ours.address).await.unwrap().into_split();
        write.write_all(begin).await.unwrap();
        let trickle = async {
            for &byte in rest {
                tokio::time::sleep(Duration::from_millis(200)).await;
                if write.write_all(&[byte]).await.is_err() {
                    return;
                }
            }
            // What is missing never comes.
            std::future::pending::<()>().await;
        };
        let mut answer = Vec::new();
        let end = read.read_to_end(&mut answer);
        soon(name, async {
            tokio::select! { _ = end => {}, () = trickle => {} }
        })
        .await;
        answer
    };
    let mut head = get(b"/v2/keys/slow");
    head.truncate(head.len() - 4);
    let form = "Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 9000\r\n";
    let body = format!("PUT /v2/keys/slow HTTP/1.1\r\nHost: localhost\r\n{form}\r\nvalue=");
    let call = grpc_call(1, "KV/Put", b"");
    let headers = &call[..call.len() - 14];
    // Frames that would take an hour.
    let slow_headers = [&preface()[..], &frame(1, 4, 1, &[0; 16_000])[..9]].concat();
    let slow_data = [&preface()[..], headers, &frame(0, 0, 1, &[0; 16_000])[..9]].concat();
    let all_but_the_last = &preface()[..23];
    let much = [b'x'; 16_000 - 1];
    let (_, body, _, slow_headers, slow_data) = tokio::join!(
        slowly("a head", &head, &much),
        slowly("a body", body.as_bytes(), &much[..8_000]),
        slowly("the beginning of HTTP/2", &all_but_the_last[..5], &all_but_the_last[5..]),
        slowly("a frame of headers", &slow_headers, &much),
        slowly("a frame of data", &slow_data, &much),
    );
    assert!(body.starts_with(b"HTTP/1.1 408"), "{}", body.escape_ascii());
    for answer in [slow_headers, slow_data] {
        assert!(!answer.is_empty(), "HTTP/2 was spoken");
        assert_eq!(reproach(&answer), None, "it was let go because of the time alone");
    }
    siege.end().await;
}

/// What the server says was wrong when it ends a connection of HTTP/2.
fn reproach(mut frames: &[u8]) -> Option<u32> {
    const GOAWAY: u8 = 7;
    while let Some((&[_, a, b, kind, ..], rest)) = frames.split_first_chunk::<9>() {
        // No frame here is so long that it needs the first byte of its length.
        let (payload, next) = rest.split_at_checked(usize::from(a) << 8 | usize::from(b))?;
        if kind == GOAWAY {
            let code = payload.get(4..8)?.first_chunk().map(|code| u32::from_be_bytes(*code));
            if code != Some(0) {
                return code;
            }
        }
        frames = next;
    }
    None
}

/// Who reads a byte now and then costs no more than who reads nothing, and nobody waits for it.
#[tokio::test(flavor = "multi_thread")]
async fn who_reads_a_byte_now_and_then_costs_little() {
    let siege = Siege::begin().await;
    let readers = watch_the_flood(&siege).await.into_iter().map(|mut stream| {
        tokio::spawn(async move {
            while stream.read_u8().await.is_ok() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
    });
    let readers: Vec<_> = readers.collect();
    flood(&siege).await;
    siege.calm().await;
    for reader in readers {
        reader.abort();
    }
    siege.end().await;
}

/// Whoever watches and sends more behind it, which nobody reads meanwhile, is let go when it hangs up: with all of it
/// read by then or not, and whether it says goodbye or breaks off.
#[tokio::test(flavor = "multi_thread")]
async fn who_hangs_up_behind_what_nobody_reads_leaves_no_watcher() {
    let siege = Siege::begin().await;
    let watch = get(b"/v2/keys/behind?wait=true");
    for behind in [1, 100, 4 << 20] {
        for breaks_off in [false, true] {
            let mut stream = TcpStream::connect(siege.ours.address).await.unwrap();
            stream.write_all(&watch).await.unwrap();
            soon("it watches", async {
                while siege.ours.store.status().watchers <= siege.watchers {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            })
            .await;
            let more = get(b"/v2/keys/more").repeat(behind / 10 + 1);
            let sent = tokio::time::timeout(GLANCE, stream.write_all(&more)).await;
            assert_eq!(sent.is_err(), behind > 100, "the most is more than any buffer takes");
            if breaks_off {
                stream.set_zero_linger().unwrap();
            }
            drop(stream);
            soon("the watcher is gone", async {
                while siege.ours.store.status().watchers > siege.watchers {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            })
            .await;
        }
    }
    siege.end().await;
}

/// Each of them is whole, and what comes behind the first is not kept.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_sends_message_after_message_keeps_none_of_them() {
    const CALLS: usize = 40;
    const MOST: u64 = 32 << 20;
    let _alone = ALONE.lock().await;
    let ours = Ours::start().await;
    let stream = TcpStream::connect(ours.address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let url = format!("http://{}/etcdserverpb.KV/Put", ours.address);
    let messages = bytes::Bytes::from([0, 0, 0, 0, 3, 0x0a, 1, b'k'].repeat(2_000));
    let before = memory();
    let mut held = Vec::new();
    for _ in 0..CALLS {
        let request = Request::post(&url).header("content-type", "application/grpc");
        let mut client = client.clone().ready().await.unwrap();
        let (answer, mut body) = client.send_request(request.body(()).unwrap(), false).unwrap();
        // Almost as much as one message may be.
        for _ in 0..(2_000_000 / messages.len()) {
            body.reserve_capacity(messages.len());
            while body.capacity() < messages.len() {
                let more = std::future::poll_fn(|cx| body.poll_capacity(cx));
                soon("it is read", more).await.unwrap().unwrap();
            }
            body.send_data(messages.clone(), false).unwrap();
        }
        held.push((answer, body));
    }
    let grown = memory().saturating_sub(before);
    assert!(grown < MOST, "{CALLS} calls keep {grown} bytes");
    connection.abort();
}
