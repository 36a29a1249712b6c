//! What the program does when it is told nothing, and what it tells.

use std::path::Path;
use std::process::Stdio;

use testing::postgres::Server;
use tokio::process::Command;

/// One in twenty cannot be paid.
const IN_THE_END: &str = "1 placed, 0 paid, 0 packed, 0 shipped, 19 delivered";

/// What it prints until it ends by itself.
async fn orders(data: &Path, database: Option<&str>, command: &[&str]) -> String {
    let mut orders = Command::new(env!("CARGO_BIN_EXE_orders"));
    orders.args(["--http", "127.0.0.1:0", "--travels", "100", "--data"]).arg(data);
    orders.args(database.into_iter().flat_map(|url| ["--database", url])).args(command);
    orders.stdin(Stdio::null()).kill_on_drop(true);
    let output = testing::soon("it ends by itself", orders.output()).await.unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

async fn deliver(database: Option<&str>) {
    let data = tempfile::tempdir().unwrap();
    let told = orders(data.path(), database, &[]).await;
    assert!(told.lines().any(|line| line == IN_THE_END), "{told}");
    let is_paid =
        |line: &str| line.starts_with("payment: 19 done") && line.ends_with("1 set aside");
    assert!(told.lines().any(is_paid), "{told}");
    assert_eq!(orders(data.path(), database, &["show"]).await, format!("{IN_THE_END}\n"));
}

#[tokio::test]
async fn told_nothing_it_delivers_twenty_orders_on_the_embedded_file_and_ends() {
    deliver(None).await;
}

#[tokio::test]
async fn told_nothing_but_a_database_it_delivers_twenty_orders_there_and_ends() {
    let server = Server::start().await;
    deliver(Some(&server.database().await)).await;
}
