//! Jobs of a running Vedetta, over HTTP.
//!
//! ```text
//!  take, keep, settle, enqueue ──► requests, several at once, each answered at once
//!  woken ◄──────────────────────── one stream for each queue that is worked
//! ```
//!
//! No request waits for jobs: the stream says when there is more to take, or a job was called off, as it
//! happens. So a free worker has a new job two trips after it was asked for, a dropped call leaves nothing
//! behind but what was just being answered, which comes back when its lease lapses, and to stop is not to
//! wait. When the server ends, calls fail and are to be tried again; the stream is opened anew by itself,
//! and says first that there may be anything.

use std::collections::HashMap;
use std::convert::Infallible;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use parking_lot::Mutex;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::{sleep, timeout};
use vedetta_core::Backoff;
use vedetta_core::queue::{Kept, Settled, Woken};
use vedetta_runtime::{Bells, Ear};

use crate::job::{Claim, Enqueued, Fate, JobsError, NewJob, Note, check_name};
use crate::port::{Jobs, Taken, Wanted};
use crate::wire;

/// To connect.
const CONNECT: Duration = Duration::from_secs(5);
/// For a whole request.
const WHOLE: Duration = Duration::from_secs(60);
/// A connection that was not used for so long is not used again: the server closes it after twice that.
const IDLE: Duration = Duration::from_secs(5);
/// The stream gives a sign of life every 15 seconds; after some of them are missing the line is dead.
const SILENCE: Duration = Duration::from_secs(45);
/// Bytes of an answer.
const ANSWER: usize = 1 << 30;
/// Bytes of a line of the stream.
const LINE: usize = 1 << 10;

/// The waits between tries to open a stream. With jitter: the workers of a fleet lose it together.
const RECONNECT: Backoff =
    Backoff { first: Duration::from_millis(50), most: Duration::from_secs(5), jitter: 0.2 };

/// The jobs of a server, as far as workers and those who ask for jobs go.
pub struct RemoteJobs {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    server: String,
    authorization: Option<HeaderValue>,
    bells: Bells<String>,
    lines: Mutex<HashMap<Box<str>, Arc<tokio::sync::Mutex<Line>>>>,
}

impl std::fmt::Debug for RemoteJobs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteJobs").field("server", &self.server).finish_non_exhaustive()
    }
}

/// The stream of a queue. One of those who wait reads it, and wakes all.
#[derive(Default)]
struct Line {
    body: Option<Incoming>,
    /// What of a line is there.
    begun: Vec<u8>,
    /// Since it was open last.
    failures: u32,
}

impl RemoteJobs {
    /// The jobs of a server, for example `http://127.0.0.1:7070`. Nothing is sent yet. Over `http` the token goes
    /// over the line as it is, so that line should not leave the machine.
    pub fn new(server: &str, token: Option<&str>) -> Result<Self, JobsError> {
        Self::build(server, token, None)
    }

    /// The same over `https` with a server whose certificate is signed by one of those in a file in PEM, instead
    /// of by one of the usual authorities.
    pub fn trusting(server: &str, token: Option<&str>, ca: &Path) -> Result<Self, JobsError> {
        Self::build(server, token, Some(ca))
    }

    fn build(server: &str, token: Option<&str>, ca: Option<&Path>) -> Result<Self, JobsError> {
        let invalid = |what: String| JobsError::Invalid(what);
        let uri = server.parse::<Uri>().ok();
        let known = |scheme: Option<&str>| matches!(scheme, Some("http" | "https"));
        let fits = uri.is_some_and(|uri| known(uri.scheme_str()) && uri.query().is_none());
        if !fits {
            let example = "http://127.0.0.1:7070";
            return Err(invalid(format!("{server:?} is not an address such as {example}")));
        }
        let authorization = token.map(|token| {
            let mut value = HeaderValue::try_from(format!("Bearer {token}"))
                .map_err(|_| invalid("the token is no text that can be sent".into()))?;
            value.set_sensitive(true);
            Ok::<_, JobsError>(value)
        });
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT));
        connector.set_nodelay(true);
        connector.enforce_http(false);
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls(ca)?)
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .build(connector);
        Ok(Self {
            client,
            server: server.trim_end_matches('/').to_owned(),
            authorization: authorization.transpose()?,
            bells: Bells::default(),
            lines: Mutex::default(),
        })
    }

    async fn post<T: DeserializeOwned>(&self, path: &str, body: Vec<u8>) -> Result<T, JobsError> {
        self.call(Method::POST, path, body).await
    }

    /// Asks the same server for something else, over the same connections.
    pub async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<T, JobsError> {
        let whole = async {
            let response = self.send(method, path, body).await?;
            let body = read(response.into_body()).await?;
            serde_json::from_slice(&body).map_err(|error| JobsError::Failed(Box::new(error)))
        };
        timeout(WHOLE, whole).await.map_err(unavailable)?
    }

    /// Reads a stream of events of the same server until it ends, and tells the name of each; first, that it
    /// is open, as an empty one.
    pub async fn stream(&self, path: &str, mut tell: impl FnMut(&str)) -> Result<(), JobsError> {
        let opened = timeout(CONNECT, self.send(Method::GET, path, Vec::new())).await;
        let mut body = opened.map_err(unavailable)??.into_body();
        tell("");
        let mut begun = Vec::new();
        loop {
            match timeout(SILENCE, body.frame()).await {
                Ok(Some(Ok(frame))) => {
                    begun.extend_from_slice(&frame.into_data().unwrap_or_default());
                    each_event(&mut begun, &mut tell);
                }
                Ok(None) => return Ok(()),
                Ok(Some(Err(error))) => return Err(unavailable(error)),
                Err(late) => return Err(unavailable(late)),
            }
        }
    }

    /// An answer that is not a refusal.
    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<Response<Incoming>, JobsError> {
        let request = Request::builder().method(method).uri(format!("{}{path}", self.server));
        let request = request.header(ACCEPT, "application/json, text/event-stream");
        let request = request.header(CONTENT_TYPE, "application/json");
        let request = match &self.authorization {
            Some(authorization) => request.header(AUTHORIZATION, authorization),
            None => request,
        };
        let request = request.body(Full::from(body));
        let request = request.map_err(|error| JobsError::Invalid(error.to_string()))?;
        let response = self.client.request(request).await.map_err(unavailable)?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let refusal = read(response.into_body()).await.ok();
        let refusal = refusal.and_then(|body| serde_json::from_slice::<wire::Refusal>(&body).ok());
        let why = refusal.map_or_else(|| format!("it answered {status}"), |why| why.error.message);
        Err(match status {
            StatusCode::UNPROCESSABLE_ENTITY | StatusCode::PAYLOAD_TOO_LARGE => {
                JobsError::Invalid(why)
            }
            status if status.is_server_error() || status == StatusCode::REQUEST_TIMEOUT => {
                unavailable(why)
            }
            _ => JobsError::Failed(why.into()),
        })
    }

    /// Reads the stream of a queue and wakes who waits, as long as this is wanted.
    async fn listen(&self, queue: &str) -> Infallible {
        let line = Arc::clone(self.lines.lock().entry(queue.into()).or_default());
        let mut line = line.lock().await;
        loop {
            let Some(body) = &mut line.body else {
                let path = format!("{}/wake", path(queue));
                match timeout(CONNECT, self.send(Method::GET, &path, Vec::new())).await {
                    Ok(Ok(response)) => {
                        *line = Line { body: Some(response.into_body()), ..Line::default() };
                        // What happened before it was open nobody knows.
                        self.bells.ring(queue, Woken::More);
                        self.bells.ring(queue, Woken::Look);
                    }
                    Ok(Err(_)) | Err(_) => {
                        let wait = RECONNECT.delay(line.failures, fastrand::f64());
                        line.failures = line.failures.saturating_add(1);
                        sleep(wait).await;
                    }
                }
                continue;
            };
            match timeout(SILENCE, body.frame()).await {
                Ok(Some(Ok(frame))) => {
                    let data = frame.into_data().unwrap_or_default();
                    line.read(&data).for_each(|what| self.bells.ring(queue, what));
                }
                Ok(Some(Err(_)) | None) | Err(_) => line.body = None,
            }
        }
    }
}

/// Whom to believe that a server is who it says.
fn tls(ca: Option<&Path>) -> Result<ClientConfig, JobsError> {
    let failed = |error: rustls::Error| JobsError::Failed(Box::new(error));
    let mut roots = RootCertStore::empty();
    match ca {
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        Some(file) => {
            let unreadable = |why: &dyn std::fmt::Display| {
                JobsError::Invalid(format!("cannot use {} for TLS: {why}", file.display()))
            };
            let all = CertificateDer::pem_file_iter(file).map_err(|why| unreadable(&why))?;
            for certificate in all {
                let certificate = certificate.map_err(|why| unreadable(&why))?;
                roots.add(certificate).map_err(|why| unreadable(&why))?;
            }
            if roots.is_empty() {
                return Err(unreadable(&"it has no certificate in it"));
            }
        }
    }
    let versions = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(failed)?;
    Ok(versions.with_root_certificates(roots).with_no_client_auth())
}

impl Line {
    /// What the stream says with more of it.
    fn read(&mut self, data: &[u8]) -> impl Iterator<Item = Woken> + use<> {
        self.begun.extend_from_slice(data);
        let mut said = Vec::new();
        each_event(&mut self.begun, |event| match event {
            "more" => said.push(Woken::More),
            "look" => said.push(Woken::Look),
            _ => {}
        });
        said.into_iter()
    }
}

/// Takes whole lines off the beginning of a stream, and tells the names of the events in them.
fn each_event(begun: &mut Vec<u8>, mut tell: impl FnMut(&str)) {
    while let Some(end) = begun.iter().position(|byte| *byte == b'\n') {
        let line = std::str::from_utf8(begun[..end].trim_ascii()).unwrap_or_default();
        if let Some(event) = line.strip_prefix("event: ") {
            tell(event);
        }
        begun.drain(..=end);
    }
    if begun.len() > LINE {
        begun.clear();
    }
}

fn path(queue: &str) -> String {
    format!("/api/v1/queues/{}", utf8_percent_encode(queue, NON_ALPHANUMERIC))
}

async fn read(body: Incoming) -> Result<Bytes, JobsError> {
    let whole = Limited::new(body, ANSWER).collect().await;
    whole.map(http_body_util::Collected::to_bytes).map_err(unavailable)
}

fn unavailable(why: impl Into<Box<dyn Error + Send + Sync>>) -> JobsError {
    JobsError::Unavailable(why.into())
}

fn json(value: &impl Serialize) -> Result<Vec<u8>, JobsError> {
    serde_json::to_vec(value).map_err(|error| JobsError::Invalid(error.to_string()))
}

/// Arrays, each of as many as one request may have.
fn bodies<T: Serialize>(items: impl Iterator<Item = T>) -> Result<Vec<Vec<u8>>, JobsError> {
    const MOST: usize = wire::LARGEST_BODY / 2;
    let (mut bodies, mut body, mut count) = (Vec::new(), Vec::new(), 0);
    for item in items {
        let item = json(&item)?;
        if count == wire::MOST_AT_ONCE || (count > 0 && body.len() + item.len() > MOST) {
            body.push(b']');
            bodies.push(std::mem::take(&mut body));
            count = 0;
        }
        body.push(if count == 0 { b'[' } else { b',' });
        body.extend_from_slice(&item);
        count += 1;
    }
    if count > 0 {
        body.push(b']');
        bodies.push(body);
    }
    Ok(bodies)
}

#[async_trait]
impl Jobs for RemoteJobs {
    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, JobsError> {
        jobs.iter().try_for_each(NewJob::check)?;
        if jobs.is_empty() {
            return Ok(Vec::new());
        }
        let added = self.post::<Vec<wire::Added>>("/api/v1/jobs", json(&jobs)?).await;
        let added = added.map_err(|error| match error {
            // The server says in its words which queue it is.
            JobsError::Failed(why) => {
                let queues = jobs.iter().map(|job| JobsError::Draining(job.queue.clone()));
                let mut drained = queues.filter(|error| error.to_string() == why.to_string());
                drained.next().unwrap_or(JobsError::Failed(why))
            }
            error => error,
        })?;
        Ok(added.iter().map(|added| Enqueued { id: added.id, is_new: added.new }).collect())
    }

    /// As many requests as it takes: none has too much of an answer.
    async fn take(&self, wanted: &Wanted<'_>) -> Result<Taken, JobsError> {
        check_name("queue", wanted.queue)?;
        let (path, mut room) = (format!("{}/take", path(wanted.queue)), wanted.room);
        let lease = wanted.lease.clamp(*wire::LEASES.start(), *wire::LEASES.end());
        let lease_ms = u64::try_from(lease.as_millis()).ok();
        let mut taken = Taken::default();
        while room > 0 {
            let asked = json(&wire::Take {
                worker: wanted.worker.into(),
                max: room.min(wire::MOST_TAKEN),
                wait_ms: 0,
                capacity: Some(wanted.capacity),
                lease_ms,
            })?;
            let answer: wire::Taken = match self.post(&path, asked).await {
                Ok(answer) => answer,
                Err(error) if taken.jobs.is_empty() => return Err(error),
                // What is there is there; what is wrong is said next time.
                Err(_) => break,
            };
            for job in answer.jobs {
                room = room.saturating_sub(job.cost.min(wanted.capacity));
                taken.jobs.push(job.into());
            }
            taken.rest = answer.rest_ms.map(Duration::from_millis);
            if taken.rest.is_some() {
                break;
            }
        }
        Ok(taken)
    }

    async fn keep(&self, held: &[(Claim, Note)]) -> Result<Vec<Kept>, JobsError> {
        let mut all = Vec::with_capacity(held.len());
        for body in bodies(held.iter().map(|(claim, note)| wire::Keep::new(*claim, note)))? {
            let kept: Vec<wire::Kept> = self.post("/api/v1/jobs/keep", body).await?;
            let lost = |kept: wire::Kept| kept.cancel || kept.stale;
            all.extend(
                kept.into_iter().map(|kept| if lost(kept) { Kept::Lost } else { Kept::Ours }),
            );
        }
        Ok(all)
    }

    async fn settle(&self, ended: &[(Claim, Fate)]) -> Result<Vec<Settled>, JobsError> {
        let mut all = Vec::with_capacity(ended.len());
        let ends = ended.iter().map(|(claim, fate)| wire::Settle::new(*claim, fate.clone()));
        for body in bodies(ends)? {
            let settled: Vec<wire::Settlement> = self.post("/api/v1/jobs/settle", body).await?;
            all.extend(settled.into_iter().map(Settled::from));
        }
        Ok(all)
    }

    async fn woken(&self, queue: &str, ear: &Ear) -> Woken {
        tokio::select! {
            biased;
            woken = self.bells.rung(queue, ear) => woken,
            never = self.listen(queue) => match never {},
        }
    }
}
