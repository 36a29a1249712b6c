//! See the library.
//!
//! ```text
//! cargo run --release -p live-rooms -- demo       all of it, with a tone to listen to, until Ctrl-C
//!
//! … -- rooms --store etcd://127.0.0.1:2379
//! … -- mixer --store etcd://127.0.0.1:2379 --id m1 --media /srv/media --ready
//! … -- janus --store etcd://127.0.0.1:2379 --id j1 --ready      with JANUS_ADMIN_SECRET, JANUS_ADMIN_KEY
//! ```

use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::time::Duration;

use clap::Parser;
use live_rooms::place::Rules;
use live_rooms::{demo, janus, mixer, rooms};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;
use vedetta::etcd::Cluster;

/// Live audio rooms on Janus and FFmpeg.
#[derive(Debug, Parser)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Args)]
struct Store {
    /// Where the state is: an etcd cluster, or a Vedetta
    #[arg(long, value_name = "URL", default_value = "etcd://127.0.0.1:2379")]
    store: Cluster,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Keep the rooms: their HTTP API, and who runs which
    Rooms {
        #[command(flatten)]
        store: Store,
        /// Where the HTTP API is, on this machine only; port 0 is any that is free
        #[arg(long, default_value = "127.0.0.1:7080")]
        listen: SocketAddr,
        #[command(flatten)]
        times: Times,
    },
    /// Stream rooms
    Mixer {
        #[command(flatten)]
        store: Store,
        #[command(flatten)]
        mixer: mixer::Args,
    },
    /// Keep the rooms of a Janus
    Janus {
        #[command(flatten)]
        store: Store,
        #[command(flatten)]
        janus: janus::Args,
    },
    /// Start all of it, with a tone to listen to, until Ctrl-C
    Demo(demo::Args),
}

#[derive(Debug, clap::Args)]
struct Times {
    /// Remove rooms that were not started within so many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = Rules::default().start_within.as_secs())]
    start_within: u64,
    /// Remove rooms that are older than so many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = Rules::default().max_age.as_secs())]
    max_age: u64,
    /// Wait so many seconds for modules to let go of a room that is removed
    #[arg(long, value_name = "SECONDS", default_value_t = Rules::default().remove_within.as_secs())]
    remove_within: u64,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let filter =
        EnvFilter::try_from_env("LIVE_ROOMS_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let args = Args::parse();
    let filter = match args.command {
        // It tells what happens by itself.
        Command::Demo(_) if std::env::var_os("LIVE_ROOMS_LOG").is_none() => EnvFilter::new("warn"),
        _ => filter,
    };
    let is_terminal = std::io::stderr().is_terminal();
    let logs = tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(is_terminal);
    logs.with_env_filter(filter).init();
    let (stop, now) = (CancellationToken::new(), CancellationToken::new());
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let (first, second) = (stop.clone(), now.clone());
    tokio::spawn(async move {
        for token in [first, second] {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            token.cancel();
        }
    });
    let run = async {
        match args.command {
            Command::Rooms { store, listen, times } => {
                let rules = Rules {
                    start_within: Duration::from_secs(times.start_within),
                    max_age: Duration::from_secs(times.max_age),
                    remove_within: Duration::from_secs(times.remove_within),
                };
                rooms::run(store.store, listen, rules, stop).await
            }
            Command::Mixer { store, mixer } => mixer::run(store.store, mixer, stop).await,
            Command::Janus { store, janus } => janus::run(store.store, janus, stop).await,
            Command::Demo(args) => demo::run(args, stop).await,
        }
    };
    tokio::select! {
        done = run => done,
        // What still runs is dropped, which ends it.
        () = now.cancelled() => anyhow::bail!("ended by a second signal"),
    }
}
