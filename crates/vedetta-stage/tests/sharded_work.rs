//! The work of one entity type, shared by processors that know of each other only through a store: on
//! PostgreSQL, each with connections of its own.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tempfile::TempDir;
use testing::postgres::Server;
use testing::soon;
use vedetta_db::postgres::tokio_postgres::Error;
use vedetta_db::postgres::{GenericClient, Postgres, Transaction};
use vedetta_db::{Db, Schema};
use vedetta_kv::{Options, Store};
use vedetta_stage::postgres::{Records, SCHEMA, Table};
use vedetta_stage::{
    Backend as _, BoxError, Entities, Entity, Processing, Processor, Shards, Stage, Version, Visit,
};

const SHARDS: u16 = 16;
const ORDERS: i64 = 200;
const TTL: Duration = Duration::from_secs(3);
const LOOK_AGAIN: Duration = Duration::from_millis(10);

const SHOP: Schema = Schema {
    component: "shop",
    steps: &["CREATE TABLE orders (id bigint PRIMARY KEY, version bigint NOT NULL)"],
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct OrderId(i64);

impl fmt::Display for OrderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for OrderId {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}

#[derive(Debug, Clone)]
struct Order {
    id: OrderId,
    version: Version,
}

impl Entity for Order {
    type Id = OrderId;

    fn id(&self) -> OrderId {
        self.id
    }

    fn version(&self) -> Version {
        self.version
    }

    fn set_version(&mut self, version: Version) {
        self.version = version;
    }
}

struct Orders;

impl Table<Order> for Orders {
    async fn load(&self, db: &impl GenericClient, ids: &[OrderId]) -> Result<Vec<Order>, Error> {
        let ids: Vec<i64> = ids.iter().map(|id| id.0).collect();
        let rows = db.query("SELECT id, version FROM orders WHERE id = ANY ($1)", &[&ids]).await?;
        let order = |row: &vedetta_db::postgres::tokio_postgres::Row| Order {
            id: OrderId(row.get(0)),
            version: Version(row.get(1)),
        };
        Ok(rows.iter().map(order).collect())
    }

    async fn save(
        &self,
        tx: &Transaction<'_>,
        order: &Order,
        read: Version,
    ) -> Result<bool, Error> {
        let sql = "UPDATE orders SET version = $1 WHERE id = $2 AND version = $3";
        Ok(tx.execute(sql, &[&order.version.0, &order.id.0, &read.0]).await? == 1)
    }
}

/// Who did which version of an order.
type Book = Arc<Mutex<BTreeMap<(Version, OrderId), Vec<&'static str>>>>;

/// Writes into the book who did it.
struct Note(&'static str, Book);

impl Stage<Order> for Note {
    fn name(&self) -> &'static str {
        "note"
    }

    fn should_process_now(&self, _: &Order) -> bool {
        true
    }

    async fn process(&self, order: Order) -> Result<Visit<Order>, BoxError> {
        self.1.lock().entry((order.version, order.id)).or_default().push(self.0);
        Ok(Visit::untouched())
    }
}

/// One that has joined and works.
struct Worker {
    shards: Shards,
    _processing: Processing,
    orders: Entities<Order, Records, Orders>,
}

impl Worker {
    async fn start(name: &'static str, url: &str, store: &Store, book: &Book) -> Self {
        let db = Postgres::open_with(url, 4, &[SCHEMA, SHOP]).await.unwrap();
        let orders = Entities::new(Records::new(db), "orders", Orders).await.unwrap();
        let orders = orders.sharded(SHARDS);
        let shards = Shards::join(store.clone(), "orders/", name, SHARDS, TTL).unwrap();
        let processor = Processor::new(orders.clone()).stage(Note(name, Arc::clone(book)));
        let processing = processor.shards(&shards).start().await.unwrap();
        Self { shards, _processing: processing, orders }
    }

    async fn owns(&self, count: u16) {
        let mut owned = self.shards.owned();
        let owns = owned.wait_for(|owned| owned.len() == usize::from(count));
        soon("it has its share", owns).await.unwrap();
    }

    /// Changes every order, and waits until each is done at that version: by whom.
    async fn all_done(&self, version: Version, book: &Book) -> BTreeMap<OrderId, &'static str> {
        for id in (0..ORDERS).map(OrderId) {
            let changed = self.orders.update(&id, |_| {}).await.unwrap();
            assert_eq!(changed.map(|order| order.version), Some(version));
        }
        soon("all orders are done", async {
            loop {
                let done: BTreeMap<_, _> = {
                    let book = book.lock();
                    let of_version = book.iter().filter(|((of, _), _)| *of == version);
                    of_version.map(|((_, id), by)| (*id, by.clone())).collect()
                };
                if done.len() == usize::try_from(ORDERS).unwrap() {
                    let by_one = |(id, by): (OrderId, Vec<_>)| {
                        assert!(by.iter().all(|name| *name == by[0]), "{id} was done by {by:?}");
                        (id, by[0])
                    };
                    return done.into_iter().map(by_one).collect();
                }
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        })
        .await
    }
}

async fn open_store(folder: &TempDir) -> Store {
    let mut options = vedetta_db::Options::new(folder.path().join("vedetta.db"));
    options.ballast = 0;
    let db = Db::open(&options, &[vedetta_kv::SCHEMA]).unwrap();
    Store::open(db, Options::default()).await.unwrap()
}

#[tokio::test]
async fn who_shares_another_number_of_shards_than_there_are_is_refused() {
    let (server, folder) = (Server::start().await, TempDir::new().unwrap());
    let (url, store) = (server.database().await, open_store(&folder).await);
    let db = Postgres::open_with(&url, 4, &[SCHEMA, SHOP]).await.unwrap();
    let orders = Entities::new(Records::new(db), "orders", Orders).await.unwrap();
    for shared in [SHARDS - 1, SHARDS + 1] {
        let shards = Shards::join(store.clone(), "orders/", "a", shared, TTL).unwrap();
        let processor = Processor::new(orders.clone().sharded(SHARDS));
        let refused = processor.shards(&shards).start().await.err().unwrap();
        let text = format!("processes share {shared} shards, but the entities are divided into 16");
        assert_eq!(refused.to_string(), text);
        soon("it leaves", shards.leave()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processors_share_the_entities_and_one_that_dies_hands_its_own_over() {
    let server = Server::start().await;
    let url = server.database().await;
    let folder = TempDir::new().unwrap();
    let store = open_store(&folder).await;

    let book = Book::default();
    let a = Worker::start("a", &url, &store, &book).await;
    a.owns(SHARDS).await;
    let client = a.orders.records().db().client().await.unwrap();
    let orders = "INSERT INTO orders SELECT n, 0 FROM generate_series(0, $1::bigint) AS n";
    client.execute(orders, &[&(ORDERS - 1)]).await.unwrap();
    drop(client);
    let alone = a.all_done(Version(1), &book).await;
    assert!(alone.values().all(|by| *by == "a"));

    let b = Worker::start("b", &url, &store, &book).await;
    a.owns(SHARDS / 2).await;
    b.owns(SHARDS / 2).await;
    let shared = a.all_done(Version(2), &book).await;
    let of = |name| shared.values().filter(|by| **by == name).count();
    assert!(of("a") > 0 && of("b") > 0, "{shared:?}");
    assert_eq!(b.all_done(Version(3), &book).await, shared, "an entity stays where it is");

    drop(a);
    let handed_over = b.all_done(Version(4), &book).await;
    assert!(handed_over.values().all(|by| *by == "b"));
    soon("it leaves", b.shards.leave()).await;
}
