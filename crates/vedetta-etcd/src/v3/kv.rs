//! Keys: reading, writing, transactions, compaction.

use prost::Message as _;
use tonic::{Request, Response, Status};
use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{
    Compare, CompareOp, CompareTarget, Delete, Deleted, LeaseId, Op, OpReply, Order, Put, PutDone,
    PutLease, PutValue, Range, Ranged, SortBy, Txn, TxnDone,
};

use super::proto::compare::{CompareResult, CompareTarget as Target, TargetUnion};
use super::proto::kv_server::Kv;
use super::proto::range_request::{SortOrder, SortTarget};
use super::proto::{self, ResponseHeader, request_op, response_op};
use super::status::{self, invalid};
use super::wire::KeyValue;
use super::{Api, REQUEST_BYTES, key_range, revision};

impl Api {
    pub(super) async fn range_now(
        &self,
        request: proto::RangeRequest,
    ) -> Result<proto::RangeResponse, Status> {
        let ranged = self.store().range(to_range(request)?).await.map_err(status::of)?;
        let header = self.header(ranged.revision);
        Ok(from_ranged(ranged, header))
    }

    pub(super) async fn put_now(
        &self,
        request: proto::PutRequest,
    ) -> Result<proto::PutResponse, Status> {
        check_size(request.encoded_len())?;
        let done = self.store().put(to_put(request)?).await.map_err(status::of)?;
        let header = self.header(done.revision);
        Ok(from_put(done, header))
    }

    pub(super) async fn delete_now(
        &self,
        request: proto::DeleteRangeRequest,
    ) -> Result<proto::DeleteRangeResponse, Status> {
        let deleted = self.store().delete(to_delete(request)?).await.map_err(status::of)?;
        let header = self.header(deleted.revision);
        Ok(from_deleted(deleted, header))
    }

    pub(super) async fn txn_now(
        &self,
        request: proto::TxnRequest,
    ) -> Result<proto::TxnResponse, Status> {
        check_size(request.encoded_len())?;
        let done = self.store().txn(to_txn(request)?).await.map_err(status::of)?;
        let header = self.header(done.revision);
        Ok(from_txn(done, header))
    }
}

#[tonic::async_trait]
impl Kv for Api {
    async fn range(
        &self,
        request: Request<proto::RangeRequest>,
    ) -> Result<Response<proto::RangeResponse>, Status> {
        self.range_now(request.into_inner()).await.map(Response::new)
    }

    async fn put(
        &self,
        request: Request<proto::PutRequest>,
    ) -> Result<Response<proto::PutResponse>, Status> {
        self.put_now(request.into_inner()).await.map(Response::new)
    }

    async fn delete_range(
        &self,
        request: Request<proto::DeleteRangeRequest>,
    ) -> Result<Response<proto::DeleteRangeResponse>, Status> {
        self.delete_now(request.into_inner()).await.map(Response::new)
    }

    async fn txn(
        &self,
        request: Request<proto::TxnRequest>,
    ) -> Result<Response<proto::TxnResponse>, Status> {
        self.txn_now(request.into_inner()).await.map(Response::new)
    }

    async fn compact(
        &self,
        request: Request<proto::CompactionRequest>,
    ) -> Result<Response<proto::CompactionResponse>, Status> {
        let proto::CompactionRequest { revision: at, physical } = request.into_inner();
        let at = revision(at).unwrap_or(Revision(0));
        self.store().compact(at, physical).await.map_err(status::of)?;
        Ok(Response::new(proto::CompactionResponse { header: Some(self.header_now()) }))
    }
}

/// etcd measures the request as it logs it, which is a little more.
fn check_size(bytes: usize) -> Result<(), Status> {
    const LOGGED_WITH: usize = 16;
    if bytes + LOGGED_WITH > REQUEST_BYTES {
        return Err(invalid(status::TOO_LARGE));
    }
    Ok(())
}

fn check_key(key: &[u8]) -> Result<(), Status> {
    if key.is_empty() { Err(invalid(status::EMPTY_KEY)) } else { Ok(()) }
}

fn to_range(request: proto::RangeRequest) -> Result<Range, Status> {
    check_key(&request.key)?;
    let by = match SortTarget::try_from(request.sort_target) {
        Ok(SortTarget::Key) => Some(SortBy::Key),
        Ok(SortTarget::Version) => Some(SortBy::Version),
        Ok(SortTarget::Create) => Some(SortBy::Created),
        Ok(SortTarget::Mod) => Some(SortBy::Modified),
        Ok(SortTarget::Value) => Some(SortBy::Value),
        Err(_) => None,
    };
    let order = match SortOrder::try_from(request.sort_order) {
        // By key they are sorted anyway.
        Ok(SortOrder::None) if by == Some(SortBy::Key) => None,
        Ok(SortOrder::None | SortOrder::Ascend) => Some(Order::Ascending),
        Ok(SortOrder::Descend) => Some(Order::Descending),
        Err(_) => None,
    };
    // Nothing is older than revision 0, so a negative bound above leaves nothing.
    let at_most = |bound: i64| (bound != 0).then(|| revision(bound).unwrap_or(Revision(0)));
    Ok(Range {
        at: revision(request.revision),
        limit: usize::try_from(request.limit).ok().filter(|&limit| limit > 0),
        sort: by.zip(order),
        count_only: request.count_only,
        uncounted: false,
        keys_only: request.keys_only,
        min_modified: revision(request.min_mod_revision),
        max_modified: at_most(request.max_mod_revision),
        min_created: revision(request.min_create_revision),
        max_created: at_most(request.max_create_revision),
        range: key_range(request.key, request.range_end),
    })
}

fn to_put(request: proto::PutRequest) -> Result<Put, Status> {
    check_key(&request.key)?;
    if request.ignore_value && !request.value.is_empty() {
        return Err(invalid(status::VALUE_PROVIDED));
    }
    if request.ignore_lease && request.lease != 0 {
        return Err(invalid(status::LEASE_PROVIDED));
    }
    let value = if request.ignore_value { PutValue::Keep } else { PutValue::Set(request.value) };
    let lease = match LeaseId::new(request.lease) {
        _ if request.ignore_lease => PutLease::Keep,
        lease => PutLease::Set(lease),
    };
    Ok(Put { key: request.key, value, lease, previous: request.prev_kv })
}

fn to_delete(request: proto::DeleteRangeRequest) -> Result<Delete, Status> {
    check_key(&request.key)?;
    let range = key_range(request.key, request.range_end);
    Ok(Delete { range, previous: request.prev_kv })
}

/// Transactions in transactions are bounded by the decoder, which takes a hundred messages in each other.
fn to_txn(request: proto::TxnRequest) -> Result<Txn, Status> {
    let ops = |ops: Vec<proto::RequestOp>| -> Result<Vec<Op>, Status> {
        ops.into_iter().map(to_op).collect()
    };
    Ok(Txn {
        when: request.compare.into_iter().map(to_compare).collect::<Result<_, _>>()?,
        then: ops(request.success)?,
        otherwise: ops(request.failure)?,
    })
}

fn to_op(op: proto::RequestOp) -> Result<Op, Status> {
    Ok(match op.request {
        Some(request_op::Request::RequestRange(range)) => Op::Range(to_range(range)?),
        Some(request_op::Request::RequestPut(put)) => Op::Put(to_put(put)?),
        Some(request_op::Request::RequestDeleteRange(delete)) => Op::Delete(to_delete(delete)?),
        Some(request_op::Request::RequestTxn(txn)) => Op::Txn(to_txn(txn)?),
        None => return Err(invalid(status::KEY_NOT_FOUND)),
    })
}

fn to_compare(request: proto::Compare) -> Result<Compare, Status> {
    check_key(&request.key)?;
    let range = key_range(request.key, request.range_end);
    let op = match CompareResult::try_from(request.result) {
        Ok(CompareResult::Equal) => CompareOp::Equal,
        Ok(CompareResult::NotEqual) => CompareOp::NotEqual,
        Ok(CompareResult::Greater) => CompareOp::Greater,
        Ok(CompareResult::Less) => CompareOp::Less,
        // etcd lets what it does not know pass.
        Err(_) => return Ok(constant(range, true)),
    };
    // What is given for another target than the one to compare counts as nothing given.
    let union = request.target_union;
    let number = |number: i64| match u64::try_from(number) {
        Ok(number) => Ok(number),
        // All there is lies above.
        Err(_) => Err(matches!(op, CompareOp::Greater | CompareOp::NotEqual)),
    };
    let target = match (Target::try_from(request.target), union) {
        (Ok(Target::Version), Some(TargetUnion::Version(n))) => {
            number(n).map(CompareTarget::Version)
        }
        (Ok(Target::Create), Some(TargetUnion::CreateRevision(n))) => {
            number(n).map(|n| CompareTarget::Created(Revision(n)))
        }
        (Ok(Target::Mod), Some(TargetUnion::ModRevision(n))) => {
            number(n).map(|n| CompareTarget::Modified(Revision(n)))
        }
        (Ok(Target::Value), Some(TargetUnion::Value(value))) => Ok(CompareTarget::Value(value)),
        (Ok(Target::Lease), Some(TargetUnion::Lease(n))) => Ok(CompareTarget::Lease(n)),
        (Ok(Target::Version), _) => Ok(CompareTarget::Version(0)),
        (Ok(Target::Create), _) => Ok(CompareTarget::Created(Revision(0))),
        (Ok(Target::Mod), _) => Ok(CompareTarget::Modified(Revision(0))),
        (Ok(Target::Value), _) => Ok(CompareTarget::Value(bytes::Bytes::new())),
        (Ok(Target::Lease), _) => Ok(CompareTarget::Lease(0)),
        (Err(_), _) => Err(op == CompareOp::Equal),
    };
    Ok(match target {
        Ok(target) => Compare { range, op, target },
        Err(holds) => constant(range, holds),
    })
}

/// A compare that holds, or does not, whatever the key.
fn constant(range: KeyRange, holds: bool) -> Compare {
    let op = if holds { CompareOp::NotEqual } else { CompareOp::Equal };
    Compare { range, op, target: CompareTarget::Version(u64::MAX) }
}

fn from_ranged(ranged: Ranged, header: ResponseHeader) -> proto::RangeResponse {
    proto::RangeResponse {
        header: Some(header),
        kvs: ranged.keys.into_iter().map(KeyValue).collect(),
        more: ranged.more,
        count: number(ranged.count),
    }
}

fn from_put(done: PutDone, header: ResponseHeader) -> proto::PutResponse {
    proto::PutResponse { header: Some(header), prev_kv: done.previous.map(KeyValue) }
}

fn from_deleted(deleted: Deleted, header: ResponseHeader) -> proto::DeleteRangeResponse {
    proto::DeleteRangeResponse {
        header: Some(header),
        deleted: number(deleted.count),
        prev_kvs: deleted.previous.into_iter().map(KeyValue).collect(),
    }
}

/// Inside, headers say the revision only, and those of transactions nothing.
fn from_txn(done: TxnDone, header: ResponseHeader) -> proto::TxnResponse {
    let inside = |revision: Revision| ResponseHeader {
        revision: revision.0.cast_signed(),
        ..ResponseHeader::default()
    };
    let replies = done.replies.into_iter().map(|reply| {
        let response = match reply {
            OpReply::Range(ranged) => {
                let header = inside(ranged.revision);
                response_op::Response::ResponseRange(from_ranged(ranged, header))
            }
            OpReply::Put(put) => {
                let header = inside(put.revision);
                response_op::Response::ResponsePut(from_put(put, header))
            }
            OpReply::Delete(deleted) => {
                let header = inside(deleted.revision);
                response_op::Response::ResponseDeleteRange(from_deleted(deleted, header))
            }
            OpReply::Txn(txn) => {
                response_op::Response::ResponseTxn(from_txn(txn, ResponseHeader::default()))
            }
        };
        proto::ResponseOp { response: Some(response) }
    });
    proto::TxnResponse { responses: replies.collect(), header: Some(header), succeeded: done.held }
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
