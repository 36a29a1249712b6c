//! Watchers of any kind, as the API shows them.

use std::time::Duration;

use serde_json::json;
use vedetta_core::Revision;
use vedetta_kv::Put;
use vedetta_runtime::watcher::{BoxError, Effect, Id};
use vedetta_runtime::{Next, Reconcile, State, Watcher};

use crate::support::{PATIENCE, Server, until};

/// A number.
#[derive(Debug, Clone, Default)]
pub(crate) struct Number(u32);

impl State for Number {
    fn apply(&mut self, _: &str, value: Option<&[u8]>) -> Result<Effect, BoxError> {
        self.0 = str::from_utf8(value.unwrap_or(b"0"))?.parse()?;
        Ok(Effect::Wanted)
    }
}

/// Zero will not do.
pub(crate) struct NotZero;

impl Reconcile for NotZero {
    type State = Number;

    async fn reconcile(&self, _: &Id, number: Option<&Number>) -> Result<Next, BoxError> {
        match number {
            Some(Number(0)) => Err("it is zero".into()),
            _ => Ok(Next::Done),
        }
    }
}

#[tokio::test]
async fn a_watcher_is_shown_with_what_is_wrong_and_can_be_run_again() {
    let server = Server::start().await;
    let watching = Watcher::new("n/").start(server.store.clone(), NotZero);
    let server = server.serve_with("numbers", watching.handle()).await;
    watching.ready(PATIENCE).await.unwrap();
    let mut last = Revision::FRESH;
    for (key, value) in [(&b"n/\xff/x"[..], "0"), (b"n/1/x", "1"), (b"n/1/x", "one")] {
        last = server.store.put(Put::new(key.to_vec(), value)).await.unwrap().revision;
    }
    watching.caught_up(last).await;
    until(|| watching.status().failed > 0 && watching.status().done > 0).await;

    let all = server.get("/api/v1/watchers").await.json();
    let shown = server.get("/api/v1/watchers/numbers").await.json();
    for watcher in [&all["watchers"][0], &shown] {
        for (name, value) in [
            ("name", json!("numbers")),
            ("prefix", json!("n/")),
            ("phase", json!("following")),
            ("revision", json!(last.0)),
            ("behind", json!(0)),
            ("ids", json!(2)),
            ("failing", json!(1)),
            ("unreadable", json!(1)),
        ] {
            assert_eq!(watcher[name], value, "{name}: {watcher}");
        }
    }
    let troubles = shown["troubles"].as_array().unwrap();
    let failing = troubles.iter().find(|trouble| trouble["id_b64"] == "/w==").unwrap();
    assert_eq!(failing["error"], "it is zero", "{shown}");
    assert!(failing["failures"].as_u64() >= Some(1) && failing["retry_in_ms"].is_u64(), "{shown}");
    let unreadable = troubles.iter().find(|trouble| trouble["id"] == "1").unwrap();
    let why = json!([{"key_type": "x", "error": "invalid digit found in string"}]);
    assert_eq!(unreadable["unreadable"], why, "{shown}");
    let one = server.get("/api/v1/watchers/numbers?limit=1").await.json();
    assert_eq!(one["troubles"].as_array().unwrap().len(), 1, "{one}");

    let page = server.get("/watchers").await.body;
    for shown in ["data-watcher=\"numbers\"", "it is zero", "invalid digit found in string"] {
        assert!(page.contains(shown), "{shown} in {page}");
    }

    let done = watching.status().done;
    let answer = server.json("POST /api/v1/watchers/numbers/resync", "").await;
    assert_eq!((answer.status, answer.json()), (200, json!({ "ids": 2 })));
    until(|| watching.status().done > done).await;
    // The same by the button of the page.
    let done = watching.status().done;
    let form = [("Content-Type", "application/x-www-form-urlencoded")];
    let pressed = server.send("POST /watchers/numbers/resync", &form, "back=/watchers").await;
    assert_eq!(pressed.status, 303, "{pressed:?}");
    assert!(pressed.head.contains("location: /watchers?said=resynced-2\r\n"), "{pressed:?}");
    until(|| watching.status().done > done).await;
    watching.stop(Duration::ZERO).await;
    let refused = server.json("POST /api/v1/watchers/numbers/resync", "").await;
    assert_eq!((refused.status, refused.code().as_str()), (503, "closed"));
    assert_eq!(server.get("/api/v1/watchers/numbers").await.json()["phase"], "stopped");
    server.end().await;
}
