use std::io::Write;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};
use ureq::http::Method;

use crate::client::{Client, Remote, encode};
use crate::kv::bytes;
use crate::output::{self, Format};

/// See how the watchers of a running server are doing, and have them run again
///
/// A watcher runs a command for each thing that changed under a prefix. It is declared in the server's config file,
/// as [watch.NAME]. Watchers of other programs, which tell of them in the store, are listed as NAME@PROCESS.
#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Watcher {
    #[command(flatten)]
    remote: Remote,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List all watchers
    List,
    /// Show a watcher, and the ids that are not as they should be
    Show {
        /// The watcher; of another program NAME@PROCESS, or NAME if no other has that name
        name: String,
    },
    /// Run the command for every id, changed or not; those that wait for their next try do not wait longer
    Resync {
        /// The watcher
        name: String,
    },
}

#[derive(Serialize, Deserialize)]
struct List {
    watchers: Vec<Info>,
}

/// A watcher as the API shows it; printed as it came.
#[derive(Serialize, Deserialize)]
struct Info {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    process: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefix: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefix_b64: Option<String>,
    phase: String,
    revision: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    behind: Option<u64>,
    ids: u64,
    running: u64,
    waiting: u64,
    failing: u64,
    done: u64,
    failed: u64,
    malformed: u64,
    unreadable: u64,
    lists: u64,
    lost: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    troubles: Option<Vec<Trouble>>,
}

#[derive(Serialize, Deserialize)]
struct Trouble {
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id_b64: Option<String>,
    failures: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_in_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    unreadable: Vec<Unreadable>,
}

#[derive(Serialize, Deserialize)]
struct Unreadable {
    key_type: String,
    error: String,
}

#[derive(Serialize, Deserialize)]
struct Resynced {
    ids: u64,
}

impl Watcher {
    pub(crate) fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        let client = Client::new(&self.remote)?;
        let format = self.remote.output;
        match self.command {
            Command::List => {
                let list: List = client.get("/api/v1/watchers")?;
                match format {
                    Format::Json => output::json(out, &list)?,
                    Format::Table => table(out, &list.watchers)?,
                }
            }
            Command::Show { name } => {
                let info: Info = client.get(&format!("{}?limit=500", path(&name)))?;
                match format {
                    Format::Json => output::json(out, &info)?,
                    Format::Table => show(out, &info)?,
                }
            }
            Command::Resync { name } => {
                let path = format!("{}/resync", path(&name));
                let done: Resynced = client.ask(Method::POST, &path, None)?;
                match format {
                    Format::Json => output::json(out, &done)?,
                    Format::Table => writeln!(out, "running again: {} ids", done.ids)?,
                }
            }
        }
        Ok(())
    }
}

fn path(name: &str) -> String {
    format!("/api/v1/watchers/{}", encode(name.as_bytes()))
}

fn table(out: &mut impl Write, watchers: &[Info]) -> std::io::Result<()> {
    let row = |info: &Info| {
        [
            output::escape(info.name.as_bytes()),
            output::escape(&bytes(info.prefix.as_ref(), info.prefix_b64.as_ref())),
            output::escape(info.phase.as_bytes()),
            info.revision.to_string(),
            info.ids.to_string(),
            info.running.to_string(),
            info.waiting.to_string(),
            info.failing.to_string(),
        ]
    };
    let names = ["NAME", "PREFIX", "PHASE", "REVISION", "IDS", "RUNNING", "WAITING", "FAILING"];
    output::table(out, names, &watchers.iter().map(row).collect::<Vec<_>>())
}

fn show(out: &mut impl Write, info: &Info) -> std::io::Result<()> {
    table(out, std::slice::from_ref(info))?;
    writeln!(out, "runs: {} done, {} failed", info.done, info.failed)?;
    if info.malformed + info.unreadable > 0 {
        let (malformed, unreadable) = (info.malformed, info.unreadable);
        writeln!(out, "left out: {malformed} malformed keys, {unreadable} unreadable values")?;
    }
    if let Some(error) = &info.last_error {
        writeln!(out, "last error: {}", output::one_line(error))?;
    }
    let mut rows = Vec::new();
    for trouble in info.troubles.iter().flatten() {
        let id = output::escape(&bytes(trouble.id.as_ref(), trouble.id_b64.as_ref()));
        let retry = trouble
            .retry_in_ms
            .map(|ms| humantime::format_duration(Duration::from_millis(ms)).to_string());
        if let Some(error) = &trouble.error {
            let failures = trouble.failures.to_string();
            let error = output::one_line(error);
            rows.push([id.clone(), failures, retry.unwrap_or_default(), error]);
        }
        for Unreadable { key_type, error } in &trouble.unreadable {
            let what = output::one_line(&format!("cannot read {key_type}: {error}"));
            rows.push([id.clone(), String::new(), String::new(), what]);
        }
    }
    if !rows.is_empty() {
        writeln!(out)?;
        output::table(out, ["ID", "FAILURES", "RETRY IN", "ERROR"], &rows)?;
    }
    Ok(())
}
