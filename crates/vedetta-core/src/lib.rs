//! The rules of Vedetta: pure values and decisions.
//!
//! Nothing here opens a file or a socket, spawns anything or reads a clock; time is an argument.

mod backoff;
pub mod follow;
mod ids;
mod job;
pub mod measure;
mod moment;
pub mod queue;
mod range;
mod registry;
mod revision;
mod run;
pub mod schedule;
pub mod slots;
mod source;
pub mod trace;

pub use backoff::{Backoff, Tries};
pub use follow::Follow;
pub use ids::Ids;
pub use job::JobState;
pub use moment::Moment;
pub use queue::{Command, Handler, Queue, QueueError};
pub use range::KeyRange;
pub use registry::Registry;
pub use revision::Revision;
pub use run::{Failure, RunEvent, explain};
pub use schedule::{Keyed, Schedule, Slot};
pub use slots::{Held, Slots, Ticket};
pub use source::{Change, Changes, Entry, Feed, Page, Source, SourceError};
pub use trace::{Span, Spans, Trace};
