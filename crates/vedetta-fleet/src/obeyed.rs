//! Tells a command that comes again from a new one.
//!
//! A bus hands each out once, but one that lost its last writes, as a Redis may in a power cut, does not know that it did.

use std::collections::VecDeque;

use crate::bus::CommandId;

/// Commands that are remembered; with more of them the oldest is forgotten. More than can come in the time that
/// one of them holds.
const MOST: usize = 1000;

/// What was obeyed last.
#[derive(Debug, Default)]
pub(crate) struct Obeyed(VecDeque<CommandId>);

impl Obeyed {
    /// Whether it was obeyed already.
    pub(crate) fn has(&self, id: &CommandId) -> bool {
        self.0.contains(id)
    }

    /// It was obeyed now.
    pub(crate) fn add(&mut self, id: CommandId) {
        if self.0.len() >= MOST {
            self.0.pop_front();
        }
        self.0.push_back(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ones_are_known_and_the_memory_is_bounded() {
        let mut obeyed = Obeyed::default();
        let id = |number: usize| CommandId(number.to_string());
        (0..2 * MOST).for_each(|number| obeyed.add(id(number)));
        assert!(obeyed.has(&id(MOST)) && obeyed.has(&id(2 * MOST - 1)));
        assert!(!obeyed.has(&id(MOST - 1)));
    }
}
