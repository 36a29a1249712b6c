//! How much memory a call takes for its bytes.
//!
//! Most messages are small. With room for one only, a call's buffers come from the allocator's quick
//! places; the usual 8 KiB, twice for every call, do not.

use std::any::TypeId;
use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{BufferSettings, Codec};
use tonic_prost::{ProstDecoder, ProstEncoder};

use super::wire::WatchResponse;

/// For one small message; what is larger makes it grow.
const SMALL: usize = 1_000;
/// For a stream that may have much to say at once.
const LARGE: usize = 16 << 10;
/// From here on what is encoded goes out, though there is more.
const ENOUGH: usize = 32 << 10;

/// The codec of all calls.
#[derive(Debug)]
pub(crate) struct SmallCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for SmallCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for SmallCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        let events = TypeId::of::<T>() == TypeId::of::<WatchResponse>();
        ProstEncoder::new(BufferSettings::new(if events { LARGE } else { SMALL }, ENOUGH))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstDecoder::new(BufferSettings::new(SMALL, ENOUGH))
    }
}
