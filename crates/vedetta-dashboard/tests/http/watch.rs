//! Watches over HTTP: nothing lost, nothing twice, nothing left behind.

use std::collections::HashSet;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use vedetta_core::Revision;
use vedetta_dashboard::Limits;
use vedetta_kv::{Op, Put, Txn};

use crate::support::{PATIENCE, Server};

#[tokio::test]
async fn a_watch_tells_puts_deletes_and_expiry_with_what_was_before() {
    let server = Server::start().await;
    let mut feed = server.watch("prefix=a", None).await;
    assert_eq!(feed.next().await.unwrap().id, Some(1), "where it starts is known at once");
    server.put("a", "one").await;
    server.put("b", "not ours").await;
    server.put("a", "two").await;
    server.json("DELETE /api/v1/kv/a", "").await;
    server.json("POST /api/v1/leases", r#"{"ttl_ms": 1000, "id": "7"}"#).await;
    server.json("PUT /api/v1/kv/a", r#"{"value": "short", "lease": "7"}"#).await;

    let mut told = Vec::new();
    while told.len() < 5 {
        let message = feed.event().await.unwrap();
        assert_eq!((message.event.as_str(), message.id), ("kv", message.data["revision"].as_u64()));
        told.push(message.data);
    }
    let first = json!({"type": "put", "key": "a", "value": "one", "created": 2, "modified": 2, "version": 1});
    assert_eq!(told[0], json!({"revision": 2, "events": [first]}));
    assert_eq!(told[1]["events"][0]["previous"]["value"], "one");
    let deleted = &told[2]["events"][0];
    assert_eq!((&deleted["type"], &deleted["key"]), (&json!("delete"), &json!("a")));
    assert_eq!(deleted["previous"]["value"], "two");
    assert_eq!(told[3]["events"][0]["lease"], "7");
    assert_eq!(told[4]["events"][0]["type"], "expire");
    server.end().await;
}

/// Everything a watcher was told: revision and key.
fn seen(data: &Value) -> Vec<(u64, String)> {
    let revision = data["revision"].as_u64().unwrap();
    let events = data["events"].as_array().unwrap().iter();
    events.map(|event| (revision, event["key"].as_str().unwrap().to_owned())).collect()
}

#[tokio::test]
async fn a_watch_cut_anywhere_resumes_without_loss_and_without_repeats() {
    let server = Server::start().await;
    let writer = tokio::spawn({
        let store = server.store.clone();
        async move {
            for n in 0..200 {
                let keys = (0..=n % 5).map(|key| format!("k{key}"));
                let puts = keys.map(|key| Op::Put(Put::new(key, n.to_string()))).collect();
                let txn = Txn { then: puts, ..Txn::default() };
                store.txn(txn).await.unwrap();
            }
        }
    });
    let (mut got, mut last) = (Vec::new(), None);
    while last.is_none_or(|last| last < 201) {
        let mut feed = server.watch("prefix=k&from=2", last).await;
        // Cut after a few messages, each time after another number of them.
        for _ in 0..3 + got.len() % 4 {
            let Some(message) = feed.event().await else { break };
            last = message.id;
            got.extend(seen(&message.data));
            if last == Some(201) {
                break;
            }
        }
    }
    writer.await.unwrap();
    let wanted: Vec<_> =
        (0..200).flat_map(|n| (0..=n % 5).map(move |key| (n + 2, format!("k{key}")))).collect();
    assert_eq!(got, wanted);
    server.until_watchers(0).await;
    server.end().await;
}

#[tokio::test]
async fn a_watch_that_needs_compacted_history_is_told_the_oldest_and_ends() {
    let server = Server::start().await;
    for _ in 0..5 {
        server.put("k", "v").await;
    }
    server.store.compact(Revision(4), true).await.unwrap();
    for (query, last) in [("key=k&from=3", None), ("prefix=", Some(2)), ("prefix=&from=6", Some(1))]
    {
        let mut feed = server.watch(query, last).await;
        let message = feed.event().await.unwrap();
        assert_eq!((message.event.as_str(), &message.data), ("compacted", &json!({"oldest": 4})));
        assert_eq!(feed.next().await, None);
    }
    let mut feed = server.watch("key=k", Some(3)).await;
    assert_eq!(feed.event().await.unwrap().id, Some(4), "the oldest itself is there");
    drop(feed);
    server.until_watchers(0).await;
    server.end().await;
}

#[tokio::test]
async fn a_quiet_watch_can_be_resumed_after_the_history_it_slept_through_is_gone() {
    let limits = Limits { sign_of_life: Duration::from_millis(10), ..Limits::default() };
    let server = Server::with(limits).await;
    let mut feed = server.watch("key=quiet", None).await;
    let mut newest = 0;
    for _ in 0..20 {
        newest = server.put("noise", "v").await;
    }
    let mut told = None;
    while told != Some(newest) {
        let message = feed.next().await.unwrap();
        assert_eq!(message.event, "", "a sign of life is no event");
        told = message.id;
    }
    drop(feed);
    server.store.compact(Revision(newest), true).await.unwrap();
    let mut feed = server.watch("key=quiet", told).await;
    let revision = server.put("quiet", "v").await;
    assert_eq!(feed.event().await.unwrap().id, Some(revision));
    server.end().await;
}

#[tokio::test]
async fn a_client_that_hangs_up_leaves_no_watcher() {
    let server = Server::start().await;
    let mut feeds = Vec::new();
    for n in 0..20 {
        feeds.push(server.watch(&format!("key=k{n}"), None).await);
    }
    server.until_watchers(20).await;
    feeds.truncate(5);
    server.until_watchers(5).await;
    drop(feeds);
    server.until_watchers(0).await;
    server.end().await;
}

#[tokio::test]
async fn stopping_ends_watches_and_finishes_what_runs() {
    let server = Server::start().await;
    let mut feed = server.watch("prefix=", None).await;
    server.until_watchers(1).await;
    // A request of which the server has the head, and still waits for the body.
    let mut half = TcpStream::connect(server.address).await.unwrap();
    let head = format!(
        "PUT /api/v1/kv/late HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n\
         Expect: 100-continue\r\nContent-Length: 14\r\n\r\n",
        server.address
    );
    half.write_all(head.as_bytes()).await.unwrap();
    let mut begun = [0; 25];
    half.read_exact(&mut begun).await.unwrap();
    assert_eq!(&begun, b"HTTP/1.1 100 Continue\r\n\r\n");

    server.stop.cancel();
    while feed.next().await.is_some() {}
    half.write_all(br#"{"value": "v"}"#).await.unwrap();
    let mut answer = String::new();
    half.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(server.store.status().revision, Revision(2));
    server.end().await;
}

#[tokio::test]
async fn a_client_that_says_nothing_or_half_a_head_or_half_a_body_is_let_go() {
    let short = Duration::from_millis(300);
    let limits = Limits { head: short, body: short, ..Limits::default() };
    let server = Server::with(limits).await;
    let half_body = format!(
        "PUT /api/v1/kv/k HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n\
         Content-Length: 100\r\n\r\n{{",
        server.address
    );
    let answered = format!("GET /healthz HTTP/1.1\r\nHost: {}\r\n\r\n", server.address);
    let mut endings = HashSet::new();
    for sent in ["", "GET / HT", "GET / HTTP/1.1\r\nHost: lo", &half_body, &answered] {
        let mut line = TcpStream::connect(server.address).await.unwrap();
        line.write_all(sent.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let closed = tokio::time::timeout(PATIENCE, line.read_to_end(&mut answer)).await;
        assert!(closed.is_ok(), "still open after {sent:?}");
        endings.insert(String::from_utf8_lossy(&answer).split(' ').nth(1).map(str::to_owned));
    }
    assert!(endings.contains(&Some("408".to_owned())) && endings.contains(&Some("200".to_owned())));
    server.end().await;
}

/// A watch whose client reads nothing, and more than the system holds for it.
async fn stuck(server: &Server) -> TcpStream {
    let mut line = TcpStream::connect(server.address).await.unwrap();
    let request = format!("GET /api/v1/watch?prefix= HTTP/1.1\r\nHost: {}\r\n\r\n", server.address);
    line.write_all(request.as_bytes()).await.unwrap();
    server.until_watchers(1).await;
    for n in 0..64 {
        let put = Put::new(format!("k{n}"), vec![b'v'; 512 << 10]);
        server.store.put(put).await.unwrap();
    }
    line
}

#[tokio::test]
async fn a_client_that_never_reads_its_watch_is_let_go() {
    let limits = Limits { stall: Duration::from_millis(300), ..Limits::default() };
    let server = Server::with(limits).await;
    let line = stuck(&server).await;
    server.until_watchers(0).await;
    drop(line);
    server.end().await;
}

#[tokio::test]
async fn a_client_that_never_reads_does_not_hold_up_a_stop() {
    let server = Server::start().await;
    let line = stuck(&server).await;
    assert_eq!(server.store.status().watchers, 1, "it has its minute");
    server.end().await;
    drop(line);
}
