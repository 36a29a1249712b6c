//! The queues alone: they know names and ids, and nothing of orders.

use std::collections::HashSet;
use std::time::Duration;

use testing::soon;
use vedetta_core::queue::{Kept, Settled};
use vedetta_runtime::Ear;
use vedetta_stage::{Claim, Claimed, Fate, Lane, Record, Records, Which};

use super::{Ask, HOUR, ORDERS, World, about, ids, lapse};

const NOW: Duration = Duration::ZERO;
const STAGE: &str = "packing";
/// Over in a moment.
const SHORT: Duration = Duration::from_millis(1);

/// The queue of one stage.
struct Queue<R> {
    records: R,
    lane: Lane,
}

async fn queue<W: World>(world: &W) -> Queue<W::Records> {
    queue_of(world, ORDERS, STAGE).await
}

async fn queue_of<W: World>(world: &W, entity: &str, stage: &str) -> Queue<W::Records> {
    let records = world.records().clone();
    let lane = records.lane(entity, stage).await.unwrap();
    Queue { records, lane }
}

impl<R: Records> Queue<R> {
    async fn enqueue(&self, id: &str, delay: Duration) {
        self.records.enqueue(self.lane, &[(id, 0, delay)]).await.unwrap();
    }

    async fn claims(&self, room: u32, lease: Duration) -> Claimed {
        self.records.claim(self.lane, &[0], room, lease).await.unwrap()
    }

    /// The only one that is due.
    async fn claim(&self, lease: Duration) -> Claim {
        let mut claimed = self.claims(10, lease).await;
        assert_eq!(claimed.claims.len(), 1, "one is due: {claimed:?}");
        claimed.claims.remove(0)
    }

    async fn is_idle(&self) -> bool {
        self.claims(10, HOUR).await.claims.is_empty()
    }

    async fn settle(&self, claim: &Claim, fate: Fate) -> Settled {
        let settled = self.records.settle(self.lane, &[(claim.clone(), fate)]).await.unwrap();
        assert_eq!(settled.len(), 1);
        settled[0]
    }

    async fn keep(&self, claim: &Claim, lease: Duration) -> Kept {
        self.records.keep(self.lane, &[claim], lease).await.unwrap()[0]
    }

    async fn all(&self) -> Vec<Record> {
        self.records.list(ORDERS, &Which::default(), 1_000).await.unwrap().records
    }
}

fn failed(after: Duration, not_before: Duration, park: bool) -> Fate {
    Fate::Failed { after, not_before, error: "no stock".into(), park }
}

/// A record, but for how old it is and how long it has to wait.
fn timeless(mut records: Vec<Record>) -> Vec<Record> {
    for record in &mut records {
        record.age = NOW;
        record.due_in = record.due_in.map(|_| NOW);
    }
    records
}

pub async fn of_two_wishes_for_one_entity_the_earlier_stands_in_one_record<W: World>() {
    let world = W::new().await;
    let queue = queue(&world).await;
    for (first, second, stands) in
        [(HOUR, 2 * HOUR, HOUR), (2 * HOUR, HOUR, HOUR), (3 * HOUR, 3 * HOUR, 3 * HOUR)]
    {
        let id = format!("order-{}", first.as_secs() + second.as_secs() * 7);
        queue.enqueue(&id, first).await;
        queue.enqueue(&id, second).await;
        let which = Which { id: Some(id), ..Which::default() };
        let page = world.records().list(ORDERS, &which, 10).await.unwrap();
        assert_eq!(page.records.len(), 1, "{page:?}");
        assert!(about(page.records[0].due_in, stands), "{page:?}");
    }
    // In one call, too.
    let both = [("order-1", 0, HOUR), ("order-1", 0, NOW), ("order-1", 0, HOUR)];
    world.records().enqueue(queue.lane, &both).await.unwrap();
    assert_eq!(&*queue.claim(HOUR).await.id, "order-1");
    assert_eq!(world.counts(STAGE).await.records, 4);
}

pub async fn each_stage_of_each_entity_has_a_queue_of_its_own<W: World>() {
    let world = W::new().await;
    let (packing, shipping) = (queue(&world).await, queue_of(&world, ORDERS, "shipping").await);
    let parcels = queue_of(&world, "parcels", STAGE).await;
    assert_eq!(packing.lane, queue(&world).await.lane, "it is made once");
    assert_eq!(packing.lane, queue(&world.neighbour().await).await.lane, "for all");
    packing.enqueue("order-1", NOW).await;
    assert!(shipping.is_idle().await && parcels.is_idle().await);
    parcels.enqueue("order-1", NOW).await;
    let claim = packing.claim(HOUR).await;
    assert_eq!(parcels.settle(&claim, Fate::Gone).await, Settled::Stale, "not theirs");
    assert_eq!(parcels.keep(&claim, HOUR).await, Kept::Lost);
    assert_eq!(packing.settle(&claim, Fate::Gone).await, Settled::Gone);
    assert_eq!(&*parcels.claim(HOUR).await.id, "order-1");
}

pub async fn nobody_gets_what_another_holds<W: World>() {
    let world = W::new().await;
    let (ours, other) = (queue(&world).await, queue(&world.neighbour().await).await);
    ours.enqueue("order-1", NOW).await;
    let claim = ours.claim(HOUR).await;
    assert!(other.is_idle().await);
    ours.enqueue("order-1", NOW).await;
    assert!(other.is_idle().await, "though it was wanted once more");
    assert!(world.records().retry(ORDERS, STAGE, "order-1").await.unwrap());
    assert!(other.is_idle().await, "though it is to be tried again");
    assert!(matches!(ours.settle(&claim, Fate::Gone).await, Settled::Again(_)));
    assert_eq!(&*other.claim(HOUR).await.id, "order-1");
}

pub async fn many_who_claim_at_once_share_what_is_due<W: World>() {
    let world = W::new().await;
    let (first, second) = (queue(&world).await, queue(&world.neighbour().await).await);
    let all: Vec<String> = (0..60).map(|n| format!("order-{n}")).collect();
    let visits: Vec<_> = all.iter().map(|id| (id.as_str(), 0, NOW)).collect();
    world.records().enqueue(first.lane, &visits).await.unwrap();
    let mut seen = HashSet::new();
    let mut tokens = HashSet::new();
    for _ in 0..60 {
        let (a, b, c) =
            tokio::join!(first.claims(4, HOUR), second.claims(4, HOUR), second.claims(1, HOUR));
        for claim in [a.claims, b.claims, c.claims].into_iter().flatten() {
            assert!(seen.insert(claim.id.clone()), "{} twice", claim.id);
            assert!(tokens.insert(claim.token), "a token twice");
        }
    }
    assert_eq!(seen.len(), 60, "nothing is left");
}

pub async fn a_claim_takes_the_longest_due_first_and_no_more_than_there_is_room_for<W: World>() {
    let world = W::new().await;
    let queue = queue(&world).await;
    for id in ["order-3", "order-1", "order-4", "order-2"] {
        queue.enqueue(id, NOW).await;
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    assert_eq!(ids(&queue.claims(2, HOUR).await.claims), ["order-1", "order-3"]);
    assert!(queue.claims(0, HOUR).await.claims.is_empty());
    assert_eq!(ids(&queue.claims(1, HOUR).await.claims), ["order-4"]);
    assert_eq!(ids(&queue.claims(5, HOUR).await.claims), ["order-2"]);
}

pub async fn a_claim_that_finds_too_little_says_when_the_next_is_due<W: World>() {
    let world = W::new().await;
    let queue = queue(&world).await;
    let nothing = queue.claims(1, HOUR).await;
    assert!(nothing.rest.is_some_and(|rest| rest > 1_000 * HOUR), "{nothing:?}");
    queue.enqueue("order-1", NOW).await;
    queue.enqueue("order-2", 3 * HOUR).await;
    let full = queue.claims(1, 2 * HOUR).await;
    assert!(full.claims.len() == 1 && full.rest.is_none(), "there may be more: {full:?}");
    let until_the_lease_ends = queue.claims(1, HOUR).await;
    assert!(about(until_the_lease_ends.rest, 2 * HOUR), "{until_the_lease_ends:?}");
    assert_eq!(queue.settle(&full.claims[0], Fate::Gone).await, Settled::Gone);
    let until_it_is_due = queue.claims(1, HOUR).await;
    assert!(about(until_it_is_due.rest, 3 * HOUR), "{until_it_is_due:?}");
}

pub async fn a_claim_sees_the_shards_it_names_and_no_others<W: World>() {
    let world = W::new().await;
    let Queue { records, lane } = queue(&world).await;
    let visits = [("order-0", 0, NOW), ("order-5", 5, NOW), ("order-7", 7, HOUR)];
    records.enqueue(lane, &visits).await.unwrap();
    let none = records.claim(lane, &[], 9, HOUR).await.unwrap();
    assert!(none.claims.is_empty() && none.rest.is_some_and(|rest| rest > HOUR), "{none:?}");
    let other = records.claim(lane, &[4, 7], 9, HOUR).await.unwrap();
    assert!(other.claims.is_empty() && about(other.rest, HOUR), "{other:?}");
    let five = records.claim(lane, &[4, 5, 6], 9, HOUR).await.unwrap();
    assert_eq!(ids(&five.claims), ["order-5"]);
    let all = records.claim(lane, &[0, 4, 5, 6], 9, HOUR).await.unwrap();
    assert_eq!(ids(&all.claims), ["order-0"]);
    // All of a shard that has more than its share is found in the end.
    let many: Vec<String> = (10..30).map(|n| format!("order-{n}")).collect();
    let visits: Vec<_> = many.iter().map(|id| (id.as_str(), 5, NOW)).collect();
    records.enqueue(lane, &visits).await.unwrap();
    soon("all are found", async {
        let mut found = 0;
        while found < 20 {
            found += records.claim(lane, &[0, 4, 5], 6, HOUR).await.unwrap().claims.len();
        }
    })
    .await;
}

pub async fn a_record_goes_when_nothing_was_written_to_it<W: World>() {
    let world = W::new().await;
    let queue = queue(&world).await;
    queue.enqueue("order-1", NOW).await;
    queue.enqueue("order-1", NOW).await;
    let claim = queue.claim(HOUR).await;
    assert_eq!(queue.settle(&claim, Fate::Gone).await, Settled::Gone);
    assert_eq!(queue.all().await, []);
    assert_eq!(queue.settle(&claim, Fate::Gone).await, Settled::Stale, "said again");
    queue.enqueue("order-1", NOW).await;
    assert_eq!(queue.settle(&claim, Fate::Gone).await, Settled::Stale, "of another life");
    assert_eq!(queue.keep(&claim, HOUR).await, Kept::Lost);
    assert_eq!(&*queue.claim(HOUR).await.id, "order-1");
}

pub async fn a_record_that_was_written_to_since_its_claim_stays_whatever_was_written<W: World>() {
    let world = W::new().await;
    let queue = queue(&world).await;
    for (n, wish) in [NOW, HOUR, 1_000 * HOUR].into_iter().enumerate() {
        for (m, fate) in [Fate::Gone, Fate::Visit(2 * HOUR)].into_iter().enumerate() {
            let id = format!("order-{n}{m}");
            queue.enqueue(&id, NOW).await;
            let claim = queue.claim(HOUR).await;
            queue.enqueue(&id, wish).await;
            let settled = queue.settle(&claim, fate.clone()).await;
            assert_eq!(settled, Settled::Again(NOW), "{wish:?} {fate:?}");
            let again = queue.claim(HOUR).await;
            assert_eq!(*again.id, *id, "{wish:?} {fate:?}: it is processed again");
            assert_eq!(queue.settle(&again, Fate::Gone).await, Settled::Gone);
        }
    }
}

pub async fn a_record_is_due_again_when_its_visit_says<W: World>() {
    let world = W::new().await;
    let queue = queue(&world).await;
    queue.enqueue("order-1", NOW).await;
    let claim = queue.claim(HOUR).await;
    let settled = queue.settle(&claim, Fate::Visit(2 * HOUR)).await;
    assert!(matches!(settled, Settled::Again(after) if about(Some(after), 2 * HOUR)));
    assert!(about(world.record(STAGE, 1).await.unwrap().due_in, 2 * HOUR));
    assert!(queue.is_idle().await);
    queue.enqueue("order-1", HOUR).await;
    assert!(about(world.record(STAGE, 1).await.unwrap().due_in, HOUR), "the earlier stands");
    queue.enqueue("order-1", NOW).await;
    let claim = queue.claim(HOUR).await;
    assert_eq!(queue.settle(&claim, Fate::Visit(NOW)).await, Settled::Again(NOW));
    assert_eq!(&*queue.claim(HOUR).await.id, "order-1");
}

pub async fn who_let_a_lease_lapse_can_no_longer_keep_or_settle_what_another_claimed<W: World>() {
    let world = W::new().await;
    let (ours, other) = (queue(&world).await, queue(&world.neighbour().await).await);
    ours.enqueue("order-1", NOW).await;
    let late = ours.claim(SHORT).await;
    lapse(SHORT).await;
    let claim = other.claim(HOUR).await;
    assert_ne!(late.token, claim.token);
    let before = timeless(ours.all().await);
    assert!(before[0].is_held);
    assert_eq!(ours.keep(&late, HOUR).await, Kept::Lost);
    for fate in [Fate::Gone, Fate::Visit(NOW), failed(NOW, NOW, true), Fate::Released] {
        assert_eq!(ours.settle(&late, fate.clone()).await, Settled::Stale, "{fate:?}");
        assert_eq!(timeless(ours.all().await), before, "{fate:?} changed nothing");
        assert!(ours.is_idle().await, "{fate:?} freed nothing");
    }
    assert_eq!(other.keep(&claim, HOUR).await, Kept::Ours);
    assert_eq!(other.settle(&claim, Fate::Gone).await, Settled::Gone);
}

pub async fn a_lapsed_lease_settles_nothing_even_if_nobody_claimed_since<W: World>() {
    let world = W::new().await;
    let queue = queue(&world).await;
    queue.enqueue("order-1", NOW).await;
    let late = queue.claim(SHORT).await;
    lapse(SHORT).await;
    let before = timeless(queue.all().await);
    assert_eq!(queue.keep(&late, HOUR).await, Kept::Lost);
    for fate in [Fate::Gone, Fate::Visit(HOUR), failed(HOUR, HOUR, true), Fate::Released] {
        assert_eq!(queue.settle(&late, fate.clone()).await, Settled::Stale, "{fate:?}");
        assert_eq!(timeless(queue.all().await), before, "{fate:?} changed nothing");
    }
    let claim = queue.claim(HOUR).await;
    assert_eq!((&*claim.id, claim.failures), ("order-1", 0), "it is due at once, and not to blame");
}

pub async fn a_kept_lease_outlives_its_first_term_and_one_of_many_may_be_lost<W: World>() {
    let world = W::new().await;
    let queue = queue(&world).await;
    let term = Duration::from_secs(1);
    queue.enqueue("order-1", NOW).await;
    let lost = queue.claim(SHORT).await;
    lapse(SHORT).await;
    queue.enqueue("order-2", NOW).await;
    let both = queue.claims(2, term).await.claims;
    assert_eq!(ids(&both), ["order-1", "order-2"]);
    let held = [&both[0], &lost, &both[1]];
    let kept = queue.records.keep(queue.lane, &held, HOUR).await.unwrap();
    assert_eq!(kept, [Kept::Ours, Kept::Lost, Kept::Ours]);
    lapse(term).await;
    assert!(queue.is_idle().await);
    assert_eq!(queue.settle(&both[0], Fate::Gone).await, Settled::Gone);
}

pub async fn a_batch_is_settled_each_by_its_own_fate<W: World>() {
    let world = W::new().await;
    let queue = queue(&world).await;
    let all = ["order-1", "order-2", "order-3", "order-4", "order-5", "order-6"];
    let visits = all.map(|id| (id, 0, NOW));
    queue.records.enqueue(queue.lane, &visits).await.unwrap();
    let mut claims = queue.claims(10, HOUR).await.claims;
    claims.sort_by(|a, b| a.id.cmp(&b.id));
    queue.enqueue("order-6", NOW).await;
    let mut strange = claims[4].clone();
    strange.token = strange.token.wrapping_add(1_000);
    let ends = [
        (claims[3].clone(), failed(HOUR, NOW, true)),
        (claims[0].clone(), Fate::Gone),
        (strange, Fate::Gone),
        (claims[1].clone(), Fate::Visit(HOUR)),
        (claims[5].clone(), Fate::Gone),
        (claims[2].clone(), failed(2 * HOUR, NOW, false)),
    ];
    let settled = queue.records.settle(queue.lane, &ends).await.unwrap();
    let hours = |settled: &Settled| match settled {
        Settled::Again(after) => Some((after.as_secs() + 300) / 3600),
        _ => None,
    };
    assert_eq!(settled[..3], [Settled::Parked, Settled::Gone, Settled::Stale]);
    assert_eq!(settled[3..].iter().map(hours).collect::<Vec<_>>(), [Some(1), Some(0), Some(2)]);
    let counts = world.counts(STAGE).await;
    assert_eq!((counts.records, counts.parked, counts.held, counts.failing), (5, 1, 1, 1));
    assert_eq!(queue.records.settle(queue.lane, &[]).await.unwrap(), []);
    assert_eq!(queue.records.keep(queue.lane, &[], HOUR).await.unwrap(), []);
}

pub async fn failures_are_counted_with_their_error_until_something_ends_well<W: World>() {
    let world = W::new().await;
    let queue = queue(&world).await;
    queue.enqueue("order-1", NOW).await;
    for failures in 0..3 {
        let claim = queue.claim(HOUR).await;
        assert_eq!(claim.failures, failures);
        assert_eq!(queue.settle(&claim, failed(NOW, NOW, false)).await, Settled::Again(NOW));
        let record = world.record(STAGE, 1).await.unwrap();
        assert_eq!((record.failures, record.error.as_deref()), (failures + 1, Some("no stock")));
        assert!(!record.is_parked && !record.is_held, "{record:?}");
        assert_eq!(world.counts(STAGE).await.failing, 1);
    }
    let claim = queue.claim(HOUR).await;
    assert_eq!(queue.settle(&claim, Fate::Visit(NOW)).await, Settled::Again(NOW));
    let record = world.record(STAGE, 1).await.unwrap();
    assert_eq!((record.failures, record.error), (0, None));
    let claim = queue.claim(HOUR).await;
    let settled = queue.settle(&claim, failed(HOUR, NOW, false)).await;
    assert!(matches!(settled, Settled::Again(after) if about(Some(after), HOUR)), "{settled:?}");
    assert!(about(world.record(STAGE, 1).await.unwrap().due_in, HOUR));
}

pub async fn a_change_brings_a_failing_record_forward_but_never_before_its_first_wait<W: World>() {
    let world = W::new().await;
    let queue = queue(&world).await;
    queue.enqueue("order-1", NOW).await;
    let claim = queue.claim(HOUR).await;
    let _ = queue.settle(&claim, failed(3 * HOUR, HOUR, false)).await;
    assert!(about(world.record(STAGE, 1).await.unwrap().due_in, 3 * HOUR));
    queue.enqueue("order-1", NOW).await;
    assert!(about(world.record(STAGE, 1).await.unwrap().due_in, HOUR));

    // Written to while it ran: the failure is not of what was written.
    queue.enqueue("order-2", NOW).await;
    let claim = queue.claim(HOUR).await;
    queue.enqueue("order-2", NOW).await;
    let settled = queue.settle(&claim, failed(3 * HOUR, HOUR, true)).await;
    assert!(matches!(settled, Settled::Again(after) if about(Some(after), HOUR)), "{settled:?}");
    let record = world.record(STAGE, 2).await.unwrap();
    assert!(!record.is_parked && record.failures == 1, "{record:?}");
}

pub async fn a_parked_record_waits_for_somebody_to_want_it<W: World>() {
    let world = W::new().await;
    let queue = queue(&world).await;
    for id in ["order-1", "order-2"] {
        queue.enqueue(id, NOW).await;
        let claim = queue.claim(HOUR).await;
        assert_eq!(queue.settle(&claim, failed(NOW, NOW, true)).await, Settled::Parked);
    }
    assert!(queue.is_idle().await);
    let record = world.record(STAGE, 1).await.unwrap();
    assert!(record.is_parked && !record.is_held && record.due_in.is_none(), "{record:?}");
    assert_eq!((record.failures, record.error.as_deref()), (1, Some("no stock")));
    let counts = world.counts(STAGE).await;
    assert_eq!((counts.records, counts.parked, counts.failing, counts.due), (2, 2, 0, 0));

    assert!(world.records().retry(ORDERS, STAGE, "order-1").await.unwrap());
    let claim = queue.claim(HOUR).await;
    assert_eq!((&*claim.id, claim.failures), ("order-1", 0), "it starts anew");
    queue.enqueue("order-2", NOW).await;
    let claim = queue.claim(HOUR).await;
    assert_eq!((&*claim.id, claim.failures), ("order-2", 0));
    assert_eq!(queue.settle(&claim, Fate::Gone).await, Settled::Gone);
    assert_eq!(world.counts(STAGE).await.parked, 0);
}

pub async fn a_released_record_is_due_as_it_was<W: World>() {
    let world = W::new().await;
    let queue = queue(&world).await;
    queue.enqueue("order-1", NOW).await;
    let claim = queue.claim(HOUR).await;
    let _ = queue.settle(&claim, failed(NOW, NOW, false)).await;
    let claim = queue.claim(HOUR).await;
    assert_eq!(queue.settle(&claim, Fate::Released).await, Settled::Again(NOW));
    let again = queue.claim(HOUR).await;
    assert_eq!((&*again.id, again.failures), ("order-1", 1), "no failure more, none less");
}

pub async fn retry_brings_any_record_here_now_and_says_if_there_is_none<W: World>() {
    let world = W::new().await;
    let (queue, records) = (queue(&world).await, world.records());
    assert!(!records.retry(ORDERS, STAGE, "order-1").await.unwrap());
    assert!(!records.retry(ORDERS, "no such stage", "order-1").await.unwrap());
    assert!(!records.retry("no such entity", STAGE, "order-1").await.unwrap());
    queue.enqueue("order-1", 9 * HOUR).await;
    assert!(!records.retry(ORDERS, STAGE, "order-2").await.unwrap());
    assert!(records.retry(ORDERS, STAGE, "order-1").await.unwrap());
    let claim = queue.claim(HOUR).await;
    let _ = queue.settle(&claim, failed(9 * HOUR, 9 * HOUR, false)).await;
    assert!(records.retry(ORDERS, STAGE, "order-1").await.unwrap(), "whatever it waits for");
    let claim = queue.claim(HOUR).await;
    assert_eq!(claim.failures, 0);
    assert!(records.retry(ORDERS, STAGE, "order-1").await.unwrap(), "while it runs");
    assert_eq!(queue.settle(&claim, Fate::Gone).await, Settled::Again(NOW), "once more");
}

pub async fn counts_tell_due_from_held_from_waiting_and_how_long<W: World>() {
    let world = W::new().await;
    let queue = queue(&world).await;
    let empty = world.counts(STAGE).await;
    assert_eq!((empty.records, empty.due, empty.oldest_due), (0, 0, None));
    queue.enqueue("order-1", NOW).await;
    let _held = queue.claim(HOUR).await;
    queue.enqueue("order-2", HOUR).await;
    assert_eq!(world.counts(STAGE).await.oldest_due, None);
    queue.enqueue("order-3", NOW).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    queue.enqueue("order-4", NOW).await;
    let counts = world.counts(STAGE).await;
    assert_eq!((counts.records, counts.due, counts.held), (4, 2, 1), "{counts:?}");
    assert_eq!((counts.failing, counts.parked), (0, 0));
    assert!(counts.oldest_due.is_some_and(|age| age >= Duration::from_millis(19)), "{counts:?}");
    let all = world.records().counts().await.unwrap();
    let lanes: Vec<_> = all.iter().map(|lane| (&*lane.entity, &*lane.stage)).collect();
    assert_eq!(lanes, [(ORDERS, STAGE), (ORDERS, "system")]);
}

pub async fn what_nobody_holds_any_more_counts_as_due<W: World>() {
    let world = W::new().await;
    let queue = queue(&world).await;
    queue.enqueue("order-1", NOW).await;
    let _late = queue.claim(SHORT).await;
    lapse(SHORT).await;
    let record = world.record(STAGE, 1).await.unwrap();
    assert!(!record.is_held && record.due_in.is_none(), "{record:?}");
    let counts = world.counts(STAGE).await;
    assert_eq!((counts.due, counts.held), (1, 0), "{counts:?}");
    assert!(counts.oldest_due.is_some());
}

pub async fn lists_come_page_by_page_in_the_order_of_stage_and_id<W: World>() {
    let world = W::new().await;
    let records = world.records();
    let mut expected = Vec::new();
    for stage in ["b-stage", "a-stage"] {
        let queue = queue_of(&world, ORDERS, stage).await;
        for n in [3, 1, 10, 2] {
            let id = format!("order-{n}");
            queue.enqueue(&id, NOW).await;
            expected.push((stage.to_owned(), id));
        }
    }
    queue_of(&world, "parcels", "a-stage").await.enqueue("order-1", NOW).await;
    expected.sort();
    for size in [1, 3, 4, 8, 100, u32::MAX] {
        let (mut found, mut which) = (Vec::new(), Which::default());
        loop {
            let page = records.list(ORDERS, &which, size).await.unwrap();
            found.extend(page.records.into_iter().map(|record| (record.stage, record.id)));
            which.after = found.last().cloned();
            if !page.more {
                break;
            }
        }
        assert_eq!(found, expected, "in pages of {size}");
    }
    let list = async |which: Which| {
        let page = records.list(ORDERS, &which, 100).await.unwrap();
        page.records.into_iter().map(|record| (record.stage, record.id)).collect::<Vec<_>>()
    };
    let of_stage = list(Which { stage: Some("b-stage".into()), ..Which::default() }).await;
    assert_eq!(of_stage, expected[4..]);
    let of_id = list(Which { id: Some("order-10".into()), ..Which::default() }).await;
    assert_eq!(of_id, [expected[1].clone(), expected[5].clone()]);
    let queue = queue_of(&world, ORDERS, "b-stage").await;
    let claim = queue.claims(1, HOUR).await.claims.remove(0);
    let _ = queue.settle(&claim, failed(NOW, NOW, true)).await;
    let parked = list(Which { parked: true, ..Which::default() }).await;
    assert_eq!(parked, [("b-stage".to_owned(), claim.id.to_string())]);
    assert_eq!(list(Which { stage: Some("none".into()), ..Which::default() }).await, []);
}

pub async fn a_long_error_is_cut_within_no_character_and_ids_may_be_any_text<W: World>() {
    let world = W::new().await;
    let queue = queue(&world).await;
    let id = "zażółć/'\"; DROP TABLE orders -- \u{1f980} %_\\";
    queue.enqueue(id, NOW).await;
    let claim = queue.claim(HOUR).await;
    assert_eq!(&*claim.id, id);
    let error = "ü".repeat(5_000);
    let fate = Fate::Failed { after: NOW, not_before: NOW, error, park: true };
    assert_eq!(queue.settle(&claim, fate).await, Settled::Parked);
    let record = queue.all().await.remove(0);
    let kept = record.error.unwrap();
    assert!(kept.len() <= 4096 && kept.len() > 4000 && kept.chars().all(|c| c == 'ü'));
    assert!(world.records().retry(ORDERS, STAGE, id).await.unwrap());
    let claim = queue.claim(HOUR).await;
    let fate = Fate::Failed { after: NOW, not_before: NOW, error: "a\0b".into(), park: true };
    assert_eq!(queue.settle(&claim, fate).await, Settled::Parked);
    assert_eq!(queue.all().await.remove(0).error.as_deref(), Some("a\u{fffd}b"));
    assert!(world.records().retry(ORDERS, STAGE, id).await.unwrap());
    let claim = queue.claim(HOUR).await;
    assert_eq!(queue.settle(&claim, Fate::Gone).await, Settled::Gone);
}

pub async fn who_waits_for_a_queue_is_woken_by_whoever_writes_to_it<W: World>() {
    let world = W::new().await;
    let (queue, neighbour) = (queue(&world).await, queue(&world.neighbour().await).await);
    // Two who work it, of which neither takes the other's wake-up.
    let ears = [Ear::default(), Ear::default()];
    let wakes = async || {
        for ear in &ears {
            soon("it is woken", world.records().woken(queue.lane, ear)).await;
        }
    };
    queue.enqueue("order-1", NOW).await;
    wakes().await;
    neighbour.enqueue("order-2", NOW).await;
    wakes().await;
    let claim = queue.claims(1, HOUR).await.claims.remove(0);
    let _ = neighbour.settle(&claim, Fate::Released).await;
    wakes().await;
    assert!(neighbour.records.retry(ORDERS, STAGE, "order-2").await.unwrap());
    wakes().await;
}
