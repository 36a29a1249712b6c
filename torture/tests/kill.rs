//! Kill loop: a process with a store under load dies by SIGKILL, again and again, and nothing it had
//! promised is missing afterwards.
//!
//! `TORTURE_CYCLES` for more cycles, `TORTURE_SEED` for others.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use torture::bed::{self, How};
use torture::note::Note;
use torture::story::{Away, Story, WATCHED};
use vedetta_db::DataFolder;

const CYCLES: u64 = 120;
/// Cycles on one folder, before another is begun.
const CYCLES_PER_FOLDER: u64 = 20;
/// Of [`CYCLES`], in how many a child must die: a loop whose children all end in their time shows nothing.
const KILLED: u64 = 100;

const SIGKILL: i32 = 9;

const MIGRATION: &str = "db.migration";

/// Where a child may die by itself, and how many passings there are to choose from.
const FAILPOINTS: [(&str, u64); 10] = [
    ("db.unit", 150),
    ("db.before_commit", 60),
    ("db.committed", 60),
    ("db.published", 60),
    ("db.checkpoint", 8),
    ("db.checkpointed", 8),
    (MIGRATION, 1),
    ("kv.sweep", 5),
    ("kv.compact", 4),
    ("kv.expired", 4),
];

#[derive(Default, Debug)]
struct Tally {
    cycles: u64,
    /// By their parent or at a failpoint.
    killed: u64,
    acknowledged: usize,
    seen: usize,
    /// Revisions that each watcher saw, resumed where the dead child had left it.
    resumed: [usize; WATCHED.len()],
    /// How often a child died at each.
    at_failpoints: BTreeMap<&'static str, u64>,
    compacted: usize,
}

/// How a child is to end.
#[derive(Debug)]
struct End {
    failpoint: Option<(&'static str, u64)>,
    /// After so many notes its parent kills it.
    notes: u64,
    /// And after this much more, so that the moment has nothing to do with the notes.
    delay: Duration,
}

impl End {
    /// In a new folder the migration may be where it dies; later nobody passes there. Of the others, those
    /// where the fewest have died come first.
    fn choose(rng: &mut fastrand::Rng, new: bool, died: &BTreeMap<&str, u64>) -> Self {
        let times = |name| died.get(name).copied().unwrap_or(0);
        let failpoint = (rng.bool() || new && times(MIGRATION) == 0).then(|| {
            let mut names = FAILPOINTS;
            rng.shuffle(&mut names);
            let passed = |(name, _): &&(&str, u64)| new == (*name == MIGRATION);
            let least = names.iter().filter(passed).min_by_key(|(name, _)| times(name));
            let (name, passings) = *least.expect("there are some");
            (name, rng.u64(1..=passings))
        });
        let notes = if failpoint.is_some() { 900 } else { rng.u64(..600) };
        Self { failpoint, notes, delay: Duration::from_micros(rng.u64(..4_000)) }
    }
}

/// How a child has ended.
#[derive(Debug, PartialEq, Eq)]
enum Ended {
    /// Its parent killed it.
    Killed,
    /// It killed itself there.
    AtFailpoint(&'static str),
    InTime,
}

impl Ended {
    /// What the system says of a child that its parent had `killed` or not. Whatever else ends one is a violation.
    fn of(
        status: ExitStatus,
        killed: bool,
        failpoint: Option<&'static str>,
    ) -> Result<Self, String> {
        match (status.signal(), failpoint) {
            (Some(SIGKILL), _) if killed => Ok(Self::Killed),
            (Some(SIGKILL), Some(name)) => Ok(Self::AtFailpoint(name)),
            _ if status.success() => Ok(Self::InTime),
            _ => Err(format!("the child ended by itself: {status}")),
        }
    }
}

/// Runs a child until its end and lets the story take in what it said. With it comes what is wrong with that end.
fn run_child(
    folder: &Path,
    seed: u64,
    cycle: u64,
    end: &End,
    past: &mut Story,
) -> (Tally, Option<String>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kill-child"));
    command.arg(folder).arg(seed.to_string()).arg(((cycle + 1) << 24).to_string());
    command.args(past.resume().iter().map(u64::to_string));
    if let Some((name, passing)) = end.failpoint {
        command.env("VEDETTA_FAILPOINT", format!("{name}:{passing}"));
    }
    let mut child = command.stdout(Stdio::piped()).spawn().expect("the child starts");
    let mut lines = BufReader::new(child.stdout.take().expect("it is piped"));
    let (mut tally, mut notes, mut killed) = (Tally::default(), 0, false);
    let mut away = Away::by(seed);
    let mut line = String::new();
    loop {
        if notes >= end.notes && !killed {
            std::thread::sleep(end.delay);
            child.kill().expect("the child is ours");
            killed = true;
        }
        line.clear();
        // What was in the pipe when it died was said all the same; half a line was not.
        if lines.read_line(&mut line).expect("it says text") == 0 || !line.ends_with('\n') {
            break;
        }
        notes += 1;
        let note: Note = line.trim_end().parse().unwrap_or_else(|error| panic!("{error}"));
        tally.acknowledged += usize::from(matches!(note, Note::Done { .. }));
        tally.seen += usize::from(matches!(note, Note::Seen { .. }));
        tally.compacted += usize::from(matches!(note, Note::Compacted { .. }));
        if !away.misses(&note) {
            past.note(note);
        }
    }
    let status = child.wait().expect("the child ends");
    let ended = Ended::of(status, killed, end.failpoint.map(|(name, _)| name));
    tally.killed = u64::from(matches!(ended, Ok(Ended::Killed | Ended::AtFailpoint(_))));
    if let Ok(Ended::AtFailpoint(name)) = ended {
        tally.at_failpoints.insert(name, 1);
    }
    (tally, ended.err())
}

#[tokio::test]
async fn a_killed_store_lost_nothing_it_acknowledged_and_shows_no_transaction_in_part() {
    let (seed, cycles) = (bed::seed(), bed::number("TORTURE_CYCLES", CYCLES));
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut total = Tally::default();
    let mut past = Story::default();
    let mut folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    eprintln!("seed {seed}, {cycles} cycles");

    for cycle in 0..cycles {
        let new = cycle % CYCLES_PER_FOLDER == 0;
        if new {
            folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            past = Story::default();
        }
        let end = End::choose(&mut rng, new, &total.at_failpoints);
        let child_seed = rng.u64(..);
        let (tally, ended_badly) = run_child(folder.path(), child_seed, cycle, &end, &mut past);
        total.cycles += 1;
        total.killed += tally.killed;
        total.acknowledged += tally.acknowledged;
        total.seen += tally.seen;
        for (name, times) in tally.at_failpoints {
            *total.at_failpoints.entry(name).or_default() += times;
        }
        total.compacted += tally.compacted;

        let mut wrong = reopen(folder.path(), &mut past).await;
        wrong.extend(ended_badly);
        total.resumed.iter_mut().zip(past.resumed()).for_each(|(sum, seen)| *sum += seen);
        if !wrong.is_empty() {
            folder.disable_cleanup(true);
            panic!(
                "TORTURE_SEED={seed}, cycle {cycle}, {end:?}: {} violations; the folder is kept in {}\n{}",
                wrong.len(),
                folder.path().display(),
                wrong.join("\n")
            );
        }
    }
    eprintln!("{total:?}");
    assert!(total.acknowledged > 0 && total.seen > 0, "{total:?}");
    // Fewer cycles, asked for, may not come everywhere.
    if cycles >= CYCLES {
        assert!(total.killed >= KILLED, "hardly a child was killed: {total:?}");
        assert!(total.resumed.iter().all(|seen| *seen > 0), "nothing was left to see: {total:?}");
        let never = FAILPOINTS.map(|(name, _)| name);
        let never = never.iter().filter(|name| !total.at_failpoints.contains_key(*name));
        assert_eq!(never.collect::<Vec<_>>(), [&""; 0], "{total:?}");
    }
}

/// Opens the store where the child left it, and lists what is wrong with it.
async fn reopen(folder: &Path, past: &mut Story) -> Vec<String> {
    let _held = match DataFolder::open(folder) {
        Ok(held) => held,
        Err(error) => return vec![bed::explain(&error)],
    };
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

#[test]
fn a_child_that_ends_by_anything_but_a_kill_or_its_time_is_a_violation() {
    const AT: &str = "db.committed";
    let exited = |code: i32| ExitStatus::from_raw(code << 8);
    let by_signal = ExitStatus::from_raw;
    for (status, killed, failpoint, ended) in [
        (by_signal(SIGKILL), true, None, Some(Ended::Killed)),
        (by_signal(SIGKILL), true, Some(AT), Some(Ended::Killed)),
        (by_signal(SIGKILL), false, Some(AT), Some(Ended::AtFailpoint(AT))),
        (exited(0), false, None, Some(Ended::InTime)),
        (exited(0), true, Some(AT), Some(Ended::InTime)), // just before its parent came
        (by_signal(SIGKILL), false, None, None),          // by somebody else
        (exited(101), false, Some(AT), None),             // a panic
        (exited(101), true, None, None),
        (by_signal(6), false, Some(AT), None), // an abort
        (by_signal(11), true, None, None),     // a segmentation fault
    ] {
        assert_eq!(Ended::of(status, killed, failpoint).ok(), ended, "{status}, {killed}");
    }
}
