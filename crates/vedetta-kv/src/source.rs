use std::time::Duration;

use bytes::Bytes;
use vedetta_core::{Change, Changes, Entry, Feed, KeyRange, Page, Revision, Source, SourceError};

use crate::{Event, KvError, Order, Range, SortBy, Store, WatchError, WatchOptions, Watcher};

/// Keys of a page: a store in the same process has no message that could get too large.
const PAGE: usize = 10_000;

/// The store in the same process.
impl Source for Store {
    type Feed = StoreFeed;

    async fn list(&self, range: KeyRange, at: Option<Revision>) -> Result<Page, SourceError> {
        let request = Range { at, limit: Some(PAGE), uncounted: true, ..Range::new(range) };
        let ranged = self.range(request).await.map_err(|error| match error {
            KvError::Compacted { asked, .. } => SourceError::Compacted { asked },
            error => SourceError::Lost("cannot list the store".into(), Some(Box::new(error))),
        })?;
        let entries = ranged.keys.iter().map(|found| Entry {
            key: Bytes::copy_from_slice(found.key()),
            value: Bytes::copy_from_slice(found.value()),
            modified: found.modified(),
        });
        let revision = at.unwrap_or(ranged.revision);
        Ok(Page { entries: entries.collect(), revision, more: ranged.more })
    }

    async fn follow(
        &self,
        range: KeyRange,
        from: Revision,
    ) -> Result<(StoreFeed, Revision), SourceError> {
        let options = WatchOptions { from: Some(from), previous: false, ..WatchOptions::default() };
        let watcher = self.watch(range.clone(), options).map_err(lost)?;
        let told = Revision(from.0.saturating_sub(1));
        let owed = if self.revision() > told { self.last_put(range, from).await? } else { None };
        Ok((StoreFeed { watcher, told, owed: owed.unwrap_or(told) }, self.revision()))
    }
}

impl Store {
    /// The last revision since `from` that put something into a range that is there.
    async fn last_put(
        &self,
        range: KeyRange,
        from: Revision,
    ) -> Result<Option<Revision>, SourceError> {
        let newest = Some((SortBy::Modified, Order::Descending));
        let (min_modified, limit) = (Some(from), Some(1));
        let request = Range { min_modified, limit, sort: newest, ..Range::new(range) };
        let request = Range { keys_only: true, uncounted: true, ..request };
        let ranged = self.range(request).await.map_err(|error| {
            SourceError::Lost("cannot read the store".into(), Some(Box::new(error)))
        })?;
        Ok(ranged.keys.first().map(crate::KeyValue::modified))
    }
}

/// The changes of a store in the same process.
pub struct StoreFeed {
    watcher: Watcher,
    owed: Revision,
    /// How far we said that it has come.
    told: Revision,
}

/// A feed for which nothing happens says that often how far it has come, if it has.
const QUIET: Duration = Duration::from_secs(1);

impl Feed for StoreFeed {
    fn owed(&self) -> Revision {
        self.owed
    }

    async fn next(&mut self) -> Result<Changes, SourceError> {
        loop {
            let batch = tokio::time::timeout(QUIET, self.watcher.next()).await;
            let (changes, revision) = match batch {
                Ok(batch) => {
                    let batch = batch.map_err(lost)?;
                    (batch.iter().map(change).collect(), batch.last())
                }
                Err(_) => (Vec::new(), self.watcher.progress()),
            };
            if revision > self.told || !changes.is_empty() {
                self.told = self.told.max(revision);
                return Ok(Changes { changes, revision });
            }
        }
    }
}

fn change(event: &Event) -> Change {
    Change {
        key: Bytes::copy_from_slice(event.key()),
        value: event.now().map(|now| Bytes::copy_from_slice(now.value())),
        revision: event.revision,
    }
}

fn lost(error: WatchError) -> SourceError {
    match error {
        WatchError::Compacted { asked, .. } => SourceError::Compacted { asked },
        error => SourceError::Lost("cannot follow the store".into(), Some(Box::new(error))),
    }
}
