//! Talking to a running server.

use std::io::ErrorKind;
use std::net::IpAddr;
use std::time::Duration;

use clap::Args;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use ureq::http::{Method, Request, Response, Uri, header};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use crate::output::Format;

/// Where to connect, and how to print.
#[derive(Debug, Args)]
pub(crate) struct Remote {
    /// The server
    #[arg(
        long,
        global = true,
        value_name = "URL",
        env = "VEDETTA_SERVER",
        default_value = "http://127.0.0.1:7070"
    )]
    server: String,
    /// How to print what comes back
    #[arg(long, global = true, value_enum, default_value_t = Format::Table)]
    pub(crate) output: Format,
}

impl Remote {
    /// This server.
    pub(crate) fn to(server: &str) -> Self {
        Self { server: server.to_owned(), output: Format::Json }
    }

    /// The server, as it was given.
    pub(crate) fn server(&self) -> &str {
        &self.server
    }
}

/// Why there is no answer, or not the wished one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    #[error("cannot reach {server}: {why}; is `vedetta up` running there?")]
    Unreachable { server: String, why: String },
    #[error(
        "cannot trust {server}: {why}; its certificate has to be for this address, of no authority, and signed by one \
         that is known or in {CA}"
    )]
    Untrusted { server: String, why: String },
    #[error("{server:?} is not an address such as http://127.0.0.1:7070")]
    BadServer { server: String },
    #[error("{CA} cannot be used: {why}")]
    BadAuthority { why: String },
    #[error("{message}")]
    Refused { status: u16, message: String },
}

/// To connect.
const CONNECT: Duration = Duration::from_secs(5);
/// For a whole request.
const WHOLE: Duration = Duration::from_secs(60);
/// A watch gives a sign of life every 15 seconds; after some of them are missing the line is dead.
const SILENCE: Duration = Duration::from_secs(45);
/// Bytes of an answer.
const ANSWER: u64 = 256 << 20;

/// The status of an answer that is not Vedetta's.
const MISDIRECTED: u16 = 421;

/// A file in PEM with who may sign a server's certificate, instead of those that are known to all.
pub(crate) const CA: &str = "VEDETTA_CA";

/// Whom to believe that a server is who it says.
fn tls() -> Result<TlsConfig, ClientError> {
    let Some(file) = std::env::var_os(CA).filter(|file| !file.is_empty()) else {
        return Ok(TlsConfig::default());
    };
    let bad = |why: String| ClientError::BadAuthority { why };
    let pem = std::fs::read(file).map_err(|error| bad(error.to_string()))?;
    let mut certificates = Vec::new();
    for item in parse_pem(&pem) {
        match item {
            Ok(PemItem::Certificate(certificate)) => certificates.push(certificate),
            Ok(_) => {}
            Err(error) => return Err(bad(error.to_string())),
        }
    }
    if certificates.is_empty() {
        return Err(bad("it has no certificate in it".into()));
    }
    Ok(TlsConfig::builder().root_certs(RootCerts::from(certificates)).build())
}

/// What may stand in a path or a query as it is.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Any bytes, as part of an address.
pub(crate) fn encode(bytes: &[u8]) -> String {
    percent_encode(bytes, PLAIN).to_string()
}

/// Whether the way to a server is one that others may listen on.
fn leaves_the_machine(server: &str) -> bool {
    let uri = server.parse::<Uri>().ok();
    // What is no address is refused later, and nothing is sent.
    uri.as_ref().and_then(Uri::host).is_some_and(|host| {
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let loopback = bare.parse::<IpAddr>().map(|address| address.is_loopback());
        !loopback.unwrap_or_else(|_| bare.eq_ignore_ascii_case("localhost"))
    })
}

pub(crate) struct Client {
    agent: Agent,
    server: String,
    token: Option<String>,
}

#[derive(Deserialize)]
struct Refusal {
    error: Why,
}

#[derive(Deserialize)]
struct Why {
    message: String,
    hint: Option<String>,
}

impl Client {
    /// Reads `VEDETTA_TOKEN` too.
    pub(crate) fn new(remote: &Remote) -> Result<Self, ClientError> {
        let is_tls = remote.server.starts_with("https://");
        if !is_tls && !remote.server.starts_with("http://") {
            return Err(ClientError::BadServer { server: remote.server.clone() });
        }
        // Neither a proxy nor another server is meant to see the token.
        let config = Agent::config_builder()
            .tls_config(tls()?)
            .proxy(None)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .user_agent(concat!("vedetta/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(CONNECT))
            .build();
        let server = remote.server.trim_end_matches('/').to_owned();
        let token = std::env::var("VEDETTA_TOKEN").ok().filter(|token| !token.is_empty());
        if token.is_some() && !is_tls && leaves_the_machine(&server) {
            let shown = crate::output::one_line(&server);
            eprintln!("vedetta: warning: VEDETTA_TOKEN goes to {shown} unencrypted");
        }
        Ok(Self { agent: config.into(), server, token })
    }

    pub(crate) fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.ask(Method::GET, path, None)
    }

    /// Sends something with JSON in it that must stay as it was written.
    pub(crate) fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        let body = serde_json::to_string(body);
        let body =
            body.map_err(|error| ClientError::Refused { status: 422, message: error.to_string() })?;
        self.send(Method::POST, path, Some(body))
    }

    /// Sends a request and reads the answer.
    pub(crate) fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
    ) -> Result<T, ClientError> {
        self.send(method, path, body.map(|body| body.to_string()))
    }

    fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<String>,
    ) -> Result<T, ClientError> {
        let mut request = self.request(method, path);
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let request = request.body(body.unwrap_or_default()).map_err(|_| self.bad_server())?;
        let config = self.agent.configure_request(request).timeout_global(Some(WHOLE));
        let mut answer = self.answered(self.agent.run(config.build()))?;
        let read = answer.body_mut().with_config().limit(ANSWER).read_json();
        read.map_err(|error| self.unreachable(&error))
    }

    /// Opens a stream of events, after the last id seen.
    pub(crate) fn stream(
        &self,
        path: &str,
        last_seen: Option<u64>,
    ) -> Result<impl std::io::Read + use<>, ClientError> {
        let mut request = self.request(Method::GET, path);
        if let Some(seen) = last_seen {
            request = request.header("Last-Event-ID", seen);
        }
        let request = request.body(String::new()).map_err(|_| self.bad_server())?;
        let config = self.agent.configure_request(request).timeout_per_read(Some(SILENCE));
        Ok(self.answered(self.agent.run(config.build()))?.into_body().into_reader())
    }

    fn request(&self, method: Method, path: &str) -> ureq::http::request::Builder {
        let request = Request::builder().method(method).uri(format!("{}{path}", self.server));
        match &self.token {
            Some(token) => request.header(header::AUTHORIZATION, format!("Bearer {token}")),
            None => request,
        }
    }

    /// An answer that is not a refusal.
    fn answered(
        &self,
        answer: Result<Response<Body>, ureq::Error>,
    ) -> Result<Response<Body>, ClientError> {
        let mut answer = answer.map_err(|error| match error {
            ureq::Error::BadUri(_) | ureq::Error::Http(_) => self.bad_server(),
            error => self.unreachable(&error),
        })?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        let mut status = answer.status().as_u16();
        let message = match answer.body_mut().read_json::<Refusal>() {
            Ok(Refusal { error: Why { message, hint: Some(hint) } }) => {
                format!("{message} ({hint})")
            }
            Ok(Refusal { error }) => error.message,
            // Something between us and it.
            Err(_) if status >= 500 => format!("{} answered {}", self.server, answer.status()),
            Err(_) => {
                // Its 404 says nothing about what was asked for.
                status = MISDIRECTED;
                format!(
                    "{} answered {}, which is not Vedetta's HTTP API, perhaps its etcd endpoint: give the address of \
                     http.listen",
                    self.server,
                    answer.status()
                )
            }
        };
        Err(ClientError::Refused { status, message })
    }

    fn bad_server(&self) -> ClientError {
        ClientError::BadServer { server: self.server.clone() }
    }

    fn unreachable(&self, error: &ureq::Error) -> ClientError {
        let (server, why) = (self.server.clone(), error.to_string());
        let is_tls = match error {
            ureq::Error::Rustls(_) => true,
            // What the other side sent is no answer, before there was a request.
            ureq::Error::Io(error) => error.kind() == ErrorKind::InvalidData,
            _ => false,
        };
        if is_tls && server.starts_with("https:") {
            return ClientError::Untrusted { server, why };
        }
        ClientError::Unreachable { server, why }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_stays_on_the_machine() {
        for near in ["http://127.0.0.1:7070", "http://[::1]:7070", "http://LocalHost", "http://"] {
            assert!(!leaves_the_machine(near), "{near}");
        }
        for far in ["http://192.0.2.7:7070", "http://[2001:db8::1]", "http://localhost.example"] {
            assert!(leaves_the_machine(far), "{far}");
        }
    }
}
