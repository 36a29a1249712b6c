//! What a client is told when it does not get what it asked for.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use vedetta_kv::{CommitError, KvError};

use crate::json::Json;

/// `{"error": {"code", "message", "hint"?}}` with its status.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    code: &'static str,
    message: String,
    hint: Option<String>,
    /// For the header of that name.
    allow: Option<Box<str>>,
}

#[derive(Serialize)]
struct Body<'a> {
    error: Inner<'a>,
}

#[derive(Serialize)]
struct Inner<'a> {
    code: &'a str,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<&'a str>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), hint: None, allow: None }
    }

    #[must_use]
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.status
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// What to do about it.
    pub(crate) fn advice(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid", message)
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", message)
    }

    pub(crate) fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, "conflict", message)
    }

    pub(crate) fn too_large(message: impl Into<String>) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
    }

    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "forbidden", message)
    }

    pub(crate) fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", message)
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message).hint("try again")
    }

    pub(crate) fn too_slow() -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "too_slow", "the body took too long")
    }

    pub(crate) fn no_such_route() -> Self {
        Self::not_found("there is nothing at this path")
            .hint("the API is under /api/v1, the page at /")
    }

    /// `allowed` as the header says it.
    pub(crate) fn wrong_method(allowed: String) -> Self {
        let message = "this path does not take that method; the Allow header has those it takes";
        let error = Self::new(StatusCode::METHOD_NOT_ALLOWED, "wrong_method", message);
        Self { allow: Some(allowed.into()), ..error }
    }
}

impl From<KvError> for ApiError {
    fn from(error: KvError) -> Self {
        let message = error.to_string();
        match error {
            KvError::Compacted { oldest, .. } => {
                Self::new(StatusCode::GONE, "compacted", message).hint(format!(
                    "read the present, or revision {oldest} or later, and go on from there"
                ))
            }
            KvError::ValueTooLarge { .. } | KvError::RequestTooLarge { .. } => {
                Self::too_large(message)
            }
            KvError::KeyNotFound(_) | KvError::LeaseNotFound(_) => Self::not_found(message),
            KvError::LeaseExists(_) => Self::conflict(message).hint("choose another id, or none"),
            KvError::Future { .. }
            | KvError::EmptyKey
            | KvError::KeyTooLarge { .. }
            | KvError::TooManyOps { .. }
            | KvError::TooDeep { .. }
            | KvError::DuplicateKey(_)
            | KvError::TtlTooLarge { .. } => Self::invalid(message),
            KvError::QuotaExceeded { .. } => {
                Self::new(StatusCode::INSUFFICIENT_STORAGE, "quota", message)
            }
            KvError::Lost(CommitError::Full) => {
                Self::new(StatusCode::INSUFFICIENT_STORAGE, "disk_full", message)
                    .hint("free space on the disk, or delete keys and compact")
            }
            KvError::Lost(CommitError::Closed) => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "closed", "the store is shutting down")
                    .hint("try again when it is up")
            }
            KvError::Lost(CommitError::Halted) => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "halted", message)
            }
            KvError::Lost(_) => Self::new(StatusCode::INTERNAL_SERVER_ERROR, "uncertain", message)
                .hint("it was not acknowledged, but may be there after a restart: read before you repeat"),
            KvError::Damaged(_) => {
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, "damaged", message)
            }
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, "failed", message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        if self.status.is_server_error() {
            tracing::warn!(code = self.code, why = %self.message, "a request failed");
        }
        let inner = Inner { code: self.code, message: &self.message, hint: self.hint.as_deref() };
        let mut response = (self.status, Json(Body { error: inner })).into_response();
        if let Some(Ok(allow)) = self.allow.as_deref().map(HeaderValue::from_str) {
            response.headers_mut().insert(header::ALLOW, allow);
        }
        response
    }
}
