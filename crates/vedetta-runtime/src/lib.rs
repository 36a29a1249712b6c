//! Runs work: one key at a time, within capacity, until it is done.
//!
//! [`Runner`] owns the schedule, the slots and what runs. [`Watcher`] keeps a typed picture of what a
//! [`Source`](vedetta_core::Source) says should be, and has a [`Runner`] bring each part of it about.
//! [`Declared`] is a watcher that runs a [`Command`] for that. [`Puller`] works a
//! [`Queue`](vedetta_core::Queue) with one. [`told`] is what processes say of their watchers to each other.

mod bells;
mod command;
mod declared;
mod puller;
mod room;
mod runner;
pub mod told;
pub mod watcher;

pub use bells::{Bell, Bells, Ear};
pub use command::{Command, CommandError, Watch};
pub use declared::{Declared, Keys};
pub use puller::{Flow, PullStatus, Puller, Pulling};
pub use room::{Hold, Room};
pub use runner::{Ended, Limits, Outcome, Runner};
pub use watcher::{Handle, Next, Reconcile, State, Watcher, Watching};

use std::time::Duration;

/// Longer than anybody waits; the clock cannot count to the end of time.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);
