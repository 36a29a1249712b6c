//! Breaks the store on purpose and looks for what it should not have lost. See `docs/torture.md`.
//!
//! ```text
//!   workload ──► store on a disk that fails ──► what is left
//!      │                                            │
//!      └──► notes: tried, done, seen ──► story ◄────┘
//!                                          │
//!                                          └──► violations
//! ```

pub mod bed;
pub mod entries;
pub mod fleet;
pub mod jobs;
pub mod note;
pub mod story;
pub mod vfs;
pub mod workload;
