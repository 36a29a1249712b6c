//! What stages do, on whatever database: one suite, run by one binary per database.
//!
//! [`World`] is all that differs. A test is a function over a world in one of the modules below, and has
//! its line in `suite!`, which makes it a test of its own in each binary.
#![allow(unreachable_pub, reason = "public within a test")]

pub mod entities;
pub mod faults;
pub mod flow;
pub mod model;

pub mod queues;
mod stages;
pub mod story;

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub use stages::{Held, Step, held};
use testing::soon;
use vedetta_stage::{
    Backend, BoxError, Checked, Claim, Entity, LaneCounts, Processing, Processor, Record, Records,
    StageStatus, Version, Which,
};

/// Long enough never to be over within a test.
pub const HOUR: Duration = Duration::from_secs(3600);
/// When to look again.
const LOOK_AGAIN: Duration = Duration::from_millis(3);

/// What entities are called.
pub const ORDERS: &str = "orders";

/// While it is muted, this one's id panics when it becomes text.
pub const MUTE: i64 = 404;
pub static IS_MUTED: AtomicBool = AtomicBool::new(false);

/// The id of an order. As text `order-7`, so that not every text is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OrderId(pub i64);

impl fmt::Display for OrderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_mute = self.0 == MUTE && IS_MUTED.load(Ordering::Relaxed);
        assert!(!is_mute, "words fail");
        write!(f, "order-{}", self.0)
    }
}

impl FromStr for OrderId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.strip_prefix("order-").and_then(|number| number.parse().ok());
        number.map(Self).ok_or_else(|| "not an order".to_owned())
    }
}

/// A row of the table `orders (id, version, state, marks)`. Its state is never `forbidden`, which the
/// database itself sees to; a state of NULL cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub struct Order {
    pub id: i64,
    pub version: Version,
    pub state: String,
    /// What was done to it, in order.
    pub marks: Vec<String>,
}

impl Order {
    /// One that nobody saved yet.
    pub fn new(id: i64) -> Self {
        Self { id, version: Version::default(), state: "new".into(), marks: Vec::new() }
    }

    /// The same in this state.
    pub fn is(mut self, state: &str) -> Self {
        state.clone_into(&mut self.state);
        self
    }

    /// The same with one more mark.
    pub fn marked(mut self, mark: &str) -> Self {
        self.marks.push(mark.to_owned());
        self
    }

    /// As a database has it.
    pub fn marks_as_text(&self) -> String {
        assert!(self.marks.iter().all(|mark| mark != UNWRITABLE), "a mark too many");
        self.marks.join(" ")
    }

    /// And back.
    pub fn marks_of_text(text: &str) -> Vec<String> {
        assert!(!text.contains(UNREADABLE), "a mark too many");
        text.split_whitespace().map(str::to_owned).collect()
    }
}

/// Marks over which the table panics when it writes them, or reads them, and the order when it is cloned.
pub const UNWRITABLE: &str = "unwritable";
pub const UNREADABLE: &str = "unreadable";
pub const UNIQUE: &str = "unique";

impl Clone for Order {
    fn clone(&self) -> Self {
        let Self { id, version, ref state, ref marks } = *self;
        assert!(marks.iter().all(|mark| mark != UNIQUE), "there is but one");
        Self { id, version, state: state.clone(), marks: marks.clone() }
    }
}

impl Entity for Order {
    type Id = OrderId;

    fn id(&self) -> OrderId {
        OrderId(self.id)
    }

    fn version(&self) -> Version {
        self.version
    }

    fn set_version(&mut self, version: Version) {
        self.version = version;
    }
}

/// A database with orders and queues.
pub trait World: Sized {
    /// Its queues.
    type Records: Records;
    /// Its orders.
    type Orders: Backend<Order, Records = Self::Records>;

    /// A new database, which nobody else uses.
    async fn new() -> Self;

    /// Somebody else at the same database, with connections of their own where there can be several.
    async fn neighbour(&self) -> Self;

    /// The same database after the process that had it ended.
    async fn reopened(self) -> Self;

    /// Its orders.
    fn orders(&self) -> &Self::Orders;

    /// The same, divided into shards.
    fn sharded(&self, shards: u16) -> Self::Orders;

    /// Stores new orders, all or none, as a user's own code does.
    async fn create(&self, orders: Vec<Order>) -> Result<(), BoxError>;

    /// Changes an order, and again if somebody else changed it meanwhile.
    async fn change(
        &self,
        id: i64,
        change: impl Fn(&mut Order) + Clone + Send + Sync + 'static,
    ) -> Result<Option<Order>, BoxError>;

    /// The same for many; those that exist.
    async fn change_all(
        &self,
        ids: Vec<i64>,
        change: impl Fn(&mut Order) + Clone + Send + Sync + 'static,
    ) -> Result<Vec<Order>, BoxError>;

    /// Saves orders, each if it has the version that was read.
    async fn save_all(&self, read: Vec<(Order, Version)>) -> Result<Vec<Checked<Order>>, BoxError>;

    /// The same for one.
    async fn save(&self, order: Order, read: Version) -> Result<Checked<Order>, BoxError>;

    /// What is stored.
    async fn read(&self, id: i64) -> Option<Order>;

    /// The same table and queues, where the entities are called something else.
    async fn called(&self, name: &str) -> Self;

    /// All orders as they are at one moment, each with the stages that have a record of it then.
    async fn look(&self) -> Vec<(Order, String)>;

    /// Removes an order, of which the queues are not told.
    async fn delete(&self, id: i64);

    /// Writes a row that cannot be read as an order.
    async fn spoil(&self, id: i64);

    /// Makes it an order again.
    async fn mend(&self, id: i64);
}

/// What every test asks of a world.
pub trait Ask: World {
    /// The queues.
    fn records(&self) -> &Self::Records {
        self.orders().records()
    }

    /// Stores a new order.
    async fn order(&self, id: i64) {
        self.create(vec![Order::new(id)]).await.unwrap();
    }

    /// An order that is there.
    async fn get(&self, id: i64) -> Order {
        self.read(id).await.expect("the order is there")
    }

    /// The record of an order in a stage, if there is one.
    async fn record(&self, stage: &str, id: i64) -> Option<Record> {
        let id = OrderId(id).to_string();
        let which = Which { stage: Some(stage.into()), id: Some(id), ..Which::default() };
        let mut page = self.records().list(ORDERS, &which, 2).await.unwrap();
        assert!(page.records.len() <= 1, "an entity has one record in a queue: {page:?}");
        page.records.pop()
    }

    /// What is in a queue.
    async fn counts(&self, stage: &str) -> LaneCounts {
        let counts = self.records().counts().await.unwrap();
        let lane = counts.into_iter().find(|lane| lane.entity == ORDERS && lane.stage == stage);
        lane.unwrap_or_else(|| panic!("there is no queue of {stage}"))
    }

    /// Waits until no record is left but those set aside.
    async fn rests(&self) {
        eventually("everything rests", async || {
            let counts = self.records().counts().await.unwrap();
            counts.iter().all(|lane| lane.records == lane.parked)
        })
        .await;
    }

    /// The same, while runs that were wanted once more leave the order as it is.
    async fn rests_leaving(&self, runs: &mut Held) {
        eventually("everything rests", async || {
            while let Some(run) = runs.pending() {
                run.leaves();
            }
            let counts = self.records().counts().await.unwrap();
            counts.iter().all(|lane| lane.records == 0)
        })
        .await;
    }

    /// Works without delay.
    fn processor(&self) -> Processor<Order, Self::Orders> {
        quick(self.orders().clone())
    }

    /// Works with these stages.
    async fn process(&self, stages: impl IntoIterator<Item = Step>) -> Processing {
        let stages = stages.into_iter();
        stages.fold(self.processor(), Processor::stage).start().await.unwrap()
    }
}

impl<W: World> Ask for W {}

/// A processor that does not make tests wait.
pub fn quick<B: Backend<Order>>(orders: B) -> Processor<Order, B> {
    Processor::new(orders).spread(Duration::ZERO).poll(Duration::from_millis(20))
}

/// What a stage is at.
pub fn status(processing: &Processing, stage: &str) -> StageStatus {
    let status = processing.status().into_iter().find(|status| status.stage == stage);
    status.expect("the stage is worked")
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
    tokio::time::sleep(lease + Duration::from_millis(5)).await;
}

/// The ids of claims, sorted.
pub fn ids(claims: &[Claim]) -> Vec<&str> {
    let mut ids: Vec<&str> = claims.iter().map(|claim| &*claim.id).collect();
    ids.sort_unstable();
    ids
}

/// Whether a wait that was asked for as `full` a moment ago is still about that.
pub fn about(due_in: Option<Duration>, full: Duration) -> bool {
    due_in.is_some_and(|due_in| {
        due_in <= full + Duration::from_millis(2) && due_in + Duration::from_secs(300) >= full
    })
}

/// Which seeds to try: `count` unless `STAGE_SEED` names one, or `STAGE_SEEDS` says how many.
pub fn seeds(count: u64) -> Vec<u64> {
    let asked = |name| std::env::var(name).ok().map(|text| text.parse().expect("a number"));
    match asked("STAGE_SEED") {
        Some(seed) => vec![seed],
        None => (0..asked("STAGE_SEEDS").unwrap_or(count)).collect(),
    }
}

/// Named when something fails.
pub struct Seed(pub u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("to see it again: STAGE_SEED={}", self.0);
        }
    }
}

/// All tests, for a world.
macro_rules! suite {
    ($world:ty) => {
        suite! { $world;
            queues {
                of_two_wishes_for_one_entity_the_earlier_stands_in_one_record
                each_stage_of_each_entity_has_a_queue_of_its_own
                nobody_gets_what_another_holds
                many_who_claim_at_once_share_what_is_due
                a_claim_takes_the_longest_due_first_and_no_more_than_there_is_room_for
                a_claim_that_finds_too_little_says_when_the_next_is_due
                a_claim_sees_the_shards_it_names_and_no_others
                a_record_goes_when_nothing_was_written_to_it
                a_record_that_was_written_to_since_its_claim_stays_whatever_was_written
                a_record_is_due_again_when_its_visit_says
                who_let_a_lease_lapse_can_no_longer_keep_or_settle_what_another_claimed
                a_lapsed_lease_settles_nothing_even_if_nobody_claimed_since
                a_kept_lease_outlives_its_first_term_and_one_of_many_may_be_lost
                a_batch_is_settled_each_by_its_own_fate
                failures_are_counted_with_their_error_until_something_ends_well
                a_change_brings_a_failing_record_forward_but_never_before_its_first_wait
                a_parked_record_waits_for_somebody_to_want_it
                a_released_record_is_due_as_it_was
                retry_brings_any_record_here_now_and_says_if_there_is_none
                counts_tell_due_from_held_from_waiting_and_how_long
                what_nobody_holds_any_more_counts_as_due
                lists_come_page_by_page_in_the_order_of_stage_and_id
                a_long_error_is_cut_within_no_character_and_ids_may_be_any_text
                who_waits_for_a_queue_is_woken_by_whoever_writes_to_it
            }
            entities {
                a_new_entity_is_of_version_1_and_due_in_the_system_stage
                an_update_raises_the_version_and_enqueues_the_system_stage_again
                many_entities_are_written_with_their_records_at_once
                a_write_that_fails_leaves_neither_entity_nor_record
                changing_what_does_not_exist_says_so_and_enqueues_nothing
                changes_made_at_once_lose_none
                many_changed_at_once_from_two_sides_lose_none
                ids_go_through_the_queue_as_text_and_come_back
                a_batch_saves_what_is_fresh_and_tells_each_conflict
                a_single_save_is_a_batch_of_one
                an_order_that_is_saved_as_it_was_read_is_a_conflict_if_somebody_else_saved_it
                of_many_saved_as_they_were_read_each_is_told_by_itself
                a_refused_save_harms_no_other_and_leaves_its_record_held
                whose_lease_lapsed_saves_nothing_and_sends_nothing_on
                where_an_entity_goes_next_is_noted_with_its_end
            }
            flow {
                an_order_goes_through_its_stages_and_comes_to_rest
                what_happens_to_a_run_is_told_as_it_happens
                the_round_ends_when_stages_leave_the_order_as_it_is
                every_stage_is_asked_and_those_that_want_it_get_it_after_a_random_delay
                an_order_that_a_single_stage_wants_gets_there_after_a_random_part_of_a_twentieth_of_the_spread
                after_short_delays_an_order_goes_through_its_stages_and_none_is_left_behind
                without_a_spread_a_wanted_stage_is_due_at_once
                an_untouched_order_comes_back_when_the_stage_says
                an_updated_order_is_saved_and_comes_back_when_the_stage_says
                an_update_during_a_run_is_a_conflict_and_the_run_is_repeated_on_it
                of_two_stages_that_run_at_once_one_saves_and_the_other_runs_again
                a_visit_wanted_during_a_run_earlier_or_later_has_it_run_again
                an_update_during_a_run_of_the_system_stage_is_asked_about_once_more
                what_was_updated_while_nobody_worked_is_worked_on_later
                an_update_elsewhere_is_heard_of_without_looking
                of_two_processors_in_one_process_neither_takes_the_others_wake_up
                a_processor_works_on_the_shards_it_is_told_and_follows_when_they_change
                a_processor_that_is_told_of_a_shard_that_there_is_not_is_refused
                entities_are_spread_over_all_shards_and_each_is_found_in_its_own
                fewer_shards_than_before_strand_no_record
                processors_that_share_shards_never_run_one_entity_at_once
                what_became_of_runs_is_counted_for_all_processes
                stages_of_one_name_are_refused
                entities_of_two_names_have_the_same_ids_and_nothing_else_in_common
            }
            faults {
                a_stage_that_fails_backs_off_for_its_own_record_only
                a_panic_harms_its_own_record_only
                a_run_that_takes_too_long_harms_its_own_record_only
                a_save_the_table_refuses_harms_its_own_record_only
                a_row_that_cannot_be_read_harms_its_own_records_only
                an_id_that_cannot_be_read_harms_its_own_record_only
                a_table_that_panics_when_it_saves_harms_that_record_only
                a_table_that_panics_when_it_reads_harms_that_record_only
                an_entity_that_panics_when_it_is_cloned_harms_its_own_record_only
                an_id_that_panics_when_it_is_written_harms_its_own_record_only
                an_entity_that_is_gone_takes_its_records_along
                a_stage_whose_question_panics_is_asked_again
                the_waits_of_a_record_grow_with_its_failures_up_to_a_limit
                a_record_that_keeps_failing_is_set_aside_until_somebody_asks
                no_more_run_at_once_than_the_stage_allows
                one_stage_that_is_full_holds_up_no_other
                a_stop_waits_for_what_runs_and_settles_it
                a_stop_gives_back_what_it_did_not_finish_and_blames_nobody
                what_a_dropped_processor_held_comes_back_when_its_lease_is_over
                nothing_is_lost_when_the_process_ends
                a_run_whose_lease_is_lost_is_ended_and_saves_nothing
            }
            model {
                random_calls_of_the_queues_are_answered_as_a_small_model_says
            }
            story {
                whatever_happens_every_order_comes_to_rest_and_no_change_is_lost
            }
        }
    };
    ($world:ty; $($module:ident { $($name:ident)* })*) => {
        $(mod $module {
            $(#[tokio::test]
            async fn $name() {
                $crate::suite::$module::$name::<$world>().await;
            })*
        })*
    };
}
