//! Watchers and stages: how they are doing, and what is wrong with which id.

use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;
use vedetta_runtime::told::TroubleReport;

use super::parts::{self, ID, action, empty, number, part, span, visible};
use super::{Tab, Visit};
use crate::api::Context;
use crate::error::ApiError;
use crate::input::Query;
use crate::{stages as stage_api, watchers as watcher_api};

/// Troubles of a watcher, and parked records of a stage, that are shown.
const SHOWN: u32 = 20;

pub(super) async fn watchers(
    State(context): State<Context>,
    visit: Visit,
    query: Query,
) -> Response {
    let body = watched(&context, &visit, query);
    visit.show(Tab::Watchers, "Watchers", body)
}

/// A field as text.
fn text(row: &Value, name: &str) -> String {
    match &row[name] {
        Value::String(text) => visible(text),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// A field that is text, or else base64 under another name.
fn any_text(row: &Value, name: &str) -> String {
    match &row[name] {
        Value::Null => format!("base64 {}", text(row, &format!("{name}_b64"))),
        _ => text(row, name),
    }
}

fn count(row: &Value, name: &str) -> Markup {
    html! { td.number data-f=(name) data-b="number" { (row[name].as_u64().map(number).unwrap_or_default()) } }
}

fn watched(context: &Context, visit: &Visit, mut query: Query) -> Result<Markup, ApiError> {
    query.bytes("said");
    query.end()?;
    let rows = watcher_api::rows(context);
    let none = empty(
        "No watchers are declared.",
        "One runs a command for each thing that changed under a prefix, again until it succeeds. In vedetta.toml:",
        "[watch.rooms]\nprefix = \"/rooms/\"\nrun = [\"./on-room.sh\"]",
    );
    let heads = [
        ("Watcher", false),
        ("Prefix", false),
        ("Phase", false),
        ("Behind", true),
        ("Ids", true),
        ("Running", true),
        ("Waiting", true),
        ("Failing", true),
        ("Done", true),
        ("Failed", true),
        ("Last error", false),
        ("", false),
    ];
    let body = html! {
        tbody #watcher-rows {
            @for row in &rows {
                @let name = row["name"].as_str().unwrap_or_default();
                (watcher(visit, Some(row)))
                @for trouble in watcher_api::troubles(context, name, SHOWN as usize) {
                    (troubled(name, Some(&trouble)))
                }
            }
        }
    };
    // Those of other programs come while somebody looks.
    Ok(html! {
        @if rows.is_empty() { div data-until="watcher" { (none) } }
        div #watcher-there hidden[rows.is_empty()] { (parts::table("Watchers", &heads, &body)) }
        template #watcher-row { (watcher(visit, None)) }
        template #trouble-row { (troubled("", None)) }
    })
}

/// A watcher; without one, the row that scripts fill.
fn watcher(visit: &Visit, row: Option<&Value>) -> Markup {
    let prefix = row.map(|row| any_text(row, "prefix")).unwrap_or_default();
    let row = row.unwrap_or(&Value::Null);
    let id = row["name"].as_str().unwrap_or(ID);
    html! {
        tr data-watcher=(row["name"].as_str().unwrap_or_default()) {
            td.name data-f="name" { (text(row, "name")) }
            td.name { code data-f="prefix" { (prefix) } }
            td { span.badge data-f="phase" data-b="plain" data-s=(text(row, "phase")) { (text(row, "phase")) } }
            (count(row, "behind")) (count(row, "ids")) (count(row, "running")) (count(row, "waiting")) (count(row, "failing")) (count(row, "done")) (count(row, "failed"))
            td.error { span.long data-f="last_error" { (text(row, "last_error")) } }
            td.actions { (action(visit, &visit.here, &format!("/watchers/{}/resync", part(id)), "Resync", &format!("watcher {id}"))) }
        }
    }
}

/// What is wrong with an id; without one, the row that scripts fill.
fn troubled(watcher: &str, found: Option<&TroubleReport>) -> Markup {
    let (id, why) = found.map(|trouble| (named(trouble), said(trouble))).unwrap_or_default();
    html! {
        tr.trouble data-of=(watcher) { td colspan="12" { code data-f="id" { (id) } " " span.long data-f="why" { (why) } } }
    }
}

fn named(trouble: &TroubleReport) -> String {
    match (&trouble.id, &trouble.id_b64) {
        (Some(id), _) => visible(id),
        (None, b64) => format!("base64 {}", visible(b64.as_deref().unwrap_or_default())),
    }
}

fn said(trouble: &TroubleReport) -> String {
    let mut why = Vec::new();
    if let Some(error) = &trouble.error {
        let wait = trouble.retry_in_ms.map(std::time::Duration::from_millis);
        let again = wait.map(|wait| format!(", again in {}", span(wait)));
        let times = trouble.failures;
        why.push(format!("failed {times} times{}: {error}", again.unwrap_or_default()));
    }
    let unreadable = trouble.unreadable.iter();
    why.extend(unreadable.map(|bad| format!("cannot read {}: {}", bad.key_type, bad.error)));
    visible(&why.join("\n"))
}

pub(super) async fn stages(State(context): State<Context>, visit: Visit, query: Query) -> Response {
    let body = staged(&context, &visit, query).await;
    visit.show(Tab::Stages, "Stages", body)
}

async fn staged(context: &Context, visit: &Visit, mut query: Query) -> Result<Markup, ApiError> {
    query.bytes("said");
    query.end()?;
    let rows = stage_api::listed(context).await?;
    let none = empty(
        "There are no stages.",
        "Rust programs carry the entities of a table through stages; the example is a whole shop:",
        "cargo run --release -p orders -- work --place 500",
    );
    let heads = [
        ("Entity", false),
        ("Stage", false),
        ("Records", true),
        ("Due", true),
        ("Held", true),
        ("Failing", true),
        ("Parked", true),
        ("Oldest due", true),
        ("Done", true),
        ("A second", true),
        ("Failed", true),
    ];
    let mut parked = Vec::new();
    for row in rows.iter().filter(|row| row["parked"].as_u64() > Some(0)) {
        let (entity, stage) = (text(row, "entity"), text(row, "stage"));
        let records = stage_api::parked(context, &entity, &stage, SHOWN).await?;
        parked.extend(records.into_iter().map(|record| (entity.clone(), record)));
    }
    let body = html! { tbody #stage-rows { @for row in &rows { (stage(row)) } } };
    // A program that has others comes while somebody looks.
    Ok(html! {
        @if rows.is_empty() { div data-until="stage" { (none) } }
        div #stage-there hidden[rows.is_empty()] { (parts::table("Stages", &heads, &body)) }
        template #stage-row { (stage(&Value::Null)) }
        @if !parked.is_empty() {
            h2 { "Parked" }
            p.muted { "Records that kept failing, set aside until somebody asks. The first of each stage; " code { "vedetta stage list ENTITY --parked" } " has all." }
            (parts::table("Parked records", &[("Entity", false), ("Id", false), ("Stage", false), ("Failures", true), ("Error", false), ("", false)], &html! {
                tbody {
                    @for (entity, record) in &parked {
                        @let to = format!("/stages/{}/{}/{}/retry", part(entity), part(&record.stage), part(&record.id));
                        tr {
                            td.name { (visible(entity)) } td.name { (visible(&record.id)) } td.name { (visible(&record.stage)) }
                            td.number { (record.failures) }
                            td.error { span.long { (visible(record.error.as_deref().unwrap_or_default())) } }
                            td.actions { (action(visit, &visit.here, &to, "Retry", &format!("{} of {entity} {}", record.stage, record.id))) }
                        }
                    }
                }
            }))
        }
    })
}

/// A stage; without one, the row that scripts fill.
fn stage(row: &Value) -> Markup {
    let oldest = row["oldest_due_ms"].as_u64().map(std::time::Duration::from_millis);
    html! {
        tr data-stage=(format!("{} {}", row["entity"], row["stage"])) {
            td.name data-f="entity" { (text(row, "entity")) }
            td.name data-f="stage" { (text(row, "stage")) }
            (count(row, "records")) (count(row, "due")) (count(row, "held")) (count(row, "failing")) (count(row, "parked"))
            td.number data-f="oldest_due_ms" data-b="ms" { (oldest.map_or("–".into(), span)) }
            (count(row, "done"))
            td.number data-f="rate" data-b="number" {}
            (count(row, "failed"))
        }
    }
}
