//! What can go wrong.

use std::io;
use std::path::PathBuf;

/// Why something about access was not done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// Give something else.
    #[error("{0}")]
    Invalid(String),
    /// Choose another name.
    #[error("there is a {0} {1:?} already")]
    Exists(&'static str, String),
    /// Look at the list.
    #[error("there is no {0} {1:?}")]
    NoSuch(&'static str, String),
    /// Check the path and its permissions.
    #[error("cannot use {}", file.display())]
    Unusable {
        /// The file or folder.
        file: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Take the rights from others: `chmod 600`.
    #[error("{} can be read or written by others than its owner: chmod 600 it", .0.display())]
    Loose(PathBuf),
    /// Use the program that wrote it, or a newer one.
    #[error("{} was written by a newer Vedetta; nothing was changed", .0.display())]
    Newer(PathBuf),
    /// It is somebody else's file.
    #[error("{} is not Vedetta's; nothing was changed", .0.display())]
    Foreign(PathBuf),
    /// Try again; if that does not help, look at the disk.
    #[error("the file with users and tokens cannot be used")]
    Sql(#[from] rusqlite::Error),
    /// The system gives no random numbers, or no memory for a hash.
    #[error("{0}")]
    System(String),
}
