//! Power cuts: a store under load on a disk which keeps of unsynced writes whatever it likes, and
//! nothing acknowledged or shown is missing afterwards; of lazy writes beside it only the last. Planted
//! bugs must be noticed.
//!
//! `TORTURE_IMAGES` for more images, `TORTURE_SEED` for others.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::future::{Future as _, poll_fn};
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::timeout;
use torture::bed::{self, How, memory_folder};
use torture::entries::{self, Entries};
use torture::note::Note;
use torture::story::{Away, PATIENCE, Story};
use torture::vfs::{Disk, Image};
use torture::workload::{Failing, Notes, Workload};
use vedetta_db::{Db, Purpose, Schema, Stop, Tx};
use vedetta_jobs::sqlite::SqliteJobs;
use vedetta_jobs::{Job, JobId, Jobs as _, Ledger as _, Monitor as _, NewJob};
use vedetta_kv::{Put, Store};

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

/// Who writes beside a writer. A write that finds itself alone, with nothing lazy before it, is committed in another
/// way: as one statement without a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Company {
    None,
    Writers,
    /// Lazy ones, too.
    Lazy,
}

impl Company {
    /// Lazy writers are left out for every second seed, and for half of these all others.
    fn of(seed: u64, bug: Bug) -> Self {
        match seed % 4 {
            _ if bug == Bug::SharedLazily => Self::Lazy,
            1 => Self::None,
            3 => Self::Writers,
            _ => Self::Lazy,
        }
    }
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
    /// Images in which watchers had something left to see.
    resumed: usize,
    first: Option<String>,
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} images of {} power cuts in {} operations, {} acknowledged writes, {} revisions seen; \
             {} images in which watchers went on; {} images without some lazy writes; \
             {} bad images, {} of them without something acknowledged",
            self.images,
            self.cuts,
            self.operations,
            self.acknowledged,
            self.seen,
            self.resumed,
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

    let company = Company::of(seed, bug);
    let told = Arc::new(Mutex::new(Told::default()));
    let beside = Arc::new(Mutex::new(Entries::default()));
    let notes: Notes = {
        let (told, beside) = (Arc::clone(&told), Arc::clone(&beside));
        Arc::new(move |note| {
            beside.lock().note(&note);
            told.lock().note(note);
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
            writers: if company == Company::None { 1 } else { 5 },
            writes: if company == Company::None { 30 } else { 9 },
            short_leases: false,
            failing: Failing::Ends,
        };
        let resume = told.lock().resume(seed ^ start);
        // Longer than the others, so that there are commits of lazy writes alone.
        let lazy_writers = if company == Company::Lazy { 3 } else { 0 };
        let lazy = entries::write(&db, &beside, seed ^ start, lazy_writers, 20);
        tokio::join!(workload.run(&store, &resume, &notes), lazy);
        if start == 1 && cut.is_some() {
            disk.crash_now(); // without the last checkpoint
        }
        store.close().await;
        if !disk.crashed() {
            beside.lock().closed();
        }
    }
    let Told { past, seen, .. } = told.lock().clone();
    let entries = beside.lock().clone();
    Run { disk, past, entries, seen }
}

/// What is known of a run, from those who are still there to tell.
#[derive(Clone, Default)]
struct Told {
    past: Story,
    seen: usize,
    away: Away,
}

impl Told {
    /// Where the watchers go on, one of them not for long.
    fn resume(&mut self, seed: u64) -> Vec<u64> {
        self.away = Away::by(seed);
        self.past.resume()
    }

    fn note(&mut self, note: Note) {
        if self.away.misses(&note) {
            return;
        }
        self.seen += usize::from(matches!(note, Note::Seen { .. }));
        self.past.note(note);
    }
}

/// What is found of an image.
#[derive(Default)]
struct Judged {
    wrong: Vec<String>,
    /// How many lazy writes are not there.
    undone: usize,
    /// How many revisions the watchers saw that went on.
    resumed: usize,
}

impl Judged {
    fn wrong(why: impl Into<String>) -> Self {
        Self { wrong: vec![why.into()], ..Self::default() }
    }
}

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
    if go_on && judged.wrong.is_empty() {
        judged = reopen(folder.path(), &mut past, entries, false).await;
    }
    judged
}

/// Opens, checks and perhaps writes some more.
async fn reopen(folder: &Path, past: &mut Story, entries: &Entries, go_on: bool) -> Judged {
    let (store, db) = match How::default().open_with(SCHEMAS, folder).await {
        Ok(opened) => opened,
        Err(error) => return Judged::wrong(format!("it does not open: {error}")),
    };
    let mut wrong = past.check(&store).await;
    let resumed = past.resumed().into_iter().sum();
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
        return Judged { wrong, undone, resumed };
    }
    store.close().await;
    match vedetta_db::damage(&folder.join(bed::FILE)) {
        Ok(damage) => wrong.extend(damage),
        Err(error) => wrong.push(error.to_string()),
    }
    Judged { wrong, undone, resumed }
}

/// Cuts the power often enough for `images` images, or until a planted bug is found.
async fn power_cuts(bug: Bug, images: usize) -> Tally {
    let seed = bed::seed();
    let mut operations = BTreeMap::new();
    for seed in seed..seed + 4 {
        let whole = run(seed, bug, None).await.disk.operations();
        operations.insert(Company::of(seed, bug), whole);
    }
    let mut tally = Tally { operations: operations.values().sum(), ..Tally::default() };
    for seed in seed.. {
        if tally.images >= images || (bug != Bug::None && tally.lost > 0) {
            break;
        }
        let whole = operations[&Company::of(seed, bug)];
        let cut = fastrand::Rng::with_seed(seed).u64(1..=whole);
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
            let judged = judged.unwrap_or_else(|_| Judged::wrong("it hangs"));
            let Judged { wrong, undone, resumed } = judged;
            tally.resumed += usize::from(resumed > 0);
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
    let watched = tally.seen > tally.cuts && tally.resumed > tally.images / 10;
    assert!(watched, "too little was watched: {tally}");
    assert!(tally.undone > 0, "nothing was lazy: {tally}");
}

/// Keeps the writer busy, asks for 50 puts, and lets it go.
async fn put_at_once(store: &Store, db: &Db) {
    let (started, has_started) = oneshot::channel();
    let (release, released) = mpsc::channel::<()>();
    let busy = tokio::spawn({
        let db = db.clone();
        async move {
            let work = move |_: &Tx<'_>| {
                let _ = started.send(());
                let _ = released.recv();
                Err::<(), _>(Stop::Refused(()))
            };
            db.write(Purpose::Store, work).await
        }
    });
    has_started.await.unwrap();
    let mut waiting = Vec::new();
    for n in 0..50 {
        let (store, put) = (store.clone(), Put::new(format!("k/{n}"), "all"));
        let mut asked = Box::pin(async move { store.put(put).await });
        let first = poll_fn(|context| Poll::Ready(asked.as_mut().poll(context))).await;
        assert!(first.is_pending(), "it was to wait in line");
        waiting.push(asked);
    }
    drop(release);
    for asked in waiting {
        asked.await.unwrap();
    }
    assert!(busy.await.unwrap().is_err(), "it was refused");
}

#[tokio::test]
async fn all_puts_that_wait_share_one_fsync() {
    let folder = memory_folder();
    let disk = Disk::register("syncs", bed::seed());
    let mut how = How::on(&disk);
    how.torture.checkpoint_step = None; // for a checkpoint syncs the log, too
    let (store, db) = how.open_with(SCHEMAS, folder.path()).await.unwrap();
    store.put(Put::new("k", "the first begins the log")).await.unwrap();
    let before = disk.log_syncs();
    for n in 0..50 {
        store.put(Put::new(format!("k/{n}"), "one by one")).await.unwrap();
    }
    assert_eq!(disk.log_syncs() - before, 50, "each that is alone has its own");
    let before = disk.log_syncs();
    timeout(PATIENCE, put_at_once(&store, &db)).await.expect("it does not hang");
    assert_eq!(disk.log_syncs() - before, 1);
    store.close().await;
}

/// A commit writes to the log only: what moves that into the file runs on a thread of its own.
#[tokio::test]
async fn while_it_serves_only_the_checkpoint_thread_writes_to_the_file_itself() {
    let folder = memory_folder();
    let disk = Disk::register("checkpoints", bed::seed());
    let (store, _) = How::on(&disk).open_with(SCHEMAS, folder.path()).await.unwrap();
    let opening = disk.take_writers();
    assert!(!opening.is_empty(), "somebody made the file");
    // Each is past the limit of the log, which is 36 pages here.
    for n in 0_u8..40 {
        store.put(Put::new("k", vec![n; 200_000])).await.unwrap();
    }
    assert_eq!(disk.take_writers(), ["vedetta-checkpoint".to_owned()].into());
    store.close().await;
}

/// Only past the limit of the log, which is 3,000 pages, would a commit wait for the end of the checkpoint: such a log has
/// to start over.
#[tokio::test]
async fn puts_are_acknowledged_while_a_checkpoint_cannot_go_on() {
    const PUTS_TO_A_STEP: usize = 25; // of 50 pages each, and a step is 1,000
    let folder = memory_folder();
    let disk = Disk::register("held", bed::seed());
    let mut how = How::on(&disk);
    how.torture.checkpoint_step = None;
    let (store, _) = how.open_with(SCHEMAS, folder.path()).await.unwrap();
    disk.take_writers();
    let put = async || {
        let put = store.put(Put::new("k", vec![7; 200_000]));
        timeout(PATIENCE, put).await.expect("a commit does not wait for the checkpoint").unwrap();
    };
    let held = disk.hold_database();
    for _ in 0..PUTS_TO_A_STEP {
        put().await;
    }
    let checkpoint_waits = async {
        while !disk.take_writers().contains("vedetta-checkpoint") {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(PATIENCE, checkpoint_waits).await.expect("a checkpoint begins");
    for _ in 0..PUTS_TO_A_STEP {
        put().await;
    }
    assert_eq!(disk.take_writers(), [""; 0].map(String::from).into(), "it still waits");
    drop(held);
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
