//! What a job is: as it is asked for, as it is handed out, and as it is shown.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use vedetta_core::{JobState, Trace};

/// The queue of jobs that name none.
pub const DEFAULT_QUEUE: &str = "default";

/// JSON, as it was written.
pub type Json = Box<RawValue>;

/// Bytes of a payload or a result.
pub const LARGEST: usize = 1 << 20;
/// Bytes of a name of a kind, a queue, a worker or a tag.
pub const LONGEST_NAME: usize = 128;
/// Bytes of a unique key.
pub const LONGEST_KEY: usize = 512;
/// Tags of a job.
pub const MOST_TAGS: usize = 16;
/// Priorities are from minus this to this.
pub const HIGHEST_PRIORITY: i16 = 100;
/// Bytes of an error or a message that are kept.
pub const LONGEST_TEXT: usize = 4096;
/// Bytes of a job's log that are kept: the last ones.
pub const LOG_TAIL: usize = 16 << 10;

/// What one step of priority is worth: a job is taken before those of a priority one less that have waited
/// up to so much longer. So what is urgent goes first, and nothing waits for ever.
pub const PRIORITY_STEP: Duration = Duration::from_secs(60);

/// Which job. Unique in its queue's database, or its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(pub u64);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for JobId {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}

/// When a job may begin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum When {
    /// At once.
    #[default]
    Now,
    /// After so long.
    After(Duration),
    /// At that time.
    At(SystemTime),
}

/// `2026-11-16T10:00:00Z`, or `+10m`.
impl FromStr for When {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is no time: give one such as 2026-11-16T10:00:00Z or +10m");
        match text.strip_prefix('+') {
            Some(delay) => humantime::parse_duration(delay).map(Self::After).map_err(|_| wrong()),
            None => humantime::parse_rfc3339_weak(text).map(Self::At).map_err(|_| wrong()),
        }
    }
}

impl Serialize for When {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Now => serializer.serialize_none(),
            Self::After(delay) => {
                serializer.collect_str(&format_args!("+{}", humantime::format_duration(*delay)))
            }
            Self::At(at) => serializer.collect_str(&humantime::format_rfc3339_micros(*at)),
        }
    }
}

impl<'de> Deserialize<'de> for When {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Option::<String>::deserialize(deserializer)? {
            None => Ok(Self::Now),
            Some(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

/// A job that is asked for.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewJob {
    /// What is to be done: the name of a handler.
    pub kind: String,
    /// Where it waits.
    #[serde(default = "default_queue")]
    pub queue: String,
    /// What the handler is given.
    #[serde(default = "null")]
    pub payload: Json,
    /// How many slots it takes.
    #[serde(default = "one")]
    pub cost: u32,
    /// What is higher goes first, see [`PRIORITY_STEP`].
    #[serde(default)]
    pub priority: i16,
    /// When it may begin.
    #[serde(default)]
    pub run_at: When,
    /// How often it may be handed out, and not be given back, before it counts as dead.
    #[serde(default = "attempts")]
    pub max_attempts: u32,
    /// How long one attempt may take; nothing said: as long as its handler allows.
    #[serde(default, with = "humantime_serde")]
    pub timeout: Option<Duration>,
    /// Of those with the same key in a queue one waits at a time: the earliest time wins.
    #[serde(default)]
    pub unique_key: Option<String>,
    /// To find it by.
    #[serde(default)]
    pub tags: Vec<String>,
    /// The place in a trace that its attempts are below of.
    #[serde(
        default,
        rename = "traceparent",
        with = "traceparent",
        skip_serializing_if = "Option::is_none"
    )]
    pub trace: Option<Trace>,
}

fn default_queue() -> String {
    DEFAULT_QUEUE.into()
}

fn null() -> Json {
    RawValue::NULL.to_owned()
}

fn one() -> u32 {
    1
}

fn attempts() -> u32 {
    5
}

impl NewJob {
    /// A job of this kind in the default queue, with nothing to be told, at once.
    pub fn new(kind: impl Into<String>) -> Self {
        Self {
            kind: kind.into(),
            queue: default_queue(),
            payload: null(),
            cost: one(),
            priority: 0,
            run_at: When::Now,
            max_attempts: attempts(),
            timeout: None,
            unique_key: None,
            tags: Vec::new(),
            trace: None,
        }
    }

    /// The same, with its attempts below this place in a trace.
    #[must_use]
    pub fn trace(mut self, trace: Trace) -> Self {
        self.trace = Some(trace);
        self
    }

    /// The same in this queue.
    #[must_use]
    pub fn queue(mut self, queue: impl Into<String>) -> Self {
        self.queue = queue.into();
        self
    }

    /// The same with this payload.
    pub fn payload(mut self, payload: &impl Serialize) -> Result<Self, JobsError> {
        self.payload = to_raw_value(payload)
            .map_err(|error| JobsError::Invalid(format!("the payload is no JSON: {error}")))?;
        Ok(self)
    }

    /// The same, once of this key among those that wait.
    #[must_use]
    pub fn unique(mut self, key: impl Into<String>) -> Self {
        self.unique_key = Some(key.into());
        self
    }

    /// The same, not before.
    #[must_use]
    pub fn when(mut self, run_at: When) -> Self {
        self.run_at = run_at;
        self
    }

    /// Whether it can be taken on. Every backend asks before it stores any of a batch.
    pub fn check(&self) -> Result<(), JobsError> {
        check_name("kind", &self.kind)?;
        check_name("queue", &self.queue)?;
        let refuse = |what: String| Err(JobsError::Invalid(what));
        if self.payload.get().len() > LARGEST {
            return refuse(format!("the payload has more than {LARGEST} bytes"));
        }
        if self.cost == 0 || self.cost > i32::MAX.unsigned_abs() {
            return refuse(format!("the cost is {}: give 1 or more", self.cost));
        }
        if self.priority.abs() > HIGHEST_PRIORITY {
            let most = HIGHEST_PRIORITY;
            return refuse(format!("the priority is {}: give -{most} to {most}", self.priority));
        }
        if self.max_attempts == 0 || self.max_attempts > 1000 {
            return refuse(format!("max_attempts is {}: give 1 to 1000", self.max_attempts));
        }
        if self.timeout == Some(Duration::ZERO) {
            return refuse("the timeout is nothing: no attempt could be made".into());
        }
        if let Some(key) = &self.unique_key
            && (key.is_empty() || key.len() > LONGEST_KEY || key.contains('\0'))
        {
            return refuse(format!("unique_key has {} bytes: give 1 to {LONGEST_KEY}", key.len()));
        }
        if self.tags.len() > MOST_TAGS {
            return refuse(format!("it has {} tags: give {MOST_TAGS} at most", self.tags.len()));
        }
        self.tags.iter().try_for_each(|tag| check_name("tag", tag))
    }
}

/// Whether a name of a kind, a queue, a worker or a tag can be one.
pub fn check_name(what: &str, name: &str) -> Result<(), JobsError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._:/-".contains(c);
    if name.is_empty() || name.len() > LONGEST_NAME || !name.chars().all(fits) {
        return Err(JobsError::Invalid(format!(
            "the {what} {name:?} is no name: give 1 to {LONGEST_NAME} letters, digits or ._:/-"
        )));
    }
    Ok(())
}

/// What became of a job that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Enqueued {
    /// It, or the one that waited under its key.
    pub id: JobId,
    /// There was none under its key.
    pub is_new: bool,
}

/// A job that was handed out, and the proof of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Claim {
    /// Which.
    pub id: JobId,
    /// Nobody else has this one.
    pub token: i64,
}

/// A job that was handed out.
#[derive(Debug, Clone)]
pub struct Given {
    /// The proof.
    pub claim: Claim,
    /// What is to be done.
    pub kind: String,
    /// With this.
    pub payload: Json,
    /// How many slots it takes.
    pub cost: u32,
    /// The how manieth time it is, from 1.
    pub attempt: u32,
    /// After so many it counts as dead.
    pub max_attempts: u32,
    /// How long this attempt may take.
    pub timeout: Option<Duration>,
    /// To find it by.
    pub tags: Vec<String>,
    /// The place in a trace that its attempts are below of.
    pub trace: Option<Trace>,
    /// How long it had been due by now, if that is known.
    pub waited: Option<Duration>,
}

/// What there is to tell of a job that runs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Note {
    /// How much of it is done, from 0 to 1, if that is news.
    pub progress: Option<f32>,
    /// What it is at, if that is news.
    pub message: Option<String>,
    /// What is new in its log.
    pub log: String,
}

impl Note {
    /// There is nothing to tell.
    pub fn is_empty(&self) -> bool {
        self.progress.is_none() && self.message.is_none() && self.log.is_empty()
    }

    /// Adds what was to be told before, and is still.
    pub(crate) fn add_older(&mut self, old: Self) {
        self.progress = self.progress.or(old.progress);
        self.message = self.message.take().or(old.message);
        self.log = tail(&old.log, &self.log);
    }
}

/// What is to become of a job that was handed out.
#[derive(Debug, Clone)]
pub enum Fate {
    /// It is done.
    Done {
        /// What came of it.
        result: Option<Json>,
    },
    /// It failed, and is tried again, whatever its attempts: who has it fail for the last time says that it is dead.
    /// A stream, which would not hand it out once more, has it be dead then.
    Again {
        /// After so long.
        after: Duration,
        /// Why.
        error: String,
    },
    /// It failed for good.
    Dead {
        /// Why.
        error: String,
    },
    /// It asks to be tried later; this attempt does not count.
    Snooze(Duration),
    /// As if it had not been handed out.
    Released,
}

/// A job, for people.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    /// Which.
    pub id: JobId,
    /// What is to be done.
    pub kind: String,
    /// Where it waits.
    pub queue: String,
    /// What keeps it: `sqlite`, `postgres`, or `nats` and its stream.
    pub connection: String,
    /// Where it stands.
    #[serde(with = "status")]
    pub status: JobState,
    /// With what.
    pub payload: Json,
    /// How many slots it takes.
    pub cost: u32,
    /// See [`PRIORITY_STEP`].
    pub priority: i16,
    /// How often it was handed out and not given back.
    pub attempts: u32,
    /// After so many it counts as dead.
    pub max_attempts: u32,
    /// How long one attempt may take.
    #[serde(with = "humantime_serde")]
    pub timeout: Option<Duration>,
    /// One waits at a time.
    pub unique_key: Option<String>,
    /// To find it by.
    pub tags: Vec<String>,
    /// The place in a trace that its attempts are below of.
    #[serde(
        default,
        rename = "traceparent",
        with = "traceparent",
        skip_serializing_if = "Option::is_none"
    )]
    pub trace: Option<Trace>,
    /// How much of it is done, from 0 to 1.
    pub progress: f32,
    /// What it is at.
    pub message: Option<String>,
    /// The end of its log.
    pub log: String,
    /// What came of it.
    pub result: Option<Json>,
    /// Why it failed last.
    pub error: Option<String>,
    /// Who works on it, or did last.
    pub worker: Option<String>,
    /// When it was asked for.
    #[serde(with = "stamp")]
    pub queued_at: SystemTime,
    /// When it may begin.
    #[serde(with = "stamp")]
    pub run_at: SystemTime,
    /// When its last attempt began.
    #[serde(with = "stamp::maybe")]
    pub started_at: Option<SystemTime>,
    /// When it was over.
    #[serde(with = "stamp::maybe")]
    pub ended_at: Option<SystemTime>,
    /// When anything of this last changed.
    #[serde(with = "stamp")]
    pub updated_at: SystemTime,
}

/// Times as they are shown: to the millisecond.
pub mod stamp {
    use std::time::SystemTime;

    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    /// A time.
    pub fn serialize<S: Serializer>(at: &SystemTime, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&humantime::format_rfc3339_millis(*at))
    }

    /// The time of a text.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<SystemTime, D::Error> {
        humantime::parse_rfc3339_weak(&String::deserialize(from)?).map_err(D::Error::custom)
    }

    /// The same for those that may not have come yet.
    pub mod maybe {
        use std::time::SystemTime;

        use serde::de::Error as _;
        use serde::{Deserialize, Deserializer, Serializer};

        /// A time, or nothing.
        pub fn serialize<S: Serializer>(at: &Option<SystemTime>, to: S) -> Result<S::Ok, S::Error> {
            match at {
                Some(at) => super::serialize(at, to),
                None => to.serialize_none(),
            }
        }

        /// The time of a text, if there is one.
        pub fn deserialize<'de, D: Deserializer<'de>>(
            from: D,
        ) -> Result<Option<SystemTime>, D::Error> {
            let text = Option::<String>::deserialize(from)?;
            text.map(|text| humantime::parse_rfc3339_weak(&text).map_err(D::Error::custom))
                .transpose()
        }
    }
}

/// Places in traces as W3C writes them.
pub(crate) mod traceparent {
    use serde::{Deserialize, Deserializer, Serializer};
    use vedetta_core::Trace;

    #[expect(clippy::ref_option, reason = "serde wants it so")]
    pub(crate) fn serialize<S: Serializer>(
        trace: &Option<Trace>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match trace {
            Some(trace) => to.collect_str(trace),
            None => to.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Trace>, D::Error> {
        let Some(text) = Option::<String>::deserialize(from)? else { return Ok(None) };
        let wrong = |why| serde::de::Error::custom(format!("{text:?} is no traceparent: {why}"));
        text.parse().map(Some).map_err(wrong)
    }
}

/// States as words.
pub mod status {
    use serde::{Deserialize, Deserializer, Serializer};
    use vedetta_core::JobState;

    /// The word for a state.
    pub fn word(state: JobState) -> &'static str {
        match state {
            JobState::Waiting => "waiting",
            JobState::Running => "running",
            JobState::Done => "done",
            JobState::Dead => "dead",
            JobState::Cancelled => "cancelled",
        }
    }

    /// The state for a word.
    pub fn parse(text: &str) -> Option<JobState> {
        JobState::ALL.into_iter().find(|state| word(*state) == text)
    }

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants it so")]
    pub(crate) fn serialize<S: Serializer>(state: &JobState, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(word(*state))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<JobState, D::Error> {
        let text = String::deserialize(from)?;
        parse(&text).ok_or_else(|| serde::de::Error::custom(format!("{text:?} is no status")))
    }
}

/// Which jobs to show or to retry: those that all of it fits.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Where it stands.
    pub status: Option<JobState>,
    /// In this queue.
    pub queue: Option<String>,
    /// Of this kind.
    pub kind: Option<String>,
    /// With this tag.
    pub tag: Option<String>,
    /// With this in its payload, its error, its unique key or its kind; capitals count.
    pub text: Option<String>,
}

/// Some jobs, the newest first.
#[derive(Debug, Clone, Default)]
pub struct Page {
    /// They.
    pub jobs: Vec<Job>,
    /// Go on with those before this one; nothing: these were the last. A page may be short, or empty, and
    /// there may still be more: a long search is cut into pages, too.
    pub next: Option<JobId>,
}

/// Whether a queue takes and gives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Both.
    #[default]
    Open,
    /// It hands nothing out; what runs goes on.
    Paused,
    /// It takes nothing on, and what waits is worked off.
    Draining,
}

/// What is in a queue.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct QueueCounts {
    /// Which.
    pub name: String,
    /// Whether it takes and gives.
    pub mode: Mode,
    /// Due, and not handed out.
    pub ready: u64,
    /// For later.
    pub scheduled: u64,
    /// Handed out.
    pub running: u64,
    /// Kept after it was done.
    pub done: u64,
    /// Failed for good.
    pub dead: u64,
    /// Called off.
    pub cancelled: u64,
    /// How long the one that waits the longest has been due.
    pub oldest: Option<Duration>,
    /// Slots of those that are handed out.
    pub slots: u64,
}

/// What came of a change by hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It was made.
    Made,
    /// There is no such job.
    NoSuch,
    /// Where it stands this cannot be.
    Not(JobState),
}

/// Why jobs could not be dealt with, by what to do next.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobsError {
    /// Ask for something else. Nothing was stored.
    #[error("{0}")]
    Invalid(String),
    /// The queue is being drained: resume it, or use another. Nothing was stored.
    #[error("the queue {0:?} is being drained and takes no new jobs")]
    Draining(String),
    /// What keeps them cannot be reached, or cannot answer now: try again.
    #[error("the jobs cannot be reached now")]
    Unavailable(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// What keeps them refused what it was asked.
    #[error("the jobs' database refused")]
    Failed(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl JobsError {
    /// Whether to try again.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable(_))
    }
}

/// At most so many bytes, of whole characters; without what no database keeps.
pub(crate) fn shortened(text: &str, most: usize) -> String {
    let end = (0..=most.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    text[..end].replace('\0', "\u{fffd}")
}

/// The log with more of it, its last [`LOG_TAIL`] bytes, of whole lines where there are any.
pub(crate) fn tail(log: &str, more: &str) -> String {
    let whole = format!("{log}{more}").replace('\0', "\u{fffd}");
    if whole.len() <= LOG_TAIL {
        return whole;
    }
    let from = whole.len() - LOG_TAIL;
    let from = (from..=whole.len()).find(|at| whole.is_char_boundary(*at)).unwrap_or(whole.len());
    let cut = &whole[from..];
    cut.find('\n').map_or(cut, |end| &cut[end + 1..]).to_owned()
}
