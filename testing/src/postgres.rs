//! A real PostgreSQL, which can be killed, stopped, and started again on the same data.
//!
//! ```text
//! target folder: postgres-15.x ──copy──► temporary folder ──► postmaster ──► backends
//! (made once by initdb)                  (one per server)     (127.0.0.1, a port of its own)
//! ```
//!
//! It never runs as root, as PostgreSQL refuses to: there it runs as the user `postgres`. Commits are
//! flushed, as in production, though to memory where that is large. A [`Proxy`](crate::Proxy) before it makes links that can be cut.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::Read as _;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::statvfs;
use rustix::process::{
    Pid, PidfdFlags, Signal, geteuid, kill_process, pidfd_open, pidfd_send_signal,
};
use tempfile::TempDir;
use tokio_postgres::NoTls;

use crate::process::{LOOK_AGAIN, Process};
use crate::{PATIENCE, soon};

/// What differs from the defaults. No shared memory with a name: it would outlive a killed server.
const SETTINGS: [&str; 6] = [
    "listen_addresses=127.0.0.1",
    "unix_socket_directories=",
    "max_connections=200",
    "shared_buffers=16MB",
    "dynamic_shared_memory_type=mmap",
    "log_timezone=UTC",
];

/// A server with data of its own. Its processes and data end with this value, also when a test panics.
#[derive(Debug)]
pub struct Server {
    process: Process,
    programs: PathBuf,
    /// Beyond [`SETTINGS`].
    settings: Vec<String>,
    /// How many databases were made.
    databases: AtomicUsize,
}

impl Server {
    /// A new server on a free port; returns when it answers.
    pub async fn start() -> Self {
        Self::prepare().run().await
    }

    /// One for benchmarks: its data in a folder of `disk`, and more settings, as `name=value`.
    pub async fn start_on(disk: &Path, settings: &[&str]) -> Self {
        let folder = TempDir::new_in(disk).expect("a folder on that disk");
        let mut server = Self::prepare_in(folder);
        server.settings = settings.iter().map(|setting| (*setting).to_owned()).collect();
        server.run().await
    }

    /// The same for clients with TLS, too; the certificate and its key are in PEM.
    pub async fn start_with_tls(certificate: &str, key: &str) -> Self {
        let mut server = Self::prepare();
        for (name, pem) in [("ssl_cert_file", certificate), ("ssl_key_file", key)] {
            let file = server.process.folder.path().join(name);
            fs::write(&file, pem).expect("a file can be written");
            fs::set_permissions(&file, Permissions::from_mode(0o600)).expect("a file can be ours");
            Owner::of_servers().owns(&file);
            server.settings.push(format!("{name}={}", file.display()));
        }
        server.settings.push("ssl=on".to_owned());
        server.run().await
    }

    fn prepare() -> Self {
        Self::prepare_in(scratch())
    }

    fn prepare_in(folder: TempDir) -> Self {
        let programs = programs();
        copy(&template(&programs), &folder.path().join("data"));
        Owner::of_servers().owns(folder.path());
        let process = Process::new("PostgreSQL", folder);
        Self { process, programs, settings: Vec::new(), databases: AtomicUsize::new(0) }
    }

    async fn run(mut self) -> Self {
        let command = self.command();
        self.process.start(command, answers).await;
        self
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.process.address
    }

    /// The database that every server has.
    pub fn url(&self) -> String {
        self.url_of("postgres")
    }

    /// A new database, which nobody else uses.
    pub async fn database(&self) -> String {
        let name = format!("test_{}", self.databases.fetch_add(1, Ordering::Relaxed));
        let made = soon("a database is made", async {
            let (client, connection) = tokio_postgres::connect(&self.url(), NoTls).await?;
            let create = format!("CREATE DATABASE {name}");
            let make = async move { client.batch_execute(&create).await };
            tokio::join!(make, connection).0
        });
        made.await.expect("a database can be made");
        self.url_of(&name)
    }

    fn url_of(&self, database: &str) -> String {
        url(self.address(), database)
    }

    /// Ends all its processes at once (SIGKILL), as a power cut would; its data stays.
    pub fn kill(&mut self) {
        let Some(mut postmaster) = self.process.child.take() else { return };
        // Held still it neither makes children nor buries them: their ids stay theirs while we look.
        let pid = Pid::from_child(&postmaster);
        let _ = kill_process(pid, Signal::STOP);
        let children: Vec<_> = children_of(pid).into_iter().filter_map(handle).collect();
        let _ = postmaster.kill();
        let _ = postmaster.wait();
        for child in &children {
            let _ = pidfd_send_signal(child, Signal::KILL);
        }
        let patience = Timespec { tv_sec: PATIENCE.as_secs().cast_signed(), tv_nsec: 0 };
        for child in &children {
            let _ = poll(&mut [PollFd::new(child, PollFlags::IN)], Some(&patience));
        }
        self.forget_shared_memory();
    }

    /// Lets it end in order (fast shutdown): transactions are rolled back, connections told, all flushed.
    pub fn stop(&mut self) {
        if self.process.child.is_none() {
            return;
        }
        self.process.signal(Signal::INT);
        for _ in 0..PATIENCE.as_millis() / LOOK_AGAIN.as_millis() {
            let postmaster = self.process.child.as_mut().expect("it runs");
            if postmaster.try_wait().expect("a child can be asked").is_some() {
                self.process.child = None;
                return;
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        panic!("PostgreSQL does not stop:\n{}", self.process.log());
    }

    /// Starts it on the same port and data, after it was killed or stopped; returns when it answers.
    pub async fn start_again(&mut self) {
        self.kill();
        let command = self.command();
        self.process.start_again(command, answers).await;
    }

    fn command(&self) -> impl Fn(&Path, SocketAddr) -> Command + use<> {
        let (programs, settings) = (self.programs.clone(), self.settings.clone());
        move |folder, address| {
            let mut postgres = program(&programs, "postgres");
            let port = address.port().to_string();
            postgres.arg("-D").arg(folder.join("data")).arg("-p").arg(port);
            postgres.args(SETTINGS.iter().flat_map(|setting| ["-c", setting]));
            postgres.args(settings.iter().flat_map(|setting| ["-c", setting]));
            postgres
        }
    }

    /// A killed server leaves a small segment behind, which only a start on the same data would remove.
    fn forget_shared_memory(&self) {
        let noted = fs::read_to_string(self.data().join("postmaster.pid")).unwrap_or_default();
        if let Some(id) = noted.lines().nth(6).and_then(|line| line.split_whitespace().nth(1)) {
            let mut ipcrm = Command::new("ipcrm");
            ipcrm.args(["-m", id]).stdin(Stdio::null()).stdout(Stdio::null());
            let _ = ipcrm.stderr(Stdio::null()).status();
        }
    }

    fn data(&self) -> PathBuf {
        self.process.folder.path().join("data")
    }
}

fn url(address: SocketAddr, database: &str) -> String {
    format!("postgres://postgres@{address}/{database}")
}

async fn answers(address: SocketAddr) -> bool {
    tokio_postgres::connect(&url(address, "postgres"), NoTls).await.is_ok()
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process.complain();
        self.kill();
    }
}

/// The folder with PostgreSQL's programs: of the PATH, or the newest where Debian puts them.
fn programs() -> PathBuf {
    let complete = |folder: &PathBuf| {
        ["postgres", "initdb"].iter().all(|program| folder.join(program).is_file())
    };
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut of_the_path = std::env::split_paths(&path);
    let version = |folder: &PathBuf| -> Option<u32> { folder.file_name()?.to_str()?.parse().ok() };
    let installed = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut installed: Vec<_> = installed.map(|entry| entry.path()).collect();
    installed.sort_by_key(version);
    let newest = installed.into_iter().rev().map(|folder| folder.join("bin"));
    let found = of_the_path.find(complete).or_else(|| newest.into_iter().find(complete));
    found.unwrap_or_else(missing)
}

fn missing<T>() -> T {
    panic!("PostgreSQL is not there, and the suite needs it: install Debian's package postgresql")
}

/// One of its programs, as the user that may run it, told nothing by the environment.
fn program(folder: &Path, name: &str) -> Command {
    let mut program = Command::new(folder.join(name));
    for (name, _) in std::env::vars_os().filter(|(n, _)| n.to_string_lossy().starts_with("PG")) {
        program.env_remove(name);
    }
    if let Owner::Other { user, group } = Owner::of_servers() {
        program.uid(user).gid(group);
    }
    program.current_dir("/").stdin(Stdio::null());
    program
}

/// Who runs the servers.
#[derive(Clone, Copy)]
enum Owner {
    Ourselves,
    Other { user: u32, group: u32 },
}

impl Owner {
    fn of_servers() -> Self {
        if !geteuid().is_root() {
            return Self::Ourselves;
        }
        let users = fs::read_to_string("/etc/passwd").expect("the users can be read");
        let line = users.lines().find_map(|line| line.strip_prefix("postgres:"));
        let mut fields = line.unwrap_or_else(missing).split(':').skip(1);
        let mut id = || fields.next().and_then(|id| id.parse().ok()).expect("a user has ids");
        Self::Other { user: id(), group: id() }
    }

    /// Gives it all that is in a folder.
    fn owns(self, path: &Path) {
        let Self::Other { user, group } = self else { return };
        chown(path, Some(user), Some(group)).expect("a file can be given to somebody");
        if path.is_dir() {
            entries(path).for_each(|entry| self.owns(&entry));
        }
    }
}

/// A cluster fresh from `initdb`, which takes over a second: made once, kept beside what is built.
fn template(programs: &Path) -> PathBuf {
    let told = program(programs, "postgres").arg("--version").output();
    let told = String::from_utf8(told.expect("postgres can be run").stdout).expect("a version");
    let version = told.split_whitespace().nth(2).expect("a version");
    let test = std::env::current_exe().expect("a test knows its file");
    let folder = test.parent().expect("a file is in a folder");
    let folder = if folder.ends_with("deps") { folder.parent().unwrap_or(folder) } else { folder };
    let template = folder.join(format!("postgres-{version}"));
    let lock = File::create(template.with_added_extension("lock")).expect("a lock can be made");
    lock.lock().expect("a file can be locked");
    if !template.exists() {
        let draft = template.with_added_extension("draft");
        let _ = fs::remove_dir_all(&draft); // of one that was killed meanwhile
        initialise(programs, &draft);
        fs::rename(&draft, &template).expect("the cluster can be put in place");
        File::open(folder).and_then(|folder| folder.sync_all()).expect("a folder can be flushed");
    }
    template
}

/// In memory where there is room for many, as a kill takes nothing from the disk's cache either; or where
/// `TMPDIR` says, for those who want to know what a disk costs.
fn scratch() -> TempDir {
    const ROOM: u64 = 1 << 30;
    let memory = Path::new("/dev/shm");
    let room = statvfs(memory).map_or(0, |memory| memory.f_bavail * memory.f_frsize);
    let roomy = room > ROOM && std::env::var_os("TMPDIR").is_none();
    let folder = if roomy { TempDir::new_in(memory) } else { TempDir::new() };
    folder.expect("a folder for the test")
}

/// Makes it where the user of the servers may write, which the folder of builds need not be.
fn initialise(programs: &Path, draft: &Path) {
    let scratch = TempDir::new().expect("a folder for the cluster");
    Owner::of_servers().owns(scratch.path());
    let mut initdb = program(programs, "initdb");
    initdb.args(["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C"]);
    initdb.arg("--pgdata").arg(scratch.path().join("data"));
    let output = initdb.output().expect("initdb can be run");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "initdb: {complaint}");
    copy(&scratch.path().join("data"), draft);
    flush(draft);
}

/// Copies a folder with all that is in it, for its owner only.
fn copy(from: &Path, to: &Path) {
    DirBuilder::new().mode(0o700).create(to).expect("a folder can be made");
    for entry in entries(from) {
        let copied = to.join(entry.file_name().expect("an entry has a name"));
        if entry.is_dir() {
            copy(&entry, &copied);
        } else {
            fs::copy(&entry, &copied).expect("a file can be copied");
        }
    }
}

/// What a crash of the machine must not leave half of under the final name.
fn flush(folder: &Path) {
    entries(folder).filter(|entry| entry.is_dir()).for_each(|entry| flush(&entry));
    for path in entries(folder).filter(|entry| entry.is_file()).chain([folder.to_owned()]) {
        File::open(path).and_then(|file| file.sync_all()).expect("a file can be flushed");
    }
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder can be read");
    entries.map(|entry| entry.expect("a folder can be read").path())
}

/// The processes whose parent it is.
fn children_of(parent: Pid) -> Vec<Pid> {
    let parent = parent.as_raw_nonzero().get();
    let of_parent = |path: PathBuf| {
        let pid: i32 = path.file_name()?.to_str()?.parse().ok()?;
        let mut stat = String::new();
        File::open(path.join("stat")).ok()?.read_to_string(&mut stat).ok()?;
        // "pid (name, which may hold anything) state parent …"
        let of: i32 = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
        (of == parent).then(|| Pid::from_raw(pid)).flatten()
    };
    entries(Path::new("/proc")).filter_map(of_parent).collect()
}

/// Holds on to a process, whatever else gets its id later; `None` when it is gone.
fn handle(pid: Pid) -> Option<OwnedFd> {
    pidfd_open(pid, PidfdFlags::empty()).ok()
}
