//! Compares a store with what is known of its past.
//!
//! The story takes in notes. [`Story::check`] then reads everything out of a store that was reopened
//! after a disaster, its whole history first, and lists what cannot be: a violation per line, none if
//! the store kept its promises. It never panics, for a planted bug must be reported like a real one.
//!
//! Watchers go on after the disaster where each had left off: [`Story::follow`] has them read up to the newest
//! revision, for one that stays silent has seen nothing wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{KeyValue, LeaseId, Range, Store, WatchOptions};

use crate::note::{Ev, Note, Now, What, author, now_ms};

/// Leases that last this long do not end during a test.
pub const LONG: Duration = Duration::from_secs(3600);
/// What watchers watch, by prefix; the first watches everything.
pub const WATCHED: [&str; 3] = ["", "k/1", "l/"];
/// Nothing takes so long; longer is a hang.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Everything known of a store's past.
#[derive(Debug, Clone)]
pub struct Story {
    tries: BTreeMap<u64, Try>,
    /// Acknowledged writes by their revision.
    done: BTreeMap<u64, u64>,
    /// Whole revisions, as watchers saw them or a check read them.
    known: BTreeMap<u64, Vec<Ev>>,
    tracks: Vec<Track>,
    /// When the last renewal of a lease was asked for that was acknowledged.
    renewed: BTreeMap<i64, u64>,
    /// The highest revision that somebody was told of.
    highest: u64,
    /// How many revisions each watcher saw that went on, at the last check.
    resumed: [usize; WATCHED.len()],
    /// What was wrong before any check.
    wrong: Vec<String>,
}

#[derive(Debug, Clone)]
struct Try {
    what: What,
    outcome: Outcome,
    /// The process that tried it ended when the store was here: it cannot happen later.
    not_after: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Unknown,
    Done(u64),
    Refused,
}

/// What one watcher saw, over all restarts.
#[derive(Debug, Clone)]
struct Track {
    /// Compared with the history from here on.
    from: u64,
    /// Where it goes on.
    next: u64,
    seen: BTreeMap<u64, Vec<Ev>>,
}

/// A watcher that is gone after some revisions: the others keep up with the store, and have little left to see when they
/// go on.
#[derive(Debug, Clone, Default)]
pub struct Away {
    watcher: usize,
    /// How many notes of it are still taken.
    notes: usize,
}

impl Away {
    /// One of [`WATCHED`].
    pub fn by(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        Self { watcher: rng.usize(..WATCHED.len()), notes: rng.usize(..12) }
    }

    /// Whether nobody is there any more to make this note.
    pub fn misses(&mut self, note: &Note) -> bool {
        let (Note::Seen { watcher, .. } | Note::Compacted { watcher, .. }) = note else {
            return false;
        };
        if *watcher != self.watcher {
            return false;
        }
        let gone = self.notes == 0;
        self.notes = self.notes.saturating_sub(1);
        gone
    }
}

/// What watchers see that go on where each has left off.
#[derive(Debug, Clone)]
pub struct Resumed {
    /// The newest revision, up to which they read.
    pub until: u64,
    /// Revisions as they came, for each watcher of [`WATCHED`].
    pub seen: Vec<Vec<(u64, Vec<Ev>)>>,
    /// Those that cannot go on, and why.
    pub stuck: BTreeMap<usize, String>,
}

/// A key as a replay of the history makes it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Replayed {
    id: Option<u64>,
    created: u64,
    modified: u64,
    version: u64,
    lease: i64,
}

impl From<&KeyValue> for Replayed {
    fn from(key: &KeyValue) -> Self {
        Self {
            id: author(key.value()),
            created: key.created().0,
            modified: key.modified().0,
            version: key.version(),
            lease: key.lease().map_or(0, LeaseId::get),
        }
    }
}

type State = BTreeMap<String, Replayed>;

impl Default for Story {
    fn default() -> Self {
        let track = Track { from: 1, next: 1, seen: BTreeMap::new() };
        Self {
            tries: BTreeMap::new(),
            done: BTreeMap::new(),
            known: BTreeMap::new(),
            tracks: vec![track; WATCHED.len()],
            renewed: BTreeMap::new(),
            highest: Revision::FRESH.0,
            resumed: [0; WATCHED.len()],
            wrong: Vec::new(),
        }
    }
}

impl Story {
    /// Where each watcher of [`WATCHED`] goes on.
    pub fn resume(&self) -> Vec<u64> {
        self.tracks.iter().map(|track| track.next).collect()
    }

    /// How many revisions each watcher of [`WATCHED`] saw at the last check, where it went on.
    pub fn resumed(&self) -> [usize; WATCHED.len()] {
        self.resumed
    }

    /// How many writes were acknowledged.
    pub fn acknowledged(&self) -> usize {
        self.tries.values().filter(|t| matches!(t.outcome, Outcome::Done(_))).count()
    }

    /// Takes in a note.
    pub fn note(&mut self, note: Note) {
        match note {
            Note::Tried { id, what } => {
                let new = Try { what, outcome: Outcome::Unknown, not_after: None };
                self.tries.insert(id, new);
            }
            Note::Done { id, revision } => self.acknowledge(id, revision),
            Note::Refused { id, .. } => {
                if let Some(refused) = self.tries.get_mut(&id) {
                    refused.outcome = Outcome::Refused;
                }
            }
            Note::Failed { .. } => {} // as unknown as it was
            Note::Seen { watcher, at_ms, revision, events } => {
                self.saw(watcher, at_ms, revision, events);
            }
            Note::Compacted { watcher, oldest } => {
                let track = &mut self.tracks[watcher];
                if oldest <= track.next {
                    let next = track.next;
                    self.wrong.push(format!(
                        "watcher {watcher} at {next} was told that {oldest} is the oldest kept"
                    ));
                }
                (track.from, track.next) = (oldest, oldest);
            }
            Note::Trouble(what) => self.wrong.push(what),
        }
    }

    fn acknowledge(&mut self, id: u64, revision: u64) {
        let Some(done) = self.tries.get_mut(&id) else {
            return self.wrong.push(format!("{id} was acknowledged but never tried"));
        };
        done.outcome = Outcome::Done(revision);
        self.highest = self.highest.max(revision);
        if let What::Renew { lease, at_ms } = done.what {
            let last = self.renewed.entry(lease).or_default();
            *last = at_ms.max(*last);
        }
        if matches!(done.what, What::Write { .. })
            && let Some(other) = self.done.insert(revision, id)
            && other != id
        {
            self.wrong.push(format!("revision {revision} was given to both {other} and {id}"));
        }
    }

    fn saw(&mut self, watcher: usize, at_ms: u64, revision: u64, events: Vec<Ev>) {
        let track = &mut self.tracks[watcher];
        if revision < track.next {
            self.wrong.push(format!("watcher {watcher} saw {revision} twice, or out of order"));
        }
        let first = track.next.max(Revision::FRESH.next().0);
        if WATCHED[watcher].is_empty() && revision > first {
            self.wrong.push(format!("watcher {watcher} missed {first} to {}", revision - 1));
        }
        track.next = revision + 1;
        self.highest = self.highest.max(revision);
        for event in events.iter().filter(|e| e.now == Now::Gone { expired: true }) {
            self.wrong.extend(self.too_early(event, at_ms));
        }
        if WATCHED[watcher].is_empty() {
            let disagreement = self.learn(revision, &events);
            self.wrong.extend(disagreement);
        }
        self.tracks[watcher].seen.insert(revision, events);
    }

    fn too_early(&self, event: &Ev, at_ms: u64) -> Option<String> {
        let What::Grant { lease, ttl_ms, at_ms: tried } = self.grant_of(&event.key)?.what else {
            return None;
        };
        let tried = self.renewed.get(&lease).copied().unwrap_or_default().max(tried);
        // The clock of the note has whole milliseconds.
        (at_ms + 1 < tried + ttl_ms)
            .then(|| format!("{} expired {} ms early", event.key, tried + ttl_ms - at_ms))
    }

    /// The lease a key like `l/LEASE/n` was put with, or that of the directory `t/LEASE/` that it is below.
    fn grant_of(&self, key: &str) -> Option<&Try> {
        let leased = key.strip_prefix("l/").or_else(|| key.strip_prefix("t/"))?;
        let lease: u64 = leased.split('/').next()?.parse().ok()?;
        self.tries.get(&lease).filter(|t| matches!(t.what, What::Grant { .. }))
    }

    /// Notes what a revision was, or that two sources disagree.
    fn learn(&mut self, revision: u64, events: &[Ev]) -> Option<String> {
        let before = self.known.insert(revision, events.to_vec())?;
        (before != events)
            .then(|| format!("revision {revision} was {before:?} and is now {events:?}"))
    }

    /// Lets the watchers go on in `store` until each has come to its newest revision. The story does not change: the
    /// watchers of a workload go on from where they were, too.
    pub async fn follow(&self, store: &Store) -> Resumed {
        let until = store.revision().0;
        let (mut seen, mut stuck) = (Vec::new(), BTreeMap::new());
        for (watcher, track) in self.tracks.iter().enumerate() {
            let following = follow(store, WATCHED[watcher], track.resume(store), until);
            let followed = tokio::time::timeout(PATIENCE, following).await;
            let followed = followed.unwrap_or_else(|_| Err("it waits forever".to_owned()));
            seen.push(followed.unwrap_or_else(|why| {
                stuck.insert(watcher, why);
                Vec::new()
            }));
        }
        Resumed { until, seen, stuck }
    }

    /// Lets the watchers go on, reads the whole store and lists what cannot be. The story then knows what the store
    /// knows, and that no write under way until now can still come.
    pub async fn check(&mut self, store: &Store) -> Vec<String> {
        let resumed = self.follow(store).await;
        self.check_with(store, &resumed).await
    }

    /// The same, when the watchers have gone on already.
    pub async fn check_with(&mut self, store: &Store, resumed: &Resumed) -> Vec<String> {
        let mut wrong = std::mem::take(&mut self.wrong);
        let stuck = resumed.stuck.iter();
        wrong.extend(stuck.map(|(watcher, why)| format!("watcher {watcher} cannot go on: {why}")));
        match tokio::time::timeout(PATIENCE, self.compare(store, resumed, &mut wrong)).await {
            Ok(Ok(())) => {}
            Ok(Err(broken)) => wrong.push(broken),
            Err(_) => wrong.push("reading the store takes forever".to_owned()),
        }
        wrong
    }

    async fn compare(
        &mut self,
        store: &Store,
        resumed: &Resumed,
        wrong: &mut Vec<String>,
    ) -> Result<(), String> {
        let status = store.status();
        let (current, compacted) = (status.revision.0, status.compacted.0);
        if current < self.highest {
            wrong.push(format!("went back from revision {} to {current}", self.highest));
        }
        let base = compacted.max(Revision::FRESH.0);
        let history = history(store, base, current, wrong).await?;
        let first = history.keys().next().map_or(current + 1, |first| *first);
        let expected = if compacted > Revision::FRESH.0 { base } else { base + 1 };
        if first != expected && current >= expected {
            wrong.push(format!("the history starts at {first}, not at {expected}"));
        }
        for (&revision, events) in &history {
            wrong.extend(self.judge(revision, events));
        }
        for (&revision, &id) in self.done.range(base..) {
            if revision <= current && !history.contains_key(&revision) {
                wrong.push(format!("{id}, acknowledged as revision {revision}, is gone"));
            } else if revision > current {
                wrong.push(format!("{id}, acknowledged as revision {revision}, was lost"));
            }
        }
        for (&revision, events) in &history {
            wrong.extend(self.learn(revision, events));
        }
        self.check_tokens(wrong);

        let mut state = read_at(store, base).await?;
        self.check_base(base, &state, wrong);
        let mut samples: BTreeSet<u64> =
            std::iter::repeat_with(|| fastrand::u64(base..=current)).take(4).collect();
        samples.insert(current);
        for (&revision, events) in history.range(base + 1..) {
            self.replay(&mut state, revision, events);
            if samples.contains(&revision) && read_at(store, revision).await? != state {
                wrong.push(format!("a read at {revision} is not what the history makes of it"));
            }
        }
        self.check_tracks(current, wrong);
        self.check_resumed(store, resumed, &history, wrong);
        self.check_leases(store, &state, wrong);
        self.settle(current, &history);
        Ok(())
    }

    /// Whether somebody tried just this revision.
    fn judge(&self, revision: u64, events: &[Ev]) -> Option<String> {
        let puts = || events.iter().filter(|e| matches!(e.now, Now::Put { .. }));
        let gone = || events.iter().filter(|e| matches!(e.now, Now::Gone { .. }));
        let ids: BTreeSet<Option<u64>> = puts()
            .map(|event| match event.now {
                Now::Put { id, .. } => id,
                Now::Gone { .. } => None,
            })
            .collect();
        let answered = self.done.get(&revision);
        let cannot_be = |why: &str| Some(format!("revision {revision} {why}: {events:?}"));
        match ids.iter().collect::<Vec<_>>()[..] {
            [] => match answered.and_then(|id| self.tries.get(id)) {
                Some(Try { what: What::Write { puts, deletes, .. }, .. }) => {
                    let as_tried =
                        puts.is_empty() && gone().all(|event| deletes.contains(&event.key));
                    if as_tried { None } else { cannot_be("is not what was acknowledged") }
                }
                _ if gone().all(|event| self.may_go(event, revision)) => None,
                _ => cannot_be("deletes what nobody deleted"),
            },
            [Some(id)] => {
                let Some(Try { what: What::Write { puts: keys, deletes, lease, anew }, .. }) =
                    self.tries.get(id)
                else {
                    return cannot_be("was never tried");
                };
                let attempt = &self.tries[id];
                let found: BTreeSet<_> = puts().map(|event| &event.key).collect();
                let is_gone = |key: &String| gone().any(|event| event.key == *key);
                let leased =
                    |event: &&Ev| matches!(event.now, Now::Put { lease: l, .. } if l == *lease);
                match attempt.outcome {
                    Outcome::Refused => cannot_be("was refused"),
                    Outcome::Done(other) if other != revision => {
                        cannot_be(&format!("was acknowledged as {other}"))
                    }
                    _ if attempt.not_after.is_some_and(|last| last < revision) => {
                        cannot_be("came after its process had ended")
                    }
                    _ if answered.is_some_and(|other| other != id) => {
                        cannot_be("was acknowledged to somebody else")
                    }
                    _ if found != keys.iter().collect() => cannot_be("is there in part"),
                    _ if !puts().all(|event| leased(&event)) => cannot_be("has the wrong lease"),
                    _ if gone().any(|event| !deletes.contains(&event.key)) => {
                        cannot_be("deletes more than was tried")
                    }
                    _ if *anew && !deletes.iter().all(is_gone) => {
                        cannot_be("does not tell of a delete")
                    }
                    _ => None,
                }
            }
            _ => cannot_be("mixes values, or has one that nobody wrote"),
        }
    }

    /// Whether somebody may have deleted that key there.
    fn may_go(&self, event: &Ev, revision: u64) -> bool {
        let in_time = |t: &Try| {
            t.not_after.is_none_or(|last| revision <= last)
                && match t.outcome {
                    Outcome::Unknown => true,
                    Outcome::Done(done) => done == revision,
                    Outcome::Refused => false,
                }
        };
        if event.now == (Now::Gone { expired: true }) {
            return self.may_expire(&event.key);
        }
        self.tries.values().any(|t| match &t.what {
            What::Write { puts, deletes, .. } => {
                puts.is_empty() && deletes.contains(&event.key) && in_time(t)
            }
            What::Revoke { lease } => {
                let of_it = |kind| event.key.starts_with(&format!("{kind}/{lease}/"));
                (of_it("l") || of_it("t")) && in_time(t)
            }
            _ => false,
        })
    }

    fn may_expire(&self, key: &str) -> bool {
        self.grant_of(key).is_some_and(|grant| {
            matches!(grant.what, What::Grant { ttl_ms, .. } if u128::from(ttl_ms) < LONG.as_millis())
        })
    }

    /// A try happens once.
    fn check_tokens(&self, wrong: &mut Vec<String>) {
        let mut at = BTreeMap::new();
        for (&revision, events) in &self.known {
            for event in events {
                if let Now::Put { id: Some(id), .. } = event.now
                    && let Some(other) = at.insert(id, revision)
                    && other != revision
                {
                    wrong.push(format!("{id} happened twice, at {other} and at {revision}"));
                }
            }
        }
    }

    /// The state from which the kept history starts, against what is known from before.
    fn check_base(&self, base: u64, state: &State, wrong: &mut Vec<String>) {
        let mut latest: BTreeMap<&str, (u64, Now)> = BTreeMap::new();
        let mut learn = |key, revision, now| {
            let entry = latest.entry(key).or_insert((revision, now));
            if entry.0 <= revision {
                *entry = (revision, now);
            }
        };
        for (&revision, &id) in self.done.range(..=base) {
            if let Some(Try { what: What::Write { puts, deletes, lease, .. }, .. }) =
                self.tries.get(&id)
            {
                let put = Now::Put { id: Some(id), lease: *lease };
                puts.iter().for_each(|key| learn(key, revision, put));
                deletes.iter().for_each(|key| learn(key, revision, Now::Gone { expired: false }));
            }
        }
        for (&revision, events) in self.known.range(..=base) {
            events.iter().for_each(|event| learn(&event.key, revision, event.now));
        }
        for (key, found) in state {
            match latest.get(&**key) {
                Some(&(revision, now)) if revision >= found.modified => {
                    if (now, revision)
                        != (Now::Put { id: found.id, lease: found.lease }, found.modified)
                    {
                        wrong.push(format!("at {base}, {key} is {found:?}, but {now:?} was last"));
                    }
                }
                _ => {
                    let event =
                        Ev { key: key.clone(), now: Now::Put { id: found.id, lease: found.lease } };
                    let known = found.id.and_then(|id| self.tries.get(&id));
                    if known.is_none_or(|t| t.outcome != Outcome::Unknown) {
                        wrong.push(format!("at {base}, nobody can have done {event}"));
                    }
                }
            }
        }
        for (key, (revision, now)) in latest {
            let event = Ev { key: key.to_owned(), now: Now::Gone { expired: false } };
            if matches!(now, Now::Put { .. })
                && !state.contains_key(key)
                && !self.may_expire(key)
                && !(revision + 1..=base).any(|revision| self.may_go_unseen(&event, revision))
            {
                wrong.push(format!("{key}, put at {revision}, is gone at {base}"));
            }
        }
    }

    /// Whether a delete may have happened there that nobody was told of; a transaction may have
    /// deleted it, too.
    fn may_go_unseen(&self, event: &Ev, revision: u64) -> bool {
        !self.known.contains_key(&revision)
            && (self.may_go(event, revision)
                || self.tries.values().any(|t| {
                    t.outcome == Outcome::Unknown
                        && matches!(&t.what, What::Write { deletes, .. } if deletes.contains(&event.key))
                }))
    }

    /// Each watcher saw every event of its keys, once. Where a revision was compacted before anybody
    /// else saw it there is nothing to compare with.
    fn check_tracks(&mut self, current: u64, wrong: &mut Vec<String>) {
        for (watcher, track) in self.tracks.iter_mut().enumerate() {
            let prefix = WATCHED[watcher];
            for (&revision, events) in self.known.range(track.from..track.next.max(track.from)) {
                let of_it = |event: &&Ev| event.key.starts_with(prefix);
                let expected: Vec<Ev> = events.iter().filter(of_it).cloned().collect();
                let seen = track.seen.get(&revision).map_or(&[][..], |events| events);
                if expected != seen {
                    wrong.push(format!(
                        "watcher {watcher} saw {seen:?} at {revision}, but there is {expected:?}"
                    ));
                }
            }
            if let Some((last, _)) = track.seen.last_key_value().filter(|(r, _)| **r > current) {
                wrong.push(format!("watcher {watcher} saw {last}, which was lost"));
            }
            track.from = track.next;
            track.seen.clear();
        }
    }

    /// Each watcher that went on saw the rest of its keys' history, each event once and in order.
    fn check_resumed(
        &mut self,
        store: &Store,
        resumed: &Resumed,
        history: &BTreeMap<u64, Vec<Ev>>,
        wrong: &mut Vec<String>,
    ) {
        for (watcher, track) in self.tracks.iter().enumerate() {
            let of_it = |event: &&Ev| event.key.starts_with(WATCHED[watcher]);
            let mut expected: Vec<(u64, Vec<Ev>)> = Vec::new();
            for (&revision, events) in history.range(track.resume(store)..) {
                let events: Vec<Ev> = events.iter().filter(of_it).cloned().collect();
                if revision <= resumed.until && !events.is_empty() {
                    expected.push((revision, events));
                }
            }
            let seen = resumed.seen.get(watcher).map_or(&[][..], |seen| seen);
            self.resumed[watcher] = seen.len();
            if resumed.stuck.contains_key(&watcher) {
                continue;
            }
            let differs = (0..expected.len().max(seen.len()))
                .find(|&place| expected.get(place) != seen.get(place));
            if let Some(place) = differs {
                wrong.push(format!(
                    "watcher {watcher}, resumed at {}, saw {:?}, but next is {:?}",
                    track.next,
                    seen.get(place),
                    expected.get(place)
                ));
            }
        }
    }

    fn check_leases(&self, store: &Store, state: &State, wrong: &mut Vec<String>) {
        let mut revoked = BTreeMap::new();
        for t in self.tries.values() {
            if let What::Revoke { lease } = t.what
                && t.outcome != Outcome::Refused
            {
                revoked.insert(lease, t.outcome);
            }
        }
        let granted = |lease: i64| self.tries.get(&lease.cast_unsigned());
        let trees: BTreeSet<i64> = self.tries.values().filter_map(Try::tree).collect();
        for id in store.leases() {
            // Both were made by one update.
            if trees.contains(&id.get()) && store.lease(id).is_some_and(|info| info.keys.is_empty())
            {
                wrong.push(format!("lease {} is there without its directory", id.get()));
            }
            match granted(id.get()) {
                Some(Try { what: What::Grant { .. }, outcome, .. })
                    if *outcome != Outcome::Refused => {}
                _ => wrong.push(format!("there is a lease {} that nobody granted", id.get())),
            }
        }
        for (&id, t) in &self.tries {
            let What::Grant { lease, ttl_ms, at_ms } = t.what else { continue };
            let info = LeaseId::new(lease).and_then(|id| store.lease(id));
            let now = now_ms(); // not before: what is left shrinks meanwhile
            match (revoked.get(&lease), info) {
                (Some(Outcome::Done(_)), Some(_)) => {
                    wrong.push(format!("lease {id} was revoked and is back"));
                }
                (None, info)
                    if matches!(t.outcome, Outcome::Done(_))
                        && u128::from(ttl_ms) >= LONG.as_millis() =>
                {
                    let Some(info) = info else {
                        wrong.push(format!("lease {id} is gone"));
                        continue;
                    };
                    let at_ms = self.renewed.get(&lease).copied().unwrap_or_default().max(at_ms);
                    let left = u64::try_from(info.remaining.as_millis()).unwrap_or(u64::MAX);
                    let at_least = ttl_ms.saturating_sub(now.saturating_sub(at_ms) + 1);
                    if left < at_least {
                        wrong.push(format!("lease {id} has {left} ms, less than {at_least}"));
                    }
                    let keys: Vec<String> = info
                        .keys
                        .iter()
                        .map(|key| String::from_utf8_lossy(key).into_owned())
                        .collect();
                    let expected: Vec<String> = state
                        .iter()
                        .filter(|(_, key)| key.lease == lease)
                        .map(|(key, _)| key.clone())
                        .collect();
                    if keys != expected {
                        wrong.push(format!("lease {id} has {keys:?}, not {expected:?}"));
                    }
                }
                _ => {}
            }
        }
    }

    /// What a revision makes of a state.
    fn replay(&self, state: &mut State, revision: u64, events: &[Ev]) {
        let anew = |id: Option<u64>| {
            let found = id.and_then(|id| self.tries.get(&id));
            found.is_some_and(|t| matches!(t.what, What::Write { anew: true, .. }))
        };
        for event in events {
            match event.now {
                Now::Gone { .. } => drop(state.remove(&event.key)),
                Now::Put { id, lease } => {
                    let before = state.get(&event.key).filter(|_| !anew(id));
                    let (created, version) =
                        before.map_or((revision, 0), |before| (before.created, before.version));
                    let version = version + 1;
                    let now = Replayed { id, created, modified: revision, version, lease };
                    state.insert(event.key.clone(), now);
                }
            }
        }
    }

    /// Whatever had no answer has happened by now, or never will.
    fn settle(&mut self, current: u64, history: &BTreeMap<u64, Vec<Ev>>) {
        self.highest = self.highest.max(current);
        for (&revision, events) in history {
            for event in events {
                if let Now::Put { id: Some(id), .. } = event.now
                    && let Some(found) = self.tries.get_mut(&id)
                    && found.outcome == Outcome::Unknown
                {
                    found.outcome = Outcome::Done(revision);
                    self.done.insert(revision, id);
                }
            }
        }
        for open in self.tries.values_mut().filter(|t| t.outcome == Outcome::Unknown) {
            open.not_after.get_or_insert(current);
        }
    }
}

impl Track {
    /// Where it goes on in `store`: what was compacted meanwhile is lost to it.
    fn resume(&self, store: &Store) -> u64 {
        self.next.max(store.status().compacted.0)
    }
}

impl Try {
    /// The lease of the directory that it makes.
    fn tree(&self) -> Option<i64> {
        match self.what {
            What::Write { lease, anew: true, .. } if lease != 0 => Some(lease),
            _ => None,
        }
    }
}

/// All events from `base` to `current`, by revision.
async fn history(
    store: &Store,
    base: u64,
    current: u64,
    wrong: &mut Vec<String>,
) -> Result<BTreeMap<u64, Vec<Ev>>, String> {
    let mut history = BTreeMap::new();
    if current <= Revision::FRESH.0 {
        return Ok(history);
    }
    let options = WatchOptions { from: Some(Revision(base)), ..WatchOptions::default() };
    let mut watcher = store
        .watch(KeyRange::all(), options)
        .map_err(|error| format!("cannot watch from {base}: {error}"))?;
    let mut last = 0;
    while last < current {
        let batch = watcher.next().await.map_err(|error| {
            format!("cannot read the history after {last}: {}", crate::bed::explain(&error))
        })?;
        for (revision, events) in by_revision(batch.iter()) {
            if revision <= last {
                wrong.push(format!("the history has {revision} after {last}"));
            } else if last != 0 && revision != last + 1 {
                wrong.push(format!("the history goes from {last} to {revision}"));
            }
            last = last.max(revision);
            if revision <= current {
                history.insert(revision, events);
            }
        }
    }
    Ok(history)
}

/// What one watcher sees from a revision until another, and no longer: revisions as they come.
async fn follow(
    store: &Store,
    prefix: &'static str,
    from: u64,
    until: u64,
) -> Result<Vec<(u64, Vec<Ev>)>, String> {
    let options = WatchOptions { from: Some(Revision(from)), ..WatchOptions::default() };
    let mut watcher = store
        .watch(KeyRange::prefix(prefix), options)
        .map_err(|error| format!("from {from}: {}", crate::bed::explain(&error)))?;
    let mut seen = Vec::new();
    loop {
        // Of keys where nothing happened it says nothing, only how far it has come.
        let next = poll_fn(|context| match watcher.poll_next(context) {
            Poll::Ready(batch) => Poll::Ready(Some(batch)),
            Poll::Pending if watcher.progress() >= Revision(until) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        });
        let Some(batch) = next.await else { return Ok(seen) };
        let batch = batch.map_err(|error| crate::bed::explain(&error))?;
        // What came after the start is not to be compared: a lease may end any time.
        seen.extend(
            by_revision(batch.iter()).into_iter().filter(|(revision, _)| *revision <= until),
        );
    }
}

/// Events of a batch, those of a revision together and sorted by key.
pub fn by_revision<'e>(events: impl Iterator<Item = &'e vedetta_kv::Event>) -> Vec<(u64, Vec<Ev>)> {
    let mut grouped: Vec<(u64, Vec<Ev>)> = Vec::new();
    for event in events {
        match grouped.last_mut() {
            Some((revision, group)) if *revision == event.revision.0 => group.push(event.into()),
            _ => grouped.push((event.revision.0, vec![event.into()])),
        }
    }
    for (_, group) in &mut grouped {
        group.sort();
    }
    grouped
}

async fn read_at(store: &Store, revision: u64) -> Result<State, String> {
    let range = Range { at: Some(Revision(revision)), ..Range::new(KeyRange::all()) };
    let ranged = store.range(range).await;
    let ranged = ranged.map_err(|error| format!("cannot read at {revision}: {error}"))?;
    let keys = ranged.keys.iter();
    Ok(keys.map(|key| (String::from_utf8_lossy(key.key()).into_owned(), key.into())).collect())
}
