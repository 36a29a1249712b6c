//! The process that streams rooms: for each one that is on air and assigned to it, a [`Stream`].
//!
//! ```text
//! /rooms/{id}/livemeta: on air, ours ──► a port, FFmpeg, /rooms/{id}/mixer
//!                       anything else ──► FFmpeg is ended, the port given back, the key removed if it is ours
//!                       gone ──► the folder, too
//! ```

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use vedetta::core::explain;
use vedetta::etcd::{Cluster, tell};
use vedetta::runtime::watcher::{BoxError, Id, Wanted};
use vedetta::runtime::{Next, Reconcile, Watcher, Watching};

use crate::leftovers::{Media, kill_leftovers};
use crate::model::{Kind, LiveMeta, MixerAt, ROOMS, Room, Status, room_key, ssrc};
use crate::ports::{Pool, Ports};
use crate::presence::{Presence, Voice, heartbeat, mark_ready};
use crate::programs::find;
use crate::store::{StoreError, get, publish, withdraw};
use crate::stream::{Announce, Codec, Making, Stream};

/// How long the store may take to answer at the start.
const START: Duration = Duration::from_secs(60);
/// How long what runs may take to end.
const GRACE: Duration = Duration::from_secs(8);
/// Every room is looked at once in this time, whether anything changed or not.
const RESYNC: Duration = Duration::from_secs(30);

/// How a mixer is run.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// What it is called
    #[arg(long, value_parser = crate::model::parse_id)]
    pub id: String,
    /// The ports that it may take RTP on, two for each room
    #[arg(long, default_value = "42000-42199")]
    pub ports: Ports,
    /// The folder of the streams: DIR/{room}/index.m3u8
    #[arg(long, value_name = "DIR")]
    pub media: PathBuf,
    /// How many rooms it can stream [default: as many as there are ports, at most 50]
    #[arg(long)]
    pub capacity: Option<u32>,
    /// The address at which it takes RTP
    #[arg(long, default_value_t = Ipv4Addr::LOCALHOST)]
    pub host: Ipv4Addr,
    /// What the sound is made into
    #[arg(long, value_enum, default_value_t = Codec::Aac)]
    pub codec: Codec,
    /// How many seconds of sound are in a segment of a stream
    #[arg(long, value_name = "SECONDS", default_value_t = 2)]
    #[arg(value_parser = clap::value_parser!(u8).range(1..=60))]
    pub segment: u8,
    /// Ready for rooms at its first start, without being marked so
    #[arg(long)]
    pub ready: bool,
    /// How many seconds its rooms have to be moved to others when it is to end
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    pub drain: u64,
}

/// Streams rooms until `stop`; then lets others take them, and leaves.
pub async fn run(store: Cluster, args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let ffmpeg = find("ffmpeg")?;
    let media = Arc::new(Media::open(&args.media, &args.id)?);
    let owner = media.owner();
    let left = tokio::task::spawn_blocking(move || kill_leftovers(&owner)).await?;
    match left.context("cannot end what a former mixer has left")? {
        0 => {}
        left => tracing::warn!(left, "ended what a former mixer has left"),
    }
    let pairs = args.ports.pairs();
    let capacity = args.capacity.unwrap_or(50).min(pairs);
    let beat = heartbeat(args.host.to_string(), capacity);
    let run = beat.run.clone();
    let mut presence = Presence::start(store.clone(), Kind::Mixer, &args.id, Some(beat));
    tokio::select! {
        joined = presence.joined() => joined?,
        () = stop.cancelled() => return Ok(()),
    }
    if args.ready {
        mark_ready(&store, Kind::Mixer, &args.id).await.context("cannot mark it as ready")?;
    }
    let pool = Pool::new(args.host, args.ports);
    let (owner, host, codec, segment) = (media.owner(), args.host, args.codec, args.segment);
    let making = Making { ffmpeg, owner, host, pool, codec, segment };
    let mixer = Arc::new(Mixer {
        me: args.id.clone(),
        run,
        there: presence.there(),
        store: store.clone(),
        media,
        making,
        streams: Mutex::default(),
        voice: presence.voice(),
    });
    let watching = Watcher::new(ROOMS)
        .key_types(["livemeta", "mixer"])
        .resync_every(RESYNC)
        .start(store.clone(), Rooms(Arc::clone(&mixer)));
    let telling = tell(&store, &format!("mixer-{}", args.id), watching.handle());
    watching.ready(START).await.context("cannot read the rooms from the store")?;
    println!("mixer {} ready, pid {}", args.id, std::process::id());

    let taken = tokio::select! {
        () = stop.cancelled() => None,
        taken = presence.taken() => Some(taken),
    };
    if taken.is_none() {
        mixer.voice.leaving();
        mixer.drained(&watching, Duration::from_secs(args.drain)).await;
    }
    watching.stop(GRACE).await;
    // What another process of our id says of these rooms is not ours to remove.
    mixer.end(taken.is_none()).await;
    tokio::join!(presence.leave(), telling.end());
    taken.map_or(Ok(()), |taken| Err(taken.into()))
}

struct Mixer {
    me: String,
    /// Tells this process from any other of that id.
    run: String,
    /// Whether the id is ours now.
    there: watch::Receiver<bool>,
    store: Cluster,
    media: Arc<Media>,
    making: Making,
    streams: Mutex<HashMap<String, Arc<Running>>>,
    voice: Voice,
}

/// A stream, and for which assignment it was begun.
struct Running {
    stream: Stream,
    generation: u64,
}

impl Mixer {
    fn stream(&self, room: &str) -> Option<Arc<Running>> {
        self.streams.lock().get(room).cloned()
    }

    /// What the key of a room says while a stream takes packets there.
    fn at(&self, room: &str, generation: u64, port: u16) -> MixerAt {
        let ssrc = ssrc(room, generation);
        let (mixer_id, run) = (self.me.clone(), self.run.clone());
        MixerAt { mixer_id, host: self.making.host, port, ssrc, generation, run }
    }

    /// Whether it is ours to remove: we said it, or another process of our id that is no more.
    fn is_ours(&self, at: &MixerAt) -> bool {
        at.mixer_id == self.me && (at.run == self.run || *self.there.borrow())
    }

    fn tell_load(&self) {
        self.voice.load(self.streams.lock().len());
    }

    /// Has a room streamed.
    fn begin(self: &Arc<Self>, room: &str, generation: u64) {
        tracing::info!(room, generation, "on air here");
        let announcer = Announcer { mixer: Arc::clone(self), room: room.to_owned(), generation };
        let stream = Stream::start(self.making.clone(), self.media.of(room), generation, announcer);
        let running = Arc::new(Running { stream, generation });
        self.streams.lock().insert(room.to_owned(), running);
        self.tell_load();
    }

    /// Ends the stream of a room; when this returns nothing of it runs.
    async fn end_stream(&self, room: &str) -> bool {
        let Some(running) = self.stream(room) else { return false };
        running.stream.stop().await;
        self.streams.lock().remove(room);
        self.tell_load();
        tracing::info!(room, "no longer on air here");
        true
    }

    /// Removes what we said of a room.
    async fn withdraw(&self, room: &str) -> Result<(), BoxError> {
        Ok(withdraw(&self.store, Kind::Mixer, room, |at| self.is_ours(at)).await?)
    }

    /// Waits until we have no rooms any more, or nobody can take them.
    async fn drained(&self, watching: &Watching<Room>, patience: Duration) {
        let drained = async {
            let is_ours = |room: &Room| room.run_by(Kind::Mixer, &self.me).is_some();
            while !self.streams.lock().is_empty()
                || watching.all().iter().any(|(_, room)| is_ours(room))
            {
                sleep(Duration::from_millis(50)).await;
            }
        };
        if timeout(patience, drained).await.is_err() {
            let left = self.streams.lock().len();
            tracing::warn!(left, "nobody took all of our rooms: ending their streams");
        }
    }

    /// Ends every stream, and removes what we said of it.
    async fn end(self: &Arc<Self>, removes: bool) {
        let rooms: Vec<String> = self.streams.lock().keys().cloned().collect();
        let mut ending = JoinSet::new();
        for room in rooms {
            let mixer = Arc::clone(self);
            ending.spawn(async move {
                mixer.end_stream(&room).await;
                if !removes {
                    return;
                }
                let withdrawn = timeout(Duration::from_secs(3), mixer.withdraw(&room)).await;
                if !matches!(withdrawn, Ok(Ok(()))) {
                    tracing::warn!(room, "the store does not know that it is no longer mixed here");
                }
            });
        }
        ending.join_all().await;
    }
}

/// Tells the store, and so Janus, where a room's packets are to go.
struct Announcer {
    mixer: Arc<Mixer>,
    room: String,
    generation: u64,
}

impl Announce for Announcer {
    async fn ready(&self) {
        let is_there = self.mixer.there.clone().wait_for(|there| *there).await.is_ok();
        if !is_there {
            std::future::pending::<()>().await; // another process has our id: we are being ended
        }
    }

    async fn announce(&self, port: u16) {
        let Self { mixer, room, generation } = self;
        let at = mixer.at(room, *generation, port);
        loop {
            self.ready().await;
            match publish(&mixer.store, (Kind::Mixer, &mixer.me), room, &at).await {
                Ok(true) => return tracing::info!(room, port, "takes packets"),
                // It is no longer ours, and ends soon.
                Ok(false) => return,
                Err(error) => tracing::warn!(room, error = explain(&error), "cannot tell where"),
            }
            sleep(Duration::from_millis(500)).await;
        }
    }
}

struct Rooms(Arc<Mixer>);

impl Reconcile for Rooms {
    type State = Room;

    async fn rebuild(&self, wanted: &Wanted<Room>) -> Result<(), BoxError> {
        let mixer = &self.0;
        let is_ours = |room: &String| {
            let state = wanted.get(room.as_bytes());
            state.is_some_and(|state| state.run_by(Kind::Mixer, &mixer.me).is_some())
        };
        let streams: Vec<String> = mixer.streams.lock().keys().cloned().collect();
        for room in streams.into_iter().filter(|room| !is_ours(room)) {
            mixer.end_stream(&room).await;
        }
        let media = Arc::clone(&mixer.media);
        let folders =
            tokio::task::spawn_blocking(move || media.tidy().and_then(|()| media.rooms()));
        for room in folders.await?? {
            if !wanted.contains(room.as_bytes()) {
                remove_folder(mixer, &room).await?;
            }
        }
        Ok(())
    }

    async fn reconcile(&self, id: &Id, room: Option<&Room>) -> Result<Next, BoxError> {
        let mixer = &self.0;
        // What is called otherwise was not made by `rooms`, and could lead out of our folder.
        let Some(id) = str::from_utf8(id.as_bytes()).ok().filter(|id| crate::model::is_id(id))
        else {
            return Ok(Next::Done);
        };
        if let Some(meta) = room.and_then(|room| room.run_by(Kind::Mixer, &mixer.me)) {
            let running = mixer.stream(id).filter(|running| running.generation == meta.generation);
            let Some(running) = running else {
                // Another assignment is another port: what was sent for the former one may go on for a while.
                mixer.end_stream(id).await;
                mixer.begin(id, meta.generation);
                return Ok(Next::Done);
            };
            let there = room.and_then(|room| room.mixer.as_ref());
            let port = running.stream.port();
            let at = port.map(|port| mixer.at(id, running.generation, port));
            if at.as_ref().is_some_and(|at| Some(at) != there) {
                running.stream.announce_again();
            }
            return Ok(Next::Done);
        }
        let had = mixer.end_stream(id).await;
        let said = room.and_then(|room| room.mixer.as_ref());
        if had || said.is_some_and(|at| mixer.is_ours(at)) {
            mixer.withdraw(id).await?;
        }
        if room.is_none_or(Room::is_gone) {
            remove_folder(mixer, id).await?;
        }
        Ok(Next::Done)
    }
}

/// Removes the folder of a room that is gone, as the store says now: mixers may share the folder, and another one
/// may have begun to stream a room there that we do not know of yet.
async fn remove_folder(mixer: &Mixer, room: &str) -> Result<(), BoxError> {
    match get::<LiveMeta>(&mixer.store, &room_key(room, "livemeta")).await {
        Ok(None) => {}
        Ok(Some((meta, _))) if meta.status == Status::Removing => {}
        Ok(Some(_)) | Err(StoreError::Nonsense(..)) => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    let (media, room) = (Arc::clone(&mixer.media), room.to_owned());
    Ok(tokio::task::spawn_blocking(move || media.remove(&room)).await??)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::pin::pin;

    use super::*;
    use crate::demo::Embedded;
    use crate::store::json;
    use crate::stream::MARKER;

    fn mixer(store: &Cluster, media: &Path, there: watch::Receiver<bool>) -> Arc<Mixer> {
        let presence = Presence::start(store.clone(), Kind::Mixer, "m1", None);
        let host = Ipv4Addr::LOCALHOST;
        let making = Making {
            ffmpeg: "ffmpeg".into(),
            owner: "test".into(),
            host,
            pool: Pool::new(host, "42000-42003".parse().unwrap()),
            codec: Codec::Aac,
            segment: 2,
        };
        Arc::new(Mixer {
            me: "m1".to_owned(),
            run: "this".to_owned(),
            there,
            store: store.clone(),
            media: Arc::new(Media::open(media, "m1").unwrap()),
            making,
            streams: Mutex::default(),
            voice: presence.voice(),
        })
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_folder_of_a_room_that_another_mixer_has_begun_meanwhile_is_not_an_orphan() {
        let folder = tempfile::tempdir().unwrap();
        let embedded = Embedded::open(&folder.path().join("store")).await.unwrap();
        let store: Cluster = embedded.etcd.parse().unwrap();
        let media = folder.path().join("media");
        let mixer = mixer(&store, &media, watch::channel(true).1);
        let watching = Watcher::new(ROOMS)
            .key_types(["livemeta", "mixer"])
            .start(store.clone(), Rooms(Arc::clone(&mixer)));
        watching.ready(START).await.unwrap();
        let (known, rooms) = (watching.all(), Rooms(mixer));
        watching.stop(GRACE).await;
        let of_another = LiveMeta { status: Status::OnAir, ..LiveMeta::new(None, 0) };
        let of_another = of_another.assign(Kind::Mixer, "m2");
        store.put(room_key("new", "livemeta"), json(&of_another)).await.unwrap();
        store.put(room_key("odd", "livemeta"), "?").await.unwrap();
        let leaving = of_another.removing(1);
        store.put(room_key("leaving", "livemeta"), json(&leaving)).await.unwrap();
        for room in ["new", "odd", "leaving", "orphan"] {
            std::fs::create_dir_all(media.join(room)).unwrap();
            std::fs::write(media.join(room).join(MARKER), "").unwrap();
        }
        // What it knows is older than all of them.
        rooms.rebuild(&known).await.unwrap();
        let left = |room: &&str| media.join(room).exists();
        let left: Vec<_> = ["new", "odd", "leaving", "orphan"].into_iter().filter(left).collect();
        assert_eq!(left, ["new", "odd"]);
        rooms.reconcile(&Id::new("new"), None).await.unwrap();
        assert!(media.join("new").exists(), "it is there again, which will be told");
        embedded.close().await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn of_two_processes_of_an_id_the_one_that_has_it_says_where_and_the_other_removes_nothing()
     {
        let folder = tempfile::tempdir().unwrap();
        let embedded = Embedded::open(&folder.path().join("store")).await.unwrap();
        let store: Cluster = embedded.etcd.parse().unwrap();
        let meta = LiveMeta { status: Status::OnAir, ..LiveMeta::new(None, 0) };
        let meta = meta.assign(Kind::Mixer, "m1");
        store.put(room_key("r", "livemeta"), json(&meta)).await.unwrap();
        let (has_id, there) = watch::channel(false);
        let mixer = mixer(&store, &folder.path().join("media"), there);
        let (ours, me) = (mixer.at("r", 1, 42000), (Kind::Mixer, "m1"));
        let other = MixerAt { run: "other".to_owned(), ..mixer.at("r", 1, 42002) };
        let said = async || {
            let said = get::<MixerAt>(&store, &room_key("r", "mixer")).await.unwrap();
            said.map(|(at, _)| at)
        };

        // The other one has it.
        assert!(publish(&store, me, "r", &other).await.unwrap());
        let announcer = Announcer { mixer: Arc::clone(&mixer), room: "r".into(), generation: 1 };
        let mut saying = pin!(announcer.announce(42000));
        assert!(timeout(Duration::from_millis(300), &mut saying).await.is_err());
        mixer.withdraw("r").await.unwrap();
        assert_eq!(said().await.as_ref(), Some(&other));
        // This one has it: what the other one said is no longer true.
        has_id.send_replace(true);
        testing::soon("it says where", saying).await;
        assert_eq!(said().await.as_ref(), Some(&ours));
        assert!(publish(&store, me, "r", &other).await.unwrap());
        mixer.withdraw("r").await.unwrap();
        assert_eq!(said().await, None);
        // What it said itself it removes in any case.
        assert!(publish(&store, me, "r", &ours).await.unwrap());
        has_id.send_replace(false);
        mixer.withdraw("r").await.unwrap();
        assert_eq!(said().await, None);
        embedded.close().await;
    }
}
