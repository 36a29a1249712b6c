//! Keeps reality as a [`Source`] says it should be.
//!
//! ```text
//!  Source ──list, follow──► table: id → state ──changed──► Runner ──► reconcile(id, state)
//!             ▲      │                                        ▲              │
//!             └──────┘ lost, compacted                        └── again ◄────┘ failed, asked for
//!                      └──► rebuild(everything) before the next reconcile
//! ```
//!
//! One task owns all of it. It lists a prefix, lets [`Reconcile::rebuild`] compare that with what really
//! runs, and then follows the changes; each id that changed is reconciled, one run of an id at a time,
//! many ids at once, and again with growing waits until it succeeds. When the line to the source drops it
//! goes on after the last revision it saw; when that history is gone it lists again and finds what was
//! deleted meanwhile by comparing. A value that cannot be read leaves the id as it last was.

mod table;
mod task;

use std::collections::HashSet;
use std::error::Error;
use std::future::Future;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use tokio::sync::{broadcast, mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use vedetta_core::{Backoff, Moment, Revision, RunEvent, Source};

use table::Table;
pub use table::{Id, Trouble, Wanted};

/// Any error, for people to read.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// What an id should be, put together from its keys. Code without effects.
///
/// A value that cannot be read leaves the state as it was. One that could not be read when its id was
/// first listed has nothing before it to stand: until it can be read, or is deleted, the id is neither
/// reconciled nor an orphan.
pub trait State: Default + Clone + Send + Sync + 'static {
    /// Takes in the value of one key, or that it is gone. After an error, or a panic, the state is as it
    /// was before.
    fn apply(&mut self, key_type: &str, value: Option<&[u8]>) -> Result<Effect, BoxError>;
}

/// What a change means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Something else is wanted: reconcile, and begin the waits anew.
    Wanted,
    /// Nothing to do. A watcher's own status keys are such: else writing them after a failure would
    /// start the next try.
    Quiet,
}

/// What to do after a reconcile that succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Nothing until something changes.
    Done,
    /// Reconcile again after this long.
    After(Duration),
}

/// Brings about what is wanted.
pub trait Reconcile: Send + Sync + 'static {
    /// What an id should be.
    type State: State;

    /// Compares everything that is wanted with what really runs: ends what nobody wants, takes over what
    /// fits. It runs after the first list and after every reconnect, while nothing else does, and is tried
    /// again until it succeeds.
    fn rebuild(
        &self,
        wanted: &Wanted<Self::State>,
    ) -> impl Future<Output = Result<(), BoxError>> + Send {
        let _ = wanted;
        async { Ok(()) }
    }

    /// Makes one id what it should be; without a state it should not be at all. There is never a second
    /// run of the same id beside it. After an error it is tried again.
    fn reconcile(
        &self,
        id: &Id,
        state: Option<&Self::State>,
    ) -> impl Future<Output = Result<Next, BoxError>> + Send;
}

/// A watcher to be started.
#[derive(Debug, Clone)]
pub struct Watcher {
    prefix: Bytes,
    key_types: Option<HashSet<String>>,
    quiet: HashSet<String>,
    parallel: NonZeroU32,
    timeout: Option<Duration>,
    backoff: Backoff,
    resync: Option<Duration>,
}

/// How many ids are reconciled at once unless told otherwise.
const PARALLEL: NonZeroU32 = NonZeroU32::new(64).expect("not zero");
/// A run that goes on says so that often.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// Events a slow reader of [`Watching::events`] may be behind before it misses some.
const EVENTS_KEPT: usize = 1024;

impl Watcher {
    /// Watches keys of the form `{prefix}{id}/{key type}`.
    pub fn new(prefix: impl Into<Bytes>) -> Self {
        Self {
            prefix: prefix.into(),
            key_types: None,
            quiet: HashSet::new(),
            parallel: PARALLEL,
            timeout: Some(Duration::from_secs(300)),
            backoff: Backoff::default(),
            resync: None,
        }
    }

    /// Heeds these key types only.
    #[must_use]
    pub fn key_types<T: Into<String>>(mut self, types: impl IntoIterator<Item = T>) -> Self {
        self.key_types = Some(types.into_iter().map(Into::into).collect());
        self
    }

    /// Keeps these key types in the state, but nothing is reconciled for them, as if the state called them
    /// [`Effect::Quiet`]; unless one is the first or the last key of its id.
    #[must_use]
    pub fn quiet<T: Into<String>>(mut self, types: impl IntoIterator<Item = T>) -> Self {
        self.quiet = types.into_iter().map(Into::into).collect();
        self
    }

    /// Reconciles up to so many ids at once: 64 if not told.
    #[must_use]
    pub fn parallel(mut self, ids: NonZeroU32) -> Self {
        self.parallel = ids;
        self
    }

    /// Drops a reconcile that takes longer, which counts as a failure: 5 minutes if not told. Without a
    /// limit one that hangs holds up every [`Reconcile::rebuild`].
    #[must_use]
    pub fn timeout(mut self, limit: Option<Duration>) -> Self {
        self.timeout = limit;
        self
    }

    /// Waits between tries: 100 ms, 200 ms … 10 s if not told.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = backoff;
        self
    }

    /// Reconciles every id once per period, changed or not, spread over it. Off if not told.
    #[must_use]
    pub fn resync_every(mut self, period: Duration) -> Self {
        self.resync = Some(period.clamp(Duration::from_millis(1), crate::LONGEST));
        self
    }

    /// Starts it, on a task of its own.
    pub fn start<S: Source, R: Reconcile>(self, source: S, reconcile: R) -> Watching<R::State> {
        let shared = Arc::new(Shared {
            prefix: self.prefix.clone(),
            table: RwLock::new(Table::new(
                self.prefix.clone(),
                self.key_types.clone(),
                self.quiet.clone(),
            )),
            status: Mutex::new(Status::default()),
            progress: watch::Sender::new(Progress::default()),
            events: broadcast::Sender::new(EVENTS_KEPT),
            began: Instant::now(),
        });
        let (commands, inbox) = mpsc::channel(16);
        let (stop, grace) = (CancellationToken::new(), Arc::new(Mutex::new(Duration::ZERO)));
        let task = task::Task::new(self, source, reconcile, Arc::clone(&shared), inbox);
        let task = tokio::spawn(task.run(stop.clone(), Arc::clone(&grace)));
        Watching { shared, commands, stop, grace, task }
    }
}

/// A watcher that runs. Dropping it ends it, and whatever it runs, at once.
pub struct Watching<S: State> {
    shared: Arc<Shared<S>>,
    commands: mpsc::Sender<Command>,
    stop: CancellationToken,
    grace: Arc<Mutex<Duration>>,
    task: JoinHandle<usize>,
}

impl<S: State> Watching<S> {
    /// Waits until everything was listed, compared with reality, and is followed; or says what it is at
    /// after `patience`.
    pub async fn ready(&self, patience: Duration) -> Result<(), NotReady> {
        let mut progress = self.shared.progress.subscribe();
        let ready = progress.wait_for(|progress| progress.ready || progress.ended);
        match tokio::time::timeout(patience, ready).await {
            Ok(Ok(progress)) if !progress.ended => Ok(()),
            _ => {
                let status = self.status();
                Err(NotReady { at: status.phase, error: status.last_error })
            }
        }
    }

    /// Waits until the table has everything up to `revision`: after a write of one's own.
    pub async fn caught_up(&self, revision: Revision) {
        let mut progress = self.shared.progress.subscribe();
        // The sender lives as long as `self`.
        let _ = progress.wait_for(|progress| progress.revision >= revision || progress.ended).await;
    }

    /// What an id should be now.
    pub fn get(&self, id: impl AsRef<[u8]>) -> Option<Arc<S>> {
        self.shared.table.read().get(id.as_ref())
    }

    /// Everything that should be now.
    pub fn all(&self) -> Wanted<S> {
        self.shared.table.read().all()
    }

    /// Up to `limit` ids that are not as they should be, and why.
    pub fn troubles(&self, limit: usize) -> Vec<(Id, Trouble)> {
        self.shared.troubles(limit)
    }

    /// How it is doing.
    pub fn status(&self) -> Status {
        self.shared.status()
    }

    /// For those who look at it and steer it, and do not know what its states are.
    pub fn handle(&self) -> Handle {
        let seen = Arc::clone(&self.shared) as Arc<dyn Seen>;
        Handle { seen, commands: self.commands.clone() }
    }

    /// What happens from now on. A reader that is more than 1,024 events behind misses some and is told.
    pub fn events(&self) -> broadcast::Receiver<WatcherEvent> {
        self.shared.events.subscribe()
    }

    /// Reconciles every id once, changed or not.
    pub async fn resync(&self) {
        // If the task is gone there is nothing to ask.
        let _ = self.commands.send(Command::Resync).await;
    }

    /// Lists everything again, rebuilds, and reconciles every id.
    pub async fn restart(&self) {
        let _ = self.commands.send(Command::Restart).await;
    }

    /// Starts nothing new, lets what runs finish within `grace`, and ends the rest. How many it had to end.
    pub async fn stop(mut self, grace: Duration) -> usize {
        *self.grace.lock() = grace;
        self.stop.cancel();
        match (&mut self.task).await {
            Ok(aborted) => aborted,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => 0, // the runtime ended first
            },
        }
    }
}

impl<S: State> Drop for Watching<S> {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// A watcher as seen from outside, whatever its states are. It does not keep the watcher running.
#[derive(Clone)]
pub struct Handle {
    seen: Arc<dyn Seen>,
    commands: mpsc::Sender<Command>,
}

impl Handle {
    /// How the keys begin that it watches.
    pub fn prefix(&self) -> &[u8] {
        self.seen.prefix()
    }

    /// See [`Watching::status`].
    pub fn status(&self) -> Status {
        self.seen.status()
    }

    /// See [`Watching::troubles`].
    pub fn troubles(&self, limit: usize) -> Vec<(Id, Trouble)> {
        self.seen.troubles(limit)
    }

    /// See [`Watching::resync`]. Whether there is still one to ask.
    pub async fn resync(&self) -> bool {
        self.commands.send(Command::Resync).await.is_ok()
    }
}

/// What of [`Shared`] does not depend on the type of the states.
trait Seen: Send + Sync {
    fn prefix(&self) -> &[u8];
    fn status(&self) -> Status;
    fn troubles(&self, limit: usize) -> Vec<(Id, Trouble)>;
}

impl<S: State> Seen for Shared<S> {
    fn prefix(&self) -> &[u8] {
        &self.prefix
    }

    fn status(&self) -> Status {
        let mut status = self.status.lock().clone();
        let table = self.table.read();
        (status.ids, status.failing, status.revision) =
            (table.len(), table.failing(), table.revision);
        status
    }

    fn troubles(&self, limit: usize) -> Vec<(Id, Trouble)> {
        let now = Moment::reached(self.began.elapsed());
        self.table.read().troubles(limit, now)
    }
}

/// Not ready in time.
#[derive(Debug, Clone, thiserror::Error)]
#[error("the watcher is not ready, it is {at}{}", error.as_ref().map(|e| format!("; {e}")).unwrap_or_default())]
pub struct NotReady {
    /// What it is at.
    pub at: Phase,
    /// What went wrong last.
    pub error: Option<String>,
}

/// What a watcher is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    /// Listing the prefix.
    #[default]
    Listing,
    /// Opening the feed of changes.
    Opening,
    /// Comparing what is wanted with what runs.
    Rebuilding,
    /// Following the changes.
    Following,
    /// Waiting before it tries the source again.
    Waiting,
    /// It has ended.
    Stopped,
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Listing => "listing",
            Self::Opening => "opening the feed",
            Self::Rebuilding => "rebuilding",
            Self::Following => "following",
            Self::Waiting => "waiting to try the source again",
            Self::Stopped => "stopped",
        })
    }
}

/// How a watcher is doing. Counts are since it started.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// What it is at.
    pub phase: Phase,
    /// The table is true at this revision.
    pub revision: Revision,
    /// Ids in the table.
    pub ids: usize,
    /// Ids that run.
    pub running: usize,
    /// Ids that wait, for their time or for room.
    pub waiting: usize,
    /// Ids whose last run failed.
    pub failing: usize,
    /// Runs that ended well.
    pub done: u64,
    /// Runs that ended badly.
    pub failed: u64,
    /// Keys that are not of the form.
    pub malformed: u64,
    /// Values that could not be read.
    pub unreadable: u64,
    /// Times it listed everything.
    pub lists: u64,
    /// Times the line to the source dropped.
    pub lost: u64,
    /// What went wrong last, with the source or a rebuild.
    pub last_error: Option<String>,
}

/// Something a watcher did or met.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WatcherEvent {
    /// Something happened to the runs of an id.
    Run(Id, RunEvent),
    /// Everything was listed.
    Listed {
        /// At this revision.
        revision: Revision,
        /// So many ids.
        ids: usize,
    },
    /// Reality was compared with it.
    Rebuilt,
    /// The line to the source dropped, for this reason.
    Lost(String),
    /// The history it needed is gone; it lists again.
    Compacted,
    /// The source is not what it was: it stands before what was seen. It lists again, and trusts nothing.
    WentBack {
        /// What was seen.
        seen: Revision,
        /// Where it stands.
        revision: Revision,
    },
    /// A key that is not of the form.
    Malformed(Bytes),
    /// A value that could not be read: id, key type, reason.
    Unreadable(Id, String, String),
}

enum Command {
    Resync,
    Restart,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Progress {
    ready: bool,
    /// Nothing more will come.
    ended: bool,
    revision: Revision,
}

/// What the task shares with those who hold [`Watching`]. Only the task writes.
struct Shared<S> {
    prefix: Bytes,
    table: RwLock<Table<S>>,
    status: Mutex<Status>,
    progress: watch::Sender<Progress>,
    events: broadcast::Sender<WatcherEvent>,
    began: Instant,
}

impl<S> Shared<S> {
    /// Tells those who listen; `event` is not made if nobody does.
    fn tell(&self, event: impl FnOnce() -> WatcherEvent) {
        if self.events.receiver_count() > 0 {
            // An error means that the last one has just left.
            let _ = self.events.send(event());
        }
    }
}
