//! The v3 API as JSON over HTTP, as etcd's gateway serves it.
//!
//! A request's JSON becomes the message, the message goes to the gRPC service as if it had come over the
//! wire, and what the service answers becomes JSON. So there is one implementation of every call.

use std::sync::LazyLock;

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Extension};
use axum::http::{HeaderMap, Request, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{any, post};
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use futures_util::stream;
use http_body_util::{BodyExt as _, Full};
use prost_reflect::prost::Message as _;
use prost_reflect::{
    DescriptorPool, DeserializeOptions, DynamicMessage, MessageDescriptor, MethodDescriptor,
    SerializeOptions,
};
use serde::Serialize;
use tonic::{Code, Status};

use super::{Grpc, MESSAGE_BYTES};
use crate::serve::Origin;

/// Where the calls are, below `/v3` and `/v3beta`.
const ROUTES: [(&str, &str); 22] = [
    ("kv/range", "KV/Range"),
    ("kv/put", "KV/Put"),
    ("kv/deleterange", "KV/DeleteRange"),
    ("kv/txn", "KV/Txn"),
    ("kv/compaction", "KV/Compact"),
    ("watch", "Watch/Watch"),
    ("lease/grant", "Lease/LeaseGrant"),
    ("lease/revoke", "Lease/LeaseRevoke"),
    ("kv/lease/revoke", "Lease/LeaseRevoke"),
    ("lease/keepalive", "Lease/LeaseKeepAlive"),
    ("lease/timetolive", "Lease/LeaseTimeToLive"),
    ("kv/lease/timetolive", "Lease/LeaseTimeToLive"),
    ("lease/leases", "Lease/LeaseLeases"),
    ("kv/lease/leases", "Lease/LeaseLeases"),
    ("cluster/member/list", "Cluster/MemberList"),
    ("maintenance/alarm", "Maintenance/Alarm"),
    ("maintenance/status", "Maintenance/Status"),
    ("maintenance/defragment", "Maintenance/Defragment"),
    ("maintenance/hash", "Maintenance/Hash"),
    ("maintenance/snapshot", "Maintenance/Snapshot"),
    ("auth/authenticate", "Auth/Authenticate"),
    ("auth/disable", "Auth/AuthDisable"),
];

pub(crate) static MESSAGES: LazyLock<DescriptorPool> = LazyLock::new(|| {
    let files = include_bytes!(concat!(env!("OUT_DIR"), "/rpc.bin"));
    DescriptorPool::decode(&files[..]).expect("it comes from the same compiler as the code")
});

pub(crate) fn router(grpc: &Grpc) -> Router {
    let services: Vec<_> = MESSAGES.services().collect();
    let find = |call: &str| {
        let (service, method) = call.split_once('/')?;
        let service = services.iter().find(|known| known.name() == service)?;
        service.methods().find(|known| known.name() == method)
    };
    let mut router = Router::new();
    for version in ["v3", "v3beta"] {
        for (path, call) in ROUTES {
            let method = find(call).expect("the table names calls of the protocol");
            let grpc = grpc.clone();
            let answer = move |Extension(origin): Extension<Origin>, body: Bytes| {
                transcode(grpc.clone(), method.clone(), origin, body)
            };
            let other = async || (StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed\n");
            router = router.route(&format!("/{version}/{path}"), post(answer).fallback(other));
        }
        let unknown = async || (StatusCode::NOT_FOUND, "Not Found\n");
        router = router.route(&format!("/{version}/{{*rest}}"), any(unknown));
    }
    // JSON is larger than what it stands for.
    router.layer(DefaultBodyLimit::max(2 * MESSAGE_BYTES))
}

async fn transcode(grpc: Grpc, method: MethodDescriptor, origin: Origin, body: Bytes) -> Response {
    let messages = match read(&method, &body) {
        Ok(messages) => messages,
        Err(status) => return refusal(&status),
    };
    let path = format!("/{}/{}", method.parent_service().full_name(), method.name());
    let request = Request::post(path)
        .header(header::CONTENT_TYPE, "application/grpc")
        .header(header::TE, "trailers")
        .extension(origin)
        .body(Full::new(messages));
    let Ok(request) = request else { return refusal(&Status::internal("not a path")) };
    let answer = grpc.call(request).await;
    if let Some(status) = failure(answer.headers()) {
        return refusal(&status);
    }
    let replies = Replies {
        body: answer.into_body(),
        received: BytesMut::new(),
        of: method.output(),
        ended: false,
    };
    if method.is_server_streaming() { stream_out(replies) } else { single(replies).await }
}

/// The messages of a request, framed for gRPC. A call takes one; a stream all, until one is not readable.
fn read(method: &MethodDescriptor, body: &[u8]) -> Result<Bytes, Status> {
    let streams = method.is_client_streaming();
    let mut framed = BytesMut::new();
    let mut values = serde_json::Deserializer::from_slice(body).into_iter::<serde_json::Value>();
    loop {
        let message = match values.next() {
            Some(value) => value.and_then(|json| {
                let options = DeserializeOptions::new().deny_unknown_fields(false);
                DynamicMessage::deserialize_with_options(method.input(), json, &options)
            }),
            None if streams || !framed.is_empty() => break,
            None => Ok(DynamicMessage::new(method.input())),
        };
        match message {
            Ok(message) => frame(&message, &mut framed),
            Err(_) if !framed.is_empty() => break,
            Err(error) => return Err(unreadable(&error, streams)),
        }
        if !streams {
            break;
        }
    }
    Ok(framed.freeze())
}

fn unreadable(error: &serde_json::Error, streams: bool) -> Status {
    let text = if error.is_eof() { "unexpected EOF".into() } else { error.to_string() };
    Status::new(if streams { Code::Unknown } else { Code::InvalidArgument }, text)
}

/// Bytes before each message: whether it is compressed, and its length.
const PREFIX: usize = 5;

fn frame(message: &DynamicMessage, framed: &mut BytesMut) {
    let length = message.encoded_len();
    framed.reserve(PREFIX + length);
    framed.put_u8(0);
    framed.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    message.encode_raw(framed);
}

/// What a service answers, message by message.
struct Replies {
    body: tonic::body::Body,
    received: BytesMut,
    of: MessageDescriptor,
    ended: bool,
}

impl Replies {
    /// The next message as JSON; `None` after the last.
    async fn next(&mut self) -> Result<Option<Vec<u8>>, Status> {
        while !self.ended {
            if let Some(message) = self.take() {
                return to_json(&self.of, message).map(Some);
            }
            let Some(frame) = self.body.frame().await else { break };
            let frame = frame.map_err(|error| Status::internal(error.to_string()))?;
            match frame.into_data() {
                Ok(data) => self.received.extend_from_slice(&data),
                Err(frame) => {
                    self.ended = true;
                    if let Some(status) = frame.trailers_ref().and_then(failure) {
                        return Err(status);
                    }
                }
            }
        }
        Ok(None)
    }

    fn take(&mut self) -> Option<Bytes> {
        let mut prefix = self.received.get(1..PREFIX)?;
        let length = prefix.get_u32() as usize;
        if self.received.len() < PREFIX + length {
            return None;
        }
        self.received.advance(PREFIX);
        Some(self.received.split_to(length).freeze())
    }
}

fn to_json(of: &MessageDescriptor, message: Bytes) -> Result<Vec<u8>, Status> {
    let message = DynamicMessage::decode(of.clone(), message)
        .map_err(|error| Status::internal(error.to_string()))?;
    let options = SerializeOptions::new().use_proto_field_name(true);
    let mut json = serde_json::Serializer::new(Vec::new());
    match message.serialize_with_options(&mut json, &options) {
        Ok(()) => Ok(json.into_inner()),
        Err(error) => Err(Status::internal(error.to_string())),
    }
}

async fn single(mut replies: Replies) -> Response {
    match replies.next().await {
        Ok(Some(json)) => in_json(StatusCode::OK, json),
        Ok(None) => refusal(&Status::internal("there was no answer")),
        Err(status) => refusal(&status),
    }
}

/// `{"result": …}` line by line; what goes wrong later can only be said as another line.
fn stream_out(replies: Replies) -> Response {
    let lines = stream::unfold(Some(replies), |replies| async {
        let mut replies = replies?;
        let (line, rest) = match replies.next().await {
            Ok(Some(json)) => {
                let mut line = Vec::with_capacity(json.len() + 12);
                line.extend_from_slice(b"{\"result\":");
                line.extend_from_slice(&json);
                line.extend_from_slice(b"}\n");
                (line, Some(replies))
            }
            Ok(None) => return None,
            Err(status) => (broken(&status), None),
        };
        Some((Ok::<_, std::convert::Infallible>(line), rest))
    });
    in_json(StatusCode::OK, Body::from_stream(lines))
}

/// The status in headers or trailers, when it is not "ok".
fn failure(headers: &HeaderMap) -> Option<Status> {
    Status::from_header_map(headers).filter(|status| status.code() != Code::Ok)
}

#[derive(Serialize)]
struct Refusal<'a> {
    error: &'a str,
    message: &'a str,
    code: i32,
}

/// An error as etcd's gateway tells it.
pub(crate) fn refusal(status: &Status) -> Response {
    let (text, code) = (status.message(), i32::from(status.code()));
    let body = serde_json::to_vec(&Refusal { error: text, message: text, code });
    in_json(http_status(status.code()), body.unwrap_or_default())
}

#[derive(Serialize)]
struct Broken<'a> {
    error: BrokenBy<'a>,
}

#[derive(Serialize)]
struct BrokenBy<'a> {
    grpc_code: i32,
    http_code: u16,
    message: &'a str,
    http_status: &'a str,
}

fn broken(status: &Status) -> Vec<u8> {
    let http = http_status(status.code());
    let error = BrokenBy {
        grpc_code: status.code().into(),
        http_code: http.as_u16(),
        message: status.message(),
        http_status: http.canonical_reason().unwrap_or_default(),
    };
    let mut line = serde_json::to_vec(&Broken { error }).unwrap_or_default();
    line.push(b'\n');
    line
}

fn in_json(status: StatusCode, body: impl Into<Body>) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body.into()).into_response()
}

/// The HTTP status for a gRPC code, as the gateway maps them.
fn http_status(code: Code) -> StatusCode {
    match code {
        Code::Ok => StatusCode::OK,
        Code::Cancelled => StatusCode::REQUEST_TIMEOUT,
        Code::InvalidArgument | Code::OutOfRange => StatusCode::BAD_REQUEST,
        Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::AlreadyExists | Code::Aborted => StatusCode::CONFLICT,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        Code::FailedPrecondition => StatusCode::PRECONDITION_FAILED,
        Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::Unknown | Code::Internal | Code::DataLoss => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
