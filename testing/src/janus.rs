//! A real Janus with its AudioBridge, which can be killed and started again, and people who talk in its rooms.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::soon;

/// When to look again.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Nobody can be sure of a free port: so often is tried.
const ATTEMPTS: usize = 10;
/// How long Janus may take to answer.
const ANSWER: Duration = Duration::from_secs(10);

/// What its admin API asks for.
pub const ADMIN_SECRET: &str = "of the tests: admin";
/// What its AudioBridge asks for.
pub const ADMIN_KEY: &str = "of the tests: bridge";
const API_SECRET: &str = "of the tests: api";
const PLUGIN: &str = "janus.plugin.audiobridge";

/// A Janus on this machine. Its process ends with this value, also when a test panics.
#[derive(Debug)]
pub struct Janus {
    folder: TempDir,
    /// Where people join, and where it is steered.
    addresses: [SocketAddr; 2],
    /// `None` while it is killed.
    process: Option<Child>,
    environment: Vec<(String, String)>,
}

impl Janus {
    /// A new one on free ports; returns when it answers. Its process has these variables.
    pub async fn start(environment: &[(&str, &str)]) -> Self {
        let nowhere = (Ipv4Addr::LOCALHOST, 0).into();
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let environment = environment.iter().map(own).collect();
        let folder = TempDir::new().expect("a folder for the test");
        let mut janus = Self { folder, addresses: [nowhere; 2], process: None, environment };
        for _ in 0..ATTEMPTS {
            // Both held until both are known: they differ.
            let held = [(); 2].map(|()| free_port());
            let address =
                |held: &TcpListener| held.local_addr().expect("a bound port has an address");
            janus.addresses = [address(&held[0]), address(&held[1])];
            drop(held);
            janus.configure();
            janus.spawn();
            if janus.answers().await {
                return janus;
            }
        }
        panic!("janus did not start in {ATTEMPTS} attempts:\n{}", janus.log());
    }

    /// Where it is steered.
    pub fn admin(&self) -> String {
        format!("http://{}/admin", self.addresses[1])
    }

    /// The number of its process, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Child::id)
    }

    /// Ends it at once (SIGKILL), and all its rooms with it.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Starts it on the same ports, with no room; returns when it answers.
    pub async fn start_again(&mut self) {
        self.kill();
        for _ in 0..ATTEMPTS {
            self.spawn();
            if self.answers().await {
                return;
            }
            tokio::time::sleep(LOOK_AGAIN).await; // a port was taken meanwhile
        }
        panic!("janus did not start again in {ATTEMPTS} attempts:\n{}", self.log());
    }

    /// What its AudioBridge answers to a request.
    pub async fn ask(&self, request: Value) -> Value {
        let body = json!({
            "janus": "message_plugin", "transaction": "t", "admin_secret": ADMIN_SECRET,
            "plugin": PLUGIN, "request": request,
        });
        let answer = post(self.addresses[1], "/admin", &body).await.expect("Janus answers");
        answer["response"].clone()
    }

    /// Its rooms, in order.
    pub async fn rooms(&self) -> Vec<String> {
        let answer = self.ask(json!({ "request": "list" })).await;
        let rooms = answer["list"].as_array().unwrap_or_else(|| panic!("{answer}")).iter();
        let mut rooms: Vec<_> =
            rooms.map(|room| room["room"].as_str().unwrap().to_owned()).collect();
        rooms.sort();
        rooms
    }

    /// Somebody joins a room, and talks by RTP to the port that is told. Who does not leave stays until Janus ends.
    pub async fn join(&self, room: &str, name: &str) -> u16 {
        let join = async {
            let session = self.say("/janus", json!({ "janus": "create" })).await;
            let path = format!("/janus/{}", session["data"]["id"]);
            let handle = self.say(&path, json!({ "janus": "attach", "plugin": PLUGIN })).await;
            let join = json!({ "request": "join", "room": room, "id": name, "muted": false,
                "rtp": { "payload_type": 100 } });
            let talk = format!("{path}/{}", handle["data"]["id"]);
            self.say(&talk, json!({ "janus": "message", "body": join })).await;
            let query = format!("{path}?maxev=1&apisecret={}", API_SECRET.replace(' ', "%20"));
            let event =
                exchange(self.addresses[0], "GET", &query, "").await.expect("Janus answers");
            let port = event["plugindata"]["data"]["rtp"]["port"].as_u64();
            port.and_then(|port| u16::try_from(port).ok()).unwrap_or_else(|| panic!("{event}"))
        };
        soon("somebody joins a room", join).await
    }

    async fn say(&self, path: &str, mut what: Value) -> Value {
        what["transaction"] = "t".into();
        what["apisecret"] = API_SECRET.into();
        let answer = post(self.addresses[0], path, &what).await.expect("Janus answers");
        let is_well = answer["janus"] == "success" || answer["janus"] == "ack";
        assert!(is_well, "{answer}");
        answer
    }

    /// Waits until it does; `false` when it has ended instead.
    async fn answers(&mut self) -> bool {
        soon("janus answers", async {
            loop {
                let process = self.process.as_mut().expect("it runs");
                if process.try_wait().expect("a child can be asked").is_some() {
                    return false;
                }
                let ping = json!({ "janus": "ping", "transaction": "t" });
                let admin = post(self.addresses[1], "/admin", &ping).await;
                let people = exchange(self.addresses[0], "GET", "/janus/info", "").await;
                if admin.is_some_and(|admin| admin["janus"] == "pong") && people.is_some() {
                    return true;
                }
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        })
        .await
    }

    fn spawn(&mut self) {
        let log = File::options().append(true).create(true).open(self.folder.path().join("log"));
        let log = log.expect("a log can be written");
        let mut janus = program();
        janus.arg("-C").arg(self.folder.path().join("janus.jcfg"));
        janus.arg("-F").arg(self.folder.path()).arg("-o");
        janus.envs(self.environment.iter().map(|(name, value)| (name, value)));
        janus.stdin(Stdio::null()).stdout(log.try_clone().expect("a handle")).stderr(log);
        self.process = Some(janus.spawn().expect("janus can be run"));
    }

    fn configure(&self) {
        let (own, lib) = (self.folder.path().display(), libraries());
        let (lib, [people, admin]) = (lib.display(), self.addresses.map(|address| address.port()));
        let unused = ["duktape", "echotest", "lua", "nosip", "recordplay", "sip", "streaming"];
        let unused = unused.iter().chain(&["textroom", "videocall", "videoroom", "voicemail"]);
        let plugins =
            unused.map(|name| format!("libjanus_{name}.so")).collect::<Vec<_>>().join(",");
        let transports = ["mqtt", "nanomsg", "pfunix", "rabbitmq", "websockets"];
        let transports = transports.map(|name| format!("libjanus_{name}.so")).join(",");
        for (name, text) in [
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
    debug_level = 3
    debug_colors = false
    api_secret = "{API_SECRET}"
    admin_secret = "{ADMIN_SECRET}"
    session_timeout = 0
}}
media: {{ ipv6 = false }}
nat: {{ nice_debug = false  ice_enforce_list = "127.0.0.1,lo"  ice_lite = true  full_trickle = true }}
plugins: {{ disable = "{plugins}" }}
transports: {{ disable = "{transports}" }}
loggers: {{ disable = "libjanus_jsonlog.so" }}
events: {{ broadcast = false }}
"#
                ),
            ),
            (
                "janus.transport.http.jcfg",
                format!(
                    r#"general: {{ json = "compact"  base_path = "/janus"  http = true  port = {people}  ip = "127.0.0.1"  https = false }}
admin: {{ admin_base_path = "/admin"  admin_http = true  admin_port = {admin}  admin_ip = "127.0.0.1"  admin_https = false }}
"#
                ),
            ),
            (
                "janus.plugin.audiobridge.jcfg",
                format!(
                    r#"general: {{
    admin_key = "{ADMIN_KEY}"
    lock_rtp_forward = true
    lock_play_file = true
    string_ids = true
    rtp_port_range = "20000-29999"
    local_ip = "127.0.0.1"
    events = false
}}
"#
                ),
            ),
        ] {
            std::fs::write(self.folder.path().join(name), text).expect("a file can be written");
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Janus {
    fn drop(&mut self) {
        let ended = self.process.as_mut().and_then(|process| process.try_wait().ok().flatten());
        if let Some(status) = ended {
            eprintln!("a janus has ended by itself, {status}:\n{}", self.log());
        }
        self.kill();
    }
}

/// The program of the Debian package, or a failure that names it.
fn program() -> Command {
    let found = std::env::var_os("PATH").is_some_and(|path| {
        std::env::split_paths(&path).any(|folder| folder.join("janus").is_file())
    });
    assert!(found, "janus is not installed, and the suite needs it: apt-get install janus");
    Command::new("janus")
}

/// Where its plugins are: in a folder of the system's kind.
fn libraries() -> PathBuf {
    let is_it = |folder: &PathBuf| folder.join("plugins/libjanus_audiobridge.so").is_file();
    let there = std::fs::read_dir(Path::new("/usr/lib")).expect("there is /usr/lib").flatten();
    let found = there.map(|entry| entry.path().join("janus")).find(is_it);
    found.expect("janus has no AudioBridge, and the suite needs it: apt-get install janus")
}

fn free_port() -> TcpListener {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port")
}

async fn post(address: SocketAddr, path: &str, body: &Value) -> Option<Value> {
    exchange(address, "POST", path, &body.to_string()).await
}

/// What it answers, if it does so in time.
async fn exchange(address: SocketAddr, method: &str, path: &str, body: &str) -> Option<Value> {
    let ask = async {
        let mut stream = TcpStream::connect(address).await.ok()?;
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.0\r\nHost: {address}\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.ok()?;
        serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
    };
    tokio::time::timeout(ANSWER, ask).await.ok()?
}
