//! The one task of a watcher.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use vedetta_core::follow::{Step, Turn};
use vedetta_core::{
    Backoff, Changes, Entry, Failure, Feed as _, Follow, KeyRange, Moment, Page, Revision,
    RunEvent, Slot, Source, SourceError, Tries, explain,
};

use super::table::Applied;
use super::{BoxError, Command, HEARTBEAT, Next, Phase, Reconcile, Shared, Watcher, WatcherEvent};
use crate::LONGEST;
use crate::runner::{Ended, Limits, Outcome, Runner};

/// The waits between tries to reach a source. With jitter: the watchers of a fleet lose it together.
const RECONNECT: Backoff =
    Backoff { first: Duration::from_millis(100), most: Duration::from_secs(10), jitter: 0.2 };

/// Of changes that are at hand so many are taken in before anything is run: those of one id are one run.
const BURST: usize = 4096;

/// Says that the task has ended, also when it panicked.
struct End<S>(Arc<Shared<S>>);

impl<S> Drop for End<S> {
    fn drop(&mut self) {
        let mut status = self.0.status.lock();
        status.phase = Phase::Stopped;
        (status.running, status.waiting) = (0, 0);
        drop(status);
        self.0.progress.send_modify(|progress| progress.ended = true);
    }
}

/// What came of a step of [`Follow`].
enum Heard<F> {
    Page(Result<Page, SourceError>),
    Opened(Result<(F, Revision), SourceError>),
    Read(F, Result<Changes, SourceError>),
    Waited,
}

type Link<F> = Pin<Box<dyn Future<Output = Heard<F>> + Send>>;

/// How far the comparison with reality is. Nothing is reconciled until it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rebuild {
    /// There is a list to come, or a feed, or what it owes.
    NotYet,
    /// As soon as nothing runs.
    Due,
    Running,
    /// It failed.
    Again(Moment),
    Done,
}

pub(super) struct Task<S: Source, R: Reconcile> {
    source: Arc<S>,
    reconcile: Arc<R>,
    shared: Arc<Shared<R::State>>,
    inbox: mpsc::Receiver<Command>,
    range: KeyRange,
    backoff: Backoff,
    resync: Option<Duration>,
    resync_at: Option<Instant>,
    runner: Runner<Next>,
    /// By slot.
    tries: Vec<Tries>,
    follow: Follow,
    feed: Option<S::Feed>,
    listing: Vec<Entry>,
    /// The next list is after a restart: every id is reconciled.
    anew: bool,
    /// The next list is of another history: what we know says nothing about it.
    another: bool,
    rebuild: Rebuild,
    rebuild_tries: Tries,
    rebuilding: JoinSet<Result<(), BoxError>>,
}

impl<S: Source, R: Reconcile> Task<S, R> {
    pub(super) fn new(
        options: Watcher,
        source: S,
        reconcile: R,
        shared: Arc<Shared<R::State>>,
        inbox: mpsc::Receiver<Command>,
    ) -> Self {
        let range = KeyRange::prefix(options.prefix);
        let limits = Limits { capacity: options.parallel, timeout: options.timeout };
        let told = Arc::clone(&shared);
        let runner = Runner::new(limits).heartbeat(HEARTBEAT, move |slot| {
            told.tell(|| {
                let id = told.table.read().id(slot).cloned();
                WatcherEvent::Run(id.unwrap_or_else(|| super::Id::new("")), RunEvent::Running)
            });
        });
        Self {
            source: Arc::new(source),
            reconcile: Arc::new(reconcile),
            shared,
            inbox,
            backoff: options.backoff,
            resync: options.resync,
            resync_at: None,
            runner,
            tries: Vec::new(),
            follow: Follow::new(range.clone(), RECONNECT),
            range,
            feed: None,
            listing: Vec::new(),
            anew: true,
            another: false,
            rebuild: Rebuild::NotYet,
            rebuild_tries: Tries::default(),
            rebuilding: JoinSet::new(),
        }
    }

    /// Runs until `stop`. How many runs had to be aborted after the grace.
    pub(super) async fn run(
        mut self,
        stop: CancellationToken,
        grace: Arc<Mutex<Duration>>,
    ) -> usize {
        let _end = End(Arc::clone(&self.shared));
        let mut link = self.link();
        loop {
            // A feed that never pauses keeps neither others from the thread nor runs from ending.
            tokio::task::coop::consume_budget().await;
            let now = Instant::now();
            while let Some(run) = self.runner.try_next(now) {
                self.ended(run);
            }
            self.start_rebuild();
            self.runner.pause(self.rebuild != Rebuild::Done);
            self.start_due();
            self.report();
            let rebuild_again = match self.rebuild {
                Rebuild::Again(at) => Some(self.instant(at)),
                _ => None,
            };
            let now = Instant::now();
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(command) = self.inbox.recv() => {
                    if self.obey(&command) {
                        link = self.link();
                    }
                }
                Some(rebuilt) = self.rebuilding.join_next() => {
                    let rebuilt = rebuilt.unwrap_or_else(|error| {
                        let why = match error.try_into_panic() {
                            Ok(panic) => Failure::of_panic(panic.as_ref()).to_string(),
                            Err(error) => error.to_string(),
                        };
                        Err(why.into())
                    });
                    self.rebuilt(rebuilt);
                }
                () = sleep_until(rebuild_again.unwrap_or(now)), if rebuild_again.is_some() => {
                    self.rebuild = Rebuild::Due;
                }
                () = sleep_until(self.resync_at.unwrap_or(now)), if self.resync_at.is_some() => {
                    self.resync_spread();
                }
                // These come in floods, what is above does not.
                heard = &mut link => {
                    let mut left = BURST.saturating_sub(self.heard(heard));
                    link = self.link();
                    while left > 0 && let Some(heard) = (&mut link).now_or_never() {
                        left = left.saturating_sub(self.heard(heard).max(1));
                        link = self.link();
                    }
                }
                ended = self.runner.next() => {
                    if let Some(run) = ended {
                        self.ended(run);
                    }
                }
            }
        }
        drop(link);
        let grace = *grace.lock();
        self.drain(grace.min(LONGEST)).await
    }

    /// Starts nothing new, lets what runs end within `grace`, and aborts the rest: how many.
    async fn drain(&mut self, grace: Duration) -> usize {
        self.inbox.close();
        self.runner.pause(true);
        let until = Instant::now() + grace;
        while self.runner.running() > 0 || !self.rebuilding.is_empty() {
            tokio::select! {
                biased;
                Some(run) = self.runner.next(), if self.runner.running() > 0 => self.ended(run),
                Some(_) = self.rebuilding.join_next() => {}
                () = sleep_until(until) => break,
            }
            self.report();
        }
        self.rebuilding.shutdown().await;
        let aborted = self.runner.running();
        self.runner.abort();
        while self.runner.running() > 0 {
            if let Some(run) = self.runner.next().await {
                self.ended(run);
            }
        }
        self.report();
        aborted
    }

    fn instant(&self, at: Moment) -> Instant {
        Instant::now() + at.since(self.runner.now())
    }

    /// The next step towards the source.
    fn link(&mut self) -> Link<S::Feed> {
        let (source, range) = (Arc::clone(&self.source), self.range.clone());
        match self.follow.step() {
            Step::List(range, at) => {
                self.feed = None;
                Box::pin(async move { Heard::Page(source.list(range, at).await) })
            }
            Step::Open(from) => {
                self.feed = None;
                Box::pin(async move { Heard::Opened(source.follow(range, from).await) })
            }
            Step::Wait(until) => {
                self.feed = None;
                let until = self.instant(until);
                Box::pin(async move {
                    sleep_until(until).await;
                    Heard::Waited
                })
            }
            Step::Read => match self.feed.take() {
                Some(mut feed) => Box::pin(async move {
                    let read = feed.next().await;
                    Heard::Read(feed, read)
                }),
                None => Box::pin(std::future::pending()),
            },
        }
    }

    /// Takes in what came of a step. How many changes that were.
    fn heard(&mut self, heard: Heard<S::Feed>) -> usize {
        let mut taken_in = 0;
        let turn = match heard {
            Heard::Waited => {
                self.follow.waited();
                Turn::Going
            }
            Heard::Page(Ok(page)) => {
                let last = page.entries.last().filter(|_| page.more).map(|entry| entry.key.clone());
                self.listing.extend(page.entries);
                self.follow.page(page.revision, last.as_deref())
            }
            Heard::Opened(Ok((feed, revision))) => {
                let owed = feed.owed();
                self.feed = Some(feed);
                if revision < self.follow.seen() {
                    let seen = self.follow.seen();
                    tracing::warn!(%revision, %seen, "the source went back, listing all of it again");
                    self.shared.tell(|| WatcherEvent::WentBack { seen, revision });
                    self.another = true;
                }
                self.follow.opened(revision, owed, self.runner.now(), fastrand::f64())
            }
            Heard::Read(feed, Ok(changes)) => {
                self.feed = Some(feed);
                self.apply(&changes);
                taken_in = changes.changes.len();
                self.follow.read(changes.revision)
            }
            Heard::Page(Err(error)) | Heard::Opened(Err(error)) | Heard::Read(_, Err(error)) => {
                self.lost(error)
            }
        };
        match turn {
            Turn::Going => {}
            Turn::Again => self.listing.clear(),
            Turn::Listed(revision) => self.listed(revision),
            // A rebuild now would take what was begun meanwhile for an orphan, and a run what was not looked at.
            Turn::CatchingUp => self.rebuild = Rebuild::NotYet,
            Turn::Open => {
                self.rebuild = Rebuild::Due;
                self.rebuild_tries = Tries::default();
            }
        }
        taken_in
    }

    fn lost(&mut self, error: SourceError) -> Turn {
        match error {
            SourceError::Compacted { asked } => {
                tracing::info!(%asked, "the history to follow was compacted, listing again");
                self.shared.tell(|| WatcherEvent::Compacted);
                self.follow.compacted(self.runner.now(), fastrand::f64())
            }
            error => {
                let why = explain(&error);
                tracing::warn!(error = %why, "lost the source, trying again");
                self.shared.tell(|| WatcherEvent::Lost(why.clone()));
                let mut status = self.shared.status.lock();
                status.lost += 1;
                status.last_error = Some(why);
                self.follow.lost(self.runner.now(), fastrand::f64())
            }
        }
    }

    fn listed(&mut self, revision: Revision) {
        // What the list brings waits for the comparison with reality.
        self.rebuild = Rebuild::NotYet;
        let listing = std::mem::take(&mut self.listing);
        let another = std::mem::take(&mut self.another) || self.anew;
        let (applied, ids) = {
            let mut table = self.shared.table.write();
            (table.replace(&listing, revision, another), table.len())
        };
        self.shared.status.lock().lists += 1;
        self.shared.tell(|| WatcherEvent::Listed { revision, ids });
        self.take_in(applied);
        if std::mem::take(&mut self.anew) {
            self.resync_now();
        }
        self.came_to(revision);
    }

    fn apply(&mut self, changes: &Changes) {
        let applied: Vec<_> = {
            let mut table = self.shared.table.write();
            table.revision = changes.revision;
            let all = changes.changes.iter();
            all.map(|c| table.apply(&c.key, c.value.as_deref(), c.revision)).collect()
        };
        self.take_in(applied);
        self.came_to(changes.revision);
    }

    /// Schedules what changed and counts what was wrong.
    fn take_in(&mut self, outcomes: Vec<Applied>) {
        let now = self.runner.now();
        for applied in outcomes {
            match applied {
                Applied::Nothing => {}
                Applied::Changed(slot) => {
                    let tries = self.tries(slot);
                    let was_failing = tries.failures() > 0;
                    let at = tries.changed(now);
                    if was_failing {
                        self.shared.table.write().changed(slot, at);
                    }
                    self.offer(slot, at);
                }
                Applied::Malformed(key) => {
                    tracing::warn!(key = %key.escape_ascii(), "not a key of the form prefix, id, slash, key type");
                    self.shared.status.lock().malformed += 1;
                    self.shared.tell(|| WatcherEvent::Malformed(key));
                }
                Applied::Unreadable(what) => {
                    let (id, kind, error) = (what.id, what.kind, what.error);
                    tracing::warn!(%id, key_type = %kind, %error, "cannot read a value, the last good one stands");
                    self.shared.status.lock().unreadable += 1;
                    self.shared.tell(|| WatcherEvent::Unreadable(id, kind, error));
                }
            }
        }
    }

    fn came_to(&mut self, revision: Revision) {
        self.shared.progress.send_if_modified(|progress| {
            std::mem::replace(&mut progress.revision, revision) != revision
        });
    }

    fn tries(&mut self, slot: Slot) -> &mut Tries {
        let index = slot.0 as usize;
        if index >= self.tries.len() {
            self.tries.resize(index + 1, Tries::default());
        }
        &mut self.tries[index]
    }

    fn offer(&mut self, slot: Slot, at: Moment) {
        if self.runner.offer(slot, at) {
            self.tell_run(slot, || RunEvent::Due(at));
        }
    }

    fn tell_run(&self, slot: Slot, event: impl FnOnce() -> RunEvent) {
        if self.shared.events.receiver_count() > 0
            && let Some(id) = self.shared.table.read().id(slot).cloned()
        {
            self.shared.tell(|| WatcherEvent::Run(id, event()));
        }
    }

    fn start_due(&mut self) {
        let Self { runner, shared, reconcile, tries, .. } = self;
        let work = |slot: Slot| {
            let (id, state) = shared.table.read().wanted(slot)?;
            shared.tell(|| {
                let failures = tries.get(slot.0 as usize).map_or(0, Tries::failures);
                WatcherEvent::Run(id.clone(), RunEvent::Started { failures })
            });
            let reconcile = Arc::clone(reconcile);
            Some(async move {
                let done = reconcile.reconcile(&id, state.as_deref()).await;
                done.map_err(|error| Failure::Error(explain(error.as_ref())))
            })
        };
        runner.start_due(work, |_| 1);
    }

    fn ended(&mut self, run: Ended<Next>) {
        let Ended { slot, took, outcome, again } = run;
        let now = self.runner.now();
        match outcome {
            Outcome::Done(next) => {
                self.tries(slot).succeeded();
                self.shared.status.lock().done += 1;
                let after = match next {
                    Next::Done => None,
                    Next::After(delay) => Some(delay),
                };
                self.tell_run(slot, || RunEvent::Done { took, again: after });
                if let Some(delay) = after {
                    self.offer(slot, now + delay);
                }
                let again = again.is_some() || after.is_some();
                self.shared.table.write().succeeded(slot, again);
            }
            Outcome::Failed(why) => {
                let (backoff, chance) = (self.backoff, fastrand::f64());
                let tries = self.tries(slot);
                let at = tries.failed(now, &backoff, chance);
                let failures = tries.failures();
                self.runner.reschedule(slot, at);
                self.shared.status.lock().failed += 1;
                self.shared.table.write().failed(slot, failures, why.to_string(), at);
                self.tell_run(slot, || RunEvent::Failed { took, why, again: at });
            }
            Outcome::Cancelled => self.tell_run(slot, || RunEvent::Cancelled),
        }
    }

    fn start_rebuild(&mut self) {
        if self.rebuild != Rebuild::Due || self.runner.running() > 0 || !self.rebuilding.is_empty()
        {
            return;
        }
        self.rebuild = Rebuild::Running;
        let wanted = self.shared.table.read().all();
        let reconcile = Arc::clone(&self.reconcile);
        self.rebuilding.spawn(async move { reconcile.rebuild(&wanted).await });
    }

    fn rebuilt(&mut self, rebuilt: Result<(), BoxError>) {
        // Another reconnect meanwhile asks for another one.
        let is_last = self.rebuild == Rebuild::Running;
        match rebuilt {
            Ok(()) if is_last => {
                self.rebuild = Rebuild::Done;
                self.shared.status.lock().last_error = None;
                self.resync_at =
                    self.resync_at.or(self.resync.map(|period| Instant::now() + period));
                self.shared.tell(|| WatcherEvent::Rebuilt);
                self.shared.progress.send_if_modified(|p| !std::mem::replace(&mut p.ready, true));
            }
            Ok(()) => {}
            Err(error) => {
                let why = explain(error.as_ref());
                tracing::warn!(error = %why, "cannot compare what is wanted with what runs, trying again");
                let at =
                    self.rebuild_tries.failed(self.runner.now(), &self.backoff, fastrand::f64());
                if is_last {
                    self.rebuild = Rebuild::Again(at);
                }
                self.shared.status.lock().last_error = Some(format!("rebuilding failed: {why}"));
            }
        }
    }

    /// Whether the step towards the source is another one now.
    fn obey(&mut self, command: &Command) -> bool {
        match command {
            Command::Resync => {
                self.resync_now();
                false
            }
            Command::Restart => {
                self.anew = true;
                self.listing.clear();
                self.follow.restart();
                true
            }
        }
    }

    fn resync_now(&mut self) {
        let (now, slots) = (self.runner.now(), self.shared.table.read().slots());
        for slot in slots {
            let at = self.tries(slot).earliest(now);
            self.offer(slot, at);
        }
    }

    fn resync_spread(&mut self) {
        let Some(period) = self.resync else { return };
        self.resync_at = Some(Instant::now() + period);
        let (now, slots) = (self.runner.now(), self.shared.table.read().slots());
        let step = period / u32::try_from(slots.len().max(1)).unwrap_or(u32::MAX);
        for (i, slot) in (0..).zip(slots) {
            let at = self.tries(slot).earliest(now + step * i);
            self.offer(slot, at);
        }
    }

    fn report(&self) {
        let phase = match self.follow.step() {
            Step::List(..) => Phase::Listing,
            Step::Open(_) => Phase::Opening,
            Step::Wait(_) => Phase::Waiting,
            Step::Read if self.rebuild == Rebuild::Done => Phase::Following,
            Step::Read => Phase::Rebuilding,
        };
        let mut status = self.shared.status.lock();
        status.phase = phase;
        (status.running, status.waiting) = (self.runner.running(), self.runner.waiting());
    }
}
