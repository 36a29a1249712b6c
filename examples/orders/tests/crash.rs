//! Orders whose workers are killed, whose database is killed and whose connections are cut, all the time.

use std::collections::HashMap;
use std::fs::{OpenOptions, read_to_string};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use testing::postgres::Server;
use testing::{PATIENCE, Proxy};
use tokio::time::{Instant, sleep};
use vedetta::db::postgres::Postgres;
use vedetta::db::rusqlite::Connection;

/// At first, and then again and again. One in twenty is declined for good.
const ORDERS: i64 = 600;
const MORE: i64 = 20;

/// A worker, or whatever else the program is told to be.
fn orders(data: &Path, database: Option<&str>, command: &[&str]) -> Command {
    let mut orders = Command::new(env!("CARGO_BIN_EXE_orders"));
    orders.args(["--http", "127.0.0.1:0", "--travels", "300", "--lease", "5000", "--data"]);
    orders.arg(data).args(database.into_iter().flat_map(|url| ["--database", url]));
    orders.args(command).stdout(Stdio::null()).stderr(Stdio::null());
    orders
}

/// What the workers did and what was done to them, in the order in which it happened.
struct Journal(PathBuf);

/// In the journal, what is done to the server is done to all workers.
const ALL: &str = "all";

impl Journal {
    /// Somebody is about to go down: what they run may be repeated.
    fn down(&self, who: &str) {
        self.note(who, "down");
    }

    /// They are back.
    fn up(&self, who: &str) {
        self.note(who, "up");
    }

    fn note(&self, who: &str, what: &str) {
        let file = OpenOptions::new().create(true).append(true).open(&self.0);
        file.unwrap().write_all(format!("{who} {what}\n").as_bytes()).unwrap();
    }

    /// A run on one version of an order is repeated only if it failed, or if its worker, the server or the
    /// line between them was down before it was repeated.
    fn repeats_only_what_was_hit(&self) {
        struct Run<'j> {
            worker: &'j str,
            begin: usize,
            has_failed: bool,
        }
        let journal = read_to_string(&self.0).unwrap();
        let mut hits: Vec<(&str, usize, usize)> = Vec::new();
        let mut runs: HashMap<[&str; 3], Vec<Run<'_>>> = HashMap::new();
        for (at, line) in journal.lines().enumerate() {
            match line.split(' ').collect::<Vec<_>>()[..] {
                [who, "down"] => hits.push((who, at, usize::MAX)),
                [who, "up"] => {
                    let hit = hits.iter_mut().rfind(|(hit, ..)| *hit == who);
                    hit.expect("they were down").2 = at;
                }
                [worker, stage, id, version, what] => {
                    let runs = runs.entry([stage, id, version]).or_default();
                    if what == "begin" {
                        runs.push(Run { worker, begin: at, has_failed: false });
                    } else {
                        let run = runs.iter_mut().rfind(|run| run.worker == worker);
                        run.expect("it has begun").has_failed = what == "failed";
                    }
                }
                _ => panic!("not a line of a journal: {line:?}"),
            }
        }
        assert!(!runs.is_empty());
        for (what, runs) in &runs {
            for (run, next) in runs.iter().zip(&runs[1..]) {
                let is_hit = hits.iter().any(|(who, from, to)| {
                    (*who == run.worker || *who == ALL) && *from < next.begin && run.begin < *to
                });
                let (first, again) = (run.begin + 1, next.begin + 1);
                assert!(
                    run.has_failed || is_hit,
                    "{what:?} was repeated without need: lines {first} and {again} of\n{journal}"
                );
            }
        }
    }
}

/// Ended with the test, however it ends.
struct Worker(Child);

impl Worker {
    fn start(data: &Path, database: Option<&str>, spread: &str, journal: &Journal) -> Self {
        let journal = journal.0.to_str().unwrap();
        let work = ["--spread", spread, "work", "--journal", journal];
        Self(orders(data, database, &work).spawn().expect("the program starts"))
    }

    /// As the journal has it.
    fn name(&self) -> String {
        self.0.id().to_string()
    }

    fn kill(&mut self, journal: &Journal) {
        journal.down(&self.name());
        self.0.kill().expect("it can be killed");
        self.0.wait().expect("it ends");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether it said that they are placed.
fn place(data: &Path, database: Option<&str>, count: i64) -> bool {
    let placed = orders(data, database, &["place", &count.to_string()]).status();
    placed.expect("the program starts").success()
}

/// What the orders must be in the end: each was saved once in each of its states.
#[derive(Debug, PartialEq, Eq)]
struct Books {
    /// Delivered, and of the fifth version.
    delivered: i64,
    /// Not paid, of the first version, and set aside.
    declined: i64,
    /// Records that are left.
    records: i64,
}

impl Books {
    fn in_order(orders: i64) -> Self {
        let declined = orders / 20;
        Self { delivered: orders - declined, declined, records: declined }
    }
}

const DELIVERED: &str = "SELECT count(*) FROM orders WHERE state = 'delivered' AND version = 5";
const UNPAID: &str = "SELECT count(*) FROM orders WHERE state = 'placed' AND version = 1";
const UNDELIVERED: &str =
    "SELECT count(*) FROM orders WHERE state <> 'delivered' AND cents <= 100000";

async fn in_the_end(orders: i64, books: impl AsyncFn() -> Books) {
    let until = Instant::now() + PATIENCE;
    loop {
        let books = books().await;
        if books == Books::in_order(orders) {
            return;
        }
        assert!(Instant::now() < until, "the orders are not where they can go: {books:?}");
        sleep(Duration::from_millis(100)).await;
    }
}

fn pause() -> Duration {
    Duration::from_millis(fastrand::u64(50..500))
}

#[tokio::test]
async fn workers_killed_again_and_again_on_the_embedded_file_lose_nothing() {
    let [data, notes] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let journal = Journal(notes.path().join("journal"));
    assert!(place(data.path(), None, ORDERS));
    for _ in 0..8 {
        let mut worker = Worker::start(data.path(), None, "10", &journal);
        sleep(pause()).await;
        worker.kill(&journal);
    }
    let worker = Worker::start(data.path(), None, "10", &journal);
    let file = std::fs::read_dir(data.path()).unwrap().map(|entry| entry.unwrap().path());
    let file = file.into_iter().find(|path| path.extension().is_some_and(|end| end == "db"));
    let db = Connection::open(file.expect("the database is in the folder")).unwrap();
    let count = |sql: &str| db.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap();
    let declined = "SELECT count(*) FROM stage_record JOIN stage_lane USING (lane)
                    WHERE stage = 'payment' AND due_at IS NULL";
    let books = || Books {
        delivered: count(DELIVERED),
        declined: count(UNPAID).min(count(declined)),
        records: count("SELECT count(*) FROM stage_record"),
    };
    in_the_end(ORDERS, async || books()).await;
    journal.repeats_only_what_was_hit();
    drop(worker);
}

async fn count(url: &str, sql: &str) -> i64 {
    let db = Postgres::open(url, &[]).await.unwrap();
    db.client().await.unwrap().query_one(sql, &[]).await.unwrap().get(0)
}

/// Of each order.
async fn versions(url: &str) -> HashMap<i64, i64> {
    let db = Postgres::open(url, &[]).await.unwrap();
    let client = db.client().await.unwrap();
    let rows = client.query("SELECT id, version FROM orders", &[]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// Waits until there is something to do.
async fn busy(url: &str) {
    let until = Instant::now() + PATIENCE;
    while count(url, UNDELIVERED).await == 0 {
        assert!(Instant::now() < until, "nobody places orders");
        sleep(Duration::from_millis(5)).await;
    }
}

/// What became of the orders that were placed while everything was killed.
#[derive(Debug, Default)]
struct Placed {
    surely: i64,
    /// Nobody said so: the server may have gone before or after it was done.
    perhaps: i64,
}

async fn lose_nothing_on_postgresql(spread: &str) {
    let mut server = Server::start().await;
    let url = server.database().await;
    let proxy = Proxy::to(server.address()).await;
    let cut = url.replace(&server.address().to_string(), &proxy.address().to_string());
    let folders: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    let journal = Journal(folders[0].path().join("journal"));
    assert!(place(folders[0].path(), Some(&url), ORDERS));

    let goes_on = Arc::new(());
    let placing = tokio::task::spawn_blocking({
        let (goes_on, url, data) = (Arc::downgrade(&goes_on), url.clone(), tempfile::tempdir());
        move || {
            let (data, mut placed) = (data.unwrap(), Placed::default());
            while goes_on.upgrade().is_some() {
                let is_placed = place(data.path(), Some(&url), MORE);
                let count = if is_placed { &mut placed.surely } else { &mut placed.perhaps };
                *count += MORE;
            }
            placed
        }
    });
    // The last one's connections are cut now and then.
    let urls = [&url, &url, &cut];
    let start = |n: usize| Worker::start(folders[n].path(), Some(urls[n]), spread, &journal);
    let mut workers: Vec<_> = (0..3).map(start).collect();
    for round in 0..12 {
        sleep(pause()).await;
        match round % 4 {
            0 => {
                journal.down(&workers[2].name());
                proxy.cut();
                sleep(pause()).await;
                proxy.mend();
                journal.up(&workers[2].name());
            }
            2 => {
                busy(&url).await;
                let saved = versions(&url).await;
                journal.down(ALL);
                server.kill();
                sleep(pause()).await;
                server.start_again().await;
                journal.up(ALL);
                let kept = versions(&url).await;
                let is_kept =
                    |(id, version): (&i64, &i64)| kept.get(id).is_some_and(|kept| kept >= version);
                assert!(saved.iter().all(is_kept), "{saved:?} became {kept:?}");
            }
            _ => {
                let n = fastrand::usize(..3);
                workers[n].kill(&journal);
                workers[n] = start(n);
            }
        }
    }
    drop(goes_on);
    // Not by blocking: the proxy runs on this thread, too. Held up, it would not pass on that a worker that it
    // served was killed, and what that one has locked the last `place` would wait for without end.
    let placed = placing.await.unwrap();
    // One that came while the server was away has ended: that is an error at the start.
    for (n, worker) in workers.iter_mut().enumerate() {
        if worker.0.try_wait().unwrap().is_some() {
            *worker = start(n);
        }
    }

    let total = count(&url, "SELECT count(*) FROM orders").await;
    let least = ORDERS + placed.surely;
    assert!((least..=least + placed.perhaps).contains(&total), "{total} of {placed:?}");
    assert!(placed.surely > 0, "{placed:?}");
    let db = Postgres::open(&url, &[]).await.unwrap();
    let declined = "SELECT count(*) FROM vedetta_stage_record JOIN vedetta_stage_lane USING (lane)
                    WHERE stage = 'payment' AND due_at IS NULL";
    in_the_end(total, async || {
        let client = db.client().await.unwrap();
        let count = async |sql: &str| client.query_one(sql, &[]).await.unwrap().get(0);
        let unpaid: i64 = count(UNPAID).await;
        Books {
            delivered: count(DELIVERED).await,
            declined: unpaid.min(count(declined).await),
            records: count("SELECT count(*) FROM vedetta_stage_record").await,
        }
    })
    .await;
    journal.repeats_only_what_was_hit();
}

#[tokio::test]
async fn workers_and_their_postgresql_killed_again_and_again_lose_nothing() {
    lose_nothing_on_postgresql("10").await;
}

#[tokio::test]
async fn killed_again_and_again_they_lose_nothing_that_a_stage_was_handed_at_once() {
    lose_nothing_on_postgresql("0").await;
}
