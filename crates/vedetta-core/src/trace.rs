//! Traces: which one a piece of work belongs to, and what happened in it.
//!
//! A place in a trace travels as text, in the form of W3C's `traceparent`. What becomes of what happened is for
//! a [`Spans`] to say.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

/// A place in a trace: what happens next happens below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Trace {
    id: u128,
    span: u64,
    sampled: bool,
}

/// What is no place in a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("give one such as 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")]
pub struct BadTrace;

impl Trace {
    /// The beginning of a trace, from random numbers; `sampled` says whether anybody wants to see it.
    pub fn new(id: u128, span: u64, sampled: bool) -> Self {
        Self { id: id.max(1), span: span.max(1), sampled }
    }

    /// A place below this one, from a random number.
    #[must_use]
    pub fn below(self, span: u64) -> Self {
        Self { span: span.max(1), ..self }
    }

    /// Which trace.
    pub fn id(self) -> u128 {
        self.id
    }

    /// Where in it.
    pub fn span(self) -> u64 {
        self.span
    }

    /// Somebody wants to see it.
    pub fn is_sampled(self) -> bool {
        self.sampled
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.id, self.span, u8::from(self.sampled))
    }
}

/// A later version may have more at its end, which is left out.
impl FromStr for Trace {
    type Err = BadTrace;

    fn from_str(text: &str) -> Result<Self, BadTrace> {
        let mut parts = text.split('-');
        let mut hex = |digits: usize| {
            let part = parts.next().filter(|part| part.len() == digits).ok_or(BadTrace)?;
            let lower = |c: u8| c.is_ascii_digit() || (b'a'..=b'f').contains(&c);
            if !part.bytes().all(lower) {
                return Err(BadTrace);
            }
            u128::from_str_radix(part, 16).map_err(|_| BadTrace)
        };
        let (version, id, span, flags) = (hex(2)?, hex(32)?, hex(16)?, hex(2)?);
        let span = u64::try_from(span).map_err(|_| BadTrace)?;
        let is_whole = parts.next().is_none() || version > 0;
        if version == 0xff || id == 0 || span == 0 || !is_whole {
            return Err(BadTrace);
        }
        Ok(Self { id, span, sampled: flags & 1 == 1 })
    }
}

/// How a span stands to those of others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpanKind {
    /// Within a program.
    Internal,
    /// It asks for something to be done later.
    Producer,
    /// It does what was asked for.
    Consumer,
}

/// What is said of a span.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Label {
    /// A text.
    Text(String),
    /// A number.
    Number(i64),
    /// Yes or no.
    Flag(bool),
}

impl From<&str> for Label {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<u32> for Label {
    fn from(number: u32) -> Self {
        Self::Number(number.into())
    }
}

impl From<u64> for Label {
    fn from(number: u64) -> Self {
        Self::Number(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl From<bool> for Label {
    fn from(flag: bool) -> Self {
        Self::Flag(flag)
    }
}

/// Something that happened in a trace, and is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// What.
    pub name: String,
    /// How it stands to others.
    pub kind: SpanKind,
    /// Its own place.
    pub place: Trace,
    /// What it is below of, unless it is the first.
    pub parent: Option<u64>,
    /// When it began.
    pub began: SystemTime,
    /// How long it took.
    pub took: Duration,
    /// What else is known of it. Never what is in a payload.
    pub labels: Vec<(&'static str, Label)>,
    /// One word for why it failed, if it did.
    pub failed: Option<&'static str>,
}

/// Takes what happened. It must not block.
pub trait Spans: Send + Sync + 'static {
    /// Whether a trace that begins here is to be seen.
    fn samples(&self, trace: u128) -> bool;

    /// Takes a span that is over.
    fn ended(&self, span: Span);

    /// How many were given up since the start, because nobody took them in time.
    fn dropped(&self) -> u64;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_traceparent_is_read_as_it_is_written() {
        let text = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let trace: Trace = text.parse().unwrap();
        assert_eq!(trace.id(), 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c);
        assert_eq!((trace.span(), trace.is_sampled()), (0xb7ad_6b71_6920_3331, true));
        assert_eq!(trace.to_string(), text);
        let below = trace.below(7).to_string();
        assert_eq!(below, "00-0af7651916cd43dd8448eb211c80319c-0000000000000007-01");
        let unseen = text.replace("-01", "-02").parse::<Trace>().unwrap();
        assert!(!unseen.is_sampled());
        let later = "cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-what-comes";
        assert_eq!(later.parse(), Ok(trace));
    }

    #[test]
    fn what_is_no_traceparent_is_refused() {
        for wrong in [
            "",
            "00",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319-cb7ad6b7169203331-01",
        ] {
            assert_eq!(wrong.parse::<Trace>(), Err(BadTrace), "{wrong}");
        }
    }
}
