//! All of it in one command: a store, a Janus, and every process, with a tone in a room to listen to.
//!
//! Everything is in a temporary folder, on free ports of this machine, and ends with the demo: what it started
//! also when the demo is killed.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::net::{Ipv4Addr, TcpListener as StdListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use vedetta::KeyRange;
use vedetta::core::Source as _;
use vedetta::dashboard::{self, Api};
use vedetta::db::{self, DataFolder, Db};
use vedetta::etcd::{self, Cluster, Endpoint, Is, Write};
use vedetta::kv::{self, Store};
use vedetta::runtime::told::{Board, Reading};
use vedetta::runtime::{Command, Watch};

use crate::bridge::Bridge;
use crate::janus::{KEY, SECRET};
use crate::model::{Kind, PLACEMENTS, room_key};
use crate::programs::find;
use crate::stream::PLAYLIST;

/// How long the start may take.
const START: Duration = Duration::from_secs(90);
/// A mixer that has ended is started again after this, when others have taken its rooms.
const MIXER_AGAIN: Duration = Duration::from_secs(15);
/// Anything else that has ended is started again after this.
const AGAIN: Duration = Duration::from_secs(2);
/// How long what was started has to end, twice.
const STOP: [Duration; 2] = [Duration::from_secs(10), Duration::from_secs(5)];
/// How long what is in the store may take to go.
const LEAVE: Duration = Duration::from_secs(10);
/// Nothing runs for so long.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);
const MIXERS: [&str; 2] = ["demo-mixer-1", "demo-mixer-2"];
const JANUS: &str = "demo-janus";

/// How the demo is run.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Keep the state in this etcd cluster or Vedetta instead of one of our own
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
}

/// Runs it until `stop`, and leaves nothing behind.
pub async fn run(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let (janus, ffmpeg) = (find("janus")?, find("ffmpeg")?);
    let elsewhere = args.store.map(|url| url.parse::<Cluster>().map(|_| url)).transpose()?;
    let folder = tempfile::Builder::new().prefix("live-rooms-").tempdir()?;
    let embedded = match elsewhere {
        Some(_) => None,
        None => Some(Embedded::open(&folder.path().join("store")).await?),
    };
    let url = elsewhere.clone().or_else(|| embedded.as_ref().map(|store| store.etcd.clone()));
    let url = url.unwrap_or_default();
    let store: Cluster = url.parse()?;

    let mut stage = Stage::new(folder.path().to_owned(), url, ffmpeg);
    let page = embedded.as_ref().map(|store| store.page.as_str());
    let played = async {
        stage.start(&janus).await?;
        let room = stage.open_room(elsewhere.is_none()).await?;
        say(&stage.guide(&room, page));
        stage.watch(&room).await
    };
    let played = tokio::select! {
        played = played => played,
        () = stop.cancelled() => Ok(()),
    };
    say("\nending: rooms, processes, files …\n");
    let room = stage.end().await;
    // Our own goes with its folder.
    let left = match elsewhere {
        Some(_) => leave(&store, room.as_deref()).await,
        None => Ok(()),
    };
    if let Some(embedded) = embedded {
        embedded.close().await;
    }
    folder.close().context("cannot remove the temporary folder")?;
    left?;
    say("nothing is left\n");
    played
}

/// Removes what we wrote to a store of others; fails if something is left.
async fn leave(store: &Cluster, room: Option<&str>) -> anyhow::Result<()> {
    let mut why = anyhow::anyhow!("the store does not answer: what we wrote may be left in it");
    let left = async {
        while let Err(error) = clear(store, room).await {
            why = error;
            sleep(Duration::from_millis(200)).await;
        }
    };
    timeout(LEAVE, left).await.map_err(|_| why)
}

/// Removes what the processes do not remove themselves, and fails if they left something.
async fn clear(store: &Cluster, room: Option<&str>) -> anyhow::Result<()> {
    for (kind, id) in MIXERS.map(|id| (Kind::Mixer, id)).into_iter().chain([(Kind::Janus, JANUS)]) {
        store.delete(kind.key(id, "state")).await?;
    }
    let Some(room) = room else { return Ok(()) };
    if let Some(last) = store.get(PLACEMENTS).await?.filter(|last| last.value == room.as_bytes()) {
        let write = Write::new().when(PLACEMENTS, Is::At(last.modified)).delete(PLACEMENTS);
        store.write(write).await?; // if it has changed, it is of others
    }
    let page = store.list(KeyRange::prefix(room_key(room, "")), None).await?;
    let keys = page.entries.iter().map(|entry| String::from_utf8_lossy(&entry.key));
    let keys: Vec<_> = keys.collect();
    anyhow::ensure!(keys.is_empty(), "this is left in the store: {}", keys.join(", "));
    Ok(())
}

/// Nobody has to listen.
fn say(text: &str) {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// A Vedetta in this process: its store, its etcd endpoint, its API and page.
pub(crate) struct Embedded {
    pub(crate) etcd: String,
    page: String,
    store: Store,
    board: Reading,
    serving: JoinSet<()>,
    stop: CancellationToken,
    _folder: DataFolder,
}

impl Embedded {
    pub(crate) async fn open(path: &Path) -> anyhow::Result<Self> {
        let folder = DataFolder::open(path)?;
        let db = Db::open(&db::Options::new(folder.database()), &[kv::SCHEMA])?;
        let store = Store::open(db, kv::Options::default()).await?;
        let stop = CancellationToken::new();
        let (etcd, http) = (listen().await?, listen().await?);
        let (etcd_at, http_at) = (etcd.local_addr()?, http.local_addr()?);
        let (board, reading) = Board::start(&store);
        let mut serving = JoinSet::new();
        serving.spawn(etcd::serve(etcd, Endpoint::new(store.clone()), stop.clone()));
        let api = Api::new(store.clone()).board(board);
        serving.spawn(dashboard::serve(http, api, stop.clone()));
        Ok(Self {
            etcd: format!("etcd://{etcd_at}"),
            page: format!("http://{http_at}"),
            store,
            board: reading,
            serving,
            stop,
            _folder: folder,
        })
    }

    pub(crate) async fn close(mut self) {
        self.board.stop().await;
        self.stop.cancel();
        let all = async { while self.serving.join_next().await.is_some() {} };
        let _ = timeout(Duration::from_secs(5), all).await;
        self.serving.shutdown().await;
        self.store.close().await;
    }
}

async fn listen() -> anyhow::Result<TcpListener> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?)
}

/// The processes, and what they said.
struct Stage {
    folder: PathBuf,
    url: String,
    ffmpeg: PathBuf,
    secrets: [String; 2],
    bridge: Option<Bridge>,
    rooms: String,
    room: Option<String>,
    processes: JoinSet<()>,
    stop: CancellationToken,
    said: mpsc::Receiver<(String, String)>,
    saying: mpsc::Sender<(String, String)>,
    pids: HashMap<String, String>,
}

impl Stage {
    fn new(folder: PathBuf, url: String, ffmpeg: PathBuf) -> Self {
        let (saying, said) = mpsc::channel(64);
        Self {
            folder,
            url,
            ffmpeg,
            secrets: [(); 2].map(|()| format!("{:032x}", fastrand::u128(..))),
            bridge: None,
            rooms: String::new(),
            room: None,
            processes: JoinSet::new(),
            stop: CancellationToken::new(),
            said,
            saying,
            pids: HashMap::new(),
        }
    }

    fn media(&self) -> PathBuf {
        self.folder.join("media")
    }

    /// Keeps a process running.
    fn keep(&mut self, name: &str, command: Command, restart: Duration) {
        let process = Process { name: name.to_owned(), command, restart };
        self.processes.spawn(process.keep(self.saying.clone(), self.stop.clone()));
    }

    /// One of ours.
    fn own(&mut self, name: &str, arguments: &[&str]) -> anyhow::Result<()> {
        let mut all: Vec<OsString> = arguments.iter().map(Into::into).collect();
        all.extend(["--store".into(), OsString::from(&self.url)]);
        let program = std::env::current_exe()?.into_os_string();
        let [secret, key] = &self.secrets;
        let command =
            Command::new(program, all, LONGEST).variable(SECRET, secret).variable(KEY, key);
        let is_mixer = MIXERS.contains(&name);
        self.keep(name, command, if is_mixer { MIXER_AGAIN } else { AGAIN });
        Ok(())
    }

    async fn start(&mut self, janus: &Path) -> anyhow::Result<()> {
        say("starting a store, Janus, rooms, janus and two mixers …\n");
        let configured = configure_janus(&self.folder.join("janus"), &self.secrets)?;
        let arguments: Vec<OsString> =
            ["-C", "janus.jcfg", "-F", ".", "-L", "janus.log", "-o", "-N"].map(Into::into).into();
        let arguments = arguments.into_iter().map(|argument| match argument.to_str() {
            Some("janus.jcfg" | "janus.log") => configured.folder.join(argument).into(),
            Some(".") => configured.folder.clone().into(),
            _ => argument,
        });
        let command = Command::new(janus.as_os_str().to_owned(), arguments, LONGEST);
        self.keep("Janus", command, AGAIN);
        let [secret, key] = &self.secrets;
        self.bridge = Some(Bridge::new(&configured.admin, secret, key));

        self.own("rooms", &["rooms", "--listen", "127.0.0.1:0"])?;
        self.own(JANUS, &["janus", "--id", JANUS, "--admin", &configured.admin, "--ready"])?;
        let media = self.media().to_string_lossy().into_owned();
        let base = 20_000 + u32::from(fastrand::u8(..)) * 40;
        for (number, id) in (0..).zip(MIXERS) {
            let first = base + number * 20;
            let ports = format!("{first}-{}", first + 19);
            self.own(id, &["mixer", "--id", id, "--ports", &ports, "--media", &media, "--ready"])?;
        }
        let all_ready = async {
            while self.rooms.is_empty() || self.pids.len() < 3 {
                let Some((name, line)) = self.said.recv().await else { continue };
                self.hear(&name, &line);
            }
        };
        timeout(START, all_ready).await.context("it does not start: see what was said above")
    }

    /// A line of a process on stdout.
    fn hear(&mut self, name: &str, line: &str) {
        if let Some(url) = line.strip_prefix("rooms listening on ") {
            url.clone_into(&mut self.rooms);
        } else if let Some((_, pid)) = line.split_once(" ready, pid ") {
            let before = self.pids.insert(name.to_owned(), pid.to_owned());
            if before.is_some() {
                say(&format!("{name} is back, as process {pid}\n"));
            }
        }
    }

    /// A room on air, with a tone in it, and its first segment.
    async fn open_room(&mut self, is_alone: bool) -> anyhow::Result<String> {
        let tone = self.folder.join("tone.opus");
        let source = "-v error -f lavfi -i sine=frequency=440:sample_rate=48000:duration=3 -ac 1 -c:a \
                      libopus -b:a 48k -frame_duration 20";
        let mut arguments: Vec<OsString> = source.split_whitespace().map(Into::into).collect();
        arguments.push(tone.clone().into());
        let ffmpeg = self.ffmpeg.clone().into_os_string();
        Command::new(ffmpeg, arguments, START).run(b"").await.context("cannot make a tone")?;

        let mut asked = json!({ "title": "A tone of 440 Hz" });
        if is_alone {
            asked["id"] = "demo".into();
        }
        let begun = Instant::now();
        let room = self.post("/rooms", Some(asked)).await?;
        let room = room["id"].as_str().context("the new room has no id")?.to_owned();
        self.room = Some(room.clone());
        self.post(&format!("/rooms/{room}/start"), None).await?;
        let playlist = self.media().join(&room).join(PLAYLIST);
        let on_air = async {
            loop {
                self.play(&room, &tone).await;
                let list = std::fs::read_to_string(&playlist).unwrap_or_default();
                if list.contains(".ts") {
                    return;
                }
                sleep(Duration::from_millis(100)).await;
            }
        };
        timeout(START, on_air).await.context("there is no stream: see what was said above")?;
        say(&format!(
            "the first segment is there {:.1?} after the room was created\n",
            begun.elapsed()
        ));
        Ok(room)
    }

    /// Has the tone played, also by a Janus that was restarted.
    async fn play(&self, room: &str, tone: &Path) {
        if let Some(bridge) = &self.bridge {
            // The room may not be there yet, or not any more.
            let _ = bridge.play(room, &tone.to_string_lossy(), "tone").await;
        }
    }

    fn guide(&self, room: &str, page: Option<&str>) -> String {
        let pid = |name: &str| self.pids.get(name).map_or("?", String::as_str);
        let (folder, rooms) = (self.folder.display(), &self.rooms);
        let playlist = self.media().join(room).join(PLAYLIST);
        let watchers = page.map_or(String::new(), |page| {
            format!(
                "The watchers:    {page}/watchers\n                 \
                 cargo run --release -- watcher list --server {page}\n"
            )
        });
        let mut text = format!(
            "\nOn air. Listen:  ffplay {}\nThe rooms:       curl -s {rooms}/rooms\n{watchers}\
             The state:       etcdctl --endpoints {} get --prefix /\n\nTry this, and listen on:\n",
            playlist.display(),
            self.url.trim_start_matches("etcd://"),
        );
        let moves = "it dies, and its rooms move to the other one within its lease of 10 s";
        let mut line = |what: String, why: &str| {
            let _ = writeln!(text, "  {what}\n      {why}");
        };
        for mixer in MIXERS {
            line(format!("kill -9 {}    # {mixer}", pid(mixer)), moves);
        }
        let goes_on = "the manager of Janus dies, and the sound goes on without it";
        line(format!("kill -9 {}    # {JANUS}", pid(JANUS)), goes_on);
        line(
            format!("pgrep -af {folder}"),
            "the mixers, Janus and every FFmpeg: end any of them, and it comes back",
        );
        line(
            format!("curl -X POST {rooms}/mixers/{}/drain", MIXERS[0]),
            "its rooms move to the other one at once; …/uncordon lets it have some again",
        );
        text.push_str("\nCtrl-C ends it and leaves nothing behind.\n\n");
        text
    }

    /// Tells what becomes of the room, until something breaks that should not.
    async fn watch(&mut self, room: &str) -> anyhow::Result<()> {
        let tone = self.folder.join("tone.opus");
        let mut before = String::new();
        loop {
            while let Ok((name, line)) = self.said.try_recv() {
                self.hear(&name, &line);
            }
            self.play(room, &tone).await;
            if let Ok(now) = self.get(&format!("/rooms/{room}")).await {
                let mixer = now["mixerId"].as_str().unwrap_or("nobody");
                let there = now["mixer"]["mixerId"].as_str().unwrap_or("nobody");
                let now = format!("{mixer}, and runs at {there}");
                if now != before {
                    say(&format!("the room is assigned to {now}\n"));
                    before = now;
                }
            }
            sleep(Duration::from_millis(500)).await;
        }
    }

    /// Removes the room, and ends every process. Which room it was.
    async fn end(mut self) -> Option<String> {
        if let Some(room) = &self.room {
            let path = format!("/rooms/{room}");
            let gone = async {
                // It may be started again just now.
                while self
                    .ask("DELETE", &path, None)
                    .await
                    .map_or(true, |(status, _)| status != 404)
                {
                    sleep(Duration::from_millis(100)).await;
                }
            };
            if timeout(LEAVE, gone).await.is_err() {
                tracing::warn!("the room is not gone yet");
            }
        }
        self.stop.cancel();
        while self.processes.join_next().await.is_some() {}
        self.room
    }

    async fn get(&self, path: &str) -> anyhow::Result<Value> {
        self.asked("GET", path, None).await
    }

    async fn post(&self, path: &str, body: Option<Value>) -> anyhow::Result<Value> {
        self.asked("POST", path, body).await
    }

    async fn asked(&self, method: &str, path: &str, body: Option<Value>) -> anyhow::Result<Value> {
        let (status, answer) = self.ask(method, path, body).await?;
        anyhow::ensure!(status < 300, "{method} {path}: {status} {answer}");
        Ok(answer)
    }

    /// Asks `rooms`.
    async fn ask(
        &self,
        method: &str,
        path: &str,
        body: Option<Value>,
    ) -> anyhow::Result<(u16, Value)> {
        let body = body.map(|body| body.to_string()).unwrap_or_default();
        let request = ureq::http::Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.rooms))
            .body(body)?;
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
        let (status, text) = asked.await??;
        Ok((status, serde_json::from_str(&text).unwrap_or_default()))
    }
}

/// A process that is started again when it ends.
struct Process {
    name: String,
    command: Command,
    restart: Duration,
}

impl Process {
    async fn keep(self, saying: mpsc::Sender<(String, String)>, stop: CancellationToken) {
        let heard = Heard { name: self.name.clone(), saying };
        while !stop.is_cancelled() {
            let end = async {
                stop.cancelled().await;
                &STOP[..]
            };
            let ended = self.command.run_until(b"", &heard, end).await;
            if stop.is_cancelled() {
                return;
            }
            let why = match ended {
                Ok(_) => "it ended by itself".to_owned(),
                Err(error) => error.briefly(),
            };
            say(&format!("{}: {why}; it is started again in {:?}\n", self.name, self.restart));
            tokio::select! {
                () = sleep(self.restart) => {}
                () = stop.cancelled() => {}
            }
        }
    }
}

/// Shows what a process says.
struct Heard {
    name: String,
    saying: mpsc::Sender<(String, String)>,
}

impl Watch for Heard {
    fn progress(&self, _: f64, _: Option<&str>) {}

    fn line(&self, line: &str) {
        // Nobody waits for more than that.
        let _ = self.saying.try_send((self.name.clone(), line.to_owned()));
    }

    fn log(&self, line: &str) {
        // Without the time, and where in the code it is.
        let news = line.split_once("live_rooms::").and_then(|(_, news)| news.split_once(": "));
        eprintln!("{:>14} │ {}", self.name, news.map_or(line, |(_, news)| news));
    }
}

/// A Janus that can be started.
struct Configured {
    folder: PathBuf,
    admin: String,
}

/// Writes the files of a Janus that only this machine reaches.
fn configure_janus(folder: &Path, [secret, key]: &[String; 2]) -> anyhow::Result<Configured> {
    let is_there = |path: &PathBuf| path.join("plugins/libjanus_audiobridge.so").exists();
    let installed =
        std::fs::read_dir("/usr/lib")?.flatten().map(|entry| entry.path().join("janus"));
    let others =
        ["/usr/lib/janus", "/usr/local/lib/janus", "/opt/janus/lib/janus"].map(PathBuf::from);
    let lib = installed.chain(others).find(is_there);
    let lib = lib.context("Janus has no AudioBridge here: `apt-get install janus`")?;
    let lib = lib.display();
    // Held together, so that they differ.
    let held = [(); 2].map(|()| StdListener::bind((Ipv4Addr::LOCALHOST, 0)));
    let mut ports = Vec::new();
    for listener in &held {
        let listener =
            listener.as_ref().map_err(|error| anyhow::anyhow!("no port is free: {error}"))?;
        ports.push(listener.local_addr()?.port());
    }
    let (http, admin) = (ports[0], ports[1]);
    std::fs::create_dir_all(folder)?;
    let own = folder.display();
    let plugins = "duktape echotest lua nosip recordplay sip streaming textroom videocall videoroom voicemail";
    let plugins: Vec<_> = plugins.split(' ').map(|name| format!("libjanus_{name}.so")).collect();
    let plugins = plugins.join(",");
    let files = [
        (
            "janus.jcfg",
            format!(
                r#"general: {{
    configs_folder = "{own}"
    plugins_folder = "{lib}/plugins"
    transports_folder = "{lib}/transports"
    events_folder = "{lib}/events"
    loggers_folder = "{lib}/loggers"
    interface = "127.0.0.1"
    server_name = "live-rooms"
    debug_level = 3
    debug_colors = false
    api_secret = "{secret}"
    admin_secret = "{secret}"
}}
certificates: {{ }}
media: {{ ipv6 = false  rtp_port_range = "30000-31999" }}
nat: {{ nice_debug = false  ice_enforce_list = "127.0.0.1,lo"  ice_lite = true  full_trickle = true }}
plugins: {{ disable = "{plugins}" }}
transports: {{ disable = "libjanus_mqtt.so,libjanus_nanomsg.so,libjanus_pfunix.so,libjanus_rabbitmq.so,libjanus_websockets.so" }}
loggers: {{ disable = "libjanus_jsonlog.so" }}
events: {{ broadcast = false }}
"#
            ),
        ),
        (
            "janus.transport.http.jcfg",
            format!(
                r#"general: {{ json = "compact"  base_path = "/janus"  http = true  port = {http}  ip = "127.0.0.1"  https = false }}
admin: {{ admin_base_path = "/admin"  admin_http = true  admin_port = {admin}  admin_ip = "127.0.0.1"  admin_https = false }}
"#
            ),
        ),
        (
            "janus.plugin.audiobridge.jcfg",
            format!(
                r#"general: {{
    admin_key = "{key}"
    lock_rtp_forward = true
    lock_play_file = true
    string_ids = true
    rtp_port_range = "32000-32999"
    local_ip = "127.0.0.1"
    events = false
}}
"#
            ),
        ),
    ];
    for (name, text) in files {
        std::fs::write(folder.join(name), text)?;
    }
    let admin = format!("http://127.0.0.1:{admin}/admin");
    Ok(Configured { folder: folder.to_owned(), admin })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_ours_in_a_store_of_others_goes_and_what_stays_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let embedded = Embedded::open(&folder.path().join("store")).await.unwrap();
        let store: Cluster = embedded.etcd.parse().unwrap();
        let state = Kind::Mixer.key(MIXERS[0], "state");
        let (ours, other) = ("/rooms/ours/mixer", "/rooms/ours2/mixer");
        for (key, value) in [(state.as_str(), "{}"), (ours, "{}"), (other, "{}")] {
            store.put(key.to_owned(), value).await.unwrap();
        }
        store.put(PLACEMENTS, "other").await.unwrap();
        let error = clear(&store, Some("ours")).await.unwrap_err().to_string();
        assert_eq!(error, format!("this is left in the store: {ours}"));
        let is_there = async |key: &str| store.get(key.to_owned()).await.unwrap().is_some();
        assert!(!is_there(&state).await);
        assert!(is_there(PLACEMENTS).await, "others placed a room since");

        store.put(PLACEMENTS, "ours").await.unwrap();
        store.delete(ours).await.unwrap();
        leave(&store, Some("ours")).await.unwrap();
        assert!(!is_there(PLACEMENTS).await && is_there(other).await);
        embedded.close().await;
    }
}
