//! A browser that is told what to do, and ends with its test.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::Stdio;
use std::time::Duration;

use fantoccini::elements::Element;
use fantoccini::{Client, ClientBuilder, Locator};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use crate::support::PATIENCE;

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

pub(crate) struct Browser {
    pub(crate) client: Client,
    session: String,
    driver: SocketAddr,
    _process: Child,
    _profile: tempfile::TempDir,
}

/// With or without scripts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scripts {
    On,
    Off,
}

impl Browser {
    pub(crate) async fn open() -> Self {
        Self::with(Scripts::On).await
    }

    pub(crate) async fn with(scripts: Scripts) -> Self {
        let mut process = Command::new("chromedriver")
            .args(["--port=0", "--allowed-ips=127.0.0.1"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .expect("chromedriver is not there: apt-get install chromium chromium-driver fonts-dejavu-core");
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
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
        tell(self.driver, method, &format!("/session/{}{path}", self.session), body)
    }

    /// What the browser complained of since the last call.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let log = self.command("POST", "/se/log", &json!({ "type": "browser" }));
        let entries = log["value"].as_array().cloned().unwrap_or_default();
        let bad =
            entries.iter().filter(|entry| entry["level"] != "INFO" && entry["level"] != "DEBUG");
        bad.map(|entry| entry["message"].as_str().unwrap_or_default().to_owned()).collect()
    }

    /// Has the window be that wide.
    pub(crate) fn width(&self, width: u32) {
        let params =
            json!({ "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false });
        let command = json!({ "cmd": "Emulation.setDeviceMetricsOverride", "params": params });
        self.command("POST", "/goog/cdp/execute", &command);
    }

    /// A picture of the whole page.
    pub(crate) fn picture(&self) -> Vec<u8> {
        use base64::Engine as _;
        let params = json!({ "captureBeyondViewport": true });
        let command = json!({ "cmd": "Page.captureScreenshot", "params": params });
        let answer = self.command("POST", "/goog/cdp/execute", &command);
        let data = answer["value"]["data"].as_str().expect("a picture");
        base64::prelude::BASE64_STANDARD.decode(data).unwrap()
    }

    pub(crate) async fn goto(&self, server: SocketAddr, path: &str) {
        self.client.goto(&format!("http://{server}{path}")).await.unwrap();
    }

    /// The same, until what changes is followed.
    pub(crate) async fn live(&self, server: SocketAddr, path: &str) {
        self.goto(server, path).await;
        self.find("#line[data-state=live]").await;
    }

    pub(crate) async fn run(&self, script: &str) -> Value {
        self.client
            .execute(script, Vec::new())
            .await
            .unwrap_or_else(|error| panic!("{script}: {error}"))
    }

    /// Waits for an element.
    pub(crate) async fn find(&self, css: &str) -> Element {
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
    pub(crate) async fn says(&self, css: &str, text: &str) {
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
        if tokio::time::timeout(PATIENCE, wait).await.is_err() {
            panic!("{css} does not say {text:?} but {last:?}");
        }
    }

    pub(crate) async fn click(&self, css: &str) {
        self.find(css).await.click().await.unwrap_or_else(|error| panic!("{css}: {error}"));
    }
}

/// The browser is told to end, however the test did.
impl Drop for Browser {
    fn drop(&mut self) {
        self.command("DELETE", "", &Value::Null);
    }
}

/// One request to the driver.
fn tell(driver: SocketAddr, method: &str, path: &str, body: &Value) -> Value {
    let send = || -> std::io::Result<String> {
        let mut line = TcpStream::connect(driver)?;
        line.set_read_timeout(Some(PATIENCE))?;
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {driver}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        line.write_all((head + &body).as_bytes())?;
        let mut answer = String::new();
        line.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer = send().unwrap_or_default();
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    serde_json::from_str(body).unwrap_or_default()
}
