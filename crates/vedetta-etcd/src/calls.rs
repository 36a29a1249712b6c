//! The calls of an HTTP/2 connection, on the connection's own task.
//!
//! ```text
//!  a task for each      store ──wakes──► call ──wakes──► connection ──► client
//!  here                 store ──wakes──► connection, which runs the calls ──► client
//! ```
//!
//! So the answers that came with one commit go out together, after one wake-up, and a call costs no task. When it is
//! the only one of its connection, its write needs no wake-up either: the task does it itself.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use futures_util::task::AtomicWaker;
use hyper::rt::Executor;
use parking_lot::Mutex;
use vedetta_kv::Store;

type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Where a connection leaves the calls that it begins.
#[derive(Clone, Default)]
pub(crate) struct Begun(Arc<Mutex<Vec<Call>>>);

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Begun {
    fn execute(&self, call: F) {
        self.0.lock().push(Box::pin(call));
    }
}

/// Wakes the task of a connection and its calls, unless that is just looking at them: a call that is answered there wakes
/// its connection, too.
#[derive(Default)]
struct Bell {
    task: AtomicWaker,
    standing: AtomicU8,
}

/// The task sleeps.
const ASLEEP: u8 = 0;
/// It looks at them.
const AWAKE: u8 = 1;
/// It has to look once more.
const RUNG: u8 = 2;

impl Bell {
    fn begin(&self, task: &Waker) {
        self.task.register(task);
        self.standing.store(AWAKE, Ordering::Release);
    }

    /// Whether the task may sleep: nothing has woken it meanwhile.
    fn is_over(&self) -> bool {
        let over =
            self.standing.compare_exchange(AWAKE, ASLEEP, Ordering::AcqRel, Ordering::Acquire);
        if over.is_err() {
            self.standing.store(AWAKE, Ordering::Release);
        }
        over.is_ok()
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.standing.swap(RUNG, Ordering::AcqRel) == ASLEEP {
            self.task.wake();
        }
    }
}

/// The calls of one connection.
#[derive(Default)]
pub(crate) struct Calls {
    begun: Begun,
    running: FuturesUnordered<Call>,
    bell: Arc<Bell>,
}

impl Calls {
    /// For the connection.
    pub(crate) fn begun(&self) -> Begun {
        self.begun.clone()
    }

    /// Until the connection ends. Dropped before, it can be done again.
    pub(crate) async fn run(&mut self, store: &Store, mut connection: Pin<&mut impl Future>) {
        let woken = Waker::from(Arc::clone(&self.bell));
        poll_fn(|cx| {
            let round = store.round();
            self.bell.begin(cx.waker());
            loop {
                let mut here = Context::from_waker(&woken);
                while let Poll::Ready(Some(())) = self.running.poll_next_unpin(&mut here) {}
                // Sends what they answered.
                if connection.as_mut().poll(&mut here).is_ready() {
                    return Poll::Ready(());
                }
                let begun = std::mem::take(&mut *self.begun.0.lock());
                if !begun.is_empty() {
                    self.running.extend(begun);
                    continue;
                }
                if self.running.len() == 1 && round.help() {
                    continue;
                }
                if self.bell.is_over() {
                    return Poll::Pending;
                }
                // They then wake it again and again without getting on, until others had their turn.
                if !tokio::task::coop::has_budget_remaining() {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
            }
        })
        .await;
    }
}
