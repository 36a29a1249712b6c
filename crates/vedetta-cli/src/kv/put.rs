use std::io::{Read as _, Write};

use anyhow::Context as _;
use base64::Engine as _;
use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::json;
use ureq::http::Method;

use crate::client::{Client, encode};
use crate::output::{self, Format};

/// Give a key a value; prints the revision once it is on the server's disk
#[derive(Debug, Args)]
pub(crate) struct Put {
    /// The key
    key: String,
    /// The value; `-` reads it from stdin, as it is
    #[arg(allow_hyphen_values = true)]
    value: String,
    /// Let the key go with this lease
    #[arg(long, value_name = "ID")]
    lease: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct Done {
    revision: u64,
}

impl Put {
    pub(crate) fn run(
        self,
        client: &Client,
        format: Format,
        out: &mut impl Write,
    ) -> anyhow::Result<()> {
        let mut value = self.value.into_bytes();
        if value == b"-" {
            value.clear();
            std::io::stdin().read_to_end(&mut value).context("cannot read the value from stdin")?;
        }
        let mut body = match String::from_utf8(value) {
            Ok(text) => json!({ "value": text }),
            Err(bytes) => {
                let b64 = base64::prelude::BASE64_STANDARD.encode(bytes.as_bytes());
                json!({ "value_b64": b64 })
            }
        };
        if let Some(lease) = self.lease {
            body["lease"] = lease.into();
        }
        let path = format!("/api/v1/kv/{}", encode(self.key.as_bytes()));
        let done: Done = client.ask(Method::PUT, &path, Some(body))?;
        match format {
            Format::Json => output::json(out, &done)?,
            Format::Table => writeln!(out, "revision {}", done.revision)?,
        }
        Ok(())
    }
}
