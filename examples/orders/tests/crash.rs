//! Orders whose workers are killed, whose database is killed and whose connections are cut, all the time.

mod journal;

use std::collections::HashMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use journal::{ALL, Journal, Story};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use testing::postgres::Server;
use testing::{PATIENCE, Proxy, etcd};
use tokio::time::{Instant, sleep};
use vedetta::db::postgres::Postgres;
use vedetta::db::rusqlite::Connection;

/// At first, and then again and again. One in twenty is declined for good.
const ORDERS: i64 = 600;
const MORE: i64 = 20;

/// Of those that are killed, and of those of which one stalls. On a busy machine they all do, but not for so long.
const LEASE: &str = "5000";
const SHORT_LEASE: &str = "3000";

const SHARDS: usize = 4;

/// A worker, or whatever else the program is told to be.
fn orders(data: &Path, database: Option<&str>, command: &[&str]) -> Command {
    let mut orders = Command::new(env!("CARGO_BIN_EXE_orders"));
    orders.args(["--http", "127.0.0.1:0", "--travels", "300"]);
    orders.args(["--shards", &SHARDS.to_string(), "--data"]).arg(data);
    orders.args(database.into_iter().flat_map(|url| ["--database", url]));
    orders.args(command).stdout(Stdio::null()).stderr(Stdio::null());
    orders
}

/// Ended with the test, however it ends.
struct Worker(Child);

impl Worker {
    fn start(data: &Path, database: Option<&str>, spread: &str, journal: &Journal) -> Self {
        Self::start_with(LEASE, data, database, spread, journal, &[])
    }

    fn start_with(
        lease: &str,
        data: &Path,
        database: Option<&str>,
        spread: &str,
        journal: &Journal,
        more: &[&str],
    ) -> Self {
        let journal = journal.0.to_str().unwrap();
        let work = ["--lease", lease, "--spread", spread, "work", "--journal", journal];
        Self(orders(data, database, &work).args(more).spawn().expect("the program starts"))
    }

    /// As the journal has it.
    fn name(&self) -> String {
        self.0.id().to_string()
    }

    /// Stops it in its tracks: it notes nothing more.
    fn stop(&self) {
        let pid = Pid::from_child(&self.0);
        kill_process(pid, Signal::STOP).expect("it can be stopped");
        let stopped = waitpid(Some(pid), WaitOptions::UNTRACED).expect("it is ours");
        assert!(stopped.is_some_and(|(_, status)| status.stopped()), "it ended: {stopped:?}");
    }

    fn go_on(&self) {
        kill_process(Pid::from_child(&self.0), Signal::CONT).expect("it can go on");
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
    /// Delivered, and of the sixth version.
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

const DELIVERED: &str =
    "SELECT count(*) FROM orders WHERE state = 'delivered' AND version = 6 AND is_invoiced";
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
    journal.some_were_killed_in_a_run();
    drop(worker);
}

async fn count(url: &str, sql: &str) -> i64 {
    let db = Postgres::open(url, &[]).await.unwrap();
    db.client().await.unwrap().query_one(sql, &[]).await.unwrap().get(0)
}

async fn in_the_end_on_postgresql(url: &str, orders: i64) {
    let db = Postgres::open(url, &[]).await.unwrap();
    let declined = "SELECT count(*) FROM vedetta_stage_record JOIN vedetta_stage_lane USING (lane)
                    WHERE stage = 'payment' AND due_at IS NULL";
    in_the_end(orders, async || {
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
    in_the_end_on_postgresql(&url, total).await;
    journal.repeats_only_what_was_hit();
    journal.some_were_killed_in_a_run();
    // The server may forget a claim when it is killed, and hand the record out again while its stage still runs.
    let text = journal.read();
    let story = Story::of(&text);
    let both = story.settled_twice();
    assert!(both.is_empty(), "{both:?}");
}

#[tokio::test]
async fn workers_and_their_postgresql_killed_again_and_again_lose_nothing() {
    lose_nothing_on_postgresql("10").await;
}

#[tokio::test]
async fn killed_again_and_again_they_lose_nothing_that_a_stage_was_handed_at_once() {
    lose_nothing_on_postgresql("0").await;
}

/// Stops a worker while it packs an order.
async fn stall<'w>(workers: &'w [Worker], journal: &Journal) -> &'w Worker {
    let until = Instant::now() + PATIENCE;
    let packs = |text: &str, worker: &str| {
        let is_it = |run: &journal::Run<'_>| run.worker == worker && run.stage == "packing";
        Story::of(text).runs.iter().any(|run| is_it(run) && !run.is_over())
    };
    loop {
        for worker in workers {
            if packs(&journal.read(), &worker.name()) {
                worker.stop();
                if packs(&journal.read(), &worker.name()) {
                    return worker;
                }
                worker.go_on(); // it was done just then
            }
        }
        assert!(Instant::now() < until, "nobody packs");
        sleep(Duration::from_millis(1)).await;
    }
}

/// All of them work on all shards: nothing but the claims keeps them apart.
#[tokio::test]
async fn processes_that_share_the_shards_never_run_one_order_at_once_unless_one_stalls() {
    const FEW: i64 = 200;
    let server = Server::start().await;
    for count in [2, 4] {
        let url = server.database().await;
        let folders: Vec<_> = (0..count).map(|_| tempfile::tempdir().unwrap()).collect();
        let journal = Journal(folders[0].path().join("journal"));
        let start = |folder: &tempfile::TempDir| {
            Worker::start_with(SHORT_LEASE, folder.path(), Some(&url), "10", &journal, &[])
        };
        let workers: Vec<Worker> = folders.iter().map(start).collect();
        let until = Instant::now() + PATIENCE;
        let asks =
            |worker: &Worker| journal.read().contains(&format!("{} asks 0\n", worker.name()));
        while !workers.iter().all(asks) {
            assert!(Instant::now() < until, "not all of them start");
            sleep(Duration::from_millis(20)).await;
        }
        assert!(place(folders[0].path(), Some(&url), FEW));
        let stalled = stall(&workers, &journal).await;

        // The others get what it had when its lease is over, and only then it goes on.
        let until = Instant::now() + PATIENCE;
        while Story::of(&journal.read()).overlaps().is_empty() {
            assert!(Instant::now() < until, "nobody takes over");
            sleep(Duration::from_millis(20)).await;
        }
        stalled.go_on();
        in_the_end_on_postgresql(&url, FEW).await;

        let (text, name) = (journal.read(), stalled.name());
        let story = Story::of(&text);
        for worker in &workers {
            assert!(story.runs.iter().any(|run| run.worker == worker.name()), "all of them worked");
        }
        only_beside(&story, &name);
    }
}

/// Nobody ran an order while another one did, but beside this one, which settled nothing of it.
fn only_beside(story: &Story<'_>, name: &str) {
    for (first, second) in story.overlaps() {
        let (stale, other) = if first.worker == name { (first, second) } else { (second, first) };
        assert_eq!(stale.worker, name, "nobody stalled: {first:?} {second:?}");
        assert!(!stale.is_settled(), "both were settled: {stale:?} {other:?}");
    }
}

/// Waits until all shards are owned by these, and each has one.
async fn share(etcd: &etcd::Cluster, workers: &[Worker]) {
    let mut names: Vec<String> = workers.iter().map(Worker::name).collect();
    names.sort_unstable();
    let until = Instant::now() + PATIENCE;
    loop {
        let shards = ["get", "--prefix", "/orders/shards/", "--print-value-only"];
        let shards = etcd.node(0).ctl(&shards).await.unwrap();
        let pids = shards.split_whitespace().filter_map(|name| name.split_once('-'));
        let mut owners: Vec<String> = pids.map(|(pid, _)| pid.to_owned()).collect();
        let count = owners.len();
        owners.sort_unstable();
        owners.dedup();
        if count == SHARDS && owners == names {
            return;
        }
        assert!(Instant::now() < until, "{names:?} do not share the shards: {shards}");
        sleep(Duration::from_millis(50)).await;
    }
}

/// The shards keep them apart, and when these change hands, the claims.
#[tokio::test]
async fn of_processes_that_divide_the_shards_one_is_killed_and_one_comes_late_and_nothing_is_lost()
{
    const FEW: i64 = 200;
    let server = Server::start().await;
    for count in [2, 4] {
        let etcd = etcd::Cluster::start(1).await;
        let (url, cluster) =
            (server.database().await, format!("etcd://{}", etcd.node(0).address()));
        let folders: Vec<_> = (0..=count).map(|_| tempfile::tempdir().unwrap()).collect();
        let journal = Journal(folders[0].path().join("journal"));
        let start = |folder: &tempfile::TempDir| {
            let joins = ["--cluster", &cluster];
            Worker::start_with(LEASE, folder.path(), Some(&url), "10", &journal, &joins)
        };
        let (late, early) = folders.split_last().unwrap();
        let mut workers: Vec<Worker> = early.iter().map(start).collect();
        share(&etcd, &workers).await;
        assert!(place(folders[0].path(), Some(&url), FEW));
        stall(&workers[..1], &journal).await;
        let mut killed = workers.remove(0);
        killed.kill(&journal);

        workers.push(start(late));
        share(&etcd, &workers).await;
        assert!(place(folders[0].path(), Some(&url), FEW));
        in_the_end_on_postgresql(&url, 2 * FEW).await;

        journal.repeats_only_what_was_hit();
        let text = journal.read();
        let story = Story::of(&text);
        for worker in workers.iter().chain([&killed]) {
            assert!(story.runs.iter().any(|run| run.worker == worker.name()), "all of them worked");
        }
        only_beside(&story, &killed.name());
        // What was placed when all shards had their owners is one worker's alone, in all stages.
        let is_late = |run: &journal::Run<'_>| run.id.parse::<i64>().unwrap() > FEW;
        assert!(story.runs.iter().any(is_late));
        let mut met = story.encounters();
        met.retain(|(run, _)| is_late(run));
        assert!(met.is_empty(), "{met:?}");
    }
}
