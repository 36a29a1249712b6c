//! The process that keeps the rooms: their HTTP API, and who runs which.
//!
//! ```text
//!  /mixers/, /januses/ ──► who lives, is ready, has room ──changed──┐
//!  /rooms/ ──► what each room needs (`place`) ──► livemeta ◄────────┴── HTTP (`api`)
//!                       ▲ its time is over
//! ```
//!
//! Any number of these processes may run at once: nothing is kept here that is not in the store, and what is
//! written is written only if what it was decided on still stands.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::TcpListener;
use tokio::sync::{Mutex, Notify};
use tokio_util::sync::CancellationToken;
use vedetta::etcd::{Cluster, Is, Write, tell};
use vedetta::runtime::watcher::{BoxError, Id};
use vedetta::runtime::{Next, Reconcile, Watcher, Watching};

use crate::api;
use crate::model::{Kind, LiveMeta, Module, PLACEMENTS, ROOMS, Room, now, room_key};
use crate::place::{Decision, Modules, Places, Rules, decide, loads, pick};
use crate::store::{self, StoreError, get, json, rooms, update};

/// How long the store may take to answer at the start.
const START: Duration = Duration::from_secs(60);
/// How long requests and writes may take to finish at the end.
const GRACE: Duration = Duration::from_secs(5);
/// How many rooms are looked after at once.
const PARALLEL: NonZeroU32 = NonZeroU32::new(16).expect("not zero");
/// How often a placement is tried while others place, too.
const TRIES: usize = 20;

/// Keeps the rooms until `stop`. Says where it listens once it does.
pub async fn run(
    store: Cluster,
    listen: SocketAddr,
    rules: Rules,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    anyhow::ensure!(listen.ip().is_loopback(), "--listen must be on this machine: nobody signs in");
    let listener = TcpListener::bind(listen).await;
    let listener = listener.with_context(|| format!("cannot listen on {listen}"))?;
    let changed = Arc::new(Notify::new());
    let modules = |kind: Kind| {
        let watcher = Watcher::new(kind.prefix()).key_types(["heartbeat", "state"]);
        Arc::new(watcher.start(store.clone(), Changed(Arc::clone(&changed))))
    };
    let table = Table { mixers: modules(Kind::Mixer), januses: modules(Kind::Janus) };
    // Before they are known, every module seems to be dead.
    for modules in [&table.mixers, &table.januses] {
        modules.ready(START).await.context("cannot read the modules from the store")?;
    }
    let keeper = Keeper {
        store: store.clone(),
        table: table.clone(),
        rules,
        placing: Mutex::default(),
        places: parking_lot::Mutex::default(),
        changed: Arc::clone(&changed),
    };
    let watcher = Watcher::new(ROOMS)
        .key_types(["livemeta", "mixer", "janus"])
        .parallel(PARALLEL)
        .timeout(Some(Duration::from_secs(60)))
        .resync_every(Duration::from_secs(60));
    let rooms = Arc::new(watcher.start(store.clone(), keeper));
    rooms.ready(START).await.context("cannot read the rooms from the store")?;
    let telling = [
        tell(&store, "rooms", rooms.handle()),
        tell(&store, "mixers", table.mixers.handle()),
        tell(&store, "januses", table.januses.handle()),
    ];
    println!("rooms listening on http://{}", listener.local_addr()?);
    let follow_modules = async {
        loop {
            changed.notified().await;
            rooms.resync().await;
        }
    };
    let app = api::App { store, table: table.clone(), rooms: Arc::clone(&rooms) };
    tokio::select! {
        served = api::serve(listener, app, stop.clone(), GRACE) => served?,
        () = follow_modules => {}
    }
    if let Some(rooms) = Arc::into_inner(rooms) {
        rooms.stop(GRACE).await;
    }
    for telling in telling {
        telling.end().await;
    }
    Ok(())
}

/// The modules there are, as far as is known.
#[derive(Clone)]
pub(crate) struct Table {
    pub(crate) mixers: Arc<Watching<Module>>,
    pub(crate) januses: Arc<Watching<Module>>,
}

impl Table {
    pub(crate) fn of(&self, kind: Kind) -> &Watching<Module> {
        match kind {
            Kind::Mixer => &self.mixers,
            Kind::Janus => &self.januses,
        }
    }

    /// Whether any module of this kind may have rooms at all.
    fn is_open(&self, kind: Kind) -> bool {
        self.of(kind).all().iter().any(|(_, module)| module.takes_rooms(0))
    }

    /// The module of this kind that should get the next room.
    fn pick(&self, kind: Kind, rooms: &[Room]) -> Option<String> {
        let all = self.of(kind).all();
        let modules = all
            .iter()
            .filter_map(|(id, module)| Some((str::from_utf8(id.as_bytes()).ok()?, &**module)));
        pick(modules, &loads(rooms, kind), |n| fastrand::usize(..n)).map(str::to_owned)
    }

    /// The mixer that should get the next room.
    pub(crate) fn pick_mixer(&self, rooms: &[Room]) -> Option<String> {
        self.pick(Kind::Mixer, rooms)
    }

    /// The Janus that should get the next room.
    pub(crate) fn pick_janus(&self, rooms: &[Room]) -> Option<String> {
        self.pick(Kind::Janus, rooms)
    }
}

impl Modules for Table {
    fn module(&self, kind: Kind, id: &str) -> Module {
        self.of(kind).get(id).map(|module| (*module).clone()).unwrap_or_default()
    }
}

/// Has every room looked at again when something changes that matters for them.
struct Changed(Arc<Notify>);

impl Reconcile for Changed {
    type State = Module;

    async fn reconcile(&self, id: &Id, module: Option<&Module>) -> Result<Next, BoxError> {
        let module = module.cloned().unwrap_or_default();
        tracing::info!(%id, alive = module.is_alive(), marks = ?module.marks, "a module changed");
        self.0.notify_one();
        Ok(Next::Done)
    }
}

/// Gives each room what it needs.
struct Keeper {
    store: Cluster,
    table: Table,
    rules: Rules,
    /// One placement at a time: in this process by this, in all by [`PLACEMENTS`].
    placing: Mutex<()>,
    places: parking_lot::Mutex<Places>,
    /// Has every room looked at again.
    changed: Arc<Notify>,
}

impl Reconcile for Keeper {
    type State = Room;

    async fn reconcile(&self, id: &Id, room: Option<&Room>) -> Result<Next, BoxError> {
        let id = str::from_utf8(id.as_bytes())?;
        let decided = room.map(|room| decide(room, now(), &self.table, &self.rules));
        let waits = matches!(decided, Some(Decision::Place(_)));
        // Before anything is read for it: so what is given up from now on is told.
        if self.places.lock().saw(id, room, waits) {
            self.changed.notify_one();
        }
        let (Some(room), Some(decided)) = (room, decided) else { return Ok(Next::Done) };
        match decided {
            Decision::Rest(None) => Ok(Next::Done),
            Decision::Rest(Some(wait)) => Ok(Next::After(wait)),
            // If nobody could take it anyway, everything need not be read.
            Decision::Place(kinds) if !kinds.iter().any(|kind| self.table.is_open(*kind)) => {
                tracing::debug!(room = id, "it waits for a module");
                Ok(Next::Done)
            }
            Decision::Place(_) => self.place(id).await,
            Decision::Remove(why) => {
                let seen = room.meta.clone();
                let remove = |meta: Option<LiveMeta>| {
                    // Somebody may have started it just now; then this runs again.
                    (meta == seen).then(|| meta.map(|meta| meta.removing(now()))).flatten()
                };
                if update(&self.store, &room_key(id, "livemeta"), remove).await?.is_some() {
                    tracing::info!(room = id, why, "removing");
                }
                Ok(Next::Done)
            }
            Decision::Clear(kinds) => self.forget(id, room, &kinds, true).await,
            Decision::Forget(kinds) => self.forget(id, room, &kinds, false).await,
        }
    }
}

impl Keeper {
    /// Gives a room the modules that it lacks. Everything is read afresh, and nothing is written if anybody
    /// placed anything since: so no module gets more than it can take, however many place.
    async fn place(&self, id: &str) -> Result<Next, BoxError> {
        let _turn = self.placing.lock().await;
        for _ in 0..TRIES {
            let last = match self.store.get(PLACEMENTS).await? {
                Some(entry) => Is::At(entry.modified),
                None => Is::Missing,
            };
            let listed = rooms(&self.store).await?;
            let Some(this) = listed.iter().find(|room| room.id == id) else {
                return Ok(Next::Done);
            };
            let decided = decide(&this.room, now(), &self.table, &self.rules);
            let (Decision::Place(kinds), Some(before), Some(at)) =
                (decided, &this.room.meta, this.meta_at)
            else {
                return Ok(Next::Done); // it has changed, and this runs again
            };
            let all: Vec<Room> = listed.iter().map(|listed| listed.room.clone()).collect();
            let mut meta = before.clone();
            for kind in kinds {
                let picked = match kind {
                    Kind::Mixer => self.table.pick_mixer(&all),
                    Kind::Janus => self.table.pick_janus(&all),
                };
                match picked {
                    Some(module) => {
                        let former = meta.assigned(kind).unwrap_or("nobody").to_owned();
                        tracing::info!(room = id, %kind, %former, now = %module, "assigned");
                        meta = meta.assign(kind, &module);
                    }
                    // It waits: every change of a module, and every place that is given up, has all rooms
                    // looked at.
                    None => tracing::warn!(room = id, "no {kind} can take it"),
                }
            }
            if meta == *before {
                return Ok(Next::Done);
            }
            let key = room_key(id, "livemeta");
            let write = Write::new()
                .when(PLACEMENTS, last)
                .when(key.clone(), Is::At(at))
                .put(PLACEMENTS, id.to_owned())
                .put(key, json(&meta));
            if self.store.write(write).await?.done {
                return Ok(Next::Done);
            }
        }
        Err(StoreError::Busy(PLACEMENTS.to_owned()).into())
    }

    /// Removes the keys of these kinds, and the livemeta if it does not stay, as they were seen.
    async fn forget(
        &self,
        id: &str,
        room: &Room,
        kinds: &[Kind],
        stays: bool,
    ) -> Result<Next, BoxError> {
        let key = room_key(id, "livemeta");
        let mut write = Write::new();
        write = match (get::<LiveMeta>(&self.store, &key).await?, &room.meta) {
            (Some((meta, at)), Some(seen)) if meta == *seen => {
                let write = write.when(key.clone(), Is::At(at));
                if stays { write } else { write.delete(key) }
            }
            (None, None) => write.when(key, Is::Missing),
            _ => return Ok(Next::Done), // it has changed, and this runs again
        };
        for kind in kinds {
            let key = room_key(id, kind.part());
            if let Some(entry) = self.store.get(key.clone()).await? {
                write = write.when(key.clone(), Is::At(entry.modified)).delete(key);
            }
        }
        if !self.store.write(write).await?.done {
            return Err(store::StoreError::Busy(id.to_owned()).into());
        }
        if stays {
            tracing::info!(room = id, ?kinds, "what the dead left is gone");
        } else {
            tracing::info!(room = id, "gone");
        }
        Ok(Next::Done)
    }
}
