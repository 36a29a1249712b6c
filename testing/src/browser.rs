//! A real browser that is told what to do, and ends with its test.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::Stdio;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use fantoccini::elements::Element;
use fantoccini::{Client, ClientBuilder, Locator};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{Value, json};
use tokio::io::AsyncBufReadExt as _;
use tokio::process::{Child, Command};

use crate::PATIENCE;

const FLAGS: [&str; 12] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1280,900",
    // Nothing leaves this machine.
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
];

/// A browser with a profile of its own.
#[derive(Debug)]
pub struct Browser {
    /// What the rest is done with.
    pub client: Client,
    session: String,
    driver: SocketAddr,
    _process: Child,
    _profile: tempfile::TempDir,
}

/// With or without scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scripts {
    /// As most people have it.
    On,
    /// As the careful have it.
    Off,
}

impl Browser {
    /// With scripts.
    pub async fn open() -> Self {
        Self::with(Scripts::On).await
    }

    /// A new one; returns when it can be told what to do.
    pub async fn with(scripts: Scripts) -> Self {
        let mut process = Command::new("chromedriver")
            .args(["--port=0", "--allowed-ips=127.0.0.1"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .expect("chromedriver is not there: apt-get install chromium chromium-driver fonts-dejavu-core");
        let mut lines = tokio::io::BufReader::new(process.stdout.take().unwrap()).lines();
        let port: u16 = loop {
            let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
            let line = line.expect("it starts").unwrap().expect("it says its port");
            if let Some((_, port)) = line.split_once("successfully on port ") {
                break port.trim_end_matches('.').parse().unwrap();
            }
        };
        // It writes on; nobody reads that.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        let profile = tempfile::tempdir().unwrap();
        let mut flags: Vec<String> = FLAGS.map(str::to_owned).to_vec();
        flags.push(format!("--user-data-dir={}", profile.path().display()));
        let allowed = if scripts == Scripts::On { 1 } else { 2 };
        let Value::Object(capabilities) = json!({
            "goog:chromeOptions": {
                "args": flags,
                "prefs": { "profile.managed_default_content_settings.javascript": allowed },
            },
            "goog:loggingPrefs": { "browser": "ALL" },
        }) else {
            unreachable!("it is an object")
        };
        let client = ClientBuilder::new(HttpConnector::new())
            .capabilities(capabilities)
            .connect(&format!("http://127.0.0.1:{port}"))
            .await
            .expect("chromium starts");
        let session = client.session_id().await.unwrap().unwrap();
        let driver = SocketAddr::from(([127, 0, 0, 1], port));
        Self { client, session, driver, _process: process, _profile: profile }
    }

    /// Something that the driver can do beyond the standard.
    fn command(&self, method: &str, path: &str, body: &Value) -> Value {
        let path = format!("/session/{}{path}", self.session);
        let answer = tell(self.driver, method, &path, body);
        answer.unwrap_or_else(|error| panic!("the driver did not do {path}: {error}"))
    }

    /// What the browser complained of since the last call.
    pub fn complaints(&self) -> Vec<String> {
        let log = self.command("POST", "/se/log", &json!({ "type": "browser" }));
        let entries = log["value"].as_array().unwrap_or_else(|| panic!("no log: {log}"));
        let bad =
            entries.iter().filter(|entry| entry["level"] != "INFO" && entry["level"] != "DEBUG");
        bad.map(|entry| entry["message"].as_str().unwrap_or_default().to_owned()).collect()
    }

    /// Something of the browser's own protocol.
    fn protocol(&self, what: &str, params: &Value) -> Value {
        let command = json!({ "cmd": what, "params": params });
        self.command("POST", "/goog/cdp/execute", &command)["value"].clone()
    }

    /// Has the window be that wide.
    pub fn width(&self, width: u32) {
        self.size(width, 900.0);
    }

    fn size(&self, width: u32, height: f64) {
        let height = height.ceil();
        let params =
            json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.protocol("Emulation.setDeviceMetricsOverride", &params);
    }

    /// A picture of the whole page, that wide.
    pub fn picture(&self, width: u32) -> Vec<u8> {
        let size = self.protocol("Page.getLayoutMetrics", &json!({}))["cssContentSize"].clone();
        // What is out of sight is not drawn.
        self.size(width, size["height"].as_f64().unwrap_or(900.0));
        let taken = self.protocol("Page.captureScreenshot", &json!({}));
        self.width(width);
        let data = taken["data"].as_str().expect("a picture");
        BASE64_STANDARD.decode(data).expect("it is base64")
    }

    /// Opens a page of a server.
    pub async fn goto(&self, server: SocketAddr, path: &str) {
        self.client.goto(&format!("http://{server}{path}")).await.unwrap();
    }

    /// The same, until what changes is followed.
    pub async fn live(&self, server: SocketAddr, path: &str) {
        self.goto(server, path).await;
        self.find("#line[data-state=live]").await;
    }

    /// What a script returns.
    pub async fn run(&self, script: &str) -> Value {
        self.client
            .execute(script, Vec::new())
            .await
            .unwrap_or_else(|error| panic!("{script}: {error}"))
    }

    /// Waits for an element.
    pub async fn find(&self, css: &str) -> Element {
        let wait = self.client.wait().at_most(PATIENCE).every(Duration::from_millis(20));
        let found = wait.for_element(Locator::Css(css)).await;
        match found {
            Ok(element) => element,
            Err(error) => {
                panic!("{css}: {error}: {}", self.client.source().await.unwrap_or_default())
            }
        }
    }

    /// Waits until an element says this.
    pub async fn says(&self, css: &str, text: &str) {
        let mut last = String::new();
        let wait = async {
            loop {
                if let Ok(element) = self.client.find(Locator::Css(css)).await
                    && let Ok(now) = element.text().await
                {
                    if now.contains(text) {
                        return;
                    }
                    last = now;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let said = tokio::time::timeout(PATIENCE, wait).await.is_ok();
        assert!(said, "{css} does not say {text:?} but {last:?}");
    }

    /// Waits for an element, and clicks it.
    pub async fn click(&self, css: &str) {
        self.find(css).await.click().await.unwrap_or_else(|error| panic!("{css}: {error}"));
    }
}

/// The browser is told to end, however the test did.
impl Drop for Browser {
    fn drop(&mut self) {
        let _ = tell(self.driver, "DELETE", &format!("/session/{}", self.session), &Value::Null);
    }
}

/// One request to the driver, which leaves the line open after its answer.
fn tell(driver: SocketAddr, method: &str, path: &str, body: &Value) -> std::io::Result<Value> {
    let mut line = BufReader::new(TcpStream::connect(driver)?);
    line.get_ref().set_read_timeout(Some(PATIENCE))?;
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let length = body.len();
    let head =
        format!("{method} {path} HTTP/1.1\r\nHost: {driver}\r\nContent-Length: {length}\r\n\r\n");
    line.get_mut().write_all((head + &body).as_bytes())?;
    let mut length = 0;
    loop {
        let mut header = String::new();
        line.read_line(&mut header)?;
        match header.trim_end().split_once(':') {
            Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                length = value.trim().parse().map_err(std::io::Error::other)?;
            }
            None if header.trim_end().is_empty() => break,
            _ => {}
        }
    }
    let mut answer = vec![0; length];
    line.read_exact(&mut answer)?;
    Ok(serde_json::from_slice(&answer)?)
}
