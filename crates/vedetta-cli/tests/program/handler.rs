//! `[handler.KIND]`, `[queue.NAME]` and `[periodic.NAME]` in the config file.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::support::{Ran, Server, http, run, temp, until, vedetta};

pub(crate) fn config(folder: &Path, text: &str) {
    fs::write(folder.join("vedetta.toml"), text).unwrap();
}

pub(crate) fn job(server: &Server, args: &[&str]) -> Value {
    let ran: Ran =
        server.command(&["job"]).args(args).args(["--output", "json"]).output().unwrap().into();
    assert_eq!(ran.code, 0, "{ran:?}");
    ran.json()
}

pub(crate) fn add(server: &Server, kind: &str, payload: &str) -> String {
    let added = job(server, &["add", kind, "--payload", payload]);
    added["id"].as_u64().unwrap_or_else(|| panic!("{added}")).to_string()
}

pub(crate) fn status(server: &Server, id: &str) -> String {
    job(server, &["show", id])["status"].as_str().unwrap_or_default().to_owned()
}

/// Whether a process has not ended; one that nobody asked how it ended has.
pub(crate) fn alive(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

/// Sleeps, with a child that sleeps beside it, and says who they are.
const SLEEPS: &str = "[shutdown]\ngrace = '0s'\n[queue.default]\nack-wait = '1s'\n[handler.sleep]\ntimeout = '1h'\n\
    run = ['sh', '-c', 'sleep 600 & echo $$ $! >pids; wait']\n";

fn sleepers(folder: &Path) -> Vec<String> {
    let file = folder.join("pids");
    let read = || fs::read_to_string(&file).unwrap_or_default();
    until("the command", || read().ends_with('\n'));
    let pids: Vec<String> = read().split_whitespace().map(str::to_owned).collect();
    fs::remove_file(file).unwrap();
    assert!(pids.len() == 2 && pids.iter().all(|pid| alive(pid)), "{pids:?}");
    pids
}

fn are_gone(pids: &[String]) {
    until("the end of the command and its child", || !pids.iter().any(|pid| alive(pid)));
}

#[test]
fn a_declared_command_does_the_jobs_of_its_kind() {
    let folder = temp();
    config(
        folder.path(),
        r#"
        [queue.media]
        capacity = 3
        [handler.thumbnail]
        run = ["sh", "-c", "echo \"slots $VEDETTA_SLOTS\" >&2; echo '{\"result\": '$(cat)'}'"]
        queue = "media"
        cost-from = "size"
        [handler.thumbnail.costs]
        small = 1
        large = 9
        [periodic.again]
        kind = "thumbnail"
        payload = { size = "small" }
        every = "1s"
        "#,
    );
    let server = Server::start(folder.path());
    let id = add(&server, "thumbnail", r#"{"size":"large"}"#);
    until("the job", || status(&server, &id) == "done");
    let shown = job(&server, &["show", &id]);
    assert_eq!(shown["queue"], "media");
    assert_eq!(shown["cost"], 9);
    assert_eq!(shown["result"]["size"], "large");
    assert_eq!(shown["log"], "slots 3\n", "as many as there are");
    let periodic = || {
        let listed = job(&server, &["list", "--status", "done"]);
        let jobs = listed["jobs"].as_array().map_or(0, Vec::len);
        jobs > 2
    };
    until("two ticks", periodic);
}

#[test]
fn no_process_is_left_when_a_job_is_called_off_or_takes_too_long() {
    let folder = temp();
    config(folder.path(), SLEEPS);
    let server = Server::start(folder.path());
    let id = add(&server, "sleep", "null");
    let pids = sleepers(folder.path());
    job(&server, &["cancel", &id]);
    are_gone(&pids);
    assert_eq!(status(&server, &id), "cancelled");

    let added = job(&server, &["add", "sleep", "--timeout", "1s", "--max-attempts", "1"]);
    let pids = sleepers(folder.path());
    are_gone(&pids);
    let id = added["id"].to_string();
    until("its end", || status(&server, &id) == "dead");
}

#[test]
fn no_process_is_left_when_the_server_ends_and_the_job_is_done_by_the_next() {
    for signal in ["TERM", "KILL"] {
        let folder = temp();
        config(folder.path(), SLEEPS);
        let mut server = Server::start(folder.path());
        let id = add(&server, "sleep", "null");
        let pids = sleepers(folder.path());
        server.running.signal(signal);
        server.running.wait();
        are_gone(&pids);

        config(
            folder.path(),
            "[queue.default]\nack-wait = '1s'\n[handler.sleep]\nrun = ['true']\n",
        );
        let server = Server::start(folder.path());
        until("another run", || status(&server, &id) == "done");
    }
}

#[test]
fn what_cannot_be_declared_is_refused() {
    let folder = temp();
    for (text, why) in [
        ("[handler.a]\nrun = []", "names no program"),
        ("[handler.a]\nrun = ['x']\ncost = 1\ncost-from = 'size'", "both cost and cost-from"),
        ("[handler.a]\nrun = ['x']\ncost-from = 'size'", "[handler.a.costs]"),
        ("[queue.a]\nack-wait = '10s'\nheartbeat = '5s'", "more than a third"),
        ("[queue.a]\nfetch-batch = 5", "for streams"),
        ("[queue.a]\ncapacity = 0", "capacity"),
        ("[queue.'a b']", "is no name"),
        ("[periodic.a]\nkind = 'x'", "one of every and cron"),
        ("[periodic.a]\nkind = 'x'\ncron = 'soon'", "no cron pattern"),
        ("[jobs]\nurl = 'nats://127.0.0.1:1'", "queue.NAME.nats"),
        ("[queue.a]\nnats = { stream = 'S', subject = 's', durable = 'd' }", "jobs.url is no nats"),
    ] {
        config(folder.path(), text);
        let ran = run(folder.path(), &["up", "--http", "127.0.0.1:0"]);
        assert_eq!(ran.code, 2, "{text}: {ran:?}");
        assert!(ran.err.contains(why), "{text}: {}", ran.err);
    }
}

#[tokio::test]
async fn a_queue_can_be_a_stream_and_its_jobs_are_recorded() {
    let nats = testing::nats::Server::start().await;
    let folder = temp();
    config(
        folder.path(),
        r#"
        [queue.media]
        capacity = 4
        ack-wait = "3s"
        heartbeat = "1s"
        fetch-batch = 5
        fetch-timeout = "1s"
        nats = { stream = "MEDIA", subject = "media.events", durable = "worker" }
        [handler.film]
        run = ["sh", "-c", "echo working >&2; echo '{\"result\": '$(cat)'}'"]
        queue = "media"
        "#,
    );
    let mut command = vedetta(folder.path());
    command.args(["up", "--http", "127.0.0.1:0"]).env("VEDETTA_JOBS_URL", nats.url());
    let server = Server::with(&mut command, folder.path());
    let client = async_nats::connect(nats.url()).await.unwrap();
    client.publish("media.events", r#"{"file":"a.mp4"}"#.into()).await.unwrap();
    client.flush().await.unwrap();
    let listed = || job(&server, &["list", "--queue", "media", "--status", "done"]);
    until("its record", || listed()["jobs"].as_array().is_some_and(|jobs| jobs.len() == 1));
    let id = listed()["jobs"][0]["id"].to_string();
    let shown = job(&server, &["show", &id]);
    assert_eq!(shown["kind"], "film");
    assert_eq!(shown["result"]["file"], "a.mp4");
    assert_eq!(shown["attempts"], 1);
    assert!(shown["connection"].as_str().unwrap().starts_with("nats"), "{shown}");
    assert!(shown["started_at"].is_string() && shown["ended_at"].is_string(), "{shown}");
    // It is on the pages as any other.
    for (page, shown) in [("/queues", "media"), ("/jobs", "film")] {
        let mut answer = http().get(format!("{}{page}", server.url)).call().unwrap();
        let text = answer.body_mut().read_to_string().unwrap();
        let main = text.split("<main").nth(1).unwrap();
        assert!(main.contains(shown), "{page} lacks {shown}: {main}");
    }
    let refused: Ran = server.command(&["job", "add", "film"]).output().unwrap().into();
    assert_eq!(refused.code, 2, "{refused:?}");
    assert!(refused.err.contains("publish to media.events"), "{refused:?}");
}

#[test]
fn what_is_over_is_gone_when_its_time_of_the_file_is() {
    what_is_over_is_gone("");
}

#[tokio::test]
async fn what_is_over_is_gone_when_its_time_of_the_file_is_on_postgresql() {
    let postgres = testing::postgres::Server::start().await;
    let jobs = format!("[jobs]\nurl = '{}'\n", postgres.database().await);
    tokio::task::spawn_blocking(move || what_is_over_is_gone(&jobs)).await.unwrap();
}

/// With these lines before those of the test.
fn what_is_over_is_gone(settings: &str) {
    let handlers = "[handler.good]\nrun = ['sh', '-c', 'cat >/dev/null']\n\
        [handler.bad]\nmax-attempts = 1\nrun = ['sh', '-c', 'cat >/dev/null; exit 1']\n";
    let handlers = &format!("{settings}{handlers}");
    for (completed, failed) in [("1ms", "1h"), ("1h", "1ms")] {
        let folder = temp();
        config(folder.path(), handlers);
        let server = Server::start(folder.path());
        let (good, bad) = (add(&server, "good", "null"), add(&server, "bad", "null"));
        until("their ends", || status(&server, &good) == "done" && status(&server, &bad) == "dead");
        server.stop();
        let retention =
            format!("{handlers}[retention]\ncompleted = '{completed}'\nfailed = '{failed}'\n");
        config(folder.path(), &retention);
        let server = Server::start(folder.path());
        let code = |id: &str| {
            let shown: Ran = server.command(&["job", "show", id]).output().unwrap().into();
            shown.code
        };
        let (gone, stays) = if completed == "1ms" { (good, bad) } else { (bad, good) };
        until("its removal", || code(&gone) == 3);
        // Both are looked at in one go.
        assert_eq!(code(&stays), 0, "completed {completed}, failed {failed}");
        server.stop();
    }
}

#[test]
fn jobs_on_a_postgresql_are_done_by_the_servers_that_share_it() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (_postgres, url) = runtime.block_on(async {
        let server = testing::postgres::Server::start().await;
        let url = server.database().await;
        (server, url)
    });
    // One asks and does nothing, the other does it.
    let (asks, does) = (temp(), temp());
    config(asks.path(), &format!("[jobs]\nurl = '{url}'\n"));
    let run = r#"run = ["sh", "-c", "cat >done; echo '{\"result\": 7}'"]"#;
    config(does.path(), &format!("[jobs]\nurl = '{url}'\n[handler.note]\n{run}\n"));
    let asking = Server::start(asks.path());
    let id = add(&asking, "note", r#"{"a":1}"#);
    assert_eq!(status(&asking, &id), "waiting");
    let doing = Server::start(does.path());
    until("the job", || status(&asking, &id) == "done");
    assert_eq!(job(&doing, &["show", &id])["result"], 7);
    assert_eq!(fs::read_to_string(does.path().join("done")).unwrap(), r#"{"a":1}"#);
    doing.stop();
    asking.stop();
}

#[test]
fn what_is_most_likely_a_mistake_is_said_at_the_start_and_by_the_doctor() {
    let folder = temp();
    config(
        folder.path(),
        "[handler.pack]\nrun = ['./no-such-program']\n[handler.fine]\nrun = ['true']\n\
         [periodic.again]\nkind = 'unpack'\nevery = '1h'\n[periodic.often]\nkind = 'fine'\nevery = '1h'\n",
    );
    let checks = run(folder.path(), &["doctor", "--output", "json"]).json();
    let state = |name: &str| {
        let all = checks["checks"].as_array().unwrap().iter();
        all.clone().find(|check| check["name"] == name).map(|check| check["state"].to_string())
    };
    assert_eq!(state("handler.pack").as_deref(), Some("\"broken\""), "{checks}");
    assert_eq!(state("handler.fine").as_deref(), Some("\"ok\""), "{checks}");
    assert_eq!(state("periodic.again").as_deref(), Some("\"note\""), "{checks}");
    assert_eq!(state("periodic.often"), None, "{checks}");

    let mut server = Server::start(folder.path());
    server.running.signal("TERM");
    assert_eq!(server.running.wait().code(), Some(0));
    let said = server.running.complaint();
    let warned = |text: &str| said.lines().any(|line| line.contains("WARN") && line.contains(text));
    assert!(warned("handler.pack cannot be run: it runs ./no-such-program"), "{said}");
    assert!(warned("periodic.again asks for jobs of the kind"), "{said}");
    assert!(!said.contains("handler.fine") && !said.contains("periodic.often"), "{said}");
}
