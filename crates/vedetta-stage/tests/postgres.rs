//! Stages on PostgreSQL.

#[macro_use]
mod suite;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use suite::{Ask, HOUR, ORDERS, Order, OrderId, Step, World, eventually, held, status};
use testing::postgres::Server;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::Instant;
use vedetta_core::queue::{Kept, Settled};
use vedetta_db::Schema;
use vedetta_db::postgres::tokio_postgres::{Error, Row};
use vedetta_db::postgres::{GenericClient, Postgres, Transaction};
use vedetta_stage::postgres::{Records, SCHEMA, Table};
use vedetta_stage::{
    Backend as _, BoxError, Checked, Claim, Ending, Entities, Fate, Going, Lane, LaneCounts,
    Records as _, SYSTEM, Saved, Unsettled, Version, Visit,
};

suite!(crate::Pg);

const SHOP: Schema = Schema {
    component: "shop",
    steps: &["CREATE TABLE orders (
        id bigint PRIMARY KEY, version bigint NOT NULL, marks text NOT NULL,
        state text CHECK (state <> 'forbidden')
    )"],
};

struct Orders;

fn order(row: &Row) -> Result<Order, Error> {
    Ok(Order {
        id: row.try_get(0)?,
        version: Version(row.try_get(1)?),
        state: row.try_get(2)?,
        marks: Order::marks_of_text(row.try_get(3)?),
    })
}

impl Table<Order> for Orders {
    async fn load(&self, db: &impl GenericClient, ids: &[OrderId]) -> Result<Vec<Order>, Error> {
        let sql = "SELECT id, version, state, marks FROM orders WHERE id = ANY ($1)";
        let ids: Vec<i64> = ids.iter().map(|id| id.0).collect();
        let rows = db.query(&db.prepare_cached(sql).await?, &[&ids]).await?;
        rows.iter().map(order).collect()
    }

    async fn save(
        &self,
        tx: &Transaction<'_>,
        order: &Order,
        read: Version,
    ) -> Result<bool, Error> {
        let sql = "UPDATE orders SET version = $1, state = $2, marks = $3
                   WHERE id = $4 AND version = $5";
        let Order { id, version, state, .. } = order;
        let save = tx.prepare_cached(sql).await?;
        let marks = order.marks_as_text();
        Ok(tx.execute(&save, &[&version.0, state, &marks, id, &read.0]).await? == 1)
    }
}

struct Pg {
    server: Arc<Server>,
    url: String,
    orders: Entities<Order, Records, Orders>,
}

/// One server for all tests that run at the same time.
static SERVER: Mutex<Weak<Server>> = Mutex::const_new(Weak::new());

impl Pg {
    async fn open(server: Arc<Server>, url: String) -> Self {
        let db = Postgres::open_with(&url, 6, &[SCHEMA, SHOP]).await.unwrap();
        let orders = Entities::new(Records::new(db), ORDERS, Orders).await.unwrap();
        Self { server, url, orders }
    }

    fn db(&self) -> &Postgres {
        self.orders.records().db()
    }

    async fn execute(&self, sql: &str, id: i64) {
        self.db().client().await.unwrap().execute(sql, &[&id]).await.unwrap();
    }
}

impl World for Pg {
    type Records = Records;
    type Orders = Entities<Order, Records, Orders>;

    async fn new() -> Self {
        let mut shared = SERVER.lock().await;
        let server = match shared.upgrade() {
            Some(server) => server,
            None => {
                let server = Arc::new(Server::start().await);
                *shared = Arc::downgrade(&server);
                server
            }
        };
        drop(shared);
        let url = server.database().await;
        Self::open(server, url).await
    }

    async fn neighbour(&self) -> Self {
        Self::open(Arc::clone(&self.server), self.url.clone()).await
    }

    async fn reopened(self) -> Self {
        let Self { server, url, orders } = self;
        drop(orders);
        Self::open(server, url).await
    }

    fn orders(&self) -> &Self::Orders {
        &self.orders
    }

    fn sharded(&self, shards: u16) -> Self::Orders {
        self.orders.clone().sharded(shards)
    }

    async fn create(&self, mut new: Vec<Order>) -> Result<(), BoxError> {
        let mut client = self.db().client().await?;
        let tx = client.transaction().await?;
        self.orders.entities_updated(&tx, &mut new).await?;
        let sql = "INSERT INTO orders (id, version, state, marks) VALUES ($1, $2, $3, $4)";
        for order in &new {
            let Order { id, version, state, .. } = order;
            tx.execute(sql, &[id, &version.0, state, &order.marks_as_text()]).await?;
        }
        Ok(tx.commit().await?)
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
        let client = self.db().client().await.unwrap();
        Orders.load(&client, &[OrderId(id)]).await.unwrap().pop()
    }

    async fn called(&self, name: &str) -> Self {
        let orders = Entities::new(self.records().clone(), name, Orders).await.unwrap();
        Self { server: Arc::clone(&self.server), url: self.url.clone(), orders }
    }

    async fn look(&self) -> Vec<(Order, String)> {
        let sql = "SELECT o.id, o.version, o.state, o.marks, coalesce(string_agg(l.stage, ' '), '')
                   FROM orders o
                   LEFT JOIN vedetta_stage_record r ON r.id = 'order-' || o.id
                   LEFT JOIN vedetta_stage_lane l ON l.lane = r.lane AND l.entity = 'orders'
                   GROUP BY o.id";
        let rows = self.db().client().await.unwrap().query(sql, &[]).await.unwrap();
        rows.iter().map(|row| (order(row).unwrap(), row.get(4))).collect()
    }

    async fn delete(&self, id: i64) {
        self.execute("DELETE FROM orders WHERE id = $1", id).await;
    }

    async fn spoil(&self, id: i64) {
        self.execute("UPDATE orders SET state = NULL WHERE id = $1", id).await;
    }

    async fn mend(&self, id: i64) {
        self.execute("UPDATE orders SET state = 'mended' WHERE id = $1", id).await;
    }
}

/// Waits until somebody in this database waits for a lock.
async fn somebody_waits(world: &Pg) {
    let sql = "SELECT count(*) FROM pg_stat_activity
               WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let client = world.db().client().await.unwrap();
    eventually("somebody waits for a lock", async || {
        client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) > 0
    })
    .await;
}

#[tokio::test]
async fn a_save_waits_for_who_has_the_order_and_is_a_conflict_if_they_changed_it() {
    for is_committed in [true, false] {
        let world = Pg::new().await;
        let neighbour = world.neighbour().await;
        let (step, mut runs) = held(Step::new("packing").wants(|order| order.state != "packed"));
        let processing = world.process([step]).await;
        world.order(1).await;
        let run = runs.next().await;

        let mut client = neighbour.db().client().await.unwrap();
        let theirs = client.transaction().await.unwrap();
        let mut order = Orders.load(&theirs, &[OrderId(1)]).await.unwrap().remove(0);
        order.marks.push("theirs".into());
        order.version = order.version.next();
        assert!(Orders.save(&theirs, &order, Version(1)).await.unwrap());
        run.makes("packed");
        somebody_waits(&neighbour).await;
        if is_committed {
            order.version = Version(1);
            neighbour.orders.entity_updated(&theirs, &mut order).await.unwrap();
            theirs.commit().await.unwrap();
            let run = runs.next().await;
            assert_eq!((run.order.version, run.order.marks.len()), (Version(2), 1));
            // The next run may begin before the answer to the save is here.
            eventually("a conflict", async || status(&processing, "packing").conflicts == 1).await;
            run.makes("packed");
        } else {
            theirs.rollback().await.unwrap();
        }
        eventually("it is saved", async || world.get(1).await.state == "packed").await;
        world.rests_leaving(&mut runs).await;
        assert_eq!(world.get(1).await.marks.len(), usize::from(is_committed));
        assert_eq!(status(&processing, "packing").conflicts, u64::from(is_committed));
    }
}

/// Counts how often orders are read.
struct Counted(Arc<AtomicUsize>);

impl Table<Order> for Counted {
    async fn load(&self, db: &impl GenericClient, ids: &[OrderId]) -> Result<Vec<Order>, Error> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Orders.load(db, ids).await
    }

    async fn save(
        &self,
        tx: &Transaction<'_>,
        order: &Order,
        read: Version,
    ) -> Result<bool, Error> {
        Orders.save(tx, order, read).await
    }
}

#[tokio::test]
async fn a_stage_with_room_is_handed_what_it_wants_as_the_system_stage_read_it() {
    // At once, or after up to a twentieth of that.
    for spread in [Duration::ZERO, Duration::from_millis(10), Duration::from_millis(50)] {
        let world = Pg::new().await;
        let reads = Arc::new(AtomicUsize::new(0));
        let table = Counted(Arc::clone(&reads));
        let orders = Entities::new(world.records().clone(), ORDERS, table).await.unwrap();
        let (step, mut runs) = held(Step::new("packing").wants(|order| order.state != "packed"));
        let processor = suite::quick(orders).spread(spread);
        let processing = processor.stage(step).start().await.unwrap();
        let mut was_handed = false;
        for id in 1..=20 {
            let before = reads.load(Ordering::Relaxed);
            world.order(id).await;
            let run = runs.next().await;
            assert_eq!(run.order.id, id);
            // A stage that looks at its queue just then claims it, and reads it again.
            was_handed |= reads.load(Ordering::Relaxed) - before == 1;
            run.makes("packed");
            eventually("it is packed", async || world.get(id).await.state == "packed").await;
            eventually("nothing is left of it", async || {
                world.counts(SYSTEM).await.records + world.counts("packing").await.records == 0
            })
            .await;
        }
        assert!(was_handed, "{spread:?}");
        assert_eq!(status(&processing, "packing").pull.flow.stale, 0);
        processing.stop(HOUR).await;
    }
}

#[tokio::test]
async fn what_a_stage_is_handed_begins_its_delay_after_it_was_sorted_and_not_before() {
    let world = Pg::new().await;
    let sorting = Duration::from_millis(20);
    let slow = format!(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN PERFORM pg_sleep({}); RETURN NEW; END';
         CREATE TRIGGER slow BEFORE INSERT ON vedetta_stage_record
             FOR EACH ROW WHEN (NEW.token <> 0) EXECUTE FUNCTION slow()",
        sorting.as_secs_f64()
    );
    world.db().client().await.unwrap().batch_execute(&slow).await.unwrap();
    let reads = Arc::new(AtomicUsize::new(0));
    let table = Counted(Arc::clone(&reads));
    let orders = Entities::new(world.records().clone(), ORDERS, table).await.unwrap();
    let asked = Arc::new(parking_lot::Mutex::new(None));
    let note = Arc::clone(&asked);
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let step = Step::new("packing").wants(move |_| {
        *note.lock() = Some(Instant::now());
        true
    });
    let step = step.does(move |_| {
        let _ = tell.send(Instant::now());
        async { Ok(Visit::untouched()) }
    });
    // As it is wanted by one stage only, up to a twentieth of that: 10 ms.
    let processor = suite::quick(orders).spread(Duration::from_millis(200));
    let processing = processor.stage(step).start().await.unwrap();
    let mut waits = Vec::new();
    for id in 1..=400 {
        let before = reads.load(Ordering::Relaxed);
        world.order(id).await;
        let began = testing::soon("it runs", told.recv()).await.unwrap();
        // One that was claimed is read again.
        if reads.load(Ordering::Relaxed) - before == 1 {
            waits.push(began - asked.lock().take().expect("it was asked"));
        }
        world.rests().await;
        if waits.len() == 40 {
            break;
        }
    }
    assert_eq!(waits.len(), 40, "they are handed over, if not all of them");
    assert!(waits.iter().all(|wait| *wait >= sorting), "{waits:?}");
    // Half of them, if chance is even; none but by accident, if nobody waited after the sorting.
    let half = sorting + Duration::from_millis(5);
    let long = waits.iter().filter(|wait| **wait >= half).count();
    assert!(long >= 5, "{waits:?}");
    processing.stop(HOUR).await;
}

#[tokio::test]
async fn of_several_stages_that_want_an_order_after_delays_each_reads_it_for_itself() {
    let world = Pg::new().await;
    let reads = Arc::new(AtomicUsize::new(0));
    let table = Counted(Arc::clone(&reads));
    let orders = Entities::new(world.records().clone(), ORDERS, table).await.unwrap();
    let (left, mut lefts) = held(Step::new("left"));
    let (right, mut rights) = held(Step::new("right"));
    let processor = suite::quick(orders).spread(Duration::from_millis(2));
    let processing = processor.stage(left).stage(right).start().await.unwrap();
    for id in 1..=20 {
        let before = reads.load(Ordering::Relaxed);
        world.order(id).await;
        let (left, right) = (lefts.next().await, rights.next().await);
        assert_eq!(reads.load(Ordering::Relaxed) - before, 3, "the system stage read it, too");
        left.leaves();
        right.leaves();
        world.rests().await;
    }
    processing.stop(HOUR).await;
}

#[tokio::test]
async fn what_is_to_be_tried_again_is_not_kept_waiting_by_what_is_handed_over() {
    let world = Pg::new().await;
    let (step, mut runs) = held(Step::new("packing").wants(|order| order.state != "packed"));
    // Nothing is looked at but for a reason.
    let processing = world.processor().poll(HOUR).stage(step).start().await.unwrap();
    world.order(1).await;
    let soon = Duration::from_millis(300);
    runs.next().await.ends(vedetta_stage::Visit::untouched().again(soon));
    testing::soon("the first is tried again", async {
        for id in 2.. {
            world.order(id).await;
            let run = runs.next().await;
            if run.order.id == 1 {
                return run.makes("packed");
            }
            run.makes("packed");
        }
    })
    .await;
    // The last one that was handed over may have begun, and nobody ends it.
    processing.stop(Duration::ZERO).await;
}

#[tokio::test]
async fn what_goes_to_a_stage_is_held_at_once_unless_it_is_there_already() {
    let world = Pg::new().await;
    world.create([1, 2].map(Order::new).to_vec()).await.unwrap();
    let records = world.records();
    let system = records.lane(ORDERS, SYSTEM).await.unwrap();
    let lane = records.lane(ORDERS, "packing").await.unwrap();
    records.enqueue(lane, &[("order-2", 0, Duration::ZERO)]).await.unwrap();
    let mut claims = records.claim(system, &[0], 9, HOUR).await.unwrap().claims;
    claims.sort_by(|a, b| a.id.cmp(&b.id));
    let endings = claims.iter().zip([11, 22]).map(|(claim, token)| Ending {
        claim: claim.clone(),
        fate: Fate::Gone,
        saves: None,
        visits: vec![Going { lane, after: Duration::ZERO, hold: Some((token, HOUR)) }],
    });
    let answer = world.orders.settle(system, endings.collect()).await.unwrap();
    assert_eq!(answer.saved, vec![Ok(Saved::Settled(Settled::Gone)); 2]);
    assert_eq!(answer.held.into_iter().collect::<Vec<_>>(), [11]);

    // Nobody else gets what is held, and who holds it can settle it.
    let claimed = records.claim(lane, &[0], 9, HOUR).await.unwrap().claims;
    assert_eq!(suite::ids(&claimed), ["order-2"]);
    let ours = Claim { id: "order-1".into(), token: 11, failures: 0 };
    let settled = records.settle(lane, &[(ours.clone(), Fate::Released)]).await.unwrap();
    assert!(matches!(settled[..], [Settled::Again(_)]), "{settled:?}");
    assert_eq!(records.settle(lane, &[(ours, Fate::Gone)]).await.unwrap(), [Settled::Stale]);
    let claimed = records.claim(lane, &[0], 9, HOUR).await.unwrap().claims;
    assert_eq!(suite::ids(&claimed), ["order-1"], "it is due at once when it is given back");
}

#[tokio::test]
async fn what_was_held_for_later_is_due_then_when_it_is_given_back() {
    let world = Pg::new().await;
    world.order(1).await;
    let records = world.records();
    let system = records.lane(ORDERS, SYSTEM).await.unwrap();
    let lane = records.lane(ORDERS, "packing").await.unwrap();
    let claim = records.claim(system, &[0], 1, HOUR).await.unwrap().claims.remove(0);
    let visits = vec![Going { lane, after: HOUR, hold: Some((7, 2 * HOUR)) }];
    let ending = Ending { claim, fate: Fate::Gone, saves: None, visits };
    let answer = world.orders.settle(system, vec![ending]).await.unwrap();
    assert_eq!(answer.held.into_iter().collect::<Vec<_>>(), [7]);
    assert!(world.record("packing", 1).await.is_some_and(|record| record.is_held));

    let ours = Claim { id: "order-1".into(), token: 7, failures: 0 };
    records.settle(lane, &[(ours, Fate::Released)]).await.unwrap();
    let record = world.record("packing", 1).await.expect("it is given back");
    assert!(!record.is_held && suite::about(record.due_in, HOUR), "{record:?}");
}

/// Settles the record that the system stage has of an order while somebody else, on a connection of their own,
/// is about to write to it; then they do, or do not after all. What came of it, and what is left.
async fn raced<T>(
    is_committed: bool,
    settle: impl AsyncFnOnce(&Pg, Lane, Claim) -> T,
) -> (T, LaneCounts) {
    let world = Pg::new().await;
    let neighbour = world.neighbour().await;
    world.order(1).await;
    let records = world.records();
    let lane = records.lane(ORDERS, SYSTEM).await.unwrap();
    let claim = records.claim(lane, &[0], 1, HOUR).await.unwrap().claims.remove(0);

    let mut client = neighbour.db().client().await.unwrap();
    let theirs = client.transaction().await.unwrap();
    let mut order = Orders.load(&theirs, &[OrderId(1)]).await.unwrap().remove(0);
    neighbour.orders.entity_updated(&theirs, &mut order).await.unwrap();
    assert!(Orders.save(&theirs, &order, Version(1)).await.unwrap());
    let (settled, ()) = tokio::join!(settle(&world, lane, claim), async {
        somebody_waits(&neighbour).await;
        if is_committed {
            theirs.commit().await.unwrap();
        } else {
            theirs.rollback().await.unwrap();
        }
    });
    (settled, world.counts(SYSTEM).await)
}

const AT_ONCE: Settled = Settled::Again(Duration::ZERO);

#[tokio::test]
async fn a_save_waits_for_who_writes_to_the_record_and_is_saved_and_due_at_once_if_they_did() {
    for (is_committed, expected) in [(true, AT_ONCE), (false, Settled::Gone)] {
        let world = Pg::new().await;
        let neighbour = world.neighbour().await;
        world.order(1).await;
        let records = world.records();
        let lane = records.lane(ORDERS, "packing").await.unwrap();
        records.enqueue(lane, &[("order-1", 0, Duration::ZERO)]).await.unwrap();
        let claim = records.claim(lane, &[0], 1, HOUR).await.unwrap().claims.remove(0);

        let mut client = neighbour.db().client().await.unwrap();
        let theirs = client.transaction().await.unwrap();
        // As the system stage of another process does it.
        let enqueue = "UPDATE vedetta_stage_record SET version = version + 1, visit_at = now()
                       WHERE lane = (SELECT lane FROM vedetta_stage_lane WHERE stage = 'packing')";
        assert_eq!(theirs.execute(enqueue, &[]).await.unwrap(), 1);
        let saves = Some((Order::new(1).is("packed"), Version(1)));
        let ending = Ending { claim, fate: Fate::Gone, saves, visits: Vec::new() };
        let (answer, ()) = tokio::join!(world.orders.settle(lane, vec![ending]), async {
            somebody_waits(&neighbour).await;
            if is_committed {
                theirs.commit().await.unwrap();
            } else {
                theirs.rollback().await.unwrap();
            }
        });
        assert_eq!(answer.unwrap().saved, [Ok(Saved::Settled(expected))]);
        assert_eq!(world.get(1).await.state, "packed");
        let left = world.counts("packing").await;
        assert_eq!((left.records, left.due), if is_committed { (1, 1) } else { (0, 0) });
    }
}

#[tokio::test]
async fn an_order_is_saved_its_record_settled_and_the_system_stage_told_in_one_transaction() {
    let world = Pg::new().await;
    world.order(1).await;
    let records = world.records();
    let lane = records.lane(ORDERS, "packing").await.unwrap();
    records.enqueue(lane, &[("order-1", 0, Duration::ZERO)]).await.unwrap();
    let claim = records.claim(lane, &[0], 1, HOUR).await.unwrap().claims.remove(0);
    let saves = Some((Order::new(1).is("packed"), Version(1)));
    let ending = Ending { claim, fate: Fate::Visit(HOUR), saves, visits: Vec::new() };
    world.orders.settle(lane, vec![ending]).await.unwrap();
    let sql = "SELECT xmin::text FROM orders UNION ALL
               SELECT xmin::text FROM vedetta_stage_record WHERE id = 'order-1'";
    let rows = world.db().client().await.unwrap().query(sql, &[]).await.unwrap();
    let writers: Vec<&str> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(writers.len(), 3, "the order and both records");
    assert!(writers.iter().all(|writer| *writer == writers[0]), "{writers:?}");
}

#[tokio::test]
async fn a_removal_waits_for_who_writes_to_the_record_and_is_none_if_they_did() {
    for (is_committed, expected) in [(true, AT_ONCE), (false, Settled::Gone)] {
        let (settled, left) = raced(is_committed, async |world, lane, claim| {
            world.records().settle(lane, &[(claim, Fate::Gone)]).await.unwrap()
        })
        .await;
        assert_eq!(settled, [expected]);
        assert_eq!((left.records, left.due), if is_committed { (1, 1) } else { (0, 0) });
    }
}

#[tokio::test]
async fn a_visit_later_waits_for_who_writes_to_the_record_and_is_at_once_if_they_did() {
    for is_committed in [true, false] {
        let (settled, left) = raced(is_committed, async |world, lane, claim| {
            world.records().settle(lane, &[(claim, Fate::Visit(HOUR))]).await.unwrap()
        })
        .await;
        let [Settled::Again(after)] = settled[..] else { panic!("{settled:?}") };
        assert_eq!(after.is_zero(), is_committed);
        assert!(is_committed || suite::about(Some(after), HOUR), "{after:?}");
        assert_eq!((left.records, left.due), (1, u64::from(is_committed)));
    }
}

#[tokio::test]
async fn a_sort_waits_for_who_writes_to_the_record_and_is_done_again_if_they_did() {
    for (is_committed, expected) in [(true, AT_ONCE), (false, Settled::Gone)] {
        for hold in [None, Some((7, HOUR))] {
            let ((answer, wanted), left) = raced(is_committed, async |world, lane, claim| {
                let packing = world.records().lane(ORDERS, "packing").await.unwrap();
                let going = Going { lane: packing, after: Duration::ZERO, hold };
                let ending = Ending { claim, fate: Fate::Gone, saves: None, visits: vec![going] };
                let answer = world.orders.settle(lane, vec![ending]).await.unwrap();
                (answer, world.counts("packing").await)
            })
            .await;
            assert_eq!(answer.saved, [Ok(Saved::Settled(expected))]);
            assert_eq!((left.records, left.due), if is_committed { (1, 1) } else { (0, 0) });
            // It is wanted either way, by what was read before.
            let held = u64::from(hold.is_some());
            assert_eq!(answer.held.len() as u64, held);
            assert_eq!((wanted.records, wanted.held), (1, held));
        }
    }
}

/// What happens within the transaction that saves an order.
enum Mishap {
    /// Nothing more is heard of its process, as far as the server can tell.
    Stalls(Arc<Stall>),
    /// Its thread is blocked for so long, and then the server is asked something.
    Blocks(Duration),
    /// The server is asked this.
    Asks(String),
}

/// Is refused, and may not be the next time.
const PASSES: &str = "DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = 'serialization_failure'; END $$";

/// Where somebody stands still until the test lets them go on.
struct Stall {
    is_reached: Semaphore,
    is_over: Semaphore,
}

impl Stall {
    fn new() -> Arc<Self> {
        Arc::new(Self { is_reached: Semaphore::new(0), is_over: Semaphore::new(0) })
    }

    async fn is_reached(&self) {
        testing::soon("it stalls", self.is_reached.acquire()).await.unwrap().forget();
    }

    fn is_over(&self) {
        self.is_over.add_permits(1);
    }
}

/// Orders with mishaps, by their ids: for each save one of them.
struct Ominous(parking_lot::Mutex<Vec<(i64, Mishap)>>);

impl Ominous {
    async fn orders<const N: usize>(
        world: &Pg,
        mishaps: [(i64, Mishap); N],
    ) -> Entities<Order, Records, Self> {
        let table = Self(parking_lot::Mutex::new(Vec::from(mishaps)));
        Entities::new(world.records().clone(), ORDERS, table).await.unwrap()
    }
}

impl Table<Order> for Ominous {
    async fn load(&self, db: &impl GenericClient, ids: &[OrderId]) -> Result<Vec<Order>, Error> {
        Orders.load(db, ids).await
    }

    async fn save(
        &self,
        tx: &Transaction<'_>,
        order: &Order,
        read: Version,
    ) -> Result<bool, Error> {
        let mishap = {
            let mut left = self.0.lock();
            let next = left.iter().position(|(id, _)| *id == order.id);
            next.map(|next| left.remove(next).1)
        };
        let is_saved = Orders.save(tx, order, read).await?;
        match mishap {
            Some(Mishap::Stalls(stall)) => {
                stall.is_reached.add_permits(1);
                stall.is_over.acquire().await.unwrap().forget();
            }
            Some(Mishap::Blocks(time)) => {
                std::thread::sleep(time);
                tx.batch_execute("SELECT 1").await?;
            }
            Some(Mishap::Asks(sql)) => tx.batch_execute(&sql).await?,
            None => {}
        }
        Ok(is_saved)
    }
}

#[tokio::test]
async fn who_stalls_while_it_saves_holds_up_nobody_for_longer_than_its_lease_and_saves_nothing() {
    let world = Pg::new().await;
    let neighbour = world.neighbour().await;
    let (lane, endings) = packed(&world, [1], Duration::from_secs(6)).await;
    let stall = Stall::new();
    let stalls = [(); 2].map(|()| (1, Mishap::Stalls(Arc::clone(&stall))));
    let orders = Ominous::orders(&world, stalls).await;
    let (answer, ()) = tokio::join!(orders.settle(lane, endings.clone()), async {
        stall.is_reached().await;
        let theirs = Step::new("packing").when("new").makes("theirs");
        let processing = neighbour.process([theirs]).await;
        eventually("others get it", async || neighbour.get(1).await.state == "theirs").await;
        neighbour.rests().await;
        processing.stop(HOUR).await;
    });
    let answer = answer.unwrap();
    assert!(matches!(answer.saved[..], [Err(Unsettled::Refused(_))]), "{answer:?}");
    let tried_again = orders.settle(lane, endings).await.unwrap().saved;
    assert_eq!(tried_again, [Ok(Saved::Settled(Settled::Stale))]);
    let order = neighbour.get(1).await;
    assert_eq!((order.version, &*order.state), (Version(2), "theirs"));
}

#[tokio::test]
async fn who_stalls_in_an_update_of_their_own_keeps_the_order_for_a_moment_only() {
    let world = Pg::new().await;
    world.order(1).await;
    let stall = Stall::new();
    let orders = Ominous::orders(&world, [(1, Mishap::Stalls(Arc::clone(&stall)))]).await;
    let update = orders.update(&OrderId(1), |order: &mut Order| order.marks.push("late".into()));
    let (late, ()) = tokio::join!(update, async {
        stall.is_reached().await;
        let change = world.change(1, |order| order.marks.push("quick".into()));
        testing::soon("another change is made", change).await.unwrap();
        stall.is_over();
    });
    assert!(late.unwrap_err().is_transient(), "it may be done again");
    assert_eq!(world.get(1).await.marks_as_text(), "quick");
}

#[tokio::test]
async fn a_save_that_outlives_the_lease_is_saved_and_nobody_gets_its_record_meanwhile() {
    let world = Pg::new().await;
    let neighbour = world.neighbour().await;
    let lease = Duration::from_secs(3);
    let (lane, mut endings) = packed(&world, [1, 2], lease).await;
    endings[1].fate = Fate::Visit(HOUR);
    // The server is busy with it, so nobody is idle.
    let outlives = format!("SELECT pg_sleep({})", 2.0 * lease.as_secs_f64());
    let orders = Ominous::orders(&world, [(1, Mishap::Asks(outlives))]).await;
    let is_saved = AtomicBool::new(false);
    let saving = async {
        let answer = orders.settle(lane, endings).await;
        is_saved.store(true, Ordering::Relaxed);
        answer.unwrap().saved
    };
    let (saved, found) = tokio::join!(saving, async {
        let mut found = 0;
        while !is_saved.load(Ordering::Relaxed) {
            found += neighbour.records().claim(lane, &[0], 9, HOUR).await.unwrap().claims.len();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        found
    });
    assert_eq!(found, 0, "they are locked, though due");
    assert_eq!(saved[0], Ok(Saved::Settled(Settled::Gone)));
    assert!(matches!(saved[1], Ok(Saved::Settled(Settled::Again(_)))), "{saved:?}");
    assert_eq!((world.get(1).await.version, world.get(2).await.version), (Version(2), Version(2)));
    assert_eq!(world.counts("packing").await.records, 1, "the visit in an hour");
}

/// Claims the records that a stage has of new orders, which it has packed.
async fn packed<const N: usize>(
    world: &Pg,
    ids: [i64; N],
    lease: Duration,
) -> (Lane, Vec<Ending<Order>>) {
    world.create(ids.map(Order::new).to_vec()).await.unwrap();
    let records = world.records();
    let lane = records.lane(ORDERS, "packing").await.unwrap();
    let ids = ids.map(|id| OrderId(id).to_string());
    let visits = ids.each_ref().map(|id| (id.as_str(), 0, Duration::ZERO));
    records.enqueue(lane, &visits).await.unwrap();
    let mut claims = records.claim(lane, &[0], 9, lease).await.unwrap().claims;
    claims.sort_by(|a, b| a.id.cmp(&b.id));
    let endings = claims.into_iter().map(|claim| Ending {
        saves: Some((Order::new(claim.id.parse::<OrderId>().unwrap().0).is("packed"), Version(1))),
        claim,
        fate: Fate::Gone,
        visits: Vec::new(),
    });
    (lane, endings.collect())
}

#[tokio::test]
async fn a_table_that_lets_the_server_wait_again_and_again_fails_for_its_own_order_only() {
    let world = Pg::new().await;
    let (lane, endings) = packed(&world, [1, 2, 3], Duration::from_secs(20)).await;
    let stalls = [Stall::new(), Stall::new()].map(|stall| (2, Mishap::Stalls(stall)));
    let orders = Ominous::orders(&world, stalls).await;
    let settling = orders.settle(lane, endings.clone());
    let saved = testing::soon("the server ends it", settling).await.unwrap().saved;
    assert_eq!(saved[0], Ok(Saved::Settled(Settled::Gone)));
    let Err(Unsettled::Refused(why)) = &saved[1] else { panic!("{saved:?}") };
    assert!(why.contains("let the database wait"), "{why}");
    // That one is noted first, while it is still held; what is left is asked for again.
    assert!(matches!(saved[2], Err(Unsettled::Lost(_))), "{saved:?}");
    assert_eq!(world.get(2).await.version, Version(1));
    let (after, not_before) = (HOUR, HOUR);
    let failed = Fate::Failed { after, not_before, error: why.clone(), park: false };
    let noted = [(endings[1].claim.clone(), failed)];
    let settled = world.records().settle(lane, &noted).await.unwrap();
    assert!(matches!(settled[..], [Settled::Again(_)]), "{settled:?}");
    let left = orders.settle(lane, endings[2..].to_vec()).await.unwrap().saved;
    assert_eq!(left, [Ok(Saved::Settled(Settled::Gone))]);
}

#[tokio::test]
async fn a_table_that_goes_on_when_the_server_has_ended_it_has_let_it_wait_all_the_same() {
    let world = Pg::new().await;
    let lease = Duration::from_secs(6);
    let (lane, endings) = packed(&world, [1, 2], lease).await;
    // The server waits for half of what is left of the lease.
    let blocks = [(); 2].map(|()| (1, Mishap::Blocks(lease * 6 / 10)));
    let orders = Ominous::orders(&world, blocks).await;
    let settling = orders.settle(lane, endings);
    let saved = testing::soon("it goes on", settling).await.unwrap().saved;
    let Err(Unsettled::Refused(why)) = &saved[0] else { panic!("{saved:?}") };
    assert!(why.contains("let the database wait"), "{why}");
    assert_eq!(world.get(1).await.version, Version(1));
}

#[tokio::test]
async fn what_was_settled_before_others_of_its_batch_could_be_saved_is_done_and_not_stale() {
    let world = Pg::new().await;
    world.create([1, 2, 3].map(Order::new).to_vec()).await.unwrap();
    let stall = Stall::new();
    // The third is not saved with the others, nor the first time alone.
    let passes = || (3, Mishap::Asks(PASSES.to_owned()));
    let mishaps = [(1, Mishap::Stalls(Arc::clone(&stall))), passes(), passes()];
    let orders = Ominous::orders(&world, mishaps).await;
    let (step, mut runs) = held(Step::new("packing").when("new"));
    let processing = suite::quick(orders).stage(step).start().await.unwrap();
    let mut begun = [runs.next().await, runs.next().await, runs.next().await];
    begun.sort_by_key(|run| run.order.id);
    let [first, second, third] = begun;
    // While the first is saved, the others end: they are settled together.
    first.makes("packed");
    stall.is_reached().await;
    second.leaves();
    third.makes("packed");
    eventually("both ended", async || status(&processing, "packing").pull.running == 0).await;
    stall.is_over();
    world.rests().await;
    assert_eq!(world.get(3).await.state, "packed");
    eventually("all are told", async || {
        let flow = status(&processing, "packing").pull.flow;
        flow.done + flow.stale == 3
    })
    .await;
    assert_eq!(status(&processing, "packing").pull.flow.stale, 0);
    processing.stop(HOUR).await;
    assert_eq!(world.counts("packing").await.tally.done, 3);
}

#[tokio::test]
async fn a_batch_is_answered_for_what_is_settled_though_the_rest_is_lost() {
    let world = Pg::new().await;
    world.create([1, 2].map(Order::new).to_vec()).await.unwrap();
    let records = world.records();
    let lane = records.lane(ORDERS, SYSTEM).await.unwrap();
    let claims = records.claim(lane, &[0], 2, HOUR).await.unwrap().claims;
    let passes = || (2, Mishap::Asks(PASSES.to_owned()));
    let orders = Ominous::orders(&world, [passes(), passes()]).await;
    let mut endings: Vec<_> = claims
        .into_iter()
        .map(|claim| Ending { claim, fate: Fate::Gone, saves: None, visits: Vec::new() })
        .collect();
    endings.sort_by(|a, b| a.claim.id.cmp(&b.claim.id));
    endings[1].saves = Some((Order::new(2).is("packed"), Version(1)));
    let saved = orders.settle(lane, endings).await.unwrap().saved;
    assert_eq!(saved[0], Ok(Saved::Settled(Settled::Gone)));
    assert!(matches!(saved[1], Err(Unsettled::Lost(_))), "{saved:?}");
    assert_eq!(world.get(2).await.version, Version(1));
}

#[tokio::test]
async fn what_could_be_settled_is_answered_for_though_the_database_fails_at_the_next() {
    let world = Pg::new().await;
    let (lane, mut endings) = packed(&world, [1, 2], HOUR).await;
    endings.iter_mut().for_each(|ending| ending.saves = None);
    endings[1].fate = Fate::Visit(HOUR);
    let fails = "
        CREATE FUNCTION fails() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN RAISE EXCEPTION USING ERRCODE = ''serialization_failure''; END';
        CREATE TRIGGER fails BEFORE UPDATE ON vedetta_stage_record
            FOR EACH ROW WHEN (NEW.held_until IS NULL) EXECUTE FUNCTION fails()";
    world.db().client().await.unwrap().batch_execute(fails).await.unwrap();
    let saved = world.orders.settle(lane, endings).await.unwrap().saved;
    assert_eq!(saved[0], Ok(Saved::Settled(Settled::Gone)));
    assert!(matches!(saved[1], Err(Unsettled::Lost(_))), "{saved:?}");
}

/// Never saves anything, whatever the version.
struct Stubborn;

impl Table<Order> for Stubborn {
    async fn load(&self, db: &impl GenericClient, ids: &[OrderId]) -> Result<Vec<Order>, Error> {
        Orders.load(db, ids).await
    }

    async fn save(&self, _: &Transaction<'_>, _: &Order, _: Version) -> Result<bool, Error> {
        Ok(false)
    }
}

#[tokio::test]
async fn a_table_that_saves_nothing_is_not_asked_for_ever() {
    let world = Pg::new().await;
    world.order(1).await;
    let stubborn = Entities::new(world.records().clone(), ORDERS, Stubborn).await.unwrap();
    let updating = stubborn.update(&OrderId(1), |order: &mut Order| order.state = "paid".into());
    let refused = testing::soon("it gives up", updating).await.unwrap_err();
    let why = vedetta_core::explain(&refused);
    assert!(why.contains("did not save order-1 though its version was right"), "{why}");
}

#[tokio::test]
async fn a_claim_passes_over_what_somebody_writes_to_and_takes_the_rest() {
    let world = Pg::new().await;
    let neighbour = world.neighbour().await;
    world.create(vec![Order::new(1), Order::new(2)]).await.unwrap();
    let records = world.records();
    let lane = records.lane(ORDERS, SYSTEM).await.unwrap();
    let mut client = neighbour.db().client().await.unwrap();
    let theirs = client.transaction().await.unwrap();
    let mut order = Orders.load(&theirs, &[OrderId(1)]).await.unwrap().remove(0);
    neighbour.orders.entity_updated(&theirs, &mut order).await.unwrap();
    let claimed = records.claim(lane, &[0], 9, HOUR).await.unwrap();
    assert_eq!(suite::ids(&claimed.claims), ["order-2"]);
    theirs.commit().await.unwrap();
    let claimed = records.claim(lane, &[0], 9, HOUR).await.unwrap();
    assert_eq!(suite::ids(&claimed.claims), ["order-1"]);
}

#[tokio::test]
async fn an_order_that_somebody_keeps_locked_holds_up_no_other() {
    let world = Pg::new().await;
    world.create((1..=9).map(suite::Order::new).collect()).await.unwrap();
    let neighbour = world.neighbour().await;
    let mut client = neighbour.db().client().await.unwrap();
    let theirs = client.transaction().await.unwrap();
    theirs.execute("SELECT FROM orders WHERE id = 1 FOR UPDATE", &[]).await.unwrap();

    let step = Step::new("packing").when("new").makes("packed");
    let processing = world.process([step]).await;
    for id in 2..=9 {
        eventually("the others are saved", async || world.get(id).await.state == "packed").await;
    }
    assert_eq!(world.get(1).await.state, "new");
    theirs.rollback().await.unwrap();
    world.rests().await;
    assert_eq!(world.get(1).await.state, "packed");
    assert_eq!(status(&processing, "packing").pull.flow.failed, 0);
}

#[tokio::test]
async fn several_orders_that_somebody_keeps_locked_cost_no_other_its_lease() {
    let world = Pg::new().await;
    world.create((1..=9).map(Order::new).collect()).await.unwrap();
    let neighbour = world.neighbour().await;
    let mut client = neighbour.db().client().await.unwrap();
    let theirs = client.transaction().await.unwrap();
    theirs.execute("SELECT FROM orders WHERE id <= 3 FOR UPDATE", &[]).await.unwrap();

    let (step, mut runs) = held(Step::new("packing").when("new"));
    let processor = world.processor().lease(Duration::from_secs(4));
    let processing = processor.stage(step).start().await.unwrap();
    let mut begun = Vec::new();
    while begun.len() < 9 {
        begun.push(runs.next().await);
    }
    begun.sort_by_key(|run| run.order.id);
    begun.into_iter().for_each(|run| run.makes("packed"));
    for id in 4..=9 {
        eventually("the others are saved", async || world.get(id).await.state == "packed").await;
    }
    assert_eq!(world.get(3).await.state, "new");
    let status = status(&processing, "packing");
    assert_eq!((status.pull.flow.stale, status.pull.flow.failed), (0, 0));
    theirs.rollback().await.unwrap();
    processing.stop(Duration::ZERO).await;
}

#[tokio::test]
async fn after_an_order_that_is_locked_the_rest_of_its_batch_is_asked_for_again() {
    let world = Pg::new().await;
    let (lane, endings) = packed(&world, [1, 2, 3], HOUR).await;
    let neighbour = world.neighbour().await;
    let mut client = neighbour.db().client().await.unwrap();
    let theirs = client.transaction().await.unwrap();
    theirs.execute("SELECT FROM orders WHERE id = 2 FOR UPDATE", &[]).await.unwrap();
    let saved = world.orders.settle(lane, endings.clone()).await.unwrap().saved;
    assert_eq!(saved[..2], [Ok(Saved::Settled(Settled::Gone)), Ok(Saved::Conflict)]);
    assert!(matches!(saved[2], Err(Unsettled::Lost(_))), "{saved:?}");
    let left = world.orders.settle(lane, endings[2..].to_vec()).await.unwrap().saved;
    assert_eq!(left, [Ok(Saved::Settled(Settled::Gone))]);
}

/// Stalls once before it reads.
struct Stalling {
    stall: Arc<Stall>,
    has_stalled: AtomicBool,
}

impl Table<Order> for Stalling {
    async fn load(&self, db: &impl GenericClient, ids: &[OrderId]) -> Result<Vec<Order>, Error> {
        if !self.has_stalled.swap(true, Ordering::Relaxed) {
            self.stall.is_reached.add_permits(1);
            self.stall.is_over.acquire().await.unwrap().forget();
        }
        Orders.load(db, ids).await
    }

    async fn save(
        &self,
        tx: &Transaction<'_>,
        order: &Order,
        read: Version,
    ) -> Result<bool, Error> {
        Orders.save(tx, order, read).await
    }
}

#[tokio::test]
async fn an_order_that_somebody_is_about_to_change_holds_up_no_other_in_the_system_stage() {
    for is_committed in [true, false] {
        let world = Pg::new().await;
        let neighbour = world.neighbour().await;
        world.create((1..=9).map(Order::new).collect()).await.unwrap();
        let (stall, has_stalled) = (Stall::new(), AtomicBool::new(false));
        let table = Stalling { stall: Arc::clone(&stall), has_stalled };
        let orders = Entities::new(world.records().clone(), ORDERS, table).await.unwrap();
        let step = Step::new("packing").when("new").makes("packed");
        let processor = suite::quick(orders).lease(HOUR).stage(step);
        let processing = processor.start().await.unwrap();

        // All of them are claimed. Now one is about to be changed, and that takes its time.
        stall.is_reached().await;
        let mut client = neighbour.db().client().await.unwrap();
        let theirs = client.transaction().await.unwrap();
        let mut order = Orders.load(&theirs, &[OrderId(1)]).await.unwrap().remove(0);
        neighbour.orders.entity_updated(&theirs, &mut order).await.unwrap();
        stall.is_over();
        for id in 2..=9 {
            eventually("the others are packed", async || world.get(id).await.state == "packed")
                .await;
        }
        world.create((10..=12).map(Order::new).collect()).await.unwrap();
        for id in 10..=12 {
            eventually("those that come, too", async || world.get(id).await.state == "packed")
                .await;
        }
        assert_eq!(world.get(1).await.state, "new");
        if is_committed {
            theirs.commit().await.unwrap();
        } else {
            theirs.rollback().await.unwrap();
        }
        // Long before its lease is over.
        world.rests().await;
        assert_eq!(world.get(1).await.state, "packed");
        assert_eq!(status(&processing, SYSTEM).pull.flow.stale, 0);
        assert_eq!(status(&processing, SYSTEM).pull.trouble, None);
        processing.stop(HOUR).await;
    }
}

#[tokio::test]
async fn what_is_to_become_of_a_locked_record_becomes_of_it_when_it_is_free() {
    let world = Pg::new().await;
    let neighbour = world.neighbour().await;
    let (lane, endings) = packed(&world, [1, 2, 3], HOUR).await;
    let fates = [Fate::Gone, Fate::Gone, Fate::Visit(HOUR)];
    let ends: Vec<_> = endings.into_iter().map(|ending| ending.claim).zip(fates).collect();
    let mut client = neighbour.db().client().await.unwrap();
    let theirs = client.transaction().await.unwrap();
    let write = "UPDATE vedetta_stage_record SET version = version + 1
                 WHERE lane = (SELECT lane FROM vedetta_stage_lane WHERE stage = 'packing')
                       AND id = 'order-1'";
    let lock = "SELECT FROM vedetta_stage_record WHERE id = 'order-3' FOR UPDATE";
    theirs.execute(write, &[]).await.unwrap();
    theirs.execute(lock, &[]).await.unwrap();

    let records = world.records();
    let settled = testing::soon("nobody waits for ever", records.settle(lane, &ends)).await;
    let settled = settled.unwrap();
    assert!(
        matches!(settled[..], [Settled::Again(_), Settled::Gone, Settled::Again(_)]),
        "{settled:?}"
    );
    assert!(records.claim(lane, &[0], 9, HOUR).await.unwrap().claims.is_empty());
    assert_eq!(world.counts("packing").await.held, 2);
    theirs.commit().await.unwrap();
    // Whether anybody claims or not.
    eventually("they are settled", async || world.counts("packing").await.held == 0).await;
    let claimed = records.claim(lane, &[0], 9, HOUR).await.unwrap().claims;
    assert_eq!(suite::ids(&claimed), ["order-1"], "something was written to it");
    let record = world.record("packing", 3).await.expect("it is wanted later");
    assert!(!record.is_held && suite::about(record.due_in, HOUR), "{record:?}");
}

#[tokio::test]
async fn a_record_that_is_locked_costs_no_other_its_lease() {
    let world = Pg::new().await;
    let neighbour = world.neighbour().await;
    let (lane, endings) = packed(&world, [1, 2], HOUR).await;
    let mut client = neighbour.db().client().await.unwrap();
    let theirs = client.transaction().await.unwrap();
    let lock = "SELECT FROM vedetta_stage_record WHERE id = 'order-1' FOR UPDATE";
    theirs.execute(lock, &[]).await.unwrap();

    let held: Vec<&Claim> = endings.iter().map(|ending| &ending.claim).collect();
    let keeping = world.records().keep(lane, &held, 3 * HOUR);
    let kept = testing::soon("nobody waits for ever", keeping).await.unwrap();
    assert_eq!(kept, [Kept::Unknown, Kept::Ours]);
    let sql = "SELECT held_until > now() + interval '2 hours' FROM vedetta_stage_record
               WHERE id = 'order-2' AND held_until IS NOT NULL";
    let row = world.db().client().await.unwrap().query_one(sql, &[]).await.unwrap();
    assert!(row.get::<_, bool>(0), "it is kept");
}

/// What comes of `ours` if somebody else locks first what it locks last, and the other way round.
async fn crossed<T>(world: &Pg, first: &str, last: &str, ours: impl Future<Output = T>) -> T {
    let mut client = world.db().client().await.unwrap();
    let theirs = client.transaction().await.unwrap();
    // So PostgreSQL ends ours.
    theirs.batch_execute("SET LOCAL deadlock_timeout = '1h'").await.unwrap();
    theirs.batch_execute(last).await.unwrap();
    let theirs = async {
        somebody_waits(world).await;
        theirs.batch_execute(first).await.unwrap();
        theirs.commit().await.unwrap();
    };
    testing::soon("both are done", async { tokio::join!(ours, theirs) }).await.0
}

#[tokio::test]
async fn a_change_that_was_ended_for_a_deadlock_is_done_again() {
    let world = Pg::new().await;
    // Time to get into it.
    let patient = "DO $$ BEGIN EXECUTE format(
        'ALTER DATABASE %I SET deadlock_timeout = 2000', current_database()); END $$";
    world.db().client().await.unwrap().batch_execute(patient).await.unwrap();
    let neighbour = world.neighbour().await;
    let ids = [1, 2].map(OrderId);
    world.create([1, 2].map(Order::new).to_vec()).await.unwrap();
    let [order_1, order_2] =
        [1, 2].map(|id| format!("SELECT FROM orders WHERE id = {id} FOR UPDATE"));
    let record_1 = "SELECT FROM vedetta_stage_record WHERE id = 'order-1' FOR UPDATE";

    let updated = neighbour.orders.update_all(&ids, |order| order.marks.push("all".into()));
    let updated = crossed(&world, &order_1, &order_2, Box::pin(updated)).await.unwrap();
    assert_eq!(updated.len(), 2);
    // As who enqueues before they lock the row.
    let updated = neighbour.orders.update(&ids[0], |order| order.marks.push("one".into()));
    let updated = crossed(&world, &order_1, record_1, Box::pin(updated)).await.unwrap();
    assert_eq!(updated.expect("it is there").version, Version(3));
    let read = vec![
        (world.get(1).await.marked("saved"), Version(3)),
        (world.get(2).await.marked("saved"), Version(2)),
    ];
    let saved = Box::pin(neighbour.orders.save_all(read));
    let saved = crossed(&world, &order_1, &order_2, saved).await;
    assert!(saved.unwrap().iter().all(|saved| matches!(saved, Checked::Saved(_))));
    let marks = [world.get(1).await, world.get(2).await].map(|order| order.marks_as_text());
    assert_eq!(marks, ["all one saved", "all saved"], "each once");
}

#[tokio::test]
async fn a_record_that_nobody_told_of_is_found_by_looking() {
    let world = Pg::new().await;
    let (step, mut runs) = held(Step::new("packing"));
    let processing = world.process([step]).await;
    world.order(1).await;
    world.rests_leaving(&mut runs).await;
    for _ in 0..5 {
        // As somebody who repairs a queue by hand might: without NOTIFY.
        let sql = "INSERT INTO vedetta_stage_record (lane, id, shard, due_at, visit_at)
                   SELECT lane, 'order-' || $1::bigint, 0, now(), now() FROM vedetta_stage_lane
                   WHERE entity = 'orders' AND stage = 'packing'";
        world.execute(sql, 1).await;
        runs.next().await.leaves();
        world.rests().await;
    }
    processing.stop(HOUR).await;
}

/// Saves a batch with one statement.
struct Batched;

impl Table<Order> for Batched {
    async fn load(&self, db: &impl GenericClient, ids: &[OrderId]) -> Result<Vec<Order>, Error> {
        Orders.load(db, ids).await
    }

    async fn save(
        &self,
        tx: &Transaction<'_>,
        order: &Order,
        read: Version,
    ) -> Result<bool, Error> {
        Orders.save(tx, order, read).await
    }

    async fn save_all(
        &self,
        tx: &Transaction<'_>,
        changed: &[(Order, Version)],
    ) -> Result<Vec<bool>, Error> {
        let sql = "UPDATE orders AS o SET version = u.version, state = u.state, marks = u.marks
                   FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::bigint[])
                        AS u (id, version, state, marks, read)
                   WHERE o.id = u.id AND o.version = u.read
                   RETURNING o.id";
        let ids: Vec<i64> = changed.iter().map(|(order, _)| order.id).collect();
        let versions: Vec<i64> = changed.iter().map(|(order, _)| order.version.0).collect();
        let states: Vec<&str> = changed.iter().map(|(order, _)| &*order.state).collect();
        let marks: Vec<String> = changed.iter().map(|(order, _)| order.marks_as_text()).collect();
        let reads: Vec<i64> = changed.iter().map(|(_, read)| read.0).collect();
        let save = tx.prepare_cached(sql).await?;
        let saved = tx.query(&save, &[&ids, &versions, &states, &marks, &reads]).await?;
        let saved: Vec<i64> = saved.iter().map(|row| row.get(0)).collect();
        Ok(ids.iter().map(|id| saved.contains(id)).collect())
    }
}

#[tokio::test]
async fn a_batch_in_one_statement_repeats_only_what_somebody_changed_meanwhile() {
    let world = Pg::new().await;
    let neighbour = world.neighbour().await;
    let ids = [1, 2, 3].map(OrderId);
    world.create([1, 2, 3].map(Order::new).to_vec()).await.unwrap();
    let batched: Entities<Order, _, _> =
        Entities::new(world.records().clone(), ORDERS, Batched).await.unwrap();

    let mut client = neighbour.db().client().await.unwrap();
    let theirs = client.transaction().await.unwrap();
    theirs.execute("SELECT FROM orders WHERE id = 2 FOR UPDATE", &[]).await.unwrap();
    let mut order = Orders.load(&theirs, &ids[1..2]).await.unwrap().remove(0).marked("theirs");
    neighbour.orders.entity_updated(&theirs, &mut order).await.unwrap();
    assert!(Orders.save(&theirs, &order, Version(1)).await.unwrap());
    let changes = AtomicUsize::new(0);
    let change = |order: &mut Order| {
        changes.fetch_add(1, Ordering::Relaxed);
        order.marks.push("ours".into());
    };
    let (updated, ()) = tokio::join!(batched.update_all(&ids, change), async {
        somebody_waits(&neighbour).await;
        theirs.commit().await.unwrap();
    });
    assert_eq!(updated.unwrap().len(), 3);
    assert_eq!(changes.load(Ordering::Relaxed), 4, "only order 2 was changed once more");
    for (id, version, marks) in [(1, 2, "ours"), (2, 3, "theirs ours"), (3, 2, "ours")] {
        let order = world.get(id).await;
        assert_eq!((order.version.0, &*order.marks_as_text()), (version, marks), "{id}");
    }
    assert_eq!(world.counts(SYSTEM).await.due, 3);
}
