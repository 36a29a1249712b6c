//! Secrets that went into jobs by mistake.

use serde_json::{Value, json};
use vedetta_access::Role;
use vedetta_jobs::{Jobs as _, NewJob};

use crate::Guarded;
use crate::support::PATIENCE;

const CANARY: &str = "kanari3nvogel";

/// A job with the canary in its payload, error, log, message and result; its id.
async fn sing(guarded: &Guarded, worker: &str) -> u64 {
    let payload = json!({"user": "anna", "auth": {"Password": CANARY, "n": 1}, "list": [{"api_key": [CANARY]}]});
    let asked = json!({"kind": "pack", "payload": payload, "max_attempts": 1});
    let added = guarded.tells("POST /api/v1/jobs", worker, asked).await.json();
    let id = added["id"].as_u64().unwrap();
    let take = json!({"worker": "w", "max": 1});
    let taken = guarded.tells("POST /api/v1/queues/default/take", worker, take).await.json();
    let proof = &taken["jobs"][0]["token"];
    // Who works on it gets it whole.
    assert_eq!(taken["jobs"][0]["payload"]["auth"]["Password"], CANARY, "{taken}");
    let log = format!(
        "connecting with --password {CANARY}\nAuthorization: Bearer {CANARY}\n{{\"token\": \"{CANARY}\"}}\n"
    );
    let note =
        json!({"token": proof, "progress": 0.5, "message": format!("secret={CANARY}"), "log": log});
    let kept = guarded.tells(&format!("POST /api/v1/jobs/{id}/keep"), worker, note).await;
    assert_eq!(kept.status, 200, "{kept:?}");
    let error = format!("postgres://me:{CANARY}@db/jobs: refused; passwd: '{CANARY}'");
    let end = json!({"token": proof, "outcome": "failed", "error": error});
    let settled = guarded.tells(&format!("POST /api/v1/jobs/{id}/settle"), worker, end).await;
    assert_eq!(settled.status, 200, "{settled:?}");
    id
}

#[tokio::test]
async fn secrets_of_jobs_are_shown_to_those_only_who_ask_for_them_and_may() {
    let guarded = Guarded::start().await;
    let operator = guarded.token("worker", Role::Operator);
    let viewer = guarded.token("viewer", Role::Viewer);
    let id = sing(&guarded, &operator).await;
    let one = format!("GET /api/v1/jobs/{id}");
    for (who, request) in [
        (&viewer, one.as_str()),
        (&viewer, "GET /api/v1/jobs"),
        (&viewer, "GET /api/v1/jobs?status=dead"),
        (&operator, one.as_str()),
        (&operator, &format!("{one}?reveal=false")),
        (&operator, "GET /api/v1/jobs"),
    ] {
        let answer = guarded.asks(request, who).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        assert!(!answer.body.contains(CANARY), "{request}: {}", answer.body);
        assert!(
            answer.body.contains("•••• (redacted)") && answer.body.contains("anna"),
            "{request}"
        );
    }
    let reveal = format!("{one}?reveal=true");
    assert_eq!(guarded.asks(&reveal, &viewer).await.status, 403);
    assert_eq!(guarded.asks(&format!("{one}?re%76eal=true"), &viewer).await.status, 403);
    let shown = guarded.asks(&reveal, &operator).await;
    let job: Value = shown.json();
    assert_eq!(job["payload"]["list"][0]["api_key"][0], CANARY);
    assert_eq!(
        job["error"],
        format!("postgres://me:{CANARY}@db/jobs: refused; passwd: '{CANARY}'")
    );

    // It is told who looked, and who wanted to.
    let log = guarded.log(6).await;
    let looked: Vec<_> = log
        .iter()
        .filter(|entry| entry.action == "GET /api/v1/jobs/{id}")
        .map(|entry| (entry.who.as_str(), entry.outcome.as_str()))
        .collect();
    let refused = ("token:viewer", "refused");
    assert_eq!(looked, [refused, refused, ("token:worker", "done")]);
    assert!(log.iter().all(|entry| !format!("{entry:?}").contains(CANARY)));
    guarded.end().await;
}

#[tokio::test]
async fn secrets_of_jobs_are_on_no_page_and_in_no_stream() {
    let guarded = Guarded::start().await;
    let operator = guarded.token("worker", Role::Operator);
    let viewer = guarded.token("viewer", Role::Viewer);
    let head = format!("Authorization: {operator}\r\n");
    let mut feed = guarded.server.feed("/events", &head).await;
    let id = sing(&guarded, &operator).await;
    let told = async {
        loop {
            let message = feed.event().await.expect("the stream goes on");
            assert!(!message.data.to_string().contains(CANARY), "{message:?}");
            if message.data["id"] == id && message.data["status"] == "dead" {
                return message.data;
            }
        }
    };
    let told = tokio::time::timeout(PATIENCE, told).await.expect("it is told");
    assert!(told["error"].as_str().unwrap().contains("refused"), "{told}");
    for who in [&viewer, &operator] {
        for (path, shows) in [
            ("/", "<main"),
            ("/jobs", "pack"),
            (&format!("/jobs/{id}"), "(redacted)"),
            ("/failed", "refused"),
        ] {
            let page = guarded.asks(&format!("GET {path}"), who).await;
            assert_eq!(page.status, 200, "{path}: {page:?}");
            assert!(page.body.contains(shows), "{path} lacks {shows}: {}", page.body);
            assert!(!page.body.contains(CANARY), "{path}: {}", page.body);
        }
    }
    guarded.end().await;
}

#[tokio::test]
async fn secrets_of_jobs_are_on_the_page_of_those_only_who_ask_for_them_and_may() {
    let guarded = Guarded::start().await;
    let operator = guarded.token("worker", Role::Operator);
    let viewer = guarded.token("viewer", Role::Viewer);
    let id = sing(&guarded, &operator).await;
    let (page, reveal) = (format!("GET /jobs/{id}"), format!("GET /jobs/{id}?reveal=true"));
    let seen = guarded.asks(&page, &operator).await;
    assert!(seen.body.contains("?reveal=true") && !seen.body.contains(CANARY), "{}", seen.body);
    assert!(
        !guarded.asks(&page, &viewer).await.body.contains("?reveal=true"),
        "it is not for them"
    );
    assert_eq!(guarded.asks(&reveal, &viewer).await.status, 403);
    let shown = guarded.asks(&reveal, &operator).await;
    assert!(shown.status == 200 && shown.body.matches(CANARY).count() >= 5, "{}", shown.body);
    let log = guarded.log(5).await;
    let looked: Vec<_> = log
        .iter()
        .filter(|entry| entry.action == "GET /jobs/{id}")
        .map(|entry| (entry.who.as_str(), entry.outcome.as_str()))
        .collect();
    assert_eq!(looked, [("token:viewer", "refused"), ("token:worker", "done")]);
    guarded.end().await;
}

#[tokio::test]
async fn secrets_that_processes_wrote_before_their_ends_are_shown_nowhere() {
    let guarded = Guarded::start().await;
    let operator = guarded.token("worker", Role::Operator);
    let head = format!("Authorization: {operator}\r\n");
    let mut feed = guarded.server.feed("/events?topics=supervisor,worker", &head).await;
    let note = format!("it has ended: --password {CANARY}");
    let beat = json!({"queues": ["default"], "note": note, "state": "stopping"});
    let told = guarded.tells("POST /api/v1/workers/anna/beat", &operator, beat).await;
    assert_eq!(told.status, 200, "{told:?}");
    let report = json!({"host": "here", "version": "1", "instance": "a", "queues": ["default"],
        "balance": "simple", "min": 1, "max": 1, "wanted": 1, "state": "crash-looping",
        "last_exit": format!("exit code 1, token={CANARY}"), "stderr": format!("secret: {CANARY}")});
    let told = guarded.tells("POST /api/v1/supervisors/boss:here/beat", &operator, report).await;
    assert_eq!(told.status, 200, "{told:?}");
    let mut missing = vec!["supervisor", "worker"];
    while !missing.is_empty() {
        let message = tokio::time::timeout(PATIENCE, feed.event()).await.expect("in time").unwrap();
        assert!(!message.data.to_string().contains(CANARY), "{message:?}");
        missing.retain(|topic| *topic != message.event);
    }
    for path in ["/workers", "/api/v1/workers"] {
        let seen = guarded.asks(&format!("GET {path}"), &operator).await;
        assert!(seen.status == 200 && seen.body.contains("exit code 1"), "{path}: {}", seen.body);
        assert!(!seen.body.contains(CANARY), "{path}: {}", seen.body);
    }
    guarded.end().await;
}

#[tokio::test]
async fn a_search_does_not_find_what_is_hidden() {
    let guarded = Guarded::start().await;
    let operator = guarded.token("worker", Role::Operator);
    sing(&guarded, &operator).await;
    let found = async |text: &str| {
        let answer = guarded.asks(&format!("GET /api/v1/jobs?q={text}"), &operator).await.json();
        answer["jobs"].as_array().unwrap().len()
    };
    assert_eq!(found("anna").await, 1);
    assert_eq!(found("refused").await, 1);
    for part in [CANARY, &CANARY[..3]] {
        assert_eq!(found(part).await, 0, "{part}");
    }
    guarded.end().await;
}

#[tokio::test]
async fn where_the_pages_of_a_search_end_tells_nothing_of_what_is_hidden() {
    let guarded = Guarded::start().await;
    let operator = guarded.token("worker", Role::Operator);
    let add = async |payload: Value| {
        let asked = json!({"kind": "pack", "payload": payload});
        let added = guarded.tells("POST /api/v1/jobs", &operator, asked).await;
        assert_eq!(added.status, 201, "{added:?}");
    };
    let secret = || json!({"token": CANARY, "rest": "x".repeat(600 << 10)});
    add(json!("anna")).await;
    // More than a page has, and so far from each other that a search is cut between them.
    for _ in 0..3 {
        add(secret()).await;
    }
    let many: Vec<NewJob> = (0..1000).map(|_| NewJob::new("other")).collect();
    for _ in 0..30 {
        guarded.server.jobs.enqueue(&many).await.unwrap();
    }
    add(secret()).await;
    for _ in 0..30 {
        guarded.server.jobs.enqueue(&many).await.unwrap();
    }
    add(json!({"secret": CANARY})).await;
    let walk = async |text: &str, limit: u32| {
        let (mut cursors, mut found) = (Vec::new(), 0);
        loop {
            let cursor = cursors.last().map(|it| format!("&cursor={it}")).unwrap_or_default();
            let request = format!("GET /api/v1/jobs?q={text}&limit={limit}{cursor}");
            let page = guarded.asks(&request, &operator).await.json();
            found += page["jobs"].as_array().unwrap().len();
            let Some(next) = page["cursor"].as_str() else { return (cursors, found) };
            cursors.push(next.to_owned());
        }
    };
    for limit in [1, 2, 100] {
        let (nothing, found) = walk("nowhere", limit).await;
        assert!(found == 0 && !nothing.is_empty(), "it is cut: {nothing:?}");
        assert_eq!(walk(&CANARY[..3], limit).await, (nothing, 0), "{limit}");
        assert_eq!(walk("anna", limit).await.1, 1, "{limit}");
        assert_eq!(walk("pack", limit).await.1, 6, "{limit}");
    }
    guarded.end().await;
}
