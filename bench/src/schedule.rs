//! A million keys in the schedule, in kube-rs's scheduler, and in tokio's delay queue with a map.
//!
//! Prediction: a key with a number costs one or two cache misses a call, so tens of millions of calls a
//! second; a key that must be hashed costs a few misses more. kube-rs hashes each key several times and
//! looks for the next of the keys held back by a limit from the beginning of a table that empties, so the
//! time of each grows with their number, and that of all with its square.

mod contestants;

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use rustix::time::{ClockId, clock_gettime};

use self::contestants::{ByKey, Contestant, Delays, Interned, Key, Kube};
use crate::figures::{median, rate, resident};

pub(crate) const ROWS: &str = "\
Rows, in millions of keys per second of CPU time of the thread:
  offer new      keys that do not wait, due in 100 to 3,600 s
  offer later    keys that wait, at random: ignored
  offer earlier  keys that wait, at random: moved
  take due       all of them, looked for every second, and finished
  storm          all offered as due now, taken and finished
  hold           taken, finished and offered again in 0.1 to 10 s, looked for every millisecond
  held 10,000    so many that are due, held back by a limit, then taken and finished
  bytes a key    resident memory that the first row takes, without the text of the keys

Every contestant measures in a process of its own, by turns; each figure is the median of the rounds, a
ratio the median of the ratios of the rounds. Each checks that no key is lost or comes twice.";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many keys.
    #[arg(long, default_value_t = 1_000_000)]
    keys: u32,
    /// Measurements of each contestant, taken in turns; the median counts.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Also hold a million keys back, which takes kube-rs a minute each time.
    #[arg(long)]
    million: bool,
    /// Fail when a target is missed, and say which.
    #[arg(long)]
    check: bool,
    /// Measure this one here, and print nothing but its figures.
    #[arg(long, hide = true)]
    here: Option<Who>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Who {
    Interned,
    Numbers,
    KubeNumbers,
    DelaysNumbers,
    Texts,
    KubeTexts,
    DelaysTexts,
}

/// Each of ours with the one of kube-rs that has the same keys, or harder ones to beat.
const PAIRS: [(Who, Who); 3] = [
    (Who::Interned, Who::KubeNumbers),
    (Who::Numbers, Who::KubeNumbers),
    (Who::Texts, Who::KubeTexts),
];

/// The rows before those of keys held back, and how many times kube-rs's rate [`Who::Interned`] must have.
const CALLS: [(&str, f64); 6] = [
    ("offer new", 2.0),
    ("offer later", 2.0),
    ("offer earlier", 2.0),
    ("take due", 2.0),
    ("storm", 5.0),
    ("hold", 5.0),
];

/// How many keys are held back, and the same target for that.
const HELD: [(u32, Option<f64>); 3] =
    [(10_000, None), (100_000, Some(20.0)), (1_000_000, Some(20.0))];

/// Of bytes a key, for [`Who::Interned`].
const MOST_BYTES: f64 = 48.0;

/// What one contestant did in one round: the rate of each row, and at last its bytes a key.
type Figures = Vec<f64>;

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    if let Some(who) = args.here {
        // Its clock is a runtime of its own.
        let figures = tokio::task::spawn_blocking(move || measure(who, &args)).await??;
        figures.iter().for_each(|figure| println!("{figure}"));
        return Ok(());
    }
    let mut rounds = Vec::new();
    for _ in 0..args.rounds {
        let each = Who::value_variants().iter().map(|who| in_a_fresh_process(*who, &args));
        rounds.push(each.collect::<anyhow::Result<Vec<_>>>()?);
    }
    let missed = print(&args, &rounds);
    anyhow::ensure!(!args.check || missed.is_empty(), "Missed:\n  {}", missed.join("\n  "));
    Ok(())
}

fn held(args: &Args) -> impl Iterator<Item = (u32, Option<f64>)> {
    HELD.into_iter().take(if args.million { 3 } else { 2 })
}

fn in_a_fresh_process(who: Who, args: &Args) -> anyhow::Result<Figures> {
    let name = who.to_possible_value().expect("none is skipped");
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["schedule", "--here", name.get_name(), "--keys", &args.keys.to_string()]);
    if args.million {
        command.arg("--million");
    }
    let output = command.stderr(std::process::Stdio::inherit()).output()?;
    anyhow::ensure!(output.status.success(), "{who:?} failed: {}", output.status);
    let figures = str::from_utf8(&output.stdout)?.lines().map(str::parse);
    Ok(figures.collect::<Result<_, _>>()?)
}

/// Prints the table; the targets that were missed.
fn print(args: &Args, rounds: &[Vec<Figures>]) -> Vec<String> {
    println!(
        "{:<16} {:^32}   {:^23}   ours / kube-rs",
        format!("{} keys", args.keys),
        "numbers",
        "texts",
    );
    println!(
        "{:<16} {:>8} {:>7} {:>7} {:>7}   {:>7} {:>7} {:>7}   {:>8} {:>7} {:>7}",
        "M/s of CPU",
        "interned",
        "keyed",
        "kube",
        "delays",
        "keyed",
        "kube",
        "delays",
        "interned",
        "keyed",
        "texts",
    );
    let of = |who: Who, row: usize| rounds.iter().map(move |round| round[who as usize][row]);
    let line = |name: &str, row: usize| {
        let each =
            Who::value_variants().iter().map(|who| median(&mut of(*who, row).collect::<Vec<_>>()));
        let each = each.collect::<Vec<_>>();
        let ratios = PAIRS.map(|(ours, kube)| {
            let ratios = of(ours, row).zip(of(kube, row)).map(|(ours, kube)| ours / kube);
            median(&mut ratios.collect::<Vec<_>>())
        });
        println!(
            "{name:<16} {:>8.2} {:>7.2} {:>7.2} {:>7.2}   {:>7.2} {:>7.2} {:>7.2}   {:>8.2} {:>7.2} {:>7.2}",
            each[0],
            each[1],
            each[2],
            each[3],
            each[4],
            each[5],
            each[6],
            ratios[0],
            ratios[1],
            ratios[2],
        );
        (each[0], ratios[0])
    };
    let mut missed = Vec::new();
    let calls = CALLS.map(|(name, least)| (name.to_owned(), Some(least)));
    let held = held(args).map(|(keys, least)| (format!("held {keys}"), least));
    let rates: Vec<_> = calls.into_iter().chain(held).collect();
    for (row, (name, least)) in rates.iter().enumerate() {
        let (_, ratio) = line(name, row);
        if let Some(least) = least.filter(|least| ratio < *least) {
            missed.push(format!("{name}: {ratio:.2} times kube-rs, should be at least {least}"));
        }
    }
    let (bytes, _) = line("bytes a key", rates.len());
    if bytes > MOST_BYTES {
        missed.push(format!("bytes a key: {bytes:.0}, should be at most {MOST_BYTES}"));
    }
    missed
}

fn measure(who: Who, args: &Args) -> anyhow::Result<Figures> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
    let _entered = runtime.enter();
    match who {
        Who::Interned => measure_one(args, Interned::default),
        Who::Numbers => measure_one(args, ByKey::<u64>::default),
        Who::KubeNumbers => measure_one(args, || Kube::<u64>::new(&runtime)),
        Who::DelaysNumbers => measure_one(args, || Delays::<u64>::new(&runtime)),
        Who::Texts => measure_one(args, ByKey::<Arc<str>>::default),
        Who::KubeTexts => measure_one(args, || Kube::<Arc<str>>::new(&runtime)),
        Who::DelaysTexts => measure_one(args, || Delays::<Arc<str>>::new(&runtime)),
    }
}

fn measure_one<K: Key, C: Contestant<K>>(
    args: &Args,
    new: impl Fn() -> C,
) -> anyhow::Result<Figures> {
    let keys: Vec<K> = (0..args.keys).map(K::new).collect();
    let (mut figures, bytes) = wait_and_take(&keys, new())?;
    figures.push(storm(&keys, new()));
    figures.push(hold(&keys, new()));
    for (count, _) in held(args) {
        figures.push(held_back(&(0..count).map(K::new).collect::<Vec<_>>(), new()));
    }
    figures.push(bytes);
    Ok(figures)
}

/// The rows of the keys that wait for long.
fn wait_and_take<K: Key>(
    keys: &[K],
    mut contestant: impl Contestant<K>,
) -> anyhow::Result<(Figures, f64)> {
    const FIRST: u64 = 100_000;
    const LAST: u64 = 3_600_000;
    let mut random = fastrand::Rng::with_seed(7);
    let times: Vec<u64> = keys.iter().map(|_| random.u64(FIRST..LAST)).collect();
    let earlier: Vec<u64> = times.iter().map(|time| random.u64(FIRST / 2..*time)).collect();
    let mut order: Vec<usize> = (0..keys.len()).collect();
    random.shuffle(&mut order);

    let before = resident()?;
    let mut new = Stopwatch::default();
    new.time(|| {
        keys.iter().zip(&times).for_each(|(key, time)| contestant.offer(key, *time));
        contestant.settle();
    });
    let gained = resident()?.saturating_sub(before);
    let bytes = f64::from(u32::try_from(gained / keys.len() as u64)?);

    let mut reoffer = |times: &[u64], more: u64| {
        let mut watch = Stopwatch::default();
        watch.time(|| {
            order.iter().for_each(|n| contestant.offer(&keys[*n], times[*n] + more));
            contestant.settle();
        });
        watch.rate(keys.len())
    };
    let (later, earlier) = (reoffer(&times, 1), reoffer(&earlier, 0));

    let (mut take, mut taken) = (Stopwatch::default(), Vec::with_capacity(keys.len()));
    for now in (0..=LAST).step_by(1_000) {
        contestant.set_clock(now);
        take.time(|| take_all(&mut contestant, &mut taken));
    }
    assert_each_once(&taken, keys.len());
    Ok((vec![new.rate(keys.len()), later, earlier, take.rate(keys.len())], bytes))
}

fn storm<K: Key>(keys: &[K], mut contestant: impl Contestant<K>) -> f64 {
    let (mut watch, mut taken) = (Stopwatch::default(), Vec::with_capacity(keys.len()));
    contestant.set_clock(1);
    watch.time(|| {
        keys.iter().for_each(|key| contestant.offer(key, 1));
        take_all(&mut contestant, &mut taken);
    });
    assert_each_once(&taken, keys.len());
    watch.rate(keys.len())
}

fn hold<K: Key>(keys: &[K], mut contestant: impl Contestant<K>) -> f64 {
    const BACKOFF: std::ops::RangeInclusive<u64> = 100..=10_000;
    let mut random = fastrand::Rng::with_seed(7);
    keys.iter().for_each(|key| contestant.offer(key, random.u64(BACKOFF)));
    contestant.settle();
    let (mut watch, mut again, mut now) = (Stopwatch::default(), 0, 0);
    while again < keys.len() {
        now += 1;
        contestant.set_clock(now);
        watch.time(|| {
            while let Some(key) = contestant.take() {
                contestant.finish(&key);
                contestant.offer(&key, now + random.u64(BACKOFF));
                again += 1;
            }
        });
    }
    let mut taken = Vec::with_capacity(keys.len());
    contestant.set_clock(now + BACKOFF.end());
    take_all(&mut contestant, &mut taken);
    assert_each_once(&taken, keys.len());
    watch.rate(again)
}

fn held_back<K: Key>(keys: &[K], mut contestant: impl Contestant<K>) -> f64 {
    keys.iter().for_each(|key| contestant.offer(key, 1));
    contestant.settle();
    contestant.set_clock(1);
    contestant.hold_back();
    let (mut watch, mut taken) = (Stopwatch::default(), Vec::with_capacity(keys.len()));
    watch.time(|| take_all(&mut contestant, &mut taken));
    assert_each_once(&taken, keys.len());
    watch.rate(keys.len())
}

fn take_all<K>(contestant: &mut impl Contestant<K>, taken: &mut Vec<K>) {
    while let Some(key) = contestant.take() {
        contestant.finish(&key);
        taken.push(key);
    }
}

fn assert_each_once<K: Key>(taken: &[K], keys: usize) {
    assert_eq!(taken.len(), keys, "none is lost");
    let mut seen = vec![false; keys];
    for key in taken {
        let before = std::mem::replace(&mut seen[key.index() as usize], true);
        assert!(!before, "none comes twice");
    }
}

/// CPU time of this thread.
#[derive(Default)]
struct Stopwatch(Duration);

impl Stopwatch {
    fn time(&mut self, what: impl FnOnce()) {
        let used = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default();
        let before = used();
        what();
        self.0 += used().saturating_sub(before);
    }

    /// Millions per second.
    fn rate(&self, count: usize) -> f64 {
        rate(count as u64, self.0) / 1e6
    }
}
