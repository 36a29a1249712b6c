//! A TCP link that can be cut and mended.

use std::net::{Ipv4Addr, SocketAddr};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

/// Passes bytes on to another address, as long as the link is whole. It ends with this value.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    link: watch::Sender<Link>,
    _passing: AbortOnDropHandle<()>,
}

#[derive(Debug, Clone, Copy)]
struct Link {
    whole: bool,
    /// Connections of an earlier one are silent,
    generation: u64,
    /// and those from before this one are gone.
    oldest: u64,
}

impl Proxy {
    /// A link to `target`, on a port of its own. Nobody needs to listen there yet.
    pub async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let address = listener.local_addr().expect("a bound port has an address");
        let (link, state) = watch::channel(Link { whole: true, generation: 0, oldest: 0 });
        let passing = tokio::spawn(accept(listener, target, state));
        Self { address, link, _passing: AbortOnDropHandle::new(passing) }
    }

    /// Where to connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether anybody is connected.
    pub fn is_used(&self) -> bool {
        self.link.receiver_count() > 1 // one is that of who accepts
    }

    /// From now on no byte passes, and nobody is told: connections stay, and new ones are accepted.
    pub fn cut(&self) {
        self.link.send_modify(|link| link.whole = false);
    }

    /// Bytes pass again, those held up first.
    pub fn mend(&self) {
        self.link.send_modify(|link| link.whole = true);
    }

    /// Ends all connections that there are.
    pub fn hang_up(&self) {
        self.link.send_modify(|link| {
            link.generation += 1;
            link.oldest = link.generation;
        });
    }

    /// From now on no byte passes on the connections that there are, and nobody is told; new ones pass.
    pub fn silence(&self) {
        self.link.send_modify(|link| link.generation += 1);
    }
}

async fn accept(listener: TcpListener, target: SocketAddr, link: watch::Receiver<Link>) {
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        connections.spawn(pass(client, target, link.clone()));
        while connections.try_join_next().is_some() {}
    }
}

/// One connection; it ends when either side ends it.
async fn pass(client: TcpStream, target: SocketAddr, mut link: watch::Receiver<Link>) {
    let generation = link.borrow().generation;
    let (there, back) = (link.clone(), link.clone());
    let through = async {
        whole(&mut there.clone(), generation).await;
        let Ok(server) = TcpStream::connect(target).await else { return };
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        tokio::select! {
            () = copy(from_client, to_server, there, generation) => {}
            () = copy(from_server, to_client, back, generation) => {}
        }
    };
    tokio::select! {
        () = through => {}
        _ = link.wait_for(|link| link.oldest > generation) => {}
    }
}

async fn whole(link: &mut watch::Receiver<Link>, generation: u64) {
    // Fails only when the proxy is gone, and with it this task.
    let _ = link.wait_for(|link| link.whole && link.generation == generation).await;
}

async fn copy(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut link: watch::Receiver<Link>,
    generation: u64,
) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(read @ 1..) = from.read(&mut bytes).await {
        whole(&mut link, generation).await;
        if to.write_all(&bytes[..read]).await.is_err() {
            return;
        }
    }
    whole(&mut link, generation).await; // that it ended does not pass either
}
