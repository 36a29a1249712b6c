//! Streams: nobody listens for longer than they may, nor takes all the room.

use std::time::{Duration, SystemTime};

use serde_json::json;
use vedetta_access::{Role, Scope};
use vedetta_dashboard::Limits;

use crate::support::{Feed, PATIENCE};
use crate::{Guarded, status};

pub(crate) fn often() -> Limits {
    Limits { recheck: Duration::from_millis(20), ..Limits::default() }
}

/// Every stream there is.
const STREAMS: [&str; 5] = [
    "/events",
    "/watch?prefix=",
    "/queues/default/wake",
    "/workers/anna/wake",
    "/supervisors/boss:here/wake",
];

/// Listens to all of them.
async fn listen(guarded: &Guarded, head: &str) -> Vec<(&'static str, Feed)> {
    let mut feeds = Vec::new();
    for path in STREAMS {
        feeds.push((path, guarded.server.feed(path, head).await));
    }
    feeds
}

/// A worker and a supervisor that there are streams for.
async fn populate(guarded: &Guarded) {
    let beat = guarded.token("beats", Role::Operator);
    let anna = json!({"queues": ["default"]});
    let told = guarded.tells("POST /api/v1/workers/anna/beat", &beat, anna).await;
    assert_eq!(told.status, 200, "{told:?}");
    let boss = json!({"host": "here", "version": "1", "instance": "a", "queues": ["default"],
        "balance": "simple", "min": 1, "max": 1, "wanted": 1, "state": "running"});
    let told = guarded.tells("POST /api/v1/supervisors/boss:here/beat", &beat, boss).await;
    assert_eq!(told.status, 200, "{told:?}");
}

async fn until_all_end(feeds: Vec<(&'static str, Feed)>) {
    for (path, mut feed) in feeds {
        let end = async { while feed.next().await.is_some() {} };
        let ended = tokio::time::timeout(PATIENCE, end).await;
        assert!(ended.is_ok(), "{path} goes on");
    }
}

#[tokio::test]
async fn a_stream_ends_with_the_right_to_it() {
    let guarded = Guarded::limited(often()).await;
    populate(&guarded).await;
    guarded.user("otto", Role::Operator).await;
    guarded.user("olga", Role::Operator).await;
    let bearer = |token: &str| format!("Authorization: {token}\r\n");
    let (revoked, kept) =
        (guarded.token("old", Role::Operator), guarded.token("new", Role::Viewer));
    let (otto, olga) = (guarded.sign_in("otto").await, guarded.sign_in("olga").await);
    let by_cookie = |cookie: &str| format!("Cookie: {cookie}\r\n");
    let by_token = listen(&guarded, &bearer(&revoked)).await;
    let by_otto = listen(&guarded, &by_cookie(&otto.cookie)).await;
    let by_olga = listen(&guarded, &by_cookie(&olga.cookie)).await;
    let mut other = guarded.server.feed("/watch?prefix=", &bearer(&kept)).await;
    // As the program does, in another process.
    let elsewhere = vedetta_access::Access::open(guarded.folder.path()).unwrap();
    elsewhere.revoke_token("old").unwrap();
    elsewhere.set_role("otto", Role::Viewer).unwrap();
    assert_eq!(guarded.post(&olga, "/logout", "").await.status, 303);
    until_all_end(by_token).await;
    until_all_end(by_otto).await;
    until_all_end(by_olga).await;
    // Who still may listens on, many looks later.
    let admin = guarded.token("admin", Role::Admin);
    let put = guarded.tells("PUT /api/v1/kv/k", &admin, json!({"value": "v"})).await;
    assert_eq!(put.status, 200, "{put:?}");
    let told = tokio::time::timeout(PATIENCE, other.event()).await.expect("in time");
    assert_eq!(told.expect("it goes on").event, "kv");
    guarded.end().await;
}

#[tokio::test]
async fn a_stream_ends_when_its_token_does() {
    let guarded = Guarded::limited(often()).await;
    let end = SystemTime::now() + Duration::from_secs(1);
    let token = guarded.access.add_token("short", Role::Viewer, &Scope::All, Some(end)).unwrap();
    let head = format!("Authorization: Bearer {}\r\n", token.reveal());
    let feed = guarded.server.feed("/events", &head).await;
    until_all_end(vec![("/events", feed)]).await;
    assert!(SystemTime::now() >= end, "and not before");
    guarded.end().await;
}

#[tokio::test]
async fn one_caller_does_not_take_the_streams_of_all() {
    let guarded = Guarded::limited(Limits { streams: 2, ..often() }).await;
    let (mine, theirs) = (guarded.token("a", Role::Viewer), guarded.token("b", Role::Viewer));
    let head = format!("Authorization: {mine}\r\n");
    let first = guarded.server.feed("/events", &head).await;
    let _second = guarded.server.feed("/watch?prefix=", &head).await;
    let refused = guarded.asks("GET /api/v1/events", &mine).await;
    assert_eq!((refused.status, refused.code().as_str()), (429, "too_many"));
    assert!(refused.body.contains("http.connections"), "{refused:?}");
    // All else, and others, are not held up.
    assert_eq!(guarded.asks("GET /api/v1/jobs", &mine).await.status, 200);
    let _other = guarded.server.feed("/events", &format!("Authorization: {theirs}\r\n")).await;
    // One that is closed makes room.
    drop(first);
    let again = async {
        let head = [("Authorization", mine.as_str())];
        while status(&guarded.server, "GET /api/v1/watch?prefix=", &head, "").await != 200 {}
    };
    tokio::time::timeout(PATIENCE, again).await.expect("there is room again");
    guarded.end().await;
}

#[tokio::test]
async fn a_fleet_and_those_who_are_local_have_more_streams_than_one_caller() {
    let limits = || Limits { connections: 8, streams: 2, ..often() };
    let (guarded, open) = (Guarded::limited(limits()).await, Guarded::on(false, limits()).await);
    let lent = guarded.access.lend("commands", Role::Operator).unwrap();
    let lent = format!("Authorization: Bearer {}\r\n", lent.reveal());
    for (guarded, head) in [(guarded, lent.as_str()), (open, "")] {
        let mut feeds = Vec::new();
        for _ in 0..7 {
            feeds.push(guarded.server.feed("/watch?prefix=", head).await);
        }
        // One connection is left for all else.
        let head: Vec<_> = head.trim_end().split_once(": ").into_iter().collect();
        let refused = guarded.server.send("GET /api/v1/watch?prefix=", &head, "").await;
        assert_eq!((refused.status, refused.code().as_str()), (429, "too_many"));
        guarded.end().await;
    }
}
