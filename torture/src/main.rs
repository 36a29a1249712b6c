//! The tortures that are commands of their own. The others are tests, see `docs/torture.md`.

use std::process::ExitCode;

use clap::Parser;
use torture::{fleet, jobs};

/// Breaks things on purpose and looks for what should not have been lost.
#[derive(Debug, Parser)]
enum Torture {
    Fleet(fleet::Command),
    Jobs(jobs::Command),
    #[command(hide = true)]
    JobsWorker(jobs::WorkerProcess),
    #[command(hide = true)]
    JobsServer(jobs::ServerProcess),
}

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let well = match Torture::parse() {
        Torture::Fleet(command) => command.run().await?,
        Torture::Jobs(command) => command.run().await?,
        Torture::JobsWorker(worker) => worker.run().await.map(|()| true)?,
        Torture::JobsServer(server) => server.run().await.map(|()| true)?,
    };
    Ok(if well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
