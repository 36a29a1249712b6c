//! Bytes in JSON: as text where they are UTF-8, as base64 under another name where they are not.

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Serialize;
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

/// A key, as `key` or `key_b64`.
#[derive(Serialize)]
pub(crate) enum KeyText<'a> {
    #[serde(rename = "key")]
    Text(&'a str),
    #[serde(rename = "key_b64")]
    Base64(String),
}

/// A value, as `value` or `value_b64`.
#[derive(Serialize)]
pub(crate) enum ValueText<'a> {
    #[serde(rename = "value")]
    Text(&'a str),
    #[serde(rename = "value_b64")]
    Base64(String),
}

impl<'a> From<&'a [u8]> for KeyText<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        std::str::from_utf8(bytes)
            .map_or_else(|_| Self::Base64(BASE64_STANDARD.encode(bytes)), Self::Text)
    }
}

impl<'a> From<&'a [u8]> for ValueText<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        std::str::from_utf8(bytes)
            .map_or_else(|_| Self::Base64(BASE64_STANDARD.encode(bytes)), Self::Text)
    }
}

/// A key with all that is known of it.
#[derive(Serialize)]
pub(crate) struct Entry<'a> {
    #[serde(flatten)]
    key: KeyText<'a>,
    #[serde(flatten)]
    state: Option<State<'a>>,
    created: u64,
    modified: u64,
    version: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<String>,
}

/// The part that `keys_only` leaves out.
#[derive(Serialize)]
struct State<'a> {
    #[serde(flatten)]
    value: ValueText<'a>,
}

impl<'a> Entry<'a> {
    pub(crate) fn new(entry: &'a KeyValue, keys_only: bool) -> Self {
        Self {
            key: KeyText::from(entry.key()),
            state: (!keys_only).then(|| State { value: ValueText::from(entry.value()) }),
            created: entry.created().0,
            modified: entry.modified().0,
            version: entry.version(),
            lease: entry.lease().map(|lease: LeaseId| lease.to_string()),
        }
    }
}
