//! The v3 API: gRPC, and its JSON gateway.

use axum::Router;
use tokio_util::sync::CancellationToken;

use crate::Endpoint;

pub(crate) fn router(_endpoint: &Endpoint, _stop: &CancellationToken) -> Router {
    Router::new()
}
