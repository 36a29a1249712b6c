//! Is all well? What changed? Where to look?

use std::time::SystemTime;

use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};
use vedetta_jobs::wire::QueueInfo;
use vedetta_jobs::{Filter, Ledger as _, Mode};

use super::parts::{self, Range, ago, badge, counts, number, series_table, size, span, tile};
use super::{Tab, Visit, queues};
use crate::api::Context;
use crate::error::ApiError;
use crate::input::Query;
use crate::live::{JobRow, JobsNow, Overview};
use crate::stats::Span;

/// Jobs of which the latest news are shown.
const NEWS: u32 = 12;
/// The ranges of the chart.
const RANGES: [Range; 3] =
    [("5m", "5 minutes", 300, 30), ("1h", "hour", 3600, 300), ("24h", "24 hours", 86_400, 7200)];

pub(super) async fn page(State(context): State<Context>, visit: Visit, query: Query) -> Response {
    let body = body(&context, &visit, query).await;
    visit.show(Tab::Overview, "Overview", body)
}

async fn body(context: &Context, visit: &Visit, mut query: Query) -> Result<Markup, ApiError> {
    query.bytes("said");
    let range = query.text("range")?.unwrap_or_else(|| "1h".into());
    query.end()?;
    let range = RANGES.into_iter().find(|(word, ..)| *word == range);
    let range = range.ok_or_else(|| ApiError::invalid("range is one of 5m, 1h and 24h"))?;
    let live = &context.live;
    // Where the jobs are may be away: the rest is shown all the same.
    let (queues, trouble) = match live.queues().await {
        Ok(queues) => (queues, None),
        Err(error) => (Vec::new(), Some(vedetta_core::explain(&error))),
    };
    let known = trouble.is_none().then_some(&queues[..]);
    let now = Overview::new(&context.store, live, known);
    let mut news = Vec::new();
    if let Some(observed) = &live.observed
        && trouble.is_none()
    {
        news = observed.list(&Filter::default(), None, NEWS).await?.jobs;
    }
    news.sort_by_key(|job| std::cmp::Reverse(job.updated_at));
    let news: Vec<JobRow> = news.into_iter().map(Into::into).collect();
    Ok(html! {
        @if let Some(trouble) = &trouble {
            p.alert role="alert" { "The jobs cannot be read now: " (trouble) }
        }
        @for queue in queues.iter().filter(|queue| queue.mode != Mode::Open) {
            p.alert { "The queue " a href="/queues" { (queue.name) } " is " (queues::word(queue.mode)) "." }
        }
        (tiles(now.jobs.as_ref()))
        (throughput(context, &queues, range))
        div.halves {
            section.panel aria-labelledby="queues-head" {
                h2 #queues-head { a href="/queues" { "Queues" } }
                (few(visit, &queues))
            }
            section.panel aria-labelledby="news-head" {
                h2 #news-head { a href="/jobs" { "What just happened" } }
                @if news.is_empty() {
                    p.muted data-until="news" { "Nothing yet. Ask for a job:" }
                    pre data-until="news" tabindex="0" { "vedetta job add hello --payload '{\"to\": \"you\"}'" }
                }
                ol #news .news { @for job in &news { (line(Some(job))) } }
                template #news-row { (line(None)) }
            }
        }
        section aria-labelledby="store-head" {
            h2 #store-head { a href="/kv" { "Store" } }
            (store(&now))
        }
    })
}

fn tiles(jobs: Option<&JobsNow>) -> Markup {
    let shown = |of: fn(&JobsNow) -> u64| jobs.map_or("–".into(), |jobs| number(of(jobs)));
    let running = html! {
        " in " span data-stat="jobs.slots" data-b="number" { (shown(|jobs| jobs.slots)) }
        " of " span data-stat="jobs.capacity" data-b="number" { (shown(|jobs| jobs.capacity)) } " slots"
    };
    let has_failed = jobs.is_some_and(|jobs| jobs.dead > 0);
    let failed = has_failed.then(|| html! { " " a href="/failed" { "see why" } });
    let oldest = jobs.and_then(|jobs| jobs.oldest_ms);
    let oldest = oldest.map_or("–".into(), |ms| span(std::time::Duration::from_millis(ms)));
    html! {
        dl.tiles {
            (tile("Ready", "jobs.ready", "number", &shown(|jobs| jobs.ready), None))
            (tile("Running", "jobs.running", "number", &shown(|jobs| jobs.running), Some(running)))
            (tile("Scheduled", "jobs.scheduled", "number", &shown(|jobs| jobs.scheduled), None))
            (tile("Done a minute", "jobs.done_per_minute", "number", &shown(|jobs| jobs.done_per_minute), None))
            (tile("Failed a minute", "jobs.failed_per_minute", "number", &shown(|jobs| jobs.failed_per_minute), None))
            (tile("Dead", "jobs.dead", "number", &shown(|jobs| jobs.dead), failed))
            (tile("Oldest ready", "jobs.oldest_ms", "ms", &oldest, None))
            (tile("Workers", "jobs.workers", "number", &shown(|jobs| jobs.workers as u64), None))
        }
    }
}

/// The numbers of the store.
pub(super) fn store(now: &Overview) -> Markup {
    html! {
        dl.tiles.small {
            (tile("Revision", "revision", "number", &number(now.revision), None))
            (tile("Oldest kept", "oldest", "number", &number(now.oldest), None))
            (tile("Keys", "keys", "number", &number(now.keys as u64), None))
            (tile("Leases", "leases", "number", &number(now.leases as u64), None))
            (tile("Watches", "watchers", "number", &number(now.watchers as u64), None))
            (tile("Size", "size", "size", &size(now.size), None))
        }
    }
}

fn throughput(context: &Context, queues: &[QueueInfo], range: Range) -> Markup {
    let (word, name, seconds, step) = range;
    let Some(observed) = &context.live.observed else { return html! {} };
    if queues.is_empty() {
        return html! {};
    }
    let read = observed.read(Span { range: seconds, step }, None);
    let table = series_table(
        "Throughput",
        read.from,
        read.step_ms,
        &[("Done", counts(&read.all.done)), ("Failed", counts(&read.all.failed))],
    );
    let summary = parts::throughput(&read.all, name, observed.age(), seconds);
    html! {
        (parts::chart("Throughput", "throughput", range, None, &summary, &table))
        nav.ranges aria-label="Range" {
            @for (each, name, ..) in RANGES {
                a href=(format!("/?range={each}")) aria-current=[(each == word).then_some("true")] { "Last " (name) }
            }
        }
    }
}

fn few(visit: &Visit, queues: &[QueueInfo]) -> Markup {
    const SHOWN: usize = 8;
    let mut busy: Vec<&QueueInfo> = queues.iter().collect();
    busy.sort_by_key(|queue| std::cmp::Reverse(queue.ready + queue.running));
    let heads = [
        ("Queue", false),
        ("State", false),
        ("Ready", true),
        ("Oldest", true),
        ("Running", true),
        ("Done/min", true),
    ];
    let body = html! {
        tbody #queue-rows data-most=(SHOWN) {
            @for queue in busy.into_iter().take(SHOWN) { (queues::row(visit, &visit.here, Some(queue), false)) }
        }
    };
    html! {
        @if queues.is_empty() { div data-until="queue" { (queues::none()) } }
        div #queue-there hidden[queues.is_empty()] { (parts::table("Queues", &heads, &body)) }
        template #queue-row { (queues::row(visit, &visit.here, None, false)) }
        @if queues.len() > SHOWN { p.muted { a href="/queues" { "All " (queues.len()) " queues" } } }
    }
}

/// A line of the news; without a job, the one that scripts fill.
fn line(job: Option<&JobRow>) -> Markup {
    let now = SystemTime::now();
    let id = job.map(|job| job.id.to_string()).unwrap_or_default();
    html! {
        li data-job=(id) data-status=(job.map_or("", |job| job.status)) {
            (ago("updated_at", job.map(|job| job.updated_at), now))
            a data-f="id" data-b="job" href=(format!("/jobs/{id}")) { (id) }
            span.name data-f="kind" { (job.map_or("", |job| job.kind.as_str())) }
            (badge(job.map_or("", |job| job.look(now))))
        }
    }
}
