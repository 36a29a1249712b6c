//! Watching: one log, many cursors.
//!
//! ```text
//!   publish ──► Ring: blocks of recent events, shared by all ◄── read from its own cursor ── Watcher
//!                 │                                                                             ▲
//!                 └──► fan-out thread: whose range matches? ── owed: from that revision on ─────┘
//! ```
//!
//! No watcher has a queue. The fan-out thread only notes, per watcher, the first revision it is owed and
//! wakes it. For a few events and a few watchers whoever publishes does that itself, as it takes no longer than
//! to wake the thread. The watcher reads the ring at its own pace, and the rows in the file where it has fallen
//! behind the ring. So writers never wait for watchers, a slow watcher slows only itself, and its memory
//! is a cursor. When the rows it needs were compacted it is told so.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use parking_lot::{Condvar, Mutex, RwLock};
use tokio::task::JoinHandle;
use vedetta_core::{KeyRange, Revision};
use vedetta_db::{Db, rusqlite};

use crate::codec;
use crate::index::Found;
use crate::range::{FetchError, fetch};
use crate::request::KvError;
use crate::store::Shared;
use crate::{Change, Event, KeyValue};

/// Bytes of recent events kept in memory for watchers; what is made of them for a wire comes on top.
const RING_BYTES: usize = 16 << 20;
/// Bytes forgotten at once when there are more, so that not each block costs a wake-up.
const SLICE_BYTES: usize = 1 << 20;
/// About how much is in a block, and so how much a watcher is handed at once; a revision is never split.
const BATCH_BYTES: usize = 1 << 20;
/// Rows read from the file in one go.
const HISTORY_ROWS: u32 = 1_000;
/// Nothing is owed.
const NOTHING: u64 = u64::MAX;
/// So many watchers are told, of so many events, in no time.
const FEW_WATCHERS: usize = 256;
const FEW_EVENTS: usize = 32;

/// Events that became durable together, all or a part, or were read from the file together.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) last: Revision,
    pub(crate) events: Vec<Event>,
    bytes: usize,
    /// What was made of each event for a wire, in both forms; see [`Batch::encoded`].
    encoded: OnceLock<Box<[Encoded]>>,
    /// What was made of each event for another wire; see [`Batch::with_lines`].
    lines: OnceLock<Box<[Line]>>,
}

type Encoded = [OnceLock<Bytes>; 2];

/// A place for the bytes of an event that all its watchers share.
pub type Line = Arc<OnceLock<Bytes>>;

impl Block {
    pub(crate) fn new(last: Revision, events: Vec<Event>) -> Self {
        let bytes = events.iter().map(weigh).sum();
        Self { last, events, bytes, encoded: OnceLock::new(), lines: OnceLock::new() }
    }

    /// What became durable together, in blocks: a commit may be of hundreds of large writes, and a slow reader keeps a
    /// block in memory for as long as it is at it.
    pub(crate) fn cut(last: Revision, events: Vec<Event>) -> Vec<Self> {
        let whole = Self::new(last, events);
        if whole.bytes <= BATCH_BYTES {
            return vec![whole];
        }
        let (mut blocks, mut part, mut bytes) = (Vec::new(), Vec::<Event>::new(), 0);
        for event in whole.events {
            let before = part.last().map(|before| before.revision);
            if let Some(last) = before
                && last < event.revision
                && bytes + weigh(&event) > BATCH_BYTES
            {
                blocks.push(Self::new(last, std::mem::take(&mut part)));
                bytes = 0;
            }
            bytes += weigh(&event);
            part.push(event);
        }
        blocks.push(Self::new(last, part));
        blocks
    }

    /// Room for the bytes of each event. Not made with the block: the writer would pay for it, also
    /// when nobody watches.
    fn encoded(&self) -> &[Encoded] {
        self.encoded.get_or_init(|| self.events.iter().map(|_| Encoded::default()).collect())
    }

    fn lines(&self) -> &[Line] {
        self.lines.get_or_init(|| self.events.iter().map(|_| Line::default()).collect())
    }
}

/// About how much memory an event takes.
fn weigh(event: &Event) -> usize {
    let value = |key: Option<&KeyValue>| key.map_or(0, |key| key.value().len());
    128 + event.key().len() + value(event.now()) + value(event.previous.as_ref())
}

/// Recent blocks, the oldest first, without a gap.
#[derive(Debug)]
struct Ring {
    blocks: VecDeque<Arc<Block>>,
    bytes: usize,
    /// Every revision from here on is in `blocks`.
    first: Revision,
}

/// The meeting place of publishing, fan-out and watchers.
#[derive(Debug)]
pub(crate) struct Hub {
    ring: RwLock<Ring>,
    /// All watchers were told of everything up to here. Who has it tells them.
    marking: Mutex<Revision>,
    /// The same, known without the lock.
    marked: AtomicU64,
    registry: Mutex<Registry>,
    /// How many watchers there are; known without the lock.
    watching: AtomicUsize,
    nudge: Mutex<Nudge>,
    nudged: Condvar,
    closed: AtomicBool,
}

#[derive(Debug, Default)]
struct Nudge {
    /// There is something for the fan-out thread.
    asked: bool,
    closed: bool,
}

/// Watchers by what they watch. A range is found by the key itself, by each length of prefix that
/// somebody watches, or, for odd ranges, by looking at them all.
#[derive(Debug, Default)]
struct Registry {
    keys: HashMap<Bytes, Group>,
    prefixes: BTreeMap<usize, HashMap<Bytes, Group>>,
    others: HashMap<KeyRange, Group>,
}

#[derive(Debug, Default)]
struct Group {
    /// Each with which of its ranges this is.
    cells: Vec<(Arc<Cell>, usize)>,
}

/// What the fan-out thread knows of a watcher.
#[derive(Debug)]
struct Cell {
    /// The first revision it has not been handed, or [`NOTHING`]. While something is owed the watcher
    /// is awake or has a wake-up waiting.
    owed: AtomicU64,
    waker: AtomicWaker,
    /// For each of its ranges, its place in the group.
    places: Box<[AtomicUsize]>,
}

impl Hub {
    pub(crate) fn new(revision: Revision) -> Self {
        Self {
            ring: RwLock::new(Ring { blocks: VecDeque::new(), bytes: 0, first: revision.next() }),
            marking: Mutex::new(revision),
            marked: AtomicU64::new(revision.0),
            registry: Mutex::default(),
            watching: AtomicUsize::new(0),
            nudge: Mutex::default(),
            nudged: Condvar::new(),
            closed: AtomicBool::new(false),
        }
    }

    /// Takes in a durable block.
    pub(crate) fn publish(&self, block: Block) {
        let block = Arc::new(block);
        let full = {
            let mut ring = self.ring.write();
            ring.bytes += block.bytes;
            ring.blocks.push_back(Arc::clone(&block));
            ring.bytes > RING_BYTES
        };
        // Nobody to tell: who comes later begins after what the index has, and this it has. (Either we
        // see the newcomer here, or the newcomer sees this in the index.)
        fence(Ordering::SeqCst);
        let watching = self.watching.load(Ordering::Relaxed);
        let is_told = watching <= FEW_WATCHERS && watching > 0 && self.tell(&block);
        if full || (watching > 0 && !is_told) {
            self.nudge.lock().asked = true;
            self.nudged.notify_one();
        }
    }

    /// Tells watchers of a block here and now, if that is quickly done and all before it was told.
    fn tell(&self, block: &Block) -> bool {
        let Some(mut marked) = self.marking.try_lock() else { return false };
        let first = block.events.first().map_or(block.last.next(), |first| first.revision);
        let follows = first == marked.next();
        if !follows || block.events.len() > FEW_EVENTS {
            return false;
        }
        self.registry.lock().mark(block);
        self.is_marked(&mut marked, block.last);
        true
    }

    fn is_marked(&self, marked: &mut Revision, to: Revision) {
        *marked = to;
        self.marked.store(to.0, Ordering::Release);
    }

    /// The fan-out thread.
    pub(crate) fn fan_out(&self) {
        while self.is_asked() {
            let mut marked = self.marking.lock();
            match self.recent(marked.next(), usize::MAX) {
                Some(recent) => {
                    let registry = self.registry.lock();
                    for block in recent.blocks {
                        registry.mark(&block);
                        self.is_marked(&mut marked, block.last);
                    }
                }
                // Outrun by the writers: let every watcher look for itself.
                None => {
                    let newest = self.ring.read().blocks.back().map(|block| block.last);
                    self.registry.lock().mark_all(marked.next());
                    let newest = newest.unwrap_or(*marked);
                    self.is_marked(&mut marked, newest);
                }
            }
            drop(marked);
            self.trim();
        }
        self.closed.store(true, Ordering::Release);
        self.registry.lock().wake_all();
    }

    /// Forgets the oldest blocks. Not done when publishing: freeing them would hold up the writer.
    fn trim(&self) {
        let mut forgotten = Vec::new();
        let mut ring = self.ring.write();
        if ring.bytes <= RING_BYTES {
            return;
        }
        while ring.bytes > RING_BYTES - SLICE_BYTES
            && ring.blocks.len() > 1
            && let Some(oldest) = ring.blocks.pop_front()
        {
            ring.bytes -= oldest.bytes;
            ring.first = oldest.last.next();
            forgotten.push(oldest);
        }
        drop(ring);
    }

    /// Waits until the thread has something to do; `false` when it never will.
    fn is_asked(&self) -> bool {
        let mut nudge = self.nudge.lock();
        while !nudge.asked && !nudge.closed {
            self.nudged.wait(&mut nudge);
        }
        std::mem::take(&mut nudge.asked)
    }

    pub(crate) fn close(&self) {
        self.nudge.lock().closed = true;
        self.nudged.notify_all();
    }

    pub(crate) fn watchers(&self) -> usize {
        self.watching.load(Ordering::Relaxed)
    }

    /// Blocks that hold everything from `from` on, up to about `bytes` of it; `None` when the ring
    /// does not reach back so far.
    fn recent(&self, from: Revision, bytes: usize) -> Option<Recent> {
        let ring = self.ring.read();
        if from < ring.first {
            return None;
        }
        let start = ring.blocks.partition_point(|block| block.last < from);
        let mut taken = 0;
        let wanted = ring.blocks.range(start..).take_while(|block| {
            let fits = taken < bytes;
            taken += block.bytes;
            fits
        });
        let blocks: Vec<_> = wanted.cloned().collect();
        let more = start + blocks.len() < ring.blocks.len();
        Some(Recent { blocks, more })
    }
}

/// What the ring had.
struct Recent {
    blocks: Vec<Arc<Block>>,
    /// Whether there is more.
    more: bool,
}

impl Registry {
    fn group(&mut self, range: &KeyRange) -> &mut Group {
        match (range, range.as_prefix()) {
            (KeyRange::One(key), _) => self.keys.entry(key.clone()).or_default(),
            (_, Some(prefix)) => {
                self.prefixes.entry(prefix.len()).or_default().entry(prefix.clone()).or_default()
            }
            (_, None) => self.others.entry(range.clone()).or_default(),
        }
    }

    fn add(&mut self, ranges: &[KeyRange], cell: &Arc<Cell>) {
        for (nth, range) in ranges.iter().enumerate() {
            let group = self.group(range);
            cell.places[nth].store(group.cells.len(), Ordering::Relaxed);
            group.cells.push((Arc::clone(cell), nth));
        }
    }

    fn remove(&mut self, ranges: &[KeyRange], cell: &Cell) {
        for (nth, range) in ranges.iter().enumerate() {
            let place = cell.places[nth].load(Ordering::Relaxed);
            let group = self.group(range);
            group.cells.swap_remove(place);
            if let Some((moved, theirs)) = group.cells.get(place) {
                moved.places[*theirs].store(place, Ordering::Relaxed);
            }
            if group.cells.is_empty() {
                self.forget(range);
            }
        }
    }

    fn forget(&mut self, range: &KeyRange) {
        match (range, range.as_prefix()) {
            (KeyRange::One(key), _) => drop(self.keys.remove(key)),
            (_, Some(prefix)) => {
                if let Some(same_length) = self.prefixes.get_mut(&prefix.len()) {
                    same_length.remove(prefix);
                    if same_length.is_empty() {
                        self.prefixes.remove(&prefix.len());
                    }
                }
            }
            (_, None) => drop(self.others.remove(range)),
        }
    }

    /// Tells the watchers of a block's keys. Within a block the first event of a group decides, so a
    /// group that was told once is not looked at again.
    fn mark(&self, block: &Block) {
        let mut told: Vec<*const Group> = Vec::new();
        let mut tell = |group: &Group, revision: Revision| {
            if !told.contains(&std::ptr::from_ref(group)) {
                // A block touches few groups many times, or many groups once each: past a few, telling
                // a group twice is cheaper than remembering it.
                if told.len() < 16 {
                    told.push(std::ptr::from_ref(group));
                }
                group.mark(revision);
            }
        };
        for event in &block.events {
            let key = event.key();
            if let Some(group) = self.keys.get(key) {
                tell(group, event.revision);
            }
            for (&length, same_length) in &self.prefixes {
                let Some(prefix) = key.get(..length) else { break };
                if let Some(group) = same_length.get(prefix) {
                    tell(group, event.revision);
                }
            }
            for (range, group) in &self.others {
                if range.contains(key) {
                    tell(group, event.revision);
                }
            }
        }
    }

    fn groups(&self) -> impl Iterator<Item = &Group> {
        let prefixes = self.prefixes.values().flat_map(HashMap::values);
        self.keys.values().chain(prefixes).chain(self.others.values())
    }

    fn mark_all(&self, from: Revision) {
        self.groups().for_each(|group| group.mark(from));
    }

    fn wake_all(&self) {
        self.groups().flat_map(|group| &group.cells).for_each(|(cell, _)| cell.waker.wake());
    }
}

impl Group {
    fn mark(&self, revision: Revision) {
        self.cells.iter().for_each(|(cell, _)| cell.owe(revision));
    }
}

impl Cell {
    fn owe(&self, revision: Revision) {
        if self.owed.fetch_min(revision.0, Ordering::AcqRel) == NOTHING {
            self.waker.wake();
        }
    }
}

/// What to watch for.
#[derive(Debug, Clone)]
pub struct WatchOptions {
    /// From which revision on; `None` for "from now on". It may lie in the future.
    pub from: Option<Revision>,
    /// Whether events must carry the key as it was before. They may do so in any case.
    pub previous: bool,
    /// Leave out puts.
    pub no_puts: bool,
    /// Leave out deletes.
    pub no_deletes: bool,
}

impl Default for WatchOptions {
    /// Everything, from now on.
    fn default() -> Self {
        Self { from: None, previous: true, no_puts: false, no_deletes: false }
    }
}

/// Why a watch ended.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum WatchError {
    /// That history is gone: list again and watch from there.
    #[error("revision {asked} was compacted, the oldest kept is {oldest}")]
    Compacted {
        /// The next revision it needed.
        asked: Revision,
        /// The oldest that can be watched from.
        oldest: Revision,
    },
    /// The store is closed.
    #[error("the store is closed")]
    Closed,
    /// The history in the file cannot be read.
    #[error("cannot read the history")]
    Unreadable(#[source] KvError),
}

/// Follows the changes of one or more ranges of keys. Dropping it ends the watch.
pub struct Watcher {
    shared: Arc<Shared>,
    db: Db,
    cell: Arc<Cell>,
    ranges: Arc<[KeyRange]>,
    options: WatchOptions,
    /// Everything before was handed out.
    next: Revision,
    /// A look into the file that a dropped `next` left running; the next one goes on with it.
    reading: Option<Reading>,
}

/// A task, so that it does not hold up other readers when nobody waits for it.
type Reading = JoinHandle<Result<Block, WatchError>>;

impl Watcher {
    pub(crate) fn new(
        shared: Arc<Shared>,
        db: Db,
        ranges: Arc<[KeyRange]>,
        options: WatchOptions,
    ) -> Result<Self, WatchError> {
        let cell = Arc::new(Cell {
            owed: AtomicU64::new(NOTHING),
            waker: AtomicWaker::new(),
            places: ranges.iter().map(|_| AtomicUsize::new(0)).collect(),
        });
        // From here on nothing new is missed; what is older is owed.
        shared.hub.registry.lock().add(&ranges, &cell);
        shared.hub.watching.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let (current, oldest) = {
            let index = shared.index.read();
            (index.revision, index.compacted)
        };
        let from = options.from.unwrap_or(current.next());
        // Nothing happened before the first write.
        let next = from.max(Revision::FRESH.next());
        if next <= current {
            cell.owe(next);
        }
        let watcher = Self { shared, db, cell, ranges, options, next, reading: None };
        if from < oldest {
            return Err(WatchError::Compacted { asked: from, oldest });
        }
        Ok(watcher)
    }

    /// The next events, in order, whole transactions only.
    ///
    /// Cancel safety: a dropped future loses nothing.
    pub async fn next(&mut self) -> Result<Batch, WatchError> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// [`Watcher::next`] for those who wait for many watchers at once.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Batch, WatchError>> {
        loop {
            let budget = ready!(tokio::task::coop::poll_proceed(cx));
            if self.cell.owed.load(Ordering::Acquire) == NOTHING {
                self.cell.waker.register(cx.waker());
            }
            // Looked at only now: what came before the waker was there did not wake it.
            let closed = self.shared.hub.closed.load(Ordering::Acquire);
            let owed = self.cell.owed.load(Ordering::Acquire);
            if owed == NOTHING && !closed {
                return Poll::Pending;
            }
            budget.made_progress();
            if closed {
                return Poll::Ready(Err(WatchError::Closed));
            }
            let batch = ready!(self.poll_read(cx, Revision(owed).max(self.next)))?;
            if batch.iter().next().is_some() {
                return Poll::Ready(Ok(batch));
            }
        }
    }

    /// Everything up to this revision was handed out, or does not concern this watcher.
    pub fn progress(&self) -> Revision {
        // The order matters: what is marked after this load may be owed, what was before is.
        let marked = Revision(self.shared.hub.marked.load(Ordering::Acquire));
        // Who starts in the future has not seen it.
        let current = self.shared.index.read().revision;
        let done = Revision(self.next.0.saturating_sub(1)).min(current);
        match self.cell.owed.load(Ordering::Acquire) {
            NOTHING => marked.max(done),
            owed => done.max(Revision(owed.saturating_sub(1))),
        }
    }

    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        from: Revision,
    ) -> Poll<Result<Batch, WatchError>> {
        // What is marked from here on is owed again; what was marked before is in what we read now.
        self.cell.owed.store(NOTHING, Ordering::Release);
        let Recent { blocks, more } = match self.shared.hub.recent(from, BATCH_BYTES) {
            Some(recent) => recent,
            None => {
                // Reading the file may be cancelled: until it is done the debt stands.
                self.cell.owe(from);
                let mut reading = match self.reading.take() {
                    Some(reading) => reading,
                    None => tokio::spawn(self.history(from)),
                };
                let Poll::Ready(read) = Pin::new(&mut reading).poll(cx) else {
                    self.reading = Some(reading);
                    return Poll::Pending;
                };
                let read = read.unwrap_or(Err(WatchError::Closed)); // with its runtime
                Recent { blocks: vec![Arc::new(read?)], more: true }
            }
        };
        if let Some(last) = blocks.last() {
            self.next = self.next.max(last.last.next());
        }
        if more {
            self.cell.owe(self.next);
        }
        let (ranges, options) = (Arc::clone(&self.ranges), self.options.clone());
        Poll::Ready(Ok(Batch { blocks, from, ranges, options }))
    }

    /// Reads rows from the file, keeping what concerns this watcher.
    fn history(
        &self,
        from: Revision,
    ) -> impl Future<Output = Result<Block, WatchError>> + Send + 'static {
        let (shared, ranges) = (Arc::clone(&self.shared), Arc::clone(&self.ranges));
        let (db, previous) = (self.db.clone(), self.options.previous);
        async move {
            let at = Arc::clone(&shared);
            let read = db.read(move |c| Ok(read_history(c, &at, from, &ranges, previous))).await;
            let oldest = shared.index.read().compacted;
            if from < oldest {
                return Err(WatchError::Compacted { asked: from, oldest });
            }
            match read {
                Ok(Ok(block)) => Ok(block),
                Ok(Err(error)) => Err(WatchError::Unreadable(error.into())),
                Err(error) => Err(WatchError::Unreadable(KvError::Unreadable(error.to_string()))),
            }
        }
    }
}

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Watcher");
        debug.field("ranges", &self.ranges).field("next", &self.next).finish_non_exhaustive()
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.shared.hub.registry.lock().remove(&self.ranges, &self.cell);
        self.shared.hub.watching.fetch_sub(1, Ordering::Relaxed);
    }
}

fn read_history(
    connection: &rusqlite::Connection,
    shared: &Shared,
    from: Revision,
    ranges: &[KeyRange],
    previous: bool,
) -> Result<Block, FetchError> {
    // Rows beyond are durable, but readers and the index do not know them yet.
    let published = shared.index.read().revision;
    let sql = "SELECT revision, body FROM event WHERE revision BETWEEN ?1 AND ?2
               ORDER BY revision LIMIT ?3";
    let mut select = connection.prepare_cached(sql)?;
    let bounds = (from.0.cast_signed(), published.0.cast_signed(), HISTORY_ROWS);
    let mut rows = select.query(bounds)?;
    let mut events = Vec::new();
    let (mut last, mut bytes) = (None, 0);
    while let Some(row) = rows.next()? {
        if bytes > BATCH_BYTES {
            break;
        }
        let revision = Revision(row.get::<_, i64>(0)?.cast_unsigned());
        check_next(shared, from, last, revision)?;
        last = Some(revision);
        let body = row.get_ref(1)?.as_blob().map_err(rusqlite::Error::from)?;
        bytes += body.len();
        codec::decode(revision, body, |event| {
            if ranges.iter().any(|range| range.contains(event.key())) {
                events.push(event);
            }
        })
        .map_err(FetchError::Damaged)?;
    }
    if last.is_none() {
        check_next(shared, from, last, from.next())?;
    }
    if previous {
        let mut bytes = 0;
        for place in 0..events.len() {
            // What they were is not in their rows, and may be much more.
            if bytes > BATCH_BYTES && events[place].revision > events[place - 1].revision {
                last = Some(events[place - 1].revision);
                events.truncate(place);
                break;
            }
            let event = &mut events[place];
            let before = shared.index.read().before(event.key(), event.revision);
            if let Some(Found::InRow(key, revision)) = before {
                match fetch(connection, &key, revision) {
                    Ok(before) => {
                        bytes += before.value().len();
                        event.previous = Some(before);
                    }
                    Err(FetchError::Missing(_))
                        if event.revision <= shared.index.read().compacted => {}
                    Err(other) => return Err(other),
                }
            }
        }
    }
    Ok(Block::new(last.unwrap_or(from), events))
}

/// Every revision has a row. Only the one a watch starts at may have none: where a restored store
/// jumped to.
fn check_next(
    shared: &Shared,
    from: Revision,
    last: Option<Revision>,
    revision: Revision,
) -> Result<(), FetchError> {
    let expected = last.map_or(from, Revision::next);
    let may_be_missing =
        last.is_none() && revision == expected.next() && from <= shared.index.read().compacted;
    if revision == expected || may_be_missing {
        return Ok(());
    }
    Err(FetchError::Missing(expected))
}

/// Some events for one watcher. They are shared with other watchers, not copied.
#[derive(Debug, Clone)]
pub struct Batch {
    blocks: Vec<Arc<Block>>,
    from: Revision,
    ranges: Arc<[KeyRange]>,
    options: WatchOptions,
}

impl Batch {
    /// The events, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Event> {
        let events = self.blocks.iter().flat_map(|block| &block.events);
        events.filter(|event| self.concerns(event))
    }

    /// The events, in order, as bytes for a wire: `encode` is asked once for an event, whatever the
    /// number of watchers, and its answer kept beside the event. There is one place for bytes with the
    /// key as it was before and one for bytes without, so all callers must mean the same wire.
    pub fn encoded(
        &self,
        previous: bool,
        encode: impl Fn(&Event) -> Bytes,
    ) -> impl Iterator<Item = (Revision, &Bytes)> {
        let slots = self.blocks.iter().flat_map(|block| block.events.iter().zip(block.encoded()));
        let wanted = slots.filter(|(event, _)| self.concerns(event));
        wanted.map(move |(event, slot)| {
            (event.revision, slot[usize::from(previous)].get_or_init(|| encode(event)))
        })
    }

    /// The events, in order, each with a place for its bytes on another wire than that of
    /// [`Batch::encoded`]. Whoever needs them first makes them, if they are the same for everybody.
    pub fn with_lines(&self) -> impl Iterator<Item = (&Event, &Line)> {
        let lines = self.blocks.iter().flat_map(|block| block.events.iter().zip(block.lines()));
        lines.filter(|(event, _)| self.concerns(event))
    }

    /// Everything up to this revision was handed out with this batch or before.
    pub fn last(&self) -> Revision {
        self.blocks.last().map_or(self.from, |block| block.last)
    }

    fn concerns(&self, event: &Event) -> bool {
        event.revision >= self.from
            && match event.change {
                Change::Put(_) => !self.options.no_puts,
                Change::Delete { .. } => !self.options.no_deletes,
            }
            && self.ranges.iter().any(|range| range.contains(event.key()))
    }
}
