//! The tables about jobs: `[queue.NAME]`, `[handler.KIND]`, `[periodic.NAME]` and `[retention]`.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::time::Duration;

use serde::Deserialize;
use vedetta::jobs::jetstream::Options;
use vedetta::jobs::{
    Asked, Cost, DEFAULT_QUEUE, Every, JobsError, Kind, Kinds, LEASE, NewJob, Periodic, Retention,
    When, Worker, check_name,
};
use vedetta::runtime::Command;

use super::watch::{LONGEST, Run, Time};
use super::{Config, ConfigError, JobsAt, Own};

/// The name of a queue, a kind or a periodic job.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct JobName(pub(crate) String);

impl TryFrom<String> for JobName {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        check_name("name", &text).map_err(|error| error.to_string())?;
        Ok(Self(text))
    }
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Queue {
    capacity: Capacity,
    ack_wait: Option<Time>,
    heartbeat: Option<Time>,
    fetch_batch: Option<NonZeroU32>,
    fetch_timeout: Option<Time>,
    nats: Option<Nats>,
}

/// The stream that a queue is.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Nats {
    stream: String,
    subject: String,
    durable: String,
    /// What all workers that share the durable can run; those of this one unless said.
    max_ack_pending: Option<NonZeroU32>,
}

/// Slots, or as many as the machine has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(try_from = "toml::Value")]
enum Capacity {
    #[default]
    Auto,
    Slots(NonZeroU32),
}

impl TryFrom<toml::Value> for Capacity {
    type Error = String;

    fn try_from(value: toml::Value) -> Result<Self, String> {
        let slots = value.as_integer().and_then(|slots| u32::try_from(slots).ok());
        match (value.as_str(), slots.and_then(NonZeroU32::new)) {
            (Some("auto"), _) => Ok(Self::Auto),
            (_, Some(slots)) => Ok(Self::Slots(slots)),
            _ => Err(format!("the capacity is {value}: give \"auto\" or a number from 1 on")),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Handler {
    run: Run,
    queue: Option<JobName>,
    cost: Option<NonZeroU32>,
    cost_from: Option<String>,
    #[serde(default)]
    costs: BTreeMap<String, NonZeroU32>,
    timeout: Option<Time>,
    max_attempts: Option<NonZeroU32>,
}

impl Handler {
    /// What is run: a path if there is a slash in it.
    pub(crate) fn program(&self) -> &str {
        &self.run.program
    }

    pub(super) fn queue(&self) -> &str {
        self.queue.as_ref().map_or(DEFAULT_QUEUE, |queue| &queue.0)
    }

    fn cost(&self, kind: &str) -> Result<Cost, ConfigError> {
        match (self.cost, &self.cost_from) {
            (Some(_), Some(_)) => Err(ConfigError::TwoCosts(kind.into())),
            (_, Some(_)) if self.costs.is_empty() => Err(ConfigError::NoCosts(kind.into())),
            (_, None) if !self.costs.is_empty() => Err(ConfigError::CostsOfWhat(kind.into())),
            (_, Some(field)) => {
                let costs = self.costs.iter().map(|(value, cost)| (value.clone(), cost.get()));
                Ok(Cost::From { field: field.clone(), costs: costs.collect() })
            }
            (cost, None) => Ok(Cost::Fixed(cost.map_or(1, NonZeroU32::get))),
        }
    }

    fn kind(&self, kind: &str) -> Result<Kind, ConfigError> {
        let cost = self.cost(kind)?;
        let dearest = match &cost {
            Cost::Fixed(cost) => *cost,
            Cost::From { costs, .. } => costs.values().copied().max().unwrap_or(1),
        };
        let max_attempts = self.max_attempts.map_or(5, NonZeroU32::get);
        let timeout = self.timeout.map(|time| time.0);
        // What every job would be refused for.
        let job = NewJob { cost: dearest, max_attempts, timeout, ..NewJob::new(kind) };
        job.check().map_err(|error| ConfigError::Handler(kind.into(), error.to_string()))?;
        Ok(Kind { queue: self.queue().into(), cost, max_attempts, timeout })
    }
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Tick {
    kind: JobName,
    queue: Option<JobName>,
    payload: Option<toml::Value>,
    every: Option<Time>,
    cron: Option<String>,
    zone: Option<String>,
}

impl Tick {
    fn periodic(&self, name: &str, kinds: &Kinds) -> Result<Periodic, ConfigError> {
        let wrong = |error: JobsError| ConfigError::Tick(name.into(), error.to_string());
        let every = match (self.every, &self.cron) {
            (Some(period), None) if self.zone.is_none() => Every::each(period.0),
            (None, Some(pattern)) => Every::cron(pattern, self.zone.as_deref()),
            _ => return Err(ConfigError::TickWhen(name.into())),
        };
        let payload = self.payload.as_ref().map(serde_json::value::to_raw_value).transpose();
        let payload = payload.map_err(|error| ConfigError::Tick(name.into(), error.to_string()))?;
        let asked = Asked {
            kind: self.kind.0.clone(),
            queue: self.queue.as_ref().map(|queue| queue.0.clone()),
            payload,
            cost: None,
            priority: None,
            run_at: When::Now,
            max_attempts: None,
            timeout: None,
            unique_key: None,
            tags: Vec::new(),
            trace: None,
        };
        let job = kinds.complete(asked).map_err(wrong)?;
        Ok(Periodic { name: name.into(), every: every.map_err(wrong)?, job })
    }
}

/// The `[retention]` table.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Keep {
    completed: Time,
    failed: Time,
}

impl Default for Keep {
    fn default() -> Self {
        let Retention { completed, failed } = Retention::default();
        Self { completed: Time(completed), failed: Time(failed) }
    }
}

impl Keep {
    pub(crate) fn retention(self) -> Retention {
        Retention { completed: self.completed.0, failed: self.failed.0 }
    }
}

impl Config {
    /// What is known of the kinds of jobs.
    pub(crate) fn kinds(&self) -> Result<Kinds, ConfigError> {
        let kinds =
            self.handler.iter().map(|(kind, handler)| Ok((kind.0.clone(), handler.kind(&kind.0)?)));
        Ok(Kinds(kinds.collect::<Result<_, ConfigError>>()?))
    }

    pub(crate) fn periodic(&self) -> Result<Vec<Periodic>, ConfigError> {
        let kinds = self.kinds()?;
        self.periodic.iter().map(|(name, tick)| tick.periodic(&name.0, &kinds)).collect()
    }

    /// Periodic jobs of kinds that no handler is declared for, by which table of the file: somebody else may have
    /// one.
    pub(crate) fn unhandled(&self) -> Result<Vec<(String, String)>, ConfigError> {
        let kinds = self.kinds()?;
        let ticks = self.periodic.iter().filter(|(_, tick)| !kinds.0.contains_key(&tick.kind.0));
        Ok(ticks
            .map(|(name, tick)| (format!("periodic.{}", name.0), tick.kind.0.clone()))
            .collect())
    }

    /// All queues that are named.
    pub(crate) fn queues(&self) -> Result<BTreeSet<String>, ConfigError> {
        let declared = self.queue.keys().map(|name| name.0.clone());
        let handlers = self.handler.values().map(|handler| handler.queue().to_owned());
        let periodic = self.periodic()?.into_iter().map(|periodic| periodic.job.queue);
        Ok(declared.chain(handlers).chain(periodic).collect())
    }

    /// A worker for each queue that has handlers.
    pub(crate) fn workers(&self, own: &Own) -> BTreeMap<&str, Worker> {
        let mut workers: BTreeMap<&str, Worker> = BTreeMap::new();
        for (kind, handler) in &self.handler {
            let queue = handler.queue();
            let worker = workers.remove(queue).unwrap_or_else(|| self.worker(queue));
            let Run { program, arguments } = handler.run.clone();
            // How long it may take is the worker's to say.
            let command = own.tell(Command::new(program, arguments, LONGEST));
            let is_stream =
                self.queue.iter().any(|(name, of)| name.0 == queue && of.nats.is_some());
            let worker = if is_stream {
                worker.message_command(&kind.0, command)
            } else {
                worker.command(&kind.0, command)
            };
            let worker = match handler.timeout {
                Some(timeout) => worker.timeout(&kind.0, timeout.0),
                None => worker,
            };
            workers.insert(queue, worker);
        }
        workers
    }

    /// Whether a queue has as many slots as the machine, and not a number of its own.
    pub(crate) fn takes_the_machine(&self, queue: &str) -> bool {
        let declared = self.queue.get(&JobName(queue.into()));
        declared.is_none_or(|queue| queue.capacity == Capacity::Auto)
    }

    /// The streams that queues are.
    pub(crate) fn streams(&self) -> Result<Vec<Options>, ConfigError> {
        let mut streams = Vec::new();
        for (name, queue) in &self.queue {
            let Some(nats) = &queue.nats else { continue };
            let slots = queue.slots();
            if let Some(most) = nats.max_ack_pending.filter(|most| *most < slots) {
                return Err(ConfigError::AckPending(name.0.clone(), most, slots));
            }
            let most = nats.max_ack_pending.unwrap_or(slots);
            let mut options = Options::new(&nats.stream, &nats.subject, &nats.durable, most);
            options.queue.clone_from(&name.0);
            options.kinds = self.kinds()?;
            options.ack_wait = queue.lease();
            options.heartbeat = queue.heartbeat();
            options.fetch_batch = queue.fetch_batch.unwrap_or(options.fetch_batch);
            options.fetch_timeout =
                queue.fetch_timeout.map_or(options.fetch_timeout, |time| time.0);
            // A message of somebody else is for the one who works here.
            let mut kinds = self.handler.iter().filter(|(_, handler)| handler.queue() == name.0);
            options.default_kind = match (kinds.next(), kinds.next()) {
                (Some((kind, _)), None) => Some(kind.0.clone()),
                _ => None,
            };
            let checked = options.check();
            checked.map_err(|error| ConfigError::Stream(name.0.clone(), error.to_string()))?;
            streams.push(options);
        }
        Ok(streams)
    }

    fn worker(&self, name: &str) -> Worker {
        let queue = self.queue.get(&JobName(name.into())).cloned().unwrap_or_default();
        let worker = Worker::new(name).lease(queue.lease()).heartbeat(queue.heartbeat());
        match queue.capacity {
            Capacity::Auto => worker,
            Capacity::Slots(slots) => worker.capacity(slots),
        }
    }

    /// What the types of the values cannot say.
    pub(super) fn check_jobs(&self) -> Result<(), ConfigError> {
        let streams = self.streams()?;
        let is_nats = matches!(self.jobs.at()?, JobsAt::Nats(_));
        match streams.first() {
            Some(stream) if !is_nats => return Err(ConfigError::NoNats(stream.queue.clone())),
            None if is_nats => return Err(ConfigError::NoStream),
            _ => {}
        }
        for (name, queue) in &self.queue {
            let name = &name.0;
            if queue.heartbeat() > queue.lease() / 3 {
                return Err(ConfigError::Heartbeat(name.clone()));
            }
            let only = [
                ("fetch-batch", queue.fetch_batch.is_some()),
                ("fetch-timeout", queue.fetch_timeout.is_some()),
            ];
            let only = only.into_iter().find(|(_, is_set)| *is_set && queue.nats.is_none());
            if let Some((key, _)) = only {
                return Err(ConfigError::OnlyStreams(name.clone(), key));
            }
        }
        for periodic in self.periodic()? {
            if streams.iter().any(|stream| stream.queue == periodic.job.queue) {
                return Err(ConfigError::TickStream(periodic.name, periodic.job.queue));
            }
        }
        Ok(())
    }
}

impl Queue {
    pub(super) fn is_stream(&self) -> bool {
        self.nats.is_some()
    }

    /// What is usual for a stream is longer: a sign of life is a message there.
    fn lease(&self) -> Duration {
        let usual = if self.nats.is_some() { Duration::from_secs(300) } else { LEASE };
        self.ack_wait.map_or(usual, |time| time.0)
    }

    fn heartbeat(&self) -> Duration {
        let usual = if self.nats.is_some() { Duration::from_secs(30) } else { self.lease() / 3 };
        self.heartbeat.map_or(usual.min(self.lease() / 3), |time| time.0)
    }

    fn slots(&self) -> NonZeroU32 {
        match self.capacity {
            Capacity::Auto => Worker::width(),
            Capacity::Slots(slots) => slots,
        }
    }
}
