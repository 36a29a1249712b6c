//! Worker processes, their supervisor, and the commands that steer them: real processes, real servers.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::handler::{SLEEPS, add, alive, are_gone, config, job, sleepers, status};
use crate::support::{Ran, Running, Server, http, run, temp, until, vedetta};

/// Beats often, and two kinds of jobs: one that is over at once, and one that runs until there is a file `go`.
const HANDLERS: &str = "
[bus]
poll = '100ms'
[queue.default]
capacity = 2
[handler.quick]
run = ['sh', '-c', 'cat >/dev/null']
[handler.slow]
run = ['sh', '-c', 'sleep 600 & echo $$ $! >>started; while ! test -e go; do sleep 0.02; done; kill $!']
";

/// The same without anybody who works.
const BARE: &str = "[bus]\npoll = '100ms'\n";

pub(crate) fn supervised(settings: &str) -> String {
    format!("[shutdown]\ngrace = '20s'\n{HANDLERS}\n[supervisor.default]\n{settings}\n")
}

fn ask(server: &Server, args: &[&str]) -> Ran {
    server.command(&["worker"]).args(args).args(["--output", "json"]).output().unwrap().into()
}

fn done(server: &Server, args: &[&str]) -> Value {
    let ran = ask(server, args);
    assert_eq!(ran.code, 0, "{args:?}: {ran:?}");
    ran.json()
}

fn list(server: &Server) -> Value {
    done(server, &["list"])
}

/// Those that have not ended.
pub(crate) fn workers(server: &Server) -> Vec<Value> {
    let all = list(server)["workers"].as_array().cloned().unwrap_or_default();
    all.into_iter().filter(|worker| worker["status"] != "stopped").collect()
}

pub(crate) fn with_status(server: &Server, status: &str) -> Vec<Value> {
    workers(server).into_iter().filter(|worker| worker["status"] == status).collect()
}

pub(crate) fn find(server: &Server, id: &str) -> Value {
    let all = list(server)["workers"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|worker| worker["id"] == id).unwrap_or_default()
}

pub(crate) fn until_running(server: &Server, count: usize) -> Vec<Value> {
    until("the workers", || with_status(server, "running").len() == count);
    with_status(server, "running")
}

pub(crate) fn id(worker: &Value) -> String {
    worker["id"].as_str().unwrap().to_owned()
}

pub(crate) fn pid(worker: &Value) -> String {
    worker["pid"].to_string()
}

fn pids(workers: &[Value]) -> BTreeSet<String> {
    workers.iter().map(pid).collect()
}

fn signal(name: &str, pid: &str) {
    assert!(Command::new("kill").args(["-s", name, pid]).status().unwrap().success());
}

/// The pids of slow jobs that began, and of what they started.
fn started(folder: &Path) -> Vec<String> {
    let text = fs::read_to_string(folder.join("started")).unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}

fn state_of(server: &Server, command: &Value) -> String {
    let id = command["id"].as_str().unwrap();
    let url = format!("{}/api/v1/commands/{id}", server.url);
    let shown: Value = http().get(url).call().unwrap().body_mut().read_json().unwrap();
    shown["state"].as_str().unwrap().to_owned()
}

fn post(server: &Server, path: &str, body: &Value) -> Value {
    let request = http().post(format!("{}/api/v1{path}", server.url));
    request.send_json(body).unwrap().body_mut().read_json().unwrap()
}

/// A worker that nobody supervises, with handlers that the server does not know.
fn by_hand(server: &Server, folder: &Path, args: &[&str]) -> Running {
    fs::write(folder.join("worker.toml"), HANDLERS.replace("100ms", "3s")).unwrap();
    let mut command =
        server.command(&["worker", "run", "--config", "worker.toml", "--queue", "default"]);
    Running::start(command.args(args))
}

/// Worker processes of a server, whoever knows of them.
fn processes_of(url: &str) -> BTreeSet<String> {
    let all = fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let works = |pid: &String| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        words.contains(&&b"worker"[..]) && words.contains(&url.as_bytes()) && alive(pid)
    };
    all.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())).filter(works).collect()
}

fn up_at(folder: &Path, url: &str) -> Server {
    up_with(folder, url.trim_start_matches("http://"), &[])
}

/// Variables that say where jobs and commands are.
pub(crate) type Places<'a> = &'a [(&'a str, &'a str)];

pub(crate) fn up_with(folder: &Path, address: &str, places: Places<'_>) -> Server {
    let mut command = vedetta(folder);
    Server::with(command.args(["up", "--http", address]).envs(places.iter().copied()), folder)
}

pub(crate) const ANY_PORT: &str = "127.0.0.1:0";

/// The same with the commands on a Redis.
pub(crate) async fn over_redis(test: fn(Places<'_>)) {
    let redis = testing::redis::Server::start().await;
    let url = redis.url();
    let run = move || test(&[("VEDETTA_BUS_URL", &url)]);
    tokio::task::spawn_blocking(run).await.unwrap();
}

/// The same with everything but keys on a PostgreSQL.
pub(crate) async fn on_postgresql(test: fn(Places<'_>)) {
    let postgres = testing::postgres::Server::start().await;
    let url = postgres.database().await;
    let run = move || test(&[("VEDETTA_JOBS_URL", &url)]);
    tokio::task::spawn_blocking(run).await.unwrap();
}

#[test]
fn workers_are_started_stopped_paused_resumed_listed_and_terminated() {
    workers_are_steered(&[]);
}

#[tokio::test]
async fn workers_are_started_stopped_paused_resumed_listed_and_terminated_over_redis() {
    over_redis(workers_are_steered).await;
}

#[tokio::test]
async fn workers_are_started_stopped_paused_resumed_listed_and_terminated_on_postgresql() {
    on_postgresql(workers_are_steered).await;
}

fn workers_are_steered(places: Places<'_>) {
    let folder = temp();
    config(folder.path(), &supervised("min = 1\nmax = 3"));
    let server = up_with(folder.path(), ANY_PORT, places);
    let first = id(&until_running(&server, 1)[0]);

    done(&server, &["start", "default", "--wait"]);
    until_running(&server, 2);
    let unknown = ask(&server, &["start", "unheard-of"]);
    assert_eq!(unknown.code, 2, "{unknown:?}");
    assert!(unknown.err.contains("no handler is declared"), "{unknown:?}");
    assert_eq!(ask(&server, &["start", "a b"]).code, 2, "that is no name");
    let many = ask(&server, &["start", "default", "--count", "9"]);
    assert_eq!(many.code, 4, "{many:?}");
    assert!(many.err.contains("raise its max"), "{many:?}");
    let nobody = ask(&server, &["stop", "nobody"]);
    assert!(nobody.code == 3 && nobody.err.contains("vedetta worker list"), "{nobody:?}");

    let all: Vec<String> = workers(&server).iter().map(id).collect();
    for worker in &all {
        assert_eq!(done(&server, &["pause", worker, "--wait"])["state"], "applied");
    }
    assert_eq!(with_status(&server, "paused").len(), 2);
    let waits = add(&server, "quick", "null");
    let again = add(&server, "quick", "null");
    assert_eq!(done(&server, &["resume", &first, "--wait"])["state"], "applied");
    until("the jobs", || status(&server, &waits) == "done" && status(&server, &again) == "done");
    assert_eq!(job(&server, &["show", &waits])["worker"], first.as_str(), "the other is paused");

    let second = all.iter().find(|id| **id != first).unwrap();
    done(&server, &["stop", second, "--wait"]);
    assert_eq!(find(&server, second)["status"], "stopped");
    assert_eq!(until_running(&server, 1).len(), 1, "it was one more than the least");

    let table: Ran = server.command(&["worker", "list"]).output().unwrap().into();
    assert!(table.out.contains("WORKER") && table.out.contains(&first), "{table:?}");
    let process = pid(&find(&server, &first));
    done(&server, &["terminate", "--wait"]);
    assert!(workers(&server).is_empty(), "it waits for their ends");
    until("the end of the process", || !alive(&process));
    let state = |server: &Server| list(server)["supervisors"][0]["report"]["state"].clone();
    assert_eq!(state(&server), "terminated");
    assert_eq!(ask(&server, &["stop", &first]).code, 4, "it has ended");
    done(&server, &["start", "default", "--wait"]);
    until_running(&server, 2);
    assert_eq!(state(&server), "running");
    server.stop();
}

#[test]
fn a_worker_that_beats_once_a_minute_obeys_as_soon_as_it_is_told() {
    commands_are_pushed(&[]);
}

#[tokio::test]
async fn a_worker_that_beats_once_a_minute_obeys_as_soon_as_it_is_told_over_redis() {
    over_redis(commands_are_pushed).await;
}

#[tokio::test]
async fn a_worker_that_beats_once_a_minute_obeys_as_soon_as_it_is_told_on_postgresql() {
    on_postgresql(commands_are_pushed).await;
}

fn commands_are_pushed(places: Places<'_>) {
    let folder = temp();
    config(folder.path(), "[bus]\npoll = '60s'\n");
    let server = up_with(folder.path(), ANY_PORT, places);
    let _worker = by_hand(&server, folder.path(), &["--id", "anna"]);
    until("the worker", || find(&server, "anna")["status"] == "running");
    // Over before the next beat, and before the server looks again: whatever is obeyed was pushed. More than once, as
    // a line that has just been opened tells of what waits.
    for order in ["pause", "resume", "pause", "resume"] {
        let told = done(&server, &[order, "anna", "--wait", "--ttl", "20s"]);
        assert_eq!(told["state"], "applied", "{order}: {told}");
    }
}

/// Answers every request with a command that was handed out, and of which nothing was heard since.
fn answer_as_taken(listener: &TcpListener) {
    for stream in listener.incoming().map_while(Result::ok) {
        let body = json!({"id": "1", "target": "worker:anna", "command": "pause", "state": "taken",
            "created_at": "2026-01-01T00:00:00.000Z", "expires_at": "2026-01-01T00:00:00.100Z"})
        .to_string();
        let mut request = BufReader::new(&stream);
        let mut line = String::new();
        while request.read_line(&mut line).is_ok_and(|_| !line.trim().is_empty()) {
            line.clear();
        }
        let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close";
        let _ = write!(&stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    }
}

#[test]
fn a_command_is_waited_for_until_its_time_is_over_and_not_much_longer() {
    let folder = temp();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || answer_as_taken(&listener));
    let mut pause = vedetta(folder.path());
    pause.args(["worker", "pause", "anna", "--wait", "--server", &url]);
    let mut pause = Running::start(&mut pause);
    assert_eq!(pause.wait().code(), Some(1));
    assert!(pause.complaint().contains("not obeyed: 1 of 1"));
}

#[test]
fn a_worker_process_registers_beats_obeys_between_jobs_and_finishes_its_job_before_it_stops() {
    a_worker_process_works(&[]);
}

#[tokio::test]
async fn a_worker_process_obeys_between_jobs_and_finishes_its_job_before_it_stops_over_redis() {
    over_redis(a_worker_process_works).await;
}

#[tokio::test]
async fn a_worker_process_obeys_between_jobs_and_finishes_its_job_before_it_stops_on_postgresql() {
    on_postgresql(a_worker_process_works).await;
}

fn a_worker_process_works(places: Places<'_>) {
    let folder = temp();
    config(folder.path(), BARE);
    let server = up_with(folder.path(), ANY_PORT, places);
    let mut worker = by_hand(&server, folder.path(), &["--id", "anna"]);
    until("the worker", || find(&server, "anna")["status"] == "running");
    let shown = find(&server, "anna");
    assert_eq!(shown["pid"], worker.child.id());
    assert_eq!(shown["queues"], json!(["default"]));
    assert_eq!(shown["supervisor"], Value::Null);
    assert_eq!(shown["slots"], json!({"used": 0, "capacity": 2}));
    assert!(!shown["host"].as_str().unwrap().is_empty() && shown["version"].is_string());
    until("another beat", || find(&server, "anna")["last_heartbeat"] != shown["last_heartbeat"]);

    // Paused with a job: that goes on, and no other begins.
    let slow = add(&server, "slow", "null");
    until("the job", || find(&server, "anna")["running"] == json!([slow.parse::<u64>().unwrap()]));
    done(&server, &["pause", "anna", "--wait"]);
    let waits = add(&server, "quick", "null");
    assert_eq!(status(&server, &slow), "running");
    assert_eq!(find(&server, "anna")["status"], "paused");

    // Told to stop: the job is finished first.
    done(&server, &["stop", "anna"]);
    until("its answer", || find(&server, "anna")["status"] == "stopping");
    assert_eq!(status(&server, &slow), "running");
    assert!(worker.child.try_wait().unwrap().is_none(), "it waits for its job");
    fs::write(folder.path().join("go"), "").unwrap();
    assert_eq!(worker.wait().code(), Some(0));
    assert_eq!(status(&server, &slow), "done");
    assert_eq!(job(&server, &["show", &slow])["attempts"], 1);
    assert_eq!(status(&server, &waits), "waiting", "it was paused, and then stopped");
    let gone = find(&server, "anna");
    assert_eq!(gone["status"], "stopped");
    assert_eq!(gone["note"], "it was told to stop");

    // SIGTERM is a stop as well.
    let mut worker = by_hand(&server, folder.path(), &["--id", "ben"]);
    until("the job", || status(&server, &waits) == "done");
    worker.signal("TERM");
    assert_eq!(worker.wait().code(), Some(0));
    assert_eq!(find(&server, "ben")["status"], "stopped");
}

#[test]
fn no_process_is_left_when_a_worker_is_killed_or_told_twice_to_stop() {
    for signal in ["TERM", "KILL"] {
        let folder = temp();
        config(folder.path(), BARE);
        let server = Server::start(folder.path());
        fs::write(folder.path().join("worker.toml"), format!("{BARE}{SLEEPS}")).unwrap();
        let command = ["worker", "run", "--config", "worker.toml", "--queue", "default"];
        let mut worker =
            Running::start(&mut server.command(&[&command[..], &["--id", "anna"]].concat()));
        add(&server, "sleep", "null");
        let pids = sleepers(folder.path());
        worker.signal(signal);
        let ended = if signal == "TERM" {
            until("its answer", || find(&server, "anna")["status"] == "stopping");
            assert!(pids.iter().all(|pid| alive(pid)), "it waits for its job");
            worker.insist()
        } else {
            worker.wait()
        };
        assert_ne!(ended.code(), Some(0));
        are_gone(&pids);
    }
}

/// From the end of the one job to the start of the other.
fn rest_between(server: &Server, ids: &[String; 2]) -> Duration {
    let time = |id: &str, name: &str| {
        let shown = job(server, &["show", id]);
        humantime::parse_rfc3339(shown[name].as_str().unwrap()).unwrap()
    };
    let rested = time(&ids[1], "started_at").duration_since(time(&ids[0], "ended_at"));
    rested.unwrap_or_default()
}

#[test]
fn a_worker_keeps_its_limits() {
    let folder = temp();
    config(folder.path(), BARE);
    let server = Server::start(folder.path());
    let mut heavy = by_hand(&server, folder.path(), &["--id", "heavy", "--memory", "1MB"]);
    assert_eq!(heavy.wait().code(), Some(0), "it ends in good order");
    let note = find(&server, "heavy")["note"].clone();
    assert!(note.as_str().unwrap().contains("and may have 1000000"), "{note}");

    // One attempt, of a moment; between jobs a rest, and one at a time.
    let limits = ["--id", "strict", "--tries", "1", "--timeout", "300ms", "--rest", "300ms"];
    let _worker = by_hand(&server, folder.path(), &limits);
    let ids = [add(&server, "slow", "null"), add(&server, "slow", "null")];
    for id in &ids {
        until("its end", || status(&server, id) == "dead");
        let shown = job(&server, &["show", id]);
        assert_eq!((&shown["attempts"], &shown["max_attempts"]), (&json!(1), &json!(5)));
        assert!(shown["error"].as_str().unwrap().contains("300ms"), "{shown}");
    }
    assert!(rest_between(&server, &ids) >= Duration::from_millis(300), "it has its rest");
    until("the end of what they started", || !started(folder.path()).iter().any(|pid| alive(pid)));

    let wrong = run(folder.path(), &["worker", "run", "--queue", "unheard-of"]);
    assert_eq!(wrong.code, 2, "{wrong:?}");
    assert!(wrong.err.contains("no handler is declared"), "{wrong:?}");
}

#[test]
fn workers_keep_the_limits_of_their_supervisor() {
    let folder = temp();
    let limits = "min = 1\nmax = 1\ntries = 1\ntimeout = '300ms'\nrest = '400ms'";
    config(folder.path(), &supervised(limits));
    let server = Server::start(folder.path());
    let ids = [add(&server, "slow", "null"), add(&server, "slow", "null")];
    for id in &ids {
        until("its end", || status(&server, id) == "dead");
        let shown = job(&server, &["show", id]);
        assert_eq!((&shown["attempts"], &shown["max_attempts"]), (&json!(1), &json!(5)));
        assert!(shown["error"].as_str().unwrap().contains("300ms"), "{shown}");
    }
    // Both would run at once, or the second right after the first.
    assert!(rest_between(&server, &ids) >= Duration::from_millis(400));
    server.stop();

    config(folder.path(), &supervised("min = 1\nmax = 1\nmemory = '1MB'"));
    let server = Server::start(folder.path());
    let notes = || list(&server)["workers"].to_string();
    until("one that has too much", || notes().contains("and may have 1000000"));
    server.stop();
}

#[test]
fn a_supervisor_replaces_dead_and_silent_workers_and_their_jobs_are_done_by_others() {
    the_dead_and_the_silent_are_replaced(&[]);
}

#[tokio::test]
async fn a_supervisor_replaces_dead_and_silent_workers_over_redis() {
    over_redis(the_dead_and_the_silent_are_replaced).await;
}

#[tokio::test]
async fn a_supervisor_replaces_dead_and_silent_workers_on_postgresql() {
    on_postgresql(the_dead_and_the_silent_are_replaced).await;
}

fn the_dead_and_the_silent_are_replaced(places: Places<'_>) {
    let folder = temp();
    let settings =
        supervised("min = 2\nmax = 3").replace("capacity = 2", "capacity = 1\nack-wait = '1s'");
    config(folder.path(), &settings);
    let server = up_with(folder.path(), ANY_PORT, places);
    until_running(&server, 2);
    let slow = add(&server, "slow", "null");
    let busy = || {
        workers(&server)
            .into_iter()
            .find(|it| it["running"].as_array().is_some_and(|jobs| !jobs.is_empty()))
    };
    until("the job", || busy().is_some() && started(folder.path()).len() == 2);

    // Killed: nothing of it is left, and there are two again.
    let dead = busy().unwrap();
    signal("KILL", &pid(&dead));
    until("what it started is gone", || !started(folder.path())[..2].iter().any(|pid| alive(pid)));
    until("another", || {
        let now = with_status(&server, "running");
        now.len() == 2 && now.iter().all(|worker| worker["id"] != dead["id"])
    });
    assert_eq!(find(&server, &id(&dead))["note"], "signal 9");
    until("the job at another", || started(folder.path()).len() == 4);

    // Frozen: so is that one.
    until("who has it", || busy().is_some_and(|worker| worker["id"] != dead["id"]));
    let frozen = busy().unwrap();
    signal("STOP", &pid(&frozen));
    until("another", || {
        let now = with_status(&server, "running");
        now.len() == 2 && now.iter().all(|worker| worker["id"] != frozen["id"])
    });
    until("the end of the frozen one", || !alive(&pid(&frozen)));
    until("the job at another", || started(folder.path()).len() == 6);
    fs::write(folder.path().join("go"), "").unwrap();
    until("the job", || status(&server, &slow) == "done");
    let shown = job(&server, &["show", &slow]);
    assert_eq!(shown["attempts"], 3);
    assert_ne!(shown["worker"], frozen["id"]);
    server.stop();
}

#[test]
fn a_worker_that_was_frozen_does_no_harm_when_it_is_thawed() {
    let folder = temp();
    config(folder.path(), &format!("{BARE}[queue.default]\nack-wait = '1s'\n"));
    let server = Server::start(folder.path());
    let handlers = HANDLERS.replace("capacity = 2", "capacity = 1\nack-wait = '1s'");
    fs::write(folder.path().join("short.toml"), handlers).unwrap();
    let hire = |id: &str| {
        let mut command =
            server.command(&["worker", "run", "--config", "short.toml", "--queue", "default"]);
        Running::start(command.args(["--id", id]))
    };
    let mut anna = hire("anna");
    let slow = add(&server, "slow", "null");
    until("the job", || started(folder.path()).len() == 2);
    anna.signal("STOP");
    until("silence", || find(&server, "anna")["status"] == "silent");
    let _ben = hire("ben");
    until("the job at the other", || started(folder.path()).len() == 4);
    anna.signal("CONT");
    // What it has is no longer its: it ends that, and works on.
    until("the end of its run", || !started(folder.path())[..2].iter().any(|pid| alive(pid)));
    until("a sign of life", || find(&server, "anna")["status"] == "running");
    assert_eq!(job(&server, &["show", &slow])["worker"], "ben");
    fs::write(folder.path().join("go"), "").unwrap();
    until("the job", || status(&server, &slow) == "done");
    let shown = job(&server, &["show", &slow]);
    assert_eq!((&shown["worker"], &shown["attempts"]), (&json!("ben"), &json!(2)));
    anna.signal("TERM");
    assert_eq!(anna.wait().code(), Some(0));
}

#[test]
fn workers_that_end_again_and_again_are_shown_as_crash_looping() {
    a_crash_loop_is_shown(&[]);
}

#[tokio::test]
async fn workers_that_end_again_and_again_are_shown_over_redis() {
    over_redis(a_crash_loop_is_shown).await;
}

#[tokio::test]
async fn workers_that_end_again_and_again_are_shown_on_postgresql() {
    on_postgresql(a_crash_loop_is_shown).await;
}

fn a_crash_loop_is_shown(places: Places<'_>) {
    let folder = temp();
    config(folder.path(), &supervised("min = 1\nmax = 1"));
    let server = up_with(folder.path(), ANY_PORT, places);
    until_running(&server, 1);
    // From now on no worker understands the file that it is started with.
    config(folder.path(), "[colors]\n");
    let victim = pid(&until_running(&server, 1)[0]);
    let began = Instant::now();
    signal("KILL", &victim);
    let report = || list(&server)["supervisors"][0]["report"].clone();
    until("the state", || report()["state"] == "crash-looping");
    // Before each of four starts a wait, each twice the last: 200, 400, 800 and 1600 ms, up to a fifth less.
    assert!(began.elapsed() >= Duration::from_millis(2400), "{:?}", began.elapsed());
    assert_eq!(report()["last_exit"], "exit code 2");
    assert!(report()["stderr"].as_str().unwrap().contains("colors"), "{}", report());
    // When the reason is gone, so is that.
    config(folder.path(), &supervised("min = 1\nmax = 1"));
    until_running(&server, 1);
    until("the state", || report()["state"] == "running");
    server.stop();
}

#[test]
fn without_balance_every_worker_takes_every_queue() {
    let folder = temp();
    let settings = supervised("balance = 'simple'\nmin = 2\nmax = 2");
    let settings = settings.replace("capacity = 2", "capacity = 1");
    let slow = HANDLERS.split("[handler.slow]\n").nth(1).unwrap();
    config(
        folder.path(),
        &format!("{settings}[queue.other]\ncapacity = 1\n[handler.late]\nqueue = 'other'\n{slow}"),
    );
    let server = Server::start(folder.path());
    for worker in until_running(&server, 2) {
        assert_eq!(worker["queues"], json!(["default", "other"]), "{worker}");
    }
    // Each has one slot for all its queues: two jobs at once take both workers.
    let go = folder.path().join("go");
    for (kind, pids) in [("slow", 4), ("late", 8)] {
        let pair = [add(&server, kind, "null"), add(&server, kind, "null")];
        until("both run", || started(folder.path()).len() == pids);
        let [one, other] = pair.each_ref().map(|id| job(&server, &["show", id])["worker"].clone());
        assert_ne!(one, other, "{kind}");
        fs::write(&go, "").unwrap();
        until("their ends", || pair.iter().all(|id| status(&server, id) == "done"));
        fs::remove_file(&go).unwrap();
    }
    server.stop();
}

#[test]
fn workers_are_spread_over_queues_by_what_waits_in_them() {
    workers_are_spread(&[]);
}

#[tokio::test]
async fn workers_are_spread_over_queues_over_redis() {
    over_redis(workers_are_spread).await;
}

#[tokio::test]
async fn workers_are_spread_over_queues_on_postgresql() {
    on_postgresql(workers_are_spread).await;
}

fn workers_are_spread(places: Places<'_>) {
    let folder = temp();
    let settings = supervised("balance = 'auto'\nmin = 2\nmax = 5\ncool-down = '100ms'");
    let settings = settings.replace("capacity = 2", "capacity = 1");
    config(
        folder.path(),
        &format!(
            "{settings}[queue.other]\ncapacity = 1\n[handler.mail]\nqueue = 'other'\nrun = ['true']\n"
        ),
    );
    let server = up_with(folder.path(), ANY_PORT, places);
    let of = |queue: &str| {
        let now = with_status(&server, "running");
        now.iter().filter(|worker| worker["queues"] == json!([queue])).count()
    };
    until("one each", || (of("default"), of("other")) == (1, 1));
    for _ in 0..9 {
        add(&server, "slow", "null");
    }
    until("more where more waits", || (of("default"), of("other")) == (4, 1));
    fs::write(folder.path().join("go"), "").unwrap();
    until("the least", || (of("default"), of("other")) == (1, 1));
    server.stop();
}

#[test]
fn a_rolling_restart_replaces_all_workers_one_at_a_time() {
    workers_are_replaced_one_at_a_time(&[]);
}

#[tokio::test]
async fn a_rolling_restart_replaces_all_workers_over_redis() {
    over_redis(workers_are_replaced_one_at_a_time).await;
}

#[tokio::test]
async fn a_rolling_restart_replaces_all_workers_on_postgresql() {
    on_postgresql(workers_are_replaced_one_at_a_time).await;
}

fn workers_are_replaced_one_at_a_time(places: Places<'_>) {
    let folder = temp();
    config(folder.path(), &supervised("min = 2\nmax = 2"));
    let server = up_with(folder.path(), ANY_PORT, places);
    let before = pids(&until_running(&server, 2));
    let mut looks = Vec::new();
    let mut restart = Running::start(&mut server.command(&["worker", "restart", "--wait"]));
    while restart.child.try_wait().unwrap().is_none() {
        let there = workers(&server);
        let running = there.iter().filter(|worker| worker["status"] == "running").count();
        looks.push((running, there.len()));
    }
    assert!(restart.wait().success(), "{}", restart.complaint());
    let now = with_status(&server, "running");
    assert!(now.len() == 2 && pids(&now).is_disjoint(&before), "all are replaced: {now:?}");
    // Never fewer than there should be, and never more than the one that takes the place of another.
    assert!(!looks.is_empty());
    assert!(looks.iter().all(|(running, all)| *running >= 2 && *all <= 3), "{looks:?}");
    until("the end of the old ones", || !before.iter().any(|pid| alive(pid)));
    server.stop();
}

#[test]
fn workers_survive_a_killed_server_and_the_next_adopts_them() {
    workers_survive(&[]);
}

#[tokio::test]
async fn workers_survive_a_killed_server_and_the_next_adopts_them_over_redis() {
    over_redis(workers_survive).await;
}

#[tokio::test]
async fn workers_survive_a_killed_server_and_the_next_adopts_them_on_postgresql() {
    on_postgresql(workers_survive).await;
}

fn workers_survive(places: Places<'_>) {
    let folder = temp();
    config(folder.path(), &supervised("min = 2\nmax = 3"));
    let mut server = up_with(folder.path(), ANY_PORT, places);
    let url = server.url.clone();
    let before = pids(&until_running(&server, 2));
    let slow = add(&server, "slow", "null");
    until("the job", || started(folder.path()).len() == 2);
    server.running.signal("KILL");
    server.running.wait();
    assert!(before.iter().all(|pid| alive(pid)), "they go on");

    let server = up_with(folder.path(), url.trim_start_matches("http://"), places);
    until("all are back", || pids(&with_status(&server, "running")) == before);
    let quick = add(&server, "quick", "null");
    until("a new job", || status(&server, &quick) == "done");
    fs::write(folder.path().join("go"), "").unwrap();
    until("the old job", || status(&server, &slow) == "done");
    assert_eq!(job(&server, &["show", &slow])["attempts"], 1, "it was never lost");
    assert_eq!(pids(&until_running(&server, 2)), before, "and nobody was started beside them");
    server.stop();
    until("the end of all", || !before.iter().any(|pid| alive(pid)));
}

#[test]
fn a_worker_that_was_adopted_is_still_let_in_where_people_sign_in() {
    let folder = temp();
    let made = run(folder.path(), &["token", "add", "me", "--role", "admin"]);
    let token = made.out.trim();
    let settings = format!("[auth]\nenabled = true\n{}", supervised("min = 1\nmax = 1"));
    config(folder.path(), &settings);
    // What is in our environment would be for all of them.
    let ask = |server: &Server, args: &[&str]| -> Value {
        let mut command = server.command(args);
        let ran: Ran =
            command.args(["--output", "json"]).env("VEDETTA_TOKEN", token).output().unwrap().into();
        assert_eq!(ran.code, 0, "{ran:?}");
        ran.json()
    };
    let running = |server: &Server| {
        let all = ask(server, &["worker", "list"])["workers"].as_array().cloned().unwrap();
        pids(&all.into_iter().filter(|it| it["status"] == "running").collect::<Vec<_>>())
    };
    let mut server = Server::start(folder.path());
    let url = server.url.clone();
    until("a worker", || running(&server).len() == 1);
    let before = running(&server);
    // Twice: what was lent to the first is still good in the third.
    for _ in 0..2 {
        server.running.signal("KILL");
        server.running.wait();
        server = up_at(folder.path(), &url);
        until("it is back", || running(&server) == before);
        let done = ask(&server, &["job", "add", "quick", "--payload", "null", "--wait"]);
        assert_eq!(done["jobs"][0]["status"], "done", "{done}");
    }
    server.stop();
    until("its end", || !before.iter().any(|pid| alive(pid)));
}

#[test]
fn workers_whose_supervisor_is_gone_for_good_finish_their_jobs_and_leave_nothing_behind() {
    let folder = temp();
    config(folder.path(), &supervised("min = 2\nmax = 2\ngrace = '500ms'"));
    let mut server = Server::start(folder.path());
    let before = pids(&until_running(&server, 2));
    add(&server, "slow", "null");
    until("the job", || started(folder.path()).len() == 2);
    let busy = list(&server)["workers"]
        .as_array()
        .unwrap()
        .iter()
        .find(|it| it["running"] != json!([]))
        .map(pid);
    server.running.signal("KILL");
    server.running.wait();
    until("the end of the idle one", || before.iter().filter(|pid| alive(pid)).count() == 1);
    if let Some(busy) = busy {
        assert!(alive(&busy), "it has a job");
    }
    fs::write(folder.path().join("go"), "").unwrap();
    until("the end of all", || !before.iter().any(|pid| alive(pid)));
    until("the end of what they started", || !started(folder.path()).iter().any(|pid| alive(pid)));
}

/// A server with its commands on one of the buses, and somebody who obeys.
fn commands_act_once_and_in_time(bus: Option<&str>) {
    let folder = temp();
    config(folder.path(), BARE);
    let mut command = vedetta(folder.path());
    command.args(["up", "--http", "127.0.0.1:0"]);
    if let Some(url) = bus {
        command.env("VEDETTA_BUS_URL", url);
    }
    let server = Server::with(&mut command, folder.path());
    let mut anna = by_hand(&server, folder.path(), &["--id", "anna"]);
    until("the worker", || find(&server, "anna")["status"] == "running");
    for (what, status) in [("pause", "paused"), ("resume", "running"), ("pause", "paused")] {
        let applied = done(&server, &[what, "anna", "--wait"]);
        assert_eq!((&applied["state"], &applied["command"]), (&json!("applied"), &json!(what)));
        until(status, || find(&server, "anna")["status"] == status);
    }

    // While nobody listens: what is over by then is not obeyed, and of the rest the last.
    anna.signal("STOP");
    let late = done(&server, &["stop", "anna", "--ttl", "300ms"]);
    until("its time is over", || state_of(&server, &late) == "expired");
    let pause = done(&server, &["pause", "anna"]);
    let resume = done(&server, &["resume", "anna"]);
    anna.signal("CONT");
    until("the last is obeyed", || state_of(&server, &resume) == "applied");
    assert_eq!(state_of(&server, &pause), "replaced");
    assert_eq!(find(&server, "anna")["status"], "running");
    assert_eq!(state_of(&server, &late), "expired");
    assert!(anna.child.try_wait().unwrap().is_none(), "the stop came too late");
    done(&server, &["stop", "anna", "--wait"]);
    assert_eq!(anna.wait().code(), Some(0));
}

#[test]
fn commands_act_once_and_in_time_over_the_embedded_file() {
    commands_act_once_and_in_time(None);
}

#[tokio::test]
async fn commands_act_once_and_in_time_over_redis() {
    let redis = testing::redis::Server::start().await;
    let url = redis.url();
    tokio::task::spawn_blocking(move || commands_act_once_and_in_time(Some(&url))).await.unwrap();
}

#[tokio::test]
async fn commands_act_once_and_in_time_over_postgresql() {
    let postgres = testing::postgres::Server::start().await;
    let url = postgres.url();
    tokio::task::spawn_blocking(move || commands_act_once_and_in_time(Some(&url))).await.unwrap();
}

#[tokio::test]
async fn workers_go_on_while_the_bus_is_away_and_commands_act_when_it_is_back() {
    let mut redis = testing::redis::Server::start().await;
    let folder = temp();
    config(folder.path(), &supervised("min = 1\nmax = 1\ngrace = '500ms'"));
    let mut command = vedetta(folder.path());
    command.args(["up", "--http", "127.0.0.1:0"]).env("VEDETTA_BUS_URL", redis.url());
    let server = Server::with(&mut command, folder.path());
    let before = until_running(&server, 1);
    redis.kill();
    let quick = add(&server, "quick", "null");
    until("a job", || status(&server, &quick) == "done");
    let refused = ask(&server, &["pause", &id(&before[0])]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(!refused.err.contains(testing::redis::PASSWORD), "{refused:?}");
    redis.start_again().await;
    until("the bus", || ask(&server, &["pause", &id(&before[0]), "--wait"]).code == 0);
    assert_eq!(pids(&workers(&server)), pids(&before), "nobody left meanwhile");
    server.stop();
}

#[test]
fn records_of_workers_and_commands_have_all_their_fields_and_survive_the_server() {
    records_survive(&[]);
}

#[tokio::test]
async fn records_of_workers_and_commands_survive_the_server_over_redis() {
    over_redis(records_survive).await;
}

#[tokio::test]
async fn records_of_workers_and_commands_survive_the_server_on_postgresql() {
    on_postgresql(records_survive).await;
}

fn records_survive(places: Places<'_>) {
    let folder = temp();
    config(folder.path(), &supervised("min = 1\nmax = 2"));
    let mut server = up_with(folder.path(), ANY_PORT, places);
    let url = server.url.clone();
    let worker = until_running(&server, 1).remove(0);
    for field in [
        "id",
        "supervisor",
        "pid",
        "status",
        "started_at",
        "last_heartbeat",
        "created_at",
        "updated_at",
    ] {
        assert!(!worker[field].is_null(), "{field}: {worker}");
    }
    assert_eq!(worker["queues"], json!(["default"]));
    let supervisor = worker["supervisor"].as_str().unwrap();
    assert!(supervisor.starts_with("default:"), "{supervisor}");
    assert!(alive(&pid(&worker)));
    let command = done(&server, &["pause", &id(&worker), "--wait"]);
    assert_eq!(command["target"], format!("worker:{}", id(&worker)));
    for field in ["id", "command", "state", "created_at", "expires_at"] {
        assert!(command[field].is_string(), "{field}: {command}");
    }
    until("its status", || find(&server, &id(&worker))["status"] == "paused");
    server.running.signal("KILL");
    server.running.wait();

    let server = up_with(folder.path(), url.trim_start_matches("http://"), places);
    let again = find(&server, &id(&worker));
    for field in ["supervisor", "queues", "pid", "host", "version", "started_at", "created_at"] {
        assert_eq!(again[field], worker[field], "{field}");
    }
    assert_eq!(again["status"], "paused");
    assert_eq!(state_of(&server, &command), "applied");
    server.stop();
}

#[test]
fn a_worker_in_any_language_is_steered_over_plain_http_without_signals() {
    a_worker_is_steered_over_http(&[]);
}

#[tokio::test]
async fn a_worker_in_any_language_is_steered_over_plain_http_over_redis() {
    over_redis(a_worker_is_steered_over_http).await;
}

#[tokio::test]
async fn a_worker_in_any_language_is_steered_over_plain_http_on_postgresql() {
    on_postgresql(a_worker_is_steered_over_http).await;
}

fn a_worker_is_steered_over_http(places: Places<'_>) {
    let folder = temp();
    config(folder.path(), BARE);
    let server = up_with(folder.path(), ANY_PORT, places);
    let beat = |done: &Value| {
        let beat = json!({"queues": ["default"], "version": "python 3", "done": done});
        post(&server, "/workers/snake/beat", &beat)
    };
    let nothing = json!([]);
    assert_eq!(beat(&nothing), json!({"commands": [], "beat_ms": 100}));
    assert_eq!(find(&server, "snake")["version"], "python 3");
    let asked = done(&server, &["pause", "snake"]);
    assert_eq!(asked["state"], "requested");
    let mut heard = Value::Null;
    until("the command", || {
        heard = beat(&nothing);
        heard["commands"] != nothing
    });
    assert_eq!(heard["commands"][0]["command"], "pause");
    assert_eq!(heard["commands"][0]["id"], asked["id"]);
    assert_eq!(state_of(&server, &asked), "taken");
    assert_eq!(beat(&nothing)["commands"], nothing, "at most once");
    beat(&json!([asked["id"]]));
    assert_eq!(state_of(&server, &asked), "applied");
    http().delete(format!("{}/api/v1/workers/snake", server.url)).call().unwrap();
    assert_eq!(find(&server, "snake")["status"], "stopped");
}

#[test]
fn without_a_supervisor_the_server_works_itself_and_its_workers_can_be_paused() {
    let folder = temp();
    config(folder.path(), HANDLERS);
    let server = Server::start(folder.path());
    let own = until_running(&server, 1).remove(0);
    assert_eq!((&own["inside"], &own["pid"]), (&json!(true), &json!(server.running.child.id())));
    done(&server, &["pause", &id(&own), "--wait"]);
    let waits = add(&server, "quick", "null");
    let refused = ask(&server, &["stop", &id(&own)]);
    assert_eq!(refused.code, 4, "{refused:?}");
    let none = ask(&server, &["start", "default"]);
    assert_eq!(none.code, 4, "{none:?}");
    assert!(none.err.contains("[supervisor.NAME]"), "{none:?}");
    assert_eq!(status(&server, &waits), "waiting");
    done(&server, &["resume", &id(&own), "--wait"]);
    until("the job", || status(&server, &waits) == "done");
    server.stop();
}

#[test]
fn a_supervisor_elsewhere_keeps_workers_for_a_server_and_comes_back_to_them() {
    let folder = temp();
    config(folder.path(), BARE);
    let server = Server::start(folder.path());
    let there = temp();
    config(there.path(), &supervised("min = 2\nmax = 2"));
    let supervise = || {
        let mut command = vedetta(there.path());
        Running::start(command.args(["supervise", "--server", &server.url]))
    };
    let mut first = supervise();
    let before = pids(&until_running(&server, 2));
    first.signal("KILL");
    first.wait();
    let seen = || list(&server)["supervisors"][0]["seen_ms"].as_u64().unwrap();
    until("it is missed", || seen() > 1500);
    let mut second = supervise();
    until("the next is heard", || seen() < 1000);
    let quick = add(&server, "quick", "null");
    until("a job", || status(&server, &quick) == "done");
    assert_eq!(pids(&until_running(&server, 2)), before);
    second.signal("TERM");
    assert_eq!(second.wait().code(), Some(0));
    until("the end of all", || !before.iter().any(|pid| alive(pid)));
    assert!(workers(&server).is_empty());
}

#[test]
fn a_supervisor_that_is_started_again_at_once_comes_to_its_workers_however_short_their_grace_is() {
    let folder = temp();
    // One that is killed counts as there for 7 s, and another of its name has to wait.
    config(folder.path(), &BARE.replace("100ms", "2s"));
    let server = Server::start(folder.path());
    let there = temp();
    config(there.path(), &supervised("min = 2\nmax = 2\ngrace = '5s'"));
    let supervise = || {
        let mut command = vedetta(there.path());
        Running::start(command.args(["supervise", "--server", &server.url]))
    };
    let mut first = supervise();
    let before = pids(&until_running(&server, 2));
    first.signal("KILL");
    first.wait();
    let mut second = supervise();
    let seen = || list(&server)["supervisors"][0]["seen_ms"].as_u64().unwrap();
    until("it is missed for longer than the grace", || seen() > 5500);
    until("the next is heard", || seen() < 2000);
    let (now, running) = (list(&server)["workers"].clone(), with_status(&server, "running"));
    assert_eq!(pids(&running), before, "{now}");
    assert_eq!(now.as_array().unwrap().len(), 2, "{now}");
    second.signal("TERM");
    assert_eq!(second.wait().code(), Some(0));
    until("the end of all", || !before.iter().any(|pid| alive(pid)));
    server.stop();
}

#[test]
fn workers_whose_supervisor_is_gone_while_the_server_lives_finish_their_jobs_and_end() {
    let folder = temp();
    config(folder.path(), BARE);
    let server = Server::start(folder.path());
    let there = temp();
    let settings = supervised("min = 2\nmax = 2\ngrace = '1500ms'");
    config(there.path(), &settings.replace("capacity = 2", "capacity = 1"));
    let mut command = vedetta(there.path());
    let mut supervise = Running::start(command.args(["supervise", "--server", &server.url]));
    let before = until_running(&server, 2);
    let slow = add(&server, "slow", "null");
    until("the job", || started(there.path()).len() == 2);
    let busy = job(&server, &["show", &slow])["worker"].as_str().unwrap().to_owned();
    let idle = before.iter().map(id).find(|id| *id != busy).unwrap();
    supervise.signal("KILL");
    supervise.wait();
    until("the end of the idle one", || find(&server, &idle)["status"] == "stopped");
    assert_eq!(find(&server, &idle)["note"], "its supervisor is gone");
    until("the other", || find(&server, &busy)["status"] == "stopping");
    assert_eq!(find(&server, &busy)["note"], "its supervisor is gone");
    assert_eq!(status(&server, &slow), "running", "it finishes that first");
    fs::write(there.path().join("go"), "").unwrap();
    until("the end of all", || !pids(&before).iter().any(|pid| alive(pid)));
    let shown = job(&server, &["show", &slow]);
    assert_eq!((&shown["status"], &shown["attempts"]), (&json!("done"), &json!(1)));
    until("the end of what they started", || !started(there.path()).iter().any(|pid| alive(pid)));
    server.stop();
}

#[test]
fn a_terminate_holds_when_the_server_is_started_again() {
    a_terminate_holds(&[]);
}

#[tokio::test]
async fn a_terminate_holds_over_redis() {
    over_redis(a_terminate_holds).await;
}

#[tokio::test]
async fn a_terminate_holds_on_postgresql() {
    on_postgresql(a_terminate_holds).await;
}

fn a_terminate_holds(places: Places<'_>) {
    let folder = temp();
    config(folder.path(), &supervised("min = 1\nmax = 1"));
    let server = up_with(folder.path(), ANY_PORT, places);
    let address = server.url.trim_start_matches("http://").to_owned();
    until_running(&server, 1);
    // It is stopped before anybody knows whether it was obeyed.
    let told = done(&server, &["terminate"])["commands"][0].clone();
    let report = |server: &Server| list(server)["supervisors"][0]["report"].clone();
    server.stop();
    // In good order, and not.
    let mut server = up_with(folder.path(), &address, places);
    until("its state", || report(&server)["state"] == "terminated");
    until("it is kept", || state_of(&server, &told) == "applied");
    server.running.signal("KILL");
    server.running.wait();
    let server = up_with(folder.path(), &address, places);
    until("its state", || report(&server)["state"] == "terminated");
    until("the end of all", || workers(&server).is_empty());
    done(&server, &["restart", "--wait"]);
    assert_eq!(with_status(&server, "running").len(), 1, "that starts them");
    server.stop();
    // A server that was stopped was not told anything.
    let server = up_with(folder.path(), &address, places);
    until_running(&server, 1);
    server.stop();
}

#[test]
fn a_terminate_holds_for_a_supervisor_elsewhere() {
    let (folder, there) = (temp(), temp());
    config(folder.path(), BARE);
    config(there.path(), &supervised("min = 1\nmax = 1"));
    let server = Server::start(folder.path());
    let supervise = || {
        let mut command = vedetta(there.path());
        Running::start(command.args(["supervise", "--server", &server.url]))
    };
    let report = || list(&server)["supervisors"][0]["report"].clone();
    let mut first = supervise();
    until_running(&server, 1);
    done(&server, &["terminate", "--wait"]);
    first.signal("TERM");
    assert_eq!(first.wait().code(), Some(0));
    assert!(report().is_null(), "it is gone");
    let mut second = supervise();
    until("its state", || report()["state"] == "terminated");
    assert!(workers(&server).is_empty());
    done(&server, &["restart", "--wait"]);
    assert_eq!(with_status(&server, "running").len(), 1);
    second.signal("TERM");
    assert_eq!(second.wait().code(), Some(0));
    server.stop();
}

#[test]
fn a_restart_does_not_wait_for_supervisors_that_are_gone() {
    let folder = temp();
    config(folder.path(), BARE);
    let server = Server::start(folder.path());
    let supervise = |folder: &Path, name: &str| {
        let settings = supervised("min = 1\nmax = 1\ngrace = '20s'");
        config(folder, &settings.replace("[supervisor.default]", &format!("[supervisor.{name}]")));
        let mut command = vedetta(folder);
        Running::start(command.args(["supervise", "--server", &server.url]))
    };
    let (here, there) = (temp(), temp());
    let mut gone = supervise(there.path(), "gone");
    let lost = pid(&until_running(&server, 1)[0]);
    let mut stays = supervise(here.path(), "stays");
    until_running(&server, 2);
    gone.signal("KILL");
    gone.wait();
    signal("KILL", &lost);
    let missed = || {
        let all = list(&server)["supervisors"].as_array().cloned().unwrap();
        let is_gone =
            |it: &Value| it["name"].as_str().is_some_and(|name| name.starts_with("gone:"));
        all.iter().any(|it| is_gone(it) && it["seen_ms"].as_u64().unwrap() > 1500)
    };
    until("it is missed", missed);
    until("its worker is, too", || with_status(&server, "running").len() == 1);
    let before = pids(&with_status(&server, "running"));
    let mut restart = Running::start(&mut server.command(&["worker", "restart", "--wait"]));
    assert!(restart.wait().success(), "{}", restart.complaint());
    let now = with_status(&server, "running");
    assert!(now.len() == 1 && pids(&now).is_disjoint(&before), "{now:?}");
    stays.signal("TERM");
    assert_eq!(stays.wait().code(), Some(0));
}

#[tokio::test]
async fn workers_are_replaced_and_terminated_from_a_server_that_is_not_theirs() {
    on_postgresql(workers_of_another_server_are_steered).await;
}

fn workers_of_another_server_are_steered(places: Places<'_>) {
    let (folder, elsewhere) = (temp(), temp());
    config(folder.path(), &supervised("min = 1\nmax = 1"));
    config(elsewhere.path(), BARE);
    let server = up_with(folder.path(), ANY_PORT, places);
    let before = pids(&until_running(&server, 1));
    let other = up_with(elsewhere.path(), ANY_PORT, places);
    let replaced = done(&other, &["restart", "--wait"]);
    assert_eq!(replaced["commands"][0]["state"], "applied");
    assert!(pids(&until_running(&server, 1)).is_disjoint(&before), "it is another");
    done(&other, &["terminate", "--wait"]);
    until("the end of all", || workers(&server).is_empty());
    other.stop();
    server.stop();
}

/// Waits for the end of a command while somebody beats who obeys nothing.
fn while_it_beats(server: &Server, worker: &str, beat: &Value, command: &mut Running) -> i32 {
    until("its end", || {
        post(server, &format!("/workers/{worker}/beat"), beat);
        command.child.try_wait().unwrap().is_some()
    });
    command.wait().code().unwrap()
}

#[test]
fn a_stop_that_is_not_obeyed_in_time_is_waited_for_no_longer() {
    let folder = temp();
    config(folder.path(), BARE);
    let server = Server::start(folder.path());
    let beat = json!({"queues": ["default"]});
    post(&server, "/workers/snake/beat", &beat);
    let stop = ["worker", "stop", "snake", "--ttl", "300ms", "--wait"];
    let mut stop = Running::start(&mut server.command(&stop));
    assert_eq!(while_it_beats(&server, "snake", &beat, &mut stop), 1);
    let said = stop.complaint();
    assert!(said.contains("not obeyed"), "{said}");
}

#[test]
fn who_waits_for_a_restart_is_told_that_somebody_had_the_workers_end() {
    let folder = temp();
    config(folder.path(), &supervised("min = 1\nmax = 1"));
    let server = Server::start(folder.path());
    until_running(&server, 1);
    add(&server, "slow", "null");
    until("the job", || started(folder.path()).len() == 2);
    let mut restart = Running::start(&mut server.command(&["worker", "restart", "--wait"]));
    until("one more", || workers(&server).len() == 2);
    done(&server, &["terminate"]);
    assert_eq!(restart.wait().code(), Some(1));
    let said = restart.complaint();
    assert!(said.contains("ends its workers"), "{said}");
    fs::write(folder.path().join("go"), "").unwrap();
    server.stop();
}

#[test]
fn a_terminate_waits_for_workers_that_came_meanwhile_until_somebody_starts_others() {
    let folder = temp();
    config(folder.path(), &supervised("min = 1\nmax = 1"));
    let server = Server::start(folder.path());
    let first = until_running(&server, 1).remove(0);
    add(&server, "slow", "null");
    until("the job", || started(folder.path()).len() == 2);
    let mut terminate = Running::start(&mut server.command(&["worker", "terminate", "--wait"]));
    let state = || list(&server)["supervisors"][0]["report"]["state"].clone();
    until("it is obeyed", || state() == "terminated");
    // It was started just before.
    let beat = json!({"queues": ["default"], "supervisor": first["supervisor"]});
    fs::write(folder.path().join("go"), "").unwrap();
    until("only it is left", || {
        post(&server, "/workers/late/beat", &beat);
        workers(&server).len() == 1
    });
    for _ in 0..10 {
        post(&server, "/workers/late/beat", &beat);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(terminate.child.try_wait().unwrap().is_none(), "it is waited for");
    done(&server, &["restart"]);
    assert_eq!(while_it_beats(&server, "late", &beat, &mut terminate), 1);
    let said = terminate.complaint();
    assert!(said.contains("start workers again"), "{said}");
    http().delete(format!("{}/api/v1/workers/late", server.url)).call().unwrap();
    server.stop();
}

#[test]
#[cfg(target_os = "linux")]
fn who_may_beat_cannot_have_other_processes_killed() {
    let folder = temp();
    config(folder.path(), &supervised("min = 1\nmax = 1"));
    let server = Server::start(folder.path());
    let real = until_running(&server, 1).remove(0);
    let mut bystander = Running::start(Command::new("sleep").arg("600"));
    let birth = |pid: u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let ticks = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().to_owned();
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        format!("{}:{ticks}", boot.trim())
    };
    // Somebody says that these are workers, and that they are silent.
    let targets = [server.running.child.id(), bystander.child.id()];
    for (id, pid) in ["run", "id"].iter().zip(targets) {
        let beat = json!({"queues": ["default"], "pid": pid, "birth": birth(pid),
            "host": real["host"], "supervisor": real["supervisor"]});
        post(&server, &format!("/workers/{id}/beat"), &beat);
    }
    until("their silence", || with_status(&server, "silent").len() == 2);
    // It has looked at them since when it replaces one that is dead. Until they were silent they counted as its
    // own, so it may have ended the real one as one too many.
    let one = until_running(&server, 1).remove(0);
    signal("KILL", &pid(&one));
    until("another", || {
        let now = with_status(&server, "running");
        now.len() == 1 && now[0]["id"] != one["id"]
    });
    assert!(bystander.child.try_wait().unwrap().is_none(), "it lives");
    assert!(list(&server)["workers"][0]["birth"].is_null(), "nor does everybody learn of it");
    server.stop();
}

#[test]
fn what_cannot_be_supervised_is_refused() {
    let folder = temp();
    let nats = "[queue.film]\nnats = { stream = 'S', subject = 's', durable = 'd' }\n[handler.film]\nrun = ['true']\nqueue = 'film'";
    for (text, why) in [
        (
            "[supervisor.a]\nqueues = ['mail']",
            "supervisor.a.queues: no handler is declared for the queue \"mail\"",
        ),
        ("[supervisor.a]\nmin = 3\nmax = 2", "supervisor.a.min is 3 and its max is 2"),
        ("[supervisor.a]\nmax = 0", "nonzero"),
        ("[supervisor.a]\nbalance = 'fair'", "fair"),
        ("[bus]\nurl = 'amqp://me:secret@host'", "bus.url begins with \"amqp\""),
        ("[bus]\npoll = '0s'", "above zero"),
        (
            &format!(
                "{nats}\n[jobs]\nurl = 'nats://127.0.0.1:1'\n[supervisor.a]\nqueues = ['film']"
            ),
            "is a stream of NATS",
        ),
    ] {
        config(folder.path(), text);
        let ran = run(folder.path(), &["up", "--http", "127.0.0.1:0"]);
        assert_eq!(ran.code, 2, "{text}: {ran:?}");
        assert!(ran.err.contains(why), "{text}: {}", ran.err);
        assert!(!ran.err.contains("secret"), "{}", ran.err);
    }
    config(folder.path(), HANDLERS);
    let ran = run(folder.path(), &["supervise"]);
    assert_eq!(ran.code, 2, "{ran:?}");
}

#[test]
fn a_fleet_returns_to_its_size_after_faults_of_all_kinds_and_no_job_is_lost() {
    let folder = temp();
    let settings =
        supervised("min = 3\nmax = 3").replace("capacity = 2", "capacity = 2\nack-wait = '1s'");
    let settings = settings.replace("'cat >/dev/null'", "'cat >/dev/null; sleep 0.05'");
    config(folder.path(), &settings);
    let mut server = Server::start(folder.path());
    let url = server.url.clone();
    until_running(&server, 3);
    let mut jobs = Vec::new();
    let began = Instant::now();
    let mut round = 0_usize;
    while began.elapsed() < Duration::from_secs(8) {
        jobs.extend((0..5).map(|_| add(&server, "quick", "null")));
        let there = workers(&server);
        let victim = there.get(round % there.len().max(1)).filter(|worker| alive(&pid(worker)));
        match (round % 4, victim) {
            (0 | 2, Some(worker)) => signal("KILL", &pid(worker)),
            (1, Some(worker)) => signal("STOP", &pid(worker)),
            (3, _) => {
                server.running.signal("KILL");
                server.running.wait();
                server = up_at(folder.path(), &url);
            }
            _ => {}
        }
        round += 1;
    }
    for id in &jobs {
        until("a job", || status(&server, id) == "done");
    }
    until("three, and none is left beside them", || {
        pids(&with_status(&server, "running")) == processes_of(&url)
            && processes_of(&url).len() == 3
    });
    server.stop();
    until("none is left at all", || processes_of(&url).is_empty());
}
