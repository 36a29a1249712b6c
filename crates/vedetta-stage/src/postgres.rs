//! Stages on PostgreSQL: several processes share the queues of one database.
//!
//! Time is the database's alone: no two processes compare their clocks. Within a transaction it stands still, but
//! for the question whether a lease still holds. Who enqueues says so with `NOTIFY`, so that others look at once.
//!
//! What a transaction of ours locks, it locks in this order: records of stages, entities, records of the system
//! stage; and of each the smaller ids first. One that meets another order, as a user's may, is done again
//! if PostgreSQL finds the two waiting for each other. Nobody waits long for what somebody keeps locked: if it is an
//! entity, its record is given back, and the others are saved; if it is a record, it is settled when it can be, and
//! the others at once. And nobody waits long for one of us who stalls within a transaction: the server ends it, and
//! it saves nothing. Who goes on saves what it has locked, however long that takes: a record that is locked is nobody
//! else's to claim.
//!
//! A claim does not wait for the disk: a claim lost with the server is as if it had not been made.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;
use vedetta_core::explain;
use vedetta_core::queue::{Kept, Settled, Woken};
use vedetta_db::Schema;
use vedetta_db::postgres::tokio_postgres::error::SqlState;
use vedetta_db::postgres::tokio_postgres::types::{FromSql, ToSql};
use vedetta_db::postgres::tokio_postgres::{Error, Row};
use vedetta_db::postgres::{Client, GenericClient, Heard, Postgres, PostgresError, Transaction};
use vedetta_runtime::Ear;

use crate::entities::{Checked, Entities, distinct, next_versions, not_saved};
use crate::entity::{Entity, Version};
use crate::processor::{Answer, Backend, Ending, Going, Saved, caught};
use crate::record::Records as _;
use crate::record::{
    Claim, Claimed, Fate, Lane, LaneCounts, Page, Record, StageError, Tally, Unsettled, Which,
    shortened,
};

/// The tables of the queues, for [`Postgres::open`].
pub const SCHEMA: Schema = Schema {
    component: "stage",
    steps: &["
        CREATE TABLE vedetta_stage_lane (
            lane   integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            entity text NOT NULL,
            stage  text NOT NULL,
            done      bigint NOT NULL DEFAULT 0,
            failed    bigint NOT NULL DEFAULT 0,
            conflicts bigint NOT NULL DEFAULT 0,
            UNIQUE (entity, stage)
        );
        -- A record may be claimed from due_at on: its visit time, or the end of the lease of who holds it;
        -- never, if it was set aside.
        CREATE TABLE vedetta_stage_record (
            lane       integer NOT NULL,
            id         text COLLATE \"C\" NOT NULL,
            shard      integer NOT NULL,
            due_at     timestamptz,
            visit_at   timestamptz NOT NULL,
            version    bigint NOT NULL DEFAULT 1,
            seen       bigint NOT NULL DEFAULT 0,
            token      bigint NOT NULL DEFAULT 0,
            held_until timestamptz,
            failures   integer NOT NULL DEFAULT 0,
            not_before timestamptz NOT NULL DEFAULT '-infinity',
            error      text,
            made_at    timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (lane, id)
        ) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 5000);
        CREATE INDEX vedetta_stage_due ON vedetta_stage_record (lane, shard, due_at)
            WHERE due_at IS NOT NULL;
    "],
};

/// The wait for records that are due and locked.
const BUSY: Duration = Duration::from_millis(5);

/// A table that has a transaction for less is not what the server ended it for.
const LONG: Duration = Duration::from_millis(500);

/// So often a transaction in the hands of a table is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// Records that are kept locked are looked at this often.
const LATER: Duration = Duration::from_secs(1);

/// On it goes which lane has something new, and who said so.
const CHANNEL: &str = "vedetta_stage";

/// Inserts or moves records; ids, shards and delays are arrays.
macro_rules! enqueue {
    ($from:literal) => {
        concat!(
            "INSERT INTO vedetta_stage_record AS r
                 (lane, id, shard, due_at, visit_at, token, held_until, seen)
             SELECT lane, id, shard, coalesce(held_until, at), at, token, held_until,
                    CASE WHEN held_until IS NULL THEN 0 ELSE 1 END
             FROM ",
            $from,
            " ORDER BY lane, id COLLATE \"C\"
             ON CONFLICT (lane, id) DO UPDATE SET
                version = r.version + 1,
                shard = excluded.shard,
                visit_at = greatest(r.not_before, CASE WHEN r.due_at IS NULL THEN excluded.visit_at
                                    ELSE least(r.visit_at, excluded.visit_at) END),
                failures = CASE WHEN r.due_at IS NULL THEN 0 ELSE r.failures END,
                error = CASE WHEN r.due_at IS NULL THEN NULL ELSE r.error END,
                due_at = CASE WHEN r.held_until IS NOT NULL THEN r.due_at
                              WHEN r.due_at IS NULL THEN greatest(r.not_before, excluded.visit_at)
                              ELSE greatest(r.not_before, least(r.visit_at, excluded.visit_at)) END"
        )
    };
}

/// Of one lane, and tells others.
const ENQUEUE_AND_TELL: &str = concat!(
    "WITH enqueued AS (",
    enqueue!(
        "(SELECT $1::integer AS lane, id, shard, now() + delay * interval '1 microsecond' AS at,
                 0::bigint AS token, NULL::timestamptz AS held_until
          FROM unnest($2::text[], $3::integer[], $4::bigint[]) AS u (id, shard, delay)) AS u"
    ),
    ") SELECT pg_notify('vedetta_stage', $5)"
);

/// From the system stage to others, and tells them: only for records that are still held with this token,
/// which then go, unless something was written to them. The others' records come first, see above. Those with
/// a token of their own are held under it at once, unless they are there already.
/// If the server forgets this, the record of the system stage is still there: the commit need not reach the
/// disk. No lock is waited for longer than two seconds.
const SORT: &str = concat!(
    "WITH sorted AS (",
    enqueue!(
        "(SELECT lane, id, shard, now() + delay * interval '1 microsecond' AS at, hold AS token,
                 CASE WHEN hold <> 0 THEN now() + lease * interval '1 microsecond' END AS held_until
          FROM unnest($2::integer[], $3::text[], $4::integer[], $5::bigint[], $6::bigint[],
                      $10::bigint[], $11::bigint[])
               AS u (lane, id, shard, delay, token, hold, lease)
          WHERE (SELECT set_config('lock_timeout', '2s', true)) IS NOT NULL
                AND EXISTS (SELECT FROM vedetta_stage_record h
                            WHERE h.lane = $1 AND h.id = u.id AND h.token = u.token
                                  AND h.held_until > now())) AS u"
    ),
    " RETURNING token),
    removed AS (
        DELETE FROM vedetta_stage_record
        WHERE (SELECT count(*) FROM sorted) >= 0
              AND (SELECT count(pg_notify('vedetta_stage', news)) FROM unnest($9::text[]) AS n (news)) >= 0
              AND (SELECT set_config('synchronous_commit', 'off', true)) IS NOT NULL
              AND lane = $1 AND id = ANY ($7) AND (token IN (SELECT unnest($8::bigint[]))) IS TRUE
              AND held_until > clock_timestamp() AND version = seen
        RETURNING token)
    SELECT token FROM removed UNION ALL
    SELECT token FROM sorted WHERE token <> 0 AND token = ANY ($10)"
);

// The token of a claim is a random number that nobody else has, mixed with the id, so that an id and a token
// that do not belong together are never found together.
// The commit need not reach the disk, which is said in the same statement.
const CLAIM: &str = "
    UPDATE vedetta_stage_record SET
        held_until = now() + $4::bigint * interval '1 microsecond',
        due_at = now() + $4::bigint * interval '1 microsecond',
        seen = version,
        token = $5::bigint # hashtextextended(id, 0)
    WHERE ctid = ANY (ARRAY (
        SELECT due.row FROM (
            SELECT shard FROM unnest($2::integer[]) AS s (shard)
            WHERE EXISTS (SELECT FROM vedetta_stage_record r
                          WHERE r.lane = $1 AND r.shard = s.shard AND r.due_at <= now())
            ORDER BY random() LIMIT $6
        ) AS s CROSS JOIN LATERAL (
            SELECT ctid AS row FROM vedetta_stage_record
            WHERE lane = $1 AND shard = s.shard AND due_at <= now()
            ORDER BY due_at LIMIT $3 FOR UPDATE SKIP LOCKED
        ) AS due))
      AND (SELECT set_config('synchronous_commit', 'off', true)) IS NOT NULL
    RETURNING id, token, failures";

const NEXT_DUE: &str = "
    SELECT extract(epoch FROM min(due_at) - clock_timestamp())::float8
    FROM unnest($2::integer[]) AS s (shard) CROSS JOIN LATERAL (
        SELECT due_at FROM vedetta_stage_record
        WHERE lane = $1 AND shard = s.shard AND due_at IS NOT NULL ORDER BY due_at LIMIT 1
    ) AS next";

/// What is locked is waited for up to a sixth of the lease, so that there is time to keep the others.
const KEEP: &str = "
    UPDATE vedetta_stage_record SET
        held_until = now() + $4::bigint * interval '1 microsecond',
        due_at = now() + $4::bigint * interval '1 microsecond'
    WHERE lane = $1 AND id = ANY ($2) AND (token IN (SELECT unnest($3::bigint[]))) IS TRUE
          AND (SELECT set_config('lock_timeout',
                      greatest(1, least(2000, $4::bigint / 6000))::text, true)) IS NOT NULL
          AND held_until > now()
    RETURNING token";

/// What is held yet, kept or not.
const IS_HELD: &str = "
    SELECT token FROM vedetta_stage_record
    WHERE lane = $1 AND id = ANY ($2) AND (token IN (SELECT unnest($3::bigint[]))) IS TRUE
          AND held_until > now()";

/// The ids of those records that somebody else keeps locked.
const FIND_LOCKED: &str = "
    WITH wanted AS (SELECT lane, id FROM unnest($1::integer[], $2::text[]) AS u (lane, id)),
    free AS (
        SELECT r.lane, r.id FROM vedetta_stage_record r JOIN wanted USING (lane, id)
        FOR UPDATE OF r SKIP LOCKED)
    SELECT r.id FROM vedetta_stage_record r JOIN wanted USING (lane, id)
    WHERE (r.lane, r.id) NOT IN (SELECT lane, id FROM free)";

/// Locks what is still held; until the end of the transaction nobody else can claim it, and its token is all that need
/// be asked for. From here on the transaction waits for nobody longer than two seconds, or a quarter of what is left
/// of the lease; nor does the server for us: five seconds, or half of it. So a failure to go on can be noted before it
/// is over. Zero would be for ever.
const HOLD: &str = "
    SELECT token FROM vedetta_stage_record
    WHERE lane = $1 AND id = ANY ($2) AND (token IN (SELECT unnest($3::bigint[]))) IS TRUE
          AND held_until > clock_timestamp()
          AND (SELECT set_config('lock_timeout', greatest(1, least(2000,
                      ceil(250 * extract(epoch FROM min(held_until) - now()))))::bigint::text, true)
                   || set_config('idle_in_transaction_session_timeout', greatest(1, least(5000,
                      ceil(500 * extract(epoch FROM max(held_until) - now()))))::bigint::text, true)
               FROM vedetta_stage_record WHERE lane = $1 AND id = ANY ($2)
                    AND (token IN (SELECT unnest($3::bigint[]))) IS TRUE
                    AND held_until > clock_timestamp()) IS NOT NULL
    ORDER BY id FOR UPDATE";

/// The same of who changes entities without holding their records.
const BE_QUICK: &str = "SELECT set_config('idle_in_transaction_session_timeout', '5s', true)";

/// Of these three the last parameter says that the records are locked; if they are not, none is waited for longer than
/// two seconds.
const REMOVE: &str = "
    DELETE FROM vedetta_stage_record
    WHERE lane = $1 AND id = ANY ($2) AND (token IN (SELECT unnest($3::bigint[]))) IS TRUE
          AND (SELECT set_config('lock_timeout', '2s', true)) IS NOT NULL
          AND ($4 OR held_until > clock_timestamp())
          AND version = seen
    RETURNING token";

/// Something was written to it: it stays.
const REMAIN: &str = "
    UPDATE vedetta_stage_record SET
        held_until = NULL, due_at = visit_at, failures = 0, error = NULL, not_before = '-infinity'
    WHERE lane = $1 AND id = ANY ($2) AND (token IN (SELECT unnest($3::bigint[]))) IS TRUE
          AND (SELECT set_config('lock_timeout', '2s', true)) IS NOT NULL
          AND ($4 OR held_until > clock_timestamp())
    RETURNING token, extract(epoch FROM due_at - clock_timestamp())::float8";

const MOVE: &str = "
    UPDATE vedetta_stage_record AS r SET
        visit_at = CASE WHEN u.kind = 'released' THEN r.visit_at
                        WHEN r.version = r.seen THEN now() + u.after * interval '1 microsecond'
                        WHEN u.kind = 'failed' THEN now() + u.not_before * interval '1 microsecond'
                        ELSE r.visit_at END,
        due_at = CASE WHEN u.kind = 'released' THEN r.visit_at
                      WHEN r.version = r.seen AND u.park THEN NULL
                      WHEN r.version = r.seen THEN now() + u.after * interval '1 microsecond'
                      WHEN u.kind = 'failed' THEN now() + u.not_before * interval '1 microsecond'
                      ELSE r.visit_at END,
        held_until = NULL,
        failures = CASE u.kind WHEN 'visit' THEN 0 WHEN 'failed' THEN r.failures + 1
                               ELSE r.failures END,
        error = CASE u.kind WHEN 'visit' THEN NULL WHEN 'failed' THEN u.error ELSE r.error END,
        not_before = CASE u.kind WHEN 'visit' THEN '-infinity'
                          WHEN 'failed' THEN now() + u.not_before * interval '1 microsecond'
                          ELSE r.not_before END
    FROM unnest($2::text[], $3::bigint[], $4::text[], $5::bigint[], $6::bigint[], $7::text[],
                $8::boolean[]) AS u (id, token, kind, after, not_before, error, park)
    WHERE r.lane = $1 AND r.id = u.id AND r.token = u.token
          AND (SELECT set_config('lock_timeout', '2s', true)) IS NOT NULL
          AND ($9 OR r.held_until > clock_timestamp())
    RETURNING r.token, extract(epoch FROM r.due_at - clock_timestamp())::float8";

/// The queues in one database.
#[derive(Clone)]
pub struct Records {
    db: Postgres,
    bells: Arc<Bells>,
    put_off: Arc<PutOff>,
    /// Rings them for what others do, and settles what was put off, as long as somebody is left to hear of it.
    _tasks: Arc<[AbortOnDropHandle<()>; 2]>,
}

/// What somebody kept locked, by lanes, and what is to become of it when they let go. Nobody can claim it until then,
/// so there is no more of it than they keep locked.
#[derive(Default)]
struct PutOff {
    ends: Mutex<HashMap<Lane, Vec<(Claim, Fate)>>>,
    is_any: Notify,
}

/// Wakes who works a lane.
struct Bells {
    /// Tells what we said ourselves from what others say.
    ours: u64,
    lanes: vedetta_runtime::Bells<Lane>,
}

impl Bells {
    fn ring(&self, lane: Lane) {
        self.lanes.ring(&lane, Woken::More);
    }

    /// What others are told.
    fn news(&self, lane: Lane) -> String {
        format!("{} {}", lane.0, self.ours)
    }

    fn heard(&self, news: &Heard) {
        match news {
            Heard::Again => self.lanes.ring_all(),
            Heard::Notified(news) => {
                let (lane, who) = news.split_once(' ').unwrap_or((news, ""));
                if who.parse() != Ok(self.ours)
                    && let Ok(lane) = lane.parse()
                {
                    self.ring(Lane(lane));
                }
            }
        }
    }
}

impl From<PostgresError> for StageError {
    fn from(error: PostgresError) -> Self {
        if error.is_transient() {
            Self::Unavailable(Box::new(error))
        } else {
            Self::Failed(Box::new(error))
        }
    }
}

impl From<Error> for StageError {
    fn from(error: Error) -> Self {
        PostgresError::from(error).into()
    }
}

fn micros(delay: Duration) -> i64 {
    // What is asked for later than in a thousand years is asked for then.
    const MOST: i64 = 1_000 * 366 * 24 * 3600 * 1_000_000;
    i64::try_from(delay.as_micros()).unwrap_or(MOST).min(MOST)
}

fn delay(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

/// Ids and tokens of claims, as arrays.
fn columns<'c>(claims: impl IntoIterator<Item = &'c Claim>) -> (Vec<&'c str>, Vec<i64>) {
    claims.into_iter().map(|claim| (&*claim.id, claim.token)).unzip()
}

async fn query<T: for<'r> FromSql<'r>>(
    db: &impl GenericClient,
    sql: &str,
    params: &[&(dyn ToSql + Sync)],
) -> Result<Vec<T>, Error> {
    let statement = db.prepare_cached(sql).await?;
    let rows = db.query(&statement, params).await?;
    rows.iter().map(|row| row.try_get(0)).collect()
}

/// Tokens, and after how long their records are due.
async fn query_due(
    db: &impl GenericClient,
    sql: &str,
    params: &[&(dyn ToSql + Sync)],
) -> Result<Vec<(i64, Option<f64>)>, Error> {
    let statement = db.prepare_cached(sql).await?;
    let rows = db.query(&statement, params).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

impl Records {
    /// The queues of a database that was opened with [`SCHEMA`].
    pub fn new(db: Postgres) -> Self {
        let bells =
            Arc::new(Bells { ours: fastrand::u64(..), lanes: vedetta_runtime::Bells::default() });
        let (mut listener, rung) = (db.listen(CHANNEL), Arc::clone(&bells));
        let listener = tokio::spawn(async move {
            loop {
                rung.heard(&listener.next().await);
            }
        });
        let put_off = Arc::<PutOff>::default();
        let later =
            tokio::spawn(settle_later(db.clone(), Arc::clone(&bells), Arc::clone(&put_off)));
        let tasks = Arc::new([listener, later].map(AbortOnDropHandle::new));
        Self { db, bells, put_off, _tasks: tasks }
    }

    /// The database.
    pub fn db(&self) -> &Postgres {
        &self.db
    }
}

/// Of these, those that somebody keeps locked.
async fn find_locked(
    db: &impl GenericClient,
    records: impl IntoIterator<Item = (Lane, &str)>,
) -> Result<HashSet<String>, Error> {
    let (lanes, ids): (Vec<i32>, Vec<&str>) =
        records.into_iter().map(|(lane, id)| (lane.0, id)).unzip();
    Ok(query::<String>(db, FIND_LOCKED, &[&lanes, &ids]).await?.into_iter().collect())
}

async fn keep(
    db: &impl GenericClient,
    lane: Lane,
    held: &[&Claim],
    lease: Duration,
) -> Result<Vec<i64>, StageError> {
    let (ids, tokens) = columns(held.iter().copied());
    Ok(query(db, KEEP, &[&lane.0, &ids, &tokens, &micros(lease)]).await?)
}

/// What became of records, by the tokens of their claims.
type Ended = HashMap<i64, Settled>;

/// Settles records, which are locked or else must still be held, and notes what became of each as soon as it is
/// known.
async fn settle(
    db: &impl GenericClient,
    lane: Lane,
    ends: &[(&Claim, &Fate)],
    are_locked: bool,
    ended: &mut Ended,
) -> Result<(), Error> {
    let again = |due: Option<f64>| due.map_or(Settled::Parked, |due| Settled::Again(delay(due)));

    let gone = ends.iter().filter(|(_, fate)| **fate == Fate::Gone).map(|(claim, _)| *claim);
    let (ids, tokens) = columns(gone.clone());
    if !ids.is_empty() {
        let removed: Vec<i64> = query(db, REMOVE, &[&lane.0, &ids, &tokens, &are_locked]).await?;
        ended.extend(removed.into_iter().map(|token| (token, Settled::Gone)));
        let (ids, tokens) = columns(gone.filter(|claim| !ended.contains_key(&claim.token)));
        if !ids.is_empty() {
            let remain = query_due(db, REMAIN, &[&lane.0, &ids, &tokens, &are_locked]).await?;
            ended.extend(remain.into_iter().map(|(token, due)| (token, again(due))));
        }
    }

    let mut moves = Moves::default();
    let mut moving = ends.to_vec();
    moving.sort_unstable_by(|(a, _), (b, _)| a.id.cmp(&b.id));
    moving.into_iter().for_each(|(claim, fate)| moves.push(claim, fate));
    if !moves.ids.is_empty() {
        let params: [&(dyn ToSql + Sync); 9] = [
            &lane.0,
            &moves.ids,
            &moves.tokens,
            &moves.kinds,
            &moves.afters,
            &moves.not_befores,
            &moves.errors,
            &moves.parks,
            &are_locked,
        ];
        let changed = query_due(db, MOVE, &params).await?;
        ended.extend(changed.into_iter().map(|(token, due)| (token, again(due))));
    }
    for (claim, _) in ends {
        ended.entry(claim.token).or_insert(Settled::Stale);
    }
    Ok(())
}

/// The columns of [`MOVE`].
#[derive(Default)]
struct Moves<'c> {
    ids: Vec<&'c str>,
    tokens: Vec<i64>,
    kinds: Vec<&'static str>,
    afters: Vec<i64>,
    not_befores: Vec<i64>,
    errors: Vec<Option<String>>,
    parks: Vec<bool>,
}

impl<'c> Moves<'c> {
    fn push(&mut self, claim: &'c Claim, fate: &'c Fate) {
        let zero = Duration::ZERO;
        let (kind, after, not_before, error, park) = match fate {
            Fate::Gone => return,
            Fate::Visit(after) => ("visit", *after, zero, None, false),
            Fate::Failed { after, not_before, error, park } => {
                ("failed", *after, *not_before, Some(shortened(error)), *park)
            }
            Fate::Released => ("released", zero, zero, None, false),
        };
        self.ids.push(&claim.id);
        self.tokens.push(claim.token);
        self.kinds.push(kind);
        self.afters.push(micros(after));
        self.not_befores.push(micros(not_before));
        self.errors.push(error);
        self.parks.push(park);
    }
}

impl crate::record::Records for Records {
    async fn lane(&self, entity: &str, stage: &str) -> Result<Lane, StageError> {
        let client = self.db.client().await?;
        let find = "SELECT lane FROM vedetta_stage_lane WHERE entity = $1 AND stage = $2";
        let make = "INSERT INTO vedetta_stage_lane (entity, stage) VALUES ($1, $2)
                    ON CONFLICT DO NOTHING";
        loop {
            if let Some(row) = client.query_opt(find, &[&entity, &stage]).await? {
                return Ok(Lane(row.get(0)));
            }
            client.execute(make, &[&entity, &stage]).await?;
        }
    }

    async fn enqueue(
        &self,
        lane: Lane,
        visits: &[(&str, u16, Duration)],
    ) -> Result<(), StageError> {
        let client = self.db.client().await?;
        enqueue(&client, lane, visits, &self.bells.news(lane)).await?;
        self.bells.ring(lane);
        Ok(())
    }

    async fn claim(
        &self,
        lane: Lane,
        shards: &[u16],
        room: u32,
        lease: Duration,
    ) -> Result<Claimed, StageError> {
        if shards.is_empty() || room == 0 {
            return Ok(Claimed { claims: Vec::new(), rest: Some(Duration::MAX) });
        }
        let client = self.db.client().await?;
        let all: Vec<i32> = shards.iter().map(|shard| i32::from(*shard)).collect();
        // With fewer places than shards, chance decides which of those that have something due have a turn.
        let turns = i64::from(room).min(i64::try_from(all.len()).unwrap_or(i64::MAX));
        let each = i64::from(room) / turns;
        let (claim, next) =
            tokio::try_join!(client.prepare_cached(CLAIM), client.prepare_cached(NEXT_DUE))?;
        let (lease, token) = (micros(lease), fastrand::i64(..));
        let claim_params: [&(dyn ToSql + Sync); 6] = [&lane.0, &all, &each, &lease, &token, &turns];
        let next_params: [&(dyn ToSql + Sync); 2] = [&lane.0, &all];
        // Sent together, done one after the other.
        let (rows, next) = tokio::try_join!(
            client.query(&claim, &claim_params),
            client.query_one(&next, &next_params),
        )?;
        let mut claims = Vec::with_capacity(rows.len());
        for row in rows {
            claims.push(Claim {
                id: row.try_get::<_, &str>(0)?.into(),
                token: row.try_get(1)?,
                failures: u32::try_from(row.try_get::<_, i32>(2)?).unwrap_or(0),
            });
        }
        let seconds = next.try_get::<_, Option<f64>>(0)?;
        let rest = match seconds {
            _ if claims.len() == room as usize => None,
            // It was due before, and somebody writes to it: soon it may be had.
            Some(due) if claims.is_empty() && due < -BUSY.as_secs_f64() => Some(BUSY),
            Some(due) => Some(delay(due)),
            None => Some(Duration::MAX),
        };
        Ok(Claimed { claims, rest })
    }

    async fn keep(
        &self,
        lane: Lane,
        held: &[&Claim],
        lease: Duration,
    ) -> Result<Vec<Kept>, StageError> {
        let client = self.db.client().await?;
        let mut unknown = Vec::new();
        let kept = match keep(&client, lane, held, lease).await {
            // They must not cost the others their leases. They are asked for again before their own are over.
            Err(error) if is_locked(&error) => {
                let all = held.iter().map(|claim| (lane, &*claim.id));
                let all = find_locked(&client, all).await?;
                let (mut locked, free): (Vec<&Claim>, Vec<&Claim>) =
                    held.iter().partition(|claim| all.contains(&*claim.id));
                let kept = match keep(&client, lane, &free, lease).await {
                    Err(error) if is_locked(&error) => {
                        locked.extend(free);
                        Vec::new()
                    }
                    kept => kept?,
                };
                let (ids, tokens) = columns(locked);
                unknown = query(&client, IS_HELD, &[&lane.0, &ids, &tokens]).await?;
                kept
            }
            kept => kept?,
        };
        let [kept, unknown] = [kept, unknown].map(HashSet::<i64>::from_iter);
        let answer = |claim: &&Claim| match claim.token {
            token if kept.contains(&token) => Kept::Ours,
            token if unknown.contains(&token) => Kept::Unknown,
            _ => Kept::Lost,
        };
        Ok(held.iter().map(answer).collect())
    }

    async fn settle(&self, lane: Lane, ends: &[(Claim, Fate)]) -> Result<Vec<Settled>, StageError> {
        let ends: Vec<_> = ends.iter().map(|(claim, fate)| (claim, fate)).collect();
        let mut ended = Ended::with_capacity(ends.len());
        self.settle_known(lane, &ends, &mut ended).await?;
        Ok(ends.iter().map(|(claim, _)| ended[&claim.token]).collect())
    }

    async fn counts(&self) -> Result<Vec<LaneCounts>, StageError> {
        let client = self.db.client().await?;
        let sql = "
            SELECT entity, stage, count(r.lane),
                   count(*) FILTER (WHERE due_at <= now()),
                   count(*) FILTER (WHERE held_until > now()),
                   count(*) FILTER (WHERE failures > 0 AND due_at IS NOT NULL),
                   count(r.lane) - count(due_at),
                   extract(epoch FROM now() - min(due_at) FILTER (WHERE due_at <= now()))::float8,
                   done, failed, conflicts
            FROM vedetta_stage_lane l LEFT JOIN vedetta_stage_record r USING (lane)
            GROUP BY l.lane, entity, stage ORDER BY entity COLLATE \"C\", stage COLLATE \"C\"";
        let count = |row: &Row, column| row.get::<_, i64>(column).unsigned_abs();
        let rows = client.query(sql, &[]).await?;
        let lanes = rows.iter().map(|row| LaneCounts {
            entity: row.get(0),
            stage: row.get(1),
            records: count(row, 2),
            due: count(row, 3),
            held: count(row, 4),
            failing: count(row, 5),
            parked: count(row, 6),
            oldest_due: row.get::<_, Option<f64>>(7).map(delay),
            tally: Tally { done: count(row, 8), failed: count(row, 9), conflicts: count(row, 10) },
        });
        Ok(lanes.collect())
    }

    async fn list(&self, entity: &str, which: &Which, limit: u32) -> Result<Page, StageError> {
        let client = self.db.client().await?;
        let (stage, id) = which.after.clone().unwrap_or_default();
        let sql = "
            SELECT stage, id, extract(epoch FROM due_at - now())::float8,
                   coalesce(held_until > now(), false), failures, error, due_at IS NULL,
                   extract(epoch FROM now() - made_at)::float8
            FROM vedetta_stage_lane JOIN vedetta_stage_record USING (lane)
            WHERE entity = $1 AND ($2::text IS NULL OR stage = $2) AND ($3::text IS NULL OR id = $3)
                  AND (NOT $4 OR due_at IS NULL)
                  AND (stage COLLATE \"C\", id) > ($5::text COLLATE \"C\", $6::text COLLATE \"C\")
            ORDER BY stage COLLATE \"C\", id LIMIT $7";
        let one_more = i64::from(limit) + 1;
        let params: [&(dyn ToSql + Sync); 7] =
            [&entity, &which.stage, &which.id, &which.parked, &stage, &id, &one_more];
        let rows = client.query(sql, &params).await?;
        let record = |row: &Row| {
            let (due, is_held): (Option<f64>, bool) = (row.get(2), row.get(3));
            Record {
                entity: entity.to_owned(),
                stage: row.get(0),
                id: row.get(1),
                due_in: due.filter(|due| *due > 0.0 && !is_held).map(delay),
                is_held,
                failures: u32::try_from(row.get::<_, i32>(4)).unwrap_or(0),
                error: row.get(5),
                is_parked: row.get(6),
                age: delay(row.get(7)),
            }
        };
        let records = rows.iter().take(limit as usize).map(record).collect();
        Ok(Page { records, more: rows.len() > limit as usize })
    }

    async fn retry(&self, entity: &str, stage: &str, id: &str) -> Result<bool, StageError> {
        let client = self.db.client().await?;
        let sql = "
            UPDATE vedetta_stage_record SET
                version = version + 1, failures = 0, error = NULL, not_before = '-infinity',
                visit_at = now(),
                due_at = CASE WHEN held_until IS NULL THEN now() ELSE due_at END
            WHERE lane = (SELECT lane FROM vedetta_stage_lane WHERE entity = $1 AND stage = $2)
                  AND id = $3
            RETURNING lane";
        let Some(row) = client.query_opt(sql, &[&entity, &stage, &id]).await? else {
            return Ok(false);
        };
        let lane = Lane(row.get(0));
        tell(&client, &self.bells, lane).await?;
        self.bells.ring(lane);
        Ok(true)
    }

    async fn reshard(&self, lane: Lane, count: u16) -> Result<(), StageError> {
        let client = self.db.client().await?;
        let sql =
            "UPDATE vedetta_stage_record SET shard = shard % $2 WHERE lane = $1 AND shard >= $2";
        client.execute(sql, &[&lane.0, &i32::from(count.max(1))]).await?;
        Ok(())
    }

    async fn note(&self, lane: Lane, tally: Tally) -> Result<(), StageError> {
        let client = self.db.client().await?;
        let sql = "UPDATE vedetta_stage_lane SET done = done + $2, failed = failed + $3,
                       conflicts = conflicts + $4
                   WHERE lane = $1";
        let more = [tally.done, tally.failed, tally.conflicts].map(u64::cast_signed);
        client.execute(sql, &[&lane.0, &more[0], &more[1], &more[2]]).await?;
        Ok(())
    }

    async fn woken(&self, lane: Lane, ear: &Ear) {
        self.bells.lanes.rung(&lane, ear).await;
    }
}

impl Records {
    /// Settles records that nothing else is stored for, and notes what became of each as soon as it is known.
    async fn settle_known(
        &self,
        lane: Lane,
        ends: &[(&Claim, &Fate)],
        ended: &mut Ended,
    ) -> Result<(), StageError> {
        let client = self.db.client().await?;
        let mut settled = settle(&client, lane, ends, false, ended).await.map_err(StageError::from);
        if settled.as_ref().is_err_and(is_locked) {
            settled = settle_free(&client, lane, ends, ended)
                .await
                .map(|locked| self.put_off(lane, locked, ended));
        }
        match settled {
            Ok(()) => {}
            Err(error) if error.is_transient() || ends.len() == 1 => return Err(error),
            // One that cannot be settled must not hold up the others: its lease will lapse.
            Err(_) => {
                for end in ends {
                    let token = end.0.token;
                    if ended.contains_key(&token) {
                        continue;
                    }
                    let one = settle(&client, lane, std::slice::from_ref(end), false, ended).await;
                    if let Err(error) = one.map_err(StageError::from) {
                        if error.is_transient() {
                            return Err(error);
                        }
                        if is_locked(&error) {
                            self.put_off(lane, [*end], ended);
                            continue;
                        }
                        let why = explain(&error);
                        tracing::error!(id = &*end.0.id, error = why, "cannot be settled");
                        ended.insert(token, Settled::Stale);
                    }
                }
            }
        }
        // What was put off may not be taken yet.
        let later = Settled::Again(LATER);
        let settled = ends.iter().filter(|(claim, _)| ended.get(&claim.token) != Some(&later));
        if gives_back(settled.map(|(_, fate)| *fate)) {
            self.bells.ring(lane);
            tell(&client, &self.bells, lane).await?;
        }
        Ok(())
    }

    /// Has what is not settled wait until it is no longer locked. It is answered as due again, since it may be: who
    /// has locked it is about to write to it.
    fn put_off<'e>(
        &self,
        lane: Lane,
        ends: impl IntoIterator<Item = (&'e Claim, &'e Fate)>,
        ended: &mut Ended,
    ) {
        let mut put_off = self.put_off.ends.lock();
        for (claim, fate) in ends {
            if let Entry::Vacant(entry) = ended.entry(claim.token) {
                entry.insert(Settled::Again(LATER));
                put_off.entry(lane).or_default().push((claim.clone(), fate.clone()));
                self.put_off.is_any.notify_one();
            }
        }
    }
}

/// Settles what was put off, once nobody keeps it locked any more. Its leases are not prolonged: what lapses meanwhile is
/// done again, as is what is left at the end.
async fn settle_later(db: Postgres, bells: Arc<Bells>, put_off: Arc<PutOff>) {
    loop {
        put_off.is_any.notified().await;
        loop {
            sleep(LATER).await;
            let ends = std::mem::take(&mut *put_off.ends.lock());
            if ends.is_empty() {
                break;
            }
            for (lane, ends) in ends {
                let left = settle_unlocked(&db, &bells, lane, ends).await;
                if !left.is_empty() {
                    put_off.ends.lock().entry(lane).or_default().extend(left);
                }
            }
        }
    }
}

/// Settles those that nobody keeps locked, each for itself. What is left: the others, and what could not be settled now.
async fn settle_unlocked(
    db: &Postgres,
    bells: &Bells,
    lane: Lane,
    ends: Vec<(Claim, Fate)>,
) -> Vec<(Claim, Fate)> {
    let all = ends.iter().map(|(claim, _)| (lane, &*claim.id));
    let Ok(client) = db.client().await.map_err(StageError::from) else { return ends };
    let Ok(locked) = find_locked(&client, all).await else { return ends };
    let (mut left, mut is_any_due) = (Vec::new(), false);
    for (claim, fate) in ends {
        if locked.contains(&*claim.id) {
            left.push((claim, fate));
            continue;
        }
        let mut ended = Ended::new();
        let settled = settle(&client, lane, &[(&claim, &fate)], false, &mut ended).await;
        match settled.map_err(StageError::from) {
            Ok(()) => {
                let is_due =
                    |settled: &Settled| matches!(settled, Settled::Again(after) if *after < LATER);
                is_any_due |= ended.values().any(is_due);
            }
            Err(error) if error.is_transient() || is_locked(&error) => left.push((claim, fate)),
            Err(error) => {
                let why = explain(&error);
                tracing::error!(id = &*claim.id, error = why, "cannot be settled");
            }
        }
    }
    if is_any_due {
        bells.ring(lane);
        // If it is lost, others find it when they look.
        let _ = tell(&client, bells, lane).await;
    }
    left
}

/// Settles those that nobody keeps locked. The others.
async fn settle_free<'e>(
    client: &Client,
    lane: Lane,
    ends: &[(&'e Claim, &'e Fate)],
    ended: &mut Ended,
) -> Result<Vec<(&'e Claim, &'e Fate)>, StageError> {
    let left = ends.iter().filter(|(claim, _)| !ended.contains_key(&claim.token));
    let left: Vec<_> = left.copied().collect();
    let all = left.iter().map(|(claim, _)| (lane, &*claim.id));
    let all = find_locked(client, all).await?;
    let (mut locked, free): (Vec<_>, Vec<_>) =
        left.into_iter().partition(|(claim, _)| all.contains(&*claim.id));
    match settle(client, lane, &free, false, ended).await.map_err(StageError::from) {
        Err(error) if is_locked(&error) => locked.extend(free),
        settled => settled?,
    }
    Ok(locked)
}

/// Tells others, once what `db` is in is committed, that there is something to take.
async fn tell(db: &impl GenericClient, bells: &Bells, lane: Lane) -> Result<(), Error> {
    let statement = db.prepare_cached("SELECT pg_notify($1, $2)").await?;
    db.execute(&statement, &[&CHANNEL, &bells.news(lane)]).await?;
    Ok(())
}

/// The table was at something else until the server ended its transaction.
#[derive(Debug, thiserror::Error)]
#[error("the table let the database wait for too long between two statements")]
struct Silent;

fn silent() -> StageError {
    StageError::Failed(Box::new(Silent))
}

fn is_silent(error: &StageError) -> bool {
    matches!(error, StageError::Failed(cause) if cause.is::<Silent>())
}

/// Whether the server has ended the transaction of a table that had it for so long: it says so, or no more than that
/// the line is gone. A server that went away meanwhile is taken for it, too, and the entity is tried again.
fn was_ended(error: &StageError, had: Duration) -> bool {
    let StageError::Unavailable(cause) = error else { return false };
    match cause.downcast_ref() {
        Some(PostgresError::Refused { code, .. }) => {
            code == SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT.code()
        }
        Some(PostgresError::Lost(_)) => had >= LONG,
        _ => false,
    }
}

/// Somebody kept something locked for too long.
fn is_locked(error: &StageError) -> bool {
    let StageError::Failed(cause) = error else { return false };
    let code = SqlState::LOCK_NOT_AVAILABLE;
    matches!(cause.downcast_ref(), Some(PostgresError::Refused { code: found, .. }) if found == code.code())
}

/// Somebody else was in the way, and the connection is as good as before.
fn stood_in_the_way(error: &StageError) -> bool {
    let StageError::Unavailable(cause) = error else { return false };
    cause.downcast_ref().is_some_and(PostgresError::stood_in_the_way)
}

/// How it ends if it cannot go where it is to go.
fn unsorted<E>(ending: &Ending<E>) -> (&Claim, &Fate) {
    let fate = if ending.visits.is_empty() { &ending.fate } else { &Fate::Released };
    (&ending.claim, fate)
}

/// What was given back may be taken by others at once.
fn gives_back<'f>(mut fates: impl Iterator<Item = &'f Fate>) -> bool {
    fates.any(|fate| *fate == Fate::Released)
}

async fn enqueue(
    db: &impl GenericClient,
    lane: Lane,
    visits: &[(&str, u16, Duration)],
    news: &str,
) -> Result<(), Error> {
    let mut earliest: BTreeMap<&str, (i32, i64)> = BTreeMap::new();
    for (id, shard, delay) in visits {
        let delay = micros(*delay);
        let visit = earliest.entry(id).or_insert((i32::from(*shard), delay));
        visit.1 = visit.1.min(delay);
    }
    let ids: Vec<&str> = earliest.keys().copied().collect();
    let (shards, delays): (Vec<i32>, Vec<i64>) = earliest.into_values().unzip();
    let statement = db.prepare_cached(ENQUEUE_AND_TELL).await?;
    db.execute(&statement, &[&lane.0, &ids, &shards, &delays, &news]).await?;
    Ok(())
}

/// The user's own table of entities.
pub trait Table<E: Entity>: Send + Sync + 'static {
    /// Reads those of these ids that exist, in any order.
    fn load(
        &self,
        db: &impl GenericClient,
        ids: &[E::Id],
    ) -> impl Future<Output = Result<Vec<E>, Error>> + Send;

    /// Stores an entity if the row under its id still has the version `read`, and says whether it had.
    fn save(
        &self,
        tx: &Transaction<'_>,
        entity: &E,
        read: Version,
    ) -> impl Future<Output = Result<bool, Error>> + Send;

    /// [`Self::save`] for many, in the order of their ids. A stage that changes many entities is saved in
    /// batches: one statement for all of a batch saves as many round trips.
    fn save_all(
        &self,
        tx: &Transaction<'_>,
        changed: &[(E, Version)],
    ) -> impl Future<Output = Result<Vec<bool>, Error>> + Send {
        async move {
            let mut saved = Vec::with_capacity(changed.len());
            for (entity, read) in changed {
                saved.push(self.save(tx, entity, *read).await?);
            }
            Ok(saved)
        }
    }
}

impl<E: Entity, T: Table<E>> Entities<E, Records, T> {
    /// Says that an entity is about to be created or changed: gives it its next version, and enqueues it
    /// into the system stage. Save it in the same transaction; if it is not new, lock its row before, with
    /// `SELECT … FOR UPDATE`: whoever locks first the record and then the entity may meet a stage that does
    /// it the other way round, and PostgreSQL then ends one of the two.
    pub async fn entity_updated(&self, tx: &Transaction<'_>, entity: &mut E) -> Result<(), Error> {
        self.entities_updated(tx, [entity]).await
    }

    /// [`Self::entity_updated`] for many, with one statement.
    pub async fn entities_updated<'e>(
        &self,
        tx: &Transaction<'_>,
        entities: impl IntoIterator<Item = &'e mut E> + Send,
    ) -> Result<(), Error> {
        let ids: Vec<String> = entities
            .into_iter()
            .map(|entity| {
                entity.set_version(entity.version().next());
                entity.id().to_string()
            })
            .collect();
        // Ourselves included: when this transaction is committed, and not now.
        self.visit_system(tx, &ids, &self.system.0.to_string()).await
    }

    async fn visit_system(
        &self,
        tx: &Transaction<'_>,
        ids: &[String],
        news: &str,
    ) -> Result<(), Error> {
        let visits: Vec<_> =
            ids.iter().map(|id| (id.as_str(), self.shard(id), Duration::ZERO)).collect();
        enqueue(tx, self.system, &visits, news).await
    }

    /// Reads the entity, has `change` change it, and saves it; again from the start if somebody else saved
    /// it meanwhile. Nothing if there is no such entity.
    pub async fn update(
        &self,
        id: &E::Id,
        change: impl Fn(&mut E) + Send + Sync,
    ) -> Result<Option<E>, StageError> {
        Ok(self.update_all(std::slice::from_ref(id), change).await?.pop())
    }

    /// [`Self::update`] for many, with as few statements as [`Table::save_all`] takes. Those that exist. What
    /// somebody else saved meanwhile is done again, in a transaction of its own. Fails if the table does not
    /// save one that nobody else did.
    pub async fn update_all(
        &self,
        ids: &[E::Id],
        change: impl Fn(&mut E) + Send + Sync,
    ) -> Result<Vec<E>, StageError> {
        let (mut left, mut updated) = (distinct(ids), Vec::with_capacity(ids.len()));
        let mut tried: HashMap<String, Version> = HashMap::new();
        let mut client = self.records.db.client().await?;
        while !left.is_empty() {
            let once = self.update_once(&mut client, &left, &change, &tried).await;
            let (changed, saved) = match once {
                Err(error) if stood_in_the_way(&error) => continue,
                once => once?,
            };
            left.clear();
            for ((entity, read), saved) in changed.into_iter().zip(saved) {
                if saved {
                    updated.push(entity);
                } else {
                    tried.insert(entity.id().to_string(), read);
                    left.push(entity.id());
                }
            }
        }
        Ok(updated)
    }

    /// Reads, changes and saves them in one transaction. What it made of them, with the versions that were read, and
    /// which are saved. One that was `tried` on the version that it still has is not tried again.
    async fn update_once(
        &self,
        client: &mut Client,
        ids: &[E::Id],
        change: &(impl Fn(&mut E) + Send + Sync),
        tried: &HashMap<String, Version>,
    ) -> Result<(Vec<(E, Version)>, Vec<bool>), StageError> {
        let tx = client.transaction().await?;
        let mut changed: Vec<(E, Version)> = Vec::with_capacity(ids.len());
        for mut entity in self.table.load(&tx, ids).await? {
            let read = entity.version();
            // Nobody else saved it, so it would be the same again and again.
            if tried.get(&entity.id().to_string()) == Some(&read) {
                return Err(not_saved(&entity));
            }
            change(&mut entity);
            entity.set_version(read.next());
            changed.push((entity, read));
        }
        changed.sort_by_cached_key(|(entity, _)| entity.id().to_string());
        let saved = self.save_in(tx, &changed).await?;
        Ok((changed, saved))
    }

    /// Saves an entity if its row still has the version `read`, whatever version it has itself.
    pub async fn save(&self, entity: E, read: Version) -> Result<Checked<E>, StageError> {
        let mut saved = self.save_all(vec![(entity, read)]).await?;
        Ok(saved.swap_remove(0)) // one answer for one entity
    }

    /// [`Self::save`] for many, in one transaction and with as few statements as [`Table::save_all`] takes: a conflict
    /// of one is none of the others', but what is refused is refused for all. Of one that is there twice, one is a
    /// conflict.
    pub async fn save_all(
        &self,
        changed: Vec<(E, Version)>,
    ) -> Result<Vec<Checked<E>>, StageError> {
        let mut answers: Vec<Checked<E>> = changed.iter().map(|_| Checked::Conflict).collect();
        let by_id: BTreeMap<String, (usize, (E, Version))> = next_versions(changed)
            .enumerate()
            .map(|(index, (entity, read))| (entity.id().to_string(), (index, (entity, read))))
            .collect();
        let (indexes, changed): (Vec<usize>, Vec<(E, Version)>) = by_id.into_values().unzip();
        let mut client = self.records.db.client().await?;
        let saved = loop {
            match self.save_in(client.transaction().await?, &changed).await {
                Err(error) if stood_in_the_way(&error) => {}
                saved => break saved?,
            }
        };
        for ((index, (entity, _)), saved) in indexes.into_iter().zip(changed).zip(saved) {
            if saved {
                answers[index] = Checked::Saved(entity);
            }
        }
        Ok(answers)
    }

    /// Saves what still has the version that was read, in the order of the ids, has the system stage visit it, and
    /// commits. Which are saved.
    async fn save_in(
        &self,
        tx: Transaction<'_>,
        changed: &[(E, Version)],
    ) -> Result<Vec<bool>, StageError> {
        let be_quick = async { tx.execute(&tx.prepare_cached(BE_QUICK).await?, &[]).await };
        // Sent before, and answered with, the first statement of the table.
        let (_, saved) = tokio::try_join!(be_quick, self.table.save_all(&tx, changed))?;
        let told = changed.iter().zip(&saved).filter(|(_, saved)| **saved);
        let told: Vec<String> = told.map(|((entity, _), _)| entity.id().to_string()).collect();
        if !told.is_empty() {
            self.visit_system(&tx, &told, &self.records.bells.news(self.system)).await?;
        }
        tx.commit().await?;
        self.records.bells.ring(self.system);
        Ok(saved)
    }

    /// Settles what saves nothing, as far as it can. Which tokens of those that go elsewhere are held.
    async fn settle_plain(
        &self,
        lane: Lane,
        endings: &[&Ending<E>],
    ) -> Result<(Vec<Result<Saved, Unsettled>>, HashSet<i64>), StageError> {
        let mut ends: Vec<_> = endings.iter().map(|ending| (&ending.claim, &ending.fate)).collect();
        let (mut ended, mut held) = (Ended::with_capacity(ends.len()), HashSet::new());
        if endings.iter().any(|ending| !ending.visits.is_empty()) {
            held = match self.sort(lane, endings, &mut ended).await {
                Err(error) if is_locked(&error) => {
                    self.sort_free(lane, endings, &mut ended).await?
                }
                sorted => sorted?,
            };
            ends.retain(|(claim, _)| !ended.contains_key(&claim.token));
        }
        let mut lost = String::new();
        if !ends.is_empty()
            && let Err(error) = self.records.settle_known(lane, &ends, &mut ended).await
        {
            lost = explain(&error);
        }
        let answer = |ending: &&Ending<E>| match ended.get(&ending.claim.token) {
            Some(settled) => Ok(Saved::Settled(*settled)),
            None => Err(Unsettled::Lost(lost.clone())),
        };
        Ok((endings.iter().map(answer).collect(), held))
    }

    /// [`Self::sort`] for those of which nobody keeps a record locked. The others are to be asked about again.
    async fn sort_free(
        &self,
        lane: Lane,
        endings: &[&Ending<E>],
        ended: &mut Ended,
    ) -> Result<HashSet<i64>, StageError> {
        let lanes = |ending: &Ending<E>| -> Vec<Lane> {
            ending.visits.iter().map(|going| going.lane).chain([lane]).collect()
        };
        let all = endings
            .iter()
            .flat_map(|ending| lanes(ending).into_iter().map(|lane| (lane, &*ending.claim.id)));
        let locked = find_locked(&self.records.db.client().await?, all).await?;
        let (locked, free): (Vec<&Ending<E>>, Vec<&Ending<E>>) =
            endings.iter().partition(|ending| locked.contains(&*ending.claim.id));
        self.records.put_off(lane, locked.into_iter().map(unsorted), ended);
        match self.sort(lane, &free, ended).await {
            Err(error) if is_locked(&error) => {
                self.records.put_off(lane, free.into_iter().map(unsorted), ended);
                Ok(HashSet::new())
            }
            sorted => sorted,
        }
    }

    /// Enqueues entities where they are to go, and removes records that may go. Which tokens are held.
    async fn sort(
        &self,
        lane: Lane,
        endings: &[&Ending<E>],
        ended: &mut Ended,
    ) -> Result<HashSet<i64>, StageError> {
        let records = &self.records;
        let mut visits: BTreeMap<(i32, &str), (i64, &Going)> = BTreeMap::new();
        for ending in endings {
            for going in &ending.visits {
                visits.insert((going.lane.0, &ending.claim.id), (ending.claim.token, going));
            }
        }
        let lanes: Vec<i32> = visits.keys().map(|(lane, _)| *lane).collect();
        let ids: Vec<&str> = visits.keys().map(|(_, id)| *id).collect();
        let shards: Vec<i32> = ids.iter().map(|id| i32::from(self.shard(id))).collect();
        let tokens: Vec<i64> = visits.values().map(|(token, _)| *token).collect();
        let delays: Vec<i64> = visits.values().map(|(_, going)| micros(going.after)).collect();
        let own = |(_, going): &(i64, &Going)| going.hold.map_or((0, 0), |(t, l)| (t, micros(l)));
        let (own_tokens, leases): (Vec<i64>, Vec<i64>) = visits.values().map(own).unzip();

        // Nobody else can take what is held.
        let mut told: Vec<i32> = visits
            .iter()
            .filter(|(_, (_, g))| g.hold.is_none())
            .map(|((lane, _), _)| *lane)
            .collect();
        told.dedup();
        let news: Vec<String> = told.iter().map(|lane| records.bells.news(Lane(*lane))).collect();
        let gone = endings.iter().filter(|ending| ending.fate == Fate::Gone);
        let (gone, gone_tokens) = columns(gone.map(|ending| &ending.claim));

        let params: [&(dyn ToSql + Sync); 11] = [
            &lane.0,
            &lanes,
            &ids,
            &shards,
            &delays,
            &tokens,
            &gone,
            &gone_tokens,
            &news,
            &own_tokens,
            &leases,
        ];
        let found: Vec<i64> = query(&records.db.client().await?, SORT, &params).await?;
        let found: HashSet<i64> = found.into_iter().collect();
        let held: HashSet<i64> =
            own_tokens.into_iter().filter(|token| found.contains(token)).collect();
        let due =
            visits.iter().filter(|(_, (_, g))| g.hold.is_none_or(|(t, _)| !held.contains(&t)));
        let mut rung: Vec<i32> = due.map(|((lane, _), _)| *lane).collect();
        rung.dedup();
        rung.into_iter().for_each(|lane| records.bells.ring(Lane(lane)));
        let tokens = endings.iter().map(|ending| ending.claim.token);
        let gone = tokens.filter(|token| found.contains(token));
        ended.extend(gone.map(|token| (token, Settled::Gone)));
        Ok(held)
    }

    /// Each in a transaction of its own, as what could not be done for all may be the matter of one. None is tried
    /// any more once the database is away, nor after one that let it wait, or that it waited for: meanwhile the others
    /// would lose their leases, so that one is to be noted first.
    async fn settle_each(
        &self,
        lane: Lane,
        endings: &[&Ending<E>],
    ) -> Vec<Result<Saved, Unsettled>> {
        let mut lost: Option<String> = None;
        let mut answers = Vec::with_capacity(endings.len());
        for ending in endings {
            if let Some(why) = &lost {
                answers.push(Err(Unsettled::Lost(why.clone())));
                continue;
            }
            let mut tried = caught(self.settle_saving(lane, &[ending])).await;
            if let Err(error) = &tried
                && is_locked(error)
            {
                lost = Some(explain(error));
                let given_back = [(ending.claim.clone(), Fate::Released)];
                let settled = self.records.settle(lane, &given_back).await;
                tried = settled.map(|_| vec![Saved::Conflict]);
            }
            answers.push(tried.map(|saved| saved[0]).map_err(|error| {
                let why = explain(&error);
                let is_away = error.is_transient() && !stood_in_the_way(&error);
                if is_away || is_silent(&error) {
                    lost = Some(why.clone());
                }
                if error.is_transient() { Unsettled::Lost(why) } else { Unsettled::Refused(why) }
            }));
        }
        answers
    }

    /// Saves entities and settles their records, in one transaction.
    async fn settle_saving(
        &self,
        lane: Lane,
        endings: &[&Ending<E>],
    ) -> Result<Vec<Saved>, StageError> {
        let records = &self.records;
        let mut client = records.db.client().await?;
        let tx = client.transaction().await?;
        let (ids, tokens) = columns(endings.iter().map(|ending| &ending.claim));
        let held: Vec<i64> = query(&tx, HOLD, &[&lane.0, &ids, &tokens]).await?;
        let held: HashSet<i64> = held.into_iter().collect();

        let mut saving: Vec<(usize, (E, Version))> = Vec::with_capacity(held.len());
        for (index, ending) in endings.iter().enumerate() {
            if held.contains(&ending.claim.token)
                && let Some((entity, read)) = &ending.saves
            {
                let mut entity = entity.clone();
                entity.set_version(read.next());
                saving.push((index, (entity, *read)));
            }
        }
        saving.sort_by(|(a, _), (b, _)| endings[*a].claim.id.cmp(&endings[*b].claim.id));
        let (indexes, changed): (Vec<usize>, Vec<(E, Version)>) = saving.into_iter().unzip();
        let began = Instant::now();
        let saved = tokio::select! {
            biased; // what the table waits for the server for, it is told itself
            saved = self.table.save_all(&tx, &changed) => saved,
            () = closed(&tx) => return Err(silent()),
        };
        let took = began.elapsed();
        // It may have gone on before anybody looked.
        let or_silent = |error: StageError| if was_ended(&error, took) { silent() } else { error };
        let saved = saved.map_err(|error| or_silent(error.into()))?;

        let mut answers = vec![Saved::Settled(Settled::Stale); endings.len()];
        let (mut visits, mut ends, mut settling) = (Vec::new(), Vec::new(), Vec::new());
        for (index, saved) in indexes.into_iter().zip(saved) {
            let ending = endings[index];
            if saved {
                visits.push(ending.claim.id.to_string());
                ends.push((&ending.claim, &ending.fate));
            } else {
                answers[index] = Saved::Conflict;
                ends.push((&ending.claim, &Fate::Released));
            }
            settling.push(index);
        }
        if !visits.is_empty() {
            let news = records.bells.news(self.system);
            let visited = self.visit_system(&tx, &visits, &news).await;
            visited.map_err(|error| or_silent(error.into()))?;
        }
        let mut ended = Ended::with_capacity(ends.len());
        let settled = settle(&tx, lane, &ends, true, &mut ended).await;
        settled.map_err(|error| or_silent(error.into()))?;
        for index in settling {
            if answers[index] != Saved::Conflict {
                answers[index] = Saved::Settled(ended[&endings[index].claim.token]);
            }
        }
        tx.commit().await?;
        records.bells.ring(self.system);
        Ok(answers)
    }
}

/// Returns once the server has ended the connection.
async fn closed(tx: &Transaction<'_>) {
    while !tx.client().is_closed() {
        sleep(LOOK).await;
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
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let client = self.records.db.client().await?;
        Ok(self.table.load(&client, &ids).await?)
    }

    async fn settle(&self, lane: Lane, endings: Vec<Ending<E>>) -> Result<Answer, StageError> {
        let (saving, plain): (Vec<usize>, Vec<usize>) =
            (0..endings.len()).partition(|index| endings[*index].saves.is_some());
        let mut answers: Vec<Option<Result<Saved, Unsettled>>> = vec![None; endings.len()];
        let mut held = HashSet::new();
        if !plain.is_empty() {
            let some: Vec<_> = plain.iter().map(|index| &endings[*index]).collect();
            let settled;
            (settled, held) = self.settle_plain(lane, &some).await?;
            for (index, settled) in plain.into_iter().zip(settled) {
                answers[index] = Some(settled);
            }
        }
        if !saving.is_empty() {
            let some: Vec<_> = saving.iter().map(|index| &endings[*index]).collect();
            let saved = match caught(self.settle_saving(lane, &some)).await {
                Ok(saved) => saved.into_iter().map(Ok).collect(),
                Err(_) => self.settle_each(lane, &some).await,
            };
            for (index, saved) in saving.into_iter().zip(saved) {
                answers[index] = Some(saved);
            }
        }
        let saved = answers.into_iter().map(|answer| answer.expect("each was settled")).collect();
        Ok(Answer { saved, held })
    }
}
