//! All that changes, as a page or a program is told of it.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use vedetta_core::queue::Settled;
use vedetta_dashboard::{Api, Limits};
use vedetta_db::postgres::Postgres;
use vedetta_db::{Purpose, Stop, Tx};
use vedetta_fleet::roster::{Status, SupervisorRecord, WorkerRecord};
use vedetta_fleet::sqlite::{SqliteBus, SqliteRoster};
use vedetta_fleet::wire::Beat;
use vedetta_fleet::{Fleet, Roster as _};
use vedetta_jobs::postgres::PostgresJobs;
use vedetta_jobs::{Fate, Ledger, Mode, NewJob, Wanted};
use vedetta_kv::Put;
use vedetta_runtime::Watcher;
use vedetta_stage::{Fate as StageFate, Records as _, Tally, sqlite};

use crate::support::{Feed, Message, PATIENCE, Server, until};
use crate::watchers::NotZero;

impl Feed {
    /// The first event of this name that is like that.
    async fn until(&mut self, event: &str, is_it: impl Fn(&Value) -> bool) -> Message {
        let wait = async {
            loop {
                let message = self.event().await.expect("the stream goes on");
                if message.event == event && is_it(&message.data) {
                    return message;
                }
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.expect("it is told")
    }
}

fn job(id: u64, status: &'static str) -> impl Fn(&Value) -> bool {
    move |data| data["id"] == id && data["status"] == status
}

async fn add(server: &Server, kind: &str) -> u64 {
    server.post("/jobs", json!({ "kind": kind })).await["id"].as_u64().unwrap()
}

#[tokio::test]
async fn a_job_is_told_of_from_its_beginning_to_its_end() {
    let server = Server::start().await;
    let mut feed = server.feed("/events", "").await;
    let hello = feed.event().await.unwrap();
    assert_eq!(hello.event, "hello");
    assert!(hello.data["now"].is_string() && hello.data["version"].is_string(), "{hello:?}");

    let id = add(&server, "pack").await;
    let told = feed.until("job", job(id, "waiting")).await;
    assert_eq!((&told.data["kind"], &told.data["queue"]), (&json!("pack"), &json!("default")));
    assert!(told.data.get("payload").is_none(), "what is long is left out");
    let taken = server.post("/queues/default/take", json!({"worker": "anna"})).await;
    let proof = taken["jobs"][0]["token"].clone();
    let told = feed.until("job", job(id, "running")).await;
    assert_eq!(told.data["worker"], "anna");
    let note = json!({"token": proof, "progress": 0.5, "message": "half"});
    server.post(&format!("/jobs/{id}/keep"), note).await;
    let told = feed.until("job", |data| data["progress"] == 0.5).await;
    assert_eq!(told.data["message"], "half");
    server.post(&format!("/jobs/{id}/settle"), json!({"token": proof, "outcome": "done"})).await;
    feed.until("job", job(id, "done")).await;
    assert_eq!(server.send(&format!("DELETE /api/v1/jobs/{id}"), &[], "").await.status, 200);
    feed.until("job", |data| data["id"] == id && data["gone"] == true).await;
    server.end().await;
}

/// Another process works on the same jobs; what it does is told.
async fn told_of(server: &Server, jobs: &dyn Ledger) {
    let mut feed = server.feed("/events", "").await;
    feed.event().await.unwrap();
    let id = jobs.enqueue(&[NewJob::new("pack")]).await.unwrap()[0].id;
    feed.until("job", job(id.0, "waiting")).await;
    let lease = std::time::Duration::from_secs(30);
    let wanted = Wanted { queue: "default", worker: "anna", room: 1, capacity: 1, lease };
    let given = jobs.take(&wanted).await.unwrap().jobs.remove(0);
    feed.until("job", job(id.0, "running")).await;
    let settled = jobs.settle(&[(given.claim, Fate::Done { result: None })]).await.unwrap();
    assert_eq!(settled, [Settled::Gone]);
    feed.until("job", job(id.0, "done")).await;
    let told = feed.until("stats", |data| data["jobs"]["done_per_minute"] == 1).await;
    assert_eq!(told.data["jobs"]["done"], 1, "it is counted, too");
    jobs.set_mode("default", Mode::Paused).await.unwrap();
    feed.until("queue", |data| data["name"] == "default" && data["mode"] == "paused").await;
    server.store.put(Put::new("color", "blue")).await.unwrap();
    let told = feed.until("kv", |data| data["changes"][0]["key"] == "color").await;
    assert_eq!(told.data["changes"][0]["value"], "blue");
    feed.until("stats", |data| data["jobs"]["paused"] == 1).await;
}

#[tokio::test]
async fn what_happens_elsewhere_is_told_too() {
    let server = Server::start().await;
    let jobs = server.jobs.clone();
    told_of(&server, &jobs).await;
    server.end().await;
}

#[tokio::test]
async fn what_happens_elsewhere_is_told_too_on_postgresql() {
    let postgres = testing::postgres::Server::start().await;
    let url = postgres.database().await;
    let open = async || {
        let schemas = [vedetta_jobs::postgres::SCHEMA];
        PostgresJobs::new(Postgres::open_with(&url, 4, &schemas).await.unwrap())
    };
    let (ours, theirs) = (open().await, open().await);
    let server = Server::start().await.serve_as(|api| api.jobs(Arc::new(ours))).await;
    told_of(&server, &theirs).await;
    server.end().await;
}

#[tokio::test]
async fn workers_stages_and_watchers_are_told_of_as_they_change() {
    let folder = tempfile::tempdir().unwrap();
    let options = vedetta_db::Options::new(folder.path().join("stages.db"));
    let db = vedetta_db::Db::open(&options, &[sqlite::SCHEMA]).unwrap();
    let records = sqlite::Records::open(db).await.unwrap();
    let pay = records.lane("order", "pay").await.unwrap();
    let server = Server::start().await;
    let watching = Watcher::new("n/").start(server.store.clone(), NotZero);
    watching.ready(PATIENCE).await.unwrap();
    let (shown, handle) = (records.clone(), watching.handle());
    let server = server.serve_as(|api| api.stages(shown).watcher("numbers", handle)).await;
    let mut feed = server.feed("/events?topics=worker,stage,watcher", "").await;
    feed.event().await.unwrap();

    let beat = json!({"queues": ["default"], "version": "1", "done": []});
    server.post("/workers/anna/beat", beat).await;
    let told = feed.until("worker", |data| data["id"] == "anna").await.data;
    assert_eq!(
        (&told["status"], &told["queue"], &told["beats"]),
        (&json!("running"), &json!("default"), &json!(true))
    );

    records.enqueue(pay, &[("7", 0, Duration::ZERO)]).await.unwrap();
    let told = feed.until("stage", |data| data["records"] == 1 && data["due"] == 1).await.data;
    assert_eq!((&told["entity"], &told["stage"]), (&json!("order"), &json!("pay")));
    assert!(told["oldest_due_ms"].is_u64() && told["done"] == 0, "{told}");
    let claim = records.claim(pay, &[0], 1, PATIENCE).await.unwrap().claims.remove(0);
    records.settle(pay, &[(claim, StageFate::Gone)]).await.unwrap();
    records.note(pay, Tally { done: 1, ..Tally::default() }).await.unwrap();
    let told = feed.until("stage", |data| data["done"] == 1).await.data;
    assert_eq!((&told["records"], &told["due"]), (&json!(0), &json!(0)));
    assert!(told["oldest_due_ms"].is_null(), "{told}");

    server.put("n/1/x", "0").await;
    let told = feed.until("watcher", |data| data["failing"] == 1).await.data;
    assert_eq!((&told["name"], &told["ids"]), (&json!("numbers"), &json!(1)));
    assert!(told["failed"].as_u64() >= Some(1), "{told}");
    watching.stop(Duration::ZERO).await;
    server.end().await;
}

#[tokio::test]
async fn a_worker_and_a_supervisor_that_are_forgotten_are_told_to_be_gone() {
    let server = Server::start().await;
    let folder = tempfile::tempdir().unwrap();
    let options = vedetta_db::Options::new(folder.path().join("fleet.db"));
    let db = vedetta_db::Db::open(&options, &[vedetta_fleet::sqlite::SCHEMA]).unwrap();
    let roster = SqliteRoster::new(db.clone());
    let fleet = async || {
        let (bus, jobs) = (SqliteBus::new(db.clone()), server.jobs.clone());
        let beat = Duration::from_millis(100);
        Fleet::open(Arc::new(bus), Arc::new(roster.clone()), Arc::new(jobs), [], beat)
            .await
            .unwrap()
    };
    let beat = Beat { host: "elsewhere".into(), ..Beat::of_this_process(vec!["default".into()]) };
    fleet().await.heard("anna", beat, false).await.unwrap();
    // Ten minutes later, but for a moment.
    let seen = Duration::from_secs(595);
    let anna = roster.all().await.unwrap().workers.remove(0);
    let anna = WorkerRecord { seen, ..anna };
    let (name, host) = ("boss:elsewhere".into(), "elsewhere".into());
    let boss = SupervisorRecord { name, host, halted: false, seen };
    roster.save(&[anna], &[boss]).await.unwrap();
    let fleet = fleet().await;
    let server = server.serve_as(|api| api.fleet(fleet)).await;
    let mut workers = server.feed("/events?topics=worker", "").await;
    let mut supervisors = server.feed("/events?topics=supervisor", "").await;
    let told = workers.until("worker", |data| data["gone"] == true).await.data;
    assert_eq!(told["id"], "anna");
    let told = supervisors.until("supervisor", |data| data["gone"] == true).await.data;
    assert_eq!(told["name"], "boss:elsewhere");
    let kept = roster.all().await.unwrap();
    assert!(kept.workers.is_empty() && kept.supervisors.is_empty(), "{kept:?}");
    server.end().await;
}

#[tokio::test]
async fn a_queue_and_a_stage_that_are_no_longer_there_are_told_to_be_gone() {
    let postgres = testing::postgres::Server::start().await;
    let url = postgres.database().await;
    let schemas = [vedetta_jobs::postgres::SCHEMA];
    let database = Postgres::open_with(&url, 4, &schemas).await.unwrap();
    let jobs = Arc::new(PostgresJobs::new(database.clone()));
    let folder = tempfile::tempdir().unwrap();
    let options = vedetta_db::Options::new(folder.path().join("stages.db"));
    let db = vedetta_db::Db::open(&options, &[sqlite::SCHEMA]).unwrap();
    let records = sqlite::Records::open(db.clone()).await.unwrap();
    let pay = records.lane("order", "pay").await.unwrap();
    records.lane("order", "pack").await.unwrap();
    let (ledger, shown) = (Arc::clone(&jobs), records.clone());
    let api = |api: Api| api.jobs(ledger).stages(shown);
    let server = Server::start().await.serve_as(api).await;
    let mut queues = server.feed("/events?topics=queue", "").await;
    let mut stages = server.feed("/events?topics=stage", "").await;
    assert_eq!(queues.event().await.unwrap().event, "hello");
    assert_eq!(stages.event().await.unwrap().event, "hello");
    // Both are known once they were told of.
    for queue in ["kept", "old"] {
        jobs.set_mode(queue, Mode::Paused).await.unwrap();
        queues.until("queue", |data| data["name"] == queue).await;
    }
    records.enqueue(pay, &[("7", 0, Duration::ZERO)]).await.unwrap();
    stages.until("stage", |data| data["stage"] == "pay" && data["records"] == 1).await;
    let sql = "DELETE FROM vedetta_job_queue WHERE name = 'old'";
    database.client().await.unwrap().execute(sql, &[]).await.unwrap();
    let told = queues.until("queue", |data| data["gone"] == true).await.data;
    assert_eq!(told, json!({"name": "old", "gone": true}));
    let remove = |tx: &Tx<'_>| -> Result<(), Stop<Infallible>> {
        tx.execute("DELETE FROM stage_record", [])?;
        tx.execute("DELETE FROM stage_lane WHERE stage = 'pay'", [])?;
        Ok(())
    };
    db.write(Purpose::Store, remove).await.unwrap();
    let told = stages.until("stage", |data| data["gone"] == true).await.data;
    assert_eq!(told, json!({"entity": "order", "stage": "pay", "gone": true}));
    server.end().await;
}

#[tokio::test]
async fn a_worker_that_there_is_no_room_for_is_not_told_to_be_gone() {
    let server = Server::start().await;
    let comes = async |id: &str| {
        let beat = Beat::of_this_process(vec!["default".into()]);
        server.fleet.heard(id, beat, false).await.unwrap();
    };
    for number in 0..200 {
        comes(&format!("w{number:03}")).await;
    }
    let mut feed = server.feed("/events?topics=worker", "").await;
    // All are known once one that changed was told of.
    let paused = Beat { state: Status::Paused, ..Beat::of_this_process(vec!["default".into()]) };
    assert_eq!(feed.event().await.unwrap().event, "hello");
    server.fleet.heard("w199", paused, false).await.unwrap();
    feed.until("worker", |data| data["id"] == "w199").await;
    comes("a").await; // the first of them: the last has no place any more
    let told = feed.until("worker", |data| data["id"] == "a" || data["gone"] == true).await.data;
    assert_eq!(told["id"], "a");
    server.end().await;
}

#[tokio::test]
async fn a_client_that_never_reads_is_let_go_and_told_so_when_it_comes_back() {
    let limits = Limits { stall: Duration::from_millis(300), ..Limits::default() };
    let server = Server::with(limits).await;
    let mut feed = server.feed("/events?topics=kv", "").await;
    let seen = feed.event().await.unwrap().last;
    server.until_watchers(1).await;
    // More than the system holds for it, again and again. Nobody listens once it is let go, so soon nobody looks.
    let flood = async {
        let mut round = 0;
        while server.store.status().watchers > 0 {
            let puts = (0..50).map(|n| {
                let key = format!("{n:02}{}", "k".repeat(16_000));
                server.store.put(Put::new(key, round.to_string()))
            });
            futures_util::future::try_join_all(puts).await.unwrap();
            round += 1;
        }
    };
    tokio::time::timeout(3 * PATIENCE, flood).await.expect("it is let go");
    drop(feed);
    let again = format!("Last-Event-ID: {seen}\r\n");
    let mut feed = server.feed("/events?topics=kv", &again).await;
    assert_eq!(feed.event().await.unwrap().event, "hello");
    assert_eq!(feed.event().await.unwrap().event, "reset");
    server.put("color", "blue").await;
    feed.until("kv", |data| data["changes"][0]["key"] == "color").await;
    server.end().await;
}

#[tokio::test]
async fn who_comes_back_goes_on_where_it_was_and_who_cannot_is_told() {
    let server = Server::start().await;
    let mut feed = server.feed("/events?topics=job", "").await;
    feed.event().await.unwrap();
    let first = add(&server, "one").await;
    let seen = feed.until("job", job(first, "waiting")).await.last;
    drop(feed);
    let second = add(&server, "two").await;
    let mut feed = server.feed("/events?topics=job", &format!("Last-Event-ID: {seen}\r\n")).await;
    assert_eq!(feed.event().await.unwrap().event, "hello");
    let next = feed.event().await.unwrap();
    assert_eq!(
        (next.event.as_str(), &next.data["id"]),
        ("job", &json!(second)),
        "nothing is missed, nothing twice"
    );

    for lost in ["00000000-1", "nonsense", "99999999999999999999-1"] {
        let mut feed = server.feed("/events", &format!("Last-Event-ID: {lost}\r\n")).await;
        assert_eq!(feed.event().await.unwrap().event, "hello");
        let reset = feed.event().await.unwrap();
        assert_eq!(reset.event, "reset", "{lost}");
        let third = add(&server, "three").await;
        feed.until("job", job(third, "waiting")).await;
    }
    server.end().await;
}

#[tokio::test]
async fn a_stream_has_the_topics_that_were_asked_for() {
    let server = Server::start().await;
    let mut feed = server.feed("/events?topics=kv", "").await;
    assert_eq!(feed.event().await.unwrap().data["topics"], json!(["kv"]));
    add(&server, "pack").await;
    server.put("a", "1").await;
    assert_eq!(feed.event().await.unwrap().event, "kv");
    let wrong = server.get("/api/v1/events?topics=job,jobs").await;
    assert_eq!((wrong.status, wrong.code()), (422, "invalid".into()));
    server.end().await;
}

#[tokio::test]
async fn a_flood_of_keys_is_told_in_part_with_how_many_were_left_out() {
    let server = Server::start().await;
    let mut feed = server.feed("/events?topics=kv", "").await;
    feed.event().await.unwrap();
    let puts = (0..500).map(|n| server.store.put(Put::new(format!("k{n:03}"), "v".repeat(1000))));
    futures_util::future::try_join_all(puts).await.unwrap();
    let (mut told, mut left_out) = (0, 0);
    while told + left_out < 500 {
        let message = feed.event().await.unwrap();
        let changes = message.data["changes"].as_array().unwrap();
        assert!(
            changes.len() <= 50
                && changes.iter().all(|one| one["value"].as_str().unwrap().len() <= 200)
        );
        assert_eq!(changes[0]["bytes"], 1000);
        told += changes.len();
        left_out += usize::try_from(message.data["left_out"].as_u64().unwrap()).unwrap();
    }
    assert_eq!(told + left_out, 500);
    server.end().await;
}

#[tokio::test]
async fn nobody_looks_when_nobody_listens_and_a_stop_ends_the_streams() {
    let server = Server::start().await;
    assert_eq!(server.store.status().watchers, 0);
    let feed = server.feed("/events", "").await;
    let mut other = server.feed("/events", "").await;
    until(|| server.store.status().watchers == 1).await;
    drop(feed);
    other.event().await.unwrap();
    drop(other);
    until(|| server.store.status().watchers == 0).await;
    let mut feed = server.feed("/events", "").await;
    server.stop.cancel();
    while feed.event().await.is_some() {}
    server.end().await;
}
