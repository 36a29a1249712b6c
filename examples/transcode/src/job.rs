//! A file, as a job that is made of parts.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::future::join_all;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use vedetta::core::explain;
use vedetta::jobs::{BoxError, Outcome, Work, Worker};
use vedetta::runtime::Watch;

use crate::ladder::{Rung, ladder};
use crate::media::{Media, ProbeError, Tools};
use crate::part::{Part, PartError, run_part};

/// The kind of the jobs.
pub const KIND: &str = "transcode";

/// The payload of a job. What else is in it does not matter: the event may be somebody else's.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Asked {
    /// What to make it of.
    pub file: PathBuf,
    /// The folder to put it in, made if it is not there; beside the file if none is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outputs: Option<PathBuf>,
    /// Only these resolutions, and all if none is said; in any case none above that of the file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resolutions: Vec<Rung>,
}

/// What came of a resolution, in the result of a job.
#[derive(Debug, Serialize)]
struct Output {
    resolution: Rung,
    file: PathBuf,
    /// It was there before.
    kept: bool,
}

/// A worker of a queue that does such jobs, in so many slots or in as many as the machine has.
pub fn worker(queue: &str, tools: Tools, capacity: Option<NonZeroU32>) -> Worker {
    let tools = Arc::new(tools);
    let worker = Worker::new(queue).handler_in_parts(KIND, move |work, asked: Asked| {
        let tools = Arc::clone(&tools);
        async move { transcode(&tools, work, asked).await }
    });
    match capacity {
        Some(capacity) => worker.capacity(capacity),
        None => worker,
    }
}

/// Makes a file into what is asked for.
pub async fn transcode(tools: &Tools, work: Work, asked: Asked) -> Result<Outcome, BoxError> {
    let source = match Media::probe(tools, &asked.file).await {
        Ok(source) => Arc::new(source),
        Err(ProbeError::Unfit(why)) => return Ok(Outcome::Dead(why)),
        Err(error) => return Err(error.into()),
    };
    let is_asked = |rung: &Rung| asked.resolutions.is_empty() || asked.resolutions.contains(rung);
    let rungs: Vec<Rung> = ladder(source.height).filter(is_asked).collect();
    if rungs.is_empty() {
        let (file, height) = (asked.file.display(), source.height);
        let why = format!("{file}: of {height} lines nothing can be made that is asked for");
        return Ok(Outcome::Dead(why));
    }
    let beside = asked.file.parent().unwrap_or(Path::new("."));
    let folder = asked.outputs.as_deref().unwrap_or(beside);
    std::fs::create_dir_all(folder).map_err(|error| PartError::Folder(folder.to_owned(), error))?;

    let board = Board::new(work, &rungs);
    // Each goes on to its end, whatever becomes of the others: what it has made need not be made again.
    let parts = rungs.iter().enumerate().map(|(number, &rung)| {
        let (board, part) = (&board, Part::new(&source, rung, folder));
        async move {
            let kept = board.make(tools, number, &part).await;
            let kept = kept.inspect_err(|_| board.put(number, Standing::Failed));
            kept.map(|kept| Output { resolution: rung, file: part.output.clone(), kept })
                .map_err(|error| format!("{rung}: {}", explain(&error)))
        }
    });
    let (mut outputs, mut errors) = (Vec::new(), Vec::new());
    for ended in join_all(parts).await {
        match ended {
            Ok(output) => outputs.push(output),
            Err(error) => errors.push(error),
        }
    }
    if !errors.is_empty() {
        return Err(errors.join("\n").into());
    }
    Ok(serde_json::value::to_raw_value(&outputs)?.into())
}

/// How a part is doing.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Standing {
    Waits,
    Runs(f64),
    Done,
    Failed,
}

/// How all parts of a job are doing, for people to see.
struct Board {
    work: Work,
    parts: Mutex<Vec<(Rung, Standing)>>,
}

impl Board {
    fn new(work: Work, rungs: &[Rung]) -> Self {
        let parts = rungs.iter().map(|rung| (*rung, Standing::Waits)).collect();
        Self { work, parts: Mutex::new(parts) }
    }

    /// Makes a part when there are slots for it, unless it is there.
    async fn make(&self, tools: &Tools, number: usize, part: &Part) -> Result<bool, PartError> {
        let Part { rung, .. } = part;
        if part.is_made(tools).await? {
            self.say(*rung, "was there");
            self.put(number, Standing::Done);
            return Ok(true);
        }
        let held = self.work.slots(rung.cost).await;
        self.put(number, Standing::Runs(0.0));
        self.say(*rung, &format!("begins with {} slots", held.slots()));
        let telling = Telling { board: self, number, rung: *rung };
        run_part(tools, part, held.slots(), &telling).await?;
        self.say(*rung, "is done");
        self.put(number, Standing::Done);
        Ok(false)
    }

    fn put(&self, number: usize, standing: Standing) {
        let mut parts = self.parts.lock();
        let before = std::mem::replace(&mut parts[number].1, standing);
        if !matches!((before, standing), (Standing::Runs(_), Standing::Runs(_))) {
            self.work.message(&message(&parts));
        }
        self.work.progress(progress(&parts));
    }

    fn say(&self, rung: Rung, what: &str) {
        self.work.log(&format!("{rung} {what}"));
        tracing::info!(job = %self.work.id(), "{rung} {what}");
    }
}

/// What is done, of all that is to be paid for.
fn progress(parts: &[(Rung, Standing)]) -> f32 {
    let whole: f64 = parts.iter().map(|(rung, _)| f64::from(rung.cost)).sum();
    let done = parts.iter().map(|(rung, standing)| {
        f64::from(rung.cost)
            * match standing {
                Standing::Waits | Standing::Failed => 0.0,
                Standing::Runs(progress) => *progress,
                Standing::Done => 1.0,
            }
    });
    #[expect(clippy::cast_possible_truncation, reason = "it is between 0 and 1")]
    let progress = (done.sum::<f64>() / whole) as f32;
    progress
}

/// `runs 480p, 144p; waits 360p; done 240p`.
fn message(parts: &[(Rung, Standing)]) -> String {
    let group = |word: &str, is_in: fn(&Standing) -> bool| {
        let rungs = parts.iter().filter(|(_, standing)| is_in(standing));
        let rungs: Vec<String> = rungs.map(|(rung, _)| rung.to_string()).collect();
        (!rungs.is_empty()).then(|| format!("{word} {}", rungs.join(", ")))
    };
    let groups = [
        group("runs", |standing| matches!(standing, Standing::Runs(_))),
        group("waits", |standing| *standing == Standing::Waits),
        group("failed", |standing| *standing == Standing::Failed),
        group("done", |standing| *standing == Standing::Done),
    ];
    groups.into_iter().flatten().collect::<Vec<_>>().join("; ")
}

/// Tells the board of a part.
struct Telling<'a> {
    board: &'a Board,
    number: usize,
    rung: Rung,
}

impl Watch for Telling<'_> {
    fn progress(&self, progress: f64, _: Option<&str>) {
        self.board.put(self.number, Standing::Runs(progress));
    }

    fn log(&self, line: &str) {
        self.board.work.log(&format!("{}: {line}", self.rung));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ladder::LADDER;

    #[test]
    fn a_part_counts_as_much_as_it_costs() {
        let [.., four, two, one] = LADDER;
        let parts = [(four, Standing::Runs(0.5)), (two, Standing::Waits), (one, Standing::Done)];
        assert!((progress(&parts) - 3.0 / 7.0).abs() < 1e-6);
        assert_eq!(message(&parts), "runs 360p; waits 240p; done 144p");
        let failed = [(four, Standing::Failed), (two, Standing::Done), (one, Standing::Done)];
        assert!((progress(&failed) - 3.0 / 7.0).abs() < 1e-6);
    }

    #[test]
    fn an_event_may_say_more_than_is_read() {
        let event = r#"{"file": "/a.mov", "size": 3, "resolutions": ["144p"]}"#;
        let asked: Asked = serde_json::from_str(event).unwrap();
        assert_eq!(asked.file, Path::new("/a.mov"));
        assert_eq!(asked.resolutions, [LADDER[6]]);
        assert!(serde_json::from_str::<Asked>(r#"{"file": "a", "resolutions": ["9p"]}"#).is_err());
    }
}
