//! The workers of one process, under one id: they register, beat, and obey.
//!
//! ```text
//!            pause                  stop, a limit, nobody left to work for
//!  running ◄───────► paused ──────────┐
//!     └──────────────────────────────►├──► stopping ──what runs has ended──► gone
//!            resume
//! ```
//!
//! A command is obeyed once, however often it comes, and only within its time, which counts from before it was asked for. Whoever was
//! started by a supervisor ends when nothing is heard of that, or of the server, for the grace time.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use vedetta_core::{Backoff, Command, explain};
use vedetta_jobs::Working;

use crate::bus::{CommandId, Order, Target};
use crate::control::{Control, ControlError};
use crate::host::memory;
use crate::obeyed::Obeyed;
use crate::roster::Status;
use crate::wire::{Beat, Handed, Heard, SlotsUsed};

/// Why it ends, if somebody wants it to.
pub(crate) const TOLD: &str = "it was told to stop";
/// How long a worker whose supervisor is gone goes on, unless said otherwise.
const GRACE: Duration = Duration::from_secs(30);
/// An answer that takes longer does not come.
const PATIENCE: Duration = Duration::from_secs(5);
/// The clock cannot count to the end of time.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);
/// While it stops it is looked at this often.
const STOPPING: Duration = Duration::from_millis(20);
/// When nobody can be told how jobs ended, this is tried for so long.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Beats that failed are tried again.
const AGAIN: Backoff =
    Backoff { first: Duration::from_millis(50), most: Duration::from_secs(1), jitter: 0.2 };

/// Why a crew ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It was told to, by a command or by its process.
    Told,
    /// It had more memory than it may.
    Memory,
    /// Its supervisor or its server is gone.
    Orphaned,
}

/// Workers at work, and what they are to the fleet.
pub struct Crew {
    id: String,
    control: Arc<dyn Control>,
    workers: Vec<Working>,
    memory: Option<u64>,
    grace: Duration,
    beat: Beat,
    period: Duration,
    done: Vec<CommandId>,
    obeyed: Obeyed,
    ending: Option<Ending>,
    /// What runs longer is ended.
    deadline: Option<Instant>,
    aborted: usize,
    /// When the server last answered.
    answered: Instant,
    failures: u32,
}

impl Crew {
    /// These workers, under an id that nobody else has.
    pub fn new(id: impl Into<String>, control: Arc<dyn Control>, workers: Vec<Working>) -> Self {
        let queues = workers.iter().map(|worker| worker.queue().to_owned()).collect();
        Self {
            id: id.into(),
            control,
            workers,
            memory: None,
            grace: GRACE,
            beat: Beat::of_this_process(queues),
            period: PATIENCE,
            done: Vec::new(),
            obeyed: Obeyed::default(),
            ending: None,
            deadline: None,
            aborted: 0,
            answered: Instant::now(),
            failures: 0,
        }
    }

    /// The same, and this supervisor has started it: without it, it ends after the grace time.
    #[must_use]
    pub fn supervisor(mut self, name: Option<String>, grace: Duration) -> Self {
        (self.beat.supervisor, self.grace) = (name, grace);
        self
    }

    /// The same, and it ends when this process has more memory.
    #[must_use]
    pub fn memory(mut self, limit: Option<u64>) -> Self {
        self.memory = limit;
        self
    }

    /// Works until it is told to stop, by a command or by `stop`, or has to: then it finishes what runs, after
    /// `stop` within `grace`. Why, and how many jobs had to be ended.
    pub async fn run(mut self, stop: CancellationToken, grace: Duration) -> (Ending, usize) {
        let bell = Arc::new(Notify::new());
        let _listening = self.listen(Arc::clone(&bell));
        let mut beat_at = Instant::now();
        loop {
            if self.ending.is_some() && self.has_ended().await {
                break;
            }
            let look_at = if self.ending.is_some() { Instant::now() + STOPPING } else { beat_at };
            tokio::select! {
                () = stop.cancelled(), if self.deadline.is_none() => {
                    self.deadline = Some(Instant::now() + grace.min(LONGEST));
                    if self.ending.is_none() {
                        self.end(Ending::Told, TOLD).await;
                    }
                    beat_at = Instant::now();
                }
                () = bell.notified() => beat_at = self.say().await,
                () = sleep_until(look_at.min(beat_at)) => if Instant::now() >= beat_at {
                    beat_at = self.say().await;
                },
            }
        }
        self.leave().await;
        (self.ending.unwrap_or(Ending::Told), self.aborted)
    }

    /// Hears of commands as they come, until dropped.
    fn listen(&self, bell: Arc<Notify>) -> AbortOnDropHandle<()> {
        let (control, target) = (Arc::clone(&self.control), Target::worker(&self.id));
        AbortOnDropHandle::new(tokio::spawn(async move {
            let mut failures = 0;
            loop {
                let opened = std::sync::atomic::AtomicBool::new(false);
                let tell = || {
                    opened.store(true, std::sync::atomic::Ordering::Relaxed);
                    bell.notify_one();
                };
                let _ = control.listen(&target, &tell).await;
                failures = if opened.into_inner() { 0 } else { failures + 1 };
                sleep(AGAIN.delay(failures, fastrand::f64())).await;
            }
        }))
    }

    /// Beats, and obeys what it hears. When to beat next.
    async fn say(&mut self) -> Instant {
        self.beat.slots = self.slots();
        self.beat.running =
            self.workers.iter().flat_map(Working::running).map(|job| job.0).collect();
        self.beat.done.clone_from(&self.done);
        let asked = Instant::now();
        let heard = timeout(PATIENCE, self.control.beat(&self.id, &self.beat)).await;
        let heard = heard.unwrap_or_else(|late| Err(ControlError::Unavailable(late.into())));
        let heard = match heard {
            Ok(heard) => heard,
            Err(error) => return self.unheard(&error).await,
        };
        if self.failures > 0 {
            tracing::info!(worker = self.id, "the server answers again");
        }
        (self.answered, self.failures) = (asked, 0);
        self.done.clear();
        self.period = Duration::from_millis(heard.beat_ms.clamp(10, 60_000));
        self.obey(heard, asked).await;
        self.look_at_memory().await;
        // What it did is told at once.
        if self.done.is_empty() { asked + self.period } else { Instant::now() }
    }

    async fn unheard(&mut self, error: &ControlError) -> Instant {
        if self.failures == 0 {
            tracing::warn!(worker = self.id, error = explain(error), "no answer to a beat");
        }
        let wait = AGAIN.delay(self.failures, fastrand::f64()).min(self.period);
        self.failures = self.failures.saturating_add(1);
        let is_alone = self.answered.elapsed() > self.grace;
        if self.beat.supervisor.is_some() && is_alone && self.ending.is_none() {
            self.end(Ending::Orphaned, "its server is gone").await;
        }
        Instant::now() + wait
    }

    async fn obey(&mut self, heard: Heard, asked: Instant) {
        for Handed { id, command, expires_ms } in heard.commands {
            // That it was done is told again: who hands it out again does not know it.
            if self.obeyed.has(&id) {
                tracing::warn!(worker = self.id, %command, "a command came again");
                self.done.push(id);
                continue;
            }
            // Whatever held it up: what is over is not obeyed.
            if asked.elapsed() >= Duration::from_millis(expires_ms) {
                tracing::warn!(worker = self.id, %command, "a command came too late");
                continue;
            }
            match command {
                Order::Stop if self.ending.is_none() => {
                    self.end(Ending::Told, TOLD).await;
                }
                Order::Pause if self.ending.is_none() => {
                    self.beat.state = Status::Paused;
                    self.tell_all(Command::Pause).await;
                }
                Order::Resume if self.ending.is_none() => {
                    self.beat.state = Status::Running;
                    self.tell_all(Command::Resume).await;
                }
                Order::Stop => {}
                // What is not done is not told to be.
                Order::Pause | Order::Resume => {
                    tracing::warn!(worker = self.id, %command, "it is stopping already");
                    continue;
                }
                Order::Start { .. } | Order::Restart | Order::Terminate => continue,
            }
            tracing::info!(worker = self.id, %command, "obeyed a command");
            self.obeyed.add(id.clone());
            self.done.push(id);
        }
        let seen = heard.supervisor_seen_ms.map(Duration::from_millis);
        if seen.is_some_and(|seen| seen > self.grace) && self.ending.is_none() {
            self.end(Ending::Orphaned, "its supervisor is gone").await;
        }
    }

    async fn look_at_memory(&mut self) {
        let (Some(limit), Some(has)) = (self.memory, memory()) else { return };
        if has > limit && self.ending.is_none() {
            self.end(Ending::Memory, &format!("it has {has} bytes of memory and may have {limit}"))
                .await;
        }
    }

    async fn end(&mut self, ending: Ending, why: &str) {
        tracing::info!(worker = self.id, why, "stopping: what runs may finish");
        self.ending = Some(ending);
        self.beat.state = Status::Stopping;
        self.beat.note = Some(why.to_owned());
        self.tell_all(Command::Stop).await;
    }

    async fn tell_all(&self, command: Command) {
        for worker in &self.workers {
            worker.tell(command).await;
        }
    }

    /// Whether all workers have.
    async fn has_ended(&mut self) -> bool {
        let is_alone = self.failures > 0 && self.answered.elapsed() > self.grace;
        let is_idle = || self.workers.iter().all(|worker| worker.running().is_empty());
        let grace = match self.deadline {
            Some(deadline) if Instant::now() >= deadline => Some(Duration::ZERO),
            // Nobody is there to be told how jobs ended: they come back when their leases lapse.
            _ if is_alone && is_idle() => Some(LAST_WORDS),
            _ => None,
        };
        if let Some(grace) = grace {
            let workers = std::mem::take(&mut self.workers);
            let stopping = workers.into_iter().map(|worker| worker.stop(grace));
            self.aborted += futures_util::future::join_all(stopping).await.iter().sum::<usize>();
            return true;
        }
        self.workers.iter().all(|worker| worker.status().has_ended)
    }

    fn slots(&self) -> SlotsUsed {
        // Those that share their slots tell the same of them.
        let slots = self.workers.first().map(Working::slots).unwrap_or_default();
        SlotsUsed { used: slots.0, capacity: slots.1 }
    }

    async fn leave(&mut self) {
        // Why it ends may not be known yet.
        if self.failures == 0 {
            self.say().await;
        }
        let left = timeout(PATIENCE, self.control.leave(&self.id)).await;
        if !matches!(left, Ok(Ok(()))) {
            tracing::debug!(worker = self.id, "nobody was told that it is gone");
        }
    }
}
