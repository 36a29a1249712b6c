//! Leases in a cluster, and keys held under them.

use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use tonic::{Code, Status};
use vedetta_core::{Registry, Revision, SourceError};

use super::Cluster;
use super::line::Line;
use super::proto::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use super::proto::etcdserverpb::lease_client::LeaseClient;
use super::proto::etcdserverpb::request_op::Request;
use super::proto::etcdserverpb::response_op::Response;
use super::proto::etcdserverpb::{
    Compare, DeleteRangeRequest, LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest,
    LeaseRevokeRequest, PutRequest, RangeRequest, RequestOp, TxnRequest, TxnResponse,
};

/// Each call is answered within our [patience](Cluster::patience), or the next node's turn comes. So that
/// a lease outlives a node, it should last for several times that.
impl Registry for Cluster {
    type Lease = i64;

    async fn begin(&self, ttl: Duration) -> Result<i64, SourceError> {
        Ok(self.grant(ttl).await?.id)
    }

    async fn renew(&self, lease: &i64) -> Result<bool, SourceError> {
        let left = self.keep_alive(*lease, self.settings.patience).await?;
        Ok(left.is_some())
    }

    async fn end(&self, lease: &i64) -> Result<(), SourceError> {
        let ask = LeaseRevokeRequest { id: *lease };
        let ended = self.ask("the end of the lease", async move |line: Line| {
            let end = line.as_user(async |line| LeaseClient::new(line).lease_revoke(ask).await);
            unless_over(end.await)
        });
        ended.await.map(drop)
    }

    async fn hold(
        &self,
        lease: &i64,
        key: Bytes,
        value: Bytes,
    ) -> Result<Option<Revision>, SourceError> {
        let put = PutRequest { key: key.clone(), value, lease: *lease, ..Default::default() };
        let look = RangeRequest { key: key.clone(), ..Default::default() };
        let txn = TxnRequest {
            compare: vec![equal(key, CompareTarget::Version, TargetUnion::Version(0))],
            success: vec![RequestOp { request: Some(Request::RequestPut(put)) }],
            failure: vec![RequestOp { request: Some(Request::RequestRange(look)) }],
        };
        let done =
            self.ask("the transaction", async move |line: Line| unless_over(line.txn(txn).await));
        let Some(done) = done.await? else { return Ok(None) };
        if done.succeeded {
            return Ok(Some(revision(&done)));
        }
        let found = done.responses.into_iter().find_map(|op| match op.response {
            Some(Response::ResponseRange(found)) => found.kvs.into_iter().next(),
            _ => None,
        });
        let ours = found.filter(|found| found.lease == *lease);
        Ok(ours.map(|ours| Revision(ours.mod_revision.cast_unsigned())))
    }

    async fn let_go(&self, key: Bytes, made: Revision) -> Result<Option<Revision>, SourceError> {
        let delete = DeleteRangeRequest { key: key.clone(), ..Default::default() };
        let made = TargetUnion::ModRevision(made.0.cast_signed());
        let txn = TxnRequest {
            compare: vec![equal(key, CompareTarget::Mod, made)],
            success: vec![RequestOp { request: Some(Request::RequestDeleteRange(delete)) }],
            failure: Vec::new(),
        };
        let done = self.ask("the transaction", async move |line: Line| line.txn(txn).await).await?;
        Ok(done.succeeded.then(|| revision(&done)))
    }
}

impl Cluster {
    pub(super) async fn grant(&self, ttl: Duration) -> Result<LeaseGrantResponse, SourceError> {
        // etcd counts in seconds.
        let ttl = ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0);
        let ask = LeaseGrantRequest { ttl: i64::try_from(ttl).unwrap_or(i64::MAX), id: 0 };
        let granted = self.ask("the lease", async move |line: Line| {
            line.as_user(async |line| LeaseClient::new(line).lease_grant(ask).await).await
        });
        granted.await
    }

    /// Prolongs a lease, and tells for how long; nothing if it is over.
    pub(super) async fn keep_alive(
        &self,
        lease: i64,
        limit: Duration,
    ) -> Result<Option<Duration>, SourceError> {
        let ask = LeaseKeepAliveRequest { id: lease };
        let line = self.line_within(limit).await?;
        let answer = self.ask_on(&line, "the lease", limit, async move |line: Line| {
            let answers = line.as_user(async |line| {
                LeaseClient::new(line).lease_keep_alive(stream::iter([ask])).await
            });
            let answer = answers.await?.message().await?;
            Ok(answer.ok_or_else(|| Status::unavailable("it did not say how long it lasts"))?.ttl)
        });
        let left = u64::try_from(answer.await?).unwrap_or(0);
        Ok((left > 0).then(|| Duration::from_secs(left)))
    }
}

pub(super) fn equal(key: Bytes, target: CompareTarget, with: TargetUnion) -> Compare {
    Compare {
        result: CompareResult::Equal.into(),
        target: target.into(),
        key,
        target_union: Some(with),
        ..Default::default()
    }
}

pub(super) fn revision(done: &TxnResponse) -> Revision {
    Revision(done.header.as_ref().map_or(0, |header| header.revision).cast_unsigned())
}

/// Nothing if the lease is over.
fn unless_over<T>(answer: Result<T, Status>) -> Result<Option<T>, Status> {
    match answer {
        Err(status) if status.code() == Code::NotFound && status.message().contains("lease") => {
            Ok(None)
        }
        answer => answer.map(Some),
    }
}
