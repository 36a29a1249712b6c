//! The API described as `OpenAPI` 3.1, for programs that write clients.
//!
//! That it is true is tested: each route is described and nothing else is, and what the routes answer fits
//! its schema with no field left over.

use std::sync::LazyLock;

use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use serde_json::{Map, Value, json};
use vedetta_access::{Area, Role};

use crate::access::{Within, within};
use crate::api::{Route, routes};

/// One method of one path.
struct Operation {
    method: &'static str,
    path: &'static str,
    summary: &'static str,
    /// Parameters of the query.
    query: &'static [&'static str],
    /// The schema of the body that it takes.
    takes: Option<&'static str>,
    /// The schema of the answer; [`EVENTS`] for a stream, [`PLAIN`] for text.
    answers: &'static str,
    /// With which statuses it answers so.
    done: &'static [&'static str],
    /// And with which, beside those that any request may meet, an error.
    errors: &'static [&'static str],
}

/// In place of a schema: server-sent events.
const EVENTS: &str = "";
/// In place of a schema: plain text.
const PLAIN: &str = "text/plain";

const fn asks(
    path: &'static str,
    summary: &'static str,
    query: &'static [&'static str],
    answers: &'static str,
    errors: &'static [&'static str],
) -> Operation {
    Operation { method: "get", path, summary, query, takes: None, answers, done: &["200"], errors }
}

const fn tells(
    path: &'static str,
    summary: &'static str,
    takes: Option<&'static str>,
    answers: &'static str,
    errors: &'static [&'static str],
) -> Operation {
    Operation { method: "post", path, summary, query: &[], takes, answers, done: &["200"], errors }
}

const fn removes(
    path: &'static str,
    summary: &'static str,
    answers: &'static str,
    errors: &'static [&'static str],
) -> Operation {
    Operation { method: "delete", ..asks(path, summary, &[], answers, errors) }
}

const OPERATIONS: &[Operation] = &[
    asks(
        "/api/v1/kv",
        "A page of keys in order, all pages of one revision",
        &["prefix", "revision", "limit", "keys_only", "cursor"],
        "Keys",
        &["410", "422"],
    ),
    asks("/api/v1/kv/{key}", "One key", &["revision"], "Found", &["404", "410", "422"]),
    Operation {
        method: "put",
        ..tells(
            "/api/v1/kv/{key}",
            "Gives a key a value",
            Some("Put"),
            "Done",
            &["404", "409", "422", "507"],
        )
    },
    Operation {
        query: &["of_prefix"],
        ..removes("/api/v1/kv/{key}", "Deletes a key, or all that begin so", "Gone", &["422"])
    },
    asks("/api/v1/leases", "A page of leases", &["limit", "cursor"], "Leases", &["422"]),
    tells("/api/v1/leases", "Grants a lease", Some("Grant"), "Granted", &["409", "422"]),
    asks("/api/v1/leases/{id}", "A lease with its keys", &[], "LeaseKeys", &["404", "422"]),
    removes("/api/v1/leases/{id}", "Ends a lease, and its keys", "Done", &["404", "422"]),
    tells("/api/v1/leases/{id}/keep", "Renews a lease", None, "Granted", &["404", "422"]),
    asks(
        "/api/v1/watch",
        "The changes of keys, one message for each revision; with Last-Event-ID from there on",
        &["key", "prefix", "from"],
        EVENTS,
        &["422"],
    ),
    asks(
        "/api/v1/watchers",
        "How the watchers are doing: the declared ones, and those that other programs tell of",
        &[],
        "Watchers",
        &["422"],
    ),
    asks(
        "/api/v1/watchers/{name}",
        "A watcher, and the ids that are not as they should be",
        &["limit"],
        "WatcherTroubles",
        &["404", "422"],
    ),
    tells(
        "/api/v1/watchers/{name}/resync",
        "Runs a watcher for every id; one of another program is told to, and does so soon",
        None,
        "Resynced",
        &["404", "503"],
    ),
    asks("/api/v1/stages", "What is in the queues of all stages", &[], "Stages", &["422", "503"]),
    asks(
        "/api/v1/stages/{entity}",
        "A page of records, in the order of stage and id",
        &["stage", "parked", "limit", "cursor"],
        "Records",
        &["404", "422", "503"],
    ),
    asks(
        "/api/v1/stages/{entity}/{id}",
        "The records of one entity",
        &[],
        "Records",
        &["404", "422", "503"],
    ),
    tells(
        "/api/v1/stages/{entity}/{stage}/{id}/retry",
        "Has a record tried again",
        None,
        "RecordRetried",
        &["404", "503"],
    ),
    Operation {
        done: &["200", "201"],
        ..tells(
            "/api/v1/jobs",
            "Asks for a job, or for an array of them, all or none; 200 if each waited already under \
             its unique_key",
            Some("NewJobs"),
            "Added",
            &["409", "413", "422", "503", "507"],
        )
    },
    asks(
        "/api/v1/jobs",
        "A page of jobs, the newest first",
        &["status", "queue", "kind", "tag", "q", "limit", "cursor"],
        "Jobs",
        &["422", "503"],
    ),
    tells(
        "/api/v1/jobs/retry",
        "Has jobs tried again that are dead, or were cancelled if the status says so; go on while \
         there is a cursor",
        Some("Which"),
        "Retried",
        &["422", "503"],
    ),
    tells(
        "/api/v1/jobs/keep",
        "The same as of each of them alone; one that is lost is stale instead of a conflict",
        Some("Keeps"),
        "Kepts",
        &["422", "503"],
    ),
    tells(
        "/api/v1/jobs/settle",
        "The same as of each of them alone; one that is lost is stale instead of a conflict",
        Some("Settles"),
        "Settlements",
        &["422", "503"],
    ),
    asks(
        "/api/v1/jobs/{id}",
        "A job; secrets in it are shown only if reveal asks for it, which the audit log tells",
        &["reveal"],
        "Job",
        &["404", "422", "503"],
    ),
    removes(
        "/api/v1/jobs/{id}",
        "Removes a job that does not run",
        "JobDeleted",
        &["404", "409", "422", "503"],
    ),
    tells(
        "/api/v1/jobs/{id}/retry",
        "Has a job tried again that is dead or was cancelled, due now, with no attempts made",
        None,
        "JobChanged",
        &["404", "409", "422", "503"],
    ),
    tells(
        "/api/v1/jobs/{id}/cancel",
        "Calls off a job that waits or runs",
        None,
        "JobChanged",
        &["404", "409", "422", "503"],
    ),
    tells(
        "/api/v1/jobs/{id}/keep",
        "Prolongs the lease of a job, and tells what it is at; 409 when the token is stale",
        Some("Keep"),
        "Kept",
        &["404", "409", "422", "503"],
    ),
    tells(
        "/api/v1/jobs/{id}/settle",
        "Says how a job ended; 409 when the token is stale, and nothing was stored",
        Some("Settle"),
        "Settlement",
        &["404", "409", "422", "503"],
    ),
    asks("/api/v1/queues", "What is in each queue", &[], "Queues", &["422", "503"]),
    tells(
        "/api/v1/queues/{queue}/pause",
        "Has a queue hand nothing out; what runs goes on",
        None,
        "QueueMode",
        &["404", "422", "503"],
    ),
    tells(
        "/api/v1/queues/{queue}/resume",
        "Has a queue take and give again",
        None,
        "QueueMode",
        &["404", "422", "503"],
    ),
    tells(
        "/api/v1/queues/{queue}/drain",
        "Has a queue take nothing on; what waits is worked off",
        None,
        "QueueMode",
        &["404", "422", "503"],
    ),
    tells(
        "/api/v1/queues/{queue}/take",
        "Hands out jobs that are due, the most urgent first, each under a lease; waits for the first",
        Some("Take"),
        "Taken",
        &["422", "503"],
    ),
    asks(
        "/api/v1/queues/{queue}/wake",
        "Says `more` when there may be more to take, and `look` when a job may have been cancelled",
        &[],
        EVENTS,
        &["422"],
    ),
    asks(
        "/api/v1/workers",
        "Workers and supervisors, those that ended or fell silent within ten minutes, too",
        &[],
        "Workers",
        &["422"],
    ),
    Operation {
        query: &["ttl_ms"],
        ..tells(
            "/api/v1/workers",
            "Has a supervisor start workers of a queue; 422 if no handler is declared for it, 409 if there is no \
             supervisor for it or that has no room",
            Some("StartWorkers"),
            "Command",
            &["409", "422", "503"],
        )
    },
    Operation {
        query: &["ttl_ms"],
        ..tells(
            "/api/v1/workers/terminate",
            "Has all workers finish what runs and end, and none started in their place; not those that are part of a \
             server",
            None,
            "Commands",
            &["409", "422", "503"],
        )
    },
    Operation {
        query: &["ttl_ms"],
        ..tells(
            "/api/v1/workers/restart",
            "Has every supervisor replace its workers, one at a time",
            None,
            "Commands",
            &["409", "422", "503"],
        )
    },
    removes("/api/v1/workers/{id}", "A worker is gone, in good order", "WorkerGone", &["422"]),
    tells(
        "/api/v1/workers/{id}/beat",
        "A worker registers, and is alive; the commands that wait for it are handed out with the answer, each once",
        Some("Beat"),
        "Heard",
        &["409", "422"],
    ),
    asks(
        "/api/v1/workers/{id}/wake",
        "Says `command` when a command may wait: beat then",
        &[],
        EVENTS,
        &["404", "422"],
    ),
    Operation {
        query: &["ttl_ms"],
        ..tells(
            "/api/v1/workers/{id}/stop",
            "Has a worker finish what runs, and end",
            None,
            "Command",
            &["404", "409", "422", "503"],
        )
    },
    Operation {
        query: &["ttl_ms"],
        ..tells(
            "/api/v1/workers/{id}/pause",
            "Has a worker finish what runs, and take nothing",
            None,
            "Command",
            &["404", "409", "422", "503"],
        )
    },
    Operation {
        query: &["ttl_ms"],
        ..tells(
            "/api/v1/workers/{id}/resume",
            "Has a worker go on",
            None,
            "Command",
            &["404", "409", "422", "503"],
        )
    },
    removes(
        "/api/v1/supervisors/{name}",
        "A supervisor is gone, in good order; one that gave no sign of life is forgotten, with what it was told",
        "WorkerGone",
        &["422", "503"],
    ),
    tells(
        "/api/v1/supervisors/{name}/beat",
        "A supervisor registers, and is alive; it is told of its workers, and what to do",
        Some("Report"),
        "Told",
        &["409", "422", "503"],
    ),
    asks(
        "/api/v1/supervisors/{name}/wake",
        "Says `command` when a command may wait: beat then",
        &[],
        EVENTS,
        &["404", "422"],
    ),
    asks(
        "/api/v1/commands/{id}",
        "What became of a command; known for an hour after its time",
        &[],
        "Command",
        &["404", "422", "503"],
    ),
    tells(
        "/api/v1/compact",
        "Forgets what was before a revision",
        Some("Compact"),
        "Compacted",
        &["410", "422"],
    ),
    asks("/api/v1/overview", "The store and the jobs at a glance", &[], "Overview", &["422"]),
    asks(
        "/api/v1/stats",
        "What became of jobs over time: series with a point for every step, of all queues and of each",
        &["range", "step", "queue"],
        "Stats",
        &["404", "422"],
    ),
    asks(
        "/api/v1/events",
        "All that changes, as it changes: job, queue, worker, stage, watcher, kv and stats, or some of these \
         topics; with Last-Event-ID from there on, or from now after a reset",
        &["topics"],
        EVENTS,
        &["422"],
    ),
    asks("/api/v1/session", "Who asks, and what they may do", &[], "Session", &["422"]),
    asks(
        "/api/v1/audit",
        "A page of the audit log, the newest first",
        &["limit", "cursor"],
        "Audit",
        &["404", "422"],
    ),
    asks("/api/v1/openapi.json", "This", &[], "OpenApi", &[]),
    asks("/healthz", "The process lives", &[], "Health", &[]),
    Operation {
        done: &["200", "503"],
        ..asks(
            "/readyz",
            "It takes requests, and will for a while; 503 while it stops",
            &[],
            "Health",
            &[],
        )
    },
    asks("/metrics", "Numbers for Prometheus", &[], PLAIN, &["422"]),
];

pub(crate) async fn document() -> Response {
    static DOCUMENT: LazyLock<Bytes> = LazyLock::new(|| describe().to_string().into());
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT.clone()).into_response()
}

fn describe() -> Value {
    let mut paths = Map::new();
    let routes = routes();
    for operation in OPERATIONS {
        let methods = paths.entry(operation.path).or_insert_with(|| json!({}));
        methods[operation.method] = operation.describe(&routes);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Vedetta",
            "version": env!("CARGO_PKG_VERSION"),
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
        },
        "servers": [{ "url": "/" }],
        "paths": paths,
        "components": {
            "schemas": schemas(),
            "securitySchemes": {
                "token": { "type": "http", "scheme": "bearer" },
                "session": {
                    "type": "apiKey",
                    "in": "cookie",
                    "name": "vedetta-7070",
                    "description": "named with the port; for browsers, which send X-Vedetta-CSRF along \
                                    with what changes anything",
                },
            },
            "responses": {
                "Error": { "description": "It was not done.", "content": content("Error") },
            },
        },
    })
}

fn content(schema: &str) -> Value {
    json!({ "application/json": { "schema": one(schema) } })
}

impl Operation {
    /// What the route says that it needs; what says nothing is not described.
    fn access(&self, routes: &[Route], described: &mut Value) {
        let is_it = |route: &&Route| {
            route.path.replace("{*", "{") == self.path
                && route.method.eq_ignore_ascii_case(self.method)
        };
        let Some(route) = routes.iter().find(is_it) else { return };
        described["security"] = match route.needs.role() {
            None => json!([]),
            Some(role) => {
                described["x-role"] = role.word().into();
                json!([{ "token": [] }, { "session": [] }])
            }
        };
        if let Some(Within::Area(area)) = within(route.path) {
            described["x-scope"] = area.word().into();
        }
        if let Some((parameter, needs)) = route.more {
            let role = needs.role().map(Role::word);
            described["x-role-with"] = json!({ parameter: role });
        }
    }

    fn describe(&self, routes: &[Route]) -> Value {
        let mut parameters: Vec<Value> = Vec::new();
        for name in self.path.split('/').filter_map(|part| part.strip_prefix('{')) {
            let name = name.trim_end_matches('}');
            let is_number = name == "id" && self.path.starts_with("/api/v1/jobs");
            let schema = if is_number { whole() } else { json!({ "type": "string" }) };
            parameters
                .push(json!({ "name": name, "in": "path", "required": true, "schema": schema }));
        }
        for name in self.query {
            let (name, schema) = match *name {
                "limit" => ("limit", json!({ "type": "integer", "minimum": 1, "default": 100 })),
                "revision" | "from" | "ttl_ms" => (*name, whole()),
                "keys_only" | "parked" | "reveal" => (*name, flag()),
                "of_prefix" => ("prefix", flag()),
                "status" => ("status", one("Status")),
                name => (name, text()),
            };
            parameters.push(json!({ "name": name, "in": "query", "schema": schema }));
        }
        let mut responses = Map::new();
        for status in self.done {
            let content = match self.answers {
                EVENTS => json!({ "text/event-stream": { "schema": text() } }),
                PLAIN => json!({ PLAIN: { "schema": text() } }),
                schema => content(schema),
            };
            responses.insert(
                (*status).into(),
                json!({ "description": "It is so.", "content": content }),
            );
        }
        for status in self.errors.iter().chain(&["default"]) {
            responses.insert((*status).into(), json!({ "$ref": "#/components/responses/Error" }));
        }
        if self.answers == EVENTS {
            // One caller has so many.
            responses.insert("429".into(), json!({ "$ref": "#/components/responses/Error" }));
        }
        let mut described = json!({ "summary": self.summary, "responses": responses });
        if !parameters.is_empty() {
            described["parameters"] = parameters.into();
        }
        self.access(routes, &mut described);
        if let Some(schema) = self.takes {
            described["requestBody"] = json!({ "required": true, "content": content(schema) });
        }
        described
    }
}

fn text() -> Value {
    json!({ "type": "string" })
}

fn time() -> Value {
    let millis = r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}Z$";
    json!({ "type": "string", "format": "date-time", "pattern": millis })
}

fn base64() -> Value {
    json!({ "type": "string", "contentEncoding": "base64" })
}

fn flag() -> Value {
    json!({ "type": "boolean" })
}

fn whole() -> Value {
    json!({ "type": "integer", "minimum": 0 })
}

fn whole_from(least: i64, most: i64) -> Value {
    json!({ "type": "integer", "minimum": least, "maximum": most })
}

fn words(words: &[&str]) -> Value {
    json!({ "type": "string", "enum": words })
}

fn one(schema: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{schema}") })
}

fn list(of: &Value) -> Value {
    json!({ "type": "array", "items": of })
}

fn or_null(schema: &Value) -> Value {
    json!({ "anyOf": [schema, { "type": "null" }] })
}

/// The same, and what it is.
fn said(mut schema: Value, what: &str) -> Value {
    schema["description"] = what.into();
    schema
}

/// What is answered. A name that ends with `?` is not always there.
fn answer(fields: &[(&str, Value)]) -> Value {
    let required: Vec<&str> =
        fields.iter().map(|(name, _)| *name).filter(|name| !name.ends_with('?')).collect();
    let properties: Map<String, Value> = fields
        .iter()
        .map(|(name, schema)| (name.trim_end_matches('?').to_owned(), schema.clone()))
        .collect();
    json!({ "type": "object", "required": required, "properties": properties })
}

/// What is taken, and nothing beside it.
fn input(fields: &[(&str, Value)]) -> Value {
    let mut schema = answer(fields);
    schema["additionalProperties"] = false.into();
    schema
}

fn schemas() -> Map<String, Value> {
    let all = [
        keys(),
        runs(),
        stages(),
        jobs(),
        queues(),
        work(),
        workers(),
        fleet(),
        general(),
        access(),
    ];
    all.into_iter().flatten().map(|(name, schema)| (name.to_owned(), schema)).collect()
}

type Schemas = Vec<(&'static str, Value)>;

fn keys() -> Schemas {
    let key = vec![("key?", text()), ("key_b64?", said(base64(), "if it is not UTF-8"))];
    let mut entry = key.clone();
    entry.extend([
        ("value?", text()),
        ("value_b64?", said(base64(), "if it is not UTF-8")),
        ("created", whole()),
        ("modified", whole()),
        ("version", whole()),
        ("lease?", text()),
    ]);
    let mut found = entry.clone();
    found.push(("revision", whole()));
    let lease = vec![("id", text()), ("ttl_ms", whole()), ("remaining_ms", whole())];
    let mut lease_keys = lease.clone();
    lease_keys.push(("keys", list(&answer(&key))));
    vec![
        ("Entry", answer(&entry)),
        ("Found", answer(&found)),
        (
            "Keys",
            answer(&[("revision", whole()), ("keys", list(&one("Entry"))), ("cursor?", text())]),
        ),
        (
            "Put",
            input(&[
                ("value?", text()),
                ("value_b64?", said(base64(), "instead of value")),
                ("lease?", text()),
                ("if_modified?", said(whole(), "the revision that it is of; 0: it does not exist")),
            ]),
        ),
        ("Done", answer(&[("revision", whole())])),
        ("Gone", answer(&[("revision", whole()), ("count", whole())])),
        ("Lease", answer(&lease)),
        ("Leases", answer(&[("leases", list(&one("Lease"))), ("cursor?", text())])),
        ("LeaseKeys", answer(&lease_keys)),
        ("Grant", input(&[("ttl_ms", whole()), ("id?", text())])),
        ("Granted", answer(&[("id", text()), ("ttl_ms", whole())])),
        ("Compact", input(&[("revision", whole())])),
        ("Compacted", answer(&[("oldest", whole())])),
    ]
}

fn runs() -> Schemas {
    let watcher = vec![
        ("name", text()),
        ("process?", text()),
        ("prefix?", text()),
        ("prefix_b64?", base64()),
        ("phase", text()),
        ("revision", whole()),
        ("behind?", whole()),
        ("ids", whole()),
        ("running", whole()),
        ("waiting", whole()),
        ("failing", whole()),
        ("done", whole()),
        ("failed", whole()),
        ("malformed", whole()),
        ("unreadable", whole()),
        ("lists", whole()),
        ("lost", whole()),
        ("last_error?", text()),
    ];
    let mut troubles = watcher.clone();
    troubles.push(("troubles", list(&one("Trouble"))));
    let unreadable = answer(&[("key_type", text()), ("error", text())]);
    vec![
        ("Watcher", answer(&watcher)),
        ("Watchers", answer(&[("watchers", list(&one("Watcher")))])),
        ("WatcherTroubles", answer(&troubles)),
        (
            "Trouble",
            answer(&[
                ("id?", text()),
                ("id_b64?", base64()),
                ("failures", whole()),
                ("error?", text()),
                ("retry_in_ms?", whole()),
                ("unreadable?", list(&unreadable)),
            ]),
        ),
        ("Resynced", answer(&[("ids", whole())])),
    ]
}

fn stages() -> Schemas {
    vec![
        (
            "Stage",
            answer(&[
                ("entity", text()),
                ("stage", text()),
                ("records", whole()),
                ("due", whole()),
                ("held", whole()),
                ("failing", whole()),
                ("parked", whole()),
                ("oldest_due_ms?", whole()),
                ("done", whole()),
                ("failed", whole()),
                ("conflicts", whole()),
            ]),
        ),
        ("Stages", answer(&[("stages", list(&one("Stage")))])),
        (
            "Record",
            answer(&[
                ("stage", text()),
                ("id", text()),
                ("state", words(&["held", "due", "waiting", "failing", "parked"])),
                ("due_in_ms?", whole()),
                ("failures", whole()),
                ("error?", text()),
                ("age_ms", whole()),
            ]),
        ),
        ("Records", answer(&[("records", list(&one("Record"))), ("cursor?", text())])),
        ("RecordRetried", answer(&[("retried", flag())])),
    ]
}

/// A place in a trace.
fn traceparent() -> Value {
    let text = json!({ "type": "string", "pattern": "^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}" });
    said(text, "the place in a trace that its attempts are below of, as W3C writes it")
}

/// Jobs as those who ask for them see them.
fn jobs() -> Schemas {
    let (any, words_of) = (json!({}), |all: &[&str]| words(all));
    let duration = || said(text(), "for example 1h 30m");
    let text_or_null = or_null(&text());
    vec![
        ("Status", words_of(&["waiting", "running", "done", "dead", "cancelled"])),
        (
            "NewJob",
            input(&[
                ("kind", text()),
                ("queue?", text_or_null.clone()),
                ("payload?", said(any.clone(), "1 MiB of any JSON")),
                ("cost?", or_null(&whole_from(1, i64::from(i32::MAX)))),
                ("priority?", or_null(&whole_from(-100, 100))),
                ("run_at?", said(text_or_null.clone(), "a time, or +10m from now")),
                ("max_attempts?", or_null(&whole_from(1, 1000))),
                ("timeout?", or_null(&duration())),
                ("unique_key?", text_or_null.clone()),
                ("tags?", list(&text())),
                ("traceparent?", or_null(&traceparent())),
            ]),
        ),
        ("NewJobs", json!({ "anyOf": [one("NewJob"), list(&one("NewJob"))] })),
        (
            "AddedJob",
            answer(&[
                ("id", whole()),
                ("kind", text()),
                ("queue", text()),
                ("status", one("Status")),
                ("new", said(flag(), "none waited under its unique_key")),
                ("declared", said(flag(), "the config file has a handler of its kind")),
            ]),
        ),
        (
            "Added",
            said(
                json!({ "anyOf": [one("AddedJob"), list(&one("AddedJob"))] }),
                "as it was asked: one, or an array",
            ),
        ),
        (
            "Job",
            answer(&[
                ("id", whole()),
                ("kind", text()),
                ("queue", text()),
                ("connection", said(text(), "what keeps it")),
                ("status", one("Status")),
                ("payload", any.clone()),
                ("cost", whole()),
                ("priority", whole_from(-100, 100)),
                ("attempts", whole()),
                ("max_attempts", whole()),
                ("timeout", or_null(&duration())),
                ("unique_key", text_or_null.clone()),
                ("tags", list(&text())),
                ("progress", json!({ "type": "number", "minimum": 0, "maximum": 1 })),
                ("message", text_or_null.clone()),
                ("log", said(text(), "its last 16 KiB")),
                ("result", any),
                ("error", text_or_null.clone()),
                ("worker", text_or_null),
                ("queued_at", time()),
                ("run_at", time()),
                ("started_at", or_null(&time())),
                ("ended_at", or_null(&time())),
                ("updated_at", time()),
                ("traceparent?", traceparent()),
            ]),
        ),
        ("Jobs", answer(&[("jobs", list(&one("Job"))), ("cursor?", text())])),
        (
            "Which",
            input(&[
                ("status?", or_null(&words(&["dead", "cancelled"]))),
                ("queue?", or_null(&text())),
                ("kind?", or_null(&text())),
                ("tag?", or_null(&text())),
                ("q?", or_null(&text())),
                ("cursor?", or_null(&text())),
            ]),
        ),
        ("Retried", answer(&[("retried", whole()), ("cursor?", text())])),
        ("JobDeleted", answer(&[("id", whole()), ("deleted", flag())])),
        ("JobChanged", answer(&[("id", whole()), ("status", one("Status"))])),
    ]
}

fn queues() -> Schemas {
    vec![
        (
            "Queue",
            answer(&[
                ("name", text()),
                ("mode", one("Mode")),
                ("ready", whole()),
                ("scheduled", whole()),
                ("running", whole()),
                ("done", whole()),
                ("dead", whole()),
                ("cancelled", whole()),
                ("oldest_ms?", whole()),
                ("slots", said(whole(), "of the jobs that run")),
                ("capacity", said(whole(), "slots of the workers that took jobs here lately")),
                ("done_per_minute", whole()),
                ("failed_per_minute", said(whole(), "attempts")),
            ]),
        ),
        ("Queues", answer(&[("queues", list(&one("Queue")))])),
        ("Mode", words(&["open", "paused", "draining"])),
        ("QueueMode", answer(&[("name", text()), ("mode", one("Mode"))])),
    ]
}

/// Jobs as those who work on them see them.
fn work() -> Schemas {
    let token = || said(text(), "as it came with the job");
    let id = || said(whole(), "only in an array, and there of each");
    let progress = json!({ "type": "number", "minimum": 0, "maximum": 1 });
    let outcomes = ["done", "failed", "again", "dead", "snooze", "released"];
    vec![
        (
            "Take",
            input(&[
                ("worker", text()),
                ("max?", said(whole(), "jobs; with a capacity, slots of it that are free")),
                ("wait_ms?", said(whole(), "60000 at most")),
                ("capacity?", said(whole(), "slots: a job takes as many as it costs")),
                ("lease_ms?", whole_from(100, 86_400_000)),
            ]),
        ),
        (
            "TakenJob",
            answer(&[
                ("id", whole()),
                ("token", said(text(), "the proof that the job is yours")),
                ("lease_ms", said(whole(), "keep or settle it before they are over")),
                ("kind", text()),
                ("payload", json!({})),
                ("cost", whole()),
                ("attempt", whole()),
                ("max_attempts", whole()),
                ("timeout_ms?", whole()),
                ("tags", list(&text())),
                ("traceparent?", traceparent()),
                ("waited_ms?", said(whole(), "how long it had been due")),
            ]),
        ),
        (
            "Taken",
            answer(&[
                ("jobs", list(&one("TakenJob"))),
                ("rest_ms?", said(whole(), "nothing more is due before, as far as is known")),
            ]),
        ),
        (
            "Keep",
            input(&[
                ("id?", id()),
                ("token", token()),
                ("progress?", or_null(&progress)),
                ("message?", or_null(&text())),
                ("log?", said(text(), "what is new in it")),
            ]),
        ),
        ("Keeps", list(&one("Keep"))),
        (
            "Kept",
            answer(&[
                ("cancel", said(flag(), "it was called off: end it")),
                ("stale?", said(flag(), "it is somebody else's: end it")),
                ("lease_ms", whole()),
            ]),
        ),
        ("Kepts", list(&one("Kept"))),
        (
            "Settle",
            input(&[
                ("id?", id()),
                ("token", token()),
                ("outcome", words(&outcomes)),
                ("error?", or_null(&text())),
                ("result?", json!({})),
                ("delay_ms?", or_null(&whole())),
            ]),
        ),
        ("Settles", list(&one("Settle"))),
        (
            "Settlement",
            answer(&[
                ("settled", words(&["done", "again", "dead", "stale"])),
                ("delay_ms?", whole()),
            ]),
        ),
        ("Settlements", list(&one("Settlement"))),
    ]
}

/// Workers and those who keep them.
fn workers() -> Schemas {
    let names = || list(&text());
    let slots = || answer(&[("used", whole()), ("capacity", whole())]);
    let worker = answer(&[
        ("id", text()),
        ("supervisor", or_null(&text())),
        ("queues", names()),
        ("pid", whole()),
        ("host", text()),
        ("version", text()),
        ("status", one("WorkerStatus")),
        ("inside", said(flag(), "it is part of a server, and ends with it")),
        (
            "birth?",
            said(
                text(),
                "tells its process from a later one of the same number; for its supervisor",
            ),
        ),
        ("slots", slots()),
        ("running", said(list(&whole()), "ids of jobs")),
        ("note?", said(text(), "how it ended, or why it is about to")),
        ("seen_ms", said(whole(), "how long ago")),
        ("started_at", time()),
        ("last_heartbeat", time()),
        ("created_at", time()),
        ("updated_at", time()),
    ]);
    vec![
        ("WorkerStatus", words(&["running", "paused", "stopping", "stopped", "silent"])),
        ("Worker", worker),
        (
            "Workers",
            answer(&[("workers", list(&one("Worker"))), ("supervisors", list(&one("Supervisor")))]),
        ),
        (
            "StartWorkers",
            input(&[("queue", text()), ("count?", whole_from(1, i64::from(u32::MAX)))]),
        ),
        (
            "Command",
            answer(&[
                ("id", text()),
                ("target", text()),
                ("command", text()),
                ("state", words(&["requested", "taken", "applied", "expired", "replaced"])),
                ("created_at", time()),
                ("expires_at", time()),
            ]),
        ),
        ("Commands", answer(&[("commands", list(&one("Command")))])),
        (
            "HandedCommand",
            answer(&[
                ("id", text()),
                ("command", text()),
                ("expires_ms", said(whole(), "after that it must not be obeyed")),
            ]),
        ),
        (
            "Beat",
            input(&[
                ("supervisor?", or_null(&text())),
                ("queues", names()),
                ("pid?", whole()),
                ("host?", text()),
                ("version?", text()),
                ("started?", said(whole(), "milliseconds since 1970")),
                ("birth?", or_null(&text())),
                ("state?", words(&["running", "paused", "stopping"])),
                ("slots?", slots()),
                ("running?", said(list(&whole()), "ids of jobs")),
                ("done?", said(names(), "commands that it obeyed")),
                ("note?", or_null(&text())),
            ]),
        ),
        (
            "Heard",
            answer(&[
                ("commands", list(&one("HandedCommand"))),
                ("supervisor_seen_ms?", said(whole(), "how long ago its supervisor was there")),
                ("beat_ms", said(whole(), "beat again within that")),
            ]),
        ),
        ("WorkerGone", answer(&[("id", text()), ("gone", said(flag(), "it was known"))])),
    ]
}

/// What supervisors say and hear.
fn fleet() -> Schemas {
    let names = || list(&text());
    let of_report = |mut more: Vec<(&'static str, Value)>| {
        more.extend([
            ("queues", said(names(), "what its workers can work")),
            ("balance", words(&["simple", "auto"])),
            ("min", whole()),
            ("max", whole()),
            ("wanted", said(whole(), "workers it wants now")),
            (
                "state",
                words(&[
                    "starting",
                    "running",
                    "restarting",
                    "crash-looping",
                    "terminated",
                    "stopping",
                ]),
            ),
            (
                "last_exit?",
                said(
                    text(),
                    "how its last worker that failed ended, or why it could not look at them",
                ),
            ),
            ("stderr?", said(text(), "the last that one wrote")),
        ]);
        more
    };
    let said_of_it = of_report(vec![
        ("host", text()),
        ("version", text()),
        ("instance", said(text(), "differs from that of another process of the same name")),
        ("ended?", list(&input(&[("id", text()), ("exit", text())]))),
        ("done?", said(names(), "commands that it obeyed")),
        ("depths?", said(flag(), "whether it is told what is in the queues")),
    ]);
    let depth =
        [("name", text()), ("ready", whole()), ("running", whole()), ("oldest_ms?", whole())];
    vec![
        (
            "Supervisor",
            answer(&[
                ("name", text()),
                ("host", text()),
                ("halted", said(flag(), "it starts no workers until it is told to")),
                ("report?", answer(&of_report(Vec::new()))),
                ("seen_ms", whole()),
            ]),
        ),
        ("Report", input(&said_of_it)),
        (
            "Told",
            answer(&[
                ("commands", list(&one("HandedCommand"))),
                ("workers", list(&one("Worker"))),
                ("queues", list(&answer(&depth))),
                ("halted", said(flag(), "it was told to start no workers, maybe before it began")),
                ("silent_ms", said(whole(), "a worker not seen for so long is silent")),
                ("beat_ms", whole()),
            ]),
        ),
    ]
}

fn general() -> Schemas {
    let codes = [
        "bad_json",
        "closed",
        "compacted",
        "conflict",
        "damaged",
        "disk_full",
        "failed",
        "forbidden",
        "halted",
        "invalid",
        "misdirected",
        "not_found",
        "not_json",
        "quota",
        "too_large",
        "too_many",
        "too_slow",
        "unauthorized",
        "unavailable",
        "uncertain",
        "unreadable",
        "wrong_method",
    ];
    let why = answer(&[("code", words(&codes)), ("message", text()), ("hint?", text())]);
    vec![
        ("Error", answer(&[("error", why)])),
        (
            "Overview",
            answer(&[
                ("revision", whole()),
                ("oldest", whole()),
                ("keys", whole()),
                ("leases", whole()),
                ("watchers", whole()),
                ("size", whole()),
                ("jobs?", one("JobsNow")),
                ("now", time()),
            ]),
        ),
        (
            "JobsNow",
            answer(&[
                ("queues", whole()),
                ("paused", said(whole(), "queues that do not both take and give")),
                ("ready", whole()),
                ("scheduled", whole()),
                ("running", whole()),
                ("slots", whole()),
                ("capacity", whole()),
                ("done", whole()),
                ("dead", whole()),
                ("cancelled", whole()),
                ("oldest_ms?", whole()),
                ("done_per_minute", whole()),
                ("failed_per_minute", whole()),
                ("workers", whole()),
            ]),
        ),
        (
            "Stats",
            answer(&[
                ("from", said(whole(), "when the first step began, in milliseconds since 1970")),
                ("step_ms", whole()),
                ("since", said(whole(), "since when it is counted, in milliseconds since 1970")),
                ("all", one("Points")),
                ("queues", json!({ "type": "object", "additionalProperties": one("Points") })),
            ]),
        ),
        (
            "Points",
            answer(&[
                ("done", list(&whole())),
                ("failed", list(&whole())),
                ("ready", list(&whole())),
                ("running", list(&whole())),
                ("oldest_ms", list(&whole())),
                ("run_p50_ms", list(&or_null(&whole()))),
                ("run_p95_ms", list(&or_null(&whole()))),
                ("wait_p50_ms", list(&or_null(&whole()))),
                ("wait_p95_ms", list(&or_null(&whole()))),
            ]),
        ),
        (
            "Health",
            answer(&[
                ("status", words(&["ok", "ready", "stopping"])),
                ("program", text()),
                ("version", text()),
            ]),
        ),
        ("OpenApi", json!({ "type": "object" })),
    ]
}

fn access() -> Schemas {
    vec![
        (
            "Session",
            answer(&[
                ("name", text()),
                ("role", one("Role")),
                ("scope", list(&one("Scope"))),
                ("by", words(&["local", "session", "token"])),
                ("csrf?", said(text(), "to send as X-Vedetta-CSRF")),
                ("expires_at?", time()),
            ]),
        ),
        ("Role", words(&["viewer", "operator", "admin"])),
        ("Scope", words(&[&["all"], &Area::ALL.map(Area::word)[..]].concat())),
        ("Audit", answer(&[("entries", list(&one("AuditEntry"))), ("cursor?", text())])),
        (
            "AuditEntry",
            answer(&[
                ("id", whole()),
                ("at", time()),
                ("who", said(text(), "a user, token:NAME, local, shell, or ? for nobody known")),
                ("from", said(text(), "an address, or shell")),
                ("action", text()),
                ("target", text()),
                ("outcome", words(&["done", "refused", "failed"])),
                ("count", said(whole(), "how often within a short time")),
            ]),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_route_is_described_and_nothing_else_is() {
        let served: BTreeSet<(String, String)> = routes()
            .iter()
            // The empty key is refused.
            .filter(|route| route.path != "/api/v1/kv/")
            .map(|route| (route.method.to_lowercase(), route.path.replace("{*", "{")))
            .collect();
        let described = OPERATIONS.iter().map(|one| (one.method.to_owned(), one.path.to_owned()));
        assert_eq!(described.collect::<BTreeSet<_>>(), served);
        assert_eq!(OPERATIONS.len(), served.len(), "each once");
    }

    #[test]
    fn every_schema_is_used_and_every_used_one_is_there() {
        fn used(value: &Value, names: &mut BTreeSet<String>) {
            match value {
                Value::Object(fields) => fields.iter().for_each(|(name, value)| match value {
                    Value::String(at) if name == "$ref" => {
                        names.extend(at.strip_prefix("#/components/schemas/").map(str::to_owned));
                    }
                    value => used(value, names),
                }),
                Value::Array(items) => items.iter().for_each(|item| used(item, names)),
                _ => {}
            }
        }
        let (document, mut names) = (describe(), BTreeSet::new());
        used(&document, &mut names);
        let there: BTreeSet<String> = schemas().keys().cloned().collect();
        assert_eq!(names, there);
    }
}
