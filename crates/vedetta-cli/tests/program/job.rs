//! `vedetta job` and `vedetta queue`, on a server with handlers that are declared.

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::Stdio;

use serde_json::{Value, json};

use crate::support::{Ran, Server, temp, until, vedetta};

fn ask(server: &Server, args: &[&str]) -> Ran {
    server.command(args).output().unwrap().into()
}

fn done(server: &Server, args: &[&str]) -> Value {
    let mut args = args.to_vec();
    args.extend(["--output", "json"]);
    let ran = ask(server, &args);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{args:?}: {ran:?}");
    ran.json()
}

#[test]
fn jobs_are_added_listed_shown_cancelled_and_retried() {
    let folder = temp();
    let server = Server::start(folder.path());
    let added = ask(&server, &["job", "add", "pack", "--queue", "media"]);
    assert_eq!((added.code, added.out.as_str()), (0, "job 1 waits in media\n"), "{added:?}");
    assert!(added.err.contains("no handler is declared for the kind \"pack\""), "{added:?}");
    std::fs::write(folder.path().join("payload.json"), "{\n \"n\": 1.50\n}\n").unwrap();
    let options = [
        "job",
        "add",
        "pack",
        "--payload",
        "@payload.json",
        "--cost",
        "3",
        "--priority",
        "-5",
        "--at",
        "+1h",
        "--max-attempts",
        "2",
        "--timeout",
        "90s",
        "--unique-key",
        "k",
        "--tag",
        "x",
        "--tag",
        "y",
    ];
    assert_eq!(done(&server, &options)["new"], true);
    assert_eq!(done(&server, &options)["new"], false);
    assert!(ask(&server, &options).out.contains("waits already"));

    let shown = ask(&server, &["job", "show", "2", "--output", "json"]);
    assert_eq!(shown.out.lines().count(), 1, "{shown:?}");
    let job = shown.json();
    assert_eq!((&job["cost"], &job["priority"]), (&json!(3), &json!(-5)));
    assert_eq!((&job["timeout"], &job["tags"]), (&json!("1m 30s"), &json!(["x", "y"])));
    let shown = ask(&server, &["job", "show", "2"]);
    assert!(shown.out.contains("1.50") && shown.out.contains("unique key  k"), "{shown:?}");

    let ids = |args: &[&str]| {
        let list = done(&server, &[&["job", "list"], args].concat());
        list["jobs"].as_array().unwrap().iter().map(|job| job["id"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(ids(&[]), [2, 1]);
    assert_eq!(ids(&["--limit", "1"]), [2]);
    assert_eq!(ids(&["--queue", "media"]), [1]);
    assert_eq!(ids(&["--tag", "y", "--search", "\"n\""]), [2]);
    let table = ask(&server, &["job", "list"]).out;
    assert!(table.starts_with("ID  KIND  QUEUE"), "{table}");

    let cancelled = ask(&server, &["job", "cancel", "1", "2"]);
    assert_eq!(cancelled.out, "job 1 is cancelled\njob 2 is cancelled\n", "{cancelled:?}");
    let some = ask(&server, &["job", "retry", "98", "2", "99"]);
    assert_eq!((some.code, some.out.as_str()), (3, "job 2 is waiting\n"), "{some:?}");
    assert!(["98", "99"].iter().all(|id| some.err.contains(id)), "{some:?}");
    assert_eq!(ask(&server, &["job", "cancel", "2"]).out, "job 2 is cancelled\n");
    assert_eq!(ids(&["--status", "cancelled"]), [2, 1]);
    assert_eq!(ask(&server, &["job", "retry", "1"]).out, "job 1 is waiting\n");
    let retried = done(&server, &["job", "retry", "--all", "--status", "cancelled"]);
    assert_eq!(retried, json!({"retried": 1}));

    for (args, code) in [
        (&["job", "show", "99"][..], 3),
        (&["job", "cancel", "99"], 3),
        (&["job", "retry", "1"], 4),
        (&["job", "retry", "1", "--kind", "pack"], 2),
        (&["job", "retry"], 2),
        (&["job", "add", "no name"], 2),
        (&["job", "add", "pack", "--payload", "{"], 2),
        (&["job", "add", "pack", "--at", "soon"], 2),
        (&["job", "list", "--status", "lost"], 2),
        (&["job", "add", "pack", "--payload", "@nothing"], 1),
        (&["job", "list", "--server", "http://127.0.0.1:9"], 5),
    ] {
        let ran = ask(&server, args);
        assert_eq!(ran.code, code, "{args:?}: {ran:?}");
        assert!(!ran.err.is_empty(), "{args:?}");
    }
    server.stop();
}

#[test]
fn waiting_ends_with_the_jobs_and_fails_unless_each_is_done() {
    let folder = temp();
    let config =
        "[handler.good]\nrun = [\"true\"]\n\n[handler.bad]\nrun = [\"false\"]\nmax-attempts = 1\n";
    std::fs::write(folder.path().join("vedetta.toml"), config).unwrap();
    let server = Server::start(folder.path());
    let waited = done(&server, &["job", "add", "good", "--wait"]);
    assert_eq!(waited["jobs"][0]["status"], "done");
    let failed = ask(&server, &["job", "add", "bad", "--wait"]);
    assert_eq!(failed.code, 1, "{failed:?}");
    assert!(failed.out.contains("dead"), "{failed:?}");
    assert_eq!(failed.err, "vedetta: not done: 1 of 1\n", "and no bar on what is no terminal");
    assert_eq!(done(&server, &["job", "add", "good"])["id"], 3);
    assert_eq!(ask(&server, &["job", "wait", "1", "3"]).code, 0);
    let both = ask(&server, &["job", "wait", "1", "2"]);
    assert_eq!((both.code, both.err.as_str()), (1, "vedetta: not done: 1 of 2\n"));
    assert_eq!(ask(&server, &["job", "wait", "99"]).code, 3);
    assert_eq!(ask(&server, &["job", "add", "good"]).err, "", "there is a handler");
    server.stop();
}

/// A server that gives these answers, one to each request, and says what it was asked for.
fn scripted(answers: Vec<(u16, Value)>) -> (String, std::thread::JoinHandle<Vec<String>>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let answering = std::thread::spawn(move || {
        let answer = |(status, body): (u16, Value)| {
            let (mut client, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(client.try_clone().unwrap()).lines();
            let asked = lines.next().unwrap().unwrap();
            while !lines.next().unwrap().unwrap().is_empty() {}
            let body = body.to_string();
            let length = body.len();
            let head = format!("HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n");
            let rest = format!("Content-Length: {length}\r\nConnection: close\r\n\r\n{body}");
            client.write_all(format!("{head}{rest}").as_bytes()).unwrap();
            asked
        };
        answers.into_iter().map(answer).collect()
    });
    (url, answering)
}

#[test]
fn who_waits_for_a_job_bears_with_a_server_that_is_not_ready_for_a_while() {
    let folder = temp();
    let server = Server::start(folder.path());
    assert_eq!(ask(&server, &["job", "add", "pack"]).code, 0);
    let mut job = done(&server, &["job", "show", "1"]);
    server.stop();
    let waiting = job.clone();
    job["status"] = "done".into();
    let busy = json!({"error": {"code": "unavailable", "message": "not yet"}});
    let (url, answering) = scripted(vec![(200, waiting), (503, busy), (200, job)]);
    let mut command = vedetta(folder.path());
    let ran: Ran = command.args(["job", "wait", "1", "--server", &url]).output().unwrap().into();
    assert_eq!(ran.code, 0, "{ran:?}");
    let asked = answering.join().unwrap();
    assert_eq!(asked, vec!["GET /api/v1/jobs/1 HTTP/1.1"; 3]);
}

#[test]
fn who_waits_for_several_jobs_hears_of_each_whichever_ends_first() {
    let folder = temp();
    let server = Server::start(folder.path());
    let [one, two] = ["1", "2"].map(|id| {
        assert_eq!(ask(&server, &["job", "add", "pack"]).code, 0);
        done(&server, &["job", "show", id])
    });
    server.stop();
    let waits = |job: &Value| (200, job.clone());
    let is_over = |job: &Value| {
        let mut job = job.clone();
        job["status"] = "done".into();
        (200, job)
    };
    let answers = vec![waits(&one), waits(&two), waits(&one), is_over(&two), is_over(&one)];
    let (url, answering) = scripted(answers);
    let mut command = vedetta(folder.path());
    let ran = command.args(["job", "wait", "1", "2", "--server", &url]).output().unwrap();
    let ran = Ran::from(ran);
    assert_eq!(ran.code, 0, "{ran:?}");
    let asked = answering.join().unwrap();
    let expected = [1, 2, 1, 2, 1].map(|id| format!("GET /api/v1/jobs/{id} HTTP/1.1"));
    assert_eq!(asked, expected);
}

#[test]
fn on_a_terminal_waiting_and_importing_show_how_far_they_are() {
    let folder = temp();
    // It goes on when it was seen.
    let config = "[handler.film]\nrun = ['sh', '-c', \"\"\"echo '{\"progress\": 0.5, \"message\": \"half of it\"}'; \
        while ! test -e go; do sleep 0.05; done\"\"\"]\n";
    std::fs::write(folder.path().join("vedetta.toml"), config).unwrap();
    let server = Server::start(folder.path());
    let on_a_terminal = |words: &str| {
        let line = format!("{} {words}", env!("CARGO_BIN_EXE_vedetta"));
        let mut command = std::process::Command::new("script");
        command.args(["-qec", &line, "/dev/null"]).current_dir(folder.path());
        command.env("VEDETTA_SERVER", &server.url).env("TERM", "xterm").env("COLUMNS", "100");
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command.spawn().unwrap()
    };
    let mut waiting = on_a_terminal("job add film --wait");
    let mut screen = waiting.stdout.take().unwrap();
    let (mut shown, mut bytes) = (Vec::new(), [0; 4096]);
    loop {
        let count = screen.read(&mut bytes).unwrap();
        assert!(count > 0, "it ended: {}", String::from_utf8_lossy(&shown));
        shown.extend_from_slice(&bytes[..count]);
        let text = String::from_utf8_lossy(&shown);
        if text.contains("50%") && text.contains("half of it") {
            break;
        }
    }
    std::fs::write(folder.path().join("go"), "").unwrap();
    let mut rest = String::new();
    screen.read_to_string(&mut rest).unwrap();
    assert!(waiting.wait().unwrap().success(), "{rest}");
    assert!(rest.contains("done"), "{rest}");

    let mut lines = String::new();
    for n in 0..1500 {
        writeln!(lines, "{{\"kind\": \"a\", \"payload\": {n}}}").unwrap();
    }
    std::fs::write(folder.path().join("jobs.jsonl"), lines).unwrap();
    let ended = on_a_terminal("job import jobs.jsonl").wait_with_output().unwrap();
    let shown = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success() && shown.contains("imported 1500 jobs"), "{shown}");
    assert!(shown.contains('%'), "{shown}");
    server.stop();
}

#[test]
fn many_jobs_are_imported_and_a_wrong_line_stops_its_batch_and_no_other() {
    let folder = temp();
    let server = Server::start(folder.path());
    let mut lines = String::new();
    for n in 1..=1200 {
        let line = if n == 700 {
            "{\"kind\": \"a\", \"colour\": 1}".to_owned()
        } else {
            format!("{{\"kind\": \"count\", \"payload\": {n}, \"queue\": \"numbers\"}}")
        };
        writeln!(lines, "{line}").unwrap();
    }
    let file = folder.path().join("jobs.jsonl");
    std::fs::write(&file, &lines).unwrap();
    let stopped = ask(&server, &["job", "import", "jobs.jsonl"]);
    assert_eq!(stopped.code, 2, "{stopped:?}");
    assert!(stopped.err.contains("line 700: unknown field `colour`"), "{stopped:?}");
    assert!(stopped.err.contains("imported 500 jobs"), "{stopped:?}");
    assert!(stopped.err.contains("--skip 500"), "{stopped:?}");
    std::fs::write(folder.path().join("bad.jsonl"), "{\"kind\": \"a\"}\n{\"kind\": }\n").unwrap();
    let nothing = ask(&server, &["job", "import", "bad.jsonl"]).err;
    assert_eq!(nothing, "vedetta: nothing was imported: line 2: expected value, at column 10\n");

    let lines: String = lines
        .lines()
        .map(|line| if line.contains("colour") { "\n".into() } else { format!("{line}\n") })
        .collect();
    let mut command = server.command(&["job", "import", "-", "--skip", "500", "--output", "json"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let ran = Ran::from(child.wait_with_output().unwrap());
    assert_eq!(ran.json(), json!({"lines": 1200, "jobs": 699, "new": 699}), "{ran:?}");
    let queues = done(&server, &["queue", "list"]);
    assert_eq!(queues["queues"][0]["ready"], 1199);
    let oldest = done(&server, &["job", "list", "--search", "count", "--limit", "2000"]);
    let oldest: Vec<&Value> =
        oldest["jobs"].as_array().unwrap().iter().map(|job| &job["payload"]).collect();
    assert_eq!((oldest.len(), oldest[1198], oldest[0]), (1199, &json!(1), &json!(1200)));
    assert_eq!(ask(&server, &["job", "import", "nothing"]).code, 1);
    server.stop();
}

#[test]
fn queues_are_listed_paused_drained_and_resumed() {
    let folder = temp();
    let server = Server::start(folder.path());
    let told = |what: &str| ask(&server, &["queue", what, "media"]).out;
    for what in ["pause", "resume", "drain"] {
        let mistyped = ask(&server, &["queue", what, "media"]);
        assert_eq!(mistyped.code, 3, "{mistyped:?}");
        assert!(mistyped.err.contains("there is no queue \"media\""), "{mistyped:?}");
    }
    assert!(!ask(&server, &["queue", "list"]).out.contains("media"), "it was not made");
    assert_eq!(
        ask(&server, &["queue", "pause", "default"]).code,
        0,
        "jobs that name none wait there"
    );
    assert_eq!(ask(&server, &["job", "add", "pack", "--queue", "media"]).code, 0);
    assert_eq!(told("pause"), "media is paused\n");
    assert_eq!(told("drain"), "media is draining\n");
    let refused = ask(&server, &["job", "add", "pack", "--queue", "media"]);
    assert_eq!(refused.code, 4, "{refused:?}");
    assert!(refused.err.contains("is being drained"), "{refused:?}");
    let table = ask(&server, &["queue", "list"]).out;
    let row = table.lines().find(|line| line.starts_with("media ")).unwrap();
    assert_eq!(row.split_whitespace().nth(1), Some("draining"), "{table}");
    assert_eq!(told("resume"), "media is open\n");
    assert_eq!(ask(&server, &["job", "add", "pack", "--queue", "media"]).code, 0);
    assert_eq!(ask(&server, &["queue", "pause", "no name"]).code, 2);
    server.stop();
}

#[test]
fn jobs_outlive_the_server() {
    let folder = temp();
    let server = Server::start(folder.path());
    assert_eq!(ask(&server, &["job", "add", "pack"]).code, 0);
    server.stop();
    let server = Server::start(folder.path());
    assert_eq!(done(&server, &["job", "list"])["jobs"][0]["kind"], "pack");
    server.stop();
}

#[test]
fn who_asks_for_a_kind_that_the_queues_own_worker_does_not_have_is_told_that_it_fails() {
    let folder = temp();
    std::fs::write(folder.path().join("vedetta.toml"), "[handler.pack]\nrun = ['true']").unwrap();
    let server = Server::start(folder.path());
    until("the hint about the worker", || {
        let added = ask(&server, &["job", "add", "other"]);
        assert_eq!(added.code, 0, "{added:?}");
        added.err.contains("it fails until it is dead; add [handler.other]")
    });
}
