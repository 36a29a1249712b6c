//! A worker's process, as a child of this one.

use std::io::{self, Write as _};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::AsyncReadExt as _;
use tokio::process::{Child, ChildStderr, Command};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::Hire;
use crate::desk::tail;
use crate::wire::LONGEST_NOTE;

/// What a process wrote before its end is there at once.
const REST: Duration = Duration::from_millis(100);

/// How a process ended.
pub(super) struct Exit {
    pub(super) is_success: bool,
    pub(super) how: String,
    /// The last of it.
    pub(super) stderr: String,
}

/// What the command line of a worker has in it, of all that run on this machine.
pub(super) fn words<'a>(supervisor: &'a str, id: &'a str) -> [&'a str; 6] {
    ["worker", "run", "--id", id, "--supervisor", supervisor]
}

/// In a group of its own: what a terminal sends to this process is not for it.
pub(super) fn start(
    hire: &Hire,
    supervisor: &str,
    id: &str,
    queues: &[String],
) -> io::Result<Child> {
    let mut command = Command::new(&hire.program);
    command.args(words(supervisor, id));
    for queue in queues {
        command.args(["--queue", queue]);
    }
    command
        .args(&hire.arguments)
        .envs(hire.variables.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
}

/// Hands on what it writes, until its end.
pub(super) async fn watch(
    mut child: Child,
    id: String,
    kill: CancellationToken,
    tell: mpsc::Sender<(String, Exit)>,
) {
    let mut stderr = child.stderr.take();
    let (mut last, mut is_killed) = (Vec::new(), false);
    let mut chunk = vec![0; 4096];
    let status = loop {
        tokio::select! {
            biased;
            () = kill.cancelled(), if !is_killed => {
                is_killed = true;
                // It may just have ended by itself.
                let _ = child.start_kill();
            }
            is_open = read(&mut stderr, &mut chunk, &mut last), if stderr.is_some() => {
                if !is_open {
                    stderr = None;
                }
            }
            status = child.wait() => break status,
        }
    };
    let rest = async { while read(&mut stderr, &mut chunk, &mut last).await {} };
    let _ = timeout(REST, rest).await;
    let exit = Exit {
        is_success: status.as_ref().is_ok_and(ExitStatus::success),
        how: status.map_or_else(|error| error.to_string(), how),
        stderr: tail(String::from_utf8_lossy(&last).into_owned()),
    };
    // If nobody is there, nobody is to be told.
    let _ = tell.send((id, exit)).await;
}

/// Whether there may be more.
async fn read(stderr: &mut Option<ChildStderr>, chunk: &mut [u8], last: &mut Vec<u8>) -> bool {
    let Some(stderr) = stderr else { return false };
    let Ok(count @ 1..) = stderr.read(chunk).await else { return false };
    // Nobody has to read it.
    let _ = io::stderr().write_all(&chunk[..count]);
    last.extend_from_slice(&chunk[..count]);
    // More than is told, so that what is cut here is cut again, where a line ends.
    let surplus = last.len().saturating_sub(2 * LONGEST_NOTE);
    last.drain(..surplus);
    true
}

fn how(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt as _;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}
