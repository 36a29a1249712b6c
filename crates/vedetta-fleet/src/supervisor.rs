//! Keeps workers: as many as there should be, none that is dead or silent, none too much.
//!
//! ```text
//!  command ─┐                      a look
//!  time ────┼─► Runner, one key ──► beat ──► plan: what should be ──► steps ──► processes
//!  end ─────┘      ▲  │ it failed: again, later                                    │
//!   ▲              └──┘                                                            │
//!   └───────────── ended, with how and the last of stderr ◄────────────────────────┘
//! ```
//!
//! A look is a run of the [`Runner`]: offers made meanwhile become one more look, and one that panics or takes
//! too long is a look that failed. What it knows and the children it has are `Staff`, which outlives that.
//!
//! Workers are processes of their own, and no fault of this one ends them: after a restart those that still
//! beat under its name are adopted. What ends or falls silent again and again soon after its start is started
//! later and later. A worker is told to stop as by anybody else, by a command, and told again if that was lost;
//! only one that is silent, stays after its goodbye, or does not end within the grace time, is killed, and that only
//! if its process is for sure the one that is meant.

mod child;
mod plan;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::mem::{Discriminant, discriminant};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use vedetta_core::{Backoff, Failure, Moment, Slot, Tries, explain};
use vedetta_runtime::{Ended as Run, Limits, Outcome, Runner};

use crate::bus::{CommandId, Order, TTL, Target};
use crate::control::{Control, ControlError};
use crate::crew::TOLD;
use crate::host::{self, host_name};
use crate::obeyed::Obeyed;
use crate::roster::Status;
use crate::wire::{Ended, Handed, Mood, Report, Told, WorkerInfo};
use child::Exit;
pub use plan::Balance;
use plan::{Bounds, Hand, Load, Posts, Scale, Stage, Step};

/// After a change in how many there are there is no other for so long, unless said otherwise.
pub const COOL_DOWN: Duration = Duration::from_secs(10);
/// It looks at its workers this often, at least.
const LOOK: Duration = Duration::from_secs(1);
/// A worker has so long from its start to its first beat.
const TO_START: Duration = Duration::from_secs(30);
/// And from its goodbye to the end of its process.
const TO_END: Duration = Duration::from_secs(30);
/// Who lived so long did not fail to start.
const STABLE: Duration = Duration::from_secs(5);
/// After so many failures in a row it is shown that something is wrong.
const CRASH_LOOP: u32 = 5;
/// An answer that takes longer does not come.
const PATIENCE: Duration = Duration::from_secs(5);
/// A look asks the server, and then tells workers to stop. One that takes longer is dropped where it is.
const LONGEST_LOOK: Duration = PATIENCE.saturating_mul(2);
/// How a worker ended that gave no sign of life.
const SILENT: &str = "it was silent and killed";
/// Ends that are waiting to be looked at.
const EXITS: usize = 64;
const RESTART: Backoff =
    Backoff { first: Duration::from_millis(200), most: Duration::from_secs(10), jitter: 0.2 };
/// After a look that failed.
const AGAIN: Backoff = Backoff { first: Duration::from_millis(100), most: LOOK, jitter: 0.2 };
/// What the runner runs. One key, as every decision is about all workers at once.
const ALL: Slot = Slot(0);

/// What a supervisor keeps.
#[derive(Debug, Clone)]
pub struct Settings {
    /// What its workers work.
    pub queues: Vec<String>,
    /// How they are spread.
    pub balance: Balance,
    /// Workers at least.
    pub min: u32,
    /// And at most.
    pub max: u32,
    /// After a change in how many there are there is no other for so long.
    pub cool_down: Duration,
}

/// How a worker is started: `program worker run --id … --supervisor … --queue …`, and these arguments.
#[derive(Debug, Clone)]
pub struct Hire {
    /// What is run.
    pub program: PathBuf,
    /// After those that say which queues.
    pub arguments: Vec<OsString>,
    /// Set in its environment, beside those of this process. Never logged.
    pub variables: Vec<(String, String)>,
}

/// A supervisor that may be started.
pub struct Supervisor {
    name: String,
    settings: Settings,
    hire: Hire,
    control: Arc<dyn Control>,
}

/// A supervisor at work. Dropped, it ends at once, and its children with it.
pub struct Supervising {
    name: String,
    task: Option<JoinHandle<usize>>,
    stop: CancellationToken,
    grace: Arc<Mutex<Duration>>,
}

impl Supervising {
    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Has all workers finish what runs within `grace`, and kills the rest. How many.
    pub async fn stop(mut self, grace: Duration) -> usize {
        *self.grace.lock() = grace;
        self.stop.cancel();
        match self.task.take() {
            Some(task) => task.await.unwrap_or(0),
            None => 0,
        }
    }
}

impl Drop for Supervising {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

impl Supervisor {
    /// Of this name on this machine: no two of them share their workers.
    pub fn new(name: &str, settings: Settings, hire: Hire, control: Arc<dyn Control>) -> Self {
        let mut settings = settings;
        settings.queues.sort();
        settings.queues.dedup();
        Self { name: format!("{name}:{}", host_name()), settings, hire, control }
    }

    /// Keeps workers until stopped.
    pub fn start(self) -> Supervising {
        let (stop, grace) = (CancellationToken::new(), Arc::new(Mutex::new(Duration::MAX)));
        let name = self.name.clone();
        let (tell, exits) = mpsc::channel(EXITS);
        let bell = Arc::new(Notify::new());
        let staff = Staff {
            hands: BTreeMap::new(),
            children: JoinSet::new(),
            tell,
            bell: Arc::clone(&bell),
            exits,
            scale: Scale::default(),
            base: None,
            extras: Vec::new(),
            generation: 0,
            halted: false,
            draining: false,
            failures: 0,
            start_at: Instant::now(),
            last: None,
            ended: Vec::new(),
            done: Vec::new(),
            obeyed: Obeyed::default(),
            loads: BTreeMap::new(),
            silent: Duration::from_secs(10),
            period: LOOK,
            began: Instant::now(),
            instance: format!("{:016x}", fastrand::u64(..)),
            of: self,
        };
        let limits = Limits { capacity: NonZeroU32::MIN, timeout: Some(LONGEST_LOOK) };
        let task = Task {
            name: name.clone(),
            runner: Runner::new(limits),
            tries: Tries::default(),
            trouble: None,
            _listening: staff.listen(),
            staff: Arc::new(tokio::sync::Mutex::new(staff)),
            bell,
        };
        let task = tokio::spawn(task.run(stop.clone(), Arc::clone(&grace)));
        Supervising { name, task: Some(task), stop, grace }
    }
}

/// A worker that is kept.
struct Kept {
    queues: Vec<String>,
    generation: u32,
    since: Instant,
    /// Ends the process, if it is a child of this one.
    kill: Option<CancellationToken>,
    leaving: Leaving,
    /// When it was first seen to have said goodbye, though its process is there.
    left: Option<Instant>,
    info: Option<WorkerInfo>,
}

impl Kept {
    /// From its start to its last sign of life.
    fn heard(&self) -> Duration {
        let ago = self.info.as_ref().map(|info| Duration::from_millis(info.seen_ms));
        ago.map_or(Duration::ZERO, |ago| self.since.elapsed().saturating_sub(ago))
    }

    /// It said goodbye, and its process is there too long after that.
    fn has_to_go(&self) -> bool {
        self.left.is_some_and(|left| left.elapsed() > TO_END)
    }
}

/// Whether a worker is about to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leaving {
    No,
    /// We told it to, then, or tried; whether it heard that is not known. Without an answer it is told again soon.
    Told {
        at: Instant,
        answered: bool,
    },
    /// It says so.
    Stops,
    /// We have ended it.
    Killed {
        was_silent: bool,
    },
}

/// Has the runner look whenever there is a reason to.
struct Task {
    name: String,
    runner: Runner<Instant>,
    tries: Tries,
    /// What kind of failure it was last; nothing after a look that went well.
    trouble: Option<Discriminant<Failure>>,
    /// A look has it while it runs, and what it knew is there for the next one however it ended.
    staff: Arc<tokio::sync::Mutex<Staff>>,
    bell: Arc<Notify>,
    _listening: AbortOnDropHandle<()>,
}

impl Task {
    async fn run(mut self, stop: CancellationToken, grace: Arc<Mutex<Duration>>) -> usize {
        self.runner.offer(ALL, self.runner.now());
        loop {
            let staff = &self.staff;
            let look = |_| {
                let staff = Arc::clone(staff);
                Some(async move { staff.lock().await.look().await })
            };
            self.runner.start_due(look, |_| 1);
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                () = self.bell.notified() => {
                    self.runner.offer(ALL, self.tries.earliest(self.runner.now()));
                }
                ended = self.runner.next() => if let Some(look) = ended {
                    self.ended(look).await;
                },
            }
        }
        let end = Instant::now().checked_add(*grace.lock());
        // What a look that runs has begun it finishes, if it can.
        self.runner.pause(true);
        if self.runner.running() > 0 {
            let look = self.runner.next();
            tokio::select! {
                _ = look => {}
                () = until(end) => self.runner.abort(),
            }
        }
        self.staff.lock().await.drain(end).await
    }

    async fn ended(&mut self, look: Run<Instant>) {
        let now = self.runner.now();
        match look.outcome {
            Outcome::Done(next) => {
                self.tries.succeeded();
                self.trouble = None;
                let wait = next.saturating_duration_since(Instant::now());
                self.runner.offer(ALL, now + wait);
            }
            Outcome::Failed(why) => {
                let (supervisor, kind) = (&self.name, discriminant(&why));
                let is_new = self.trouble.replace(kind) != Some(kind);
                if is_new {
                    tracing::warn!(supervisor, error = %why, "a look failed; trying again");
                }
                self.runner.reschedule(ALL, self.tries.failed(now, &AGAIN, fastrand::f64()));
                // A server that does not answer is no failure of ours. How a worker ended since then is of more interest.
                if is_new && matches!(why, Failure::Panic(_)) {
                    let why = format!("a look at the workers failed: {why}");
                    self.staff.lock().await.last = Some((why, String::new()));
                }
            }
            Outcome::Cancelled => {}
        }
    }
}

/// Then, if ever.
async fn until(end: Option<Instant>) {
    match end {
        Some(end) => sleep_until(end).await,
        None => std::future::pending().await,
    }
}

/// What a supervisor knows, and its children. Whatever a look was at when it was dropped, the next one goes on from it.
struct Staff {
    of: Supervisor,
    hands: BTreeMap<String, Kept>,
    children: JoinSet<()>,
    tell: mpsc::Sender<(String, Exit)>,
    bell: Arc<Notify>,
    /// Ends to be looked at when it is known what they said last.
    exits: mpsc::Receiver<(String, Exit)>,
    scale: Scale,
    /// How many take all queues, where that is not decided by load; nothing before the first look.
    base: Option<u32>,
    /// Queues of workers that were asked for beside those.
    extras: Vec<String>,
    generation: u32,
    /// It was told to end all workers; the server remembers.
    halted: bool,
    /// Its process ends.
    draining: bool,
    /// Ends soon after a start, in a row.
    failures: u32,
    /// Not before.
    start_at: Instant,
    /// The last failure, and what it wrote.
    last: Option<(String, String)>,
    // What the server was not told yet.
    ended: Vec<Ended>,
    done: Vec<CommandId>,
    obeyed: Obeyed,
    loads: BTreeMap<String, Load>,
    silent: Duration,
    period: Duration,
    began: Instant,
    instance: String,
}

impl Staff {
    fn listen(&self) -> AbortOnDropHandle<()> {
        let (control, target) = (Arc::clone(&self.of.control), Target::supervisor(&self.of.name));
        let bell = Arc::clone(&self.bell);
        AbortOnDropHandle::new(tokio::spawn(async move {
            loop {
                let _ = control.listen(&target, &|| bell.notify_one()).await;
                sleep(LOOK / 2).await;
            }
        }))
    }

    /// One look at what is there, and what is to be done about it. When to look next.
    async fn look(&mut self) -> Result<Instant, Failure> {
        let next = Instant::now() + self.period;
        // How they ended comes by the channel.
        while self.children.try_join_next().is_some() {}
        let exits = self.exits.len();
        let told = timeout(PATIENCE, self.report()).await;
        let told = told.map_err(|_| Failure::Timeout(PATIENCE))?;
        let (told, asked) = told.map_err(|error| Failure::Error(explain(&error)))?;
        self.remember(told.halted);
        self.observe(told.workers);
        for _ in 0..exits {
            if let Ok((id, exit)) = self.exits.try_recv() {
                self.exited(&id, exit);
            }
        }
        self.obey(told.commands, asked);
        let posts = self.posts();
        let starts = match self.failures {
            _ if Instant::now() < self.start_at => 0,
            0 => self.of.settings.max.saturating_add(1),
            // One is enough to see whether it fails again.
            _ => 1,
        };
        let hands: Vec<Hand> = self.hands.iter().map(|(id, kept)| self.hand(id, kept)).collect();
        let (mut stops, mut is_missing) = (Vec::new(), false);
        for step in plan::steps(&posts, &hands, self.of.settings.max, starts) {
            match step {
                Step::Start(queues) => {
                    // After a failure just now it is too early.
                    if Instant::now() >= self.start_at {
                        self.hire(queues);
                    }
                    is_missing |= Instant::now() < self.start_at;
                }
                // Nobody goes for one that does not come.
                Step::Stop(_) if is_missing => {}
                Step::Stop(id) => stops.push(id),
                Step::Kill(id) => self.give_up(&id),
            }
        }
        stops.extend(self.unanswered(PATIENCE));
        if self.failures > 0 && self.is_well() {
            self.failures = 0;
        }
        self.dismiss(stops).await;
        // What was done is told at once.
        if !self.done.is_empty() {
            return Ok(Instant::now());
        }
        Ok(if Instant::now() < self.start_at { next.min(self.start_at) } else { next })
    }

    /// Those that were told to stop so long ago, and it is not known that this was taken. They are told again, and it
    /// is still our doing.
    fn unanswered(&self, patience: Duration) -> Vec<String> {
        let is_due = |kept: &Kept| matches!(kept.leaving, Leaving::Told { at, answered: false } if at.elapsed() >= patience);
        let due = self.hands.iter().filter(|(_, kept)| is_due(kept));
        due.map(|(id, _)| id.clone()).collect()
    }

    /// Whether the last failure is over. Those that were started since then show it; without any, the others.
    fn is_well(&self) -> bool {
        let is_new = |kept: &Kept| kept.since >= self.start_at;
        let has_new = self.hands.values().any(is_new);
        let mut shown = self.hands.values().filter(|kept| !has_new || is_new(kept));
        Instant::now() > self.start_at + STABLE && shown.any(|kept| kept.heard() > STABLE)
    }

    /// Says how it is, and hears what there is to know.
    async fn report(&mut self) -> Result<(Told, Instant), ControlError> {
        let Settings { queues, balance, min, max, .. } = &self.of.settings;
        let wanted = self.posts_now().values().sum();
        let report = Report {
            host: host_name(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            instance: self.instance.clone(),
            queues: queues.clone(),
            balance: balance.word().to_owned(),
            min: *min,
            max: *max,
            wanted,
            state: self.mood(),
            last_exit: self.last.as_ref().map(|(exit, _)| exit.clone()),
            stderr: self.last.as_ref().map(|(_, stderr)| stderr.clone()),
            ended: self.ended.clone(),
            // A report that it ends does not say what it was told.
            done: if self.draining { Vec::new() } else { self.done.clone() },
            depths: *balance == Balance::Auto,
        };
        let asked = Instant::now();
        let told = self.of.control.supervise(&self.of.name, &report).await?;
        self.ended.drain(..report.ended.len());
        self.done.drain(..report.done.len());
        self.silent = Duration::from_millis(told.silent_ms);
        self.period = Duration::from_millis(told.beat_ms).min(LOOK);
        let load = |depth: &crate::wire::Depth| Load {
            ready: depth.ready,
            running: depth.running,
            oldest: Duration::from_millis(depth.oldest_ms.unwrap_or(0)),
        };
        self.loads = told.queues.iter().map(|depth| (depth.name.clone(), load(depth))).collect();
        Ok((told, asked))
    }

    fn mood(&self) -> Mood {
        if self.draining {
            Mood::Stopping
        } else if self.base.is_none() {
            Mood::Starting
        } else if self.halted {
            Mood::Terminated
        } else if self.failures >= CRASH_LOOP {
            Mood::CrashLooping
        } else if self.hands.values().any(|kept| kept.generation != self.generation) {
            Mood::Restarting
        } else {
            Mood::Running
        }
    }

    /// Takes note of what the server knows of the workers.
    fn observe(&mut self, workers: Vec<WorkerInfo>) {
        let here = host_name();
        let is_there = |info: &WorkerInfo| is_ours(info, &here, &self.of.name);
        let mut known: BTreeMap<String, WorkerInfo> =
            workers.into_iter().map(|info| (info.id.clone(), info)).collect();
        let mut left = Vec::new();
        for (id, kept) in &mut self.hands {
            match known.remove(id) {
                Some(info) => {
                    let has_left = info.status == Status::Stopped;
                    if has_left && kept.kill.is_none() && !is_there(&info) {
                        left.push(id.clone());
                    }
                    kept.left = has_left.then(|| kept.left.unwrap_or_else(Instant::now));
                    // A command is handed out once, and may be lost then: when its time is over, which begins when the
                    // server has it, it is given again. At the end there is not that much time, and no harm in
                    // telling it twice.
                    let patience = if self.draining { PATIENCE } else { TTL + PATIENCE };
                    if let Leaving::Told { at, answered: true } = kept.leaving
                        && at.elapsed() >= patience
                        && matches!(info.status, Status::Running | Status::Paused)
                    {
                        tracing::warn!(worker = id, "it was told to stop, and did not");
                        kept.leaving = Leaving::No;
                    }
                    kept.info = Some(info);
                }
                // It is known no more. Of a child, and of one that has left, the end is still to come.
                None => {
                    let stays = || kept.left.is_some() && kept.info.as_ref().is_some_and(is_there);
                    if kept.kill.is_none() && !stays() {
                        left.push(id.clone());
                    }
                }
            }
        }
        self.heed_stops();
        for id in left {
            self.hands.remove(&id);
        }
        for (id, info) in known {
            if info.status == Status::Stopped {
                continue;
            }
            if is_gone(&info, &here) {
                self.ended.push(Ended { id, exit: "its process is gone".into() });
                continue;
            }
            if info.status == Status::Silent && !is_ours(&info, &here, &self.of.name) {
                continue; // it may come back, and nothing can be done until then
            }
            let supervisor = &self.of.name;
            tracing::info!(supervisor, worker = id, pid = info.pid, "adopted a worker");
            let mut queues = info.queues.clone();
            queues.sort();
            let is_stopping = info.status == Status::Stopping;
            let leaving = if is_stopping { Leaving::Stops } else { Leaving::No };
            let kept = Kept {
                queues,
                generation: self.generation,
                since: Instant::now(),
                kill: None,
                leaving,
                left: None,
                info: Some(info),
            };
            self.hands.insert(id, kept);
        }
        // Those that are not children of ours we see end only so.
        let is_over = |kept: &Kept| {
            kept.kill.is_none() && kept.info.as_ref().is_some_and(|info| is_gone(info, &here))
        };
        let over = self.hands.iter().filter(|(_, kept)| is_over(kept)).map(|(id, _)| id.clone());
        for id in over.collect::<Vec<_>>() {
            self.hands.remove(&id);
            self.ended.push(Ended { id, exit: "its process is gone".into() });
        }
        if self.base.is_none() {
            self.take_over();
        }
    }

    /// At the first look: what was said to the one before it holds.
    fn remember(&mut self, halted: bool) {
        if halted && self.base.is_none() {
            let supervisor = &self.of.name;
            tracing::warn!(
                supervisor,
                "it was told to start no workers: `vedetta worker restart` has it start them"
            );
            self.halted = true;
        }
    }

    /// Whom somebody told to stop is not replaced, as long as there are enough.
    fn heed_stops(&mut self) {
        let Settings { balance, min, .. } = self.of.settings;
        let now = Moment::reached(self.began.elapsed());
        for kept in self.hands.values_mut() {
            let info = kept.info.as_ref();
            let ends = [Status::Stopping, Status::Stopped];
            let before = kept.leaving;
            if !matches!(before, Leaving::No | Leaving::Told { .. })
                || info.is_none_or(|info| !ends.contains(&info.status))
            {
                continue;
            }
            kept.leaving = Leaving::Stops;
            let told = info.and_then(|info| info.note.as_deref());
            if before != Leaving::No || told != Some(TOLD) {
                continue;
            }
            let extra = self.extras.iter().position(|queue| kept.queues == [queue.clone()]);
            match (extra, balance) {
                (Some(at), _) => drop(self.extras.remove(at)),
                (None, Balance::Auto) => self.scale.lower(&kept.queues, min, now),
                (None, Balance::Simple) => {
                    self.base = self.base.map(|base| base.saturating_sub(1).max(min));
                }
            }
        }
    }

    /// At the first look: what is there is what there should be, within bounds.
    fn take_over(&mut self) {
        let Settings { queues: all, min, max, .. } = &self.of.settings;
        let mut posts = Posts::new();
        for kept in self.hands.values().filter(|kept| kept.leaving == Leaving::No) {
            *posts.entry(kept.queues.clone()).or_default() += 1;
        }
        let base = posts.get(all).copied().unwrap_or(0).clamp(*min, *max);
        let mut room = max - base;
        for (queues, count) in &posts {
            let [queue] = queues.as_slice() else { continue };
            if self.of.settings.balance == Balance::Simple && queues != all && all.contains(queue) {
                let extra = room.min(*count);
                room -= extra;
                self.extras.extend((0..extra).map(|_| queue.clone()));
            }
        }
        self.base = Some(base);
        self.scale.adopt(posts);
    }

    fn obey(&mut self, commands: Vec<Handed>, asked: Instant) {
        for Handed { id, command, expires_ms } in commands {
            // That it was done is told again: who hands it out again does not know it.
            if self.obeyed.has(&id) {
                self.done.push(id);
                continue;
            }
            if asked.elapsed() >= Duration::from_millis(expires_ms) {
                continue;
            }
            let supervisor = &self.of.name;
            match &command {
                Order::Start { queue, count } => {
                    let Settings { queues, balance, min, max, .. } = &self.of.settings;
                    let wanted = self.posts_unless_halted().values().sum::<u32>().max(*min);
                    if max.saturating_sub(wanted) < *count {
                        // Somebody else was faster: what is not done is not told to be.
                        tracing::warn!(supervisor, %command, wanted, max, "there is no room for it");
                        continue;
                    }
                    self.halted = false;
                    if *balance == Balance::Simple && queues.as_slice() == [queue.clone()] {
                        *self.base.get_or_insert(*min) += count;
                    } else {
                        self.extras.extend((0..*count).map(|_| queue.clone()));
                    }
                }
                Order::Restart => {
                    self.halted = false;
                    self.generation += 1;
                }
                Order::Terminate => {
                    (self.halted, self.base) = (true, Some(self.of.settings.min));
                    self.scale = Scale::default();
                    self.extras.clear();
                }
                Order::Stop | Order::Pause | Order::Resume => continue,
            }
            tracing::info!(supervisor, %command, "obeyed a command");
            self.obeyed.add(id.clone());
            self.done.push(id);
        }
    }

    /// What there should be, decided anew.
    fn posts(&mut self) -> Posts {
        if self.of.settings.balance == Balance::Auto && !self.halted {
            let Settings { queues, min, max, cool_down, .. } = &self.of.settings;
            let extras = u32::try_from(self.extras.len()).unwrap_or(u32::MAX);
            let max = (*max).saturating_sub(extras).max(*min);
            let bounds = Bounds { min: *min, max, cool_down: *cool_down };
            let slots = self.hands.values().filter_map(|kept| kept.info.as_ref());
            let slots = slots.map(|info| info.slots.capacity).max().unwrap_or(1);
            let now = Moment::reached(self.began.elapsed());
            self.scale.decide(bounds, queues, &self.loads, slots, now);
        }
        self.posts_now()
    }

    /// The same as it was last decided.
    fn posts_now(&self) -> Posts {
        if self.halted || self.draining {
            return Posts::new();
        }
        self.posts_unless_halted()
    }

    fn posts_unless_halted(&self) -> Posts {
        let Settings { queues, balance, min, .. } = &self.of.settings;
        let mut posts = match balance {
            Balance::Simple => Posts::from([(queues.clone(), self.base.unwrap_or(*min))]),
            Balance::Auto => self.scale.posts().clone(),
        };
        for queue in &self.extras {
            *posts.entry(vec![queue.clone()]).or_default() += 1;
        }
        posts
    }

    fn hand(&self, id: &str, kept: &Kept) -> Hand {
        let stage = match &kept.info {
            Some(info) if info.status == Status::Silent => Stage::Silent,
            None if kept.since.elapsed() > TO_START => Stage::Silent,
            _ if kept.has_to_go() => Stage::Silent,
            _ if kept.leaving != Leaving::No => Stage::Stopping,
            Some(_) => Stage::Ready,
            None => Stage::Starting,
        };
        Hand {
            id: id.to_owned(),
            queues: kept.queues.clone(),
            stage,
            is_old: kept.generation != self.generation,
            is_busy: kept.info.as_ref().is_some_and(|info| info.slots.used > 0),
        }
    }

    /// Starts a worker of these queues.
    fn hire(&mut self, queues: Vec<String>) {
        let supervisor = &self.of.name;
        let short = supervisor.split(':').next().unwrap_or(supervisor);
        let id = format!("{short}-{:08x}", fastrand::u32(..));
        let kill = CancellationToken::new();
        let child = child::start(&self.of.hire, supervisor, &id, &queues);
        match child {
            Ok(child) => {
                tracing::info!(
                    supervisor,
                    worker = id,
                    pid = child.id(),
                    ?queues,
                    "started a worker"
                );
                let (tell, bell) = (self.tell.clone(), Arc::clone(&self.bell));
                let watch = child::watch(child, id.clone(), kill.clone(), tell);
                self.children.spawn(async move {
                    watch.await;
                    bell.notify_one();
                });
                let kept = Kept {
                    queues,
                    generation: self.generation,
                    since: Instant::now(),
                    kill: Some(kill),
                    leaving: Leaving::No,
                    left: None,
                    info: None,
                };
                self.hands.insert(id, kept);
            }
            Err(error) => {
                tracing::error!(supervisor, %error, "cannot start a worker");
                self.failed(format!("it cannot be started: {error}"), String::new());
            }
        }
    }

    /// Tells workers to stop, all at once: an answer that does not come keeps nobody else from its own. One that
    /// never said anything does nothing, and is ended.
    async fn dismiss(&mut self, ids: Vec<String>) {
        let mut told = FuturesUnordered::new();
        for id in ids {
            match self.hands.get_mut(&id) {
                Some(Kept { info: None, .. }) => self.kill(&id, false),
                Some(kept) => {
                    // From before it is sent: whatever becomes of the answer and of this look, it may have heard.
                    kept.leaving = Leaving::Told { at: Instant::now(), answered: false };
                    let control = Arc::clone(&self.of.control);
                    told.push(async move {
                        (timeout(PATIENCE, control.tell(&id, Order::Stop)).await, id)
                    });
                }
                None => {}
            }
        }
        while let Some((answer, id)) = told.next().await {
            let Some(kept) = self.hands.get_mut(&id) else { continue };
            let Leaving::Told { at, answered } = &mut kept.leaving else { continue };
            match answer {
                Ok(Ok(())) => *answered = true,
                Ok(Err(ControlError::Refused(_))) => kept.leaving = Leaving::No,
                // A server that is slow has a rest.
                Ok(Err(ControlError::Unavailable(_))) | Err(_) => *at = Instant::now(),
            }
        }
    }

    /// Ends a worker that is silent, which is a failure as any other.
    fn give_up(&mut self, id: &str) {
        let Some(kept) = self.hands.get(id) else { return };
        if matches!(kept.leaving, Leaving::Killed { .. }) {
            return; // its end is still to come
        }
        if kept.heard() > STABLE {
            self.failures = 0;
        }
        self.kill(id, true);
        self.failed(SILENT.to_owned(), String::new());
    }

    /// Ends a worker at once, if it can be told from others.
    fn kill(&mut self, id: &str, was_silent: bool) {
        let Some(kept) = self.hands.get_mut(id) else { return };
        if let Some(kill) = &kept.kill {
            kept.leaving = Leaving::Killed { was_silent };
            kill.cancel(); // how it ended comes as of any other
            return;
        }
        let Some(info) = &kept.info else { return };
        let is_here = info.host == host_name();
        let birth = info.birth.as_deref();
        let is_it = |birth: &str| host::kill(info.pid, birth, &child::words(&self.of.name, id));
        if is_here && birth.is_some_and(is_it) {
            tracing::warn!(worker = id, pid = info.pid, "killed a worker that was silent");
            self.ended.push(Ended { id: id.to_owned(), exit: SILENT.to_owned() });
        }
        // One elsewhere may come back; then there is one too many.
        self.hands.remove(id);
    }

    fn exited(&mut self, id: &str, exit: Exit) {
        let Some(kept) = self.hands.remove(id) else { return };
        let was_silent = kept.leaving == Leaving::Killed { was_silent: true };
        let how = if was_silent { SILENT.to_owned() } else { exit.how };
        let supervisor = &self.of.name;
        tracing::info!(supervisor, worker = id, how, "a worker has ended");
        self.ended.push(Ended { id: id.to_owned(), exit: how.clone() });
        let lived = kept.since.elapsed();
        let why = kept.info.as_ref().and_then(|info| info.note.as_deref());
        if was_silent {
            self.last = Some((how, exit.stderr)); // it was counted when it was killed
            return;
        }
        if matches!(kept.leaving, Leaving::Killed { .. }) || (exit.is_success && why == Some(TOLD))
        {
            return;
        }
        if exit.is_success && lived > STABLE {
            return; // it reached a limit
        }
        if lived > STABLE {
            self.failures = 0;
        }
        self.failed(how, exit.stderr);
    }

    fn failed(&mut self, how: String, stderr: String) {
        self.last = Some((how, stderr));
        self.start_at = Instant::now() + RESTART.delay(self.failures, fastrand::f64());
        self.failures = self.failures.saturating_add(1);
        if self.failures == CRASH_LOOP {
            let supervisor = &self.of.name;
            tracing::error!(
                supervisor,
                failures = self.failures,
                "workers end soon after their start"
            );
        }
    }

    /// Has all end, and kills those that do not in time. How many.
    async fn drain(&mut self, end: Option<Instant>) -> usize {
        while !self.done.is_empty() {
            let Ok(Ok((told, asked))) = timeout(PATIENCE, self.report()).await else { break };
            self.obey(told.commands, asked);
        }
        self.draining = true;
        let patience = || {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            left.unwrap_or(PATIENCE).min(PATIENCE)
        };
        let mut killed = 0;
        while !self.hands.is_empty() {
            if end.is_some_and(|end| Instant::now() >= end) {
                let ids: Vec<String> = self.hands.keys().cloned().collect();
                killed += ids.len();
                for id in &ids {
                    self.kill(id, false);
                }
                break;
            }
            if let Ok(Ok((told, _))) = timeout(patience(), self.report()).await {
                self.observe(told.workers);
            }
            // Who has said goodbye cannot be told anything any more.
            let stay = |kept: &Kept| kept.leaving == Leaving::No && kept.left.is_none();
            let stay = self.hands.iter().filter(|(_, kept)| stay(kept));
            let mut stay: Vec<String> = stay.map(|(id, _)| id.clone()).collect();
            let stuck = self.hands.iter().filter(|(_, kept)| kept.has_to_go());
            for id in stuck.map(|(id, _)| id.clone()).collect::<Vec<_>>() {
                self.kill(&id, true);
            }
            stay.extend(self.unanswered(Duration::ZERO));
            // Those that did not hear it are told again.
            let _ = timeout(patience(), self.dismiss(stay)).await;
            let next = Instant::now() + self.period.min(Duration::from_millis(200));
            tokio::select! {
                biased;
                Some((id, exit)) = self.exits.recv() => self.exited(&id, exit),
                () = sleep_until(end.map_or(next, |end| next.min(end))) => {}
            }
        }
        // Nobody is left behind; not even as a process that nobody asked how it ended.
        loop {
            // First of all, as a child is not done before there is room for its exit.
            while let Ok((id, exit)) = self.exits.try_recv() {
                self.exited(&id, exit);
            }
            if self.children.join_next().await.is_none() {
                break;
            }
        }
        // One that was never heard, as another process has its name, has nothing to take back.
        if let Ok(Ok(_)) = timeout(PATIENCE, self.report()).await {
            let _ = timeout(PATIENCE, self.of.control.retire(&self.of.name)).await;
        }
        killed
    }
}

/// A process of this machine that was started as this worker of this supervisor, for sure.
fn is_ours(info: &WorkerInfo, here: &str, supervisor: &str) -> bool {
    let words = child::words(supervisor, &info.id);
    let is_it = |birth: &str| host::is_it(info.pid, birth, &words);
    info.host == here && info.birth.as_deref().is_some_and(is_it)
}

/// A process of this machine that has ended.
fn is_gone(info: &WorkerInfo, here: &str) -> bool {
    info.host == here && host::is_gone(info.pid, info.birth.as_deref())
}
