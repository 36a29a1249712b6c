//! Jobs on PostgreSQL.

#[macro_use]
mod suite;

use std::sync::{Arc, Weak};

use suite::{ALL, Ask as _, AskLedger as _, HOUR, SHORT, World, again, lapse};
use testing::postgres::Server;
use tokio::sync::Mutex;
use vedetta_core::JobState::{Done, Running, Waiting};
use vedetta_core::queue::{Settled, Woken};
use vedetta_db::Schema;
use vedetta_db::postgres::{Client, Postgres};
use vedetta_jobs::postgres::{PostgresJobs, SCHEMA};
use vedetta_jobs::{Filter, Jobs as _, JobsError, NewJob, When};

jobs_suite!(crate::Pg);
ledger_suite!(crate::Pg);

/// A table of somebody else in the same database.
const SHOP: Schema = Schema { component: "shop", steps: &["CREATE TABLE parcel (id bigint)"] };
const PARCEL: &str = "INSERT INTO parcel VALUES (1)";

struct Pg {
    server: Arc<Server>,
    url: String,
    jobs: Arc<PostgresJobs>,
}

/// One server for all tests that run at the same time.
static SERVER: Mutex<Weak<Server>> = Mutex::const_new(Weak::new());

impl Pg {
    async fn open(server: Arc<Server>, url: String) -> Self {
        let db = Postgres::open_with(&url, 6, &[SCHEMA, SHOP]).await.unwrap();
        Self { server, url, jobs: Arc::new(PostgresJobs::new(db)) }
    }

    async fn client(&self) -> Client {
        self.jobs.db().client().await.unwrap()
    }

    async fn parcels(&self) -> i64 {
        let count = "SELECT count(*) FROM parcel";
        self.client().await.query_one(count, &[]).await.unwrap().get(0)
    }
}

impl World for Pg {
    type Jobs = PostgresJobs;

    async fn new() -> Self {
        let mut shared = SERVER.lock().await;
        let server = match shared.upgrade() {
            Some(server) => server,
            None => {
                let server = Arc::new(Server::start().await);
                *shared = Arc::downgrade(&server);
                server
            }
        };
        drop(shared);
        let url = server.database().await;
        Self::open(server, url).await
    }

    async fn neighbour(&self) -> Self {
        Self::open(Arc::clone(&self.server), self.url.clone()).await
    }

    async fn reopened(self) -> Self {
        let Self { server, url, jobs } = self;
        drop(jobs);
        Self::open(server, url).await
    }

    fn jobs(&self) -> &Arc<PostgresJobs> {
        &self.jobs
    }
}

#[tokio::test]
async fn jobs_are_taken_on_with_what_else_is_done_in_a_transaction_or_not_at_all() {
    let world = Pg::new().await;
    let neighbour = world.neighbour().await;
    let jobs = [NewJob::new("pack").unique("order-7"), NewJob::new("ship").queue("new")];
    let mut client = world.client().await;
    let undone = client.transaction().await.unwrap();
    undone.execute(PARCEL, &[]).await.unwrap();
    world.jobs.enqueue_in(&undone, &jobs).await.unwrap();
    undone.rollback().await.unwrap();
    assert!(world.all(&Filter::default()).await.is_empty());
    world.rests().await;

    let tx = client.transaction().await.unwrap();
    tx.execute(PARCEL, &[]).await.unwrap();
    let enqueued = world.jobs.enqueue_in(&tx, &jobs).await.unwrap();
    assert!(enqueued.iter().all(|enqueued| enqueued.is_new), "the key was left to nobody");
    world.rests().await;
    // What was said too early is over: only the commit wakes them.
    let ear = world.falls_silent().await;
    let theirs = neighbour.falls_silent().await;
    tx.commit().await.unwrap();
    tokio::join!(world.wakes(&ear, Woken::More), neighbour.wakes(&theirs, Woken::More));
    assert_eq!(world.parcels().await, 1);
    assert_eq!(neighbour.take_one().await.claim.id, enqueued[0].id);

    let tx = client.transaction().await.unwrap();
    let invalid = world.jobs.enqueue_in(&tx, &[NewJob::new("")]).await;
    assert!(matches!(invalid, Err(JobsError::Invalid(_))), "{invalid:?}");
    tx.execute(PARCEL, &[]).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(world.parcels().await, 2, "the transaction went on");
}

#[tokio::test]
async fn who_asks_for_the_same_key_at_once_gets_one_job_whoever_commits_first() {
    for is_committed in [true, false] {
        let world = Pg::new().await;
        let neighbour = world.neighbour().await;
        let job = NewJob::new("pack").unique("order-7").when(When::After(HOUR));
        let mut client = world.client().await;
        let tx = client.transaction().await.unwrap();
        let first = world.jobs.enqueue_in(&tx, std::slice::from_ref(&job)).await.unwrap()[0];
        let jobs = Arc::clone(neighbour.jobs());
        let second = tokio::spawn(async move { jobs.enqueue(&[job]).await.unwrap()[0] });
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        if is_committed {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
        }
        let second = testing::soon("the other is answered", second).await.unwrap();
        assert_eq!(second.is_new, !is_committed);
        assert_eq!(second.id == first.id, is_committed);
        assert_eq!(world.all(&Filter::default()).await.len(), 1);
    }
}

#[tokio::test]
async fn a_job_is_done_with_what_it_did_in_a_transaction_or_not_at_all() {
    let world = Pg::new().await;
    let mut client = world.client().await;
    let id = world.add_many(1).await[0];
    let claim = world.comes(HOUR).await.claim;
    for is_committed in [false, true] {
        let tx = client.transaction().await.unwrap();
        tx.execute(PARCEL, &[]).await.unwrap();
        assert!(world.jobs.done_in(&tx, claim, None).await.unwrap());
        if is_committed {
            tx.commit().await.unwrap();
            assert_eq!((world.state(id).await, world.parcels().await), (Done, 1));
        } else {
            tx.rollback().await.unwrap();
            assert_eq!((world.state(id).await, world.parcels().await), (Running, 0));
        }
    }

    let id = world.add_many(1).await[0];
    let late = world.comes(SHORT).await.claim;
    lapse(SHORT).await;
    let tx = client.transaction().await.unwrap();
    assert!(!world.jobs.done_in(&tx, late, None).await.unwrap(), "its lease is over");
    tx.rollback().await.unwrap();
    let claim = world.comes(HOUR).await.claim;
    let tx = client.transaction().await.unwrap();
    assert!(!world.jobs.done_in(&tx, late, None).await.unwrap(), "another has it");
    tx.rollback().await.unwrap();
    assert_eq!(world.settle(claim, again(HOUR)).await, Settled::Again(HOUR));
    assert_eq!(world.state(id).await, Waiting);
    assert!(world.take(ALL).await.is_empty());
}

#[tokio::test]
async fn who_is_woken_for_what_somebody_else_asked_for_finds_it_however_slow_its_insert_is() {
    let world = Pg::new().await;
    let neighbour = world.neighbour().await;
    let slow = "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS
                    $$ BEGIN PERFORM pg_sleep(0.3); RETURN NULL; END $$;
                CREATE TRIGGER slow BEFORE INSERT ON vedetta_job
                    FOR EACH STATEMENT EXECUTE FUNCTION slow()";
    world.client().await.batch_execute(slow).await.unwrap();
    // One alone, and one with a key: they go different ways.
    for job in [NewJob::new("pack"), NewJob::new("pack").unique("order-7")] {
        let ear = neighbour.falls_silent().await;
        let woken = async {
            neighbour.wakes(&ear, Woken::More).await;
            neighbour.take_one().await.claim
        };
        let (id, claim) = tokio::join!(world.add(job), woken);
        assert_eq!(claim.id, id);
        neighbour.finish(claim).await;
    }
}
