//! What became of jobs over time, in memory: so many done and failed, how long they waited and ran, how much
//! waited.
//!
//! ```text
//!  outcome ──► second 0 │ 1 │ … │ 3599      one ring of seconds and one of minutes for each of 20 queues;
//!          └─► minute 0 │ 1 │ … │ 1439      the rest share one that is called `other`
//! ```
//!
//! A moment in which nothing happened takes no room. Durations are counted in classes, each up to twice as long as
//! the one before, so what is said of them is as exact as that. Time is an argument.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use serde::Serialize;

/// Queues with series of their own.
const SERIES: usize = 20;
/// Queues with totals of their own.
const TOTALS: usize = 100;
/// What the queues beyond are counted under. No queue that has a place of its own is called so.
pub(crate) const OTHER: &str = "other";

/// Classes of durations: up to 2 ms, 4 ms, … 4.7 hours, and beyond.
const CLASSES: usize = 25;

/// How many durations there were of each class.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Histogram([u32; CLASSES]);

impl Histogram {
    fn class(duration: Duration) -> usize {
        let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        (0..CLASSES - 1).find(|class| millis <= Self::bound(*class)).unwrap_or(CLASSES - 1)
    }

    /// The longest of a class, in milliseconds.
    fn bound(class: usize) -> u64 {
        2 << class
    }

    fn add(&mut self, duration: Duration) {
        let count = &mut self.0[Self::class(duration)];
        *count = count.saturating_add(1);
    }

    fn merge(&mut self, other: &Self) {
        for (count, more) in self.0.iter_mut().zip(other.0) {
            *count = count.saturating_add(more);
        }
    }

    /// So many of a hundred were no longer than this, in milliseconds; nothing if there were none.
    pub(crate) fn percentile(&self, percent: u64) -> Option<u64> {
        let all: u64 = self.0.iter().map(|count| u64::from(*count)).sum();
        let rank = (all * percent).div_ceil(100).max(1);
        let mut below = 0;
        for (class, count) in self.0.iter().enumerate() {
            let count = u64::from(*count);
            if below + count >= rank {
                let from = class.checked_sub(1).map_or(0, Self::bound);
                let to = Self::bound(class.min(CLASSES - 2)).max(from);
                return Some(from + (to - from) * (rank - below) / count);
            }
            below += count;
        }
        None
    }
}

/// One moment of a queue.
#[derive(Debug, Clone, Default)]
struct Cell {
    done: u32,
    failed: u32,
    ready: u32,
    running: u32,
    oldest_ms: u32,
    ran: Histogram,
    waited: Histogram,
}

impl Cell {
    /// Counts add up; of what is measured the highest stands.
    fn merge(&mut self, other: &Self) {
        self.done = self.done.saturating_add(other.done);
        self.failed = self.failed.saturating_add(other.failed);
        self.ready = self.ready.max(other.ready);
        self.running = self.running.max(other.running);
        self.oldest_ms = self.oldest_ms.max(other.oldest_ms);
        self.ran.merge(&other.ran);
        self.waited.merge(&other.waited);
    }

    /// The same moment of another queue.
    fn beside(&mut self, other: &Self) {
        let (ready, running) = (self.ready, self.running);
        self.merge(other);
        self.ready = ready.saturating_add(other.ready);
        self.running = running.saturating_add(other.running);
    }
}

/// Moments of one length, those in which something happened; the oldest go.
#[derive(Debug)]
struct Ring {
    step: u64,
    kept: u64,
    cells: VecDeque<(u64, Cell)>,
}

impl Ring {
    fn at(&mut self, second: u64) -> &mut Cell {
        let slot = second / self.step;
        // Time does not go back: the clock behind it is monotonic.
        if self.cells.back().is_none_or(|(last, _)| *last < slot) {
            self.cells.push_back((slot, Cell::default()));
        }
        while self.cells.front().is_some_and(|(first, _)| first + self.kept <= slot) {
            self.cells.pop_front();
        }
        &mut self.cells.back_mut().expect("one was put there").1
    }

    /// The moments from a second on.
    fn since(&self, second: u64) -> impl Iterator<Item = (u64, &Cell)> {
        let from = self.cells.partition_point(|(slot, _)| slot * self.step < second);
        self.cells.range(from..).map(|(slot, cell)| (slot * self.step, cell))
    }
}

#[derive(Debug)]
struct Series {
    seconds: Ring,
    minutes: Ring,
}

impl Series {
    fn new() -> Self {
        let ring = |step, kept| Ring { step, kept, cells: VecDeque::new() };
        Self { seconds: ring(1, 3600), minutes: ring(60, 1440) }
    }

    fn change(&mut self, second: u64, change: impl Fn(&mut Cell)) {
        change(self.seconds.at(second));
        change(self.minutes.at(second));
    }
}

/// What was counted since the start.
#[derive(Debug, Clone, Default)]
pub(crate) struct Totals {
    pub(crate) done: u64,
    pub(crate) failed: u64,
    pub(crate) ran: Durations,
    pub(crate) waited: Durations,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Durations {
    counts: [u64; CLASSES],
    pub(crate) sum: Duration,
}

impl Durations {
    fn add(&mut self, duration: Duration) {
        self.counts[Histogram::class(duration)] += 1;
        self.sum = self.sum.saturating_add(duration);
    }

    /// How many were no longer than so many milliseconds; last, how many there were.
    pub(crate) fn cumulative(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        let mut sum = 0;
        self.counts.iter().enumerate().map(move |(class, count)| {
            sum += count;
            ((class < CLASSES - 1).then(|| Histogram::bound(class)), sum)
        })
    }
}

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Done,
    Failed,
}

/// What is in a queue now.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Depth {
    pub(crate) ready: u64,
    pub(crate) running: u64,
    pub(crate) oldest: Option<Duration>,
}

/// All that is kept.
#[derive(Debug, Default)]
pub(crate) struct Stats {
    series: BTreeMap<String, Series>,
    pub(crate) totals: BTreeMap<String, Totals>,
}

/// The value of a name, or of [`OTHER`] when too many have one.
fn entry<'a, T>(
    map: &'a mut BTreeMap<String, T>,
    name: &str,
    most: usize,
    new: fn() -> T,
) -> &'a mut T {
    let name = if map.contains_key(name) || map.len() < most { name } else { OTHER };
    if !map.contains_key(name) {
        map.insert(name.to_owned(), new());
    }
    map.get_mut(name).expect("it was put there")
}

fn small(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

impl Stats {
    fn change(&mut self, queue: &str, second: u64, change: impl Fn(&mut Cell)) {
        entry(&mut self.series, queue, SERIES, Series::new).change(second, change);
    }

    fn total(&mut self, queue: &str) -> &mut Totals {
        entry(&mut self.totals, queue, TOTALS, Totals::default)
    }

    /// Some ended.
    pub(crate) fn ended(&mut self, queue: &str, second: u64, how: Ended, count: u64) {
        if count == 0 {
            return;
        }
        let more = small(count);
        match how {
            Ended::Done => {
                self.total(queue).done += count;
                self.change(queue, second, |cell| cell.done = cell.done.saturating_add(more));
            }
            Ended::Failed => {
                self.total(queue).failed += count;
                self.change(queue, second, |cell| cell.failed = cell.failed.saturating_add(more));
            }
        }
    }

    /// An attempt took so long.
    pub(crate) fn ran(&mut self, queue: &str, second: u64, duration: Duration) {
        self.total(queue).ran.add(duration);
        self.change(queue, second, |cell| cell.ran.add(duration));
    }

    /// A job that was due waited so long.
    pub(crate) fn waited(&mut self, queue: &str, second: u64, duration: Duration) {
        self.total(queue).waited.add(duration);
        self.change(queue, second, |cell| cell.waited.add(duration));
    }

    /// So much is in a queue.
    pub(crate) fn holds(&mut self, queue: &str, second: u64, depth: Depth) {
        if depth.ready == 0 && depth.running == 0 {
            return;
        }
        let oldest = depth.oldest.unwrap_or_default().as_millis();
        let cell = Cell {
            ready: small(depth.ready),
            running: small(depth.running),
            oldest_ms: u32::try_from(oldest).unwrap_or(u32::MAX),
            ..Cell::default()
        };
        self.change(queue, second, |there| there.merge(&cell));
    }

    /// What ended in the last minute: done, and failed.
    pub(crate) fn last_minute(&self, queue: Option<&str>, second: u64) -> (u64, u64) {
        let these = self.series.iter().filter(|(name, _)| queue.is_none_or(|queue| queue == *name));
        let cells =
            these.flat_map(|(_, series)| series.seconds.since((second + 1).saturating_sub(60)));
        cells.fold((0, 0), |(done, failed), (_, cell)| {
            (done + u64::from(cell.done), failed + u64::from(cell.failed))
        })
    }

    /// The moments of each queue, or of one alone, put together to steps.
    pub(crate) fn steps(&self, span: Span, now: u64, only: Option<&str>) -> Steps {
        let points = usize::try_from(span.range / span.step).unwrap_or(1);
        let first = (now / span.step + 1).saturating_sub(points as u64) * span.step;
        let mut queues = BTreeMap::new();
        for (name, series) in &self.series {
            if only.is_some_and(|only| only != name) {
                continue;
            }
            let ring = if span.is_fine() { &series.seconds } else { &series.minutes };
            let mut cells = vec![Cell::default(); points];
            for (second, cell) in ring.since(first) {
                let place = usize::try_from((second - first) / span.step).unwrap_or(usize::MAX);
                if let Some(there) = cells.get_mut(place) {
                    there.merge(cell);
                }
            }
            queues.insert(name.clone(), cells);
        }
        Steps { first, step: span.step, points, queues }
    }
}

/// What was counted, by steps: to be read when nobody waits any more to count.
#[derive(Debug)]
pub(crate) struct Steps {
    first: u64,
    step: u64,
    points: usize,
    queues: BTreeMap<String, Vec<Cell>>,
}

impl Steps {
    /// The series of all queues together and of each.
    pub(crate) fn read(self, since: u64) -> Read {
        let mut all = vec![Cell::default(); self.points];
        for cells in self.queues.values() {
            all.iter_mut().zip(cells).for_each(|(all, cell)| all.beside(cell));
        }
        let points = |(name, cells): (String, Vec<Cell>)| (name, Points::of(&cells));
        let queues = self.queues.into_iter().map(points).collect();
        let (from, step_ms) = (self.first * 1000, self.step * 1000);
        Read { from, step_ms, since, all: Points::of(&all), queues }
    }
}

/// What is asked for, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) range: u64,
    pub(crate) step: u64,
}

/// Points of one answer.
const MOST_POINTS: u64 = 1440;
const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;

impl Span {
    /// A range of up to a day, in steps that are whole seconds, or beyond an hour whole minutes; unless said, about
    /// 120 of them.
    pub(crate) fn new(range: Duration, step: Option<Duration>) -> Result<Self, String> {
        let range = range.as_secs();
        if !(10..=DAY).contains(&range) {
            return Err("range is from 10s to 24h".into());
        }
        let unit = if range > HOUR { 60 } else { 1 };
        let step = match step {
            None => {
                let steps = [1, 2, 5, 10, 30, 60, 120, 300, 600, 720];
                steps.into_iter().find(|step| *step >= unit && range / step <= 120).unwrap_or(720)
            }
            Some(step) if step.subsec_nanos() == 0 => step.as_secs(),
            Some(_) => 0,
        };
        if step == 0 || step % unit != 0 || step > range {
            return Err(format!(
                "step is whole seconds, beyond an hour minutes, and at most {range}s"
            ));
        }
        let range = range / step * step;
        if range / step > MOST_POINTS {
            return Err(format!("that is more than {MOST_POINTS} points: give a longer step"));
        }
        Ok(Self { range, step })
    }

    fn is_fine(self) -> bool {
        self.range <= HOUR
    }
}

/// A few series, each with a point for every step.
#[derive(Debug, Serialize)]
pub(crate) struct Read {
    /// When the first step began, in milliseconds since 1970.
    pub(crate) from: u64,
    pub(crate) step_ms: u64,
    /// Since when there is anything to tell, in milliseconds since 1970.
    pub(crate) since: u64,
    pub(crate) all: Points,
    pub(crate) queues: BTreeMap<String, Points>,
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct Points {
    pub(crate) done: Vec<u32>,
    pub(crate) failed: Vec<u32>,
    pub(crate) ready: Vec<u32>,
    pub(crate) running: Vec<u32>,
    pub(crate) oldest_ms: Vec<u32>,
    pub(crate) run_p50_ms: Vec<Option<u64>>,
    pub(crate) run_p95_ms: Vec<Option<u64>>,
    pub(crate) wait_p50_ms: Vec<Option<u64>>,
    pub(crate) wait_p95_ms: Vec<Option<u64>>,
}

impl Points {
    fn of(cells: &[Cell]) -> Self {
        let number = |of: fn(&Cell) -> u32| cells.iter().map(of).collect();
        let ran = |percent| cells.iter().map(move |cell| cell.ran.percentile(percent)).collect();
        let waited =
            |percent| cells.iter().map(move |cell| cell.waited.percentile(percent)).collect();
        Self {
            done: number(|cell| cell.done),
            failed: number(|cell| cell.failed),
            ready: number(|cell| cell.ready),
            running: number(|cell| cell.running),
            oldest_ms: number(|cell| cell.oldest_ms),
            run_p50_ms: ran(50),
            run_p95_ms: ran(95),
            wait_p50_ms: waited(50),
            wait_p95_ms: waited(95),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn span(range: u64, step: u64) -> Span {
        Span { range, step }
    }

    #[test]
    fn what_ends_is_counted_in_its_second_and_its_minute() {
        let mut stats = Stats::default();
        for (second, how, count) in
            [(600, Ended::Done, 2), (601, Ended::Failed, 1), (601, Ended::Done, 1)]
        {
            stats.ended("a", 60_000 + second, how, count);
        }
        let fine = stats.steps(span(5, 1), 60_602, None).read(0);
        assert_eq!((fine.from, fine.step_ms), (60_598_000, 1000));
        assert_eq!(fine.all.done, [0, 0, 2, 1, 0]);
        assert_eq!(fine.all.failed, [0, 0, 0, 1, 0]);
        assert_eq!(stats.last_minute(None, 60_601), (3, 1));
        assert_eq!(stats.last_minute(Some("a"), 60_660), (1, 1), "the first second is out of it");
        assert_eq!(stats.last_minute(Some("b"), 60_601), (0, 0));
        stats.ended("a", 60_725, Ended::Done, 5);
        let coarse = stats.steps(span(2 * HOUR, 60), 60_725, None).read(0);
        assert_eq!(coarse.all.done[117..], [3, 0, 5], "minutes 1010, 1011 and 1012");
        assert_eq!((stats.totals["a"].done, stats.totals["a"].failed), (8, 1));
    }

    #[test]
    fn of_a_step_the_deepest_moment_is_told_and_queues_add_up() {
        let mut stats = Stats::default();
        let depth = |ready, oldest| Depth { ready, running: 1, oldest: Some(MS(oldest)) };
        stats.holds("a", 100, depth(3, 500));
        stats.holds("a", 101, depth(9, 400));
        stats.holds("b", 101, depth(1, 700));
        stats.holds("b", 102, Depth::default());
        let read = stats.steps(span(10, 10), 109, None).read(0);
        assert_eq!((&read.all.ready[..], &read.all.running[..]), (&[10][..], &[2][..]));
        assert_eq!((&read.all.oldest_ms[..], &read.queues["a"].ready[..]), (&[700][..], &[9][..]));
        assert_eq!(stats.steps(span(10, 10), 109, Some("b")).read(0).all.ready, [1]);
    }

    #[test]
    fn percentiles_are_right_to_a_factor_of_two() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.percentile(50), None);
        (1..=1000).for_each(|ms| histogram.add(MS(ms)));
        for (percent, exact) in [(50, 500), (95, 950), (100, 1000)] {
            let told = histogram.percentile(percent).unwrap();
            assert!(told >= exact / 2 && told <= exact * 2, "{percent}: {told}");
        }
        let mut long = Histogram::default();
        long.add(Duration::from_secs(1_000_000));
        assert!(long.percentile(50).unwrap() > 4 * 3_600_000);
    }

    #[test]
    fn totals_of_durations_are_cumulative_and_end_with_all() {
        let mut stats = Stats::default();
        [1, 3, 3, 100_000_000].into_iter().for_each(|ms| stats.ran("a", 0, MS(ms)));
        let ran = &stats.totals["a"].ran;
        let counts: Vec<_> = ran.cumulative().collect();
        assert_eq!(counts[..2], [(Some(2), 1), (Some(4), 3)]);
        assert_eq!(counts.last(), Some(&(None, 4)));
        assert_eq!(ran.sum, MS(100_000_007));
    }

    #[test]
    fn queues_beyond_the_bound_share_one_place_and_old_moments_go() {
        let mut stats = Stats::default();
        for n in 0..500 {
            stats.ended(&format!("q{n:03}"), 10, Ended::Done, 1);
        }
        assert_eq!((stats.series.len(), stats.totals.len()), (SERIES + 1, TOTALS + 1));
        assert_eq!(stats.totals[OTHER].done, 400);
        assert_eq!(stats.steps(span(60, 60), 10, None).read(0).all.done.iter().sum::<u32>(), 500);
        for second in 0..10_000 {
            stats.ended("q000", 100 + second, Ended::Done, 1);
        }
        let series = &stats.series["q000"];
        assert_eq!(series.seconds.cells.len(), 3600);
        assert!(series.minutes.cells.len() <= 1440);
    }

    #[test]
    fn a_range_has_steps_that_fit_it() {
        let secs = |text| humantime::parse_duration(text).unwrap();
        for (range, step, expected) in [
            ("1h", None, Ok((3600, 30))),
            ("15m", None, Ok((900, 10))),
            ("24h", None, Ok((86_400, 720))),
            ("6h", Some("5m"), Ok((21_600, 300))),
            ("1h", Some("1s"), Err(())),
            ("2h", Some("90s"), Err(())),
            ("1h", Some("500ms"), Err(())),
            ("1h", Some("2h"), Err(())),
            ("48h", None, Err(())),
            ("1s", None, Err(())),
        ] {
            let span = Span::new(secs(range), step.map(secs));
            assert_eq!(
                span.map(|span| (span.range, span.step)).map_err(drop),
                expected,
                "{range} {step:?}"
            );
        }
    }
}
