//! From the file into memory, checking every row on the way.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use rusqlite::Connection;
use vedetta_core::Revision;
use vedetta_db::{Db, Purpose, Stop, WriteError, rusqlite};

use crate::LeaseId;
use crate::codec;
use crate::index::Index;
use crate::lease::{Leases, Loaded};
use crate::pending::Pending;
use crate::store::{Age, OpenError, Quota, Shared};
use crate::watch::Hub;

/// How far a restored store jumps ahead, so that whoever saw the time after the backup notices: further
/// than any store comes between two backups.
const RESTORE_JUMP: u64 = 1 << 40;

/// Names the checksum in the table `meta`.
const CHECK: &str = "checksum";

/// The store's numbers in the table `meta`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Meta {
    /// The oldest revision that can be read or watched from.
    pub(crate) compacted: Revision,
    /// Rows up to here are those that survived compaction.
    pub(crate) swept: Revision,
    /// How many these are, and the XOR of their checksums.
    pub(crate) rows: u64,
    pub(crate) sum: u32,
    /// The last revision before a restored store jumped, and where it landed.
    jump_from: Revision,
    jump_to: Revision,
    /// The store had come this far when it was last closed.
    closed_at: Revision,
    age_ms: i64,
}

impl Meta {
    pub(crate) fn read(connection: &Connection) -> rusqlite::Result<Self> {
        let numbers = Numbers::read(connection)?;
        if !numbers.sound() {
            return Err(corrupt("the store's own numbers are damaged; restore a backup"));
        }
        let get = |name: &str| numbers.0.get(name).copied();
        let revision =
            |name, default| get(name).map_or(default, |value| Revision(value.cast_unsigned()));
        Ok(Self {
            compacted: revision("compacted", Revision(0)),
            swept: revision("swept", Revision::FRESH),
            rows: get("rows").unwrap_or(0).cast_unsigned(),
            sum: u32::try_from(get("sum").unwrap_or(0)).unwrap_or(0),
            jump_from: revision("jump_from", Revision(0)),
            jump_to: revision("jump_to", Revision(0)),
            closed_at: revision("closed_at", Revision(0)),
            age_ms: get("age_ms").unwrap_or(0),
        })
    }
}

/// The rows of the table `meta`; one of them is the checksum of the others.
struct Numbers(BTreeMap<String, i64>);

impl Numbers {
    fn read(connection: &Connection) -> rusqlite::Result<Self> {
        let mut select = connection.prepare_cached("SELECT name, value FROM meta")?;
        let rows = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
        rows.collect::<rusqlite::Result<_>>().map(Self)
    }

    fn sound(&self) -> bool {
        self.0.is_empty() || self.0.get(CHECK) == Some(&self.checksum())
    }

    fn checksum(&self) -> i64 {
        let mut crc = crc32fast::Hasher::new();
        for (name, value) in self.0.iter().filter(|(name, _)| *name != CHECK) {
            crc.update(name.as_bytes());
            crc.update(&value.to_le_bytes());
        }
        i64::from(crc.finalize())
    }
}

pub(crate) fn set_meta(connection: &Connection, name: &str, value: i64) -> rusqlite::Result<()> {
    let sql = "INSERT INTO meta (name, value) VALUES (?1, ?2)
               ON CONFLICT (name) DO UPDATE SET value = excluded.value";
    let mut set = connection.prepare_cached(sql)?;
    set.execute((name, value))?;
    let checksum = Numbers::read(connection)?.checksum();
    set.execute((CHECK, checksum)).map(drop)
}

/// The checksum of a lease's row, to which 1 is added when it is renewed.
pub(crate) fn lease_checksum(id: i64, ttl_ms: i64, deadline_ms: i64, tree: bool) -> i64 {
    let mut crc = crc32fast::Hasher::new();
    let numbers = [id, ttl_ms, deadline_ms, tree.into()];
    numbers.iter().for_each(|number| crc.update(&number.to_le_bytes()));
    i64::from(crc.finalize())
}

fn corrupt(what: &str) -> rusqlite::Error {
    let cause = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT);
    rusqlite::Error::SqliteFailure(cause, Some(what.into()))
}

/// Builds the state in memory.
pub(crate) fn load(db: &Db, quota: Option<u64>) -> Result<Shared, OpenError> {
    if db.restored() {
        jump_ahead(db)?;
    }
    db.read_blocking(|connection| {
        let meta = Meta::read(connection)?;
        let index = match load_index(connection, meta) {
            Ok(index) => index,
            Err(Unsound::Sql(error)) => return Err(error),
            Err(Unsound::Rows(error)) => return Ok(Err(error)),
        };
        let leases = load_leases(connection, &index, meta)?;
        Ok(Ok(Shared {
            pending: Mutex::new(Pending::new(index.revision, index.compacted)),
            hub: Hub::new(index.revision),
            index: RwLock::new(index),
            leases,
            quota: Quota { bytes: quota, used: db.sized() },
            age: Age {
                before: Duration::from_millis(meta.age_ms.unsigned_abs()),
                started: Instant::now(),
            },
        }))
    })?
}

pub(crate) enum Unsound {
    Sql(rusqlite::Error),
    Rows(OpenError),
}

impl From<rusqlite::Error> for Unsound {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sql(error)
    }
}

pub(crate) fn load_index(connection: &Connection, meta: Meta) -> Result<Index, Unsound> {
    let mut index = Index::default();
    let mut check = Check::new(meta);
    let mut select = connection.prepare("SELECT revision, body FROM event ORDER BY revision")?;
    let mut rows = select.query([])?;
    while let Some(row) = rows.next()? {
        let revision = Revision(row.get::<_, i64>(0)?.cast_unsigned());
        let body = row.get_ref(1)?.as_blob().map_err(rusqlite::Error::from)?;
        check.row(revision, body).map_err(Unsound::Rows)?;
        codec::decode(revision, body, |event| index.apply_unordered(&event))
            .map_err(|damaged| Unsound::Rows(OpenError::Damaged(damaged.0)))?;
    }
    index.set_order();
    index.revision = check.end().map_err(Unsound::Rows)?;
    index.compacted = meta.compacted;
    Ok(index)
}

/// Notices rows that are gone: above the swept part every revision has one, up to where the store was when it was
/// closed or compacted at least; in it their number and checksums are known.
struct Check {
    meta: Meta,
    expected: Revision,
    rows: u64,
    sum: u32,
}

impl Check {
    fn new(meta: Meta) -> Self {
        Self { meta, expected: meta.swept.next(), rows: 0, sum: 0 }
    }

    fn row(&mut self, revision: Revision, body: &[u8]) -> Result<(), OpenError> {
        if revision <= self.meta.swept {
            self.rows += 1;
            self.sum ^= codec::stamp(body).ok_or(OpenError::Damaged(revision))?;
            return Ok(());
        }
        if revision > self.meta.jump_from {
            self.jump();
        }
        // What is before a jump is being swept, and may itself have been restored before that was done.
        if revision != self.expected && revision > self.meta.jump_from {
            return Err(OpenError::Gap(self.expected));
        }
        self.expected = revision.next();
        Ok(())
    }

    /// A restored store has no rows between where it was and where it jumped to.
    fn jump(&mut self) {
        if self.expected <= self.meta.jump_from.next() {
            self.expected = self.expected.max(self.meta.jump_to.next());
        }
    }

    /// All rows seen: where does the store stand?
    fn end(mut self) -> Result<Revision, OpenError> {
        if (self.rows, self.sum) != (self.meta.rows, self.meta.sum) {
            return Err(OpenError::Miscounted);
        }
        self.jump();
        // The row of the mark stays, so the store had come at least as far.
        if self.expected <= self.meta.closed_at.max(self.meta.compacted) {
            return Err(OpenError::Gap(self.expected));
        }
        Ok(Revision(self.expected.0 - 1))
    }
}

pub(crate) fn load_leases(
    connection: &Connection,
    index: &Index,
    meta: Meta,
) -> rusqlite::Result<Leases> {
    let leases = Leases::default();
    let sql = "SELECT id, ttl_ms, deadline_ms, renewed, tree, checksum FROM lease";
    let mut select = connection.prepare(sql)?;
    let mut rows = select.query([])?;
    while let Some(row) = rows.next()? {
        let (id, ttl_ms, deadline_ms): (i64, i64, i64) = (row.get(0)?, row.get(1)?, row.get(2)?);
        let (renewed, tree, checksum): (i64, bool, i64) = (row.get(3)?, row.get(4)?, row.get(5)?);
        if checksum != lease_checksum(id, ttl_ms, deadline_ms, tree) + renewed {
            return Err(corrupt("the row of a lease is damaged; restore a backup"));
        }
        let Some(id) = LeaseId::new(id) else { continue };
        let renewed = renewed != 0;
        // Of a renewed lease we know only that its holder lived: it gets its whole time again.
        let left_ms = if renewed { ttl_ms } else { deadline_ms.saturating_sub(meta.age_ms) };
        // The age noted last may be far behind: it is noted only while there are leases.
        let left_ms = left_ms.clamp(0, ttl_ms);
        let ms = |ms: i64| Duration::from_millis(ms.unsigned_abs());
        let loaded = Loaded { ttl: ms(ttl_ms), remaining: ms(left_ms), renewed, tree };
        leases.load(id, &loaded);
    }
    for key in index.live() {
        if !leases.load_key(key) {
            return Err(corrupt("the row of a lease is missing; restore a backup"));
        }
    }
    Ok(leases)
}

/// The file is a backup. Others may have seen revisions that were made after it was taken: a store that
/// made them again with other contents would lie to whoever resumes from there. So it goes on well after
/// them, and everything before counts as compacted, which makes them list again.
fn jump_ahead(db: &Db) -> Result<(), OpenError> {
    let jumped = db.write_blocking(Purpose::Reclaim, |connection| {
        let meta = Meta::read(connection)?;
        let last: Option<i64> =
            connection.query_row("SELECT max(revision) FROM event", [], |row| row.get(0))?;
        let last = last.map_or(Revision::FRESH, |last| Revision(last.cast_unsigned()));
        let last = last.max(meta.swept).max(meta.jump_to);
        let target = Revision(last.0 + RESTORE_JUMP);
        set_meta(connection, "jump_from", last.0.cast_signed())?;
        set_meta(connection, "jump_to", target.0.cast_signed())?;
        set_meta(connection, "compacted", target.0.cast_signed())?;
        connection.execute("DROP TABLE vedetta_backup", [])?;
        Ok::<_, Stop<std::convert::Infallible>>(())
    });
    jumped.map_err(|error| match error {
        WriteError::Lost(lost) => OpenError::Lost(lost),
        _ => unreachable!("it refuses nothing"),
    })
}
