//! Live audio rooms, kept by three kinds of processes that know of each other only by the store.
//!
//! ```text
//!               ┌───────────── the store: an etcd cluster, or a Vedetta ──────────────┐
//!               │ /rooms/…  what should be    /mixers/…, /januses/…  who is there     │
//!               └───▲──────────────────────▲──────────────────────▲───────────────────┘
//!      HTTP ──► rooms: who runs what    janus: rooms, forwarders   mixer: ports, FFmpegs
//!                                          │                        │
//!                        people ──► Janus's AudioBridge ──RTP──► FFmpeg ──► HLS
//! ```
//!
//! Each is a [`Watcher`](vedetta::runtime::Watcher) that makes true what the store says: [`rooms`] decides, by
//! the rules in [`place`]; [`mixer`] and [`janus`] do. Any of them may die at any moment, be cut off or be
//! started twice; what it left is found and put right by the next one.

mod api;
pub mod bridge;
pub mod demo;
pub mod forward;
pub mod janus;
pub mod leftovers;
pub mod mixer;
pub mod model;
pub mod place;
pub mod ports;
pub mod presence;
pub mod programs;
pub mod rooms;
pub mod store;
pub mod stream;
