//! Measurements by turns, each in a process and a database of its own, so that none has what another left.

use std::process::{Command, Stdio};

use testing::postgres::Server;
use vedetta_db::postgres::Postgres;

use crate::figures::median;

/// Of each round, of each measurement, its figures.
pub(crate) type Rounds = Vec<Vec<Vec<f64>>>;

/// Runs a measurement; what it prints is a figure a line.
pub(crate) fn figures(command: &mut Command) -> anyhow::Result<Vec<f64>> {
    let output = command.stderr(Stdio::inherit()).output()?;
    anyhow::ensure!(output.status.success(), "a measurement failed: {}", output.status);
    let figures = str::from_utf8(&output.stdout)?.lines().map(str::parse);
    Ok(figures.collect::<Result<_, _>>()?)
}

/// Measures in a database of its own, and cleans up after it: that must not be done during the next.
pub(crate) async fn in_a_fresh_database<T>(
    server: &Server,
    measure: impl FnOnce(&str) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let url = server.database().await;
    let measured = measure(&url)?;
    let client = Postgres::open(&server.url(), &[]).await?.client().await?;
    let name = url.rsplit('/').next().expect("a URL ends with the name");
    client.batch_execute(&format!("DROP DATABASE {name} WITH (FORCE)")).await?;
    client.batch_execute("CHECKPOINT").await?;
    flush()?;
    Ok(measured)
}

/// Has all that was written be on the disk.
pub(crate) fn flush() -> anyhow::Result<()> {
    anyhow::ensure!(Command::new("sync").status()?.success(), "sync failed");
    Ok(())
}

/// A figure: the median of the rounds.
pub(crate) fn of(rounds: &Rounds, row: usize, column: usize) -> f64 {
    of_each(rounds, |round| round[row][column])
}

/// How many times another's figure one is: the median of the ratios of the rounds.
pub(crate) fn ratio(rounds: &Rounds, one: (usize, usize), other: (usize, usize)) -> f64 {
    of_each(rounds, |round| round[one.0][one.1] / round[other.0][other.1])
}

/// The median of what each round comes to.
pub(crate) fn of_each(rounds: &Rounds, figure: impl Fn(&[Vec<f64>]) -> f64) -> f64 {
    median(&mut rounds.iter().map(|round| figure(round)).collect::<Vec<_>>())
}
