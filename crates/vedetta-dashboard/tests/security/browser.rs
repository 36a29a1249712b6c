//! Browsers: sessions, and pages of others that would use them.

use serde_json::json;
use vedetta_access::Role;

use crate::roles::{BESIDE, CHANGES, PAGES, SIGN_IN, target};
use crate::{Browser, Guarded, job, set_cookie};

const JSON: (&str, &str) = ("Content-Type", "application/json");

#[tokio::test]
async fn a_session_works_for_its_page_and_ends_with_signing_out() {
    let guarded = Guarded::start().await;
    guarded.user("anna", Role::Operator).await;
    let answer = guarded.try_to_sign_in("anna", crate::PASSWORD).await;
    assert_eq!(answer.status, 303, "{answer:?}");
    let port = guarded.server.address.port();
    assert!(answer.head.contains(&format!("set-cookie: vedetta-{port}=")), "{answer:?}");
    assert!(answer.head.contains("; path=/; httponly; samesite=strict"), "{answer:?}");
    let anna = guarded.browser(set_cookie(&answer).unwrap()).await;

    let cookie = ("Cookie", anna.cookie.as_str());
    let me = guarded.server.send("GET /api/v1/session", &[cookie], "").await.json();
    assert_eq!(
        (&me["name"], &me["role"], &me["by"]),
        (&json!("anna"), &json!("operator"), &json!("session"))
    );
    let csrf = ("X-Vedetta-CSRF", anna.csrf.as_str());
    let added =
        guarded.server.send("POST /api/v1/jobs", &[cookie, csrf, JSON], r#"{"kind":"a"}"#).await;
    assert_eq!(added.status, 201, "{added:?}");
    // A body that a form of another site could send is none.
    let text = ("Content-Type", "text/plain");
    let plain =
        guarded.server.send("POST /api/v1/jobs", &[cookie, csrf, text], r#"{"kind":"a"}"#).await;
    assert_eq!(plain.status, 415);
    assert_eq!(
        guarded.server.send("PUT /api/v1/kv/k", &[cookie, csrf, JSON], "{}").await.status,
        403
    );

    let out = guarded.post(&anna, "/logout", "").await;
    assert_eq!(out.status, 303, "{out:?}");
    assert!(out.head.contains("max-age=0"), "{out:?}");
    assert_eq!(guarded.server.send("GET /api/v1/session", &[cookie], "").await.status, 401);
    guarded.end().await;
}

#[tokio::test]
async fn what_changes_anything_needs_the_token_of_this_very_session() {
    let guarded = Guarded::start().await;
    guarded.user("anna", Role::Admin).await;
    guarded.user("bert", Role::Admin).await;
    let (anna, bert) = (guarded.sign_in("anna").await, guarded.sign_in("bert").await);
    let before = guarded.form().await;
    let cookie = ("Cookie", anna.cookie.as_str());
    let long = "x".repeat(5000);
    for (token, status) in [
        (None, 403),
        (Some(""), 403),
        (Some("wrong"), 403),
        (Some(long.as_str()), 403),
        (Some(bert.csrf.as_str()), 403),
        (Some(before.csrf.as_str()), 403),
        (Some(anna.csrf.as_str()), 200),
    ] {
        let mut headers = vec![cookie, JSON];
        headers.extend(token.map(|token| ("X-Vedetta-CSRF", token)));
        for request in
            ["PUT /api/v1/kv/k", "DELETE /api/v1/kv/k", "POST /api/v1/queues/default/pause"]
        {
            let answer = guarded.server.send(request, &headers, r#"{"value":"v"}"#).await;
            assert_eq!(answer.status, status, "{request} with {token:?}: {answer:?}");
        }
    }
    // In a form it is a field; in the address it is nothing.
    let form = ("Content-Type", "application/x-www-form-urlencoded");
    let body = format!("csrf={}", anna.csrf);
    let pause = "POST /api/v1/queues/default/pause";
    assert_eq!(guarded.server.send(pause, &[cookie, form], &body).await.status, 200);
    assert_eq!(guarded.server.send(pause, &[cookie, JSON], &body).await.status, 403);
    let in_address = format!("{pause}?{body}");
    assert_eq!(guarded.server.send(&in_address, &[cookie], "").await.status, 403);
    // Nothing that only reads asks for it, and nothing that only reads changes anything.
    assert_eq!(guarded.server.send("GET /api/v1/jobs", &[cookie], "").await.status, 200);
    for request in ["GET /api/v1/queues/default/pause", "GET /logout", "HEAD /logout"] {
        assert_eq!(guarded.server.send(request, &[cookie], "").await.status, 405, "{request}");
    }
    guarded.end().await;
}

#[tokio::test]
async fn no_route_that_changes_anything_goes_without_the_token_of_the_session() {
    let guarded = Guarded::start().await;
    guarded.user("anna", Role::Admin).await;
    let anna = guarded.sign_in("anna").await;
    let cookie = ("Cookie", anna.cookie.as_str());
    // They are all that there are: other stories see to that.
    let all = CHANGES.iter().chain(BESIDE).chain(PAGES).chain(SIGN_IN);
    let mut tried = 0;
    for (method, path, _) in all.filter(|(method, ..)| *method != "get") {
        let request = format!("{} {}", method.to_uppercase(), target(path));
        let (kind, body) = if path.starts_with("/api/") {
            ("application/json", "{}")
        } else {
            ("application/x-www-form-urlencoded", "back=/")
        };
        let headers = [cookie, ("Content-Type", kind), ("Sec-Fetch-Site", "same-origin")];
        let answer = guarded.server.send(&request, &headers, body).await;
        assert_eq!(answer.status, 403, "{request}: {answer:?}");
        assert!(answer.body.contains("the CSRF token of this session is missing"), "{answer:?}");
        tried += 1;
    }
    assert!(tried > 40, "{tried}");
    let session = guarded.server.send("GET /api/v1/session", &[cookie], "").await;
    assert_eq!(session.status, 200, "it was not ended: {session:?}");
    guarded.end().await;
}

#[tokio::test]
async fn no_route_answers_under_another_name_or_changes_anything_for_another_origin() {
    let guarded = Guarded::start().await;
    guarded.user("anna", Role::Admin).await;
    let anna = guarded.sign_in("anna").await;
    let (cookie, csrf) = (("Cookie", anna.cookie.as_str()), ("X-Vedetta-CSRF", anna.csrf.as_str()));
    let document = guarded.server.send("GET /api/v1/openapi.json", &[cookie], "").await.json();
    let reads = document["paths"].as_object().unwrap().iter();
    let reads = reads.filter(|(_, methods)| methods.get("get").is_some());
    let reads: Vec<_> = reads.map(|(path, _)| ("get", path.as_str())).collect();
    // They are all that there are: other stories see to that.
    let all = CHANGES.iter().chain(BESIDE).chain(PAGES).chain(SIGN_IN);
    let all = all.map(|(method, path, _)| (*method, *path)).chain(reads);
    let (mut named, mut changed) = (0, 0);
    for (method, path) in all {
        let request = format!("{} {}", method.to_uppercase(), target(path));
        let (kind, body) = if path.starts_with("/api/") {
            ("application/json", "{}")
        } else {
            ("application/x-www-form-urlencoded", "back=/")
        };
        let kind = ("Content-Type", kind);
        let evil = [cookie, csrf, kind, ("Host", "evil.example")];
        let answer = guarded.server.send(&request, &evil, body).await;
        assert_eq!(answer.status, 421, "{request}: {answer:?}");
        named += 1;
        if method != "get" {
            let evil = [cookie, csrf, kind, ("Origin", "http://evil.example")];
            let answer = guarded.server.send(&request, &evil, body).await;
            assert_eq!(answer.status, 403, "{request}: {answer:?}");
            assert!(answer.body.contains("a page of another origin"), "{request}: {answer:?}");
            changed += 1;
        }
    }
    assert!(named > 80 && changed > 40, "{named}, {changed}");
    let session = guarded.server.send("GET /api/v1/session", &[cookie], "").await;
    assert_eq!(session.status, 200, "it was not ended: {session:?}");
    guarded.end().await;
}

#[tokio::test]
async fn pages_of_others_are_refused_whatever_cookie_the_browser_adds() {
    let guarded = Guarded::start().await;
    guarded.user("anna", Role::Admin).await;
    let anna = guarded.sign_in("anna").await;
    let own = format!("http://{}", guarded.server.address);
    let near = format!("http://127.0.0.1:{}", guarded.server.address.port().wrapping_add(1));
    let rebound = format!("evil.test:{}", guarded.server.address.port());
    let evil = format!("http://{rebound}");
    let (cookie, csrf) = (("Cookie", anna.cookie.as_str()), ("X-Vedetta-CSRF", anna.csrf.as_str()));
    // As Chromium sends them; even with a token that they cannot know.
    for (what, headers, get, put) in [
        ("our page", vec![("Sec-Fetch-Site", "same-origin"), ("Origin", own.as_str())], 200, 200),
        ("another port", vec![("Sec-Fetch-Site", "same-site"), ("Origin", &near)], 403, 403),
        ("another port, older", vec![("Origin", &near)], 200, 403),
        (
            "another site",
            vec![("Sec-Fetch-Site", "cross-site"), ("Origin", "http://evil.test")],
            403,
            403,
        ),
        ("another site, older", vec![("Origin", "http://evil.test")], 200, 403),
        ("a sandbox", vec![("Origin", "null")], 200, 403),
        ("rebinding", vec![("Host", &rebound), ("Origin", &evil)], 421, 421),
        ("rebinding, reading", vec![("Host", &rebound)], 421, 421),
        ("nonsense", vec![("Sec-Fetch-Site", "same-origin, none")], 403, 403),
    ] {
        let headers: Vec<_> = headers.into_iter().chain([cookie, csrf, JSON]).collect();
        let got = guarded.server.send("GET /api/v1/kv", &headers, "").await;
        assert_eq!(got.status, get, "{what}: {got:?}");
        let got = guarded.server.send("PUT /api/v1/kv/k", &headers, r#"{"value":"v"}"#).await;
        assert_eq!(got.status, put, "{what}: {got:?}");
        assert!(!got.head.contains("access-control"), "{what}: {got:?}");
    }
    guarded.end().await;
}

#[tokio::test]
async fn signing_in_from_another_site_is_refused() {
    let guarded = Guarded::start().await;
    guarded.user("anna", Role::Viewer).await;
    let form = guarded.form().await;
    let body = format!("csrf={}&name=anna&password=correct+horse", form.csrf);
    let kind = ("Content-Type", "application/x-www-form-urlencoded");
    let cookie = ("Cookie", form.cookie.as_str());
    for headers in [
        vec![kind, cookie, ("Sec-Fetch-Site", "cross-site")],
        vec![kind, cookie, ("Origin", "http://evil.example")],
        vec![kind],
    ] {
        let refused = guarded.server.send("POST /login", &headers, &body).await;
        assert_eq!(refused.status, 403, "{refused:?}");
    }
    assert_eq!(guarded.server.send("POST /login", &[kind, cookie], &body).await.status, 303);
    let wrong = guarded.server.send("POST /login", &[kind, cookie], "name=anna&password=x").await;
    assert_eq!(wrong.status, 403, "no token: {wrong:?}");
    guarded.end().await;
}

#[tokio::test]
async fn a_session_that_somebody_planted_is_worth_nothing() {
    let guarded = Guarded::start().await;
    guarded.user("anna", Role::Admin).await;
    let port = guarded.server.address.port();
    let planted = format!("vedetta-{port}={}", "A".repeat(43));
    let page = guarded.server.send("GET /login", &[("Cookie", planted.as_str())], "").await;
    let planted = Browser { cookie: planted, csrf: crate::csrf_of(&page.body) };
    let form = "name=anna&password=correct+horse";
    let answer = guarded.post(&planted, "/login", form).await;
    assert_eq!(answer.status, 303, "{answer:?}");
    let given = set_cookie(&answer).unwrap();
    assert_ne!(given, planted.cookie, "the id changes");
    let ask = async |cookie: &str| {
        guarded.server.send("GET /api/v1/session", &[("Cookie", cookie)], "").await.status
    };
    assert_eq!((ask(&planted.cookie).await, ask(&given).await), (401, 200));

    // And again: who signs in anew leaves the old session behind, dead.
    let first = guarded.browser(given).await;
    let second = set_cookie(&guarded.post(&first, "/login", form).await).unwrap();
    assert_eq!((ask(&first.cookie).await, ask(&second).await), (401, 200));
    // With two of them nobody knows which is ours.
    let both = format!("{second}; {}", planted.cookie);
    assert_eq!(ask(&both).await, 401);
    guarded.end().await;
}

#[tokio::test]
async fn where_nobody_signs_in_programs_are_free_and_pages_need_their_token() {
    let guarded = Guarded::open().await;
    let server = &guarded.server;
    let add = r#"{"kind":"a"}"#;
    assert_eq!(server.send("POST /api/v1/jobs", &[JSON], add).await.status, 201, "a program");
    let page = server.get("/").await;
    let cookie = set_cookie(&page).expect("a page brings the cookie");
    assert!(page.head.contains("samesite=strict") && page.head.contains("httponly"), "{page:?}");
    let ours = guarded.browser(cookie).await;
    let (cookie, csrf) = (("Cookie", ours.cookie.as_str()), ("X-Vedetta-CSRF", ours.csrf.as_str()));
    let site = ("Sec-Fetch-Site", "same-origin");
    for (headers, status) in [
        (vec![JSON, site, cookie, csrf], 201),
        (vec![JSON, site, cookie], 403),
        (vec![JSON, site, csrf], 403),
        (vec![JSON, site], 403),
        (vec![JSON, cookie], 403),
        (vec![JSON, site, ("Cookie", "vedetta-1=x"), csrf], 403),
    ] {
        let answer = server.send("POST /api/v1/jobs", &headers, add).await;
        assert_eq!(answer.status, status, "{headers:?}: {answer:?}");
    }
    assert_eq!(server.get("/login").await.status, 303, "there is nothing to sign in to");
    guarded.end().await;
}

#[tokio::test]
async fn a_proxy_in_front_makes_nobody_local() {
    let open = Guarded::open().await;
    for header in ["Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP"] {
        for request in ["GET /api/v1/jobs", "GET /", "GET /healthz"] {
            let answer = open.server.send(request, &[(header, "192.0.2.7")], "").await;
            assert_eq!(answer.status, 403, "{header}: {answer:?}");
            assert!(answer.body.contains("auth.enabled"), "{answer:?}");
        }
    }
    open.end().await;
    let guarded = Guarded::start().await;
    let token = guarded.token("t", Role::Operator);
    let headers = [("X-Forwarded-For", "127.0.0.1"), JSON, ("Authorization", token.as_str())];
    let added =
        guarded.server.send("POST /api/v1/jobs", &headers, &job(&json!(1)).to_string()).await;
    assert_eq!(added.status, 201, "{added:?}");
    let nobody =
        guarded.server.send("GET /api/v1/jobs", &[("X-Forwarded-For", "127.0.0.1")], "").await;
    assert_eq!(nobody.status, 401, "it proves nothing");
    guarded.end().await;
}
