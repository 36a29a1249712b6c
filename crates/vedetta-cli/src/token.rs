use std::io::Write;
use std::time::SystemTime;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use serde_json::json;
use vedetta::access::{Role, Scope, Token as Info};

use crate::output::{self, Format};
use crate::user::{DataFolder, stamp};

/// Make, scope and revoke tokens for programs, on the data folder; a server that runs on it knows at once
///
/// Whoever may write the data folder may do this. A program sends its token as `Authorization: Bearer …`; this one
/// reads it from `VEDETTA_TOKEN`.
#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Token {
    #[command(flatten)]
    at: DataFolder,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make a token and print it, once
    Add {
        /// What it is for
        name: String,
        /// viewer, operator or admin
        #[arg(long, default_value_t = Role::Viewer)]
        role: Role,
        /// Where it is good: all, or some of jobs, queues, workers, stages, watchers, kv, stats, events and audit, with commas;
        /// a worker needs jobs,workers
        #[arg(long, default_value_t = Scope::All)]
        scope: Scope,
        /// How long it is good, for example 30d [default: until it is revoked]
        #[arg(long, value_name = "TIME")]
        expires: Option<humantime::Duration>,
    },
    /// List all tokens; not what they are
    List,
    /// Make a token good elsewhere than it was
    Scope {
        /// The token's name
        name: String,
        /// As for `add --scope`
        scope: Scope,
    },
    /// End a token
    Revoke {
        /// The token's name
        name: String,
    },
}

impl Token {
    pub(crate) fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        let access = self.at.open(matches!(self.command, Command::Add { .. }))?;
        let format = self.at.output;
        match self.command {
            Command::Add { name, role, scope, expires } => {
                let now = SystemTime::now();
                let end = expires.map(|time| now.checked_add(*time).context("that is too long"));
                let token = access.add_token(&name, role, &scope, end.transpose()?)?;
                match format {
                    Format::Json => {
                        let token = token.reveal();
                        let made =
                            json!({ "name": name, "role": role, "scope": scope, "token": token });
                        output::json(out, &made)?;
                    }
                    Format::Table => writeln!(out, "{}", token.reveal())?,
                }
            }
            Command::List => {
                let tokens = access.tokens()?;
                match format {
                    Format::Json => output::json(out, &json!({ "tokens": tokens }))?,
                    Format::Table => table(out, &tokens)?,
                }
            }
            Command::Scope { name, scope } => {
                access.set_scope(&name, &scope)?;
                match format {
                    Format::Json => output::json(out, &json!({ "name": name, "scope": scope }))?,
                    Format::Table => {
                        writeln!(out, "{} is good for {scope}", output::one_line(&name))?;
                    }
                }
            }
            Command::Revoke { name } => {
                access.revoke_token(&name)?;
                match format {
                    Format::Json => {
                        output::json(out, &json!({ "name": name, "done": "revoked" }))?;
                    }
                    Format::Table => writeln!(out, "{} was revoked", output::one_line(&name))?,
                }
            }
        }
        Ok(())
    }
}

fn table(out: &mut impl Write, tokens: &[Info]) -> std::io::Result<()> {
    let now = SystemTime::now();
    let row = |token: &Info| {
        let state = if token.is_over(now) { "expired" } else { "" };
        [
            output::escape(token.name.as_bytes()),
            token.role.to_string(),
            output::escape(token.scope.to_string().as_bytes()),
            state.to_owned(),
            stamp(token.created),
            token.expires.map(stamp).unwrap_or_default(),
            token.used.map(stamp).unwrap_or_default(),
        ]
    };
    let names = ["NAME", "ROLE", "SCOPE", "STATE", "CREATED", "EXPIRES", "USED"];
    output::table(out, names, &tokens.iter().map(row).collect::<Vec<_>>())
}
