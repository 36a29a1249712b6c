//! Accepting connections, finding out what they speak, and letting them go.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response, StatusCode, Version, header};
use axum::response::IntoResponse;
use bytes::{Bytes, BytesMut};
use futures_util::FutureExt as _;
use futures_util::future::Either;
use http_body::Body as _;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tonic::codegen::Service as _;
use vedetta_kv::Store;
use vedetta_net::tls::{self, Tls};
use vedetta_net::{Patient, accept};

use crate::authority::Renamed;
use crate::calls::Calls;
use crate::upload::{Upload, claim, room};
use crate::v3::{Grpc, KeyRoom, Reply};
use crate::{guard, v2, v3};

/// The least that HTTP/1 can be told to take as a head.
const LEAST_HEAD: usize = 8 << 10;
/// How every HTTP/2 connection begins.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes for which a body that does not say its length takes room at a time.
const STEP: usize = 64 << 10;
/// When to look again at a beginning that could become anything.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// What is served.
#[derive(Clone)]
pub struct Endpoint {
    pub(crate) store: Store,
    /// The member's name, as etcd's clients show it.
    pub(crate) name: String,
    pub(crate) limits: Limits,
    tls: Option<Arc<ServerConfig>>,
}

/// How much of the server clients may take.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Connections at once; further ones wait to be accepted.
    pub connections: usize,
    /// Requests and watch streams at once on an HTTP/2 connection.
    pub streams: u32,
    /// Bytes of a request's head.
    pub header: usize,
    /// Bytes of a request's body, except in gRPC, where it is 2 MiB for a message.
    pub body: usize,
    /// Bytes of requests that are not whole yet, together on a connection; what is more is refused.
    pub unfinished: usize,
    /// Bytes of keys and ends of ranges in the watches of a connection, and 512 for each watch; one for which there is no
    /// room is refused.
    pub watched: usize,
    /// Time for the TLS handshake, and to show which HTTP is spoken.
    pub handshake: Duration,
    /// Time to send a head over HTTP/1, and how long such a connection may be silent before it.
    pub head: Duration,
    /// Time to send a body, or the message of a call.
    pub upload: Duration,
    /// An HTTP/2 connection that is silent for so long is asked whether it is still there, and has as long
    /// to answer.
    pub silence: Duration,
    /// A client that takes no byte of what is sent to it for so long is let go.
    pub stall: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 10_000,
            streams: 10_000,
            header: 64 << 10,
            body: 4 << 20,
            unfinished: 64 << 20,
            watched: 64 << 20,
            handshake: Duration::from_secs(10),
            head: Duration::from_secs(60),
            upload: Duration::from_secs(30),
            silence: Duration::from_secs(30),
            stall: Duration::from_secs(60),
        }
    }
}

impl Endpoint {
    /// Serves `store`.
    pub fn new(store: Store) -> Self {
        let (name, limits) = ("vedetta".into(), Limits::default());
        // A client that is told to come back holds nothing here; one that waits does, and there is no end to them.
        Self { store: store.impatient(), name, limits, tls: None }
    }

    /// The same under another name; the ids that clients see come from it.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// The same with other limits.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// The same over TLS only.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls.speaking(&[tls::HTTP2, tls::HTTP1]));
        self
    }

    /// How an address of it begins.
    pub(crate) fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    pub(crate) fn cluster_id(&self) -> u64 {
        id("cluster", &self.name)
    }

    pub(crate) fn member_id(&self) -> u64 {
        id("member", &self.name)
    }
}

/// The same name is the same id after every start.
fn id(of: &str, name: &str) -> u64 {
    let hash = Sha256::digest(format!("{of} {name}"));
    hash.first_chunk().map_or(1, |bytes| u64::from_be_bytes(*bytes))
}

/// Serves until `stop`; then accepts nothing new, ends watches and keep-alives, finishes the requests that
/// run, and returns. A client that does not take its answer holds this up for a second. Dropped, it lets
/// go of all connections at once.
pub async fn serve(listener: TcpListener, endpoint: Endpoint, stop: CancellationToken) {
    let server = Arc::new(Server {
        store: endpoint.store.clone(),
        grpc: Grpc::new(&endpoint, &stop),
        router: v2::router(&endpoint, &stop).merge(v3::router(&endpoint, &stop)),
        limits: endpoint.limits.clone(),
        tls: endpoint.tls.clone().map(TlsAcceptor::from),
        stop: stop.clone(),
    });
    let talk = |stream| Arc::clone(&server).converse(stream);
    accept(listener, endpoint.limits.connections, stop, talk).await;
}

/// What the requests of one connection share.
#[derive(Clone)]
struct Shares {
    origin: Origin,
    /// Bytes that unfinished requests may still take.
    unfinished: Arc<Semaphore>,
}

/// What an answer may depend on of the connection that asks.
#[derive(Clone)]
pub(crate) struct Origin {
    /// Where it came in. A listener on all addresses has none that a client could use.
    pub(crate) local: SocketAddr,
    pub(crate) watched: KeyRoom,
}

/// What every connection needs.
struct Server {
    store: Store,
    grpc: Grpc,
    router: Router,
    limits: Limits,
    tls: Option<TlsAcceptor>,
    stop: CancellationToken,
}

impl Server {
    /// One connection. How it ends is the client's business.
    async fn converse(self: Arc<Self>, stream: TcpStream) {
        let local = stream.local_addr().unwrap_or((Ipv4Addr::LOCALHOST, 0).into());
        let local = SocketAddr::new(local.ip().to_canonical(), local.port());
        let origin = Origin { local, watched: KeyRoom::new(self.limits.watched) };
        let shares = Shares { origin, unfinished: room(self.limits.unfinished) };
        let handshake = self.limits.handshake;
        let stop = self.stop.clone();
        let patient = |stream| Patient::new(stream, self.limits.stall, stop.clone());
        let hello = async {
            match &self.tls {
                None => sniff(&stream).await.map(|http2| (Wire::Plain(patient(stream)), http2)),
                Some(acceptor) => {
                    let stream = acceptor.accept(patient(stream)).await.ok()?;
                    let http2 = stream.get_ref().1.alpn_protocol() == Some(tls::HTTP2);
                    Some((Wire::Tls(Box::new(stream)), http2))
                }
            }
        };
        let begun = tokio::select! {
            begun = tokio::time::timeout(handshake, hello) => begun,
            () = stop.cancelled() => return,
        };
        match begun {
            Ok(Some((Wire::Plain(mut stream), true))) => {
                stream.is_always_read();
                self.http2(stream, shares).await;
            }
            Ok(Some((Wire::Tls(mut stream), true))) => {
                stream.get_mut().0.is_always_read();
                self.http2(stream, shares).await;
            }
            Ok(Some((Wire::Plain(stream), false))) => self.http1(stream, shares).await,
            Ok(Some((Wire::Tls(stream), false))) => self.http1(stream, shares).await,
            Ok(None) | Err(_) => {}
        }
    }

    async fn http1(self: Arc<Self>, stream: impl Stream, shares: Shares) {
        let server = Arc::clone(&self);
        let service =
            service_fn(move |request| Arc::clone(&server).answer(request, shares.clone()));
        // The head's time also runs while the connection is silent, so a client that says nothing is let go.
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.head)
            .max_buf_size(self.limits.header.max(LEAST_HEAD))
            .serve_connection(TokioIo::new(stream), service);
        let mut connection = std::pin::pin!(connection);
        tokio::select! {
            _ = connection.as_mut() => {}
            () = self.stop.cancelled() => {
                connection.as_mut().graceful_shutdown();
                let _ = connection.await;
            }
        }
    }

    async fn http2(self: Arc<Self>, stream: impl Stream, shares: Shares) {
        let server = Arc::clone(&self);
        let service =
            service_fn(move |request| Arc::clone(&server).answer(request, shares.clone()));
        let mut calls = Calls::default();
        let connection = http2::Builder::new(calls.begun())
            .timer(TokioTimer::new())
            .max_concurrent_streams(self.limits.streams)
            .max_header_list_size(u32::try_from(self.limits.header).unwrap_or(u32::MAX))
            .initial_stream_window_size(1 << 20)
            .initial_connection_window_size(4 << 20)
            .keep_alive_interval(self.limits.silence)
            .keep_alive_timeout(self.limits.silence)
            .serve_connection(TokioIo::new(Renamed::new(stream)), service);
        let mut connection = std::pin::pin!(connection);
        tokio::select! {
            () = calls.run(&self.store, connection.as_mut()) => {}
            () = self.stop.cancelled() => {
                connection.as_mut().graceful_shutdown();
                calls.run(&self.store, connection).await;
            }
        }
    }

    /// gRPC is kept apart from the rest, whose larger future it would otherwise carry along.
    fn answer(
        self: Arc<Self>,
        mut request: Request<Incoming>,
        shares: Shares,
    ) -> impl Future<Output = Result<Response<Reply>, Infallible>> {
        let path = request.uri().path();
        let limit = (!v3::is_stream(path)).then_some(self.limits.upload);
        let is_grpc = is_grpc(&request);
        if limit.is_none() || !is_grpc || v3::is_of_members(path) {
            request.extensions_mut().insert(shares.origin.clone());
        }
        if is_grpc {
            let request = request.map(|body| Upload::new(body, limit, shares.unfinished));
            return Either::Left(self.grpc.answer(request).map(Ok));
        }
        Either::Right(Box::pin(async move {
            let answer = match self.take_in(request, &shares).await {
                Ok(request) => self.router.clone().call(request).await?,
                Err(refused) => refused,
            };
            Ok(answer.map(|body| Reply::Other(tonic::body::Body::new(body))))
        }))
    }

    /// A request that may be answered, with all of its body.
    async fn take_in(
        &self,
        request: Request<Incoming>,
        shares: &Shares,
    ) -> Result<Request<Body>, Response<Body>> {
        guard::check(&request, shares.origin.local.ip()).map_err(IntoResponse::into_response)?;
        let (head, body) = request.into_parts();
        // What says that it is too large need not be sent.
        if body.size_hint().lower() > self.limits.body as u64 {
            return Err(too_large());
        }
        let is_v3 = head.uri.path().starts_with("/v3");
        let too_many = || if is_v3 { v3::refusal(&v3::too_many()) } else { v2::too_many() };
        let all = self.all_of(body, &shares.unfinished, too_many);
        match tokio::time::timeout(self.limits.upload, all).await {
            Ok(Ok(body)) => Ok(Request::from_parts(head, Body::from(body))),
            Ok(Err(refused)) => Err(refused),
            Err(_) => Err((StatusCode::REQUEST_TIMEOUT, "the body is late\n").into_response()),
        }
    }

    /// All of a body. One that does not say how long it is has room for what has come of it, in steps.
    async fn all_of(
        &self,
        mut body: Incoming,
        room: &Arc<Semaphore>,
        too_many: impl Fn() -> Response<Body>,
    ) -> Result<Bytes, Response<Body>> {
        let said = body.size_hint().exact().and_then(|said| usize::try_from(said).ok());
        let mut held = claim(room, said.unwrap_or(0)).ok_or_else(&too_many)?;
        let mut all = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let frame = frame
                .map_err(|_| (StatusCode::BAD_REQUEST, "the body broke off\n").into_response())?;
            let Ok(data) = frame.into_data() else { continue };
            let come = all.len() + data.len();
            if come > self.limits.body {
                return Err(too_large());
            }
            while come > held.num_permits() && !body.is_end_stream() {
                held.merge(claim(room, STEP).ok_or_else(&too_many)?);
            }
            all.extend_from_slice(&data);
        }
        Ok(all.freeze())
    }
}

fn too_large() -> Response<Body> {
    (StatusCode::PAYLOAD_TOO_LARGE, "the body is too large\n").into_response()
}

fn is_grpc<B>(request: &Request<B>) -> bool {
    let kind = request.headers().get(header::CONTENT_TYPE);
    request.version() == Version::HTTP_2
        && kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for S {}

/// A connection that is ready for HTTP.
enum Wire {
    Plain(Patient),
    Tls(Box<tokio_rustls::server::TlsStream<Patient>>),
}

/// Whether a connection begins as HTTP/2; nothing is taken from it. `None` when it ended.
async fn sniff(stream: &TcpStream) -> Option<bool> {
    let mut begin = [0; PREFACE.len()];
    loop {
        let read = stream.peek(&mut begin).await.ok()?;
        match &begin[..read] {
            [] => return None,
            begin if !PREFACE.starts_with(begin) => return Some(false),
            PREFACE => return Some(true),
            // Only time tells. The same bytes would be there at once, so it is waited for differently.
            _ => tokio::time::sleep(LOOK_AGAIN).await,
        }
    }
}
