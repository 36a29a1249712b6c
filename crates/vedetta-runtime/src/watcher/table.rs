//! What a source says should be, by id.
//!
//! ```text
//! /rooms/room1/livemeta
//! └prefix┘└─id┘└─kind─┘      an id ends at the last slash, so it may hold any bytes
//! ```

use std::borrow::Borrow;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use vedetta_core::{Entry, Failure, Ids, Moment, Revision, Slot, explain};

use super::{BoxError, Effect, State};

/// What tells one thing that is watched from another. Any bytes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id(Bytes);

impl Id {
    /// The id of these bytes.
    pub fn new(bytes: impl Into<Bytes>) -> Self {
        Self(bytes.into())
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl Borrow<[u8]> for Id {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

/// As text; bytes that are none are escaped.
impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match str::from_utf8(&self.0) {
            Ok(text) => f.write_str(text),
            Err(_) => self.0.escape_ascii().fmt(f),
        }
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

/// Everything that should be, at one revision.
#[derive(Debug, Clone)]
pub struct Wanted<S> {
    /// The revision it is true at.
    pub revision: Revision,
    states: HashMap<Id, Option<Arc<S>>>,
}

impl<S> Wanted<S> {
    /// What an id should be.
    pub fn get(&self, id: &[u8]) -> Option<&Arc<S>> {
        self.states.get(id)?.as_ref()
    }

    /// Whether an id should be at all: also one whose values cannot be read, which is not an orphan.
    pub fn contains(&self, id: &[u8]) -> bool {
        self.states.contains_key(id)
    }

    /// The ids that can be read, with what they should be.
    pub fn iter(&self) -> impl Iterator<Item = (&Id, &Arc<S>)> {
        self.states.iter().filter_map(|(id, state)| Some((id, state.as_ref()?)))
    }

    /// How many ids there are, unreadable ones included.
    pub fn len(&self) -> usize {
        self.states.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.states.is_empty()
    }
}

/// Why an id is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Trouble {
    /// Failures since the last success or change.
    pub failures: u32,
    /// What the last run died of.
    pub error: Option<String>,
    /// How long until it is tried again.
    pub retry_in: Option<Duration>,
    /// Key types that cannot be read, and why. The last good value stands.
    pub unreadable: Vec<(String, String)>,
}

/// A value that could not be read.
pub(super) struct Unreadable {
    pub(super) id: Id,
    pub(super) kind: String,
    pub(super) error: String,
}

/// What a key did to the table.
pub(super) enum Applied {
    /// Nothing to do.
    Nothing,
    /// This id should be brought about.
    Changed(Slot),
    /// Not of the form prefix, id, slash, key type.
    Malformed(Bytes),
    /// The value stays out.
    Unreadable(Box<Unreadable>),
}

struct Thing<S> {
    /// Nothing if the id is gone, or nothing of it could be read yet.
    state: Option<Arc<S>>,
    /// Its keys, with the revision that last changed each.
    parts: Vec<(Slot, Revision)>,
    unreadable: Vec<Unread>,
    failed: Option<Box<Failed>>,
}

/// A key that cannot be read.
struct Unread {
    kind: Slot,
    why: String,
    /// No good value of it was ever seen, because the id was new when it was listed.
    is_first: bool,
}

struct Failed {
    failures: u32,
    error: String,
    again: Moment,
}

impl<S> Thing<S> {
    /// There is no saying what it should be: it is there, and cannot be read.
    fn is_obscure(&self) -> bool {
        self.unreadable.iter().any(|unread| unread.is_first)
            || self.state.is_none() && !self.parts.is_empty()
    }

    /// Forgets that a key cannot be read.
    fn take_unread(&mut self, kind: Slot) -> Option<Unread> {
        let place = self.unreadable.iter().position(|unread| unread.kind == kind)?;
        Some(self.unreadable.swap_remove(place))
    }
}

impl<S> Default for Thing<S> {
    fn default() -> Self {
        Self { state: None, parts: Vec::new(), unreadable: Vec::new(), failed: None }
    }
}

pub(super) struct Table<S> {
    prefix: Bytes,
    /// Key types to heed; all without one.
    heeded: Option<HashSet<String>>,
    /// Key types that trigger nothing, whatever the state says.
    quiet: HashSet<String>,
    ids: Ids<Id>,
    things: Vec<Thing<S>>,
    kinds: Ids<Box<str>>,
    /// How many keys are of a kind; one without any is forgotten.
    uses: Vec<usize>,
    pub(super) revision: Revision,
    failing: usize,
    /// Ids without a key that are still to be reconciled.
    gone: usize,
}

impl<S: State> Table<S> {
    pub(super) fn new(
        prefix: Bytes,
        heeded: Option<HashSet<String>>,
        quiet: HashSet<String>,
    ) -> Self {
        Self {
            prefix,
            heeded,
            quiet,
            ids: Ids::new(),
            things: Vec::new(),
            kinds: Ids::new(),
            uses: Vec::new(),
            revision: Revision::default(),
            failing: 0,
            gone: 0,
        }
    }

    /// A key was put, or deleted.
    pub(super) fn apply(
        &mut self,
        key: &[u8],
        value: Option<&[u8]>,
        revision: Revision,
    ) -> Applied {
        self.take(key, value, revision, false)
    }

    /// All there is, at `revision`. What is not among it is gone. What is there with the revision that we
    /// know is not looked at again, unless it is `another` history in which revisions mean other things.
    pub(super) fn replace(
        &mut self,
        all: &[Entry],
        revision: Revision,
        another: bool,
    ) -> Vec<Applied> {
        let mut applied = Vec::new();
        let (mut there, mut fresh) = (HashSet::new(), HashSet::new());
        for entry in all {
            let (id, kind) = self.split(&entry.key).unwrap_or_default();
            let part = |table: &Self| table.ids.find(id).zip(table.kinds.find(kind));
            let is_known = |(slot, kind): (Slot, Slot)| {
                self.things[slot.0 as usize].parts.contains(&(kind, entry.modified))
            };
            if another || !part(self).is_some_and(is_known) {
                let found = self.ids.find(id);
                let is_fresh = found.is_none_or(|slot| fresh.contains(&slot));
                applied.push(self.take(&entry.key, Some(&entry.value), entry.modified, is_fresh));
                fresh.extend(self.ids.find(id).filter(|_| is_fresh));
            }
            there.extend(part(self));
        }
        let parts = self.ids.iter().flat_map(|(slot, _)| {
            self.things[slot.0 as usize].parts.iter().map(move |(kind, _)| (slot, *kind))
        });
        let mut gone: Vec<_> = parts.filter(|part| !there.contains(part)).collect();
        gone.sort_unstable();
        for (slot, kind) in gone {
            let kind = self.kinds.key(kind).cloned().unwrap_or_default();
            applied.push(self.delete(slot, &kind));
        }
        self.revision = revision;
        applied
    }

    fn take(
        &mut self,
        key: &[u8],
        value: Option<&[u8]>,
        revision: Revision,
        is_fresh: bool,
    ) -> Applied {
        let Some((id, kind)) = self.split(key) else {
            return Applied::Malformed(Bytes::copy_from_slice(key));
        };
        if self.heeded.as_ref().is_some_and(|heeded| !heeded.contains(kind)) {
            return Applied::Nothing;
        }
        match (self.ids.find(id), value) {
            (Some(slot), Some(value)) => {
                self.gone -= usize::from(self.things[slot.0 as usize].parts.is_empty());
                self.put(slot, kind, value, revision, is_fresh)
            }
            (None, Some(value)) => {
                let slot = self.ids.intern(Id(Bytes::copy_from_slice(id)));
                if slot.0 as usize >= self.things.len() {
                    self.things.resize_with(slot.0 as usize + 1, Thing::default);
                }
                self.put(slot, kind, value, revision, is_fresh)
            }
            (Some(slot), None) => self.delete(slot, kind),
            (None, None) => Applied::Nothing,
        }
    }

    /// What an id should be now, and whether it should be at all. Nothing when there is no saying: it is
    /// there and cannot be read.
    pub(super) fn wanted(&self, slot: Slot) -> Option<(Id, Option<Arc<S>>)> {
        let thing = &self.things[slot.0 as usize];
        if thing.is_obscure() {
            return None;
        }
        Some((self.ids.key(slot)?.clone(), thing.state.clone()))
    }

    pub(super) fn id(&self, slot: Slot) -> Option<&Id> {
        self.ids.key(slot)
    }

    pub(super) fn slots(&self) -> Vec<Slot> {
        let mut slots: Vec<_> = self.ids.iter().map(|(slot, _)| slot).collect();
        slots.sort_unstable();
        slots
    }

    /// Its run failed so often, and is tried again then.
    pub(super) fn failed(&mut self, slot: Slot, failures: u32, error: String, again: Moment) {
        let failed = &mut self.things[slot.0 as usize].failed;
        self.failing += usize::from(failed.is_none());
        *failed = Some(Box::new(Failed { failures, error, again }));
    }

    /// It is tried again then, after a change.
    pub(super) fn changed(&mut self, slot: Slot, again: Moment) {
        if let Some(failed) = &mut self.things[slot.0 as usize].failed {
            (failed.failures, failed.again) = (0, again);
        }
    }

    /// Its run succeeded. An id that is gone is forgotten if nobody wants it again.
    pub(super) fn succeeded(&mut self, slot: Slot, again: bool) {
        let thing = &mut self.things[slot.0 as usize];
        self.failing -= usize::from(thing.failed.take().is_some());
        if !again && thing.parts.is_empty() {
            *thing = Thing::default();
            self.ids.release(slot);
            self.gone -= 1;
        }
    }

    pub(super) fn get(&self, id: &[u8]) -> Option<Arc<S>> {
        let thing = &self.things[self.ids.find(id)?.0 as usize];
        thing.state.clone().filter(|_| !thing.is_obscure())
    }

    pub(super) fn all(&self) -> Wanted<S> {
        let things = self.ids.iter().map(|(slot, id)| (id, &self.things[slot.0 as usize]));
        let there = things.filter(|(_, thing)| !thing.parts.is_empty());
        let state = |thing: &Thing<S>| thing.state.clone().filter(|_| !thing.is_obscure());
        let states = there.map(|(id, thing)| (id.clone(), state(thing))).collect();
        Wanted { revision: self.revision, states }
    }

    /// Ids that exist.
    pub(super) fn len(&self) -> usize {
        self.ids.len() - self.gone
    }

    pub(super) fn failing(&self) -> usize {
        self.failing
    }

    /// Up to `limit` ids that are not as they should be.
    pub(super) fn troubles(&self, limit: usize, now: Moment) -> Vec<(Id, Trouble)> {
        let slots = self.ids.iter().map(|(slot, _)| slot);
        slots.filter_map(|slot| self.trouble(slot, now)).take(limit).collect()
    }

    fn trouble(&self, slot: Slot, now: Moment) -> Option<(Id, Trouble)> {
        let thing = &self.things[slot.0 as usize];
        if thing.failed.is_none() && thing.unreadable.is_empty() {
            return None;
        }
        let mut trouble = Trouble::default();
        if let Some(failed) = &thing.failed {
            trouble.failures = failed.failures;
            trouble.error = Some(failed.error.clone());
            trouble.retry_in = Some(failed.again.since(now));
        }
        for Unread { kind, why, .. } in &thing.unreadable {
            let kind = self.kinds.key(*kind).map(ToString::to_string).unwrap_or_default();
            trouble.unreadable.push((kind, why.clone()));
        }
        Some((self.ids.key(slot)?.clone(), trouble))
    }

    fn split<'a>(&self, key: &'a [u8]) -> Option<(&'a [u8], &'a str)> {
        let rest = key.strip_prefix(&self.prefix[..])?;
        let slash = rest.iter().rposition(|byte| *byte == b'/')?;
        let (id, kind) = (&rest[..slash], str::from_utf8(&rest[slash + 1..]).ok()?);
        (!id.is_empty() && !kind.is_empty()).then_some((id, kind))
    }

    fn put(
        &mut self,
        slot: Slot,
        kind: &str,
        value: &[u8],
        revision: Revision,
        is_fresh: bool,
    ) -> Applied {
        let number = self.kinds.find(kind).unwrap_or_else(|| self.kinds.intern(kind.into()));
        let thing = &mut self.things[slot.0 as usize];
        match thing.parts.iter_mut().find(|(part, _)| *part == number) {
            Some((_, modified)) => *modified = revision,
            None => {
                thing.parts.push((number, revision));
                let place = number.0 as usize;
                self.uses.resize(self.uses.len().max(place + 1), 0);
                self.uses[place] += 1;
            }
        }
        let (was_obscure, was_unread) = (thing.is_obscure(), thing.take_unread(number));
        let applied = self.assemble(slot, kind, Some(value), was_obscure);
        if let Applied::Unreadable(what) = &applied {
            let is_first = is_fresh || was_unread.is_some_and(|unread| unread.is_first);
            let unread = Unread { kind: number, why: what.error.clone(), is_first };
            self.things[slot.0 as usize].unreadable.push(unread);
        }
        applied
    }

    fn delete(&mut self, slot: Slot, kind: &str) -> Applied {
        let Some(number) = self.kinds.find(kind) else { return Applied::Nothing };
        let thing = &mut self.things[slot.0 as usize];
        let Some(part) = thing.parts.iter().position(|(part, _)| *part == number) else {
            return Applied::Nothing;
        };
        let was_obscure = thing.is_obscure();
        thing.parts.swap_remove(part);
        thing.take_unread(number);
        let place = number.0 as usize;
        self.uses[place] -= 1;
        if self.uses[place] == 0 {
            self.kinds.release(number);
        }
        if thing.parts.is_empty() {
            thing.state = None;
            self.gone += 1;
            return Applied::Changed(slot);
        }
        if thing.state.is_none() {
            return Applied::Nothing;
        }
        self.assemble(slot, kind, None, was_obscure)
    }

    /// Takes a value, or that it is gone, into the state of an id.
    fn assemble(
        &mut self,
        slot: Slot,
        kind: &str,
        value: Option<&[u8]>,
        was_obscure: bool,
    ) -> Applied {
        let thing = &mut self.things[slot.0 as usize];
        match effect(thing.state.as_deref(), kind, value) {
            Ok((state, effect)) => {
                thing.state = Some(Arc::new(state));
                let is_wanted = effect == Effect::Wanted && !self.quiet.contains(kind);
                if !thing.is_obscure() && (was_obscure || is_wanted) {
                    return Applied::Changed(slot);
                }
                Applied::Nothing
            }
            Err(error) => {
                let id = self.ids.key(slot).cloned().unwrap_or_else(|| Id(Bytes::new()));
                Applied::Unreadable(Box::new(Unreadable { id, kind: kind.to_owned(), error }))
            }
        }
    }
}

/// The state after a change. The old one is left alone, so that it stands if the value cannot be read.
fn effect<S: State>(
    state: Option<&S>,
    kind: &str,
    value: Option<&[u8]>,
) -> Result<(S, Effect), String> {
    let apply = || {
        let mut next = state.cloned().unwrap_or_default();
        let effect = next.apply(kind, value)?;
        Ok::<_, BoxError>((next, effect))
    };
    match catch_unwind(AssertUnwindSafe(apply)) {
        Ok(Ok(applied)) => Ok(applied),
        Ok(Err(error)) => Err(explain(error.as_ref())),
        Err(panic) => Err(format!("reading it: {}", Failure::of_panic(panic.as_ref()))),
    }
}
