use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use vedetta::fleet::RemoteFleet;

use crate::config::{Config, ConfigError, Own};
use crate::fleet::{remote, start_supervisors};
use crate::up::{LogFormat, Signals, start_logs, stop_supervisors};

/// Keep the workers of the declared supervisors on this machine, for a `vedetta up` elsewhere, until Ctrl-C or SIGTERM
#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Supervise {
    /// The server
    #[arg(
        long,
        value_name = "URL",
        env = "VEDETTA_SERVER",
        default_value = "http://127.0.0.1:7070"
    )]
    server: String,
    /// The config file [default: ./vedetta.toml if it exists]
    #[arg(long, value_name = "FILE", env = "VEDETTA_CONFIG")]
    config: Option<PathBuf>,
    /// How to write logs [default: human on a terminal, json otherwise]
    #[arg(long, value_enum, env = "VEDETTA_LOG_FORMAT")]
    log_format: Option<LogFormat>,
}

impl Supervise {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        start_logs(self.log_format);
        let config = Config::load(self.config.as_deref())?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .context("cannot start")?;
        runtime.block_on(self.keep(&config))
    }

    async fn keep(&self, config: &Config) -> anyhow::Result<()> {
        let mut signals = Signals::listen().context("cannot listen for signals")?;
        let control = Arc::new(RemoteFleet::new(Arc::new(remote(&self.server)?)));
        // Its workers have the token and the authority of its own environment.
        let own = Own { url: self.server.clone(), token: None };
        let supervisors = start_supervisors(config, &own, self.config.as_deref(), &control)?;
        if supervisors.is_empty() {
            return Err(ConfigError::NoSupervisor.into());
        }
        signals.next().await;
        let grace = config.shutdown.grace;
        tracing::info!(?grace, "stopping; a second signal ends it at once");
        tokio::select! {
            () = stop_supervisors(supervisors, grace) => {}
            () = signals.next() => anyhow::bail!("ended by a second signal"),
        }
        Ok(())
    }
}
