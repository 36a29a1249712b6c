//! Rows beside the store, in the same file, most of them written lazily; and what a power cut may leave of them.
//!
//! Each row has the number after the last one's, so numbers are in the order of the commits. What is left must be
//! all of them up to some number. Lazy ones may be missing from there on, but none that came before something
//! else was acknowledged: a row that was not lazy, a write of the store, or the end of [`Store::close`].
//!
//! [`Store::close`]: vedetta_kv::Store::close

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::task::JoinSet;
use vedetta_db::{CommitError, Db, Purpose, Schema, Stop, Tx, WriteError, rusqlite};

use crate::note::{Note, What};

/// Their table.
pub const SCHEMA: Schema = Schema {
    component: "torture",
    steps: &[
        "CREATE TABLE torture_entry (number INTEGER PRIMARY KEY, id INTEGER NOT NULL UNIQUE) STRICT",
    ],
};

/// What is known of the rows.
#[derive(Debug, Clone, Default)]
pub struct Entries {
    /// What was tried and not refused.
    possible: BTreeSet<i64>,
    /// What was answered, by number.
    answered: BTreeMap<i64, i64>,
    /// All up to this number must be there.
    promised: i64,
    /// The last number that was answered when a write of the store was tried.
    tried_after: BTreeMap<u64, i64>,
}

impl Entries {
    fn last(&self) -> i64 {
        self.answered.last_key_value().map_or(0, |(number, _)| *number)
    }

    /// Takes in a note of a write of the store.
    pub fn note(&mut self, note: &Note) {
        match note {
            Note::Tried { id, what: What::Write { .. } } => {
                self.tried_after.insert(*id, self.last());
            }
            Note::Done { id, .. } => {
                if let Some(last) = self.tried_after.get(id) {
                    self.promised = self.promised.max(*last);
                }
            }
            _ => {}
        }
    }

    /// The database was closed.
    pub fn closed(&mut self) {
        self.promised = self.last();
    }

    /// What cannot be, and how many that were answered are not there, which may be.
    pub async fn check(&self, db: &Db) -> (Vec<String>, usize) {
        let read = db.read(|db| {
            let mut entries = db.prepare("SELECT number, id FROM torture_entry ORDER BY number")?;
            let rows = entries.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
            rows.collect::<rusqlite::Result<Vec<(i64, i64)>>>()
        });
        let found = match read.await {
            Ok(found) => found,
            Err(error) => return (vec![crate::bed::explain(&error)], 0),
        };
        let mut wrong = Vec::new();
        for (expected, (number, id)) in (1..).zip(&found) {
            if *number != expected {
                wrong.push(format!("entry {number} is there, entry {expected} is not"));
                break;
            }
            if self.answered.get(number).is_some_and(|answered| answered != id) {
                wrong.push(format!("entry {number} was acknowledged with another id than {id}"));
            }
            if !self.possible.contains(id) {
                wrong.push(format!("entry {number} was refused, or never tried"));
            }
        }
        let last = found.last().map_or(0, |(number, _)| *number);
        if last < self.promised {
            let promised = self.promised;
            wrong.push(format!("entries end at {last}, but {promised} was acknowledged for good"));
        }
        (wrong, self.answered.range(last + 1..).count())
    }
}

/// Writes `count` rows from each of `writers`, or until the database fails.
///
/// # Panics
///
/// If a writer does.
pub async fn write(db: &Db, entries: &Arc<Mutex<Entries>>, seed: u64, writers: u64, count: u64) {
    let mut tasks = JoinSet::new();
    for writer in 0..writers {
        let (db, entries) = (db.clone(), Arc::clone(entries));
        let mut rng = fastrand::Rng::with_seed(seed.wrapping_mul(37).wrapping_add(writer));
        tasks.spawn(async move {
            for _ in 0..count {
                let (id, lazy) = (rng.i64(..), rng.u8(..10) > 0);
                entries.lock().possible.insert(id);
                let work = move |tx: &Tx<'_>| insert(tx, id).map_err(Stop::<()>::Sql);
                let written = if lazy {
                    db.write_lazily(Purpose::Store, work).await
                } else {
                    db.write(Purpose::Store, work).await
                };
                let entries = &mut *entries.lock();
                match written {
                    Ok(number) => {
                        entries.answered.insert(number, id);
                        if !lazy {
                            entries.promised = entries.promised.max(number);
                        }
                    }
                    Err(WriteError::Lost(CommitError::Failed(_))) => return,
                    Err(_) => {
                        entries.possible.remove(&id);
                        return;
                    }
                }
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.expect("a writer does not panic");
    }
}

fn insert(tx: &Tx<'_>, id: i64) -> rusqlite::Result<i64> {
    let sql = "INSERT INTO torture_entry
               SELECT coalesce(max(number), 0) + 1, ?1 FROM torture_entry RETURNING number";
    tx.query_row(sql, [id], |row| row.get(0))
}
