//! The whole example with a real Janus and real FFmpeg: what is said in a room is in its stream, and in no other; and
//! whatever breaks, it is so again soon, and nothing is left over.

mod sound;
mod world;

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use live_rooms::bridge::Bridged;
use live_rooms::model::TTL;
use rustix::process::Signal;
use testing::{Proxy, etcd};
use world::{
    FAR_MANAGER, MANAGER, MARK, MIXERS, OTHER_MANAGER, Ours, Process, ROOMS, State, World, ask,
    heard, kill, marked, tail, tell, until,
};

const BUSY: &str = "busy";
const QUIET: &str = "quiet";

/// Nothing here takes longer to be as it was, but on a machine that has much else to do: a segment is 1 s, and what
/// is seen to be wrong is so within seconds.
const SOON: Duration = Duration::from_secs(30);
/// The same, when somebody must first be taken for dead.
const AFTER_A_LEASE: Duration = Duration::from_secs(30 + TTL.as_secs());

/// A world with two rooms, each with its tone in its stream.
async fn two_rooms(state: State, mixers: usize) -> World {
    let world = World::start(state, mixers).await;
    let begun = SystemTime::now();
    world.open(BUSY, 440).await;
    world.open(QUIET, 2500).await;
    world.recovers("created and started", begun, SOON).await;
    world
}

/// The mixer that this one is not.
fn other_mixer(mixer: &str) -> &'static str {
    if mixer == MIXERS[0] { MIXERS[1] } else { MIXERS[0] }
}

/// Waits until another FFmpeg than this one streams a room.
async fn another_ffmpeg(world: &World, room: &str, before: u32) {
    until("another FFmpeg", async || match world.ffmpegs(Some(room))[..] {
        [other] if other != before => Ok(()),
        _ => Err(String::new()),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_said_in_a_room_is_in_its_stream_whatever_happens_to_ffmpeg_and_janus() {
    let mut world = two_rooms(State::Ours(Ours::start().await), 1).await;

    // Two people are mixed, with what is played; the other room hears nothing of it.
    world.talk(BUSY, 1000).await;
    world.talk(BUSY, 1700).await;
    let now = SystemTime::now();
    world.heard(BUSY, &[440, 1000, 1700], &[2500], now).await;
    world.heard(QUIET, &[2500], &[440, 1000, 1700], now).await;

    let [ffmpeg] = world.ffmpegs(Some(BUSY))[..] else { panic!("there is one") };
    let killed = SystemTime::now();
    kill(ffmpeg);
    world.recovers("FFmpeg killed", killed, SOON).await;
    assert_ne!(world.ffmpegs(Some(BUSY)), [ffmpeg]);

    // A stopped room is streamed no more, and nothing is kept for it but its place in Janus.
    let stopped = world.ask("POST", "/rooms/quiet/stop", None).await;
    assert_eq!((stopped.0, &stopped.1["status"]), (200, &"stopped".into()));
    until("it is stopped", async || {
        let sends = world.bridge().forwarders(QUIET).await.map_err(|error| error.to_string())?;
        let (streams, room) = (world.ffmpegs(Some(QUIET)), world.room(QUIET).await);
        let is_stopped = sends.is_empty() && streams.is_empty() && room["mixer"].is_null();
        if is_stopped { Ok(()) } else { Err(format!("{sends:?} {streams:?} {room}")) }
    })
    .await;
    let started = SystemTime::now();
    assert_eq!(world.ask("POST", "/rooms/quiet/start", None).await.0, 200);
    world.recovers("stopped, and started again", started, SOON).await;

    // That Janus was restarted is seen by looking at it: this one is not on air, nothing of it starves, and not all
    // are compared so often.
    let waiting = serde_json::json!({ "id": "waiting" });
    assert_eq!(world.ask("POST", "/rooms", Some(waiting)).await.0, 201);
    let is_in_janus = async |world: &World| {
        until("it is in Janus", async || {
            let rooms = world.janus.rooms().await;
            if rooms.iter().any(|room| room == "waiting") {
                Ok(())
            } else {
                Err(format!("{rooms:?}"))
            }
        })
        .await;
    };
    is_in_janus(&world).await;
    let killed = SystemTime::now();
    world.janus.start_again().await;
    let begun = SystemTime::now();
    is_in_janus(&world).await;
    let back = begun.elapsed().unwrap();
    tell("Janus restarted", "a room that nobody streams was there again", begun);
    assert!(back < Duration::from_secs(10), "{back:?}");
    assert_eq!(world.ask("DELETE", "/rooms/waiting", None).await.0, 202);
    world.recovers("Janus restarted", killed, SOON).await;

    // Without its manager Janus goes on. What changes meanwhile is done when there is one again.
    world.kill(MANAGER);
    let killed = SystemTime::now();
    world.heard(QUIET, &[2500], &[440], killed).await;
    let [ffmpeg] = world.ffmpegs(Some(BUSY))[..] else { panic!("there is one") };
    kill(ffmpeg);
    another_ffmpeg(&world, BUSY, ffmpeg).await;
    world.delete(QUIET).await;
    let again = SystemTime::now();
    world.spawn(MANAGER);
    let fault = "manager of Janus killed, FFmpeg too, and it started again";
    world.recovers(fault, again, SOON).await;
    world.ready(MANAGER).await;

    // The same if it is only cut off from the store.
    let (before, cut) = (world.assignments().await, SystemTime::now());
    world.link(MANAGER).cut();
    world.go_on(&before, cut).await;
    let [ffmpeg] = world.ffmpegs(Some(BUSY))[..] else { panic!("there is one") };
    kill(ffmpeg);
    another_ffmpeg(&world, BUSY, ffmpeg).await;
    let healed = SystemTime::now();
    world.link(MANAGER).mend();
    let fault = "manager of Janus cut off, FFmpeg killed, and the line is back";
    world.recovers(fault, healed, SOON).await;

    // And nobody who listens needs `rooms`.
    let cut = SystemTime::now();
    world.link(ROOMS).cut();
    world.go_on(&before, cut).await;
    let healed = SystemTime::now();
    world.link(ROOMS).mend();
    until("a room is created", async || {
        if world.try_open("new", 3300).await { Ok(()) } else { Err("not yet".to_owned()) }
    })
    .await;
    world.recovers("`rooms` cut off, and a new room when the line is back", healed, SOON).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rooms_of_a_mixer_that_is_to_end_killed_or_cut_off_move_to_another() {
    let mut world = two_rooms(State::Ours(Ours::start().await), 2).await;
    let drained = world.mixer_of(BUSY).await;
    let asked = SystemTime::now();
    let answer = world.ask("POST", &format!("/mixers/{drained}/drain"), None).await;
    assert_eq!((answer.0, &answer.1["state"]["draining"]), (200, &true.into()), "{answer:?}");
    let other = other_mixer(drained);
    world.all_are_mixed_by(other).await;
    world.recovers("mixer drained", asked, SOON).await;
    assert_eq!(world.ask("POST", &format!("/mixers/{drained}/uncordon"), None).await.0, 200);

    // One that is asked to end leaves when its rooms have moved.
    let (mixer, asked) = (drained, SystemTime::now());
    world.terminate(other).await;
    let left = format!("/mixers/{other}/heartbeat");
    assert!(!world.heartbeats().await.contains(&left), "it does not wait for its lease");
    let mixed_by = async |world: &World| [world.mixer_of(BUSY).await, world.mixer_of(QUIET).await];
    assert_eq!(mixed_by(&world).await, [mixer; 2]);
    world.recovers("mixer asked to end (SIGTERM)", asked, SOON).await;
    world.spawn(other);
    world.ready(other).await;

    // One that is back before its lease is over goes on with its rooms, also if what should have ended its FFmpegs
    // was killed, too.
    let before = world.assignments().await;
    let killed = SystemTime::now();
    world.kill_with_guard(mixer);
    assert_eq!(world.ffmpegs(Some(BUSY)).len(), 1, "nobody is there to end it");
    world.spawn(mixer);
    world.ready(mixer).await;
    world.recovers("mixer and its guard killed, and started again", killed, SOON).await;
    assert_eq!(world.count(mixer, "ended what a former mixer has left"), 1);
    assert_eq!(world.assignments().await, before, "and nothing was placed anew");

    let killed = SystemTime::now();
    world.kill(mixer);
    world.recovers("mixer killed", killed, AFTER_A_LEASE).await;
    world.all_are_mixed_by(other).await;

    // The one that has all is cut off, and comes back. What it had is not its any more.
    world.spawn(mixer);
    world.ready(mixer).await;
    let (before, cut) = (world.assignments().await, SystemTime::now());
    world.link(other).cut();
    // The streams go on until the rooms move.
    world.go_on(&before, cut).await;
    world.all_are_mixed_by(mixer).await;
    let moved = SystemTime::now();
    world.heard(BUSY, &[440], &[2500], moved).await;
    world.heard(QUIET, &[2500], &[440], moved).await;
    tell("mixer cut off from the store", "the tones were there from another", cut);
    assert!(cut.elapsed().unwrap() < AFTER_A_LEASE + SOON);
    // Of a room that another one streams into the shared folder meanwhile it knows nothing, and leaves it alone when it
    // is back and looks for what is left over.
    world.open("new", 1000).await;
    world.recovers("a new room, while a mixer is cut off", moved, AFTER_A_LEASE).await;
    let folder = |world: &World, room: &str| {
        std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(world.media().join(room)).unwrap())
    };
    let (new, before) = (folder(&world, "new"), world.assignments().await);
    let left = world.media().join("left-over");
    std::fs::create_dir(&left).unwrap();
    std::fs::write(left.join(live_rooms::stream::MARKER), "").unwrap();
    let healed = SystemTime::now();
    world.link(other).mend();
    until("it has looked", async || if left.exists() { Err("not yet".to_owned()) } else { Ok(()) })
        .await;
    world.go_on(&before, SystemTime::now()).await;
    assert_eq!(folder(&world, "new"), new, "it is the same");
    world.recovers("mixer no longer cut off", healed, SOON).await;
    assert_eq!(mixed_by(&world).await, [mixer; 2]);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rooms_go_to_another_manager_of_their_janus_and_from_one_janus_to_another() {
    let mut world = two_rooms(State::Ours(Ours::start().await), 1).await;
    // Asked to end, with nobody to take its rooms, a manager leaves them in Janus, and they are heard.
    let before = world.assignments().await;
    world.terminate(MANAGER).await;
    assert!(!world.heartbeats().await.contains(&format!("/januses/{MANAGER}/heartbeat")));
    assert_eq!(world.janus.rooms().await, [BUSY, QUIET]);
    world.go_on(&before, SystemTime::now()).await;

    // Another manager of the same Janus makes the rooms its own, and then is content.
    let begun = SystemTime::now();
    world.spawn(OTHER_MANAGER);
    world.ready(OTHER_MANAGER).await;
    world.all_are_kept_by(OTHER_MANAGER).await;
    let rooms = world.bridge().rooms().await.unwrap();
    let is_its = |room: &Bridged| room.description == format!("live-rooms {OTHER_MANAGER}");
    assert!(rooms.len() == 2 && rooms.iter().all(is_its), "{rooms:?}");
    world.recovers("manager of Janus gone, and another one there", begun, SOON).await;
    // It looks at Janus at least once while this is said.
    let looks = world.count(OTHER_MANAGER, "looking at every room");
    world.heard(BUSY, &[440], &[2500], SystemTime::now()).await;
    assert_eq!(world.count(OTHER_MANAGER, "looking at every room"), looks);

    // With a second Janus, what comes goes to where the fewest are.
    world.another_janus().await;
    world.spawn(FAR_MANAGER);
    world.ready(FAR_MANAGER).await;
    let begun = SystemTime::now();
    world.open("new", 1000).await;
    world.open("newer", 3300).await;
    world.recovers("two rooms in each of two Januses", begun, SOON).await;
    assert_eq!(world.janus.rooms().await, [BUSY, QUIET]);
    assert_eq!(world.far_rooms().await, ["new", "newer"]);

    let asked = SystemTime::now();
    let answer = world.ask("POST", &format!("/januses/{FAR_MANAGER}/drain"), None).await;
    assert_eq!((answer.0, &answer.1["state"]["draining"]), (200, &true.into()), "{answer:?}");
    world.all_are_kept_by(OTHER_MANAGER).await;
    world.recovers("Janus drained, and another one there", asked, SOON).await;
    assert_eq!(world.far_rooms().await, [""; 0]);
    assert_eq!(world.ask("POST", &format!("/januses/{FAR_MANAGER}/uncordon"), None).await.0, 200);

    // Without its manager a Janus goes on, until its rooms are in the other one; and what it still has goes when a
    // manager is back.
    let (before, killed) = (world.assignments().await, SystemTime::now());
    world.kill(OTHER_MANAGER);
    world.go_on(&before[..1], killed).await;
    world.all_are_kept_by(FAR_MANAGER).await;
    let (after, moved) = (world.assignments().await, SystemTime::now());
    world.go_on(&after, moved).await;
    let fault = "manager of Janus killed, and another Janus there";
    tell(fault, "4 streams had the right tone from there", killed);
    assert!(killed.elapsed().unwrap() < AFTER_A_LEASE);
    assert_eq!(world.janus.rooms().await, [BUSY, "new", "newer", QUIET], "nobody ends them");
    world.spawn(OTHER_MANAGER);
    world.ready(OTHER_MANAGER).await;
    world.settled().await;
    assert_eq!(world.janus.rooms().await, [""; 0]);

    let killed = SystemTime::now();
    world.end_the_other_janus();
    world.all_are_kept_by(OTHER_MANAGER).await;
    world.recovers("Janus dead, and another one there", killed, SOON).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_outlive_their_store_and_a_room_that_is_removed_while_all_is_down_is_gone() {
    let mut world = two_rooms(State::Ours(Ours::start().await), 1).await;
    let State::Ours(ours) = &mut world.state else { unreachable!() };
    let killed = SystemTime::now();
    ours.kill();
    // The streams go on without it.
    world.heard(BUSY, &[440], &[2500], killed).await;
    let State::Ours(ours) = &mut world.state else { unreachable!() };
    let begun = SystemTime::now();
    ours.begin().await;
    world.recovers("store killed, and started again", begun, SOON).await;
    // And it is obeyed again.
    until("a room is created", async || {
        if world.try_open("third", 1000).await { Ok(()) } else { Err("not yet".to_owned()) }
    })
    .await;
    until("a room is removed", async || match world.ask("DELETE", "/rooms/third", None).await {
        (202, _) => Ok(()),
        answer => Err(format!("{answer:?}")),
    })
    .await;
    world.forget("third");
    world.settled().await;

    // Every line to it is cut, for longer than any lease: the streams go on.
    let (before, cut) = (world.assignments().await, SystemTime::now());
    world.links().for_each(Proxy::cut);
    world.go_on(&before, cut).await;
    world.all_are_dead().await;
    world.go_on(&before, SystemTime::now()).await;
    let healed = SystemTime::now();
    world.links().for_each(Proxy::mend);
    world.recovers("every line to the store cut, and back", healed, SOON).await;

    // Everything is down but Janus and the store, and they keep what was there.
    for name in [MIXERS[0], MANAGER] {
        world.kill(name);
    }
    world.all_are_dead().await;
    world.delete(BUSY).await;
    until("it is gone from the store", async || {
        match world.ask("GET", "/rooms/busy", None).await {
            (404, _) => Ok(()),
            answer => Err(format!("{answer:?}")),
        }
    })
    .await;
    world.kill(ROOMS);
    assert_eq!(world.janus.rooms().await, [BUSY, QUIET]);
    assert!(world.media().join(BUSY).exists());
    let begun = SystemTime::now();
    for name in [ROOMS, MANAGER, MIXERS[0]] {
        world.spawn(name);
    }
    for name in [ROOMS, MANAGER, MIXERS[0]] {
        world.ready(name).await;
    }
    world.recovers("room removed while all was down, and all started again", begun, SOON).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rooms_outlive_the_leader_of_their_etcd() {
    let etcd = etcd::Cluster::start(3).await;
    let mut world = two_rooms(State::Etcd(etcd), 1).await;
    let State::Etcd(etcd) = &mut world.state else { unreachable!() };
    let leader = etcd.leader().await;
    let killed = SystemTime::now();
    etcd.node_mut(leader).kill();
    // The streams go on, and rooms can be had as soon as there is another leader.
    until("a room is created", async || {
        if world.try_open("new", 1000).await { Ok(()) } else { Err("not yet".to_owned()) }
    })
    .await;
    let led = tokio::time::Instant::now();
    world.recovers("leader of etcd killed, and a new room", killed, AFTER_A_LEASE).await;
    // Longer than any lease: nobody was taken for dead.
    tokio::time::sleep_until(led + TTL + Duration::from_secs(1)).await;
    let (before, now) = (world.assignments().await, SystemTime::now());
    world.recovers("leader of etcd killed, leases later", now, SOON).await;
    let twice = before.iter().all(|(_, assignments)| *assignments == 2);
    assert!(twice, "each was placed twice, in Janus and with its mixer: {before:?}");
    world.end().await;
}

/// The demo, on air.
struct Demo {
    process: Process,
    said: String,
    log: PathBuf,
    mark: String,
    /// Where it has its temporary files.
    files: PathBuf,
    _folder: tempfile::TempDir,
}

impl Demo {
    async fn start(arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (mark, log) = (folder.path().to_string_lossy().into_owned(), folder.path().join("log"));
        let files = folder.path().join("files");
        std::fs::create_dir(&files).unwrap();
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_live-rooms"));
        command.arg("demo").args(arguments).env("TMPDIR", &files).env(MARK, &mark);
        let process = Process::start(command, &log);
        let said = until("it is on air", async || {
            let said = process.said.lock().unwrap().join("\n");
            if said.contains("Ctrl-C ends it") {
                Ok(said)
            } else {
                Err(format!("{said}\n{}", tail(&log)))
            }
        })
        .await;
        Self { process, said, log, mark, files, _folder: folder }
    }

    /// The word after this in what it said.
    fn after(&self, what: &str) -> String {
        let line = self.said.lines().find_map(|line| line.split_once(what)).expect(what);
        line.1.split_whitespace().next().unwrap().to_owned()
    }

    /// Its tone is in a segment that was begun after `since`. How long after.
    async fn heard(&self, since: SystemTime) -> Duration {
        let playlist = PathBuf::from(self.after("ffplay "));
        heard(&playlist, &[440], &[1000], since, || tail(&self.log)).await.after(since)
    }

    /// Ctrl-C: no process is left, and no file.
    async fn end(self) {
        let Self { process, log, mark, files, .. } = self;
        process.signal(Signal::INT);
        let status = process.ended(|| tail(&log)).await;
        assert!(status.success(), "{status}\n{}", tail(&log));
        until("every process is gone", async || {
            let left = marked(&mark);
            if left.is_empty() { Ok(()) } else { Err(format!("{left:?} are left")) }
        })
        .await;
        let left: Vec<_> =
            std::fs::read_dir(files).unwrap().flatten().map(|it| it.file_name()).collect();
        assert_eq!(left, Vec::<std::ffi::OsString>::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_says_what_to_try_shows_its_watchers_and_leaves_nothing_behind() {
    let demo = Demo::start(&[]).await;
    demo.heard(SystemTime::now()).await;

    // Its watchers are told of, each with its process.
    let watchers =
        format!("{}api/v1/watchers", demo.after("The watchers: ").replace("watchers", ""));
    let expected = [
        "janus-demo-janus",
        "januses",
        "mixer-demo-mixer-1",
        "mixer-demo-mixer-2",
        "mixers",
        "rooms",
    ];
    until("the watchers are told of", async || {
        let (_, told) = ask("GET", &watchers, None).await;
        let told = told["watchers"].as_array().cloned().unwrap_or_default();
        let name =
            |it: &serde_json::Value| Some(it["name"].as_str()?.split_once('@')?.0.to_owned());
        let names: Vec<String> = told.iter().filter_map(name).collect();
        if names == expected { Ok(()) } else { Err(format!("{names:?}")) }
    })
    .await;

    // What it says can be tried: the mixer that has the room dies.
    let rooms = demo.after("curl -s ");
    let (_, list) = ask("GET", &rooms, None).await;
    let text = list.to_string();
    let is_assigned = |mixer: &&str| text.contains(&format!("\"mixerId\":\"{mixer}\""));
    let mixer = ["demo-mixer-1", "demo-mixer-2"].into_iter().find(is_assigned).expect(&text);
    let line = demo.said.lines().find(|line| line.contains(&format!("# {mixer}"))).expect(mixer);
    let pid = line.split_once("kill -9 ").unwrap().1.split_whitespace().next().unwrap();
    let killed = SystemTime::now();
    kill(pid.parse().unwrap());
    let back = demo.heard(killed).await;
    println!("demo, mixer killed: 1 stream with the right tone after {:.1} s", back.as_secs_f64());
    assert!(back < AFTER_A_LEASE);
    demo.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_leaves_nothing_in_the_etcd_of_others() {
    let etcd = etcd::Cluster::start(1).await;
    let node = etcd.node(0);
    let keys = async || {
        let keys = node.ctl(&["get", "", "--prefix", "--keys-only"]).await.unwrap();
        keys.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    node.ctl(&["put", "/others", "1"]).await.unwrap();
    let demo = Demo::start(&["--store", &format!("etcd://{}", node.address())]).await;
    demo.heard(SystemTime::now()).await;
    // Those are all there to be left behind.
    until("it has written all it writes", async || {
        let keys = keys().await;
        let has = |part: &&str| keys.iter().any(|key| key.contains(*part));
        let parts = ["/livemeta", "/heartbeat", "/state", "/placements", "mixer-demo-mixer-2@"];
        if parts.iter().all(has) { Ok(()) } else { Err(format!("{keys:?}")) }
    })
    .await;
    demo.end().await;
    assert_eq!(keys().await, ["/others"]);
}
