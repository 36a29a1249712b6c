//! Traces and numbers, sent to a collector by real processes.

use std::collections::BTreeSet;
use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use testing::collector::{Collector, Data, Metric, SpanKind, Told, find, number_data_point};

use crate::support::{Running, Server, http, run, temp, until, vedetta};

/// It fails the first time, and says what it was given.
const FLAKY: &str = "
[handler.flaky]
run = ['sh', '-c', 'echo $TRACEPARENT >>traces; cat >&2; test $VEDETTA_ATTEMPT = 2']
";

const CALLER: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

fn named<'t>(all: &'t [Told], name: &str) -> Vec<&'t Told> {
    let mut named: Vec<_> = all.iter().filter(|told| told.span.name == name).collect();
    named.sort_by_key(|told| told.span.start_time_unix_nano);
    named
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn metrics_of(server: &Server) -> String {
    let mut answer = http().get(format!("{}/metrics", server.url)).call().unwrap();
    answer.body_mut().read_to_string().unwrap()
}

/// A counter of a queue.
fn count(metrics: &[Metric], name: &str, queue: &str) -> Option<i64> {
    let metric = metrics.iter().find(|metric| metric.name == name)?;
    let Some(Data::Sum(sum)) = &metric.data else { return None };
    let mut points = sum.data_points.iter();
    let of_it = points.find(|point| find(&point.attributes, "queue").as_deref() == Some(queue))?;
    match of_it.value {
        Some(number_data_point::Value::AsInt(number)) => Some(number),
        _ => None,
    }
}

#[test]
fn a_job_is_one_trace_from_enqueue_to_settle_over_two_processes_and_numbers_are_those_of_metrics() {
    let (folder, collector) = (temp(), Collector::default());
    let otlp = format!("[telemetry]\notlp = '{}'\n[bus]\npoll = '100ms'\n", collector.url());
    fs::write(folder.path().join("vedetta.toml"), otlp).unwrap();
    fs::write(folder.path().join("worker.toml"), FLAKY).unwrap();
    let server = Server::start(folder.path());
    let mut worker = server.command(&["worker", "run", "--config", "worker.toml"]);
    worker.args(["--queue", "default", "--id", "elsewhere"]);
    // The other way to say it.
    let mut worker =
        Running::start(worker.env("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url() + "/"));
    let request = http().post(format!("{}/api/v1/jobs", server.url)).header("traceparent", CALLER);
    let job = json!({ "kind": "flaky", "payload": "a secret" });
    let added: Value = request.send_json(job).unwrap().body_mut().read_json().unwrap();
    let id = added["id"].to_string();
    until("the whole trace", || named(&collector.spans(), "settle flaky").len() == 2);

    let all = collector.spans();
    let trace = &CALLER[3..35];
    assert!(all.iter().all(|told| hex(&told.span.trace_id) == trace), "{all:?}");
    let [enqueue] = named(&all, "enqueue flaky")[..] else { panic!("{all:?}") };
    assert_eq!(hex(&enqueue.span.parent_span_id), &CALLER[36..52]);
    assert_eq!(enqueue.span.kind(), SpanKind::Producer);
    let (waits, attempts) = (named(&all, "wait flaky"), named(&all, "attempt flaky"));
    let settles = named(&all, "settle flaky");
    assert_eq!((waits.len(), attempts.len(), all.len()), (2, 2, 7));
    for told in waits.iter().chain(&attempts) {
        assert_eq!(told.span.parent_span_id, enqueue.span.span_id);
        assert_eq!(told.label("messaging.message.id"), Some(id.clone()));
    }
    for ((wait, attempt), settle) in waits.iter().zip(&attempts).zip(&settles) {
        assert_eq!(settle.span.parent_span_id, attempt.span.span_id);
        assert!(wait.span.end_time_unix_nano <= attempt.span.end_time_unix_nano);
        assert!(attempt.span.end_time_unix_nano <= settle.span.end_time_unix_nano);
    }
    let outcomes = settles.iter().map(|told| told.label("vedetta.job.outcome").unwrap());
    assert_eq!(outcomes.collect::<Vec<_>>(), ["again", "done"]);
    assert!(settles[0].label("vedetta.job.retry_ms").is_some(), "it says when it is tried again");
    let failed: Vec<_> = attempts.iter().map(|told| told.label("error.type")).collect();
    assert_eq!(failed, [Some("error".into()), None]);
    assert!(attempts.iter().chain(&settles).all(|told| told.by == "elsewhere"));
    assert_ne!(enqueue.by, "elsewhere");
    assert!(!format!("{all:?}").contains("secret"), "a payload is told to nobody");
    let heard = fs::read_to_string(folder.path().join("traces")).unwrap();
    let places = attempts.iter().map(|told| format!("00-{trace}-{}-01\n", hex(&told.span.span_id)));
    assert_eq!(heard, places.collect::<String>(), "the command is told its own place");
    let shown = server.command(&["job", "show", &id, "--output", "json"]).output().unwrap();
    let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
    let place = format!("00-{trace}-{}-01", hex(&enqueue.span.span_id));
    assert_eq!(shown["traceparent"], place);

    until("the numbers of the end", || {
        metrics_of(&server).contains("_failed_total{queue=\"default\"} 1")
    });
    worker.signal("TERM");
    assert_eq!(worker.wait().code(), Some(0));
    let page = metrics_of(&server);
    let shown_there: BTreeSet<&str> =
        page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    // At the end all is sent, long before it would be time to.
    server.stop();
    let by = collector.tellers().pop().expect("it told numbers");
    let metrics = collector.metrics(&by).unwrap();
    let told: BTreeSet<&str> = metrics.iter().map(|metric| metric.name.as_str()).collect();
    assert_eq!(told, shown_there);
    assert_eq!(count(&metrics, "vedetta_jobs_done_total", "default"), Some(1));
    assert_eq!(count(&metrics, "vedetta_jobs_failed_total", "default"), Some(1));
    assert!(shown_there.contains("vedetta_telemetry_dropped_spans_total"));
}

/// Hangs up on whoever calls, and counts them.
fn hang_up() -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let (address, calls) = (listener.local_addr().unwrap(), Arc::<AtomicUsize>::default());
    let count = Arc::clone(&calls);
    std::thread::spawn(move || {
        for line in listener.incoming() {
            drop(line);
            count.fetch_add(1, Ordering::Relaxed);
        }
    });
    (address, calls)
}

#[test]
fn with_nobody_to_send_to_work_goes_on_and_that_is_said_once() {
    let folder = temp();
    let (address, tries) = hang_up();
    let away = format!("http://user:secret@{address}");
    let handler = FLAKY.replace("test $VEDETTA_ATTEMPT = 2", "true");
    fs::write(folder.path().join("vedetta.toml"), handler).unwrap();
    let mut command = vedetta(folder.path());
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", &away).env("OTEL_METRIC_EXPORT_INTERVAL", "100");
    let mut server = Server::with(command.args(["up", "--http", "127.0.0.1:0"]), folder.path());
    for _ in 0..3 {
        let mut add = server.command(&["job", "add", "flaky", "--wait"]);
        let added = add.env("TRACEPARENT", CALLER).output().unwrap();
        assert!(added.status.success(), "{added:?}");
    }
    let traces = fs::read_to_string(folder.path().join("traces")).unwrap();
    assert!(
        traces.lines().count() == 3 && traces.lines().all(|line| line.starts_with(&CALLER[..35]))
    );
    let before = tries.load(Ordering::Relaxed);
    until("some tries", || tries.load(Ordering::Relaxed) >= before + 3);
    assert!(metrics_of(&server).contains("vedetta_telemetry_dropped_spans_total 0"));
    let doctor =
        vedetta(folder.path()).env("OTEL_EXPORTER_OTLP_ENDPOINT", &away).arg("doctor").output();
    let doctor = String::from_utf8(doctor.unwrap().stdout).unwrap();
    let line = doctor.lines().find(|line| line.starts_with("telemetry")).expect("it is checked");
    assert!(line.contains("note") && line.contains("does not take them"), "{line}");
    server.running.signal("TERM");
    assert_eq!(server.running.wait().code(), Some(0));
    let said = server.running.complaint();
    assert_eq!(said.matches("telemetry cannot be sent").count(), 1, "{said}");
    assert!(!said.contains("secret") && !doctor.contains("secret"), "{said}");
}

#[test]
fn it_is_off_by_default_and_an_address_that_is_none_is_refused() {
    let folder = temp();
    let server = Server::start(folder.path());
    assert!(!metrics_of(&server).contains("telemetry"));
    server.stop();
    fs::write(folder.path().join("vedetta.toml"), "[telemetry]\notlp = 'nowhere'").unwrap();
    let ran = run(folder.path(), &["up"]);
    assert_eq!(ran.code, 2, "{ran:?}");
    assert!(ran.err.contains("telemetry.otlp is not an address"), "{ran:?}");
}
