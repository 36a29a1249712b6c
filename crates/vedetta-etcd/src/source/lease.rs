//! A lease that is kept alive for as long as its value lives.

use std::fmt;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::task::AbortOnDropHandle;
use vedetta_core::{Registry as _, SourceError};
use vedetta_kv::LeaseId;

use super::Cluster;

/// It is prolonged so often in its time,
const OFTEN: u32 = 3;
/// and a node may take this part of it to answer: then the next one's turn comes.
const ONE_NODE: u32 = 5;
/// How long to wait after a failure that came at once.
const PAUSE: Duration = Duration::from_millis(200);

/// A lease in a [`Cluster`]. Keys that are put under it go when it ends.
///
/// Dropped, it is no longer kept alive, and ends when its time is over.
#[must_use = "it is kept alive only while this value lives"]
pub struct Lease {
    cluster: Cluster,
    id: LeaseId,
    ttl: Duration,
    lost: watch::Receiver<bool>,
    keeping: AbortOnDropHandle<()>,
}

impl Cluster {
    /// Begins a lease, and keeps it alive, on whichever node answers, until the value is dropped. etcd
    /// counts in seconds and may grant more than was asked for.
    pub async fn lease(&self, ttl: Duration) -> Result<Lease, SourceError> {
        let asked = Instant::now();
        let granted = self.grant(ttl).await?;
        let (Some(id), Ok(seconds @ 1..)) = (LeaseId::new(granted.id), u64::try_from(granted.ttl))
        else {
            return Err(SourceError::lost(format!("no lease was granted: {}", granted.error)));
        };
        let ttl = Duration::from_secs(seconds);
        let (over, lost) = watch::channel(false);
        let keeper = Keeper { cluster: self.clone(), id, ttl, until: asked + ttl };
        let keeping = tokio::spawn(async move {
            keeper.keep().await;
            let _ = over.send(true);
        });
        let keeping = AbortOnDropHandle::new(keeping);
        Ok(Lease { cluster: self.clone(), id, ttl, lost, keeping })
    }
}

impl Lease {
    /// Its id, for what is put under it.
    pub fn id(&self) -> LeaseId {
        self.id
    }

    /// What was granted.
    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    /// Returns when the lease is lost: the cluster no longer knows it, or its time went by without an
    /// answer. In the second case its keys may still be there for a while: the cluster counts for itself.
    pub async fn lost(&self) {
        let mut lost = self.lost.clone();
        // Fails only if the task has ended, and then it said so before or the runtime ends.
        let _ = lost.wait_for(|lost| *lost).await;
    }

    /// Whether it [is lost](Self::lost).
    pub fn is_lost(&self) -> bool {
        *self.lost.borrow()
    }

    /// Ends it: all its keys go, in one revision. If that fails they go when its time is over.
    pub async fn revoke(self) -> Result<(), SourceError> {
        let Self { cluster, id, keeping, .. } = self;
        drop(keeping);
        cluster.end(&id.get()).await
    }
}

impl From<&Lease> for LeaseId {
    fn from(lease: &Lease) -> Self {
        lease.id
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("id", &self.id)
            .field("ttl", &self.ttl)
            .field("lost", &self.is_lost())
            .finish_non_exhaustive()
    }
}

/// Prolongs one lease.
struct Keeper {
    cluster: Cluster,
    id: LeaseId,
    ttl: Duration,
    /// So long it lasts at least.
    until: Instant,
}

impl Keeper {
    /// Returns when it is lost.
    async fn keep(mut self) {
        loop {
            sleep(self.ttl / OFTEN).await;
            let until = self.until;
            let kept = tokio::select! {
                kept = self.prolong() => kept,
                () = sleep_until(until) => None,
            };
            match kept {
                Some(kept) => self.until = kept,
                None => return,
            }
        }
    }

    /// Until when it lasts now, as soon as a node says so; nothing if it is over.
    async fn prolong(&self) -> Option<Instant> {
        let limit = self.cluster.settings.patience.min(self.ttl / ONE_NODE);
        loop {
            let asked = Instant::now();
            match self.cluster.keep_alive(self.id.get(), limit).await {
                Ok(left) => return left.map(|left| asked + left),
                Err(error) => {
                    tracing::debug!(lease = %self.id, %error, "a lease waits for an answer");
                }
            }
            sleep(PAUSE.min(limit)).await;
        }
    }
}
