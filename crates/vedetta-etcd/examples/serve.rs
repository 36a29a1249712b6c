//! Serves a data folder as etcd until Ctrl-C:
//! `cargo run -p vedetta-etcd --example serve -- FOLDER [PORT [CERT KEY [CLIENT_CA]]]`

use std::error::Error;
use std::net::Ipv4Addr;
use std::path::PathBuf;

use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use vedetta_db::{DataFolder, Db};
use vedetta_etcd::{Endpoint, TlsFiles, serve};
use vedetta_kv::{Options, SCHEMA, Store};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().map(PathBuf::from).ok_or("which folder?")?;
    let port = arguments.next().map_or(Ok(2379), |port| port.parse())?;
    let folder = DataFolder::open(&folder)?;
    let db = Db::open(&vedetta_db::Options::new(folder.database()), &[SCHEMA])?;
    let store = Store::open(db, Options::default()).await?;
    let mut endpoint = Endpoint::new(store.clone());
    let mut file = || arguments.next().map(PathBuf::from);
    if let (Some(cert), Some(key), client_ca) = (file(), file(), file()) {
        endpoint = endpoint.tls(&TlsFiles { cert, key, client_ca })?;
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
    println!("{}", listener.local_addr()?);
    let stop = CancellationToken::new();
    let serving = tokio::spawn(serve(listener, endpoint, stop.clone()));
    tokio::signal::ctrl_c().await?;
    stop.cancel();
    serving.await?;
    store.close().await;
    Ok(())
}
