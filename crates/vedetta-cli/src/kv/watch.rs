use std::io::{BufRead as _, BufReader, Read, Write};
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use serde::{Deserialize, Serialize};

use super::{Entry, bytes};
use crate::client::{Client, ClientError, encode};
use crate::output::{self, Format};

/// Print the changes of a key, or of all keys under a prefix, as they happen
///
/// When the connection is lost it connects again and goes on after the last revision seen. If that history
/// was compacted meanwhile it says so and ends with exit code 1: read the keys again and watch from there.
#[derive(Debug, Args)]
pub(crate) struct Watch {
    /// The key, or with --prefix how the keys begin; "" for all
    key: String,
    /// All keys that begin with KEY
    #[arg(long)]
    prefix: bool,
    /// From this revision on, instead of from now on
    #[arg(long, value_name = "N")]
    from: Option<u64>,
}

/// One server-sent event.
#[derive(Default)]
struct Message {
    event: String,
    data: String,
}

#[derive(Serialize, Deserialize)]
struct Revision {
    revision: u64,
    events: Vec<Event>,
}

#[derive(Serialize, Deserialize)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_b64: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value_b64: Option<String>,
    #[serde(flatten)]
    rest: serde_json::Map<String, serde_json::Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    previous: Option<Entry>,
}

#[derive(Deserialize)]
struct Compacted {
    oldest: u64,
}

/// How long to wait before connecting again, at first and at most.
const AGAIN: Duration = Duration::from_millis(100);
const AGAIN_AT_MOST: Duration = Duration::from_secs(5);

impl Watch {
    pub(crate) fn run(
        self,
        client: &Client,
        format: Format,
        out: &mut impl Write,
    ) -> anyhow::Result<()> {
        let what = if self.prefix { "prefix" } else { "key" };
        let from = self.from.map(|from| format!("&from={from}")).unwrap_or_default();
        let path = format!("/api/v1/watch?{what}={}{from}", encode(self.key.as_bytes()));
        let (mut seen, mut pause) = (None, AGAIN);
        // If not even the first time works there is nothing to go on with.
        let mut stream = client.stream(&path, None)?;
        loop {
            follow(stream, &mut seen, &mut pause, format, out)?;
            eprintln!("vedetta: the connection was lost, connecting again");
            stream = loop {
                std::thread::sleep(pause);
                pause = (pause * 2).min(AGAIN_AT_MOST);
                match client.stream(&path, seen) {
                    Ok(stream) => break stream,
                    Err(
                        ClientError::Unreachable { .. }
                        | ClientError::Refused { status: 500.., .. },
                    ) => {}
                    Err(error) => return Err(error.into()),
                }
            };
        }
    }
}

/// Prints what comes until the line is lost.
fn follow(
    stream: impl Read,
    seen: &mut Option<u64>,
    pause: &mut Duration,
    format: Format,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let (mut message, mut id) = (Message::default(), None);
    for line in BufReader::new(stream).lines() {
        let Ok(line) = line else { return Ok(()) };
        if let Some((field, value)) = line.split_once(": ") {
            match field {
                "event" => value.clone_into(&mut message.event),
                "data" => message.data += value,
                "id" => id = value.parse().ok(),
                _ => {}
            }
        }
        // A message counts when its empty line is there; half of one comes again.
        if line.is_empty() {
            show(&std::mem::take(&mut message), format, out)?;
            *seen = id.or(*seen);
            *pause = AGAIN;
        }
    }
    Ok(())
}

fn show(message: &Message, format: Format, out: &mut impl Write) -> anyhow::Result<()> {
    match message.event.as_str() {
        "kv" => {}
        "compacted" => {
            let Compacted { oldest } = serde_json::from_str(&message.data)?;
            bail!(
                "the history this watch needs was compacted, the oldest revision kept is {oldest}; \
                 read the keys again and watch from there"
            );
        }
        "failed" => bail!("the server ended the watch: {}", message.data),
        _ => return Ok(()),
    }
    let told: Revision = serde_json::from_str(&message.data)?;
    match format {
        Format::Json => output::json(out, &told)?,
        Format::Table => {
            for event in &told.events {
                let key = output::escape(&bytes(event.key.as_ref(), event.key_b64.as_ref()));
                let value = output::escape(&bytes(event.value.as_ref(), event.value_b64.as_ref()));
                let line = format!("{}  {:6}  {key}  {value}", told.revision, event.kind);
                writeln!(out, "{}", line.trim_end())?;
            }
        }
    }
    Ok(out.flush()?)
}
