//! Who works, and who keeps them.

use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};
use vedetta_fleet::Fleet;
use vedetta_fleet::wire::{ReportInfo, SupervisorInfo};

use super::parts::{self, ID, action, careful, empty, hidden, number, part, span, visible};
use super::{Tab, Visit};
use crate::api::Context;
use crate::error::ApiError;
use crate::input::Query;
use crate::live::WorkerRow;
use crate::redact;

pub(super) async fn page(State(context): State<Context>, visit: Visit, query: Query) -> Response {
    let body = body(&context, &visit, query);
    visit.show(Tab::Workers, "Workers", body)
}

fn body(context: &Context, visit: &Visit, mut query: Query) -> Result<Markup, ApiError> {
    query.bytes("said");
    query.end()?;
    let workers = context.live.workers();
    let supervisors = context.fleet.as_ref().map(Fleet::supervisors).unwrap_or_default();
    let supervisors: Vec<_> = supervisors.into_iter().map(redact::supervisor).collect();
    // What is not there yet may come while somebody looks.
    Ok(html! {
        @if workers.is_empty() { div data-until="workers" { (none()) } }
        div #workers-there hidden[workers.is_empty()] { (table(visit, &workers)) }
        (kept(visit, &supervisors))
    })
}

fn none() -> Markup {
    empty(
        "Nobody works here.",
        "Declare a command in vedetta.toml and start vedetta up again, or take jobs over HTTP:",
        "[handler.hello]\nrun = [\"./hello.sh\"]",
    )
}

fn table(visit: &Visit, workers: &[WorkerRow]) -> Markup {
    let heads = [
        ("Worker", false),
        ("Queue", false),
        ("State", false),
        ("Jobs", true),
        ("Slots", true),
        ("Last heard of", true),
        ("Process", false),
        ("Supervisor", false),
        ("", false),
    ];
    let body = html! {
        tbody #workers { @for worker in workers { (row(visit, Some(worker))) } }
    };
    html! {
        (parts::table("Workers", &heads, &body))
        template #worker-row { (row(visit, None)) }
    }
}

/// Those who keep workers, and what they can be asked for.
fn kept(visit: &Visit, supervisors: &[SupervisorInfo]) -> Markup {
    let heads = [
        ("Supervisor", false),
        ("State", false),
        ("Queues", false),
        ("Balance", false),
        ("Wanted", true),
        ("Of", true),
        ("Last failure", false),
    ];
    let reports = || supervisors.iter().filter_map(|one| one.report.as_ref());
    let mut queues: Vec<&str> =
        reports().flat_map(|report| &report.queues).map(String::as_str).collect();
    queues.sort_unstable();
    queues.dedup();
    let body = html! { tbody #supervisors { @for one in supervisors { (supervisor(Some(one))) } } };
    html! {
        section #kept aria-labelledby="kept-head" hidden[supervisors.is_empty()] {
            h2 #kept-head { "Supervisors" }
            (parts::table("Supervisors", &heads, &body))
            template #supervisor-row { (supervisor(None)) }
            form.start.action method="post" action="/workers/start" {
                (hidden(visit, &visit.here))
                label { "Queue " select #start-queue name="queue" { @for queue in &queues { option { (queue) } } } }
                label { "Workers " input name="count" type="number" min="1" max="100" value="1" required; }
                button { "Start" }
            }
            div.actions {
                (action(visit, &visit.here, "/workers/restart", "Restart", "all workers, one after the other"))
                (careful(visit, &visit.here, "/workers/terminate", "Terminate", "all workers"))
            }
        }
    }
}

/// A supervisor; without one, the row that scripts fill.
fn supervisor(one: Option<&SupervisorInfo>) -> Markup {
    let report = one.and_then(|one| one.report.as_ref());
    let of = |what: fn(&ReportInfo) -> String| report.map(what).unwrap_or_default();
    let state = match (one, report) {
        (_, Some(report)) => report.state.word(),
        (Some(one), None) if one.halted => "terminated",
        (Some(_), None) => "elsewhere",
        (None, None) => "",
    };
    let failure = report.and_then(|report| {
        let exit = report.last_exit.as_deref()?;
        let said = report.stderr.as_deref().unwrap_or_default();
        Some(format!("{exit}\n{said}"))
    });
    let place = one.map(|one| format!("{} on {}", one.name, one.host)).unwrap_or_default();
    html! {
        tr data-supervisor=(one.map(|one| one.name.as_str()).unwrap_or_default()) {
            td.name data-f="place" { (place) }
            td { span.badge data-f="state" data-b="plain" data-s=(state) { (state) } }
            td.name data-f="queues" { (of(|report| report.queues.join(", "))) }
            td data-f="balance" { (of(|report| report.balance.clone())) }
            td.number data-f="wanted" { (of(|report| report.wanted.to_string())) }
            td.number data-f="bounds" { (of(|report| format!("{} to {}", report.min, report.max))) }
            td { pre.failure tabindex="0" data-f="failure" hidden[failure.is_none()] { (visible(failure.as_deref().unwrap_or_default())) } }
        }
    }
}

fn row(visit: &Visit, worker: Option<&WorkerRow>) -> Markup {
    let text = |of: fn(&WorkerRow) -> Option<&str>| worker.and_then(of).unwrap_or_default();
    let silent = worker.map(|worker| span(Duration::from_millis(worker.silent_ms)));
    let process = worker
        .and_then(|worker| Some((worker.pid.filter(|pid| *pid > 0)?, worker.host.as_deref()?)));
    let process = process.map(|(pid, host)| format!("{pid} on {host}"));
    html! {
        tr data-worker=(text(|worker| Some(&worker.id))) {
            td.name data-f="id" { (text(|worker| Some(&worker.id))) }
            td.name data-f="queue" { (text(|worker| Some(&worker.queue))) }
            td { span.badge data-f="status" data-b="plain" data-s=(text(|worker| Some(worker.status))) { (text(|worker| Some(worker.status))) } }
            td.number data-f="jobs" data-b="number" { (worker.map(|worker| number(worker.jobs)).unwrap_or_default()) }
            td.number data-f="capacity" data-b="number" { (worker.and_then(|worker| worker.capacity).map(|slots| number(slots.into())).unwrap_or_default()) }
            td.number data-f="silent_ms" data-b="ms" { (silent.unwrap_or_default()) }
            td data-f="process" { (process.unwrap_or_default()) }
            td data-f="supervisor" { (text(|worker| worker.supervisor.as_deref())) }
            td.actions {
                div data-beats="yes" hidden[!worker.is_some_and(|worker| worker.beats)] { (steering(visit, worker)) }
            }
        }
    }
}

/// What a worker can be told, as it stands now.
fn steering(visit: &Visit, worker: Option<&WorkerRow>) -> Markup {
    let (id, status) = worker.map_or((ID, ""), |worker| (worker.id.as_str(), worker.status));
    let (back, what) = (&visit.here, format!("worker {id}"));
    let to = |verb: &str| format!("/workers/{}/{verb}", part(id));
    let (runs, is_paused) = (status == "running", status == "paused");
    html! {
        div data-when="running" hidden[!runs] { (action(visit, back, &to("pause"), "Pause", &what)) }
        div data-when="paused" hidden[!is_paused] { (action(visit, back, &to("resume"), "Resume", &what)) }
        div data-when="running paused" hidden[!(runs || is_paused)] { (careful(visit, back, &to("stop"), "Stop", &what)) }
    }
}
