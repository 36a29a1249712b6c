//! Connections that only read. A read sees the last commit as of its start and never waits for the
//! writer; when all connections are busy it waits for one of them.

use std::fs::File;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use rusqlite::Connection;

/// A read that went wrong: the file is damaged, gone or unreadable.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the database")]
pub struct ReadError(#[from] rusqlite::Error);

/// A connection that reads.
#[derive(Debug)]
pub(crate) struct Reader {
    pub(crate) connection: Connection,
    /// Closed after the connection: see [`crate::wal::WalKeeper::new`].
    pub(crate) _flushed: Option<Arc<File>>,
}

#[derive(Debug)]
pub(crate) struct Readers {
    /// `None` once closed.
    idle: Mutex<Option<Vec<Reader>>>,
    freed: Condvar,
}

impl Readers {
    pub(crate) fn new(readers: Vec<Reader>) -> Self {
        Self { idle: Mutex::new(Some(readers)), freed: Condvar::new() }
    }

    pub(crate) fn read<T>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, ReadError> {
        let reader = {
            let mut idle = self.idle.lock();
            loop {
                let Some(readers) = idle.as_mut() else { return Err(closed().into()) };
                match readers.pop() {
                    Some(reader) => break reader,
                    None => self.freed.wait(&mut idle),
                }
            }
        };
        let lent = Lent { readers: self, reader: Some(reader) };
        // The transaction makes several statements see one state. Dropped, it rolls back.
        let answer = lent.connection().unchecked_transaction().and_then(|tx| work(&tx));
        Ok(answer?)
    }

    /// Closes the connections; those in use when their read ends.
    pub(crate) fn close(&self) {
        self.idle.lock().take();
        self.freed.notify_all();
    }
}

fn closed() -> rusqlite::Error {
    let cause = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_MISUSE);
    rusqlite::Error::SqliteFailure(cause, Some("the database is closed".into()))
}

/// Gives the connection back even when the closure panics.
struct Lent<'a> {
    readers: &'a Readers,
    reader: Option<Reader>,
}

impl Lent<'_> {
    fn connection(&self) -> &Connection {
        &self.reader.as_ref().expect("only dropping takes it").connection
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if let Some(idle) = self.readers.idle.lock().as_mut() {
            idle.extend(self.reader.take());
        }
        self.readers.freed.notify_one();
    }
}
