//! Puts right what a server that was killed has forgotten.
//!
//! It writes down now and then, and each for itself, which messages a stream has and which of them its consumer
//! awaits. So when it is back,
//!
//! - a message that was acknowledged may be there again, and is delivered to nobody: it is *left over*;
//! - one that is gone may be awaited again, and counts against `max_ack_pending` until nothing older is in the
//!   stream, which is never if something is left over: it is *missed*.
//!
//! Either is as it should be once it is acknowledged again. What is missed is not in the stream any more. What is
//! left over has ended by its record: else it could not be told from what somebody works on. Without records each
//! worker knows what it has ended itself; what one had ended that is gone by then stays there.

use std::sync::Arc;
use std::time::Duration;

use async_nats::Message;
use async_nats::jetstream::AckKind;
use async_nats::jetstream::stream::{RawMessageErrorKind, Stream};
use futures_util::future::try_join_all;
use hashbrown::HashSet;
use tokio::time::sleep;
use vedetta_core::JobState;

use super::letter::{Letter, Reader};
use super::{Cause, Shared, unavailable};
use crate::job::JobsError;
use crate::monitor::Ended;

/// Messages that are looked up together, the oldest first: as long as some of them are left over there may be more.
const TOGETHER: usize = 1000;
/// Of those so many at once.
const AT_ONCE: usize = 64;
/// So many that are gone are acknowledged, the newest: a server forgets the last ones.
const GONE: usize = 1 << 16;
/// What fails is tried so often, after so long.
const TRIES: u32 = 5;
const AGAIN: Duration = Duration::from_secs(2);

impl Shared {
    /// Puts it right whenever it is said that it may be needed.
    pub(super) async fn keep_tidy(&self) {
        // Where others have the same messages, what is there does not tell what has ended for us.
        if self.has_others {
            return std::future::pending().await;
        }
        loop {
            self.untidy.notified().await;
            // Of many workers one comes first, and leaves less to do.
            sleep(self.options.heartbeat.mul_f64(fastrand::f64())).await;
            for tries in 1.. {
                let Err(error) = self.tidy().await else { break };
                if tries == TRIES {
                    let error = vedetta_core::explain(&error);
                    tracing::warn!(error, "what NATS may have forgotten was not looked for");
                    break;
                }
                sleep(AGAIN).await;
            }
        }
    }

    async fn tidy(&self) -> Result<(), JobsError> {
        let name = &self.options.stream;
        let asking = |error: Cause| unavailable(format!("asking for the stream {name}"), error);
        let info = self.consumer.get_info().await;
        let info = info.map_err(|error| unavailable("asking for the consumer", error))?;
        let stream = self.context.get_stream_no_info(name).await;
        let stream = stream.map_err(|error| asking(error.into()))?;
        let found = stream.info_builder().with_deleted(true).fetch().await;
        let found = found.map_err(|error| asking(error.into()))?.info.state;
        let delivered =
            found.first_sequence..=found.last_sequence.min(info.delivered.stream_sequence);
        let mut gone = found.deleted.unwrap_or_default();
        gone.retain(|sequence| delivered.contains(sequence));
        let left_over = {
            let (gone, state) = (gone.iter().collect::<HashSet<_>>(), self.state.lock());
            let others = delivered.filter(|sequence| !gone.contains(sequence));
            others.filter(|sequence| !state.has(*sequence)).collect::<Vec<_>>()
        };
        for sequences in left_over.chunks(TOGETHER) {
            if !self.drop_left_over(&stream, sequences).await? {
                break;
            }
        }
        if info.num_ack_pending > self.state.lock().ours() {
            for sequence in gone.iter().rev().take(GONE) {
                // What is said later may reach another server.
                self.connected()?;
                let (reply, ack) = (self.reply(*sequence, 0), AckKind::Ack.into());
                let said = self.client.publish(reply, ack).await;
                said.map_err(|error| unavailable("acknowledging", error))?;
            }
        }
        Ok(())
    }

    /// Acknowledges those that have ended by their records. Whether there were any.
    async fn drop_left_over(
        &self,
        stream: &Stream<()>,
        sequences: &[u64],
    ) -> Result<bool, JobsError> {
        let mut letters = Vec::with_capacity(sequences.len());
        for sequences in sequences.chunks(AT_ONCE) {
            let lying = sequences.iter().map(|sequence| self.lying(stream, *sequence));
            letters.extend(try_join_all(lying).await?.into_iter().flatten());
        }
        let ended = match &self.telling {
            Some(telling) => {
                let ids: Vec<_> = letters.iter().map(|letter| letter.id()).collect();
                telling.ended(&self.connection, &ids).await?
            }
            None => {
                let state = self.state.lock();
                let done = Ended { status: JobState::Done, error: None };
                letters.iter().map(|letter| state.was_over(letter).then(|| done.clone())).collect()
            }
        };
        let mut is_any = false;
        for (letter, ended) in letters.iter().zip(ended) {
            let Some(ended) = ended else { continue };
            is_any = true;
            self.drop_one(letter, &ended).await?;
        }
        Ok(is_any)
    }

    /// A message of the stream, as if it had been delivered.
    async fn lying(
        &self,
        stream: &Stream<()>,
        sequence: u64,
    ) -> Result<Option<Arc<Letter>>, JobsError> {
        let found = match stream.get_raw_message(sequence).await {
            Ok(found) => found,
            Err(error) if error.kind() == RawMessageErrorKind::NoMessageFound => return Ok(None),
            Err(error) => return Err(unavailable("asking for a message", error)),
        };
        let message = Message {
            reply: Some(self.reply(sequence, found.time.unix_timestamp_nanos()).into()),
            subject: found.subject,
            payload: found.payload,
            headers: Some(found.headers),
            status: None,
            description: None,
            length: 0,
        };
        Ok(Reader::new(&self.context).read(message, &self.options))
    }

    /// Where a message is acknowledged, whatever delivery it was.
    fn reply(&self, sequence: u64, published: i128) -> String {
        let (stream, durable) = (&self.options.stream, &self.options.durable);
        format!("$JS.ACK.{stream}.{durable}.1.{sequence}.0.{published}.0")
    }
}
