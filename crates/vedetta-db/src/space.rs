//! What to do when the disk is full.
//!
//! ```text
//!            a write meets a full disk
//!   Ample ────────────────────────────► Full: only writes that free space run, on the ballast's room
//!     ▲                                   │
//!     └──────── ballast whole again, ─────┘
//!               and room beside it
//! ```
//!
//! SQLite needs room even to delete, so a ballast file keeps some in reserve: it is given up when the
//! first space-freeing write comes, and laid down again before other writes are taken. The file never
//! shrinks, but its free pages count as room, and the log gives back what it no longer needs.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate, statvfs};

/// Free room, beside the ballast, below which we do not believe that space has returned.
const MARGIN: u64 = 4 << 20;
/// A full disk is looked at again at most this often.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(crate) struct Space {
    ballast: PathBuf,
    size: u64,
    look_again: Duration,
    standing: Standing,
}

#[derive(Debug)]
enum Standing {
    Ample,
    Full {
        looked: Instant,
        /// A write that frees space met the full disk, too: the reserve is for the next one.
        spent: bool,
    },
}

impl Space {
    /// A test may want a full disk to be looked at again sooner.
    pub(crate) fn new(ballast: PathBuf, size: u64, look_again: Option<Duration>) -> Self {
        let look_again = look_again.unwrap_or(LOOK_AGAIN);
        let mut space = Self { ballast, size, look_again, standing: Standing::Ample };
        if !space.lay_ballast() {
            tracing::warn!("no room for the ballast file: the disk is almost full");
            space.standing = Standing::Full { looked: Instant::now(), spent: false };
        }
        space
    }

    /// A write met a full disk; `reclaiming` when it would have freed space.
    pub(crate) fn ran_out(&mut self, reclaiming: bool) {
        if matches!(self.standing, Standing::Ample) {
            tracing::error!("the disk is full: refusing writes until there is room");
        }
        self.standing = Standing::Full { looked: Instant::now(), spent: reclaiming };
    }

    /// Whether writes that take room may run. Looks at the disk again now and then while it is full:
    /// `shrink` then gives back what it can, and tells how many bytes are free inside the file.
    pub(crate) fn may_store(&mut self, shrink: impl FnOnce() -> u64) -> bool {
        let Standing::Full { looked, spent } = self.standing else { return true };
        if looked.elapsed() < self.look_again {
            return false;
        }
        self.standing = Standing::Full { looked: Instant::now(), spent };
        let inside = shrink();
        let has_room = self.lay_ballast()
            && self.free().is_some_and(|free| free.saturating_add(inside) >= MARGIN);
        if has_room {
            tracing::info!("the disk has room again: taking writes");
            self.standing = Standing::Ample;
        }
        has_room
    }

    /// Gives up the reserve for writes that free space, once one of them has met the full disk. Whether it did so now.
    pub(crate) fn make_room(&mut self) -> bool {
        let given_up = matches!(self.standing, Standing::Full { spent: true, .. })
            && fs::remove_file(&self.ballast).is_ok();
        if given_up {
            tracing::warn!("gave up the ballast file so that deletes and compaction can run");
        }
        given_up
    }

    /// Whether there is room for the ballast. A disk that cannot reserve room, as some network file
    /// systems, is used without.
    fn lay_ballast(&mut self) -> bool {
        match self.try_lay_ballast() {
            Ok(()) => true,
            Err(e) if is_full(&e) => false,
            Err(e) => {
                tracing::warn!(error = %e, "cannot keep a ballast file; going on without");
                self.size = 0;
                true
            }
        }
    }

    fn try_lay_ballast(&self) -> io::Result<()> {
        if self.size == 0 || fs::metadata(&self.ballast).is_ok_and(|m| m.len() >= self.size) {
            return Ok(());
        }
        let file: File = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&self.ballast)?;
        // Real blocks, not a hole: a sparse file would reserve nothing.
        let laid = fallocate(&file, FallocateFlags::empty(), 0, self.size).map_err(io::Error::from);
        if laid.is_err() {
            let _ = fs::remove_file(&self.ballast);
        }
        laid
    }

    fn free(&self) -> Option<u64> {
        let folder = crate::folder::parent(&self.ballast);
        let stat = statvfs(folder).ok()?;
        Some(stat.f_bavail.saturating_mul(stat.f_frsize))
    }
}

/// Whether it is for lack of room.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ballast_is_given_up_for_space_freeing_writes_and_laid_again_before_others() {
        let folder = tempfile::tempdir().unwrap();
        let ballast = folder.path().join("ballast");
        let mut space = Space::new(ballast.clone(), 1 << 20, None);
        assert!(space.may_store(|| 0) && ballast.exists());

        assert!(!space.make_room() && ballast.exists(), "nothing is given up while there is room");

        space.ran_out(false);
        assert!(!space.may_store(|| 0), "just found full: not looked at again at once");
        assert!(!space.make_room(), "it is kept for a write that frees space and finds none");
        assert!(ballast.exists());
        space.ran_out(true);
        assert!(space.make_room() && !ballast.exists());

        space.standing =
            Standing::Full { looked: Instant::now().checked_sub(LOOK_AGAIN).unwrap(), spent: true };
        assert!(space.may_store(|| 0), "this disk has room");
        assert_eq!(fs::metadata(&ballast).unwrap().len(), 1 << 20);
    }
}
