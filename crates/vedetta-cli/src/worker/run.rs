use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use tokio_util::sync::CancellationToken;
use vedetta::fleet::{Crew, Ending, RemoteFleet};
use vedetta::jobs::Worker;
use vedetta::runtime::Room;

use super::time;
use crate::config::{Config, Own, Size};
use crate::fleet::remote;
use crate::up::{LogFormat, Signals, flush, start_logs, start_telemetry, traced};

/// Work queues of a server with the declared handlers, in this process, until it is told to stop
///
/// A stop, also Ctrl-C or SIGTERM, lets what runs finish; a second signal does not.
#[derive(Debug, Args)]
pub(crate) struct Run {
    /// A queue to work; may be given again; `*` is all that handlers are declared for
    #[arg(long = "queue", required = true, value_name = "QUEUE")]
    queues: Vec<String>,
    /// The config file [default: ./vedetta.toml if it exists]
    #[arg(long, value_name = "FILE", env = "VEDETTA_CONFIG")]
    config: Option<PathBuf>,
    /// What it is called; nobody else may be [default: made up]
    #[arg(long)]
    id: Option<String>,
    /// Who started it: without that supervisor it ends after the grace time
    #[arg(long, value_name = "NAME")]
    supervisor: Option<String>,
    /// How long it goes on without its supervisor or the server
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "30s")]
    grace: Duration,
    /// What failed so often is dead, even if the job would allow more
    #[arg(long)]
    tries: Option<NonZeroU32>,
    /// How long an attempt may take, if neither the job nor its handler says
    #[arg(long, value_name = "TIME", value_parser = time)]
    timeout: Option<Duration>,
    /// With more memory than that it finishes what runs and ends, for example 128MB
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
    /// After each job take none for so long, and one at a time
    #[arg(long, value_name = "TIME", value_parser = time)]
    rest: Option<Duration>,
    /// How to write logs [default: human on a terminal, json otherwise]
    #[arg(long, value_enum, env = "VEDETTA_LOG_FORMAT")]
    log_format: Option<LogFormat>,
}

/// The server says when there is something; many workers that ask all the time would cost it more than their work.
const POLL: Duration = Duration::from_secs(5);

/// What is left when the end has come may take so long to go.
const LAST_MOMENT: Duration = Duration::from_millis(500);

impl Run {
    pub(crate) fn run(self, server: &str) -> anyhow::Result<()> {
        start_logs(self.log_format);
        let config = Config::load(self.config.as_deref())?;
        config.check_worked(&self.queues)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .context("cannot start")?;
        let done = runtime.block_on(self.work(&config, server));
        // What still runs is dropped, which ends commands and all that they started.
        runtime.shutdown_timeout(LAST_MOMENT);
        done
    }

    async fn work(self, config: &Config, server: &str) -> anyhow::Result<()> {
        let mut signals = Signals::listen().context("cannot listen for signals")?;
        let jobs = Arc::new(remote(server)?);
        let id = self.id.clone();
        let id = id.unwrap_or_else(|| {
            format!("{}-{:08x}", vedetta::fleet::host_name(), std::process::id())
        });
        let telemetry = config.telemetry()?;
        let exporter =
            telemetry.map(|settings| start_telemetry(&settings, Some(&id))).transpose()?;
        let queues = config.worked(&self.queues);
        // Commands have the token of our own environment.
        let workers = config.workers(&Own { url: server.to_owned(), token: None });
        let workers: Vec<Worker> = workers
            .into_iter()
            .filter(|(queue, _)| queues.iter().any(|asked| asked == queue))
            .map(|(_, worker)| traced(self.limited(worker.name(&id)), exporter.as_ref()))
            .collect();
        // One process has the slots of its widest queue, for all of them together.
        let slots = workers.iter().map(Worker::slots).max();
        let room = Room::new(slots.unwrap_or(NonZeroU32::MIN));
        let working = workers
            .into_iter()
            .map(|worker| worker.start_within(Arc::clone(&room), Arc::clone(&jobs) as _));
        let working = working.collect::<Result<Vec<_>, _>>()?;
        let control = Arc::new(RemoteFleet::new(jobs));
        let crew = Crew::new(&id, control, working)
            .supervisor(self.supervisor, self.grace)
            .memory(self.memory.map(|size| size.0));
        let stop = CancellationToken::new();
        tracing::info!(worker = id, ?queues, slots = room.capacity(), "working");
        let mut running = std::pin::pin!(crew.run(stop.clone(), Duration::MAX));
        let mut is_told = false;
        let (ending, _) = loop {
            tokio::select! {
                ended = &mut running => break ended,
                () = signals.next() => {
                    anyhow::ensure!(!is_told, "ended by a second signal");
                    is_told = true;
                    stop.cancel();
                }
            }
        };
        let why = match ending {
            Ending::Told => "told to",
            Ending::Memory => "too much memory",
            Ending::Orphaned => "nobody to work for",
        };
        if let Some(exporter) = exporter {
            flush(exporter).await;
        }
        tracing::info!(worker = id, why, "ended");
        Ok(())
    }

    /// The same worker within the limits that were given.
    fn limited(&self, mut worker: Worker) -> Worker {
        if let Some(tries) = self.tries {
            worker = worker.tries(tries);
        }
        if let Some(timeout) = self.timeout {
            worker = worker.timeout_of_all(timeout);
        }
        worker.rest(self.rest.unwrap_or_default()).poll(POLL)
    }
}
