//! What pages are made of. Elements that scripts keep up to date say with `data-f` what they show, and with
//! `data-b` how.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use maud::{Markup, html};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use vedetta_jobs::wire::Which;

use super::Visit;
use crate::error::ApiError;
use crate::live::JobRow;
use crate::stats::Points;

const PART: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.');

/// Text as a part of an address.
pub(super) fn part(text: &str) -> String {
    utf8_percent_encode(text, PART).to_string()
}

/// In rows that scripts fill in, for the id; nothing is called so.
pub(super) const ID: &str = "{id}";

/// What every form has: the proof that it is ours, and where to go back to.
pub(super) fn hidden(visit: &Visit, back: &str) -> Markup {
    html! {
        input type="hidden" name="csrf" value=(visit.csrf);
        input type="hidden" name="back" value=(back);
    }
}

/// A button that does something, alone in its form.
pub(super) fn action(visit: &Visit, back: &str, to: &str, word: &str, what: &str) -> Markup {
    html! {
        form.action method="post" action=(to) {
            (hidden(visit, back))
            button aria-label=(format!("{word} {what}")) { (word) }
        }
    }
}

/// The same in two steps, for what cannot be undone.
pub(super) fn careful(visit: &Visit, back: &str, to: &str, word: &str, what: &str) -> Markup {
    html! {
        details.careful {
            summary aria-label=(format!("{word} {what}, asks first")) { (word) "…" }
            (action(visit, back, to, &format!("Yes, {}", word.to_lowercase()), what))
        }
    }
}

pub(super) fn failure(error: &ApiError) -> Markup {
    html! {
        div.empty {
            p { (error.message()) }
            @if let Some(hint) = error.advice() { p.muted { (hint) } }
            p { a href="/" { "Back to the overview" } }
        }
    }
}

/// Nothing is there yet, and what to do about it.
pub(super) fn empty(what: &str, next: &str, command: &str) -> Markup {
    html! {
        div.empty {
            p { (what) }
            p.muted { (next) }
            @if !command.is_empty() { pre tabindex="0" { (command) } }
        }
    }
}

/// A table that scrolls by itself when it is too wide.
pub(super) fn table(label: &str, heads: &[(&str, bool)], body: &Markup) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label=(format!("Table: {label}")) {
            table {
                thead { tr { @for (head, is_number) in heads {
                    th scope="col" class=[is_number.then_some("number")] {
                        @if head.is_empty() { span.unseen { "actions" } } @else { (head) }
                    }
                } } }
                (body)
            }
        }
    }
}

/// A number with its name.
pub(super) fn tile(name: &str, stat: &str, kind: &str, text: &str, note: Option<Markup>) -> Markup {
    html! {
        div.tile {
            dt { (name) }
            dd { span data-stat=(stat) data-b=(kind) { (text) } @if let Some(note) = note { span.note { (note) } } }
        }
    }
}

/// `12 345`
pub(super) fn number(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            out.push('\u{202f}');
        }
        out.push(digit);
    }
    out
}

pub(super) fn size(bytes: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let (mut tenths, mut unit) = (bytes.saturating_mul(10), 0);
    while tenths >= 10_000 && unit < units.len() - 1 {
        (tenths, unit) = (tenths / 1000, unit + 1);
    }
    if unit == 0 {
        format!("{bytes} B")
    } else {
        format!("{}.{} {}", tenths / 10, tenths % 10, units[unit])
    }
}

/// A length of time, short: `420ms`, `1.2s`, `5m 10s`, `3h 20m`, `2d 3h`.
pub(super) fn span(time: Duration) -> String {
    let (ms, s) = (time.as_millis(), time.as_secs());
    match s {
        0 => format!("{ms}ms"),
        1..60 => format!("{}.{}s", s, ms % 1000 / 100),
        60..3600 => format!("{}m {}s", s / 60, s % 60),
        3600..86_400 => format!("{}h {}m", s / 3600, s % 3600 / 60),
        _ => format!("{}d {}h", s / 86_400, s % 86_400 / 3600),
    }
}

/// How long ago something was, with the exact time for who wants it.
pub(super) fn ago(field: &str, at: Option<SystemTime>, now: SystemTime) -> Markup {
    let exact = at.map(|at| humantime::format_rfc3339_millis(at).to_string());
    let text = at.map_or(String::new(), |at| match now.duration_since(at) {
        Ok(past) if past.as_secs() < 1 => "now".into(),
        Ok(past) => format!("{} ago", coarse(past)),
        Err(ahead) => format!("in {}", coarse(ahead.duration())),
    });
    html! { time data-f=(field) data-b="ago" datetime=[exact.as_deref()] title=[exact.as_deref()] { (text) } }
}

/// The same in its largest unit.
fn coarse(time: Duration) -> String {
    let s = time.as_secs();
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m", s / 60),
        3600..86_400 => format!("{}h", s / 3600),
        _ => format!("{}d", s / 86_400),
    }
}

/// Control characters and those that turn the direction of text are shown, not obeyed.
pub(super) fn visible(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\t' => out.push(c),
            '\u{0}'..'\u{20}'
            | '\u{7f}'..='\u{9f}'
            | '\u{200e}'
            | '\u{200f}'
            | '\u{202a}'..='\u{202e}'
            | '\u{2066}'..='\u{2069}' => drop(write!(out, "\\u{:04x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out
}

pub(super) fn badge(word: &str) -> Markup {
    html! { span.badge data-f="status" data-b="status" data-s=(word) { (word) } }
}

/// What a row of a job shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rows {
    /// Where it stands.
    Jobs,
    /// Why it failed, and what to do.
    Failed,
}

impl Rows {
    pub(super) const fn heads(self) -> &'static [(&'static str, bool)] {
        match self {
            Self::Jobs => &[
                ("Job", true),
                ("Kind", false),
                ("Queue", false),
                ("State", false),
                ("Tries", true),
                ("Progress", false),
                ("Took", true),
                ("Asked for", true),
            ],
            Self::Failed => &[
                ("Job", true),
                ("Kind", false),
                ("Queue", false),
                ("State", false),
                ("Tries", true),
                ("Error", false),
                ("Ended", true),
                ("", false),
            ],
        }
    }
}

/// A row of a job; without one, the row that scripts fill.
pub(super) fn job_row(visit: &Visit, back: &str, job: Option<&JobRow>, rows: Rows) -> Markup {
    let now = SystemTime::now();
    let id = job.map(|job| job.id.to_string()).unwrap_or_default();
    let kind = job.map_or("", |job| job.kind.as_str());
    let queue = job.map_or("", |job| job.queue.as_str());
    let tries = job.map(|job| format!("{}/{}", job.attempts, job.max_attempts)).unwrap_or_default();
    let runs = job.is_some_and(|job| job.status == "running");
    html! {
        tr data-job=(id) {
            td.number { a data-f="id" data-b="job" href=(format!("/jobs/{id}")) { (id) } }
            td.name { a data-f="kind" data-b="kind" href=(format!("/jobs?kind={}", part(kind))) { (kind) } }
            td.name { a data-f="queue" data-b="queue" href=(format!("/jobs?queue={}", part(queue))) { (queue) } }
            td { (badge(job.map_or("", |job| job.look(now)))) }
            td.number data-f="tries" { (tries) }
            @match rows {
                Rows::Jobs => {
                    td.progress {
                        progress data-f="progress" data-b="progress" max="1" value=(job.map_or(0.0, |job| job.progress)) aria-label="Progress" hidden[!runs] {}
                        span.long data-f="note" { (visible(job.and_then(JobRow::note).unwrap_or_default())) }
                    }
                    td.number data-f="took" { (job.and_then(|job| job.took(now)).map(span).unwrap_or_default()) }
                    td.number { (ago("queued_at", job.map(|job| job.queued_at), now)) }
                }
                Rows::Failed => {
                    td.error { span.long data-f="error" { (visible(job.and_then(|job| job.error.as_deref()).unwrap_or_default())) } }
                    td.number { (ago("ended_at", job.and_then(|job| job.ended_at), now)) }
                    td.actions {
                        (action(visit, back, &format!("/jobs/{id}/retry"), "Retry", &format!("job {id}")))
                        (careful(visit, back, &format!("/jobs/{id}/delete"), "Delete", &format!("job {id}")))
                    }
                }
            }
        }
    }
}

impl JobRow {
    /// What it is at, or why it failed.
    fn note(&self) -> Option<&str> {
        let failed = self.error.as_deref().filter(|_| self.status != "done");
        let message = self.message.as_deref();
        if self.status == "running" { message } else { failed.or(message) }
    }

    /// How long its last attempt took so far.
    fn took(&self, now: SystemTime) -> Option<Duration> {
        let end = if self.status == "running" { now } else { self.ended_at? };
        end.duration_since(self.started_at?).ok()
    }
}

/// The fields that a list can be narrowed by.
pub(super) fn filters(which: &Which, to: &str, names: &[&str], queues: &[String]) -> Markup {
    let value =
        |name: &str| which.given().find(|(given, _)| *given == name).map_or("", |(_, value)| value);
    html! {
        form.filters method="get" action=(to) role="search" aria-label="Narrow the list" {
            @for name in names {
                @let id = format!("by-{name}");
                @match *name {
                    "status" => label for=(id) { "State"
                        select id=(id) name="status" {
                            option value="" { "any" }
                            @for word in ["waiting", "running", "done", "dead", "cancelled"] {
                                option value=(word) selected[value("status") == word] { (word) }
                            }
                        }
                    },
                    "q" => label for=(id) { "Text" input id=(id) name="q" value=(value("q")) placeholder="in payload, error, key"; },
                    "queue" => label for=(id) { "Queue" input id=(id) name="queue" value=(value("queue")) list="queues"; },
                    "kind" => label for=(id) { "Kind" input id=(id) name="kind" value=(value("kind")); },
                    _ => label for=(id) { "Tag" input id=(id) name=(name) value=(value(name)); },
                }
            }
            datalist #queues { @for queue in queues { option value=(queue) {} } }
            button { "Show" }
            @if which.given().next().is_some() { a.reset href=(to) { "Show all" } }
        }
    }
}

/// An address with what a list is narrowed by.
pub(super) fn narrowed(to: &str, which: &Which, cursor: Option<&str>) -> String {
    let kept = which.given().filter(|(name, value)| *name != "cursor" && !value.is_empty());
    let pairs = kept.chain(cursor.map(|cursor| ("cursor", cursor)));
    let query: Vec<String> = pairs.map(|(name, value)| format!("{name}={}", part(value))).collect();
    if query.is_empty() { to.to_owned() } else { format!("{to}?{}", query.join("&")) }
}

/// What charts can show: in an address, for people, in seconds, and the steps of their tables.
pub(super) type Range = (&'static str, &'static str, u64, u64);

/// A chart that scripts draw, with the same as a sentence and as a table, which they keep live.
pub(super) fn chart(
    title: &str,
    of: &str,
    range: Range,
    queue: Option<&str>,
    summary: &str,
    table: &Markup,
) -> Markup {
    let (range, name, _, step) = range;
    html! {
        section.panel.chart aria-label=(title) {
            h2 { (title) }
            p.muted { (summary) }
            div.plot data-chart=(of) data-range=(range) data-name=(name) data-step=(step) data-only=[queue] role="img" aria-label=(format!("{title}: {summary}")) {}
            details { summary { "As a table" } (table) }
        }
    }
}

/// Series as a table: a row for each step, a column for each of them.
pub(super) fn series_table(
    label: &str,
    from: u64,
    step_ms: u64,
    columns: &[(&str, Vec<String>)],
) -> Markup {
    let heads: Vec<(&str, bool)> = std::iter::once(("From", false))
        .chain(columns.iter().map(|(name, _)| (*name, true)))
        .collect();
    let steps = columns.first().map_or(0, |(_, values)| values.len());
    let body = html! {
        tbody {
            @for step in 0..steps {
                tr {
                    td { (clock(from + step_ms * step as u64)) }
                    @for (_, values) in columns { td.number { (values[step]) } }
                }
            }
        }
    };
    table(label, &heads, &body)
}

/// The time of day, in UTC.
fn clock(ms: u64) -> String {
    let at = SystemTime::UNIX_EPOCH + Duration::from_millis(ms);
    let text = humantime::format_rfc3339_seconds(at).to_string();
    format!("{} UTC", &text[11..16])
}

pub(super) fn counts(values: &[u32]) -> Vec<String> {
    values.iter().map(|value| number(u64::from(*value))).collect()
}

pub(super) fn times(values: &[Option<u64>]) -> Vec<String> {
    let text = |ms: &Option<u64>| ms.map_or("–".into(), |ms| span(Duration::from_millis(ms)));
    values.iter().map(text).collect()
}

/// What was done and failed, in a sentence; a server of that age knows of nothing before.
pub(super) fn throughput(points: &Points, range: &str, age: Duration, seconds: u64) -> String {
    let sum = |values: &[u32]| values.iter().map(|value| u64::from(*value)).sum::<u64>();
    let (done, failed) = (sum(&points.done), sum(&points.failed));
    let since = if age.as_secs() < seconds {
        format!("since this server started, {} ago", coarse(age))
    } else {
        format!("in the last {range}")
    };
    format!("{} done and {} failed {since}", number(done), number(failed))
}

/// JSON with line breaks, as it was written otherwise: no number is read, so none is changed.
pub(super) fn indented(json: &str) -> String {
    const LONGEST: usize = 64 << 10;
    if json.len() > LONGEST {
        return json.to_owned();
    }
    let (mut out, mut depth, mut in_text, mut escaped) = (String::new(), 0_usize, false, false);
    let line = |out: &mut String, depth: usize| {
        out.push('\n');
        out.extend(std::iter::repeat_n("  ", depth));
    };
    let mut chars = json.chars().peekable();
    while let Some(c) = chars.next() {
        if in_text {
            out.push(c);
            in_text = c != '"' || escaped;
            escaped = c == '\\' && !escaped;
            continue;
        }
        match c {
            '"' => {
                in_text = true;
                out.push(c);
            }
            '{' | '[' => {
                out.push(c);
                while chars.peek().is_some_and(char::is_ascii_whitespace) {
                    chars.next();
                }
                if let Some(end) = chars.next_if(|c| matches!(c, '}' | ']')) {
                    out.push(end);
                } else {
                    depth += 1;
                    line(&mut out, depth);
                }
            }
            '}' | ']' => {
                depth = depth.saturating_sub(1);
                line(&mut out, depth);
                out.push(c);
            }
            ',' => {
                out.push(c);
                line(&mut out, depth);
            }
            ':' => out.push_str(": "),
            c if c.is_ascii_whitespace() => {}
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_gets_lines_and_keeps_its_numbers_and_texts() {
        let json = r#"{"a": [1.50, 12345678901234567890],"b":{},"c": "x, {\"y\": 1}\\"}"#;
        let expected = "{\n  \"a\": [\n    1.50,\n    12345678901234567890\n  ],\n  \"b\": {},\n  \"c\": \"x, {\\\"y\\\": 1}\\\\\"\n}";
        assert_eq!(indented(json), expected);
        assert_eq!(indented("null"), "null");
    }

    #[test]
    fn times_and_sizes_are_short() {
        let spans = [
            (420, "420ms"),
            (1_250, "1.2s"),
            (310_000, "5m 10s"),
            (12_000_000, "3h 20m"),
            (183_600_000, "2d 3h"),
        ];
        for (ms, text) in spans {
            assert_eq!(span(Duration::from_millis(ms)), text);
        }
        assert_eq!(
            (size(999), size(1_500), size(2_345_678)),
            ("999 B".into(), "1.5 kB".into(), "2.3 MB".into())
        );
        assert_eq!(number(1_234_567), "1\u{202f}234\u{202f}567");
    }

    #[test]
    fn a_young_server_says_since_when_it_counts() {
        let points = Points { done: vec![1, 2], failed: vec![1], ..Points::default() };
        let after = |seconds| throughput(&points, "hour", Duration::from_secs(seconds), 3600);
        assert_eq!(after(150), "3 done and 1 failed since this server started, 2m ago");
        assert_eq!(after(3600), "3 done and 1 failed in the last hour");
    }

    #[test]
    fn what_would_turn_text_around_is_shown() {
        assert_eq!(visible("a\u{202e}b\u{7}\nc"), "a\\u202eb\\u0007\nc");
    }
}
