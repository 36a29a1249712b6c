//! Ends all that the commands started when this process ends, even by SIGKILL.
//!
//! ```text
//! this process ══ a pipe, never written to ══► the guard, a shell in a process group of its own
//!   │                                            │ the pipe ends: this process has ended
//!   └─► commands, VEDETTA_GUARD=<id> in          ▼
//!       their environment and in that of ◄─── SIGKILL to all with <id>, and to the groups they lead,
//!       all that they start                    until two looks in a row find none; then it ends, too
//! ```
//!
//! A command that is just being started has the pipe, too, until its program is loaded, so the guard does
//! not look too early. Leaving the process group or the session is no way out; not handing on the
//! environment is: `env -u VEDETTA_GUARD` for what is to outlive this process, and by accident a program
//! that clears its environment or writes over it, and leaves the group. Within another Vedetta's command
//! `<id>` is added to the ids that are there, so that the end of either ends it.
//!
//! Each run has a mark of its own beside `<id>`. When a run is killed, this process looks for its mark in the
//! same way, so that a command which is called off or takes too long leaves nothing behind, either.
//!
//! The search needs `/proc`, so there is a guard on Linux only.

use std::ffi::OsString;
use std::io::{self, Read as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::time::Duration;
use std::{fs, thread};

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

/// The variable that holds the ids, with `:` between them.
pub(super) const VARIABLE: &str = "VEDETTA_GUARD";

/// Stays the same when a guard is replaced: the new one knows the commands of the old one.
static ID: LazyLock<String> = LazyLock::new(|| format!("{:032x}", fastrand::u128(..)));

/// With the pipe's only lasting write end.
static GUARD: Mutex<Option<Child>> = Mutex::new(None);

/// What all that one run starts has in its environment.
#[derive(Debug)]
pub(super) struct Mark(String);

impl Mark {
    pub(super) fn new() -> Self {
        Self(format!("{:032x}", fastrand::u128(..)))
    }

    /// Kills all that has it, in the background, until there is no more of it.
    pub(super) fn kill(&self) {
        if !cfg!(target_os = "linux") {
            return;
        }
        let mut hunt = HUNT.lock();
        hunt.marks.push((self.0.clone(), 0));
        if !hunt.is_on {
            let started = thread::Builder::new().name("vedetta-hunt".into()).spawn(hunt_down);
            match started {
                Ok(_) => hunt.is_on = true,
                // The guard ends it when this process ends.
                Err(error) => tracing::error!(%error, "cannot look for what a command left behind"),
            }
        }
    }
}

/// Marks that are looked for, and in how many looks in a row nothing had them.
struct Hunt {
    marks: Vec<(String, u32)>,
    /// There is a thread that looks.
    is_on: bool,
}

static HUNT: Mutex<Hunt> = Mutex::new(Hunt { marks: Vec::new(), is_on: false });

/// A process that just starts its program has no environment for a moment: it is seen with the next look.
const LOOKS: u32 = 3;
const BETWEEN_LOOKS: Duration = Duration::from_millis(10);

fn hunt_down() {
    loop {
        let marks: Vec<String> = {
            let mut hunt = HUNT.lock();
            hunt.marks.retain(|(_, unseen)| *unseen < LOOKS);
            hunt.is_on = !hunt.marks.is_empty();
            hunt.marks.iter().map(|(mark, _)| mark.clone()).collect()
        };
        if marks.is_empty() {
            return;
        }
        let seen = kill_marked(&marks);
        for (mark, unseen) in &mut HUNT.lock().marks {
            if let Some(at) = marks.iter().position(|looked_for| looked_for == mark) {
                *unseen = if seen[at] { 0 } else { *unseen + 1 };
            }
        }
        thread::sleep(BETWEEN_LOOKS);
    }
}

/// Kills what has one of these marks, and the groups that it leads. Which of them were seen.
fn kill_marked(marks: &[String]) -> Vec<bool> {
    let mut seen = vec![false; marks.len()];
    let Ok(processes) = fs::read_dir("/proc") else { return seen };
    for process in processes.flatten() {
        let name = process.file_name();
        let pid = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        let Some(pid) = pid else { continue };
        // Others' are not ours to read.
        let Ok(environment) = fs::read(process.path().join("environ")) else { continue };
        let ids = environment
            .split(|byte| *byte == 0)
            .find_map(|variable| variable.strip_prefix(VARIABLE.as_bytes())?.strip_prefix(b"="));
        let Some(ids) = ids else { continue };
        let ids: Vec<&[u8]> = ids.split(|byte| *byte == b':').collect();
        for (mark, seen) in marks.iter().zip(&mut seen) {
            if ids.contains(&mark.as_bytes()) {
                *seen = true;
                // It may lead no group, or just have ended.
                let _ = kill_process_group(pid, Signal::KILL);
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
    seen
}

/// The value of [`VARIABLE`] for a command that is now started. From here on there is a guard for it.
pub(super) fn ids(mark: &Mark) -> io::Result<OsString> {
    if cfg!(target_os = "linux") {
        let mut guard = GUARD.lock();
        if !matches!(guard.as_mut().map(Child::try_wait), Some(Ok(None))) {
            *guard = Some(start()?);
        }
    }
    let mut ids = std::env::var_os(VARIABLE).unwrap_or_default();
    if !ids.is_empty() {
        ids.push(":");
    }
    ids.push(&*ID);
    ids.push(":");
    ids.push(&mark.0);
    Ok(ids)
}

/// Returns once the guard waits for our end and has let go of all that is ours. A shell can only close 3 to
/// 9 of what we were started with ourselves; the rest stays open until its end, a moment after ours.
fn start() -> io::Result<Child> {
    let mut guard = Command::new("/bin/sh")
        .args(["-c", include_str!("guard.sh"), "vedetta-guard", &ID])
        .current_dir("/")
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut said = String::new();
    if let Some(mut stdout) = guard.stdout.take() {
        stdout.read_to_string(&mut said)?;
    }
    if said != "ready\n" {
        guard.wait()?;
        return Err(io::Error::other("/bin/sh needs /proc, and xargs, grep and sleep in PATH"));
    }
    Ok(guard)
}
