//! `vedetta top`.

use std::fs;
use std::io::{Read as _, Write as _};
use std::process::Stdio;
use std::sync::mpsc;

use crate::support::{Ran, Server, http, temp, until};

const HANDLER: &str = "[handler.nothing]\nrun = ['true']\nqueue = 'mail'\n";

#[test]
fn without_a_terminal_it_shows_queues_and_workers_once() {
    let folder = temp();
    fs::write(folder.path().join("vedetta.toml"), HANDLER).unwrap();
    let server = Server::start(folder.path());
    let shown = || -> Ran { server.command(&["top"]).output().unwrap().into() };
    let has_worker = |ran: &Ran| ran.out.contains("WORKER") && ran.out.contains("mail");
    until("the worker", || has_worker(&shown()));
    let ran = shown();
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("1 workers") && ran.out.contains("DONE/MIN"), "{ran:?}");
    let json: Ran = server.command(&["top", "--output", "json"]).output().unwrap().into();
    assert_eq!(json.json()["workers"][0]["queues"][0], "mail");
    // One that has stopped is neither listed nor counted.
    let ben = format!("{}/api/v1/workers/ben", server.url);
    let beat = serde_json::json!({ "queues": ["mail"] });
    http().post(format!("{ben}/beat")).send_json(beat).unwrap();
    assert!(shown().out.contains("2 workers"), "{:?}", shown());
    http().delete(&ben).call().unwrap();
    let ran = shown();
    assert!(!ran.out.contains("ben") && ran.out.contains("1 workers"), "{ran:?}");
    assert!(ran.out.contains("(1 stopped: vedetta worker list --all)"), "{ran:?}");
    let list = |args: &[&str]| -> String {
        let ran = Ran::from(server.command(&["worker", "list"]).args(args).output().unwrap());
        assert_eq!(ran.code, 0, "{ran:?}");
        ran.out
    };
    assert!(!list(&[]).contains("ben") && list(&["--all"]).contains("ben"));
    assert!(list(&["--output", "json"]).contains("ben"), "programs are told of all");
    server.stop();
}

#[test]
fn on_a_terminal_it_stays_until_q_is_pressed() {
    let folder = temp();
    fs::write(folder.path().join("vedetta.toml"), HANDLER).unwrap();
    let server = Server::start(folder.path());
    // `script` gives it a terminal.
    let program = env!("CARGO_BIN_EXE_vedetta");
    let mut script = std::process::Command::new("script");
    script.args([
        "-qec",
        &format!("{program} top --every 100ms --server {}", server.url),
        "/dev/null",
    ]);
    let script = script.env("TERM", "xterm").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = script.spawn().expect("apt-get install bsdutils");
    let (mut stdin, mut stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let (tell, heard) = mpsc::channel();
    std::thread::spawn(move || {
        let mut chunk = [0; 4096];
        while let Ok(length @ 1..) = stdout.read(&mut chunk) {
            let _ = tell.send(String::from_utf8_lossy(&chunk[..length]).into_owned());
        }
    });
    let mut seen = String::new();
    until("three looks", || {
        seen.extend(heard.try_iter());
        seen.matches("in the last minute").count() >= 3
    });
    // It looks again each time: what is added now, to a queue that gives nothing, is drawn.
    let done = |args: &[&str]| assert!(server.command(args).output().unwrap().status.success());
    assert!(seen.contains("   0 ready, 0 running"), "{seen}");
    done(&["queue", "pause", "mail"]);
    done(&["job", "add", "nothing", "--queue", "mail"]);
    until("the job", || {
        seen.extend(heard.try_iter());
        seen.contains("   1 ready, 0 running")
    });
    stdin.write_all(b"q").unwrap();
    assert!(child.wait().unwrap().success(), "{seen}");
    server.stop();
}
