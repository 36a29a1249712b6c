//! Who may open which file, and what opening changes.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use support::{NUMBERS, close, numbers, open, options, write};
use vedetta_db::rusqlite::{Connection, Result};
use vedetta_db::{DataFolder, Db, FolderError, OpenError, Schema};

const FIRST: &str = "CREATE TABLE person (name TEXT NOT NULL); INSERT INTO person VALUES ('Ada');";
const SECOND: &str = "ALTER TABLE person ADD COLUMN born INTEGER; UPDATE person SET born = 1815;";
const THIRD: &str = "INSERT INTO person VALUES ('Alan', 1912);";

const fn people(steps: &'static [&'static str]) -> Schema {
    Schema { component: "people", steps }
}

/// Runs `query` on a connection of its own.
fn ask<T: vedetta_db::rusqlite::types::FromSql>(folder: &Path, query: &str) -> Result<T> {
    Connection::open(options(folder).file)?.query_row(query, [], |row| row.get(0))
}

fn bytes(folder: &Path) -> Vec<u8> {
    fs::read(options(folder).file).unwrap()
}

#[tokio::test]
async fn tables_are_brought_up_step_by_step_and_no_step_is_done_twice() {
    let folder = tempfile::tempdir().unwrap();
    let version = "SELECT version FROM vedetta_schema WHERE component = 'people'";
    let told = "SELECT group_concat(name || coalesce(born, '?')) FROM person";
    for (steps, seen) in [
        (people(&[FIRST]), Err(())),
        (people(&[FIRST]), Err(())),
        (people(&[FIRST, SECOND, THIRD]), Ok("Ada1815,Alan1912")),
        (people(&[FIRST, SECOND, THIRD]), Ok("Ada1815,Alan1912")),
    ] {
        // Another component beside it has a version of its own.
        let db = Db::open(&options(folder.path()), &[NUMBERS, steps]).unwrap();
        close(&db).await;
        let found: Result<String> = ask(folder.path(), told);
        assert_eq!(found.as_deref().map_err(drop), seen);
        let known = i64::try_from(steps.steps.len()).unwrap();
        assert_eq!(ask::<i64>(folder.path(), version), Ok(known));
        assert_eq!(ask::<i64>(folder.path(), "SELECT count(*) FROM vedetta_schema"), Ok(2));
    }
}

#[tokio::test]
async fn a_step_that_fails_leaves_the_version_before_it() {
    let folder = tempfile::tempdir().unwrap();
    let broken = people(&[FIRST, "CREATE TABLE half (n); this is not SQL"]);
    let refused = Db::open(&options(folder.path()), &[broken]);
    assert!(matches!(refused, Err(OpenError::Sql { .. })));
    assert!(ask::<i64>(folder.path(), "SELECT count(*) FROM half").is_err(), "undone whole");
    let db = Db::open(&options(folder.path()), &[people(&[FIRST, SECOND])]).unwrap();
    close(&db).await;
    assert_eq!(ask::<i64>(folder.path(), "SELECT born FROM person"), Ok(1815));
}

#[tokio::test]
async fn a_file_of_a_newer_program_is_refused_and_left_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let db = Db::open(&options(folder.path()), &[people(&[FIRST, SECOND])]).unwrap();
    close(&db).await;
    drop(db);
    let before = bytes(folder.path());
    match Db::open(&options(folder.path()), &[NUMBERS, people(&[FIRST])]) {
        Err(error @ OpenError::Newer { .. }) => {
            let told = error.to_string();
            assert!(told.contains("people version 2, this one knows 1"), "{told}");
            assert!(told.contains("nothing was changed"), "{told}");
        }
        other => panic!("{other:?}"),
    }
    assert!(bytes(folder.path()) == before, "a refused file was changed");

    let connection = Connection::open(options(folder.path()).file).unwrap();
    connection.pragma_update(None, "user_version", 99).unwrap();
    drop(connection);
    let before = bytes(folder.path());
    match Db::open(&options(folder.path()), &[people(&[FIRST, SECOND])]) {
        Err(OpenError::Newer { what, found, .. }) => assert_eq!((&*what, found), ("file", 99)),
        other => panic!("{other:?}"),
    }
    assert!(bytes(folder.path()) == before, "a refused file was changed");
}

#[tokio::test]
async fn a_file_of_somebody_else_is_refused_and_left_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let connection = Connection::open(options(folder.path()).file).unwrap();
    connection.execute_batch("CREATE TABLE theirs (n); INSERT INTO theirs VALUES (1)").unwrap();
    drop(connection);
    let before = bytes(folder.path());
    let refused = Db::open(&options(folder.path()), &[NUMBERS]);
    assert!(matches!(refused, Err(OpenError::Foreign { .. })));
    assert!(bytes(folder.path()) == before, "a refused file was changed");

    let letter = "Dear diary, this is no database. ".repeat(100);
    fs::write(options(folder.path()).file, &letter).unwrap();
    let refused = Db::open(&options(folder.path()), &[NUMBERS]);
    assert!(matches!(refused, Err(OpenError::Sql { .. })));
    assert!(bytes(folder.path()) == letter.as_bytes(), "a refused file was changed");

    let nowhere = folder.path().join("missing/folder");
    let refused = Db::open(&options(&nowhere), &[NUMBERS]);
    assert!(matches!(refused, Err(OpenError::Unreadable { .. })));
}

#[tokio::test]
async fn the_files_are_readable_by_their_owner_only() {
    let folder = tempfile::tempdir().unwrap();
    let data = DataFolder::open(&folder.path().join("data")).unwrap();
    let db = open(data.path());
    write(db.clone(), 1).await.unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(data.path()), 0o700);
    let files: Vec<_> =
        fs::read_dir(data.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.len() >= 3, "the lock, the database, its log: {files:?}");
    for file in files {
        assert_eq!(mode(&file), 0o600, "{}", file.display());
    }
    assert_eq!(numbers(&db).await, [1]);
    close(&db).await;
}

#[test]
fn a_data_folder_is_held_by_one_at_a_time_and_the_second_is_told_by_whom() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data");
    let held = DataFolder::open(&path).unwrap();
    match DataFolder::open(&path) {
        Err(error @ FolderError::Held { .. }) => {
            let told = error.to_string();
            assert!(told.contains(&format!("process {}", std::process::id())), "{told}");
        }
        other => panic!("{other:?}"),
    }
    drop(held);
    let again = DataFolder::open(&path).unwrap();
    assert_eq!(again.database().parent(), Some(&*path));

    let file = folder.path().join("file");
    fs::write(&file, "not a folder").unwrap();
    assert!(matches!(DataFolder::open(&file), Err(FolderError::Unusable { .. })));
}

#[tokio::test]
async fn a_log_has_its_room_from_the_start_and_what_is_in_it_survives_a_crash() {
    let (folder, crashed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut roomy = options(folder.path());
    roomy.ballast = 1 << 20;
    let db = Db::open(&roomy, &[NUMBERS]).unwrap();
    let log = |folder: &Path| folder.join("test.db-wal");
    let room = fs::metadata(log(folder.path())).unwrap().len();
    assert!(room > 12 << 20, "{room}");
    write(db.clone(), 1).await.unwrap();
    write(db.clone(), 2).await.unwrap();
    // What a killed process leaves: a log that ends in zeros.
    for name in ["test.db", "test.db-wal"] {
        fs::copy(folder.path().join(name), crashed.path().join(name)).unwrap();
    }
    assert_eq!(fs::metadata(log(folder.path())).unwrap().len(), room, "it did not have to grow");
    close(&db).await;
    assert_eq!(fs::metadata(log(folder.path())).map_or(0, |log| log.len()), 0);
    for opening in 1..=2 {
        let db = open(crashed.path());
        assert_eq!(numbers(&db).await, [1, 2], "opening {opening}");
        close(&db).await;
    }
}

/// A file that is closed later takes the locks of whoever opened it in the meantime along.
#[tokio::test]
async fn a_database_that_was_closed_is_open_nowhere() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    let file = options(folder.path()).file.canonicalize().unwrap();
    let is_open = || {
        let open = fs::read_dir("/proc/self/fd").expect("a process has descriptors");
        let mut names = open.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        names.any(|name| name == file)
    };
    write(db.clone(), 1).await.unwrap();
    assert_eq!((numbers(&db).await, is_open()), (vec![1], true));
    close(&db).await;
    assert!(!is_open(), "though there is still a handle");
    drop(db);
}
