mod del;
mod get;
mod lease;
mod put;
mod watch;

use std::io::Write;

use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};

use crate::client::{Client, Remote};

/// Read, write and watch keys, and manage leases, on a running server
#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Kv {
    #[command(flatten)]
    remote: Remote,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Get(get::Get),
    Put(put::Put),
    Del(del::Del),
    Watch(watch::Watch),
    Lease(lease::Lease),
}

impl Kv {
    pub(crate) fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        let client = Client::new(&self.remote)?;
        let format = self.remote.output;
        match self.command {
            Command::Get(get) => get.run(&client, format, out),
            Command::Put(put) => put.run(&client, format, out),
            Command::Del(del) => del.run(&client, format, out),
            Command::Watch(watch) => watch.run(&client, format, out),
            Command::Lease(lease) => lease.run(&client, format, out),
        }
    }
}

/// Bytes that come as `NAME` or `NAME_b64`.
pub(crate) fn bytes(text: Option<&String>, b64: Option<&String>) -> Vec<u8> {
    use base64::Engine as _;
    match (text, b64) {
        (Some(text), _) => text.clone().into_bytes(),
        (None, Some(b64)) => base64::prelude::BASE64_STANDARD.decode(b64).unwrap_or_default(),
        (None, None) => Vec::new(),
    }
}

/// A key as the API shows it; printed as it came.
#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_b64: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value_b64: Option<String>,
    created: u64,
    modified: u64,
    version: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<String>,
}

impl Entry {
    fn key(&self) -> Vec<u8> {
        bytes(self.key.as_ref(), self.key_b64.as_ref())
    }

    fn value(&self) -> Vec<u8> {
        bytes(self.value.as_ref(), self.value_b64.as_ref())
    }
}
