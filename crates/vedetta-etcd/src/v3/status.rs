//! etcd's words for what can go wrong: its clients match on them.

use tonic::{Code, Status};
use vedetta_kv::{CommitError, KvError};

pub(crate) const EMPTY_KEY: &str = "etcdserver: key is not provided";
pub(crate) const VALUE_PROVIDED: &str = "etcdserver: value is provided";
pub(crate) const LEASE_PROVIDED: &str = "etcdserver: lease is provided";
pub(crate) const KEY_NOT_FOUND: &str = "etcdserver: key not found";
pub(crate) const TOO_LARGE: &str = "etcdserver: request is too large";
pub(crate) const NO_SPACE: &str = "etcdserver: mvcc: database space exceeded";
pub(crate) const TOO_MANY_REQUESTS: &str = "etcdserver: too many requests";
pub(crate) const AUTH_DISABLED: &str = "etcdserver: authentication is not enabled";
const LEASE_NOT_FOUND: &str = "etcdserver: requested lease not found";
const STOPPED: &str = "etcdserver: server stopped";

pub(crate) fn invalid(text: &'static str) -> Status {
    Status::invalid_argument(text)
}

pub(crate) fn no_lease() -> Status {
    Status::not_found(LEASE_NOT_FOUND)
}

/// A client has to come back later.
pub(crate) fn too_many() -> Status {
    Status::resource_exhausted(TOO_MANY_REQUESTS)
}

/// What a call gets that the end of the server cut short.
pub(crate) fn stopped() -> Status {
    Status::unavailable(STOPPED)
}

/// How etcd says it.
pub(crate) fn of(error: KvError) -> Status {
    let (code, text) = match error {
        KvError::Compacted { .. } => {
            (Code::OutOfRange, "etcdserver: mvcc: required revision has been compacted")
        }
        KvError::Future { .. } => {
            (Code::OutOfRange, "etcdserver: mvcc: required revision is a future revision")
        }
        KvError::EmptyKey => (Code::InvalidArgument, EMPTY_KEY),
        KvError::KeyTooLarge { .. }
        | KvError::ValueTooLarge { .. }
        | KvError::RequestTooLarge { .. } => (Code::InvalidArgument, TOO_LARGE),
        KvError::TooManyOps { .. } => {
            (Code::InvalidArgument, "etcdserver: too many operations in txn request")
        }
        KvError::DuplicateKey(_) => {
            (Code::InvalidArgument, "etcdserver: duplicate key given in txn request")
        }
        KvError::KeyNotFound(_) => (Code::InvalidArgument, KEY_NOT_FOUND),
        KvError::LeaseNotFound(_) => (Code::NotFound, LEASE_NOT_FOUND),
        KvError::LeaseExists(_) => (Code::FailedPrecondition, "etcdserver: lease already exists"),
        KvError::TtlTooLarge { .. } => (Code::OutOfRange, "etcdserver: too large lease TTL"),
        KvError::QuotaExceeded { .. } | KvError::Lost(CommitError::Full) => {
            (Code::ResourceExhausted, NO_SPACE)
        }
        KvError::Busy => (Code::ResourceExhausted, TOO_MANY_REQUESTS),
        KvError::Lost(CommitError::Closed) => (Code::Unavailable, STOPPED),
        KvError::TooDeep { .. } => return Status::invalid_argument(error.to_string()),
        other => {
            tracing::error!(error = %other, "a request failed");
            return Status::internal(other.to_string());
        }
    };
    Status::new(code, text)
}
