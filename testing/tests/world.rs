//! The world outside is as the tests that use it believe.

use testing::{Proxy, etcd, soon};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Duration, timeout};

/// Long enough for a byte that may pass.
const A_WHILE: Duration = Duration::from_millis(200);

#[tokio::test]
async fn a_cut_link_passes_nothing_until_it_is_mended() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = Proxy::to(listener.local_addr().unwrap()).await;
    assert!(!proxy.is_used());
    let mut client = TcpStream::connect(proxy.address()).await.unwrap();
    let (mut server, _) = soon("the link is there", listener.accept()).await.unwrap();
    assert!(proxy.is_used());
    let mut byte = [0];

    client.write_all(b"1").await.unwrap();
    soon("a byte passes", server.read_exact(&mut byte)).await.unwrap();
    proxy.cut();
    client.write_all(b"2").await.unwrap();
    timeout(A_WHILE, server.read_exact(&mut byte)).await.expect_err("a byte passed a cut link");
    proxy.mend();
    soon("the byte held up passes", server.read_exact(&mut byte)).await.unwrap();
    assert_eq!(&byte, b"2");
    server.write_all(b"3").await.unwrap();
    soon("a byte passes back", client.read_exact(&mut byte)).await.unwrap();

    proxy.hang_up();
    assert!(matches!(soon("both are told", client.read(&mut byte)).await, Ok(0) | Err(_)));
    assert!(matches!(soon("both are told", server.read(&mut byte)).await, Ok(0) | Err(_)));
    soon("nobody is connected", async {
        while proxy.is_used() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_cluster_has_a_leader_and_another_when_that_one_is_frozen_or_killed() {
    let mut cluster = etcd::Cluster::start(3).await;
    let first = cluster.leader().await;
    cluster.node(first).ctl(&["put", "k", "1"]).await.unwrap();

    cluster.node_mut(first).freeze();
    let second = cluster.leader().await;
    assert_ne!(second, first);
    cluster.node(second).ctl(&["put", "k", "2"]).await.unwrap();
    cluster.node_mut(first).thaw();
    assert!(cluster.node_mut(first).healthy().await);

    cluster.node_mut(second).kill();
    let third = cluster.leader().await;
    assert_ne!(third, second);
    cluster.node_mut(second).restart().await;
    let told = cluster.node(second).ctl(&["get", "k", "--print-value-only"]).await.unwrap();
    assert_eq!(told.trim(), "2");
}
