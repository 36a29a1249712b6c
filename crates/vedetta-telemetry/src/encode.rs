//! Spans and numbers as messages of OTLP.

use std::time::SystemTime;

use prost::Message as _;
use vedetta_core::measure::{self, Family, FamilyKind, Sample};
use vedetta_core::trace::{self, Label, SpanKind};

use crate::message::{
    AnyValue, CUMULATIVE, Data, Gauge, Histogram, KeyValue, Metric, Metrics, Much, Number,
    Resource, ResourceMetrics, ResourceSpans, Scope, ScopeMetrics, ScopeSpans, Sizes, Span, Status,
    Sum, Traces, Value,
};

/// Who tells.
pub(crate) struct Teller {
    resource: Resource,
    /// Counters count from here on.
    start: u64,
}

impl Teller {
    pub(crate) fn new(about: &[(String, String)]) -> Self {
        let attributes = about.iter().map(|(key, value)| text(key, value)).collect();
        Self { resource: Resource { attributes }, start: nanos(SystemTime::now()) }
    }

    pub(crate) fn spans(&self, spans: &[trace::Span]) -> Vec<u8> {
        let spans = spans.iter().map(span).collect();
        let scopes = vec![ScopeSpans { scope: Some(scope()), spans }];
        let resource = Some(self.resource.clone());
        Traces { resources: vec![ResourceSpans { resource, scopes }] }.encode_to_vec()
    }

    pub(crate) fn numbers(&self, families: &[Family], now: SystemTime) -> Vec<u8> {
        let time = nanos(now);
        let metrics = families.iter().map(|family| self.metric(family, time)).collect();
        let scopes = vec![ScopeMetrics { scope: Some(scope()), metrics }];
        let resource = Some(self.resource.clone());
        Metrics { resources: vec![ResourceMetrics { resource, scopes }] }.encode_to_vec()
    }

    fn metric(&self, family: &Family, time: u64) -> Metric {
        let start = self.start;
        let points = || family.samples.iter().map(|sample| number(sample, start, time)).collect();
        let data = match family.kind {
            FamilyKind::Gauge => Data::Gauge(Gauge { points: points() }),
            FamilyKind::Counter => {
                Data::Sum(Sum { points: points(), temporality: CUMULATIVE, is_monotonic: true })
            }
            FamilyKind::Histogram => {
                let points = family.samples.iter().map(|sample| sizes(sample, start, time));
                Data::Histogram(Histogram { points: points.collect(), temporality: CUMULATIVE })
            }
        };
        let unit = if family.name.contains("_seconds") {
            "s"
        } else if family.name.contains("_bytes") {
            "By"
        } else {
            ""
        };
        Metric {
            name: family.name.to_owned(),
            description: family.help.to_owned(),
            unit: unit.to_owned(),
            data: Some(data),
        }
    }
}

fn scope() -> Scope {
    Scope { name: "vedetta".into(), version: env!("CARGO_PKG_VERSION").into() }
}

/// Nanoseconds since 1970.
fn nanos(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn text(key: &str, value: &str) -> KeyValue {
    let value = AnyValue { value: Some(Value::Text(value.to_owned())) };
    KeyValue { key: key.to_owned(), value: Some(value) }
}

fn span(span: &trace::Span) -> Span {
    let label = |(key, label): &(&str, Label)| {
        let value = match label {
            Label::Text(text) => Value::Text(text.clone()),
            Label::Number(number) => Value::Number(*number),
            Label::Flag(flag) => Value::Flag(*flag),
        };
        KeyValue { key: (*key).to_owned(), value: Some(AnyValue { value: Some(value) }) }
    };
    let start = nanos(span.began);
    let took = u64::try_from(span.took.as_nanos()).unwrap_or(u64::MAX);
    let failed = span.failed.map(|why| text("error.type", why));
    Span {
        trace_id: span.place.id().to_be_bytes().into(),
        own_id: span.place.span().to_be_bytes().into(),
        parent_id: span.parent.map_or_else(Vec::new, |parent| parent.to_be_bytes().into()),
        name: span.name.clone(),
        kind: match span.kind {
            SpanKind::Internal => 1,
            SpanKind::Producer => 4,
            SpanKind::Consumer => 5,
        },
        start,
        end: start.saturating_add(took),
        attributes: span.labels.iter().map(label).chain(failed).collect(),
        status: span.failed.map(|why| Status { message: why.to_owned(), code: 2 }),
        flags: u32::from(span.place.is_sampled()),
    }
}

fn labels(sample: &Sample) -> Vec<KeyValue> {
    sample.labels.iter().map(|(key, value)| text(key, value)).collect()
}

fn number(sample: &Sample, start: u64, time: u64) -> Number {
    let value = match sample.value {
        measure::Value::Whole(number) => Much::Whole(i64::try_from(number).unwrap_or(i64::MAX)),
        measure::Value::Real(number) | measure::Value::Sizes { sum: number, .. } => {
            Much::Real(number)
        }
    };
    Number { attributes: labels(sample), start, time, value: Some(value) }
}

fn sizes(sample: &Sample, start: u64, time: u64) -> Sizes {
    let (bounds, cumulative, sum) = match &sample.value {
        measure::Value::Sizes { bounds, counts, sum } => (bounds.clone(), counts.clone(), *sum),
        _ => (Vec::new(), vec![0], 0.0),
    };
    let before = std::iter::once(0).chain(cumulative.iter().copied());
    let counts = cumulative.iter().zip(before).map(|(count, before)| count - before).collect();
    let count = cumulative.last().copied().unwrap_or(0);
    Sizes { attributes: labels(sample), start, time, count, sum: Some(sum), counts, bounds }
}
