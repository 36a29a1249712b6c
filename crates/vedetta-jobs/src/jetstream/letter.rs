//! Messages as jobs, and jobs as messages.
//!
//! The body is the payload; all else is in headers, so that a job can be written by hand:
//!
//! ```text
//! Vedetta-Kind: transcode      Vedetta-Max-Attempts: 5      Vedetta-Tags: eu,film
//! Vedetta-Cost: 4              Vedetta-Timeout: 6h          traceparent: 00-…
//! ```

use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_nats::jetstream::{Context, message::PublishMessage};
use async_nats::{HeaderMap, HeaderName, Message, Subject};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use serde_json::value::{RawValue, to_raw_value};

use vedetta_core::Trace;

use super::{Options, whole_millis};
use crate::job::{Claim, JobId, Json, LONGEST_TEXT, NewJob, check_name, shortened};

const KIND: &str = "Vedetta-Kind";
const COST: &str = "Vedetta-Cost";
const MAX_ATTEMPTS: &str = "Vedetta-Max-Attempts";
const TIMEOUT: &str = "Vedetta-Timeout";
const TAGS: &str = "Vedetta-Tags";
/// As others call it, too: whoever publishes may be traced.
const TRACE: &str = "traceparent";

/// Room for the headers of a dead letter, beside those that the message had.
pub(super) const HEADERS: usize = LONGEST_TEXT + 2048;

/// What a job says of itself.
#[derive(Debug, Clone)]
pub(super) struct Asked {
    pub kind: String,
    pub cost: u32,
    pub max_attempts: u32,
    pub timeout: Option<Duration>,
    pub tags: Vec<String>,
    pub trace: Option<Trace>,
}

impl Asked {
    pub(super) fn of(job: &NewJob) -> Self {
        let NewJob { kind, cost, max_attempts, timeout, tags, trace, .. } = job.clone();
        Self { kind, cost, max_attempts, timeout, tags, trace }
    }

    fn read(
        headers: Option<&HeaderMap>,
        payload: impl FnOnce() -> Json,
        options: &Options,
    ) -> Result<Self, String> {
        // There are few: to look at each is quicker than to ask for one by its name.
        let header = |name: &str| {
            let is_it = |found: &HeaderName| AsRef::<str>::as_ref(found) == name;
            let (_, values) = headers?.iter().find(|(found, _)| is_it(found))?;
            values.last().map(async_nats::HeaderValue::as_str)
        };
        let Some(kind) = header(KIND).or(options.default_kind.as_deref()) else {
            return Err(format!("it has no header {KIND}, and there is no default kind"));
        };
        check_name("kind", kind).map_err(|error| error.to_string())?;
        // What the message does not say, its kind does.
        let known = options.kinds.0.get(kind);
        let cost = match (number(COST, header(COST))?, known) {
            (Some(cost), _) => cost,
            (None, Some(known)) => known.cost.of(&payload()).map_err(|error| error.to_string())?,
            (None, None) => 1,
        };
        let attempts = number(MAX_ATTEMPTS, header(MAX_ATTEMPTS))?;
        let mut tags = header(TAGS).into_iter().flat_map(|tags| tags.split(','));
        let timeout = |text: &str| humantime::parse_duration(text).ok().filter(|t| !t.is_zero());
        let timeout = match header(TIMEOUT) {
            None => known.and_then(|known| known.timeout),
            Some(text) => Some(timeout(text).ok_or_else(|| wrong(TIMEOUT, text))?),
        };
        Ok(Self {
            kind: kind.to_owned(),
            cost,
            max_attempts: attempts.or(known.map(|known| known.max_attempts)).unwrap_or(5),
            timeout,
            tags: tags
                .by_ref()
                .map(|tag| tag.trim().to_owned())
                .filter(|t| !t.is_empty())
                .collect(),
            // One that cannot be read is not the job's fault.
            trace: header(TRACE).and_then(|text| text.parse().ok()),
        })
    }
}

fn wrong(name: &str, text: &str) -> String {
    format!("its header {name} says {text:?}")
}

fn number(name: &str, text: Option<&str>) -> Result<Option<u32>, String> {
    let Some(text) = text else { return Ok(None) };
    match u32::from_str(text) {
        Ok(number) if number > 0 => Ok(Some(number)),
        _ => Err(wrong(name, text)),
    }
}

/// A job as a message.
pub(super) fn write(job: &NewJob, stream: &str) -> PublishMessage {
    let mut message = PublishMessage::build()
        .payload(Bytes::copy_from_slice(job.payload.get().as_bytes()))
        .expected_stream(stream)
        .header(KIND, job.kind.as_str())
        .header(COST, job.cost.to_string())
        .header(MAX_ATTEMPTS, job.max_attempts.to_string());
    if let Some(timeout) = job.timeout {
        message = message.header(TIMEOUT, humantime::format_duration(timeout).to_string());
    }
    if !job.tags.is_empty() {
        message = message.header(TAGS, job.tags.join(","));
    }
    if let Some(trace) = job.trace {
        message = message.header(TRACE, trace.to_string());
    }
    message
}

/// A message that was delivered.
#[derive(Debug)]
pub(super) struct Letter {
    message: Message,
    /// Where its acknowledgements go. Each delivery has its own.
    pub reply: Subject,
    pub sequence: u64,
    /// No two deliveries of a consumer have the same.
    pub delivery: i64,
    /// How often it was delivered, with this time.
    pub delivered: u32,
    pub published: SystemTime,
    /// Or why it is no job.
    pub asked: Result<Asked, String>,
}

/// Reads messages with one context: a copy of it for each would cost as much as the reading.
pub(super) struct Reader(async_nats::jetstream::Message);

impl Reader {
    pub(super) fn new(context: &Context) -> Self {
        let message = Message {
            subject: Subject::from_static(""),
            reply: None,
            payload: Bytes::new(),
            headers: None,
            status: None,
            description: None,
            length: 0,
        };
        Self(async_nats::jetstream::Message { message, context: context.clone() })
    }

    /// Nothing if it is no message of a stream.
    pub(super) fn read(&mut self, message: Message, options: &Options) -> Option<Arc<Letter>> {
        let reply = message.reply.clone()?;
        self.0.message.reply = Some(reply.clone());
        // All that it says is in there.
        let info = self.0.info().ok()?;
        let (sequence, delivery) = (info.stream_sequence, info.consumer_sequence.cast_signed());
        let delivered = u32::try_from(info.delivered).unwrap_or(u32::MAX);
        let published = SystemTime::from(info.published);
        let asked = Asked::read(message.headers.as_ref(), || payload(&message.payload), options);
        Some(Arc::new(Letter { message, reply, sequence, delivery, delivered, published, asked }))
    }
}

impl Letter {
    /// Which job it is, and when it was asked for.
    pub(super) fn id(&self) -> (JobId, SystemTime) {
        (JobId(self.sequence), whole_millis(self.published))
    }

    /// Whether it is no job, or may have been begun too often: not each delivery was an attempt.
    pub(super) fn is_suspect(&self) -> bool {
        self.asked.as_ref().map_or(true, |asked| self.delivered > asked.max_attempts)
    }

    /// Whose it is that gets this delivery.
    pub(super) fn claim(&self) -> Claim {
        Claim { id: JobId(self.sequence), token: self.delivery }
    }

    /// What its handler is given: its JSON, or its text as JSON, or else its bytes.
    pub(super) fn payload(&self) -> Json {
        payload(&self.message.payload)
    }

    /// The same message, for the dead letters, with all that it had and why it is there. Published again
    /// under its old subject it is the job that it was.
    pub(super) fn dead(
        &self,
        why: &Death<'_>,
        options: &Options,
        largest: usize,
    ) -> PublishMessage {
        let mut headers = HeaderMap::new();
        for (name, values) in self.message.headers.iter().flat_map(HeaderMap::iter) {
            // Those are orders to the server, for the stream it was in.
            if !AsRef::<str>::as_ref(name).starts_with("Nats-") {
                values.iter().for_each(|value| headers.append(name.clone(), value.clone()));
            }
        }
        if let Ok(asked) = &self.asked {
            headers.insert(KIND, asked.kind.as_str());
        }
        let error = shortened(why.error, LONGEST_TEXT).replace(['\r', '\n'], " ");
        headers.insert("Vedetta-Dead-Reason", why.reason);
        headers.insert("Vedetta-Dead-Error", error);
        headers.insert("Vedetta-Dead-Stream", options.stream.as_str());
        headers.insert("Vedetta-Dead-Sequence", self.sequence.to_string());
        headers.insert("Vedetta-Dead-Subject", self.message.subject.as_str());
        headers.insert("Vedetta-Dead-Deliveries", self.delivered.to_string());
        let mut payload = self.message.payload.clone();
        let length = headers.iter().flat_map(|(name, values)| {
            values.iter().map(|value| AsRef::<str>::as_ref(name).len() + value.as_str().len() + 4)
        });
        if payload.len() + length.sum::<usize>() + 256 > largest {
            headers.insert("Vedetta-Dead-Body", "left out: too large with these headers");
            payload = Bytes::new();
        }
        // A stream that was made anew counts from 1 again: the time tells its messages from the old ones.
        let at = self.published.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let Options { stream, durable, .. } = options;
        let id = format!("{stream}-{durable}-{}-{}", self.sequence, at.as_nanos());
        PublishMessage::build().payload(payload).headers(headers).message_id(id)
    }
}

fn payload(body: &[u8]) -> Json {
    if let Ok(json) = serde_json::from_slice::<Box<RawValue>>(body) {
        return json;
    }
    let json = match std::str::from_utf8(body) {
        Ok(text) => to_raw_value(text),
        Err(_) => to_raw_value(&serde_json::json!({ "base64": BASE64_STANDARD.encode(body) })),
    };
    json.expect("a text is JSON")
}

/// Why a message is put with the dead ones.
#[derive(Debug, Clone, Copy)]
pub(super) struct Death<'a> {
    /// One word.
    pub reason: &'static str,
    pub error: &'a str,
}
