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
use hashbrown::HashSet;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout_at};
use vedetta_core::{Backoff, JobState, explain};

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
    /// That a job was asked for is durable when this returns, and so is an end. An end stands: what is told of
    /// the job later changes nothing. Whether each is so as it was told; not if the job had ended before, in
    /// another attempt. Told again after an error it does no harm.
    async fn tell(&self, jobs: &[Job]) -> Result<Vec<bool>, JobsError>;

    /// Which jobs of a connection have ended, as it was told, and how: each by its id and when it was asked for,
    /// as ids may be given again.
    async fn ended(
        &self,
        connection: &str,
        jobs: &[(JobId, SystemTime)],
    ) -> Result<Vec<Option<Ended>>, JobsError>;
}

/// How a job ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Done, dead or cancelled.
    #[serde(with = "crate::job::status")]
    pub status: JobState,
    /// Why it is dead.
    pub error: Option<String>,
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
    ) -> Result<Vec<Option<Ended>>, JobsError> {
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
    // Steps that are to be told again, when, and how often that was tried.
    let mut steps: Vec<Job> = Vec::new();
    let (mut again_at, mut failures): (Option<Instant>, u32) = (None, 0);
    loop {
        let more = inbox.recv_many(&mut said, TOGETHER);
        let more = match again_at {
            Some(at) => timeout_at(at, more).await.ok(),
            None => Some(more.await),
        };
        if more == Some(0) {
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
        if failures > 0 {
            leave_out(&left_out, keep_last(&mut steps));
        }
        if asked.is_empty() && again_at.is_some_and(|at| Instant::now() < at) {
            continue;
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
                (again_at, failures) = (None, 0);
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
                again_at = Some(Instant::now() + AGAIN.delay(failures, fastrand::f64()));
                failures = failures.saturating_add(1);
                for answer in answers {
                    let _ = answer.send(Err(JobsError::Unavailable(why.clone().into())));
                }
                all.truncate(step_count);
                steps = all;
            }
        }
    }
}

/// Of steps that have to wait only the last of each job is kept, as it tells all that those before it did; and of the last
/// [`STEPS`] jobs. How many others there were.
fn keep_last(steps: &mut Vec<Job>) -> u64 {
    let mut seen = HashSet::new();
    let last = steps.drain(..).rev().filter(|job| seen.insert((job.id, job.queued_at)));
    let mut last: Vec<Job> = last.collect();
    let others = last.len().saturating_sub(STEPS);
    last.truncate(STEPS);
    last.reverse();
    *steps = last;
    others as u64
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use parking_lot::Mutex;
    use serde_json::value::RawValue;

    use super::*;

    /// How many jobs each call told of, and how far the last of them was.
    #[derive(Default)]
    struct Broken {
        calls: Mutex<Vec<(usize, f32)>>,
        is_mended: AtomicBool,
    }

    #[async_trait]
    impl Monitor for Broken {
        async fn tell(&self, jobs: &[Job]) -> Result<Vec<bool>, JobsError> {
            self.calls.lock().push((jobs.len(), jobs.last().map_or(0.0, |job| job.progress)));
            if self.is_mended.load(Ordering::Relaxed) {
                return Ok(vec![true; jobs.len()]);
            }
            Err(JobsError::Unavailable("no disk".into()))
        }

        async fn ended(
            &self,
            _: &str,
            jobs: &[(JobId, SystemTime)],
        ) -> Result<Vec<Option<Ended>>, JobsError> {
            Ok(vec![None; jobs.len()])
        }
    }

    fn step(progress: f32) -> Job {
        let at = SystemTime::UNIX_EPOCH;
        Job {
            id: JobId(7),
            kind: "film".into(),
            queue: "media".into(),
            connection: "nats MEDIA/transcode".into(),
            status: JobState::Running,
            payload: RawValue::NULL.to_owned(),
            cost: 1,
            priority: 0,
            attempts: 1,
            max_attempts: 5,
            timeout: None,
            unique_key: None,
            tags: Vec::new(),
            trace: None,
            progress,
            message: None,
            log: String::new(),
            result: None,
            error: None,
            worker: None,
            queued_at: at,
            run_at: at,
            started_at: Some(at),
            ended_at: None,
            updated_at: at,
        }
    }

    #[tokio::test]
    async fn while_nothing_can_be_told_the_last_step_of_each_job_is_kept_and_told_now_and_then() {
        let broken = Arc::new(Broken::default());
        let telling = Telling::to(Arc::clone(&broken) as _);
        let began = Instant::now();
        for n in 1..=300_u16 {
            telling.tell(step(f32::from(n)));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // The waits are 50 ms and twice as long each time, less a fifth at most.
        let most = 2 + began.elapsed().as_millis() / 40;
        let calls = broken.calls.lock().clone();
        assert!((calls.len() as u128) < most.min(100), "{calls:?}");
        broken.is_mended.store(true, Ordering::Relaxed);
        telling.told(Vec::new()).await.unwrap();
        assert_eq!(broken.calls.lock().last(), Some(&(1, 300.0)));
        assert_eq!(telling.left_out(), 0);
    }
}
