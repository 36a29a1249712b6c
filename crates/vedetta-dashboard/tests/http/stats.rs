//! Numbers over time, and for Prometheus.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};
use vedetta_dashboard::Observed;
use vedetta_db::postgres::Postgres;
use vedetta_jobs::postgres::PostgresJobs;
use vedetta_jobs::{Fate, Jobs as _, NewJob, Wanted};

use crate::support::Server;

async fn alone() -> Server {
    let server = Server::start().await;
    let jobs = Observed::alone(Arc::new(server.jobs.clone()));
    server.serve_as(|api| api.observed(jobs)).await
}

/// Has a job of a queue end so.
async fn work(server: &Server, queue: &str, outcome: &str) {
    server.post("/jobs", json!({"kind": "pack", "queue": queue, "max_attempts": 1})).await;
    let take = json!({"worker": "anna", "capacity": 4, "max": 1});
    let taken = server.post(&format!("/queues/{queue}/take"), take).await;
    let (id, proof) = (&taken["jobs"][0]["id"], &taken["jobs"][0]["token"]);
    let mut end = json!({"token": proof, "outcome": outcome});
    if outcome == "snooze" {
        end["delay_ms"] = json!(60_000);
    }
    server.post(&format!("/jobs/{id}/settle"), end).await;
}

fn sum(points: &Value, name: &str) -> u64 {
    points[name].as_array().unwrap().iter().map(|point| point.as_u64().unwrap_or(0)).sum()
}

#[tokio::test]
async fn what_ends_is_counted_as_it_ends() {
    let server = alone().await;
    for (queue, outcome) in [
        ("a", "done"),
        ("a", "done"),
        ("b", "done"),
        ("b", "failed"),
        ("b", "dead"),
        ("b", "snooze"),
        ("b", "released"),
    ] {
        work(&server, queue, outcome).await;
    }
    let stats = server.get("/api/v1/stats?range=15m&step=10s").await.json();
    assert_eq!(stats["step_ms"], 10_000);
    assert_eq!(stats["all"]["done"].as_array().unwrap().len(), 90);
    assert_eq!((sum(&stats["all"], "done"), sum(&stats["all"], "failed")), (3, 2));
    let b = &stats["queues"]["b"];
    assert_eq!((sum(b, "done"), sum(b, "failed")), (1, 2));
    let ran = stats["all"]["run_p95_ms"].as_array().unwrap().iter().flatten_numbers();
    assert!(!ran.is_empty(), "how long they ran is known");
    let only = server.get("/api/v1/stats?range=15m&queue=a").await.json();
    assert_eq!(sum(&only["all"], "done"), 2);
    assert_eq!(only["queues"].as_object().unwrap().len(), 1);

    let queues = server.get("/api/v1/queues").await.json();
    let b = queues["queues"].as_array().unwrap().iter().find(|queue| queue["name"] == "b").unwrap();
    assert_eq!((&b["done_per_minute"], &b["failed_per_minute"]), (&json!(1), &json!(2)));
    assert_eq!(b["capacity"], 4, "Anna's slots");
    let now = server.get("/api/v1/overview").await.json();
    assert_eq!((&now["jobs"]["done_per_minute"], &now["jobs"]["queues"]), (&json!(3), &json!(2)));
    assert_eq!((&now["jobs"]["dead"], &now["jobs"]["workers"]), (&json!(2), &json!(1)));
    assert_eq!(now["jobs"]["capacity"], 4, "each worker counts once");
    for wrong in ["range=2d", "range=x", "range=1h&step=1ms", "step=2h", "colour=red"] {
        assert_eq!(server.get(&format!("/api/v1/stats?{wrong}")).await.status, 422, "{wrong}");
    }
    server.end().await;
}

#[tokio::test]
async fn while_jobs_cannot_be_read_no_numbers_of_them_are_told() {
    let mut postgres = testing::postgres::Server::start().await;
    let url = postgres.database().await;
    let db = Postgres::open_with(&url, 4, &[vedetta_jobs::postgres::SCHEMA]).await.unwrap();
    let jobs = Arc::new(PostgresJobs::new(db));
    let server = Server::start().await.serve_as(|api| api.jobs(jobs)).await;
    server.post("/jobs", json!({"kind": "pack"})).await;
    assert_eq!(server.get("/api/v1/overview").await.json()["jobs"]["ready"], 1);
    let mut feed = server.feed("/events?topics=stats", "").await;
    let mut told = async |is_it: fn(&Value) -> bool| {
        while !is_it(&feed.event().await.expect("the stream goes on").data) {}
    };
    told(|data| data["jobs"]["ready"] == 1).await;
    postgres.kill();
    let now = server.get("/api/v1/overview").await.json();
    assert!(now.get("jobs").is_none() && now["revision"].is_u64(), "{now}");
    told(|data| data.get("jobs").is_none() && data["revision"].is_u64()).await;
    let page = server.get("/").await.body;
    let ready = page.split("data-stat=\"jobs.ready\"").nth(1).unwrap();
    assert!(ready.split('<').next().unwrap().ends_with(">–"), "{page}");
    postgres.start_again().await;
    told(|data| data["jobs"]["ready"] == 1).await;
    server.end().await;
}

/// What is said of a chart, and the numbers of its table by row.
fn chart(page: &str, title: &str) -> (String, Vec<Vec<String>>) {
    let section = page.split("<section").find(|it| it.contains(&format!("<h2>{title}</h2>")));
    let section = section.unwrap_or_else(|| panic!("no {title} in {page}"));
    let section = section.split("</section>").next().unwrap();
    let until_tag = |text: &str| text.split('<').next().unwrap().to_owned();
    let said = until_tag(section.split("<p class=\"muted\">").nth(1).unwrap());
    let row = |row: &str| -> Vec<String> {
        row.split("<td class=\"number\">").skip(1).map(until_tag).collect()
    };
    (said, section.split("<tr>").map(row).filter(|row| !row.is_empty()).collect())
}

#[tokio::test]
async fn the_page_of_insights_shows_in_tables_what_was_counted() {
    let server = alone().await;
    let mut feed = server.feed("/events?topics=stats", "").await;
    for outcome in ["done", "done", "done", "failed", "dead"] {
        work(&server, "a", outcome).await;
    }
    for _ in 0..4 {
        server.post("/jobs", json!({"kind": "pack", "queue": "b"})).await;
    }
    // How long they waited, how many wait and for how long is looked at every second.
    loop {
        let all = server.get("/api/v1/stats?range=15m").await.json()["all"].clone();
        if ["wait_p50_ms", "ready", "oldest_ms"].iter().all(|name| sum(&all, name) > 0) {
            break;
        }
        feed.event().await.unwrap();
    }
    let page = server.get("/insights?range=15m").await.body;
    let of = |rows: &[Vec<String>], column: usize| -> u64 {
        rows.iter().map(|row| row[column].parse::<u64>().unwrap()).sum()
    };
    let (said, rows) = chart(&page, "Throughput");
    assert!(said.starts_with("3 done and 2 failed since this server started, "), "{said}");
    assert_eq!((rows.len(), of(&rows, 0), of(&rows, 1)), (10, 3, 2));
    for (title, verb) in [("How long jobs ran", "ran"), ("How long jobs waited", "waited")] {
        let (said, rows) = chart(&page, title);
        assert!(said.starts_with(&format!("lately half {verb} up to ")), "{said}");
        let told: Vec<&Vec<String>> = rows.iter().filter(|row| row[0] != "–").collect();
        assert!(!told.is_empty() && told.len() < rows.len(), "{title}: {rows:?}");
        let is_time = |text: &String| text.ends_with('s') && text.starts_with(char::is_numeric);
        assert!(told.iter().all(|row| row.len() == 2 && row.iter().all(is_time)), "{told:?}");
    }
    let (said, rows) = chart(&page, "How many were ready");
    assert_eq!(said, "4 at most");
    let columns = page.split("aria-label=\"How many were ready\"").last().unwrap();
    let columns = columns.split("</thead>").next().unwrap();
    assert!(columns.contains(">a<") && columns.contains(">b<"), "{columns}");
    assert!(rows.iter().any(|row| row[1] == "4"), "{rows:?}");
    let (said, rows) = chart(&page, "Age of the oldest that was ready");
    assert!(said.ends_with(" at most") && !said.starts_with("0ms"), "{said}");
    assert!(rows.iter().any(|row| row[0] != "0ms" && row[0] != "–"), "{rows:?}");

    // Of one queue alone.
    let page = server.get("/insights?range=1h&queue=b").await.body;
    assert!(chart(&page, "Throughput").0.starts_with("0 done and 0 failed"), "{page}");
    assert_eq!(chart(&page, "How many were ready").0, "4 at most");
    server.end().await;
}

trait FlattenNumbers {
    fn flatten_numbers(self) -> Vec<u64>;
}

impl<'a, I: Iterator<Item = &'a Value>> FlattenNumbers for I {
    fn flatten_numbers(self) -> Vec<u64> {
        self.filter_map(Value::as_u64).collect()
    }
}

#[tokio::test]
async fn what_others_settle_is_counted_by_what_is_kept() {
    let server = Server::start().await;
    // Once somebody is greeted the numbers were looked at.
    let mut feed = server.feed("/events?topics=stats", "").await;
    feed.event().await.unwrap();
    server.jobs.enqueue(&[NewJob::new("pack"), NewJob::new("pack")]).await.unwrap();
    let told = async |feed: &mut crate::support::Feed, ready: u64| loop {
        if feed.event().await.unwrap().data["jobs"]["ready"] == ready {
            return;
        }
    };
    told(&mut feed, 2).await;
    let lease = std::time::Duration::from_secs(30);
    let wanted = Wanted { queue: "default", worker: "anna", room: 2, capacity: 2, lease };
    let taken = server.jobs.take(&wanted).await.unwrap().jobs;
    let dead = Fate::Dead { error: "no".into() };
    let ends = [(taken[0].claim, Fate::Done { result: None }), (taken[1].claim, dead)];
    server.jobs.settle(&ends).await.unwrap();
    loop {
        let stats = server.get("/api/v1/stats").await.json();
        if (sum(&stats["all"], "done"), sum(&stats["all"], "failed")) == (1, 1) {
            assert!(sum(&stats["all"], "ready") >= 2, "how much waited was seen");
            break;
        }
        feed.event().await.unwrap();
    }

    // A queue that is new: whatever is over in it ended here, also if nobody looked before.
    server.jobs.enqueue(&[NewJob::new("pack").queue("new")]).await.unwrap();
    let taken = server.jobs.take(&Wanted { queue: "new", ..wanted }).await.unwrap().jobs;
    server.jobs.settle(&[(taken[0].claim, Fate::Done { result: None })]).await.unwrap();
    let counted = async || {
        let stats = server.get("/api/v1/stats").await.json();
        let new = &stats["queues"]["new"];
        new["done"].is_array() && sum(new, "done") == 1
    };
    testing::soon("it is counted", async {
        while !counted().await {
            feed.event().await.unwrap();
        }
    })
    .await;
    server.end().await;
}

/// The lines that Prometheus would read, by name and labels.
fn parsed(text: &str) -> BTreeMap<String, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let parse = |line: &str| {
        let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
        (name.to_owned(), value.parse().unwrap_or_else(|_| panic!("{line}")))
    };
    lines.map(parse).collect()
}

#[tokio::test]
async fn prometheus_reads_what_there_is() {
    let server = alone().await;
    work(&server, "mail", "done").await;
    work(&server, "mail", "failed").await;
    server.post("/jobs", json!({"kind": "pack", "queue": "mail"})).await;
    server.put("a", "1").await;
    server.get("/api/v1/jobs/99").await;
    server.get("/nowhere/at/all").await;
    let answer = server.get("/metrics").await;
    assert!(answer.head.contains("content-type: text/plain; version=0.0.4"), "{}", answer.head);
    let metrics = parsed(&answer.body);
    for (name, value) in [
        (r#"vedetta_jobs{queue="mail",state="ready"}"#, 1.0),
        (r#"vedetta_jobs{queue="mail",state="done"}"#, 1.0),
        (r#"vedetta_jobs{queue="mail",state="dead"}"#, 1.0),
        (r#"vedetta_jobs_done_total{queue="mail"}"#, 1.0),
        (r#"vedetta_jobs_failed_total{queue="mail"}"#, 1.0),
        (r#"vedetta_job_run_seconds_bucket{queue="mail",le="+Inf"}"#, 2.0),
        (r#"vedetta_job_run_seconds_count{queue="mail"}"#, 2.0),
        (r#"vedetta_queue_capacity_slots{queue="mail"}"#, 4.0),
        ("vedetta_store_keys", 1.0),
        ("vedetta_jobs_up", 1.0),
        (
            r#"vedetta_http_requests_total{method="GET",route="/api/v1/jobs/{id}",status="4xx"}"#,
            1.0,
        ),
        (r#"vedetta_http_requests_total{method="GET",route="none",status="4xx"}"#, 1.0),
        (r#"vedetta_http_requests_total{method="POST",route="/api/v1/jobs",status="2xx"}"#, 3.0),
    ] {
        assert_eq!(metrics.get(name), Some(&value), "{name}");
    }
    for name in ["process_resident_memory_bytes", "process_open_fds", "vedetta_store_bytes"] {
        assert!(metrics[name] > 0.0, "{name}");
    }
    let typed = answer.body.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let names: Vec<&str> = typed.filter_map(|line| line.split(' ').next()).collect();
    let families: std::collections::BTreeSet<&str> = names.iter().copied().collect();
    assert_eq!(names.len(), families.len(), "each family once");
    server.end().await;
}
