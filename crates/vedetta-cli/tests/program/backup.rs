//! `vedetta backup`, and starting on the copy.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::{Ran, Server, put, run, temp, until, vedetta};

#[test]
fn a_backup_under_load_is_a_committed_state_and_old_watchers_of_it_are_told() {
    let folder = temp();
    let server = Server::start(folder.path());
    let enough = AtomicBool::new(false);
    let copy = folder.path().join("copy.db");
    std::thread::scope(|scope| {
        // Each writer counts up; so a state that was committed has every number up to its last.
        for writer in 0..4 {
            let (url, enough) = (&server.url, &enough);
            scope.spawn(move || {
                for n in 1.. {
                    put(url, &format!("w{writer}/{n:06}"), "");
                    put(url, &format!("last/{writer}"), &n.to_string());
                    if enough.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
        }
        until("some load", || server.overview()["revision"].as_u64() > Some(100));
        let made = run(folder.path(), &["backup", "copy.db"]);
        enough.store(true, Ordering::Relaxed);
        assert_eq!(made.code, 0, "{made:?}");
    });
    assert_eq!(fs::metadata(&copy).unwrap().permissions().mode() & 0o777, 0o600);
    let newest = server.overview()["revision"].as_u64().unwrap();
    server.stop();

    let restored = folder.path().join("restored");
    fs::create_dir(&restored).unwrap();
    fs::copy(&copy, restored.join("vedetta.db")).unwrap();
    let mut up = vedetta(folder.path());
    let server =
        Server::with(up.args(["up", "--http", "127.0.0.1:0", "--data", "restored"]), folder.path());
    for writer in 0..4 {
        let last: usize = server.done(&["get", &format!("last/{writer}")]).parse().unwrap();
        let prefix = format!("w{writer}/");
        let keys = server.done(&["get", &prefix, "--prefix", "--keys-only"]);
        let count = keys.lines().count();
        assert!(count == last || count == last + 1, "writer {writer}: {last} and {count} keys");
        assert!(keys.ends_with(&format!("{count:06}")), "no gap: {keys}");
    }
    // Whoever saw revisions of the time after the backup must not believe to be up to date.
    assert!(server.overview()["revision"].as_u64().unwrap() > newest);
    let told = server.kv(&["watch", "", "--prefix", "--from", &newest.to_string()]);
    assert_eq!(told.code, 1, "{told:?}");
    assert!(told.err.contains("was compacted"), "{told:?}");
    server.done(&["put", "k", "it goes on"]);
    server.stop();
}

#[test]
fn a_server_starts_from_what_etcdctl_saved() {
    let folder = temp();
    let server = Server::start(folder.path());
    server.done(&["put", "color", "blue"]);
    let copy = folder.path().join("restored/vedetta.db");
    fs::create_dir(folder.path().join("restored")).unwrap();
    let mut etcdctl = Command::new("etcdctl");
    etcdctl.env("ETCDCTL_API", "3").env("no_proxy", "*").arg("--endpoints").arg(&server.etcd);
    let saved = Ran::from(etcdctl.args(["snapshot", "save"]).arg(&copy).output().unwrap());
    assert_eq!(saved.code, 0, "{saved:?}");
    server.stop();
    assert_eq!(fs::metadata(&copy).unwrap().len() % 512, 32, "with the hash that etcd puts behind");

    let mut up = vedetta(folder.path());
    let up = up.args(["up", "--http", "127.0.0.1:0", "--data", "restored"]);
    let server = Server::with(up, folder.path());
    assert_eq!(server.done(&["get", "color"]), "blue");
    server.done(&["put", "color", "green"]);
    server.stop();
}

#[test]
fn a_backup_never_overwrites_and_needs_a_database() {
    let folder = temp();
    let none = run(folder.path(), &["backup", "copy.db"]);
    assert_eq!(none.code, 1, "{none:?}");
    assert!(none.err.contains("there is no database at vedetta-data/vedetta.db"), "{none:?}");
    assert!(none.err.contains("check --data"), "{none:?}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);

    Server::start(folder.path()).stop();
    fs::write(folder.path().join("copy.db"), "mine").unwrap();
    let exists = run(folder.path(), &["backup", "copy.db"]);
    assert_eq!(exists.code, 1, "{exists:?}");
    assert_eq!(fs::read(folder.path().join("copy.db")).unwrap(), b"mine");
}
