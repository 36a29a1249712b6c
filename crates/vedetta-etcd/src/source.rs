//! An etcd elsewhere as a source of changes, and to write to.
//!
//! ```text
//!               ┌─ node a
//! Cluster ─────►├─ node b ◄── one connection, until something fails; then the next node's turn
//!               └─ node c
//! ```
//!
//! A list is linearizable and comes in pages of one revision. A watch that is silent is asked whether it
//! is still there, and one that does not answer is lost. A call tries one node only: when to try again is
//! up to the caller. Only a lease is kept alive on whichever node answers.

mod address;
mod feed;
mod lease;
mod line;
mod registry;
mod write;

use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tonic::{Code, Status};
use vedetta_core::{Entry, KeyRange, Page, Revision, Source, SourceError};
use vedetta_net::tls::HTTP2;

use crate::{ClientTls, TlsError};
use address::Address;
pub use address::BadEndpoint;
pub use feed::ClusterFeed;
pub use lease::Lease;
use line::{Line, Settings, User};
use proto::etcdserverpb::RangeRequest;
pub use write::{Is, Write, WriteError, Written};

/// The messages, as `build.rs` makes them.
#[allow(clippy::all, clippy::pedantic, missing_docs, unreachable_pub, dead_code)]
mod proto {
    pub(crate) mod etcdserverpb {
        include!(concat!(env!("OUT_DIR"), "/source/etcdserverpb.rs"));
    }
    pub(crate) mod mvccpb {
        include!(concat!(env!("OUT_DIR"), "/source/mvccpb.rs"));
    }
}

/// How long a silence is borne.
const PATIENCE: Duration = Duration::from_secs(5);
/// All of a page has so many times that: it may be large.
const WHOLE_PAGE: u32 = 12;

/// The nodes of an etcd (3.4 or later), or a Vedetta. Clones share their connection.
#[derive(Clone)]
pub struct Cluster {
    addresses: Vec<Address>,
    settings: Settings,
    turn: Arc<Turn>,
}

/// Which node is asked.
#[derive(Default)]
struct Turn {
    now: Mutex<Now>,
    /// Held by who connects, so that the others wait for that connection.
    connecting: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Now {
    /// Which of the addresses; it only ever grows.
    at: usize,
    line: Option<Line>,
}

impl Cluster {
    /// The nodes at these endpoints: `http://host:2379` or `https://host:2379`. Without a scheme it is
    /// TLS if there is [`tls`](Self::tls), without a port 2379.
    pub fn new<T: AsRef<str>>(endpoints: impl IntoIterator<Item = T>) -> Result<Self, BadEndpoint> {
        let addresses = endpoints.into_iter().map(|text| text.as_ref().parse());
        let addresses = addresses.collect::<Result<Vec<_>, _>>()?;
        if addresses.is_empty() {
            return Err(BadEndpoint::Missing);
        }
        let settings = Settings { tls: None, user: None, patience: PATIENCE };
        Ok(Self { addresses, settings, turn: Arc::default() })
    }

    /// The same over TLS.
    pub fn tls(mut self, files: &ClientTls) -> Result<Self, TlsError> {
        self.settings.tls = Some(files.load(&[HTTP2])?);
        Ok(self.apart())
    }

    /// The same as a user, wherever the cluster asks who we are.
    #[must_use]
    pub fn user(mut self, name: impl Into<String>, password: impl Into<String>) -> Self {
        self.settings.user = Some(User { name: name.into(), password: password.into() });
        self.apart()
    }

    /// The same with another patience than 5 s: a connection must stand after that time, a watch that
    /// was silent for so long is asked and has as long to answer, and any other answer must begin within
    /// twice that time.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.settings.patience = patience;
        self.apart()
    }

    /// With a connection of its own: what other clones say is not said in its name.
    fn apart(self) -> Self {
        Self { turn: Arc::default(), ..self }
    }

    /// What a key holds now; nothing acknowledged before the call is missing.
    pub async fn get(&self, key: impl Into<Bytes> + Send) -> Result<Option<Entry>, SourceError> {
        let page = self.list(KeyRange::One(key.into()), None).await?;
        Ok(page.entries.into_iter().next())
    }

    /// The connection, or a new one.
    async fn line(&self) -> Result<Line, SourceError> {
        self.line_within(self.settings.patience).await
    }

    async fn line_within(&self, limit: Duration) -> Result<Line, SourceError> {
        let _connecting = self.turn.connecting.lock().await;
        let at = {
            let now = self.turn.now();
            match &now.line {
                Some(line) if line.is_open() => return Ok(line.clone()),
                _ => now.at,
            }
        };
        let address = &self.addresses[at % self.addresses.len()];
        // Boxed: rare and large.
        match Box::pin(Line::connect(address, &self.settings, limit)).await {
            Ok(line) => {
                self.turn.now().line = Some(line.clone());
                Ok(line)
            }
            Err(error) => {
                *self.turn.now() = Now { at: at + 1, line: None };
                Err(error)
            }
        }
    }

    /// Asks the node whose turn it is. If it does not answer in time, or badly, the next one's comes.
    async fn ask<T, F>(
        &self,
        what: &str,
        ask: impl FnOnce(Line) -> F + Send,
    ) -> Result<T, SourceError>
    where
        F: Future<Output = Result<T, Status>> + Send,
    {
        let limit = self.settings.patience;
        let line = self.line_within(limit).await?;
        self.ask_on(&line, what, limit, ask).await
    }

    async fn ask_on<T, F>(
        &self,
        line: &Line,
        what: &str,
        limit: Duration,
        ask: impl FnOnce(Line) -> F + Send,
    ) -> Result<T, SourceError>
    where
        F: Future<Output = Result<T, Status>> + Send,
    {
        let answer = match tokio::time::timeout(limit, ask(line.clone())).await {
            Ok(answer) => answer.map_err(|status| line.lost(&status)),
            Err(_) => Err(line.silent(what, limit)),
        };
        answer.inspect_err(|error| self.turn.failed(line, error))
    }

    /// The first keys of a range, as many as fit.
    async fn page(
        line: &Line,
        range: &KeyRange,
        at: Option<Revision>,
    ) -> Result<Page, SourceError> {
        let (key, range_end) = on_the_wire(range);
        let revision = at.map_or(0, |at| at.0.cast_signed());
        loop {
            let limit = line.page_size();
            let (key, range_end) = (key.clone(), range_end.clone());
            let ask = RangeRequest { key, range_end, limit, revision, ..Default::default() };
            let answer = match line.range(ask).await {
                Ok(answer) => answer,
                Err(status) if is_too_large(&status) && limit > 1 => {
                    line.set_page_size(limit / 2);
                    continue;
                }
                Err(status) => {
                    return Err(match at {
                        Some(asked) if is_compacted(&status) => SourceError::Compacted { asked },
                        _ => line.lost(&status),
                    });
                }
            };
            let entries = answer.kvs.into_iter().map(|kv| Entry {
                key: kv.key,
                value: kv.value,
                modified: Revision(kv.mod_revision.cast_unsigned()),
            });
            let now = answer.header.map_or(0, |header| header.revision);
            return Ok(Page {
                entries: entries.collect(),
                revision: at.unwrap_or(Revision(now.cast_unsigned())),
                more: answer.more,
            });
        }
    }
}

impl Source for Cluster {
    type Feed = ClusterFeed;

    async fn list(&self, range: KeyRange, at: Option<Revision>) -> Result<Page, SourceError> {
        let line = self.line().await?;
        let limit = self.settings.patience * WHOLE_PAGE;
        let page = tokio::time::timeout(limit, Self::page(&line, &range, at)).await;
        let page = page.unwrap_or_else(|_| Err(line.silent("the list", limit)));
        page.inspect_err(|error| self.turn.failed(&line, error))
    }

    async fn follow(
        &self,
        range: KeyRange,
        from: Revision,
    ) -> Result<(ClusterFeed, Revision), SourceError> {
        let line = self.line().await?;
        let turn = Arc::clone(&self.turn);
        let opened = ClusterFeed::open(line.clone(), turn, &range, from).await;
        opened.inspect_err(|error| self.turn.failed(&line, error))
    }
}

impl Turn {
    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next node's turn, if `line` was lost and is still the one in use.
    fn failed(&self, line: &Line, error: &SourceError) {
        let mut now = self.now();
        if matches!(error, SourceError::Lost(..)) && now.line.as_ref().is_some_and(|n| n.is(line)) {
            *now = Now { at: now.at + 1, line: None };
        }
    }
}

impl FromStr for Cluster {
    type Err = BadEndpoint;

    /// `etcd://a:2379,b:2379`.
    fn from_str(text: &str) -> Result<Self, BadEndpoint> {
        Self::new(text.strip_prefix("etcd://").unwrap_or(text).split(','))
    }
}

/// Says nothing that is secret.
impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nodes = self.addresses.iter().map(ToString::to_string).collect::<Vec<_>>();
        let user = self.settings.user.as_ref().map(|user| &user.name);
        f.debug_struct("Cluster")
            .field("nodes", &nodes)
            .field("user", &user)
            .finish_non_exhaustive()
    }
}

/// A range as etcd writes it: there is no empty key, an end of `\0` means "and everything after", and no
/// end "this key only".
fn on_the_wire(range: &KeyRange) -> (Bytes, Bytes) {
    const FIRST: Bytes = Bytes::from_static(b"\0");
    let start = if range.start().is_empty() { FIRST } else { range.start().clone() };
    match range {
        KeyRange::One(only) if !only.is_empty() => (start, Bytes::new()),
        KeyRange::Between(_, end) if !range.is_empty() && *end != FIRST => (start, end.clone()),
        KeyRange::From(_) => (start, FIRST),
        // No key can be in it.
        KeyRange::One(_) | KeyRange::Between(..) => {
            (Bytes::from_static(b"\x01"), Bytes::from_static(b"\x01"))
        }
    }
}

fn is_compacted(status: &Status) -> bool {
    status.code() == Code::OutOfRange && status.message().contains("has been compacted")
}

/// Whether the answer was larger than we, or somebody between us and etcd, would take.
fn is_too_large(status: &Status) -> bool {
    let told = status.message();
    matches!(status.code(), Code::OutOfRange | Code::ResourceExhausted)
        && (told.contains("length too large") || told.contains("larger than max"))
}
