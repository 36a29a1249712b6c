use std::collections::HashMap;
use std::mem::take;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use vedetta_core::queue::Woken;

/// Wakes who works a queue: all that wait, as the first of them may have no room; or else the next.
#[derive(Debug, Default)]
pub(crate) struct Bells(Mutex<HashMap<Box<str>, Bell>>);

#[derive(Debug, Default)]
struct Bell {
    waiting: Vec<oneshot::Sender<Woken>>,
    /// Rung while nobody waited.
    more: bool,
    look: bool,
}

impl Bell {
    fn ring(&mut self, what: Woken) {
        let heard = self.waiting.drain(..).filter_map(|waiting| waiting.send(what).ok()).count();
        match what {
            Woken::More => self.more |= heard == 0,
            Woken::Look => self.look |= heard == 0,
        }
    }

    fn was_rung(&mut self) -> Option<Woken> {
        if take(&mut self.look) {
            return Some(Woken::Look);
        }
        take(&mut self.more).then_some(Woken::More)
    }
}

/// Somebody who waits. If they go away as they are told, it is for the others to hear.
struct Waiter<'a> {
    bells: &'a Bells,
    queue: &'a str,
    heard: oneshot::Receiver<Woken>,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.heard.close();
        if let Ok(what) = self.heard.try_recv() {
            self.bells.ring(self.queue, what);
        }
    }
}

impl Bells {
    pub(crate) fn ring(&self, queue: &str, what: Woken) {
        let mut bells = self.0.lock();
        match bells.get_mut(queue) {
            Some(bell) => bell.ring(what),
            None => bells.entry(queue.into()).or_default().ring(what),
        }
    }

    /// For who cannot tell what was missed.
    pub(crate) fn ring_all(&self) {
        for bell in self.0.lock().values_mut() {
            bell.ring(Woken::Look);
            bell.ring(Woken::More);
        }
    }

    /// Until it is rung; also if that was before.
    pub(crate) async fn rung(&self, queue: &str) -> Woken {
        let (tell, heard) = oneshot::channel();
        {
            let mut bells = self.0.lock();
            let bell = bells.entry(queue.into()).or_default();
            if let Some(what) = bell.was_rung() {
                return what;
            }
            bell.waiting.retain(|waiting| !waiting.is_closed());
            bell.waiting.push(tell);
        }
        let mut waiter = Waiter { bells: self, queue, heard };
        (&mut waiter.heard).await.unwrap_or(Woken::More)
    }
}
