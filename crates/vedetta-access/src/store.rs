//! The file.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rusqlite::{Connection, OpenFlags, Transaction, TransactionBehavior};

use crate::AccessError;
use crate::audit::{self, Entry};
use crate::session::Lent;

/// Its name in the data folder.
pub const FILE: &str = "access.db";

/// `VdAc` in `PRAGMA application_id`.
const APPLICATION: i64 = 0x5664_4163;
/// Another process may be writing; it is never long.
const BUSY: Duration = Duration::from_secs(5);

/// Each step brings the file one version on; never changed once released, only added to.
const STEPS: &[&str] = &[
    "
    CREATE TABLE user (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL UNIQUE,
        role TEXT NOT NULL,
        password TEXT NOT NULL,
        disabled INTEGER NOT NULL DEFAULT 0,
        created INTEGER NOT NULL,
        used INTEGER
    ) STRICT;
    CREATE TABLE token (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL UNIQUE,
        role TEXT NOT NULL,
        hash BLOB NOT NULL UNIQUE,
        created INTEGER NOT NULL,
        expires INTEGER,
        used INTEGER
    ) STRICT;
    CREATE TABLE session (
        hash BLOB PRIMARY KEY,
        user INTEGER NOT NULL REFERENCES user (id) ON DELETE CASCADE,
        created INTEGER NOT NULL,
        seen INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX session_of_user ON session (user, created);
    CREATE TABLE audit (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        at INTEGER NOT NULL,
        who TEXT NOT NULL,
        source TEXT NOT NULL,
        action TEXT NOT NULL,
        target TEXT NOT NULL,
        outcome TEXT NOT NULL,
        count INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX audit_by_time ON audit (at);
",
    "
    -- Tokens that a server lends to the processes it starts: they outlive it if it is killed.
    CREATE TABLE lent (
        hash BLOB PRIMARY KEY,
        name TEXT NOT NULL,
        role TEXT NOT NULL,
        used INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
",
    "
    -- Tokens from before there were scopes stay good everywhere.
    ALTER TABLE token ADD COLUMN scope TEXT NOT NULL DEFAULT 'all';
",
];

/// Users, tokens, sessions and the audit log of a data folder; clones share it. Its methods read and write a
/// file, some hash a password: they may block.
#[derive(Debug, Clone)]
pub struct Access {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    /// Answers who somebody is; never waits for those who write.
    pub(crate) read: Mutex<Connection>,
    /// What people change: on the disk when it is answered.
    write: Mutex<Connection>,
    /// The audit log: on the disk a little later.
    pub(crate) notes: Mutex<Connection>,
    /// When somebody was last seen. Does not wait for those who write.
    pub(crate) seen: Mutex<Connection>,
    pub(crate) lent: Mutex<Vec<Lent>>,
}

impl Access {
    /// Opens the file in a data folder; makes both if they are missing, readable by their owner only.
    pub fn open(folder: &Path) -> Result<Self, AccessError> {
        let file = folder.join(FILE);
        let unusable = |source| AccessError::Unusable { file: file.clone(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(unusable)?;
        create_private(&file)?;
        let mut write = connect(&file)?;
        migrate(&file, &mut write)?;
        write.pragma_update(None, "synchronous", "FULL")?;
        let (read, notes, seen) = (connect(&file)?, connect(&file)?, connect(&file)?);
        audit::prune(&notes, SystemTime::now())?;
        seen.busy_timeout(Duration::ZERO)?;
        let (read, write, notes, seen) =
            (Mutex::new(read), Mutex::new(write), Mutex::new(notes), Mutex::new(seen));
        let lent = Mutex::default();
        Ok(Self { inner: Arc::new(Inner { read, write, notes, seen, lent }) })
    }

    /// Whether the folder has anybody who could sign in. Makes nothing.
    pub fn has_anybody(folder: &Path) -> Result<bool, AccessError> {
        let file = folder.join(FILE);
        match fs::metadata(&file) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(source) => return Err(AccessError::Unusable { file, source }),
        }
        let access = Self::open(folder)?;
        let is_able = access.users()?.iter().any(|user| !user.disabled);
        Ok(is_able || access.tokens()?.iter().any(|token| !token.is_over(SystemTime::now())))
    }

    /// A change, and its entry in the audit log, in one transaction.
    pub(crate) fn change<T>(
        &self,
        entry: &Entry,
        change: impl FnOnce(&Transaction<'_>) -> Result<T, AccessError>,
    ) -> Result<T, AccessError> {
        let mut connection = self.inner.write.lock();
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let done = change(&tx)?;
        audit::insert(&tx, entry, 1)?;
        tx.commit()?;
        Ok(done)
    }

    /// A change that is nobody's doing.
    pub(crate) fn keep<T>(
        &self,
        change: impl FnOnce(&Transaction<'_>) -> Result<T, AccessError>,
    ) -> Result<T, AccessError> {
        let mut connection = self.inner.write.lock();
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let done = change(&tx)?;
        tx.commit()?;
        Ok(done)
    }
}

/// SQLite gives its other files the mode of the main one, so that one is made by us.
fn create_private(file: &Path) -> Result<(), AccessError> {
    let unusable = |source| AccessError::Unusable { file: PathBuf::from(file), source };
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(file) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let others = fs::metadata(file).map_err(unusable)?.permissions().mode() & 0o077;
            if others == 0 { Ok(()) } else { Err(AccessError::Loose(file.into())) }
        }
        Err(error) => Err(unusable(error)),
    }
}

fn connect(file: &Path) -> Result<Connection, AccessError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(file, flags)?;
    connection.busy_timeout(BUSY)?;
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    connection.pragma_update(None, "foreign_keys", true)?;
    connection.pragma_update(None, "cache_size", -1024)?;
    Ok(connection)
}

fn migrate(file: &Path, connection: &mut Connection) -> Result<(), AccessError> {
    let number = |connection: &Connection, name: &str| {
        connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0))
    };
    let known = i64::try_from(STEPS.len()).unwrap_or(i64::MAX);
    let tables: i64 =
        connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if tables > 0 && number(connection, "application_id")? != APPLICATION {
        return Err(AccessError::Foreign(file.into()));
    }
    if number(connection, "user_version")? > known {
        return Err(AccessError::Newer(file.into()));
    }
    let mut switch = connection.prepare("PRAGMA journal_mode = WAL")?;
    switch.query_map([], |_| Ok(()))?.collect::<rusqlite::Result<()>>()?;
    drop(switch);
    // Two may begin at once: the second waits, and finds it done.
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let done = usize::try_from(number(&tx, "user_version")?).unwrap_or(0);
    STEPS.iter().skip(done).try_for_each(|step| tx.execute_batch(step))?;
    tx.pragma_update(None, "application_id", APPLICATION)?;
    tx.pragma_update(None, "user_version", known)?;
    tx.commit()?;
    Ok(())
}

/// A time as it is stored: milliseconds since 1970.
pub(crate) fn millis(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

pub(crate) fn time(millis: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(u64::try_from(millis).unwrap_or(0))
}

/// Names of users and tokens: they stand in lists, logs and forms.
pub(crate) fn check_name(what: &str, name: &str) -> Result<(), AccessError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._@+-".contains(c);
    if (1..=64).contains(&name.len()) && name.chars().all(fits) {
        return Ok(());
    }
    let what = format!("the name of a {what} is 1 to 64 letters, digits or ._@+-");
    Err(AccessError::Invalid(what))
}

/// Whether an insertion met one of the same name.
pub(crate) fn is_taken(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(rusqlite::ErrorCode::ConstraintViolation)
}
