use std::fs::File;
use std::io::{BufRead, BufReader, Read as _, Write};

use anyhow::Context as _;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use vedetta::jobs::wire::{self, Added};
use vedetta::jobs::{Asked, Kinds};

use super::wrong_use;
use crate::client::{Client, ClientError};
use crate::output::{self, Format};

/// Ask for many jobs, one on each line of a file as JSON: {"kind": "resize", "payload": {"id": 7}}
///
/// They go in batches, each of them whole or not at all. If a line is wrong, or the server goes away, it says
/// how many lines are in, to go on from there with `--skip`. Of a queue that is a stream of NATS, the last batch may
/// be in as a whole or in part all the same.
#[derive(Debug, Args)]
pub(crate) struct Import {
    /// The file; `-` is stdin
    file: String,
    /// Leave out the first so many lines
    #[arg(long, value_name = "N", default_value_t = 0)]
    skip: u64,
}

/// Jobs of a batch, and bytes. A line has more at most by one job, and still fits.
const BATCH: usize = 500;
const BYTES: usize = wire::LARGEST_BODY / 2;
const LINE: usize = BYTES / 2;

#[derive(Default, Serialize)]
struct Imported {
    /// Lines that are in, those that were left out included.
    lines: u64,
    jobs: u64,
    /// Of those, how many were new.
    new: u64,
}

/// Lines on their way.
#[derive(Default)]
struct Batch {
    jobs: Vec<Asked>,
    /// The line of each.
    lines: Vec<u64>,
    bytes: usize,
}

impl Import {
    pub(crate) fn run(
        self,
        client: &Client,
        format: Format,
        out: &mut impl Write,
    ) -> anyhow::Result<()> {
        let (input, bar): (Box<dyn BufRead>, _) = if self.file == "-" {
            let bar = ProgressBar::new_spinner();
            (Box::new(std::io::stdin().lock()), bar)
        } else {
            let file = File::open(&self.file)
                .with_context(|| format!("cannot open {}", output::one_line(&self.file)))?;
            let bar = ProgressBar::new(file.metadata().map_or(0, |about| about.len()));
            bar.set_style(ProgressStyle::with_template("{bar:30} {percent:>3}% {msg}")?);
            (Box::new(BufReader::new(file)), bar)
        };
        let mut done = Imported { lines: self.skip, ..Imported::default() };
        let ended = import(client, input, self.skip, &bar, &mut done);
        bar.finish_and_clear();
        match (format, &ended) {
            (Format::Json, _) => output::json(out, &done)?,
            (Format::Table, Ok(())) => {
                writeln!(out, "imported {} jobs, {} of them new", done.jobs, done.new)?;
            }
            (Format::Table, Err(_)) => {}
        }
        ended.with_context(|| {
            let Imported { lines, jobs, .. } = done;
            if lines == 0 {
                return "nothing was imported".to_owned();
            }
            format!("imported {jobs} jobs, up to line {lines}; go on with --skip {lines}")
        })
    }
}

fn import(
    client: &Client,
    mut input: impl BufRead,
    skip: u64,
    bar: &ProgressBar,
    done: &mut Imported,
) -> anyhow::Result<()> {
    let (mut batch, mut number) = (Batch::default(), 0);
    loop {
        let mut line = Vec::new();
        let read = input.by_ref().take(LINE as u64).read_until(b'\n', &mut line);
        let read = read.with_context(|| format!("cannot read line {}", number + 1))?;
        if read == 0 {
            break;
        }
        number += 1;
        bar.inc(read as u64);
        let wrong = |why: &dyn std::fmt::Display| wrong_use(format!("line {number}: {why}"));
        if read == LINE && !line.ends_with(b"\n") {
            return Err(wrong(&"it is too long").into());
        }
        if number <= skip {
            continue;
        }
        if !line.trim_ascii().is_empty() {
            let asked: Asked =
                serde_json::from_slice(&line).map_err(|error| wrong(&within(&error)))?;
            // What the server does not know better.
            Kinds::default().complete(asked.clone()).map_err(|error| wrong(&error))?;
            batch.jobs.push(asked);
            batch.lines.push(number);
            batch.bytes += read;
        }
        if batch.jobs.len() == BATCH || batch.bytes >= BYTES {
            send(client, &mut batch, bar, done)?;
            done.lines = number;
        }
    }
    send(client, &mut batch, bar, done)?;
    done.lines = number.max(skip);
    Ok(())
}

/// What is wrong with a line, and where; the line of the file is told by others.
fn within(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rsplit_once(" at line ") {
        Some((why, _)) => format!("{why}, at column {}", error.column()),
        None => text,
    }
}

fn send(
    client: &Client,
    batch: &mut Batch,
    bar: &ProgressBar,
    done: &mut Imported,
) -> anyhow::Result<()> {
    let Batch { jobs, lines, .. } = std::mem::take(batch);
    let (Some(first), Some(last)) = (lines.first(), lines.last()) else { return Ok(()) };
    let sent = client.post::<Vec<Added>>("/api/v1/jobs", &jobs);
    let added = sent.map_err(|error| match error {
        ClientError::Refused { status, message } => {
            // Of several, it says which.
            let message = match wire::numbered(&message) {
                Some((number, why)) => {
                    let line = lines.get(number.saturating_sub(1)).unwrap_or(last);
                    format!("line {line}: {why}")
                }
                None => format!("lines {first} to {last}: {message}"),
            };
            anyhow::Error::from(ClientError::Refused { status, message })
        }
        gone => {
            anyhow::Error::from(gone).context(format!("lines {first} to {last} may be in, or not"))
        }
    })?;
    done.jobs += added.len() as u64;
    done.new += added.iter().map(|added| u64::from(added.new)).sum::<u64>();
    bar.set_message(format!("{} jobs", done.jobs));
    Ok(())
}
