//! The description of the API, held against what the API does.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};
use vedetta_access::{Access, Role, Scope};
use vedetta_runtime::watcher::{BoxError, Effect, Id};
use vedetta_runtime::{Next, Reconcile, State, Watcher};
use vedetta_stage::Records as _;
use vedetta_stage::sqlite::{self, Records};

use crate::support::{Answer, Server, until};

/// The description, with no field allowed that it does not name.
struct Described(Value);

/// Forbids further fields wherever some are named.
fn close(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            fields.values_mut().for_each(close);
            if fields.contains_key("properties") {
                fields.insert("additionalProperties".into(), json!(false));
            }
        }
        Value::Array(items) => items.iter_mut().for_each(close),
        _ => {}
    }
}

impl Described {
    async fn by(server: &Server) -> Self {
        let mut document = server.get("/api/v1/openapi.json").await.json();
        assert_eq!(document["openapi"], "3.1.0");
        close(&mut document["components"]["schemas"]);
        Self(document)
    }

    fn operation(&self, method: &str, path: &str) -> &Value {
        let operation = &self.0["paths"][path][method];
        assert!(operation.is_object(), "{method} {path} is not described");
        operation
    }

    fn check(&self, schema: &Value, value: &Value, what: &str) {
        let mut whole = schema.clone();
        whole["components"] = self.0["components"].clone();
        let validator = jsonschema::validator_for(&whole).unwrap();
        let faults: Vec<String> =
            validator.iter_errors(value).map(|fault| fault.to_string()).collect();
        assert!(faults.is_empty(), "{what}: {faults:?} in {value}");
    }

    /// Whether an answer is one of those that are described.
    fn fits(&self, method: &str, path: &str, answer: &Answer) {
        let what = format!("{method} {path}");
        let responses = &self.operation(method, path)["responses"];
        let status = answer.status.to_string();
        let mut response = responses.get(&status).unwrap_or_else(|| {
            // Those that any request may meet are described once.
            assert!([400, 403, 405, 413, 415, 421].contains(&answer.status), "{what}: {answer:?}");
            &responses["default"]
        });
        if let Some(reference) = response["$ref"].as_str() {
            response = self.0.pointer(reference.trim_start_matches('#')).unwrap();
        }
        let schema = &response["content"]["application/json"]["schema"];
        self.check(schema, &answer.json(), &what);
    }

    /// Sends a body that fits its description, and looks whether the answer does.
    async fn tell(
        &self,
        server: &Server,
        method: &str,
        path: &str,
        ids: &str,
        body: Value,
    ) -> Value {
        let schema = &self.operation(method, path)["requestBody"];
        if body.is_null() {
            assert!(schema.is_null(), "{method} {path} takes a body");
        } else {
            let schema = &schema["content"]["application/json"]["schema"];
            self.check(schema, &body, path);
        }
        let request = format!("{} {}", method.to_uppercase(), filled(path, ids));
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let answer = server.json(&request, &body).await;
        assert!(answer.status < 300, "{request}: {answer:?}");
        self.fits(method, path, &answer);
        answer.json()
    }
}

/// A path with ids, one after the other, in the place of names.
fn filled(path: &str, ids: &str) -> String {
    let mut ids = ids.split(' ');
    let parts = path
        .split('/')
        .map(|part| if part.starts_with('{') { ids.next().expect("an id for each") } else { part });
    parts.collect::<Vec<_>>().join("/")
}

#[derive(Debug, Clone, Default)]
struct Any;

impl State for Any {
    fn apply(&mut self, _: &str, _: Option<&[u8]>) -> Result<Effect, BoxError> {
        Ok(Effect::Wanted)
    }
}

struct Fails;

impl Reconcile for Fails {
    type State = Any;

    async fn reconcile(&self, _: &Id, _: Option<&Any>) -> Result<Next, BoxError> {
        Err("no mixer is free".into())
    }
}

/// A worker and a supervisor, who are told something; which command.
async fn workers_say(api: &Described, server: &Server) -> String {
    let tell = async |path: &str, ids: &str, body: Value| {
        api.tell(server, "post", &format!("/api/v1{path}"), ids, body).await
    };
    let beat = json!({"queues": ["default"], "supervisor": "boss:here", "pid": 7, "host": "here",
        "version": "1", "started": 1, "birth": "a:1", "state": "running", "running": [3],
        "slots": {"used": 1, "capacity": 2}, "done": ["x"], "note": "why"});
    tell("/workers/{id}/beat", "w1", beat.clone()).await;
    let report = json!({"host": "here", "version": "1", "instance": "i", "queues": ["default"],
        "balance": "auto", "min": 1, "max": 3, "wanted": 1, "state": "crash-looping",
        "last_exit": "exit code 1", "stderr": "why", "ended": [{"id": "w0", "exit": "exit code 1"}],
        "done": [], "depths": true});
    let told = tell("/supervisors/{name}/beat", "boss:here", report).await;
    assert_eq!(told["workers"][0]["id"], "w1");
    assert!(!told["queues"].as_array().unwrap().is_empty(), "{told}");
    tell("/workers", "", json!({"queue": "default", "count": 2})).await;
    tell("/workers/{id}/resume", "w1", Value::Null).await;
    let command = tell("/workers/{id}/pause", "w1", Value::Null).await["id"].clone();
    let heard = tell("/workers/{id}/beat", "w1", beat).await;
    assert_eq!(heard["commands"][0]["id"], command);
    command.as_str().unwrap().to_owned()
}

/// They are told to end, and are gone.
async fn workers_go(api: &Described, server: &Server) {
    let tell = async |method: &str, path: &str, ids: &str| {
        api.tell(server, method, &format!("/api/v1{path}"), ids, Value::Null).await
    };
    for what in ["{id}/stop", "restart", "terminate"] {
        tell("post", &format!("/workers/{what}"), "w1").await;
    }
    tell("delete", "/workers/{id}", "w1").await;
    tell("delete", "/supervisors/{name}", "boss:here").await;
}

/// What answers with a stream, or with text.
const STREAMS: [&str; 6] = [
    "/api/v1/events",
    "/api/v1/queues/{queue}/wake",
    "/api/v1/supervisors/{name}/wake",
    "/api/v1/watch",
    "/api/v1/workers/{id}/wake",
    "/metrics",
];

#[tokio::test]
async fn what_is_answered_is_what_is_described() {
    let server = Server::start().await;
    let folder = tempfile::tempdir().unwrap();
    let options = vedetta_db::Options::new(folder.path().join("stages.db"));
    let records =
        Records::open(vedetta_db::Db::open(&options, &[sqlite::SCHEMA]).unwrap()).await.unwrap();
    let pay = records.lane("order", "pay").await.unwrap();
    let visits = [("1", 0, Duration::ZERO), ("2", 0, Duration::from_secs(3600))];
    records.enqueue(pay, &visits).await.unwrap();
    let watching = Watcher::new("/rooms/").key_types(["title"]).start(server.store.clone(), Fails);
    let handle = watching.handle();
    let access = Access::open(folder.path()).unwrap();
    access.add_token("ci", Role::Viewer, &Scope::All, None).unwrap();
    let with = |api: vedetta_dashboard::Api| {
        api.stages(records).watcher("rooms", watching.handle()).access(access, false)
    };
    let server = server.serve_as(with).await;
    let api = Described::by(&server).await;
    let v1 = |path: &str| format!("/api/v1{path}");
    let tell = async |method: &str, path: &str, ids: &str, body: Value| {
        api.tell(&server, method, &v1(path), ids, body).await
    };

    tell("put", "/kv/{key}", "%2Frooms%2F1%2Ftitle", json!({"value": "Jazz"})).await;
    let lease = tell("post", "/leases", "", json!({"ttl_ms": 60_000})).await;
    let lease = lease["id"].as_str().unwrap().to_owned();
    let leased = json!({"value_b64": "/wA=", "lease": lease, "if_modified": 0});
    tell("put", "/kv/{key}", "%FF", leased).await;
    tell("post", "/leases/{id}/keep", &lease, Value::Null).await;
    tell("post", "/stages/{entity}/{stage}/{id}/retry", "order pay 1", Value::Null).await;
    tell("post", "/watchers/{name}/resync", "rooms", Value::Null).await;
    until(|| handle.status().failed > 0).await;
    let job = json!({"kind": "pack", "payload": {"a": [1]}, "tags": ["x"], "timeout": "1h",
        "cost": 2, "priority": 3, "run_at": "+0s", "unique_key": "k", "max_attempts": 1});
    let id = tell("post", "/jobs", "", job).await["id"].to_string();
    tell("post", "/jobs", "", json!([{"kind": "a"}, {"kind": "b"}, {"kind": "c"}])).await;
    let take = json!({"worker": "anna", "max": 3, "wait_ms": 0, "capacity": 1, "lease_ms": 60_000});
    let taken = tell("post", "/queues/{queue}/take", "default", take).await;
    assert_eq!(taken["jobs"].as_array().unwrap().len(), 3);
    let proof = |n: usize| taken["jobs"][n]["token"].clone();
    let of = |n: usize| taken["jobs"][n]["id"].clone();
    let note = json!({"token": proof(0), "progress": 0.5, "message": "half", "log": "a\n"});
    tell("post", "/jobs/{id}/keep", &id, note).await;
    let notes = json!([{"id": of(1), "token": proof(1)}, {"id": of(2), "token": "1:1"}]);
    tell("post", "/jobs/keep", "", notes).await;
    let failed = json!({"token": proof(0), "outcome": "failed", "error": "no", "delay_ms": 1});
    tell("post", "/jobs/{id}/settle", &id, failed).await;
    let ends = json!([
        {"id": of(1), "token": proof(1), "outcome": "done", "result": {"ok": true}},
        {"id": of(2), "token": proof(2), "outcome": "snooze", "delay_ms": 60_000},
        {"id": of(2), "token": "1:1", "outcome": "dead"},
    ]);
    tell("post", "/jobs/settle", "", ends).await;

    let command = workers_say(&api, &server).await;

    let mut asked = BTreeSet::new();
    for (path, ids) in [
        ("/api/v1/workers", ""),
        ("/api/v1/commands/{id}", &command),
        ("/api/v1/kv", ""),
        ("/api/v1/kv/{key}", "%FF"),
        ("/api/v1/leases", ""),
        ("/api/v1/leases/{id}", &lease),
        ("/api/v1/watchers", ""),
        ("/api/v1/watchers/{name}", "rooms"),
        ("/api/v1/stages", ""),
        ("/api/v1/stages/{entity}", "order"),
        ("/api/v1/stages/{entity}/{id}", "order 2"),
        ("/api/v1/jobs", ""),
        ("/api/v1/jobs/{id}", &id),
        ("/api/v1/queues", ""),
        ("/api/v1/overview", ""),
        ("/api/v1/session", ""),
        ("/api/v1/audit", ""),
        ("/api/v1/stats", ""),
        ("/api/v1/openapi.json", ""),
        ("/healthz", ""),
        ("/readyz", ""),
    ] {
        let answer = server.get(&filled(path, ids)).await;
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        api.fits("get", path, &answer);
        asked.insert(path.to_owned());
    }
    // What is left answers with a stream, or with text.
    let (is_get, paths) = (|path: &Value| path.get("get").is_some(), &api.0["paths"]);
    let all = paths.as_object().unwrap().iter().filter(|(_, path)| is_get(path));
    let streams = all.filter(|(path, _)| !asked.contains(*path)).map(|(path, _)| path.as_str());
    assert_eq!(streams.collect::<Vec<_>>(), STREAMS);

    workers_go(&api, &server).await;
    tell("post", "/jobs/{id}/retry", &id, Value::Null).await;
    tell("post", "/jobs/{id}/cancel", &id, Value::Null).await;
    let which = json!({"status": "cancelled", "queue": "default", "kind": "pack"});
    tell("post", "/jobs/retry", "", which).await;
    tell("delete", "/jobs/{id}", &id, Value::Null).await;
    for what in ["pause", "drain", "resume"] {
        tell("post", &format!("/queues/{{queue}}/{what}"), "default", Value::Null).await;
    }
    tell("delete", "/leases/{id}", &lease, Value::Null).await;
    tell("delete", "/kv/{key}", "nothing", Value::Null).await;
    tell("post", "/compact", "", json!({"revision": 2})).await;
    watching.stop(Duration::ZERO).await;
    server.end().await;
}

#[tokio::test]
async fn what_is_refused_is_refused_as_described() {
    let server = Server::start().await;
    server.put("a", "1").await;
    server.put("a", "2").await;
    server.post("/compact", json!({"revision": 3})).await;
    server.post("/jobs", json!({"kind": "pack"})).await;
    let api = Described::by(&server).await;
    let mut codes = BTreeSet::new();
    let large = json!({"value": "x".repeat(3 << 20)}).to_string();
    let typed = ("Content-Type", "application/json");
    for (method, path, ids, headers, body) in [
        ("get", "/api/v1/kv/{key}", "nothing", &[][..], ""),
        ("get", "/api/v1/kv/{key}", "a?revision=2", &[], ""),
        ("get", "/api/v1/kv", "", &[("Host", "evil.example")], ""),
        ("put", "/api/v1/kv/{key}", "a", &[typed], r#"{"value": "1", "if_modified": 0}"#),
        ("put", "/api/v1/kv/{key}", "a", &[typed], "{"),
        ("put", "/api/v1/kv/{key}", "a", &[typed], &large),
        ("put", "/api/v1/kv/{key}", "a", &[], "{}"),
        ("put", "/api/v1/kv/{key}", "a", &[typed, ("Origin", "http://evil.example")], "{}"),
        ("post", "/api/v1/jobs", "", &[typed], r#"{"colour": "red"}"#),
        ("post", "/api/v1/jobs/{id}/retry", "1", &[], ""),
        ("get", "/api/v1/jobs/{id}", "99", &[], ""),
        ("get", "/api/v1/watchers/{name}", "nobody", &[], ""),
        ("post", "/api/v1/workers/{id}/stop", "nobody", &[], ""),
        ("post", "/api/v1/workers/terminate", "?ttl_ms=1", &[], ""),
        ("post", "/api/v1/workers/{id}/beat", "a%20b", &[typed], r#"{"queues": []}"#),
        (
            "post",
            "/api/v1/workers/{id}/beat",
            "a",
            &[typed],
            r#"{"queues": [], "state": "silent"}"#,
        ),
        ("post", "/api/v1/workers", "", &[typed], r#"{"queue": "unheard-of"}"#),
        ("post", "/api/v1/workers/restart", "", &[], ""),
        ("get", "/api/v1/commands/{id}", "unheard-of", &[], ""),
        ("get", "/api/v1/workers/{id}/wake", "nobody", &[], ""),
        ("get", "/api/v1/stages/{entity}", "nothing", &[], ""),
    ] {
        // What is for no name is a query.
        let query = if path.contains('{') { "" } else { ids };
        let request = format!("{} {}{query}", method.to_uppercase(), filled(path, ids));
        let answer = server.send(&request, headers, body).await;
        assert!(answer.status >= 400, "{request}: {answer:?}");
        api.fits(method, path, &answer);
        codes.insert(answer.code());
    }
    let wrong_method = server.send("PATCH /api/v1/jobs", &[], "").await;
    api.check(&json!({"$ref": "#/components/schemas/Error"}), &wrong_method.json(), "a method");
    codes.insert(wrong_method.code());
    let expected = [
        "bad_json",
        "compacted",
        "conflict",
        "forbidden",
        "invalid",
        "misdirected",
        "not_found",
        "not_json",
        "too_large",
        "wrong_method",
    ];
    assert_eq!(codes, expected.map(str::to_owned).into());
    server.end().await;
}
