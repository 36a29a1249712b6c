//! The body of a call, which must not take for ever.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::time::Sleep;

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
}

impl Upload {
    pub(crate) fn new(body: Incoming, limit: Option<Duration>) -> Self {
        Self { body, limit, late: None, seen: None }
    }

    /// The message that is all of the body, if it is one of at most `most` bytes and not compressed.
    /// The body can be read all the same.
    pub(crate) async fn message(&mut self, most: usize) -> Option<Bytes> {
        let mut all = self.data().await?;
        if !self.body.is_end_stream() {
            let mut parts = BytesMut::from(all);
            while parts.len() <= PREFIX + most
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
        let (&[compressed, a, b, c, d], _) = all.split_first_chunk::<PREFIX>()?;
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        let is_one = compressed == 0 && length <= most && all.len() == PREFIX + length;
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
            return Poll::Ready(frame.map(|frame| frame.map_err(Error::from)));
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
