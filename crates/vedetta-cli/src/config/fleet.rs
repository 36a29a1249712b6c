//! The tables about workers: `[bus]` and `[supervisor.NAME]`.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use vedetta::fleet::supervisor::COOL_DOWN;
use vedetta::fleet::{Balance, Hire, Settings};

use super::jobs::JobName;
use super::watch::Time;
use super::{Config, ConfigError, Own, Size};

/// Instead of `bus.url`.
const BUS_URL: &str = "VEDETTA_BUS_URL";

/// The `[bus]` table: how commands come to workers.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Bus {
    url: String,
    poll: Time,
}

impl Default for Bus {
    fn default() -> Self {
        Self { url: "same".into(), poll: Time(Duration::from_secs(3)) }
    }
}

/// Where commands are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum BusAt {
    /// Where the jobs are.
    Same,
    Postgres(String),
    Redis(String),
}

impl Bus {
    /// Where commands are. A URL may hold a password, so it may come from the environment.
    pub(crate) fn at(&self) -> Result<BusAt, ConfigError> {
        let url = std::env::var(BUS_URL).unwrap_or_else(|_| self.url.clone());
        let (scheme, _) = url.split_once(':').unwrap_or((&url, ""));
        match scheme {
            "same" => Ok(BusAt::Same),
            "postgres" | "postgresql" => Ok(BusAt::Postgres(url)),
            "redis" => Ok(BusAt::Redis(url)),
            // The rest of it may be a secret.
            scheme => Err(ConfigError::Bus(scheme.to_owned())),
        }
    }

    /// How often workers give a sign of life.
    pub(crate) fn poll(&self) -> Duration {
        self.poll.0
    }
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
#[serde(expecting = "a table such as [supervisor.default]")]
pub(super) struct Supervisor {
    queues: Vec<String>,
    balance: Spread,
    min: u32,
    max: NonZeroU32,
    tries: Option<NonZeroU32>,
    timeout: Option<Time>,
    memory: Option<Size>,
    rest: Option<Time>,
    cool_down: Option<Time>,
    grace: Option<Time>,
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Spread {
    Simple,
    Auto,
}

impl Default for Supervisor {
    fn default() -> Self {
        Self {
            queues: vec!["*".into()],
            balance: Spread::Simple,
            min: 1,
            max: NonZeroU32::new(10).expect("it is not zero"),
            tries: None,
            timeout: None,
            memory: None,
            rest: None,
            cool_down: None,
            grace: None,
        }
    }
}

impl Supervisor {
    fn settings(&self, config: &Config) -> Settings {
        Settings {
            queues: config.worked(&self.queues),
            balance: match self.balance {
                Spread::Simple => Balance::Simple,
                Spread::Auto => Balance::Auto,
            },
            min: self.min,
            max: self.max.get(),
            cool_down: self.cool_down.map_or(COOL_DOWN, |time| time.0),
        }
    }

    fn hire(&self, program: PathBuf, own: &Own, config: Option<&Path>) -> Hire {
        let mut arguments: Vec<OsString> = vec!["--server".into(), own.url.as_str().into()];
        if let Some(file) = config {
            arguments.extend(["--config".into(), file.into()]);
        }
        let time = |time: Time| humantime::format_duration(time.0).to_string();
        let options = [
            ("--tries", self.tries.map(|tries| tries.to_string())),
            ("--timeout", self.timeout.map(time)),
            ("--memory", self.memory.map(|size| format!("{}B", size.0))),
            ("--rest", self.rest.map(time)),
            ("--grace", self.grace.map(time)),
        ];
        for (option, value) in options {
            if let Some(value) = value {
                arguments.extend([option.into(), value.into()]);
            }
        }
        let token = own.token.as_ref().map(|token| ("VEDETTA_TOKEN".into(), token.reveal().into()));
        Hire { program, arguments, variables: token.into_iter().collect() }
    }
}

impl Config {
    /// The queues that these names stand for: `*` is all that handlers are declared for, but for streams,
    /// which are worked by the server itself.
    pub(crate) fn worked(&self, names: &[String]) -> Vec<String> {
        if names.iter().any(|name| name == "*") {
            return self.workable().into_iter().collect();
        }
        names.to_vec()
    }

    /// Queues that a process of its own can work.
    pub(crate) fn workable(&self) -> BTreeSet<String> {
        let queues = self.handler.values().map(|handler| handler.queue().to_owned());
        queues.filter(|queue| !self.is_stream(queue)).collect()
    }

    fn is_stream(&self, queue: &str) -> bool {
        self.queue.get(&JobName(queue.to_owned())).is_some_and(super::jobs::Queue::is_stream)
    }

    /// Queues that supervisors have worked, so that the server does not.
    pub(crate) fn supervised(&self) -> BTreeSet<String> {
        self.supervisor.values().flat_map(|table| self.worked(&table.queues)).collect()
    }

    /// Supervisors of all queues while there is none for them, by which table of the file, and why.
    pub(crate) fn idle_supervisors(&self) -> Vec<(String, &'static str)> {
        let why = if self.handler.is_empty() {
            "no handler is declared"
        } else {
            "handlers are declared for streams only"
        };
        let is_idle = |table: &Supervisor| {
            table.queues.iter().any(|name| name == "*") && self.workable().is_empty()
        };
        let idle = self.supervisor.iter().filter(|(_, table)| is_idle(table));
        idle.map(|(name, _)| (format!("supervisor.{}", name.0), why)).collect()
    }

    /// What supervisors keep, each under its name, and how they start workers.
    pub(crate) fn supervisors(
        &self,
        program: &Path,
        own: &Own,
        config: Option<&Path>,
    ) -> Vec<(&str, Settings, Hire)> {
        let each = self.supervisor.iter().map(|(name, table)| {
            let hire = table.hire(program.to_owned(), own, config);
            (name.0.as_str(), table.settings(self), hire)
        });
        // One without queues has nothing to do.
        each.filter(|(_, settings, _)| !settings.queues.is_empty()).collect()
    }

    /// Checks names of queues that a process of its own is to work.
    pub(crate) fn check_worked(&self, names: &[String]) -> Result<(), ConfigError> {
        let workable = self.workable();
        for name in names.iter().filter(|name| *name != "*") {
            if self.is_stream(name) {
                return Err(ConfigError::WorkedStream(name.clone()));
            }
            if !workable.contains(name) {
                return Err(ConfigError::Undeclared(name.clone()));
            }
        }
        Ok(())
    }

    /// What the types of the values cannot say.
    pub(super) fn check_fleet(&self) -> Result<(), ConfigError> {
        self.bus.at()?;
        for (name, table) in &self.supervisor {
            if table.min > table.max.get() {
                return Err(ConfigError::MinMax(name.0.clone(), table.min, table.max));
            }
            let in_it = |error| ConfigError::SupervisorQueues(name.0.clone(), Box::new(error));
            self.check_worked(&table.queues).map_err(in_it)?;
        }
        Ok(())
    }
}
