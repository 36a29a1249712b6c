//! Keys: pages of them, and one at a time.

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{
    Compare, CompareOp, CompareTarget, Delete, KeyValue, Op, OpReply, Put, Range, Txn,
};

use crate::api::Context;
use crate::error::ApiError;
use crate::input::{JsonBody, KeyPath, Query, lease_id, value};
use crate::json::{Entry, Json};

/// A page ends after about so many bytes of values, whatever its limit.
const PAGE_BYTES: usize = 1 << 20;

#[derive(Serialize)]
struct Page<'a> {
    revision: u64,
    keys: Vec<Entry<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<String>,
}

/// Where a page ended: all pages of a list are of one revision.
pub(crate) struct Cursor {
    pub(crate) revision: Revision,
    last: Bytes,
}

impl Cursor {
    pub(crate) fn encode(revision: Revision, last: &[u8]) -> String {
        BASE64_URL_SAFE_NO_PAD.encode([&revision.0.to_be_bytes()[..], last].concat())
    }

    pub(crate) fn decode(text: &str) -> Option<Self> {
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(text).ok()?;
        let (revision, last) = bytes.split_first_chunk()?;
        let revision = Revision(u64::from_be_bytes(*revision));
        Some(Self { revision, last: Bytes::copy_from_slice(last) })
    }

    /// What is left of `prefix`.
    pub(crate) fn rest(&self, prefix: KeyRange) -> Option<KeyRange> {
        if !prefix.contains(&self.last) {
            return None;
        }
        let next = Bytes::from([&self.last[..], &[0]].concat());
        Some(match prefix {
            KeyRange::Between(_, end) => KeyRange::Between(next, end),
            KeyRange::From(_) | KeyRange::One(_) => KeyRange::From(next),
        })
    }
}

pub(crate) async fn list(
    State(context): State<Context>,
    mut query: Query,
) -> Result<Response, ApiError> {
    let prefix = KeyRange::prefix(query.bytes("prefix").unwrap_or_default());
    let mut at = query.number("revision")?.map(Revision);
    let limit = query.page()?;
    let keys_only = query.flag("keys_only")?;
    let mut range = Range::new(prefix.clone());
    if let Some(text) = query.text("cursor")? {
        let wrong = || ApiError::invalid("the cursor is not one of this list");
        let cursor = Cursor::decode(&text).ok_or_else(wrong)?;
        range.range = cursor.rest(prefix).ok_or_else(wrong)?;
        at = Some(cursor.revision);
    }
    query.end()?;
    range.at = at;
    range.limit = Some(limit);
    range.uncounted = true; // the rest of the list is not looked at
    let found = context.store.range(range).await?;

    let revision = at.unwrap_or(found.revision);
    let weight = |entry: &KeyValue| if keys_only { 0 } else { entry.value().len() };
    let mut bytes = 0;
    let fits = found.keys.iter().take_while(|entry| {
        let fits = bytes < PAGE_BYTES;
        bytes += weight(entry);
        fits
    });
    let keys: Vec<_> = fits.map(|entry| Entry::new(entry, keys_only)).collect();
    let more = found.more || keys.len() < found.keys.len();
    let last = more.then(|| keys.len().checked_sub(1).and_then(|last| found.keys.get(last)));
    let cursor = last.flatten().map(|last| Cursor::encode(revision, last.key()));
    let page = Json(Page { revision: revision.0, keys, cursor });
    Ok(page.into_response())
}

#[derive(Serialize)]
struct Found<'a> {
    revision: u64,
    #[serde(flatten)]
    entry: Entry<'a>,
}

pub(crate) async fn get(
    State(context): State<Context>,
    KeyPath(key): KeyPath,
    mut query: Query,
) -> Result<Response, ApiError> {
    let mut range = Range::new(KeyRange::One(key));
    range.at = query.number("revision")?.map(Revision);
    query.end()?;
    let at = range.at;
    let found = context.store.range(range).await?;
    let entry = found.keys.first().ok_or_else(|| ApiError::not_found("there is no such key"))?;
    let revision = at.unwrap_or(found.revision).0;
    let found = Json(Found { revision, entry: Entry::new(entry, false) });
    Ok(found.into_response())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PutBody {
    value: Option<String>,
    value_b64: Option<String>,
    lease: Option<String>,
    if_modified: Option<u64>,
}

#[derive(Serialize)]
pub(crate) struct Done {
    revision: u64,
}

pub(crate) async fn put(
    State(context): State<Context>,
    KeyPath(key): KeyPath,
    query: Query,
    JsonBody(body): JsonBody<PutBody>,
) -> Result<Json<Done>, ApiError> {
    query.end()?;
    let mut put = Put::new(key.clone(), value(body.value, body.value_b64.as_deref())?);
    if let Some(lease) = body.lease {
        put = put.lease(lease_id(&lease)?);
    }
    let Some(expected) = body.if_modified else {
        return Ok(Json(Done { revision: context.store.put(put).await?.revision.0 }));
    };
    let range = KeyRange::One(key);
    let done = context.store.txn(Txn {
        when: vec![Compare {
            range: range.clone(),
            op: CompareOp::Equal,
            target: CompareTarget::Modified(Revision(expected)),
        }],
        then: vec![Op::Put(put)],
        otherwise: vec![Op::Range(Range::new(range))],
    });
    let done = done.await?;
    if done.held {
        return Ok(Json(Done { revision: done.revision.0 }));
    }
    let now = done.replies.first().and_then(|reply| match reply {
        OpReply::Range(found) => found.keys.first().map(KeyValue::modified),
        _ => None,
    });
    let expected = match expected {
        0 => "should not exist".to_owned(),
        expected => format!("should be of revision {expected}"),
    };
    Err(ApiError::conflict(match now {
        Some(modified) => format!("the key {expected}, but was modified in revision {modified}"),
        None => format!("the key {expected}, but does not exist"),
    })
    .hint("read it again, and decide anew"))
}

#[derive(Serialize)]
pub(crate) struct Deleted {
    revision: u64,
    count: usize,
}

pub(crate) async fn delete(
    State(context): State<Context>,
    KeyPath(key): KeyPath,
    mut query: Query,
) -> Result<Json<Deleted>, ApiError> {
    let prefix = query.flag("prefix")?;
    query.end()?;
    if key.is_empty() {
        // Also as a prefix: a script whose variable is empty would wipe the store.
        return Err(vedetta_kv::KvError::EmptyKey.into());
    }
    let range = if prefix { KeyRange::prefix(key) } else { KeyRange::One(key) };
    let done = context.store.delete(Delete { range, previous: false }).await?;
    Ok(Json(Deleted { revision: done.revision.0, count: done.count }))
}
