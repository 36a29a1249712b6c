//! A fleet of worker processes while all that it needs fails: it returns to its size, no job is lost, no
//! command acts twice or after its time, no process is left behind.
//!
//! ```text
//!  driver ──jobs, commands──► vedetta up: killed, started again ──► workers: killed, frozen
//!    │ a worker of its own,          │      ▲ and their clocks jump
//!    │ which notes what it is told   └──► PostgreSQL, Redis: killed, started again
//!    └──► check ──► violations
//! ```
//!
//! The driver's own clock does not jump. That of the server and its workers, and that of a guest, a worker that nobody
//! supervises, are each what a file says, by libfaketime.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Program, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::ValueEnum;
use http::Method;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;
use testing::{postgres, redis};
use vedetta_jobs::remote::RemoteJobs;
use vedetta_jobs::{Jobs as _, JobsError, NewJob};

/// What keeps the jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Keeper {
    /// The embedded file.
    Sqlite,
    /// A PostgreSQL.
    Postgres,
}

/// What brings commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Bus {
    /// What keeps the jobs.
    Same,
    /// A Redis.
    Redis,
}

/// Torture a fleet: its workers, server and databases are killed and frozen under load.
#[derive(Debug, clap::Args)]
pub struct Command {
    /// What keeps the jobs.
    #[arg(long, default_value = "sqlite")]
    on: Keeper,
    /// What brings commands.
    #[arg(long, default_value = "same")]
    bus: Bus,
    /// How long.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Worker processes.
    #[arg(long, default_value_t = 4)]
    workers: usize,
    /// The clocks of the server and of the workers jump by up to an hour, too.
    #[arg(long)]
    clocks: bool,
    /// Decides about faults.
    #[arg(long, default_value_t = 0x5eed)]
    seed: u64,
    /// The program [default: vedetta, beside this one]
    #[arg(long)]
    program: Option<PathBuf>,
}

/// What is tortured, and how.
#[derive(Debug, Clone)]
pub struct Setup {
    /// What keeps the jobs.
    pub on: Keeper,
    /// What brings commands.
    pub bus: Bus,
    /// How long, at least: each kind of fault comes once in any case.
    pub time: Duration,
    /// Between two faults, at most.
    pub between_faults: Duration,
    /// Worker processes.
    pub workers: usize,
    /// The clocks of the server and of the workers jump, too.
    pub clocks: bool,
    /// Decides about faults.
    pub seed: u64,
    /// The program that is tortured.
    pub program: PathBuf,
    /// What is done wrong on purpose.
    pub lie: Option<Lie>,
}

/// Something done wrong on purpose, which must be noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lie {
    /// A command is handed out again.
    Twice,
    /// A command holds for longer than was asked for.
    Late,
    /// What a handler has started is left behind.
    Orphan,
}

/// What happened.
#[derive(Debug, Default)]
pub struct Report {
    /// Jobs that were done.
    pub jobs: usize,
    /// Commands that were put.
    pub commands: usize,
    /// And obeyed.
    pub obeyed: usize,
    /// How often each kind of fault came.
    pub faults: BTreeMap<&'static str, u64>,
    /// What cannot be.
    pub violations: Vec<String>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let faults: Vec<String> =
            self.faults.iter().map(|(what, count)| format!("{count} {what}")).collect();
        let Self { jobs, commands, obeyed, .. } = self;
        writeln!(f, "{jobs} jobs done, {commands} commands, {obeyed} obeyed")?;
        writeln!(f, "faults: {}", faults.join(", "))?;
        write!(f, "violations: {}", self.violations.len())?;
        self.violations.iter().try_for_each(|violation| write!(f, "\n  {violation}"))
    }
}

/// Whatever is to come true when all is quiet does within that.
const QUIET: Duration = Duration::from_secs(90);
/// How long a command of the driver holds.
const TTL: Duration = Duration::from_millis(700);

impl Command {
    /// Runs it, prints what happened, and says whether all was well.
    pub async fn run(self) -> anyhow::Result<bool> {
        let beside = || Some(std::env::current_exe().ok()?.with_file_name("vedetta"));
        let setup = Setup {
            on: self.on,
            bus: self.bus,
            time: Duration::from_secs(self.seconds),
            between_faults: Duration::from_millis(1500),
            workers: self.workers,
            clocks: self.clocks,
            seed: self.seed,
            program: self.program.or_else(beside).context("which program?")?,
            lie: None,
        };
        let report = run(&setup).await?;
        println!("{report}");
        Ok(report.violations.is_empty())
    }
}

/// Runs it, and says what happened.
pub async fn run(setup: &Setup) -> anyhow::Result<Report> {
    let program = &setup.program;
    anyhow::ensure!(program.is_file(), "there is no {}: build it first", program.display());
    let mut world = World::start(setup).await?;
    world.torment().await?;
    world.end().await
}

/// What can happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    WorkerKilled,
    WorkerFrozen,
    ServerKilled,
    RedisKilled,
    PostgresKilled,
    RollingRestart,
    ServersClock,
    GuestsClock,
}

impl Fault {
    const ALL: [(Self, u32); 8] = [
        (Self::WorkerKilled, 3),
        (Self::WorkerFrozen, 2),
        (Self::ServerKilled, 2),
        (Self::RedisKilled, 1),
        (Self::PostgresKilled, 1),
        (Self::RollingRestart, 1),
        (Self::ServersClock, 2),
        (Self::GuestsClock, 2),
    ];

    /// As it is reported.
    fn word(self) -> &'static str {
        match self {
            Self::WorkerKilled => "worker killed",
            Self::WorkerFrozen => "worker frozen",
            Self::ServerKilled => "server killed",
            Self::RedisKilled => "Redis killed",
            Self::PostgresKilled => "PostgreSQL killed",
            Self::RollingRestart => "rolling restart",
            Self::ServersClock => "clock of the server jumped",
            Self::GuestsClock => "clock of a worker jumped",
        }
    }

    fn can_be(self, setup: &Setup) -> bool {
        match self {
            Self::RedisKilled => setup.bus == Bus::Redis,
            Self::PostgresKilled => setup.on == Keeper::Postgres,
            Self::ServersClock | Self::GuestsClock => setup.clocks,
            _ => true,
        }
    }
}

impl Setup {
    /// The kinds of faults that come.
    pub fn faults(&self) -> Vec<&'static str> {
        let all = Fault::ALL.iter().filter(|(fault, _)| fault.can_be(self));
        all.map(|(fault, _)| fault.word()).collect()
    }
}

struct World {
    setup: Setup,
    folder: TempDir,
    /// A word on the command line of what handlers start, and of nothing else.
    mark: String,
    /// Kinds of faults that did not come yet.
    to_come: Vec<Fault>,
    postgres: Option<postgres::Server>,
    redis: Option<redis::Server>,
    address: SocketAddr,
    server: Child,
    /// With clocks that jump: a worker with one of its own.
    guest: Option<Child>,
    line: RemoteJobs,
    /// Jobs that were acknowledged.
    jobs: Vec<u64>,
    /// Commands for the driver's own worker: when each was asked for, and how often it came.
    commands: HashMap<String, (Instant, u32)>,
    report: Report,
}

impl World {
    async fn start(setup: &Setup) -> anyhow::Result<Self> {
        let program = &setup.program;
        fastrand::seed(setup.seed);
        let folder = TempDir::new()?;
        let (postgres, redis) = (
            match setup.on {
                Keeper::Postgres => Some(postgres::Server::start().await),
                Keeper::Sqlite => None,
            },
            match setup.bus {
                Bus::Redis => Some(redis::Server::start().await),
                Bus::Same => None,
            },
        );
        // What it starts would go on for long if nobody ended it; how long tells it from others of its kind.
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed()?.subsec_nanos();
        let mark = format!("0.{:07}{:04}", std::process::id(), now % 10_000);
        let end = if setup.lie == Some(Lie::Orphan) { "" } else { "; kill $!" };
        let start = if setup.lie == Some(Lie::Orphan) {
            "env -u VEDETTA_GUARD setsid sleep"
        } else {
            "sleep"
        };
        let config = format!(
            "[bus]\npoll = '200ms'\n[queue.default]\ncapacity = 2\nack-wait = '2s'\n\
             [handler.work]\nmax-attempts = 1000\n\
             run = ['sh', '-c', 'cat >/dev/null; {start} 600 {mark} </dev/null >/dev/null 2>&1 & sleep 0.03{end}']\n\
             [supervisor.chaos]\nmin = {0}\nmax = {0}\ngrace = '20s'\n",
            setup.workers
        );
        std::fs::write(folder.path().join("vedetta.toml"), config)?;
        if setup.clocks {
            let all = [SERVERS, GUESTS];
            all.iter().try_for_each(|clock| std::fs::write(folder.path().join(clock), "+0"))?;
        }
        let any = "127.0.0.1:0".parse()?;
        let (server, address) = up(program, folder.path(), any, postgres.as_ref(), redis.as_ref())?;
        let line = RemoteJobs::new(&format!("http://{address}"), None)?;
        let guest = if setup.clocks { Some(guest(program, folder.path(), address)?) } else { None };
        let mut to_come: Vec<Fault> = Fault::ALL.iter().map(|(fault, _)| *fault).collect();
        to_come.retain(|fault| fault.can_be(setup));
        fastrand::shuffle(&mut to_come);
        Ok(Self {
            setup: setup.clone(),
            mark,
            to_come,
            guest,
            folder,
            postgres,
            redis,
            address,
            server,
            line,
            jobs: Vec::new(),
            commands: HashMap::new(),
            report: Report::default(),
        })
    }

    async fn torment(&mut self) -> anyhow::Result<()> {
        let end = Instant::now() + self.setup.time;
        let most = u64::try_from(self.setup.between_faults.as_millis()).unwrap_or(u64::MAX).max(2);
        let mut fault_at = Instant::now() + Duration::from_secs(2);
        while Instant::now() < end || !self.to_come.is_empty() {
            self.ask_for_jobs().await;
            self.command().await;
            self.obey().await;
            if Instant::now() >= fault_at {
                self.fault().await?;
                fault_at = Instant::now() + Duration::from_millis(fastrand::u64(most / 8..most));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        if self.guest.is_some() {
            // What is asked for in between was asked for at a later time than it will be.
            self.restart_server_at(Some("+3600"))?;
            self.ask_for_jobs().await;
            self.restart_server_at(Some("-3600"))?;
        }
        Ok(())
    }

    /// What is not acknowledged may be there or not.
    async fn ask_for_jobs(&mut self) {
        let jobs = vec![NewJob::new("work"); 2];
        if let Ok(added) = self.line.enqueue(&jobs).await {
            self.jobs.extend(added.iter().map(|added| added.id.0));
        }
    }

    async fn ask(&self, method: Method, path: &str, body: &Value) -> Result<Value, JobsError> {
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        self.line.call(method, &format!("/api/v1{path}"), body).await
    }

    /// Tells the driver's own worker something, and now and then another.
    async fn command(&mut self) {
        let what = if fastrand::bool() { "pause" } else { "resume" };
        let ttl = if self.setup.lie == Some(Lie::Late) { 2 * TTL } else { TTL };
        let path = format!("/workers/witness/{what}?ttl_ms={}", ttl.as_millis());
        let asked = Instant::now();
        if let Ok(put) = self.ask(Method::POST, &path, &Value::Null).await {
            let id = put["id"].as_str().unwrap_or_default().to_owned();
            self.commands.entry(id).or_insert((asked, 0));
        }
        if fastrand::u8(..) < 8 {
            let workers = self.workers().await;
            if let Some(worker) = fastrand::choice(&workers) {
                let path = format!("/workers/{}/{what}", worker["id"].as_str().unwrap_or_default());
                let _ = self.ask(Method::POST, &path, &Value::Null).await;
            }
        }
    }

    /// Beats as a worker in any language does; what it is told must be new, and in time.
    async fn obey(&mut self) {
        let beat = json!({"queues": ["default"], "host": "driver", "version": "1"});
        let asked = Instant::now();
        let Ok(heard) = self.ask(Method::POST, "/workers/witness/beat", &beat).await else {
            return;
        };
        let mut commands = heard["commands"].as_array().cloned().unwrap_or_default();
        if self.setup.lie == Some(Lie::Twice) {
            commands.extend(commands.clone());
        }
        for command in commands {
            let left = Duration::from_millis(command["expires_ms"].as_u64().unwrap_or(0));
            let id = command["id"].as_str().unwrap_or_default().to_owned();
            // One that was put and whose answer was lost is not known.
            let (put, count) = self.commands.entry(id.clone()).or_insert((asked, 0));
            *count += 1;
            if *count > 1 {
                self.report.violations.push(format!("the command {id} was handed out again"));
            }
            // What the server counts from is a moment after we asked, and has a grain.
            if asked + left > *put + TTL + Duration::from_millis(100) {
                self.report.violations.push(format!("the command {id} lives for too long"));
            }
            if asked.elapsed() < left {
                self.report.obeyed += 1;
                let done = json!({"queues": ["default"], "host": "driver", "done": [id]});
                let _ = self.ask(Method::POST, "/workers/witness/beat", &done).await;
            }
        }
    }

    async fn workers(&self) -> Vec<Value> {
        let all = self.ask(Method::GET, "/workers", &Value::Null).await.unwrap_or_default();
        let all = all["workers"].as_array().cloned().unwrap_or_default();
        let strangers = ["witness", GUEST];
        let is_ours = |worker: &Value| {
            !strangers.iter().any(|it| worker["id"] == *it) && worker["status"] != "stopped"
        };
        all.into_iter().filter(is_ours).collect()
    }

    /// Each kind once, and then as it comes.
    fn next_fault(&mut self) -> Fault {
        if let Some(fault) = self.to_come.pop() {
            return fault;
        }
        let all = Fault::ALL.iter().filter(|(fault, _)| fault.can_be(&self.setup));
        let all: Vec<Fault> =
            all.flat_map(|(fault, weight)| std::iter::repeat_n(*fault, *weight as usize)).collect();
        fastrand::choice(all).unwrap_or(Fault::RollingRestart)
    }

    async fn fault(&mut self) -> anyhow::Result<()> {
        let fault = self.next_fault();
        let processes: Vec<u32> = self.processes().into_iter().collect();
        let victim = fastrand::choice(&processes).copied();
        match fault {
            Fault::WorkerKilled | Fault::WorkerFrozen => {
                let Some(pid) = victim else {
                    self.to_come.push(fault);
                    return Ok(());
                };
                let how = if fault == Fault::WorkerKilled { Signal::KILL } else { Signal::STOP };
                signal(pid, how);
            }
            Fault::ServerKilled => self.restart_server()?,
            Fault::RedisKilled => {
                if let Some(redis) = &mut self.redis {
                    redis.kill();
                    tokio::time::sleep(Duration::from_millis(fastrand::u64(0..1000))).await;
                    redis.start_again().await;
                }
            }
            Fault::PostgresKilled => {
                if let Some(postgres) = &mut self.postgres {
                    postgres.kill();
                    postgres.start_again().await;
                }
            }
            Fault::RollingRestart => {
                let _ = self.ask(Method::POST, "/workers/restart", &Value::Null).await;
            }
            Fault::ServersClock => self.jump(SERVERS)?,
            Fault::GuestsClock => self.jump(GUESTS)?,
        }
        self.happened(fault);
        Ok(())
    }

    fn happened(&mut self, fault: Fault) {
        *self.report.faults.entry(fault.word()).or_default() += 1;
    }

    fn jump(&self, clock: &str) -> anyhow::Result<()> {
        let to = fastrand::choice(["+3600", "-3600", "+0", "+61", "-61"]).unwrap_or("+0");
        Ok(std::fs::write(self.folder.path().join(clock), to)?)
    }

    fn restart_server(&mut self) -> anyhow::Result<()> {
        if self.guest.is_some() && fastrand::bool() {
            self.jump(SERVERS)?;
            self.happened(Fault::ServersClock);
        }
        self.restart_server_at(None)
    }

    /// With its clock set while it is down, if that is said.
    fn restart_server_at(&mut self, time: Option<&str>) -> anyhow::Result<()> {
        self.server.kill()?;
        self.server.wait()?;
        if let Some(time) = time {
            std::fs::write(self.folder.path().join(SERVERS), time)?;
        }
        let (postgres, redis) = (self.postgres.as_ref(), self.redis.as_ref());
        let folder = self.folder.path();
        self.server = up(&self.setup.program, folder, self.address, postgres, redis)?.0;
        Ok(())
    }

    /// Worker processes of our server, whoever knows of them.
    fn processes(&self) -> BTreeSet<u32> {
        let server = format!("http://{}", self.address);
        processes_with(|words| {
            words.contains(&&b"worker"[..])
                && words.contains(&server.as_bytes())
                && !words.contains(&GUEST.as_bytes())
        })
    }

    /// What handlers have started and did not end.
    fn started(&self) -> BTreeSet<u32> {
        processes_with(|words| words.contains(&self.mark.as_bytes()))
    }

    /// Waits until all is as it should be.
    async fn end(mut self) -> anyhow::Result<Report> {
        let began = Instant::now();
        let mut last = String::new();
        while began.elapsed() < QUIET {
            last = self.unrest().await;
            if last.is_empty() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        if !last.is_empty() {
            self.report.violations.push(last);
        }
        if let Some(guest) = &mut self.guest {
            if guest.try_wait()?.is_some() {
                self.report.violations.push("the guest has ended by itself".into());
            }
            signal(guest.id(), Signal::TERM);
            if !guest.wait()?.success() {
                self.report.violations.push("the guest did not end in good order".into());
            }
        }
        signal(self.server.id(), Signal::TERM);
        if !self.server.wait()?.success() {
            self.report.violations.push("the server did not end in good order".into());
        }
        let left: BTreeSet<u32> = self.processes().union(&self.started()).copied().collect();
        if !left.is_empty() {
            self.report.violations.push(format!("processes are left: {left:?}"));
            left.into_iter().for_each(|pid| signal(pid, Signal::KILL));
        }
        self.report.commands = self.commands.len();
        Ok(std::mem::take(&mut self.report))
    }

    /// What is not yet as it should be; empty if nothing is.
    async fn unrest(&mut self) -> String {
        let workers = self.workers().await;
        for worker in workers.iter().filter(|worker| worker["status"] == "paused") {
            let path = format!("/workers/{}/resume", worker["id"].as_str().unwrap_or_default());
            let _ = self.ask(Method::POST, &path, &Value::Null).await;
        }
        let running = workers.iter().filter(|worker| worker["status"] == "running");
        let running: BTreeSet<u32> =
            running.filter_map(|worker| worker["pid"].as_u64()?.try_into().ok()).collect();
        let processes = self.processes();
        if running.len() != self.setup.workers || running != processes {
            return format!("workers {running:?}, processes {processes:?}");
        }
        while let Some(id) = self.jobs.last() {
            let job = self.ask(Method::GET, &format!("/jobs/{id}"), &Value::Null).await;
            match job {
                Ok(job) if job["status"] == "done" => {
                    self.report.jobs += 1;
                    self.jobs.pop();
                }
                other => return format!("the job {id}: {other:?}"),
            }
        }
        let started = self.started();
        if !started.is_empty() && self.setup.lie.is_none() {
            return format!("what handlers started is left: {started:?}");
        }
        String::new()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for child in [Some(&mut self.server), self.guest.as_mut()].into_iter().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let left = self.processes().into_iter().chain(self.started());
        left.for_each(|pid| signal(pid, Signal::KILL));
    }
}

/// Processes with such a command line.
fn processes_with(is_it: impl Fn(&[&[u8]]) -> bool) -> BTreeSet<u32> {
    let all = std::fs::read_dir("/proc").into_iter().flatten();
    let all = all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    all.filter(|pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        is_it(&line.split(|byte| *byte == 0).collect::<Vec<_>>())
    })
    .collect()
}

fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // It may just have ended.
        let _ = kill_process(pid, signal);
    }
}

/// The worker that nobody supervises.
const GUEST: &str = "guest";
/// How far clocks are off, in files of the folder: that of the server and its workers, and that of the guest.
const SERVERS: &str = "clock";
const GUESTS: &str = "guests-clock";

/// The same program with the wall clock that a file says, if there is one. The other clocks stay as they are, as they
/// do when somebody sets the time.
fn with_clock(command: &mut Program, file: &Path) -> anyhow::Result<()> {
    if !file.exists() {
        return Ok(());
    }
    let folders = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib"];
    let library = folders.map(|folder| Path::new(folder).join("faketime/libfaketimeMT.so.1"));
    let library = library.into_iter().find(|file| file.is_file());
    let library = library.context("clocks cannot jump: apt-get install libfaketime")?;
    command.env("LD_PRELOAD", library).env("FAKETIME_TIMESTAMP_FILE", file);
    command.env("FAKETIME_CACHE_DURATION", "1").env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    command.env("DONT_FAKE_MONOTONIC", "1");
    Ok(())
}

/// Starts the worker that nobody supervises.
fn guest(program: &Path, folder: &Path, server: SocketAddr) -> anyhow::Result<Child> {
    let log = std::fs::File::options().append(true).create(true).open(folder.join("guests-log"))?;
    let mut command = Program::new(program);
    command.args(["worker", "run", "--queue", "default", "--id", GUEST]);
    command.args(["--server", &format!("http://{server}"), "--grace", "1h"]);
    command.current_dir(folder).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    with_clock(&mut command, &folder.join(GUESTS))?;
    Ok(command.spawn()?)
}

/// Starts the server; returns when it is ready.
fn up(
    program: &Path,
    folder: &Path,
    address: SocketAddr,
    postgres: Option<&postgres::Server>,
    redis: Option<&redis::Server>,
) -> anyhow::Result<(Child, SocketAddr)> {
    let log = std::fs::File::options().append(true).create(true).open(folder.join("log"))?;
    let mut command = Program::new(program);
    command.args(["up", "--http", &address.to_string(), "--etcd", "127.0.0.1:0"]);
    command.current_dir(folder).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
    with_clock(&mut command, &folder.join(SERVERS))?;
    if let Some(postgres) = postgres {
        command.env("VEDETTA_JOBS_URL", postgres.url());
    }
    if let Some(redis) = redis {
        command.env("VEDETTA_BUS_URL", redis.url());
    }
    let mut server = command.spawn()?;
    let out = BufReader::new(server.stdout.take().context("its output")?);
    let mut at = address;
    for line in out.lines() {
        let line = line?;
        if let Some(page) = line.strip_prefix("page ") {
            at = page.trim().trim_start_matches("http://").trim_end_matches('/').parse()?;
        }
        if line == "ready" {
            return Ok((server, at));
        }
    }
    let log = std::fs::read_to_string(folder.join("log")).unwrap_or_default();
    anyhow::bail!("the server did not start:\n{log}")
}
