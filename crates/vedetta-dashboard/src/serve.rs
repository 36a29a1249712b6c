//! Accepting connections, and letting them go.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::api::{Api, Context, Limits, router};
use crate::patience::Patient;

/// How long to wait when the system has no room for another connection.
const OUT_OF_ROOM: Duration = Duration::from_millis(100);

/// Serves until `stop`; then accepts nothing new, ends watches, finishes the requests that run, and
/// returns. A client that does not take its answer holds this up for a second. Dropped, it lets go of all connections at once.
pub async fn serve(listener: TcpListener, api: Api, stop: CancellationToken) {
    let Ok(address) = listener.local_addr() else { return };
    let limits = Arc::new(api.limits);
    let places = Arc::new(Semaphore::new(limits.connections));
    let context = Context {
        store: api.store,
        limits: Arc::clone(&limits),
        stop: stop.clone(),
        listening: address.ip(),
    };
    let router = router(context);
    let mut connections = JoinSet::new();
    loop {
        let next = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (listener.accept().await, place)
        };
        tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = connections.join_next() => {}
            (accepted, place) = next => match accepted {
                Ok((stream, _)) => {
                    let talk = converse(stream, router.clone(), Arc::clone(&limits), stop.clone());
                    connections.spawn(async move {
                        talk.await;
                        drop(place);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "could not accept a connection");
                    tokio::time::sleep(OUT_OF_ROOM).await;
                }
            }
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// One connection, request after request.
async fn converse(stream: TcpStream, router: Router, limits: Arc<Limits>, stop: CancellationToken) {
    let _ = stream.set_nodelay(true);
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
