//! What is PostgreSQL's own way of keeping jobs: locks, plans, and enqueues that share a commit.

use std::time::Duration;

use testing::postgres::Server;
use testing::soon;
use tokio::task::JoinSet;
use vedetta_core::JobState;
use vedetta_core::queue::{Kept, Settled};
use vedetta_db::Schema;
use vedetta_db::postgres::Postgres;
use vedetta_jobs::postgres::{PostgresJobs, SCHEMA};
use vedetta_jobs::{
    Change, Claim, DEFAULT_QUEUE, Fate, Filter, Given, JobId, Jobs as _, JobsError, Ledger as _,
    Mode, NewJob, Note, Wanted,
};

const HOUR: Duration = Duration::from_secs(3600);

async fn jobs(server: &Server, connections: usize) -> PostgresJobs {
    let url = server.database().await;
    PostgresJobs::new(Postgres::open_with(&url, connections, &[SCHEMA]).await.unwrap())
}

async fn take(jobs: &PostgresJobs, room: u32) -> Vec<Given> {
    let wanted =
        Wanted { queue: DEFAULT_QUEUE, worker: "anna", room, capacity: room.max(1), lease: HOUR };
    jobs.take(&wanted).await.unwrap().jobs
}

fn done() -> Fate {
    Fate::Done { result: None }
}

#[tokio::test]
async fn who_enqueues_beside_somebody_whose_queue_is_draining_is_not_refused() {
    let server = Server::start().await;
    let jobs = jobs(&server, 4).await;
    jobs.set_mode("closed", Mode::Draining).await.unwrap();
    let mut asking = JoinSet::new();
    for n in 0..60 {
        let (jobs, is_closed) = (jobs.clone(), n % 3 == 0);
        asking.spawn(async move {
            let first = NewJob::new("pack");
            let second = if is_closed { first.clone().queue("closed") } else { first.clone() };
            let answer = jobs.enqueue(&[first, second]).await;
            match (is_closed, answer) {
                (true, Err(JobsError::Draining(queue))) => assert_eq!(queue, "closed"),
                (false, Ok(enqueued)) => assert!(enqueued.iter().all(|job| job.is_new)),
                (_, answer) => panic!("{answer:?}"),
            }
        });
    }
    soon("all are answered", asking.join_all()).await;
    assert_eq!(take(&jobs, 1000).await.len(), 80, "all or none of each");
}

#[tokio::test]
async fn a_job_that_somebody_has_locked_holds_up_no_lease_and_is_still_held() {
    let server = Server::start().await;
    let jobs = jobs(&server, 4).await;
    jobs.enqueue(&vec![NewJob::new("pack"); 3]).await.unwrap();
    let claims: Vec<Claim> = take(&jobs, 3).await.iter().map(|given| given.claim).collect();
    let mut client = jobs.db().client().await.unwrap();
    let theirs = client.transaction().await.unwrap();
    assert!(jobs.done_in(&theirs, claims[1], None).await.unwrap());

    let held: Vec<(Claim, Note)> = claims.iter().map(|claim| (*claim, Note::default())).collect();
    let kept = soon("the leases are kept", jobs.keep(&held)).await.unwrap();
    assert_eq!(kept, [Kept::Ours; 3]);
    theirs.commit().await.unwrap();
    let kept = jobs.keep(&held).await.unwrap();
    assert_eq!(kept, [Kept::Ours, Kept::Lost, Kept::Ours]);
}

#[tokio::test]
async fn what_is_told_of_a_job_that_somebody_has_locked_holds_up_no_lease_and_is_noted_later() {
    let server = Server::start().await;
    let jobs = jobs(&server, 4).await;
    let ids = jobs.enqueue(&vec![NewJob::new("pack"); 2]).await.unwrap();
    let claims: Vec<Claim> = take(&jobs, 2).await.iter().map(|given| given.claim).collect();
    let says = |line: &str| Note { log: format!("{line}\n"), ..Note::default() };
    let mut client = jobs.db().client().await.unwrap();
    let theirs = client.transaction().await.unwrap();
    theirs.execute("SELECT FROM vedetta_job FOR UPDATE", &[]).await.unwrap();
    let began = std::time::Instant::now();
    let first = Note { progress: Some(0.5), ..says("one") };
    let held = [(claims[0], first), (claims[1], says("one"))];
    assert_eq!(jobs.keep(&held).await.unwrap(), [Kept::Ours; 2]);
    assert!(began.elapsed() < Duration::from_millis(900), "{:?}", began.elapsed());
    theirs.rollback().await.unwrap();
    jobs.keep(&[(claims[0], says("two"))]).await.unwrap();
    jobs.settle(&[(claims[0], done()), (claims[1], done())]).await.unwrap();
    for (id, log, progress) in [(ids[0].id, "one\ntwo\n", 0.5), (ids[1].id, "one\n", 0.0)] {
        let job = jobs.job(id).await.unwrap().unwrap();
        assert_eq!(job.log, log);
        assert!(job.progress >= progress, "{}", job.progress);
    }
}

#[tokio::test]
async fn what_is_noted_later_is_not_lost_when_the_server_fails_then() {
    let server = Server::start().await;
    let jobs = jobs(&server, 4).await;
    let ids = jobs.enqueue(&vec![NewJob::new("pack"); 2]).await.unwrap();
    let claims: Vec<Claim> = take(&jobs, 2).await.iter().map(|given| given.claim).collect();
    let says = |line: &str| Note { log: format!("{line}\n"), ..Note::default() };
    let mut client = jobs.db().client().await.unwrap();
    let theirs = client.transaction().await.unwrap();
    theirs.execute("SELECT FROM vedetta_job FOR UPDATE", &[]).await.unwrap();
    let held = [(claims[0], says("one")), (claims[1], says("one"))];
    assert_eq!(jobs.keep(&held).await.unwrap(), [Kept::Ours; 2]);
    theirs.rollback().await.unwrap();

    let rename = |from: &str, to: &str| format!("ALTER FUNCTION {from} RENAME TO {to}");
    client.batch_execute(&rename("vedetta_job_keep", "gone")).await.unwrap();
    let (told, ended) = ([(claims[0], says("two"))], [(claims[1], done())]);
    jobs.keep(&told).await.unwrap_err();
    jobs.settle(&ended).await.unwrap_err();
    client.batch_execute(&rename("gone", "vedetta_job_keep")).await.unwrap();
    assert_eq!(jobs.keep(&told).await.unwrap(), [Kept::Ours]);
    assert_eq!(jobs.settle(&ended).await.unwrap(), [Settled::Gone]);
    for (id, log) in [(ids[0].id, "one\ntwo\n"), (ids[1].id, "one\n")] {
        assert_eq!(jobs.job(id).await.unwrap().unwrap().log, log);
    }
}

#[tokio::test]
async fn what_is_said_of_a_job_that_was_done_in_a_transaction_changes_nothing_and_tells_so() {
    let server = Server::start().await;
    let jobs = jobs(&server, 4).await;
    for fate in [done(), Fate::Dead { error: "no stock".into() }, Fate::Released] {
        let id = jobs.enqueue(&[NewJob::new("pack")]).await.unwrap()[0].id;
        let claim = take(&jobs, 1).await[0].claim;
        let mut client = jobs.db().client().await.unwrap();
        let tx = client.transaction().await.unwrap();
        assert!(jobs.done_in(&tx, claim, None).await.unwrap());
        tx.commit().await.unwrap();
        assert_eq!(jobs.settle(&[(claim, fate)]).await.unwrap(), [Settled::Gone]);
        let job = jobs.job(id).await.unwrap().unwrap();
        assert_eq!((job.status, job.error), (JobState::Done, None));
    }
    let done = Filter { status: Some(JobState::Done), ..Filter::default() };
    assert_eq!(jobs.list(&done, None, 9).await.unwrap().jobs.len(), 3);
    assert_eq!(jobs.queues().await.unwrap()[0].done, 3);
}

#[tokio::test]
async fn plans_that_were_made_for_no_jobs_read_no_more_than_they_must_of_many() {
    let server = Server::start().await;
    // On one connection all use the same plans.
    let jobs = jobs(&server, 1).await;
    let work = async || {
        let claims: Vec<Claim> = take(&jobs, 4).await.iter().map(|given| given.claim).collect();
        let held: Vec<(Claim, Note)> =
            claims.iter().map(|claim| (*claim, Note::default())).collect();
        let kept = jobs.keep(&held).await.unwrap();
        assert!(kept.iter().all(|kept| *kept == Kept::Ours));
        let again = || Fate::Again { after: Duration::ZERO, error: "no stock".into() };
        let fates = [done(), Fate::Dead { error: "no order".into() }, again(), Fate::Released];
        let ended: Vec<(Claim, Fate)> = claims.iter().copied().zip(fates).collect();
        let settled = jobs.settle(&ended).await.unwrap();
        assert!(settled.iter().all(|settled| *settled != Settled::Stale));
    };
    jobs.enqueue(&vec![NewJob::new("pack"); 20]).await.unwrap();
    // A plan is kept after a few times.
    for _ in 0..8 {
        work().await;
    }
    let client = jobs.db().client().await.unwrap();
    client.batch_execute("DELETE FROM vedetta_job").await.unwrap();
    client.batch_execute("VACUUM ANALYZE vedetta_job").await.unwrap();
    drop(client);
    jobs.enqueue(&vec![NewJob::new("pack"); 4]).await.unwrap();
    for _ in 0..8 {
        work().await;
    }

    let read = async || {
        let client = jobs.db().client().await.unwrap();
        client.execute("SELECT pg_stat_force_next_flush()", &[]).await.unwrap();
        let sql = "SELECT seq_scan + seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables
                   WHERE relname = 'vedetta_job'";
        client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0)
    };
    jobs.enqueue(&vec![NewJob::new("pack"); 5000]).await.unwrap();
    assert_eq!(take(&jobs, 2000).await.len(), 2000);
    let before = read().await;
    work().await;
    let rows = read().await - before;
    assert!(rows < 500, "{rows} of 5000 were read");
}

#[tokio::test]
async fn a_database_from_before_jobs_had_traces_goes_on_as_it_was() {
    let server = Server::start().await;
    let url = server.database().await;
    let before = Schema { steps: &SCHEMA.steps[..1], ..SCHEMA };
    let db = Postgres::open(&url, &[before]).await.unwrap();
    // As they were then: other columns come out.
    let old = "
        CREATE FUNCTION vedetta_job_take(
            its_queue integer, room bigint, capacity integer, term bigint, seed bigint, who text)
        RETURNS TABLE (id bigint, token bigint) LANGUAGE sql AS 'SELECT 1::bigint, 2::bigint';
        CREATE FUNCTION vedetta_job_wake(its_queue integer) RETURNS void LANGUAGE sql AS '';
        INSERT INTO vedetta_job_queue (name) VALUES ('default');
        INSERT INTO vedetta_job (rank, wake_at, run_at, made_at, changed_at, queue, cost, max_attempts,
                                 state, priority, kind, payload)
        VALUES (now(), now(), now(), now(), now(), 1, 1, 5, 1, 0, 'pack', '7');
        INSERT INTO vedetta_job_over
        VALUES (100, now(), now(), now(), 0, 1, 1, 1, 1, 0, 3, 0, now(), NULL, 'ship', '8', NULL, NULL, 'anna',
                NULL, 'lost', NULL, NULL);
        INSERT INTO vedetta_job_tally VALUES (1, 3, 1)";
    db.client().await.unwrap().batch_execute(old).await.unwrap();
    drop(db);

    let jobs = PostgresJobs::new(Postgres::open(&url, &[SCHEMA]).await.unwrap());
    assert_eq!(jobs.retry(JobId(100)).await.unwrap(), Change::Made);
    let given = take(&jobs, 10).await;
    let kinds: Vec<_> = given.iter().map(|given| (given.kind.as_str(), given.trace)).collect();
    assert_eq!(kinds, [("pack", None), ("ship", None)]);
    let ends: Vec<_> = given.iter().map(|given| (given.claim, done())).collect();
    assert_eq!(jobs.settle(&ends).await.unwrap(), [Settled::Gone, Settled::Gone]);
}
