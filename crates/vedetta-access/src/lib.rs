//! Who somebody is, and what was done: users, API tokens, sessions, the audit log.
//!
//! ```text
//!  vedetta user, token ──► access.db ◄── sign-in, sign-out, audit
//!                              │
//!              a cookie or a token ──► Identity: name, role, scope
//! ```
//!
//! It is one small file in the data folder, and several processes may have it open: who may write the folder
//! is who may add a user, whether a server runs or not. Each question is answered from the file as it is at that moment,
//! so whoever loses a right has lost it with the next request. What proves an identity is kept as a hash
//! only, and seen once.
//!
//! Which role and which area a request needs is the caller's question, and so is the time.

mod audit;
mod error;
mod password;
mod role;
mod scope;
mod secret;
mod session;
mod store;
mod throttle;
mod token;
mod user;

pub use audit::{Entry, Gathered, Outcome, Recorded};
pub use error::AccessError;
pub use role::Role;
pub use scope::{Area, Scope};
pub use secret::{Secret, same};
pub use session::{Identity, Proof, Session};
pub use store::{Access, FILE};
pub use throttle::Throttle;
pub use token::Token;
pub use user::User;
