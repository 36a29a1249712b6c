//! The runner, in paused time.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};
use vedetta_core::{Failure, Moment, Slot};
use vedetta_runtime::{Limits, Outcome, Runner};

const A: Slot = Slot(0);
const B: Slot = Slot(1);
const C: Slot = Slot(2);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn at(millis: u64) -> Moment {
    Moment::from_millis(millis)
}

/// What a run does.
#[derive(Debug, Clone, Copy)]
enum Does {
    /// Ends well after so many milliseconds.
    Take(u64),
    Panic,
    Hang,
}

/// A runner whose keys each do the same every time.
struct Bench {
    runner: Runner<u64>,
    does: HashMap<Slot, Does>,
    costs: HashMap<Slot, u32>,
    started: Vec<(Slot, u64)>,
}

impl Bench {
    fn new(capacity: u32, does: &[(Slot, Does)]) -> Self {
        Self::limited(capacity, None, does)
    }

    fn limited(capacity: u32, timeout: Option<Duration>, does: &[(Slot, Does)]) -> Self {
        let limits = Limits { capacity: NonZeroU32::new(capacity).unwrap(), timeout };
        let does = does.iter().copied().collect();
        Self { runner: Runner::new(limits), does, costs: HashMap::new(), started: Vec::new() }
    }

    fn start(&mut self) {
        let Self { runner, does, costs, started } = self;
        let now = runner.now().as_millis();
        let work = |slot: Slot| {
            started.push((slot, now));
            let does = does[&slot];
            Some(async move {
                match does {
                    Does::Take(millis) => {
                        tokio::time::sleep(ms(millis)).await;
                        Ok(millis)
                    }
                    Does::Panic => panic!("out of {}", "order"),
                    Does::Hang => std::future::pending().await,
                }
            })
        };
        runner.start_due(work, |slot| costs.get(&slot).copied().unwrap_or(1));
    }

    /// Goes on until nothing happens for a minute: who ended, when and how.
    async fn play(&mut self) -> Vec<(Slot, u64, String)> {
        let mut ended = Vec::new();
        loop {
            self.start();
            match timeout(ms(60_000), self.runner.next()).await {
                Err(_) => return ended,
                Ok(None) => {}
                Ok(Some(run)) => {
                    let outcome = match run.outcome {
                        Outcome::Done(millis) => format!("done {millis}"),
                        Outcome::Failed(why) => why.to_string(),
                        Outcome::Cancelled => "cancelled".to_owned(),
                    };
                    ended.push((run.slot, self.runner.now().as_millis(), outcome));
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn keys_run_in_the_order_of_their_times_and_the_rest_waits_for_room() {
    let mut bench = Bench::new(2, &[(A, Does::Take(10)), (B, Does::Take(10)), (C, Does::Take(10))]);
    bench.runner.offer(C, at(0));
    bench.runner.offer(A, at(5));
    bench.runner.offer(B, at(5));
    bench.play().await;
    assert_eq!(bench.started, [(C, 0), (A, 5), (B, 10)]);
}

#[tokio::test(start_paused = true)]
async fn offers_while_running_become_one_more_run() {
    let mut bench = Bench::new(4, &[(A, Does::Take(10)), (B, Does::Take(1))]);
    bench.runner.offer(A, at(0));
    bench.start();
    for _ in 0..3 {
        bench.runner.offer(A, at(0));
    }
    bench.runner.offer(B, at(0)); // another key is not held up
    bench.play().await;
    assert_eq!(bench.started, [(A, 0), (B, 0), (A, 10)]);
}

#[tokio::test(start_paused = true)]
async fn offers_while_waiting_for_room_are_the_run_it_waits_for() {
    let mut bench = Bench::new(1, &[(A, Does::Take(10)), (B, Does::Take(10))]);
    bench.runner.offer(A, at(0));
    bench.runner.offer(B, at(0));
    bench.start();
    bench.runner.offer(B, at(0));
    bench.runner.offer(B, at(3));
    bench.play().await;
    assert_eq!(bench.started, [(A, 0), (B, 10)]);
}

#[tokio::test(start_paused = true)]
async fn a_panic_and_a_run_that_hangs_are_failures_of_their_own_and_give_their_room_back() {
    let does = [(A, Does::Panic), (B, Does::Hang), (C, Does::Take(7))];
    let mut bench = Bench::limited(1, Some(ms(50)), &does);
    for slot in [A, B, C] {
        bench.runner.offer(slot, at(0));
    }
    let ended = bench.play().await;
    let story = [
        (A, 0, "it panicked: out of order".to_owned()),
        (B, 50, Failure::Timeout(ms(50)).to_string()),
        (C, 57, "done 7".to_owned()),
    ];
    assert_eq!(ended, story);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_run_holds_its_slot_until_it_has_really_ended() {
    /// Says when it is dropped.
    struct Slow(Option<oneshot::Sender<()>>, Arc<Mutex<Vec<&'static str>>>);
    impl Drop for Slow {
        fn drop(&mut self) {
            self.1.lock().push("ended");
            let _ = self.0.take().unwrap().send(());
        }
    }
    let log = Arc::new(Mutex::new(Vec::new()));
    let limits = Limits { capacity: NonZeroU32::MIN, timeout: None };
    let mut runner = Runner::<()>::new(limits);
    runner.offer(A, at(0));
    runner.offer(B, at(0));
    let (told, mut heard) = oneshot::channel();
    let mut told = Some(told);
    let mut start = |runner: &mut Runner<()>| {
        let log = Arc::clone(&log);
        let work = |slot| {
            log.lock().push(if slot == A { "a" } else { "b" });
            let slow = told.take().map(|told| Slow(Some(told), Arc::clone(&log)));
            Some(async move {
                if slow.is_some() {
                    std::future::pending::<()>().await;
                }
                drop(slow);
                Ok(())
            })
        };
        runner.start_due(work, |_| 1);
    };
    start(&mut runner);
    tokio::task::yield_now().await;
    runner.cancel(A);
    start(&mut runner);
    assert_eq!(*log.lock(), ["a"], "the slot is not free yet");
    let run = runner.next().await.unwrap();
    assert!(run.slot == A && matches!(run.outcome, Outcome::Cancelled));
    heard.try_recv().unwrap();
    start(&mut runner);
    assert_eq!(*log.lock(), ["a", "ended", "b"]);
}

#[tokio::test(start_paused = true)]
async fn a_key_cancelled_before_it_ran_leaves_no_trace() {
    let mut bench = Bench::new(1, &[(A, Does::Take(5)), (B, Does::Take(5)), (C, Does::Take(5))]);
    for slot in [A, B] {
        bench.runner.offer(slot, at(0));
    }
    bench.runner.offer(C, at(9));
    bench.start(); // A runs, B waits for room, C for its time
    bench.runner.cancel(B);
    bench.runner.cancel(C);
    bench.play().await;
    assert_eq!(bench.started, [(A, 0)]);
    assert_eq!((bench.runner.running(), bench.runner.waiting()), (0, 0));
    bench.runner.offer(B, bench.runner.now());
    bench.play().await;
    assert_eq!(bench.started.len(), 2, "it may come again");
}

#[tokio::test(start_paused = true)]
async fn heavy_and_light_runs_share_the_slots() {
    let mut bench =
        Bench::new(14, &[(A, Does::Take(10)), (B, Does::Take(10)), (C, Does::Take(10))]);
    bench.costs = HashMap::from([(A, 64), (B, 4), (C, 10)]);
    for slot in [A, B, C] {
        bench.runner.offer(slot, at(0));
    }
    bench.play().await;
    assert_eq!(bench.started, [(A, 0), (B, 10), (C, 10)]);
}

#[tokio::test(start_paused = true)]
async fn a_run_that_goes_on_says_so() {
    let beats = Arc::new(Mutex::new(0));
    let also = Arc::clone(&beats);
    let mut bench = Bench::new(2, &[(A, Does::Take(35)), (B, Does::Take(5))]);
    bench.runner = bench.runner.heartbeat(ms(10), move |slot| {
        assert_eq!(slot, A);
        *also.lock() += 1;
    });
    bench.runner.offer(A, at(0));
    bench.runner.offer(B, at(0));
    bench.play().await;
    assert_eq!(*beats.lock(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_paused_runner_starts_nothing_and_an_abort_ends_the_rest() {
    let does = [(A, Does::Take(10)), (B, Does::Hang), (C, Does::Take(10))];
    let mut bench = Bench::new(2, &does);
    for slot in [A, B, C] {
        bench.runner.offer(slot, at(0));
    }
    bench.start();
    bench.runner.pause(true);
    let ended = timeout(ms(100), bench.play()).await;
    assert!(ended.is_err(), "one hangs");
    assert_eq!((bench.runner.running(), bench.runner.now()), (1, at(100)));
    bench.runner.abort();
    let ended = bench.play().await;
    assert_eq!(ended, [(B, 100, "cancelled".to_owned())]);
    assert_eq!(bench.started, [(A, 0), (B, 0)], "nothing new starts");
}

/// Of a million keys that are due only as many are looked at as there is room for.
#[tokio::test(start_paused = true)]
async fn a_million_waiting_keys_are_run_in_order() {
    let limits = Limits { capacity: NonZeroU32::new(100).unwrap(), timeout: None };
    let mut runner = Runner::<()>::new(limits);
    for slot in 0..1_000_000 {
        runner.offer(Slot(slot), at(0));
    }
    let mut started = 0;
    while runner.waiting() + runner.running() > 0 {
        let work = |slot: Slot| {
            assert_eq!(slot.0, started);
            started += 1;
            Some(async { Ok(()) })
        };
        runner.start_due(work, |_| 1);
        assert!(runner.running() <= 100);
        runner.next().await;
        while runner.try_next(Instant::now()).is_some() {}
    }
    assert_eq!(started, 1_000_000);
}
