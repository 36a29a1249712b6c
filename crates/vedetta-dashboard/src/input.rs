//! What clients send, taken apart and checked.

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use percent_encoding::{NON_ALPHANUMERIC, percent_decode, percent_encode};
use serde::de::DeserializeOwned;
use vedetta_kv::LeaseId;

use crate::api::Context;
use crate::error::ApiError;

/// A JSON body. Its content type must say so: a form on another site cannot send that.
pub(crate) struct JsonBody<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<Context> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, context: &Context) -> Result<Self, ApiError> {
        let content_type = request.headers().get(header::CONTENT_TYPE);
        let essence = content_type
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.split(';').next())
            .unwrap_or_default();
        if !essence.trim().eq_ignore_ascii_case("application/json") {
            return Err(ApiError::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "not_json",
                "the body must come with Content-Type: application/json",
            ));
        }
        let reading = Bytes::from_request(request, context);
        let body = tokio::time::timeout(context.limits.body, reading).await;
        let body = body.map_err(|_| ApiError::too_slow())?;
        let body = body.map_err(|why| unreadable(&why))?;
        match serde_json::from_slice(&body) {
            Ok(value) => Ok(Self(value)),
            Err(error) if error.is_data() => Err(ApiError::invalid(error.to_string())),
            Err(error) => {
                let message = format!("the body is not JSON: {error}");
                Err(ApiError::new(StatusCode::BAD_REQUEST, "bad_json", message))
            }
        }
    }
}

fn unreadable(why: &BytesRejection) -> ApiError {
    if why.status() == StatusCode::PAYLOAD_TOO_LARGE {
        ApiError::too_large("the body is larger than 2 MiB, or with many jobs 8 MiB")
    } else {
        ApiError::new(StatusCode::BAD_REQUEST, "unreadable", "the body could not be read")
    }
}

/// What a page of a list has: unless asked for another number, and at most.
const PAGE: u64 = 100;
const PAGE_LIMIT: u64 = 500;

/// What a query or a form has: names and the bytes they stand for.
pub(crate) fn fields(text: &[u8]) -> Vec<(String, Vec<u8>)> {
    let decode = |text: &[u8]| {
        let spaced: Vec<u8> =
            text.iter().map(|byte| if *byte == b'+' { b' ' } else { *byte }).collect();
        percent_decode(&spaced).collect::<Vec<u8>>()
    };
    let pieces = text.split(|byte| *byte == b'&').filter(|piece| !piece.is_empty());
    let pairs = pieces.map(|piece| {
        let mut halves = piece.splitn(2, |byte| *byte == b'=');
        let (name, value) = (halves.next().unwrap_or_default(), halves.next().unwrap_or_default());
        (String::from_utf8_lossy(&decode(name)).into_owned(), decode(value))
    });
    pairs.collect()
}

/// Any bytes, as part of an address.
pub(crate) fn encode(bytes: &[u8]) -> String {
    percent_encode(bytes, NON_ALPHANUMERIC).to_string()
}

/// The query of an address: names and the bytes they stand for.
pub(crate) struct Query(Vec<(String, Vec<u8>)>);

impl<S: Sync> FromRequestParts<S> for Query {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        Ok(Self::parse(parts.uri.query().unwrap_or_default()))
    }
}

impl Query {
    /// Of an address, or of a form.
    pub(crate) fn parse(text: &str) -> Self {
        Self(fields(text.as_bytes()))
    }

    /// Takes a parameter out.
    pub(crate) fn bytes(&mut self, name: &str) -> Option<Vec<u8>> {
        let place = self.0.iter().position(|(given, _)| given == name)?;
        Some(self.0.swap_remove(place).1)
    }

    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        let text = self.bytes(name).map(String::from_utf8).transpose();
        text.map_err(|_| ApiError::invalid(format!("{name} is not UTF-8")))
    }

    pub(crate) fn number(&mut self, name: &str) -> Result<Option<u64>, ApiError> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        let number = text.parse();
        number.map(Some).map_err(|_| ApiError::invalid(format!("{name} must be a whole number")))
    }

    /// How many a page may have: the parameter `limit`, within bounds.
    pub(crate) fn page(&mut self) -> Result<usize, ApiError> {
        let limit = self.number("limit")?.unwrap_or(PAGE).clamp(1, PAGE_LIMIT);
        Ok(usize::try_from(limit).unwrap_or(usize::MAX))
    }

    pub(crate) fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        match self.text(name)?.as_deref() {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(_) => Err(ApiError::invalid(format!("{name} must be true or false"))),
        }
    }

    /// All parameters are taken; what is left nobody knows.
    pub(crate) fn end(self) -> Result<(), ApiError> {
        match self.0.first() {
            None => Ok(()),
            Some((name, _)) => {
                Err(ApiError::invalid(format!("unknown or repeated parameter {name:?}")))
            }
        }
    }
}

/// The key in a path: all that follows `/kv/`, percent-decoded. So the key `/a b` is `/kv//a%20b` and
/// also `/kv/%2Fa%20b`; with everything encoded it can be any bytes.
pub(crate) struct KeyPath(pub(crate) bytes::Bytes);

impl<S: Send + Sync> FromRequestParts<S> for KeyPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        // Not axum's `Path`, which wants UTF-8.
        let key = parts.uri.path().split_once("/kv/").map_or("", |(_, key)| key);
        Ok(Self(percent_decode(key.as_bytes()).collect::<Vec<u8>>().into()))
    }
}

/// The id of a lease as it is shown: lower-case hex.
pub(crate) fn lease_id(text: &str) -> Result<LeaseId, ApiError> {
    let number = u64::from_str_radix(text, 16).ok();
    number.and_then(|number| LeaseId::new(number.cast_signed())).ok_or_else(|| {
        ApiError::invalid(format!("{text:?} is not the id of a lease, which is a hex number"))
    })
}

/// The lease named in a path.
pub(crate) struct LeasePath(pub(crate) LeaseId);

impl<S: Send + Sync> FromRequestParts<S> for LeasePath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let id = Path::<String>::from_request_parts(parts, state).await;
        let Path(id) = id.map_err(|_| ApiError::invalid("the id of a lease is a hex number"))?;
        lease_id(&id).map(Self)
    }
}

/// The value in a body: `value` as text or `value_b64` as base64.
pub(crate) fn value(text: Option<String>, b64: Option<&str>) -> Result<bytes::Bytes, ApiError> {
    match (text, b64) {
        (Some(text), None) => Ok(text.into()),
        (None, Some(b64)) => {
            let bytes = BASE64_STANDARD.decode(b64);
            bytes.map(Into::into).map_err(|_| ApiError::invalid("value_b64 is not base64"))
        }
        _ => Err(ApiError::invalid("give either value or value_b64")),
    }
}
