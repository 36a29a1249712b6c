//! Accepting connections, and letting them go.

use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use vedetta_kv::Store;

use crate::{v2, v3};

/// What is served.
#[derive(Clone)]
pub struct Endpoint {
    pub(crate) store: Store,
    /// The member's name, as etcd's clients show it.
    pub(crate) name: String,
    /// Where it is served; known once it is.
    pub(crate) url: String,
    pub(crate) limits: Limits,
}

/// How much of the server clients may take.
#[derive(Debug, Clone, Default)]
pub struct Limits {}

impl Endpoint {
    /// Serves `store`.
    pub fn new(store: Store) -> Self {
        Self { store, name: "vedetta".into(), url: String::new(), limits: Limits::default() }
    }

    pub(crate) fn cluster_id(&self) -> u64 {
        !self.member_id()
    }

    pub(crate) fn member_id(&self) -> u64 {
        self.name.bytes().fold(1, |id, byte| id << 8 | u64::from(byte))
    }
}

/// Serves until `stop`.
pub async fn serve(listener: TcpListener, mut endpoint: Endpoint, stop: CancellationToken) {
    let Ok(address) = listener.local_addr() else { return };
    endpoint.url = format!("http://{address}");
    let router = v2::router(&endpoint, &stop).merge(v3::router(&endpoint, &stop));
    let _ = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await;
}
