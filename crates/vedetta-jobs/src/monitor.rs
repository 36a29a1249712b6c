//! Somebody who is told what becomes of jobs, where what keeps them keeps no ledger.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use tokio::sync::mpsc;

use crate::job::Job;

/// Steps that wait to be told. Each is a whole job with its payload, so there are not many of them.
const STEPS: usize = 1024;
/// Steps that are told at once.
const TOGETHER: usize = 256;

/// Is told of each step in the life of a job: asked for, begun, how far it is, and how it ended.
#[async_trait]
pub trait Monitor: Send + Sync + 'static {
    /// Jobs, as each is after a step; of one job in the order in which it happened. One call at a time.
    /// Work never waits for it: when 1024 steps are still to be told, further ones are left out and counted.
    /// A later step of the same job tells all that the lost one did.
    async fn tell(&self, jobs: &[Job]);
}

/// Tells a monitor, without ever waiting for it.
#[derive(Debug)]
pub(crate) struct Telling {
    steps: mpsc::Sender<Job>,
    left_out: AtomicU64,
}

impl Telling {
    /// The task that tells it ends with this value.
    pub(crate) fn to(monitor: Arc<dyn Monitor>) -> Self {
        let (steps, mut inbox) = mpsc::channel(STEPS);
        tokio::spawn(async move {
            let mut jobs = Vec::with_capacity(TOGETHER);
            while inbox.recv_many(&mut jobs, TOGETHER).await > 0 {
                monitor.tell(&jobs).await;
                jobs.clear();
            }
        });
        Self { steps, left_out: AtomicU64::new(0) }
    }

    pub(crate) fn tell(&self, job: Job) {
        if self.steps.try_send(job).is_err() && self.left_out.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!("the monitor of a stream does not keep up: steps of jobs are left out");
        }
    }

    pub(crate) fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }
}
