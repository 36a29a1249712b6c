//! Who runs which room: the real `rooms`, two of them at once, on a real store, with modules that only give signs of
//! life; and those signs of life.

mod world;

use live_rooms::model::{Kind, TTL};
use live_rooms::presence::{Presence, heartbeat, mark_ready};
use live_rooms::store::get;
use serde_json::Value;
use world::{World, until};

#[tokio::test(flavor = "multi_thread")]
async fn two_that_place_at_once_fill_every_module_and_none_beyond_its_capacity() {
    let world = World::start(&["rooms-1", "rooms-2"], &[]).await;
    world.module(Kind::Janus, "j1", 100).await;
    world.module(Kind::Mixer, "m1", 7).await;
    world.module(Kind::Mixer, "m2", 5).await;
    let rooms: Vec<String> = (0..20).map(|number| format!("room-{number}")).collect();
    let opened = rooms.iter().enumerate().map(|(number, room)| world.open(number % 2, room));
    for opened in futures_util::future::join_all(opened).await {
        opened.expect("a room");
    }
    // Twelve fit, eight wait.
    let on = |rooms: &[Value], mixer: &str| {
        rooms.iter().filter(|room| room["mixerId"] == *mixer).count()
    };
    for process in [0, 1] {
        until("all places are taken", async || {
            let rooms = world.rooms(process).await;
            let now = (on(&rooms, "m1"), on(&rooms, "m2"));
            let is_everywhere = rooms.iter().all(|room| room["janusId"] == "j1");
            if is_everywhere && now == (7, 5) { Ok(()) } else { Err(format!("{now:?}")) }
        })
        .await;
    }
    // Nobody was assigned twice: once to Janus, and once to a mixer if there was one.
    for room in world.rooms(0).await {
        let assignments = if room["mixerId"].is_null() { 1 } else { 2 };
        assert_eq!(room["generation"], assignments, "{room}");
    }
    // Those that wait go to who comes.
    world.module(Kind::Mixer, "m3", 100).await;
    until("those that waited are placed", async || {
        let now = on(&world.rooms(0).await, "m3");
        if now == 8 { Ok(()) } else { Err(format!("{now}")) }
    })
    .await;
    assert!(world.rooms(0).await.iter().all(|room| room["generation"] == 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn rooms_leave_a_module_that_is_drained_or_dead_and_keep_one_that_is_cordoned() {
    let world = World::start(&["rooms-1", "rooms-2"], &[]).await;
    world.module(Kind::Janus, "j1", 100).await;
    world.module(Kind::Mixer, "m1", 100).await;
    for room in ["a", "b"] {
        world.open(0, room).await.expect("a room");
    }
    world.placed("m1", "j1", 2).await;
    world.module(Kind::Mixer, "m2", 100).await;
    world.module(Kind::Janus, "j2", 100).await;
    let mark = async |modules: [&str; 2], mark: &str| {
        for module in modules {
            let marked = world.ask(1, "POST", &format!("{module}/{mark}"), None).await;
            let is_cordoned = marked.1["state"]["cordoned"] == true;
            assert_eq!((marked.0, is_cordoned), (200, mark == "cordon"), "{marked:?}");
        }
    };
    let is_on = async |id: &str, mixer: &str, janus: &str| {
        until("it is placed", async || {
            let room = world.room(0, id).await;
            let fits = room["mixerId"] == *mixer && room["janusId"] == *janus;
            if fits { Ok(()) } else { Err(room.to_string()) }
        })
        .await;
    };

    // Those that have nothing would get the next one; cordoned, they do not.
    let (first, second) = (["/mixers/m1", "/januses/j1"], ["/mixers/m2", "/januses/j2"]);
    mark(second, "cordon").await;
    world.open(0, "c").await.expect("a room");
    is_on("c", "m1", "j1").await;
    mark(second, "uncordon").await;
    // Cordoned, they keep what they have.
    mark(first, "cordon").await;
    world.open(0, "d").await.expect("a room");
    is_on("d", "m2", "j2").await;
    for room in ["a", "b", "c"] {
        let room = world.room(0, room).await;
        assert_eq!((&room["mixerId"], &room["janusId"]), (&"m1".into(), &"j1".into()));
    }
    // Drained, they lose them.
    for module in first {
        world.ask(1, "POST", &format!("{module}/drain"), None).await;
    }
    world.placed("m2", "j2", 4).await;
    // Back again, and the others die.
    mark(first, "uncordon").await;
    for (kind, id) in [(Kind::Mixer, "m2"), (Kind::Janus, "j2")] {
        world.store.delete(kind.key(id, "heartbeat")).await.unwrap();
    }
    world.placed("m1", "j1", 4).await;
    // With nobody left they wait where they are.
    world.store.delete(Kind::Mixer.key("m1", "heartbeat")).await.unwrap();
    world.module(Kind::Mixer, "m3", 2).await;
    until("as many as fit have moved", async || {
        let rooms = world.rooms(0).await;
        let moved = rooms.iter().filter(|room| room["mixerId"] == "m3").count();
        if moved == 2 { Ok(()) } else { Err(format!("{rooms:?}")) }
    })
    .await;
    // One that lives gets the others once it is marked as ready.
    world.lives(Kind::Mixer, "m4", 100).await;
    let moved = async || {
        let rooms = world.rooms(0).await;
        rooms.iter().filter(|room| room["mixerId"] == "m4").count()
    };
    // It is known, and until that is said it gets nothing, also not what is placed after it came.
    until("it is known", async || {
        let (_, shown) = world.ask(1, "GET", "/mixers", None).await;
        let is_known = shown.to_string().contains(r#""m4""#);
        if is_known { Ok(()) } else { Err(shown.to_string()) }
    })
    .await;
    world.open(0, "e").await.expect("a room");
    until("it is in a Janus", async || {
        let room = world.room(0, "e").await;
        if room["janusId"].is_null() { Err(room.to_string()) } else { Ok(()) }
    })
    .await;
    assert_eq!(moved().await, 0, "nobody said that it is ready");
    let (status, shown) = world.ask(1, "POST", "/mixers/m4/ready", None).await;
    assert_eq!((status, &shown["state"]["ready"]), (200, &Value::Bool(true)));
    until("the others have moved", async || match moved().await {
        3 => Ok(()),
        moved => Err(format!("{moved}")),
    })
    .await;
    assert_eq!(world.ask(0, "POST", "/mixers/nobody/ready", None).await.0, 404);
    assert_eq!(world.ask(0, "POST", "/mixers/m1/explode", None).await.0, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_room_that_waits_gets_the_place_that_another_gives_up() {
    let world = World::start(&["rooms-1", "rooms-2"], &[]).await;
    world.module(Kind::Janus, "j1", 100).await;
    world.module(Kind::Mixer, "m1", 1).await;
    let on_m1 = async |id: &str| {
        until("it is on m1", async || {
            let room = world.room(0, id).await;
            if room["mixerId"] == "m1" { Ok(()) } else { Err(room.to_string()) }
        })
        .await;
    };
    world.open(0, "a").await.expect("a room");
    on_m1("a").await;
    for (process, next, before, method, how) in
        [(0, "b", "a", "DELETE", ""), (1, "c", "b", "POST", "/stop")]
    {
        world.open(process, next).await.expect("a room");
        until("it waits", async || {
            let room = world.room(0, next).await;
            let waits = room["janusId"] == "j1" && room["mixerId"].is_null();
            if waits { Ok(()) } else { Err(room.to_string()) }
        })
        .await;
        world.ask(0, method, &format!("/rooms/{before}{how}"), None).await;
        on_m1(next).await;
    }
    // The one that was stopped keeps nothing of a mixer that is dead.
    let at = r#"{"mixerId":"dead","host":"127.0.0.1","port":42000,"ssrc":1,"generation":2}"#;
    world.store.put("/rooms/b/mixer", at).await.unwrap();
    until("only what it should be is left", async || {
        let keys = world.keys("/rooms/b/").await;
        if keys == ["/rooms/b/livemeta"] { Ok(()) } else { Err(format!("{keys:?}")) }
    })
    .await;
    assert_eq!(world.room(0, "b").await["status"], "stopped");
}

#[tokio::test(flavor = "multi_thread")]
async fn rooms_whose_time_is_over_go_and_those_that_nobody_lets_go_of_too() {
    let times = ["--start-within", "6", "--max-age", "12", "--remove-within", "9"];
    let world = World::start(&["rooms-1", "rooms-2"], &times).await;
    world.module(Kind::Janus, "j1", 100).await;
    world.module(Kind::Mixer, "m1", 100).await;
    let (status, created) = world.ask(0, "POST", "/rooms", Some(r#"{"title": "ä"}"#)).await;
    assert_eq!(
        (status, &created["title"], &created["status"]),
        (201, &"ä".into(), &"created".into())
    );
    let never_started = created["id"].as_str().unwrap();
    world.open(0, "old").await.expect("a room");
    // Nobody holds this one any more: it goes without being waited for.
    world.open(0, "deleted").await.expect("a room");
    assert_eq!(world.ask(1, "DELETE", "/rooms/deleted", None).await.0, 202);
    world.gone("deleted").await;
    // A module that lives says that it holds this one, and does nothing about it.
    world.open(0, "held").await.expect("a room");
    let at = r#"{"mixerId":"m1","host":"127.0.0.1","port":42000,"ssrc":1,"generation":2}"#;
    world.store.put("/rooms/held/mixer", at).await.unwrap();
    assert_eq!(world.ask(0, "DELETE", "/rooms/held", None).await.0, 202);
    let (_, held) = world.ask(0, "GET", "/rooms/held", None).await;
    assert_eq!(held["status"], "removing");
    assert_eq!(world.ask(0, "POST", "/rooms/held/start", None).await.0, 409);
    for room in ["held", never_started, "old"] {
        world.gone(room).await;
    }
    assert!(world.keys("/rooms/").await.is_empty(), "nothing is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_asked_for_wrongly_is_refused_and_changes_nothing() {
    let world = World::start(&["rooms-1"], &[]).await;
    let long = format!(r#"{{"title": "{}"}}"#, "x".repeat(201));
    for (status, method, path, body) in [
        (400, "POST", "/rooms", Some("{")),
        (400, "POST", "/rooms", Some(r#"{"id": "../etc"}"#)),
        (400, "POST", "/rooms", Some(r#"{"id": ""}"#)),
        (400, "POST", "/rooms", Some(r#"{"name": "x"}"#)),
        (400, "POST", "/rooms", Some(&long)),
        (404, "GET", "/rooms/nobody", None),
        (404, "DELETE", "/rooms/nobody", None),
        (404, "POST", "/rooms/nobody/start", None),
    ] {
        let answer = world.ask(0, method, path, body).await;
        assert_eq!(answer.0, status, "{method} {path}: {}", answer.1);
        assert!(answer.1["error"].is_string(), "{}", answer.1);
    }
    assert_eq!(world.ask(0, "POST", "/rooms", Some(r#"{"id": "a"}"#)).await.0, 201);
    assert_eq!(world.ask(0, "POST", "/rooms", Some(r#"{"id": "a"}"#)).await.0, 409);
    // No two rooms, and nothing beside it.
    assert_eq!(world.keys("/rooms/").await, ["/rooms/a/livemeta"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sign_of_life_is_there_while_its_process_is_and_only_once() {
    let world = World::start(&[], &[]).await;
    let key = Kind::Mixer.key("m1", "heartbeat");
    let there = async || {
        let found = get::<live_rooms::model::Heartbeat>(&world.store, &key).await.unwrap();
        found.map(|(beat, _)| beat)
    };
    let ours = heartbeat("here".into(), 5);
    // What one of this machine left that is there no more does not stand in the way.
    let mut dead = std::process::Command::new("true").spawn().unwrap();
    dead.wait().unwrap();
    let left = live_rooms::model::Heartbeat { pid: dead.id(), run: "old".into(), ..ours.clone() };
    world.store.put(key.clone(), serde_json::to_vec(&left).unwrap()).await.unwrap();
    let start = |beat| Presence::start(world.store.clone(), Kind::Mixer, "m1", Some(beat));
    let mut presence = start(ours.clone());
    testing::soon("it joins", presence.joined()).await.unwrap();
    assert_eq!(there().await, Some(ours.clone()));

    let voice = presence.voice();
    voice.load(3);
    voice.leaving();
    until("it is told", async || match there().await {
        Some(beat) if beat.load == 3 && beat.leaving => Ok(()),
        beat => Err(format!("{beat:?}")),
    })
    .await;
    // Another one of this name, which cannot be known to be dead, gives up.
    let other = live_rooms::model::Heartbeat { machine: "another".into(), run: "b".into(), ..ours };
    let mut second = start(other.clone());
    let refused = testing::soon("it gives up", second.joined()).await.unwrap_err().to_string();
    assert!(refused.contains("another mixer m1 lives"), "{refused}");
    // And has its turn when the first is gone: at once if it leaves, else when its lease is over.
    presence.leave().await;
    assert_eq!(there().await, None);
    let mut second = start(other);
    testing::soon("it joins", second.joined()).await.unwrap();
    drop(second);
    tokio::time::timeout(
        TTL * 2,
        until("its lease is over", async || match there().await {
            None => Ok(()),
            beat => Err(format!("{beat:?}")),
        }),
    )
    .await
    .expect("within the time of a lease");

    // What people have said stands.
    mark_ready(&world.store, Kind::Mixer, "m1").await.unwrap();
    let cordoned = r#"{"ready":false,"cordoned":true,"draining":false}"#;
    world.store.put(Kind::Mixer.key("m1", "state"), cordoned).await.unwrap();
    mark_ready(&world.store, Kind::Mixer, "m1").await.unwrap();
    let marks =
        get::<live_rooms::model::Marks>(&world.store, &Kind::Mixer.key("m1", "state")).await;
    assert!(!marks.unwrap().unwrap().0.ready);
}
