//! A source that does what a test tells it to.

#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use vedetta_core::{Change, Changes, Entry, Feed, KeyRange, Page, Revision, Source, SourceError};

/// Keys in memory, with their whole history, and a line to them that can be cut.
#[derive(Clone)]
pub(crate) struct World(Arc<Inner>);

struct Inner {
    state: Mutex<State>,
    /// Changes with every write and every cut.
    moved: watch::Sender<u64>,
}

struct State {
    revision: Revision,
    history: Vec<Change>,
    /// History before this is gone.
    oldest: Revision,
    page: usize,
    down: bool,
    /// Feeds of an older line have ended.
    line: u64,
    lists: usize,
    /// Compacts everything after so many pages.
    compact_after_pages: Option<usize>,
    /// Makes answers late and feeds come in pieces.
    whims: Option<fastrand::Rng>,
    /// Every revision takes a feed so long.
    slow: Duration,
    /// When feeds were opened, and what each owed.
    opened: Vec<(Instant, Revision)>,
    delivered: Vec<(Instant, Bytes)>,
}

impl World {
    pub(crate) fn new() -> Self {
        let state = State {
            revision: Revision::FRESH,
            history: Vec::new(),
            oldest: Revision::default(),
            page: 2,
            down: false,
            line: 0,
            lists: 0,
            compact_after_pages: None,
            whims: None,
            slow: Duration::ZERO,
            opened: Vec::new(),
            delivered: Vec::new(),
        };
        Self(Arc::new(Inner { state: Mutex::new(state), moved: watch::Sender::new(0) }))
    }

    /// One whose answers take their time.
    pub(crate) fn whimsical(rng: fastrand::Rng) -> Self {
        let world = Self::new();
        world.0.state.lock().whims = Some(rng);
        world
    }

    /// Every revision takes a feed so long from now on.
    pub(crate) fn slow(&self, each: Duration) {
        self.0.state.lock().slow = each;
    }

    /// When feeds were opened, and the last change that had happened then.
    pub(crate) fn opened(&self) -> Vec<(Instant, Revision)> {
        self.0.state.lock().opened.clone()
    }

    async fn dawdle(&self) {
        let nap = self.0.state.lock().whims.as_mut().map_or(0, |rng| rng.u64(0..60));
        if nap > 0 {
            tokio::time::sleep(Duration::from_millis(nap)).await;
        }
    }

    pub(crate) fn put(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Revision {
        self.write([(key.as_ref(), Some(value.as_ref()))])
    }

    pub(crate) fn delete(&self, key: impl AsRef<[u8]>) -> Revision {
        self.write([(key.as_ref(), None)])
    }

    /// All in one revision.
    pub(crate) fn write<'a>(
        &self,
        changes: impl IntoIterator<Item = (&'a [u8], Option<&'a [u8]>)>,
    ) -> Revision {
        let mut state = self.0.state.lock();
        let revision = state.revision.next();
        state.revision = revision;
        for (key, value) in changes {
            let value = value.map(Bytes::copy_from_slice);
            state.history.push(Change { key: Bytes::copy_from_slice(key), value, revision });
        }
        drop(state);
        self.moved();
        revision
    }

    /// What is there now.
    pub(crate) fn keys(&self) -> BTreeMap<Bytes, Bytes> {
        let state = self.0.state.lock();
        state.at(state.revision).into_iter().map(|(key, entry)| (key, entry.value)).collect()
    }

    pub(crate) fn compact(&self) {
        let mut state = self.0.state.lock();
        state.oldest = state.revision;
    }

    pub(crate) fn compact_after_pages(&self, pages: usize) {
        self.0.state.lock().compact_after_pages = Some(pages);
    }

    /// Every feed ends and nothing answers until [`Self::mend`].
    pub(crate) fn cut(&self) {
        let mut state = self.0.state.lock();
        state.down = true;
        state.line += 1;
        drop(state);
        self.moved();
    }

    pub(crate) fn mend(&self) {
        self.0.state.lock().down = false;
    }

    /// Takes it back to where it was at `revision`, as a restored backup does.
    pub(crate) fn rewind(&self, revision: Revision) {
        let mut state = self.0.state.lock();
        state.history.retain(|change| change.revision <= revision);
        state.revision = revision;
        state.line += 1;
        drop(state);
        self.moved();
    }

    /// A line that drops and is there again at once.
    pub(crate) fn blink(&self) {
        self.cut();
        self.mend();
    }

    /// How often it was listed from the first page.
    pub(crate) fn lists(&self) -> usize {
        self.0.state.lock().lists
    }

    /// The keys of all changes that feeds handed out, and when.
    pub(crate) fn delivered(&self) -> Vec<(Instant, Bytes)> {
        self.0.state.lock().delivered.clone()
    }

    fn moved(&self) {
        self.0.moved.send_modify(|count| *count += 1);
    }
}

impl State {
    fn at(&self, revision: Revision) -> BTreeMap<Bytes, Entry> {
        let mut keys = BTreeMap::new();
        for Change { key, value, revision: modified } in &self.history {
            if *modified > revision {
                break;
            }
            match value.clone() {
                Some(value) => {
                    let entry = Entry { key: key.clone(), value, modified: *modified };
                    keys.insert(key.clone(), entry);
                }
                None => drop(keys.remove(key)),
            }
        }
        keys
    }
}

impl Source for World {
    type Feed = WorldFeed;

    async fn list(&self, range: KeyRange, at: Option<Revision>) -> Result<Page, SourceError> {
        self.dawdle().await;
        let mut state = self.0.state.lock();
        if state.down {
            return Err(SourceError::lost("the world is down"));
        }
        let asked = at.unwrap_or(state.revision);
        if asked < state.oldest {
            return Err(SourceError::Compacted { asked });
        }
        state.lists += usize::from(at.is_none());
        let all = state.at(asked);
        let mut entries: Vec<_> = all.into_values().filter(|e| range.contains(&e.key)).collect();
        let more = entries.len() > state.page;
        entries.truncate(state.page);
        match &mut state.compact_after_pages {
            Some(0) => {
                state.compact_after_pages = None;
                state.oldest = state.revision.next();
                state.revision = state.oldest;
            }
            Some(pages) => *pages -= 1,
            None => {}
        }
        Ok(Page { entries, revision: asked, more })
    }

    async fn follow(
        &self,
        range: KeyRange,
        from: Revision,
    ) -> Result<(WorldFeed, Revision), SourceError> {
        self.dawdle().await;
        let mut state = self.0.state.lock();
        if state.down {
            return Err(SourceError::lost("the world is down"));
        }
        if from < state.oldest {
            return Err(SourceError::Compacted { asked: from });
        }
        let newest = state.history.iter().rfind(|change| range.contains(&change.key));
        let owed = newest.map(|change| change.revision).unwrap_or_default();
        state.opened.push((Instant::now(), owed));
        let (world, moved, line) = (self.clone(), self.0.moved.subscribe(), state.line);
        let feed = WorldFeed { world, moved, range, next: from, line, owed };
        Ok((feed, state.revision))
    }
}

pub(crate) struct WorldFeed {
    world: World,
    moved: watch::Receiver<u64>,
    range: KeyRange,
    next: Revision,
    line: u64,
    owed: Revision,
}

impl Feed for WorldFeed {
    fn owed(&self) -> Revision {
        self.owed
    }

    async fn next(&mut self) -> Result<Changes, SourceError> {
        loop {
            self.moved.mark_unchanged();
            let (slow, is_owing) = {
                let state = self.world.0.state.lock();
                (state.slow, self.next <= state.revision)
            };
            if is_owing {
                self.world.dawdle().await;
                if slow > Duration::ZERO {
                    tokio::time::sleep(slow).await;
                }
            }
            {
                let mut state = self.world.0.state.lock();
                if state.line != self.line {
                    return Err(SourceError::lost("the line was cut"));
                }
                let whole = if slow > Duration::ZERO { 1 } else { u64::MAX };
                let most = state.whims.as_mut().map_or(whole, |rng| rng.u64(1..4));
                let last = state.revision.min(Revision(self.next.0.saturating_add(most - 1)));
                let new =
                    state.history.iter().filter(|c| c.revision >= self.next && c.revision <= last);
                let changes: Vec<_> =
                    new.filter(|c| self.range.contains(&c.key)).cloned().collect();
                let comes = self.next <= last;
                self.next = self.next.max(last.next());
                if !changes.is_empty() {
                    let now = Instant::now();
                    state.delivered.extend(changes.iter().map(|change| (now, change.key.clone())));
                    return Ok(Changes { changes, revision: last });
                }
                if comes {
                    continue;
                }
            }
            if self.moved.changed().await.is_err() {
                return Err(SourceError::lost("the world ended"));
            }
        }
    }
}
