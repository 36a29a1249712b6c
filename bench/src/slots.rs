//! The weighted slots against a semaphore and against first fit, simulated: the same jobs for each, and a
//! clock that jumps from one event to the next.
//!
//! Prediction: a semaphore leaves a sixth of the slots empty behind jobs that do not fit yet. First fit
//! leaves none empty while there are small jobs, so it runs out of them first, and lets a flood of them
//! pass a large one without end. Ours uses as much as first fit at load 0.9 and more of a backlog, and
//! lets the largest wait about as long as a semaphore does in the flood. One walk down a tree finds the
//! next, so a thousand times as many waiting cost cache misses and twice the steps, not a thousand times
//! the time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use fastrand::Rng;
use vedetta_core::{Held, Slots};

use crate::figures::{median, quantile, rate};

const CAPACITY: NonZeroU32 = NonZeroU32::new(14).unwrap();
/// How often ours lets anybody be overtaken.
const K: u32 = 4 * CAPACITY.get();

/// The classes of jobs: cost, share of all, mean run in seconds.
const CLASSES: [(u32, f64, f64); 7] = [
    (1, 0.2, 20.0),
    (2, 0.2, 30.0),
    (4, 0.2, 46.0),
    (8, 0.2, 69.0),
    (16, 0.1, 105.0),
    (32, 0.07, 159.0),
    (64, 0.03, 240.0),
];
const SMALLEST: usize = 0;
const LARGEST: usize = CLASSES.len() - 1;
/// How far the logarithm of a run strays; this much leaves a semaphore at 84 % of the slots.
const SIGMA: f64 = 0.8;

/// Jobs of a backlog, and of a stream.
const BACKLOG: usize = 10_000;
const STREAM: usize = 60_000;
/// Between two of the largest in the flood.
const EVERY: Duration = Duration::from_secs(600);

/// What `--check` takes: how much more of the slots ours must use than a semaphore, and how many times
/// dearer an operation may be with a million waiting than with a thousand.
const MORE: f64 = 0.08;
const DEARER: f64 = 10.0;

/// Starts measured for a rate.
const STARTS: u64 = 1_000_000;

pub(crate) const FIGURES: &str = "\
Figures:
  used         share of all slots that was in use, from the first arrival to the end of the last job
  drained      time in which a waiter fitted and was not started, and the longest stretch of it
  overtaken    the most often that a later job started before one that waited
  at the head  the longest that one of cost 64 waited after all before it had started
  wait         p50, p99 and most, in seconds, of the jobs with that cost

On 14 slots; what costs more takes all.";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// For other jobs; the same seed gives the same figures.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Fail when ours does not use 8 points more than a semaphore on the backlog, overtakes anybody more
    /// than 56 times, lets one of cost 64 wait at the head longer than 57 times the longest run, or is ten
    /// times slower with a million waiting.
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut rng = Rng::with_seed(args.seed);
    let scenarios = [
        (format!("a backlog of {BACKLOG}"), backlog(&mut rng)),
        (format!("{STREAM} at load 0.9"), stream(&mut rng)),
        (
            format!("a flood of {STREAM} of cost 1 at load 1.05, and a 64 every 600 s"),
            flood(&mut rng),
        ),
    ];
    let mut missed = Vec::new();
    for (n, (name, jobs)) in scenarios.iter().enumerate() {
        let ours = simulate(jobs, &mut Ours::new());
        let semaphore = simulate(jobs, &mut Plain::new(false));
        let first_fit = simulate(jobs, &mut Plain::new(true));
        let longest = jobs.iter().map(|job| job.runs).max().unwrap_or_default();
        let bound = longest * (K + 1);
        if n == 0 && ours.used < semaphore.used + MORE {
            let (ours, semaphore) = (ours.used * 100.0, semaphore.used * 100.0);
            missed.push(format!("Ours uses {ours:.1} %, a semaphore {semaphore:.1} % of {name}."));
        }
        if ours.overtaken > u64::from(K) {
            missed.push(format!("One was overtaken {} times in {name}.", ours.overtaken));
        }
        if ours.at_head > bound {
            missed.push(format!("A 64 waited {:.0?} at the head in {name}.", ours.at_head));
        }
        println!("{name}; the bound at the head is {} s:", bound.as_secs());
        print([ours, semaphore, first_fit]);
    }
    let few = throughput(&mut rng, 1_000);
    let many = throughput(&mut rng, 1_000_000);
    println!("wait, start and release: {few:.0}/s with 1000 waiting, {many:.0}/s with 1000000");
    if few > many * DEARER {
        missed.push(format!("With a million waiting it is {:.1} times slower.", few / many));
    }
    anyhow::ensure!(!args.check || missed.is_empty(), "{}", missed.join(" "));
    Ok(())
}

struct Job {
    class: usize,
    arrives: Duration,
    runs: Duration,
}

impl Job {
    fn new(rng: &mut Rng, class: usize, arrives: Duration) -> Self {
        let (_, _, mean) = CLASSES[class];
        let normal = (-2.0 * chance(rng).ln()).sqrt() * (std::f64::consts::TAU * rng.f64()).cos();
        let runs = mean * (SIGMA * normal - SIGMA * SIGMA / 2.0).exp();
        Self { class, arrives, runs: Duration::from_secs_f64(runs) }
    }
}

/// Above 0, so that it has a logarithm.
fn chance(rng: &mut Rng) -> f64 {
    1.0 - rng.f64()
}

/// The slots a job of the class takes.
fn slots_of(class: usize) -> u32 {
    CLASSES[class].0.min(CAPACITY.get())
}

fn any_class(rng: &mut Rng) -> usize {
    let mut left = rng.f64();
    let ends_here = |(_, share, _): &(u32, f64, f64)| {
        left -= share;
        left < 0.0
    };
    CLASSES.iter().position(ends_here).unwrap_or(LARGEST)
}

fn backlog(rng: &mut Rng) -> Vec<Job> {
    let one = || {
        let class = any_class(rng);
        Job::new(rng, class, Duration::ZERO)
    };
    std::iter::repeat_with(one).take(BACKLOG).collect()
}

fn stream(rng: &mut Rng) -> Vec<Job> {
    let work = (0..CLASSES.len())
        .map(|class| f64::from(slots_of(class)) * CLASSES[class].1 * CLASSES[class].2)
        .sum();
    arrivals(rng, 0.9, work, any_class)
}

fn flood(rng: &mut Rng) -> Vec<Job> {
    let mut jobs = arrivals(rng, 1.05, CLASSES[SMALLEST].2, |_| SMALLEST);
    let last = jobs.last().map_or(Duration::ZERO, |job| job.arrives);
    let mut at = EVERY;
    while at < last {
        jobs.push(Job::new(rng, LARGEST, at));
        at += EVERY;
    }
    jobs.sort_by_key(|job| job.arrives);
    jobs
}

/// A stream, by chance and independent of each other, that brings `load` times what the slots can do, at
/// a mean of `work` slot-seconds for a job.
fn arrivals(rng: &mut Rng, load: f64, work: f64, class: impl Fn(&mut Rng) -> usize) -> Vec<Job> {
    let gap = work / (load * f64::from(CAPACITY.get()));
    let mut at = Duration::ZERO;
    let one = || {
        at += Duration::from_secs_f64(-chance(rng).ln() * gap);
        let class = class(rng);
        Job::new(rng, class, at)
    };
    std::iter::repeat_with(one).take(STREAM).collect()
}

/// Who decides what starts. Jobs have the numbers of their arrival.
trait Policy {
    fn wait(&mut self, job: usize, class: usize);
    fn start(&mut self) -> Option<usize>;
    fn end(&mut self, job: usize, class: usize);
}

struct Ours {
    slots: Slots<usize>,
    held: HashMap<usize, Held>,
}

impl Ours {
    fn new() -> Self {
        Self { slots: Slots::new(CAPACITY), held: HashMap::new() }
    }
}

impl Policy for Ours {
    fn wait(&mut self, job: usize, class: usize) {
        self.slots.wait(CLASSES[class].0, job);
    }

    fn start(&mut self) -> Option<usize> {
        let (held, job) = self.slots.start()?;
        self.held.insert(job, held);
        Some(job)
    }

    fn end(&mut self, job: usize, _: usize) {
        self.slots.release(self.held.remove(&job).expect("it runs"));
    }
}

/// A semaphore, in which the first to come is the next; or first fit, in which it is the first that fits.
struct Plain {
    overtakes: bool,
    free: u32,
    waiting: [VecDeque<usize>; CLASSES.len()],
}

impl Plain {
    fn new(overtakes: bool) -> Self {
        Self { overtakes, free: CAPACITY.get(), waiting: Default::default() }
    }
}

impl Policy for Plain {
    fn wait(&mut self, job: usize, class: usize) {
        self.waiting[class].push_back(job);
    }

    fn start(&mut self) -> Option<usize> {
        let fits = |class: &usize| slots_of(*class) <= self.free;
        let class = (0..CLASSES.len())
            .filter(|class| !self.overtakes || fits(class))
            .filter(|class| !self.waiting[*class].is_empty())
            .min_by_key(|class| self.waiting[*class][0])
            .filter(fits)?;
        self.free -= slots_of(class);
        self.waiting[class].pop_front()
    }

    fn end(&mut self, _: usize, class: usize) {
        self.free += slots_of(class);
    }
}

struct Outcome {
    used: f64,
    drained: Duration,
    longest_drain: Duration,
    overtaken: u64,
    at_head: Duration,
    waits: [Vec<Duration>; CLASSES.len()],
}

/// Jobs in the order of their arrival, from the first to the end of the last.
#[expect(clippy::unchecked_time_subtraction, reason = "the clock only moves on")]
fn simulate(jobs: &[Job], policy: &mut impl Policy) -> Outcome {
    let mut ends: BinaryHeap<Reverse<(Duration, usize)>> = BinaryHeap::new();
    let mut arriving = jobs.iter().enumerate().peekable();
    let mut started = Started::new(jobs.len());
    let mut waiting = [0_u32; CLASSES.len()];
    let mut free = CAPACITY.get();
    let (mut head, mut head_since) = (0, Duration::ZERO);
    let (mut now, mut drains_since) = (Duration::ZERO, None);
    let mut work = Duration::ZERO;
    let (mut drained, mut longest_drain) = (Duration::ZERO, Duration::ZERO);
    let (mut overtaken, mut at_head) = (0, Duration::ZERO);
    let mut waits: [Vec<Duration>; CLASSES.len()] = Default::default();

    loop {
        let next_end = ends.peek().map(|Reverse((at, _))| *at);
        let next_arrival = arriving.peek().map(|(_, job)| job.arrives);
        let Some(next) = next_end.into_iter().chain(next_arrival).min() else { break };
        now = next;
        if next_end == Some(now) {
            let Some(Reverse((_, job))) = ends.pop() else { break };
            free += slots_of(jobs[job].class);
            policy.end(job, jobs[job].class);
        } else if let Some((job, Job { class, .. })) = arriving.next() {
            waiting[*class] += 1;
            policy.wait(job, *class);
        }
        while let Some(job) = policy.start() {
            let Job { class, arrives, runs } = jobs[job];
            assert!(slots_of(class) <= free, "more runs than there are slots");
            free -= slots_of(class);
            work += runs * slots_of(class);
            waiting[class] -= 1;
            waits[class].push(now - arrives);
            overtaken = overtaken.max(started.later_than(job));
            started.add(job);
            ends.push(Reverse((now + runs, job)));
            if job == head && class == LARGEST {
                at_head = at_head.max(now - head_since);
            }
            while started.has(head) {
                head += 1;
                head_since = jobs.get(head).map_or(now, |job| job.arrives.max(now));
            }
        }
        let drains = (0..CLASSES.len()).any(|class| waiting[class] > 0 && slots_of(class) <= free);
        match drains_since {
            None if drains => drains_since = Some(now),
            Some(since) if !drains => {
                drained += now - since;
                longest_drain = longest_drain.max(now - since);
                drains_since = None;
            }
            _ => {}
        }
    }
    assert_eq!(head, jobs.len(), "every job has started");
    let used = work.div_duration_f64(now - jobs[0].arrives) / f64::from(CAPACITY.get());
    Outcome { used, drained, longest_drain, overtaken, at_head, waits }
}

/// Which jobs have started, and how many of them came after a given one, whatever the policy says: a
/// Fenwick tree over the order of arrival.
struct Started {
    jobs: Vec<bool>,
    sums: Vec<u64>,
    all: u64,
}

impl Started {
    fn new(jobs: usize) -> Self {
        Self { jobs: vec![false; jobs], sums: vec![0; jobs + 1], all: 0 }
    }

    fn has(&self, job: usize) -> bool {
        self.jobs.get(job).is_some_and(|started| *started)
    }

    fn add(&mut self, job: usize) {
        assert!(!std::mem::replace(&mut self.jobs[job], true), "a job starts once");
        self.all += 1;
        let mut at = job + 1;
        while at < self.sums.len() {
            self.sums[at] += 1;
            at += at & at.wrapping_neg();
        }
    }

    fn later_than(&self, job: usize) -> u64 {
        let mut at = job + 1;
        let mut earlier = 0;
        while at > 0 {
            earlier += self.sums[at];
            at &= at - 1;
        }
        self.all - earlier
    }
}

fn print(mut outcomes: [Outcome; 3]) {
    let mut row = |name: &str, figure: &dyn Fn(&mut Outcome) -> String| {
        let [ours, semaphore, first_fit] = outcomes.each_mut().map(figure);
        println!("  {name:<12} {ours:>25} {semaphore:>25} {first_fit:>25}");
    };
    println!("  {:<12} {:>25} {:>25} {:>25}", "", "ours", "semaphore", "first fit");
    row("used", &|one| format!("{:.1} %", one.used * 100.0));
    row("drained", &|one| {
        format!("{} s, {} s", one.drained.as_secs(), one.longest_drain.as_secs())
    });
    row("overtaken", &|one| one.overtaken.to_string());
    row("at the head", &|one| format!("{} s", one.at_head.as_secs()));
    for (class, (cost, _, _)) in CLASSES.iter().enumerate() {
        row(&format!("wait {cost}"), &|one| {
            let waits = &mut one.waits[class];
            if waits.is_empty() {
                return "-".to_owned();
            }
            let [p50, p99, most] = [0.5, 0.99, 1.0].map(|share| quantile(waits, share).as_secs());
            format!("{p50} / {p99} / {most}")
        });
    }
}

/// Jobs of all classes that join, start and end in a second, while so many wait: the median of three.
fn throughput(rng: &mut Rng, waiting: u32) -> f64 {
    let mut slots = Slots::new(CAPACITY);
    for _ in 0..waiting {
        slots.wait(CLASSES[any_class(rng)].0, ());
    }
    let mut running = Vec::new();
    let mut round = || {
        let began = Instant::now();
        let mut starts = 0;
        while starts < STARTS {
            while let Some((held, ())) = slots.start() {
                running.push(held);
                slots.wait(CLASSES[any_class(rng)].0, ());
                starts += 1;
            }
            slots.release(running.swap_remove(rng.usize(..running.len())));
        }
        rate(starts, began.elapsed())
    };
    median(&mut [round(), round(), round()])
}
