//! Callers that share a connection, each asking again when it is answered.
//!
//! They run on the cores of the server they measure, so there is no task for a caller: one read for all answers
//! that came, one write for all questions they lead to.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bytes::{Bytes, BytesMut};
use prost::Message;

use super::line::{Line, framed, only_message};

/// What a caller asks, and what it needs to see in the answer.
pub(crate) struct Question {
    method: &'static str,
    message: Bytes,
    check: fn(Bytes) -> anyhow::Result<()>,
}

impl Question {
    pub(crate) fn new(
        method: &'static str,
        question: &impl Message,
        check: fn(Bytes) -> anyhow::Result<()>,
    ) -> Self {
        Self { method, message: framed(question), check }
    }
}

/// A connection and its callers.
pub(crate) struct Callers {
    line: Line,
    asked: HashMap<u32, Asked>,
    /// Not sent yet, for want of room.
    held: VecDeque<Question>,
}

struct Asked {
    at: Instant,
    answer: BytesMut,
    check: fn(Bytes) -> anyhow::Result<()>,
}

impl Callers {
    pub(crate) async fn open(address: SocketAddr) -> anyhow::Result<Self> {
        let line = Line::open(address).await?;
        Ok(Self { line, asked: HashMap::new(), held: VecDeque::new() })
    }

    /// Has so many callers ask until `end`. How long each answer took that came after `begin`.
    pub(crate) async fn run(
        mut self,
        callers: usize,
        mut question: impl FnMut() -> Question,
        begin: Instant,
        end: Instant,
    ) -> anyhow::Result<Vec<Duration>> {
        let mut took = Vec::new();
        (0..callers).for_each(|_| self.held.push_back(question()));
        while !self.held.is_empty() || !self.asked.is_empty() {
            self.send_held();
            self.line.flush_and_read().await?;
            while let Some(came) = self.line.next()? {
                let asked = self.asked.get_mut(&came.stream).context("an answer to nothing")?;
                asked.answer.unsplit(came.data);
                if !came.is_over {
                    continue;
                }
                let asked = self.asked.remove(&came.stream).context("it was there")?;
                let now = Instant::now();
                if now >= begin && now <= end {
                    took.push(now - asked.at);
                }
                (asked.check)(only_message(asked.answer)?)?;
                if now < end {
                    self.held.push_back(question());
                }
            }
        }
        Ok(took)
    }

    fn send_held(&mut self) {
        while let Some(question) = self.held.front()
            && self.line.has_room(question.message.len())
            && let Some(Question { method, message, check }) = self.held.pop_front()
        {
            let stream = self.line.begin(method);
            self.line.send(stream, &message, true);
            let asked = Asked { at: Instant::now(), answer: BytesMut::new(), check };
            self.asked.insert(stream, asked);
        }
    }
}
