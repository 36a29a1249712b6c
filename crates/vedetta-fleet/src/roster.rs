//! Who is there: the records of workers and supervisors.
//!
//! Signs of life are kept in memory by [`crate::Fleet`] and come here in batches; what changes comes at
//! once. Times of life are told as how long ago, so that no two machines compare their clocks.

pub(crate) mod postgres;
pub(crate) mod sqlite;

use std::error::Error;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

/// What a worker is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It works.
    Running,
    /// It takes nothing.
    Paused,
    /// It finishes what runs, and ends.
    Stopping,
    /// It has ended.
    Stopped,
    /// Nothing was heard of it for too long. Never stored: whoever looks can tell.
    Silent,
}

impl Status {
    /// As it is stored.
    pub fn word(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
            Self::Silent => "silent",
        }
    }

    pub(crate) fn of(word: &str) -> Self {
        match word {
            "paused" => Self::Paused,
            "stopping" => Self::Stopping,
            "stopped" => Self::Stopped,
            "silent" => Self::Silent,
            _ => Self::Running,
        }
    }
}

/// A worker, as it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerRecord {
    /// Nobody else has it.
    pub id: String,
    /// Who started it, if anybody did.
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
    /// It is part of a server, and ends with it.
    pub inside: bool,
    /// What tells its process from a later one of the same number.
    pub birth: Option<String>,
    /// Its slots.
    pub capacity: u32,
    /// How it ended, or why it is about to.
    pub note: Option<String>,
    /// When its process began, by its own clock.
    pub started: SystemTime,
    /// How long ago its last sign of life was.
    pub seen: Duration,
    /// When it registered.
    pub created: SystemTime,
    /// When anything of this last changed.
    pub updated: SystemTime,
}

/// A supervisor, as it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SupervisorRecord {
    /// Nobody else has it.
    pub name: String,
    /// Where it runs.
    pub host: String,
    /// It was told to end its workers and to start none.
    pub halted: bool,
    /// How long ago its last sign of life was.
    pub seen: Duration,
}

/// What a supervisor was told last is kept for so long after its last sign of life.
const HALTED: Duration = Duration::from_secs(30 * 24 * 3600);

/// Why the roster did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RosterError {
    /// Try again later.
    #[error("the roster cannot be reached")]
    Unavailable(#[source] Box<dyn Error + Send + Sync>),
    /// Look at what is wrong with it.
    #[error("the roster failed")]
    Failed(#[source] Box<dyn Error + Send + Sync>),
}

/// All that is on a roster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct All {
    /// In the order of their ids.
    pub workers: Vec<WorkerRecord>,
    /// In the order of their names.
    pub supervisors: Vec<SupervisorRecord>,
}

/// Keeps the records. Every driver is one, and passes the same suite.
#[async_trait]
pub trait Roster: Send + Sync + 'static {
    /// Adds what is new and replaces what is there; when a worker registered stays. Nobody waits for the disk: what a
    /// power cut takes is said again with the next beat, but for what [`Roster::keep`] is for.
    async fn save(
        &self,
        workers: &[WorkerRecord],
        supervisors: &[SupervisorRecord],
    ) -> Result<(), RosterError>;

    /// The same for what supervisors were told last, which nobody says again: returns when it is on the disk.
    async fn keep(&self, supervisors: &[SupervisorRecord]) -> Result<(), RosterError>;

    /// Everybody.
    async fn all(&self) -> Result<All, RosterError>;

    /// Removes workers and supervisors that gave no sign of life for so long; those that were told to start no
    /// workers, much later. How many.
    async fn prune(&self, silent: Duration) -> Result<u64, RosterError>;
}

/// Names have no commas.
fn joined(queues: &[String]) -> String {
    queues.join(",")
}

fn split(queues: &str) -> Vec<String> {
    queues.split(',').filter(|queue| !queue.is_empty()).map(str::to_owned).collect()
}
