//! What is known of a kind of jobs, for those that are asked for with less.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use vedetta_core::Trace;

use crate::job::{JobsError, Json, NewJob, When, traceparent};

/// A job as it is asked for: what is left out is its kind's to say.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    /// What is to be done.
    pub kind: String,
    /// Where it waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// What the handler is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub payload: Option<Json>,
    /// How many slots it takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<u32>,
    /// What is higher goes first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<i16>,
    /// When it may begin.
    #[serde(default, skip_serializing_if = "is_now")]
    pub run_at: When,
    /// How often it may begin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_attempts: Option<u32>,
    /// How long one attempt may take.
    #[serde(default, with = "humantime_serde", skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Duration>,
    /// One waits at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unique_key: Option<String>,
    /// To find it by.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// The place in a trace that it is below of.
    #[serde(
        default,
        rename = "traceparent",
        with = "traceparent",
        skip_serializing_if = "Option::is_none"
    )]
    pub trace: Option<Trace>,
}

fn is_now(when: &When) -> bool {
    *when == When::Now
}

/// How many slots jobs of a kind take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cost {
    /// So many.
    Fixed(u32),
    /// What a table says for the value of a field of the payload.
    From {
        /// The field.
        field: String,
        /// What each value costs.
        costs: BTreeMap<String, u32>,
    },
}

/// What is known of a kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kind {
    /// Where its jobs wait.
    pub queue: String,
    /// How many slots they take.
    pub cost: Cost,
    /// How often they may begin.
    pub max_attempts: u32,
    /// How long one attempt may take.
    pub timeout: Option<Duration>,
}

/// All kinds that are known. Others may be asked for as well.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kinds(pub BTreeMap<String, Kind>);

impl Kinds {
    /// The whole job.
    pub fn complete(&self, asked: Asked) -> Result<NewJob, JobsError> {
        let kind = self.0.get(&asked.kind);
        let mut job = NewJob::new(asked.kind);
        if let Some(payload) = asked.payload {
            job.payload = payload;
        }
        if let Some(kind) = kind {
            job.queue.clone_from(&kind.queue);
            job.max_attempts = kind.max_attempts;
            job.timeout = kind.timeout;
            if asked.cost.is_none() {
                job.cost = kind.cost.of(&job.payload)?;
            }
        }
        job.queue = asked.queue.unwrap_or(job.queue);
        job.cost = asked.cost.unwrap_or(job.cost);
        job.priority = asked.priority.unwrap_or(job.priority);
        job.run_at = asked.run_at;
        job.max_attempts = asked.max_attempts.unwrap_or(job.max_attempts);
        job.timeout = asked.timeout.or(job.timeout);
        job.unique_key = asked.unique_key;
        job.tags = asked.tags;
        job.trace = asked.trace;
        job.check()?;
        Ok(job)
    }
}

impl Cost {
    pub(crate) fn of(&self, payload: &RawValue) -> Result<u32, JobsError> {
        let (field, costs) = match self {
            Self::Fixed(cost) => return Ok(*cost),
            Self::From { field, costs } => (field, costs),
        };
        let payload: Value = serde_json::from_str(payload.get()).unwrap_or_default();
        let value = match payload.get(field) {
            Some(Value::String(text)) => text.clone(),
            Some(value @ (Value::Number(_) | Value::Bool(_))) => value.to_string(),
            _ => {
                let what = format!("its cost is told by {field:?}, which the payload has not");
                return Err(JobsError::Invalid(what));
            }
        };
        costs.get(&value).copied().ok_or_else(|| {
            let known: Vec<&str> = costs.keys().map(String::as_str).collect();
            let known = known.join(", ");
            JobsError::Invalid(format!(
                "{field:?} is {value:?}, whose cost is not known: {known} are"
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(text: &str) -> Asked {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_kind_says_what_was_left_out_and_nothing_else() {
        let costs = [("144p".into(), 1), ("4K".into(), 64)].into();
        let cost = Cost::From { field: "resolution".into(), costs };
        let timeout = Some(Duration::from_secs(60));
        let kind = Kind { queue: "media".into(), cost, max_attempts: 3, timeout };
        let kinds = Kinds([("transcode".to_owned(), kind)].into());

        let job = kinds
            .complete(asked(r#"{"kind": "transcode", "payload": {"resolution": "4K"}}"#))
            .unwrap();
        assert_eq!((job.queue.as_str(), job.cost, job.max_attempts), ("media", 64, 3));
        assert_eq!(job.timeout, timeout);

        let said = r#"{"kind": "transcode", "cost": 2, "queue": "night", "max_attempts": 9, "timeout": "1s"}"#;
        let job = kinds.complete(asked(said)).unwrap();
        assert_eq!((job.queue.as_str(), job.cost, job.max_attempts), ("night", 2, 9));
        assert_eq!(job.timeout, Some(Duration::from_secs(1)));

        for (payload, why) in [("{}", "has not"), (r#"{"resolution": "8K"}"#, "not known")] {
            let wrong = format!(r#"{{"kind": "transcode", "payload": {payload}}}"#);
            let error = kinds.complete(asked(&wrong)).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        let job = kinds.complete(asked(r#"{"kind": "other"}"#)).unwrap();
        assert_eq!((job.queue.as_str(), job.cost), ("default", 1));
    }
}
