//! A real Redis, which can be killed, frozen, and started again on the same data.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::soon;

/// When to look again.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Nobody can be sure of a free port: so often is tried.
const ATTEMPTS: usize = 10;
/// What it wants to hear before anything else.
pub const PASSWORD: &str = "opensesame";

/// A server with data of its own, which it flushes with each write. Its process and data end with this value, also
/// when a test panics.
#[derive(Debug)]
pub struct Server {
    folder: TempDir,
    address: SocketAddr,
    /// `None` while it is killed.
    process: Option<Child>,
}

impl Server {
    /// A new server on a free port; returns when it answers.
    pub async fn start() -> Self {
        let address = (Ipv4Addr::LOCALHOST, 0).into();
        let mut server = Self { folder: scratch(), address, process: None };
        // A port that was free a moment ago may be taken by now: then it ends at once, and we try again.
        for _ in 0..ATTEMPTS {
            server.address = free_address();
            server.spawn();
            if server.answers().await {
                return server;
            }
        }
        panic!("redis-server did not start in {ATTEMPTS} attempts:\n{}", server.log());
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where clients find it.
    pub fn url(&self) -> String {
        self.url_at(self.address)
    }

    /// The same behind something at another address.
    pub fn url_at(&self, address: SocketAddr) -> String {
        format!("redis://:{PASSWORD}@{address}")
    }

    /// Ends it at once (SIGKILL); its data stays.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Starts it on the same port and data, after it was killed; returns when it answers.
    pub async fn start_again(&mut self) {
        self.kill();
        for _ in 0..ATTEMPTS {
            self.spawn();
            if self.answers().await {
                return;
            }
            tokio::time::sleep(LOOK_AGAIN).await; // its port was taken meanwhile
        }
        panic!("redis-server did not start again in {ATTEMPTS} attempts:\n{}", self.log());
    }

    /// Stops it in its tracks (SIGSTOP): connections stay, and nothing is answered.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets a frozen one go on (SIGCONT).
    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let process = self.process.as_ref().expect("the server runs");
        kill_process(Pid::from_child(process), signal).expect("a signal can be sent");
    }

    fn spawn(&mut self) {
        let log = File::options().append(true).create(true).open(self.folder.path().join("log"));
        let log = log.expect("a log can be written");
        let mut redis = program();
        redis.args(["--bind", "127.0.0.1", "--port", &self.address.port().to_string()]);
        redis.args(["--appendonly", "yes", "--appendfsync", "always", "--save", ""]);
        redis.args(["--requirepass", PASSWORD, "--dir"]).arg(self.folder.path());
        redis.stdin(Stdio::null()).stdout(log.try_clone().expect("a handle")).stderr(log);
        self.process = Some(redis.spawn().expect("redis-server can be run"));
    }

    /// Waits until it does; `false` when it has ended instead.
    async fn answers(&mut self) -> bool {
        soon("redis-server answers", async {
            loop {
                let process = self.process.as_mut().expect("the server runs");
                if process.try_wait().expect("a child can be asked").is_some() {
                    return false;
                }
                if is_ready(self.address).await {
                    return true;
                }
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        })
        .await
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let ended = self.process.as_mut().and_then(|process| process.try_wait().ok().flatten());
        if let Some(status) = ended {
            eprintln!("a redis-server has ended by itself, {status}:\n{}", self.log());
        }
        self.kill();
    }
}

/// The program of the Debian package, or a failure that names it.
fn program() -> Command {
    let found = std::env::var_os("PATH").is_some_and(|path| {
        std::env::split_paths(&path).any(|folder| folder.join("redis-server").is_file())
    });
    assert!(
        found,
        "redis-server is not installed, and the suite needs it: apt-get install redis-server"
    );
    Command::new("redis-server")
}

/// Whether a server has read its data and lets us in.
async fn is_ready(address: SocketAddr) -> bool {
    let ask = async {
        let mut line = TcpStream::connect(address).await?;
        line.write_all(format!("AUTH {PASSWORD}\r\nPING\r\n").as_bytes()).await?;
        let mut answer = [0; 12];
        line.read_exact(&mut answer).await?;
        std::io::Result::Ok(&answer == b"+OK\r\n+PONG\r\n")
    };
    matches!(tokio::time::timeout(Duration::from_secs(1), ask).await, Ok(Ok(true)))
}

/// A folder for data that need not outlive the test: in memory where the system has such a place.
fn scratch() -> TempDir {
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { TempDir::new_in(memory) } else { TempDir::new() };
    folder.expect("a folder for the test")
}

fn free_address() -> SocketAddr {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    port.local_addr().expect("a bound port has an address")
}
