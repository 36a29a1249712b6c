//! `vedetta doctor`.

use std::fs::{self, OpenOptions};
use std::io::{BufRead as _, BufReader, Seek as _, SeekFrom, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use vedetta::db::rusqlite;

use crate::support::{Ran, Server, run, temp};

/// Runs it with a port of its own; answers how it ended and the state of a check.
fn doctor(folder: &Path, check: &str) -> (Ran, String, String) {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    fs::write(folder.join("vedetta.toml"), format!("[http]\nlisten = '{port}'")).unwrap();
    let ran = run(folder, &["doctor", "--output", "json"]);
    let checks = ran.json()["checks"].clone();
    let found = checks.as_array().unwrap().iter().find(|found| found["name"] == check);
    let found = found.unwrap_or_else(|| panic!("no check {check}: {ran:?}"));
    let text = |name: &str| found[name].as_str().unwrap().to_owned();
    (ran, text("state"), text("detail"))
}

/// Makes the data one file: as long as its log is there, what is in the log is not read from the file.
fn settle(folder: &Path) -> PathBuf {
    let file = folder.join("vedetta-data/vedetta.db");
    let last = rusqlite::Connection::open(&file).unwrap();
    last.query_row("SELECT count(*) FROM event", [], |_| Ok(())).unwrap();
    drop(last); // the last to leave moves the log into the file
    assert!(!folder.join("vedetta-data/vedetta.db-wal").exists());
    file
}

#[test]
fn a_folder_that_does_not_exist_yet_is_no_fault_and_is_not_made() {
    let folder = temp();
    let (ran, state, detail) = doctor(folder.path(), "data folder");
    assert_eq!((ran.code, state.as_str()), (0, "note"), "{ran:?}");
    assert!(detail.contains("`vedetta up` makes it"), "{detail}");
    assert!(!folder.path().join("vedetta-data").exists());
    let (_, state, _) = doctor(folder.path(), "fsync");
    assert_eq!(state, "ok");
}

#[test]
fn a_sound_folder_is_fine_with_and_without_a_server() {
    let folder = temp();
    let server = Server::start(folder.path());
    for n in 0..20 {
        server.done(&["put", &format!("k{}", n % 3), &n.to_string()]);
    }
    let (ran, state, detail) = doctor(folder.path(), "database");
    assert_eq!((ran.code, state.as_str()), (0, "ok"), "{ran:?}");
    assert!(detail.contains("revision 21"), "{detail}");
    let (_, _, detail) = doctor(folder.path(), "lock");
    assert_eq!(detail, format!("held by the process {}", server.running.child.id()));
    let address = server.url.strip_prefix("http://").unwrap();
    fs::write(folder.path().join("at.toml"), format!("[http]\nlisten = '{address}'")).unwrap();
    let beside = run(folder.path(), &["doctor", "--config", "at.toml"]);
    assert!(beside.code == 0 && beside.out.contains("a Vedetta serves"), "{beside:?}");
    server.stop();

    let before = fs::read(folder.path().join("vedetta-data/vedetta.db")).unwrap();
    let (ran, _, detail) = doctor(folder.path(), "lock");
    assert_eq!((ran.code, detail.as_str()), (0, "held by nobody"), "{ran:?}");
    assert_eq!(fs::read(folder.path().join("vedetta-data/vedetta.db")).unwrap(), before);
    let table = run(folder.path(), &["doctor"]);
    assert!(table.out.starts_with("CHECK"), "{table:?}");
}

/// What is to be done about a database that is damaged.
const MENDS: &str = "cp BACKUP NEW/vedetta.db && vedetta up --data NEW";

#[test]
fn a_flipped_bit_in_a_value_is_found() {
    let folder = temp();
    let server = Server::start(folder.path());
    server.done(&["put", "k", "the value that will be damaged"]);
    server.stop();
    let file = settle(folder.path());
    let bytes = fs::read(&file).unwrap();
    let needle = b"will be damaged";
    let at = bytes.windows(needle.len()).position(|part| part == needle).expect("it is there");
    let mut damaged = OpenOptions::new().write(true).open(&file).unwrap();
    damaged.seek(SeekFrom::Start(at as u64)).unwrap();
    damaged.write_all(b"W").unwrap();
    let (ran, state, detail) = doctor(folder.path(), "database");
    assert_eq!((ran.code, state.as_str()), (1, "broken"), "{ran:?}");
    assert!(detail.contains("the row of revision 2 is damaged"), "{detail}");
    let copied = run(folder.path(), &["backup", "copy.db"]);
    assert_eq!(copied.code, 1, "{copied:?}");
    let said = "no backup was made: the row of revision 2 is damaged";
    assert!(copied.err.contains(said), "{copied:?}");
    assert!(!folder.path().join("copy.db").exists(), "nothing that looks like a backup");
    assert!(detail.contains(MENDS), "{detail}");

    let refused = run(folder.path(), &["up", "--http", "127.0.0.1:0"]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.err.contains(MENDS), "{refused:?}");
}

#[test]
fn a_flipped_bit_in_a_lease_is_found() {
    let folder = temp();
    let server = Server::start(folder.path());
    server.done(&["lease", "grant", "600s"]);
    server.stop();
    let file = rusqlite::Connection::open(settle(folder.path())).unwrap();
    let flipped = file.execute("UPDATE lease SET ttl_ms = ttl_ms + 1", []).unwrap();
    drop(file);
    assert_eq!(flipped, 1);
    let (ran, state, detail) = doctor(folder.path(), "database");
    assert_eq!((ran.code, state.as_str()), (1, "broken"), "{ran:?}");
    assert!(detail.contains("the row of a lease is damaged"), "{detail}");

    let refused = run(folder.path(), &["up", "--http", "127.0.0.1:0"]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.err.contains("the row of a lease is damaged"), "{refused:?}");
    assert!(detail.contains(MENDS) && refused.err.contains(MENDS), "{detail}: {refused:?}");
}

#[test]
fn a_log_whose_middle_is_damaged_is_found() {
    let folder = temp();
    let server = Server::start(folder.path());
    for n in 0..10 {
        server.done(&["put", &format!("k{n}"), "a value in the log"]);
    }
    drop(server); // killed: the log stays
    let (ran, _, _) = doctor(folder.path(), "database");
    assert_eq!(ran.code, 0, "a log that was left behind is no fault: {ran:?}");
    let log = folder.path().join("vedetta-data/vedetta.db-wal");
    let mut bytes = fs::read(&log).unwrap();
    let needle = b"a value in the log";
    let first = bytes.windows(needle.len()).position(|part| part == needle).expect("it is there");
    bytes[first] ^= 1;
    fs::write(&log, &bytes).unwrap();
    let (ran, state, detail) = doctor(folder.path(), "database");
    assert_eq!((ran.code, state.as_str()), (1, "broken"), "{ran:?}");
    assert!(detail.contains("the log of") && detail.contains(MENDS), "{detail}");
    assert_eq!(fs::read(&log).unwrap(), bytes, "nothing was changed");
}

#[test]
fn a_damaged_file_a_foreign_one_and_a_newer_one_are_found() {
    let folder = temp();
    Server::start(folder.path()).stop();
    let file = settle(folder.path());
    let sound = fs::read(&file).unwrap();
    for (what, content) in [
        ("cut short", sound[..sound.len() / 2].to_vec()),
        ("no database", b"something else".repeat(1000)),
    ] {
        fs::write(&file, content).unwrap();
        let (ran, state, detail) = doctor(folder.path(), "database");
        assert_eq!((ran.code, state.as_str()), (1, "broken"), "{what}: {detail}");
        assert!(detail.contains(MENDS), "{what}: {detail}");
        let refused = run(folder.path(), &["up", "--http", "127.0.0.1:0"]);
        assert!(refused.code == 1 && refused.err.contains(MENDS), "{what}: {refused:?}");
    }
    fs::write(&file, &sound).unwrap();
    let newer = rusqlite::Connection::open(&file).unwrap();
    newer.execute_batch("PRAGMA user_version = 99").unwrap();
    drop(newer);
    let (ran, _, detail) = doctor(folder.path(), "database");
    assert!(ran.code == 1 && detail.contains("newer Vedetta"), "{detail}");
}

#[test]
fn damage_where_only_jobs_are_is_found() {
    let folder = temp();
    Server::start(folder.path()).stop();
    let file = settle(folder.path());
    let reading = rusqlite::Connection::open(&file).unwrap();
    let root = "SELECT (rootpage - 1) * (SELECT page_size FROM pragma_page_size)
                FROM sqlite_schema WHERE type = 'table' AND name = 'job'";
    let root: u32 = reading.query_row(root, [], |row| row.get(0)).unwrap();
    drop(reading);
    let damaged = OpenOptions::new().write(true).open(&file).unwrap();
    damaged.write_all_at(&[0xa5; 512], root.into()).unwrap();
    let (ran, state, detail) = doctor(folder.path(), "database");
    assert_eq!((ran.code, state.as_str()), (1, "broken"), "{ran:?}");
    assert!(detail.contains(MENDS), "{detail}");
}

/// Links to themselves: nobody can look at them, not even root.
#[test]
fn a_folder_that_cannot_be_used_is_broken_with_advice() {
    type Make = fn(&Path);
    let another = "choose another with --data";
    let look = "check the mount and the permissions, or choose another with --data";
    let cases: [(&str, &str, Make, &str); 7] = [
        ("vedetta-data", "data folder", |at| fs::write(at, "").unwrap(), another),
        ("vedetta-data", "lock", |at| fs::write(at, "").unwrap(), look),
        ("vedetta-data", "data folder", |at| symlink(at, at).unwrap(), look),
        ("vedetta-data", "permissions", |at| symlink(at, at).unwrap(), look),
        ("vedetta-data/lock", "lock", |at| symlink(at, at).unwrap(), look),
        ("vedetta-data/vedetta.db", "database", |at| symlink(at, at).unwrap(), look),
        // Nobody makes a file there.
        ("vedetta-data", "fsync", |at| symlink("/proc/self", at).unwrap(), look),
    ];
    for (path, check, make, advice) in cases {
        let folder = temp();
        let at = folder.path().join(path);
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        make(&at);
        let (ran, state, detail) = doctor(folder.path(), check);
        assert_eq!((ran.code, state.as_str()), (1, "broken"), "{path}, {check}: {detail}");
        assert!(detail.ends_with(advice), "{path}, {check}: {detail}");
    }
}

#[test]
fn a_folder_open_to_others_is_broken_with_the_command_that_mends_it() {
    let folder = temp();
    Server::start(folder.path()).stop();
    let data = folder.path().join("vedetta-data");
    fs::set_permissions(&data, fs::Permissions::from_mode(0o755)).unwrap();
    let (ran, state, detail) = doctor(folder.path(), "permissions");
    assert_eq!((ran.code, state.as_str()), (1, "broken"), "{ran:?}");
    assert!(detail.contains("chmod 700 vedetta-data"), "{detail}");
}

#[test]
fn a_port_held_by_another_program_is_broken() {
    let folder = temp();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    fs::write(folder.path().join("at.toml"), format!("[http]\nlisten = '{address}'")).unwrap();
    let ran = run(folder.path(), &["doctor", "--config", "at.toml"]);
    assert!(ran.code == 1 && ran.out.contains("choose another with --http"), "{ran:?}");

    // As with `up`, the flag wins over the environment, the environment over the file.
    let doctor = |args: &[&str], env: &str| {
        let mut command = crate::support::vedetta(folder.path());
        let command = command.args(["doctor", "--config", "at.toml"]).args(args);
        Ran::from(command.env("VEDETTA_HTTP", env).output().unwrap())
    };
    let free = "127.0.0.1:0";
    assert_eq!(doctor(&[], free).code, 0);
    assert_eq!(doctor(&["--http", free], &address.to_string()).code, 0);
    assert_eq!(doctor(&["--http", &address.to_string()], free).code, 1);
    let beyond = doctor(&["--http", "192.0.2.1:7070"], free);
    assert!(beyond.code == 2 && beyond.err.contains("people must sign in"), "{beyond:?}");
}

/// Answers every request as an etcd does that is asked for its version.
fn answer_as_etcd(listener: &TcpListener) {
    for stream in listener.incoming().map_while(Result::ok) {
        let body = r#"{"etcdserver":"3.4.23","etcdcluster":"3.4.0"}"#;
        let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close";
        let mut request = BufReader::new(&stream);
        let mut line = String::new();
        while request.read_line(&mut line).is_ok_and(|_| !line.trim().is_empty()) {
            line.clear();
        }
        let _ = write!(&stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    }
}

#[test]
fn an_etcd_on_our_port_is_not_taken_for_ours() {
    let folder = temp();
    let server = Server::start(folder.path());
    let etcd = TcpListener::bind("127.0.0.1:0").unwrap();
    let theirs = etcd.local_addr().unwrap().to_string();
    std::thread::spawn(move || answer_as_etcd(&etcd));
    let ours = server.etcd.strip_prefix("http://").unwrap().to_owned();
    let doctor = |folder: &Path, etcd: &str| {
        run(folder, &["doctor", "--http", "127.0.0.1:0", "--etcd", etcd])
    };
    let beside = doctor(folder.path(), &theirs);
    assert!(beside.code == 1 && beside.out.contains("choose another with --etcd"), "{beside:?}");
    let fine = doctor(folder.path(), &ours);
    assert!(fine.code == 0 && fine.out.contains(&format!("a Vedetta serves {ours}")), "{fine:?}");
    let elsewhere = temp();
    let other = doctor(elsewhere.path(), &ours);
    assert!(other.code == 1 && other.out.contains("a Vedetta on another folder"), "{other:?}");
    server.stop();
}

#[test]
fn programs_that_only_optional_parts_need_may_be_missing() {
    let folder = temp();
    let mut command = crate::support::vedetta(folder.path());
    let ran = Ran::from(command.arg("doctor").env("PATH", "/nowhere").output().unwrap());
    assert!(ran.out.contains("optional: not found, apt-get install janus"), "{ran:?}");
    assert!(ran.out.contains("note"), "{ran:?}");
}

#[tokio::test]
async fn what_can_lose_jobs_of_a_stream_is_told_and_nothing_is_made() {
    let nats = testing::nats::Server::start().await;
    let folder = temp();
    let client = async_nats::connect(nats.url()).await.unwrap();
    let context = async_nats::jetstream::new(client);
    let lossy = async_nats::jetstream::stream::Config {
        name: "MEDIA".into(),
        subjects: vec!["media.>".into()],
        max_age: std::time::Duration::from_secs(3600),
        ..Default::default()
    };
    context.create_stream(lossy).await.unwrap();
    let config = |url: &str| {
        let nats = "nats = { stream = 'MEDIA', subject = 'media.files', durable = 'd' }";
        let text = format!(
            "[http]\nlisten = '127.0.0.1:0'\n[jobs]\nurl = '{url}'\n[queue.media]\n{nats}\n"
        );
        fs::write(folder.path().join("vedetta.toml"), text).unwrap();
        run(folder.path(), &["doctor", "--output", "json", "--etcd", "127.0.0.1:0"])
    };
    let ran = config(&nats.url());
    assert_eq!(ran.code, 0, "{ran:?}");
    let checks = ran.json()["checks"].clone();
    let of = |name: &str| -> Vec<(String, String)> {
        let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
        let found = checks.as_array().unwrap().iter().filter(|check| check["name"] == name);
        found.map(|check| (text(&check["state"]), text(&check["detail"]))).collect()
    };
    assert_eq!(of("jobs.url"), [("ok".to_owned(), "can be reached".to_owned())]);
    let told = of("queue.media");
    assert!(told.iter().all(|(state, _)| state == "note"), "{told:?}");
    for risk in ["max_age of 1h", "one replica", "sync_interval"] {
        assert!(told.iter().any(|(_, detail)| detail.contains(risk)), "{risk}: {told:?}");
    }
    assert!(context.get_stream("MEDIA_DEAD").await.is_err(), "it only looks");

    let ran = config("nats://127.0.0.1:1");
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.out.contains("connecting to NATS"), "{ran:?}");
}

/// The state and the detail of a check.
fn of(ran: &Ran, check: &str) -> (String, String) {
    let checks = ran.json()["checks"].clone();
    let found = checks.as_array().unwrap().iter().find(|found| found["name"] == check).cloned();
    let found = found.unwrap_or_else(|| panic!("no check {check}: {ran:?}"));
    let text = |name: &str| found[name].as_str().unwrap().to_owned();
    (text("state"), text("detail"))
}

#[test]
fn whether_a_server_answers_and_takes_the_token_is_told() {
    let folder = temp();
    fs::write(folder.path().join("vedetta.toml"), "[auth]\nenabled = true\n").unwrap();
    let made = run(folder.path(), &["token", "add", "ci", "--role", "operator"]);
    assert_eq!(made.code, 0, "{made:?}");
    let server = Server::start(folder.path());
    let elsewhere = temp();
    let doctor = |url: &str, token: &str| {
        let mut command = crate::support::vedetta(elsewhere.path());
        let command = command.args(["doctor", "--output", "json", "--http", "127.0.0.1:0"]);
        Ran::from(command.args(["--server", url]).env("VEDETTA_TOKEN", token).output().unwrap())
    };
    let ran = doctor(&server.url, made.out.trim());
    let (state, detail) = of(&ran, "server");
    assert_eq!((ran.code, state.as_str()), (0, "ok"), "{ran:?}");
    assert!(detail.contains("as token:ci with the role operator"), "{detail}");
    let ran = doctor(&server.url, "vdt_of_somebody_else");
    let (state, detail) = of(&ran, "server");
    assert_eq!((ran.code, state.as_str()), (1, "broken"), "{ran:?}");
    assert!(detail.contains("the token is not known"), "{detail}");
    // As for the other commands, the environment names it, too.
    let mut command = server.command(&["doctor", "--output", "json", "--http", "127.0.0.1:0"]);
    let (state, detail) = of(&Ran::from(command.output().unwrap()), "server");
    assert!(state == "broken" && detail.contains("sign in first"), "{detail}");
    let (url, etcd) = (server.url.clone(), server.etcd.clone());
    assert_eq!(of(&doctor(&etcd, ""), "server").0, "broken", "that is the other port");
    server.stop();
    let (state, detail) = of(&doctor(&url, ""), "server");
    assert!(state == "broken" && detail.contains("is `vedetta up` running there?"), "{detail}");
    // Without one none is looked for.
    let ran = run(elsewhere.path(), &["doctor", "--output", "json", "--http", "127.0.0.1:0"]);
    assert!(!ran.out.contains("\"server\""), "{ran:?}");
}

#[tokio::test]
async fn whether_the_bus_can_be_reached_is_told() {
    let redis = testing::redis::Server::start().await;
    let folder = temp();
    let doctor = |url: &str| {
        let mut command = crate::support::vedetta(folder.path());
        let command = command.args(["doctor", "--output", "json", "--http", "127.0.0.1:0"]);
        Ran::from(command.env("VEDETTA_BUS_URL", url).output().unwrap())
    };
    let ran = doctor(&redis.url());
    assert_eq!((ran.code, of(&ran, "bus.url").0.as_str()), (0, "ok"), "{ran:?}");
    let ran = doctor("redis://:opensesame@127.0.0.1:1");
    let (state, detail) = of(&ran, "bus.url");
    assert_eq!((ran.code, state.as_str()), (1, "broken"), "{ran:?}");
    assert!(detail.contains("cannot be reached") && !ran.out.contains("opensesame"), "{ran:?}");
}

#[test]
fn tls_files_that_cannot_be_used_are_broken() {
    let folder = temp();
    let text = "[etcd]\ncert = 'none.crt'\nkey = 'none.key'\n";
    fs::write(folder.path().join("vedetta.toml"), text).unwrap();
    let ran = run(folder.path(), &["doctor", "--output", "json", "--http", "127.0.0.1:0"]);
    let (state, detail) = of(&ran, "etcd TLS");
    assert_eq!((ran.code, state.as_str()), (1, "broken"), "{ran:?}");
    assert!(detail.contains("none.crt"), "{detail}");
}
