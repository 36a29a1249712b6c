//! A server on a real socket, and a client that sends exactly what it is told.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use vedetta_dashboard::{Api, Limits, serve};
use vedetta_db::Db;
use vedetta_fleet::Fleet;
use vedetta_fleet::sqlite::{SqliteBus, SqliteRoster};
use vedetta_jobs::sqlite::SqliteJobs;
use vedetta_kv::{Options, SCHEMA, Store};

/// Long enough for anything; a test that waits so long has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct Server {
    pub(crate) store: Store,
    pub(crate) jobs: SqliteJobs,
    pub(crate) fleet: Fleet,
    pub(crate) address: SocketAddr,
    pub(crate) stop: CancellationToken,
    pub(crate) serving: JoinHandle<()>,
    _folder: tempfile::TempDir,
}

impl Server {
    pub(crate) async fn start() -> Self {
        Self::with(Limits::default()).await
    }

    pub(crate) async fn with(limits: Limits) -> Self {
        Self::on(limits, Options::default()).await
    }

    pub(crate) async fn on(limits: Limits, store: Options) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut options = vedetta_db::Options::new(folder.path().join("vedetta.db"));
        options.ballast = 0;
        let schemas = [SCHEMA, vedetta_jobs::sqlite::SCHEMA, vedetta_fleet::sqlite::SCHEMA];
        let db = Db::open(&options, &schemas).unwrap();
        let store = Store::open(db.clone(), store).await.unwrap();
        let jobs = SqliteJobs::open(db.clone()).await.unwrap();
        let (bus, roster) = (Arc::new(SqliteBus::new(db.clone())), Arc::new(SqliteRoster::new(db)));
        let beat = Duration::from_secs(3);
        let ledger = Arc::new(jobs.clone());
        let fleet = Fleet::open(bus, roster, ledger, ["default".to_owned()], beat).await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let api = Api::new(store.clone()).jobs(Arc::new(jobs.clone())).fleet(fleet.clone());
        let serving = tokio::spawn(serve(listener, api.limits(limits), stop.clone()));
        Self { store, jobs, fleet, address, stop, serving, _folder: folder }
    }

    /// The same store, served again with a watcher of it.
    pub(crate) async fn serve_with(self, name: &str, watcher: vedetta_runtime::Handle) -> Self {
        let api = Api::new(self.store.clone()).watcher(name, watcher);
        self.serve(api).await
    }

    /// The same store, served again as `with` says.
    pub(crate) async fn serve_as(self, with: impl FnOnce(Api) -> Api) -> Self {
        let jobs = Arc::new(self.jobs.clone());
        let api = with(Api::new(self.store.clone()).jobs(jobs).fleet(self.fleet.clone()));
        self.serve(api).await
    }

    /// The same store, served again with stages.
    pub(crate) async fn serve_stages(self, records: impl vedetta_stage::Records) -> Self {
        let api = Api::new(self.store.clone()).stages(records);
        self.serve(api).await
    }

    async fn serve(self, api: Api) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        self.stop.cancel();
        let stop = CancellationToken::new();
        let serving = tokio::spawn(serve(listener, api, stop.clone()));
        Self { address, stop, serving, ..self }
    }

    /// Sends a request as it stands, and reads the answer to its end.
    pub(crate) async fn raw(&self, request: &[u8]) -> Answer {
        let mut line = TcpStream::connect(self.address).await.unwrap();
        line.write_all(request).await.unwrap();
        let mut answer = Vec::new();
        // A refused body may end in a reset after the answer.
        let _ = line.read_to_end(&mut answer).await;
        Answer::parse(&String::from_utf8_lossy(&answer))
    }

    /// A request with these headers beside `Host`, which one of them may replace.
    pub(crate) async fn send(&self, request: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        let mut head = vec![format!("{request} HTTP/1.1"), "Connection: close".to_owned()];
        if !headers.iter().any(|(name, _)| *name == "Host") {
            head.push(format!("Host: {}", self.address));
        }
        head.extend(headers.iter().map(|(name, value)| format!("{name}: {value}")));
        head.push(format!("Content-Length: {}", body.len()));
        let text = format!("{}\r\n\r\n{body}", head.join("\r\n"));
        self.raw(text.as_bytes()).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send(&format!("GET {path}"), &[], "").await
    }

    pub(crate) async fn json(&self, request: &str, body: &str) -> Answer {
        self.send(request, &[("Content-Type", "application/json")], body).await
    }

    pub(crate) async fn put(&self, key: &str, value: &str) -> u64 {
        let body = serde_json::json!({ "value": value }).to_string();
        let answer = self.json(&format!("PUT /api/v1/kv/{key}"), &body).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["revision"].as_u64().unwrap()
    }

    /// A body that is taken, and what is answered.
    pub(crate) async fn post(&self, path: &str, body: Value) -> Value {
        let answer = self.json(&format!("POST /api/v1{path}"), &body.to_string()).await;
        assert!(matches!(answer.status, 200 | 201), "{path} {body}: {answer:?}");
        answer.json()
    }

    pub(crate) async fn watch(&self, query: &str, last_seen: Option<u64>) -> Feed {
        let seen = last_seen.map(|seen| format!("Last-Event-ID: {seen}\r\n")).unwrap_or_default();
        self.feed(&format!("/watch?{query}"), &seen).await
    }

    /// A stream of events, asked for with more lines in the head.
    pub(crate) async fn feed(&self, path: &str, head: &str) -> Feed {
        let mut line = TcpStream::connect(self.address).await.unwrap();
        // HTTP/1.0: the stream comes as it is, without chunks.
        let request = format!("GET /api/v1{path} HTTP/1.0\r\nHost: {}\r\n{head}\r\n", self.address);
        line.write_all(request.as_bytes()).await.unwrap();
        let mut feed = Feed { line: BufReader::new(line) };
        let head = feed.block().await.unwrap();
        assert!(head[0].contains("200"), "{head:?}");
        assert!(head.contains(&"content-type: text/event-stream".to_owned()), "{head:?}");
        feed
    }

    /// Waits until the store has so many watchers.
    pub(crate) async fn until_watchers(&self, wanted: usize) {
        until(|| self.store.status().watchers == wanted).await;
    }

    /// Stops, and waits for the end of it.
    pub(crate) async fn end(self) {
        self.stop.cancel();
        tokio::time::timeout(PATIENCE, self.serving).await.expect("drains").unwrap();
        self.store.close().await;
    }
}

pub(crate) async fn until(condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("it comes true");
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
    /// The head as it came.
    pub(crate) raw: String,
}

impl Answer {
    fn parse(text: &str) -> Self {
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((text, ""));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        let (raw, body) = (head.to_owned(), body.to_owned());
        // So that each line of it has its end.
        let head = format!("{}\r\n", head.to_lowercase());
        Self { status: status.unwrap_or(0), head, body, raw }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub(crate) fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
    }
}

/// A stream of server-sent events.
pub(crate) struct Feed {
    line: BufReader<TcpStream>,
}

#[derive(Debug, Default, PartialEq)]
pub(crate) struct Message {
    pub(crate) event: String,
    pub(crate) id: Option<u64>,
    /// The same, whatever it looks like.
    pub(crate) last: String,
    pub(crate) data: Value,
}

impl Feed {
    /// The lines up to the next empty one; `None` at the end.
    async fn block(&mut self) -> Option<Vec<String>> {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            let reading = tokio::time::timeout(PATIENCE, self.line.read_line(&mut line));
            match (reading.await.expect("a line in time").unwrap(), line.trim_end()) {
                (0, _) => return None,
                (_, "") => return Some(lines),
                (_, line) => lines.push(line.to_owned()),
            }
        }
    }

    pub(crate) async fn next(&mut self) -> Option<Message> {
        let mut message = Message::default();
        for line in self.block().await? {
            match line.split_once(": ") {
                Some(("event", name)) => name.clone_into(&mut message.event),
                Some(("id", id)) => {
                    message.id = id.parse().ok();
                    id.clone_into(&mut message.last);
                }
                Some(("data", data)) => message.data = serde_json::from_str(data).unwrap(),
                _ => {}
            }
        }
        Some(message)
    }

    /// The next message that tells something.
    pub(crate) async fn event(&mut self) -> Option<Message> {
        loop {
            let message = self.next().await?;
            if !message.event.is_empty() {
                return Some(message);
            }
        }
    }
}
