//! The API as a client on a socket sees it.

mod requests;
mod stages;
mod support;
mod watch;
mod watchers;
