//! The audit log: who did what, when, from where, and what came of it.
//!
//! Entries are added and never changed; the oldest go. The same, done again within a short time, becomes one
//! entry with a count: a program that asks for a thousand jobs does not drive out who signed in.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use rusqlite::{Connection, Row};
use serde::Serialize;

use crate::store::{millis, time};
use crate::{Access, AccessError};

/// Entries that are kept, and for how long.
const MOST: i64 = 100_000;
const LONGEST: Duration = Duration::from_secs(90 * 24 * 3600);
/// Bytes of a text in an entry.
const TEXT: usize = 512;
/// Kinds of entries that are counted at once; with more of them all are written.
const GATHERED: usize = 1024;

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It was done.
    Done,
    /// It was not allowed.
    Refused,
    /// It was allowed, and did not succeed.
    Failed,
}

impl Outcome {
    fn word(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Refused => "refused",
            Self::Failed => "failed",
        }
    }
}

/// Something that was done, or tried.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Entry {
    /// A user, `token:NAME`, `local` where nobody signs in, `?` for nobody that is known.
    pub who: String,
    /// The address it came from, or `shell`.
    pub source: String,
    /// What, for example `sign-in` or `POST /api/v1/queues/{queue}/pause`.
    pub action: String,
    /// To what.
    pub target: String,
    /// What became of it.
    pub outcome: Outcome,
}

impl Entry {
    /// Something that was done on this machine, with the rights of its file system.
    pub fn shell(action: &str, target: impl Into<String>) -> Self {
        Self {
            who: "shell".into(),
            source: "shell".into(),
            action: action.into(),
            target: target.into(),
            outcome: Outcome::Done,
        }
    }
}

/// An entry of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// Later ones have higher ones.
    pub id: i64,
    /// When, or when it began.
    pub at: SystemTime,
    /// See [`Entry::who`].
    pub who: String,
    /// See [`Entry::source`].
    pub source: String,
    /// What.
    pub action: String,
    /// To what.
    pub target: String,
    /// What became of it: `done`, `refused` or `failed`.
    pub outcome: String,
    /// How often.
    pub count: u64,
}

/// Counts what happens again and again. Time is an argument.
#[derive(Debug, Default)]
pub struct Gathered {
    /// What was written already, and how often it happened since.
    again: HashMap<Entry, u64>,
}

impl Gathered {
    /// The entries to write now: this one, unless the same was just written.
    pub fn add(&mut self, entry: Entry) -> Vec<(Entry, u64)> {
        if let Some(count) = self.again.get_mut(&entry) {
            *count += 1;
            return Vec::new();
        }
        let mut out = if self.again.len() >= GATHERED { self.flush() } else { Vec::new() };
        self.again.insert(entry.clone(), 0);
        out.push((entry, 1));
        out
    }

    /// What happened again meanwhile; from here on it counts anew.
    pub fn flush(&mut self) -> Vec<(Entry, u64)> {
        self.again.drain().filter(|(_, count)| *count > 0).collect()
    }
}

impl Access {
    /// Adds entries, each with how often it happened.
    pub fn record(&self, entries: &[(Entry, u64)], now: SystemTime) -> Result<(), AccessError> {
        let mut connection = self.inner.notes.lock();
        let tx = connection.transaction()?;
        for (entry, count) in entries {
            insert_at(&tx, entry, *count, now)?;
        }
        // Now and then is enough: there may be a few more for a while.
        if tx.last_insert_rowid() % 256 < i64::try_from(entries.len()).unwrap_or(i64::MAX) {
            prune(&tx, now)?;
        }
        tx.commit()?;
        Ok(())
    }

    /// A page of the log, the newest first, before `before`.
    pub fn audit(&self, before: Option<i64>, limit: usize) -> Result<Vec<Recorded>, AccessError> {
        let connection = self.inner.read.lock();
        let sql = "SELECT id, at, who, source, action, target, outcome, count FROM audit
                   WHERE id < ?1 ORDER BY id DESC LIMIT ?2";
        let mut statement = connection.prepare_cached(sql)?;
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let rows = statement.query_map((before.unwrap_or(i64::MAX), limit), recorded)?;
        Ok(rows.collect::<rusqlite::Result<_>>()?)
    }
}

fn recorded(row: &Row<'_>) -> rusqlite::Result<Recorded> {
    Ok(Recorded {
        id: row.get(0)?,
        at: time(row.get(1)?),
        who: row.get(2)?,
        source: row.get(3)?,
        action: row.get(4)?,
        target: row.get(5)?,
        outcome: row.get(6)?,
        count: row.get::<_, i64>(7)?.unsigned_abs(),
    })
}

pub(crate) fn insert(connection: &Connection, entry: &Entry, count: u64) -> rusqlite::Result<()> {
    insert_at(connection, entry, count, SystemTime::now())
}

fn insert_at(
    connection: &Connection,
    entry: &Entry,
    count: u64,
    now: SystemTime,
) -> rusqlite::Result<()> {
    let sql = "INSERT INTO audit (at, who, source, action, target, outcome, count)
               VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)";
    connection.prepare_cached(sql)?.execute((
        millis(now),
        bounded(&entry.who),
        bounded(&entry.source),
        bounded(&entry.action),
        bounded(&entry.target),
        entry.outcome.word(),
        i64::try_from(count).unwrap_or(i64::MAX),
    ))?;
    Ok(())
}

/// The beginning of a text, with nothing in it that breaks a line.
fn bounded(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if out.len() + c.len_utf8() > TEXT {
            out.push('…');
            break;
        }
        if c.is_control() { out.extend(c.escape_unicode()) } else { out.push(c) }
    }
    out
}

/// Removes what is too old or too much.
pub(crate) fn prune(connection: &Connection, now: SystemTime) -> rusqlite::Result<()> {
    let oldest = millis(now.checked_sub(LONGEST).unwrap_or(std::time::UNIX_EPOCH));
    connection.execute("DELETE FROM audit WHERE at < ?1", [oldest])?;
    let sql = "DELETE FROM audit WHERE id <= (SELECT coalesce(max(id), 0) FROM audit) - ?1";
    connection.execute(sql, [MOST]).map(drop)
}
