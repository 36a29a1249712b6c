//! The floor: the least that a durable write can cost.
//!
//! Records are appended to a file and one `fdatasync` covers all that wait. It has the same callers, the
//! same queue and the same way to answer as the store, but keeps no index, no history and no checksum.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use tokio::sync::{mpsc, oneshot};

pub(crate) struct Floor {
    queue: mpsc::Sender<(Vec<u8>, oneshot::Sender<()>)>,
}

impl Floor {
    pub(crate) fn open(folder: &Path) -> anyhow::Result<Self> {
        let mut log = File::create(folder.join("log"))?;
        let (queue, mut inbox) = mpsc::channel::<(Vec<u8>, oneshot::Sender<()>)>(4096);
        std::thread::Builder::new().name("floor".into()).spawn(move || {
            let mut batch = Vec::new();
            let mut bytes = Vec::new();
            while inbox.blocking_recv_many(&mut batch, 512) > 0 {
                bytes.clear();
                for (record, _) in &batch {
                    bytes.extend_from_slice(&(record.len() as u64).to_le_bytes());
                    bytes.extend_from_slice(record);
                }
                log.write_all(&bytes).expect("the floor's disk works");
                log.sync_data().expect("the floor's disk works");
                for (_, done) in batch.drain(..) {
                    let _ = done.send(());
                }
            }
        })?;
        Ok(Self { queue })
    }

    pub(crate) async fn append(&self, record: Vec<u8>) {
        let (done, answer) = oneshot::channel();
        let sent = self.queue.send((record, done)).await;
        assert!(sent.is_ok() && answer.await.is_ok(), "the floor is there");
    }
}
