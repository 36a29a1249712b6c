//! What a run writes down while it lasts: what was tried, what was answered, what watchers saw.
//!
//! A note is one line of text, so that a process about to be killed can hand it over a pipe.

use std::fmt;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use vedetta_kv::{Cause, Change, Event};

/// One line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// Written before the store is asked.
    Tried {
        /// Unique in a story; values carry it.
        id: u64,
        /// What was asked for.
        what: What,
    },
    /// The store said "done".
    Done {
        /// Which try.
        id: u64,
        /// The store's revision in the answer.
        revision: u64,
    },
    /// The store said "certainly not", or there was nothing to do.
    Refused {
        /// Which try.
        id: u64,
        /// The error; empty when there was nothing to do.
        why: String,
    },
    /// The store said "failed": it may be there or not.
    Failed {
        /// Which try.
        id: u64,
        /// The error.
        why: String,
    },
    /// A watcher was handed all of its events of one revision.
    Seen {
        /// Which watcher.
        watcher: usize,
        /// When, by the wall clock.
        at_ms: u64,
        /// The revision.
        revision: u64,
        /// Sorted by key.
        events: Vec<Ev>,
    },
    /// A watcher was told that its history is compacted, and goes on from `oldest`.
    Compacted {
        /// Which watcher.
        watcher: usize,
        /// Where it goes on.
        oldest: u64,
    },
    /// Something that must not happen where the disk is fine.
    Trouble(String),
}

/// What the store was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// Keys to put and to delete, in one transaction.
    Write {
        /// All get the same value, see [`value`].
        puts: Vec<String>,
        /// These go.
        deletes: Vec<String>,
        /// The lease of the puts, or 0.
        lease: i64,
        /// Worked out on the writer thread, as the v2 API does: keys are made anew, and deletes are told even when
        /// there was nothing to delete.
        anew: bool,
    },
    /// A lease.
    Grant {
        /// Its number.
        lease: i64,
        /// How long.
        ttl_ms: u64,
        /// When it was asked for, by the wall clock.
        at_ms: u64,
    },
    /// More time for a lease.
    Renew {
        /// Its number.
        lease: i64,
        /// When it was asked for, by the wall clock.
        at_ms: u64,
    },
    /// The end of a lease.
    Revoke {
        /// Its number.
        lease: i64,
    },
    /// Compaction.
    Compact {
        /// Up to where.
        revision: u64,
    },
}

/// An event, as far as it can be predicted.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ev {
    /// The key.
    pub key: String,
    /// What became of it.
    pub now: Now,
}

/// What became of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Now {
    /// It has the value of that try.
    Put {
        /// The try; `None` when the value is none that any try could have written.
        id: Option<u64>,
        /// Its lease, or 0.
        lease: i64,
    },
    /// It is gone.
    Gone {
        /// Because of its lease.
        expired: bool,
    },
}

/// The value that the try `id` writes. It says which, and is of a length of its own: mostly short, at
/// times longer than a page.
pub fn value(id: u64) -> Bytes {
    let mut rng = fastrand::Rng::with_seed(id);
    let length = if rng.u8(..8) == 0 { rng.usize(1_000..9_000) } else { rng.usize(..60) };
    let mut bytes = format!("{id}:").into_bytes();
    bytes.extend(std::iter::repeat_with(|| rng.u8(..)).take(length));
    bytes.into()
}

/// The try that wrote a value; `None` when none did.
pub fn author(bytes: &[u8]) -> Option<u64> {
    let end = bytes.iter().position(|&b| b == b':')?;
    let id = std::str::from_utf8(&bytes[..end]).ok()?.parse().ok()?;
    (value(id) == bytes).then_some(id)
}

/// Milliseconds of the wall clock.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl From<&Event> for Ev {
    fn from(event: &Event) -> Self {
        let now = match &event.change {
            Change::Put(now) => Now::Put {
                id: author(now.value()),
                lease: now.lease().map_or(0, vedetta_kv::LeaseId::get),
            },
            Change::Delete { cause, .. } => Now::Gone { expired: *cause == Cause::Expired },
        };
        Self { key: String::from_utf8_lossy(event.key()).into_owned(), now }
    }
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tried { id, what } => write!(f, "T {id} {what}"),
            Self::Done { id, revision } => write!(f, "D {id} {revision}"),
            Self::Refused { id, why } => write!(f, "R {id} {}", one_line(why)),
            Self::Failed { id, why } => write!(f, "F {id} {}", one_line(why)),
            Self::Seen { watcher, at_ms, revision, events } => {
                let events: Vec<_> = events.iter().map(Ev::to_string).collect();
                write!(f, "S {watcher} {at_ms} {revision} {}", events.join(","))
            }
            Self::Compacted { watcher, oldest } => write!(f, "C {watcher} {oldest}"),
            Self::Trouble(what) => write!(f, "! {}", one_line(what)),
        }
    }
}

fn one_line(text: &str) -> String {
    text.replace('\n', " ")
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Write { puts, deletes, lease, anew } => {
                let how = if *anew { 'u' } else { 'w' };
                write!(f, "{how} +{} -{} {lease}", puts.join(","), deletes.join(","))
            }
            Self::Grant { lease, ttl_ms, at_ms } => write!(f, "g {lease} {ttl_ms} {at_ms}"),
            Self::Renew { lease, at_ms } => write!(f, "k {lease} {at_ms}"),
            Self::Revoke { lease } => write!(f, "r {lease}"),
            Self::Compact { revision } => write!(f, "c {revision}"),
        }
    }
}

impl fmt::Display for Ev {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.now {
            Now::Put { id: Some(id), lease } => write!(f, "{}={id}={lease}", self.key),
            Now::Put { id: None, lease } => write!(f, "{}=?={lease}", self.key),
            Now::Gone { expired: false } => write!(f, "{}=-", self.key),
            Now::Gone { expired: true } => write!(f, "{}=!", self.key),
        }
    }
}

/// A line that is no note.
#[derive(Debug, PartialEq, Eq)]
pub struct Garbled(String);

impl fmt::Display for Garbled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not a note: {:?}", self.0)
    }
}

impl FromStr for Note {
    type Err = Garbled;

    fn from_str(line: &str) -> Result<Self, Garbled> {
        if let Some(what) = line.strip_prefix("! ") {
            return Ok(Self::Trouble(what.to_owned()));
        }
        let words: Vec<&str> = line.split(' ').collect();
        parse(&words).ok_or_else(|| Garbled(line.to_owned()))
    }
}

fn parse(words: &[&str]) -> Option<Note> {
    Some(match *words {
        ["T", id, ref what @ ..] => Note::Tried { id: id.parse().ok()?, what: parse_what(what)? },
        ["D", id, revision] => {
            Note::Done { id: id.parse().ok()?, revision: revision.parse().ok()? }
        }
        ["R", id, ref why @ ..] => Note::Refused { id: id.parse().ok()?, why: why.join(" ") },
        ["F", id, ref why @ ..] => Note::Failed { id: id.parse().ok()?, why: why.join(" ") },
        ["S", watcher, at_ms, revision, events] => Note::Seen {
            watcher: watcher.parse().ok()?,
            at_ms: at_ms.parse().ok()?,
            revision: revision.parse().ok()?,
            events: events.split(',').map(parse_ev).collect::<Option<_>>()?,
        },
        ["C", watcher, oldest] => {
            Note::Compacted { watcher: watcher.parse().ok()?, oldest: oldest.parse().ok()? }
        }
        _ => return None,
    })
}

fn parse_what(words: &[&str]) -> Option<What> {
    let keys = |list: &str| list.split(',').filter(|k| !k.is_empty()).map(String::from).collect();
    Some(match *words {
        [how @ ("w" | "u"), puts, deletes, lease] => What::Write {
            puts: keys(puts.strip_prefix('+')?),
            deletes: keys(deletes.strip_prefix('-')?),
            lease: lease.parse().ok()?,
            anew: how == "u",
        },
        ["g", lease, ttl_ms, at_ms] => What::Grant {
            lease: lease.parse().ok()?,
            ttl_ms: ttl_ms.parse().ok()?,
            at_ms: at_ms.parse().ok()?,
        },
        ["k", lease, at_ms] => {
            What::Renew { lease: lease.parse().ok()?, at_ms: at_ms.parse().ok()? }
        }
        ["r", lease] => What::Revoke { lease: lease.parse().ok()? },
        ["c", revision] => What::Compact { revision: revision.parse().ok()? },
        _ => return None,
    })
}

fn parse_ev(text: &str) -> Option<Ev> {
    let words: Vec<&str> = text.split('=').collect();
    let (key, now) = match words[..] {
        [key, "-"] => (key, Now::Gone { expired: false }),
        [key, "!"] => (key, Now::Gone { expired: true }),
        [key, "?", lease] => (key, Now::Put { id: None, lease: lease.parse().ok()? }),
        [key, id, lease] => {
            (key, Now::Put { id: Some(id.parse().ok()?), lease: lease.parse().ok()? })
        }
        _ => return None,
    };
    Some(Ev { key: key.to_owned(), now })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_survives_the_pipe() {
        let keys = |keys: &[&str]| keys.iter().map(|key| String::from(*key)).collect();
        let ev = |key: &str, now| Ev { key: key.to_owned(), now };
        let notes = [
            Note::Tried {
                id: 7,
                what: What::Write {
                    puts: keys(&["a", "b"]),
                    deletes: keys(&["c"]),
                    lease: 3,
                    anew: false,
                },
            },
            Note::Tried {
                id: 8,
                what: What::Write { puts: vec![], deletes: keys(&["c"]), lease: 0, anew: true },
            },
            Note::Tried { id: 12, what: What::Renew { lease: 1, at_ms: 6 } },
            Note::Tried { id: 9, what: What::Grant { lease: 1, ttl_ms: 20, at_ms: 5 } },
            Note::Tried { id: 10, what: What::Revoke { lease: 1 } },
            Note::Tried { id: 11, what: What::Compact { revision: 4 } },
            Note::Done { id: 7, revision: 2 },
            Note::Refused { id: 8, why: String::new() },
            Note::Failed { id: 9, why: "for a reason".into() },
            Note::Seen {
                watcher: 1,
                at_ms: 9,
                revision: 3,
                events: vec![
                    ev("a", Now::Put { id: Some(7), lease: 3 }),
                    ev("b", Now::Put { id: None, lease: 0 }),
                    ev("c", Now::Gone { expired: false }),
                    ev("d", Now::Gone { expired: true }),
                ],
            },
            Note::Compacted { watcher: 0, oldest: 12 },
            Note::Trouble("the disk failed".into()),
        ];
        for note in notes {
            assert_eq!(note.to_string().parse(), Ok(note));
        }
        assert!("S 1 2".parse::<Note>().is_err());
    }

    #[test]
    fn a_value_names_its_author_and_no_other_does() {
        for id in 0..200 {
            let mut bytes = value(id).to_vec();
            assert_eq!(author(&bytes), Some(id));
            let last = bytes.len() - 1;
            bytes[last] ^= 1;
            assert_eq!(author(&bytes), None);
        }
    }
}
