mod run;

use std::collections::BTreeSet;
use std::io::Write;
use std::thread::sleep;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use serde_json::json;
use ureq::http::Method;
use vedetta::fleet::bus::State;
use vedetta::fleet::roster::Status;
use vedetta::fleet::wire::{CommandInfo, Commands, Mood, SupervisorInfo, WorkerInfo, Workers};

use crate::client::{Client, ClientError, Remote, encode};
use crate::config::Time;
use crate::output::{self, Format};

/// Run a worker, see all of them, and have them start, pause, resume and stop
#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Worker {
    #[command(flatten)]
    remote: Remote,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(run::Run),
    /// List workers and supervisors
    List {
        /// Those that have stopped, too; `--output json` always has them
        #[arg(long)]
        all: bool,
    },
    /// Have a supervisor start workers of a queue, beside those it has
    Start {
        /// The queue
        queue: String,
        /// How many
        #[arg(long, default_value_t = 1)]
        count: u32,
        #[command(flatten)]
        how: How,
    },
    /// Have a worker finish what runs, and end
    Stop {
        /// The worker
        id: String,
        #[command(flatten)]
        how: How,
    },
    /// Have a worker finish what runs, and take nothing
    Pause {
        /// The worker
        id: String,
        #[command(flatten)]
        how: How,
    },
    /// Have a worker go on
    Resume {
        /// The worker
        id: String,
        #[command(flatten)]
        how: How,
    },
    /// Have all workers finish what runs and end, and none started in their place
    Terminate {
        #[command(flatten)]
        how: How,
    },
    /// Have every supervisor replace its workers, one at a time
    Restart {
        #[command(flatten)]
        how: How,
    },
}

#[derive(Debug, Args)]
struct How {
    /// Wait until it is obeyed; a stop and a terminate, until the workers are gone; a restart, until all are replaced
    #[arg(long)]
    wait: bool,
    /// Not to be obeyed after that [default: 60s]
    #[arg(long, value_name = "TIME", value_parser = time)]
    ttl: Option<Duration>,
}

pub(crate) fn time(text: &str) -> Result<Duration, String> {
    Time::try_from(text.to_owned()).map(|time| time.0)
}

/// Whether the server is there and does not let us in: trying on would not help.
fn refused(client: &Client) -> Result<(), ClientError> {
    match client.get::<serde_json::Value>("/api/v1/session") {
        Err(error @ ClientError::Refused { status: 401 | 403, .. }) => Err(error),
        // It may be on its way.
        Ok(_) | Err(_) => Ok(()),
    }
}

/// What waits is looked at this often.
const OFTEN: Duration = Duration::from_millis(20);
/// Beyond its time a command is waited for no longer than that: where the clock was set back, it may seem to be in force for ever.
const BEYOND: Duration = Duration::from_secs(5);

impl Worker {
    pub(crate) fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        let (path, body, how, leaves) = match self.command {
            Command::Run(run) => {
                refused(&Client::new(&self.remote)?)?;
                return run.run(self.remote.server());
            }
            Command::List { all: with_stopped } => {
                let client = Client::new(&self.remote)?;
                let all: Workers = client.get("/api/v1/workers")?;
                return match self.remote.output {
                    Format::Json => Ok(output::json(out, &all)?),
                    Format::Table => Ok(list(out, &all, with_stopped)?),
                };
            }
            Command::Start { queue, count, how } => {
                let body = json!({ "queue": queue, "count": count });
                ("/api/v1/workers".to_owned(), Some(body), how, false)
            }
            Command::Stop { id, how } => (path(&id, "stop"), None, how, true),
            Command::Pause { id, how } => (path(&id, "pause"), None, how, false),
            Command::Resume { id, how } => (path(&id, "resume"), None, how, false),
            Command::Terminate { how } => ("/api/v1/workers/terminate".into(), None, how, true),
            Command::Restart { how } => ("/api/v1/workers/restart".into(), None, how, false),
        };
        let client = Client::new(&self.remote)?;
        let ttl = how.ttl.map(|ttl| format!("?ttl_ms={}", ttl.as_millis())).unwrap_or_default();
        let path = format!("{path}{ttl}");
        let is_restart = path.contains("/restart");
        let is_one = !path.contains("/terminate") && !is_restart;
        let before = if how.wait && is_restart { there(&client)? } else { BTreeSet::new() };
        let mut commands = if is_one {
            let told = client.ask::<CommandInfo>(Method::POST, &path, body);
            vec![told.map_err(unknown)?]
        } else {
            client.ask::<Commands>(Method::POST, &path, body)?.commands
        };
        if how.wait {
            for command in &mut commands {
                wait(&client, command)?;
            }
            let obeyed = commands.iter().filter(|it| matches!(it.state, State::Applied));
            let obeyed: BTreeSet<&str> = obeyed.map(|it| it.target.as_str()).collect();
            // Those of who did not obey go on.
            if is_restart {
                wait_for_others(&client, &before, &obeyed)?;
            } else if leaves {
                wait_for_end(&client, &obeyed)?;
            }
        }
        match self.remote.output {
            Format::Json if is_one => output::json(out, &commands.first())?,
            Format::Json => output::json(out, &Commands { commands: commands.clone() })?,
            Format::Table => table(out, &commands)?,
        }
        let unheeded =
            commands.iter().filter(|command| how.wait && !matches!(command.state, State::Applied));
        let unheeded = unheeded.count();
        anyhow::ensure!(unheeded == 0, "not obeyed: {unheeded} of {}", commands.len());
        Ok(())
    }
}

fn path(id: &str, what: &str) -> String {
    format!("/api/v1/workers/{}/{what}", encode(id.as_bytes()))
}

/// Where to see who could be told instead.
fn unknown(error: ClientError) -> ClientError {
    match error {
        ClientError::Refused { status: 404, message } => {
            let message = format!("{message} (vedetta worker list shows who is there)");
            ClientError::Refused { status: 404, message }
        }
        other => other,
    }
}

/// Until it is known what became of it, or its time is over.
fn wait(client: &Client, command: &mut CommandInfo) -> anyhow::Result<()> {
    let began = Instant::now();
    let lasts = command.expires_at.0.duration_since(command.created_at.0).unwrap_or_default();
    let patience = lasts + BEYOND;
    while matches!(command.state, State::Requested | State::Taken) && began.elapsed() < patience {
        sleep(OFTEN);
        *command = client.get(&format!("/api/v1/commands/{}", encode(command.id.0.as_bytes())))?;
    }
    Ok(())
}

/// Whether a worker, or its supervisor, is among those that obeyed.
fn is_of(worker: &WorkerInfo, obeyed: &BTreeSet<&str>) -> bool {
    let supervisor = worker.supervisor.as_ref().map(|name| format!("supervisor:{name}"));
    let by_it = supervisor.is_some_and(|name| obeyed.contains(name.as_str()));
    by_it || obeyed.contains(format!("worker:{}", worker.id).as_str())
}

/// Whether a worker may still work. One that speaks to another server than we do is heard of late, and seems silent.
fn is_there(worker: &WorkerInfo, all: &Workers) -> bool {
    let is_elsewhere = |boss: &SupervisorInfo| {
        worker.supervisor.as_ref() == Some(&boss.name) && boss.report.is_none() && !is_gone(boss)
    };
    match worker.status {
        Status::Stopped => false,
        Status::Silent => all.supervisors.iter().any(is_elsewhere),
        Status::Running | Status::Paused | Status::Stopping => true,
    }
}

/// Until none of those who obeyed works any more, nor of their workers, however long what runs takes.
fn wait_for_end(client: &Client, obeyed: &BTreeSet<&str>) -> anyhow::Result<()> {
    loop {
        let all: Workers = client.get("/api/v1/workers")?;
        let is_told_again = |boss: &&SupervisorInfo| {
            let is_asked = obeyed.contains(format!("supervisor:{}", boss.name).as_str());
            is_asked && boss.report.is_some() && !boss.halted
        };
        if let Some(boss) = all.supervisors.iter().find(is_told_again) {
            let name = output::one_line(&boss.name);
            anyhow::bail!("not ended: the supervisor {name} was told to start workers again");
        }
        if !all.workers.iter().any(|worker| is_of(worker, obeyed) && is_there(worker, &all)) {
            return Ok(());
        }
        sleep(OFTEN);
    }
}

/// The workers that there are now and that are not part of a server.
fn there(client: &Client) -> anyhow::Result<BTreeSet<String>> {
    let all: Workers = client.get("/api/v1/workers")?;
    let there = all.workers.iter().filter(|worker| is_there(worker, &all) && !worker.inside);
    Ok(there.map(|worker| worker.id.clone()).collect())
}

/// A supervisor that was not heard of for so long does not go on with what it was told.
const GONE: Duration = Duration::from_secs(60);

fn is_gone(supervisor: &SupervisorInfo) -> bool {
    Duration::from_millis(supervisor.seen_ms) > GONE
}

/// Until those who obeyed have none of these left, and others in their place, however long what runs takes. Supervisors that
/// were not asked, or are gone, hold nobody up.
fn wait_for_others(
    client: &Client,
    before: &BTreeSet<String>,
    obeyed: &BTreeSet<&str>,
) -> anyhow::Result<()> {
    loop {
        let all: Workers = client.get("/api/v1/workers")?;
        let asked = obeyed.iter().filter_map(|target| target.strip_prefix("supervisor:"));
        let mut is_whole = true;
        for name in asked {
            let found = all.supervisors.iter().find(|it| it.name == name && !is_gone(it));
            let Some(found) = found else {
                anyhow::bail!("not replaced: the supervisor {} is gone", output::one_line(name));
            };
            // It speaks to another server: of what it is at only its workers are seen here.
            let Some(report) = &found.report else { continue };
            let of_it = |worker: &&WorkerInfo| {
                worker.supervisor.as_deref() == Some(name)
                    && matches!(worker.status, Status::Running | Status::Paused)
            };
            is_whole &= match report.state {
                Mood::Running => all.workers.iter().filter(of_it).count() >= report.wanted as usize,
                Mood::Terminated | Mood::Stopping => {
                    let name = output::one_line(name);
                    anyhow::bail!("not replaced: the supervisor {name} ends its workers");
                }
                Mood::Restarting | Mood::Starting => false,
                Mood::CrashLooping => {
                    let name = output::one_line(name);
                    anyhow::bail!(
                        "not replaced: new workers of the supervisor {name} end again and again"
                    );
                }
            };
        }
        let is_left = |worker: &WorkerInfo| {
            before.contains(&worker.id) && is_of(worker, obeyed) && is_there(worker, &all)
        };
        if is_whole && !all.workers.iter().any(is_left) {
            return Ok(());
        }
        sleep(OFTEN);
    }
}

fn table(out: &mut impl Write, commands: &[CommandInfo]) -> std::io::Result<()> {
    let row = |command: &CommandInfo| {
        let state = format!("{:?}", command.state).to_lowercase();
        let words = [&command.id.0, &command.target, &command.command.to_string(), &state];
        words.map(|word| output::escape(word.as_bytes()))
    };
    let rows: Vec<[String; 4]> = commands.iter().map(row).collect();
    output::table(out, ["COMMAND", "FOR", "WHAT", "STATE"], &rows)
}

/// A table of workers and one of supervisors; of those that have stopped only how many they are, unless they are wanted.
pub(crate) fn list(out: &mut impl Write, all: &Workers, with_stopped: bool) -> std::io::Result<()> {
    let ago = |ms: u64| {
        let whole = Duration::from_millis(ms - ms % 100);
        humantime::format_duration(whole).to_string()
    };
    let row = |worker: &WorkerInfo| {
        let supervisor = worker.supervisor.as_deref();
        let by = supervisor.unwrap_or(if worker.inside { "(the server)" } else { "" });
        [
            output::escape(worker.id.as_bytes()),
            worker.status.word().to_owned(),
            output::escape(worker.queues.join(",").as_bytes()),
            output::escape(by.as_bytes()),
            worker.pid.to_string(),
            output::escape(worker.host.as_bytes()),
            format!("{}/{}", worker.slots.used, worker.slots.capacity),
            worker.running.len().to_string(),
            ago(worker.seen_ms),
            output::escape(worker.note.as_deref().unwrap_or_default().as_bytes()),
        ]
    };
    let is_shown = |worker: &&WorkerInfo| with_stopped || worker.status != Status::Stopped;
    let rows: Vec<[String; 10]> = all.workers.iter().filter(is_shown).map(row).collect();
    let stopped = all.workers.len() - rows.len();
    let names = [
        "WORKER",
        "STATUS",
        "QUEUES",
        "SUPERVISOR",
        "PID",
        "HOST",
        "SLOTS",
        "JOBS",
        "SEEN",
        "NOTE",
    ];
    output::table(out, names, &rows)?;
    if stopped > 0 {
        writeln!(out, "({stopped} stopped: vedetta worker list --all)")?;
    }
    if all.supervisors.is_empty() {
        return Ok(());
    }
    writeln!(out)?;
    let rows: Vec<[String; 7]> = all
        .supervisors
        .iter()
        .map(|supervisor| {
            let report = supervisor.report.as_ref();
            let state = report.map(|report| serde_json::to_value(report.state).unwrap_or_default());
            let state = state.as_ref().and_then(serde_json::Value::as_str);
            let state = state.unwrap_or(if supervisor.halted { "terminated" } else { "elsewhere" });
            let size = |report: &vedetta::fleet::wire::ReportInfo| {
                format!("{} ({}…{})", report.wanted, report.min, report.max)
            };
            [
                output::escape(supervisor.name.as_bytes()),
                state.to_owned(),
                output::escape(report.map(|it| it.queues.join(",")).unwrap_or_default().as_bytes()),
                report.map(|report| report.balance.clone()).unwrap_or_default(),
                report.map(size).unwrap_or_default(),
                ago(supervisor.seen_ms),
                output::escape(
                    report.and_then(|it| it.last_exit.clone()).unwrap_or_default().as_bytes(),
                ),
            ]
        })
        .collect();
    let names = ["SUPERVISOR", "STATE", "QUEUES", "BALANCE", "WORKERS", "SEEN", "LAST FAILURE"];
    output::table(out, names, &rows)
}
