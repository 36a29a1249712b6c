//! Orders carried through payment, invoicing and packing, and shipping, with retries and a timer: on the embedded file by
//! default, on PostgreSQL by a URL.
//!
//! ```text
//! cargo run --release -p orders                                        place 20 orders and deliver them
//! cargo run --release -p orders -- work --place 500                    until Ctrl-C, with time to look at it
//! cargo run --release -p orders -- --database postgres://… place 1000  on PostgreSQL, beside those who work
//! cargo run --release -p orders -- --database postgres://… work        as often as you like, each at its own --http
//! … --shards 32 work --cluster etcd://…                                 each with a share of the orders
//! ```

mod journal;
mod order;
mod postgres;
mod sqlite;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use vedetta::dashboard::{self, Api};
use vedetta::db::postgres::Postgres;
use vedetta::db::{DataFolder, Db, Options};
use vedetta::etcd::Cluster;
use vedetta::kv::{self, Store};
use vedetta::stage::{self, Backend, Entities, Processing, Processor, Records, SYSTEM, Shards};

use journal::Journal;
use order::{Invoicing, Order, Packing, Payment, Shipping, State};

/// How long what runs may take when it is to end.
const GRACE: Duration = Duration::from_secs(10);

/// Carries orders through payment, invoicing and packing, and shipping.
#[derive(Debug, Parser)]
struct Args {
    /// The folder for everything that is kept, if not on PostgreSQL; one process at a time has it
    #[arg(long, global = true, default_value = "orders-data")]
    data: PathBuf,
    /// Where the orders are, if not in that folder: the URL of a PostgreSQL
    #[arg(long, global = true, env = "ORDERS_DATABASE")]
    database: Option<String>,
    /// Where to serve the page and the API for `vedetta stage`; port 0 takes a free one
    #[arg(long, global = true, default_value = "127.0.0.1:7171")]
    http: SocketAddr,
    /// How long a parcel travels, in milliseconds
    #[arg(long, global = true, default_value_t = 1000)]
    travels: u64,
    /// Who works on an order and is not heard of for so long, in milliseconds, loses it to others, and its shards
    #[arg(long, global = true, default_value_t = 30_000)]
    lease: u64,
    /// Two stages that want an order begin after random delays, up to so many milliseconds, and one alone up to a
    /// twentieth of that; without, they are handed it at once
    #[arg(long, global = true, default_value_t = 10)]
    spread: u64,
    /// Divide the orders into so many shards: the same in every process
    #[arg(long, global = true, default_value_t = 1)]
    shards: u16,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Place orders
    Place {
        /// How many
        count: usize,
    },
    /// Work on orders until Ctrl-C or SIGTERM
    Work {
        /// Place so many orders first
        #[arg(long, default_value_t = 0)]
        place: usize,
        /// Share the shards with all others that say so, through this store: an etcd or a `vedetta up`
        #[arg(long, value_name = "URL")]
        cluster: Option<String>,
        /// Note what the stages do in this file
        #[arg(long, hide = true)]
        journal: Option<PathBuf>,
    },
    /// Tell how many orders are in each state
    Show,
}

/// How the stages work.
struct Pace {
    travels: Duration,
    lease: Duration,
    spread: Duration,
    journal: Journal,
    /// The share of this process; all of it if there is none.
    shards: Option<Shards>,
}

/// One of the two databases, with the orders in it.
enum Shop {
    Sqlite(Db, Entities<Order, stage::sqlite::Records, sqlite::Orders>),
    Postgres(Postgres, Entities<Order, stage::postgres::Records, postgres::Orders>),
}

impl Shop {
    async fn place(&self, count: usize) -> anyhow::Result<()> {
        // One in twenty costs more than any card has.
        let cents = (1..=count).map(|n| if n % 20 == 0 { 200_000 } else { 4_200 }).collect();
        match self {
            Self::Sqlite(db, orders) => sqlite::place(db, orders.clone(), cents).await,
            Self::Postgres(db, orders) => postgres::place(db, orders, cents).await,
        }
    }

    async fn count(&self) -> anyhow::Result<Vec<(String, i64)>> {
        match self {
            Self::Sqlite(db, _) => sqlite::count(db).await,
            Self::Postgres(db, _) => postgres::count(db).await,
        }
    }

    async fn show(&self) -> anyhow::Result<()> {
        let counts = self.count().await?;
        let of = |name: &str| counts.iter().find(|(state, _)| state == name).map_or(0, |(_, n)| *n);
        let line: Vec<String> =
            State::ALL.iter().map(|(_, name)| format!("{} {name}", of(name))).collect();
        println!("{}", line.join(", "));
        Ok(())
    }

    async fn work(&self, pace: &Pace) -> anyhow::Result<Processing> {
        async fn start(orders: impl Backend<Order>, pace: &Pace) -> anyhow::Result<Processing> {
            let Pace { travels, lease, spread, journal, shards } = pace;
            let mut processor =
                Processor::new(journal.of_records(orders)).lease(*lease).spread(*spread);
            if let Some(shards) = shards {
                processor = processor.shards(shards);
            }
            let processor = processor.stage(journal.of(Payment)).stage(journal.of(Invoicing));
            let shipping = Shipping { travels: *travels };
            let processor = processor.stage(journal.of(Packing)).stage(journal.of(shipping));
            Ok(processor.start().await?)
        }
        match self {
            Self::Sqlite(_, orders) => start(orders.clone(), pace).await,
            Self::Postgres(_, orders) => start(orders.clone(), pace).await,
        }
    }

    /// Whether nothing is left to do but what was set aside.
    async fn is_at_rest(&self) -> anyhow::Result<bool> {
        let lanes = match self {
            Self::Sqlite(_, orders) => orders.records().counts().await?,
            Self::Postgres(_, orders) => orders.records().counts().await?,
        };
        Ok(lanes.iter().all(|lane| lane.records == lane.parked))
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let args = Args::parse();
    // The page also shows a store. A shop on PostgreSQL has nothing of its own to keep in it.
    let (_temporary, data) = match &args.database {
        None => (None, args.data.clone()),
        Some(_) => {
            let folder = tempfile::tempdir()?;
            let path = folder.path().to_owned();
            (Some(folder), path)
        }
    };
    let folder = DataFolder::open(&data)?;
    let schemas = [kv::SCHEMA, stage::sqlite::SCHEMA, sqlite::SCHEMA];
    let db = Db::open(&Options::new(folder.database()), &schemas)?;
    let store = Store::open(db.clone(), kv::Options::default()).await?;
    let api = Api::new(store.clone());
    let (shop, api) = match &args.database {
        None => {
            let records = stage::sqlite::Records::open(db.clone()).await?;
            let orders = Entities::new(records.clone(), "order", sqlite::Orders).await?;
            (Shop::Sqlite(db, orders.sharded(args.shards)), api.stages(records))
        }
        Some(url) => {
            let schemas = [stage::postgres::SCHEMA, postgres::SCHEMA];
            let postgres = Postgres::open(url, &schemas).await?;
            let records = stage::postgres::Records::new(postgres.clone());
            let orders = Entities::new(records.clone(), "order", postgres::Orders).await?;
            (Shop::Postgres(postgres, orders.sharded(args.shards)), api.stages(records))
        }
    };
    match args.command {
        Some(Command::Place { count }) => {
            shop.place(count).await?;
            println!("placed {count} orders");
        }
        Some(Command::Show) => shop.show().await?,
        command => {
            let (count, cluster, journal, stays) = match command {
                Some(Command::Work { place, cluster, journal }) => (place, cluster, journal, true),
                _ => (20, None, None, false),
            };
            let lease = Duration::from_millis(args.lease);
            let join = |url: String| join(&url, args.shards, lease);
            let pace = Pace {
                travels: Duration::from_millis(args.travels),
                lease,
                spread: Duration::from_millis(args.spread),
                journal: Journal::open(journal.as_deref()).context("cannot open the journal")?,
                shards: cluster.map(join).transpose()?,
            };
            shop.place(count).await?;
            work(&shop, api, args.http, pace, stays).await?;
        }
    }
    store.close().await;
    Ok(())
}

/// Joins those that share the shards through a store.
fn join(url: &str, shards: u16, lease: Duration) -> anyhow::Result<Shards> {
    let cluster: Cluster = url.parse().with_context(|| format!("cannot use {url}"))?;
    let name = format!("{}-{:08x}", std::process::id(), fastrand::u32(..));
    Ok(Shards::join(cluster.patience(lease / 6), "/orders/", name, shards, lease)?)
}

/// Works until Ctrl-C or, unless it is to stay, until all orders are where they can go.
async fn work(
    shop: &Shop,
    api: Api,
    http: SocketAddr,
    pace: Pace,
    stays: bool,
) -> anyhow::Result<()> {
    let listener =
        TcpListener::bind(http).await.with_context(|| format!("cannot listen on {http}"))?;
    println!("page  http://{}/", listener.local_addr()?);
    let ending = CancellationToken::new();
    let serving = tokio::spawn(dashboard::serve(listener, api, ending.clone()));
    let processing = shop.work(&pace).await?;
    println!("ready");
    let done = async {
        loop {
            tokio::time::sleep(Duration::from_millis(500)).await;
            // A database that is away comes back, and the work goes on by itself.
            match shop.show().await.and(shop.is_at_rest().await) {
                Ok(is_at_rest) if is_at_rest && !stays => return,
                Ok(_) => {}
                Err(error) => eprintln!("cannot look: {error:#}"),
            }
        }
    };
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        () = done => {}
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
    for stage in processing.status().into_iter().filter(|stage| stage.stage != SYSTEM) {
        let flow = stage.pull.flow;
        println!(
            "{}: {} done, {} failed, {} set aside",
            stage.stage, flow.done, flow.failed, flow.parked
        );
    }
    processing.stop(GRACE).await;
    if let Some(shards) = pace.shards {
        shards.leave().await;
    }
    ending.cancel();
    serving.await?;
    Ok(())
}
