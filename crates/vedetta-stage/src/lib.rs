//! Carries versioned entities forward, one stage after the other.
//!
//! ```text
//!  save an order ──► version + 1, and a record in the queue of the system stage   (one transaction)
//!                                        │
//!                     which stages want it now?  payment: no   packing: yes
//!                                        │
//!                     a record in packing's queue, after a short random delay
//!                                        │
//!                     process(order) ──► Untouched: the record goes, or stays for its next visit
//!                                   └──► Updated:   saved if nobody else saved meanwhile; round again
//! ```
//!
//! The entities are rows of the user's own table, in SQLite or in PostgreSQL; this crate keeps the
//! queues beside it, in the same database, so that an entity and its records are written together. An
//! entity has at most one record in a queue. A record is handed out under a lease with a token, and
//! settled only with that token, and only removed if nothing was written to it meanwhile.
//!
//! How often work runs beside itself, and for how long, is [`vedetta_runtime::Puller`]'s business.

mod alarm;
mod desk;
mod entities;
mod entity;
pub mod postgres;
mod processor;
mod record;
mod shards;
pub mod sqlite;

pub use entities::{Checked, Entities};
pub use entity::{BoxError, Entity, Limits, Stage, Version, Visit};
pub use processor::{
    Answer, Backend, Ending, Going, Processing, Processor, Saved, StageEvent, StageStatus,
};
pub use record::{
    Claim, Claimed, Fate, Lane, LaneCounts, Page, Record, Records, SYSTEM, StageError, Tally,
    Unsettled, Which,
};
pub use shards::{Shards, Share};
