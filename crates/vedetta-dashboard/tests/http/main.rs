//! The API as a client on a socket sees it.

mod jobs;
mod openapi;
mod requests;
mod stages;
mod support;
mod watch;
mod watchers;
