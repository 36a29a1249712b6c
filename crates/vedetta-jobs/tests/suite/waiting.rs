//! When a job is handed out: not before its time, the most urgent first, and one of its key.

use std::time::{Duration, Instant, SystemTime};

use vedetta_core::JobState::{Cancelled, Dead, Running, Waiting};
use vedetta_core::queue::Settled;
use vedetta_jobs::{
    Change, Enqueued, Fate, Filter, JobId, Jobs as _, JobsError, Ledger as _, NewJob,
    PRIORITY_STEP, Wanted, When,
};

use super::{
    ALL, Ask as _, AskLedger as _, HOUR, LedgerWorld, SHORT, about, again, dead, ids, lapse,
    waited, wanted,
};

const NOW: Duration = Duration::ZERO;
const KEY: &str = "order-7";

fn after(delay: Duration) -> NewJob {
    NewJob::new("pack").when(When::After(delay))
}

fn unique(delay: Duration) -> NewJob {
    after(delay).unique(KEY)
}

/// What one of that key becomes.
async fn asked<W: LedgerWorld>(world: &W, job: NewJob) -> Enqueued {
    world.jobs().enqueue(&[job]).await.unwrap()[0]
}

pub async fn a_job_for_later_is_handed_out_then_and_not_before<W: LedgerWorld>() {
    let world = W::new().await;
    let wait = Duration::from_millis(300);
    world
        .enqueue(&[after(HOUR), NewJob::new("pack").when(When::At(SystemTime::now() + HOUR))])
        .await;
    let asked = Instant::now();
    let by_delay = world.add(after(wait)).await;
    let by_time = NewJob::new("pack").when(When::At(SystemTime::now() + 2 * wait));
    let by_time = world.add(by_time).await;
    assert_eq!(world.comes(HOUR).await.claim.id, by_delay);
    assert!(waited(asked, wait), "it was early");
    assert_eq!(world.comes(HOUR).await.claim.id, by_time);
    assert!(waited(asked, 2 * wait), "it was early");
    world.rests().await;
}

pub async fn a_take_says_for_how_long_nothing_is_due<W: LedgerWorld>() {
    let world = W::new().await;
    // A promise may be too short, but never too long; and nobody is to ask all the time.
    let rests = async |most: Duration| {
        let taken = world.taken(ALL, HOUR).await;
        let rest = taken.rest.expect("nothing is due");
        assert!(taken.jobs.is_empty() && rest > NOW && rest <= most, "{rest:?}");
    };
    rests(Duration::MAX).await;
    world.add(NewJob::new("pack").queue("mails")).await;
    rests(Duration::MAX).await;
    world.add_many(1).await;
    let claim = world.taken(ALL, 3 * HOUR).await.jobs[0].claim;
    rests(3 * HOUR).await;
    world.add(after(2 * HOUR)).await;
    rests(2 * HOUR).await;
    let soonest = world.add(after(HOUR)).await;
    rests(HOUR).await;
    world.jobs().cancel(soonest).await.unwrap();
    rests(2 * HOUR).await;
    world.settle(claim, again(HOUR)).await;
    rests(HOUR).await;
}

pub async fn what_is_urgent_goes_first_but_nothing_waits_for_ever<W: LedgerWorld>() {
    let world = W::new().await;
    // By how much of a step each has waited, and its priority; in the order they are to come.
    let order = [
        (36, 0), // older than three steps
        (5, 3),
        (5, 3), // of two alike the first
        (15, 1),
        (21, 0),
        (0, 2),
        (1, 0),
        (0, 0),
        (5, -1),
        (9, -100),
    ];
    let base = SystemTime::now() - PRIORITY_STEP;
    let job = |&(tenths, priority): &(u32, i16)| NewJob {
        priority,
        run_at: When::At(base - PRIORITY_STEP * tenths / 10),
        ..NewJob::new("pack")
    };
    let jobs: Vec<NewJob> = order.iter().map(job).collect();
    // Asked for in another order, of two alike the first one first.
    let shuffled = [9, 1, 4, 7, 2, 0, 3, 8, 5, 6];
    let asked = world.enqueue(&shuffled.map(|n| jobs[n].clone())).await;
    let place = |id: &JobId| shuffled[asked.iter().position(|asked| asked == id).unwrap()];
    let first = ids(&world.take(4).await);
    let rest = ids(&world.take(ALL).await);
    let places: Vec<usize> = first.iter().chain(&rest).map(place).collect();
    assert_eq!(places, (0..order.len()).collect::<Vec<_>>());
}

pub async fn of_one_key_in_a_queue_one_waits_and_the_earliest_time_wins<W: LedgerWorld>() {
    let world = W::new().await;
    for (first, second, stands) in
        [(HOUR, 2 * HOUR, HOUR), (2 * HOUR, HOUR, HOUR), (HOUR, NOW, NOW), (NOW, HOUR, NOW)]
    {
        let id = world.add(unique(first)).await;
        let again = asked(&world, unique(second)).await;
        assert_eq!(again, Enqueued { id, is_new: false });
        let run_at = world.job(id).await.run_at;
        let wait = run_at.duration_since(SystemTime::now()).unwrap_or_default();
        assert!(about(wait, stands), "{wait:?} after {first:?}, {second:?}");
        assert_eq!(ids(&world.take(ALL).await).len(), usize::from(stands == NOW));
        world.jobs().cancel(id).await.unwrap();
    }
    assert_eq!(world.all(&Filter::default()).await.len(), 4);
}

pub async fn a_key_counts_within_a_batch_and_not_beyond_its_queue<W: LedgerWorld>() {
    let world = W::new().await;
    let batch = [
        unique(HOUR),
        NewJob::new("pack").unique("order-8"),
        unique(NOW),
        unique(HOUR).queue("mails"),
        NewJob::new("pack"),
        unique(HOUR),
    ];
    let enqueued = world.jobs().enqueue(&batch).await.unwrap();
    assert_eq!(
        enqueued.iter().map(|enqueued| enqueued.is_new).collect::<Vec<_>>(),
        [true, true, false, true, true, false]
    );
    assert!(enqueued[2].id == enqueued[0].id && enqueued[5].id == enqueued[0].id);
    let mut due = ids(&world.take(ALL).await);
    due.sort_unstable();
    assert_eq!(due, [enqueued[0].id, enqueued[1].id, enqueued[4].id], "the earliest won");
    let mails = Wanted { queue: "mails", ..wanted(ALL, HOUR) };
    assert!(world.jobs().take(&mails).await.unwrap().jobs.is_empty(), "that is another key");
}

pub async fn an_earlier_time_for_a_key_wakes_who_waits<W: LedgerWorld>() {
    let world = W::new().await;
    let id = world.add(unique(HOUR)).await;
    let ear = world.falls_silent().await;
    asked(&world, unique(NOW)).await;
    world.wakes(&ear, vedetta_core::queue::Woken::More).await;
    assert_eq!(world.take_one().await.claim.id, id);
}

pub async fn while_one_of_a_key_runs_another_may_wait<W: LedgerWorld>() {
    let world = W::new().await;
    let first = world.add(unique(NOW)).await;
    let claim = world.take_one().await.claim;
    let second = world.add(unique(NOW)).await;
    assert_ne!(first, second);
    assert!(!asked(&world, unique(NOW)).await.is_new, "but one only");
    world.finish(claim).await;
    assert_eq!(world.take_one().await.claim.id, second);
    world.add(unique(NOW)).await;
}

pub async fn what_is_over_holds_no_key<W: LedgerWorld>() {
    let world = W::new().await;
    let done = world.add(unique(NOW)).await;
    world.finish(world.take_one().await.claim).await;
    let cancelled = world.add(unique(NOW)).await;
    assert_eq!(world.jobs().cancel(cancelled).await.unwrap(), Change::Made);
    let deleted = world.add(unique(NOW)).await;
    assert_eq!(world.jobs().delete(deleted).await.unwrap(), Change::Made);
    let failed = world.add(unique(NOW)).await;
    world.settle(world.take_one().await.claim, dead()).await;
    let last = world.add(unique(NOW)).await;
    assert!([done, cancelled, deleted, failed].iter().all(|id| *id != last));
    assert_eq!(world.take_one().await.claim.id, last);
}

pub async fn when_a_running_job_comes_back_one_of_its_key_waits<W: LedgerWorld>() {
    let world = W::new().await;
    // What becomes of the first, when the second is due, and whether one is due then.
    for (fate, second_due, is_due) in [
        (again(NOW), HOUR, true),
        (again(HOUR), NOW, true),
        (Fate::Snooze(HOUR), NOW, true),
        (Fate::Snooze(NOW), HOUR, true),
        (Fate::Snooze(2 * HOUR), HOUR, false),
        (Fate::Released, HOUR, true),
        (Fate::Released, NOW, true),
    ] {
        let first = world.add(unique(NOW)).await;
        let claim = world.take_one().await.claim;
        let second = world.add(unique(second_due)).await;
        let settled = world.settle(claim, fate.clone()).await;
        assert_ne!(settled, Settled::Stale);
        let states = [world.state(first).await, world.state(second).await];
        let waiting = states.iter().filter(|state| **state == Waiting).count();
        let over = states.iter().filter(|state| state.is_over()).count();
        assert_eq!((waiting, over), (1, 1), "{states:?} after {fate:?}, {second_due:?}");
        let taken = world.take(ALL).await;
        assert_eq!(taken.len(), usize::from(is_due), "the earliest wins: {fate:?}, {second_due:?}");
        for id in [first, second] {
            world.jobs().cancel(id).await.unwrap();
        }
    }
}

pub async fn when_a_lease_of_a_key_lapses_no_two_wait<W: LedgerWorld>() {
    let world = W::new().await;
    let (first, second) = loop {
        let first = world.add(unique(NOW)).await;
        assert_eq!(world.comes(SHORT).await.claim.id, first);
        let second = asked(&world, unique(NOW)).await;
        if second.is_new {
            break (first, second.id);
        }
        world.jobs().cancel(first).await.unwrap(); // it took too long, and has lapsed before
    };
    lapse(SHORT).await;
    let mut taken = Vec::new();
    for _ in 0..2 {
        taken.extend(world.taken(1, HOUR).await.jobs);
        let states = [world.state(first).await, world.state(second).await];
        assert_ne!(states, [Waiting, Waiting]);
        assert!(states.contains(&Running), "one is worked on: {states:?}");
    }
    for given in taken {
        world.finish(given.claim).await;
    }
    world.rests().await;
    for id in [first, second] {
        assert!(world.state(id).await.is_over());
    }
}

pub async fn a_job_is_not_tried_again_while_another_of_its_key_waits<W: LedgerWorld>() {
    let world = W::new().await;
    for state in [Dead, Cancelled] {
        let first = world.add(unique(NOW)).await;
        if state == Dead {
            world.settle(world.take_one().await.claim, dead()).await;
        } else {
            world.jobs().cancel(first).await.unwrap();
        }
        let second = world.add(unique(NOW)).await;
        let refused = world.jobs().retry(first).await;
        assert!(matches!(refused, Err(JobsError::Invalid(_))), "{refused:?}");
        assert_eq!(world.state(first).await, state);
        let given = world.take_one().await;
        assert_eq!(given.claim.id, second);
        assert_eq!(world.jobs().retry(first).await.unwrap(), Change::Made, "that one runs now");
        assert_eq!(world.take_one().await.claim.id, first);
    }
}
