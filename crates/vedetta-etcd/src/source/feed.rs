//! One watch.

use std::fmt;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};
use tonic::{Status, Streaming};
use vedetta_core::{Change, Changes, Feed, KeyRange, Revision, SourceError};

use super::line::Line;
use super::proto::etcdserverpb::watch_client::WatchClient;
use super::proto::etcdserverpb::watch_request::RequestUnion;
use super::proto::etcdserverpb::{
    RangeRequest, WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse,
};
use super::proto::mvccpb::Event;
use super::proto::mvccpb::event::EventType;
use super::{Turn, on_the_wire};

/// The changes of a range in a [`Cluster`](super::Cluster). Dropping it ends the watch.
pub struct ClusterFeed {
    line: Line,
    turn: Arc<Turn>,
    requests: mpsc::Sender<WatchRequest>,
    answers: Streaming<WatchResponse>,
    id: i64,
    /// Everything before this was given out.
    next: Revision,
    /// Changes of a revision whose others are still to come.
    held: Vec<Change>,
    silence: Silence,
}

/// What is done when nothing comes, and when.
struct Silence {
    until: Instant,
    asked: bool,
}

impl Silence {
    fn begins(patience: Duration) -> Self {
        Self { until: Instant::now() + patience, asked: false }
    }
}

impl ClusterFeed {
    pub(super) async fn open(
        line: Line,
        turn: Arc<Turn>,
        range: &KeyRange,
        from: Revision,
    ) -> Result<(Self, Revision), SourceError> {
        let (key, range_end) = on_the_wire(range);
        // A watch is opened by the node as far as it has come. This makes one that lags behind catch up
        // first, so that it is not taken for a source that went back.
        let ask = RangeRequest { key: key.clone(), keys_only: true, ..Default::default() };
        let stands = line.range(ask).await.map_err(|status| line.lost(&status))?;
        let stands = stands.header.map_or(0, |header| header.revision);

        let create = WatchCreateRequest {
            key,
            range_end,
            start_revision: from.0.cast_signed(),
            progress_notify: true,
            // Or what is large after a long absence comes as one message.
            fragment: true,
            ..Default::default()
        };
        let (requests, mut asked) = mpsc::channel(2);
        let _ = requests.try_send(request(RequestUnion::CreateRequest(create)));
        let asked = stream::poll_fn(move |cx| asked.poll_recv(cx));
        let mut client = WatchClient::new(line.clone()).max_decoding_message_size(usize::MAX);
        let mut answers =
            client.watch(asked).await.map_err(|status| line.lost(&status))?.into_inner();
        let limit = line.patience() * 2;
        let created = match timeout(limit, answers.message()).await {
            Ok(Ok(Some(created))) => created,
            Ok(Ok(None)) => return Err(ended(&line)),
            Ok(Err(status)) => return Err(line.lost(&status)),
            Err(_) => return Err(line.silent("a new watch", limit)),
        };
        if created.canceled {
            return Err(cancelled(&line, &created, from));
        }
        let stands = stands.max(created.header.map_or(0, |header| header.revision));
        let silence = Silence::begins(line.patience());
        let (id, held) = (created.watch_id, Vec::new());
        let feed = Self { line, turn, requests, answers, id, next: from, held, silence };
        Ok((feed, Revision(stands.cast_unsigned())))
    }

    async fn read(&mut self) -> Result<Changes, SourceError> {
        loop {
            let patience = self.line.patience();
            // First what has come, then the time: who was not asked for long lost no time.
            let answer = match timeout_at(self.silence.until, self.answers.message()).await {
                Ok(Ok(Some(answer))) => answer,
                Ok(Ok(None)) => return Err(ended(&self.line)),
                Ok(Err(status)) => return Err(self.line.lost(&status)),
                Err(_) if self.silence.asked => {
                    return Err(self.line.silent("the watch", patience * 2));
                }
                Err(_) => {
                    let ask = RequestUnion::ProgressRequest(WatchProgressRequest {});
                    let _ = self.requests.try_send(request(ask));
                    self.silence = Silence { asked: true, ..Silence::begins(patience) };
                    continue;
                }
            };
            self.silence = Silence::begins(patience);
            if answer.canceled {
                return Err(cancelled(&self.line, &answer, self.next));
            }
            if let Some(changes) = self.take(answer) {
                return Ok(changes);
            }
        }
    }

    /// What an answer makes complete; nothing if it is part of a revision.
    fn take(&mut self, answer: WatchResponse) -> Option<Changes> {
        if answer.events.is_empty() {
            // Progress that etcd tells by itself is in line with the events. The answer to our question is
            // for no watch in particular, and older etcds let it overtake events: of that we only take
            // that somebody is there.
            if answer.watch_id == self.id {
                let header = answer.header.map_or(0, |header| header.revision).cast_unsigned();
                self.next = self.next.max(Revision(header).next());
            }
            return Some(self.complete(Vec::new()));
        }
        // Some etcds repeat what is older than was asked for, after a node caught up by a snapshot.
        let new = answer.events.into_iter().filter_map(change);
        self.held.extend(new.filter(|change| change.revision >= self.next));
        let last = self.held.last()?.revision;
        let whole = match answer.fragment {
            true => self.held.partition_point(|change| change.revision < last),
            false => self.held.len(),
        };
        let rest = self.held.split_off(whole);
        let changes = mem::replace(&mut self.held, rest);
        self.next = changes.last()?.revision.next();
        Some(self.complete(changes))
    }

    fn complete(&self, changes: Vec<Change>) -> Changes {
        Changes { changes, revision: Revision(self.next.0.saturating_sub(1)) }
    }
}

impl Feed for ClusterFeed {
    async fn next(&mut self) -> Result<Changes, SourceError> {
        let read = self.read().await;
        read.inspect_err(|error| self.turn.failed(&self.line, error))
    }
}

impl fmt::Debug for ClusterFeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterFeed").field("next", &self.next).finish_non_exhaustive()
    }
}

fn request(union: RequestUnion) -> WatchRequest {
    WatchRequest { request_union: Some(union) }
}

fn change(event: Event) -> Option<Change> {
    let deleted = event.r#type() == EventType::Delete;
    let kv = event.kv?;
    let value = (!deleted).then_some(kv.value);
    Some(Change { key: kv.key, value, revision: Revision(kv.mod_revision.cast_unsigned()) })
}

fn ended(line: &Line) -> SourceError {
    line.lost(&Status::unavailable("the watch ended"))
}

fn cancelled(line: &Line, answer: &WatchResponse, asked: Revision) -> SourceError {
    if answer.compact_revision != 0 {
        return SourceError::Compacted { asked };
    }
    let why = match &answer.cancel_reason[..] {
        "" => "no reason was given",
        why => why,
    };
    line.lost(&Status::aborted(format!("the watch was cancelled: {why}")))
}
