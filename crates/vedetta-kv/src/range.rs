//! Reading keys: at which revision, where the values are, and the finishing touches.

use std::cmp::Ordering;

use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension as _};
use vedetta_core::Revision;
use vedetta_db::rusqlite;

use crate::codec::{self, Damaged};
use crate::index::Found;
use crate::request::{KvError, Order, Range, Ranged, SortBy};
use crate::{KeyValue, LeaseId};

/// How a fetch from the rows can end badly.
#[derive(Debug)]
pub(crate) enum FetchError {
    Sql(rusqlite::Error),
    Damaged(Damaged),
    /// The row, or the key in it, is not there: compacted since, or damage.
    Missing(Revision),
}

impl From<rusqlite::Error> for FetchError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sql(error)
    }
}

impl From<FetchError> for KvError {
    fn from(error: FetchError) -> Self {
        match error {
            FetchError::Sql(error) => Self::Unreadable(error.to_string()),
            FetchError::Damaged(Damaged(revision)) | FetchError::Missing(revision) => {
                Self::Damaged(revision)
            }
        }
    }
}

/// Which revision a read is of.
pub(crate) fn resolve(
    at: Option<Revision>,
    current: Revision,
    compacted: Revision,
) -> Result<Revision, KvError> {
    match at {
        None => Ok(current),
        Some(asked) if asked > current => Err(KvError::Future { asked, current }),
        Some(asked) if asked < compacted => Err(KvError::Compacted { asked, oldest: compacted }),
        Some(asked) => Ok(asked),
    }
}

/// Gets the value of a key from the row of a revision.
pub(crate) fn fetch(
    connection: &Connection,
    key: &Bytes,
    revision: Revision,
) -> Result<KeyValue, FetchError> {
    let sql = "SELECT body FROM event WHERE revision = ?1";
    let mut select = connection.prepare_cached(sql)?;
    let mut wanted = None;
    let decoded = select
        .query_row([revision.0.cast_signed()], |row| {
            let body = row.get_ref(0)?.as_blob()?;
            Ok(codec::decode(revision, body, |event| {
                if event.key() == &key[..] {
                    wanted = event.now().cloned();
                }
            }))
        })
        .optional()?;
    decoded.ok_or(FetchError::Missing(revision))?.map_err(FetchError::Damaged)?;
    wanted.ok_or(FetchError::Missing(revision))
}

/// The values, when all are in memory.
pub(crate) fn all_here(found: Vec<Found>) -> Vec<KeyValue> {
    let here = |found| match found {
        Found::Here(now) => Some(now),
        Found::InRow(..) => None,
    };
    found.into_iter().filter_map(here).collect()
}

/// Gets the values that are not in memory.
pub(crate) fn fetch_all(
    found: Vec<Found>,
    connection: &Connection,
) -> Result<Vec<KeyValue>, FetchError> {
    let here = |found| match found {
        Found::Here(now) => Ok(now),
        Found::InRow(key, revision) => fetch(connection, &key, revision),
    };
    found.into_iter().map(here).collect()
}

/// How many keys are worth collecting: all, unless order and bounds cannot change which ones count.
pub(crate) fn enough(request: &Range) -> usize {
    match request.limit {
        _ if request.count_only => 0,
        Some(limit) if request.sort.is_none() && !has_bounds(request) => limit.saturating_add(1),
        _ => usize::MAX,
    }
}

fn has_bounds(request: &Range) -> bool {
    request.min_modified.is_some()
        || request.max_modified.is_some()
        || request.min_created.is_some()
        || request.max_created.is_some()
}

/// Bounds, order, limit, and leaving out values.
pub(crate) fn finish(
    request: &Range,
    mut keys: Vec<KeyValue>,
    count: usize,
    revision: Revision,
) -> Ranged {
    if has_bounds(request) {
        keys.retain(|key| {
            request.min_modified.is_none_or(|min| key.modified() >= min)
                && request.max_modified.is_none_or(|max| key.modified() <= max)
                && request.min_created.is_none_or(|min| key.created() >= min)
                && request.max_created.is_none_or(|max| key.created() <= max)
        });
    }
    if let Some((by, order)) = request.sort {
        let compare = |a: &KeyValue, b: &KeyValue| -> Ordering {
            match by {
                SortBy::Key => a.key().cmp(b.key()),
                SortBy::Version => a.version().cmp(&b.version()),
                SortBy::Created => a.created().cmp(&b.created()),
                SortBy::Modified => a.modified().cmp(&b.modified()),
                SortBy::Value => a.value().cmp(b.value()),
            }
        };
        match order {
            Order::Ascending => keys.sort_by(compare),
            Order::Descending => keys.sort_by(|a, b| compare(b, a)),
        }
    }
    let mut more = false;
    if let Some(limit) = request.limit
        && keys.len() > limit
    {
        keys.truncate(limit);
        more = true;
    }
    if request.keys_only {
        for key in &mut keys {
            *key = key.without_value();
        }
    }
    Ranged { revision, keys, more, count }
}

/// The number of a key's lease, 0 for none.
pub(crate) fn lease_number(lease: Option<LeaseId>) -> i64 {
    lease.map_or(0, LeaseId::get)
}
