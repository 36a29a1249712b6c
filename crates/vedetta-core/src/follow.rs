//! Keeps up with a [`Source`](crate::Source): what to ask next, whatever happened.
//!
//! ```text
//!            ┌───────────────── compacted, another source, restart ──────────────────┐
//!            ▼                                                                       │
//!  ┌──► Listing ──last page──► Opening ──opened──► CatchingUp ──read──► Following ───┤
//!  │      │  ▲                   │  ▲                  │                   │         │
//!  │      │  └── compacted: from the first page         │                   │         │
//!  │     lost                  lost └──────┐           lost                lost      │
//!  │      ▼                     ▼          │            │                   │        │
//!  └─── Waiting ◄────────── Waiting ───────┘◄───────────┴───────────────────┘        │
//!            └───────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! A line that drops is opened again from the revision after the last one seen, so nothing is missed and
//! nothing comes twice; only when that history is gone, all is listed anew, and whoever holds the old
//! list finds what was deleted meanwhile by comparing. Either way it is said when everything is known that was
//! there when the feed was opened: who compares with reality before that takes what is new for an orphan.

use crate::{Backoff, KeyRange, Moment, Revision};

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// List this range, as of that revision.
    List(KeyRange, Option<Revision>),
    /// Open a feed from this revision on.
    Open(Revision),
    /// Read the open feed.
    Read,
    /// Wait, and then [`Follow::waited`].
    Wait(Moment),
}

/// What the last step led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Turn {
    /// Nothing to tell.
    Going,
    /// The list is whole, and true at this revision.
    Listed(Revision),
    /// The feed is open, and brings what was missed.
    CatchingUp,
    /// Everything is known that was there when the feed was opened.
    Open,
    /// What was listed so far is worthless: it starts again.
    Again,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    Listing { rest: KeyRange, at: Option<Revision> },
    Opening,
    CatchingUp { to: Revision },
    Following,
    Waiting { until: Moment, listed: bool },
}

/// Where we stand with a source.
#[derive(Debug, Clone)]
pub struct Follow {
    range: KeyRange,
    backoff: Backoff,
    phase: Phase,
    /// Everything up to here was seen.
    seen: Revision,
    failures: u32,
    /// It was listed anew and nothing was read since.
    relisted: bool,
}

impl Follow {
    /// Nothing is known of `range` yet.
    pub fn new(range: KeyRange, backoff: Backoff) -> Self {
        let phase = Phase::Listing { rest: range.clone(), at: None };
        Self { range, backoff, phase, seen: Revision::default(), failures: 0, relisted: false }
    }

    /// What to do next.
    pub fn step(&self) -> Step {
        match &self.phase {
            Phase::Listing { rest, at } => Step::List(rest.clone(), *at),
            Phase::Opening => Step::Open(self.seen.next()),
            Phase::CatchingUp { .. } | Phase::Following => Step::Read,
            Phase::Waiting { until, .. } => Step::Wait(*until),
        }
    }

    /// A page was listed; `last` is its last key if there is more after it.
    pub fn page(&mut self, revision: Revision, last: Option<&[u8]>) -> Turn {
        let Phase::Listing { rest, at } = &mut self.phase else { return Turn::Going };
        let at = *at.get_or_insert(revision);
        if let Some(last) = last {
            *rest = rest.after(last);
            return Turn::Going;
        }
        self.seen = at;
        self.phase = Phase::Opening;
        Turn::Listed(at)
    }

    /// The feed opened `now`, on a source that stands at `revision`, and it [owes](crate::Feed::owed) us so much.
    pub fn opened(&mut self, revision: Revision, owed: Revision, now: Moment, chance: f64) -> Turn {
        if revision < self.seen {
            return self.compacted(now, chance); // it is not the source it was
        }
        self.failures = 0;
        self.phase = Phase::CatchingUp { to: owed };
        match self.catch_up() {
            Turn::Going => Turn::CatchingUp,
            turn => turn,
        }
    }

    /// The feed has come to `revision`.
    pub fn read(&mut self, revision: Revision) -> Turn {
        self.relisted = false;
        self.seen = self.seen.max(revision);
        self.catch_up()
    }

    fn catch_up(&mut self) -> Turn {
        match self.phase {
            Phase::CatchingUp { to } if to <= self.seen => {
                self.phase = Phase::Following;
                Turn::Open
            }
            _ => Turn::Going,
        }
    }

    /// The history we need is gone: lists everything anew, at once; but a source that only ever says so is
    /// given the time of one that drops the line.
    pub fn compacted(&mut self, now: Moment, chance: f64) -> Turn {
        self.phase = self.first();
        if std::mem::replace(&mut self.relisted, true) {
            return self.lost(now, chance);
        }
        Turn::Again
    }

    /// The line dropped `now`.
    pub fn lost(&mut self, now: Moment, chance: f64) -> Turn {
        let listed = !matches!(self.phase, Phase::Listing { .. });
        let until = now + self.backoff.delay(self.failures, chance);
        self.failures = self.failures.saturating_add(1);
        self.phase = Phase::Waiting { until, listed };
        if listed { Turn::Going } else { Turn::Again }
    }

    /// The wait is over.
    pub fn waited(&mut self) {
        if let Phase::Waiting { listed, .. } = self.phase {
            self.phase = if listed { Phase::Opening } else { self.first() };
        }
    }

    /// Lists everything anew.
    pub fn restart(&mut self) -> Turn {
        self.phase = self.first();
        Turn::Again
    }

    /// Everything up to here was seen.
    pub fn seen(&self) -> Revision {
        self.seen
    }

    fn first(&self) -> Phase {
        Phase::Listing { rest: self.range.clone(), at: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fresh() -> Follow {
        Follow::new(KeyRange::prefix("/r/"), Backoff::default())
    }

    fn followed() -> Follow {
        let mut follow = fresh();
        assert_eq!(follow.page(Revision(7), None), Turn::Listed(Revision(7)));
        assert_eq!(follow.step(), Step::Open(Revision(8)));
        assert_eq!(follow.opened(Revision(9), Revision(7), Moment::ZERO, 0.0), Turn::Open);
        assert_eq!(follow.step(), Step::Read);
        follow
    }

    #[test]
    fn all_pages_of_a_list_are_of_one_revision() {
        let mut follow = fresh();
        assert_eq!(follow.step(), Step::List(KeyRange::prefix("/r/"), None));
        assert_eq!(follow.page(Revision(7), Some(b"/r/c")), Turn::Going);
        let rest = KeyRange::prefix("/r/").after(b"/r/c");
        assert!(!rest.contains(b"/r/c") && rest.contains(b"/r/c\0") && !rest.contains(b"/s"));
        assert_eq!(follow.step(), Step::List(rest, Some(Revision(7))));
        // The second page is read when the store has gone on; the list is still of revision 7.
        assert_eq!(follow.page(Revision(9), None), Turn::Listed(Revision(7)));
        assert_eq!(follow.step(), Step::Open(Revision(8)));
    }

    #[test]
    fn a_list_compacted_under_way_starts_again_at_a_new_revision() {
        let mut follow = fresh();
        follow.page(Revision(7), Some(b"/r/c"));
        assert_eq!(follow.compacted(Moment::ZERO, 0.0), Turn::Again);
        assert_eq!(follow.step(), Step::List(KeyRange::prefix("/r/"), None));
    }

    #[test]
    fn a_lost_feed_goes_on_after_the_last_revision_seen() {
        let mut follow = followed();
        follow.read(Revision(12));
        let at = Moment::from_millis;
        for (now, until) in [(1_000, 1_100), (2_000, 2_200), (3_000, 3_400)] {
            assert_eq!(follow.lost(at(now), 0.0), Turn::Going);
            assert_eq!(follow.step(), Step::Wait(at(until)));
            follow.waited();
            assert_eq!(follow.step(), Step::Open(Revision(13)));
        }
        assert_eq!(follow.opened(Revision(12), Revision(12), Moment::ZERO, 0.0), Turn::Open);
        follow.lost(at(9_000), 0.0);
        assert_eq!(follow.step(), Step::Wait(at(9_100)), "an open feed begins the waits anew");
    }

    #[test]
    fn a_feed_that_owes_something_is_open_when_it_has_brought_that() {
        let mut follow = followed();
        follow.lost(Moment::ZERO, 0.0);
        follow.waited();
        let owed = Revision(12);
        assert_eq!(follow.opened(Revision(15), owed, Moment::ZERO, 0.0), Turn::CatchingUp);
        assert_eq!((follow.step(), follow.read(Revision(11))), (Step::Read, Turn::Going));
        // Dropped on the way, it owes the rest.
        follow.lost(Moment::ZERO, 0.0);
        follow.waited();
        assert_eq!(follow.step(), Step::Open(Revision(12)));
        assert_eq!(follow.opened(Revision(15), owed, Moment::ZERO, 0.0), Turn::CatchingUp);
        assert_eq!(follow.read(Revision(13)), Turn::Open);
        assert_eq!(follow.read(Revision(14)), Turn::Going, "once");
    }

    #[test]
    fn a_compacted_feed_and_a_source_that_went_back_list_again() {
        let mut follow = followed();
        assert_eq!(follow.compacted(Moment::ZERO, 0.0), Turn::Again);
        assert_eq!(follow.step(), Step::List(KeyRange::prefix("/r/"), None));

        let mut follow = followed();
        follow.read(Revision(12));
        follow.lost(Moment::ZERO, 0.0);
        follow.waited();
        assert_eq!(follow.opened(Revision(11), Revision(11), Moment::ZERO, 0.0), Turn::Again);
    }

    #[test]
    fn a_source_that_only_says_compacted_is_asked_again_after_a_wait() {
        let at = Moment::from_millis;
        let mut follow = followed();
        assert_eq!(follow.compacted(at(10), 0.0), Turn::Again);
        assert_eq!(follow.page(Revision(20), None), Turn::Listed(Revision(20)));
        follow.opened(Revision(20), Revision(20), at(20), 0.0);
        assert_eq!(follow.compacted(at(30), 0.0), Turn::Again);
        assert_eq!(follow.step(), Step::Wait(at(130)));
        follow.waited();
        assert_eq!(follow.step(), Step::List(KeyRange::prefix("/r/"), None));
        follow.page(Revision(20), None);
        follow.opened(Revision(20), Revision(20), at(140), 0.0);
        follow.read(Revision(21));
        follow.compacted(at(150), 0.0);
        assert_eq!(follow.step(), Step::List(KeyRange::prefix("/r/"), None), "once it went on");
    }

    #[test]
    fn a_list_that_fails_starts_from_its_first_page() {
        let mut follow = fresh();
        follow.page(Revision(7), Some(b"/r/c"));
        assert_eq!(follow.lost(Moment::ZERO, 0.0), Turn::Again);
        follow.waited();
        assert_eq!(follow.step(), Step::List(KeyRange::prefix("/r/"), None));
    }
}
