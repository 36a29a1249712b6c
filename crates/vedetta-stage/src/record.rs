//! The queues of the stages. They know nothing of entities but their names and ids.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use vedetta_core::queue::{Kept, Settled};
use vedetta_runtime::Ear;

/// The stage that asks the others.
pub const SYSTEM: &str = "system";

/// An error's text is kept up to so many bytes.
const ERROR_LENGTH: usize = 4096;

/// A record that was handed out, and the proof of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Claim {
    /// The entity's id, as text.
    pub id: Arc<str>,
    /// Nobody else has this one.
    pub token: i64,
    /// How often in a row it failed so far.
    pub failures: u32,
}

/// What a claim found.
#[derive(Debug, Default)]
pub struct Claimed {
    /// Handed out.
    pub claims: Vec<Claim>,
    /// Fewer than asked for were due; the next one is after so long.
    pub rest: Option<Duration>,
}

/// What is to become of a record. Whatever it says, a record that something was written to since it was
/// claimed stays, and is due again at the time it has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fate {
    /// It goes.
    Gone,
    /// It is due again after so long.
    Visit(Duration),
    /// It failed.
    Failed {
        /// It is due again after so long.
        after: Duration,
        /// Whatever is written to it, it is not due before.
        not_before: Duration,
        /// Why.
        error: String,
        /// It is set aside instead.
        park: bool,
    },
    /// As if it had not been claimed.
    Released,
}

/// Which queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Lane(pub(crate) i32);

/// Why the queues did not answer, by what to do next.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StageError {
    /// The database cannot be reached, or cannot answer now: try again.
    #[error("the database cannot be used now")]
    Unavailable(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The database refused what it was asked.
    #[error("the database refused")]
    Failed(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Some entities would be nobody's: give [`Shards::join`](crate::Shards::join) and
    /// [`Entities::sharded`](crate::Entities::sharded) the same count.
    #[error("processes share {shared} shards, but the entities are divided into {divided}")]
    Unshared {
        /// Into how many shards the work is divided.
        shared: u16,
        /// And the entities.
        divided: u16,
    },
}

impl StageError {
    /// Whether to try again.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable(_))
    }
}

/// Why one record is not settled, though others of its batch may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unsettled {
    /// Its entity cannot be saved: that is a failure of its stage.
    Refused(String),
    /// The database could not be used just then: try again.
    Lost(String),
}

/// A record, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Whose queue.
    pub entity: String,
    /// Which stage's.
    pub stage: String,
    /// Whose record.
    pub id: String,
    /// Until it is due; nothing if it is, or is held or set aside.
    pub due_in: Option<Duration>,
    /// Somebody works on it.
    pub is_held: bool,
    /// Failures in a row.
    pub failures: u32,
    /// The last of them.
    pub error: Option<String>,
    /// It was set aside.
    pub is_parked: bool,
    /// How long ago it was made.
    pub age: Duration,
}

/// What is in a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaneCounts {
    /// Whose.
    pub entity: String,
    /// Which stage's.
    pub stage: String,
    /// Records in all.
    pub records: u64,
    /// Of those, due and not in work.
    pub due: u64,
    /// In work.
    pub held: u64,
    /// That failed and will be tried again.
    pub failing: u64,
    /// Set aside.
    pub parked: u64,
    /// How long the first of those that are due has been so.
    pub oldest_due: Option<Duration>,
    /// What became of those that were worked on.
    pub tally: Tally,
}

/// What became of records, in all processes since the queue was made. A process that is killed takes what
/// it counted in its last second with it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Runs that ended well.
    pub done: u64,
    /// Runs that failed.
    pub failed: u64,
    /// Updates that were not saved because somebody else had saved meanwhile, or kept the entity locked.
    pub conflicts: u64,
}

/// Which records to show.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Which {
    /// Of one stage only.
    pub stage: Option<String>,
    /// Of one entity only.
    pub id: Option<String>,
    /// Those set aside only.
    pub parked: bool,
    /// Those after this stage and id, which were the last of the page before.
    pub after: Option<(String, String)>,
}

/// Some records in the order of stage and id.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Page {
    /// These.
    pub records: Vec<Record>,
    /// There are more.
    pub more: bool,
}

/// The queues of all stages of one database. One of them serves a whole application.
pub trait Records: Clone + Send + Sync + 'static {
    /// The queue of an entity's stage, made if there is none.
    fn lane(
        &self,
        entity: &str,
        stage: &str,
    ) -> impl Future<Output = Result<Lane, StageError>> + Send;

    /// Wants visits after `delay`. Of two wishes for one id the earlier stands; whoever works on it now
    /// works on it once more.
    fn enqueue(
        &self,
        lane: Lane,
        visits: &[(&str, u16, Duration)],
    ) -> impl Future<Output = Result<(), StageError>> + Send;

    /// Claims up to `room` of what is due in the shards, of each the longest due first, none that somebody
    /// holds. Each is held for `lease`.
    fn claim(
        &self,
        lane: Lane,
        shards: &[u16],
        room: u32,
        lease: Duration,
    ) -> impl Future<Output = Result<Claimed, StageError>> + Send;

    /// Holds them for `lease` from now on.
    fn keep(
        &self,
        lane: Lane,
        held: &[&Claim],
        lease: Duration,
    ) -> impl Future<Output = Result<Vec<Kept>, StageError>> + Send;

    /// Settles what is still held.
    fn settle(
        &self,
        lane: Lane,
        ends: &[(Claim, Fate)],
    ) -> impl Future<Output = Result<Vec<Settled>, StageError>> + Send;

    /// What is in the queues, by entity and stage.
    fn counts(&self) -> impl Future<Output = Result<Vec<LaneCounts>, StageError>> + Send;

    /// Records of an entity's queues.
    fn list(
        &self,
        entity: &str,
        which: &Which,
        limit: u32,
    ) -> impl Future<Output = Result<Page, StageError>> + Send;

    /// Has a record tried again now, whatever became of it before. `false` if there is none.
    fn retry(
        &self,
        entity: &str,
        stage: &str,
        id: &str,
    ) -> impl Future<Output = Result<bool, StageError>> + Send;

    /// Brings what is in shards from `count` on into those before: there are no more of them.
    fn reshard(
        &self,
        lane: Lane,
        count: u16,
    ) -> impl Future<Output = Result<(), StageError>> + Send;

    /// Adds to the tally of a queue.
    fn note(&self, lane: Lane, tally: Tally)
    -> impl Future<Output = Result<(), StageError>> + Send;

    /// Returns when something was enqueued that this ear has not heard of.
    fn woken(&self, lane: Lane, ear: &Ear) -> impl Future<Output = ()> + Send;
}

/// Which shard of `count` an id belongs to. It must be the same in every process and for ever.
pub(crate) fn shard(id: &str, count: u16) -> u16 {
    // FNV-1a.
    let hash = id.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    // Ids differ in their last characters most of all, and those have not reached every bit yet.
    let mixed = (hash ^ (hash >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    u16::try_from(mixed % u64::from(count.max(1))).expect("less than the count")
}

/// As much of an error as is kept. PostgreSQL's texts have no NUL.
pub(crate) fn shortened(error: &str) -> String {
    error[..error.floor_char_boundary(ERROR_LENGTH)].replace('\0', "\u{fffd}")
}
