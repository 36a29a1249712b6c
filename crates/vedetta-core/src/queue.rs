//! Work that is handed out, and how it is given back.

use std::error::Error;
use std::future::Future;
use std::time::Duration;

use crate::{Failure, RunEvent};

/// Something that says what to do: each item is handed out under a lease, and comes back unless it is
/// settled before the lease lapses.
pub trait Queue: Send + Sync + 'static {
    /// What was handed out, and the proof that it is ours: a token that nobody else has.
    type Claim: Clone + Send + Sync + 'static;
    /// What is to be worked on.
    type Item: Send + 'static;
    /// What came of it.
    type Outcome: Send + Sync + 'static;

    /// Takes what is due, as long as what it took costs less than `room`: the last may cost more than is
    /// left of it. Answers at once, also when there is nothing.
    fn take(
        &self,
        room: u32,
    ) -> impl Future<Output = Result<Taken<Self::Claim, Self::Item>, QueueError>> + Send;

    /// Prolongs the leases of what is still in work. What it says of each is in the order of `held`.
    fn keep(
        &self,
        held: &[&Self::Claim],
    ) -> impl Future<Output = Result<Vec<Kept>, QueueError>> + Send;

    /// Takes note of how work ended; durable when it returns. What it says of each is in the order of
    /// `ended`. Said again after an error it does no harm.
    fn settle(
        &self,
        ended: &[(Self::Claim, End<Self::Outcome>)],
    ) -> impl Future<Output = Result<Vec<Settled>, QueueError>> + Send;

    /// Returns when there may be more to take than the last [`Self::take`] found, or leases should be
    /// looked at. What happens between two calls is not lost.
    fn woken(&self) -> impl Future<Output = Woken> + Send;

    /// How often it failed before.
    fn failures(&self, _claim: &Self::Claim) -> u32 {
        0
    }

    /// Hears what happens to what was handed out. Whoever works the queue waits for this: it has to be quick.
    fn told(&self, _claim: &Self::Claim, _event: RunEvent) {}
}

/// What somebody who works a queue is woken for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Woken {
    /// There may be more to take.
    More,
    /// Something that was handed out may have been called off, or there is something to tell of it:
    /// [keep](Queue::keep) at once.
    Look,
}

/// What [`Queue::take`] found.
#[derive(Debug)]
pub struct Taken<C, I> {
    /// What was handed out.
    pub items: Vec<Handed<C, I>>,
    /// There is nothing more for so long, as far as is known; nothing said: there may be more at once.
    pub rest: Option<Duration>,
}

/// A piece of work under a lease.
#[derive(Debug)]
pub struct Handed<C, I> {
    /// The proof.
    pub claim: C,
    /// The work.
    pub item: I,
    /// How many slots it takes. None: what it is made of takes them, one after the other or side by side.
    pub cost: u32,
}

/// How work ended.
#[derive(Debug, Clone)]
pub enum End<T> {
    /// With this.
    Done(T),
    /// It failed.
    Failed(Failure),
    /// It was not begun, or was interrupted through no fault of its own: somebody may take it at once.
    Released,
}

/// What became of a lease that was to be prolonged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// Still ours, and prolonged.
    Ours,
    /// It is not known, and not prolonged: ask again before it may have lapsed.
    Unknown,
    /// It has lapsed: what is done for it no longer counts, and others may do it by now.
    Lost,
}

/// What a queue made of an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// It is done and gone.
    Gone,
    /// It will be handed out again, after so long.
    Again(Duration),
    /// It was set aside with its error, until somebody asks for it.
    Parked,
    /// The lease had lapsed: nothing was stored.
    Stale,
}

/// Why a queue did not answer. Wait, then ask again; nothing is lost.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct QueueError {
    what: String,
    #[source]
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl QueueError {
    /// It could not do this, for that reason.
    pub fn new(
        what: impl Into<String>,
        source: impl Into<Option<Box<dyn Error + Send + Sync>>>,
    ) -> Self {
        Self { what: what.into(), source: source.into() }
    }
}

/// Does the work of one kind of item.
pub trait Handler<I>: Send + Sync + 'static {
    /// What comes of it.
    type Outcome: Send + Sync + 'static;

    /// Works on it. Dropped when its time is up, its lease is lost or it is cancelled.
    fn handle(
        &self,
        item: I,
    ) -> impl Future<Output = Result<Self::Outcome, Failure>> + Send + 'static;
}

/// What a worker can be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Finish what runs, and take nothing until told to resume.
    Pause,
    /// Go on.
    Resume,
    /// Finish what runs, and end.
    Stop,
}
