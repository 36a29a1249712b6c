//! Leases.

use std::pin::Pin;
use std::time::Duration;

use futures_util::{Stream, stream};
use tonic::{Request, Response, Status, Streaming};
use vedetta_kv::{KvError, LeaseId};

use super::Api;
use super::proto::lease_server::Lease;
use super::proto::{self, LeaseKeepAliveResponse, LeaseStatus};
use super::status;

/// The answers of a call, one after the other.
pub(crate) type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Lease for Api {
    async fn lease_grant(
        &self,
        request: Request<proto::LeaseGrantRequest>,
    ) -> Result<Response<proto::LeaseGrantResponse>, Status> {
        let proto::LeaseGrantRequest { ttl, id } = request.into_inner();
        let ttl = ttl.max(1);
        let wished = Duration::from_secs(ttl.unsigned_abs());
        let id = self.store().grant(LeaseId::new(id), wished).await.map_err(status::of)?;
        Ok(Response::new(proto::LeaseGrantResponse {
            header: Some(self.header_now()),
            id: id.get(),
            ttl,
            error: String::new(),
        }))
    }

    async fn lease_revoke(
        &self,
        request: Request<proto::LeaseRevokeRequest>,
    ) -> Result<Response<proto::LeaseRevokeResponse>, Status> {
        let id = LeaseId::new(request.into_inner().id).ok_or_else(status::no_lease)?;
        let revision = self.store().revoke(id).await.map_err(status::of)?;
        Ok(Response::new(proto::LeaseRevokeResponse { header: Some(self.header(revision)) }))
    }

    type LeaseKeepAliveStream = Answers<LeaseKeepAliveResponse>;

    async fn lease_keep_alive(
        &self,
        request: Request<Streaming<proto::LeaseKeepAliveRequest>>,
    ) -> Result<Response<Self::LeaseKeepAliveStream>, Status> {
        let start = (self.clone(), request.into_inner());
        let answers = stream::try_unfold(start, |(api, mut requests)| async move {
            let next = tokio::select! {
                next = requests.message() => next.map_err(super::larger_than_max)?,
                () = api.0.stop.cancelled() => return Err(status::stopped()),
            };
            let Some(proto::LeaseKeepAliveRequest { id }) = next else { return Ok(None) };
            let ttl = match LeaseId::new(id) {
                Some(id) => match api.store().keep_alive(id).await {
                    Ok(ttl) => seconds(ttl),
                    Err(KvError::LeaseNotFound(_)) => 0,
                    Err(other) => return Err(status::of(other)),
                },
                None => 0,
            };
            let answer = LeaseKeepAliveResponse { header: Some(api.header_now()), id, ttl };
            Ok(Some((answer, (api, requests))))
        });
        Ok(Response::new(Box::pin(answers)))
    }

    async fn lease_time_to_live(
        &self,
        request: Request<proto::LeaseTimeToLiveRequest>,
    ) -> Result<Response<proto::LeaseTimeToLiveResponse>, Status> {
        let proto::LeaseTimeToLiveRequest { id, keys } = request.into_inner();
        let header = Some(self.header_now());
        let unknown = proto::LeaseTimeToLiveResponse { header, id, ttl: -1, ..Default::default() };
        let answer = match LeaseId::new(id).and_then(|id| self.store().lease(id)) {
            Some(lease) => proto::LeaseTimeToLiveResponse {
                ttl: seconds(lease.remaining),
                granted_ttl: seconds(lease.ttl),
                keys: if keys { lease.keys } else { Vec::new() },
                ..unknown
            },
            None => unknown,
        };
        Ok(Response::new(answer))
    }

    async fn lease_leases(
        &self,
        _: Request<proto::LeaseLeasesRequest>,
    ) -> Result<Response<proto::LeaseLeasesResponse>, Status> {
        let ids = self.store().leases().into_iter();
        let leases = ids.map(|id| LeaseStatus { id: id.get() }).collect();
        Ok(Response::new(proto::LeaseLeasesResponse { header: Some(self.header_now()), leases }))
    }
}

fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}
