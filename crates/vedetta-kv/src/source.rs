use bytes::Bytes;
use vedetta_core::{Change, Changes, Entry, Feed, KeyRange, Page, Revision, Source, SourceError};

use crate::{KvError, Range, Store, WatchError, WatchOptions, Watcher};

/// Keys of a page: a store in the same process has no message that could get too large.
const PAGE: usize = 10_000;

/// The store in the same process.
impl Source for Store {
    type Feed = Watcher;

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
    ) -> Result<(Watcher, Revision), SourceError> {
        let options = WatchOptions { from: Some(from), previous: false, ..WatchOptions::default() };
        let watcher = self.watch(range, options).map_err(lost)?;
        Ok((watcher, self.revision()))
    }
}

impl Feed for Watcher {
    async fn next(&mut self) -> Result<Changes, SourceError> {
        let batch = Self::next(self).await.map_err(lost)?;
        let changes = batch.iter().map(|event| Change {
            key: Bytes::copy_from_slice(event.key()),
            value: event.now().map(|now| Bytes::copy_from_slice(now.value())),
            revision: event.revision,
        });
        Ok(Changes { changes: changes.collect(), revision: batch.last() })
    }
}

fn lost(error: WatchError) -> SourceError {
    match error {
        WatchError::Compacted { asked, .. } => SourceError::Compacted { asked },
        error => SourceError::Lost("cannot follow the store".into(), Some(Box::new(error))),
    }
}
