//! Copies, and telling a damaged file from a sound one.

mod support;

use std::fs;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use support::{NUMBERS, aside, close, numbers, open, options, soon, write};
use vedetta_db::rusqlite::{Connection, OpenFlags};
use vedetta_db::{BackupError, Db, Options, backup, damage};

/// Bytes to copy, and how many of a copy mean that the rest is still to come. So many that there is time for a slow fsync.
const FILLED: i64 = 32 << 20;
const MOST: u64 = 28 << 20;
/// Backups, and how many at most until one write was answered during one.
const ROUNDS: usize = 3;
const MOST_ROUNDS: usize = 30;

/// Puts something into the file that takes a while to copy.
async fn fill(db: &Db, bytes: i64) {
    let fill = move |tx: &vedetta_db::Tx<'_>| {
        tx.execute_batch("CREATE TABLE filler (body BLOB NOT NULL) STRICT")?;
        let sql = "WITH RECURSIVE c (n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM c WHERE n < ?1)
                   INSERT INTO filler SELECT randomblob(4096) FROM c";
        tx.execute(sql, [bytes / 4096])?;
        Ok::<_, vedetta_db::Stop<()>>(())
    };
    db.write(vedetta_db::Purpose::Store, fill).await.unwrap();
}

/// How much of a copy under way is there. It has another name until it is whole.
fn copied(folder: &Path) -> Option<u64> {
    let entries = fs::read_dir(folder).unwrap().map(Result::unwrap);
    let mut drafts = entries.filter(|entry| entry.path().extension() == Some("partial".as_ref()));
    Some(drafts.next()?.metadata().ok()?.len())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_taken_while_writes_go_on_has_all_that_was_answered_before_it() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    fill(&db, FILLED).await;
    let (answered, stop) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicBool::new(false)));
    let meanwhile = Arc::new(AtomicI64::new(0));
    let writing = tokio::spawn({
        let (db, answered, stop) = (db.clone(), Arc::clone(&answered), Arc::clone(&stop));
        let (folder, meanwhile) = (folder.path().to_owned(), Arc::clone(&meanwhile));
        async move {
            // Part of the copy is there, and part is not.
            let copies = || copied(&folder).is_some_and(|so_far| (1..MOST).contains(&so_far));
            while !stop.load(Ordering::SeqCst) {
                let n = answered.load(Ordering::SeqCst) + 1;
                let before = copies();
                write(db.clone(), n).await.unwrap();
                answered.store(n, Ordering::SeqCst);
                meanwhile.fetch_add(i64::from(before && copies()), Ordering::SeqCst);
            }
        }
    });
    for n in 0..MOST_ROUNDS {
        if n >= ROUNDS && meanwhile.load(Ordering::SeqCst) > 0 {
            break;
        }
        let copy = folder.path().join(format!("copy{n}"));
        let (source, target) = (db.file().to_owned(), copy.clone());
        let before = answered.load(Ordering::SeqCst);
        aside(move || backup(&source, &target)).await.unwrap();
        let after = answered.load(Ordering::SeqCst);

        assert_eq!(damage(&copy).unwrap(), [""; 0]);
        let mut options = Options::new(&copy);
        options.ballast = 0;
        let restored = Db::open(&options, &[NUMBERS]).unwrap();
        assert!(restored.restored() && !db.restored(), "a copy knows that it is one");
        let stored = numbers(&restored).await;
        let last = stored.last().copied().unwrap_or(0);
        assert_eq!(stored, (1..=last).collect::<Vec<_>>(), "a state that was");
        assert!(before <= last && last <= after + 1);
        write(restored.clone(), 1_000_000).await.unwrap();
        close(&restored).await;
    }
    stop.store(true, Ordering::SeqCst);
    soon(writing).await.unwrap();
    // Asked for and answered within a part of one copy.
    assert!(meanwhile.load(Ordering::SeqCst) > 0, "the backups stopped all writes");
    close(&db).await;
}

#[tokio::test]
async fn a_backup_never_overwrites_and_leaves_nothing_when_it_fails() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    write(db.clone(), 1).await.unwrap();
    let copy = folder.path().join("copy");
    fs::write(&copy, "precious").unwrap();
    assert!(matches!(backup(db.file(), &copy), Err(BackupError::Exists(at)) if at == copy));
    assert_eq!(fs::read(&copy).unwrap(), b"precious");

    let missing = folder.path().join("missing");
    let target = folder.path().join("target");
    assert!(matches!(backup(&missing, &target), Err(BackupError::Missing(at)) if at == missing));
    let nowhere = folder.path().join("no/such/folder");
    assert!(backup(db.file(), &nowhere).is_err());
    close(&db).await;
    for entry in fs::read_dir(folder.path()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(name.starts_with("test.db") || name == "copy", "{name} was left behind");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_backups_to_one_name_one_is_made_and_no_other_file_is_touched() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    write(db.clone(), 1).await.unwrap();
    let copy = folder.path().join("copy");
    let beside = folder.path().join("copy.partial");
    fs::write(&beside, "precious").unwrap();
    let both: Vec<_> = (0..2)
        .map(|_| {
            let (source, target) = (db.file().to_owned(), copy.clone());
            tokio::spawn(aside(move || backup(&source, &target)))
        })
        .collect();
    let mut made = 0;
    for one in both {
        match soon(one).await.unwrap() {
            Ok(()) => made += 1,
            Err(error) => assert!(matches!(error, BackupError::Exists(_)), "{error:?}"),
        }
    }
    assert_eq!(made, 1);
    assert_eq!(damage(&copy).unwrap(), [""; 0]);
    assert_eq!(fs::read(&beside).unwrap(), b"precious");
    close(&db).await;
    for entry in fs::read_dir(folder.path()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let known = name.starts_with("test.db") || name == "copy" || name == "copy.partial";
        assert!(known, "{name} was left behind");
    }
}

#[tokio::test]
async fn a_damaged_page_is_found_and_not_backed_up() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path());
    for n in 0..20 {
        let fill = move |connection: &vedetta_db::Tx<'_>| {
            let sql =
                "WITH RECURSIVE c (n) AS (VALUES (?1) UNION ALL SELECT n + 1 FROM c WHERE n < ?2)
                       INSERT INTO number SELECT n FROM c";
            connection.execute(sql, [n * 1_000, n * 1_000 + 999])?;
            Ok::<_, vedetta_db::Stop<()>>(())
        };
        db.write(vedetta_db::Purpose::Store, fill).await.unwrap();
    }
    close(&db).await;
    drop(db);
    let file = options(folder.path()).file;
    assert_eq!(damage(&file).unwrap(), [""; 0]);

    let page = 4096;
    let pages = fs::metadata(&file).unwrap().len() / page;
    assert!(pages > 20);
    let mut raw = fs::OpenOptions::new().write(true).open(&file).unwrap();
    raw.seek(SeekFrom::Start(page * (pages - 3))).unwrap();
    raw.write_all(&[0xa5; 512]).unwrap();
    raw.sync_all().unwrap();
    // The log still has the good page; a checkpointed one is what is on the disk.
    for side in ["-wal", "-shm"] {
        let mut name = file.clone().into_os_string();
        name.push(side);
        let _ = fs::remove_file(name);
    }
    assert!(Connection::open_with_flags(&file, OpenFlags::SQLITE_OPEN_READ_ONLY).is_ok());
    assert!(!matches!(damage(&file), Ok(found) if found.is_empty()));
    let copy = folder.path().join("copy");
    assert!(backup(&file, &copy).is_err());
    assert!(!copy.exists());
}
