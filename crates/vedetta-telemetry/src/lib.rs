//! Traces and numbers for OpenTelemetry, over OTLP with HTTP and protobuf.
//!
//! ```text
//! Spans ──try──► bounded queue ──► one thread: batches ──POST /v1/traces──► collector
//! numbers ──────────▲                                  └─POST /v1/metrics─►
//! ```
//!
//! Nobody waits for it: what does not fit is dropped and counted. While the collector is away spans are kept, as
//! many as there is room for; that it is away is logged once, and that it is back. What is told is not decided here.

mod encode;
mod message;
mod settings;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::time::{Duration, Instant, SystemTime};

use prost::Message as _;
use ureq::Agent;
use vedetta_core::measure::Family;
use vedetta_core::trace::{Span, Spans};

use self::encode::Teller;
use self::message::Answer;
pub use self::settings::{Settings, SettingsError};

/// Spans on their way to the thread, and as many that it keeps.
const QUEUE: usize = 4096;
/// Spans of one request.
const BATCH: usize = 512;
/// A span is sent after so long at the latest.
const DELAY: Duration = Duration::from_secs(1);
/// A request may take so long.
const WHOLE: Duration = Duration::from_secs(5);
/// The last ones, too.
const LAST: Duration = Duration::from_secs(2);
/// After a failure it is tried again so much later, and twice as much after the next.
const AGAIN: Duration = Duration::from_secs(1);
const SELDOM: Duration = Duration::from_secs(30);
/// Bytes of an answer.
const ANSWER: u64 = 1 << 20;

enum Told {
    Span(Box<Span>),
    Numbers(Vec<Family>),
    /// Send what is there, and end.
    End(Sender<()>),
}

/// Sends what it is told, from a thread of its own, which ends with this.
pub struct Exporter {
    queue: SyncSender<Told>,
    dropped: Arc<AtomicU64>,
    sample: f64,
    /// Nobody takes anything any more.
    is_closed: AtomicBool,
}

impl std::fmt::Debug for Exporter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exporter").field("dropped", &self.dropped).finish_non_exhaustive()
    }
}

impl Exporter {
    /// Starts it. `about` is what the program says of itself, such as `service.instance.id`.
    pub fn start(settings: &Settings, about: &[(&str, &str)]) -> Result<Arc<Self>, SettingsError> {
        let (queue, told) = sync_channel(QUEUE);
        let dropped = Arc::<AtomicU64>::default();
        let mut line = Line {
            agent: settings.agent(WHOLE)?,
            teller: Teller::new(&settings.about(about)),
            settings: settings.clone(),
            dropped: Arc::clone(&dropped),
            kept: Vec::new(),
            due: None,
            failures: 0,
            refused: false,
        };
        std::thread::Builder::new()
            .name("vedetta-telemetry".into())
            .spawn(move || line.run(&told))
            .map_err(SettingsError::Thread)?;
        let sample = settings.sample;
        Ok(Arc::new(Self { queue, dropped, sample, is_closed: AtomicBool::new(false) }))
    }

    /// Sends numbers as they are now, unless too much waits to be sent.
    pub fn numbers(&self, families: Vec<Family>) {
        let _ = self.queue.try_send(Told::Numbers(families));
    }

    /// Sends what is left, if that can be done in two seconds. It blocks.
    pub fn close(&self) {
        if self.is_closed.swap(true, Ordering::Relaxed) {
            return;
        }
        let (end, ended) = channel();
        let until = Instant::now() + LAST;
        let mut told = Told::End(end);
        // What is full is emptied by the thread all the time.
        while let Err(std::sync::mpsc::TrySendError::Full(back)) = self.queue.try_send(told) {
            if Instant::now() >= until {
                return;
            }
            told = back;
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = ended.recv_timeout(until.saturating_duration_since(Instant::now()));
    }
}

impl Spans for Exporter {
    #[expect(clippy::cast_precision_loss, reason = "a part of all numbers there are")]
    fn samples(&self, trace: u128) -> bool {
        // The lower half is random whoever made it.
        ((trace & u128::from(u64::MAX)) as f64) < self.sample * (u64::MAX as f64)
            || self.sample >= 1.0
    }

    fn ended(&self, span: Span) {
        // Its thread may not have ended yet.
        let is_closed = self.is_closed.load(Ordering::Relaxed);
        if is_closed || self.queue.try_send(Told::Span(Box::new(span))).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

/// Why something was not sent.
enum Fault {
    /// It may be taken later.
    Away(String),
    /// It will never be.
    Refused(String),
}

/// What the thread has.
struct Line {
    agent: Agent,
    teller: Teller,
    settings: Settings,
    dropped: Arc<AtomicU64>,
    kept: Vec<Span>,
    /// When what is kept is to be sent.
    due: Option<Instant>,
    failures: u32,
    /// That something was refused has been logged.
    refused: bool,
}

impl Line {
    fn run(&mut self, told: &Receiver<Told>) {
        loop {
            let heard = match self.due {
                // Nothing is kept, so nothing is to be done.
                None => told.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(due) => told.recv_timeout(due.saturating_duration_since(Instant::now())),
            };
            match heard {
                Ok(Told::Span(span)) => self.keep(*span),
                Ok(Told::Numbers(families)) => {
                    let body = self.teller.numbers(&families, SystemTime::now());
                    let sent = self.post("v1/metrics", &body, WHOLE);
                    self.heard(sent.map(drop));
                }
                Ok(Told::End(ended)) => {
                    self.send(LAST);
                    let _ = ended.send(());
                    return;
                }
                Err(RecvTimeoutError::Timeout) => self.send(WHOLE),
                Err(RecvTimeoutError::Disconnected) => return self.send(LAST),
            }
        }
    }

    fn keep(&mut self, span: Span) {
        if self.kept.len() == QUEUE {
            self.drop_some(1);
            return;
        }
        self.kept.push(span);
        if self.kept.len() >= BATCH && self.failures == 0 {
            self.send(WHOLE);
        } else if self.due.is_none() {
            self.due = Some(Instant::now() + DELAY);
        }
    }

    fn drop_some(&self, count: usize) {
        self.dropped.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// Sends what is kept, batch by batch.
    fn send(&mut self, limit: Duration) {
        while !self.kept.is_empty() {
            let count = self.kept.len().min(BATCH);
            let body = self.teller.spans(&self.kept[..count]);
            let sent = self.post("v1/traces", &body, limit);
            let is_away = matches!(sent, Err(Fault::Away(_)));
            match &sent {
                Ok(rejected) => self.drop_some((*rejected).min(count)),
                Err(Fault::Refused(_)) => self.drop_some(count),
                Err(Fault::Away(_)) => {}
            }
            self.heard(sent.map(drop));
            if is_away {
                let wait = AGAIN.saturating_mul(1 << self.failures.min(5)).min(SELDOM);
                self.due = Some(Instant::now() + wait);
                return;
            }
            self.kept.drain(..count);
        }
        self.due = None;
    }

    /// Logs what is new about the collector.
    fn heard(&mut self, sent: Result<(), Fault>) {
        let to = &self.settings.shown;
        match sent {
            Ok(()) => {
                if self.failures > 0 {
                    let dropped = self.dropped.load(Ordering::Relaxed);
                    tracing::info!(to, dropped, "telemetry is sent again");
                }
                self.failures = 0;
            }
            Err(Fault::Away(why)) => {
                if self.failures == 0 {
                    let kept = "spans are kept for a while, and then dropped";
                    tracing::warn!(to, why, "telemetry cannot be sent: {kept}");
                }
                self.failures = self.failures.saturating_add(1);
            }
            Err(Fault::Refused(why)) => {
                if !std::mem::replace(&mut self.refused, true) {
                    tracing::warn!(to, why, "telemetry was refused, and dropped; said only once");
                }
            }
        }
    }

    /// How many of them were rejected.
    fn post(&self, path: &str, body: &[u8], limit: Duration) -> Result<usize, Fault> {
        let away = |error: ureq::Error| Fault::Away(error.to_string());
        let url = format!("{}/{path}", self.settings.url);
        let mut request = self.agent.post(url).header("Content-Type", "application/x-protobuf");
        for (name, value) in &self.settings.headers {
            request = request.header(name, value);
        }
        let request = request.config().timeout_global(Some(limit)).build();
        let mut answer = request.send(body).map_err(away)?;
        match answer.status().as_u16() {
            200..=299 => {}
            429 | 502 | 503 | 504 => {
                return Err(Fault::Away(format!("it answered {}", answer.status())));
            }
            _ => return Err(Fault::Refused(format!("it answered {}", answer.status()))),
        }
        let body = answer.body_mut().with_config().limit(ANSWER).read_to_vec().map_err(away)?;
        // What cannot be read says nothing of what was rejected.
        let partial = Answer::decode(&body[..]).ok().and_then(|answer| answer.partial);
        let rejected = partial.as_ref().map_or(0, |partial| partial.rejected);
        if let Some(partial) = partial.filter(|partial| partial.rejected > 0) {
            tracing::debug!(rejected, why = partial.why, "some telemetry was rejected");
        }
        Ok(usize::try_from(rejected).unwrap_or(0))
    }
}
