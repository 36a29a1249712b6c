//! The client of both servers: gRPC with nothing around it.
//!
//! It runs on the cores of the server it measures, so it is as light as it can be: HTTP/2 frames, the
//! length before a message, the status after it.

use std::net::SocketAddr;

use anyhow::Context as _;
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::header::{CONTENT_TYPE, TE};
use http::uri::{self, Authority, PathAndQuery, Scheme};
use http::{HeaderMap, HeaderValue, Method, Request, Uri};
use prost::Message;
use tokio::net::TcpStream;

pub(crate) const PUT: &str = "/etcdserverpb.KV/Put";
pub(crate) const RANGE: &str = "/etcdserverpb.KV/Range";
pub(crate) const TXN: &str = "/etcdserverpb.KV/Txn";
pub(crate) const GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
pub(crate) const WATCH: &str = "/etcdserverpb.Watch/Watch";
pub(crate) const ECHO: &str = "/bench.Echo/Echo";
pub(crate) const LOG: &str = "/bench.Echo/Log";

/// The length before a message, and whether it is compressed.
const PREFIX: usize = 5;

/// One connection; its clones call over the same.
#[derive(Clone)]
pub(crate) struct Connection {
    to: Authority,
    sender: SendRequest<Bytes>,
}

impl Connection {
    pub(crate) async fn open(address: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = h2::client::Builder::new()
            .initial_window_size(1 << 20)
            .initial_connection_window_size(1 << 24)
            .handshake(stream)
            .await?;
        // Ends with the last sender, or with the server; callers see that themselves.
        tokio::spawn(connection);
        Ok(Self { to: address.to_string().parse()?, sender })
    }

    /// As many as asked for.
    pub(crate) async fn open_many(address: SocketAddr, count: usize) -> anyhow::Result<Vec<Self>> {
        let mut connections = Vec::new();
        for _ in 0..count {
            connections.push(Self::open(address).await?);
        }
        Ok(connections)
    }

    /// One question and its answer.
    pub(crate) async fn call<A: Message + Default>(
        &mut self,
        method: &'static str,
        question: &impl Message,
    ) -> anyhow::Result<A> {
        let (response, mut sending) = self.request(method).await?;
        sending.send_data(frame(question), true)?;
        let (head, mut body) = response.await?.into_parts();
        let mut received = BytesMut::new();
        while let Some(data) = body.data().await {
            let data = data?;
            body.flow_control().release_capacity(data.len())?;
            received.extend_from_slice(&data);
        }
        let trailers = body.trailers().await?;
        succeeded(trailers.as_ref().unwrap_or(&head.headers)).context(method)?;
        next_message(&mut received)?.context("an answer without a message")
    }

    /// Questions and answers in no fixed order.
    pub(crate) async fn stream(&mut self, method: &'static str) -> anyhow::Result<Stream> {
        let (response, sending) = self.request(method).await?;
        Ok(Stream { sending, receiving: Receiving::Waiting(response), received: BytesMut::new() })
    }

    async fn request(
        &mut self,
        method: &'static str,
    ) -> anyhow::Result<(ResponseFuture, SendStream<Bytes>)> {
        std::future::poll_fn(|context| self.sender.poll_ready(context)).await?;
        let mut to = uri::Parts::default();
        to.scheme = Some(Scheme::HTTP);
        to.authority = Some(self.to.clone());
        to.path_and_query = Some(PathAndQuery::from_static(method));
        let mut request = Request::new(());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = Uri::from_parts(to)?;
        let headers = request.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(TE, HeaderValue::from_static("trailers"));
        Ok(self.sender.send_request(request, false)?)
    }
}

/// An open stream of messages both ways.
pub(crate) struct Stream {
    sending: SendStream<Bytes>,
    receiving: Receiving,
    received: BytesMut,
}

enum Receiving {
    /// etcd sends its headers with the first answer.
    Waiting(ResponseFuture),
    Open(RecvStream),
}

impl Stream {
    pub(crate) fn send(&mut self, question: &impl Message) -> anyhow::Result<()> {
        Ok(self.sending.send_data(frame(question), false)?)
    }

    /// The next answer.
    pub(crate) async fn next<A: Message + Default>(&mut self) -> anyhow::Result<A> {
        loop {
            if let Some(answer) = next_message(&mut self.received)? {
                return Ok(answer);
            }
            match &mut self.receiving {
                Receiving::Waiting(response) => {
                    let (head, body) = response.await?.into_parts();
                    succeeded(&head.headers)?;
                    self.receiving = Receiving::Open(body);
                }
                Receiving::Open(body) => {
                    let data = body.data().await.context("the server ended the stream")??;
                    body.flow_control().release_capacity(data.len())?;
                    self.received.extend_from_slice(&data);
                }
            }
        }
    }
}

fn frame(question: &impl Message) -> Bytes {
    let length = question.encoded_len();
    let mut frame = BytesMut::with_capacity(PREFIX + length);
    frame.put_u8(0);
    frame.put_u32(u32::try_from(length).expect("questions are small"));
    question.encode(&mut frame).expect("there is room for it");
    frame.freeze()
}

/// The first of the messages received, if all of it is here.
fn next_message<A: Message + Default>(received: &mut BytesMut) -> anyhow::Result<Option<A>> {
    let Some((&[_, a, b, c, d], rest)) = received.split_first_chunk::<PREFIX>() else {
        return Ok(None);
    };
    let length = u32::from_be_bytes([a, b, c, d]) as usize;
    if rest.len() < length {
        return Ok(None);
    }
    received.advance(PREFIX);
    Ok(Some(A::decode(received.split_to(length).freeze())?))
}

/// A stream that goes on has no status yet.
fn succeeded(headers: &HeaderMap) -> anyhow::Result<()> {
    let of = |name| headers.get(name).map_or("", |value| value.to_str().unwrap_or("?"));
    let status = of("grpc-status");
    anyhow::ensure!(
        status.is_empty() || status == "0",
        "gRPC status {status}: {}",
        of("grpc-message")
    );
    Ok(())
}
