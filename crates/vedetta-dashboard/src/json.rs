//! Bytes in JSON: as text where they are UTF-8, as base64 under another name where they are not.

use std::time::{Duration, SystemTime};

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::{Serialize, Serializer};
use vedetta_kv::{KeyValue, LeaseId};

/// An answer.
pub(crate) struct Json<T>(pub(crate) T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        match serde_json::to_vec(&self.0) {
            Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
            Err(error) => {
                tracing::error!(%error, "an answer could not be written as JSON");
                StatusCode::INTERNAL_SERVER_ERROR.into_response()
            }
        }
    }
}

/// Bytes under a name, or under another one in base64 when they are not UTF-8.
pub(crate) struct Text<'a> {
    names: (&'static str, &'static str),
    bytes: &'a [u8],
}

impl<'a> Text<'a> {
    pub(crate) fn key(bytes: &'a [u8]) -> Self {
        Self { names: ("key", "key_b64"), bytes }
    }

    pub(crate) fn value(bytes: &'a [u8]) -> Self {
        Self { names: ("value", "value_b64"), bytes }
    }
}

impl Serialize for Text<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (plain, b64) = self.names;
        match std::str::from_utf8(self.bytes) {
            Ok(text) => serializer.collect_map([(plain, text)]),
            Err(_) => serializer.collect_map([(b64, BASE64_STANDARD.encode(self.bytes))]),
        }
    }
}

/// A time, to the millisecond.
pub(crate) fn stamp(at: SystemTime) -> String {
    humantime::format_rfc3339_millis(at).to_string()
}

pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A key with all that is known of it.
#[derive(Serialize)]
pub(crate) struct Entry<'a> {
    #[serde(flatten)]
    key: Text<'a>,
    #[serde(flatten)]
    value: Option<Text<'a>>,
    created: u64,
    modified: u64,
    version: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<String>,
}

impl<'a> Entry<'a> {
    pub(crate) fn new(entry: &'a KeyValue, keys_only: bool) -> Self {
        Self {
            key: Text::key(entry.key()),
            value: (!keys_only).then(|| Text::value(entry.value())),
            created: entry.created().0,
            modified: entry.modified().0,
            version: entry.version(),
            lease: entry.lease().map(|lease: LeaseId| lease.to_string()),
        }
    }
}
