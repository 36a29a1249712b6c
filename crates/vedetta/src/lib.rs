//! Vedetta as a library: the embedded store, watchers that reconcile, the server of the HTTP API, and etcd's
//! protocols over the store.
//!
//! ```
//! use vedetta::db::{DataFolder, Db};
//! use vedetta::kv::{Options, Put, SCHEMA, Store, WatchOptions};
//! use vedetta::{KeyRange, Revision};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path();
//! let folder = DataFolder::open(path)?; // held by this process until dropped
//! let db = Db::open(&vedetta::db::Options::new(folder.database()), &[SCHEMA])?;
//! let store = Store::open(db, Options::default()).await?;
//!
//! let mut watcher = store.watch(KeyRange::prefix("rooms/"), WatchOptions::default())?;
//! store.put(Put::new("rooms/1", "on air")).await?; // on the disk when it returns
//!
//! let batch = watcher.next().await?;
//! let event = batch.iter().next().unwrap();
//! assert_eq!(event.revision, Revision(2));
//! assert_eq!(event.now().unwrap().value(), b"on air");
//! store.close().await;
//! # Ok(())
//! # }
//! ```
//!
//! A watcher with typed states, on that store or on an etcd elsewhere
//! ([`etcd::Cluster`]), both of which are a [`Source`](core::Source):
//!
//! ```
//! use std::time::Duration;
//!
//! use vedetta::db::{DataFolder, Db};
//! use vedetta::kv::{Options, Put, SCHEMA, Store};
//! use vedetta::runtime::watcher::{BoxError, Effect, Id};
//! use vedetta::runtime::{Next, Reconcile, State, Watcher};
//!
//! /// What a room should be, from `/rooms/{id}/title` and `/rooms/{id}/size`.
//! #[derive(Debug, Clone, Default)]
//! struct Room {
//!     title: String,
//!     size: u32,
//! }
//!
//! impl State for Room {
//!     fn apply(&mut self, key_type: &str, value: Option<&[u8]>) -> Result<Effect, BoxError> {
//!         let text = std::str::from_utf8(value.unwrap_or_default())?; // nothing: that key is gone
//!         match key_type {
//!             "title" => self.title = text.into(),
//!             _ => self.size = text.parse()?, // after an error the last good state stands
//!         }
//!         Ok(Effect::Wanted)
//!     }
//! }
//!
//! struct Rooms(tokio::sync::mpsc::Sender<String>);
//!
//! impl Reconcile for Rooms {
//!     type State = Room;
//!
//!     async fn reconcile(&self, id: &Id, room: Option<&Room>) -> Result<Next, BoxError> {
//!         let line = match room {
//!             Some(room) => format!("open {id}: {}, {}", room.title, room.size),
//!             None => format!("close {id}"),
//!         };
//!         self.0.send(line).await?; // an error is tried again, later and later
//!         Ok(Next::Done)
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let folder = DataFolder::open(dir.path())?;
//! # let db = Db::open(&vedetta::db::Options::new(folder.database()), &[SCHEMA])?;
//! let store = Store::open(db, Options::default()).await?;
//! store.put(Put::new("/rooms/1/title", "Jazz")).await?;
//! store.put(Put::new("/rooms/1/size", "30")).await?;
//!
//! let (told, mut heard) = tokio::sync::mpsc::channel(8);
//! let watcher = Watcher::new("/rooms/").key_types(["title", "size"]);
//! let watching = watcher.start(store.clone(), Rooms(told));
//! watching.ready(Duration::from_secs(10)).await?;
//! assert_eq!(heard.recv().await.as_deref(), Some("open 1: Jazz, 30"));
//! assert_eq!(watching.get("1").map(|room| room.size), Some(30));
//!
//! watching.stop(Duration::from_secs(5)).await; // first what reads the store, then the store
//! store.close().await;
//! # Ok(())
//! # }
//! ```

pub use vedetta_access as access;
pub use vedetta_core::{self as core, KeyRange, Revision};
pub use vedetta_dashboard as dashboard;
pub use vedetta_db as db;
pub use vedetta_etcd as etcd;
pub use vedetta_fleet as fleet;
pub use vedetta_jobs as jobs;
pub use vedetta_kv as kv;
pub use vedetta_runtime as runtime;
pub use vedetta_stage as stage;
pub use vedetta_telemetry as telemetry;
