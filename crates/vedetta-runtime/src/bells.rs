//! Wakes those who work a queue: each of them, and not the first who listens.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::watch;
use vedetta_core::queue::Woken;

/// How much somebody who works a queue has heard of its wake-ups: nothing at first.
#[derive(Debug, Default)]
pub struct Ear {
    more: AtomicU64,
    look: AtomicU64,
}

impl Ear {
    /// What it has not heard yet, and now has.
    fn hear(&self, rung: Rung) -> Option<Woken> {
        if self.look.swap(rung.look, Ordering::Relaxed) != rung.look {
            return Some(Woken::Look);
        }
        (self.more.swap(rung.more, Ordering::Relaxed) != rung.more).then_some(Woken::More)
    }
}

/// How often it was rung.
#[derive(Debug, Clone, Copy, Default)]
struct Rung {
    more: u64,
    look: u64,
}

/// Wakes all who work a queue, each of them, also those who do not listen just now: the first of them may
/// have no room, and who runs a job that was called off is not known here.
#[derive(Debug, Default)]
pub struct Bell(watch::Sender<Rung>);

impl Bell {
    /// Rings it.
    pub fn ring(&self, what: Woken) {
        self.0.send_modify(|rung| match what {
            Woken::More => rung.more += 1,
            Woken::Look => rung.look += 1,
        });
    }

    /// Until it is rung; also if that was before, and this ear has not heard it. A dropped future has heard
    /// nothing.
    pub fn rung<'e>(&self, ear: &'e Ear) -> impl Future<Output = Woken> + Send + use<'e> {
        let mut rings = self.0.subscribe();
        async move {
            loop {
                let rung = *rings.borrow_and_update();
                if let Some(what) = ear.hear(rung) {
                    return what;
                }
                if rings.changed().await.is_err() {
                    std::future::pending::<()>().await; // nobody will ring it
                }
            }
        }
    }
}

/// One for each queue.
#[derive(Debug)]
pub struct Bells<K>(Mutex<HashMap<K, Bell>>);

impl<K> Default for Bells<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash> Bells<K> {
    /// Rings that of one queue.
    pub fn ring<Q>(&self, queue: &Q, what: Woken)
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ToOwned<Owned = K> + ?Sized,
    {
        let mut bells = self.0.lock();
        match bells.get(queue) {
            Some(bell) => bell.ring(what),
            None => bells.entry(queue.to_owned()).or_default().ring(what),
        }
    }

    /// For who cannot tell what was missed.
    pub fn ring_all(&self) {
        for bell in self.0.lock().values() {
            bell.ring(Woken::Look);
            bell.ring(Woken::More);
        }
    }

    /// See [`Bell::rung`].
    pub async fn rung<Q>(&self, queue: &Q, ear: &Ear) -> Woken
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ToOwned<Owned = K> + ?Sized,
    {
        let rung = self.0.lock().entry(queue.to_owned()).or_default().rung(ear);
        rung.await
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn everybody_hears_every_wake_up_also_those_who_did_not_listen() {
        let (bells, anna, ben) = (Bells::<String>::default(), Ear::default(), Ear::default());
        let heard = |ear| bells.rung("films", ear).now_or_never();
        assert_eq!((heard(&anna), heard(&ben)), (None, None));

        // Anna listens while it rings, Ben between two of his waits.
        let listens = bells.rung("films", &anna);
        bells.ring("films", Woken::Look);
        bells.ring("films", Woken::More);
        bells.ring("other", Woken::More);
        assert_eq!(listens.await, Woken::Look);
        assert_eq!(heard(&anna), Some(Woken::More));
        assert_eq!((heard(&ben), heard(&ben)), (Some(Woken::Look), Some(Woken::More)));
        assert_eq!((heard(&anna), heard(&ben)), (None, None));

        // Who goes away has heard nothing.
        let mut leaves = Box::pin(bells.rung("films", &anna));
        assert_eq!(futures_util::poll!(leaves.as_mut()), std::task::Poll::Pending);
        bells.ring("films", Woken::Look);
        drop(leaves);
        assert_eq!(heard(&anna), Some(Woken::Look));

        bells.ring_all();
        assert_eq!((heard(&ben), heard(&ben)), (Some(Woken::Look), Some(Woken::More)));
    }
}
