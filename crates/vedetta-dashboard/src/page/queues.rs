//! Queues: how much is in them, and whether they take and give.

use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};
use vedetta_jobs::Mode;
use vedetta_jobs::wire::QueueInfo;

use super::parts::{self, action, empty, number, part, span};
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
    if queues.is_empty() {
        return Ok(none());
    }
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
    let body = html! { tbody { @for queue in &queues { (row(visit, &visit.here, queue, true)) } } };
    Ok(html! {
        (parts::table("Queues", &heads, &body))
        p.muted { "A paused queue hands nothing out; one that is drained takes nothing new on and works off what waits. What runs goes on." }
    })
}

/// A row, with all that is known and can be done or the first of it.
pub(super) fn row(visit: &Visit, back: &str, queue: &QueueInfo, whole: bool) -> Markup {
    let oldest = queue.oldest_ms.map_or("–".into(), |ms| span(Duration::from_millis(ms)));
    let mode = word(queue.mode);
    let to = |what: &str| format!("/queues/{}/{what}", part(&queue.name));
    let what = format!("queue {}", queue.name);
    html! {
        tr data-queue=(queue.name) {
            td.name { a href=(format!("/jobs?queue={}", part(&queue.name))) { (queue.name) } }
            td { span.badge data-f="mode" data-b="status" data-s=(mode) { (mode) } }
            td.number data-f="ready" data-b="number" { (number(queue.ready)) }
            td.number data-f="oldest_ms" data-b="ms" { (oldest) }
            td.number data-f="running" data-b="number" { (number(queue.running)) }
            td.number data-f="done_per_minute" data-b="number" { (number(queue.done_per_minute)) }
            @if whole {
                td.number data-f="failed_per_minute" data-b="number" { (number(queue.failed_per_minute)) }
                td.number { span data-f="slots" data-b="number" { (number(queue.slots)) } " of " span data-f="capacity" data-b="number" { (number(queue.capacity)) } }
                td.number data-f="scheduled" data-b="number" { (number(queue.scheduled)) }
                td.number { a href=(format!("/failed?queue={}", part(&queue.name))) data-f="dead" data-b="number" { (number(queue.dead)) } }
                td.actions {
                    div data-when="open" hidden[queue.mode != Mode::Open] {
                        (action(visit, back, &to("pause"), "Pause", &what))
                        (action(visit, back, &to("drain"), "Drain", &what))
                    }
                    div data-when="paused draining" hidden[queue.mode == Mode::Open] { (action(visit, back, &to("resume"), "Resume", &what)) }
                }
            }
        }
    }
}
