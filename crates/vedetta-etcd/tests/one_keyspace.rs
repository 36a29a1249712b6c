//! One keyspace, one revision sequence: what v2 writes v3 sees under the same number, and the other way
//! round.

mod support;

use std::time::Duration;

use prost_reflect::{DynamicMessage, Value};
use serde_json::{Value as Json, json};
use support::grpc::{self, Client, Line, message};
use support::http::{Answer, Connection, request};
use support::{Ours, program, soon};

/// Our server, with a client of each API.
struct Talk {
    ours: Ours,
    v3: Client,
}

/// An event, as far as the stories go: what, key, value, revision.
type Told = (&'static str, String, String, i64);

impl Talk {
    async fn start() -> Self {
        let ours = Ours::start().await;
        let v3 = Client::connect(ours.address).await.unwrap();
        Self { ours, v3 }
    }

    async fn v2(&self, method: &str, target: &str, form: &str) -> Answer {
        let kind = Some("application/x-www-form-urlencoded");
        let bytes =
            request(self.ours.address, method, &format!("/v2/keys{target}"), kind, form.as_bytes());
        let mut connection = Connection::open(self.ours.address).await.unwrap();
        soon(target, connection.exchange(&bytes)).await.unwrap()
    }

    /// The node of an answer, which must be a good one.
    async fn node(&self, method: &str, target: &str, form: &str) -> Json {
        let answer = self.v2(method, target, form).await;
        assert!(answer.status < 300, "{method} {target}: {}", answer.text());
        serde_json::from_slice::<Json>(&answer.body).unwrap()["node"].clone()
    }

    async fn call(&mut self, path: &str, fields: &[(&str, Value)]) -> DynamicMessage {
        let mut asked = grpc::request(path);
        for (name, value) in fields {
            asked.set_field_by_name(name, value.clone());
        }
        soon(path, self.v3.unary(path, &asked)).await.unwrap()
    }

    async fn put(&mut self, key: &str, value: &str) -> i64 {
        let done = self.call("KV/Put", &[("key", text(key)), ("value", text(value))]).await;
        revision(&done)
    }

    /// Keys from one on up to another: key, value, created, modified, version, lease.
    async fn range(&mut self, from: &str, to: &str) -> Vec<(String, String, [i64; 4])> {
        let found = self.call("KV/Range", &[("key", text(from)), ("range_end", text(to))]).await;
        let keys = found.get_field_by_name("kvs").unwrap().into_owned();
        let keys = keys.as_list().unwrap().iter().map(|key| {
            let key = key.as_message().unwrap();
            let numbers = ["create_revision", "mod_revision", "version", "lease"];
            (string(key, "key"), string(key, "value"), numbers.map(|name| number(key, name)))
        });
        keys.collect()
    }

    /// A watch of everything from `/` on, which has begun.
    async fn watch(&mut self) -> Line {
        let mut create = DynamicMessage::new(message("WatchCreateRequest"));
        create.set_field_by_name("key", text("/"));
        create.set_field_by_name("range_end", text("\0"));
        let mut asked = DynamicMessage::new(message("WatchRequest"));
        asked.set_field_by_name("create_request", Value::Message(create));
        let mut line = soon("a watch", self.v3.line("Watch/Watch", &asked)).await.unwrap();
        soon("it is created", line.next()).await.unwrap().unwrap();
        line
    }

    /// A v2 watch, which has begun.
    async fn v2_watch(&self, target: &str) -> Connection {
        let target = format!("/v2/keys{target}");
        let bytes = request(self.ours.address, "GET", &target, None, b"");
        let mut connection = Connection::open(self.ours.address).await.unwrap();
        let head = soon("a v2 watch", connection.begin(&bytes)).await.unwrap();
        assert_eq!(head.status, 200);
        connection
    }
}

async fn next(watch: &mut Line, events: usize) -> Vec<Told> {
    let mut told = Vec::new();
    while told.len() < events {
        let answer = soon("events", watch.next()).await.unwrap().expect("the watch goes on");
        let list = answer.get_field_by_name("events").unwrap().into_owned();
        told.extend(list.as_list().unwrap().iter().map(|event| {
            let event = event.as_message().unwrap();
            let put = event.get_field_by_name("type").unwrap().as_enum_number() == Some(0);
            let key = event.get_field_by_name("kv").unwrap().into_owned();
            let key = key.as_message().unwrap();
            let what = if put { "put" } else { "delete" };
            (what, string(key, "key"), string(key, "value"), number(key, "mod_revision"))
        }));
    }
    told
}

async fn v2_event(watch: &mut Connection) -> Json {
    let chunk = soon("a v2 event", watch.chunk()).await.unwrap().expect("an event");
    serde_json::from_slice(&chunk).unwrap()
}

fn text(text: &str) -> Value {
    Value::Bytes(text.to_owned().into())
}

fn string(message: &DynamicMessage, name: &str) -> String {
    String::from_utf8(message.get_field_by_name(name).unwrap().as_bytes().unwrap().to_vec())
        .unwrap()
}

fn number(message: &DynamicMessage, name: &str) -> i64 {
    message.get_field_by_name(name).unwrap().as_i64().unwrap()
}

fn revision(answer: &DynamicMessage) -> i64 {
    let header = answer.get_field_by_name("header").unwrap().into_owned();
    number(header.as_message().unwrap(), "revision")
}

fn told(what: &'static str, key: &str, value: &str, revision: i64) -> Told {
    (what, key.into(), value.into(), revision)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_v2_writes_wakes_a_v3_watcher_with_the_same_number() {
    let mut talk = Talk::start().await;
    let mut watch = talk.watch().await;
    let url = format!("http://{}/v2/keys/a", talk.ours.address);
    let mut curl = tokio::process::Command::from(program("curl"));
    let done = curl.args(["-sS", "--noproxy", "*", "-X", "PUT", "-d", "value=1", &url]).output();
    let done = soon("curl", done).await.unwrap();
    let answer: Json = serde_json::from_slice(&done.stdout).expect("curl prints the answer");
    let index = answer["node"]["modifiedIndex"].as_i64().unwrap();
    assert_eq!(next(&mut watch, 1).await, [told("put", "/a", "1", index)]);
    // A new directory is a marker, in the revision that needed it.
    let index = talk.node("PUT", "/d/e", "value=2").await["modifiedIndex"].as_i64().unwrap();
    let events = next(&mut watch, 2).await;
    assert_eq!(events, [told("put", "/d/", "", index), told("put", "/d/e", "2", index)]);
    let index =
        talk.node("DELETE", "/d?recursive=true", "").await["modifiedIndex"].as_i64().unwrap();
    let mut events = next(&mut watch, 2).await;
    events.sort();
    assert_eq!(events, [told("delete", "/d/", "", index), told("delete", "/d/e", "", index)]);
    let index = talk.node("POST", "/q", "value=3").await["createdIndex"].as_i64().unwrap();
    let name = format!("/q/{index:020}");
    assert_eq!(next(&mut watch, 2).await[1], told("put", &name, "3", index));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_v3_writes_wakes_a_v2_watcher_with_the_same_number() {
    let mut talk = Talk::start().await;
    let mut stream = talk.v2_watch("/?wait=true&recursive=true&stream=true").await;
    let first = talk.put("/x/y", "1").await;
    let event = v2_event(&mut stream).await;
    let node = json!({"key": "/x/y", "value": "1", "modifiedIndex": first, "createdIndex": first});
    assert_eq!(event, json!({"action": "set", "node": node}));
    // v3 keeps the first revision of a key where v2's set starts anew.
    let second = talk.put("/x/y", "2").await;
    let event = v2_event(&mut stream).await;
    assert_eq!(event["node"]["createdIndex"], first);
    assert_eq!(event["node"]["modifiedIndex"], second);
    assert_eq!(event["prevNode"]["value"], "1");
    let deleted = revision(&talk.call("KV/DeleteRange", &[("key", text("/x/y"))]).await);
    let event = v2_event(&mut stream).await;
    assert_eq!(
        (&event["action"], &event["node"]["modifiedIndex"]),
        (&json!("delete"), &json!(deleted))
    );
    // Its directory was there because of it only.
    assert_eq!(talk.v2("GET", "/x", "").await.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_agree_in_both_directions() {
    let mut talk = Talk::start().await;
    let set = talk.node("PUT", "/a", "value=1").await["modifiedIndex"].as_i64().unwrap();
    let put = talk.put("/a", "2").await;
    assert_eq!(put, set + 1, "one sequence");
    let node = talk.node("GET", "/a", "").await;
    assert_eq!(node, json!({"key": "/a", "value": "2", "modifiedIndex": put, "createdIndex": set}));
    let answer = talk.v2("GET", "/a", "").await;
    assert_eq!(answer.header("x-etcd-index"), Some(put.to_string().as_str()));
    // v2's set starts the key anew, and v3 sees that: created, modified, version.
    let again = talk.node("PUT", "/a", "value=3").await["createdIndex"].as_i64().unwrap();
    assert_eq!(talk.range("/a", "").await[0].2, [again, again, 1, 0]);
    // An update and a compare-and-swap do not.
    talk.node("PUT", "/a?prevExist=true", "value=4").await;
    talk.node("PUT", "/a?prevValue=4", "value=5").await;
    assert_eq!(talk.range("/a", "").await[0].2, [again, again + 2, 3, 0]);
    // A v3 compare on what v2 wrote holds in the same transaction as its write.
    let swapped = talk.v2("PUT", &format!("/a?prevIndex={}", again + 1), "value=6").await;
    assert_eq!(swapped.status, 412);
    assert_eq!(talk.v2("PUT", &format!("/a?prevIndex={}", again + 2), "value=6").await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn directories_have_markers_that_v3_sees() {
    let mut talk = Talk::start().await;
    talk.node("PUT", "/a/b/c", "value=1").await;
    talk.node("PUT", "/empty?dir=true", "").await;
    let keys = talk.range("/", "0").await;
    let names: Vec<&str> = keys.iter().map(|(key, ..)| key.as_str()).collect();
    assert_eq!(names, ["/a/", "/a/b/", "/a/b/c", "/empty/"]);
    assert!(
        keys.iter().filter(|(key, ..)| key.ends_with('/')).all(|(_, value, _)| value.is_empty())
    );
    // A marker that v3 puts is a directory in v2, and one that it deletes is not.
    talk.put("/made/", "").await;
    assert_eq!(talk.node("GET", "/made", "").await["dir"], true);
    talk.call("KV/DeleteRange", &[("key", text("/made/"))]).await;
    assert_eq!(talk.v2("GET", "/made", "").await.status, 404);
    // Without its marker a directory is there as long as something is in it.
    talk.call("KV/DeleteRange", &[("key", text("/a/b/"))]).await;
    assert_eq!(talk.node("GET", "/a/b", "").await["nodes"][0]["key"], "/a/b/c");
    assert_eq!(talk.v2("PUT", "/a/b", "value=1").await.status, 403, "still no file");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_v3_key_that_is_no_path_is_not_seen_by_v2() {
    let mut talk = Talk::start().await;
    let mut stream = talk.v2_watch("/?wait=true&recursive=true&stream=true").await;
    for key in ["plain", "/a//b", "//", "/", "/a/../b", "/./b"] {
        talk.put(key, "1").await;
    }
    let seen = talk.put("/seen", "1").await;
    let root = talk.node("GET", "/?recursive=true&sorted=true", "").await;
    let names: Vec<_> =
        root["nodes"].as_array().unwrap().iter().map(|node| node["key"].clone()).collect();
    // The directory is one without anything in it.
    assert_eq!(names, [json!("/a"), json!("/seen")], "{root}");
    assert_eq!(root["nodes"][0]["nodes"], Json::Null, "{root}");
    let event = v2_event(&mut stream).await;
    assert_eq!(event["node"]["modifiedIndex"], seen);
    // There it is all the same: its directory is not empty, and takes it along.
    let refused = talk.v2("DELETE", "/a?dir=true", "").await;
    let error: Json = serde_json::from_slice(&refused.body).unwrap();
    assert_eq!((refused.status, &error["errorCode"]), (403, &json!(108)), "{error}");
    talk.put(&"/a".repeat(513), "1").await;
    assert_eq!(talk.range("/a/", "/a0").await.len(), 3);
    talk.node("DELETE", "/a?recursive=true", "").await;
    assert_eq!(talk.range("/a/", "/a0").await, []);
    talk.put("/a//b", "1").await;
    talk.node("PUT", "/a", "dir=true&ttl=1&prevExist=true").await;
    assert_eq!(talk.range("/a/", "/a0").await.len(), 2, "the marker, and what is not seen");
    soon("the directory ends", async {
        while !talk.range("/a/", "/a0").await.is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    // A key that is the beginning of others is a directory to v2; v3 has both.
    talk.put("/both", "file").await;
    talk.put("/both/below", "1").await;
    assert_eq!(talk.node("GET", "/both", "").await["dir"], true);
    assert_eq!(talk.range("/both", "/both0").await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn watchers_of_both_are_counted() {
    let mut talk = Talk::start().await;
    let _v2 = talk.v2_watch("/?wait=true&recursive=true&stream=true").await;
    let _v3 = talk.watch().await;
    let address = talk.ours.address;
    let mut connection = Connection::open(address).await.unwrap();
    let counts = connection.exchange(&request(address, "GET", "/v2/stats/store", None, b"")).await;
    let counts = counts.unwrap();
    assert!(counts.text().contains("\"watchers\":2}"), "{}", counts.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_and_times_to_live_are_seen_from_both() {
    let mut talk = Talk::start().await;
    // A v2 time to live is a lease.
    talk.node("PUT", "/ttl", "value=1&ttl=900").await;
    let lease = talk.range("/ttl", "").await[0].2[3];
    assert!(lease > 0, "a client can say it: {lease}");
    let left = talk
        .call("Lease/LeaseTimeToLive", &[("ID", Value::I64(lease)), ("keys", Value::Bool(true))])
        .await;
    assert!((890..=900).contains(&number(&left, "TTL")), "{left:?}");
    let keys = left.get_field_by_name("keys").unwrap().into_owned();
    assert_eq!(keys.as_list().unwrap(), [text("/ttl")]);
    let mut watch = talk.v2_watch("/ttl?wait=true").await;
    talk.call("Lease/LeaseRevoke", &[("ID", Value::I64(lease))]).await;
    let event = v2_event(&mut watch).await;
    assert_eq!((&event["action"], &event["prevNode"]["value"]), (&json!("delete"), &json!("1")));
    // An id that is chosen for v3 is none that v2 would read a moment in.
    for _ in 0..64 {
        let granted = talk.call("Lease/LeaseGrant", &[("TTL", Value::I64(800))]).await;
        assert!((1..1 << 62).contains(&number(&granted, "ID")), "{granted:?}");
    }
    // A v3 lease is a time to live in v2.
    talk.call("Lease/LeaseGrant", &[("ID", Value::I64(77)), ("TTL", Value::I64(800))]).await;
    talk.call("KV/Put", &[("key", text("/leased")), ("lease", Value::I64(77))]).await;
    let node = talk.node("GET", "/leased", "").await;
    assert!((790..=800).contains(&node["ttl"].as_i64().unwrap()), "{node}");
    assert!(node["expiration"].is_string());
    // A v2 set without one takes it away, and v3 sees that.
    talk.node("PUT", "/leased", "value=2").await;
    assert_eq!(talk.range("/leased", "").await[0].2[3], 0);
    // What expires is told to both, as one revision.
    let mut v3_watch = talk.watch().await;
    let mut v2_watch = talk.v2_watch("/?wait=true&recursive=true").await;
    talk.call("Lease/LeaseGrant", &[("ID", Value::I64(78)), ("TTL", Value::I64(1))]).await;
    let done = talk.call("KV/Put", &[("key", text("/short")), ("lease", Value::I64(78))]).await;
    assert_eq!(v2_event(&mut v2_watch).await["action"], "set");
    let mut v2_watch = talk.v2_watch("/short?wait=true").await;
    let events = next(&mut v3_watch, 2).await;
    assert_eq!(events[1], told("delete", "/short", "", revision(&done) + 1));
    let event = v2_event(&mut v2_watch).await;
    assert_eq!(
        (&event["action"], &event["node"]["modifiedIndex"]),
        (&json!("expire"), &json!(events[1].3))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn history_is_one_and_compaction_ends_it_for_both() {
    let mut talk = Talk::start().await;
    let first = talk.put("/h", "1").await;
    talk.node("PUT", "/h", "value=2").await;
    let last = talk.put("/h", "3").await;
    let past = talk.v2("GET", &format!("/h?wait=true&waitIndex={first}"), "").await;
    assert!(past.text().contains("\"value\":\"1\""), "{}", past.text());
    talk.call("KV/Compact", &[("revision", Value::I64(last))]).await;
    let gone = talk.v2("GET", &format!("/h?wait=true&waitIndex={first}"), "").await;
    let error: Json = serde_json::from_slice(&gone.body).unwrap();
    assert_eq!((gone.status, &error["errorCode"]), (400, &json!(401)), "{error}");
    let cause = error["cause"].as_str().unwrap();
    assert!(cause.starts_with("the requested history has been cleared ["), "{cause}");
}
