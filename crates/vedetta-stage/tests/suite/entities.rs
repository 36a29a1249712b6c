//! Entities and their records are written together, and nobody saves over somebody else.

use std::time::Duration;

use futures_util::future::join_all;
use vedetta_core::queue::Settled;
use vedetta_stage::{
    Backend as _, Checked, Claim, Ending, Entity as _, Fate, Going, Lane, Records as _, SYSTEM,
    Saved, Version,
};

use super::{Ask, HOUR, ORDERS, Order, OrderId, World, lapse};

const STAGE: &str = "packing";

/// The records of these orders in the stage, claimed.
async fn claimed<W: World>(world: &W, ids: &[i64], lease: Duration) -> (Lane, Vec<Claim>) {
    let records = world.records();
    let lane = records.lane(ORDERS, STAGE).await.unwrap();
    let texts: Vec<String> = ids.iter().map(|id| OrderId(*id).to_string()).collect();
    let visits: Vec<_> = texts.iter().map(|id| (id.as_str(), 0, Duration::ZERO)).collect();
    records.enqueue(lane, &visits).await.unwrap();
    let mut claims = records.claim(lane, &[0], 100, lease).await.unwrap().claims;
    claims.sort_by_key(|claim| texts.iter().position(|id| **id == *claim.id));
    assert_eq!(claims.len(), ids.len());
    (lane, claims)
}

/// Has no record of the system stage, so that one made later is seen.
async fn sorted_out<W: World>(world: &W) {
    let records = world.records();
    let lane = records.lane(ORDERS, SYSTEM).await.unwrap();
    let claims = records.claim(lane, &[0], 100, HOUR).await.unwrap().claims;
    let ends: Vec<_> = claims.into_iter().map(|claim| (claim, Fate::Gone)).collect();
    records.settle(lane, &ends).await.unwrap();
    assert_eq!(world.counts(SYSTEM).await.records, 0);
}

fn saving(claim: &Claim, order: Order, read: Version) -> Ending<Order> {
    let (claim, saves) = (claim.clone(), Some((order, read)));
    Ending { claim, fate: Fate::Gone, saves, visits: Vec::new() }
}

pub async fn a_new_entity_is_of_version_1_and_due_in_the_system_stage<W: World>() {
    let world = W::new().await;
    world.order(7).await;
    assert_eq!(world.get(7).await, Order { version: Version(1), ..Order::new(7) });
    let record = world.record(SYSTEM, 7).await.expect("it is enqueued");
    assert_eq!((&*record.entity, &*record.stage, &*record.id), (ORDERS, SYSTEM, "order-7"));
    assert!(record.due_in.is_none() && !record.is_held, "it is due: {record:?}");
}

pub async fn an_update_raises_the_version_and_enqueues_the_system_stage_again<W: World>() {
    let world = W::new().await;
    world.order(7).await;
    sorted_out(&world).await;
    let changed = world.change(7, |order| order.state = "paid".into()).await.unwrap().unwrap();
    assert_eq!((changed.version, &*changed.state), (Version(2), "paid"));
    assert_eq!(world.get(7).await, changed);
    assert!(world.record(SYSTEM, 7).await.unwrap().due_in.is_none());
    // A version that a change writes itself does not count.
    let changed = world.change(7, |order| order.version = Version(90)).await.unwrap().unwrap();
    assert_eq!((changed.version, world.get(7).await.version), (Version(3), Version(3)));
}

pub async fn many_entities_are_written_with_their_records_at_once<W: World>() {
    let world = W::new().await;
    world.create((1..=50).map(Order::new).collect()).await.unwrap();
    assert_eq!(world.counts(SYSTEM).await.due, 50);
    assert_eq!(world.get(50).await.version, Version(1));
}

pub async fn a_write_that_fails_leaves_neither_entity_nor_record<W: World>() {
    let world = W::new().await;
    world.order(1).await;
    sorted_out(&world).await;
    let twice = vec![Order::new(2), Order::new(1)];
    world.create(twice).await.expect_err("there is an order 1");
    assert_eq!(world.read(2).await, None);
    let forbidden = world.change(1, |order| order.state = "forbidden".into()).await;
    forbidden.expect_err("a state the table refuses");
    assert_eq!(world.get(1).await.version, Version(1));
    assert_eq!(world.counts(SYSTEM).await.records, 0);
}

pub async fn changing_what_does_not_exist_says_so_and_enqueues_nothing<W: World>() {
    let world = W::new().await;
    let changed = world.change(1, |_| panic!("there is nothing to change")).await;
    assert_eq!(changed.unwrap(), None);
    assert_eq!(world.counts(SYSTEM).await.records, 0);
}

pub async fn changes_made_at_once_lose_none<W: World>() {
    let world = W::new().await;
    let neighbour = world.neighbour().await;
    world.order(1).await;
    let changes = (0..40).map(|n| {
        let who = if n % 2 == 0 { &world } else { &neighbour };
        who.change(1, move |order| order.marks.push(n.to_string()))
    });
    for changed in join_all(changes).await {
        changed.unwrap().expect("the order is there");
    }
    let mut order = world.get(1).await;
    assert_eq!(order.version, Version(41));
    order.marks.sort_by_key(|mark| mark.parse::<u32>().unwrap());
    assert_eq!(order.marks, (0..40).map(|n| n.to_string()).collect::<Vec<_>>());
}

pub async fn many_changed_at_once_from_two_sides_lose_none<W: World>() {
    let world = W::new().await;
    let neighbour = world.neighbour().await;
    world.create((1..=15).map(Order::new).collect()).await.unwrap();
    sorted_out(&world).await;
    let changes = (0..10).map(|n| {
        let who = if n % 2 == 0 { &world } else { &neighbour };
        // In any order, and one that is not there.
        let ids = if n % 3 == 0 { (1..=16).rev().collect() } else { (1..=16).collect() };
        who.change_all(ids, move |order| order.marks.push(n.to_string()))
    });
    for changed in join_all(changes).await {
        assert_eq!(changed.unwrap().len(), 15);
    }
    for id in 1..=15 {
        let mut order = world.get(id).await;
        order.marks.sort();
        assert_eq!(order.marks, (0..10).map(|n| n.to_string()).collect::<Vec<_>>());
        assert_eq!(order.version, Version(11));
    }
    assert_eq!(world.counts(SYSTEM).await.due, 15);
    assert_eq!(world.change_all(Vec::new(), |_| ()).await.unwrap(), []);
}

pub async fn ids_go_through_the_queue_as_text_and_come_back<W: World>() {
    let world = W::new().await;
    let all = [0, 7, i64::MAX];
    world.create(all.map(Order::new).to_vec()).await.unwrap();
    let lane = world.records().lane(ORDERS, SYSTEM).await.unwrap();
    let claims = world.records().claim(lane, &[0], 9, HOUR).await.unwrap().claims;
    let ids: Vec<OrderId> = claims.iter().map(|claim| claim.id.parse().unwrap()).collect();
    let mut loaded = world.orders().load(ids).await.unwrap();
    loaded.sort_by_key(|order| order.id);
    assert_eq!(loaded.iter().map(|order| order.id).collect::<Vec<_>>(), all);
    assert_eq!(world.orders().load(Vec::new()).await.unwrap(), []);
    assert_eq!(world.orders().load(vec![OrderId(99)]).await.unwrap(), []);
}

pub async fn a_batch_saves_what_is_fresh_and_tells_each_conflict<W: World>() {
    let world = W::new().await;
    world.create([1, 2, 3, 4].map(Order::new).to_vec()).await.unwrap();
    let (lane, claims) = claimed(&world, &[1, 2, 3, 4], HOUR).await;
    let read: Vec<Order> = join_all([1, 2, 3, 4].map(|id| world.get(id))).await;
    world.change(2, |order| order.state = "changed".into()).await.unwrap();
    world.delete(4).await;
    sorted_out(&world).await;
    let endings = claims.iter().zip(&read).map(|(claim, order)| {
        // Whatever version a stage leaves in it.
        let mut packed = order.clone().is("packed");
        packed.set_version(Version(99));
        saving(claim, packed, order.version)
    });
    let saved = world.orders().settle(lane, endings.collect()).await.unwrap().saved;
    let gone = Ok(Saved::Settled(Settled::Gone));
    assert_eq!(saved, [gone.clone(), Ok(Saved::Conflict), gone, Ok(Saved::Conflict)]);

    for (id, version, state) in [(1, 2, "packed"), (2, 2, "changed"), (3, 2, "packed")] {
        let order = world.get(id).await;
        assert_eq!((order.version.0, &*order.state), (version, state), "{id}");
    }
    assert_eq!(world.read(4).await, None, "what was removed stays so");
    for (id, is_saved) in [(1, true), (2, false), (3, true), (4, false)] {
        assert_eq!(world.record(SYSTEM, id).await.is_some(), is_saved, "{id} is asked about");
        let record = world.record(STAGE, id).await;
        assert_eq!(record.is_none(), is_saved, "{id}: a conflict is due as it was");
        let is_due = |record: vedetta_stage::Record| {
            record.due_in.is_none() && !record.is_held && record.failures == 0
        };
        assert!(record.is_none_or(is_due));
    }
}

pub async fn a_single_save_is_a_batch_of_one<W: World>() {
    let world = W::new().await;
    world.order(1).await;
    for (read, expected) in [(0, Saved::Conflict), (1, Saved::Settled(Settled::Gone))] {
        let (lane, claims) = claimed(&world, &[1], HOUR).await;
        let packed = Order::new(1).is("packed");
        let ending = saving(&claims[0], packed, Version(read));
        let saved = world.orders().settle(lane, vec![ending]).await.unwrap().saved;
        assert_eq!(saved, [Ok(expected)]);
    }
    assert_eq!(world.get(1).await.version, Version(2));
    assert_eq!(
        world.orders().settle(claimed(&world, &[], HOUR).await.0, vec![]).await.unwrap().saved,
        []
    );
}

pub async fn an_order_that_is_saved_as_it_was_read_is_a_conflict_if_somebody_else_saved_it<
    W: World,
>() {
    let world = W::new().await;
    let neighbour = world.neighbour().await;
    world.order(7).await;
    // Two people have the form of order 7 open.
    let form = world.get(7).await;
    sorted_out(&world).await;
    let mut paid = form.clone().is("paid");
    // What counts is the version that is named.
    paid.set_version(Version(90));
    let saved = neighbour.save(paid, form.version).await.unwrap();
    let paid = Order { version: Version(2), ..Order::new(7).is("paid") };
    assert_eq!(saved, Checked::Saved(paid.clone()));
    assert_eq!(world.get(7).await, paid);
    assert!(world.record(SYSTEM, 7).await.unwrap().due_in.is_none(), "the stages are asked");

    sorted_out(&world).await;
    let stale = world.save(form.clone().is("cancelled"), form.version).await.unwrap();
    assert_eq!(stale, Checked::Conflict);
    assert_eq!(world.get(7).await, paid, "nothing is saved over");
    assert_eq!(world.counts(SYSTEM).await.records, 0);
    let missing = world.save(Order::new(8), Version(1)).await.unwrap();
    assert_eq!(missing, Checked::Conflict);
    assert_eq!(world.read(8).await, None);
}

pub async fn of_many_saved_as_they_were_read_each_is_told_by_itself<W: World>() {
    let world = W::new().await;
    world.create([1, 2, 3].map(Order::new).to_vec()).await.unwrap();
    world.change(2, |order| order.state = "changed".into()).await.unwrap();
    sorted_out(&world).await;
    let packed = |id| (Order::new(id).is("packed"), Version(1));
    // In any order, one that somebody changed, one that is not there, and one twice.
    let saved = world.save_all([3, 2, 4, 1, 3].map(packed).to_vec()).await.unwrap();
    let is_saved: Vec<bool> =
        saved.iter().map(|saved| matches!(saved, Checked::Saved(_))).collect();
    assert_eq!(is_saved[1..4], [false, false, true]);
    assert!(is_saved[0] != is_saved[4], "of two one: {is_saved:?}");
    for (id, version, state) in [(1, 2, "packed"), (2, 2, "changed"), (3, 2, "packed")] {
        let order = world.get(id).await;
        assert_eq!((order.version.0, &*order.state), (version, state), "{id}");
        assert_eq!(
            world.record(SYSTEM, id).await.is_some(),
            state == "packed",
            "{id} is asked about"
        );
    }
    let refused = vec![
        (Order::new(1).is("shipped"), Version(2)),
        (Order::new(3).is("forbidden"), Version(2)),
    ];
    world.save_all(refused).await.expect_err("a state the table refuses");
    assert_eq!(world.get(1).await.state, "packed", "all or none");
    assert_eq!(world.save_all(Vec::new()).await.unwrap(), []);
}

pub async fn a_refused_save_harms_no_other_and_leaves_its_record_held<W: World>() {
    let world = W::new().await;
    world.create([1, 2, 3].map(Order::new).to_vec()).await.unwrap();
    sorted_out(&world).await;
    let (lane, claims) = claimed(&world, &[1, 2, 3], HOUR).await;
    let endings = [(1, "packed"), (2, "forbidden"), (3, "packed")].into_iter().zip(&claims);
    let endings = endings.map(|((id, state), claim)| {
        let mut ending = saving(claim, Order::new(id).is(state), Version(1));
        ending.fate = Fate::Visit(HOUR);
        ending
    });
    let saved = world.orders().settle(lane, endings.collect()).await.unwrap().saved;
    assert!(matches!(saved[0], Ok(Saved::Settled(Settled::Again(_)))), "{saved:?}");
    assert!(saved[1].is_err(), "{saved:?}");
    assert!(matches!(saved[2], Ok(Saved::Settled(Settled::Again(_)))), "{saved:?}");
    assert_eq!(world.get(2).await, Order { version: Version(1), ..Order::new(2) });
    assert!(world.record(STAGE, 2).await.unwrap().is_held, "neither saved nor settled");
    assert!(world.record(SYSTEM, 2).await.is_none());
    assert!(!world.record(STAGE, 3).await.unwrap().is_held);
    assert_eq!(world.get(3).await.state, "packed");
}

pub async fn whose_lease_lapsed_saves_nothing_and_sends_nothing_on<W: World>() {
    let world = W::new().await;
    world.create([1, 2].map(Order::new).to_vec()).await.unwrap();
    sorted_out(&world).await;
    let short = Duration::from_millis(1);
    let (lane, claims) = claimed(&world, &[1, 2], short).await;
    let next = world.records().lane(ORDERS, "shipping").await.unwrap();
    lapse(short).await;
    let saves_late = saving(&claims[0], Order::new(1).is("packed"), Version(1));
    let visits = vec![Going { lane: next, after: Duration::ZERO, hold: None }];
    let visits_late = Ending { claim: claims[1].clone(), fate: Fate::Gone, saves: None, visits };
    let saved = world.orders().settle(lane, vec![saves_late, visits_late]).await.unwrap().saved;
    assert_eq!(saved, [Ok(Saved::Settled(Settled::Stale)), Ok(Saved::Settled(Settled::Stale))]);
    assert_eq!(world.get(1).await.version, Version(1));
    assert_eq!(world.counts(SYSTEM).await.records, 0);
    assert_eq!(world.counts("shipping").await.records, 0);
    assert_eq!(world.counts(STAGE).await.records, 2, "both are to be done again");
}

pub async fn where_an_entity_goes_next_is_noted_with_its_end<W: World>() {
    let world = W::new().await;
    world.create([1, 2].map(Order::new).to_vec()).await.unwrap();
    let (lane, claims) = claimed(&world, &[1, 2], HOUR).await;
    let next = world.records().lane(ORDERS, "shipping").await.unwrap();
    let later = world.records().lane(ORDERS, "thanking").await.unwrap();
    let endings = claims.iter().map(|claim| Ending {
        claim: claim.clone(),
        fate: Fate::Gone,
        saves: None,
        visits: vec![
            Going { lane: next, after: Duration::ZERO, hold: None },
            Going { lane: later, after: HOUR, hold: None },
        ],
    });
    let saved = world.orders().settle(lane, endings.collect()).await.unwrap().saved;
    assert_eq!(saved, vec![Ok(Saved::Settled(Settled::Gone)); 2]);
    assert_eq!(world.counts(STAGE).await.records, 0);
    assert_eq!(world.counts("shipping").await.due, 2);
    let later = world.counts("thanking").await;
    assert_eq!((later.records, later.due), (2, 0));
}
