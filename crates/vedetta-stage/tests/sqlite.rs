//! Stages on SQLite.

#[macro_use]
mod suite;

use std::sync::Arc;
use std::time::Duration;

use suite::{Ask as _, HOUR, ORDERS, Order, OrderId, World};
use tempfile::TempDir;
use vedetta_core::queue::Settled;
use vedetta_db::rusqlite::{self, Connection, OptionalExtension as _, Row, params};
use vedetta_db::{Db, Options, Purpose, Schema, Stop};
use vedetta_stage::sqlite::{Records, SCHEMA, Table};
use vedetta_stage::{
    Backend as _, BoxError, Checked, Ending, Entities, Fate, Lane, Records as _, SYSTEM, Saved,
    Unsettled, Version,
};

suite!(crate::Sqlite);

const SHOP: Schema = Schema {
    component: "shop",
    steps: &["CREATE TABLE orders (
        id INTEGER PRIMARY KEY, version INTEGER NOT NULL, marks TEXT NOT NULL,
        state TEXT CHECK (state <> 'forbidden')
    ) STRICT"],
};

struct Orders;

fn order(row: &Row<'_>) -> rusqlite::Result<Order> {
    Ok(Order {
        id: row.get(0)?,
        version: Version(row.get(1)?),
        state: row.get(2)?,
        marks: Order::marks_of_text(&row.get::<_, String>(3)?),
    })
}

impl Table<Order> for Orders {
    fn load(&self, db: &Connection, ids: &[OrderId]) -> rusqlite::Result<Vec<Order>> {
        let sql = "SELECT id, version, state, marks FROM orders WHERE id = ?1";
        let mut find = db.prepare_cached(sql)?;
        let mut found = Vec::with_capacity(ids.len());
        for id in ids {
            found.extend(find.query_row([id.0], order).optional()?);
        }
        Ok(found)
    }

    fn save(&self, tx: &Connection, order: &Order, read: Version) -> rusqlite::Result<bool> {
        let sql = "UPDATE orders SET version = ?1, state = ?2, marks = ?3
                   WHERE id = ?4 AND version = ?5";
        let Order { id, version, state, .. } = order;
        let saved =
            tx.execute(sql, params![version.0, state, order.marks_as_text(), id, read.0])?;
        Ok(saved == 1)
    }
}

/// Needs so long for a save.
struct Slow(Duration);

impl Table<Order> for Slow {
    fn load(&self, db: &Connection, ids: &[OrderId]) -> rusqlite::Result<Vec<Order>> {
        Orders.load(db, ids)
    }

    fn save(&self, tx: &Connection, order: &Order, read: Version) -> rusqlite::Result<bool> {
        std::thread::sleep(self.0);
        Orders.save(tx, order, read)
    }
}

struct Sqlite {
    folder: Arc<TempDir>,
    db: Db,
    orders: Entities<Order, Records, Orders>,
}

impl Sqlite {
    async fn open(folder: Arc<TempDir>) -> Self {
        let mut options = Options::new(folder.path().join("shop.db"));
        options.ballast = 0;
        let db = Db::open(&options, &[SCHEMA, SHOP]).unwrap();
        let records = Records::open(db.clone()).await.unwrap();
        let orders = Entities::new(records, ORDERS, Orders).await.unwrap();
        Self { folder, db, orders }
    }

    async fn execute(&self, sql: &'static str, id: i64) {
        let execute = move |tx: &vedetta_db::Tx<'_>| {
            tx.execute(sql, [id]).map(drop).map_err(Stop::<rusqlite::Error>::Refused)
        };
        self.db.write(Purpose::Store, execute).await.unwrap();
    }
}

impl World for Sqlite {
    type Records = Records;
    type Orders = Entities<Order, Records, Orders>;

    async fn new() -> Self {
        Self::open(Arc::new(TempDir::new().unwrap())).await
    }

    async fn neighbour(&self) -> Self {
        // One process has the file.
        let (folder, db, orders) = (Arc::clone(&self.folder), self.db.clone(), self.orders.clone());
        Self { folder, db, orders }
    }

    async fn reopened(self) -> Self {
        let Self { folder, db, orders } = self;
        drop(orders);
        tokio::task::spawn_blocking(move || db.close_blocking()).await.unwrap();
        Self::open(folder).await
    }

    fn orders(&self) -> &Self::Orders {
        &self.orders
    }

    fn sharded(&self, shards: u16) -> Self::Orders {
        self.orders.clone().sharded(shards)
    }

    async fn create(&self, mut new: Vec<Order>) -> Result<(), BoxError> {
        let orders = self.orders.clone();
        let mut create = move |tx: &Connection| {
            orders.entities_updated(tx, &mut new)?;
            let sql = "INSERT INTO orders (id, version, state, marks) VALUES (?1, ?2, ?3, ?4)";
            new.iter().try_for_each(|order| {
                let Order { id, version, state, .. } = order;
                tx.execute(sql, params![id, version.0, state, order.marks_as_text()]).map(drop)
            })
        };
        Ok(self.db.write(Purpose::Store, move |tx| create(tx).map_err(Stop::Refused)).await?)
    }

    async fn change(
        &self,
        id: i64,
        change: impl Fn(&mut Order) + Clone + Send + Sync + 'static,
    ) -> Result<Option<Order>, BoxError> {
        Ok(self.orders.update(&OrderId(id), change).await?)
    }

    async fn change_all(
        &self,
        ids: Vec<i64>,
        change: impl Fn(&mut Order) + Clone + Send + Sync + 'static,
    ) -> Result<Vec<Order>, BoxError> {
        let ids: Vec<OrderId> = ids.into_iter().map(OrderId).collect();
        Ok(self.orders.update_all(&ids, change).await?)
    }

    async fn save_all(&self, read: Vec<(Order, Version)>) -> Result<Vec<Checked<Order>>, BoxError> {
        Ok(self.orders.save_all(read).await?)
    }

    async fn save(&self, order: Order, read: Version) -> Result<Checked<Order>, BoxError> {
        Ok(self.orders.save(order, read).await?)
    }

    async fn read(&self, id: i64) -> Option<Order> {
        let read = move |db: &Connection| Orders.load(db, &[OrderId(id)]);
        self.db.read(read).await.unwrap().pop()
    }

    async fn called(&self, name: &str) -> Self {
        let orders = Entities::new(self.records().clone(), name, Orders).await.unwrap();
        Self { folder: Arc::clone(&self.folder), db: self.db.clone(), orders }
    }

    async fn look(&self) -> Vec<(Order, String)> {
        let orders = self.db.read(|db| {
            let sql = "SELECT o.id, o.version, o.state, o.marks,
                              coalesce(group_concat(l.stage, ' '), '')
                       FROM orders o
                       LEFT JOIN stage_record r ON r.id = 'order-' || o.id
                       LEFT JOIN stage_lane l ON l.lane = r.lane AND l.entity = 'orders'
                       GROUP BY o.id";
            let mut find = db.prepare_cached(sql)?;
            let found = find.query_map([], |row| Ok((order(row)?, row.get(4)?)))?;
            found.collect()
        });
        orders.await.unwrap()
    }

    async fn delete(&self, id: i64) {
        self.execute("DELETE FROM orders WHERE id = ?1", id).await;
    }

    async fn spoil(&self, id: i64) {
        self.execute("UPDATE orders SET state = NULL WHERE id = ?1", id).await;
    }

    async fn mend(&self, id: i64) {
        self.execute("UPDATE orders SET state = 'mended' WHERE id = ?1", id).await;
    }
}

impl Sqlite {
    async fn run(&self, sql: &'static str) {
        let run = move |tx: &vedetta_db::Tx<'_>| {
            tx.execute_batch(sql).map_err(Stop::<rusqlite::Error>::Refused)
        };
        self.db.write(Purpose::Store, run).await.unwrap();
    }

    /// New orders whose records a stage holds, and which it wants to be gone.
    async fn ended(&self, ids: &[i64]) -> (Lane, Vec<Ending<Order>>) {
        self.ended_within(HOUR, ids).await
    }

    /// The same for so long.
    async fn ended_within(&self, lease: Duration, ids: &[i64]) -> (Lane, Vec<Ending<Order>>) {
        self.create(ids.iter().copied().map(Order::new).collect()).await.unwrap();
        let records = self.records();
        let system = records.lane(ORDERS, SYSTEM).await.unwrap();
        let asked = records.claim(system, &[0], 9, HOUR).await.unwrap().claims.into_iter();
        let asked: Vec<_> = asked.map(|claim| (claim, Fate::Gone)).collect();
        records.settle(system, &asked).await.unwrap();

        let lane = records.lane(ORDERS, "packing").await.unwrap();
        let texts: Vec<String> = ids.iter().map(|id| OrderId(*id).to_string()).collect();
        let visits: Vec<_> = texts.iter().map(|id| (id.as_str(), 0, Duration::ZERO)).collect();
        records.enqueue(lane, &visits).await.unwrap();
        let mut claims = records.claim(lane, &[0], 9, lease).await.unwrap().claims;
        claims.sort_by(|a, b| a.id.cmp(&b.id));
        let ending = |claim| Ending { claim, fate: Fate::Gone, saves: None, visits: Vec::new() };
        (lane, claims.into_iter().map(ending).collect())
    }
}

#[tokio::test]
async fn an_order_whose_record_cannot_be_settled_is_not_saved_either() {
    let world = Sqlite::new().await;
    let (lane, mut endings) = world.ended(&[1]).await;
    world
        .run("CREATE TRIGGER keep BEFORE DELETE ON stage_record BEGIN SELECT RAISE(ABORT, 'kept'); END")
        .await;
    endings[0].saves = Some((Order::new(1).is("packed"), Version(1)));
    let saved = world.orders.settle(lane, endings).await.unwrap().saved;
    let [Err(Unsettled::Refused(why))] = &saved[..] else { panic!("{saved:?}") };
    assert!(why.contains("kept"), "{why}");
    assert_eq!(world.get(1).await, Order { version: Version(1), ..Order::new(1) });
    assert!(world.record("packing", 1).await.unwrap().is_held);
    assert!(world.record(SYSTEM, 1).await.is_none(), "nobody is told of what was not saved");
}

#[tokio::test]
async fn a_save_that_outlives_its_lease_is_saved_and_its_record_settled() {
    let world = Sqlite::new().await;
    let lease = Duration::from_secs(1);
    let slow = Slow(lease + Duration::from_millis(5));
    let orders = Entities::new(world.records().clone(), ORDERS, slow).await.unwrap();
    let (lane, mut endings) = world.ended_within(lease, &[1]).await;
    endings[0].saves = Some((Order::new(1).is("packed"), Version(1)));
    let saved = orders.settle(lane, endings).await.unwrap().saved;
    assert_eq!(saved, [Ok(Saved::Settled(Settled::Gone))]);
    assert_eq!(world.get(1).await.version, Version(2));
    assert!(world.record("packing", 1).await.is_none());
}

#[tokio::test]
async fn a_batch_is_answered_for_what_is_settled_though_the_disk_is_too_full_for_the_rest() {
    let world = Sqlite::new().await;
    let (lane, mut endings) = world.ended(&[1, 2]).await;
    world.run("PRAGMA max_page_count = 1").await; // as many as there are
    let large = Order::new(2).marked(&"x".repeat(1 << 20));
    endings[1].saves = Some((large, Version(1)));
    let again = endings[0].clone();
    let saved = world.orders.settle(lane, endings).await.unwrap().saved;
    // The two may share a commit, and are lost together then.
    let settled = match &saved[0] {
        Err(Unsettled::Lost(_)) => world.orders.settle(lane, vec![again]).await.unwrap().saved,
        _ => saved.clone(),
    };
    assert_eq!(settled[0], Ok(Saved::Settled(Settled::Gone)));
    assert!(matches!(saved[1], Err(Unsettled::Lost(_))), "{saved:?}");
    assert_eq!(world.get(2).await.version, Version(1));
    assert!(world.record("packing", 2).await.unwrap().is_held, "it can be tried again");
}
