//! Jobs in a real NATS JetStream.

#[macro_use]
#[allow(dead_code, unused_macros, reason = "a stream keeps no ledger")]
mod suite;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, pull};
use async_nats::jetstream::{Context, stream};
use async_trait::async_trait;
use parking_lot::Mutex;
use testing::nats::Server;
use testing::soon;
use tokio::task::JoinSet;
use vedetta_core::queue::{
    End, Handed, Handler, Kept, Queue, QueueError, Settled, Taken as Took, Woken,
};
use vedetta_core::{Failure, JobState};
use vedetta_jobs::jetstream::{JetStream, Monitor, Options};
use vedetta_jobs::{
    Claim, DEFAULT_QUEUE, Enqueued, Fate, Given, Job, JobId, Jobs, JobsError, NewJob, Note, Taken,
    Wanted, When,
};
use vedetta_runtime::{Limits, Puller};

use crate::suite::{Ask as _, HOUR, SHORT, World, done, eventually};

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
    let lease = Duration::from_millis(700);
    Wanted { queue: DEFAULT_QUEUE, worker: "anna", room, capacity: 1000, lease }
}

async fn take(jobs: &JetStream, room: u32) -> Vec<Given> {
    jobs.take(&wanted(room)).await.unwrap().jobs
}

/// Waits until there is one to take, and takes it alone.
async fn comes(jobs: &JetStream) -> Given {
    soon("a job comes", async {
        loop {
            if let Some(job) = take(jobs, 1).await.pop() {
                return job;
            }
            jobs.woken(DEFAULT_QUEUE).await;
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
    patient: bool,
    open: tokio::sync::Mutex<HashMap<String, Arc<JetStream>>>,
}

impl Streams {
    async fn of(&self, queue: &str) -> Arc<JetStream> {
        let mut open = self.open.lock().await;
        if let Some(stream) = open.get(queue) {
            return Arc::clone(stream);
        }
        let name: String = queue.bytes().map(|byte| format!("{byte:02x}")).collect();
        let heartbeat = Duration::from_millis(150);
        let options = Options {
            queue: queue.into(),
            fetch_batch: some(1000),
            dead_stream: format!("{name}_DEAD"),
            stream: name.clone(),
            subject: format!("jobs.{name}"),
            ..patient()
        };
        let options = match self.patient {
            true => options,
            false => Options { heartbeat, ack_wait: SHORT + heartbeat, ..options },
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
        let lease = if self.patient { HOUR } else { SHORT };
        let wanted = Wanted { lease: wanted.lease.min(lease), ..*wanted };
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

    async fn woken(&self, queue: &str) -> Woken {
        self.of(queue).await.woken(queue).await
    }
}

/// A server with streams of long leases, or of short ones: they are the consumer's.
struct Place<const PATIENT: bool> {
    server: Arc<Server>,
    jobs: Arc<Streams>,
}

impl<const PATIENT: bool> Place<PATIENT> {
    fn at(server: Arc<Server>) -> Self {
        let jobs = Streams { url: server.url(), patient: PATIENT, open: Default::default() };
        Self { server, jobs: Arc::new(jobs) }
    }
}

impl<const PATIENT: bool> World for Place<PATIENT> {
    type Jobs = Streams;

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

mod with_long_leases {
    stories! { crate::Place<true>;
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
    stories! { crate::Place<false>;
        jobs {
            a_kept_job_is_handed_out_to_nobody_else
            a_job_that_is_not_kept_goes_to_another_and_its_first_worker_has_lost_it
            what_is_done_or_dead_is_not_handed_out_again
            no_job_is_lost_by_a_restart
        }
    }
}
