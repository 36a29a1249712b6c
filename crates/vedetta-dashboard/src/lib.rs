//! The HTTP API of the store, its watchers, stages, jobs and workers, and their page.
//!
//! ```text
//!  accept ─► a place among the connections ─► TLS ─► head within its time ─► the guard ─► route ─► store, watchers
//! ```
//!
//! JSON under `/api/v1`, server-sent events for watches, one page that shows the store live. Everything
//! a client can send is bounded: connections, time for the head and the body, sizes, page lengths; and so is
//! the time it may leave an answer unread. Who may do what is said where the routes are, and asked in one place. How anything is stored is not this crate's business.

mod access;
mod api;
mod audit;
mod error;
mod guard;
mod hub;
mod input;
mod jobs;
mod json;
mod kv;
mod leases;
mod live;
mod login;
mod metrics;
mod observe;
mod openapi;
mod page;
mod queues;
mod redact;
mod serve;
mod stages;
mod stats;
mod watch;
mod watchers;
mod workers;

pub use api::{Api, Limits};
pub use observe::Observed;
pub use serve::serve;
