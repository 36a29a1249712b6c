use std::fmt::Write as _;
use std::io::Write;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};
use ureq::http::Method;

use crate::client::{Client, ClientError, Remote, encode};
use crate::output::{self, Format};

/// See what is in the queues of the stages, and have records tried again
///
/// Stages belong to programs that are built on the library. A server shows those of the database it is on.
#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Stage {
    #[command(flatten)]
    remote: Remote,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List all stages; or, of one kind of entity, the records in their queues
    List {
        /// Whose records to list, for example `order`
        entity: Option<String>,
        /// Only records of this stage
        #[arg(long, requires = "entity")]
        stage: Option<String>,
        /// Only records that were set aside because they kept failing
        #[arg(long, requires = "entity")]
        parked: bool,
        /// How many at most
        #[arg(long, default_value_t = 100, requires = "entity")]
        limit: u32,
    },
    /// Show the records of one entity
    Show {
        /// Its kind
        entity: String,
        /// Its id
        id: String,
    },
    /// Try a record again now, whatever became of it before; one that is held, when its holder has ended
    Retry {
        /// The kind of entity
        entity: String,
        /// The stage
        stage: String,
        /// The entity's id
        #[arg(required_unless_present = "all")]
        id: Option<String>,
        /// All records of the stage that were set aside
        #[arg(long, conflicts_with = "id")]
        all: bool,
    },
}

#[derive(Serialize, Deserialize)]
struct List {
    stages: Vec<Info>,
}

/// A stage as the API shows it; printed as it came.
#[derive(Serialize, Deserialize)]
struct Info {
    entity: String,
    stage: String,
    records: u64,
    due: u64,
    held: u64,
    failing: u64,
    parked: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    oldest_due_ms: Option<u64>,
    done: u64,
    failed: u64,
    conflicts: u64,
}

#[derive(Serialize, Deserialize)]
struct Page {
    records: Vec<Record>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct Record {
    stage: String,
    id: String,
    state: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    due_in_ms: Option<u64>,
    failures: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    age_ms: u64,
}

#[derive(Serialize, Deserialize)]
struct Retried {
    retried: bool,
}

#[derive(Serialize)]
struct RetriedAll {
    retried: u64,
}

impl Stage {
    pub(crate) fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        let client = Client::new(&self.remote)?;
        let format = self.remote.output;
        match self.command {
            Command::List { entity: None, .. } => {
                let list: List = client.get("/api/v1/stages")?;
                match format {
                    Format::Json => output::json(out, &list)?,
                    Format::Table => stages(out, &list.stages)?,
                }
            }
            Command::List { entity: Some(entity), stage, parked, limit } => {
                let page = list(&client, &entity, stage.as_deref(), parked, limit)?;
                let more = page.cursor.is_some();
                show(out, format, &page)?;
                if more && format == Format::Table {
                    writeln!(out, "… and more: --limit shows them")?;
                }
            }
            Command::Show { entity, id } => {
                let path = format!("{}/{}", path(&entity), encode(id.as_bytes()));
                let page: Page = client.get(&path)?;
                if page.records.is_empty() {
                    let message =
                        format!("{entity} {id:?} has no records: nothing is to do for it");
                    return Err(ClientError::Refused { status: 404, message }.into());
                }
                show(out, format, &page)?;
            }
            Command::Retry { entity, stage, id: Some(id), .. } => {
                let done = retry(&client, &entity, &stage, &id)?;
                match format {
                    Format::Json => output::json(out, &done)?,
                    Format::Table => writeln!(out, "due now, or when who holds it has ended")?,
                }
            }
            Command::Retry { entity, stage, id: None, .. } => {
                let parked = list(&client, &entity, Some(&stage), true, u32::MAX)?;
                let mut retried = 0;
                for record in parked.records {
                    match retry(&client, &entity, &stage, &record.id) {
                        Ok(_) => retried += 1,
                        // Done meanwhile.
                        Err(ClientError::Refused { status: 404, .. }) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                match format {
                    Format::Json => output::json(out, &RetriedAll { retried })?,
                    Format::Table => writeln!(out, "due now: {retried}")?,
                }
            }
        }
        Ok(())
    }
}

/// The largest page the API has.
const PAGE: u32 = 500;

fn path(entity: &str) -> String {
    format!("/api/v1/stages/{}", encode(entity.as_bytes()))
}

/// As many as are wanted, page by page.
fn list(
    client: &Client,
    entity: &str,
    stage: Option<&str>,
    parked: bool,
    limit: u32,
) -> anyhow::Result<Page> {
    let mut all = Page { records: Vec::new(), cursor: None };
    loop {
        let left = limit.saturating_sub(u32::try_from(all.records.len()).unwrap_or(u32::MAX));
        if left == 0 {
            return Ok(all);
        }
        let mut page = format!("{}?limit={}&parked={parked}", path(entity), left.min(PAGE));
        if let Some(stage) = stage {
            let _ = write!(page, "&stage={}", encode(stage.as_bytes()));
        }
        if let Some(cursor) = all.cursor {
            let _ = write!(page, "&cursor={cursor}");
        }
        let page: Page = client.get(&page)?;
        all.records.extend(page.records);
        all.cursor = page.cursor;
        if all.cursor.is_none() {
            return Ok(all);
        }
    }
}

fn retry(client: &Client, entity: &str, stage: &str, id: &str) -> Result<Retried, ClientError> {
    let (stage, id) = (encode(stage.as_bytes()), encode(id.as_bytes()));
    client.ask(Method::POST, &format!("{}/{stage}/{id}/retry", path(entity)), None)
}

fn time(millis: Option<u64>) -> String {
    let format = |millis| humantime::format_duration(Duration::from_millis(millis)).to_string();
    millis.map(format).unwrap_or_default()
}

fn stages(out: &mut impl Write, stages: &[Info]) -> std::io::Result<()> {
    let row = |info: &Info| {
        [
            output::escape(info.entity.as_bytes()),
            output::escape(info.stage.as_bytes()),
            info.records.to_string(),
            info.due.to_string(),
            info.held.to_string(),
            info.failing.to_string(),
            info.parked.to_string(),
            time(info.oldest_due_ms),
            info.done.to_string(),
            info.failed.to_string(),
            info.conflicts.to_string(),
        ]
    };
    let names = [
        "ENTITY",
        "STAGE",
        "RECORDS",
        "DUE",
        "HELD",
        "FAILING",
        "PARKED",
        "OLDEST",
        "DONE",
        "FAILED",
        "CONFLICTS",
    ];
    output::table(out, names, &stages.iter().map(row).collect::<Vec<_>>())
}

fn show(out: &mut impl Write, format: Format, page: &Page) -> std::io::Result<()> {
    if format == Format::Json {
        return output::json(out, page);
    }
    let row = |record: &Record| {
        [
            output::escape(record.stage.as_bytes()),
            output::escape(record.id.as_bytes()),
            output::escape(record.state.as_bytes()),
            time(record.due_in_ms),
            record.failures.to_string(),
            time(Some(record.age_ms)),
            output::one_line(record.error.as_deref().unwrap_or_default()),
        ]
    };
    let names = ["STAGE", "ID", "STATE", "DUE IN", "FAILURES", "AGE", "ERROR"];
    output::table(out, names, &page.records.iter().map(row).collect::<Vec<_>>())
}
