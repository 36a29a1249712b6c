//! Makes sure of the streams and the consumer: made if there are none, checked if there are.

use async_nats::jetstream::consumer::{AckPolicy, PullConsumer, pull};
use async_nats::jetstream::context::{ConsumerInfoErrorKind, GetStreamErrorKind};
use async_nats::jetstream::stream::{Config, DiscardPolicy, RetentionPolicy, StorageType, Stream};
use async_nats::jetstream::{Context, ErrorCode};
use std::time::Duration;

use super::{Options, failed, unavailable};
use crate::job::JobsError;

/// How long the same dead letter is not stored twice.
const SAME: Duration = Duration::from_secs(600);

/// Whether it is so a client cannot ask: so it is said of every server.
const UNFLUSHED: &str = "unless the server flushes always, which it does not say (its sync_interval, 2 minutes unless set), NATS \
     acknowledges a message before it is on the disk: a power cut can lose the last ones, and acknowledgements of jobs";

/// What there is to work with.
pub(super) struct SetUp {
    pub consumer: PullConsumer,
    /// Its messages may be others' jobs, too.
    pub has_others: bool,
    /// What of all this can lose jobs.
    pub warnings: Vec<String>,
}

pub(super) async fn set_up(context: &Context, options: &Options) -> Result<SetUp, JobsError> {
    let wanted = Config {
        name: options.stream.clone(),
        subjects: vec![options.subject.clone()],
        retention: RetentionPolicy::WorkQueue,
        ..Config::default()
    };
    let stream = ensure(context, wanted, Holds::Jobs).await?;
    let dead = Config {
        name: options.dead_stream.clone(),
        subjects: vec![options.dead_subject()],
        duplicate_window: SAME,
        ..Config::default()
    };
    let dead = ensure(context, dead, Holds::DeadLetters).await?;
    let dead = &dead.cached_info().config;
    let config = &stream.cached_info().config;
    let has_others = config.retention != RetentionPolicy::WorkQueue;
    let mut warnings = risks(config);
    warnings.extend(risks(dead));
    warnings.push(UNFLUSHED.into());
    let (consumer, raised) = consumer(&stream, options).await?;
    warnings.extend(raised);
    Ok(SetUp { consumer, has_others, warnings })
}

/// What of it can lose jobs, without anything being made or changed. Nothing of what is not there yet.
pub(super) async fn look(context: &Context, options: &Options) -> Result<Vec<String>, JobsError> {
    let mut warnings = Vec::new();
    for name in [&options.stream, &options.dead_stream] {
        match context.get_stream(name).await {
            Ok(stream) => warnings.extend(risks(&stream.cached_info().config)),
            Err(error) if is_missing(&error.kind()) => {}
            Err(error) => return Err(unavailable(format!("asking for the stream {name}"), error)),
        }
    }
    warnings.push(UNFLUSHED.into());
    Ok(warnings)
}

/// What a stream is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holds {
    Jobs,
    DeadLetters,
}

async fn ensure(context: &Context, wanted: Config, holds: Holds) -> Result<Stream, JobsError> {
    let (name, subjects) = (wanted.name.clone(), wanted.subjects.clone());
    let stream = match context.get_stream(&name).await {
        Ok(stream) => stream,
        Err(error) if is_missing(&error.kind()) => {
            let made = context.create_stream(wanted).await;
            made.map_err(|error| failed(format!("making the stream {name}"), error))?
        }
        Err(error) => return Err(unavailable(format!("asking for the stream {name}"), error)),
    };
    let found = &stream.cached_info().config;
    // Jobs that are copied from another stream have the subjects of that one; dead letters we publish ourselves.
    let is_copy = holds == Holds::Jobs && (found.mirror.is_some() || found.sources.is_some());
    let has = |wanted: &String| found.subjects.iter().any(|found| covers(found, wanted));
    if !is_copy && !subjects.iter().all(has) {
        let (wanted, found) = (subjects.join(", "), found.subjects.join(", "));
        return Err(JobsError::Invalid(format!(
            "the stream {name} has other subjects: wanted {wanted}, found {found}"
        )));
    }
    if found.no_ack {
        return Err(differs(&format!("stream {name}"), "no_ack", "false", "true"));
    }
    Ok(stream)
}

/// Whether all that is published to one subject is published to another, too. Either may have wildcards.
fn covers(wide: &str, narrow: &str) -> bool {
    let mut narrow = narrow.split('.');
    for wide in wide.split('.') {
        match (wide, narrow.next()) {
            (">", Some(_)) => return true,
            ("*", Some(token)) if token != ">" => {}
            (wide, Some(token)) if wide == token => {}
            _ => return false,
        }
    }
    narrow.next().is_none()
}

fn is_missing(kind: &GetStreamErrorKind) -> bool {
    matches!(kind, GetStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_NOT_FOUND)
}

async fn consumer(
    stream: &Stream,
    options: &Options,
) -> Result<(PullConsumer, Option<String>), JobsError> {
    let name = &options.durable;
    let most = i64::from(options.max_ack_pending.get());
    let wanted = pull::Config {
        durable_name: Some(name.clone()),
        ack_policy: AckPolicy::Explicit,
        ack_wait: options.ack_wait,
        max_deliver: -1,
        filter_subject: options.subject.clone(),
        max_ack_pending: most,
        ..pull::Config::default()
    };
    let found = match stream.consumer_info(name).await {
        Ok(info) => Some(info.config),
        Err(error) if error.kind() == ConsumerInfoErrorKind::NotFound => None,
        Err(error) => return Err(unavailable(format!("asking for the consumer {name}"), error)),
    };
    let mut raised = None;
    let mut asked = wanted.clone();
    if let Some(found) = found {
        check(&found, &wanted, options)?;
        // Others may need more of it; with less of it they would wait for each other.
        if found.max_ack_pending > most {
            let found = found.max_ack_pending;
            raised = Some(format!(
                "the consumer {name} has a max_ack_pending of {found}, which is more than {most}: it stays so"
            ));
            asked.max_ack_pending = found;
        }
    }
    let made = stream.create_consumer(asked).await;
    let made = made.map_err(|error| failed(format!("making the consumer {name}"), error))?;
    // A server may leave out what it does not know, and say nothing.
    let found = &made.cached_info().config;
    check(found, &wanted, options)?;
    if found.max_ack_pending < most {
        let (most, found) = (most.to_string(), found.max_ack_pending.to_string());
        return Err(differs(&format!("consumer {name}"), "max_ack_pending", &most, &found));
    }
    Ok((made, raised))
}

type Found = async_nats::jetstream::consumer::Config;

fn check(found: &Found, wanted: &pull::Config, options: &Options) -> Result<(), JobsError> {
    let what = format!("consumer {} of stream {}", options.durable, options.stream);
    let time = |time: Duration| humantime::format_duration(time).to_string();
    let times = |all: &[Duration]| format!("{all:?}");
    for (field, wanted, found) in [
        ("deliver_subject", "none", found.deliver_subject.as_deref().unwrap_or("none")),
        ("filter_subject", &wanted.filter_subject, &found.filter_subject),
        ("ack_policy", &format!("{:?}", wanted.ack_policy), &format!("{:?}", found.ack_policy)),
        ("ack_wait", &time(wanted.ack_wait), &time(found.ack_wait)),
        ("backoff", &times(&wanted.backoff), &times(&found.backoff)),
        ("max_deliver", &wanted.max_deliver.to_string(), &found.max_deliver.to_string()),
        ("headers_only", "false", &found.headers_only.to_string()),
    ] {
        if wanted != found {
            return Err(differs(&what, field, wanted, found));
        }
    }
    Ok(())
}

fn differs(what: &str, field: &str, wanted: &str, found: &str) -> JobsError {
    JobsError::Invalid(format!("the {what} has another {field}: wanted {wanted}, found {found}"))
}

/// How this stream can lose what it acknowledged.
fn risks(config: &Config) -> Vec<String> {
    let mut risks = Vec::new();
    let mut risk = |what: String| risks.push(format!("the stream {} {what}", config.name));
    if config.storage == StorageType::Memory {
        risk("is in memory: a restart of the server loses it".into());
    }
    if config.num_replicas < 2 {
        risk("has one replica: it is lost with its server's disk".into());
    }
    if !config.max_age.is_zero() {
        let age = humantime::format_duration(config.max_age);
        risk(format!("has a max_age of {age}: what waits longer is removed"));
    }
    let limits = [
        ("max_bytes", config.max_bytes),
        ("max_msgs", config.max_messages),
        ("max_msgs_per_subject", config.max_messages_per_subject),
    ];
    for (name, limit) in limits {
        if limit > 0 && config.discard == DiscardPolicy::Old {
            risk(format!(
                "has a {name} of {limit} and discards the oldest: jobs that wait may be removed"
            ));
        }
    }
    if config.retention == RetentionPolicy::Interest {
        risk(
            "keeps only what somebody is interested in: jobs are lost if its consumer is removed"
                .into(),
        );
    }
    risks
}

#[cfg(test)]
mod tests {
    use super::covers;

    #[test]
    fn a_subject_covers_what_it_matches() {
        for (wide, narrow, does) in [
            ("media.files", "media.files", true),
            ("media.*", "media.files", true),
            ("media.>", "media.files.new", true),
            ("media.>", "media.*", true),
            (">", "media.>", true),
            ("media.*", "media.*", true),
            ("media.files", "media.other", false),
            ("media.files", "media", false),
            ("media", "media.files", false),
            ("media.*", "media.>", false),
            ("media.*", "media.files.new", false),
            ("media.files", "media.*", false),
            ("media.>", "media", false),
        ] {
            assert_eq!(covers(wide, narrow), does, "{wide} {narrow}");
        }
    }
}
