//! The process that keeps the rooms of a Janus: those that are assigned to it are there, each sends to its
//! mixer, and no others are.
//!
//! ```text
//! /rooms/{id}/livemeta: ours ──► a room in Janus, /rooms/{id}/janus
//! /rooms/{id}/mixer ──► one forwarder, to there
//! anything else ──► the room is destroyed, the key removed if it is ours
//! ```
//!
//! It remembers nothing: what is there is asked of Janus, what should be of the store. Once a second it looks
//! whether Janus answers and has what it should: a Janus that was restarted is empty, and gets everything
//! anew; one that is away for long gives no sign of life, and its rooms go to another. When this process
//! ends, Janus goes on, and so do the rooms in it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use parking_lot::Mutex;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tokio_util::sync::CancellationToken;
use vedetta::core::explain;
use vedetta::etcd::{Cluster, tell};
use vedetta::runtime::watcher::{BoxError, Id, Wanted};
use vedetta::runtime::{Next, Reconcile, Watcher, Watching};

use crate::bridge::{Bridge, BridgeError, Bridged};
use crate::forward::{Step, plan};
use crate::model::{Heartbeat, JanusAt, Kind, ROOMS, Room, is_id};
use crate::presence::{Presence, Voice, heartbeat, mark_ready};
use crate::store::{publish, withdraw};

/// How long the store and Janus may take to answer at the start.
const START: Duration = Duration::from_secs(60);
/// How long what runs may take to end.
const GRACE: Duration = Duration::from_secs(5);
/// How often Janus is looked at.
const LOOK: Duration = Duration::from_secs(1);
/// A Janus that did not answer for so long is not there.
const AWAY: Duration = Duration::from_secs(5);
/// So long after a request that was not answered Janus may still do what it says.
const LATE: Duration = Duration::from_secs(10);
/// Every room is looked at once in this time, whether anything changed or not.
const RESYNC: Duration = Duration::from_secs(20);

/// How a Janus is kept.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// What it is called
    #[arg(long, value_parser = crate::model::parse_id)]
    pub id: String,
    /// Where its admin API is
    #[arg(long, default_value = "http://127.0.0.1:7088/admin")]
    pub admin: String,
    /// How many rooms it can hold
    #[arg(long, default_value_t = 100)]
    pub capacity: u32,
    /// Ready for rooms at its first start, without being marked so
    #[arg(long)]
    pub ready: bool,
    /// How many seconds its rooms have to be moved to others when it is to end
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    pub drain: u64,
}

/// In the environment: Janus's `admin_secret`.
pub const SECRET: &str = "JANUS_ADMIN_SECRET";
/// In the environment: AudioBridge's `admin_key`.
pub const KEY: &str = "JANUS_ADMIN_KEY";

/// Keeps a Janus until `stop`; then lets others take its rooms, and leaves. The secrets come by the
/// environment: arguments are seen by everybody on the machine.
pub async fn run(store: Cluster, args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let variable = |name| std::env::var(name).with_context(|| format!("set {name}"));
    let bridge = Bridge::new(&args.admin, &variable(SECRET)?, &variable(KEY)?);
    let beat = heartbeat(args.admin.clone(), args.capacity);
    // The first sign of life comes when Janus gives one.
    let mut presence = Presence::start(store.clone(), Kind::Janus, &args.id, None);
    let manager = Arc::new(Manager {
        me: args.id.clone(),
        store: store.clone(),
        bridge,
        rooms: Mutex::default(),
        unanswered: Mutex::default(),
        voice: presence.voice(),
        beat,
    });
    tokio::select! {
        there = manager.wait_for_janus() => there?,
        () = stop.cancelled() => return Ok(()),
    }
    tokio::select! {
        joined = presence.joined() => joined?,
        () = stop.cancelled() => return Ok(()),
    }
    if args.ready {
        mark_ready(&store, Kind::Janus, &args.id).await.context("cannot mark it as ready")?;
    }
    let watching = Watcher::new(ROOMS)
        .key_types(["livemeta", "mixer", "janus"])
        .timeout(Some(Duration::from_secs(60)))
        .resync_every(RESYNC)
        .start(store.clone(), Rooms(Arc::clone(&manager)));
    let telling = tell(&store, &format!("janus-{}", args.id), watching.handle());
    watching.ready(START).await.context("cannot compare Janus with the store")?;
    println!("janus {} ready, pid {}", args.id, std::process::id());

    let taken = tokio::select! {
        () = stop.cancelled() => None,
        taken = presence.taken() => Some(taken),
        () = manager.look(&watching) => None,
    };
    if taken.is_none() {
        manager.voice.leaving();
        manager.drained(&watching, Duration::from_secs(args.drain)).await;
    }
    watching.stop(GRACE).await;
    tokio::join!(presence.leave(), telling.end());
    taken.map_or(Ok(()), |taken| Err(taken.into()))
}

struct Manager {
    me: String,
    store: Cluster,
    bridge: Bridge,
    /// The rooms of ours in Janus, as far as we know, and whether one is neither begun nor ended just now.
    rooms: Mutex<HashMap<String, bool>>,
    /// Rooms for which Janus did not answer when it was to send, and when that was.
    unanswered: Mutex<HashMap<String, Instant>>,
    voice: Voice,
    /// What the sign of life says while Janus answers.
    beat: Heartbeat,
}

impl Manager {
    /// What the rooms of this manager are called: so they are told from those of others in the same Janus.
    fn description(&self) -> String {
        format!("live-rooms {}", self.me)
    }

    /// Every room in Janus, and whether it is ours.
    async fn listed(&self) -> Result<HashMap<String, bool>, BridgeError> {
        let ours = self.description();
        let rooms = self.bridge.rooms().await?.into_iter();
        Ok(rooms.map(|Bridged { room, description }| (room, description == ours)).collect())
    }

    async fn wait_for_janus(&self) -> anyhow::Result<()> {
        let begun = Instant::now();
        loop {
            match self.listed().await {
                Ok(_) => {
                    self.voice.say(|beat| *beat = Some(self.beat.clone()));
                    return Ok(());
                }
                Err(error @ BridgeError::Unreachable(_)) if begun.elapsed() < START => {
                    tracing::debug!(error = explain(&error), "waiting for Janus");
                    sleep(Duration::from_millis(200)).await;
                }
                Err(error) => {
                    return Err(error)
                        .context(format!("cannot use Janus (see --admin, {SECRET}, {KEY})"));
                }
            }
        }
    }

    /// Looks at Janus again and again.
    async fn look(&self, watching: &Watching<Room>) {
        let mut ticks = interval(LOOK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut answered, mut is_away) = (Instant::now(), false);
        loop {
            ticks.tick().await;
            let settled = || {
                let rooms = self.rooms.lock();
                let settled = rooms.iter().filter(|(_, is_settled)| **is_settled);
                settled.map(|(room, _)| room.clone()).collect::<HashSet<_>>()
            };
            let known = self.rooms.lock().clone();
            let before = settled();
            let listed = match self.listed().await {
                Ok(listed) => listed,
                Err(error) => {
                    tracing::warn!(error = explain(&error), "Janus does not answer");
                    is_away = true;
                    if answered.elapsed() >= AWAY {
                        self.voice.say(|beat| *beat = None);
                    }
                    continue;
                }
            };
            answered = Instant::now();
            self.voice.say(|beat| {
                if beat.is_none() {
                    *beat = Some(self.beat.clone());
                }
            });
            let ours = || listed.iter().filter(|(_, is_ours)| **is_ours).map(|(room, _)| room);
            self.voice.load(ours().count());
            // What was begun or ended while we looked is neither missing nor too much.
            let after = settled();
            let missing =
                before.intersection(&after).filter(|room| !listed.contains_key(*room)).count();
            let was_away = std::mem::take(&mut is_away);
            if was_away || missing > 0 {
                tracing::warn!(missing, "Janus may have been restarted: looking at every room");
                watching.resync().await;
            }
            let mut orphans = 0;
            for room in ours().filter(|room| !known.contains_key(*room)) {
                if !self.rooms.lock().contains_key(room) {
                    orphans += 1;
                    self.destroy(room).await.unwrap_or_else(|error| {
                        tracing::warn!(room, error = explain(&error), "cannot destroy an orphan");
                    });
                }
            }
            if orphans > 0 {
                // One that became ours while it was destroyed was found there, and is missing now.
                tracing::info!(orphans, "destroyed what nobody asked for: comparing again");
                watching.resync().await;
            }
        }
    }

    /// When to look at a room again that is as it should be: soon, if Janus may still do what it did not answer to.
    fn next(&self, id: &str) -> Next {
        let mut unanswered = self.unanswered.lock();
        match unanswered.get(id) {
            Some(at) if at.elapsed() < LATE => Next::After(LOOK),
            Some(_) => {
                unanswered.remove(id);
                Next::Done
            }
            None => Next::Done,
        }
    }

    /// Waits until we have no rooms any more, or nobody can take them.
    async fn drained(&self, watching: &Watching<Room>, patience: Duration) {
        let drained = async {
            let is_ours = |room: &Room| {
                room.run_by(Kind::Janus, &self.me).is_some()
                    || room.janus.as_ref().is_some_and(|at| at.janus_id == self.me)
            };
            while watching.all().iter().any(|(_, room)| is_ours(room)) {
                sleep(Duration::from_millis(50)).await;
            }
        };
        if timeout(patience, drained).await.is_err() {
            tracing::warn!("nobody took all of our rooms: they stay in Janus");
        }
    }

    async fn destroy(&self, room: &str) -> Result<(), BridgeError> {
        if let Some(is_settled) = self.rooms.lock().get_mut(room) {
            *is_settled = false;
        }
        self.bridge.destroy(room).await?;
        self.rooms.lock().remove(room);
        tracing::info!(room, "gone from Janus");
        Ok(())
    }

    /// A room that is there, and sends to where it should.
    async fn keep(&self, id: &str, room: &Room) -> Result<(), BoxError> {
        let is_known = self.rooms.lock().contains_key(id);
        if !is_known && self.listed().await?.get(id) == Some(&false) {
            // Another manager of this Janus made it; called so, nobody would see if it is left over.
            tracing::info!(room = id, "is not called ours in Janus: making it anew");
            self.destroy(id).await?;
        }
        let there = match self.bridge.forwarders(id).await {
            Err(BridgeError::NoSuchRoom) => {
                self.rooms.lock().insert(id.to_owned(), false);
                self.bridge.create(id, &self.description()).await?;
                tracing::info!(room = id, "in Janus");
                Vec::new()
            }
            there => there?,
        };
        self.rooms.lock().insert(id.to_owned(), true);
        let target = room.target();
        for step in plan(id, &there, target) {
            match (step, target) {
                (Step::Add, Some(at)) => {
                    let asked = self.bridge.forward(id, at.host, at.port, at.ssrc).await;
                    if let Err(BridgeError::Unreachable(_)) = asked {
                        // Asked again and done late, it would send twice.
                        self.unanswered.lock().insert(id.to_owned(), Instant::now());
                    }
                    asked?;
                    tracing::info!(room = id, mixer = at.mixer_id, port = at.port, "sends");
                }
                (Step::Add, None) => {}
                (Step::Stop(stream), _) => self.bridge.stop_forward(id, stream).await?,
            }
        }
        let at = JanusAt { janus_id: self.me.clone(), room: id.to_owned() };
        if room.janus.as_ref() != Some(&at) {
            publish(&self.store, (Kind::Janus, &self.me), id, &at).await?;
        }
        Ok(())
    }
}

struct Rooms(Arc<Manager>);

impl Reconcile for Rooms {
    type State = Room;

    async fn rebuild(&self, wanted: &Wanted<Room>) -> Result<(), BoxError> {
        let manager = &self.0;
        let mut listed = manager.listed().await?;
        listed.retain(|_, is_ours| *is_ours);
        manager.rooms.lock().clone_from(&listed);
        for room in listed.keys() {
            let state = wanted.get(room.as_bytes());
            let is_ours = state.is_some_and(|room| room.run_by(Kind::Janus, &manager.me).is_some());
            // One whose values cannot be read may be ours.
            if !is_ours && (state.is_some() || !wanted.contains(room.as_bytes())) {
                manager.destroy(room).await?;
            }
        }
        Ok(())
    }

    async fn reconcile(&self, id: &Id, room: Option<&Room>) -> Result<Next, BoxError> {
        let manager = &self.0;
        let Some(id) = str::from_utf8(id.as_bytes()).ok().filter(|id| is_id(id)) else {
            return Ok(Next::Done); // it was not made by `rooms`
        };
        if let Some(room) = room
            && room.run_by(Kind::Janus, &manager.me).is_some()
        {
            manager.keep(id, room).await?;
            return Ok(manager.next(id));
        }
        let said = room.and_then(|room| room.janus.as_ref());
        let is_said = said.is_some_and(|at| at.janus_id == manager.me);
        if is_said || manager.rooms.lock().contains_key(id) {
            manager.destroy(id).await?;
            let is_ours = |at: &JanusAt| at.janus_id == manager.me;
            withdraw(&manager.store, Kind::Janus, id, is_ours).await?;
        }
        Ok(Next::Done)
    }
}

#[cfg(test)]
mod tests {
    use axum::extract::State;
    use axum::{Json, Router, routing::post};
    use serde_json::{Value, json};
    use std::net::Ipv4Addr;

    use super::*;
    use crate::demo::Embedded;
    use crate::model::{LiveMeta, MixerAt, Status, room_key, ssrc};
    use crate::store::json as bytes;

    /// A Janus of one room that begins to send only when nobody waits for its answer any more, the first time.
    #[derive(Default)]
    struct Late {
        room: Value,
        forwarders: Vec<Value>,
        asked: u64,
        /// That is done.
        is_done: bool,
    }

    async fn admin(State(late): State<Arc<Mutex<Late>>>, Json(asked): Json<Value>) -> Json<Value> {
        let request = asked["request"].clone();
        let answer = match request["request"].as_str().unwrap() {
            "list" => {
                let room = late.lock().room.clone();
                json!({ "list": if room.is_null() { vec![] } else { vec![room] } })
            }
            "create" => {
                late.lock().room = request;
                json!({})
            }
            "listforwarders" if late.lock().room.is_null() => json!({ "error_code": 485 }),
            "listforwarders" => json!({ "rtp_forwarders": late.lock().forwarders }),
            "stop_rtp_forward" => {
                let mut late = late.lock();
                late.forwarders.retain(|it| it["stream_id"] != request["stream_id"]);
                json!({})
            }
            "rtp_forward" => {
                late.lock().asked += 1;
                let number = late.lock().asked;
                // Who asked may be gone; it is done nevertheless.
                let doing = tokio::spawn(async move {
                    if number == 1 {
                        while late.lock().asked == 1 {
                            sleep(Duration::from_millis(20)).await;
                        }
                        sleep(LOOK / 2).await;
                    }
                    let mut late = late.lock();
                    late.is_done |= number == 1;
                    late.forwarders.push(json!({
                        "stream_id": number, "ip": request["host"], "port": request["port"],
                        "ssrc": request["ssrc"], "always_on": true,
                    }));
                });
                doing.await.unwrap();
                json!({})
            }
            other => panic!("{other}"),
        };
        Json(json!({ "janus": "success", "response": answer }))
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_forwarder_that_comes_late_beside_the_one_asked_for_again_is_ended() {
        let late = Arc::new(Mutex::new(Late::default()));
        let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let url = format!("http://{}/admin", listener.local_addr().unwrap());
        let router = Router::new().route("/admin", post(admin)).with_state(Arc::clone(&late));
        tokio::spawn(async { axum::serve(listener, router).await });

        let folder = tempfile::tempdir().unwrap();
        let embedded = Embedded::open(folder.path()).await.unwrap();
        let store: Cluster = embedded.etcd.parse().unwrap();
        let meta = LiveMeta { status: Status::OnAir, ..LiveMeta::new(None, 0) };
        let meta = meta.assign(Kind::Janus, "j1").assign(Kind::Mixer, "m1");
        let (generation, ssrc) = (meta.generation, ssrc("r", meta.generation));
        let (mixer_id, host, run) = ("m1".to_owned(), Ipv4Addr::LOCALHOST, String::new());
        let at = MixerAt { mixer_id, host, port: 42000, ssrc, generation, run };
        store.put(room_key("r", "livemeta"), bytes(&meta)).await.unwrap();
        store.put(room_key("r", "mixer"), bytes(&at)).await.unwrap();

        let presence = Presence::start(store.clone(), Kind::Janus, "j1", None);
        let manager = Manager {
            me: "j1".to_owned(),
            store: store.clone(),
            bridge: Bridge::new(&url, "s", "k"),
            rooms: Mutex::default(),
            unanswered: Mutex::default(),
            voice: presence.voice(),
            beat: heartbeat(url, 1),
        };
        // Nothing is looked at again just because time passes.
        let watching = Watcher::new(ROOMS)
            .key_types(["livemeta", "mixer", "janus"])
            .start(store, Rooms(Arc::new(manager)));
        let one_is_left = async {
            loop {
                let is_so = {
                    let late = late.lock();
                    late.is_done && late.forwarders.len() == 1
                };
                if is_so {
                    return;
                }
                sleep(Duration::from_millis(20)).await;
            }
        };
        testing::soon("one is left", one_is_left).await;
        assert_eq!(late.lock().asked, 2);
        watching.stop(GRACE).await;
        embedded.close().await;
    }
}
