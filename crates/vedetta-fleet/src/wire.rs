//! What is said over HTTP, as JSON. Durations are milliseconds, times as in RFC 3339.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::bus::{CommandId, Order, Record, State};
use crate::roster::Status;

/// Bytes of what is told of how a process ended.
pub const LONGEST_NOTE: usize = 4096;

/// What a worker says of itself, and how it stays alive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Beat {
    /// Who started it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub supervisor: Option<String>,
    /// What it works.
    pub queues: Vec<String>,
    /// Its process.
    #[serde(default)]
    pub pid: u32,
    /// Where that is.
    #[serde(default)]
    pub host: String,
    /// Of the program.
    #[serde(default)]
    pub version: String,
    /// When its process began, in milliseconds since 1970.
    #[serde(default)]
    pub started: u64,
    /// What tells its process from a later one of the same number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub birth: Option<String>,
    /// What it is at.
    #[serde(default = "running")]
    pub state: Status,
    /// How much of it is in use.
    #[serde(default)]
    pub slots: SlotsUsed,
    /// The jobs that run.
    #[serde(default)]
    pub running: Vec<u64>,
    /// Commands that it obeyed.
    #[serde(default)]
    pub done: Vec<CommandId>,
    /// Why it is about to end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

fn running() -> Status {
    Status::Running
}

/// Slots in use, of how many.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlotsUsed {
    /// In use.
    pub used: u32,
    /// All.
    pub capacity: u32,
}

/// A command, handed out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handed {
    /// Which.
    pub id: CommandId,
    /// What to do.
    pub command: Order,
    /// After that it must not be obeyed.
    pub expires_ms: u64,
}

/// What a worker hears.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heard {
    /// What to do, in this order. Nobody else gets it, and nobody gets it again.
    pub commands: Vec<Handed>,
    /// How long ago its supervisor gave a sign of life.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub supervisor_seen_ms: Option<u64>,
    /// Beat again within that.
    pub beat_ms: u64,
}

/// What a supervisor says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// Where it runs.
    pub host: String,
    /// Of the program.
    pub version: String,
    /// Differs from that of another process of the same name.
    pub instance: String,
    /// What its workers can work.
    pub queues: Vec<String>,
    /// How it spreads workers.
    pub balance: String,
    /// Workers at least.
    pub min: u32,
    /// And at most.
    pub max: u32,
    /// As many as it wants now.
    pub wanted: u32,
    /// Whether it is well.
    pub state: Mood,
    /// How its last worker that failed ended, or why it could not look at them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_exit: Option<String>,
    /// The last that one wrote to stderr.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr: Option<String>,
    /// Workers of its own that have ended.
    #[serde(default)]
    pub ended: Vec<Ended>,
    /// Commands that it obeyed.
    #[serde(default)]
    pub done: Vec<CommandId>,
    /// Whether it is told what is in the queues.
    #[serde(default)]
    pub depths: bool,
}

/// Whether a supervisor is well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mood {
    /// It does not know yet what is there, nor what it was told before it was started.
    Starting,
    /// It keeps its workers.
    Running,
    /// It replaces them, one at a time.
    Restarting,
    /// They end or fall silent again and again soon after their start; it tries on, seldom.
    CrashLooping,
    /// It was told to end them all, and starts none.
    Terminated,
    /// Its process ends, and its workers with it.
    Stopping,
}

impl Mood {
    /// As it is shown.
    pub fn word(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Restarting => "restarting",
            Self::CrashLooping => "crash-looping",
            Self::Terminated => "terminated",
            Self::Stopping => "stopping",
        }
    }
}

/// A worker that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ended {
    /// Which.
    pub id: String,
    /// How.
    pub exit: String,
}

/// What is in a queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Depth {
    /// Which.
    pub name: String,
    /// Jobs that are due.
    pub ready: u64,
    /// And that run.
    pub running: u64,
    /// How long the first of them has waited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest_ms: Option<u64>,
}

/// What a supervisor hears.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Told {
    /// What to do, in this order.
    pub commands: Vec<Handed>,
    /// Its workers, those that ended just now, too.
    pub workers: Vec<WorkerInfo>,
    /// What is in the queues, if it asked.
    pub queues: Vec<Depth>,
    /// It was told to end its workers and to start none, maybe before it was started.
    #[serde(default)]
    pub halted: bool,
    /// A worker that was not seen for so long is silent.
    pub silent_ms: u64,
    /// Beat again within that.
    pub beat_ms: u64,
}

/// A worker, for people.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerInfo {
    /// Which.
    pub id: String,
    /// Who started it.
    pub supervisor: Option<String>,
    /// What it works.
    pub queues: Vec<String>,
    /// Its process.
    pub pid: u32,
    /// Where that is.
    pub host: String,
    /// Of the program.
    pub version: String,
    /// What it is at.
    pub status: Status,
    /// It is part of a server: it can be paused, and ends with that.
    pub inside: bool,
    /// Tells its process from a later one of the same number; only its supervisor is told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub birth: Option<String>,
    /// Slots in use.
    pub slots: SlotsUsed,
    /// The jobs that run.
    pub running: Vec<u64>,
    /// How it ended, or why it is about to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// How long ago it was seen.
    pub seen_ms: u64,
    /// When its process began.
    pub started_at: Stamp,
    /// Its last sign of life.
    pub last_heartbeat: Stamp,
    /// When it registered.
    pub created_at: Stamp,
    /// When anything of this last changed.
    pub updated_at: Stamp,
}

/// A supervisor, for people.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SupervisorInfo {
    /// Which.
    pub name: String,
    /// Where it runs.
    pub host: String,
    /// It was told to end its workers, and starts none until it is told to.
    #[serde(default)]
    pub halted: bool,
    /// What it said last; nothing if it speaks to another server, or is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<ReportInfo>,
    /// How long ago it was seen.
    pub seen_ms: u64,
}

/// What a supervisor said last.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReportInfo {
    /// Whether it is well.
    pub state: Mood,
    /// What its workers can work.
    pub queues: Vec<String>,
    /// How it spreads workers.
    pub balance: String,
    /// Workers at least.
    pub min: u32,
    /// And at most.
    pub max: u32,
    /// As many as it wants now.
    pub wanted: u32,
    /// How its last worker that failed ended, or why it could not look at them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_exit: Option<String>,
    /// The last that one wrote to stderr.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr: Option<String>,
}

/// Everybody.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Workers {
    /// In the order of their ids, those that are gone last.
    pub workers: Vec<WorkerInfo>,
    /// In the order of their names.
    pub supervisors: Vec<SupervisorInfo>,
}

/// What becomes of a command.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CommandInfo {
    /// Which.
    pub id: CommandId,
    /// For whom.
    pub target: String,
    /// What to do.
    pub command: Order,
    /// Where it stands.
    pub state: State,
    /// When it was asked for.
    pub created_at: Stamp,
    /// From then on nobody obeys it.
    pub expires_at: Stamp,
}

impl From<Record> for CommandInfo {
    fn from(record: Record) -> Self {
        Self {
            id: record.id,
            target: record.target.key().to_owned(),
            command: record.order,
            state: record.state,
            created_at: Stamp(record.created),
            expires_at: Stamp(record.expires),
        }
    }
}

/// Commands that were given together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Commands {
    /// In no order.
    pub commands: Vec<CommandInfo>,
}

/// A wish for more workers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Start {
    /// Of this queue.
    pub queue: String,
    /// So many.
    #[serde(default = "one")]
    pub count: u32,
}

fn one() -> u32 {
    1
}

/// Somebody is gone in good order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gone {
    /// Who.
    pub id: String,
    /// It was known.
    pub gone: bool,
}

/// A time, as in RFC 3339.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp(pub SystemTime);

impl Serialize for Stamp {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&humantime::format_rfc3339_millis(self.0))
    }
}

impl<'de> Deserialize<'de> for Stamp {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        humantime::parse_rfc3339_weak(&text).map(Self).map_err(serde::de::Error::custom)
    }
}
