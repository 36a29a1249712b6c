//! Somebody who is told what becomes of jobs, as a stream keeps no ledger of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::mpsc;

use crate::job::Job;

/// Steps that wait to be told. Each is a whole job with its payload, so there are not many of them.
const STEPS: usize = 1024;

/// Is told of each step in the life of a job: asked for, begun, how far it is, and how it ended.
pub trait Monitor: Send + Sync + 'static {
    /// The job as it is after the step. One call at a time, in the order in which it happened; it must not
    /// block its thread for long. It is never waited for: when 1024 steps are still to be told, further
    /// ones are left out and counted. A later step of the same job tells all that the lost one did.
    fn tell(&self, job: &Job);
}

/// Tells a monitor, without ever waiting for it.
#[derive(Debug)]
pub(super) struct Telling {
    steps: mpsc::Sender<Job>,
    left_out: AtomicU64,
}

impl Telling {
    /// The task that tells it ends with this value.
    pub(super) fn to(monitor: Arc<dyn Monitor>) -> Self {
        let (steps, mut inbox) = mpsc::channel(STEPS);
        tokio::spawn(async move {
            while let Some(job) = inbox.recv().await {
                monitor.tell(&job);
            }
        });
        Self { steps, left_out: AtomicU64::new(0) }
    }

    pub(super) fn tell(&self, job: Job) {
        if self.steps.try_send(job).is_err() && self.left_out.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!("the monitor of a stream does not keep up: steps of jobs are left out");
        }
    }

    pub(super) fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }
}
