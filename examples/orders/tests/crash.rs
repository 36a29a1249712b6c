//! Orders whose workers are killed, whose database is killed and whose connections are cut, all the time.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use testing::postgres::Server;
use testing::{PATIENCE, Proxy};
use tokio::time::{Instant, sleep};
use vedetta::db::postgres::Postgres;
use vedetta::db::rusqlite::Connection;

/// One in twenty is declined for good.
const ORDERS: i64 = 600;
const DECLINED: i64 = ORDERS / 20;

/// A worker, or whatever else the program is told to be.
fn orders(data: &Path, database: Option<&str>, command: &[&str]) -> Command {
    let mut orders = Command::new(env!("CARGO_BIN_EXE_orders"));
    orders.args(["--http", "127.0.0.1:0", "--travels", "300", "--lease", "1500", "--data"]);
    orders.arg(data).args(database.into_iter().flat_map(|url| ["--database", url]));
    orders.args(command).stdout(Stdio::null()).stderr(Stdio::null());
    orders
}

/// Ended with the test, however it ends.
struct Worker(Child);

impl Worker {
    fn start(data: &Path, database: Option<&str>) -> Self {
        Self(orders(data, database, &["work"]).spawn().expect("the program starts"))
    }

    fn kill(&mut self) {
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

fn place(data: &Path, database: Option<&str>) {
    let placed = orders(data, database, &["place", &ORDERS.to_string()]).status();
    assert!(placed.expect("the program starts").success());
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

const IN_ORDER: Books =
    Books { delivered: ORDERS - DECLINED, declined: DECLINED, records: DECLINED };

const DELIVERED: &str = "SELECT count(*) FROM orders WHERE state = 'delivered' AND version = 5";
const UNPAID: &str = "SELECT count(*) FROM orders WHERE state = 'placed' AND version = 1";

async fn in_the_end(books: impl AsyncFn() -> Books) {
    let until = Instant::now() + PATIENCE;
    loop {
        let books = books().await;
        if books == IN_ORDER {
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
    let data = tempfile::tempdir().unwrap();
    place(data.path(), None);
    for _ in 0..8 {
        let mut worker = Worker::start(data.path(), None);
        sleep(pause()).await;
        worker.kill();
    }
    let worker = Worker::start(data.path(), None);
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
    in_the_end(async || books()).await;
    drop(worker);
}

#[tokio::test]
async fn workers_and_their_postgresql_killed_again_and_again_lose_nothing() {
    let mut server = Server::start().await;
    let url = server.database().await;
    let proxy = Proxy::to(server.address()).await;
    let cut = url.replace(&server.address().to_string(), &proxy.address().to_string());
    let folders: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    place(folders[0].path(), Some(&url));

    // The last one's connections are cut now and then.
    let urls = [&url, &url, &cut];
    let start = |n: usize| Worker::start(folders[n].path(), Some(urls[n]));
    let mut workers: Vec<_> = (0..3).map(start).collect();
    for round in 0..12 {
        sleep(pause()).await;
        match round % 4 {
            0 => {
                proxy.cut();
                sleep(pause()).await;
                proxy.mend();
            }
            2 => {
                server.kill();
                sleep(pause()).await;
                server.start_again().await;
            }
            _ => {
                let n = fastrand::usize(..3);
                workers[n].kill();
                workers[n] = start(n);
            }
        }
    }
    // One that came while the server was away has ended: that is an error at the start.
    for (n, worker) in workers.iter_mut().enumerate() {
        if worker.0.try_wait().unwrap().is_some() {
            *worker = start(n);
        }
    }

    let db = Postgres::open(&url, &[]).await.unwrap();
    let declined = "SELECT count(*) FROM vedetta_stage_record JOIN vedetta_stage_lane USING (lane)
                    WHERE stage = 'payment' AND due_at IS NULL";
    in_the_end(async || {
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
