//! The bare client of NATS: what it costs to pull messages of the same stream and to acknowledge them, without
//! a job.

use std::time::Instant;

use anyhow::Context as _;
use async_nats::jetstream::consumer::PullConsumer;
use futures_util::{StreamExt as _, TryStreamExt as _};

use super::measure::fill;
use super::ours::{DURABLE, Ours, PULLED, STREAM};
use crate::figures::rate;

/// Prints messages per second. Confirmed ones as ours does it: the server says that it knows.
pub(super) async fn bare(url: &str, jobs: u64, is_confirmed: bool) -> anyhow::Result<()> {
    // The stream, the consumer and the messages are those of ours.
    fill(&Ours::on_jetstream(url).await?, 0..jobs, None).await?;
    let client = async_nats::connect(url).await?;
    let context = async_nats::jetstream::new(client);
    let stream = context.get_stream(STREAM).await?;
    let mut consumer: PullConsumer =
        stream.get_consumer(DURABLE).await.map_err(anyhow::Error::from_boxed)?;

    let began = Instant::now();
    let messages = consumer.stream().max_messages_per_batch(PULLED).messages().await?;
    let mut messages = messages.take(usize::try_from(jobs)?);
    if is_confirmed {
        let confirm = |message: async_nats::jetstream::Message| async move {
            message.double_ack().await.map_err(anyhow::Error::from_boxed)
        };
        let confirmed = messages.map_err(anyhow::Error::from).map_ok(confirm);
        confirmed.try_buffer_unordered(PULLED).try_for_each(|()| async { Ok(()) }).await?;
    } else {
        while let Some(message) = messages.next().await {
            message?.ack().await.map_err(anyhow::Error::from_boxed)?;
        }
    }
    loop {
        let info = consumer.info().await.context("the consumer tells of itself")?;
        if info.num_pending == 0 && info.num_ack_pending == 0 {
            break;
        }
    }
    println!("{}", rate(jobs, began.elapsed()));
    Ok(())
}
