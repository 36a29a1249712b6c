use std::io::Write;
use std::time::Duration;

use clap::{Args, Subcommand};
use ureq::http::Method;
use vedetta::jobs::Mode;
use vedetta::jobs::wire::{QueueInfo, QueueMode, Queues};

use crate::client::{Client, Remote, encode};
use crate::output::{self, Format};

/// See what is in the queues of jobs, and have them pause, drain and go on
#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Queue {
    #[command(flatten)]
    remote: Remote,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List all queues
    List,
    /// Have a queue hand nothing out; what runs goes on
    Pause {
        /// The queue
        queue: String,
    },
    /// Have a queue take and give again
    Resume {
        /// The queue
        queue: String,
    },
    /// Have a queue take nothing on; what waits is worked off
    Drain {
        /// The queue
        queue: String,
    },
}

impl Queue {
    pub(crate) fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        let client = Client::new(&self.remote)?;
        let format = self.remote.output;
        let (queue, what) = match self.command {
            Command::List => {
                let list: Queues = client.get("/api/v1/queues")?;
                match format {
                    Format::Json => output::json(out, &list)?,
                    Format::Table => table(out, &list.queues)?,
                }
                return Ok(());
            }
            Command::Pause { queue } => (queue, "pause"),
            Command::Resume { queue } => (queue, "resume"),
            Command::Drain { queue } => (queue, "drain"),
        };
        let path = format!("/api/v1/queues/{}/{what}", encode(queue.as_bytes()));
        let done: QueueMode = client.ask(Method::POST, &path, None)?;
        match format {
            Format::Json => output::json(out, &done)?,
            Format::Table => {
                writeln!(out, "{} is {}", output::one_line(&done.name), word(done.mode))?;
            }
        }
        Ok(())
    }
}

fn word(mode: Mode) -> &'static str {
    match mode {
        Mode::Open => "open",
        Mode::Paused => "paused",
        Mode::Draining => "draining",
    }
}

pub(crate) fn table(out: &mut impl Write, queues: &[QueueInfo]) -> std::io::Result<()> {
    let time = |ms| humantime::format_duration(Duration::from_millis(ms)).to_string();
    let row = |queue: &QueueInfo| {
        [
            output::escape(queue.name.as_bytes()),
            word(queue.mode).to_owned(),
            queue.ready.to_string(),
            queue.oldest_ms.map(time).unwrap_or_default(),
            queue.scheduled.to_string(),
            queue.running.to_string(),
            format!("{}/{}", queue.slots, queue.capacity),
            queue.done_per_minute.to_string(),
            queue.failed_per_minute.to_string(),
            queue.done.to_string(),
            queue.dead.to_string(),
            queue.cancelled.to_string(),
        ]
    };
    let names = [
        "QUEUE",
        "MODE",
        "READY",
        "OLDEST",
        "SCHEDULED",
        "RUNNING",
        "SLOTS",
        "DONE/MIN",
        "FAILED/MIN",
        "DONE",
        "DEAD",
        "CANCELLED",
    ];
    output::table(out, names, &queues.iter().map(row).collect::<Vec<_>>())
}
