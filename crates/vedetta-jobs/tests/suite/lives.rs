//! What becomes of a job, as its ledger tells.

use std::time::{Duration, SystemTime};

use serde_json::value::RawValue;
use vedetta_core::JobState::{Dead, Done, Running, Waiting};
use vedetta_core::Trace;
use vedetta_core::queue::{Kept, Settled};
use vedetta_jobs::{
    Change, Fate, HIGHEST_PRIORITY, Jobs as _, JobsError, LARGEST, LOG_TAIL, LONGEST_TEXT,
    Ledger as _, NewJob, Note, When,
};

use super::{
    ALL, ANNA, Ask as _, AskLedger as _, HOUR, LedgerWorld, SHORT, again, dead, done, eventually,
    is_the_same, json, lapse,
};

/// What times are compared to.
const SLACK: Duration = Duration::from_millis(5);

/// Whether something was noted to happen between `since` and now.
fn happened(at: SystemTime, since: SystemTime) -> bool {
    at + SLACK >= since && at <= SystemTime::now() + SLACK
}

/// Whether something is noted for so long after a moment between `since` and now.
fn is_due(at: SystemTime, since: SystemTime, after: Duration) -> bool {
    at.checked_sub(after).is_some_and(|asked| happened(asked, since))
}

pub async fn a_job_is_shown_as_it_was_asked_for<W: LedgerWorld>() {
    let world = W::new().await;
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    for (run_at, priority, timeout, unique_key) in [
        (When::Now, 0, None, None),
        (When::After(HOUR), -HIGHEST_PRIORITY, Some(Duration::from_millis(1)), Some("a'b\"%_\\ ✓")),
        (When::At(long_ago), HIGHEST_PRIORITY, Some(90 * 24 * HOUR), Some("")),
    ] {
        let since = SystemTime::now();
        let asked = NewJob {
            kind: "mail/send".into(),
            queue: "mails".into(),
            payload: json(r#"{ "to" : "Zoë 🦀", "to": 1e400 }"#),
            cost: i32::MAX.unsigned_abs(),
            priority,
            run_at,
            max_attempts: 1000,
            timeout,
            unique_key: unique_key.filter(|key| !key.is_empty()).map(Into::into),
            tags: vec!["b".into(), "a".into()],
            trace: Some(Trace::new(u128::MAX, u64::MAX, true)),
        };
        let id = world.add(asked.clone()).await;
        let job = world.job(id).await;
        assert_eq!((job.id, job.status, job.attempts), (id, Waiting, 0));
        assert_eq!((job.kind, job.queue), (asked.kind, asked.queue));
        assert_eq!(job.payload.get(), asked.payload.get());
        assert_eq!((job.cost, job.max_attempts), (asked.cost, asked.max_attempts));
        assert_eq!((job.priority, job.timeout), (priority, timeout));
        assert_eq!((job.unique_key, job.tags), (asked.unique_key, asked.tags));
        assert_eq!(job.trace, asked.trace);
        assert!(job.progress.abs() < f32::EPSILON && job.message.is_none() && job.log.is_empty());
        assert!(job.result.is_none() && job.error.is_none() && job.worker.is_none());
        assert!(job.started_at.is_none() && job.ended_at.is_none());
        assert!(happened(job.queued_at, since) && happened(job.updated_at, since));
        assert!(!job.connection.is_empty());
        match run_at {
            When::Now => assert!(happened(job.run_at, since)),
            When::After(delay) => assert!(is_due(job.run_at, since, delay)),
            When::At(at) => assert_eq!(job.run_at, at),
        }
    }
}

pub async fn a_job_that_runs_shows_who_works_on_it_and_since_when<W: LedgerWorld>() {
    let world = W::new().await;
    let id = world.add_many(1).await[0];
    let since = SystemTime::now();
    let claim = world.take_one().await.claim;
    let job = world.job(id).await;
    assert_eq!((job.status, job.attempts), (Running, 1));
    assert_eq!(job.worker.as_deref(), Some(ANNA));
    assert!(happened(job.started_at.unwrap(), since) && happened(job.updated_at, since));
    assert!(job.ended_at.is_none());
    assert_eq!(world.keep(claim).await, Kept::Ours);
    assert_eq!(world.job(id).await.started_at, job.started_at, "to keep it is no new start");
}

pub async fn each_end_leaves_its_marks<W: LedgerWorld>() {
    let world = W::new().await;
    let result = || Some(json(r#"{ "parcels":  2 }"#));
    // fate, what is answered, where it stands then, attempts made, why it failed, due again after
    let ends = [
        (done(), Settled::Gone, Done, 1, None, None),
        (Fate::Done { result: result() }, Settled::Gone, Done, 1, None, None),
        (again(HOUR), Settled::Again(HOUR), Waiting, 1, Some("no stock"), Some(HOUR)),
        (dead(), Settled::Parked, Dead, 1, Some("no such order"), None),
        (Fate::Snooze(HOUR), Settled::Again(HOUR), Waiting, 0, None, Some(HOUR)),
        (Fate::Released, Settled::Again(Duration::ZERO), Waiting, 0, None, Some(Duration::ZERO)),
    ];
    for (fate, settled, status, attempts, error, due) in ends {
        let before = SystemTime::now();
        let id = world.add_many(1).await[0];
        let claim = world.take_one().await.claim;
        let since = SystemTime::now();
        let is_result = matches!(fate, Fate::Done { result: Some(_) });
        assert_eq!(world.settle(claim, fate).await, settled);
        let job = world.job(id).await;
        assert_eq!((job.status, job.attempts), (status, attempts), "{job:?}");
        assert_eq!(job.error.as_deref(), error);
        let expected = result().filter(|_| is_result);
        assert_eq!(
            job.result.as_deref().map(RawValue::get),
            expected.as_deref().map(RawValue::get)
        );
        assert!(happened(job.updated_at, since));
        assert_eq!(job.ended_at.is_some_and(|at| happened(at, since)), status.is_over(), "{job:?}");
        if let Some(due) = due {
            assert!(is_due(job.run_at, before, due) && job.ended_at.is_none(), "{job:?}");
        } else {
            assert_eq!(job.worker.as_deref(), Some(ANNA));
        }
        if status == Waiting {
            world.jobs().cancel(id).await.unwrap();
        }
    }
}

pub async fn neither_a_snooze_nor_a_release_counts_as_an_attempt<W: LedgerWorld>() {
    let world = W::new().await;
    let id = world.add(NewJob { max_attempts: 2, ..NewJob::new("pack") }).await;
    for (fate, attempt) in [
        (Fate::Snooze(Duration::ZERO), 1),
        (Fate::Released, 1),
        (Fate::Snooze(Duration::ZERO), 1),
        (again(Duration::ZERO), 1),
        (Fate::Snooze(Duration::ZERO), 2),
        (Fate::Released, 2),
        (done(), 2),
    ] {
        let given = world.comes(HOUR).await;
        assert_eq!((given.claim.id, given.attempt), (id, attempt), "before {fate:?}");
        assert_ne!(world.settle(given.claim, fate).await, Settled::Stale);
    }
    let job = world.job(id).await;
    assert_eq!((job.status, job.attempts), (Done, 2));
    assert_eq!(job.error.as_deref().unwrap_or("no stock"), "no stock");
}

pub async fn a_released_job_keeps_its_place_in_the_line<W: LedgerWorld>() {
    let world = W::new().await;
    let jobs = world.add_many(3).await;
    let given = world.take(1).await.remove(0);
    world.settle(given.claim, Fate::Released).await;
    let next = super::ids(&world.take(ALL).await);
    assert_eq!(next, jobs, "as if it had not been handed out");
}

pub async fn a_job_whose_workers_went_away_too_often_is_dead<W: LedgerWorld>() {
    let world = W::new().await;
    let id = world.add(NewJob { max_attempts: 2, ..NewJob::new("pack") }).await;
    let claims = [world.comes(SHORT).await.claim, world.comes(SHORT).await.claim];
    eventually("it is dead", async || {
        assert!(world.take(ALL).await.is_empty(), "it had its attempts");
        world.job(id).await.status == Dead
    })
    .await;
    let job = world.job(id).await;
    assert_eq!(job.attempts, 2);
    assert!(job.error.is_some_and(|error| !error.is_empty()), "it says why");
    assert!(job.ended_at.is_some());
    for claim in claims {
        assert_eq!(world.settle(claim, done()).await, Settled::Stale);
    }
    assert_eq!(world.job(id).await.status, Dead);
}

pub async fn who_let_a_lease_lapse_changes_nothing_whether_or_not_somebody_took_the_job<
    W: LedgerWorld,
>() {
    let world = W::new().await;
    let id = world.add_many(1).await[0];
    for (is_noticed, is_taken_by_another) in [(false, false), (true, false), (true, true)] {
        let late = world.comes(SHORT).await.claim;
        lapse(SHORT).await;
        if is_noticed {
            world.taken(0, HOUR).await;
        }
        if is_taken_by_another {
            world.comes(HOUR).await;
        }
        let before = format!("{:?}", world.job(id).await);
        let note = Note { progress: Some(0.9), message: Some("late".into()), log: "late\n".into() };
        assert_eq!(world.note(late, note).await, Kept::Lost);
        for fate in [done(), again(HOUR), dead(), Fate::Snooze(HOUR), Fate::Released] {
            assert_eq!(world.settle(late, fate).await, Settled::Stale);
        }
        assert_eq!(format!("{:?}", world.job(id).await), before);
    }
}

pub async fn an_end_that_is_told_twice_counts_once<W: LedgerWorld>() {
    let world = W::new().await;
    for fate in [done(), again(HOUR), dead(), Fate::Snooze(HOUR), Fate::Released] {
        let id = world.add_many(1).await[0];
        let claim = world.take_one().await.claim;
        let first = world.settle(claim, fate.clone()).await;
        let before = format!("{:?}", world.job(id).await);
        for fate in [fate, done()] {
            let second = world.settle(claim, fate).await;
            assert!(is_the_same(first, second), "{second:?} after {first:?}");
            assert_eq!(format!("{:?}", world.job(id).await), before);
        }
        world.jobs().delete(id).await.unwrap();
    }
    // In one call, too: the first stands.
    let id = world.add_many(1).await[0];
    let claim = world.take_one().await.claim;
    let settled = world.jobs().settle(&[(claim, dead()), (claim, done())]).await.unwrap();
    assert_eq!(settled[0], Settled::Parked);
    assert_eq!(world.job(id).await.status, Dead);
}

pub async fn what_somebody_changed_by_hand_is_not_answered_as_the_worker_told_it<W: LedgerWorld>() {
    let world = W::new().await;
    let jobs = world.jobs();
    for (fate, cancels, retries) in
        [(None, true, false), (Some(again(HOUR)), true, false), (Some(dead()), false, true)]
    {
        let id = world.add_many(1).await[0];
        let claim = world.take_one().await.claim;
        if let Some(fate) = fate {
            world.settle(claim, fate).await;
        }
        if cancels {
            assert_eq!(jobs.cancel(id).await.unwrap(), Change::Made);
        }
        if retries {
            assert_eq!(jobs.retry(id).await.unwrap(), Change::Made);
        }
        assert_eq!(world.settle(claim, done()).await, Settled::Stale, "{:?}", world.job(id).await);
        jobs.delete(id).await.unwrap();
    }
}

pub async fn what_a_worker_tells_of_a_job_is_seen<W: LedgerWorld>() {
    let world = W::new().await;
    let id = world.add_many(1).await[0];
    let claim = world.take_one().await.claim;
    let note = |progress, message: Option<&str>, log: &str| Note {
        progress,
        message: message.map(Into::into),
        log: log.into(),
    };
    for (note, progress, message, log) in [
        (note(Some(0.25), None, "one\n"), 0.25, None, "one\n"),
        (note(None, Some("packing ✓"), ""), 0.25, Some("packing ✓"), "one\n"),
        (note(None, None, "two\nthr"), 0.25, Some("packing ✓"), "one\ntwo\nthr"),
        (Note::default(), 0.25, Some("packing ✓"), "one\ntwo\nthr"),
        (note(Some(1.0), Some(""), "ee\n"), 1.0, Some(""), "one\ntwo\nthree\n"),
    ] {
        let since = SystemTime::now();
        let is_news = !note.is_empty();
        assert_eq!(world.note(claim, note).await, Kept::Ours);
        let job = world.job(id).await;
        assert!((job.progress - progress).abs() < f32::EPSILON, "{job:?}");
        assert_eq!(job.message.as_deref().unwrap_or(""), message.unwrap_or(""));
        assert_eq!(job.log, log);
        assert!(!is_news || happened(job.updated_at, since));
    }
    world.finish(claim).await;
    assert_eq!(world.job(id).await.log, "one\ntwo\nthree\n", "it is kept when the job is over");
}

pub async fn of_two_who_tell_of_a_job_at_once_neither_loses_a_line<W: LedgerWorld>() {
    let world = W::new().await;
    let neighbour = world.neighbour().await;
    let id = world.add_many(1).await[0];
    let claim = world.take_one().await.claim;
    let mut lines = Vec::new();
    for round in 0..20 {
        let note = |who: &str| Note { log: format!("{who} {round}\n"), ..Note::default() };
        let (anna, bert) = (note("anna"), note("bert"));
        lines.extend([anna.log.clone(), bert.log.clone()]);
        let kept = tokio::join!(world.note(claim, anna), neighbour.note(claim, bert));
        assert_eq!(kept, (Kept::Ours, Kept::Ours));
    }
    let log = world.job(id).await.log;
    let mut found: Vec<&str> = log.split_inclusive('\n').collect();
    found.sort_unstable();
    lines.sort_unstable();
    assert_eq!(found, lines);
}

pub async fn of_a_log_the_last_whole_lines_are_kept<W: LedgerWorld>() {
    let world = W::new().await;
    let id = world.add_many(1).await[0];
    let claim = world.take_one().await.claim;
    let mut log = String::new();
    for part in 0..40 {
        let more = format!("line {part}: Größe ✓ 🦀\n").repeat(20);
        log.push_str(&more);
        assert_eq!(world.note(claim, Note { log: more, ..Note::default() }).await, Kept::Ours);
    }
    let kept = world.job(id).await.log;
    assert!(kept.len() <= LOG_TAIL && kept.len() > LOG_TAIL - 100, "{} bytes", kept.len());
    assert!(log.ends_with(&kept) && kept.starts_with("line "), "{kept}");
    // More than fits at once, without an end of a line.
    let more = "🦀".repeat(LOG_TAIL);
    assert_eq!(world.note(claim, Note { log: more.clone(), ..Note::default() }).await, Kept::Ours);
    let kept = world.job(id).await.log;
    assert!(kept.len() <= LOG_TAIL && kept.len() > LOG_TAIL - 4, "{} bytes", kept.len());
    assert!(more.ends_with(&kept));
}

pub async fn long_texts_are_cut_within_no_character<W: LedgerWorld>() {
    let world = W::new().await;
    let id = world.add_many(1).await[0];
    let long = format!("a\0{}", "🦀".repeat(LONGEST_TEXT));
    let cut = |text: Option<String>| {
        let text = text.unwrap();
        assert!(text.len() <= LONGEST_TEXT + 2 && text.len() > LONGEST_TEXT - 4, "{}", text.len());
        assert!(text.starts_with('a') && text.ends_with('🦀') && !text.contains('\0'));
    };
    let claim = world.take_one().await.claim;
    let note = Note { message: Some(long.clone()), log: "a\0b".into(), ..Note::default() };
    assert_eq!(world.note(claim, note).await, Kept::Ours);
    cut(world.job(id).await.message);
    assert!(!world.job(id).await.log.contains('\0'));
    let fate = Fate::Again { after: Duration::ZERO, error: long.clone() };
    assert_eq!(world.settle(claim, fate).await, Settled::Again(Duration::ZERO));
    cut(world.job(id).await.error);
    let claim = world.comes(HOUR).await.claim;
    assert_eq!(world.settle(claim, Fate::Dead { error: long }).await, Settled::Parked);
    cut(world.job(id).await.error);
}

pub async fn the_largest_result_is_kept_whole<W: LedgerWorld>() {
    let world = W::new().await;
    let id = world.add_many(1).await[0];
    let claim = world.take_one().await.claim;
    let result = json(&format!("\"{}\"", "x".repeat(LARGEST - 2)));
    let fate = Fate::Done { result: Some(result.clone()) };
    assert_eq!(world.settle(claim, fate).await, Settled::Gone);
    assert!(world.job(id).await.result.unwrap().get() == result.get(), "it is not the same");
}

pub async fn times_beyond_all_calendars_do_no_harm<W: LedgerWorld>() {
    let world = W::new().await;
    let for_ever = Duration::MAX;
    let asked = [
        NewJob { timeout: Some(for_ever), ..NewJob::new("pack") },
        NewJob { run_at: When::After(for_ever), ..NewJob::new("pack") },
        NewJob { run_at: When::At(SystemTime::UNIX_EPOCH), ..NewJob::new("pack") },
    ];
    for job in asked {
        let answer = world.jobs().enqueue(&[job]).await;
        assert!(matches!(answer, Ok(_) | Err(JobsError::Invalid(_))), "{answer:?}");
    }
    for given in world.taken(ALL, HOUR).await.jobs {
        world.finish(given.claim).await;
    }
    for fate in [again(for_ever), Fate::Snooze(for_ever)] {
        let id = world.add_many(1).await[0];
        let given = world.taken(ALL, for_ever).await.jobs.remove(0);
        assert_eq!(given.claim.id, id);
        assert_eq!(world.keep(given.claim).await, Kept::Ours);
        let settled = world.settle(given.claim, fate).await;
        assert!(matches!(settled, Settled::Again(after) if after > HOUR), "{settled:?}");
        world.rests().await;
        assert_eq!(world.job(id).await.status, Waiting);
    }
}
