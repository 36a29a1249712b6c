//! Kill loop over the wire: `vedetta up` dies by SIGKILL under clients of both of etcd's APIs, again and again, and what
//! it had answered is there when it is started on the same folder. What a power cut leaves is the torture suite's question.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use vedetta::etcd::{Cluster, Write};

use crate::support::{PATIENCE, Server, http, temp, until};

const CYCLES: u64 = 20;
/// Of each API.
const WRITERS: u64 = 3;

/// What clients did. Every write has a name of its own, which is also its value.
#[derive(Default)]
struct Past {
    tried: BTreeSet<String>,
    /// What was answered, and as which revision.
    done: BTreeMap<String, u64>,
}

type Shared = Arc<Mutex<Past>>;

/// A write as the server tells of it: its revision, and with how many keys it is there.
#[derive(Debug, Default, PartialEq, Eq)]
struct Found {
    revision: u64,
    keys: usize,
}

/// Two keys at once over gRPC, until the line breaks.
async fn write_v3(endpoint: String, cycle: u64, writer: u64, past: Shared) {
    let cluster = Cluster::new([endpoint]).unwrap().patience(PATIENCE);
    for n in 0.. {
        let name = format!("v3-{cycle}-{writer}-{n}");
        past.lock().unwrap().tried.insert(name.clone());
        let key = |end| format!("/v3/{name}/{end}");
        let write = Write::new().put(key("a"), name.clone()).put(key("b"), name.clone());
        match cluster.write(write).await {
            Ok(done) => drop(past.lock().unwrap().done.insert(name, done.revision.0)),
            Err(_) => return,
        }
    }
}

/// One key at a time over v2, every third with a time to live, until the line breaks.
fn write_v2(endpoint: &str, cycle: u64, writer: u64, past: &Shared) {
    let agent = http();
    for n in 0.. {
        let name = format!("v2-{cycle}-{writer}-{n}");
        past.lock().unwrap().tried.insert(name.clone());
        let ttl = if n % 3 == 0 { "1000" } else { "" };
        let form = [("value", name.as_str()), ("ttl", ttl)];
        let request = agent.put(format!("{endpoint}/v2/keys/v2/{name}"));
        let request = request.config().timeout_global(Some(PATIENCE)).build();
        let Ok(mut answer) = request.send_form(form) else { return };
        let Ok(answer) = answer.body_mut().read_json::<Value>() else { return };
        let revision = answer["node"]["modifiedIndex"].as_u64().expect("it tells the revision");
        past.lock().unwrap().done.insert(name, revision);
    }
}

/// All that the server has, and where it is.
fn all(endpoint: &str) -> (BTreeMap<String, Found>, u64) {
    let range = json!({ "key": STANDARD.encode("/v3/"), "range_end": STANDARD.encode("/v30") });
    let mut answer = http().post(format!("{endpoint}/v3/kv/range")).send_json(range).unwrap();
    let answer: Value = answer.body_mut().read_json().unwrap();
    let number = |value: &Value| value.as_str().unwrap().parse::<u64>().unwrap();
    let mut found = BTreeMap::<String, Found>::new();
    for key in answer["kvs"].as_array().into_iter().flatten() {
        let name = STANDARD.decode(key["value"].as_str().unwrap()).unwrap();
        let write = found.entry(String::from_utf8(name).unwrap()).or_default();
        write.keys += 1;
        write.revision = number(&key["mod_revision"]);
    }
    let current = number(&answer["header"]["revision"]);
    // Until somebody has written there is no such directory.
    if let Ok(mut answer) = http().get(format!("{endpoint}/v2/keys/v2")).call() {
        let answer: Value = answer.body_mut().read_json().unwrap();
        for node in answer["node"]["nodes"].as_array().into_iter().flatten() {
            let name = node["value"].as_str().unwrap().to_owned();
            let timed = name.rsplit('-').next().unwrap().parse::<u64>().unwrap() % 3 == 0;
            assert_eq!(node["ttl"].is_u64(), timed, "{node}");
            let revision = node["modifiedIndex"].as_u64().unwrap();
            found.insert(name, Found { revision, keys: 1 });
        }
    }
    (found, current)
}

/// What cannot be.
fn violations(past: &Past, found: &BTreeMap<String, Found>, current: u64) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut given = BTreeMap::new();
    for (name, &revision) in &past.done {
        let keys = if name.starts_with("v3") { 2 } else { 1 };
        match found.get(name) {
            Some(there) if *there == (Found { revision, keys }) => {}
            other => wrong.push(format!("{name} was answered as {revision} and is {other:?}")),
        }
        if let Some(other) = given.insert(revision, name) {
            wrong.push(format!("{revision} was given to both {other} and {name}"));
        }
        if revision > current {
            wrong.push(format!("went back from {revision} to {current}"));
        }
    }
    for (name, there) in found {
        if !past.tried.contains(name) {
            wrong.push(format!("nobody has written {name}"));
        }
        if name.starts_with("v3") && there.keys != 2 {
            wrong.push(format!("half of {name} is there"));
        }
    }
    wrong
}

#[test]
fn a_killed_server_lost_nothing_it_answered_to_clients_of_either_api() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let folder = temp();
    let past = Shared::default();
    let mut rng = 0x5eed_u64;
    let mut random = |below: u64| {
        // Any will do; the moment depends on the machine anyway.
        rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (rng >> 33) % below
    };
    let mut last = 0;
    for cycle in 0..CYCLES {
        let server = Server::start(folder.path());
        let (found, current) = all(&server.etcd);
        let wrong = violations(&past.lock().unwrap(), &found, current);
        assert!(wrong.is_empty(), "before cycle {cycle}:\n{}", wrong.join("\n"));
        assert!(current >= last, "went back from {last} to {current}");
        last = current;

        let before = past.lock().unwrap().done.len();
        let v3: Vec<_> = (0..WRITERS)
            .map(|writer| write_v3(server.etcd.clone(), cycle, writer, Arc::clone(&past)))
            .map(|writing| runtime.spawn(writing))
            .collect();
        let v2: Vec<_> = (0..WRITERS)
            .map(|writer| (server.etcd.clone(), writer, Arc::clone(&past)))
            .map(|(endpoint, writer, past)| {
                std::thread::spawn(move || write_v2(&endpoint, cycle, writer, &past))
            })
            .collect();
        let answers = usize::try_from(random(60)).unwrap();
        until("answers", || past.lock().unwrap().done.len() >= before + answers);
        std::thread::sleep(Duration::from_micros(random(4_000)));
        drop(server); // SIGKILL
        v3.into_iter().for_each(|writer| runtime.block_on(writer).unwrap());
        v2.into_iter().for_each(|writer| writer.join().unwrap());
    }
    let server = Server::start(folder.path());
    let (found, current) = all(&server.etcd);
    let past = past.lock().unwrap();
    assert_eq!(violations(&past, &found, current), [""; 0]);
    let of = |api: &str| past.done.keys().filter(|name| name.starts_with(api)).count();
    eprintln!("{} of v2 and {} of v3 answered, {} tried", of("v2"), of("v3"), past.tried.len());
    assert!(of("v2") > 20 && of("v3") > 20 && past.tried.len() > past.done.len());
    server.stop();
}
