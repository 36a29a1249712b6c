//! Which jobs wait, for what, and which run: in memory, so that taking one needs no search.
//!
//! Every change is an [`Op`], and applying one says how to take it back. What a write has changed is taken
//! back if it is undone, and what a batch of them has changed if it is lost, see [`vedetta_db::Mirror`].

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use vedetta_core::JobState;

use crate::job::{JobId, Mode, PRIORITY_STEP};

/// Which queue: its place in [`Index::lanes`].
pub(super) type LaneNo = usize;

/// What decides who goes first: when it may begin, and earlier by what its priority is worth.
pub(super) fn rank(run_at: i64, priority: i16) -> i64 {
    let step = i64::try_from(PRIORITY_STEP.as_millis()).expect("a minute");
    run_at.saturating_sub(i64::from(priority) * step)
}

/// A job that was handed out.
#[derive(Debug, Clone)]
pub(super) struct Run {
    pub(super) lane: LaneNo,
    pub(super) token: i64,
    pub(super) until: i64,
    pub(super) lease: i64,
    pub(super) started_at: i64,
    pub(super) worker: Arc<str>,
    pub(super) cost: u32,
}

/// A queue.
#[derive(Debug)]
pub(super) struct Lane {
    /// As the file knows it.
    pub(super) number: i64,
    pub(super) name: String,
    pub(super) mode: Mode,
    /// By rank; and when each was due.
    pub(super) ready: BTreeMap<(i64, JobId), i64>,
    /// By when it is due; and its rank then.
    pub(super) later: BTreeMap<(i64, JobId), i64>,
    /// Of those that run.
    pub(super) leases: BTreeSet<(i64, JobId)>,
    /// Of those that wait.
    pub(super) keys: HashMap<Box<str>, JobId>,
    /// How many are kept, done, dead and called off.
    pub(super) over: [u64; 3],
    /// Slots of those that run.
    pub(super) slots: u64,
}

impl Lane {
    /// With nothing in it.
    pub(super) fn new(number: i64, name: String, mode: Mode) -> Self {
        Self {
            number,
            name,
            mode,
            ready: BTreeMap::new(),
            later: BTreeMap::new(),
            leases: BTreeSet::new(),
            keys: HashMap::new(),
            over: [0; 3],
            slots: 0,
        }
    }
}

pub(super) fn over_index(state: JobState) -> usize {
    match state {
        JobState::Dead => 1,
        JobState::Cancelled => 2,
        _ => 0,
    }
}

#[derive(Debug, Default)]
pub(super) struct Index {
    pub(super) lanes: Vec<Lane>,
    pub(super) runs: HashMap<JobId, Run>,
    /// Those that ended, until that is on the disk: who looks at the file sees them run.
    ending: HashMap<JobId, Run>,
    /// How many of those that were handed out together are not settled.
    pub(super) takes: HashMap<i64, usize>,
    pub(super) last_id: u64,
    journal: Journal,
}

/// How to take back what was not published.
#[derive(Debug, Default)]
struct Journal {
    /// Of the closure that runs.
    now: Vec<Op>,
    /// Of the closures of its batch before it.
    batch: Vec<Op>,
    /// Of batches on their way to the disk, the oldest first.
    sealed: VecDeque<Vec<Op>>,
}

/// A change.
#[derive(Debug)]
pub(super) enum Op {
    /// A queue is there, the last of them.
    AddLane(Box<Lane>),
    RemoveLane,
    /// It waits, and is due or will be.
    Wait {
        lane: LaneNo,
        id: JobId,
        run_at: i64,
        rank: i64,
        is_due: bool,
    },
    /// It no longer does.
    Leave {
        lane: LaneNo,
        id: JobId,
        run_at: i64,
        rank: i64,
        is_due: bool,
    },
    /// This one waits under the key, or none.
    Key {
        lane: LaneNo,
        key: Box<str>,
        id: Option<JobId>,
    },
    /// It runs, or does not.
    Run {
        id: JobId,
        run: Option<Run>,
    },
    Mode {
        lane: LaneNo,
        mode: Mode,
    },
    /// So many more, or fewer, are over.
    Over {
        lane: LaneNo,
        state: JobState,
        count: i64,
    },
}

impl Index {
    pub(super) fn lane(&self, name: &str) -> Option<LaneNo> {
        // There are few.
        self.lanes.iter().position(|lane| lane.name == name)
    }

    pub(super) fn lane_of(&self, number: i64) -> Option<LaneNo> {
        self.lanes.iter().position(|lane| lane.number == number)
    }

    /// Makes a change, which is taken back if its write is undone.
    pub(super) fn change(&mut self, op: Op) {
        let back = self.apply(op);
        if let Op::Run { id, run: Some(run) } = &back {
            self.ending.insert(*id, run.clone());
        }
        self.journal.now.push(back);
    }

    /// Has a job wait.
    pub(super) fn wait(&mut self, lane: LaneNo, id: JobId, run_at: i64, priority: i16, now: i64) {
        let (rank, is_due) = (rank(run_at, priority), run_at <= now);
        self.change(Op::Wait { lane, id, run_at, rank, is_due });
    }

    /// Has a job that waits leave.
    pub(super) fn leave(&mut self, lane: LaneNo, id: JobId, run_at: i64, priority: i16) {
        let rank = rank(run_at, priority);
        let is_due = self.lanes[lane].ready.contains_key(&(rank, id));
        self.change(Op::Leave { lane, id, run_at, rank, is_due });
    }

    /// What is due by now is ready.
    pub(super) fn promote(&mut self, lane: LaneNo, now: i64) {
        while let Some((&(run_at, id), &rank)) = self.lanes[lane].later.first_key_value()
            && run_at <= now
        {
            self.change(Op::Leave { lane, id, run_at, rank, is_due: false });
            self.change(Op::Wait { lane, id, run_at, rank, is_due: true });
        }
    }

    /// The run of a job, also of one that ended if the file may not have it yet.
    pub(super) fn run(&self, id: JobId) -> Option<&Run> {
        self.runs.get(&id).or_else(|| self.ending.get(&id))
    }

    /// Whether a job waits as the file has it.
    pub(super) fn waits(&self, lane: LaneNo, id: JobId, run_at: i64, priority: i16) -> bool {
        let lane = &self.lanes[lane];
        lane.later.contains_key(&(run_at, id))
            || lane.ready.contains_key(&(rank(run_at, priority), id))
    }

    /// Prolongs a lease. That is not taken back with anything.
    pub(super) fn prolong(&mut self, id: JobId, until: i64) {
        if let Some(run) = self.runs.get_mut(&id) {
            let leases = &mut self.lanes[run.lane].leases;
            leases.remove(&(run.until, id));
            run.until = until;
            leases.insert((until, id));
        }
    }

    fn apply(&mut self, op: Op) -> Op {
        match op {
            Op::AddLane(lane) => {
                self.lanes.push(*lane);
                Op::RemoveLane
            }
            Op::RemoveLane => {
                let lane = self.lanes.pop().expect("it was added");
                Op::AddLane(Box::new(lane))
            }
            Op::Wait { lane, id, run_at, rank, is_due } => {
                let waiting = &mut self.lanes[lane];
                if is_due {
                    waiting.ready.insert((rank, id), run_at);
                } else {
                    waiting.later.insert((run_at, id), rank);
                }
                Op::Leave { lane, id, run_at, rank, is_due }
            }
            Op::Leave { lane, id, run_at, rank, is_due } => {
                let waiting = &mut self.lanes[lane];
                let found = if is_due {
                    waiting.ready.remove(&(rank, id))
                } else {
                    waiting.later.remove(&(run_at, id))
                };
                debug_assert!(found.is_some(), "it waited");
                Op::Wait { lane, id, run_at, rank, is_due }
            }
            Op::Key { lane, key, id } => {
                let keys = &mut self.lanes[lane].keys;
                let before = match id {
                    Some(id) => keys.insert(key.clone(), id),
                    None => keys.remove(&key),
                };
                Op::Key { lane, key, id: before }
            }
            Op::Run { id, run } => {
                let begins = run.is_some();
                let before = match run {
                    Some(run) => {
                        let lane = &mut self.lanes[run.lane];
                        lane.leases.insert((run.until, id));
                        lane.slots += u64::from(run.cost);
                        *self.takes.entry(run.token).or_default() += 1;
                        self.ending.remove(&id);
                        self.runs.insert(id, run)
                    }
                    None => self.runs.remove(&id),
                };
                debug_assert_eq!(before.is_none(), begins, "it begins once and ends once");
                if let Some(run) = &before {
                    let lane = &mut self.lanes[run.lane];
                    lane.leases.remove(&(run.until, id));
                    lane.slots -= u64::from(run.cost);
                    let left = self.takes.entry(run.token).or_default();
                    *left -= 1;
                    if *left == 0 {
                        self.takes.remove(&run.token);
                    }
                }
                Op::Run { id, run: before }
            }
            Op::Mode { lane, mode } => {
                let before = std::mem::replace(&mut self.lanes[lane].mode, mode);
                Op::Mode { lane, mode: before }
            }
            Op::Over { lane, state, count } => {
                let over = &mut self.lanes[lane].over[over_index(state)];
                *over = over.saturating_add_signed(count);
                Op::Over { lane, state, count: -count }
            }
        }
    }

    /// The closure that ran stands.
    pub(super) fn keep(&mut self) {
        let Journal { now, batch, .. } = &mut self.journal;
        batch.append(now);
    }

    /// It was undone.
    pub(super) fn undo(&mut self) {
        let ops = std::mem::take(&mut self.journal.now);
        self.take_back(ops);
    }

    /// The batch is on its way.
    pub(super) fn seal(&mut self) {
        let batch = std::mem::take(&mut self.journal.batch);
        self.journal.sealed.push_back(batch);
    }

    /// The oldest is on the disk.
    pub(super) fn publish(&mut self) {
        for op in self.journal.sealed.pop_front().unwrap_or_default() {
            if let Op::Run { id, run: Some(run) } = op
                && self.ending.get(&id).is_some_and(|ending| ending.token == run.token)
            {
                self.ending.remove(&id);
            }
        }
    }

    /// All that is not on the disk is lost.
    pub(super) fn discard(&mut self) {
        let Journal { now, batch, sealed } = std::mem::take(&mut self.journal);
        self.take_back(now);
        self.take_back(batch);
        sealed.into_iter().rev().for_each(|ops| self.take_back(ops));
    }

    fn take_back(&mut self, ops: Vec<Op>) {
        for op in ops.into_iter().rev() {
            self.apply(op);
        }
    }

    /// What was loaded stands.
    pub(super) fn loaded(&mut self) {
        self.journal = Journal::default();
    }
}
