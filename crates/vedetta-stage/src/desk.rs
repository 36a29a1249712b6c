//! Between the system stage and the other stages of one process: what is wanted at once by a stage that has
//! room goes there directly, already held and read, instead of waiting in its queue to be claimed.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::record::Claim;

/// Where a stage takes what was handed to it.
pub(crate) struct Desk<E> {
    state: Mutex<State<E>>,
    bell: Notify,
}

struct State<E> {
    /// For so many more there is room, as far as is known.
    room: u32,
    is_closed: bool,
    handed: VecDeque<Handing<E>>,
}

/// An entity for a stage, whose record is held.
pub(crate) struct Handing<E> {
    pub(crate) claim: Claim,
    pub(crate) entity: E,
    /// Not before then.
    pub(crate) since: Instant,
}

impl<E> Default for Desk<E> {
    fn default() -> Self {
        let state = State { room: 0, is_closed: false, handed: VecDeque::new() };
        Self { state: Mutex::new(state), bell: Notify::new() }
    }
}

impl<E> Desk<E> {
    /// Nothing is due in its queue, and there is room for so many.
    pub(crate) fn has_room(&self, room: u32) {
        self.state.lock().room = room;
    }

    /// Makes room for one, if there is some.
    pub(crate) fn reserve(&self) -> bool {
        let mut state = self.state.lock();
        let room = if state.is_closed { None } else { state.room.checked_sub(1) };
        room.inspect(|left| state.room = *left).is_some()
    }

    /// Hands one over, unless nobody takes any more.
    pub(crate) fn hand(&self, handing: Handing<E>) -> Result<(), Claim> {
        let mut state = self.state.lock();
        if state.is_closed {
            return Err(handing.claim);
        }
        state.handed.push_back(handing);
        self.bell.notify_one();
        Ok(())
    }

    /// What was handed over; those within `fresh` to work on, up to `room`, and the others to be given back.
    pub(crate) fn take(&self, room: u32, fresh: Duration) -> (Vec<Handing<E>>, Vec<Claim>) {
        let mut state = self.state.lock();
        let count = state.handed.len().min(room as usize);
        let taken = state.handed.drain(..count);
        let (good, old): (Vec<_>, Vec<_>) =
            taken.partition(|handing| handing.since.elapsed() <= fresh);
        (good, old.into_iter().map(|handing| handing.claim).collect())
    }

    /// Whether something was handed over and is still there.
    pub(crate) fn has_more(&self) -> bool {
        !self.state.lock().handed.is_empty()
    }

    /// Nothing more is taken: what is left.
    pub(crate) fn close(&self) -> Vec<Claim> {
        let mut state = self.state.lock();
        state.is_closed = true;
        state.handed.drain(..).map(|handing| handing.claim).collect()
    }

    /// Until something is handed over; also if that was before.
    pub(crate) async fn handed(&self) {
        self.bell.notified().await;
    }
}
