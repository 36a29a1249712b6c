use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::*;

use Do::{Cancel, Clear, Finish, Look, Offer};
use See::{Again, Ignored, Nothing, Stands, Starts};

#[derive(Debug, Clone, Copy)]
enum Do {
    /// A key, and in how many milliseconds.
    Offer(&'static str, u64),
    Finish(&'static str),
    Cancel(&'static str),
    Clear,
    /// Takes all that is due.
    Look,
}

#[derive(Debug, PartialEq)]
enum See {
    /// The time offered is now its time; the wish was taken back.
    Stands,
    Ignored,
    Starts(Vec<&'static str>),
    /// It waits once more, until then.
    Again(u64),
    Nothing,
}

/// Lives through lines of: at which millisecond, what happens, what we see.
fn story(lines: &[(u64, Do, See)]) {
    let mut schedule = Keyed::new();
    for (line, (at, what, expected)) in lines.iter().enumerate() {
        let now = Moment::from_millis(*at);
        let stands = |stands| if stands { Stands } else { Ignored };
        let seen = match *what {
            Offer(key, delay) => {
                stands(schedule.offer(key, Moment::from_millis(at.saturating_add(delay))))
            }
            Finish(key) => schedule.finish(key).map_or(Nothing, |again| Again(again.as_millis())),
            Cancel(key) => stands(schedule.cancel(key)),
            Clear => {
                schedule.clear();
                Nothing
            }
            Look => match std::iter::from_fn(|| schedule.take(now)).collect::<Vec<_>>() {
                none if none.is_empty() => Nothing,
                some => Starts(some),
            },
        };
        assert_eq!(seen, *expected, "line {line}: {what:?} at {at}");
    }
}

#[test]
fn a_key_waits_once_and_a_later_time_is_ignored() {
    story(&[
        (0, Offer("room1", 0), Stands),
        (0, Offer("room1", 5_000), Ignored),
        (0, Offer("room2", 3_000), Stands),
        (0, Look, Starts(vec!["room1"])),
        (0, Finish("room1"), Nothing),
        (2_999, Look, Nothing),
        (3_000, Look, Starts(vec!["room2"])),
        (3_000, Finish("room2"), Nothing),
        (9_000, Look, Nothing),
    ]);
}

#[test]
fn an_earlier_time_replaces_a_later_one() {
    story(&[
        (0, Offer("room1", 0), Stands),  // it was put
        (0, Offer("room1", 0), Ignored), // and again
        (0, Look, Starts(vec!["room1"])),
        (7, Finish("room1"), Nothing),
        (7, Offer("room1", 100), Stands), // it failed
        (9, Offer("room1", 0), Stands),   // it was deleted
        (9, Look, Starts(vec!["room1"])),
        (10, Finish("room1"), Nothing),
        (107, Look, Nothing),
    ]);
}

#[test]
fn keys_start_in_the_order_of_their_times_however_long_nobody_looked() {
    story(&[
        (0, Offer("far", 100_000_000), Stands),
        (0, Offer("second", 70_000), Stands),
        (0, Offer("first", 300), Stands),
        (60_000, Offer("third", 10_001), Stands),
        (61_000, Offer("last", 99_939_001), Stands),
        (200_000_000, Offer("now", 0), Stands),
        (200_000_000, Look, Starts(vec!["first", "second", "third", "far", "last", "now"])),
    ]);
}

#[test]
fn keys_of_one_time_start_in_the_order_of_their_offers_from_near_and_far() {
    story(&[
        (0, Offer("a", 70_000), Stands),
        (0, Offer("moved", 80_000), Stands),
        (65_000, Look, Nothing),
        (65_000, Offer("b", 5_000), Stands),
        (69_900, Look, Nothing),
        (69_900, Offer("c", 100), Stands),
        (69_999, Offer("moved", 1), Stands),
        (70_000, Offer("d", 0), Stands),
        (70_000, Offer("a", 0), Ignored),
        (70_000, Look, Starts(vec!["a", "b", "c", "moved", "d"])),
    ]);
}

#[test]
fn offers_while_running_become_one_more_run_at_the_earliest_time() {
    story(&[
        (0, Offer("a", 0), Stands),
        (0, Look, Starts(vec!["a"])),
        (1, Offer("a", 50), Stands),
        (2, Offer("a", 10), Stands),
        (3, Offer("a", 90), Ignored),
        (3, Offer("b", 0), Stands),
        (20, Look, Starts(vec!["b"])), // another key is not held up
        (30, Look, Nothing),
        (31, Finish("a"), Again(30)), // 12 was past when we looked last
        (31, Look, Starts(vec!["a"])),
        (40, Finish("a"), Nothing),
        (999, Look, Nothing),
    ]);
}

#[test]
fn a_cancelled_key_does_not_start_and_what_runs_goes_on() {
    story(&[
        (0, Cancel("a"), Ignored),
        (0, Offer("a", 5), Stands),
        (0, Offer("b", 5), Stands),
        (1, Cancel("a"), Stands),
        (5, Look, Starts(vec!["b"])),
        (6, Cancel("b"), Ignored),
        (6, Offer("b", 0), Stands),
        (7, Cancel("b"), Stands),
        (8, Finish("b"), Nothing),
        (8, Finish("b"), Nothing),
        (9, Offer("a", 0), Stands),
        (9, Finish("a"), Nothing), // it waits, it does not run
        (9, Look, Starts(vec!["a"])),
    ]);
}

#[test]
fn clearing_takes_back_every_wish_and_what_runs_goes_on() {
    story(&[
        (0, Offer("runs", 0), Stands),
        (0, Look, Starts(vec!["runs"])),
        (1, Offer("runs", 0), Stands),
        (1, Offer("near", 9), Stands),
        (1, Offer("far", 900_000), Stands),
        (2, Clear, Nothing),
        (1_000_000, Look, Nothing),
        (1_000_000, Finish("runs"), Nothing),
        (1_000_000, Offer("near", 0), Stands),
        (1_000_000, Look, Starts(vec!["near"])),
    ]);
}

#[test]
fn a_time_that_is_past_brings_a_key_no_further_to_the_front() {
    let mut schedule = Keyed::new();
    let at = Moment::from_millis;
    assert_eq!(schedule.take(at(50)), None);
    assert!(schedule.offer("a", at(50)) && schedule.offer("b", at(20)));
    assert!(!schedule.offer("a", at(10)), "it keeps its place");
    assert_eq!(schedule.wake_at(), Some(at(50)));
    assert_eq!((schedule.take(at(50)), schedule.take(at(50))), (Some("a"), Some("b")));
}

#[test]
fn the_end_of_time_is_a_time_like_any_other() {
    story(&[
        (0, Offer("a", u64::MAX), Stands),
        (0, Offer("b", u64::MAX - 1), Stands),
        (u64::MAX - 2, Look, Nothing),
        (u64::MAX, Look, Starts(vec!["a", "b"])),
        (u64::MAX, Offer("a", 0), Stands),
        (u64::MAX, Finish("a"), Again(u64::MAX - 1)),
        (u64::MAX, Offer("a", 0), Ignored),
        (u64::MAX, Look, Starts(vec!["a"])),
    ]);
}

/// What the schedule promises, in the plainest way.
#[derive(Default)]
struct Model {
    /// As far as taking has got.
    reached: u64,
    /// In the order of their offers.
    waiting: Vec<(u32, u64)>,
    /// With the time at which each runs again.
    running: BTreeMap<u32, Option<u64>>,
}

impl Model {
    fn offer(&mut self, key: u32, at: u64) -> bool {
        let at = at.clamp(self.reached, LAST);
        if let Some(again) = self.running.get_mut(&key) {
            let stands = again.is_none_or(|again| at < again);
            *again = Some(again.map_or(at, |again| again.min(at)));
            return stands;
        }
        if self.due(key).is_some_and(|due| due <= at) {
            return false;
        }
        self.waiting.retain(|(other, _)| *other != key);
        self.waiting.push((key, at));
        true
    }

    fn take(&mut self, now: u64) -> Option<u32> {
        let now = now.min(LAST);
        // Of equals the first.
        let Some((key, due)) = self.waiting.iter().copied().min_by_key(|(_, due)| *due) else {
            self.reached = self.reached.max(now);
            return None;
        };
        if due > now {
            self.reached = self.reached.max(now);
            return None;
        }
        self.reached = due;
        self.waiting.retain(|(other, _)| *other != key);
        self.running.insert(key, None);
        Some(key)
    }

    fn finish(&mut self, key: u32) -> Option<u64> {
        let again = self.running.remove(&key)??.max(self.reached);
        self.waiting.push((key, again));
        Some(again)
    }

    fn cancel(&mut self, key: u32) -> bool {
        let was = self.due(key).is_some();
        self.waiting.retain(|(other, _)| *other != key);
        self.running.entry(key).and_modify(|again| *again = None);
        was
    }

    fn clear(&mut self) {
        self.waiting.clear();
        self.running.values_mut().for_each(|again| *again = None);
    }

    fn due(&self, key: u32) -> Option<u64> {
        let waits = self.waiting.iter().find(|(other, _)| *other == key).map(|(_, due)| *due);
        waits.or_else(|| *self.running.get(&key)?)
    }
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Offer {
        key: u32,
        at: When,
    },
    Take {
        most: usize,
    },
    Finish {
        key: u32,
    },
    FinishAll,
    Cancel {
        key: u32,
    },
    Clear,
    Wait {
        until: When,
    },
    /// Until [`Schedule::wake_at`].
    Sleep,
}

#[derive(Debug, Clone, Copy)]
enum When {
    In(u64),
    Ago(u64),
    /// Around the next time that divides by `256^level`.
    Turn {
        level: u32,
        plus: u64,
    },
    BeforeTheEnd(u64),
}

impl When {
    fn seen_from(self, now: u64) -> u64 {
        match self {
            Self::In(delay) => now.saturating_add(delay),
            Self::Ago(ago) => now.saturating_sub(ago),
            Self::Turn { level, plus } => {
                let turn = 1_u64 << (8 * level);
                (now / turn).saturating_add(1).saturating_mul(turn).saturating_add(plus) - 2
            }
            Self::BeforeTheEnd(before) => u64::MAX - before,
        }
    }
}

/// Few keys and few times: so that they meet.
const KEYS: u32 = 12;

fn step() -> impl Strategy<Value = Step> {
    let near = || (0..6_u64).prop_map(When::In);
    let some = || (0..2_000_u64).prop_map(When::In);
    let turn = || (1..7_u32, 0..5_u64).prop_map(|(level, plus)| When::Turn { level, plus });
    let far = || (0..50_u32, 1..4_u64).prop_map(|(bits, times)| When::In(times << bits));
    let at = prop_oneof![
        8 => near(),
        4 => some(),
        4 => turn(),
        3 => far(),
        3 => (0..3_000_u64).prop_map(When::Ago),
        1 => (0..300_u64).prop_map(When::BeforeTheEnd),
    ];
    let until = prop_oneof![
        80 => near(),
        40 => some(),
        40 => turn(),
        20 => far(),
        1 => (0..300_u64).prop_map(When::BeforeTheEnd),
    ];
    prop_oneof![
        40 => (0..KEYS, at).prop_map(|(key, at)| Step::Offer { key, at }),
        12 => prop_oneof![1..3_usize, Just(usize::MAX)].prop_map(|most| Step::Take { most }),
        12 => (0..KEYS).prop_map(|key| Step::Finish { key }),
        3 => Just(Step::FinishAll),
        5 => (0..KEYS).prop_map(|key| Step::Cancel { key }),
        1 => Just(Step::Clear),
        12 => until.prop_map(|until| Step::Wait { until }),
        10 => Just(Step::Sleep),
    ]
}

/// The model, and what must agree with it after every step.
#[derive(Default)]
struct Life {
    now: u64,
    model: Model,
    schedule: Schedule,
    keyed: Keyed<String>,
}

impl Life {
    fn step(&mut self, step: Step) {
        match step {
            Step::Offer { key, at } => {
                let at = at.seen_from(self.now);
                let stands = self.model.offer(key, at);
                let at = Moment::from_millis(at);
                assert_eq!(self.schedule.offer(Slot(key), at), stands);
                assert_eq!(self.keyed.offer(name(key), at), stands);
            }
            Step::Take { most } => {
                (0..most).find(|_| self.take().is_none());
            }
            Step::Finish { key } => self.finish(key),
            Step::FinishAll => {
                self.model
                    .running
                    .keys()
                    .copied()
                    .collect::<Vec<_>>()
                    .into_iter()
                    .for_each(|key| self.finish(key));
            }
            Step::Cancel { key } => {
                let was = self.model.cancel(key);
                assert_eq!(self.schedule.cancel(Slot(key)), was);
                assert_eq!(self.keyed.cancel(&name(key)), was);
            }
            Step::Clear => {
                self.model.clear();
                self.schedule.clear();
                self.keyed.clear();
            }
            Step::Wait { until } => self.now = self.now.max(until.seen_from(self.now)),
            Step::Sleep => {
                let wake = self.schedule.wake_at().map_or(0, Moment::as_millis);
                self.now = self.now.max(wake);
            }
        }
        self.agrees();
    }

    fn take(&mut self) -> Option<u32> {
        let key = self.model.take(self.now);
        let now = Moment::from_millis(self.now);
        assert_eq!(self.schedule.take(now), key.map(Slot));
        assert_eq!(self.keyed.take(now), key.map(name));
        key
    }

    fn finish(&mut self, key: u32) {
        let again = self.model.finish(key).map(Moment::from_millis);
        assert_eq!(self.schedule.finish(Slot(key)), again);
        assert_eq!(self.keyed.finish(&name(key)), again);
    }

    fn agrees(&self) {
        let Self { model, schedule, keyed, .. } = self;
        for key in 0..KEYS {
            assert_eq!(schedule.due(Slot(key)).map(Moment::as_millis), model.due(key));
            assert_eq!(schedule.is_running(Slot(key)), model.running.contains_key(&key));
        }
        let waiting = model.waiting.len();
        assert_eq!((schedule.len(), schedule.is_empty()), (waiting, waiting == 0));
        assert_eq!((keyed.len(), keyed.is_empty()), (waiting, waiting == 0));
        let known = waiting + model.running.len();
        assert_eq!(keyed.ids.len(), known, "a key is known while it waits or runs");

        let wake = schedule.wake_at().map(Moment::as_millis);
        assert_eq!(keyed.wake_at().map(Moment::as_millis), wake);
        let earliest = model.waiting.iter().map(|(_, due)| *due).min();
        assert_eq!(wake.is_some(), earliest.is_some());
        assert!(wake <= earliest && wake.is_none_or(|wake| wake >= model.reached));
    }

    /// Sleeps and looks until all have run, each in few looks.
    fn sleep_until_all_ran(&mut self) {
        let mut empty_looks = 0;
        while let Some(wake) = self.schedule.wake_at() {
            self.now = self.now.max(wake.as_millis());
            match self.take() {
                Some(key) => {
                    empty_looks = 0;
                    self.finish(key);
                }
                None => empty_looks += 1,
            }
            assert!(empty_looks < LEVELS, "each look finds more");
        }
        assert!(self.model.waiting.is_empty() && self.keyed.is_empty());
    }
}

fn name(key: u32) -> String {
    format!("room{key}")
}

#[test]
fn random_lives_agree_with_a_plain_list() {
    let config = Config { failure_persistence: None, ..Config::default() };
    let lives = TestRunner::new(config).run(&vec(step(), 1..400), |steps| {
        let mut life = Life::default();
        steps.into_iter().for_each(|step| life.step(step));
        life.step(Step::FinishAll);
        life.sleep_until_all_ran();
        Ok(())
    });
    if let Err(why) = lives {
        panic!("{why}");
    }
}

#[test]
fn the_places_of_a_list_that_never_empties_start_again_from_nothing() {
    let mut list = List { first: u32::MAX - 1, ..List::default() };
    let places = [10, 11, 12, 13].map(|slot| list.push(slot));
    let [.., State::Waiting(third), _] = places else { panic!("all wait") };
    assert_eq!(third, 0);
    assert_eq!(list.pop(), Some(10));
    list.remove(third);
    let taken: Vec<_> = std::iter::from_fn(|| list.pop()).collect();
    assert_eq!((taken, list.gaps), (vec![11, 13], 0));
}
