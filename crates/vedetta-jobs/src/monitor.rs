//! Somebody who is told what becomes of jobs, where what keeps them keeps no ledger.
//!
//! ```text
//!  steps ──► a bounded queue ──► one call at a time ──► Monitor
//!  ends  ──►      ▲      │ what could not be told is told again; whoever ends a job is told that it failed
//! ```
//!
//! That a job ended is told before it is gone from what keeps it. So whatever happens in between, it is
//! delivered again, its record is found to have ended, and it is not done again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use vedetta_core::{Backoff, explain};

use crate::job::{Job, JobId, JobsError};

/// Steps that wait to be told. Each is a whole job with its payload, so there are not many of them.
const STEPS: usize = 1024;
/// What is told at once.
const TOGETHER: usize = 256;
/// What could not be told is told again after so long.
const AGAIN: Backoff =
    Backoff { first: Duration::from_millis(50), most: Duration::from_secs(5), jitter: 0.2 };

#[derive(Debug)]
enum Said {
    Step(Box<Job>),
    /// Somebody waits until these are told.
    Asked(Vec<Job>, oneshot::Sender<Result<Vec<bool>, JobsError>>),
}

/// Is told of each step in the life of a job: asked for, begun, how far it is, and how it ended.
#[async_trait]
pub trait Monitor: Send + Sync + 'static {
    /// Jobs, as each is after a step; of one job in the order in which it happened. One call at a time. When
    /// 1024 steps are still to be told, further ones are left out and counted, and a later step of the same
    /// job tells all that they did; but for ends, which are waited for.
    ///
    /// An end is durable when this returns, and stands: what is told of the job later changes nothing. Whether
    /// each is so as it was told; not if the job had ended before, in another attempt. Told again after an
    /// error it does no harm.
    async fn tell(&self, jobs: &[Job]) -> Result<Vec<bool>, JobsError>;

    /// Which jobs of a connection have ended, as it was told: each by its id and when it was asked for, as
    /// ids may be given again.
    async fn ended(
        &self,
        connection: &str,
        jobs: &[(JobId, SystemTime)],
    ) -> Result<Vec<bool>, JobsError>;
}

/// Tells a monitor, and waits for it with ends only.
pub(crate) struct Telling {
    monitor: Arc<dyn Monitor>,
    steps: mpsc::Sender<Said>,
    left_out: Arc<AtomicU64>,
}

impl std::fmt::Debug for Telling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Telling").field("left_out", &self.left_out).finish_non_exhaustive()
    }
}

impl Telling {
    /// The task that tells it ends with this value.
    pub(crate) fn to(monitor: Arc<dyn Monitor>) -> Self {
        let (steps, inbox) = mpsc::channel(STEPS);
        let left_out = Arc::<AtomicU64>::default();
        tokio::spawn(run(Arc::clone(&monitor), inbox, Arc::clone(&left_out)));
        Self { monitor, steps, left_out }
    }

    pub(crate) fn tell(&self, job: Job) {
        if self.steps.try_send(Said::Step(Box::new(job))).is_err() {
            leave_out(&self.left_out, 1);
        }
    }

    /// Returns when these are told, and all that was said before: whether each is so, as for
    /// [`Monitor::tell`].
    pub(crate) async fn told(&self, jobs: Vec<Job>) -> Result<Vec<bool>, JobsError> {
        let gone = || JobsError::Unavailable("the monitor is gone".into());
        let (answer, told) = oneshot::channel();
        self.steps.send(Said::Asked(jobs, answer)).await.map_err(|_| gone())?;
        told.await.map_err(|_| gone())?
    }

    pub(crate) async fn ended(
        &self,
        connection: &str,
        jobs: &[(JobId, SystemTime)],
    ) -> Result<Vec<bool>, JobsError> {
        self.monitor.ended(connection, jobs).await
    }

    pub(crate) fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }
}

fn leave_out(count: &AtomicU64, more: u64) {
    if more > 0 && count.fetch_add(more, Ordering::Relaxed) == 0 {
        tracing::warn!("the monitor of a stream does not keep up: steps of jobs are left out");
    }
}

async fn run(monitor: Arc<dyn Monitor>, mut inbox: mpsc::Receiver<Said>, left_out: Arc<AtomicU64>) {
    let mut said = Vec::with_capacity(TOGETHER);
    // Steps that are to be told again, and how often that was tried.
    let (mut steps, mut failures): (Vec<Job>, u32) = (Vec::new(), 0);
    loop {
        let wait =
            if failures == 0 { Duration::MAX } else { AGAIN.delay(failures - 1, fastrand::f64()) };
        if let Ok(0) = timeout(wait, inbox.recv_many(&mut said, TOGETHER)).await {
            return;
        }
        let mut asked = Vec::new();
        for said in said.drain(..) {
            match said {
                Said::Step(job) => steps.push(*job),
                // Ends stand, so all other steps can go before them.
                Said::Asked(jobs, answer) => asked.push((jobs, answer)),
            }
        }
        let mut all = std::mem::take(&mut steps);
        let step_count = all.len();
        let counts: Vec<usize> = asked.iter().map(|(jobs, _)| jobs.len()).collect();
        let answers = asked.into_iter().map(|(jobs, answer)| {
            all.extend(jobs);
            answer
        });
        let answers: Vec<_> = answers.collect();
        match tell(&*monitor, &all).await {
            Ok(told) => {
                failures = 0;
                let mut told = told.into_iter().skip(step_count);
                for (answer, count) in answers.into_iter().zip(counts) {
                    // Who does not wait for it any more does not mind.
                    let _ = answer.send(Ok(told.by_ref().take(count).collect()));
                }
            }
            Err(error) => {
                let why = explain(&error);
                if failures == 0 {
                    tracing::warn!(error = why, "what becomes of jobs is not recorded yet");
                }
                failures = failures.saturating_add(1);
                for answer in answers {
                    let _ = answer.send(Err(JobsError::Unavailable(why.clone().into())));
                }
                all.truncate(step_count);
                let most = all.len().saturating_sub(STEPS);
                leave_out(&left_out, most as u64);
                all.drain(..most);
                steps = all;
            }
        }
    }
}

/// Tells all of it. One that can never be told must not hold up the others, nor its own job for ever.
async fn tell(monitor: &dyn Monitor, jobs: &[Job]) -> Result<Vec<bool>, JobsError> {
    if jobs.is_empty() {
        return Ok(Vec::new());
    }
    match monitor.tell(jobs).await {
        Err(error) if !error.is_transient() => {}
        told => return told,
    }
    let mut told = Vec::with_capacity(jobs.len());
    for job in jobs {
        match monitor.tell(std::slice::from_ref(job)).await {
            Ok(one) => told.extend(one),
            Err(error) if error.is_transient() => return Err(error),
            Err(error) => {
                let (id, error) = (job.id.0, explain(&error));
                tracing::error!(job = id, error, "a step of a job cannot be recorded");
                told.push(true);
            }
        }
    }
    Ok(told)
}
