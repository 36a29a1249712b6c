//! Jobs: asked for, handed out under a lease, kept alive while they run, and settled once.
//!
//! ```text
//!  enqueue ──► waiting ──take──► running ──settle──► done
//!                 ▲                 │ ├──── keep: progress, log ────► seen live
//!                 ├── failed, later ┤ └──► dead: failed too often
//!                 └── lease lapsed ─┘
//! ```
//!
//! [`Jobs`] is the port, with a backend each for the embedded SQLite file, PostgreSQL, NATS JetStream and a
//! running Vedetta over HTTP; [`Worker`] works any of them. [`Ledger`] is what the databases can do beside:
//! show all jobs, and let people retry them and call them off.
//!
//! How work is run within capacity is [`vedetta_runtime::Puller`]'s business.

mod declared;
pub mod jetstream;
mod job;
mod kinds;
mod monitor;
mod periodic;
mod port;
pub mod postgres;
pub mod remote;
pub mod sqlite;
mod traced;
pub mod wire;
mod worker;

pub use job::{
    Change, Claim, DEFAULT_QUEUE, Enqueued, Fate, Filter, Given, HIGHEST_PRIORITY, Job, JobId,
    JobsError, Json, LARGEST, LOG_TAIL, LONGEST_KEY, LONGEST_NAME, LONGEST_TEXT, MOST_TAGS, Mode,
    NewJob, Note, PRIORITY_STEP, Page, QueueCounts, When, check_name, stamp, status,
};
pub use kinds::{Asked, Cost, Kind, Kinds};
pub use monitor::{Ended, Monitor};
pub use periodic::{Every, Housekeeping, Periodic, Retention};
pub use port::{Jobs, Ledger, Taken, Wanted};
pub use traced::Asking;
pub use vedetta_runtime::Ear;
pub use worker::{BACKOFF, BoxError, JobEvent, LEASE, Outcome, Work, Worker, Working};
