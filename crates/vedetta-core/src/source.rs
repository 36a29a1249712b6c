use std::error::Error;
use std::future::Future;

use bytes::Bytes;

use crate::{KeyRange, Revision};

/// A key as a list has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Which.
    pub key: Bytes,
    /// What it holds.
    pub value: Bytes,
    /// The revision that last changed it.
    pub modified: Revision,
}

/// Part of a list, in the order of the keys.
#[derive(Debug, Clone, Default)]
pub struct Page {
    /// The keys.
    pub entries: Vec<Entry>,
    /// The revision they are true at.
    pub revision: Revision,
    /// Whether the range goes on after the last of them.
    pub more: bool,
}

/// What became of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Which.
    pub key: Bytes,
    /// What it holds now; nothing if it was deleted.
    pub value: Option<Bytes>,
    /// The revision that changed it.
    pub revision: Revision,
}

/// Some changes in order, never part of a revision.
#[derive(Debug, Clone, Default)]
pub struct Changes {
    /// What changed. May be nothing: then this only says how far the feed has come.
    pub changes: Vec<Change>,
    /// Everything up to here is in this one or those before it.
    pub revision: Revision,
}

/// Why a source did not answer, by what to do next.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// That history is gone: list again and follow from there.
    #[error("revision {asked} was compacted")]
    Compacted {
        /// The revision asked for.
        asked: Revision,
    },
    /// The line dropped, or the other side cannot answer now: wait, then go on from the last revision
    /// seen.
    #[error("{0}")]
    Lost(String, #[source] Option<Box<dyn Error + Send + Sync>>),
}

impl SourceError {
    /// A line that dropped, for this reason.
    pub fn lost(what: impl Into<String>) -> Self {
        Self::Lost(what.into(), None)
    }
}

/// Something that says what is: a list of keys, and then how they change.
pub trait Source: Send + Sync + 'static {
    /// How changes arrive.
    type Feed: Feed;

    /// The first keys of a range, as of a revision; without one as of now, and then nothing
    /// acknowledged before the call is missing.
    fn list(
        &self,
        range: KeyRange,
        at: Option<Revision>,
    ) -> impl Future<Output = Result<Page, SourceError>> + Send;

    /// Follows the changes of a range from a revision on. Once this returns none is missed. It also
    /// tells where the source stands, which is before `from` if the source is not the one it was.
    fn follow(
        &self,
        range: KeyRange,
        from: Revision,
    ) -> impl Future<Output = Result<(Self::Feed, Revision), SourceError>> + Send;
}

/// Changes as they happen.
pub trait Feed: Send + 'static {
    /// What it owed when it was opened: once it has come to this revision, all that was there then was told.
    /// What was deleted last may still follow. A source that cannot tell owes nothing; then whoever compares
    /// with reality may do so with what it knew before.
    fn owed(&self) -> Revision {
        Revision::default()
    }

    /// The next changes. A dropped future loses none.
    fn next(&mut self) -> impl Future<Output = Result<Changes, SourceError>> + Send;
}
