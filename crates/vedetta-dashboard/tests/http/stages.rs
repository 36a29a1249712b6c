//! Stages of a database, as the API shows them.

use std::time::Duration;

use serde_json::json;
use vedetta_db::Db;
use vedetta_stage::sqlite::{self, Records};
use vedetta_stage::{Fate, Records as _};

use crate::support::Server;

const FAR: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn stages_are_shown_with_what_is_wrong_and_a_record_can_be_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let options = vedetta_db::Options::new(folder.path().join("stages.db"));
    let db = Db::open(&options, &[sqlite::SCHEMA]).unwrap();
    let records = Records::open(db).await.unwrap();
    let pay = records.lane("order", "pay").await.unwrap();
    let pack = records.lane("order", "pack").await.unwrap();
    records.enqueue(pay, &[("a/b", 0, Duration::ZERO)]).await.unwrap();
    let set_aside = async || {
        let claimed = records.claim(pay, &[0], 9, FAR).await.unwrap();
        let (after, not_before) = (FAR, Duration::ZERO);
        let fate = Fate::Failed { after, not_before, error: "declined <b>".into(), park: true };
        records.settle(pay, &[(claimed.claims[0].clone(), fate)]).await.unwrap();
    };
    set_aside().await;
    let visits = [("1", 0, FAR), ("2", 0, FAR), ("3", 0, FAR)];
    records.enqueue(pack, &visits).await.unwrap();
    let server = Server::start().await.serve_stages(records.clone()).await;

    let all = server.get("/api/v1/stages").await.json();
    let stages = &all["stages"];
    assert_eq!((&stages[0]["stage"], &stages[1]["stage"]), (&json!("pack"), &json!("pay")));
    assert_eq!((&stages[0]["records"], &stages[0]["due"]), (&json!(3), &json!(0)));
    assert_eq!((&stages[1]["parked"], &stages[1]["failing"]), (&json!(1), &json!(0)));

    let shown = server.get("/api/v1/stages/order/a%2Fb").await.json();
    let record = &shown["records"][0];
    assert_eq!(record["state"], "parked");
    assert_eq!((&record["error"], &record["failures"]), (&json!("declined <b>"), &json!(1)));
    let parked = server.get("/api/v1/stages/order?parked=true").await.json();
    assert_eq!(parked["records"].as_array().map(Vec::len), Some(1));

    let mut ids = Vec::new();
    let mut cursor = String::new();
    for _ in 0..3 {
        let path = format!("/api/v1/stages/order?stage=pack&limit=1{cursor}");
        let page = server.get(&path).await.json();
        ids.push(page["records"][0]["id"].clone());
        cursor = page["cursor"].as_str().map(|next| format!("&cursor={next}")).unwrap_or_default();
    }
    assert_eq!((json!(ids), cursor.as_str()), (json!(["1", "2", "3"]), ""));

    let page = server.get("/stages").await.body;
    for row in ["pay", "pack"] {
        let row = format!("data-stage=\"&quot;order&quot; &quot;{row}&quot;\"");
        assert!(page.contains(&row), "{row} in {page}");
    }
    assert!(page.contains("/stages/order/pay/a%2Fb/retry"), "{page}");
    assert!(page.contains("declined &lt;b&gt;"), "{page}");

    let retried = server.send("POST /api/v1/stages/order/pay/a%2Fb/retry", &[], "").await;
    assert_eq!((retried.status, retried.json()), (200, json!({"retried": true})));
    let shown = server.get("/api/v1/stages/order/a%2Fb").await.json();
    assert_eq!(shown["records"][0]["state"], "due");
    // The same by the button of the page.
    set_aside().await;
    let form = [("Content-Type", "application/x-www-form-urlencoded")];
    let retry = "POST /stages/order/pay/a%2Fb/retry";
    let pressed = server.send(retry, &form, "back=/stages").await;
    assert_eq!(pressed.status, 303, "{pressed:?}");
    assert!(pressed.head.contains("location: /stages?said=record\r\n"), "{pressed:?}");
    let shown = server.get("/api/v1/stages/order/a%2Fb").await.json();
    assert_eq!(shown["records"][0]["state"], "due");

    for (request, status) in [
        ("POST /api/v1/stages/order/pay/nobody/retry", 404),
        ("POST /api/v1/stages/nothing/pay/1/retry", 404),
        ("POST /api/v1/stages/order/nothing/1/retry", 404),
        ("GET /api/v1/stages/nothing", 404),
        ("GET /api/v1/stages/order?stage=nothing", 404),
        ("GET /api/v1/stages/order?cursor=wrong", 422),
        ("GET /api/v1/stages/order?colour=red", 422),
        ("DELETE /api/v1/stages/order", 405),
    ] {
        assert_eq!(server.send(request, &[], "").await.status, status, "{request}");
    }
}

#[tokio::test]
async fn a_server_without_stages_has_an_empty_list() {
    let server = Server::start().await;
    assert_eq!(server.get("/api/v1/stages").await.json(), json!({"stages": []}));
}
