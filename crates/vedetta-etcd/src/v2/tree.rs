//! Finding nodes among the keys.

use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{KeyValue, Present, Update};

use super::error::{Code, Error};
use super::path::Path;

/// The keys at one moment.
pub(crate) trait Keys {
    fn revision(&self) -> Revision;
    fn get(&self, key: &[u8]) -> Option<KeyValue>;
    fn first(&self, range: &KeyRange) -> Option<KeyValue>;
}

impl Keys for Update<'_> {
    fn revision(&self) -> Revision {
        self.revision()
    }

    fn get(&self, key: &[u8]) -> Option<KeyValue> {
        self.get(key)
    }

    fn first(&self, range: &KeyRange) -> Option<KeyValue> {
        self.first(range)
    }
}

impl Keys for Present<'_> {
    fn revision(&self) -> Revision {
        self.revision()
    }

    fn get(&self, key: &[u8]) -> Option<KeyValue> {
        self.get(key)
    }

    fn first(&self, range: &KeyRange) -> Option<KeyValue> {
        self.first(range)
    }
}

/// What is at a path.
#[derive(Debug, Clone)]
pub(crate) enum Found {
    File(KeyValue),
    Dir(Dir),
}

/// A directory.
#[derive(Debug, Clone)]
pub(crate) struct Dir {
    /// The key that says so; a directory that only v3 knows, by keys in it, has none.
    pub(crate) marker: Option<KeyValue>,
    /// Also what is shown as the last time it was modified: an update changes only its time to live.
    pub(crate) created: u64,
}

/// The node at `path`, or why there is none.
pub(crate) fn find(keys: &impl Keys, path: &Path) -> Result<Found, Error> {
    if let Some(found) = look(keys, path) {
        return Ok(found);
    }
    for above in path.ancestors() {
        match look(keys, &above) {
            Some(Found::Dir(_)) => {}
            // Something is to be in it, but it is a file.
            Some(Found::File(_)) => {
                return Err(Error::new(Code::NotDir, above.bytes(), keys.revision()));
            }
            None => return Err(Error::new(Code::KeyNotFound, above.bytes(), keys.revision())),
        }
    }
    Err(Error::new(Code::KeyNotFound, path.bytes(), keys.revision()))
}

/// The node at `path`. A path with keys below it is a directory, even if there is a key of that name too.
pub(crate) fn look(keys: &impl Keys, path: &Path) -> Option<Found> {
    if path.is_root() {
        return Some(Found::Dir(Dir { marker: None, created: 0 }));
    }
    let marker = keys.get(&path.marker());
    if let Some(first) = marker.or_else(|| keys.first(&path.below())) {
        let created = first.created().0;
        let marker = (first.key().len() == path.bytes().len() + 1).then_some(first);
        return Some(Found::Dir(Dir { marker, created }));
    }
    keys.get(path.bytes()).map(Found::File)
}
