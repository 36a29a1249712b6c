//! How much, how fast and how long, over time.

use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};

use super::parts::{self, Range, chart, counts, empty, series_table, times};
use super::{Tab, Visit};
use crate::api::Context;
use crate::error::ApiError;
use crate::input::Query;
use crate::stats::Span;

/// The ranges to choose from.
const RANGES: [Range; 4] = [
    ("15m", "15 minutes", 900, 90),
    ("1h", "hour", 3600, 300),
    ("6h", "6 hours", 21_600, 1800),
    ("24h", "24 hours", 86_400, 7200),
];

pub(super) async fn page(State(context): State<Context>, visit: Visit, query: Query) -> Response {
    let body = body(&context, query).await;
    visit.show(Tab::Insights, "Insights", body)
}

async fn body(context: &Context, mut query: Query) -> Result<Markup, ApiError> {
    query.bytes("said");
    let range = query.text("range")?.unwrap_or_else(|| "1h".into());
    let queue = query.text("queue")?.filter(|queue| !queue.is_empty());
    query.end()?;
    let range = RANGES
        .into_iter()
        .find(|(word, ..)| *word == range)
        .ok_or_else(|| ApiError::invalid("range is one of 15m, 1h, 6h and 24h"))?;
    let (chosen, name, seconds, step) = range;
    let Some(observed) = &context.live.observed else {
        return Ok(empty("This server keeps no jobs.", "So there is nothing to measure.", ""));
    };
    let queues = super::jobs::queues(context).await;
    let read = observed.read(Span { range: seconds, step }, queue.as_deref());
    let only = queue.as_deref();
    let table = |label: &str, columns: &[(&str, Vec<String>)]| {
        series_table(label, read.from, read.step_ms, columns)
    };
    let points = &read.all;
    let deepest = points.ready.iter().max().copied().unwrap_or(0);
    let depths: Vec<(&str, Vec<String>)> = read
        .queues
        .iter()
        .take(8)
        .map(|(name, points)| (name.as_str(), counts(&points.ready)))
        .collect();
    let oldest: Vec<Option<u64>> = points.oldest_ms.iter().map(|ms| Some(u64::from(*ms))).collect();
    let longest = times(&[oldest.iter().flatten().max().copied()]).concat();
    Ok(html! {
        nav.ranges aria-label="Range" {
            @for (word, name, ..) in RANGES {
                a href=(format!("/insights?range={word}{}", only.map(|queue| format!("&queue={}", parts::part(queue))).unwrap_or_default())) aria-current=[(word == chosen).then_some("true")] { "Last " (name) }
            }
        }
        form.filters method="get" action="/insights" aria-label="Choose a queue" {
            input type="hidden" name="range" value=(chosen);
            label for="by-queue" { "Queue"
                select #by-queue name="queue" {
                    option value="" { "all" }
                    @for queue in &queues { option value=(queue) selected[only == Some(queue)] { (queue) } }
                }
            }
            button { "Show" }
        }
        div.charts {
            (chart("Throughput", "throughput", range, only, &parts::throughput(points, name, observed.age(), seconds), &table("Throughput", &[("Done", counts(&points.done)), ("Failed", counts(&points.failed))])))
            (chart("How long jobs ran", "run", range, only, &middle(&points.run_p50_ms, &points.run_p95_ms, "ran"), &table("How long jobs ran", &[("Half within", times(&points.run_p50_ms)), ("95 % within", times(&points.run_p95_ms))])))
            (chart("How long jobs waited", "wait", range, only, &middle(&points.wait_p50_ms, &points.wait_p95_ms, "waited"), &table("How long jobs waited", &[("Half within", times(&points.wait_p50_ms)), ("95 % within", times(&points.wait_p95_ms))])))
            (chart("How many were ready", "depth", range, only, &format!("{} at most", parts::number(deepest.into())), &table("How many were ready", &depths)))
            (chart("Age of the oldest that was ready", "oldest", range, only, &format!("{longest} at most"), &table("Age of the oldest that was ready", &[("Oldest", times(&oldest))])))
        }
        p.muted { "What was counted since this server started. How long jobs waited is told of up to 20 at a look; durations are exact to a factor of two." }
    })
}

/// The last steps with something in them, in a sentence.
fn middle(half: &[Option<u64>], most: &[Option<u64>], verb: &str) -> String {
    let last = |values: &[Option<u64>]| values.iter().rev().flatten().next().copied();
    match (last(half), last(most)) {
        (Some(half), Some(most)) => {
            let text = times(&[Some(half), Some(most)]);
            format!("lately half {verb} up to {}, 95 % up to {}", text[0], text[1])
        }
        _ => format!("nothing {verb} in this time"),
    }
}
