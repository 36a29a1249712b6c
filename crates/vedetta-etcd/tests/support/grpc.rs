//! A client for gRPC that knows the messages only by their description.

use std::net::SocketAddr;
use std::sync::LazyLock;

use bytes::{Buf, BufMut, Bytes};
use futures_util::stream;
use prost::Message as _;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor, Value};
use tokio::sync::mpsc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};

static POOL: LazyLock<DescriptorPool> = LazyLock::new(|| {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/proto");
    let files = protox::compile(["rpc.proto"], [folder]).expect("the messages compile");
    DescriptorPool::from_file_descriptor_set(files).expect("the messages are complete")
});

/// A message by its name, such as `RangeRequest`.
pub(crate) fn message(name: &str) -> MessageDescriptor {
    let name = format!("etcdserverpb.{name}");
    POOL.get_message_by_name(&name).unwrap_or_else(|| panic!("no message {name}"))
}

/// What a call such as `KV/Range` takes and gives.
fn call(path: &str) -> (MessageDescriptor, MessageDescriptor) {
    let (service, method) = path.split_once('/').expect("a service and a method");
    let service = POOL.get_service_by_name(&format!("etcdserverpb.{service}"));
    let method = service.and_then(|service| service.methods().find(|known| known.name() == method));
    let method = method.unwrap_or_else(|| panic!("no call {path}"));
    (method.input(), method.output())
}

/// A step of a transaction that reads a key.
pub(crate) fn reading(key: &str) -> Value {
    let mut range = DynamicMessage::new(message("RangeRequest"));
    range.set_field_by_name("key", Value::Bytes(key.to_owned().into()));
    let mut op = DynamicMessage::new(message("RequestOp"));
    op.set_field_by_name("request_range", Value::Message(range));
    Value::Message(op)
}

/// An empty request of a call.
pub(crate) fn request(path: &str) -> DynamicMessage {
    DynamicMessage::new(call(path).0)
}

/// Messages as they are on the wire.
#[derive(Clone, Default)]
pub(crate) struct Plain;

impl Codec for Plain {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Plain {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        into.put(item);
        Ok(())
    }
}

impl Decoder for Plain {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

/// A connection.
#[derive(Clone)]
pub(crate) struct Client {
    grpc: tonic::client::Grpc<Channel>,
}

/// A stream of requests and one of answers.
pub(crate) struct Line {
    pub(crate) requests: mpsc::Sender<Bytes>,
    answers: Streaming<Bytes>,
    output: MessageDescriptor,
}

impl Client {
    pub(crate) async fn connect(address: SocketAddr) -> Result<Self, tonic::transport::Error> {
        let channel = Endpoint::from_shared(format!("http://{address}"))?.connect().await?;
        let most = 64 << 20;
        let grpc = tonic::client::Grpc::new(channel)
            .max_decoding_message_size(most)
            .max_encoding_message_size(most);
        Ok(Self { grpc })
    }

    /// A call of etcd's; one of another package is given as it is, from its slash on.
    fn path(path: &str) -> PathAndQuery {
        let whole =
            if path.starts_with('/') { path.into() } else { format!("/etcdserverpb.{path}") };
        whole.parse().expect("a path")
    }

    /// One request, one answer.
    pub(crate) async fn unary(
        &mut self,
        path: &str,
        request: &DynamicMessage,
    ) -> Result<DynamicMessage, Status> {
        let answer = self.plain(path, request.encode_to_vec().into()).await?;
        decode(&call(path).1, answer)
    }

    /// One request, one answer, both as they are on the wire.
    pub(crate) async fn plain(&mut self, path: &str, request: Bytes) -> Result<Bytes, Status> {
        self.grpc
            .ready()
            .await
            .map_err(|broken| Status::unknown(format!("not ready: {broken}")))?;
        let answer = self.grpc.unary(Request::new(request), Self::path(path), Plain).await?;
        Ok(answer.into_inner())
    }

    /// A stream each way, opened by its first request.
    pub(crate) async fn line(
        &mut self,
        path: &str,
        first: &DynamicMessage,
    ) -> Result<Line, Status> {
        self.grpc
            .ready()
            .await
            .map_err(|broken| Status::unknown(format!("not ready: {broken}")))?;
        let (requests, receiver) = mpsc::channel(64);
        requests.send(first.encode_to_vec().into()).await.expect("the receiver is here");
        let requested = stream::unfold(receiver, async |mut receiver: mpsc::Receiver<Bytes>| {
            Some((receiver.recv().await?, receiver))
        });
        let answers = self
            .grpc
            .streaming(Request::new(requested), Self::path(path), Plain)
            .await?
            .into_inner();
        Ok(Line { requests, answers, output: call(path).1 })
    }
}

impl Line {
    pub(crate) async fn send(&self, request: &DynamicMessage) {
        // A line that has ended is seen when its answers are read.
        let _ = self.requests.send(request.encode_to_vec().into()).await;
    }

    /// The next answer; `None` at the end.
    pub(crate) async fn next(&mut self) -> Result<Option<DynamicMessage>, Status> {
        let answer = self.answers.message().await?;
        answer.map(|answer| decode(&self.output, answer)).transpose()
    }
}

fn decode(descriptor: &MessageDescriptor, bytes: Bytes) -> Result<DynamicMessage, Status> {
    DynamicMessage::decode(descriptor.clone(), bytes)
        .map_err(|bad| Status::data_loss(format!("not a {}: {bad}", descriptor.name())))
}
