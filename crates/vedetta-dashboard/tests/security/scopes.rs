//! Every route with every scope: a token is let in where it is good, and nowhere else.

use std::collections::BTreeSet;

use serde_json::json;
use vedetta_access::{Area, Role, Scope};

use crate::roles::{BESIDE, PAGES, SIGN_IN, least, target};
use crate::support::PATIENCE;
use crate::{Guarded, job, status};

/// Where each route is; nothing for those that every token may use. A new route has to be added here: that is the point.
const AREAS: &[(&str, &[&str])] = &[
    (
        "jobs",
        &[
            "/api/v1/jobs",
            "/api/v1/jobs/retry",
            "/api/v1/jobs/keep",
            "/api/v1/jobs/settle",
            "/api/v1/jobs/{id}",
            "/api/v1/jobs/{id}/retry",
            "/api/v1/jobs/{id}/cancel",
            "/api/v1/jobs/{id}/keep",
            "/api/v1/jobs/{id}/settle",
            "/api/v1/queues/{queue}/take",
            "/api/v1/queues/{queue}/wake",
            "/jobs",
            "/jobs/{id}",
            "/jobs/{id}/retry",
            "/jobs/{id}/cancel",
            "/jobs/{id}/delete",
            "/failed",
            "/failed/retry",
        ],
    ),
    (
        "queues",
        &[
            "/api/v1/queues",
            "/api/v1/queues/{queue}/pause",
            "/api/v1/queues/{queue}/resume",
            "/api/v1/queues/{queue}/drain",
            "/queues",
            "/queues/{queue}/pause",
            "/queues/{queue}/resume",
            "/queues/{queue}/drain",
        ],
    ),
    (
        "workers",
        &[
            "/api/v1/workers",
            "/api/v1/workers/terminate",
            "/api/v1/workers/restart",
            "/api/v1/workers/{id}",
            "/api/v1/workers/{id}/beat",
            "/api/v1/workers/{id}/wake",
            "/api/v1/workers/{id}/stop",
            "/api/v1/workers/{id}/pause",
            "/api/v1/workers/{id}/resume",
            "/api/v1/supervisors/{name}",
            "/api/v1/supervisors/{name}/beat",
            "/api/v1/supervisors/{name}/wake",
            "/api/v1/commands/{id}",
            "/workers",
            "/workers/start",
            "/workers/restart",
            "/workers/terminate",
            "/workers/{id}/stop",
            "/workers/{id}/pause",
            "/workers/{id}/resume",
        ],
    ),
    (
        "stages",
        &[
            "/api/v1/stages",
            "/api/v1/stages/{entity}",
            "/api/v1/stages/{entity}/{id}",
            "/api/v1/stages/{entity}/{stage}/{id}/retry",
            "/stages",
            "/stages/{entity}/{stage}/{id}/retry",
        ],
    ),
    (
        "watchers",
        &[
            "/api/v1/watchers",
            "/api/v1/watchers/{name}",
            "/api/v1/watchers/{name}/resync",
            "/watchers",
            "/watchers/{name}/resync",
        ],
    ),
    (
        "kv",
        &[
            "/api/v1/kv",
            "/api/v1/kv/",
            "/api/v1/kv/{key}",
            "/api/v1/leases",
            "/api/v1/leases/{id}",
            "/api/v1/leases/{id}/keep",
            "/api/v1/watch",
            "/api/v1/compact",
            "/kv",
        ],
    ),
    ("stats", &["/api/v1/overview", "/api/v1/stats", "/metrics", "/insights"]),
    ("events", &["/api/v1/events", "/"]),
    ("audit", &["/api/v1/audit"]),
    ("", &["/api/v1/session", "/api/v1/openapi.json", "/theme", "/logout"]),
];

/// Where a route is that somebody has to be known for.
fn area(path: &str) -> Option<Area> {
    let found = AREAS.iter().find(|(_, paths)| paths.contains(&path));
    let (word, _) = found.unwrap_or_else(|| panic!("where is {path}? Say so in AREAS"));
    Area::ALL.into_iter().find(|area| area.word() == *word)
}

/// A token of every area alone, and one of all the others.
fn tokens(guarded: &Guarded) -> Vec<(Scope, String)> {
    let mut tokens = Vec::new();
    for area in Area::ALL {
        let others = Area::ALL.into_iter().filter(|one| *one != area).collect();
        for (name, scope) in [("only", Scope::Only([area].into())), ("but", Scope::Only(others))] {
            let token = guarded.scoped(&format!("{name}-{area}"), Role::Admin, &scope);
            tokens.push((scope, token));
        }
    }
    tokens
}

async fn tried(guarded: &Guarded, method: &str, path: &str, scope: &Scope, token: &str) {
    let request = format!("{} {}", method.to_uppercase(), target(path));
    let is_page = !path.starts_with("/api/");
    let (kind, body) = match (is_page, method) {
        (true, "post") => ("application/x-www-form-urlencoded", "back=/"),
        _ => ("application/json", "{}"),
    };
    let headers = [("Authorization", token), ("Content-Type", kind)];
    let got = status(&guarded.server, &request, &headers, body).await;
    assert_ne!(got, 401, "{scope}: {request}");
    let is_in = area(path).is_none_or(|area| scope.has(area));
    assert_eq!(got != 403, is_in, "{scope}: {request}: {got}");
}

#[tokio::test]
async fn every_route_lets_in_exactly_the_tokens_whose_scope_has_it() {
    let guarded = Guarded::start().await;
    let admin = guarded.token("admin", Role::Admin);
    let tokens = tokens(&guarded);
    let document = guarded.asks("GET /api/v1/openapi.json", &admin).await.json();
    let mut walked = BTreeSet::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            if least(method, path).is_none() {
                assert!(operation.get("x-scope").is_none(), "{method} {path}");
                continue;
            }
            // The description says the same.
            let told = operation["x-scope"].as_str();
            assert_eq!(told, area(path).map(Area::word), "{method} {path}");
            for (scope, token) in &tokens {
                tried(&guarded, method, path, scope, token).await;
            }
            walked.insert(path.as_str());
        }
    }
    // And what no description tells of.
    for (method, path, least) in BESIDE.iter().chain(PAGES).chain(SIGN_IN) {
        if least.is_empty() {
            continue;
        }
        for (scope, token) in &tokens {
            tried(&guarded, method, path, scope, token).await;
        }
        walked.insert(path);
    }
    let listed: BTreeSet<&str> = AREAS.iter().flat_map(|(_, paths)| *paths).copied().collect();
    assert_eq!(walked, listed);
    guarded.end().await;
}

#[tokio::test]
async fn a_token_out_of_its_scope_is_told_which_one_is_missing() {
    let guarded = Guarded::start().await;
    let scope: Scope = "jobs,stats".parse().unwrap();
    let token = guarded.scoped("ci", Role::Operator, &scope);
    let added = guarded.tells("POST /api/v1/jobs", &token, job(&json!(1))).await;
    assert_eq!(added.status, 201, "{added:?}");
    for request in ["GET /api/v1/queues", "HEAD /api/v1/queues", "GET /queues"] {
        let refused = guarded.asks(request, &token).await;
        assert_eq!(refused.status, 403, "{request}: {refused:?}");
        if request.starts_with("GET") {
            assert_eq!(refused.code(), "out_of_scope", "{refused:?}");
            assert!(refused.body.contains("this needs the scope queues"), "{refused:?}");
            assert!(refused.body.contains("token:ci has the scope jobs,stats"), "{refused:?}");
        }
    }
    // A scope gives nobody a role, and what is not there is not told apart from what is.
    let role = guarded.tells("PUT /api/v1/kv/k", &token, json!({"value": "v"})).await;
    assert_eq!((role.status, role.code().as_str()), (403, "forbidden"), "{role:?}");
    assert_eq!(guarded.asks("GET /api/v1/nothing", &token).await.status, 404);
    let who = guarded.asks("GET /api/v1/session", &token).await.json();
    assert_eq!(who["scope"], json!(["jobs", "stats"]), "{who}");
    // The log has who was refused what.
    let log = guarded.log(3).await;
    let refused = log.iter().find(|one| one.outcome == "refused").expect("an entry");
    assert_eq!(
        (refused.who.as_str(), refused.action.as_str()),
        ("token:ci", "GET /api/v1/queues"),
        "{log:?}"
    );
    guarded.end().await;
}

#[tokio::test]
async fn a_scope_that_shrinks_ends_requests_and_streams_outside_of_it() {
    let guarded = Guarded::limited(crate::streams::often()).await;
    let all = guarded.token("ci", Role::Operator);
    let head = format!("Authorization: {all}\r\n");
    let mut events = guarded.server.feed("/events", &head).await;
    let mut watch = guarded.server.feed("/watch?prefix=", &head).await;
    assert_eq!(guarded.asks("GET /api/v1/jobs", &all).await.status, 200);
    // As the program does, in another process.
    let elsewhere = vedetta_access::Access::open(guarded.folder.path()).unwrap();
    elsewhere.set_scope("ci", &Scope::Only([Area::Kv].into())).unwrap();
    assert_eq!(guarded.asks("GET /api/v1/jobs", &all).await.status, 403);
    let end = async { while events.next().await.is_some() {} };
    tokio::time::timeout(PATIENCE, end).await.expect("it ends");
    // What is still inside goes on.
    let admin = guarded.token("admin", Role::Admin);
    let put = guarded.tells("PUT /api/v1/kv/k", &admin, json!({"value": "v"})).await;
    assert_eq!(put.status, 200, "{put:?}");
    let told = tokio::time::timeout(PATIENCE, watch.event()).await.expect("in time");
    assert_eq!(told.expect("it goes on").event, "kv");
    guarded.end().await;
}
