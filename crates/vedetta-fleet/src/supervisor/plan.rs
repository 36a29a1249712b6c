//! Decides how many workers there should be, of which queues, and what is to be done about it.
//!
//! Pure: what is there and what time it is are arguments.

use std::collections::BTreeMap;
use std::time::Duration;

use vedetta_core::Moment;

/// How workers are spread over queues.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Balance {
    /// Every worker takes all queues.
    #[default]
    Simple,
    /// Each takes one, more of them where more waits; with more queues than workers may be, all take all.
    Auto,
}

impl Balance {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Simple => "simple",
            Self::Auto => "auto",
        }
    }
}

/// A queue whose first job has waited for so long needs one worker more than it has.
const SLOW: Duration = Duration::from_secs(5);

/// Queues, in order, that workers take together; and how many such workers.
pub(crate) type Posts = BTreeMap<Vec<String>, u32>;

/// What is in a queue.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) ready: u64,
    pub(crate) running: u64,
    pub(crate) oldest: Duration,
}

/// Within which it decides.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    pub(crate) min: u32,
    pub(crate) max: u32,
    /// After a change there is no other for so long.
    pub(crate) cool_down: Duration,
}

/// How many workers there should be where work is shared by load.
#[derive(Debug, Default)]
pub(crate) struct Scale {
    posts: Posts,
    changed: Option<Moment>,
}

impl Scale {
    /// What there is already.
    pub(crate) fn adopt(&mut self, posts: Posts) {
        self.posts = posts;
    }

    /// As it was last decided.
    pub(crate) fn posts(&self) -> &Posts {
        &self.posts
    }

    /// Somebody had a worker of these queues end: there is one less, if that leaves the least and one for each
    /// queue. After the cool-down the load decides again.
    pub(crate) fn lower(&mut self, queues: &[String], min: u32, now: Moment) {
        let have: u32 = self.posts.values().sum();
        let Some(count) = self.posts.get_mut(queues) else { return };
        if have > min && (*count > 1 || have == 1) {
            *count -= 1;
            self.posts.retain(|_, count| *count > 0);
            self.changed = Some(now);
        }
    }

    /// What there should be. A worker does so many jobs at once.
    pub(crate) fn decide(
        &mut self,
        bounds: Bounds,
        queues: &[String],
        loads: &BTreeMap<String, Load>,
        slots: u32,
        now: Moment,
    ) -> &Posts {
        let have: u32 = self.posts.values().sum();
        let is_cool = self.changed.is_none_or(|at| now >= at + bounds.cool_down);
        let is_allowed = (bounds.min..=bounds.max).contains(&have)
            && self.posts.keys().flatten().all(|queue| queues.contains(queue));
        if is_cool || !is_allowed {
            let needs: Vec<u32> =
                queues.iter().map(|queue| self.need(queue, loads, slots)).collect();
            // Each queue has one, as soon as there is anything to do.
            let needed = match needs.iter().max() {
                None | Some(0) => 0,
                Some(_) => needs.iter().fold(0_u32, |sum, need| sum.saturating_add(1.max(*need))),
            };
            // Up at once, down one by one.
            let total = if needed < have { have - 1 } else { needed };
            let mut total = total.clamp(bounds.min, bounds.max);
            // Each queue keeps one, or nobody is left: between workers of one queue and workers of all, each
            // would have to be replaced.
            let each = u32::try_from(queues.len()).unwrap_or(u32::MAX);
            if total < each && each <= bounds.max {
                total = if needed == 0 && bounds.min == 0 { 0 } else { each };
            }
            let posts = spread(total, queues, &needs);
            if posts != self.posts {
                self.posts = posts;
                self.changed = Some(now);
            }
        }
        &self.posts
    }

    /// Workers that a queue has use for.
    fn need(&self, queue: &String, loads: &BTreeMap<String, Load>, slots: u32) -> u32 {
        let Some(load) = loads.get(queue) else { return 0 };
        let jobs = load.ready.saturating_add(load.running);
        let workers = jobs.div_ceil(u64::from(slots.max(1)));
        let need = u32::try_from(workers).unwrap_or(u32::MAX);
        if load.ready > 0 && load.oldest >= SLOW {
            let have = self.posts.iter().filter(|(queues, _)| queues.contains(queue));
            return need.max(have.map(|(_, count)| *count).sum::<u32>().saturating_add(1));
        }
        need
    }
}

/// So many workers over queues: each queue has one, and the rest goes where the need is largest for those that
/// are there.
fn spread(total: u32, queues: &[String], needs: &[u32]) -> Posts {
    let count = u32::try_from(queues.len()).unwrap_or(u32::MAX);
    if total == 0 || count == 0 {
        return Posts::new();
    }
    if total < count || count == 1 {
        let mut all = queues.to_vec();
        all.sort();
        return Posts::from([(all, total)]);
    }
    let mut given = vec![1_u32; queues.len()];
    for _ in count..total {
        // By need for each worker; among equals, the one with the fewest, then the first.
        let key = |at: &usize| {
            let need = f64::from(needs[*at]) / f64::from(given[*at]);
            (need, std::cmp::Reverse(given[*at]), std::cmp::Reverse(*at))
        };
        let most = (0..queues.len())
            .max_by(|a, b| key(a).partial_cmp(&key(b)).unwrap_or(std::cmp::Ordering::Equal));
        given[most.unwrap_or(0)] += 1;
    }
    queues.iter().map(|queue| vec![queue.clone()]).zip(given).collect()
}

/// A worker, as far as it matters here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hand {
    pub(crate) id: String,
    pub(crate) queues: Vec<String>,
    pub(crate) stage: Stage,
    /// It is to be replaced.
    pub(crate) is_old: bool,
    /// It has jobs to finish.
    pub(crate) is_busy: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Started, and not heard of.
    Starting,
    Ready,
    Stopping,
    /// Not heard of any more.
    Silent,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    Start(Vec<String>),
    Stop(String),
    Kill(String),
}

/// From what is there to what should be. At most so many are started now, and none while there are `max`: one that
/// stops is there until it has ended. Only a worker that replaces another in a restart is one more. While some are
/// missing, those that are too many make room for them one at a time.
pub(crate) fn steps(posts: &Posts, hands: &[Hand], max: u32, mut starts: u32) -> Vec<Step> {
    let mut steps = Vec::new();
    let silent = hands.iter().filter(|hand| hand.stage == Stage::Silent);
    steps.extend(silent.map(|hand| Step::Kill(hand.id.clone())));
    let counts = |hand: &&Hand| matches!(hand.stage, Stage::Starting | Stage::Ready);
    let mut sets: BTreeMap<&Vec<String>, Vec<&Hand>> =
        posts.keys().map(|queues| (queues, Vec::new())).collect();
    for hand in hands.iter().filter(counts) {
        sets.entry(&hand.queues).or_default().push(hand);
    }
    let want = |queues| posts.get(queues).copied().unwrap_or(0) as usize;
    let is_replaced = |hand: &Hand| hand.stage == Stage::Stopping && hand.is_old;
    let there = hands.iter().filter(|hand| hand.stage != Stage::Silent).count();
    let most = max as usize + usize::from(hands.iter().any(is_replaced));
    let mut room = most.saturating_sub(there);
    let mut is_short = false;
    for (queues, have) in &sets {
        for _ in have.len()..want(*queues) {
            if starts > 0 && room > 0 {
                (starts, room) = (starts - 1, room - 1);
                steps.push(Step::Start((*queues).clone()));
            } else {
                is_short = true;
            }
        }
    }
    // One at a time is replaced, of all. Where others are missing nobody goes before its room is needed.
    let is_leaving = |hand: &&Hand| hand.stage == Stage::Stopping;
    let leaves = is_short && hands.iter().any(|hand| is_leaving(&hand));
    let begins = |step: &Step| matches!(step, Step::Start(_));
    let mut is_busy = hands.iter().any(|hand| hand.stage == Stage::Starting || is_replaced(hand))
        || is_short && (room > 0 || steps.iter().any(begins));
    // Those that do not work yet first, then the idle, then the old.
    let rank = |hand: &&Hand| (hand.stage != Stage::Starting, hand.is_busy, !hand.is_old);
    let mut surplus: Vec<&Hand> = Vec::new();
    for (queues, mut have) in sets {
        let want = want(queues);
        have.sort_by_key(rank);
        let old = have.iter().find(|hand| hand.is_old).map(|hand| hand.id.clone());
        match old {
            Some(_) if (is_busy || leaves) && have.len() <= want + 1 => {}
            Some(_) if have.len() == want && want > 0 && starts > 0 && there <= most => {
                (starts, is_busy) = (starts - 1, true);
                steps.push(Step::Start(queues.clone()));
            }
            Some(id) if have.len() == want + 1 => {
                is_busy = true;
                steps.push(Step::Stop(id));
            }
            _ => surplus.extend(have.iter().take(have.len().saturating_sub(want))),
        }
    }
    if is_short {
        surplus.sort_by_key(rank);
        let begun = surplus.partition_point(|hand| hand.stage == Stage::Starting);
        // Who is idle does not wait for one that leaves when its jobs are done: that may take long.
        let mut leaving = hands.iter().filter(is_leaving);
        let next = surplus.get(begun).filter(|_| !is_busy);
        let goes = next.is_some_and(|hand| leaving.all(|it| it.is_busy && !hand.is_busy));
        surplus.truncate(begun + usize::from(goes));
    }
    steps.extend(surplus.into_iter().map(|hand| Step::Stop(hand.id.clone())));
    steps
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const COOL: Duration = Duration::from_secs(10);
    /// More than matters.
    const MAX: u32 = 99;

    fn queues(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn loads(loads: &[(&str, u64, u64)]) -> BTreeMap<String, Load> {
        let load = |(name, ready, oldest): &(&str, u64, u64)| {
            let oldest = Duration::from_secs(*oldest);
            ((*name).to_owned(), Load { ready: *ready, running: 0, oldest })
        };
        loads.iter().map(load).collect()
    }

    fn posts(posts: &[(&[&str], u32)]) -> Posts {
        posts.iter().map(|(names, count)| (queues(names), *count)).collect()
    }

    #[test]
    fn workers_follow_the_work() {
        let bounds = Bounds { min: 2, max: 8, cool_down: COOL };
        let names = queues(&["mail", "media"]);
        let mut scale = Scale::default();
        // At which second, what is in mail and in media, and how many workers each of them has then.
        for (at, mail, media, (of_mail, of_media), why) in [
            (0, (0, 0), (0, 0), (1, 1), "the least, one each"),
            (1, (0, 0), (9, 0), (1, 1), "a change was just made"),
            (10, (0, 0), (9, 0), (1, 5), "nine jobs, two for each worker"),
            (15, (99, 0), (0, 0), (1, 5), "a change was just made"),
            (20, (99, 0), (0, 0), (7, 1), "as many as may be, and each queue has one"),
            (30, (0, 0), (0, 0), (4, 3), "one less, and no need anywhere"),
            (40, (0, 0), (0, 0), (3, 3), "one less"),
            (50, (0, 0), (0, 0), (3, 2), "one less"),
            (60, (2, 0), (0, 0), (3, 1), "one less, where the need is smaller"),
            (70, (1, 6), (0, 0), (4, 1), "few, but they wait for too long"),
        ] {
            let loads = loads(&[("mail", mail.0, mail.1), ("media", media.0, media.1)]);
            let now = Moment::from_millis(at * 1000);
            let decided = scale.decide(bounds, &names, &loads, 2, now);
            let expected = posts(&[(&["mail"], of_mail), (&["media"], of_media)]);
            assert_eq!(*decided, expected, "at {at} s: {why}");
        }
    }

    #[test]
    fn work_that_comes_now_and_then_replaces_nobody() {
        let bounds = Bounds { min: 2, max: 4, cool_down: COOL };
        let names = queues(&["default", "media", "ticks"]);
        let mut scale = Scale::default();
        let expected = posts(&[(&["default"], 1), (&["media"], 1), (&["ticks"], 1)]);
        for at in 0..300 {
            let loads = loads(&[("ticks", u64::from(at % 5 == 0), 0)]);
            let decided = scale.decide(bounds, &names, &loads, 2, Moment::from_millis(at * 1000));
            assert_eq!(*decided, expected, "at {at} s");
        }
        // Who may have none at all has none when nothing is to do.
        let none = Bounds { min: 0, ..bounds };
        let later = Moment::from_millis(400_000);
        assert_eq!(*scale.decide(none, &names, &loads(&[]), 2, later), Posts::new());
    }

    #[test]
    fn who_was_stopped_by_hand_is_missed_only_if_too_few_are_left() {
        let mail_and_media = |mail, media| posts(&[(&["mail"], mail), (&["media"], media)]);
        let all: &[&str] = &["mail", "media"];
        for (before, stopped, min, after, why) in [
            (mail_and_media(2, 3), &["media"][..], 2, mail_and_media(2, 2), "enough are left"),
            (mail_and_media(1, 3), &["mail"], 2, mail_and_media(1, 3), "the only one of its queue"),
            (mail_and_media(2, 3), &["media"], 5, mail_and_media(2, 3), "the least"),
            (mail_and_media(2, 3), &["gone"], 2, mail_and_media(2, 3), "there should be none"),
            (posts(&[(all, 3)]), all, 1, posts(&[(all, 2)]), "of those that take all"),
            (posts(&[(&["mail"], 1)]), &["mail"], 0, Posts::new(), "there may be none"),
            (posts(&[(&["mail"], 1)]), &["mail"], 1, posts(&[(&["mail"], 1)]), "the least"),
        ] {
            let mut scale = Scale::default();
            scale.adopt(before);
            scale.lower(&queues(stopped), min, Moment::ZERO);
            assert_eq!(*scale.posts(), after, "{stopped:?}: {why}");
        }
        // Until the cool-down is over, whatever waits; then the load decides.
        let bounds = Bounds { min: 1, max: 4, cool_down: COOL };
        let (names, waits) = (queues(&["mail"]), loads(&[("mail", 9, 0)]));
        let mut scale = Scale::default();
        scale.adopt(posts(&[(&["mail"], 3)]));
        scale.lower(&names, 1, Moment::ZERO);
        for (at, count) in [(0, 2), (9, 2), (10, 4)] {
            let now = Moment::from_millis(at * 1000);
            let decided = scale.decide(bounds, &names, &waits, 1, now);
            assert_eq!(*decided, posts(&[(&["mail"], count)]), "at {at} s");
        }
    }

    #[test]
    fn with_fewer_workers_than_queues_all_take_all() {
        let bounds = Bounds { min: 1, max: 2, cool_down: COOL };
        let names = queues(&["c", "a", "b"]);
        let decided = Scale::default()
            .decide(bounds, &names, &loads(&[("a", 9, 0)]), 1, Moment::ZERO)
            .clone();
        assert_eq!(decided, posts(&[(&["a", "b", "c"], 2)]));
    }

    fn hand(id: &str, queue: &str, stage: Stage, is_old: bool) -> Hand {
        Hand { id: id.into(), queues: queues(&[queue]), stage, is_old, is_busy: false }
    }

    #[test]
    fn what_is_missing_is_started_what_is_too_much_is_stopped_and_the_silent_are_killed() {
        use Stage::{Ready, Silent, Starting, Stopping};
        let two = posts(&[(&["a"], 2)]);
        let start = || Step::Start(queues(&["a"]));
        let hands = |stages: &[(&str, Stage)]| -> Vec<Hand> {
            stages.iter().map(|(id, stage)| hand(id, "a", *stage, false)).collect()
        };
        assert_eq!(steps(&two, &[], MAX, 9), [start(), start()]);
        assert_eq!(steps(&two, &[], MAX, 1), [start()], "no more than allowed");
        assert_eq!(steps(&two, &hands(&[("1", Ready), ("2", Starting)]), MAX, 9), []);
        let silent = hands(&[("1", Ready), ("2", Silent)]);
        assert_eq!(steps(&two, &silent, MAX, 9), [Step::Kill("2".into()), start()]);
        let stopping = hands(&[("1", Ready), ("2", Stopping)]);
        assert_eq!(steps(&two, &stopping, MAX, 9), [start()]);
        let many = hands(&[("1", Ready), ("2", Ready), ("3", Starting)]);
        assert_eq!(steps(&two, &many, MAX, 9), [Step::Stop("3".into())]);
        let moved = [hand("1", "b", Ready, false), hand("2", "a", Ready, false)];
        assert_eq!(steps(&two, &moved, MAX, 9), [start(), Step::Stop("1".into())]);
        // The idle first, wherever they stand.
        let mut many = hands(&[("1", Ready), ("2", Ready), ("3", Ready), ("4", Ready)]);
        (many[0].is_busy, many[2].is_busy) = (true, true);
        assert_eq!(steps(&two, &many, MAX, 9), [Step::Stop("2".into()), Step::Stop("4".into())]);
    }

    #[test]
    fn those_that_stop_count_until_they_have_ended() {
        use Stage::{Ready, Starting, Stopping};
        let five = posts(&[(&["a"], 5)]);
        let starts = |hands: &[Hand], max| {
            let steps = steps(&five, hands, max, 9);
            assert!(steps.iter().all(|step| matches!(step, Step::Start(_))), "{steps:?}");
            steps.len()
        };
        // Two were left of five, and now five are needed again.
        let mut hands: Vec<Hand> = [Ready, Ready, Stopping, Stopping, Stopping]
            .iter()
            .enumerate()
            .map(|(id, stage)| hand(&id.to_string(), "a", *stage, false))
            .collect();
        assert_eq!((starts(&hands, 5), starts(&hands, 7), starts(&hands, 9)), (0, 2, 3));
        hands.pop();
        assert_eq!(starts(&hands, 5), 1, "one has ended");
        // In a restart there is one more.
        let old = |id: &str, stage| hand(id, "a", stage, true);
        let mut hands: Vec<Hand> = ["1", "2", "3", "4", "5"].map(|id| old(id, Ready)).into();
        assert_eq!(starts(&hands, 5), 1);
        hands.push(hand("6", "a", Starting, false));
        assert_eq!(starts(&hands, 5), 0);
        (hands[0].stage, hands[5].stage) = (Stopping, Ready);
        assert_eq!(starts(&hands, 5), 0);
        hands.remove(1);
        assert_eq!(starts(&hands, 5), 1, "one has died while another is replaced");
    }

    #[test]
    fn workers_of_other_queues_take_the_place_of_those_that_work_one_by_one() {
        use Stage::{Ready, Starting, Stopping};
        let three = posts(&[(&["b"], 3)]);
        let start = || Step::Start(queues(&["b"]));
        let stop = |id: &str| Step::Stop(id.into());
        let mut hands: Vec<Hand> = ["1", "2", "3"].map(|id| hand(id, "a", Ready, false)).into();
        hands[0].is_busy = true;
        assert_eq!(steps(&three, &hands, 3, 9), [stop("2")], "an idle one makes room");
        hands[1].stage = Stopping;
        assert_eq!(steps(&three, &hands, 3, 9), [], "it is still there");
        hands.remove(1);
        assert_eq!(
            steps(&three, &hands, 3, 0),
            [],
            "none may be started now, so the rest works on"
        );
        assert_eq!(steps(&three, &hands, 3, 9), [start()]);
        hands.push(hand("4", "b", Starting, false));
        assert_eq!(steps(&three, &hands, 3, 9), [], "it is not there yet");
        hands[2].stage = Ready;
        assert_eq!(steps(&three, &hands, 3, 9), [stop("3")]);
        hands.remove(1);
        hands.push(hand("5", "b", Ready, false));
        assert_eq!(steps(&three, &hands, 3, 9), [stop("1")], "the last one, which is busy");
        // With room for all the others they are started, and nobody waits for them or for a place.
        let hands: Vec<Hand> = ["1", "2"].map(|id| hand(id, "a", Ready, false)).into();
        let two = posts(&[(&["b"], 2)]);
        assert_eq!(steps(&two, &hands, 4, 9), [start(), start(), stop("1"), stop("2")]);
        // One that leaves with a long job keeps no idle one, but the busy ones.
        let mut hands: Vec<Hand> = ["1", "2", "3"].map(|id| hand(id, "a", Ready, false)).into();
        (hands[0].stage, hands[0].is_busy) = (Stopping, true);
        let moved = posts(&[(&["a"], 1), (&["b"], 2)]);
        assert_eq!(steps(&moved, &hands, 3, 9), [stop("2")]);
        (hands[1].is_busy, hands[2].is_busy) = (true, true);
        assert_eq!(steps(&moved, &hands, 3, 9), []);
        (hands[1].stage, hands[1].is_busy) = (Stopping, false);
        assert_eq!(steps(&three, &hands, 3, 9), [], "its place is there soon");
    }

    #[test]
    fn old_workers_are_replaced_one_at_a_time_and_never_fewer_work() {
        use Stage::{Ready, Starting, Stopping};
        let two = posts(&[(&["a"], 2)]);
        let start = Step::Start(queues(&["a"]));
        let mut hands = vec![hand("1", "a", Ready, true), hand("2", "a", Ready, true)];
        assert_eq!(steps(&two, &hands, MAX, 9), std::slice::from_ref(&start));
        hands.push(hand("3", "a", Starting, false));
        assert_eq!(steps(&two, &hands, MAX, 9), [], "it is not there yet");
        hands[2].stage = Ready;
        assert_eq!(steps(&two, &hands, MAX, 9), [Step::Stop("1".into())]);
        hands[0].stage = Stopping;
        assert_eq!(steps(&two, &hands, MAX, 9), [], "it still works");
        hands.remove(0);
        assert_eq!(steps(&two, &hands, MAX, 9), [start]);
        hands.push(hand("4", "a", Ready, false));
        assert_eq!(steps(&two, &hands, MAX, 9), [Step::Stop("2".into())]);
        hands.remove(0);
        assert_eq!(steps(&two, &hands, MAX, 9), []);
    }

    proptest! {
        #[test]
        fn never_below_min_above_max_nor_twice_within_the_cool_down(
            bounds in (0_u32..6, 1_u32..9),
            count in 1_usize..5,
            slots in 1_u32..5,
            times in prop::collection::vec((0_u64..30, prop::collection::vec((0_u64..200, 0_u64..20), 4)), 1..60),
        ) {
            let max = bounds.0.max(bounds.1);
            let bounds = Bounds { min: bounds.0, max, cool_down: COOL };
            let names = queues(&["a", "b", "c", "d"][..count]);
            let (mut scale, mut now, mut last) = (Scale::default(), 0, None::<(Moment, Posts)>);
            for (step, load) in times {
                now += step;
                let load: Vec<_> = names.iter().zip(&load).map(|(name, (ready, oldest))| (name.as_str(), *ready, *oldest)).collect();
                let moment = Moment::from_millis(now * 1000);
                let posts = scale.decide(bounds, &names, &loads(&load), slots, moment).clone();
                let total: u32 = posts.values().sum();
                prop_assert!((bounds.min..=bounds.max).contains(&total), "{total}");
                if total > 0 {
                    for name in &names {
                        prop_assert!(posts.keys().any(|set| set.contains(name)), "{name} is worked");
                    }
                }
                match &last {
                    Some((_, before)) if *before == posts => {}
                    Some((at, _)) => {
                        prop_assert!(moment >= *at + COOL, "changed twice within the cool-down");
                        last = Some((moment, posts));
                    }
                    // None at the beginning is no change.
                    None if posts.is_empty() => {}
                    None => last = Some((moment, posts)),
                }
            }
        }

        #[test]
        fn following_the_steps_comes_to_rest_at_what_should_be(
            wanted in prop::collection::btree_map(0_usize..4, 0_u32..5, 0..4),
            there in prop::collection::vec((0_usize..4, 0_u8..4, any::<bool>()), 0..12),
            more in 0_u32..3,
            // How many looks later they have ended that are told to stop, in turns.
            ends in prop::collection::vec(1_u32..6, 1..8),
        ) {
            let names = ["a", "b", "c", "d"];
            let posts: Posts = wanted.iter().map(|(at, count)| (queues(&[names[*at]]), *count)).collect();
            let stages = [Stage::Starting, Stage::Ready, Stage::Stopping, Stage::Silent];
            let mut hands: Vec<Hand> = there.iter().enumerate().map(|(id, (at, stage, is_old))| {
                let hand = hand(&id.to_string(), names[*at], stages[usize::from(*stage)], *is_old);
                Hand { is_busy: id.is_multiple_of(2), ..hand }
            }).collect();
            let max = wanted.values().sum::<u32>() + more;
            let mut next = hands.len();
            let mut ends = ends.into_iter().cycle();
            let mut left: BTreeMap<String, u32> = BTreeMap::new();
            for round in 0.. {
                prop_assert!(round < 500, "it never comes to rest: {hands:?}");
                let steps = steps(&posts, &hands, max, 3);
                let starts = steps.iter().filter(|step| matches!(step, Step::Start(_))).count();
                let there = hands.iter().filter(|hand| hand.stage != Stage::Silent).count();
                let is_restart = hands.iter().any(|hand| hand.is_old);
                let most = max as usize + usize::from(is_restart);
                prop_assert!(starts == 0 || there + starts <= most, "{starts} beside {hands:?}");
                // While some are missing, one at most of those that work is told to go, and only an idle one while
                // busy ones are on their way out.
                let missing = |(queues, want): (&Vec<String>, &u32)| {
                    let are_of = |hand: &&Hand| hand.queues == *queues && matches!(hand.stage, Stage::Starting | Stage::Ready);
                    let begins = steps.iter().filter(|step| **step == Step::Start(queues.clone()));
                    hands.iter().filter(are_of).count() + begins.count() < *want as usize
                };
                if posts.iter().any(missing) {
                    let is_told = |hand: &&Hand| hand.stage == Stage::Ready && steps.contains(&Step::Stop(hand.id.clone()));
                    let told: Vec<&Hand> = hands.iter().filter(is_told).collect();
                    prop_assert!(told.len() <= 1, "{steps:?} of {hands:?}");
                    let mut leaving = hands.iter().filter(|hand| hand.stage == Stage::Stopping);
                    let may_go = leaving.all(|it| it.is_busy && told.iter().all(|hand| !hand.is_busy));
                    prop_assert!(told.is_empty() || may_go, "{steps:?} of {hands:?}");
                }
                if steps.is_empty() && hands.iter().all(|hand| hand.stage == Stage::Ready && !hand.is_old) {
                    break;
                }
                hands.retain(|hand| {
                    if hand.stage != Stage::Stopping {
                        return true;
                    }
                    let left = left.entry(hand.id.clone()).or_insert_with(|| ends.next().unwrap_or(1));
                    *left -= 1;
                    *left > 0
                });
                // Before the next look, what was started is there.
                hands.iter_mut().filter(|hand| hand.stage == Stage::Starting).for_each(|hand| hand.stage = Stage::Ready);
                for step in steps {
                    match step {
                        Step::Start(set) => {
                            hands.push(Hand { id: next.to_string(), queues: set, stage: Stage::Starting, is_old: false, is_busy: next.is_multiple_of(2) });
                            next += 1;
                        }
                        Step::Stop(id) => hands.iter_mut().filter(|hand| hand.id == id).for_each(|hand| hand.stage = Stage::Stopping),
                        Step::Kill(id) => hands.retain(|hand| hand.id != id),
                    }
                }
            }
            for (at, name) in names.iter().enumerate() {
                let have = hands.iter().filter(|hand| hand.queues == queues(&[name])).count();
                prop_assert_eq!(have, wanted.get(&at).copied().unwrap_or(0) as usize, "{}", name);
            }
        }
    }
}
