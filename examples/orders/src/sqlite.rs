//! The orders in the file of the data folder.

use vedetta::db::rusqlite::{self, Connection, OptionalExtension as _, Row, params};
use vedetta::db::{Db, Purpose, Schema, Stop};
use vedetta::stage::sqlite::{Records, Table};
use vedetta::stage::{Entities, Version};

use crate::order::Order;

pub(crate) const SCHEMA: Schema = Schema {
    component: "orders",
    steps: &[
        "CREATE TABLE orders (
                  id      INTEGER PRIMARY KEY,
                  version INTEGER NOT NULL,
                  cents   INTEGER NOT NULL,
                  state   TEXT NOT NULL
              ) STRICT",
        "ALTER TABLE orders ADD COLUMN is_invoiced INTEGER NOT NULL DEFAULT 0",
    ],
};

pub(crate) struct Orders;

fn order(row: &Row<'_>) -> rusqlite::Result<Order> {
    let state: String = row.get(3)?;
    let state = state.parse().map_err(|error: String| {
        rusqlite::Error::FromSqlConversionFailure(3, rusqlite::types::Type::Text, error.into())
    })?;
    let (version, is_invoiced) = (Version(row.get(1)?), row.get(4)?);
    Ok(Order { id: row.get(0)?, version, cents: row.get(2)?, state, is_invoiced })
}

impl Table<Order> for Orders {
    fn load(&self, db: &Connection, ids: &[i64]) -> rusqlite::Result<Vec<Order>> {
        let sql = "SELECT id, version, cents, state, is_invoiced FROM orders WHERE id = ?1";
        let mut find = db.prepare_cached(sql)?;
        let found = ids.iter().filter_map(|id| find.query_row([id], order).optional().transpose());
        found.collect()
    }

    fn save(&self, tx: &Connection, order: &Order, read: Version) -> rusqlite::Result<bool> {
        // Without the last condition somebody else's change would be written over.
        let sql = "UPDATE orders SET version = ?2, cents = ?3, state = ?4, is_invoiced = ?5
                   WHERE id = ?1 AND version = ?6";
        let Order { id, version, cents, state, is_invoiced } = order;
        let mut save = tx.prepare_cached(sql)?;
        let saved =
            save.execute(params![id, version.0, cents, state.as_str(), is_invoiced, read.0])?;
        Ok(saved == 1)
    }
}

/// Places orders: each is stored, and queued to be looked at, or neither.
pub(crate) async fn place(
    db: &Db,
    orders: Entities<Order, Records, Orders>,
    cents: Vec<i64>,
) -> anyhow::Result<()> {
    let placed = db.write(Purpose::Store, move |tx| {
        let sql = "SELECT coalesce(max(id), 0) FROM orders";
        let last: i64 = tx.query_row(sql, [], |row| row.get(0))?;
        for (cents, id) in cents.into_iter().zip(last + 1..) {
            let mut order = Order::placed(id, cents);
            orders.entity_updated(tx, &mut order)?;
            let sql = "INSERT INTO orders (id, version, cents, state) VALUES (?1, ?2, ?3, ?4)";
            let mut insert = tx.prepare_cached(sql)?;
            insert.execute(params![
                order.id,
                order.version.0,
                order.cents,
                order.state.as_str()
            ])?;
        }
        Ok::<_, Stop<std::convert::Infallible>>(())
    });
    Ok(placed.await?)
}

/// How many orders are in each state.
pub(crate) async fn count(db: &Db) -> anyhow::Result<Vec<(String, i64)>> {
    let counts = db.read(|db| {
        let mut counts = db.prepare("SELECT state, count(*) FROM orders GROUP BY state")?;
        let rows = counts.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
        rows.collect()
    });
    Ok(counts.await?)
}
