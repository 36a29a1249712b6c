//! The server and the worker processes, and what can befall them.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use testing::{Proxy, nats, postgres, soon};
use tokio::net::TcpStream;
use tokio::time::sleep;

use super::{Backend, Setup};

/// A process of ours; it ends with this value.
#[derive(Debug)]
pub(super) struct Process(Child);

impl Process {
    fn start(command: &mut Command) -> io::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().map(Self)
    }

    /// SIGKILL.
    pub(super) fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }

    pub(super) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).expect("a signal can be sent");
    }

    /// Lets it end by itself; whether it did so well, and soon.
    pub(super) async fn end(mut self) -> bool {
        drop(self.0.stdin.take());
        for _ in 0..300 {
            match self.0.try_wait() {
                Ok(None) => sleep(Duration::from_millis(50)).await,
                Ok(Some(status)) => return status.success(),
                Err(_) => return false,
            }
        }
        false
    }

    fn runs(&mut self) -> bool {
        matches!(self.0.try_wait(), Ok(None))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What keeps the jobs.
#[derive(Debug)]
pub(super) enum Server {
    Sqlite { program: PathBuf, folder: PathBuf, port: u16, process: Option<Process> },
    Postgres(postgres::Server),
    Nats(nats::Server),
}

impl Server {
    pub(super) async fn start(setup: &Setup, folder: &Path) -> Self {
        match setup.on {
            Backend::Sqlite => {
                let free = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
                let port = free.and_then(|free| free.local_addr()).expect("a free port").port();
                let (program, folder) = (setup.program.clone(), folder.to_owned());
                let mut server = Self::Sqlite { program, folder, port, process: None };
                server.start_again().await;
                server
            }
            Backend::Postgres => Self::Postgres(postgres::Server::start().await),
            Backend::Nats => Self::Nats(nats::Server::start().await),
        }
    }

    pub(super) fn address(&self) -> SocketAddr {
        match self {
            Self::Sqlite { port, .. } => (Ipv4Addr::LOCALHOST, *port).into(),
            Self::Postgres(server) => server.address(),
            Self::Nats(server) => server.address(),
        }
    }

    /// Where it is found through a link.
    pub(super) fn url(&self, link: &Proxy) -> String {
        let address = link.address();
        match self {
            Self::Sqlite { .. } => format!("http://{address}"),
            Self::Postgres(_) => format!("postgres://postgres@{address}/postgres"),
            Self::Nats(_) => format!("nats://{address}"),
        }
    }

    /// SIGKILL; its data stays.
    pub(super) fn kill(&mut self) {
        match self {
            Self::Sqlite { process, .. } => drop(process.take()),
            Self::Postgres(server) => server.kill(),
            Self::Nats(server) => server.kill(),
        }
    }

    /// On the same data, after a kill.
    pub(super) async fn start_again(&mut self) {
        match self {
            Self::Sqlite { program, folder, port, process } => {
                let mut command = Command::new(&*program);
                command.arg("jobs-server").arg("--folder").arg(&*folder);
                command.arg("--port").arg(port.to_string());
                soon("the server answers", async {
                    loop {
                        let mut started = Process::start(&mut command).expect("a child starts");
                        // Its port may be taken meanwhile: then it ends, and is started again.
                        while started.runs() {
                            if TcpStream::connect((Ipv4Addr::LOCALHOST, *port)).await.is_ok() {
                                *process = Some(started);
                                return;
                            }
                            sleep(Duration::from_millis(10)).await;
                        }
                    }
                })
                .await;
            }
            Self::Postgres(server) => server.start_again().await,
            Self::Nats(server) => server.start_again().await,
        }
    }
}

/// Worker processes, each under the number of its log.
#[derive(Debug)]
pub(super) struct Workers {
    setup: Setup,
    folder: PathBuf,
    url: String,
    /// Where a stream's jobs are recorded.
    records: Option<SocketAddr>,
    /// How many were started.
    pub started: usize,
    pub running: Vec<(usize, Process)>,
}

impl Workers {
    pub(super) fn start(
        setup: &Setup,
        folder: &Path,
        url: String,
        records: Option<SocketAddr>,
    ) -> Self {
        let (setup, folder) = (setup.clone(), folder.to_owned());
        let count = setup.workers;
        let mut workers = Self { setup, folder, url, records, started: 0, running: Vec::new() };
        (0..count).for_each(|_| workers.start_one());
        workers
    }

    pub(super) fn start_one(&mut self) {
        let mut command = Command::new(&self.setup.program);
        command.arg("jobs-worker").arg("--on").arg(self.setup.on.name()).arg("--url");
        command.arg(&self.url).arg("--folder").arg(&self.folder);
        command.arg("--number").arg(self.started.to_string());
        command.arg("--lease").arg(humantime::format_duration(self.setup.lease).to_string());
        command.arg("--slots").arg(self.setup.slots.to_string());
        if let Some(records) = self.records {
            command.arg("--records").arg(records.to_string());
        }
        if let Some(lie) = self.setup.lie {
            command.arg("--lie").arg(lie.name());
        }
        let process = Process::start(&mut command).expect("a child starts");
        self.running.push((self.started, process));
        self.started += 1;
    }
}
