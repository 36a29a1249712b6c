//! `vedetta up`: starting, refusing to start, stopping.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use crate::support::{Ran, Running, Server, run, temp, vedetta};

const HTTP: &str = "--http=127.0.0.1:0";

#[test]
fn it_starts_on_an_empty_folder_and_keeps_its_files_private() {
    let folder = temp();
    let server = Server::start(folder.path());
    server.done(&["put", "k", "v"]);
    let data = folder.path().join("vedetta-data");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&data), 0o700);
    let mut files = 0;
    for file in fs::read_dir(&data).unwrap() {
        let path = file.unwrap().path();
        assert_eq!(mode(&path), 0o600, "{}", path.display());
        files += 1;
    }
    assert!(files >= 4, "the database with its log, the lock, the ballast");
    server.stop();
}

/// The server, started by a shell after something else.
fn after(folder: &Path, line: &str) -> Server {
    let program = vedetta(folder);
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{line} && exec \"$0\" up --http 127.0.0.1:0")]);
    command.arg(program.get_program()).current_dir(folder);
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    Server::with(&mut command, folder)
}

#[test]
fn it_may_open_more_files_than_a_shell_lets_it() {
    let folder = temp();
    let server = after(folder.path(), "ulimit -Sn 256");
    let limits = fs::read_to_string(format!("/proc/{}/limits", server.running.child.id()));
    let limits = limits.unwrap();
    let files = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let [soft, hard] = [0, 1].map(|at| files.split_whitespace().nth(at).unwrap());
    let hard: u64 = hard.parse().unwrap();
    assert_eq!(soft.parse(), Ok(hard.min(65_536)), "{files}");
    server.stop();
}

#[test]
fn after_sigterm_it_exits_0_and_everything_is_there_after_a_restart() {
    let folder = temp();
    let server = Server::start(folder.path());
    server.done(&["put", "k", "kept"]);
    // Neither a watch nor a silent client keeps it from stopping.
    let mut watch = Running::start(&mut server.command(&["kv", "watch", "", "--prefix"]));
    server.until_watchers(1);
    server.stop();
    watch.child.kill().unwrap();
    let server = Server::start(folder.path());
    assert_eq!(server.done(&["get", "k"]), "kept");
    let mut running = server.running;
    running.signal("INT");
    assert_eq!(running.wait().code(), Some(0), "Ctrl-C does the same");
}

#[test]
fn a_terminal_that_is_gone_stops_it_unless_it_is_to_go_on() {
    let folder = temp();
    let mut server = after(folder.path(), "true");
    server.running.signal("HUP");
    assert_eq!(server.running.wait().code(), Some(0), "in good order");
    // As nohup(1) does.
    let server = after(folder.path(), "trap '' HUP");
    server.running.signal("HUP");
    server.done(&["put", "k", "it goes on"]);
    server.stop();
}

#[test]
fn a_second_signal_ends_it_at_once() {
    use std::io::{Read as _, Write as _};
    let folder = temp();
    let mut server = Server::start(folder.path());
    // A request that is not finished holds up the graceful end.
    let address = server.url.strip_prefix("http://").unwrap();
    let mut line = std::net::TcpStream::connect(address).unwrap();
    let head = "PUT /api/v1/kv/k HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Expect: 100-continue\r\nContent-Length: 99\r\n\r\n";
    line.write_all(head.as_bytes()).unwrap();
    line.read_exact(&mut [0; 25]).unwrap();
    // What comes with it, as from timeout(1), is the same signal.
    server.running.signal("TERM");
    server.running.signal("INT");
    // It has taken the first signal once nobody new gets in.
    crate::support::until("the door to close", || std::net::TcpStream::connect(address).is_err());
    assert!(server.running.child.try_wait().unwrap().is_none(), "it waits for the request");
    assert_eq!(server.running.insist().code(), Some(1));
    drop(line);
}

#[test]
fn requests_that_outlast_the_grace_time_are_left() {
    use std::io::{Read as _, Write as _};
    let folder = temp();
    fs::write(folder.path().join("vedetta.toml"), "[shutdown]\ngrace = '10ms'").unwrap();
    let server = Server::start(folder.path());
    let mut line =
        std::net::TcpStream::connect(server.url.strip_prefix("http://").unwrap()).unwrap();
    let head = "PUT /api/v1/kv/k HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Expect: 100-continue\r\nContent-Length: 99\r\n\r\n";
    line.write_all(head.as_bytes()).unwrap();
    line.read_exact(&mut [0; 25]).unwrap();
    server.stop();
}

#[test]
fn a_second_up_on_the_same_folder_is_refused_with_the_pid_that_has_it() {
    let folder = temp();
    let server = Server::start(folder.path());
    let address = server.url.strip_prefix("http://").unwrap();
    let pid = server.running.child.id();
    for http in ["127.0.0.1:0", address] {
        let second = run(folder.path(), &["up", "--http", http]);
        assert_eq!(second.code, 1, "{second:?}");
        assert!(second.err.contains(&format!("in use by the process {pid}")), "{second:?}");
        assert_eq!(second.err.lines().count(), 1, "{second:?}");
        assert_eq!(second.out, "");
    }
    server.stop();
}

#[test]
fn a_taken_port_is_refused_and_nothing_is_made() {
    let folder = temp();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for (flag, args) in [
        ("--http", &["up", "--http", &address][..]),
        ("--etcd", &["up", "--http", "127.0.0.1:0", "--etcd", &address]),
    ] {
        let refused = run(folder.path(), args);
        assert_eq!((refused.code, refused.out.as_str()), (1, ""), "{refused:?}");
        assert!(refused.err.contains(&address) && refused.err.contains(flag), "{refused:?}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

#[test]
fn wrong_settings_are_refused_with_one_sentence_and_nothing_is_made() {
    for (config, args, sentence) in [
        (
            "[http]\nlisten = '127.0.0.1:0'\ncolor = 'red'",
            &[][..],
            "vedetta.toml, line 3: http.color: unknown field `color`",
        ),
        ("[store]\nquota = 'much'", &[], "line 2: store.quota: \"much\" is not a size"),
        ("[store]\nurl = 'redis://localhost'", &[], "give \"embedded\""),
        ("[store]\nurl = 'etcd://'", &[], "store.url cannot be used"),
        ("[store]\nurl = 'etcd://me:secret@a'", &[], "no user and no password"),
        ("[store]\nuser = 'me'", &[], "store.user is set, but store.url is \"embedded\""),
        (
            "[store]\nurl = 'etcd://a'\ncert = 'c'\nca = 'a'",
            &[],
            "store.cert is set and store.key is not",
        ),
        ("[store]\nurl = 'etcd://a'\nuser = 'me'", &[], "as VEDETTA_STORE_PASSWORD"),
        (
            "[http]\nlisten = '0.0.0.0:7070'",
            &[],
            "cannot listen on 0.0.0.0:7070: beyond loopback people must sign in",
        ),
        ("", &["--http", "192.0.2.1:80"], "or use a loopback address"),
        ("", &["--config", "none.toml"], "cannot read the config file none.toml"),
        ("", &["--http", "localhost"], "localhost"),
        ("", &["--colour"], "--colour"),
        ("", &["--data", "vedetta.toml"], "vedetta.toml is not a folder"),
    ] {
        let folder = temp();
        fs::write(folder.path().join("vedetta.toml"), config).unwrap();
        let refused = run(folder.path(), &[&["up"], args].concat());
        assert_eq!(refused.code, 2, "{config} {args:?}: {refused:?}");
        assert!(refused.err.contains(sentence), "{config} {args:?}: {refused:?}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "{config} {args:?}");
    }
}

#[test]
fn an_unreadable_folder_is_refused() {
    let folder = temp();
    // Nothing can be made in there, whoever asks.
    let refused = run(folder.path(), &["up", HTTP, "--data", "/proc/self/nothing"]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(
        refused.err.contains("cannot use /proc/self/nothing as the data folder"),
        "{refused:?}"
    );
    assert_eq!(refused.err.lines().count(), 1, "{refused:?}");
}

fn sql(file: &Path, text: &str) {
    vedetta::db::rusqlite::Connection::open(file).unwrap().execute_batch(text).unwrap();
}

fn refused_unchanged(folder: &Path, file: &Path) -> Ran {
    let before = fs::read(file).unwrap();
    let refused = run(folder, &["up", HTTP]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.err.contains("nothing was changed"), "{refused:?}");
    assert_eq!(fs::read(file).unwrap(), before);
    refused
}

#[test]
fn a_newer_file_is_refused_and_stays_as_it_was() {
    for newer in [
        "PRAGMA user_version = 99",
        "UPDATE vedetta_schema SET version = 99 WHERE component = 'kv'",
    ] {
        let folder = temp();
        Server::start(folder.path()).stop();
        let file = folder.path().join("vedetta-data/vedetta.db");
        sql(&file, newer);
        let refused = refused_unchanged(folder.path(), &file);
        assert!(refused.err.contains("was written by a newer Vedetta"), "{refused:?}");
    }
}

#[test]
fn a_file_of_another_program_is_refused_and_stays_as_it_was() {
    let folder = temp();
    let data = folder.path().join("vedetta-data");
    fs::create_dir(&data).unwrap();
    let file = data.join("vedetta.db");
    sql(&file, "CREATE TABLE theirs (x); INSERT INTO theirs VALUES (1)");
    let refused = refused_unchanged(folder.path(), &file);
    assert!(refused.err.contains("is not a Vedetta database"), "{refused:?}");

    fs::write(&file, "not a database at all, but long enough to look at".repeat(100)).unwrap();
    let refused = run(folder.path(), &["up", HTTP]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert_eq!(refused.err.lines().count(), 1, "{refused:?}");
}

#[test]
fn a_flag_wins_over_the_environment_and_that_over_the_file() {
    let folder = temp();
    fs::write(folder.path().join("vedetta.toml"), "[http]\nlisten = '127.0.0.2:0'").unwrap();
    fs::write(folder.path().join("other.toml"), "[http]\nlisten = '127.0.0.3:0'").unwrap();
    let host = |args: &[&str], vars: &[(&str, &str)]| {
        let mut up = vedetta(folder.path());
        up.arg("up").args(args).envs(vars.iter().copied());
        let server = Server::with(&mut up, folder.path());
        let url = server.url.clone();
        server.stop();
        url.strip_prefix("http://").unwrap().split_once(':').unwrap().0.to_owned()
    };
    let env = ("VEDETTA_HTTP", "127.0.0.4:0");
    assert_eq!(host(&[], &[]), "127.0.0.2", "the default file");
    assert_eq!(host(&["--config", "other.toml"], &[]), "127.0.0.3", "the named file");
    assert_eq!(host(&[], &[("VEDETTA_CONFIG", "other.toml")]), "127.0.0.3");
    assert_eq!(host(&[], &[env]), "127.0.0.4", "the environment");
    assert_eq!(host(&["--http", "127.0.0.5:0"], &[env]), "127.0.0.5", "the flag");

    assert_eq!(host(&[], &[("VEDETTA_DATA", "by-env")]), "127.0.0.2");
    assert!(folder.path().join("by-env/vedetta.db").exists());
    host(&["--data", "by-flag"], &[("VEDETTA_DATA", "not-used")]);
    assert!(folder.path().join("by-flag/vedetta.db").exists());
    assert!(!folder.path().join("not-used").exists());
    // The defaults of the file are compared in the unit tests; here that of the folder.
    assert!(folder.path().join("vedetta-data/vedetta.db").exists());
}

#[test]
fn logs_are_json_when_nobody_watches_and_human_on_request() {
    let folder = temp();
    for (args, json) in [(&["up", HTTP][..], true), (&["up", HTTP, "--log-format", "human"], false)]
    {
        let mut server = Server::with(vedetta(folder.path()).args(args), folder.path());
        server.running.signal("TERM");
        server.running.wait();
        let logs = server.running.complaint();
        assert!(logs.contains("stopped"), "{logs}");
        for line in logs.lines() {
            let parsed = serde_json::from_str::<serde_json::Value>(line);
            assert_eq!(parsed.is_ok(), json, "{line}");
        }
    }
}
