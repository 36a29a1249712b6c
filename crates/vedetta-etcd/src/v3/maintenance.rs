//! Looking after the store, and the parts of a cluster that a single server has.

use std::io::{self, Read as _};

use bytes::Bytes;
use futures_util::stream;
use sha2::{Digest as _, Sha256};
use tonic::{Request, Response, Status};
use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{LeaseId, Range, Snapshot};

use super::lease::Answers;
use super::proto::alarm_request::AlarmAction;
use super::proto::auth_server::Auth;
use super::proto::cluster_server::Cluster;
use super::proto::maintenance_server::Maintenance;
use super::proto::{self, AlarmType, SnapshotResponse};
use super::{Api, RAFT_TERM, revision, status};
use crate::health::{Ailment, ailment};
use crate::serve::Origin;

/// Bytes of a snapshot in one message.
const SNAPSHOT_PIECE: usize = 256 << 10;
/// Keys read at once for a hash.
const HASHED_AT_ONCE: usize = 1_000;

#[tonic::async_trait]
impl Maintenance for Api {
    async fn alarm(
        &self,
        request: Request<proto::AlarmRequest>,
    ) -> Result<Response<proto::AlarmResponse>, Status> {
        let request = request.into_inner();
        let asked = AlarmType::try_from(request.alarm).unwrap_or(AlarmType::None);
        let full = match request.action() {
            AlarmAction::Activate => {
                return Err(Status::unimplemented("an alarm cannot be set by hand"));
            }
            AlarmAction::Get if matches!(asked, AlarmType::None | AlarmType::Nospace) => {
                ailment(self.store()).await == Some(Ailment::NoSpace)
            }
            // It goes when there is room, and not before.
            AlarmAction::Get | AlarmAction::Deactivate => false,
        };
        let alarms = if full { vec![self.no_space()] } else { Vec::new() };
        Ok(Response::new(proto::AlarmResponse { header: None, alarms }))
    }

    async fn status(
        &self,
        _: Request<proto::StatusRequest>,
    ) -> Result<Response<proto::StatusResponse>, Status> {
        let store = self.store().status();
        let size = i64::try_from(store.size).unwrap_or(i64::MAX);
        let errors = match ailment(self.store()).await {
            None => Vec::new(),
            // As Go prints the alarm.
            Some(Ailment::NoSpace) => {
                vec![format!("memberID:{} alarm:NOSPACE ", self.0.member_id)]
            }
            Some(Ailment::Broken(why)) => vec![why],
        };
        Ok(Response::new(proto::StatusResponse {
            header: Some(self.header(store.revision)),
            version: crate::ETCD_VERSION.into(),
            db_size: size,
            leader: self.0.member_id,
            raft_index: store.revision.0,
            raft_term: RAFT_TERM,
            raft_applied_index: store.revision.0,
            errors,
            db_size_in_use: size,
            is_learner: false,
        }))
    }

    /// Room is given back by compaction, so there is nothing to do.
    async fn defragment(
        &self,
        _: Request<proto::DefragmentRequest>,
    ) -> Result<Response<proto::DefragmentResponse>, Status> {
        Ok(Response::new(proto::DefragmentResponse::default()))
    }

    async fn hash(
        &self,
        _: Request<proto::HashRequest>,
    ) -> Result<Response<proto::HashResponse>, Status> {
        let (_, hash) = self.hash_keys(None).await?;
        Ok(Response::new(proto::HashResponse { header: Some(self.header_now()), hash }))
    }

    async fn hash_kv(
        &self,
        request: Request<proto::HashKvRequest>,
    ) -> Result<Response<proto::HashKvResponse>, Status> {
        let (current, hash) = self.hash_keys(revision(request.into_inner().revision)).await?;
        Ok(Response::new(proto::HashKvResponse {
            header: Some(self.header(current)),
            hash,
            compact_revision: self.store().status().compacted.0.cast_signed(),
        }))
    }

    type SnapshotStream = Answers<SnapshotResponse>;

    async fn snapshot(
        &self,
        _: Request<proto::SnapshotRequest>,
    ) -> Result<Response<Self::SnapshotStream>, Status> {
        let file = self.store().snapshot().await.map_err(|error| internal(&error))?;
        let left = file.size().map_err(|error| internal(&error))?;
        let start = Some(Sending { file, left, hash: Sha256::new() });
        let pieces = stream::try_unfold(start, |state| async move {
            let Some(state) = state else { return Ok(None) };
            let read = tokio::task::spawn_blocking(|| state.piece());
            let read = read.await.map_err(|error| internal(&error))?;
            read.map(Some).map_err(|error| internal(&error))
        });
        Ok(Response::new(Box::pin(pieces)))
    }
}

/// A snapshot on its way; after it goes its SHA-256, by which clients know it whole.
struct Sending {
    file: Snapshot,
    left: u64,
    hash: Sha256,
}

impl Sending {
    fn piece(mut self) -> io::Result<(SnapshotResponse, Option<Self>)> {
        let size = usize::try_from(self.left).unwrap_or(usize::MAX).min(SNAPSHOT_PIECE);
        let (blob, rest) = if size == 0 {
            (Bytes::copy_from_slice(&self.hash.finalize()), None)
        } else {
            let mut blob = vec![0; size];
            self.file.read_exact(&mut blob)?;
            self.hash.update(&blob);
            self.left -= size as u64;
            (Bytes::from(blob), Some(self))
        };
        let remaining_bytes = rest.as_ref().map_or(0, |rest| rest.left);
        Ok((SnapshotResponse { header: None, remaining_bytes, blob }, rest))
    }
}

fn internal(error: &dyn std::error::Error) -> Status {
    tracing::error!(%error, "a request failed");
    Status::internal(error.to_string())
}

impl Api {
    fn no_space(&self) -> proto::AlarmMember {
        proto::AlarmMember { member_id: self.0.member_id, alarm: AlarmType::Nospace.into() }
    }

    /// A checksum over every key as it was at a revision, and where the store was meanwhile.
    async fn hash_keys(&self, at: Option<Revision>) -> Result<(Revision, u32), Status> {
        let current = self.store().revision();
        let at = at.unwrap_or(current);
        let mut hash = crc32fast::Hasher::new();
        let mut from = Bytes::new();
        loop {
            let page = Range {
                at: Some(at),
                limit: Some(HASHED_AT_ONCE),
                uncounted: true,
                ..Range::new(KeyRange::From(from))
            };
            let page = self.store().range(page).await.map_err(status::of)?;
            for key in &page.keys {
                let lease = key.lease().map_or(0, LeaseId::get);
                hash.update(&(key.key().len() as u64).to_le_bytes());
                hash.update(key.key());
                hash.update(&(key.value().len() as u64).to_le_bytes());
                hash.update(key.value());
                let numbers = [key.created().0, key.modified().0, key.version()];
                numbers.iter().for_each(|number| hash.update(&number.to_le_bytes()));
                hash.update(&lease.to_le_bytes());
            }
            match page.keys.last() {
                // The next key there could be.
                Some(last) if page.more => from = [last.key(), &[0]].concat().into(),
                _ => return Ok((current, hash.finalize())),
            }
        }
    }
}

#[tonic::async_trait]
impl Cluster for Api {
    async fn member_list(
        &self,
        request: Request<proto::MemberListRequest>,
    ) -> Result<Response<proto::MemberListResponse>, Status> {
        let origin = request.extensions().get::<Origin>();
        let origin = origin.ok_or_else(|| Status::internal("a call of no connection"))?;
        let member = proto::Member {
            id: self.0.member_id,
            name: self.0.name.clone(),
            peer_ur_ls: Vec::new(),
            client_ur_ls: vec![format!("{}://{}", self.0.scheme, origin.local)],
            is_learner: false,
        };
        let header = Some(self.header(Revision(0)));
        Ok(Response::new(proto::MemberListResponse { header, members: vec![member] }))
    }
}

#[tonic::async_trait]
impl Auth for Api {
    async fn auth_disable(
        &self,
        _: Request<proto::AuthDisableRequest>,
    ) -> Result<Response<proto::AuthDisableResponse>, Status> {
        Ok(Response::new(proto::AuthDisableResponse { header: Some(self.header_now()) }))
    }

    async fn auth_status(
        &self,
        _: Request<proto::AuthStatusRequest>,
    ) -> Result<Response<proto::AuthStatusResponse>, Status> {
        let header = Some(self.header_now());
        Ok(Response::new(proto::AuthStatusResponse { header, ..Default::default() }))
    }

    async fn authenticate(
        &self,
        _: Request<proto::AuthenticateRequest>,
    ) -> Result<Response<proto::AuthenticateResponse>, Status> {
        Err(Status::failed_precondition(status::AUTH_DISABLED))
    }
}
