//! Runs each key that is due, once at a time, as far as the slots allow.
//!
//! ```text
//! offer ──► Schedule ──due──► Slots ──fits──► a task of its own ──► Ended
//!              ▲                                                      │
//!              └───────────────── offered meanwhile ◄─────────────────┘
//! ```
//!
//! Whoever owns a runner drives it: [`Runner::start_due`] starts what may run, [`Runner::next`] waits for
//! the next thing to happen. What a start or an end costs does not depend on how many keys wait or run:
//! of those that are due only as many stand before the slots as there are slots.
//!
//! A run is a task, so a panic in it is its failure alone. A slot is held until the task has really ended,
//! also when its time is up or it was cancelled.

use std::future::{Future, poll_fn};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use hashbrown::HashMap;
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep_until, timeout};
use vedetta_core::slots::{Held, Ticket};
use vedetta_core::{Failure, Moment, Schedule, Slot};

use crate::room::{self, Room};

/// How much may run, and for how long.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The cost of everything that runs at once, at most.
    pub capacity: NonZeroU32,
    /// How long one run may take; it is then dropped where it waits.
    pub timeout: Option<Duration>,
}

/// Told of a run that goes on, now and then.
type Beat = Arc<dyn Fn(Slot) + Send + Sync>;

/// A run that ended.
#[derive(Debug)]
pub struct Ended<T> {
    /// Whose it was.
    pub slot: Slot,
    /// How long it took.
    pub took: Duration,
    /// What came of it.
    pub outcome: Outcome<T>,
    /// The key was offered meanwhile, and is due then.
    pub again: Option<Moment>,
}

/// What came of a run.
#[derive(Debug)]
pub enum Outcome<T> {
    /// This.
    Done(T),
    /// It panicked or took too long.
    Failed(Failure),
    /// [`Runner::cancel`] ended it.
    Cancelled,
}

/// Where a key that was taken from the schedule stands.
enum Place {
    Waiting(Ticket),
    Running { abort: AbortHandle, held: Option<Held>, since: Instant },
}

/// Owns the schedule, the slots and every run.
pub struct Runner<T> {
    limits: Limits,
    schedule: Schedule,
    room: room::Place,
    /// How many stand before the slots.
    standing: usize,
    taken: HashMap<Slot, Place>,
    tasks: JoinSet<Result<T, Failure>>,
    of_task: HashMap<Id, Slot>,
    beat: Option<(Duration, Beat)>,
    paused: bool,
    began: Instant,
}

impl<T: Send + 'static> Runner<T> {
    /// Nothing runs yet.
    pub fn new(limits: Limits) -> Self {
        Self::within(&Room::new(limits.capacity), limits)
    }

    /// The same with slots that are shared, with the parts of its runs and with other runners.
    pub fn within(room: &Arc<Room>, limits: Limits) -> Self {
        Self {
            limits,
            schedule: Schedule::new(),
            room: room.join(),
            standing: 0,
            taken: HashMap::new(),
            tasks: JoinSet::new(),
            of_task: HashMap::new(),
            beat: None,
            paused: false,
            began: Instant::now(),
        }
    }

    /// Has `beat` called every `period` by each run that goes on, in its own task.
    #[must_use]
    pub fn heartbeat(
        mut self,
        period: Duration,
        beat: impl Fn(Slot) + Send + Sync + 'static,
    ) -> Self {
        self.beat = Some((period, Arc::new(beat)));
        self
    }

    /// The time, as this runner's schedule counts it.
    pub fn now(&self) -> Moment {
        Moment::reached(self.began.elapsed())
    }

    /// Wants a run at `at`: see [`Schedule::offer`].
    pub fn offer(&mut self, slot: Slot, at: Moment) -> bool {
        self.schedule.offer(slot, at)
    }

    /// Wants the next run at `at`, whatever was wanted before.
    pub fn reschedule(&mut self, slot: Slot, at: Moment) {
        self.schedule.cancel(slot);
        self.schedule.offer(slot, at);
    }

    /// Takes wishes back and ends the run, if there is one: its end still comes from [`Self::next`].
    pub fn cancel(&mut self, slot: Slot) {
        self.schedule.cancel(slot);
        match self.taken.get(&slot) {
            Some(Place::Running { abort, .. }) => abort.abort(),
            Some(Place::Waiting(ticket)) => {
                self.room.withdraw(*ticket, slot);
                self.forget(slot);
            }
            None => {}
        }
    }

    /// Starts nothing while paused; what runs goes on.
    pub fn pause(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Starts all that is due and fits. `work` gives the run of a key and its cost; without it the key is
    /// not run. What costs nothing begins at once: it is made of parts, see [`Room::hold`]. Whether anything
    /// was started.
    pub fn start_due<F>(
        &mut self,
        mut work: impl FnMut(Slot) -> Option<F>,
        cost: impl Fn(Slot) -> u32,
    ) -> bool
    where
        F: Future<Output = Result<T, Failure>> + Send + 'static,
    {
        if self.paused {
            return false;
        }
        let mut started = false;
        // One look at the clock for all that starts together.
        let since = Instant::now();
        let now = Moment::reached(since - self.began);
        loop {
            while let Some((held, slot)) = self.room.start() {
                // Offers made while it stood before the slots are this run.
                self.schedule.cancel(slot);
                if let Some(work) = work(slot) {
                    self.standing -= 1;
                    self.spawn(slot, Some(held), since, work);
                    started = true;
                } else {
                    self.room.release(held);
                    self.forget(slot);
                }
            }
            if self.is_crowded() {
                return started;
            }
            let Some(slot) = self.schedule.take(now) else { return started };
            match cost(slot) {
                // Its parts take slots.
                0 => match work(slot) {
                    Some(work) => {
                        self.spawn(slot, None, since, work);
                        started = true;
                    }
                    None => drop(self.schedule.finish(slot)),
                },
                cost => {
                    let ticket = self.room.wait(cost, slot);
                    self.standing += 1;
                    self.taken.insert(slot, Place::Waiting(ticket));
                }
            }
        }
    }

    /// What stood before the slots does not run.
    fn forget(&mut self, slot: Slot) {
        self.standing -= 1;
        self.taken.remove(&slot);
        self.schedule.finish(slot);
    }

    /// The next run that ends; nothing when instead something became due, or there is room again.
    ///
    /// Cancel safety: a dropped future loses nothing.
    pub async fn next(&mut self) -> Option<Ended<T>> {
        let due = if self.paused || self.is_crowded() { None } else { self.schedule.wake_at() };
        let due = due.map(|at| self.instant(at));
        tokio::select! {
            biased;
            Some(ended) = self.tasks.join_next_with_id() => Some(self.ended(ended, Instant::now())),
            () = sleep_until(due.unwrap_or(self.began)), if due.is_some() => None,
            () = self.room.changed(), if !self.paused => None,
            else => std::future::pending().await,
        }
    }

    /// A run that has ended by `now`, which is one look at the clock for all of them.
    pub fn try_next(&mut self, now: Instant) -> Option<Ended<T>> {
        let ended = self.tasks.try_join_next_with_id()?;
        Some(self.ended(ended, now))
    }

    /// Ends all that runs; the ends still come from [`Self::next`].
    pub fn abort(&mut self) {
        self.tasks.abort_all();
    }

    /// Keys that run.
    pub fn running(&self) -> usize {
        self.tasks.len()
    }

    /// Slots that nothing holds, if there are others who take some; else nobody but the owner has a say.
    pub(crate) fn shared_room(&self) -> Option<u32> {
        self.room.is_shared().then(|| self.room.free())
    }

    /// Slots that parts of runs hold or wait for.
    pub(crate) fn parts(&self) -> u32 {
        self.room.parts()
    }

    /// Keys that wait, for their time or for room.
    pub fn waiting(&self) -> usize {
        self.schedule.len() + self.standing
    }

    /// As many wait for room as there are slots: no point in taking more.
    fn is_crowded(&self) -> bool {
        self.standing >= self.limits.capacity.get() as usize
    }

    fn instant(&self, at: Moment) -> Instant {
        /// Further off than anybody waits; the clock cannot count to the end of time.
        const FAR: Duration = Duration::from_secs(30 * 365 * 24 * 3600);
        self.began + Duration::from_millis(at.as_millis()).min(FAR)
    }

    fn spawn<F>(&mut self, slot: Slot, held: Option<Held>, since: Instant, work: F)
    where
        F: Future<Output = Result<T, Failure>> + Send + 'static,
    {
        let (limit, beat) = (self.limits.timeout, self.beat.clone());
        let abort = self.tasks.spawn(async move {
            let mut work = std::pin::pin!(work);
            // What ends at once needs no clock.
            if let Poll::Ready(done) = poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await {
                return done;
            }
            let work = async {
                match beat {
                    Some((period, beat)) => beating(slot, period, &*beat, work).await,
                    None => work.await,
                }
            };
            match limit {
                None => work.await,
                Some(limit) => match timeout(limit, work).await {
                    Ok(done) => done,
                    Err(_) => Err(Failure::Timeout(limit)),
                },
            }
        });
        self.of_task.insert(abort.id(), slot);
        self.taken.insert(slot, Place::Running { abort, held, since });
    }

    fn ended(
        &mut self,
        ended: Result<(Id, Result<T, Failure>), JoinError>,
        now: Instant,
    ) -> Ended<T> {
        let (id, outcome) = match ended {
            Ok((id, Ok(done))) => (id, Outcome::Done(done)),
            Ok((id, Err(failure))) => (id, Outcome::Failed(failure)),
            Err(error) if error.is_cancelled() => (error.id(), Outcome::Cancelled),
            Err(error) => {
                (error.id(), Outcome::Failed(Failure::of_panic(error.into_panic().as_ref())))
            }
        };
        let slot = self.of_task.remove(&id).expect("every task is known");
        let Some(Place::Running { held, since, .. }) = self.taken.remove(&slot) else {
            unreachable!("what ended was running")
        };
        if let Some(held) = held {
            self.room.release(held);
        }
        Ended { slot, took: now - since, outcome, again: self.schedule.finish(slot) }
    }
}

async fn beating<F: Future + Unpin>(
    slot: Slot,
    period: Duration,
    beat: &(dyn Fn(Slot) + Send + Sync),
    mut work: F,
) -> F::Output {
    let mut beats = interval_at(Instant::now() + period, period);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            done = &mut work => return done,
            _ = beats.tick() => beat(slot),
        }
    }
}
