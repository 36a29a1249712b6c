//! A real Redis, which can be killed, frozen, and started again on the same data.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::process::{Process, program, scratch};

/// What it wants to hear before anything else.
pub const PASSWORD: &str = "opensesame";

/// A server with data of its own, which it flushes with each write. Its process and data end with this value, also
/// when a test panics.
#[derive(Debug)]
pub struct Server(Process);

impl Server {
    /// A new server on a free port; returns when it answers.
    pub async fn start() -> Self {
        let mut process = Process::new("redis-server", scratch());
        process.start(command, is_ready).await;
        Self(process)
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.0.address
    }

    /// Where clients find it.
    pub fn url(&self) -> String {
        self.url_at(self.address())
    }

    /// The same behind something at another address.
    pub fn url_at(&self, address: SocketAddr) -> String {
        format!("redis://:{PASSWORD}@{address}")
    }

    /// Ends it at once (SIGKILL); its data stays.
    pub fn kill(&mut self) {
        self.0.kill();
    }

    /// Starts it on the same port and data, after it was killed; returns when it answers.
    pub async fn start_again(&mut self) {
        self.0.kill();
        self.0.start_again(command, is_ready).await;
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
    let mut redis = program("redis-server", None, "redis-server");
    redis.args(["--bind", "127.0.0.1", "--port", &address.port().to_string()]);
    redis.args(["--appendonly", "yes", "--appendfsync", "always", "--save", ""]);
    redis.args(["--requirepass", PASSWORD, "--dir"]).arg(folder);
    redis
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
