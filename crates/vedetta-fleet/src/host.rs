//! What the system knows of processes.

use std::time::SystemTime;

/// What this machine is called.
pub fn host_name() -> String {
    let name = rustix::system::uname();
    let name = name.nodename().to_string_lossy();
    let plain = |c: char| if c.is_ascii_alphanumeric() || ".-".contains(c) { c } else { '-' };
    let name: String = name.chars().map(plain).take(64).collect();
    if name.is_empty() { "here".into() } else { name }
}

/// Tells a process from a later one with the same number: when it began, since which start of the machine.
/// Nothing where the system does not say.
pub(crate) fn birth(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program may have anything in it, and ends with the last parenthesis.
    let ticks = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?;
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(format!("{}:{ticks}", boot.trim()))
}

/// Whether a process of this machine that was born so has ended, for sure. One that nobody has asked how it
/// ended has.
pub(crate) fn is_gone(pid: u32, birth_then: Option<&str>) -> bool {
    let Some(then) = birth_then else { return false };
    if birth(std::process::id()).is_none() {
        return false; // this system does not say
    }
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let is_dead = state.rsplit_once(')').is_none_or(|(_, rest)| rest.trim_start().starts_with('Z'));
    is_dead || birth(pid).as_deref() != Some(then)
}

/// Bytes of memory that this process has.
pub(crate) fn memory() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

/// Whether these words follow each other in the command line of a process.
#[cfg(target_os = "linux")]
fn says(pid: u32, words: &[&str]) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let line: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
    let is_it = |part: &[&[u8]]| part.iter().zip(words).all(|(one, word)| *one == word.as_bytes());
    line.windows(words.len().max(1)).any(is_it)
}

/// Whether a process is the one that was born so, and was started with these words in its command line. What is
/// known of a process is what somebody said of it, which proves nothing: never this one, and none that was not
/// started as what it is said to be.
#[cfg(target_os = "linux")]
pub(crate) fn is_it(pid: u32, birth_then: &str, words: &[&str]) -> bool {
    pid != std::process::id() && birth(pid).as_deref() == Some(birth_then) && says(pid, words)
}

/// Elsewhere there is no telling one process from another.
#[cfg(not(target_os = "linux"))]
pub(crate) fn is_it(_: u32, _: &str, _: &[&str]) -> bool {
    false
}

/// Ends a process for good, if it is the one that is meant.
#[cfg(target_os = "linux")]
pub(crate) fn kill(pid: u32, birth_then: &str, words: &[&str]) -> bool {
    use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
    let Some(id) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return false };
    // Held before it is looked at: its number cannot become another's meanwhile.
    let Ok(process) = pidfd_open(id, PidfdFlags::empty()) else { return false };
    is_it(pid, birth_then, words) && pidfd_send_signal(&process, Signal::KILL).is_ok()
}

/// Elsewhere there is no telling one process from another.
#[cfg(not(target_os = "linux"))]
pub(crate) fn kill(_: u32, _: &str, _: &[&str]) -> bool {
    false
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn only_the_process_that_was_meant_is_killed() {
        let wait = ["-c", "read line", "worker", "run", "--id", "a"];
        let mut child = std::process::Command::new("sh");
        let mut child = child.args(wait).stdin(std::process::Stdio::piped()).spawn().unwrap();
        let it = ["worker", "run", "--id", "a"];
        let born = birth(child.id()).unwrap();
        // Its command line is there a moment after it is.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while !is_it(child.id(), &born, &it) && std::time::Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert_eq!(birth(child.id()).as_ref(), Some(&born), "it stays the same");
        assert!(!kill(child.id(), "another:1", &it));
        for other in [&["worker", "run", "--id", "b"][..], &["run", "worker"], &["a", "a"]] {
            assert!(!kill(child.id(), &born, other), "{other:?}");
        }
        assert!(child.try_wait().unwrap().is_none(), "it lives");
        assert!(kill(child.id(), &born, &it));
        assert!(!child.wait().unwrap().success());
        assert!(!kill(child.id(), &born, &it), "it is gone");
        assert!(is_gone(child.id(), Some(&born)) && !is_gone(child.id(), None));
        let us = std::process::id();
        assert!(!kill(us, &birth(us).unwrap(), &[]), "never itself");
        assert!(!is_gone(us, birth(us).as_deref()) && is_gone(us, Some("another:1")));
    }

    #[test]
    fn this_process_has_memory_and_a_birth() {
        assert!(memory().unwrap() > 100_000);
        assert!(birth(std::process::id()).is_some());
    }
}
