//! The v3 API: gRPC, and its JSON gateway.

mod codec;
mod gateway;
mod kv;
mod lease;
mod maintenance;
mod quick;
mod status;
mod watch;
mod wire;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderMap, Request, Response};
use tokio_util::sync::CancellationToken;
use tonic::codegen::{BoxFuture, Service};
use tonic::{Code, Status};
use vedetta_core::{KeyRange, Revision};
use vedetta_kv::Store;

use crate::Endpoint;
use crate::upload::Upload;
pub(crate) use gateway::refusal;
use proto::ResponseHeader;
use quick::Quick;
pub(crate) use quick::Reply;
pub(crate) use status::too_many;
pub(crate) use watch::KeyRoom;

/// The messages, as `build.rs` makes them.
#[allow(clippy::all, clippy::pedantic, missing_docs, unreachable_pub)]
mod proto {
    tonic::include_proto!("etcdserverpb");
}

/// What a request may be at most, as etcd has it; above is an error that says so.
const REQUEST_BYTES: usize = 3 << 19;
/// What a message may be at most. It is more, so that a request that is somewhat too large still gets the
/// answer above.
pub(crate) const MESSAGE_BYTES: usize = REQUEST_BYTES + (512 << 10);
/// What a message about leases may be at most: they are a few numbers.
const LEASE_BYTES: usize = 4 << 10;
/// There is one member and no election; a fresh etcd is in its second term.
pub(crate) const RAFT_TERM: u64 = 2;
/// How often a watch that asked for it hears where it stands when nothing happens.
const PROGRESS_EVERY: Duration = Duration::from_secs(600);

/// The JSON gateway.
pub(crate) fn router(endpoint: &Endpoint, stop: &CancellationToken) -> Router {
    gateway::router(&Grpc::new(endpoint, stop))
}

/// What the services share.
#[derive(Clone)]
struct Api(Arc<Inner>);

struct Inner {
    store: Store,
    stop: CancellationToken,
    name: String,
    scheme: &'static str,
    cluster_id: u64,
    member_id: u64,
    progress_every: Duration,
}

impl Api {
    fn store(&self) -> &Store {
        &self.0.store
    }

    fn header(&self, revision: Revision) -> ResponseHeader {
        ResponseHeader {
            cluster_id: self.0.cluster_id,
            member_id: self.0.member_id,
            revision: revision.0.cast_signed(),
            raft_term: RAFT_TERM,
        }
    }

    /// For answers that have no revision of their own.
    fn header_now(&self) -> ResponseHeader {
        self.header(self.store().revision())
    }
}

/// The gRPC services.
#[derive(Clone)]
pub(crate) struct Grpc(Arc<Services>);

struct Services {
    api: Api,
    kv: proto::kv_server::KvServer<Api>,
    watch: proto::watch_server::WatchServer<Api>,
    lease: proto::lease_server::LeaseServer<Api>,
    cluster: proto::cluster_server::ClusterServer<Api>,
    maintenance: proto::maintenance_server::MaintenanceServer<Api>,
    auth: proto::auth_server::AuthServer<Api>,
}

impl Grpc {
    pub(crate) fn new(endpoint: &Endpoint, stop: &CancellationToken) -> Self {
        let api = Api(Arc::new(Inner {
            store: endpoint.store.clone(),
            stop: stop.clone(),
            name: endpoint.name.clone(),
            scheme: endpoint.scheme(),
            cluster_id: endpoint.cluster_id(),
            member_id: endpoint.member_id(),
            progress_every: PROGRESS_EVERY,
        }));
        Self::over(&api)
    }

    fn over(api: &Api) -> Self {
        macro_rules! server {
            ($module:ident :: $server:ident) => {
                server!($module::$server, MESSAGE_BYTES)
            };
            ($module:ident :: $server:ident, $most:expr) => {
                proto::$module::$server::new(api.clone()).max_decoding_message_size($most)
            };
        }
        Self(Arc::new(Services {
            api: api.clone(),
            kv: server!(kv_server::KvServer),
            watch: server!(watch_server::WatchServer, watch::MESSAGE_BYTES),
            lease: server!(lease_server::LeaseServer, LEASE_BYTES),
            cluster: server!(cluster_server::ClusterServer),
            maintenance: server!(maintenance_server::MaintenanceServer),
            auth: server!(auth_server::AuthServer),
        }))
    }

    pub(crate) fn answer(
        &self,
        mut request: Request<Upload>,
    ) -> impl Future<Output = Response<Reply>> + use<> {
        let (quick, grpc) = (Quick::of(&request), self.clone());
        async move {
            if let Some(quick) = quick
                && let Some(answer) = quick.answer(&grpc.0.api, request.body_mut()).await
            {
                return answer;
            }
            grpc.call(request).await.map(Reply::Other)
        }
    }

    /// The answer is boxed by the service that gives it: as part of this future the request would be moved
    /// again with every layer around it.
    pub(crate) fn call<B>(
        &self,
        request: Request<B>,
    ) -> impl Future<Output = Response<tonic::body::Body>> + use<B>
    where
        B: http_body::Body<Data = bytes::Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send,
    {
        let service = request.uri().path().get(1..).and_then(|path| path.split_once('/'));
        let answer: BoxFuture<_, Infallible> = match service.map(|(service, _)| service) {
            Some("etcdserverpb.KV") => self.0.kv.clone().call(request),
            Some("etcdserverpb.Watch") => self.0.watch.clone().call(request),
            Some("etcdserverpb.Lease") => self.0.lease.clone().call(request),
            Some("etcdserverpb.Cluster") => self.0.cluster.clone().call(request),
            Some("etcdserverpb.Maintenance") => self.0.maintenance.clone().call(request),
            Some("etcdserverpb.Auth") => self.0.auth.clone().call(request),
            _ => Box::pin(async { Ok(unserved().into_http()) }),
        };
        async move {
            let Ok(mut answer) = answer.await;
            reword(answer.headers_mut());
            answer
        }
    }
}

/// Whether a call takes message after message.
pub(crate) fn is_stream(path: &str) -> bool {
    matches!(path, "/etcdserverpb.Watch/Watch" | "/etcdserverpb.Lease/LeaseKeepAlive")
}

/// Whether a call asks where the members are.
pub(crate) fn is_of_members(path: &str) -> bool {
    path == "/etcdserverpb.Cluster/MemberList"
}

fn unserved() -> Status {
    let why = "it has one member and no users, and leaves locks and elections to its clients";
    Status::unimplemented(format!("vedetta does not serve this call: {why}"))
}

/// The errors that are not ours: calls nobody knows, and messages that are too large.
fn reword(headers: &mut HeaderMap) {
    let Some(code) = headers.get("grpc-status") else { return };
    let better = match Code::from_bytes(code.as_bytes()) {
        Code::Unimplemented if !headers.contains_key("grpc-message") => unserved(),
        Code::OutOfRange => match Status::from_header_map(headers).map(larger_than_max) {
            Some(status) if status.code() != Code::OutOfRange => status,
            _ => return,
        },
        _ => return,
    };
    let _ = better.add_header(headers);
}

/// That a message is too large, in etcd's words; another status as it is.
fn larger_than_max(status: Status) -> Status {
    let sizes = status.message().strip_prefix("Error, decoded message length too large: found ");
    let sizes = sizes.and_then(|rest| rest.strip_suffix(" bytes"));
    match sizes.and_then(|rest| rest.split_once(" bytes, the limit is: ")) {
        Some((found, most)) => Status::resource_exhausted(format!(
            "grpc: received message larger than max ({found} vs. {most})"
        )),
        None => status,
    }
}

/// The keys that a key and the end of a range stand for.
fn key_range(key: bytes::Bytes, end: bytes::Bytes) -> KeyRange {
    match &end[..] {
        [] => KeyRange::One(key),
        [0] => KeyRange::From(key),
        _ => KeyRange::Between(key, end),
    }
}

/// A wire's number as a revision, if it is one.
fn revision(number: i64) -> Option<Revision> {
    u64::try_from(number).ok().filter(|&number| number > 0).map(Revision)
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;
    use vedetta_db::Db;
    use vedetta_kv::{Options, SCHEMA};

    use super::*;

    /// A store in a folder of its own.
    pub(super) async fn store() -> (TempDir, Store) {
        let folder = tempfile::tempdir().unwrap();
        let options = vedetta_db::Options::new(folder.path().join("vedetta.db"));
        let db = Db::open(&options, &[SCHEMA]).unwrap();
        (folder, Store::open(db, Options::default()).await.unwrap())
    }

    /// The API over it; a watch hears of progress every few milliseconds.
    pub(super) fn api(store: Store) -> Api {
        Api(Arc::new(Inner {
            store,
            stop: CancellationToken::new(),
            name: "n".into(),
            scheme: "http",
            cluster_id: 1,
            member_id: 2,
            progress_every: Duration::from_millis(5),
        }))
    }

    #[test]
    fn errors_that_are_not_ours_get_our_words() {
        let mut unknown = HeaderMap::new();
        Status::new(Code::Unimplemented, "").add_header(&mut unknown).unwrap();
        reword(&mut unknown);
        assert!(Status::from_header_map(&unknown).unwrap().message().contains("does not serve"));
        let mut ours = HeaderMap::new();
        Status::new(Code::OutOfRange, "compacted").add_header(&mut ours).unwrap();
        reword(&mut ours);
        let ours = Status::from_header_map(&ours).unwrap();
        assert_eq!((ours.code(), ours.message()), (Code::OutOfRange, "compacted"));
        let mut large = HeaderMap::new();
        let text = "Error, decoded message length too large: found 9 bytes, the limit is: 8 bytes";
        Status::new(Code::OutOfRange, text).add_header(&mut large).unwrap();
        reword(&mut large);
        let large = Status::from_header_map(&large).unwrap();
        let etcds = "grpc: received message larger than max (9 vs. 8)";
        assert_eq!((large.code(), large.message()), (Code::ResourceExhausted, etcds));
    }
}
