//! Jobs in streams of NATS JetStream, beside those in the embedded file, which keeps the records of all.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use vedetta::core::explain;
use vedetta::core::queue::{Kept, Settled, Woken};
use vedetta::jobs::jetstream::{JetStream, Options};
use vedetta::jobs::sqlite::{RECORDED, SqliteJobs};
use vedetta::jobs::{
    Change, Claim, Ear, Enqueued, Fate, Filter, Job, JobId, Jobs, JobsError, Ledger, Mode, NewJob,
    Note, Page, QueueCounts, Taken, Wanted,
};

/// The embedded ledger, which has the records of what is in the streams.
pub(crate) struct Recorded {
    ledger: SqliteJobs,
    /// By queue.
    streams: BTreeMap<String, Stream>,
    /// For so long after its end a message may come again.
    comes_again: Duration,
    /// The last record of those that were looked after.
    looked_at: AtomicU64,
}

/// Records of which nothing was heard for so long are looked after, so many at a time.
const UNHEARD: Duration = Duration::from_secs(3600);
const LOOKED_AT: u32 = 1000;

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
        let mut comes_again = RECORDED;
        for options in options {
            comes_again = comes_again.max(options.ack_wait * 2);
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
        Ok((Self { ledger, streams, comes_again, looked_at: AtomicU64::new(0) }, opened))
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

    /// Ends records of which nothing was heard for so long, and whose messages are gone: a server with other records did
    /// them, or they were removed there.
    async fn end_unheard(&self, silence: Duration) -> Result<(), JobsError> {
        let after = JobId(self.looked_at.load(Ordering::Relaxed));
        let unheard = self.ledger.unheard(silence, after, LOOKED_AT).await?;
        let last = unheard.last().map_or(0, |id| id.0);
        self.looked_at.store(last, Ordering::Relaxed);
        for id in unheard {
            let Some(job) = self.ledger.job(id).await? else { continue };
            let Some((stream, number)) = self.elsewhere(&job) else { continue };
            if stream.is_gone(number).await? {
                self.ledger.end_record(id).await?;
            }
        }
        Ok(())
    }

    /// Publishes jobs to their stream. They have the numbers of their records.
    async fn publish(&self, stream: &Stream, jobs: &[NewJob]) -> Result<Vec<Enqueued>, JobsError> {
        let published = stream.jobs.enqueue(jobs).await?;
        let numbers: Vec<JobId> = published.iter().map(|job| job.id).collect();
        let records = self.ledger.records_of(stream.jobs.connection(), &numbers).await;
        // Whoever tried again would ask for one more of each.
        let unknown = || {
            let last = numbers.last().map_or(0, |number| number.0);
            let name = &stream.name;
            let what = format!(
                "it is published to the stream {name} as message {last}, and not recorded yet: do not ask again"
            );
            JobsError::Failed(what.into())
        };
        let recorded = published.iter().zip(records.map_err(|_| unknown())?);
        let recorded = recorded.map(|(job, record)| {
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
        self.publish(stream, jobs).await
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
        if change == Change::Made
            && queued_at.is_some()
            && let Err(error) = stream.remove(number).await
        {
            // It is called off all the same: when it comes it is found to have ended.
            let error = explain(&error);
            tracing::warn!(job = id.0, error, "a job that was called off is still in its stream");
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
        let removed = self.ledger.prune_but(done, dead, self.comes_again).await?;
        if removed == 0 {
            self.end_unheard(UNHEARD).await?;
        }
        Ok(removed)
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

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use tempfile::TempDir;
    use vedetta::core::JobState;
    use vedetta::db::Db;
    use vedetta::jobs::sqlite::SCHEMA;

    use super::*;

    /// A queue that is a stream, and its records.
    struct World {
        nats: testing::nats::Server,
        db: Db,
        recorded: Recorded,
        stream: Arc<JetStream>,
        _folder: TempDir,
    }

    impl World {
        async fn new() -> Self {
            Self::with("", "").await
        }

        /// On a server with this configuration, for this user.
        async fn with(configuration: &str, user: &str) -> Self {
            let nats = testing::nats::Server::start_with(configuration).await;
            let url = format!("nats://{user}{}", nats.address());
            let folder = tempfile::tempdir().unwrap();
            let mut options = vedetta::db::Options::new(folder.path().join("jobs.db"));
            options.ballast = 0;
            let db = Db::open(&options, &[SCHEMA]).unwrap();
            let ledger = SqliteJobs::open(db.clone()).await.unwrap();
            let options = Options {
                queue: "media".into(),
                ..Options::new("MEDIA", "media.files", "transcode", NonZeroU32::MIN)
            };
            let opened = Recorded::open(ledger, &url, vec![options]).await;
            let (recorded, mut streams) = opened.unwrap();
            let stream = streams.remove("media").unwrap();
            Self { nats, db, recorded, stream, _folder: folder }
        }

        fn film() -> NewJob {
            NewJob::new("film").queue("media")
        }

        async fn stream(&self) -> async_nats::jetstream::stream::Stream {
            // A server without users lets everybody in.
            let options = async_nats::ConnectOptions::new();
            let options = options.user_and_password("anna".into(), "secret".into());
            let client = options.connect(self.nats.address().to_string()).await.unwrap();
            async_nats::jetstream::new(client).get_stream("MEDIA").await.unwrap()
        }

        /// How many messages are in the stream.
        async fn messages(&self) -> u64 {
            self.stream().await.cached_info().state.messages
        }
    }

    #[tokio::test]
    async fn who_asks_for_a_job_that_is_published_and_not_recorded_is_told_not_to_ask_again() {
        let world = World::new().await;
        let db = world.db.clone();
        tokio::task::spawn_blocking(move || db.close_blocking()).await.unwrap();
        for (count, told) in [(1, "as message 1,"), (2, "as message 3,")] {
            let asked = world.recorded.enqueue(&vec![World::film(); count]).await.unwrap_err();
            assert!(!asked.is_transient());
            let why = vedetta::core::explain(&asked);
            assert!(why.contains(told) && why.contains("do not ask again"), "{why}");
        }
        assert_eq!(world.messages().await, 3);
        world.stream.close().await;
    }

    #[tokio::test]
    async fn a_job_is_called_off_even_if_its_message_cannot_be_removed() {
        let user = "user: anna, password: secret";
        let deny = "permissions: { publish: { deny: [\"$JS.API.STREAM.MSG.DELETE.>\"] } }";
        let users = format!("authorization {{ users: [{{ {user}, {deny} }}] }}");
        let world = World::with(&users, "anna:secret@").await;
        let id = world.recorded.enqueue(&[World::film()]).await.unwrap()[0].id;
        assert_eq!(world.recorded.cancel(id).await.unwrap(), Change::Made);
        assert_eq!(world.messages().await, 1);
        let job = world.recorded.job(id).await.unwrap().unwrap();
        assert_eq!(job.status, JobState::Cancelled);
    }

    #[tokio::test]
    async fn a_record_ends_when_its_message_is_gone_and_nothing_is_heard_of_it() {
        let world = World::new().await;
        let asked = world.recorded.enqueue(&vec![World::film(); 3]).await.unwrap();
        let ids: Vec<JobId> = asked.iter().map(|job| job.id).collect();
        // One runs here, and the messages of two are removed.
        let lease = Duration::from_secs(300);
        let wanted = Wanted { queue: "media", worker: "anna", room: 1, capacity: 1, lease };
        let claim = testing::soon("a job comes", async {
            loop {
                if let Some(given) = world.stream.take(&wanted).await.unwrap().jobs.pop() {
                    return given.claim;
                }
            }
        })
        .await;
        let stream = world.stream().await;
        for number in [claim.id.0, 3] {
            stream.delete_message(number).await.unwrap();
        }
        let states = async || {
            let mut states = Vec::new();
            for id in &ids {
                let job = world.recorded.job(*id).await.unwrap().unwrap();
                states.push((job.status, job.error.is_some()));
            }
            states
        };
        world.recorded.prune(Duration::ZERO, Duration::ZERO).await.unwrap();
        assert!(states().await.iter().all(|(state, _)| !state.is_over()), "that was just now");
        // From the first to the last, and again.
        for _ in 0..3 {
            world.recorded.end_unheard(Duration::ZERO).await.unwrap();
            let states = states().await;
            assert!(!states[0].0.is_over() && !states[1].0.is_over(), "{states:?}");
            assert_eq!(states[2], (JobState::Cancelled, true));
        }
    }
}
