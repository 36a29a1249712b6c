//! Accepting connections, and letting them go.

use std::net::Ipv4Addr;
use std::sync::Arc;

use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use vedetta_net::{Patient, accept, tls};

use crate::access::{Door, ENTRIES, Ends};
use crate::api::{Api, Context, Limits, router};
use crate::audit;
use crate::hub;
use crate::live::Live;
use crate::metrics;

/// Serves until `stop`; then accepts nothing new, ends watches, finishes the requests that run, and
/// returns. A client that does not take its answer holds this up for a second. Dropped, it lets go of all connections at once.
pub async fn serve(listener: TcpListener, api: Api, stop: CancellationToken) {
    let Ok(address) = listener.local_addr() else { return };
    let (audit, entries) = mpsc::channel(ENTRIES);
    let is_tls = api.tls.is_some();
    let door = Door::new(api.access.clone(), api.signs_in, api.hosts, address, is_tls, audit);
    let door = match door {
        Ok(door) => Arc::new(door),
        Err(error) => {
            tracing::error!(%error, "cannot serve");
            return;
        }
    };
    let limits = Arc::new(api.limits);
    let context = Context {
        store: api.store,
        watchers: Arc::new(api.watchers),
        board: api.board,
        stages: api.stages,
        jobs: api.jobs.clone().map(|jobs| jobs as _),
        live: Arc::new(Live { observed: api.jobs, fleet: api.fleet.clone(), ..Live::default() }),
        fleet: api.fleet,
        kinds: Arc::new(api.kinds),
        queues: Arc::new(api.queues),
        ending: api.ending,
        limits: Arc::clone(&limits),
        stop: stop.clone(),
        door,
    };
    // Ends with this, also when it is dropped.
    let mut watching = JoinSet::new();
    watching.spawn(hub::run(context.clone(), stop.clone()));
    let numbers = api.numbers.map(|(every, sink)| metrics::tell(context.clone(), every, sink));
    let server = Arc::new(Server {
        router: TowerToHyperService::new(router(context)),
        tls: api.tls.map(|tls| tls.speaking(&[tls::HTTP1]).into()),
        limits: Arc::clone(&limits),
        stop: stop.clone(),
    });
    let ended = CancellationToken::new();
    let talk = |stream| Arc::clone(&server).converse(stream);
    let serving = async {
        accept(listener, limits.connections, stop.clone(), talk).await;
        ended.cancel();
    };
    let numbers = async {
        if let Some(numbers) = numbers {
            numbers.await;
        }
    };
    tokio::join!(serving, audit::write(api.access, entries, ended.clone()), numbers);
}

/// What every connection needs.
struct Server {
    router: TowerToHyperService<Router>,
    tls: Option<TlsAcceptor>,
    limits: Arc<Limits>,
    stop: CancellationToken,
}

impl Server {
    /// One connection. How it ends is the client's business.
    async fn converse(self: Arc<Self>, stream: TcpStream) {
        let Ok(peer) = stream.peer_addr() else { return };
        let local = stream.local_addr().map_or(Ipv4Addr::LOCALHOST.into(), |local| local.ip());
        let ends = Ends { peer, local };
        let patient = Patient::new(stream, self.limits.stall, self.stop.clone());
        let Some(tls) = &self.tls else { return self.talk(patient, ends).await };
        let handshake = tokio::time::timeout(self.limits.handshake, tls.accept(patient));
        let begun = tokio::select! {
            begun = handshake => begun,
            () = self.stop.cancelled() => return,
        };
        if let Ok(Ok(stream)) = begun {
            self.talk(stream, ends).await;
        }
    }

    /// Request after request.
    async fn talk(&self, stream: impl AsyncRead + AsyncWrite + Unpin, ends: Ends) {
        let router = Answers { router: self.router.clone(), ends };
        // The head's time also runs while the connection is silent, so a client that says nothing is let go.
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.head)
            .serve_connection(TokioIo::new(stream), router);
        let mut connection = std::pin::pin!(connection);
        tokio::select! {
            _ = connection.as_mut() => {}
            () = self.stop.cancelled() => {
                connection.as_mut().graceful_shutdown();
                let _ = connection.await;
            }
        }
    }
}

/// The routes, told who is at the other end.
struct Answers {
    router: TowerToHyperService<Router>,
    ends: Ends,
}

impl Service<Request<Incoming>> for Answers {
    type Response = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Response;
    type Error = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Error;
    type Future = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Future;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(self.ends);
        self.router.call(request)
    }
}
