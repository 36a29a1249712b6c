//! A store, a Janus and every process of the example, on free ports, in a temporary folder.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use live_rooms::bridge::{Bridge, Bridged};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;
use testing::janus::{ADMIN_KEY, ADMIN_SECRET, Janus};
use testing::{Proxy, etcd};
use tokio_util::task::AbortOnDropHandle;
use vedetta::KeyRange;
use vedetta::core::Source as _;
use vedetta::etcd::Cluster;

use crate::sound::{self, Segment};

/// When to look again.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// What takes longer than this hangs: a dead module is known by its lease of 10 s, and machines may be busy.
const PATIENCE: Duration = Duration::from_secs(90);
/// In the environment of all that is started here, and so in that of all that they start.
pub(crate) const MARK: &str = "LIVE_ROOMS_TEST";
/// Ports of each mixer.
const PORTS: u16 = 24;
/// Seconds. So a fault and its end are heard sooner than in those of 2 s that a mixer makes unless told otherwise.
const SEGMENT: &str = "1";
/// The modules. The first mixer is the first to be started.
pub(crate) const MIXERS: [&str; 2] = ["m1", "m2"];
pub(crate) const MANAGER: &str = "j1";
/// Of the same Janus. Is not started by itself.
pub(crate) const OTHER_MANAGER: &str = "j2";
/// Of the other Janus. Is not started by itself.
pub(crate) const FAR_MANAGER: &str = "j3";
pub(crate) const ROOMS: &str = "rooms";
const NAMES: [&str; 6] = [MIXERS[0], MIXERS[1], MANAGER, OTHER_MANAGER, FAR_MANAGER, ROOMS];

/// Where the state is.
pub(crate) enum State {
    Ours(Ours),
    Etcd(etcd::Cluster),
}

/// A `vedetta up`, that can be killed and started again.
pub(crate) struct Ours {
    address: SocketAddr,
    running: Option<Process>,
    folder: TempDir,
}

impl Ours {
    pub(crate) async fn start() -> Self {
        let address = (Ipv4Addr::LOCALHOST, 0).into();
        let mut ours = Self { address, running: None, folder: TempDir::new().unwrap() };
        ours.begin().await;
        ours
    }

    /// On the same port and data, if it ran before.
    pub(crate) async fn begin(&mut self) {
        let program = Path::new(env!("CARGO_BIN_EXE_live-rooms")).with_file_name("vedetta");
        // It is with the rest of the workspace.
        assert!(program.exists(), "it is not built: cargo build -p vedetta-cli");
        let mut command = Command::new(program);
        command.args(["up", "--data", "data", "--http", "127.0.0.1:0", "--etcd"]);
        command.arg(self.address.to_string()).current_dir(self.folder.path());
        let log = self.folder.path().join("log");
        let process = Process::start(command, &log);
        self.address = until("the store is ready", async || {
            let said = process.said.lock().unwrap();
            let etcd = said.iter().find_map(|line| line.strip_prefix("etcd")?.split_once("://"));
            let is_ready = said.iter().any(|line| line == "ready");
            let address = etcd.filter(|_| is_ready).and_then(|(_, address)| address.parse().ok());
            address.ok_or_else(|| format!("{said:?}\n{}", tail(&log)))
        })
        .await;
        self.running = Some(process);
    }

    /// Ends it at once (SIGKILL); its data stays.
    pub(crate) fn kill(&mut self) {
        self.running.take().expect("it runs").kill();
    }
}

pub(crate) struct World {
    pub(crate) state: State,
    pub(crate) janus: Janus,
    /// Another one, if there is one.
    far_janus: Option<Janus>,
    cluster: Cluster,
    /// Where the rooms are: every Janus that runs.
    bridges: Arc<Mutex<Vec<Bridge>>>,
    /// Of each process, its way to the store.
    links: BTreeMap<&'static str, Proxy>,
    processes: BTreeMap<&'static str, Process>,
    api: String,
    /// The first port of each mixer.
    ports: [u16; 2],
    mark: String,
    /// Rooms, and what is played there.
    tones: Arc<Mutex<BTreeMap<String, u32>>>,
    talkers: Vec<Child>,
    _playing: AbortOnDropHandle<()>,
    folder: TempDir,
}

impl World {
    /// All of it, ready, with so many mixers.
    pub(crate) async fn start(state: State, mixers: usize) -> Self {
        let folder = tempfile::Builder::new().prefix("live-rooms-test-").tempdir().unwrap();
        let mark = folder.path().to_string_lossy().into_owned();
        let janus = Janus::start(&[(MARK, &mark)]).await;
        let bridges = Arc::new(Mutex::new(vec![bridge(&janus)]));
        let (cluster, mut links) = (state.cluster(), BTreeMap::new());
        if let State::Ours(ours) = &state {
            for name in NAMES {
                links.insert(name, Proxy::to(ours.address).await);
            }
        }
        let tones = Arc::default();
        let files = folder.path().join("tones");
        std::fs::create_dir(&files).unwrap();
        let playing = tokio::spawn(play(Arc::clone(&bridges), files, Arc::clone(&tones)));
        let mut world = Self {
            state,
            janus,
            far_janus: None,
            cluster,
            bridges,
            links,
            processes: BTreeMap::new(),
            api: String::new(),
            ports: free_ports(),
            mark,
            tones,
            talkers: Vec::new(),
            _playing: AbortOnDropHandle::new(playing),
            folder,
        };
        for name in [ROOMS, MANAGER].iter().chain(&MIXERS[..mixers]) {
            world.spawn(name);
        }
        for name in [ROOMS, MANAGER].iter().chain(&MIXERS[..mixers]) {
            world.ready(name).await;
        }
        world
    }

    /// Starts a process, and does not wait for it.
    pub(crate) fn spawn(&mut self, name: &'static str) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_live-rooms"));
        let url = match (&self.state, self.links.get(name)) {
            (State::Etcd(etcd), _) => etcd.endpoints().join(","),
            (State::Ours(_), Some(link)) => format!("etcd://{}", link.address()),
            (State::Ours(_), None) => unreachable!("each has a link"),
        };
        let (kind, arguments) = match name {
            ROOMS => ("rooms", vec!["--listen".to_owned(), self.listen()]),
            MANAGER | OTHER_MANAGER => ("janus", manager(name, &self.janus)),
            FAR_MANAGER => ("janus", manager(name, self.far_janus.as_ref().expect("it is there"))),
            mixer => {
                let first = self.ports[usize::from(mixer == MIXERS[1])];
                let (ports, media) = (format!("{first}-{}", first + PORTS - 1), self.media());
                let media = media.to_string_lossy().into_owned();
                let mut arguments = words(&["--id", mixer, "--ports", &ports, "--media", &media]);
                arguments.extend(words(&["--segment", SEGMENT]));
                // Busy or not, it goes when its rooms are elsewhere.
                arguments.extend(words(&["--drain", "60", "--ready"]));
                ("mixer", arguments)
            }
        };
        command.args([kind, "--store", &url]).args(arguments);
        command.env("JANUS_ADMIN_SECRET", ADMIN_SECRET).env("JANUS_ADMIN_KEY", ADMIN_KEY);
        command.env(MARK, &self.mark).env("LIVE_ROOMS_LOG", "info");
        let log = self.folder.path().join(format!("{name}.log"));
        self.processes.insert(name, Process::start(command, &log));
    }

    /// Waits until a process says that it is.
    pub(crate) async fn ready(&mut self, name: &'static str) {
        let said = Arc::clone(&self.processes[name].said);
        let expected = if name == ROOMS { "listening on " } else { "ready" };
        let line = until(&format!("{name} is ready"), async || {
            let line = said.lock().unwrap().iter().find(|line| line.contains(expected)).cloned();
            line.ok_or_else(|| tail(&self.folder.path().join(format!("{name}.log"))))
        })
        .await;
        if name == ROOMS {
            line.split_once("listening on ").unwrap().1.trim().clone_into(&mut self.api);
        }
    }

    /// Ends a process at once (SIGKILL).
    pub(crate) fn kill(&mut self, name: &str) {
        self.processes.remove(name).expect("it runs").kill();
    }

    /// The same, after what would end its streams then: they go on.
    pub(crate) fn kill_with_guard(&mut self, name: &str) {
        let of = format!("PPid:\t{}", self.processes[name].child.id());
        let read = |pid: u32, file: &str| {
            let text = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
            String::from_utf8_lossy(&text).into_owned()
        };
        let is_guard = |pid: &u32| {
            read(*pid, "cmdline").contains("vedetta-guard")
                && read(*pid, "status").lines().any(|line| line == of)
        };
        let guards: Vec<u32> = marked(&self.mark).into_iter().filter(is_guard).collect();
        let [guard] = guards[..] else { panic!("guards of {name}: {guards:?}") };
        kill(guard);
        self.kill(name);
    }

    /// Asks a process to end (SIGTERM), and sees that it does in good order.
    pub(crate) async fn terminate(&mut self, name: &str) {
        let process = self.processes.remove(name).expect("it runs");
        process.signal(Signal::TERM);
        let status = process.ended(|| self.logs()).await;
        assert!(status.success(), "{name}: {status}\n{}", self.logs());
    }

    /// Has another Janus beside the one there is.
    pub(crate) async fn another_janus(&mut self) {
        let janus = Janus::start(&[(MARK, &self.mark)]).await;
        self.bridges.lock().unwrap().push(bridge(&janus));
        self.far_janus = Some(janus);
    }

    /// Ends that one for good.
    pub(crate) fn end_the_other_janus(&mut self) {
        self.bridges.lock().unwrap().truncate(1);
        self.far_janus.take().expect("it is there").kill();
    }

    /// The rooms in it.
    pub(crate) async fn far_rooms(&self) -> Vec<String> {
        self.far_janus.as_ref().expect("it is there").rooms().await
    }

    /// The first Janus.
    pub(crate) fn bridge(&self) -> Bridge {
        bridge(&self.janus)
    }

    /// How often a process has said this in its log.
    pub(crate) fn count(&self, name: &str, what: &str) -> usize {
        let log = std::fs::read_to_string(self.folder.path().join(format!("{name}.log")));
        log.unwrap_or_default().matches(what).count()
    }

    /// The signs of life of modules.
    pub(crate) async fn heartbeats(&self) -> Vec<String> {
        let mut all = Vec::new();
        for prefix in ["/januses/", "/mixers/"] {
            let page = self.cluster.list(KeyRange::prefix(prefix), None).await.unwrap();
            let keys = page.entries.iter().map(|it| String::from_utf8_lossy(&it.key).into_owned());
            all.extend(keys.filter(|key| key.ends_with("/heartbeat")));
        }
        all
    }

    /// Waits until no module gives a sign of life.
    pub(crate) async fn all_are_dead(&self) {
        until("nobody gives a sign of life", async || {
            let left = self.heartbeats().await;
            if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
        })
        .await;
    }

    /// Every link of a process to the store.
    pub(crate) fn links(&self) -> impl Iterator<Item = &Proxy> {
        self.links.values()
    }

    /// The link of a process to the store.
    pub(crate) fn link(&self, name: &str) -> &Proxy {
        &self.links[name]
    }

    pub(crate) fn media(&self) -> PathBuf {
        self.folder.path().join("media")
    }

    fn listen(&self) -> String {
        // Where it was before, if it was.
        let before = self.api.strip_prefix("http://");
        before.unwrap_or("127.0.0.1:0").to_owned()
    }

    pub(crate) async fn ask(&self, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
        ask(method, &format!("{}{path}", self.api), body).await
    }

    /// A room as it is told.
    pub(crate) async fn room(&self, id: &str) -> Value {
        self.ask("GET", &format!("/rooms/{id}"), None).await.1
    }

    /// The mixer that a room is assigned to.
    pub(crate) async fn mixer_of(&self, id: &str) -> &'static str {
        let room = self.room(id).await;
        MIXERS
            .into_iter()
            .find(|mixer| room["mixerId"] == *mixer)
            .unwrap_or_else(|| panic!("{room}"))
    }

    /// Creates and starts a room, in which a tone is played from then on.
    pub(crate) async fn open(&self, id: &str, hz: u32) {
        assert!(self.try_open(id, hz).await, "cannot open {id}\n{}", self.logs());
    }

    /// The same; whether it could be done. It may be tried again.
    pub(crate) async fn try_open(&self, id: &str, hz: u32) -> bool {
        self.tones.lock().unwrap().insert(id.to_owned(), hz);
        let (created, _) = self.ask("POST", "/rooms", Some(json!({ "id": id }))).await;
        let (started, _) = self.ask("POST", &format!("/rooms/{id}/start"), None).await;
        (created == 201 || created == 409) && started == 200
    }

    /// A room is no longer expected.
    pub(crate) fn forget(&self, id: &str) {
        self.tones.lock().unwrap().remove(id);
    }

    /// Removes a room.
    pub(crate) async fn delete(&self, id: &str) {
        self.forget(id);
        let deleted = self.ask("DELETE", &format!("/rooms/{id}"), None).await;
        assert_eq!(deleted.0, 202, "{deleted:?}");
    }

    /// Somebody comes to a room and talks in a tone. It stays until the end.
    pub(crate) async fn talk(&mut self, room: &str, hz: u32) {
        let port = self.janus.join(room, &format!("talker-{hz}")).await;
        self.talkers.push(sound::talker(hz, port).spawn().unwrap());
    }

    /// Waits for a segment of a room's stream that was begun after `since` and in which all these tones are. Those are
    /// not in it, nor in any other since.
    pub(crate) async fn heard(
        &self,
        room: &str,
        tones: &[u32],
        others: &[u32],
        since: SystemTime,
    ) -> Segment {
        let playlist = self.media().join(room).join("index.m3u8");
        heard(&playlist, tones, others, since, || self.logs()).await
    }

    /// The streams of all rooms go on as they are, whatever was done at `since`: for the
    /// same assignments.
    pub(crate) async fn go_on(&self, before: &[(String, u64)], since: SystemTime) {
        let tones = self.tones.lock().unwrap().clone();
        for (room, generation) in before {
            let hz = tones[room];
            let others: Vec<u32> = tones.values().copied().filter(|other| *other != hz).collect();
            let segment = self.heard(room, &[hz], &others, since).await;
            let name = segment.path.file_name().unwrap().to_string_lossy().into_owned();
            assert!(name.starts_with(&format!("seg_{generation}_")), "{name}, not {generation}");
        }
    }

    /// How long it takes until all tones are back in the streams after a fault, which must be `within` some time, however
    /// busy the machine is; and then nothing is left that should not be there.
    pub(crate) async fn recovers(&self, fault: &str, since: SystemTime, within: Duration) {
        let tones = self.tones.lock().unwrap().clone();
        let mut last = Duration::ZERO;
        for (room, hz) in &tones {
            let others: Vec<u32> = tones.values().copied().filter(|other| other != hz).collect();
            last = last.max(self.heard(room, &[*hz], &others, since).await.after(since));
        }
        let streams =
            if tones.len() == 1 { "1 stream".into() } else { format!("{} streams", tones.len()) };
        println!("{fault}: {streams} with the right tone after {:.1} s", last.as_secs_f64());
        assert!(last <= within, "{fault}: not within {within:?}\n{}", self.logs());
        self.settled().await;
    }

    /// Waits until a mixer has every room.
    pub(crate) async fn all_are_mixed_by(&self, mixer: &str) {
        self.all_are_of("mixer", mixer).await;
    }

    /// Waits until the manager of a Janus has every room.
    pub(crate) async fn all_are_kept_by(&self, manager: &str) {
        self.all_are_of("janus", manager).await;
    }

    /// Every room is assigned to this module, and it has said that it runs it.
    async fn all_are_of(&self, kind: &str, module: &str) {
        let (id, rooms) = (format!("{kind}Id"), self.tones.lock().unwrap().clone());
        until(&format!("{module} has every room"), async || {
            for room in rooms.keys() {
                let room = self.room(room).await;
                if room[&id] != module || room[kind][&id] != module {
                    return Err(format!("{room}\n{}", self.logs()));
                }
            }
            Ok(())
        })
        .await;
    }

    /// The rooms, and how often each was assigned to somebody.
    pub(crate) async fn assignments(&self) -> Vec<(String, u64)> {
        let rooms = self.tones.lock().unwrap().clone();
        let mut all = Vec::new();
        for room in rooms.into_keys() {
            let generation = self.room(&room).await["generation"].as_u64().unwrap();
            all.push((room, generation));
        }
        all
    }

    /// Waits until there is what the rooms need, and no process, port, room in Janus, forwarder, key or folder beside
    /// that.
    pub(crate) async fn settled(&self) {
        let rooms: BTreeSet<String> = self.tones.lock().unwrap().keys().cloned().collect();
        until("all is as it should be", async || {
            let looked = self.look(&rooms).await;
            looked.map_err(|wrong| format!("{wrong}\n{}", self.logs()))
        })
        .await;
    }

    async fn look(&self, rooms: &BTreeSet<String>) -> Result<(), String> {
        let same = |what: &str, there: &BTreeSet<String>| {
            let is_same = there == rooms;
            if is_same { Ok(()) } else { Err(format!("{what}: {there:?}, not {rooms:?}")) }
        };
        let (mut forwarders, bridges) = (BTreeMap::new(), self.bridges.lock().unwrap().clone());
        for bridge in bridges {
            for Bridged { room, .. } in bridge.rooms().await.map_err(|error| error.to_string())? {
                let sends = bridge.forwarders(&room).await.map_err(|error| error.to_string())?;
                if forwarders.insert(room.clone(), sends).is_some() {
                    return Err(format!("{room} is in two Januses"));
                }
            }
        }
        same("rooms in Janus", &forwarders.keys().cloned().collect())?;
        let folders = std::fs::read_dir(self.media()).into_iter().flatten().flatten();
        let folders = folders.filter(|entry| entry.path().is_dir());
        same(
            "folders",
            &folders.map(|it| it.file_name().to_string_lossy().into_owned()).collect(),
        )?;

        let page = self.cluster.list(KeyRange::prefix("/rooms/"), None).await;
        let mut keys = BTreeMap::new();
        for entry in page.map_err(|error| error.to_string())?.entries {
            let key = String::from_utf8(entry.key.to_vec()).unwrap();
            keys.insert(key, serde_json::from_slice::<Value>(&entry.value).unwrap());
        }
        let key_types = ["janus", "livemeta", "mixer"];
        let expected =
            rooms.iter().flat_map(|room| key_types.map(|part| format!("/rooms/{room}/{part}")));
        if !keys.keys().eq(&expected.collect::<BTreeSet<_>>()) {
            return Err(format!("keys: {keys:?}"));
        }
        let mut ports = BTreeSet::new();
        for room in rooms {
            let at = &keys[&format!("/rooms/{room}/mixer")];
            let there = &forwarders[room];
            let fits = |it: &live_rooms::bridge::Forwarder| {
                json!(it.port) == at["port"] && json!(it.ssrc) == at["ssrc"]
            };
            if there.len() != 1 || !fits(&there[0]) {
                return Err(format!("forwarders of {room}: {there:?}, not one to {at}"));
            }
            ports.extend([there[0].port, there[0].port + 1]);
        }
        let bound = bound(&self.ports);
        if bound != ports {
            return Err(format!("ports: {bound:?}, not {ports:?}"));
        }
        let ffmpegs = self.ffmpegs(None);
        if ffmpegs.len() != rooms.len() {
            return Err(format!("FFmpegs: {ffmpegs:?}"));
        }
        Ok(())
    }

    /// The process ids of every FFmpeg that streams, or of those that stream one room.
    pub(crate) fn ffmpegs(&self, room: Option<&str>) -> Vec<u32> {
        let folder = room.map_or(self.media(), |room| self.media().join(room));
        let is_it = |pid: &u32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            let program = line.split('\0').next().unwrap_or_default();
            program.ends_with("ffmpeg") && line.contains(&*folder.to_string_lossy())
        };
        marked(&self.mark).into_iter().filter(is_it).collect()
    }

    /// Ends it all in good order, and sees that nothing is left.
    pub(crate) async fn end(mut self) {
        let rooms: Vec<String> = self.tones.lock().unwrap().keys().cloned().collect();
        for room in rooms {
            self.delete(&room).await;
        }
        self.settled().await;
        for process in self.processes.values() {
            process.signal(Signal::TERM);
        }
        for (name, process) in std::mem::take(&mut self.processes) {
            let status = process.ended(|| self.logs()).await;
            assert!(status.success(), "{name}: {status}\n{}", self.logs());
        }
        self.janus.kill();
        self.far_janus = None;
        until("every process is gone", async || {
            let left = marked(&self.mark);
            if left.is_empty() { Ok(()) } else { Err(format!("{left:?} are left")) }
        })
        .await;
        assert_eq!(bound(&self.ports), BTreeSet::new());
        assert_eq!(self.heartbeats().await, Vec::<String>::new());
    }

    /// The last that every process said.
    fn logs(&self) -> String {
        let log = |name: &str| {
            format!("--- {name}\n{}", tail(&self.folder.path().join(format!("{name}.log"))))
        };
        NAMES.map(log).join("\n")
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for talker in &mut self.talkers {
            let _ = talker.kill();
            let _ = talker.wait();
        }
        // Before their folders go.
        self.processes.clear();
    }
}

impl State {
    fn cluster(&self) -> Cluster {
        let endpoints = match self {
            Self::Ours(ours) => vec![ours.address.to_string()],
            Self::Etcd(etcd) => etcd.endpoints(),
        };
        Cluster::new(endpoints).unwrap()
    }
}

/// One that ends with this value.
pub(crate) struct Process {
    child: Child,
    pub(crate) said: Arc<Mutex<Vec<String>>>,
}

impl Process {
    pub(crate) fn start(mut command: Command, log: &Path) -> Self {
        let log = File::options().append(true).create(true).open(log).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().unwrap();
        let (said, out) = (Arc::new(Mutex::new(Vec::new())), child.stdout.take().unwrap());
        let saying = Arc::clone(&said);
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                saying.lock().unwrap().push(line);
            }
        });
        Self { child, said }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits until it has ended by itself; what `logs` says helps when it never does.
    pub(crate) async fn ended(mut self, logs: impl Fn() -> String) -> ExitStatus {
        until("it ends", async || self.child.try_wait().unwrap().ok_or_else(&logs)).await
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Ends a process at once (SIGKILL).
pub(crate) fn kill(pid: u32) {
    let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
}

/// What a server answers; 0 if it does not.
pub(crate) async fn ask(method: &str, uri: &str, body: Option<Value>) -> (u16, Value) {
    let body = body.map(|body| body.to_string()).unwrap_or_default();
    let request = ureq::http::Request::builder().method(method).uri(uri);
    let request = request.header("content-type", "application/json").body(body).unwrap();
    let asked = tokio::task::spawn_blocking(move || {
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(Duration::from_secs(20)))
            .http_status_as_error(false)
            .proxy(None)
            .build();
        let mut answer = ureq::Agent::from(agent).run(request)?;
        let text = answer.body_mut().read_to_string()?;
        Ok::<_, ureq::Error>((answer.status().as_u16(), text))
    });
    match asked.await.unwrap() {
        Ok((status, text)) => (status, serde_json::from_str(&text).unwrap_or_default()),
        Err(error) => (0, error.to_string().into()),
    }
}

/// Plays to every room what is to be played there, again when the room is new.
async fn play(
    bridges: Arc<Mutex<Vec<Bridge>>>,
    folder: PathBuf,
    tones: Arc<Mutex<BTreeMap<String, u32>>>,
) {
    let mut files = BTreeMap::new();
    loop {
        let (now, bridges) = (tones.lock().unwrap().clone(), bridges.lock().unwrap().clone());
        for (room, hz) in now {
            let file = files.entry(hz).or_insert_with(|| sound::tone(&folder, hz));
            for bridge in &bridges {
                // The room may not be there, or not yet, or not any more.
                let _ = bridge.play(&room, &file.to_string_lossy(), "tone").await;
            }
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// See [`World::heard`]. What `logs` says helps when it is never heard.
pub(crate) async fn heard(
    playlist: &Path,
    tones: &[u32],
    others: &[u32],
    since: SystemTime,
    logs: impl Fn() -> String,
) -> Segment {
    let mut looked_at = BTreeSet::new();
    until(&format!("{tones:?} in {}", playlist.display()), async || {
        let segments = sound::segments(playlist);
        for segment in segments.iter().filter(|segment| segment.begun >= since) {
            if !looked_at.insert(segment.path.clone()) {
                continue;
            }
            let has = sound::has(segment, &[tones, others].concat());
            let (own, of_others) = has.split_at(tones.len());
            // Also in those in which its own is not there yet.
            for (hz, has) in others.iter().zip(of_others) {
                assert_ne!(*has, Some(true), "{hz} Hz in {}\n{}", segment.path.display(), logs());
            }
            if own.iter().all(|has| *has == Some(true)) {
                for (hz, has) in others.iter().zip(of_others) {
                    assert_eq!(*has, Some(false), "{hz} Hz in {}", segment.path.display());
                }
                return Ok(segment.clone());
            }
        }
        Err(format!("segments: {segments:?}\n{}", logs()))
    })
    .await
}

/// Tells how long something took that is so now.
pub(crate) fn tell(fault: &str, what: &str, since: SystemTime) {
    let lasted = since.elapsed().unwrap_or_default();
    println!("{fault}: {what} after {:.1} s", lasted.as_secs_f64());
}

/// Tries until it is so; fails with what was wrong last instead of hanging.
pub(crate) async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Result<T, String>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        match look().await {
            Ok(found) => return found,
            Err(wrong) if Instant::now() > end => panic!("it hangs: {what}: {wrong}"),
            Err(_) => tokio::time::sleep(LOOK_AGAIN).await,
        }
    }
}

/// Processes that have our mark, but for zombies.
pub(crate) fn marked(mark: &str) -> Vec<u32> {
    let mark = format!("{MARK}={mark}");
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        if environment.split(|byte| *byte == 0).any(|each| each == mark.as_bytes()) {
            found.push(pid);
        }
    }
    found
}

/// The ports of the mixers on which somebody listens.
fn bound(firsts: &[u16]) -> BTreeSet<u16> {
    let table = std::fs::read_to_string("/proc/net/udp").unwrap();
    let port = |line: &str| {
        u16::from_str_radix(line.split_whitespace().nth(1)?.split_once(':')?.1, 16).ok()
    };
    let is_ours = |port: &u16| firsts.iter().any(|first| (*first..*first + PORTS).contains(port));
    table.lines().skip(1).filter_map(port).filter(is_ours).collect()
}

/// The first of some ports for each of two, that nobody uses now, and that neither the system nor Janus gives anybody.
fn free_ports() -> [u16; 2] {
    for _ in 0..1000 {
        let first = 10_000 + fastrand::u16(..10_000 / PORTS / 2) * PORTS * 2;
        let both = first..first + PORTS * 2;
        let held = both.map(|port| UdpSocket::bind((Ipv4Addr::LOCALHOST, port)));
        if held.collect::<Result<Vec<_>, _>>().is_ok() {
            return [first, first + PORTS];
        }
    }
    panic!("there are no free ports");
}

fn bridge(janus: &Janus) -> Bridge {
    Bridge::new(&janus.admin(), ADMIN_SECRET, ADMIN_KEY)
}

/// What a manager of a Janus is told. If nobody takes its rooms it does not wait for long.
fn manager(name: &str, janus: &Janus) -> Vec<String> {
    words(&["--id", name, "--admin", &janus.admin(), "--drain", "1", "--ready"])
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// The end of a file.
pub(crate) fn tail(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(25)..].join("\n")
}
