//! The rules of Vedetta: pure values and decisions.
//!
//! Nothing here opens a file or a socket, spawns anything or reads a clock; time is an argument.

mod range;
mod revision;

pub use range::KeyRange;
pub use revision::Revision;
