//! What a backend of jobs does: one suite, run by one binary per backend.
//!
//! [`World`] is all that differs. A story is a function over a world in one of the modules below, and has
//! its line in `jobs_suite!` if every backend can do it, or in `ledger_suite!` if it takes a ledger. Each
//! line is a test of its own in each binary. In the first group a story takes all its leases for the same
//! time, as a stream has one for a whole queue. A backend without a ledger says so where it names the
//! suite: `#[allow(dead_code, unused_macros, reason = "a stream keeps no ledger")]`.
#![allow(unreachable_pub, reason = "public within a test")]

pub mod jobs;
pub mod lives;
pub mod people;
pub mod seen;
pub mod storms;
pub mod waiting;
pub mod work;

use std::sync::Arc;
use std::time::{Duration, Instant};

use testing::soon;
use vedetta_core::JobState;
use vedetta_core::queue::{Kept, Settled, Woken};
use vedetta_jobs::{
    Claim, DEFAULT_QUEUE, Ear, Fate, Filter, Given, Job, JobId, Jobs, Json, Ledger, NewJob, Note,
    QueueCounts, Taken, Wanted,
};

/// Long enough never to be over within a test.
pub const HOUR: Duration = Duration::from_secs(3600);
/// A lease that is soon over.
pub const SHORT: Duration = Duration::from_millis(400);
/// When to look again.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Where jobs wait, unless a test says otherwise.
pub const QUEUE: &str = DEFAULT_QUEUE;
/// Who works, unless a test says otherwise.
pub const ANNA: &str = "anna";
/// All there is.
pub const ALL: u32 = u32::MAX;

/// A place that keeps jobs.
pub trait World: Sized {
    /// How it is spoken to.
    type Jobs: Jobs;

    /// It knows an end again for as long as that stands, whoever was answered.
    const REMEMBERS_ENDS: bool = true;

    /// A new one, which nobody else uses.
    async fn new() -> Self;

    /// Somebody else at the same place, with connections of their own where there can be several.
    async fn neighbour(&self) -> Self;

    /// The same place after the process that had it ended.
    async fn reopened(self) -> Self;

    /// Its jobs.
    fn jobs(&self) -> &Arc<Self::Jobs>;
}

/// What every test asks of a world.
pub trait Ask: World {
    /// Takes new jobs on; which, in their order.
    async fn enqueue(&self, jobs: &[NewJob]) -> Vec<JobId> {
        let enqueued = self.jobs().enqueue(jobs).await.unwrap();
        assert_eq!(enqueued.len(), jobs.len());
        assert!(enqueued.iter().all(|enqueued| enqueued.is_new), "{enqueued:?}");
        enqueued.into_iter().map(|enqueued| enqueued.id).collect()
    }

    /// The same for one.
    async fn add(&self, job: NewJob) -> JobId {
        self.enqueue(&[job]).await[0]
    }

    /// The same for many that do not differ.
    async fn add_many(&self, count: usize) -> Vec<JobId> {
        self.enqueue(&vec![NewJob::new("pack"); count]).await
    }

    /// What there is to take for a while.
    async fn taken(&self, room: u32, lease: Duration) -> Taken {
        self.jobs().take(&wanted(room, lease)).await.unwrap()
    }

    /// The same for long, without saying how long to rest.
    async fn take(&self, room: u32) -> Vec<Given> {
        self.taken(room, HOUR).await.jobs
    }

    /// The only one there is.
    async fn take_one(&self) -> Given {
        let mut taken = self.take(ALL).await;
        assert_eq!(taken.len(), 1, "one is due: {taken:?}");
        taken.remove(0)
    }

    /// Waits until there is one to take, and takes it alone.
    async fn comes(&self, lease: Duration) -> Given {
        soon("a job is due", async {
            loop {
                let mut taken = self.taken(1, lease).await.jobs;
                assert!(taken.len() <= 1, "there was room for one: {taken:?}");
                match taken.pop() {
                    Some(job) => return job,
                    None => tokio::time::sleep(LOOK_AGAIN).await,
                }
            }
        })
        .await
    }

    /// Fails when there is something to take.
    async fn rests(&self) {
        let taken = self.take(ALL).await;
        assert!(taken.is_empty(), "nothing is due: {taken:?}");
    }

    /// How one job ended.
    async fn settle(&self, claim: Claim, fate: Fate) -> Settled {
        let settled = self.jobs().settle(&[(claim, fate)]).await.unwrap();
        assert_eq!(settled.len(), 1);
        settled[0]
    }

    /// Has one job done.
    async fn finish(&self, claim: Claim) {
        assert_eq!(self.settle(claim, done()).await, Settled::Gone);
    }

    /// Prolongs one lease.
    async fn keep(&self, claim: Claim) -> Kept {
        self.note(claim, Note::default()).await
    }

    /// Prolongs one lease, and tells something.
    async fn note(&self, claim: Claim, note: Note) -> Kept {
        let kept = self.jobs().keep(&[(claim, note)]).await.unwrap();
        assert_eq!(kept.len(), 1);
        kept[0]
    }

    /// Waits until somebody who works the queue is woken for this.
    async fn wakes(&self, ear: &Ear, expected: Woken) {
        let jobs = self.jobs();
        soon("who waits is woken", async { while jobs.woken(QUEUE, ear).await != expected {} })
            .await;
    }

    /// Waits until nobody is woken any more for what happened so far: somebody who has heard all that.
    async fn falls_silent(&self) -> Ear {
        let (ear, silence) = (Ear::default(), Duration::from_millis(100));
        while tokio::time::timeout(silence, self.jobs().woken(QUEUE, &ear)).await.is_ok() {}
        ear
    }
}

impl<W: World> Ask for W {}

/// A world that keeps a ledger.
pub trait LedgerWorld: World<Jobs: Ledger> {}

impl<W: World<Jobs: Ledger>> LedgerWorld for W {}

/// What tests ask of it.
pub trait AskLedger: LedgerWorld {
    /// A job that is there.
    async fn job(&self, id: JobId) -> Job {
        self.jobs().job(id).await.unwrap().expect("the job is there")
    }

    /// Where it stands.
    async fn state(&self, id: JobId) -> JobState {
        self.job(id).await.status
    }

    /// Every job that fits, page by page.
    async fn all(&self, filter: &Filter) -> Vec<Job> {
        soon("a list has an end", async {
            let (mut all, mut before) = (Vec::new(), None);
            loop {
                let page = self.jobs().list(filter, before, 100).await.unwrap();
                all.extend(page.jobs);
                match page.next {
                    Some(next) => before = Some(next),
                    None => return all,
                }
            }
        })
        .await
    }

    /// What is in a queue.
    async fn counts(&self, queue: &str) -> QueueCounts {
        let queues = self.jobs().queues().await.unwrap();
        let mut named = queues.into_iter().filter(|counts| counts.name == queue);
        let counts = named.next().unwrap_or_else(|| panic!("there is no queue {queue}"));
        assert!(named.next().is_none(), "each queue is told once");
        counts
    }
}

impl<W: LedgerWorld> AskLedger for W {}

/// What Anna asks of the default queue.
pub fn wanted(room: u32, lease: Duration) -> Wanted<'static> {
    Wanted { queue: QUEUE, worker: ANNA, room, capacity: ALL, lease }
}

/// JSON, as it is written.
pub fn json(text: &str) -> Json {
    serde_json::from_str(text).unwrap()
}

/// It is done, with nothing to tell.
pub fn done() -> Fate {
    Fate::Done { result: None }
}

/// It failed, and is to be tried again after a while.
pub fn again(after: Duration) -> Fate {
    Fate::Again { after, error: "no stock".into() }
}

/// It failed for good.
pub fn dead() -> Fate {
    Fate::Dead { error: "no such order".into() }
}

/// Which jobs were handed out, in order.
pub fn ids(given: &[Given]) -> Vec<JobId> {
    given.iter().map(|given| given.claim.id).collect()
}

/// The proofs that they were.
pub fn claims(given: &[Given]) -> Vec<Claim> {
    given.iter().map(|given| given.claim).collect()
}

/// Whether an end that was told again is answered as it was: what is due later is due sooner by then.
pub fn is_the_same(first: Settled, second: Settled) -> bool {
    match (first, second) {
        (Settled::Again(first), Settled::Again(second)) => second <= first,
        (first, second) => first == second,
    }
}

/// Waits until it is so.
pub async fn eventually(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    soon(what, async {
        while !is_so().await {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    })
    .await;
}

/// Waits until a lease of this length, taken before, is over for sure.
pub async fn lapse(lease: Duration) {
    tokio::time::sleep(lease + Duration::from_millis(20)).await;
}

/// Whether something asked for at `asked` to wait for so long came no earlier, but for what clocks are read to.
pub fn waited(asked: Instant, full: Duration) -> bool {
    asked.elapsed() + Duration::from_millis(2) >= full
}

/// Whether a wait that was asked for as `full` a moment ago is still about that.
pub fn about(wait: Duration, full: Duration) -> bool {
    wait <= full + Duration::from_millis(2) && wait + Duration::from_secs(300) >= full
}

/// The stories that every backend can tell.
macro_rules! jobs_suite {
    ($world:ty) => {
        stories! { $world;
            jobs {
                jobs_come_out_as_they_went_in_and_in_order
                the_largest_payload_comes_out_whole
                many_are_taken_on_all_or_none
                each_queue_hands_out_its_own
                a_take_fills_its_room_by_cost_and_the_last_may_overshoot
                what_costs_more_than_the_capacity_counts_as_the_capacity
                many_who_take_at_once_share_what_is_due
                a_take_says_whether_there_may_be_more
                a_kept_job_is_handed_out_to_nobody_else
                a_job_that_is_not_kept_goes_to_another_and_its_first_worker_has_lost_it
                what_is_done_or_dead_is_not_handed_out_again
                what_is_to_be_tried_again_or_later_comes_back_then_and_not_before
                what_is_released_comes_back_at_once
                many_are_kept_and_settled_each_by_its_own_claim
                an_end_that_is_told_twice_does_no_harm
                everybody_who_waits_is_woken_by_new_jobs
                what_is_put_back_wakes_who_waits
                what_happened_before_somebody_waits_wakes_them_too
                no_job_is_lost_by_a_restart
            }
            work {
                fourteen_of_cost_1_run_at_once_on_14_slots
                a_4k_job_takes_all_14_and_ten_small_ones_run_after_it
                after_a_1080p_job_five_of_cost_4_run_three_and_then_two
                parts_of_jobs_take_slots_each_for_itself
                a_worker_whose_parts_have_all_its_slots_leaves_jobs_to_others
                a_job_far_longer_than_its_lease_runs_once
                what_a_worker_that_went_away_had_is_soon_anothers
                a_worker_that_is_stopped_finishes_what_runs_and_gives_back_the_rest
                a_paused_worker_takes_nothing_until_it_is_resumed
                whatever_a_handler_does_is_its_jobs_alone
                a_job_can_ask_to_be_tried_later
                what_nobody_can_do_is_not_tried_for_ever
                what_becomes_of_a_job_is_one_trace
            }
        }
    };
}

/// The stories of those that keep a ledger.
macro_rules! ledger_suite {
    ($world:ty) => {
        stories! { $world;
            lives {
                a_job_is_shown_as_it_was_asked_for
                a_job_that_runs_shows_who_works_on_it_and_since_when
                each_end_leaves_its_marks
                neither_a_snooze_nor_a_release_counts_as_an_attempt
                a_released_job_keeps_its_place_in_the_line
                a_job_whose_workers_went_away_too_often_is_dead
                who_let_a_lease_lapse_changes_nothing_whether_or_not_somebody_took_the_job
                an_end_that_is_told_twice_counts_once
                what_somebody_changed_by_hand_is_not_answered_as_the_worker_told_it
                what_a_worker_tells_of_a_job_is_seen
                of_two_who_tell_of_a_job_at_once_neither_loses_a_line
                of_a_log_the_last_whole_lines_are_kept
                long_texts_are_cut_within_no_character
                the_largest_result_is_kept_whole
                times_beyond_all_calendars_do_no_harm
            }
            waiting {
                a_job_for_later_is_handed_out_then_and_not_before
                a_take_says_for_how_long_nothing_is_due
                what_is_urgent_goes_first_but_nothing_waits_for_ever
                of_one_key_in_a_queue_one_waits_and_the_earliest_time_wins
                a_key_counts_within_a_batch_and_not_beyond_its_queue
                an_earlier_time_for_a_key_wakes_who_waits
                while_one_of_a_key_runs_another_may_wait
                what_is_over_holds_no_key
                when_a_running_job_comes_back_one_of_its_key_waits
                when_a_lease_of_a_key_lapses_no_two_wait
                a_job_is_not_tried_again_while_another_of_its_key_waits
            }
            people {
                a_job_that_waits_can_be_called_off
                a_job_that_runs_can_be_called_off_and_its_worker_is_told_at_once
                changes_are_made_where_they_can_be
                what_is_tried_again_by_hand_begins_anew
                a_list_has_what_all_of_the_filter_fits_newest_first
                pages_have_each_job_once_while_others_come_and_go
                who_watches_a_job_sees_it_go_forward_only
                a_search_of_many_goes_on_until_there_is_no_next
                queues_count_what_they_have_in_each_state
                what_becomes_due_counts_as_ready
                a_paused_queue_hands_nothing_out_until_it_is_resumed
                a_draining_queue_takes_nothing_on_and_is_worked_off
                what_is_over_for_long_enough_is_removed
                of_many_servers_that_tick_one_makes_the_job
                of_two_servers_that_run_each_tick_is_one_job
                a_server_that_was_away_makes_up_for_the_last_tick_it_missed
            }
            seen {
                progress_and_log_are_seen_while_a_job_runs_and_after
                a_job_that_is_called_off_is_ended
                a_failure_is_told_with_its_reason_and_counted
                a_command_is_a_handler
            }
            storms {
                a_restart_changes_nothing
                whatever_happens_each_job_is_over_once_and_runs_once_at_a_time
            }
        }
    };
}

/// Makes each of them a test.
macro_rules! stories {
    ($world:ty; $($module:ident { $($name:ident)* })*) => {
        $(mod $module {
            $(#[tokio::test]
            async fn $name() {
                $crate::suite::$module::$name::<$world>().await;
            })*
        })*
    };
}
