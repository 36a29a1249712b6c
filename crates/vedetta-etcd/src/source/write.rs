//! Writes to a cluster: one transaction each.

use std::fmt;

use bytes::Bytes;
use tonic::{Code, Status};
use vedetta_core::{Revision, SourceError};
use vedetta_kv::LeaseId;

use super::Cluster;
use super::line::Line;
use super::proto::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use super::proto::etcdserverpb::request_op::Request;
use super::proto::etcdserverpb::response_op::Response;
use super::proto::etcdserverpb::{Compare, DeleteRangeRequest, PutRequest, RequestOp, TxnRequest};
use super::registry::{equal, revision};

/// Puts and deletes that are done together, or not at all.
///
/// ```
/// use vedetta_etcd::{Is, Write};
///
/// let write = Write::new().when("rooms/1", Is::Missing).put("rooms/1", "on air");
/// ```
#[derive(Clone, Default)]
#[must_use = "it is written with `Cluster::write`"]
pub struct Write(TxnRequest);

/// What a key must be for a [`Write`] to be done.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Is {
    /// Not there.
    Missing,
    /// There.
    Present,
    /// Last changed by this revision.
    At(Revision),
    /// Holding this value.
    Value(Bytes),
}

/// What became of a [`Write`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Written {
    /// Whether all its conditions held; if not, nothing was changed.
    pub done: bool,
    /// The revision it made; the one it looked at, if it changed nothing.
    pub revision: Revision,
    /// How many keys it deleted.
    pub deleted: u64,
}

/// Why a write was not answered well, by what to do next.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// No node was reached, and nothing was changed: wait, then write again.
    #[error("nothing was written")]
    NotReached(#[source] SourceError),
    /// The line broke, or the node could not say: it may have been done or not. Look, or write again with
    /// conditions that make the second time harmless.
    #[error("it is not known whether it was written")]
    Unknown(#[source] SourceError),
    /// The lease is over, and nothing was changed: begin another.
    #[error("nothing was written: the lease is over")]
    LeaseOver,
    /// The server will not have it, and nothing was changed: write something else.
    #[error("nothing was written, the server refuses it: {0}")]
    Refused(String),
}

impl Write {
    /// One that does nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Only if this is so; with several, if all are.
    pub fn when(mut self, key: impl Into<Bytes>, is: Is) -> Self {
        let key = key.into();
        self.0.compare.push(match is {
            Is::Missing => equal(key, CompareTarget::Version, TargetUnion::Version(0)),
            Is::Present => Compare {
                result: CompareResult::Greater.into(),
                ..equal(key, CompareTarget::Version, TargetUnion::Version(0))
            },
            Is::At(at) => {
                equal(key, CompareTarget::Mod, TargetUnion::ModRevision(at.0.cast_signed()))
            }
            Is::Value(value) => equal(key, CompareTarget::Value, TargetUnion::Value(value)),
        });
        self
    }

    /// Sets a key. A lease that it was under it is no longer.
    pub fn put(self, key: impl Into<Bytes>, value: impl Into<Bytes>) -> Self {
        self.and_put(key.into(), value.into(), 0)
    }

    /// Sets a key that goes when the lease goes: a [`Lease`](super::Lease), or its id.
    pub fn put_leased(
        self,
        key: impl Into<Bytes>,
        value: impl Into<Bytes>,
        lease: impl Into<LeaseId>,
    ) -> Self {
        self.and_put(key.into(), value.into(), lease.into().get())
    }

    /// Deletes a key, if it is there.
    pub fn delete(self, key: impl Into<Bytes>) -> Self {
        let delete = DeleteRangeRequest { key: key.into(), ..Default::default() };
        self.and(Request::RequestDeleteRange(delete))
    }

    fn and_put(self, key: Bytes, value: Bytes, lease: i64) -> Self {
        self.and(Request::RequestPut(PutRequest { key, value, lease, ..Default::default() }))
    }

    fn and(mut self, request: Request) -> Self {
        self.0.success.push(RequestOp { request: Some(request) });
        self
    }
}

impl Cluster {
    /// Sets a key, and tells the revision.
    pub async fn put(
        &self,
        key: impl Into<Bytes> + Send,
        value: impl Into<Bytes> + Send,
    ) -> Result<Revision, WriteError> {
        Ok(self.write(Write::new().put(key, value)).await?.revision)
    }

    /// Deletes a key, and tells whether it was there.
    pub async fn delete(&self, key: impl Into<Bytes> + Send) -> Result<bool, WriteError> {
        Ok(self.write(Write::new().delete(key)).await?.deleted > 0)
    }

    /// Writes in one transaction, which must be answered within our [patience](Self::patience).
    pub async fn write(&self, write: Write) -> Result<Written, WriteError> {
        let line = self.line().await.map_err(WriteError::NotReached)?;
        let limit = self.settings.patience;
        let answer = self.ask_on(&line, "the write", limit, async move |line: Line| {
            match line.txn(write.0).await {
                Ok(done) => Ok(Ok(done)),
                Err(status) => refused(&status).map(Err).ok_or(status),
            }
        });
        let done = answer.await.map_err(WriteError::Unknown)??;
        let deleted = done.responses.iter().map(|op| match &op.response {
            Some(Response::ResponseDeleteRange(deleted)) => deleted.deleted.cast_unsigned(),
            _ => 0,
        });
        let deleted = deleted.sum();
        Ok(Written { done: done.succeeded, revision: revision(&done), deleted })
    }
}

/// An answer that says that nothing was done, and would say so again.
fn refused(status: &Status) -> Option<WriteError> {
    let told = status.message();
    match status.code() {
        // It is ours, and was not told by the server.
        _ if std::error::Error::source(status).is_some() => None,
        Code::NotFound if told.contains("lease") => Some(WriteError::LeaseOver),
        // Written again, it may be done.
        Code::ResourceExhausted if told.contains("too many requests") => None,
        Code::NotFound
        | Code::InvalidArgument
        | Code::OutOfRange
        | Code::FailedPrecondition
        | Code::PermissionDenied
        | Code::Unauthenticated
        | Code::ResourceExhausted
        | Code::Unimplemented => Some(WriteError::Refused(told.to_owned())),
        _ => None,
    }
}

/// Says nothing of what is written.
impl fmt::Debug for Write {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Write")
            .field("conditions", &self.0.compare.len())
            .field("changes", &self.0.success.len())
            .finish()
    }
}

/// Says nothing of the value.
impl fmt::Debug for Is {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("Missing"),
            Self::Present => f.write_str("Present"),
            Self::At(at) => f.debug_tuple("At").field(at).finish(),
            Self::Value(_) => f.write_str("Value(..)"),
        }
    }
}
