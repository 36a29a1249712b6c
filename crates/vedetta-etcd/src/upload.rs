//! The body of a call, which must not take for ever.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::Sleep;

type Error = Box<dyn std::error::Error + Send + Sync>;

/// A body that fails when it is not whole in time. Most are whole at once, so the clock is only set when
/// something is missing.
pub(crate) struct Upload {
    body: Incoming,
    /// `None` for a stream, which lasts as long as its client likes.
    limit: Option<Duration>,
    late: Option<Pin<Box<Sleep>>>,
}

impl Upload {
    pub(crate) fn new(body: Incoming, limit: Option<Duration>) -> Self {
        Self { body, limit, late: None }
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            return Poll::Ready(frame.map(|frame| frame.map_err(Error::from)));
        }
        let Some(limit) = self.limit else { return Poll::Pending };
        let late = self.late.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        late.as_mut().poll(cx).map(|()| Some(Err("the request is late".into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
