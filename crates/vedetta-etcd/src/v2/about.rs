//! What the server says of itself: members, statistics, version, health.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use axum::http::request::Parts;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde_json::json;

use super::ttl::timestamp;
use super::write::Verb;
use super::{Api, not_allowed, not_found, plain};
use crate::ETCD_VERSION;
use crate::health::ailment;
use crate::serve::Origin;

/// How often what was asked, and when it began.
#[derive(Debug)]
pub(crate) struct Stats {
    started: Instant,
    started_at: SystemTime,
    counts: [AtomicU64; NAMES.len()],
}

/// In etcd's order.
const NAMES: [&str; 14] = [
    "getsSuccess",
    "getsFail",
    "setsSuccess",
    "setsFail",
    "deleteSuccess",
    "deleteFail",
    "updateSuccess",
    "updateFail",
    "createSuccess",
    "createFail",
    "compareAndSwapSuccess",
    "compareAndSwapFail",
    "compareAndDeleteSuccess",
    "compareAndDeleteFail",
];

impl Default for Stats {
    fn default() -> Self {
        let counts = Default::default();
        Self { started: Instant::now(), started_at: SystemTime::now(), counts }
    }
}

impl Stats {
    /// Counts a request; `None` is a read.
    pub(crate) fn count(&self, verb: Option<Verb>, done: bool) {
        let name = match verb {
            None => 0,
            Some(Verb::Set) => 2,
            Some(Verb::Delete) => 4,
            Some(Verb::Update) => 6,
            Some(Verb::Create | Verb::Post) => 8,
            Some(Verb::CompareAndSwap) => 10,
            Some(Verb::CompareAndDelete) => 12,
        };
        self.counts[name + usize::from(!done)].fetch_add(1, Ordering::Relaxed);
    }
}

/// Answers for everything but the keys.
pub(crate) async fn answer(api: &Api, path: &[u8], head: &Parts) -> Response {
    let method = &head.method;
    let get = |answer: fn(&Api, &Parts) -> Response| {
        if method == Method::GET { answer(api, head) } else { not_allowed("GET") }
    };
    match path {
        b"/version" => get(|_, _| {
            let ours = env!("CARGO_PKG_VERSION");
            let (series, _) = ETCD_VERSION.rsplit_once('.').unwrap_or((ETCD_VERSION, ""));
            let text = format!(
                r#"{{"etcdserver":"{ETCD_VERSION}","etcdcluster":"{series}.0","vedetta":"{ours}"}}"#
            );
            json_text(text)
        }),
        b"/health" if method == Method::GET => match ailment(&api.store).await {
            None => "{\"health\":\"true\"}".into_response(),
            Some(_) => plain(StatusCode::SERVICE_UNAVAILABLE, "{\"health\":\"false\"}\n"),
        },
        b"/health" => not_allowed("GET"),
        b"/v2/stats/store" => get(|api, _| json_text(store_stats(api))),
        b"/v2/stats/self" => get(|api, _| json_text(self_stats(api))),
        b"/v2/stats/leader" => get(|api, _| {
            json_text(format!("{{\"leader\":\"{}\",\"followers\":{{}}}}", api.member_id))
        }),
        b"/v2/machines" if matches!(*method, Method::GET | Method::HEAD) => {
            client_url(api, head).into_response()
        }
        b"/v2/machines" => not_allowed("GET,HEAD"),
        b"/v2/members" | b"/v2/members/" => get(|api, head| {
            of_cluster(api, json_text(format!("{{\"members\":[{}]}}\n", member(api, head))))
        }),
        b"/v2/members/leader" => {
            get(|api, head| of_cluster(api, json_text(format!("{}\n", member(api, head)))))
        }
        path if path.starts_with(b"/v2/members/") => get(|api, _| {
            let answer = json_text("{\"message\":\"Not found\"}".into());
            of_cluster(api, (StatusCode::NOT_FOUND, answer).into_response())
        }),
        _ => not_found(),
    }
}

fn json_text(text: String) -> Response {
    let json = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, json)], text).into_response()
}

/// Marks an answer as this cluster's.
pub(crate) fn of_cluster(api: &Api, mut answer: Response) -> Response {
    if let Ok(id) = HeaderValue::from_str(&api.cluster_id) {
        answer.headers_mut().insert("x-etcd-cluster-id", id);
    }
    answer
}

/// Where clients reach us: where this one did.
fn client_url(api: &Api, head: &Parts) -> String {
    let host = head.headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let local = || head.extensions.get::<Origin>().map(|origin| origin.local.to_string());
    let host = host.map(str::to_owned).or_else(local).unwrap_or_default();
    format!("{}://{host}", api.scheme)
}

fn member(api: &Api, head: &Parts) -> String {
    let url = json!(client_url(api, head));
    let name = json!(api.name);
    let id = &api.member_id;
    format!(r#"{{"id":"{id}","name":{name},"peerURLs":[{url}],"clientURLs":[{url}]}}"#)
}

fn store_stats(api: &Api) -> String {
    let counts = NAMES.iter().zip(&api.stats.counts);
    let counts =
        counts.map(|(name, count)| format!("\"{name}\":{},", count.load(Ordering::Relaxed)));
    let (counts, watchers) = (counts.collect::<String>(), api.store.status().watchers);
    // Expired keys are not counted: the store ends leases without asking who made them.
    format!("{{{counts}\"expireCount\":0,\"watchers\":{watchers}}}")
}

fn self_stats(api: &Api) -> String {
    let (name, id) = (json!(api.name), &api.member_id);
    let (since, uptime) = (timestamp(api.stats.started_at), uptime(api.stats.started.elapsed()));
    format!(
        "{{\"name\":{name},\"id\":\"{id}\",\"state\":\"StateLeader\",\"startTime\":\"{since}\",\
         \"leaderInfo\":{{\"leader\":\"{id}\",\"uptime\":\"{uptime}\",\"startTime\":\"{since}\"}},\
         \"recvAppendRequestCnt\":0,\"sendAppendRequestCnt\":0}}"
    )
}

/// A duration as Go writes it.
fn uptime(time: Duration) -> String {
    let (minutes, seconds) = (time.as_secs() / 60, time.as_secs() % 60);
    let fraction = format!("{:09}", time.subsec_nanos());
    let seconds = match fraction.trim_end_matches('0') {
        "" => format!("{seconds}s"),
        fraction => format!("{seconds}.{fraction}s"),
    };
    match (minutes / 60, minutes % 60) {
        (0, 0) => seconds,
        (0, minutes) => format!("{minutes}m{seconds}"),
        (hours, minutes) => format!("{hours}h{minutes}m{seconds}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uptimes_are_gos() {
        for (ms, expected) in [
            (1_500, "1.5s"),
            (60_000, "1m0s"),
            (1_329_126, "22m9.126s"),
            (3_600_000, "1h0m0s"),
            (90_061_001, "25h1m1.001s"),
        ] {
            assert_eq!(uptime(Duration::from_millis(ms)), expected);
        }
    }
}
