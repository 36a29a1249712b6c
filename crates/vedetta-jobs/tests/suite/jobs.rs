//! Jobs as workers see them. A stream can do all of this.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use testing::soon;
use tokio::task::JoinSet;
use vedetta_core::Trace;
use vedetta_core::queue::{Kept, Settled, Woken};
use vedetta_jobs::{
    Claim, Fate, Given, HIGHEST_PRIORITY, JobId, Jobs as _, JobsError, LARGEST, LONGEST_KEY,
    LONGEST_NAME, MOST_TAGS, NewJob, Note, Wanted,
};

use super::{
    ALL, Ask, HOUR, SHORT, World, again, claims, dead, done, eventually, ids, is_the_same, json,
    lapse, waited, wanted,
};

/// Long enough to see that something is not there yet.
const WHILE: Duration = Duration::from_millis(300);

/// Everything of a job that a worker is given, but for which one it is.
fn content(given: &Given) -> impl PartialEq + std::fmt::Debug {
    let Given {
        claim: _,
        kind,
        payload,
        cost,
        attempt,
        max_attempts,
        timeout,
        tags,
        trace,
        waited: _,
    } = given.clone();
    (kind, payload.get().to_owned(), cost, attempt, max_attempts, timeout, tags, trace)
}

fn of_cost(cost: u32) -> NewJob {
    NewJob { cost, ..NewJob::new("pack") }
}

pub async fn jobs_come_out_as_they_went_in_and_in_order<W: World>() {
    let world = W::new().await;
    let longest = "n".repeat(LONGEST_NAME);
    let jobs = [
        NewJob::new("pack"),
        NewJob {
            kind: "mail/send:v1.2-b".into(),
            payload: json(r#"{ "b":1.0000000000000000001,"a": "Größe ✓ 🦀 \u0000", "b":[ ] }"#),
            cost: i32::MAX.unsigned_abs(),
            max_attempts: 1000,
            timeout: Some(Duration::from_millis(1)),
            unique_key: Some("Zoë's key 🗝 %_".into()),
            tags: vec!["b".into(), "a".into(), longest.clone()],
            trace: Some(Trace::new(u128::MAX - 1, 7, true)),
            ..NewJob::new("")
        },
        NewJob {
            kind: longest.clone(),
            payload: json(r#""""#),
            max_attempts: 1,
            timeout: Some(Duration::from_secs(90 * 86_400)),
            unique_key: Some("k".repeat(LONGEST_KEY)),
            tags: (0..MOST_TAGS).map(|n| format!("tag-{n}")).collect(),
            ..NewJob::new("")
        },
        NewJob { payload: json("-0.0"), cost: 3, ..NewJob::new("ship") }.trace(Trace::new(
            1,
            u64::MAX,
            false,
        )),
    ];
    let mut expected = world.enqueue(&jobs[..1]).await;
    expected.extend(world.enqueue(&jobs[1..]).await);
    assert_eq!(expected.iter().collect::<HashSet<_>>().len(), 4, "{expected:?}");
    let given = world.take(ALL).await;
    assert_eq!(ids(&given), expected);
    for (given, job) in given.iter().zip(jobs) {
        let expected = Given {
            claim: given.claim,
            kind: job.kind,
            payload: job.payload,
            cost: job.cost,
            attempt: 1,
            max_attempts: job.max_attempts,
            timeout: job.timeout,
            tags: job.tags,
            trace: job.trace,
            waited: None,
        };
        assert_eq!(content(given), content(&expected));
    }
}

pub async fn the_largest_payload_comes_out_whole<W: World>() {
    let world = W::new().await;
    let payload = json(&format!("\"{}\"", "x".repeat(LARGEST - 2)));
    let job = NewJob { payload: payload.clone(), ..NewJob::new("pack") };
    world.enqueue(&[job.clone(), job]).await;
    let given = world.take(ALL).await;
    assert_eq!(given.len(), 2);
    assert!(given.iter().all(|given| given.payload.get() == payload.get()), "it is not the same");
}

pub async fn many_are_taken_on_all_or_none<W: World>() {
    let world = W::new().await;
    let good = NewJob::new("pack");
    let too_long = "n".repeat(LONGEST_NAME + 1);
    let invalid = [
        NewJob::new(""),
        NewJob::new("päck"),
        NewJob::new(&*too_long),
        good.clone().queue("no queue"),
        good.clone().unique(""),
        good.clone().unique("k".repeat(LONGEST_KEY + 1)),
        NewJob { payload: json(&format!("\"{}\"", "x".repeat(LARGEST))), ..good.clone() },
        NewJob { cost: 0, ..good.clone() },
        NewJob { cost: i32::MAX.unsigned_abs() + 1, ..good.clone() },
        NewJob { priority: HIGHEST_PRIORITY + 1, ..good.clone() },
        NewJob { priority: -HIGHEST_PRIORITY - 1, ..good.clone() },
        NewJob { max_attempts: 0, ..good.clone() },
        NewJob { timeout: Some(Duration::ZERO), ..good.clone() },
        NewJob { tags: vec![too_long], ..good.clone() },
        NewJob { tags: vec!["t".into(); MOST_TAGS + 1], ..good.clone() },
    ];
    for job in invalid {
        let many = [good.clone(), job, good.clone()];
        let refused = world.jobs().enqueue(&many).await;
        assert!(matches!(refused, Err(JobsError::Invalid(_))), "{refused:?}");
    }
    assert!(world.enqueue(&[]).await.is_empty());
    world.rests().await;
    let many = world.add_many(300).await;
    // A stream begins with some while more are on their way.
    let mut taken = Vec::new();
    eventually("all are taken", async || {
        taken.extend(ids(&world.take(ALL).await));
        taken.len() >= many.len()
    })
    .await;
    assert_eq!(taken, many);
}

pub async fn each_queue_hands_out_its_own<W: World>() {
    let world = W::new().await;
    let names = ["mails", "Mails", "a.b/c:d-e"];
    let jobs = names.map(|name| NewJob::new("pack").queue(name));
    let expected = world.enqueue(&jobs).await;
    world.rests().await;
    for (queue, expected) in names.into_iter().zip(expected) {
        let taken = world.jobs().take(&Wanted { queue, ..wanted(ALL, HOUR) }).await.unwrap();
        assert_eq!(ids(&taken.jobs), [expected], "{queue}");
    }
}

pub async fn a_take_fills_its_room_by_cost_and_the_last_may_overshoot<W: World>() {
    let world = W::new().await;
    let jobs = world.enqueue(&[3, 3, 3, 3, 1, 9, 1, 1].map(of_cost)).await;
    assert!(world.take(0).await.is_empty());
    assert_eq!(ids(&world.take(7).await), jobs[0..3], "6 is less than 7, so there is one more");
    assert_eq!(ids(&world.take(4).await), jobs[3..5], "4 is no less than 4");
    assert_eq!(ids(&world.take(1).await), jobs[5..6]);
    assert_eq!(ids(&world.take(3).await), jobs[6..8], "there is no more");
}

pub async fn what_costs_more_than_the_capacity_counts_as_the_capacity<W: World>() {
    let world = W::new().await;
    let jobs = world.enqueue(&[100, 100, 1, 100, 100].map(of_cost)).await;
    let wanted = Wanted { capacity: 4, ..wanted(9, HOUR) };
    let taken = world.jobs().take(&wanted).await.unwrap().jobs;
    assert_eq!(ids(&taken), jobs[0..3], "4 and 4 and 1");
    let taken = world.jobs().take(&Wanted { room: 5, ..wanted }).await.unwrap().jobs;
    assert_eq!(ids(&taken), jobs[3..5]);
}

pub async fn many_who_take_at_once_share_what_is_due<W: World>() {
    let world = W::new().await;
    let expected: HashSet<JobId> = world.add_many(200).await.into_iter().collect();
    let neighbour = world.neighbour().await;
    let mut takers = JoinSet::new();
    for n in 0..8 {
        let jobs = Arc::clone(if n % 2 == 0 { world.jobs() } else { neighbour.jobs() });
        takers.spawn(async move {
            let mut all = Vec::new();
            loop {
                let worker = format!("worker-{n}");
                let wanted = Wanted { worker: &worker, ..wanted(3, HOUR) };
                let taken = jobs.take(&wanted).await.unwrap();
                if taken.jobs.is_empty() && taken.rest.is_some() {
                    return all;
                }
                all.extend(claims(&taken.jobs));
            }
        });
    }
    let all = soon("all is taken", takers.join_all()).await.concat();
    assert_eq!(all.len(), 200, "each once");
    assert_eq!(all.iter().map(|claim| claim.id).collect::<HashSet<_>>(), expected);
}

pub async fn a_take_says_whether_there_may_be_more<W: World>() {
    let world = W::new().await;
    let rests = |rest: Option<Duration>| rest.is_some_and(|rest| rest > Duration::ZERO);
    assert!(rests(world.taken(ALL, HOUR).await.rest), "there is nothing");
    world.add_many(3).await;
    let some = world.taken(2, HOUR).await;
    assert!(some.jobs.len() == 2 && some.rest.is_none(), "there is one more: {some:?}");
    let last = world.taken(ALL, HOUR).await;
    assert!(last.jobs.len() == 1 && rests(last.rest), "that is all: {last:?}");
}

pub async fn a_kept_job_is_handed_out_to_nobody_else<W: World>() {
    let world = W::new().await;
    let other = world.neighbour().await;
    world.add_many(1).await;
    soon("a lease is kept beyond its first term", async {
        // Where this machine was too slow to keep it in time nothing is proved: once more.
        'again: loop {
            let claim = world.comes(SHORT).await.claim;
            for _ in 0..4 {
                let kept_at = Instant::now();
                let kept = world.keep(claim).await;
                tokio::time::sleep(SHORT / 2).await;
                let taken = other.taken(ALL, SHORT).await.jobs;
                if kept_at.elapsed() >= SHORT || kept == Kept::Lost {
                    continue 'again;
                }
                assert!(taken.is_empty(), "it was kept: {taken:?}");
            }
            return;
        }
    })
    .await;
}

pub async fn a_job_that_is_not_kept_goes_to_another_and_its_first_worker_has_lost_it<W: World>() {
    let world = W::new().await;
    let id = world.add_many(1).await[0];
    let asked = Instant::now();
    let first = world.comes(SHORT).await;
    assert_eq!((first.claim.id, first.attempt), (id, 1));
    let second = world.neighbour().await.comes(SHORT).await;
    assert!(waited(asked, SHORT), "its lease was not over");
    assert_eq!((second.claim.id, second.attempt), (id, 2));
    assert_ne!(first.claim.token, second.claim.token);

    assert_eq!(world.keep(first.claim).await, Kept::Lost);
    for fate in [done(), again(Duration::ZERO), dead(), Fate::Released, Fate::Snooze(HOUR)] {
        assert_eq!(world.settle(first.claim, fate).await, Settled::Stale);
    }
    let third = world.comes(SHORT).await;
    assert_eq!((third.claim.id, third.attempt), (id, 3), "nothing of that counted");
}

pub async fn what_is_done_or_dead_is_not_handed_out_again<W: World>() {
    let world = W::new().await;
    world.add_many(2).await;
    soon("both are settled within their leases", async {
        for fate in [Fate::Done { result: Some(json(r#"{"parcels": 2}"#)) }, dead()] {
            let expected =
                if matches!(fate, Fate::Dead { .. }) { Settled::Parked } else { Settled::Gone };
            while world.settle(world.comes(SHORT).await.claim, fate.clone()).await != expected {}
        }
    })
    .await;
    lapse(SHORT).await;
    assert!(world.taken(ALL, SHORT).await.jobs.is_empty());
}

pub async fn what_is_to_be_tried_again_or_later_comes_back_then_and_not_before<W: World>() {
    let world = W::new().await;
    for fate in [again(WHILE), Fate::Snooze(WHILE)] {
        let id = world.add_many(1).await[0];
        let claim = world.take_one().await.claim;
        let asked = Instant::now();
        let settled = world.settle(claim, fate).await;
        assert!(matches!(settled, Settled::Again(after) if after <= WHILE), "{settled:?}");
        let back = world.comes(HOUR).await;
        assert!(waited(asked, WHILE), "it was early");
        assert_eq!(back.claim.id, id);
        assert_ne!(back.claim.token, claim.token);
        world.finish(back.claim).await;
        world.rests().await;
    }
}

pub async fn what_is_released_comes_back_at_once<W: World>() {
    let world = W::new().await;
    let id = world.add_many(1).await[0];
    let claim = world.take_one().await.claim;
    assert_eq!(world.settle(claim, Fate::Released).await, Settled::Again(Duration::ZERO));
    let back = world.comes(HOUR).await;
    assert_eq!(back.claim.id, id);
    assert_eq!(world.keep(claim).await, Kept::Lost, "that was the time before");
    assert_eq!(world.keep(back.claim).await, Kept::Ours);
}

pub async fn many_are_kept_and_settled_each_by_its_own_claim<W: World>() {
    let world = W::new().await;
    world.add_many(6).await;
    let given = claims(&world.take(ALL).await);
    let nobodys = Claim { id: given[1].id, token: given[1].token ^ 1 << 40 };
    let unknown = Claim { id: JobId(987_654_321), token: given[2].token };
    let ends = [
        (given[0], done()),
        (nobodys, done()),
        (given[2], again(HOUR)),
        (unknown, dead()),
        (given[3], dead()),
        (given[4], Fate::Snooze(HOUR)),
    ];
    let held = ends.each_ref().map(|(claim, _)| (*claim, Note::default()));
    let (ours, lost) = (Kept::Ours, Kept::Lost);
    assert_eq!(world.jobs().keep(&held).await.unwrap(), [ours, lost, ours, lost, ours, ours]);
    let settled = world.jobs().settle(&ends).await.unwrap();
    assert!(
        matches!(
            settled[..],
            [
                Settled::Gone,
                Settled::Stale,
                Settled::Again(_),
                Settled::Stale,
                Settled::Parked,
                Settled::Again(_)
            ]
        ),
        "{settled:?}"
    );
    let kept = world.jobs().keep(&held).await.unwrap();
    assert_eq!(kept, [lost; 6], "what is settled is nobody's");
    assert_eq!(world.keep(given[1]).await, ours, "what was not is still ours");
    assert_eq!(world.keep(given[5]).await, ours);
    assert!(world.jobs().keep(&[]).await.unwrap().is_empty());
    assert!(world.jobs().settle(&[]).await.unwrap().is_empty());
    world.rests().await;
}

pub async fn an_end_that_is_told_twice_does_no_harm<W: World>() {
    let world = W::new().await;
    for fate in [done(), dead(), again(Duration::ZERO), Fate::Released] {
        world.add_many(1).await;
        let claim = world.take_one().await.claim;
        let comes_back = matches!(fate, Fate::Again { .. } | Fate::Released);
        let first = world.settle(claim, fate.clone()).await;
        let second = world.settle(claim, fate.clone()).await;
        let is_forgotten = second == Settled::Stale && !W::REMEMBERS_ENDS;
        assert!(is_the_same(first, second) || is_forgotten, "{second:?} after {first:?}");
        if comes_back {
            let back = world.comes(HOUR).await.claim;
            assert_eq!(world.settle(claim, fate).await, Settled::Stale, "others have it now");
            assert_eq!(world.keep(back).await, Kept::Ours);
            world.finish(back).await;
        }
        world.rests().await;
    }
}

pub async fn everybody_who_waits_is_woken_by_new_jobs<W: World>() {
    let world = W::new().await;
    let neighbour = world.neighbour().await;
    let (ear, other) = (world.falls_silent().await, world.falls_silent().await);
    let theirs = neighbour.falls_silent().await;
    // Nobody listens just now.
    let id = world.add_many(1).await[0];
    tokio::join!(
        world.wakes(&ear, Woken::More),
        world.wakes(&other, Woken::More),
        neighbour.wakes(&theirs, Woken::More)
    );
    assert_eq!(neighbour.take_one().await.claim.id, id, "it is there when they are woken");
}

pub async fn what_is_put_back_wakes_who_waits<W: World>() {
    let world = W::new().await;
    let neighbour = world.neighbour().await;
    world.add_many(1).await;
    let claim = world.take_one().await.claim;
    let theirs = neighbour.falls_silent().await;
    tokio::join!(neighbour.wakes(&theirs, Woken::More), async {
        world.settle(claim, Fate::Released).await;
    });
    neighbour.take_one().await;
}

pub async fn what_happened_before_somebody_waits_wakes_them_too<W: World>() {
    let world = W::new().await;
    for _ in 0..3 {
        let ear = world.falls_silent().await;
        world.add_many(1).await;
        world.wakes(&ear, Woken::More).await;
        world.take_one().await;
    }
}

pub async fn no_job_is_lost_by_a_restart<W: World>() {
    let world = W::new().await;
    let elsewhere = Wanted { queue: "mails", ..wanted(ALL, HOUR) };
    world.add(NewJob::new("send").queue("mails")).await;
    world.finish(world.jobs().take(&elsewhere).await.unwrap().jobs[0].claim).await;
    let mut expected: HashSet<JobId> = world.add_many(5).await.into_iter().collect();
    assert_eq!(world.taken(2, SHORT).await.jobs.len(), 2);

    let world = world.reopened().await;
    expected.extend(world.add_many(1).await);
    soon("those that were handed out come back, too", async {
        while !expected.is_empty() {
            let claim = world.comes(SHORT).await.claim;
            if world.settle(claim, done()).await == Settled::Gone {
                assert!(expected.remove(&claim.id), "{claim:?}");
            }
        }
    })
    .await;
    lapse(SHORT).await;
    assert!(world.taken(ALL, SHORT).await.jobs.is_empty());
    assert!(world.jobs().take(&elsewhere).await.unwrap().jobs.is_empty());
}
