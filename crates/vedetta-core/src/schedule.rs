//! Decides which key runs next, and when.
//!
//! ```text
//! offer ──► waiting ──due──► take ──► running ──finish──► gone
//!              ▲                         │
//!              └── offered while running ┘
//! ```
//!
//! A key waits once: of two times the earlier stands. It runs once at a time: offers made meanwhile
//! become one more run. Keys come out in the order of their times, those of one time in the order of
//! their offers. How much may run at once is the question of [`crate::Slots`].
//!
//! The waiting keys stand in a wheel: level `n` has 256 lists, each for `256^n` milliseconds, and a list
//! moves down a level when its time begins. An offer and a take touch the ends of a list, and a cancel
//! leaves a gap; a list that is more gaps than keys closes up. So each costs the same however many keys
//! wait, and every key moves down at most once per level. Lists are arrays, not chains: where the next key
//! is does not wait for the one before to come from memory.
//!
//! [`Schedule`] knows keys by small numbers, about 24 bytes each; [`Keyed`] gives any key such a number.

use std::borrow::Borrow;
use std::collections::VecDeque;
use std::hash::Hash;

use crate::{Ids, Moment};

const LEVELS: usize = 8;
const LISTS: usize = 256;

/// In a list: the key that stood here is gone.
const GAP: u32 = u32::MAX;
/// The time of a key that nobody wants to run.
const NEVER: u64 = u64::MAX;
/// The last moment there is.
const LAST: u64 = NEVER - 1;

/// The small number of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

#[derive(Clone, Copy)]
struct Cell {
    /// When it is to run, if it waits, or to run again.
    due: u64,
    state: State,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Idle,
    /// At that place of the list for its time.
    Waiting(u32),
    Running,
}

const UNKNOWN: Cell = Cell { due: NEVER, state: State::Idle };

/// Keys in the order of their offers. At most half of it are gaps, so an empty one has none.
#[derive(Default)]
struct List {
    keys: VecDeque<u32>,
    /// The place of the first. Places count on when that is taken, and may wrap.
    first: u32,
    gaps: usize,
}

impl List {
    #[expect(clippy::cast_possible_truncation, reason = "fewer keys than numbers for them")]
    fn push(&mut self, slot: u32) -> State {
        let place = self.first.wrapping_add(self.keys.len() as u32);
        self.keys.push_back(slot);
        State::Waiting(place)
    }

    fn pop(&mut self) -> Option<u32> {
        loop {
            let slot = self.keys.pop_front()?;
            self.first = self.first.wrapping_add(1);
            if slot != GAP {
                return Some(slot);
            }
            self.gaps -= 1;
        }
    }

    fn remove(&mut self, place: u32) {
        self.keys[place.wrapping_sub(self.first) as usize] = GAP;
        self.gaps += 1;
    }
}

/// Keys with the time each is due.
pub struct Schedule {
    cells: Vec<Cell>,
    /// Those of a level side by side, the nearest level first.
    lists: Box<[List]>,
    /// Which lists have something, a bit each.
    filled: [u64; LEVELS * LISTS / 64],
    /// Everything before it was taken.
    reached: u64,
    waiting: usize,
}

impl Default for Schedule {
    fn default() -> Self {
        Self::new()
    }
}

impl Schedule {
    /// Nothing waits.
    pub fn new() -> Self {
        Self {
            cells: Vec::new(),
            lists: std::iter::repeat_with(List::default).take(LEVELS * LISTS).collect(),
            filled: [0; _],
            reached: 0,
            waiting: 0,
        }
    }

    /// Wants a run at `at`; says whether that is now its time. A later time than the one that stands is
    /// ignored, one before the last that was taken counts as that. What runs is run once more.
    ///
    /// # Panics
    ///
    /// With the very last number, which means something else here.
    pub fn offer(&mut self, slot: Slot, at: Moment) -> bool {
        let at = at.as_millis().clamp(self.reached, LAST);
        let index = slot.0 as usize;
        if index >= self.cells.len() {
            assert!(slot.0 != GAP, "a slot is a small number");
            self.cells.resize(index + 1, UNKNOWN);
        }
        let Cell { due, state } = self.cells[index];
        if at >= due {
            return false;
        }
        match state {
            State::Idle => self.link(slot.0, at),
            State::Running => self.cells[index].due = at,
            State::Waiting(place) => {
                self.unlink(due, place);
                self.link(slot.0, at);
            }
        }
        true
    }

    /// The next key whose time has come; it runs until [`Self::finish`].
    pub fn take(&mut self, now: Moment) -> Option<Slot> {
        let now = now.as_millis().min(LAST);
        loop {
            let next = self.next_list().map(|list| (list, self.begins(list)));
            let Some((list, begins)) = next.filter(|(_, begins)| *begins <= now) else {
                self.reached = self.reached.max(now);
                return None;
            };
            self.reached = begins;
            if list >= LISTS {
                self.move_down(list);
            } else if let Some(slot) = self.lists[list].pop() {
                self.waiting -= 1;
                self.close_up(list);
                self.cells[slot as usize] = Cell { due: NEVER, state: State::Running };
                return Some(Slot(slot));
            }
        }
    }

    /// Its run has ended. When it runs again, if it was offered meanwhile; nothing if it did not run.
    pub fn finish(&mut self, slot: Slot) -> Option<Moment> {
        let cell = self.cells.get_mut(slot.0 as usize)?;
        if cell.state != State::Running {
            return None;
        }
        let again = std::mem::replace(cell, UNKNOWN).due;
        if again == NEVER {
            return None;
        }
        let due = again.max(self.reached);
        self.link(slot.0, due);
        Some(Moment::from_millis(due))
    }

    /// Takes a wish back; what runs goes on. Whether there was one.
    pub fn cancel(&mut self, slot: Slot) -> bool {
        let Some(cell) = self.cells.get_mut(slot.0 as usize) else { return false };
        let due = std::mem::replace(&mut cell.due, NEVER);
        if let State::Waiting(place) = cell.state {
            cell.state = State::Idle;
            self.unlink(due, place);
        }
        due != NEVER
    }

    /// Takes all wishes back; what runs goes on.
    pub fn clear(&mut self) {
        for cell in &mut self.cells {
            cell.due = NEVER;
            if cell.state != State::Running {
                cell.state = State::Idle;
            }
        }
        self.lists.fill_with(List::default);
        self.filled = [0; _];
        self.waiting = 0;
    }

    /// When a key is due, also one that runs and is to run again.
    pub fn due(&self, slot: Slot) -> Option<Moment> {
        let cell = self.cells.get(slot.0 as usize)?;
        (cell.due != NEVER).then(|| Moment::from_millis(cell.due))
    }

    /// Whether it was taken and has not finished.
    pub fn is_running(&self, slot: Slot) -> bool {
        self.cells.get(slot.0 as usize).is_some_and(|cell| cell.state == State::Running)
    }

    /// When to look again: nothing is due before. Further off than a quarter of a second it is the time at
    /// which the wheel can tell more: looking then may find nothing, but no more than once per level.
    pub fn wake_at(&self) -> Option<Moment> {
        self.next_list().map(|list| Moment::from_millis(self.begins(list)))
    }

    /// Keys that wait; one that is to run again after its run does not count.
    pub fn len(&self) -> usize {
        self.waiting
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// The list that holds the earliest: levels are further off the higher they are.
    fn next_list(&self) -> Option<usize> {
        let (word, bits) = self.filled.iter().enumerate().find(|(_, bits)| **bits != 0)?;
        Some(word * 64 + bits.trailing_zeros() as usize)
    }

    /// The first moment of a list that has something.
    fn begins(&self, list: usize) -> u64 {
        let below = list / LISTS * 8;
        (self.reached >> below & !0xff | (list % LISTS) as u64) << below
    }

    /// By the highest byte in which it differs from `reached`. That byte stays the highest until the list
    /// moves down, so a key is found where it was put, and keys of one time are always in one list.
    fn list_for(&self, due: u64) -> usize {
        let level = ((self.reached ^ due) | 1).ilog2() as usize / 8;
        level * LISTS + (due >> (8 * level) & 0xff) as usize
    }

    fn link(&mut self, slot: u32, due: u64) {
        let list = self.list_for(due);
        let state = self.lists[list].push(slot);
        self.filled[list / 64] |= 1 << (list % 64);
        self.cells[slot as usize] = Cell { due, state };
        self.waiting += 1;
    }

    fn unlink(&mut self, due: u64, place: u32) {
        let list = self.list_for(due);
        self.lists[list].remove(place);
        self.waiting -= 1;
        self.close_up(list);
    }

    /// After a key has left a list: gives its memory back when it was the last, and closes the gaps when
    /// they are more than the keys.
    fn close_up(&mut self, index: usize) {
        let list = &mut self.lists[index];
        if list.gaps * 2 > list.keys.len() {
            let keys = std::mem::take(list).keys;
            for slot in keys.into_iter().filter(|slot| *slot != GAP) {
                self.cells[slot as usize].state = list.push(slot);
            }
        }
        if list.keys.is_empty() {
            *list = List::default();
            self.filled[index / 64] &= !(1 << (index % 64));
        }
    }

    /// Spreads a list whose time begins over the levels below, in its order.
    fn move_down(&mut self, index: usize) {
        let list = std::mem::take(&mut self.lists[index]);
        self.filled[index / 64] &= !(1 << (index % 64));
        for slot in list.keys.into_iter().filter(|slot| *slot != GAP) {
            self.waiting -= 1;
            self.link(slot, self.cells[slot as usize].due);
        }
    }
}

/// A [`Schedule`] of keys of any type.
pub struct Keyed<K> {
    ids: Ids<K>,
    schedule: Schedule,
}

impl<K: Hash + Eq + Clone> Default for Keyed<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: Hash + Eq + Clone> Keyed<K> {
    /// Nothing waits.
    pub fn new() -> Self {
        Self { ids: Ids::new(), schedule: Schedule::new() }
    }

    /// As [`Schedule::offer`].
    pub fn offer(&mut self, key: K, at: Moment) -> bool {
        let slot = self.ids.intern(key);
        self.schedule.offer(slot, at)
    }

    /// As [`Schedule::take`].
    pub fn take(&mut self, now: Moment) -> Option<K> {
        let slot = self.schedule.take(now)?;
        self.ids.key(slot).cloned()
    }

    /// As [`Schedule::finish`]; nothing if it does not run.
    pub fn finish<Q: Hash + Eq + ?Sized>(&mut self, key: &Q) -> Option<Moment>
    where
        K: Borrow<Q>,
    {
        let slot = self.ids.find(key).filter(|slot| self.schedule.is_running(*slot))?;
        let again = self.schedule.finish(slot);
        if again.is_none() {
            self.ids.release(slot);
        }
        again
    }

    /// As [`Schedule::cancel`].
    pub fn cancel<Q: Hash + Eq + ?Sized>(&mut self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        let Some(slot) = self.ids.find(key) else { return false };
        let was = self.schedule.cancel(slot);
        if !self.schedule.is_running(slot) {
            self.ids.release(slot);
        }
        was
    }

    /// As [`Schedule::clear`].
    pub fn clear(&mut self) {
        self.schedule.clear();
        self.ids.retain(|slot| self.schedule.is_running(slot));
    }

    /// As [`Schedule::wake_at`].
    pub fn wake_at(&self) -> Option<Moment> {
        self.schedule.wake_at()
    }

    /// As [`Schedule::len`].
    pub fn len(&self) -> usize {
        self.schedule.len()
    }

    /// As [`Schedule::is_empty`].
    pub fn is_empty(&self) -> bool {
        self.schedule.is_empty()
    }
}

#[cfg(test)]
mod tests;
