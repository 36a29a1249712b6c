//! What a collector gets, and what happens when there is none.

use std::net::TcpListener;
use std::time::{Duration, Instant, SystemTime};

use testing::collector::{Collector, Data, SpanKind, StatusCode, find, number_data_point};
use vedetta_core::measure::{Family, FamilyKind, Value};
use vedetta_core::trace::{self, Span, Spans as _, Trace};
use vedetta_telemetry::{Exporter, Settings};

const ABOUT: &[(&str, &str)] = &[("service.instance.id", "here")];

fn settings(url: &str, sample: f64) -> Settings {
    Settings::find(Some(url), sample).unwrap().expect("it is on")
}

fn span(number: u64) -> Span {
    Span {
        name: format!("n{number}"),
        kind: trace::SpanKind::Consumer,
        place: Trace::new(7, number, true),
        parent: (number > 1).then_some(number - 1),
        began: SystemTime::now(),
        took: Duration::from_millis(3),
        labels: vec![("queue", "media".into()), ("attempt", 2_u32.into()), ("new", true.into())],
        failed: (number == 2).then_some("timeout"),
    }
}

fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + testing::PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn spans_and_numbers_come_as_they_were_told_and_all_of_them_at_the_end() {
    let collector = Collector::default();
    let exporter = Exporter::start(&settings(&collector.url(), 1.0), ABOUT).unwrap();
    (1..=1000).for_each(|number| exporter.ended(span(number)));
    let mut counter = Family::new("done_total", FamilyKind::Counter, "Done.");
    counter.add(&[("queue", "media")], 5_u64);
    let mut sizes = Family::new("run_seconds", FamilyKind::Histogram, "Ran.");
    let (bounds, counts) = (vec![0.5, 1.0], vec![3, 3, 10]);
    sizes.add(&[], Value::Sizes { bounds, counts, sum: 12.5 });
    let mut gauge = Family::new("cpu_seconds", FamilyKind::Gauge, "Used.");
    gauge.add(&[], 0.25);
    exporter.numbers(vec![counter, sizes, gauge]);
    exporter.close();

    let spans = collector.spans();
    assert_eq!((spans.len(), exporter.dropped()), (1000, 0));
    let second = spans.iter().find(|told| told.span.name == "n2").unwrap();
    assert_eq!(second.span.trace_id, 7_u128.to_be_bytes());
    assert_eq!(second.span.span_id, 2_u64.to_be_bytes());
    assert_eq!(second.span.parent_span_id, 1_u64.to_be_bytes());
    assert_eq!(second.span.kind(), SpanKind::Consumer);
    let took = second.span.end_time_unix_nano - second.span.start_time_unix_nano;
    assert_eq!((took, second.by.as_str()), (3_000_000, "here"));
    let labels = ["queue", "attempt", "new", "error.type"].map(|name| second.label(name).unwrap());
    assert_eq!(labels, ["media", "2", "true", "timeout"]);
    assert_eq!(second.span.status.as_ref().unwrap().code(), StatusCode::Error);
    assert!(spans[0].span.parent_span_id.is_empty() && spans[0].span.status.is_none());

    let metrics = collector.metrics("here").unwrap();
    let names: Vec<_> = metrics.iter().map(|metric| metric.name.as_str()).collect();
    assert_eq!(names, ["done_total", "run_seconds", "cpu_seconds"]);
    let units: Vec<_> = metrics.iter().map(|metric| metric.unit.as_str()).collect();
    assert_eq!(units, ["", "s", "s"]);
    let Some(Data::Sum(sum)) = &metrics[0].data else { panic!("{metrics:?}") };
    assert_eq!(sum.data_points[0].value, Some(number_data_point::Value::AsInt(5)));
    assert_eq!(find(&sum.data_points[0].attributes, "queue").as_deref(), Some("media"));
    let Some(Data::Histogram(sizes)) = &metrics[1].data else { panic!("{metrics:?}") };
    assert_eq!(sizes.data_points[0].bucket_counts, [3, 0, 7]);
    assert_eq!(sizes.data_points[0].explicit_bounds, [0.5, 1.0]);
    assert_eq!((sizes.data_points[0].count, sizes.data_points[0].sum), (10, Some(12.5)));
    let Some(Data::Gauge(gauge)) = &metrics[2].data else { panic!("{metrics:?}") };
    assert_eq!(gauge.data_points[0].value, Some(number_data_point::Value::AsDouble(0.25)));
}

/// More than there is room for.
const ALL: u64 = 50_000;

#[test]
fn a_collector_that_is_away_blocks_nobody_and_gets_what_was_kept_when_it_is_back() {
    let held = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = held.local_addr().unwrap();
    drop(held);
    let settings = settings(&format!("http://{address}"), 1.0);
    assert!(settings.check(Duration::from_secs(1)).is_err(), "nobody is there");
    let exporter = Exporter::start(&settings, ABOUT).unwrap();
    (1..=ALL).for_each(|number| exporter.ended(span(number)));
    let dropped = exporter.dropped();
    assert!(dropped > 0, "there is not room for all of them");

    let collector = Collector::at(address);
    assert_eq!(settings.check(Duration::from_secs(5)), Ok(()));
    until("what was kept", || {
        let came = collector.spans().len() as u64;
        came > 0 && came + exporter.dropped() == ALL
    });
    exporter.ended(span(ALL + 1));
    until("the next", || collector.spans().iter().any(|told| told.span.name == "n50001"));
    exporter.close();
}

#[test]
fn what_is_refused_is_dropped_and_counted_and_what_is_too_much_now_is_sent_later() {
    let collector = Collector::default();
    let exporter = Exporter::start(&settings(&collector.url(), 1.0), ABOUT).unwrap();
    collector.answer(400);
    exporter.ended(span(1));
    until("the refusal", || exporter.dropped() == 1);
    collector.answer(503);
    let asked = collector.heads().len();
    exporter.ended(span(2));
    until("a try", || collector.heads().len() > asked);
    assert_eq!(exporter.dropped(), 1, "it is kept");
    collector.answer(200);
    until("the rest", || collector.spans().len() == 1);
    exporter.close();
    // After the end there is nobody to take anything, and nobody waits.
    exporter.ended(span(3));
    exporter.close();
    assert_eq!(exporter.dropped(), 2);
}

#[test]
fn the_part_that_is_asked_for_is_sampled() {
    let collector = Collector::default();
    let ids = (0..10_000_u64).map(|n| u128::from(n.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    for (sample, least, most) in [(0.0, 0, 0), (0.25, 2000, 3000), (1.0, 10_000, 10_000)] {
        let exporter = Exporter::start(&settings(&collector.url(), sample), ABOUT).unwrap();
        let count = ids.clone().filter(|id| exporter.samples(*id)).count();
        assert!((least..=most).contains(&count), "{count} of {sample}");
        exporter.close();
    }
}
