use std::collections::HashSet;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::entity::{Entity, Version};
use crate::record::{Lane, Records, SYSTEM, StageError, shard};

/// The entities of one table, and their queues.
///
/// What can be done with them depends on the database: on [SQLite](crate::sqlite) within a closure, on
/// [PostgreSQL](crate::postgres) within a transaction.
pub struct Entities<E, R, T> {
    pub(crate) records: R,
    pub(crate) name: Arc<str>,
    pub(crate) shards: u16,
    pub(crate) system: Lane,
    pub(crate) table: Arc<T>,
    entity: PhantomData<fn() -> E>,
}

impl<E, R: Clone, T> Clone for Entities<E, R, T> {
    fn clone(&self) -> Self {
        Self {
            records: self.records.clone(),
            name: Arc::clone(&self.name),
            table: Arc::clone(&self.table),
            ..*self
        }
    }
}

impl<E, R: Records, T> Entities<E, R, T> {
    /// The entities called `name`, which are in `table`.
    pub async fn new(records: R, name: &str, table: T) -> Result<Self, StageError> {
        let system = records.lane(name, SYSTEM).await?;
        let (name, table) = (name.into(), Arc::new(table));
        Ok(Self { records, name, shards: 1, system, table, entity: PhantomData })
    }

    /// Divides them into so many shards, for processes to [share](crate::Processor::shards). It must be the
    /// same in every process, and what they share; to change it, stop them all first.
    #[must_use]
    pub fn sharded(mut self, shards: u16) -> Self {
        self.shards = shards.max(1);
        self
    }

    /// The shard of an id.
    pub(crate) fn shard(&self, id: &str) -> u16 {
        shard(id, self.shards)
    }
}

/// What came of saving an entity on the version it was read at.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Checked<E> {
    /// It is saved, as it is here: with its new version.
    Saved(E),
    /// Somebody else saved or removed it meanwhile: nothing is saved. Read it again, or ask who wanted it.
    Conflict,
}

/// Entities with the versions they get, and those they were read at.
pub(crate) fn next_versions<E: Entity>(
    changed: Vec<(E, Version)>,
) -> impl Iterator<Item = (E, Version)> {
    changed.into_iter().map(|(mut entity, read)| {
        entity.set_version(read.next());
        (entity, read)
    })
}

/// The table answers that it did not, for no reason.
pub(crate) fn not_saved<E: Entity>(entity: &E) -> StageError {
    let id = entity.id();
    StageError::Failed(format!("the table did not save {id} though its version was right").into())
}

/// Each id once.
pub(crate) fn distinct<I: Clone + ToString>(ids: &[I]) -> Vec<I> {
    let mut seen = HashSet::with_capacity(ids.len());
    ids.iter().filter(|id| seen.insert(id.to_string())).cloned().collect()
}
