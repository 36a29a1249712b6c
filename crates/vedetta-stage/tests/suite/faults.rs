//! Whatever goes wrong harms its own record, for as long as it goes wrong.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use testing::soon;
use vedetta_core::Backoff;
use vedetta_stage::{BoxError, Fate, Record, Records as _, SYSTEM, Version, Visit, Which};

use super::{
    Ask, HOUR, IS_MUTED, MUTE, ORDERS, Order, OrderId, Step, UNIQUE, UNREADABLE, UNWRITABLE, World,
    about, eventually, held, status,
};

const STAGE: &str = "packing";

/// Waits for a record of the stage that is as it should be, and no longer worked on.
async fn comes_to<W: World>(world: &W, id: i64, is_so: impl Fn(&Record) -> bool) -> Record {
    eventually("the record is so", async || {
        world.record(STAGE, id).await.is_some_and(|record| !record.is_held && is_so(&record))
    })
    .await;
    world.record(STAGE, id).await.expect("it stays")
}

/// Order 1 is harmed, as its record tells; orders 2 to 9 are packed all the same.
async fn only_the_first_is_harmed<W: World>(world: &W, error: &str) {
    let record = comes_to(world, 1, |record| record.failures == 1).await;
    let told = record.error.as_deref().unwrap_or_default();
    assert!(told.contains(error), "{told:?}");
    assert!(about(record.due_in, HOUR), "{record:?}");
    eventually("the others are packed", async || {
        let counts = world.counts(STAGE).await;
        (counts.records, counts.failing) == (1, 1) && world.counts(SYSTEM).await.records == 0
    })
    .await;
    for id in 2..=9 {
        let order = world.get(id).await;
        assert_eq!((&*order.state, order.version), ("packed", Version(2)), "{id}");
    }
}

async fn nine_orders<W: World>() -> W {
    let world = W::new().await;
    world.create((1..=9).map(Order::new).collect()).await.unwrap();
    world
}

/// Packs every order but the first, with which it does this.
fn packing<F>(first: impl Fn(Order) -> F + Clone + Send + Sync + 'static) -> Step
where
    F: Future<Output = Result<Visit<Order>, BoxError>> + Send + 'static,
{
    Step::new(STAGE).when("new").waits(HOUR).does(move |order| {
        let first = first.clone();
        async move {
            if order.id == 1 { first(order).await } else { Ok(Visit::updated(order.is("packed"))) }
        }
    })
}

pub async fn a_stage_that_fails_backs_off_for_its_own_record_only<W: World>() {
    let world = nine_orders::<W>().await;
    let processing = world.process([packing(|_| async { Err("no stock".into()) })]).await;
    only_the_first_is_harmed(&world, "no stock").await;
    eventually("it is counted", async || status(&processing, STAGE).pull.flow.failed == 1).await;
}

pub async fn a_panic_harms_its_own_record_only<W: World>() {
    let world = nine_orders::<W>().await;
    let _processing = world.process([packing(|_| async { panic!("too heavy") })]).await;
    only_the_first_is_harmed(&world, "it panicked: too heavy").await;
}

pub async fn a_run_that_takes_too_long_harms_its_own_record_only<W: World>() {
    let world = nine_orders::<W>().await;
    let step = packing(|_| std::future::pending())
        .limits(|limits| limits.timeout = Duration::from_millis(30));
    let _processing = world.process([step]).await;
    only_the_first_is_harmed(&world, "it took longer than 30ms").await;
}

pub async fn a_save_the_table_refuses_harms_its_own_record_only<W: World>() {
    let world = nine_orders::<W>().await;
    let forbid = |order: Order| async { Ok(Visit::updated(order.is("forbidden"))) };
    let _processing = world.process([packing(forbid)]).await;
    only_the_first_is_harmed(&world, "it could not be saved").await;
    assert_eq!(world.get(1).await.version, Version(1));
}

pub async fn a_row_that_cannot_be_read_harms_its_own_records_only<W: World>() {
    let world = nine_orders::<W>().await;
    world.spoil(1).await;
    let lane = world.records().lane(ORDERS, STAGE).await.unwrap();
    let texts: Vec<String> = (1..=9).map(|n| format!("order-{n}")).collect();
    let visits: Vec<_> = texts.iter().map(|id| (id.as_str(), 0, Duration::ZERO)).collect();
    world.records().enqueue(lane, &visits).await.unwrap();
    let leave = |_| async { Ok(Visit::untouched()) };
    let _processing = world.process([packing(leave)]).await;
    for stage in [STAGE, SYSTEM] {
        eventually("it failed", async || {
            let record = world.record(stage, 1).await.expect("it stays");
            record.failures > 0 && record.error.is_some()
        })
        .await;
    }
    for id in 2..=9 {
        eventually("the others are packed", async || world.get(id).await.state == "packed").await;
    }
    assert!(about(world.record(STAGE, 1).await.unwrap().due_in, HOUR));
    world.mend(1).await;
    assert!(world.records().retry(ORDERS, STAGE, "order-1").await.unwrap());
    world.rests().await;
}

pub async fn a_table_that_panics_when_it_saves_harms_that_record_only<W: World>() {
    let world = nine_orders::<W>().await;
    let scratch = |mut order: Order| async {
        order.marks.push(UNWRITABLE.into());
        Ok(Visit::updated(order))
    };
    let _processing = world.process([packing(scratch)]).await;
    only_the_first_is_harmed(&world, "panicked").await;
}

pub async fn a_table_that_panics_when_it_reads_harms_that_record_only<W: World>() {
    let world = W::new().await;
    let mut orders: Vec<Order> = (1..=9).map(Order::new).collect();
    orders[0].marks.push(UNREADABLE.into());
    world.create(orders).await.unwrap();
    let leave = |_| async { Ok(Visit::untouched()) };
    let _processing = world.process([packing(leave)]).await;
    eventually("it is told why", async || {
        let record = world.record(SYSTEM, 1).await.expect("it stays");
        record.error.is_some_and(|error| error.contains("a mark too many"))
    })
    .await;
    for id in 2..=9 {
        eventually("the others are packed", async || world.get(id).await.state == "packed").await;
    }
}

pub async fn an_entity_that_panics_when_it_is_cloned_harms_its_own_record_only<W: World>() {
    let world = nine_orders::<W>().await;
    let single_out = |order: Order| async { Ok(Visit::updated(order.marked(UNIQUE))) };
    let _processing = world.process([packing(single_out)]).await;
    only_the_first_is_harmed(&world, "it panicked: there is but one").await;
}

pub async fn an_id_that_panics_when_it_is_written_harms_its_own_record_only<W: World>() {
    let world = nine_orders::<W>().await;
    world.order(MUTE).await;
    IS_MUTED.store(true, Ordering::Relaxed);
    let _processing = world.process([Step::new(STAGE).when("new").makes("packed")]).await;
    for id in 1..=9 {
        eventually("the others are packed", async || world.get(id).await.state == "packed").await;
    }
    IS_MUTED.store(false, Ordering::Relaxed);
    world.rests().await;
    assert_eq!(world.get(MUTE).await.state, "packed");
}

pub async fn an_id_that_cannot_be_read_harms_its_own_record_only<W: World>() {
    let world = nine_orders::<W>().await;
    let lane = world.records().lane(ORDERS, STAGE).await.unwrap();
    world.records().enqueue(lane, &[("parcel-1", 0, Duration::ZERO)]).await.unwrap();
    let pack = |order: Order| async { Ok(Visit::updated(order.is("packed"))) };
    let _processing = world.process([packing(pack)]).await;
    for id in 1..=9 {
        eventually("orders are packed", async || world.get(id).await.state == "packed").await;
    }
    let which = Which { id: Some("parcel-1".into()), ..Default::default() };
    let strange = async || world.records().list(ORDERS, &which, 9).await.unwrap().records;
    eventually("it failed", async || strange().await[0].failures == 1).await;
    let error = strange().await.remove(0).error.unwrap();
    assert!(error.contains("parcel-1") && error.contains("not an order"), "{error}");
}

pub async fn an_entity_that_is_gone_takes_its_records_along<W: World>() {
    let world = W::new().await;
    let (step, mut runs) = held(Step::new(STAGE));
    world.create([1, 2, 3].map(Order::new).to_vec()).await.unwrap();
    world.delete(3).await;
    let _processing = world.process([step]).await;
    let (one, two) = (runs.next().await, runs.next().await);
    world.delete(1).await;
    world.delete(2).await;
    // One of them wants to save what is no more.
    one.makes("packed");
    two.leaves();
    world.rests().await;
    for id in 1..=3 {
        assert_eq!(world.read(id).await, None, "nothing comes back");
    }
    assert!(runs.pending().is_none());
}

pub async fn a_stage_whose_question_panics_is_asked_again<W: World>() {
    let world = W::new().await;
    let is_broken = Arc::new(AtomicBool::new(true));
    let broken = Arc::clone(&is_broken);
    let step = Step::new(STAGE).makes("packed").wants(move |order| {
        assert!(order.id != 1 || !broken.load(Ordering::Relaxed), "hard to say");
        order.state == "new"
    });
    world.create([1, 2].map(Order::new).to_vec()).await.unwrap();
    let _processing = world.process([step]).await;
    eventually("the other is packed", async || world.get(2).await.state == "packed").await;
    eventually("it failed", async || {
        world
            .record(SYSTEM, 1)
            .await
            .is_some_and(|record| record.error.is_some_and(|error| error.contains("hard to say")))
    })
    .await;
    is_broken.store(false, Ordering::Relaxed);
    eventually("it is packed, too", async || world.get(1).await.state == "packed").await;
    world.rests().await;
}

pub async fn the_waits_of_a_record_grow_with_its_failures_up_to_a_limit<W: World>() {
    let world = W::new().await;
    let records = world.records();
    let lane = records.lane(ORDERS, STAGE).await.unwrap();
    let (waits, mut held_back) = ([1, 2, 4, 5, 5], Vec::new());
    for failures in 0..5 {
        world.order(failures).await;
        let visit = (&*OrderId(failures).to_string(), 0, Duration::ZERO);
        records.enqueue(lane, &[visit]).await.unwrap();
        for _ in 0..failures {
            let claim = records.claim(lane, &[0], 1, HOUR).await.unwrap().claims.remove(0);
            let (after, not_before) = (Duration::ZERO, Duration::ZERO);
            let fate = Fate::Failed { after, not_before, error: "before".into(), park: false };
            records.settle(lane, &[(claim, fate)]).await.unwrap();
        }
        // Out of the way of the next.
        let claim = records.claim(lane, &[0], 1, HOUR).await.unwrap().claims.remove(0);
        assert_eq!(i64::from(claim.failures), failures);
        held_back.push(claim);
    }
    let released: Vec<_> = held_back.into_iter().map(|claim| (claim, Fate::Released)).collect();
    records.settle(lane, &released).await.unwrap();
    let backoff = Backoff { first: HOUR, most: 5 * HOUR, jitter: 0.0 };
    let step = Step::new(STAGE).wants(|_| false).limits(|limits| limits.backoff = backoff);
    let step = step.does(|order| async move { Err(format!("no stock of {}", order.id).into()) });
    let _processing = world.process([step]).await;
    for (id, wait) in (0..).zip(waits) {
        let record = comes_to(&world, id, |record| record.due_in.is_some()).await;
        assert_eq!(i64::from(record.failures), id + 1);
        assert_eq!(record.error, Some(format!("no stock of {id}")));
        assert!(about(record.due_in, wait * HOUR), "{record:?}");
    }
    assert_eq!(world.counts(STAGE).await.failing, 5);
}

pub async fn a_record_that_keeps_failing_is_set_aside_until_somebody_asks<W: World>() {
    let world = W::new().await;
    let is_broken = Arc::new(AtomicBool::new(true));
    let broken = Arc::clone(&is_broken);
    let runs = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&runs);
    let step = Step::new(STAGE).when("new").tries(3).does(move |order| {
        count.fetch_add(1, Ordering::Relaxed);
        let broken = broken.load(Ordering::Relaxed);
        async move {
            if broken { Err("no stock".into()) } else { Ok(Visit::updated(order.is("packed"))) }
        }
    });
    let processing = world.process([step]).await;
    world.create([1, 2].map(Order::new).to_vec()).await.unwrap();
    for id in [1, 2] {
        let record = comes_to(&world, id, |record| record.is_parked).await;
        assert_eq!((record.failures, record.error.as_deref()), (3, Some("no stock")));
    }
    world.rests().await;
    assert_eq!(world.counts(STAGE).await.parked, 2);
    eventually("it is counted", async || {
        let flow = status(&processing, STAGE).pull.flow;
        (flow.failed, flow.parked) == (6, 2)
    })
    .await;
    // Tried again, it has all its tries.
    assert!(world.records().retry(ORDERS, STAGE, "order-1").await.unwrap());
    eventually("it was tried", async || runs.load(Ordering::Relaxed) == 9).await;
    comes_to(&world, 1, |record| record.is_parked && record.failures == 3).await;
    // A change of the order has it tried, too.
    is_broken.store(false, Ordering::Relaxed);
    world.change(2, |order| order.marks.push("stock".into())).await.unwrap();
    eventually("it is packed", async || world.get(2).await.state == "packed").await;
    assert!(world.records().retry(ORDERS, STAGE, "order-1").await.unwrap());
    eventually("it is packed", async || world.get(1).await.state == "packed").await;
    world.rests().await;
    assert_eq!(world.counts(STAGE).await.records, 0);
}

pub async fn no_more_run_at_once_than_the_stage_allows<W: World>() {
    let world = W::new().await;
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let seen = Arc::clone(&most);
    let step = Step::new(STAGE).when("new").parallel(3).does(move |order| {
        let (running, seen) = (Arc::clone(&running), Arc::clone(&seen));
        async move {
            seen.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(2)).await;
            running.fetch_sub(1, Ordering::SeqCst);
            Ok(Visit::updated(order.is("packed")))
        }
    });
    world.create((1..=40).map(Order::new).collect()).await.unwrap();
    let _processing = world.process([step]).await;
    world.rests().await;
    assert_eq!(most.load(Ordering::SeqCst), 3);
    for id in 1..=40 {
        assert_eq!(world.get(id).await.state, "packed");
    }
}

pub async fn one_stage_that_is_full_holds_up_no_other<W: World>() {
    let world = W::new().await;
    let (slow, mut runs) = held(Step::new("slow").parallel(1));
    let quick = Step::new(STAGE).when("new").makes("packed");
    let _processing = world.process([slow, quick]).await;
    world.create((1..=10).map(Order::new).collect()).await.unwrap();
    let _stuck = runs.next().await;
    for id in 1..=10 {
        eventually("it is packed", async || world.get(id).await.state == "packed").await;
    }
    assert!(runs.pending().is_none());
}

pub async fn a_stop_waits_for_what_runs_and_settles_it<W: World>() {
    let world = W::new().await;
    let (step, mut runs) = held(Step::new(STAGE).when("new"));
    let processing = world.process([step]).await;
    world.order(1).await;
    let run = runs.next().await;
    let (ended, ()) = tokio::join!(processing.stop(HOUR), async { run.makes("packed") });
    assert_eq!(ended, 0);
    assert_eq!(world.get(1).await.state, "packed");
    assert!(world.record(STAGE, 1).await.is_none());
    assert_eq!(world.counts(SYSTEM).await.due, 1, "somebody else goes on with it");
}

pub async fn a_stop_gives_back_what_it_did_not_finish_and_blames_nobody<W: World>() {
    let world = W::new().await;
    // Quick at first, so that more is taken than can run; then stuck.
    let runs = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&runs);
    let step = Step::new(STAGE).when("new").parallel(2).does(move |order| {
        let is_quick = count.fetch_add(1, Ordering::SeqCst) < 30;
        async move {
            if !is_quick {
                std::future::pending::<()>().await;
            }
            Ok(Visit::updated(order.is("packed")))
        }
    });
    world.create((1..=60).map(Order::new).collect()).await.unwrap();
    let processing = world.process([step]).await;
    eventually("it is stuck", async || {
        let (status, counts) = (status(&processing, STAGE), world.counts(SYSTEM).await);
        status.pull.running == 2 && status.pull.flow.done == 30 && counts.records == 0
    })
    .await;
    assert_eq!(soon("it stops", processing.stop(Duration::ZERO)).await, 2);
    let counts = world.counts(STAGE).await;
    assert_eq!((counts.records, counts.due, counts.held, counts.failing), (30, 30, 0, 0));
    let page = world.records().list(ORDERS, &Which::default(), 100).await.unwrap();
    assert!(page.records.iter().all(|record| record.failures == 0 && record.error.is_none()));
    let _processing = world.process([Step::new(STAGE).when("new").makes("packed")]).await;
    world.rests().await;
    for id in 1..=60 {
        let order = world.get(id).await;
        assert_eq!((&*order.state, order.version), ("packed", Version(2)), "each was saved once");
    }
}

pub async fn what_a_dropped_processor_held_comes_back_when_its_lease_is_over<W: World>() {
    let world = W::new().await;
    let lease = Duration::from_millis(100);
    let (step, mut runs) = held(Step::new(STAGE).when("new").parallel(4));
    let processing = world.processor().lease(lease).stage(step).start().await.unwrap();
    world.create((1..=10).map(Order::new).collect()).await.unwrap();
    let run = runs.next().await;
    drop(processing);
    run.ended_from_outside().await;
    let _processing = world.process([Step::new(STAGE).when("new").makes("packed")]).await;
    world.rests().await;
    for id in 1..=10 {
        let order = world.get(id).await;
        assert_eq!((&*order.state, order.version), ("packed", Version(2)));
    }
}

pub async fn nothing_is_lost_when_the_process_ends<W: World>() {
    let world = W::new().await;
    let lease = Duration::from_millis(100);
    let (step, mut runs) = held(Step::new(STAGE).when("new").parallel(4));
    let processing = world.processor().lease(lease).stage(step).start().await.unwrap();
    world.create((1..=10).map(Order::new).collect()).await.unwrap();
    let run = runs.next().await;
    let id = run.order.id;
    run.ends(Visit::untouched().again(HOUR));
    comes_to(&world, id, |record| about(record.due_in, HOUR)).await;
    let run = runs.next().await;
    drop(processing);
    run.ended_from_outside().await;
    let world = world.reopened().await;
    let counts = world.records().counts().await.unwrap();
    assert_eq!(counts.iter().map(|lane| lane.records).sum::<u64>(), 10, "{counts:?}");
    let _processing = world.process([Step::new(STAGE).when("new").makes("packed")]).await;
    eventually("but for the one with a visit all are packed", async || {
        let counts = world.counts(STAGE).await;
        (counts.records, counts.due, counts.held) == (1, 0, 0)
    })
    .await;
    assert_eq!(world.get(id).await.state, "new");
}

pub async fn a_run_whose_lease_is_lost_is_ended_and_saves_nothing<W: World>() {
    let world = W::new().await;
    let (step, mut runs) = held(Step::new(STAGE).when("new"));
    let lease = Duration::from_millis(90);
    let processing = world.processor().lease(lease).stage(step).start().await.unwrap();
    world.order(1).await;
    let run = runs.next().await;
    // Somebody takes its record away, as if it had stalled past its lease.
    let lane = world.records().lane(ORDERS, STAGE).await.unwrap();
    soon("the thread stalls past the lease", async {
        loop {
            std::thread::sleep(2 * lease);
            let claimed = world.records().claim(lane, &[0], 1, HOUR).await.unwrap();
            if !claimed.claims.is_empty() {
                break;
            }
        }
    })
    .await;
    run.ended_from_outside().await;
    eventually("it is counted", async || status(&processing, STAGE).pull.flow.stale > 0).await;
    assert_eq!(world.get(1).await.version, Version(1));
    assert!(world.record(STAGE, 1).await.unwrap().is_held, "by whoever has it now");
}
