//! Requests and their answers.

use serde_json::json;
use vedetta_core::Revision;
use vedetta_dashboard::Limits;
use vedetta_kv::Options;

use crate::support::{Server, until};

#[tokio::test]
async fn a_key_is_put_read_listed_and_deleted() {
    let server = Server::start().await;
    assert_eq!(server.put("a", "one").await, 2);
    assert_eq!(server.put("a", "two").await, 3);
    assert_eq!(server.put("b", "three").await, 4);
    let a = json!({"key": "a", "value": "two", "created": 2, "modified": 3, "version": 2});
    let b = json!({"key": "b", "value": "three", "created": 4, "modified": 4, "version": 1});
    let mut with_revision = a.clone();
    with_revision["revision"] = json!(4);
    assert_eq!(server.get("/api/v1/kv/a").await.json(), with_revision);
    assert_eq!(server.get("/api/v1/kv").await.json(), json!({"revision": 4, "keys": [a, b]}));
    let keys = server.get("/api/v1/kv?prefix=b&keys_only=true").await.json();
    assert_eq!(keys["keys"], json!([{"key": "b", "created": 4, "modified": 4, "version": 1}]));

    let deleted = server.json("DELETE /api/v1/kv/a", "").await.json();
    assert_eq!(deleted, json!({"revision": 5, "count": 1}));
    assert_eq!(server.get("/api/v1/kv/a").await.status, 404);
    let again = server.json("DELETE /api/v1/kv/a", "").await.json();
    assert_eq!(again, json!({"revision": 5, "count": 0}));

    for key in ["x/1", "x/2", "y"] {
        server.put(key, "").await;
    }
    let deleted = server.json("DELETE /api/v1/kv/x/?prefix=true", "").await.json();
    assert_eq!(deleted, json!({"revision": 9, "count": 2}));
    assert_eq!(server.get("/api/v1/overview").await.json()["keys"], 2);
    server.end().await;
}

#[tokio::test]
async fn a_key_is_all_that_follows_and_can_be_any_bytes() {
    let server = Server::start().await;
    server.put("/rooms/1", "slashes").await;
    for path in ["/api/v1/kv//rooms/1", "/api/v1/kv/%2Frooms%2F1", "/api/v1/kv/%2frooms/1"] {
        assert_eq!(server.get(path).await.json()["key"], "/rooms/1", "{path}");
    }
    let found = server.get("/api/v1/kv?prefix=%2Frooms%2F").await.json();
    assert_eq!(found["keys"][0]["value"], "slashes");

    let put = server.json("PUT /api/v1/kv/%00%FF%2F", r#"{"value_b64": "/wA="}"#).await;
    assert_eq!(put.status, 200, "{put:?}");
    let found = server.get("/api/v1/kv/%00%ff%2f").await.json();
    assert_eq!((&found["key_b64"], &found["value_b64"]), (&json!("AP8v"), &json!("/wA=")));
    assert_eq!((found.get("key"), found.get("value")), (None, None));
    assert_eq!(server.get("/api/v1/kv?prefix=%00%FF").await.json()["keys"][0]["key_b64"], "AP8v");
    server.end().await;
}

#[tokio::test]
async fn the_pages_of_a_list_are_of_one_revision() {
    let server = Server::start().await;
    for n in 0..5 {
        server.put(&format!("k{n}"), "old").await;
    }
    let mut seen = Vec::new();
    let mut page = server.get("/api/v1/kv?prefix=k&limit=2").await.json();
    let revision = page["revision"].clone();
    loop {
        seen.extend(page["keys"].as_array().unwrap().iter().cloned());
        let Some(cursor) = page["cursor"].as_str() else { break };
        // What happens between two pages is not in the list.
        server.put("k4", "new").await;
        server.put(&format!("k0{}", seen.len()), "new").await;
        page = server.get(&format!("/api/v1/kv?prefix=k&limit=2&cursor={cursor}")).await.json();
        assert_eq!(page["revision"], revision);
    }
    let seen: Vec<_> = seen.iter().map(|key| (key["key"].clone(), key["value"].clone())).collect();
    let wanted: Vec<_> = (0..5).map(|n| (json!(format!("k{n}")), json!("old"))).collect();
    assert_eq!(seen, wanted);

    let elsewhere = server.get("/api/v1/kv?prefix=other&cursor=AAAAAAAAAAZrMQ").await;
    assert_eq!((elsewhere.status, elsewhere.code().as_str()), (422, "invalid"));
    server.end().await;
}

#[tokio::test]
async fn a_page_of_large_values_ends_early() {
    let server = Server::start().await;
    let large = "v".repeat(600_000);
    for n in 0..4 {
        server.put(&format!("k{n}"), &large).await;
    }
    let first = server.get("/api/v1/kv").await.json();
    assert_eq!(first["keys"].as_array().unwrap().len(), 2);
    let cursor = first["cursor"].as_str().unwrap();
    let second = server.get(&format!("/api/v1/kv?cursor={cursor}")).await.json();
    assert_eq!(second["keys"].as_array().unwrap().len(), 2);
    assert!(second.get("cursor").is_none());
    server.end().await;
}

#[tokio::test]
async fn a_put_can_ask_for_the_revision_it_expects() {
    let server = Server::start().await;
    let put = async |body: &str| {
        let answer = server.json("PUT /api/v1/kv/k", body).await;
        (answer.status, answer.body)
    };
    assert_eq!(put(r#"{"value": "1", "if_modified": 0}"#).await.0, 200);
    let (status, why) = put(r#"{"value": "2", "if_modified": 0}"#).await;
    assert_eq!(status, 409);
    assert!(why.contains("should not exist, but was modified in revision 2"), "{why}");
    assert_eq!(put(r#"{"value": "2", "if_modified": 2}"#).await.0, 200);
    assert_eq!(put(r#"{"value": "3", "if_modified": 2}"#).await.0, 409);
    assert_eq!(server.get("/api/v1/kv/k").await.json()["value"], "2");
    server.end().await;
}

#[tokio::test]
async fn the_past_can_be_read_until_it_is_compacted() {
    let server = Server::start().await;
    for value in ["one", "two", "three"] {
        server.put("k", value).await;
    }
    assert_eq!(server.get("/api/v1/kv/k?revision=3").await.json()["value"], "two");
    assert_eq!(server.get("/api/v1/kv?revision=2").await.json()["keys"][0]["value"], "one");
    let compacted = server.json("POST /api/v1/compact", r#"{"revision": 4}"#).await;
    assert_eq!(compacted.json(), json!({"oldest": 4}));
    for path in ["/api/v1/kv/k?revision=3", "/api/v1/kv?revision=3"] {
        let gone = server.get(path).await;
        assert_eq!((gone.status, gone.code().as_str()), (410, "compacted"));
        assert!(gone.body.contains("the oldest kept is 4"), "{gone:?}");
    }
    assert_eq!(server.get("/api/v1/kv/k?revision=99").await.status, 422);
    server.end().await;
}

#[tokio::test]
async fn a_lease_is_granted_kept_shown_and_revoked_with_its_keys() {
    let server = Server::start().await;
    let granted = server.json("POST /api/v1/leases", r#"{"ttl_ms": 60000, "id": "2af"}"#).await;
    assert_eq!(granted.json(), json!({"id": "2af", "ttl_ms": 60000}));
    let twice = server.json("POST /api/v1/leases", r#"{"ttl_ms": 60000, "id": "2af"}"#).await;
    assert_eq!(twice.status, 409);
    let put = server.json("PUT /api/v1/kv/room", r#"{"value": "x", "lease": "2af"}"#).await;
    assert_eq!(put.status, 200, "{put:?}");
    assert_eq!(server.get("/api/v1/kv/room").await.json()["lease"], "2af");

    let shown = server.get("/api/v1/leases/2af").await.json();
    assert_eq!(shown["keys"], json!([{"key": "room"}]));
    assert!(shown["remaining_ms"].as_u64().unwrap() <= 60000);
    let kept = server.json("POST /api/v1/leases/2af/keep", "").await.json();
    assert_eq!(kept, json!({"id": "2af", "ttl_ms": 60000}));

    let other = server.json("POST /api/v1/leases", r#"{"ttl_ms": 60000}"#).await.json();
    let first = server.get("/api/v1/leases?limit=1").await.json();
    assert_eq!(first["leases"][0]["id"], "2af");
    let cursor = first["cursor"].as_str().unwrap();
    let second = server.get(&format!("/api/v1/leases?cursor={cursor}")).await.json();
    assert_eq!(second["leases"][0]["id"], other["id"]);

    let revoked = server.json("DELETE /api/v1/leases/2af", "").await.json();
    assert_eq!(revoked, json!({"revision": 3}));
    assert_eq!(server.get("/api/v1/kv/room").await.status, 404);
    assert_eq!(server.json("POST /api/v1/leases/2af/keep", "").await.status, 404);
    server.end().await;
}

#[tokio::test]
async fn a_wrong_request_gets_a_status_a_code_and_a_sentence() {
    let server = Server::start().await;
    let put = "PUT /api/v1/kv/k";
    let huge = json!({"value": "v".repeat(2 << 20)}).to_string();
    let large = json!({"value": "v".repeat(1_600_000)}).to_string();
    for (request, body, status, code) in [
        ("GET /nowhere", "", 404, "not_found"),
        ("GET /api/v1/nowhere", "", 404, "not_found"),
        ("POST /api/v1/kv/k", "{}", 405, "wrong_method"),
        ("PUT /", "{}", 405, "wrong_method"),
        (put, "{", 400, "bad_json"),
        (put, "", 400, "bad_json"),
        (put, r#"{"value": "v"} x"#, 400, "bad_json"),
        (put, r#"{"value": "v", "vlaue": 1}"#, 422, "invalid"),
        (put, r#"{"value": 1}"#, 422, "invalid"),
        (put, "{}", 422, "invalid"),
        (put, r#"{"value": "v", "value_b64": ""}"#, 422, "invalid"),
        (put, r#"{"value_b64": "*"}"#, 422, "invalid"),
        (put, r#"{"value": "v", "lease": "xyz"}"#, 422, "invalid"),
        (put, r#"{"value": "v", "lease": "0"}"#, 422, "invalid"),
        (put, r#"{"value": "v", "lease": "1"}"#, 404, "not_found"),
        (put, &huge, 413, "too_large"),
        (put, &large, 413, "too_large"),
        ("PUT /api/v1/kv/", r#"{"value": "v"}"#, 422, "invalid"),
        ("DELETE /api/v1/kv/?prefix=true", "", 422, "invalid"),
        ("DELETE /api/v1/kv/k?prefix=yes", "", 422, "invalid"),
        ("GET /api/v1/kv/k", "", 404, "not_found"),
        ("GET /api/v1/kv/k?revision=x", "", 422, "invalid"),
        ("GET /api/v1/kv?limit=-1", "", 422, "invalid"),
        ("GET /api/v1/kv?cursor=!", "", 422, "invalid"),
        ("GET /api/v1/kv?color=red", "", 422, "invalid"),
        ("GET /api/v1/watch", "", 422, "invalid"),
        ("GET /api/v1/watch?key=a&prefix=b", "", 422, "invalid"),
        ("GET /api/v1/watchers?color=red", "", 422, "invalid"),
        ("GET /api/v1/watchers/none", "", 404, "not_found"),
        ("POST /api/v1/watchers/none/resync", "", 404, "not_found"),
        ("GET /api/v1/watchers/none/resync", "", 405, "wrong_method"),
        ("GET /api/v1/watchers/%FF", "", 422, "invalid"),
        ("GET /api/v1/leases/none", "", 422, "invalid"),
        ("GET /api/v1/leases/%FF", "", 422, "invalid"),
        ("GET /api/v1/leases/1", "", 404, "not_found"),
        ("DELETE /api/v1/leases/1", "", 404, "not_found"),
        ("POST /api/v1/leases", r#"{"ttl_ms": 0}"#, 422, "invalid"),
        ("POST /api/v1/leases", r#"{"ttl_ms": 9100000000000}"#, 422, "invalid"),
        ("POST /api/v1/compact", r#"{"revision": 99}"#, 422, "invalid"),
    ] {
        let answer = server.json(request, body).await;
        let shown = (request, &body[..body.len().min(60)]);
        assert_eq!((answer.status, answer.code().as_str()), (status, code), "{shown:?} {answer:?}");
        let message = answer.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
        assert!(message.len() > 10, "{shown:?}: {message}");
    }
    let plain = server.send(put, &[("Content-Type", "text/plain")], r#"{"value": "v"}"#).await;
    assert_eq!((plain.status, plain.code().as_str()), (415, "not_json"));
    assert_eq!(server.store.status().revision, Revision::FRESH, "nothing was changed");
    server.end().await;
}

#[tokio::test]
async fn a_store_that_is_closed_answers_503() {
    let server = Server::start().await;
    server.store.close().await;
    let refused = server.json("PUT /api/v1/kv/k", r#"{"value": "v"}"#).await;
    assert_eq!((refused.status, refused.code().as_str()), (503, "closed"));
    server.end().await;
}

#[tokio::test]
async fn above_the_quota_puts_answer_507_and_deletes_work() {
    let quota = Options { quota: Some(300_000), ..Options::default() };
    let server = Server::on(Limits::default(), quota).await;
    server.put("k", &"v".repeat(400_000)).await;
    // The size is measured right after a commit was answered.
    until(|| server.store.status().size > 300_000).await;
    let refused = server.json("PUT /api/v1/kv/k2", r#"{"value": "v"}"#).await;
    assert_eq!((refused.status, refused.code().as_str()), (507, "quota"));
    assert_eq!(server.json("DELETE /api/v1/kv/k", "").await.status, 200);
    server.end().await;
}

#[tokio::test]
async fn a_request_for_another_host_is_refused_on_every_route() {
    let server = Server::start().await;
    let port = server.address.port();
    for path in ["/", "/jobs", "/healthz", "/api/v1/kv", "/api/v1/watch?prefix=", "/x"] {
        for host in ["evil.example", "evil.example:7070", "localhost.evil.example", "10.0.0.1", ""]
        {
            let answer = server.send(&format!("GET {path}"), &[("Host", host)], "").await;
            assert_eq!(answer.status, 421, "{path} {host}");
        }
    }
    for host in ["localhost", &format!("localhost:{port}"), "127.0.0.1", "[::1]:80"] {
        assert_eq!(server.send("GET /healthz", &[("Host", host)], "").await.status, 200, "{host}");
    }
    assert_eq!(server.raw(b"GET /healthz HTTP/1.0\r\n\r\n").await.status, 421, "no Host at all");
    server.end().await;
}

#[tokio::test]
async fn a_page_of_another_origin_can_neither_change_nor_read() {
    let server = Server::start().await;
    let own = format!("http://{}", server.address);
    let near = format!("http://127.0.0.1:{}", server.address.port().wrapping_add(1));
    let put = "PUT /api/v1/kv/k";
    // The token of the page, so that nothing else is in the way.
    let session = server.get("/api/v1/session").await;
    let csrf = session.json()["csrf"].as_str().unwrap().to_owned();
    let start = session.raw.find("vedetta-").unwrap();
    let cookie = session.raw[start..].split(';').next().unwrap();
    for (request, header, value, status) in [
        (put, "Sec-Fetch-Site", "same-origin", 200),
        (put, "Sec-Fetch-Site", "none", 200),
        (put, "Sec-Fetch-Site", "same-site", 403),
        (put, "Sec-Fetch-Site", "cross-site", 403),
        (put, "Origin", &own, 200),
        (put, "Origin", &near, 403),
        (put, "Origin", "http://evil.example", 403),
        (put, "Origin", "null", 403),
        ("GET /api/v1/kv/k", "Sec-Fetch-Site", "cross-site", 403),
        ("GET /api/v1/kv/k", "Sec-Fetch-Site", "same-origin", 200),
        ("DELETE /api/v1/kv/none", "Origin", &near, 403),
        ("POST /api/v1/leases/1/keep", "Origin", &near, 403),
        ("POST /api/v1/watchers/rooms/resync", "Origin", &near, 403),
        ("POST /api/v1/watchers/rooms/resync", "Sec-Fetch-Site", "cross-site", 403),
        ("GET /", "Sec-Fetch-Site", "cross-site", 200), // following a link is fine
    ] {
        let headers = [
            ("Content-Type", "application/json"),
            ("Cookie", cookie),
            ("X-Vedetta-CSRF", &csrf),
            (header, value),
        ];
        let answer = server.send(request, &headers, r#"{"value": "v"}"#).await;
        assert_eq!(answer.status, status, "{request} {header}: {value}");
        assert!(!answer.head.contains("access-control"), "never opened to others");
    }
    server.end().await;
}

#[tokio::test]
async fn every_answer_carries_the_headers_that_protect_a_browser() {
    let server = Server::start().await;
    for path in ["/", "/jobs", "/kv", "/api/v1/overview", "/nowhere", "/healthz", "/metrics"] {
        let answer = server.get(path).await;
        for header in [
            "content-security-policy: default-src 'none'; script-src 'self'",
            "; require-trusted-types-for 'script'; trusted-types vedetta\r\n",
            "x-frame-options: deny",
            "x-content-type-options: nosniff",
            "referrer-policy: same-origin",
            "cross-origin-opener-policy: same-origin",
            "cross-origin-resource-policy: same-origin",
            "permissions-policy: ",
            "cache-control: no-store",
        ] {
            assert!(answer.head.contains(header), "{path} lacks {header}: {}", answer.head);
        }
    }
    server.end().await;
}

#[tokio::test]
async fn health_and_readiness_answer() {
    let server = Server::start().await;
    assert_eq!(server.get("/healthz").await.json()["program"], "vedetta");
    assert_eq!(server.get("/readyz").await.json()["status"], "ready");
    server.end().await;
}

#[tokio::test]
async fn a_client_beyond_the_limit_waits_for_a_place() {
    let limits = Limits { connections: 2, ..Limits::default() };
    let server = Server::with(limits).await;
    let one = server.watch("prefix=", None).await;
    let two = server.watch("prefix=", None).await;
    {
        let mut third = std::pin::pin!(server.watch("prefix=", None));
        // It may knock as often as it likes while the first two say something.
        for _ in 0..100 {
            let poll = std::future::poll_fn(|cx| std::task::Poll::Ready(third.as_mut().poll(cx)));
            assert!(poll.await.is_pending(), "there was no place");
            tokio::task::yield_now().await;
        }
        assert_eq!(server.store.status().watchers, 2);
        drop(one);
        drop(third.await);
    }
    drop(two);
    server.until_watchers(0).await;
    server.end().await;
}
