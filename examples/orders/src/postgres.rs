//! The orders in a PostgreSQL.

use vedetta::db::Schema;
use vedetta::db::postgres::tokio_postgres::{Error, Row};
use vedetta::db::postgres::{GenericClient, Postgres, Transaction};
use vedetta::stage::postgres::{Records, Table};
use vedetta::stage::{Entities, Version};

use crate::order::{Order, State};

pub(crate) const SCHEMA: Schema = Schema {
    component: "orders",
    steps: &["CREATE TABLE orders (
                  id      bigint PRIMARY KEY,
                  version bigint NOT NULL,
                  cents   bigint NOT NULL,
                  state   text NOT NULL CHECK (state IN ('placed', 'paid', 'packed', 'shipped', 'delivered'))
              )"],
};

pub(crate) struct Orders;

fn order(row: &Row) -> Order {
    let state: &str = row.get(3);
    let state = state.parse().expect("the table has no other states");
    Order { id: row.get(0), version: Version(row.get(1)), cents: row.get(2), state }
}

impl Table<Order> for Orders {
    async fn load(&self, db: &impl GenericClient, ids: &[i64]) -> Result<Vec<Order>, Error> {
        let sql = "SELECT id, version, cents, state FROM orders WHERE id = ANY ($1)";
        let find = db.prepare_cached(sql).await?;
        Ok(db.query(&find, &[&ids]).await?.iter().map(order).collect())
    }

    async fn save(
        &self,
        tx: &Transaction<'_>,
        order: &Order,
        read: Version,
    ) -> Result<bool, Error> {
        // Without the last condition somebody else's change would be written over.
        let sql = "UPDATE orders SET version = $2, cents = $3, state = $4
                   WHERE id = $1 AND version = $5";
        let Order { id, version, cents, state } = order;
        let save = tx.prepare_cached(sql).await?;
        Ok(tx.execute(&save, &[id, &version.0, cents, &state.as_str(), &read.0]).await? == 1)
    }

    async fn save_all(
        &self,
        tx: &Transaction<'_>,
        changed: &[(Order, Version)],
    ) -> Result<Vec<bool>, Error> {
        let sql = "UPDATE orders AS o SET version = u.version, cents = u.cents, state = u.state
                   FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::text[], $5::bigint[])
                        AS u (id, version, cents, state, read)
                   WHERE o.id = u.id AND o.version = u.read
                   RETURNING o.id";
        let column = |field: fn(&Order) -> i64| -> Vec<i64> {
            changed.iter().map(|(order, _)| field(order)).collect()
        };
        let ids = column(|order| order.id);
        let versions = column(|order| order.version.0);
        let cents = column(|order| order.cents);
        let states: Vec<&str> = changed.iter().map(|(order, _)| order.state.as_str()).collect();
        let reads: Vec<i64> = changed.iter().map(|(_, read)| read.0).collect();
        let save = tx.prepare_cached(sql).await?;
        let saved = tx.query(&save, &[&ids, &versions, &cents, &states, &reads]).await?;
        let saved: Vec<i64> = saved.iter().map(|row| row.get(0)).collect();
        Ok(ids.iter().map(|id| saved.contains(id)).collect())
    }
}

/// Places orders: each is stored, and queued to be looked at, or neither.
pub(crate) async fn place(
    db: &Postgres,
    orders: &Entities<Order, Records, Orders>,
    cents: Vec<i64>,
) -> anyhow::Result<()> {
    let mut client = db.client().await?;
    let tx = client.transaction().await?;
    // Who else places orders waits: the next number is ours.
    tx.batch_execute("LOCK TABLE orders IN SHARE ROW EXCLUSIVE MODE").await?;
    let last: i64 = tx.query_one("SELECT coalesce(max(id), 0) FROM orders", &[]).await?.get(0);
    let mut placed: Vec<Order> = cents
        .into_iter()
        .zip(last + 1..)
        .map(|(cents, id)| Order { id, version: Version::default(), cents, state: State::Placed })
        .collect();
    orders.entities_updated(&tx, &mut placed).await?;
    let insert = tx.prepare_cached("INSERT INTO orders VALUES ($1, $2, $3, $4)").await?;
    for Order { id, version, cents, state } in &placed {
        tx.execute(&insert, &[id, &version.0, cents, &state.as_str()]).await?;
    }
    Ok(tx.commit().await?)
}

/// How many orders are in each state.
pub(crate) async fn count(db: &Postgres) -> anyhow::Result<Vec<(String, i64)>> {
    let client = db.client().await?;
    let rows = client.query("SELECT state, count(*) FROM orders GROUP BY state", &[]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}
