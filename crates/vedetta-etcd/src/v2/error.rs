//! Errors as v2's clients know them.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use vedetta_core::Revision;
use vedetta_kv::{CommitError, KvError};

use super::json;

/// What went wrong, by etcd's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Code {
    KeyNotFound = 100,
    TestFailed = 101,
    NotFile = 102,
    NotDir = 104,
    NodeExist = 105,
    RootReadOnly = 107,
    DirNotEmpty = 108,
    PrevValueRequired = 201,
    TtlNotANumber = 202,
    IndexNotANumber = 203,
    InvalidField = 209,
    InvalidForm = 210,
    RefreshValue = 211,
    RefreshTtlRequired = 212,
    Internal = 300,
    EventIndexCleared = 401,
}

impl Code {
    fn message(self) -> &'static str {
        match self {
            Self::KeyNotFound => "Key not found",
            Self::TestFailed => "Compare failed",
            Self::NotFile => "Not a file",
            Self::NotDir => "Not a directory",
            Self::NodeExist => "Key already exists",
            Self::RootReadOnly => "Root is read only",
            Self::DirNotEmpty => "Directory not empty",
            Self::PrevValueRequired => "PrevValue is Required in POST form",
            Self::TtlNotANumber => "The given TTL in POST form is not a number",
            Self::IndexNotANumber => "The given index in POST form is not a number",
            Self::InvalidField => "Invalid field",
            Self::InvalidForm => "Invalid POST form",
            Self::RefreshValue => "Value provided on refresh",
            Self::RefreshTtlRequired => "A TTL must be provided on refresh",
            Self::Internal => "Raft Internal Error",
            Self::EventIndexCleared => "The event in requested index is outdated and cleared",
        }
    }

    fn status(self) -> StatusCode {
        match self {
            Self::KeyNotFound => StatusCode::NOT_FOUND,
            Self::NotFile | Self::DirNotEmpty => StatusCode::FORBIDDEN,
            Self::TestFailed | Self::NodeExist => StatusCode::PRECONDITION_FAILED,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            _ => StatusCode::BAD_REQUEST,
        }
    }
}

/// An error and where the store was; 0 when the store was not asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Error {
    pub(crate) code: Code,
    cause: Vec<u8>,
    index: Revision,
}

impl Error {
    pub(crate) fn new(code: Code, cause: impl Into<Vec<u8>>, index: Revision) -> Self {
        Self { code, cause: cause.into(), index }
    }

    /// The request makes no sense, whatever the store holds.
    pub(crate) fn request(code: Code, cause: impl Into<Vec<u8>>) -> Self {
        Self::new(code, cause, Revision(0))
    }
}

impl From<KvError> for Error {
    fn from(error: KvError) -> Self {
        let cause = match error {
            KvError::KeyTooLarge { .. }
            | KvError::ValueTooLarge { .. }
            | KvError::RequestTooLarge { .. } => "etcdserver: request is too large".into(),
            KvError::QuotaExceeded { .. } | KvError::Lost(CommitError::Full) => {
                "etcdserver: mvcc: database space exceeded".into()
            }
            KvError::Busy => "etcdserver: too many requests".into(),
            other => other.to_string(),
        };
        Self::request(Code::Internal, cause)
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let mut body = format!("{{\"errorCode\":{},\"message\":", self.code as u16).into_bytes();
        json::string(&mut body, self.code.message().as_bytes());
        if !self.cause.is_empty() {
            body.extend_from_slice(b",\"cause\":");
            json::string(&mut body, &self.cause);
        }
        body.extend_from_slice(format!(",\"index\":{}}}\n", self.index).as_bytes());
        let json = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
        let index = [("x-etcd-index", self.index.to_string())];
        (self.code.status(), json, index, body).into_response()
    }
}
