//! Jobs and their queues, as people and workers in any language see them.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use vedetta_jobs::{Cost, Jobs as _, Kind, Kinds, Ledger as _, Mode, NewJob};

use crate::support::{PATIENCE, Server};

async fn add(server: &Server, kind: &str) -> u64 {
    server.post("/jobs", json!({ "kind": kind })).await["id"].as_u64().unwrap()
}

/// What Anna gets of the default queue.
async fn take(server: &Server) -> Value {
    let taken = server.post("/queues/default/take", json!({ "worker": "anna" })).await;
    taken["jobs"][0].clone()
}

#[tokio::test]
async fn a_job_is_asked_for_taken_kept_and_settled() {
    let server = Server::start().await;
    let asked = r#"{"kind": "resize", "queue": "media", "payload": { "w":  1.50 }, "cost": 3, "tags": ["x"], "timeout": "90s"}"#;
    let added = server.json("POST /api/v1/jobs", asked).await;
    let id = added.json()["id"].as_u64().unwrap();
    let expected = json!({"id": id, "kind": "resize", "queue": "media", "status": "waiting", "new": true,
        "declared": false});
    assert_eq!((added.status, added.json()), (201, expected));

    let body = r#"{"worker": "anna", "max": 5, "lease_ms": 5000}"#;
    let taken = server.json("POST /api/v1/queues/media/take", body).await;
    assert!(taken.body.contains(r#""payload":{ "w":  1.50 }"#), "as it was written: {taken:?}");
    let job = taken.json()["jobs"][0].clone();
    assert_eq!((&job["id"], &job["kind"]), (&json!(id), &json!("resize")));
    assert_eq!((&job["cost"], &job["tags"]), (&json!(3), &json!(["x"])));
    assert_eq!((&job["attempt"], &job["max_attempts"]), (&json!(1), &json!(5)));
    assert_eq!((&job["timeout_ms"], &job["lease_ms"]), (&json!(90_000), &json!(5_000)));

    let note = json!({"token": job["token"], "progress": 0.25, "message": "half", "log": "a\nb\n"});
    let kept = server.post(&format!("/jobs/{id}/keep"), note).await;
    assert_eq!(kept, json!({"cancel": false, "lease_ms": 5_000}));
    let shown = server.get(&format!("/api/v1/jobs/{id}")).await.json();
    assert_eq!((&shown["status"], &shown["worker"]), (&json!("running"), &json!("anna")));
    assert_eq!((&shown["progress"], &shown["message"]), (&json!(0.25), &json!("half")));
    assert_eq!(shown["log"], "a\nb\n");

    let end = json!({"token": job["token"], "outcome": "done", "result": {"ok": true}});
    let settled = server.post(&format!("/jobs/{id}/settle"), end.clone()).await;
    assert_eq!(settled, json!({"settled": "done"}));
    let shown = server.get(&format!("/api/v1/jobs/{id}")).await.json();
    assert_eq!((&shown["status"], &shown["result"]), (&json!("done"), &json!({"ok": true})));
    let note = json!({"token": job["token"]}).to_string();
    let late = server.json(&format!("POST /api/v1/jobs/{id}/keep"), &note).await;
    assert_eq!((late.status, late.code()), (409, "conflict".into()));
    server.end().await;
}

#[tokio::test]
async fn a_unique_key_meets_the_job_that_waits() {
    let server = Server::start().await;
    let ask = async |body: Value| server.json("POST /api/v1/jobs", &body.to_string()).await;
    let keyed = json!({"kind": "sync", "unique_key": "u"});
    let first = ask(keyed.clone()).await;
    let second = ask(keyed.clone()).await;
    assert_eq!((first.status, second.status), (201, 200));
    assert_eq!(first.json()["id"], second.json()["id"]);
    assert_eq!((&first.json()["new"], &second.json()["new"]), (&json!(true), &json!(false)));
    assert_eq!(ask(json!([keyed])).await.status, 200);
    let mixed = ask(json!([keyed, {"kind": "other"}])).await;
    assert_eq!((mixed.status, mixed.json()[1]["new"].clone()), (201, json!(true)));
    assert_eq!(ask(json!([])).await.json(), json!([]));
    server.end().await;
}

#[tokio::test]
async fn what_a_kind_says_is_added_and_what_is_asked_wins() {
    let costs = BTreeMap::from([("720p".to_owned(), 2), ("1080p".to_owned(), 4)]);
    let kind = Kind {
        queue: "media".into(),
        cost: Cost::From { field: "size".into(), costs },
        max_attempts: 7,
        timeout: Some(Duration::from_secs(60)),
    };
    let kinds = Kinds(BTreeMap::from([("transcode".to_owned(), kind)]));
    let server = Server::start().await.serve_as(|api| api.kinds(kinds)).await;
    let payload = json!({"size": "1080p"});
    let added = server.post("/jobs", json!({"kind": "transcode", "payload": payload})).await;
    assert_eq!(added["declared"], true);
    server.post("/jobs", json!({"kind": "transcode", "payload": payload, "cost": 9})).await;
    let jobs = server.get("/api/v1/jobs?queue=media").await.json();
    assert_eq!((&jobs["jobs"][0]["cost"], &jobs["jobs"][1]["cost"]), (&json!(9), &json!(4)));
    assert_eq!(jobs["jobs"][1]["max_attempts"], 7);
    assert_eq!(jobs["jobs"][1]["timeout"], "1m");
    let many = json!([{"kind": "a"}, {"kind": "transcode", "payload": {"size": "4k"}}]).to_string();
    let wrong = server.json("POST /api/v1/jobs", &many).await;
    assert_eq!(wrong.status, 422);
    assert!(wrong.body.contains("number 2 of them: "), "{wrong:?}");
    server.end().await;
}

#[tokio::test]
async fn jobs_are_listed_newest_first_by_what_is_asked_for_page_by_page() {
    let server = Server::start().await;
    for n in 0..7 {
        let tags = if n % 2 == 0 { json!(["even"]) } else { json!([]) };
        let job = json!({"kind": "count", "payload": {"n": n}, "tags": tags, "queue": "numbers"});
        server.post("/jobs", job).await;
    }
    add(&server, "other").await;
    let numbers = async |query: &str| {
        let (mut numbers, mut cursor) = (Vec::new(), String::new());
        loop {
            let page = server.get(&format!("/api/v1/jobs?limit=2&{query}{cursor}")).await.json();
            let jobs = page["jobs"].as_array().unwrap();
            assert!(jobs.len() <= 2);
            numbers.extend(jobs.iter().map(|job| job["payload"]["n"].clone()));
            match page["cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => return json!(numbers),
            }
        }
    };
    assert_eq!(numbers("kind=count").await, json!([6, 5, 4, 3, 2, 1, 0]));
    assert_eq!(numbers("queue=numbers&tag=even").await, json!([6, 4, 2, 0]));
    assert_eq!(numbers("q=%22n%22%3A3").await, json!([3]));
    assert_eq!(numbers("status=dead").await, json!([]));
    server.end().await;
}

#[tokio::test]
async fn a_page_of_large_jobs_ends_early_and_goes_on() {
    let server = Server::start().await;
    let large = "x".repeat(900_000);
    let jobs = vec![NewJob::new("large").payload(&large).unwrap(); 60];
    for some in jobs.chunks(6) {
        server.jobs.enqueue(some).await.unwrap();
    }
    let page = server.get("/api/v1/jobs?limit=500").await.json();
    assert_eq!(page["jobs"].as_array().unwrap().len(), 50);
    let next = format!("/api/v1/jobs?cursor={}", page["cursor"].as_str().unwrap());
    let page = server.get(&next).await.json();
    assert_eq!((page["jobs"].as_array().unwrap().len(), page.get("cursor")), (10, None));
    server.end().await;
}

#[tokio::test]
async fn jobs_are_retried_cancelled_and_removed_where_that_can_be() {
    let server = Server::start().await;
    let id = add(&server, "pack").await;
    let change = async |what: &str| {
        let path = if what == "delete" { String::new() } else { format!("/{what}") };
        let method = if what == "delete" { "DELETE" } else { "POST" };
        let answer = server.send(&format!("{method} /api/v1/jobs/{id}{path}"), &[], "").await;
        (answer.status, answer.json())
    };
    assert_eq!(change("retry").await.0, 409);
    assert_eq!(change("cancel").await, (200, json!({"id": id, "status": "cancelled"})));
    let (status, why) = change("cancel").await;
    assert_eq!((status, &why["error"]["message"]), (409, &json!(format!("job {id} is cancelled"))));
    assert_eq!(change("retry").await, (200, json!({"id": id, "status": "waiting"})));
    let job = take(&server).await;
    assert_eq!(change("delete").await.0, 409);
    assert_eq!(change("cancel").await.0, 200);

    let note = json!({"token": job["token"]});
    let kept = server.post(&format!("/jobs/{id}/keep"), note).await;
    assert_eq!((&kept["cancel"], kept.get("stale")), (&json!(true), None));
    let end = json!({"token": job["token"], "outcome": "done"}).to_string();
    let late = server.json(&format!("POST /api/v1/jobs/{id}/settle"), &end).await;
    assert_eq!(late.status, 409);
    assert!(late.body.contains("was cancelled"), "{late:?}");

    assert_eq!(change("delete").await, (200, json!({"id": id, "deleted": true})));
    for what in ["retry", "cancel", "delete"] {
        assert_eq!(change(what).await.0, 404, "{what}");
    }
    assert_eq!(server.get(&format!("/api/v1/jobs/{id}")).await.status, 404);
    server.end().await;
}

#[tokio::test]
async fn a_job_that_fails_is_tried_again_until_its_attempts_are_used_up() {
    let server = Server::start().await;
    let asked = json!({"kind": "pack", "max_attempts": 2});
    let id = server.post("/jobs", asked).await["id"].as_u64().unwrap();
    let fail = async |delay: Option<u64>| {
        let mut end = json!({"token": take(&server).await["token"], "outcome": "failed"});
        end["error"] = json!("no stock");
        if let Some(delay) = delay {
            end["delay_ms"] = json!(delay);
        }
        server.post(&format!("/jobs/{id}/settle"), end).await
    };
    assert_eq!(fail(Some(0)).await, json!({"settled": "again", "delay_ms": 0}));
    assert_eq!(fail(Some(0)).await, json!({"settled": "dead"}));
    let shown = server.get(&format!("/api/v1/jobs/{id}")).await.json();
    assert_eq!((&shown["status"], &shown["error"]), (&json!("dead"), &json!("no stock")));

    let retried = server.post("/jobs/retry", json!({"kind": "pack"})).await;
    assert_eq!(retried, json!({"retried": 1}));
    let again = fail(None).await;
    let delay = again["delay_ms"].as_u64().unwrap();
    assert!((800..=1_000).contains(&delay), "a second, or up to a fifth less: {again}");
    server.end().await;
}

#[tokio::test]
async fn one_that_cannot_be_retried_does_not_hold_up_the_others() {
    let server = Server::start().await;
    let keyed = || NewJob { unique_key: Some("k".into()), ..NewJob::new("pack") };
    let mut ids = Vec::new();
    for job in [NewJob::new("pack"), keyed(), keyed()] {
        let id = server.jobs.enqueue(&[job]).await.unwrap()[0].id;
        server.jobs.cancel(id).await.unwrap();
        ids.push(id);
    }
    server.jobs.retry(ids[2]).await.unwrap();
    // The second would be another that waits under the key.
    let retried = server.post("/jobs/retry", json!({"status": "cancelled"})).await;
    assert_eq!(retried, json!({"retried": 1}));
    for (id, status) in ids.iter().zip(["waiting", "cancelled", "waiting"]) {
        assert_eq!(server.get(&format!("/api/v1/jobs/{id}")).await.json()["status"], status);
    }
    server.end().await;
}

#[tokio::test]
async fn all_that_fit_a_filter_are_retried_a_bounded_number_at_a_time() {
    let server = Server::start().await;
    for kind in ["a", "b"] {
        let ids = server.jobs.enqueue(&vec![NewJob::new(kind); 600]).await.unwrap();
        for id in ids {
            server.jobs.cancel(id.id).await.unwrap();
        }
    }
    assert_eq!(server.post("/jobs/retry", json!({})).await, json!({"retried": 0}), "none is dead");
    let (mut retried, mut calls) = (0, 0);
    let mut body = json!({"status": "cancelled", "kind": "a"});
    loop {
        let some = server.post("/jobs/retry", body.clone()).await;
        calls += 1;
        retried += some["retried"].as_u64().unwrap();
        assert!(calls < 100, "it ends");
        match some.get("cursor") {
            Some(cursor) => body["cursor"] = cursor.clone(),
            None => break,
        }
    }
    assert_eq!(retried, 600);
    assert!(calls > 1);
    let queues = server.jobs.queues().await.unwrap();
    assert_eq!((queues[0].ready, queues[0].cancelled), (600, 600));
    server.end().await;
}

#[tokio::test]
async fn a_take_counts_jobs_or_with_a_capacity_slots() {
    let server = Server::start().await;
    let jobs =
        json!([{"kind": "a", "cost": 4}, {"kind": "b", "cost": 4}, {"kind": "c", "cost": 4}]);
    server.post("/jobs", jobs.clone()).await;
    let some = server.post("/queues/default/take", json!({"worker": "anna", "max": 2})).await;
    assert_eq!((some["jobs"].as_array().unwrap().len(), some.get("rest_ms")), (2, None));
    server.post("/jobs", jobs).await;
    let slots = json!({"worker": "anna", "max": 7, "capacity": 8});
    let some = server.post("/queues/default/take", slots).await;
    assert_eq!(some["jobs"].as_array().unwrap().len(), 2);
    server.end().await;
}

#[tokio::test]
async fn a_take_waits_until_there_is_something_and_not_for_ever() {
    let server = Server::start().await;
    let nothing = json!({"worker": "anna", "wait_ms": 20});
    assert_eq!(server.post("/queues/default/take", nothing).await["jobs"], json!([]));
    let waits = json!({"worker": "anna", "wait_ms": 60_000});
    let added = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        add(&server, "pack").await
    };
    let both = async { tokio::join!(server.post("/queues/default/take", waits.clone()), added) };
    let (taken, id) = tokio::time::timeout(PATIENCE, both).await.expect("it is woken");
    assert_eq!(taken["jobs"][0]["id"], json!(id));

    // One that becomes due while nobody does anything.
    server.post("/jobs", json!({"kind": "later", "run_at": "+100ms"})).await;
    let taken = server.post("/queues/default/take", waits.clone());
    let taken = tokio::time::timeout(PATIENCE, taken).await.expect("it is due");
    assert_eq!(taken["jobs"][0]["kind"], "later");

    // A stop lets it go.
    let take = async { server.post("/queues/default/take", waits).await };
    let stop = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        server.stop.cancel();
    };
    let (taken, ()) = tokio::join!(take, stop);
    assert_eq!(taken["jobs"], json!([]));
    server.end().await;
}

#[tokio::test]
async fn who_hangs_up_while_waiting_takes_nothing_along() {
    let server = Server::start().await;
    for _ in 0..20 {
        let mut line = TcpStream::connect(server.address).await.unwrap();
        let body = r#"{"worker": "gone", "wait_ms": 60000, "lease_ms": 3600000}"#;
        let request = format!(
            "POST /api/v1/queues/default/take HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            server.address,
            body.len()
        );
        line.write_all(request.as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let id = add(&server, "pack").await;
    let waits = json!({"worker": "anna", "wait_ms": 60_000});
    let taken = server.post("/queues/default/take", waits);
    let taken = tokio::time::timeout(PATIENCE, taken).await.expect("it comes back");
    assert_eq!(taken["jobs"][0]["id"], json!(id));
    server.end().await;
}

#[tokio::test]
async fn many_are_kept_and_settled_in_one_request_each_by_its_own_token() {
    let server = Server::start().await;
    server.post("/jobs", json!([{"kind": "a"}, {"kind": "b"}, {"kind": "c"}])).await;
    let taken = server.post("/queues/default/take", json!({"worker": "anna", "max": 3})).await;
    let job = |n: usize| (taken["jobs"][n]["id"].clone(), taken["jobs"][n]["token"].clone());
    let ((a, a_token), (b, b_token), (c, c_token)) = (job(0), job(1), job(2));
    let cancelled = server.send(&format!("POST /api/v1/jobs/{b}/cancel"), &[], "").await;
    assert_eq!(cancelled.status, 200);
    let notes = json!([
        {"id": a, "token": a_token, "progress": 0.5},
        {"id": b, "token": b_token},
        {"id": c, "token": "1:30000"},
    ]);
    let kept = server.post("/jobs/keep", notes).await;
    let expected = json!([
        {"cancel": false, "lease_ms": 30_000},
        {"cancel": true, "lease_ms": 0},
        {"cancel": false, "stale": true, "lease_ms": 0},
    ]);
    assert_eq!(kept, expected);
    let ends = json!([
        {"id": a, "token": a_token, "outcome": "done"},
        {"id": b, "token": b_token, "outcome": "done"},
        {"id": c, "token": c_token, "outcome": "released"},
    ]);
    let settled = server.post("/jobs/settle", ends).await;
    let expected =
        json!([{"settled": "done"}, {"settled": "stale"}, {"settled": "again", "delay_ms": 0}]);
    assert_eq!(settled, expected);
    server.end().await;
}

#[tokio::test]
async fn queues_pause_drain_and_resume() {
    let server = Server::start().await;
    let set = async |queue: &str, what: &str| {
        let path = format!("POST /api/v1/queues/{queue}/{what}");
        server.send(&path, &[], "").await.json()
    };
    // A mistyped name makes no queue.
    let mistyped = server.send("POST /api/v1/queues/a%2Fb/pause", &[], "").await;
    assert_eq!((mistyped.status, mistyped.code()), (404, "not_found".into()));
    assert!(server.jobs.queues().await.unwrap().is_empty());
    server.post("/jobs", json!({"kind": "pack", "queue": "a/b", "cost": 3})).await;
    assert_eq!(set("a%2Fb", "pause").await, json!({"name": "a/b", "mode": "paused"}));
    let take = json!({"worker": "anna"});
    assert_eq!(server.post("/queues/a%2Fb/take", take.clone()).await["jobs"], json!([]));
    assert_eq!(set("a%2Fb", "drain").await["mode"], "draining");
    let refused = server.json("POST /api/v1/jobs", r#"{"kind": "pack", "queue": "a/b"}"#).await;
    assert_eq!((refused.status, refused.code()), (409, "conflict".into()));
    assert_eq!(server.post("/queues/a%2Fb/take", take).await["jobs"][0]["kind"], "pack");
    let queues = server.get("/api/v1/queues").await.json();
    let queue = &queues["queues"][0];
    assert_eq!((&queue["name"], &queue["mode"]), (&json!("a/b"), &json!("draining")));
    assert_eq!((&queue["running"], &queue["slots"]), (&json!(1), &json!(3)));
    assert_eq!(set("a%2Fb", "resume").await["mode"], "open");
    assert_eq!(server.jobs.queues().await.unwrap()[0].mode, Mode::Open);
    server.end().await;
}

#[tokio::test]
async fn the_stream_of_wake_ups_says_when_there_is_more_and_when_to_look() {
    let server = Server::start().await;
    let mut feeds = [
        server.feed("/queues/default/wake", "").await,
        server.feed("/queues/default/wake", "").await,
    ];
    let id = add(&server, "pack").await;
    for feed in &mut feeds {
        assert_eq!(feed.event().await.unwrap().event, "more");
    }
    take(&server).await;
    server.send(&format!("POST /api/v1/jobs/{id}/cancel"), &[], "").await;
    for feed in &mut feeds {
        while feed.event().await.unwrap().event != "look" {}
    }
    server.stop.cancel();
    for feed in &mut feeds {
        while feed.event().await.is_some() {}
    }
    server.end().await;
}

#[tokio::test]
async fn what_is_wrong_is_refused_with_the_right_status() {
    let server = Server::start().await;
    let id = add(&server, "pack").await;
    let token = take(&server).await["token"].as_str().unwrap().to_owned();
    let (keep, settle) = (format!("/jobs/{id}/keep"), format!("/jobs/{id}/settle"));
    let of = |rest: &str| format!(r#"{{"token": "{token}", {rest}}}"#);
    for (path, body, status) in [
        ("/jobs", "{".to_owned(), 400),
        ("/jobs", "7".to_owned(), 422),
        ("/jobs", r#"{"kind": "a", "colour": "red"}"#.to_owned(), 422),
        ("/jobs", r#"{"kind": "a b"}"#.to_owned(), 422),
        ("/jobs", r#"{"kind": "a", "run_at": "soon"}"#.to_owned(), 422),
        ("/jobs", r#"[{"kind": "a"}, {"kind": ""}]"#.to_owned(), 422),
        ("/jobs", format!(r#"{{"kind": "a", "payload": "{}"}}"#, "x".repeat(1 << 20)), 422),
        ("/jobs", format!(r#"{{"kind": "a", "payload": "{}"}}"#, "x".repeat(8 << 20)), 413),
        ("/jobs/retry", r#"{"status": "waiting"}"#.to_owned(), 422),
        ("/jobs/retry", r#"{"status": "nothing"}"#.to_owned(), 422),
        ("/jobs/retry", r#"{"cursor": "x"}"#.to_owned(), 422),
        ("/queues/default/take", "{}".to_owned(), 422),
        ("/queues/default/take", r#"{"worker": "anna", "max": 0}"#.to_owned(), 422),
        ("/queues/default/take", r#"{"worker": "anna", "lease_ms": 1}"#.to_owned(), 422),
        ("/queues/default/take", r#"{"worker": "an na"}"#.to_owned(), 422),
        ("/queues/no%20name/take", r#"{"worker": "anna"}"#.to_owned(), 422),
        (&keep, "{}".to_owned(), 422),
        (&keep, r#"{"token": 7}"#.to_owned(), 422),
        (&keep, of(r#""progress": 1.5"#), 422),
        (&keep, of(r#""id": 1"#), 422),
        (&settle, of(r#""outcome": "great""#), 422),
        (&settle, of(r#""outcome": "snooze""#), 422),
        (&settle, r#"{"token": "1:1", "outcome": "done"}"#.to_owned(), 409),
        ("/jobs/999/settle", of(r#""outcome": "done""#), 404),
        ("/jobs/999/keep", of(r#""log": "x""#), 404),
        ("/jobs/keep", format!("[{}]", of(r#""log": "x""#)), 422),
        ("/jobs/first/keep", of(r#""log": "x""#), 422),
    ] {
        let answer = server.json(&format!("POST /api/v1{path}"), &body).await;
        assert_eq!(answer.status, status, "{path} {body:.100}: {answer:?}");
        assert!(!answer.code().is_empty(), "{answer:?}");
    }
    for (path, status) in [
        ("/jobs?status=nothing", 422),
        ("/jobs?cursor=x", 422),
        ("/jobs?colour=red", 422),
        ("/jobs/retry", 405),
        ("/jobs/999", 404),
        ("/jobs/x", 422),
        ("/queues?x=1", 422),
    ] {
        assert_eq!(server.get(&format!("/api/v1{path}")).await.status, status, "{path}");
    }
    let from_elsewhere = [("Origin", "http://evil.example"), ("Content-Type", "application/json")];
    let refused = server.send("POST /api/v1/jobs", &from_elsewhere, r#"{"kind": "a"}"#).await;
    assert_eq!(refused.status, 403);
    let plain = server.send("POST /api/v1/jobs", &[], r#"{"kind": "a"}"#).await;
    assert_eq!(plain.status, 415);
    assert_eq!(server.jobs.queues().await.unwrap()[0].ready, 0, "nothing was stored");
    server.end().await;
}
