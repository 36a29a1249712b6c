//! Accepting connections, and letting them go.

use std::sync::Arc;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use vedetta_net::{Patient, accept};

use crate::api::{Api, Context, Limits, router};

/// Serves until `stop`; then accepts nothing new, ends watches, finishes the requests that run, and
/// returns. A client that does not take its answer holds this up for a second. Dropped, it lets go of all connections at once.
pub async fn serve(listener: TcpListener, api: Api, stop: CancellationToken) {
    let Ok(address) = listener.local_addr() else { return };
    let limits = Arc::new(api.limits);
    let context = Context {
        store: api.store,
        watchers: Arc::new(api.watchers),
        stages: api.stages,
        jobs: api.jobs,
        fleet: api.fleet,
        kinds: Arc::new(api.kinds),
        ending: api.ending,
        limits: Arc::clone(&limits),
        stop: stop.clone(),
        listening: address.ip(),
    };
    let router = router(context);
    let talk = |stream| converse(stream, router.clone(), Arc::clone(&limits), stop.clone());
    accept(listener, limits.connections, stop.clone(), talk).await;
}

/// One connection, request after request.
async fn converse(stream: TcpStream, router: Router, limits: Arc<Limits>, stop: CancellationToken) {
    let patient = Patient::new(stream, limits.stall, stop.clone());
    // The head's time also runs while the connection is silent, so a client that says nothing is let go.
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .serve_connection(TokioIo::new(patient), TowerToHyperService::new(router));
    let mut connection = std::pin::pin!(connection);
    // How a connection ends is the client's business.
    tokio::select! {
        _ = connection.as_mut() => {}
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        }
    }
}
