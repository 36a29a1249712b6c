//! Where we differ from etcd on purpose: what it does, what we do. The reasons stand in
//! `docs/etcd-compatibility.md`, under the same names.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use axum::http::Request;
use bytes::Bytes;
use futures_util::future::join_all;
use prost_reflect::{DynamicMessage, Value};
use serde_json::Value as Json;
use testing::etcd;
use tokio::net::TcpStream;

use crate::cases::{Case, Mismatch, Servers};
use crate::support::grpc::{self, Client};
use crate::support::http::{self, Connection};
use crate::support::{Ours, soon};
use crate::{v2, v3};

/// The name of a difference, as it is documented.
type Name = &'static str;

/// The last line of the case is answered so by etcd, and so by us.
struct Difference {
    name: Name,
    lines: &'static str,
    etcd: &'static str,
    ours: &'static str,
}

impl Difference {
    fn case(&self) -> Case {
        Case {
            name: self.name.into(),
            lines: self.lines.lines().map(|line| line.trim().into()).collect(),
        }
    }

    fn check(&self, case: &Case, outcome: Result<(), Mismatch>) {
        let Err(mismatch) = outcome else { panic!("no difference any more: {}", self.name) };
        let told = mismatch.tell(case);
        assert_eq!(mismatch.at, case.lines.len() - 1, "another line differs: {told}");
        assert!(mismatch.etcd.contains(self.etcd), "etcd does not say {:?}: {told}", self.etcd);
        assert!(mismatch.ours.contains(self.ours), "we do not say {:?}: {told}", self.ours);
    }
}

const V2: &[Difference] = &[
    Difference {
        name: "a delete of a watched file or directory",
        lines: "w: GET ~/b?wait=true&stream=true
            PUT ~/b | value=one
            PUT ~/b | value=two
            DELETE ~/b
            PUT ~/b | value=end
            w~end\"",
        etcd: "\"createdIndex\":+2}}\n{\"action\":\"delete\"",
        ours: "\"createdIndex\":+2}}\n{\"action\":\"set\"",
    },
    Difference {
        name: "a delete of a watched file or directory",
        lines: "w: GET ~/b?wait=true&recursive=true&stream=true
            PUT ~/b/one | value=one
            PUT ~/b/two | value=two
            DELETE ~/b?recursive=true
            PUT ~/b/three | value=end
            w~end\"",
        etcd: "\"createdIndex\":+1}}\n{\"action\":\"delete\"",
        ours: "\"createdIndex\":+1}}\n{\"action\":\"set\"",
    },
    Difference {
        name: "hidden nodes in history",
        lines: "PUT ~/_hidden | value=1
            PUT ~/seen | value=1
            GET ~?wait=true&recursive=true&waitIndex={1}",
        etcd: "/_hidden",
        ours: "/seen",
    },
    Difference {
        name: "the time to live in an old event",
        lines: "PUT ~/a | value=1&ttl=1
            w: GET ~/a?wait=true
            w
            GET ~/a?wait=true&waitIndex={1}",
        etcd: "\"ttl\":1,",
        ours: "\"expiration\":\"<time>\",\"modifiedIndex\"",
    },
    Difference {
        name: "members",
        lines: "POST /v2/members | x=1",
        etcd: "x-etcd-cluster-id",
        ours: "405",
    },
    Difference { name: "users", lines: "GET /v2/auth/users", etcd: "200", ours: "404" },
    Difference { name: "`/metrics`", lines: "GET /metrics", etcd: "200", ours: "404" },
    // There it is silent for ever: it is waited for as long as for any answer.
    Difference {
        name: "a stream from the past",
        lines: "PUT ~/a | value=one
            PUT ~/a | value=two
            w: GET ~/a?wait=true&stream=true&waitIndex={1}
            w+
            w+",
        etcd: "no answer",
        ours: "\"two\"",
    },
    Difference {
        name: "the version",
        lines: "GET /version",
        etcd: "\"etcdcluster\":\"3.4.0\"}",
        ours: "\"etcdcluster\":\"3.4.0\",\"vedetta\":",
    },
];

const V3: &[Difference] = &[
    Difference { name: "the least lease", lines: "grant 7900 0", etcd: "TTL: 2", ours: "TTL: 1" },
    Difference {
        name: "the longest key",
        lines: "put *70000 1",
        etcd: "revision: +1",
        ours: "InvalidArgument: etcdserver: request is too large",
    },
    Difference {
        name: "a put and a delete of one key in a transaction",
        lines: "txn if then txn [ if then put ~d 1 else ] ; txn [ if then del ~d else ] else",
        etcd: "succeeded: true",
        ours: "InvalidArgument: etcdserver: duplicate key given in txn request",
    },
    Difference {
        name: "a put and a delete of one key in a transaction",
        lines: "txn if then put ~b 1 ; del ~a \\0 else",
        etcd: "succeeded: true",
        ours: "InvalidArgument: etcdserver: duplicate key given in txn request",
    },
    Difference {
        name: "peers",
        lines: "POST /v3/cluster/member/list {}",
        etcd: "\"peerURLs\":[\"http://",
        ours: "\"clientURLs\":[\"http://",
    },
    Difference {
        name: "an unknown word in JSON",
        lines: "POST /v3/kv/range {\"key\":\"<~a>\",\"sort_order\":\"SIDEWAYS\"}",
        etcd: "SIDEWAYS",
        ours: "\"header\":",
    },
    Difference {
        name: "locks and elections as calls",
        lines: "POST /v3/lock/lock {\"name\":\"<~lock>\"}",
        etcd: "200",
        ours: "404",
    },
    Difference {
        name: "cluster calls",
        lines: "POST /v3/cluster/member/add {}",
        etcd: "given member URLs are invalid",
        ours: "404",
    },
    Difference {
        name: "cluster calls",
        lines: "POST /v3/maintenance/transfer-leadership {}",
        etcd: "etcdserver",
        ours: "404",
    },
    Difference {
        name: "users and roles",
        lines: "POST /v3/auth/user/list {}",
        etcd: "200",
        ours: "404",
    },
    // There it is not told: it is waited for as long as for any answer.
    Difference {
        name: "a delete at the compaction",
        lines: "put ~a 1
            del ~a
            compact {2} physical
            s> watch ~ ~\\xff start_revision={2}
            s
            s*1",
        etcd: "no answer",
        ours: "mod_revision: +2",
    },
    // It is the last: after it there is no etcd any more.
    Difference {
        name: "an unknown sort target",
        lines: "put ~a 1
            range ~ ~\\xff sort_order=ASCEND sort_target=9",
        etcd: "Un",
        ours: "count: 1",
    },
];

const PAGE: &str = include_str!("../../../../docs/etcd-compatibility.md");
/// What stands there for what is shown here.
const HERE: &str = "the suite";

/// A row of the documentation.
struct Row<'a> {
    name: &'a str,
    cells: Vec<&'a str>,
    shown_by: &'a str,
}

/// The rows of all its tables.
fn rows() -> Vec<Row<'static>> {
    let rows = PAGE.lines().filter_map(|line| {
        let cells: Vec<_> = line.strip_prefix('|')?.strip_suffix('|')?.split('|').collect();
        let cells: Vec<_> = cells.into_iter().map(str::trim).collect();
        let (name, shown_by) = (*cells.first()?, *cells.last()?);
        (name != "what" && name != "---").then_some(Row { name, cells, shown_by })
    });
    rows.collect()
}

/// The Rust files of a folder, as text.
fn sources(folder: &Path, text: &mut String) {
    for entry in fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            text.push_str(&fs::read_to_string(&path).expect("a source is text"));
        }
    }
}

#[test]
fn every_documented_difference_has_a_reason_and_something_that_shows_it() {
    let mut tests = String::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests"), &mut tests);
    let mut faults = Vec::new();
    let rows = rows();
    for Row { name, cells, shown_by } in &rows {
        if cells.len() != 5 || cells.iter().any(|cell| cell.is_empty()) {
            faults.push(format!("{name}: not five cells with something in each"));
        }
        let test = shown_by.trim_matches('`');
        if *shown_by != HERE && !tests.contains(&format!("fn {test}()")) {
            faults.push(format!("{name}: there is no test {test}"));
        }
    }
    assert!(rows.len() >= 40, "only {} rows were found", rows.len());
    assert!(faults.is_empty(), "docs/etcd-compatibility.md:\n  {}", faults.join("\n  "));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_differences_are_those_that_are_documented() {
    let servers = Servers::start().await;
    if servers.ours().is_none() {
        return; // an etcd does not differ from itself
    }
    let mut shown: Vec<Name> = Vec::new();
    let mut pair = v2::Pair::new(servers.addresses(), None);
    what_comes_on_a_stream_from_the_past(&mut pair).await;
    for difference in V2 {
        let case = difference.case();
        difference.check(&case, pair.run(&case).await);
        shown.push(difference.name);
    }
    shown.extend([
        the_length_of_history(&mut pair).await,
        the_deepest_path(&mut pair).await,
        the_longest_key_and_value(&servers, &mut pair).await,
        keys_of_the_other_api(&servers).await,
        health_over_grpc(&servers).await,
        statistics(&servers).await,
        pages_of_other_sites(&servers).await,
        unsorted_listings(&servers).await,
        the_address_for_peers(&servers).await,
        raft_index(&servers).await,
        http2(&servers).await,
        what_is_no_http(&servers).await,
        words_about_json(&servers).await,
        long_messages(&servers).await,
    ]);
    shown.extend(a_burst_of_events(&servers).await);
    shown.extend(one_keyspace(&servers).await);
    shown.push(hashes(&servers).await);
    shown.extend(sizes_and_defragmenting(&servers).await);
    let mut pair = v3::Pair::new(servers.addresses(), None).await;
    shown.push(transactions_in_transactions(&mut pair).await);
    for difference in V3 {
        let case = difference.case();
        difference.check(&case, pair.run(&case).await);
        shown.push(difference.name);
    }
    let rows = rows();
    let here = rows.iter().filter(|row| row.shown_by == HERE).map(|row| row.name);
    let (shown, documented) = (BTreeSet::from_iter(shown), here.collect::<BTreeSet<_>>());
    assert_eq!(shown, documented, "shown here, and documented as shown here");
}

/// A request on a connection of its own.
async fn ask(address: SocketAddr, method: &str, target: &str, body: &str) -> http::Answer {
    let form = Some("application/x-www-form-urlencoded");
    let bytes = http::request(address, method, target, form, body.as_bytes());
    let mut connection = Connection::open(address).await.unwrap();
    soon(target, connection.exchange(&bytes)).await.unwrap()
}

async fn json(address: SocketAddr, method: &str, target: &str, body: &str) -> Json {
    let answer = ask(address, method, target, body).await;
    serde_json::from_slice(&answer.body).unwrap_or_else(|_| panic!("{target}: {}", answer.text()))
}

/// 1,000 events there; here all, until they are compacted.
async fn the_length_of_history(pair: &mut v2::Pair) -> Name {
    let lines =
        ["PUT ~/first | value=1", "*1000 PUT ~/b | value=1", "GET ~/first?wait=true&waitIndex={1}"];
    let difference = Difference {
        name: "the length of history",
        lines: "",
        etcd: "\"errorCode\":401",
        ours: "\"key\":",
    };
    let case = Case { name: difference.name.into(), lines: lines.map(Into::into).into() };
    difference.check(&case, pair.run(&case).await);
    difference.name
}

/// Beyond what the difference shows: also what happens later.
async fn what_comes_on_a_stream_from_the_past(pair: &mut v2::Pair) {
    let lines = [
        "PUT ~/a | value=one",
        "PUT ~/a | value=two",
        "w: GET ~/a?wait=true&stream=true&waitIndex={1}",
        "w+",
        "w+",
        "PUT ~/a | value=three",
        "w+",
    ];
    let told = pair.run_ours(&lines).await;
    assert!(told[3].contains("\"one\"") && told[4].contains("\"two\""), "{told:?}");
    assert!(told[6].contains("\"three\""), "{told:?}");
}

async fn the_deepest_path(pair: &mut v2::Pair) -> Name {
    let difference =
        Difference { name: "the deepest path", lines: "", etcd: "201", ours: "\"errorCode\":210" };
    // `~` is a name, and a `POST` gives one.
    for (method, names) in [("PUT", 512), ("POST", 511)] {
        let lines = vec![format!("{method} ~{} | value=1", "/d".repeat(names))];
        let case = Case { name: difference.name.into(), lines };
        difference.check(&case, pair.run(&case).await);
    }
    difference.name
}

async fn transactions_in_transactions(pair: &mut v3::Pair) -> Name {
    let difference = Difference {
        name: "transactions in transactions",
        lines: "",
        etcd: "succeeded: true",
        ours: "InvalidArgument: transactions are nested more than 32 deep",
    };
    let deep = |levels: usize| {
        let put = "put ~a 1".to_owned();
        let ops = (1..levels).fold(put, |ops, _| format!("txn [ if then {ops} else ]"));
        Case { name: difference.name.into(), lines: vec![format!("txn if then {ops} else")] }
    };
    let case = deep(32);
    pair.run(&case).await.unwrap_or_else(|mismatch| panic!("{}", mismatch.tell(&case)));
    let case = deep(33);
    difference.check(&case, pair.run(&case).await);
    difference.name
}

async fn the_longest_key_and_value(servers: &Servers, pair: &mut v2::Pair) -> Name {
    let difference = Difference {
        name: "the longest key and value",
        lines: "",
        etcd: "201",
        ours: "request is too large",
    };
    let lines = vec![format!("PUT ~/a | value={}", "x".repeat(2 << 20))];
    let case = Case { name: difference.name.into(), lines };
    difference.check(&case, pair.run(&case).await);
    let [etcd, ours] = servers.addresses();
    let long = format!("/v2/keys/{}", "k".repeat(100_000));
    let value = format!("value={}", "x".repeat(5 << 20));
    assert_eq!(ask(etcd, "PUT", "/v2/keys/large", &value).await.status, 201);
    // It takes a longer first line for no HTTP, and hangs up.
    let longer = http::request(etcd, "PUT", &long[..5_000], None, b"");
    let mut connection = Connection::open(etcd).await.unwrap();
    assert!(soon("an end", connection.exchange(&longer)).await.is_err());
    assert_eq!(ask(ours, "PUT", &long[..5_000], "value=1").await.status, 201);
    // What they begin with is enough to refuse them: the rest would meet a closed door.
    for (target, body, status) in [(&long[..], "value=1", 414), ("/v2/keys/large", &value, 413)] {
        let bytes = http::request(ours, "PUT", target, None, body.as_bytes());
        let head = bytes.windows(4).position(|end| end == b"\r\n\r\n").expect("a head") + 4;
        let mut connection = Connection::open(ours).await.unwrap();
        let refused = soon(target, connection.exchange(&bytes[..head])).await.unwrap();
        assert_eq!(refused.status, status, "{}", refused.text());
        assert!(!refused.text().contains("errorCode"), "{}", refused.text());
    }
    difference.name
}

async fn keys_of_the_other_api(servers: &Servers) -> Name {
    let [etcd, ours] = servers.addresses();
    for (address, count) in [(etcd, Json::Null), (ours, "1".into())] {
        ask(address, "PUT", "/v2/keys/other", "value=1").await;
        // The v3 key `/other`.
        let found = json(address, "POST", "/v3/kv/range", "{\"key\":\"L290aGVy\"}").await;
        assert_eq!(found["count"], count, "{found}");
    }
    "keys of the other API"
}

async fn health_over_grpc(servers: &Servers) -> Name {
    let check = async |address: SocketAddr| {
        let mut client = Client::connect(address).await.unwrap();
        soon("a check", client.plain("/grpc.health.v1.Health/Check", Bytes::new())).await
    };
    let [etcd, ours] = servers.addresses();
    // The message says that it serves.
    assert_eq!(check(etcd).await.unwrap(), &b"\x08\x01"[..]);
    assert_eq!(check(ours).await.unwrap_err().code(), tonic::Code::Unimplemented);
    "`grpc.health.v1.Health`"
}

/// One request of each kind that is done, and one that is refused.
async fn statistics(servers: &Servers) -> Name {
    const REQUESTS: &[(&str, &str, &str, bool)] = &[
        ("PUT", "/counted", "value=1", true),
        ("PUT", "/counted/below", "value=1", false),
        ("GET", "/counted", "", true),
        ("GET", "/uncounted", "", false),
        ("PUT", "/counted?prevExist=true", "value=2", true),
        ("PUT", "/uncounted?prevExist=true", "value=2", false),
        ("PUT", "/counting?prevExist=false", "value=1", true),
        ("PUT", "/counting?prevExist=false", "value=1", false),
        ("POST", "/counts", "value=1", true),
        ("POST", "/counted", "value=1", false),
        ("PUT", "/counted?prevValue=2", "value=3", true),
        ("PUT", "/counted?prevValue=2", "value=3", false),
        ("DELETE", "/counted?prevValue=2", "", false),
        ("DELETE", "/counted?prevValue=3", "", true),
        ("DELETE", "/counting", "", true),
        ("DELETE", "/counting", "", false),
    ];
    let counted = async |address: SocketAddr| {
        let stats = async || json(address, "GET", "/v2/stats/store", "").await;
        let before = stats().await;
        for (method, key, form, done) in REQUESTS {
            let answer = ask(address, method, &format!("/v2/keys{key}"), form).await;
            assert_eq!(answer.status < 300, *done, "{method} {key}: {}", answer.text());
        }
        let after = stats().await;
        let since = |name: &str| after[name].as_u64().unwrap() - before[name].as_u64().unwrap();
        ["gets", "sets", "update", "create", "compareAndSwap", "compareAndDelete", "delete"]
            .map(|verb| (since(&format!("{verb}Success")), since(&format!("{verb}Fail"))))
    };
    let [etcd, ours] = servers.addresses();
    // A `POST` is a create, too.
    let each = [(1, 1), (1, 1), (1, 1), (2, 2), (1, 1), (1, 1), (1, 1)];
    assert_eq!(counted(ours).await, each);
    let mut etcds = counted(etcd).await;
    // It looks up for itself whether there are users, with every request.
    assert!(etcds[0].1 > 1, "{etcds:?}");
    etcds[0].1 = 1;
    // Its `POST` that was refused is a set that was refused, too, and its compare-and-delete one that was done.
    assert_eq!((etcds[1], etcds[5]), ((1, 2), (2, 0)));
    (etcds[1], etcds[5]) = ((1, 1), (1, 1));
    assert_eq!(etcds, each, "all else is counted as here");
    "what is counted in the statistics"
}

async fn pages_of_other_sites(servers: &Servers) -> Name {
    let [etcd, ours] = servers.addresses();
    let etcd = http::get(etcd, "/v2/keys").await.unwrap();
    assert_eq!(etcd.header("access-control-allow-origin"), Some("*"));
    let answer = http::get(ours, "/v2/keys").await.unwrap();
    assert_eq!(answer.header("access-control-allow-origin"), None);
    let mut connection = http::Connection::open(ours).await.unwrap();
    let foreign = b"GET /v2/keys HTTP/1.1\r\nHost: localhost\r\nOrigin: http://elsewhere\r\n\r\n";
    assert_eq!(connection.exchange(foreign).await.unwrap().status, 403);
    let renamed = b"GET /v2/keys HTTP/1.1\r\nHost: elsewhere\r\n\r\n";
    assert_eq!(connection.exchange(renamed).await.unwrap().status, 421);
    "pages of other sites"
}

/// A map there, so that forty names are in order once in a very long time.
async fn unsorted_listings(servers: &Servers) -> Name {
    let [etcd, ours] = servers.addresses();
    let listed = async |address: SocketAddr| {
        for number in (10..50).rev() {
            ask(address, "PUT", &format!("/v2/keys/unsorted/{number}"), "value=1").await;
        }
        let answer = json(address, "GET", "/v2/keys/unsorted", "").await;
        let nodes = answer["node"]["nodes"].as_array().expect("a listing").iter();
        let keys = nodes.map(|node| node["key"].as_str().expect("a key").to_owned());
        keys.collect::<Vec<_>>()
    };
    let (etcd, ours) = (listed(etcd).await, listed(ours).await);
    assert!(!etcd.is_sorted() && ours.is_sorted(), "{etcd:?} {ours:?}");
    assert_eq!(BTreeSet::from_iter(etcd), BTreeSet::from_iter(ours));
    "unsorted listings"
}

async fn the_address_for_peers(servers: &Servers) -> Name {
    let [etcd, ours] = servers.addresses();
    for (address, same) in [(etcd, false), (ours, true)] {
        let members = json(address, "GET", "/v2/members", "").await;
        let member = &members["members"][0];
        assert_eq!(member["clientURLs"][0], format!("http://{address}"));
        assert_eq!(member["peerURLs"] == member["clientURLs"], same, "{member}");
    }
    "the address for peers"
}

/// There, v3's writes are in the log, too.
async fn raft_index(servers: &Servers) -> Name {
    let [etcd, ours] = servers.addresses();
    for (address, same) in [(etcd, false), (ours, true)] {
        ask(address, "POST", "/v3/kv/put", "{\"key\":\"cg==\"}").await;
        let answer = ask(address, "PUT", "/v2/keys/raft", "value=1").await;
        let indexes = ["x-raft-index", "x-etcd-index"].map(|name| answer.header(name).unwrap());
        assert_eq!(indexes[0] == indexes[1], same, "{indexes:?}");
    }
    "`X-Raft-Index`"
}

async fn http2(servers: &Servers) -> Name {
    let get = async |address: SocketAddr| {
        let stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
        let begun = h2::client::handshake(stream).await;
        let (mut client, connection) = begun.map_err(|error| error.to_string())?;
        let connection = tokio::spawn(connection);
        let request = Request::get(format!("http://{address}/v2/keys")).body(()).unwrap();
        let (answer, _) = client.send_request(request, true).map_err(|error| error.to_string())?;
        let answer = soon("an answer over HTTP/2", answer).await;
        connection.abort();
        answer.map(|answer| answer.status().as_u16()).map_err(|error| error.to_string())
    };
    let [etcd, ours] = servers.addresses();
    let (etcd, ours) = (get(etcd).await, get(ours).await);
    assert!(etcd != Ok(200) && ours == Ok(200), "{etcd:?} {ours:?}");
    "HTTP/2"
}

async fn what_is_no_http(servers: &Servers) -> Name {
    let refused = async |address: SocketAddr| {
        let mut connection = Connection::open(address).await.unwrap();
        let bytes = b"GET /v2/keys HTTP/1.1\r\nHost: localhost\r\nno colon\r\n\r\n";
        soon("an answer", connection.exchange(bytes)).await.unwrap()
    };
    let [etcd, ours] = servers.addresses();
    let (etcd, ours) = (refused(etcd).await, refused(ours).await);
    assert_eq!((etcd.status, ours.status), (400, 400));
    assert_ne!(etcd.text(), ours.text());
    "what is no HTTP"
}

async fn words_about_json(servers: &Servers) -> Name {
    let [etcd, ours] = servers.addresses();
    let [etcd, ours] = join_all(
        [etcd, ours].map(|address| json(address, "POST", "/v3/kv/range", "{\"key\":nonsense}")),
    )
    .await
    .try_into()
    .expect("two were asked");
    assert_eq!((&etcd["code"], &ours["code"]), (&Json::from(3), &Json::from(3)));
    assert_ne!(etcd["error"], ours["error"]);
    "words about JSON that cannot be read"
}

/// The statistics, when so many watch: the watchers of others are gone once their connections are.
async fn watchers(address: SocketAddr, count: u64) -> Json {
    soon("who still watches", async {
        loop {
            let stats = json(address, "GET", "/v2/stats/store", "").await;
            if stats["watchers"] == count {
                break stats;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
}

/// A key or a value as it is in JSON.
fn in_json(text: &str) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(text)
}

/// What v3 has from a key on up to another, or at the one.
async fn range(address: SocketAddr, key: &str, end: &str) -> Json {
    let body = format!("{{\"key\":\"{}\",\"range_end\":\"{}\"}}", in_json(key), in_json(end));
    json(address, "POST", "/v3/kv/range", &body).await
}

/// Puts with v3, and answers the revision.
async fn put(address: SocketAddr, key: &str, lease: i64) -> String {
    let body = format!("{{\"key\":\"{}\",\"lease\":\"{lease}\"}}", in_json(key));
    let done = json(address, "POST", "/v3/kv/put", &body).await;
    done["header"]["revision"].as_str().unwrap_or_else(|| panic!("{done}")).to_owned()
}

/// What one API writes and the other sees, or does not see.
async fn one_keyspace(servers: &Servers) -> [Name; 7] {
    let [etcd, ours] = servers.addresses();
    for (address, is_one) in [(etcd, false), (ours, true)] {
        let node = async |target: &str| {
            json(address, "GET", &format!("/v2/keys/one/{target}"), "").await["node"].clone()
        };
        ask(address, "PUT", "/v2/keys/one/dir/file", "value=1").await;
        let marker = range(address, "/one/dir/", "").await;
        assert_eq!(marker["count"] == "1", is_one, "{marker}");

        put(address, "/one/pathless//b", 0).await;
        put(address, "/one/.", 0).await;
        let above = node("pathless").await;
        assert_eq!(above["dir"] == true, is_one, "{above}");
        assert_eq!(above["nodes"], Json::Null, "what is no path is seen by neither");
        let refused = json(address, "DELETE", "/v2/keys/one/pathless?dir=true", "").await;
        assert_eq!(refused["errorCode"], if is_one { 108 } else { 100 }, "{refused}");
        ask(address, "DELETE", "/v2/keys/one/pathless?recursive=true", "").await;
        let left = range(address, "/one/pathless//b", "").await;
        assert_eq!(left["count"] == "1", !is_one, "{left}");

        put(address, "/one/both", 0).await;
        put(address, "/one/both/below", 0).await;
        assert_eq!(range(address, "/one/both", "/one/both0").await["count"], "2");
        let both = node("both").await;
        assert_eq!(both["dir"] == true, is_one, "{both}");

        ask(address, "PUT", "/v2/keys/one/set", "value=1").await;
        ask(address, "PUT", "/v2/keys/one/set", "value=2").await;
        let set = range(address, "/one/set", "").await;
        let (key, created) = (&set["kvs"][0], node("set").await["createdIndex"].to_string());
        let begins = (&key["create_revision"], &key["version"]);
        let anew = (&Json::from(created), &Json::from("1"));
        assert_eq!(begins == anew, is_one, "{set}");
        assert_eq!(set["kvs"].is_null(), !is_one, "{set}");

        let held = async || {
            let leases = json(address, "POST", "/v3/lease/leases", "{}").await;
            leases["leases"].as_array().map_or(0, Vec::len)
        };
        let before = held().await;
        ask(address, "PUT", "/v2/keys/one/ttl", "value=1&ttl=900").await;
        assert_eq!(held().await - before, usize::from(is_one));
        ask(address, "DELETE", "/v2/keys/one/ttl", "").await;
        json(address, "POST", "/v3/lease/grant", "{\"TTL\":\"800\",\"ID\":\"7777\"}").await;
        put(address, "/one/leased", 7777).await;
        let node = node("leased").await;
        assert_eq!(node["ttl"].is_u64() && node["expiration"].is_string(), is_one, "{node}");
        json(address, "POST", "/v3/lease/revoke", "{\"ID\":\"7777\"}").await;

        let first = json(address, "PUT", "/v2/keys/one/past", "value=1").await;
        let first = first["node"]["modifiedIndex"].as_u64().expect("an index");
        let revision = put(address, "/one/now", 0).await;
        let compact = format!("{{\"revision\":\"{revision}\"}}");
        assert_eq!(ask(address, "POST", "/v3/kv/compaction", &compact).await.status, 200);
        let target = format!("/v2/keys/one/past?wait=true&waitIndex={first}");
        let past = json(address, "GET", &target, "").await;
        assert_eq!(past["errorCode"] == 401, is_one, "{past}");
        assert_eq!(past["node"]["value"] == "1", !is_one, "{past}");

        watchers(address, 0).await;
        let create = format!("{{\"create_request\":{{\"key\":\"{}\"}}}}", in_json("/one"));
        let bytes = http::request(address, "POST", "/v3/watch", None, create.as_bytes());
        let mut watch = Connection::open(address).await.unwrap();
        assert_eq!(soon("a watch", watch.begin(&bytes)).await.unwrap().status, 200);
        soon("it begins", watch.chunk()).await.unwrap().expect("a line");
        let stats = json(address, "GET", "/v2/stats/store", "").await;
        assert_eq!(stats["watchers"], u64::from(is_one), "{stats}");
    }
    [
        "directories",
        "a v3 key that is no path",
        "a v3 key that is the beginning of others",
        "`create_revision` after a v2 `set`",
        "a v2 TTL",
        "compaction by v3",
        "`watchers` in the statistics of v2",
    ]
}

/// Longer than any that makes sense, and no longer than a message may be there.
async fn long_messages(servers: &Servers) -> Name {
    let mut create = DynamicMessage::new(grpc::message("WatchCreateRequest"));
    create.set_field_by_name("key", Value::Bytes(vec![b'k'; 140_000].into()));
    let mut watch = grpc::request("Watch/Watch");
    watch.set_field_by_name("create_request", Value::Message(create));
    let mut keep = grpc::request("Lease/LeaseKeepAlive");
    keep.set_field_by_name("ID", Value::I64(7));
    let [etcd, ours] = servers.addresses();
    for (address, is_taken) in [(etcd, true), (ours, false)] {
        let mut v3 = Client::connect(address).await.unwrap();
        let told = async |line: &mut grpc::Line| match soon("an answer", line.next()).await {
            Ok(answer) => answer.map(|_| tonic::Code::Ok),
            Err(status) => Some(status.code()),
        };
        let code = if is_taken { tonic::Code::Ok } else { tonic::Code::ResourceExhausted };
        let mut line = v3.line("Watch/Watch", &watch).await.unwrap();
        assert_eq!(told(&mut line).await, Some(code), "a watch");
        let mut line = v3.line("Lease/LeaseKeepAlive", &keep).await.unwrap();
        assert_eq!(told(&mut line).await, Some(tonic::Code::Ok));
        // The same id, over and over.
        line.requests.send([0x08, 7].repeat(2_500).into()).await.unwrap();
        assert_eq!(told(&mut line).await, Some(code), "a sign of life");
    }
    "a message about a watch or a lease"
}

/// Keys that end together: there, whoever watches them is dropped when a hundred are unread.
async fn a_burst_of_events(servers: &Servers) -> [Name; 2] {
    const KEYS: usize = 1_000;
    const AT_ONCE: usize = 8;
    let expired = async |address: SocketAddr| {
        let target = "/v2/keys/burst?wait=true&recursive=true&stream=true";
        let mut stream = Connection::open(address).await.unwrap();
        let bytes = http::request(address, "GET", target, None, b"");
        // Nothing is read before all has happened.
        assert_eq!(soon("a stream", stream.begin(&bytes)).await.unwrap().status, 200);
        // By several at once, so that they end as close together as they were set.
        let put = async |from: usize| {
            let mut connection = Connection::open(address).await.unwrap();
            let form = Some("application/x-www-form-urlencoded");
            for number in (from..KEYS).step_by(AT_ONCE) {
                let target = format!("/v2/keys/burst/{number}");
                let bytes = http::request(address, "PUT", &target, form, b"value=1&ttl=2");
                soon("a put", connection.exchange(&bytes)).await.unwrap();
            }
        };
        join_all((0..AT_ONCE).map(put)).await;
        soon("all of them end", async {
            while json(address, "GET", "/v2/keys/burst", "").await["node"]["nodes"].is_array() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
        stream
    };
    let [etcd, ours] = servers.addresses();
    let (dropped, mut stream) = tokio::join!(expired(etcd), expired(ours));
    let (etcd, ours) = (watchers(etcd, 0).await, watchers(ours, 1).await);
    drop(dropped);
    let mut events = 0;
    while events < 2 * KEYS {
        let chunk = soon("an event", stream.chunk()).await.unwrap().expect("the stream goes on");
        events += chunk.split(|byte| *byte == b'\n').count() - 1;
    }
    assert!(etcd["expireCount"].as_u64() >= Some(KEYS as u64), "{etcd}");
    assert_eq!(ours["expireCount"], 0);
    ["a burst of events", "`expireCount` in the statistics"]
}

async fn hashes(servers: &Servers) -> Name {
    let [etcd, ours] = servers.addresses();
    let (etcd, ours) = (
        json(etcd, "POST", "/v3/maintenance/hash", "{}").await,
        json(ours, "POST", "/v3/maintenance/hash", "{}").await,
    );
    assert!(etcd["hash"].is_number() && ours["hash"].is_number(), "{etcd} {ours}");
    assert_ne!(etcd["hash"], ours["hash"]);
    let of_two_keys = async |value: &str| {
        let ours = Ours::start().await;
        for key in ["a", "b"] {
            let put = format!("{{\"key\":\"{}\",\"value\":\"{}\"}}", in_json(key), in_json(value));
            assert_eq!(ask(ours.address, "POST", "/v3/kv/put", &put).await.status, 200);
        }
        json(ours.address, "POST", "/v3/maintenance/hash", "{}").await["hash"].clone()
    };
    let hash = of_two_keys("1").await;
    assert_eq!(hash, of_two_keys("1").await, "who has the same says the same");
    assert_ne!(hash, of_two_keys("2").await);
    "hashes"
}

/// What is deleted and compacted is free, there also to be given back.
async fn sizes_and_defragmenting(servers: &Servers) -> [Name; 2] {
    let value = in_json(&"x".repeat(1 << 20));
    // The size of the file, and what is used of it.
    let sizes = async |address: SocketAddr| {
        let status = json(address, "POST", "/v3/maintenance/status", "{}").await;
        let size = |name: &str| status[name].as_str().expect("a size").parse::<u64>().unwrap();
        (size("dbSize"), size("dbSizeInUse"))
    };
    let emptied = async |address: SocketAddr| {
        for key in ["YQ==", "Yg==", "Yw=="] {
            let put = format!("{{\"key\":\"{key}\",\"value\":\"{value}\"}}");
            assert_eq!(ask(address, "POST", "/v3/kv/put", &put).await.status, 200);
        }
        let all = "{\"key\":\"YQ==\",\"range_end\":\"ZA==\"}";
        let gone = json(address, "POST", "/v3/kv/deleterange", all).await;
        let revision = gone["header"]["revision"].as_str().unwrap().to_owned();
        let compact = format!("{{\"revision\":\"{revision}\",\"physical\":true}}");
        assert_eq!(ask(address, "POST", "/v3/kv/compaction", &compact).await.status, 200);
    };
    let [etcd, ours] = servers.addresses();
    emptied(etcd).await;
    emptied(ours).await;
    soon("there is room in the file", async {
        while sizes(etcd).await.1 + (2 << 20) > sizes(etcd).await.0 {
            // It counts as free what was freed before its last commit.
            ask(etcd, "POST", "/v3/kv/put", "{\"key\":\"YQ==\"}").await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    soon("what was freed is counted as free", async {
        while sizes(ours).await.0 > 1 << 20 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let (size, used) = sizes(ours).await;
    assert_eq!(size, used);
    let before = (sizes(etcd).await.0, size);
    for address in [etcd, ours] {
        let done = ask(address, "POST", "/v3/maintenance/defragment", "{}").await;
        assert_eq!(done.status, 200);
    }
    let after = (sizes(etcd).await.0, sizes(ours).await.0);
    assert!(after.0 + (1 << 20) < before.0, "{before:?} {after:?}");
    assert_eq!(after.1, before.1, "ours has nothing to give back");
    ["`dbSizeInUse`", "defragmenting"]
}

/// etcd looks every half second for what has ended. The keys end one after the other, so that whoever looks now and then
/// comes late to half of them at least; on a busy machine we may be late once, too.
#[tokio::test(flavor = "multi_thread")]
async fn a_time_to_live_ends_at_its_time() {
    const KEYS: u32 = 8;
    const APART: Duration = Duration::from_millis(60);
    const ROUNDS: u32 = 3;
    let servers = Servers::start().await;
    if servers.ours().is_none() {
        return; // it shows what is different
    }
    let late = async |address: SocketAddr, key: String| {
        let target = format!("/v2/keys/soon/{key}");
        let bytes = http::request(address, "GET", &format!("{target}?wait=true"), None, b"");
        let mut wait = Connection::open(address).await.unwrap();
        let put = Instant::now();
        ask(address, "PUT", &target, "value=1&ttl=1").await;
        let ends = Instant::now() + Duration::from_secs(1);
        assert_eq!(soon("a wait", wait.begin(&bytes)).await.unwrap().status, 200);
        let event = soon("it ends", wait.chunk()).await.unwrap().expect("an event");
        assert!(String::from_utf8_lossy(&event).contains("\"expire\""));
        assert!(put.elapsed() >= Duration::from_secs(1), "it ended early");
        Instant::now().saturating_duration_since(ends)
    };
    // How late half of them are at most.
    let median = async |address: SocketAddr, round: u32| {
        let mut all = join_all((0..KEYS).map(async |number| {
            tokio::time::sleep(APART * number).await;
            late(address, format!("{round}-{number}")).await
        }))
        .await;
        all.sort();
        all[all.len() / 2]
    };
    let [etcd, ours] = servers.addresses();
    let etcds = median(etcd, 0).await;
    assert!(etcds > Duration::from_millis(100), "no difference any more: {etcds:?}");
    let mut best = Duration::MAX;
    for round in 0..ROUNDS {
        if best >= Duration::from_millis(50) {
            best = best.min(median(ours, round).await);
        }
    }
    assert!(best < Duration::from_millis(50), "half of them ended {best:?} late");
}

/// etcd's grows, ours does not.
#[tokio::test(flavor = "multi_thread")]
async fn a_restart_does_not_change_the_term() {
    let term = async |address: SocketAddr| {
        let v2 = ask(address, "GET", "/v2/keys", "").await;
        let v3 = json(address, "POST", "/v3/kv/range", "{\"key\":\"YQ==\"}").await;
        (v2.header("x-raft-term").map(str::to_owned), v3["header"]["raft_term"].clone())
    };
    let second = (Some("2".to_owned()), Json::from("2"));
    let ours = Ours::start().await;
    assert_eq!(term(ours.address).await, second);
    let ours = ours.restart().await;
    assert_eq!(term(ours.address).await, second);
    let mut etcd = etcd::Cluster::start_with(1, &["--enable-v2=true"]).await;
    assert_eq!(term(etcd.node(0).address()).await, second);
    etcd.node_mut(0).restart().await;
    let third = (Some("3".to_owned()), Json::from("3"));
    assert_eq!(term(etcd.node(0).address()).await, third);
}
