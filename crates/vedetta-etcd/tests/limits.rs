//! How much of the server one client may take, and what it hears beyond that.

mod support;

use std::net::SocketAddr;
use std::time::Duration;

use axum::http::{Request, StatusCode};
use prost_reflect::{DynamicMessage, Value};
use support::grpc::{self, Client, message};
use support::http::{self, Answer, Connection};
use support::http2::{frame, grpc_call, preface};
use support::{Ours, database, scratch, soon};
use testing::etcd;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::Code;
use vedetta_db::Db;
use vedetta_etcd::{Limits, TlsFiles};
use vedetta_kv::{KvError, Options, Purpose, SCHEMA, Store, Update};

/// A watch of the key `k`, as it is sent.
const WATCH: &[u8] = b"\x0a\x03\x0a\x01k";

fn text(text: &str) -> Value {
    Value::Bytes(text.to_owned().into())
}

/// A request of a call, with these fields.
fn filled(path: &str, fields: &[(&str, Value)]) -> DynamicMessage {
    let mut request = grpc::request(path);
    for (name, value) in fields {
        request.set_field_by_name(name, value.clone());
    }
    request
}

fn put(key: &str) -> DynamicMessage {
    filled("KV/Put", &[("key", text(key)), ("value", text("1"))])
}

/// As in etcd, where it is what is committed and not applied; here it is what waits for the writer.
#[tokio::test(flavor = "multi_thread")]
async fn when_too_much_waits_writes_are_refused_and_reads_are_not() {
    const WAITING: usize = 4;
    let folder = scratch();
    let mut options = database(&folder);
    options.queue = WAITING;
    let db = Db::open(&options, &[SCHEMA]).unwrap();
    let store = Store::open(db.clone(), Options::default()).await.unwrap();
    let ours = Ours::serving(folder, store.clone(), |endpoint| endpoint).await;
    let mut v3 = Client::connect(ours.address).await.unwrap();
    let lease = filled("Lease/LeaseGrant", &[("TTL", Value::I64(100)), ("ID", Value::I64(7))]);
    v3.unary("Lease/LeaseGrant", &lease).await.unwrap();
    let keep = filled("Lease/LeaseKeepAlive", &[("ID", Value::I64(7))]);
    let mut kept = v3.line("Lease/LeaseKeepAlive", &keep).await.unwrap();
    soon("the lease is kept", kept.next()).await.unwrap().unwrap();

    // The writer is busy with one write, and as many wait as may.
    let (entered, inside) = std::sync::mpsc::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let held = tokio::spawn(async move {
        let hold = move |_: &mut Update<'_>| {
            entered.send(()).expect("the test waits for it");
            let _ = released.recv();
            Ok::<_, KvError>(())
        };
        store.update(Purpose::Store, hold).await
    });
    tokio::task::spawn_blocking(move || inside.recv()).await.unwrap().unwrap();
    let waiting: Vec<_> = (0..WAITING)
        .map(|number| {
            let mut v3 = v3.clone();
            tokio::spawn(async move { v3.unary("KV/Put", &put(&format!("w{number}"))).await })
        })
        .collect();
    soon("all of them wait", async {
        while !db.is_crowded() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;

    let op = {
        let mut op = DynamicMessage::new(message("RequestOp"));
        op.set_field_by_name("request_put", Value::Message(put("t")));
        Value::List(vec![Value::Message(op)])
    };
    let id = |path| filled(path, &[("ID", Value::I64(7))]);
    for (path, request) in [
        ("KV/Put", put("p")),
        ("KV/DeleteRange", filled("KV/DeleteRange", &[("key", text("p"))])),
        ("KV/Txn", filled("KV/Txn", &[("success", op)])),
        ("KV/Compact", filled("KV/Compact", &[("revision", Value::I64(2))])),
        ("Lease/LeaseGrant", filled("Lease/LeaseGrant", &[("TTL", Value::I64(100))])),
        ("Lease/LeaseRevoke", id("Lease/LeaseRevoke")),
    ] {
        let refused = soon(path, v3.unary(path, &request)).await.unwrap_err();
        let told = (refused.code(), refused.message());
        assert_eq!(told, (Code::ResourceExhausted, "etcdserver: too many requests"), "{path}");
    }
    let reads = Value::List(vec![grpc::reading("a")]);
    let reads = filled("KV/Txn", &[("success", reads)]);
    soon("a transaction that reads", v3.unary("KV/Txn", &reads)).await.unwrap();
    let form = Some("application/x-www-form-urlencoded");
    for (method, target, body, status) in [
        ("PUT", "/v2/keys/p", "value=1", 500),
        ("POST", "/v3/kv/put", r#"{"key":"YQ=="}"#, 429),
        ("GET", "/v2/keys/", "", 200),
        ("POST", "/v3/kv/range", r#"{"key":"YQ=="}"#, 200),
    ] {
        let bytes = http::request(ours.address, method, target, form, body.as_bytes());
        let mut connection = Connection::open(ours.address).await.unwrap();
        let answer = soon(target, connection.exchange(&bytes)).await.unwrap();
        assert_eq!(answer.status, status, "{method} {target}: {}", answer.text());
        let words = "etcdserver: too many requests";
        assert_eq!(answer.text().contains(words), status > 400, "{target}: {}", answer.text());
    }
    kept.send(&keep).await;
    soon("the lease is kept all the same", kept.next()).await.unwrap().unwrap();

    release.send(()).unwrap();
    soon("the write that held the others", held).await.unwrap().unwrap();
    for put in waiting {
        soon("one that waited is done", put).await.unwrap().unwrap();
    }
    v3.unary("KV/Put", &put("p")).await.unwrap();
}

/// Frames as they come.
struct Frames(TcpStream);

impl Frames {
    /// The next one on a stream: its kind and what is in it.
    async fn on(&mut self, stream: u32) -> (u8, Vec<u8>) {
        loop {
            let mut head = [0; 9];
            soon("a frame", self.0.read_exact(&mut head)).await.expect("the connection stays");
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            soon("its payload", self.0.read_exact(&mut payload)).await.unwrap();
            if u32::from_be_bytes([head[5], head[6], head[7], head[8]]) == stream {
                return (head[3], payload);
            }
        }
    }
}

/// A watch over HTTP/2 whose stream stays open.
fn watch_on(stream: u32) -> Vec<u8> {
    let mut call = grpc_call(stream, "Watch/Watch", WATCH);
    // The last frame says that nothing more comes; here more may.
    let data = call.len() - 9 - 5 - WATCH.len();
    call[data + 4] = 0;
    call
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_too_many_is_refused_until_another_has_ended() {
    const HEADERS: u8 = 1;
    const RESET: u8 = 3;
    let limits = Limits { streams: 2, ..Limits::default() };
    let ours = Ours::start_with(|endpoint| endpoint.limits(limits)).await;
    let mut frames = Frames(TcpStream::connect(ours.address).await.unwrap());
    frames.0.write_all(&[preface(), watch_on(1), watch_on(3)].concat()).await.unwrap();
    assert_eq!(frames.on(1).await.0, HEADERS);
    assert_eq!(frames.on(3).await.0, HEADERS);
    frames.0.write_all(&watch_on(5)).await.unwrap();
    let refused = (RESET, 7u32.to_be_bytes().to_vec());
    assert_eq!(frames.on(5).await, refused, "a stream that is refused may be tried again");
    let gave_up = frame(RESET, 0, 1, &8u32.to_be_bytes());
    frames.0.write_all(&gave_up).await.unwrap();
    soon("its watch ends", async {
        while ours.store.status().watchers > 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    frames.0.write_all(&watch_on(7)).await.unwrap();
    assert_eq!(frames.on(7).await.0, HEADERS);
}

/// Sends bytes, also when the other side has had enough before the last of them, and reads the answer's head.
async fn answer(ours: &Ours, bytes: Vec<u8>) -> Answer {
    let stream = TcpStream::connect(ours.address).await.unwrap();
    let (mut read, mut write) = stream.into_split();
    let sending = tokio::spawn(async move {
        let _ = write.write_all(&bytes).await;
        write
    });
    let mut head = Vec::new();
    let mut piece = [0; 4096];
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        let count = soon("an answer", read.read(&mut piece)).await.expect("it is answered");
        assert!(count > 0, "it ended without an answer: {}", head.escape_ascii());
        head.extend_from_slice(&piece[..count]);
    }
    drop(sending);
    let line = String::from_utf8_lossy(&head).into_owned();
    let status = line.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    Answer { status, ..Answer::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_that_is_too_large_is_refused_over_both_versions_of_http() {
    let limits = Limits { header: 16 << 10, ..Limits::default() };
    let ours = Ours::start_with(|endpoint| endpoint.limits(limits)).await;
    let long = "x".repeat(20 << 10);
    let get = |header: &str| {
        format!("GET /v2/keys HTTP/1.1\r\nHost: localhost\r\nX: {header}\r\n\r\n").into_bytes()
    };
    assert_eq!(answer(&ours, get(&long)).await.status, 431);
    assert_eq!(answer(&ours, get(&long[..8 << 10])).await.status, 200);
    for (header, status) in [
        (&long[..], StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE),
        (&long[..8 << 10], StatusCode::OK),
    ] {
        let stream = TcpStream::connect(ours.address).await.unwrap();
        let (mut client, connection) = h2::client::handshake(stream).await.unwrap();
        let connection = tokio::spawn(connection);
        let request = Request::get(format!("http://{}/v2/keys", ours.address)).header("x", header);
        let (answered, _) = client.send_request(request.body(()).unwrap(), true).unwrap();
        let answered = soon("an answer over HTTP/2", answered).await.unwrap();
        assert_eq!(answered.status(), status);
        connection.abort();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_says_it_is_too_large_is_refused_before_it_is_sent() {
    let limits = Limits { body: 1 << 20, ..Limits::default() };
    let ours = Ours::start_with(|endpoint| endpoint.limits(limits)).await;
    let head = |length: usize, more: &str| {
        format!(
            "PUT /v2/keys/a HTTP/1.1\r\nHost: localhost\r\n{more}\
             Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {length}\r\n\r\n"
        )
        .into_bytes()
    };
    // Not a byte of the body is sent: what it says of itself is enough.
    assert_eq!(answer(&ours, head((1 << 20) + 1, "")).await.status, 413);
    assert_eq!(answer(&ours, head(1 << 30, "Expect: 100-continue\r\n")).await.status, 413);
    let fits = [head(1 << 20, ""), b"value=".to_vec(), vec![b'x'; (1 << 20) - 6]].concat();
    assert_eq!(answer(&ours, fits).await.status, 201);
    // Of one that does not say, it is known when it has come so far.
    let chunked =
        "PUT /v2/keys/a HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n";
    let chunks = [chunked.as_bytes(), &b"1\r\nx\r\n".repeat((1 << 20) + 1)].concat();
    assert_eq!(answer(&ours, chunks).await.status, 413);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tls_handshake_that_stops_halfway_is_let_go() {
    let folder = tempfile::tempdir().unwrap();
    let signed = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let file = |name: &str| folder.path().join(name);
    std::fs::write(file("cert"), signed.cert.pem()).unwrap();
    std::fs::write(file("key"), signed.signing_key.serialize_pem()).unwrap();
    let files = TlsFiles { cert: file("cert"), key: file("key"), client_ca: None };
    let limits = Limits { handshake: Duration::from_millis(50), ..Limits::default() };
    let tls = files.load().unwrap();
    let ours = Ours::start_with(|endpoint| endpoint.limits(limits).tls(tls)).await;
    // A record of 512 bytes with a ClientHello in it, of which the first bytes come.
    let hello = [&b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..], &[7; 200]].concat();
    for beginning in [&hello[..], &hello[..3], &[]] {
        let mut stream = TcpStream::connect(ours.address).await.unwrap();
        stream.write_all(beginning).await.unwrap();
        let mut rest = Vec::new();
        let end = soon("it is let go", stream.read_to_end(&mut rest)).await;
        assert!(end.is_ok() && rest.is_empty(), "not a word was said: {end:?} {rest:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_too_many_on_one_stream_is_answered_as_cancelled() {
    const WATCHES: usize = 100_000;
    let ours = Ours::start().await;
    let mut v3 = Client::connect(ours.address).await.unwrap();
    let mut create = DynamicMessage::new(message("WatchCreateRequest"));
    create.set_field_by_name("key", text("k"));
    let mut watch = DynamicMessage::new(message("WatchRequest"));
    watch.set_field_by_name("create_request", Value::Message(create));
    let mut line = v3.line("Watch/Watch", &watch).await.unwrap();
    let requests = line.requests.clone();
    let again = {
        use prost_reflect::prost::Message as _;
        bytes::Bytes::from(watch.encode_to_vec())
    };
    tokio::spawn(async move {
        for _ in 0..WATCHES {
            let _ = requests.send(again.clone()).await;
        }
    });
    let cancelled =
        |answer: &DynamicMessage| answer.get_field_by_name("canceled").unwrap().as_bool();
    for number in 0..WATCHES {
        let answer = soon("a watch", line.next()).await.unwrap().unwrap();
        assert_eq!(cancelled(&answer), Some(false), "watch {number}");
    }
    let answer = soon("one too many", line.next()).await.unwrap().unwrap();
    assert_eq!(cancelled(&answer), Some(true));
    let why = answer.get_field_by_name("cancel_reason").unwrap().into_owned();
    assert_eq!(why.as_str(), Some("too many watches on one stream"));
}

/// A request to watch a key of so many bytes.
fn watch_of(bytes: usize) -> DynamicMessage {
    let mut create = DynamicMessage::new(message("WatchCreateRequest"));
    create.set_field_by_name("key", text(&"k".repeat(bytes)));
    let mut watch = DynamicMessage::new(message("WatchRequest"));
    watch.set_field_by_name("create_request", Value::Message(create));
    watch
}

#[tokio::test(flavor = "multi_thread")]
async fn the_keys_watched_on_one_connection_are_bounded_together() {
    const KEY: usize = 60_000;
    const FIT: usize = 17;
    let limits = Limits { watched: FIT * (KEY + 512) + KEY / 2, ..Limits::default() };
    let ours = Ours::start_with(|endpoint| endpoint.limits(limits)).await;
    let mut v3 = Client::connect(ours.address).await.unwrap();
    let watch = watch_of(KEY);
    let why = async |line: &mut grpc::Line| {
        let answer = soon("a watch", line.next()).await.unwrap().unwrap();
        answer.get_field_by_name("cancel_reason").unwrap().as_str().unwrap().to_owned()
    };
    let refused = "the watches of one connection are too many, or their keys too long";
    let mut line = v3.line("Watch/Watch", &watch).await.unwrap();
    assert_eq!(why(&mut line).await, "");
    for _ in 1..FIT {
        line.send(&watch).await;
        assert_eq!(why(&mut line).await, "");
    }
    line.send(&watch).await;
    assert_eq!(why(&mut line).await, refused);
    let mut second = v3.line("Watch/Watch", &watch).await.unwrap();
    assert_eq!(why(&mut second).await, refused, "another stream of the connection");
    line.send(&watch_of(1)).await;
    assert_eq!(why(&mut line).await, "", "there is room for a short one");
    let mut other = Client::connect(ours.address).await.unwrap();
    let mut other = other.line("Watch/Watch", &watch).await.unwrap();
    assert_eq!(why(&mut other).await, "", "another connection");
    let mut cancel = DynamicMessage::new(message("WatchCancelRequest"));
    cancel.set_field_by_name("watch_id", Value::I64(3));
    let mut request = DynamicMessage::new(message("WatchRequest"));
    request.set_field_by_name("cancel_request", Value::Message(cancel));
    line.send(&request).await;
    assert_eq!(why(&mut line).await, "", "it is cancelled");
    second.send(&watch).await;
    assert_eq!(why(&mut second).await, "", "one that ended gives its room back");
}

/// So are those asked for as JSON, many streams of which share a connection over HTTP/2, and those of the shortest key.
#[tokio::test(flavor = "multi_thread")]
async fn watches_asked_for_as_json_are_bounded_together_however_short_their_keys() {
    const FIT: usize = 10;
    let limits = Limits { watched: FIT * 513 + 300, ..Limits::default() };
    let ours = Ours::start_with(|endpoint| endpoint.limits(limits)).await;
    let stream = TcpStream::connect(ours.address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let watch = async || {
        let url = format!("http://{}/v3/watch", ours.address);
        let mut client = client.clone().ready().await.unwrap();
        let request = Request::post(url).body(()).unwrap();
        let (answer, mut body) = client.send_request(request, false).unwrap();
        body.send_data(r#"{"create_request":{"key":"aw=="}}"#.into(), true).unwrap();
        let mut lines = soon("an answer", answer).await.unwrap().into_body();
        let line = soon("a line", lines.data()).await.unwrap().unwrap();
        (String::from_utf8_lossy(&line).into_owned(), lines)
    };
    let mut held = Vec::new();
    for _ in 0..FIT {
        let (line, lines) = watch().await;
        assert!(line.contains("\"created\":true") && !line.contains("canceled"), "{line}");
        held.push(lines);
    }
    let (line, _lines) = watch().await;
    assert!(line.contains("the watches of one connection are too many"), "{line}");
    connection.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_of_a_stream_is_no_longer_than_it_can_need() {
    let ours = Ours::start().await;
    let mut v3 = Client::connect(ours.address).await.unwrap();
    for bytes in [140_000, 3 << 20] {
        let mut line = v3.line("Watch/Watch", &watch_of(1)).await.unwrap();
        soon("a watch", line.next()).await.unwrap().unwrap();
        line.send(&watch_of(bytes)).await;
        let ended = soon("its end", line.next()).await.unwrap_err();
        assert_eq!(ended.code(), Code::ResourceExhausted);
        assert!(ended.message().ends_with("vs. 135170)"), "{ended:?}");
    }
    let keep = filled("Lease/LeaseKeepAlive", &[("ID", Value::I64(7))]);
    let mut line = v3.line("Lease/LeaseKeepAlive", &keep).await.unwrap();
    soon("an answer", line.next()).await.unwrap().unwrap();
    line.requests.send(vec![0; 5_000].into()).await.unwrap();
    let ended = soon("its end", line.next()).await.unwrap_err();
    let told = (ended.code(), ended.message());
    let words = "grpc: received message larger than max (5000 vs. 4096)";
    assert_eq!(told, (Code::ResourceExhausted, words));
}

/// What windows let in is read at once, so they bound no message that is being put together.
#[tokio::test(flavor = "multi_thread")]
async fn unfinished_requests_of_one_connection_are_bounded_together() {
    const PIECES: usize = 4;
    // The message of a call may be whole, and in one frame: it waits for the end all the same.
    for (path, size, is_whole) in [
        ("KV/Put", 100_000, false),
        ("KV/Put", 10_000, true),
        ("Lease/LeaseGrant", 4_000, true),
        ("Watch/Watch", 100_000, false),
        ("Lease/LeaseKeepAlive", 4_000, false),
    ] {
        let unfinished = PIECES * size + size / 2;
        let limits = Limits { unfinished, ..Limits::default() };
        let ours = Ours::start_with(|endpoint| endpoint.limits(limits)).await;
        let stream = TcpStream::connect(ours.address).await.unwrap();
        let (client, connection) = h2::client::handshake(stream).await.unwrap();
        let connection = tokio::spawn(connection);
        let url = format!("http://{}/etcdserverpb.{path}", ours.address);
        let prefix = [&[0][..], &u32::try_from(size).unwrap().to_be_bytes()].concat();
        // Fields that such messages may have: none of them ends its call before it is read.
        let filled = |bytes: usize| [0x08, 7].repeat(bytes / 2);
        // Sends a request without its end, or the beginning of one, in pieces that split its length.
        let begin = async || {
            let request = Request::post(&url).header("content-type", "application/grpc");
            let mut client = client.clone().ready().await.unwrap();
            let (answer, mut body) = client.send_request(request.body(()).unwrap(), false).unwrap();
            let pieces = if is_whole {
                vec![[&prefix[..], &filled(size)].concat()]
            } else {
                vec![prefix[..3].to_vec(), prefix[3..].to_vec(), filled(100)]
            };
            for piece in pieces {
                body.send_data(piece.into(), false).unwrap();
            }
            (answer, body)
        };
        // The status that a call ends with, in its head or after its body.
        let end = async |answer: h2::client::ResponseFuture| {
            let answer = soon("an answer", answer).await.unwrap();
            if let Some(status) = answer.headers().get("grpc-status") {
                return status.clone();
            }
            let mut body = answer.into_body();
            while soon("an answer's body", body.data()).await.is_some() {}
            let trailers = soon("its end", body.trailers()).await.unwrap().unwrap();
            trailers["grpc-status"].clone()
        };
        let mut held = Vec::new();
        for _ in 0..PIECES {
            held.push(begin().await);
        }
        let (refused, _body) = begin().await;
        assert_eq!(end(refused).await, "8", "{path}: one too many");
        let (_, mut first) = held.remove(0);
        first.send_reset(h2::Reason::CANCEL);
        soon("one that ended gives its room back", async {
            loop {
                let (answer, mut body) = begin().await;
                let rest = if is_whole { 0 } else { size - 100 };
                body.send_data(filled(rest).into(), true).unwrap();
                if end(answer).await != "8" {
                    break;
                }
            }
        })
        .await;
        connection.abort();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unfinished_bodies_of_one_connection_are_bounded_together() {
    let limits = Limits { unfinished: 2_500, ..Limits::default() };
    let ours = Ours::start_with(|endpoint| endpoint.limits(limits)).await;
    let stream = TcpStream::connect(ours.address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let url = format!("http://{}/v2/keys/a", ours.address);
    let begin = async || {
        let request = Request::put(&url)
            .header("content-type", "application/x-www-form-urlencoded")
            .header("content-length", 1_000);
        let mut client = client.clone().ready().await.unwrap();
        let (answer, mut body) = client.send_request(request.body(()).unwrap(), false).unwrap();
        body.send_data("value=".into(), false).unwrap();
        (answer, body)
    };
    let (first, mut body) = begin().await;
    let (_second, _body) = begin().await;
    let (refused, _body) = begin().await;
    let refused = soon("one too many", refused).await.unwrap();
    assert_eq!(refused.status(), StatusCode::INTERNAL_SERVER_ERROR);
    let told = soon("why", refused.into_body().data()).await.unwrap().unwrap();
    let told = String::from_utf8_lossy(&told).into_owned();
    assert!(told.starts_with("{\"errorCode\":300,"), "{told}");
    assert!(told.contains("\"cause\":\"etcdserver: too many requests\""), "{told}");
    body.send_data("x".repeat(994).into(), true).unwrap();
    assert_eq!(soon("the first", first).await.unwrap().status(), StatusCode::CREATED);
    let (third, mut body) = begin().await;
    body.send_data("x".repeat(994).into(), true).unwrap();
    assert_eq!(soon("there is room again", third).await.unwrap().status(), StatusCode::OK);
    connection.abort();
}

/// What does not say how long it is has room for what has come of it.
#[tokio::test(flavor = "multi_thread")]
async fn unfinished_bodies_of_no_said_length_count_as_what_has_come() {
    const PUTS: usize = 100;
    let limits = Limits { unfinished: PUTS * (64 << 10), ..Limits::default() };
    let ours = Ours::start_with(|endpoint| endpoint.limits(limits)).await;
    let stream = TcpStream::connect(ours.address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let begin = async |number: usize| {
        let url = format!("http://{}/v2/keys/{number}", ours.address);
        let request = Request::put(url).header("content-type", "application/x-www-form-urlencoded");
        let mut client = client.clone().ready().await.unwrap();
        let (answer, mut body) = client.send_request(request.body(()).unwrap(), false).unwrap();
        body.send_data("value=".into(), false).unwrap();
        (answer, body)
    };
    let mut held = Vec::new();
    for number in 0..PUTS {
        held.push(begin(number).await);
    }
    let (refused, _body) = begin(PUTS).await;
    let refused = soon("one too many", refused).await.unwrap();
    assert_eq!(refused.status(), StatusCode::INTERNAL_SERVER_ERROR);
    for (answer, mut body) in held {
        body.send_data("x".into(), true).unwrap();
        assert_eq!(soon("an answer", answer).await.unwrap().status(), StatusCode::CREATED);
    }
    connection.abort();
}

/// etcd says it when most of its cluster is gone, we when a request is too large: but for the cause it is the same answer.
#[tokio::test(flavor = "multi_thread")]
async fn what_fails_inside_is_told_to_v2_as_by_etcd() {
    let mut cluster = etcd::Cluster::start_with(3, &["--enable-v2=true"]).await;
    cluster.node_mut(1).kill();
    cluster.node_mut(2).kill();
    let ours = Ours::start().await;
    let failed = async |address: SocketAddr, value: &str| {
        let form = Some("application/x-www-form-urlencoded");
        let body = format!("value={value}");
        let bytes = http::request(address, "PUT", "/v2/keys/a", form, body.as_bytes());
        let mut connection = Connection::open(address).await.unwrap();
        let answer = soon("an answer", connection.exchange(&bytes)).await.unwrap();
        let text = answer.text();
        let (before, rest) = text.split_once("\"cause\":\"etcdserver: ").expect(&text);
        let (cause, after) = rest.split_once('"').expect(&text);
        let headers = ["content-type", "x-etcd-index"].map(|name| answer.header(name));
        let headers = headers.map(|value| value.map(str::to_owned));
        (cause.to_owned(), (answer.status, headers, format!("{before}{after}")))
    };
    let (cause, etcds) = failed(cluster.node(0).address(), "1").await;
    assert_eq!((cause.as_str(), etcds.0), ("request timed out", 500));
    let (cause, told) = failed(ours.address, &"x".repeat(2 << 20)).await;
    assert_eq!(cause, "request is too large");
    assert_eq!(told, etcds);
}
