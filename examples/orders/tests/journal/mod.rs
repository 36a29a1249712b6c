//! Reads what the workers noted (see `src/journal.rs`) and what was done to them, and judges it.

use std::collections::{HashMap, VecDeque};
use std::fs::{OpenOptions, read_to_string};
use std::hash::Hash;
use std::io::Write as _;
use std::path::PathBuf;

/// What the workers did and what was done to them, in the order in which it happened.
pub(crate) struct Journal(pub(crate) PathBuf);

/// In the journal, what is done to the server is done to all workers.
pub(crate) const ALL: &str = "all";

impl Journal {
    /// Somebody is about to go down.
    pub(crate) fn down(&self, who: &str) {
        self.note(who, "down");
    }

    /// They are back.
    pub(crate) fn up(&self, who: &str) {
        self.note(who, "up");
    }

    fn note(&self, who: &str, what: &str) {
        let file = OpenOptions::new().create(true).append(true).open(&self.0);
        file.unwrap().write_all(format!("{who} {what}\n").as_bytes()).unwrap();
    }

    /// Nothing yet if nobody wrote to it.
    pub(crate) fn read(&self) -> String {
        let text = read_to_string(&self.0).unwrap_or_default();
        // Somebody may be writing.
        text[..text.rfind('\n').map_or(0, |end| end + 1)].to_owned()
    }

    /// See [`Story::cut_short`].
    pub(crate) fn some_were_killed_in_a_run(&self) {
        let text = self.read();
        assert!(
            !Story::of(&text).cut_short().is_empty(),
            "all of them were idle when they were killed"
        );
    }

    /// See [`Story::needless`].
    pub(crate) fn repeats_only_what_was_hit(&self) {
        let text = self.read();
        let story = Story::of(&text);
        assert!(!story.runs.is_empty());
        let needless = story.needless();
        let shown: Vec<String> = needless
            .iter()
            .map(|(run, next)| {
                let about = |line: &str| {
                    let words: Vec<_> = line.split(' ').collect();
                    words.len() == 2 || words[1..].starts_with(&[run.stage, run.id])
                };
                let lines = text.lines().enumerate().filter(|(_, line)| about(line));
                let lines: Vec<_> = lines.map(|(at, line)| format!("{at}: {line}")).collect();
                format!("{run:?}\n{next:?}\n{}", lines.join("\n"))
            })
            .collect();
        assert!(shown.is_empty(), "repeated without need:\n{}", shown.join("\n\n"));
    }
}

/// A run of a stage. Times are lines of the journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Run<'j> {
    pub(crate) worker: &'j str,
    pub(crate) stage: &'j str,
    pub(crate) id: &'j str,
    version: &'j str,
    /// When its worker asked for the record: it was not taken before.
    asked: usize,
    begin: usize,
    /// If it came to an end.
    end: Option<usize>,
    has_failed: bool,
    /// What the database says became of the record with it.
    outcome: Option<&'j str>,
}

impl Run<'_> {
    /// It was saved, or settled that there is nothing to save.
    pub(crate) fn is_settled(&self) -> bool {
        matches!(self.outcome, Some("gone" | "again" | "parked"))
    }

    pub(crate) fn is_over(&self) -> bool {
        self.end.is_some()
    }
}

/// Somebody was away.
struct Hit<'j> {
    who: &'j str,
    from: usize,
    to: usize,
}

/// A journal, read.
pub(crate) struct Story<'j> {
    pub(crate) runs: Vec<Run<'j>>,
    hits: Vec<Hit<'j>>,
}

impl<'j> Story<'j> {
    pub(crate) fn of(journal: &'j str) -> Self {
        let (mut runs, mut hits) = (Vec::<Run<'_>>::new(), Vec::<Hit<'_>>::new());
        let mut asked = HashMap::new();
        // What was taken and has not begun, the oldest first, and which run has begun on it.
        let mut waiting: HashMap<_, VecDeque<_>> = HashMap::new();
        let mut running = HashMap::new();
        for (at, line) in journal.lines().enumerate() {
            match line.split(' ').collect::<Vec<_>>()[..] {
                [who, "down"] => hits.push(Hit { who, from: at, to: usize::MAX }),
                [who, "up"] => {
                    let hit = hits.iter_mut().rfind(|hit| hit.who == who);
                    hit.expect("they were down").to = at;
                }
                [worker, "asks", time] => {
                    asked.insert((worker, time), at);
                }
                [worker, stage, id, "taken", token, time] => {
                    let held = waiting.entry((worker, stage, id)).or_default();
                    held.push_back((token, asked[&(worker, time)]));
                }
                [worker, stage, id, "settled", token, outcome] => {
                    if let Some(held) = waiting.get_mut(&(worker, stage, id)) {
                        held.retain(|(other, _)| *other != token); // given back before it began
                    }
                    if let Some(run) = running.get(&(worker, token)) {
                        let run: &mut Run<'_> = &mut runs[*run];
                        run.outcome = Some(outcome);
                    }
                }
                [worker, stage, id, version, "begin"] => {
                    let held = waiting.get_mut(&(worker, stage, id)).and_then(VecDeque::pop_front);
                    let (token, asked) = held.expect("what begins was taken");
                    running.insert((worker, token), runs.len());
                    let (begin, end, has_failed, outcome) = (at, None, false, None);
                    runs.push(Run {
                        worker,
                        stage,
                        id,
                        version,
                        asked,
                        begin,
                        end,
                        has_failed,
                        outcome,
                    });
                }
                [worker, stage, id, version, what @ ("end" | "failed")] => {
                    let is_it = |run: &&mut Run<'_>| {
                        (run.worker, run.stage, run.id, run.version) == (worker, stage, id, version)
                            && run.end.is_none()
                    };
                    let run = runs.iter_mut().rfind(is_it).expect("what ends has begun");
                    (run.end, run.has_failed) = (Some(at), what == "failed");
                }
                _ => panic!("not a line of a journal: {line:?}"),
            }
        }
        Self { runs, hits }
    }

    /// Runs on one version of an order that were repeated, with the next one each, though nobody had to. A
    /// repeat is due
    ///
    /// - after a failure;
    /// - if the database said that the record is due again: something was written to it meanwhile;
    /// - if the run was not settled, and its worker, the server or the line between them was away at a time when
    ///   it had its record, and before the repeat began. A claim may be lost with the server, so that counts
    ///   from when the record was asked for, even if the run began when the server was back.
    pub(crate) fn needless(&self) -> Vec<(&Run<'j>, &Run<'j>)> {
        let mut by_version: HashMap<_, Vec<&Run<'_>>> = HashMap::new();
        for run in &self.runs {
            by_version.entry((run.stage, run.id, run.version)).or_default().push(run);
        }
        let is_due = |run: &Run<'_>, next: &Run<'_>| {
            let is_hit = self.hits.iter().any(|hit| {
                (hit.who == run.worker || hit.who == ALL)
                    && run.asked < hit.to
                    && hit.from < next.begin
            });
            run.has_failed || run.outcome == Some("again") || (is_hit && !run.is_settled())
        };
        let mut needless = Vec::new();
        for runs in by_version.values() {
            let repeats = runs.iter().zip(&runs[1..]).filter(|(run, next)| !is_due(run, next));
            needless.extend(repeats.map(|(run, next)| (*run, *next)));
        }
        needless
    }

    /// Runs that were not over when their workers went down for good.
    pub(crate) fn cut_short(&self) -> Vec<&Run<'j>> {
        let is_killed =
            |who: &str| self.hits.iter().any(|hit| hit.who == who && hit.to == usize::MAX);
        self.runs.iter().filter(|run| !run.is_over() && is_killed(run.worker)).collect()
    }

    /// Runs of one stage on one order, by two workers at the same time.
    pub(crate) fn overlaps(&self) -> Vec<(&Run<'j>, &Run<'j>)> {
        self.at_once(|run| (run.stage, run.id))
    }

    /// Of these, those of which both were settled: there should be none.
    pub(crate) fn settled_twice(&self) -> Vec<(&Run<'j>, &Run<'j>)> {
        let mut overlaps = self.overlaps();
        overlaps.retain(|(run, other)| run.is_settled() && other.is_settled());
        overlaps
    }

    /// Runs on one order, of whatever stages, by two workers at the same time.
    pub(crate) fn encounters(&self) -> Vec<(&Run<'j>, &Run<'j>)> {
        self.at_once(|run| run.id)
    }

    fn at_once<K: Eq + Hash>(&self, of: impl Fn(&Run<'j>) -> K) -> Vec<(&Run<'j>, &Run<'j>)> {
        let mut by_order: HashMap<_, Vec<&Run<'_>>> = HashMap::new();
        for run in &self.runs {
            by_order.entry(of(run)).or_default().push(run);
        }
        let mut overlaps = Vec::new();
        for runs in by_order.values() {
            for (n, run) in runs.iter().enumerate() {
                let others = runs[n + 1..].iter().filter(|other| {
                    other.worker != run.worker && run.end.is_none_or(|end| other.begin < end)
                });
                overlaps.extend(others.map(|other| (*run, *other)));
            }
        }
        overlaps
    }
}

/// Who works, and on which record of stage `pack`.
const TAKEN_BY_1: &str = "1 asks 0\n1 pack 7 taken 11 0\n";
const TAKEN_BY_2: &str = "2 asks 0\n2 pack 7 taken 22 0\n";

/// Whether the second run on order 7 was needless.
fn is_needless(lines: &[&str]) -> bool {
    let journal = lines.iter().map(|line| line.trim_end()).collect::<Vec<_>>().join("\n");
    let story = Story::of(&journal);
    assert_eq!(story.runs.len(), 2, "{journal}");
    !story.needless().is_empty()
}

#[test]
fn a_repeat_for_no_reason_is_found() {
    let again = [TAKEN_BY_2, "2 pack 7 1 begin"];
    let repeated = |before: &[&str]| is_needless(&[before, &again].concat());
    let run = [TAKEN_BY_1, "1 pack 7 1 begin", "1 pack 7 1 end"];
    let then = |what: &'static str| repeated(&[&run[..], &[what]].concat());
    assert!(repeated(&run));
    assert!(then("1 pack 7 settled 11 gone"));
    assert!(then("1 pack 7 settled 11 lost"));
    assert!(then("1 pack 7 settled 11 released"));
    assert!(then("1 pack 7 settled 11 conflict"), "with whom, if the order is as it was?");
    assert!(!then("1 pack 7 settled 11 again"));
    assert!(!repeated(&[TAKEN_BY_1, "1 pack 7 1 begin", "1 pack 7 1 failed"]));
}

#[test]
fn a_killed_worker_excuses_what_it_had_not_settled_and_nothing_else() {
    let run = [TAKEN_BY_1, "1 pack 7 1 begin", "1 pack 7 1 end"];
    let again = [TAKEN_BY_2, "2 pack 7 1 begin"];
    let story = |parts: &[&[&str]]| is_needless(&parts.concat());
    assert!(!story(&[&run, &["1 down"], &again]));
    assert!(story(&[&run, &["3 down"], &again]), "another one was killed");
    assert!(story(&[&run, &again, &["1 down"]]), "it was killed later");
    assert!(story(&[&run, &["1 pack 7 settled 11 gone", "1 down"], &again]), "it had settled it");
}

#[test]
fn a_run_that_was_cut_short_is_found() {
    let found = |lines: &[&str]| {
        let journal = [&[TAKEN_BY_1, "1 pack 7 1 begin\n"], lines].concat().concat();
        Story::of(&journal).cut_short().len()
    };
    assert_eq!(found(&["1 down\n"]), 1);
    assert_eq!(found(&["1 pack 7 1 end\n", "1 down\n"]), 0, "it was over");
    assert_eq!(found(&["1 down\n", "1 up\n"]), 0, "it was only cut off");
    assert_eq!(found(&["2 down\n"]), 0, "it was another one");
}

#[test]
fn a_server_that_was_away_excuses_what_was_held_then_and_nothing_else() {
    let run = ["1 pack 7 1 begin", "1 pack 7 1 end"];
    let again = [TAKEN_BY_2, "2 pack 7 1 begin"];
    let story = |parts: &[&[&str]]| is_needless(&parts.concat());
    assert!(!story(&[&[TAKEN_BY_1], &run, &["all down", "all up"], &again]));
    // The claim went with the server, and its holder could not know.
    assert!(!story(&[&[TAKEN_BY_1, "all down", "all up"], &run, &again]));
    assert!(!story(&[&["1 asks 0", "all down", "all up", "1 pack 7 taken 11 0"], &run, &again]));
    assert!(story(&[&["all down", "all up", TAKEN_BY_1], &run, &again]), "it was back by then");
    assert!(story(&[&["1 down", "1 up", TAKEN_BY_1], &run, &again]), "and so was the line");
    let lost = ["1 pack 7 settled 11 lost"];
    assert!(!story(&[&[TAKEN_BY_1], &run, &["all down", "all up"], &lost, &again]));
}

#[test]
fn two_workers_on_one_order_at_once_are_found() {
    let journal = |lines: &[&str]| lines.concat();
    let begin = [TAKEN_BY_1, "1 pack 7 1 begin\n"];
    let (ends, other) = (["1 pack 7 1 end\n"], [TAKEN_BY_2, "2 pack 7 2 begin\n"]);
    let together = journal(&[&begin[..], &other, &ends].concat());
    let overlaps = Story::of(&together).overlaps().len();
    assert_eq!(overlaps, 1);
    let one_by_one = journal(&[&begin[..], &ends, &other].concat());
    assert!(Story::of(&one_by_one).overlaps().is_empty());

    let settled = |by_1: &str, by_2: &str| {
        let ends = ["1 pack 7 1 end\n", "2 pack 7 2 end\n"];
        let settled = format!("1 pack 7 settled 11 {by_1}\n2 pack 7 settled 22 {by_2}\n");
        let journal = journal(&[&begin[..], &other, &ends, &[settled.as_str()]].concat());
        Story::of(&journal).settled_twice().len()
    };
    let found = [settled("gone", "gone"), settled("lost", "gone"), settled("lost", "lost")];
    assert_eq!(found, [1, 0, 0]);

    let other_stage = ["2 asks 0\n2 ship 7 taken 22 0\n", "2 ship 7 2 begin\n"];
    let together = journal(&[&begin[..], &other_stage, &ends].concat());
    let story = Story::of(&together);
    assert_eq!((story.overlaps().len(), story.encounters().len()), (0, 1));
    let one_by_one = journal(&[&begin[..], &ends, &other_stage].concat());
    assert!(Story::of(&one_by_one).encounters().is_empty());
}
