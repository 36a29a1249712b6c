//! The disk tells safe settings from unsafe ones: the first lose nothing, the second must be caught.
//!
//! Every failure names its seed, operation and image; `TORTURE_SEED` runs the tests with another seed.

use std::collections::BTreeSet;
use std::path::Path;
use std::{env, fmt, fs};

use rusqlite::{Connection, ErrorCode, OpenFlags, params};
use tempfile::TempDir;
use torture::vfs::{Disk, Fault, Image, Times};

const FILE: &str = "store.db";

fn seed() -> u64 {
    env::var("TORTURE_SEED").map_or(0x5eed, |seed| seed.parse().expect("TORTURE_SEED is a number"))
}

/// How the database writes.
#[derive(Clone, Copy, Debug)]
struct Setting {
    journal: &'static str,
    synchronous: &'static str,
    lying_disk: bool,
}

const WAL_FULL: Setting = Setting { journal: "WAL", synchronous: "FULL", lying_disk: false };

/// Numbers whose commit was acknowledged, and the highest one tried.
#[derive(Default)]
struct Story {
    acknowledged: BTreeSet<u32>,
    tried: u32,
    errors: Vec<rusqlite::Error>,
}

impl Story {
    /// Inserts the next number in a transaction of its own.
    fn insert(&mut self, db: &Connection) -> rusqlite::Result<()> {
        self.tried += 1;
        let mut insert = db.prepare_cached("INSERT INTO entry (number, body) VALUES (?1, ?2)")?;
        insert.execute(params![self.tried, body(self.tried)])?;
        self.acknowledged.insert(self.tried);
        Ok(())
    }

    /// Inserts up to number `last`. Errors are noted; the connection stays if it was made at all.
    fn tell(&mut self, last: u32, setting: Setting, disk: &Disk, dir: &Path) {
        let db = loop {
            match open(setting, disk, dir) {
                Ok(db) => break db,
                Err(error) => self.errors.push(error),
            }
            if disk.crashed() {
                return;
            }
            assert!(self.errors.len() < 10, "opening keeps failing: {:?}", self.errors);
        };
        while self.tried < last && !disk.crashed() {
            if let Err(error) = self.insert(&db) {
                self.errors.push(error);
            }
        }
    }

    /// What is wrong with the database in `dir`.
    fn verdict(&self, dir: &Path) -> Verdict {
        match read(dir) {
            Err(reason) => Verdict::Corrupt(reason),
            Ok(found) => {
                if let Some(lost) = self.acknowledged.difference(&found).next() {
                    Verdict::Lost(*lost)
                } else if found.last().is_some_and(|last| *last > self.tried) {
                    Verdict::Corrupt("holds a number never written".into())
                } else {
                    Verdict::Sound
                }
            }
        }
    }
}

#[derive(Debug, PartialEq)]
enum Verdict {
    Sound,
    Lost(u32),
    Corrupt(String),
}

/// Long enough to need overflow pages now and then, and different for every number.
fn body(number: u32) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(number.into());
    let length = rng.usize(1..6000);
    std::iter::repeat_with(|| rng.u8(..)).take(length).collect()
}

fn open(setting: Setting, disk: &Disk, dir: &Path) -> rusqlite::Result<Connection> {
    let db =
        Connection::open_with_flags_and_vfs(dir.join(FILE), OpenFlags::default(), disk.name())?;
    // To the end: the pragma answers `wal` first and commits the change afterwards, so with
    // `execute_batch` or `query_row` an I/O error goes unnoticed and the old mode stays.
    db.prepare(&format!("PRAGMA journal_mode = {}", setting.journal))?
        .query_map([], |_| Ok(()))?
        .collect::<rusqlite::Result<()>>()?;
    db.execute_batch(&format!(
        "PRAGMA synchronous = {};
         PRAGMA wal_autocheckpoint = 12;
         CREATE TABLE IF NOT EXISTS entry (number INTEGER PRIMARY KEY, body BLOB NOT NULL)",
        setting.synchronous
    ))?;
    Ok(db)
}

/// The numbers in the database, read without the disk.
fn read(dir: &Path) -> Result<BTreeSet<u32>, String> {
    let inner = || -> rusqlite::Result<Result<BTreeSet<u32>, String>> {
        let db = Connection::open(dir.join(FILE))?;
        db.execute_batch("PRAGMA synchronous = OFF")?;
        let integrity: String = db.query_row("PRAGMA integrity_check", [], |row| row.get(0))?;
        if integrity != "ok" {
            return Ok(Err(integrity));
        }
        if !db.table_exists(None, "entry")? {
            return Ok(Ok(BTreeSet::new()));
        }
        let mut entries = db.prepare("SELECT number, body FROM entry")?;
        let mut rows = entries.query([])?;
        let mut found = BTreeSet::new();
        while let Some(row) = rows.next()? {
            let number = row.get(0)?;
            if row.get_ref(1)?.as_blob()? != body(number) {
                return Ok(Err(format!("the body of {number} is wrong")));
            }
            found.insert(number);
        }
        Ok(Ok(found))
    };
    inner().unwrap_or_else(|error| Err(error.to_string()))
}

/// Images so far, and what was wrong with them.
#[derive(Default, Debug)]
struct Tally {
    images: usize,
    lost: usize,
    corrupt: usize,
    first: Option<String>,
}

impl Tally {
    fn judge(&mut self, story: &Story, image: &Image, situation: impl fmt::Display) {
        let dir = tempfile::tempdir().unwrap();
        image.write_to(dir.path()).unwrap();
        let verdict = story.verdict(dir.path());
        self.images += 1;
        self.lost += usize::from(matches!(verdict, Verdict::Lost(_)));
        self.corrupt += usize::from(matches!(verdict, Verdict::Corrupt(_)));
        if verdict != Verdict::Sound && self.first.is_none() {
            self.first = Some(format!("{verdict:?} ({situation}; {image})"));
        }
    }

    fn assert_sound(&self) {
        assert!(self.lost == 0 && self.corrupt == 0, "{self:?}");
    }
}

/// Cuts the power `cuts` times, each at a random operation of the same story.
fn power_cuts(setting: Setting, cuts: u64) -> Tally {
    const LAST: u32 = 60;
    const IMAGES: usize = 8;
    let run = |seed: u64, crash_at: Option<u64>| {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::register("cut", seed);
        disk.lie(setting.lying_disk);
        if let Some(operation) = crash_at {
            disk.crash_at(operation);
        }
        let mut story = Story::default();
        // Two connections one after the other, so that a WAL is deleted and made anew.
        story.tell(LAST / 2, setting, &disk, dir.path());
        if !disk.crashed() {
            story.tell(LAST, setting, &disk, dir.path());
        }
        (story, disk, dir)
    };
    let (_, whole, _) = run(0, None);
    let operations = whole.operations();

    let mut tally = Tally::default();
    for seed in seed()..seed() + cuts {
        let at = fastrand::Rng::with_seed(seed).u64(1..=operations);
        let (story, disk, _dir) = run(seed, Some(at));
        assert!(disk.crashed());
        assert_eq!(disk.operations(), at, "nothing happens after the power cut");
        for image in disk.images(seed, IMAGES) {
            tally.judge(
                &story,
                &image,
                format_args!("{setting:?}, seed {seed}, power cut at {at}"),
            );
        }
    }
    eprintln!("{setting:?}: {tally:?}");
    tally
}

#[test]
fn wal_with_full_sync_loses_nothing() {
    power_cuts(WAL_FULL, 100).assert_sound();
}

#[test]
fn wal_with_normal_sync_loses_commits_but_stays_intact() {
    let tally = power_cuts(Setting { synchronous: "NORMAL", ..WAL_FULL }, 25);
    assert!(tally.lost > 0 && tally.corrupt == 0, "{tally:?}");
}

#[test]
fn wal_without_sync_loses_commits() {
    let tally = power_cuts(Setting { synchronous: "OFF", ..WAL_FULL }, 25);
    assert!(tally.lost > 0 && tally.corrupt > 0, "{tally:?}");
}

#[test]
fn a_lying_disk_loses_commits() {
    let tally = power_cuts(Setting { lying_disk: true, ..WAL_FULL }, 25);
    assert!(tally.lost > 0 && tally.corrupt > 0, "{tally:?}");
}

/// The deleted journal comes back and undoes the commit; `EXTRA` syncs the directory to prevent it.
#[test]
fn a_rollback_journal_needs_extra_sync() {
    let full = power_cuts(Setting { journal: "DELETE", ..WAL_FULL }, 25);
    assert!(full.lost > 0 && full.corrupt == 0, "{full:?}");
    power_cuts(Setting { journal: "DELETE", synchronous: "EXTRA", lying_disk: false }, 25)
        .assert_sound();
}

#[test]
fn one_failed_operation_anywhere_corrupts_nothing() {
    const LAST: u32 = 12;
    let mut tally = Tally::default();
    for fault in [Fault::Error, Fault::Full] {
        for operation in 1.. {
            let dir = tempfile::tempdir().unwrap();
            let disk = Disk::register("fault", seed());
            disk.fail_at(operation, fault, Times::Once);
            let mut story = Story::default();
            story.tell(LAST, WAL_FULL, &disk, dir.path());

            let situation = format!("seed {}, {fault:?} at {operation}", seed());
            assert_eq!(story.verdict(dir.path()), Verdict::Sound, "{situation}");
            for image in disk.images(seed(), 4) {
                tally.judge(&story, &image, &situation);
            }
            if story.errors.is_empty() && disk.operations() < operation {
                break;
            }
        }
    }
    eprintln!("{tally:?}");
    tally.assert_sound();
}

#[test]
fn a_lasting_fault_ends_when_healed() {
    let (dir, disk) = (tempfile::tempdir().unwrap(), Disk::register("lasting", seed()));
    let db = open(WAL_FULL, &disk, dir.path()).unwrap();
    let mut story = Story::default();
    story.insert(&db).unwrap();

    for (fault, code) in
        [(Fault::Error, ErrorCode::SystemIoFailure), (Fault::Full, ErrorCode::DiskFull)]
    {
        disk.fail_at(disk.operations() + 1, fault, Times::ForGood);
        for _ in 0..3 {
            assert_eq!(story.insert(&db).unwrap_err().sqlite_error_code(), Some(code));
        }
        let rows: u32 = db.query_row("SELECT count(*) FROM entry", [], |row| row.get(0)).unwrap();
        assert_eq!(rows as usize, story.acknowledged.len(), "reads still work");
        disk.heal();
        story.insert(&db).unwrap();
    }
    drop(db);
    assert_eq!(story.verdict(dir.path()), Verdict::Sound);
}

#[test]
fn a_full_disk_refuses_writes_until_there_is_space() {
    let (dir, disk) = (tempfile::tempdir().unwrap(), Disk::register("small", seed()));
    let db = open(WAL_FULL, &disk, dir.path()).unwrap();
    let (mut story, mut tally) = (Story::default(), Tally::default());
    for limit in [100_000, 200_000, 300_000] {
        disk.limit(Some(limit));
        let error = loop {
            if let Err(error) = story.insert(&db) {
                break error;
            }
        };
        assert_eq!(error.sqlite_error_code(), Some(ErrorCode::DiskFull), "{error}");
        assert!(disk.used() <= limit);
        assert_eq!(disk.used(), size_of(dir.path()), "the refused write changed nothing");
        for image in disk.images(seed(), 10) {
            tally.judge(&story, &image, format_args!("seed {}, limit {limit}", seed()));
        }
        disk.limit(None);
        story.insert(&db).unwrap();
    }
    drop(db);
    assert_eq!(story.verdict(dir.path()), Verdict::Sound);
    tally.assert_sound();
}

/// All files but the shared memory, which takes no space of the disk.
fn size_of(dir: &Path) -> u64 {
    let files = fs::read_dir(dir).unwrap().map(Result::unwrap);
    let counted = files.filter(|file| !file.file_name().to_string_lossy().ends_with("-shm"));
    counted.map(|file| file.metadata().unwrap().len()).sum()
}

#[test]
fn files_from_before_are_durable() {
    let dir = tempfile::tempdir().unwrap();
    let mut story = Story::default();
    let first = Disk::register("first", seed());
    let db = open(WAL_FULL, &first, dir.path()).unwrap();
    story.insert(&db).unwrap();

    // The plug is pulled, so the WAL stays behind and holds the only copy.
    first.crash_now();
    assert!(story.insert(&db).is_err());
    drop(db);

    let second = Disk::register("second", seed());
    let flags = OpenFlags::default();
    let db =
        Connection::open_with_flags_and_vfs(dir.path().join(FILE), flags, second.name()).unwrap();
    let mut tally = Tally::default();
    for image in second.images(seed(), 10) {
        assert!(image.file("store.db-wal").is_some_and(|wal| !wal.is_empty()));
        tally.judge(&story, &image, "before the first read");
    }
    drop(db);
    story.tell(3, WAL_FULL, &second, dir.path());
    for image in second.images(seed(), 10) {
        tally.judge(&story, &image, "after more writes");
    }
    tally.assert_sound();
}

#[test]
fn the_same_seed_builds_the_same_images() {
    let (dir, disk) = (tempfile::tempdir().unwrap(), Disk::register("same", seed()));
    let setting = Setting { synchronous: "OFF", ..WAL_FULL };
    Story::default().tell(10, setting, &disk, dir.path());
    disk.crash_now();

    let images = |seed| disk.images(seed, 20).map(|image| image.file(FILE).map(<[u8]>::to_vec));
    assert!(images(1).eq(images(1)));
    assert!(images(1).ne(images(2)));
}

#[test]
fn an_image_goes_into_an_empty_directory_only() {
    let (dir, disk) = (tempfile::tempdir().unwrap(), Disk::register("image", seed()));
    Story::default().tell(1, WAL_FULL, &disk, dir.path());
    let image = disk.images(seed(), 1).next().unwrap();
    let fresh = TempDir::new().unwrap();
    image.write_to(&fresh.path().join("made")).unwrap();
    image.write_to(dir.path()).unwrap_err();
}

#[test]
fn disks_do_not_disturb_each_other() {
    std::thread::scope(|scope| {
        for number in 0..8 {
            scope.spawn(move || {
                let (dir, disk) = (tempfile::tempdir().unwrap(), Disk::register("many", seed()));
                let mut story = Story::default();
                if number % 2 == 0 {
                    disk.crash_at(40);
                }
                story.tell(30, WAL_FULL, &disk, dir.path());
                assert_eq!(disk.crashed(), number % 2 == 0);
                let mut tally = Tally::default();
                disk.images(seed(), 5).for_each(|image| tally.judge(&story, &image, number));
                tally.assert_sound();
            });
        }
    });
}

/// A connection that outlives its disk gets errors, and nothing worse.
#[test]
fn a_forgotten_connection_fails_cleanly() {
    let (dir, disk) = (tempfile::tempdir().unwrap(), Disk::register("gone", seed()));
    let db = open(WAL_FULL, &disk, dir.path()).unwrap();
    let mut story = Story::default();
    story.insert(&db).unwrap();
    let name = disk.name().to_owned();
    drop(disk);

    story.insert(&db).unwrap_err();
    let again = Connection::open_with_flags_and_vfs(
        dir.path().join(FILE),
        OpenFlags::default(),
        name.as_str(),
    );
    assert!(again.is_err(), "the name is gone");
    drop(db);
}

/// The fsync of one connection fails; another one, which has the same file open, hears of it, too.
#[test]
fn a_failed_sync_is_told_to_everybody_who_has_the_file_open() {
    let (dir, disk) = (tempfile::tempdir().unwrap(), Disk::register("told", seed()));
    let (first, second) =
        (open(WAL_FULL, &disk, dir.path()).unwrap(), open(WAL_FULL, &disk, dir.path()).unwrap());
    let mut story = Story::default();
    story.insert(&first).unwrap();
    story.insert(&second).unwrap();

    let before = disk.operations();
    story.insert(&first).unwrap();
    let sync = disk.operations() - before; // the last operation of a commit
    disk.fail_at(disk.operations() + sync, Fault::Error, Times::Once);
    story.insert(&first).unwrap_err();
    story.insert(&second).unwrap_err();
    story.insert(&first).unwrap();
    story.insert(&second).unwrap();
}
