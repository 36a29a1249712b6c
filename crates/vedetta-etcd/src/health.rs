//! Whether the store does what clients expect of it: takes writes.

use std::time::Duration;

use vedetta_kv::{CommitError, KvError, Store};

/// A writer that has not answered by then is stuck, or its disk is.
const PATIENCE: Duration = Duration::from_secs(5);

/// What keeps the store from taking writes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ailment {
    /// Its quota, or the disk, is used up. It goes by itself once there is room.
    NoSpace,
    /// Something that needs somebody to look after it.
    Broken(String),
}

/// `None` when all is well. Asked each time: a flag would have to be cleared by somebody.
pub(crate) async fn ailment(store: &Store) -> Option<Ailment> {
    match tokio::time::timeout(PATIENCE, store.takes_writes()).await {
        Ok(taken) => taken.err().map(Ailment::from),
        Err(_) => Some(Ailment::Broken("the writer does not answer".into())),
    }
}

impl From<KvError> for Ailment {
    fn from(error: KvError) -> Self {
        match error {
            KvError::QuotaExceeded { .. } | KvError::Lost(CommitError::Full) => Self::NoSpace,
            other => Self::Broken(other.to_string()),
        }
    }
}
