//! Kills all that has the mark of a run in its environment, until there is no more of it.
//!
//! One thread looks, and only while something is looked for: often at first, and more rarely while something is seen that
//! does not end, as what waits for a broken disk. A process is held by a descriptor before it is looked at, so that
//! another which gets its number meanwhile is not taken for it.

use std::time::Duration;
use std::{fs, thread};

use parking_lot::{Condvar, Mutex};
use rustix::process::{
    Pid, PidfdFlags, Signal, kill_process, kill_process_group, pidfd_open, pidfd_send_signal,
};
use tokio::sync::oneshot;

use super::guard::VARIABLE;

/// A process that just starts its program has no environment for a moment: it is seen with the next look.
const LOOKS: u32 = 3;
const FIRST_WAIT: Duration = Duration::from_millis(10);
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// A mark that is looked for.
struct Hunted {
    mark: String,
    /// In so many looks in a row nothing had it.
    unseen: u32,
    /// Dropped when nothing has it any more: who waits for that hears it.
    _tells: oneshot::Sender<()>,
}

struct Hunt {
    marks: Vec<Hunted>,
    /// Until the next look.
    wait: Duration,
    /// There is a thread that looks.
    is_on: bool,
}

static HUNT: Mutex<Hunt> = Mutex::new(Hunt { marks: Vec::new(), wait: FIRST_WAIT, is_on: false });
static MORE: Condvar = Condvar::new();

/// Begins to look for a mark, in the background. What is returned is over when there is no more of it.
pub(super) fn begin(mark: &str) -> oneshot::Receiver<()> {
    let mut hunt = HUNT.lock();
    let (tells, gone) = oneshot::channel();
    hunt.marks.push(Hunted { mark: mark.to_owned(), unseen: 0, _tells: tells });
    hunt.wait = FIRST_WAIT;
    if hunt.is_on {
        MORE.notify_one();
        return gone;
    }
    match thread::Builder::new().name("vedetta-hunt".into()).spawn(look) {
        Ok(_) => hunt.is_on = true,
        // The guard ends it when this process ends.
        Err(error) => tracing::error!(%error, "cannot look for what a command left behind"),
    }
    gone
}

fn look() {
    let mut hunt = HUNT.lock();
    loop {
        hunt.marks.retain(|hunted| hunted.unseen < LOOKS);
        hunt.is_on = !hunt.marks.is_empty();
        if !hunt.is_on {
            return;
        }
        let marks: Vec<String> = hunt.marks.iter().map(|hunted| hunted.mark.clone()).collect();
        let seen = parking_lot::MutexGuard::unlocked(&mut hunt, || kill(&marks));
        // What came meanwhile comes after these.
        for (hunted, is_seen) in hunt.marks.iter_mut().zip(&seen) {
            hunted.unseen = if *is_seen { 0 } else { hunted.unseen + 1 };
        }
        if hunt.marks.len() == seen.len() {
            hunt.wait = next_wait(hunt.wait, seen.contains(&true));
            let wait = hunt.wait;
            MORE.wait_for(&mut hunt, wait);
        }
    }
}

fn next_wait(wait: Duration, is_seen: bool) -> Duration {
    if is_seen { (wait * 2).min(LONGEST_WAIT) } else { FIRST_WAIT }
}

/// Kills what has one of these marks, and the groups that it leads. Which of them were seen.
fn kill(marks: &[String]) -> Vec<bool> {
    let mut seen = vec![false; marks.len()];
    let Ok(processes) = fs::read_dir("/proc") else { return seen };
    for process in processes.flatten() {
        let name = process.file_name();
        let pid = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        let Some(pid) = pid else { continue };
        let held = pidfd_open(pid, PidfdFlags::empty());
        // Others' are not ours to read.
        let Ok(environment) = fs::read(process.path().join("environ")) else { continue };
        let ids = environment
            .split(|byte| *byte == 0)
            .find_map(|variable| variable.strip_prefix(VARIABLE.as_bytes())?.strip_prefix(b"="));
        let Some(ids) = ids else { continue };
        let ids: Vec<&[u8]> = ids.split(|byte| *byte == b':').collect();
        for (mark, seen) in marks.iter().zip(&mut seen) {
            if !ids.contains(&mark.as_bytes()) {
                continue;
            }
            *seen = true;
            let killed = match &held {
                Ok(held) => pidfd_send_signal(held, Signal::KILL),
                // A kernel that has none.
                Err(_) => kill_process(pid, Signal::KILL),
            };
            if killed.is_ok() {
                // It may lead none.
                let _ = kill_process_group(pid, Signal::KILL);
            }
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_are_rarer_while_something_does_not_end_and_soon_again_once_it_has() {
        let mut waits = Vec::new();
        let mut wait = FIRST_WAIT;
        for is_seen in [true, true, true, true, true, true, true, true, false] {
            wait = next_wait(wait, is_seen);
            waits.push(wait.as_millis());
        }
        assert_eq!(waits, [20, 40, 80, 160, 320, 640, 1000, 1000, 10]);
    }
}
