//! Sending to clients that may not listen.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::CancellationToken;

/// While stopping there is less patience: what is ready to be sent is little, and everybody waits for it.
const STOPPING: Duration = Duration::from_secs(1);
/// How soon an end is noticed behind what nobody reads.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A connection that fails when its client takes no byte of what is sent for too long. Without it such
/// a client would keep its place, and a watch, for ever.
///
/// Flushing, it also looks whether the client hung up: HTTP/1 does not read while it answers when there is
/// another request in its buffer already, and would not see the end behind that. When there is more than fits the
/// buffer it looks again and again, as nothing tells of an end behind what nobody reads. HTTP/2 needs none of that: see
/// [`Patient::is_always_read`].
pub struct Patient {
    stream: TcpStream,
    limit: Duration,
    stop: CancellationToken,
    /// Whoever has it does not always read.
    looks: bool,
    /// Nothing is taken: the end of the patience with it.
    stalled: Option<Pin<Box<Sleep>>>,
    /// Something came that nobody reads: when to look whether the client is still there.
    look_at: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    /// `limit` is how long a client may take nothing; from `stop` on it is a second at most.
    pub fn new(stream: TcpStream, limit: Duration, stop: CancellationToken) -> Self {
        Self { stream, limit, stop, looks: true, stalled: None, look_at: None }
    }

    /// From here on it is read whenever something comes, so the reader sees the end. Looking for it would cost each request
    /// two system calls and a timer.
    pub fn is_always_read(&mut self) {
        self.looks = false;
        self.look_at = None;
    }

    /// Whether the client is there no more; if it is, whoever asks is woken to ask again.
    fn has_hung_up(&mut self, cx: &mut Context<'_>) -> bool {
        let mut byte = [0];
        match self.stream.poll_peek(cx, &mut ReadBuf::new(&mut byte)) {
            Poll::Pending => {
                self.look_at = None;
                return false;
            }
            Poll::Ready(Ok(0) | Err(_)) => return true,
            Poll::Ready(Ok(_)) => {}
        }
        let look_at = self.look_at.get_or_insert_with(|| Box::pin(tokio::time::sleep(LOOK_AGAIN)));
        while look_at.as_mut().poll(cx).is_ready() {
            let mut ends = [PollFd::new(&self.stream, PollFlags::RDHUP)];
            if poll(&mut ends, Some(&Timespec::default())).is_ok_and(|ended| ended > 0) {
                return true;
            }
            look_at.as_mut().reset(Instant::now() + LOOK_AGAIN);
        }
        false
    }

    fn write(
        &mut self,
        cx: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut TcpStream>, &mut Context<'_>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if let Poll::Ready(done) = write(Pin::new(&mut self.stream), cx) {
            self.stalled = None;
            return Poll::Ready(done);
        }
        let limit = self.limit;
        let end = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        // A stop wakes the connection, so the shorter time counts from then on.
        if self.stop.is_cancelled() && self.limit > STOPPING {
            self.limit = STOPPING;
            let sooner = end.deadline().min(Instant::now() + STOPPING);
            end.as_mut().reset(sooner);
        }
        ready!(end.as_mut().poll(cx));
        tracing::debug!("a client takes nothing of what is sent to it: letting it go");
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Patient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.write(cx, |stream, cx| stream.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write(cx, |stream, cx| stream.poll_write_vectored(cx, parts))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.looks && self.has_hung_up(cx) {
            tracing::debug!("a client hung up while it was sent to: letting it go");
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
