//! The orders in a PostgreSQL.

use vedetta::db::Schema;
use vedetta::db::postgres::tokio_postgres::types::ToSql;
use vedetta::db::postgres::tokio_postgres::{Error, Row};
use vedetta::db::postgres::{GenericClient, Postgres, Transaction};
use vedetta::stage::postgres::{Records, Table};
use vedetta::stage::{Entities, Version};

use crate::order::Order;

pub(crate) const SCHEMA: Schema = Schema {
    component: "orders",
    steps: &[
        "CREATE TABLE orders (
                  id      bigint PRIMARY KEY,
                  version bigint NOT NULL,
                  cents   bigint NOT NULL,
                  state   text NOT NULL CHECK (state IN ('placed', 'paid', 'packed', 'shipped', 'delivered'))
              )",
        "ALTER TABLE orders ADD COLUMN is_invoiced boolean NOT NULL DEFAULT false;
         CREATE SEQUENCE order_id;
         SELECT setval('order_id', coalesce(max(id), 0) + 1, false) FROM orders",
    ],
};

pub(crate) struct Orders;

fn order(row: &Row) -> Order {
    let state: &str = row.get(3);
    let state = state.parse().expect("the table has no other states");
    let (version, is_invoiced) = (Version(row.get(1)), row.get(4));
    Order { id: row.get(0), version, cents: row.get(2), state, is_invoiced }
}

impl Table<Order> for Orders {
    async fn load(&self, db: &impl GenericClient, ids: &[i64]) -> Result<Vec<Order>, Error> {
        let sql = "SELECT id, version, cents, state, is_invoiced FROM orders WHERE id = ANY ($1)";
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
        let sql = "UPDATE orders SET version = $2, cents = $3, state = $4, is_invoiced = $5
                   WHERE id = $1 AND version = $6";
        let Order { id, version, cents, state, is_invoiced } = order;
        let save = tx.prepare_cached(sql).await?;
        let order: [&(dyn ToSql + Sync); 6] =
            [id, &version.0, cents, &state.as_str(), is_invoiced, &read.0];
        Ok(tx.execute(&save, &order).await? == 1)
    }

    async fn save_all(
        &self,
        tx: &Transaction<'_>,
        changed: &[(Order, Version)],
    ) -> Result<Vec<bool>, Error> {
        let sql = "UPDATE orders AS o SET version = u.version, cents = u.cents, state = u.state,
                                          is_invoiced = u.is_invoiced
                   FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::text[], $5::boolean[],
                               $6::bigint[])
                        AS u (id, version, cents, state, is_invoiced, read)
                   WHERE o.id = u.id AND o.version = u.read
                   RETURNING o.id";
        let column = |field: fn(&Order) -> i64| -> Vec<i64> {
            changed.iter().map(|(order, _)| field(order)).collect()
        };
        let ids = column(|order| order.id);
        let versions = column(|order| order.version.0);
        let cents = column(|order| order.cents);
        let states: Vec<&str> = changed.iter().map(|(order, _)| order.state.as_str()).collect();
        let invoiced: Vec<bool> = changed.iter().map(|(order, _)| order.is_invoiced).collect();
        let reads: Vec<i64> = changed.iter().map(|(_, read)| read.0).collect();
        let save = tx.prepare_cached(sql).await?;
        let orders: [&(dyn ToSql + Sync); 6] =
            [&ids, &versions, &cents, &states, &invoiced, &reads];
        let saved = tx.query(&save, &orders).await?;
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
    let count = i64::try_from(cents.len())?;
    let numbers = "SELECT nextval('order_id') FROM generate_series(1, $1::bigint)";
    let ids = tx.query(numbers, &[&count]).await?;
    let placed = ids.iter().zip(cents).map(|(id, cents)| Order::placed(id.get(0), cents));
    let mut placed: Vec<Order> = placed.collect();
    orders.entities_updated(&tx, &mut placed).await?;
    let sql = "INSERT INTO orders (id, version, cents, state) VALUES ($1, $2, $3, $4)";
    let insert = tx.prepare_cached(sql).await?;
    for Order { id, version, cents, state, .. } in &placed {
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
