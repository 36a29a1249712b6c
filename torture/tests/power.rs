//! Power cuts: a store under load on a disk which keeps of unsynced writes whatever it likes, and
//! nothing acknowledged or shown is missing afterwards; of lazy writes beside it only the last. Planted
//! bugs must be noticed.
//!
//! `TORTURE_IMAGES` for more images, `TORTURE_SEED` for others.

use std::fmt;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::time::timeout;
use torture::bed::{self, How, memory_folder};
use torture::entries::{self, Entries};
use torture::note::Note;
use torture::story::{PATIENCE, Story};
use torture::vfs::{Disk, Image};
use torture::workload::{Failing, Notes, Workload};
use vedetta_db::Schema;
use vedetta_jobs::sqlite::SqliteJobs;
use vedetta_jobs::{Job, JobId, Jobs as _, Ledger as _, Monitor as _, NewJob};

const SCHEMAS: &[Schema] = &[vedetta_kv::SCHEMA, entries::SCHEMA];
const IMAGES_PER_CUT: usize = 8;

/// A bug to plant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bug {
    None,
    AnswerEarly,
    NoFsync,
    LyingDisk,
    SharedLazily,
}

/// Images so far, and what was wrong with them.
#[derive(Default)]
struct Tally {
    cuts: usize,
    images: usize,
    acknowledged: usize,
    seen: usize,
    operations: u64,
    bad: usize,
    /// Of these, how many lack something acknowledged.
    lost: usize,
    /// Images that lack what was lazily written.
    undone: usize,
    first: Option<String>,
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} images of {} power cuts in {} operations, {} acknowledged writes, {} revisions seen; \
             {} images without some lazy writes; {} bad images, {} of them without something acknowledged",
            self.images,
            self.cuts,
            self.operations,
            self.acknowledged,
            self.seen,
            self.undone,
            self.bad,
            self.lost
        )?;
        self.first.as_ref().map_or(Ok(()), |first| write!(f, "\n{first}"))
    }
}

/// A run up to the power cut.
struct Run {
    disk: Disk,
    past: Story,
    entries: Entries,
    seen: usize,
}

/// Runs a store until the power goes at operation `cut`, or when all is written.
async fn run(seed: u64, bug: Bug, cut: Option<u64>) -> Run {
    let folder = memory_folder();
    let disk = Disk::register("power", seed);
    disk.lie(bug == Bug::LyingDisk);
    if let Some(operation) = cut {
        disk.crash_at(operation);
    }
    let mut how = How::on(&disk);
    how.torture.answer_early = bug == Bug::AnswerEarly;
    how.torture.skip_fsync = bug == Bug::NoFsync;
    how.torture.share_lazily = bug == Bug::SharedLazily;

    let told = Arc::new(Mutex::new((Story::default(), 0)));
    let beside = Arc::new(Mutex::new(Entries::default()));
    let notes: Notes = {
        let (told, beside) = (Arc::clone(&told), Arc::clone(&beside));
        Arc::new(move |note| {
            beside.lock().note(&note);
            let mut told = told.lock();
            told.1 += usize::from(matches!(note, Note::Seen { .. }));
            told.0.note(note);
        })
    };
    // Twice, so that a store which starts on what another left is cut, too.
    for start in 0..2 {
        let (store, db) = match how.open_with(SCHEMAS, folder.path()).await {
            Ok(opened) => opened,
            // A planted bug may have spoilt it before the power went.
            Err(_) if disk.crashed() || bug != Bug::None => {
                disk.crash_now();
                break;
            }
            Err(error) => panic!("TORTURE_SEED={seed}: with power it does not open: {error}"),
        };
        let workload = Workload {
            seed: seed ^ start,
            first_id: (start + 1) << 24,
            writers: 5,
            writes: 9,
            short_leases: false,
            failing: Failing::Ends,
        };
        let resume = told.lock().0.resume();
        // Longer than the others, so that there are commits of lazy writes alone.
        let lazy = entries::write(&db, &beside, seed ^ start, 3, 20);
        tokio::join!(workload.run(&store, &resume, &notes), lazy);
        if start == 1 && cut.is_some() {
            disk.crash_now(); // without the last checkpoint
        }
        store.close().await;
        if !disk.crashed() {
            beside.lock().closed();
        }
    }
    let (past, revisions) = told.lock().clone();
    let entries = beside.lock().clone();
    Run { disk, past, entries, seen: revisions }
}

/// What is wrong, and how many lazy writes are not there.
type Judged = (Vec<String>, usize);

/// What is wrong with an image, or with it and a log which had its `room` from the start: there a lost
/// write leaves zeros.
async fn judge(image: &Image, past: &Story, entries: &Entries, go_on: bool, room: bool) -> Judged {
    let folder = memory_folder();
    image.write_to(folder.path()).expect("an image can be written");
    let log = folder.path().join(format!("{}-wal", bed::FILE));
    if room && log.exists() {
        let log = File::options().write(true).open(log).unwrap();
        log.set_len(log.metadata().unwrap().len().max(1 << 20)).unwrap();
    }
    let mut past = past.clone();
    let mut judged = reopen(folder.path(), &mut past, entries, go_on).await;
    if go_on && judged.0.is_empty() {
        judged = reopen(folder.path(), &mut past, entries, false).await;
    }
    judged
}

/// Opens, checks and perhaps writes some more.
async fn reopen(folder: &Path, past: &mut Story, entries: &Entries, go_on: bool) -> Judged {
    let (store, db) = match How::default().open_with(SCHEMAS, folder).await {
        Ok(opened) => opened,
        Err(error) => return (vec![format!("it does not open: {error}")], 0),
    };
    let mut wrong = past.check(&store).await;
    let (also, undone) = entries.check(&db).await;
    wrong.extend(also);
    if go_on {
        let told = Arc::new(Mutex::new(Vec::new()));
        let also = Arc::clone(&told);
        let notes: Notes = Arc::new(move |note| also.lock().push(note));
        let workload = Workload {
            seed: 1,
            first_id: 9 << 24,
            writers: 2,
            writes: 4,
            short_leases: false,
            failing: Failing::Wrong,
        };
        workload.run(&store, &past.resume(), &notes).await;
        store.close().await;
        told.lock().drain(..).for_each(|note| past.note(note));
        return (wrong, undone);
    }
    store.close().await;
    match vedetta_db::damage(&folder.join(bed::FILE)) {
        Ok(damage) => wrong.extend(damage),
        Err(error) => wrong.push(error.to_string()),
    }
    (wrong, undone)
}

/// Cuts the power often enough for `images` images, or until a planted bug is found.
async fn power_cuts(bug: Bug, images: usize) -> Tally {
    let seed = bed::seed();
    let operations = run(seed, bug, None).await.disk.operations();
    let mut tally = Tally { operations, ..Tally::default() };
    for seed in seed.. {
        if tally.images >= images || (bug != Bug::None && tally.lost > 0) {
            break;
        }
        let cut = fastrand::Rng::with_seed(seed).u64(1..=operations);
        let cut_short = timeout(PATIENCE, run(seed, bug, Some(cut))).await;
        let Run { disk, past, entries, seen } =
            cut_short.expect("a store without power does not hang");
        assert!(disk.crashed());
        tally.cuts += 1;
        tally.acknowledged += past.acknowledged();
        tally.seen += seen;
        for (number, image) in disk.images(seed, IMAGES_PER_CUT).enumerate() {
            tally.images += 1;
            let judging = judge(&image, &past, &entries, number < 2, number % 2 == 1);
            let judged = timeout(PATIENCE, judging).await;
            let (wrong, undone) = judged.unwrap_or_else(|_| (vec!["it hangs".to_owned()], 0));
            tally.undone += usize::from(undone > 0);
            if !wrong.is_empty() {
                tally.bad += 1;
                tally.lost += usize::from(wrong.iter().any(|line| line.contains("acknowledged")));
                tally.first.get_or_insert_with(|| {
                    let kept = if bug == Bug::None { keep(&image) } else { String::new() };
                    format!(
                        "TORTURE_SEED={seed}, {bug:?}, power cut at {cut}, image {number} ({image}){kept}:\n{}",
                        wrong.join("\n")
                    )
                });
            }
        }
    }
    eprintln!("{bug:?}: {tally}");
    tally
}

/// Writes an image to where it stays.
fn keep(image: &Image) -> String {
    let kept = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap().keep();
    image.write_to(&kept).unwrap();
    format!(", kept in {}", kept.display())
}

async fn is_noticed(bug: Bug) {
    let tally = power_cuts(bug, 160).await;
    assert!(tally.lost > 0, "{bug:?} went unnoticed: {tally}");
}

#[tokio::test]
async fn a_power_cut_loses_nothing_acknowledged_or_shown() {
    let images = usize::try_from(bed::number("TORTURE_IMAGES", 2_000)).unwrap();
    let tally = power_cuts(Bug::None, images).await;
    assert!(tally.bad == 0, "{tally}");
    assert!(tally.images >= images && tally.acknowledged > tally.cuts, "{tally}");
    assert!(tally.undone > 0, "nothing was lazy: {tally}");
}

/// What a commit waits for is its own fsync: what moves the log into the file runs on a thread of its own.
#[tokio::test]
async fn while_it_serves_only_the_checkpoint_thread_writes_to_the_file_itself() {
    let folder = memory_folder();
    let disk = Disk::register("checkpoints", bed::seed());
    let (store, _) = How::on(&disk).open_with(SCHEMAS, folder.path()).await.unwrap();
    let opening = disk.take_writers();
    assert!(!opening.is_empty(), "somebody made the file");
    // Each is past the limit of the log, which is 36 pages here.
    for n in 0_u8..40 {
        store.put(vedetta_kv::Put::new("k", vec![n; 200_000])).await.unwrap();
    }
    assert_eq!(disk.take_writers(), ["vedetta-checkpoint".to_owned()].into());
    store.close().await;
}

/// Whoever asked for it was told the number of its record.
#[tokio::test]
async fn a_streams_job_that_was_asked_for_keeps_its_number_when_the_power_is_cut() {
    const BESIDE: &[Schema] = &[vedetta_kv::SCHEMA, vedetta_jobs::sqlite::SCHEMA];
    let folder = memory_folder();
    let disk = Disk::register("asked-for", bed::seed());
    let (store, db) = How::on(&disk).open_with(BESIDE, folder.path()).await.unwrap();
    let jobs = SqliteJobs::open(db).await.unwrap();
    let here = jobs.enqueue(&[NewJob::new("film")]).await.unwrap()[0].id;
    let here = jobs.job(here).await.unwrap().unwrap();
    let elsewhere = "nats MEDIA/transcode";
    let asked_for = Job { id: JobId(7), connection: elsewhere.into(), ..here };
    assert_eq!(jobs.tell(&[asked_for]).await.unwrap(), [true]);
    let number = jobs.records_of(elsewhere, &[JobId(7)]).await.unwrap();
    for image in disk.images(bed::seed(), 20) {
        let left = memory_folder();
        image.write_to(left.path()).unwrap();
        let (store, db) = How::default().open_with(BESIDE, left.path()).await.unwrap();
        let jobs = SqliteJobs::open(db).await.unwrap();
        let found = jobs.records_of(elsewhere, &[JobId(7)]).await.unwrap();
        assert_eq!(found, number, "{image}");
        store.close().await;
    }
    store.close().await;
}

#[tokio::test]
async fn answering_before_the_commit_is_noticed() {
    is_noticed(Bug::AnswerEarly).await;
}

#[tokio::test]
async fn committing_without_an_fsync_is_noticed() {
    is_noticed(Bug::NoFsync).await;
}

#[tokio::test]
async fn a_disk_that_lies_about_fsync_is_noticed() {
    is_noticed(Bug::LyingDisk).await;
}

#[tokio::test]
async fn a_write_that_is_lazy_because_another_is_is_noticed() {
    is_noticed(Bug::SharedLazily).await;
}
