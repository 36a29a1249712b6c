use std::io::Write;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};
use serde_json::json;
use ureq::http::Method;

use super::bytes;
use crate::client::{Client, ClientError, encode};
use crate::output::{self, Format};

/// Grant, keep, revoke and show leases: promises to be renewed, or their keys go
#[derive(Debug, Args)]
pub(crate) struct Lease {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Grant a lease and print its id
    Grant {
        /// How long it lasts unless it is kept, for example 10s or 5m
        #[arg(value_parser = ttl)]
        ttl: Duration,
    },
    /// Keep a lease alive until interrupted, or until it is gone
    Keep {
        /// The lease
        id: String,
        /// Renew it once and end
        #[arg(long)]
        once: bool,
    },
    /// End a lease; its keys go in one revision
    Revoke {
        /// The lease
        id: String,
    },
    /// Show what is left of a lease, and its keys
    Show {
        /// The lease
        id: String,
    },
    /// List all leases
    List,
}

fn ttl(text: &str) -> Result<Duration, &'static str> {
    let ttl = humantime::parse_duration(text).ok().filter(|ttl| ttl.as_millis() > 0);
    ttl.ok_or("give a time with its unit, of at least 1ms, such as 10s or 5m")
}

#[derive(Serialize, Deserialize)]
struct Granted {
    id: String,
    ttl_ms: u64,
}

#[derive(Serialize, Deserialize)]
struct Info {
    id: String,
    ttl_ms: u64,
    remaining_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    keys: Option<Vec<Key>>,
}

#[derive(Serialize, Deserialize)]
struct Key {
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_b64: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct List {
    leases: Vec<Info>,
    #[serde(skip_serializing)]
    cursor: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct Revoked {
    revision: u64,
}

/// Between two tries to keep a lease while the server cannot be reached.
const AGAIN: Duration = Duration::from_millis(500);

impl Lease {
    pub(crate) fn run(
        self,
        client: &Client,
        format: Format,
        out: &mut impl Write,
    ) -> anyhow::Result<()> {
        match self.command {
            Command::Grant { ttl } => {
                let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
                let body = Some(json!({ "ttl_ms": ttl_ms }));
                let granted: Granted = client.ask(Method::POST, "/api/v1/leases", body)?;
                match format {
                    Format::Json => output::json(out, &granted)?,
                    Format::Table => writeln!(out, "{}", granted.id)?,
                }
            }
            Command::Keep { id, once } => keep(client, &id, once, format, out)?,
            Command::Revoke { id } => {
                let done: Revoked = client.ask(Method::DELETE, &path(&id), None)?;
                match format {
                    Format::Json => output::json(out, &done)?,
                    Format::Table => writeln!(out, "revoked, revision {}", done.revision)?,
                }
            }
            Command::Show { id } => {
                let info: Info = client.get(&path(&id))?;
                match format {
                    Format::Json => output::json(out, &info)?,
                    Format::Table => {
                        table(out, std::slice::from_ref(&info))?;
                        for key in info.keys.iter().flatten() {
                            let key = bytes(key.key.as_ref(), key.key_b64.as_ref());
                            writeln!(out, "  {}", output::escape(&key))?;
                        }
                    }
                }
            }
            Command::List => {
                let mut all = List { leases: Vec::new(), cursor: None };
                loop {
                    let cursor = all.cursor.as_ref().map(|cursor| format!("&cursor={cursor}"));
                    let cursor = cursor.unwrap_or_default();
                    let page: List = client.get(&format!("/api/v1/leases?limit=500{cursor}"))?;
                    all.leases.extend(page.leases);
                    all.cursor = page.cursor;
                    if all.cursor.is_none() {
                        break;
                    }
                }
                match format {
                    Format::Json => output::json(out, &all)?,
                    Format::Table => table(out, &all.leases)?,
                }
            }
        }
        Ok(())
    }
}

fn path(id: &str) -> String {
    format!("/api/v1/leases/{}", encode(id.as_bytes()))
}

fn table(out: &mut impl Write, leases: &[Info]) -> std::io::Result<()> {
    let seconds = |ms: u64| humantime::format_duration(Duration::from_millis(ms)).to_string();
    let row = |lease: &Info| [lease.id.clone(), seconds(lease.ttl_ms), seconds(lease.remaining_ms)];
    output::table(out, ["LEASE", "TTL", "LEFT"], &leases.iter().map(row).collect::<Vec<_>>())
}

fn keep(
    client: &Client,
    id: &str,
    once: bool,
    format: Format,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let path = format!("{}/keep", path(id));
    let renew = || client.ask::<Granted>(Method::POST, &path, None);
    let mut kept = renew()?;
    loop {
        match format {
            Format::Json => output::json(out, &kept)?,
            Format::Table => {
                let ttl = Duration::from_millis(kept.ttl_ms);
                writeln!(out, "{} kept for {}", kept.id, humantime::format_duration(ttl))?;
            }
        }
        out.flush()?;
        if once {
            return Ok(());
        }
        let ttl = Duration::from_millis(kept.ttl_ms);
        let deadline = Instant::now() + ttl;
        std::thread::sleep(ttl / 3);
        kept = loop {
            match renew() {
                // While it may still live, a server that is away may come back.
                Err(ClientError::Unreachable { .. }) if Instant::now() < deadline => {
                    std::thread::sleep(AGAIN.min(ttl / 3));
                }
                other => break other?,
            }
        };
    }
}
