//! The processes that are killed: a worker, and the server of the embedded queue.

use std::fs::File;
use std::io::Read as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use vedetta_core::Backoff;
use vedetta_core::queue::{Kept, Settled, Woken};
use vedetta_dashboard::Api;
use vedetta_db::Db;
use vedetta_db::postgres::Postgres;
use vedetta_jobs::jetstream::{JetStream, Options};
use vedetta_jobs::postgres::PostgresJobs;
use vedetta_jobs::remote::RemoteJobs;
use vedetta_jobs::sqlite::SqliteJobs;
use vedetta_jobs::{
    BoxError, Claim, DEFAULT_QUEUE, Ear, Enqueued, Fate, Jobs, JobsError, Monitor, NewJob, Note,
    Outcome, Taken, Wanted, Work, Worker,
};

use super::log::{Answer, Ending, Log, Said, now};
use super::records::Line;
use super::{Backend, Kind, Lie, log};

/// Waits between tries of a job.
const BACKOFF: Backoff =
    Backoff { first: Duration::from_millis(20), most: Duration::from_millis(500), jitter: 0.2 };
/// What a job that snoozes asks for.
const SNOOZE: Duration = Duration::from_millis(100);
/// Messages pulled at once, at most: workers with many more slots open the next pull before the last has ended.
const PULLED: NonZeroU32 = NonZeroU32::new(256).unwrap();
/// Why a job fails whose kind is to fail.
pub(super) const PLANNED: &str = "as its kind does";

/// Work the queue and say so, until stdin ends.
#[derive(Debug, clap::Args)]
pub struct WorkerProcess {
    #[arg(long)]
    pub(super) on: Backend,
    #[arg(long)]
    pub(super) url: String,
    #[arg(long)]
    pub(super) folder: PathBuf,
    #[arg(long)]
    pub(super) number: usize,
    #[arg(long)]
    pub(super) lease: humantime::Duration,
    #[arg(long)]
    pub(super) slots: NonZeroU32,
    #[arg(long)]
    pub(super) lie: Option<Lie>,
    /// Where a stream's jobs are recorded.
    #[arg(long)]
    pub(super) records: Option<SocketAddr>,
}

/// What a handler is told.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Task {
    pub number: u64,
    pub millis: u64,
}

/// The stream, as driver and workers use it.
pub(super) fn stream_options(lease: Duration, slots: NonZeroU32) -> Options {
    // For all workers, and for what is delayed.
    let capacity = slots.saturating_mul(NonZeroU32::new(16).expect("not zero"));
    let mut options = Options::new("TORTURE", "torture.jobs", "workers", capacity);
    (options.ack_wait, options.heartbeat) = (lease, heartbeat(lease));
    options.fetch_batch = slots.min(PULLED);
    options.fetch_timeout = Duration::from_millis(500);
    options
}

/// For how long a message of a stream may have been with its worker before it is taken, so that what befell the
/// worker then may be why it is delivered again. What waits for a process that was frozen, or behind a link that was
/// silent, is read when that is over: within the longest stall that is not noted, else it is noted. Then it is given
/// back unless it is taken within a heartbeat.
pub(super) fn ahead(lease: Duration) -> Duration {
    longest_stall(lease) + heartbeat(lease)
}

fn heartbeat(lease: Duration) -> Duration {
    lease / 3
}

/// What a process may be kept from running without saying so.
fn longest_stall(lease: Duration) -> Duration {
    lease / 6
}

impl WorkerProcess {
    /// Runs it.
    pub async fn run(self) -> anyhow::Result<()> {
        let log = Log::open(&log::path(&self.folder, self.number)).context("opening the log")?;
        let log = Arc::new(log);
        let stopped = parent_gone();
        tokio::spawn(watch_the_clock(Arc::clone(&log), longest_stall(*self.lease)));
        let (mut postgres, mut stream) = (None, None);
        let jobs: Arc<dyn Jobs> = match self.on {
            Backend::Sqlite => Arc::new(RemoteJobs::new(&self.url, None)?),
            Backend::Postgres => {
                let opened = until_it_works(|| Postgres::open_with(&self.url, 6, &[])).await;
                let jobs = PostgresJobs::new(opened);
                postgres = Some(jobs.clone());
                Arc::new(jobs)
            }
            Backend::Nats => {
                let options = stream_options(*self.lease, self.slots);
                let records = self.records.context("a stream needs somebody who records")?;
                let records: Arc<dyn Monitor> = Arc::new(Line::to(records));
                let open =
                    || JetStream::open(&self.url, options.clone(), Some(Arc::clone(&records)));
                let opened = until_it_works(open).await;
                let jobs = Arc::new(opened);
                stream = Some(Arc::clone(&jobs));
                tokio::spawn(count_pulls(Arc::clone(&log), Arc::clone(&jobs)));
                jobs
            }
        };
        let jobs = Noted { jobs, log: Arc::clone(&log), lie: self.lie };
        let hand = Hand { log, folder: self.folder, lie: self.lie, postgres };
        let hand = Arc::new(hand);
        let mut worker = Worker::new(DEFAULT_QUEUE)
            .name(format!("w{}", self.number))
            .capacity(self.slots)
            .lease(*self.lease)
            .backoff(BACKOFF);
        for kind in Kind::ALL {
            let hand = Arc::clone(&hand);
            worker = worker.handler(kind.name(), move |work, task| {
                let hand = Arc::clone(&hand);
                async move { hand.work(kind, work, task).await }
            });
        }
        let working = worker.start(Arc::new(jobs))?;
        let _ = stopped.await;
        working.stop(Duration::from_secs(5)).await;
        if let Some(stream) = stream {
            stream.close().await;
        }
        Ok(())
    }
}

/// Tells when the parent closes stdin, or is gone.
fn parent_gone() -> oneshot::Receiver<()> {
    let (tell, gone) = oneshot::channel();
    std::thread::spawn(move || {
        let mut rest = Vec::new();
        let _ = std::io::stdin().lock().read_to_end(&mut rest);
        // Who does not wait for it has ended.
        let _ = tell.send(());
    });
    gone
}

/// Says when the machine did not let this process run for so long: then leases are lost, too.
async fn watch_the_clock(log: Arc<Log>, most: Duration) {
    let most = u64::try_from(most.as_micros()).unwrap_or(u64::MAX);
    loop {
        let before = now();
        sleep(Duration::from_millis(20)).await;
        if now() - before > most {
            log.stalled(before);
        }
    }
}

/// Says how many pulls of a stream were opened while another was open, as it may be killed at any time.
async fn count_pulls(log: Arc<Log>, stream: Arc<JetStream>) {
    let mut said = 0;
    loop {
        sleep(Duration::from_millis(20)).await;
        let pulls = stream.overlapping_pulls();
        if pulls > said {
            log.overlapping(pulls);
            said = pulls;
        }
    }
}

/// The server may be down when a worker starts.
async fn until_it_works<T, E: std::error::Error>(mut open: impl AsyncFnMut() -> Result<T, E>) -> T {
    loop {
        match open().await {
            Ok(opened) => return opened,
            Err(_) => sleep(Duration::from_millis(100)).await,
        }
    }
}

/// The backend, with what it answers written down.
struct Noted {
    jobs: Arc<dyn Jobs>,
    log: Arc<Log>,
    lie: Option<Lie>,
}

#[async_trait]
impl Jobs for Noted {
    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, JobsError> {
        self.jobs.enqueue(jobs).await
    }

    async fn take(&self, wanted: &Wanted<'_>) -> Result<Taken, JobsError> {
        let asked = now();
        let taken = self.jobs.take(wanted).await?;
        taken.jobs.iter().for_each(|given| self.log.say(given.claim, Said::Taken { asked }));
        Ok(taken)
    }

    async fn keep(&self, held: &[(Claim, Note)]) -> Result<Vec<Kept>, JobsError> {
        self.jobs.keep(held).await
    }

    async fn settle(&self, ended: &[(Claim, Fate)]) -> Result<Vec<Settled>, JobsError> {
        let forgets = |claim: Claim| self.lie == Some(Lie::Forget) && Lie::is_about(claim.id.0);
        let told: Vec<_> = ended.iter().filter(|(claim, _)| !forgets(*claim)).cloned().collect();
        let mut answers = self.jobs.settle(&told).await?.into_iter();
        let settled = ended.iter().map(|(claim, _)| {
            let honest = if forgets(*claim) { Some(Settled::Gone) } else { answers.next() };
            honest.expect("an answer for each")
        });
        let settled: Vec<Settled> = settled.collect();
        for ((claim, fate), settled) in ended.iter().zip(&settled) {
            // What was not begun is given back, and nobody needs to know.
            if !matches!(fate, Fate::Released) {
                self.log.say(*claim, Said::Settled((*settled).into()));
            }
        }
        Ok(settled)
    }

    async fn woken(&self, queue: &str, ear: &Ear) -> Woken {
        self.jobs.woken(queue, ear).await
    }
}

/// Does the jobs.
#[derive(Clone)]
struct Hand {
    log: Arc<Log>,
    folder: PathBuf,
    lie: Option<Lie>,
    postgres: Option<PostgresJobs>,
}

impl Hand {
    async fn work(&self, kind: Kind, work: Work, task: Task) -> Result<Outcome, BoxError> {
        let lies = |lie| self.lie == Some(lie) && Lie::is_about(task.number);
        if lies(Lie::Skip) {
            return Ok(Outcome::Done(None));
        }
        let claim = work.claim();
        if lies(Lie::Twice) {
            self.log.say(claim, Said::Begun { number: task.number });
        }
        self.log.say(claim, Said::Begun { number: task.number });
        if task.millis > 0 {
            sleep(Duration::from_millis(task.millis)).await;
        }
        let (ending, outcome) = match kind {
            Kind::FailsAlways => (Ending::Failed, Err(PLANNED.into())),
            Kind::FailsOnce if self.is_first(task.number) => (Ending::Failed, Err(PLANNED.into())),
            Kind::SnoozesOnce if self.is_first(task.number) => {
                (Ending::Snoozed, Ok(Outcome::Snooze(SNOOZE)))
            }
            Kind::Effect => match self.effect_to_its_end(claim, task.number).await {
                Ok(outcome) => (Ending::Well, Ok(outcome)),
                Err(error) => (Ending::Broken, Err(error)),
            },
            _ => (Ending::Well, Ok(Outcome::Done(None))),
        };
        self.log.say(claim, Said::Ended(ending));
        outcome
    }

    /// Once for each number, in whatever process.
    fn is_first(&self, number: u64) -> bool {
        File::create_new(self.folder.join(format!("first-{number}"))).is_ok()
    }

    /// Once it is committed the job is no longer this worker's, who may hear of that and drop us before we
    /// have written it down.
    async fn effect_to_its_end(&self, claim: Claim, number: u64) -> Result<Outcome, BoxError> {
        let hand = self.clone();
        tokio::spawn(async move { hand.effect(claim, number).await }).await?
    }

    /// Does something that must happen once, and settles in the same transaction.
    async fn effect(&self, claim: Claim, number: u64) -> Result<Outcome, BoxError> {
        let jobs = self.postgres.as_ref().ok_or("only PostgreSQL has effects")?;
        let mut client = jobs.db().client().await?;
        let tx = client.transaction().await?;
        tx.execute("INSERT INTO effect VALUES ($1)", &[&number.cast_signed()]).await?;
        if self.lie == Some(Lie::Careless) && self.is_first(number) {
            tx.commit().await?;
            return Err("after the effect".into());
        }
        let answer = if jobs.done_in(&tx, claim, None).await? {
            tx.commit().await?;
            Answer::Gone
        } else {
            tx.rollback().await?;
            Answer::Stale
        };
        self.log.say(claim, Said::Settled(answer));
        Ok(Outcome::Settled)
    }
}

/// Serve the embedded queue of a folder, until killed.
#[derive(Debug, clap::Args)]
pub struct ServerProcess {
    #[arg(long)]
    pub(super) folder: PathBuf,
    #[arg(long)]
    pub(super) port: u16,
}

/// The database of the embedded queue.
pub(super) fn open_db(folder: &std::path::Path) -> Result<Db, vedetta_db::OpenError> {
    let mut options = vedetta_db::Options::new(folder.join(crate::bed::FILE));
    options.ballast = 0;
    Db::open(&options, &[vedetta_kv::SCHEMA, vedetta_jobs::sqlite::SCHEMA])
}

impl ServerProcess {
    /// Runs it.
    pub async fn run(self) -> anyhow::Result<()> {
        let stopped = parent_gone();
        let folder = self.folder;
        let db = tokio::task::spawn_blocking(move || open_db(&folder)).await??;
        let store = vedetta_kv::Store::open(db.clone(), vedetta_kv::Options::default()).await?;
        let jobs = SqliteJobs::open(db).await?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, self.port)).await?;
        let api = Api::new(store).jobs(Arc::new(jobs));
        let stop = CancellationToken::new();
        tokio::select! {
            () = vedetta_dashboard::serve(listener, api, stop) => {}
            _ = stopped => {}
        }
        Ok(())
    }
}
