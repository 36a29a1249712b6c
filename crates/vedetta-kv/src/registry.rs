use std::time::Duration;

use bytes::Bytes;
use vedetta_core::{KeyRange, Registry, Revision, SourceError};

use crate::{
    Compare, CompareOp, CompareTarget, Delete, KeyValue, KvError, LeaseId, Op, OpReply, Put, Range,
    Store, Txn,
};

/// The store in the same process.
impl Registry for Store {
    type Lease = LeaseId;

    async fn begin(&self, ttl: Duration) -> Result<LeaseId, SourceError> {
        self.grant(None, ttl).await.map_err(|error| lost("cannot begin a lease", error))
    }

    async fn renew(&self, lease: &LeaseId) -> Result<bool, SourceError> {
        let kept = unless_over(self.keep_alive(*lease).await, "cannot renew a lease")?;
        Ok(kept.is_some())
    }

    async fn end(&self, lease: &LeaseId) -> Result<(), SourceError> {
        unless_over(self.revoke(*lease).await, "cannot end a lease").map(drop)
    }

    async fn hold(
        &self,
        lease: &LeaseId,
        key: Bytes,
        value: Bytes,
    ) -> Result<Option<Revision>, SourceError> {
        let range = KeyRange::One(key.clone());
        let look = Op::Range(Range::new(range.clone()));
        let txn = Txn {
            when: vec![equal(range, CompareTarget::Version(0))],
            then: vec![Op::Put(Put::new(key, value).lease(*lease))],
            otherwise: vec![look],
        };
        let done = unless_over(self.txn(txn).await, "cannot hold a key")?;
        Ok(done.and_then(|done| match done.replies.first() {
            Some(OpReply::Range(found)) => {
                let ours = found.keys.first().filter(|key| key.lease() == Some(*lease));
                ours.map(KeyValue::modified)
            }
            _ => Some(done.revision),
        }))
    }

    async fn let_go(&self, key: Bytes, made: Revision) -> Result<Option<Revision>, SourceError> {
        let range = KeyRange::One(key);
        let txn = Txn {
            when: vec![equal(range.clone(), CompareTarget::Modified(made))],
            then: vec![Op::Delete(Delete { range, previous: false })],
            otherwise: Vec::new(),
        };
        let done = self.txn(txn).await.map_err(|error| lost("cannot let go of a key", error))?;
        Ok(done.held.then_some(done.revision))
    }
}

fn equal(range: KeyRange, target: CompareTarget) -> Compare {
    Compare { range, op: CompareOp::Equal, target }
}

/// Nothing if the lease is over.
fn unless_over<T>(answer: Result<T, KvError>, what: &str) -> Result<Option<T>, SourceError> {
    match answer {
        Ok(done) => Ok(Some(done)),
        Err(KvError::LeaseNotFound(_)) => Ok(None),
        Err(error) => Err(lost(what, error)),
    }
}

fn lost(what: &str, error: KvError) -> SourceError {
    SourceError::Lost(what.into(), Some(Box::new(error)))
}
