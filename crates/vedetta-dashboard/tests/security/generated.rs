//! Requests made up from the description of the API: whatever they have in them, none breaks the server.

use std::collections::BTreeSet;
use std::time::Duration;

use fastrand::Rng;
use serde_json::{Map, Value, json};
use vedetta_access::Role;
use vedetta_db::postgres::Postgres;
use vedetta_fleet::Roster as _;
use vedetta_fleet::postgres::PostgresRoster;

use crate::{Guarded, escaped, status};

/// So many of each operation.
const OF_EACH: usize = 100;
/// And of each that goes to a PostgreSQL, which takes longer.
const OF_EACH_THERE: usize = 30;

/// Texts that have broken something somewhere.
const TEXTS: &[&str] = &[
    "",
    " ",
    "0",
    "-1",
    "1",
    "NaN",
    "null",
    "true",
    "a",
    "order",
    "pay",
    "default",
    "dead",
    "+10m",
    "1h",
    "9999999999999999999999999h",
    "1970-01-01T00:00:00Z",
    "+99999-01-01T00:00:00Z",
    "../../etc/passwd",
    "'; DROP TABLE job; --",
    "<script>alert(1)</script>",
    "%00",
    "\u{0}",
    "\r\nX: y",
    "\u{202e}\u{feff}",
    "ü✓𝕏",
    "{{7*7}}",
    "18446744073709551616",
    "9223372036854775807",
    "vdt_x",
];

struct Maker<'a> {
    rng: Rng,
    document: &'a Value,
}

impl Maker<'_> {
    fn text(&mut self) -> String {
        match self.rng.u8(..20) {
            0 => "x".repeat(self.rng.usize(..5000)),
            1 => (0..self.rng.usize(..40)).map(|_| self.rng.char(..)).collect(),
            _ => TEXTS[self.rng.usize(..TEXTS.len())].to_owned(),
        }
    }

    fn number(&mut self) -> Value {
        match self.rng.u8(..8) {
            0 => json!(u64::MAX),
            1 => json!(i64::MAX),
            2 => json!(i64::MIN),
            3 => json!(-1),
            4 => json!(1.5e308),
            5 => json!(0),
            6 => json!(self.rng.u32(..)),
            _ => json!(self.rng.u8(..10)),
        }
    }

    /// Anything at all.
    fn any(&mut self, depth: u32) -> Value {
        match self.rng.u8(..if depth > 3 { 5 } else { 7 }) {
            0 => Value::Null,
            1 => self.rng.bool().into(),
            2 | 3 => self.number(),
            4 => self.text().into(),
            5 => (0..self.rng.usize(..4)).map(|_| self.any(depth + 1)).collect(),
            _ => {
                let fields = (0..self.rng.usize(..4)).map(|_| (self.text(), self.any(depth + 1)));
                Value::Object(fields.collect::<Map<_, _>>())
            }
        }
    }

    /// Something that fits a schema, mostly.
    fn value(&mut self, schema: &Value, depth: u32) -> Value {
        if self.rng.u8(..12) == 0 {
            return self.any(depth);
        }
        if let Some(at) = schema["$ref"].as_str() {
            let document = self.document;
            let schema = document.pointer(at.trim_start_matches('#')).expect("it is there");
            return self.value(schema, depth);
        }
        if let Some(all) = schema["anyOf"].as_array() {
            let one = self.rng.usize(..all.len());
            return self.value(&all[one], depth);
        }
        if let Some(words) = schema["enum"].as_array() {
            return words[self.rng.usize(..words.len())].clone();
        }
        match schema["type"].as_str() {
            Some("string") => self.text().into(),
            Some("boolean") => self.rng.bool().into(),
            Some("integer" | "number") => self.number(),
            Some("null") => Value::Null,
            Some("array") => {
                let many = self.rng.usize(..4);
                (0..many).map(|_| self.value(&schema["items"], depth + 1)).collect()
            }
            Some("object") => {
                let mut made = Map::new();
                let fields = schema["properties"].as_object().cloned().unwrap_or_default();
                for (name, schema) in &fields {
                    if self.rng.u8(..4) > 0 {
                        made.insert(name.clone(), self.value(schema, depth + 1));
                    }
                }
                if self.rng.u8(..20) == 0 {
                    made.insert(self.text(), self.any(depth));
                }
                // A wait is no hang.
                if made.contains_key("wait_ms") {
                    made.insert("wait_ms".into(), json!(self.rng.u8(..20)));
                }
                Value::Object(made)
            }
            _ => self.any(depth),
        }
    }

    /// A value as part of an address.
    fn part(&mut self, schema: &Value) -> String {
        let text = match self.value(schema, 9) {
            Value::String(text) => text,
            other => other.to_string(),
        };
        escaped(&text)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_made_up_from_the_description_break_nothing() {
    let guarded = Guarded::start().await;
    let (sent, taken) = break_nothing(&guarded, OF_EACH, |_| true).await;
    assert!(sent > 4000 && taken > 600, "{taken} of {sent} were understood");
    guarded.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_made_up_for_jobs_and_workers_break_nothing_on_postgresql() {
    let postgres = testing::postgres::Server::start().await;
    let guarded = Guarded::on_postgresql(&postgres.url()).await;
    let parts = ["jobs", "queues", "workers", "supervisors", "commands", "overview", "stats"];
    let is_there = |path: &str| parts.iter().any(|part| path.split('/').nth(3) == Some(part));
    let (sent, taken) = break_nothing(&guarded, OF_EACH_THERE, is_there).await;
    assert!(sent > 700 && taken > 70, "{taken} of {sent} were understood");
    // What was said of workers is written, whatever it was.
    let beats = guarded.token("beats", Role::Operator);
    for (n, note) in TEXTS.iter().enumerate() {
        let (request, beat) =
            (format!("POST /api/v1/workers/w{n}/beat"), json!({"queues": [], "note": note}));
        let told = guarded.tells(&request, &beats, beat).await;
        assert_eq!(told.status, 200, "{note:?}: {told:?}");
    }
    let fleet = &guarded.server.fleet;
    fleet.close().await;
    let db = Postgres::open(&postgres.url(), &[vedetta_fleet::postgres::SCHEMA]).await.unwrap();
    let written = PostgresRoster::new(db).all().await.unwrap();
    let written: BTreeSet<_> =
        written.workers.into_iter().map(|it| (it.id, it.host, it.note)).collect();
    let known = fleet.list().workers.into_iter().map(|it| (it.id, it.host, it.note)).collect();
    assert!(written.len() >= TEXTS.len());
    assert_eq!(written, known);
    guarded.end().await;
}

/// Sends so many of each operation at these paths. How many, and how many were understood.
async fn break_nothing(guarded: &Guarded, of_each: usize, at: impl Fn(&str) -> bool) -> (u32, u32) {
    let admin = guarded.token("a", Role::Admin);
    let document = guarded.asks("GET /api/v1/openapi.json", &admin).await.json();
    let seed = std::env::var("VEDETTA_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or(20_261_116);
    let mut maker = Maker { rng: Rng::with_seed(seed), document: &document };
    let headers = [("Authorization", admin.as_str()), ("Content-Type", "application/json")];
    let (mut sent, mut taken) = (0, 0);
    let paths = document["paths"].as_object().unwrap();
    for (path, methods) in paths.iter().filter(|(path, _)| at(path)) {
        for (method, operation) in methods.as_object().unwrap() {
            for _ in 0..of_each {
                let (mut target, mut query) = (path.clone(), Vec::new());
                for parameter in operation["parameters"].as_array().into_iter().flatten() {
                    let name = parameter["name"].as_str().unwrap();
                    let value = maker.part(&parameter["schema"]);
                    if parameter["in"] == "path" {
                        target = target.replace(&format!("{{{name}}}"), &value);
                    } else if maker.rng.bool() {
                        query.push(format!("{name}={value}"));
                    }
                }
                let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
                let mut body = String::new();
                if !schema.is_null() {
                    body = maker.value(schema, 0).to_string();
                    if maker.rng.u8(..15) == 0 {
                        let cut = maker.rng.usize(..=body.len());
                        body = body.chars().take(cut).collect();
                    }
                }
                let request = format!("{} {target}?{}", method.to_uppercase(), query.join("&"));
                let got = status(&guarded.server, &request, &headers, &body).await;
                let told = operation["responses"].get(got.to_string()).is_some();
                let usual = [400, 404, 405, 408, 413, 414, 415, 431].contains(&got);
                assert!(
                    got != 500 && (told || usual),
                    "VEDETTA_SEED={seed}: {got} for {request}\n{body}"
                );
                sent += 1;
                taken += u32::from(got < 300);
            }
        }
    }
    let health = tokio::time::timeout(Duration::from_secs(5), guarded.server.get("/readyz"));
    assert_eq!(health.await.expect("it answers").status, 200);
    (sent, taken)
}
