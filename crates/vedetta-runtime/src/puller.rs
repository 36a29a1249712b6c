//! Works a queue: takes what there is room for, runs it, keeps its leases, settles it.
//!
//! ```text
//!  Queue ──take──► waiting ──slots──► running ──► ended ──settle──► Queue
//!    ▲                 └───────── keep ─────────────┘
//! ```
//!
//! One task owns all of it and never waits for a run. Of takes, keeps and settles one each is under way at
//! a time; what ends meanwhile is settled together, so batches grow with the load and a lone end does not
//! wait for company.
//!
//! So that the slots do not idle while a take is under way, as many items are held ahead as can run
//! meanwhile, and as many again are asked for at once: with long runs that is none, and others can have them.
//!
//! Nothing is forgotten before it is settled: an end that the queue could not note is told again. A run
//! whose lease is lost, or could not be prolonged in time, is ended: somebody else may have it by now.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use slab::Slab;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use vedetta_core::queue::{End, Kept, Settled, Taken, Woken};
use vedetta_core::{Backoff, Command, Handler, Moment, Queue, QueueError, RunEvent, Slot, explain};

use crate::LONGEST;
use crate::room::Room;
use crate::runner::{Ended, Limits, Outcome, Runner};

/// The waits between tries to reach a queue. With jitter: the workers of a fleet lose it together.
const RECONNECT: Backoff =
    Backoff { first: Duration::from_millis(50), most: Duration::from_secs(5), jitter: 0.2 };

/// Items held ahead at most, and ends told at once.
const MOST: u32 = 2048;

/// After the grace of a stop, how long ends that the queue has not noted are told again.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// How to work a queue.
#[derive(Debug, Clone, Copy)]
pub struct Puller {
    /// How much may run, and for how long.
    pub limits: Limits,
    /// How long a lease of the queue lasts. What could not be prolonged by its end is given up.
    pub lease: Duration,
    /// Leases are prolonged this often: several times before they end.
    pub beat: Duration,
    /// The queue is looked at after so long without a wake-up: they may be lost.
    pub poll: Duration,
}

/// What became of what was taken, since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flow {
    /// Taken from the queue.
    pub taken: u64,
    /// Ended well.
    pub done: u64,
    /// Failed.
    pub failed: u64,
    /// Of those, set aside.
    pub parked: u64,
    /// Given up, or refused by the queue, because the lease was lost.
    pub stale: u64,
}

/// What a puller is at.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PullStatus {
    /// Runs.
    pub running: usize,
    /// Taken, and not begun.
    pub waiting: usize,
    /// Takes nothing.
    pub paused: bool,
    /// It was told to stop, and has.
    pub has_ended: bool,
    /// What became of the rest.
    pub flow: Flow,
    /// Why the queue cannot be reached.
    pub trouble: Option<String>,
}

/// A puller at work. Dropped, it ends at once, and what it held comes back when its leases lapse.
#[derive(Debug)]
pub struct Pulling {
    task: Option<JoinHandle<usize>>,
    stop: CancellationToken,
    grace: Arc<Mutex<Duration>>,
    commands: mpsc::Sender<Command>,
    status: Arc<Mutex<PullStatus>>,
}

impl Pulling {
    /// Tells it to pause, to resume or to stop, for which it takes as long as what runs does.
    pub async fn tell(&self, command: Command) {
        // One that has ended obeys already.
        let _ = self.commands.send(command).await;
    }

    /// What it is at.
    pub fn status(&self) -> PullStatus {
        let mut status = self.status.lock().clone();
        if self.task.as_ref().is_some_and(JoinHandle::is_finished) && !status.has_ended {
            status.trouble = Some("it broke down".into());
        }
        status
    }

    /// Takes nothing more, gives back what was not begun, lets runs end within `grace`, ends the rest,
    /// and settles it all. How many had to be ended.
    pub async fn stop(mut self, grace: Duration) -> usize {
        *self.grace.lock() = grace.min(LONGEST);
        self.stop.cancel();
        match self.task.take() {
            Some(task) => task.await.unwrap_or(0),
            None => 0,
        }
    }
}

impl Drop for Pulling {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

impl Puller {
    /// Works `queue` with `handler` until stopped.
    pub fn start<Q, H>(self, queue: Q, handler: H) -> Pulling
    where
        Q: Queue,
        H: Handler<Q::Item, Outcome = Q::Outcome>,
    {
        self.start_within(&Room::new(self.limits.capacity), queue, handler)
    }

    /// The same with slots that are shared: with the parts of what costs nothing itself, and with other
    /// pullers. As long as none is free nothing is taken; the last that is may cost more than is free, and
    /// waits for it.
    pub fn start_within<Q, H>(self, room: &Arc<Room>, queue: Q, handler: H) -> Pulling
    where
        Q: Queue,
        H: Handler<Q::Item, Outcome = Q::Outcome>,
    {
        let (commands, inbox) = mpsc::channel(8);
        let (stop, grace) = (CancellationToken::new(), Arc::new(Mutex::new(LONGEST)));
        let status = Arc::new(Mutex::new(PullStatus::default()));
        let task = Task {
            queue: Arc::new(queue),
            handler,
            options: self,
            runner: Runner::within(room, self.limits),
            status: Arc::clone(&status),
            held: Slab::new(),
            costs: Vec::new(),
            load: 0,
            unsettled: 0,
            ended: Vec::new(),
            look: Look::Now,
            trip: Average::default(),
            run_time: Average::default(),
            failures: 0,
            taking: None,
            settling: None,
            settle_at: None,
            settle_failures: 0,
            keeping: None,
            keep_at: Instant::now() + self.beat,
            late_at: Instant::now() + self.lease,
            paused: false,
            flow: Flow::default(),
            trouble: None,
        };
        let task = tokio::spawn(task.run(inbox, stop.clone(), Arc::clone(&grace)));
        Pulling { task: Some(task), stop, grace, commands, status }
    }
}

/// Of the last few times, in seconds.
#[derive(Debug, Clone, Copy, Default)]
struct Average(f64);

impl Average {
    fn add(&mut self, time: Duration) {
        // Nothing takes no time.
        let time = time.as_secs_f64().max(1e-6);
        self.0 = if self.0 == 0.0 { time } else { self.0 + (time - self.0) / 8.0 };
    }
}

/// When to look at the queue next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Look {
    /// As soon as there is room.
    Now,
    /// Nothing is due before.
    At(Instant),
}

/// Something taken and not settled.
struct Holding<C, I> {
    claim: C,
    /// The how manieth it was: its slot is another's once it is settled.
    number: u64,
    cost: u32,
    /// Until then the lease is ours for sure.
    sure_until: Instant,
    /// How long it ran, if it did.
    took: Option<Duration>,
    at: At<I>,
}

/// Where something stands that was taken.
enum At<I> {
    /// It waits for room.
    Waiting(I),
    Running,
    /// It runs still, but its lease is lost.
    Lost,
    /// It ended, and is to be settled.
    Over,
    /// That is under way.
    Settling,
}

type Flight<T> = Pin<Box<dyn Future<Output = T> + Send>>;
type Took<Q> = (Instant, u32, Result<Taken<<Q as Queue>::Claim, <Q as Queue>::Item>, QueueError>);
type Told<Q> = Vec<(<Q as Queue>::Claim, End<<Q as Queue>::Outcome>)>;

struct Settling<Q: Queue> {
    slots: Vec<Slot>,
    told: Told<Q>,
    answer: Result<Vec<Settled>, QueueError>,
}

struct Keeping {
    asked_for: Vec<(Slot, u64)>,
    asked: Instant,
    answer: Result<Vec<Kept>, QueueError>,
}

struct Task<Q: Queue, H> {
    queue: Arc<Q>,
    handler: H,
    options: Puller,
    runner: Runner<Q::Outcome>,
    status: Arc<Mutex<PullStatus>>,
    held: Slab<Holding<Q::Claim, Q::Item>>,
    /// By slot.
    costs: Vec<u32>,
    /// What all that waits or runs costs.
    load: u32,
    /// What ended and the queue has not noted.
    unsettled: usize,
    ended: Vec<(Slot, End<Q::Outcome>)>,
    look: Look,
    /// How long a take takes.
    trip: Average,
    /// And a run.
    run_time: Average,
    /// Takes that failed, since the last that did not.
    failures: u32,
    taking: Option<Flight<Took<Q>>>,
    settling: Option<Flight<Settling<Q>>>,
    /// The last one failed.
    settle_at: Option<Instant>,
    settle_failures: u32,
    keeping: Option<Flight<Keeping>>,
    keep_at: Instant,
    /// Before that, every lease is ours for sure.
    late_at: Instant,
    paused: bool,
    flow: Flow,
    trouble: Option<String>,
}

/// What one turn of the task waits for.
enum Event<Q: Queue> {
    Stop,
    Told(Command),
    Took(Took<Q>),
    Settled(Settling<Q>),
    Kept(Keeping),
    Ended(Option<Ended<Q::Outcome>>),
    Woken(Woken),
    Time,
}

impl<Q, H> Task<Q, H>
where
    Q: Queue,
    H: Handler<Q::Item, Outcome = Q::Outcome>,
{
    /// Runs until stopped. How many runs had to be ended after the grace.
    async fn run(
        mut self,
        mut inbox: mpsc::Receiver<Command>,
        stop: CancellationToken,
        grace: Arc<Mutex<Duration>>,
    ) -> usize {
        let queue = Arc::clone(&self.queue);
        let mut woken = Box::pin(queue.woken());
        loop {
            tokio::task::coop::consume_budget().await;
            let now = Instant::now();
            while let Some(run) = self.runner.try_next(now) {
                self.run_ended(run);
            }
            self.take();
            self.settle();
            self.give_up();
            self.keep();
            let started = self.start_due();
            self.report();
            if started {
                get_in_line().await;
            }
            let event = tokio::select! {
                biased;
                () = stop.cancelled() => Event::Stop,
                Some(command) = inbox.recv() => Event::Told(command),
                what = &mut woken => {
                    woken = Box::pin(queue.woken());
                    Event::Woken(what)
                }
                event = self.next(true) => event,
            };
            match event {
                Event::Stop | Event::Told(Command::Stop) => break,
                Event::Told(command) => self.paused = command == Command::Pause,
                event => self.handle(event),
            }
        }
        drop(woken);
        let status = Arc::clone(&self.status);
        let ended = self.drain(&stop, &grace).await;
        let mut status = status.lock();
        (status.running, status.waiting, status.has_ended) = (0, 0, true);
        ended
    }

    /// The next thing to happen. Cancel safety: a dropped future loses nothing.
    async fn next(&mut self, may_take: bool) -> Event<Q> {
        let look_at = match self.look {
            Look::At(at) if may_take && !self.paused && self.taking.is_none() => Some(at),
            _ => None,
        };
        let now = Instant::now();
        tokio::select! {
            biased;
            took = flight(&mut self.taking) => Event::Took(took),
            settled = flight(&mut self.settling) => Event::Settled(settled),
            kept = flight(&mut self.keeping) => Event::Kept(kept),
            ended = self.runner.next() => Event::Ended(ended),
            () = sleep_until(look_at.unwrap_or(now)), if look_at.is_some() => {
                self.look = Look::Now;
                Event::Time
            }
            () = sleep_until(self.settle_at.unwrap_or(now)), if self.settle_at.is_some() => {
                self.settle_at = None;
                Event::Time
            }
            () = sleep_until(self.keep_at), if self.keeping.is_none() && !self.held.is_empty() => {
                Event::Time
            }
            () = sleep_until(self.late_at), if !self.held.is_empty() => Event::Time,
        }
    }

    /// The one place where state changes.
    fn handle(&mut self, event: Event<Q>) {
        match event {
            Event::Took(took) => self.took(took),
            Event::Settled(settled) => self.settled(settled),
            Event::Kept(kept) => self.kept(kept),
            Event::Ended(Some(run)) => self.run_ended(run),
            Event::Woken(Woken::More) => self.look = Look::Now,
            Event::Woken(Woken::Look) => self.keep_at = Instant::now(),
            Event::Ended(None) | Event::Time | Event::Stop | Event::Told(_) => {}
        }
    }

    /// How much to hold beyond what can run: as much as can end during a take.
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "neither large nor negative"
    )]
    fn ahead(&self) -> u32 {
        let ends = f64::from(self.options.limits.capacity.get()) * self.trip.0 / self.run_time.0;
        // Before the first run has ended it is no number.
        if ends.is_finite() { f64::from(MOST / 2).min(ends) as u32 } else { 0 }
    }

    fn take(&mut self) {
        let ahead = self.ahead();
        let most = self.options.limits.capacity.get().saturating_add(2 * ahead);
        let mut room = most.saturating_sub(self.load);
        if room < ahead {
            return; // a few at a time would cost as much as many
        }
        room = room.saturating_sub(self.parts_beyond());
        if let Some(free) = self.runner.shared_room() {
            // What others have taken is no room for us.
            room = room.min(free.saturating_sub(self.waiting_cost()));
        }
        if self.paused || self.taking.is_some() || self.look != Look::Now || room == 0 {
            return;
        }
        // Nobody knows yet how these ended: with many of them there will not be more.
        if self.unsettled >= MOST as usize {
            return;
        }
        // Until it is told otherwise, or something wakes it meanwhile.
        self.look = Look::At(Instant::now() + LONGEST);
        let queue = Arc::clone(&self.queue);
        self.taking = Some(Box::pin(async move {
            let asked = Instant::now();
            (asked, room, queue.take(room).await)
        }));
    }

    /// What parts hold and wait for, beyond the one for which each that is made of them counts.
    fn parts_beyond(&self) -> u32 {
        let parts = self.runner.parts();
        if parts == 0 {
            return 0;
        }
        let works = |at: &At<Q::Item>| matches!(at, At::Waiting(_) | At::Running | At::Lost);
        let takes_none = |index: usize| self.costs[index] == 0;
        let in_parts =
            self.held.iter().filter(|(index, held)| takes_none(*index) && works(&held.at));
        parts.saturating_sub(u32::try_from(in_parts.count()).unwrap_or(u32::MAX))
    }

    /// What was taken and has not begun.
    fn waiting_cost(&self) -> u32 {
        let waiting = self.held.iter().filter(|(_, held)| matches!(held.at, At::Waiting(_)));
        waiting.map(|(_, held)| held.cost).sum()
    }

    fn took(&mut self, (asked, room, answer): Took<Q>) {
        self.trip.add(asked.elapsed());
        let taken = match answer {
            Ok(taken) => taken,
            Err(error) => {
                let wait = RECONNECT.delay(self.failures, fastrand::f64());
                self.failures = self.failures.saturating_add(1);
                self.look = Look::At(Instant::now() + wait);
                self.in_trouble(&error);
                return;
            }
        };
        (self.failures, self.trouble) = (0, None);
        self.look = match (self.look, taken.rest) {
            (Look::Now, _) | (_, None | Some(Duration::ZERO)) => Look::Now,
            // What was settled meanwhile may be due earlier.
            (Look::At(at), Some(rest)) => {
                Look::At(at.min(Instant::now() + rest.min(self.options.poll)))
            }
        };
        let (capacity, now) = (self.options.limits.capacity.get(), self.runner.now());
        let mut cost_taken = 0_u32;
        let sure_until = asked + self.options.lease;
        self.late_at = self.late_at.min(sure_until);
        for handed in taken.items {
            // What takes no slots itself still counts as one of those that are held.
            let cost = handed.cost.clamp(1, capacity);
            cost_taken = cost_taken.saturating_add(cost);
            self.flow.taken += 1;
            let index = self.held.insert(Holding {
                claim: handed.claim,
                number: self.flow.taken,
                cost,
                sure_until,
                took: None,
                at: At::Waiting(handed.item),
            });
            self.costs.resize(self.costs.len().max(index + 1), 0);
            self.costs[index] = handed.cost;
            self.runner.offer(slot(index), now);
        }
        debug_assert!(
            cost_taken < room.saturating_add(capacity),
            "a queue hands out what was asked for"
        );
        self.load += cost_taken;
    }

    fn start_due(&mut self) -> bool {
        let (held, handler, costs) = (&mut self.held, &self.handler, &self.costs);
        let queue = &self.queue;
        self.runner.start_due(
            |slot| {
                let held = &mut held[index(slot)];
                let At::Waiting(item) = std::mem::replace(&mut held.at, At::Running) else {
                    unreachable!("what starts has waited")
                };
                let failures = queue.failures(&held.claim);
                queue.told(&held.claim, RunEvent::Started { failures });
                Some(handler.handle(item))
            },
            |slot| costs[index(slot)],
        )
    }

    fn run_ended(&mut self, run: Ended<Q::Outcome>) {
        self.run_time.add(run.took);
        self.held[index(run.slot)].took = Some(run.took);
        let end = match run.outcome {
            Outcome::Done(outcome) => End::Done(outcome),
            Outcome::Failed(failure) => End::Failed(failure),
            Outcome::Cancelled => End::Released,
        };
        self.over(run.slot, end);
    }

    /// Nothing is left to do but to settle it.
    fn over(&mut self, slot: Slot, end: End<Q::Outcome>) {
        let holding = &mut self.held[index(slot)];
        self.load -= holding.cost;
        if let At::Lost = holding.at {
            self.flow.stale += 1;
            let holding = self.held.remove(index(slot));
            if holding.took.is_some() {
                self.queue.told(&holding.claim, RunEvent::Cancelled);
            }
        } else {
            holding.at = At::Over;
            self.unsettled += 1;
            self.ended.push((slot, end));
        }
    }

    fn settle(&mut self) {
        if self.ended.is_empty() || self.settling.is_some() || self.settle_at.is_some() {
            return;
        }
        let count = self.ended.len().min(MOST as usize);
        let (slots, told): (Vec<_>, Vec<_>) = self
            .ended
            .drain(..count)
            .map(|(slot, end)| {
                let holding = &mut self.held[index(slot)];
                holding.at = At::Settling;
                (slot, (holding.claim.clone(), end))
            })
            .unzip();
        let queue = Arc::clone(&self.queue);
        self.settling = Some(Box::pin(async move {
            let answer = queue.settle(&told).await;
            Settling { slots, told, answer }
        }));
    }

    fn settled(&mut self, settling: Settling<Q>) {
        match settling.answer {
            Ok(answers) => {
                self.settle_failures = 0;
                let now = self.runner.now();
                debug_assert_eq!(answers.len(), settling.slots.len());
                for ((slot, (_, end)), answer) in
                    settling.slots.into_iter().zip(settling.told).zip(answers)
                {
                    let holding = self.held.remove(index(slot));
                    self.unsettled -= 1;
                    if let Some(took) = holding.took {
                        let event = ending(took, &end, answer, now);
                        self.queue.told(&holding.claim, event);
                    }
                    match (answer, end) {
                        (Settled::Stale, _) => self.flow.stale += 1,
                        (_, End::Done(_)) => self.flow.done += 1,
                        (answer, End::Failed(_)) => {
                            self.flow.failed += 1;
                            self.flow.parked += u64::from(answer == Settled::Parked);
                        }
                        (_, End::Released) => {}
                    }
                    // Sooner than the queue is looked at: it may not wake us for what we did.
                    if let (Settled::Again(after), Look::At(at)) = (answer, self.look) {
                        self.look = Look::At(at.min(Instant::now() + after.min(LONGEST)));
                    }
                }
            }
            Err(error) => {
                let wait = RECONNECT.delay(self.settle_failures, fastrand::f64());
                self.settle_failures = self.settle_failures.saturating_add(1);
                self.settle_at = Some(Instant::now() + wait);
                for slot in &settling.slots {
                    self.held[index(*slot)].at = At::Over;
                }
                let told = settling.slots.into_iter().zip(settling.told);
                self.ended.splice(0..0, told.map(|(slot, (_, end))| (slot, end)));
                // While that was under way nobody kept them.
                self.keep_at = Instant::now();
                self.in_trouble(&error);
            }
        }
    }

    /// Gives up what could not be prolonged in time: it may be somebody else's.
    fn give_up(&mut self) {
        let now = Instant::now();
        if now < self.late_at {
            return;
        }
        let works = |at: &At<Q::Item>| matches!(at, At::Waiting(_) | At::Running);
        let works = self.held.iter().filter(|(_, held)| works(&held.at));
        let (late, sure): (Vec<_>, Vec<_>) =
            works.map(|(index, held)| (index, held.sure_until)).partition(|(_, sure)| *sure <= now);
        let next = sure.into_iter().map(|(_, until)| until).min();
        self.late_at = next.unwrap_or(now + self.options.lease);
        late.into_iter().for_each(|(index, _)| self.lost(slot(index)));
    }

    fn keep(&mut self) {
        let now = Instant::now();
        if self.keeping.is_some() || now < self.keep_at {
            return;
        }
        let lease = self.options.lease;
        self.keep_at = now + self.options.beat;
        // What is being settled is not asked for: it may have to wait for that.
        let ours = |at: &At<Q::Item>| !matches!(at, At::Lost | At::Settling);
        let (asked_for, claims): (Vec<_>, Vec<_>) = self
            .held
            .iter()
            .filter(|(_, held)| ours(&held.at))
            .map(|(index, held)| ((slot(index), held.number), held.claim.clone()))
            .unzip();
        if asked_for.is_empty() {
            return;
        }
        let queue = Arc::clone(&self.queue);
        self.keeping = Some(Box::pin(async move {
            let held: Vec<&Q::Claim> = claims.iter().collect();
            let answer = timeout(lease, queue.keep(&held)).await;
            let answer = answer.unwrap_or_else(|late| {
                Err(QueueError::new("prolonging leases", Some(late.into())))
            });
            Keeping { asked_for, asked: now, answer }
        }));
    }

    fn kept(&mut self, keeping: Keeping) {
        match keeping.answer {
            Ok(answers) => {
                for ((slot, number), kept) in keeping.asked_for.into_iter().zip(answers) {
                    // It may have been settled meanwhile, and its slot given to another.
                    let held = self.held.get_mut(index(slot));
                    let Some(held) = held.filter(|held| held.number == number) else { continue };
                    match kept {
                        Kept::Ours => {
                            held.sure_until =
                                held.sure_until.max(keeping.asked + self.options.lease);
                            if matches!(held.at, At::Running) {
                                self.queue.told(&held.claim, RunEvent::Running);
                            }
                        }
                        Kept::Unknown => {}
                        Kept::Lost => self.lost(slot),
                    }
                }
            }
            Err(error) => self.in_trouble(&error),
        }
    }

    /// The lease is gone, and with it the right to do this. What has ended the queue will refuse.
    fn lost(&mut self, slot: Slot) {
        let held = &mut self.held[index(slot)];
        match held.at {
            At::Waiting(_) => {
                held.at = At::Lost;
                self.runner.cancel(slot);
                self.over(slot, End::Released);
            }
            At::Running => {
                held.at = At::Lost;
                self.runner.cancel(slot);
            }
            At::Lost | At::Over | At::Settling => {}
        }
    }

    fn in_trouble(&mut self, error: &QueueError) {
        let text = explain(error);
        if self.trouble.as_ref() != Some(&text) {
            tracing::warn!(error = text, "the queue cannot be reached; trying again");
            self.trouble = Some(text);
        }
    }

    fn report(&self) {
        let mut status = self.status.lock();
        status.running = self.runner.running();
        status.waiting = self.runner.waiting();
        // What a take brings that is under way still runs.
        status.paused = self.paused && self.taking.is_none();
        status.flow = self.flow;
        if status.trouble != self.trouble {
            status.trouble.clone_from(&self.trouble);
        }
    }

    async fn drain(mut self, stop: &CancellationToken, grace: &Mutex<Duration>) -> usize {
        self.paused = true;
        // What arrives now was not begun, either.
        if let Some(taking) = self.taking.take()
            && let Ok(took) = timeout_at(Instant::now() + LAST_WORDS, taking).await
        {
            self.took(took);
        }
        self.runner.pause(true);
        let unbegun = self.held.iter().filter(|(_, held)| matches!(held.at, At::Waiting(_)));
        let unbegun: Vec<Slot> = unbegun.map(|(index, _)| slot(index)).collect();
        for slot in unbegun {
            self.runner.cancel(slot);
            self.over(slot, End::Released);
        }

        // First the grace; then a last moment, in which runs end and the queue is told.
        let (mut deadline, mut aborted) = (None, None);
        loop {
            self.settle();
            self.give_up();
            self.keep();
            self.report();
            if self.runner.running() == 0 && self.ended.is_empty() && self.settling.is_none() {
                return aborted.unwrap_or(0);
            }
            if deadline.is_none() && stop.is_cancelled() {
                deadline = Some(Instant::now() + *grace.lock());
            }
            tokio::select! {
                biased;
                event = self.next(false) => self.handle(event),
                () = stop.cancelled(), if deadline.is_none() => {}
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    // What the queue was not told comes back to others.
                    if let Some(aborted) = aborted {
                        return aborted;
                    }
                    aborted = Some(self.runner.running());
                    self.runner.abort();
                    deadline = Some(Instant::now() + LAST_WORDS);
                }
            }
        }
    }
}

/// What a run that ended is told as.
fn ending<T>(took: Duration, end: &End<T>, answer: Settled, now: Moment) -> RunEvent {
    match (end, answer) {
        (End::Released, _) | (_, Settled::Stale) => RunEvent::Cancelled,
        (End::Done(_), Settled::Again(after)) => RunEvent::Done { took, again: Some(after) },
        (End::Done(_), _) => RunEvent::Done { took, again: None },
        (End::Failed(why), Settled::Again(after)) => {
            RunEvent::Failed { took, why: why.clone(), again: now + after }
        }
        (End::Failed(why), _) => RunEvent::Dead { took, why: why.clone() },
    }
}

/// Lets what was just started run first, so that ends are found together, not one by one. Unlike tokio's own
/// yielding, it waits where an idle thread finds it: a run that blocks this one does not hold it up.
async fn get_in_line() {
    let mut is_in_line = false;
    poll_fn(|context| {
        if std::mem::replace(&mut is_in_line, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// The answer of a call that is under way, which then no longer is.
async fn flight<T>(flight: &mut Option<Flight<T>>) -> T {
    match flight {
        Some(future) => {
            let done = future.await;
            *flight = None;
            done
        }
        None => std::future::pending().await,
    }
}

fn slot(index: usize) -> Slot {
    Slot(u32::try_from(index).expect("as many as there is room for"))
}

fn index(slot: Slot) -> usize {
    slot.0 as usize
}
