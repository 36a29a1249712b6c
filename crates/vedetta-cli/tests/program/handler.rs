//! `[handler.KIND]`, `[queue.NAME]` and `[periodic.NAME]` in the config file.

use std::fs;
use std::path::Path;

use futures_util::StreamExt as _;
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

/// Sleeps, with a child that sleeps beside it and one that does so in a session of its own, and says who they are.
pub(crate) const SLEEPS: &str = "[shutdown]\ngrace = '0s'\n[queue.default]\nack-wait = '1s'\n[handler.sleep]\n\
    timeout = '1h'\nrun = ['sh', '-c', 'sleep 600 & a=$!; setsid sleep 600 & echo $$ $a $! >pids; wait']\n";

pub(crate) fn sleepers(folder: &Path) -> Vec<String> {
    let file = folder.join("pids");
    let read = || fs::read_to_string(&file).unwrap_or_default();
    until("the command", || read().ends_with('\n'));
    let pids: Vec<String> = read().split_whitespace().map(str::to_owned).collect();
    fs::remove_file(file).unwrap();
    assert!(pids.len() == 3 && pids.iter().all(|pid| alive(pid)), "{pids:?}");
    pids
}

pub(crate) fn are_gone(pids: &[String]) {
    until("the end of the command and its children", || !pids.iter().any(|pid| alive(pid)));
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
fn queues_without_a_capacity_share_the_slots_of_the_machine() {
    let folder = temp();
    let run =
        "run = ['sh', '-c', 'echo +1 >>log; until test -e go; do sleep 0.05; done; echo -1 >>log']";
    config(
        folder.path(),
        &format!(
            "[queue.mail]\ncapacity = 'auto'\n[queue.own]\ncapacity = 3\n\
             [handler.film]\nqueue = 'media'\n{run}\n[handler.letter]\nqueue = 'mail'\n{run}\n\
             [handler.third]\nqueue = 'own'\nrun = ['true']\n"
        ),
    );
    let server = Server::start(folder.path());
    let cores = std::thread::available_parallelism().unwrap().get();
    let slots = if cores > 4 { cores - 2 } else { cores };
    let ids: Vec<String> = (0..slots)
        .flat_map(|_| [add(&server, "film", "null"), add(&server, "letter", "null")])
        .collect();
    let workers = || {
        let listed: Ran =
            server.command(&["worker", "list", "--output", "json"]).output().unwrap().into();
        let listed = listed.json()["workers"].as_array().unwrap().clone();
        let mut all: Vec<Value> = listed
            .iter()
            .map(|worker| serde_json::json!([worker["queues"], worker["slots"]]))
            .collect();
        all.sort_by_key(Value::to_string);
        all
    };
    let all = serde_json::json!([
        [["mail", "media"], {"used": slots, "capacity": slots}],
        [["own"], {"used": 0, "capacity": 3}],
    ]);
    until("all slots are in use", || Value::from(workers()) == all);
    fs::write(folder.path().join("go"), "").unwrap();
    until("all are done", || ids.iter().all(|id| status(&server, id) == "done"));
    let log = fs::read_to_string(folder.path().join("log")).unwrap();
    let at_once = log.lines().scan(0, |now: &mut i64, line| {
        *now += line.parse::<i64>().unwrap();
        Some(*now)
    });
    assert_eq!(at_once.max(), Some(i64::try_from(slots).unwrap()), "{log}");
    server.stop();
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
        (
            "[jobs]\nurl = 'nats://127.0.0.1:1'\n[queue.a]\ncapacity = 4\n\
             nats = { stream = 'S', subject = 's', durable = 'd', max-ack-pending = 3 }",
            "max-ack-pending is 3, and one worker has 4 slots",
        ),
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
        run = ["sh", "-c", "echo job ${VEDETTA_JOB-none}, message $VEDETTA_MESSAGE >&2; echo '{\"result\": '$(cat)'}'"]
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
    assert_eq!(shown["log"], "job none, message 1\n");
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
}

#[tokio::test]
async fn a_streams_job_of_many_ack_waits_runs_once_and_again_soon_after_its_process_is_killed() {
    let nats = testing::nats::Server::start().await;
    let folder = temp();
    config(
        folder.path(),
        r#"
        [queue.media]
        ack-wait = "2s"
        heartbeat = "400ms"
        fetch-timeout = "500ms"
        nats = { stream = "MEDIA", subject = "media.events", durable = "worker" }
        [handler.film]
        run = ["sh", "-c", "echo $VEDETTA_ATTEMPT >>begun; while ! test -e go; do sleep 0.05; done"]
        queue = "media"
        "#,
    );
    let start = || {
        let mut command = vedetta(folder.path());
        command.args(["up", "--http", "127.0.0.1:0"]).env("VEDETTA_JOBS_URL", nats.url());
        Server::with(&mut command, folder.path())
    };
    let begun = || fs::read_to_string(folder.path().join("begun")).unwrap_or_default();
    let mut server = start();
    let id = add(&server, "film", "null");
    until("its begin", || begun() == "1\n");
    let client = async_nats::connect(nats.url()).await.unwrap();
    let stream = async_nats::jetstream::new(client).get_stream("MEDIA").await.unwrap();
    let delivered = async || stream.consumer_info("worker").await.unwrap().delivered;
    let watched = std::time::Instant::now();
    while watched.elapsed() < std::time::Duration::from_secs(7) {
        assert_eq!((begun().as_str(), delivered().await.consumer_sequence), ("1\n", 1));
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    server.running.signal("KILL");
    server.running.wait();
    let server = start();
    let ready = std::time::SystemTime::now();
    until("another begin", || begun() == "1\n2\n");
    // By the clock of NATS, which has no part in what else the machine is at.
    let again: std::time::SystemTime = delivered().await.last_active.unwrap().into();
    let late = again.duration_since(ready).unwrap_or_default();
    assert!(late < 5 * std::time::Duration::from_secs(2), "delivered {late:?} later");
    fs::write(folder.path().join("go"), "").unwrap();
    until("its end", || status(&server, &id) == "done");
    assert_eq!((begun().as_str(), delivered().await.consumer_sequence), ("1\n2\n", 2));
    server.stop();
}

#[tokio::test]
async fn a_stream_is_pulled_as_the_file_says() {
    let nats = testing::nats::Server::start().await;
    let client = async_nats::connect(nats.url()).await.unwrap();
    let mut pulls = client.subscribe("$JS.API.CONSUMER.MSG.NEXT.MEDIA.worker").await.unwrap();
    client.flush().await.unwrap();
    let folder = temp();
    config(
        folder.path(),
        r#"
        [queue.media]
        capacity = 8
        fetch-batch = 3
        fetch-timeout = "700ms"
        nats = { stream = "MEDIA", subject = "media.events", durable = "worker" }
        [handler.film]
        run = ["true"]
        queue = "media"
        "#,
    );
    let mut command = vedetta(folder.path());
    command.args(["up", "--http", "127.0.0.1:0"]).env("VEDETTA_JOBS_URL", nats.url());
    let server = Server::with(&mut command, folder.path());
    add(&server, "film", "null");
    // Once it is known what one costs.
    let full = async {
        loop {
            let pull = pulls.next().await.unwrap().payload;
            let pull: Value = serde_json::from_slice(&pull).unwrap();
            assert_eq!(pull["expires"], 700_000_000, "{pull}");
            match pull["batch"].as_u64().unwrap() {
                1 => {}
                batch => return batch,
            }
        }
    };
    assert_eq!(testing::soon("a pull of several", full).await, 3);
    server.stop();
}

#[tokio::test]
async fn jobs_of_a_stream_are_added_called_off_and_held_up_by_hand() {
    let nats = testing::nats::Server::start().await;
    let folder = temp();
    config(
        folder.path(),
        r#"
        [queue.media]
        capacity = 1
        ack-wait = "3s"
        heartbeat = "1s"
        fetch-timeout = "1s"
        nats = { stream = "MEDIA", subject = "media.events", durable = "worker", max-ack-pending = 8 }
        [handler.film]
        # One that ends sooner than the next is fetched has another one taken ahead.
        run = ["sh", "-c", "read file; test \"$file\" = null || exec sleep 600; sleep 0.3; echo '{\"result\": 7}'"]
        queue = "media"
        [handler.here]
        run = ["true"]
        "#,
    );
    let start = || {
        let mut command = vedetta(folder.path());
        command.args(["up", "--http", "127.0.0.1:0"]).env("VEDETTA_JOBS_URL", nats.url());
        Server::with(&mut command, folder.path())
    };
    let server = start();
    let client = async_nats::connect(nats.url()).await.unwrap();
    let stream = async_nats::jetstream::new(client).get_stream("MEDIA").await.unwrap();
    let messages = async || stream.get_info().await.unwrap().state.messages;
    let consumer = stream.consumer_info("worker").await.unwrap();
    assert_eq!(consumer.config.max_ack_pending, 8, "what all workers can run");

    // Asked for here it is a message there, and its record is the job that is shown.
    let id = add(&server, "film", "null");
    until("its end", || status(&server, &id) == "done");
    assert_eq!(job(&server, &["show", &id])["result"], 7);

    // One that runs and one that waits are called off.
    let (runs, waits) = (add(&server, "film", "1"), add(&server, "film", "2"));
    until("the first", || status(&server, &runs) == "running");
    assert_eq!(status(&server, &waits), "waiting");
    job(&server, &["cancel", &waits]);
    job(&server, &["cancel", &runs]);
    assert_eq!(messages().await, 0, "nobody else gets them, either");
    let last = add(&server, "film", "null");
    until("room for another", || status(&server, &last) == "done");
    assert_eq!(
        (status(&server, &runs), status(&server, &waits)),
        ("cancelled".into(), "cancelled".into())
    );

    // While the queue is paused nothing begins here, nor after a restart.
    let queue =
        |what: &str| -> Ran { server.command(&["queue", what, "media"]).output().unwrap().into() };
    assert_eq!(queue("pause").out, "media is paused\n");
    let refused = queue("drain");
    assert_eq!(refused.code, 2, "{refused:?}");
    assert!(refused.err.contains("the stream MEDIA of NATS"), "{refused:?}");
    let held = add(&server, "film", "null");
    server.stop();
    let server = start();
    assert_eq!((status(&server, &held), messages().await), ("waiting".into(), 1));
    let resumed: Ran = server.command(&["queue", "resume", "media"]).output().unwrap().into();
    assert_eq!(resumed.out, "media is open\n");
    until("its end", || status(&server, &held) == "done");

    // What a stream cannot do is refused.
    for (args, why) in [
        (&["job", "retry", &runs][..], "ask for it anew"),
        (&["job", "add", "film", "--unique-key", "k"], "unique"),
        (&["job", "add", "film", "--at", "+1h"], "for later"),
        (&["job", "add", "film", "--priority", "3"], "no priorities"),
    ] {
        let refused: Ran = server.command(args).output().unwrap().into();
        assert_eq!(refused.code, 2, "{args:?}: {refused:?}");
        assert!(refused.err.contains(why), "{args:?}: {refused:?}");
    }
    let both = serde_json::json!([{"kind": "film"}, {"kind": "here"}]);
    let agent: ureq::Agent =
        ureq::Agent::config_builder().proxy(None).http_status_as_error(false).build().into();
    let mixed = agent.post(format!("{}/api/v1/jobs", server.url)).send_json(both).unwrap();
    assert_eq!(mixed.status(), 422);
    server.stop();
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

#[tokio::test]
async fn what_is_over_is_gone_when_its_time_of_the_file_is_over_redis() {
    let redis = testing::redis::Server::start().await;
    let bus = format!("[bus]\nurl = '{}'\n", redis.url());
    tokio::task::spawn_blocking(move || what_is_over_is_gone(&bus)).await.unwrap();
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
