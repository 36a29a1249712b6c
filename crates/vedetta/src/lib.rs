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

pub use vedetta_core::{self as core, KeyRange, Revision};
pub use vedetta_dashboard as dashboard;
pub use vedetta_db as db;
pub use vedetta_etcd as etcd;
pub use vedetta_kv as kv;
pub use vedetta_runtime as runtime;
