//! What tests need of the world outside: real etcd clusters, Janus, NATS, PostgreSQL and Redis servers, a browser,
//! a collector of telemetry, and links that can be cut.
//!
//! Only ever a dev-dependency. What cannot be had panics and says why.
#![allow(clippy::missing_panics_doc, reason = "a test that cannot have its world should panic")]

#[cfg(feature = "browser")]
pub mod browser;
pub mod collector;
pub mod etcd;
pub mod janus;
pub mod nats;
pub mod postgres;
mod process;
mod proxy;
pub mod redis;

pub use proxy::Proxy;

use std::time::Duration;

/// What takes longer than this hangs.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Fails instead of hanging.
pub async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, work).await {
        Ok(done) => done,
        Err(late) => panic!("it hangs: {what}: {late}"),
    }
}
