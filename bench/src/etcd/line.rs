//! The client's side of an HTTP/2 connection: its frames, and nothing else.
//!
//! It runs on the cores of the server it measures, so what is sent is written into one buffer, and what
//! came is read out of one, whatever the number of calls.

use std::net::SocketAddr;

use anyhow::Context as _;
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use prost::Message;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes of a frame's head, and of a message's.
const HEAD: usize = 9;
const PREFIX: usize = 5;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GO_AWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
/// The end of a stream, or the answer to a SETTINGS or a PING.
const END: u8 = 1;
const END_HEADERS: u8 = 4;

const INITIAL_WINDOW_SIZE: u16 = 4;
/// What the other side may send before it is told that we have read.
const WINDOW: u32 = 1 << 30;
/// What may be sent on a stream, or a connection, before the other side says more.
pub(crate) const FIRST_WINDOW: usize = 65_535;
/// Read at once.
const CHUNK: usize = 64 << 10;
/// The first entry of HPACK's table that a connection adds itself.
const FIRST_OWN: usize = 62;

pub(crate) struct Line {
    stream: TcpStream,
    input: BytesMut,
    out: BytesMut,
    /// Fields of requests that the other side remembers, the oldest first.
    known: Vec<(&'static str, String)>,
    /// What may be sent before the other side says that it has read.
    window: usize,
    /// Read since we last said so.
    read: u32,
    next_stream: u32,
    authority: String,
}

/// What came on a stream.
pub(crate) struct Came {
    pub(crate) stream: u32,
    pub(crate) data: BytesMut,
    /// Nothing more will.
    pub(crate) is_over: bool,
}

impl Line {
    pub(crate) async fn open(address: SocketAddr) -> anyhow::Result<Self> {
        let mut stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let mut out = BytesMut::from(PREFACE);
        frame(&mut out, SETTINGS, 0, 0, 6);
        out.put_u16(INITIAL_WINDOW_SIZE);
        out.put_u32(WINDOW);
        update_window(&mut out, 0, WINDOW);
        stream.write_all_buf(&mut out).await?;
        Ok(Self {
            stream,
            input: BytesMut::with_capacity(CHUNK),
            out,
            known: Vec::new(),
            window: FIRST_WINDOW,
            read: 0,
            next_stream: 1,
            authority: address.to_string(),
        })
    }

    /// Whether so much may be sent now.
    pub(crate) fn has_room(&self, length: usize) -> bool {
        length <= self.window
    }

    /// Opens a stream.
    pub(crate) fn begin(&mut self, method: &'static str) -> u32 {
        let stream = self.next_stream;
        self.next_stream += 2;
        let at = self.out.len();
        frame(&mut self.out, HEADERS, END_HEADERS, stream, 0);
        self.out.put_slice(&[0x83, 0x86]); // a POST, over plain HTTP
        let authority = self.authority.clone();
        self.field(":authority", 1, &authority);
        self.field(":path", 4, method);
        self.field("content-type", 31, "application/grpc");
        self.field("te", 0, "trailers");
        let length = self.out.len() - at - HEAD;
        let length = u32::try_from(length).expect("fields are short").to_be_bytes();
        self.out[at..at + 3].copy_from_slice(&length[1..]);
        stream
    }

    /// Sends a message that there is room for; perhaps the last one.
    pub(crate) fn send(&mut self, stream: u32, message: &[u8], is_last: bool) {
        self.window -= message.len();
        frame(&mut self.out, DATA, if is_last { END } else { 0 }, stream, message.len());
        self.out.put_slice(message);
    }

    /// By its number if the other side knows it, else written out, and known from then on.
    fn field(&mut self, name: &'static str, index: u8, value: &str) {
        let known = self.known.iter().position(|(known, of)| *known == name && of == value);
        if let Some(known) = known {
            let number = FIRST_OWN + self.known.len() - 1 - known;
            self.out.put_u8(0x80 | u8::try_from(number).expect("there are few"));
            return;
        }
        self.out.put_u8(0x40 | index);
        if index == 0 {
            text(&mut self.out, name);
        }
        text(&mut self.out, value);
        self.known.push((name, value.to_owned()));
    }

    /// Sends what is to be sent, and waits until something comes.
    pub(crate) async fn flush_and_read(&mut self) -> anyhow::Result<()> {
        self.stream.write_all_buf(&mut self.out).await?;
        self.input.reserve(CHUNK);
        let read = self.stream.read_buf(&mut self.input).await?;
        anyhow::ensure!(read > 0, "the server hung up");
        Ok(())
    }

    /// The next of what came; what is only for the connection is seen to.
    pub(crate) fn next(&mut self) -> anyhow::Result<Option<Came>> {
        while let Some((kind, flags, stream, mut data)) = next_frame(&mut self.input) {
            match kind {
                DATA => {
                    self.read += u32::try_from(data.len())?;
                    if self.read >= WINDOW / 4 {
                        let read = std::mem::take(&mut self.read);
                        update_window(&mut self.out, 0, read);
                        // Of one that brought so much, most was its own.
                        update_window(&mut self.out, stream, read);
                    }
                }
                HEADERS => data.clear(),
                SETTINGS if flags & END == 0 => frame(&mut self.out, SETTINGS, END, 0, 0),
                PING if flags & END == 0 => {
                    frame(&mut self.out, PING, END, 0, data.len());
                    self.out.put_slice(&data);
                }
                WINDOW_UPDATE if stream == 0 => self.window += data.get_u32() as usize,
                RESET | GO_AWAY => anyhow::bail!("the server broke off: {data:?}"),
                _ => {}
            }
            if matches!(kind, DATA | HEADERS) {
                return Ok(Some(Came { stream, data, is_over: flags & END != 0 }));
            }
        }
        Ok(None)
    }
}

/// A message as it is sent, its length before it.
pub(crate) fn framed(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut framed = BytesMut::with_capacity(PREFIX + length);
    framed.put_u8(0);
    framed.put_u32(u32::try_from(length).expect("questions are small"));
    message.encode(&mut framed).expect("there is room for it");
    framed.freeze()
}

/// The first of the messages that came, if all of it has.
pub(crate) fn next_message(came: &mut BytesMut) -> Option<Bytes> {
    let (&[_, a, b, c, d], rest) = came.split_first_chunk::<PREFIX>()?;
    let length = u32::from_be_bytes([a, b, c, d]) as usize;
    if rest.len() < length {
        return None;
    }
    came.advance(PREFIX);
    Some(came.split_to(length).freeze())
}

/// The one message of an answer. When something is wrong there is none.
pub(crate) fn only_message(mut answer: BytesMut) -> anyhow::Result<Bytes> {
    let message = next_message(&mut answer).context("refused, or not whole")?;
    anyhow::ensure!(answer.is_empty(), "more than one answer");
    Ok(message)
}

fn frame(out: &mut BytesMut, kind: u8, flags: u8, stream: u32, length: usize) {
    out.put_uint(length as u64, 3);
    out.put_slice(&[kind, flags]);
    out.put_u32(stream);
}

fn update_window(out: &mut BytesMut, stream: u32, by: u32) {
    frame(out, WINDOW_UPDATE, 0, stream, 4);
    out.put_u32(by);
}

/// Without Huffman's code, and shorter than 127 bytes.
fn text(out: &mut BytesMut, text: &str) {
    out.put_u8(u8::try_from(text.len()).expect("names are short"));
    out.put_slice(text.as_bytes());
}

fn next_frame(input: &mut BytesMut) -> Option<(u8, u8, u32, BytesMut)> {
    let head: [u8; HEAD] = input.get(..HEAD)?.try_into().ok()?;
    let [a, b, c, kind, flags, stream @ ..] = head;
    let length = u32::from_be_bytes([0, a, b, c]) as usize;
    if input.len() < HEAD + length {
        return None;
    }
    input.advance(HEAD);
    let stream = u32::from_be_bytes(stream) & (u32::MAX >> 1);
    Some((kind, flags, stream, input.split_to(length)))
}
