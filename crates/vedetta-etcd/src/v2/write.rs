//! Changing nodes. Each request is worked out on the store's writer thread, so what it compares cannot
//! change before what it writes is there.

use std::collections::HashSet;
use std::sync::Arc;

use axum::http::Method;
use bytes::Bytes;
use vedetta_core::Revision;
use vedetta_kv::{
    CommitError, KeyValue, KvError, LeaseId, Purpose, Store, Update, WITH_DIRECTORY, Write,
};

use super::error::{Code, Error};
use super::form::{Ask, Compare};
use super::json::{Event, Node};
use super::path::Path;
use super::tree::{Dir, Found, find, look};
use super::ttl::{self, Expiry};

/// What a change was for v2, kept with its event. 0 is a change that was not made here.
pub(crate) mod tag {
    pub(crate) const SET: u8 = 1;
    pub(crate) const CREATE: u8 = 2;
    pub(crate) const UPDATE: u8 = 3;
    pub(crate) const COMPARE_AND_SWAP: u8 = 4;
    pub(crate) const COMPARE_AND_DELETE: u8 = 5;
    pub(crate) const DELETE: u8 = 6;
    /// Only its time to live changed: nobody is told.
    pub(crate) const REFRESH: u8 = 7;
    /// Part of another change: a directory made on the way, or the file that a directory replaced.
    pub(crate) const PART: u8 = 8;
}

/// The name of what a tag stands for.
pub(crate) fn action(tag: u8) -> &'static str {
    match tag {
        tag::CREATE => "create",
        tag::UPDATE => "update",
        tag::COMPARE_AND_SWAP => "compareAndSwap",
        tag::COMPARE_AND_DELETE => "compareAndDelete",
        tag::DELETE => "delete",
        _ => "set",
    }
}

/// Which change a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    Set,
    Create,
    /// Under a name that the server gives.
    Post,
    Update,
    CompareAndSwap,
    Delete,
    CompareAndDelete,
}

impl Verb {
    pub(crate) fn of(method: &Method, ask: &Ask) -> Self {
        let compare = ask.compare.is_given();
        match (method, ask.prev_exist) {
            (&Method::POST, _) => Self::Post,
            (&Method::DELETE, _) if compare => Self::CompareAndDelete,
            (&Method::DELETE, _) => Self::Delete,
            (_, Some(false)) => Self::Create,
            (_, _) if compare => Self::CompareAndSwap,
            (_, Some(true)) => Self::Update,
            (_, None) => Self::Set,
        }
    }
}

/// Does what is asked; answers the event, and the index it is.
pub(crate) async fn write(store: &Store, verb: Verb, ask: Ask) -> Result<(Event, Revision), Error> {
    let ask = Arc::new(ask);
    let work = || {
        let ask = Arc::clone(&ask);
        move |update: &mut Update<'_>| Change::new(update).make(verb, &ask)
    };
    if !matches!(verb, Verb::Delete | Verb::CompareAndDelete) {
        return store.update(Purpose::Store, work()).await.map_err(Refused::told);
    }
    // The write that finds the disk full is lost; tried again, what frees room may use what is kept for it.
    match store.update(Purpose::Reclaim, work()).await {
        Err(Refused::Kv(KvError::Lost(CommitError::Full))) => {
            store.update(Purpose::Reclaim, work()).await.map_err(Refused::told)
        }
        other => other.map_err(Refused::told),
    }
}

/// Why nothing was changed.
enum Refused {
    Api(Error),
    Kv(KvError),
}

impl Refused {
    fn told(self) -> Error {
        match self {
            Self::Api(error) => error,
            Self::Kv(error) => error.into(),
        }
    }
}

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        Self::Api(error)
    }
}

impl From<KvError> for Refused {
    fn from(error: KvError) -> Self {
        Self::Kv(error)
    }
}

/// One change being made.
struct Change<'a, 'u> {
    update: &'a mut Update<'u>,
    /// Where the store stays if this is refused.
    index: Revision,
    /// Leases that lost a key, which they may have been made for.
    left: HashSet<LeaseId>,
}

impl<'a, 'u> Change<'a, 'u> {
    fn new(update: &'a mut Update<'u>) -> Self {
        Self { index: update.revision(), update, left: HashSet::new() }
    }

    fn make(mut self, verb: Verb, ask: &Ask) -> Result<(Event, Revision), Refused> {
        let event = match verb {
            Verb::Set => self.set(ask)?,
            Verb::Create => self.create(&ask.path, ask)?,
            Verb::Post => {
                let name = format!("{:020}", self.update.revision().next().0);
                self.create(&ask.path.child(&name), ask)?
            }
            Verb::Update => self.replace(ask)?,
            Verb::CompareAndSwap => self.compare_and_swap(ask)?,
            Verb::Delete => self.delete(ask)?,
            Verb::CompareAndDelete => self.compare_and_delete(ask)?,
        };
        self.update.release(&self.left)?;
        Ok((event, self.update.revision()))
    }

    fn refuse<T>(&self, code: Code, cause: impl Into<Vec<u8>>) -> Result<T, Refused> {
        Err(Error::new(code, cause, self.index).into())
    }

    fn check_not_root(&self, path: &Path) -> Result<(), Refused> {
        if path.is_root() { self.refuse(Code::RootReadOnly, "/") } else { Ok(()) }
    }

    fn set(&mut self, ask: &Ask) -> Result<Event, Refused> {
        let path = &ask.path;
        let found = match find(self.update, path) {
            Ok(found) => Some(found),
            Err(error) if error.code == Code::KeyNotFound && !ask.refresh => None,
            Err(error) => return Err(error.into()),
        };
        self.check_not_root(path)?;
        let before = match found {
            Some(Found::Dir(_)) => return self.refuse(Code::NotFile, path.bytes()),
            Some(Found::File(file)) => Some(file),
            None => None,
        };
        let previous = before.as_ref().map(|file| self.file(file));
        self.make_parents(path)?;
        if ask.dir
            && let Some(file) = &before
        {
            self.remove(file, tag::PART)?;
        }
        let tag = if ask.refresh { tag::REFRESH } else { tag::SET };
        let value = before.as_ref().filter(|_| ask.refresh).map(KeyValue::value);
        let value = value.map_or_else(|| ask.value.clone(), Bytes::copy_from_slice);
        let node = self.put(path, ask.dir, value, ask, Write { anew: true, tag, lease: None })?;
        Ok(Event { action: action(tag::SET), node, previous })
    }

    fn create(&mut self, path: &Path, ask: &Ask) -> Result<Event, Refused> {
        self.check_not_root(path)?;
        self.make_parents(path)?;
        if look(self.update, path).is_some() {
            return self.refuse(Code::NodeExist, path.bytes());
        }
        let write = Write { anew: true, tag: tag::CREATE, lease: None };
        let node = self.put(path, ask.dir, ask.value.clone(), ask, write)?;
        Ok(Event { action: action(tag::CREATE), node, previous: None })
    }

    fn replace(&mut self, ask: &Ask) -> Result<Event, Refused> {
        let path = &ask.path;
        self.check_not_root(path)?;
        match find(self.update, path)? {
            Found::Dir(_) if !ask.value.is_empty() => self.refuse(Code::NotFile, path.bytes()),
            Found::Dir(dir) => {
                let previous = Some(self.dir(path, &dir));
                let write = Write { tag: update_tag(ask, tag::UPDATE), ..Write::default() };
                let mut node = self.put(path, true, Bytes::new(), ask, write)?;
                node.created = dir.created;
                Ok(Event { action: action(tag::UPDATE), node, previous })
            }
            Found::File(file) => self.put_over(&file, ask, tag::UPDATE),
        }
    }

    fn compare_and_swap(&mut self, ask: &Ask) -> Result<Event, Refused> {
        self.check_not_root(&ask.path)?;
        let file = self.compared(ask)?;
        self.put_over(&file, ask, tag::COMPARE_AND_SWAP)
    }

    fn delete(&mut self, ask: &Ask) -> Result<Event, Refused> {
        let path = &ask.path;
        self.check_not_root(path)?;
        match find(self.update, path)? {
            Found::File(file) => self.delete_file(path, &file, tag::DELETE),
            Found::Dir(_) if !ask.dir && !ask.recursive => self.refuse(Code::NotFile, path.bytes()),
            Found::Dir(dir) => {
                let (previous, inside) = (self.dir(path, &dir), path.inside());
                // Not listed before it is sure to go: the writer would be held up for nothing.
                if !ask.recursive && self.update.first(&inside).is_some() {
                    return self.refuse(Code::DirNotEmpty, path.bytes());
                }
                let inside = self.update.list(&inside)?;
                if let Some(marker) = &dir.marker {
                    self.left.extend(marker.lease());
                }
                self.update.delete(path.marker(), tag::DELETE)?;
                // A file that the directory hid goes too, or it would come to light.
                for key in self.update.get(path.bytes()).iter().chain(&inside) {
                    self.remove(key, WITH_DIRECTORY)?;
                }
                Ok(self.gone(previous, tag::DELETE))
            }
        }
    }

    fn compare_and_delete(&mut self, ask: &Ask) -> Result<Event, Refused> {
        let file = self.compared(ask)?;
        self.delete_file(&ask.path, &file, tag::COMPARE_AND_DELETE)
    }

    /// The file at the path, if it is what the request says it must be.
    fn compared(&self, ask: &Ask) -> Result<KeyValue, Refused> {
        let Found::File(file) = find(self.update, &ask.path)? else {
            return self.refuse(Code::NotFile, ask.path.bytes());
        };
        let Compare { value, index } = &ask.compare;
        let mut cause = Vec::new();
        if !value.is_empty() && file.value() != value {
            cause.push([b"[", &value[..], b" != ", file.value(), b"]"].concat());
        }
        if *index != 0 && file.modified().0 != *index {
            cause.push(format!("[{index} != {}]", file.modified()).into_bytes());
        }
        if cause.is_empty() { Ok(file) } else { self.refuse(Code::TestFailed, cause.join(&b' ')) }
    }

    /// Gives a file that is there another value; it stays the same node.
    fn put_over(&mut self, file: &KeyValue, ask: &Ask, tag: u8) -> Result<Event, Refused> {
        let previous = Some(self.file(file));
        let value =
            if ask.refresh { Bytes::copy_from_slice(file.value()) } else { ask.value.clone() };
        let write = Write { tag: update_tag(ask, tag), ..Write::default() };
        let node = self.put(&ask.path, false, value, ask, write)?;
        Ok(Event { action: action(tag), node, previous })
    }

    /// Puts a node, with the time to live that is asked for.
    fn put(
        &mut self,
        path: &Path,
        dir: bool,
        value: Bytes,
        ask: &Ask,
        mut write: Write,
    ) -> Result<Node, Refused> {
        write.lease = self.lease(ask)?;
        let key = if dir { path.marker() } else { path.file() };
        let before = self.update.get(&key);
        self.left.extend(before.as_ref().and_then(KeyValue::lease));
        self.update.put(key.clone(), if dir { Bytes::new() } else { value }, write)?;
        let Some(now) = self.update.get(&key) else {
            return self.refuse(Code::KeyNotFound, path.bytes()); // it was just put
        };
        Ok(Node {
            path: path.clone(),
            dir,
            expiry: self.expiry(&now),
            modified: now.modified().0,
            created: now.created().0,
            value: (!dir).then_some(now),
        })
    }

    fn lease(&mut self, ask: &Ask) -> Result<Option<LeaseId>, Refused> {
        let Some(ttl) = ask.ttl.and_then(ttl::lasting) else { return Ok(None) };
        loop {
            let id = ttl::lease_id(ttl);
            match self.update.grant_tree(id, ttl) {
                Ok(()) => return Ok(Some(id)),
                Err(KvError::LeaseExists(_)) => {}
                Err(other) => return Err(other.into()),
            }
        }
    }

    /// Makes the directories that `path` is to be in. One that only v3 knew becomes one of ours, which
    /// stays when it is empty.
    fn make_parents(&mut self, path: &Path) -> Result<(), Refused> {
        for (above, marker) in path.ancestors().zip(path.markers_above()) {
            match look(self.update, &above) {
                Some(Found::Dir(Dir { marker: Some(_), .. })) => {}
                Some(Found::File(_)) => return self.refuse(Code::NotDir, above.bytes()),
                Some(Found::Dir(_)) | None => {
                    let write = Write { tag: tag::PART, ..Write::default() };
                    self.update.put(marker, Bytes::new(), write)?;
                }
            }
        }
        Ok(())
    }

    fn delete_file(&mut self, path: &Path, file: &KeyValue, tag: u8) -> Result<Event, Refused> {
        let mut previous = self.file(file);
        previous.path = path.clone();
        self.remove(file, tag)?;
        Ok(self.gone(previous, tag))
    }

    fn remove(&mut self, key: &KeyValue, tag: u8) -> Result<(), Refused> {
        self.left.extend(key.lease());
        Ok(self.update.delete(Bytes::copy_from_slice(key.key()), tag)?)
    }

    /// The event of a node that went.
    fn gone(&self, previous: Node, tag: u8) -> Event {
        let node = Node {
            path: previous.path.clone(),
            value: None,
            dir: previous.dir,
            expiry: None,
            modified: self.update.revision().0,
            created: previous.created,
        };
        Event { action: action(tag), node, previous: Some(previous) }
    }

    fn file(&self, key: &KeyValue) -> Node {
        Node {
            path: Path::clean(key.key()),
            value: Some(key.clone()),
            dir: false,
            expiry: self.expiry(key),
            modified: key.modified().0,
            created: key.created().0,
        }
    }

    fn dir(&self, path: &Path, dir: &Dir) -> Node {
        Node {
            path: path.clone(),
            value: None,
            dir: true,
            expiry: dir.marker.as_ref().and_then(|marker| self.expiry(marker)),
            modified: dir.created,
            created: dir.created,
        }
    }

    fn expiry(&self, key: &KeyValue) -> Option<Expiry> {
        let lease = key.lease()?;
        ttl::expiry(lease, self.update.remaining(lease))
    }
}

fn update_tag(ask: &Ask, tag: u8) -> u8 {
    if ask.refresh { tag::REFRESH } else { tag }
}
