//! Reading nodes.

use bytes::Bytes;
use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{KeyValue, KvError, Range, Store};

use super::error::{Code, Error};
use super::form::Ask;
use super::json::{self, Event, Node};
use super::path::Path;
use super::tree::{Found, find};
use super::ttl::{self, Expiry};

/// Keys read together when only the first of each directory is wanted.
const CHUNK: usize = 256;

/// With more keys than this a listing is written apart, where it holds up nobody.
const MANY: usize = 2_000;

/// The node asked for, and the index it was read at.
pub(crate) async fn get(store: &Store, ask: &Ask) -> Result<(Bytes, Revision), Error> {
    loop {
        let (found, at) = store.present(|present| (find(present, &ask.path), present.revision()));
        let expiry = |key: &KeyValue| expiry(store, key);
        let dir = match found? {
            Found::File(file) => {
                let node = Node {
                    path: ask.path.clone(),
                    dir: false,
                    expiry: expiry(&file),
                    modified: file.modified().0,
                    created: file.created().0,
                    value: Some(file),
                };
                return Ok((Event { action: "get", node, previous: None }.line(), at));
            }
            Found::Dir(dir) => dir,
        };
        let keys = if ask.recursive {
            let all = Range { at: Some(at), ..Range::new(ask.path.below()) };
            store.range(all).await.map(|ranged| ranged.keys)
        } else {
            children(store, &ask.path, at).await
        };
        let keys = match keys {
            Err(KvError::Compacted { .. }) => continue, // since; the present is newer
            other => other?,
        };
        let node = Node {
            path: ask.path.clone(),
            value: None,
            dir: true,
            expiry: dir.marker.as_ref().and_then(expiry),
            modified: dir.created,
            created: dir.created,
        };
        let (many, store, deep) = (keys.len() > MANY, store.clone(), ask.recursive);
        let write = move || json::listing(&node, keys, deep, |key| self::expiry(&store, key));
        let listing = if many {
            let written = tokio::task::spawn_blocking(write).await;
            written.map_err(|error| Error::request(Code::Internal, error.to_string()))?
        } else {
            write()
        };
        return Ok((listing.into(), at));
    }
}

pub(crate) fn expiry(store: &Store, key: &KeyValue) -> Option<Expiry> {
    let lease = key.lease()?;
    ttl::expiry(lease, store.remaining(lease))
}

/// The files in a directory and the first key of each directory in it, with a few more. Large directories
/// in it are leapt over.
async fn children(store: &Store, path: &Path, at: Revision) -> Result<Vec<KeyValue>, KvError> {
    let below = path.below();
    let KeyRange::Between(mut from, end) = below else { return Ok(Vec::new()) }; // it ends in a slash
    let start = from.len();
    let mut all = Vec::new();
    loop {
        let range = Range {
            at: Some(at),
            limit: Some(CHUNK),
            uncounted: true,
            ..Range::new(KeyRange::Between(from, end.clone()))
        };
        let ranged = store.range(range).await?;
        let last = ranged.keys.last().map(|last| Bytes::copy_from_slice(last.key()));
        all.extend(ranged.keys);
        let Some(last) = last.filter(|_| ranged.more) else { return Ok(all) };
        let slash = last[start..].iter().position(|&byte| byte == b'/');
        from = match slash {
            // Past everything in the directory that the last one is in: the byte after a slash is a zero.
            Some(at) => [&last[..start + at], b"0"].concat().into(),
            None => [&last[..], b"\0"].concat().into(),
        };
    }
}
