//! Everything at once, and a restart in the middle of it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use testing::soon;
use tokio::task::JoinSet;
use vedetta_core::JobState::{Done, Running, Waiting};
use vedetta_core::queue::{Kept, Settled};
use vedetta_jobs::{
    Claim, Fate, Filter, Given, JobId, Jobs as _, JobsError, Ledger, Mode, NewJob, Note, Wanted,
    When,
};

use super::{ALL, Ask as _, AskLedger as _, HOUR, LedgerWorld, QUEUE, dead, done, wanted};

pub async fn a_restart_changes_nothing<W: LedgerWorld>() {
    let world = W::new().await;
    let noon = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
    world.add_many(4).await;
    let given = world.take(ALL).await;
    world.finish(given[0].claim).await;
    world.settle(given[1].claim, dead()).await;
    world.jobs().cancel(given[2].claim.id).await.unwrap();
    let (held, note) = (given[3].claim, Note { progress: Some(0.5), ..Note::default() });
    assert_eq!(world.note(held, note).await, Kept::Ours);
    let keyed = NewJob::new("pack").unique("order-7").when(When::After(HOUR));
    let waits = world.add(keyed.clone()).await;
    let due = world.add_many(1).await[0];
    world.add(NewJob::new("send").queue("mails")).await;
    world.jobs().set_mode("mails", Mode::Paused).await.unwrap();
    world.jobs().set_mode("old", Mode::Draining).await.unwrap();
    let ticked = world.jobs().tick("report", noon, &NewJob::new("report").queue("reports")).await;
    ticked.unwrap().unwrap();
    let told = async |world: &W| {
        let mut queues = world.jobs().queues().await.unwrap();
        queues.sort_by(|a, b| a.name.cmp(&b.name));
        queues.iter_mut().for_each(|queue| queue.oldest = queue.oldest.map(|_| Duration::ZERO));
        format!("{:#?} {queues:#?}", world.all(&Filter::default()).await)
    };
    let before = told(&world).await;

    let world = world.reopened().await;
    assert_eq!(told(&world).await, before);
    let again = world.jobs().enqueue(&[keyed]).await.unwrap()[0];
    assert!(!again.is_new && again.id == waits, "its key is known");
    assert_eq!(world.take_one().await.claim.id, due);
    assert_eq!(world.keep(held).await, Kept::Ours, "the lease goes on");
    world.finish(held).await;
    let mails = Wanted { queue: "mails", ..wanted(ALL, HOUR) };
    assert!(world.jobs().take(&mails).await.unwrap().jobs.is_empty(), "it is still paused");
    let refused = world.jobs().enqueue(&[NewJob::new("pack").queue("old")]).await;
    assert!(matches!(refused, Err(JobsError::Draining(_))), "{refused:?}");
    assert_eq!(world.jobs().last_tick("report").await.unwrap(), Some(noon));
    let ticked = world.jobs().tick("report", noon, &NewJob::new("report")).await.unwrap();
    assert_eq!(ticked, None, "that was before");
    let new = world.add(NewJob::new("pack").when(When::After(HOUR))).await;
    assert!(world.all(&Filter::default()).await.iter().all(|job| job.id <= new), "no id twice");
}

/// For how long jobs are taken in the storm; some are then forgotten.
const LEASE: Duration = Duration::from_millis(500);
const JOBS: usize = 2_000;

/// Who holds what, as far as is known for sure.
#[derive(Default)]
struct Storm {
    held: Mutex<HashMap<JobId, (Claim, Instant)>>,
    /// When each was called off last.
    cancelled: Mutex<HashMap<JobId, Instant>>,
    done: Mutex<HashSet<JobId>>,
    is_over: AtomicBool,
}

impl Storm {
    /// Notes what was handed out by a call that began at `asked`, if it is ours for sure: then nobody
    /// else's lease may go on for sure.
    fn take(&self, given: &[Given], asked: Instant) {
        let (now, until) = (Instant::now(), asked + LEASE);
        let (mut held, cancelled) = (self.held.lock(), self.cancelled.lock());
        for Given { claim, .. } in given {
            if until <= now || cancelled.get(&claim.id).is_some_and(|at| *at >= asked) {
                continue;
            }
            let former = held.insert(claim.id, (*claim, until));
            let early = former.map(|(_, until)| until.saturating_duration_since(now));
            // Clocks are read to milliseconds.
            assert!(
                early < Some(Duration::from_millis(3)),
                "{claim:?} was held for {early:?} more"
            );
        }
    }

    fn keep(&self, claim: Claim, asked: Instant) {
        if let Some((held, until)) = self.held.lock().get_mut(&claim.id)
            && *held == claim
        {
            *until = asked + LEASE;
        }
    }

    /// It is called off until then.
    fn cancel(&self, id: JobId, until: Instant) {
        self.held.lock().remove(&id);
        self.cancelled.lock().insert(id, until);
    }

    /// From now on it may be handed out again.
    fn let_go(&self, claim: Claim) {
        let mut held = self.held.lock();
        if held.get(&claim.id).is_some_and(|(held, _)| *held == claim) {
            held.remove(&claim.id);
        }
    }
}

/// What becomes of it, if it is not forgotten.
fn fate(given: &Given, random: &mut fastrand::Rng) -> Option<Fate> {
    let after = Duration::from_millis(random.u64(0..20));
    match random.u32(0..100) {
        0..2 => None,
        2..12 if given.attempt < given.max_attempts => Some(super::again(after)),
        2..15 => Some(dead()),
        15..20 => Some(Fate::Snooze(after)),
        20..25 => Some(Fate::Released),
        _ => Some(done()),
    }
}

async fn work(jobs: Arc<impl Ledger>, storm: Arc<Storm>, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let worker = format!("worker-{seed}");
    while !storm.is_over.load(Ordering::Relaxed) {
        let asked = Instant::now();
        let wanted = Wanted { worker: &worker, ..wanted(random.u32(1..=16), LEASE) };
        let given = jobs.take(&wanted).await.unwrap().jobs;
        storm.take(&given, asked);
        if given.is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        }
        if random.u32(0..4) == 0 {
            tokio::time::sleep(Duration::from_millis(random.u64(0..30))).await;
            let asked = Instant::now();
            let note = || Note { progress: Some(0.5), log: "on it\n".into(), ..Note::default() };
            let held: Vec<_> = given.iter().map(|given| (given.claim, note())).collect();
            let kept = jobs.keep(&held).await.unwrap();
            let ours = kept.iter().zip(&held).filter(|(kept, _)| **kept == Kept::Ours);
            ours.for_each(|(_, (claim, _))| storm.keep(*claim, asked));
        }
        let ends: Vec<_> = given
            .iter()
            .filter_map(|given| Some((given.claim, fate(given, &mut random)?)))
            .collect();
        ends.iter().for_each(|(claim, _)| storm.let_go(*claim));
        let settled = loop {
            match jobs.settle(&ends).await {
                Err(error) if error.is_transient() => {} // of two in each other's way one is sent away
                settled => break settled.unwrap(),
            }
        };
        for (settled, (claim, fate)) in settled.iter().zip(&ends) {
            // One that comes back is gone, too, if another of its key waits.
            if *settled == Settled::Gone && matches!(fate, Fate::Done { .. }) {
                assert!(storm.done.lock().insert(claim.id), "{claim:?} was done twice");
            }
        }
    }
}

/// Calls jobs off and has them tried again.
async fn meddle(jobs: Arc<impl Ledger>, storm: Arc<Storm>, ids: Vec<JobId>, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..250 {
        let id = ids[random.usize(..ids.len())];
        if random.bool() {
            storm.cancel(id, Instant::now() + HOUR);
            jobs.cancel(id).await.unwrap();
            storm.cancel(id, Instant::now());
        } else {
            let retried = jobs.retry(id).await;
            assert!(matches!(retried, Ok(_) | Err(JobsError::Invalid(_))), "{retried:?}");
        }
    }
}

pub async fn whatever_happens_each_job_is_over_once_and_runs_once_at_a_time<W: LedgerWorld>() {
    let world = W::new().await;
    let neighbour = world.neighbour().await;
    let storm = Arc::new(Storm::default());
    let mut random = fastrand::Rng::with_seed(7);
    let mut job = || NewJob {
        cost: random.u32(1..=4),
        priority: random.i16(-2..=2),
        run_at: When::After(Duration::from_millis(random.u64(0..100))),
        unique_key: (random.u32(0..10) == 0).then(|| format!("key-{}", random.u32(0..20))),
        ..NewJob::new("pack")
    };
    let mut all = HashSet::new();
    let mut workers = JoinSet::new();
    let mut people = JoinSet::new();
    for seed in 0..8 {
        let jobs = Arc::clone(if seed % 2 == 0 { world.jobs() } else { neighbour.jobs() });
        workers.spawn(work(jobs, Arc::clone(&storm), seed));
    }
    for n in 0..10 {
        let some: Vec<_> = (0..JOBS / 10).map(|_| job()).collect();
        let enqueued = world.jobs().enqueue(&some).await.unwrap();
        let ids: Vec<JobId> = enqueued.iter().map(|enqueued| enqueued.id).collect();
        all.extend(ids.iter().copied());
        if n % 3 == 0 {
            people.spawn(meddle(Arc::clone(neighbour.jobs()), Arc::clone(&storm), ids, n));
        }
    }
    soon("all that is wanted was wanted", people.join_all()).await;
    soon("all is over", async {
        loop {
            let counts = world.counts(QUEUE).await;
            if counts.ready + counts.scheduled + counts.running == 0 {
                return;
            }
            if let Some(ended) = workers.try_join_next() {
                ended.unwrap(); // a worker ends early when something is wrong
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    storm.is_over.store(true, Ordering::Relaxed);
    soon("the workers end", workers.join_all()).await;

    let jobs = world.all(&Filter::default()).await;
    assert_eq!(jobs.iter().map(|job| job.id).collect::<HashSet<_>>(), all, "none is lost");
    let is = |state| jobs.iter().filter(move |job| job.status == state).map(|job| job.id);
    assert_eq!(is(Waiting).count() + is(Running).count(), 0);
    assert_eq!(is(Done).collect::<HashSet<_>>(), *storm.done.lock());
    let counts = world.counts(QUEUE).await;
    assert_eq!(counts.done + counts.dead + counts.cancelled, jobs.len() as u64);
    assert_eq!(counts.done, is(Done).count() as u64);
    assert_eq!((counts.slots, counts.oldest), (0, None));
    let over = |job: &vedetta_jobs::Job| job.ended_at.is_some() && job.attempts <= job.max_attempts;
    assert!(jobs.iter().all(over));
}
