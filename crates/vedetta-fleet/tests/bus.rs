//! What a command bus does: one suite, on the embedded file, a real PostgreSQL and a real Redis.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tempfile::TempDir;
use testing::{Proxy, soon};
use tokio::sync::broadcast;
use tokio::task::JoinSet;
use vedetta_db::postgres::Postgres;
use vedetta_db::{Db, Options};
use vedetta_fleet::bus::redis::RedisBus;
use vedetta_fleet::bus::{MOST, Record, State, Taken, Wake};
use vedetta_fleet::postgres::PostgresBus;
use vedetta_fleet::sqlite::{SqliteBus, SqliteRoster};
use vedetta_fleet::wire::Beat;
use vedetta_fleet::{Bus, BusError, CommandId, Fleet, Order, Target};
use vedetta_jobs::sqlite::SqliteJobs;

/// Long enough never to be over within a test.
const HOUR: Duration = Duration::from_secs(3600);
/// Soon over.
const SHORT: Duration = Duration::from_millis(300);

/// A place that keeps commands.
trait World: Sized {
    async fn new() -> Self;
    /// Somebody else at the same place, with connections of their own where there can be several.
    async fn neighbour(&self) -> Arc<dyn Bus>;
    /// The same place after everything that has it ended and began again.
    async fn reopened(self) -> Self;
    /// Whoever listens hears nothing of what is put meanwhile.
    async fn deaf(&mut self);
    fn bus(&self) -> &Arc<dyn Bus>;
}

struct Sqlite {
    folder: TempDir,
    db: Db,
    bus: Arc<dyn Bus>,
}

impl Sqlite {
    fn open(folder: TempDir) -> Self {
        let mut options = Options::new(folder.path().join("fleet.db"));
        options.ballast = 0;
        let db = Db::open(&options, &[vedetta_fleet::sqlite::SCHEMA]).unwrap();
        Self { folder, bus: Arc::new(SqliteBus::new(db.clone())), db }
    }
}

impl World for Sqlite {
    async fn new() -> Self {
        Self::open(TempDir::new().unwrap())
    }

    async fn neighbour(&self) -> Arc<dyn Bus> {
        // One process has the file.
        Arc::clone(&self.bus)
    }

    async fn reopened(self) -> Self {
        let Self { folder, db, bus } = self;
        drop(bus);
        tokio::task::spawn_blocking(move || db.close_blocking()).await.unwrap();
        Self::open(folder)
    }

    async fn deaf(&mut self) {
        // There is no line that could be cut: a listener that came too late is as deaf.
    }

    fn bus(&self) -> &Arc<dyn Bus> {
        &self.bus
    }
}

struct OnPostgres {
    server: testing::postgres::Server,
    proxy: Proxy,
    bus: Arc<dyn Bus>,
}

impl OnPostgres {
    async fn open(server: testing::postgres::Server) -> Self {
        let proxy = Proxy::to(server.address()).await;
        let url = server.url().replace(&server.address().to_string(), &proxy.address().to_string());
        let db = Postgres::open(&url, &[vedetta_fleet::postgres::SCHEMA]).await.unwrap();
        Self { server, proxy, bus: Arc::new(PostgresBus::new(db)) }
    }
}

impl World for OnPostgres {
    async fn new() -> Self {
        Self::open(testing::postgres::Server::start().await).await
    }

    async fn neighbour(&self) -> Arc<dyn Bus> {
        let schemas = [vedetta_fleet::postgres::SCHEMA];
        Arc::new(PostgresBus::new(Postgres::open(&self.server.url(), &schemas).await.unwrap()))
    }

    async fn reopened(self) -> Self {
        let Self { mut server, .. } = self;
        server.kill();
        server.start_again().await;
        Self::open(server).await
    }

    async fn deaf(&mut self) {
        self.proxy.hang_up();
    }

    fn bus(&self) -> &Arc<dyn Bus> {
        &self.bus
    }
}

struct OnRedis {
    server: testing::redis::Server,
    proxy: Proxy,
    bus: Arc<dyn Bus>,
}

impl OnRedis {
    async fn open(server: testing::redis::Server) -> Self {
        let proxy = Proxy::to(server.address()).await;
        let bus = RedisBus::open(&server.url_at(proxy.address())).await.unwrap();
        Self { server, proxy, bus: Arc::new(bus) }
    }
}

impl World for OnRedis {
    async fn new() -> Self {
        Self::open(testing::redis::Server::start().await).await
    }

    async fn neighbour(&self) -> Arc<dyn Bus> {
        Arc::new(RedisBus::open(&self.server.url()).await.unwrap())
    }

    async fn reopened(self) -> Self {
        let Self { mut server, .. } = self;
        server.kill();
        server.start_again().await;
        Self::open(server).await
    }

    async fn deaf(&mut self) {
        self.proxy.hang_up();
    }

    fn bus(&self) -> &Arc<dyn Bus> {
        &self.bus
    }
}

fn anna() -> Target {
    Target::worker("anna")
}

async fn put(bus: &Arc<dyn Bus>, order: Order, ttl: Duration) -> Record {
    bus.put(&anna(), &order, ttl).await.unwrap()
}

async fn orders(bus: &Arc<dyn Bus>) -> Vec<Order> {
    bus.take(&anna()).await.unwrap().into_iter().map(|taken| taken.order).collect()
}

async fn state(bus: &Arc<dyn Bus>, id: &CommandId) -> State {
    bus.command(id).await.unwrap().expect("it is known").state
}

async fn a_command_is_requested_taken_and_applied<W: World>() {
    let world = W::new().await;
    let bus = world.bus();
    let asked = put(bus, Order::Pause, HOUR).await;
    assert_eq!((&asked.order, asked.state), (&Order::Pause, State::Requested));
    assert_eq!(asked.expires.duration_since(asked.created).unwrap().as_secs(), 3600);
    assert_eq!(bus.command(&asked.id).await.unwrap().as_ref(), Some(&asked));
    assert!(bus.take(&Target::worker("ben")).await.unwrap().is_empty(), "it is for another");
    assert!(bus.take(&Target::supervisor("anna")).await.unwrap().is_empty(), "so it is");

    let taken = world.neighbour().await.take(&anna()).await.unwrap();
    assert_eq!(taken.len(), 1);
    assert_eq!((&taken[0].id, &taken[0].order), (&asked.id, &Order::Pause));
    assert!(taken[0].left <= HOUR && taken[0].left > HOUR / 2, "{:?}", taken[0].left);
    assert_eq!(state(bus, &asked.id).await, State::Taken);
    assert!(orders(bus).await.is_empty(), "once");

    let unknown = CommandId("of somebody else".into());
    bus.applied(&[asked.id.clone(), unknown.clone()]).await.unwrap();
    assert_eq!(state(bus, &asked.id).await, State::Applied);
    assert_eq!(bus.command(&unknown).await.unwrap(), None);
    let untaken = put(bus, Order::Resume, HOUR).await;
    bus.applied(std::slice::from_ref(&untaken.id)).await.unwrap();
    assert_eq!(state(bus, &untaken.id).await, State::Requested, "nobody had it");
}

/// Waits until the time of a command is over.
async fn is_over(bus: &Arc<dyn Bus>, id: &CommandId) {
    soon("its time is over", async {
        while state(bus, id).await != State::Expired {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

async fn a_command_whose_time_is_over_is_never_handed_out<W: World>() {
    let world = W::new().await;
    let bus = world.bus();
    let late = put(bus, Order::Stop, SHORT).await;
    let taken = put(bus, Order::Start { queue: "a".into(), count: 1 }, SHORT).await;
    let lasting = put(bus, Order::Restart, HOUR).await;
    is_over(bus, &late.id).await;
    is_over(bus, &taken.id).await;
    assert_eq!(orders(bus).await, [Order::Restart], "what lasts longer is there");
    for id in [&late.id, &taken.id] {
        bus.applied(std::slice::from_ref(id)).await.unwrap();
        assert_eq!(state(bus, id).await, State::Expired, "nobody obeyed it");
    }
    assert_eq!(state(bus, &lasting.id).await, State::Taken);

    let lost = put(bus, Order::Pause, SHORT).await;
    assert_eq!(orders(bus).await, [Order::Pause]);
    is_over(bus, &lost.id).await; // who took it never said a word
    assert!(orders(bus).await.is_empty());
}

async fn of_many_who_take_at_once_one_gets_it<W: World>() {
    let world = W::new().await;
    let (here, there) = (world.bus(), world.neighbour().await);
    for round in 0..20 {
        let mut put_ids = HashSet::new();
        for count in 1..=3 {
            let order = Order::Start { queue: format!("q{round}"), count };
            put_ids.insert(put(here, order, HOUR).await.id);
        }
        let mut takers = JoinSet::new();
        for taker in 0..16 {
            let bus = Arc::clone(if taker % 2 == 0 { here } else { &there });
            takers.spawn(async move { bus.take(&anna()).await.unwrap() });
        }
        let taken: Vec<CommandId> =
            takers.join_all().await.into_iter().flatten().map(|taken| taken.id).collect();
        assert_eq!(taken.len(), 3, "each once");
        assert_eq!(taken.into_iter().collect::<HashSet<_>>(), put_ids);
    }
}

async fn the_last_of_its_kind_stands_and_a_stop_is_not_taken_back<W: World>() {
    let world = W::new().await;
    let bus = world.bus();
    let first = put(bus, Order::Pause, HOUR).await;
    let second = put(bus, Order::Resume, HOUR).await;
    let other = bus.put(&Target::worker("ben"), &Order::Pause, HOUR).await.unwrap();
    assert_eq!(state(bus, &first.id).await, State::Replaced);
    assert_eq!(orders(bus).await, [Order::Resume]);
    assert_eq!(state(bus, &second.id).await, State::Taken);
    assert_eq!(state(bus, &other.id).await, State::Requested, "another's is untouched");

    let pause = put(bus, Order::Pause, HOUR).await;
    let stop = put(bus, Order::Stop, HOUR).await;
    let resume = put(bus, Order::Resume, HOUR).await;
    assert_eq!(resume.state, State::Replaced, "a stop stands");
    assert_eq!(state(bus, &resume.id).await, State::Replaced);
    assert_eq!(state(bus, &pause.id).await, State::Replaced);
    assert_eq!(orders(bus).await, [Order::Stop]);
    assert_eq!(state(bus, &stop.id).await, State::Taken);

    // Starts add up, in their order; the end of all replaces them.
    let start = |count| Order::Start { queue: "media".into(), count };
    for count in [3, 1, 2] {
        put(bus, start(count), HOUR).await;
    }
    assert_eq!(orders(bus).await, [start(3), start(1), start(2)]);
    put(bus, start(1), HOUR).await;
    put(bus, Order::Restart, HOUR).await;
    put(bus, Order::Terminate, HOUR).await;
    assert_eq!(orders(bus).await, [Order::Terminate]);
}

async fn a_stop_whose_time_is_over_holds_nothing_up<W: World>() {
    let world = W::new().await;
    let bus = world.bus();
    let stop = put(bus, Order::Stop, SHORT).await;
    is_over(bus, &stop.id).await;
    assert_eq!(put(bus, Order::Pause, HOUR).await.state, State::Requested);
    assert_eq!(orders(bus).await, [Order::Pause]);
}

async fn commands_survive_the_end_of_everything_and_expire_all_the_same<W: World>() {
    let world = W::new().await;
    let kept = put(world.bus(), Order::Start { queue: "a".into(), count: 7 }, HOUR).await;
    let late = put(world.bus(), Order::Restart, SHORT).await;
    let taken = world.bus().put(&Target::worker("ben"), &Order::Pause, HOUR).await.unwrap();
    assert_eq!(world.bus().take(&Target::worker("ben")).await.unwrap().len(), 1);
    let world = world.reopened().await;
    let bus = world.bus();
    is_over(bus, &late.id).await;
    assert!(bus.take(&Target::worker("ben")).await.unwrap().is_empty(), "it was handed out before");
    assert_eq!(state(bus, &taken.id).await, State::Taken);
    assert_eq!(orders(bus).await, [Order::Start { queue: "a".into(), count: 7 }]);
    assert_eq!(state(bus, &kept.id).await, State::Taken);
}

async fn whoever_waits_is_woken_also_by_others<W: World>() {
    let world = W::new().await;
    let neighbour = world.neighbour().await;
    let mut wakes = world.bus().wakes();
    for bus in [world.bus(), &neighbour, world.bus()] {
        // Until it listens, and says so, it may hear nothing.
        soon("a wake-up", async {
            loop {
                put(bus, Order::Pause, HOUR).await;
                let heard = tokio::time::timeout(Duration::from_millis(200), async {
                    while wakes.recv().await.unwrap() != Wake::Of(anna()) {}
                });
                if heard.await.is_ok() {
                    break;
                }
            }
        })
        .await;
    }
}

async fn what_no_wake_up_told_is_found_by_a_look<W: World>() {
    let mut world = W::new().await;
    let neighbour = world.neighbour().await;
    let everybody = [anna(), Target::worker("ben"), Target::supervisor("anna")];
    assert_eq!(world.bus().waiting(&everybody).await.unwrap(), []);
    assert_eq!(world.bus().waiting(&[]).await.unwrap(), []);
    world.deaf().await;
    put(&neighbour, Order::Pause, HOUR).await;
    let bus = Arc::clone(world.bus());
    soon("a look that finds it", async {
        loop {
            // The line is down: then it is tried again.
            match bus.waiting(&everybody).await {
                Ok(found) if found == [anna()] => break,
                Ok(found) => panic!("{found:?}"),
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    })
    .await;
    assert_eq!(orders(&bus).await, [Order::Pause]);
    assert_eq!(bus.waiting(&everybody).await.unwrap(), []);
    let pause = put(&bus, Order::Pause, SHORT).await;
    is_over(&bus, &pause.id).await;
    // That something waits is a hint, which may outlive it by a moment.
    soon("nothing waits: its time is over", async {
        while !bus.waiting(&everybody).await.unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// A bus whose wake-ups never come.
struct Deaf {
    inner: Arc<dyn Bus>,
    silence: broadcast::Sender<Wake>,
}

#[async_trait]
impl Bus for Deaf {
    async fn put(&self, target: &Target, order: &Order, ttl: Duration) -> Result<Record, BusError> {
        self.inner.put(target, order, ttl).await
    }

    async fn take(&self, target: &Target) -> Result<Vec<Taken>, BusError> {
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
        self.silence.subscribe()
    }
}

async fn a_server_that_no_wake_up_reaches_hands_out_what_is_put<W: World>() {
    let world = W::new().await;
    let folder = TempDir::new().unwrap();
    let mut options = Options::new(folder.path().join("server.db"));
    options.ballast = 0;
    let schemas = [vedetta_jobs::sqlite::SCHEMA, vedetta_fleet::sqlite::SCHEMA];
    let db = Db::open(&options, &schemas).unwrap();
    let deaf = Deaf { inner: Arc::clone(world.bus()), silence: broadcast::Sender::new(1) };
    let roster = Arc::new(SqliteRoster::new(db.clone()));
    let jobs = Arc::new(SqliteJobs::open(db).await.unwrap());
    let often = Duration::from_millis(50);
    let fleet = Fleet::open(Arc::new(deaf), roster, jobs, [], often).await.unwrap();
    let beat = || Beat::of_this_process(vec!["default".into()]);
    // What waits when it comes is found without a look.
    assert!(fleet.heard("anna", beat(), false).await.unwrap().commands.is_empty());
    let neighbour = world.neighbour().await;
    for (bus, order) in [(world.bus(), Order::Pause), (&neighbour, Order::Resume)] {
        let told = put(bus, order, HOUR).await;
        let handed = soon("a look", async {
            loop {
                let heard = fleet.heard("anna", beat(), false).await.unwrap();
                if !heard.commands.is_empty() {
                    break heard.commands;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        let ids: Vec<CommandId> = handed.await.into_iter().map(|handed| handed.id).collect();
        assert_eq!(ids, [told.id]);
    }
}

async fn whoever_does_not_listen_gets_no_more_than_so_many<W: World>() {
    let world = W::new().await;
    let bus = world.bus();
    let start = Order::Start { queue: "a".into(), count: 1 };
    for _ in 0..MOST {
        put(bus, start.clone(), HOUR).await;
    }
    let refused = bus.put(&anna(), &start, HOUR).await.unwrap_err();
    assert_eq!(refused.to_string(), "100 commands wait for it already");
    assert_eq!(orders(bus).await.len(), MOST);
    put(bus, start, HOUR).await;
}

macro_rules! stories {
    ($($story:ident)*) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $story() {
                testing::soon("a story", super::$story::<super::Sqlite>()).await;
            })*
        }

        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $story() {
                testing::soon("a story", super::$story::<super::OnPostgres>()).await;
            })*
        }

        mod redis {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $story() {
                testing::soon("a story", super::$story::<super::OnRedis>()).await;
            })*
        }
    };
}

stories! {
    a_command_is_requested_taken_and_applied
    a_command_whose_time_is_over_is_never_handed_out
    of_many_who_take_at_once_one_gets_it
    the_last_of_its_kind_stands_and_a_stop_is_not_taken_back
    a_stop_whose_time_is_over_holds_nothing_up
    commands_survive_the_end_of_everything_and_expire_all_the_same
    whoever_waits_is_woken_also_by_others
    what_no_wake_up_told_is_found_by_a_look
    a_server_that_no_wake_up_reaches_hands_out_what_is_put
    whoever_does_not_listen_gets_no_more_than_so_many
}

#[tokio::test]
async fn a_url_that_cannot_be_used_is_refused_without_its_password() {
    let far = "redis://:opensesame@127.0.0.1:1";
    for url in ["rediss://:opensesame@127.0.0.1", "redis://:opensesame@host:port", far] {
        let error = RedisBus::open(url).await.expect_err("it cannot be used");
        let mut said = format!("{error} {error:?}");
        let mut cause = std::error::Error::source(&error);
        while let Some(error) = cause {
            said = format!("{said} {error} {error:?}");
            cause = error.source();
        }
        assert!(!said.contains("opensesame"), "{said}");
    }
}

/// What is left of a command whose place has a clock that is an hour behind the one it was put by.
async fn left(bus: &Arc<dyn Bus>, target: &Target) -> Duration {
    bus.take(target).await.unwrap().remove(0).left
}

#[tokio::test]
async fn after_the_clock_of_a_server_was_set_back_no_more_is_left_than_was_asked_for() {
    let (minute, anna) = (Duration::from_secs(60), Target::worker("anna"));
    let redis = OnRedis::new().await;
    let put = redis.bus().put(&anna, &Order::Stop, minute).await.unwrap();
    let client = ::redis::Client::open(redis.server.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let mut later = ::redis::cmd("PEXPIRE");
    later.arg(format!("{{vedetta}}:command:{}", put.id.0)).arg(3_660_000);
    assert!(later.query_async::<bool>(&mut connection).await.unwrap());
    assert!(left(redis.bus(), &anna).await <= minute);

    let postgres = OnPostgres::new().await;
    postgres.bus().put(&anna, &Order::Stop, minute).await.unwrap();
    let schemas = [vedetta_fleet::postgres::SCHEMA];
    let db = Postgres::open(&postgres.server.url(), &schemas).await.unwrap();
    let later = "UPDATE vedetta_command SET created_at = created_at + interval '1 hour',
                 expires_at = expires_at + interval '1 hour'";
    assert_eq!(db.client().await.unwrap().execute(later, &[]).await.unwrap(), 1);
    assert!(left(postgres.bus(), &anna).await <= minute);
}

#[tokio::test]
async fn a_command_whose_record_a_redis_has_lost_keeps_no_other_from_being_handed_out() {
    let redis = OnRedis::new().await;
    let start = Order::Start { queue: "a".into(), count: 1 };
    let lost = put(redis.bus(), start.clone(), HOUR).await;
    put(redis.bus(), Order::Restart, HOUR).await;
    let client = ::redis::Client::open(redis.server.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let mut forget = ::redis::cmd("DEL");
    forget.arg(format!("{{vedetta}}:record:{}", lost.id.0));
    assert!(forget.query_async::<bool>(&mut connection).await.unwrap());
    assert_eq!(orders(redis.bus()).await, [start, Order::Restart]);
    assert_eq!(redis.bus().command(&lost.id).await.unwrap(), None);
}
