use std::io::{self, IsTerminal as _, Read as _, Write};
use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use rustix::termios::{self, LocalModes, OptionalActions, Termios};
use serde_json::json;
use vedetta::access::{Access, FILE, Role, User as Info};

use crate::output::{self, Format};

/// Add and change those who sign in, on the data folder; a server that runs on it knows at once
///
/// Whoever may write the data folder may do this. A password is asked for, or read from stdin when that is no
/// terminal. Changing a user ends their sessions.
#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct User {
    #[command(flatten)]
    at: DataFolder,
    #[command(subcommand)]
    command: Command,
}

/// Whose users and tokens, and how to print.
#[derive(Debug, Args)]
pub(crate) struct DataFolder {
    /// The data folder
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        env = "VEDETTA_DATA",
        default_value = "vedetta-data"
    )]
    pub(crate) data: PathBuf,
    /// How to print it
    #[arg(long, global = true, value_enum, default_value_t = Format::Table)]
    pub(crate) output: Format,
}

impl DataFolder {
    /// Adding somebody makes the folder; nothing else does.
    pub(crate) fn open(&self, adds: bool) -> anyhow::Result<Access> {
        let known = adds || self.data.join(FILE).exists();
        anyhow::ensure!(known, "there is nobody yet in {}: check --data", self.data.display());
        Ok(Access::open(&self.data)?)
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Add a user
    Add {
        /// What they type to sign in
        name: String,
        /// viewer, operator or admin
        #[arg(long, default_value_t = Role::Viewer)]
        role: Role,
    },
    /// List all users
    List,
    /// Give a user another password
    Passwd {
        /// The user
        name: String,
    },
    /// Give a user another role
    Role {
        /// The user
        name: String,
        /// viewer, operator or admin
        role: Role,
    },
    /// Let a user sign in no more, for now
    Disable {
        /// The user
        name: String,
    },
    /// Let a user sign in again
    Enable {
        /// The user
        name: String,
    },
    /// Remove a user
    Remove {
        /// The user
        name: String,
    },
}

impl User {
    pub(crate) fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        let access = self.at.open(matches!(self.command, Command::Add { .. }))?;
        let (name, done) = match self.command {
            Command::List => return list(out, &access, self.at.output),
            Command::Add { name, role } => {
                access.add_user(&name, &password()?, role)?;
                (name, "added")
            }
            Command::Passwd { name } => {
                access.set_password(&name, &password()?)?;
                (name, "changed")
            }
            Command::Role { name, role } => {
                access.set_role(&name, role)?;
                (name, "changed")
            }
            Command::Disable { name } => {
                access.set_disabled(&name, true)?;
                (name, "disabled")
            }
            Command::Enable { name } => {
                access.set_disabled(&name, false)?;
                (name, "enabled")
            }
            Command::Remove { name } => {
                access.remove_user(&name)?;
                (name, "removed")
            }
        };
        match self.at.output {
            Format::Json => output::json(out, &json!({ "name": name, "done": done }))?,
            Format::Table => writeln!(out, "{} was {done}", output::one_line(&name))?,
        }
        Ok(())
    }
}

fn list(out: &mut impl Write, access: &Access, format: Format) -> anyhow::Result<()> {
    let users = access.users()?;
    match format {
        Format::Json => output::json(out, &json!({ "users": users }))?,
        Format::Table => {
            let row = |user: &Info| {
                [
                    output::escape(user.name.as_bytes()),
                    user.role.to_string(),
                    if user.disabled { "disabled".to_owned() } else { String::new() },
                    stamp(user.created),
                    user.used.map(stamp).unwrap_or_default(),
                ]
            };
            let rows: Vec<_> = users.iter().map(row).collect();
            output::table(out, ["NAME", "ROLE", "STATE", "CREATED", "SIGNED IN"], &rows)?;
        }
    }
    Ok(())
}

pub(crate) fn stamp(at: SystemTime) -> String {
    humantime::format_rfc3339_seconds(at).to_string()
}

/// Bytes of a line that may be a password.
const LINE: u64 = 4096;

/// Asked for twice, and not shown; or the first line of stdin.
fn password() -> anyhow::Result<String> {
    let stdin = io::stdin();
    if !stdin.is_terminal() {
        return line().context("cannot read the password from stdin");
    }
    let hidden = Hidden::new().context("cannot hide what is typed")?;
    let ask = |what: &str| {
        eprint!("{what}: ");
        let typed = line();
        eprintln!();
        typed.context("cannot read the password")
    };
    let (first, second) = (ask("Password")?, ask("Again")?);
    drop(hidden);
    anyhow::ensure!(first == second, "the two are not the same; nothing was changed");
    Ok(first)
}

/// Byte by byte: what follows is not ours.
fn line() -> io::Result<String> {
    let mut line = Vec::new();
    for byte in io::stdin().lock().take(LINE).bytes() {
        match byte? {
            b'\n' => break,
            byte => line.push(byte),
        }
    }
    String::from_utf8(line)
        .map(|line| line.trim_end_matches('\r').to_owned())
        .map_err(|_| io::Error::other("it is not UTF-8"))
}

/// A terminal that does not show what is typed, until dropped.
struct Hidden(Termios);

impl Hidden {
    fn new() -> io::Result<Self> {
        let before = termios::tcgetattr(io::stdin())?;
        let mut quiet = before.clone();
        quiet.local_modes -= LocalModes::ECHO;
        termios::tcsetattr(io::stdin(), OptionalActions::Flush, &quiet)?;
        Ok(Self(before))
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        let _ = termios::tcsetattr(io::stdin(), OptionalActions::Flush, &self.0);
    }
}
