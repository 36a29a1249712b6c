use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use vedetta_core::queue::Woken;

/// Wakes who works a queue.
#[derive(Debug, Default)]
pub(crate) struct Bells(Mutex<HashMap<Box<str>, Arc<Bell>>>);

#[derive(Debug, Default)]
struct Bell {
    more: Notify,
    look: Notify,
}

impl Bell {
    fn ring(&self, what: Woken) {
        match what {
            // Who wakes takes what there is.
            Woken::More => self.more.notify_one(),
            // It may be about any of them: all that wait, or else the next.
            Woken::Look => {
                self.look.notify_waiters();
                self.look.notify_one();
            }
        }
    }
}

impl Bells {
    fn of(&self, queue: &str) -> Arc<Bell> {
        let mut bells = self.0.lock();
        if let Some(bell) = bells.get(queue) {
            return Arc::clone(bell);
        }
        Arc::clone(bells.entry(queue.into()).or_default())
    }

    pub(crate) fn ring(&self, queue: &str, what: Woken) {
        self.of(queue).ring(what);
    }

    /// For who cannot tell what was missed.
    pub(crate) fn ring_all(&self) {
        for bell in self.0.lock().values() {
            bell.ring(Woken::Look);
            bell.ring(Woken::More);
        }
    }

    /// Until it is rung; also if that was before.
    pub(crate) async fn rung(&self, queue: &str) -> Woken {
        let bell = self.of(queue);
        tokio::select! {
            biased;
            () = bell.look.notified() => Woken::Look,
            () = bell.more.notified() => Woken::More,
        }
    }
}
