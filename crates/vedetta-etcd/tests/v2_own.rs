//! The v2 keys API on its own: what happens to the store behind it. Answers that are spelled out here are
//! those of etcd 3.4.23.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use vedetta_core::{KeyRange, Revision};
use vedetta_db::Db;
use vedetta_etcd::{Endpoint, serve};
use vedetta_kv::{Keep, KvError, Options, Purpose, Put, Range, SCHEMA, Store, WatchOptions, Write};

/// What takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(60);

struct Server {
    store: Store,
    address: String,
    stop: CancellationToken,
    serving: tokio::task::JoinHandle<()>,
}

impl Server {
    async fn start(folder: &Path) -> Self {
        let keep = Keep { revisions: None, age: None };
        Self::start_with(folder, Options { keep, ..Options::default() }).await
    }

    async fn start_with(folder: &Path, options: Options) -> Self {
        let mut file = vedetta_db::Options::new(folder.join("vedetta.db"));
        file.ballast = 0;
        let db = Db::open(&file, &[SCHEMA]).unwrap();
        let store = Store::open(db, options).await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let stop = CancellationToken::new();
        let serving = tokio::spawn(serve(listener, Endpoint::new(store.clone()), stop.clone()));
        Self { store, address, stop, serving }
    }

    async fn end(self) {
        self.stop.cancel();
        soon(self.serving).await.unwrap();
        self.store.close().await;
    }

    async fn send(&self, method: &str, path: &str, form: &str) -> BufReader<TcpStream> {
        let mut stream = TcpStream::connect(&self.address).await.unwrap();
        let request = format!(
            "{method} /v2/keys{path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\
             Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {}\r\n\r\n{form}",
            self.address,
            form.len()
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        BufReader::new(stream)
    }

    /// The status and the body.
    async fn ask(&self, method: &str, path: &str, form: &str) -> (u16, String) {
        let mut stream = self.send(method, path, form).await;
        let mut all = Vec::new();
        soon(stream.read_to_end(&mut all)).await.unwrap();
        let all = String::from_utf8(all).unwrap();
        let (head, body) = all.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, body.to_owned())
    }

    async fn put(&self, path: &str, form: &str) -> String {
        let (status, body) = self.ask("PUT", path, form).await;
        assert!(status < 300, "{status} {body}");
        body
    }

    async fn get(&self, path: &str) -> String {
        self.ask("GET", path, "").await.1
    }

    /// A watch whose head has been answered, so it has begun.
    async fn watch(&self, path: &str) -> BufReader<TcpStream> {
        let mut stream = self.send("GET", path, "").await;
        while !soon(line(&mut stream)).await.trim().is_empty() {}
        stream
    }

    async fn watchers(&self, count: usize) {
        let reached = async {
            while self.store.status().watchers != count {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        soon(reached).await;
    }
}

async fn soon<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.expect("it hangs")
}

async fn line(stream: &mut BufReader<TcpStream>) -> String {
    let mut line = String::new();
    stream.read_line(&mut line).await.unwrap();
    line
}

/// The next event of a watch.
async fn event(stream: &mut BufReader<TcpStream>) -> String {
    loop {
        let line = soon(line(stream)).await;
        assert!(!line.is_empty(), "the watch ended");
        if line.starts_with('{') {
            return line;
        }
    }
}

#[tokio::test]
#[rustfmt::skip] // a table
async fn requests_are_answered_as_etcd_does() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    // A fresh store is at 1.
    for (method, path, form, status, body) in [
        ("GET", "", "", 200, r#"{"action":"get","node":{"dir":true}}"#),
        ("PUT", "/a", "value=1", 201, r#"{"action":"set","node":{"key":"/a","value":"1","modifiedIndex":2,"createdIndex":2}}"#),
        ("PUT", "/a", "value=2", 200, r#"{"action":"set","node":{"key":"/a","value":"2","modifiedIndex":3,"createdIndex":3},"prevNode":{"key":"/a","value":"1","modifiedIndex":2,"createdIndex":2}}"#),
        ("PUT", "/a", "value=3&prevExist=true", 200, r#"{"action":"update","node":{"key":"/a","value":"3","modifiedIndex":4,"createdIndex":3},"prevNode":{"key":"/a","value":"2","modifiedIndex":3,"createdIndex":3}}"#),
        ("PUT", "/a", "value=4&prevValue=3&prevIndex=4", 200, r#"{"action":"compareAndSwap","node":{"key":"/a","value":"4","modifiedIndex":5,"createdIndex":3},"prevNode":{"key":"/a","value":"3","modifiedIndex":4,"createdIndex":3}}"#),
        ("PUT", "/a", "value=4&prevValue=3&prevIndex=9", 412, r#"{"errorCode":101,"message":"Compare failed","cause":"[3 != 4] [9 != 5]","index":5}"#),
        ("PUT", "/a", "prevExist=false", 412, r#"{"errorCode":105,"message":"Key already exists","cause":"/a","index":5}"#),
        ("PUT", "/a/b", "value=1", 400, r#"{"errorCode":104,"message":"Not a directory","cause":"/a","index":5}"#),
        ("PUT", "/d/e/f", "value=%3C%ff", 201, r#"{"action":"set","node":{"key":"/d/e/f","value":"\u003c\ufffd","modifiedIndex":6,"createdIndex":6}}"#),
        ("GET", "/d", "", 200, r#"{"action":"get","node":{"key":"/d","dir":true,"nodes":[{"key":"/d/e","dir":true,"modifiedIndex":6,"createdIndex":6}],"modifiedIndex":6,"createdIndex":6}}"#),
        ("GET", "/d/x/y", "", 404, r#"{"errorCode":100,"message":"Key not found","cause":"/d/x","index":6}"#),
        ("PUT", "/d", "value=1", 403, r#"{"errorCode":102,"message":"Not a file","cause":"/d","index":6}"#),
        ("DELETE", "/d?dir=true", "", 403, r#"{"errorCode":108,"message":"Directory not empty","cause":"/d","index":6}"#),
        ("DELETE", "/d?recursive=true", "", 200, r#"{"action":"delete","node":{"key":"/d","dir":true,"modifiedIndex":7,"createdIndex":6},"prevNode":{"key":"/d","dir":true,"modifiedIndex":6,"createdIndex":6}}"#),
        ("PUT", "/e", "dir=true", 201, r#"{"action":"set","node":{"key":"/e","dir":true,"modifiedIndex":8,"createdIndex":8}}"#),
        ("DELETE", "/e?dir=true", "", 200, r#"{"action":"delete","node":{"key":"/e","dir":true,"modifiedIndex":9,"createdIndex":8},"prevNode":{"key":"/e","dir":true,"modifiedIndex":8,"createdIndex":8}}"#),
        ("POST", "/q", "value=x", 201, r#"{"action":"create","node":{"key":"/q/00000000000000000010","value":"x","modifiedIndex":10,"createdIndex":10}}"#),
        ("PUT", "/a", "dir=true", 200, r#"{"action":"set","node":{"key":"/a","dir":true,"modifiedIndex":11,"createdIndex":11},"prevNode":{"key":"/a","value":"4","modifiedIndex":5,"createdIndex":3}}"#),
        ("PUT", "/c?noValueOnSuccess=true", "value=1", 201, r#"{"action":"set"}"#),
        ("DELETE", "/c?prevValue=1", "", 200, r#"{"action":"compareAndDelete","node":{"key":"/c","modifiedIndex":13,"createdIndex":12},"prevNode":{"key":"/c","value":"1","modifiedIndex":12,"createdIndex":12}}"#),
        ("DELETE", "/?recursive=true", "", 400, r#"{"errorCode":107,"message":"Root is read only","cause":"/","index":13}"#),
        ("PUT", "/c", "ttl=x", 400, r#"{"errorCode":202,"message":"The given TTL in POST form is not a number","cause":"invalid value for \"ttl\"","index":0}"#),
    ] {
        let answer = server.ask(method, path, form).await;
        assert_eq!(answer, (status, format!("{body}\n")), "{method} {path} {form}");
    }
    server.end().await;
}

#[tokio::test]
async fn a_client_that_hangs_up_leaves_no_watcher_behind() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let mut open = Vec::new();
    for path in ["/a/b?wait=true", "/a?wait=true&recursive=true", "?wait=true&stream=true"] {
        open.push(server.watch(path).await);
    }
    server.watchers(3).await;
    drop(open.pop());
    server.watchers(2).await;
    drop(open);
    server.watchers(0).await;
    // One that has its answer is done, too.
    let mut watch = server.watch("/a?wait=true").await;
    server.put("/a", "value=1").await;
    assert!(event(&mut watch).await.contains("\"set\""));
    server.watchers(0).await;
    // And those that wait are let go at the end.
    let mut watch = server.watch("/a?wait=true").await;
    server.end().await;
    let mut rest = String::new();
    soon(watch.read_to_string(&mut rest)).await.unwrap();
    assert_eq!(rest, "0\r\n\r\n", "the last chunk");
}

#[tokio::test]
async fn history_is_told_with_its_actions_after_a_restart_until_it_is_compacted() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    for (path, form) in [
        ("/d/a", "value=1"),                // 2
        ("/d/a", "value=2&prevExist=true"), // 3
        ("/d/a", "value=3&prevValue=2"),    // 4
        ("/d/a", "refresh=true&ttl=100"),   // 5: nobody is told
        ("/d/b", "value=1&prevExist=false"),
    ] {
        server.put(path, form).await;
    }
    server.ask("DELETE", "/d/b?prevIndex=6", "").await; // 7
    server.ask("DELETE", "/d?recursive=true", "").await; // 8
    server.end().await;
    let server = Server::start(folder.path()).await;
    let mut all = server.watch("/d?wait=true&stream=true&recursive=true&waitIndex=1").await;
    for told in [
        r#"{"action":"set","node":{"key":"/d/a","value":"1","modifiedIndex":2,"#,
        r#"{"action":"update","node":{"key":"/d/a","value":"2","modifiedIndex":3,"#,
        r#"{"action":"compareAndSwap","node":{"key":"/d/a","value":"3","modifiedIndex":4,"#,
        r#"{"action":"create","node":{"key":"/d/b","value":"1","modifiedIndex":6,"#,
        r#"{"action":"compareAndDelete","node":{"key":"/d/b","modifiedIndex":7,"#,
        r#"{"action":"delete","node":{"key":"/d","dir":true,"modifiedIndex":8,"#,
    ] {
        let event = event(&mut all).await;
        assert!(event.starts_with(told), "{event}");
    }
    let mut child = server.watch("/d/a?wait=true&waitIndex=5").await;
    let told = event(&mut child).await;
    assert!(told.starts_with(r#"{"action":"delete","node":{"key":"/d","dir":true"#), "{told}");
    server.store.compact(Revision(6), true).await.unwrap();
    let (status, body) = server.ask("GET", "/d?wait=true&waitIndex=5", "").await;
    let text = "The event in requested index is outdated and cleared";
    let cause = "the requested history has been cleared [6/5]";
    let cleared =
        format!("{{\"errorCode\":401,\"message\":\"{text}\",\"cause\":\"{cause}\",\"index\":8}}\n");
    assert_eq!((status, body), (400, cleared));
    server.end().await;
}

/// etcd's v2 keeps 1,000 events, and in memory.
#[tokio::test]
async fn thousands_of_events_later_and_after_a_restart_a_watch_may_begin_at_the_first() {
    const LATER: u64 = 5_000;
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start_with(folder.path(), Options::default()).await;
    server.put("/first", "value=1").await; // 2
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..50 {
        let store = server.store.clone();
        writers.spawn(async move {
            for n in 0..LATER / 50 {
                store.put(Put::new(format!("/later/{writer}"), n.to_string())).await.unwrap();
            }
        });
    }
    writers.join_all().await;
    server.end().await;

    let server = Server::start_with(folder.path(), Options::default()).await;
    let mut once = server.watch("/?wait=true&recursive=true&waitIndex=2").await;
    let told = event(&mut once).await;
    let first = r#"{"action":"set","node":{"key":"/first","value":"1","modifiedIndex":2,"createdIndex":2}}"#;
    assert_eq!(told.trim_end(), first);
    let mut all = server.watch("/?wait=true&stream=true&recursive=true&waitIndex=2").await;
    for index in 2..LATER + 3 {
        let told = event(&mut all).await;
        assert!(told.contains(&format!("\"modifiedIndex\":{index},")), "{index}: {told}");
    }
    server.end().await;
}

#[tokio::test]
async fn a_directory_that_expires_takes_its_content_and_wakes_who_watches_it() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    server.put("/d/s/a", "value=1").await;
    server.put("/d/s/gone", "value=1&ttl=100").await;
    let mut child = server.watch("/d/s/a?wait=true").await;
    let mut above = server.watch("?wait=true&recursive=true&waitIndex=6").await;
    let mut missing = server.watch("/d/s/nope?wait=true&stream=true").await;
    server.store.put(Put::new("/d", "hidden by the directory")).await.unwrap(); // 4
    server.put("/d", "dir=true&prevExist=true&ttl=1").await;
    for watch in [&mut child, &mut above] {
        let told = event(watch).await;
        let node = r#""node":{"key":"/d","dir":true,"modifiedIndex":6,"createdIndex":2}"#;
        let before = r#""prevNode":{"key":"/d","dir":true,"expiration":"#;
        let expected = format!("{{\"action\":\"expire\",{node},{before}");
        assert!(told.starts_with(&expected), "{told}");
    }
    assert!(server.get("/d").await.contains("\"errorCode\":100"));
    assert_eq!(server.store.status().existing, 0);
    server.put("/d/s/nope", "value=here").await;
    let told = event(&mut missing).await;
    assert!(told.contains("here"), "what was not there did not go: {told}");
    server.end().await;
}

#[tokio::test]
async fn times_to_live_are_leases_that_leave_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::start(folder.path()).await;
    let leases = |server: &Server| server.store.status().leases;
    server.put("/a", "value=1&ttl=1000").await;
    server.put("/a", "value=2&ttl=2000").await;
    assert_eq!(leases(&server), 1, "the first was released");
    let before = server.get("/a").await;
    assert!(before.contains(",\"ttl\":"), "{before}");
    server.end().await;
    server = Server::start(folder.path()).await;
    let after: serde_json::Value = serde_json::from_str(&server.get("/a").await).unwrap();
    let left = after["node"]["ttl"].as_u64().unwrap();
    assert!((1900..=2000).contains(&left), "{left}");
    server.put("/d/x", "value=1&ttl=1000").await;
    server.put("/d", "dir=true&prevExist=true&ttl=1000").await;
    assert_eq!(leases(&server), 3);
    server.ask("DELETE", "/d?recursive=true", "").await;
    assert_eq!(leases(&server), 1);
    server.put("/a", "value=3").await;
    assert_eq!(leases(&server), 0);
    server.put("/a", "value=4&ttl=0").await;
    let gone = async {
        while server.ask("GET", "/a", "").await.0 != 404 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    soon(gone).await;
    server.end().await;
}

#[tokio::test]
async fn what_v3_writes_is_there_in_v2_and_the_other_way_round() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let mut v2 = server.watch("/x?wait=true&stream=true&recursive=true").await;
    let mut v3 = server.store.watch(KeyRange::all(), WatchOptions::default()).unwrap();
    for key in ["/x/y/z", "/x/y", "no/path", "/x//z", "/x/./z", "/x/"] {
        server.store.put(Put::new(key, "1")).await.unwrap();
    }
    for told in [
        r#"{"action":"set","node":{"key":"/x/y/z","value":"1","modifiedIndex":2,"createdIndex":2}}"#,
        r#"{"action":"set","node":{"key":"/x/y","value":"1","modifiedIndex":3,"createdIndex":3}}"#,
        r#"{"action":"set","node":{"key":"/x","dir":true,"modifiedIndex":7,"createdIndex":7}}"#,
    ] {
        assert_eq!(event(&mut v2).await.trim(), told);
    }
    let z = r#"{"key":"/x/y/z","value":"1","modifiedIndex":2,"createdIndex":2}"#;
    let y = r#""modifiedIndex":2,"createdIndex":2"#;
    let y = format!(r#"{{"key":"/x/y","dir":true,"nodes":[{z}],{y}}}"#);
    let x = r#""modifiedIndex":7,"createdIndex":7"#;
    let x = format!(r#"{{"key":"/x","dir":true,"nodes":[{y}],{x}}}"#);
    let tree = format!(r#"{{"action":"get","node":{{"dir":true,"nodes":[{x}]}}}}"#);
    assert_eq!(server.get("?recursive=true").await.trim(), tree);
    assert_eq!(server.ask("DELETE", "/x/y?recursive=true", "").await.0, 200);
    let told = event(&mut v2).await;
    assert!(told.starts_with(r#"{"action":"delete","node":{"key":"/x/y","dir":true,"#), "{told}");
    let left = server.store.range(Range::new(KeyRange::prefix("/x/y"))).await.unwrap();
    assert!(left.keys.is_empty(), "the value that the directory hid went too");

    server.put("/n/m", "value=1").await;
    let mut seen = Vec::new();
    while seen.last() != Some(&b"/n/m".to_vec()) {
        let batch = soon(v3.next()).await.unwrap();
        let key = |event: &vedetta_kv::Event| (event.revision.0 == 9).then(|| event.key().to_vec());
        seen.extend(batch.iter().filter_map(key));
    }
    assert_eq!(seen, [b"/n/".to_vec(), b"/n/m".to_vec()], "one revision, its directory first");
    server.end().await;
}

#[tokio::test]
async fn what_is_refused_tells_where_the_store_is() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    // Directories that v3 made have no marker yet, so the request would begin by writing one.
    server.store.put(Put::new("/a/b", "1")).await.unwrap();
    for (method, path, form, code) in [
        ("PUT", "/a/b?prevExist=false", "value=2", 105),
        ("PUT", "/a/b/c?prevExist=false", "value=2", 104),
        ("PUT", "/a/b/c", "value=2", 104),
        ("POST", "/a/b", "value=2", 104),
    ] {
        let (_, body) = server.ask(method, path, form).await;
        let told: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert_eq!(
            (&told["errorCode"], &told["index"]),
            (&code.into(), &2.into()),
            "{path} {form}"
        );
    }
    assert_eq!(server.store.revision(), Revision(2));
    server.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_that_compare_and_swap_one_wins() {
    let folder = tempfile::tempdir().unwrap();
    let server = Arc::new(Server::start(folder.path()).await);
    server.put("/lock", "value=free").await;
    let one = |n: u32| {
        let server = Arc::clone(&server);
        tokio::spawn(async move {
            let form = format!("value={n}&prevValue=free");
            let taken = server.ask("PUT", "/lock", &form).await.0;
            (taken, server.ask("POST", "/queue", "").await.0)
        })
    };
    let (mut won, tries) = (0, (0..20).map(one).collect::<Vec<_>>());
    for done in tries {
        let (taken, queued) = done.await.unwrap();
        won += u32::from(taken == 200);
        assert!(taken == 200 || taken == 412);
        assert_eq!(queued, 201);
    }
    assert_eq!(won, 1);
    let queue = server.get("/queue").await;
    assert_eq!(queue.matches("/queue/0").count(), 20, "each has a name of its own");
    Arc::into_inner(server).unwrap().end().await;
}

#[tokio::test]
async fn a_large_directory_beside_others_is_listed() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let many = server.store.update(Purpose::Store, |update| {
        (0..5_000).try_for_each(|n| update.put(format!("/l/big/{n:04}"), "", Write::default()))
    });
    many.await.map_err(|error: KvError| error).unwrap();
    for key in ["/l/big", "/l/big-", "/l/a", "/l/z"] {
        server.store.put(Put::new(key, "")).await.unwrap();
    }
    let all: serde_json::Value = serde_json::from_str(&server.get("/l").await).unwrap();
    let nodes = all["node"]["nodes"].as_array().unwrap();
    let keys: Vec<_> = nodes.iter().map(|node| node["key"].as_str().unwrap()).collect();
    assert_eq!(keys, ["/l/a", "/l/big", "/l/big-", "/l/z"]);
    assert_eq!(nodes[1]["dir"], true);
    let big: serde_json::Value = serde_json::from_str(&server.get("/l/big").await).unwrap();
    let nodes = big["node"]["nodes"].as_array().unwrap();
    assert_eq!((nodes.len(), &nodes[4_999]["key"]), (5_000, &"/l/big/4999".into()));
    server.end().await;
}

/// Every listing repeats the path of what it shows, so there is a deepest one, from wherever it is looked at.
#[tokio::test]
async fn a_path_is_as_deep_as_its_names_from_the_root_whatever_is_listed() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path()).await;
    let names = |count: usize| "/d".repeat(count);
    let (deepest, above) = (names(512), names(511));
    server.put(&deepest, "value=seen").await;
    for from in ["", "/d/d", &above] {
        let listed = server.get(&format!("{from}?recursive=true")).await;
        assert!(listed.contains("\"value\":\"seen\""), "{} bytes", listed.len());
    }
    assert!(server.get(&above).await.contains("\"value\":\"seen\""));
    let refused = async |method: &str, path: &str| {
        let (status, body) = server.ask(method, path, "value=1").await;
        assert_eq!(status, 400, "{method} {body}");
        assert!(body.contains("\"errorCode\":210"), "{method} {body}");
    };
    for method in ["GET", "PUT", "POST", "DELETE"] {
        refused(method, &names(513)).await;
    }

    // A directory at the end, in which only v3 can put something.
    let (status, _) = server.ask("DELETE", &deepest, "").await;
    assert_eq!(status, 200);
    server.store.put(Put::new(names(513), "unseen")).await.unwrap();
    for from in ["", "/d/d", &above, &deepest] {
        for query in ["", "?recursive=true"] {
            let listed = server.get(&format!("{from}{query}")).await;
            assert!(listed.starts_with("{\"action\":\"get\""), "{listed}");
            assert!(!listed.contains("unseen"), "{} bytes from {query:?}", from.len());
        }
    }
    let listed = server.get(&above).await;
    assert!(listed.contains(&format!("{{\"key\":\"{deepest}\",\"dir\":true,")), "{listed}");
    refused("POST", &deepest).await;
    let (status, body) = server.ask("POST", &above, "value=1").await;
    assert_eq!(status, 201, "{body}");
    let made: serde_json::Value = serde_json::from_str(&body).unwrap();
    let (status, _) = server.ask("GET", made["node"]["key"].as_str().unwrap(), "").await;
    assert_eq!(status, 200, "what is made can be read");
    server.end().await;
}
