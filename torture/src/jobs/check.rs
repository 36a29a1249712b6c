//! What cannot be, given what was asked for, what workers said, what befell them, and what is left.
//!
//! - A job that was acknowledged is missing, or kept twice; a batch whose answer was lost is there in part.
//! - It did not end as its kind does: it is stuck, dead without need, or done although it was called off.
//! - It is done, and nobody has done it; or its effect is there twice, or not at all.
//! - It began under one claim twice, or again after its end was acknowledged.
//! - Of a stream, it is left there, or its record is not that of its end.
//! - It began again, was left unfinished, or its end was refused, and nothing had befallen its worker, the
//!   server or the line between them since it was taken.

use std::collections::{BTreeMap, HashMap};

use vedetta_core::JobState;

use super::child::PLANNED;
use super::desk::{Left, Record};
use super::log::{Answer, Ending, Run};
use super::{Backend, Kind, Report};

/// Whether a job was taken on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Taken {
    /// The answer was lost, or it was an error.
    Uncertain,
    /// It was; as this one, which may have waited already under its key.
    Acknowledged { id: u64, is_new: bool },
}

/// What was said when a job was called off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallOff {
    Made,
    TooLate,
    NoSuch,
    Unknown,
}

/// A job that the driver asked for.
#[derive(Debug, Clone)]
pub(super) struct Asked {
    pub number: usize,
    pub kind: Kind,
    pub batch: usize,
    pub millis: u64,
    pub key: Option<u32>,
    pub taken: Taken,
    pub called_off: Option<CallOff>,
}

/// Something that befell a worker, or all of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fault {
    pub what: &'static str,
    pub worker: Option<usize>,
    pub from: u64,
    pub until: u64,
}

/// What a fault is called that takes from a stream what it had confirmed.
pub(super) const SERVER_KILLED: &str = "server killed";

/// All that is known.
#[derive(Debug)]
pub(super) struct Evidence {
    pub on: Backend,
    /// For how long a message of a stream may have been with its worker before it was taken.
    pub ahead: u64,
    /// By number.
    pub asked: Vec<Asked>,
    pub faults: Vec<Fault>,
    pub runs: Vec<Run>,
    pub left: Left,
    /// Pulls of a stream that workers opened while another was open.
    pub overlapping: u64,
}

impl Evidence {
    pub(super) fn check(&self) -> Report {
        let mut report = Report::default();
        for fault in &self.faults {
            *report.faults.entry(fault.what).or_default() += 1;
        }
        let (begun, unbegun): (Vec<&Run>, Vec<&Run>) =
            self.runs.iter().partition(|run| !run.begun.is_empty());
        for run in unbegun {
            let id = run.claim.id;
            report.violations.push(format!("job {id} was settled and had not begun: {run:?}"));
        }
        let mut runs: HashMap<u64, Vec<&Run>> = HashMap::new();
        begun.into_iter().for_each(|run| runs.entry(run.number).or_default().push(run));
        for runs in runs.values_mut() {
            runs.sort_by_key(|run| run.begun[0]);
        }
        self.check_runs(&runs, &mut report);
        let records = self.left.records.as_deref().unwrap_or_default();
        self.check_ledger(records, &runs, &mut report);
        if self.on == Backend::Nats {
            report.figures.insert("pulls while another was open", self.overlapping);
            self.check_stream(&runs, &mut report);
        }
        self.check_effects(&mut report);
        report.figures.insert("begun", self.runs.iter().map(|run| run.begun.len() as u64).sum());
        let stale = |run: &&Run| matches!(run.settled, Some((_, Answer::Stale)));
        report.figures.insert("late ends refused", self.runs.iter().filter(stale).count() as u64);
        report
    }

    fn asked(&self, number: u64) -> Option<&Asked> {
        self.asked.get(usize::try_from(number).ok()?)
    }

    /// What befell a run since it came, and until then, the nearest to it first.
    fn fault(&self, run: &Run, until: u64) -> Option<&'static str> {
        let touches = |fault: &&Fault| {
            fault.worker.is_none_or(|worker| worker == run.worker)
                && fault.from <= until
                && fault.until >= run.from.saturating_sub(self.ahead)
        };
        let mut faults: Vec<&Fault> = self.faults.iter().filter(touches).collect();
        faults.sort_by_key(|fault| (fault.worker.is_none(), fault.what == "process starved"));
        faults.first().map(|fault| fault.what)
    }

    /// Why a stream may have delivered a job again that ran and may have ended: only if its end was not
    /// recorded when it was handed out again, and something had befallen them while it was unacknowledged. A
    /// server that is killed forgets deliveries; and one may be on its way to a process that does not run, or on
    /// a line that is silent, for longer than the lease.
    fn delivered_again(&self, run: &Run, next: &Run) -> Option<&'static str> {
        if self.on != Backend::Nats {
            return None;
        }
        let is_end = |(_, answer): &(u64, Answer)| matches!(answer, Answer::Gone | Answer::Parked);
        let acknowledged = run.settled.filter(is_end).map(|(at, _)| at);
        if acknowledged.is_some_and(|at| next.from > at) {
            return None;
        }
        let (from, until) = (run.from.min(next.from), acknowledged.unwrap_or(next.begun[0]));
        let killed = |fault: &Fault| {
            fault.what == SERVER_KILLED && fault.until >= from && fault.from <= until
        };
        if self.faults.iter().any(killed) {
            return Some("stream killed, and its delivery forgotten");
        }
        let befell = |run: &Run| self.fault(&Run { from, ..run.clone() }, until);
        befell(run).or(befell(next)).map(|_| "stream delivered it late")
    }

    /// Why one may begin after another has ended: it was handed out before that end, and its worker did not run until its
    /// lease was over. What it then begins it cannot settle.
    fn begun_late(&self, run: &Run, next: &Run) -> Option<&'static str> {
        let (ended, begun) = (run.settled?.0, next.begun[0]);
        let could_settle = matches!(next.settled, Some((_, answer)) if answer != Answer::Stale);
        let stalled = |fault: &Fault| {
            fault.worker == Some(next.worker) && fault.from <= begun && fault.until >= next.from
        };
        let is_excused = next.from < ended && !could_settle && self.faults.iter().any(stalled);
        is_excused.then_some("taken before that end, and its worker stalled")
    }

    fn check_runs(&self, runs: &HashMap<u64, Vec<&Run>>, report: &mut Report) {
        for (number, runs) in runs {
            let Some(asked) = self.asked(*number) else {
                report.violations.push(format!("number {number} was never asked for"));
                continue;
            };
            let what = format!("number {number}, {:?}", asked.kind);
            let mut wrong = |why: &str, runs: &[&Run]| {
                report.violations.push(format!("{what}: {why}: {runs:?}"));
            };
            if runs.iter().any(|run| run.begun.len() > 1) {
                wrong("it began twice under one claim", runs);
            }
            if runs.iter().any(|run| run.claim.id != runs[0].claim.id) {
                wrong("it is kept twice", runs);
            }
            let mut failures = 0;
            for (at, run) in runs.iter().enumerate() {
                let next = runs.get(at + 1);
                let delivered = next.and_then(|next| self.delivered_again(run, next));
                let again = delivered.or(next.and_then(|next| self.begun_late(run, next)));
                let until = run.settled.map(|(at, _)| at).or(next.map(|next| next.begun[0]));
                let fault = self.fault(run, until.unwrap_or(u64::MAX)).or(again);
                let is_called_off = asked.called_off.is_some_and(|said| said != CallOff::TooLate);
                let why = match (run.ended, run.settled) {
                    (Some(Ending::Failed | Ending::Snoozed), Some((_, Answer::Again))) => {
                        failures +=
                            u32::from(run.ended == Some(Ending::Failed) && delivered.is_none());
                        Some("as its kind does")
                    }
                    (_, Some((_, Answer::Gone | Answer::Parked))) => {
                        if next.is_some() && again.is_none() {
                            wrong("it began again after its end was acknowledged", runs);
                        }
                        again.or(Some("after its end"))
                    }
                    // It was put back, and before the answer was here something befell its worker: later, maybe, than
                    // it began again elsewhere, as an answer comes with those to all that were told together.
                    (Some(Ending::Failed | Ending::Snoozed), None) if next.is_some() => {
                        fault.or(self.fault(run, u64::MAX))
                    }
                    (_, Some((_, Answer::Again | Answer::Stale)) | None) => fault,
                };
                if why.is_none() && !(is_called_off && next.is_none()) {
                    wrong("it was not finished, and nothing had befallen it", runs);
                }
                if next.is_some() {
                    *report.repeats.entry(why.unwrap_or("for no reason")).or_default() += 1;
                }
            }
            if failures > asked.kind.max_attempts() {
                wrong("it was tried too often", runs);
            }
        }
    }

    fn check_ledger(
        &self,
        records: &[Record],
        runs: &HashMap<u64, Vec<&Run>>,
        report: &mut Report,
    ) {
        let by_id: HashMap<u64, &Record> =
            records.iter().map(|record| (record.id, record)).collect();
        let mut by_number: HashMap<u64, &Record> = HashMap::new();
        for record in records {
            if by_number.insert(record.number, record).is_some() {
                report.violations.push(format!("number {} is kept twice", record.number));
            }
            *report.figures.entry(vedetta_jobs::status::word(record.state)).or_default() += 1;
            self.check_record(record, runs.get(&record.number).map_or(&[], Vec::as_slice), report);
        }
        // Of batches whose answer was lost: how many of how many are there.
        let mut uncertain: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
        for asked in &self.asked {
            let number = asked.number as u64;
            match asked.taken {
                Taken::Acknowledged { id, is_new } => {
                    *report.figures.entry("acknowledged").or_default() += 1;
                    let wrong = match by_id.get(&id) {
                        None => Some("is lost".to_owned()),
                        Some(kept) if is_new && kept.number != number => {
                            Some(format!("is job {id}, and so is {}", kept.number))
                        }
                        Some(kept) if self.asked(kept.number).map(|a| a.key) != Some(asked.key) => {
                            Some(format!("goes on as job {id}, which has another key"))
                        }
                        Some(_) => None,
                    };
                    let kind = asked.kind;
                    let wrong = wrong.map(|wrong| format!("number {number}, {kind:?}, {wrong}"));
                    report.violations.extend(wrong);
                }
                // It may wait under its key as another number.
                Taken::Uncertain if asked.key.is_some() => {}
                Taken::Uncertain => {
                    *report.figures.entry("answer lost").or_default() += 1;
                    let (there, all) = uncertain.entry(asked.batch).or_default();
                    *there += usize::from(by_number.contains_key(&number));
                    *all += 1;
                }
            }
        }
        for (batch, (there, all)) in uncertain {
            // A stream cannot promise all or none.
            if self.on != Backend::Nats && there != 0 && there != all {
                report.violations.push(format!("of batch {batch} {there} of {all} are there"));
            }
        }
    }

    fn check_record(&self, record: &Record, runs: &[&Run], report: &mut Report) {
        let Some(asked) = self.asked(record.number) else {
            report.violations.push(format!("number {} was never asked for", record.number));
            return;
        };
        let replaced = asked.kind == Kind::Keyed && record.error.contains("in its place");
        let fits = match record.state {
            JobState::Waiting | JobState::Running => false,
            JobState::Done => {
                let is_done = asked.kind == Kind::Effect
                    || runs.iter().any(|run| run.ended == Some(Ending::Well));
                is_done
                    && asked.kind != Kind::FailsAlways
                    && asked.called_off != Some(CallOff::Made)
            }
            JobState::Dead => {
                let error = &record.error;
                asked.kind == Kind::FailsAlways
                    && (error.contains(PLANNED) || error.contains("went away"))
            }
            JobState::Cancelled => {
                replaced || matches!(asked.called_off, Some(CallOff::Made | CallOff::Unknown))
            }
        };
        if !fits {
            let (kind, called_off) = (asked.kind, asked.called_off);
            report.violations.push(format!(
                "{record:?} of the kind {kind:?}, called off: {called_off:?}, ended otherwise: {runs:?}"
            ));
        }
    }

    fn check_stream(&self, runs: &HashMap<u64, Vec<&Run>>, report: &mut Report) {
        let mut dead: HashMap<u64, u64> = HashMap::new();
        self.left.dead.iter().for_each(|number| *dead.entry(*number).or_default() += 1);
        report.figures.insert("dead", dead.len() as u64);
        report.figures.insert("left in the stream", self.left.undone.len() as u64);
        for (number, times) in &dead {
            let kind = self.asked(*number).map(|asked| asked.kind);
            if *times > 1 || kind != Some(Kind::FailsAlways) {
                let wrong = format!("number {number}, {kind:?}, is {times} times with the dead");
                report.violations.push(wrong);
            }
        }
        // Also what a server that was killed has forgotten to remove.
        for number in &self.left.undone {
            report.violations.push(format!("number {number} is left in the stream"));
        }
        for asked in &self.asked {
            let number = asked.number as u64;
            let Taken::Acknowledged { id, .. } = asked.taken else { continue };
            let runs = runs.get(&number).map_or(&[][..], Vec::as_slice);
            let is_over = if asked.kind == Kind::FailsAlways {
                dead.contains_key(&number)
            } else {
                runs.iter().any(|run| run.ended == Some(Ending::Well))
            };
            if !is_over || runs.iter().any(|run| run.claim.id.0 != id) {
                let kind = asked.kind;
                report.violations.push(format!("number {number}, {kind:?}, is lost: {runs:?}"));
            }
        }
    }

    fn check_effects(&self, report: &mut Report) {
        let mut effects: HashMap<u64, u64> = HashMap::new();
        self.left.effects.iter().for_each(|number| *effects.entry(*number).or_default() += 1);
        let done = self.left.records.iter().flatten().filter(|record| {
            let asked = self.asked(record.number);
            asked.is_some_and(|asked| asked.kind == Kind::Effect) && record.state == JobState::Done
        });
        for record in done {
            *report.figures.entry("effects").or_default() += 1;
            match effects.remove(&record.number) {
                Some(1) => {}
                times => {
                    let (number, times) = (record.number, times.unwrap_or(0));
                    let wrong = format!("number {number} is done and has {times} effects");
                    report.violations.push(wrong);
                }
            }
        }
        let stray =
            effects.keys().map(|number| format!("an effect of {number}, which is not done"));
        report.violations.extend(stray);
    }
}
