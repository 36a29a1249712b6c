//! Jobs in a real NATS JetStream.

#[macro_use]
#[allow(dead_code, unused_macros, reason = "a stream keeps no ledger")]
mod suite;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime};

use async_nats::jetstream::consumer::{AckPolicy, pull};
use async_nats::jetstream::{Context, stream};
use async_trait::async_trait;
use futures_util::StreamExt as _;
use parking_lot::Mutex;
use testing::nats::Server;
use testing::{PATIENCE, Proxy, soon};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use vedetta_core::queue::{Kept, Settled, Woken};
use vedetta_core::{JobState, Trace};
use vedetta_jobs::jetstream::{JetStream, Options};
use vedetta_jobs::sqlite::SqliteJobs;
use vedetta_jobs::{
    BoxError, Claim, Cost, DEFAULT_QUEUE, Ear, Ended, Enqueued, Fate, Filter, Given, Job, JobId,
    Jobs, JobsError, Kind, Kinds, Ledger as _, Monitor, NewJob, Note, Outcome, Taken, Wanted, When,
    Work, Worker, Working,
};

use crate::suite::{HOUR, World, done, eventually};

const STREAM: &str = "MEDIA";
const SUBJECT: &str = "media.files";
const DURABLE: &str = "transcode";

fn some(number: u32) -> NonZeroU32 {
    NonZeroU32::new(number).unwrap()
}

/// A consumer that notices within a second that its worker is gone.
fn quick() -> Options {
    Options {
        ack_wait: Duration::from_secs(1),
        heartbeat: Duration::from_millis(300),
        fetch_timeout: Duration::from_millis(300),
        default_kind: Some("transcode".into()),
        ..Options::new(STREAM, SUBJECT, DURABLE, some(1000))
    }
}

/// The same, with time for a slow machine to keep what runs.
fn steady() -> Options {
    Options { ack_wait: Duration::from_secs(2), ..quick() }
}

/// A consumer that waits long.
fn patient() -> Options {
    let (ack_wait, heartbeat) = (HOUR * 2, Duration::from_secs(60));
    Options { ack_wait, heartbeat, ..quick() }
}

async fn open(server: &Server, options: Options) -> JetStream {
    JetStream::open(&server.url(), options, None).await.unwrap()
}

async fn refused(server: &Server, options: Options) -> String {
    match JetStream::open(&server.url(), options, None).await {
        Err(JobsError::Invalid(why)) => why,
        other => panic!("it was to be refused: {other:?}"),
    }
}

/// Somebody who knows nothing of us.
async fn stranger(server: &Server) -> Context {
    async_nats::jetstream::new(async_nats::connect(server.url()).await.unwrap())
}

async fn publish(context: &Context, body: &'static [u8]) {
    context.publish(SUBJECT, body.into()).await.unwrap().await.unwrap();
}

fn wanted(room: u32) -> Wanted<'static> {
    let lease = quick().ack_wait;
    Wanted { queue: DEFAULT_QUEUE, worker: "anna", room, capacity: 1000, lease }
}

async fn take(jobs: &JetStream, room: u32) -> Vec<Given> {
    jobs.take(&wanted(room)).await.unwrap().jobs
}

/// Waits until there is one to take, and takes it alone.
async fn comes(jobs: &JetStream) -> Given {
    let ear = Ear::default();
    soon("a job comes", async {
        loop {
            if let Some(job) = take(jobs, 1).await.pop() {
                return job;
            }
            jobs.woken(DEFAULT_QUEUE, &ear).await;
        }
    })
    .await
}

async fn settle(jobs: &JetStream, claim: Claim, fate: Fate) -> Settled {
    jobs.settle(&[(claim, fate)]).await.unwrap()[0]
}

/// How many messages a stream holds.
async fn count(context: &Context, stream: &str) -> u64 {
    context.get_stream(stream).await.unwrap().cached_info().state.messages
}

/// The headers and the body of the dead letter with this number.
async fn dead_letter(context: &Context, number: u64) -> (BTreeMap<String, String>, String) {
    let stream = context.get_stream("MEDIA_DEAD").await.unwrap();
    let letter = stream.get_raw_message(number).await.unwrap();
    let headers = letter.headers.iter().map(|(name, values)| {
        (AsRef::<str>::as_ref(name).to_owned(), values[0].as_str().to_owned())
    });
    (headers.collect(), String::from_utf8_lossy(&letter.payload).into_owned())
}

// --- the suite ------------------------------------------------------------------------------------

/// One stream per queue, as one cannot be several.
struct Streams {
    url: String,
    lease: Duration,
    open: tokio::sync::Mutex<HashMap<String, Arc<JetStream>>>,
}

impl Streams {
    async fn of(&self, queue: &str) -> Arc<JetStream> {
        let mut open = self.open.lock().await;
        if let Some(stream) = open.get(queue) {
            return Arc::clone(stream);
        }
        let name =
            format!("{:x?}", queue.as_bytes()).replace(['[', ']', ' '], "").replace(',', "-");
        let options = Options {
            queue: queue.into(),
            ack_wait: self.lease,
            heartbeat: self.lease / 4,
            fetch_batch: some(1000),
            dead_stream: format!("{name}_DEAD"),
            stream: name.clone(),
            subject: format!("jobs.{name}"),
            ..quick()
        };
        let stream = JetStream::open(&self.url, options, None).await.unwrap();
        Arc::clone(open.entry(queue.into()).or_insert_with(|| Arc::new(stream)))
    }
}

#[async_trait]
impl Jobs for Streams {
    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, JobsError> {
        let queues: HashSet<&str> = jobs.iter().map(|job| job.queue.as_str()).collect();
        if let [queue] = queues.into_iter().collect::<Vec<_>>()[..] {
            jobs[0].check()?;
            return self.of(queue).await.enqueue(jobs).await;
        }
        let mut all = Vec::new();
        jobs.iter().try_for_each(NewJob::check)?;
        for job in jobs {
            all.extend(self.of(&job.queue).await.enqueue(std::slice::from_ref(job)).await?);
        }
        Ok(all)
    }

    async fn take(&self, wanted: &Wanted<'_>) -> Result<Taken, JobsError> {
        let wanted = Wanted { lease: wanted.lease.min(self.lease), ..*wanted };
        self.of(wanted.queue).await.take(&wanted).await
    }

    async fn keep(&self, held: &[(Claim, Note)]) -> Result<Vec<Kept>, JobsError> {
        self.of(DEFAULT_QUEUE).await.keep(held).await
    }

    async fn settle(&self, ended: &[(Claim, Fate)]) -> Result<Vec<Settled>, JobsError> {
        let mut settled = self.of(DEFAULT_QUEUE).await.settle(ended).await?;
        // Whose it is only its stream knows.
        for other in self.open.lock().await.values() {
            for (settled, told) in settled.iter_mut().zip(other.settle(ended).await?) {
                if *settled == Settled::Stale {
                    *settled = told;
                }
            }
        }
        Ok(settled)
    }

    async fn woken(&self, queue: &str, ear: &Ear) -> Woken {
        self.of(queue).await.woken(queue, ear).await
    }
}

/// A server with streams whose leases last so many milliseconds: they are the consumer's.
struct Place<const LEASE: u64> {
    server: Arc<Server>,
    jobs: Arc<Streams>,
}

const AN_HOUR: u64 = 3_600_000;
const A_SECOND: u64 = 1000;
const A_MOMENT: u64 = 400;

impl<const LEASE: u64> Place<LEASE> {
    fn at(server: Arc<Server>) -> Self {
        let lease = Duration::from_millis(LEASE);
        let jobs = Streams { url: server.url(), lease, open: tokio::sync::Mutex::default() };
        Self { server, jobs: Arc::new(jobs) }
    }
}

impl<const LEASE: u64> World for Place<LEASE> {
    type Jobs = Streams;

    /// Who was answered is not answered again.
    const REMEMBERS_ENDS: bool = false;

    async fn new() -> Self {
        // The largest payload and its headers are more than the million that is usual.
        Self::at(Arc::new(Server::start_with("max_payload: 2MB").await))
    }

    async fn neighbour(&self) -> Self {
        Self::at(Arc::clone(&self.server))
    }

    async fn reopened(self) -> Self {
        let server = Arc::clone(&self.server);
        drop(self);
        Self::at(server)
    }

    fn jobs(&self) -> &Arc<Streams> {
        &self.jobs
    }
}

// All stories for every backend but the one that needs unique keys, which streams refuse.
mod with_long_leases {
    stories! { crate::Place<{ crate::AN_HOUR }>;
        jobs {
            the_largest_payload_comes_out_whole
            many_are_taken_on_all_or_none
            each_queue_hands_out_its_own
            a_take_fills_its_room_by_cost_and_the_last_may_overshoot
            what_costs_more_than_the_capacity_counts_as_the_capacity
            many_who_take_at_once_share_what_is_due
            a_take_says_whether_there_may_be_more
            what_is_to_be_tried_again_or_later_comes_back_then_and_not_before
            what_is_released_comes_back_at_once
            many_are_kept_and_settled_each_by_its_own_claim
            an_end_that_is_told_twice_does_no_harm
            everybody_who_waits_is_woken_by_new_jobs
            what_is_put_back_wakes_who_waits
            what_happened_before_somebody_waits_wakes_them_too
        }
    }
}

mod with_short_leases {
    stories! { crate::Place<{ crate::A_MOMENT }>;
        jobs {
            a_kept_job_is_handed_out_to_nobody_else
            a_job_that_is_not_kept_goes_to_another_and_its_first_worker_has_lost_it
            what_is_done_or_dead_is_not_handed_out_again
            no_job_is_lost_by_a_restart
        }
    }
}

mod at_work {
    stories! { crate::Place<{ crate::A_SECOND }>;
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
}

// --- the consumer ---------------------------------------------------------------------------------

async fn consumer(context: &Context) -> async_nats::jetstream::consumer::Info {
    let stream = context.get_stream_no_info(STREAM).await.unwrap();
    stream.consumer_info(DURABLE).await.unwrap()
}

#[tokio::test]
async fn the_stream_and_its_durable_pull_consumer_are_made_as_configured() {
    let server = Server::start().await;
    let jobs = open(&server, Options::new(STREAM, SUBJECT, DURABLE, some(14))).await;
    let context = stranger(&server).await;
    let found = consumer(&context).await.config;
    let seconds = Duration::from_secs;
    assert_eq!(found.durable_name.as_deref(), Some(DURABLE));
    assert_eq!((found.deliver_subject, found.ack_policy), (None, AckPolicy::Explicit));
    assert_eq!((found.ack_wait, found.max_ack_pending), (seconds(300), 14));
    assert_eq!((found.max_deliver, found.backoff), (-1, vec![]));
    assert_eq!(found.filter_subject, SUBJECT);
    let defaults = Options::new(STREAM, SUBJECT, DURABLE, some(14));
    assert_eq!(defaults.heartbeat, seconds(30));
    assert_eq!((defaults.fetch_batch.get(), defaults.fetch_timeout), (5, seconds(2)));
    let stream = context.get_stream(STREAM).await.unwrap().cached_info().config.clone();
    assert_eq!(
        (stream.retention, stream.storage),
        (stream::RetentionPolicy::WorkQueue, stream::StorageType::File)
    );
    let warned = |of: &str| jobs.warnings().iter().any(|warning| warning.contains(of));
    assert!(warned("one replica") && warned("sync_interval"), "{:?}", jobs.warnings());
    // Who comes later finds all as it should be.
    open(&server, Options::new(STREAM, SUBJECT, DURABLE, some(14))).await;
}

#[tokio::test]
async fn what_would_deliver_live_work_again_is_refused() {
    let server = Server::start().await;
    let of = |ack_wait: u64, heartbeat: u64| Options {
        ack_wait: Duration::from_secs(ack_wait),
        heartbeat: Duration::from_secs(heartbeat),
        ..quick()
    };
    for (ack_wait, heartbeat) in [(30, 30), (30, 11), (0, 0), (30, 0)] {
        let why = refused(&server, of(ack_wait, heartbeat)).await;
        assert!(why.contains("heartbeat") && why.contains("ack wait"), "{why}");
    }
    of(30, 10).check().unwrap();
    for options in [
        Options { stream: "a.b".into(), ..quick() },
        Options { stream: String::new(), ..quick() },
        Options { durable: "a b".into(), ..quick() },
        Options { subject: "a..b".into(), ..quick() },
        Options { subject: String::new(), ..quick() },
        Options { dead_stream: STREAM.into(), ..quick() },
        Options { queue: "no queue".into(), ..quick() },
        Options { default_kind: Some("no kind".into()), ..quick() },
        Options { fetch_timeout: Duration::ZERO, ..quick() },
    ] {
        assert!(matches!(options.check(), Err(JobsError::Invalid(_))), "{options:?}");
    }
}

#[tokio::test]
async fn a_consumer_that_differs_is_refused_by_field_wanted_and_found() {
    let server = Server::start().await;
    drop(open(&server, quick()).await);
    let context = stranger(&server).await;
    let stream = context.get_stream(STREAM).await.unwrap();
    let good = pull::Config {
        durable_name: Some(DURABLE.into()),
        ack_policy: AckPolicy::Explicit,
        ack_wait: quick().ack_wait,
        filter_subject: SUBJECT.into(),
        max_ack_pending: 1000,
        ..pull::Config::default()
    };
    let second = Duration::from_secs;
    for (config, field, wanted, found) in [
        (pull::Config { ack_wait: second(30), ..good.clone() }, "ack_wait", "1s", "30s"),
        (pull::Config { max_deliver: 3, ..good.clone() }, "max_deliver", "-1", "3"),
        (pull::Config { headers_only: true, ..good.clone() }, "headers_only", "false", "true"),
        (
            pull::Config { filter_subject: String::new(), ..good.clone() },
            "filter_subject",
            SUBJECT,
            "",
        ),
        (
            pull::Config { backoff: vec![second(1), second(5)], max_deliver: 5, ..good.clone() },
            "backoff",
            "[]",
            "[1s, 5s]",
        ),
    ] {
        stream.delete_consumer(DURABLE).await.unwrap();
        stream.create_consumer(config).await.unwrap();
        let why = refused(&server, quick()).await;
        let told = format!("another {field}: wanted {wanted}, found {found}");
        assert!(why.contains(&told) && why.contains(DURABLE), "{why}");
    }
}

#[tokio::test]
async fn a_stream_that_cannot_keep_the_jobs_is_refused_by_what_differs() {
    let server = Server::start().await;
    let context = stranger(&server).await;
    let of = |name: &str, subject: &str, no_ack: bool| stream::Config {
        name: name.into(),
        subjects: vec![subject.into(), format!("{subject}.more")],
        no_ack,
        ..stream::Config::default()
    };
    let dead = "vedetta.dead.MEDIA";
    let elsewhere = stream::Source { name: "ELSEWHERE".into(), ..stream::Source::default() };
    context.create_stream(of("ELSEWHERE", "elsewhere", false)).await.unwrap();
    for (found, told) in [
        (
            stream::Config {
                mirror: Some(elsewhere),
                subjects: Vec::new(),
                ..of("MEDIA_DEAD", dead, false)
            },
            "stream MEDIA_DEAD has other subjects: wanted vedetta.dead.MEDIA, found ",
        ),
        (
            of(STREAM, "media.other", false),
            "stream MEDIA has other subjects: wanted media.files, found media.other, media.other.more",
        ),
        (of(STREAM, SUBJECT, true), "stream MEDIA has another no_ack: wanted false, found true"),
        (
            of("MEDIA_DEAD", "dead.letters", false),
            "stream MEDIA_DEAD has other subjects: wanted vedetta.dead.MEDIA, found dead.letters, \
             dead.letters.more",
        ),
        (
            of("MEDIA_DEAD", dead, true),
            "stream MEDIA_DEAD has another no_ack: wanted false, found true",
        ),
    ] {
        context.create_stream(found).await.unwrap();
        let why = refused(&server, quick()).await;
        assert_eq!(why, format!("the {told}"));
        for name in [STREAM, "MEDIA_DEAD"] {
            drop(context.delete_stream(name).await); // which may not have been made
        }
    }
    // What is wider will do.
    context.create_stream(of(STREAM, "media.*", false)).await.unwrap();
    context.create_stream(of("MEDIA_DEAD", "vedetta.dead.*", false)).await.unwrap();
    open(&server, quick()).await;
}

#[tokio::test]
async fn max_ack_pending_is_raised_and_never_lowered() {
    let server = Server::start().await;
    let of = |most: u32| Options { max_ack_pending: some(most), ..quick() };
    let context = stranger(&server).await;
    for (asked, found) in [(14, 14), (42, 42), (14, 42)] {
        let jobs = open(&server, of(asked)).await;
        assert_eq!(consumer(&context).await.config.max_ack_pending, found);
        let warned =
            jobs.warnings().iter().any(|warning| warning.contains("max_ack_pending of 42"));
        assert_eq!(warned, i64::from(asked) < found);
    }
}

#[tokio::test]
async fn settings_that_can_lose_jobs_are_told() {
    let server = Server::start().await;
    let context = stranger(&server).await;
    let lossy = stream::Config {
        name: STREAM.into(),
        subjects: vec!["media.>".into()],
        storage: stream::StorageType::Memory,
        max_age: Duration::from_secs(3600),
        max_messages: 1000,
        retention: stream::RetentionPolicy::Interest,
        ..stream::Config::default()
    };
    context.create_stream(lossy).await.unwrap();
    let jobs = open(&server, quick()).await;
    for risk in ["in memory", "max_age of 1h", "max_msgs of 1000", "interested in"] {
        let told = jobs.warnings().iter().any(|told| told.contains(risk) && told.contains(STREAM));
        assert!(told, "{risk}: {:?}", jobs.warnings());
    }
}

#[tokio::test]
async fn no_more_is_pulled_than_there_is_room_for() {
    let server = Server::start().await;
    let jobs = open(&server, patient()).await;
    let context = stranger(&server).await;
    jobs.enqueue(&vec![NewJob::new("transcode"); 40]).await.unwrap();
    assert_eq!(take(&jobs, 3).await.len(), 3);
    assert_eq!(consumer(&context).await.num_ack_pending, 3);
    let more = take(&jobs, 14).await.len();
    assert!((1..=14).contains(&more), "{more}");
    let pending = consumer(&context).await.num_ack_pending;
    assert!(pending <= 3 + 14, "{pending}");
}

#[tokio::test]
async fn a_pull_asks_for_as_many_and_waits_as_long_as_configured() {
    let server = Server::start().await;
    let client = async_nats::connect(server.url()).await.unwrap();
    let asked = format!("$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{DURABLE}");
    let mut pulls = client.subscribe(asked).await.unwrap();
    client.flush().await.unwrap();
    let fetch_timeout = Duration::from_millis(700);
    let options = Options { fetch_batch: some(3), fetch_timeout, ..patient() };
    let jobs = open(&server, options).await;
    jobs.enqueue(&vec![NewJob::new("film"); 9]).await.unwrap();
    take(&jobs, 100).await;
    // The first tells what one costs.
    for batch in [1, 3] {
        let pull = soon("a pull", pulls.next()).await.unwrap().payload;
        let pull: serde_json::Value = serde_json::from_slice(&pull).unwrap();
        assert_eq!((&pull["batch"], &pull["expires"]), (&batch.into(), &700_000_000.into()));
    }
}

#[tokio::test]
async fn of_two_pulls_that_are_open_at_once_every_job_comes_once_and_the_next_at_once() {
    const JOBS: usize = 1100;
    const MOST: usize = 600;
    let server = Server::start().await;
    let context = stranger(&server).await;
    // No more is delivered than that at a time, so that the first pull goes on when the second is opened. What is left
    // is more than the first asks for: else the server would refuse the second.
    let options = Options {
        fetch_batch: some(1000),
        fetch_timeout: PATIENCE,
        max_ack_pending: some(u32::try_from(MOST).unwrap()),
        ..patient()
    };
    let jobs = open(&server, options).await;
    jobs.enqueue(&vec![NewJob::new("film"); JOBS]).await.unwrap();
    let ear = Ear::default();
    let take = async |held: usize| {
        let room = u32::try_from(2000 - held).unwrap();
        jobs.take(&Wanted { capacity: 2000, ..wanted(room) }).await.unwrap().jobs
    };
    let take_all = async |mut held: Vec<Given>, all: usize| {
        soon("they come", async {
            while held.len() < all {
                held.extend(take(held.len()).await);
                if held.len() < all {
                    jobs.woken(DEFAULT_QUEUE, &ear).await;
                }
            }
        })
        .await;
        held.into_iter().map(|given| (given.claim, done())).collect::<Vec<_>>()
    };
    let first = take_all(Vec::new(), MOST).await;
    assert!(take(MOST).await.is_empty());
    assert_eq!(consumer(&context).await.num_waiting, 2, "pulls that are open at once");
    assert_eq!(jobs.overlapping_pulls(), 1);

    assert_eq!(jobs.settle(&first).await.unwrap(), [Settled::Gone; MOST]);
    let rest = take_all(Vec::new(), JOBS - MOST).await;
    assert_eq!(jobs.settle(&rest).await.unwrap(), [Settled::Gone; JOBS - MOST]);
    let delivered: HashSet<_> = first.iter().chain(&rest).map(|(claim, _)| claim.id).collect();
    assert_eq!(delivered.len(), JOBS);
    let info = consumer(&context).await;
    assert_eq!((info.delivered.consumer_sequence, info.num_redelivered), (JOBS as u64, 0));

    let began = Instant::now();
    publish(&context, b"{}").await;
    assert_eq!(take_all(Vec::new(), 1).await.len(), 1);
    assert!(began.elapsed() < PATIENCE / 12, "it waited for {:?}", began.elapsed());
    assert!(consumer(&context).await.num_waiting <= 1);
}

#[tokio::test]
async fn after_a_connection_was_lost_the_server_has_no_more_pulls_than_are_open_here() {
    let server = Server::start().await;
    let context = stranger(&server).await;
    let link = Proxy::to(server.address()).await;
    let options = Options { fetch_timeout: Duration::from_secs(2), ..steady() };
    let fetch_timeout = options.fetch_timeout;
    let asker = open(&server, options.clone()).await;
    let url = format!("nats://{}", link.address());
    let jobs = Arc::new(JetStream::open(&url, options, None).await.unwrap());
    let working = start(worker(1, Duration::ZERO, &Arc::default()), &jobs);
    asker.enqueue(&[NewJob::new("film")]).await.unwrap();
    eventually("it is done", async || working.status().flow.done == 1).await;
    for done in 2..5 {
        eventually("a pull waits", async || consumer(&context).await.num_waiting == 1).await;
        // Nobody asks for the consumer meanwhile: the server would notice that nobody is there.
        link.cut();
        link.hang_up();
        eventually("it is noticed", async || jobs.take(&wanted(0)).await.is_err()).await;
        link.mend();
        eventually("they are connected", async || jobs.take(&wanted(0)).await.is_ok()).await;
        asker.enqueue(&[NewJob::new("film")]).await.unwrap();
        eventually("it is done", async || working.status().flow.done == done).await;
    }
    let until = Instant::now() + fetch_timeout * 3;
    while Instant::now() < until {
        let waiting = consumer(&context).await.num_waiting;
        assert!(waiting <= 1, "{waiting} pulls are open");
    }
    // A server that has not noticed yet that somebody is gone may deliver to them, and again when their time is over.
    let info = consumer(&context).await;
    assert_eq!((info.num_ack_pending, info.num_pending, info.num_redelivered), (0, 0, 0));
    assert_eq!(working.status().flow.done, 4);
}

#[tokio::test]
async fn what_is_pulled_and_finds_no_room_goes_to_somebody_else() {
    let server = Server::start().await;
    let (busy, idle) = (open(&server, quick()).await, open(&server, quick()).await);
    let large = NewJob { cost: 10, ..NewJob::new("transcode") };
    let ids = busy.enqueue(&[large, NewJob::new("transcode")]).await.unwrap();
    let given = take(&busy, 10).await;
    assert_eq!(given.iter().map(|given| given.claim.id).collect::<Vec<_>>(), [ids[0].id]);
    soon("the other gets it while the first is busy", async {
        while comes(&idle).await.claim.id != ids[1].id {
            busy.keep(&[(given[0].claim, Note::default())]).await.unwrap();
        }
    })
    .await;
}

// --- messages as jobs -----------------------------------------------------------------------------

#[tokio::test]
async fn jobs_come_out_of_a_stream_as_they_went_in() {
    let server = Server::start().await;
    let jobs = open(&server, patient()).await;
    let job = NewJob {
        cost: 64,
        max_attempts: 9,
        timeout: Some(Duration::from_millis(21_600_001)),
        tags: vec!["eu".into(), "film:1/a".into()],
        trace: Some(Trace::new(0xabc, 0xdef, true)),
        ..NewJob::new("mail/send:v1.2-b").payload(&serde_json::json!({ "to": "Zoë" })).unwrap()
    };
    jobs.enqueue(std::slice::from_ref(&job)).await.unwrap();
    let given = comes(&jobs).await;
    assert_eq!((&given.kind, given.payload.get()), (&job.kind, job.payload.get()));
    assert_eq!((given.cost, given.max_attempts, given.attempt), (64, 9, 1));
    assert_eq!((given.timeout, given.tags, given.trace), (job.timeout, job.tags, job.trace));
}

#[tokio::test]
async fn a_message_of_a_stranger_is_a_job_of_the_default_kind() {
    let server = Server::start().await;
    let jobs = open(&server, patient()).await;
    let context = stranger(&server).await;
    for (body, payload) in [
        (br#" {"Key": "film.mp4"} "#.as_slice(), r#"{"Key": "film.mp4"}"#),
        (b"film.mp4", r#""film.mp4""#),
        (b"", r#""""#),
        (b"{\"half\":", r#""{\"half\":""#),
        (b"\xff\x00", r#"{"base64":"/wA="}"#),
    ] {
        publish(&context, body).await;
        let given = comes(&jobs).await;
        assert_eq!((given.kind.as_str(), given.payload.get()), ("transcode", payload));
        assert_eq!((given.cost, given.attempt, given.timeout), (1, 1, None));
        assert_eq!(settle(&jobs, given.claim, done()).await, Settled::Gone);
    }
    assert_eq!(count(&context, STREAM).await, 0);
}

#[tokio::test]
async fn what_a_message_does_not_say_its_kind_does() {
    let server = Server::start().await;
    let costs = [("small".to_owned(), 2), ("large".to_owned(), 8)].into();
    let kind = Kind {
        queue: DEFAULT_QUEUE.into(),
        cost: Cost::From { field: "size".into(), costs },
        max_attempts: 2,
        timeout: Some(HOUR),
    };
    let kinds = Kinds([("transcode".to_owned(), kind)].into());
    let jobs = open(&server, Options { kinds, ..patient() }).await;
    let context = stranger(&server).await;
    publish(&context, br#"{"size": "large"}"#).await;
    let given = comes(&jobs).await;
    assert_eq!((given.cost, given.max_attempts, given.timeout), (8, 2, Some(HOUR)));
    assert_eq!(settle(&jobs, given.claim, done()).await, Settled::Gone);
    // What it says itself counts.
    let mut headers = async_nats::HeaderMap::new();
    headers.insert("Vedetta-Cost", "3");
    headers.insert("Vedetta-Timeout", "1m");
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    headers.insert("traceparent", trace);
    context.publish_with_headers(SUBJECT, headers, "{}".into()).await.unwrap().await.unwrap();
    let given = comes(&jobs).await;
    assert_eq!((given.cost, given.timeout), (3, Some(Duration::from_secs(60))));
    assert_eq!(given.trace.map(|trace| trace.to_string()).as_deref(), Some(trace));
    assert_eq!(settle(&jobs, given.claim, done()).await, Settled::Gone);
    // What cannot be told is no job.
    publish(&context, br#"{"size": "huge"}"#).await;
    eventually("it is a dead letter", async || {
        assert!(take(&jobs, 10).await.is_empty());
        count(&context, "MEDIA_DEAD").await == 1
    })
    .await;
}

#[tokio::test]
async fn a_message_that_is_no_job_is_a_dead_letter_that_says_why() {
    let server = Server::start().await;
    let jobs = open(&server, Options { default_kind: None, ..quick() }).await;
    let context = stranger(&server).await;
    let faults = [
        ("Vedetta-Cost", "much"),
        ("Vedetta-Cost", "0"),
        ("Vedetta-Max-Attempts", "-1"),
        ("Vedetta-Timeout", "0s"),
        ("Vedetta-Kind", "no kind"),
    ];
    for (name, value) in faults {
        let mut headers = async_nats::HeaderMap::new();
        headers.insert("Vedetta-Kind", "transcode");
        headers.insert(name, value);
        context.publish_with_headers(SUBJECT, headers, "x".into()).await.unwrap().await.unwrap();
    }
    publish(&context, b"no headers").await;
    eventually("all are dead letters", async || {
        assert!(take(&jobs, 10).await.is_empty());
        count(&context, "MEDIA_DEAD").await == 6 && count(&context, STREAM).await == 0
    })
    .await;
    let mut errors = Vec::new();
    for number in 1..=6 {
        let (headers, _) = dead_letter(&context, number).await;
        assert_eq!(headers["Vedetta-Dead-Reason"], "unreadable");
        errors.push(headers["Vedetta-Dead-Error"].clone());
    }
    for (name, value) in &faults[..4] {
        let told = |error: &String| error.contains(name) && error.contains(value);
        assert!(errors.iter().any(told), "{name} {value}: {errors:?}");
    }
    assert!(errors.iter().any(|error| error.contains("no header Vedetta-Kind")), "{errors:?}");
}

#[tokio::test]
async fn what_streams_cannot_do_is_refused() {
    let server = Server::start().await;
    let jobs = open(&server, quick()).await;
    let job = || NewJob::new("transcode");
    let tomorrow = std::time::SystemTime::now() + Duration::from_secs(86_400);
    for (job, why) in [
        (job().unique("key"), "unique_key"),
        (NewJob { priority: 1, ..job() }, "priority"),
        (job().when(When::After(Duration::from_secs(1))), "run_at"),
        (job().when(When::At(tomorrow)), "run_at"),
        (job().queue("other"), "other"),
        (job().payload(&"x".repeat(1024 * 1024 - 100)).unwrap(), "bytes"),
    ] {
        match jobs.enqueue(&[NewJob::new("good"), job]).await {
            Err(JobsError::Invalid(told)) => assert!(told.contains(why), "{told}"),
            other => panic!("{why}: {other:?}"),
        }
    }
    for wrong in [
        Wanted { lease: quick().ack_wait * 2, ..wanted(1) },
        Wanted { queue: "other", ..wanted(1) },
    ] {
        assert!(matches!(jobs.take(&wrong).await, Err(JobsError::Invalid(_))), "{wrong:?}");
    }
    assert!(take(&jobs, 10).await.is_empty(), "none of a batch was taken on");
    jobs.enqueue(&[job().when(When::At(std::time::UNIX_EPOCH))]).await.unwrap();
    comes(&jobs).await;
}

// --- ends -----------------------------------------------------------------------------------------

#[tokio::test]
async fn what_fails_for_good_is_a_dead_letter_before_it_is_gone() {
    let server = Server::start().await;
    let jobs = open(&server, patient()).await;
    let context = stranger(&server).await;
    let error = || "no such\r\norder ✗".to_owned();
    let dead = Fate::Dead { error: error() };
    let again = Fate::Again { after: Duration::ZERO, error: error() };
    let ends = [
        (2, dead.clone(), "failed"),
        (1, dead, "failed-too-often"),
        (1, again, "failed-too-often"),
    ];
    for (number, (max_attempts, fate, reason)) in (1..).zip(ends) {
        let job = NewJob { max_attempts, ..NewJob::new("mail") };
        jobs.enqueue(&[job.payload(&number).unwrap()]).await.unwrap();
        let claim = comes(&jobs).await.claim;
        assert_eq!(settle(&jobs, claim, fate).await, Settled::Parked);
        let (headers, found) = dead_letter(&context, number).await;
        assert_eq!(found, number.to_string());
        for (name, value) in [
            ("Vedetta-Kind", "mail"),
            ("Vedetta-Max-Attempts", max_attempts.to_string().as_str()),
            ("Vedetta-Dead-Reason", reason),
            ("Vedetta-Dead-Error", "no such  order ✗"),
            ("Vedetta-Dead-Stream", STREAM),
            ("Vedetta-Dead-Subject", SUBJECT),
            ("Vedetta-Dead-Sequence", number.to_string().as_str()),
            ("Vedetta-Dead-Deliveries", "1"),
        ] {
            assert_eq!(headers.get(name).map(String::as_str), Some(value), "{name}");
        }
    }
    assert_eq!(count(&context, STREAM).await, 0);
}

#[tokio::test]
async fn what_kills_its_workers_is_a_dead_letter_after_its_last_attempt() {
    let server = Server::start().await;
    let context = stranger(&server).await;
    let jobs = open(&server, quick()).await;
    let job = NewJob { max_attempts: 2, ..NewJob::new("poison") };
    jobs.enqueue(&[job]).await.unwrap();
    assert_eq!(comes(&jobs).await.attempt, 1);
    let other = open(&server, quick()).await;
    assert_eq!(comes(&other).await.attempt, 2);
    eventually("it is a dead letter", async || {
        assert!(take(&jobs, 1).await.is_empty(), "it had its attempts");
        count(&context, "MEDIA_DEAD").await == 1 && count(&context, STREAM).await == 0
    })
    .await;
    let (headers, _) = dead_letter(&context, 1).await;
    assert_eq!(headers["Vedetta-Dead-Reason"], "worker-gone");
    assert_eq!(headers["Vedetta-Dead-Error"], "its worker went away");
    assert_eq!(headers["Vedetta-Dead-Deliveries"], "3");
}

#[tokio::test]
async fn what_is_snoozed_or_released_was_no_attempt() {
    let server = Server::start().await;
    let jobs = open(&server, patient()).await;
    jobs.enqueue(&[NewJob { max_attempts: 1, ..NewJob::new("poll") }]).await.unwrap();
    for fate in
        [Fate::Snooze(Duration::from_millis(10)), Fate::Released, Fate::Snooze(Duration::ZERO)]
    {
        let given = comes(&jobs).await;
        assert_eq!(given.attempt, 1);
        settle(&jobs, given.claim, fate).await;
    }
    assert_eq!(comes(&jobs).await.attempt, 1);
}

#[tokio::test]
async fn an_end_that_comes_too_late_is_refused() {
    let server = Server::start().await;
    let jobs = open(&server, quick()).await;
    jobs.enqueue(&[NewJob::new("slow")]).await.unwrap();
    let late = comes(&jobs).await.claim;
    // It comes back to the same worker, too.
    let again = comes(&jobs).await;
    assert_eq!((again.claim.id, again.attempt), (late.id, 2));
    assert_eq!(jobs.keep(&[(late, Note::default())]).await.unwrap(), [Kept::Lost]);
    assert_eq!(settle(&jobs, late, done()).await, Settled::Stale);
    // Nobody has it yet, but somebody may.
    tokio::time::sleep(quick().ack_wait).await;
    assert_eq!(settle(&jobs, again.claim, done()).await, Settled::Stale);
    comes(&jobs).await;
}

// --- workers --------------------------------------------------------------------------------------

/// A worker who takes this long over each film, and counts those that were begun.
fn worker(capacity: u32, time: Duration, begun: &Arc<AtomicU32>) -> Worker {
    let begun = Arc::clone(begun);
    let worker = Worker::new(DEFAULT_QUEUE).capacity(some(capacity));
    let worker = worker.lease(steady().ack_wait).heartbeat(steady().heartbeat);
    worker.handler("film", move |_: Work, (): ()| {
        begun.fetch_add(1, Ordering::Relaxed);
        async move {
            tokio::time::sleep(time).await;
            Ok::<_, BoxError>(())
        }
    })
}

fn start(worker: Worker, jobs: &Arc<JetStream>) -> Working {
    worker.start(Arc::clone(jobs) as Arc<dyn Jobs>).unwrap()
}

#[tokio::test]
async fn a_job_that_runs_for_many_ack_waits_is_delivered_once_and_again_when_its_worker_dies() {
    let server = Server::start().await;
    let context = stranger(&server).await;
    let (jobs, begun) = (Arc::new(open(&server, steady()).await), Arc::default());
    let first = start(worker(2, Duration::from_secs(7), &begun), &jobs);
    jobs.enqueue(&[NewJob::new("film")]).await.unwrap();
    eventually("it is done", async || first.status().flow.done == 1).await;
    assert_eq!(begun.load(Ordering::Relaxed), 1, "it was delivered again while it ran");
    assert_eq!(consumer(&context).await.delivered.consumer_sequence, 1);

    jobs.enqueue(&[NewJob::new("film")]).await.unwrap();
    eventually("it runs", async || begun.load(Ordering::Relaxed) == 2).await;
    let others = Arc::new(open(&server, steady()).await);
    let second = start(worker(2, Duration::ZERO, &begun), &others);
    drop((first, jobs));
    let gone = SystemTime::now();
    eventually("another does it", async || second.status().flow.done == 1).await;
    assert_eq!(count(&context, STREAM).await, 0);
    let delivered = consumer(&context).await.delivered;
    assert_eq!(delivered.consumer_sequence, 3);
    let again: SystemTime = delivered.last_active.unwrap().into();
    let late = again.duration_since(gone).unwrap_or_default();
    assert!(late < 5 * steady().ack_wait, "delivered {late:?} later");
}

#[tokio::test]
async fn nothing_is_delivered_again_while_work_waits_for_slots() {
    let server = Server::start().await;
    let context = stranger(&server).await;
    let jobs = Arc::new(open(&server, steady()).await);
    jobs.enqueue(&vec![NewJob::new("film"); 8]).await.unwrap();
    let working = start(worker(2, Duration::from_millis(2500), &Arc::default()), &jobs);
    eventually("all are done", async || working.status().flow.done == 8).await;
    assert_eq!(consumer(&context).await.delivered.consumer_sequence, 8);
}

#[tokio::test]
async fn jobs_that_cost_all_slots_are_pulled_one_at_a_time_from_the_first_on() {
    let server = Server::start().await;
    let context = stranger(&server).await;
    let jobs = Arc::new(open(&server, steady()).await);
    let film = NewJob { cost: 2, ..NewJob::new("film") };
    jobs.enqueue(&vec![film; 4]).await.unwrap();
    // Each takes longer than what was pulled is kept for a slot.
    let working = start(worker(2, steady().heartbeat * 2, &Arc::default()), &jobs);
    eventually("all are done", async || working.status().flow.done == 4).await;
    assert_eq!(consumer(&context).await.delivered.consumer_sequence, 4);
}

#[tokio::test]
async fn what_a_worker_that_stops_had_not_finished_goes_to_another_at_once() {
    let server = Server::start().await;
    let (jobs, begun) = (Arc::new(open(&server, patient()).await), Arc::default());
    let first = start(worker(2, HOUR, &begun), &jobs);
    jobs.enqueue(&vec![NewJob::new("film"); 3]).await.unwrap();
    eventually("two run", async || begun.load(Ordering::Relaxed) == 2).await;
    assert_eq!(first.stop(Duration::ZERO).await, 2);
    // The first still has its connection: it must not get back what it gave.
    let others = Arc::new(open(&server, patient()).await);
    let second = start(worker(3, Duration::ZERO, &begun), &others);
    eventually("another does them", async || second.status().flow.done == 3).await;
}

#[tokio::test]
async fn nothing_that_was_acknowledged_is_lost_when_the_server_is_killed() {
    let mut server = Server::start().await;
    let seen: Arc<Mutex<HashSet<JobId>>> = Arc::default();
    let jobs = Arc::new(open(&server, steady()).await);
    let notes = Arc::clone(&seen);
    let working =
        worker(14, Duration::ZERO, &Arc::default()).handler("seen", move |work: Work, (): ()| {
            notes.lock().insert(work.id());
            async { Ok::<_, BoxError>(()) }
        });
    let working = start(working, &jobs);
    let mut clients = JoinSet::new();
    for _ in 0..4 {
        let jobs = Arc::clone(&jobs);
        clients.spawn(async move {
            let mut acknowledged = Vec::new();
            for _ in 0..150 {
                match jobs.enqueue(&vec![NewJob::new("seen"); 3]).await {
                    Ok(enqueued) => acknowledged.extend(enqueued.into_iter().map(|job| job.id)),
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            acknowledged
        });
    }
    for _ in 0..2 {
        let before = seen.lock().len();
        eventually("it works", async || seen.lock().len() > before + 20).await;
        server.kill();
        server.start_again().await;
    }
    let acknowledged = soon("all is asked for", clients.join_all()).await.concat();
    assert!(acknowledged.len() > 100, "{}", acknowledged.len());
    eventually("all that was acknowledged is done", async || {
        acknowledged.iter().all(|id| seen.lock().contains(id))
    })
    .await;
    let context = stranger(&server).await;
    eventually("and gone", async || count(&context, STREAM).await == 0).await;
    assert_eq!(working.stop(Duration::from_secs(5)).await, 0);
}

#[tokio::test]
async fn a_server_that_is_gone_or_frozen_is_said_to_be() {
    let mut server = Server::start().await;
    let jobs = open(&server, patient()).await;
    jobs.enqueue(&vec![NewJob::new("film"); 2]).await.unwrap();
    let (first, second) = (comes(&jobs).await.claim, comes(&jobs).await.claim);
    server.freeze();
    eventually("it is noticed", async || {
        matches!(jobs.keep(&[(first, Note::default())]).await, Err(JobsError::Unavailable(_)))
    })
    .await;
    server.thaw();
    eventually("it is kept", async || {
        jobs.keep(&[(first, Note::default())]).await.is_ok_and(|kept| kept == [Kept::Ours])
    })
    .await;
    server.kill();
    eventually("it is noticed", async || jobs.keep(&[(first, Note::default())]).await.is_err())
        .await;
    let settled = jobs.settle(&[(first, done())]).await;
    assert!(matches!(settled, Err(JobsError::Unavailable(_))), "{settled:?}");
    assert!(matches!(jobs.take(&wanted(1)).await, Err(JobsError::Unavailable(_))));
    assert!(matches!(jobs.enqueue(&[NewJob::new("x")]).await, Err(JobsError::Unavailable(_))));
    server.start_again().await;
    eventually("told again it is done", async || {
        jobs.settle(&[(first, done()), (second, done())])
            .await
            .is_ok_and(|s| s == [Settled::Gone; 2])
    })
    .await;
    jobs.enqueue(&[NewJob::new("film")]).await.unwrap();
    assert!(comes(&jobs).await.claim.id > second.id);
}

#[tokio::test]
async fn users_and_tokens_are_taken_from_the_url_and_never_told() {
    for (auth, good, bad) in [
        ("user: anna, password: \"pass/word\"", "anna:pass%2Fword@", "anna:wrong-secret@"),
        ("token: topsecret", "topsecret@", "wrong-secret@"),
    ] {
        let server = Server::start_with(&format!("authorization {{ {auth} }}")).await;
        let at = |who: &str| format!("nats://{who}{}", server.address());
        JetStream::open(&at(good), quick(), None).await.unwrap();
        for url in
            [at(bad), format!("http://wrong-secret@{}", server.address()), "wrong-secret@:x".into()]
        {
            let error = JetStream::open(&url, quick(), None).await.unwrap_err();
            let told = format!("{error} {error:?} {}", vedetta_core::explain(&error));
            assert!(!told.contains("wrong-secret"), "{told}");
        }
    }
}

#[tokio::test]
async fn a_monitor_is_told_of_each_step() {
    #[derive(Default)]
    struct Diary(Mutex<Vec<Job>>);
    #[async_trait::async_trait]
    impl Monitor for Diary {
        async fn tell(&self, jobs: &[Job]) -> Result<Vec<bool>, JobsError> {
            self.0.lock().extend_from_slice(jobs);
            Ok(vec![true; jobs.len()])
        }

        async fn ended(
            &self,
            _: &str,
            jobs: &[(JobId, SystemTime)],
        ) -> Result<Vec<Option<Ended>>, JobsError> {
            Ok(vec![None; jobs.len()])
        }
    }
    let server = Server::start().await;
    let diary = Arc::new(Diary::default());
    let monitor: Arc<dyn Monitor> = Arc::clone(&diary) as _;
    let jobs = JetStream::open(&server.url(), patient(), Some(monitor)).await.unwrap();
    jobs.enqueue(&[NewJob::new("film").payload(&7).unwrap()]).await.unwrap();
    let claim = comes(&jobs).await.claim;
    let note = Note { progress: Some(0.5), message: Some("half".into()), log: "a\n".into() };
    jobs.keep(&[(claim, note)]).await.unwrap();
    settle(&jobs, claim, Fate::Again { after: Duration::ZERO, error: "no disk".into() }).await;
    let claim = comes(&jobs).await.claim;
    let result = Some(serde_json::from_str("[1]").unwrap());
    settle(&jobs, claim, Fate::Done { result }).await;
    eventually("all is told", async || diary.0.lock().len() == 6).await;
    let told = diary.0.lock().clone();
    assert!(told.iter().all(|job| job.id == claim.id && job.connection == "nats MEDIA/transcode"));
    assert!(told.iter().all(|job| job.payload.get() == "7" && job.kind == "film"));
    let steps: Vec<_> = told.iter().map(|job| (job.status, job.attempts)).collect();
    let (waiting, running) = (JobState::Waiting, JobState::Running);
    let expected =
        [(waiting, 0), (running, 1), (running, 1), (waiting, 1), (running, 2), (JobState::Done, 2)];
    assert_eq!(steps, expected);
    assert_eq!((told[2].progress, told[2].message.as_deref()), (0.5, Some("half")));
    assert_eq!((told[2].log.as_str(), told[2].worker.as_deref()), ("a\n", Some("anna")));
    assert_eq!(told[3].error.as_deref(), Some("no disk"));
    assert_eq!(told[5].result.as_ref().map(|result| result.get()), Some("[1]"));
    assert!(told[5].ended_at.is_some() && jobs.left_out() == 0);
}

/// The embedded records, and where they are.
async fn records() -> (tempfile::TempDir, Arc<SqliteJobs>) {
    let folder = tempfile::tempdir().unwrap();
    let db = database(folder.path());
    (folder, Arc::new(SqliteJobs::open(db).await.unwrap()))
}

fn database(folder: &std::path::Path) -> vedetta_db::Db {
    let mut options = vedetta_db::Options::new(folder.join("jobs.db"));
    options.ballast = 0;
    vedetta_db::Db::open(&options, &[vedetta_jobs::sqlite::SCHEMA]).unwrap()
}

/// The only record there is.
async fn record(records: &SqliteJobs) -> Job {
    let mut page = records.list(&Filter::default(), None, 10).await.unwrap();
    assert_eq!(page.jobs.len(), 1, "{page:?}");
    page.jobs.remove(0)
}

#[tokio::test]
async fn what_is_told_of_several_jobs_is_there_once_even_if_only_some_are_confirmed() {
    let server = Server::start().await;
    let link = Proxy::to(server.address()).await;
    let (_folder, records) = records().await;
    let monitor: Arc<dyn Monitor> = Arc::clone(&records) as _;
    let url = format!("nats://{}", link.address());
    let jobs = JetStream::open(&url, steady(), Some(monitor)).await.unwrap();
    jobs.enqueue(&vec![NewJob::new("film"); 2]).await.unwrap();
    let claims = [comes(&jobs).await.claim, comes(&jobs).await.claim];
    let mut lines = String::new();
    // With some of these one confirmation comes through, and not the other.
    for bytes in [60, 80, 110, 150] {
        let log = format!("{bytes} bytes\n");
        lines.push_str(&log);
        let told = claims.map(|claim| (claim, Note { log: log.clone(), ..Note::default() }));
        link.allow(bytes);
        let kept = jobs.keep(&told).await;
        link.mend();
        if kept.is_err() {
            assert_eq!(jobs.keep(&told).await.unwrap(), [Kept::Ours; 2]);
        }
    }
    for claim in claims {
        assert_eq!(settle(&jobs, claim, done()).await, Settled::Gone);
    }
    let page = records.list(&Filter::default(), None, 10).await.unwrap();
    let logs: Vec<&str> = page.jobs.iter().map(|job| job.log.as_str()).collect();
    assert_eq!(logs, [&*lines; 2]);
}

/// Records that fail, before or after they have written down an end.
struct Failing {
    records: Arc<SqliteJobs>,
    /// So many ends fail.
    left: AtomicU32,
    writes: bool,
}

#[async_trait]
impl Monitor for Failing {
    async fn tell(&self, jobs: &[Job]) -> Result<Vec<bool>, JobsError> {
        let less = |left: u32| left.checked_sub(1);
        if jobs.iter().any(|job| job.status.is_over())
            && self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
        {
            if self.writes {
                self.records.tell(jobs).await?;
            }
            return Err(JobsError::Unavailable("no answer".into()));
        }
        self.records.tell(jobs).await
    }

    async fn ended(
        &self,
        connection: &str,
        jobs: &[(JobId, SystemTime)],
    ) -> Result<Vec<Option<Ended>>, JobsError> {
        self.records.ended(connection, jobs).await
    }
}

#[tokio::test]
async fn an_end_is_recorded_before_it_is_acknowledged_and_told_again_until_it_is() {
    let server = Server::start().await;
    let context = stranger(&server).await;
    for (writes, fate, state) in [
        (false, done(), JobState::Done),
        (true, done(), JobState::Done),
        (false, suite::dead(), JobState::Dead),
        (true, suite::dead(), JobState::Dead),
    ] {
        let (_folder, records) = records().await;
        let monitor = Failing { records: Arc::clone(&records), left: AtomicU32::new(2), writes };
        let monitor: Arc<dyn Monitor> = Arc::new(monitor);
        let jobs = JetStream::open(&server.url(), patient(), Some(monitor)).await.unwrap();
        jobs.enqueue(&[NewJob::new("film")]).await.unwrap();
        let claim = comes(&jobs).await.claim;
        for _ in 0..2 {
            let settled = jobs.settle(&[(claim, fate.clone())]).await;
            assert!(matches!(settled, Err(JobsError::Unavailable(_))), "{settled:?}");
            assert_eq!(count(&context, STREAM).await, 1, "it is not acknowledged yet");
        }
        let expected = if state == JobState::Done { Settled::Gone } else { Settled::Parked };
        assert_eq!(settle(&jobs, claim, fate).await, expected);
        assert_eq!(count(&context, STREAM).await, 0);
        assert_eq!(record(&records).await.status, state);
        jobs.close().await;
    }
}

#[tokio::test]
async fn an_end_that_is_told_again_is_answered_as_it_was_even_if_its_job_is_back_by_then() {
    let server = Server::start().await;
    let (_folder, records) = records().await;
    let monitor = Failing { records, left: AtomicU32::new(1), writes: false };
    let monitor: Arc<dyn Monitor> = Arc::new(monitor);
    let jobs = JetStream::open(&server.url(), patient(), Some(monitor)).await.unwrap();
    jobs.enqueue(&vec![NewJob::new("film"); 2]).await.unwrap();
    let (one, two) = (comes(&jobs).await.claim, comes(&jobs).await.claim);
    let after = Duration::from_millis(1);
    let ended = [(one, done()), (two, Fate::Again { after, error: "not yet".into() })];
    // The first could not be recorded, so all of it is told again.
    assert!(jobs.settle(&ended).await.is_err());
    let back = comes(&jobs).await;
    assert_eq!((back.claim.id, back.attempt), (two.id, 2));
    let settled = jobs.settle(&ended).await.unwrap();
    assert_eq!(settled, [Settled::Gone, Settled::Again(after)]);
    // Which is not about the next attempt.
    assert_eq!(settle(&jobs, back.claim, done()).await, Settled::Gone);
    assert_eq!(settle(&jobs, back.claim, done()).await, Settled::Stale);
}

#[tokio::test]
async fn while_the_records_take_nothing_until_a_restart_no_end_is_acknowledged() {
    let server = Server::start().await;
    let context = stranger(&server).await;
    let folder = tempfile::tempdir().unwrap();
    let db = database(folder.path());
    let records = Arc::new(SqliteJobs::open(db.clone()).await.unwrap());
    let monitor: Arc<dyn Monitor> = Arc::clone(&records) as _;
    let jobs = JetStream::open(&server.url(), patient(), Some(monitor)).await.unwrap();
    jobs.enqueue(&vec![NewJob::new("film"); 2]).await.unwrap();
    let (one, two) = (comes(&jobs).await.claim, comes(&jobs).await.claim);
    tokio::task::spawn_blocking(move || db.close_blocking()).await.unwrap();
    for ended in [(one, done()), (two, suite::dead())] {
        let settled = jobs.settle(&[ended]).await;
        assert!(matches!(settled, Err(JobsError::Unavailable(_))), "{settled:?}");
    }
    assert_eq!(count(&context, STREAM).await, 2);
}

#[tokio::test]
async fn what_has_ended_in_the_records_is_acknowledged_and_not_run_again() {
    let server = Server::start().await;
    let context = stranger(&server).await;
    let (_folder, records) = records().await;
    let left = AtomicU32::new(u32::MAX);
    let monitor: Arc<dyn Monitor> =
        Arc::new(Failing { records: Arc::clone(&records), left, writes: true });
    let jobs = JetStream::open(&server.url(), quick(), Some(monitor)).await.unwrap();
    jobs.enqueue(&[NewJob::new("film")]).await.unwrap();
    let claim = comes(&jobs).await.claim;
    // The worker is gone between the record and the acknowledgement.
    assert!(jobs.settle(&[(claim, done())]).await.is_err());
    let ended = record(&records).await;
    assert_eq!(ended.status, JobState::Done);
    drop(jobs);

    let monitor: Arc<dyn Monitor> = Arc::clone(&records) as _;
    let jobs = JetStream::open(&server.url(), quick(), Some(monitor)).await.unwrap();
    eventually("it is gone", async || {
        assert!(take(&jobs, 1).await.is_empty(), "it was done");
        count(&context, STREAM).await == 0
    })
    .await;
    let still = record(&records).await;
    assert_eq!((still.status, still.ended_at), (JobState::Done, ended.ended_at));
}

/// Records that give no answer for a while.
struct Silent {
    records: Arc<SqliteJobs>,
    asked: AtomicU32,
    is_back: AtomicBool,
}

#[async_trait]
impl Monitor for Silent {
    async fn tell(&self, jobs: &[Job]) -> Result<Vec<bool>, JobsError> {
        self.records.tell(jobs).await
    }

    async fn ended(
        &self,
        connection: &str,
        jobs: &[(JobId, SystemTime)],
    ) -> Result<Vec<Option<Ended>>, JobsError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        if !self.is_back.load(Ordering::Relaxed) {
            return Err(JobsError::Unavailable("no answer".into()));
        }
        self.records.ended(connection, jobs).await
    }
}

#[tokio::test]
async fn while_the_records_give_no_answer_nothing_is_pulled_again_and_again() {
    let server = Server::start().await;
    let context = stranger(&server).await;
    let (_folder, records) = records().await;
    let (asked, is_back) = (AtomicU32::new(0), AtomicBool::new(false));
    let silent = Arc::new(Silent { records, asked, is_back });
    let monitor: Arc<dyn Monitor> = Arc::clone(&silent) as _;
    let jobs = Arc::new(JetStream::open(&server.url(), steady(), Some(monitor)).await.unwrap());
    jobs.enqueue(&vec![NewJob { max_attempts: 1, ..NewJob::new("film") }; 3]).await.unwrap();
    let begun = Arc::default();
    let working = start(worker(4, Duration::ZERO, &begun), &jobs);
    eventually("they are asked", async || silent.asked.load(Ordering::Relaxed) >= 7).await;
    // A pull that is open still may bring once more what was given back.
    let delivered = consumer(&context).await.delivered.consumer_sequence;
    assert!(delivered <= 3 * 3, "{delivered} deliveries");
    silent.is_back.store(true, Ordering::Relaxed);
    eventually("all are done", async || working.status().flow.done == 3).await;
    assert_eq!(begun.load(Ordering::Relaxed), 3);
}

#[tokio::test]
async fn a_number_that_a_stream_gives_again_is_another_job_with_a_record_of_its_own() {
    let server = Server::start().await;
    let context = stranger(&server).await;
    let (_folder, records) = records().await;
    let anew = async || {
        // It may not be there yet.
        let _ = context.delete_stream(STREAM).await;
        let monitor: Arc<dyn Monitor> = Arc::clone(&records) as _;
        JetStream::open(&server.url(), patient(), Some(monitor)).await.unwrap()
    };
    let numbers = [JobId(1), JobId(2), JobId(3)];
    let found = async |jobs: &JetStream| {
        let found = records.records_of(jobs.connection(), &numbers).await.unwrap();
        found.into_iter().flatten().collect::<Vec<JobId>>()
    };
    let shown = async |id: JobId| {
        let job = records.job(id).await.unwrap().unwrap();
        (job.status, job.payload.get().to_owned())
    };

    let jobs = anew().await;
    jobs.enqueue(&vec![NewJob::new("film"); 3]).await.unwrap();
    settle(&jobs, comes(&jobs).await.claim, done()).await;
    comes(&jobs).await;
    jobs.close().await;
    let old = found(&jobs).await;

    let jobs = anew().await;
    let another = NewJob::new("film").payload(&"another").unwrap();
    let ids: Vec<JobId> =
        jobs.enqueue(&vec![another; 3]).await.unwrap().iter().map(|job| job.id).collect();
    assert_eq!(ids, numbers);
    let new = found(&jobs).await;
    assert!(new.len() == 3 && new.iter().all(|id| !old.contains(id)), "{old:?} {new:?}");
    for (id, state) in old.iter().zip([JobState::Done, JobState::Cancelled, JobState::Cancelled]) {
        assert_eq!(shown(*id).await, (state, "null".into()));
    }
    settle(&jobs, comes(&jobs).await.claim, done()).await;
    jobs.close().await;

    // Nobody tells that somebody else published it.
    let jobs = anew().await;
    publish(&context, b"\"theirs\"").await;
    settle(&jobs, comes(&jobs).await.claim, done()).await;
    let theirs = found(&jobs).await[0];
    assert_eq!(shown(theirs).await, (JobState::Done, "\"theirs\"".into()));
    assert_eq!(shown(new[0]).await, (JobState::Done, "\"another\"".into()));
    let counts = &records.queues().await.unwrap()[0];
    assert_eq!((counts.done, counts.cancelled, counts.ready), (3, 2, 2));
}

#[tokio::test]
async fn two_durables_of_one_stream_each_do_every_job() {
    let server = Server::start().await;
    let context = stranger(&server).await;
    let kept = stream::Config {
        name: STREAM.into(),
        subjects: vec![SUBJECT.into()],
        ..stream::Config::default()
    };
    context.create_stream(kept).await.unwrap();
    let (_folder, records) = records().await;
    let monitor: Arc<dyn Monitor> = Arc::clone(&records) as _;
    let of = |durable: &str| Options { durable: durable.into(), ..patient() };
    let url = server.url();
    let thumb = JetStream::open(&url, of("thumb"), Some(Arc::clone(&monitor))).await.unwrap();
    let archive = JetStream::open(&url, of("archive"), Some(monitor)).await.unwrap();
    let ids = thumb.enqueue(&vec![NewJob::new("film"); 3]).await.unwrap();
    for (fate, settled) in [(done(), Settled::Gone), (suite::dead(), Settled::Parked)] {
        for jobs in [&thumb, &archive] {
            assert_eq!(settle(jobs, comes(jobs).await.claim, fate.clone()).await, settled);
        }
    }
    assert_eq!(count(&context, "MEDIA_DEAD").await, 2, "one of each");
    // What is called off at one is the other's to do.
    let called_off = records.records_of(thumb.connection(), &[ids[2].id]).await.unwrap()[0];
    let queued_at = thumb.queued_at(ids[2].id).await.unwrap();
    records.cancel_record(called_off.unwrap(), queued_at).await.unwrap();
    thumb.remove(ids[2].id).await.unwrap();
    let last = comes(&archive).await;
    assert_eq!(last.claim.id, ids[2].id);
    settle(&archive, last.claim, done()).await;
    eventually("it is acknowledged, and not run", async || {
        assert!(take(&thumb, 1).await.is_empty(), "it was called off");
        let stream = context.get_stream_no_info(STREAM).await.unwrap();
        stream.consumer_info("thumb").await.unwrap().ack_floor.stream_sequence == 3
    })
    .await;
    let counts = &records.queues().await.unwrap()[0];
    assert_eq!((counts.done, counts.dead, counts.cancelled), (3, 2, 1));
}

#[tokio::test]
async fn a_late_step_does_not_set_an_ended_record_back() {
    let server = Server::start().await;
    let (_folder, records) = records().await;
    let steps = Arc::new(Steps { records: Arc::clone(&records), told: Mutex::default() });
    let monitor: Arc<dyn Monitor> = Arc::clone(&steps) as _;
    let jobs = JetStream::open(&server.url(), patient(), Some(monitor)).await.unwrap();
    jobs.enqueue(&[NewJob::new("film")]).await.unwrap();
    let claim = comes(&jobs).await.claim;
    jobs.keep(&[(claim, Note { progress: Some(0.5), ..Note::default() })]).await.unwrap();
    settle(&jobs, claim, done()).await;
    let told = steps.told.lock().clone();
    let end = told.last().unwrap().clone();
    assert_eq!(end.status, JobState::Done);
    for late in &told[..told.len() - 1] {
        assert_eq!(records.tell(std::slice::from_ref(late)).await.unwrap(), [false], "{late:?}");
        assert_eq!(record(&records).await.status, JobState::Done);
    }
    // The same end may be told again, and no other.
    assert_eq!(records.tell(std::slice::from_ref(&end)).await.unwrap(), [true]);
    for other in [
        Job { status: JobState::Dead, ..end.clone() },
        Job { worker: Some("bert".into()), ..end.clone() },
    ] {
        assert_eq!(records.tell(&[other]).await.unwrap(), [false]);
    }
    let record = record(&records).await;
    assert_eq!((record.status, record.worker.as_deref()), (JobState::Done, Some("anna")));
    assert_eq!(records.queues().await.unwrap()[0].done, 1);
}

/// Records, and what they were told.
struct Steps {
    records: Arc<SqliteJobs>,
    told: Mutex<Vec<Job>>,
}

#[async_trait]
impl Monitor for Steps {
    async fn tell(&self, jobs: &[Job]) -> Result<Vec<bool>, JobsError> {
        self.told.lock().extend_from_slice(jobs);
        self.records.tell(jobs).await
    }

    async fn ended(
        &self,
        connection: &str,
        jobs: &[(JobId, SystemTime)],
    ) -> Result<Vec<Option<Ended>>, JobsError> {
        self.records.ended(connection, jobs).await
    }
}

#[tokio::test]
async fn records_of_what_still_waits_in_a_stream_are_not_removed() {
    let server = Server::start().await;
    let (_folder, records) = records().await;
    let monitor: Arc<dyn Monitor> = Arc::clone(&records) as _;
    let jobs = JetStream::open(&server.url(), patient(), Some(monitor)).await.unwrap();
    jobs.enqueue(&vec![NewJob::new("film"); 4]).await.unwrap();
    let mut given = Vec::new();
    for _ in 0..3 {
        given.push(comes(&jobs).await);
    }
    settle(&jobs, given[0].claim, done()).await;
    settle(&jobs, given[1].claim, suite::dead()).await;
    // By the clock of the records all of it is old.
    tokio::time::sleep(Duration::from_millis(20)).await;
    let mut removed = 0;
    loop {
        let all = Duration::ZERO;
        match records.prune_but(all, all, all).await.unwrap() {
            0 => break,
            more => removed += more,
        }
    }
    assert_eq!(removed, 2);
    let left = records.list(&Filter::default(), None, 10).await.unwrap().jobs;
    let left: Vec<JobState> = left.iter().map(|job| job.status).collect();
    assert_eq!(left, [JobState::Waiting, JobState::Running]);
}

#[tokio::test]
async fn the_record_of_a_streams_job_stays_as_long_as_its_message_may_come_again() {
    let server = Server::start().await;
    let (_folder, records) = records().await;
    let monitor: Arc<dyn Monitor> = Arc::clone(&records) as _;
    let jobs = JetStream::open(&server.url(), patient(), Some(monitor)).await.unwrap();
    jobs.enqueue(&[NewJob::new("film")]).await.unwrap();
    settle(&jobs, comes(&jobs).await.claim, done()).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(records.prune(Duration::ZERO, Duration::ZERO).await.unwrap(), 0);
    let deleted = records.delete(record(&records).await.id).await;
    assert!(matches!(deleted, Err(JobsError::Invalid(_))), "{deleted:?}");
    assert_eq!(record(&records).await.status, JobState::Done);
}

#[tokio::test]
async fn a_dead_letter_that_cannot_be_stored_holds_up_nobody_and_its_job_comes_again() {
    let server = Server::start().await;
    let context = stranger(&server).await;
    let full = stream::Config {
        name: "MEDIA_DEAD".into(),
        subjects: vec![quick().dead_subject()],
        max_bytes: 64,
        discard: stream::DiscardPolicy::New,
        ..stream::Config::default()
    };
    context.create_stream(full).await.unwrap();
    let jobs = open(&server, steady()).await;
    jobs.enqueue(&vec![NewJob::new("film"); 3]).await.unwrap();
    let mut given = Vec::new();
    eventually("all three are there", async || {
        given.extend(take(&jobs, 3).await);
        given.len() == 3
    })
    .await;
    let ended =
        [(given[0].claim, done()), (given[1].claim, suite::dead()), (given[2].claim, done())];
    let settled = jobs.settle(&ended).await.unwrap();
    assert_eq!(settled, [Settled::Gone, Settled::Stale, Settled::Gone]);
    let again = comes(&jobs).await;
    assert_eq!((again.claim.id, again.attempt), (given[1].claim.id, 2));
    assert_eq!((count(&context, STREAM).await, count(&context, "MEDIA_DEAD").await), (1, 0));
}

#[tokio::test]
async fn a_dead_letter_is_stored_once_that_is_recorded_whatever_is_killed_and_for_nothing_else() {
    let server = Server::start().await;
    let context = stranger(&server).await;
    let (_folder, records) = records().await;
    let left = AtomicU32::new(u32::MAX);
    let monitor: Arc<dyn Monitor> =
        Arc::new(Failing { records: Arc::clone(&records), left, writes: true });
    let jobs = JetStream::open(&server.url(), steady(), Some(monitor)).await.unwrap();
    jobs.enqueue(&[NewJob::new("film")]).await.unwrap();
    let claim = comes(&jobs).await.claim;
    // The worker is gone between the record and the dead letter.
    assert!(jobs.settle(&[(claim, suite::dead())]).await.is_err());
    assert_eq!(record(&records).await.status, JobState::Dead);
    assert_eq!(count(&context, "MEDIA_DEAD").await, 0);
    drop(jobs);
    let monitor: Arc<dyn Monitor> = Arc::clone(&records) as _;
    let jobs = JetStream::open(&server.url(), steady(), Some(monitor)).await.unwrap();
    eventually("it is gone", async || {
        assert!(take(&jobs, 1).await.is_empty(), "it is dead");
        count(&context, STREAM).await == 0
    })
    .await;
    let (headers, _) = dead_letter(&context, 1).await;
    let error = record(&records).await.error;
    assert_eq!(headers.get("Vedetta-Dead-Error"), error.as_ref());

    let number = jobs.enqueue(&[NewJob::new("film")]).await.unwrap()[0].id;
    let claim = comes(&jobs).await.claim;
    // It is called off while it fails.
    let id = records.records_of(jobs.connection(), &[number]).await.unwrap()[0].unwrap();
    let queued_at = jobs.queued_at(number).await.unwrap();
    records.cancel_record(id, queued_at).await.unwrap();
    assert_eq!(settle(&jobs, claim, suite::dead()).await, Settled::Stale);
    assert_eq!((count(&context, STREAM).await, count(&context, "MEDIA_DEAD").await), (0, 1));
}

#[tokio::test]
async fn an_end_that_is_the_last_of_many_and_too_late_leaves_the_others_confirmed() {
    let server = Server::start().await;
    let context = stranger(&server).await;
    let jobs = open(&server, steady()).await;
    jobs.enqueue(&vec![NewJob::new("film"); 4]).await.unwrap();
    let first = comes(&jobs).await.claim;
    let second = comes(&jobs).await.claim;
    let late = comes(&jobs).await.claim;
    let began = tokio::time::Instant::now();
    while began.elapsed() < steady().ack_wait + Duration::from_millis(50) {
        let kept = [(first, Note::default()), (second, Note::default())];
        assert_eq!(jobs.keep(&kept).await.unwrap(), [Kept::Ours; 2]);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let settled = jobs.settle(&[(first, done()), (second, done()), (late, done())]).await.unwrap();
    assert_eq!(settled, [Settled::Gone, Settled::Gone, Settled::Stale]);
    // They are gone by then, and not only soon.
    assert_eq!(count(&context, STREAM).await, 2);
}

#[tokio::test]
async fn a_paused_stream_hands_nothing_out_here_until_it_is_resumed() {
    let server = Server::start().await;
    let (jobs, begun) = (Arc::new(open(&server, steady()).await), Arc::default());
    let others = open(&server, steady()).await;
    let working = start(worker(2, Duration::ZERO, &begun), &jobs);
    jobs.pause(true).await;
    jobs.enqueue(&[NewJob::new("film")]).await.unwrap();
    // Somebody else has it, and gives it back.
    let given = comes(&others).await;
    settle(&others, given.claim, Fate::Released).await;
    assert!(take(&jobs, 1).await.is_empty());
    assert_eq!(begun.load(Ordering::Relaxed), 0);
    jobs.pause(false).await;
    eventually("it is done", async || working.status().flow.done == 1).await;
}

#[tokio::test]
async fn what_is_on_its_way_when_a_stream_is_paused_is_not_gone_for_an_ack_wait() {
    const JOBS: usize = 5_000;
    let server = Server::start().await;
    let options = Options { fetch_batch: some(1000), max_ack_pending: some(9000), ..patient() };
    let jobs = open(&server, options).await;
    jobs.enqueue(&vec![NewJob::new("film"); JOBS]).await.unwrap();
    let ear = Ear::default();
    let most = Wanted { capacity: 2000, ..wanted(1000) };
    let mut given = HashSet::new();
    for _ in 0..5 {
        let (taken, ()) = tokio::join!(jobs.take(&most), jobs.pause(true));
        given.extend(taken.unwrap().jobs.iter().map(|job| job.claim.id));
        jobs.pause(false).await;
    }
    soon("all come", async {
        while given.len() < JOBS {
            let taken = jobs.take(&most).await.unwrap();
            let is_none = taken.jobs.is_empty();
            given.extend(taken.jobs.iter().map(|job| job.claim.id));
            if is_none {
                jobs.woken(DEFAULT_QUEUE, &ear).await;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_job_that_is_removed_from_its_stream_is_no_longer_its_workers() {
    let server = Server::start().await;
    let context = stranger(&server).await;
    let (jobs, begun) = (Arc::new(open(&server, patient()).await), Arc::default());
    let lease = patient().ack_wait;
    let worker = worker(1, HOUR, &begun).lease(lease).heartbeat(patient().heartbeat);
    let working = start(worker, &jobs);
    let ids = jobs.enqueue(&vec![NewJob::new("film"); 2]).await.unwrap();
    eventually("one runs", async || begun.load(Ordering::Relaxed) == 1).await;
    jobs.remove(ids[1].id).await.unwrap();
    assert_eq!(count(&context, STREAM).await, 1);
    assert!(jobs.queued_at(ids[1].id).await.unwrap().is_none());
    assert!(jobs.queued_at(ids[0].id).await.unwrap().is_some());
    jobs.remove(ids[0].id).await.unwrap();
    eventually("nothing runs", async || working.status().running == 0).await;
    eventually("nothing is left", async || count(&context, STREAM).await == 0).await;
    assert_eq!((begun.load(Ordering::Relaxed), working.status().flow.stale), (1, 1));
}

#[tokio::test]
async fn two_workers_of_one_durable_use_both_their_slots() {
    let server = Server::start().await;
    let context = stranger(&server).await;
    // Each says what all of them can run.
    let of = || Options { max_ack_pending: some(4), fetch_batch: some(2), ..steady() };
    let (one, two) = (Arc::new(open(&server, of()).await), Arc::new(open(&server, of()).await));
    let begun = Arc::default();
    let working = [start(worker(2, HOUR, &begun), &one), start(worker(2, HOUR, &begun), &two)];
    one.enqueue(&vec![NewJob::new("film"); 6]).await.unwrap();
    eventually("all slots are in use", async || {
        working.iter().all(|working| working.status().running == 2)
    })
    .await;
    assert_eq!(begun.load(Ordering::Relaxed), 4);
    assert_eq!(consumer(&context).await.num_ack_pending, 4);
}

#[tokio::test]
async fn every_job_of_many_is_ended_in_the_records_once() {
    const MANY: usize = 5_000;
    let server = Server::start().await;
    let (_folder, records) = records().await;
    let monitor: Arc<dyn Monitor> = Arc::clone(&records) as _;
    let jobs = Arc::new(JetStream::open(&server.url(), steady(), Some(monitor)).await.unwrap());
    let worker = Worker::new(DEFAULT_QUEUE).capacity(some(64)).lease(steady().ack_wait);
    let worker = worker.heartbeat(steady().heartbeat);
    let worker = worker.handler("film", |_, number: usize| async move {
        if number % 100 == 7 {
            Ok(Outcome::Dead("no".into()))
        } else {
            Ok::<_, BoxError>(Outcome::Done(None))
        }
    });
    let working = worker.start(Arc::clone(&jobs) as _).unwrap();
    let films: Vec<NewJob> =
        (0..MANY).map(|number| NewJob::new("film").payload(&number).unwrap()).collect();
    jobs.enqueue(&films).await.unwrap();
    let dead = (MANY / 100) as u64;
    eventually("all have ended", async || {
        let all = records.queues().await.unwrap();
        let sum = |of: fn(&vedetta_jobs::QueueCounts) -> u64| all.iter().map(of).sum::<u64>();
        assert!(sum(|queue| queue.done) <= MANY as u64 - dead && sum(|queue| queue.dead) <= dead);
        sum(|queue| queue.done) == MANY as u64 - dead && sum(|queue| queue.dead) == dead
    })
    .await;
    working.stop(Duration::ZERO).await;
    jobs.close().await;
    let queues = records.queues().await.unwrap();
    assert!(queues.iter().all(|queue| queue.ready + queue.running + queue.scheduled == 0));
}

// --- what a server forgets ------------------------------------------------------------------------

/// Its workers have time, and soon look for what it has forgotten.
fn forgetful() -> Options {
    Options { ack_wait: HOUR, ..steady() }
}

/// A copy of a folder of files.
fn copy(from: &std::path::Path, to: &std::path::Path) {
    if to.exists() {
        std::fs::remove_dir_all(to).unwrap();
    }
    std::fs::create_dir_all(to).unwrap();
    for file in std::fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        let (from, to) = (file.path(), to.join(file.file_name()));
        if from.is_dir() {
            copy(&from, &to);
        } else {
            std::fs::copy(from, to).unwrap();
        }
    }
}

/// Starts a server again with a part of a stream as it is, and another as it was in the meantime.
async fn forget(server: &mut Server, part: &str, ends: impl AsyncFnOnce()) {
    let (part, before) = (server.store(STREAM).join(part), tempfile::tempdir().unwrap());
    server.stop();
    copy(&part, before.path());
    server.start_again().await;
    ends().await;
    server.stop();
    copy(before.path(), &part);
    server.start_again().await;
}

/// Tells ends until they are stored: there may be no connection yet.
async fn settle_all(jobs: &JetStream, ended: &[(Claim, Fate)]) {
    let mut settled = Err(JobsError::Unavailable("not tried yet".into()));
    eventually("they are settled", async || {
        settled = jobs.settle(ended).await;
        settled.is_ok()
    })
    .await;
    let is_over = |settled: &Settled| matches!(settled, Settled::Gone | Settled::Parked);
    assert!(settled.iter().flatten().all(is_over), "{settled:?}");
}

#[tokio::test]
async fn what_a_killed_server_awaits_and_has_no_more_takes_no_room_from_others() {
    let mut server = Server::start().await;
    let options = Options { max_ack_pending: some(3), ..forgetful() };
    let jobs = open(&server, options.clone()).await;
    jobs.enqueue(&vec![NewJob::new("film"); 5]).await.unwrap();
    let mut taken = take(&jobs, 3).await;
    assert_eq!(taken.len(), 3);
    let (_long, ended) = (taken.remove(0), taken);
    let ended: Vec<_> = ended.iter().map(|given| (given.claim, done())).collect();
    // It removed two from the stream, and has forgotten that it need not wait for them.
    forget(&mut server, "obs", async || {
        settle_all(&jobs, &ended).await;
        jobs.close().await;
    })
    .await;
    let context = stranger(&server).await;
    assert_eq!(consumer(&context).await.num_ack_pending, 3);
    assert_eq!(count(&context, STREAM).await, 3);
    let jobs = open(&server, options).await;
    assert_eq!(comes(&jobs).await.claim.id, JobId(4));
    assert_eq!(comes(&jobs).await.claim.id, JobId(5));
    assert_eq!(consumer(&context).await.num_ack_pending, 3);
}

#[tokio::test]
async fn what_a_killed_server_has_again_and_has_ended_is_removed_and_nothing_else() {
    for is_recorded in [true, false] {
        let mut server = Server::start().await;
        let (_folder, records) = records().await;
        let monitor = is_recorded.then_some(records as Arc<dyn Monitor>);
        let jobs = JetStream::open(&server.url(), forgetful(), monitor).await.unwrap();
        jobs.enqueue(&vec![NewJob::new("film"); 5]).await.unwrap();
        let taken = take(&jobs, 4).await;
        let ended = [(taken[1].claim, done()), (taken[2].claim, suite::dead())];
        // It has forgotten that it removed them, and not that they are no longer waited for.
        forget(&mut server, "msgs", async || settle_all(&jobs, &ended).await).await;
        let context = stranger(&server).await;
        eventually("those that have ended are gone", async || count(&context, STREAM).await == 3)
            .await;
        let stream = context.get_stream(STREAM).await.unwrap();
        for sequence in [1, 4, 5] {
            stream.get_raw_message(sequence).await.unwrap();
        }
        assert_eq!(count(&context, "MEDIA_DEAD").await, 1);
    }
}

#[tokio::test]
async fn what_a_killed_server_delivers_again_to_who_has_it_goes_on_and_begins_once() {
    let mut server = Server::start().await;
    let jobs = open(&server, patient()).await;
    // What came before was cheap.
    jobs.enqueue(&[NewJob::new("film")]).await.unwrap();
    settle(&jobs, comes(&jobs).await.claim, done()).await;
    let film = NewJob { cost: 5, ..NewJob::new("film") };
    jobs.enqueue(&[film.clone(), film]).await.unwrap();
    // Both are pulled, and there is room for one. The server forgets that it has delivered them.
    let mut taken: Vec<Given> = Vec::new();
    forget(&mut server, "obs", async || {
        eventually("one is taken", async || {
            taken.extend(jobs.take(&wanted(2)).await.into_iter().flat_map(|taken| taken.jobs));
            !taken.is_empty()
        })
        .await;
    })
    .await;
    let context = stranger(&server).await;
    assert_eq!(consumer(&context).await.delivered.consumer_sequence, 1);
    eventually("both are delivered again", async || {
        taken.extend(jobs.take(&wanted(10)).await.into_iter().flat_map(|taken| taken.jobs));
        consumer(&context).await.delivered.consumer_sequence == 3
    })
    .await;
    taken.extend(take(&jobs, 10).await);
    let ids: Vec<u64> = taken.iter().map(|given| given.claim.id.0).collect();
    assert_eq!(ids, [2, 3]);
    let held: Vec<_> = taken.iter().map(|given| (given.claim, Note::default())).collect();
    assert_eq!(jobs.keep(&held).await.unwrap(), [Kept::Ours; 2]);
    let ended: Vec<_> = taken.iter().map(|given| (given.claim, done())).collect();
    assert_eq!(jobs.settle(&ended).await.unwrap(), [Settled::Gone; 2]);
    assert!(take(&jobs, 10).await.is_empty());
    assert_eq!(count(&context, STREAM).await, 0);
}

#[tokio::test]
async fn a_worker_that_is_too_slow_for_its_server_gets_what_was_dropped_again_and_runs_nothing_twice()
 {
    const FILMS: u32 = 64;
    let server = Server::start_with("write_deadline: \"2s\"").await;
    let link = Proxy::to(server.address()).await;
    // Time enough to keep what runs through all of it, on a machine that does something else, too.
    let options =
        Options { ack_wait: Duration::from_secs(15), fetch_batch: some(FILMS), ..quick() };
    let url = format!("nats://{}", link.address());
    let jobs = Arc::new(JetStream::open(&url, options.clone(), None).await.unwrap());
    let begun: Arc<Mutex<Vec<JobId>>> = Arc::default();
    let (notes, end) = (Arc::clone(&begun), Arc::new(Notify::new()));
    let last = Arc::clone(&end);
    let worker = Worker::new(DEFAULT_QUEUE).capacity(some(FILMS + 1));
    let worker = worker.lease(options.ack_wait).heartbeat(options.heartbeat);
    let worker = worker.handler("film", move |work: Work, film: String| {
        notes.lock().push(work.id());
        let last = film.is_empty().then(|| Arc::clone(&last));
        async move {
            if let Some(last) = last {
                last.notified().await;
            }
            Ok::<_, BoxError>(())
        }
    });
    let working = start(worker, &jobs);
    let others = open(&server, options).await;
    let film = |film: &str| NewJob::new("film").payload(&film).unwrap();
    others.enqueue(&[film("")]).await.unwrap();
    eventually("the first runs", async || begun.lock().len() == 1).await;

    // They are pulled together. A little of it comes, and the server has to keep the rest of many megabytes.
    jobs.pause(true).await;
    others.enqueue(&vec![film(&"x".repeat(256 << 10)); FILMS as usize]).await.unwrap();
    link.allow(1 << 20);
    jobs.pause(false).await;
    eventually("the server gives it up", async || server.log().contains("Slow Consumer")).await;
    link.mend();
    // What was dropped comes after an ack wait.
    eventually("all others are done", async || working.status().flow.done == u64::from(FILMS))
        .await;
    end.notify_one();
    eventually("the first is done", async || working.status().flow.done > u64::from(FILMS)).await;
    let delivered = consumer(&stranger(&server).await).await.delivered.consumer_sequence;
    assert!(delivered > u64::from(FILMS) + 1, "nothing was dropped: {delivered}");
    let mut once = begun.lock().clone();
    once.sort_unstable();
    assert!(once.is_sorted_by(|a, b| a < b), "{once:?}");
    assert_eq!(working.stop(Duration::ZERO).await, 0);
}
