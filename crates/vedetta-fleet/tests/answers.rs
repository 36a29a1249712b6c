//! What workers and supervisors make of answers that are late, of stops that are lost, and of workers that fall silent. The
//! server is made up, and time passes only when all wait.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use parking_lot::Mutex;
use tempfile::TempDir;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use vedetta_fleet::bus::TTL;
use vedetta_fleet::roster::Status;
use vedetta_fleet::wire::{
    Beat, Depth, Handed, Heard, Mood, Report, SlotsUsed, Stamp, Told, WorkerInfo,
};
use vedetta_fleet::{
    Balance, CommandId, Control, ControlError, Crew, Ending, Hire, Order, Settings, Supervising,
    Supervisor, Target,
};

/// How often a supervisor looks here.
const BEAT: Duration = Duration::from_millis(100);

/// A server of which a test says what it answers.
#[derive(Default)]
struct Server {
    beats: Mutex<Vec<Beat>>,
    reports: Mutex<Vec<Report>>,
    /// What is handed out next, and how long the answer with it takes.
    commands: Mutex<VecDeque<(Duration, Vec<Handed>)>>,
    workers: Mutex<Vec<WorkerInfo>>,
    queues: Vec<Depth>,
    /// When a worker was told to stop; the first such command is lost.
    stops: Mutex<Vec<Instant>>,
    frozen: Option<Frozen>,
    /// What goes wrong next, and what it is that a supervisor asks for then.
    faults: Mutex<VecDeque<(Asks, Fault)>>,
    /// What should not have been asked for; a panic here would only be a look that failed.
    wrong: Mutex<Vec<String>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asks {
    ForAll,
    ForAStop,
}

#[derive(Debug, Clone, Copy)]
enum Fault {
    Panics,
    Hangs,
    /// After it has reached whom it is for.
    DeliversAndPanics,
    DeliversAndHangs,
    /// It says so at once.
    Unavailable,
}

impl Fault {
    fn delivers(self) -> bool {
        matches!(self, Self::DeliversAndPanics | Self::DeliversAndHangs)
    }

    async fn strike(self) -> ControlError {
        match self {
            Self::Panics | Self::DeliversAndPanics => panic!("a defect"),
            Self::Hangs | Self::DeliversAndHangs => std::future::pending().await,
            Self::Unavailable => ControlError::Unavailable("the bus is away".into()),
        }
    }
}

/// Processes that give one sign of life and no other.
struct Frozen {
    program: PathBuf,
    /// When each was first seen.
    since: Mutex<BTreeMap<String, Instant>>,
    /// So long after it they are silent.
    silent: Duration,
    /// They said before that they end.
    left: bool,
}

impl Frozen {
    fn look(&self) -> Vec<WorkerInfo> {
        let mut since = self.since.lock();
        let there = started(&self.program);
        for id in there.keys() {
            since.entry(id.clone()).or_insert_with(Instant::now);
        }
        let info = |(id, since): (&String, &Instant)| {
            let seen = since.elapsed();
            let is_silent = seen >= self.silent;
            let status = match there.contains_key(id) {
                false => Status::Stopped,
                true if is_silent && self.left => Status::Stopped,
                true if is_silent => Status::Silent,
                true => Status::Running,
            };
            WorkerInfo { seen_ms: u64::try_from(seen.as_millis()).unwrap(), ..worker(id, status) }
        };
        since.iter().map(info).collect()
    }
}

/// The processes of a program by the ids they were given.
fn started(program: &Path) -> BTreeMap<String, String> {
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let entry = entry.ok()?;
        let line = String::from_utf8(fs::read(entry.path().join("cmdline")).ok()?).ok()?;
        let words: Vec<&str> = line.split('\0').collect();
        let is_it = words.iter().any(|word| Path::new(word) == program);
        let at = words.iter().position(|word| *word == "--id").filter(|_| is_it)?;
        Some((words[at + 1].to_owned(), entry.file_name().into_string().ok()?))
    });
    processes.collect()
}

/// A program that does nothing, and does not end by itself.
fn idle_program(folder: &TempDir) -> PathBuf {
    let program = folder.path().join("worker");
    fs::write(&program, "#!/bin/sh\nkill -STOP $$\n").unwrap();
    fs::set_permissions(&program, Permissions::from_mode(0o700)).unwrap();
    program
}

/// What tells a process from a later one of the same number.
fn birth(pid: u32) -> String {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let ticks = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    format!("{}:{ticks}", boot.trim())
}

fn boss() -> String {
    format!("boss:{}", vedetta_fleet::host_name())
}

/// Of a worker on a machine that is not this one.
fn worker(id: &str, status: Status) -> WorkerInfo {
    let now = Stamp(SystemTime::now());
    WorkerInfo {
        id: id.into(),
        supervisor: Some(boss()),
        queues: vec!["default".into()],
        pid: 1,
        host: "elsewhere".into(),
        version: "1".into(),
        status,
        inside: false,
        birth: None,
        slots: SlotsUsed::default(),
        running: Vec::new(),
        note: None,
        seen_ms: 0,
        started_at: now,
        last_heartbeat: now,
        created_at: now,
        updated_at: now,
    }
}

fn handed(id: &str, command: Order, expires: Duration) -> Handed {
    let expires_ms = u64::try_from(expires.as_millis()).unwrap();
    Handed { id: CommandId(id.into()), command, expires_ms }
}

impl Server {
    fn hand_out(&self, id: &str, command: Order, expires: Duration, takes: Duration) {
        self.commands.lock().push_back((takes, vec![handed(id, command, expires)]));
    }

    fn next_fault(&self, asks: Asks) -> Option<Fault> {
        let next = self.faults.lock().pop_front_if(|(place, _)| *place == asks);
        next.map(|(_, fault)| fault)
    }

    async fn next_command(&self) -> Vec<Handed> {
        let next = self.commands.lock().pop_front();
        let Some((takes, handed)) = next else { return Vec::new() };
        sleep(takes).await;
        handed
    }

    /// What was said to be done, since the beginning.
    fn done(&self) -> Vec<String> {
        let beats: Vec<CommandId> =
            self.beats.lock().iter().flat_map(|beat| beat.done.clone()).collect();
        let reports = self.reports.lock();
        let reports = reports.iter().flat_map(|report| report.done.clone());
        beats.into_iter().chain(reports).map(|id| id.0).collect()
    }

    fn wanted(&self) -> Option<u32> {
        self.reports.lock().last().map(|report| report.wanted)
    }

    /// A worker does what somebody told it.
    fn obeys(&self, id: &str) {
        match self.workers.lock().iter_mut().find(|worker| worker.id == id) {
            Some(it) => {
                (it.status, it.note) = (Status::Stopping, Some("it was told to stop".into()));
            }
            None => self.wrong.lock().push(format!("{id} was told to stop, and is not there")),
        }
    }

    fn stopping(&self) -> usize {
        let workers = self.workers.lock();
        workers.iter().filter(|worker| worker.status == Status::Stopping).count()
    }

    fn mood(&self) -> Option<Mood> {
        self.reports.lock().last().map(|report| report.state)
    }
}

#[async_trait]
impl Control for Server {
    async fn beat(&self, _: &str, beat: &Beat) -> Result<Heard, ControlError> {
        self.beats.lock().push(beat.clone());
        let commands = self.next_command().await;
        Ok(Heard { commands, supervisor_seen_ms: None, beat_ms: 100 })
    }

    async fn leave(&self, _: &str) -> Result<(), ControlError> {
        Ok(())
    }

    async fn listen(&self, _: &Target, _: &(dyn Fn() + Send + Sync)) -> Result<(), ControlError> {
        std::future::pending().await
    }

    async fn supervise(&self, _: &str, report: &Report) -> Result<Told, ControlError> {
        if let Some(fault) = self.next_fault(Asks::ForAll) {
            return Err(fault.strike().await);
        }
        self.reports.lock().push(report.clone());
        let commands = self.next_command().await;
        let mut workers = self.workers.lock().clone();
        workers.extend(self.frozen.iter().flat_map(Frozen::look));
        let beat_ms = u64::try_from(BEAT.as_millis()).unwrap();
        let queues = self.queues.clone();
        Ok(Told { commands, workers, queues, halted: false, silent_ms: 10_000, beat_ms })
    }

    async fn retire(&self, _: &str) -> Result<(), ControlError> {
        Ok(())
    }

    async fn tell(&self, id: &str, order: Order) -> Result<(), ControlError> {
        if order != Order::Stop {
            self.wrong.lock().push(format!("{id} was told to {order}"));
        }
        let fault = self.next_fault(Asks::ForAStop);
        if let Some(fault) = fault.filter(|fault| !fault.delivers()) {
            return Err(fault.strike().await);
        }
        self.stops.lock().push(Instant::now());
        if fault.is_some() || self.stops.lock().len() > 1 {
            self.obeys(id);
        }
        match fault {
            Some(fault) => Err(fault.strike().await),
            None => Ok(()),
        }
    }
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(3600), "waited an hour for {what}");
        sleep(BEAT / 2).await;
    }
}

fn supervise(server: &Arc<Server>, program: PathBuf, min: u32, max: u32) -> Supervising {
    let (balance, cool_down) = (Balance::Simple, Duration::ZERO);
    let settings = Settings { queues: vec!["default".into()], balance, min, max, cool_down };
    keep(server, program, settings)
}

fn keep(server: &Arc<Server>, program: PathBuf, settings: Settings) -> Supervising {
    let hire = Hire { program, arguments: vec![], variables: vec![] };
    Supervisor::new("boss", settings, hire, Arc::clone(server) as _).start()
}

/// Commands, and answers, that take this long.
const SHORT: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_secs(1);
/// An answer that takes longer does not come.
const SOON: Duration = Duration::from_secs(5);
/// Who said goodbye has so long to end.
const TO_END: Duration = Duration::from_secs(30);

#[tokio::test(start_paused = true)]
async fn a_worker_does_not_obey_a_command_whose_time_is_over_when_it_is_there() {
    let server = Arc::new(Server::default());
    server.hand_out("late", Order::Pause, SHORT, SHORT);
    let stop = CancellationToken::new();
    let crew = Crew::new("anna", Arc::clone(&server) as _, Vec::new());
    let crew = tokio::spawn(crew.run(stop.clone(), Duration::ZERO));
    until("some beats", || server.beats.lock().len() >= 3).await;
    assert!(server.beats.lock().iter().all(|beat| beat.state == Status::Running));
    // The same, in time.
    server.hand_out("early", Order::Pause, LONG, SHORT);
    let is_paused = || server.beats.lock().last().is_some_and(|beat| beat.state == Status::Paused);
    until("it is paused", is_paused).await;
    stop.cancel();
    assert_eq!(crew.await.unwrap(), (Ending::Told, 0));
    assert_eq!(server.done(), ["early"]);
}

#[tokio::test(start_paused = true)]
async fn a_supervisor_does_not_obey_a_command_whose_time_is_over_when_it_is_there() {
    let server = Arc::new(Server::default());
    server.workers.lock().push(worker("anna", Status::Running));
    server.hand_out("late", Order::Terminate, SHORT, SHORT);
    let supervisor = supervise(&server, "/bin/false".into(), 1, 1);
    until("some reports", || server.reports.lock().len() >= 3).await;
    assert_eq!(server.mood(), Some(Mood::Running));
    assert!(server.stops.lock().is_empty());
    // The same, in time.
    server.hand_out("early", Order::Terminate, LONG, SHORT);
    until("it is terminated", || server.mood() == Some(Mood::Terminated)).await;
    until("its worker is told", || !server.stops.lock().is_empty()).await;
    server.workers.lock().clear();
    supervisor.stop(Duration::ZERO).await;
    assert_eq!(server.done(), ["early"]);
}

#[tokio::test(start_paused = true)]
async fn a_worker_obeys_a_command_once_however_often_it_comes() {
    let server = Arc::new(Server::default());
    let stop = CancellationToken::new();
    let crew = Crew::new("anna", Arc::clone(&server) as _, Vec::new());
    let crew = tokio::spawn(crew.run(stop.clone(), Duration::ZERO));
    let is = |status| server.beats.lock().last().is_some_and(|beat| beat.state == status);
    for (id, command, then) in
        [("a", Order::Pause, Status::Paused), ("b", Order::Resume, Status::Running)]
    {
        server.hand_out(id, command, LONG, Duration::ZERO);
        until(id, || is(then)).await;
    }
    // What hands them out has lost that it did.
    server.hand_out("a", Order::Pause, LONG, Duration::ZERO);
    until("it is told", || server.done().len() == 3).await;
    let beats = server.beats.lock().len();
    until("some beats", || server.beats.lock().len() >= beats + 3).await;
    assert!(is(Status::Running));
    stop.cancel();
    assert_eq!(crew.await.unwrap(), (Ending::Told, 0));
    assert_eq!(server.done(), ["a", "b", "a"], "that it was done is told again");
}

#[tokio::test(start_paused = true)]
async fn a_supervisor_obeys_a_command_once_however_often_it_comes() {
    let server = Arc::new(Server::default());
    server.workers.lock().push(worker("anna", Status::Running));
    let supervisor = supervise(&server, "/bin/false".into(), 1, 4);
    let more = || Order::Start { queue: "default".into(), count: 1 };
    for id in ["a", "a", "b", "a"] {
        server.hand_out(id, more(), LONG, Duration::ZERO);
    }
    until("all are told", || server.done().len() == 4).await;
    let reports = server.reports.lock().len();
    until("some reports", || server.reports.lock().len() >= reports + 3).await;
    assert_eq!(server.wanted(), Some(3));
    assert_eq!(server.done(), ["a", "a", "b", "a"], "that it was done is told again");
    server.workers.lock().clear();
    supervisor.stop(Duration::ZERO).await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_stops_does_not_say_that_it_was_paused_or_resumed() {
    let server = Arc::new(Server::default());
    let orders =
        [("a", Order::Stop), ("b", Order::Pause), ("c", Order::Resume), ("d", Order::Stop)];
    let together = orders.map(|(id, command)| handed(id, command, LONG));
    server.commands.lock().push_back((Duration::ZERO, together.into()));
    let crew = Crew::new("anna", Arc::clone(&server) as _, Vec::new());
    let ended = crew.run(CancellationToken::new(), Duration::ZERO).await;
    assert_eq!(ended, (Ending::Told, 0));
    assert_eq!(server.done(), ["a", "d"], "those that were obeyed");
    let last = server.beats.lock().last().map(|beat| beat.state);
    assert_eq!(last, Some(Status::Stopping));
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_does_not_hear_that_it_is_to_stop_is_told_again_when_that_is_over() {
    let server = Arc::new(Server::default());
    server.workers.lock().push(worker("anna", Status::Running));
    let supervisor = supervise(&server, "/bin/false".into(), 0, 1);
    until("some reports", || server.reports.lock().len() >= 3).await;
    server.hand_out("end", Order::Terminate, LONG, Duration::ZERO);
    until("it is told twice", || server.stops.lock().len() >= 2).await;
    let stops = server.stops.lock().clone();
    let waited = stops[1] - stops[0];
    // Five seconds more: it may have taken so long to be given.
    let over = TTL + SOON;
    assert!(waited >= over && waited < over + 3 * BEAT, "{waited:?}");
    // It has a long job to finish, and says so.
    sleep(3 * TTL).await;
    assert_eq!(server.stops.lock().len(), 2);
    server.workers.lock().clear();
    supervisor.stop(Duration::ZERO).await;
    assert_eq!(*server.wrong.lock(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn workers_that_fall_silent_again_and_again_are_started_later_and_later_and_it_is_shown() {
    let folder = TempDir::new().unwrap();
    let program = idle_program(&folder);
    // At once, or when it seems to be well; alone, or beside one that is well.
    for (silent, others) in [(Duration::ZERO, 0), (Duration::from_secs(10), 1)] {
        let since = Mutex::default();
        let frozen = Some(Frozen { program: program.clone(), since, silent, left: false });
        let server = Arc::new(Server { frozen, ..Server::default() });
        let others_there = (0..others).map(|_| worker("ben", Status::Running));
        server.workers.lock().extend(others_there);
        let supervisor = supervise(&server, program.clone(), 1 + others, 1 + others);
        until("a crash loop", || server.mood() == Some(Mood::CrashLooping)).await;
        let last = server.reports.lock().last().unwrap().last_exit.clone();
        assert_eq!(last.as_deref(), Some("it was silent and killed"));
        let since = &server.frozen.as_ref().unwrap().since;
        let mut starts: Vec<Instant> = since.lock().values().copied().collect();
        starts.sort();
        assert_eq!(starts.len(), 5, "it is shown after the fifth");
        // 200 ms, 400 ms, … up to a fifth less.
        let mut wait = Duration::from_millis(160);
        for pair in starts.windows(2) {
            let waited = pair[1] - pair[0];
            assert!(waited >= silent + wait, "{waited:?} of {wait:?}");
            wait *= 2;
        }
        supervisor.stop(Duration::ZERO).await;
        assert!(started(&program).is_empty(), "all of them were killed");
    }
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_has_said_goodbye_and_does_not_end_is_killed_and_replaced() {
    let folder = TempDir::new().unwrap();
    let program = idle_program(&folder);
    let (since, silent) = (Mutex::default(), Duration::from_secs(10));
    let frozen = Some(Frozen { program: program.clone(), since, silent, left: true });
    let server = Arc::new(Server { frozen, ..Server::default() });
    let supervisor = supervise(&server, program.clone(), 1, 1);
    let since = || server.frozen.as_ref().unwrap().since.lock().clone();
    until("it is replaced", || since().len() == 2).await;
    let mut starts: Vec<Instant> = since().into_values().collect();
    starts.sort();
    let waited = starts[1] - starts[0];
    assert!(waited >= silent + TO_END && waited < silent + 2 * TO_END, "{waited:?}");
    until("it is gone", || started(&program).len() == 1).await;
    supervisor.stop(Duration::ZERO).await;
    assert!(started(&program).is_empty(), "nobody is left behind");
}

#[tokio::test(start_paused = true)]
async fn one_that_was_adopted_and_does_not_end_after_its_goodbye_is_killed() {
    let folder = TempDir::new().unwrap();
    let program = idle_program(&folder);
    let words = ["worker", "run", "--id", "anna", "--supervisor", &boss()];
    let mut process = std::process::Command::new(&program).args(words).spawn().unwrap();
    until("its command line", || started(&program).contains_key("anna")).await;
    let (pid, host) = (process.id(), vedetta_fleet::host_name());
    let birth = Some(birth(pid));
    let server = Arc::new(Server::default());
    server.workers.lock().push(WorkerInfo { pid, host, birth, ..worker("anna", Status::Running) });
    let supervisor = supervise(&server, "/bin/false".into(), 0, 1);
    until("some reports", || server.reports.lock().len() >= 3).await;
    server.workers.lock()[0].status = Status::Stopped;
    let left = Instant::now();
    // The server forgets it before long.
    sleep(TO_END / 2).await;
    server.workers.lock().clear();
    let reports = server.reports.lock().len();
    until("some reports", || server.reports.lock().len() >= reports + 3).await;
    assert!(process.try_wait().unwrap().is_none(), "it has time to end");
    until("it is killed", || started(&program).is_empty()).await;
    assert!(left.elapsed() >= TO_END, "{:?}", left.elapsed());
    assert!(!process.wait().unwrap().success());
    supervisor.stop(Duration::ZERO).await;
}

#[tokio::test(start_paused = true)]
async fn of_two_who_ask_for_the_last_place_one_is_told_that_its_worker_is_started() {
    let server = Arc::new(Server::default());
    let start = || Order::Start { queue: "default".into(), count: 1 };
    server.workers.lock().push(worker("anna", Status::Running));
    let supervisor = supervise(&server, "/bin/false".into(), 1, 2);
    server.hand_out("first", start(), LONG, Duration::ZERO);
    server.hand_out("second", start(), LONG, Duration::ZERO);
    until("both are handed out", || server.commands.lock().is_empty()).await;
    until("an answer", || !server.done().is_empty()).await;
    let reports = server.reports.lock().len();
    until("some reports", || server.reports.lock().len() >= reports + 3).await;
    assert_eq!(server.done(), ["first"]);
    assert_eq!(server.wanted(), Some(2));
    server.workers.lock().clear();
    supervisor.stop(Duration::ZERO).await;
}

#[tokio::test(start_paused = true)]
async fn with_auto_balance_a_worker_that_was_stopped_by_hand_is_not_replaced_at_once() {
    let (name, ready, running, oldest_ms) = ("default".into(), 0, 3, None);
    let queues = vec![Depth { name, ready, running, oldest_ms }];
    let server = Arc::new(Server { queues, ..Server::default() });
    let workers = ["anna", "ben", "carl"].map(|id| worker(id, Status::Running));
    server.workers.lock().extend(workers);
    let (balance, cool_down) = (Balance::Auto, Duration::from_secs(600));
    let queues = vec!["default".into()];
    let settings = Settings { queues, balance, min: 1, max: 4, cool_down };
    let supervisor = keep(&server, "/bin/false".into(), settings);
    until("those that are needed", || server.wanted() == Some(3)).await;
    let more = Order::Start { queue: "default".into(), count: 1 };
    server.hand_out("more", more, LONG, Duration::ZERO);
    until("one more", || server.wanted() == Some(4)).await;
    assert_eq!(server.done(), ["more"]);
    for (id, left) in [("anna", 3), ("ben", 2)] {
        server.obeys(id);
        until(id, || server.wanted() == Some(left)).await;
    }
    let stopped = Instant::now();
    until("the load decides", || server.wanted() == Some(3)).await;
    assert!(stopped.elapsed() + 3 * BEAT >= cool_down, "{:?}", stopped.elapsed());
    server.workers.lock().clear();
    supervisor.stop(Duration::ZERO).await;
}

#[tokio::test(start_paused = true)]
async fn a_look_that_panics_or_hangs_loses_no_worker_and_a_defect_is_shown() {
    let folder = TempDir::new().unwrap();
    let program = idle_program(&folder);
    let (since, silent) = (Mutex::default(), Duration::MAX);
    let frozen = Some(Frozen { program: program.clone(), since, silent, left: false });
    let server = Arc::new(Server { frozen, ..Server::default() });
    let supervisor = supervise(&server, program.clone(), 2, 2);
    until("two workers", || started(&program).len() == 2).await;
    let first = started(&program);
    let shown = || server.reports.lock().last().and_then(|report| report.last_exit.clone());
    // That a server is slow is no failure of the supervisor's, nor of a worker's.
    let defect = Some("a look at the workers failed: it panicked: a defect".to_owned());
    for (asks, fault, why) in [
        (Asks::ForAll, Fault::Hangs, &None),
        (Asks::ForAStop, Fault::Hangs, &None),
        (Asks::ForAll, Fault::Panics, &defect),
        (Asks::ForAStop, Fault::Panics, &defect),
    ] {
        server.faults.lock().extend([(asks, fault); 3]);
        // One too many, that is to be told so.
        server.workers.lock().push(worker("ben", Status::Running));
        until("all went wrong", || server.faults.lock().is_empty()).await;
        until("it is told", || server.stopping() == 1).await;
        assert_eq!(&shown(), why, "{asks:?}, {fault:?}");
        server.workers.lock().clear();
        let reports = server.reports.lock().len();
        until("a look without it", || server.reports.lock().len() > reports).await;
        assert_eq!(started(&program), first, "{asks:?}, {fault:?}");
    }
    // Their ends are seen as before.
    let (id, pid) = first.iter().next().unwrap();
    let killed = std::process::Command::new("kill").args(["-KILL", pid]).status().unwrap();
    assert!(killed.success());
    let is_replaced = || !started(&program).contains_key(id) && started(&program).len() == 2;
    until("it is replaced", is_replaced).await;
    let signal = Some("signal 9");
    assert_eq!(shown().as_deref(), signal);
    // It is not hidden by a server that is slow; by what is wrong with a later look it is.
    for (fault, why) in [(Fault::Hangs, signal), (Fault::Panics, defect.as_deref())] {
        server.faults.lock().push_back((Asks::ForAll, fault));
        until("it went wrong", || server.faults.lock().is_empty()).await;
        let reports = server.reports.lock().len();
        until("the next looks", || server.reports.lock().len() >= reports + 2).await;
        assert_eq!(shown().as_deref(), why, "{fault:?}");
    }
    supervisor.stop(Duration::ZERO).await;
    assert!(started(&program).is_empty(), "nobody is left behind");
    assert_eq!(*server.wrong.lock(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_stop_that_arrives_without_an_answer_is_not_taken_for_one_by_hand() {
    // The last is told again.
    for fault in [Fault::DeliversAndHangs, Fault::DeliversAndPanics, Fault::Unavailable] {
        let server = Arc::new(Server::default());
        let workers = ["anna", "ben"].map(|id| worker(id, Status::Running));
        server.workers.lock().extend(workers);
        let supervisor = supervise(&server, "/bin/false".into(), 1, 3);
        until("those that are there", || server.wanted() == Some(2)).await;
        let then = Fault::DeliversAndHangs;
        let faults = if fault.delivers() { vec![fault] } else { vec![fault, then] };
        server.faults.lock().extend(faults.into_iter().map(|fault| (Asks::ForAStop, fault)));
        server.workers.lock().push(worker("carl", Status::Running));
        let told = Instant::now();
        until("one of them stops", || server.stopping() == 1).await;
        assert!(told.elapsed() < SOON * 2, "{fault:?}: {:?}", told.elapsed());
        let reports = server.reports.lock().len();
        until("some looks", || server.reports.lock().len() >= reports + 3).await;
        assert_eq!(server.wanted(), Some(2), "{fault:?}");
        // As one by hand is.
        server.workers.lock().retain(|worker| worker.status != Status::Stopping);
        let left = server.workers.lock()[0].id.clone();
        server.obeys(&left);
        until("one less", || server.wanted() == Some(1)).await;
        server.workers.lock().clear();
        supervisor.stop(Duration::ZERO).await;
        assert_eq!(*server.wrong.lock(), [""; 0]);
    }
}

#[tokio::test(start_paused = true)]
async fn at_the_end_a_worker_is_told_again_at_once_if_the_server_did_not_take_it() {
    let server = Arc::new(Server::default());
    server.workers.lock().push(worker("anna", Status::Running));
    let supervisor = supervise(&server, "/bin/false".into(), 1, 1);
    until("some reports", || server.reports.lock().len() >= 3).await;
    server.faults.lock().extend([(Asks::ForAStop, Fault::Unavailable); 3]);
    server.stops.lock().push(Instant::now()); // none is lost
    let stopped = tokio::spawn(supervisor.stop(SOON / 2));
    until("it stops", || server.stopping() == 1 || stopped.is_finished()).await;
    server.workers.lock().clear();
    assert_eq!(stopped.await.unwrap(), 0, "none is killed");
    assert_eq!(*server.wrong.lock(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn workers_of_other_queues_go_on_while_those_for_their_places_cannot_be_started() {
    let server = Arc::new(Server::default());
    let workers = ["anna", "ben"].map(|id| worker(id, Status::Running));
    server.workers.lock().extend(workers);
    let (queues, cool_down) = (vec!["media".into()], Duration::ZERO);
    let settings = Settings { queues, balance: Balance::Simple, min: 2, max: 4, cool_down };
    let supervisor = keep(&server, "/nowhere/worker".into(), settings);
    until("a crash loop", || server.mood() == Some(Mood::CrashLooping)).await;
    assert_eq!(server.stops.lock().len(), 0);
    server.workers.lock().clear();
    supervisor.stop(Duration::ZERO).await;
}

#[tokio::test(start_paused = true)]
async fn a_supervisor_stops_however_many_workers_have_ended_meanwhile() {
    let folder = TempDir::new().unwrap();
    let (program, gate) = (folder.path().join("worker"), folder.path().join("gate"));
    let made = std::process::Command::new("mkfifo").arg(&gate).status().unwrap();
    assert!(made.success());
    fs::write(&program, format!("#!/bin/sh\nread line < '{}'\n", gate.display())).unwrap();
    fs::set_permissions(&program, Permissions::from_mode(0o700)).unwrap();
    let server = Arc::new(Server::default());
    let supervisor = supervise(&server, program.clone(), 100, 100);
    until("all of them", || started(&program).len() == 100).await;
    // All end at once, while no look gets as far as their ends.
    server.faults.lock().extend([(Asks::ForAll, Fault::Hangs); 1000]);
    until("a look that hangs", || server.faults.lock().len() < 1000).await;
    drop(fs::OpenOptions::new().write(true).open(&gate).unwrap());
    until("they have ended", || started(&program).is_empty()).await;
    let left = server.faults.lock().len();
    until("the next looks", || server.faults.lock().len() + 3 < left).await;
    let stopped = tokio::spawn(supervisor.stop(Duration::ZERO));
    until("it ends", || stopped.is_finished()).await;
}
