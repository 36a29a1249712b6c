//! Decides what may run at once, when some work takes more of the machine than other work.
//!
//! ```text
//! wait ──► queue ──start──► held ──release──► gone
//!            │
//!            └──cancel──► gone
//! ```
//!
//! First in, first out, with bounded overtaking. The head of the queue starts as soon as it fits. While
//! it does not, the earliest that fits starts in its place, if it is one of the `K = 4 · capacity` that
//! joined next after the head. What is further back waits even if it fits: letting it pass would fill the
//! gap of a moment, and count against all before it until their turn comes.
//!
//! **Nobody is overtaken more than `K` times.** What overtakes a waiter joined after it, and at most `K`
//! after the head, so at most `K` after the waiter: there are no more than `K` such.
//!
//! **A head starts within `(K + 1) · D`**, `D` being the longest run. If nothing overtakes it for `D`,
//! all that ran has ended, nothing else has started, and what has all slots free fits. At most `K`
//! overtakings cut its wait into at most `K + 1` such stretches. So every waiter becomes the head and
//! starts. Nobody has to guess how long a run takes, so no wrong guess can break this.
//!
//! Finding the next costs a walk down a tree over the queue, `log n` of the `n` that wait, and so do
//! joining and leaving it (making room for more costs a constant for each that joined).
//!
//! What a piece of work costs is the caller's to say, and so is when it runs: [`crate::Schedule`].

use std::num::{NonZeroU32, NonZeroUsize};

/// How far behind the head one may be and pass it, for each slot there is.
const PATIENCE: u64 = 4;

/// The cost of what waits no more: more than any capacity.
const GONE: u32 = u32::MAX;

/// The slots of a machine with so many cores: two stay free for the rest where there are more than four.
pub fn capacity_of(cores: NonZeroUsize) -> NonZeroU32 {
    let slots = if cores.get() > 4 { cores.get() - 2 } else { cores.get() };
    u32::try_from(slots).ok().and_then(NonZeroU32::new).unwrap_or(NonZeroU32::MAX)
}

/// A place in the queue, to leave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

/// Slots in use. Goes back with [`Slots::release`] once the work has really ended; there is one for each
/// start, so they cannot go back twice.
#[must_use = "slots that are not released are lost"]
#[derive(Debug)]
pub struct Held(u32);

impl Held {
    /// How many: the cost, but no more than there are.
    pub fn slots(&self) -> u32 {
        self.0
    }
}

/// A number of slots, what holds them and what waits for them.
pub struct Slots<T> {
    capacity: u32,
    free: u32,
    queue: Queue<T>,
    arrivals: u64,
}

impl<T> Slots<T> {
    /// All slots are free and nothing waits.
    pub fn new(capacity: NonZeroU32) -> Self {
        let capacity = capacity.get().min(GONE - 1);
        Self { capacity, free: capacity, queue: Queue::new(), arrivals: 0 }
    }

    /// Joins the queue. What costs more than there is takes all; what costs nothing takes one.
    pub fn wait(&mut self, cost: u32, what: T) -> Ticket {
        let number = self.arrivals;
        self.arrivals += 1;
        self.queue.push(number, cost.clamp(1, self.capacity), what);
        Ticket(number)
    }

    /// The next that may run now. To be called until there is none, whenever something joined, ended or
    /// left: the slots do not call back.
    pub fn start(&mut self) -> Option<(Held, T)> {
        let (head, next) = (self.queue.head()?, self.queue.first(self.free)?);
        let behind = self.queue.number(next) - self.queue.number(head);
        if behind > PATIENCE * u64::from(self.capacity) {
            return None;
        }
        let (cost, what) = self.queue.remove(next)?;
        self.free -= cost;
        Some((Held(cost), what))
    }

    /// The work has ended.
    #[expect(clippy::needless_pass_by_value, reason = "what went back is not held any more")]
    pub fn release(&mut self, held: Held) {
        self.free += held.0;
        debug_assert!(self.free <= self.capacity, "slots go back to where they are from");
    }

    /// Leaves the queue. Nothing if it started or left before. It still counts as one that joined after
    /// those before it, which can only let fewer pass them.
    pub fn cancel(&mut self, ticket: Ticket) -> Option<T> {
        let place = self.queue.find(ticket.0)?;
        self.queue.remove(place).map(|(_, what)| what)
    }

    /// Slots that nothing holds.
    pub fn free(&self) -> u32 {
        self.free
    }

    /// How many wait.
    pub fn waiting(&self) -> usize {
        self.queue.waiting
    }

    /// All slots, free or not.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }
}

/// What waits, in the order of arrival.
struct Queue<T> {
    /// A tree: the second half are the costs, and entry `n` is the lesser of `2n` and `2n + 1`. So
    /// `least[1]` is the least of all, and the first that fits is one walk down.
    least: Vec<u32>,
    /// The number and the work of each; nothing where it is gone.
    waiters: Vec<(u64, Option<T>)>,
    waiting: usize,
}

impl<T> Queue<T> {
    fn new() -> Self {
        Self { least: vec![GONE; 2], waiters: Vec::new(), waiting: 0 }
    }

    /// Where the first with at most that cost is.
    fn first(&self, most: u32) -> Option<usize> {
        let places = self.least.len() / 2;
        let mut node = 1;
        while node < places {
            node *= 2;
            if self.least[node] > most {
                node += 1;
            }
        }
        (self.least[node] <= most).then(|| node - places)
    }

    fn head(&self) -> Option<usize> {
        self.first(GONE - 1)
    }

    fn number(&self, place: usize) -> u64 {
        self.waiters[place].0
    }

    fn find(&self, number: u64) -> Option<usize> {
        self.waiters.binary_search_by_key(&number, |(number, _)| *number).ok()
    }

    fn push(&mut self, number: u64, cost: u32, what: T) {
        if self.waiters.len() == self.least.len() / 2 {
            self.make_room();
        }
        self.waiters.push((number, Some(what)));
        self.waiting += 1;
        self.set(self.waiters.len() - 1, cost);
    }

    fn remove(&mut self, place: usize) -> Option<(u32, T)> {
        let what = self.waiters[place].1.take()?;
        let cost = self.least[self.least.len() / 2 + place];
        self.waiting -= 1;
        self.set(place, GONE);
        Some((cost, what))
    }

    fn set(&mut self, place: usize, cost: u32) {
        let mut node = self.least.len() / 2 + place;
        self.least[node] = cost;
        while node > 1 {
            node /= 2;
            let least = self.least[2 * node].min(self.least[2 * node + 1]);
            if std::mem::replace(&mut self.least[node], least) == least {
                break;
            }
        }
    }

    /// Closes the gaps and leaves at least half of the places free, so that the next time is as far off
    /// as this one was dear.
    fn make_room(&mut self) {
        let places = (2 * self.waiting).next_power_of_two();
        let mut least = vec![GONE; places];
        let costs = &self.least[self.least.len() / 2..];
        least.extend(costs.iter().filter(|cost| **cost != GONE));
        least.resize(2 * places, GONE);
        for node in (1..places).rev() {
            least[node] = least[2 * node].min(least[2 * node + 1]);
        }
        self.least = least;
        self.waiters.retain(|(_, what)| what.is_some());
        self.waiters.shrink_to(places);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;

    fn slots<T>(capacity: u32) -> Slots<T> {
        Slots::new(NonZeroU32::new(capacity).expect("some slots"))
    }

    enum Step {
        /// They join one after the other, each with that cost.
        Join(&'static str, u32),
        End(&'static str),
        Leave(&'static str),
    }
    use Step::{End, Join, Leave};

    /// What happens, and what starts at that. Names are words.
    fn story(capacity: u32, steps: &[(Step, &str)]) {
        let mut slots = slots(capacity);
        let (mut tickets, mut running) = (HashMap::new(), HashMap::new());
        for (at, (step, starts)) in steps.iter().enumerate() {
            let (Join(names, _) | End(names) | Leave(names)) = step;
            let mut started = Vec::new();
            for name in names.split_whitespace() {
                match step {
                    Join(_, cost) => {
                        tickets.insert(name, slots.wait(*cost, name));
                    }
                    End(_) => slots.release(running.remove(name).expect("it runs")),
                    Leave(_) => assert_eq!(slots.cancel(tickets[name]), Some(name), "step {at}"),
                }
                while let Some((held, name)) = slots.start() {
                    running.insert(name, held);
                    started.push(name);
                }
            }
            assert_eq!(started.join(" "), *starts, "step {at}");
        }
        let waiting = slots.waiting();
        for (name, held) in running {
            slots.release(held);
            assert_eq!(slots.cancel(tickets[name]), None, "{name} has started");
        }
        assert_eq!((slots.free(), slots.waiting()), (capacity, waiting));
    }

    #[test]
    fn fourteen_of_cost_1_run_at_once_on_14_slots() {
        story(
            14,
            &[
                (Join("a b c d e f g h i j k l m n o", 1), "a b c d e f g h i j k l m n"),
                (End("g"), "o"),
            ],
        );
    }

    #[test]
    fn a_4k_job_takes_all_14_and_ten_small_ones_run_after_it() {
        story(
            14,
            &[
                (Join("4k", 64), "4k"),
                (Join("a b c d e f g h i j", 1), ""),
                (End("4k"), "a b c d e f g h i j"),
            ],
        );
    }

    #[test]
    fn after_a_1080p_job_five_of_cost_4_run_three_and_then_two() {
        story(
            14,
            &[
                (Join("1080p", 32), "1080p"),
                (Join("a b c d e", 4), ""),
                (End("1080p"), "a b c"),
                (End("a b c"), "d e"),
                (End("d e"), ""),
            ],
        );
    }

    #[test]
    fn a_head_that_does_not_fit_is_overtaken_by_the_earliest_that_does() {
        story(
            14,
            &[
                (Join("a", 8), "a"),
                (Join("head", 16), ""),
                (Join("b", 8), ""),
                (Join("c", 4), "c"),
                (Join("d", 4), ""),
                (Join("e", 2), "e"),
                (End("a"), "b"),
                (End("e c b"), "d"),
                (End("d"), "head"),
            ],
        );
    }

    #[test]
    fn a_head_has_the_slots_reserved_once_four_for_each_have_passed() {
        story(
            2,
            &[
                (Join("long", 1), "long"),
                (Join("head", 2), ""),
                (Join("1 2 3 4 5 6 7 8 9", 1), "1"),
                (End("1 2 3 4 5 6 7"), "2 3 4 5 6 7 8"),
                (End("8"), ""), // 9 would fit
                (Join("10", 1), ""),
                (End("long"), "head"),
                (End("head"), "9 10"),
            ],
        );
    }

    #[test]
    fn what_is_too_far_back_may_pass_once_the_head_is_nearer() {
        for leaves in [false, true] {
            story(
                3,
                &[
                    (Join("long", 2), "long"),
                    (Join("first", 2), ""),
                    (Join("1 2 3 4 5", 1), "1"),
                    (End("1 2 3 4"), "2 3 4 5"),
                    (Join("second", 3), ""),
                    (Join("6 7 8 9 10 11 12 13 14 15 16 17 18", 1), ""),
                    (End("5 6 7 8 9 10"), "6 7 8 9 10 11"),
                    (End("11"), ""), // 12 is the thirteenth after the first
                    if leaves { (Leave("first"), "12") } else { (End("long"), "first 12") },
                    (End("12 13 14 15 16"), "13 14 15 16 17"),
                    (End("17"), ""), // 18 is the thirteenth after the second
                    (End(if leaves { "long" } else { "first" }), "second"),
                    (End("second"), "18"),
                ],
            );
        }
    }

    #[test]
    fn a_waiter_that_leaves_leaves_no_trace() {
        story(
            4,
            &[
                (Join("a", 3), "a"),
                (Join("b c d", 4), ""),
                (Leave("b"), ""),
                (Join("e", 1), "e"),
                (Leave("d"), ""),
                (Leave("c"), ""),
                (Join("f", 3), ""),
                (End("a"), "f"),
            ],
        );
        let mut slots = slots(1);
        let ticket = slots.wait(1, "a");
        assert_eq!(slots.cancel(ticket), Some("a"));
        assert_eq!(slots.cancel(ticket), None);
        assert_eq!((slots.waiting(), slots.free()), (0, 1));
        assert!(slots.start().is_none());
    }

    #[test]
    fn a_cost_is_at_least_one_slot_and_at_most_all() {
        for (capacity, cost, held) in [
            (14, 0, 1),
            (14, 1, 1),
            (14, 14, 14),
            (14, 15, 14),
            (14, u32::MAX, 14),
            (1, 64, 1),
            (u32::MAX, u32::MAX, u32::MAX - 1),
        ] {
            let mut slots = slots(capacity);
            slots.wait(cost, ());
            let (taken, ()) = slots.start().expect("all is free");
            assert_eq!(taken.slots(), held, "{cost} of {capacity}");
            assert_eq!(slots.free(), slots.capacity() - held);
            slots.release(taken);
            assert_eq!(slots.free(), slots.capacity());
        }
    }

    #[test]
    fn more_than_four_cores_keep_two_for_the_rest() {
        for (cores, slots) in [(1, 1), (2, 2), (4, 4), (5, 3), (6, 4), (16, 14), (128, 126)] {
            let cores = NonZeroUsize::new(cores).expect("some cores");
            assert_eq!(capacity_of(cores).get(), slots, "{cores} cores");
        }
        assert_eq!(capacity_of(NonZeroUsize::MAX), NonZeroU32::MAX);
    }

    #[derive(Debug, Clone)]
    enum Event {
        Arrives(u32),
        Ends(Index),
        Leaves(Index),
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let cost = prop_oneof![1_u32..=3, 1_u32..=100];
        let event = prop_oneof![
            10 => cost.prop_map(Event::Arrives),
            9 => any::<Index>().prop_map(Event::Ends),
            1 => any::<Index>().prop_map(Event::Leaves),
        ];
        prop::collection::vec(event, 0..600)
    }

    struct Waiter {
        id: usize,
        cost: u32,
        overtaken: u32,
    }

    /// The rules the slow way: every waiter counts for itself how often it was overtaken.
    struct Model {
        slots: Slots<usize>,
        capacity: u32,
        tickets: Vec<Ticket>,
        queue: Vec<Waiter>,
        running: Vec<(usize, Held)>,
        gone: usize,
    }

    impl Model {
        fn happens(&mut self, event: &Event) -> Result<(), TestCaseError> {
            match event {
                Event::Arrives(cost) => {
                    let id = self.tickets.len();
                    self.tickets.push(self.slots.wait(*cost, id));
                    let cost = (*cost).min(self.capacity);
                    self.queue.push(Waiter { id, cost, overtaken: 0 });
                }
                Event::Ends(which) if !self.running.is_empty() => {
                    let (_, held) = self.running.swap_remove(which.index(self.running.len()));
                    self.slots.release(held);
                    self.gone += 1;
                }
                Event::Leaves(which) if !self.tickets.is_empty() => {
                    let id = which.index(self.tickets.len());
                    let waits = self.queue.iter().position(|waiter| waiter.id == id);
                    let left = waits.map(|place| self.queue.remove(place).id);
                    prop_assert_eq!(self.slots.cancel(self.tickets[id]), left);
                    self.gone += usize::from(left.is_some());
                }
                Event::Ends(_) | Event::Leaves(_) => {}
            }
            while let Some((held, id)) = self.slots.start() {
                self.starts(held, id)?;
            }
            self.nothing_more_may_start()
        }

        fn free(&self) -> u32 {
            self.capacity - self.running.iter().map(|(_, held)| held.slots()).sum::<u32>()
        }

        fn starts(&mut self, held: Held, id: usize) -> Result<(), TestCaseError> {
            let place = self.queue.iter().position(|waiter| waiter.id == id);
            let Some(place) = place else {
                return Err(TestCaseError::fail(format!("{id} starts and does not wait")));
            };
            let free = self.free();
            let waiter = self.queue.remove(place);
            prop_assert_eq!(held.slots(), waiter.cost);
            prop_assert!(waiter.cost <= free, "more runs than there are slots");
            for earlier in &mut self.queue[..place] {
                prop_assert!(earlier.cost > free, "an earlier one would fit");
                prop_assert_ne!(earlier.cost, waiter.cost, "equals start as they came");
                earlier.overtaken += 1;
                prop_assert!(earlier.overtaken <= 4 * self.capacity, "overtaken too often");
            }
            self.running.push((id, held));
            Ok(())
        }

        fn nothing_more_may_start(&self) -> Result<(), TestCaseError> {
            let free = self.free();
            prop_assert_eq!(self.slots.free(), free);
            prop_assert_eq!(self.slots.waiting(), self.queue.len());
            if let Some(head) = self.queue.first() {
                prop_assert!(head.cost > free, "the head would fit");
                let near = |waiter: &&Waiter| waiter.id <= head.id + 4 * self.capacity as usize;
                let fits = self.queue.iter().filter(near).any(|waiter| waiter.cost <= free);
                prop_assert!(!fits, "slots are idle that a waiter could use");
            }
            Ok(())
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn any_trace_keeps_every_rule_and_everybody_starts_in_the_end(
            capacity in prop_oneof![1_u32..=4, 1_u32..=64],
            events in events(),
            order in any::<Index>(),
        ) {
            let mut model = Model {
                slots: slots(capacity),
                capacity,
                tickets: Vec::new(),
                queue: Vec::new(),
                running: Vec::new(),
                gone: 0,
            };
            for event in &events {
                model.happens(event)?;
            }
            while !model.running.is_empty() {
                model.happens(&Event::Ends(order))?;
            }
            prop_assert_eq!(model.gone, model.tickets.len(), "somebody never started");
            prop_assert_eq!(model.slots.free(), capacity);
        }
    }
}
