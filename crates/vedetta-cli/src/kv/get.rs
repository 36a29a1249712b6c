use std::io::Write;

use clap::Args;
use serde::{Deserialize, Serialize};

use super::Entry;
use crate::client::{Client, encode};
use crate::output::{self, Format};

/// Read a key, or all keys under a prefix
///
/// Of one key the value is printed, as it is; control characters are escaped if it goes to a terminal.
#[derive(Debug, Args)]
pub(crate) struct Get {
    /// The key, or with --prefix how the keys begin; "" for all
    key: String,
    /// All keys that begin with KEY, in order
    #[arg(long)]
    prefix: bool,
    /// As it was at this revision
    #[arg(long, value_name = "N")]
    revision: Option<u64>,
    /// Leave the values out
    #[arg(long)]
    keys_only: bool,
    /// At most so many keys
    #[arg(long, value_name = "N", requires = "prefix")]
    limit: Option<usize>,
}

#[derive(Serialize, Deserialize)]
struct One {
    revision: u64,
    #[serde(flatten)]
    entry: Entry,
}

#[derive(Serialize, Deserialize)]
struct Page {
    revision: u64,
    keys: Vec<Entry>,
    #[serde(skip_serializing)]
    cursor: Option<String>,
}

impl Get {
    pub(crate) fn run(
        self,
        client: &Client,
        format: Format,
        out: &mut impl Write,
    ) -> anyhow::Result<()> {
        if self.prefix { self.many(client, format, out) } else { self.one(client, format, out) }
    }

    fn one(self, client: &Client, format: Format, out: &mut impl Write) -> anyhow::Result<()> {
        let at = self.revision.map(|revision| format!("?revision={revision}")).unwrap_or_default();
        let path = format!("/api/v1/kv/{}{at}", encode(self.key.as_bytes()));
        let mut found: One = client.get(&path)?;
        if self.keys_only {
            (found.entry.value, found.entry.value_b64) = (None, None);
        }
        let printed = match (format, self.keys_only) {
            (Format::Json, _) => return Ok(output::json(out, &found)?),
            (Format::Table, true) => found.entry.key(),
            (Format::Table, false) => found.entry.value(),
        };
        if output::on_terminal() {
            writeln!(out, "{}", output::escape(&printed))?;
        } else {
            out.write_all(&printed)?;
            writeln!(out)?;
        }
        Ok(())
    }

    fn many(self, client: &Client, format: Format, out: &mut impl Write) -> anyhow::Result<()> {
        let at = self.revision.map(|revision| format!("&revision={revision}")).unwrap_or_default();
        let prefix = encode(self.key.as_bytes());
        let path = format!("/api/v1/kv?prefix={prefix}&keys_only={}{at}", self.keys_only);
        let limit = self.limit.unwrap_or(usize::MAX);
        let mut all = Page { revision: 0, keys: Vec::new(), cursor: None };
        loop {
            let wanted = (limit - all.keys.len()).min(500);
            let cursor = all.cursor.as_ref().map(|cursor| format!("&cursor={cursor}"));
            let path = format!("{path}&limit={wanted}{}", cursor.unwrap_or_default());
            let page: Page = client.get(&path)?;
            all.revision = page.revision;
            all.keys.extend(page.keys);
            all.cursor = page.cursor;
            if all.cursor.is_none() || all.keys.len() >= limit {
                break;
            }
        }
        all.keys.truncate(limit);
        let row = |entry: &Entry| {
            let lease = entry.lease.clone().unwrap_or_default();
            let modified = entry.modified.to_string();
            (output::escape(&entry.key()), modified, lease, output::escape(&entry.value()))
        };
        let rows = all.keys.iter().map(row);
        match format {
            Format::Json => output::json(out, &all)?,
            Format::Table if self.keys_only => {
                for (key, ..) in rows {
                    writeln!(out, "{key}")?;
                }
            }
            Format::Table => {
                let rows: Vec<_> = rows.map(<[String; 4]>::from).collect();
                output::table(out, ["KEY", "REVISION", "LEASE", "VALUE"], &rows)?;
            }
        }
        Ok(())
    }
}
