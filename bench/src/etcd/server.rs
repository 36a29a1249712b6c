//! The servers, each a process of its own with a folder of its own.

use std::fs::File;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use vedetta_db::{DataFolder, Db};
use vedetta_kv::{SCHEMA, Store};

use super::client::{Connection, ECHO, RANGE};
use super::proto;
use super::proto::echo_server::{Echo, EchoServer};
use crate::figures::Cpu;
use crate::floor::Floor;
use crate::setup;

/// Starting and stopping may take so long, with a million keys and a busy disk.
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Etcd,
    /// The store and the endpoint alone.
    Vedetta,
    /// The program as it is released, with all that is in it.
    Up,
    /// Answers every call with nothing: at once, or when a plain log has it.
    Echo,
}

pub(crate) struct Server {
    kind: Kind,
    pub(crate) address: SocketAddr,
    folder: TempDir,
    process: Child,
}

impl Server {
    /// One that serves, with nothing in it.
    pub(crate) async fn start(kind: Kind) -> anyhow::Result<Self> {
        let folder = setup::folder()?;
        let address = free_address()?;
        let process = spawn(kind, address, folder.path())?;
        let mut server = Self { kind, address, folder, process };
        server.until_it_answers().await?;
        Ok(server)
    }

    /// Stops it and starts it on the same data: how long that takes from its start to the first read.
    pub(crate) async fn restart(&mut self) -> anyhow::Result<Duration> {
        self.end().await?;
        let started = Instant::now();
        self.process = spawn(self.kind, self.address, self.folder.path())?;
        self.until_it_answers().await?;
        Ok(started.elapsed())
    }

    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        self.end().await
    }

    /// CPU time it has used.
    pub(crate) fn cpu(&self) -> anyhow::Result<Cpu> {
        Cpu::of_process(self.process.id())
    }

    pub(crate) fn memory(&self) -> anyhow::Result<Memory> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let of = |name: &str| -> anyhow::Result<f64> {
            let line =
                status.lines().find_map(|line| line.strip_prefix(name)).context("no line")?;
            let kilobytes: f64 = line.trim().trim_end_matches(" kB").parse()?;
            Ok(kilobytes / 1024.0)
        };
        Ok(Memory { resident: of("VmRSS:")?, own: of("RssAnon:")? })
    }

    async fn until_it_answers(&mut self) -> anyhow::Result<()> {
        let started = Instant::now();
        while let Err(error) = self.ask().await {
            if let Some(status) = self.process.try_wait()? {
                let log = std::fs::read_to_string(log(self.folder.path())).unwrap_or_default();
                anyhow::bail!("{:?} ended at once, {status}:\n{log}", self.kind);
            }
            anyhow::ensure!(
                started.elapsed() < PATIENCE,
                "{:?} does not serve: {error:#}",
                self.kind
            );
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }

    async fn ask(&self) -> anyhow::Result<()> {
        let mut connection = Connection::open(self.address).await?;
        if self.kind == Kind::Echo {
            connection.call::<proto::Empty>(ECHO, &proto::Empty {}).await?;
        } else {
            let question = proto::RangeRequest { key: "/".into(), ..Default::default() };
            connection.call::<proto::RangeResponse>(RANGE, &question).await?;
        }
        Ok(())
    }

    async fn end(&mut self) -> anyhow::Result<()> {
        kill_process(Pid::from_child(&self.process), Signal::TERM)?;
        let started = Instant::now();
        while self.process.try_wait()?.is_none() {
            anyhow::ensure!(started.elapsed() < PATIENCE, "{:?} does not stop", self.kind);
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// In megabytes.
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    pub(crate) resident: f64,
    /// Without the pages of mapped files.
    pub(crate) own: f64,
}

fn log(folder: &Path) -> PathBuf {
    folder.join("log")
}

/// Free a moment ago.
fn free_address() -> anyhow::Result<SocketAddr> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?)
}

/// The program, built beside this one.
pub(crate) fn released() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe()?.with_file_name("vedetta");
    let name = program.display();
    anyhow::ensure!(program.exists(), "there is no {name}: cargo build --release -p vedetta-cli");
    Ok(program)
}

fn spawn(kind: Kind, address: SocketAddr, folder: &Path) -> anyhow::Result<Child> {
    let data = folder.join("data");
    let mut command = match kind {
        Kind::Etcd => {
            let client = format!("http://{address}");
            let peer = format!("http://{}", free_address()?);
            let mut etcd = Command::new("etcd");
            etcd.args(["--name", "bench", "--initial-cluster", &format!("bench={peer}")]);
            etcd.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
            etcd.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
            etcd.arg("--data-dir").arg(data);
            etcd
        }
        Kind::Up => {
            let mut up = Command::new(released()?);
            up.args(["up", "--http", "127.0.0.1:0", "--etcd", &address.to_string()]);
            up.arg("--data").arg(data).current_dir(folder);
            up
        }
        Kind::Vedetta | Kind::Echo => {
            let mut ours = Command::new(std::env::current_exe()?);
            ours.arg(if kind == Kind::Echo { "etcd-echo" } else { "etcd-serve" });
            ours.arg("--listen").arg(address.to_string()).arg("--data").arg(data);
            ours
        }
    };
    let log = File::options().create(true).append(true).open(log(folder))?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    command.spawn().map_err(|error| match (kind, error.kind()) {
        (Kind::Etcd, ErrorKind::NotFound) => anyhow::anyhow!(
            "there is no `etcd` to compare with: it is in Debian's package etcd-server"
        ),
        _ => anyhow::Error::new(error).context("cannot start a server"),
    })
}

#[derive(clap::Args)]
pub(crate) struct Serve {
    #[arg(long)]
    listen: SocketAddr,
    #[arg(long)]
    data: PathBuf,
}

/// Vedetta as `vedetta up` serves it, without its page.
pub(crate) async fn serve(args: Serve) -> anyhow::Result<()> {
    let stop = CancellationToken::new();
    let listener = tokio::net::TcpListener::bind(args.listen).await?;
    let folder = DataFolder::open(&args.data)?;
    let db = Db::open(&vedetta_db::Options::new(folder.database()), &[SCHEMA])?;
    let store = Store::open(db, vedetta_kv::Options::default()).await?;
    let endpoint = vedetta_etcd::Endpoint::new(store.clone());
    let serving = tokio::spawn(vedetta_etcd::serve(listener, endpoint, stop.clone()));
    terminated().await?;
    stop.cancel();
    serving.await?;
    store.close().await;
    Ok(())
}

/// The ceiling: what a program gets that serves gRPC with tonic as it comes. Ours does without most of it in the calls that
/// clients make most, so this is no bound for it.
pub(crate) async fn echo(args: Serve) -> anyhow::Result<()> {
    std::fs::create_dir_all(&args.data)?;
    let echo = EchoServer::new(Bare { log: Floor::open(&args.data)? });
    let service = tonic::transport::Server::builder().add_service(echo);
    let stop = async { terminated().await.unwrap_or_default() };
    Ok(service.serve_with_shutdown(args.listen, stop).await?)
}

async fn terminated() -> anyhow::Result<()> {
    signal(SignalKind::terminate())?.recv().await;
    Ok(())
}

struct Bare {
    log: Floor,
}

#[tonic::async_trait]
impl Echo for Bare {
    async fn echo(&self, _: Request<proto::Empty>) -> Result<Response<proto::Empty>, Status> {
        Ok(Response::new(proto::Empty {}))
    }

    async fn log(
        &self,
        request: Request<proto::PutRequest>,
    ) -> Result<Response<proto::Empty>, Status> {
        let proto::PutRequest { key, value, .. } = request.into_inner();
        self.log.append([key, value].concat()).await;
        Ok(Response::new(proto::Empty {}))
    }
}
