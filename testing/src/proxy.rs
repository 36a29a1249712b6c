//! A TCP link that can be cut and mended.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

/// How much of what comes from the other side waits in the system, about.
const HELD: u32 = 256 << 10;

/// Passes bytes on to another address, as long as the link is whole. It ends with this value.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    link: watch::Sender<Link>,
    /// So many bytes may still pass to clients.
    allowed: Arc<AtomicUsize>,
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
        let allowed = Arc::new(AtomicUsize::new(usize::MAX));
        let passing = tokio::spawn(accept(listener, target, state, Arc::clone(&allowed)));
        Self { address, link, allowed, _passing: AbortOnDropHandle::new(passing) }
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

    /// From now on so many bytes pass to clients and then no more, and nobody is told.
    pub fn allow(&self, bytes: usize) {
        self.allowed.store(bytes, Ordering::Relaxed);
    }

    /// Bytes pass again, those held up first.
    pub fn mend(&self) {
        self.allowed.store(usize::MAX, Ordering::Relaxed);
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

async fn accept(
    listener: TcpListener,
    target: SocketAddr,
    link: watch::Receiver<Link>,
    allowed: Arc<AtomicUsize>,
) {
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        connections.spawn(pass(client, target, link.clone(), Arc::clone(&allowed)));
        while connections.try_join_next().is_some() {}
    }
}

/// One connection; it ends when either side ends it.
async fn pass(
    client: TcpStream,
    target: SocketAddr,
    mut link: watch::Receiver<Link>,
    allowed: Arc<AtomicUsize>,
) {
    let generation = link.borrow().generation;
    let (there, back) = (link.clone(), link.clone());
    let through = async {
        whole(&mut there.clone(), generation).await;
        let Ok(server) = connect(target).await else { return };
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        let all = AtomicUsize::new(usize::MAX);
        tokio::select! {
            () = copy(from_client, to_server, there, generation, &all) => {}
            () = copy(from_server, to_client, back, generation, &allowed) => {}
        }
    };
    tokio::select! {
        () = through => {}
        _ = link.wait_for(|link| link.oldest > generation) => {}
    }
}

/// What a link that is cut holds is little, whatever the system would allow: the other side is to notice.
async fn connect(target: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = if target.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_recv_buffer_size(HELD)?;
    socket.connect(target).await
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
    allowed: &AtomicUsize,
) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(read @ 1..) = from.read(&mut bytes).await {
        let mut rest = &bytes[..read];
        while !rest.is_empty() {
            whole(&mut link, generation).await;
            let less = |allowed: usize| Some(allowed - allowed.min(rest.len()));
            let before = allowed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
            let (now, later) = rest.split_at(rest.len().min(before.unwrap_or_default()));
            if to.write_all(now).await.is_err() {
                return;
            }
            rest = later;
            if !rest.is_empty() && link.changed().await.is_err() {
                return;
            }
        }
    }
    whole(&mut link, generation).await; // that it ended does not pass either
}
