//! Random lives of orders: changes from all sides, stages that fail, panic and dawdle, processors that are
//! dropped at any moment, databases that are closed and opened again. At no moment is an order forgotten; in
//! the end every order is at rest, and nothing that was done to it is missing.
//!
//! `STAGE_SEED` for one seed, `STAGE_SEEDS` for so many: a failure names its own.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fastrand::Rng;
use futures_util::future::join_all;
use parking_lot::Mutex;
use vedetta_stage::{BoxError, Processing, Records as _, SYSTEM, Version, Visit, Which};

use super::{Ask, HOUR, Order, Seed, Step, World, eventually, quick, seeds};

/// The last version of each order that the system stage asked about, and that a stage which wants all of them ran
/// on.
#[derive(Default)]
struct Seen {
    asked: Mutex<HashMap<i64, Version>>,
    ran: Mutex<HashMap<i64, Version>>,
}

fn note(seen: &Mutex<HashMap<i64, Version>>, order: &Order) {
    let mut seen = seen.lock();
    let last = seen.entry(order.id).or_default();
    *last = order.version.max(*last);
}

/// Runs that were ended from outside: their processor was gone.
type Cut = Arc<AtomicUsize>;

/// A run, counted if it is dropped before it is over.
struct Running(Option<Cut>);

impl Running {
    fn ends(mut self) {
        self.0 = None;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(cut) = &self.0 {
            cut.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Saves of this one that came too late.
fn conflicts(working: &Processing) -> u64 {
    working.status().iter().map(|stage| stage.conflicts).sum()
}

/// Of each seed another: what is due at once, soon enough to be handed over, and later.
const SPREADS: [u64; 4] = [0, 2, 10, 100];

/// Nothing waits longer to be tried again: see [`Step::new`].
const LONGEST_WAIT: Duration = Duration::from_millis(20);
/// What is due when it is written is so a moment later for who began to look a moment before.
const MOMENT: Duration = Duration::from_secs(1);

const ORDERS: i64 = 8;
const WRITERS: usize = 3;
const CHANGES: usize = 12;

/// Marks that writers made.
fn changes(order: &Order) -> usize {
    order.marks.iter().filter(|mark| mark.starts_with("change")).count()
}

/// The state an order is in once the system stage has seen its last change, and no sooner.
fn tallied(order: &Order) -> String {
    format!("tallied-{}", order.marks.len())
}

fn signature(order: &Order) -> String {
    format!("signed-{}", changes(order) / 4)
}

/// Fails now and then.
fn unreliable<F>(name: &str, rng: &Arc<Mutex<Rng>>, cut: &Cut, does: F) -> Step
where
    F: Fn(Order) -> Visit<Order> + Clone + Send + Sync + 'static,
{
    let (rng, cut) = (Arc::clone(rng), Arc::clone(cut));
    Step::new(name).parallel(3).does(move |order| {
        let (chance, wait) = {
            let mut rng = rng.lock();
            (rng.u8(..20), Duration::from_millis(rng.u64(..4)))
        };
        let (does, running) = (does.clone(), Running(Some(Arc::clone(&cut))));
        async move {
            tokio::time::sleep(wait).await;
            running.ends();
            match chance {
                0 | 1 => Err(BoxError::from("it failed")),
                2 => panic!("it panicked"),
                _ => Ok(does(order)),
            }
        }
    })
}

fn stages(rng: &Arc<Mutex<Rng>>, seen: &Arc<Seen>, cut: &Cut) -> [Step; 3] {
    let tally = unreliable("tally", rng, cut, |order| {
        let state = tallied(&order);
        Visit::updated(order.is(&state))
    });
    let sign = unreliable("sign", rng, cut, |order| {
        let mark = signature(&order);
        if order.marks.contains(&mark) {
            Visit::untouched()
        } else {
            Visit::updated(order.marked(&mark))
        }
    });
    let ran = Arc::clone(seen);
    let look = unreliable("look", rng, cut, move |order| {
        note(&ran.ran, &order);
        Visit::untouched()
    });
    let seen = Arc::clone(seen);
    [
        tally.wants(|order| order.state != tallied(order)),
        sign.wants(|order| !order.marks.contains(&signature(order))),
        look.wants(move |order| {
            note(&seen.asked, order);
            true
        }),
    ]
}

async fn start<W: World>(
    world: &W,
    spread: Duration,
    rng: &Arc<Mutex<Rng>>,
    seen: &Arc<Seen>,
    cut: &Cut,
) -> Processing {
    let processor = quick(world.sharded(4)).spread(spread).lease(Duration::from_millis(300));
    let stages = stages(rng, seen, cut).into_iter();
    let processor = stages.fold(processor, vedetta_stage::Processor::stage);
    processor.start().await.unwrap()
}

async fn change_at_random<W: World>(world: &W, seed: u64, writer: usize, first: i64) {
    let mut rng = Rng::with_seed(seed * 31 + writer as u64);
    for n in 0..CHANGES {
        let mark = format!("change-{writer}-{n}");
        let id = first + rng.i64(0..ORDERS);
        let changed = world.change(id, move |order| order.marks.push(mark.clone())).await;
        changed.unwrap().expect("the order is there");
        tokio::time::sleep(Duration::from_millis(rng.u64(..6))).await;
    }
}

/// At no moment is there a version of an order that the system stage will not ask about, an order that a stage
/// wants and that nobody will hand to it, nor a record that is not worked on, due, or due soon after a failure.
async fn look_at_random<W: World>(world: &W, seed: u64, first: i64, told: &Seen) {
    let mut rng = Rng::with_seed(seed * 31 + WRITERS as u64);
    for _ in 0..20 {
        for (order, stages) in world.look().await {
            let has = |stage: &str| stages.split(' ').any(|one| one == stage);
            // Those of other seeds have been at rest for long.
            if (first..first + ORDERS).contains(&order.id) {
                let asked = told.asked.lock().get(&order.id).copied().unwrap_or_default();
                assert!(
                    asked >= order.version || has(SYSTEM),
                    "{asked:?} was asked about: {order:?} is only in {stages:?}"
                );
            }
            let wants = [
                ("tally", order.state != tallied(&order)),
                ("sign", !order.marks.contains(&signature(&order))),
            ];
            for (stage, _) in wants.into_iter().filter(|(_, is_wanted)| *is_wanted) {
                assert!(has(SYSTEM) || has(stage), "{stage}: {order:?} is only in {stages:?}");
            }
        }
        let all = world.records().list(super::ORDERS, &Which::default(), 1000).await.unwrap();
        assert!(!all.more);
        for record in all.records {
            let wait = if record.failures > 0 { LONGEST_WAIT } else { Duration::ZERO };
            let waits = record.due_in.unwrap_or_default();
            assert!(
                !record.is_parked && waits <= wait + MOMENT,
                "it waits for nothing: {record:?}"
            );
        }
        tokio::time::sleep(Duration::from_millis(rng.u64(..8))).await;
    }
}

pub async fn whatever_happens_every_order_comes_to_rest_and_no_change_is_lost<W: World>() {
    let mut world = W::new().await;
    let mut neighbour = world.neighbour().await;
    let (seeds, cut, mut late) = (seeds(8), Cut::default(), 0);
    for &seed in &seeds {
        let told = Seed(seed);
        let rng = Arc::new(Mutex::new(Rng::with_seed(seed)));
        let seen = Arc::new(Seen::default());
        let spread = Duration::from_millis(SPREADS[(seed % 4) as usize]);
        let first = i64::try_from(seed % 1_000_000).unwrap() * 100;
        world.create((first..first + ORDERS).map(Order::new).collect()).await.unwrap();
        let mut working = vec![
            start(&world, spread, &rng, &seen, &cut).await,
            start(&neighbour, spread, &rng, &seen, &cut).await,
        ];
        let writers = (0..WRITERS).map(|writer| {
            let who = if writer % 2 == 0 { &world } else { &neighbour };
            change_at_random(who, seed, writer, first)
        });
        let accidents = async {
            for _ in 0..6 {
                let (wait, is_stopped) = {
                    let mut rng = rng.lock();
                    (rng.u64(2..25), rng.bool())
                };
                tokio::time::sleep(Duration::from_millis(wait)).await;
                let one = working.remove(0);
                late += conflicts(&one);
                if is_stopped {
                    one.stop(Duration::ZERO).await;
                } else {
                    drop(one);
                }
                working.push(start(&world, spread, &rng, &seen, &cut).await);
            }
        };
        tokio::join!(join_all(writers), accidents, look_at_random(&neighbour, seed, first, &seen));
        // Everybody goes, and others come.
        late += working.drain(..).map(|one| conflicts(&one)).sum::<u64>();
        drop(neighbour);
        world = world.reopened().await;
        neighbour = world.neighbour().await;
        working.push(start(&world, spread, &rng, &seen, &cut).await);
        working.push(start(&neighbour, spread, &rng, &seen, &cut).await);

        eventually("everything is at rest", async || {
            let counts = world.records().counts().await.unwrap();
            assert!(counts.iter().all(|lane| lane.parked == 0), "{counts:?}");
            counts.iter().all(|lane| lane.records == 0)
        })
        .await;
        let mut found = 0;
        for id in first..first + ORDERS {
            let order = world.get(id).await;
            assert_eq!(order.state, tallied(&order), "its last change was seen: {order:?}");
            assert!(order.marks.contains(&signature(&order)), "{order:?}");
            assert_eq!(seen.asked.lock()[&id], order.version, "the system stage saw every update");
            assert_eq!(seen.ran.lock()[&id], order.version, "who wants every version got it");
            let once: HashSet<_> = order.marks.iter().collect();
            assert_eq!(once.len(), order.marks.len(), "nothing was done twice: {order:?}");
            found += changes(&order);
        }
        assert_eq!(found, WRITERS * CHANGES, "no change is lost");
        for one in working {
            late += conflicts(&one);
            assert_eq!(one.stop(HOUR).await, 0);
        }
        drop(told);
    }
    // One seed alone may be spared.
    if seeds.len() > 1 {
        let cut = cut.load(Ordering::Relaxed);
        assert!(
            late > 0 && cut > 0,
            "what is this a test of? {late} conflicts, {cut} runs cut off"
        );
    }
}
