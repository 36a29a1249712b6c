//! `vedetta stage`, on a PostgreSQL that other programs work on.

use std::time::Duration;

use testing::postgres;
use vedetta::db::postgres::Postgres;
use vedetta::stage::postgres::{Records, SCHEMA};
use vedetta::stage::{Fate, Records as _};

use crate::support::{Ran, Server, run, temp, vedetta};

const FAR: Duration = Duration::from_secs(3600);

/// What programs left behind: orders 1 and 2 could not be paid, 3 is to be packed in an hour.
async fn leave_records(url: &str) {
    let records = Records::new(Postgres::open(url, &[SCHEMA]).await.unwrap());
    let pay = records.lane("order", "pay").await.unwrap();
    let pack = records.lane("order", "pack").await.unwrap();
    let visits = [("1", 0, Duration::ZERO), ("2", 0, Duration::ZERO)];
    records.enqueue(pay, &visits).await.unwrap();
    records.enqueue(pack, &[("3", 0, FAR)]).await.unwrap();
    for claim in records.claim(pay, &[0], 2, FAR).await.unwrap().claims {
        let (after, not_before) = (FAR, Duration::ZERO);
        let fate =
            Fate::Failed { after, not_before, error: "declined\n\x1b[31m".into(), park: true };
        records.settle(pay, &[(claim, fate)]).await.unwrap();
    }
}

#[test]
fn the_stages_of_a_postgresql_are_listed_shown_and_retried() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (_postgres, url) = runtime.block_on(async {
        let server = postgres::Server::start().await;
        let url = server.database().await;
        leave_records(&url).await;
        (server, url)
    });
    let folder = temp();
    let server = Server::with(
        vedetta(folder.path()).args(["up", "--http", "127.0.0.1:0"]).env("VEDETTA_JOBS_URL", &url),
        folder.path(),
    );
    let stage =
        |args: &[&str]| -> Ran { server.command(&["stage"]).args(args).output().unwrap().into() };

    let listed = stage(&["list"]);
    let rows: Vec<Vec<&str>> =
        listed.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[1][..7], ["order", "pack", "1", "0", "0", "0", "0"], "{listed:?}");
    assert_eq!(rows[2][..7], ["order", "pay", "2", "0", "0", "0", "2"], "{listed:?}");

    let parked = stage(&["list", "order", "--parked", "--limit", "1"]);
    assert_eq!(parked.out.lines().count(), 3, "{parked:?}");
    assert!(parked.out.ends_with("… and more: --limit shows them\n"), "{parked:?}");
    assert!(parked.out.contains("parked") && parked.out.contains("declined \\u{1b}"), "{parked:?}");

    assert!(stage(&["retry", "order", "pay", "1"]).out.starts_with("due now"));
    let shown = stage(&["show", "order", "1", "--output", "json"]).json();
    assert_eq!(shown["records"][0]["state"], "due");
    assert_eq!(stage(&["retry", "order", "pay", "--all"]).out, "due now: 1\n");
    assert_eq!(stage(&["list", "order", "--parked"]).out.lines().count(), 1);

    for (args, code) in [
        (&["retry", "order", "pay", "9"][..], 3),
        (&["list", "nothing"], 3),
        (&["show", "order", "9"], 3),
        (&["retry", "order", "pay"], 2),
        (&["list", "--parked"], 2),
    ] {
        assert_eq!(stage(args).code, code, "{args:?}");
    }
}

#[test]
fn a_jobs_url_that_cannot_be_used_is_refused_without_telling_its_secret() {
    let folder = temp();
    for (url, code) in
        [("mysql://me:secret@localhost/x", 2), ("postgres://me:secret@127.0.0.1:1/x", 1)]
    {
        let up = vedetta(folder.path())
            .args(["up", "--http", "127.0.0.1:0", "--etcd", "127.0.0.1:0"])
            .env("VEDETTA_JOBS_URL", url)
            .output()
            .unwrap();
        let ran = Ran::from(up);
        assert_eq!(ran.code, code, "{ran:?}");
        assert!(ran.err.contains("jobs.url") && !ran.err.contains("secret"), "{ran:?}");
    }
    let doctor = vedetta(folder.path())
        .arg("doctor")
        .env("VEDETTA_JOBS_URL", "postgres://me:secret@127.0.0.1:1/x")
        .output();
    let doctor = Ran::from(doctor.unwrap());
    assert_eq!(doctor.code, 1, "{doctor:?}");
    assert!(doctor.out.contains("cannot reach PostgreSQL"), "{doctor:?}");
    assert!(!doctor.out.contains("secret"), "{doctor:?}");
    let shown = run(folder.path(), &["stage", "list", "--server", "http://127.0.0.1:1"]);
    assert_eq!(shown.code, 5);
}
