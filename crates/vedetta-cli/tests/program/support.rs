//! Running the program.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// Long enough for anything; a test that waits so long has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// The program, with nothing of our environment that would set it up.
pub(crate) fn vedetta(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vedetta"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["VEDETTA_", "OTEL_", "TRACEPARENT"].iter().any(|begin| text.starts_with(begin)) {
            command.env_remove(&name);
        }
    }
    // Its default port may be in use; flags still win.
    command.env("VEDETTA_ETCD", "127.0.0.1:0");
    command.current_dir(folder).stdin(Stdio::null());
    command
}

/// What a command printed, and how it ended.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Ran {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

pub(crate) fn run(folder: &Path, args: &[&str]) -> Ran {
    vedetta(folder).args(args).output().unwrap().into()
}

pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A child that is not left behind, and the lines it prints.
pub(crate) struct Running {
    pub(crate) child: Child,
    lines: Receiver<String>,
}

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        let (send, lines) = channel();
        let out = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        Self { child, lines }
    }

    /// The next line; `None` when it has closed its output.
    pub(crate) fn line(&self) -> Option<String> {
        use std::sync::mpsc::RecvTimeoutError::{Disconnected, Timeout};
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => Some(line),
            Err(Disconnected) => None,
            Err(Timeout) => panic!("no line in time"),
        }
    }

    pub(crate) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
    }

    /// Signals until it has ended: those that come with the first one do not count.
    pub(crate) fn insist(&mut self) -> ExitStatus {
        until("the end at once", || {
            self.signal("TERM");
            self.child.try_wait().unwrap().is_some()
        });
        self.wait()
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        let mut ended = None;
        until("the end of it", || {
            ended = self.child.try_wait().unwrap();
            ended.is_some()
        });
        ended.unwrap()
    }

    /// What it said on stderr, once it has ended.
    pub(crate) fn complaint(&mut self) -> String {
        let mut text = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        text
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A running server.
pub(crate) struct Server {
    pub(crate) running: Running,
    pub(crate) url: String,
    /// Where it speaks etcd's protocols.
    pub(crate) etcd: String,
    folder: PathBuf,
    /// What its commands sign in with.
    token: Option<String>,
}

impl Server {
    /// On `folder/vedetta-data`.
    pub(crate) fn start(folder: &Path) -> Self {
        Self::with(vedetta(folder).args(["up", "--http", "127.0.0.1:0"]), folder)
    }

    pub(crate) fn with(command: &mut Command, folder: &Path) -> Self {
        let mut running = Running::start(command);
        let (mut url, mut etcd) = (None, None);
        loop {
            match running.line() {
                None => panic!("it did not start: {}", running.complaint()),
                Some(line) if line == "ready" => break,
                Some(line) => {
                    if let Some(page) = line.strip_prefix("page ") {
                        url = Some(page.trim().trim_end_matches('/').to_owned());
                    }
                    if let Some(endpoint) = line.strip_prefix("etcd ") {
                        etcd = Some(endpoint.trim().to_owned());
                    }
                }
            }
        }
        let url = url.expect("it says where the page is");
        let etcd = etcd.expect("it says where the endpoint is");
        Self { running, url, etcd, folder: folder.to_owned(), token: None }
    }

    /// The same for commands that sign in.
    pub(crate) fn signed_in(self, token: String) -> Self {
        Self { token: Some(token), ..self }
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = vedetta(&self.folder);
        command.env("VEDETTA_SERVER", &self.url).args(args);
        command.envs(self.token.iter().map(|token| ("VEDETTA_TOKEN", token)));
        command
    }

    pub(crate) fn kv(&self, args: &[&str]) -> Ran {
        let mut command = self.command(&["kv"]);
        command.args(args).output().unwrap().into()
    }

    /// A command that must work; what it printed.
    pub(crate) fn done(&self, args: &[&str]) -> String {
        let ran = self.kv(args);
        assert_eq!(ran.code, 0, "{args:?}: {ran:?}");
        ran.out.trim_end().to_owned()
    }

    pub(crate) fn done_with(&self, args: &[&str], input: &[u8]) -> String {
        let mut child = self.command(&["kv"]);
        let child = child.args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = child.spawn().unwrap();
        let mut stdin: ChildStdin = child.stdin.take().unwrap();
        stdin.write_all(input).unwrap();
        drop(stdin);
        let ran = Ran::from(child.wait_with_output().unwrap());
        assert_eq!(ran.code, 0, "{ran:?}");
        ran.out.trim_end().to_owned()
    }

    pub(crate) fn overview(&self) -> Value {
        let mut answer = http().get(format!("{}/api/v1/overview", self.url)).call().unwrap();
        answer.body_mut().read_json().unwrap()
    }

    pub(crate) fn until_watchers(&self, wanted: u64) {
        // One is its own, for what other programs tell of their watchers.
        until("the watchers", || self.overview()["watchers"] == wanted + 1);
    }

    /// Stops it as a service manager would.
    pub(crate) fn stop(mut self) {
        self.running.signal("TERM");
        assert_eq!(self.running.wait().code(), Some(0), "{}", self.running.complaint());
    }
}

/// HTTP without the program; never through a proxy.
pub(crate) fn http() -> ureq::Agent {
    ureq::Agent::config_builder().proxy(None).build().into()
}

/// Puts a key without the program, which is faster.
pub(crate) fn put(url: &str, key: &str, value: &str) {
    let request = http().put(format!("{url}/api/v1/kv/{key}"));
    request.send_json(serde_json::json!({ "value": value })).unwrap();
}

pub(crate) fn temp() -> TempDir {
    tempfile::tempdir().unwrap()
}
