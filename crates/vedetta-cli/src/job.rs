mod add;
mod import;
mod wait;

use std::fmt::Write as _;
use std::io::Write;

use clap::{Args, Subcommand};
use serde::Serialize;
use ureq::http::Method;
use vedetta::jobs::wire::{Changed, Listed, Retried, Which};
use vedetta::jobs::{Job as Info, JobId, status};

use crate::client::{Client, ClientError, Remote, encode};
use crate::output::{self, Format};

/// Ask for jobs, see what became of them, and retry or cancel them
#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Job {
    #[command(flatten)]
    remote: Remote,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Add(add::Add),
    /// List jobs, the newest first
    List {
        #[command(flatten)]
        filter: Filter,
        /// How many at most
        #[arg(long, default_value_t = 100)]
        limit: u32,
    },
    /// Show all there is to know of a job
    Show {
        /// The job
        id: JobId,
        /// Also what is redacted; the audit log tells that you asked
        #[arg(long)]
        reveal: bool,
    },
    /// Have jobs tried again that are dead or were cancelled
    Retry {
        /// The jobs
        #[arg(required_unless_present = "all")]
        ids: Vec<JobId>,
        /// All that are dead, or those of them that these options say; with `--status cancelled`, those instead
        #[arg(long, conflicts_with = "ids")]
        all: bool,
        #[command(flatten)]
        filter: Filter,
    },
    /// Call off jobs that wait or run
    Cancel {
        /// The jobs
        #[arg(required = true)]
        ids: Vec<JobId>,
    },
    Wait(wait::Wait),
    Import(import::Import),
}

/// Which jobs
#[derive(Debug, Args)]
struct Filter {
    /// Only those that stand so
    #[arg(long, value_parser = ["waiting", "running", "done", "dead", "cancelled"])]
    status: Option<String>,
    /// Only those of this queue
    #[arg(long)]
    queue: Option<String>,
    /// Only those of this kind
    #[arg(long)]
    kind: Option<String>,
    /// Only those with this tag
    #[arg(long)]
    tag: Option<String>,
    /// Only those with this in their payload, error, unique key or kind; capitals count
    #[arg(long, value_name = "TEXT")]
    search: Option<String>,
}

impl From<Filter> for Which {
    fn from(filter: Filter) -> Self {
        let Filter { status, queue, kind, tag, search } = filter;
        Self { status, queue, kind, tag, q: search, cursor: None }
    }
}

/// Jobs that were changed.
#[derive(Serialize)]
struct AllChanged {
    jobs: Vec<Changed>,
}

impl Job {
    pub(crate) fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        let client = Client::new(&self.remote)?;
        let format = self.remote.output;
        match self.command {
            Command::Add(add) => add.run(&client, format, out)?,
            Command::Wait(wait) => wait.run(&client, format, out)?,
            Command::Import(import) => import.run(&client, format, out)?,
            Command::List { filter, limit } => {
                let list = list(&client, filter.into(), limit)?;
                let more = list.cursor.is_some();
                show_all(out, format, &list)?;
                if more && format == Format::Table {
                    writeln!(out, "… and more: --limit shows them")?;
                }
            }
            Command::Show { id, reveal } => {
                let reveal = if reveal { "?reveal=true" } else { "" };
                let job: Info = client.get(&format!("{}{reveal}", path(id)))?;
                match format {
                    Format::Json => output::json(out, &job)?,
                    Format::Table => show(out, &job)?,
                }
            }
            Command::Retry { all: true, filter, .. } => {
                let done = retry_all(&client, filter.into())?;
                match format {
                    Format::Json => output::json(out, &done)?,
                    Format::Table => writeln!(out, "waiting again: {}", done.retried)?,
                }
            }
            Command::Retry { ids, filter, .. } => {
                if let Some((name, _)) = Which::from(filter).given().next() {
                    let message = format!("--{name} goes with --all, and not with ids");
                    return Err(wrong_use(message).into());
                }
                change(&client, format, &ids, "retry", out)?;
            }
            Command::Cancel { ids } => change(&client, format, &ids, "cancel", out)?,
        }
        Ok(())
    }
}

/// The largest page the API has.
const PAGE: u32 = 500;

fn path(id: JobId) -> String {
    format!("/api/v1/jobs/{id}")
}

/// What a server would say, too.
fn wrong_use(message: String) -> ClientError {
    ClientError::Refused { status: 422, message }
}

/// As many as are wanted, page by page.
fn list(client: &Client, mut which: Which, limit: u32) -> Result<Listed, ClientError> {
    let mut all = Listed { jobs: Vec::new(), cursor: None };
    loop {
        let left = limit.saturating_sub(u32::try_from(all.jobs.len()).unwrap_or(u32::MAX));
        if left == 0 {
            return Ok(all);
        }
        let mut page = format!("/api/v1/jobs?limit={}", left.min(PAGE));
        for (name, value) in which.given() {
            let _ = write!(page, "&{name}={}", encode(value.as_bytes()));
        }
        let page: Listed = client.get(&page)?;
        all.jobs.extend(page.jobs);
        all.cursor.clone_from(&page.cursor);
        which.cursor = page.cursor;
        if which.cursor.is_none() {
            return Ok(all);
        }
    }
}

fn retry_all(client: &Client, mut which: Which) -> Result<Retried, ClientError> {
    let mut retried = 0;
    loop {
        let some: Retried = client.post("/api/v1/jobs/retry", &which)?;
        retried += some.retried;
        which.cursor = some.cursor;
        if which.cursor.is_none() {
            return Ok(Retried { retried, cursor: None });
        }
    }
}

/// One after the other; those that cannot be hold up no other.
fn change(
    client: &Client,
    format: Format,
    ids: &[JobId],
    what: &str,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let (mut jobs, mut refused) = (Vec::new(), None);
    for id in ids {
        match client.ask(Method::POST, &format!("{}/{what}", path(*id)), None) {
            Ok(done) => {
                let done: Changed = done;
                if format == Format::Table {
                    writeln!(out, "job {id} is {}", status::word(done.status))?;
                }
                jobs.push(done);
            }
            Err(error @ ClientError::Refused { .. }) => {
                if refused.is_some() {
                    eprintln!("vedetta: {}", output::one_line(&error.to_string()));
                }
                refused.get_or_insert(error);
            }
            Err(error) => return Err(error.into()),
        }
    }
    match format {
        Format::Json => output::json(out, &AllChanged { jobs })?,
        Format::Table => {}
    }
    refused.map_or(Ok(()), |error| Err(error.into()))
}

fn show_all(out: &mut impl Write, format: Format, list: &Listed) -> std::io::Result<()> {
    if format == Format::Json {
        return output::json(out, list);
    }
    let row = |job: &Info| {
        [
            job.id.to_string(),
            output::escape(job.kind.as_bytes()),
            output::escape(job.queue.as_bytes()),
            status::word(job.status).to_owned(),
            format!("{}/{}", job.attempts, job.max_attempts),
            percent(job.progress),
            humantime::format_rfc3339_seconds(job.queued_at).to_string(),
            output::one_line(job.error.as_deref().unwrap_or_default()),
        ]
    };
    let names = ["ID", "KIND", "QUEUE", "STATUS", "ATTEMPTS", "PROGRESS", "QUEUED", "ERROR"];
    output::table(out, names, &list.jobs.iter().map(row).collect::<Vec<_>>())
}

fn percent(progress: f32) -> String {
    format!("{:.0}%", 100.0 * progress)
}

fn show(out: &mut impl Write, job: &Info) -> std::io::Result<()> {
    let text = |text: Option<&str>| output::one_line(text.unwrap_or_default());
    let time = |time: Option<_>| time.map(humantime::format_rfc3339_millis);
    let time = |at: Option<_>| time(at).map(|time| time.to_string()).unwrap_or_default();
    let timeout = job.timeout.map(|timeout| humantime::format_duration(timeout).to_string());
    for (name, value) in [
        ("job", job.id.to_string()),
        ("kind", output::one_line(&job.kind)),
        ("queue", output::one_line(&job.queue)),
        ("status", status::word(job.status).to_owned()),
        ("attempts", format!("{} of {}", job.attempts, job.max_attempts)),
        ("progress", percent(job.progress)),
        ("message", text(job.message.as_deref())),
        ("error", text(job.error.as_deref())),
        ("worker", text(job.worker.as_deref())),
        ("cost", job.cost.to_string()),
        ("priority", job.priority.to_string()),
        ("timeout", timeout.unwrap_or_default()),
        ("unique key", text(job.unique_key.as_deref())),
        ("tags", output::one_line(&job.tags.join(" "))),
        ("queued", time(Some(job.queued_at))),
        ("due", time(Some(job.run_at))),
        ("started", time(job.started_at)),
        ("ended", time(job.ended_at)),
        ("payload", output::one_line(job.payload.get())),
        ("result", text(job.result.as_ref().map(|result| result.get()))),
    ] {
        if !value.is_empty() {
            writeln!(out, "{name:<10}  {value}")?;
        }
    }
    if !job.log.is_empty() {
        writeln!(out, "log")?;
        job.log.lines().try_for_each(|line| writeln!(out, "  {}", output::one_line(line)))?;
    }
    Ok(())
}
