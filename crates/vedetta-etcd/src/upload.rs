//! The body of a call, which must not take for ever, nor hold more than its connection may.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;

use crate::v3;

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Before a message: whether it is compressed, and its length.
pub(crate) const PREFIX: usize = 5;

/// A body that fails when it is not whole in time. Most are whole at once, so the clock is only set when
/// something is missing.
pub(crate) struct Upload {
    body: Incoming,
    /// `None` for a stream, which lasts as long as its client likes.
    limit: Option<Duration>,
    late: Option<Pin<Box<Sleep>>>,
    /// Looked at, and still to be read.
    seen: Option<Result<Bytes, Error>>,
    sent: Sent,
}

/// How far a message was sent. One that is not whole has its room of what the connection may hold: no window bounds it,
/// since what is read makes place for more. The message of a call is kept until the body is at its end, and so is its room.
struct Sent {
    /// Bytes that unfinished requests of the connection may still take.
    room: Arc<Semaphore>,
    /// Not a stream.
    is_call: bool,
    prefix: [u8; PREFIX],
    /// How much of the prefix is there.
    begun: usize,
    /// Bytes of the message that have not come.
    missing: usize,
    held: Option<OwnedSemaphorePermit>,
    /// The room of a call's first message. Whatever comes behind that is not kept.
    first: Option<OwnedSemaphorePermit>,
}

impl Sent {
    /// Takes note of what came next.
    fn follow(&mut self, mut data: &[u8]) -> Result<(), Error> {
        loop {
            let come = self.missing.min(data.len());
            self.missing -= come;
            data = &data[come..];
            if self.missing > 0 {
                return Ok(());
            }
            let whole = self.held.take();
            if self.is_call && self.first.is_none() {
                self.first = whole;
            }
            let come = (PREFIX - self.begun).min(data.len());
            self.prefix[self.begun..self.begun + come].copy_from_slice(&data[..come]);
            self.begun += come;
            data = &data[come..];
            if self.begun < PREFIX {
                return Ok(());
            }
            self.begun = 0;
            self.missing = length(&self.prefix).unwrap_or(0);
            let is_kept = self.is_call && self.first.is_none();
            if is_kept || self.missing > data.len() {
                // More is refused by whoever reads the message.
                let size = self.missing.min(v3::MESSAGE_BYTES);
                self.held = Some(claim(&self.room, size).ok_or_else(v3::too_many)?);
            }
        }
    }

    /// Nothing more comes.
    fn end(&mut self) {
        (self.held, self.first) = (None, None);
    }
}

/// The length of the message that begins here.
fn length(bytes: &[u8]) -> Option<usize> {
    let (&[_, a, b, c, d], _) = bytes.split_first_chunk::<PREFIX>()?;
    Some(u32::from_be_bytes([a, b, c, d]) as usize)
}

/// Room for so many bytes, or for as many as can be counted.
pub(crate) fn room(bytes: usize) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(bytes.min(Semaphore::MAX_PERMITS)))
}

/// Room for a request of so many bytes, until it is dropped; `None` when its connection has too many unfinished ones.
pub(crate) fn claim(room: &Arc<Semaphore>, bytes: usize) -> Option<OwnedSemaphorePermit> {
    Arc::clone(room).try_acquire_many_owned(u32::try_from(bytes).ok()?).ok()
}

impl Upload {
    /// `room` is what unfinished requests of the connection may take together, in bytes.
    pub(crate) fn new(body: Incoming, limit: Option<Duration>, room: Arc<Semaphore>) -> Self {
        let sent = Sent {
            room,
            is_call: limit.is_some(),
            prefix: [0; PREFIX],
            begun: 0,
            missing: 0,
            held: None,
            first: None,
        };
        Self { body, limit, late: None, seen: None, sent }
    }

    /// The message that is all of the body, if it is one of at most `most` bytes and not compressed.
    /// The body can be read all the same.
    pub(crate) async fn message(&mut self, most: usize) -> Option<Bytes> {
        let mut all = self.data().await?;
        if !self.body.is_end_stream() {
            let mut parts = BytesMut::from(all);
            // What is longer than it says is more than one, and could go on for ever.
            while parts.len() <= length(&parts).map_or(PREFIX, |length| PREFIX + length.min(most))
                && let Some(part) = self.data().await
            {
                parts.extend_from_slice(&part);
            }
            all = parts.freeze();
        }
        let is_whole = self.seen.is_none() && self.body.is_end_stream();
        match self.seen.take() {
            // What went wrong comes after what was read; nobody reads more than that.
            Some(failed) => self.seen = Some(failed),
            None => self.seen = Some(Ok(all.clone())),
        }
        let length = length(&all)?;
        let is_one = all[0] == 0 && length <= most && all.len() == PREFIX + length;
        (is_whole && is_one).then(|| all.slice(PREFIX..))
    }

    /// The next piece of it; a failure is kept for who reads the body.
    async fn data(&mut self) -> Option<Bytes> {
        match self.frame().await? {
            Ok(frame) => frame.into_data().ok(),
            Err(failed) => {
                self.seen = Some(Err(failed));
                None
            }
        }
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        if let Some(seen) = self.seen.take() {
            return Poll::Ready(Some(seen.map(Frame::data)));
        }
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            if frame.is_none() || self.body.is_end_stream() {
                self.sent.end();
                return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
            }
            return Poll::Ready(frame.map(|frame| {
                let frame = frame?;
                if let Some(data) = frame.data_ref() {
                    self.sent.follow(data)?;
                }
                Ok(frame)
            }));
        }
        let Some(limit) = self.limit else { return Poll::Pending };
        let late = self.late.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        late.as_mut().poll(cx).map(|()| Some(Err("the request is late".into())))
    }

    fn is_end_stream(&self) -> bool {
        self.seen.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.seen {
            Some(_) => SizeHint::default(),
            None => self.body.size_hint(),
        }
    }
}
