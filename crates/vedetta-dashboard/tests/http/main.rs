//! The API as a client on a socket sees it.

mod events;
mod jobs;
mod openapi;
mod pages;
mod requests;
mod stages;
mod stats;
mod support;
mod watch;
mod watchers;
