//! The store as etcd serves it: the v2 keys API over HTTP/1.1 and v3 gRPC over HTTP/2, on one port.
//!
//! Both are views of one keyspace and one revision sequence: what one writes the other sees, under the
//! same number.
//!
//! And the other way round: [`Cluster`] is an etcd elsewhere (or a Vedetta), to be listed, followed and written to, and to
//! hold keys in.

mod authority;
mod calls;
mod guard;
mod health;
mod serve;
mod source;
mod tell;
mod upload;
mod v2;
mod v3;

pub use serve::{Endpoint, Limits, serve};
pub use source::{BadEndpoint, Cluster, ClusterFeed, Is, Lease, Write, WriteError, Written};
pub use tell::{Telling, tell};
pub use vedetta_kv::LeaseId;
pub use vedetta_net::tls::{ClientTls, Tls, TlsError, TlsFiles};

/// The release of etcd that is spoken here.
pub(crate) const ETCD_VERSION: &str = "3.4.23";
