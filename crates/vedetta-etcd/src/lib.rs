//! The store as etcd serves it: the v2 keys API over HTTP/1.1 and v3 gRPC over HTTP/2, on one port.
//!
//! Both are views of one keyspace and one revision sequence: what one writes the other sees, under the
//! same number.

mod authority;
mod guard;
mod serve;
mod tls;
mod v2;
mod v3;

pub use serve::{Endpoint, Limits, serve};
pub use tls::{TlsError, TlsFiles};

/// The release of etcd that is spoken here.
pub(crate) const ETCD_VERSION: &str = "3.4.23";
