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
use super::proto::etcdserverpb::range_request::{SortOrder, SortTarget};
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
    order: Order,
    owed: Revision,
    silence: Silence,
}

/// What has come, and what of it is complete.
struct Order {
    /// The watch's.
    id: i64,
    /// Everything before this was given out.
    next: Revision,
    /// Changes of a revision whose others are still to come.
    held: Vec<Change>,
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
        // first, so that it is not taken for a source that went back. And the newest key tells what the watch
        // has to bring: etcd does not say when it has brought what was there.
        let newest = RangeRequest {
            key: key.clone(),
            range_end: range_end.clone(),
            min_mod_revision: from.0.cast_signed(),
            sort_target: SortTarget::Mod.into(),
            sort_order: SortOrder::Descend.into(),
            limit: 1,
            keys_only: true,
            ..Default::default()
        };
        let newest = line.range(newest).await.map_err(|status| line.lost(&status))?;
        let stands = newest.header.map_or(0, |header| header.revision);
        let owed = newest.kvs.first().map_or(0, |newest| newest.mod_revision);

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
        let order = Order { id: created.watch_id, next: from, held: Vec::new() };
        let owed = Revision(owed.cast_unsigned());
        let feed = Self { line, turn, requests, answers, order, owed, silence };
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
                return Err(cancelled(&self.line, &answer, self.order.next));
            }
            if let Some(changes) = self.order.take(answer) {
                return Ok(changes);
            }
        }
    }
}

impl Order {
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
        let whole = if answer.fragment {
            self.held.partition_point(|change| change.revision < last)
        } else {
            self.held.len()
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
    fn owed(&self) -> Revision {
        self.owed
    }

    async fn next(&mut self) -> Result<Changes, SourceError> {
        let read = self.read().await;
        read.inspect_err(|error| self.turn.failed(&self.line, error))
    }
}

impl fmt::Debug for ClusterFeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterFeed").field("next", &self.order.next).finish_non_exhaustive()
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

#[cfg(test)]
mod tests {
    use super::super::proto::etcdserverpb::ResponseHeader;
    use super::super::proto::mvccpb::KeyValue;
    use super::*;

    /// An answer with events of these revisions, from a node that stands at `header`.
    fn answer(watch_id: i64, header: i64, revisions: &[i64], fragment: bool) -> WatchResponse {
        let header = Some(ResponseHeader { revision: header, ..Default::default() });
        let kv = |&mod_revision| Some(KeyValue { mod_revision, ..Default::default() });
        let events =
            revisions.iter().map(|revision| Event { kv: kv(revision), ..Default::default() });
        WatchResponse { header, watch_id, fragment, events: events.collect(), ..Default::default() }
    }

    #[test]
    fn only_what_is_complete_is_given_out_and_only_once() {
        let (ours, nobodys) = (7, -1);
        let mut order = Order { id: ours, next: Revision(5), held: Vec::new() };
        for (answer, revisions, complete) in [
            // Older than what was asked for; and the node is further than this answer is.
            (answer(ours, 90, &[3, 4, 5, 5, 6], false), Some(vec![5, 5, 6]), 6),
            // The end of a part may be the middle of a revision.
            (answer(ours, 90, &[8, 9, 9], true), Some(vec![8]), 8),
            (answer(ours, 90, &[9], true), None, 8),
            (answer(nobodys, 90, &[], false), Some(vec![]), 8),
            (answer(ours, 90, &[9, 10], false), Some(vec![9, 9, 9, 9, 10]), 10),
            // The answer to our own question may have overtaken events.
            (answer(nobodys, 90, &[], false), Some(vec![]), 10),
            (answer(ours, 12, &[], false), Some(vec![]), 12),
            (answer(ours, 11, &[], false), Some(vec![]), 12),
            (answer(ours, 13, &[12], false), None, 12),
            (answer(ours, 13, &[13], false), Some(vec![13]), 13),
        ] {
            let asked = format!("{answer:?}");
            let given = order.take(answer);
            let of = |changes: &Changes| changes.changes.iter().map(|c| c.revision.0).collect();
            assert_eq!(given.as_ref().map(of), revisions, "{asked}");
            assert!(given.is_none_or(|given| given.revision.0 == complete), "{asked}");
        }
    }
}
