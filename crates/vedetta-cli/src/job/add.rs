use std::io::{Read as _, Write};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use vedetta::fleet::roster::Status;
use vedetta::fleet::wire::{WorkerInfo, Workers};
use vedetta::jobs::wire::Added;
use vedetta::jobs::{Asked, Json, When};

use super::{wait, wrong_use};
use crate::client::Client;
use crate::output::{self, Format};

/// Ask for a job; prints which it is once it is on the server's disk
///
/// What is not said is as the handler of its kind says.
#[derive(Debug, Args)]
pub(crate) struct Add {
    /// What is to be done: the name of a handler
    kind: String,
    /// Where it waits
    #[arg(long)]
    queue: Option<String>,
    /// What the handler is given, as JSON; `@FILE` reads it from a file, `-` from stdin
    #[arg(long, value_name = "JSON", allow_hyphen_values = true)]
    payload: Option<String>,
    /// How many slots it takes
    #[arg(long)]
    cost: Option<u32>,
    /// What is higher goes first, from -100 to 100
    #[arg(long, allow_negative_numbers = true)]
    priority: Option<i16>,
    /// Not before: a time such as 2026-11-16T10:00:00Z, or +10m
    #[arg(long, value_name = "TIME")]
    at: Option<When>,
    /// How often it may begin before it counts as dead
    #[arg(long, value_name = "N")]
    max_attempts: Option<u32>,
    /// How long one attempt may take, for example `90s`
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    timeout: Option<Duration>,
    /// Of those with the same key in a queue only one waits at a time
    #[arg(long, value_name = "KEY")]
    unique_key: Option<String>,
    /// To find it by; may be repeated
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// Wait until it is over; fails unless it is done
    #[arg(long)]
    wait: bool,
}

impl Add {
    pub(crate) fn run(
        self,
        client: &Client,
        format: Format,
        out: &mut impl Write,
    ) -> anyhow::Result<()> {
        let asked = Asked {
            kind: self.kind,
            queue: self.queue,
            payload: self.payload.map(|text| payload(&text)).transpose()?,
            cost: self.cost,
            priority: self.priority,
            run_at: self.at.unwrap_or_default(),
            max_attempts: self.max_attempts,
            timeout: self.timeout,
            unique_key: self.unique_key,
            tags: self.tags,
            // Whoever runs this may be traced.
            trace: std::env::var("TRACEPARENT").ok().and_then(|text| text.parse().ok()),
        };
        let added: Added = client.post("/api/v1/jobs", &asked)?;
        // Programs read it in the answer.
        if !added.declared && format == Format::Table {
            hint(client, &added);
        }
        if self.wait {
            return wait::wait(client, format, &[added.id], out);
        }
        match format {
            Format::Json => output::json(out, &added)?,
            Format::Table if added.new => {
                writeln!(out, "job {} waits in {}", added.id, added.queue)?;
            }
            Format::Table => writeln!(out, "job {} waits already under that key", added.id)?,
        }
        Ok(())
    }
}

/// Says that the job may wait for ever, or fail, unless somebody works who may have a handler of its own.
fn hint(client: &Client, added: &Added) {
    let Ok(all) = client.get::<Workers>("/api/v1/workers") else { return };
    let is_at_it = |worker: &&WorkerInfo| {
        worker.status != Status::Stopped && worker.queues.contains(&added.queue)
    };
    let at_it: Vec<_> = all.workers.iter().filter(is_at_it).collect();
    if at_it.iter().any(|worker| !worker.inside && worker.supervisor.is_none()) {
        return;
    }
    let (kind, queue) = (output::one_line(&added.kind), output::one_line(&added.queue));
    let is_bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let key = if kind.chars().all(is_bare) { kind.clone() } else { format!("{kind:?}") };
    let advice = if at_it.is_empty() {
        format!(
            "add [handler.{key}] to the config file, or take it from the queue {queue} yourself"
        )
    } else {
        format!(
            "the worker of the queue {queue} takes it, and it fails until it is dead; add [handler.{key}] to the \
             config file, or give it a queue that nobody works"
        )
    };
    eprintln!("vedetta: hint: no handler is declared for the kind {kind:?}: {advice}");
}

fn payload(text: &str) -> anyhow::Result<Json> {
    let text = if text == "-" {
        let mut all = String::new();
        std::io::stdin().read_to_string(&mut all).context("cannot read the payload from stdin")?;
        all
    } else if let Some(file) = text.strip_prefix('@') {
        std::fs::read_to_string(file).with_context(|| format!("cannot read {file}"))?
    } else {
        text.to_owned()
    };
    let json = serde_json::from_str(&text);
    json.map_err(|error| wrong_use(format!("the payload is not JSON: {error}")).into())
}
