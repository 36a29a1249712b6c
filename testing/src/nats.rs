//! A real NATS server with JetStream, which can be killed, frozen, and started again on the same data.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;

use crate::soon;

/// When to look again.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Nobody can be sure of a free port: so often is tried.
const ATTEMPTS: usize = 10;

/// A server with data of its own. Its process and data end with this value, also when a test panics.
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
        Self::start_with("").await
    }

    /// The same with this configuration, as in the file of that name, beside where it listens and stores.
    pub async fn start_with(configuration: &str) -> Self {
        let address = (Ipv4Addr::LOCALHOST, 0).into();
        let mut server = Self { folder: scratch(), address, process: None };
        let file = server.folder.path().join("configuration");
        std::fs::write(file, configuration).expect("a file can be written");
        // A port that was free a moment ago may be taken by now: then it ends at once, and we try again.
        for _ in 0..ATTEMPTS {
            server.address = free_address();
            server.spawn();
            if server.answers().await {
                return server;
            }
        }
        panic!("nats-server did not start in {ATTEMPTS} attempts:\n{}", server.log());
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where clients find it.
    pub fn url(&self) -> String {
        format!("nats://{}", self.address)
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
        panic!("nats-server did not start again in {ATTEMPTS} attempts:\n{}", self.log());
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
        let mut nats = program();
        nats.args(["-a", "127.0.0.1", "-p", &self.address.port().to_string(), "-js", "-sd"]);
        nats.arg(self.folder.path().join("data")).arg("-c");
        nats.arg(self.folder.path().join("configuration")).stdin(Stdio::null());
        nats.stdout(log.try_clone().expect("a handle")).stderr(log);
        self.process = Some(nats.spawn().expect("nats-server can be run"));
    }

    /// Waits until it does; `false` when it has ended instead.
    async fn answers(&mut self) -> bool {
        soon("nats-server answers", async {
            loop {
                let process = self.process.as_mut().expect("the server runs");
                if process.try_wait().expect("a child can be asked").is_some() {
                    return false;
                }
                // It listens only when its streams are restored.
                if greets(self.address).await {
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
            eprintln!("a nats-server has ended by itself, {status}:\n{}", self.log());
        }
        self.kill();
    }
}

/// The program of the Debian package, or a failure that names it.
fn program() -> Command {
    // Debian puts it where only root looks.
    let usual = Path::new("/usr/sbin/nats-server");
    let found = std::env::var_os("PATH").is_some_and(|path| {
        std::env::split_paths(&path).any(|folder| folder.join("nats-server").is_file())
    });
    assert!(
        found || usual.is_file(),
        "nats-server is not installed, and the suite needs it: apt-get install nats-server"
    );
    if found { Command::new("nats-server") } else { Command::new(usual) }
}

/// Whether a server says who it is, as each does first.
async fn greets(address: SocketAddr) -> bool {
    let ask = async {
        let mut greeting = [0; 4];
        TcpStream::connect(address).await?.read_exact(&mut greeting).await?;
        std::io::Result::Ok(&greeting == b"INFO")
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
