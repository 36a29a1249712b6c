//! The sign of life of a module: `/mixers/{id}/heartbeat`, under a lease of 10 s.
//!
//! ```text
//! a lease ──► claim the key ──► keep it true ──lease lost──► from the start
//!               │ it is held by another that lives: this one gives up
//! ```
//!
//! **What a lost lease means.** The rooms of the module may be given to others, so nothing new is begun that
//! the store does not confirm. What runs goes on: whether the room is still ours is then known not to us but
//! to Janus, which sends each room's packets to one mixer only. A stream that is no longer fed stalls, is
//! stopped, and is not begun again without a lease; and once the store answers again, what is no longer ours is ended. So when the store is away the
//! rooms stay on air, and when only this module is cut off no room is mixed twice.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::{Instant, sleep};
use vedetta::core::explain;
use vedetta::etcd::{Cluster, Is, Lease, Write};

use crate::model::{Heartbeat, Kind, Marks, TTL};
use crate::store::{StoreError, get, json, update};

/// How long to wait before another try.
const PAUSE: Duration = Duration::from_millis(500);
/// How long to wait for the lease of one that has gone.
const CLAIM: Duration = Duration::from_secs(15);
/// Changes within that time are told as one.
const TOGETHER: Duration = Duration::from_millis(100);

/// Another process of this id lives.
#[derive(Debug, Clone, thiserror::Error)]
#[error("another {kind} {id} lives, process {pid} on {host}: stop it, or choose another --id")]
pub struct Taken {
    kind: Kind,
    id: String,
    host: String,
    pid: u32,
}

/// What this process says of itself.
pub fn heartbeat(host: String, capacity: u32) -> Heartbeat {
    Heartbeat {
        host,
        capacity,
        load: 0,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        machine: machine(),
        run: format!("{:032x}", fastrand::u128(..)),
        leaving: false,
    }
}

/// Marks a module as ready, unless people have said something of it before.
pub async fn mark_ready(store: &Cluster, kind: Kind, id: &str) -> Result<(), StoreError> {
    let ready = Marks { ready: true, ..Marks::default() };
    let first = |marks: Option<Marks>| marks.is_none().then_some(ready);
    update(store, &kind.key(id, "state"), first).await.map(drop)
}

/// Says what a module is like.
#[derive(Clone)]
pub struct Voice(Arc<watch::Sender<Option<Heartbeat>>>);

impl Voice {
    /// Says this from now on; with nothing, there is no sign of life.
    pub fn say(&self, change: impl FnOnce(&mut Option<Heartbeat>)) {
        self.0.send_if_modified(|beat| {
            let before = beat.clone();
            change(beat);
            *beat != before
        });
    }

    /// Says how many rooms it runs.
    pub fn load(&self, rooms: usize) {
        let load = u32::try_from(rooms).unwrap_or(u32::MAX);
        self.say(|beat| beat.iter_mut().for_each(|beat| beat.load = load));
    }

    /// Says that it is to lose its rooms.
    pub fn leaving(&self) {
        self.say(|beat| beat.iter_mut().for_each(|beat| beat.leaving = true));
    }
}

/// Keeps a module's sign of life, while there is something to say.
pub struct Presence {
    voice: Voice,
    is_there: watch::Receiver<bool>,
    task: JoinHandle<Taken>,
}

impl Presence {
    /// Begins with this; with nothing, there is none until something is [said](Voice::say).
    pub fn start(store: Cluster, kind: Kind, id: &str, beat: Option<Heartbeat>) -> Self {
        let (beat, beats) = watch::channel(beat);
        let (there, is_there) = watch::channel(false);
        let keeper = Keeper { store, kind, id: id.to_owned(), there };
        Self { voice: Voice(Arc::new(beat)), is_there, task: tokio::spawn(keeper.keep(beats)) }
    }

    /// Waits until it is there.
    pub async fn joined(&mut self) -> Result<(), Taken> {
        tokio::select! {
            ended = &mut self.task => Err(taken(ended)),
            Ok(_) = self.is_there.wait_for(|there| *there) => Ok(()), // else the task has ended
        }
    }

    /// Returns when another process took the id.
    pub async fn taken(&mut self) -> Taken {
        taken((&mut self.task).await)
    }

    /// Whether it is there. Says no more when another process took the id.
    pub fn there(&self) -> watch::Receiver<bool> {
        self.is_there.clone()
    }

    /// What says more.
    pub fn voice(&self) -> Voice {
        self.voice.clone()
    }

    /// The last word: the key goes. If the store does not answer, it goes with its lease.
    pub async fn leave(mut self) {
        self.voice.say(|beat| *beat = None);
        let gone = async { self.is_there.wait_for(|there| !there).await.map(drop) };
        let _ = tokio::time::timeout(Duration::from_secs(3), gone).await;
    }
}

/// Nobody ends the task but our end.
fn taken(ended: Result<Taken, JoinError>) -> Taken {
    ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Keeper {
    store: Cluster,
    kind: Kind,
    id: String,
    there: watch::Sender<bool>,
}

/// How a claim ended.
enum Claim {
    /// It is ours, with this value.
    Ours(Vec<u8>),
    /// Somebody lives who has it.
    Held(Taken),
}

impl Keeper {
    async fn keep(self, mut beats: watch::Receiver<Option<Heartbeat>>) -> Taken {
        let mut held_since = None;
        loop {
            let Ok(beat) = beats.wait_for(Option::is_some).await.map(|beat| beat.clone()) else {
                std::future::pending::<()>().await; // we are being dropped
                continue;
            };
            let Some(beat) = beat else { continue };
            match self.claim(&beat).await {
                Ok((lease, Claim::Ours(value))) => {
                    held_since = None;
                    self.there.send_replace(true);
                    tracing::info!(kind = %self.kind, id = self.id, "joined");
                    self.hold(lease, value, &mut beats).await;
                    self.there.send_replace(false);
                }
                Ok((lease, Claim::Held(taken))) => {
                    let _ = lease.revoke().await;
                    let since = *held_since.get_or_insert_with(Instant::now);
                    if since.elapsed() > CLAIM {
                        return taken;
                    }
                    tracing::warn!("{taken}; or it has just died: waiting");
                    sleep(PAUSE).await;
                }
                Err(error) => {
                    tracing::warn!(error = explain(&error), "cannot join yet");
                    sleep(PAUSE).await;
                }
            }
        }
    }

    async fn claim(&self, beat: &Heartbeat) -> Result<(Lease, Claim), StoreError> {
        let lease = self.store.lease(TTL).await?;
        let key = self.kind.key(&self.id, "heartbeat");
        let is = match get::<Heartbeat>(&self.store, &key).await? {
            None => Is::Missing,
            Some((there, at)) if there.run == beat.run || is_dead(&there, beat) => Is::At(at),
            Some((there, _)) => {
                let Heartbeat { host, pid, .. } = there;
                let taken = Taken { kind: self.kind, id: self.id.clone(), host, pid };
                return Ok((lease, Claim::Held(taken)));
            }
        };
        let value = json(beat);
        let write =
            Write::new().when(key.clone(), is).put_leased(key.clone(), value.clone(), &lease);
        if !self.store.write(write).await?.done {
            return Err(StoreError::Busy(key));
        }
        Ok((lease, Claim::Ours(value)))
    }

    /// Keeps it true until the lease is lost, there is nothing more to say, or somebody else wrote it.
    async fn hold(
        &self,
        lease: Lease,
        mut value: Vec<u8>,
        beats: &mut watch::Receiver<Option<Heartbeat>>,
    ) {
        let key = self.kind.key(&self.id, "heartbeat");
        beats.mark_changed(); // it may have changed since the claim
        loop {
            tokio::select! {
                () = lease.lost() => {
                    tracing::warn!(kind = %self.kind, id = self.id, "the lease is lost");
                    return;
                }
                changed = beats.changed() => if changed.is_err() { return },
            }
            let said = beats.borrow_and_update().clone();
            let Some(beat) = said else {
                let _ = lease.revoke().await; // else it goes when its time is over
                return;
            };
            let next = json(&beat);
            if next == value {
                continue;
            }
            let write = Write::new().when(key.clone(), Is::Value(value.clone().into())).put_leased(
                key.clone(),
                next.clone(),
                &lease,
            );
            match self.store.write(write).await {
                Ok(written) if written.done => value = next,
                Ok(_) => return,
                Err(error) => {
                    tracing::warn!(error = explain(&error), "cannot tell of a change yet");
                    // It may have been written, so only a new claim knows.
                    return;
                }
            }
            sleep(TOGETHER).await;
        }
    }
}

/// Where process numbers mean the same: this machine, since it was started, and the container in it.
fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), namespace.display())
}

/// Whether who wrote this was on the same machine as we are, and is there no more.
fn is_dead(there: &Heartbeat, ours: &Heartbeat) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", there.pid)).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    there.machine == ours.machine && matches!(state, None | Some('Z' | 'X'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_process_of_this_machine_can_be_known_to_be_dead() {
        let ours = heartbeat("here".into(), 1);
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let theirs = Heartbeat { pid: child.id(), run: "x".into(), ..ours.clone() };
        assert!(!is_dead(&theirs, &ours), "it lives");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(is_dead(&theirs, &ours));
        let elsewhere = Heartbeat { machine: "another".into(), ..theirs };
        assert!(!is_dead(&elsewhere, &ours), "who knows");
    }
}
