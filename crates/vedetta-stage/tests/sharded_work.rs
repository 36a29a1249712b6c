//! The work of one entity type, shared by processors that know of each other only through a store: on
//! PostgreSQL, each with connections of its own, and in one file of SQLite.

use std::collections::BTreeMap;
use std::convert::Infallible;
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
use vedetta_db::rusqlite::{self, Connection, OptionalExtension as _, Row};
use vedetta_db::{Db, Purpose, Schema, Stop};
use vedetta_kv::{Options, Store};
use vedetta_stage::{
    Backend, BoxError, Entities, Entity, Processing, Processor, Shards, Stage, Version, Visit,
    postgres, sqlite,
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

/// A database with orders, and processors of its own.
trait Shop {
    type Orders: Backend<Order>;

    /// As one who works with it has them.
    async fn orders(&self) -> Self::Orders;

    /// Stores so many, of which nobody is told.
    async fn fill(&self, count: i64);

    /// Saves an order as it is, with its next version.
    async fn touch(orders: &Self::Orders, id: OrderId) -> Option<Order>;
}

struct Orders;

/// Each has connections of its own.
struct OnPostgres(String);

impl OnPostgres {
    async fn db(&self) -> Postgres {
        Postgres::open_with(&self.0, 4, &[postgres::SCHEMA, SHOP]).await.unwrap()
    }
}

impl Shop for OnPostgres {
    type Orders = Entities<Order, postgres::Records, Orders>;

    async fn orders(&self) -> Self::Orders {
        let records = postgres::Records::new(self.db().await);
        Entities::new(records, "orders", Orders).await.unwrap().sharded(SHARDS)
    }

    async fn fill(&self, count: i64) {
        let orders = "INSERT INTO orders SELECT n, 0 FROM generate_series(0, $1::bigint) AS n";
        self.db().await.client().await.unwrap().execute(orders, &[&(count - 1)]).await.unwrap();
    }

    async fn touch(orders: &Self::Orders, id: OrderId) -> Option<Order> {
        orders.update(&id, |_| {}).await.unwrap()
    }
}

impl postgres::Table<Order> for Orders {
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

/// One process has the file, and all who work with it are in it.
struct OnSqlite {
    db: Db,
    orders: Entities<Order, sqlite::Records, Orders>,
}

impl OnSqlite {
    async fn open(folder: &TempDir) -> Self {
        let mut options = vedetta_db::Options::new(folder.path().join("shop.db"));
        options.ballast = 0;
        let db = Db::open(&options, &[sqlite::SCHEMA, SHOP]).unwrap();
        let records = sqlite::Records::open(db.clone()).await.unwrap();
        let orders = Entities::new(records, "orders", Orders).await.unwrap().sharded(SHARDS);
        Self { db, orders }
    }
}

impl Shop for OnSqlite {
    type Orders = Entities<Order, sqlite::Records, Orders>;

    async fn orders(&self) -> Self::Orders {
        self.orders.clone()
    }

    async fn fill(&self, count: i64) {
        let fill = self.db.write(Purpose::Store, move |tx| {
            let mut insert = tx.prepare("INSERT INTO orders VALUES (?1, 0)")?;
            (0..count).try_for_each(|id| insert.execute([id]).map(drop))?;
            Ok::<_, Stop<Infallible>>(())
        });
        fill.await.unwrap();
    }

    async fn touch(orders: &Self::Orders, id: OrderId) -> Option<Order> {
        orders.update(&id, |_| {}).await.unwrap()
    }
}

impl sqlite::Table<Order> for Orders {
    fn load(&self, db: &Connection, ids: &[OrderId]) -> rusqlite::Result<Vec<Order>> {
        let mut find = db.prepare_cached("SELECT version FROM orders WHERE id = ?1")?;
        let mut found = Vec::with_capacity(ids.len());
        for id in ids {
            let order = |row: &Row<'_>| Ok(Order { id: *id, version: Version(row.get(0)?) });
            found.extend(find.query_row([id.0], order).optional()?);
        }
        Ok(found)
    }

    fn save(&self, tx: &Connection, order: &Order, read: Version) -> rusqlite::Result<bool> {
        let sql = "UPDATE orders SET version = ?1 WHERE id = ?2 AND version = ?3";
        Ok(tx.execute(sql, [order.version.0, order.id.0, read.0])? == 1)
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
struct Worker<S: Shop> {
    shards: Shards,
    _processing: Processing,
    orders: S::Orders,
}

impl<S: Shop> Worker<S> {
    async fn start(name: &'static str, shop: &S, store: &Store, book: &Book) -> Self {
        let orders = shop.orders().await;
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
            let changed = S::touch(&self.orders, id).await;
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
    let orders = OnPostgres(url).orders().await;
    for shared in [SHARDS - 1, SHARDS + 1] {
        let shards = Shards::join(store.clone(), "orders/", "a", shared, TTL).unwrap();
        let processor = Processor::new(orders.clone());
        let refused = processor.shards(&shards).start().await.err().unwrap();
        let text = format!("processes share {shared} shards, but the entities are divided into 16");
        assert_eq!(refused.to_string(), text);
        soon("it leaves", shards.leave()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processors_share_the_entities_and_one_that_dies_hands_its_own_over() {
    let server = Server::start().await;
    share(&OnPostgres(server.database().await)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processors_of_one_file_share_the_entities_and_one_that_dies_hands_its_own_over() {
    let folder = TempDir::new().unwrap();
    share(&OnSqlite::open(&folder).await).await;
}

async fn share(shop: &impl Shop) {
    let folder = TempDir::new().unwrap();
    let store = open_store(&folder).await;
    let book = Book::default();
    let a = Worker::start("a", shop, &store, &book).await;
    a.owns(SHARDS).await;
    shop.fill(ORDERS).await;
    let alone = a.all_done(Version(1), &book).await;
    assert!(alone.values().all(|by| *by == "a"));

    let b = Worker::start("b", shop, &store, &book).await;
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
