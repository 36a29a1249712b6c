//! Between the system stage and the other stages of one process: what is wanted soon by a stage that has
//! room goes there directly, already held and read, instead of waiting in its queue to be claimed.
//!
//! ```text
//! reserve ──► hand ──due──► take ──fresh──► work
//!               │             └───old────► given back
//!               └───close───► given back
//! ```

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::alarm::Alarm;
use crate::record::Claim;

/// Where a stage takes what was handed to it.
pub(crate) struct Desk<E> {
    state: Mutex<State<E>>,
    /// Rings when there is something to take.
    alarm: Arc<Alarm>,
}

struct State<E> {
    /// For so many more there is room, as far as is known.
    room: u32,
    is_closed: bool,
    /// What is due first comes first.
    handed: VecDeque<Handing<E>>,
}

/// An entity for a stage, whose record is held.
#[derive(Debug)]
pub(crate) struct Handing<E> {
    pub(crate) claim: Claim,
    pub(crate) entity: E,
    /// It is held since then, or a little later.
    pub(crate) since: Instant,
    /// It is not to be begun before.
    pub(crate) due: Instant,
}

/// What [`Desk::take`] found.
#[derive(Debug)]
pub(crate) struct OnDesk<E> {
    /// To work on.
    pub(crate) due: Vec<Handing<E>>,
    /// To be given back.
    pub(crate) old: Vec<Claim>,
    /// So many are left.
    pub(crate) left: u32,
    /// The first of them is due then.
    pub(crate) next: Option<Instant>,
}

impl<E> Default for Desk<E> {
    fn default() -> Self {
        let state = State { room: 0, is_closed: false, handed: VecDeque::new() };
        Self { state: Mutex::new(state), alarm: Arc::default() }
    }
}

impl<E> Desk<E> {
    /// Rings when something that was handed over is due.
    pub(crate) fn alarm(&self) -> Arc<Alarm> {
        Arc::clone(&self.alarm)
    }

    /// Nothing is due in its queue, and there is room for so many. What lies here has its place in it.
    pub(crate) fn has_room(&self, room: u32) {
        let mut state = self.state.lock();
        state.room = room.saturating_sub(count(state.handed.len()));
    }

    /// Makes room for one, if there is some.
    pub(crate) fn reserve(&self) -> bool {
        let mut state = self.state.lock();
        let room = if state.is_closed { None } else { state.room.checked_sub(1) };
        room.inspect(|left| state.room = *left).is_some()
    }

    /// Hands one over, unless nobody takes any more.
    pub(crate) fn hand(&self, handing: Handing<E>) -> Result<(), Claim> {
        let mut state = self.state.lock();
        if state.is_closed {
            return Err(handing.claim);
        }
        let due = handing.due;
        let place = state.handed.partition_point(|other| other.due <= due);
        state.handed.insert(place, handing);
        drop(state);
        self.alarm.no_later_than(due);
        Ok(())
    }

    /// What was handed over and is due, up to `room`: to work on if it is held for no longer than `fresh`.
    pub(crate) fn take(&self, now: Instant, room: u32, fresh: Duration) -> OnDesk<E> {
        let mut state = self.state.lock();
        let due = state.handed.partition_point(|handing| handing.due <= now).min(room as usize);
        let taken = state.handed.drain(..due);
        let (due, old): (Vec<_>, Vec<_>) =
            taken.partition(|handing| now.saturating_duration_since(handing.since) <= fresh);
        let (left, next) = (count(state.handed.len()), state.handed.front().map(|next| next.due));
        drop(state);
        if let Some(next) = next {
            self.alarm.no_later_than(next);
        }
        OnDesk { due, old: old.into_iter().map(|handing| handing.claim).collect(), left, next }
    }

    /// Nothing more is taken: what is left.
    pub(crate) fn close(&self) -> Vec<Claim> {
        let mut state = self.state.lock();
        state.is_closed = true;
        state.handed.drain(..).map(|handing| handing.claim).collect()
    }
}

fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const FRESH: Duration = Duration::from_millis(100);

    /// Handed over at the start, and due after so many milliseconds.
    fn desk(start: Instant, dues: &[(&'static str, u32)]) -> Desk<&'static str> {
        let desk = Desk::default();
        for (id, after) in dues {
            assert_eq!(hand(&desk, id, start, start + *after * MS), Ok(()));
        }
        desk
    }

    fn hand(
        desk: &Desk<&'static str>,
        entity: &'static str,
        since: Instant,
        due: Instant,
    ) -> Result<(), Claim> {
        let claim = Claim { id: entity.into(), token: 1, failures: 0 };
        desk.hand(Handing { claim, entity, since, due })
    }

    fn entities(handed: &[Handing<&'static str>]) -> Vec<&'static str> {
        handed.iter().map(|handing| handing.entity).collect()
    }

    fn ids(claims: &[Claim]) -> Vec<&str> {
        claims.iter().map(|claim| &*claim.id).collect()
    }

    #[tokio::test]
    async fn what_is_handed_over_is_taken_when_it_is_due_and_given_back_when_it_is_old() {
        let start = Instant::now();
        let desk = desk(start, &[("late", 50), ("now", 0), ("soon", 1), ("second", 1)]);
        for (at, room, due, old, left, next) in [
            (0, 9, vec!["now"], vec![], 3, Some(1)),
            (0, 9, vec![], vec![], 3, Some(1)),
            (2, 1, vec!["soon"], vec![], 2, Some(1)), // there was room for no more
            (49, 9, vec!["second"], vec![], 1, Some(50)),
            (101, 9, vec![], vec!["late"], 0, None), // nobody took it for too long
            (200, 9, vec![], vec![], 0, None),
        ] {
            let found = desk.take(start + at * MS, room, FRESH);
            assert_eq!((entities(&found.due), ids(&found.old)), (due, old), "at {at}");
            assert_eq!((found.left, found.next), (left, next.map(|at| start + at * MS)), "at {at}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_is_woken_when_the_first_is_due_and_again_for_the_next() {
        let start = Instant::now();
        let desk = desk(start, &[("later", 60), ("soon", 20)]);
        let alarm = desk.alarm();
        for (at, entity) in [(20, "soon"), (60, "later")] {
            testing::soon("it rings", alarm.rung()).await;
            assert!(Instant::now() >= start + at * MS);
            assert_eq!(entities(&desk.take(Instant::now(), 9, FRESH).due), [entity]);
        }
        assert!(alarm.rung().now_or_never().is_none(), "nothing is left");
        hand(&desk, "at once", start, start).unwrap();
        alarm.rung().now_or_never().expect("it is due already");
    }

    #[tokio::test(start_paused = true)]
    async fn what_there_was_no_room_for_wakes_as_well() {
        let start = Instant::now();
        let desk = desk(start, &[("first", 0), ("second", 0)]);
        for entity in ["first", "second"] {
            desk.alarm().rung().now_or_never().expect("something is due");
            assert_eq!(entities(&desk.take(start, 1, FRESH).due), [entity]);
        }
    }

    #[tokio::test]
    async fn what_is_not_due_yet_has_its_place_in_the_room() {
        let start = Instant::now();
        let desk = desk(start, &[("first", 5), ("second", 6)]);
        assert!(!desk.reserve(), "nobody said that there is room");
        desk.has_room(3);
        assert_eq!([desk.reserve(), desk.reserve()], [true, false]);
        desk.take(start + 5 * MS, 9, FRESH);
        desk.has_room(3);
        assert_eq!([desk.reserve(), desk.reserve(), desk.reserve()], [true, true, false]);
    }

    #[tokio::test]
    async fn a_desk_that_closes_gives_everything_back_and_takes_no_more() {
        let start = Instant::now();
        let desk = desk(start, &[("late", 50), ("now", 0)]);
        desk.has_room(9);
        assert_eq!(ids(&desk.close()), ["now", "late"]);
        assert!(!desk.reserve());
        assert_eq!(&*hand(&desk, "new", start, start).unwrap_err().id, "new");
        assert_eq!(desk.take(start + 60 * MS, 9, FRESH).left, 0);
    }
}
