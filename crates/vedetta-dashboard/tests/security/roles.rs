//! Every route with every role: exactly those get in who may.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;
use vedetta_access::Role;

use crate::{Guarded, job, status};

/// What changes anything, and the least role for it. A new route has to be added here: that is the point.
pub(crate) const CHANGES: &[(&str, &str, &str)] = &[
    ("put", "/api/v1/kv/{key}", "admin"),
    ("delete", "/api/v1/kv/{key}", "admin"),
    ("post", "/api/v1/leases", "admin"),
    ("delete", "/api/v1/leases/{id}", "admin"),
    ("post", "/api/v1/leases/{id}/keep", "admin"),
    ("post", "/api/v1/compact", "admin"),
    ("post", "/api/v1/watchers/{name}/resync", "operator"),
    ("post", "/api/v1/stages/{entity}/{stage}/{id}/retry", "operator"),
    ("post", "/api/v1/jobs", "operator"),
    ("post", "/api/v1/jobs/retry", "operator"),
    ("post", "/api/v1/jobs/keep", "operator"),
    ("post", "/api/v1/jobs/settle", "operator"),
    ("delete", "/api/v1/jobs/{id}", "operator"),
    ("post", "/api/v1/jobs/{id}/retry", "operator"),
    ("post", "/api/v1/jobs/{id}/cancel", "operator"),
    ("post", "/api/v1/jobs/{id}/keep", "operator"),
    ("post", "/api/v1/jobs/{id}/settle", "operator"),
    ("post", "/api/v1/queues/{queue}/pause", "operator"),
    ("post", "/api/v1/queues/{queue}/resume", "operator"),
    ("post", "/api/v1/queues/{queue}/drain", "operator"),
    ("post", "/api/v1/queues/{queue}/take", "operator"),
    ("post", "/api/v1/workers", "operator"),
    ("post", "/api/v1/workers/terminate", "operator"),
    ("post", "/api/v1/workers/restart", "operator"),
    ("delete", "/api/v1/workers/{id}", "operator"),
    ("post", "/api/v1/workers/{id}/beat", "operator"),
    ("post", "/api/v1/workers/{id}/stop", "operator"),
    ("post", "/api/v1/workers/{id}/pause", "operator"),
    ("post", "/api/v1/workers/{id}/resume", "operator"),
    ("delete", "/api/v1/supervisors/{name}", "operator"),
    ("post", "/api/v1/supervisors/{name}/beat", "operator"),
];

/// What is read by others than viewers.
const READS: &[(&str, &str)] = &[
    ("/api/v1/audit", "admin"),
    ("/api/v1/workers/{id}/wake", "operator"),
    ("/api/v1/supervisors/{name}/wake", "operator"),
    ("/healthz", ""),
    ("/readyz", ""),
];

/// What is served and not described: no key at all, which is refused to those who may.
pub(crate) const BESIDE: &[(&str, &str, &str)] = &[
    ("get", "/api/v1/kv/", "viewer"),
    ("put", "/api/v1/kv/", "admin"),
    ("delete", "/api/v1/kv/", "admin"),
];

/// An address that a declared path is for.
pub(crate) fn target(path: &str) -> String {
    path.replace("{id}", "1")
        .replace("{key}", "k")
        .replace("{name}", "none")
        .replace("{entity}", "order")
        .replace("{stage}", "pay")
        .replace("{queue}", "default")
        .replace("{hash}", "0")
        .replace("{*name}", "page.css")
}

/// The least role for a route; nothing for those that are anybody's.
pub(crate) fn least(method: &str, path: &str) -> Option<Role> {
    let word = if method == "get" {
        READS.iter().find(|(of, _)| *of == path).map_or("viewer", |(_, role)| *role)
    } else {
        let declared = CHANGES.iter().find(|(by, of, _)| *by == method && *of == path);
        declared.unwrap_or_else(|| panic!("who may {method} {path}? Say so in CHANGES")).2
    };
    word.parse().ok()
}

/// Who asks, with what, and the role that gives them.
type Asker = (&'static str, Option<String>, Option<Role>);

/// What becomes of whoever has a role where one is needed.
fn expected(needed: Option<Role>, role: Option<Role>) -> &'static str {
    match (needed, role) {
        (Some(_), None) => "401",
        (Some(needed), Some(role)) if role < needed => "403",
        _ => "in",
    }
}

fn seen(status: u16) -> &'static str {
    match status {
        401 => "401",
        403 => "403",
        _ => "in",
    }
}

/// Asks as everybody.
async fn try_all(
    guarded: &Guarded,
    callers: &[Asker],
    method: &str,
    path: &str,
    needed: Option<Role>,
) {
    let request = format!("{} {}", method.to_uppercase(), target(path));
    for (who, authorization, role) in callers {
        let mut headers = vec![("Content-Type", "application/json")];
        headers.extend(authorization.as_ref().map(|it| ("Authorization", it.as_str())));
        let got = status(&guarded.server, &request, &headers, "{}").await;
        assert_eq!(seen(got), expected(needed, *role), "{who}: {request}: {got}");
    }
}

#[tokio::test]
async fn every_route_lets_in_exactly_those_who_may() {
    let guarded = Guarded::start().await;
    let revoked = guarded.token("gone", Role::Admin);
    guarded.access.revoke_token("gone").unwrap();
    let callers: Vec<Asker> = vec![
        ("nobody", None, None),
        ("revoked", Some(revoked), None),
        ("expired", Some(guarded.expired("old", Role::Admin)), None),
        ("made up", Some("Bearer vdt_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA".into()), None),
        ("empty", Some("Bearer ".into()), None),
        ("basic", Some("Basic YWRtaW46YWRtaW4=".into()), None),
        ("viewer", Some(guarded.token("v", Role::Viewer)), Some(Role::Viewer)),
        ("operator", Some(guarded.token("o", Role::Operator)), Some(Role::Operator)),
        ("admin", Some(guarded.token("a", Role::Admin)), Some(Role::Admin)),
    ];
    let admin = callers.last().unwrap().1.clone().unwrap();
    let document = guarded.asks("GET /api/v1/openapi.json", &admin).await.json();
    let mut walked = BTreeSet::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let needed = least(method, path);
            // The description says the same.
            let told = operation["x-role"].as_str().unwrap_or("");
            assert_eq!(told, needed.map_or("", Role::word), "{method} {path}");
            assert_eq!(operation["security"] == json!([]), needed.is_none(), "{method} {path}");
            try_all(&guarded, &callers, method, path, needed).await;
            walked.insert((method.clone(), path.clone()));
        }
    }
    for (method, path, least) in BESIDE {
        assert!(document["paths"].get(path).is_none(), "{path} is described");
        try_all(&guarded, &callers, method, path, least.parse().ok()).await;
    }
    for (method, path, _) in CHANGES {
        assert!(walked.contains(&((*method).into(), (*path).into())), "{method} {path} is gone");
    }
    assert!(walked.len() > 40, "{}", walked.len());
    guarded.end().await;
}

/// The pages and their forms, and the least role for each; nothing for those that are anybody's.
pub(crate) const PAGES: &[(&str, &str, &str)] = &[
    ("get", "/", "viewer"),
    ("get", "/jobs", "viewer"),
    ("get", "/jobs/{id}", "viewer"),
    ("post", "/jobs/{id}/retry", "operator"),
    ("post", "/jobs/{id}/cancel", "operator"),
    ("post", "/jobs/{id}/delete", "operator"),
    ("get", "/failed", "viewer"),
    ("post", "/failed/retry", "operator"),
    ("get", "/queues", "viewer"),
    ("post", "/queues/{queue}/pause", "operator"),
    ("post", "/queues/{queue}/resume", "operator"),
    ("post", "/queues/{queue}/drain", "operator"),
    ("get", "/workers", "viewer"),
    ("post", "/workers/start", "operator"),
    ("post", "/workers/restart", "operator"),
    ("post", "/workers/terminate", "operator"),
    ("post", "/workers/{id}/stop", "operator"),
    ("post", "/workers/{id}/pause", "operator"),
    ("post", "/workers/{id}/resume", "operator"),
    ("get", "/stages", "viewer"),
    ("post", "/stages/{entity}/{stage}/{id}/retry", "operator"),
    ("get", "/watchers", "viewer"),
    ("post", "/watchers/{name}/resync", "operator"),
    ("get", "/kv", "viewer"),
    ("get", "/insights", "viewer"),
    ("post", "/theme", "viewer"),
    ("get", "/assets/{hash}/{*name}", ""),
];

/// What people sign in and out with. That comes last: it ends what the others need.
pub(crate) const SIGN_IN: &[(&str, &str, &str)] =
    &[("get", "/login", ""), ("post", "/login", ""), ("post", "/logout", "viewer")];

/// The pages and forms that there are, as the source has them: no description tells of them.
fn routes_of(source: &'static str, table: &str) -> BTreeSet<(&'static str, &'static str)> {
    let (_, table) = source.split_once(table).unwrap();
    let (table, _) = table.split_once("\n}").unwrap();
    let of = |method: &'static str| {
        let calls = table.split(method).skip(1).filter(|rest| rest.starts_with('('));
        calls.map(move |rest| (method, rest.split('"').nth(1).expect("a path")))
    };
    ["get", "post", "put", "patch", "delete"].into_iter().flat_map(of).collect()
}

#[tokio::test]
async fn every_page_and_form_lets_in_exactly_those_who_may() {
    let listed: BTreeSet<_> = PAGES.iter().map(|(method, path, _)| (*method, *path)).collect();
    let there = routes_of(include_str!("../../src/page.rs"), "fn routes()");
    assert_eq!(there, listed, "who may use it? Say so in PAGES");
    let listed: BTreeSet<_> = SIGN_IN.iter().map(|(method, path, _)| (*method, *path)).collect();
    let there = routes_of(include_str!("../../src/api.rs"), "fn sign_in()");
    assert_eq!(there, listed, "who may use it? Say so in SIGN_IN");
    let guarded = Guarded::start().await;
    let mut callers = Vec::new();
    for (name, role) in [("vera", Role::Viewer), ("otto", Role::Operator), ("ada", Role::Admin)] {
        guarded.user(name, role).await;
        callers.push((Some(role), guarded.sign_in(name).await));
    }
    // What a form needs, and a session that was never opened.
    callers.push((None, guarded.form().await));
    for (method, path, least) in PAGES.iter().chain(SIGN_IN) {
        let needed: Option<Role> = least.parse().ok();
        let target = target(path);
        for (role, browser) in &callers {
            let answer = if *method == "get" {
                let cookie = [("Cookie", browser.cookie.as_str())];
                guarded.server.send(&format!("GET {target}"), &cookie, "").await
            } else {
                guarded.post(browser, &target, "back=/").await
            };
            if (*method, *path) == ("post", "/login") {
                // They get as far as being told that nobody is called so.
                assert!(answer.body.contains("name or the password is wrong"), "{answer:?}");
                continue;
            }
            let was = seen(answer.status);
            assert_eq!(was, expected(needed, *role), "{role:?}: {method} {path}: {answer:?}");
        }
    }
    guarded.end().await;
}

#[tokio::test]
async fn what_is_not_declared_is_not_there() {
    let guarded = Guarded::start().await;
    let admin = guarded.token("a", Role::Admin);
    // Whoever is nobody does not even learn what there is.
    for request in ["GET /nothing", "GET /api/v1/nothing", "PATCH /api/v1/jobs", "GET /api/v2"] {
        assert_eq!(guarded.server.send(request, &[], "").await.status, 401, "{request}");
    }
    for (request, status) in [
        ("GET /nothing", 404),
        ("GET /api/v1/nothing", 404),
        ("GET /api/v1/jobs/1/retry", 405),
        ("PATCH /api/v1/jobs", 405),
        ("OPTIONS /api/v1/jobs", 405),
        ("TRACE /api/v1/jobs", 405),
        ("DELETE /healthz", 405),
        ("HEAD /api/v1/jobs", 200),
        ("HEAD /api/v1/audit", 200),
    ] {
        let answer = guarded.asks(request, &admin).await;
        assert_eq!(answer.status, status, "{request}: {answer:?}");
        assert_eq!(answer.head.contains("allow:"), status == 405, "{request}: {answer:?}");
        assert!(!answer.head.contains("access-control"), "{request}: {answer:?}");
    }
    let viewer = guarded.token("v", Role::Viewer);
    assert_eq!(guarded.asks("HEAD /api/v1/audit", &viewer).await.status, 403);
    let jobs = guarded.asks("DELETE /api/v1/jobs", &admin).await;
    assert!(jobs.head.contains("allow: post,get,head"), "{jobs:?}");
    guarded.end().await;
}

#[tokio::test]
async fn refusals_say_what_to_do() {
    let guarded = Guarded::start().await;
    let nobody = guarded.server.get("/api/v1/jobs").await;
    assert_eq!((nobody.status, nobody.code().as_str()), (401, "unauthorized"));
    assert!(nobody.head.contains("www-authenticate: bearer"), "{nobody:?}");
    assert!(nobody.body.contains("VEDETTA_TOKEN"), "{nobody:?}");
    let viewer = guarded.token("ci", Role::Viewer);
    let refused = guarded.tells("POST /api/v1/jobs", &viewer, job(&json!(1))).await;
    assert_eq!((refused.status, refused.code().as_str()), (403, "forbidden"));
    assert!(refused.body.contains("this needs the role operator"), "{refused:?}");
    assert!(refused.body.contains("token:ci has the role viewer"), "{refused:?}");
    guarded.end().await;
}

#[tokio::test]
async fn a_token_counts_in_the_authorization_header_only() {
    let guarded = Guarded::start().await;
    let bearer = guarded.token("a", Role::Admin);
    let bare = bearer.trim_start_matches("Bearer ").to_owned();
    let cookie = format!("vedetta-{}={bare}", guarded.server.address.port());
    for (request, headers) in [
        (format!("GET /api/v1/jobs?token={bare}"), vec![]),
        (format!("GET /api/v1/jobs?access_token={bare}"), vec![]),
        ("GET /api/v1/jobs".to_owned(), vec![("Cookie", cookie.as_str())]),
        ("GET /api/v1/jobs".to_owned(), vec![("X-Api-Key", bare.as_str())]),
        ("GET /api/v1/jobs".to_owned(), vec![("Authorization", bare.as_str())]),
    ] {
        let answer = guarded.server.send(&request, &headers, "").await;
        assert_eq!(answer.status, 401, "{request}: {answer:?}");
    }
    // What a program sends is not held up by what browsers send, but for the name it asks for.
    let (other, json) =
        (("Origin", "http://elsewhere.example"), ("Content-Type", "application/json"));
    let headers =
        [("Authorization", bearer.as_str()), other, json, ("Sec-Fetch-Site", "cross-site")];
    let put = guarded.server.send("PUT /api/v1/kv/k", &headers, r#"{"value":"v"}"#).await;
    assert_eq!(put.status, 200, "{put:?}");
    let headers = [("Authorization", bearer.as_str()), ("Host", "evil.example")];
    assert_eq!(guarded.server.send("GET /api/v1/jobs", &headers, "").await.status, 421);
    guarded.end().await;
}

#[tokio::test]
async fn a_right_that_is_taken_away_is_gone_with_the_next_request() {
    let guarded = Guarded::start().await;
    guarded.user("anna", Role::Admin).await;
    let token = guarded.token("ci", Role::Viewer);
    let anna = guarded.sign_in("anna").await;
    let with_cookie = [("Cookie", anna.cookie.as_str())];
    assert_eq!(guarded.asks("GET /api/v1/jobs", &token).await.status, 200);
    assert_eq!(guarded.server.send("GET /api/v1/audit", &with_cookie, "").await.status, 200);
    // As the program does, in another process.
    let elsewhere = vedetta_access::Access::open(guarded.folder.path()).unwrap();
    elsewhere.revoke_token("ci").unwrap();
    elsewhere.set_role("anna", Role::Viewer).unwrap();
    assert_eq!(guarded.asks("GET /api/v1/jobs", &token).await.status, 401);
    assert_eq!(guarded.server.send("GET /api/v1/audit", &with_cookie, "").await.status, 401);
    let anna = guarded.sign_in("anna").await;
    let with_cookie = [("Cookie", anna.cookie.as_str())];
    assert_eq!(guarded.server.send("GET /api/v1/audit", &with_cookie, "").await.status, 403);
    guarded.end().await;
}

#[tokio::test]
async fn what_is_behind_the_sign_in_is_not_in_front_of_it() {
    let guarded = Guarded::start().await;
    let mut seen = BTreeMap::new();
    for path in ["/", "/jobs", "/workers", "/metrics", "/healthz", "/readyz", "/login"] {
        seen.insert(path, guarded.server.get(path).await.status);
    }
    let expected = [
        ("/", 401),
        ("/jobs", 401),
        ("/workers", 401),
        ("/metrics", 401),
        ("/healthz", 200),
        ("/readyz", 200),
        ("/login", 200),
    ];
    assert_eq!(seen, expected.into());
    // The form has its looks.
    let form = guarded.server.get("/login").await.body;
    let style = form.split('"').find(|text| text.ends_with("/page.css")).expect("a style");
    assert_eq!(guarded.server.get(style).await.status, 200);
    // A person is brought to the form, and from there back.
    let page = [("Accept", "text/html,*/*")];
    let answer = guarded.server.send("GET /jobs?status=dead", &page, "").await;
    assert_eq!(answer.status, 303, "{answer:?}");
    assert!(answer.head.contains("location: /login?next=%2fjobs%3fstatus%3ddead"), "{answer:?}");
    guarded.end().await;
}
