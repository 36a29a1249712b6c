//! `[watch.NAME]` in the config file, and `vedetta watcher`.

use std::fs;
use std::io::{BufRead as _, BufReader, Read};
use std::path::Path;

use serde_json::{Value, json};
use vedetta::runtime::watcher::{BoxError, Effect, Id};
use vedetta::runtime::{Next, Reconcile, State, Watcher};

use crate::support::{Ran, Running, Server, http, run, temp, until, vedetta};

fn write(folder: &Path, files: &[(&str, &str)]) {
    for (name, text) in files {
        fs::write(folder.join(name), text).unwrap();
    }
}

fn lines(file: &Path) -> Vec<String> {
    fs::read_to_string(file).unwrap_or_default().lines().map(str::to_owned).collect()
}

/// Whether a process has not ended; one that nobody asked how it ended has.
fn alive(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

fn watcher(server: &Server, args: &[&str]) -> Ran {
    server.command(&["watcher"]).args(args).output().unwrap().into()
}

fn show(server: &Server, name: &str) -> Value {
    let shown = watcher(server, &["show", name, "--output", "json"]);
    assert_eq!(shown.code, 0, "{shown:?}");
    shown.json()
}

#[test]
fn a_command_runs_for_each_id_that_changed_and_gets_its_state() {
    let folder = temp();
    let log = folder.path().join("log");
    write(
        folder.path(),
        &[
            ("on-room.sh", r#"echo "$VEDETTA_WATCHER $VEDETTA_ID $VEDETTA_SERVER $(cat)" >>"$1""#),
            (
                "vedetta.toml",
                "[watch.rooms]\nprefix = '/rooms/'\nkey-types = ['livemeta', 'mixer']\n\
                 quiet = ['mixer']\nrun = ['sh', './on-room.sh', 'log']\nparallel = 1",
            ),
        ],
    );
    let server = Server::start(folder.path());
    let told = |id: &str, state: &str| {
        format!("rooms {id} {} {{\"id\":\"{id}\",\"state\":{state}}}", server.url)
    };
    let mut expected = Vec::new();
    let mut runs = |line: String| {
        expected.push(line);
        until("the run", || lines(&log).len() >= expected.len());
        assert_eq!(lines(&log), expected);
    };

    server.done(&["put", "/rooms/a/b/livemeta", r#"{"on": true, "n": 1.50}"#]);
    runs(told("a/b", r#"{"livemeta":{"on": true, "n": 1.50}}"#));
    // Neither a key type that is not heeded nor a quiet one makes it run. With one run at a time, what
    // they started would come before the next.
    server.done(&["put", "/rooms/a/b/other", "x"]);
    server.done(&["put", "/rooms/a/b/mixer", "m1"]);
    server.done(&["put", "/rooms/2/livemeta", "off air"]);
    runs(told("2", r#"{"livemeta":"off air"}"#));
    server.done(&["put", "/rooms/a/b/livemeta", "3"]);
    runs(told("a/b", r#"{"livemeta":3,"mixer":"m1"}"#));
    server.done(&["del", "/rooms/a/b/", "--prefix"]);
    runs(told("a/b", "null"));

    let again = watcher(&server, &["resync", "rooms"]);
    assert_eq!((again.code, again.out.as_str()), (0, "running again: 1 ids\n"), "{again:?}");
    runs(told("2", r#"{"livemeta":"off air"}"#));

    until("the end of the run", || show(&server, "rooms")["running"] == 0);
    let shown = show(&server, "rooms");
    for (name, value) in [
        ("name", json!("rooms")),
        ("prefix", json!("/rooms/")),
        ("phase", json!("following")),
        ("ids", json!(1)),
        ("failing", json!(0)),
        ("done", json!(5)),
        ("lists", json!(1)),
        ("troubles", json!([])),
    ] {
        assert_eq!(shown[name], value, "{name}: {shown}");
    }
    let list = watcher(&server, &["list"]);
    let row: Vec<_> = list.out.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(&row[..3], ["rooms", "/rooms/", "following"], "{list:?}");
    let list = watcher(&server, &["list", "--output", "json"]).json();
    assert_eq!(list["watchers"][0]["done"], 5, "{list}");
    for unknown in [["show", "none"], ["resync", "none"]] {
        let refused = watcher(&server, &unknown);
        assert_eq!(refused.code, 3, "{refused:?}");
        assert!(refused.err.contains("there is no watcher \"none\""), "{refused:?}");
    }
    server.stop();

    // A start runs the command for all there is.
    let server = Server::start(folder.path());
    until("the run after a start", || lines(&log).len() > 5);
    assert!(lines(&log)[5].ends_with(r#"{"id":"2","state":{"livemeta":"off air"}}"#));
    server.stop();
    let away = run(folder.path(), &["watcher", "list", "--server", "http://127.0.0.1:1"]);
    assert_eq!(away.code, 5, "{away:?}");
}

#[test]
fn what_fails_or_hangs_is_tried_again_and_shown() {
    let folder = temp();
    write(
        folder.path(),
        &[
            ("fails.sh", r#"echo "no mixer for $VEDETTA_ID" >&2; test -e ok"#),
            ("hangs.sh", "sleep 600 & echo $! >>children; wait"),
            (
                "vedetta.toml",
                "[watch.fails]\nprefix = '/rooms/'\nrun = ['sh', 'fails.sh']\n\
                 [watch.hangs]\nprefix = '/slow/'\nrun = ['sh', 'hangs.sh']\ntimeout = '3s'\n\
                 [watch.lacks]\nprefix = '/slow/'\nrun = ['./none.sh']",
            ),
        ],
    );
    let mut server = Server::start(folder.path());
    server.done(&["put", "/rooms/1/livemeta", "{}"]);
    server.done(&["put", "/slow/s/x", "{}"]);
    server.done(&["put", "/slow/malformed", "{}"]);

    until("tries", || show(&server, "fails")["troubles"][0]["failures"].as_u64() >= Some(2));
    let shown = show(&server, "fails");
    let trouble = &shown["troubles"][0];
    assert_eq!((&shown["failing"], &trouble["id"]), (&json!(1), &json!("1")), "{shown}");
    assert_eq!(trouble["error"], "it ended with exit code 1: no mixer for 1", "{shown}");
    assert!(trouble["retry_in_ms"].is_u64(), "{shown}");
    let table = watcher(&server, &["show", "fails"]);
    assert!(table.out.contains("exit code 1: no mixer for 1"), "{table:?}");
    fs::write(folder.path().join("ok"), "").unwrap();
    assert_eq!(watcher(&server, &["resync", "fails"]).code, 0);
    until("success", || show(&server, "fails")["failing"] == 0);
    assert_eq!(show(&server, "fails")["troubles"], json!([]));

    until("the end of a run", || show(&server, "hangs")["failing"] == 1);
    let shown = show(&server, "hangs");
    assert_eq!(shown["troubles"][0]["error"], "it took longer than 3s and was killed");
    assert_eq!(shown["malformed"], 1, "{shown}");
    let child = lines(&folder.path().join("children"))[0].clone();
    until("the end of its child", || !alive(&child));
    until("the third", || show(&server, "lacks")["failing"] == 1);
    let error = show(&server, "lacks")["troubles"][0]["error"].clone();
    assert!(error.as_str().unwrap().starts_with("cannot start ./none.sh: No such file"), "{error}");

    server.running.signal("TERM");
    assert_eq!(server.running.wait().code(), Some(0));
    let logs = server.running.complaint();
    assert!(logs.contains("a command failed: it ended with exit code 1"), "{logs}");
    assert!(!logs.contains("no mixer"), "what a command writes is not logged: {logs}");
}

/// Reads its logs until it has taken a signal.
fn until_stopping(running: &mut Running) -> BufReader<impl Read + use<>> {
    let mut logs = BufReader::new(running.child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("stopping") {
        line.clear();
        assert!(logs.read_line(&mut line).unwrap() > 0, "it ended without a word");
    }
    logs
}

#[test]
fn sigterm_lets_a_command_that_runs_finish_and_use_the_store() {
    let folder = temp();
    let script = r#"echo >started; until test -e go; do sleep 0.02; done; "$1" kv put /done yes"#;
    let config = format!(
        "[watch.rooms]\nprefix = '/rooms/'\nrun = ['sh', 'run.sh', '{}']",
        env!("CARGO_BIN_EXE_vedetta")
    );
    write(folder.path(), &[("run.sh", script), ("vedetta.toml", &config)]);
    let mut server = Server::start(folder.path());
    server.done(&["put", "/rooms/1/x", "1"]);
    until("the start", || folder.path().join("started").exists());
    server.running.signal("TERM");
    let _logs = until_stopping(&mut server.running);
    fs::write(folder.path().join("go"), "").unwrap();
    assert_eq!(server.running.wait().code(), Some(0));
    fs::remove_file(folder.path().join("vedetta.toml")).unwrap();
    let server = Server::start(folder.path());
    assert_eq!(server.done(&["get", "/done"]), "yes");
    server.stop();
}

#[test]
fn a_command_that_outlasts_the_grace_or_a_second_signal_is_killed_with_its_children() {
    for (grace, second, code) in [("100ms", false, 0), ("10m", true, 1)] {
        let folder = temp();
        let config = format!(
            "[shutdown]\ngrace = '{grace}'\n[watch.rooms]\nprefix = '/rooms/'\nrun = ['sh', 'run.sh']"
        );
        let script = "sleep 600 & echo $! >child.new; mv child.new child; wait";
        write(folder.path(), &[("run.sh", script), ("vedetta.toml", &config)]);
        let mut server = Server::start(folder.path());
        server.done(&["put", "/rooms/1/x", "1"]);
        until("the start", || folder.path().join("child").exists());
        server.running.signal("TERM");
        let _logs = until_stopping(&mut server.running);
        let ended = if second { server.running.insist() } else { server.running.wait() };
        assert_eq!(ended.code(), Some(code), "{grace}");
        let child = lines(&folder.path().join("child"))[0].clone();
        until("the end of its child", || !alive(&child));
    }
}

#[test]
fn a_watcher_that_cannot_be_is_refused_with_one_sentence() {
    let run = "run = ['true']";
    for (name, body, sentence) in [
        ("rooms", run.to_owned(), "line 1: watch.rooms: missing field `prefix`"),
        ("rooms", "prefix = '/rooms/'".into(), "line 1: watch.rooms: missing field `run`"),
        ("rooms", format!("prefix = '/rooms'\n{run}"), "did you mean \"/rooms/\"?"),
        ("rooms", format!("prefix = ''\n{run}"), "line 2: watch.rooms.prefix: the prefix is empty"),
        (
            "rooms",
            "prefix = 'p/'\nrun = []".into(),
            "line 3: watch.rooms.run: run names no program",
        ),
        (
            "rooms",
            "prefix = 'p/'\nrun = ['', 'x']".into(),
            "line 3: watch.rooms.run: run names no program",
        ),
        (
            "rooms",
            "prefix = 'p/'\nrun = 'true'".into(),
            "line 3: watch.rooms.run is a list: give run = ['true']",
        ),
        ("rooms", format!("prefix = 'p/'\n{run}\nkeytypes = ['a']"), "unknown field `keytypes`"),
        (
            "rooms",
            format!("prefix = 'p/'\n{run}\nkey-types = []"),
            "the list of key types is empty",
        ),
        ("rooms", format!("prefix = 'p/'\n{run}\nkey-types = ['a/b']"), "is not a key type"),
        (
            "rooms",
            format!("prefix = 'p/'\n{run}\nparallel = 0"),
            "line 4: watch.rooms.parallel: invalid value: integer `0`",
        ),
        (
            "rooms",
            format!("prefix = 'p/'\n{run}\ntimeout = 'soon'"),
            "\"soon\" is not a time such as",
        ),
        ("rooms", format!("prefix = 'p/'\n{run}\nresync = '0s'"), "\"0s\" is not a time such as"),
        ("rooms", format!("prefix = 'p/'\n{run}\nresync = '9999y'"), "up to a year"),
        (
            "rooms",
            format!("prefix = 'p/'\n{run}\nkey-types = ['a']\nquiet = ['b']"),
            "watch.rooms.quiet has \"b\", which is not in its key-types",
        ),
        ("'my rooms'", format!("prefix = 'p/'\n{run}"), "\"my rooms\" cannot be the name"),
    ] {
        let folder = temp();
        write(folder.path(), &[("vedetta.toml", &format!("[watch.{name}]\n{body}"))]);
        let refused = crate::support::run(folder.path(), &["up", "--http", "127.0.0.1:0"]);
        assert_eq!(refused.code, 2, "{body}: {refused:?}");
        assert!(refused.err.contains(sentence), "{body}: {refused:?}");
        assert_eq!(refused.err.lines().count(), 1, "{body}: {refused:?}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "{body}");
    }
}

#[test]
fn doctor_finds_commands_that_cannot_be_run() {
    let folder = temp();
    write(
        folder.path(),
        &[
            ("plain.sh", "#!/bin/sh"),
            (
                "vedetta.toml",
                "[watch.a]\nprefix = 'a/'\nrun = ['sh', 'x']\n\
                 [watch.b]\nprefix = 'b/'\nrun = ['./none.sh']\n\
                 [watch.c]\nprefix = 'c/'\nrun = ['./plain.sh']\n\
                 [watch.d]\nprefix = 'd/'\nrun = ['no-such-program']",
            ),
        ],
    );
    let mut doctor = vedetta(folder.path());
    let doctor = doctor.args(["doctor", "--http", "127.0.0.1:0", "--output", "json"]);
    let ran = Ran::from(doctor.output().unwrap());
    assert_eq!(ran.code, 1, "{ran:?}");
    let checks = ran.json()["checks"].clone();
    for (name, state, detail) in [
        ("watch.a", "ok", "/sh"),
        ("watch.b", "broken", "it runs ./none.sh, which is not a file"),
        ("watch.c", "broken", "chmod +x ./plain.sh"),
        ("watch.d", "broken", "it runs no-such-program, which is not in PATH"),
    ] {
        let found = checks.as_array().unwrap().iter().find(|check| check["name"] == name).unwrap();
        assert_eq!(found["state"], state, "{found}");
        assert!(found["detail"].as_str().unwrap().contains(detail), "{found}");
    }
    let server = Server::start(folder.path());
    let answer = http().get(format!("{}/api/v1/watchers", server.url)).call();
    let list: Value = answer.unwrap().body_mut().read_json().unwrap();
    assert_eq!(list["watchers"].as_array().unwrap().len(), 4, "they start all the same: {list}");
    server.stop();
}

/// Numbers, of which zero will not do.
#[derive(Debug, Clone, Default)]
struct Number(u32);

impl State for Number {
    fn apply(&mut self, _: &str, value: Option<&[u8]>) -> Result<Effect, BoxError> {
        self.0 = str::from_utf8(value.unwrap_or(b"0"))?.parse()?;
        Ok(Effect::Wanted)
    }
}

struct NotZero;

impl Reconcile for NotZero {
    type State = Number;

    async fn reconcile(&self, _: &Id, number: Option<&Number>) -> Result<Next, BoxError> {
        match number {
            Some(Number(0)) => Err("it is zero".into()),
            _ => Ok(Next::Done),
        }
    }
}

/// This test is the program that tells. The second server has its store at the first one.
#[test]
fn watchers_of_another_program_are_listed_shown_and_run_again() {
    let (there, here) = (temp(), temp());
    let config = "[watch.numbers]\nprefix = '/own/'\nrun = ['true']";
    write(there.path(), &[("vedetta.toml", config)]);
    let store = Server::start(there.path());
    let nodes = store.etcd.replace("http://", "etcd://");
    write(here.path(), &[("vedetta.toml", &format!("[store]\nurl = '{nodes}'"))]);
    let second = Server::start(here.path());

    let program = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let cluster: vedetta::etcd::Cluster = nodes.parse().unwrap();
    let (watching, telling) = program.block_on(async {
        cluster.put("/n/1/x", "1").await.unwrap();
        cluster.put("/n/2/x", "0").await.unwrap();
        let watching = Watcher::new("/n/").start(cluster.clone(), NotZero);
        let telling = vedetta::etcd::tell(&cluster, "counts", watching.handle());
        (watching, telling)
    });
    let program_of = |server: &Server| {
        let list = watcher(server, &["list", "--output", "json"]).json();
        let all = list["watchers"].as_array().unwrap().clone();
        all.into_iter().find(|watcher| watcher["process"].is_string())
    };
    for (server, listed) in [(&store, 2), (&second, 1)] {
        until("it is told", || {
            program_of(server)
                .is_some_and(|told| told["phase"] == "following" && told["failing"] == 1)
        });
        let told = program_of(server).unwrap();
        let process = told["process"].as_str().unwrap();
        assert!(process.ends_with(&format!("-{}", std::process::id())), "{told}");
        let full = format!("counts@{process}");
        assert_eq!((&told["name"], &told["prefix"]), (&json!(full), &json!("/n/")), "{told}");
        assert_eq!(told["behind"], Value::Null, "{told}");
        let table = watcher(server, &["list"]);
        assert_eq!(table.out.lines().count(), 1 + listed, "{table:?}");
        assert!(table.out.contains(&full), "{table:?}");
        for name in ["counts", &full] {
            let shown = show(server, name);
            assert_eq!(shown["name"], json!(full), "{shown}");
            let trouble = &shown["troubles"][0];
            assert_eq!((&trouble["id"], &trouble["error"]), (&json!("2"), &json!("it is zero")));
        }
        let page = http().get(format!("{}/watchers", server.url)).call();
        let page = page.unwrap().body_mut().read_to_string().unwrap();
        assert!(page.contains(&full) && page.contains("it is zero"), "{page}");

        let done = watching.status().done;
        let again = watcher(server, &["resync", "counts"]);
        assert_eq!((again.code, again.out.as_str()), (0, "running again: 2 ids\n"), "{again:?}");
        until("it runs again", || watching.status().done > done);
        let shown = show(server, &full);
        assert_eq!(shown["name"], json!(full), "{shown}");
    }
    assert_eq!(show(&store, "numbers")["prefix"], "/own/", "its own are still there");
    let none = watcher(&store, &["show", "nobody"]);
    assert_eq!(none.code, 3, "{none:?}");

    program.block_on(telling.end());
    until("it is gone", || program_of(&store).is_none() && program_of(&second).is_none());
    program.block_on(watching.stop(std::time::Duration::ZERO));
    second.stop();
    store.stop();
}

#[test]
fn watchers_follow_an_etcd_elsewhere_when_the_store_is_one() {
    let (there, here) = (temp(), temp());
    let elsewhere = Server::start(there.path());
    let log = here.path().join("log");
    let nodes = elsewhere.etcd.replace("http://", "etcd://");
    let config = format!(
        "[store]\nurl = '{nodes}'\n[watch.rooms]\nprefix = '/rooms/'\n\
         run = ['sh', '-c', 'cat >>log; echo >>log']"
    );
    write(here.path(), &[("vedetta.toml", &config)]);
    elsewhere.done(&["put", "/rooms/1/meta", "a"]);
    let server = Server::start(here.path());
    until("the list", || lines(&log) == [r#"{"id":"1","state":{"meta":"a"}}"#]);
    server.done(&["put", "/rooms/2/meta", "ours"]); // which nobody watches
    elsewhere.done(&["put", "/rooms/1/meta", "b"]);
    until("the change", || lines(&log).len() == 2);
    assert_eq!(lines(&log)[1], r#"{"id":"1","state":{"meta":"b"}}"#);
    let shown = show(&server, "rooms");
    assert_eq!((&shown["phase"], &shown["behind"]), (&json!("following"), &Value::Null), "{shown}");

    elsewhere.stop();
    until("the loss", || show(&server, "rooms")["lost"].as_u64() > Some(0));
    let shown = show(&server, "rooms");
    assert!(shown["last_error"].as_str().is_some_and(|error| !error.is_empty()), "{shown}");
    server.stop();
}
