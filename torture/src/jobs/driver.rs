//! Asks for jobs, makes faults, waits until all is quiet, and has it checked.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use testing::{PATIENCE, Proxy, soon};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use vedetta_jobs::{Change, Enqueued, JobId, NewJob};

use super::check::{Asked, CallOff, Evidence, Fault, SERVER_KILLED, Taken};
use super::child::{self, Task};
use super::desk::Desk;
use super::log::{self, now};
use super::world::{Server, Workers};
use super::{Backend, Kind, Lie, Report, Setup};

/// Jobs in one enqueue, at most.
const BATCH: u64 = 200;
/// No more are asked for while so many are left.
const BACKLOG: u64 = 3_000;
/// Faults end when so many are left: the rest is worked off in peace.
const REST: u64 = 200;
/// If nothing changes for so long, something is stuck; sooner where there are no faults to get over.
const STUCK: Duration = Duration::from_secs(40);
const STUCK_IN_PEACE: Duration = Duration::from_secs(8);

pub(super) async fn run(setup: &Setup) -> Report {
    let began = Instant::now();
    let folder = crate::bed::memory_folder();
    let mut server = Server::start(setup, folder.path()).await;
    let link = Proxy::to(server.address()).await;
    let opening = Box::pin(Desk::open(&server, &link, setup, folder.path()));
    let opened = soon("the driver's line opens", opening).await;
    let desk = Arc::new(opened.expect("the driver's line opens"));
    let mut workers = Workers::start(setup, folder.path(), server.url(&link), desk.records());

    let progress = Progress::default();
    let stuck = if setup.between_faults.is_some() { STUCK } else { STUCK_IN_PEACE };
    if setup.between_faults.is_none() {
        progress.dealt.store(true, Ordering::Relaxed);
    }
    let calm = CancellationToken::new();
    let asking = async {
        let asked = ask(setup, &desk, &progress).await;
        let _ = wait_for(&desk, REST, stuck).await;
        calm.cancel();
        asked
    };
    let (asked, faults) =
        tokio::join!(asking, storm(setup, &mut server, &link, &mut workers, &progress, &calm));

    let mut violations: Vec<String> = wait_for(&desk, 0, stuck).await.err().into_iter().collect();
    // Who was frozen or cut off may still say something.
    sleep(setup.lease).await;
    let started = workers.started;
    for (number, worker) in workers.running {
        if !worker.end().await {
            violations.push(format!("worker {number} did not end by itself"));
        }
    }
    let left = match desk.all(&mut server, folder.path()).await {
        Ok(left) => left,
        Err(error) => {
            violations.push(format!("what is left cannot be seen: {error:#}"));
            super::desk::Left::default()
        }
    };
    let ahead = if setup.on == Backend::Nats { micros(child::ahead(setup.lease)) } else { 0 };
    let mut evidence =
        Evidence { on: setup.on, ahead, asked, faults, left, runs: Vec::new(), overlapping: 0 };
    violations.extend(evidence.read_logs(folder.path(), started));
    let mut report = evidence.check();
    report.violations.splice(0..0, violations);
    report.took = began.elapsed();
    if !report.violations.is_empty() && std::env::var_os("TORTURE_KEEP").is_some() {
        eprintln!("{:?}\nlogs are kept in {}", evidence.faults, folder.keep().display());
    }
    report
}

/// What those who ask and those who break things know of each other.
#[derive(Debug, Default)]
struct Progress {
    /// There was a fault of each kind.
    dealt: AtomicBool,
    acknowledged: AtomicU64,
}

/// Until at most so many are left; or what is stuck.
async fn wait_for(desk: &Desk, most: u64, stuck: Duration) -> Result<(), String> {
    let (mut last, mut changed) = (u64::MAX, Instant::now());
    loop {
        match desk.left().await {
            Ok(left) if left <= most => return Ok(()),
            Ok(left) if left != last => (last, changed) = (left, Instant::now()),
            Ok(_) | Err(_) => {}
        }
        if changed.elapsed() > stuck {
            return Err(format!("stuck: {last} jobs neither wait nor run to an end"));
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// Asks for all jobs, and calls some off. By number, what was asked for.
async fn ask(setup: &Setup, desk: &Arc<Desk>, progress: &Progress) -> Vec<Asked> {
    let mut rng = fastrand::Rng::with_seed(setup.seed);
    let mut asked: Vec<Asked> = Vec::new();
    let mut calling_off: JoinSet<(usize, CallOff)> = JoinSet::new();
    let (mut acknowledged, mut batch_no, began) = (0, 0_usize, Instant::now());
    while acknowledged < setup.jobs || !progress.dealt.load(Ordering::Relaxed) {
        let first = asked.len();
        for _ in 0..rng.u64(1..=BATCH.min(setup.per_second / 5)) {
            asked.push(Asked::choose(setup.on, asked.len(), batch_no, &mut rng));
        }
        let batch = &mut asked[first..];
        batch_no += 1;
        let jobs: Vec<NewJob> = batch.iter().map(Asked::job).collect();
        match enqueue(setup, desk, &jobs).await {
            // They may be there or not: they are not asked for again, others are in their place.
            Err(_) => sleep(Duration::from_millis(20)).await,
            Ok(enqueued) => {
                for (job, enqueued) in batch.iter_mut().zip(&enqueued) {
                    job.taken = Taken::Acknowledged { id: enqueued.id.0, is_new: enqueued.is_new };
                    acknowledged += 1;
                    if job.kind == Kind::CalledOff {
                        let (number, id, desk) = (job.number, enqueued.id, Arc::clone(desk));
                        let delay = Duration::from_millis(rng.u64(..=1) * rng.u64(..400));
                        calling_off
                            .spawn(async move { (number, call_off(&desk, id, delay).await) });
                    }
                }
            }
        }
        progress.acknowledged.store(acknowledged, Ordering::Relaxed);
        if batch_no.is_multiple_of(8) {
            while desk.left().await.is_ok_and(|left| left > BACKLOG) {
                sleep(Duration::from_millis(20)).await;
            }
        }
        let due = Duration::from_micros(acknowledged.saturating_mul(1_000_000) / setup.per_second);
        tokio::time::sleep_until(began + due).await;
    }
    for (number, called_off) in calling_off.join_all().await {
        asked[number].called_off = Some(called_off);
    }
    asked
}

async fn enqueue(setup: &Setup, desk: &Desk, jobs: &[NewJob]) -> anyhow::Result<Vec<Enqueued>> {
    if setup.lie != Some(Lie::Lose) {
        return Ok(desk.enqueue(jobs).await?);
    }
    let stored = desk.enqueue(&jobs[1..]).await?;
    let lost = Enqueued { id: JobId(u64::MAX), is_new: true };
    Ok([lost].into_iter().chain(stored).collect())
}

async fn call_off(desk: &Desk, id: JobId, delay: Duration) -> CallOff {
    sleep(delay).await;
    let said = timeout(PATIENCE, desk.cancel(id)).await;
    match said.unwrap_or_else(|late| Err(late.into())) {
        Ok(Change::Made) => CallOff::Made,
        Ok(Change::Not(_)) => CallOff::TooLate,
        Ok(Change::NoSuch) => CallOff::NoSuch,
        Err(_) => CallOff::Unknown,
    }
}

impl Asked {
    /// The next one.
    fn choose(on: Backend, number: usize, batch: usize, rng: &mut fastrand::Rng) -> Self {
        let kind = loop {
            let kind = match rng.u32(..100) {
                0..40 => Kind::Instant,
                40..62 => Kind::Short,
                62..70 => Kind::FailsOnce,
                70..74 => Kind::FailsAlways,
                74..79 => Kind::SnoozesOnce,
                79..86 => Kind::Keyed,
                86..91 => Kind::CalledOff,
                _ => Kind::Effect,
            };
            match (kind, on) {
                (Kind::Keyed | Kind::CalledOff, Backend::Nats)
                | (Kind::Effect, Backend::Nats | Backend::Sqlite) => {}
                _ => break kind,
            }
        };
        let millis = match kind {
            Kind::Short => rng.u64(1..=50),
            Kind::CalledOff => rng.u64(..300),
            _ => 0,
        };
        let key = (kind == Kind::Keyed).then(|| rng.u32(..20));
        Self { kind, number, batch, millis, key, taken: Taken::Uncertain, called_off: None }
    }

    fn job(&self) -> NewJob {
        let task = Task { number: self.number as u64, millis: self.millis };
        let mut job = NewJob::new(self.kind.name()).payload(&task).expect("a task is JSON");
        job.max_attempts = self.kind.max_attempts();
        job.unique_key = self.key.map(|key| format!("key-{key}"));
        job
    }
}

/// What can befall them.
#[derive(Debug, Clone, Copy)]
enum Blow {
    KillWorker,
    KillServer,
    FreezeWorker,
    HangUp,
    Cut,
}

const DECK: [Blow; 9] = [
    Blow::KillWorker,
    Blow::KillWorker,
    Blow::KillWorker,
    Blow::KillServer,
    Blow::KillServer,
    Blow::FreezeWorker,
    Blow::FreezeWorker,
    Blow::HangUp,
    Blow::Cut,
];

/// Deals blows until it is told to be calm; then all that was broken is whole. What happened when.
async fn storm(
    setup: &Setup,
    server: &mut Server,
    link: &Proxy,
    workers: &mut Workers,
    progress: &Progress,
    calm: &CancellationToken,
) -> Vec<Fault> {
    let Some(between) = setup.between_faults else { return Vec::new() };
    let mut rng = fastrand::Rng::with_seed(setup.seed ^ 0xb10b);
    let (mut faults, mut deck) = (Vec::new(), Vec::new());
    loop {
        let pause = between.mul_f64(0.5 + rng.f64());
        if calm.run_until_cancelled(sleep(pause)).await.is_none() {
            return faults;
        }
        if deck.is_empty() {
            progress.dealt.store(!faults.is_empty(), Ordering::Relaxed);
            deck = DECK.to_vec();
            rng.shuffle(&mut deck);
        }
        let Some(blow) = deck.pop() else { continue };
        let at = rng.usize(..workers.running.len());
        let whom = workers.running[at].0;
        let from = now();
        let (what, worker) = match blow {
            Blow::KillWorker => {
                let (_, mut victim) = workers.running.swap_remove(at);
                victim.kill();
                workers.start_one();
                ("worker killed", Some(whom))
            }
            Blow::KillServer => {
                server.kill();
                sleep(Duration::from_millis(rng.u64(..300))).await;
                server.start_again().await;
                (SERVER_KILLED, None)
            }
            Blow::FreezeWorker => {
                workers.running[at].1.signal(Signal::STOP);
                sleep(setup.lease.mul_f64(1.1 + rng.f64() / 2.0)).await;
                workers.running[at].1.signal(Signal::CONT);
                ("worker frozen", Some(whom))
            }
            Blow::HangUp => {
                link.hang_up();
                ("connections ended", None)
            }
            Blow::Cut => {
                link.cut();
                sleep(setup.lease.mul_f64(rng.f64() * 1.3)).await;
                link.mend();
                ("connections silent", None)
            }
        };
        let mut until = now();
        if matches!((blow, setup.on), (Blow::KillServer, Backend::Nats)) {
            // A stream that is back delivers for a while what it has forgotten, or has in mind twice.
            until += micros(setup.lease);
        }
        faults.push(Fault { what, worker, from, until });
    }
}

impl Evidence {
    /// What workers said, and what they could not help. What is wrong with the logs themselves.
    fn read_logs(&mut self, folder: &Path, workers: usize) -> Vec<String> {
        let mut wrong = Vec::new();
        for worker in 0..workers {
            match log::read(folder, worker) {
                Ok(told) => {
                    self.runs.extend(told.runs);
                    self.overlapping += told.overlapping;
                    self.faults.extend(told.stalls.into_iter().map(|(from, until)| Fault {
                        what: "process starved",
                        worker: Some(worker),
                        from,
                        until,
                    }));
                }
                Err(error) => wrong.push(error),
            }
        }
        wrong
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).expect("it is short")
}
