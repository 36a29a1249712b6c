//! Many at once: writers, readers, watchers and compaction, and a checker that is itself checked.

mod check;
mod planted;
mod record;
#[path = "../support/mod.rs"]
mod support;

use std::path::Path;
use std::time::Duration;

use check::{History, check};
use record::{Caller, Clock, Habit, follow};
use support::{open, reopen, soon};
use tokio::task::JoinSet;
use vedetta_core::{KeyRange, Revision};
use vedetta_kv::Store;

/// Lets callers and watchers at a store at once, and adds what they saw to `history`.
async fn crowd(
    store: &Store,
    clock: &Clock,
    callers: std::ops::Range<usize>,
    habits: Vec<Habit>,
    history: &mut History,
) {
    let (ended, end) = tokio::sync::watch::channel(None);
    let mut watchers = JoinSet::new();
    for habit in habits {
        watchers.spawn(follow(store.clone(), clock.clone(), habit, end.clone()));
    }
    let mut busy = JoinSet::new();
    for name in callers {
        let mut caller = Caller::new(store, clock, name);
        busy.spawn(async move {
            for _ in 0..200 {
                caller.act().await;
            }
            caller
        });
    }
    while let Some(caller) = soon(busy.join_next()).await {
        let caller = caller.unwrap();
        history.calls.extend(caller.calls);
        history.marks.extend(caller.marks);
    }
    ended.send(Some(store.status().revision)).unwrap();
    while let Some(watched) = soon(watchers.join_next()).await {
        let (watch, calls) = watched.unwrap();
        history.watches.push(watch);
        history.calls.extend(calls);
    }
}

fn habits(from: Option<Revision>) -> Vec<Habit> {
    let habit = |range, pause| Habit { range, from, pause: Duration::from_millis(pause) };
    vec![
        habit(KeyRange::all(), 0),
        habit(KeyRange::all(), 40),
        habit(KeyRange::One("a/1".into()), 0),
        habit(KeyRange::One("b/2".into()), 25),
        habit(KeyRange::prefix("a/"), 5),
        habit(KeyRange::Between("a/3".into(), "b/1".into()), 0),
    ]
}

/// A crowd, a restart, and another crowd with watchers that begin in the past.
async fn busy_life(folder: &Path) -> History {
    let (clock, mut history) = (Clock::default(), History::default());
    let store = open(folder).await;
    crowd(&store, &clock, 0..4, habits(None), &mut history).await;
    let store = reopen(&store, folder).await;
    let oldest = store.status().compacted;
    let mut both = habits(Some(oldest));
    both.extend(habits(None));
    both.extend(habits(Some(Revision(2)))); // forgotten by now: these begin anew
    crowd(&store, &clock, 4..10, both, &mut history).await;
    store.close().await;
    history
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_many_at_once_see_could_be_seen_of_one_thing_after_another() {
    let folder = tempfile::tempdir().unwrap();
    let history = busy_life(folder.path()).await;
    let writes = history.calls.iter().map(|call| call.revision).max().unwrap();
    let batches: usize =
        history.watches.iter().flat_map(|watch| &watch.stretches).map(|s| s.batches.len()).sum();
    println!(
        "{} answers up to revision {writes}, {} compactions, {} watchers with {batches} batches",
        history.calls.len(),
        history.marks.len(),
        history.watches.len(),
    );
    assert_eq!(check(&history), Ok(()));
    assert!(history.marks.len() > 3, "compaction was to be part of it");
}
