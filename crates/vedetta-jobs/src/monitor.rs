//! Somebody who is told what becomes of jobs, where what keeps them keeps no ledger.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot};

use crate::job::Job;

/// Steps that wait to be told. Each is a whole job with its payload, so there are not many of them.
const STEPS: usize = 1024;
/// Steps that are told at once.
const TOGETHER: usize = 256;

#[derive(Debug)]
enum Said {
    Step(Box<Job>),
    /// All before is to be told.
    Flush(oneshot::Sender<()>),
}

/// Is told of each step in the life of a job: asked for, begun, how far it is, and how it ended.
#[async_trait]
pub trait Monitor: Send + Sync + 'static {
    /// Jobs, as each is after a step; of one job in the order in which it happened. One call at a time.
    /// When 1024 steps are still to be told, further ones are left out and counted, and a later step of the
    /// same job tells all that they did; but for ends, which wait until they can be told.
    async fn tell(&self, jobs: &[Job]);
}

/// Tells a monitor, and waits for it with ends only.
#[derive(Debug)]
pub(crate) struct Telling {
    steps: mpsc::Sender<Said>,
    left_out: AtomicU64,
}

impl Telling {
    /// The task that tells it ends with this value.
    pub(crate) fn to(monitor: Arc<dyn Monitor>) -> Self {
        let (steps, mut inbox) = mpsc::channel(STEPS);
        tokio::spawn(async move {
            let mut said = Vec::with_capacity(TOGETHER);
            while inbox.recv_many(&mut said, TOGETHER).await > 0 {
                let (mut jobs, mut waiting) = (Vec::with_capacity(said.len()), Vec::new());
                for said in said.drain(..) {
                    match said {
                        Said::Step(job) => jobs.push(*job),
                        Said::Flush(answer) => waiting.push(answer),
                    }
                }
                if !jobs.is_empty() {
                    monitor.tell(&jobs).await;
                }
                for answer in waiting {
                    let _ = answer.send(());
                }
            }
        });
        Self { steps, left_out: AtomicU64::new(0) }
    }

    pub(crate) fn tell(&self, job: Job) {
        let step = Said::Step(Box::new(job));
        if self.steps.try_send(step).is_err() && self.left_out.fetch_add(1, Ordering::Relaxed) == 0
        {
            tracing::warn!("the monitor of a stream does not keep up: steps of jobs are left out");
        }
    }

    /// Tells of an end, when there is room for it.
    pub(crate) async fn tell_end(&self, job: Job) {
        // At the end nobody listens any more.
        let _ = self.steps.send(Said::Step(Box::new(job))).await;
    }

    /// Returns when all is told that was said before.
    pub(crate) async fn told(&self) {
        let (answer, told) = oneshot::channel();
        if self.steps.send(Said::Flush(answer)).await.is_ok() {
            let _ = told.await;
        }
    }

    pub(crate) fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }
}
