//! The fleet as a server knows it, on the embedded file.

use std::convert::Infallible;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tempfile::TempDir;
use testing::soon;
use tokio::sync::{Notify, broadcast};
use vedetta_db::postgres::Postgres;
use vedetta_db::{Db, Options, Purpose, Stop, Tx};
use vedetta_fleet::bus::{Record, State, TTL, Taken, Wake};
use vedetta_fleet::postgres::{PostgresBus, PostgresRoster};
use vedetta_fleet::roster::{All, RosterError, Status, SupervisorRecord, WorkerRecord};
use vedetta_fleet::sqlite::{SqliteBus, SqliteRoster};
use vedetta_fleet::wire::{Beat, Ended, Heard, LONGEST_NOTE, Mood, Report, Told};
use vedetta_fleet::{
    Balance, Bus, BusError, CommandId, Control, ControlError, Fleet, FleetError, Hire, Order,
    Roster, Settings, Supervising, Supervisor, Target,
};
use vedetta_jobs::postgres::PostgresJobs;
use vedetta_jobs::sqlite::SqliteJobs;

/// Long enough that nothing happens by itself within a test.
const SLOW: Duration = Duration::from_secs(600);

/// Counts what is asked of it.
struct Counted<T> {
    inner: T,
    asked: Arc<AtomicUsize>,
}

#[async_trait]
impl<R: Roster> Roster for Counted<R> {
    async fn save(
        &self,
        workers: &[WorkerRecord],
        supervisors: &[SupervisorRecord],
    ) -> Result<(), RosterError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.inner.save(workers, supervisors).await
    }

    async fn keep(&self, supervisors: &[SupervisorRecord]) -> Result<(), RosterError> {
        self.inner.keep(supervisors).await
    }

    async fn all(&self) -> Result<All, RosterError> {
        self.inner.all().await
    }

    async fn prune(&self, silent: Duration) -> Result<u64, RosterError> {
        self.inner.prune(silent).await
    }
}

#[async_trait]
impl<B: Bus> Bus for Counted<B> {
    async fn put(&self, target: &Target, order: &Order, ttl: Duration) -> Result<Record, BusError> {
        self.inner.put(target, order, ttl).await
    }

    async fn take(&self, target: &Target) -> Result<Vec<Taken>, BusError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.inner.take(target).await
    }

    async fn applied(&self, ids: &[CommandId]) -> Result<(), BusError> {
        self.inner.applied(ids).await
    }

    async fn command(&self, id: &CommandId) -> Result<Option<Record>, BusError> {
        self.inner.command(id).await
    }

    async fn waiting(&self, targets: &[Target]) -> Result<Vec<Target>, BusError> {
        self.inner.waiting(targets).await
    }

    fn wakes(&self) -> broadcast::Receiver<Wake> {
        self.inner.wakes()
    }
}

/// Its clock goes a thousand times slower, as one that is set back again and again.
struct Slow(SqliteBus);

#[async_trait]
impl Bus for Slow {
    async fn put(&self, target: &Target, order: &Order, ttl: Duration) -> Result<Record, BusError> {
        self.0.put(target, order, 1000 * ttl).await
    }

    async fn take(&self, target: &Target) -> Result<Vec<Taken>, BusError> {
        self.0.take(target).await
    }

    async fn applied(&self, ids: &[CommandId]) -> Result<(), BusError> {
        self.0.applied(ids).await
    }

    async fn command(&self, id: &CommandId) -> Result<Option<Record>, BusError> {
        self.0.command(id).await
    }

    async fn waiting(&self, targets: &[Target]) -> Result<Vec<Target>, BusError> {
        self.0.waiting(targets).await
    }

    fn wakes(&self) -> broadcast::Receiver<Wake> {
        self.0.wakes()
    }
}

struct World {
    db: Db,
    saves: Arc<AtomicUsize>,
    takes: Arc<AtomicUsize>,
    fleet: Fleet,
    _folder: TempDir,
}

impl World {
    async fn new(beat: Duration) -> Self {
        let folder = TempDir::new().unwrap();
        let mut options = Options::new(folder.path().join("fleet.db"));
        options.ballast = 0;
        let schemas = [vedetta_jobs::sqlite::SCHEMA, vedetta_fleet::sqlite::SCHEMA];
        let db = Db::open(&options, &schemas).unwrap();
        let (saves, takes) = (Arc::default(), Arc::default());
        let fleet = open(&db, beat, &saves, &takes).await;
        Self { db, saves, takes, fleet, _folder: folder }
    }
}

/// What a server does when it starts.
async fn open(
    db: &Db,
    beat: Duration,
    saves: &Arc<AtomicUsize>,
    takes: &Arc<AtomicUsize>,
) -> Fleet {
    let jobs = Arc::new(SqliteJobs::open(db.clone()).await.unwrap());
    let bus = Counted { inner: SqliteBus::new(db.clone()), asked: Arc::clone(takes) };
    let roster = Counted { inner: SqliteRoster::new(db.clone()), asked: Arc::clone(saves) };
    let queues = ["default".to_owned()];
    Fleet::open(Arc::new(bus), Arc::new(roster), jobs, queues, beat).await.unwrap()
}

/// Of a worker on a machine that is not this one.
fn beat() -> Beat {
    let (host, started) = ("elsewhere".to_owned(), 1);
    Beat { host, started, birth: None, ..Beat::of_this_process(vec!["default".into()]) }
}

fn report(instance: &str) -> Report {
    Report {
        host: "elsewhere".into(),
        version: "1".into(),
        instance: instance.into(),
        queues: vec!["default".into()],
        balance: "simple".into(),
        min: 1,
        max: 3,
        wanted: 1,
        state: Mood::Running,
        last_exit: None,
        stderr: None,
        ended: Vec::new(),
        done: Vec::new(),
        depths: false,
    }
}

#[tokio::test]
async fn a_beat_that_says_nothing_new_touches_neither_the_roster_nor_the_bus() {
    let world = World::new(SLOW).await;
    let ids: Vec<String> = (0..100).map(|number| format!("w{number}")).collect();
    for _ in 0..10 {
        for id in &ids {
            let heard = world.fleet.heard(id, beat(), false).await.unwrap();
            assert!(heard.commands.is_empty());
        }
    }
    let counts = || (world.saves.load(Ordering::Relaxed), world.takes.load(Ordering::Relaxed));
    assert_eq!(counts(), (100, 100), "each once, when it came");

    // What changes is written at once.
    let paused = Beat { state: Status::Paused, ..beat() };
    world.fleet.heard("w7", paused, false).await.unwrap();
    assert_eq!(counts().0, 101);
    let written = SqliteRoster::new(world.db.clone()).all().await.unwrap();
    let status = |id: &str| written.workers.iter().find(|worker| worker.id == id).unwrap().status;
    assert_eq!((status("w7"), status("w8")), (Status::Paused, Status::Running));
    // The rest together.
    world.fleet.close().await;
    assert_eq!(counts().0, 102);
    world.fleet.close().await;
    assert_eq!(counts().0, 102, "there is nothing to write");
}

#[tokio::test]
async fn a_command_is_pushed_and_handed_out_with_one_beat() {
    let world = World::new(SLOW).await;
    let fleet = &world.fleet;
    let anna = Target::worker("anna");
    assert!(matches!(fleet.listen(&anna), Err(FleetError::NotFound(_))));
    assert!(matches!(fleet.tell("anna", &Order::Pause, TTL).await, Err(FleetError::NotFound(_))));
    fleet.heard("anna", beat(), false).await.unwrap();
    let mut wakes = fleet.listen(&anna).unwrap();
    let told = fleet.tell("anna", &Order::Pause, TTL).await.unwrap();
    soon("a wake-up", wakes.next()).await.unwrap();
    let heard = fleet.heard("anna", beat(), false).await.unwrap();
    assert_eq!(heard.commands.len(), 1);
    assert_eq!((&heard.commands[0].id, &heard.commands[0].command), (&told.id, &Order::Pause));
    assert!(fleet.heard("anna", beat(), false).await.unwrap().commands.is_empty());
    let done = Beat { done: vec![told.id.clone()], ..beat() };
    fleet.heard("anna", done, false).await.unwrap();
    assert_eq!(fleet.command(&told.id.0).await.unwrap().state, State::Applied);

    // Put elsewhere, and no wake-up: a look finds it.
    let world = World::new(Duration::from_millis(50)).await;
    world.fleet.heard("anna", beat(), false).await.unwrap();
    let mut wakes = world.fleet.listen(&anna).unwrap();
    SqliteBus::new(world.db.clone()).put(&anna, &Order::Stop, TTL).await.unwrap();
    soon("a look", wakes.next()).await.unwrap();
    assert_eq!(world.fleet.heard("anna", beat(), false).await.unwrap().commands.len(), 1);
}

#[tokio::test]
async fn a_command_is_over_in_time_although_the_clock_of_its_bus_was_set_back() {
    let World { db, fleet, _folder, .. } = World::new(SLOW).await;
    drop(fleet);
    let jobs = Arc::new(SqliteJobs::open(db.clone()).await.unwrap());
    let (bus, roster) = (SqliteBus::new(db.clone()), SqliteRoster::new(db.clone()));
    let bus: Arc<dyn Bus> = Arc::new(Slow(bus));
    let fleet = Fleet::open(Arc::clone(&bus), Arc::new(roster), jobs, [], SLOW).await.unwrap();
    fleet.heard("anna", beat(), false).await.unwrap();
    let ttl = Duration::from_millis(200);
    let mut wakes = fleet.listen(&Target::worker("anna")).unwrap();
    let began = std::time::Instant::now();
    let told = fleet.tell("anna", &Order::Stop, ttl).await.unwrap();
    soon("a wake-up", wakes.next()).await.unwrap();
    tokio::time::sleep(ttl.saturating_sub(began.elapsed())).await;
    assert_eq!(bus.command(&told.id).await.unwrap().unwrap().state, State::Requested);
    assert!(fleet.heard("anna", beat(), false).await.unwrap().commands.is_empty());
    // In time, for no longer than is left.
    fleet.tell("anna", &Order::Stop, TTL).await.unwrap();
    // A wake-up may be one that a look gave for the first.
    let handed = soon("it is handed out", async {
        loop {
            wakes.next().await.unwrap();
            let heard = fleet.heard("anna", beat(), false).await.unwrap();
            if let Some(handed) = heard.commands.into_iter().next() {
                return handed;
            }
        }
    })
    .await;
    assert!(Duration::from_millis(handed.expires_ms) <= TTL, "{handed:?}");
}

#[tokio::test]
async fn after_a_restart_those_who_were_there_have_time_to_say_so_again() {
    let world = World::new(Duration::from_millis(20)).await;
    let boss = |beat: Beat| Beat { supervisor: Some("boss:there".into()), ..beat };
    world.fleet.supervised("boss:there", report("a")).await.unwrap();
    world.fleet.heard("anna", boss(beat()), false).await.unwrap();
    let status = |fleet: &Fleet| fleet.list().workers[0].status;
    soon("it is missed", async {
        while status(&world.fleet) != Status::Silent {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    let told = world.fleet.supervised("boss:there", report("a")).await.unwrap();
    assert_eq!(told.workers[0].status, Status::Silent);

    let World { db, saves, takes, fleet, _folder } = world;
    drop(fleet);
    let fleet = open(&db, Duration::from_millis(20), &saves, &takes).await;
    assert_eq!(status(&fleet), Status::Running, "nobody was there to hear it");
    let told = fleet.supervised("boss:there", report("b")).await.unwrap();
    assert_eq!(told.workers[0].id, "anna", "so the next supervisor adopts it");
    let heard = fleet.heard("anna", boss(beat()), false).await.unwrap();
    assert!(heard.supervisor_seen_ms.is_some_and(|ago| ago < 60_000));
    let unknown = Beat { supervisor: Some("nobody:there".into()), ..beat() };
    assert!(fleet.heard("ben", unknown, false).await.unwrap().supervisor_seen_ms.is_some());
}

#[tokio::test]
async fn who_was_silent_before_a_restart_is_not_shown_as_running_after_it() {
    let World { db, saves, takes, fleet, _folder } = World::new(Duration::from_millis(20)).await;
    fleet.heard("anna", beat(), false).await.unwrap();
    fleet.heard("ben", beat(), false).await.unwrap();
    fleet.close().await;
    drop(fleet);
    let roster = SqliteRoster::new(db.clone());
    let all = roster.all().await.unwrap();
    let ben = WorkerRecord { seen: Duration::from_secs(60), ..all.workers[1].clone() };
    roster.save(&[ben], &[]).await.unwrap();
    let fleet = open(&db, Duration::from_millis(20), &saves, &takes).await;
    let shown: Vec<_> =
        fleet.list().workers.into_iter().map(|worker| (worker.id, worker.status)).collect();
    let (anna, ben) = (("anna".into(), Status::Running), ("ben".into(), Status::Silent));
    assert_eq!(shown, [anna, ben], "the one was heard until the end, the other was not");
}

#[tokio::test]
async fn all_who_listen_hear_of_a_command_and_none_takes_it_from_another() {
    let world = World::new(SLOW).await;
    let fleet = &world.fleet;
    let anna = Target::worker("anna");
    fleet.heard("anna", beat(), false).await.unwrap();
    let mut listening: Vec<_> = (0..3).map(|_| fleet.listen(&anna).unwrap()).collect();
    fleet.tell("anna", &Order::Pause, TTL).await.unwrap();
    for wakes in &mut listening {
        soon("a wake-up", wakes.next()).await.unwrap();
    }
    assert_eq!(fleet.heard("anna", beat(), false).await.unwrap().commands.len(), 1);
}

#[tokio::test]
async fn what_tells_processes_apart_is_told_to_their_supervisor_alone() {
    let world = World::new(SLOW).await;
    let fleet = &world.fleet;
    fleet.supervised("boss:there", report("a")).await.unwrap();
    let supervisor = Some("boss:there".to_owned());
    let beat = Beat { supervisor, birth: Some("boot:1".into()), ..beat() };
    fleet.heard("anna", beat, false).await.unwrap();
    assert_eq!(fleet.list().workers[0].birth, None);
    let told = fleet.supervised("boss:there", report("a")).await.unwrap();
    assert_eq!(told.workers[0].birth.as_deref(), Some("boot:1"));
}

#[tokio::test]
async fn a_supervisor_that_was_told_to_start_none_is_told_so_again_when_it_is_back() {
    let World { db, saves, takes, fleet, _folder } = World::new(SLOW).await;
    let said = |instance: &str, state| Report { state, ..report(instance) };
    let halted = async |fleet: &Fleet, report: Report| {
        fleet.supervised("boss:there", report).await.unwrap().halted
    };
    assert!(!halted(&fleet, said("a", Mood::Starting)).await);
    assert!(!halted(&fleet, said("a", Mood::Running)).await);
    assert!(halted(&fleet, said("a", Mood::Terminated)).await);
    // Its process ends in good order; how it is then does not count.
    assert!(halted(&fleet, said("a", Mood::Stopping)).await);
    assert!(fleet.retired("boss:there").await.unwrap());
    assert!(halted(&fleet, said("b", Mood::Starting)).await, "the next is told");
    assert!(halted(&fleet, said("b", Mood::Starting)).await, "also if that was lost");
    drop(fleet);

    let fleet = open(&db, SLOW, &saves, &takes).await;
    let shown = &fleet.list().supervisors[0];
    assert!(shown.halted && shown.report.is_none(), "{shown:?}");
    assert!(halted(&fleet, said("c", Mood::Starting)).await, "by the next server, too");
    assert!(!halted(&fleet, said("c", Mood::Restarting)).await, "until it was told otherwise");
    drop(fleet);
    let fleet = open(&db, SLOW, &saves, &takes).await;
    assert!(!halted(&fleet, said("d", Mood::Starting)).await);
}

#[tokio::test]
async fn what_a_supervisor_was_told_at_one_server_holds_at_another() {
    let World { db, saves, takes, fleet: here, _folder } = World::new(SLOW).await;
    here.supervised("boss:there", report("a")).await.unwrap();
    let there = open(&db, SLOW, &saves, &takes).await;
    assert!(!there.supervisors()[0].halted);
    let terminated = Report { state: Mood::Terminated, ..report("a") };
    here.supervised("boss:there", terminated).await.unwrap();
    here.retired("boss:there").await.unwrap();
    let next = Report { state: Mood::Starting, ..report("b") };
    assert!(there.supervised("boss:there", next).await.unwrap().halted);
}

#[tokio::test]
async fn supervisors_of_another_server_are_told_although_they_are_heard_of_late() {
    let World { db, saves, takes, fleet, _folder } = World::new(SLOW).await;
    drop(fleet);
    let boss = |name: &str, seen| {
        let (name, host, seen) = (name.into(), "there".into(), Duration::from_secs(seen));
        SupervisorRecord { name, host, halted: false, seen }
    };
    let records = [boss("gone:there", 60), boss("late:there", 20)];
    SqliteRoster::new(db.clone()).save(&[], &records).await.unwrap();
    let fleet = open(&db, Duration::from_secs(3), &saves, &takes).await;
    let told = fleet.restart(TTL).await.unwrap();
    let targets: Vec<&str> = told.iter().map(|command| command.target.as_str()).collect();
    assert_eq!(targets, ["supervisor:late:there"]);
}

#[tokio::test]
async fn a_supervisor_that_is_away_is_told_when_it_is_back() {
    let World { db, saves, takes, fleet, _folder } = World::new(SLOW).await;
    drop(fleet);
    let (name, host, seen) = ("away:there".into(), "there".into(), Duration::from_secs(60));
    let away = SupervisorRecord { name, host, halted: false, seen };
    SqliteRoster::new(db.clone()).save(&[], &[away]).await.unwrap();
    let server = async || open(&db, Duration::from_secs(3), &saves, &takes).await;
    let is_halted = async || {
        let begins = Report { state: Mood::Starting, ..report("next") };
        server().await.supervised("away:there", begins).await.unwrap().halted
    };
    let fleet = server().await;
    assert!(fleet.terminate(TTL).await.unwrap().is_empty(), "nobody is waited for");
    assert!(is_halted().await);
    fleet.supervised("here:there", report("a")).await.unwrap();
    assert_eq!(fleet.restart(TTL).await.unwrap().len(), 1);
    assert!(!is_halted().await, "a restart is for all, too");
}

#[tokio::test]
async fn a_supervisor_that_is_gone_for_good_can_be_removed() {
    let beat = Duration::from_secs(3);
    let World { db, saves, takes, fleet, _folder } = World::new(beat).await;
    let terminated = Report { state: Mood::Terminated, ..report("a") };
    fleet.supervised("boss:there", terminated).await.unwrap();
    assert!(fleet.retired("boss:there").await.unwrap(), "as it says itself");
    assert!(fleet.supervisors()[0].halted, "what it was told is kept");
    assert!(fleet.retired("boss:there").await.unwrap(), "as somebody says");
    assert!(fleet.supervisors().is_empty());
    drop(fleet);
    let fleet = open(&db, beat, &saves, &takes).await;
    assert!(fleet.supervisors().is_empty());
}

#[tokio::test]
async fn supervisors_that_are_gone_do_not_keep_others_out() {
    let World { db, saves, takes, fleet, _folder } = World::new(SLOW).await;
    drop(fleet);
    let gone = |number: usize| {
        let (name, host) = (format!("gone{number}:there"), "there".into());
        SupervisorRecord { name, host, halted: true, seen: Duration::from_secs(3600) }
    };
    let records: Vec<SupervisorRecord> = (0..10_000).map(gone).collect();
    SqliteRoster::new(db.clone()).save(&[], &records).await.unwrap();
    let fleet = open(&db, SLOW, &saves, &takes).await;
    assert_eq!(fleet.supervisors().len(), 10_000);
    fleet.supervised("new:there", report("a")).await.unwrap();
}

/// A fleet that waits before it tells a worker anything.
struct Hesitant {
    fleet: Fleet,
    asked: Notify,
    goes_on: Notify,
}

#[async_trait]
impl Control for Hesitant {
    async fn beat(&self, worker: &str, beat: &Beat) -> Result<Heard, ControlError> {
        self.fleet.beat(worker, beat).await
    }

    async fn leave(&self, worker: &str) -> Result<(), ControlError> {
        self.fleet.leave(worker).await
    }

    async fn listen(
        &self,
        target: &Target,
        tell: &(dyn Fn() + Send + Sync),
    ) -> Result<(), ControlError> {
        Control::listen(&self.fleet, target, tell).await
    }

    async fn supervise(&self, name: &str, report: &Report) -> Result<Told, ControlError> {
        self.fleet.supervise(name, report).await
    }

    async fn retire(&self, name: &str) -> Result<(), ControlError> {
        self.fleet.retire(name).await
    }

    async fn tell(&self, worker: &str, order: Order) -> Result<(), ControlError> {
        self.asked.notify_one();
        self.goes_on.notified().await;
        Control::tell(&self.fleet, worker, order).await
    }
}

/// The supervisor `boss` of this machine with a worker that is elsewhere.
async fn keeps_anna(fleet: &Fleet) -> (Supervising, Arc<Hesitant>) {
    let supervisor = Some(format!("boss:{}", vedetta_fleet::host_name()));
    fleet.heard("anna", Beat { supervisor, ..beat() }, false).await.unwrap();
    let (asked, goes_on) = (Notify::new(), Notify::new());
    let control = Arc::new(Hesitant { fleet: fleet.clone(), asked, goes_on });
    (start_boss(control.clone(), "/bin/false".into()), control)
}

/// The supervisor `boss` of this machine, with one worker.
fn start_boss(control: Arc<dyn Control>, program: PathBuf) -> Supervising {
    let (balance, cool_down) = (Balance::Simple, Duration::ZERO);
    let settings = Settings { queues: vec!["default".into()], balance, min: 1, max: 1, cool_down };
    let hire = Hire { program, arguments: vec![], variables: vec![] };
    Supervisor::new("boss", settings, hire, control).start()
}

async fn until_boss(fleet: &Fleet, state: Mood) {
    soon("its state", async {
        let is_so = || fleet.supervisors()[0].report.as_ref().is_some_and(|it| it.state == state);
        while fleet.supervisors().is_empty() || !is_so() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn who_was_refused_a_name_does_not_take_it_from_who_has_it() {
    let World { fleet, _folder, .. } = World::new(SLOW).await;
    let name = format!("boss:{}", vedetta_fleet::host_name());
    fleet.supervised(&name, report("a")).await.unwrap();
    let other = start_boss(Arc::new(fleet.clone()), "/bin/false".into());
    soon("its end", other.stop(SLOW)).await;
    let there = fleet.supervisors();
    assert_eq!(there.len(), 1);
    assert!(there[0].report.is_some(), "it is still heard of");
}

#[tokio::test]
async fn a_terminate_that_was_obeyed_holds_if_its_supervisor_ends_at_once() {
    let World { fleet, _folder, .. } = World::new(SLOW).await;
    let (supervisor, control) = keeps_anna(&fleet).await;
    until_boss(&fleet, Mood::Running).await;
    let told = fleet.terminate(TTL).await.unwrap().remove(0);
    soon("it tells its worker", control.asked.notified()).await;
    let end = tokio::spawn(supervisor.stop(SLOW));
    control.goes_on.notify_one();
    until_boss(&fleet, Mood::Stopping).await;
    assert_eq!(fleet.command(&told.id.0).await.unwrap().state, State::Applied);
    assert!(fleet.supervisors()[0].halted, "what was obeyed is kept");
    fleet.left("anna").await.unwrap();
    assert_eq!(soon("its end", end).await.unwrap(), 0);
    assert!(fleet.supervisors()[0].halted);
}

#[tokio::test]
async fn a_command_for_a_supervisor_that_ends_waits_for_the_next() {
    let World { fleet, _folder, .. } = World::new(SLOW).await;
    let (supervisor, control) = keeps_anna(&fleet).await;
    until_boss(&fleet, Mood::Running).await;
    control.goes_on.notify_one();
    let end = tokio::spawn(supervisor.stop(SLOW));
    until_boss(&fleet, Mood::Stopping).await;
    let told = fleet.terminate(TTL).await.unwrap().remove(0);
    fleet.left("anna").await.unwrap();
    soon("its end", end).await.unwrap();
    assert_eq!(fleet.command(&told.id.0).await.unwrap().state, State::Requested);
    let (_next, control) = keeps_anna(&fleet).await;
    control.goes_on.notify_one();
    until_boss(&fleet, Mood::Terminated).await;
}

/// Its disk is full, and then no more.
struct Full {
    inner: SqliteRoster,
    is_full: Arc<AtomicBool>,
}

#[async_trait]
impl Roster for Full {
    async fn save(
        &self,
        workers: &[WorkerRecord],
        supervisors: &[SupervisorRecord],
    ) -> Result<(), RosterError> {
        self.inner.save(workers, supervisors).await
    }

    async fn keep(&self, supervisors: &[SupervisorRecord]) -> Result<(), RosterError> {
        if self.is_full.load(Ordering::Relaxed) {
            return Err(RosterError::Unavailable("the disk is full".into()));
        }
        self.inner.keep(supervisors).await
    }

    async fn all(&self) -> Result<All, RosterError> {
        self.inner.all().await
    }

    async fn prune(&self, silent: Duration) -> Result<u64, RosterError> {
        self.inner.prune(silent).await
    }
}

#[tokio::test]
async fn a_terminate_is_obeyed_when_it_is_on_the_disk_and_not_before() {
    let World { db, fleet, _folder, .. } = World::new(SLOW).await;
    drop(fleet);
    let jobs = Arc::new(SqliteJobs::open(db.clone()).await.unwrap());
    let (inner, is_full) = (SqliteRoster::new(db.clone()), Arc::new(AtomicBool::new(true)));
    let roster = Arc::new(Full { inner: inner.clone(), is_full: Arc::clone(&is_full) });
    let bus = Arc::new(SqliteBus::new(db.clone()));
    let fleet = Fleet::open(bus, roster, jobs, [], SLOW).await.unwrap();
    fleet.supervised("boss:there", report("a")).await.unwrap();
    let mut wakes = fleet.listen(&Target::supervisor("boss:there")).unwrap();
    let told = fleet.terminate(TTL).await.unwrap().remove(0);
    soon("a wake-up", wakes.next()).await.unwrap();
    let heard = fleet.supervised("boss:there", report("a")).await.unwrap();
    assert_eq!(heard.commands[0].id, told.id);
    let obeyed = || Report { state: Mood::Terminated, done: vec![told.id.clone()], ..report("a") };
    for _ in 0..2 {
        fleet.supervised("boss:there", obeyed()).await.unwrap_err();
        assert_eq!(fleet.command(&told.id.0).await.unwrap().state, State::Taken);
    }
    is_full.store(false, Ordering::Relaxed);
    fleet.supervised("boss:there", obeyed()).await.unwrap();
    assert_eq!(fleet.command(&told.id.0).await.unwrap().state, State::Applied);
    assert!(inner.all().await.unwrap().supervisors[0].halted);
}

#[tokio::test]
async fn of_what_a_process_wrote_a_line_is_told_whole_or_not_at_all() {
    let World { fleet, _folder: folder, .. } = World::new(SLOW).await;
    let value = "hunter".repeat(LONGEST_NOTE / 6);
    let whole = "it failed\n".repeat(LONGEST_NOTE / 20);
    for (written, told) in [
        (format!("password={value}\nthe end\n"), "the end\n"),
        (format!("password={value} the end"), "…"),
        (format!("password={}\n{whole}", "x".repeat(LONGEST_NOTE - whole.len() - 10)), "pass"),
        (format!("é\n{}", "é".repeat(LONGEST_NOTE / 2)), "é"),
    ] {
        let said = Report { stderr: Some(written.clone()), ..report("a") };
        fleet.supervised("boss:there", said).await.unwrap();
        let shown = fleet.supervisors()[0].report.clone().unwrap().stderr.unwrap();
        assert!(shown.starts_with(told) && written.ends_with(shown.trim_start_matches('…')));
    }
    fleet.retired("boss:there").await.unwrap();

    // The same of a worker.
    let program = folder.path().join("worker");
    let script = format!("#!/bin/sh\necho 'password={value}' >&2\necho the end >&2\nexit 1\n");
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, Permissions::from_mode(0o700)).unwrap();
    let _supervisor = start_boss(Arc::new(fleet.clone()), program);
    soon("its end", async {
        let told = || fleet.supervisors().first()?.report.clone()?.stderr;
        while told().is_none_or(|told| told.is_empty()) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(told().unwrap(), "the end\n");
    })
    .await;
}

async fn sql(db: &Db, text: &'static str) {
    let run = move |tx: &Tx<'_>| Ok::<_, Stop<Infallible>>(tx.execute_batch(text)?);
    db.write(Purpose::Store, run).await.unwrap();
}

#[tokio::test]
async fn a_command_waits_while_what_is_in_the_queues_cannot_be_told() {
    let World { db, fleet, _folder, .. } = World::new(SLOW).await;
    let said = || Report { depths: true, ..report("a") };
    fleet.supervised("boss:there", said()).await.unwrap();
    let mut wakes = fleet.listen(&Target::supervisor("boss:there")).unwrap();
    let told = fleet.terminate(TTL).await.unwrap().remove(0);
    soon("a wake-up", wakes.next()).await.unwrap();
    sql(&db, "ALTER TABLE job RENAME TO away").await;
    fleet.supervised("boss:there", said()).await.unwrap_err();
    sql(&db, "ALTER TABLE away RENAME TO job").await;
    let heard = fleet.supervised("boss:there", said()).await.unwrap();
    assert_eq!(heard.commands[0].id, told.id, "it was not lost");
}

/// Cannot write down one of the workers.
struct Picky(SqliteRoster);

#[async_trait]
impl Roster for Picky {
    async fn save(
        &self,
        workers: &[WorkerRecord],
        supervisors: &[SupervisorRecord],
    ) -> Result<(), RosterError> {
        if workers.iter().any(|worker| worker.id == "bad") {
            return Err(RosterError::Failed("that one cannot be written".into()));
        }
        self.0.save(workers, supervisors).await
    }

    async fn keep(&self, supervisors: &[SupervisorRecord]) -> Result<(), RosterError> {
        self.0.keep(supervisors).await
    }

    async fn all(&self) -> Result<All, RosterError> {
        self.0.all().await
    }

    async fn prune(&self, silent: Duration) -> Result<u64, RosterError> {
        self.0.prune(silent).await
    }
}

#[tokio::test]
async fn one_record_that_cannot_be_written_does_not_keep_others_from_it() {
    let World { db, fleet, _folder, .. } = World::new(SLOW).await;
    drop(fleet);
    let roster = SqliteRoster::new(db.clone());
    let jobs = Arc::new(SqliteJobs::open(db.clone()).await.unwrap());
    let bus = Arc::new(SqliteBus::new(db.clone()));
    let picky = Arc::new(Picky(roster.clone()));
    let fleet = Fleet::open(bus, picky, jobs, [], SLOW).await.unwrap();
    for id in ["anna", "bad", "carl"] {
        fleet.heard(id, beat(), false).await.unwrap();
        // That says nothing new, and is written together with the others.
        fleet.heard(id, beat(), false).await.unwrap();
    }
    let ended = roster.all().await.unwrap().workers.into_iter();
    let ended: Vec<_> = ended.map(|it| WorkerRecord { status: Status::Stopped, ..it }).collect();
    roster.save(&ended, &[]).await.unwrap();
    fleet.supervised("boss:there", report("a")).await.unwrap();
    fleet.close().await;
    let after = roster.all().await.unwrap();
    let ids: Vec<&str> = after.workers.iter().map(|worker| worker.id.as_str()).collect();
    assert_eq!((ids, after.supervisors.len()), (vec!["anna", "carl"], 1));
    assert!(after.workers.iter().all(|worker| worker.status == Status::Running), "{after:?}");
    assert_eq!(fleet.list().workers.len(), 3, "it is there all the same");
}

#[tokio::test]
async fn what_postgresql_has_no_place_for_is_refused_or_replaced_and_stops_nobody() {
    let postgres = testing::postgres::Server::start().await;
    let schemas = [vedetta_jobs::postgres::SCHEMA, vedetta_fleet::postgres::SCHEMA];
    let db = Postgres::open(&postgres.url(), &schemas).await.unwrap();
    let (bus, roster) = (PostgresBus::new(db.clone()), PostgresRoster::new(db.clone()));
    let jobs = Arc::new(PostgresJobs::new(db));
    let open = Fleet::open(Arc::new(bus), Arc::new(roster.clone()), jobs, [], SLOW);
    let fleet = open.await.unwrap();
    let note = |text: &str| Beat { note: Some(text.into()), ..beat() };
    fleet.heard("anna", note("a\0b"), false).await.unwrap();
    let late = Beat { started: u64::MAX, pid: u32::MAX, ..beat() };
    fleet.heard("ben", late, false).await.unwrap();
    let said = Report {
        last_exit: Some("\0".into()),
        ended: vec![Ended { id: "ben".into(), exit: "killed\0".into() }],
        ..report("a")
    };
    fleet.supervised("boss:there", said).await.unwrap();
    let nul = Beat { host: "\0".into(), ..beat() };
    assert!(matches!(fleet.heard("eve", nul, false).await, Err(FleetError::Invalid(_))));
    fleet.close().await;
    let written = roster.all().await.unwrap();
    let notes: Vec<_> =
        written.workers.iter().map(|it| (it.id.as_str(), it.note.as_deref())).collect();
    let replaced = [("anna", Some("a\u{fffd}b")), ("ben", Some("killed\u{fffd}"))];
    assert_eq!(notes, replaced);
    assert_eq!(written.supervisors.len(), 1);
    serde_json::to_string(&fleet.list()).expect("all of it can be shown");
}

#[tokio::test]
async fn records_of_those_who_are_gone_for_long_are_removed_at_the_start() {
    let World { db, saves, takes, fleet, _folder } = World::new(SLOW).await;
    fleet.supervised("boss:there", report("a")).await.unwrap();
    fleet.heard("anna", beat(), false).await.unwrap();
    fleet.close().await;
    drop(fleet);
    let roster = SqliteRoster::new(db.clone());
    let All { workers, supervisors } = roster.all().await.unwrap();
    let seen = Duration::from_secs(700);
    let ben = WorkerRecord { id: "ben".into(), seen, ..workers[0].clone() };
    let gone = SupervisorRecord { name: "gone:there".into(), seen, ..supervisors[0].clone() };
    roster.save(&[ben], &[gone]).await.unwrap();

    let fleet = open(&db, SLOW, &saves, &takes).await;
    let listed = fleet.list();
    let kept = roster.all().await.unwrap();
    let workers: Vec<&str> = listed.workers.iter().map(|worker| worker.id.as_str()).collect();
    let kept_workers: Vec<&str> = kept.workers.iter().map(|worker| worker.id.as_str()).collect();
    assert_eq!((workers, kept_workers), (vec!["anna"], vec!["anna"]));
    let bosses: Vec<&str> = listed.supervisors.iter().map(|boss| boss.name.as_str()).collect();
    let kept_bosses: Vec<&str> = kept.supervisors.iter().map(|boss| boss.name.as_str()).collect();
    assert_eq!((bosses, kept_bosses), (vec!["boss:there"], vec!["boss:there"]));
}

#[tokio::test]
async fn two_processes_are_not_one_supervisor() {
    let world = World::new(SLOW).await;
    let fleet = &world.fleet;
    fleet.supervised("boss:there", report("a")).await.unwrap();
    let second = fleet.supervised("boss:there", report("b")).await.unwrap_err();
    assert!(second.to_string().contains("another process"), "{second}");
    fleet.supervised("boss:there", report("a")).await.unwrap();
    assert!(fleet.retired("boss:there").await.unwrap());
    fleet.supervised("boss:there", report("b")).await.unwrap();
}

#[tokio::test]
async fn a_supervisor_that_begins_again_and_has_to_wait_is_not_missed_meanwhile() {
    let world = World::new(SLOW).await;
    let fleet = &world.fleet;
    fleet.supervised("boss:there", report("a")).await.unwrap();
    let boss = || Beat { supervisor: Some("boss:there".into()), ..beat() };
    let missed = async || fleet.heard("anna", boss(), false).await.unwrap().supervisor_seen_ms;
    let missed_for = async |time: u64| {
        soon("it is missed", async {
            while missed().await.unwrap() < time {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
    };
    missed_for(200).await;
    // One that is at work is another process, and keeps nobody's workers.
    fleet.supervised("boss:there", report("b")).await.unwrap_err();
    assert!(missed().await.unwrap() >= 200);
    let begins = Report { state: Mood::Starting, ..report("b") };
    let before = std::time::Instant::now();
    fleet.supervised("boss:there", begins).await.unwrap_err();
    assert!(u128::from(missed().await.unwrap()) <= before.elapsed().as_millis());
    // It begins, and no more.
    missed_for(200).await;
    fleet.supervised("boss:there", report("a")).await.expect("the first is still the one");
}

#[tokio::test]
async fn what_cannot_be_is_refused() {
    let world = World::new(SLOW).await;
    let fleet = &world.fleet;
    let invalid = |error: FleetError| assert!(matches!(error, FleetError::Invalid(_)), "{error:?}");
    let conflict =
        |error: FleetError| assert!(matches!(error, FleetError::Conflict(_)), "{error:?}");
    invalid(fleet.heard("a b", beat(), false).await.unwrap_err());
    let many = vec!["q".to_owned(); 1001];
    invalid(fleet.heard("a", Beat { queues: many, ..beat() }, false).await.unwrap_err());
    let long = "x".repeat(256);
    invalid(fleet.heard("a", Beat { version: long, ..beat() }, false).await.unwrap_err());
    let silent = Beat { state: Status::Silent, ..beat() };
    invalid(fleet.heard("a", silent, false).await.unwrap_err());
    for wrong in [
        Beat { host: "a\0b".into(), ..beat() },
        Beat { version: "1\n2".into(), ..beat() },
        Beat { birth: Some("\u{7f}".into()), ..beat() },
        Beat { done: vec![CommandId("\0".into())], ..beat() },
        Beat { done: vec![CommandId("a".repeat(65))], ..beat() },
    ] {
        invalid(fleet.heard("a", wrong, false).await.unwrap_err());
    }
    for wrong in [
        Report { host: "a\0b".into(), ..report("a") },
        Report { version: "x".repeat(256), ..report("a") },
        Report { balance: "\r".into(), ..report("a") },
        Report { done: vec![CommandId("a b".into())], ..report("a") },
        Report { instance: "x".repeat(256), ..report("a") },
    ] {
        invalid(fleet.supervised("boss:there", wrong).await.unwrap_err());
    }
    assert!(fleet.list().supervisors.is_empty() && fleet.list().workers.is_empty());
    invalid(fleet.start("unheard-of", 1, TTL).await.unwrap_err());
    invalid(fleet.start("default", 0, TTL).await.unwrap_err());
    conflict(fleet.start("default", 1, TTL).await.unwrap_err());
    conflict(fleet.restart(TTL).await.unwrap_err());
    assert!(fleet.terminate(TTL).await.unwrap().is_empty());
    fleet.heard("own", beat(), true).await.unwrap();
    conflict(fleet.tell("own", &Order::Stop, TTL).await.unwrap_err());
    fleet.tell("own", &Order::Pause, TTL).await.unwrap();
    fleet.left("own").await.unwrap();
    conflict(fleet.tell("own", &Order::Pause, TTL).await.unwrap_err());
    assert!(!fleet.left("nobody").await.unwrap());
}

#[tokio::test]
async fn a_command_given_to_one_server_reaches_a_worker_of_another() {
    let postgres = testing::postgres::Server::start().await;
    let open = async || {
        let schemas = [vedetta_jobs::postgres::SCHEMA, vedetta_fleet::postgres::SCHEMA];
        let db = Postgres::open(&postgres.url(), &schemas).await.unwrap();
        let (bus, roster) = (PostgresBus::new(db.clone()), PostgresRoster::new(db.clone()));
        let jobs = Arc::new(PostgresJobs::new(db));
        Fleet::open(Arc::new(bus), Arc::new(roster), jobs, [], SLOW).await.unwrap()
    };
    let here = open().await;
    here.heard("anna", beat(), false).await.unwrap();
    let there = open().await;
    assert_eq!(there.list().workers[0].id, "anna");
    let told = soon("a wake-up", async {
        // Until it listens it hears nothing, and looks seldom here.
        let anna = Target::worker("anna");
        let mut wakes = here.listen(&anna).unwrap();
        let mut told = there.tell("anna", &Order::Pause, TTL).await.unwrap();
        while tokio::time::timeout(Duration::from_secs(1), wakes.next()).await.is_err() {
            told = there.tell("anna", &Order::Pause, TTL).await.unwrap();
        }
        told
    })
    .await;
    let heard = here.heard("anna", beat(), false).await.unwrap();
    assert_eq!(heard.commands.len(), 1);
    assert_eq!(heard.commands[0].id, told.id);
    here.heard("anna", Beat { done: vec![told.id.clone()], ..beat() }, false).await.unwrap();
    assert_eq!(there.command(&told.id.0).await.unwrap().state, State::Applied);
}
