//! Watchers at real sources: what a place must offer, and what is expected of a watcher there.
//!
//! ```text
//!  Pen ──writes──► place ──source, which can be cut──► watcher ──► Reality
//!   └───────reads──────────────── equal? ────────────────┴────────────┘
//! ```

#![allow(dead_code, reason = "each place uses its part")]

pub(crate) mod suite;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use testing::{PATIENCE, soon};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use vedetta_core::{Revision, Source};
use vedetta_runtime::watcher::{BoxError, Effect, Id, Wanted};
use vedetta_runtime::{Next, Reconcile, State, Watcher, Watching};

/// When to look again.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// A key, and what it should hold; nothing to delete it.
pub(crate) type Write = (Vec<u8>, Option<Vec<u8>>);

/// Writes and reads past the watcher, and past what was done to its line.
pub(crate) trait Pen: Clone + Send + Sync + 'static {
    /// All in one transaction, of 128 keys at most, tried until it is acknowledged.
    fn write(&self, writes: Vec<Write>) -> impl Future<Output = Revision> + Send;

    /// Everything under a prefix; nothing that was acknowledged is missing.
    fn keys(&self, prefix: &str) -> impl Future<Output = BTreeMap<Bytes, Bytes>> + Send;

    /// Forgets all history.
    fn compact(&self) -> impl Future<Output = ()> + Send;
}

/// Where a watcher can be at work.
pub(crate) trait Place {
    /// What the watcher gets.
    type Source: Source;
    type Pen: Pen;
    /// The source lists so many keys at once.
    const PAGE: usize;

    fn source(&self) -> Self::Source;
    fn pen(&self) -> &Self::Pen;
    /// Sources lose their line, and have none until [`Self::mend`].
    fn cut(&self);
    fn mend(&self);
}

/// What is watched.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Room {
    pub(crate) spec: Option<u64>,
    pub(crate) link: Option<u64>,
}

pub(crate) fn room(spec: impl Into<Option<u64>>, link: impl Into<Option<u64>>) -> Room {
    Room { spec: spec.into(), link: link.into() }
}

impl Room {
    fn part(&mut self, kind: &str) -> Option<&mut Option<u64>> {
        match kind {
            "spec" => Some(&mut self.spec),
            "link" => Some(&mut self.link),
            _ => None,
        }
    }
}

impl State for Room {
    fn apply(&mut self, key_type: &str, value: Option<&[u8]>) -> Result<Effect, BoxError> {
        let value = value.map(|value| Ok::<_, BoxError>(str::from_utf8(value)?.parse()?));
        let part = self.part(key_type).ok_or("a key type that was not asked for")?;
        *part = value.transpose()?;
        Ok(Effect::Wanted)
    }
}

/// Rooms by id.
pub(crate) type Rooms = BTreeMap<Bytes, Room>;

/// What a handler was told to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Deed {
    Rebuild(Rooms),
    Reconcile(Bytes, Option<Room>),
}

/// What really is, as the handler keeps it.
#[derive(Clone)]
pub(crate) struct Reality(Arc<Inner>);

struct Inner {
    kept: Mutex<Kept>,
    /// Rebuilds wait until it is open.
    gate: watch::Sender<bool>,
}

#[derive(Default)]
struct Kept {
    rooms: Rooms,
    deeds: Vec<Deed>,
    /// Of so many runs one fails; of 0 none.
    clumsy: usize,
}

impl Reality {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Inner { kept: Mutex::default(), gate: watch::Sender::new(true) }))
    }

    /// Something that runs without having been asked for.
    pub(crate) fn holds(&self, id: &str, room: Room) {
        self.0.kept.lock().rooms.insert(Bytes::copy_from_slice(id.as_bytes()), room);
    }

    /// One run of so many fails from now on.
    pub(crate) fn is_clumsy(&self, one_of: usize) {
        self.0.kept.lock().clumsy = one_of;
    }

    /// Whether rebuilds may go on.
    pub(crate) fn gate(&self, open: bool) {
        self.0.gate.send_replace(open);
    }

    pub(crate) fn rooms(&self) -> Rooms {
        self.0.kept.lock().rooms.clone()
    }

    /// What was done so far, and is not told again.
    pub(crate) fn take_deeds(&self) -> Vec<Deed> {
        std::mem::take(&mut self.0.kept.lock().deeds)
    }

    pub(crate) fn deeds(&self) -> Vec<Deed> {
        self.0.kept.lock().deeds.clone()
    }

    /// How often an id was reconciled.
    pub(crate) fn runs(&self, id: &[u8]) -> usize {
        let kept = self.0.kept.lock();
        kept.deeds.iter().filter(|deed| matches!(deed, Deed::Reconcile(of, _) if of == id)).count()
    }
}

impl Reconcile for Reality {
    type State = Room;

    async fn rebuild(&self, wanted: &Wanted<Room>) -> Result<(), BoxError> {
        {
            let mut kept = self.0.kept.lock();
            kept.deeds.push(Deed::Rebuild(rooms(wanted)));
            kept.rooms.retain(|id, _| wanted.contains(id));
        }
        self.0.gate.subscribe().wait_for(|open| *open).await?;
        Ok(())
    }

    async fn reconcile(&self, id: &Id, state: Option<&Room>) -> Result<Next, BoxError> {
        tokio::task::yield_now().await;
        let id = Bytes::copy_from_slice(id.as_bytes());
        let mut kept = self.0.kept.lock();
        kept.deeds.push(Deed::Reconcile(id.clone(), state.copied()));
        if kept.clumsy > 0 && kept.deeds.len().is_multiple_of(kept.clumsy) {
            return Err("it slipped".into());
        }
        match state {
            Some(state) => drop(kept.rooms.insert(id, *state)),
            None => drop(kept.rooms.remove(&id)),
        }
        Ok(Next::Done)
    }
}

pub(crate) fn rooms(wanted: &Wanted<Room>) -> Rooms {
    let rooms = wanted.iter();
    rooms.map(|(id, room)| (Bytes::copy_from_slice(id.as_bytes()), **room)).collect()
}

pub(crate) fn key(prefix: &str, id: impl AsRef<[u8]>, kind: &str) -> Vec<u8> {
    [prefix.as_bytes(), id.as_ref(), b"/", kind.as_bytes()].concat()
}

/// What keys mean, put together the plain way. Those that mean nothing are left out.
fn meant(keys: &BTreeMap<Bytes, Bytes>, prefix: &str) -> Rooms {
    let mut rooms = Rooms::new();
    for (key, value) in keys {
        let rest = &key[prefix.len()..];
        let Some(slash) = rest.iter().rposition(|byte| *byte == b'/') else { continue };
        let (id, kind) = (&rest[..slash], String::from_utf8_lossy(&rest[slash + 1..]));
        let mut room = rooms.get(id).copied().unwrap_or_default();
        if let Some(part) = room.part(&kind).filter(|_| !id.is_empty()) {
            *part = Some(str::from_utf8(value).unwrap().parse().unwrap());
            rooms.insert(Bytes::copy_from_slice(id), room);
        }
    }
    rooms
}

/// A watcher of a prefix, and the pen to write there.
pub(crate) struct Stage<P: Pen> {
    pub(crate) prefix: &'static str,
    pub(crate) pen: P,
    pub(crate) reality: Reality,
    pub(crate) watching: Watching<Room>,
    /// The last value of a [`Writer`].
    count: Arc<AtomicU64>,
}

impl<P: Pen> Stage<P> {
    /// One that has just been started, on a place's source.
    pub(crate) fn start<L: Place<Pen = P>>(place: &L, prefix: &'static str) -> Self {
        Self::start_with(place.pen().clone(), watcher(prefix), place.source(), prefix)
    }

    /// One that is ready.
    pub(crate) async fn ready<L: Place<Pen = P>>(place: &L, prefix: &'static str) -> Self {
        let stage = Self::start(place, prefix);
        stage.watching.ready(PATIENCE).await.unwrap();
        stage
    }

    pub(crate) fn start_with(
        pen: P,
        watcher: Watcher,
        source: impl Source,
        prefix: &'static str,
    ) -> Self {
        let reality = Reality::new();
        let watching = watcher.start(source, reality.clone());
        Self { prefix, pen, reality, watching, count: Arc::default() }
    }

    pub(crate) fn key(&self, id: impl AsRef<[u8]>, kind: &str) -> Vec<u8> {
        key(self.prefix, id, kind)
    }

    pub(crate) async fn put(&self, id: &str, kind: &str, value: impl ToString) -> Revision {
        let value = value.to_string().into_bytes();
        self.pen.write(vec![(self.key(id, kind), Some(value))]).await
    }

    /// As [`Self::put`], and the watcher has it.
    pub(crate) async fn put_seen(&self, id: &str, kind: &str, value: impl ToString) {
        self.seen(self.put(id, kind, value).await).await;
    }

    pub(crate) async fn delete(&self, id: &str, kind: &str) -> Revision {
        self.pen.write(vec![(self.key(id, kind), None)]).await
    }

    pub(crate) async fn seen(&self, revision: Revision) {
        soon("the watcher catches up", self.watching.caught_up(revision)).await;
    }

    pub(crate) fn get(&self, id: &str) -> Option<Room> {
        self.watching.get(id).map(|room| *room)
    }

    /// Waits until both the cache and reality are exactly what the place holds.
    pub(crate) async fn settles(&self) {
        let mut last = None;
        let settled = tokio::time::timeout(PATIENCE, async {
            loop {
                let meant = meant(&self.pen.keys(self.prefix).await, self.prefix);
                let (cached, real) = (rooms(&self.watching.all()), self.reality.rooms());
                if cached == meant && real == meant {
                    return;
                }
                last = Some((cached, real, meant));
                sleep(LOOK_AGAIN).await;
            }
        });
        if settled.await.is_err() {
            let status = self.watching.status();
            let (cached, real, meant) = last.expect("the place can be read");
            assert_eq!(cached, meant, "the cache is not what the place holds; {status:?}");
            assert_eq!(real, meant, "reality is not what the place holds; {status:?}");
            unreachable!("one of them differed");
        }
    }

    /// Something happens that the watcher loses its line by; waits until it notices.
    pub(crate) async fn loses_its_line(&self, happens: impl AsyncFnOnce()) {
        let before = self.watching.status().lost;
        happens().await;
        let has_noticed = || self.watching.status().lost > before;
        until("the watcher notices that its line dropped", has_noticed).await;
    }

    /// While writes go on something happens; after that all is as the place says.
    pub(crate) async fn chapter(&self, title: &str, happens: impl AsyncFnOnce(&Writer)) {
        eprintln!("{title}");
        let writer = Writer::start(self);
        writer.goes_on().await;
        happens(&writer).await;
        writer.goes_on().await;
        writer.stop().await;
        self.settles().await;
        until("nothing is wrong any more", || self.watching.troubles(1).is_empty()).await;
        all_is_whole(&self.reality.take_deeds());
    }

    /// Puts some rooms, or takes them away: at once, and no [`Writer`] knows them.
    pub(crate) async fn crowd(&self, comes: bool) -> Revision {
        let value = comes.then(|| b"1".to_vec());
        let both =
            |n| ["spec", "link"].map(|kind| (self.key(format!("crowd-{n}"), kind), value.clone()));
        self.pen.write((0..20).flat_map(both).collect()).await
    }

    /// Ends the watcher; nothing of it had to be aborted.
    pub(crate) async fn end(self) {
        let aborted = soon("the watcher stops", self.watching.stop(PATIENCE)).await;
        assert_eq!(aborted, 0);
    }
}

/// The watcher of all stories.
pub(crate) fn watcher(prefix: &'static str) -> Watcher {
    Watcher::new(prefix).key_types(["spec", "link"])
}

/// Waits until something is so.
pub(crate) async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    soon(what, async {
        while !is_so() {
            sleep(LOOK_AGAIN).await;
        }
    })
    .await;
}

/// Writes rooms without end, both keys of one in one transaction and with the same value.
pub(crate) struct Writer {
    acknowledged: Arc<AtomicU64>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Writer {
    pub(crate) fn start<P: Pen>(stage: &Stage<P>) -> Self {
        let (pen, prefix, count) = (stage.pen.clone(), stage.prefix, Arc::clone(&stage.count));
        let (stop, acknowledged) = (CancellationToken::new(), Arc::new(AtomicU64::new(0)));
        let (stopped, told) = (stop.clone(), Arc::clone(&acknowledged));
        let task = tokio::spawn(async move {
            while !stopped.is_cancelled() {
                let number = count.fetch_add(1, Ordering::Relaxed) + 1;
                let value = (fastrand::u8(0..4) > 0).then(|| number.to_string().into_bytes());
                let id = format!("room-{}", fastrand::u8(0..40));
                let both = ["spec", "link"].map(|kind| (key(prefix, &id, kind), value.clone()));
                pen.write(both.to_vec()).await;
                told.fetch_add(1, Ordering::Relaxed);
                sleep(Duration::from_millis(3)).await;
            }
        });
        Self { acknowledged, stop, task }
    }

    /// Waits until some more writes were acknowledged.
    pub(crate) async fn goes_on(&self) {
        let enough = self.acknowledged.load(Ordering::Relaxed) + 20;
        let is_enough = || self.acknowledged.load(Ordering::Relaxed) >= enough;
        until("writes are acknowledged", is_enough).await;
    }

    pub(crate) async fn stop(self) {
        self.stop.cancel();
        soon("the last write is acknowledged", self.task).await.unwrap();
    }
}

/// No handler ever saw half of what a [`Writer`] wrote.
pub(crate) fn all_is_whole(deeds: &[Deed]) {
    let is_whole = |room: &Room| room.spec == room.link;
    for deed in deeds {
        match deed {
            Deed::Rebuild(rooms) => assert!(rooms.values().all(is_whole), "{deed:?}"),
            Deed::Reconcile(_, room) => assert!(room.iter().all(is_whole), "{deed:?}"),
        }
    }
}
