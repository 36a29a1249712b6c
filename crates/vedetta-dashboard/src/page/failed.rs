//! Jobs that failed for good: why, and trying them again.

use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};
use vedetta_core::JobState;
use vedetta_jobs::status;
use vedetta_jobs::wire::Which;

use super::jobs::{PAGE, jobs_table, pages, queues, which};
use super::parts::{self, Rows, empty, hidden};
use super::{Tab, Visit};
use crate::api::Context;
use crate::error::ApiError;
use crate::input::Query;
use crate::jobs::{ledger, page_of};
use crate::live::JobRow;

pub(super) async fn page(State(context): State<Context>, visit: Visit, query: Query) -> Response {
    let body = body(&context, &visit, query).await;
    visit.show(Tab::Failed, "Failed jobs", body)
}

async fn body(context: &Context, visit: &Visit, mut query: Query) -> Result<Markup, ApiError> {
    let which = which(&mut query, &["queue", "kind", "tag", "q", "cursor"])?;
    query.end()?;
    let dead = Which { status: Some(status::word(JobState::Dead).into()), ..which.clone() };
    let page = page_of(ledger(context)?, dead.clone(), PAGE).await?;
    let queues = queues(context).await;
    let rows: Vec<JobRow> = page.jobs.into_iter().map(Into::into).collect();
    let is_narrowed = which.given().next().is_some();
    Ok(html! {
        (parts::filters(&which, "/failed", &["queue", "kind", "tag", "q"], &queues))
        @if rows.is_empty() && !is_narrowed {
            (empty("No job has failed for good.", "One that used up its attempts comes here, with its error, until it is retried or deleted.", ""))
        } @else {
            @if !rows.is_empty() {
                form.action.bulk method="post" action="/failed/retry" {
                    (hidden(visit, &visit.here))
                    @for (name, value) in which.given().filter(|(name, _)| *name != "cursor") {
                        input type="hidden" name=(name) value=(value);
                    }
                    button { @if is_narrowed { "Retry all that match" } @else { "Retry all" } }
                }
            }
            (jobs_table(visit, &rows, Rows::Failed, &dead))
            (pages("/failed", &which, rows.len(), page.next.map(|id| id.to_string())))
        }
    })
}
