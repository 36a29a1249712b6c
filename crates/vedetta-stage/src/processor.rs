//! Reads the queues, runs the stages, saves what they changed.
//!
//! Each stage has a [`Puller`] of its own, and so has the system stage, whose work is to ask the others.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::num::NonZeroU32;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::{Mutex, broadcast, watch};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use vedetta_core::queue::{End, Handed, Kept, Settled, Taken, Woken};
use vedetta_core::{Failure, Handler, Queue, QueueError, RunEvent, explain};
use vedetta_runtime::{Ear, PullStatus, Puller, Pulling};

use crate::alarm::Alarm;
use crate::desk::{Desk, Handing};
use crate::entity::{BoxError, Entity, Limits, Stage, Version, Visit};
use crate::record::{Claim, Fate, Lane, Records, SYSTEM, StageError, Tally, Unsettled};
use crate::shards::Share;

/// Entities the system stage asks about at once.
const SYSTEM_PARALLEL: NonZeroU32 = NonZeroU32::new(512).unwrap();

/// Nobody waits longer.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// What was handed over is begun within this part of a lease, or given back.
const FRESH: u32 = 10;

/// A stage that alone wants an entity waits for up to this part of the spread.
const ALONE: u32 = 20;

/// What is due within that is waited for exactly. For longer an entity is not kept once it is read: somebody
/// may save it.
const SOON: Duration = Duration::from_millis(10);

/// Records claimed at once, at most.
const CLAIM: u32 = 1024;

/// Events a slow reader of [`Processing::events`] may be behind before it misses some.
const EVENTS_KEPT: usize = 1024;

/// How often what was counted is written down.
const NOTE_EVERY: Duration = Duration::from_secs(1);

/// The tables of entities that a processor works on, with their queues.
pub trait Backend<E: Entity>: Clone + Send + Sync + 'static {
    /// The queues.
    type Records: Records;

    /// The queues.
    fn records(&self) -> &Self::Records;

    /// What the entities are called.
    fn name(&self) -> &str;

    /// Into how many shards the entities are divided.
    fn shards(&self) -> u16;

    /// Reads those of these ids that exist, in any order.
    fn load(&self, ids: Vec<E::Id>) -> impl Future<Output = Result<Vec<E>, StageError>> + Send;

    /// Settles records of a lane: of each what it saves, where it is to go next and what becomes of the
    /// record, or nothing of it.
    fn settle(
        &self,
        lane: Lane,
        endings: Vec<Ending<E>>,
    ) -> impl Future<Output = Result<Answer, StageError>> + Send;
}

/// How the work on a record ended.
#[derive(Debug, Clone)]
pub struct Ending<E> {
    /// Whose.
    pub claim: Claim,
    /// What is to become of the record.
    pub fate: Fate,
    /// An entity to save, if it is still of this version.
    pub saves: Option<(E, Version)>,
    /// Where the entity is to go.
    pub visits: Vec<Going>,
}

/// Where an entity is to go.
#[derive(Debug, Clone, Copy)]
pub struct Going {
    /// To this queue.
    pub lane: Lane,
    /// After so long.
    pub after: Duration,
    /// If it is not there yet and the backend can do that, it is at once held under this token for so long.
    pub hold: Option<(i64, Duration)>,
}

/// What came of some [`Ending`]s.
#[derive(Debug)]
pub struct Answer {
    /// What it says of each is in their order.
    pub saved: Vec<Result<Saved, Unsettled>>,
    /// The tokens of those that are [held](Going::hold).
    pub held: HashSet<i64>,
}

/// What came of an [`Ending`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saved {
    /// This became of the record.
    Settled(Settled),
    /// Somebody else saved the entity meanwhile: nothing is saved, and the record is due as it was.
    Conflict,
}

/// Builds what works on the entities of one backend.
pub struct Processor<E, B> {
    backend: B,
    stages: Vec<SharedStage<E>>,
    lease: Duration,
    poll: Duration,
    spread: Duration,
    share: Share,
}

impl<E: Entity, B: Backend<E>> Processor<E, B> {
    /// Without stages.
    pub fn new(backend: B) -> Self {
        let all: Arc<[u16]> = (0..backend.shards().max(1)).collect();
        let (_, all) = watch::channel(all);
        Self {
            backend,
            stages: Vec::new(),
            lease: Duration::from_secs(30),
            poll: Duration::from_secs(1),
            spread: Duration::from_millis(10),
            share: all.into(),
        }
    }

    /// With one more stage.
    ///
    /// # Panics
    ///
    /// If there is one of that name, or its name is that of the system stage.
    #[must_use]
    pub fn stage(mut self, stage: impl Stage<E>) -> Self {
        let name = Stage::name(&stage);
        assert!(name != SYSTEM, "a stage may not be called {SYSTEM:?}: that one asks the others");
        assert!(self.stages.iter().all(|other| other.name() != name), "two stages called {name:?}");
        self.stages.push(Arc::new(stage));
        self
    }

    /// How long a record is held before others may have it, if its holder does not say that it goes on.
    /// 30 s unless said otherwise.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// The queues are looked at so often even if nothing is heard of them. 1 s unless said otherwise.
    #[must_use]
    pub fn poll(mut self, poll: Duration) -> Self {
        self.poll = poll;
        self
    }

    /// An entity reaches each stage that wants it after a random delay: up to this if there are several, since begun
    /// together they would often save over each other, and have to begin again; up to a twentieth of it if there is one.
    /// 10 ms unless said otherwise; with zero there are no delays.
    #[must_use]
    pub fn spread(mut self, spread: Duration) -> Self {
        self.spread = spread;
        self
    }

    /// Works only on the shards that this says, as it changes: those that are this process's of
    /// [`Shards`](crate::Shards), or others by somebody else's choice. All of them unless said otherwise.
    #[must_use]
    pub fn shards(mut self, share: impl Into<Share>) -> Self {
        self.share = share.into();
        self
    }

    /// Begins to work.
    pub async fn start(self) -> Result<Processing, StageError> {
        let (records, name) = (self.backend.records(), self.backend.name());
        let shards = self.backend.shards();
        self.share.fits(shards)?;
        let owned = self.share.owned;
        let lane = async |stage: &str| {
            let lane = records.lane(name, stage).await?;
            records.reshard(lane, shards).await?;
            Ok::<_, StageError>(lane)
        };
        let mut stages = Vec::with_capacity(self.stages.len());
        for stage in self.stages {
            stages.push((lane(stage.name()).await?, stage));
        }
        let stages: Arc<[_]> = stages.into();
        let system = Limits { parallel: SYSTEM_PARALLEL, ..Limits::default() };
        let work = Work::System { stages: Arc::clone(&stages), spread: self.spread };
        let mut lanes = vec![(lane(SYSTEM).await?, SYSTEM.to_owned(), system, work)];
        for (lane, stage) in stages.iter() {
            let (name, limits) = (stage.name().to_owned(), stage.limits());
            lanes.push((*lane, name, limits, Work::Stage(Arc::clone(stage))));
        }
        let desks = stages.iter().map(|(lane, _)| (*lane, Arc::new(Desk::default()))).collect();
        let desks: Arc<HashMap<Lane, Arc<Desk<E>>>> = Arc::new(desks);
        let events = broadcast::Sender::new(EVENTS_KEPT);
        let pulls = lanes.into_iter().map(|(lane, name, limits, work)| {
            let counters = Arc::new(Counters::default());
            let desk: Option<Arc<Desk<E>>> = desks.get(&lane).cloned();
            let queue = StageQueue {
                backend: self.backend.clone(),
                lane,
                stage: name.as_str().into(),
                events: events.clone(),
                limits,
                lease: self.lease,
                poll: self.poll.min(LONGEST),
                owned: owned.clone(),
                changed: Mutex::new(owned.clone()),
                ear: Ear::default(),
                counters: Arc::clone(&counters),
                settled: parking_lot::Mutex::default(),
                is_rung: AtomicBool::new(true),
                rest_until: parking_lot::Mutex::default(),
                alarm: desk.as_ref().map_or_else(Arc::default, |desk| desk.alarm()),
                desk,
                desks: Arc::clone(&desks),
            };
            let puller = Puller {
                limits: vedetta_runtime::Limits {
                    capacity: limits.parallel,
                    timeout: Some(limits.timeout),
                },
                lease: self.lease,
                beat: self.lease / 3,
                poll: self.poll,
            };
            Pull { stage: name, lane, pulling: puller.start(queue, work), counters }
        });
        let pulls: Vec<Pull> = pulls.collect();
        let counters = pulls.iter().map(|pull| (pull.lane, Arc::clone(&pull.counters))).collect();
        let stop = CancellationToken::new();
        let noting = tokio::spawn(note(records.clone(), counters, stop.clone()));
        let noting = AbortOnDropHandle::new(noting);
        let leave = CancellationToken::new();
        let leaving = tokio::spawn(leave_desks(records.clone(), desks, leave.clone()));
        let leaving = AbortOnDropHandle::new(leaving);
        Ok(Processing { pulls, events, noting, stop, leaving, leave })
    }
}

struct Pull {
    stage: String,
    lane: Lane,
    pulling: Pulling,
    counters: Arc<Counters>,
}

/// What is not in the [`Tally`] of a queue yet, and what was ever in it.
#[derive(Debug, Default)]
struct Counters {
    done: AtomicU64,
    failed: AtomicU64,
    conflicts: AtomicU64,
    all_conflicts: AtomicU64,
}

impl Counters {
    fn count(&self, end: &End<impl Sized>, saved: &Result<Saved, Unsettled>) {
        let counter = match (saved, end) {
            (Ok(Saved::Settled(Settled::Stale)) | Err(Unsettled::Lost(_)), _)
            | (Ok(_), End::Released) => return,
            (Ok(Saved::Conflict), _) => {
                self.all_conflicts.fetch_add(1, Ordering::Relaxed);
                &self.conflicts
            }
            (Err(Unsettled::Refused(_)), _) | (_, End::Failed(_)) => &self.failed,
            (_, End::Done(_)) => &self.done,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    fn take(&self) -> Tally {
        let take = |counter: &AtomicU64| counter.swap(0, Ordering::Relaxed);
        Tally {
            done: take(&self.done),
            failed: take(&self.failed),
            conflicts: take(&self.conflicts),
        }
    }

    fn give_back(&self, tally: Tally) {
        self.done.fetch_add(tally.done, Ordering::Relaxed);
        self.failed.fetch_add(tally.failed, Ordering::Relaxed);
        self.conflicts.fetch_add(tally.conflicts, Ordering::Relaxed);
    }
}

/// Writes down what was counted, every second, until `stop` and once after it.
async fn note(
    records: impl Records,
    counters: Vec<(Lane, Arc<Counters>)>,
    stop: CancellationToken,
) {
    loop {
        let is_last = stop.run_until_cancelled(sleep(NOTE_EVERY)).await.is_none();
        for (lane, counters) in &counters {
            let tally = counters.take();
            if tally != Tally::default() && records.note(*lane, tally).await.is_err() {
                counters.give_back(tally);
            }
        }
        if is_last {
            return;
        }
    }
}

async fn leave_desks<E>(
    records: impl Records,
    desks: Arc<HashMap<Lane, Arc<Desk<E>>>>,
    leave: CancellationToken,
) {
    leave.cancelled().await;
    for (lane, desk) in desks.iter() {
        give_back(&records, *lane, desk.close()).await;
    }
}

/// If this fails they come back when their leases are over.
async fn give_back(records: &impl Records, lane: Lane, claims: Vec<Claim>) {
    if !claims.is_empty() {
        let released: Vec<_> = claims.into_iter().map(|claim| (claim, Fate::Released)).collect();
        let _ = records.settle(lane, &released).await;
    }
}

/// A processor at work. Dropped, it ends at once, and what it held comes back when its leases lapse.
pub struct Processing {
    pulls: Vec<Pull>,
    events: broadcast::Sender<StageEvent>,
    noting: AbortOnDropHandle<()>,
    stop: CancellationToken,
    /// Gives back what was handed over and not begun.
    leaving: AbortOnDropHandle<()>,
    leave: CancellationToken,
}

/// What one stage is at, in this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageStatus {
    /// Which.
    pub stage: String,
    /// What it is at.
    pub pull: PullStatus,
    /// Updates that were not saved because somebody else had saved meanwhile.
    pub conflicts: u64,
}

/// What happens to a record of a stage, in this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageEvent {
    /// Which stage.
    pub stage: Arc<str>,
    /// Which entity, by its id.
    pub id: Arc<str>,
    /// What.
    pub event: RunEvent,
}

impl Processing {
    /// What happens from now on. A reader that is more than 1,024 events behind misses some and is told.
    pub fn events(&self) -> broadcast::Receiver<StageEvent> {
        self.events.subscribe()
    }

    /// What each stage is at, the system stage first.
    pub fn status(&self) -> Vec<StageStatus> {
        let status = |pull: &Pull| StageStatus {
            stage: pull.stage.clone(),
            pull: pull.pulling.status(),
            conflicts: pull.counters.all_conflicts.load(Ordering::Relaxed),
        };
        self.pulls.iter().map(status).collect()
    }

    /// Takes nothing more, lets what runs end within `grace`, and settles it. How many had to be ended.
    pub async fn stop(self, grace: Duration) -> usize {
        let stops = self.pulls.into_iter().map(|pull| pull.pulling.stop(grace));
        let stops = futures_util::future::join_all(stops);
        self.leave.cancel();
        // A database that is away does not keep us.
        let (ended, _) = tokio::join!(stops, tokio::time::timeout(NOTE_EVERY, self.leaving));
        let ended = ended.into_iter().sum();
        self.stop.cancel();
        let _ = tokio::time::timeout(NOTE_EVERY, self.noting).await;
        ended
    }
}

/// A stage, whatever its type.
trait AnyStage<E>: Send + Sync {
    fn name(&self) -> &str;
    fn limits(&self) -> Limits;
    fn should_process_now(&self, entity: &E) -> bool;
    fn process(self: Arc<Self>, entity: E) -> Processed<E>;
}

type SharedStage<E> = Arc<dyn AnyStage<E>>;
type Processed<E> = Pin<Box<dyn Future<Output = Result<Visit<E>, BoxError>> + Send>>;

impl<E: Entity, S: Stage<E>> AnyStage<E> for S {
    fn name(&self) -> &str {
        Stage::name(self)
    }

    fn limits(&self) -> Limits {
        Stage::limits(self)
    }

    fn should_process_now(&self, entity: &E) -> bool {
        Stage::should_process_now(self, entity)
    }

    fn process(self: Arc<Self>, entity: E) -> Processed<E> {
        Box::pin(async move { Stage::process(&*self, entity).await })
    }
}

/// What there is of an entity whose record was claimed.
enum Item<E> {
    Entity(E),
    /// There is none any more.
    Missing,
    /// It could not be read.
    Unreadable(String),
}

/// What came of it.
enum Outcome<E> {
    Visited(Visit<E>, Version),
    /// These stages want it, each after so long.
    Sorted {
        entity: E,
        visits: Vec<(Lane, Duration)>,
    },
    Missing,
}

/// What is done with what is taken from a lane.
enum Work<E> {
    System { stages: Arc<[(Lane, SharedStage<E>)]>, spread: Duration },
    Stage(SharedStage<E>),
}

impl<E> Clone for Work<E> {
    fn clone(&self) -> Self {
        match self {
            Self::System { stages, spread } => {
                Self::System { stages: Arc::clone(stages), spread: *spread }
            }
            Self::Stage(stage) => Self::Stage(Arc::clone(stage)),
        }
    }
}

impl<E: Entity> Handler<Item<E>> for Work<E> {
    type Outcome = Outcome<E>;

    fn handle(
        &self,
        item: Item<E>,
    ) -> impl Future<Output = Result<Outcome<E>, Failure>> + Send + 'static {
        let work = self.clone();
        async move {
            let entity = match item {
                Item::Entity(entity) => entity,
                Item::Missing => return Ok(Outcome::Missing),
                Item::Unreadable(why) => return Err(Failure::Error(why)),
            };
            match work {
                Self::System { stages, spread } => {
                    let wanted =
                        stages.iter().filter(|(_, stage)| stage.should_process_now(&entity));
                    let wanted: Vec<Lane> = wanted.map(|(lane, _)| *lane).collect();
                    // Nobody to collide with, but one that still runs on the version before.
                    let most = if wanted.len() == 1 { spread / ALONE } else { spread };
                    let visits = wanted.into_iter().map(|lane| (lane, random(most))).collect();
                    Ok(Outcome::Sorted { entity, visits })
                }
                Self::Stage(stage) => {
                    let read = entity.version();
                    match stage.process(entity).await {
                        Ok(visit) => Ok(Outcome::Visited(visit, read)),
                        Err(error) => Err(Failure::Error(explain(error.as_ref()))),
                    }
                }
            }
        }
    }
}

/// The records of one stage as work to be pulled.
struct StageQueue<E, B> {
    backend: B,
    lane: Lane,
    stage: Arc<str>,
    events: broadcast::Sender<StageEvent>,
    limits: Limits,
    lease: Duration,
    poll: Duration,
    owned: watch::Receiver<Arc<[u16]>>,
    /// The same, for who waits for a change.
    changed: Mutex<watch::Receiver<Arc<[u16]>>>,
    /// What was heard of the queue.
    ear: Ear,
    counters: Arc<Counters>,
    /// What became of those of a batch that were settled before the database was lost, by their tokens: with the
    /// others they are told again.
    settled: parking_lot::Mutex<HashMap<i64, Settled>>,
    /// Something may be due that the last claim did not find.
    is_rung: AtomicBool,
    /// That claim found nothing more that is due before.
    rest_until: parking_lot::Mutex<Option<Instant>>,
    /// Rings when something is due soon: in the queue or on the desk.
    alarm: Arc<Alarm>,
    /// Of this stage; the system stage has none.
    desk: Option<Arc<Desk<E>>>,
    /// Of all stages here.
    desks: Arc<HashMap<Lane, Arc<Desk<E>>>>,
}

impl<E: Entity, B: Backend<E>> StageQueue<E, B> {
    /// The entities of claims, each as far as it can be read.
    async fn load(&self, claims: &[Claim]) -> Result<Vec<Item<E>>, StageError> {
        let mut items: HashMap<Arc<str>, Item<E>> = HashMap::with_capacity(claims.len());
        let mut ids = Vec::with_capacity(claims.len());
        for claim in claims {
            match parse::<E>(&claim.id) {
                Ok(id) => ids.push(id),
                Err(why) => {
                    items.insert(Arc::clone(&claim.id), Item::Unreadable(why));
                }
            }
        }
        let found = caught(async {
            let found = self.backend.load(ids).await?;
            Ok(found
                .into_iter()
                .map(|entity| (Arc::from(entity.id().to_string()), entity))
                .collect())
        });
        let found: Result<Vec<(Arc<str>, E)>, _> = found.await;
        match found {
            Ok(found) => {
                items.extend(found.into_iter().map(|(id, entity)| (id, Item::Entity(entity))));
            }
            Err(error) if error.is_transient() => return Err(error),
            // One that cannot be read must not hold up the others.
            Err(_) => {
                for claim in claims {
                    let Ok(id) = parse::<E>(&claim.id) else { continue };
                    let item = match caught(self.backend.load(vec![id])).await {
                        Ok(mut found) => found.pop().map_or(Item::Missing, Item::Entity),
                        Err(error) if error.is_transient() => return Err(error),
                        Err(error) => Item::Unreadable(explain(&error)),
                    };
                    items.insert(Arc::clone(&claim.id), item);
                }
            }
        }
        let items = claims.iter().map(|claim| items.remove(&claim.id).unwrap_or(Item::Missing));
        Ok(items.collect())
    }

    /// Nothing is due for so long, as far as is known.
    fn rest(&self) -> Option<Duration> {
        let until = self.rest_until.lock().filter(|_| !self.is_rung.load(Ordering::Relaxed))?;
        Some(until.saturating_duration_since(Instant::now()))
    }

    /// What was settled may be due again before.
    fn comes_back(&self, saved: &[Result<Saved, Unsettled>]) {
        let again = saved.iter().filter_map(|saved| match saved {
            Ok(Saved::Settled(Settled::Again(after))) => Some(*after),
            Ok(Saved::Conflict) => Some(Duration::ZERO),
            _ => None,
        });
        if let (Some(again), Some(until)) = (again.min(), self.rest_until.lock().as_mut()) {
            *until = (*until).min(Instant::now() + again.min(LONGEST));
        }
    }

    /// Under which token and for how long an entity is to be held for a stage here, if it goes there soon: long
    /// before it would be given back.
    fn is_handed(&self, lane: Lane, after: Duration) -> Option<(i64, Duration)> {
        let is_soon = after <= SOON.min(self.lease / FRESH / 2);
        let has_room = is_soon && self.desks.get(&lane).is_some_and(|desk| desk.reserve());
        // As long as a lease, from when it is taken.
        has_room.then(|| (fastrand::i64(..), self.lease + self.lease / FRESH))
    }

    /// Where an entity goes.
    fn going(&self, visits: &[(Lane, Duration)]) -> Vec<Going> {
        let is_alone = visits.len() == 1;
        let going = visits.iter().map(|&(lane, after)| {
            // Of several that wait, each is to read what the one before it saved.
            let may_be_handed = is_alone || after.is_zero();
            let hold = may_be_handed.then(|| self.is_handed(lane, after)).flatten();
            Going { lane, after, hold }
        });
        going.collect()
    }

    /// Hands over what is held. An entity that was saved since it was read here is given back, to be read again: who
    /// saves it writes to its record of the system stage, which is then not gone. The stage that saved it may be the
    /// one that was wanted, and would run a second time on what it has already seen.
    async fn hand_over(
        &self,
        ended: &[&(Claim, End<Outcome<E>>)],
        going: Vec<Vec<Going>>,
        answer: &Answer,
        since: Instant,
    ) {
        let (held, now) = (&answer.held, Instant::now());
        for (((claim, end), going), saved) in ended.iter().zip(going).zip(&answer.saved) {
            let End::Done(Outcome::Sorted { entity, .. }) = end else { continue };
            let is_fresh = matches!(saved, Ok(Saved::Settled(Settled::Gone)));
            for Going { lane, after, hold } in going {
                let Some(token) = hold.map(|(token, _)| token).filter(|token| held.contains(token))
                else {
                    continue;
                };
                let claim = Claim { id: Arc::clone(&claim.id), token, failures: 0 };
                let handed = match cloned(entity) {
                    Ok(entity) if is_fresh => {
                        let due = now + after;
                        self.desks[&lane].hand(Handing { claim, entity, since, due })
                    }
                    // Read from the table, it need not be cloned.
                    Ok(_) | Err(_) => Err(claim),
                };
                if let Err(claim) = handed {
                    give_back(self.backend.records(), lane, vec![claim]).await;
                }
            }
        }
    }

    /// Settles what it can, and notes what became of it.
    async fn settle_left(
        &self,
        ended: &[&(Claim, End<Outcome<E>>)],
        settled: &mut HashMap<i64, Settled>,
    ) -> Result<(), QueueError> {
        let endings: Vec<_> = ended.iter().map(|(claim, end)| self.ending(claim, end)).collect();
        let going: Vec<_> = endings.iter().map(|ending| ending.visits.clone()).collect();
        let since = Instant::now();
        let answer = self.backend.settle(self.lane, endings).await;
        let answer = answer.map_err(|error| failed("settling records", error))?;
        self.comes_back(&answer.saved);
        if !answer.held.is_empty() {
            self.hand_over(ended, going, &answer, since).await;
        }
        let (mut refused, mut lost) = (Vec::new(), None);
        for ((claim, end), saved) in ended.iter().zip(answer.saved) {
            self.counters.count(end, &saved);
            let end = match saved {
                Ok(Saved::Settled(settled)) => settled,
                Ok(Saved::Conflict) => Settled::Again(Duration::ZERO),
                Err(Unsettled::Refused(why)) => {
                    let why = format!("it could not be saved: {why}");
                    refused.push((claim.clone(), self.failed(claim, why)));
                    continue;
                }
                Err(Unsettled::Lost(why)) => {
                    lost = Some(why);
                    continue;
                }
            };
            settled.insert(claim.token, end);
        }
        if !refused.is_empty() {
            let answers = self.backend.records().settle(self.lane, &refused).await;
            let answers = answers.map_err(|error| failed("settling records", error))?;
            settled.extend(refused.iter().map(|(claim, _)| claim.token).zip(answers));
        }
        lost.map_or(Ok(()), |why| Err(QueueError::new("settling records", Some(why.into()))))
    }

    fn failed(&self, claim: &Claim, error: String) -> Fate {
        let backoff = &self.limits.backoff;
        Fate::Failed {
            after: backoff.delay(claim.failures, fastrand::f64()),
            not_before: backoff.first,
            error,
            park: claim.failures.saturating_add(1) >= self.limits.tries.get(),
        }
    }

    fn ending(&self, claim: &Claim, end: &End<Outcome<E>>) -> Ending<E> {
        let fate = |again: &Option<Duration>| again.map_or(Fate::Gone, Fate::Visit);
        let (fate, saves, visits) = match end {
            End::Done(Outcome::Visited(Visit::Untouched { again }, _)) => {
                (fate(again), None, Vec::new())
            }
            End::Done(Outcome::Visited(Visit::Updated { entity, again }, read)) => {
                match cloned(entity) {
                    Ok(entity) => (fate(again), Some((entity, *read)), Vec::new()),
                    Err(why) => (self.failed(claim, why.to_string()), None, Vec::new()),
                }
            }
            End::Done(Outcome::Sorted { visits, .. }) => (Fate::Gone, None, self.going(visits)),
            End::Done(Outcome::Missing) => (Fate::Gone, None, Vec::new()),
            End::Failed(failure) => (self.failed(claim, failure.to_string()), None, Vec::new()),
            End::Released => (Fate::Released, None, Vec::new()),
        };
        Ending { claim: claim.clone(), fate, saves, visits }
    }
}

impl<E: Entity, B: Backend<E>> Queue for StageQueue<E, B> {
    type Claim = Claim;
    type Item = Item<E>;
    type Outcome = Outcome<E>;

    async fn take(&self, room: u32) -> Result<Taken<Claim, Item<E>>, QueueError> {
        let records = self.backend.records();
        let mut free = room;
        if let Some(desk) = &self.desk {
            let found = desk.take(Instant::now(), room.min(CLAIM), self.lease / FRESH);
            give_back(records, self.lane, found.old).await;
            let next = found.next.map(|due| due.saturating_duration_since(Instant::now()));
            if !found.due.is_empty() {
                let taken = u32::try_from(found.due.len()).unwrap_or(room);
                desk.has_room(room.saturating_sub(taken));
                let items = found.due.into_iter().map(|Handing { claim, entity, .. }| {
                    let item = Item::Entity(entity);
                    Handed { claim, item, cost: 1 }
                });
                let rest = self.rest().map(|rest| next.map_or(rest, |next| next.min(rest)));
                return Ok(Taken { items: items.collect(), rest });
            }
            desk.has_room(0);
            // What will be due in a moment has its place.
            free = room.saturating_sub(found.left);
            if free == 0 {
                return Ok(Taken { items: Vec::new(), rest: next });
            }
        }
        self.is_rung.store(false, Ordering::Relaxed);
        let shards = Arc::clone(&self.owned.borrow());
        let claimed = records.claim(self.lane, &shards, free.min(CLAIM), self.lease).await;
        let claimed = claimed.map_err(|error| failed("claiming records", error))?;
        let claimed_at = Instant::now();
        // What was written before a claim is read after it, so nothing written is overlooked.
        let items = match self.load(&claimed.claims).await {
            Ok(items) => items,
            Err(error) => {
                let released: Vec<_> =
                    claimed.claims.into_iter().map(|claim| (claim, Fate::Released)).collect();
                // If this fails, too, they come back when the lease is over.
                let _ = records.settle(self.lane, &released).await;
                return Err(failed("reading entities", error));
            }
        };
        if let (Some(desk), Some(_)) = (&self.desk, claimed.rest) {
            let taken = u32::try_from(claimed.claims.len()).unwrap_or(room);
            desk.has_room(room.saturating_sub(taken));
        }
        // So often the queue is looked at, whatever is handed over.
        *self.rest_until.lock() = claimed.rest.map(|rest| claimed_at + rest.min(self.poll));
        if let Some(rest) = claimed.rest.filter(|rest| !rest.is_zero() && *rest <= SOON) {
            self.alarm.no_later_than(claimed_at + rest);
        }
        let handed = claimed.claims.into_iter().zip(items);
        let items = handed.map(|(claim, item)| Handed { claim, item, cost: 1 }).collect();
        Ok(Taken { items, rest: claimed.rest })
    }

    async fn keep(&self, held: &[&Claim]) -> Result<Vec<Kept>, QueueError> {
        let kept = self.backend.records().keep(self.lane, held, self.lease).await;
        kept.map_err(|error| failed("prolonging leases", error))
    }

    async fn settle(&self, ended: &[(Claim, End<Outcome<E>>)]) -> Result<Vec<Settled>, QueueError> {
        let mut settled = std::mem::take(&mut *self.settled.lock());
        let left = ended.iter().filter(|(claim, _)| !settled.contains_key(&claim.token));
        let left: Vec<_> = left.collect();
        if let Err(error) = self.settle_left(&left, &mut settled).await {
            *self.settled.lock() = settled;
            return Err(error);
        }
        Ok(ended.iter().map(|(claim, _)| settled[&claim.token]).collect())
    }

    async fn woken(&self) -> Woken {
        let resharded = async {
            // Once nobody can change it, nothing changes.
            if self.changed.lock().await.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = self.backend.records().woken(self.lane, &self.ear) => {}
            () = resharded => {}
            () = self.alarm.rung() => return Woken::More,
        }
        self.is_rung.store(true, Ordering::Relaxed);
        Woken::More
    }

    fn failures(&self, claim: &Claim) -> u32 {
        claim.failures
    }

    fn told(&self, claim: &Claim, event: RunEvent) {
        if self.events.receiver_count() > 0 {
            let (stage, id) = (Arc::clone(&self.stage), Arc::clone(&claim.id));
            // Nobody has to listen.
            let _ = self.events.send(StageEvent { stage, id, event });
        }
    }
}

/// A random delay, up to this.
fn random(most: Duration) -> Duration {
    most.mul_f64(fastrand::f64())
}

/// An id of text, or why it is none.
fn parse<E: Entity>(id: &str) -> Result<E::Id, String> {
    let parsed =
        std::panic::catch_unwind(|| id.parse::<E::Id>().map_err(|error| error.to_string()));
    let parsed = parsed.unwrap_or_else(|panic| Err(Failure::of_panic(panic.as_ref()).to_string()));
    parsed.map_err(|why| format!("the id {id:?} cannot be read: {why}"))
}

/// A copy of an entity, or how its type panicked over it.
fn cloned<E: Clone>(entity: &E) -> Result<E, Failure> {
    let copy = std::panic::catch_unwind(AssertUnwindSafe(|| entity.clone()));
    copy.map_err(|panic| Failure::of_panic(panic.as_ref()))
}

/// A panic in a user's table is a failure of what it was about, and not the end of the stage.
pub(crate) async fn caught<T>(
    work: impl Future<Output = Result<T, StageError>> + Send,
) -> Result<T, StageError> {
    AssertUnwindSafe(work).catch_unwind().await.unwrap_or_else(|panic| {
        let text = Failure::of_panic(panic.as_ref());
        Err(StageError::Failed(format!("in the table {text}").into()))
    })
}

fn failed(what: &str, error: StageError) -> QueueError {
    QueueError::new(what, Some(Box::new(error) as BoxError))
}
