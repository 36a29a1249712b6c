//! Jobs: finding some, and understanding one.

use std::time::SystemTime;

use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};
use vedetta_core::JobState;
use vedetta_jobs::wire::Which;
use vedetta_jobs::{Job, JobId};

use super::parts::{
    self, Rows, action, ago, badge, careful, empty, indented, job_row, narrowed, visible,
};
use super::{Tab, Visit};
use crate::api::Context;
use crate::error::ApiError;
use crate::input::Query;
use crate::jobs::{JobPath, ledger, no_such, page_of};
use crate::live::JobRow;
use crate::redact;

/// Jobs on a page.
pub(super) const PAGE: usize = 50;

/// What a list is narrowed by. A field that is empty was not filled in.
pub(super) fn which(query: &mut Query, names: &[&str]) -> Result<Which, ApiError> {
    query.bytes("said");
    let mut text = |name: &str| {
        let given = query.text(name)?;
        Ok::<_, ApiError>(given.filter(|text| !text.is_empty() && names.contains(&name)))
    };
    Ok(Which {
        status: text("status")?,
        queue: text("queue")?,
        kind: text("kind")?,
        tag: text("tag")?,
        q: text("q")?,
        cursor: text("cursor")?,
    })
}

/// The names of the queues, to choose from.
pub(super) async fn queues(context: &Context) -> Vec<String> {
    let queues = context.live.queues().await.unwrap_or_default();
    queues.into_iter().map(|queue| queue.name).take(100).collect()
}

pub(super) async fn list(State(context): State<Context>, visit: Visit, query: Query) -> Response {
    let body = listed(&context, &visit, query).await;
    visit.show(Tab::Jobs, "Jobs", body)
}

async fn listed(context: &Context, visit: &Visit, mut query: Query) -> Result<Markup, ApiError> {
    const FILTERS: [&str; 6] = ["status", "queue", "kind", "tag", "q", "cursor"];
    let which = which(&mut query, &FILTERS)?;
    query.end()?;
    let ledger = ledger(context)?;
    let page = page_of(ledger, which.clone(), PAGE).await?;
    let queues = queues(context).await;
    let rows: Vec<JobRow> = page.jobs.into_iter().map(Into::into).collect();
    let is_narrowed = which.given().next().is_some();
    Ok(html! {
        (parts::filters(&which, "/jobs", &["status", "queue", "kind", "tag", "q"], &queues))
        @if rows.is_empty() && !is_narrowed {
            (empty("No jobs yet.", "Ask for one on the command line, or with POST /api/v1/jobs:", "vedetta job add hello --payload '{\"to\": \"you\"}'"))
        } @else {
            p.newer { a #newer href=(narrowed("/jobs", &Which { cursor: None, ..which.clone() }, None)) hidden { "new jobs" } }
            (jobs_table(visit, &rows, Rows::Jobs, &which))
            (pages("/jobs", &which, rows.len(), page.next.map(|id| id.to_string())))
        }
    })
}

/// The rows of a list, and the one that scripts fill.
pub(super) fn jobs_table(visit: &Visit, rows: &[JobRow], shown: Rows, which: &Which) -> Markup {
    let body = html! {
        tbody #jobs data-query=(narrowed("", which, which.cursor.as_deref())) data-limit=(PAGE) data-first=[which.cursor.is_none().then_some("yes")] {
            @for job in rows { (job_row(visit, &visit.here, Some(job), shown)) }
        }
    };
    html! {
        (parts::table("Jobs, the newest first", shown.heads(), &body))
        template #job-row { (job_row(visit, &visit.here, None, shown)) }
    }
}

/// The way to what is hidden, and back. A page that shows it stays as it is: what is pushed has it hidden.
fn unveiling(id: JobId, secrets: Secrets) -> Markup {
    html! {
        @match secrets {
            Secrets::None => {}
            Secrets::Hidden => {
                p.muted { "What looks like a secret is hidden. " a #reveal href=(format!("/jobs/{id}?reveal=true")) rel="nofollow" { "Show it" } "; the audit log tells who did." }
            }
            Secrets::Shown => {
                p.muted { "All is shown as it is kept, and this page is not live. " a #hide href=(format!("/jobs/{id}")) { "Hide secrets" } }
            }
        }
    }
}

/// What was shown, and the way on.
pub(super) fn pages(to: &str, which: &Which, shown: usize, next: Option<String>) -> Markup {
    html! {
        nav.pages aria-label="Pages of the list" {
            span.muted {
                @if shown == 0 && next.is_some() { "None among those that were looked at; there are older ones." }
                @else if shown == 0 { "No job is like that." }
                @else { (shown) " shown" @if next.is_none() { ", there are no older ones" } }
            }
            @if which.cursor.is_some() { a href=(narrowed(to, which, None)) { "‹ Newest" } }
            @if let Some(next) = next { a href=(narrowed(to, which, Some(&next))) { "Older ›" } }
        }
    }
}

pub(super) async fn show(
    State(context): State<Context>,
    visit: Visit,
    path: Result<JobPath, ApiError>,
    query: Query,
) -> Response {
    let body = shown(&context, &visit, path, query).await;
    let title = match &body {
        Ok((job, _)) => format!("Job {} {}", job.id, job.kind),
        Err(_) => String::new(),
    };
    visit.show(Tab::Jobs, &title, body.map(|(_, body)| body))
}

async fn shown(
    context: &Context,
    visit: &Visit,
    path: Result<JobPath, ApiError>,
    mut query: Query,
) -> Result<(Job, Markup), ApiError> {
    let JobPath(id) = path?;
    query.bytes("said");
    let reveal = query.flag("reveal")?;
    query.end()?;
    let job = ledger(context)?.job(id).await?.ok_or_else(|| no_such(id))?;
    let secrets = if reveal {
        Secrets::Shown
    } else if visit.may_reveal && redact::has_secrets(&job) {
        Secrets::Hidden
    } else {
        Secrets::None
    };
    let job = if reveal { job } else { redact::job(job) };
    let body = one(visit, &job, secrets);
    Ok((job, body))
}

/// What of a job looks like a secret.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Secrets {
    /// Nothing, or nothing that this visitor may see.
    None,
    /// It is not shown, and may be asked for.
    Hidden,
    /// It was asked for.
    Shown,
}

fn one(visit: &Visit, job: &Job, secrets: Secrets) -> Markup {
    let now = SystemTime::now();
    let row = JobRow::from(job.clone());
    let (back, id) = (&visit.here, job.id);
    let what = format!("job {id}");
    let can_retry = matches!(job.status, JobState::Dead | JobState::Cancelled);
    let can_cancel = matches!(job.status, JobState::Waiting | JobState::Running);
    let runs = job.status == JobState::Running;
    let times = [
        ("Asked for", "queued_at", Some(job.queued_at)),
        ("May begin", "run_at", Some(job.run_at)),
        ("Began", "started_at", job.started_at),
        ("Ended", "ended_at", job.ended_at),
        ("Changed", "updated_at", Some(job.updated_at)),
    ];
    html! {
        article #job data-job=(id) data-still=[(secrets == Secrets::Shown).then_some("yes")] {
            (unveiling(id, secrets))
            div.headline {
                (badge(row.look(now)))
                span.muted { "attempt " span data-f="tries" { (job.attempts) "/" (job.max_attempts) } }
                div.actions {
                    div data-when="dead cancelled" hidden[!can_retry] { (action(visit, back, &format!("/jobs/{id}/retry"), "Retry", &what)) }
                    div data-when="waiting running" hidden[!can_cancel] { (action(visit, back, &format!("/jobs/{id}/cancel"), "Cancel", &what)) }
                    div data-when="waiting done dead cancelled" hidden[runs] { (careful(visit, "/jobs", &format!("/jobs/{id}/delete"), "Delete", &what)) }
                }
            }
            div.going data-when="running" hidden[!runs] {
                progress data-f="progress" data-b="progress" data-always="yes" max="1" value=(job.progress) aria-label="Progress" {}
                span data-f="percent" { (format!("{:.0} %", job.progress * 100.0)) }
            }
            p.long data-f="message" { (visible(job.message.as_deref().unwrap_or_default())) }
            section data-has="error" hidden[job.error.is_none()] aria-labelledby="error-head" {
                h2 #error-head { "Error" }
                pre.error tabindex="0" data-f="error" { (visible(job.error.as_deref().unwrap_or_default())) }
            }
            div.halves {
                section.panel aria-labelledby="about-head" {
                    h2 #about-head { "About" }
                    dl.facts {
                        dt { "Kind" } dd { a href=(format!("/jobs?kind={}", parts::part(&job.kind))) { (job.kind) } }
                        dt { "Queue" } dd { a href=(format!("/jobs?queue={}", parts::part(&job.queue))) { (job.queue) } }
                        dt { "Worker" } dd data-f="worker" { (job.worker.as_deref().unwrap_or("–")) }
                        dt { "Took" } dd data-f="took" { (row.ended_at.zip(row.started_at).and_then(|(end, began)| end.duration_since(began).ok()).map_or("–".into(), parts::span)) }
                        dt { "Cost" } dd { (job.cost) @if job.cost == 1 { " slot" } @else { " slots" } }
                        dt { "Priority" } dd { (job.priority) }
                        @if let Some(timeout) = job.timeout { dt { "Time for an attempt" } dd { (parts::span(timeout)) } }
                        @if let Some(key) = &job.unique_key { dt { "Unique key" } dd { code { (visible(key)) } } }
                        @if !job.tags.is_empty() { dt { "Tags" } dd { @for tag in &job.tags { a href=(format!("/jobs?tag={}", parts::part(tag))) { (tag) } " " } } }
                        dt { "Kept in" } dd { (job.connection) }
                    }
                }
                section.panel aria-labelledby="times-head" {
                    h2 #times-head { "Times" }
                    dl.facts { @for (name, field, at) in times { dt { (name) } dd { (ago(field, at, now)) } } }
                }
            }
            section aria-labelledby="payload-head" {
                h2 #payload-head { "Payload" }
                pre tabindex="0" { (visible(&indented(job.payload.get()))) }
            }
            section data-has="result" hidden[job.result.is_none()] aria-labelledby="result-head" {
                h2 #result-head { "Result" }
                pre tabindex="0" data-f="result" { (job.result.as_ref().map(|result| visible(&indented(result.get()))).unwrap_or_default()) }
            }
            section data-has="log" hidden[job.log.is_empty()] aria-labelledby="log-head" {
                h2 #log-head { "Log" span.muted { " its end" } }
                pre.log tabindex="0" data-f="log" { (visible(&job.log)) }
            }
        }
    }
}
