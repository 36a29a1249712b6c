//! The checker is right: it finds nothing wrong with a sound store, and notices every lie in a story.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tempfile::TempDir;
use torture::bed::{How, memory_folder};
use torture::note::{Ev, Note, Now, What, now_ms};
use torture::story::{LONG, Resumed, Story, WATCHED};
use torture::workload::{Failing, Notes, Workload};
use vedetta_kv::Store;

/// How much of a lease must be over for a renewal to make a difference that can be told.
const AGED: Duration = Duration::from_millis(100);

/// A store and all that was noted while it was filled.
async fn filled(seed: u64) -> (TempDir, Store, Vec<Note>) {
    let folder = memory_folder();
    let store = How::default().open(folder.path()).await.unwrap();
    let told = Arc::new(Mutex::new(Vec::new()));
    let also = Arc::clone(&told);
    let notes: Notes = Arc::new(move |note| also.lock().push(note));
    let workload = Workload {
        seed,
        first_id: 1 << 24,
        writers: 4,
        writes: 40,
        short_leases: false,
        failing: Failing::Wrong,
    };
    workload.run(&store, &Story::default().resume(), &notes).await;
    store.close().await;
    let store = How::default().open(folder.path()).await.unwrap();
    let notes = told.lock().clone();
    (folder, store, notes)
}

async fn violations(store: &Store, notes: &[Note]) -> Vec<String> {
    let mut past = Story::default();
    notes.iter().cloned().for_each(|note| past.note(note));
    past.check(store).await
}

/// A way to falsify the note at a place; `false` when that note cannot be so falsified.
type Lie = fn(&mut Vec<Note>, usize) -> bool;

/// The oldest revision that the store still has: lies about what is older cannot all be noticed.
fn is_kept(store: &Store, revision: u64) -> bool {
    revision > store.status().compacted.0
}

fn revision_of(note: &Note) -> Option<u64> {
    match note {
        Note::Done { revision, .. } | Note::Seen { revision, .. } => Some(*revision),
        _ => None,
    }
}

const LIES: [(&str, Lie); 9] = [
    ("an acknowledged write is said to be refused", |notes, at| {
        let Note::Done { id, .. } = notes[at] else { return false };
        let is_put = |note: &Note| matches!(note, Note::Tried { id: i, what: What::Write { puts, .. } } if *i == id && !puts.is_empty());
        let put = notes.iter().any(is_put);
        notes[at] = Note::Refused { id, why: String::new() };
        put
    }),
    ("a write is acknowledged that was never done", |notes, at| {
        let Note::Done { revision, .. } = notes[at] else { return false };
        let what =
            What::Write { puts: vec!["k/00".into()], deletes: vec![], lease: 0, anew: false };
        notes.push(Note::Tried { id: 3, what });
        notes.push(Note::Done { id: 3, revision: revision + 1_000_000 });
        true
    }),
    ("a write is acknowledged as another revision", |notes, at| match &mut notes[at] {
        Note::Done { revision, .. } => {
            *revision += 1_000_000;
            true
        }
        _ => false,
    }),
    ("a transaction had one more key", |notes, at| {
        let Note::Done { id, .. } = notes[at] else { return false };
        notes.iter_mut().any(|note| match note {
            Note::Tried { id: i, what: What::Write { puts, .. } } if *i == id => {
                let several = puts.len() > 1;
                puts.push("k/99".into());
                several
            }
            _ => false,
        })
    }),
    ("a transaction had one key less", |notes, at| {
        let Note::Done { id, .. } = notes[at] else { return false };
        notes.iter_mut().any(|note| match note {
            Note::Tried { id: i, what: What::Write { puts, .. } } if *i == id => {
                puts.len() > 1 && puts.pop().is_some()
            }
            _ => false,
        })
    }),
    ("a watcher missed a revision", |notes, at| {
        let Note::Seen { watcher, .. } = notes[at] else { return false };
        let later = |note: &Note| matches!(note, Note::Seen { watcher: w, .. } if *w == watcher);
        let not_the_last = notes[at + 1..].iter().any(later);
        notes.remove(at);
        not_the_last
    }),
    ("a watcher saw a revision twice", |notes, at| {
        let seen = matches!(notes[at], Note::Seen { .. });
        let again = notes[at].clone();
        notes.insert(at, again);
        seen
    }),
    ("a watcher saw another value", |notes, at| {
        let Note::Seen { events, .. } = &mut notes[at] else { return false };
        events[0].now = Now::Put { id: Some(4), lease: 0 };
        true
    }),
    ("a watcher saw half of a transaction", |notes, at| {
        let Note::Seen { events, .. } = &mut notes[at] else { return false };
        events.len() > 1 && events.pop().is_some_and(|_: Ev| true)
    }),
];

#[tokio::test]
async fn a_sound_store_is_found_sound_and_every_lie_is_noticed() {
    let (_folder, store, notes) = filled(7).await;
    assert_eq!(violations(&store, &notes).await, [""; 0]);

    for (what, lie) in LIES {
        let mut told = 0;
        for at in (0..notes.len())
            .filter(|&at| revision_of(&notes[at]).is_some_and(|revision| is_kept(&store, revision)))
        {
            let mut lying = notes.clone();
            if lie(&mut lying, at) {
                told += 1;
                let wrong = violations(&store, &lying).await;
                assert!(!wrong.is_empty(), "unnoticed: {what}, at note {at}: {}", notes[at]);
            }
        }
        assert!(told > 0, "there was no way to say that {what}");
    }
    store.close().await;
}

/// A way to falsify what a resumed watcher saw; `false` when that cannot be so falsified.
type ResumedLie = fn(&mut Vec<(u64, Vec<Ev>)>) -> bool;

const RESUMED_LIES: [(&str, ResumedLie); 6] = [
    ("a resumed watcher got nothing", |seen| {
        seen.clear();
        true
    }),
    ("a resumed watcher missed the last revision", |seen| seen.pop().is_some()),
    ("a resumed watcher got a revision twice", |seen| {
        let again = seen[0].clone();
        seen.insert(1, again);
        true
    }),
    ("a resumed watcher got an event twice", |seen| {
        let again = seen[0].1[0].clone();
        seen[0].1.insert(0, again);
        true
    }),
    ("a resumed watcher got revisions out of order", |seen| {
        seen.swap(0, 1);
        true
    }),
    ("a resumed watcher got half of a transaction", |seen| {
        seen.iter_mut().any(|(_, events)| events.len() > 1 && events.pop().is_some())
    }),
];

/// How much a watcher had seen when its process ended.
#[derive(Debug, Clone, Copy)]
enum Ended {
    AtOnce,
    Halfway,
}

impl Ended {
    /// The story of a process that ended so.
    fn story(self, notes: &[Note]) -> Story {
        let seen = notes.iter().filter(|note| matches!(note, Note::Seen { .. })).count();
        let mut left = match self {
            Self::AtOnce => 0,
            Self::Halfway => seen / 2,
        };
        let mut past = Story::default();
        for note in notes {
            if matches!(note, Note::Seen { .. }) {
                if left == 0 {
                    continue;
                }
                left -= 1;
            }
            past.note(note.clone());
        }
        past
    }
}

#[tokio::test]
async fn what_a_resumed_watcher_sees_is_compared_with_the_history_and_every_lie_is_noticed() {
    let (_folder, store, notes) = filled(7).await;
    for ended in [Ended::AtOnce, Ended::Halfway] {
        let mut told = BTreeSet::new();
        let past = ended.story(&notes);
        let honest = past.follow(&store).await;
        let mut checked = past.clone();
        assert_eq!(checked.check_with(&store, &honest).await, [""; 0], "{ended:?}");
        assert_eq!(
            checked.resumed().to_vec(),
            honest.seen.iter().map(Vec::len).collect::<Vec<_>>()
        );
        for watcher in 0..WATCHED.len() {
            assert!(honest.seen[watcher].len() > 1, "{ended:?}: watcher {watcher} has to go on");
            for (what, lie) in RESUMED_LIES {
                let mut lying: Resumed = honest.clone();
                if lie(&mut lying.seen[watcher]) {
                    told.insert(what);
                    let wrong = past.clone().check_with(&store, &lying).await;
                    let named = format!("watcher {watcher}, resumed");
                    assert!(
                        matches!(&wrong[..], [line] if line.starts_with(&named)),
                        "{ended:?}: {what} ({watcher}): {wrong:?}"
                    );
                }
            }
        }
        assert_eq!(told.len(), RESUMED_LIES.len(), "{ended:?}: only {told:?} could be said");
    }
    store.close().await;
}

#[tokio::test]
async fn a_watcher_that_cannot_go_on_hides_nothing_else() {
    let (_folder, store, notes) = filled(7).await;
    let mut past = Ended::AtOnce.story(&notes);
    let mut resumed = past.follow(&store).await;
    assert!(resumed.stuck.is_empty(), "{:?}", resumed.stuck);
    resumed.stuck.insert(0, "it was cut off".into());
    resumed.seen[0].clear();
    resumed.seen[1].clear();
    let wrong = past.check_with(&store, &resumed).await;
    let [stuck, other] = &wrong[..] else { panic!("{wrong:?}") };
    assert_eq!(stuck, "watcher 0 cannot go on: it was cut off");
    assert!(other.starts_with("watcher 1, resumed"), "{other}");
    store.close().await;
}

#[tokio::test]
async fn a_renewal_that_was_forgotten_is_noticed() {
    let (_folder, store, mut notes) = filled(8).await;
    let renewed = |lease: i64, notes: &[Note]| {
        notes.iter().any(|note| matches!(note, Note::Tried { what: What::Renew { lease: l, .. }, .. } if *l == lease))
    };
    // A store may be so quick that a lease is as good as new, and then nothing is forgotten yet.
    let aged = |id| store.lease(id).is_none_or(|info| info.remaining + AGED < LONG);
    while !store.leases().into_iter().all(aged) {
        tokio::time::sleep(AGED / 10).await;
    }
    let mut lied = 0;
    for id in store.leases() {
        if !renewed(id.get(), &notes) {
            lied += 1;
            let what = What::Renew { lease: id.get(), at_ms: now_ms() };
            notes.push(Note::Tried { id: lied, what });
            notes.push(Note::Done { id: lied, revision: 1 });
        }
    }
    assert!(lied > 0, "every lease was renewed");
    let wrong = violations(&store, &notes).await;
    assert!(wrong.iter().any(|line| line.starts_with("lease")), "{wrong:?}");
    store.close().await;
}

#[tokio::test]
async fn a_lease_shorter_than_promised_is_noticed() {
    let (_folder, store, mut notes) = filled(8).await;
    for note in &mut notes {
        if let Note::Tried { what: What::Grant { ttl_ms, .. }, .. } = note {
            *ttl_ms *= 2;
        }
    }
    let wrong = violations(&store, &notes).await;
    assert!(wrong.iter().any(|line| line.starts_with("lease")), "{wrong:?}");
    store.close().await;
}
