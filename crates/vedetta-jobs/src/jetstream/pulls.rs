//! Counts what the open pulls may still bring.
//!
//! ```text
//!  a pull is opened: as many as it asks for ──► coming ──► one less for each message that comes,
//!                                                          and what a pull did not get when it ends
//! ```
//!
//! A message does not say which pull brought it. The server deals to its pulls in turn, and says nothing of one that
//! got all it asked for. So they are counted together, and what comes is never more than those can bring of which no
//! end is known.
//!
//! All are answered at one inbox. Once it is not known what the server has of them, the inbox is left for
//! another: what is left of them finds nobody there, and is not counted here. Time is an argument.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::BUNCH;

/// So many are open at most. One that got all it asked for says nothing, and is counted until all of them have.
const MOST_OPEN: usize = 32;

/// An end may come so much later than it should.
const LATE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Pulls {
    /// Where they are answered, each under its number. None while one is left for another.
    inbox: Option<String>,
    /// How many there were,
    opened: u64,
    /// and how many of them while another was open.
    pub overlapping: u64,
    /// Those of which no end is known, the oldest first.
    open: VecDeque<Pull>,
    /// What they may still bring.
    coming: usize,
    /// The last ones brought all that they asked for: there may be more.
    pub was_full: bool,
    /// The server had less than they ask for, and refused one more.
    are_enough: bool,
    /// The server ends each after so long,
    life: Duration,
    /// and gives a sign of those that are open before that is over.
    silence: Duration,
    /// They are given up if there is no sign until then.
    dead_at: Instant,
}

#[derive(Debug)]
struct Pull {
    number: u64,
    batch: usize,
    /// It has ended by then, said or not.
    over_at: Instant,
}

/// A pull that was just opened.
pub(super) struct Opened {
    pub number: u64,
    /// For so many messages.
    pub batch: usize,
    /// Where it is answered.
    pub inbox: String,
}

/// What the server says of a pull that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// So many were not delivered.
    Without(usize),
    /// It was not begun, as those that are open ask for more than there is.
    Refused,
    /// There was no more, after some were delivered.
    NoMore,
}

impl Pulls {
    pub(super) fn new(inbox: String, life: Duration, silence: Duration) -> Self {
        Self {
            inbox: Some(inbox),
            opened: 0,
            overlapping: 0,
            open: VecDeque::new(),
            coming: 0,
            was_full: false,
            are_enough: false,
            life,
            silence,
            dead_at: Instant::now(),
        }
    }

    /// Opens one for as many as fit, at most so many. If any is open there is another for many only, and once no
    /// more than half of the last one is to come: so the server need not wait for us between them.
    pub(super) fn open(&mut self, fit: usize, most: usize, now: Instant) -> Option<Opened> {
        let inbox = self.inbox.as_ref()?;
        let fit = fit.saturating_sub(self.coming);
        self.are_enough &= self.is_any_open();
        if let Some(last) = self.open.back()
            && (self.are_enough
                || fit < BUNCH
                || self.coming > last.batch / 2
                || self.open.len() >= MOST_OPEN)
        {
            return None;
        }
        let batch = fit.clamp(1, most);
        self.opened += 1;
        self.overlapping += u64::from(self.is_any_open());
        self.was_full = false;
        self.coming += batch;
        self.dead_at = now + self.silence;
        let number = self.opened;
        self.open.push_back(Pull { number, batch, over_at: now + self.life + LATE });
        Some(Opened { number, batch, inbox: format!("{inbox}.{number}") })
    }

    /// The last one that is open.
    pub(super) fn newest(&self) -> Option<u64> {
        self.open.back().map(|pull| pull.number)
    }

    pub(super) fn is_open(&self, number: u64) -> bool {
        self.open.iter().any(|pull| pull.number == number)
    }

    /// The server refused the last one, as those of others ask for more than there is. Nobody says when that is over.
    pub(super) fn were_refused(&self) -> bool {
        self.are_enough && !self.is_any_open()
    }

    pub(super) fn is_any_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// A message has come.
    pub(super) fn came(&mut self, now: Instant) {
        if self.coming == 0 {
            return; // of those that are counted no more
        }
        self.coming -= 1;
        self.dead_at = now + self.silence;
        if self.coming == 0 {
            self.open.clear();
            self.was_full = true;
            self.are_enough = false;
        }
    }

    /// One says that it is still open.
    pub(super) fn lives(&mut self, number: u64, now: Instant) {
        if self.is_open(number) {
            self.dead_at = now + self.silence;
        }
    }

    pub(super) fn ended(&mut self, number: u64, end: End) {
        let Some(at) = self.open.iter().position(|pull| pull.number == number) else { return };
        let Some(pull) = self.open.remove(at) else { return };
        let less = match end {
            End::Without(undelivered) => undelivered.min(pull.batch),
            End::Refused => pull.batch,
            // Then the others have ended too, or have brought nothing yet.
            End::NoMore => 0,
        };
        self.are_enough = end == End::Refused || self.are_enough && self.is_any_open();
        self.coming = self.coming.saturating_sub(less);
        self.bring_no_more();
    }

    /// Forgets those that have ended by now. Whether anything changed.
    pub(super) fn lapse(&mut self, now: Instant) -> bool {
        if self.open.is_empty() {
            return false;
        }
        if now >= self.dead_at {
            self.leave();
            return true;
        }
        let before = self.open.len();
        self.open.retain(|pull| now < pull.over_at);
        self.bring_no_more();
        self.open.len() < before
    }

    /// Those that are open bring no more than they were opened for.
    fn bring_no_more(&mut self) {
        self.coming = self.coming.min(self.open.iter().map(|pull| pull.batch).sum());
        if self.coming == 0 {
            self.open.clear();
        }
    }

    /// What the server has of them is not known: they count no more, and there are none until there is another inbox.
    pub(super) fn leave(&mut self) {
        self.open.clear();
        self.coming = 0;
        self.inbox = None;
    }

    pub(super) fn have_left(&self) -> bool {
        self.inbox.is_none()
    }

    /// They are answered there from now on.
    pub(super) fn move_to(&mut self, inbox: String) {
        self.inbox = Some(inbox);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIFE: Duration = Duration::from_secs(60);
    const SILENCE: Duration = Duration::from_secs(11);

    fn pulls() -> Pulls {
        Pulls::new("inbox".to_owned(), LIFE, SILENCE)
    }

    fn open(pulls: &mut Pulls, fit: usize) -> Option<(u64, usize)> {
        pulls.open(fit, 1_000, Instant::now()).map(|opened| (opened.number, opened.batch))
    }

    fn come(pulls: &mut Pulls, messages: usize) {
        (0..messages).for_each(|_| pulls.came(Instant::now()));
    }

    /// One for a thousand of which half has come, and another for the other half: a hundred came since, dealt in turn.
    fn two() -> Pulls {
        let mut pulls = pulls();
        assert_eq!(open(&mut pulls, 1_000), Some((1, 1_000)));
        come(&mut pulls, 500);
        assert_eq!(open(&mut pulls, 1_000), Some((2, 500)));
        come(&mut pulls, 100);
        pulls
    }

    #[test]
    fn another_is_opened_for_many_once_half_of_the_first_has_come() {
        let mut pulls = pulls();
        assert_eq!(open(&mut pulls, 1_000), Some((1, 1_000)));
        come(&mut pulls, 499);
        assert_eq!(open(&mut pulls, 1_000), None);
        come(&mut pulls, 1);
        assert_eq!(open(&mut pulls, 600), None, "few");
        assert_eq!(open(&mut pulls, 1_000), Some((2, 500)));
        assert_eq!(open(&mut pulls, 2_000), None, "a third");
        come(&mut pulls, 999);
        assert_eq!((pulls.newest(), pulls.was_full), (Some(2), false));
        come(&mut pulls, 1);
        assert_eq!((pulls.newest(), pulls.was_full), (None, true));
        assert_eq!(open(&mut pulls, 1), Some((3, 1)));
        assert_eq!(pulls.overlapping, 1);
    }

    #[test]
    fn what_a_pull_did_not_get_is_awaited_of_no_other_whichever_ends_first() {
        for [first, second] in [[1, 2], [2, 1]] {
            let mut pulls = two();
            pulls.ended(first, End::Without(450));
            assert_eq!((pulls.coming, pulls.newest()), (450, Some(second)));
            pulls.ended(second, End::Without(450));
            assert_eq!((pulls.coming, pulls.newest()), (0, None));
            assert_eq!(open(&mut pulls, 5), Some((3, 5)));
        }
    }

    #[test]
    fn one_that_ends_after_another_was_opened_takes_nothing_off_it() {
        let mut pulls = two();
        pulls.ended(2, End::Without(450));
        come(&mut pulls, 50);
        assert_eq!(open(&mut pulls, 1_000), Some((3, 600)));
        pulls.ended(1, End::Without(400));
        assert_eq!((pulls.coming, pulls.newest()), (600, Some(3)));
    }

    #[test]
    fn one_that_got_all_says_nothing_and_the_other_is_open_until_it_has_ended() {
        let mut pulls = two();
        come(&mut pulls, 850); // 450 to each but for 50
        assert_eq!(pulls.coming, 50);
        pulls.ended(1, End::Without(50));
        assert_eq!((pulls.coming, pulls.newest()), (0, None));
    }

    #[test]
    fn one_that_does_not_say_how_much_it_did_not_get_leaves_no_more_than_the_other_can_bring() {
        let mut pulls = two();
        pulls.ended(1, End::NoMore);
        assert_eq!((pulls.coming, pulls.newest()), (500, Some(2)));
        pulls.ended(2, End::NoMore);
        assert_eq!((pulls.coming, pulls.newest()), (0, None));
    }

    #[test]
    fn one_that_is_refused_has_brought_nothing_and_there_is_no_other_until_the_first_has_ended() {
        let mut pulls = pulls();
        assert_eq!(open(&mut pulls, 1_000), Some((1, 1_000)));
        come(&mut pulls, 500);
        assert_eq!(open(&mut pulls, 1_000), Some((2, 500)));
        pulls.ended(2, End::Refused);
        assert_eq!((pulls.coming, pulls.newest()), (500, Some(1)));
        come(&mut pulls, 1);
        assert_eq!(open(&mut pulls, 1_000), None);
        pulls.ended(1, End::Without(499));
        assert_eq!(open(&mut pulls, 1_000), Some((3, 1_000)));
        come(&mut pulls, 500);
        assert_eq!(open(&mut pulls, 1_000), Some((4, 500)));
    }

    #[test]
    fn one_that_is_refused_for_those_of_others_is_known_until_the_next() {
        let mut pulls = pulls();
        open(&mut pulls, 5);
        assert!(!pulls.were_refused());
        pulls.ended(1, End::Refused);
        assert!(pulls.were_refused());
        assert_eq!(open(&mut pulls, 5), Some((2, 5)));
        assert!(!pulls.were_refused());
    }

    #[test]
    fn however_long_it_goes_on_no_more_are_open_than_are_allowed() {
        let mut pulls = pulls();
        let mut opened = 0;
        while open(&mut pulls, 1_000).is_some() {
            opened += 1;
            let half = pulls.open.back().unwrap().batch / 2;
            let messages = pulls.coming - half;
            come(&mut pulls, messages);
            assert!(opened <= MOST_OPEN && pulls.coming > 0);
        }
        assert_eq!(opened, MOST_OPEN);
        let messages = pulls.coming;
        come(&mut pulls, messages);
        assert_eq!(open(&mut pulls, 1_000), Some((opened as u64 + 1, 1_000)));
    }

    #[test]
    fn those_of_an_inbox_that_was_left_count_no_more() {
        let mut pulls = two();
        pulls.leave();
        assert!(pulls.have_left() && !pulls.is_any_open());
        assert_eq!(open(&mut pulls, 1_000), None);
        come(&mut pulls, 1);
        assert!(!pulls.was_full);
        pulls.move_to("another".to_owned());
        let opened = pulls.open(1, 1_000, Instant::now()).unwrap();
        assert_eq!((opened.number, opened.inbox.as_str()), (3, "another.3"));
        pulls.ended(2, End::Without(1));
        pulls.ended(1, End::Without(1));
        assert_eq!((pulls.coming, pulls.newest()), (1, Some(3)));
    }

    #[test]
    fn those_that_give_no_sign_are_given_up_with_their_inbox() {
        let mut pulls = two();
        let now = Instant::now();
        assert!(!pulls.lapse(now + SILENCE / 2));
        pulls.lives(2, now + SILENCE / 2);
        assert!(!pulls.lapse(now + SILENCE));
        assert!(pulls.lapse(now + SILENCE * 2));
        assert!(pulls.have_left() && !pulls.is_any_open());
    }

    #[test]
    fn one_that_got_all_is_forgotten_when_its_time_is_over() {
        let mut pulls = pulls();
        let then = Instant::now();
        pulls.open(1_000, 1_000, then);
        let later = then + LIFE;
        (0..600).for_each(|_| pulls.came(later));
        pulls.open(1_000, 1_000, later);
        assert_eq!((pulls.open.len(), pulls.coming), (2, 1_000));
        assert!(pulls.lapse(later + LATE));
        assert_eq!((pulls.newest(), pulls.coming), (Some(2), 600));
        assert!(!pulls.have_left());
    }
}
