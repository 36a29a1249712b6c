//! The calls of an HTTP/2 connection, on the connection's own task.
//!
//! ```text
//!  a task for each      store ──wakes──► call ──wakes──► connection ──► client
//!  here                 store ──wakes──► connection, which runs the calls ──► client
//! ```
//!
//! So the answers that came with one commit go out together, after one wake-up, and a call costs no task.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use hyper::rt::Executor;
use parking_lot::Mutex;

type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Where a connection leaves the calls that it begins.
#[derive(Clone, Default)]
pub(crate) struct Begun(Arc<Mutex<Vec<Call>>>);

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Begun {
    fn execute(&self, call: F) {
        self.0.lock().push(Box::pin(call));
    }
}

/// The calls of one connection.
#[derive(Default)]
pub(crate) struct Calls {
    begun: Begun,
    running: FuturesUnordered<Call>,
}

impl Calls {
    /// For the connection.
    pub(crate) fn begun(&self) -> Begun {
        self.begun.clone()
    }

    /// Until the connection ends. Dropped before, it can be done again.
    pub(crate) async fn run(&mut self, mut connection: Pin<&mut impl Future>) {
        poll_fn(|cx| {
            loop {
                while let Poll::Ready(Some(())) = self.running.poll_next_unpin(cx) {}
                // Sends what they answered.
                if connection.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(());
                }
                let mut begun = self.begun.0.lock();
                if begun.is_empty() {
                    return Poll::Pending;
                }
                self.running.extend(begun.drain(..));
            }
        })
        .await;
    }
}
