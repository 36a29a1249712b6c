//! The slots of a machine, shared by runs and by the parts that runs are made of.
//!
//! A run that takes slots takes them before it begins and gives them back at its end. A run that is made of
//! parts takes none itself, and each part asks for its own with [`Room::hold`], in the same line as all
//! others: see [`Slots`] for who goes first. Several runners may share one room, such as those that work the
//! queues of one process.

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
}

struct State {
    slots: Slots<Waiter>,
    /// Slots that parts hold or wait for.
    parts: u64,
    /// The runners, in the order in which they came.
    runners: Vec<Member>,
}

#[derive(Default)]
struct Member {
    /// Its runs whose turn came while it did not look.
    ready: VecDeque<(Held, Slot)>,
    /// One of them may begin, or there may be room for more.
    bell: Arc<Notify>,
}

enum Waiter {
    /// Of which runner.
    Run(usize, Slot),
    Part(oneshot::Sender<Hold>),
}

/// A runner's place in a room.
pub(crate) struct Place {
    room: Arc<Room>,
    number: usize,
    bell: Arc<Notify>,
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
            self.room.state.lock().parts -= u64::from(held.slots());
            self.room.release(held);
            self.room.tell();
        }
    }
}

/// Leaves the line when dropped.
struct Waiting<'r> {
    room: &'r Arc<Room>,
    ticket: Ticket,
    cost: u32,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.room.cancel(self.ticket, self.cost);
    }
}

impl Room {
    /// With all slots free.
    pub fn new(capacity: NonZeroU32) -> Arc<Self> {
        let state = State { slots: Slots::new(capacity), parts: 0, runners: Vec::new() };
        Arc::new(Self { state: Mutex::new(state) })
    }

    /// Waits for so many slots and holds them; all, if that is more than there are. A run that holds some
    /// must not wait for more: two of them could wait for each other.
    ///
    /// Cancel safety: a dropped future leaves the line and holds nothing.
    pub async fn hold(self: &Arc<Self>, cost: u32) -> Hold {
        let (sender, turn) = oneshot::channel();
        let waiting = {
            let mut state = self.state.lock();
            let cost = cost.clamp(1, state.slots.capacity());
            let ticket = state.slots.wait(cost, Waiter::Part(sender));
            state.parts += u64::from(cost);
            self.dispatch(&mut state);
            Waiting { room: self, ticket, cost }
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

    /// A place for a runner.
    pub(crate) fn join(self: &Arc<Self>) -> Place {
        let mut state = self.state.lock();
        let (number, member) = (state.runners.len(), Member::default());
        let bell = Arc::clone(&member.bell);
        state.runners.push(member);
        Place { room: Arc::clone(self), number, bell }
    }

    /// Slots are free again.
    fn release(self: &Arc<Self>, held: Held) {
        let mut state = self.state.lock();
        state.slots.release(held);
        self.dispatch(&mut state);
    }

    /// A part no longer waits. If its turn had come, who drops it gives back what it holds.
    fn cancel(self: &Arc<Self>, ticket: Ticket, cost: u32) {
        let mut state = self.state.lock();
        if state.slots.cancel(ticket).is_some() {
            state.parts -= u64::from(cost);
            self.dispatch(&mut state);
            drop(state);
            self.tell();
        }
    }

    /// Tells runners that they may begin something, or that there may be room for more.
    fn tell(&self) {
        self.state.lock().runners.iter().for_each(|runner| runner.bell.notify_one());
    }

    fn dispatch(self: &Arc<Self>, state: &mut State) {
        while let Some((held, waiter)) = state.slots.start() {
            match waiter {
                Waiter::Run(runner, run) => state.runners[runner].ready.push_back((held, run)),
                Waiter::Part(turn) => {
                    let hold = Hold { held: Some(held), room: Arc::clone(self) };
                    // Nobody waits for it any more: not dropped here, where the state is locked.
                    if let Err(mut hold) = turn.send(hold)
                        && let Some(held) = hold.held.take()
                    {
                        state.parts -= u64::from(held.slots());
                        state.slots.release(held);
                    }
                }
            }
        }
    }
}

impl Place {
    /// Has a run wait for its slots.
    pub(crate) fn wait(&self, cost: u32, run: Slot) -> Ticket {
        self.room.state.lock().slots.wait(cost, Waiter::Run(self.number, run))
    }

    /// The next run that may begin.
    pub(crate) fn start(&self) -> Option<(Held, Slot)> {
        let mut state = self.room.state.lock();
        self.room.dispatch(&mut state);
        let next = state.runners[self.number].ready.pop_front();
        let others = state.runners.iter().enumerate().filter(|(number, _)| *number != self.number);
        others
            .filter(|(_, other)| !other.ready.is_empty())
            .for_each(|(_, other)| other.bell.notify_one());
        next
    }

    /// A run has ended.
    pub(crate) fn release(&self, held: Held) {
        self.room.release(held);
        if self.is_shared() {
            self.room.tell();
        }
    }

    /// A run no longer waits, though its turn may have come.
    pub(crate) fn withdraw(&self, ticket: Ticket, run: Slot) {
        let mut state = self.room.state.lock();
        let ready = &mut state.runners[self.number].ready;
        let at = ready.iter().position(|(_, ready)| *ready == run);
        let came = at.and_then(|at| ready.remove(at));
        match came {
            Some((held, _)) => state.slots.release(held),
            None => drop(state.slots.cancel(ticket)),
        }
        self.room.dispatch(&mut state);
        drop(state);
        if self.is_shared() {
            self.room.tell();
        }
    }

    /// Until a run may begin, or there may be room for more, because of what others did.
    pub(crate) async fn changed(&self) {
        self.bell.notified().await;
    }

    /// Whether others run here, too.
    pub(crate) fn is_shared(&self) -> bool {
        self.room.state.lock().runners.len() > 1
    }

    /// Slots that nothing holds.
    pub(crate) fn free(&self) -> u32 {
        self.room.free()
    }

    /// Slots that parts hold or wait for.
    pub(crate) fn parts(&self) -> u32 {
        u32::try_from(self.room.state.lock().parts).unwrap_or(u32::MAX)
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
        let runner = room.join();
        runner.wait(1, Slot(7));
        let Some((run, Slot(7))) = runner.start() else { panic!("it fits beside the first") };
        drop(first);
        assert!(poll!(&mut large).is_pending(), "a run still has a slot");
        runner.release(run);
        let Poll::Ready(large) = poll!(&mut large) else { panic!("all are free") };
        assert_eq!((large.slots(), room.free()), (4, 0));
        runner.wait(2, Slot(8));
        assert!(runner.start().is_none());
        drop(large);
        runner.changed().await;
        assert!(matches!(runner.start(), Some((_, Slot(8)))));
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
        let runner = room.join();
        assert_eq!(runner.parts(), 2 + 1 + 1);
        drop(first);
        // Its turn has come, and it goes away before it looks.
        drop(told);
        let Poll::Ready(next) = poll!(&mut next) else { panic!("there is room") };
        assert_eq!(runner.parts(), 1);
        drop(next);
        assert_eq!((room.free(), runner.parts()), (2, 0));
    }

    #[tokio::test]
    async fn a_run_that_is_withdrawn_after_its_turn_came_gives_its_slots_back() {
        let room = room(2);
        let first = room.hold(2).await;
        let runner = room.join();
        let ticket = runner.wait(2, Slot(1));
        drop(first);
        runner.withdraw(ticket, Slot(1));
        assert_eq!(room.free(), 2);
        assert!(runner.start().is_none());
    }

    #[tokio::test]
    async fn runners_that_share_a_room_get_their_own_runs_and_hear_of_room() {
        let room = room(2);
        let (one, other) = (room.join(), room.join());
        one.wait(2, Slot(0));
        let Some((held, Slot(0))) = one.start() else { panic!("all are free") };
        other.wait(1, Slot(0));
        one.wait(1, Slot(1));
        assert!(other.start().is_none() && one.start().is_none());
        one.release(held);
        other.changed().await;
        assert!(
            matches!(other.start(), Some((_, Slot(0)))),
            "the same number, and not the same run"
        );
        assert!(matches!(one.start(), Some((_, Slot(1)))));
        assert_eq!(room.free(), 0);
    }
}
