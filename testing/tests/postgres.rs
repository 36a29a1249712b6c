//! The server that other tests stand on does what it says.

use testing::postgres::Server;
use testing::soon;
use tokio_postgres::{Client, NoTls};

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

async fn count(url: &str) -> i64 {
    connect(url).await.query_one("SELECT count(*) FROM note", &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn what_is_committed_survives_a_kill_and_a_stop_on_the_same_port() {
    let mut server = Server::start().await;
    let (url, other) = (server.database().await, server.database().await);
    assert_ne!(url, other);
    let client = connect(&url).await;
    client.batch_execute("CREATE TABLE note (n int); INSERT INTO note VALUES (1)").await.unwrap();
    server.kill();
    assert!(client.batch_execute("INSERT INTO note VALUES (2)").await.is_err());
    assert!(tokio_postgres::connect(&url, NoTls).await.is_err(), "nobody listens");
    server.start_again().await;
    assert_eq!(count(&url).await, 1);
    server.stop();
    assert!(tokio_postgres::connect(&url, NoTls).await.is_err(), "nobody listens");
    server.start_again().await;
    assert_eq!(count(&url).await, 1);
}

#[tokio::test]
async fn no_process_and_no_file_outlives_it() {
    let server = Server::start().await;
    let client = connect(&server.url()).await;
    let pids = "SELECT pid FROM pg_stat_activity";
    let pids: Vec<i32> =
        client.query(pids, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    let folder = "SELECT current_setting('data_directory')";
    let folder: String = client.query_one(folder, &[]).await.unwrap().get(0);
    let runs = |pid: &i32| {
        let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        command.contains("postgres")
    };
    assert!(pids.len() > 3 && pids.iter().all(runs), "{pids:?}");
    assert!(std::path::Path::new(&folder).exists());
    drop(server);
    assert!(!pids.iter().any(runs), "{pids:?}");
    assert!(!std::path::Path::new(&folder).exists());
    soon("the client notices", async {
        while !client.is_closed() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}
