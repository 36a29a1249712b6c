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

/// The embedded ledger, which has the records of what is in the streams.
pub(crate) struct Recorded {
    ledger: SqliteJobs,
    /// By queue.
    streams: BTreeMap<String, Stream>,
}

/// A queue that is a stream.
struct Stream {
    jobs: Arc<JetStream>,
    name: String,
}

impl Recorded {
    /// Opens the streams; what becomes of their jobs is recorded in the ledger.
    pub(crate) async fn open(
        ledger: SqliteJobs,
        url: &str,
        options: Vec<Options>,
    ) -> Result<(Self, BTreeMap<String, Arc<JetStream>>), JobsError> {
        let (mut opened, mut streams) = (BTreeMap::new(), BTreeMap::new());
        let modes = ledger.queues().await?;
        for options in options {
            let (queue, name) = (options.queue.clone(), options.stream.clone());
            let jobs = JetStream::open(url, options, Some(Arc::new(ledger.clone()))).await?;
            // It stays as it was before a restart.
            let is_paused =
                modes.iter().any(|counts| counts.name == queue && counts.mode == Mode::Paused);
            jobs.pause(is_paused).await;
            let jobs = Arc::new(jobs);
            opened.insert(queue.clone(), Arc::clone(&jobs));
            streams.insert(queue, Stream { jobs, name });
        }
        Ok((Self { ledger, streams }, opened))
    }

    /// Refuses what only a queue can do that is in the file.
    fn is_here(&self, queue: &str, what: &str) -> Result<(), JobsError> {
        match self.streams.get(queue) {
            None => Ok(()),
            Some(Stream { name, .. }) => Err(JobsError::Invalid(format!(
                "the queue {queue:?} is the stream {name} of NATS, which {what}"
            ))),
        }
    }

    /// The stream that a job is in, if it is in one, and its number there.
    fn elsewhere(&self, job: &Job) -> Option<(&JetStream, JobId)> {
        let stream = &self.streams.get(&job.queue)?.jobs;
        let number = job.connection.strip_prefix(stream.connection())?.strip_prefix('/')?;
        Some((stream, number.parse().ok()?))
    }

    /// Publishes jobs to their stream. They have the numbers of their records.
    async fn publish(
        &self,
        stream: &JetStream,
        jobs: &[NewJob],
    ) -> Result<Vec<Enqueued>, JobsError> {
        let published = stream.enqueue(jobs).await?;
        let numbers: Vec<JobId> = published.iter().map(|job| job.id).collect();
        let records = self.ledger.records_of(stream.connection(), &numbers).await?;
        let recorded = published.into_iter().zip(records).map(|(job, record)| {
            let unknown = || JobsError::Unavailable("it is published, and not recorded yet".into());
            Ok(Enqueued { id: record.ok_or_else(unknown)?, is_new: job.is_new })
        });
        recorded.collect()
    }
}

#[async_trait::async_trait]
impl Jobs for Recorded {
    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, JobsError> {
        let Some(stream) = jobs.iter().find_map(|job| self.streams.get(&job.queue)) else {
            return self.ledger.enqueue(jobs).await;
        };
        if jobs.iter().any(|job| job.queue != jobs[0].queue) {
            return Err(JobsError::Invalid(format!(
                "some are for the stream {} of NATS and some are not: all or none cannot be promised, so ask for \
                 them apart",
                stream.name
            )));
        }
        self.publish(&stream.jobs, jobs).await
    }

    async fn take(&self, wanted: &Wanted<'_>) -> Result<Taken, JobsError> {
        self.is_here(wanted.queue, "hands its messages out itself: pull from it")?;
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

    /// One that is in a stream is first recorded as called off: whoever has these records does not begin it, whatever
    /// happens. Then it is removed from the stream, and a worker here is told.
    async fn cancel(&self, id: JobId) -> Result<Change, JobsError> {
        let Some(job) = self.ledger.job(id).await? else { return Ok(Change::NoSuch) };
        let Some((stream, number)) = self.elsewhere(&job) else {
            return self.ledger.cancel(id).await;
        };
        if job.status.is_over() {
            return Ok(Change::Not(job.status));
        }
        let queued_at = stream.queued_at(number).await?;
        let change = self.ledger.cancel_record(id, queued_at).await?;
        if change == Change::Made && queued_at.is_some() {
            stream.remove(number).await?;
        }
        Ok(change)
    }

    async fn delete(&self, id: JobId) -> Result<Change, JobsError> {
        self.ledger.delete(id).await
    }

    async fn queues(&self) -> Result<Vec<QueueCounts>, JobsError> {
        self.ledger.queues().await
    }

    async fn set_mode(&self, queue: &str, mode: Mode) -> Result<(), JobsError> {
        if mode == Mode::Draining {
            let what = "others publish to: it can be paused, and not be kept from taking jobs on";
            self.is_here(queue, what)?;
        }
        self.ledger.set_mode(queue, mode).await?;
        if let Some(stream) = self.streams.get(queue) {
            stream.jobs.pause(mode == Mode::Paused).await;
        }
        Ok(())
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
        self.is_here(&job.queue, "cannot promise that a tick is one job")?;
        self.ledger.tick(name, at, job).await
    }

    async fn last_tick(&self, name: &str) -> Result<Option<SystemTime>, JobsError> {
        self.ledger.last_tick(name).await
    }
}
