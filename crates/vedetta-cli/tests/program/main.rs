//! The program as a user runs it: the real binary, on free ports, in temporary folders.

mod access;
mod backup;
mod clocks;
mod doctor;
mod handler;
mod job;
mod killed;
mod kv;
mod page;
mod stage;
mod support;
mod telemetry;
mod top;
mod up;
mod watcher;
mod worker;
