//! The embedded store: keys with a history, transactions, leases and watches.
//!
//! ```text
//!            writer thread                                   any thread
//!   put ─► evaluate on Pending+Index ─► append a row ─► COMMIT ─► publish ─► Index   ◄── range
//!                                                                   │
//!                                                                   └──► Ring ◄── Watcher (own pace)
//!                                                    fan-out thread ──── marks ──────┘
//! ```
//!
//! One revision sequence: every transaction that changes something is one revision and one row in the
//! file, in order. The index of keys and the current values are in memory; older values are in the rows.
//! Nothing is shown before it is durable, neither to readers nor to watchers.

mod check;
mod codec;
mod compact;
mod engine;
mod index;
mod lease;
mod load;
mod pending;
mod present;
mod range;
mod record;
mod registry;
mod request;
mod source;
mod store;
mod update;
mod watch;

pub use check::check;
pub use compact::Keep;
pub use lease::{LeaseId, LeaseInfo};
pub use present::Present;
pub use record::{KeyValue, Stamps};
pub use request::{
    Compare, CompareOp, CompareTarget, Delete, Deleted, KvError, Op, OpReply, Order, Put, PutDone,
    PutLease, PutValue, Range, Ranged, SortBy, Txn, TxnDone,
};
pub use source::StoreFeed;
pub use store::{Limits, OpenError, Options, SCHEMA, Snapshot, Status, Store};
pub use update::{Update, WITH_DIRECTORY, Write};
/// Why there is no copy of the store, and why the database could not store something (part of
/// [`KvError`]); and what an update does to the disk, for [`Store::update`].
pub use vedetta_db::{BackupError, CommitError, Purpose};
pub use watch::{Batch, Line, WatchError, WatchOptions, Watcher};

use bytes::Bytes;
use vedetta_core::Revision;

/// One change of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The revision it happened in; other events of the same transaction share it.
    pub revision: Revision,
    /// What happened.
    pub change: Change,
    /// The key before, if it existed and that value is still kept.
    pub previous: Option<KeyValue>,
    /// A note of whoever made the change, kept with it; 0 when there is none. See [`Write::tag`].
    pub tag: u8,
}

/// What happened to a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// It has this value now.
    Put(KeyValue),
    /// It is gone.
    Delete {
        /// The key.
        key: Bytes,
        /// Why.
        cause: Cause,
    },
}

/// Why a key went away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Somebody deleted it or revoked its lease.
    Asked,
    /// Its lease expired.
    Expired,
}

impl Event {
    /// The key it is about.
    pub fn key(&self) -> &[u8] {
        match &self.change {
            Change::Put(now) => now.key(),
            Change::Delete { key, .. } => key,
        }
    }

    /// The key as it is after the event; `None` when it is gone.
    pub fn now(&self) -> Option<&KeyValue> {
        match &self.change {
            Change::Put(now) => Some(now),
            Change::Delete { .. } => None,
        }
    }
}
