//! A real etcd cluster, whose nodes can be killed, frozen, and cut off from their clients.
//!
//! ```text
//! client ──► Proxy ──► node 0 ─┐
//! client ──► Proxy ──► node 1 ─┼─ raft
//! client ──► Proxy ──► node 2 ─┘
//! ```

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::{Proxy, soon};

/// When to look again.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Nobody can be sure of a free port: so often is tried.
const ATTEMPTS: usize = 10;

/// The program of a Debian package, or a failure that names the package.
pub fn program(name: &str) -> Command {
    let package = if name == "etcdctl" { "etcd-client" } else { "etcd-server" };
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(name).is_file()));
    assert!(found, "{name} is not installed, and the suite needs it: apt-get install {package}");
    Command::new(name)
}

/// Some nodes that are one etcd. Its processes and data end with this value.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Node>,
}

impl Cluster {
    /// So many nodes, on free ports; returns when all are healthy.
    pub async fn start(nodes: usize) -> Self {
        Self::start_with(nodes, &[]).await
    }

    /// The same with further flags for every node.
    pub async fn start_with(nodes: usize, flags: &[&str]) -> Self {
        // A port that was free a moment ago may be taken by now: then etcd ends at once, and we try again.
        for _ in 0..ATTEMPTS {
            let mut cluster = Self::prepare(nodes, flags).await;
            cluster.nodes.iter_mut().for_each(Node::spawn);
            if cluster.healthy().await {
                return cluster;
            }
        }
        panic!("etcd did not start in {ATTEMPTS} attempts");
    }

    async fn prepare(nodes: usize, flags: &[&str]) -> Self {
        // All held until all are known: they differ.
        let held: Vec<_> = (0..nodes).map(|_| (free_port(), free_port())).collect();
        let address = |port: &TcpListener| port.local_addr().expect("a bound port has an address");
        let addresses: Vec<_> = held.iter().map(|(c, p)| (address(c), address(p))).collect();
        let members =
            addresses.iter().enumerate().map(|(at, (_, peer))| format!("n{at}=http://{peer}"));
        let members = members.collect::<Vec<_>>().join(",");
        drop(held);
        let mut all = Vec::new();
        for (at, (client, peer)) in addresses.into_iter().enumerate() {
            let urls = [format!("http://{client}"), format!("http://{peer}")];
            let folder = scratch();
            let data = folder.path().join("data").to_string_lossy().into_owned();
            let mut arguments = vec!["--name".to_owned(), format!("n{at}")];
            for (flag, value) in [
                ("--data-dir", &data),
                ("--listen-client-urls", &urls[0]),
                ("--advertise-client-urls", &urls[0]),
                ("--listen-peer-urls", &urls[1]),
                ("--initial-advertise-peer-urls", &urls[1]),
                ("--initial-cluster", &members),
                ("--log-level", &"error".to_owned()),
            ] {
                arguments.extend([flag.to_owned(), value.clone()]);
            }
            arguments.extend(flags.iter().copied().map(str::to_owned));
            let proxy = Proxy::to(client).await;
            all.push(Node { folder, arguments, address: client, proxy, process: None });
        }
        Self { nodes: all }
    }

    /// Waits until every node is; `false` when one has ended instead.
    async fn healthy(&mut self) -> bool {
        for node in &mut self.nodes {
            if !node.healthy().await {
                return false;
            }
        }
        true
    }

    /// A node, counted from 0.
    pub fn node(&self, at: usize) -> &Node {
        &self.nodes[at]
    }

    /// The same, to kill and start.
    pub fn node_mut(&mut self, at: usize) -> &mut Node {
        &mut self.nodes[at]
    }

    /// All nodes.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Where clients find the nodes, each behind its proxy.
    pub fn endpoints(&self) -> Vec<String> {
        self.nodes.iter().map(Node::endpoint).collect()
    }

    /// The node that leads, as soon as one that runs knows of one that runs.
    pub async fn leader(&self) -> usize {
        soon("the cluster has a leader", async {
            loop {
                for at in 0..self.nodes.len() {
                    if self.nodes[at].leads().await {
                        return at;
                    }
                }
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        })
        .await
    }
}

/// One node of a cluster.
#[derive(Debug)]
pub struct Node {
    folder: TempDir,
    arguments: Vec<String>,
    address: SocketAddr,
    proxy: Proxy,
    /// `None` while it is killed.
    process: Option<Running>,
}

#[derive(Debug)]
struct Running {
    child: Child,
    frozen: bool,
}

impl Node {
    /// Where clients find it, behind its proxy.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.proxy.address())
    }

    /// Where it listens itself.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The link between it and its clients.
    pub fn proxy(&self) -> &Proxy {
        &self.proxy
    }

    /// Ends it at once (SIGKILL); its data stays.
    pub fn kill(&mut self) {
        if let Some(Running { mut child, .. }) = self.process.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Forgets all that it ever stored; it must be killed. Not for a node of several.
    pub fn wipe(&mut self) {
        assert!(self.process.is_none(), "a node that runs cannot be wiped");
        let data = self.folder.path().join("data");
        std::fs::remove_dir_all(data).expect("the data can be removed");
    }

    /// Starts it again on the same port and data; returns when it is healthy.
    pub async fn restart(&mut self) {
        self.kill();
        soon("a node starts again", async {
            loop {
                self.spawn();
                if self.healthy().await {
                    return;
                }
                self.kill(); // its port was taken meanwhile
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        })
        .await;
    }

    /// Starts it again without waiting: of three nodes the first that comes back is not healthy alone.
    pub fn spawn(&mut self) {
        self.kill();
        let log = File::options().append(true).create(true).open(self.folder.path().join("log"));
        let log = log.expect("a log can be written");
        let mut etcd = program("etcd");
        for (name, _) in
            std::env::vars_os().filter(|(n, _)| n.to_string_lossy().starts_with("ETCD_"))
        {
            etcd.env_remove(name);
        }
        etcd.args(&self.arguments).stdin(Stdio::null());
        etcd.stdout(log.try_clone().expect("a handle")).stderr(log);
        let child = etcd.spawn().expect("etcd can be run");
        self.process = Some(Running { child, frozen: false });
    }

    /// Stops it in its tracks (SIGSTOP): connections stay, and nothing is answered.
    pub fn freeze(&mut self) {
        self.signal(Signal::STOP, true);
    }

    /// Lets a frozen one go on (SIGCONT).
    pub fn thaw(&mut self) {
        self.signal(Signal::CONT, false);
    }

    fn signal(&mut self, signal: Signal, frozen: bool) {
        let running = self.process.as_mut().expect("the node runs");
        kill_process(Pid::from_child(&running.child), signal).expect("a signal can be sent");
        running.frozen = frozen;
    }

    /// Whether it was started, and neither killed nor frozen since.
    pub fn runs(&self) -> bool {
        self.process.as_ref().is_some_and(|running| !running.frozen)
    }

    /// Waits until it is healthy, which needs a leader; `false` when it has ended instead.
    pub async fn healthy(&mut self) -> bool {
        soon("etcd becomes healthy", async {
            loop {
                let running = self.process.as_mut().expect("the node runs");
                if running.child.try_wait().expect("a child can be asked").is_some() {
                    return false;
                }
                if health(self.address)
                    .await
                    .is_some_and(|told| told.contains(r#""health":"true""#))
                {
                    return true;
                }
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        })
        .await
    }

    /// What `etcdctl` prints when it is told this about the node, or what it complains of.
    pub async fn ctl(&self, arguments: &[&str]) -> Result<String, String> {
        let mut etcdctl = tokio::process::Command::from(program("etcdctl"));
        etcdctl.env("ETCDCTL_API", "3").arg("--endpoints").arg(self.address.to_string());
        etcdctl.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
        let output = soon("etcdctl ends", etcdctl.output()).await.expect("etcdctl can be run");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    async fn leads(&self) -> bool {
        if !self.runs() {
            return false;
        }
        let asked = ["--command-timeout=2s", "endpoint", "status", "--write-out=json"];
        let Ok(told) = self.ctl(&asked).await else { return false };
        let told: Value = serde_json::from_str(&told).unwrap_or_default();
        let status = &told[0]["Status"];
        status["leader"].is_u64() && status["leader"] == status["header"]["member_id"]
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let ended =
            self.process.as_mut().and_then(|running| running.child.try_wait().ok().flatten());
        if let Some(status) = ended {
            let log = std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            eprintln!("an etcd has ended by itself, {status}:\n{log}");
        }
        self.kill();
    }
}

/// What its `/health` says, if it says something within a second.
async fn health(address: SocketAddr) -> Option<String> {
    let ask = async {
        let mut stream = TcpStream::connect(address).await.ok()?;
        stream.write_all(b"GET /health HTTP/1.0\r\n\r\n").await.ok()?;
        let mut told = String::new();
        stream.read_to_string(&mut told).await.ok()?;
        Some(told)
    };
    tokio::time::timeout(Duration::from_secs(1), ask).await.ok()?
}

/// A folder for data that need not outlive the test: in memory where the system has such a place.
fn scratch() -> TempDir {
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { TempDir::new_in(memory) } else { TempDir::new() };
    folder.expect("a folder for the test")
}

fn free_port() -> TcpListener {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port")
}
