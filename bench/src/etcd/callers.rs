//! Callers that share a connection, each asking again when it is answered.
//!
//! They run on the cores of the server they measure, so there is nothing here but the frames of HTTP/2:
//! no task for a caller, one read for all answers that came, one write for all questions they lead to.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

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
/// The first entry of HPACK's table that a connection adds itself.
const FIRST_OWN: usize = 62;

/// What a caller asks, and what it needs to see in the answer.
pub(crate) struct Question {
    pub(crate) method: &'static str,
    pub(crate) message: Bytes,
    pub(crate) check: fn(Bytes) -> anyhow::Result<()>,
}

impl Question {
    pub(crate) fn new(
        method: &'static str,
        question: &impl Message,
        check: fn(Bytes) -> anyhow::Result<()>,
    ) -> Self {
        let length = question.encoded_len();
        let mut message = BytesMut::with_capacity(PREFIX + length);
        message.put_u8(0);
        message.put_u32(u32::try_from(length).expect("questions are small"));
        question.encode(&mut message).expect("there is room for it");
        Self { method, message: message.freeze(), check }
    }
}

/// A connection and its callers.
pub(crate) struct Callers {
    stream: TcpStream,
    out: BytesMut,
    /// Fields of requests that the other side remembers, the oldest first.
    known: Vec<(&'static str, String)>,
    /// What may be sent before the other side says that it has read.
    window: u64,
    /// Read since we last said so.
    read: u32,
    next_stream: u32,
    asked: HashMap<u32, Asked>,
    /// Not sent yet, for want of room.
    held: VecDeque<Question>,
    authority: String,
}

struct Asked {
    at: Instant,
    answer: BytesMut,
    check: fn(Bytes) -> anyhow::Result<()>,
}

impl Callers {
    pub(crate) async fn open(address: SocketAddr) -> anyhow::Result<Self> {
        let mut stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let mut out = BytesMut::from(PREFACE);
        frame(&mut out, SETTINGS, 0, 0, 6);
        out.put_u16(INITIAL_WINDOW_SIZE);
        out.put_u32(WINDOW);
        update_window(&mut out, WINDOW);
        stream.write_all_buf(&mut out).await?;
        Ok(Self {
            stream,
            out,
            known: Vec::new(),
            window: 65_535,
            read: 0,
            next_stream: 1,
            asked: HashMap::new(),
            held: VecDeque::new(),
            authority: address.to_string(),
        })
    }

    /// Has so many callers ask until `end`. How long each answer took that came after `begin`.
    pub(crate) async fn run(
        mut self,
        callers: usize,
        mut question: impl FnMut() -> Question,
        begin: Instant,
        end: Instant,
    ) -> anyhow::Result<Vec<Duration>> {
        let mut took = Vec::new();
        (0..callers).for_each(|_| self.held.push_back(question()));
        let mut input = BytesMut::with_capacity(64 << 10);
        while !self.held.is_empty() || !self.asked.is_empty() {
            self.send_held();
            self.stream.write_all_buf(&mut self.out).await?;
            let read = self.stream.read_buf(&mut input).await?;
            anyhow::ensure!(read > 0, "the server hung up");
            while let Some((kind, flags, stream, payload)) = next_frame(&mut input) {
                if let Some(asked) = self.take(kind, flags, stream, payload)? {
                    let now = Instant::now();
                    if now >= begin && now <= end {
                        took.push(now - asked.at);
                    }
                    (asked.check)(message(asked.answer)?)?;
                    if now < end {
                        self.held.push_back(question());
                    }
                }
            }
            input.reserve(64 << 10);
        }
        Ok(took)
    }

    fn send_held(&mut self) {
        while let Some(question) = self.held.front()
            && question.message.len() as u64 <= self.window
            && let Some(question) = self.held.pop_front()
        {
            let Question { method, message, check } = question;
            self.window -= message.len() as u64;
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
            frame(&mut self.out, DATA, END, stream, message.len());
            self.out.put_slice(&message);
            let asked = Asked { at: Instant::now(), answer: BytesMut::new(), check };
            self.asked.insert(stream, asked);
        }
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

    /// What a frame says; a call that is answered with it.
    fn take(
        &mut self,
        kind: u8,
        flags: u8,
        stream: u32,
        mut payload: BytesMut,
    ) -> anyhow::Result<Option<Asked>> {
        match kind {
            DATA => {
                self.read += u32::try_from(payload.len())?;
                if self.read >= WINDOW / 4 {
                    update_window(&mut self.out, std::mem::take(&mut self.read));
                }
                let asked = self.asked.get_mut(&stream).context("an answer to nothing")?;
                asked.answer.unsplit(payload);
            }
            SETTINGS if flags & END == 0 => frame(&mut self.out, SETTINGS, END, 0, 0),
            PING if flags & END == 0 => {
                frame(&mut self.out, PING, END, 0, payload.len());
                self.out.put_slice(&payload);
            }
            WINDOW_UPDATE if stream == 0 => self.window += u64::from(payload.get_u32()),
            RESET | GO_AWAY => anyhow::bail!("the server broke off: {payload:?}"),
            _ => {}
        }
        let is_over = matches!(kind, DATA | HEADERS) && flags & END != 0;
        Ok(if is_over { self.asked.remove(&stream) } else { None })
    }
}

/// The one message of an answer. When something is wrong there is none.
fn message(mut answer: BytesMut) -> anyhow::Result<Bytes> {
    let length = answer.get(1..PREFIX).map(|mut length| length.get_u32() as usize);
    anyhow::ensure!(length == answer.len().checked_sub(PREFIX), "refused, or not whole");
    answer.advance(PREFIX);
    Ok(answer.freeze())
}

fn frame(out: &mut BytesMut, kind: u8, flags: u8, stream: u32, length: usize) {
    out.put_uint(length as u64, 3);
    out.put_slice(&[kind, flags]);
    out.put_u32(stream);
}

fn update_window(out: &mut BytesMut, by: u32) {
    frame(out, WINDOW_UPDATE, 0, 0, 4);
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
