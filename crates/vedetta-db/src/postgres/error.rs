use std::error::Error;
use std::io;

use tokio_postgres::error::SqlState;

/// Why PostgreSQL did not do what it was asked. None tells a password.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostgresError {
    /// Correct the URL.
    #[error("the URL of the database cannot be used: {0}")]
    BadUrl(String),
    /// Check that the server runs and can be reached from here; then try again.
    #[error("cannot reach PostgreSQL at {at}")]
    Unreachable {
        /// Hosts and ports of the URL.
        at: String,
        /// What the system said.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// Try again on another connection. A commit that was under way may have been done or not.
    #[error("lost the connection to PostgreSQL")]
    Lost(#[source] Box<dyn Error + Send + Sync>),
    /// What to do depends on the code: see the appendix "Error Codes" of PostgreSQL's manual.
    #[error("PostgreSQL refused: {message} (SQLSTATE {code})")]
    Refused {
        /// Five characters that name the reason.
        code: String,
        /// The reason in the server's words.
        message: String,
    },
    /// Use the program that wrote it, or a newer one.
    #[error(
        "the database was written by a newer Vedetta ({what} version {found}, this one knows {known}); nothing was changed"
    )]
    Newer {
        /// The part that is newer.
        what: String,
        /// Its version in the database.
        found: i64,
        /// The newest version this program knows.
        known: i64,
    },
    /// The two do not fit: a password is wanted and none given, the certificate is of somebody else, or an
    /// answer is not what was asked for.
    #[error("cannot work with this PostgreSQL")]
    Misfit(#[source] tokio_postgres::Error),
}

impl PostgresError {
    /// Whether the same may succeed when it is done again from its beginning, after a while.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Lost(_) => true,
            Self::Refused { code, .. } => is_transient(&SqlState::from_code(code)),
            Self::BadUrl(_) | Self::Newer { .. } | Self::Misfit(_) => false,
        }
    }

    /// Whether two stood in each other's way and the server ended this one: nothing of it was done, and it can
    /// be done again at once.
    pub fn stood_in_the_way(&self) -> bool {
        let codes = [SqlState::T_R_SERIALIZATION_FAILURE, SqlState::T_R_DEADLOCK_DETECTED];
        matches!(self, Self::Refused { code, .. } if codes.contains(&SqlState::from_code(code)))
    }
}

fn is_transient(code: &SqlState) -> bool {
    let passing = [
        SqlState::T_R_SERIALIZATION_FAILURE,
        SqlState::T_R_DEADLOCK_DETECTED,
        SqlState::TOO_MANY_CONNECTIONS,
        SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT,
        SqlState::ADMIN_SHUTDOWN,
        SqlState::CRASH_SHUTDOWN,
        SqlState::CANNOT_CONNECT_NOW,
    ];
    // Class 08 is trouble with the connection.
    passing.contains(code) || code.code().starts_with("08")
}

impl From<tokio_postgres::Error> for PostgresError {
    fn from(error: tokio_postgres::Error) -> Self {
        if let Some(said) = error.as_db_error() {
            let (code, message) = (said.code().code().to_owned(), said.message().to_owned());
            return Self::Refused { code, message };
        }
        // Invalid is what was sent, or received: no other connection would change that.
        let line = error.source().and_then(|source| source.downcast_ref::<io::Error>());
        let line = line.is_some_and(|error| {
            !matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData)
        });
        if line || error.is_closed() { Self::Lost(error.into()) } else { Self::Misfit(error) }
    }
}
