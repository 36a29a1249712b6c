//! The config file `vedetta.toml`; `vedetta.toml` in the repository has every key with its default.

mod fleet;
mod jobs;
mod watch;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroU64};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use serde::Deserialize;
use toml::de::{DeTable, DeValue};
use vedetta::access::{Access, AccessError, Role, Secret};
use vedetta::etcd::{BadEndpoint, ClientTls, Cluster, TlsFiles};
use vedetta::kv;
use vedetta::runtime::Command;
use vedetta::telemetry::{Settings, SettingsError};

pub(crate) use fleet::BusAt;
use fleet::{Bus, Supervisor};
use jobs::{Handler, JobName, Keep, Queue, Tick};
pub(crate) use watch::{Name, Time, Watch};

/// Read when no other is named and it exists.
const DEFAULT_FILE: &str = "vedetta.toml";

/// The password of `store.user`: never in a file that is shown around, nor in a list of processes.
const PASSWORD: &str = "VEDETTA_STORE_PASSWORD";

/// Instead of `jobs.url`.
const JOBS_URL: &str = "VEDETTA_JOBS_URL";

/// Where things are.
#[derive(Debug, Args)]
pub(crate) struct Place {
    /// The config file [default: ./vedetta.toml if it exists]
    #[arg(long, value_name = "FILE", env = "VEDETTA_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// The folder for everything that is kept
    #[arg(long, value_name = "DIR", env = "VEDETTA_DATA", default_value = "vedetta-data")]
    pub(crate) data: PathBuf,
    /// Where to serve HTTP; port 0 takes a free one [default: 127.0.0.1:7070]
    #[arg(long, value_name = "ADDR", env = "VEDETTA_HTTP")]
    http: Option<SocketAddr>,
    /// Where to serve etcd's protocols; port 0 takes a free one [default: 127.0.0.1:2379]
    #[arg(long, value_name = "ADDR", env = "VEDETTA_ETCD")]
    etcd: Option<SocketAddr>,
}

/// Where to listen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Addresses {
    pub(crate) http: SocketAddr,
    pub(crate) etcd: SocketAddr,
}

impl Place {
    pub(crate) fn addresses(&self, config: &Config) -> Result<Addresses, ConfigError> {
        let http = self.http.unwrap_or(config.http.listen);
        let etcd = self.etcd.unwrap_or(config.etcd.listen);
        if !http.ip().to_canonical().is_loopback() {
            config.check_beyond(http, &self.data)?;
        }
        // Who shows a certificate that we asked for has signed in.
        if !etcd.ip().to_canonical().is_loopback() && config.etcd.client_ca.is_none() {
            return Err(ConfigError::EtcdBeyond(etcd));
        }
        Ok(Addresses { http, etcd })
    }
}

/// Why the settings cannot be used. Nothing was done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("cannot read the config file {}", file.display())]
    Unreadable {
        file: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{}, line {line}: {message}", file.display())]
    Wrong { file: PathBuf, line: usize, message: String },
    #[error(
        "store.url is {0:?}: give \"embedded\", the store in the data folder, or the nodes of an etcd as \"etcd://host:2379,host:2379\""
    )]
    Store(String),
    #[error(
        "jobs.url begins with {0:?}: give \"embedded\", the file in the data folder, a PostgreSQL as \"postgres://user@host/database\", or a NATS as \"nats://host:4222\""
    )]
    Jobs(String),
    #[error("store.url cannot be used: {0}")]
    Endpoints(BadEndpoint),
    #[error("store.{0} is set, but store.url is \"embedded\", which needs none")]
    Needless(&'static str),
    #[error("store.{0} is set and store.{1} is not: TLS needs both")]
    HalfStore(&'static str, &'static str),
    #[error("store.user is set: give its password in the environment, as {PASSWORD}")]
    Password,
    #[error("cannot listen on {0}: beyond loopback people must sign in, so {1}")]
    Beyond(SocketAddr, &'static str),
    #[error("http.{0} is set and http.{1} is not: TLS needs both")]
    HalfHttp(&'static str, &'static str),
    #[error("http.hosts has {0:?}: give names such as \"jobs.example.org\", without a port")]
    Host(String),
    #[error("cannot tell who may sign in")]
    Access(#[from] AccessError),
    #[error(
        "cannot serve etcd's protocols on {0}: beyond loopback clients must show a certificate, so set etcd.cert, etcd.key and etcd.client-ca"
    )]
    EtcdBeyond(SocketAddr),
    #[error("etcd.{0} is set and etcd.{1} is not: TLS needs both")]
    Half(&'static str, &'static str),
    #[error("watch.{0}.quiet has {1:?}, which is not in its key-types and so never seen")]
    Quiet(String, String),
    #[error("handler.{0}: no job of it would be taken: {1}")]
    Handler(String, String),
    #[error("handler.{0} has both cost and cost-from: give one")]
    TwoCosts(String),
    #[error("handler.{0}.cost-from is set: say what each value costs in [handler.{0}.costs]")]
    NoCosts(String),
    #[error("handler.{0}.costs is set: name the payload's field that it is for, as cost-from")]
    CostsOfWhat(String),
    #[error("queue.{0}.nats is set, but jobs.url is no nats://…")]
    NoNats(String),
    #[error("jobs.url is a NATS: say of at least one queue what its stream is, as queue.NAME.nats")]
    NoStream,
    #[error("queue.{0}: {1}")]
    Stream(String, String),
    #[error(
        "queue.{0}.nats.max-ack-pending is {1}, and one worker has {2} slots: give what all workers that share the \
         durable have together"
    )]
    AckPending(String, NonZeroU32, NonZeroU32),
    #[error("queue.{0}.{1} is for streams: it goes with queue.{0}.nats")]
    OnlyStreams(String, &'static str),
    #[error("periodic.{0}: the queue {1:?} is a stream, which keeps no time")]
    TickStream(String, String),
    #[error("periodic.{0} needs one of every and cron; zone goes with cron")]
    TickWhen(String),
    #[error("periodic.{0}: {1}")]
    Tick(String, String),
    #[error(
        "queue.{0}.heartbeat is more than a third of its ack-wait: jobs that run would be handed out again"
    )]
    Heartbeat(String),
    #[error(
        "bus.url begins with {0:?}: give \"same\", where the jobs are, a Redis as \"redis://:password@host:6379\", or a PostgreSQL as \"postgres://user@host/database\""
    )]
    Bus(String),
    #[error(
        "no supervisor with a queue to work is declared: add [supervisor.NAME] and a handler to the config file"
    )]
    NoSupervisor,
    #[error("supervisor.{0}.min is {1} and its max is {2}: give a max that is not below")]
    MinMax(String, u32, NonZeroU32),
    #[error("supervisor.{0}.queues: {1}")]
    SupervisorQueues(String, Box<ConfigError>),
    #[error("no handler is declared for the queue {0:?}: nobody could work it")]
    Undeclared(String),
    #[error(
        "the queue {0:?} is a stream of NATS, which the server works itself: a supervisor cannot"
    )]
    WorkedStream(String),
    #[error(transparent)]
    Telemetry(#[from] SettingsError),
    #[error("{} is not a folder", .0.display())]
    Folder(PathBuf),
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Config {
    pub(crate) store: Store,
    pub(crate) jobs: Jobs,
    pub(crate) bus: Bus,
    pub(crate) http: Http,
    pub(crate) auth: Auth,
    pub(crate) etcd: Etcd,
    pub(crate) shutdown: Shutdown,
    pub(crate) watch: BTreeMap<Name, Watch>,
    queue: BTreeMap<JobName, Queue>,
    pub(crate) handler: BTreeMap<JobName, Handler>,
    periodic: BTreeMap<JobName, Tick>,
    supervisor: BTreeMap<JobName, Supervisor>,
    pub(crate) retention: Keep,
    telemetry: Telemetry,
}

/// The `[store]` table.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Store {
    url: String,
    ca: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    user: Option<String>,
    keep_revisions: NonZeroU64,
    #[serde(with = "humantime_serde")]
    keep_age: Option<Duration>,
    quota: Size,
}

/// The `[telemetry]` table: where traces and numbers go, and how many traces.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct Telemetry {
    otlp: Option<String>,
    sample: f64,
}

impl Default for Telemetry {
    fn default() -> Self {
        Self { otlp: None, sample: 1.0 }
    }
}

/// The `[jobs]` table: where jobs and the queues of stages are.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Jobs {
    url: String,
}

impl Default for Jobs {
    fn default() -> Self {
        Self { url: "embedded".into() }
    }
}

impl Jobs {
    /// Where jobs are. A URL may hold a password, so it may come from the environment.
    pub(crate) fn at(&self) -> Result<JobsAt, ConfigError> {
        let url = std::env::var(JOBS_URL).unwrap_or_else(|_| self.url.clone());
        let (scheme, _) = url.split_once(':').unwrap_or((&url, ""));
        match scheme {
            "embedded" => Ok(JobsAt::Embedded),
            "postgres" | "postgresql" => Ok(JobsAt::Postgres(url)),
            "nats" | "tls" => Ok(JobsAt::Nats(url)),
            // The rest of it may be a secret.
            scheme => Err(ConfigError::Jobs(scheme.to_owned())),
        }
    }
}

/// Where jobs are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum JobsAt {
    /// In the data folder.
    Embedded,
    /// In a PostgreSQL.
    Postgres(String),
    /// Those of queues that say so in streams of a NATS, the rest in the data folder.
    Nats(String),
}

/// The `[http]` table.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Http {
    pub(crate) listen: SocketAddr,
    pub(crate) hosts: Vec<String>,
    connections: NonZeroU32,
    tls_cert: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    insecure: bool,
}

/// The `[auth]` table: whether people sign in.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Auth {
    pub(crate) enabled: bool,
    /// What commands that the server starts may do.
    pub(crate) commands: Role,
}

/// How commands that the server starts reach it: as our client does.
#[derive(Debug, Default)]
pub(crate) struct Own {
    pub(crate) url: String,
    pub(crate) token: Option<Secret>,
}

impl Own {
    pub(crate) fn tell(&self, command: Command) -> Command {
        let command = command.variable("VEDETTA_SERVER", &self.url);
        match &self.token {
            Some(token) => command.variable("VEDETTA_TOKEN", token.reveal()),
            None => command,
        }
    }
}

/// The `[etcd]` table.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Etcd {
    pub(crate) listen: SocketAddr,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    client_ca: Option<PathBuf>,
}

/// The `[shutdown]` table.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Shutdown {
    #[serde(with = "humantime_serde")]
    pub(crate) grace: Duration,
}

impl Default for Store {
    fn default() -> Self {
        Self {
            url: "embedded".into(),
            ca: None,
            cert: None,
            key: None,
            user: None,
            keep_revisions: NonZeroU64::new(1_000_000).expect("it is not zero"),
            keep_age: None,
            quota: Size(8_000_000_000),
        }
    }
}

impl Default for Http {
    fn default() -> Self {
        let listen = ([127, 0, 0, 1], 7070).into();
        let connections = NonZeroU32::new(1024).unwrap_or(NonZeroU32::MIN);
        let (hosts, tls_cert, tls_key) = (Vec::new(), None, None);
        Self { listen, hosts, connections, tls_cert, tls_key, insecure: false }
    }
}

impl Default for Auth {
    fn default() -> Self {
        Self { enabled: false, commands: Role::Operator }
    }
}

impl Http {
    /// How much of the server clients may take.
    pub(crate) fn limits(&self) -> vedetta::dashboard::Limits {
        let connections = usize::try_from(self.connections.get()).unwrap_or(usize::MAX);
        // Nobody has so many streams that others, or they themselves, cannot ask for anything.
        let streams = (connections / 2).max(1);
        vedetta::dashboard::Limits { connections, streams, ..Default::default() }
    }

    /// How to speak TLS, if at all.
    pub(crate) fn tls(&self) -> Result<Option<TlsFiles>, ConfigError> {
        match (&self.tls_cert, &self.tls_key) {
            (Some(cert), Some(key)) => {
                Ok(Some(TlsFiles { cert: cert.clone(), key: key.clone(), client_ca: None }))
            }
            (Some(_), None) => Err(ConfigError::HalfHttp("tls-cert", "tls-key")),
            (None, Some(_)) => Err(ConfigError::HalfHttp("tls-key", "tls-cert")),
            (None, None) => Ok(None),
        }
    }

    /// What the types of the values cannot say.
    fn check(&self) -> Result<(), ConfigError> {
        let fits = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        let wrong = self.hosts.iter().find(|name| name.is_empty() || !name.chars().all(fits));
        match wrong {
            Some(name) => Err(ConfigError::Host(name.clone())),
            None => self.tls().map(drop),
        }
    }
}

impl Default for Etcd {
    fn default() -> Self {
        let listen = ([127, 0, 0, 1], 2379).into();
        Self { listen, cert: None, key: None, client_ca: None }
    }
}

impl Etcd {
    /// How to speak TLS, if at all.
    pub(crate) fn tls(&self) -> Result<Option<TlsFiles>, ConfigError> {
        let client_ca = self.client_ca.clone();
        match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => {
                Ok(Some(TlsFiles { cert: cert.clone(), key: key.clone(), client_ca }))
            }
            (Some(_), None) => Err(ConfigError::Half("cert", "key")),
            (None, Some(_)) => Err(ConfigError::Half("key", "cert")),
            (None, None) if client_ca.is_some() => Err(ConfigError::Half("client-ca", "cert")),
            (None, None) => Ok(None),
        }
    }
}

impl Default for Shutdown {
    fn default() -> Self {
        Self { grace: Duration::from_secs(30) }
    }
}

impl Config {
    /// The named file, or the default one if it is there, or the defaults.
    pub(crate) fn load(named: Option<&Path>) -> Result<Self, ConfigError> {
        let file = named.unwrap_or(Path::new(DEFAULT_FILE));
        let text = match std::fs::read_to_string(file) {
            Ok(text) => text,
            Err(error) if named.is_none() && error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Self::default());
            }
            Err(source) => return Err(ConfigError::Unreadable { file: file.into(), source }),
        };
        let config = Self::parse(&text).map_err(|(line, message)| ConfigError::Wrong {
            file: file.into(),
            line,
            message,
        })?;
        config.store.check()?;
        config.http.check()?;
        config.watch.iter().try_for_each(|(name, watch)| watch.check(name))?;
        config.check_jobs()?;
        config.check_fleet()?;
        config.telemetry()?;
        Ok(config)
    }

    /// Where traces and numbers go, if anywhere.
    pub(crate) fn telemetry(&self) -> Result<Option<Settings>, ConfigError> {
        let Telemetry { otlp, sample } = &self.telemetry;
        Ok(Settings::find(otlp.as_deref(), *sample)?)
    }

    /// What is most likely a mistake, though it may be meant so: in sentences.
    pub(crate) fn doubts(&self) -> Result<Vec<String>, ConfigError> {
        let cannot_run = self.programs().filter_map(|(name, program)| {
            let why = runnable(program).err()?;
            Some(format!("{name} cannot be run: {why}"))
        });
        let all = cannot_run.chain(self.unhandled()?.into_iter().map(|(name, kind)| {
            format!("{name} asks for jobs of the kind {kind:?}, for which no handler is declared")
        }));
        let idle = self.idle_supervisors().into_iter();
        Ok(all.chain(idle.map(|(name, why)| format!("{name} has no queues yet: {why}"))).collect())
    }

    /// What is run, by which table of the file.
    pub(crate) fn programs(&self) -> impl Iterator<Item = (String, &str)> {
        let watchers =
            self.watch.iter().map(|(name, watch)| (format!("watch.{}", name.0), watch.program()));
        let handlers = self.handler.iter();
        let handlers =
            handlers.map(|(kind, handler)| (format!("handler.{}", kind.0), handler.program()));
        watchers.chain(handlers)
    }

    /// Whether it is safe to listen where others reach us.
    fn check_beyond(&self, at: SocketAddr, data: &Path) -> Result<(), ConfigError> {
        let not_yet = |what| Err(ConfigError::Beyond(at, what));
        if !self.auth.enabled {
            return not_yet(
                "set auth.enabled = true, or use a loopback address such as 127.0.0.1:7070",
            );
        }
        if self.http.tls()?.is_none() && !self.http.insecure {
            return not_yet(
                "set http.tls-cert and http.tls-key, or http.insecure = true where nobody listens in",
            );
        }
        if !Access::has_anybody(data)? {
            return not_yet(
                "add somebody first: `vedetta user add NAME` or `vedetta token add NAME`",
            );
        }
        Ok(())
    }

    /// On error: the line and what is wrong with it.
    fn parse(text: &str) -> Result<Self, (usize, String)> {
        toml::from_str(text).map_err(|error| {
            let start = error.span().map_or(0, |span| span.start);
            let line = text.get(..start).unwrap_or_default().matches('\n').count() + 1;
            (line, explained(text, &error))
        })
    }
}

/// What is wrong, and with which key.
fn explained(text: &str, error: &toml::de::Error) -> String {
    let message = error.message();
    let Some(span) = error.span() else { return message.to_owned() };
    let table = DeTable::parse(text).ok();
    let Some(path) = table.and_then(|table| path_to(table.get_ref(), span.start)) else {
        return message.to_owned();
    };
    let value = text.get(span).unwrap_or_default();
    if message.ends_with("expected a sequence") && value.starts_with(['"', '\'']) {
        let key = path.rsplit('.').next().unwrap_or_default();
        return format!("{path} is a list: give {key} = [{value}]");
    }
    format!("{path}: {message}")
}

/// The key that stands at a place of the text, or whose value does.
fn path_to(table: &DeTable<'_>, at: usize) -> Option<String> {
    table.iter().find_map(|(key, value)| {
        let name = key.get_ref();
        let within = match value.get_ref() {
            DeValue::Table(inner) => path_to(inner, at).map(|rest| format!("{name}.{rest}")),
            _ => None,
        };
        let is_here = || key.span().contains(&at) || value.span().contains(&at);
        within.or_else(|| is_here().then(|| name.to_string()))
    })
}

impl Store {
    /// What the types of the values cannot say.
    fn check(&self) -> Result<(), ConfigError> {
        let Self { url, ca, cert, key, user, .. } = self;
        if url == "embedded" {
            let needless = [
                ("ca", ca.is_some()),
                ("cert", cert.is_some()),
                ("key", key.is_some()),
                ("user", user.is_some()),
            ];
            return match needless.iter().find(|(_, is_set)| *is_set) {
                Some((name, _)) => Err(ConfigError::Needless(name)),
                None => Ok(()),
            };
        }
        if !url.starts_with("etcd://") {
            return Err(ConfigError::Store(url.clone()));
        }
        url.parse::<Cluster>().map_err(ConfigError::Endpoints)?;
        match (ca, cert, key) {
            (_, Some(_), None) => Err(ConfigError::HalfStore("cert", "key")),
            (_, None, Some(_)) => Err(ConfigError::HalfStore("key", "cert")),
            (None, Some(_), Some(_)) => Err(ConfigError::HalfStore("cert", "ca")),
            _ if user.is_some() && std::env::var_os(PASSWORD).is_none() => {
                Err(ConfigError::Password)
            }
            _ => Ok(()),
        }
    }

    /// The etcd that watchers follow instead of the embedded store.
    pub(crate) fn cluster(&self) -> anyhow::Result<Option<Cluster>> {
        if self.url == "embedded" {
            return Ok(None);
        }
        let mut cluster: Cluster = self.url.parse().map_err(ConfigError::Endpoints)?;
        if let Some(ca) = self.ca.clone() {
            let (cert, key) = (self.cert.clone(), self.key.clone());
            cluster = cluster.tls(&ClientTls { ca, cert, key })?;
        }
        if let Some(user) = &self.user {
            let password = std::env::var(PASSWORD).map_err(|_| ConfigError::Password)?;
            cluster = cluster.user(user, password);
        }
        Ok(Some(cluster))
    }

    pub(crate) fn options(&self) -> kv::Options {
        kv::Options {
            limits: kv::Limits::default(),
            quota: Some(self.quota.0),
            keep: kv::Keep { revisions: Some(self.keep_revisions.get()), age: self.keep_age },
        }
    }
}

/// The file of a program that a command names, if it can be run; else why not, and what to do.
pub(crate) fn runnable(program: &str) -> Result<PathBuf, String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = if program.contains('/') {
        Some(PathBuf::from(program)).filter(|file| file.is_file())
    } else {
        std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
    };
    let Some(file) = found else {
        let place = if program.contains('/') { "a file" } else { "in PATH" };
        return Err(format!("it runs {program}, which is not {place}"));
    };
    match rustix::fs::access(&file, rustix::fs::Access::EXEC_OK) {
        Ok(()) => Ok(file),
        Err(_) => {
            let advice = format!("chmod +x {}", file.display());
            Err(format!("{} is not executable: {advice}", file.display()))
        }
    }
}

/// A number of bytes, for example `8GB` or `512MiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Size(pub(crate) u64);

impl TryFrom<String> for Size {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not a size such as \"8GB\" or \"512MiB\"");
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let number: u64 = text[..digits].parse().map_err(|_| wrong())?;
        let unit = match text[digits..].trim() {
            "B" => 1,
            "KB" | "kB" => 1000,
            "MB" => 1000_u64.pow(2),
            "GB" => 1000_u64.pow(3),
            "TB" => 1000_u64.pow(4),
            "KiB" => 1 << 10,
            "MiB" => 1 << 20,
            "GiB" => 1 << 30,
            "TiB" => 1 << 40,
            _ => return Err(wrong()),
        };
        number.checked_mul(unit).map(Self).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = include_str!("../../../vedetta.toml");

    #[test]
    fn every_value_in_the_commented_file_is_the_default() {
        let example: toml::Table = EXAMPLE.parse().unwrap();
        assert_eq!(Config::parse(EXAMPLE), Ok(Config::default()));
        let keys = example.values().map(|table| table.as_table().unwrap().len()).sum::<usize>();
        assert_eq!(
            keys, 17,
            "all but keep-age, otlp, TLS, watchers and what jobs are declared, which are off"
        );
    }

    #[test]
    fn what_is_commented_out_is_understood_too() {
        let mut on = EXAMPLE.to_owned();
        let watch = ["prefix", "run", "key-types", "quiet", "parallel", "timeout", "resync"];
        for key in ["keep-age", "otlp", "cert", "key", "client-ca", "tls-cert", "tls-key"]
            .iter()
            .chain(&watch)
        {
            on = on.replace(&format!("# {key} ="), &format!("{key} ="));
        }
        let jobs = [
            "queue",
            "cost",
            "max-attempts",
            "capacity",
            "ack-wait",
            "heartbeat",
            "kind",
            "payload",
            "cron",
            "zone",
            "queues",
            "balance",
            "min",
            "max",
            "tries",
            "memory",
            "rest",
            "cool-down",
            "grace",
        ];
        for key in jobs {
            on = on.replace(&format!("# {key} ="), &format!("{key} ="));
        }
        for table in ["watch", "handler", "queue", "periodic", "supervisor"] {
            on = on.replace(&format!("# [{table}."), &format!("[{table}."));
        }
        let config = Config::parse(&on).unwrap();
        config.check_jobs().unwrap();
        config.check_fleet().unwrap();
        assert_eq!(config.supervised(), ["media".to_owned()].into());
        let own = Own { url: "http://127.0.0.1:7070".into(), token: None };
        let (name, settings, hire) = &config.supervisors(Path::new("vedetta"), &own, None)[0];
        assert_eq!((*name, settings.min, settings.max), ("default", 1, 10));
        let said: Vec<_> = hire.arguments.iter().map(|word| word.to_string_lossy()).collect();
        let said = said.join(" ");
        assert!(
            said.ends_with("--tries 3 --timeout 1m --memory 128000000B --rest 1s --grace 30s"),
            "{said}"
        );
        let kinds = config.kinds().unwrap();
        assert_eq!(kinds.0["transcode"].queue, "media");
        assert_eq!(config.workers(&Own::default()).len(), 1);
        assert_eq!(format!("{:?}", config.periodic().unwrap()[0].every), "30 3 * * * Europe/Rome");
        assert_eq!(config.store.keep_age, Some(Duration::from_secs(24 * 3600)));
        assert_eq!(config.telemetry.otlp.as_deref(), Some("http://127.0.0.1:4318"));
        let tls = config.http.tls().unwrap().unwrap();
        assert_eq!((tls.cert, tls.key), ("http.crt".into(), "http.key".into()));
        let tls = config.etcd.tls().unwrap().unwrap();
        assert_eq!(tls.cert, Path::new("server.crt"));
        assert_eq!(tls.key, Path::new("server.key"));
        assert_eq!(tls.client_ca.as_deref(), Some(Path::new("clients-ca.crt")));

        let whole = &config.watch[&Name("rooms".into())];
        let bare = "[watch.rooms]\nprefix = '/rooms/'\nrun = ['./on-room.sh']\n\
            key-types = ['livemeta', 'mixer']\nquiet = ['mixer']\nresync = '1h'";
        let bare = Config::parse(bare).unwrap();
        assert_eq!(whole, &bare.watch[&Name("rooms".into())], "the rest are the defaults");
    }

    #[test]
    fn a_supervisor_of_all_queues_has_none_until_a_handler_is_declared() {
        let doubts = |file: &str| Config::parse(file).unwrap().doubts().unwrap();
        let idle = "supervisor.default has no queues yet: no handler is declared";
        assert_eq!(doubts("[supervisor.default]"), [idle]);
        assert!(doubts("[supervisor.default]\n[handler.pack]\nrun = ['true']").is_empty());
    }

    #[test]
    fn the_stores_own_defaults_are_the_same() {
        assert_eq!(Store::default().options().keep, kv::Keep::default());
    }

    #[test]
    fn half_of_the_connections_may_be_streams_of_one_caller() {
        let limits = |text: &str| {
            let limits = Config::parse(text).unwrap().http.limits();
            (limits.connections, limits.streams)
        };
        let own = vedetta::dashboard::Limits::default();
        assert_eq!(limits(""), (own.connections, own.streams));
        assert_eq!(limits("[http]\nconnections = 5000"), (5000, 2500));
        assert_eq!(limits("[http]\nconnections = 1"), (1, 1));
    }

    #[test]
    fn unknown_keys_and_bad_values_are_refused_with_their_line() {
        for (text, line, message) in [
            ("[http]\nconnections = 0", 2, "nonzero"),
            ("[http]\nlisten = '127.0.0.1:1'\ncolor = 'red'", 3, "color"),
            ("[colors]", 1, "colors"),
            ("[store]\n\nquota = '8 parsecs'", 3, "is not a size"),
            ("[store]\nkeep-revisions = 0", 2, "nonzero"),
            ("[http]\nlisten = 'here'", 2, "socket address"),
            ("[shutdown]\ngrace = 'soon'", 2, "soon"),
            ("[store\n", 1, ""),
            ("[handler.x]\nrun = './x.sh'", 2, "handler.x.run is a list: give run = ['./x.sh']"),
            ("[handler.x]\nrun = 7", 2, "handler.x.run: invalid type"),
            ("[handler.x]\nqueue = 'a'", 1, "handler.x: missing field `run`"),
            (
                "[supervisor.a]\nqueues = \"b\"",
                2,
                "supervisor.a.queues is a list: give queues = [\"b\"]",
            ),
            ("[supervisor.a]\nmin = '5'", 2, "supervisor.a.min: invalid type"),
            ("[supervisor.a]\nmemory = 'much'", 2, "supervisor.a.memory: \"much\" is not a size"),
            ("[supervisor.a]\nmni = 5", 2, "supervisor.a.mni: unknown field"),
            (
                "[supervisor]\nmin = 5",
                2,
                "supervisor.min: invalid type: integer `5`, expected a table",
            ),
        ] {
            let (at, why) = Config::parse(text).unwrap_err();
            assert_eq!(at, line, "{text}: {why}");
            assert!(why.contains(message), "{text}: {why}");
        }
    }

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in
            [("1B", 1), ("8GB", 8_000_000_000), ("512MiB", 512 << 20), ("3 kB", 3000)]
        {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "8", "GB", "-1GB", "8gb", "1.5GB", "99999999999TB"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }
}
