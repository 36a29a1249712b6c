use vedetta_core::Revision;
use vedetta_db::{ReadError, rusqlite};

use crate::OpenError;
use crate::load::{Meta, Unsound, load_index, load_leases};

/// Reads every row of the store in `connection` and checks it, changing nothing; answers the newest
/// revision. Works beside a running store.
pub fn check(connection: &rusqlite::Connection) -> Result<Revision, OpenError> {
    let sql = |error| OpenError::Unreadable(ReadError::from(error));
    // One snapshot for all that is read.
    let snapshot = connection.unchecked_transaction().map_err(sql)?;
    let meta = Meta::read(&snapshot).map_err(sql)?;
    let index = load_index(&snapshot, meta).map_err(|unsound| match unsound {
        Unsound::Rows(error) => error,
        Unsound::Sql(error) => sql(error),
    })?;
    load_leases(&snapshot, &index, meta).map_err(sql)?;
    Ok(index.revision)
}
