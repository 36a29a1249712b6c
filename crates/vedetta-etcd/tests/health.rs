//! A store that takes no writes says so, where etcd's clients and load balancers look.

mod support;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use prost_reflect::{DynamicMessage, Value};
use support::grpc::{self, Client};
use support::http::{self, Connection};
use support::{Etcd, Ours, database, scratch, soon};
use tonic::Status;
use vedetta_core::Revision;
use vedetta_db::{Db, Mirror, Rows};
use vedetta_kv::{Options, SCHEMA, Store};

/// Bytes that the stores of the tests may use.
const QUOTA: u64 = 400_000;

fn bytes(text: impl Into<Vec<u8>>) -> Value {
    Value::Bytes(text.into().into())
}

async fn call(
    client: &mut Client,
    path: &str,
    fields: &[(&str, Value)],
) -> Result<DynamicMessage, Status> {
    let mut request = grpc::request(path);
    for (name, value) in fields {
        request.set_field_by_name(name, value.clone());
    }
    soon(path, client.unary(path, &request)).await
}

async fn put(client: &mut Client, key: &str, size: usize) -> Result<DynamicMessage, Status> {
    call(client, "KV/Put", &[("key", bytes(key)), ("value", bytes(vec![b'x'; size]))]).await
}

/// Status, type and body; ids are not the same in any two servers.
async fn health(address: SocketAddr) -> String {
    let answer = soon("its health", http::get(address, "/health")).await.unwrap();
    let headers = ["content-type", "x-content-type-options"].map(|name| answer.header(name));
    format!("{} {headers:?} {:?}", answer.status, answer.text())
}

/// The field of an answer as text, with `N` for every number that is an id.
fn field(answer: &DynamicMessage, name: &str) -> String {
    let text = format!("{:?}", answer.get_field_by_name(name).unwrap());
    let words = text.split_inclusive(|c: char| !c.is_ascii_digit());
    words.map(|word| if word.len() > 12 { "N," } else { word }).collect()
}

/// What a server says of itself, and what it refuses.
async fn told(address: SocketAddr) -> Vec<String> {
    let mut v3 = Client::connect(address).await.unwrap();
    let mut told = vec![health(address).await];
    let status = call(&mut v3, "Maintenance/Status", &[]).await.unwrap();
    told.push(field(&status, "errors"));
    for alarm in 0..3 {
        let asked = [("alarm", Value::EnumNumber(alarm))];
        let alarms = call(&mut v3, "Maintenance/Alarm", &asked).await.unwrap();
        told.push(field(&alarms, "alarms"));
    }
    let answers = [
        put(&mut v3, "more", 1).await,
        call(&mut v3, "Lease/LeaseGrant", &[("TTL", Value::I64(100))]).await,
        call(&mut v3, "KV/Range", &[("key", bytes("0"))]).await,
    ];
    told.extend(answers.map(|answer| match answer {
        Ok(_) => "done".into(),
        Err(refused) => format!("{:?} {}", refused.code(), refused.message()),
    }));
    told
}

/// Puts until there is no room. etcd learns of its size only every tenth of a second, so on a quick disk it takes
/// many more than fit.
async fn fill(address: SocketAddr) {
    let mut v3 = Client::connect(address).await.unwrap();
    for number in 0..10_000 {
        if put(&mut v3, &number.to_string(), 30_000).await.is_err() {
            return;
        }
    }
    panic!("{address} takes more than it may");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_without_room_says_so_as_etcd_does_until_there_is_some() {
    let quota = QUOTA.to_string();
    let etcd = Etcd::start_with(&["--quota-backend-bytes", &quota]).await;
    let folder = scratch();
    let db = Db::open(&database(&folder), &[SCHEMA]).unwrap();
    let options = Options { quota: Some(QUOTA), ..Options::default() };
    let store = Store::open(db, options).await.unwrap();
    let ours = Ours::serving(folder, store, |endpoint| endpoint).await;
    assert_eq!(told(etcd.address).await, told(ours.address).await, "while there is room");
    fill(etcd.address).await;
    fill(ours.address).await;
    let full = told(ours.address).await;
    assert_eq!(told(etcd.address).await, full, "the real etcd's are the first");
    assert!(full[0].starts_with("503") && full[0].contains("false"), "{full:?}");
    assert!(full[1].contains("NOSPACE"), "{full:?}");

    // v2 writes into the same store here; etcd's v2 knows no quota.
    let form = Some("application/x-www-form-urlencoded");
    let set = http::request(ours.address, "PUT", "/v2/keys/a", form, b"value=1");
    let mut v2 = Connection::open(ours.address).await.unwrap();
    let refused = soon("a v2 put", v2.exchange(&set)).await.unwrap();
    assert_eq!(refused.status, 500);
    assert!(refused.text().contains("\"errorCode\":300"), "{}", refused.text());
    assert!(refused.text().contains("database space exceeded"), "{}", refused.text());

    // The alarm cannot be disarmed by hand, and need not be.
    let mut v3 = Client::connect(ours.address).await.unwrap();
    let disarm = [("action", Value::EnumNumber(2)), ("alarm", Value::EnumNumber(1))];
    let disarmed = call(&mut v3, "Maintenance/Alarm", &disarm).await.unwrap();
    assert_eq!(field(&disarmed, "alarms"), "List([])");
    assert!(health(ours.address).await.starts_with("503"));
    call(&mut v3, "KV/DeleteRange", &[("key", bytes("0")), ("range_end", bytes("z"))])
        .await
        .unwrap();
    ours.store.compact(ours.store.revision(), true).await.unwrap();
    soon("there is room again", async {
        while !health(ours.address).await.starts_with("200") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    let status = call(&mut v3, "Maintenance/Status", &[]).await.unwrap();
    assert_eq!(field(&status, "errors"), "List([])");
    put(&mut v3, "again", 1).await.unwrap();
}

/// Has a writer thread die once it is told to. A store whose writer died takes no writes, just as after a
/// failed fsync.
struct Deadly(Arc<AtomicBool>);

impl Mirror for Deadly {
    fn keep(&self) {}
    fn undo(&self) {}
    fn seal(&self) -> Rows {
        Rows::none()
    }
    fn publish(&self) {
        assert!(!self.0.load(Ordering::Relaxed), "planted: a writer thread dies");
    }
    fn discard(&self) {}
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_has_halted_says_so() {
    let folder = scratch();
    let db = Db::open(&database(&folder), &[SCHEMA]).unwrap();
    let store = Store::open(db.clone(), Options::default()).await.unwrap();
    let deadly = Arc::new(AtomicBool::new(false));
    let mirror = Box::new(Deadly(Arc::clone(&deadly)));
    tokio::task::spawn_blocking(move || db.attach(mirror)).await.unwrap().unwrap();
    let ours = Ours::serving(folder, store, |endpoint| endpoint).await;
    let mut v3 = Client::connect(ours.address).await.unwrap();
    put(&mut v3, "a", 1).await.unwrap();
    assert!(health(ours.address).await.starts_with("200"));

    deadly.store(true, Ordering::Relaxed);
    put(&mut v3, "a", 2).await.unwrap_err();
    let halted = put(&mut v3, "a", 3).await.unwrap_err();
    assert!(halted.message().contains("writing has stopped"), "{halted:?}");
    assert!(health(ours.address).await.starts_with("503"));
    let status = call(&mut v3, "Maintenance/Status", &[]).await.unwrap();
    assert!(field(&status, "errors").contains("writing has stopped"), "{status:?}");
    let alarms = call(&mut v3, "Maintenance/Alarm", &[]).await.unwrap();
    assert_eq!(field(&alarms, "alarms"), "List([])", "room is not what is missing");
    call(&mut v3, "KV/Range", &[("key", bytes("a"))]).await.unwrap();
    let reads = Value::List(vec![grpc::reading("a")]);
    call(&mut v3, "KV/Txn", &[("success", reads)]).await.unwrap();
    assert!(ours.store.revision() >= Revision(2), "what is there can be read");
}
