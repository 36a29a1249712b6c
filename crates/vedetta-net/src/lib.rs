//! What every server here needs below its protocol: a place for each connection, and no more patience with
//! a client than there is reason for. What is said on a connection is not this crate's business.

mod accept;
mod patience;

pub use accept::accept;
pub use patience::Patient;
