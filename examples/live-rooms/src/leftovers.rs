//! What a mixer that was killed has left: processes and folders.
//!
//! An FFmpeg ends with its mixer, even with one that is killed; Vedetta's guard sees to that. Should it have
//! been killed, too, the next start of that mixer finds what is left by its environment, and ends it.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::model::is_id;
use crate::stream::{MARKER, VARIABLE};

/// How long a process may take to end when it is killed.
const ENDING: Duration = Duration::from_secs(10);

/// How the names of folders begin that are being removed.
const GONE: &str = ".gone-";

/// The folder of a mixer's streams, one in it for each room. Several mixers may share it: then a room that
/// moves keeps its address.
#[derive(Debug)]
pub struct Media {
    folder: PathBuf,
    id: String,
    /// Held until our end, however it comes.
    _lock: File,
}

impl Media {
    /// Makes it, and fails if another mixer of this id uses it.
    pub fn open(folder: &Path, id: &str) -> anyhow::Result<Self> {
        let made = std::fs::create_dir_all(folder).and_then(|()| folder.canonicalize());
        let folder = made.with_context(|| format!("cannot make {}", folder.display()))?;
        let is_plain = folder.to_str().is_some_and(|path| !path.contains('%'));
        anyhow::ensure!(is_plain, "FFmpeg cannot write to {}: it has a %", folder.display());
        let path = folder.join(format!(".{id}.lock"));
        let opened = File::options().write(true).create(true).truncate(false).open(&path);
        let lock = opened.with_context(|| format!("cannot open {}", path.display()))?;
        lock.try_lock().map_err(|error| match error {
            std::fs::TryLockError::WouldBlock => {
                let folder = folder.display();
                anyhow::anyhow!(
                    "a mixer {id} already runs on {folder}: stop it, or choose another --id"
                )
            }
            std::fs::TryLockError::Error(error) => error.into(),
        })?;
        Ok(Self { folder, id: id.to_owned(), _lock: lock })
    }

    /// The folder of a room.
    pub fn of(&self, room: &str) -> PathBuf {
        self.folder.join(room)
    }

    /// What marks the processes of this mixer.
    pub fn owner(&self) -> std::ffi::OsString {
        let mut owner = self.folder.clone().into_os_string();
        owner.push(":");
        owner.push(&self.id);
        owner
    }

    /// The rooms that have a folder here.
    pub fn rooms(&self) -> io::Result<Vec<String>> {
        let mut rooms = Vec::new();
        for entry in std::fs::read_dir(&self.folder)? {
            let name = entry?.file_name();
            let room = name.to_str().filter(|name| is_id(name));
            if let Some(room) = room.filter(|room| self.of(room).join(MARKER).exists()) {
                rooms.push(room.to_owned());
            }
        }
        Ok(rooms)
    }

    /// Removes the folder of a room, if it is one of ours.
    pub fn remove(&self, room: &str) -> io::Result<()> {
        let folder = self.of(room);
        if !is_id(room) || !folder.join(MARKER).exists() {
            return Ok(());
        }
        // Away at once, whatever is still written to it; if this breaks off, the rest goes later.
        let away = self.folder.join(format!("{GONE}{room}-{:016x}", fastrand::u64(..)));
        gone(std::fs::rename(&folder, &away))?;
        gone(std::fs::remove_dir_all(&away))
    }

    /// Removes what was left half removed.
    pub fn tidy(&self) -> io::Result<()> {
        for entry in std::fs::read_dir(&self.folder)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(GONE) {
                gone(std::fs::remove_dir_all(entry.path()))?;
            }
        }
        Ok(())
    }
}

/// Another mixer on this folder may be faster.
fn gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Kills every process that a former mixer with this mark has left, and returns when they have ended.
/// How many there were.
pub fn kill_leftovers(owner: &OsStr) -> io::Result<usize> {
    let (begun, mut killed) = (Instant::now(), std::collections::HashSet::new());
    loop {
        let mut is_clean = true;
        for entry in std::fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let Some(pid) =
                name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw)
            else {
                continue;
            };
            // Held before we look, so that what we look at is what we kill.
            let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
            if is_marked(pid, owner) {
                is_clean = false;
                killed.insert(pid);
                // It may have ended just now.
                let _ = pidfd_send_signal(&process, Signal::KILL);
            }
        }
        if is_clean {
            return Ok(killed.len());
        }
        if begun.elapsed() > ENDING {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "a former FFmpeg does not end"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether a process has our mark. One that has ended has no environment any more.
fn is_marked(pid: Pid, owner: &OsStr) -> bool {
    let path = format!("/proc/{}/environ", pid.as_raw_nonzero());
    let environment = std::fs::read(path).unwrap_or_default();
    let marked = [VARIABLE.as_bytes(), b"=", owner.as_bytes()].concat();
    environment.split(|byte| *byte == 0).any(|variable| variable == marked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_former_mixer_left_is_killed_and_nothing_else() {
        let start = |owner: &str| {
            std::process::Command::new("sleep").arg("600").env(VARIABLE, owner).spawn().unwrap()
        };
        let mark = format!("/test-{:016x}:m1", fastrand::u64(..));
        let (mut ours, mut other) = (start(&mark), start(&format!("{mark}2")));
        let waiting = std::thread::spawn(move || ours.wait().unwrap());
        assert_eq!(kill_leftovers(mark.as_ref()).unwrap(), 1);
        assert!(!waiting.join().unwrap().success());
        assert!(other.try_wait().unwrap().is_none(), "it is of another mixer");
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(kill_leftovers(mark.as_ref()).unwrap(), 0);
    }

    #[test]
    fn a_folder_is_of_one_mixer_of_an_id_and_only_folders_of_rooms_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let media = Media::open(folder.path(), "m1").unwrap();
        let error = Media::open(folder.path(), "m1").unwrap_err().to_string();
        assert!(error.contains("a mixer m1 already runs"), "{error}");
        let beside = Media::open(folder.path(), "m2").unwrap();
        assert_ne!(media.owner(), beside.owner());

        for (room, file) in [("a", MARKER), ("a", "seg_00001.ts"), ("b", "thesis.txt")] {
            std::fs::create_dir_all(media.of(room)).unwrap();
            std::fs::write(media.of(room).join(file), "x").unwrap();
        }
        assert_eq!(media.rooms().unwrap(), ["a"]);
        for room in ["a", "b", "c", "..", ""] {
            media.remove(room).unwrap();
        }
        assert!(!media.of("a").exists() && media.of("b").join("thesis.txt").exists());
        let half = folder.path().join(".gone-a-1");
        std::fs::create_dir_all(half.join("x")).unwrap();
        media.tidy().unwrap();
        assert!(!half.exists());
        drop(media);
        Media::open(folder.path(), "m1").unwrap();
    }
}
