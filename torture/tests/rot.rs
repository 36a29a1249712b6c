//! Bit rot: one flipped bit anywhere in a file is reported, or changes nothing; it is never served.
//!
//! `TORTURE_FLIPS` for more flips, `TORTURE_SEED` for others.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use rusqlite::Connection;
use tempfile::TempDir;
use tokio::time::timeout;
use torture::bed::{self, FILE, How, memory_folder};
use torture::story::{LONG, PATIENCE};
use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{
    Delete, Event, KeyValue, KvError, LeaseId, Op, Put, Range, Store, Txn, WatchError, WatchOptions,
};

const PAGE: usize = 4096;

/// Everything a store can be asked for.
#[derive(Debug, PartialEq)]
struct Content {
    revision: Revision,
    compacted: Revision,
    history: Vec<Event>,
    now: Vec<KeyValue>,
    leases: Vec<(LeaseId, u128, Vec<bytes::Bytes>)>,
}

async fn read(store: &Store) -> Result<Content, String> {
    let status = store.status();
    let from = Some(status.compacted.max(Revision::FRESH));
    let mut history: Vec<Event> = Vec::new();
    let mut watcher = store
        .watch(KeyRange::all(), WatchOptions { from, ..WatchOptions::default() })
        .map_err(|error| error.to_string())?;
    while status.revision > Revision::FRESH
        && history.last().is_none_or(|last| last.revision < status.revision)
    {
        let batch = watcher.next().await.map_err(|error| error.to_string())?;
        history.extend(batch.iter().cloned());
    }
    let now = store.range(Range::new(KeyRange::all())).await.map_err(|error| error.to_string())?;
    let lease = |id| {
        let info = store.lease(id)?;
        Some((id, info.ttl.as_millis(), info.keys))
    };
    let leases = store.leases().into_iter().filter_map(lease).collect();
    Ok(Content {
        revision: status.revision,
        compacted: status.compacted,
        history,
        now: now.keys,
        leases,
    })
}

/// A value that can be told from others, at times longer than a page.
fn value(number: u64) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(number);
    let length = if rng.u8(..6) == 0 { rng.usize(3_000..12_000) } else { rng.usize(1..200) };
    std::iter::repeat_with(|| rng.u8(..)).take(length).collect()
}

/// A store with a past: keys put again and again, deleted, leased; half of it compacted.
async fn fill(store: &Store, writes: u64) {
    let lease = store.grant(LeaseId::new(77), LONG).await.unwrap();
    for number in 0..writes {
        let key = |n: u64| format!("k/{:02}", n % 37);
        match number % 10 {
            9 => {
                let range = KeyRange::One(key(number * 7).into());
                store.delete(Delete { range, previous: false }).await.unwrap();
            }
            8 => {
                let puts = (0..4).map(|n| Op::Put(Put::new(key(number + n), value(number))));
                let txn = Txn { then: puts.collect(), ..Txn::default() };
                store.txn(txn).await.unwrap();
            }
            7 => drop(store.put(Put::new("leased", value(number)).lease(lease)).await.unwrap()),
            _ => drop(store.put(Put::new(key(number * 3), value(number))).await.unwrap()),
        }
        if number == writes / 2 {
            store.compact(store.status().revision, true).await.unwrap();
        }
    }
    // Short ones, so that the newest page has several rows.
    for number in 0..7_u8 {
        store.put(Put::new("last", vec![number])).await.unwrap();
    }
}

/// A closed store: its files and what they hold.
struct Closed {
    files: BTreeMap<String, Vec<u8>>,
    content: Content,
    /// Which table each page of the database belongs to, its inside or a leaf.
    pages: Vec<(usize, String)>,
}

impl Closed {
    async fn new(writes: u64) -> Self {
        Self::after(writes, true).await
    }

    /// The files of a store that was killed, not closed: most is in the log.
    async fn killed(writes: u64) -> Self {
        Self::after(writes, false).await
    }

    async fn after(writes: u64, closing: bool) -> Self {
        let folder = memory_folder();
        let store = How::default().open(folder.path()).await.unwrap();
        fill(&store, writes).await;
        if closing {
            store.close().await;
        }
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(folder.path()).unwrap().map(Result::unwrap) {
            let name = entry.file_name().into_string().unwrap();
            if name == FILE || name.ends_with("-wal") {
                files.insert(name, fs::read(entry.path()).unwrap());
            }
        }
        let (copy, store) = open_copy(&files, |_| {}).await;
        let store = store.unwrap();
        let content = read(&store).await.unwrap();
        store.close().await;
        let db = Connection::open(copy.path().join(FILE)).unwrap();
        let mut pages = db.prepare("SELECT pageno, name FROM dbstat ORDER BY pageno").unwrap();
        let pages = pages
            .query_map([], |row| Ok((row.get::<_, u32>(0)? as usize, row.get(1)?)))
            .unwrap()
            .collect::<Result<_, _>>()
            .unwrap();
        Self { files, content, pages }
    }

    /// The bits of the pages of a table; of all tables but that one if `not`.
    fn bits(&self, table: &str, not: bool) -> Vec<usize> {
        let pages = self.pages.iter().filter(|(_, name)| (name == table) != not);
        pages.flat_map(|(page, _)| (page - 1) * PAGE * 8..page * PAGE * 8).collect()
    }

    /// Flips a bit and says what became of the store: `Some` if it serves something else.
    async fn flip(&self, file: &str, bit: usize, tally: &mut Tally) -> Option<String> {
        tally.flips += 1;
        let (_folder, store) = open_copy(&self.files, |files| flip(files, file, bit)).await;
        let store = match store {
            Ok(store) => store,
            Err(error) => {
                tally.refused += 1;
                return error.is_empty().then(|| "refused without a reason".to_owned());
            }
        };
        let content = timeout(PATIENCE, read(&store)).await.expect("reading does not hang");
        store.close().await;
        match content {
            Err(error) => {
                tally.refused += 1;
                error.is_empty().then(|| "refused without a reason".to_owned())
            }
            Ok(content) if content == self.content => {
                tally.unharmed += 1;
                None
            }
            Ok(content) => Some(difference(&self.content, &content)),
        }
    }

    async fn flip_all(&self, file: &str, bits: impl IntoIterator<Item = usize>) -> Tally {
        let mut tally = Tally::default();
        for bit in bits {
            if let Some(wrong) = self.flip(file, bit, &mut tally).await {
                let page = bit / 8 / PAGE + 1;
                let table = self.pages.iter().find(|(number, _)| *number == page);
                let table = table.map_or("nothing", |(_, name)| name);
                tally.served.push(format!(
                    "bit {bit} of {file}, byte {} of page {page} of {table}: {wrong}",
                    bit / 8 % PAGE
                ));
            }
        }
        tally
    }
}

#[derive(Debug, Default)]
struct Tally {
    flips: usize,
    refused: usize,
    unharmed: usize,
    /// What never must be.
    served: Vec<String>,
}

impl Tally {
    fn assert_nothing_served(&self, what: &str) {
        eprintln!(
            "{what}: {} flips, {} refused, {} unharmed",
            self.flips, self.refused, self.unharmed
        );
        assert!(
            self.served.is_empty(),
            "TORTURE_SEED={}, {what}: {} of {} flips were served:\n{}",
            bed::seed(),
            self.served.len(),
            self.flips,
            self.served.join("\n")
        );
        assert!(self.refused > 0, "{what}: no flip was noticed at all");
    }
}

fn difference(expected: &Content, found: &Content) -> String {
    if found.revision != expected.revision || found.compacted != expected.compacted {
        return format!(
            "revision {} for {}, compacted {} for {}",
            found.revision, expected.revision, found.compacted, expected.compacted
        );
    }
    if found.leases != expected.leases {
        return format!("leases {:?} for {:?}", found.leases, expected.leases);
    }
    if found.history == expected.history { "other keys".into() } else { "another history".into() }
}

fn flip(files: &mut BTreeMap<String, Vec<u8>>, file: &str, bit: usize) {
    files.get_mut(file).expect("the file is there")[bit / 8] ^= 1 << (bit % 8);
}

async fn open_copy(
    files: &BTreeMap<String, Vec<u8>>,
    change: impl FnOnce(&mut BTreeMap<String, Vec<u8>>),
) -> (TempDir, Result<Store, String>) {
    let folder = memory_folder();
    let mut files = files.clone();
    change(&mut files);
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    let how = How::default();
    let opened = timeout(PATIENCE, how.open(folder.path())).await.expect("opening does not hang");
    (folder, opened.map_err(|error| error.to_string()))
}

fn choose(bits: &[usize], how_many: usize) -> Vec<usize> {
    let mut rng = fastrand::Rng::with_seed(bed::seed());
    std::iter::repeat_with(|| bits[rng.usize(..bits.len())]).take(how_many).collect()
}

fn flips() -> usize {
    usize::try_from(bed::number("TORTURE_FLIPS", 600)).unwrap()
}

#[tokio::test]
async fn a_flipped_bit_in_the_history_is_reported_and_never_served() {
    let closed = Closed::new(300).await;
    let bits = closed.bits("event", false);
    closed.flip_all(FILE, choose(&bits, flips())).await.assert_nothing_served("event rows");
}

/// Where a row begins, how many there are, which page comes next: the root page and the newest leaf.
#[tokio::test]
async fn a_flipped_bit_in_the_structure_of_the_history_is_reported_and_never_served() {
    let closed = Closed::new(300).await;
    let pages: Vec<usize> =
        closed.pages.iter().filter(|(_, name)| name == "event").map(|(page, _)| *page).collect();
    let newest = newest_leaf(&closed);
    let page = |number: usize| (number - 1) * PAGE * 8..number * PAGE * 8;
    // The root is full of pointers, at its beginning and at its end.
    let root: Vec<usize> = page(pages[0]).filter(|bit| closed.files[FILE][bit / 8] != 0).collect();
    closed.flip_all(FILE, choose(&root, 2 * flips())).await.assert_nothing_served("the root page");
    let head = page(newest).take(24 * 8);
    closed.flip_all(FILE, head).await.assert_nothing_served("the head of the newest leaf");
}

/// The page that has the newest row: the last one that the root of the table points to.
fn newest_leaf(closed: &Closed) -> usize {
    let file = &closed.files[FILE];
    let page = |number: usize| &file[(number - 1) * PAGE..number * PAGE];
    let mut number = closed.pages.iter().find(|(_, name)| name == "event").unwrap().0;
    while page(number)[0] == 5 {
        let right = page(number)[8..12].try_into().unwrap();
        number = usize::try_from(u32::from_be_bytes(right)).unwrap();
    }
    assert_eq!(page(number)[0], 13, "a leaf of a table");
    number
}

#[tokio::test]
async fn a_flipped_bit_anywhere_else_in_the_file_is_reported_or_harmless() {
    let closed = Closed::new(300).await;
    let bits = closed.bits("event", true);
    closed.flip_all(FILE, choose(&bits, flips())).await.assert_nothing_served("other pages");
}

#[tokio::test]
async fn a_closed_store_leaves_no_log_whose_damage_could_undo_writes() {
    let closed = Closed::new(300).await;
    if let Some(log) = closed.files.get(&format!("{FILE}-wal")) {
        assert_eq!(log.len(), 0, "the log is empty");
    }
}

/// Except in the last transaction: SQLite, and we, take that for what a power cut left of it.
#[tokio::test]
async fn a_flipped_bit_in_the_log_of_a_killed_store_is_reported_and_never_served() {
    let killed = Closed::killed(120).await;
    let name = format!("{FILE}-wal");
    let log = &killed.files[&name];
    let frame = 24 + PAGE;
    let commits = |number: &usize| log[32 + number * frame + 4..][..4] != [0; 4];
    let frames = (log.len() - 32) / frame;
    let last_begins = (0..frames - 1).rev().find(commits).unwrap() + 1;
    let bits: Vec<usize> = (0..(32 + (last_begins - 1) * frame) * 8).collect();
    let tally = killed.flip_all(&name, choose(&bits, flips())).await;
    tally.assert_nothing_served("the log");
}

#[tokio::test]
async fn history_that_rots_under_a_running_store_is_reported_and_never_served() {
    let folder = memory_folder();
    let how = How::default();
    let store = how.open(folder.path()).await.unwrap();
    // More than the page cache holds, so that what was read at the start is read again from the file.
    let writes = 1_500;
    let mut expected = BTreeMap::new();
    for number in 0..writes {
        let mut body = value(number);
        body.resize(6_000, 1);
        let done = store.put(Put::new("k", body.clone())).await.unwrap();
        expected.insert(done.revision, body);
    }
    store.close().await;
    let store = how.open(folder.path()).await.unwrap();

    let path = folder.path().join(FILE);
    let mut rng = fastrand::Rng::with_seed(bed::seed());
    let (mut damaged, mut right) = (0, 0);
    for _ in 0..40 {
        let (&revision, body) = expected.iter().nth(rng.usize(..expected.len() - 1)).unwrap();
        let healthy = fs::read(&path).unwrap();
        let Some(place) = find(&healthy, &body[..200]) else { continue };
        let bit = rng.usize(..200 * 8);
        write_byte(&path, place + bit / 8, healthy[place + bit / 8] ^ 1 << (bit % 8));

        match store.range(Range { at: Some(revision), ..Range::new(KeyRange::all()) }).await {
            Ok(read) => {
                assert_eq!(read.keys[0].value(), body, "at {revision}");
                right += 1;
            }
            Err(KvError::Damaged(at)) => {
                assert_eq!(at, revision);
                damaged += 1;
            }
            Err(other) => panic!("{other}"),
        }
        let mut watcher = store
            .watch(
                KeyRange::all(),
                WatchOptions { from: Some(revision), previous: false, ..WatchOptions::default() },
            )
            .unwrap();
        match watcher.next().await {
            Ok(batch) => {
                for event in batch.iter() {
                    assert_eq!(event.now().unwrap().value(), expected[&event.revision]);
                }
            }
            Err(WatchError::Unreadable(KvError::Damaged(at))) => assert_eq!(at, revision),
            Err(other) => panic!("{other}"),
        }
        write_byte(&path, place + bit / 8, healthy[place + bit / 8]);
    }
    eprintln!("{damaged} reported, {right} read right");
    assert!(damaged > 0);
    store.close().await;
}

fn find(file: &[u8], wanted: &[u8]) -> Option<usize> {
    file.windows(wanted.len()).position(|window| window == wanted)
}

fn write_byte(path: &Path, at: usize, byte: u8) {
    use std::os::unix::fs::FileExt as _;
    let file = fs::File::options().write(true).open(path).unwrap();
    file.write_at(&[byte], at as u64).unwrap();
}
