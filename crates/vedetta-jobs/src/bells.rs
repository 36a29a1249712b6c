use std::collections::HashMap;
use std::sync::Arc;

use futures_util::poll;
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
    /// Wakes all that wait: any of them may have room, or be whom it is about. Also the next to wait, who may
    /// have been between two calls.
    fn ring(&self, what: Woken) {
        let bell = match what {
            Woken::More => &self.more,
            Woken::Look => &self.look,
        };
        bell.notify_waiters();
        bell.notify_one();
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

    /// Until it is rung; also if that was before.
    pub(crate) async fn rung(&self, queue: &str) -> Woken {
        let bell = self.of(queue);
        let mut more = std::pin::pin!(bell.more.notified());
        tokio::select! {
            biased;
            () = bell.look.notified() => {
                // Both at once: the other is for the next call.
                if poll!(more).is_ready() {
                    bell.more.notify_one();
                }
                Woken::Look
            }
            () = &mut more => Woken::More,
        }
    }
}
