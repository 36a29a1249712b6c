//! Reading and writing the keys, so that whoever was faster is noticed.

use serde::{Serialize, de::DeserializeOwned};
use vedetta::core::{Source as _, SourceError};
use vedetta::etcd::{Cluster, Is, Write, WriteError};
use vedetta::runtime::State as _;
use vedetta::runtime::watcher::BoxError;
use vedetta::{KeyRange, Revision};

use crate::model::{Kind, LiveMeta, ROOMS, Room, room_key};

/// How often a change is tried on what others change meanwhile.
const TRIES: usize = 10;

/// Why something could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Try again.
    #[error("cannot read from the store")]
    Read(#[from] SourceError),
    /// Look before trying again: it may have been done.
    #[error("cannot write to the store")]
    Write(#[from] WriteError),
    /// Somebody wrote what we cannot read.
    #[error("{0} holds something else than it should")]
    Nonsense(String, #[source] serde_json::Error),
    /// Try again.
    #[error("others changed {0} again and again meanwhile")]
    Busy(String),
}

/// What a key holds, and when it was written.
pub async fn get<T: DeserializeOwned>(
    store: &Cluster,
    key: &str,
) -> Result<Option<(T, Revision)>, StoreError> {
    let Some(entry) = store.get(key.to_owned()).await? else { return Ok(None) };
    let value = serde_json::from_slice(&entry.value);
    let value = value.map_err(|error| StoreError::Nonsense(key.to_owned(), error))?;
    Ok(Some((value, entry.modified)))
}

/// A value as it is written.
///
/// # Panics
///
/// If it cannot be JSON, which all of ours can.
pub fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("no value here has keys that are no text")
}

/// Changes what a key holds, in one step with looking at it: `change` is asked again if somebody was faster.
/// What it made of it, and when; nothing if there was nothing to change, or `change` wants none.
pub async fn update<T: Serialize + DeserializeOwned>(
    store: &Cluster,
    key: &str,
    mut change: impl FnMut(Option<T>) -> Option<T>,
) -> Result<Option<(T, Revision)>, StoreError> {
    for _ in 0..TRIES {
        let (before, is) = match get(store, key).await? {
            Some((value, at)) => (Some(value), Is::At(at)),
            None => (None, Is::Missing),
        };
        let Some(after) = change(before) else { return Ok(None) };
        let write = Write::new().when(key.to_owned(), is).put(key.to_owned(), json(&after));
        let written = store.write(write).await?;
        if written.done {
            return Ok(Some((after, written.revision)));
        }
    }
    Err(StoreError::Busy(key.to_owned()))
}

/// Writes a part of a room while it is assigned to this module, in one step with looking. Whether it is.
pub async fn publish<T: Serialize + DeserializeOwned + PartialEq>(
    store: &Cluster,
    (kind, me): (Kind, &str),
    room: &str,
    part: &T,
) -> Result<bool, StoreError> {
    let (meta_key, key) = (room_key(room, "livemeta"), room_key(room, kind.part()));
    for _ in 0..TRIES {
        let meta = get::<LiveMeta>(store, &meta_key).await?;
        let Some((_, at)) = meta.filter(|(meta, _)| meta.is_run_by(kind, me)) else {
            return Ok(false);
        };
        // What somebody else wrote is no longer true: the room is ours.
        let there = get::<T>(store, &key).await.ok().flatten();
        if there.is_some_and(|(there, _)| there == *part) {
            return Ok(true);
        }
        let write = Write::new().when(meta_key.clone(), Is::At(at)).put(key.clone(), json(part));
        if store.write(write).await?.done {
            return Ok(true);
        }
    }
    Err(StoreError::Busy(meta_key))
}

/// Removes a part of a room if `is_ours`, in one step with looking.
pub async fn withdraw<T: DeserializeOwned>(
    store: &Cluster,
    kind: Kind,
    room: &str,
    is_ours: impl Fn(&T) -> bool,
) -> Result<(), StoreError> {
    let key = room_key(room, kind.part());
    for _ in 0..TRIES {
        let there = get::<T>(store, &key).await?;
        let Some((_, at)) = there.filter(|(there, _)| is_ours(there)) else { return Ok(()) };
        let write = Write::new().when(key.clone(), Is::At(at)).delete(key.clone());
        if store.write(write).await?.done {
            return Ok(());
        }
    }
    Err(StoreError::Busy(key))
}

/// A room, and when its livemeta was written.
#[derive(Debug, Clone, Default)]
pub struct Listed {
    /// Which.
    pub id: String,
    /// What can be read of it.
    pub room: Room,
    /// Nothing if there is none.
    pub meta_at: Option<Revision>,
}

/// All rooms as they are now. What cannot be read is left out.
pub async fn rooms(store: &Cluster) -> Result<Vec<Listed>, BoxError> {
    let (mut rooms, mut range, mut at) = (Vec::<Listed>::new(), KeyRange::prefix(ROOMS), None);
    loop {
        let page = store.list(range.clone(), at).await?;
        for entry in &page.entries {
            let key = str::from_utf8(&entry.key).ok().and_then(|key| key.strip_prefix(ROOMS));
            let Some((id, part)) = key.and_then(|key| key.rsplit_once('/')) else { continue };
            if rooms.last().is_none_or(|room| room.id != id) {
                rooms.push(Listed { id: id.to_owned(), ..Listed::default() });
            }
            let Some(listed) = rooms.last_mut() else { continue };
            let is_read = listed.room.apply(part, Some(&entry.value)).is_ok();
            if is_read && part == "livemeta" {
                listed.meta_at = Some(entry.modified);
            }
        }
        let (Some(last), true) = (page.entries.last(), page.more) else { return Ok(rooms) };
        let next = [&last.key[..], b"\0"].concat();
        range = KeyRange::Between(next.into(), after(ROOMS).into());
        at = Some(page.revision);
    }
}

/// The first key that does not begin with `prefix`, which ends with a slash.
fn after(prefix: &str) -> String {
    format!("{}0", prefix.trim_end_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_goes_on_to_the_end_of_its_prefix() {
        assert_eq!(KeyRange::prefix(ROOMS), KeyRange::Between(ROOMS.into(), after(ROOMS).into()));
    }
}
