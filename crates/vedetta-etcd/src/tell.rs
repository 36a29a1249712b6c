//! A program tells of its watchers, so that they are seen beside those of a `vedetta up`.

use std::time::Duration;

use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use vedetta_core::{Feed as _, KeyRange, Registry as _, Source as _, SourceError};
use vedetta_runtime::Handle;
use vedetta_runtime::told::{LARGEST, Report, Told, TroubleReport, status_key, wish_key};

use crate::{Cluster, Is, Lease, LeaseId, Write, WriteError};

/// What was told stays for so long when nobody tells it any more.
const TTL: Duration = Duration::from_secs(10);
/// How often it is looked at; what is as it was is not told again.
const EVERY: Duration = Duration::from_secs(1);
/// Troubles that are told,
const TROUBLES: usize = 20;
/// and the bytes of each error.
const ERROR: usize = 1000;
/// Processes of the same name, on hosts of the same name.
const NAMESAKES: u32 = 1000;

/// Tells of a watcher until it is dropped.
#[must_use = "it tells only while this value lives"]
pub struct Telling {
    end: CancellationToken,
    telling: AbortOnDropHandle<()>,
}

/// Tells of a watcher in this cluster: as `name@host-pid` it is in the list of every `vedetta up` whose store that is, and
/// those who may can have it run all its ids again. It is told under a lease, so it goes when the process does.
///
/// A cluster that cannot be reached is tried again; the watcher does not notice.
pub fn tell(cluster: &Cluster, name: &str, handle: Handle) -> Telling {
    let end = CancellationToken::new();
    let teller = Teller { cluster: cluster.clone(), name: name.to_owned(), handle };
    let telling = AbortOnDropHandle::new(tokio::spawn(teller.run(end.clone())));
    Telling { end, telling }
}

impl Telling {
    /// Ends it, and what was told goes at once; or with its time, if the cluster does not answer.
    pub async fn end(self) {
        self.end.cancel();
        let _ = self.telling.await;
    }
}

struct Teller {
    cluster: Cluster,
    name: String,
    handle: Handle,
}

/// Why it stopped telling under a lease.
enum Over {
    Ended,
    Lost,
}

impl Teller {
    async fn run(self, end: CancellationToken) {
        let mut old = None;
        loop {
            let lease = tokio::select! {
                () = end.cancelled() => return,
                lease = self.begin(old) => lease,
            };
            if let Ok(lease) = lease {
                old = Some(lease.id());
                let over = tokio::select! {
                    () = end.cancelled() => Over::Ended,
                    () = lease.lost() => Over::Lost,
                    over = self.under(&lease) => over,
                };
                let _ = lease.revoke().await;
                if matches!(over, Over::Ended) {
                    return;
                }
            }
            tokio::select! {
                () = end.cancelled() => return,
                () = sleep(EVERY) => {}
            }
        }
    }

    /// A new lease, when what was told under the old one is gone.
    async fn begin(&self, old: Option<LeaseId>) -> Result<Lease, SourceError> {
        if let Some(old) = old {
            self.cluster.end(&old.get()).await?;
        }
        self.cluster.lease(TTL).await
    }

    /// Tells for as long as that can be done.
    async fn under(&self, lease: &Lease) -> Over {
        let mut told = self.now();
        let Ok(Some(name)) = self.claim(lease, &told).await else { return Over::Lost };
        let _wishes = AbortOnDropHandle::new(tokio::spawn(wishes(
            self.cluster.clone(),
            name.clone(),
            self.handle.clone(),
        )));
        let mut is_told = true;
        loop {
            sleep(EVERY).await;
            let now = self.now();
            if is_told && now == told {
                continue;
            }
            let write = Write::new().put_leased(status_key(&name), json(&now), lease);
            is_told = match self.cluster.write(write).await {
                Ok(_) => true,
                Err(WriteError::LeaseOver) => return Over::Lost,
                Err(error) => {
                    tracing::debug!(watcher = name, %error, "cannot tell of a watcher now");
                    false
                }
            };
            told = now;
        }
    }

    /// A name that nobody else has.
    async fn claim(&self, lease: &Lease, told: &Told) -> Result<Option<String>, WriteError> {
        let plain = format!("{}@{}-{}", self.name, host_name(), std::process::id());
        let others = (2..NAMESAKES).map(|n| format!("{plain}-{n}"));
        for name in std::iter::once(plain.clone()).chain(others) {
            let key = status_key(&name);
            let write = Write::new().when(key.clone(), Is::Missing);
            if self.cluster.write(write.put_leased(key, json(told), lease)).await?.done {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }

    fn now(&self) -> Told {
        let mut report = Report::of(&self.handle);
        report.last_error = report.last_error.map(shorter);
        let troubles = self.handle.troubles(TROUBLES).into_iter().map(|(id, trouble)| {
            let mut trouble = TroubleReport::new(&id, trouble);
            trouble.retry_in_ms = None; // it would be told again every second
            trouble.error = trouble.error.map(shorter);
            for unreadable in &mut trouble.unreadable {
                unreadable.error = shorter(std::mem::take(&mut unreadable.error));
            }
            trouble
        });
        Told { report, troubles: troubles.collect() }
    }
}

/// What this machine is called.
fn host_name() -> String {
    let name = rustix::system::uname();
    let plain = |c: char| if c.is_ascii_alphanumeric() || ".-".contains(c) { c } else { '-' };
    name.nodename().to_string_lossy().chars().map(plain).take(64).collect()
}

/// As it is written; without its troubles if it would be too large.
fn json(told: &Told) -> Vec<u8> {
    let whole = serde_json::to_vec(told).unwrap_or_default();
    if whole.len() <= LARGEST {
        return whole;
    }
    let less = Told { troubles: Vec::new(), ..told.clone() };
    serde_json::to_vec(&less).unwrap_or_default()
}

fn shorter(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(ERROR));
    text
}

/// Follows the wishes of others.
async fn wishes(cluster: Cluster, name: String, handle: Handle) {
    let key = wish_key(&name);
    loop {
        // It goes before it is followed: one that comes meanwhile is another.
        let taken = match wished(&cluster, &key).await {
            Ok(()) => cluster.delete(key.clone()).await.is_ok(),
            Err(_) => false,
        };
        if !taken {
            sleep(EVERY).await;
        } else if !handle.resync().await {
            return; // it has ended
        }
    }
}

/// Returns when there is one.
async fn wished(cluster: &Cluster, key: &str) -> Result<(), SourceError> {
    let range = KeyRange::One(key.to_owned().into());
    let found = cluster.list(range.clone(), None).await?;
    if !found.entries.is_empty() {
        return Ok(());
    }
    let (mut feed, _) = cluster.follow(range, found.revision.next()).await?;
    loop {
        if feed.next().await?.changes.iter().any(|change| change.value.is_some()) {
            return Ok(());
        }
    }
}
