use std::future::Future;
use std::time::Duration;

use bytes::Bytes;

use crate::{Revision, Source, SourceError};

/// A source in which who lives can claim keys, and loses them when it no longer says that it lives.
///
/// A lease never comes back: one that is found alive was never over. After an error each call may have
/// been done or not, and may be said again.
pub trait Registry: Source {
    /// A promise to be renewed.
    type Lease: Clone + Send + Sync + 'static;

    /// Begins a lease. It lasts for `ttl` at least, counted from no earlier than the call.
    fn begin(&self, ttl: Duration)
    -> impl Future<Output = Result<Self::Lease, SourceError>> + Send;

    /// Prolongs a lease: it lasts for its whole time again, counted from no earlier than the call.
    /// `false` when it is over, and with it whatever was held under it.
    fn renew(&self, lease: &Self::Lease) -> impl Future<Output = Result<bool, SourceError>> + Send;

    /// Ends a lease: all that is held under it is let go, in one revision.
    fn end(&self, lease: &Self::Lease) -> impl Future<Output = Result<(), SourceError>> + Send;

    /// Makes a key that goes when the lease goes. Tells when it was made, also if that was before;
    /// nothing if the key is somebody else's or the lease is over.
    fn hold(
        &self,
        lease: &Self::Lease,
        key: Bytes,
        value: Bytes,
    ) -> impl Future<Output = Result<Option<Revision>, SourceError>> + Send;

    /// Deletes a key if it is still the one that was made at this revision, and tells when; nothing if it
    /// is not. So a call that comes late, after the key was let go and held again, does no harm.
    fn let_go(
        &self,
        key: Bytes,
        made: Revision,
    ) -> impl Future<Output = Result<Option<Revision>, SourceError>> + Send;
}
