//! A real NATS server with JetStream, which can be killed, frozen, and started again on the same data.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;

use crate::process::{Process, program, scratch};

/// A server with data of its own. Its process and data end with this value, also when a test panics.
#[derive(Debug)]
pub struct Server(Process);

impl Server {
    /// A new server on a free port; returns when it answers.
    pub async fn start() -> Self {
        Self::start_with("").await
    }

    /// The same with this configuration, as in the file of that name, beside where it listens and stores.
    pub async fn start_with(configuration: &str) -> Self {
        let mut process = Process::new("nats-server", scratch());
        let file = process.folder.path().join("configuration");
        std::fs::write(file, configuration).expect("a file can be written");
        process.start(command, greets).await;
        Self(process)
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.0.address
    }

    /// Where clients find it.
    pub fn url(&self) -> String {
        format!("nats://{}", self.address())
    }

    /// Ends it at once (SIGKILL); its data stays.
    pub fn kill(&mut self) {
        self.0.kill();
    }

    /// Has it end by itself (SIGTERM), with all written down; its data stays.
    pub fn stop(&mut self) {
        self.0.signal(Signal::TERM);
        let ended = self.0.child.take().map(|mut child| child.wait());
        assert!(matches!(ended, Some(Ok(_))), "{ended:?}");
    }

    /// Where it keeps a stream: `msgs` in there is what it has, and `obs` what its consumers await.
    pub fn store(&self, stream: &str) -> PathBuf {
        self.0.folder.path().join("data/jetstream/$G/streams").join(stream)
    }

    /// What it has said.
    pub fn log(&self) -> String {
        self.0.log()
    }

    /// Starts it on the same port and data, after it was killed or stopped; returns when it answers.
    pub async fn start_again(&mut self) {
        self.0.kill();
        self.0.start_again(command, greets).await;
    }

    /// Stops it in its tracks (SIGSTOP): connections stay, and nothing is answered.
    pub fn freeze(&self) {
        self.0.signal(Signal::STOP);
    }

    /// Lets a frozen one go on (SIGCONT).
    pub fn thaw(&self) {
        self.0.signal(Signal::CONT);
    }
}

fn command(folder: &Path, address: SocketAddr) -> Command {
    // Debian puts it where only root looks.
    let usual = Path::new("/usr/sbin/nats-server");
    let mut nats = program("nats-server", Some(usual), "nats-server");
    nats.args(["-a", "127.0.0.1", "-p", &address.port().to_string(), "-js", "-sd"]);
    nats.arg(folder.join("data")).arg("-c").arg(folder.join("configuration"));
    nats
}

/// Whether a server says who it is, as each does first; it listens only when its streams are restored.
async fn greets(address: SocketAddr) -> bool {
    let ask = async {
        let mut greeting = [0; 4];
        TcpStream::connect(address).await?.read_exact(&mut greeting).await?;
        std::io::Result::Ok(&greeting == b"INFO")
    };
    matches!(tokio::time::timeout(Duration::from_secs(1), ask).await, Ok(Ok(true)))
}
