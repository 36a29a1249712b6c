//! Commands on their way to those who obey them.
//!
//! ```text
//!  put ──► requested ──take──► taken ──applied──► applied
//!              │ ▲                │
//!     replaced ┘ └──── TTL ───────┴────► expired: never handed out, never obeyed
//! ```
//!
//! A command is handed out at most once, and never after its time: one that was lost on the way is not
//! obeyed rather than obeyed twice. A command that waits is replaced by a later one of its kind, so that
//! pause and then resume is resume; a stop is not taken back by either.
//!
//! What wakes those who wait is a hint: it may be lost, and [`Bus::waiting`] finds what it missed.

pub(crate) mod postgres;
pub mod redis;
pub(crate) mod sqlite;

use std::error::Error;
use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast;

/// How long a command may wait unless said otherwise.
pub const TTL: Duration = Duration::from_secs(60);

/// How long what became of a command can be seen after its time.
pub const KEPT: Duration = Duration::from_secs(3600);

/// Commands that may wait for one target.
pub const MOST: usize = 100;

/// Wake-ups a slow listener may be behind before it looks at all.
const WAKES: usize = 1024;

/// Whom a command is for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target(String);

impl Target {
    /// A worker, by its id.
    pub fn worker(id: &str) -> Self {
        Self(format!("worker:{id}"))
    }

    /// A supervisor, by its name.
    pub fn supervisor(name: &str) -> Self {
        Self(format!("supervisor:{name}"))
    }

    /// As it is stored.
    pub fn key(&self) -> &str {
        &self.0
    }

    fn from_key(key: impl Into<String>) -> Self {
        Self(key.into())
    }
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// A worker finishes what runs, and ends.
    Stop,
    /// A worker finishes what runs, and takes nothing.
    Pause,
    /// A worker goes on.
    Resume,
    /// A supervisor starts workers of a queue beside those it has.
    Start {
        /// Which.
        queue: String,
        /// How many.
        count: u32,
    },
    /// A supervisor replaces its workers, one at a time.
    Restart,
    /// A supervisor ends all its workers and starts none.
    Terminate,
}

impl Order {
    /// Its first word.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Start { .. } => "start",
            Self::Restart => "restart",
            Self::Terminate => "terminate",
        }
    }

    /// Those that it replaces if they wait.
    fn replaces(&self) -> &'static [&'static str] {
        match self {
            Self::Pause | Self::Resume => &["pause", "resume"],
            Self::Stop => &["pause", "resume", "stop"],
            Self::Start { .. } => &[],
            Self::Restart => &["restart"],
            Self::Terminate => &["start", "restart", "terminate"],
        }
    }

    /// Those that stand, so that it is not needed.
    fn yields_to(&self) -> &'static [&'static str] {
        match self {
            Self::Pause | Self::Resume => &["stop"],
            _ => &[],
        }
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start { queue, count } => write!(f, "start {queue} {count}"),
            other => f.write_str(other.word()),
        }
    }
}

impl FromStr for Order {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.split(' ');
        let order = match (words.next(), words.next(), words.next()) {
            (Some("stop"), None, _) => Some(Self::Stop),
            (Some("pause"), None, _) => Some(Self::Pause),
            (Some("resume"), None, _) => Some(Self::Resume),
            (Some("restart"), None, _) => Some(Self::Restart),
            (Some("terminate"), None, _) => Some(Self::Terminate),
            (Some("start"), Some(queue), Some(count)) => {
                count.parse().ok().map(|count| Self::Start { queue: queue.to_owned(), count })
            }
            _ => None,
        };
        order.filter(|_| words.next().is_none()).ok_or_else(|| format!("{text:?} is no command"))
    }
}

impl Serialize for Order {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Order {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// Names a command; nobody else's has the same.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CommandId(pub String);

impl CommandId {
    fn random() -> Self {
        Self(format!("{:032x}", fastrand::u128(..)))
    }
}

/// Where a command stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It waits.
    Requested,
    /// It was handed out.
    Taken,
    /// It was obeyed.
    Applied,
    /// Its time was over before anybody said that it was obeyed.
    Expired,
    /// Another took its place, or a stop stood.
    Replaced,
}

/// What became of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Which.
    pub id: CommandId,
    /// For whom.
    pub target: Target,
    /// What to do.
    pub order: Order,
    /// Where it stands.
    pub state: State,
    /// When it was put.
    pub created: SystemTime,
    /// From then on nobody obeys it.
    pub expires: SystemTime,
}

/// A command, handed out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    /// Which.
    pub id: CommandId,
    /// What to do.
    pub order: Order,
    /// How long it still holds.
    pub left: Duration,
}

/// There may be a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wake {
    /// For this one.
    Of(Target),
    /// For anybody: some wake-ups may be lost.
    Any,
}

/// Why the bus did not do what it was asked. None tells a password.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BusError {
    /// Try again later.
    #[error("the command bus cannot be reached")]
    Unavailable(#[source] Box<dyn Error + Send + Sync>),
    /// Look at what is wrong with it.
    #[error("the command bus failed")]
    Failed(#[source] Box<dyn Error + Send + Sync>),
    /// Whoever it is for does not listen: wait until what waits for it is over.
    #[error("{MOST} commands wait for it already")]
    TooMany,
    /// Correct the URL.
    #[error("the URL of the command bus cannot be used: {0}")]
    BadUrl(String),
}

/// Brings commands to workers and supervisors. Every driver is one, and passes the same suite.
#[async_trait]
pub trait Bus: Send + Sync + 'static {
    /// Has a command wait for a target, for so long; durable as far as what is beneath it is.
    async fn put(&self, target: &Target, order: &Order, ttl: Duration) -> Result<Record, BusError>;

    /// Hands out what waits for a target, in the order in which it was put: to one of those who ask at once.
    async fn take(&self, target: &Target) -> Result<Vec<Taken>, BusError>;

    /// Takes note that commands that were handed out were obeyed.
    async fn applied(&self, ids: &[CommandId]) -> Result<(), BusError>;

    /// What became of a command; nothing after a while.
    async fn command(&self, id: &CommandId) -> Result<Option<Record>, BusError>;

    /// Those of the targets for whom something may wait.
    async fn waiting(&self, targets: &[Target]) -> Result<Vec<Target>, BusError>;

    /// What is put from now on, by anybody.
    fn wakes(&self) -> broadcast::Receiver<Wake>;
}

/// What is over by its time.
fn in_time(state: State, is_over: bool) -> State {
    match state {
        State::Requested | State::Taken if is_over => State::Expired,
        state => state,
    }
}

fn state_of(number: i64) -> State {
    match number {
        1 => State::Taken,
        2 => State::Applied,
        3 => State::Replaced,
        _ => State::Requested,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_a_line_of_text_and_comes_back() {
        let start = Order::Start { queue: "media".into(), count: 2 };
        for (order, text) in [
            (Order::Stop, "stop"),
            (Order::Pause, "pause"),
            (Order::Resume, "resume"),
            (Order::Restart, "restart"),
            (Order::Terminate, "terminate"),
            (start, "start media 2"),
        ] {
            assert_eq!(order.to_string(), text);
            assert_eq!(text.parse(), Ok(order));
        }
        for wrong in ["", "halt", "stop now", "start media", "start media many", "start a 1 2"] {
            assert!(wrong.parse::<Order>().is_err(), "{wrong}");
        }
    }
}
