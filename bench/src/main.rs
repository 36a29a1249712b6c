//! Benchmarks: ours and the other, side by side in one run. Only the ratios mean something on a machine
//! that others use too.

mod fanout;
mod figures;
mod floor;
mod million;
mod puts;
mod setup;
mod ttl;

use std::process::ExitCode;

use clap::Parser;

/// Measures Vedetta against a floor measured in the same run, and prints the ratio.
#[derive(Parser)]
enum Bench {
    /// Durable puts against a plain append-only log with fdatasync.
    #[command(after_help = puts::COLUMNS)]
    Puts(puts::Args),
    /// One stream of writes to many watchers in the same process.
    #[command(after_help = fanout::COLUMNS)]
    Fanout(fanout::Args),
    /// How late keys with a TTL go, and what leases cost while nothing happens.
    #[command(after_help = ttl::FIGURES)]
    Ttl(ttl::Args),
    /// A million keys: loading, opening, memory, range and count.
    #[command(after_help = million::FIGURES)]
    Million(million::Args),
}

fn main() -> ExitCode {
    match run(Bench::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(bench: Bench) -> anyhow::Result<()> {
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
