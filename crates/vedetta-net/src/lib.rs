//! What every server here needs below its protocol: a place for each connection, and no more patience with
//! a client than there is reason for; and TLS, from files. What is said on a connection is not this crate's business.

mod accept;
mod patience;
pub mod tls;

pub use accept::accept;
pub use patience::Patient;
