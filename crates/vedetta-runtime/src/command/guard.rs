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
//! same way (`hunt`), so that a command which is called off or takes too long leaves nothing behind, either.
//!
//! The search needs `/proc`, so there is a guard on Linux only.

use std::ffi::OsString;
use std::io::{self, Read as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// What is killed has ended by then, unless it cannot.
const PATIENCE: Duration = Duration::from_secs(1);

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
    pub(super) fn kill(&self) -> Gone {
        #[cfg(target_os = "linux")]
        let gone = Some(super::hunt::begin(&self.0));
        #[cfg(not(target_os = "linux"))]
        let gone = None;
        Gone(gone)
    }
}

/// Nothing has a mark any more; or nobody looks for it.
#[must_use]
pub(super) struct Gone(Option<oneshot::Receiver<()>>);

impl Gone {
    /// Waits for it, but not for what does not end.
    pub(super) async fn wait(self) {
        if let Some(gone) = self.0 {
            let _ = timeout(PATIENCE, gone).await;
        }
    }
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
