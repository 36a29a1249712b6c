//! The whole example with a real Janus and real FFmpeg: what is said in a room is in its stream, and in no other; and
//! whatever breaks, it is so again soon, and nothing is left over.

mod sound;
mod world;

use std::time::{Duration, SystemTime};

use live_rooms::model::TTL;
use rustix::process::Signal;
use testing::etcd;
use world::{
    MANAGER, MARK, MIXERS, OTHER_MANAGER, Ours, Process, ROOMS, State, World, ask, heard, kill,
    marked, tail, tell, until,
};

const BUSY: &str = "busy";
const QUIET: &str = "quiet";

/// A world with two rooms, each with its tone in its stream.
async fn two_rooms(state: State, mixers: usize) -> World {
    let world = World::start(state, mixers).await;
    let begun = SystemTime::now();
    world.open(BUSY, 440).await;
    world.open(QUIET, 2500).await;
    world.recovers("created and started", begun).await;
    world
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
    world.recovers("FFmpeg killed", killed).await;
    assert_ne!(world.ffmpegs(Some(BUSY)), [ffmpeg]);

    let killed = SystemTime::now();
    world.janus.start_again().await;
    world.recovers("Janus restarted", killed).await;

    // Without its manager Janus goes on. What changes meanwhile is done when there is one again.
    world.kill(MANAGER);
    let killed = SystemTime::now();
    world.heard(QUIET, &[2500], &[440], killed).await;
    let [ffmpeg] = world.ffmpegs(Some(BUSY))[..] else { panic!("there is one") };
    kill(ffmpeg);
    until("another FFmpeg", async || match world.ffmpegs(Some(BUSY))[..] {
        [other] if other != ffmpeg => Ok(()),
        _ => Err(String::new()),
    })
    .await;
    world.delete(QUIET).await;
    let again = SystemTime::now();
    world.spawn(MANAGER);
    world.recovers("manager of Janus killed, FFmpeg too, and it started again", again).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rooms_of_a_mixer_that_is_killed_or_cut_off_move_to_another() {
    let mut world = two_rooms(State::Ours(Ours::start().await), 2).await;
    let mixer = world.mixer_of(BUSY).await;
    let killed = SystemTime::now();
    world.kill(mixer);
    world.recovers("mixer killed", killed).await;
    let other = world.mixer_of(BUSY).await;
    assert_ne!(other, mixer);

    // The one that has all is cut off, and comes back. What it had is not its any more.
    world.spawn(mixer);
    world.ready(mixer).await;
    let cut = SystemTime::now();
    world.link(other).cut();
    // The streams go on until the rooms move.
    until("both rooms move", async || {
        let rooms = [world.room(BUSY).await, world.room(QUIET).await];
        let have_moved = rooms.iter().all(|room| room["mixerId"] == mixer);
        if have_moved { Ok(()) } else { Err(format!("{rooms:?}")) }
    })
    .await;
    let moved = SystemTime::now();
    world.heard(BUSY, &[440], &[2500], moved).await;
    world.heard(QUIET, &[2500], &[440], moved).await;
    tell("mixer cut off from the store", "the tones were there from another", cut);
    let healed = SystemTime::now();
    world.link(other).mend();
    world.recovers("mixer no longer cut off", healed).await;
    assert_eq!((world.mixer_of(BUSY).await, world.mixer_of(QUIET).await), (mixer, mixer));
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rooms_of_a_mixer_that_is_to_end_move_first_and_it_leaves_nothing() {
    let mut world = two_rooms(State::Ours(Ours::start().await), 2).await;
    let mixer = world.mixer_of(BUSY).await;
    let asked = SystemTime::now();
    world.terminate(mixer).await;
    let left = format!("/mixers/{mixer}/heartbeat");
    assert!(!world.heartbeats().await.contains(&left), "it does not wait for its lease");
    assert_ne!(world.mixer_of(BUSY).await, mixer);
    world.recovers("mixer asked to end (SIGTERM)", asked).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rooms_go_to_another_manager_of_their_janus_and_from_a_dead_janus_to_another() {
    let mut world = two_rooms(State::Ours(Ours::start().await), 1).await;
    // Another manager of the same Janus makes the rooms its own, and then is content.
    world.kill(MANAGER);
    let killed = SystemTime::now();
    world.spawn(OTHER_MANAGER);
    world.ready(OTHER_MANAGER).await;
    let all_are_of = async |world: &World, manager: &str| {
        until("they are all its", async || {
            let rooms = world.bridge().rooms().await.map_err(|error| error.to_string())?;
            let is_its = |room: &live_rooms::bridge::Bridged| {
                room.description == format!("live-rooms {manager}")
            };
            let are_its = rooms.len() == 2 && rooms.iter().all(is_its);
            if are_its { Ok(()) } else { Err(format!("{rooms:?}")) }
        })
        .await;
    };
    all_are_of(&world, OTHER_MANAGER).await;
    world.recovers("manager of Janus killed, and another one there", killed).await;
    // It looks at Janus at least once while this is said.
    world.heard(BUSY, &[440], &[2500], SystemTime::now()).await;
    let log = world.log(OTHER_MANAGER);
    assert!(!log.contains("looking at every room"), "{log}");

    let killed = SystemTime::now();
    world.another_janus().await;
    world.spawn(MANAGER);
    world.ready(MANAGER).await;
    all_are_of(&world, MANAGER).await;
    world.recovers("Janus dead, and another one there", killed).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_outlive_their_store_and_a_room_that_is_removed_while_all_is_down_is_gone() {
    let mut world = two_rooms(State::Ours(Ours::start().await), 1).await;
    let State::Ours(ours) = &mut world.state else { unreachable!() };
    let ended = SystemTime::now();
    ours.end().await;
    // The streams go on without it.
    world.heard(BUSY, &[440], &[2500], ended).await;
    let State::Ours(ours) = &mut world.state else { unreachable!() };
    let begun = SystemTime::now();
    ours.begin().await;
    world.recovers("store restarted", begun).await;
    // And it is obeyed again.
    until("a room is removed", async || match world.ask("DELETE", "/rooms/quiet", None).await {
        (202, _) => Ok(()),
        answer => Err(format!("{answer:?}")),
    })
    .await;
    world.forget(QUIET);
    world.settled().await;

    // Everything is down but Janus and the store, and they keep what was there.
    for name in [MIXERS[0], MANAGER] {
        world.kill(name);
    }
    world.delete(BUSY).await;
    world.kill(ROOMS);
    assert_eq!(world.janus.rooms().await, [BUSY]);
    let begun = SystemTime::now();
    for name in [ROOMS, MANAGER, MIXERS[0]] {
        world.spawn(name);
    }
    world.settled().await;
    tell("room removed while all was down", "nothing was left", begun);
    for name in [ROOMS, MANAGER, MIXERS[0]] {
        world.ready(name).await;
    }
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
    world.recovers("leader of etcd killed, and a new room", killed).await;
    // Longer than any lease: nobody was taken for dead.
    tokio::time::sleep(TTL + Duration::from_secs(1)).await;
    let (before, now) = (world.assignments().await, SystemTime::now());
    world.recovers("leader of etcd killed, leases later", now).await;
    assert_eq!(before, [2, 2, 2], "each was placed twice: in Janus, and with its mixer");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_says_what_to_try_shows_its_watchers_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let (mark, log) = (folder.path().to_string_lossy().into_owned(), folder.path().join("log"));
    let files = folder.path().join("files");
    std::fs::create_dir(&files).unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_live-rooms"));
    command.arg("demo").env("TMPDIR", &files).env(MARK, &mark);
    let demo = Process::start(command, &log);
    let said = until("it is on air", async || {
        let said = demo.said.lock().unwrap().join("\n");
        if said.contains("Ctrl-C ends it") {
            Ok(said)
        } else {
            Err(format!("{said}\n{}", tail(&log)))
        }
    })
    .await;
    let after = |what: &str| {
        let line = said.lines().find_map(|line| line.split_once(what)).expect(what);
        line.1.split_whitespace().next().unwrap().to_owned()
    };
    let playlist = std::path::PathBuf::from(after("ffplay "));
    heard(&playlist, &[440], &[1000], SystemTime::now(), || tail(&log)).await;

    // Its watchers are told of, each with its process.
    let watchers = format!("{}api/v1/watchers", after("The watchers: ").replace("watchers", ""));
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
    let rooms = after("curl -s ");
    let (_, list) = ask("GET", &rooms, None).await;
    let text = list.to_string();
    let is_assigned = |mixer: &&str| text.contains(&format!("\"mixerId\":\"{mixer}\""));
    let mixer = ["demo-mixer-1", "demo-mixer-2"].into_iter().find(is_assigned).expect(&text);
    let line = said.lines().find(|line| line.contains(&format!("# {mixer}"))).expect(mixer);
    let pid = line.split_once("kill -9 ").unwrap().1.split_whitespace().next().unwrap();
    let killed = SystemTime::now();
    kill(pid.parse().unwrap());
    let back = heard(&playlist, &[440], &[1000], killed, || tail(&log)).await;
    println!("demo, mixer killed: 1 stream with the right tone after {:.1} s", back.as_secs_f64());

    demo.signal(Signal::INT);
    let status = tokio::task::spawn_blocking(move || demo.wait()).await.unwrap();
    assert!(status.success(), "{status}\n{}", tail(&log));
    until("every process is gone", async || {
        let left = marked(&mark);
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?} are left")) }
    })
    .await;
    let left: Vec<_> =
        std::fs::read_dir(&files).unwrap().flatten().map(|it| it.file_name()).collect();
    assert_eq!(left, Vec::<std::ffi::OsString>::new());
}
