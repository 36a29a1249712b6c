//! What is measured: ours and the others, each behind the same few calls.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::hash::Hash;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::Stream;
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use kube::runtime::scheduler::{ScheduleRequest, Scheduler, scheduler};
use tokio::runtime::Runtime;
use tokio::time::Instant;
use tokio_util::time::DelayQueue;
use tokio_util::time::delay_queue;
use vedetta_core::{Keyed, Moment, Schedule, Slot};

/// Something to schedule.
pub(crate) trait Key: Clone + Eq + Hash + Unpin {
    fn new(index: u32) -> Self;
    fn index(&self) -> u32;
}

impl Key for Slot {
    fn new(index: u32) -> Self {
        Self(index)
    }

    fn index(&self) -> u32 {
        self.0
    }
}

impl Key for u64 {
    fn new(index: u32) -> Self {
        index.into()
    }

    fn index(&self) -> u32 {
        u32::try_from(*self).expect("it was made of one")
    }
}

/// 36 characters.
impl Key for Arc<str> {
    fn new(index: u32) -> Self {
        format!("tenants/a-tenant/rooms/{index:013}").into()
    }

    fn index(&self) -> u32 {
        self[23..].parse().expect("it ends in one")
    }
}

/// Times are milliseconds since it was made.
pub(crate) trait Contestant<K> {
    fn offer(&mut self, key: &K, at: u64);

    /// All that was offered is in, when nothing is due.
    fn settle(&mut self) {}

    fn set_clock(&mut self, now: u64);

    fn take(&mut self) -> Option<K>;

    fn finish(&mut self, _key: &K) {}

    /// Nothing may be taken now; what is due has to wait.
    fn hold_back(&mut self) {}
}

/// Ours, with the numbers that a cache has given to its keys.
#[derive(Default)]
pub(crate) struct Interned {
    schedule: Schedule,
    now: Moment,
}

impl Contestant<Slot> for Interned {
    fn offer(&mut self, key: &Slot, at: u64) {
        self.schedule.offer(*key, Moment::from_millis(at));
    }

    fn set_clock(&mut self, now: u64) {
        self.now = Moment::from_millis(now);
    }

    fn take(&mut self) -> Option<Slot> {
        self.schedule.take(self.now)
    }

    fn finish(&mut self, key: &Slot) {
        self.schedule.finish(*key);
    }
}

/// Ours, with the keys themselves.
pub(crate) struct ByKey<K> {
    schedule: Keyed<K>,
    now: Moment,
}

impl<K: Key> Default for ByKey<K> {
    fn default() -> Self {
        Self { schedule: Keyed::new(), now: Moment::ZERO }
    }
}

impl<K: Key> Contestant<K> for ByKey<K> {
    fn offer(&mut self, key: &K, at: u64) {
        self.schedule.offer(key.clone(), Moment::from_millis(at));
    }

    fn set_clock(&mut self, now: u64) {
        self.now = Moment::from_millis(now);
    }

    fn take(&mut self) -> Option<K> {
        self.schedule.take(self.now)
    }

    fn finish(&mut self, key: &K) {
        self.schedule.finish(key);
    }
}

/// tokio's clock, which stands still until it is set.
struct Clock<'a> {
    runtime: &'a Runtime,
    began: Instant,
}

impl<'a> Clock<'a> {
    fn new(runtime: &'a Runtime) -> Self {
        Self { runtime, began: Instant::now() }
    }

    fn at(&self, millis: u64) -> Instant {
        self.began + Duration::from_millis(millis)
    }

    fn set(&self, now: u64) {
        self.runtime.block_on(tokio::time::advance(self.at(now) - Instant::now()));
    }
}

/// kube-rs's, fed with as many requests at once as suit it.
pub(crate) struct Kube<'a, K> {
    requests: Requests<K>,
    scheduler: Pin<Box<Scheduler<K, Requests<K>>>>,
    /// What came when it was only to accept requests.
    taken: VecDeque<K>,
    clock: Clock<'a>,
}

struct Requests<K>(Rc<RefCell<VecDeque<ScheduleRequest<K>>>>);

/// How many requests a stream of changes has ready.
const BURST: usize = 256;

impl<K> Stream for Requests<K> {
    type Item = ScheduleRequest<K>;

    fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.borrow_mut().pop_front().map_or(Poll::Pending, |request| Poll::Ready(Some(request)))
    }
}

impl<'a, K: Key> Kube<'a, K> {
    pub(crate) fn new(runtime: &'a Runtime) -> Self {
        let requests = Rc::new(RefCell::new(VecDeque::with_capacity(BURST)));
        let scheduler = Box::pin(scheduler(Requests(Rc::clone(&requests))));
        let requests = Requests(requests);
        Self { requests, scheduler, taken: VecDeque::new(), clock: Clock::new(runtime) }
    }

    fn poll(&mut self) -> Option<K> {
        match self.scheduler.as_mut().poll_next(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(key) => key,
            Poll::Pending => None,
        }
    }
}

impl<K: Key> Contestant<K> for Kube<'_, K> {
    fn offer(&mut self, key: &K, at: u64) {
        let request = ScheduleRequest { message: key.clone(), run_at: self.clock.at(at) };
        let mut requests = self.requests.0.borrow_mut();
        requests.push_back(request);
        if requests.len() == BURST {
            drop(requests);
            self.settle();
        }
    }

    fn settle(&mut self) {
        let key = self.poll();
        self.taken.extend(key);
    }

    fn set_clock(&mut self, now: u64) {
        self.clock.set(now);
    }

    fn take(&mut self) -> Option<K> {
        self.taken.pop_front().or_else(|| self.poll())
    }

    fn hold_back(&mut self) {
        let mut held = self.scheduler.as_mut().hold();
        let polled = Pin::new(&mut held).poll_next(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending(), "it holds all back");
    }
}

/// The timer wheel that kube-rs uses too, with a map and without a stream.
pub(crate) struct Delays<'a, K> {
    queue: DelayQueue<K>,
    waiting: HashMap<K, (u64, delay_queue::Key)>,
    clock: Clock<'a>,
}

impl<'a, K: Key> Delays<'a, K> {
    pub(crate) fn new(runtime: &'a Runtime) -> Self {
        let (queue, waiting) = (DelayQueue::new(), HashMap::new());
        Self { queue, waiting, clock: Clock::new(runtime) }
    }
}

impl<K: Key> Contestant<K> for Delays<'_, K> {
    fn offer(&mut self, key: &K, at: u64) {
        let when = self.clock.at(at);
        match self.waiting.entry(key.clone()) {
            Entry::Vacant(entry) => {
                entry.insert((at, self.queue.insert_at(key.clone(), when)));
            }
            Entry::Occupied(mut entry) => {
                let (due, place) = entry.get_mut();
                if at < *due {
                    *due = at;
                    self.queue.reset_at(place, when);
                }
            }
        }
    }

    fn set_clock(&mut self, now: u64) {
        self.clock.set(now);
    }

    fn take(&mut self) -> Option<K> {
        match self.queue.poll_expired(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(expired) => {
                let key = expired?.into_inner();
                self.waiting.remove(&key);
                Some(key)
            }
            Poll::Pending => None,
        }
    }
}
