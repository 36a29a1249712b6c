//! Watching: many watches on one stream.
//!
//! ```text
//!  requests ─► create ──► Watched ─┐
//!              cancel ─x─ Watched ─┼─ whoever has events, in turn ─► answers
//!              progress   Watched ─┘
//! ```
//!
//! The stream of answers is all there is: polled by the connection it takes a request, lets watches that
//! have events answer, and so on in turn. No task and no queue stand between the store and the connection,
//! so a client that does not read stops its own watches and nothing else, and one that goes away takes its
//! watches along. A watch with much to tell gets one answer in a turn, and stands behind the others again.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream;
use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Interval, MissedTickBehavior, Sleep};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::{Request, Response, Status, Streaming};
use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{Batch, WatchError, WatchOptions, Watcher};

use super::proto::watch_create_request::FilterType;
use super::proto::watch_request::RequestUnion;
use super::proto::watch_server::Watch;
use super::proto::{WatchCreateRequest, WatchRequest};
use super::wire::{Events, WatchResponse};
use super::{Api, key_range, larger_than_max, revision, status};
use crate::serve::Origin;
use crate::upload;

/// The id of answers that are about no watch, or about one that was not made.
const NO_WATCH: i64 = -1;
/// A range ends behind the longest key that there can be.
const LONGEST_KEY: usize = (64 << 10) + 1;
/// What a request may be at most: it has a key and the end of a range in it, and little else.
pub(crate) const MESSAGE_BYTES: usize = 2 * LONGEST_KEY + (4 << 10);
/// Bytes of several revisions in one answer, about; clients commonly take 4 MiB.
const GATHERED: usize = 1 << 20;
/// Bytes that a watch takes besides its key, about.
const WATCH_BYTES: usize = 512;
/// Watches on one stream.
const WATCHES: usize = 100_000;
/// When to look again whether everybody has caught up.
const LOOK_AGAIN: Duration = Duration::from_millis(2);
/// Turns of watches before requests are looked at again.
const TURNS: usize = 64;

#[tonic::async_trait]
impl Watch for Api {
    type WatchStream = Session;

    async fn watch(
        &self,
        request: Request<Streaming<WatchRequest>>,
    ) -> Result<Response<Session>, Status> {
        let origin = request.extensions().get::<Origin>();
        let origin = origin.ok_or_else(|| Status::internal("a watch of no connection"))?;
        let room = origin.watched.clone();
        Ok(Response::new(Session::new(self.clone(), request.into_inner(), room)))
    }
}

/// Bytes that the watches of a connection may still take.
#[derive(Clone)]
pub(crate) struct KeyRoom(Arc<Semaphore>);

impl KeyRoom {
    pub(crate) fn new(bytes: usize) -> Self {
        Self(upload::room(bytes))
    }
}

/// The watches of one stream.
pub(crate) struct Session {
    api: Api,
    /// `None` once the client has nothing more to say; it still listens.
    requests: Option<Streaming<WatchRequest>>,
    /// By id. Dropping what is here ends the watch.
    watches: HashMap<i64, Watched>,
    room: KeyRoom,
    /// Watches that may have something to tell, by id, in turn.
    turns: VecDeque<i64>,
    /// Those that woke up since.
    woken: Arc<Woken>,
    /// Turns since requests were last looked at.
    taken: usize,
    next_id: i64,
    /// Sent before anything else is looked at, so it holds what one request or one batch led to.
    ready: VecDeque<WatchResponse>,
    /// Somebody wants to know when everything up to a revision was sent.
    asked: Option<Asked>,
    /// Ticks for the watches that want to hear of progress; there from the first of them on.
    ticks: Option<Interval>,
    stop: Pin<Box<WaitForCancellationFutureOwned>>,
    ended: bool,
}

struct Asked {
    at: Revision,
    /// How many answers are owed; as etcd does, each request gets its own.
    times: u64,
    again: Pin<Box<Sleep>>,
}

/// A watch.
struct Watched {
    watcher: Watcher,
    bell: Arc<Bell>,
    waker: Waker,
    previous: bool,
    fragment: bool,
    progress: Progress,
    _keys: OwnedSemaphorePermit,
}

impl Watched {
    fn poll_next(&mut self) -> Poll<Result<Batch, WatchError>> {
        // Not after: it may ring meanwhile.
        self.bell.is_rung.store(false, Ordering::Release);
        self.watcher.poll_next(&mut Context::from_waker(&self.waker))
    }
}

/// What a watch hears when nothing happens.
#[derive(PartialEq, Eq)]
enum Progress {
    Unwanted,
    /// It has heard of events since the last tick, so it needs no other sign.
    Heard,
    /// It has heard nothing.
    Quiet,
}

/// The watches of a session that woke up.
#[derive(Default)]
struct Woken {
    ids: Mutex<Vec<i64>>,
    session: AtomicWaker,
}

/// Wakes a session for one of its watches.
struct Bell {
    id: i64,
    /// It stands in line, so once more would be for nothing.
    is_rung: AtomicBool,
    woken: Arc<Woken>,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.is_rung.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut ids = self.woken.ids.lock();
        ids.push(self.id);
        // Whoever came before woke it, and it takes all along.
        let is_first = ids.len() == 1;
        drop(ids);
        if is_first {
            self.woken.session.wake();
        }
    }
}

impl Session {
    fn new(api: Api, requests: Streaming<WatchRequest>, room: KeyRoom) -> Self {
        Self {
            stop: Box::pin(api.0.stop.clone().cancelled_owned()),
            api,
            requests: Some(requests),
            watches: HashMap::new(),
            room,
            turns: VecDeque::new(),
            woken: Arc::default(),
            taken: 0,
            next_id: 0,
            ready: VecDeque::new(),
            asked: None,
            ticks: None,
            ended: false,
        }
    }

    fn answer(&mut self, revision: Revision, watch_id: i64) -> WatchResponse {
        WatchResponse { header: self.api.header(revision), watch_id, ..Default::default() }
    }

    fn handle(&mut self, request: WatchRequest) {
        let now = self.api.store().revision();
        match request.request_union {
            Some(RequestUnion::CreateRequest(create)) => self.create(&create, now),
            Some(RequestUnion::CancelRequest(cancel)) => self.cancel(cancel.watch_id, now),
            Some(RequestUnion::ProgressRequest(_)) => {
                let times = self.asked.take().map_or(0, |asked| asked.times) + 1;
                let again = Box::pin(tokio::time::sleep(LOOK_AGAIN));
                self.asked = Some(Asked { at: now, times, again });
                self.tell_progress();
            }
            None => {}
        }
    }

    fn cancel(&mut self, id: i64, now: Revision) {
        if self.watches.remove(&id).is_some() {
            let answer = self.answer(now, id);
            self.ready.push_back(WatchResponse { canceled: true, ..answer });
        }
    }

    fn create(&mut self, request: &WatchCreateRequest, now: Revision) {
        let (id, range, keys) = match self.claim(request) {
            Ok(claimed) => claimed,
            Err(why) => {
                let answer = self.answer(now, NO_WATCH);
                let cancel_reason = why.into();
                self.ready.push_back(WatchResponse {
                    created: true,
                    canceled: true,
                    cancel_reason,
                    ..answer
                });
                return;
            }
        };
        let created = WatchResponse { created: true, ..self.answer(now, id) };
        self.ready.push_back(created);
        let without = |filter: FilterType| request.filters.contains(&filter.into());
        let options = WatchOptions {
            // Before 1 there is nothing; what is negative is older than all that is kept.
            from: match request.start_revision {
                0 => Some(now.next()),
                start => Some(revision(start).unwrap_or(Revision(0))),
            },
            previous: request.prev_kv,
            no_puts: without(FilterType::Noput),
            no_deletes: without(FilterType::Nodelete),
        };
        match self.api.store().watch(range, options) {
            Ok(watcher) => {
                let mut progress = Progress::Unwanted;
                if request.progress_notify {
                    progress = Progress::Quiet;
                    let every = self.api.0.progress_every;
                    self.ticks.get_or_insert_with(|| ticks(every));
                }
                let woken = Arc::clone(&self.woken);
                let bell = Arc::new(Bell { id, is_rung: AtomicBool::new(true), woken });
                let new = Watched {
                    watcher,
                    waker: Waker::from(Arc::clone(&bell)),
                    bell,
                    previous: request.prev_kv,
                    fragment: request.fragment,
                    progress,
                    _keys: keys,
                };
                self.watches.insert(id, new);
                self.turns.push_back(id);
            }
            Err(error) => self.end(id, error),
        }
    }

    /// The id a watch gets, what it watches, and the room that takes; or why there can be no such watch.
    fn claim(
        &mut self,
        request: &WatchCreateRequest,
    ) -> Result<(i64, KeyRange, OwnedSemaphorePermit), &'static str> {
        let key = if request.key.is_empty() { &[0][..] } else { &request.key };
        if key.len().max(request.range_end.len()) > LONGEST_KEY {
            return Err("the key is longer than any that can be put");
        }
        if self.watches.len() >= WATCHES {
            return Err("too many watches on one stream");
        }
        // Copies, as what came would keep all of the request's bytes with it.
        let (key, end) = (Bytes::copy_from_slice(key), Bytes::copy_from_slice(&request.range_end));
        let size = WATCH_BYTES + key.len() + end.len();
        let range = key_range(key, end);
        if range.is_empty() {
            return Err("mvcc: watcher range is empty");
        }
        let keys = upload::claim(&self.room.0, size)
            .ok_or("the watches of one connection are too many, or their keys too long")?;
        if request.watch_id != 0 {
            if self.watches.contains_key(&request.watch_id) {
                return Err("mvcc: duplicate watch ID provided on the WatchStream");
            }
            return Ok((request.watch_id, range, keys));
        }
        while self.watches.contains_key(&self.next_id) {
            self.next_id += 1;
        }
        self.next_id += 1;
        Ok((self.next_id - 1, range, keys))
    }

    /// One watch tells what it has, if it is still there.
    fn take_turn(&mut self, id: i64) {
        let Some(watched) = self.watches.get_mut(&id) else { return };
        let batch = match watched.poll_next() {
            Poll::Ready(Ok(batch)) => batch,
            Poll::Ready(Err(error)) => return self.end(id, error),
            Poll::Pending => return,
        };
        // It may have more, and is to say when it has not.
        watched.bell.is_rung.store(true, Ordering::Release);
        self.turns.push_back(id);
        if watched.progress == Progress::Quiet {
            watched.progress = Progress::Heard;
        }
        let (last, may_cut) = (batch.last(), watched.fragment);
        let events = Events::all(batch, watched.previous);
        let most = if may_cut { super::MESSAGE_BYTES } else { GATHERED };
        let mut rest = Some(events);
        while let Some(events) = rest.take() {
            let (piece, more) = events.split(most, may_cut);
            let answer = self.answer(if more.is_some() { piece.last() } else { last }, id);
            let (fragment, events) = (more.is_some() && may_cut, Some(piece));
            self.ready.push_back(WatchResponse { fragment, events, ..answer });
            rest = more;
        }
    }

    fn end(&mut self, id: i64, error: WatchError) {
        self.watches.remove(&id);
        let answer = self.answer(Revision(0), id);
        let answer = WatchResponse { canceled: true, ..answer };
        match error {
            WatchError::Compacted { oldest, .. } => {
                let compact_revision = oldest.0.cast_signed();
                self.ready.push_back(WatchResponse { compact_revision, ..answer });
            }
            WatchError::Closed => self.ended = true,
            other => {
                tracing::error!(error = %other, "a watch failed");
                let cancel_reason = other.to_string();
                self.ready.push_back(WatchResponse { cancel_reason, ..answer });
            }
        }
    }

    /// Answers who asked for progress, once nobody is owed anything up to there. Who asked more than once meanwhile
    /// gets the other answers when it is looked at again, so that they do not pile up here.
    fn tell_progress(&mut self) {
        let Some(asked) = &mut self.asked else { return };
        let watches = self.watches.values();
        let done = watches.map(|watched| watched.watcher.progress()).min().unwrap_or(asked.at);
        if done >= asked.at {
            asked.times -= 1;
            if asked.times == 0 {
                self.asked = None;
            }
            let answer = self.answer(done, NO_WATCH);
            self.ready.push_back(answer);
        }
    }

    fn tick(&mut self) {
        for (&watch_id, watched) in &mut self.watches {
            match watched.progress {
                Progress::Unwanted => {}
                Progress::Heard => watched.progress = Progress::Quiet,
                Progress::Quiet => {
                    let header = self.api.header(watched.watcher.progress());
                    self.ready.push_back(WatchResponse { header, watch_id, ..Default::default() });
                }
            }
        }
    }

    /// One turn, or a look at all that is not a watch; whether there was something to do.
    fn advance(&mut self, cx: &mut Context<'_>) -> Result<bool, Status> {
        // Watches then say that they have nothing and wake up at once, so this would never end.
        if !tokio::task::coop::has_budget_remaining() {
            cx.waker().wake_by_ref();
            return Ok(false);
        }
        if self.taken < TURNS
            && let Some(id) = self.turns.pop_front()
        {
            self.taken += 1;
            self.take_turn(id);
            return Ok(true);
        }
        self.taken = 0;
        if self.stop.as_mut().poll(cx).is_ready() {
            return Err(status::stopped());
        }
        // Looked at only now: who came before the waker was there did not wake it.
        self.woken.session.register(cx.waker());
        self.turns.extend(self.woken.ids.lock().drain(..));
        let mut busy = !self.turns.is_empty();
        if let Some(requests) = &mut self.requests {
            match Pin::new(requests).poll_next(cx) {
                Poll::Ready(Some(request)) => {
                    self.handle(request.map_err(larger_than_max)?);
                    busy = true;
                }
                Poll::Ready(None) => self.requests = None,
                Poll::Pending => {}
            }
        }
        if let Some(asked) = &mut self.asked
            && asked.again.as_mut().poll(cx).is_ready()
        {
            asked.again.as_mut().reset(Instant::now() + LOOK_AGAIN);
            self.tell_progress();
            busy = true;
        }
        if let Some(ticks) = &mut self.ticks
            && ticks.poll_tick(cx).is_ready()
        {
            self.tick();
            busy = true;
        }
        Ok(busy)
    }
}

fn ticks(every: Duration) -> Interval {
    let mut ticks = tokio::time::interval_at(Instant::now() + every, every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

impl Stream for Session {
    type Item = Result<WatchResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let session = &mut *self;
        loop {
            if let Some(answer) = session.ready.pop_front() {
                return Poll::Ready(Some(Ok(answer)));
            }
            if session.ended {
                return Poll::Ready(None);
            }
            match session.advance(cx) {
                Ok(true) => {}
                Ok(false) => return Poll::Pending,
                Err(error) => {
                    session.ended = true;
                    return Poll::Ready(Some(Err(error)));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::{BufMut as _, BytesMut};
    use futures_util::StreamExt as _;
    use http_body_util::{BodyExt as _, Full};
    use prost::Message as _;
    use serde_json::Value as Json;
    use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
    use tokio::net::TcpStream;
    use tonic::codec::{Codec as _, Streaming};
    use tonic::codegen::Service as _;
    use tonic_prost::ProstCodec;
    use vedetta_kv::Put;

    use super::super::{Grpc, gateway, tests};
    use super::*;

    /// A stream on which these watches were asked for.
    fn session(api: Api, watches: Vec<WatchCreateRequest>) -> Session {
        let mut framed = BytesMut::new();
        for watch in watches {
            let request_union = Some(RequestUnion::CreateRequest(watch));
            let request = WatchRequest { request_union };
            framed.put_u8(0);
            framed.put_u32(u32::try_from(request.encoded_len()).unwrap());
            request.encode(&mut framed).unwrap();
        }
        let decoder = ProstCodec::<WatchResponse, WatchRequest>::default().decoder();
        let body = Full::new(framed.freeze());
        Session::new(api, Streaming::new_request(decoder, body, None, None), KeyRoom::new(1 << 20))
    }

    #[tokio::test]
    async fn only_a_quiet_watch_that_wants_it_hears_of_progress() {
        let (_folder, store) = tests::store().await;
        let api = tests::api(store.clone());
        let watch = |key: &'static str, progress_notify| WatchCreateRequest {
            key: Bytes::from_static(key.as_bytes()),
            progress_notify,
            ..Default::default()
        };
        let mut session = session(api, vec![watch("a", false), watch("b", true)]);
        for id in 0..2 {
            let created = session.next().await.unwrap().unwrap();
            assert_eq!((created.created, created.watch_id), (true, id));
        }
        store.put(Put::new("other", "")).await.unwrap();
        // It may still stand where it was, until the news has gone round.
        loop {
            let progress = session.next().await.unwrap().unwrap();
            assert_eq!((progress.watch_id, progress.events.is_none()), (1, true));
            if progress.header.revision == 2 {
                break;
            }
        }
    }

    /// What an etcd tells that tells it as often: lines of JSON, from which the ids of the server are taken out.
    #[tokio::test]
    async fn what_a_quiet_watch_hears_of_progress_is_what_it_hears_from_etcd() {
        const WATCHES: &str = r#"{"create_request":{"key":"YQ=="}}
            {"create_request":{"key":"Yg==","progress_notify":true}}"#;
        let every = ["--experimental-watch-progress-notify-interval", "100ms"];
        let etcd = testing::etcd::Cluster::start_with(1, &every).await;
        let etcd = etcd.node(0);
        let mut stream = TcpStream::connect(etcd.address()).await.unwrap();
        let length = WATCHES.len();
        let head = format!("POST /v3/watch HTTP/1.1\r\nHost: etcd\r\nContent-Length: {length}\r\n");
        stream.write_all(format!("{head}\r\n{WATCHES}").as_bytes()).await.unwrap();
        let mut lines = BufReader::new(stream).lines();
        let next = async || {
            loop {
                let line = testing::soon("a line of etcd", lines.next_line()).await.unwrap();
                let line = line.expect("it goes on");
                // The others are the head, and how long each piece is.
                if line.starts_with('{') {
                    return line;
                }
            }
        };
        let etcds = told(next, async || drop(etcd.ctl(&["put", "other", ""]).await.unwrap())).await;

        let (_folder, store) = tests::store().await;
        let mut router = gateway::router(&Grpc::over(&tests::api(store.clone())));
        let local = (std::net::Ipv4Addr::LOCALHOST, 0).into();
        let origin = Origin { local, watched: KeyRoom::new(1 << 20) };
        let request = axum::http::Request::post("/v3/watch").extension(origin);
        let answer =
            router.call(request.body(axum::body::Body::from(WATCHES)).unwrap()).await.unwrap();
        let mut body = answer.into_body();
        let next = async || {
            let line = body.frame().await.unwrap().unwrap().into_data().unwrap();
            String::from_utf8(line.to_vec()).unwrap()
        };
        let ours = told(next, async || drop(store.put(Put::new("other", "")).await.unwrap())).await;
        assert_eq!(ours, etcds);
    }

    /// Two watches that begin, a word on progress, and the one after something was put.
    async fn told(mut next: impl AsyncFnMut() -> String, put: impl AsyncFnOnce()) -> Vec<Json> {
        let mut read = async || {
            let mut line: Json = serde_json::from_str(&next().await).unwrap();
            let header = line["result"]["header"].as_object_mut().expect("a header");
            assert!(header.remove("cluster_id").is_some() && header.remove("member_id").is_some());
            line
        };
        let mut told = vec![read().await, read().await, read().await];
        put().await;
        loop {
            let line = read().await;
            if line["result"]["header"]["revision"] != "1" {
                told.push(line);
                return told;
            }
        }
    }

    #[tokio::test]
    async fn a_stopped_server_ends_the_stream() {
        let (_folder, store) = tests::store().await;
        let api = tests::api(store);
        let mut session = session(api.clone(), Vec::new());
        api.0.stop.cancel();
        let end = session.next().await.unwrap().unwrap_err();
        assert_eq!(end.message(), "etcdserver: server stopped");
        assert!(session.next().await.is_none());
    }
}
