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
//! The waiting keys hang in a wheel: level `n` has 256 lists, each for `256^n` milliseconds, and a list
//! moves down a level when its time begins. An offer, a take and a cancel each touch a list's end or
//! the key's neighbours, however many keys wait; every key moves down at most once per level.
//! [`Schedule`] knows keys by small numbers, 16 bytes each; [`Keyed`] gives any key such a number.

use std::borrow::Borrow;
use std::hash::Hash;

use crate::{Ids, Moment};

const LEVELS: usize = 8;
const LISTS: usize = 256;

/// The last of a list, and the head of an empty one.
const END: u32 = u32::MAX;
/// In no list: it runs.
const RUNNING: u32 = u32::MAX - 1;
/// In no list: nothing is known of it.
const IDLE: u32 = u32::MAX - 2;
/// A running key that was not offered again.
const NEVER: u64 = u64::MAX;
/// The last moment there is.
const LAST: u64 = NEVER - 1;

/// The small number of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

#[derive(Clone, Copy)]
struct Cell {
    due: u64,
    next: u32,
    previous: u32,
}

const UNKNOWN: Cell = Cell { due: NEVER, next: IDLE, previous: END };

#[derive(Clone, Copy)]
struct List {
    first: u32,
    last: u32,
}

const EMPTY: List = List { first: END, last: END };

/// Keys with the time each is due.
pub struct Schedule {
    cells: Vec<Cell>,
    lists: Box<[[List; LISTS]; LEVELS]>,
    /// Which lists have something.
    filled: [[u64; LISTS / 64]; LEVELS],
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
            lists: Box::new([[EMPTY; LISTS]; LEVELS]),
            filled: [[0; LISTS / 64]; LEVELS],
            reached: 0,
            waiting: 0,
        }
    }

    /// Wants a run at `at`; says whether that is now its time. A later time than the one that stands is
    /// ignored, one before the last that was taken counts as that. What runs is run once more.
    ///
    /// # Panics
    ///
    /// With the last three numbers, which mean something else here.
    pub fn offer(&mut self, slot: Slot, at: Moment) -> bool {
        let at = at.as_millis().clamp(self.reached, LAST);
        let index = slot.0 as usize;
        if index >= self.cells.len() {
            assert!(slot.0 < IDLE, "a slot is a small number");
            self.cells.resize(index + 1, UNKNOWN);
        }
        let Cell { due, next, .. } = self.cells[index];
        if next == IDLE {
            self.link(slot.0, at);
            return true;
        }
        if at >= due {
            return false;
        }
        if next == RUNNING {
            self.cells[index].due = at;
        } else {
            self.unlink(slot.0);
            self.link(slot.0, at);
        }
        true
    }

    /// The next key whose time has come; it runs until [`Self::finish`].
    pub fn take(&mut self, now: Moment) -> Option<Slot> {
        let now = now.as_millis().min(LAST);
        loop {
            let Some((level, list)) = self.next_list() else {
                self.reached = self.reached.max(now);
                return None;
            };
            let begins = self.begins(level, list);
            if begins > now {
                self.reached = self.reached.max(now);
                return None;
            }
            self.reached = begins;
            if level == 0 {
                let slot = self.lists[0][list].first;
                self.unlink(slot);
                let cell = &mut self.cells[slot as usize];
                (cell.due, cell.next) = (NEVER, RUNNING);
                return Some(Slot(slot));
            }
            self.move_down(level, list);
        }
    }

    /// Its run has ended. When it runs again, if it was offered meanwhile; nothing if it did not run.
    pub fn finish(&mut self, slot: Slot) -> Option<Moment> {
        let cell = self.cells.get_mut(slot.0 as usize).filter(|cell| cell.next == RUNNING)?;
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
        match cell.next {
            IDLE => false,
            RUNNING => std::mem::replace(&mut cell.due, NEVER) != NEVER,
            _ => {
                self.unlink(slot.0);
                self.cells[slot.0 as usize] = UNKNOWN;
                true
            }
        }
    }

    /// Takes all wishes back; what runs goes on.
    pub fn clear(&mut self) {
        for cell in &mut self.cells {
            cell.due = NEVER;
            if cell.next != RUNNING {
                *cell = UNKNOWN;
            }
        }
        self.lists.as_flattened_mut().fill(EMPTY);
        self.filled = [[0; LISTS / 64]; LEVELS];
        self.waiting = 0;
    }

    /// When a key is due, also one that runs and is to run again.
    pub fn due(&self, slot: Slot) -> Option<Moment> {
        let cell = self.cells.get(slot.0 as usize)?;
        (cell.due != NEVER).then(|| Moment::from_millis(cell.due))
    }

    /// Whether it was taken and has not finished.
    pub fn is_running(&self, slot: Slot) -> bool {
        self.cells.get(slot.0 as usize).is_some_and(|cell| cell.next == RUNNING)
    }

    /// When to look again: nothing is due before. Further off than a quarter of a second it is the time at
    /// which the wheel can tell more: looking then may find nothing, but no more than once per level.
    pub fn wake_at(&self) -> Option<Moment> {
        let (level, list) = self.next_list()?;
        Some(Moment::from_millis(self.begins(level, list)))
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
    fn next_list(&self) -> Option<(usize, usize)> {
        self.filled.iter().enumerate().find_map(|(level, words)| {
            let (word, bits) = words.iter().enumerate().find(|(_, bits)| **bits != 0)?;
            Some((level, word * 64 + bits.trailing_zeros() as usize))
        })
    }

    /// The first moment of a list.
    fn begins(&self, level: usize, list: usize) -> u64 {
        let below = 8 * level;
        (self.reached >> below & !0xff | list as u64) << below
    }

    /// By the highest byte in which it differs from `reached`. That byte stays the highest until the list
    /// moves down, so a key is found where it was put, and keys of one time are always in one list.
    fn place(&self, due: u64) -> (usize, usize) {
        let level = ((self.reached ^ due) | 1).ilog2() as usize / 8;
        (level, (due >> (8 * level) & 0xff) as usize)
    }

    fn link(&mut self, slot: u32, due: u64) {
        let (level, list) = self.place(due);
        let ends = &mut self.lists[level][list];
        let previous = std::mem::replace(&mut ends.last, slot);
        if previous == END {
            ends.first = slot;
            self.filled[level][list / 64] |= 1 << (list % 64);
        } else {
            self.cells[previous as usize].next = slot;
        }
        self.cells[slot as usize] = Cell { due, next: END, previous };
        self.waiting += 1;
    }

    fn unlink(&mut self, slot: u32) {
        let Cell { due, next, previous } = self.cells[slot as usize];
        let (level, list) = self.place(due);
        let ends = &mut self.lists[level][list];
        if previous == END {
            ends.first = next;
        } else {
            self.cells[previous as usize].next = next;
        }
        if next == END {
            ends.last = previous;
        } else {
            self.cells[next as usize].previous = previous;
        }
        if ends.first == END {
            self.filled[level][list / 64] &= !(1 << (list % 64));
        }
        self.waiting -= 1;
    }

    /// Spreads a list whose time begins over the levels below, in its order.
    fn move_down(&mut self, level: usize, list: usize) {
        let mut slot = std::mem::replace(&mut self.lists[level][list], EMPTY).first;
        self.filled[level][list / 64] &= !(1 << (list % 64));
        while slot != END {
            let Cell { due, next, .. } = self.cells[slot as usize];
            self.waiting -= 1;
            self.link(slot, due);
            slot = next;
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
