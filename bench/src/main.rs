//! Benchmarks: ours and the other, side by side in one run. Only the ratios mean something on a machine
//! that others use too.

mod fanout;
mod figures;
mod floor;
mod million;
mod puts;
mod setup;
mod ttl;

use clap::Parser;

/// Measures Vedetta against a floor or a peer in the same run, and prints the ratio.
#[derive(Parser)]
enum Bench {
    /// Durable puts against a plain append-only log with fdatasync.
    Puts(puts::Args),
    /// One stream of writes to many watchers in the same process.
    Fanout(fanout::Args),
    /// How late keys with a TTL go.
    Ttl(ttl::Args),
    /// A million keys: loading, opening, memory, range and count.
    Million(million::Args),
}

fn main() -> anyhow::Result<()> {
    let bench = Bench::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        match bench {
            Bench::Puts(args) => puts::run(args).await,
            Bench::Fanout(args) => fanout::run(args).await,
            Bench::Ttl(args) => ttl::run(args).await,
            Bench::Million(args) => million::run(args).await,
        }
    })
}
