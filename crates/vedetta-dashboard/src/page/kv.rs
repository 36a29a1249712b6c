//! The store: its numbers, its keys, and its latest changes.

use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};
use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{Cause, Change, Event, Range, WatchOptions};

use super::parts::{self, part, visible};
use super::{Tab, Visit, overview};
use crate::api::Context;
use crate::error::ApiError;
use crate::input::Query;
use crate::kv::Cursor;
use crate::live::Overview;

/// Keys on a page, and changes that are shown.
const KEYS: usize = 50;
const CHANGES: usize = 50;
/// Characters of a value.
const VALUE: usize = 200;

pub(super) async fn page(State(context): State<Context>, visit: Visit, query: Query) -> Response {
    let body = body(&context, query).await;
    visit.show(Tab::Kv, "Store", body)
}

/// Bytes for people: cut short, and as base64 if they are no text.
fn shown(bytes: &[u8]) -> String {
    use base64::Engine as _;
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => format!(
            "base64 {}",
            base64::prelude::BASE64_STANDARD.encode(&bytes[..bytes.len().min(VALUE)])
        ),
    };
    match text.char_indices().nth(VALUE) {
        None => visible(&text),
        Some((end, _)) => visible(&format!("{}…", &text[..end])),
    }
}

async fn body(context: &Context, mut query: Query) -> Result<Markup, ApiError> {
    query.bytes("said");
    let prefix = query.bytes("prefix").unwrap_or_default();
    let cursor = query.text("cursor")?;
    query.end()?;
    let all = KeyRange::prefix(prefix.clone());
    let mut range = Range::new(all.clone());
    if let Some(text) = cursor {
        let wrong = || ApiError::invalid("the cursor is not one of this list");
        let cursor = Cursor::decode(&text).ok_or_else(wrong)?;
        range.range = cursor.rest(all).ok_or_else(wrong)?;
        range.at = Some(cursor.revision);
    }
    range.limit = Some(KEYS);
    range.uncounted = true;
    let at = range.at;
    let found = context.store.range(range).await?;
    let revision = at.unwrap_or(found.revision);
    let last = found.keys.last().filter(|_| found.more);
    let next = last.map(|last| Cursor::encode(revision, last.key()));
    let now = Overview::new(&context.store, &context.live, None);
    let changes = changes(context).await;
    let typed = String::from_utf8_lossy(&prefix);
    let heads =
        [("Key", false), ("Value", false), ("Modified", true), ("Version", true), ("Lease", false)];
    let rows = html! {
        tbody {
            @for key in &found.keys {
                tr {
                    td.key { (shown(key.key())) }
                    td.value { (shown(key.value())) }
                    td.number { (key.modified().0) }
                    td.number { (key.version()) }
                    td { (key.lease().map(|lease| lease.to_string()).unwrap_or_default()) }
                }
            }
        }
    };
    Ok(html! {
        (overview::store(&now))
        section aria-labelledby="keys-head" {
            h2 #keys-head { "Keys" }
            form.filters method="get" action="/kv" role="search" aria-label="Narrow the list" {
                label for="by-prefix" { "Prefix" input #by-prefix name="prefix" value=(typed); }
                button { "Show" }
                @if !prefix.is_empty() { a.reset href="/kv" { "Show all" } }
            }
            @if found.keys.is_empty() && prefix.is_empty() {
                (parts::empty("The store is empty.", "Put something in it:", "vedetta kv put hello world"))
            } @else if found.keys.is_empty() {
                p.muted { "No key begins so." }
            } @else {
                (parts::table("Keys in their order", &heads, &rows))
                nav.pages aria-label="Pages of the list" {
                    span.muted { (found.keys.len()) " shown, of revision " (revision.0) }
                    @if let Some(next) = next { a href=(format!("/kv?prefix={}&cursor={}", part(&typed), part(&next))) { "Next ›" } }
                }
            }
        }
        section aria-labelledby="changes-head" {
            h2 #changes-head { "Latest changes" }
            (parts::table("Latest changes", &[("Revision", true), ("What", false), ("Key", false), ("Value", false)], &html! {
                tbody #changes data-most=(CHANGES) { @for event in changes.iter().rev() { (change(Some(event))) } }
            }))
            @if changes.is_empty() { p.muted data-until="changes" { "Nothing has changed lately." } }
            template #change-row { (change(None)) }
        }
    })
}

/// What changed last, as far as history goes back and it is read in time.
async fn changes(context: &Context) -> Vec<Event> {
    let status = context.store.status();
    let from = status.revision.0.saturating_sub(CHANGES as u64 - 1).max(status.compacted.0).max(1);
    let mut events: Vec<Event> = Vec::new();
    let options = WatchOptions { from: Some(Revision(from)), ..WatchOptions::default() };
    let Ok(mut watcher) = context.store.watch(KeyRange::prefix(""), options) else { return events };
    let read = async {
        while watcher.progress() < status.revision {
            let Ok(batch) = watcher.next().await else { return };
            events.extend(batch.iter().cloned());
        }
    };
    let _ = tokio::time::timeout(Duration::from_millis(200), read).await;
    let extra = events.len().saturating_sub(CHANGES);
    events.split_off(extra)
}

fn change(event: Option<&Event>) -> Markup {
    let (kind, key, value) = match event.map(|event| &event.change) {
        Some(Change::Put(now)) => ("put", shown(now.key()), shown(now.value())),
        Some(Change::Delete { key, cause: Cause::Asked }) => ("delete", shown(key), String::new()),
        Some(Change::Delete { key, .. }) => ("expire", shown(key), String::new()),
        None => ("", String::new(), String::new()),
    };
    html! {
        tr {
            td.number data-f="revision" { (event.map(|event| event.revision.to_string()).unwrap_or_default()) }
            td { span.badge data-f="type" data-b="plain" data-s=(kind) { (kind) } }
            td.key data-f="key" { (key) }
            td.value data-f="value" { (value) }
        }
    }
}
