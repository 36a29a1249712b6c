//! A collector of OpenTelemetry: takes OTLP over HTTP, and reads it strictly with OpenTelemetry's own types.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
pub use opentelemetry_proto::tonic::metrics::v1::{Metric, metric::Data, number_data_point};
use opentelemetry_proto::tonic::resource::v1::Resource;
pub use opentelemetry_proto::tonic::trace::v1::{Span, span::SpanKind, status::StatusCode};
use prost::Message;

/// A collector that runs until the test ends.
pub struct Collector {
    address: SocketAddr,
    seen: Arc<Mutex<Seen>>,
    answers: Arc<AtomicU16>,
}

#[derive(Default)]
struct Seen {
    spans: Vec<Told>,
    metrics: Vec<(String, Vec<Metric>)>,
    /// What was wrong with what came.
    faults: Vec<String>,
    headers: Vec<String>,
}

/// A span, and who told it.
#[derive(Debug, Clone)]
pub struct Told {
    /// Its `service.instance.id`.
    pub by: String,
    /// What.
    pub span: Span,
}

impl Told {
    /// An attribute, as text.
    pub fn label(&self, name: &str) -> Option<String> {
        find(&self.span.attributes, name)
    }
}

/// An attribute, as text.
pub fn find(attributes: &[KeyValue], name: &str) -> Option<String> {
    let value = attributes.iter().find(|pair| pair.key == name)?.value.clone();
    Some(match value.and_then(|AnyValue { value }| value)? {
        Value::StringValue(text) => text,
        Value::BoolValue(flag) => flag.to_string(),
        Value::IntValue(number) => number.to_string(),
        other => format!("{other:?}"),
    })
}

impl Default for Collector {
    fn default() -> Self {
        Self::at(([127, 0, 0, 1], 0).into())
    }
}

impl Collector {
    /// One at this address.
    pub fn at(address: SocketAddr) -> Self {
        let listener = TcpListener::bind(address).expect("a port");
        let address = listener.local_addr().expect("an address");
        let seen = Arc::<Mutex<Seen>>::default();
        let answers = Arc::new(AtomicU16::new(200));
        let (all, says) = (Arc::clone(&seen), Arc::clone(&answers));
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (seen, answers) = (Arc::clone(&all), Arc::clone(&says));
                std::thread::spawn(move || converse(&stream, &seen, &answers));
            }
        });
        Self { address, seen, answers }
    }

    /// Where it is.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// It answers with this status from now on, and keeps nothing unless that is 200.
    pub fn answer(&self, status: u16) {
        self.answers.store(status, Ordering::Relaxed);
    }

    /// All spans that came.
    pub fn spans(&self) -> Vec<Told> {
        self.look(|seen| seen.spans.clone())
    }

    /// What was told last by whom; nothing if they told nothing.
    pub fn metrics(&self, by: &str) -> Option<Vec<Metric>> {
        let last = |seen: &Seen| seen.metrics.iter().rev().find(|(who, _)| who == by).cloned();
        self.look(last).map(|(_, metrics)| metrics)
    }

    /// Everybody who told numbers.
    pub fn tellers(&self) -> Vec<String> {
        self.look(|seen| seen.metrics.iter().map(|(who, _)| who.clone()).collect())
    }

    /// All heads of requests that came.
    pub fn heads(&self) -> Vec<String> {
        self.look(|seen| seen.headers.clone())
    }

    fn look<T>(&self, read: impl FnOnce(&Seen) -> T) -> T {
        let seen = self.seen.lock().expect("no panic");
        assert!(seen.faults.is_empty(), "what came is not right: {:?}", seen.faults);
        read(&seen)
    }
}

fn converse(stream: &TcpStream, seen: &Mutex<Seen>, answers: &AtomicU16) {
    let mut reader = BufReader::new(stream);
    loop {
        let mut head = String::new();
        loop {
            match reader.read_line(&mut head) {
                Ok(0) | Err(_) => return,
                Ok(2) if head.ends_with("\r\n\r\n") || head == "\r\n" => break,
                Ok(_) => {}
            }
        }
        let value = |name: &str| {
            let line = head.lines().find(|line| line.to_ascii_lowercase().starts_with(name));
            line.map(|line| line[name.len()..].trim().to_owned())
        };
        let length = value("content-length:").and_then(|text| text.parse().ok()).unwrap_or(0);
        let mut body = vec![0; length];
        if reader.read_exact(&mut body).is_err() {
            return;
        }
        let status = answers.load(Ordering::Relaxed);
        let fault = if value("content-type:").as_deref() == Some("application/x-protobuf") {
            let kept = if status == 200 { Some(seen) } else { None };
            take(head.lines().next().unwrap_or_default(), &body, kept).err()
        } else {
            Some(format!("its type is not protobuf: {head}"))
        };
        let mut all = seen.lock().expect("no panic");
        all.faults.extend(fault);
        all.headers.push(head);
        drop(all);
        let answer = format!("HTTP/1.1 {status} It\r\nContent-Length: 0\r\n\r\n");
        if (&*stream).write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

fn take(request: &str, body: &[u8], seen: Option<&Mutex<Seen>>) -> Result<(), String> {
    match request {
        "POST /v1/traces HTTP/1.1" => {
            let spans = traces(&strictly::<ExportTraceServiceRequest>(body)?)?;
            if let Some(seen) = seen {
                seen.lock().expect("no panic").spans.extend(spans);
            }
        }
        "POST /v1/metrics HTTP/1.1" => {
            let metrics = numbers(&strictly::<ExportMetricsServiceRequest>(body)?)?;
            if let Some(seen) = seen {
                seen.lock().expect("no panic").metrics.extend(metrics);
            }
        }
        other => return Err(format!("nobody asks for {other:?}")),
    }
    Ok(())
}

/// A field that the type does not have would be lost when it is written again.
fn strictly<M: Message + Default + std::fmt::Debug>(body: &[u8]) -> Result<M, String> {
    let message = M::decode(body).map_err(|error| error.to_string())?;
    if message.encode_to_vec() == body {
        Ok(message)
    } else {
        Err(format!("there is more in it than {message:?}"))
    }
}

fn teller(resource: Option<&Resource>) -> Result<String, String> {
    let attributes = &resource.ok_or("no resource")?.attributes;
    let has = |name: &str| find(attributes, name).ok_or_else(|| format!("no {name}"));
    has("service.name")?;
    has("service.version")?;
    has("service.instance.id")
}

fn traces(request: &ExportTraceServiceRequest) -> Result<Vec<Told>, String> {
    let mut all = Vec::new();
    for resource in &request.resource_spans {
        let by = teller(resource.resource.as_ref())?;
        for scope in &resource.scope_spans {
            if scope.scope.as_ref().is_none_or(|scope| scope.name.is_empty()) {
                return Err("a scope has no name".into());
            }
            for span in &scope.spans {
                let ids = [&span.trace_id, &span.span_id];
                let is_id = ids.iter().all(|id| id.iter().any(|byte| *byte != 0));
                let lengths = (span.trace_id.len(), span.span_id.len(), span.parent_span_id.len());
                let is_long = matches!(lengths, (16, 8, 0 | 8));
                let is_timed = 0 < span.start_time_unix_nano
                    && span.start_time_unix_nano <= span.end_time_unix_nano;
                if !is_id || !is_long || !is_timed || span.name.is_empty() {
                    return Err(format!("no span: {span:?}"));
                }
                all.push(Told { by: by.clone(), span: span.clone() });
            }
        }
    }
    Ok(all)
}

fn numbers(request: &ExportMetricsServiceRequest) -> Result<Vec<(String, Vec<Metric>)>, String> {
    let mut all = Vec::new();
    for resource in &request.resource_metrics {
        let by = teller(resource.resource.as_ref())?;
        let metrics: Vec<Metric> =
            resource.scope_metrics.iter().flat_map(|scope| scope.metrics.clone()).collect();
        for metric in &metrics {
            let is_right = match &metric.data {
                Some(Data::Gauge(gauge)) => gauge.data_points.iter().all(|p| p.time_unix_nano > 0),
                Some(Data::Sum(sum)) => {
                    let is_started =
                        |p: &opentelemetry_proto::tonic::metrics::v1::NumberDataPoint| {
                            0 < p.start_time_unix_nano && p.start_time_unix_nano <= p.time_unix_nano
                        };
                    sum.is_monotonic
                        && sum.aggregation_temporality == 2
                        && sum.data_points.iter().all(is_started)
                }
                Some(Data::Histogram(histogram)) => histogram.data_points.iter().all(|point| {
                    point.bucket_counts.len() == point.explicit_bounds.len() + 1
                        && point.bucket_counts.iter().sum::<u64>() == point.count
                        && point.explicit_bounds.is_sorted()
                }),
                _ => false,
            };
            if !is_right || metric.name.is_empty() || metric.description.is_empty() {
                return Err(format!("no metric: {metric:?}"));
            }
        }
        all.push((by, metrics));
    }
    Ok(all)
}
