//! Who gets in, and what they can do there: the security of the API as somebody on a socket finds it.

mod audit;
mod browser;
mod generated;
mod hostile;
mod redaction;
mod roles;
mod scopes;
mod streams;
#[path = "../http/support.rs"]
#[expect(dead_code, reason = "shared with the other suite")]
mod support;
mod throttle;
mod tls;

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use vedetta_access::{Access, Role, Scope};
use vedetta_dashboard::{Api, Limits};
use vedetta_db::postgres::Postgres;
use vedetta_fleet::Fleet;
use vedetta_fleet::postgres::{PostgresBus, PostgresRoster};
use vedetta_jobs::postgres::PostgresJobs;
use vedetta_stage::Records as _;
use vedetta_stage::sqlite;

use support::{Answer, PATIENCE, Server};

pub(crate) const PASSWORD: &str = "correct horse";

/// A server that people sign in to.
pub(crate) struct Guarded {
    pub(crate) server: Server,
    pub(crate) access: Access,
    folder: TempDir,
}

impl Guarded {
    pub(crate) async fn start() -> Self {
        Self::with(true).await
    }

    /// A server where nobody signs in, with an audit log.
    pub(crate) async fn open() -> Self {
        Self::with(false).await
    }

    /// The same as [`Self::start`] with other limits.
    pub(crate) async fn limited(limits: Limits) -> Self {
        Self::on(true, limits).await
    }

    /// The same as [`Self::start`] with jobs, commands and records of workers on a PostgreSQL.
    pub(crate) async fn on_postgresql(url: &str) -> Self {
        let schemas = [vedetta_jobs::postgres::SCHEMA, vedetta_fleet::postgres::SCHEMA];
        let db = Postgres::open(url, &schemas).await.unwrap();
        let (bus, roster) = (PostgresBus::new(db.clone()), PostgresRoster::new(db.clone()));
        let jobs = Arc::new(PostgresJobs::new(db));
        let beat = Duration::from_secs(3);
        let opening = Fleet::open(
            Arc::new(bus),
            Arc::new(roster),
            Arc::clone(&jobs) as _,
            ["default".to_owned()],
            beat,
        );
        let (fleet, with) = (opening.await.unwrap(), Self::start().await);
        let (folder, access) = (with.folder, with.access.clone());
        let (ours, theirs) = (fleet.clone(), access.clone());
        let api = |api: Api| api.jobs(jobs).fleet(ours).access(theirs, true);
        let mut server = with.server.serve_as(api).await;
        server.fleet = fleet;
        Self { server, access, folder }
    }

    async fn with(signs_in: bool) -> Self {
        Self::on(signs_in, Limits::default()).await
    }

    async fn on(signs_in: bool, limits: Limits) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let access = Access::open(folder.path()).unwrap();
        let options = vedetta_db::Options::new(folder.path().join("stages.db"));
        let db = vedetta_db::Db::open(&options, &[sqlite::SCHEMA]).unwrap();
        let records = sqlite::Records::open(db).await.unwrap();
        let pay = records.lane("order", "pay").await.unwrap();
        records.enqueue(pay, &[("1", 0, Duration::ZERO)]).await.unwrap();
        let server = Server::start().await;
        let with = access.clone();
        let api = |api: Api| api.stages(records).access(with, signs_in).limits(limits);
        let server = server.serve_as(api).await;
        Self { server, access, folder }
    }

    /// The head for a new token of this role.
    pub(crate) fn token(&self, name: &str, role: Role) -> String {
        self.scoped(name, role, &Scope::All)
    }

    /// The same with a scope.
    pub(crate) fn scoped(&self, name: &str, role: Role, scope: &Scope) -> String {
        let token = self.access.add_token(name, role, scope, None).unwrap();
        format!("Bearer {}", token.reveal())
    }

    pub(crate) fn expired(&self, name: &str, role: Role) -> String {
        let end = SystemTime::now() - Duration::from_secs(1);
        let token = self.access.add_token(name, role, &Scope::All, Some(end)).unwrap();
        format!("Bearer {}", token.reveal())
    }

    pub(crate) async fn user(&self, name: &'static str, role: Role) {
        let access = self.access.clone();
        let add = move || access.add_user(name, PASSWORD, role).unwrap();
        tokio::task::spawn_blocking(add).await.unwrap();
    }

    pub(crate) async fn asks(&self, request: &str, authorization: &str) -> Answer {
        let headers = [("Authorization", authorization), ("Content-Type", "application/json")];
        self.server.send(request, &headers, "").await
    }

    pub(crate) async fn tells(&self, request: &str, authorization: &str, body: Value) -> Answer {
        let headers = [("Authorization", authorization), ("Content-Type", "application/json")];
        self.server.send(request, &headers, &body.to_string()).await
    }

    /// Opens the form to sign in.
    pub(crate) async fn form(&self) -> Browser {
        let answer = self.server.get("/login").await;
        assert_eq!(answer.status, 200, "{answer:?}");
        Browser { cookie: set_cookie(&answer).unwrap(), csrf: csrf_of(&answer.body) }
    }

    pub(crate) async fn post(&self, browser: &Browser, path: &str, form: &str) -> Answer {
        let body = format!("csrf={}&{form}", browser.csrf);
        let headers = [
            ("Cookie", browser.cookie.as_str()),
            ("Content-Type", "application/x-www-form-urlencoded"),
            ("Sec-Fetch-Site", "same-origin"),
        ];
        self.server.send(&format!("POST {path}"), &headers, &body).await
    }

    pub(crate) async fn try_to_sign_in(&self, name: &str, password: &str) -> Answer {
        let form = self.form().await;
        let password = password.replace(' ', "+");
        self.post(&form, "/login", &format!("name={name}&password={password}&next=/")).await
    }

    /// Signs in; what the browser has then.
    pub(crate) async fn sign_in(&self, name: &str) -> Browser {
        let answer = self.try_to_sign_in(name, PASSWORD).await;
        assert_eq!(answer.status, 303, "{answer:?}");
        self.browser(set_cookie(&answer).unwrap()).await
    }

    /// A browser that has this cookie.
    pub(crate) async fn browser(&self, cookie: String) -> Browser {
        let answer =
            self.server.send("GET /api/v1/session", &[("Cookie", cookie.as_str())], "").await;
        assert_eq!(answer.status, 200, "{answer:?}");
        Browser { cookie, csrf: answer.json()["csrf"].as_str().unwrap().to_owned() }
    }

    /// The audit log, the oldest entry first, once it has this many.
    pub(crate) async fn log(&self, least: usize) -> Vec<vedetta_access::Recorded> {
        let read = || self.access.audit(None, 1000).unwrap();
        support::until(|| read().len() >= least).await;
        let mut log = read();
        log.reverse();
        log
    }

    pub(crate) async fn end(self) {
        self.server.end().await;
        drop(self.folder);
    }
}

pub(crate) struct Browser {
    pub(crate) cookie: String,
    pub(crate) csrf: String,
}

/// The cookie as a browser would send it back.
pub(crate) fn set_cookie(answer: &Answer) -> Option<String> {
    // The head is in lower case; values are not.
    let start = answer.raw.to_lowercase().find("set-cookie: ")? + "set-cookie: ".len();
    let line = answer.raw[start..].lines().next()?;
    Some(line.split(';').next()?.to_owned())
}

/// Every byte of it as an escape.
pub(crate) fn escaped(text: &str) -> String {
    text.bytes().fold(String::new(), |mut out, byte| {
        let _ = write!(out, "%{byte:02x}");
        out
    })
}

pub(crate) fn csrf_of(page: &str) -> String {
    let (_, rest) = page.split_once("name=\"csrf\" value=\"").expect("a token in the form");
    rest.split('"').next().unwrap().to_owned()
}

/// Sends a request and reads the status of the answer; streams go on after it.
pub(crate) async fn status(
    server: &Server,
    request: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> u16 {
    let mut head = format!("{request} HTTP/1.1\r\nHost: {}\r\n", server.address);
    for (name, value) in headers {
        let _ = write!(head, "{name}: {value}\r\n");
    }
    let text = format!("{head}Content-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len());
    let mut line = TcpStream::connect(server.address).await.unwrap();
    let talk = async {
        line.write_all(text.as_bytes()).await.unwrap();
        let mut begun = [0; 12];
        line.read_exact(&mut begun).await.unwrap_or_else(|error| panic!("{request}: {error}"));
        String::from_utf8_lossy(&begun)[9..].parse().unwrap()
    };
    tokio::time::timeout(PATIENCE, talk).await.unwrap_or_else(|_| panic!("{request} hangs"))
}

pub(crate) fn job(payload: &Value) -> Value {
    json!({"kind": "pack", "payload": payload})
}
