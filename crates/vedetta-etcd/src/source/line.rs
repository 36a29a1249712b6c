//! One connection to one node.

use std::error::Error;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::uri::{Authority, Parts, PathAndQuery, Scheme, Uri};
use axum::http::{HeaderName, HeaderValue, Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;
use tonic::body::Body;
use tonic::codegen::{Service, StdError};
use tonic::{Code, Status};
use vedetta_core::SourceError;

use super::address::Address;
use super::proto::etcdserverpb::auth_client::AuthClient;
use super::proto::etcdserverpb::kv_client::KvClient;
use super::proto::etcdserverpb::{
    AuthenticateRequest, RangeRequest, RangeResponse, TxnRequest, TxnResponse,
};

/// Keys asked for at once.
const PAGE: i64 = 1_000;
/// What a page may be at most; a larger one is asked for in parts.
const PAGE_BYTES: usize = 64 << 20;
/// What may lie unread of an answer, and of all of them. The second is so much more that watches nobody
/// reads do not hold up a list.
const UNREAD: (u32, u32) = (1 << 20, 256 << 20);
/// A node that is silent for so long is asked whether it is still there, and has as long to answer. etcd
/// hangs up on who asks more often than every 5 s.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// A node that knows no leader refuses such a call at once, and ends such a watch.
const NEEDS_LEADER: (HeaderName, HeaderValue) =
    (HeaderName::from_static("hasleader"), HeaderValue::from_static("true"));
/// Who we are, as the server has it.
const TOKEN: HeaderName = HeaderName::from_static("token");

/// How to connect.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) tls: Option<Arc<ClientConfig>>,
    pub(super) user: Option<User>,
    pub(super) patience: Duration,
}

#[derive(Clone)]
pub(super) struct User {
    pub(super) name: String,
    pub(super) password: String,
}

/// A connection to a node. It ends with the last of its clones.
#[derive(Clone)]
pub(super) struct Line(Arc<Wire>);

struct Wire {
    /// How the node is called in errors.
    endpoint: String,
    scheme: Scheme,
    authority: Authority,
    settings: Settings,
    requests: SendRequest<Body>,
    token: Mutex<Option<HeaderValue>>,
    page: AtomicI64,
    _connection: AbortOnDropHandle<()>,
}

impl Line {
    /// Connects within a time.
    pub(super) async fn connect(
        address: &Address,
        settings: &Settings,
        limit: Duration,
    ) -> Result<Self, SourceError> {
        let secure = address.tls.unwrap_or(settings.tls.is_some());
        let address = Address { tls: Some(secure), ..address.clone() };
        let endpoint = address.to_string();
        let connected = tokio::time::timeout(limit, Self::open(&address, settings)).await;
        match connected {
            Ok(Ok((requests, connection))) => {
                let place = endpoint.split_once("://").map_or(&endpoint[..], |(_, place)| place);
                let authority = Authority::try_from(place)
                    .map_err(|bad| cannot_connect(&endpoint, Some(bad.into())))?;
                Ok(Self(Arc::new(Wire {
                    authority,
                    endpoint,
                    scheme: if secure { Scheme::HTTPS } else { Scheme::HTTP },
                    settings: settings.clone(),
                    requests,
                    token: Mutex::default(),
                    page: AtomicI64::new(PAGE),
                    _connection: connection,
                })))
            }
            Ok(Err(error)) => Err(cannot_connect(&endpoint, Some(error))),
            Err(late) => Err(cannot_connect(&endpoint, Some(late.into()))),
        }
    }

    async fn open(
        address: &Address,
        settings: &Settings,
    ) -> Result<(SendRequest<Body>, AbortOnDropHandle<()>), StdError> {
        let stream = TcpStream::connect((&address.host[..], address.port)).await?;
        stream.set_nodelay(true)?;
        if address.tls == Some(false) {
            return Ok(handshake(stream).await?);
        }
        let Some(tls) = &settings.tls else {
            return Err("no certificates are given to know the server by".into());
        };
        let name = ServerName::try_from(address.host.clone())?;
        let stream = TlsConnector::from(Arc::clone(tls)).connect(name, stream).await?;
        Ok(handshake(stream).await?)
    }

    /// Whether it still stands, as far as is known.
    pub(super) fn is_open(&self) -> bool {
        !self.0.requests.is_closed()
    }

    /// Whether both are the same connection.
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(super) fn patience(&self) -> Duration {
        self.0.settings.patience
    }

    pub(super) fn page_size(&self) -> i64 {
        self.0.page.load(Ordering::Relaxed)
    }

    pub(super) fn set_page_size(&self, keys: i64) {
        self.0.page.store(keys, Ordering::Relaxed);
    }

    pub(super) async fn range(&self, ask: RangeRequest) -> Result<RangeResponse, Status> {
        let ask = |line: Self| {
            let ask = ask.clone();
            let mut client = KvClient::new(line).max_decoding_message_size(PAGE_BYTES);
            async move { client.range(ask).await }
        };
        self.as_user(ask).await
    }

    pub(super) async fn txn(&self, ask: TxnRequest) -> Result<TxnResponse, Status> {
        let ask = |line: Self| {
            let ask = ask.clone();
            async move { KvClient::new(line).txn(ask).await }
        };
        self.as_user(ask).await
    }

    /// Asks. If it is the user that is missing or no longer known, it is asked again as that user.
    pub(super) async fn as_user<T, F>(&self, ask: impl Fn(Self) -> F) -> Result<T, Status>
    where
        F: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let answer = match (ask(self.clone()).await, &self.0.settings.user) {
            (Err(status), Some(user)) if is_unknown_user(&status) => {
                self.log_in(user).await?;
                ask(self.clone()).await?
            }
            (answer, _) => answer?,
        };
        Ok(answer.into_inner())
    }

    async fn log_in(&self, user: &User) -> Result<(), Status> {
        self.set_token(None);
        let (name, password) = (user.name.clone(), user.password.clone());
        let ask = AuthenticateRequest { name, password };
        let answer = AuthClient::new(self.clone()).authenticate(ask).await?.into_inner();
        let mut token = HeaderValue::from_maybe_shared(answer.token)
            .map_err(|_| Status::internal("the token it gave cannot be sent"))?;
        token.set_sensitive(true);
        self.set_token(Some(token));
        Ok(())
    }

    fn token(&self) -> Option<HeaderValue> {
        self.0.token.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_token(&self, token: Option<HeaderValue>) {
        *self.0.token.lock().unwrap_or_else(PoisonError::into_inner) = token;
    }

    /// What a call that failed means.
    pub(super) fn lost(&self, status: &Status) -> SourceError {
        let (told, cause) = match (status.source(), status.message()) {
            (Some(cause), _) => ("the connection broke", Some(chain(cause).into())),
            (None, "") => (status.code().description(), None),
            (None, told) => (told, None),
        };
        SourceError::Lost(format!("{}: {told}", self.0.endpoint), cause)
    }

    /// Nothing came in time.
    pub(super) fn silent(&self, what: &str, limit: Duration) -> SourceError {
        self.lost(&Status::deadline_exceeded(format!("{what} was silent for {limit:?}")))
    }
}

/// A call, which must begin to be answered within twice our patience.
impl Service<Request<Body>> for Line {
    type Response = Response<Incoming>;
    type Error = StdError;
    type Future =
        Pin<Box<dyn Future<Output = Result<Response<Incoming>, StdError>> + Send + 'static>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), StdError>> {
        Poll::Ready(Ok(())) // a connection that has ended says so when it is used
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let mut parts = Parts::default();
        parts.scheme = Some(self.0.scheme.clone());
        parts.authority = Some(self.0.authority.clone());
        let path = request.uri().path_and_query().cloned();
        parts.path_and_query = Some(path.unwrap_or(PathAndQuery::from_static("/")));
        let (name, value) = NEEDS_LEADER;
        request.headers_mut().insert(name, value);
        if let Some(token) = self.token() {
            request.headers_mut().insert(TOKEN, token);
        }
        let mut requests = self.0.requests.clone();
        let limit = self.0.settings.patience * 2;
        Box::pin(async move {
            *request.uri_mut() = Uri::from_parts(parts)?;
            match tokio::time::timeout(limit, requests.send_request(request)).await {
                Ok(answer) => Ok(answer?),
                Err(_) => Err(Status::deadline_exceeded(format!("no answer within {limit:?}")))?,
            }
        })
    }
}

async fn handshake<S>(stream: S) -> Result<(SendRequest<Body>, AbortOnDropHandle<()>), hyper::Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (requests, connection) = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .initial_stream_window_size(UNREAD.0)
        .initial_connection_window_size(UNREAD.1)
        .keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .handshake(TokioIo::new(stream))
        .await?;
    // How it ends is told to every call on it.
    let connection = tokio::spawn(async move { drop(connection.await) });
    Ok((requests, AbortOnDropHandle::new(connection)))
}

fn cannot_connect(endpoint: &str, why: Option<StdError>) -> SourceError {
    SourceError::Lost(format!("{endpoint}: cannot connect"), why)
}

/// An error and its causes in one.
fn chain(mut error: &(dyn Error + 'static)) -> io::Error {
    let mut told = error.to_string();
    while let Some(cause) = error.source() {
        told = format!("{told}: {cause}");
        error = cause;
    }
    io::Error::other(told)
}

/// Whether the server would like to know who we are, or no longer does.
fn is_unknown_user(status: &Status) -> bool {
    let told = status.message();
    status.code() == Code::Unauthenticated
        || told.contains("user name is empty")
        || told.contains("revision of auth store is old")
}
