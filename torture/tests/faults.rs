//! Faults: the disk fails or is full at operation N, or cannot be read at read N, once or for good, for every N of a
//! short run. The store says so, never lies, never hangs, and goes on when it can.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout};
use torture::bed::{self, How, memory_folder};
use torture::note::{Note, What, value};
use torture::story::{PATIENCE, Story};
use torture::vfs::{Disk, Fault, Image, Times};
use torture::workload::{Failing, Notes, Workload};
use vedetta_core::{KeyRange, Revision};
use vedetta_db::{CommitError, Purpose, Schema, Stop};
use vedetta_kv::{Delete, KvError, Op, Put, Range, Store, Txn};

/// A fault to plant.
#[derive(Debug, Clone, Copy)]
enum Planted {
    Operation(u64, Fault, Times),
    Read(u64, Times),
}

impl Planted {
    fn plant(self, disk: &Disk) {
        match self {
            Self::Operation(operation, fault, times) => disk.fail_at(operation, fault, times),
            Self::Read(read, times) => disk.fail_read_at(read, times),
        }
    }

    /// Whether an fsync may fail, after which nothing is written before a restart.
    fn halts(self) -> bool {
        matches!(self, Self::Operation(_, Fault::Error, _))
    }
}

/// The run that faults are planted into: opening, a bit of everything, closing.
fn workload(seed: u64, writers: u64) -> Workload {
    Workload {
        seed,
        first_id: 1 << 24,
        writers,
        writes: 30,
        short_leases: false,
        failing: Failing::Endured,
    }
}

#[derive(Default, Debug)]
struct Tally {
    runs: u64,
    operations: u64,
    reads: u64,
    acknowledged: usize,
    refused: usize,
    failed: usize,
    failed_opens: usize,
    /// Runs in which the log could not be synced while the store was open.
    unsynced: usize,
    halted: usize,
    images: usize,
}

/// One run with one fault.
struct Run {
    fault: Option<Planted>,
    workload: Workload,
    disk: Disk,
    past: Arc<Mutex<Story>>,
    notes: Notes,
    /// What was answered, except "done".
    answers: Arc<Mutex<Vec<Note>>>,
    wrong: Vec<String>,
    /// What a power cut would have left before the store was closed, and what it had said by then.
    cut: Vec<(Image, Story)>,
    failed_opens: usize,
    /// The log could not be synced while the store was open.
    unsynced: bool,
    halted: bool,
}

impl Run {
    fn new(fault: Option<Planted>, workload: Workload) -> Self {
        let past = Arc::new(Mutex::new(Story::default()));
        let answers = Arc::new(Mutex::new(Vec::new()));
        let (told, also) = (Arc::clone(&past), Arc::clone(&answers));
        let notes: Notes = Arc::new(move |note: Note| {
            if matches!(note, Note::Refused { .. } | Note::Failed { .. }) {
                also.lock().push(note.clone());
            }
            told.lock().note(note);
        });
        let disk = Disk::register("faults", workload.seed);
        Self {
            fault,
            workload,
            disk,
            past,
            notes,
            answers,
            wrong: Vec::new(),
            cut: Vec::new(),
            failed_opens: 0,
            unsynced: false,
            halted: false,
        }
    }

    fn how(&self) -> How {
        let mut how = How::on(&self.disk);
        how.torture.small_cache = matches!(self.fault, Some(Planted::Read(..)));
        how
    }

    /// Opening may fail, with a reason; once the disk is healed it may not.
    async fn open(&mut self, folder: &Path) -> Option<Store> {
        for healed in [false, true] {
            match self.how().open(folder).await {
                Ok(store) => return Some(store),
                Err(error) => {
                    self.failed_opens += 1;
                    if error.to_string().is_empty() {
                        self.wrong.push("opening failed without a reason".to_owned());
                    }
                    if healed {
                        self.wrong.push(format!("a healed disk does not open: {error}"));
                    }
                }
            }
            self.disk.heal();
        }
        None
    }

    async fn live(&mut self, folder: &Path) {
        let Some(store) = self.open(folder).await else { return };
        let failed_before = self.disk.failed_log_syncs();
        let resume = self.past.lock().resume();
        self.workload.run(&store, &resume, &self.notes).await;
        let past = self.past.lock().clone(); // first: what is noted later need not be in the image
        let images = self.disk.images(self.workload.seed, 2);
        self.cut.extend(images.map(|image| (image, past.clone())));
        self.disk.heal();
        self.unsynced = self.disk.failed_log_syncs() > failed_before;
        let store = self.recover(store, folder).await;
        if self.unsynced && !self.halted {
            self.wrong.push("it goes on after a failed fsync of the log".to_owned());
        }
        store.close().await;
    }

    /// A healed disk: the store must take writes again; after a failed fsync, when it is reopened.
    async fn recover(&mut self, store: Store, folder: &Path) -> Store {
        let mut store = store;
        let mut id = 2 << 24;
        let deadline = Instant::now() + PATIENCE;
        let mut was_lost_with_another = false;
        loop {
            id += 1;
            let puts = vec!["k/00".to_owned()];
            let what = What::Write { puts, deletes: vec![], lease: 0, anew: false };
            (self.notes)(Note::Tried { id, what });
            match store.put(Put::new("k/00", value(id))).await {
                Ok(done) => {
                    (self.notes)(Note::Done { id, revision: done.revision.0 });
                    return store;
                }
                Err(error @ KvError::Lost(CommitError::Full)) if Instant::now() < deadline => {
                    (self.notes)(Note::Refused { id, why: error.to_string() });
                    sleep(Duration::from_millis(1)).await; // the store looks at the disk now and then
                }
                Err(error @ KvError::Lost(CommitError::Halted))
                    if self.fault.is_some_and(Planted::halts) && !self.halted =>
                {
                    (self.notes)(Note::Refused { id, why: error.to_string() });
                    self.halted = true;
                    if !matches!(
                        store.takes_writes().await,
                        Err(KvError::Lost(CommitError::Halted))
                    ) {
                        self.wrong.push("a halted store says that it takes writes".to_owned());
                    }
                    store.close().await;
                    match self.how().open(folder).await {
                        Ok(again) => store = again,
                        Err(error) => {
                            self.wrong.push(format!("it does not open again: {error}"));
                            return store;
                        }
                    }
                }
                // It was evaluated on what a write of the store's own had, whose commit failed before the disk was healed.
                Err(error @ KvError::Lost(CommitError::Failed(_)))
                    if self.fault.is_some_and(Planted::halts) && !was_lost_with_another =>
                {
                    (self.notes)(Note::Failed { id, why: bed::explain(&error) });
                    was_lost_with_another = true;
                }
                Err(error) => {
                    self.wrong.push(format!(
                        "a healed disk does not take writes: {}",
                        bed::explain(&error)
                    ));
                    return store;
                }
            }
        }
    }

    /// What was answered fits the fault.
    fn check_answers(&mut self) {
        for answer in &*self.answers.lock() {
            let clear = match (self.fault, answer) {
                (_, Note::Refused { why, .. }) if !is_about_the_disk(why) => true,
                (Some(fault), Note::Refused { why, .. }) => match fault {
                    Planted::Operation(_, Fault::Full, _) => why == "the disk is full",
                    Planted::Operation(_, Fault::Error, _) => why.contains("an fsync failed"),
                    Planted::Read(..) => why.starts_with("cannot read the history: "),
                },
                (Some(fault), Note::Failed { why, .. }) => {
                    why.starts_with("the database failed while writing: ")
                        && !matches!(fault, Planted::Operation(_, Fault::Full, _))
                }
                _ => false,
            };
            if !clear {
                self.wrong.push(format!("not the answer to {:?}: {answer}", self.fault));
            }
        }
    }
}

/// Other refusals have to do with what was there when it was asked for.
fn is_about_the_disk(why: &str) -> bool {
    ["disk", "fsync", "database", "history", "closed", "panicked"]
        .iter()
        .any(|word| why.contains(word))
}

async fn check(folder: &Path, mut past: Story) -> Vec<String> {
    let store = match How::default().open(folder).await {
        Ok(store) => store,
        Err(error) => return vec![format!("it does not open: {error}")],
    };
    let mut wrong = past.check(&store).await;
    store.close().await;
    match vedetta_db::damage(&folder.join(bed::FILE)) {
        Ok(damage) => wrong.extend(damage),
        Err(error) => wrong.push(error.to_string()),
    }
    wrong
}

async fn check_image(image: &Image, past: Story) -> Vec<String> {
    let folder = memory_folder();
    image.write_to(folder.path()).expect("an image can be written");
    check(folder.path(), past).await
}

/// One run; returns how many operations and reads it had.
async fn run(planted: Option<Planted>, workload: Workload, tally: &mut Tally) -> (u64, u64) {
    let folder = memory_folder();
    let seed = workload.seed;
    let mut run = Run::new(planted, workload);
    if let Some(planted) = planted {
        planted.plant(&run.disk);
    }
    if timeout(PATIENCE, run.live(folder.path())).await.is_err() {
        run.wrong.push("it hangs".to_owned());
    }
    run.check_answers();
    let past = run.past.lock().clone();
    let mut wrong = run.wrong;
    // A power cut after the fault, or after all, must not take anything either.
    run.cut.extend(run.disk.images(seed, 2).map(|image| (image, past.clone())));
    for (image, past) in run.cut {
        tally.images += 1;
        let found = check_image(&image, past).await;
        wrong.extend(found.into_iter().map(|line| format!("after a power cut ({image}): {line}")));
    }
    tally.runs += 1;
    tally.acknowledged += past.acknowledged();
    let failed = |note: &&Note| matches!(note, Note::Failed { .. });
    tally.failed += run.answers.lock().iter().filter(failed).count();
    tally.refused += run.answers.lock().iter().filter(|note| !failed(note)).count();
    tally.failed_opens += run.failed_opens;
    tally.unsynced += usize::from(run.unsynced);
    tally.halted += usize::from(run.halted);
    wrong.extend(check(folder.path(), past).await);
    assert!(
        wrong.is_empty(),
        "TORTURE_SEED={seed}, {planted:?}: {} violations\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    (run.disk.operations(), run.disk.reads())
}

/// A run that nothing is planted into.
async fn fine(workload: Workload) -> Tally {
    let mut tally = Tally::default();
    (tally.operations, tally.reads) = run(None, workload, &mut tally).await;
    assert_eq!(tally.failed + tally.failed_opens, 0, "nothing fails without a fault");
    tally
}

/// Every N, until the run is over before the fault comes.
async fn at_every_operation(fault: Fault, times: Times) {
    let workload = || workload(bed::seed(), 1);
    let mut tally = fine(workload()).await;
    for operation in 1..=tally.operations {
        let planted = Planted::Operation(operation, fault, times);
        run(Some(planted), workload(), &mut tally).await;
    }
    eprintln!("{fault:?} {times:?}: {tally:?}");
    assert!(tally.refused + tally.failed > 0, "{tally:?}");
    let syncs_fail = fault == Fault::Error;
    assert!((tally.unsynced > 0) == syncs_fail && (tally.halted > 0) == syncs_fail, "{tally:?}");
}

/// Every N, too: reads while it opens, writes, watches, sweeps, looks at the past, and closes.
async fn at_every_read(times: Times) {
    let workload = || workload(bed::seed(), 1);
    let mut tally = Tally::default();
    // Nothing has so many.
    (tally.operations, tally.reads) =
        run(Some(Planted::Read(u64::MAX, times)), workload(), &mut tally).await;
    assert_eq!(tally.failed + tally.failed_opens, 0, "nothing fails without a fault");
    for read in 1..=tally.reads {
        run(Some(Planted::Read(read, times)), workload(), &mut tally).await;
    }
    eprintln!("reads, {times:?}: {tally:?}");
    assert!(tally.failed_opens > 0 && tally.failed > 0 && tally.halted == 0, "{tally:?}");
}

#[tokio::test]
async fn a_read_that_fails_anywhere_is_told_and_nothing_acknowledged_is_lost() {
    at_every_read(Times::Once).await;
}

#[tokio::test]
async fn a_disk_that_cannot_be_read_from_anywhere_on_is_told_and_nothing_acknowledged_is_lost() {
    at_every_read(Times::ForGood).await;
}

#[tokio::test]
async fn the_present_is_read_without_the_disk() {
    const KEYS: usize = 400;
    let (folder, disk) = (memory_folder(), Disk::register("present", bed::seed()));
    let store = How::on(&disk).open(folder.path()).await.unwrap();
    // More than SQLite keeps in memory, with a past.
    for round in 0..2 {
        for key in 0..KEYS {
            let put = Put::new(format!("k{key:03}"), format!("{round}").repeat(16 << 10));
            store.put(put).await.unwrap();
        }
    }
    disk.fail_read_at(disk.reads() + 1, Times::ForGood);
    for key in 0..KEYS {
        let one = Range::new(KeyRange::One(format!("k{key:03}").into()));
        let found = store.range(one.clone()).await.unwrap();
        assert!(found.keys[0].value().starts_with(b"1"));
        let txn = Txn { then: vec![Op::Range(one)], ..Txn::default() };
        assert!(store.txn(txn).await.unwrap().held);
    }
    let all = Range::new(KeyRange::all());
    assert_eq!(store.range(all.clone()).await.unwrap().keys.len(), KEYS);
    let past = store.range(Range { at: Some(Revision(KEYS as u64)), ..all }).await;
    assert!(matches!(past, Err(KvError::Unreadable(_))), "the past is on the disk");
    disk.heal();
    store.close().await;
}

/// With many writers a checkpoint is often under way when the fault comes.
#[tokio::test]
async fn a_fault_under_many_writers_is_told_and_nothing_acknowledged_is_lost() {
    let mut tally = fine(workload(bed::seed(), 4)).await;
    for seed in bed::seed()..bed::seed() + bed::number("TORTURE_FAULTS", 200) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let fault = if rng.u8(..4) == 0 { Fault::Full } else { Fault::Error };
        let times = if rng.bool() { Times::Once } else { Times::ForGood };
        let operation = rng.u64(1..=tally.operations);
        let planted = Planted::Operation(operation, fault, times);
        run(Some(planted), workload(seed, 4), &mut tally).await;
    }
    eprintln!("{tally:?}");
}

#[tokio::test]
async fn an_io_error_anywhere_is_told_and_nothing_acknowledged_is_lost() {
    at_every_operation(Fault::Error, Times::Once).await;
}

#[tokio::test]
async fn a_lasting_io_error_from_anywhere_on_is_told_and_nothing_acknowledged_is_lost() {
    at_every_operation(Fault::Error, Times::ForGood).await;
}

#[tokio::test]
async fn a_full_disk_anywhere_refuses_and_the_store_goes_on_without_a_restart() {
    at_every_operation(Fault::Full, Times::Once).await;
}

#[tokio::test]
async fn a_disk_full_from_anywhere_on_refuses_and_the_store_goes_on_when_space_returns() {
    at_every_operation(Fault::Full, Times::ForGood).await;
}

#[tokio::test]
async fn who_waits_for_the_room_that_a_compaction_frees_is_told_when_that_fails() {
    let mut swept_badly = 0;
    for after in 1.. {
        let (folder, disk) = (memory_folder(), Disk::register("sweep", bed::seed()));
        let mut how = How::on(&disk);
        how.torture.checkpoint_step = None; // nobody else writes
        let store = how.open(folder.path()).await.unwrap();
        for number in 0..5 {
            store.put(Put::new("k", value(number))).await.unwrap();
        }
        store.compact(Revision(2), true).await.unwrap(); // the sweep at the start is over, too
        let fails_at = disk.operations() + after;
        disk.fail_at(fails_at, Fault::Error, Times::Once);
        let compacted = store.compact(Revision(6), true).await;
        let has_failed = disk.operations() >= fails_at;
        let stands = store.status().compacted == Revision(6);
        assert_eq!(compacted.is_err(), has_failed, "operation {after}: {compacted:?}");
        assert!(stands || has_failed);
        swept_badly += usize::from(stands && has_failed);
        disk.heal();
        store.close().await;
        if !has_failed {
            break;
        }
    }
    assert!(swept_badly > 0, "the sweep was to fail, too");
}

/// A put takes a page of the file and three of the log.
fn put_number(number: u32) -> Put {
    Put::new(format!("k/{number:05}/{:060}", 0), vec![7; 3_900])
}

/// Puts `k/N` for N from `first` on, until one is refused twice: before the second try the log gives back what it
/// can. Returns the first number not put.
async fn fill(store: &Store, first: u32) -> u32 {
    let mut refused = None;
    for number in first.. {
        while let Err(error) = store.put(put_number(number)).await {
            assert!(matches!(error, KvError::Lost(CommitError::Full)), "{}", bed::explain(&error));
            if refused.replace(number) == Some(number) {
                return number;
            }
        }
    }
    unreachable!("a disk with a limit fills up")
}

/// A store that filled a small disk, of which the ballast takes a part.
struct Full {
    folder: TempDir,
    disk: Disk,
    how: How,
    store: Store,
    limit: u64,
    /// How many of `k/N` are there.
    stored: u32,
}

const BALLAST: u64 = 1 << 20;
/// What was stored while there was room.
const BEFORE: u32 = 200;

/// How long history is kept by the policy of a [`full_store`].
const KEPT: Duration = Duration::from_secs(3_600);

/// Nothing here is left to chance: only the writer moves the log, and it looks at a full disk every time. What was stored
/// before and the first put after that are known to be older than `keep`, if that is given.
async fn full_store(keep: Option<Duration>) -> Full {
    let folder = memory_folder();
    let disk = Disk::register("full", bed::seed());
    disk.count_beside(&folder.path().join("ballast"));
    let mut how = How { ballast: BALLAST, keep, ..How::on(&disk) };
    how.torture.checkpoint_step = None; // more pages than there will be
    how.torture.look_again = Some(Duration::ZERO);
    let store = how.open(folder.path()).await.unwrap();
    for number in 0..BEFORE {
        store.put(put_number(number)).await.unwrap();
    }
    store.close().await; // all of it is in the file

    let (store, db) = how.open_with(&[vedetta_kv::SCHEMA], folder.path()).await.unwrap();
    let before = store.status().revision;
    let swept = store.compact(before, true).await;
    swept.unwrap(); // the sweep at the start is over, too
    if let Some(keep) = keep {
        let old = db.steady_clock().now() - 2 * i64::try_from(keep.as_millis()).unwrap();
        let note = db.write(Purpose::Store, move |tx| {
            let sql = "INSERT INTO mark (at_ms, revision) VALUES (?1, ?2)";
            tx.execute(sql, [old, before.next().0.cast_signed()])?;
            Ok::<_, Stop<KvError>>(())
        });
        note.await.unwrap();
    }
    let limit = disk.used() + (32 << 10);
    disk.limit(Some(limit));
    let stored = fill(&store, BEFORE).await;
    assert!(stored > BEFORE);
    Full { folder, disk, how, store, limit, stored }
}

impl Full {
    /// Deletes the first hundred, and compacts. What a delete of so many keys writes is more than a put does.
    async fn make_room(&self) {
        let full_at = self.store.status().revision;
        let deleted = self
            .store
            .delete(Delete { range: KeyRange::prefix("k/000"), previous: false })
            .await
            .expect("a delete runs on a full disk");
        assert_eq!(deleted.count, 100);
        assert!(!self.folder.path().join("ballast").exists(), "it was given up for the delete");
        let compacted = self.store.compact(full_at.next(), true).await;
        compacted.expect("compaction runs on a full disk");
        assert_eq!(self.store.status().compacted, Revision(full_at.0 + 1));
    }

    /// Puts, until it works: the store looks at the disk now and then.
    async fn put(&self) {
        let deadline = Instant::now() + PATIENCE;
        while let Err(error) = self.store.put(Put::new("after", "it")).await {
            assert!(matches!(error, KvError::Lost(CommitError::Full)), "{error}");
            let used = self.disk.used();
            assert!(
                Instant::now() < deadline,
                "there is room beside {used} bytes, and still: {error}"
            );
            sleep(Duration::from_millis(1)).await;
        }
        let ballast = std::fs::metadata(self.folder.path().join("ballast"));
        assert_eq!(ballast.unwrap().len(), BALLAST, "whole again");
    }

    /// What should be there is there.
    async fn check(self, deleted: usize) {
        self.store.close().await;
        let store = How::default().open(self.folder.path()).await.unwrap();
        let kept = store.range(vedetta_kv::Range::new(KeyRange::prefix("k/"))).await.unwrap();
        assert_eq!(kept.count, self.stored as usize - deleted);
        store.close().await;
        let file = self.folder.path().join(bed::FILE);
        assert_eq!(vedetta_db::damage(&file).unwrap(), [""; 0]);
    }
}

#[tokio::test]
async fn on_a_full_disk_deletes_and_compaction_run_on_the_ballast_and_puts_when_space_returns() {
    let full = full_store(None).await;
    full.make_room().await;
    full.disk.limit(None);
    full.put().await;
    full.check(100).await;
}

#[tokio::test]
async fn on_a_full_disk_puts_work_again_in_the_room_that_deletes_and_compaction_made() {
    let full = full_store(None).await;
    full.make_room().await;
    // The delete made the file longer by its own few pages, and a file does not shrink; and a log needs a few pages
    // to begin in. The hundred pages that were freed are not among these.
    let limit = full.limit + (64 << 10);
    full.disk.limit(Some(limit));
    full.put().await;
    assert!(full.disk.used() <= limit);
    full.check(100).await;
}

/// A table more than the file has.
const MORE: Schema = Schema { component: "more", steps: &["CREATE TABLE more (n INTEGER)"] };

/// Closes a full store and opens it again on a disk without room for a byte more.
async fn reopened_without_room(full: Full, schemas: &'static [Schema]) -> Full {
    let Full { folder, disk, how, store, stored, .. } = full;
    disk.limit(None); // all of the log is to go into the file
    store.close().await;
    let limit = disk.used();
    disk.limit(Some(limit));
    let (store, _) = how.open_with(schemas, folder.path()).await.unwrap();
    Full { folder, disk, how, store, limit, stored }
}

#[tokio::test]
async fn a_store_that_is_opened_on_a_full_disk_keeps_its_ballast_for_deletes_and_compaction() {
    let full = full_store(None).await;
    let ballast = full.folder.path().join("ballast");
    let number = || std::fs::metadata(&ballast).unwrap().ino();
    let before = number();
    let full = reopened_without_room(full, &[vedetta_kv::SCHEMA]).await;
    assert_eq!(number(), before, "there was nothing to write");
    full.make_room().await;
    full.check(100).await;
}

#[tokio::test]
async fn a_table_that_is_missing_is_made_in_the_room_of_the_ballast_on_a_full_disk() {
    let full = full_store(None).await;
    let full = reopened_without_room(full, &[vedetta_kv::SCHEMA, MORE]).await;
    full.make_room().await;
    full.check(100).await;
}

/// The policy has its turn every ten seconds.
#[tokio::test]
async fn on_a_full_disk_the_policy_still_forgets_what_is_too_old() {
    let full = full_store(Some(KEPT)).await;
    let old = Revision(u64::from(BEFORE) + 2);
    let deadline = Instant::now() + PATIENCE;
    while full.store.status().compacted < old {
        assert!(Instant::now() < deadline, "nothing is forgotten");
        sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(full.store.status().compacted, old);
    full.check(0).await;
}
