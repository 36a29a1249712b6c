//! How a queue is worked: stories in paused time, on a queue in memory.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};
use vedetta_core::queue::{End, Handed, Kept, Settled, Taken, Woken};
use vedetta_core::{Command, Failure, Handler, Queue, QueueError};
use vedetta_runtime::{Flow, Limits, Puller, Pulling};

const LEASE: Duration = Duration::from_secs(30);

/// What a run is told to do, by the name of its item.
#[derive(Debug, Clone, Copy)]
enum Run {
    Takes(u64),
    Fails,
    Panics,
}

#[derive(Debug)]
struct Item {
    run: Run,
    cost: u32,
    due: Instant,
    /// Until when, and for which token.
    held: Option<(Instant, u64)>,
}

#[derive(Debug, Default)]
struct World {
    items: BTreeMap<u32, Item>,
    token: u64,
    /// Room asked for by each take.
    takes: Vec<u32>,
    keeps: usize,
    /// How many each settle was told of.
    settles: Vec<usize>,
    /// Of each item, how it ended.
    ends: Vec<(u32, String)>,
    started: Vec<u32>,
    running: u32,
    most_running: u32,
    /// Calls that fail from now on.
    broken: Broken,
    /// How long each call takes.
    trip: Duration,
    /// Keeps are not answered.
    keeps_hang: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Broken {
    take: bool,
    keep: bool,
    settle: bool,
}

#[derive(Clone, Default)]
struct Line {
    world: Arc<Mutex<World>>,
    bell: Arc<Notify>,
}

impl Line {
    fn put(&self, name: u32, run: Run) {
        self.put_at(name, run, 1, Duration::ZERO);
        self.bell.notify_one();
    }

    fn put_at(&self, name: u32, run: Run, cost: u32, after: Duration) {
        let item = Item { run, cost, due: Instant::now() + after, held: None };
        self.world.lock().items.insert(name, item);
    }

    fn ends(&self) -> Vec<(u32, String)> {
        self.world.lock().ends.clone()
    }

    fn started(&self) -> Vec<u32> {
        self.world.lock().started.clone()
    }

    async fn trip(&self, is_broken: impl Fn(Broken) -> bool) -> Result<(), QueueError> {
        let (trip, broken) = {
            let world = self.world.lock();
            (world.trip, world.broken)
        };
        sleep(trip).await;
        if is_broken(broken) { Err(QueueError::new("the line is cut", None)) } else { Ok(()) }
    }
}

impl Queue for Line {
    type Claim = (u32, u64);
    type Item = (u32, Run);
    type Outcome = u32;

    async fn take(&self, room: u32) -> Result<Taken<(u32, u64), (u32, Run)>, QueueError> {
        self.world.lock().takes.push(room);
        self.trip(|broken| broken.take).await?;
        let world = &mut *self.world.lock();
        let now = Instant::now();
        let mut left = room;
        let mut items = Vec::new();
        for (name, item) in &mut world.items {
            let is_free = item.held.is_none_or(|(until, _)| until <= now);
            if is_free && item.due <= now && item.cost.min(room) <= left {
                left -= item.cost.min(room);
                world.token += 1;
                item.held = Some((now + LEASE, world.token));
                let claim = (*name, world.token);
                items.push(Handed { claim, item: (*name, item.run), cost: item.cost });
            }
        }
        let next = world.items.values().map(|item| item.held.map_or(item.due, |(until, _)| until));
        let rest = next.min().map_or(Duration::MAX, |due| due.saturating_duration_since(now));
        Ok(Taken { items, rest: (left > 0).then_some(rest) })
    }

    async fn keep(&self, held: &[&(u32, u64)]) -> Result<Vec<Kept>, QueueError> {
        if self.world.lock().keeps_hang {
            std::future::pending::<()>().await;
        }
        self.trip(|broken| broken.keep).await?;
        let world = &mut *self.world.lock();
        world.keeps += 1;
        let keep = |(name, token): &&(u32, u64)| match world.items.get_mut(name) {
            Some(item) if item.held.is_some_and(|(_, ours)| ours == *token) => {
                item.held = Some((Instant::now() + LEASE, *token));
                Kept::Ours
            }
            _ => Kept::Lost,
        };
        Ok(held.iter().map(keep).collect())
    }

    async fn settle(&self, ended: &[((u32, u64), End<u32>)]) -> Result<Vec<Settled>, QueueError> {
        self.trip(|broken| broken.settle).await?;
        let world = &mut *self.world.lock();
        world.settles.push(ended.len());
        let mut answers = Vec::new();
        for ((name, token), end) in ended {
            let is_ours = world.items.get(name).and_then(|item| item.held);
            if is_ours.is_none_or(|(_, ours)| ours != *token) {
                answers.push(Settled::Stale);
                continue;
            }
            let (text, answer) = match end {
                End::Done(_) => ("done".to_owned(), Settled::Gone),
                End::Failed(failure) => (failure.to_string(), Settled::Parked),
                End::Released => ("released".to_owned(), Settled::Again(Duration::ZERO)),
            };
            world.ends.push((*name, text));
            if answer == Settled::Again(Duration::ZERO) {
                world.items.get_mut(name).expect("it is there").held = None;
            } else {
                world.items.remove(name);
            }
            answers.push(answer);
        }
        Ok(answers)
    }

    async fn woken(&self) -> Woken {
        self.bell.notified().await;
        Woken::More
    }
}

/// Counts itself among the runs as long as it lives.
struct Counted(Arc<Mutex<World>>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.lock().running -= 1;
    }
}

impl Handler<(u32, Run)> for Line {
    type Outcome = u32;

    fn handle(
        &self,
        (name, run): (u32, Run),
    ) -> impl Future<Output = Result<u32, Failure>> + Send + 'static {
        let world = Arc::clone(&self.world);
        async move {
            {
                let mut world = world.lock();
                world.started.push(name);
                world.running += 1;
                world.most_running = world.most_running.max(world.running);
            }
            let _counted = Counted(world);
            match run {
                Run::Takes(millis) => sleep(Duration::from_millis(millis)).await,
                Run::Fails => return Err(Failure::Error("no".into())),
                Run::Panics => panic!("out of order"),
            }
            Ok(name)
        }
    }
}

fn start(line: &Line, capacity: u32) -> Pulling {
    let capacity = NonZeroU32::new(capacity).expect("not zero");
    let limits = Limits { capacity, timeout: Some(Duration::from_secs(3600)) };
    let puller = Puller { limits, lease: LEASE, beat: LEASE / 3, poll: Duration::from_secs(5) };
    puller.start(line.clone(), line.clone())
}

async fn secs(seconds: u64) {
    sleep(Duration::from_secs(seconds)).await;
}

async fn millis(millis: u64) {
    sleep(Duration::from_millis(millis)).await;
}

#[tokio::test(start_paused = true)]
async fn no_more_is_taken_than_can_run_and_what_ends_makes_room() {
    let line = Line::default();
    (0..5).for_each(|name| line.put(name, Run::Takes(1_000)));
    let pulling = start(&line, 2);
    millis(500).await;
    assert_eq!(line.started(), [0, 1]);
    assert_eq!(pulling.status().flow.taken, 2, "others may have the rest");
    secs(3).await;
    assert_eq!(line.started(), [0, 1, 2, 3, 4]);
    assert_eq!(line.world.lock().most_running, 2);
    assert_eq!(pulling.status().flow, Flow { taken: 5, done: 5, ..Flow::default() });
}

#[tokio::test(start_paused = true)]
async fn short_runs_are_taken_ahead_and_long_ones_are_not() {
    let line = Line::default();
    line.world.lock().trip = Duration::from_millis(10);
    (0..2_000).for_each(|name| line.put(name, Run::Takes(1)));
    let _pulling = start(&line, 4);
    secs(60).await;
    assert_eq!(line.world.lock().ends.len(), 2_000);
    let takes = std::mem::take(&mut line.world.lock().takes);
    let most = takes.iter().max().copied().unwrap_or(0);
    assert!(most > 16, "takes of 10 ms for runs of 1 ms ask for more than the slots: {takes:?}");

    (0..20).for_each(|name| line.put(name, Run::Takes(5_000)));
    secs(120).await;
    let takes = line.world.lock().takes.clone();
    assert!(takes[takes.len() - 8..].iter().all(|room| *room <= 4), "{takes:?}");
    assert!(line.world.lock().items.is_empty());
}

#[tokio::test(start_paused = true)]
async fn heavy_items_take_their_share_of_the_slots() {
    let line = Line::default();
    line.put_at(0, Run::Takes(1_000), 3, Duration::ZERO);
    line.put_at(1, Run::Takes(1_000), 2, Duration::ZERO);
    line.put_at(2, Run::Takes(1_000), 1, Duration::ZERO);
    line.put_at(3, Run::Takes(1_000), 64, Duration::ZERO);
    let _pulling = start(&line, 4);
    millis(500).await;
    assert_eq!(line.started(), [0, 2], "three and one fill it");
    secs(10).await;
    assert_eq!(line.ends().len(), 4, "one that is larger than all slots takes them all");
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_prolonged_for_as_long_as_its_run_takes() {
    let line = Line::default();
    line.put(0, Run::Takes(600_000));
    let pulling = start(&line, 1);
    secs(500).await;
    assert_eq!(line.started(), [0], "it was not handed out again");
    assert!(line.world.lock().keeps >= 45, "three times in each lease");
    secs(101).await;
    assert_eq!(line.ends(), [(0, "done".into())]);
    assert_eq!(pulling.status().flow.stale, 0);
}

#[tokio::test(start_paused = true)]
async fn a_run_whose_lease_was_lost_is_ended_and_not_settled() {
    let line = Line::default();
    line.put(0, Run::Takes(100_000));
    let pulling = start(&line, 1);
    secs(1).await;
    line.world.lock().items.get_mut(&0).expect("it runs").held =
        Some((Instant::now() + 100 * LEASE, 99));
    secs(15).await;
    assert_eq!(line.world.lock().running, 0, "noticed when it was to be prolonged");
    assert_eq!((line.ends(), pulling.status().flow.stale), (vec![], 1));
}

#[tokio::test(start_paused = true)]
async fn a_late_answer_about_one_that_is_settled_does_not_end_its_successor() {
    let line = Line::default();
    line.put(0, Run::Takes(10_100));
    let pulling = start(&line, 1);
    millis(9_950).await;
    line.world.lock().trip = Duration::from_secs(1);
    millis(100).await; // its lease is being prolonged
    line.world.lock().trip = Duration::ZERO;
    millis(100).await; // it has ended and is gone
    line.put(1, Run::Takes(5_000));
    secs(10).await;
    assert_eq!(line.ends(), [(0, "done".into()), (1, "done".into())]);
    assert_eq!((line.started(), pulling.status().flow.stale), (vec![0, 1], 0));
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_prolonged_is_given_up_by_the_end_of_its_lease() {
    let line = Line::default();
    line.put(0, Run::Takes(200_000));
    let pulling = start(&line, 1);
    secs(1).await;
    line.world.lock().broken = Broken { keep: true, take: true, ..Broken::default() };
    secs(28).await;
    assert_eq!(line.world.lock().running, 1, "it is still ours");
    assert!(pulling.status().trouble.is_some_and(|why| why == "the line is cut"));
    millis(1_100).await;
    assert_eq!(line.world.lock().running, 0, "others may have it by now");
    line.world.lock().broken = Broken::default();
    secs(250).await;
    assert_eq!(line.ends(), [(0, "done".into())], "it was taken and run again");
    assert_eq!(pulling.status().trouble, None);
}

#[tokio::test(start_paused = true)]
async fn a_queue_that_does_not_answer_is_no_reason_to_go_on() {
    let line = Line::default();
    line.put(0, Run::Takes(200_000));
    let _pulling = start(&line, 1);
    secs(5).await;
    line.world.lock().keeps_hang = true;
    line.world.lock().broken.take = true;
    line.put(1, Run::Takes(200_000));
    secs(24).await;
    assert_eq!(line.world.lock().running, 1, "it is still ours");
    millis(1_100).await;
    assert_eq!(line.world.lock().running, 0);
}

#[tokio::test(start_paused = true)]
async fn while_ends_cannot_be_noted_no_more_than_so_many_are_run() {
    let line = Line::default();
    (0..20_000).for_each(|name| line.put(name, Run::Takes(1)));
    line.world.lock().broken.settle = true;
    let pulling = start(&line, 64);
    secs(60).await;
    let started = line.started().len();
    assert!((1_024..4_096).contains(&started), "{started}");
    line.world.lock().broken.settle = false;
    secs(120).await;
    assert_eq!((line.ends().len(), pulling.status().flow.done), (20_000, 20_000));
}

#[tokio::test(start_paused = true)]
async fn what_ends_with_the_grace_is_still_settled() {
    let line = Line::default();
    line.put(0, Run::Takes(4_900));
    line.put(1, Run::Takes(60_000));
    let pulling = start(&line, 2);
    millis(1).await;
    line.world.lock().trip = Duration::from_secs(1);
    assert_eq!(pulling.stop(Duration::from_secs(5)).await, 1);
    let mut ends = line.ends();
    ends.sort();
    assert_eq!(ends, [(0, "done".into()), (1, "released".into())]);
}

#[tokio::test(start_paused = true)]
async fn an_end_that_the_queue_could_not_note_is_told_again() {
    let line = Line::default();
    (0..3).for_each(|name| line.put(name, Run::Takes(10)));
    line.world.lock().broken.settle = true;
    let pulling = start(&line, 4);
    secs(60).await;
    assert_eq!((line.ends(), line.started().len()), (vec![], 3), "run once, and kept meanwhile");
    line.world.lock().broken.settle = false;
    secs(10).await;
    assert_eq!(line.ends().len(), 3);
    assert_eq!(pulling.status().flow, Flow { taken: 3, done: 3, ..Flow::default() });
}

#[tokio::test(start_paused = true)]
async fn what_ends_while_a_settle_is_under_way_is_settled_together() {
    let line = Line::default();
    (0..8).for_each(|name| line.put(name, Run::Takes(u64::from(name))));
    let _pulling = start(&line, 8);
    millis(1).await;
    line.world.lock().trip = Duration::from_millis(50);
    secs(1).await;
    let settles = line.world.lock().settles.clone();
    assert_eq!(settles.iter().sum::<usize>(), 8);
    assert!(settles.len() <= 4, "{settles:?}");
}

#[tokio::test(start_paused = true)]
async fn an_error_a_panic_and_a_run_that_hangs_are_failures_of_their_own() {
    let line = Line::default();
    line.put(0, Run::Fails);
    line.put(1, Run::Panics);
    line.put(2, Run::Takes(7_200_000));
    line.put(3, Run::Takes(1));
    let pulling = start(&line, 4);
    secs(3_700).await;
    let mut ends = line.ends();
    ends.sort();
    let expected =
        ["no", "it panicked: out of order", "it took longer than 3600s", "done"].map(str::to_owned);
    assert_eq!(ends.into_iter().map(|(_, end)| end).collect::<Vec<_>>(), expected);
    let flow = Flow { taken: 4, done: 1, failed: 3, parked: 3, stale: 0 };
    assert_eq!(pulling.status().flow, flow);
}

#[tokio::test(start_paused = true)]
async fn a_wake_up_is_heard_at_once_and_a_lost_one_costs_a_poll() {
    let line = Line::default();
    let _pulling = start(&line, 1);
    millis(1_100).await;
    line.put(0, Run::Takes(1));
    millis(5).await;
    assert_eq!(line.started(), [0]);
    line.put_at(1, Run::Takes(1), 1, Duration::ZERO);
    millis(1_000).await;
    assert_eq!(line.started(), [0], "nothing said so");
    secs(5).await;
    assert_eq!(line.started(), [0, 1]);
}

#[tokio::test(start_paused = true)]
async fn what_is_due_later_is_taken_then_and_not_at_the_next_poll() {
    let line = Line::default();
    line.put_at(0, Run::Takes(1), 1, Duration::from_millis(1_234));
    let _pulling = start(&line, 1);
    millis(1_233).await;
    assert_eq!(line.started(), Vec::<u32>::new());
    millis(3).await;
    assert_eq!(line.started(), [0]);
}

#[tokio::test(start_paused = true)]
async fn a_queue_that_is_away_is_asked_again_later_and_later() {
    let line = Line::default();
    line.put(0, Run::Takes(1));
    line.world.lock().broken.take = true;
    let pulling = start(&line, 1);
    secs(60).await;
    let tries = line.world.lock().takes.len();
    assert!((10..40).contains(&tries), "{tries}");
    assert!(pulling.status().trouble.is_some());
    line.world.lock().broken.take = false;
    secs(6).await;
    assert_eq!(line.ends(), [(0, "done".into())]);
}

#[tokio::test(start_paused = true)]
async fn a_paused_puller_finishes_what_runs_and_takes_nothing_until_it_is_resumed() {
    let line = Line::default();
    line.put(0, Run::Takes(1_000));
    let pulling = start(&line, 1);
    millis(100).await;
    pulling.tell(Command::Pause).await;
    line.put(1, Run::Takes(1));
    secs(60).await;
    assert_eq!(line.ends(), [(0, "done".into())]);
    assert!(pulling.status().paused);
    pulling.tell(Command::Resume).await;
    secs(1).await;
    assert_eq!(line.started(), [0, 1]);
    assert!(!pulling.status().paused);
}

#[tokio::test(start_paused = true)]
async fn a_stop_gives_back_what_was_not_begun_and_waits_for_what_runs() {
    let line = Line::default();
    // Taken together: the first two run, the third waits for room.
    line.put_at(0, Run::Takes(5_000), 2, Duration::ZERO);
    line.put_at(1, Run::Takes(90_000), 2, Duration::ZERO);
    let pulling = start(&line, 4);
    secs(1).await;
    line.put(2, Run::Takes(1));
    let stopped = pulling.stop(Duration::from_secs(20));
    assert_eq!(stopped.await, 1, "one did not end within the grace");
    let mut ends = line.ends();
    ends.sort();
    assert_eq!(ends, [(0, "done".into()), (1, "released".into())]);
    assert_eq!(line.started(), [0, 1], "nothing new");
    assert_eq!(line.world.lock().running, 0);
    assert!(line.world.lock().items.values().all(|item| item.held.is_none()), "free for others");
}

#[tokio::test(start_paused = true)]
async fn told_to_stop_it_finishes_what_runs_however_long_that_takes() {
    let line = Line::default();
    line.put(0, Run::Takes(1_000_000));
    let pulling = start(&line, 1);
    secs(1).await;
    pulling.tell(Command::Stop).await;
    line.put(1, Run::Takes(1));
    secs(1_100).await;
    assert_eq!(line.ends(), [(0, "done".into())]);
    assert_eq!(line.started(), [0]);
    assert_eq!(pulling.stop(Duration::ZERO).await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_stop_gives_up_on_a_queue_that_is_away() {
    let line = Line::default();
    line.put(0, Run::Takes(10));
    let pulling = start(&line, 1);
    line.world.lock().broken = Broken { take: false, keep: true, settle: true };
    secs(1).await;
    assert_eq!(pulling.stop(Duration::from_secs(3)).await, 0);
    assert_eq!(line.ends(), [], "it comes back when its lease is over");
}

#[tokio::test(start_paused = true)]
async fn a_dropped_puller_ends_its_runs() {
    let line = Line::default();
    line.put(0, Run::Takes(100_000));
    let pulling = start(&line, 1);
    secs(1).await;
    assert_eq!(line.world.lock().running, 1);
    drop(pulling);
    secs(1).await;
    assert_eq!(line.world.lock().running, 0);
    assert_eq!(line.ends(), []);
}
