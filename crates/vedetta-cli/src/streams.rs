//! Jobs in streams of NATS JetStream, beside those in the embedded file, which keeps the records of all.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use vedetta::core::queue::{Kept, Settled, Woken};
use vedetta::jobs::jetstream::{JetStream, Options};
use vedetta::jobs::sqlite::SqliteJobs;
use vedetta::jobs::{
    Change, Claim, Ear, Enqueued, Fate, Filter, Job, JobId, Jobs, JobsError, Ledger, Mode, NewJob,
    Note, Page, QueueCounts, Taken, Wanted,
};

/// The embedded ledger, in which jobs of streams are only shown.
pub(crate) struct Recorded {
    ledger: SqliteJobs,
    /// The streams of queues, and the subjects to publish to.
    streams: BTreeMap<String, (String, String)>,
}

impl Recorded {
    /// Opens the streams; what becomes of their jobs is recorded in the ledger.
    pub(crate) async fn open(
        ledger: SqliteJobs,
        url: &str,
        options: Vec<Options>,
    ) -> Result<(Self, BTreeMap<String, Arc<JetStream>>), JobsError> {
        let (mut streams, mut names) = (BTreeMap::new(), BTreeMap::new());
        for options in options {
            let queue = options.queue.clone();
            names.insert(queue.clone(), (options.stream.clone(), options.subject.clone()));
            let stream = JetStream::open(url, options, Some(Arc::new(ledger.clone()))).await?;
            streams.insert(queue, Arc::new(stream));
        }
        Ok((Self { ledger, streams: names }, streams))
    }

    fn is_here(&self, queue: &str) -> Result<(), JobsError> {
        match self.streams.get(queue) {
            None => Ok(()),
            Some((stream, subject)) => Err(JobsError::Invalid(format!(
                "the queue {queue:?} is the stream {stream} of NATS: publish to {subject} there"
            ))),
        }
    }
}

#[async_trait::async_trait]
impl Jobs for Recorded {
    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, JobsError> {
        jobs.iter().try_for_each(|job| self.is_here(&job.queue))?;
        self.ledger.enqueue(jobs).await
    }

    async fn take(&self, wanted: &Wanted<'_>) -> Result<Taken, JobsError> {
        self.is_here(wanted.queue)?;
        self.ledger.take(wanted).await
    }

    async fn keep(&self, held: &[(Claim, Note)]) -> Result<Vec<Kept>, JobsError> {
        self.ledger.keep(held).await
    }

    async fn settle(&self, ended: &[(Claim, Fate)]) -> Result<Vec<Settled>, JobsError> {
        self.ledger.settle(ended).await
    }

    async fn woken(&self, queue: &str, ear: &Ear) -> Woken {
        self.ledger.woken(queue, ear).await
    }
}

#[async_trait::async_trait]
impl Ledger for Recorded {
    async fn job(&self, id: JobId) -> Result<Option<Job>, JobsError> {
        self.ledger.job(id).await
    }

    async fn list(
        &self,
        filter: &Filter,
        before: Option<JobId>,
        limit: u32,
    ) -> Result<Page, JobsError> {
        self.ledger.list(filter, before, limit).await
    }

    async fn retry(&self, id: JobId) -> Result<Change, JobsError> {
        self.ledger.retry(id).await
    }

    async fn cancel(&self, id: JobId) -> Result<Change, JobsError> {
        self.ledger.cancel(id).await
    }

    async fn delete(&self, id: JobId) -> Result<Change, JobsError> {
        self.ledger.delete(id).await
    }

    async fn queues(&self) -> Result<Vec<QueueCounts>, JobsError> {
        self.ledger.queues().await
    }

    async fn set_mode(&self, queue: &str, mode: Mode) -> Result<(), JobsError> {
        if let Some((stream, _)) = self.streams.get(queue) {
            let why = "its messages are handed out by NATS, not here";
            return Err(JobsError::Invalid(format!(
                "the queue {queue:?} is the stream {stream} of NATS and has no modes: {why}"
            )));
        }
        self.ledger.set_mode(queue, mode).await
    }

    async fn prune(&self, done: Duration, dead: Duration) -> Result<u64, JobsError> {
        self.ledger.prune(done, dead).await
    }

    async fn tick(
        &self,
        name: &str,
        at: SystemTime,
        job: &NewJob,
    ) -> Result<Option<Enqueued>, JobsError> {
        self.is_here(&job.queue)?;
        self.ledger.tick(name, at, job).await
    }

    async fn last_tick(&self, name: &str) -> Result<Option<SystemTime>, JobsError> {
        self.ledger.last_tick(name).await
    }
}
