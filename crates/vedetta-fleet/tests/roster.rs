//! What a roster does: one suite, on the embedded file and a real PostgreSQL.

use std::time::{Duration, SystemTime};

use tempfile::TempDir;
use vedetta_db::postgres::Postgres;
use vedetta_db::{Db, Options};
use vedetta_fleet::Roster;
use vedetta_fleet::postgres::PostgresRoster;
use vedetta_fleet::roster::{All, Status, SupervisorRecord, WorkerRecord};
use vedetta_fleet::sqlite::SqliteRoster;

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

fn worker(id: &str) -> WorkerRecord {
    WorkerRecord {
        id: id.into(),
        supervisor: Some("default:here".into()),
        queues: vec!["mail".into(), "media".into()],
        pid: 4_194_303,
        host: "here".into(),
        version: "1.2.3".into(),
        status: Status::Running,
        inside: false,
        birth: Some("boot:17".into()),
        capacity: 4,
        note: None,
        started: at(1_700_000_000),
        seen: Duration::ZERO,
        created: at(1_700_000_001),
        updated: at(1_700_000_002),
    }
}

async fn suite(roster: impl Roster) {
    assert_eq!(roster.all().await.unwrap(), All::default());
    let supervisor = |name: &str, seen| SupervisorRecord {
        name: name.into(),
        host: "here".into(),
        halted: false,
        seen: Duration::from_secs(seen),
    };
    let halted = SupervisorRecord { halted: true, ..supervisor("told:there", 1200) };
    let alone = WorkerRecord {
        supervisor: None,
        queues: vec!["mail".into()],
        status: Status::Paused,
        inside: true,
        birth: None,
        note: Some("it\nwas told".into()),
        seen: Duration::from_secs(100),
        ..worker("b")
    };
    let saved = [worker("c"), alone.clone()];
    roster
        .save(&saved, &[supervisor("default:here", 0), supervisor("old:there", 900), halted])
        .await
        .unwrap();
    let all = roster.all().await.unwrap();
    let ids: Vec<&str> = all.workers.iter().map(|worker| worker.id.as_str()).collect();
    assert_eq!(ids, ["b", "c"]);
    let timeless = |record: &WorkerRecord| WorkerRecord { seen: Duration::ZERO, ..record.clone() };
    assert_eq!(timeless(&all.workers[1]), worker("c"), "every field comes back");
    assert_eq!(timeless(&all.workers[0]), timeless(&alone));
    // How long ago, and not when: a little more than was said.
    let seen = all.workers[0].seen.as_secs();
    assert!((100..160).contains(&seen), "{seen}");
    assert!(all.workers[1].seen.as_secs() < 60);
    assert!((900..960).contains(&all.supervisors[1].seen.as_secs()));
    let halted: Vec<bool> = all.supervisors.iter().map(|it| it.halted).collect();
    assert_eq!(halted, [false, false, true]);

    // Again: what changed is replaced, but for when it registered.
    let stopped = WorkerRecord {
        status: Status::Stopped,
        note: Some("exit code 1".into()),
        created: at(1_800_000_000),
        updated: at(1_800_000_000),
        ..worker("c")
    };
    roster.save(std::slice::from_ref(&stopped), &[]).await.unwrap();
    let all = roster.all().await.unwrap();
    assert_eq!(all.workers.len(), 2);
    let expected = WorkerRecord { created: worker("c").created, ..stopped };
    assert_eq!(timeless(&all.workers[1]), expected);

    assert_eq!(roster.prune(Duration::from_secs(1000)).await.unwrap(), 0);
    assert_eq!(roster.prune(Duration::from_secs(500)).await.unwrap(), 1, "a supervisor");
    assert_eq!(roster.prune(Duration::from_secs(90)).await.unwrap(), 1, "a worker");
    let all = roster.all().await.unwrap();
    assert_eq!((all.workers.len(), all.supervisors.len()), (1, 2), "one was told something");
    let told = SupervisorRecord { halted: true, ..supervisor("default:here", 0) };
    roster.keep(&[told]).await.unwrap();
    assert!(roster.all().await.unwrap().supervisors[0].halted, "it waited for the disk");
    let long = Duration::from_secs(31 * 24 * 3600);
    let forgotten = SupervisorRecord { halted: true, seen: long, ..supervisor("told:there", 0) };
    roster.save(&[], &[forgotten]).await.unwrap();
    assert_eq!(roster.prune(Duration::from_secs(90)).await.unwrap(), 1, "it is too long ago");
    roster.save(&[], &[]).await.unwrap();
}

#[tokio::test]
async fn the_roster_of_the_embedded_file_keeps_every_field_and_forgets_the_silent() {
    let folder = TempDir::new().unwrap();
    let mut options = Options::new(folder.path().join("fleet.db"));
    options.ballast = 0;
    let db = Db::open(&options, &[vedetta_fleet::sqlite::SCHEMA]).unwrap();
    suite(SqliteRoster::new(db)).await;
}

#[tokio::test]
async fn the_roster_of_a_postgresql_keeps_every_field_and_forgets_the_silent() {
    let server = testing::postgres::Server::start().await;
    let schemas = [vedetta_fleet::postgres::SCHEMA];
    suite(PostgresRoster::new(Postgres::open(&server.url(), &schemas).await.unwrap())).await;
}
