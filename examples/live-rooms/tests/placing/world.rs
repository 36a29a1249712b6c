//! A store of our own, and `rooms` processes on it.

use std::io::{BufRead as _, BufReader};
use std::net::Ipv4Addr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use live_rooms::model::{Heartbeat, Kind};
use serde_json::Value;
use testing::PATIENCE;
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};
use vedetta::KeyRange;
use vedetta::core::Source as _;
use vedetta::db::{self, DataFolder, Db};
use vedetta::etcd::{self, Cluster, Endpoint};
use vedetta::kv::{self, Store};

pub(crate) struct World {
    pub(crate) store: Cluster,
    processes: Vec<(Child, String)>,
    _stop: DropGuard,
    _folder: tempfile::TempDir,
}

impl World {
    /// With so many `rooms`, by their names, and with these arguments.
    pub(crate) async fn start(names: &[&str], arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let data = DataFolder::open(folder.path()).unwrap();
        let db = Db::open(&db::Options::new(data.database()), &[kv::SCHEMA]).unwrap();
        let store = Store::open(db, kv::Options::default()).await.unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let url = format!("etcd://{}", listener.local_addr().unwrap());
        let stop = CancellationToken::new();
        let serving = etcd::serve(listener, Endpoint::new(store.clone()), stop.clone());
        tokio::spawn(async move {
            serving.await;
            store.close().await;
            drop(data);
        });
        let processes = names.iter().map(|name| rooms(name, &url, arguments)).collect();
        let store = url.parse().unwrap();
        Self { store, processes, _stop: stop.drop_guard(), _folder: folder }
    }

    /// A module that lives, and is ready.
    pub(crate) async fn module(&self, kind: Kind, id: &str, capacity: u32) {
        self.lives(kind, id, capacity).await;
        self.store.put(kind.key(id, "state"), r#"{"ready":true}"#).await.unwrap();
    }

    /// A module that gives a sign of life, and of which nobody has said that it is ready.
    pub(crate) async fn lives(&self, kind: Kind, id: &str, capacity: u32) {
        let beat = Heartbeat {
            host: "test".into(),
            capacity,
            load: 0,
            version: "1".into(),
            pid: 1,
            machine: "test".into(),
            run: "test".into(),
            leaving: false,
        };
        let beat = serde_json::to_vec(&beat).unwrap();
        self.store.put(kind.key(id, "heartbeat"), beat).await.unwrap();
    }

    /// Asks one of the processes.
    pub(crate) async fn ask(
        &self,
        process: usize,
        method: &str,
        path: &str,
        body: Option<&str>,
    ) -> (u16, Value) {
        let request = ureq::http::Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.processes[process].1))
            .body(body.unwrap_or_default().to_owned())
            .unwrap();
        let asked = tokio::task::spawn_blocking(move || {
            let config = ureq::Agent::config_builder().http_status_as_error(false).proxy(None);
            let agent: ureq::Agent = config.timeout_global(Some(PATIENCE)).build().into();
            let mut answer = agent.run(request).unwrap();
            let text = answer.body_mut().read_to_string().unwrap();
            (answer.status().as_u16(), serde_json::from_str(&text).unwrap_or_default())
        });
        asked.await.unwrap()
    }

    /// Creates a room, and starts it.
    pub(crate) async fn open(&self, process: usize, id: &str) -> Result<(), String> {
        let body = format!(r#"{{"id": "{id}"}}"#);
        let created = self.ask(process, "POST", "/rooms", Some(&body)).await;
        let started = self.ask(process, "POST", &format!("/rooms/{id}/start"), None).await;
        match (created.0, started.0) {
            (201, 200) => Ok(()),
            _ => Err(format!("{created:?} {started:?}")),
        }
    }

    pub(crate) async fn room(&self, process: usize, id: &str) -> Value {
        self.ask(process, "GET", &format!("/rooms/{id}"), None).await.1
    }

    pub(crate) async fn rooms(&self, process: usize) -> Vec<Value> {
        let (_, rooms) = self.ask(process, "GET", "/rooms", None).await;
        rooms["rooms"].as_array().cloned().unwrap_or_default()
    }

    /// Waits until so many rooms are there, all with these modules.
    pub(crate) async fn placed(&self, mixer: &str, janus: &str, count: usize) {
        until("they are placed", async || {
            let rooms = self.rooms(0).await;
            let fits = |room: &Value| room["mixerId"] == *mixer && room["janusId"] == *janus;
            let is_done = rooms.len() == count && rooms.iter().all(fits);
            if is_done { Ok(()) } else { Err(format!("{rooms:?}")) }
        })
        .await;
    }

    /// Waits until a room is gone.
    pub(crate) async fn gone(&self, id: &str) {
        until("it is gone", async || {
            match self.ask(0, "GET", &format!("/rooms/{id}"), None).await {
                (404, _) => Ok(()),
                (_, room) => Err(room.to_string()),
            }
        })
        .await;
    }

    pub(crate) async fn keys(&self, prefix: &'static str) -> Vec<String> {
        let page = self.store.list(KeyRange::prefix(prefix), None).await.unwrap();
        let keys = page.entries.iter();
        keys.map(|entry| String::from_utf8_lossy(&entry.key).into_owned()).collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for (process, _) in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// A process, and where it listens.
fn rooms(name: &str, url: &str, arguments: &[&str]) -> (Child, String) {
    let mut process = Command::new(env!("CARGO_BIN_EXE_live-rooms"))
        .args(["rooms", "--store", url, "--listen", "127.0.0.1:0"])
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let stdout = process.stdout.take().unwrap();
    // The store is served by this runtime, on its other threads.
    let line = tokio::task::block_in_place(|| {
        BufReader::new(stdout).lines().next().expect("it says where it listens").unwrap()
    });
    let at = line.strip_prefix("rooms listening on ").unwrap_or_else(|| panic!("{name}: {line}"));
    (process, at.to_owned())
}

pub(crate) async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Result<T, String>) -> T {
    let begun = std::time::Instant::now();
    loop {
        match look().await {
            Ok(found) => return found,
            Err(now) if begun.elapsed() > PATIENCE => panic!("not in time: {what}: {now}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}
