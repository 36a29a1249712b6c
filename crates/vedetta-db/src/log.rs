//! Tells a damaged write-ahead log from one that a power cut left unfinished.
//!
//! SQLite reads the log up to the first frame whose checksum is wrong and takes that for the end: right
//! after a power cut, but a bit that flipped in the middle silently undoes all commits after it. The two
//! can be told apart, because most transactions are begun when all before them are on the disk: a power cut
//! can spoil none before such a one. So when one lies whole beyond the bad frame, the log is damaged. Those
//! that are begun sooner say so: they write the first page, where the version of the file has the mark
//! [`UNSYNCED`].
//!
//! ```text
//!  header │ frame … commit │ bad … commit │ frame … commit │
//!                            ▲              └──────────────┘ checksums carry on, and no mark
//!                            └ where SQLite stops reading
//! ```
//!
//! Damage in the last transaction cannot be told from a power cut, nor damage before marked ones only.

use std::fs;
use std::io;
use std::path::Path;

const HEADER: usize = 32;
const FRAME_HEADER: usize = 24;
/// SQLite's default, which our files have.
pub(crate) const PAGE: usize = 4096;
/// Where the first page has the version of the file.
const VERSION: usize = 60;

/// Added to the version of the file by a transaction that was begun before all others were on the disk.
pub(crate) const UNSYNCED: i64 = 1 << 30;

/// Whether the log holds durable transactions that SQLite would not read. A missing log is sound.
pub(crate) fn is_damaged(file: &Path) -> io::Result<bool> {
    let mut name = file.as_os_str().to_owned();
    name.push("-wal");
    match fs::read(name) {
        Ok(log) => Ok(has_lost_transactions(&log)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// A running checksum, as SQLite computes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sum(u32, u32);

impl Sum {
    fn stored(bytes: &[u8]) -> Self {
        Self(number(bytes, 0), number(bytes, 4))
    }

    /// The sum after `bytes`, whose length is a multiple of 8. The log says in which byte order.
    fn add(self, bytes: &[u8], big_endian: bool) -> Self {
        let word = |bytes: &[u8]| {
            let word: [u8; 4] = bytes.try_into().unwrap_or_default();
            if big_endian { u32::from_be_bytes(word) } else { u32::from_le_bytes(word) }
        };
        bytes.chunks_exact(8).fold(self, |Self(a, b), pair| {
            let a = a.wrapping_add(word(&pair[..4])).wrapping_add(b);
            Self(a, b.wrapping_add(word(&pair[4..])).wrapping_add(a))
        })
    }
}

fn number(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|n| n.try_into().ok()).map_or(0, u32::from_be_bytes)
}

fn has_lost_transactions(log: &[u8]) -> bool {
    let Some((header, body)) = log.split_at_checked(HEADER) else { return false };
    let (mut page, mut big_endian) = (number(header, 8) as usize, number(header, 0) & 1 == 1);
    let mut sum = Sum::stored(&header[24..]);
    let mut reading = Sum(0, 0).add(&header[..24], big_endian) == sum;
    let mut salt = &header[16..24];
    if !reading {
        // Not to be believed; this is what we would have written.
        (page, big_endian) = (PAGE, cfg!(target_endian = "big"));
        salt = body.get(8..16).unwrap_or_default();
    }
    if page < 512 {
        return false;
    }
    // After a commit beyond the first bad frame; all since then carried on, without a mark.
    let (mut after_commit, mut sound) = (false, false);
    for frame in body.chunks_exact(FRAME_HEADER + page) {
        let stored = Sum::stored(&frame[16..]);
        let computed = sum.add(&frame[..8], big_endian).add(&frame[FRAME_HEADER..], big_endian);
        let follows = frame[8..16] == *salt && computed == stored;
        let commits = number(frame, 4) != 0;
        sound = !reading && follows && (after_commit || sound) && !is_marked(frame);
        if sound && commits {
            return true;
        }
        reading = reading && follows;
        after_commit = !reading && commits;
        sum = stored;
    }
    false
}

fn is_marked(frame: &[u8]) -> bool {
    number(frame, 0) == 1 && i64::from(number(frame, FRAME_HEADER + VERSION)) & UNSYNCED != 0
}

#[cfg(test)]
mod tests {
    use rusqlite::Connection;

    use super::*;

    /// The log of a database with some transactions, each of several pages.
    fn log() -> Vec<u8> {
        log_with("")
    }

    /// The same; `also` is part of the last two transactions.
    fn log_with(also: &str) -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.db");
        let db = Connection::open(&file).unwrap();
        db.query_row("PRAGMA journal_mode = WAL", [], |_| Ok(())).unwrap();
        db.execute_batch("PRAGMA wal_autocheckpoint = 0; CREATE TABLE t (b BLOB)").unwrap();
        for (size, also) in [(10, ""), (9000, ""), (20, ""), (5000, also), (30, also)] {
            db.execute_batch(&format!(
                "BEGIN; INSERT INTO t VALUES (randomblob({size})); {also}; COMMIT"
            ))
            .unwrap();
        }
        assert!(!is_damaged(&file).unwrap());
        fs::read(folder.path().join("a.db-wal")).unwrap()
    }

    /// The frames, and which of them commit.
    fn commits(log: &[u8]) -> Vec<bool> {
        let frames = log[HEADER..].chunks_exact(FRAME_HEADER + PAGE);
        frames.map(|frame| number(frame, 4) != 0).collect()
    }

    #[test]
    fn a_flipped_bit_before_the_last_transaction_is_damage() {
        let log = log();
        let commits = commits(&log);
        let last_begins = commits[..commits.len() - 1].iter().rposition(|c| *c).unwrap() + 1;
        for bit in 0..HEADER * 8 {
            let mut flipped = log.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(has_lost_transactions(&flipped), "bit {bit} of the header");
        }
        let mut rng = fastrand::Rng::with_seed(1);
        for (frame, _) in commits.iter().enumerate() {
            for _ in 0..40 {
                let mut flipped = log.clone();
                let byte =
                    HEADER + frame * (FRAME_HEADER + PAGE) + rng.usize(..FRAME_HEADER + PAGE);
                flipped[byte] ^= 1 << rng.u8(..8);
                // The frame before the last transaction is the one whose continuation is looked for.
                let told = has_lost_transactions(&flipped);
                assert!(told || frame + 1 >= last_begins, "frame {frame}, byte {byte}");
                assert!(!told || frame < last_begins, "frame {frame}, byte {byte}");
            }
        }
    }

    /// A transaction that says so was begun before the one before it was on the disk.
    #[test]
    fn a_bad_frame_before_marked_transactions_only_is_no_damage() {
        let log = log_with(&format!("PRAGMA user_version = {}", 1 | UNSYNCED));
        let commits = commits(&log);
        let mut begins: Vec<usize> =
            (1..commits.len()).filter(|frame| commits[frame - 1]).collect();
        begins.reverse();
        let synced = begins[2]; // the last transaction without a mark
        for frame in 0..commits.len() {
            let mut bad = log.clone();
            bad[HEADER + frame * (FRAME_HEADER + PAGE) + FRAME_HEADER + 100] ^= 1;
            assert_eq!(has_lost_transactions(&bad), frame < synced, "frame {frame}");
        }
    }

    #[test]
    fn a_log_that_ends_anywhere_or_is_torn_in_its_last_transaction_is_sound() {
        let log = log();
        for length in (0..log.len()).step_by(100) {
            assert!(!has_lost_transactions(&log[..length]), "{length} bytes");
        }
        let last = commits(&log).len() - 1;
        for sector in (HEADER + last * (FRAME_HEADER + PAGE)..log.len()).step_by(512) {
            let mut torn = log.clone();
            torn[sector..(sector + 512).min(log.len())].fill(0);
            assert!(!has_lost_transactions(&torn));
        }
        assert!(!has_lost_transactions(&[]) && !has_lost_transactions(&[0; 9000]));
    }
}
