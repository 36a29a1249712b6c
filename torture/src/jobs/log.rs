//! What a worker process says of each job, in a file of its own: written before the next step is made.
//!
//! One line each: when, what, which job, under which claim, and more.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use rustix::time::{ClockId, clock_gettime};
use vedetta_core::queue::Settled;
use vedetta_jobs::Claim;

/// Microseconds of a clock that all processes of a machine share, and nobody sets.
pub(super) fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let micros = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1_000;
    u64::try_from(micros).expect("it counts from the start of the machine")
}

/// How a handler ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// It did its work.
    Well,
    /// It failed, as its kind does.
    Failed,
    /// It asked to be tried later, as its kind does.
    Snoozed,
    /// The database let it down.
    Broken,
}

/// What the backend said to an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    Gone,
    Parked,
    Again,
    Stale,
}

impl From<Settled> for Answer {
    fn from(settled: Settled) -> Self {
        match settled {
            Settled::Gone => Self::Gone,
            Settled::Parked => Self::Parked,
            Settled::Again(_) => Self::Again,
            Settled::Stale => Self::Stale,
        }
    }
}

/// What there is to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Said {
    /// It was handed out; asked for then.
    Taken { asked: u64 },
    /// Its handler begins.
    Begun { number: u64 },
    /// It has ended.
    Ended(Ending),
    /// The backend has answered to that.
    Settled(Answer),
}

const ENDINGS: [(Ending, &str); 4] = [
    (Ending::Well, "well"),
    (Ending::Failed, "failed"),
    (Ending::Snoozed, "snoozed"),
    (Ending::Broken, "broken"),
];
const ANSWERS: [(Answer, &str); 4] = [
    (Answer::Gone, "gone"),
    (Answer::Parked, "parked"),
    (Answer::Again, "again"),
    (Answer::Stale, "stale"),
];

fn word<T: PartialEq>(words: &[(T, &'static str)], of: &T) -> &'static str {
    words.iter().find(|(thing, _)| thing == of).map_or("?", |(_, word)| word)
}

fn thing<T: Copy>(words: &[(T, &str)], word: &str) -> Option<T> {
    words.iter().find(|(_, known)| *known == word).map(|(thing, _)| *thing)
}

/// The file of a worker.
pub(super) fn path(folder: &Path, worker: usize) -> PathBuf {
    folder.join(format!("worker-{worker}.log"))
}

/// Where a worker says it.
#[derive(Debug)]
pub(super) struct Log(File);

impl Log {
    pub(super) fn open(path: &Path) -> std::io::Result<Self> {
        Ok(Self(File::options().append(true).create(true).open(path)?))
    }

    pub(super) fn say(&self, claim: Claim, said: Said) {
        let (what, more) = match said {
            Said::Taken { asked } => ("taken", asked.to_string()),
            Said::Begun { number } => ("begun", number.to_string()),
            Said::Ended(ending) => ("ended", word(&ENDINGS, &ending).to_owned()),
            Said::Settled(answer) => ("settled", word(&ANSWERS, &answer).to_owned()),
        };
        self.write(&format!("{} {what} {} {} {more}\n", now(), claim.id, claim.token));
    }

    /// The machine did not let this process run since then.
    pub(super) fn stalled(&self, since: u64) {
        self.write(&format!("{} stalled 0 0 {since}\n", now()));
    }

    /// So many pulls of a stream were opened by now while another was open.
    pub(super) fn overlapping(&self, pulls: u64) {
        self.write(&format!("{} overlapping 0 0 {pulls}\n", now()));
    }

    /// In one piece, so that a line is there or it is not.
    fn write(&self, line: &str) {
        (&self.0).write_all(line.as_bytes()).expect("a log can be written");
    }
}

/// A job in the hands of a worker, from take to end.
#[derive(Debug, Clone)]
pub(super) struct Run {
    pub worker: usize,
    pub claim: Claim,
    /// When the take was asked for that brought it.
    pub from: u64,
    pub number: u64,
    /// When its handler began: more than once is wrong.
    pub begun: Vec<u64>,
    pub ended: Option<Ending>,
    pub settled: Option<(u64, Answer)>,
}

/// All that a worker said.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// Of the jobs that it began.
    pub runs: Vec<Run>,
    /// From when to when the machine did not let it run.
    pub stalls: Vec<(u64, u64)>,
    /// Pulls that it opened while another was open.
    pub overlapping: u64,
}

/// Reads the file of a worker; what is wrong with it if it cannot be read.
pub(super) fn read(folder: &Path, worker: usize) -> Result<Told, String> {
    let path = path(folder, worker);
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        // It was killed before it said anything.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Told::default()),
        Err(error) => return Err(format!("{}: {error}", path.display())),
    };
    let mut told = Told::default();
    let mut claims = HashMap::new();
    for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
        take_in(&mut told, &mut claims, worker, line)
            .ok_or_else(|| format!("{}: {line:?} is no line of a log", path.display()))?;
    }
    told.runs.retain(|run| !run.begun.is_empty() || run.settled.is_some());
    Ok(told)
}

/// By claim the runs under it: a stream counts deliveries from an earlier one on after it was killed.
type Claims = HashMap<Claim, Vec<usize>>;

fn take_in(told: &mut Told, claims: &mut Claims, worker: usize, line: &str) -> Option<()> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [at, what, id, token, more] = words[..] else { return None };
    let at: u64 = at.parse().ok()?;
    let claim = Claim { id: id.parse().ok()?, token: token.parse().ok()? };
    match what {
        "overlapping" => told.overlapping = more.parse().ok()?,
        "stalled" => told.stalls.push((more.parse().ok()?, at)),
        "taken" => {
            claims.entry(claim).or_default().push(told.runs.len());
            told.runs.push(Run {
                worker,
                claim,
                from: more.parse().ok()?,
                number: u64::MAX,
                begun: Vec::new(),
                ended: None,
                settled: None,
            });
        }
        _ => {
            let under = claims.get(&claim)?;
            let last = *under.last()?;
            let awaits = |run: &Run| match what {
                "begun" => run.begun.is_empty(),
                "ended" => !run.begun.is_empty() && run.ended.is_none(),
                "settled" => run.ended.is_some() && run.settled.is_none(),
                _ => false,
            };
            let found = under.iter().copied().find(|at| awaits(&told.runs[*at]));
            let run = &mut told.runs[found.unwrap_or(last)];
            match what {
                "begun" => {
                    run.number = more.parse().ok()?;
                    run.begun.push(at);
                }
                "ended" => run.ended = Some(thing(&ENDINGS, more)?),
                "settled" => run.settled = Some((at, thing(&ANSWERS, more)?)),
                _ => return None,
            }
        }
    }
    Some(())
}
