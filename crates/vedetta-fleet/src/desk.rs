//! The fleet as a server knows it: who is there, and what they are to do.
//!
//! ```text
//!  beats ──► book, in memory ──every 10 s, and what changed at once──► Roster
//!              │ hint: a command may wait ◄── wake-ups, and a look at the bus every beat
//!              └──► take from the Bus, with the answer to the next beat
//! ```
//!
//! A beat costs a look at the book and no more, so that a hundred workers cost next to nothing. When the bus
//! or the roster is away, beats are answered all the same: commands wait, workers go on.
//!
//! After a start, those who were there before count as just seen: they get the time to say so again before
//! anybody replaces them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, interval_at};
use tokio_util::task::AbortOnDropHandle;
use vedetta_core::explain;
use vedetta_jobs::{JobsError, Ledger, check_name};

use crate::bus::{Bus, BusError, CommandId, Order, State, Taken, Target, Wake};
use crate::host::{host_name, is_gone, now_ms};
use crate::roster::{Roster, RosterError, Status, SupervisorRecord, WorkerRecord};
use crate::wire::{
    Beat, CommandInfo, Depth, Handed, Heard, LONGEST_NOTE, Mood, Report, ReportInfo, SlotsUsed,
    Stamp, SupervisorInfo, Told, WorkerInfo, Workers,
};

/// What was only heard is written this often.
const WRITE: Duration = Duration::from_secs(10);
/// Records of those who are gone or silent are kept for so long.
const RETAINED: Duration = Duration::from_secs(600);
/// Who ended within that, has just now.
const JUST_NOW: Duration = Duration::from_secs(30);
/// Workers and supervisors that a server knows at once.
const MOST: usize = 10_000;
/// Names in one beat.
const MOST_NAMES: usize = 1_000;
/// Commands whose end the bus was not told yet.
const MOST_UNTOLD: usize = 1_000;
/// Commands whose time is kept here; of the oldest beyond that it is the bus's alone.
const MOST_PUT: usize = 10_000;
/// The longest name of a host or a version.
const LONGEST: usize = 255;
/// The longest id of a command; ours are shorter.
const LONGEST_ID: usize = 64;
/// The last moment that is shown, in milliseconds: the end of the year 9999.
const LAST_MS: u64 = 253_402_300_799_999;

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FleetError {
    /// There is no such worker, supervisor or command.
    #[error("{0}")]
    NotFound(String),
    /// Not as things are.
    #[error("{0}")]
    Conflict(String),
    /// Not like this.
    #[error("{0}")]
    Invalid(String),
    /// Try again later.
    #[error("the fleet's records cannot be reached")]
    Unavailable(#[source] Box<dyn Error + Send + Sync>),
    /// Look at what is wrong.
    #[error("the fleet's records failed")]
    Failed(#[source] Box<dyn Error + Send + Sync>),
}

impl From<BusError> for FleetError {
    fn from(error: BusError) -> Self {
        match error {
            BusError::TooMany => Self::Conflict(error.to_string()),
            BusError::Unavailable(_) => Self::Unavailable(Box::new(error)),
            error => Self::Failed(Box::new(error)),
        }
    }
}

impl From<RosterError> for FleetError {
    fn from(error: RosterError) -> Self {
        match error {
            RosterError::Unavailable(_) => Self::Unavailable(Box::new(error)),
            RosterError::Failed(_) => Self::Failed(Box::new(error)),
        }
    }
}

impl From<JobsError> for FleetError {
    fn from(error: JobsError) -> Self {
        match error {
            JobsError::Invalid(why) => Self::Invalid(why),
            JobsError::Unavailable(source) => Self::Unavailable(source),
            error => Self::Failed(Box::new(error)),
        }
    }
}

/// The fleet of a server; clones share it.
#[derive(Clone)]
pub struct Fleet {
    desk: Arc<Desk>,
    /// Ends with the last clone.
    _task: Arc<AbortOnDropHandle<()>>,
}

struct Desk {
    bus: Arc<dyn Bus>,
    roster: Arc<dyn Roster>,
    ledger: Arc<dyn Ledger>,
    beat: Duration,
    /// Queues that handlers are declared for here.
    declared: BTreeSet<String>,
    book: Mutex<Book>,
    opened: Instant,
}

#[derive(Default)]
struct Book {
    workers: BTreeMap<String, Entry>,
    supervisors: BTreeMap<String, Boss>,
    /// The bus could not be told that these were obeyed.
    untold: Vec<CommandId>,
    /// What was put here and not handed out here, and until when it may be: the clock of a bus may be set back.
    put: VecDeque<(CommandId, Instant)>,
}

/// A worker.
struct Entry {
    record: WorkerRecord,
    /// When it counts as last seen.
    seen: Instant,
    /// When that was, for people.
    heartbeat: SystemTime,
    slots: SlotsUsed,
    running: Vec<u64>,
    line: Line,
}

/// A supervisor.
struct Boss {
    host: String,
    report: Option<Report>,
    /// It was told to end its workers, and nothing since. Outlives its process.
    halted: bool,
    /// The same, as it is on the disk.
    kept: bool,
    seen: Instant,
    /// When the next of its name last said that it begins, and could not yet.
    heir: Option<Instant>,
    line: Line,
}

impl Boss {
    fn is_alive(&self, silent: Duration) -> bool {
        // What it says to another server is written, and read here, now and then.
        let late = if self.report.is_none() { WRITE * 2 } else { Duration::ZERO };
        self.seen.elapsed() <= silent + late
    }
}

/// How somebody hears of commands.
struct Line {
    /// A command may wait.
    hint: bool,
    /// Heard by all who listen: none takes it from another.
    bell: watch::Sender<()>,
    /// It speaks to this server, and what it said is not written.
    unwritten: bool,
}

impl Default for Line {
    fn default() -> Self {
        // What was put before it came nobody told.
        Self { hint: true, bell: watch::Sender::new(()), unwritten: false }
    }
}

impl Line {
    fn ring(&mut self) {
        self.hint = true;
        self.bell.send_replace(());
    }
}

impl Entry {
    fn is_silent(&self, silent: Duration) -> bool {
        self.record.status != Status::Stopped && self.seen.elapsed() > silent
    }

    fn is_there(&self, silent: Duration) -> bool {
        self.record.status != Status::Stopped && !self.is_silent(silent)
    }

    fn to_write(&self) -> WorkerRecord {
        WorkerRecord { seen: self.seen.elapsed(), ..self.record.clone() }
    }

    fn info(&self, silent: Duration) -> WorkerInfo {
        let record = self.record.clone();
        let status = if self.is_silent(silent) { Status::Silent } else { record.status };
        WorkerInfo {
            id: record.id,
            supervisor: record.supervisor,
            queues: record.queues,
            pid: record.pid,
            host: record.host,
            version: record.version,
            status,
            inside: record.inside,
            birth: record.birth,
            slots: self.slots,
            running: self.running.clone(),
            note: record.note,
            seen_ms: millis(self.seen.elapsed()),
            started_at: Stamp(record.started),
            last_heartbeat: Stamp(self.heartbeat),
            created_at: Stamp(record.created),
            updated_at: Stamp(record.updated),
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn time(millis: u64) -> SystemTime {
    let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(millis.min(LAST_MS)));
    time.unwrap_or(SystemTime::UNIX_EPOCH)
}

fn back(ago: Duration) -> Instant {
    Instant::now().checked_sub(ago).unwrap_or_else(Instant::now)
}

/// What a process wrote, as it can be kept: its last lines, if it is too long, and no NUL, which PostgreSQL has no place
/// for. Of a line that would have to be cut nothing is kept: what makes a secret of the rest may be missing.
pub(crate) fn tail(text: String) -> String {
    let text = if text.contains('\0') { text.replace('\0', "\u{fffd}") } else { text };
    let Some(from) = text.len().checked_sub(LONGEST_NOTE).filter(|from| *from > 0) else {
        return text;
    };
    let end = text.bytes().skip(from - 1).position(|byte| byte == b'\n');
    end.map_or_else(|| "…".to_owned(), |end| text[from + end..].to_owned())
}

fn check(what: &str, is_right: bool) -> Result<(), FleetError> {
    if is_right { Ok(()) } else { Err(FleetError::Invalid(format!("there are too many {what}"))) }
}

fn check_names(queues: &[String]) -> Result<(), FleetError> {
    check("queues", queues.len() <= MOST_NAMES)?;
    Ok(queues.iter().try_for_each(|queue| check_name("queue", queue))?)
}

/// Names of hosts, versions and the like.
fn check_words(words: &[&str]) -> Result<(), FleetError> {
    if words.iter().any(|word| word.len() > LONGEST || word.contains(char::is_control)) {
        let why = format!(
            "host, version, birth, instance and balance have {LONGEST} bytes at most, and no control characters"
        );
        return Err(FleetError::Invalid(why));
    }
    Ok(())
}

fn check_done(done: &[CommandId]) -> Result<(), FleetError> {
    check("commands", done.len() <= MOST_NAMES)?;
    let is_id = |id: &CommandId| {
        id.0.len() <= LONGEST_ID && id.0.bytes().all(|byte| byte.is_ascii_alphanumeric())
    };
    if done.iter().all(is_id) {
        return Ok(());
    }
    Err(FleetError::Invalid("what was done is told by the ids that commands came with".into()))
}

fn check_beat(id: &str, beat: &Beat) -> Result<(), FleetError> {
    check_name("worker", id)?;
    check_names(&beat.queues)?;
    if let Some(supervisor) = &beat.supervisor {
        check_name("supervisor", supervisor)?;
    }
    check("running jobs", beat.running.len() <= 10 * MOST_NAMES)?;
    check_done(&beat.done)?;
    check_words(&[&beat.host, &beat.version, beat.birth.as_deref().unwrap_or_default()])?;
    if matches!(beat.state, Status::Silent | Status::Stopped) {
        let why = "a worker that beats is running, paused or stopping";
        return Err(FleetError::Invalid(why.into()));
    }
    Ok(())
}

impl Fleet {
    /// The fleet as the roster knows it, with handlers declared here for these queues; its workers beat this
    /// often. It has to be called where tokio runs.
    pub async fn open(
        bus: Arc<dyn Bus>,
        roster: Arc<dyn Roster>,
        ledger: Arc<dyn Ledger>,
        declared: impl IntoIterator<Item = String>,
        beat: Duration,
    ) -> Result<Self, FleetError> {
        let declared = declared.into_iter().collect();
        let (book, opened) = (Mutex::default(), Instant::now());
        let desk = Arc::new(Desk { bus, roster, ledger, beat, declared, book, opened });
        desk.roster.prune(RETAINED).await?;
        desk.refresh(true).await?;
        desk.clean().await;
        let task = tokio::spawn(Arc::clone(&desk).keep());
        Ok(Self { desk, _task: Arc::new(AbortOnDropHandle::new(task)) })
    }

    /// How long nothing may be heard of a worker.
    pub fn silent(&self) -> Duration {
        self.desk.silent()
    }

    /// A worker's sign of life; `inside`, if it is part of this process.
    pub async fn heard(&self, id: &str, beat: Beat, inside: bool) -> Result<Heard, FleetError> {
        check_beat(id, &beat)?;
        let (done, supervisor) = (beat.done.clone(), beat.supervisor.clone());
        let changed = self.desk.note(id, beat, inside)?;
        if let Some(changed) = changed {
            self.desk.write_now(&[changed]).await;
        }
        self.desk.applied(done).await;
        let taken = self.desk.take(&Target::worker(id)).await;
        Ok(Heard {
            commands: taken,
            supervisor_seen_ms: supervisor.map(|name| millis(self.desk.boss_seen(&name))),
            beat_ms: millis(self.desk.beat),
        })
    }

    /// A worker is gone, in good order. Whether it was known.
    pub async fn left(&self, id: &str) -> Result<bool, FleetError> {
        Ok(self.desk.ended(&[(id.to_owned(), None)]).await > 0)
    }

    /// Listens for commands for a worker or a supervisor, beside whoever else does.
    pub fn listen(&self, target: &Target) -> Result<Wakes, FleetError> {
        let mut book = self.desk.book.lock();
        let line = book.line(target);
        let missing = || FleetError::NotFound(format!("nobody is called {:?}", target.key()));
        Ok(Wakes(line.ok_or_else(missing)?.bell.subscribe()))
    }

    /// A supervisor's sign of life.
    pub async fn supervised(&self, name: &str, mut report: Report) -> Result<Told, FleetError> {
        check_name("supervisor", name)?;
        check_names(&report.queues)?;
        check("ended workers", report.ended.len() <= MOST_NAMES)?;
        check_done(&report.done)?;
        check_words(&[&report.host, &report.version, &report.instance, &report.balance])?;
        report.stderr = report.stderr.map(tail);
        report.last_exit = report.last_exit.map(tail);
        let done = std::mem::take(&mut report.done);
        let ended: Vec<_> = std::mem::take(&mut report.ended)
            .into_iter()
            .map(|ended| (ended.id, Some(ended.exit)))
            .collect();
        let (depths, ends) = (report.depths, report.state == Mood::Stopping);
        if report.state == Mood::Starting {
            // The one before it may have been told something at another server.
            self.desk.refresh(false).await?;
        }
        let Noted { is_new, is_told, halted } = self.desk.note_boss(name, report)?;
        if is_told {
            // Before anybody hears that it was obeyed.
            self.desk.keep_told(|boss, _| boss == name).await?;
        } else if is_new {
            let records = self.desk.bosses(|boss, _| boss == name);
            if let Err(error) = self.desk.roster.save(&[], &records).await {
                tracing::warn!(error = explain(&error), "a supervisor is not on the roster yet");
            }
        }
        self.desk.ended(&ended).await;
        self.desk.applied(done).await;
        let queues = if depths { self.desk.depths().await? } else { Vec::new() };
        // They are taken once, so nothing may fail after it. Who ends obeys nothing more: what waits is for the next
        // of its name.
        let target = Target::supervisor(name);
        let commands = if ends { Vec::new() } else { self.desk.take(&target).await };
        let silent = self.desk.silent();
        let book = self.desk.book.lock();
        // How those ended that did just now it may not know yet.
        let workers = book.workers.values().filter(|entry| {
            entry.record.supervisor.as_deref() == Some(name)
                && (entry.record.status != Status::Stopped || entry.seen.elapsed() < JUST_NOW)
        });
        Ok(Told {
            commands,
            workers: workers.map(|entry| entry.info(silent)).collect(),
            queues,
            halted,
            silent_ms: millis(silent),
            beat_ms: millis(self.desk.beat),
        })
    }

    /// A supervisor is gone, in good order; or it is for good, if it gave no sign of life. Whether it was known.
    pub async fn retired(&self, name: &str) -> Result<bool, FleetError> {
        let silent = self.desk.silent();
        let gone = {
            let mut book = self.desk.book.lock();
            let Some(boss) = book.supervisors.get_mut(name) else { return Ok(false) };
            // So old that it is removed with the next look; but what one that was there was told last is kept for the next.
            let (host, halted) = (boss.host.clone(), boss.halted && boss.is_alive(silent));
            let gone = SupervisorRecord { name: name.into(), host, halted, seen: RETAINED };
            if halted {
                (boss.report, boss.seen, boss.line.unwritten) = (None, back(RETAINED), false);
            } else {
                book.supervisors.remove(name);
            }
            gone
        };
        self.desk.roster.save(&[], &[gone]).await?;
        Ok(true)
    }

    /// The supervisors.
    pub fn supervisors(&self) -> Vec<SupervisorInfo> {
        let book = self.desk.book.lock();
        let supervisors = book.supervisors.iter().map(|(name, boss)| SupervisorInfo {
            name: name.clone(),
            host: boss.host.clone(),
            halted: boss.halted,
            report: boss.report.as_ref().map(|report| ReportInfo {
                state: report.state,
                queues: report.queues.clone(),
                balance: report.balance.clone(),
                min: report.min,
                max: report.max,
                wanted: report.wanted,
                last_exit: report.last_exit.clone(),
                stderr: report.stderr.clone(),
            }),
            seen_ms: millis(boss.seen.elapsed()),
        });
        supervisors.collect()
    }

    /// Everybody.
    pub fn list(&self) -> Workers {
        Workers { workers: self.workers(), supervisors: self.supervisors() }
    }

    /// The workers.
    pub fn workers(&self) -> Vec<WorkerInfo> {
        let silent = self.desk.silent();
        let book = self.desk.book.lock();
        // What tells their processes apart is for their supervisors alone.
        let shown = |entry: &Entry| WorkerInfo { birth: None, ..entry.info(silent) };
        let mut workers: Vec<WorkerInfo> = book.workers.values().map(shown).collect();
        // Those that are gone are seen last.
        workers.sort_by_key(|worker| matches!(worker.status, Status::Stopped | Status::Silent));
        workers
    }

    /// Gives a worker a command: to stop, to pause or to resume.
    pub async fn tell(
        &self,
        id: &str,
        order: &Order,
        ttl: Duration,
    ) -> Result<CommandInfo, FleetError> {
        {
            let book = self.desk.book.lock();
            let entry = book.workers.get(id);
            let entry =
                entry.ok_or_else(|| FleetError::NotFound(format!("there is no worker {id:?}")))?;
            if entry.record.status == Status::Stopped {
                return Err(FleetError::Conflict(format!("the worker {id:?} has ended")));
            }
            if entry.record.inside && *order == Order::Stop {
                return Err(FleetError::Conflict(format!(
                    "the worker {id:?} is part of a server and ends with it: pause it instead"
                )));
            }
        }
        self.desk.put(&Target::worker(id), order, ttl).await
    }

    /// Has a supervisor start workers of a queue.
    pub async fn start(
        &self,
        queue: &str,
        count: u32,
        ttl: Duration,
    ) -> Result<CommandInfo, FleetError> {
        check_name("queue", queue)?;
        if count == 0 {
            return Err(FleetError::Invalid("count is 1 or more".into()));
        }
        let name = self.desk.starter(queue, count)?;
        let order = Order::Start { queue: queue.to_owned(), count };
        self.desk.put(&Target::supervisor(&name), &order, ttl).await
    }

    /// Has every supervisor replace its workers, one at a time.
    pub async fn restart(&self, ttl: Duration) -> Result<Vec<CommandInfo>, FleetError> {
        let names = self.desk.alive();
        if names.is_empty() {
            return Err(FleetError::Conflict(NO_SUPERVISOR.into()));
        }
        self.desk.tell_absent(&names, false).await?;
        let targets = names.iter().map(|name| Target::supervisor(name));
        self.put_all(targets.map(|target| (target, Order::Restart)), ttl).await
    }

    /// Has every worker that is not part of a server end, and none started in its place; nor by a supervisor that is
    /// away, when it is back.
    pub async fn terminate(&self, ttl: Duration) -> Result<Vec<CommandInfo>, FleetError> {
        let (names, silent) = (self.desk.alive(), self.desk.silent());
        self.desk.tell_absent(&names, true).await?;
        let alone: Vec<Target> = {
            let book = self.desk.book.lock();
            let is_kept = |entry: &Entry| {
                entry.record.supervisor.as_ref().is_some_and(|name| names.contains(name))
            };
            book.workers
                .values()
                .filter(|entry| entry.is_there(silent) && !entry.record.inside && !is_kept(entry))
                .map(|entry| Target::worker(&entry.record.id))
                .collect()
        };
        let supervisors = names.iter().map(|name| (Target::supervisor(name), Order::Terminate));
        let alone = alone.into_iter().map(|target| (target, Order::Stop));
        self.put_all(supervisors.chain(alone), ttl).await
    }

    async fn put_all(
        &self,
        orders: impl Iterator<Item = (Target, Order)>,
        ttl: Duration,
    ) -> Result<Vec<CommandInfo>, FleetError> {
        let mut put = Vec::new();
        for (target, order) in orders.collect::<Vec<_>>() {
            put.push(self.desk.put(&target, &order, ttl).await?);
        }
        Ok(put)
    }

    /// What became of a command.
    pub async fn command(&self, id: &str) -> Result<CommandInfo, FleetError> {
        let found = self.desk.bus.command(&CommandId(id.to_owned())).await?;
        let missing = || FleetError::NotFound(format!("there is no command {id:?}, or no more"));
        Ok(found.ok_or_else(missing)?.into())
    }

    /// Writes what was only heard.
    pub async fn close(&self) {
        if let Err(error) = self.desk.write().await {
            tracing::warn!(error = explain(&error), "the roster was not written");
        }
    }
}

const NO_SUPERVISOR: &str = "there is no supervisor: declare one as [supervisor.NAME] in the config file, \
     or run `vedetta supervise`";

/// Hears when there may be a command.
pub struct Wakes(watch::Receiver<()>);

impl Wakes {
    /// Returns when there may be one; what happens between two calls is not lost. An error when whoever is listened
    /// for is known no more.
    pub async fn next(&mut self) -> Result<(), FleetError> {
        let gone = |_| FleetError::NotFound("nobody is called so any more".into());
        self.0.changed().await.map_err(gone)
    }
}

/// What a supervisor's report changed.
struct Noted {
    /// It is to be written at once.
    is_new: bool,
    /// What it was told last is not kept yet.
    is_told: bool,
    /// It was told to end its workers, maybe before it was started.
    halted: bool,
}

impl Book {
    fn line(&mut self, target: &Target) -> Option<&mut Line> {
        match target.key().split_once(':')? {
            ("worker", id) => self.workers.get_mut(id).map(|entry| &mut entry.line),
            (_, name) => self.supervisors.get_mut(name).map(|boss| &mut boss.line),
        }
    }

    /// What was put here is not handed out after its time, whatever the bus makes of it.
    fn in_time(&mut self, mut taken: Taken) -> Option<Taken> {
        let at = self.put.iter().position(|(id, _)| *id == taken.id);
        if let Some((_, end)) = at.and_then(|at| self.put.remove(at)) {
            taken.left = taken.left.min(end.saturating_duration_since(Instant::now()));
        }
        (taken.left > Duration::ZERO).then_some(taken)
    }

    fn ring(&mut self, target: &Target) {
        if let Some(line) = self.line(target) {
            line.ring();
        }
    }
}

impl Desk {
    /// Some beats may be lost or late.
    fn silent(&self) -> Duration {
        self.beat * 3 + Duration::from_secs(1)
    }

    /// Notes a beat. What is to be written at once.
    fn note(&self, id: &str, beat: Beat, inside: bool) -> Result<Option<WorkerRecord>, FleetError> {
        let now = time(now_ms());
        let mut book = self.book.lock();
        if !book.workers.contains_key(id) && book.workers.len() >= MOST {
            let why = format!("there are {MOST} workers already");
            return Err(FleetError::Conflict(why));
        }
        let said = WorkerRecord {
            id: id.to_owned(),
            supervisor: beat.supervisor,
            queues: beat.queues,
            pid: beat.pid,
            host: beat.host,
            version: beat.version,
            status: beat.state,
            inside,
            birth: beat.birth,
            capacity: beat.slots.capacity,
            note: beat.note.map(tail),
            started: time(beat.started),
            seen: Duration::ZERO,
            created: now,
            updated: now,
        };
        let mut is_new = false;
        let entry = book.workers.entry(id.to_owned()).or_insert_with(|| {
            is_new = true;
            Entry {
                record: said.clone(),
                seen: Instant::now(),
                heartbeat: now,
                slots: SlotsUsed::default(),
                running: Vec::new(),
                line: Line::default(),
            }
        });
        let (created, updated) = (entry.record.created, entry.record.updated);
        let same = WorkerRecord { created, updated, ..said.clone() };
        let changed = is_new || entry.record != same;
        if changed {
            entry.record = WorkerRecord { created, ..said };
        }
        (entry.seen, entry.heartbeat) = (Instant::now(), now);
        (entry.slots, entry.running) = (beat.slots, beat.running);
        entry.line.unwritten = !changed;
        Ok(changed.then(|| entry.to_write()))
    }

    /// Notes a supervisor's report.
    fn note_boss(&self, name: &str, report: Report) -> Result<Noted, FleetError> {
        let silent = self.silent();
        let mut book = self.book.lock();
        // Those that are gone, and whose last command is kept, are not in the way of others, up to as many again.
        let known = || book.supervisors.values().filter(|boss| boss.report.is_some()).count();
        let is_full = || known() >= MOST || book.supervisors.len() >= 2 * MOST;
        if !book.supervisors.contains_key(name) && is_full() {
            let why = "there are too many supervisors: delete those that are gone for good";
            return Err(FleetError::Conflict(why.into()));
        }
        let boss = book.supervisors.entry(name.to_owned()).or_insert_with(|| Boss {
            host: report.host.clone(),
            report: None,
            halted: false,
            kept: false,
            seen: Instant::now(),
            heir: None,
            line: Line::default(),
        });
        let other = boss.report.as_ref().filter(|old| old.instance != report.instance);
        if other.is_some() && boss.seen.elapsed() <= silent {
            if report.state == Mood::Starting {
                // It may be the same one after a restart: its workers wait for it.
                boss.heir = Some(Instant::now());
            }
            return Err(FleetError::Conflict(format!(
                "another process is the supervisor {name:?}: give this one another name"
            )));
        }
        let halted = match report.state {
            Mood::Terminated => true,
            Mood::Running | Mood::Restarting | Mood::CrashLooping => false,
            // It does not say what it was told.
            Mood::Starting | Mood::Stopping => boss.halted,
        };
        let (is_new, is_told) = (boss.report.is_none(), boss.kept != halted);
        boss.halted = halted;
        boss.host.clone_from(&report.host);
        boss.report = Some(report);
        boss.seen = Instant::now();
        boss.line.unwritten = true;
        Ok(Noted { is_new, is_told, halted })
    }

    /// How long ago a supervisor was there, as far as we can know: nobody is missed before we were there.
    fn boss_seen(&self, name: &str) -> Duration {
        let book = self.book.lock();
        let seen = book.supervisors.get(name).map(|boss| boss.heir.max(Some(boss.seen)));
        let seen = seen.flatten().map(|seen| seen.elapsed());
        seen.unwrap_or(Duration::MAX).min(self.opened.elapsed())
    }

    /// Supervisors that are there.
    fn alive(&self) -> Vec<String> {
        let silent = self.silent();
        let book = self.book.lock();
        let alive = book.supervisors.iter().filter(|(_, boss)| boss.is_alive(silent));
        alive.map(|(name, _)| name.clone()).collect()
    }

    /// Those who are not there are told when they begin anew.
    async fn tell_absent(&self, there: &[String], halted: bool) -> Result<(), RosterError> {
        let is_absent = |name: &str| !there.iter().any(|it| it == name);
        for (name, boss) in &mut self.book.lock().supervisors {
            if is_absent(name) {
                boss.halted = halted;
            }
        }
        self.keep_told(|name, boss| is_absent(name) && boss.halted != boss.kept).await
    }

    /// Who is to start workers: the supervisor that has the most room for them.
    fn starter(&self, queue: &str, count: u32) -> Result<String, FleetError> {
        let silent = self.silent();
        let book = self.book.lock();
        let able: Vec<(&String, &Boss, &Report)> = book
            .supervisors
            .iter()
            .filter_map(|(name, boss)| Some((name, boss, boss.report.as_ref()?)))
            .filter(|(_, _, report)| report.queues.iter().any(|able| able == queue))
            .collect();
        if able.is_empty() && !self.declared.contains(queue) {
            return Err(FleetError::Invalid(format!(
                "no handler is declared for the queue {queue:?}: add one to the config file"
            )));
        }
        let there = able.into_iter().filter(|(_, boss, _)| boss.seen.elapsed() <= silent);
        // One that was told to end its workers has the least of them, too, when it begins again.
        let has = |report: &Report| report.wanted.max(report.min);
        let room = |report: &Report| report.max.saturating_sub(has(report));
        let best = there.max_by_key(|(_, _, report)| room(report));
        let Some((name, _, report)) = best else {
            return Err(FleetError::Conflict(NO_SUPERVISOR.into()));
        };
        if room(report) < count {
            return Err(FleetError::Conflict(format!(
                "the supervisor {name:?} has {} workers and may have {}: raise its max",
                has(report),
                report.max
            )));
        }
        Ok(name.clone())
    }

    async fn depths(&self) -> Result<Vec<Depth>, FleetError> {
        let counts = self.ledger.queues().await?;
        let depths = counts.into_iter().map(|counts| Depth {
            name: counts.name,
            ready: counts.ready,
            running: counts.running,
            oldest_ms: counts.oldest.map(millis),
        });
        Ok(depths.collect())
    }

    /// Workers have ended. How many of them were there.
    async fn ended(&self, ended: &[(String, Option<String>)]) -> usize {
        let changed: Vec<WorkerRecord> = {
            let mut book = self.book.lock();
            let ended = ended.iter().filter_map(|(id, exit)| {
                let entry = book.workers.get_mut(id)?;
                if entry.record.status != Status::Stopped {
                    entry.seen = Instant::now();
                    // Who left in good order has said why.
                    if let Some(exit) = exit {
                        entry.record.note = Some(tail(exit.clone()));
                    }
                }
                entry.record.status = Status::Stopped;
                entry.record.updated = time(now_ms());
                (entry.slots.used, entry.running) = (0, Vec::new());
                Some(entry.to_write())
            });
            ended.collect()
        };
        if !changed.is_empty() {
            self.write_now(&changed).await;
        }
        changed.len()
    }

    /// Has a command wait.
    async fn put(
        &self,
        target: &Target,
        order: &Order,
        ttl: Duration,
    ) -> Result<CommandInfo, FleetError> {
        // From before it is there: nobody is to have it for longer.
        let end = Instant::now().checked_add(ttl);
        let record = self.bus.put(target, order, ttl).await?;
        if let (State::Requested, Some(end)) = (record.state, end) {
            let mut book = self.book.lock();
            if book.put.len() >= MOST_PUT {
                book.put.pop_front();
            }
            book.put.push_back((record.id.clone(), end));
        }
        Ok(record.into())
    }

    /// What waits for somebody, if there may be something.
    async fn take(&self, target: &Target) -> Vec<Handed> {
        {
            let mut book = self.book.lock();
            let Some(line) = book.line(target).filter(|line| line.hint) else { return Vec::new() };
            line.hint = false;
        }
        match self.bus.take(target).await {
            Ok(taken) => {
                let mut book = self.book.lock();
                taken.into_iter().filter_map(|taken| book.in_time(taken)).map(handed).collect()
            }
            Err(error) => {
                tracing::warn!(error = explain(&error), "commands wait: the bus is away");
                if let Some(line) = self.book.lock().line(target) {
                    line.hint = true;
                }
                Vec::new()
            }
        }
    }

    /// Tells the bus what was obeyed; later, if it is away.
    async fn applied(&self, done: Vec<CommandId>) {
        if done.is_empty() {
            return;
        }
        if let Err(error) = self.bus.applied(&done).await {
            tracing::debug!(error = explain(&error), "commands were obeyed: the bus is told later");
            let mut book = self.book.lock();
            if book.untold.len() + done.len() <= MOST_UNTOLD {
                book.untold.extend(done);
            }
        }
    }

    /// Writes what changed; what cannot be written now is written later.
    async fn write_now(&self, changed: &[WorkerRecord]) {
        if let Err(error) = self.roster.save(changed, &[]).await {
            tracing::warn!(error = explain(&error), "the roster is away: it is written later");
            let mut book = self.book.lock();
            for record in changed {
                if let Some(entry) = book.workers.get_mut(&record.id) {
                    entry.line.unwritten = true;
                }
            }
        }
    }

    fn bosses(&self, which: impl Fn(&str, &Boss) -> bool) -> Vec<SupervisorRecord> {
        let book = self.book.lock();
        let bosses = book.supervisors.iter().filter(|(name, boss)| which(name, boss));
        let record = |(name, boss): (&String, &Boss)| SupervisorRecord {
            name: name.clone(),
            host: boss.host.clone(),
            halted: boss.halted,
            seen: boss.seen.elapsed(),
        };
        bosses.map(record).collect()
    }

    /// Writes what supervisors were told last, and waits for the disk.
    async fn keep_told(&self, which: impl Fn(&str, &Boss) -> bool) -> Result<(), RosterError> {
        let records = self.bosses(which);
        if records.is_empty() {
            return Ok(());
        }
        self.roster.keep(&records).await?;
        let mut book = self.book.lock();
        for record in records {
            if let Some(boss) = book.supervisors.get_mut(&record.name) {
                boss.kept = record.halted;
            }
        }
        Ok(())
    }

    /// Writes all that is not written.
    async fn write(&self) -> Result<(), RosterError> {
        let workers: Vec<WorkerRecord> = {
            let book = self.book.lock();
            let unwritten = book.workers.values().filter(|entry| entry.line.unwritten);
            unwritten.map(Entry::to_write).collect()
        };
        let supervisors = self.bosses(|_, boss| boss.line.unwritten);
        if workers.is_empty() && supervisors.is_empty() {
            return Ok(());
        }
        match self.roster.save(&workers, &supervisors).await {
            Err(RosterError::Failed(error)) => {
                tracing::error!(error = explain(&*error), "the roster is written one by one");
                self.write_one_by_one(&workers, &supervisors).await?;
            }
            written => written?,
        }
        let mut book = self.book.lock();
        for worker in workers {
            if let Some(entry) = book.workers.get_mut(&worker.id) {
                entry.line.unwritten = false;
            }
        }
        for supervisor in supervisors {
            if let Some(boss) = book.supervisors.get_mut(&supervisor.name) {
                boss.line.unwritten = false;
            }
        }
        Ok(())
    }

    /// The same without those that cannot be written: nobody else is to suffer from them.
    async fn write_one_by_one(
        &self,
        workers: &[WorkerRecord],
        supervisors: &[SupervisorRecord],
    ) -> Result<(), RosterError> {
        let workers = workers.chunks(1).map(|worker| (worker, &supervisors[..0]));
        let supervisors = supervisors.chunks(1).map(|supervisor| (&[][..], supervisor));
        for (worker, supervisor) in workers.chain(supervisors).collect::<Vec<_>>() {
            match self.roster.save(worker, supervisor).await {
                Err(RosterError::Failed(error)) => {
                    let id = worker.first().map(|worker| &worker.id);
                    let id = id.or(supervisor.first().map(|supervisor| &supervisor.name));
                    tracing::error!(id, error = explain(&*error), "it cannot be written");
                }
                written => written?,
            }
        }
        Ok(())
    }

    /// Reads who is there, and beats at another server; at the start, everybody.
    async fn refresh(&self, is_start: bool) -> Result<(), RosterError> {
        let all = self.roster.all().await?;
        let (silent, now) = (self.silent(), SystemTime::now());
        let mut book = self.book.lock();
        let kept: BTreeSet<&str> = all.workers.iter().map(|worker| worker.id.as_str()).collect();
        book.workers.retain(|id, entry| {
            kept.contains(id.as_str()) || entry.line.unwritten || entry.is_there(silent)
        });
        // Until then a server has heard them, as far as can be known.
        let heard = all.workers.iter().map(|worker| worker.seen);
        let heard = heard.chain(all.supervisors.iter().map(|boss| boss.seen)).min();
        let was_silent =
            |record: &WorkerRecord| heard.is_some_and(|heard| record.seen > heard + silent + WRITE);
        for record in &all.workers {
            let (seen, heartbeat) = (back(record.seen), now - record.seen);
            // Nobody was there to hear it, unless it was missed already.
            let seen = if is_start && !was_silent(record) { self.opened } else { seen };
            let known = book.workers.get_mut(&record.id);
            match known {
                // What it says here is newer.
                Some(entry) if entry.seen >= seen => {}
                Some(entry) => {
                    (entry.record, entry.seen, entry.heartbeat) = (record.clone(), seen, heartbeat);
                }
                None if record.seen >= RETAINED => {}
                None => {
                    let slots = SlotsUsed { used: 0, capacity: record.capacity };
                    let (record, running, line) = (record.clone(), Vec::new(), Line::default());
                    let entry = Entry { record, seen, heartbeat, slots, running, line };
                    book.workers.insert(entry.record.id.clone(), entry);
                }
            }
        }
        let kept: BTreeSet<&str> = all.supervisors.iter().map(|boss| boss.name.as_str()).collect();
        book.supervisors
            .retain(|name, boss| kept.contains(name.as_str()) || boss.seen.elapsed() <= RETAINED);
        for record in all.supervisors.into_iter().filter(|it| it.halted || it.seen < RETAINED) {
            let seen = back(record.seen);
            let boss = book.supervisors.entry(record.name).or_insert_with(|| Boss {
                host: record.host.clone(),
                report: None,
                halted: record.halted,
                kept: record.halted,
                seen,
                heir: None,
                line: Line::default(),
            });
            // What it says here is newer; if it says nothing, what it was told is there.
            if seen > boss.seen || !boss.is_alive(silent) || boss.report.is_none() {
                (boss.halted, boss.kept) = (record.halted, record.halted);
            }
            boss.seen = boss.seen.max(seen);
        }
        Ok(())
    }

    /// Those of this machine whose processes are gone have ended.
    async fn clean(&self) {
        let here = host_name();
        let gone: Vec<(String, Option<String>)> = {
            let book = self.book.lock();
            let workers = book.workers.values().map(|entry| &entry.record);
            workers
                .filter(|record| record.status != Status::Stopped && record.host == here)
                .filter(|record| is_gone(record.pid, record.birth.as_deref()))
                .map(|record| (record.id.clone(), Some("its process is gone".to_owned())))
                .collect()
        };
        self.ended(&gone).await;
    }

    /// Finds what no wake-up told.
    async fn look(&self) -> Result<(), BusError> {
        let (targets, untold) = {
            let silent = self.silent();
            let mut book = self.book.lock();
            let workers = book.workers.values().filter(|entry| entry.is_there(silent));
            let workers = workers.map(|entry| Target::worker(&entry.record.id));
            let bosses = book.supervisors.keys().map(|name| Target::supervisor(name));
            let targets: Vec<Target> = workers.chain(bosses).collect();
            (targets, std::mem::take(&mut book.untold))
        };
        self.applied(untold).await;
        let waiting = self.bus.waiting(&targets).await?;
        let mut book = self.book.lock();
        waiting.iter().for_each(|target| book.ring(target));
        Ok(())
    }

    async fn write_and_refresh(&self) -> Result<(), RosterError> {
        self.write().await?;
        self.roster.prune(RETAINED).await?;
        self.refresh(false).await
    }

    async fn keep(self: Arc<Self>) {
        let mut wakes = self.bus.wakes();
        // Who was there at the start is known, and what came since is written as it comes.
        let mut write = interval_at(tokio::time::Instant::now() + WRITE, WRITE);
        let mut look = interval(self.beat);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        write.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut trouble = false;
        loop {
            tokio::select! {
                wake = wakes.recv() => match wake {
                    Ok(Wake::Of(target)) => self.book.lock().ring(&target),
                    Ok(Wake::Any) | Err(RecvError::Lagged(_)) => look.reset_immediately(),
                    Err(RecvError::Closed) => std::future::pending().await,
                },
                _ = look.tick() => match self.look().await {
                    Ok(()) => trouble = false,
                    Err(error) if !trouble => {
                        trouble = true;
                        tracing::warn!(error = explain(&error), "the command bus is away; trying again");
                    }
                    Err(_) => {}
                },
                _ = write.tick() => if let Err(error) = self.write_and_refresh().await {
                    tracing::warn!(error = explain(&error), "the roster is away; trying again");
                },
            }
        }
    }
}

fn handed(taken: Taken) -> Handed {
    Handed { id: taken.id, command: taken.order, expires_ms: millis(taken.left) }
}

impl Beat {
    /// Of this process, which works these queues.
    pub fn of_this_process(queues: Vec<String>) -> Self {
        let pid = std::process::id();
        Self {
            supervisor: None,
            queues,
            pid,
            host: host_name(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started: now_ms(),
            birth: crate::host::birth(pid),
            state: Status::Running,
            slots: SlotsUsed::default(),
            running: Vec::new(),
            done: Vec::new(),
            note: None,
        }
    }
}
