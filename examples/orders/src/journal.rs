//! Notes what is taken, run and settled, a line each, for who wants to see what was repeated.
//!
//! ```text
//! {process} asks {time}                                  for records, after all its times before
//! {process} {stage} {id} taken {token} {time}            one was handed to it when it asked that time
//! {process} {stage} {id} {version} begin | end | failed  a stage runs
//! {process} {stage} {id} settled {token} {outcome}       what became of the record
//! ```

use std::collections::HashMap;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use vedetta::core::queue::{Kept, Settled};
use vedetta::runtime::Ear;
use vedetta::stage::{
    Answer, Backend, BoxError, Claim, Claimed, Ending, Fate, Lane, LaneCounts, Limits, Page,
    Records, SYSTEM, Saved, Stage, StageError, Tally, Unsettled, Visit, Which,
};

use crate::order::Order;

/// A file that several processes may write to.
#[derive(Clone)]
pub(crate) struct Journal(Option<Arc<Notes>>);

struct Notes {
    file: File,
    asked: AtomicU64,
    /// Which stage's.
    lanes: Mutex<HashMap<Lane, String>>,
}

impl Journal {
    pub(crate) fn open(path: Option<&Path>) -> std::io::Result<Self> {
        let Some(path) = path else { return Ok(Self(None)) };
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let (asked, lanes) = (AtomicU64::default(), Mutex::default());
        Ok(Self(Some(Arc::new(Notes { file, asked, lanes }))))
    }

    /// A stage whose runs are noted.
    pub(crate) fn of<S>(&self, stage: S) -> Noted<S> {
        Noted { inner: stage, journal: self.clone() }
    }

    /// Orders whose records are noted.
    pub(crate) fn of_records<B: Backend<Order>>(&self, orders: B) -> NotedOrders<B> {
        let records = Noted { inner: orders.records().clone(), journal: self.clone() };
        NotedOrders { orders, records }
    }

    fn note(&self, what: fmt::Arguments<'_>) -> std::io::Result<()> {
        let Some(notes) = &self.0 else { return Ok(()) };
        (&notes.file).write_all(format!("{} {what}\n", std::process::id()).as_bytes())
    }

    /// About to ask for records: for the how many-th time.
    fn asks(&self) -> Result<u64, StageError> {
        let time = self.0.as_ref().map_or(0, |notes| notes.asked.fetch_add(1, Ordering::Relaxed));
        self.note(format_args!("asks {time}")).map_err(unwritten)?;
        Ok(time)
    }

    fn note_record(
        &self,
        lane: Lane,
        id: &str,
        what: fmt::Arguments<'_>,
    ) -> Result<(), StageError> {
        let stage = self.0.as_ref().and_then(|notes| notes.lanes.lock().get(&lane).cloned());
        // What the system stage does may be repeated as often as it likes: it does nothing to an order.
        match stage.filter(|stage| stage != SYSTEM) {
            Some(stage) => self.note(format_args!("{stage} {id} {what}")).map_err(unwritten),
            None => Ok(()),
        }
    }

    fn taken(&self, lane: Lane, id: &str, token: i64, time: u64) -> Result<(), StageError> {
        self.note_record(lane, id, format_args!("taken {token} {time}"))
    }

    fn settled(&self, lane: Lane, claim: &Claim, outcome: &str) -> Result<(), StageError> {
        self.note_record(lane, &claim.id, format_args!("settled {} {outcome}", claim.token))
    }
}

fn unwritten(error: std::io::Error) -> StageError {
    StageError::Failed(Box::new(error))
}

fn outcome(fate: &Fate, settled: Settled) -> &'static str {
    match (settled, fate) {
        (Settled::Stale, _) => "lost",
        (Settled::Again(_), Fate::Released) => "released",
        (Settled::Again(_), _) => "again",
        (Settled::Parked, _) => "parked",
        (Settled::Gone, _) => "gone",
    }
}

/// What does the same, and is noted.
#[derive(Clone)]
pub(crate) struct Noted<T> {
    inner: T,
    journal: Journal,
}

impl<S: Stage<Order>> Stage<Order> for Noted<S> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn should_process_now(&self, order: &Order) -> bool {
        self.inner.should_process_now(order)
    }

    async fn process(&self, order: Order) -> Result<Visit<Order>, BoxError> {
        let (name, id, version) = (self.inner.name(), order.id, order.version.0);
        self.journal.note(format_args!("{name} {id} {version} begin"))?;
        let visit = self.inner.process(order).await;
        let what = if visit.is_ok() { "end" } else { "failed" };
        self.journal.note(format_args!("{name} {id} {version} {what}"))?;
        visit
    }

    fn limits(&self) -> Limits {
        self.inner.limits()
    }
}

/// The orders, with [`Noted`] queues.
#[derive(Clone)]
pub(crate) struct NotedOrders<B: Backend<Order>> {
    orders: B,
    records: Noted<B::Records>,
}

impl<B: Backend<Order>> Backend<Order> for NotedOrders<B> {
    type Records = Noted<B::Records>;

    fn records(&self) -> &Self::Records {
        &self.records
    }

    fn name(&self) -> &str {
        self.orders.name()
    }

    fn shards(&self) -> u16 {
        self.orders.shards()
    }

    async fn load(&self, ids: Vec<i64>) -> Result<Vec<Order>, StageError> {
        self.orders.load(ids).await
    }

    async fn settle(&self, lane: Lane, endings: Vec<Ending<Order>>) -> Result<Answer, StageError> {
        let journal = &self.records.journal;
        // What goes from here to a stage may be taken for it at once.
        let time = journal.asks()?;
        let ends: Vec<_> = endings
            .iter()
            .map(|ending| (ending.claim.clone(), ending.fate.clone(), ending.visits.clone()))
            .collect();
        let answer = self.orders.settle(lane, endings).await?;
        for ((claim, fate, visits), saved) in ends.iter().zip(&answer.saved) {
            match saved {
                Ok(Saved::Settled(settled)) => {
                    journal.settled(lane, claim, outcome(fate, *settled))?;
                }
                Ok(Saved::Conflict) => journal.settled(lane, claim, "conflict")?,
                // It will be settled as a failure, or tried again.
                Err(Unsettled::Refused(_) | Unsettled::Lost(_)) => {}
            }
            for going in visits {
                let held = going.hold.filter(|(token, _)| answer.held.contains(token));
                if let Some((token, _)) = held {
                    journal.taken(going.lane, &claim.id, token, time)?;
                }
            }
        }
        Ok(answer)
    }
}

impl<R: Records> Records for Noted<R> {
    async fn lane(&self, entity: &str, stage: &str) -> Result<Lane, StageError> {
        let lane = self.inner.lane(entity, stage).await?;
        if let Some(notes) = &self.journal.0 {
            notes.lanes.lock().insert(lane, stage.to_owned());
        }
        Ok(lane)
    }

    async fn claim(
        &self,
        lane: Lane,
        shards: &[u16],
        room: u32,
        lease: Duration,
    ) -> Result<Claimed, StageError> {
        let time = self.journal.asks()?;
        let claimed = self.inner.claim(lane, shards, room, lease).await?;
        for claim in &claimed.claims {
            self.journal.taken(lane, &claim.id, claim.token, time)?;
        }
        Ok(claimed)
    }

    async fn settle(&self, lane: Lane, ends: &[(Claim, Fate)]) -> Result<Vec<Settled>, StageError> {
        let settled = self.inner.settle(lane, ends).await?;
        for ((claim, fate), settled) in ends.iter().zip(&settled) {
            self.journal.settled(lane, claim, outcome(fate, *settled))?;
        }
        Ok(settled)
    }

    async fn enqueue(
        &self,
        lane: Lane,
        visits: &[(&str, u16, Duration)],
    ) -> Result<(), StageError> {
        self.inner.enqueue(lane, visits).await
    }

    async fn keep(
        &self,
        lane: Lane,
        held: &[&Claim],
        lease: Duration,
    ) -> Result<Vec<Kept>, StageError> {
        self.inner.keep(lane, held, lease).await
    }

    async fn counts(&self) -> Result<Vec<LaneCounts>, StageError> {
        self.inner.counts().await
    }

    async fn list(&self, entity: &str, which: &Which, limit: u32) -> Result<Page, StageError> {
        self.inner.list(entity, which, limit).await
    }

    async fn retry(&self, entity: &str, stage: &str, id: &str) -> Result<bool, StageError> {
        self.inner.retry(entity, stage, id).await
    }

    async fn reshard(&self, lane: Lane, count: u16) -> Result<(), StageError> {
        self.inner.reshard(lane, count).await
    }

    async fn note(&self, lane: Lane, tally: Tally) -> Result<(), StageError> {
        self.inner.note(lane, tally).await
    }

    async fn woken(&self, lane: Lane, ear: &Ear) {
        self.inner.woken(lane, ear).await;
    }
}
