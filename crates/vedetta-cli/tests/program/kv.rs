//! `vedetta kv`, and the exit codes.

use std::net::TcpListener;
use std::process::Stdio;

use serde_json::json;

use crate::support::{Ran, Running, Server, http, put, run, temp, until, vedetta};

#[test]
fn keys_are_put_read_listed_and_deleted() {
    let folder = temp();
    let server = Server::start(folder.path());
    assert_eq!(server.done(&["put", "/rooms/1", "on air"]), "revision 2");
    assert_eq!(server.done(&["put", "/rooms/2", "-5 dB"]), "revision 3");
    assert_eq!(server.done(&["put", "/rooms/1", "off"]), "revision 4");
    assert_eq!(server.done(&["get", "/rooms/1"]), "off");
    assert_eq!(server.done(&["get", "/rooms/1", "--revision", "2"]), "on air");
    let table = server.done(&["get", "/rooms/", "--prefix"]);
    assert_eq!(
        table,
        "KEY       REVISION  LEASE  VALUE\n/rooms/1  4                off\n/rooms/2  3                -5 dB"
    );
    assert_eq!(server.done(&["get", "", "--prefix", "--keys-only"]), "/rooms/1\n/rooms/2");
    assert_eq!(server.done(&["get", "", "--prefix", "--keys-only", "--limit", "1"]), "/rooms/1");
    let one = server.kv(&["get", "/rooms/1", "--output", "json"]).json();
    let entry = json!({"revision": 4, "key": "/rooms/1", "value": "off", "created": 2, "modified": 4, "version": 2});
    assert_eq!(one, entry);
    assert_eq!(server.done(&["del", "/rooms/1"]), "1 deleted, revision 5");
    assert_eq!(server.done(&["del", "/rooms/", "--prefix"]), "1 deleted, revision 6");
    assert_eq!(
        server.done(&["get", "", "--prefix", "--output", "json"]),
        r#"{"revision":6,"keys":[]}"#
    );
    server.stop();
}

#[test]
fn any_bytes_come_back_as_they_went_in() {
    let folder = temp();
    let server = Server::start(folder.path());
    let value: Vec<u8> = (0..=255).collect();
    server.done_with(&["put", "a key/with? odd#%+&=chars ✓", "-"], &value);
    let got = server.command(&["kv", "get", "a key/with? odd#%+&=chars ✓"]).output().unwrap();
    assert_eq!(got.stdout, [&value[..], b"\n"].concat(), "stdout is not a terminal: as it is");
    let table = server.done(&["get", "a key", "--prefix"]);
    assert!(table.contains("\\u{1b}") && table.contains("\\xff"), "{table}");
    assert_eq!(table.lines().count(), 2, "one line for each key: {table}");
    server.stop();
}

#[test]
fn a_list_longer_than_a_page_is_whole() {
    let folder = temp();
    let server = Server::start(folder.path());
    std::thread::scope(|scope| {
        for part in 0..8 {
            let url = &server.url;
            scope.spawn(move || {
                for n in (part..1200).step_by(8) {
                    put(url, &format!("k{n:04}"), "v");
                }
            });
        }
    });
    let wanted: Vec<_> = (0..1200).map(|n| format!("k{n:04}")).collect();
    let keys = server.done(&["get", "k", "--prefix", "--keys-only"]);
    assert_eq!(keys.lines().collect::<Vec<_>>(), wanted);
    let keys = server.done(&["get", "k", "--prefix", "--keys-only", "--limit", "700"]);
    assert_eq!(keys.lines().collect::<Vec<_>>(), wanted[..700]);
    server.stop();
}

#[test]
fn a_watch_prints_changes_and_goes_on_after_a_restart_of_the_server() {
    let folder = temp();
    // An address that no other test uses, so that its port is still free for the restart.
    let mut up = vedetta(folder.path());
    let server = Server::with(up.args(["up", "--http", "127.0.0.8:0"]), folder.path());
    let address = server.url.strip_prefix("http://").unwrap().to_owned();
    server.done(&["put", "a", "before"]);
    let watch = Running::start(&mut server.command(&["kv", "watch", "a", "--prefix"]));
    server.until_watchers(1);
    server.done(&["put", "a/1", "one"]);
    server.done(&["put", "b", "not ours"]);
    server.done(&["del", "a/1"]);
    assert_eq!(watch.line().unwrap(), "3  put     a/1  one");
    assert_eq!(watch.line().unwrap(), "5  delete  a/1");
    server.stop();

    let mut again = vedetta(folder.path());
    let server = Server::with(again.args(["up", "--http", &address]), folder.path());
    server.done(&["put", "a/2", "two"]);
    assert_eq!(watch.line().unwrap(), "6  put     a/2  two");
    let lease = server.done(&["lease", "grant", "2s"]);
    server.done(&["put", "a/3", "three", "--lease", &lease]);
    assert_eq!(watch.line().unwrap(), "7  put     a/3  three");
    assert_eq!(watch.line().unwrap(), "8  expire  a/3");
    server.stop();
}

#[test]
fn a_watch_from_a_compacted_revision_says_so_and_fails() {
    let folder = temp();
    let server = Server::start(folder.path());
    for _ in 0..5 {
        server.done(&["put", "k", "v"]);
    }
    let compact = http().post(format!("{}/api/v1/compact", server.url));
    compact.send_json(json!({"revision": 5})).unwrap();
    let told = server.kv(&["watch", "k", "--from", "3"]);
    assert_eq!(told.code, 1, "{told:?}");
    assert!(told.err.contains("the oldest revision kept is 5"), "{told:?}");

    let mut watch = Running::start(
        &mut server.command(&["kv", "watch", "k", "--from", "5", "--output", "json"]),
    );
    let line: serde_json::Value = serde_json::from_str(&watch.line().unwrap()).unwrap();
    assert_eq!(
        (&line["revision"], &line["events"][0]["previous"]["version"]),
        (&json!(5), &json!(3))
    );
    watch.child.kill().unwrap();
    server.stop();
}

#[test]
fn a_lease_is_granted_kept_shown_and_revoked() {
    let folder = temp();
    let server = Server::start(folder.path());
    let lease = server.done(&["lease", "grant", "10m"]);
    server.done(&["put", "k", "v", "--lease", &lease]);
    assert_eq!(server.done(&["lease", "keep", &lease, "--once"]), format!("{lease} kept for 10m"));
    let shown = server.kv(&["lease", "show", &lease, "--output", "json"]).json();
    assert_eq!((&shown["ttl_ms"], &shown["keys"]), (&json!(600_000), &json!([{"key": "k"}])));
    assert!(server.done(&["lease", "show", &lease]).ends_with("\n  k"));
    assert!(server.done(&["lease", "list"]).contains(&lease));
    assert_eq!(server.done(&["lease", "revoke", &lease]), "revoked, revision 3");
    assert_eq!(server.kv(&["get", "k"]).code, 3);

    // Kept well beyond its time to live, and gone once nobody keeps it.
    let short = server.done(&["lease", "grant", "3s"]);
    server.done(&["put", "k", "v", "--lease", &short]);
    let mut keeper = Running::start(&mut server.command(&["kv", "lease", "keep", &short]));
    for _ in 0..5 {
        assert_eq!(keeper.line().unwrap(), format!("{short} kept for 3s"));
    }
    assert_eq!(server.done(&["get", "k"]), "v");
    keeper.child.kill().unwrap();
    until("the lease to end", || server.kv(&["get", "k"]).code == 3);
    server.stop();
}

#[test]
fn every_exit_code_means_what_the_help_says() {
    let folder = temp();
    let server = Server::start(folder.path());
    let help = run(folder.path(), &["--help"]);
    assert!(
        help.out.contains("0 done, 1 failed, 2 wrong use, 3 not found, 4 conflict, 5 cannot reach")
    );
    let lease = server.done(&["lease", "grant", "1h"]);
    for (args, code) in [
        (&["put", "k", "v"][..], 0),
        (&["get", "k", "--revision", "99"], 2),
        (&["get"], 2),
        (&["put", "", "v"], 2),
        (&["put", "k", "v", "--lease", "none"], 2),
        (&["lease", "grant", "soon"], 2),
        (&["lease", "grant", "0s"], 2),
        (&["lease", "grant", "10"], 2),
        (&["get", "k", "--limit", "3"], 2),
        (&["del", "", "--prefix"], 2),
        (&["get", "none"], 3),
        (&["del", "none"], 3),
        (&["del", "none", "--prefix"], 0),
        (&["lease", "show", "1"], 3),
        (&["lease", "keep", "1"], 3),
        (&["put", "k", "v", "--lease", "1"], 3),
        (&["lease", "revoke", &lease], 0),
    ] {
        let ran = server.kv(args);
        assert_eq!(ran.code, code, "{args:?}: {ran:?}");
        assert_eq!(ran.err.is_empty(), code == 0, "{args:?}: {ran:?}");
        if args.starts_with(&["lease", "grant"]) {
            assert!(ran.err.contains("with its unit") && ran.err.contains("10s"), "{ran:?}");
        }
    }
    server.stop();

    // A port that nobody listens on, one that answers nonsense, and no address at all.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    drop(silent);
    let nobody =
        run(folder.path(), &["kv", "get", "k", "--server", &format!("http://127.0.0.1:{port}")]);
    assert_eq!(nobody.code, 5, "{nobody:?}");
    assert!(nobody.err.contains("is `vedetta up` running there?"), "{nobody:?}");
    for server in ["nonsense", "", "ftp://127.0.0.1:1"] {
        let wrong = run(folder.path(), &["kv", "get", "k", "--server", server]);
        assert_eq!(wrong.code, 2, "{server}: {wrong:?}");
    }
}

/// A server that gives one answer to whoever asks first.
fn answer_once(answer: &'static str) -> (String, std::thread::JoinHandle<String>) {
    use std::io::{Read as _, Write as _};
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let asked = std::thread::spawn(move || {
        let (mut line, _) = listener.accept().unwrap();
        let mut request = Vec::new();
        while !request.windows(4).any(|end| end == b"\r\n\r\n") {
            let mut some = [0; 1024];
            let read = line.read(&mut some).unwrap();
            request.extend_from_slice(&some[..read]);
        }
        line.write_all(answer.as_bytes()).unwrap();
        String::from_utf8(request).unwrap()
    });
    (url, asked)
}

#[test]
fn a_conflict_is_exit_code_4_and_the_token_is_sent() {
    let folder = temp();
    let (url, asked) = answer_once(
        "HTTP/1.1 409 Conflict\r\nContent-Length: 60\r\nConnection: close\r\n\r\n\
         {\"error\":{\"code\":\"conflict\",\"message\":\"somebody was first\"}}",
    );
    let mut put = vedetta(folder.path());
    let put = put.args(["kv", "put", "k", "v"]).env("VEDETTA_SERVER", &url);
    let ran = Ran::from(put.env("VEDETTA_TOKEN", "s3cret").output().unwrap());
    assert_eq!((ran.code, ran.err.as_str()), (4, "vedetta: somebody was first\n"), "{ran:?}");
    let request = asked.join().unwrap().to_lowercase();
    assert!(request.contains("authorization: bearer s3cret"), "{request}");
}

#[test]
fn a_token_that_leaves_the_machine_unencrypted_comes_with_a_warning() {
    let folder = temp();
    // Not a loopback address, but one at which nobody is asked.
    let get = |token: &str| {
        let mut get = vedetta(folder.path());
        get.args(["kv", "get", "k", "--server", "http://0.0.0.0:1"]).env("VEDETTA_TOKEN", token);
        Ran::from(get.output().unwrap()).err
    };
    let warned = get("s3cret");
    assert!(warned.contains("VEDETTA_TOKEN goes to http://0.0.0.0:1 unencrypted"), "{warned}");
    assert!(!warned.contains("s3cret") && !get("").contains("warning"), "{warned}");
}

#[test]
fn an_answer_that_is_not_vedettas_is_a_failure_and_not_a_crash() {
    let folder = temp();
    for (answer, code) in [
        ("HTTP/1.1 500 Oops\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno", 1),
        (
            "HTTP/1.1 302 Away\r\nLocation: http://evil.example/\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
            1,
        ),
        ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello", 5),
        ("garbage\r\n\r\n", 5),
    ] {
        let (url, asked) = answer_once(answer);
        let ran = run(folder.path(), &["kv", "get", "k", "--server", &url]);
        assert_eq!(ran.code, code, "{answer}: {ran:?}");
        assert_eq!(ran.err.lines().count(), 1, "{ran:?}");
        asked.join().unwrap();
    }
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let folder = temp();
    let server = Server::start(folder.path());
    server.done_with(&["put", "k", "-"], &vec![b'x'; 1 << 20]);
    let mut get = server.command(&["kv", "get", "k"]);
    let mut get = get.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(get.stdout.take());
    let ran = Ran::from(get.wait_with_output().unwrap());
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    server.stop();
}

#[test]
fn completions_are_printed_for_each_shell() {
    let folder = temp();
    for shell in ["bash", "zsh", "fish"] {
        let ran = run(folder.path(), &["completions", shell]);
        assert!(ran.code == 0 && ran.out.contains("doctor"), "{shell}: {}", ran.err);
    }
    assert_eq!(run(folder.path(), &["completions", "abacus"]).code, 2);
}

#[test]
fn a_client_that_was_given_the_etcd_endpoint_is_told_so() {
    let folder = temp();
    let server = Server::start(folder.path());
    let ran = run(folder.path(), &["kv", "get", "k", "--server", &server.etcd]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(
        ran.err.contains("perhaps its etcd endpoint: give the address of http.listen"),
        "{ran:?}"
    );
}
