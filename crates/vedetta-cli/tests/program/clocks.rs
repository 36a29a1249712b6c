//! Clocks that are set while the program runs, and between two runs of it: by libfaketime, which changes what the wall
//! clock says, and leaves the others alone.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};

use crate::handler::{add, alive, config, status};
use crate::support::{Running, Server, http, temp, until, vedetta};

const SETTINGS: &str = "
[bus]
poll = '100ms'
[handler.quick]
run = ['sh', '-c', 'cat >/dev/null']
[supervisor.default]
min = 2
max = 2
";

const HOUR: i64 = 3600;

/// Runs a command with the clock that a file says.
fn with_clock<'c>(command: &'c mut Command, clock: &Path) -> &'c mut Command {
    let folders = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib"];
    let library = folders.map(|folder| Path::new(folder).join("faketime/libfaketimeMT.so.1"));
    let library = library.into_iter().find(|file| file.is_file());
    let library = library.expect("clocks cannot be set: apt-get install libfaketime");
    command
        .env("LD_PRELOAD", library)
        .env("FAKETIME_TIMESTAMP_FILE", clock)
        .env("FAKETIME_NO_CACHE", "1")
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        .env("DONT_FAKE_MONOTONIC", "1")
}

fn set(clock: &Path, seconds: i64) {
    // Whoever looks sees the old file or the new one.
    let next = clock.with_extension("next");
    fs::write(&next, format!("{seconds:+}")).unwrap();
    fs::rename(next, clock).unwrap();
}

fn up(folder: &Path, clock: &Path, at: &str) -> Server {
    let mut command = vedetta(folder);
    Server::with(with_clock(command.args(["up", "--http", at]), clock), folder)
}

/// By how much the server's clock is off, to the nearest minute.
fn off(server: &Server) -> i64 {
    let now = server.overview()["now"].as_str().unwrap().to_owned();
    let now = humantime::parse_rfc3339_weak(&now).unwrap();
    let seconds = match now.duration_since(SystemTime::now()) {
        Ok(ahead) => i64::try_from(ahead.as_secs()).unwrap(),
        Err(behind) => -i64::try_from(behind.duration().as_secs()).unwrap(),
    };
    (seconds + seconds.signum() * 30) / 60 * 60
}

fn pids(server: &Server) -> Vec<u64> {
    let mut answer = http().get(format!("{}/api/v1/workers", server.url)).call().unwrap();
    let all: Value = answer.body_mut().read_json().unwrap();
    let all = all["workers"].as_array().cloned().unwrap_or_default();
    let there = all.iter().filter(|it| it["status"] == "running" && !it["supervisor"].is_null());
    there.filter_map(|worker| worker["pid"].as_u64()).collect()
}

fn post(server: &Server, path: &str, body: &Value) -> Value {
    let request = http().post(format!("{}/api/v1{path}", server.url));
    request.send_json(body).unwrap().body_mut().read_json().unwrap()
}

#[test]
fn a_clock_that_is_set_while_it_runs_changes_nothing_for_jobs_and_workers() {
    let folder = temp();
    let (clock, other) = (folder.path().join("clock"), folder.path().join("other"));
    config(folder.path(), SETTINGS);
    set(&clock, 0);
    set(&other, 0);
    let server = up(folder.path(), &clock, "127.0.0.1:0");
    until("the workers", || pids(&server).len() == 2);
    let before = pids(&server);
    // One that nobody supervises, whose clock goes the other way.
    let mut guest = server.command(&["worker", "run", "--queue", "default", "--id", "guest"]);
    let mut guest = Running::start(with_clock(&mut guest, &other));
    for seconds in [HOUR, -HOUR, 0] {
        set(&clock, seconds);
        set(&other, -seconds);
        until("the new time", || off(&server) == seconds);
        let jobs: Vec<String> = (0..5).map(|_| add(&server, "quick", "null")).collect();
        until("the jobs", || jobs.iter().all(|id| status(&server, id) == "done"));
        let paused = server.command(&["worker", "pause", "guest", "--wait"]).output().unwrap();
        assert!(paused.status.success(), "{paused:?}");
        let resumed = server.command(&["worker", "resume", "guest", "--wait"]).output().unwrap();
        assert!(resumed.status.success(), "{resumed:?}");
        assert_eq!(pids(&server), before, "nobody was thought dead");
    }
    guest.signal("TERM");
    assert!(guest.wait().success());
    server.stop();
}

#[test]
fn a_clock_that_was_set_back_between_two_runs_holds_no_job_up_and_brings_no_command_back() {
    const TTL: Duration = Duration::from_secs(1);
    let folder = temp();
    let clock = folder.path().join("clock");
    config(folder.path(), SETTINGS);
    set(&clock, 0);
    let mut server = up(folder.path(), &clock, "127.0.0.1:0");
    let url = server.url.clone();
    until("the workers", || pids(&server).len() == 2);
    let beat = json!({"queues": ["elsewhere"], "host": "here"});
    post(&server, "/workers/witness/beat", &beat);
    let path = format!("/workers/witness/pause?ttl_ms={}", TTL.as_millis());
    let command = post(&server, &path, &Value::Null);
    let asked = Instant::now();
    assert!(server.command(&["queue", "pause", "default"]).status().unwrap().success());
    let waits = add(&server, "quick", "null");
    server.running.signal("KILL");
    server.running.wait();

    set(&clock, -HOUR);
    let server = up(folder.path(), &clock, url.trim_start_matches("http://"));
    assert_eq!(off(&server), -HOUR);
    assert!(server.command(&["queue", "resume", "default"]).status().unwrap().success());
    until("the job, which is an hour ahead", || status(&server, &waits) == "done");
    until("the end of the command's time", || asked.elapsed() > TTL);
    assert_eq!(post(&server, "/workers/witness/beat", &beat)["commands"], json!([]));
    let url = format!("{}/api/v1/commands/{}", server.url, command["id"].as_str().unwrap());
    let shown: Value = http().get(url).call().unwrap().body_mut().read_json().unwrap();
    assert_eq!(shown["state"], "expired", "{shown}");
    until("the workers", || pids(&server).len() == 2);
    server.stop();
}

#[test]
fn a_clock_that_was_set_forward_between_two_runs_leaves_no_process_behind() {
    let folder = temp();
    let clock = folder.path().join("clock");
    config(folder.path(), SETTINGS);
    set(&clock, 0);
    let mut server = up(folder.path(), &clock, "127.0.0.1:0");
    let url = server.url.clone();
    until("the workers", || pids(&server).len() == 2);
    let frozen = pids(&server)[0].to_string();
    assert!(Command::new("kill").args(["-s", "STOP", &frozen]).status().unwrap().success());
    server.running.signal("KILL");
    server.running.wait();

    set(&clock, HOUR);
    let server = up(folder.path(), &clock, url.trim_start_matches("http://"));
    assert_eq!(off(&server), HOUR);
    until("the end of the frozen one", || !alive(&frozen));
    until("another in its place", || pids(&server).len() == 2);
    server.stop();
}
