//! Stages on the embedded SQLite file: entity, version and record in one group-committed write.
//!
//! One process has the file, so a lease here guards against a stalled run, and a restart frees all that
//! was held. Time is the wall clock of the start plus what went by since: a clock that is set does not
//! end a lease.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use vedetta_core::explain;
use vedetta_core::queue::{Kept, Settled, Woken};
use vedetta_db::rusqlite::{self, Connection, OptionalExtension as _, Row, params};
use vedetta_db::{
    Clock, CommitError, Db, Mirror, Purpose, ReadError, Rows, Schema, Stop, WriteError,
};
use vedetta_runtime::Ear;

use crate::entities::{Checked, Entities, distinct, next_versions, not_saved};
use crate::entity::{Entity, Version};
use crate::processor::{Answer, Backend, Ending, Saved};
use crate::record::{
    Claim, Claimed, Fate, Lane, LaneCounts, Page, Record, StageError, Tally, Unsettled, Which,
    shortened,
};

/// The tables of the queues, for [`Db::open`].
pub const SCHEMA: Schema = Schema {
    component: "stage",
    steps: &["
        CREATE TABLE stage_lane (
            lane   INTEGER PRIMARY KEY,
            entity TEXT NOT NULL,
            stage  TEXT NOT NULL,
            done      INTEGER NOT NULL DEFAULT 0,
            failed    INTEGER NOT NULL DEFAULT 0,
            conflicts INTEGER NOT NULL DEFAULT 0,
            UNIQUE (entity, stage)
        ) STRICT;
        -- Times are milliseconds since 1970. A record may be claimed from due_at on: its visit time, or the
        -- end of the lease of who holds it; never, if it was set aside.
        CREATE TABLE stage_record (
            lane       INTEGER NOT NULL,
            id         TEXT NOT NULL,
            shard      INTEGER NOT NULL,
            due_at     INTEGER,
            visit_at   INTEGER NOT NULL,
            version    INTEGER NOT NULL DEFAULT 1,
            seen       INTEGER NOT NULL DEFAULT 0,
            token      INTEGER NOT NULL DEFAULT 0,
            held_until INTEGER,
            failures   INTEGER NOT NULL DEFAULT 0,
            not_before INTEGER NOT NULL DEFAULT 0,
            error      TEXT,
            made_at    INTEGER NOT NULL,
            PRIMARY KEY (lane, id)
        ) STRICT, WITHOUT ROWID;
        CREATE INDEX stage_due ON stage_record (lane, shard, due_at) WHERE due_at IS NOT NULL;
        -- Tokens are never used twice.
        CREATE TABLE stage_token (last INTEGER NOT NULL) STRICT;
        INSERT INTO stage_token VALUES (0);
    "],
};

/// The queues in one file.
#[derive(Clone)]
pub struct Records {
    db: Db,
    clock: Clock,
    bells: Arc<Bells>,
}

/// Wakes who works a lane, once what was written for it is committed.
#[derive(Debug, Default)]
struct Bells {
    lanes: vedetta_runtime::Bells<Lane>,
    rings: Mutex<Rings>,
}

#[derive(Debug, Default)]
struct Rings {
    /// Of the closure that runs.
    now: Vec<Lane>,
    /// Of the closures of its batch before it.
    batch: Vec<Lane>,
    /// Of batches on their way to the disk, the oldest first.
    sealed: std::collections::VecDeque<Vec<Lane>>,
}

impl Bells {
    fn ring(&self, lane: Lane) {
        let mut rings = self.rings.lock();
        if rings.now.last() != Some(&lane) {
            rings.now.push(lane);
        }
    }
}

struct Hook(Arc<Bells>);

impl Mirror for Hook {
    fn keep(&self) {
        let rings = &mut *self.0.rings.lock();
        rings.batch.append(&mut rings.now);
    }

    fn undo(&self) {
        self.0.rings.lock().now.clear();
    }

    fn seal(&self) -> Rows {
        let rings = &mut *self.0.rings.lock();
        rings.batch.sort_unstable_by_key(|lane| lane.0);
        rings.batch.dedup();
        rings.sealed.push_back(std::mem::take(&mut rings.batch));
        Rows::none()
    }

    fn publish(&self) {
        let durable = self.0.rings.lock().sealed.pop_front();
        durable.into_iter().flatten().for_each(|lane| self.0.lanes.ring(&lane, Woken::More));
    }

    fn discard(&self) {
        *self.0.rings.lock() = Rings::default();
    }
}

impl From<CommitError> for StageError {
    fn from(error: CommitError) -> Self {
        match error {
            CommitError::Full | CommitError::Failed(_) => Self::Unavailable(Box::new(error)),
            _ => Self::Failed(Box::new(error)),
        }
    }
}

impl From<ReadError> for StageError {
    fn from(error: ReadError) -> Self {
        Self::Failed(Box::new(error))
    }
}

impl From<rusqlite::Error> for StageError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Failed(Box::new(error))
    }
}

/// A disk that is full or fails is the database's to deal with, all else its caller's.
fn stop(error: StageError) -> Stop<StageError> {
    match error {
        StageError::Failed(cause) => match cause.downcast::<rusqlite::Error>() {
            Ok(error) if is_of_the_disk(&error) => Stop::Sql(*error),
            Ok(error) => Stop::Refused(StageError::Failed(error)),
            Err(cause) => Stop::Refused(StageError::Failed(cause)),
        },
        error => Stop::Refused(error),
    }
}

fn is_of_the_disk(error: &rusqlite::Error) -> bool {
    use rusqlite::ErrorCode::{CannotOpen, DiskFull, OutOfMemory, SystemIoFailure};
    let code = error.sqlite_error_code();
    matches!(code, Some(DiskFull | SystemIoFailure | CannotOpen | OutOfMemory))
}

/// A refusal is what the closure answers.
fn answered<T>(answer: Result<T, WriteError<StageError>>) -> Result<T, StageError> {
    answer.map_err(|error| match error {
        WriteError::Refused(refused) => refused,
        WriteError::Lost(lost) => lost.into(),
        _ => unreachable!("a write is refused or lost"),
    })
}

impl Records {
    /// The queues of a database that was opened with [`SCHEMA`]. What was held when the process that had
    /// it ended is free again.
    pub async fn open(db: Db) -> Result<Self, StageError> {
        let clock = db.clock();
        let records = Self { db, clock, bells: Arc::default() };
        let hook = Hook(Arc::clone(&records.bells));
        let db = records.db.clone();
        let attached = tokio::task::spawn_blocking(move || db.attach(Box::new(hook))).await;
        attached.map_err(|stopped| StageError::Failed(Box::new(stopped)))??;
        records
            .write(Purpose::Reclaim, move |tx, _| {
                tx.execute(
                    "UPDATE stage_record SET held_until = NULL, due_at = visit_at WHERE held_until IS NOT NULL",
                    [],
                )?;
                Ok(())
            })
            .await?;
        Ok(records)
    }

    async fn write<T: Send + 'static>(
        &self,
        purpose: Purpose,
        work: impl FnOnce(&Connection, &Desk) -> Result<T, StageError> + Send + 'static,
    ) -> Result<T, StageError> {
        let desk = self.desk();
        let written = self.db.write(purpose, move |tx| work(tx, &desk).map_err(stop));
        answered(written.await)
    }

    /// Need not be on the disk: a power cut ends this process, too, and without it things are as they were
    /// before, at the latest once what was held is free.
    async fn write_lazily<T: Send + 'static>(
        &self,
        purpose: Purpose,
        work: impl FnOnce(&Connection, &Desk) -> Result<T, StageError> + Send + 'static,
    ) -> Result<T, StageError> {
        let desk = self.desk();
        let written = self.db.write_lazily(purpose, move |tx| work(tx, &desk).map_err(stop));
        answered(written.await)
    }

    fn desk(&self) -> Desk {
        Desk { clock: self.clock, bells: Arc::clone(&self.bells) }
    }
}

/// What the statements need beside the connection.
#[derive(Clone)]
struct Desk {
    clock: Clock,
    bells: Arc<Bells>,
}

impl Desk {
    fn enqueue(
        &self,
        tx: &Connection,
        lane: Lane,
        id: &str,
        shard: u16,
        delay: Duration,
    ) -> rusqlite::Result<()> {
        let sql = "
            INSERT INTO stage_record (lane, id, shard, due_at, visit_at, made_at)
            VALUES (?1, ?2, ?3, ?4, ?4, ?5)
            ON CONFLICT (lane, id) DO UPDATE SET
                version = version + 1,
                shard = excluded.shard,
                visit_at = max(not_before, CASE WHEN due_at IS NULL THEN excluded.visit_at
                                                ELSE min(visit_at, excluded.visit_at) END),
                failures = CASE WHEN due_at IS NULL THEN 0 ELSE failures END,
                error = CASE WHEN due_at IS NULL THEN NULL ELSE error END,
                due_at = CASE WHEN held_until IS NOT NULL THEN due_at
                              WHEN due_at IS NULL THEN max(not_before, excluded.visit_at)
                              ELSE max(not_before, min(visit_at, excluded.visit_at)) END";
        let (visit, now) = (self.clock.after(delay), self.clock.now());
        tx.prepare_cached(sql)?.execute(params![lane.0, id, shard, visit, now])?;
        self.bells.ring(lane);
        Ok(())
    }

    fn claim(
        &self,
        tx: &Connection,
        lane: Lane,
        shards: &[u16],
        room: u32,
        lease: Duration,
    ) -> rusqlite::Result<Claimed> {
        let now = self.clock.now();
        let due = "SELECT id, failures FROM stage_record
                   WHERE lane = ?1 AND shard = ?2 AND due_at <= ?3 ORDER BY due_at LIMIT ?4";
        let take =
            "UPDATE stage_record SET held_until = ?4, due_at = ?4, seen = version, token = ?3
                    WHERE lane = ?1 AND id = ?2";
        let (mut due, mut take) = (tx.prepare_cached(due)?, tx.prepare_cached(take)?);
        let mut claimed = Claimed::default();
        // One shard after the other would starve the last: each begins elsewhere.
        let first = if shards.is_empty() { 0 } else { fastrand::usize(..shards.len()) };
        for shard in shards[first..].iter().chain(&shards[..first]) {
            let left = i64::from(room) - i64::try_from(claimed.claims.len()).unwrap_or(i64::MAX);
            if left <= 0 {
                break;
            }
            let rows = due.query_map(params![lane.0, shard, now, left], |row| {
                Ok(Claim { id: row.get::<_, String>(0)?.into(), failures: row.get(1)?, token: 0 })
            })?;
            for row in rows {
                claimed.claims.push(row?);
            }
        }
        if !claimed.claims.is_empty() {
            let count = i64::try_from(claimed.claims.len()).unwrap_or(i64::MAX);
            let sql = "UPDATE stage_token SET last = last + ?1 RETURNING last";
            let last: i64 = tx.prepare_cached(sql)?.query_row([count], |row| row.get(0))?;
            let until = self.clock.after(lease);
            for (claim, token) in claimed.claims.iter_mut().zip(last - count + 1..) {
                claim.token = token;
                take.execute(params![lane.0, &*claim.id, token, until])?;
            }
        }
        if claimed.claims.len() < room as usize {
            let sql = "SELECT min(due_at) FROM stage_record
                       WHERE lane = ?1 AND shard = ?2 AND due_at IS NOT NULL";
            let mut next = tx.prepare_cached(sql)?;
            let mut rest = i64::MAX;
            for shard in shards {
                let due: Option<i64> = next.query_row(params![lane.0, shard], |row| row.get(0))?;
                rest = rest.min(due.unwrap_or(i64::MAX));
            }
            claimed.rest = Some(self.clock.until(rest));
        }
        Ok(claimed)
    }

    /// Settles it if it was held at this time: for what is done in the same closure before, it is one moment. Nobody
    /// comes between.
    fn settle(
        &self,
        tx: &Connection,
        lane: Lane,
        claim: &Claim,
        fate: &Fate,
        at: i64,
    ) -> rusqlite::Result<Settled> {
        let now = self.clock.now();
        let settled = |due: Option<Option<i64>>| match due {
            None => Settled::Stale,
            Some(None) => Settled::Parked,
            Some(Some(due)) => Settled::Again(Clock::delay(due.saturating_sub(now))),
        };
        let due = |row: &Row<'_>| row.get(0);
        match fate {
            Fate::Gone => {
                let sql = "DELETE FROM stage_record WHERE lane = ?1 AND id = ?2 AND token = ?3
                           AND held_until > ?4 AND version = seen";
                let held = params![lane.0, &*claim.id, claim.token, at];
                if tx.prepare_cached(sql)?.execute(held)? == 1 {
                    return Ok(Settled::Gone);
                }
                let sql =
                    "UPDATE stage_record SET held_until = NULL, due_at = visit_at, failures = 0,
                               error = NULL, not_before = 0
                           WHERE lane = ?1 AND id = ?2 AND token = ?3 AND held_until > ?4
                           RETURNING due_at";
                Ok(settled(tx.prepare_cached(sql)?.query_row(held, due).optional()?))
            }
            Fate::Visit(after) => {
                let sql = "
                    UPDATE stage_record SET
                        visit_at = CASE WHEN version = seen THEN ?5 ELSE visit_at END,
                        due_at = CASE WHEN version = seen THEN ?5 ELSE visit_at END,
                        held_until = NULL, failures = 0, error = NULL, not_before = 0
                    WHERE lane = ?1 AND id = ?2 AND token = ?3 AND held_until > ?4
                    RETURNING due_at";
                let visit = self.clock.after(*after);
                let held = params![lane.0, &*claim.id, claim.token, at, visit];
                Ok(settled(tx.prepare_cached(sql)?.query_row(held, due).optional()?))
            }
            Fate::Failed { after, not_before, error, park } => {
                let sql = "
                    UPDATE stage_record SET
                        visit_at = CASE WHEN version = seen THEN ?5 ELSE ?6 END,
                        due_at = CASE WHEN version <> seen THEN ?6 WHEN ?7 THEN NULL ELSE ?5 END,
                        held_until = NULL, failures = failures + 1, error = ?8, not_before = ?6
                    WHERE lane = ?1 AND id = ?2 AND token = ?3 AND held_until > ?4
                    RETURNING due_at";
                let (visit, not_before) = (self.clock.after(*after), self.clock.after(*not_before));
                let error = shortened(error);
                let held =
                    params![lane.0, &*claim.id, claim.token, at, visit, not_before, park, error];
                Ok(settled(tx.prepare_cached(sql)?.query_row(held, due).optional()?))
            }
            Fate::Released => {
                let sql = "UPDATE stage_record SET held_until = NULL, due_at = visit_at
                           WHERE lane = ?1 AND id = ?2 AND token = ?3 AND held_until > ?4
                           RETURNING due_at";
                let held = params![lane.0, &*claim.id, claim.token, at];
                let settled = settled(tx.prepare_cached(sql)?.query_row(held, due).optional()?);
                if settled != Settled::Stale {
                    self.bells.ring(lane);
                }
                Ok(settled)
            }
        }
    }
}

/// Whether it is still the claimant's at this time.
fn is_held(tx: &Connection, lane: Lane, claim: &Claim, at: i64) -> rusqlite::Result<bool> {
    let sql = "SELECT 1 FROM stage_record
               WHERE lane = ?1 AND id = ?2 AND token = ?3 AND held_until > ?4";
    let held = params![lane.0, &*claim.id, claim.token, at];
    Ok(tx.prepare_cached(sql)?.query_row(held, |_| Ok(())).optional()?.is_some())
}

fn lane_of(tx: &Connection, entity: &str, stage: &str) -> rusqlite::Result<Option<Lane>> {
    let sql = "SELECT lane FROM stage_lane WHERE entity = ?1 AND stage = ?2";
    tx.query_row(sql, [entity, stage], |row| row.get(0).map(Lane)).optional()
}

impl crate::record::Records for Records {
    async fn lane(&self, entity: &str, stage: &str) -> Result<Lane, StageError> {
        let (entity, stage) = (entity.to_owned(), stage.to_owned());
        let insert = move |tx: &Connection, _: &Desk| {
            if let Some(lane) = lane_of(tx, &entity, &stage)? {
                return Ok(lane);
            }
            let sql = "INSERT INTO stage_lane (entity, stage) VALUES (?1, ?2) RETURNING lane";
            Ok(tx.query_row(sql, [&entity, &stage], |row| row.get(0).map(Lane))?)
        };
        self.write(Purpose::Store, insert).await
    }

    async fn enqueue(
        &self,
        lane: Lane,
        visits: &[(&str, u16, Duration)],
    ) -> Result<(), StageError> {
        let visits: Vec<_> =
            visits.iter().map(|(id, shard, delay)| ((*id).to_owned(), *shard, *delay)).collect();
        let insert = move |tx: &Connection, desk: &Desk| {
            visits
                .iter()
                .try_for_each(|(id, shard, delay)| desk.enqueue(tx, lane, id, *shard, *delay))
                .map_err(StageError::from)
        };
        self.write(Purpose::Store, insert).await
    }

    async fn claim(
        &self,
        lane: Lane,
        shards: &[u16],
        room: u32,
        lease: Duration,
    ) -> Result<Claimed, StageError> {
        let shards = shards.to_owned();
        let claim =
            move |tx: &Connection, desk: &Desk| Ok(desk.claim(tx, lane, &shards, room, lease)?);
        self.write_lazily(Purpose::Store, claim).await
    }

    async fn keep(
        &self,
        lane: Lane,
        held: &[&Claim],
        lease: Duration,
    ) -> Result<Vec<Kept>, StageError> {
        let held: Vec<Claim> = held.iter().map(|claim| (*claim).clone()).collect();
        let keep = move |tx: &Connection, desk: &Desk| {
            let sql = "UPDATE stage_record SET held_until = ?5, due_at = ?5
                       WHERE lane = ?1 AND id = ?2 AND token = ?3 AND held_until > ?4";
            let mut keep = tx.prepare_cached(sql)?;
            let (now, until) = (desk.clock.now(), desk.clock.after(lease));
            let mut kept = Vec::with_capacity(held.len());
            for claim in &held {
                let found = keep.execute(params![lane.0, &*claim.id, claim.token, now, until])?;
                kept.push(if found == 1 { Kept::Ours } else { Kept::Lost });
            }
            Ok(kept)
        };
        self.write_lazily(Purpose::Store, keep).await
    }

    async fn settle(&self, lane: Lane, ends: &[(Claim, Fate)]) -> Result<Vec<Settled>, StageError> {
        let ends = ends.to_owned();
        let settle = move |tx: &Connection, desk: &Desk| {
            let now = desk.clock.now();
            let settled = ends.iter().map(|(claim, fate)| desk.settle(tx, lane, claim, fate, now));
            Ok(settled.collect::<rusqlite::Result<Vec<_>>>()?)
        };
        self.write(Purpose::Reclaim, settle).await
    }

    async fn counts(&self) -> Result<Vec<LaneCounts>, StageError> {
        let now = self.clock.now();
        let counts = self.db.read(move |db| {
            let sql = "
                SELECT entity, stage, count(r.lane),
                       count(*) FILTER (WHERE due_at <= ?1),
                       count(*) FILTER (WHERE held_until > ?1),
                       count(*) FILTER (WHERE failures > 0 AND due_at IS NOT NULL),
                       count(r.lane) - count(due_at),
                       min(due_at) FILTER (WHERE due_at <= ?1),
                       done, failed, conflicts
                FROM stage_lane LEFT JOIN stage_record r USING (lane)
                GROUP BY lane ORDER BY entity, stage";
            let mut counts = db.prepare(sql)?;
            let rows = counts.query_map([now], |row| {
                let oldest: Option<i64> = row.get(7)?;
                Ok(LaneCounts {
                    entity: row.get(0)?,
                    stage: row.get(1)?,
                    records: row.get::<_, i64>(2)?.unsigned_abs(),
                    due: row.get::<_, i64>(3)?.unsigned_abs(),
                    held: row.get::<_, i64>(4)?.unsigned_abs(),
                    failing: row.get::<_, i64>(5)?.unsigned_abs(),
                    parked: row.get::<_, i64>(6)?.unsigned_abs(),
                    oldest_due: oldest.map(|due| Clock::delay(now.saturating_sub(due))),
                    tally: Tally {
                        done: row.get::<_, i64>(8)?.unsigned_abs(),
                        failed: row.get::<_, i64>(9)?.unsigned_abs(),
                        conflicts: row.get::<_, i64>(10)?.unsigned_abs(),
                    },
                })
            })?;
            rows.collect()
        });
        Ok(counts.await?)
    }

    async fn list(&self, entity: &str, which: &Which, limit: u32) -> Result<Page, StageError> {
        let (entity, which, now) = (entity.to_owned(), which.clone(), self.clock.now());
        let page = self.db.read(move |db| {
            let (stage, id) = which.after.unwrap_or_default();
            let sql = "
                SELECT stage, id, due_at, held_until, failures, error, made_at
                FROM stage_lane JOIN stage_record USING (lane)
                WHERE entity = ?1 AND (?2 IS NULL OR stage = ?2) AND (?3 IS NULL OR id = ?3)
                      AND (NOT ?4 OR due_at IS NULL) AND (stage, id) > (?5, ?6)
                ORDER BY stage, id LIMIT ?7";
            let mut list = db.prepare(sql)?;
            let one_more = i64::from(limit) + 1;
            let wanted = params![entity, which.stage, which.id, which.parked, stage, id, one_more];
            let rows = list.query_map(wanted, |row| {
                let (due, held): (Option<i64>, Option<i64>) = (row.get(2)?, row.get(3)?);
                let is_held = held.is_some_and(|until| until > now);
                Ok(Record {
                    entity: entity.clone(),
                    stage: row.get(0)?,
                    id: row.get(1)?,
                    due_in: due
                        .filter(|due| *due > now && !is_held)
                        .map(|due| Clock::delay(due - now)),
                    is_held,
                    failures: row.get(4)?,
                    error: row.get(5)?,
                    is_parked: due.is_none(),
                    age: Clock::delay(now.saturating_sub(row.get(6)?)),
                })
            })?;
            let mut records = rows.collect::<rusqlite::Result<Vec<_>>>()?;
            let more = records.len() > limit as usize;
            records.truncate(limit as usize);
            Ok(Page { records, more })
        });
        Ok(page.await?)
    }

    async fn retry(&self, entity: &str, stage: &str, id: &str) -> Result<bool, StageError> {
        let (entity, stage, id) = (entity.to_owned(), stage.to_owned(), id.to_owned());
        let retry = move |tx: &Connection, desk: &Desk| {
            let Some(lane) = lane_of(tx, &entity, &stage)? else { return Ok(false) };
            let sql = "
                UPDATE stage_record SET
                    version = version + 1, failures = 0, error = NULL, not_before = 0, visit_at = ?3,
                    due_at = CASE WHEN held_until IS NULL THEN ?3 ELSE due_at END
                WHERE lane = ?1 AND id = ?2";
            let found = tx.prepare_cached(sql)?.execute(params![lane.0, id, desk.clock.now()])?;
            desk.bells.ring(lane);
            Ok(found == 1)
        };
        self.write(Purpose::Store, retry).await
    }

    async fn reshard(&self, lane: Lane, count: u16) -> Result<(), StageError> {
        let reshard = move |tx: &Connection, _: &Desk| {
            let sql = "UPDATE stage_record SET shard = shard % ?2 WHERE lane = ?1 AND shard >= ?2";
            tx.execute(sql, params![lane.0, count.max(1)])?;
            Ok(())
        };
        self.write(Purpose::Store, reshard).await
    }

    async fn note(&self, lane: Lane, tally: Tally) -> Result<(), StageError> {
        let note = move |tx: &Connection, _: &Desk| {
            let sql = "UPDATE stage_lane SET done = done + ?2, failed = failed + ?3,
                           conflicts = conflicts + ?4
                       WHERE lane = ?1";
            let more = [tally.done, tally.failed, tally.conflicts].map(u64::cast_signed);
            tx.prepare_cached(sql)?.execute(params![lane.0, more[0], more[1], more[2]])?;
            Ok(())
        };
        self.write(Purpose::Reclaim, note).await
    }

    async fn woken(&self, lane: Lane, ear: &Ear) {
        self.bells.lanes.rung(&lane, ear).await;
    }
}

/// The user's own table of entities.
pub trait Table<E: Entity>: Send + Sync + 'static {
    /// Reads those of these ids that exist, in any order.
    fn load(&self, db: &Connection, ids: &[E::Id]) -> rusqlite::Result<Vec<E>>;

    /// Stores an entity if the row under its id still has the version `read`, and says whether it had.
    fn save(&self, tx: &Connection, entity: &E, read: Version) -> rusqlite::Result<bool>;
}

impl<E: Entity, T: Table<E>> Entities<E, Records, T> {
    /// Says that an entity is about to be created or changed: gives it its next version, and enqueues it
    /// into the system stage. Save it in the same closure.
    pub fn entity_updated(&self, tx: &Connection, entity: &mut E) -> rusqlite::Result<()> {
        entity.set_version(entity.version().next());
        self.visit_system(tx, entity)
    }

    /// [`Self::entity_updated`] for many.
    pub fn entities_updated<'e>(
        &self,
        tx: &Connection,
        entities: impl IntoIterator<Item = &'e mut E>,
    ) -> rusqlite::Result<()> {
        entities.into_iter().try_for_each(|entity| self.entity_updated(tx, entity))
    }

    fn visit_system(&self, tx: &Connection, entity: &E) -> rusqlite::Result<()> {
        let id = entity.id().to_string();
        let shard = self.shard(&id);
        self.records.desk().enqueue(tx, self.system, &id, shard, Duration::ZERO)
    }

    /// Reads the entity, has `change` change it, and saves it. Nothing if there is no such entity.
    pub async fn update(
        &self,
        id: &E::Id,
        change: impl Fn(&mut E) + Send + 'static,
    ) -> Result<Option<E>, StageError> {
        Ok(self.update_all(std::slice::from_ref(id), change).await?.pop())
    }

    /// [`Self::update`] for many: all of them in one closure, so all or none. Those that exist.
    pub async fn update_all(
        &self,
        ids: &[E::Id],
        change: impl Fn(&mut E) + Send + 'static,
    ) -> Result<Vec<E>, StageError> {
        let (this, ids) = (self.clone(), distinct(ids));
        let update = move |tx: &Connection, _: &Desk| {
            let mut entities = this.table.load(tx, &ids)?;
            for entity in &mut entities {
                let read = entity.version();
                change(entity);
                entity.set_version(read);
                this.entity_updated(tx, entity)?;
                // Nobody else writes while this closure does.
                if !this.table.save(tx, entity, read)? {
                    return Err(not_saved(entity));
                }
            }
            Ok(entities)
        };
        self.records.write(Purpose::Store, update).await
    }

    /// Saves an entity if its row still has the version `read`, whatever version it has itself.
    pub async fn save(&self, entity: E, read: Version) -> Result<Checked<E>, StageError> {
        let mut saved = self.save_all(vec![(entity, read)]).await?;
        Ok(saved.swap_remove(0)) // one answer for one entity
    }

    /// [`Self::save`] for many, one after the other in one closure: a conflict of one is none of the others', but what
    /// is refused is refused for all.
    pub async fn save_all(
        &self,
        changed: Vec<(E, Version)>,
    ) -> Result<Vec<Checked<E>>, StageError> {
        let this = self.clone();
        let save = move |tx: &Connection, _: &Desk| {
            let mut answers = Vec::with_capacity(changed.len());
            for (entity, read) in next_versions(changed) {
                if this.table.save(tx, &entity, read)? {
                    this.visit_system(tx, &entity)?;
                    answers.push(Checked::Saved(entity));
                } else {
                    answers.push(Checked::Conflict);
                }
            }
            Ok(answers)
        };
        self.records.write(Purpose::Store, save).await
    }
}

impl<E: Entity, T: Table<E>> Backend<E> for Entities<E, Records, T> {
    type Records = Records;

    fn records(&self) -> &Records {
        &self.records
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn shards(&self) -> u16 {
        self.shards
    }

    async fn load(&self, ids: Vec<E::Id>) -> Result<Vec<E>, StageError> {
        let table = Arc::clone(&self.table);
        Ok(self.records.db.read(move |db| table.load(db, &ids)).await?)
    }

    async fn settle(&self, lane: Lane, endings: Vec<Ending<E>>) -> Result<Answer, StageError> {
        let mut answers: Vec<Option<Result<Saved, Unsettled>>> = vec![None; endings.len()];
        let (mut plain, mut writes) = (Vec::new(), Vec::new());
        for (index, ending) in endings.into_iter().enumerate() {
            if ending.saves.is_none() {
                plain.push((index, ending));
                continue;
            }
            // Each in a savepoint of its own: what one is refused does not harm the others. They share a
            // commit all the same.
            let (this, desk) = (self.clone(), self.records.desk());
            let written = self.records.db.write(Purpose::Store, move |tx| {
                this.settle_saving(tx, &desk, lane, &ending).map_err(|error| stop(error.into()))
            });
            writes.push(async move { (index, written.await) });
        }
        let indexes: Vec<usize> = plain.iter().map(|(index, _)| *index).collect();
        let plain = async {
            if plain.is_empty() {
                return Ok(Vec::new());
            }
            let sorts = plain.iter().any(|(_, ending)| !ending.visits.is_empty());
            let this = self.clone();
            let settle = move |tx: &Connection, desk: &Desk| {
                let settled = plain.iter().map(|(_, ending)| {
                    let now = desk.clock.now();
                    if !ending.visits.is_empty() && is_held(tx, lane, &ending.claim, now)? {
                        this.enqueue(tx, desk, ending)?;
                    }
                    desk.settle(tx, lane, &ending.claim, &ending.fate, now)
                });
                Ok(settled.collect::<rusqlite::Result<Vec<_>>>()?)
            };
            let purpose = if sorts { Purpose::Store } else { Purpose::Reclaim };
            // If it is lost, what was to be sorted is still there.
            if lane == self.system {
                self.records.write_lazily(purpose, settle).await
            } else {
                self.records.write(purpose, settle).await
            }
        };
        let (settled, saved) = futures_util::join!(plain, futures_util::future::join_all(writes));
        let lost = |error: StageError| Unsettled::Lost(explain(&error));
        let settled = match settled {
            Ok(settled) => settled.into_iter().map(|one| Ok(Saved::Settled(one))).collect(),
            Err(error) => vec![Err(lost(error)); indexes.len()],
        };
        for (index, settled) in indexes.into_iter().zip(settled) {
            answers[index] = Some(settled);
        }
        for (index, written) in saved {
            answers[index] = Some(match written {
                Ok(saved) => Ok(saved),
                Err(WriteError::Refused(error)) => Err(Unsettled::Refused(explain(&error))),
                Err(WriteError::Lost(CommitError::Panicked)) => {
                    Err(Unsettled::Refused("it panicked while it was saved".into()))
                }
                Err(WriteError::Lost(error)) => Err(lost(error.into())),
                Err(_) => unreachable!("a write is refused or lost"),
            });
        }
        let saved = answers.into_iter().map(|answer| answer.expect("each was settled")).collect();
        // A claim is as quick as it would be to hold it.
        Ok(Answer { saved, held: HashSet::new() })
    }
}

impl<E: Entity, T: Table<E>> Entities<E, Records, T> {
    fn enqueue(&self, tx: &Connection, desk: &Desk, ending: &Ending<E>) -> rusqlite::Result<()> {
        let shard = self.shard(&ending.claim.id);
        let id = &ending.claim.id;
        ending
            .visits
            .iter()
            .try_for_each(|going| desk.enqueue(tx, going.lane, id, shard, going.after))
    }

    /// Saves the entity and settles the record, or neither.
    fn settle_saving(
        &self,
        tx: &Connection,
        desk: &Desk,
        lane: Lane,
        ending: &Ending<E>,
    ) -> rusqlite::Result<Saved> {
        let (entity, read) = ending.saves.as_ref().expect("only what is to be saved comes here");
        let now = desk.clock.now();
        if !is_held(tx, lane, &ending.claim, now)? {
            return Ok(Saved::Settled(Settled::Stale));
        }
        let mut entity = entity.clone();
        entity.set_version(read.next());
        if !self.table.save(tx, &entity, *read)? {
            desk.settle(tx, lane, &ending.claim, &Fate::Released, now)?;
            return Ok(Saved::Conflict);
        }
        self.visit_system(tx, &entity)?;
        self.enqueue(tx, desk, ending)?;
        Ok(Saved::Settled(desk.settle(tx, lane, &ending.claim, &ending.fate, now)?))
    }
}
