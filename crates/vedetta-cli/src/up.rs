use std::collections::BTreeMap;
use std::io::{self, IsTerminal as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;
use vedetta::access::Access;
use vedetta::dashboard::{self, Api, Observed};
use vedetta::db::postgres::Postgres;
use vedetta::db::{self, DataFolder, Db, FolderError};
use vedetta::etcd::{self, Endpoint};
use vedetta::fleet::{self, Crew, Supervising};
use vedetta::jobs::jetstream::JetStream;
use vedetta::jobs::postgres::PostgresJobs;
use vedetta::jobs::sqlite::SqliteJobs;
use vedetta::jobs::{self, Housekeeping, Jobs, Ledger, Worker, Working};
use vedetta::kv::{self, Store};
use vedetta::runtime::told::{Board, Reading};
use vedetta::runtime::{Keys, Room, Watching};
use vedetta::stage;
use vedetta::telemetry::{Exporter, Settings};

use crate::backup;
use crate::config::{Addresses, Config, ConfigError, JobsAt, Own, Place};
use crate::fleet::{Keeper, open_fleet, start_supervisors};
use crate::streams::Recorded;

/// Run the store with its HTTP API, page and etcd endpoint, the declared watchers, handlers and supervisors, until Ctrl-C or
/// SIGTERM
///
/// Prints where the page and the etcd endpoint are, and `ready` when both serve. Logs go to stderr; `VEDETTA_LOG` says how much, for
/// example `debug`.
#[derive(Debug, Args)]
pub(crate) struct Up {
    #[command(flatten)]
    place: Place,
    /// How to write logs [default: human on a terminal, json otherwise]
    #[arg(long, value_enum, env = "VEDETTA_LOG_FORMAT")]
    log_format: Option<LogFormat>,
}

/// All that is kept in the data folder.
pub(crate) const SCHEMAS: &[db::Schema] =
    &[kv::SCHEMA, stage::sqlite::SCHEMA, jobs::sqlite::SCHEMA, fleet::sqlite::SCHEMA];

/// What is left when the end has come may take so long to go.
const LAST_MOMENT: Duration = Duration::from_millis(500);

/// A signal so soon after the first is the same one, sent twice.
const ECHO: Duration = Duration::from_millis(500);

/// More files than all connections need that may be there by default. What is started here inherits the limit, and some
/// programs close every number below it first: a limit that is as high as it may be would hold them up for minutes.
const OPEN_FILES: u64 = 1 << 16;

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum LogFormat {
    Human,
    Json,
}

impl Up {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        start_logs(self.log_format);
        raise_open_files();
        let config = Config::load(self.place.config.as_deref())?;
        let addresses = self.place.addresses(&config)?;
        if self.place.data.exists() && !self.place.data.is_dir() {
            return Err(ConfigError::Folder(self.place.data).into());
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .context("cannot start")?;
        let done = runtime.block_on(run(&config, &self.place, addresses));
        // What still runs is dropped, which ends commands and all that they started.
        runtime.shutdown_timeout(LAST_MOMENT);
        done
    }
}

/// A shell's limit of 1,024 open files is less than the connections that are taken.
fn raise_open_files() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let wanted = maximum.map_or(OPEN_FILES, |most| most.min(OPEN_FILES));
    if current.is_none_or(|current| current >= wanted) {
        return;
    }
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum }) {
        tracing::debug!(%error, ?current, "the limit of open files stays");
    }
}

async fn run(config: &Config, place: &Place, addresses: Addresses) -> anyhow::Result<()> {
    let data = place.data.as_path();
    config.doubts()?.iter().for_each(|doubt| tracing::warn!("{doubt}"));
    let mut signals = Signals::listen().context("cannot listen for signals")?;
    let tls = config.etcd.tls()?.map(|files| files.load()).transpose()?;
    let http_tls = config.http.tls()?.map(|files| files.load()).transpose()?;
    config.store.cluster()?; // its files, before anything is made
    let scheme = if tls.is_some() { "https" } else { "http" };
    // First the ports, which leave nothing behind when one is taken.
    let (http_listener, http) = listen(addresses.http, "--http", data).await?;
    let (etcd_listener, etcd) = listen(addresses.etcd, "--etcd", data).await?;
    let folder = DataFolder::open(data)?;
    let damaged = |error: anyhow::Error| anyhow::anyhow!(backup::advised(&error));
    let db = Db::open(&db::Options::new(folder.database()), SCHEMAS);
    let db = db.map_err(|error| damaged(error.into()))?;
    let store = Store::open(db.clone(), config.store.options()).await;
    let store = store.map_err(|error| damaged(error.into()))?;

    let [stop, ending, workers_stop] = std::array::from_fn(|_| CancellationToken::new());
    let mut endpoint = Endpoint::new(store.clone());
    if let Some(tls) = tls {
        endpoint = endpoint.tls(tls);
    }
    let api = Api::new(store.clone()).ending(ending.clone()).limits(config.http.limits());
    let (api, ledger, streams, keeper) = open_jobs(config, db, api).await?;
    // What our workers do is seen, too. In the file alone nobody else settles anything.
    let observed = match config.jobs.at()? {
        JobsAt::Embedded => Observed::alone(ledger),
        _ => Observed::new(ledger),
    };
    let (api, exporter) = tell(config, api, &observed)?;
    let ledger: Arc<dyn Ledger> = Arc::clone(&observed) as _;
    let fleet = open_fleet(config, keeper, &ledger).await?;
    let api = api.observed(observed).kinds(config.kinds()?).queues(config.queues()?);
    let mut api = api.fleet(fleet.clone());
    let access = Access::open(data)?;
    let own = own(config, &access, http, http_tls.is_some())?;
    let lender = access.clone();
    api = api.access(access, config.auth.enabled).hosts(config.http.hosts.clone());
    if let Some(tls) = http_tls {
        api = api.tls(tls);
    }
    let housekeeping =
        Housekeeping::start(&ledger, config.periodic()?, config.retention.retention())?;
    let control = Arc::new(fleet.clone());
    let jobs_of = |queue: &str| match streams.get(queue) {
        Some(stream) => Arc::clone(stream) as Arc<dyn Jobs>,
        None => Arc::clone(&ledger) as _,
    };
    let mut workers = JoinSet::new();
    for crew in start_workers(config, &own, exporter.as_ref(), jobs_of)? {
        let name = crew[0].name().to_owned();
        let crew = Crew::new(name, Arc::clone(&control) as _, crew);
        workers.spawn(crew.run(workers_stop.clone(), config.shutdown.grace));
    }
    let supervisors = start_supervisors(config, &own, place.config.as_deref(), &control)?;
    let (api, watchers, reading) = start_watchers(config, api, &store, &own)?;
    let mut serving = JoinSet::new();
    serving.spawn(dashboard::serve(http_listener, api, stop.clone()));
    serving.spawn(etcd::serve(etcd_listener, endpoint, stop.clone()));
    let revision = store.status().revision;
    tracing::info!(%http, %etcd, data = %data.display(), %revision, "serving");
    let (page, data) = (&own.url, data.display());
    say(&format!("page   {page}/\netcd   {scheme}://{etcd}\ndata   {data}\nready\n"));

    tokio::select! {
        () = signals.next() => {}
        // They serve until told to stop.
        Some(ended) = serving.join_next() => {
            stop.cancel();
            store.close().await;
            ended.context("a server broke down")?;
            anyhow::bail!("a server has ended by itself");
        }
    }
    tracing::info!(grace = ?config.shutdown.grace, "stopping; a second signal ends it at once");
    ending.cancel();
    let end = async {
        let until = Instant::now() + config.shutdown.grace.min(LONGEST);
        // First what may still want to read and write.
        drop(housekeeping);
        tokio::join!(
            stop_watchers(watchers, config.shutdown.grace),
            reading.stop(),
            stop_workers(workers, workers_stop),
            stop_supervisors(supervisors, config.shutdown.grace),
        );
        fleet.close().await;
        for stream in streams.into_values() {
            stream.close().await;
        }
        stop.cancel();
        drain(&mut serving, until.saturating_duration_since(Instant::now())).await;
        store.close().await;
        take_back(&lender);
        if let Some(exporter) = exporter {
            flush(exporter).await;
        }
    };
    tokio::select! {
        () = end => {}
        () = signals.next() => anyhow::bail!("ended by a second signal"),
    }
    tracing::info!("stopped");
    Ok(())
}

/// Starts a worker for each queue that has handlers and no supervisor. Those that take what the machine has share it,
/// under one name; each of the others has slots of its own.
fn start_workers(
    config: &Config,
    own: &Own,
    exporter: Option<&Arc<Exporter>>,
    jobs_of: impl Fn(&str) -> Arc<dyn Jobs>,
) -> anyhow::Result<Vec<Vec<Working>>> {
    let workers = config.workers(own).into_iter();
    let workers = workers.filter(|(queue, _)| !config.supervised().contains(*queue));
    let workers = workers.map(|(queue, worker)| (queue, traced(worker, exporter)));
    let (shared, alone): (Vec<_>, Vec<_>) =
        workers.partition(|(queue, _)| config.takes_the_machine(queue));
    let mut crews = Vec::new();
    for (queue, worker) in alone {
        crews.push(vec![worker.start(jobs_of(queue))?]);
    }
    let room = Room::new(Worker::width());
    let mut together: Vec<Working> = Vec::new();
    for (queue, worker) in shared {
        let worker = match together.first() {
            Some(first) => worker.name(first.name()),
            None => worker,
        };
        together.push(worker.start_within(Arc::clone(&room), jobs_of(queue))?);
    }
    if !together.is_empty() {
        crews.push(together);
    }
    Ok(crews)
}

/// Ends the tokens of commands and workers, which are gone by now.
fn take_back(access: &Access) {
    if let Err(error) = access.take_back() {
        tracing::warn!(error = vedetta::core::explain(&error), "lent tokens are left behind");
    }
}

/// Has traces and numbers sent, if that is on.
fn tell(
    config: &Config,
    api: Api,
    observed: &Observed,
) -> anyhow::Result<(Api, Option<Arc<Exporter>>)> {
    let Some(settings) = config.telemetry()? else { return Ok((api, None)) };
    let exporter = start_telemetry(&settings, None)?;
    observed.tell(Arc::clone(&exporter) as _);
    let numbers = Arc::clone(&exporter);
    let api = api.numbers(settings.every(), move |families| numbers.numbers(families));
    Ok((api, Some(exporter)))
}

/// Starts sending traces and numbers of this process.
pub(crate) fn start_telemetry(
    settings: &Settings,
    name: Option<&str>,
) -> anyhow::Result<Arc<Exporter>> {
    let (host, pid) = (fleet::host_name(), std::process::id().to_string());
    let made_up = format!("{host}-{pid}");
    let about = [
        ("service.instance.id", name.unwrap_or(&made_up)),
        ("host.name", &host),
        ("process.pid", &pid),
    ];
    tracing::info!(to = settings.shown(), "traces and numbers are sent");
    Ok(Exporter::start(settings, &about)?)
}

/// The same worker, which tells what becomes of its jobs.
pub(crate) fn traced(worker: Worker, exporter: Option<&Arc<Exporter>>) -> Worker {
    match exporter {
        Some(exporter) => worker.spans(Arc::clone(exporter) as _),
        None => worker,
    }
}

/// Sends what is left, if that does not take long.
pub(crate) async fn flush(exporter: Arc<Exporter>) {
    let closed = tokio::task::spawn_blocking(move || exporter.close()).await;
    if let Err(error) = closed {
        tracing::error!(%error, "telemetry broke down");
    }
}

/// Starts the declared watchers, and shows them and those that other programs tell of.
fn start_watchers(
    config: &Config,
    mut api: Api,
    store: &Store,
    own: &Own,
) -> anyhow::Result<(Api, Vec<Watching<Keys>>, Reading)> {
    let mut watchers = Vec::new();
    for (name, watch) in &config.watch {
        // Each has a connection of its own: one that is busy does not hold up the others.
        let watching = if let Some(cluster) = config.store.cluster()? {
            let watching = watch.start(name, cluster, own);
            api = api.watcher_elsewhere(&name.0, watching.handle());
            watching
        } else {
            let watching = watch.start(name, store.clone(), own);
            api = api.watcher(&name.0, watching.handle());
            watching
        };
        watchers.push(watching);
    }
    let (board, reading) = match config.store.cluster()? {
        Some(cluster) => Board::start(&cluster),
        None => Board::start(store),
    };
    Ok((api.board(board), watchers, reading))
}

/// How the commands that are started here reach us. Whoever set a token for this process set it for them.
fn own(config: &Config, access: &Access, http: SocketAddr, tls: bool) -> anyhow::Result<Own> {
    let url = own_url(http, tls, &config.http.hosts);
    if !config.auth.enabled {
        return Ok(Own { url, token: None });
    }
    if access.users()?.is_empty() && access.tokens()?.is_empty() {
        tracing::warn!("nobody can sign in yet: add somebody with `vedetta user add NAME`");
    }
    let is_set = std::env::var_os("VEDETTA_TOKEN").is_some_and(|token| !token.is_empty());
    let lend = || access.lend("commands", config.auth.commands);
    let token = if is_set { None } else { Some(lend()?) };
    Ok(Own { url, token })
}

fn own_url(http: SocketAddr, tls: bool, hosts: &[String]) -> String {
    let scheme = if tls { "https" } else { "http" };
    // A certificate is for a name, more often than for an address.
    if let Some(name) = hosts.first().filter(|_| tls) {
        return format!("{scheme}://{name}:{}", http.port());
    }
    // All addresses are none that anybody can be asked at.
    let ip = match http.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    format!("{scheme}://{}", SocketAddr::new(ip, http.port()))
}

type Streams = BTreeMap<String, Arc<JetStream>>;

/// Opens what keeps the jobs and the queues of stages, and shows it.
async fn open_jobs(
    config: &Config,
    db: Db,
    api: Api,
) -> anyhow::Result<(Api, Arc<dyn Ledger>, Streams, Keeper)> {
    let at = config.jobs.at()?;
    if let JobsAt::Postgres(url) = at {
        let schemas = [stage::postgres::SCHEMA, jobs::postgres::SCHEMA, fleet::postgres::SCHEMA];
        let postgres = Postgres::open(&url, &schemas).await.context("jobs.url cannot be used")?;
        let api = api.stages(stage::postgres::Records::new(postgres.clone()));
        let jobs = Arc::new(PostgresJobs::new(postgres.clone()));
        return Ok((api, jobs, Streams::new(), Keeper::Postgres(postgres)));
    }
    let api = api.stages(stage::sqlite::Records::open(db.clone()).await?);
    let (jobs, keeper) = (SqliteJobs::open(db.clone()).await?, Keeper::Sqlite(db));
    let JobsAt::Nats(url) = at else { return Ok((api, Arc::new(jobs), Streams::new(), keeper)) };
    let opened = Recorded::open(jobs, &url, config.streams()?).await;
    let (recorded, streams) = opened.context("jobs.url cannot be used")?;
    Ok((api, Arc::new(recorded), streams, keeper))
}

/// The clock cannot count to the end of time.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

/// Lets commands that run finish within `grace`, and kills the rest.
async fn stop_watchers(watchers: Vec<Watching<Keys>>, grace: Duration) {
    let mut stopping: JoinSet<_> =
        watchers.into_iter().map(|watching| watching.stop(grace)).collect();
    while let Some(killed) = stopping.join_next().await {
        match killed {
            Ok(0) => {}
            Ok(killed) => tracing::warn!(killed, "the grace time is over: killed commands"),
            Err(error) => tracing::error!(%error, "a watcher broke down"),
        }
    }
}

/// Lets jobs that run finish within the grace time, and gives the rest back.
async fn stop_workers(mut workers: JoinSet<(fleet::Ending, usize)>, stop: CancellationToken) {
    stop.cancel();
    while let Some(ended) = workers.join_next().await {
        match ended {
            Ok((_, 0)) => {}
            Ok((_, ended)) => tracing::warn!(ended, "the grace time is over: gave back jobs"),
            Err(error) => tracing::error!(%error, "a worker broke down"),
        }
    }
}

/// Lets worker processes finish within `grace`, and kills the rest.
pub(crate) async fn stop_supervisors(supervisors: Vec<Supervising>, grace: Duration) {
    let mut stopping: JoinSet<_> =
        supervisors.into_iter().map(|supervisor| supervisor.stop(grace)).collect();
    while let Some(killed) = stopping.join_next().await {
        match killed {
            Ok(0) => {}
            Ok(killed) => tracing::warn!(killed, "the grace time is over: killed workers"),
            Err(error) => tracing::error!(%error, "a supervisor broke down"),
        }
    }
}

async fn listen(
    address: SocketAddr,
    flag: &str,
    data: &Path,
) -> anyhow::Result<(TcpListener, SocketAddr)> {
    let bound = TcpListener::bind(address).await;
    let bound = bound.and_then(|listener| listener.local_addr().map(|at| (listener, at)));
    bound.or_else(|error| {
        // Most likely it is held by the same Vedetta that has the folder: say so.
        if let Ok(Some(pid)) = DataFolder::holder(data) {
            return Err(FolderError::Held { path: data.to_owned(), pid }.into());
        }
        let advice = format!("stop what uses it or choose another with {flag}");
        Err(error).context(format!("cannot listen on {address} ({advice})"))
    })
}

async fn drain(serving: &mut JoinSet<()>, grace: Duration) {
    let all = async { while serving.join_next().await.is_some() {} };
    if tokio::time::timeout(grace, all).await.is_err() {
        tracing::warn!("the grace time is over: leaving the requests that still run");
        serving.shutdown().await;
    }
}

/// Nobody has to listen.
fn say(text: &str) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    /// Of a terminal that is gone; nothing if whoever started this wants it to go on, as nohup(1) does.
    hang_up: Option<Signal>,
    first: Option<Instant>,
}

impl Signals {
    pub(crate) fn listen() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up: if hears_hang_up() { Some(signal(SignalKind::hangup())?) } else { None },
            first: None,
        })
    }

    /// The next signal. Those that come with the first are that one: timeout(1) and others tell a process, and then its
    /// whole group.
    pub(crate) async fn next(&mut self) {
        loop {
            tokio::select! {
                _ = self.interrupt.recv() => {}
                _ = self.terminate.recv() => {}
                Some(()) = async { self.hang_up.as_mut()?.recv().await } => {}
            }
            if self.first.is_none_or(|first| first.elapsed() >= ECHO) {
                self.first.get_or_insert_with(Instant::now);
                return;
            }
        }
    }
}

/// Whether this was not told from outside to ignore SIGHUP: who listens for it ignores it no more.
fn hears_hang_up() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask & 1 == 0)
}

/// Stderr, whether anybody reads it or not: a worker outlives the supervisor that does.
struct Unheard(io::Stderr);

impl io::Write for Unheard {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = self.0.write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(crate) fn start_logs(format: Option<LogFormat>) {
    let filter = EnvFilter::try_from_env("VEDETTA_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let terminal = io::stderr().is_terminal();
    let logs =
        tracing_subscriber::fmt().with_writer(|| Unheard(io::stderr())).with_env_filter(filter);
    match format.unwrap_or(if terminal { LogFormat::Human } else { LogFormat::Json }) {
        LogFormat::Human => logs.with_ansi(terminal).init(),
        LogFormat::Json => logs.json().init(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_started_here_is_told_an_address_that_leads_here() {
        let hosts = ["jobs.example".to_owned(), "other.example".to_owned()];
        for (listens, tls, hosts, url) in [
            ("127.0.0.1:7070", false, &hosts[..0], "http://127.0.0.1:7070"),
            ("192.0.2.7:7070", false, &hosts, "http://192.0.2.7:7070"),
            ("0.0.0.0:7070", false, &hosts, "http://127.0.0.1:7070"),
            ("[::]:7070", false, &hosts, "http://[::1]:7070"),
            ("0.0.0.0:7070", true, &[], "https://127.0.0.1:7070"),
            ("0.0.0.0:7070", true, &hosts, "https://jobs.example:7070"),
        ] {
            assert_eq!(own_url(listens.parse().unwrap(), tls, hosts), url, "{listens}");
        }
    }
}
