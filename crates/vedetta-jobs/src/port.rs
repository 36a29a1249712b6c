//! What a backend does for workers, and for people.

use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use vedetta_core::queue::{Kept, Settled, Woken};
use vedetta_runtime::Ear;

use crate::job::{
    Change, Claim, Enqueued, Fate, Filter, Given, Job, JobId, JobsError, Mode, NewJob, Note, Page,
    QueueCounts,
};

/// Takes jobs on and hands them out. Every backend is one, and passes the same suite.
#[async_trait]
pub trait Jobs: Send + Sync + 'static {
    /// Takes jobs on, all or none; durable when it returns. What it says of each is in their order.
    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, JobsError>;

    /// Hands out jobs that are due, the most urgent first, each under a lease: as long as what it has
    /// handed out costs less than the room, so that the last may cost more than is left. Answers at once.
    async fn take(&self, wanted: &Wanted<'_>) -> Result<Taken, JobsError>;

    /// Prolongs leases by as long as they were taken for, and stores what there is to tell. What it says
    /// of each is in the order of `held`. A job that was called off is lost.
    async fn keep(&self, held: &[(Claim, Note)]) -> Result<Vec<Kept>, JobsError>;

    /// Takes note of how jobs ended; durable when it returns. What it says of each is in the order of
    /// `ended`. Said again after an error it does no harm.
    async fn settle(&self, ended: &[(Claim, Fate)]) -> Result<Vec<Settled>, JobsError>;

    /// Returns when there may be more to take in a queue, or a lease of it may be lost. What happens
    /// between two calls with the same ear is not lost.
    async fn woken(&self, queue: &str, ear: &Ear) -> Woken;
}

/// What a worker asks for.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// From here.
    pub queue: &'a str,
    /// For whom.
    pub worker: &'a str,
    /// Of this cost.
    pub room: u32,
    /// What costs more counts as this.
    pub capacity: u32,
    /// For so long, unless it is kept.
    pub lease: Duration,
}

/// What a worker gets.
#[derive(Debug, Default)]
pub struct Taken {
    /// Handed out.
    pub jobs: Vec<Given>,
    /// There is no more: nothing is due for so long, as far as is known.
    pub rest: Option<Duration>,
}

/// Keeps all that became of jobs, and lets people change it. The databases are one; a stream is none.
#[async_trait]
pub trait Ledger: Jobs {
    /// One job.
    async fn job(&self, id: JobId) -> Result<Option<Job>, JobsError>;

    /// Some jobs, the newest first, those with an id below `before` if that is said.
    async fn list(
        &self,
        filter: &Filter,
        before: Option<JobId>,
        limit: u32,
    ) -> Result<Page, JobsError>;

    /// Has a job that is dead or was called off wait again, due now, with no attempts made.
    async fn retry(&self, id: JobId) -> Result<Change, JobsError>;

    /// Calls off a job that waits or runs. Its worker is told at once, and can no longer settle it.
    async fn cancel(&self, id: JobId) -> Result<Change, JobsError>;

    /// Removes a job that does not run.
    async fn delete(&self, id: JobId) -> Result<Change, JobsError>;

    /// Every queue that has or had jobs, or a mode.
    async fn queues(&self) -> Result<Vec<QueueCounts>, JobsError>;

    /// Says whether a queue takes and gives. It stays so after a restart.
    async fn set_mode(&self, queue: &str, mode: Mode) -> Result<(), JobsError>;

    /// Removes jobs that were over so long ago: done or called off, and dead. A bounded number of them, so
    /// that nobody waits long for it; how many. When it is none, there is no more to remove.
    async fn prune(&self, done: Duration, dead: Duration) -> Result<u64, JobsError>;

    /// Takes a job on for a tick of something periodic, unless a tick at that time or later was there
    /// before: so each is at most once, however many servers tick. Nothing if it was.
    async fn tick(
        &self,
        name: &str,
        at: SystemTime,
        job: &NewJob,
    ) -> Result<Option<Enqueued>, JobsError>;

    /// When something periodic last ticked.
    async fn last_tick(&self, name: &str) -> Result<Option<SystemTime>, JobsError>;
}
