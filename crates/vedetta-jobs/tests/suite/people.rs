//! What people see of jobs, and do to them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use testing::soon;
use tokio::task::JoinSet;
use vedetta_core::JobState::{self, Cancelled, Dead, Done, Running, Waiting};
use vedetta_core::Trace;
use vedetta_core::queue::{Kept, Settled, Woken};
use vedetta_jobs::{
    Change, Every, Fate, Filter, Housekeeping, JobId, Jobs as _, JobsError, Ledger, Mode, NewJob,
    Periodic, QueueCounts, Retention, Wanted, When,
};

use super::{
    ALL, Ask as _, AskLedger as _, HOUR, LedgerWorld, QUEUE, again, dead, eventually, ids, json,
    wanted,
};

const UNKNOWN: JobId = JobId(987_654_321);

/// A job in each state.
async fn one_in_each_state<W: LedgerWorld>(world: &W) -> [(JobId, JobState); 5] {
    let jobs = world.add_many(4).await;
    let given = world.take(ALL).await;
    let claim = |n: usize| given.iter().find(|given| given.claim.id == jobs[n]).unwrap().claim;
    world.finish(claim(1)).await;
    world.settle(claim(2), dead()).await;
    assert_eq!(world.jobs().cancel(jobs[3]).await.unwrap(), Change::Made);
    let waits = world.add(NewJob::new("pack").when(When::After(HOUR))).await;
    [(waits, Waiting), (jobs[0], Running), (jobs[1], Done), (jobs[2], Dead), (jobs[3], Cancelled)]
}

pub async fn a_job_that_waits_can_be_called_off<W: LedgerWorld>() {
    let world = W::new().await;
    let jobs = world.enqueue(&[NewJob::new("pack"), NewJob::new("pack")]).await;
    assert_eq!(world.neighbour().await.jobs().cancel(jobs[0]).await.unwrap(), Change::Made);
    assert_eq!(world.take_one().await.claim.id, jobs[1]);
    let job = world.job(jobs[0]).await;
    assert_eq!((job.status, job.attempts), (Cancelled, 0));
    assert!(job.ended_at.is_some());
}

pub async fn a_job_that_runs_can_be_called_off_and_its_worker_is_told_at_once<W: LedgerWorld>() {
    let world = W::new().await;
    let neighbour = world.neighbour().await;
    let jobs = world.add_many(2).await;
    let given = world.take(ALL).await;
    let ear = world.falls_silent().await;
    let change = async { neighbour.jobs().cancel(jobs[0]).await.unwrap() };
    let ((), change) = tokio::join!(world.wakes(&ear, Woken::Look), change);
    assert_eq!(change, Change::Made);
    assert_eq!(world.keep(given[0].claim).await, Kept::Lost);
    let before = format!("{:?}", world.job(jobs[0]).await);
    assert_eq!(world.settle(given[0].claim, again(HOUR)).await, Settled::Stale);
    assert_eq!(format!("{:?}", world.job(jobs[0]).await), before);
    assert_eq!(world.state(jobs[0]).await, Cancelled);
    // It is told, too, if it does not wait just then.
    let ear = world.falls_silent().await;
    neighbour.jobs().cancel(jobs[1]).await.unwrap();
    world.wakes(&ear, Woken::Look).await;
    world.rests().await;
}

pub async fn changes_are_made_where_they_can_be<W: LedgerWorld>() {
    let world = W::new().await;
    for (state, cancel, retry, delete) in [
        (Waiting, true, false, true),
        (Running, true, false, false),
        (Done, false, false, true),
        (Dead, false, true, true),
        (Cancelled, false, true, true),
    ] {
        let expected = |can: bool| if can { Change::Made } else { Change::Not(state) };
        let id = async || {
            let all = one_in_each_state(&world).await;
            all.into_iter().find(|(_, is)| *is == state).unwrap().0
        };
        let one = id().await;
        assert_eq!(world.jobs().cancel(one).await.unwrap(), expected(cancel), "{state:?}");
        assert_eq!(world.state(one).await, if cancel { Cancelled } else { state });
        let one = id().await;
        assert_eq!(world.jobs().retry(one).await.unwrap(), expected(retry), "{state:?}");
        assert_eq!(world.state(one).await, if retry { Waiting } else { state });
        let one = id().await;
        assert_eq!(world.jobs().delete(one).await.unwrap(), expected(delete), "{state:?}");
        assert_eq!(world.jobs().job(one).await.unwrap().is_none(), delete);
        if delete {
            assert_eq!(world.jobs().delete(one).await.unwrap(), Change::NoSuch);
        }
    }
    for unknown in [UNKNOWN, JobId(0), JobId(u64::MAX)] {
        assert!(world.jobs().job(unknown).await.unwrap().is_none());
        assert_eq!(world.jobs().cancel(unknown).await.unwrap(), Change::NoSuch);
        assert_eq!(world.jobs().retry(unknown).await.unwrap(), Change::NoSuch);
        assert_eq!(world.jobs().delete(unknown).await.unwrap(), Change::NoSuch);
    }
}

pub async fn what_is_tried_again_by_hand_begins_anew<W: LedgerWorld>() {
    let world = W::new().await;
    for state in [Dead, Cancelled] {
        let trace = Trace::new(5, 7, true);
        let asked = NewJob { max_attempts: 2, ..NewJob::new("pack") }.trace(trace);
        let id = world.add(asked).await;
        world.settle(world.take_one().await.claim, again(Duration::ZERO)).await;
        let last = world.comes(HOUR).await;
        if state == Dead {
            world.settle(last.claim, dead()).await;
        } else {
            world.jobs().cancel(id).await.unwrap();
        }
        assert_eq!(world.job(id).await.attempts, 2);
        let ear = world.falls_silent().await;
        assert_eq!(world.neighbour().await.jobs().retry(id).await.unwrap(), Change::Made);
        world.wakes(&ear, Woken::More).await;
        let job = world.job(id).await;
        assert_eq!((job.status, job.attempts, job.ended_at), (Waiting, 0, None));
        assert_eq!(job.trace, Some(trace), "it is still of the same trace");
        let given = world.take_one().await;
        assert_eq!((given.claim.id, given.attempt, given.trace), (id, 1, Some(trace)));
        assert_eq!(world.settle(last.claim, dead()).await, Settled::Stale, "of its former life");
        world.finish(given.claim).await;
        assert_eq!(world.state(id).await, Done);
    }
}

pub async fn a_list_has_what_all_of_the_filter_fits_newest_first<W: LedgerWorld>() {
    let world = W::new().await;
    let job = |kind: &str, queue: &str, tags: &[&str], payload: &str| NewJob {
        tags: tags.iter().map(|tag| (*tag).to_owned()).collect(),
        payload: json(payload),
        ..NewJob::new(kind).queue(queue)
    };
    let jobs = world
        .enqueue(&[
            job("pack", "a", &["red", "blue"], r#"{"order":"Größe_7%"}"#),
            job("pack", "b", &["red"], r#"{"order":"o'Neil\\"}"#),
            job("ship", "a", &["reddish"], "null").unique("Key-7 ✓"),
            job("ship", "b", &[], r#"{"pack":"x"}"#).when(When::After(HOUR)),
            job("mail", "a", &["blue"], r#""größe""#),
        ])
        .await;
    let wanted = Wanted { queue: "a", ..wanted(1, HOUR) };
    let given = world.jobs().take(&wanted).await.unwrap().jobs.remove(0);
    assert_eq!(given.claim.id, jobs[0]);
    let fate = Fate::Dead { error: "Broken_wheel 100%".into() };
    assert_eq!(world.settle(given.claim, fate).await, Settled::Parked);
    let any = Filter::default;
    let text = |text: &str| Filter { text: Some(text.into()), ..any() };
    let tag = |tag: &str| Filter { tag: Some(tag.into()), ..any() };
    let queue = |queue: &str| Filter { queue: Some(queue.into()), ..any() };
    let kind = |kind: &str| Filter { kind: Some(kind.into()), ..any() };
    let status = |status| Filter { status: Some(status), ..any() };
    let table: Vec<(Filter, &[usize])> = vec![
        (any(), &[4, 3, 2, 1, 0]),
        (status(Waiting), &[4, 3, 2, 1]),
        (status(Dead), &[0]),
        (status(Running), &[]),
        (queue("a"), &[4, 2, 0]),
        (queue("c"), &[]),
        (kind("ship"), &[3, 2]),
        (kind("shi"), &[]),
        (tag("red"), &[1, 0]),
        (tag("blue"), &[4, 0]),
        (tag("re"), &[]),
        (text("Größe"), &[0]),
        (text("größe"), &[4]),
        (text("pack"), &[3, 1, 0]),
        (text("Key-7 ✓"), &[2]),
        (text("Broken_wheel"), &[0]),
        (text("o'Neil"), &[1]),
        (text("\\"), &[1]),
        (text("0%"), &[0]),
        (text("%"), &[0]),
        (text("_"), &[0]),
        (text("e_7"), &[0]),
        (text("*"), &[]),
        (text("x\"' OR 1"), &[]),
        (Filter { queue: Some("a".into()), ..tag("blue") }, &[4, 0]),
        (Filter { status: Some(Waiting), ..text("pack") }, &[3, 1]),
        (Filter { kind: Some("pack".into()), ..text("pack") }, &[1, 0]),
        (Filter { kind: Some("pack".into()), queue: Some("b".into()), ..status(Waiting) }, &[1]),
        (
            Filter {
                status: Some(Dead),
                queue: Some("a".into()),
                kind: Some("pack".into()),
                tag: Some("red".into()),
                text: Some("wheel".into()),
            },
            &[0],
        ),
        (
            Filter {
                status: Some(Dead),
                queue: Some("b".into()),
                kind: Some("pack".into()),
                tag: Some("red".into()),
                text: Some("wheel".into()),
            },
            &[],
        ),
    ];
    for (filter, expected) in table {
        let found: Vec<_> = world.all(&filter).await.iter().map(|job| job.id).collect();
        let expected: Vec<_> = expected.iter().map(|n| jobs[*n]).collect();
        assert_eq!(found, expected, "{filter:?}");
    }
}

pub async fn pages_have_each_job_once_while_others_come_and_go<W: LedgerWorld>() {
    let world = W::new().await;
    let old: BTreeSet<JobId> = world.add_many(250).await.into_iter().collect();
    let given = world.take(200).await;
    let ends: Vec<_> = (0..)
        .zip(&given)
        .filter_map(|(n, given)| match n % 4 {
            0 => Some((given.claim, super::done())),
            1 => Some((given.claim, dead())),
            2 => Some((given.claim, again(Duration::ZERO))),
            _ => None,
        })
        .collect();
    world.jobs().settle(&ends).await.unwrap();
    for given in given.iter().skip(3).step_by(8) {
        world.jobs().cancel(given.claim.id).await.unwrap();
    }
    let settled: Vec<JobId> = ends.iter().map(|(claim, _)| claim.id).collect();

    // What does not move is found under its state; what moves is found in the list of all.
    for status in [None, Some(Done), Some(Dead), Some(Cancelled)] {
        let filter = Filter { status, ..Filter::default() };
        let stays: Vec<JobId> = world.all(&filter).await.iter().map(|job| job.id).rev().collect();
        let expected: Vec<JobId> = match status {
            None => old.iter().copied().collect(),
            Some(Done) => settled.iter().copied().step_by(3).collect(),
            Some(Dead) => settled.iter().copied().skip(1).step_by(3).collect(),
            _ => ids(&given).into_iter().skip(3).step_by(8).collect(),
        };
        assert!(expected.iter().all(|id| stays.contains(id)), "{status:?}");
        let (mut seen, mut before) = (Vec::new(), None);
        loop {
            let page = world.jobs().list(&filter, before, 20).await.unwrap();
            assert!(page.jobs.len() <= 20);
            assert!(page.jobs.iter().all(|job| before.is_none_or(|before| job.id < before)));
            assert!(page.jobs.iter().all(|job| status.is_none_or(|status| status == job.status)));
            seen.extend(page.jobs.iter().map(|job| job.id));
            before = page.next;
            if before.is_none() {
                break;
            }
            world.add_many(2).await;
            for given in world.take(3).await {
                world.finish(given.claim).await;
            }
        }
        assert!(seen.is_sorted_by(|newer, older| newer > older), "newest first, each once");
        assert!(stays.iter().all(|id| seen.contains(id)), "none is missed: {status:?}");
    }
}

pub async fn who_watches_a_job_sees_it_go_forward_only<W: LedgerWorld>() {
    let world = W::new().await;
    let jobs = world.add_many(60).await;
    let place = |state: JobState| [Waiting, Running, Done].iter().position(|is| *is == state);
    let work = async {
        loop {
            let given = world.take(5).await;
            if given.is_empty() {
                return;
            }
            for given in given {
                world.finish(given.claim).await;
            }
        }
    };
    let watch = async {
        for id in &jobs {
            let mut seen = place(Waiting);
            while seen != place(Done) {
                let now = place(world.state(*id).await);
                assert!(now >= seen, "{id}: {now:?} after {seen:?}");
                seen = now;
            }
        }
    };
    let list = async {
        let filter = Filter { status: Some(Waiting), ..Filter::default() };
        let mut waiting = jobs.len();
        while waiting > 0 {
            let now = world.all(&filter).await.len();
            assert!(now <= waiting, "{now} wait after {waiting}");
            waiting = now;
        }
    };
    soon("all is done", async { tokio::join!(work, watch, list) }).await;
}

pub async fn a_search_of_many_goes_on_until_there_is_no_next<W: LedgerWorld>() {
    let world = W::new().await;
    let mut jobs = vec![NewJob::new("pack"); 1_500];
    jobs[3].payload = json(r#""needle""#);
    jobs[4].tags = vec!["needle".into()];
    let asked = world.enqueue(&jobs).await;
    let text = Filter { text: Some("needle".into()), ..Filter::default() };
    let tag = Filter { tag: Some("needle".into()), ..Filter::default() };
    for (filter, n) in [(text, 3), (tag, 4)] {
        let found: Vec<_> = world.all(&filter).await.iter().map(|job| job.id).collect();
        assert_eq!(found, [asked[n]]);
    }
}

pub async fn queues_count_what_they_have_in_each_state<W: LedgerWorld>() {
    let world = W::new().await;
    assert!(world.jobs().queues().await.unwrap().is_empty());
    let costly = NewJob { cost: 5, ..NewJob::new("pack") };
    world.enqueue(&vec![costly; 9]).await;
    let given = world.take(25).await;
    assert_eq!(given.len(), 5);
    world.finish(given[0].claim).await;
    world.settle(given[1].claim, dead()).await;
    world.settle(given[2].claim, again(HOUR)).await;
    world.jobs().cancel(given[3].claim.id).await.unwrap();
    world.add(NewJob::new("pack").when(When::At(SystemTime::now() - HOUR))).await;
    world.enqueue(&vec![NewJob::new("pack").when(When::After(HOUR)); 2]).await;
    world.add(NewJob::new("pack").queue("mails").when(When::After(HOUR))).await;
    world.jobs().set_mode("idle", Mode::Draining).await.unwrap();

    let counts = world.counts(QUEUE).await;
    let oldest = counts.oldest.unwrap();
    assert!(oldest >= HOUR && oldest < 2 * HOUR, "{oldest:?}");
    let expected = QueueCounts {
        name: QUEUE.into(),
        mode: Mode::Open,
        ready: 5,
        scheduled: 3,
        running: 1,
        done: 1,
        dead: 1,
        cancelled: 1,
        oldest: counts.oldest,
        slots: 5,
    };
    assert_eq!(counts, expected);
    let mails = QueueCounts { name: "mails".into(), scheduled: 1, ..QueueCounts::default() };
    assert_eq!(world.counts("mails").await, mails);
    let idle = QueueCounts { name: "idle".into(), mode: Mode::Draining, ..QueueCounts::default() };
    assert_eq!(world.counts("idle").await, idle);

    for job in world.all(&Filter { queue: Some("mails".into()), ..Filter::default() }).await {
        world.jobs().delete(job.id).await.unwrap();
    }
    let names: BTreeSet<_> =
        world.jobs().queues().await.unwrap().into_iter().map(|queue| queue.name).collect();
    let expected = ["default", "idle", "mails"].map(ToOwned::to_owned);
    assert_eq!(names, expected.into_iter().collect(), "also those that had jobs");
}

pub async fn what_becomes_due_counts_as_ready<W: LedgerWorld>() {
    let world = W::new().await;
    world.add(NewJob::new("pack").when(When::After(Duration::from_millis(200)))).await;
    eventually("it is ready", async || {
        let counts = world.counts(QUEUE).await;
        assert_eq!(counts.ready + counts.scheduled, 1);
        assert_eq!(counts.oldest.is_some(), counts.ready == 1);
        counts.ready == 1
    })
    .await;
    world.take_one().await;
}

pub async fn a_paused_queue_hands_nothing_out_until_it_is_resumed<W: LedgerWorld>() {
    let world = W::new().await;
    let neighbour = world.neighbour().await;
    world.add_many(1).await;
    let claim = world.take_one().await.claim;
    neighbour.jobs().set_mode(QUEUE, Mode::Paused).await.unwrap();
    let waits = world.add_many(1).await[0];
    let taken = world.taken(ALL, HOUR).await;
    assert!(taken.jobs.is_empty(), "{taken:?}");
    assert!(taken.rest.is_some_and(|rest| rest > Duration::ZERO), "nobody is to ask all the time");
    assert_eq!(world.keep(claim).await, Kept::Ours, "what runs goes on");
    world.finish(claim).await;
    world.add(NewJob::new("pack").queue("mails")).await;
    let mails = Wanted { queue: "mails", ..wanted(ALL, HOUR) };
    assert_eq!(world.jobs().take(&mails).await.unwrap().jobs.len(), 1, "others are not held");

    let ear = world.falls_silent().await;
    let resume = async { neighbour.jobs().set_mode(QUEUE, Mode::Open).await.unwrap() };
    tokio::join!(world.wakes(&ear, Woken::More), resume);
    assert_eq!(world.take_one().await.claim.id, waits);
}

pub async fn a_draining_queue_takes_nothing_on_and_is_worked_off<W: LedgerWorld>() {
    let world = W::new().await;
    let neighbour = world.neighbour().await;
    world.add_many(2).await;
    neighbour.jobs().set_mode(QUEUE, Mode::Draining).await.unwrap();
    let many = [NewJob::new("send").queue("mails"), NewJob::new("pack")];
    let refused = world.jobs().enqueue(&many).await;
    assert!(matches!(&refused, Err(JobsError::Draining(queue)) if queue == QUEUE), "{refused:?}");
    assert_eq!(world.all(&Filter::default()).await.len(), 2, "all or none");
    let given = world.take(ALL).await;
    world.finish(given[0].claim).await;
    world.settle(given[1].claim, again(Duration::ZERO)).await;
    world.finish(world.comes(HOUR).await.claim).await;
    neighbour.jobs().set_mode(QUEUE, Mode::Open).await.unwrap();
    world.enqueue(&many).await;
}

pub async fn what_is_over_for_long_enough_is_removed<W: LedgerWorld>() {
    let world = W::new().await;
    let all = one_in_each_state(&world).await;
    world.enqueue(&vec![NewJob::new("pack"); 1_200]).await;
    let ends: Vec<_> =
        world.take(ALL).await.iter().map(|given| (given.claim, super::done())).collect();
    world.jobs().settle(&ends).await.unwrap();
    super::lapse(Duration::ZERO).await;
    let pruned = async |done, dead| {
        let mut total = 0;
        loop {
            match world.jobs().prune(done, dead).await.unwrap() {
                0 => return total,
                some => total += some,
            }
        }
    };
    let left = async || -> Vec<JobId> {
        world.all(&Filter::default()).await.iter().map(|job| job.id).rev().collect()
    };
    let of = |states: &[JobState]| -> Vec<JobId> {
        let mut ids: Vec<_> =
            all.iter().filter(|(_, state)| states.contains(state)).map(|(id, _)| *id).collect();
        ids.sort_unstable();
        ids
    };
    assert_eq!(pruned(HOUR, HOUR).await, 0, "nothing is that old");
    assert_eq!(pruned(Duration::MAX, Duration::MAX).await, 0);
    assert_eq!(left().await.len(), 1_205);
    assert_eq!(pruned(Duration::ZERO, HOUR).await, 1_202);
    assert_eq!(left().await, of(&[Waiting, Running, Dead]));
    assert_eq!(pruned(HOUR, Duration::ZERO).await, 1);
    assert_eq!(left().await, of(&[Waiting, Running]));
    let counts = world.counts(QUEUE).await;
    assert_eq!((counts.done, counts.dead, counts.cancelled), (0, 0, 0));
}

pub async fn of_many_servers_that_tick_one_makes_the_job<W: LedgerWorld>() {
    let world = W::new().await;
    let neighbour = world.neighbour().await;
    let noon = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
    let minute = Duration::from_secs(60);
    assert_eq!(world.jobs().last_tick("report").await.unwrap(), None);
    for at in [noon, noon + minute] {
        let mut servers = JoinSet::new();
        for n in 0..10 {
            let jobs = Arc::clone(if n % 2 == 0 { world.jobs() } else { neighbour.jobs() });
            servers.spawn(
                async move { jobs.tick("report", at, &NewJob::new("report")).await.unwrap() },
            );
        }
        let mut made = servers.join_all().await.into_iter().flatten();
        let made = (made.next().unwrap(), made.next());
        assert!(made.0.is_new && made.1.is_none(), "{made:?}");
        assert_eq!(world.take_one().await.claim.id, made.0.id);
        assert_eq!(world.jobs().last_tick("report").await.unwrap(), Some(at));
    }
    let job = NewJob::new("report").unique("report");
    assert_eq!(world.jobs().tick("report", noon, &job).await.unwrap(), None, "it was there");
    assert_eq!(world.jobs().last_tick("report").await.unwrap(), Some(noon + minute));
    let other = world.jobs().tick("mail", noon, &job).await.unwrap().unwrap();
    assert!(other.is_new, "another thing has its own times");
    let late = world.jobs().tick("mail", noon + minute, &job).await.unwrap().unwrap();
    assert!(!late.is_new && late.id == other.id, "its key counts as ever");
    let invalid = NewJob { cost: 0, ..job.clone() };
    let refused = world.jobs().tick("mail", noon + 2 * minute, &invalid).await;
    assert!(matches!(refused, Err(JobsError::Invalid(_))), "{refused:?}");
    let last = world.jobs().last_tick("mail").await.unwrap();
    assert_eq!(last, Some(noon + minute), "what is refused was no tick");
    let ear = world.falls_silent().await;
    world.jobs().tick("wake", noon, &NewJob::new("report")).await.unwrap().unwrap();
    world.wakes(&ear, Woken::More).await;
}

/// Starts what has a job asked for again and again, at a server.
fn housekeeping<W: LedgerWorld>(world: &W, every: &Every) -> Housekeeping {
    let ledger = Arc::clone(world.jobs()) as Arc<dyn Ledger>;
    let (name, job) = ("report".to_owned(), NewJob::new("report"));
    let periodic = Periodic { name, every: every.clone(), job };
    Housekeeping::start(&ledger, vec![periodic], Retention::default()).unwrap()
}

pub async fn of_two_servers_that_run_each_tick_is_one_job<W: LedgerWorld>() {
    let world = W::new().await;
    let neighbour = world.neighbour().await;
    let second = Duration::from_secs(1);
    let every = Every::each(second).unwrap();
    let before = every.last(SystemTime::now()).unwrap();
    let servers = [housekeeping(&world, &every), housekeeping(&neighbour, &every)];
    let asked = async || world.jobs().list(&Filter::default(), None, 100).await.unwrap().jobs.len();
    eventually("it ticks", async || asked().await >= 3).await;
    drop(servers);
    let jobs = asked().await as u64;
    let last = world.jobs().last_tick("report").await.unwrap().unwrap();
    let ticks = last.duration_since(before).unwrap().as_secs();
    // One that a busy server missed is none.
    assert!(jobs <= ticks, "{jobs} jobs for {ticks} ticks");
}

pub async fn a_server_that_was_away_makes_up_for_the_last_tick_it_missed<W: LedgerWorld>() {
    let world = W::new().await;
    let every = Every::cron("30 3 * * *", Some("Europe/Rome")).unwrap();
    let days = Duration::from_secs(86_400);
    let long_ago = every.last(SystemTime::now() - 10 * days).unwrap();
    world.jobs().tick("report", long_ago, &NewJob::new("report")).await.unwrap().unwrap();
    let missed = every.last(SystemTime::now()).unwrap();
    let _server = housekeeping(&world, &every);
    let last = async || world.jobs().last_tick("report").await.unwrap().unwrap();
    eventually("it ticks", async || last().await >= missed).await;
    // Unless it is half past three just now.
    if last().await == missed {
        assert_eq!(world.take(ALL).await.len(), 2, "one of long ago, and one for all since then");
    }
}
