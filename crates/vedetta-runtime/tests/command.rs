//! Nothing that a command started outlives the process that ran the command, however that one ended.
//!
//! Each test starts this file again as such a process, with a word of its own where commands find the ids
//! they are known by. All that has the word is of that test: the process, its guard, and what its commands
//! started.

#![cfg(target_os = "linux")]

use std::ffi::OsString;
use std::fs;
use std::io::Write as _;
use std::process::{Child, Command as Process, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getpgid, kill_process, kill_process_group};
use vedetta_runtime::{Command, CommandError, Watch};

const ROLE: &str = "VEDETTA_TEST_ROLE";
const GUARD: &str = "VEDETTA_GUARD";
const LONG: Duration = Duration::from_secs(600);
/// What is asked to end has so long.
const WAITS: &[Duration] = &[Duration::from_millis(50)];
const PATIENCE: Duration = Duration::from_secs(60);

/// One sleeps in the command's group, one in a session of its own, and one has no environment: it is known
/// by its arguments.
const FAMILY: &str = r#"n=600; sleep $n & setsid sleep $n &
    env -i sh -c "sleep $n; :" "$VEDETTA_GUARD" & exec sleep $n"#;

/// The process that runs commands; without a role it has nothing to do.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn another_process() {
    match std::env::var(ROLE).as_deref() {
        Ok("ends") => shell("exit 0", LONG).run(b"").await.unwrap(),
        Ok("ends and leaves two behind") => {
            shell("sleep 600 & setsid sleep 600 & exit 0", LONG).run(b"").await.unwrap();
        }
        Ok("runs") => drop(shell(FAMILY, LONG).run(b"").await),
        Ok("calls off") => {
            let told =
                tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new()));
            let command = shell(FAMILY, LONG);
            tokio::select! {
                ended = command.run(b"") => panic!("{ended:?}"),
                told = told => drop(told.unwrap()),
            }
            tokio::time::sleep(LONG).await;
        }
        Ok("runs for five seconds") => {
            let ended = shell(FAMILY, Duration::from_secs(5)).run(b"").await;
            assert!(matches!(ended, Err(CommandError::Timeout { .. })), "{ended:?}");
            tokio::time::sleep(LONG).await;
        }
        Ok("asks and kills") => {
            let deaf = format!("trap '' TERM; {FAMILY}");
            let told = async {
                let line = || std::io::stdin().read_line(&mut String::new());
                tokio::task::spawn_blocking(line).await.unwrap().unwrap();
                WAITS
            };
            shell(&deaf, LONG).run_until(b"", &Deaf, told).await.unwrap();
            tokio::time::sleep(LONG).await;
        }
        Ok("starts and starts") => {
            for _ in 0..8 {
                tokio::spawn(async {
                    loop {
                        let _ = shell(FAMILY, Duration::from_millis(30)).run(b"").await;
                    }
                });
            }
            tokio::time::sleep(LONG).await;
        }
        Ok("runs, and runs when told") => {
            let told = || std::io::stdin().read_line(&mut String::new());
            let later = async {
                tokio::task::spawn_blocking(told).await.unwrap().unwrap();
                shell("exec sleep 599", LONG).run(b"").await
            };
            let first = shell("exec sleep 600", LONG);
            let _ = tokio::join!(first.run(b""), later);
        }
        Ok("runs one that runs") => {
            let mut arguments = arguments();
            let inner = Command::new(arguments.remove(0), arguments, LONG).variable(ROLE, "runs");
            let beside = shell("exec sleep 599", LONG);
            let _ = tokio::join!(inner.run(b""), beside.run(b""));
        }
        Ok("cannot run") => {
            let error = Command::new("/bin/true", [], LONG).run(b"").await.unwrap_err();
            assert!(matches!(error, CommandError::Guard(_)), "{error:?}");
            let said = error.briefly();
            assert!(said.starts_with("cannot start the guard that ends commands"), "{said}");
            assert!(said.ends_with("needs /proc, and xargs, grep and sleep in PATH"), "{said}");
        }
        Ok(role) => panic!("what is {role:?}?"),
        Err(_) => {}
    }
}

/// Who is told nothing.
struct Deaf;

impl Watch for Deaf {
    fn progress(&self, _: f64, _: Option<&str>) {}
    fn log(&self, _: &str) {}
    fn line(&self, _: &str) {}
}

fn shell(script: &str, limit: Duration) -> Command {
    Command::new("sh", ["-c", script], limit)
}

/// Starts this file as [`another_process`].
fn arguments() -> Vec<OsString> {
    let file = std::env::current_exe().unwrap().into();
    vec![file, "--exact".into(), "another_process".into()]
}

struct Other {
    word: String,
    process: Child,
}

impl Other {
    fn start(role: &str) -> Self {
        Self::start_with_path(role, std::env::var_os("PATH").unwrap())
    }

    fn start_with_path(role: &str, path: impl Into<OsString>) -> Self {
        let word = format!("{:032x}", fastrand::u128(..));
        let process = Process::new("/bin/sh")
            .args(["-c", r#"exec "$0" "$@" 5</dev/zero"#]) // a file that stays open from program to program
            .args(arguments())
            .env(ROLE, role)
            .env(GUARD, &word)
            .env("PATH", path.into())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn();
        Self { word, process: process.unwrap() }
    }

    /// What has the word: its number and its command line.
    fn family(&self) -> Vec<(Pid, String)> {
        let has_word = |bytes: &[u8]| String::from_utf8_lossy(bytes).contains(&self.word);
        let mut family = Vec::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let name = entry.file_name();
            let Some(pid) =
                name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw)
            else {
                continue;
            };
            let file = |name| fs::read(entry.path().join(name)).unwrap_or_default();
            let line = file("cmdline");
            if has_word(&line) || has_word(&file("environ")) {
                family.push((pid, String::from_utf8_lossy(&line).replace('\0', " ")));
            }
        }
        family
    }

    fn all(&self, part: &str) -> Vec<Pid> {
        let family = self.family().into_iter();
        family.filter(|(_, line)| line.contains(part)).map(|(pid, _)| pid).collect()
    }

    /// Waits until there are so many of these.
    fn until(&self, count: usize, part: &str) {
        let start = Instant::now();
        while self.all(part).len() != count {
            assert!(start.elapsed() < PATIENCE, "{part:?}: {:#?}", self.family());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until all of [`FAMILY`] run.
    fn until_running(&self) {
        self.until(3, "sleep 600 "); // the fourth cannot be known
        self.until(1, "sh -c sleep 600; :");
    }

    /// Waits until nothing of [`FAMILY`] is left, while the process goes on.
    fn family_is_gone(&mut self) {
        self.until(0, "sleep 600");
        std::thread::sleep(Duration::from_millis(20)); // and one that was just being started
        self.until(0, "sleep 600");
        assert!(self.process.try_wait().unwrap().is_none(), "it goes on");
    }

    /// Waits until nothing of it is left.
    fn is_gone(&self) {
        self.until(0, "");
        std::thread::sleep(Duration::from_millis(20)); // and one that was just being started
        self.until(0, "");
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        for (pid, _) in self.family() {
            let _ = kill_process_group(pid, Signal::KILL); // it may lead none, and be gone
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

fn send(signal: Signal, pid: Pid) {
    kill_process(pid, signal).unwrap();
}

#[test]
fn a_process_that_is_killed_leaves_nothing_running() {
    let mut other = Other::start("runs");
    other.until_running();
    other.process.kill().unwrap();
    other.process.wait().unwrap();
    other.is_gone();
}

#[test]
fn a_command_that_is_called_off_takes_too_long_or_does_not_heed_leaves_nothing_running() {
    for role in ["calls off", "runs for five seconds", "asks and kills"] {
        let mut other = Other::start(role);
        other.until_running();
        other.process.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        other.family_is_gone();
    }
}

#[test]
fn the_guard_does_not_heed_the_signals_that_end_the_process() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let mut other = Other::start("runs");
        other.until_running();
        send(signal, other.all("vedetta-guard")[0]);
        send(signal, Pid::from_child(&other.process));
        other.process.wait().unwrap();
        other.is_gone();
    }
}

#[test]
fn a_process_that_is_killed_while_it_starts_commands_leaves_nothing_running() {
    for round in 0..10 {
        let mut other = Other::start("starts and starts");
        if round > 1 {
            let start = Instant::now();
            while other.all("sleep 600 ").is_empty() {
                assert!(start.elapsed() < PATIENCE, "nothing starts");
            }
        }
        std::thread::sleep(Duration::from_micros(fastrand::u64(..100_000)));
        other.process.kill().unwrap();
        other.process.wait().unwrap();
        other.is_gone();
    }
}

#[test]
fn a_process_that_ends_leaves_no_guard_and_nothing_that_its_commands_left() {
    for role in ["ends", "ends and leaves two behind"] {
        let mut other = Other::start(role);
        assert!(other.process.wait().unwrap().success(), "{role}");
        other.is_gone();
    }
}

#[test]
fn the_guard_holds_nothing_of_the_process() {
    let other = Other::start("runs");
    other.until_running();
    let guards = other.all("vedetta-guard");
    let [guard] = guards[..] else { panic!("{guards:?}") };
    assert_eq!(getpgid(Some(guard)).unwrap(), guard);
    let folder = std::path::PathBuf::from(format!("/proc/{}", guard.as_raw_pid()));
    assert_eq!(fs::read_link(folder.join("cwd")).unwrap().to_str(), Some("/"));
    let mut files: Vec<_> = fs::read_dir(folder.join("fd"))
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_name().len() == 1) // a shell cannot close the others
        .map(|entry| (entry.file_name(), fs::read_link(entry.path()).unwrap()))
        .map(|(number, file)| format!("{} {}", number.display(), file.display()))
        .collect();
    files.sort();
    assert!(files[0].starts_with("0 pipe:"), "{files:?}");
    assert_eq!(files[1..], ["1 /dev/null", "2 /dev/null"]);
}

#[test]
fn a_guard_that_was_killed_is_replaced_and_the_new_one_knows_the_commands_of_the_old() {
    let mut other = Other::start("runs, and runs when told");
    other.until(1, "sleep 600 ");
    let old = other.all("vedetta-guard");
    send(Signal::KILL, old[0]);
    other.until(0, "vedetta-guard");
    other.process.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    other.until(1, "sleep 599 ");
    assert_eq!(other.all("vedetta-guard").len(), 1);
    other.process.kill().unwrap();
    other.process.wait().unwrap();
    other.is_gone();
}

#[test]
fn one_within_another_ends_with_either() {
    let mut outer = Other::start("runs one that runs");
    outer.until_running();
    outer.until(1, "sleep 599 ");
    outer.until(2, "vedetta-guard");
    outer.process.kill().unwrap();
    outer.process.wait().unwrap();
    outer.is_gone();

    let outer = Other::start("runs one that runs");
    outer.until_running();
    outer.until(1, "sleep 599 ");
    let mut inner = outer.all("--exact");
    inner.retain(|&pid| pid != Pid::from_child(&outer.process));
    send(Signal::KILL, inner[0]);
    outer.until(1, "vedetta-guard");
    outer.until(0, "sleep 600");
    outer.until(1, "sleep 599 ");
}

#[test]
fn without_a_guard_nothing_is_run() {
    let mut other = Other::start_with_path("cannot run", "/nowhere");
    assert!(other.process.wait().unwrap().success());
}
