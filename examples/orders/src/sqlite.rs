//! The orders in the file of the data folder.

use vedetta::db::rusqlite::{self, Connection, OptionalExtension as _, Row, params};
use vedetta::db::{Db, Purpose, Schema, Stop};
use vedetta::stage::sqlite::{Records, Table};
use vedetta::stage::{Entities, Version};

use crate::order::{Order, State};

pub(crate) const SCHEMA: Schema = Schema {
    component: "orders",
    steps: &["CREATE TABLE orders (
                  id      INTEGER PRIMARY KEY,
                  version INTEGER NOT NULL,
                  cents   INTEGER NOT NULL,
                  state   TEXT NOT NULL
              ) STRICT"],
};

pub(crate) struct Orders;

fn order(row: &Row<'_>) -> rusqlite::Result<Order> {
    let state: String = row.get(3)?;
    let state = state.parse().map_err(|error: String| {
        rusqlite::Error::FromSqlConversionFailure(3, rusqlite::types::Type::Text, error.into())
    })?;
    Ok(Order { id: row.get(0)?, version: Version(row.get(1)?), cents: row.get(2)?, state })
}

impl Table<Order> for Orders {
    fn load(&self, db: &Connection, ids: &[i64]) -> rusqlite::Result<Vec<Order>> {
        let sql = "SELECT id, version, cents, state FROM orders WHERE id = ?1";
        let mut find = db.prepare_cached(sql)?;
        let found = ids.iter().filter_map(|id| find.query_row([id], order).optional().transpose());
        found.collect()
    }

    fn save(&self, tx: &Connection, order: &Order, read: Version) -> rusqlite::Result<bool> {
        // Without the last condition somebody else's change would be written over.
        let sql = "UPDATE orders SET version = ?2, cents = ?3, state = ?4
                   WHERE id = ?1 AND version = ?5";
        let Order { id, version, cents, state } = order;
        let mut save = tx.prepare_cached(sql)?;
        Ok(save.execute(params![id, version.0, cents, state.as_str(), read.0])? == 1)
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
            let mut order = Order { id, version: Version::default(), cents, state: State::Placed };
            orders.entity_updated(tx, &mut order)?;
            let sql = "INSERT INTO orders VALUES (?1, ?2, ?3, ?4)";
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
