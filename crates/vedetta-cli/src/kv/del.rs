use std::io::Write;

use clap::Args;
use serde::{Deserialize, Serialize};
use ureq::http::Method;

use crate::client::{Client, encode};
use crate::exit::No;
use crate::output::{self, Format};

/// Delete a key, or all keys under a prefix; prints how many went
///
/// A key that does not exist is "not found" (exit code 3). With --prefix there may be none.
#[derive(Debug, Args)]
pub(crate) struct Del {
    /// The key, or with --prefix how the keys begin
    key: String,
    /// All keys that begin with KEY
    #[arg(long)]
    prefix: bool,
}

#[derive(Serialize, Deserialize)]
struct Done {
    revision: u64,
    count: usize,
}

impl Del {
    pub(crate) fn run(
        self,
        client: &Client,
        format: Format,
        out: &mut impl Write,
    ) -> anyhow::Result<()> {
        let prefix = if self.prefix { "?prefix=true" } else { "" };
        let path = format!("/api/v1/kv/{}{prefix}", encode(self.key.as_bytes()));
        let done: Done = client.ask(Method::DELETE, &path, None)?;
        if done.count == 0 && !self.prefix {
            return Err(No::NotFound.into());
        }
        match format {
            Format::Json => output::json(out, &done)?,
            Format::Table => writeln!(out, "{} deleted, revision {}", done.count, done.revision)?,
        }
        Ok(())
    }
}
