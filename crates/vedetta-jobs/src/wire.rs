//! Jobs as JSON over HTTP, written once for the server, [`crate::remote`] and the program.
//!
//! What a client sends may have no other fields than these; what it is answered may get more. Tokens are
//! text, for not every language has whole numbers of 64 bits, and say nothing to a client.

use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use vedetta_core::queue::Settled;
use vedetta_core::{JobState, Trace};

use crate::job::{
    Claim, Enqueued, Fate, Filter, Given, Job, JobId, JobsError, Json, LARGEST, LONGEST_TEXT, Mode,
    NewJob, Note, QueueCounts, shortened, status, tail, traceparent,
};
use crate::kinds::Kinds;
use crate::worker::BACKOFF;

/// How long a lease may last.
pub const LEASES: RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(24 * 3600);
/// The longest that a take waits for a job.
pub const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// The most that one take is given, as it would be asked for.
pub const MOST_TAKEN: u32 = 256;
/// The most jobs, ends or signs of life in one request.
pub const MOST_AT_ONCE: usize = 10_000;
/// The most bytes of them.
pub const LARGEST_BODY: usize = 8 << 20;

/// One, or several: what is answered has the same shape.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub enum OneOrMany<T> {
    /// One.
    One(T),
    /// Several.
    Many(Vec<T>),
}

/// Not derived: that would read through a buffer, which has no place for JSON as it was written.
impl<'de, T: Deserialize<'de>> Deserialize<'de> for OneOrMany<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Either<T> {
            type Value = OneOrMany<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("one, or an array of them")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(OneOrMany::One)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(seq)).map(OneOrMany::Many)
            }
        }

        deserializer.deserialize_any(Either(PhantomData))
    }
}

/// A job that was asked for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Added {
    /// It, or the one that waited under its key.
    pub id: JobId,
    /// What is to be done.
    pub kind: String,
    /// Where it waits.
    pub queue: String,
    /// That it does.
    #[serde(with = "status")]
    pub status: JobState,
    /// There was none under its key.
    pub new: bool,
    /// The server knows a handler of its kind; others may have one all the same.
    #[serde(default = "yes")]
    pub declared: bool,
}

/// What a server that does not say so is taken to know.
fn yes() -> bool {
    true
}

impl Added {
    /// What became of `job`, where these kinds are known.
    pub fn new(job: &NewJob, Enqueued { id, is_new }: Enqueued, kinds: &Kinds) -> Self {
        let (kind, queue) = (job.kind.clone(), job.queue.clone());
        let declared = kinds.0.contains_key(&kind);
        Self { id, kind, queue, status: JobState::Waiting, new: is_new, declared }
    }
}

/// Which jobs to list or to retry: those that all of it fits.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Which {
    /// Where it stands.
    pub status: Option<String>,
    /// In this queue.
    pub queue: Option<String>,
    /// Of this kind.
    pub kind: Option<String>,
    /// With this tag.
    pub tag: Option<String>,
    /// With this in its payload, its error, its unique key or its kind.
    pub q: Option<String>,
    /// From where another answer ended.
    pub cursor: Option<String>,
}

impl Which {
    /// The filter, and where to go on.
    pub fn parse(self) -> Result<(Filter, Option<JobId>), JobsError> {
        let status = self.status.map(|word| {
            status::parse(&word).ok_or_else(|| {
                let words = JobState::ALL.map(status::word).join(", ");
                JobsError::Invalid(format!("{word:?} is no status: those are {words}"))
            })
        });
        let cursor = self.cursor.map(|text| {
            let wrong = |_| JobsError::Invalid("the cursor is not one of this list".into());
            text.parse().map_err(wrong)
        });
        let filter = Filter {
            status: status.transpose()?,
            queue: self.queue,
            kind: self.kind,
            tag: self.tag,
            text: self.q,
        };
        Ok((filter, cursor.transpose()?))
    }

    /// What of it was given, by name.
    pub fn given(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let all = [
            ("status", &self.status),
            ("queue", &self.queue),
            ("kind", &self.kind),
            ("tag", &self.tag),
            ("q", &self.q),
            ("cursor", &self.cursor),
        ];
        all.into_iter().filter_map(|(name, value)| Some((name, value.as_deref()?)))
    }
}

/// Some jobs, the newest first.
#[derive(Debug, Serialize, Deserialize)]
pub struct Listed {
    /// They.
    pub jobs: Vec<Job>,
    /// Go on from here; nothing: these were the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
}

/// A job that was changed by hand.
#[derive(Debug, Serialize, Deserialize)]
pub struct Changed {
    /// Which.
    pub id: JobId,
    /// Where it stands now.
    #[serde(with = "status")]
    pub status: JobState,
}

/// A job that was removed.
#[derive(Debug, Serialize, Deserialize)]
pub struct Deleted {
    /// Which.
    pub id: JobId,
    /// That it was.
    pub deleted: bool,
}

/// Jobs that were retried.
#[derive(Debug, Serialize, Deserialize)]
pub struct Retried {
    /// How many.
    pub retried: u64,
    /// Ask again from here: there may be more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
}

/// All queues.
#[derive(Debug, Serialize, Deserialize)]
pub struct Queues {
    /// They.
    pub queues: Vec<QueueInfo>,
}

/// What is in a queue.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct QueueInfo {
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
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest_ms: Option<u64>,
    /// Slots of those that are handed out.
    pub slots: u64,
    /// Slots of the workers that took jobs from the server lately.
    #[serde(default)]
    pub capacity: u64,
    /// Done in the last minute.
    #[serde(default)]
    pub done_per_minute: u64,
    /// Attempts that failed in the last minute.
    #[serde(default)]
    pub failed_per_minute: u64,
}

impl From<QueueCounts> for QueueInfo {
    fn from(counts: QueueCounts) -> Self {
        Self {
            name: counts.name,
            mode: counts.mode,
            ready: counts.ready,
            scheduled: counts.scheduled,
            running: counts.running,
            done: counts.done,
            dead: counts.dead,
            cancelled: counts.cancelled,
            oldest_ms: counts.oldest.map(millis),
            slots: counts.slots,
            capacity: 0,
            done_per_minute: 0,
            failed_per_minute: 0,
        }
    }
}

/// A queue that was told whether to take and give.
#[derive(Debug, Serialize, Deserialize)]
pub struct QueueMode {
    /// Which.
    pub name: String,
    /// What it does now.
    pub mode: Mode,
}

/// What a worker asks for.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Take {
    /// Who it is.
    pub worker: String,
    /// How many jobs; with a capacity, how many slots of it are free.
    #[serde(default = "one")]
    pub max: u32,
    /// How long to wait for the first.
    #[serde(default)]
    pub wait_ms: u64,
    /// How many slots it has: a job takes as many as it costs, and at most all.
    #[serde(default)]
    pub capacity: Option<u32>,
    /// How long it has a job for, unless it is kept.
    #[serde(default)]
    pub lease_ms: Option<u64>,
}

fn one() -> u32 {
    1
}

/// What a worker gets.
#[derive(Debug, Serialize, Deserialize)]
pub struct Taken {
    /// Handed out.
    pub jobs: Vec<GivenJob>,
    /// There is no more: nothing is due for so long, as far as is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rest_ms: Option<u64>,
}

/// A job that was handed out.
#[derive(Debug, Serialize, Deserialize)]
pub struct GivenJob {
    /// Which.
    pub id: JobId,
    /// The proof.
    pub token: Token,
    /// It is to be kept before so long.
    pub lease_ms: u64,
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
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// To find it by.
    pub tags: Vec<String>,
    /// The place in a trace that this attempt is below of.
    #[serde(
        default,
        rename = "traceparent",
        with = "traceparent",
        skip_serializing_if = "Option::is_none"
    )]
    pub trace: Option<Trace>,
    /// How long it had been due.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited_ms: Option<u64>,
}

impl GivenJob {
    /// Handed out for so long.
    pub fn new(given: Given, lease: Duration) -> Self {
        Self {
            id: given.claim.id,
            token: Token { token: given.claim.token, lease },
            lease_ms: millis(lease),
            kind: given.kind,
            payload: given.payload,
            cost: given.cost,
            attempt: given.attempt,
            max_attempts: given.max_attempts,
            timeout_ms: given.timeout.map(millis),
            tags: given.tags,
            trace: given.trace,
            waited_ms: given.waited.map(millis),
        }
    }
}

impl From<GivenJob> for Given {
    fn from(job: GivenJob) -> Self {
        Self {
            claim: Claim { id: job.id, token: job.token.token },
            kind: job.kind,
            payload: job.payload,
            cost: job.cost,
            attempt: job.attempt,
            max_attempts: job.max_attempts,
            timeout: job.timeout_ms.map(Duration::from_millis),
            tags: job.tags,
            trace: job.trace,
            waited: job.waited_ms.map(Duration::from_millis),
        }
    }
}

/// The proof that a job was handed out. It has the lease with it, so that nobody has to remember how long
/// that was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Token {
    /// The proof.
    pub token: i64,
    /// How long a lease it is.
    pub lease: Duration,
}

/// Who has but the claim does not care how long the lease is.
impl From<Claim> for Token {
    fn from(claim: Claim) -> Self {
        Self { token: claim.token, lease: Duration::ZERO }
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.token, millis(self.lease))
    }
}

impl FromStr for Token {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once(':');
        let numbers = parts.and_then(|(token, lease)| {
            Some((token.parse().ok()?, Duration::from_millis(lease.parse().ok()?)))
        });
        let (token, lease) =
            numbers.ok_or("the token is not one that a job was handed out with")?;
        Ok(Self { token, lease })
    }
}

impl Serialize for Token {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Token {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// A sign of life of a job, and what there is to tell of it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Keep {
    /// Which; in the path if it is but one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<JobId>,
    /// The proof.
    pub token: Token,
    /// How much of it is done, from 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<f32>,
    /// What it is at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// What is new in its log.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub log: String,
}

impl Keep {
    /// A claim's sign of life as it is sent: with no more than is kept of it.
    pub fn new(claim: Claim, note: &Note) -> Self {
        Self {
            id: Some(claim.id),
            token: claim.into(),
            progress: note.progress,
            message: note.message.as_deref().map(|message| shortened(message, LONGEST_TEXT)),
            log: tail("", &note.log),
        }
    }

    /// What there is to tell, if it can be true.
    pub fn note(self) -> Result<Note, JobsError> {
        match self.progress {
            Some(progress) if !(0.0..=1.0).contains(&progress) => {
                Err(JobsError::Invalid(format!("the progress is {progress}: give 0 to 1")))
            }
            progress => Ok(Note { progress, message: self.message, log: self.log }),
        }
    }
}

/// What a worker hears when it gives a sign of life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// The job was called off: end it.
    pub cancel: bool,
    /// The lease has lapsed, and the job may be somebody else's. Of one job alone that is a conflict.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stale: bool,
    /// It is to be kept before so long.
    pub lease_ms: u64,
}

/// How a job ended.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settle {
    /// Which; in the path if it is but one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<JobId>,
    /// The proof.
    pub token: Token,
    /// How.
    pub outcome: Outcome,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What came of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Json>,
    /// It is tried again after so long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delay_ms: Option<u64>,
}

/// How a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It is done.
    Done,
    /// It failed: it is tried again if it has attempts left.
    Failed,
    /// It failed, and is tried again after the delay, whatever its attempts.
    Again,
    /// It failed for good.
    Dead,
    /// It asks to be tried after the delay; this attempt does not count.
    Snooze,
    /// As if it had not been handed out.
    Released,
}

/// What a worker said of an end: most is clear at once, and for the rest the attempts must be known.
#[derive(Debug)]
pub enum Verdict {
    /// This is to become of it.
    Clear(Fate),
    /// It failed.
    Failed {
        /// Why.
        error: String,
        /// When to try again.
        after: Option<Duration>,
    },
}

impl Verdict {
    /// What becomes of a job that failed the `attempts`th time of `most`. `chance` is from 0 to 1.
    pub fn fate(self, attempts: u32, most: u32, chance: f64) -> Fate {
        match self {
            Self::Clear(fate) => fate,
            Self::Failed { error, .. } if attempts >= most => Fate::Dead { error },
            Self::Failed { error, after } => {
                let backoff = || BACKOFF.delay(attempts.saturating_sub(1), chance);
                Fate::Again { after: after.unwrap_or_else(backoff), error }
            }
        }
    }
}

impl Settle {
    /// A claim's end as it is sent.
    pub fn new(claim: Claim, fate: Fate) -> Self {
        let (outcome, error, result, delay) = match fate {
            Fate::Done { result } => (Outcome::Done, None, result, None),
            Fate::Again { after, error } => {
                (Outcome::Again, Some(shortened(&error, LONGEST_TEXT)), None, Some(after))
            }
            Fate::Dead { error } => {
                (Outcome::Dead, Some(shortened(&error, LONGEST_TEXT)), None, None)
            }
            Fate::Snooze(after) => (Outcome::Snooze, None, None, Some(after)),
            Fate::Released => (Outcome::Released, None, None, None),
        };
        let token = claim.into();
        Self { id: Some(claim.id), token, outcome, error, result, delay_ms: delay.map(millis) }
    }

    /// What is meant, if it can be.
    pub fn verdict(self) -> Result<Verdict, JobsError> {
        let refuse = |what: &str| Err(JobsError::Invalid(what.into()));
        let after = self.delay_ms.map(Duration::from_millis);
        match &self.result {
            Some(_) if self.outcome != Outcome::Done => {
                return refuse("a result is for a job that is done");
            }
            Some(result) if result.get().len() > LARGEST => {
                return refuse("the result has more than 1 MiB");
            }
            _ => {}
        }
        if self.error.is_some()
            && !matches!(self.outcome, Outcome::Failed | Outcome::Again | Outcome::Dead)
        {
            return refuse("an error is for a job that failed");
        }
        if after.is_some()
            && !matches!(self.outcome, Outcome::Failed | Outcome::Again | Outcome::Snooze)
        {
            return refuse("delay_ms is for a job that is tried again");
        }
        let error = self.error.unwrap_or_else(|| "it failed, and said no more".into());
        Ok(Verdict::Clear(match (self.outcome, after) {
            (Outcome::Failed, after) => return Ok(Verdict::Failed { error, after }),
            (Outcome::Done, _) => Fate::Done { result: self.result },
            (Outcome::Dead, _) => Fate::Dead { error },
            (Outcome::Released, _) => Fate::Released,
            (Outcome::Again, Some(after)) => Fate::Again { after, error },
            (Outcome::Snooze, Some(after)) => Fate::Snooze(after),
            (Outcome::Again | Outcome::Snooze, None) => {
                return refuse("say after how long, as delay_ms");
            }
        }))
    }
}

/// What became of a job that was settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "settled", rename_all = "lowercase")]
pub enum Settlement {
    /// It is over, as it should be.
    Done,
    /// It is tried again.
    Again {
        /// After so long.
        delay_ms: u64,
    },
    /// It failed for good.
    Dead,
    /// The lease had lapsed, or it was called off: nothing was stored. Of one job alone that is a conflict.
    Stale,
}

impl From<Settled> for Settlement {
    fn from(settled: Settled) -> Self {
        match settled {
            Settled::Gone => Self::Done,
            Settled::Again(after) => Self::Again { delay_ms: millis(after) },
            Settled::Parked => Self::Dead,
            Settled::Stale => Self::Stale,
        }
    }
}

impl From<Settlement> for Settled {
    fn from(settlement: Settlement) -> Self {
        match settlement {
            Settlement::Done => Self::Gone,
            Settlement::Again { delay_ms } => Self::Again(Duration::from_millis(delay_ms)),
            Settlement::Dead => Self::Parked,
            Settlement::Stale => Self::Stale,
        }
    }
}

/// What is wrong with one of several, from 1.
pub fn number(number: usize, what: &impl fmt::Display) -> String {
    format!("number {number} of them: {what}")
}

/// The same, taken apart.
pub fn numbered(text: &str) -> Option<(usize, &str)> {
    let (number, what) = text.strip_prefix("number ")?.split_once(" of them: ")?;
    Some((number.parse().ok()?, what))
}

/// What a server says of a request that it refused.
#[derive(Debug, Deserialize)]
pub struct Refusal {
    /// Why.
    pub error: Why,
}

/// Why a request was refused.
#[derive(Debug, Deserialize)]
pub struct Why {
    /// In a sentence.
    pub message: String,
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_or_many_are_read_as_they_were_written() {
        let one: OneOrMany<NewJob> =
            serde_json::from_str(r#"{"kind": "a", "payload": { "b":1.0000000000000000001 }}"#)
                .unwrap();
        let OneOrMany::One(job) = one else { panic!("{one:?}") };
        assert_eq!(job.payload.get(), r#"{ "b":1.0000000000000000001 }"#);
        let many = serde_json::from_str(r#"[{"kind": "a", "payload": 1}, {"kind": "b"}]"#).unwrap();
        let OneOrMany::<NewJob>::Many(jobs) = many else { panic!("{many:?}") };
        assert_eq!((jobs[0].payload.get(), jobs[1].payload.get()), ("1", "null"));
        for wrong in ["7", r#"{"kind": "a", "colour": 1}"#, r#"[{"colour": 1}]"#, "{}"] {
            assert!(serde_json::from_str::<OneOrMany<NewJob>>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_token_comes_back_as_it_went_out() {
        for token in [0, -1, i64::MAX, i64::MIN] {
            let token = Token { token, lease: Duration::from_millis(30_000) };
            let json = serde_json::to_string(&token).unwrap();
            assert!(json.starts_with('"'), "{json}");
            assert_eq!(serde_json::from_str::<Token>(&json).unwrap(), token);
        }
        for wrong in ["", "7", ":", "a:1", "1:a", "1:-1"] {
            assert!(wrong.parse::<Token>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_a_worker_leaves_to_the_server_depends_on_the_attempts_and_on_nothing_else() {
        let end = |json: &str| {
            let json = format!(r#"{{"token": "1:1", {json}}}"#);
            serde_json::from_str::<Settle>(&json).unwrap().verdict()
        };
        let fate = |json: &str, attempts| end(json).unwrap().fate(attempts, 3, 0.0);
        let failed = r#""outcome": "failed", "error": "no stock""#;
        for (attempts, seconds) in [(1, 1), (2, 2)] {
            let fate = fate(failed, attempts);
            let Fate::Again { after, error } = fate else { panic!("{fate:?}") };
            assert_eq!((after, error.as_str()), (Duration::from_secs(seconds), "no stock"));
        }
        assert!(matches!(fate(failed, 3), Fate::Dead { .. }));
        let delayed = r#""outcome": "failed", "delay_ms": 5"#;
        assert!(matches!(fate(delayed, 1), Fate::Again { after, .. } if after.as_millis() == 5));
        assert!(matches!(fate(delayed, 3), Fate::Dead { .. }), "a delay is no further attempt");
        let again = r#""outcome": "again", "delay_ms": 5"#;
        assert!(matches!(fate(again, 3), Fate::Again { .. }));
        for wrong in [
            r#""outcome": "snooze""#,
            r#""outcome": "again""#,
            r#""outcome": "dead", "result": 1"#,
            r#""outcome": "done", "error": "no""#,
            r#""outcome": "done", "delay_ms": 1"#,
        ] {
            assert!(matches!(end(wrong), Err(JobsError::Invalid(_))), "{wrong}");
        }
    }

    #[test]
    fn every_end_comes_back_as_it_went_out() {
        let claim = Claim { id: JobId(7), token: 9 };
        for fate in [
            Fate::Done { result: None },
            Fate::Again { after: Duration::from_millis(3), error: "a".into() },
            Fate::Dead { error: "b".into() },
            Fate::Snooze(Duration::from_millis(4)),
            Fate::Released,
        ] {
            let json = serde_json::to_string(&Settle::new(claim, fate.clone())).unwrap();
            let back: Settle = serde_json::from_str(&json).unwrap();
            assert_eq!((back.id, back.token.token), (Some(claim.id), claim.token));
            let Verdict::Clear(back) = back.verdict().unwrap() else { panic!("{json}") };
            assert_eq!(format!("{back:?}"), format!("{fate:?}"));
        }
    }

    #[test]
    fn a_number_is_taken_apart_as_it_was_put_together() {
        assert_eq!(numbered(&number(12, &"it is: wrong")), Some((12, "it is: wrong")));
        assert_eq!(numbered("the payload is wrong"), None);
    }
}
