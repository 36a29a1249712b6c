use std::borrow::Cow;
use std::fs;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde::{Serialize, Serializer};
use serde_json::Value;
use vedetta::access::Access;
use vedetta::core::explain;
use vedetta::db::postgres::Postgres;
use vedetta::db::{self, DataFolder};
use vedetta::fleet::bus::redis::RedisBus;
use vedetta::jobs::jetstream::{self, JetStream};
use vedetta::kv;
use vedetta::telemetry::Settings;

use crate::backup;
use crate::client::{Client, ClientError, Remote};
use crate::config::{BusAt, Config, JobsAt, Place, runnable};
use crate::exit::No;
use crate::output::{self, Format};

/// Check the data folder, the database, the disk, the ports, what jobs.url and bus.url name, the TLS files and the watchers'
/// commands, and say what to do
///
/// Takes the same flags as `vedetta up`, and checks what that would use; of an etcd as store.url only its TLS files. With
/// --server it also checks whether a server is ready there and takes the token in `VEDETTA_TOKEN`. Changes nothing (to try
/// fsync it makes a file and removes it), and can be run beside a server. Ends with exit code 1 if something is broken;
/// programs that only optional parts need may be missing.
#[derive(Debug, Args)]
pub(crate) struct Doctor {
    #[command(flatten)]
    place: Place,
    /// A server that the client commands are to reach
    #[arg(long, value_name = "URL", env = "VEDETTA_SERVER")]
    server: Option<String>,
    /// How to print it
    #[arg(long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

/// What was looked at, how it is, and what to do about it.
#[derive(Debug, Serialize)]
struct Check {
    name: Cow<'static, str>,
    state: State,
    detail: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Ok,
    /// Fine for now.
    Note,
    Broken,
}

impl State {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Broken => "broken",
        }
    }
}

impl Serialize for State {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.word())
    }
}

/// Below this the store soon has no room to work.
const LITTLE_SPACE: u64 = 256 << 20;

/// What helps when a folder cannot be used.
const ANOTHER_FOLDER: &str = "choose another with --data";

/// What optional parts call: the program, and Debian's package of it.
const PROGRAMS: [(&str, &str); 7] = [
    ("etcd", "etcd-server"),
    ("postgres", "postgresql"),
    ("nats-server", "nats-server"),
    ("redis-server", "redis-server"),
    ("janus", "janus"),
    ("ffmpeg", "ffmpeg"),
    ("chromium", "chromium"),
];

impl Doctor {
    pub(crate) fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        let config = Config::load(self.place.config.as_deref())?;
        let addresses = self.place.addresses(&config)?;
        let data = &self.place.data;
        let found = DataFolder::holder(data);
        let holder = found.as_ref().ok().cloned().flatten();
        let mut checks = vec![
            folder(data),
            permissions(data),
            lock(data, found),
            database(data),
            space(data),
            fsync(data),
            access(data, &config),
            http_port(addresses.http, holder.as_deref(), config.http.tls()?.is_some()),
            etcd_port(addresses.etcd, holder.as_deref(), config.etcd.tls()?.is_some()),
        ];
        checks.extend(self.server.as_deref().map(server));
        let tls = [
            ("http TLS", config.http.tls()?.map(|files| files.load().map(drop))),
            ("etcd TLS", config.etcd.tls()?.map(|files| files.load().map(drop))),
        ];
        let loaded = |(name, loaded): (_, Option<Result<(), _>>)| Some((name, loaded?));
        for (name, loaded) in tls.into_iter().filter_map(loaded) {
            let loaded = loaded.map_err(|error| explain(&error));
            checks.push(Check::of(name, loaded.map(|()| "its files can be used")));
        }
        match config.store.cluster() {
            Ok(None) => {}
            Ok(Some(_)) => checks.push(Check::ok("store.url", "its settings can be used")),
            Err(error) => checks.push(Check::broken("store.url", explain(error.as_ref()))),
        }
        match config.bus.at()? {
            BusAt::Postgres(url) => checks.push(reached("bus.url", Postgres::open(&url, &[]))),
            BusAt::Redis(url) => checks.push(reached("bus.url", RedisBus::open(&url))),
            BusAt::Same => {}
        }
        match config.jobs.at()? {
            JobsAt::Postgres(url) => checks.push(reached("jobs.url", Postgres::open(&url, &[]))),
            JobsAt::Nats(url) => checks.extend(streams(&url, &config.streams()?)),
            JobsAt::Embedded => {}
        }
        checks.extend(config.telemetry()?.map(|settings| telemetry(&settings)));
        checks.extend(PROGRAMS.map(|(program, package)| optional(program, package)));
        checks.extend(config.programs().map(|(name, program)| match runnable(program) {
            Ok(file) => Check::ok(name, format!("it runs {}", file.display())),
            Err(why) => Check::broken(name, why),
        }));
        checks.extend(config.unhandled()?.into_iter().map(|(name, kind)| {
            let detail = format!("no handler is declared for jobs of the kind {kind:?}");
            Check::note(name, detail)
        }));
        let idle = config.idle_supervisors().into_iter();
        checks.extend(idle.map(|(name, why)| Check::note(name, format!("no queues yet: {why}"))));
        match self.output {
            Format::Json => output::json(out, &serde_json::json!({ "checks": checks }))?,
            Format::Table => {
                let rows: Vec<_> = checks.iter().map(Check::row).collect();
                output::table(out, ["CHECK", "STATE", "DETAIL"], &rows)?;
            }
        }
        if checks.iter().any(|check| check.state == State::Broken) {
            return Err(No::Broken.into());
        }
        Ok(())
    }
}

impl Check {
    fn ok(name: impl Into<Cow<'static, str>>, detail: impl Into<String>) -> Self {
        Self { name: name.into(), state: State::Ok, detail: detail.into() }
    }

    fn note(name: impl Into<Cow<'static, str>>, detail: impl Into<String>) -> Self {
        Self { name: name.into(), state: State::Note, detail: detail.into() }
    }

    fn broken(name: impl Into<Cow<'static, str>>, detail: impl Into<String>) -> Self {
        Self { name: name.into(), state: State::Broken, detail: detail.into() }
    }

    /// It works, or why not.
    fn of(name: &'static str, tried: Result<&str, String>) -> Self {
        match tried {
            Ok(detail) => Self::ok(name, detail),
            Err(why) => Self::broken(name, why),
        }
    }

    /// It cannot be told, for `path` may be there or not.
    fn out_of_reach(name: &'static str, path: &Path, error: &io::Error) -> Self {
        let advice = match error.kind() {
            io::ErrorKind::PermissionDenied => "run it as the user whose folder it is",
            _ => "check the mount and the permissions",
        };
        let detail =
            format!("cannot look at {}: {error}; {advice}, or {ANOTHER_FOLDER}", path.display());
        Self::broken(name, detail)
    }

    fn row(&self) -> [String; 3] {
        [self.name.to_string(), self.state.word().into(), output::one_line(&self.detail)]
    }
}

fn folder(data: &Path) -> Check {
    let name = "data folder";
    match fs::metadata(data) {
        Ok(found) if found.is_dir() => Check::ok(name, data.display().to_string()),
        Ok(_) => {
            Check::broken(name, format!("{} is not a folder: {ANOTHER_FOLDER}", data.display()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Check::note(
            name,
            format!("{} does not exist yet; `vedetta up` makes it", data.display()),
        ),
        Err(error) => Check::out_of_reach(name, data, &error),
    }
}

fn permissions(data: &Path) -> Check {
    let name = "permissions";
    let found = match fs::metadata(data) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Check::note(name, "nothing to check yet");
        }
        Err(error) => return Check::out_of_reach(name, data, &error),
    };
    let open_to_others = |path: &Path| {
        let mode = fs::metadata(path).map(|found| found.permissions().mode());
        mode.is_ok_and(|mode| mode & 0o077 != 0)
    };
    let file = data.join("vedetta.db");
    if open_to_others(data) {
        let mode = found.permissions().mode() & 0o777;
        let advice = format!("chmod 700 {}", data.display());
        return Check::broken(name, format!("other users may enter (mode {mode:o}): {advice}"));
    }
    if open_to_others(&file) {
        return Check::broken(name, format!("other users may read: chmod 600 {}", file.display()));
    }
    Check::ok(name, "only its owner may read it")
}

fn lock(data: &Path, holder: io::Result<Option<String>>) -> Check {
    let (name, file) = ("lock", data.join("lock"));
    match holder.and_then(|holder| Ok((holder, file.try_exists()?))) {
        Ok((Some(pid), _)) => Check::ok(name, format!("held by the process {pid}")),
        Ok((None, true)) => Check::ok(name, "held by nobody"),
        Ok((None, false)) => Check::ok(name, "never held"),
        Err(error) => Check::out_of_reach(name, &file, &error),
    }
}

fn database(data: &Path) -> Check {
    let (name, file) = ("database", data.join("vedetta.db"));
    // Not only whether it is there: SQLite does not say why it cannot open one.
    match fs::File::open(&file) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Check::note(name, "there is none yet; `vedetta up` makes it");
        }
        Err(error) => return Check::out_of_reach(name, &file, &error),
    }
    match sound(data) {
        Ok(revision) => Check::ok(name, format!("every row is sound up to revision {revision}")),
        Err(error) => Check::broken(name, backup::advised(&error)),
    }
}

fn sound(data: &Path) -> anyhow::Result<vedetta::Revision> {
    let file = data.join("vedetta.db");
    let idle = || matches!(DataFolder::holder(data), Ok(None));
    let connection = match db::inspect(&file, crate::up::SCHEMAS, idle()) {
        // A server that started meanwhile writes to the log.
        Err(db::OpenError::DamagedLog { .. }) if !idle() => {
            db::inspect(&file, crate::up::SCHEMAS, false)?
        }
        inspected => inspected?,
    };
    if let Some(first) = db::damage(&file)?.into_iter().next() {
        let damaged = anyhow::anyhow!("{} is damaged ({first})", file.display());
        anyhow::bail!(backup::with_advice(&damaged));
    }
    Ok(kv::check(&connection)?)
}

/// The folder, or the nearest one above it that exists.
fn nearest(data: &Path) -> PathBuf {
    let absolute = std::path::absolute(data).unwrap_or_else(|_| data.to_owned());
    absolute.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/")).to_owned()
}

fn space(data: &Path) -> Check {
    let name = "disk space";
    match rustix::fs::statvfs(nearest(data)) {
        Err(error) => Check::broken(name, format!("cannot tell: {error}")),
        Ok(found) => {
            let free = found.f_bavail.saturating_mul(found.f_frsize);
            let shown = format!("{} MB free", free / 1_000_000);
            if free < LITTLE_SPACE {
                Check::broken(name, format!("only {shown}: free some, or move the folder"))
            } else {
                Check::ok(name, shown)
            }
        }
    }
}

fn fsync(data: &Path) -> Check {
    let name = "fsync";
    let folder = nearest(data);
    let file = folder.join(format!(".vedetta-doctor-{}", std::process::id()));
    let tried = fs::write(&file, b"x")
        .and_then(|()| fs::File::open(&file)?.sync_all())
        .and_then(|()| fs::File::open(&folder)?.sync_all());
    let _ = fs::remove_file(&file);
    match tried {
        Ok(()) => Check::ok(name, format!("a file in {} can be made durable", folder.display())),
        Err(error) => {
            let advice = format!("check the mount and the permissions, or {ANOTHER_FOLDER}");
            Check::broken(name, format!("in {}: {error}; {advice}", folder.display()))
        }
    }
}

/// What a URL names, by opening it.
fn reached<T, E>(name: &'static str, open: impl Future<Output = Result<T, E>>) -> Check
where
    E: std::error::Error + Send + Sync + 'static,
{
    let try_it = || -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async { open.await.map(drop) })?;
        Ok(())
    };
    let tried = try_it().map_err(|error| explain(error.as_ref()));
    Check::of(name, tried.map(|()| "can be reached"))
}

/// The server that the client commands speak to, as whoever holds the token.
fn server(url: &str) -> Check {
    let ask = || -> Result<Check, ClientError> {
        let client = Client::new(&Remote::to(url))?;
        let health: Value = client.get("/healthz")?;
        let version = health["version"].as_str().filter(|_| health["program"] == "vedetta");
        let Some(version) = version else {
            return Ok(Check::broken("server", format!("{url} is something else than Vedetta")));
        };
        client.get::<Value>("/readyz")?;
        let who: Value = client.get("/api/v1/session")?;
        let text = |name: &str| who[name].as_str().unwrap_or_default().to_owned();
        let (name, role) = (text("name"), text("role"));
        let ready = format!("{url} is ready, and lets us in as {name} with the role {role}");
        let ours = env!("CARGO_PKG_VERSION");
        Ok(if version == ours {
            Check::ok("server", ready)
        } else {
            Check::note("server", format!("{ready}; it is version {version}, and this is {ours}"))
        })
    };
    ask().unwrap_or_else(|error| Check::broken("server", error.to_string()))
}

/// The NATS of `jobs.url`, and what of it can lose jobs.
fn streams(url: &str, streams: &[jetstream::Options]) -> Vec<Check> {
    let look = |options: &jetstream::Options| -> anyhow::Result<Vec<String>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(runtime.block_on(JetStream::risks(url, options))?)
    };
    let mut checks = Vec::new();
    for options in streams {
        let name = format!("queue.{}", options.queue);
        match look(options) {
            Ok(risks) => {
                checks.extend(risks.into_iter().map(|risk| Check::note(name.clone(), risk)));
            }
            Err(error) => checks.push(Check::broken(name, explain(error.as_ref()))),
        }
    }
    // Of every stream of a server the same is said.
    let mut seen = std::collections::HashSet::new();
    checks.retain(|check| seen.insert(check.detail.clone()));
    if checks.iter().all(|check| check.state != State::Broken) {
        checks.insert(0, Check::ok("jobs.url", "can be reached"));
    }
    checks
}

/// Whether those who are to sign in can.
fn access(data: &Path, config: &Config) -> Check {
    let name = "access";
    if !config.auth.enabled {
        return Check::ok(name, "nobody signs in: whoever reaches a loopback port may do all");
    }
    match Access::has_anybody(data) {
        Ok(true) => Check::ok(name, "people sign in, and programs have tokens"),
        Ok(false) => Check::broken(name, "nobody could sign in: add a user with vedetta user add"),
        Err(error) => Check::broken(name, explain(&error)),
    }
}

fn http_port(address: SocketAddr, holder: Option<&str>, tls: bool) -> Check {
    let is_ours = || ask(address, "/healthz").is_some_and(|health| health["program"] == "vedetta");
    port("http port", "--http", address, holder, tls, is_ours)
}

fn etcd_port(address: SocketAddr, holder: Option<&str>, tls: bool) -> Check {
    // A real etcd says which one it is, too; only we say this as well.
    let is_ours = || ask(address, "/version").is_some_and(|version| version["vedetta"].is_string());
    port("etcd port", "--etcd", address, holder, tls, is_ours)
}

fn port(
    name: &'static str,
    flag: &str,
    address: SocketAddr,
    holder: Option<&str>,
    tls: bool,
    is_ours: impl Fn() -> bool,
) -> Check {
    let Err(error) = TcpListener::bind(address) else {
        return Check::ok(name, format!("{address} is free"));
    };
    let advice = format!("choose another with {flag}");
    // Behind TLS it would have to be asked by name.
    match (tls && holder.is_some() || is_ours(), holder) {
        (true, Some(pid)) => {
            Check::ok(name, format!("a Vedetta serves {address}, most likely the process {pid}"))
        }
        (true, None) => Check::broken(
            name,
            format!("{address} is held by a Vedetta on another folder: {advice}"),
        ),
        (false, _) => Check::broken(name, format!("{address}: {error}; {advice}")),
    }
}

/// What whoever listens there answers, if it is JSON.
fn ask(address: SocketAddr, path: &str) -> Option<serde_json::Value> {
    let config = ureq::Agent::config_builder()
        .proxy(None)
        .max_redirects(0)
        .timeout_global(Some(Duration::from_secs(2)))
        .build();
    let answer = ureq::Agent::from(config).get(format!("http://{address}{path}")).call();
    answer.ok()?.body_mut().read_json().ok()
}

/// What is not there now may be later, and nothing waits for it.
fn telemetry(settings: &Settings) -> Check {
    let (name, to) = ("telemetry", settings.shown());
    match settings.check(Duration::from_secs(3)) {
        Ok(()) => Check::ok(name, format!("traces and numbers go to {to}")),
        Err(why) => Check::note(name, format!("{to} does not take them: {why}")),
    }
}

fn optional(program: &'static str, package: &str) -> Check {
    match find(program) {
        Some(path) => Check::ok(program, format!("optional: {}", path.display())),
        None => Check::note(program, format!("optional: not found, apt-get install {package}")),
    }
}

/// Beside the PATH, where Debian puts servers.
fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/usr/local/sbin".into()])
        .chain(versions.map(|version| version.path().join("bin")))
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where a folder of another user cannot be had, as root enters all of them.
    #[test]
    fn what_cannot_be_looked_at_is_broken_and_never_taken_for_missing() {
        for (kind, advice) in [
            (io::ErrorKind::PermissionDenied, "run it as the user whose folder it is"),
            (io::ErrorKind::StaleNetworkFileHandle, "check the mount and the permissions"),
        ] {
            let check = lock(Path::new("there"), Err(kind.into()));
            assert_eq!(check.state, State::Broken, "{kind}");
            for told in ["there/lock", advice, ANOTHER_FOLDER] {
                assert!(check.detail.contains(told), "{kind}: {}", check.detail);
            }
        }
    }
}
