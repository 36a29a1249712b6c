//! What people do with the pages.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use fantoccini::Locator;
use fantoccini::key::Key;
use serde_json::{Value, json};
use testing::browser::{Browser, Scripts};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use vedetta_access::{Access, Role, Scope};
use vedetta_dashboard::{Api, Limits, serve};
use vedetta_fleet::{Crew, Ending, RemoteFleet};
use vedetta_jobs::remote::RemoteJobs;
use vedetta_jobs::{BoxError, Outcome, Worker};
use vedetta_jobs::{Ledger as _, Mode};
use vedetta_kv::Put;
use vedetta_runtime::told::Board;
use vedetta_stage::Records as _;
use vedetta_stage::sqlite::{self, Records};

use crate::support::{PATIENCE, Server};

const HOSTILE: &str =
    r#"<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>"'`${window.hacked=3}"#;

async fn add(server: &Server, body: Value) -> u64 {
    server.post("/jobs", body).await["id"].as_u64().unwrap()
}

/// Takes a job of the default queue: its id and the proof.
async fn take(server: &Server) -> (u64, Value) {
    let taken = server.post("/queues/default/take", json!({"worker": "anna", "capacity": 2})).await;
    (taken["jobs"][0]["id"].as_u64().unwrap(), taken["jobs"][0]["token"].clone())
}

async fn settle(server: &Server, (id, token): &(u64, Value), outcome: Value) {
    let mut body = outcome;
    body["token"] = token.clone();
    server.post(&format!("/jobs/{id}/settle"), body).await;
}

/// A job that failed for good.
async fn dead(server: &Server, error: &str) -> u64 {
    let id = add(server, json!({"kind": "pack", "max_attempts": 1})).await;
    let taken = take(server).await;
    assert_eq!(taken.0, id);
    settle(server, &taken, json!({"outcome": "dead", "error": error})).await;
    id
}

async fn status(server: &Server, id: u64) -> String {
    let job = server.get(&format!("/api/v1/jobs/{id}")).await;
    if job.status == 404 {
        "gone".into()
    } else {
        job.json()["status"].as_str().unwrap().to_owned()
    }
}

/// It is the same page as before: it was not loaded again.
async fn mark(browser: &Browser) {
    browser.run("window.mark = 1").await;
}

async fn is_marked(browser: &Browser) -> bool {
    browser.run("return window.mark === 1").await == true
}

#[tokio::test]
async fn a_job_is_followed_to_its_end_without_loading_the_page_again() {
    let server = Server::start().await;
    let browser = Browser::open().await;
    let id = add(&server, json!({"kind": "pack"})).await;
    browser.live(server.address, "/jobs").await;
    mark(&browser).await;
    let row = format!("tr[data-job='{id}']");
    browser.says(&format!("{row} .badge"), "waiting").await;
    let taken = take(&server).await;
    browser.says(&format!("{row} .badge"), "running").await;
    let note = json!({"token": taken.1, "progress": 0.25, "message": "a quarter"});
    server.post(&format!("/jobs/{id}/keep"), note).await;
    browser.says(&format!("{row} [data-f=note]"), "a quarter").await;
    let bar =
        browser.run(&format!("return document.querySelector(\"{row} progress\").value")).await;
    assert_eq!(bar, 0.25);
    let next = add(&server, json!({"kind": "later"})).await;
    browser.says("#newer", "▲ 1 new").await;
    assert!(is_marked(&browser).await);

    browser.click(&format!("{row} a[data-f=id]")).await;
    browser.find("#line[data-state=live]").await;
    mark(&browser).await;
    browser.says("#job [data-f=percent]", "25 %").await;
    let note = json!({"token": taken.1, "progress": 0.75, "log": "three of four\n"});
    server.post(&format!("/jobs/{id}/keep"), note).await;
    browser.says("#job [data-f=percent]", "75 %").await;
    browser.says("#job [data-f=log]", "three of four").await;
    settle(&server, &taken, json!({"outcome": "done", "result": {"files": 4}})).await;
    browser.says("#job .badge", "done").await;
    browser.says("#job [data-f=result]", "\"files\": 4").await;
    assert!(is_marked(&browser).await);

    browser.live(server.address, "/").await;
    mark(&browser).await;
    browser.says("[data-stat='jobs.ready']", "1").await;
    let taken = take(&server).await;
    assert_eq!(taken.0, next);
    browser.says("[data-stat='jobs.running']", "1").await;
    settle(&server, &taken, json!({"outcome": "done"})).await;
    browser.says("#news li:first-child", "done").await;
    browser.says("[data-stat='jobs.ready']", "0").await;
    assert!(is_marked(&browser).await);
    assert_eq!(browser.complaints(), [""; 0]);
    drop(browser);
    server.end().await;
}

#[tokio::test]
async fn buttons_do_what_they_say_and_the_page_says_so() {
    let server = Server::start().await;
    let browser = Browser::open().await;
    let (first, second) = (dead(&server, "no ink").await, dead(&server, "no paper").await);
    browser.live(server.address, "/failed").await;
    mark(&browser).await;
    browser.says("#jobs", "no paper").await;
    browser.click(&format!("tr[data-job='{first}'] form[action$='/retry'] button")).await;
    browser.says("#outcome", &format!("Job {first} is to be tried again.")).await;
    browser.says(&format!("tr[data-job='{first}'] .badge"), "waiting").await;
    assert_eq!(status(&server, first).await, "waiting");
    browser.click(&format!("tr[data-job='{second}'] .careful summary")).await;
    browser.click(&format!("tr[data-job='{second}'] form[action$='/delete'] button")).await;
    browser.says(&format!("tr[data-job='{second}'] .badge"), "deleted").await;
    assert_eq!(status(&server, second).await, "gone");
    assert!(is_marked(&browser).await);

    browser.live(server.address, &format!("/jobs/{first}")).await;
    browser.click("form[action$='/cancel'] button").await;
    browser.says("#job .badge", "cancelled").await;
    assert_eq!(status(&server, first).await, "cancelled");

    browser.live(server.address, "/queues").await;
    mark(&browser).await;
    browser.click("tr[data-queue=default] form[action$='/pause'] button").await;
    browser.says("tr[data-queue=default] .badge", "paused").await;
    assert_eq!(server.jobs.queues().await.unwrap()[0].mode, Mode::Paused);
    browser.click("tr[data-queue=default] form[action$='/resume'] button").await;
    browser.says("tr[data-queue=default] .badge", "open").await;
    assert_eq!(server.jobs.queues().await.unwrap()[0].mode, Mode::Open);
    assert!(is_marked(&browser).await);

    let third = dead(&server, "no glue").await;
    browser.live(server.address, "/failed").await;
    browser.click("form.bulk button").await;
    browser.says("#outcome", "1 job is to be tried again.").await;
    assert_eq!(status(&server, third).await, "waiting");
    assert_eq!(browser.complaints(), [""; 0]);
    drop(browser);
    server.end().await;
}

/// A supervisor says that it is there. What it is told.
async fn supervise(server: &Server, state: &str) -> Value {
    let report = json!({"host": "here", "version": "1", "instance": "a", "queues": ["default"], "balance": "simple",
        "min": 0, "max": 3, "wanted": 0, "state": state, "last_exit": "exit code 1", "stderr": "token=kanari3nvogel"});
    server.post("/supervisors/boss:here/beat", report).await["commands"].clone()
}

#[tokio::test]
async fn workers_come_and_are_steered_without_loading_the_page_again() {
    let server = Server::start().await;
    let browser = Browser::open().await;
    browser.live(server.address, "/workers").await;
    mark(&browser).await;
    browser.says("main", "Nobody works here.").await;

    // A supervisor comes, and is asked for a worker.
    assert_eq!(supervise(&server, "running").await, json!([]));
    browser.says("tr[data-supervisor='boss:here'] .badge", "running").await;
    browser.says("tr[data-supervisor='boss:here'] .failure", "exit code 1").await;
    let page = browser.client.source().await.unwrap();
    assert!(!page.contains("kanari3nvogel"), "what looks like a secret is hidden");
    browser.click("form.start button").await;
    browser.says("#outcome", "1 worker was asked for.").await;
    let asked = async {
        loop {
            let commands = supervise(&server, "running").await;
            if commands != json!([]) {
                return commands;
            }
        }
    };
    let asked = tokio::time::timeout(PATIENCE, asked).await.expect("it is told");
    assert_eq!(asked[0]["command"], "start default 1");

    // The worker comes: over HTTP, as from another process.
    let jobs = Arc::new(RemoteJobs::new(&format!("http://{}", server.address), None).unwrap());
    let worker = Worker::new("default")
        .name("anna")
        .handler("pack", |_, (): ()| async { Ok::<_, BoxError>(Outcome::Done(None)) });
    let working = worker.start(Arc::clone(&jobs) as _).unwrap();
    let crew = Crew::new("anna", Arc::new(RemoteFleet::new(jobs)), vec![working]);
    let crew = tokio::spawn(crew.run(CancellationToken::new(), PATIENCE));
    let row = "tr[data-worker='anna']";
    browser.says(&format!("{row} .badge"), "running").await;
    browser.says(&format!("{row} [data-f=process]"), &std::process::id().to_string()).await;
    browser.click(&format!("{row} form[action='/workers/anna/pause'] button")).await;
    browser.says(&format!("{row} .badge"), "paused").await;
    let waits = add(&server, json!({"kind": "pack", "payload": null})).await;
    browser.click(&format!("{row} form[action$='/resume'] button")).await;
    browser.says(&format!("{row} .badge"), "running").await;
    let done = async {
        while status(&server, waits).await != "done" {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, done).await.expect("it works again");
    browser.click(&format!("{row} .careful summary")).await;
    browser.click(&format!("{row} form[action$='/stop'] button")).await;
    let ended = tokio::time::timeout(PATIENCE, crew).await.expect("it ends").unwrap();
    assert_eq!(ended.0, Ending::Told);
    browser.says(&format!("{row} .badge"), "stopped").await;

    // What becomes of the supervisor is seen, too.
    supervise(&server, "crash-looping").await;
    browser.says("tr[data-supervisor='boss:here'] .badge", "crash-looping").await;
    let retire = server.send("DELETE /api/v1/supervisors/boss:here", &[], "").await;
    assert_eq!(retire.status, 200, "{retire:?}");
    let left = "return document.querySelectorAll('[data-supervisor]').length";
    let gone = async {
        while browser.run(left).await != 0 {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.expect("its row goes with it");
    assert!(is_marked(&browser).await, "it is the same page");
    assert_eq!(browser.complaints(), [""; 0]);
    drop(browser);
    server.end().await;
}

#[tokio::test]
async fn what_was_not_there_when_a_page_was_loaded_comes_with_its_buttons() {
    let server = Server::start().await;
    let folder = tempfile::tempdir().unwrap();
    let options = vedetta_db::Options::new(folder.path().join("stages.db"));
    let db = vedetta_db::Db::open(&options, &[sqlite::SCHEMA]).unwrap();
    let records = Records::open(db).await.unwrap();
    let (board, _reading) = Board::start(&server.store);
    let shown = records.clone();
    let server = server.serve_as(|api| api.stages(shown).board(board)).await;
    let browser = Browser::open().await;

    browser.live(server.address, "/queues").await;
    mark(&browser).await;
    browser.says("main", "No queues yet.").await;
    add(&server, json!({"kind": "pack", "queue": "mail"})).await;
    let row = "tr[data-queue=mail]";
    browser.says(&format!("{row} [data-f=ready]"), "1").await;
    browser.says(&format!("{row} .name a[href='/jobs?queue=mail']"), "mail").await;
    browser.find(&format!("{row} a[href='/failed?queue=mail']")).await;
    browser.click(&format!("{row} form[action='/queues/mail/pause'] button")).await;
    browser.says(&format!("{row} .badge"), "paused").await;
    assert_eq!(server.jobs.queues().await.unwrap()[0].mode, Mode::Paused);
    assert!(!browser.client.source().await.unwrap().contains("No queues yet."));
    assert!(is_marked(&browser).await, "it is the same page");

    browser.live(server.address, "/").await;
    mark(&browser).await;
    for n in 0..10 {
        add(&server, json!({"kind": "pack", "queue": format!("queue-{n}")})).await;
    }
    browser.says("tr[data-queue=queue-0] [data-f=ready]", "1").await;
    browser.says("[data-stat='jobs.ready']", "11").await;
    let count = browser.run("return document.querySelectorAll('tr[data-queue]').length").await;
    assert!(count.as_u64().unwrap() <= 8, "no more than there is room for: {count}");
    assert!(is_marked(&browser).await, "it is the same page");

    browser.live(server.address, "/stages").await;
    mark(&browser).await;
    browser.says("main", "There are no stages.").await;
    let pay = records.lane("order", "pay").await.unwrap();
    records.enqueue(pay, &[("1", 0, Duration::ZERO)]).await.unwrap();
    browser.says("tr[data-stage] [data-f=entity]", "order").await;
    browser.says("tr[data-stage] [data-f=records]", "1").await;
    assert!(is_marked(&browser).await, "it is the same page");

    browser.live(server.address, "/watchers").await;
    mark(&browser).await;
    browser.says("main", "No watchers are declared.").await;
    let told = json!({"prefix": "/rooms/", "phase": "following", "revision": 1, "ids": 3, "running": 0, "waiting": 0,
        "failing": 0, "done": 3, "failed": 0, "malformed": 0, "unreadable": 0, "lists": 1, "lost": 0});
    let key = vedetta_runtime::told::status_key("rooms@web1");
    server.store.put(Put::new(key, told.to_string())).await.unwrap();
    let row = "tr[data-watcher='rooms@web1']";
    browser.says(&format!("{row} [data-f=ids]"), "3").await;
    browser.says(&format!("{row} [data-f=prefix]"), "/rooms/").await;
    browser.find(&format!("{row} form[action='/watchers/rooms%40web1/resync'] button")).await;
    assert!(is_marked(&browser).await, "it is the same page");
    assert_eq!(browser.complaints(), [""; 0]);
    drop(browser);
    server.end().await;
}

/// Fills in the form, and waits for the page.
async fn sign_in(browser: &Browser) {
    fill_in(browser).await;
    browser.find("#line[data-state=live]").await;
}

async fn fill_in(browser: &Browser) {
    for (field, text) in [("name", "otto"), ("password", "correct horse")] {
        let field = browser.find(&format!("input[name={field}]")).await;
        field.send_keys(text).await.unwrap();
    }
    browser.click("main button, form button").await;
}

#[tokio::test]
async fn whose_session_ends_is_told_to_sign_in_again() {
    let folder = tempfile::tempdir().unwrap();
    let access = Access::open(folder.path()).unwrap();
    let adding = access.clone();
    let add_user = move || adding.add_user("otto", "correct horse", Role::Operator).unwrap();
    tokio::task::spawn_blocking(add_user).await.unwrap();
    let (with, recheck) = (access.clone(), Duration::from_millis(20));
    let limits = Limits { recheck, ..Limits::default() };
    let server = Server::start().await;
    let server = server.serve_as(|api| api.access(with, true).limits(limits)).await;
    let browser = Browser::open().await;
    browser.goto(server.address, "/queues").await;
    sign_in(&browser).await;
    access.set_role("otto", Role::Viewer).unwrap();
    browser.says("#line", "signed out").await;
    browser.goto(server.address, "/queues").await;
    sign_in(&browser).await;
    drop(browser);
    server.end().await;
}

#[tokio::test]
async fn somebody_signs_in_does_what_they_may_and_signs_out() {
    const CANARY: &str = "kanari3nvogel";
    let folder = tempfile::tempdir().unwrap();
    let access = Access::open(folder.path()).unwrap();
    let adding = access.clone();
    let add_user = move || adding.add_user("otto", "correct horse", Role::Operator).unwrap();
    tokio::task::spawn_blocking(add_user).await.unwrap();
    let server = Server::start().await;
    let payload = json!({"kind": "pack", "payload": {"password": CANARY}});
    let id = add(&server, payload).await;
    let with = access.clone();
    let server = server.serve_as(|api| api.access(with, true)).await;
    let browser = Browser::open().await;
    browser.goto(server.address, &format!("/jobs/{id}")).await;
    let at = async || browser.client.current_url().await.unwrap().path().to_owned();
    assert_eq!(at().await, "/login", "first of all");
    sign_in(&browser).await;
    assert_eq!(at().await, format!("/jobs/{id}"), "where they wanted to go");

    // What is hidden is shown to those who ask and may, and it is told.
    assert!(!browser.client.source().await.unwrap().contains(CANARY));
    browser.click("#reveal").await;
    browser.find("#hide").await;
    assert!(browser.client.source().await.unwrap().contains(CANARY));
    let looked = || {
        let log = access.audit(None, 100).unwrap();
        log.iter().any(|it| it.who == "otto" && it.action == "GET /jobs/{id}")
    };
    crate::support::until(looked).await;
    browser.click("#hide").await;
    browser.find("#reveal").await;

    browser.live(server.address, "/queues").await;
    browser.click("tr[data-queue=default] form[action$='/pause'] button").await;
    browser.says("tr[data-queue=default] .badge", "paused").await;
    browser.click("form.sign-out button").await;
    browser.find("input[name=password]").await;
    browser.goto(server.address, "/jobs").await;
    assert_eq!(at().await, "/login", "nothing is left of it");
    drop(browser);
    server.end().await;
}

#[tokio::test]
async fn nothing_that_people_write_is_obeyed() {
    let server = Server::start().await;
    let browser = Browser::open().await;
    let payload = json!({"name": HOSTILE});
    browser.live(server.address, "/").await;
    let id = add(
        &server,
        json!({"kind": "pack", "payload": payload, "unique_key": HOSTILE, "tags": ["x"]}),
    )
    .await;
    browser.says("#news", "pack").await;
    let taken = take(&server).await;
    browser.live(server.address, "/jobs").await;
    let note = json!({"token": taken.1, "progress": 0.5, "message": HOSTILE, "log": HOSTILE});
    server.post(&format!("/jobs/{id}/keep"), note.clone()).await;
    browser.says("#jobs", "<img src=x").await;
    browser.live(server.address, &format!("/jobs/{id}")).await;
    server.post(&format!("/jobs/{id}/keep"), note).await;
    browser.says("#job [data-f=log]", "<img src=x").await;
    settle(&server, &taken, json!({"outcome": "dead", "error": HOSTILE})).await;
    browser.says("#job [data-f=error]", "<img src=x").await;
    browser.live(server.address, "/failed").await;
    browser.says("#jobs", "<img src=x").await;
    let again = dead(&server, HOSTILE).await;
    browser
        .live(server.address, &format!("/failed?q={}", "%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E"))
        .await;
    browser.live(server.address, "/kv").await;
    server.store.put(Put::new(HOSTILE, HOSTILE)).await.unwrap();
    server.store.put(Put::new("\u{202e}b", vec![0xff_u8, 0])).await.unwrap();
    browser.says("#changes", "base64").await;
    browser.says("#changes", "<img src=x").await;
    browser.live(server.address, "/kv").await;
    for path in [
        "/",
        "/jobs",
        "/failed",
        "/kv",
        "/insights",
        &format!("/jobs/{again}"),
        &format!("/jobs/{id}"),
    ] {
        browser.live(server.address, path).await;
        let found = browser.run("return [window.hacked ?? 0, document.querySelectorAll('main img, main script').length]").await;
        assert_eq!(found, json!([0, 0]), "{path}");
    }
    assert_eq!(browser.complaints(), [""; 0]);
    drop(browser);
    server.end().await;
}

#[tokio::test]
async fn without_scripts_pages_are_read_and_forms_work() {
    let server = Server::start().await;
    let browser = Browser::with(Scripts::Off).await;
    let id = dead(&server, "no ink").await;
    browser.goto(server.address, "/failed").await;
    browser.says("#jobs", "no ink").await;
    assert!(
        !browser.find("#pause").await.is_displayed().await.unwrap(),
        "what needs a script is not shown"
    );
    browser.click(&format!("tr[data-job='{id}'] form[action$='/retry'] button")).await;
    browser.says("#outcome", &format!("Job {id} is to be tried again.")).await;
    assert_eq!(status(&server, id).await, "waiting");
    let url = browser.client.current_url().await.unwrap();
    assert_eq!(url.path(), "/failed", "back where it was");

    browser.goto(server.address, "/").await;
    browser.says("[data-stat='jobs.ready']", "1").await;
    browser.click(".chart summary").await;
    browser.says(".chart table", "Done").await;
    browser.click("nav a[href='/jobs']").await;
    let field = browser.find("input[name=kind]").await;
    field.send_keys("pack").await.unwrap();
    browser.click(".filters button").await;
    // The list that is not narrowed has it, too.
    browser.find("input[name=kind][value=pack]").await;
    browser.click(&format!("tr[data-job='{id}'] a[data-f=id]")).await;
    browser.click("form[action$='/cancel'] button").await;
    browser.says("#job .badge", "cancelled").await;
    browser.click(".careful summary").await;
    browser.click("form[action$='/delete'] button").await;
    browser.says("#outcome", &format!("Job {id} was deleted.")).await;
    let (first, second) = (dead(&server, "no ink").await, dead(&server, "no paper").await);
    browser.goto(server.address, "/failed").await;
    browser.click("form.bulk button").await;
    browser.says("#outcome", "2 jobs are to be tried again.").await;
    for id in [first, second] {
        assert_eq!(status(&server, id).await, "waiting");
    }
    browser.goto(server.address, "/queues").await;
    browser.click("form[action$='/pause'] button").await;
    browser.says("tr[data-queue=default] .badge", "paused").await;
    browser.click("form.theme button[value=dark]").await;
    browser.find("html[data-theme=dark]").await;
    drop(browser);
    server.end().await;
}

#[tokio::test]
async fn without_scripts_people_sign_in_and_steer_workers() {
    let folder = tempfile::tempdir().unwrap();
    let access = Access::open(folder.path()).unwrap();
    let adding = access.clone();
    let add_user = move || adding.add_user("otto", "correct horse", Role::Operator).unwrap();
    tokio::task::spawn_blocking(add_user).await.unwrap();
    let token = access.add_token("worker", Role::Operator, &Scope::All, None).unwrap();
    let server = Server::start().await;
    let server = server.serve_as(|api| api.access(access, true)).await;
    // A worker that says how it is when a test has it do so.
    let authorization = format!("Bearer {}", token.reveal());
    let headers = [("Authorization", authorization.as_str()), ("Content-Type", "application/json")];
    let beat = async |state: &str, done: &Value| {
        let beat = json!({"queues": ["default"], "version": "1", "state": state, "done": done});
        let told = server.send("POST /api/v1/workers/anna/beat", &headers, &beat.to_string()).await;
        assert_eq!(told.status, 200, "{told:?}");
        told.json()["commands"].clone()
    };
    assert_eq!(beat("running", &json!([])).await, json!([]));
    let browser = Browser::with(Scripts::Off).await;
    browser.goto(server.address, "/workers").await;
    fill_in(&browser).await;
    let row = "tr[data-worker='anna']";
    browser.says(&format!("{row} .badge"), "running").await;
    let mut state = "running";
    for (verb, said, then) in [
        ("pause", "The worker is told to pause.", "paused"),
        ("resume", "The worker is told to go on.", "running"),
        ("stop", "The worker is told to finish what it has, and stop.", "stopping"),
    ] {
        if verb == "stop" {
            browser.click(&format!("{row} .careful summary")).await;
        }
        browser.click(&format!("{row} form[action='/workers/anna/{verb}'] button")).await;
        browser.says("#outcome", said).await;
        let told = beat(state, &json!([])).await;
        assert_eq!(told[0]["command"], verb, "{told}");
        state = then;
        beat(state, &json!([told[0]["id"]])).await;
        browser.goto(server.address, "/workers").await;
        browser.says(&format!("{row} .badge"), then).await;
    }
    browser.click("form.sign-out button").await;
    browser.find("input[name=password]").await;
    drop(browser);
    server.end().await;
}

#[tokio::test]
async fn the_keyboard_reaches_all_that_can_be_used() {
    /// What can be used and is seen, each with a mark of its own.
    const USABLE: &str = "
        const all = [...document.querySelectorAll('a[href], button, input, select, summary, [tabindex=\"0\"]')];
        const seen = all.filter((node) => node.type !== 'hidden' && node.checkVisibility() && !node.disabled);
        seen.forEach((node, n) => (node.dataset.reach = n));
        return seen.length";
    let server = Server::start().await;
    let browser = Browser::open().await;
    let id = dead(&server, "no ink").await;
    let job = format!("/jobs/{id}");
    for path in [
        "/",
        "/jobs",
        &job,
        "/failed",
        "/queues",
        "/workers",
        "/stages",
        "/watchers",
        "/kv",
        "/insights",
    ] {
        if path == "/workers" {
            crate::visits::beat(&server).await;
        }
        browser.live(server.address, path).await;
        let count = browser.run(USABLE).await.as_u64().unwrap();
        let mut reached = std::collections::BTreeSet::new();
        let body = browser.client.find(Locator::Css("body")).await.unwrap();
        for step in 0..count + 5 {
            let focus = browser.client.active_element().await.unwrap_or_else(|_| body.clone());
            focus.send_keys(&Key::Tab.to_string()).await.unwrap();
            let script = "const node = document.activeElement;
                return [node.dataset.reach ?? null, node.className, getComputedStyle(node).outlineStyle]";
            let now = browser.run(script).await;
            if step == 0 {
                assert_eq!(now[1], "skip", "{path}: the way to the content comes first");
            }
            if let Some(number) = now[0].as_str() {
                assert_ne!(now[2], "none", "{path}: the focus is seen");
                reached.insert(number.parse::<u64>().unwrap());
            }
        }
        let missing: Vec<u64> = (0..count).filter(|number| !reached.contains(number)).collect();
        assert!(missing.is_empty(), "{path}: {missing:?} of {count} are not reached");
    }
    browser.live(server.address, "/failed").await;
    browser.find(".skip").await.send_keys(&Key::Enter.to_string()).await.unwrap();
    assert_eq!(browser.run("return document.activeElement.id").await, "main");
    let button = browser.find(&format!("tr[data-job='{id}'] form[action$='/retry'] button")).await;
    button.send_keys(&Key::Enter.to_string()).await.unwrap();
    browser.says("#outcome", "is to be tried again").await;
    assert_eq!(status(&server, id).await, "waiting");
    drop(browser);
    server.end().await;
}

/// The same store and jobs, served at an address of our own.
async fn serve_at(
    server: &Server,
    address: Option<SocketAddr>,
) -> (SocketAddr, CancellationToken, tokio::task::JoinHandle<()>) {
    let wanted = address.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0)));
    let listener = TcpListener::bind(wanted).await.unwrap();
    let address = listener.local_addr().unwrap();
    let api = Api::new(server.store.clone())
        .jobs(Arc::new(server.jobs.clone()))
        .limits(Limits::default());
    let stop = CancellationToken::new();
    (address, stop.clone(), tokio::spawn(serve(listener, api, stop)))
}

#[tokio::test]
async fn the_stream_comes_back_when_the_server_does() {
    let server = Server::start().await;
    let browser = Browser::open().await;
    let (address, stop, serving) = serve_at(&server, None).await;
    let id = add(&server, json!({"kind": "pack"})).await;
    browser.live(address, "/jobs").await;
    mark(&browser).await;
    stop.cancel();
    tokio::time::timeout(PATIENCE, serving).await.expect("it ends").unwrap();
    browser.says("#line", "no connection").await;
    // What happens meanwhile is seen when it is back.
    let taken = take(&server).await;
    settle(&server, &taken, json!({"outcome": "done"})).await;
    let (_, stop, serving) = serve_at(&server, Some(address)).await;
    browser.says("#line", "live").await;
    browser.says(&format!("tr[data-job='{id}'] .badge"), "done").await;
    assert!(is_marked(&browser).await, "without loading it again");
    stop.cancel();
    drop(browser);
    tokio::time::timeout(PATIENCE, serving).await.expect("it ends").unwrap();
    server.end().await;
}

#[tokio::test]
async fn eight_tabs_load_and_are_live_and_a_paused_one_waits() {
    let server = Server::start().await;
    let browser = Browser::open().await;
    let id = add(&server, json!({"kind": "pack"})).await;
    let mut tabs = vec![browser.client.window().await.unwrap()];
    for _ in 0..7 {
        tabs.push(browser.client.new_window(true).await.unwrap().handle);
    }
    for tab in &tabs {
        browser.client.switch_to_window(tab.clone()).await.unwrap();
        browser.live(server.address, "/jobs").await;
    }
    browser.click("#pause").await;
    let taken = take(&server).await;
    let paused = tabs.pop().unwrap();
    let badge = format!("tr[data-job='{id}'] .badge");
    for tab in tabs {
        browser.client.switch_to_window(tab).await.unwrap();
        browser.says(&badge, "running").await;
    }
    browser.client.switch_to_window(paused).await.unwrap();
    browser.says("#line", "paused").await;
    browser.says(&badge, "waiting").await;
    browser.click("#pause").await;
    browser.says(&badge, "running").await;
    settle(&server, &taken, json!({"outcome": "done"})).await;
    browser.says(&badge, "done").await;
    let metrics = server.get("/metrics").await.body;
    let streams = metrics.lines().find(|line| line.contains(r#"route="/api/v1/events""#)).unwrap();
    assert!(streams.ends_with("} 1"), "one stream for all of them: {streams}");
    drop(browser);
    server.end().await;
}

/// Adds a job and has it done.
async fn do_one(server: &Server) {
    add(server, json!({"kind": "pack"})).await;
    let taken = take(server).await;
    settle(server, &taken, json!({"outcome": "done"})).await;
}

/// How many are done, as the line of the chart, the sentence and the label of the picture, and the table have it.
async fn charted(browser: &Browser) -> Value {
    let script = r#"
        const place = document.querySelector("[data-chart='throughput']");
        const section = place.closest(".chart");
        const sum = (values) => values.reduce((all, value) => all + value, 0);
        const cells = [...section.querySelectorAll("details td:nth-child(2)")];
        return [
            place.plot ? sum(place.plot.data[1]) : -1,
            parseInt(section.querySelector("p").textContent),
            parseInt(place.getAttribute("aria-label").replace("Throughput: ", "")),
            sum(cells.map((cell) => Number(cell.textContent))),
        ];"#;
    browser.run(script).await
}

async fn until_charted(browser: &Browser, done: u64) {
    let mut last = Value::Null;
    let wait = async {
        while last != json!([done, done, done, done]) {
            last = charted(browser).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, wait).await.is_ok(), "{done} are done: {last}");
}

#[tokio::test]
async fn charts_and_what_is_said_of_them_follow_without_loading_and_stand_still_when_paused() {
    let server = Server::start().await;
    let browser = Browser::open().await;
    // Without a queue there is no chart.
    do_one(&server).await;
    let mut done = 1;
    for path in ["/", "/insights?range=15m", "/insights?range=1h&queue=default"] {
        browser.live(server.address, path).await;
        mark(&browser).await;
        until_charted(&browser, done).await;
        do_one(&server).await;
        done += 1;
        until_charted(&browser, done).await;
        if path != "/" {
            browser.says("[aria-label='How long jobs ran'] p", "lately half ran up to ").await;
        }

        browser.click("#pause").await;
        browser.says("#line", "paused").await;
        let before = charted(&browser).await;
        do_one(&server).await;
        done += 1;
        // It is told of, and then again: a page that did not hold still would show it.
        let mut feed = server.feed("/events?topics=stats", "").await;
        let mut told = 0;
        while told < 3 {
            let event = feed.event().await.expect("the stream goes on");
            told += u32::from(event.data["jobs"]["done"] == done);
        }
        assert_eq!(charted(&browser).await, before, "{path}");
        browser.click("#pause").await;
        until_charted(&browser, done).await;
        assert!(is_marked(&browser).await, "{path}");
    }
    // A page that is loaded has the very same tables, once both are of the same moment.
    let same = async {
        loop {
            let all =
                "return [...document.querySelectorAll('details table')].map((it) => it.outerHTML)";
            let tables = browser.run(all).await;
            let page = server.get("/insights?range=1h&queue=default").await.body;
            let tables = tables.as_array().unwrap();
            assert_eq!(tables.len(), 5);
            if tables.iter().all(|table| page.contains(table.as_str().unwrap())) {
                break;
            }
        }
    };
    tokio::time::timeout(PATIENCE, same).await.expect("the server writes them so, too");
    assert_eq!(browser.complaints(), [""; 0]);
    drop(browser);
    server.end().await;
}
