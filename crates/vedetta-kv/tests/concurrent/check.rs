//! Whether what was seen could have been seen of one store that does one thing at a time.
//!
//! Every write tells its revision, so the one order there can be is known: nothing is searched. Writes
//! are replayed in that order, and every answer and every watch stream is held against the replay.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{Cause, Change, Event, KeyValue, Stamps};

/// Everything that was seen of a store, from its first revision on.
#[derive(Debug, Clone, Default)]
pub(crate) struct History {
    pub(crate) calls: Vec<Call>,
    pub(crate) watches: Vec<Watch>,
    /// The revisions somebody compacted at.
    pub(crate) marks: BTreeSet<Revision>,
}

/// One call and its answer. Times are ticks of one clock that all share.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) called: u64,
    pub(crate) returned: u64,
    /// Where the store was, as the answer says.
    pub(crate) revision: Revision,
    pub(crate) did: Did,
}

#[derive(Debug, Clone)]
pub(crate) enum Did {
    /// It made this revision.
    Wrote(Vec<Effect>),
    /// It read these keys as of some revision.
    Read { at: Revision, range: KeyRange, keys: Vec<KeyValue> },
    /// A watcher was handed events up to this revision.
    Saw,
}

#[derive(Debug, Clone)]
pub(crate) enum Effect {
    /// It found the key in this version before.
    Found { key: Bytes, version: u64 },
    /// It gave the key this value, and was told what was before.
    Put { key: Bytes, value: Bytes, previous: Option<KeyValue> },
    /// It deleted the range, and was told what was in it.
    Delete { range: KeyRange, previous: Vec<KeyValue> },
}

/// What a watcher was handed.
#[derive(Debug, Clone)]
pub(crate) struct Watch {
    pub(crate) range: KeyRange,
    /// It was stopped when it had passed this revision.
    pub(crate) end: Revision,
    /// A new one begins where the watcher had to begin anew after compaction.
    pub(crate) stretches: Vec<Stretch>,
}

#[derive(Debug, Clone)]
pub(crate) struct Stretch {
    pub(crate) from: Revision,
    pub(crate) batches: Vec<Vec<Event>>,
}

/// What cannot be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Violation {
    /// Two writes made the same revision.
    MadeTwice(Revision),
    /// Nobody made this revision.
    MadeByNobody(Revision),
    /// A later write has an earlier revision.
    WriteOrder(Revision),
    /// It was seen before it was asked for.
    Premature(Revision),
    /// An answer is older than one that somebody had before.
    Stale(Revision),
    /// A read is not what the writes made.
    Misread(Revision),
    /// A write was told another past than there was.
    WrongPast(Revision),
    /// A watcher got an earlier event after a later one.
    OutOfOrder(Revision),
    /// A watcher got an event again.
    Twice(Revision),
    /// A watcher got a transaction in parts.
    Split(Revision),
    /// A watcher got what nobody wrote.
    Phantom(Revision),
    /// A watcher did not get an event.
    Missed(Revision),
    /// An event has another previous value than there was.
    WrongPrevious(Revision),
}

pub(crate) fn check(history: &History) -> Result<(), Violation> {
    let writes = in_order(&history.calls)?;
    real_time(&history.calls, &writes)?;
    let replay = Replay::of(&writes)?;
    replay.check_reads(&history.calls)?;
    for watch in &history.watches {
        for (n, stretch) in watch.stretches.iter().enumerate() {
            check_shape(stretch)?;
            let anew = watch.stretches.get(n + 1).map(|next| next.from);
            replay.check_stretch(watch, stretch, anew, &history.marks)?;
        }
    }
    Ok(())
}

type Writes<'h> = BTreeMap<Revision, (&'h Call, &'h [Effect])>;

/// The writes by revision: each made once, none left out.
fn in_order(calls: &[Call]) -> Result<Writes<'_>, Violation> {
    let mut writes = Writes::new();
    for call in calls {
        if let Did::Wrote(effects) = &call.did
            && writes.insert(call.revision, (call, effects)).is_some()
        {
            return Err(Violation::MadeTwice(call.revision));
        }
    }
    for (&revision, expected) in writes.keys().zip(2..) {
        if revision != Revision(expected) {
            return Err(Violation::MadeByNobody(Revision(expected)));
        }
    }
    Ok(writes)
}

/// What had returned before something else was called must come before it.
fn real_time(calls: &[Call], writes: &Writes<'_>) -> Result<(), Violation> {
    let mut last_called = 0;
    for (revision, (write, _)) in writes {
        if write.returned < last_called {
            return Err(Violation::WriteOrder(*revision));
        }
        last_called = last_called.max(write.called);
    }
    for call in calls.iter().filter(|call| call.revision > Revision::FRESH) {
        match writes.get(&call.revision) {
            None => return Err(Violation::MadeByNobody(call.revision)),
            Some((write, _)) if write.called > call.returned => {
                return Err(Violation::Premature(call.revision));
            }
            Some(_) => {}
        }
    }
    let (mut by_called, mut by_returned): (Vec<_>, Vec<_>) =
        (calls.iter().collect(), calls.iter().collect());
    by_called.sort_by_key(|call| call.called);
    by_returned.sort_by_key(|call| call.returned);
    let mut returned = by_returned.into_iter().peekable();
    let mut known = Revision(0);
    for call in by_called {
        while let Some(earlier) = returned.next_if(|earlier| earlier.returned < call.called) {
            known = known.max(earlier.revision);
        }
        // A watcher may be behind; nobody may be behind what a watcher has shown.
        if call.revision < known && !matches!(call.did, Did::Saw) {
            return Err(Violation::Stale(call.revision));
        }
    }
    Ok(())
}

type State = BTreeMap<Bytes, KeyValue>;

/// The writes done again, one after the other.
struct Replay {
    /// The state at each revision.
    states: Vec<State>,
    events: Vec<Event>,
}

impl Replay {
    fn of(writes: &Writes<'_>) -> Result<Self, Violation> {
        let mut replay = Self { states: vec![State::new(); 2], events: Vec::new() };
        for (&revision, (_, effects)) in writes {
            let mut now = replay.states.last().cloned().unwrap_or_default();
            for effect in *effects {
                replay.apply(revision, &mut now, effect)?;
            }
            replay.states.push(now);
        }
        Ok(replay)
    }

    fn apply(
        &mut self,
        revision: Revision,
        now: &mut State,
        effect: &Effect,
    ) -> Result<(), Violation> {
        let wrong = Err(Violation::WrongPast(revision));
        match effect {
            Effect::Found { key, version } => {
                if now.get(key).map_or(0, KeyValue::version) != *version {
                    return wrong;
                }
            }
            Effect::Put { key, value, previous: told } => {
                let previous = now.get(key).cloned();
                if previous != *told {
                    return wrong;
                }
                let stamps = Stamps {
                    created: previous.as_ref().map_or(revision, KeyValue::created),
                    modified: revision,
                    version: previous.as_ref().map_or(0, KeyValue::version) + 1,
                    lease: None,
                };
                let after = KeyValue::new(stamps, key, value);
                now.insert(key.clone(), after.clone());
                self.events.push(Event { revision, change: Change::Put(after), previous, tag: 0 });
            }
            Effect::Delete { range, previous: told } => {
                if within(now, range) != *told {
                    return wrong;
                }
                for before in told {
                    let key = Bytes::copy_from_slice(before.key());
                    let previous = now.remove(&key);
                    let change = Change::Delete { key, cause: Cause::Asked };
                    self.events.push(Event { revision, change, previous, tag: 0 });
                }
            }
        }
        Ok(())
    }

    fn check_reads(&self, calls: &[Call]) -> Result<(), Violation> {
        for call in calls {
            if let Did::Read { at, range, keys } = &call.did {
                let state = usize::try_from(at.0).ok().and_then(|at| self.states.get(at));
                if state.is_none_or(|state| within(state, range) != *keys) {
                    return Err(Violation::Misread(*at));
                }
            }
        }
        Ok(())
    }

    /// All that was owed and nothing else, with what was before. Where history was compacted under the
    /// watcher, it may miss what lies before it began `anew`.
    fn check_stretch(
        &self,
        watch: &Watch,
        stretch: &Stretch,
        anew: Option<Revision>,
        marks: &BTreeSet<Revision>,
    ) -> Result<(), Violation> {
        let range = &watch.range;
        let owed = |event: &&Event| {
            (stretch.from..=watch.end).contains(&event.revision) && holds(range, event.key())
        };
        let mut owed = self.events.iter().filter(owed).peekable();
        for got in stretch.batches.iter().flatten() {
            let same = |event: &Event| event.revision == got.revision && event.change == got.change;
            if !self.events.iter().any(same) || !holds(range, got.key()) {
                return Err(Violation::Phantom(got.revision));
            }
            let Some(want) = owed.next() else { return Err(Violation::Phantom(got.revision)) };
            if !same(want) {
                return Err(Violation::Missed(want.revision));
            }
            let forgotten = got.previous.is_none() && marks.contains(&got.revision);
            if got.previous != want.previous && !forgotten {
                return Err(Violation::WrongPrevious(got.revision));
            }
        }
        match (owed.next(), anew) {
            (None, _) => Ok(()),
            (Some(missed), Some(anew)) if missed.revision < anew => Ok(()),
            (Some(missed), _) => Err(Violation::Missed(missed.revision)),
        }
    }
}

/// In order, each once, transactions whole: what can be told without knowing what was written.
fn check_shape(stretch: &Stretch) -> Result<(), Violation> {
    let mut seen = BTreeSet::new();
    let mut last = Revision(0);
    for batch in &stretch.batches {
        for (n, event) in batch.iter().enumerate() {
            if !seen.insert((event.revision, event.key())) {
                return Err(Violation::Twice(event.revision));
            }
            if event.revision < last {
                return Err(Violation::OutOfOrder(event.revision));
            }
            if n == 0 && event.revision == last {
                return Err(Violation::Split(event.revision));
            }
            last = event.revision;
        }
    }
    Ok(())
}

fn within(state: &State, range: &KeyRange) -> Vec<KeyValue> {
    state.values().filter(|key| holds(range, key.key())).cloned().collect()
}

fn holds(range: &KeyRange, key: &[u8]) -> bool {
    match range {
        KeyRange::One(only) => key == &only[..],
        KeyRange::Between(start, end) => key >= &start[..] && key < &end[..],
        KeyRange::From(start) => key >= &start[..],
    }
}
