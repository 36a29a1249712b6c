//! The audit log.

use serde_json::json;
use vedetta_access::Role;

use crate::{Guarded, PASSWORD, job};

#[tokio::test]
async fn it_tells_who_changed_what_from_where_and_what_came_of_it() {
    let guarded = Guarded::start().await;
    guarded.user("anna", Role::Operator).await;
    let ci = guarded.token("ci", Role::Admin);
    guarded.try_to_sign_in("anna", "wrong password").await;
    let anna = guarded.sign_in("anna").await;
    guarded.post(&anna, "/api/v1/queues/default/pause", "").await;
    guarded.tells("PUT /api/v1/kv/rooms%2F1", &ci, json!({"value": "x"})).await;
    guarded.tells("PUT /api/v1/kv/rooms%2F1", &ci, json!({"value": "x", "if_modified": 1})).await;
    // A supervisor that is removed loses what it was told; a worker that leaves is at work.
    let said = json!({"host": "here", "version": "1", "instance": "a", "queues": ["default"],
        "balance": "simple", "min": 1, "max": 1, "wanted": 1, "state": "terminated"});
    guarded.tells("POST /api/v1/supervisors/boss:here/beat", &ci, said).await;
    guarded.asks("DELETE /api/v1/supervisors/boss:here", &ci).await;
    guarded.tells("POST /api/v1/workers/anna/beat", &ci, json!({"queues": ["default"]})).await;
    guarded.asks("DELETE /api/v1/workers/anna", &ci).await;
    let headers = [("Cookie", anna.cookie.as_str()), ("X-Vedetta-CSRF", anna.csrf.as_str())];
    guarded.server.send("POST /api/v1/compact", &headers, "").await;
    guarded.asks("GET /api/v1/jobs", "Bearer vdt_guess").await;
    guarded.post(&anna, "/logout", "").await;
    let log = guarded.log(11).await;
    // The log is written in two ways at once, so the order of neighbours may differ.
    let mut told: Vec<_> = log
        .iter()
        .map(|one| {
            let (who, from) = (one.who.as_str(), one.source.as_str());
            (who, from, one.action.as_str(), one.target.as_str(), one.outcome.as_str())
        })
        .collect();
    told.sort_unstable();
    let here = "127.0.0.1";
    let mut expected = vec![
        ("shell", "shell", "user add", "anna as operator", "done"),
        ("shell", "shell", "token add", "ci as admin", "done"),
        ("anna", here, "sign-in", "", "refused"),
        ("anna", here, "sign-in", "", "done"),
        ("anna", here, "POST /api/v1/queues/{queue}/pause", "/api/v1/queues/default/pause", "done"),
        ("token:ci", here, "PUT /api/v1/kv/{*key}", "/api/v1/kv/rooms%2F1", "done"),
        ("token:ci", here, "PUT /api/v1/kv/{*key}", "/api/v1/kv/rooms%2F1", "failed"),
        (
            "token:ci",
            here,
            "DELETE /api/v1/supervisors/{name}",
            "/api/v1/supervisors/boss:here",
            "done",
        ),
        ("anna", here, "POST /api/v1/compact", "/api/v1/compact", "refused"),
        ("?", here, "request", "", "refused"),
        ("anna", here, "sign-out", "", "done"),
    ];
    expected.sort_unstable();
    assert_eq!(told, expected);

    // The same over HTTP, in pages, for admins.
    let page = guarded.asks("GET /api/v1/audit?limit=7", &ci).await.json();
    let cursor = page["cursor"].as_str().unwrap().to_owned();
    assert_eq!(page["entries"].as_array().unwrap().len(), 7);
    let rest =
        guarded.asks(&format!("GET /api/v1/audit?limit=7&cursor={cursor}"), &ci).await.json();
    assert_eq!(rest["entries"].as_array().unwrap().len(), 4);
    assert_eq!(rest["entries"][3]["action"], "user add");
    assert!(rest["cursor"].is_null(), "{rest}");
    assert!(!page.to_string().contains(PASSWORD));
    guarded.end().await;
}

#[tokio::test]
async fn programs_at_work_and_strangers_do_not_fill_it() {
    let guarded = Guarded::start().await;
    let worker = guarded.token("worker", Role::Operator);
    for _ in 0..30 {
        guarded.tells("POST /api/v1/jobs", &worker, job(&json!(1))).await;
        guarded.tells("POST /api/v1/queues/default/take", &worker, json!({"worker": "w"})).await;
        guarded.asks("GET /api/v1/jobs", "Bearer vdt_guess").await;
        guarded.server.send("GET /api/v1/jobs", &[("Host", "evil.example")], "").await;
    }
    let access = guarded.access.clone();
    // What was counted is written when the server ends.
    guarded.end().await;
    let log = access.audit(None, 1000).unwrap();
    let count = |action: &str| {
        let of = log.iter().filter(|one| one.action == action);
        (of.clone().count() <= 4, of.map(|one| one.count).sum::<u64>())
    };
    assert_eq!(count("POST /api/v1/jobs"), (true, 30), "{log:?}");
    assert_eq!(count("request"), (true, 60), "{log:?}");
    assert_eq!(count("POST /api/v1/queues/{queue}/take"), (true, 0), "{log:?}");
}

#[tokio::test]
async fn it_is_kept_where_nobody_signs_in_too() {
    let open = Guarded::open().await;
    open.server.post("/jobs", job(&json!(1))).await;
    let log = open.log(1).await;
    assert_eq!((log[0].who.as_str(), log[0].source.as_str()), ("local", "127.0.0.1"));
    assert_eq!(open.server.get("/api/v1/audit").await.status, 200);
    open.end().await;
}
