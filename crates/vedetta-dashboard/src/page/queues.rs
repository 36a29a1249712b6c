//! Queues: how much is in them, and whether they take and give.

use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};
use vedetta_jobs::Mode;
use vedetta_jobs::wire::QueueInfo;

use super::parts::{self, ID, action, empty, number, part, span};
use super::{Tab, Visit};
use crate::api::Context;
use crate::error::ApiError;
use crate::input::Query;

pub(super) fn word(mode: Mode) -> &'static str {
    match mode {
        Mode::Open => "open",
        Mode::Paused => "paused",
        Mode::Draining => "draining",
    }
}

pub(super) fn none() -> Markup {
    empty(
        "No queues yet.",
        "A queue is there once a job was asked for in it:",
        "vedetta job add hello --queue greetings",
    )
}

pub(super) async fn page(State(context): State<Context>, visit: Visit, query: Query) -> Response {
    let body = body(&context, &visit, query).await;
    visit.show(Tab::Queues, "Queues", body)
}

async fn body(context: &Context, visit: &Visit, mut query: Query) -> Result<Markup, ApiError> {
    query.bytes("said");
    query.end()?;
    let queues = context.live.queues().await?;
    let heads = [
        ("Queue", false),
        ("State", false),
        ("Ready", true),
        ("Oldest", true),
        ("Running", true),
        ("Done/min", true),
        ("Failed/min", true),
        ("Slots", true),
        ("Scheduled", true),
        ("Dead", true),
        ("", false),
    ];
    let body = html! { tbody #queue-rows { @for queue in &queues { (row(visit, &visit.here, Some(queue), true)) } } };
    // What is not there yet may come while somebody looks.
    Ok(html! {
        @if queues.is_empty() { div data-until="queue" { (none()) } }
        div #queue-there hidden[queues.is_empty()] {
            (parts::table("Queues", &heads, &body))
            p.muted { "A paused queue hands nothing out; one that is drained takes nothing new on and works off what waits. What runs goes on." }
        }
        template #queue-row { (row(visit, &visit.here, None, true)) }
    })
}

/// A row, with all that is known and can be done or the first of it; without a queue, the one that scripts fill.
pub(super) fn row(visit: &Visit, back: &str, queue: Option<&QueueInfo>, whole: bool) -> Markup {
    let count = |of: fn(&QueueInfo) -> u64| queue.map_or(String::new(), |queue| number(of(queue)));
    let oldest = queue.and_then(|queue| queue.oldest_ms);
    let oldest = oldest.map_or("–".into(), |ms| span(Duration::from_millis(ms)));
    let name = queue.map_or("", |queue| queue.name.as_str());
    let id = queue.map_or(ID, |queue| queue.name.as_str());
    let mode = queue.map(|queue| queue.mode);
    let shown = mode.map_or("", word);
    let to = |what: &str| format!("/queues/{}/{what}", part(id));
    let what = format!("queue {id}");
    html! {
        tr data-queue=(name) {
            td.name { a data-f="name" href=(format!("/jobs?queue={}", part(id))) { (name) } }
            td { span.badge data-f="mode" data-b="status" data-s=(shown) { (shown) } }
            td.number data-f="ready" data-b="number" { (count(|queue| queue.ready)) }
            td.number data-f="oldest_ms" data-b="ms" { (oldest) }
            td.number data-f="running" data-b="number" { (count(|queue| queue.running)) }
            td.number data-f="done_per_minute" data-b="number" { (count(|queue| queue.done_per_minute)) }
            @if whole {
                td.number data-f="failed_per_minute" data-b="number" { (count(|queue| queue.failed_per_minute)) }
                td.number {
                    span data-f="slots" data-b="number" { (count(|queue| queue.slots)) } " of "
                    span data-f="capacity" data-b="number" { (count(|queue| queue.capacity)) }
                }
                td.number data-f="scheduled" data-b="number" { (count(|queue| queue.scheduled)) }
                td.number { a href=(format!("/failed?queue={}", part(id))) data-f="dead" data-b="number" { (count(|queue| queue.dead)) } }
                td.actions {
                    div data-when="open" hidden[mode != Some(Mode::Open)] {
                        (action(visit, back, &to("pause"), "Pause", &what))
                        (action(visit, back, &to("drain"), "Drain", &what))
                    }
                    div data-when="paused draining" hidden[matches!(mode, None | Some(Mode::Open))] { (action(visit, back, &to("resume"), "Resume", &what)) }
                }
            }
        }
    }
}
