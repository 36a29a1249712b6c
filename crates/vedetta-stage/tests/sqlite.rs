//! Stages on SQLite.

#[macro_use]
mod suite;

use std::sync::Arc;

use suite::{Ask as _, ORDERS, Order, OrderId, World};
use tempfile::TempDir;
use vedetta_db::rusqlite::{self, Connection, OptionalExtension as _, Row, params};
use vedetta_db::{Db, Options, Purpose, Schema, Stop};
use vedetta_stage::sqlite::{Records, SCHEMA, Table};
use vedetta_stage::{BoxError, Checked, Entities, Version};

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
