//! A look at the keys as they are, all at one moment.

use vedetta_core::{KeyRange, Revision};

use crate::KeyValue;
use crate::index::Index;
use crate::store::Store;

/// The store as it is at one moment.
pub struct Present<'a>(&'a Index);

impl Store {
    /// Looks at the present. Writers wait meanwhile, so the look should be short: for many keys there is
    /// [`Store::range`].
    pub fn present<T>(&self, look: impl FnOnce(&Present<'_>) -> T) -> T {
        look(&Present(&self.shared.index.read()))
    }
}

impl Present<'_> {
    /// The store's revision.
    pub fn revision(&self) -> Revision {
        self.0.revision
    }

    /// A key as it is.
    pub fn get(&self, key: &[u8]) -> Option<KeyValue> {
        self.0.now(self.0.place(key, None)?).cloned()
    }

    /// The first key of a range; found without looking at the others.
    pub fn first(&self, range: &KeyRange) -> Option<KeyValue> {
        self.0.first(range, |visited| self.get(visited))
    }
}
