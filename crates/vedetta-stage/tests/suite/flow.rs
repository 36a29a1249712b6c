//! An entity goes from stage to stage, and comes to rest.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use vedetta_core::RunEvent;
use vedetta_stage::{
    Answer, Backend, Ending, Lane, Processor, Records as _, SYSTEM, StageError, Version, Visit,
};

use super::{
    Ask, HOUR, ORDERS, Order, OrderId, Step, World, about, eventually, held, quick, status,
};

pub async fn an_order_goes_through_its_stages_and_comes_to_rest<W: World>() {
    let world = W::new().await;
    let runs = Arc::new(AtomicUsize::new(0));
    let step = |name, from, to| {
        let runs = Arc::clone(&runs);
        Step::new(name).when(from).does(move |order| {
            runs.fetch_add(1, Ordering::Relaxed);
            async move { Ok(Visit::updated(order.is(to).marked(name))) }
        })
    };
    let stages = [
        step("shipping", "packed", "shipped"),
        step("payment", "new", "paid"),
        step("packing", "paid", "packed"),
    ];
    let processing = world.process(stages).await;
    world.order(1).await;
    eventually("it is shipped", async || world.get(1).await.state == "shipped").await;
    world.rests().await;
    let order = world.get(1).await;
    assert_eq!(order.marks, ["payment", "packing", "shipping"]);
    assert_eq!(order.version, Version(4), "saved once by each stage");
    assert_eq!(runs.load(Ordering::Relaxed), 3);
    assert_eq!(processing.stop(HOUR).await, 0);
}

pub async fn what_happens_to_a_run_is_told_as_it_happens<W: World>() {
    let world = W::new().await;
    let runs = Arc::new(AtomicUsize::new(0));
    let step = Step::new("packing").when("new").does(move |order| {
        let is_first = runs.fetch_add(1, Ordering::Relaxed) == 0;
        async move {
            if is_first { Err("no box".into()) } else { Ok(Visit::updated(order.is("packed"))) }
        }
    });
    let processing = world.process([step]).await;
    let mut events = processing.events();
    world.order(1).await;
    eventually("it is packed", async || world.get(1).await.state == "packed").await;
    world.rests().await;
    assert_eq!(processing.stop(HOUR).await, 0);
    let mut heard = Vec::new();
    while let Ok(told) = events.try_recv() {
        if &*told.stage == "packing" {
            assert_eq!(&*told.id, "order-1");
            heard.push(match told.event {
                RunEvent::Started { failures } => format!("started after {failures}"),
                RunEvent::Failed { why, .. } => format!("failed: {why}"),
                RunEvent::Done { again, .. } => format!("done, again {again:?}"),
                // It may take a while.
                RunEvent::Running => continue,
                other => format!("{other:?}"),
            });
        }
    }
    let expected = ["started after 0", "failed: no box", "started after 1", "done, again None"];
    assert_eq!(heard, expected);
}

pub async fn the_round_ends_when_stages_leave_the_order_as_it_is<W: World>() {
    let world = W::new().await;
    // Always wanted, and three times something is done.
    let step = Step::new("stamping").does(|order| async move {
        let visit = if order.marks.len() < 3 {
            Visit::updated(order.marked("stamp"))
        } else {
            Visit::untouched()
        };
        Ok(visit)
    });
    let processing = world.process([step]).await;
    world.order(1).await;
    eventually("it has its stamps", async || world.get(1).await.marks.len() == 3).await;
    world.rests().await;
    assert_eq!(world.get(1).await.version, Version(4));
    eventually("its last run is counted", async || {
        status(&processing, "stamping").pull.flow.done >= 4
    })
    .await;
    assert_eq!(status(&processing, "stamping").pull.flow.failed, 0);
}

pub async fn every_stage_is_asked_and_those_that_want_it_get_it_after_a_random_delay<W: World>() {
    let world = W::new().await;
    // So long that nothing is begun within the test.
    let spread = 10_000 * HOUR;
    let asked = Arc::new(Mutex::new(HashMap::<&str, HashSet<i64>>::new()));
    let step = |name: &'static str, yes: bool| {
        let asked = Arc::clone(&asked);
        Step::new(name).wants(move |order| {
            asked.lock().entry(name).or_default().insert(order.id);
            yes
        })
    };
    let processor = world.processor().spread(spread);
    let processor = processor.stage(step("a", true)).stage(step("b", false)).stage(step("c", true));
    let _processing = processor.start().await.unwrap();
    world.create((1..=30).map(Order::new).collect()).await.unwrap();
    eventually("the system stage is done", async || world.counts(SYSTEM).await.records == 0).await;
    for name in ["a", "b", "c"] {
        assert_eq!(asked.lock()[name].len(), 30, "{name} is asked about each");
    }
    assert_eq!(world.counts("b").await.records, 0);
    let mut delays = HashSet::new();
    for stage in ["a", "c"] {
        for id in 1..=30 {
            let record = world.record(stage, id).await.expect("it is wanted");
            let due_in = record.due_in.expect("of two that want it neither begins at once");
            assert!(due_in <= spread, "{record:?}");
            delays.insert(due_in.as_secs() / 3600);
        }
    }
    assert!(delays.len() > 30, "chance decides: {delays:?}");
    assert!(delays.iter().any(|hours| *hours < 5_000) && delays.iter().any(|h| *h >= 5_000));
}

pub async fn an_order_that_a_single_stage_wants_gets_there_after_a_random_part_of_a_twentieth_of_the_spread<
    W: World,
>() {
    let world = W::new().await;
    // So long that nothing is begun within the test.
    let most = 100_000 * HOUR;
    let processor = world.processor().spread(20 * most);
    let [packing, billing] = [Step::new("packing"), Step::new("billing").when("never")];
    let _processing = processor.stage(packing).stage(billing).start().await.unwrap();
    world.create((1..=20).map(Order::new).collect()).await.unwrap();
    eventually("the system stage is done", async || world.counts(SYSTEM).await.records == 0).await;
    assert_eq!(world.counts("billing").await.records, 0);
    let mut delays = HashSet::new();
    for id in 1..=20 {
        let record = world.record("packing", id).await.expect("it is wanted");
        let due_in = record.due_in.expect("alone it does not begin at once, either");
        assert!(due_in <= most, "{record:?}");
        delays.insert(due_in.as_secs() / 3600);
    }
    assert!(delays.len() > 10, "chance decides: {delays:?}");
    let is_long = delays.iter().any(|hours| *hours >= 50_000);
    assert!(is_long, "in a million tests one has them all in the lower half: {delays:?}");
}

pub async fn after_short_delays_an_order_goes_through_its_stages_and_none_is_left_behind<
    W: World,
>() {
    let world = W::new().await;
    let spread = Duration::from_millis(10);
    // Nothing is looked at but for a reason.
    let processor = world.processor().spread(spread).poll(HOUR);
    let not_yet = |mark: &'static str| move |order: &Order| order.marks.iter().all(|m| m != mark);
    let marks = |name: &'static str| {
        Step::new(name).does(move |order| async move {
            let is_done = order.marks.iter().any(|mark| mark == name);
            Ok(if is_done { Visit::untouched() } else { Visit::updated(order.marked(name)) })
        })
    };
    // At first two want it, and then the last alone.
    let stages = [
        marks("left").wants(not_yet("left")),
        marks("right").wants(not_yet("right")),
        marks("last").wants(move |order| order.marks.len() == 2 && not_yet("last")(order)),
    ];
    let processing = stages.into_iter().fold(processor, Processor::stage).start().await.unwrap();
    for round in 0..5 {
        world.create((0..10).map(|n| Order::new(10 * round + n)).collect()).await.unwrap();
        world.rests().await;
    }
    for id in 0..50 {
        let mut marks = world.get(id).await.marks;
        assert_eq!(marks.pop().as_deref(), Some("last"));
        marks.sort_unstable();
        assert_eq!(marks, ["left", "right"]);
    }
    assert_eq!(processing.stop(HOUR).await, 0);
}

/// Orders, with a note of the delays after which they go to stages.
#[derive(Clone)]
struct Noting<B> {
    orders: B,
    delays: Arc<Mutex<Vec<Duration>>>,
}

impl<B: Backend<Order>> Backend<Order> for Noting<B> {
    type Records = B::Records;

    fn records(&self) -> &B::Records {
        self.orders.records()
    }

    fn name(&self) -> &str {
        self.orders.name()
    }

    fn shards(&self) -> u16 {
        self.orders.shards()
    }

    async fn load(&self, ids: Vec<OrderId>) -> Result<Vec<Order>, StageError> {
        self.orders.load(ids).await
    }

    async fn settle(&self, lane: Lane, endings: Vec<Ending<Order>>) -> Result<Answer, StageError> {
        let goings = endings.iter().flat_map(|ending| &ending.visits);
        self.delays.lock().extend(goings.map(|going| going.after));
        self.orders.settle(lane, endings).await
    }
}

pub async fn without_a_spread_a_wanted_stage_is_due_at_once<W: World>() {
    let world = W::new().await;
    let delays = Arc::<Mutex<Vec<Duration>>>::default();
    let orders = Noting { orders: world.orders().clone(), delays: Arc::clone(&delays) };
    // Of two orders, one is wanted by one stage and one by both.
    let billing = Step::new("billing").wants(|order| order.id == 2);
    let processor = Processor::new(orders).spread(Duration::ZERO);
    let processor = processor.stage(Step::new("packing")).stage(billing);
    let _processing = processor.start().await.unwrap();
    world.create([1, 2].map(Order::new).to_vec()).await.unwrap();
    world.rests().await;
    assert_eq!(*delays.lock(), [Duration::ZERO; 3]);
}

pub async fn an_untouched_order_comes_back_when_the_stage_says<W: World>() {
    let world = W::new().await;
    let (step, mut runs) = held(Step::new("packing"));
    let _processing = world.process([step]).await;
    world.order(1).await;
    let moment = Duration::from_millis(4);
    runs.next().await.ends(Visit::untouched().again(moment));
    runs.next().await.ends(Visit::untouched().again(2 * HOUR));
    eventually("it waits", async || {
        world.record("packing", 1).await.is_some_and(|record| about(record.due_in, 2 * HOUR))
    })
    .await;
    assert_eq!(world.get(1).await.version, Version(1), "nothing was saved");
    // A change brings it here earlier.
    world.change(1, |order| order.state = "urgent".into()).await.unwrap();
    let run = runs.next().await;
    assert_eq!(run.order.state, "urgent");
    run.leaves();
    world.rests().await;
    assert!(runs.pending().is_none());
}

pub async fn an_updated_order_is_saved_and_comes_back_when_the_stage_says<W: World>() {
    let world = W::new().await;
    let (step, mut runs) = held(Step::new("packing").when("new"));
    let _processing = world.process([step]).await;
    world.order(1).await;
    let run = runs.next().await;
    let packed = run.order.clone().is("packed");
    run.ends(Visit::updated(packed).again(2 * HOUR));
    eventually("it is saved", async || world.get(1).await.state == "packed").await;
    assert_eq!(world.get(1).await.version, Version(2));
    eventually("only the visit is left", async || {
        let left = world.record("packing", 1).await;
        world.counts(SYSTEM).await.records == 0
            && left.is_some_and(|record| about(record.due_in, 2 * HOUR))
    })
    .await;
}

pub async fn an_update_during_a_run_is_a_conflict_and_the_run_is_repeated_on_it<W: World>() {
    let world = W::new().await;
    let neighbour = world.neighbour().await;
    let (step, mut runs) = held(Step::new("packing").wants(|order| order.state != "packed"));
    let processing = world.process([step]).await;
    world.order(1).await;
    let run = runs.next().await;
    assert_eq!(run.order.version, Version(1));
    neighbour.change(1, |order| order.marks.push("theirs".into())).await.unwrap();
    run.makes("packed");

    let run = runs.next().await;
    // It may begin before the answer to the save is here.
    eventually("a conflict", async || status(&processing, "packing").conflicts == 1).await;
    assert_eq!((run.order.version, &*run.order.state), (Version(2), "new"), "nothing was saved");
    assert_eq!(run.order.marks, ["theirs"]);
    run.makes("packed");
    eventually("it is saved", async || world.get(1).await.state == "packed").await;
    world.rests_leaving(&mut runs).await;
    let order = world.get(1).await;
    assert_eq!((order.version, order.marks.len()), (Version(3), 1));
    assert_eq!(status(&processing, "packing").conflicts, 1);
}

pub async fn of_two_stages_that_run_at_once_one_saves_and_the_other_runs_again<W: World>() {
    let world = W::new().await;
    let not_yet = |mark: &'static str| move |order: &Order| order.marks.iter().all(|m| m != mark);
    let (left, mut lefts) = held(Step::new("left").wants(not_yet("left")));
    let (right, mut rights) = held(Step::new("right").wants(not_yet("right")));
    let processing = world.process([left, right]).await;
    world.order(1).await;
    let (left, right) = (lefts.next().await, rights.next().await);
    let marked = left.order.clone().marked("left");
    left.ends(Visit::updated(marked));
    eventually("the first is saved", async || world.get(1).await.version == Version(2)).await;
    let marked = right.order.clone().marked("right");
    right.ends(Visit::updated(marked));
    let right = rights.next().await;
    assert_eq!(right.order.marks, ["left"]);
    let marked = right.order.clone().marked("right");
    right.ends(Visit::updated(marked));
    world.rests_leaving(&mut rights).await;
    assert_eq!(world.get(1).await.marks, ["left", "right"]);
    assert_eq!(status(&processing, "right").conflicts, 1);
    assert_eq!(status(&processing, "left").conflicts, 0);
}

pub async fn a_visit_wanted_during_a_run_earlier_or_later_has_it_run_again<W: World>() {
    let world = W::new().await;
    let (step, mut runs) = held(Step::new("packing").wants(|order| order.version == Version(1)));
    let _processing = world.process([step]).await;
    let neighbour = world.neighbour().await;
    let lane = world.records().lane(ORDERS, "packing").await.unwrap();
    for (id, wish) in (1..).zip([Duration::ZERO, HOUR, 5_000 * HOUR]) {
        let text = OrderId(id).to_string();
        world.order(id).await;
        let run = runs.next().await;
        neighbour.records().enqueue(lane, &[(&text, 0, wish)]).await.unwrap();
        run.leaves();
        let run = runs.next().await;
        assert_eq!(run.order.id, id, "{wish:?}: it was not removed");
        neighbour.records().enqueue(lane, &[(&text, 0, wish)]).await.unwrap();
        run.ends(Visit::untouched().again(9_000 * HOUR));
        let run = runs.next().await;
        assert_eq!(run.order.id, id, "{wish:?}: nor moved");
        neighbour.records().enqueue(lane, &[(&text, 0, wish)]).await.unwrap();
        run.makes("packed");
        let run = runs.next().await;
        assert_eq!((run.order.id, &*run.order.state), (id, "packed"), "{wish:?}: nor after a save");
        run.leaves();
        world.rests().await;
    }
    assert!(runs.pending().is_none());
}

pub async fn an_update_during_a_run_of_the_system_stage_is_asked_about_once_more<W: World>() {
    let world = W::new().await;
    let lane = world.records().lane(ORDERS, SYSTEM).await.unwrap();
    world.order(1).await;
    // A system stage that is at work, by hand.
    let claim = world.records().claim(lane, &[0], 1, HOUR).await.unwrap().claims.remove(0);
    world.change(1, |order| order.state = "paid".into()).await.unwrap();
    let end = (claim, vedetta_stage::Fate::Gone);
    world.records().settle(lane, &[end]).await.unwrap();
    assert_eq!(world.counts(SYSTEM).await.due, 1);
    let _processing = world.process([Step::new("packing").when("paid").makes("packed")]).await;
    eventually("it is seen", async || world.get(1).await.state == "packed").await;
}

pub async fn what_was_updated_while_nobody_worked_is_worked_on_later<W: World>() {
    let world = W::new().await;
    world.create((1..=20).map(Order::new).collect()).await.unwrap();
    let world = world.reopened().await;
    let _processing = world.process([Step::new("packing").when("new").makes("packed")]).await;
    world.rests().await;
    for id in 1..=20 {
        assert_eq!(world.get(id).await.state, "packed");
    }
}

pub async fn an_update_elsewhere_is_heard_of_without_looking<W: World>() {
    let world = W::new().await;
    let neighbour = world.neighbour().await;
    let step = Step::new("packing").when("new").makes("packed");
    let _processing = world.processor().poll(HOUR).stage(step).start().await.unwrap();
    world.order(1).await;
    world.rests().await;
    neighbour.order(2).await;
    world.rests().await;
    assert_eq!(world.get(1).await.state, "packed");
    assert_eq!(world.get(2).await.state, "packed");
    neighbour.change(2, |order| order.state = "new".into()).await.unwrap();
    world.rests().await;
    assert_eq!(world.get(2).await.version, Version(4));
}

pub async fn of_two_processors_in_one_process_neither_takes_the_others_wake_up<W: World>() {
    let world = W::new().await;
    let mut processing = Vec::new();
    for shard in [0_u16, 1] {
        let (_, only) = watch::channel(Arc::<[u16]>::from([shard]));
        let step = Step::new("packing").when("new").makes("packed");
        // Nothing is looked at but for a reason.
        let processor = quick(world.sharded(2)).shards(only).poll(HOUR);
        processing.push(processor.stage(step).start().await.unwrap());
    }
    for round in 0..10 {
        world.create((0..10).map(|n| Order::new(10 * round + n)).collect()).await.unwrap();
        world.rests().await;
    }
    for one in processing {
        assert!(status(&one, "packing").pull.flow.done > 0);
        assert_eq!(one.stop(HOUR).await, 0);
    }
}

pub async fn a_processor_that_is_told_of_a_shard_that_there_is_not_is_refused<W: World>() {
    let world = W::new().await;
    let (_, shards) = watch::channel(Arc::<[u16]>::from([1_u16, 3]));
    let refused = quick(world.sharded(2)).shards(shards).start().await.err();
    let is_told = matches!(refused, Some(StageError::Unshared { shared: 4, divided: 2 }));
    assert!(is_told, "{refused:?}");
}

pub async fn a_processor_works_on_the_shards_it_is_told_and_follows_when_they_change<W: World>() {
    let world = W::new().await;
    let lane = world.records().lane(ORDERS, "packing").await.unwrap();
    let orders = [(1, 0), (2, 1), (3, 2)];
    world.create(orders.map(|(id, _)| Order::new(id)).to_vec()).await.unwrap();
    let texts = orders.map(|(id, shard)| (OrderId(id).to_string(), shard));
    let visits: Vec<_> =
        texts.iter().map(|(id, shard)| (id.as_str(), *shard, Duration::ZERO)).collect();
    world.records().enqueue(lane, &visits).await.unwrap();

    let (tell, shards) = watch::channel(Arc::<[u16]>::from([1_u16]));
    let (step, mut runs) = held(Step::new("packing").wants(|_| false));
    let processor = quick(world.sharded(3)).shards(shards).poll(HOUR);
    let processing = processor.stage(step).start().await.unwrap();
    let run = runs.next().await;
    assert_eq!(run.order.id, 2);
    run.leaves();
    eventually("its own is done", async || world.record("packing", 2).await.is_none()).await;
    assert!(runs.pending().is_none(), "the others are not its business");
    tell.send(Arc::from([0_u16, 2])).unwrap();
    let running = [runs.next().await, runs.next().await];
    let mut ids = running.each_ref().map(|run| run.order.id);
    ids.sort_unstable();
    assert_eq!(ids, [1, 3]);
    tell.send(Arc::from([])).unwrap();
    drop(tell);
    world.records().enqueue(lane, &[("order-2", 1, Duration::ZERO)]).await.unwrap();
    assert_eq!(processing.stop(Duration::ZERO).await, 2, "what it had before runs on");
    assert!(runs.pending().is_none() && world.record("packing", 2).await.is_some());
}

pub async fn fewer_shards_than_before_strand_no_record<W: World>() {
    let world = W::new().await;
    let lane = world.records().lane(ORDERS, "packing").await.unwrap();
    world.create((1..=8).map(Order::new).collect()).await.unwrap();
    let texts: Vec<String> = (1..=8).map(|n| format!("order-{n}")).collect();
    let visits: Vec<_> =
        texts.iter().zip(0..).map(|(id, shard)| (id.as_str(), shard, Duration::ZERO)).collect();
    world.records().enqueue(lane, &visits).await.unwrap();
    let step = Step::new("packing").when("new").makes("packed");
    let _processing = quick(world.sharded(3)).stage(step).start().await.unwrap();
    world.rests().await;
    assert_eq!(world.get(8).await.state, "packed");
}

pub async fn entities_are_spread_over_all_shards_and_each_is_found_in_its_own<W: World>() {
    let world = W::new().await;
    let sharded = world.sharded(4);
    let step = Step::new("packing").when("new").makes("packed");
    let seed = quick(sharded.clone()).stage(step.clone()).start().await.unwrap();
    // Made without shards, in the one there was.
    world.order(1).await;
    world.rests().await;
    drop(seed);
    world.create((2..=60).map(Order::new).collect()).await.unwrap();
    // The system stage puts each into its shard.
    let (step, mut runs) = held(Step::new("packing").when("new"));
    let seed = quick(sharded.clone()).stage(step).start().await.unwrap();
    let _running = runs.next().await; // dropped, it would fail, and wait
    eventually("all are asked about", async || world.counts(SYSTEM).await.records == 0).await;
    seed.stop(Duration::ZERO).await;
    let lane = world.records().lane(ORDERS, "packing").await.unwrap();
    let mut found = Vec::new();
    for shard in 0..sharded.shards() {
        let claimed = world.records().claim(lane, &[shard], 100, HOUR).await.unwrap();
        found.push(claimed.claims.len());
    }
    assert_eq!(found.iter().sum::<usize>(), 59, "{found:?}");
    assert!(found.iter().all(|count| *count > 3), "none is left empty: {found:?}");
}

pub async fn processors_that_share_shards_never_run_one_entity_at_once<W: World>() {
    let world = W::new().await;
    let neighbour = world.neighbour().await;
    let (running, twice) = (Arc::new(Mutex::new(HashSet::new())), Arc::new(Mutex::new(Vec::new())));
    let step = || {
        let (running, twice) = (Arc::clone(&running), Arc::clone(&twice));
        Step::new("packing").wants(|order| order.marks.len() < 4).does(move |order| {
            let (running, twice) = (Arc::clone(&running), Arc::clone(&twice));
            async move {
                if !running.lock().insert(order.id) {
                    twice.lock().push(order.id);
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
                running.lock().remove(&order.id);
                // It may have been wanted once more while it ran.
                let is_done = order.marks.len() == 4;
                Ok(if is_done {
                    Visit::untouched()
                } else {
                    Visit::updated(order.marked("packed"))
                })
            }
        })
    };
    let (_, first) = watch::channel(Arc::<[u16]>::from([0_u16, 1, 2]));
    let (_, second) = watch::channel(Arc::<[u16]>::from([1_u16, 2, 3]));
    let processors = [
        quick(world.sharded(4)).shards(first).stage(step()).start().await.unwrap(),
        quick(neighbour.sharded(4)).shards(second).stage(step()).start().await.unwrap(),
    ];
    world.create((1..=40).map(Order::new).collect()).await.unwrap();
    for id in 1..=40 {
        world.change(id, |order| order.state = "changed".into()).await.unwrap();
    }
    world.rests().await;
    assert_eq!(*twice.lock(), Vec::<i64>::new());
    for id in 1..=40 {
        assert_eq!(world.get(id).await.marks.len(), 4);
    }
    let done = processors.map(|processing| status(&processing, "packing").pull.flow.done);
    assert!(done.iter().all(|done| *done > 0), "both worked: {done:?}");
}

pub async fn what_became_of_runs_is_counted_for_all_processes<W: World>() {
    let world = W::new().await;
    for round in 1..=2 {
        let (step, mut runs) = held(Step::new("packing").when("new"));
        let processing = world.process([step]).await;
        world.order(round).await;
        let run = runs.next().await;
        world.change(round, |order| order.marks.push("theirs".into())).await.unwrap();
        run.makes("packed");
        runs.next().await; // let go of, it fails
        runs.next().await.makes("packed");
        world.rests_leaving(&mut runs).await;
        processing.stop(HOUR).await;
    }
    let tally = world.counts("packing").await.tally;
    assert_eq!((tally.failed, tally.conflicts), (2, 2), "{tally:?}");
    assert!(tally.done >= 2, "{tally:?}");
    assert!(world.counts(SYSTEM).await.tally.done >= 4);
}

pub async fn stages_of_one_name_are_refused<W: World>() {
    let world = W::new().await;
    for names in [["packing", "packing"], ["packing", SYSTEM]] {
        let processor = world.processor();
        let build = std::panic::AssertUnwindSafe(|| {
            drop(names.into_iter().map(Step::new).fold(processor, Processor::stage));
        });
        assert!(std::panic::catch_unwind(build).is_err(), "{names:?}");
    }
}

pub async fn entities_of_two_names_have_the_same_ids_and_nothing_else_in_common<W: World>() {
    let orders = W::new().await;
    let parcels = orders.called("parcels").await;
    let records = async || {
        let counts = orders.records().counts().await.unwrap();
        [ORDERS, "parcels"].map(|name| {
            let lanes = counts.iter().filter(|lane| lane.entity == name);
            lanes.map(|lane| lane.records).sum::<u64>()
        })
    };
    orders.order(1).await;
    assert_eq!(records().await, [1, 0]);
    parcels.change(1, |_| ()).await.unwrap().expect("there is a parcel 1");
    assert_eq!(records().await, [1, 1]);

    let (step, mut packed) = held(Step::new("packing"));
    let packing = orders.process([step]).await;
    packed.next().await.leaves();
    eventually("the order rests", async || records().await == [0, 1]).await;
    let (step, mut sent) = held(Step::new("packing"));
    let sending = parcels.process([step]).await;
    sent.next().await.leaves();
    orders.rests().await;

    parcels.change(1, |_| ()).await.unwrap().expect("there is a parcel 1");
    sent.next().await.leaves();
    orders.rests().await;
    assert!(packed.pending().is_none(), "no order was changed");
    orders.change(1, |_| ()).await.unwrap().expect("there is an order 1");
    packed.next().await.leaves();
    orders.rests().await;
    assert!(sent.pending().is_none(), "no parcel was changed");
    packing.stop(HOUR).await;
    sending.stop(HOUR).await;
}
