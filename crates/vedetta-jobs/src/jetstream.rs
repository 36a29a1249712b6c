//! Jobs in a stream of NATS JetStream: no database is needed, and anybody who can publish can ask for one.
//!
//! ```text
//!  publish ──► stream ──durable pull consumer──► take ──► keep … ──► settle ──► acknowledged
//!                 ▲                                            ├─ again, released: nak ─┐
//!                 ├────────── not kept within ack_wait ────────┤                        │
//!                 └────────────────────────────────────────────┼────────────────────────┘
//!                                                              └─ dead ──► the stream of dead letters
//! ```
//!
//! One [`JetStream`] is one queue: a subject of one stream, through one durable consumer, which all its
//! workers share. A message is acknowledged when its job is done, and the server has confirmed that it
//! knows; whatever happens before, it is delivered again. So a job may be begun twice, and never not at all.
//!
//! With a [`Monitor`], that a job ended is recorded before it is acknowledged. A delivery of a job whose record
//! has ended, as its acknowledgement was lost with the worker or the server, is acknowledged and not run.
//!
//! A server that is killed forgets some of it. What it then delivers again to who has it goes on there; what it keeps or
//! awaits for ever is put right when there is a connection again.
//!
//! What streams cannot do is refused: unique keys, priorities and jobs for later. Delays are, as the server
//! holds a message back; until it is delivered again it counts against `max_ack_pending`. A restart of the
//! server may cut a delay short.
//!
//! The server counts every delivery. This process remembers which of them it gave back unbegun, and does
//! not count those as attempts; another worker does. So jobs that are often snoozed or released should
//! allow for more attempts.

mod intake;
mod letter;
mod pulls;
mod setup;
mod tidy;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use async_nats::connection::State as Connection;
use async_nats::jetstream::consumer::{PullConsumer, pull::BatchConfig};
use async_nats::jetstream::context::PublishErrorKind;
use async_nats::jetstream::stream::RawMessageErrorKind;
use async_nats::jetstream::{AckKind, Context};
use async_nats::{Client, ConnectOptions, Event, Request, ServerAddr};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::future::{join, join_all, try_join_all};
use hashbrown::HashMap;
use parking_lot::Mutex;
use percent_encoding::percent_decode_str;
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use vedetta_core::JobState;
use vedetta_core::queue::{Kept, Settled, Woken};
use vedetta_runtime::{Bell, Ear};

use self::intake::{State, Story};
use self::letter::{Asked, Death, HEADERS, Letter};
use self::pulls::{Opened, Pulls};
use crate::job::{
    Claim, DEFAULT_QUEUE, Enqueued, Fate, Given, Job, JobId, JobsError, Json, LONGEST_TEXT, NewJob,
    Note, When, check_name, shortened, tail,
};
use crate::kinds::Kinds;
use crate::monitor::{Ended, Monitor, Telling};
use crate::port::{Jobs, Taken, Wanted};

/// How long the server may take to confirm something.
const ANSWER: Duration = Duration::from_secs(5);
/// Messages that are published before their confirmations are waited for.
const PUBLISHED: usize = 1000;
/// A delay longer than this is this.
const LONGEST_DELAY: Duration = Duration::from_secs(10 * 365 * 86_400);
/// What is less than this part of a lease is nothing.
const JUST_BEFORE: u32 = 60;
/// So many are worth beginning with, while more are on their way.
const BUNCH: usize = 128;
/// What comes at once comes within so long.
const AT_ONCE: Duration = Duration::from_millis(5);

/// Messages pulled at once, unless said otherwise.
const FIVE: NonZeroU32 = NonZeroU32::MIN.saturating_add(4);

/// Which stream, and how to work it.
#[derive(Debug, Clone)]
pub struct Options {
    /// The name of the queue that this is.
    pub queue: String,
    /// The stream; made if there is none.
    pub stream: String,
    /// The subject of its jobs.
    pub subject: String,
    /// The consumer that all workers share; made if there is none.
    pub durable: String,
    /// After so long without a sign of its worker a job is delivered again: the lease of its workers.
    pub ack_wait: Duration,
    /// How often a worker gives that sign, which is to be told the worker, too. At most a third of
    /// `ack_wait`, so that a lost one does no harm.
    pub heartbeat: Duration,
    /// Messages pulled at once, at most.
    pub fetch_batch: NonZeroU32,
    /// How long a pull that finds nothing waits for something to come.
    pub fetch_timeout: Duration,
    /// How many messages may be delivered and not acknowledged: what all workers of this consumer can run,
    /// and those that are held back by a delay. If it is full of delayed ones nothing else is delivered, so
    /// twice the capacity is better than once.
    pub max_ack_pending: NonZeroU32,
    /// What a message is that does not say; without it such a message is put with the dead letters.
    pub default_kind: Option<String>,
    /// What is known of kinds, for messages that say less.
    pub kinds: Kinds,
    /// The stream of dead letters; made if there is none.
    pub dead_stream: String,
}

impl Options {
    /// The usual ones, for this capacity of all workers together.
    pub fn new(stream: &str, subject: &str, durable: &str, capacity: NonZeroU32) -> Self {
        Self {
            queue: DEFAULT_QUEUE.into(),
            stream: stream.into(),
            subject: subject.into(),
            durable: durable.into(),
            ack_wait: Duration::from_secs(300),
            heartbeat: Duration::from_secs(30),
            fetch_batch: FIVE,
            fetch_timeout: Duration::from_secs(2),
            max_ack_pending: capacity,
            default_kind: None,
            kinds: Kinds::default(),
            dead_stream: format!("{stream}_DEAD"),
        }
    }

    /// Where dead letters go.
    pub fn dead_subject(&self) -> String {
        format!("vedetta.dead.{}", self.stream)
    }

    /// Whether it can work.
    pub fn check(&self) -> Result<(), JobsError> {
        let refuse = |what: String| Err(JobsError::Invalid(what));
        check_name("queue", &self.queue)?;
        self.default_kind.as_deref().map_or(Ok(()), |kind| check_name("kind", kind))?;
        for (what, name) in [
            ("stream", &self.stream),
            ("durable name", &self.durable),
            ("stream of dead letters", &self.dead_stream),
        ] {
            let fits = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
            if name.is_empty() || name.len() > 128 || !name.chars().all(fits) {
                return refuse(format!(
                    "the {what} {name:?} is no name: give letters, digits, _ or -"
                ));
            }
        }
        if self.stream == self.dead_stream {
            return refuse(format!("the stream {} cannot keep its own dead letters", self.stream));
        }
        let token = |token: &str| !token.is_empty() && !token.contains(char::is_whitespace);
        if !self.subject.split('.').all(token) {
            return refuse(format!("the subject {:?} is none", self.subject));
        }
        let time = |time: Duration| humantime::format_duration(time).to_string();
        if self.heartbeat < Duration::from_millis(10) || self.heartbeat > self.ack_wait / 3 {
            return refuse(format!(
                "a heartbeat of {} does not fit an ack wait of {}: give 10ms to a third of it, {}; else jobs \
                 would be delivered again while they run",
                time(self.heartbeat),
                time(self.ack_wait),
                time(self.ack_wait / 3)
            ));
        }
        if self.fetch_timeout < Duration::from_millis(100) {
            let given = time(self.fetch_timeout);
            return refuse(format!("a fetch timeout of {given} is too short: give 100ms or more"));
        }
        Ok(())
    }
}

/// One sign of an open pull is missed without harm.
fn pull_dies_after(options: &Options) -> Duration {
    idle_heartbeat(options) * 2 + Duration::from_secs(1)
}

/// How much of what was pulled the client holds for the intake. Beyond that it would drop messages, which would come
/// again after `ack_wait` only: so it is more than several pulls bring, and those that are open bring less than two.
fn inbox(options: &Options) -> usize {
    let pulled = usize::try_from(options.fetch_batch.get()).unwrap_or(usize::MAX);
    pulled.saturating_mul(8).clamp(1 << 16, Semaphore::MAX_PERMITS)
}

fn idle_heartbeat(options: &Options) -> Duration {
    (options.fetch_timeout / 2).min(ANSWER)
}

/// Jobs of one queue, in a stream. Dropped it gives back what it has pulled and not handed out; to wait
/// for that, [close](Self::close) it.
#[derive(Debug)]
pub struct JetStream {
    shared: Arc<Shared>,
    stop: CancellationToken,
    intake: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    options: Options,
    client: Client,
    context: Context,
    consumer: PullConsumer,
    /// Its messages may be others' jobs, too.
    has_others: bool,
    warnings: Vec<String>,
    /// What a monitor is told that jobs are kept in.
    connection: String,
    telling: Option<Telling>,
    state: Mutex<State>,
    /// Nothing is handed out.
    is_paused: AtomicBool,
    /// To the intake: end the pulls that are open.
    leave: mpsc::Sender<oneshot::Sender<()>>,
    /// For takes: something came, or a pull ended.
    turn: Notify,
    /// The server may have forgotten something.
    untidy: Notify,
    /// For workers: the same, or something that was handed out is lost.
    bell: Bell,
}

impl JetStream {
    /// Connects, and makes sure of the streams and the consumer. Several addresses are separated by commas.
    /// A user and a password, or a token instead of them, are taken from the URL.
    pub async fn open(
        url: &str,
        options: Options,
        monitor: Option<Arc<dyn Monitor>>,
    ) -> Result<Self, JobsError> {
        options.check()?;
        let connected = Arc::new(Notify::new());
        let client = connect(url, &options, &connected).await?;
        let context = async_nats::jetstream::new(client.clone());
        let setup::SetUp { consumer, has_others, warnings } =
            setup::set_up(&context, &options).await?;
        warnings.iter().for_each(|warning| tracing::warn!(stream = options.stream, "{warning}"));
        let inbox = client.new_inbox();
        let subscriber = client.subscribe(format!("{inbox}.*")).await;
        let subscriber = subscriber.map_err(|error| unavailable("subscribing", error))?;
        let pulls = Pulls::new(inbox, options.fetch_timeout, pull_dies_after(&options));
        let (leave, left) = mpsc::channel(1);
        let shared = Arc::new(Shared {
            // Each durable has its own deliveries of a message, and so its own job.
            connection: format!("nats {}/{}", options.stream, options.durable),
            options,
            client,
            context,
            consumer,
            has_others,
            warnings,
            state: Mutex::new(State::new(pulls, monitor.is_some())),
            telling: monitor.map(Telling::to),
            is_paused: AtomicBool::new(false),
            leave,
            turn: Notify::new(),
            untidy: Notify::new(),
            bell: Bell::default(),
        });
        shared.untidy.notify_one();
        let stop = CancellationToken::new();
        let intake = tokio::spawn({
            let (shared, stop) = (Arc::clone(&shared), stop.clone());
            async move {
                tokio::select! {
                    () = intake::run(&shared, subscriber, left, &connected, stop) => {}
                    () = shared.keep_tidy() => {}
                }
            }
        });
        Ok(Self { shared, stop, intake: Mutex::new(Some(intake)) })
    }

    /// What would be [warned](Self::warnings) of, without anything being made or changed.
    pub async fn risks(url: &str, options: &Options) -> Result<Vec<String>, JobsError> {
        options.check()?;
        let client = connect(url, options, &Arc::default()).await?;
        setup::look(&async_nats::jetstream::new(client), options).await
    }

    /// What can lose jobs that were acknowledged, as far as can be seen.
    pub fn warnings(&self) -> &[String] {
        &self.shared.warnings
    }

    /// Steps of jobs that the monitor was not told, as it did not keep up.
    pub fn left_out(&self) -> u64 {
        self.shared.telling.as_ref().map_or(0, Telling::left_out)
    }

    /// Pulls that were opened while another was open, so that the server did not wait for the next.
    pub fn overlapping_pulls(&self) -> u64 {
        self.shared.state.lock().pulls.overlapping
    }

    /// Gives back what was pulled and not handed out, and takes nothing more.
    pub async fn close(&self) {
        self.stop.cancel();
        let intake = self.intake.lock().take();
        if let Some(intake) = intake {
            // Its streams are the server's: if it broke down, they come back in time.
            let _ = timeout(ANSWER, intake).await;
        }
        if let Some(telling) = &self.shared.telling {
            let _ = timeout(ANSWER, telling.told(Vec::new())).await;
        }
    }

    /// Has nothing handed out here until it is resumed; what runs goes on, and other processes that share the
    /// consumer do, too.
    pub async fn pause(&self, is_paused: bool) {
        let shared = &self.shared;
        if shared.is_paused.swap(is_paused, Ordering::Relaxed) == is_paused {
            return;
        }
        if is_paused {
            shared.step_back().await;
        } else {
            shared.bell.ring(Woken::More);
        }
    }

    /// What a monitor is told that these jobs are kept in.
    pub fn connection(&self) -> &str {
        &self.shared.connection
    }

    /// When a job that is still in the stream was asked for, as the monitor is told it.
    pub async fn queued_at(&self, id: JobId) -> Result<Option<SystemTime>, JobsError> {
        let name = &self.shared.options.stream;
        let asking = |error: Cause| unavailable(format!("asking for the stream {name}"), error);
        let stream = self.shared.context.get_stream_no_info(name).await;
        match stream.map_err(|error| asking(error.into()))?.get_raw_message(id.0).await {
            Ok(found) => Ok(Some(whole_millis(found.time.into()))),
            Err(error) if error.kind() == RawMessageErrorKind::NoMessageFound => Ok(None),
            Err(error) => Err(asking(error.into())),
        }
    }

    /// Whether a job is neither in the stream nor in anybody's hands here.
    pub async fn is_gone(&self, id: JobId) -> Result<bool, JobsError> {
        let is_here = self.shared.state.lock().has(id.0);
        Ok(!is_here && self.queued_at(id).await?.is_none())
    }

    /// Removes a job from the stream. If it runs here its worker is told at once, and can no longer settle it. A
    /// message that may be another consumer's job, too, is left to it: what is not here yet, and is recorded to have
    /// ended, is acknowledged when it comes.
    pub async fn remove(&self, id: JobId) -> Result<(), JobsError> {
        let shared = &self.shared;
        let ours = shared.state.lock().drop_out(id.0);
        if let Some(letter) = ours {
            shared.bell.ring(Woken::Look);
            return shared.confirm(&letter, AckKind::Term).await;
        }
        if shared.has_others {
            return Ok(());
        }
        let name = &shared.options.stream;
        let failed = |error: Cause| unavailable(format!("removing from the stream {name}"), error);
        let stream = shared.context.get_stream_no_info(name).await;
        let stream = stream.map_err(|error| failed(error.into()))?;
        stream.delete_message(id.0).await.map_err(|error| failed(error.into()))?;
        Ok(())
    }
}

impl Drop for JetStream {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// A client that connects again by itself, and says so.
async fn connect(
    url: &str,
    options: &Options,
    connected: &Arc<Notify>,
) -> Result<Client, JobsError> {
    let mut options = ConnectOptions::new().name("vedetta").subscription_capacity(inbox(options));
    let mut servers = Vec::new();
    for address in url.split(',') {
        // The client would show the address in its logs: what is secret is taken out of it.
        let unreadable = || JobsError::Invalid("the address of NATS is no nats:// URL".into());
        let address: ServerAddr = address.trim().parse().map_err(|_| unreadable())?;
        let mut address = address.into_inner();
        let plain = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
        let (user, password) = (plain(address.username()), address.password().map(plain));
        options = match password {
            Some(password) => options.user_and_password(user, password),
            None if !user.is_empty() => options.token(user),
            None => options,
        };
        let _ = (address.set_username(""), address.set_password(None));
        servers.push(ServerAddr::from_url(address).map_err(|_| unreadable())?);
    }
    let connected = Arc::clone(connected);
    let options = options.event_callback(move |event| {
        match event {
            Event::Connected => connected.notify_one(),
            Event::Disconnected => {
                tracing::warn!("the connection to NATS is lost; connecting again");
            }
            // Not by what it pulls: there is room for that.
            Event::SlowConsumer(_) => tracing::warn!("NATS: {event}; what was dropped comes again"),
            event => tracing::debug!("NATS: {event}"),
        }
        async {}
    });
    options.connect(servers).await.map_err(|error| unavailable("connecting to NATS", error))
}

#[async_trait]
impl Jobs for JetStream {
    /// All that can be refused is refused before any is published. After another error some may be there:
    /// a stream of this server cannot promise all or none.
    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, JobsError> {
        let shared = &self.shared;
        jobs.iter().try_for_each(|job| shared.check(job))?;
        shared.connected()?;
        let mut enqueued = Vec::with_capacity(jobs.len());
        for jobs in jobs.chunks(PUBLISHED) {
            let mut acks = Vec::with_capacity(jobs.len());
            // Before any is there: what is recorded under their numbers since before then is of other jobs.
            let asked_at = SystemTime::now();
            for job in jobs {
                let message = letter::write(job, &shared.options.stream);
                let sent =
                    shared.context.send_publish(shared.options.subject.clone(), message).await;
                acks.push(async { sent.map_err(unpublished)?.await.map_err(unpublished) });
            }
            let mut told = Vec::new();
            for (ack, job) in try_join_all(acks).await?.into_iter().zip(jobs) {
                let id = JobId(ack.sequence);
                enqueued.push(Enqueued { id, is_new: !ack.duplicate });
                if shared.telling.is_some() {
                    let payload = job.payload.clone();
                    told.push(shared.told(id, &Asked::of(job), payload, &Step::queued(asked_at)));
                }
            }
            if let Some(telling) = &shared.telling
                && let Err(error) = telling.told(told).await
            {
                // They are there, and are recorded when they begin.
                let error = vedetta_core::explain(&error);
                tracing::warn!(error, "that jobs wait is not recorded");
            }
        }
        shared.bell.ring(Woken::More);
        Ok(enqueued)
    }

    async fn take(&self, wanted: &Wanted<'_>) -> Result<Taken, JobsError> {
        let shared = &self.shared;
        shared.connected()?;
        if wanted.queue != shared.options.queue {
            return Err(shared.other_queue(wanted.queue));
        }
        if wanted.lease > shared.options.ack_wait {
            let (asked, most) = (wanted.lease, shared.options.ack_wait);
            return Err(JobsError::Invalid(format!(
                "a lease of {asked:?} is longer than the consumer's ack wait of {most:?}"
            )));
        }
        let is_paused = shared.is_paused.load(Ordering::Relaxed);
        if self.stop.is_cancelled() || wanted.room == 0 || is_paused {
            return Ok(Taken { jobs: Vec::new(), rest: Some(shared.options.fetch_timeout) });
        }
        let asked = Instant::now();
        shared.ask_again().await?;
        shared.look(wanted).await?;
        // There was less than there is room for: the next waits for something to come.
        shared.pull(wanted).await?;
        shared.drop_ended().await?;
        shared.bury_poison().await;
        shared.touch(asked).await?;
        // What was pulled just after a pause stepped back would be held up here.
        if shared.is_paused.load(Ordering::Relaxed) {
            shared.step_back().await;
            return Ok(Taken { jobs: Vec::new(), rest: Some(shared.options.fetch_timeout) });
        }
        // Nothing is waited for from here on: what is handed out is not lost on the way.
        Ok(shared.hand_out(wanted))
    }

    async fn keep(&self, held: &[(Claim, Note)]) -> Result<Vec<Kept>, JobsError> {
        let shared = &self.shared;
        shared.connected()?;
        let prolonged = join_all(held.iter().map(|(claim, _)| shared.prolong(*claim))).await;
        let prolonged = prolonged.into_iter().collect::<Result<Vec<_>, _>>()?;
        // After an error all of it is told again: so nothing of it is noted before all is well.
        let note = |((claim, note), letter): (&(Claim, Note), Option<Arc<Letter>>)| {
            letter.map_or(Kept::Lost, |letter| shared.note(*claim, note, &letter))
        };
        Ok(held.iter().zip(prolonged).map(note).collect())
    }

    /// An end that comes too late is refused, as somebody else may have the job by then. Told again after an
    /// error, within the lease, an end that was stored is answered as it was.
    async fn settle(&self, ended: &[(Claim, Fate)]) -> Result<Vec<Settled>, JobsError> {
        let shared = &self.shared;
        shared.connected()?;
        if ended.iter().any(|(_, fate)| matches!(fate, Fate::Released)) {
            shared.step_back().await;
        }
        let mut answers = vec![Settled::Stale; ended.len()];
        let ours = shared.ours(ended, Instant::now(), &mut answers);
        let (done, rest): (Vec<_>, Vec<_>) =
            ours.into_iter().partition(|going| matches!(going.fate, Fate::Done { .. }));
        let is_all = rest.is_empty();
        let rest = join_all(
            rest.iter()
                .map(async |going| shared.settle(going).await.map(|settled| (going.at, settled))),
        );
        let (done, rest) = join(shared.acknowledge(&done, is_all), rest).await;
        for answer in rest {
            let (at, settled) = answer?;
            answers[at] = settled;
        }
        done?.into_iter().for_each(|(at, settled)| answers[at] = settled);
        let mut state = shared.state.lock();
        ended.iter().for_each(|(claim, _)| state.let_go(*claim));
        drop(state);
        Ok(answers)
    }

    async fn woken(&self, queue: &str, ear: &Ear) -> Woken {
        let shared = &self.shared;
        if queue != shared.options.queue {
            return std::future::pending().await;
        }
        tokio::select! {
            biased;
            woken = shared.bell.rung(ear) => woken,
            // Nobody says so when a message comes and no pull is open: so take a look now and then.
            () = sleep(shared.options.fetch_timeout) => Woken::More,
        }
    }
}

impl Shared {
    fn connected(&self) -> Result<(), JobsError> {
        match self.client.connection_state() {
            Connection::Connected => Ok(()),
            _ => Err(JobsError::Unavailable("there is no connection to NATS".into())),
        }
    }

    fn other_queue(&self, queue: &str) -> JobsError {
        let (stream, ours) = (&self.options.stream, &self.options.queue);
        JobsError::Invalid(format!("the stream {stream} is the queue {ours:?}, and not {queue:?}"))
    }

    fn check(&self, job: &NewJob) -> Result<(), JobsError> {
        job.check()?;
        let refuse = |what: &str| Err(JobsError::Invalid(format!("a stream {what}")));
        if job.queue != self.options.queue {
            return Err(self.other_queue(&job.queue));
        }
        if job.unique_key.is_some() {
            return refuse("cannot keep jobs unique by a key: leave unique_key out");
        }
        if job.priority != 0 {
            return refuse("has no priorities: leave the priority out");
        }
        let later = match job.run_at {
            When::Now => false,
            When::After(delay) => !delay.is_zero(),
            When::At(at) => at > SystemTime::now(),
        };
        if later {
            return refuse("cannot keep jobs for later: leave run_at out");
        }
        if self.options.subject.split('.').any(|token| token == "*" || token == ">") {
            return refuse("of several subjects does not say which one to publish to");
        }
        let most = self.client.max_payload().saturating_sub(HEADERS);
        if job.payload.get().len() > most {
            return refuse(&format!("of this server takes payloads of {most} bytes at most"));
        }
        Ok(())
    }

    /// Pulls what there is. A server says when a pull has brought all of it, but not when there is nothing,
    /// nor when it may not deliver more: then it is asked.
    async fn look(&self, wanted: &Wanted<'_>) -> Result<(), JobsError> {
        // What has come just now may be on its way through the pull that is open.
        let open = self.state.lock().pulls.newest();
        if let Some(number) = open
            && self.brings(number, AT_ONCE).await != Brought::All
        {
            return Ok(());
        }
        let was_full = self.state.lock().pulls.was_full;
        if !was_full && self.is_there_more().await? == Some(false) {
            return Ok(());
        }
        let mut pulled = 0;
        // What the first cost tells how many more there is room for.
        while pulled < self.options.fetch_batch.get() as usize {
            let Some(pull) = self.pull(wanted).await? else { return Ok(()) };
            self.await_pull(pull.number).await?;
            if !self.state.lock().pulls.was_full {
                return Ok(());
            }
            pulled += pull.batch;
        }
        Ok(())
    }

    /// Waits until a pull has brought what there is.
    async fn await_pull(&self, number: u64) -> Result<(), JobsError> {
        let mut patience = AT_ONCE;
        while self.brings(number, patience).await == Brought::Nothing {
            match self.is_there_more().await? {
                Some(true) => {}
                // Or it is on its way to here.
                None if patience < AT_ONCE * 4 => {}
                _ => break,
            }
            patience = (patience * 2).min(ANSWER);
        }
        Ok(())
    }

    /// What a pull has brought before nothing was heard of it for so long.
    async fn brings(&self, number: u64, silence: Duration) -> Brought {
        let began = Instant::now();
        loop {
            // From here on it is not missed.
            let turn = self.turn.notified();
            let until = {
                let state = self.state.lock();
                if !state.pulls.is_open(number) {
                    return Brought::All;
                }
                if state.ready.len() >= BUNCH {
                    return Brought::Some;
                }
                began.max(state.heard_at) + silence
            };
            if until <= Instant::now() {
                return Brought::Nothing;
            }
            let _ = timeout_at(until, turn).await;
        }
    }

    /// Whether the server has something to deliver; nothing said: others hold something that may come back.
    async fn is_there_more(&self) -> Result<Option<bool>, JobsError> {
        let Deliveries { may_go_on, are_left, are_all_here } = self.deliveries().await?;
        Ok(match (may_go_on, are_left) {
            (false, _) => Some(false),
            (true, true) => Some(true),
            (true, false) => are_all_here.then_some(false),
        })
    }

    async fn deliveries(&self) -> Result<Deliveries, JobsError> {
        let info = self.consumer.get_info().await;
        let info = info.map_err(|error| unavailable("asking for the consumer", error))?;
        let most = usize::try_from(info.config.max_ack_pending).unwrap_or(usize::MAX);
        let may_go_on = info.num_ack_pending < most;
        let are_left = info.num_pending > 0;
        let is_awaited_here = info.num_ack_pending <= self.state.lock().ours();
        let are_all_here = is_awaited_here && !(may_go_on && are_left);
        Ok(Deliveries { may_go_on, are_left, are_all_here })
    }

    /// Opens a pull for what there is, or else for what comes first, if there is room for more than is ready
    /// and under way.
    async fn pull(&self, wanted: &Wanted<'_>) -> Result<Option<Opened>, JobsError> {
        let opened = {
            let mut state = self.state.lock();
            if let Some(fault) = state.fault.take() {
                return Err(JobsError::Unavailable(fault.into()));
            }
            let room = wanted.room.saturating_sub(state.ready_cost(wanted.capacity));
            let most = self.options.fetch_batch.get() as usize;
            // A few at a time would cost as much as many, once there are enough to begin with.
            let is_worth_it = room > 0 && (state.ready.len() < BUNCH || room > wanted.room / 4);
            is_worth_it.then(|| state.open(room, most)).flatten()
        };
        let Some(opened) = opened else { return Ok(None) };
        let Opened { batch, ref inbox, .. } = opened;
        let request = BatchConfig {
            batch,
            // It ends when there is no more, but waits for the first.
            no_wait: true,
            expires: Some(self.options.fetch_timeout),
            idle_heartbeat: idle_heartbeat(&self.options),
            ..BatchConfig::default()
        };
        let asked = self.consumer.request_batch(request, inbox.as_str().into()).await;
        asked.map_err(|error| {
            self.state.lock().pulls.leave();
            unavailable("pulling", error)
        })?;
        Ok(Some(opened))
    }

    /// What came before it was asked for is held for less than a lease: begin that anew, unless it came just
    /// before.
    async fn touch(&self, asked: Instant) -> Result<(), JobsError> {
        let Some(before) = asked.checked_sub(self.options.ack_wait / JUST_BEFORE) else {
            return Ok(());
        };
        let early = self.state.lock().came_before(before);
        for reply in early {
            let touched = self.client.publish(reply, AckKind::Progress.into()).await;
            touched.map_err(|error| unavailable("acknowledging", error))?;
        }
        Ok(())
    }

    fn hand_out(&self, wanted: &Wanted<'_>) -> Taken {
        let mut cost = 0_u32;
        let now = SystemTime::now();
        let mut state = self.state.lock();
        let mut jobs = Vec::with_capacity(state.ready.len().min(wanted.room as usize));
        state.forget_untaken(self.options.ack_wait);
        while cost < wanted.room {
            let Some((letter, asked, until)) = state.next(self.options.ack_wait) else { break };
            cost = cost.saturating_add(asked.cost.min(wanted.capacity));
            let story =
                if self.telling.is_some() { Story::of(wanted.worker) } else { Story::default() };
            let held = state.hold(Arc::clone(&letter), story, until);
            let id = JobId(letter.sequence);
            if self.telling.is_some() {
                let step = Step::of(JobState::Running, held.attempt, &letter, &held.story);
                self.tell(id, &asked, || letter.payload(), &step);
            }
            jobs.push(Given {
                claim: letter.claim(),
                kind: asked.kind,
                payload: letter.payload(),
                cost: asked.cost,
                attempt: held.attempt,
                max_attempts: asked.max_attempts,
                timeout: asked.timeout,
                tags: asked.tags,
                trace: asked.trace,
                // When it was put back nobody has written down.
                waited: (letter.delivered == 1)
                    .then(|| now.duration_since(letter.published).ok())
                    .flatten(),
            });
        }
        // Who waits is called when something comes, and when pulls can be opened again.
        let pulls = &state.pulls;
        let is_called = pulls.is_any_open() || pulls.have_left() || pulls.were_refused();
        let nothing_more = state.ready.is_empty() && is_called;
        Taken { jobs, rest: nothing_more.then_some(self.options.fetch_timeout) }
    }

    /// Ends the pulls that are open and gives back what they brought. A worker that releases a job is about to
    /// stop: the job should not come back to it.
    async fn step_back(&self) {
        let (done, is_done) = oneshot::channel();
        if self.leave.send(done).await.is_ok() {
            let _ = timeout(ANSWER, is_done).await;
        }
    }

    /// Has the server confirm an acknowledgement of some kind. One that is lost with its connection must not be
    /// waited for until the lease is over.
    async fn confirm(&self, letter: &Letter, kind: AckKind) -> Result<(), JobsError> {
        let patience = ANSWER.min(self.options.ack_wait / 3);
        let request = Request::new().payload(Bytes::from(kind)).timeout(Some(patience));
        let confirmed = self.client.send_request(letter.reply.clone(), request).await;
        confirmed.map(|_| ()).map_err(|error| unavailable("acknowledging", error))
    }

    /// Prolongs the lease of one that is still ours.
    async fn prolong(&self, claim: Claim) -> Result<Option<Arc<Letter>>, JobsError> {
        let asked = Instant::now();
        let found = self.state.lock().held(claim, asked).map(|held| Arc::clone(&held.letter));
        let Some(letter) = found else { return Ok(None) };
        self.confirm(&letter, AckKind::Progress).await?;
        let mut state = self.state.lock();
        let Some(held) = state.held(claim, Instant::now()) else { return Ok(None) };
        held.until = asked + self.options.ack_wait;
        Ok(Some(letter))
    }

    /// Takes note of what there is to tell of one whose lease was prolonged.
    fn note(&self, claim: Claim, note: &Note, letter: &Letter) -> Kept {
        let mut state = self.state.lock();
        let Some(held) = state.held(claim, Instant::now()) else { return Kept::Lost };
        if !note.is_empty() && self.telling.is_some() {
            let story = &mut held.story;
            if let Some(progress) = note.progress {
                story.progress = progress.clamp(0.0, 1.0);
            }
            if let Some(message) = &note.message {
                story.message = Some(shortened(message, LONGEST_TEXT));
            }
            story.log = tail(&story.log, &note.log);
            let step = Step::of(JobState::Running, held.attempt, letter, story);
            self.tell_of(letter, &step);
        }
        Kept::Ours
    }

    /// Those that are still ours, and were not settled before: what was is answered as it was then.
    fn ours<'e>(
        &self,
        ended: &'e [(Claim, Fate)],
        now: Instant,
        answers: &mut [Settled],
    ) -> Vec<Going<'e>> {
        let mut state = self.state.lock();
        let mut ours = Vec::with_capacity(ended.len());
        for (at, (claim, fate)) in ended.iter().enumerate() {
            if let Some(settled) = state.settled(*claim) {
                answers[at] = settled;
                continue;
            }
            let Some(held) = state.held(*claim, now) else { continue };
            let (letter, attempt) = (Arc::clone(&held.letter), held.attempt);
            ours.push(Going {
                at,
                claim: *claim,
                fate,
                letter,
                attempt,
                story: held.story.clone(),
            });
        }
        ours
    }

    /// Records that jobs are done, and acknowledges them: the last is confirmed, and with it the others, as the
    /// server takes them in order. If they are all that is settled, nothing can come between that and its answer.
    async fn acknowledge(
        &self,
        done: &[Going<'_>],
        is_all: bool,
    ) -> Result<Vec<(usize, Settled)>, JobsError> {
        let Some((last, early)) = done.split_last() else { return Ok(Vec::new()) };
        let recorded = match &self.telling {
            None => None,
            Some(telling) => {
                let ends = done.iter().filter_map(|going| self.done_step(going));
                Some(telling.told(ends.collect()).await?)
            }
        };
        let connects = self.connects();
        for going in early {
            let said = self.client.publish(going.letter.reply.clone(), AckKind::Ack.into()).await;
            said.map_err(|error| unavailable("acknowledging", error))?;
        }
        self.confirm(&last.letter, AckKind::Ack).await?;
        if !early.is_empty() && self.connects() != connects {
            return Err(JobsError::Unavailable("the connection to NATS was lost meanwhile".into()));
        }
        let (mut state, now) = (self.state.lock(), Instant::now());
        let answer = |(number, going): (usize, &Going<'_>)| {
            state.is_over(&going.letter);
            // What was recorded stands; else somebody else may have it by now.
            let is_ours = match &recorded {
                Some(recorded) => recorded.get(number).copied().unwrap_or(true),
                None => state.held(going.claim, now).is_some(),
            };
            let settled = if is_ours { Settled::Gone } else { Settled::Stale };
            if !is_all {
                state.settle(going.claim, settled, now + self.options.ack_wait);
            }
            (going.at, settled)
        };
        Ok(done.iter().enumerate().map(answer).collect())
    }

    /// What a monitor is told of one that is done.
    fn done_step(&self, going: &Going<'_>) -> Option<Job> {
        let (Ok(asked), Fate::Done { result }) = (&going.letter.asked, going.fate) else {
            return None;
        };
        let letter = &going.letter;
        let step = Step {
            result: result.clone(),
            progress: 1.0,
            ..Step::of(JobState::Done, going.attempt, letter, &going.story)
        };
        Some(self.told(JobId(letter.sequence), asked, letter.payload(), &step))
    }

    /// Asks the records once more, if they gave no answer. Until they do nothing is pulled: it would have to be
    /// given back, again and again, and each time is a delivery.
    async fn ask_again(&self) -> Result<(), JobsError> {
        let Some(telling) = &self.telling else { return Ok(()) };
        let unanswered = self.state.lock().unanswered;
        if let Some(one) = unanswered {
            telling.ended(&self.connection, &[one]).await?;
            self.state.lock().unanswered = None;
        }
        Ok(())
    }

    /// Acknowledges what has come and has ended before, as its record says: that was lost on the way. What is dead
    /// may have been lost on its way to the dead letters, too.
    async fn drop_ended(&self) -> Result<(), JobsError> {
        let Some(telling) = &self.telling else { return Ok(()) };
        let come = self.state.lock().unknown();
        if come.is_empty() {
            return Ok(());
        }
        let ended = telling.ended(&self.connection, &come).await;
        let ended = ended.inspect_err(|_| self.state.lock().unanswered = come.first().copied())?;
        let over = come.iter().zip(ended).filter_map(|((id, _), ended)| Some((id.0, ended?)));
        let over: HashMap<u64, Ended> = over.collect();
        let letters = self.state.lock().are_known(&come, |sequence| over.contains_key(&sequence));
        for letter in letters {
            if let Some(ended) = over.get(&letter.sequence) {
                self.drop_one(&letter, ended).await?;
            }
        }
        Ok(())
    }

    /// Acknowledges one that has ended.
    async fn drop_one(&self, letter: &Letter, ended: &Ended) -> Result<(), JobsError> {
        tracing::debug!(sequence = letter.sequence, "a job that has ended was still there");
        if let Ended { status: JobState::Dead, error } = ended {
            let error = error.as_deref().unwrap_or_default();
            if let Err(error) = self.store_dead(letter, &Death { reason: "failed", error }).await {
                unstored(&error);
                return Ok(());
            }
        }
        // If this is lost, it comes once more.
        let said = self.client.publish(letter.reply.clone(), AckKind::Ack.into()).await;
        said.map_err(|error| unavailable("acknowledging", error))
    }

    /// How often there was a connection.
    fn connects(&self) -> u64 {
        self.client.statistics().connects.load(Ordering::Relaxed)
    }

    /// Has a job come again, or bury it.
    async fn settle(&self, going: &Going<'_>) -> Result<Settled, JobsError> {
        let Going { claim, fate, letter, attempt, story, .. } = going;
        let most = letter.asked.as_ref().map_or(0, |asked| asked.max_attempts);
        let mut step = Step::of(JobState::Waiting, *attempt, letter, story);
        let back = |after: Duration| AckKind::Nak(Some(after.min(LONGEST_DELAY)));
        let settled = match fate {
            Fate::Done { .. } => unreachable!("what is done is acknowledged"),
            // A worker says itself that a job is dead that failed in its last attempt.
            Fate::Dead { error } | Fate::Again { error, .. } if *attempt >= most => {
                self.dies(going, &Death { reason: "failed-too-often", error }).await?
            }
            Fate::Dead { error } => self.dies(going, &Death { reason: "failed", error }).await?,
            Fate::Again { after, error } => {
                self.confirm(letter, back(*after)).await?;
                step.error = Some(error.clone());
                step.run_at += (*after).min(LONGEST_DELAY);
                Settled::Again(*after)
            }
            Fate::Snooze(after) => {
                self.confirm(letter, back(*after)).await?;
                step.run_at += (*after).min(LONGEST_DELAY);
                step.attempts -= 1;
                Settled::Again(*after)
            }
            Fate::Released => {
                self.confirm(letter, AckKind::Nak(None)).await?;
                step.attempts -= 1;
                Settled::Again(Duration::ZERO)
            }
        };
        {
            let mut state = self.state.lock();
            match (fate, settled) {
                (_, Settled::Gone | Settled::Parked) => state.is_over(letter),
                (Fate::Snooze(_) | Fate::Released, _) => state.forgive(letter.sequence),
                _ => {}
            }
            state.settle(*claim, settled, Instant::now() + self.options.ack_wait);
        }
        if let Settled::Again(_) = settled {
            self.tell_of(letter, &step);
        }
        Ok(settled)
    }

    /// Has a job be dead: that is recorded, it is stored with the dead ones, and only then delivered no more. One that
    /// cannot be stored must not hold up the others, and comes again: to be stored, if it is recorded.
    async fn dies(&self, going: &Going<'_>, why: &Death<'_>) -> Result<Settled, JobsError> {
        let letter = &going.letter;
        let is_so = self.record_dead(letter, why, going.attempt, &going.story).await?;
        if is_so && let Err(error) = self.store_dead(letter, why).await {
            self.connected()?;
            unstored(&error);
            let is_recorded = self.telling.is_some();
            return Ok(if is_recorded { Settled::Parked } else { Settled::Stale });
        }
        self.confirm(letter, AckKind::Term).await?;
        Ok(if is_so { Settled::Parked } else { Settled::Stale })
    }

    /// Stores a message with the dead ones.
    async fn store_dead(&self, letter: &Letter, why: &Death<'_>) -> Result<(), JobsError> {
        let message = letter.dead(why, &self.options, self.client.max_payload());
        let sent = self.context.send_publish(self.options.dead_subject(), message).await;
        let ack = sent.map_err(unpublished)?.await.map_err(unpublished)?;
        if ack.stream != self.options.dead_stream {
            let wrong = format!("dead letters went to the stream {}", ack.stream);
            return Err(JobsError::Failed(wrong.into()));
        }
        Ok(())
    }

    /// Records that a job is dead, if jobs are recorded. Whether it is so, and had not ended otherwise.
    async fn record_dead(
        &self,
        letter: &Letter,
        why: &Death<'_>,
        attempts: u32,
        story: &Story,
    ) -> Result<bool, JobsError> {
        let (Some(telling), Ok(asked)) = (&self.telling, &letter.asked) else { return Ok(true) };
        let mut step = Step::of(JobState::Dead, attempts, letter, story);
        step.error = Some(why.error.to_owned());
        let end = self.told(JobId(letter.sequence), asked, letter.payload(), &step);
        Ok(telling.told(vec![end]).await?.first().copied().unwrap_or(true))
    }

    /// Buries what is ready and is no job, or was begun too often.
    async fn bury_poison(&self) {
        let poison = self.state.lock().poison();
        join_all(poison.iter().map(|letter| self.bury_one(letter))).await;
    }

    async fn bury_one(&self, letter: &Letter) {
        let why = match &letter.asked {
            Err(error) => Death { reason: "unreadable", error },
            Ok(_) => Death { reason: "worker-gone", error: "its worker went away" },
        };
        let attempts = self.state.lock().attempt(letter).saturating_sub(1);
        let buried = async {
            if self.record_dead(letter, &why, attempts, &Story::default()).await? {
                self.store_dead(letter, &why).await?;
            }
            self.confirm(letter, AckKind::Term).await
        };
        if let Err(error) = buried.await {
            let error = vedetta_core::explain(&error);
            tracing::warn!(error, "a message could not be buried; it comes again");
            return;
        }
        tracing::warn!(sequence = letter.sequence, why = why.error, "a message is dead");
        self.state.lock().is_over(letter);
    }

    fn tell_of(&self, letter: &Letter, step: &Step) {
        if let Ok(asked) = &letter.asked {
            self.tell(JobId(letter.sequence), asked, || letter.payload(), step);
        }
    }

    fn tell(&self, id: JobId, asked: &Asked, payload: impl FnOnce() -> Json, step: &Step) {
        if let Some(telling) = &self.telling {
            telling.tell(self.told(id, asked, payload(), step));
        }
    }

    /// What a monitor is told.
    fn told(&self, id: JobId, asked: &Asked, payload: Json, step: &Step) -> Job {
        let now = SystemTime::now();
        let error = step.error.as_ref().map(|error| shortened(error, LONGEST_TEXT));
        Job {
            id,
            kind: asked.kind.clone(),
            queue: self.options.queue.clone(),
            connection: self.connection.clone(),
            status: step.status,
            payload,
            cost: asked.cost,
            priority: 0,
            attempts: step.attempts,
            max_attempts: asked.max_attempts,
            timeout: asked.timeout,
            unique_key: None,
            tags: asked.tags.clone(),
            trace: asked.trace,
            progress: step.progress,
            message: step.story.message.clone(),
            log: step.story.log.clone(),
            result: step.result.clone(),
            error,
            worker: step.story.worker.clone(),
            queued_at: step.queued_at,
            run_at: step.run_at,
            started_at: step.story.started_at,
            ended_at: step.status.is_over().then_some(now),
            updated_at: now,
        }
    }
}

/// A job that is being settled, and was ours when that began.
struct Going<'e> {
    /// Its place among those that are settled together.
    at: usize,
    claim: Claim,
    fate: &'e Fate,
    letter: Arc<Letter>,
    attempt: u32,
    story: Story,
}

/// How far the server is with what it has to deliver.
struct Deliveries {
    /// No more are awaited than may be.
    may_go_on: bool,
    /// Some were not delivered yet.
    are_left: bool,
    /// All that were delivered are here, and no more are just now.
    are_all_here: bool,
}

/// What has come of a pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Brought {
    /// All that it was opened for, or that there is.
    All,
    /// Enough to begin with.
    Some,
    /// No more for a while.
    Nothing,
}

/// What a monitor is told of a job, beside what it was asked for.
struct Step {
    status: JobState,
    attempts: u32,
    queued_at: SystemTime,
    run_at: SystemTime,
    progress: f32,
    result: Option<Json>,
    error: Option<String>,
    story: Story,
}

impl Step {
    fn queued(at: SystemTime) -> Self {
        Self {
            status: JobState::Waiting,
            attempts: 0,
            queued_at: at,
            run_at: at,
            progress: 0.0,
            result: None,
            error: None,
            story: Story::default(),
        }
    }

    fn of(status: JobState, attempts: u32, letter: &Letter, story: &Story) -> Self {
        Self {
            status,
            attempts,
            queued_at: whole_millis(letter.published),
            progress: story.progress,
            story: story.clone(),
            ..Self::queued(SystemTime::now())
        }
    }
}

/// The same time as records keep it: whoever carries it there must not change it.
fn whole_millis(time: SystemTime) -> SystemTime {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let millis = Duration::from_millis(u64::from(since.subsec_millis()));
    SystemTime::UNIX_EPOCH + Duration::from_secs(since.as_secs()) + millis
}

fn unstored(error: &JobsError) {
    let error = vedetta_core::explain(error);
    tracing::error!(error, "a dead letter could not be stored; its message comes again");
}

fn unpublished(error: async_nats::jetstream::context::PublishError) -> JobsError {
    match error.kind() {
        PublishErrorKind::TimedOut
        | PublishErrorKind::BrokenPipe
        | PublishErrorKind::StreamNotFound
        | PublishErrorKind::MaxAckPending => unavailable("publishing", error),
        _ => failed("publishing", error),
    }
}

type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Why the server did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
struct Trouble {
    what: String,
    source: Cause,
}

fn unavailable(what: impl Into<String>, source: impl Into<Cause>) -> JobsError {
    JobsError::Unavailable(Trouble { what: what.into(), source: source.into() }.into())
}

fn failed(what: impl Into<String>, source: impl Into<Cause>) -> JobsError {
    JobsError::Failed(Trouble { what: what.into(), source: source.into() }.into())
}
