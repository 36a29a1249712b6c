//! What the suites have in common: the real etcd, our server, and a client that sends bytes.
#![allow(dead_code, reason = "each suite uses its share")]

pub(crate) mod grpc;
pub(crate) mod http;
pub(crate) mod http2;

use std::net::{Ipv4Addr, SocketAddr, TcpListener as StdListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use vedetta_db::Db;
use vedetta_etcd::{Endpoint, serve};
use vedetta_kv::{Options, SCHEMA, Store};

/// What takes longer than this hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Fails instead of hanging.
pub(crate) async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, work).await {
        Ok(done) => done,
        Err(late) => panic!("it hangs: {what}: {late}"),
    }
}

/// The program of a Debian package, or a failure that names the package.
pub(crate) fn program(name: &str) -> Command {
    let package = match name {
        "etcd" => "etcd-server",
        "etcdctl" => "etcd-client",
        other => other,
    };
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(name).is_file()));
    assert!(found, "{name} is not installed, and the suite needs it: apt-get install {package}");
    Command::new(name)
}

/// A folder for data that need not outlive the test: in memory where the system has such a place.
pub(crate) fn scratch() -> TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { TempDir::new_in(memory) } else { TempDir::new() }.unwrap()
}

/// A real etcd with v2 switched on; it ends with this value.
pub(crate) struct Etcd {
    process: Child,
    pub(crate) address: SocketAddr,
    folder: TempDir,
}

impl Etcd {
    pub(crate) async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// With further arguments.
    pub(crate) async fn start_with(more: &[&str]) -> Self {
        // A port that was free a moment ago may be taken by now: then etcd ends at once, and we try again.
        for _ in 0..10 {
            if let Some(etcd) = Self::try_start(more).await {
                return etcd;
            }
        }
        panic!("etcd did not start in ten attempts");
    }

    async fn try_start(more: &[&str]) -> Option<Self> {
        let folder = scratch();
        // Both held until both are known: they differ.
        let (client, peer) = (free_port(), free_port());
        let address = client.local_addr().unwrap();
        let (client_url, peer_url) =
            (format!("http://{address}"), format!("http://{}", peer.local_addr().unwrap()));
        drop((client, peer));
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let process = program("etcd")
            .args(["--name", "vedetta", "--enable-v2=true", "--log-level", "error"])
            .arg("--data-dir")
            .arg(folder.path().join("data"))
            .args(["--listen-client-urls", &client_url, "--advertise-client-urls", &client_url])
            .args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url])
            .args(["--initial-cluster", &format!("vedetta={peer_url}")])
            .args(more)
            .env_remove("ETCD_DATA_DIR")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .expect("etcd can be run");
        let mut etcd = Self { process, address, folder };
        soon("the real etcd becomes healthy", async {
            loop {
                if etcd.process.try_wait().unwrap().is_some() {
                    return None;
                }
                if let Ok(health) = http::get(address, "/health").await
                    && health.status == 200
                    && health.body.starts_with(br#"{"health":"true""#)
                {
                    return Some(());
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await?;
        Some(etcd)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        if let Ok(Some(status)) = self.process.try_wait() {
            let log = std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            eprintln!("the real etcd has ended by itself, {status}:\n{log}");
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Bytes in memory that are no file's.
pub(crate) fn memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a process has a status");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kilobytes.expect("the kernel tells it") << 10
}

fn free_port() -> StdListener {
    StdListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap()
}

/// A database in a folder, without a reserve beside it.
pub(crate) fn database(folder: &TempDir) -> vedetta_db::Options {
    let mut options = vedetta_db::Options::new(folder.path().join("vedetta.db"));
    options.ballast = 0;
    options
}

/// Our server in this process; it ends with this value.
pub(crate) struct Ours {
    pub(crate) address: SocketAddr,
    pub(crate) store: Store,
    pub(crate) stop: CancellationToken,
    serving: AbortOnDropHandle<()>,
    folder: TempDir,
}

impl Ours {
    pub(crate) async fn start() -> Self {
        Self::start_with(|endpoint| endpoint).await
    }

    pub(crate) async fn start_with(change: impl FnOnce(Endpoint) -> Endpoint) -> Self {
        Self::start_in(scratch(), change).await
    }

    /// On what is in the folder, `vedetta.db`.
    pub(crate) async fn start_in(
        folder: TempDir,
        change: impl FnOnce(Endpoint) -> Endpoint,
    ) -> Self {
        Self::start_on((Ipv4Addr::LOCALHOST, 0).into(), folder, change).await
    }

    /// Ends it, and starts it again on the same port and data.
    pub(crate) async fn restart(self) -> Self {
        let Self { address, store, stop, serving, folder } = self;
        stop.cancel();
        soon("the server ends", serving).await.unwrap();
        store.close().await;
        Self::start_on(address, folder, |endpoint| endpoint).await
    }

    /// The same at an address.
    pub(crate) async fn start_on(
        address: SocketAddr,
        folder: TempDir,
        change: impl FnOnce(Endpoint) -> Endpoint,
    ) -> Self {
        let db = Db::open(&database(&folder), &[SCHEMA]).unwrap();
        let store = Store::open(db, Options::default()).await.unwrap();
        Self::serve_on(address, folder, store, change).await
    }

    /// On a store of the caller's, which is in the folder.
    pub(crate) async fn serving(
        folder: TempDir,
        store: Store,
        change: impl FnOnce(Endpoint) -> Endpoint,
    ) -> Self {
        Self::serve_on((Ipv4Addr::LOCALHOST, 0).into(), folder, store, change).await
    }

    async fn serve_on(
        address: SocketAddr,
        folder: TempDir,
        store: Store,
        change: impl FnOnce(Endpoint) -> Endpoint,
    ) -> Self {
        let listener = tokio::net::TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let endpoint = change(Endpoint::new(store.clone()));
        let serving = tokio::spawn(serve(listener, endpoint, stop.clone()));
        Self { address, store, stop, serving: AbortOnDropHandle::new(serving), folder }
    }
}
