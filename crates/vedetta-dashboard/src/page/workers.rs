//! Who works.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use maud::{Markup, html};

use super::parts::{self, empty, number, part, span};
use super::{Tab, Visit};
use crate::api::Context;
use crate::error::ApiError;
use crate::input::Query;
use crate::live::WorkerRow;

pub(super) async fn page(State(context): State<Context>, visit: Visit, query: Query) -> Response {
    let body = body(&context, query).await;
    visit.show(Tab::Workers, "Workers", body)
}

async fn body(context: &Context, mut query: Query) -> Result<Markup, ApiError> {
    query.bytes("said");
    query.end()?;
    let workers = context.live.workers().await.map_err(|why| {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", why).hint("try again")
    })?;
    if workers.is_empty() {
        return Ok(empty(
            "Nobody has taken a job from this server in the last minute.",
            "Declare a command in vedetta.toml and start vedetta up again, or take jobs over HTTP:",
            "[handler.hello]\nrun = [\"./hello.sh\"]",
        ));
    }
    let heads = [
        ("Worker", false),
        ("Queue", false),
        ("State", false),
        ("Jobs", true),
        ("Slots", true),
        ("Last heard of", true),
        ("Process", false),
        ("Supervisor", false),
    ];
    let body = html! { tbody #workers { @for worker in &workers { (row(Some(worker))) } } };
    Ok(html! {
        @if context.live.crew.is_none() { p.muted { "Who took jobs from this server in the last minute." } }
        (parts::table("Workers", &heads, &body))
        template #worker-row { (row(None)) }
    })
}

fn row(worker: Option<&WorkerRow>) -> Markup {
    let text = |of: fn(&WorkerRow) -> Option<&str>| worker.and_then(of).unwrap_or_default();
    let silent = worker.map(|worker| span(Duration::from_millis(worker.silent_ms)));
    let process =
        worker.and_then(|worker| Some(format!("{} on {}", worker.pid?, worker.host.as_deref()?)));
    html! {
        tr data-worker=(text(|worker| Some(&worker.id))) {
            td.name data-f="id" { (text(|worker| Some(&worker.id))) }
            td.name { a data-f="queue" data-b="queue" href=(format!("/jobs?queue={}", part(text(|worker| Some(&worker.queue))))) { (text(|worker| Some(&worker.queue))) } }
            td { span.badge data-f="status" data-b="plain" data-s=(text(|worker| Some(&worker.status))) { (text(|worker| Some(&worker.status))) } }
            td.number data-f="jobs" data-b="number" { (worker.map(|worker| number(worker.jobs)).unwrap_or_default()) }
            td.number data-f="capacity" data-b="number" { (worker.and_then(|worker| worker.capacity).map(|slots| number(slots.into())).unwrap_or_default()) }
            td.number data-f="silent_ms" data-b="ms" { (silent.unwrap_or_default()) }
            td { (process.unwrap_or_default()) }
            td data-f="supervisor" { (text(|worker| worker.supervisor.as_deref())) }
        }
    }
}
