//! Accepting connections, and letting them go.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// How long to wait when the system has no room for another connection.
const OUT_OF_ROOM: Duration = Duration::from_millis(100);

/// Has `converse` talk on every connection, on `most` at once; further ones wait to be accepted. At `stop`
/// it accepts nothing new, and returns when all conversations have ended: that they do is up to them.
/// Dropped, it lets go of all connections at once.
pub async fn accept<F>(
    listener: TcpListener,
    most: usize,
    stop: CancellationToken,
    converse: impl Fn(TcpStream) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(most));
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
                    let _ = stream.set_nodelay(true);
                    let talk = converse(stream);
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
