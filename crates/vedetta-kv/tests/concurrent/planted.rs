//! The checker must find what is wrong: each lie is told to it once.

use std::time::Duration;

use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{Change, Event, KeyValue, Stamps};

use crate::check::{Call, Did, Effect, History, Violation, check};
use crate::record::{Caller, Clock, Habit, follow};
use crate::support::open;

/// What one caller and one watcher see: nothing overlaps, so every lie has one place.
async fn quiet_life() -> History {
    let folder = tempfile::tempdir().unwrap();
    let (store, clock) = (open(folder.path()).await, Clock::default());
    let mut caller = Caller::new(&store, &clock, 3);
    while caller.calls.len() < 150 {
        caller.act().await;
    }
    let revision = store.status().revision;
    let habit = Habit {
        range: KeyRange::all(),
        from: Some(store.status().compacted.max(Revision(2))),
        pause: Duration::ZERO,
    };
    let (_, end) = tokio::sync::watch::channel(Some(revision));
    let (mut watch, saw) = follow(store.clone(), clock, habit, end).await;
    store.close().await;
    // A batch per revision, so that there are many.
    for stretch in &mut watch.stretches {
        let events: Vec<Event> = stretch.batches.drain(..).flatten().collect();
        stretch.batches =
            events.chunk_by(|a, b| a.revision == b.revision).map(<[Event]>::to_vec).collect();
    }
    let mut calls = caller.calls;
    calls.extend(saw);
    History { calls, watches: vec![watch], marks: caller.marks }
}

fn batches(history: &mut History) -> &mut Vec<Vec<Event>> {
    &mut history.watches[0].stretches[0].batches
}

/// The place of a batch with several events, in the middle somewhere.
fn transaction(history: &mut History) -> usize {
    let batches = batches(history);
    let from = batches.len() / 3;
    from + batches[from..].iter().position(|batch| batch.len() > 1).expect("a transaction")
}

fn writes(history: &mut History) -> Vec<&mut Call> {
    let wrote = |call: &&mut Call| matches!(call.did, Did::Wrote(_));
    history.calls.iter_mut().filter(wrote).collect()
}

/// A read of the present that found something, well after the beginning.
fn read(history: &mut History) -> &mut Call {
    let found = |call: &&mut Call| {
        call.revision > Revision(20)
            && matches!(&call.did, Did::Read { at, keys, .. } if *at == call.revision && !keys.is_empty())
    };
    history.calls.iter_mut().find(found).expect("a read")
}

fn edited(key: &KeyValue) -> KeyValue {
    let stamps = Stamps {
        created: key.created(),
        modified: key.modified(),
        version: key.version(),
        lease: key.lease(),
    };
    KeyValue::new(stamps, key.key(), b"never written")
}

/// Tells a lie, and returns what must be found.
type Lie = fn(&mut History) -> Violation;

const LIES: [(&str, Lie); 18] = [
    ("an event is dropped", |history| {
        let place = transaction(history);
        let dropped = batches(history)[place].remove(1);
        Violation::Missed(dropped.revision)
    }),
    ("a revision is dropped", |history| {
        let middle = batches(history).len() / 2;
        let dropped = batches(history).remove(middle);
        Violation::Missed(dropped[0].revision)
    }),
    ("the last event is dropped", |history| {
        let dropped = batches(history).pop().unwrap();
        Violation::Missed(dropped[0].revision)
    }),
    ("an event comes twice", |history| {
        let middle = batches(history).len() / 2;
        let again = batches(history)[middle].clone();
        batches(history).insert(middle + 1, again.clone());
        Violation::Twice(again[0].revision)
    }),
    ("an event comes again much later", |history| {
        let again = batches(history)[1].clone();
        batches(history).push(again.clone());
        Violation::Twice(again[0].revision)
    }),
    ("two revisions change places", |history| {
        let middle = batches(history).len() / 2;
        batches(history).swap(middle, middle + 1);
        Violation::OutOfOrder(batches(history)[middle + 1][0].revision)
    }),
    ("two events of a transaction change places", |history| {
        let place = transaction(history);
        batches(history)[place].swap(0, 1);
        Violation::Missed(batches(history)[place][0].revision)
    }),
    ("a transaction comes in two parts", |history| {
        let place = transaction(history);
        let rest = batches(history)[place].split_off(1);
        let revision = rest[0].revision;
        batches(history).insert(place + 1, rest);
        Violation::Split(revision)
    }),
    ("an event has a value nobody wrote", |history| {
        let put =
            batches(history).iter_mut().flatten().skip(5).find(|e| e.now().is_some()).unwrap();
        put.change = Change::Put(edited(put.now().unwrap()));
        Violation::Phantom(put.revision)
    }),
    ("an event has another previous value", |history| {
        let events = batches(history).iter_mut().flatten();
        let event = events.skip(5).find(|event| event.previous.is_some()).unwrap();
        event.previous = event.previous.as_ref().map(edited);
        Violation::WrongPrevious(event.revision)
    }),
    ("an event lacks its previous value", |history| {
        let marks = history.marks.clone();
        let events = batches(history).iter_mut().flatten().skip(5);
        let mut kept = events.filter(|event| !marks.contains(&event.revision));
        let event = kept.find(|event| event.previous.is_some()).unwrap();
        event.previous = None;
        Violation::WrongPrevious(event.revision)
    }),
    ("a read is of the past", |history| {
        // Right for the revision it claims, but that one was over.
        let range = KeyRange::One("nobody".into());
        let call = read(history);
        call.revision = Revision(call.revision.0 - 3);
        call.did = Did::Read { at: call.revision, range, keys: Vec::new() };
        Violation::Stale(call.revision)
    }),
    ("a read has a value nobody wrote", |history| {
        let call = read(history);
        let at = call.revision;
        if let Did::Read { keys, .. } = &mut call.did {
            keys[0] = edited(&keys[0]);
        }
        Violation::Misread(at)
    }),
    ("a read leaves a key out", |history| {
        let call = read(history);
        let at = call.revision;
        if let Did::Read { keys, .. } = &mut call.did {
            keys.pop();
        }
        Violation::Misread(at)
    }),
    ("a read is of what is yet to be asked for", |history| {
        let later = writes(history).last().unwrap().revision;
        let call = read(history);
        call.revision = later;
        Violation::Premature(later)
    }),
    ("an answered write is lost", |history| {
        let lost = writes(history)[20].revision;
        history.calls.retain(|call| call.revision != lost || !matches!(call.did, Did::Wrote(_)));
        Violation::MadeByNobody(lost)
    }),
    ("two writes are told the same revision", |history| {
        let mut writes = writes(history);
        let revision = writes[20].revision;
        writes[21].revision = revision;
        Violation::MadeTwice(revision)
    }),
    ("two writes change places", |history| {
        let mut writes = writes(history);
        let (earlier, later) = (writes[20].revision, writes[21].revision);
        writes[20].revision = later;
        writes[21].revision = earlier;
        Violation::WriteOrder(later)
    }),
];

#[tokio::test]
async fn the_checker_finds_every_planted_lie() {
    let truth = quiet_life().await;
    assert_eq!(check(&truth), Ok(()), "the truth is no lie");
    for (name, lie) in LIES {
        let mut history = truth.clone();
        let violation = lie(&mut history);
        assert_eq!(check(&history), Err(violation), "{name}");
    }
}

#[tokio::test]
async fn the_checker_finds_a_write_that_was_told_a_wrong_past() {
    let truth = quiet_life().await;
    let mut told = 0;
    for n in 0..truth.calls.len() {
        let mut history = truth.clone();
        let call = &mut history.calls[n];
        let Did::Wrote(effects) = &mut call.did else { continue };
        match effects.last_mut() {
            Some(Effect::Put { previous: Some(before), .. }) => *before = edited(before),
            Some(Effect::Delete { previous, .. }) => drop(previous.pop()),
            _ => continue,
        }
        if let Some(Effect::Found { version, .. }) = effects.first_mut() {
            *version += 1;
        }
        assert_eq!(check(&history), Err(Violation::WrongPast(truth.calls[n].revision)));
        told += 1;
    }
    assert!(told > 20);
}
