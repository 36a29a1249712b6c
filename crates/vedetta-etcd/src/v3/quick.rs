//! The calls that clients make most, answered without what gRPC has for all others.
//!
//! One message in, one message out, nothing compressed: then a call is a message, what the store says, and
//! a message. Whatever is not so simple is left to the services.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderValue, Request, Response};
use bytes::{BufMut as _, Bytes, BytesMut};
use http_body::{Body, Frame};
use prost::Message;
use tonic::Status;

use super::{Api, MESSAGE_BYTES};
use crate::upload::{PREFIX, Upload};

/// How a message may be compressed.
const ENCODING: &str = "grpc-encoding";

/// Which call it is, if it may be one of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Quick {
    Range,
    Put,
    DeleteRange,
    Txn,
}

impl Quick {
    pub(crate) fn of<B>(request: &Request<B>) -> Option<Self> {
        let call = match request.uri().path() {
            "/etcdserverpb.KV/Range" => Self::Range,
            "/etcdserverpb.KV/Put" => Self::Put,
            "/etcdserverpb.KV/DeleteRange" => Self::DeleteRange,
            "/etcdserverpb.KV/Txn" => Self::Txn,
            _ => return None,
        };
        let is_plain = request.method() == axum::http::Method::POST
            && !request.headers().contains_key(ENCODING);
        is_plain.then_some(call)
    }

    /// The answer, unless this is for the services.
    pub(crate) async fn answer(self, api: &Api, body: &mut Upload) -> Option<Response<Reply>> {
        let message = body.message(MESSAGE_BYTES).await?;
        Some(match self {
            Self::Range => reply(api.range_now(decode(message)?).await),
            Self::Put => reply(api.put_now(decode(message)?).await),
            Self::DeleteRange => reply(api.delete_now(decode(message)?).await),
            Self::Txn => reply(api.txn_now(decode(message)?).await),
        })
    }
}

/// What cannot be read is refused by the services, in their words.
fn decode<M: Message + Default>(message: Bytes) -> Option<M> {
    M::decode(message).ok()
}

fn reply(answer: Result<impl Message, Status>) -> Response<Reply> {
    let message = match answer {
        Ok(message) => message,
        Err(status) => return status.into_http().map(Reply::Other),
    };
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX + length);
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    message.encode_raw(&mut bytes);
    let mut response = Response::new(Reply::Message(bytes.freeze()));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

/// The body of an answer.
pub(crate) enum Reply {
    /// A message, and that all went well.
    Message(Bytes),
    /// That all went well.
    Well,
    /// Nothing more.
    Over,
    /// What the services say.
    Other(tonic::body::Body),
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let (frame, rest) = match &mut *self {
            Self::Message(message) => (Frame::data(std::mem::take(message)), Self::Well),
            Self::Well => {
                let mut status = HeaderMap::with_capacity(1);
                status.insert(Status::GRPC_STATUS, HeaderValue::from_static("0"));
                (Frame::trailers(status), Self::Over)
            }
            Self::Over => return Poll::Ready(None),
            Self::Other(body) => return Pin::new(body).poll_frame(cx),
        };
        *self = rest;
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Message(_) | Self::Well => false,
            Self::Over => true,
            Self::Other(body) => body.is_end_stream(),
        }
    }
}
