//! The slots of a machine, shared by runs and by the parts that runs are made of.
//!
//! A run that takes slots takes them before it begins and gives them back at its end. A run that is made of
//! parts takes none itself, and each part asks for its own with [`Room::hold`], in the same line as all
//! others: see [`Slots`] for who goes first.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use vedetta_core::slots::{Held, Ticket};
use vedetta_core::{Slot, Slots};

/// Slots, what holds them and what waits for them.
pub struct Room {
    state: Mutex<State>,
    /// A run may begin.
    bell: Notify,
}

struct State {
    slots: Slots<Waiter>,
    /// Runs whose turn came when a part made room.
    ready: VecDeque<(Held, Slot)>,
}

enum Waiter {
    Run(Slot),
    Part(oneshot::Sender<Hold>),
}

/// Slots that a part holds, until this is dropped.
#[must_use = "slots that are not held are given back"]
pub struct Hold {
    held: Option<Held>,
    room: Arc<Room>,
}

impl Hold {
    /// How many: what was asked for, but no more than there are.
    pub fn slots(&self) -> u32 {
        self.held.as_ref().map_or(0, Held::slots)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            self.room.release(held);
            self.room.tell();
        }
    }
}

/// Leaves the line when dropped.
struct Waiting<'r> {
    room: &'r Arc<Room>,
    ticket: Ticket,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.room.cancel(self.ticket);
    }
}

impl Room {
    /// With all slots free.
    pub fn new(capacity: NonZeroU32) -> Arc<Self> {
        let state = State { slots: Slots::new(capacity), ready: VecDeque::new() };
        Arc::new(Self { state: Mutex::new(state), bell: Notify::new() })
    }

    /// Waits for so many slots and holds them; all, if that is more than there are. A run that holds some
    /// must not wait for more: two of them could wait for each other.
    ///
    /// Cancel safety: a dropped future leaves the line and holds nothing.
    pub async fn hold(self: &Arc<Self>, cost: u32) -> Hold {
        let (sender, turn) = oneshot::channel();
        let waiting = {
            let mut state = self.state.lock();
            let ticket = state.slots.wait(cost, Waiter::Part(sender));
            self.dispatch(&mut state);
            Waiting { room: self, ticket }
        };
        let Ok(hold) = turn.await else { unreachable!("who waits is told of its turn") };
        drop(waiting);
        hold
    }

    /// Slots that nothing holds.
    pub fn free(&self) -> u32 {
        self.state.lock().slots.free()
    }

    /// All slots.
    pub fn capacity(&self) -> u32 {
        self.state.lock().slots.capacity()
    }

    /// Has a run wait for its slots.
    pub(crate) fn wait(&self, cost: u32, run: Slot) -> Ticket {
        self.state.lock().slots.wait(cost, Waiter::Run(run))
    }

    /// The next run that may begin.
    pub(crate) fn start(self: &Arc<Self>) -> Option<(Held, Slot)> {
        let mut state = self.state.lock();
        self.dispatch(&mut state);
        state.ready.pop_front()
    }

    /// A run has ended.
    pub(crate) fn release(self: &Arc<Self>, held: Held) {
        let mut state = self.state.lock();
        state.slots.release(held);
        self.dispatch(&mut state);
    }

    /// A run no longer waits, though its turn may have come.
    pub(crate) fn withdraw(self: &Arc<Self>, ticket: Ticket, run: Slot) {
        let mut state = self.state.lock();
        if state.slots.cancel(ticket).is_none()
            && let Some(at) = state.ready.iter().position(|(_, ready)| *ready == run)
            && let Some((held, _)) = state.ready.remove(at)
        {
            state.slots.release(held);
        }
        self.dispatch(&mut state);
    }

    /// A part no longer waits. If its turn had come, who drops it gives back what it holds.
    fn cancel(self: &Arc<Self>, ticket: Ticket) {
        let mut state = self.state.lock();
        if state.slots.cancel(ticket).is_some() {
            self.dispatch(&mut state);
            drop(state);
            self.tell();
        }
    }

    /// Tells the runner that it may begin what a part has made room for.
    fn tell(&self) {
        if !self.state.lock().ready.is_empty() {
            self.bell.notify_one();
        }
    }

    /// Until a run may begin because a part has ended.
    pub(crate) async fn changed(&self) {
        self.bell.notified().await;
    }

    fn dispatch(self: &Arc<Self>, state: &mut State) {
        while let Some((held, waiter)) = state.slots.start() {
            match waiter {
                Waiter::Run(run) => state.ready.push_back((held, run)),
                Waiter::Part(turn) => {
                    let hold = Hold { held: Some(held), room: Arc::clone(self) };
                    // Nobody waits for it any more: not dropped here, where the state is locked.
                    if let Err(mut hold) = turn.send(hold)
                        && let Some(held) = hold.held.take()
                    {
                        state.slots.release(held);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use futures_util::poll;

    use super::*;

    fn room(capacity: u32) -> Arc<Room> {
        Room::new(NonZeroU32::new(capacity).expect("some slots"))
    }

    #[tokio::test]
    async fn parts_and_runs_stand_in_one_line() {
        let room = room(4);
        let first = room.hold(3).await;
        assert_eq!((first.slots(), room.free()), (3, 1));
        let mut large = Box::pin(room.hold(9));
        assert!(poll!(&mut large).is_pending());
        room.wait(1, Slot(7));
        let Some((run, Slot(7))) = room.start() else { panic!("it fits beside the first") };
        drop(first);
        assert!(poll!(&mut large).is_pending(), "a run still has a slot");
        room.release(run);
        let Poll::Ready(large) = poll!(&mut large) else { panic!("all are free") };
        assert_eq!((large.slots(), room.free()), (4, 0));
        room.wait(2, Slot(8));
        assert!(room.start().is_none());
        drop(large);
        room.changed().await;
        assert!(matches!(room.start(), Some((_, Slot(8)))));
    }

    #[tokio::test]
    async fn who_stops_waiting_neither_holds_nor_blocks() {
        let room = room(2);
        let first = room.hold(2).await;
        let (mut given_up, mut next) = (Box::pin(room.hold(2)), Box::pin(room.hold(1)));
        assert!(poll!(&mut given_up).is_pending() && poll!(&mut next).is_pending());
        drop(given_up);
        let mut told = Box::pin(room.hold(1));
        assert!(poll!(&mut told).is_pending());
        drop(first);
        // Its turn has come, and it goes away before it looks.
        drop(told);
        let Poll::Ready(next) = poll!(&mut next) else { panic!("there is room") };
        drop(next);
        assert_eq!(room.free(), 2);
    }

    #[tokio::test]
    async fn a_run_that_is_withdrawn_after_its_turn_came_gives_its_slots_back() {
        let room = room(2);
        let first = room.hold(2).await;
        let ticket = room.wait(2, Slot(1));
        drop(first);
        room.withdraw(ticket, Slot(1));
        assert_eq!(room.free(), 2);
        assert!(room.start().is_none());
    }
}
