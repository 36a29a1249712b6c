//! The HTTP API of the store, its watchers, stages, jobs and workers, and their page.
//!
//! ```text
//!  accept ─► a place among the connections ─► head within its time ─► Host, Origin ─► route ─► store, watchers
//! ```
//!
//! JSON under `/api/v1`, server-sent events for watches, one page that shows the store live. Everything
//! a client can send is bounded: connections, time for the head and the body, sizes, page lengths; and so is
//! the time it may leave an answer unread. How anything is stored is not this crate's business.

mod api;
mod error;
mod guard;
mod input;
mod jobs;
mod json;
mod kv;
mod leases;
mod openapi;
mod page;
mod queues;
mod serve;
mod stages;
mod watch;
mod watchers;
mod workers;

pub use api::{Api, Limits};
pub use serve::serve;
