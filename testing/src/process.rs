//! How the servers of tests are run: a process with a folder and a port of its own, which ends with the test.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::soon;

/// When to look again.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Nobody can be sure of a free port: so often is tried.
const ATTEMPTS: usize = 10;

/// A server. Its process and data end with this value, also when a test panics.
#[derive(Debug)]
pub(crate) struct Process {
    name: &'static str,
    pub(crate) folder: TempDir,
    pub(crate) address: SocketAddr,
    /// `None` while it is killed or stopped.
    pub(crate) child: Option<Child>,
}

impl Process {
    /// One that does not run yet.
    pub(crate) fn new(name: &'static str, folder: TempDir) -> Self {
        Self { name, folder, address: (Ipv4Addr::LOCALHOST, 0).into(), child: None }
    }

    /// Starts it on a free port; returns when it answers.
    pub(crate) async fn start(
        &mut self,
        command: impl Fn(&Path, SocketAddr) -> Command,
        answers: impl AsyncFn(SocketAddr) -> bool,
    ) {
        // A port that was free a moment ago may be taken by now: then it ends at once, and we try again.
        for _ in 0..ATTEMPTS {
            self.address = free_address();
            if self.runs(&command, &answers).await {
                return;
            }
        }
        panic!("{} did not start in {ATTEMPTS} attempts:\n{}", self.name, self.log());
    }

    /// Starts it on the same port and data, after it was killed; returns when it answers.
    pub(crate) async fn start_again(
        &mut self,
        command: impl Fn(&Path, SocketAddr) -> Command,
        answers: impl AsyncFn(SocketAddr) -> bool,
    ) {
        for _ in 0..ATTEMPTS {
            if self.runs(&command, &answers).await {
                return;
            }
            tokio::time::sleep(LOOK_AGAIN).await; // its port was taken meanwhile
        }
        panic!("{} did not start again in {ATTEMPTS} attempts:\n{}", self.name, self.log());
    }

    /// Starts it, and waits until it answers; `false` when it has ended instead.
    async fn runs(
        &mut self,
        command: &impl Fn(&Path, SocketAddr) -> Command,
        answers: &impl AsyncFn(SocketAddr) -> bool,
    ) -> bool {
        let log = File::options().append(true).create(true).open(self.folder.path().join("log"));
        let log = log.expect("a log can be written");
        let mut command = command(self.folder.path(), self.address);
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a handle")).stderr(log);
        let child = command.spawn().unwrap_or_else(|error| panic!("{}: {error}", self.name));
        let (child, address) = (self.child.insert(child), self.address);
        let runs = soon("it answers", async {
            loop {
                if child.try_wait().expect("a child can be asked").is_some() {
                    return false;
                }
                if answers(address).await {
                    return true;
                }
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        })
        .await;
        if !runs {
            self.child = None;
        }
        runs
    }

    /// Ends it at once (SIGKILL); its data stays.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let child = self.child.as_ref().expect("the server runs");
        kill_process(Pid::from_child(child), signal).expect("a signal can be sent");
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Says so if it has ended by itself.
    pub(crate) fn complain(&mut self) {
        let ended = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
        if let Some(status) = ended {
            eprintln!("{} has ended by itself, {status}:\n{}", self.name, self.log());
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.complain();
        self.kill();
    }
}

/// A program of a Debian package, in the PATH or at its usual place; or a failure that names the package.
pub(crate) fn program(name: &str, usual: Option<&Path>, package: &str) -> Command {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(name).is_file()));
    match usual.filter(|file| !found && file.is_file()) {
        Some(file) => Command::new(file),
        None => {
            assert!(
                found,
                "{name} is not installed, and the suite needs it: apt-get install {package}"
            );
            Command::new(name)
        }
    }
}

/// A folder for data that need not outlive the test: in memory where the system has such a place.
pub(crate) fn scratch() -> TempDir {
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { TempDir::new_in(memory) } else { TempDir::new() };
    folder.expect("a folder for the test")
}

fn free_address() -> SocketAddr {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    port.local_addr().expect("a bound port has an address")
}
