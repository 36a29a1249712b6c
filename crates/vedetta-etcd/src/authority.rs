//! Reading from clients of etcd that give a URL where HTTP/2 wants a host.
//!
//! The Go client of etcd 3.4 sends `:authority: http://127.0.0.1:2379` for calls to one member, such as
//! `etcdctl endpoint status`, and that of 3.5.0 sends worse with every call. Go's server does not mind; the
//! one here refuses such requests as malformed before we see them. So the name is put right on its way in:
//!
//! ```text
//!  preface, SETTINGS, … ──► HEADERS ──► name is fine: all else passes untouched
//!                              └──────► name is not: put right here and in every HEADERS to come
//! ```
//!
//! Only the one string is replaced, where it stands written out. The entry that it makes in the table of
//! HPACK is smaller than the client's, so that table may remember longer than the client's does, which harms
//! nobody: entries are counted from the newest.

use std::io::{self, IoSlice};
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::http::uri::Authority;
use bytes::{Buf as _, BufMut as _, BytesMut};
use httlib_huffman::DecoderSpeed;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The name for those that have none, with its length.
const NAME: &[u8] = b"\x09localhost";
/// Bytes of the preface, and of the head of a frame.
const PREFACE: usize = 24;
const FRAME: usize = 9;
/// The largest frame a client may send unless told otherwise; whoever sends larger ones is refused later.
const LARGEST: usize = 16 << 10;
const HEADERS: u8 = 1;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// An HTTP/2 connection whose names are put right.
pub(crate) struct Renamed<S> {
    stream: S,
    reading: Reading,
    /// Came in, not looked at.
    raw: BytesMut,
    /// May be read.
    ready: BytesMut,
}

enum Reading {
    /// What every connection begins with.
    Preface,
    /// Frames, until the first name is known to be fine.
    Frames,
    /// Nothing to look for any more.
    Passing,
}

impl<S> Renamed<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, reading: Reading::Preface, raw: BytesMut::new(), ready: BytesMut::new() }
    }

    /// Looks at what came in as far as it is complete.
    fn advance(&mut self) {
        if matches!(self.reading, Reading::Preface) && self.raw.len() >= PREFACE {
            self.ready.unsplit(self.raw.split_to(PREFACE));
            self.reading = Reading::Frames;
        }
        while matches!(self.reading, Reading::Frames) && self.raw.len() >= FRAME {
            let size = usize::from(self.raw[0]) << 16
                | usize::from(self.raw[1]) << 8
                | usize::from(self.raw[2]);
            let (kind, flags) = (self.raw[3], self.raw[4]);
            if size > LARGEST {
                self.reading = Reading::Passing;
                break;
            }
            if self.raw.len() < FRAME + size {
                return;
            }
            let frame = self.raw.split_to(FRAME + size);
            if kind != HEADERS {
                self.ready.unsplit(frame);
                continue;
            }
            match name(&frame, flags) {
                Name::Wrong(place) => self.rename(&frame, place),
                Name::Right => {
                    self.ready.unsplit(frame);
                    self.reading = Reading::Passing;
                }
                Name::Elsewhere => self.ready.unsplit(frame),
            }
        }
        if matches!(self.reading, Reading::Passing) {
            self.ready.unsplit(self.raw.split());
        }
    }

    /// Takes over a frame with another name in `place`.
    fn rename(&mut self, frame: &[u8], place: Range<usize>) {
        let size = frame.len() - FRAME - place.len() + NAME.len();
        self.ready.put_uint(size as u64, 3);
        self.ready.extend_from_slice(&frame[3..place.start]);
        self.ready.extend_from_slice(NAME);
        self.ready.extend_from_slice(&frame[place.end..]);
    }
}

/// What a HEADERS frame says of the name.
enum Name {
    Right,
    /// It is at this place, length included.
    Wrong(Range<usize>),
    /// It was written out in an earlier frame, or there is none.
    Elsewhere,
}

fn name(frame: &[u8], flags: u8) -> Name {
    let mut at = FRAME;
    at += usize::from(flags & PADDED != 0);
    at += if flags & PRIORITY == 0 { 0 } else { 5 };
    find(frame, at).unwrap_or(Name::Elsewhere)
}

/// Walks over the fields of a block. `None` when there is nothing to find, or it is not readable; then the
/// one who reads it in earnest will say so.
fn find(frame: &[u8], mut at: usize) -> Option<Name> {
    loop {
        let first = *frame.get(at)?;
        let (bits, is_literal) = match first {
            0x80.. => (7, false),
            0x40.. => (6, true),
            0x20.. => (5, false),
            _ => (4, true),
        };
        let (index, next) = number(frame, at, bits)?;
        at = next;
        if !is_literal {
            continue;
        }
        if index == 0 {
            at = string(frame, at)?.end;
        }
        let value = string(frame, at)?;
        // The first entry of the static table.
        if index == 1 {
            return Some(if is_fine(frame, value.clone())? {
                Name::Right
            } else {
                Name::Wrong(value)
            });
        }
        at = value.end;
    }
}

fn is_fine(frame: &[u8], value: Range<usize>) -> Option<bool> {
    let (_, start) = number(frame, value.start, 7)?;
    let text = &frame[start..value.end];
    if frame[value.start] & 0x80 == 0 {
        return Some(Authority::try_from(text).is_ok());
    }
    let mut plain = Vec::new();
    httlib_huffman::decode(text, &mut plain, DecoderSpeed::FourBits).ok()?;
    Some(Authority::try_from(&plain[..]).is_ok())
}

/// Where a string is, its length included.
fn string(frame: &[u8], at: usize) -> Option<Range<usize>> {
    let (length, start) = number(frame, at, 7)?;
    let end = start.checked_add(length)?;
    (end <= frame.len()).then_some(at..end)
}

/// A number whose first byte has `bits` for it, and what comes after it.
fn number(frame: &[u8], mut at: usize, bits: u32) -> Option<(usize, usize)> {
    let most = (1 << bits) - 1;
    let mut number = usize::from(*frame.get(at)?) & most;
    at += 1;
    if number < most {
        return Some((number, at));
    }
    for shift in [0, 7, 14] {
        let byte = *frame.get(at)?;
        at += 1;
        number += usize::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some((number, at));
        }
    }
    None
}

impl<S: AsyncRead + Unpin> AsyncRead for Renamed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if !this.ready.is_empty() {
                let size = this.ready.len().min(buffer.remaining());
                buffer.put_slice(&this.ready[..size]);
                this.ready.advance(size);
                return Poll::Ready(Ok(()));
            }
            if matches!(this.reading, Reading::Passing) {
                return Pin::new(&mut this.stream).poll_read(cx, buffer);
            }
            let mut chunk = [0; 4096];
            let mut chunk = ReadBuf::new(&mut chunk);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut chunk))?;
            this.raw.extend_from_slice(chunk.filled());
            if chunk.filled().is_empty() {
                // It ended in the middle of something.
                this.reading = Reading::Passing;
            }
            this.advance();
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Renamed<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;

    use super::*;

    const BEGIN: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

    /// A HEADERS frame with `:method: POST`, an authority, and `:path: /`.
    fn headers(authority: &[u8]) -> Vec<u8> {
        let block = [&[0x83, 0x41], authority, &[0x84]].concat();
        let size = u8::try_from(block.len()).unwrap();
        [&[0, 0, size, HEADERS, 0x4, 0, 0, 0, 1], &block[..]].concat()
    }

    fn plain(authority: &str) -> Vec<u8> {
        [&[u8::try_from(authority.len()).unwrap()], authority.as_bytes()].concat()
    }

    fn huffman(authority: &str) -> Vec<u8> {
        let mut coded = Vec::new();
        httlib_huffman::encode(authority.as_bytes(), &mut coded).unwrap();
        [&[0x80 | u8::try_from(coded.len()).unwrap()], &coded[..]].concat()
    }

    #[tokio::test]
    async fn a_url_becomes_a_name_and_all_else_stays_as_it_is() {
        let fine = plain("localhost");
        for (authority, becomes) in [
            (plain("127.0.0.1:2379"), plain("127.0.0.1:2379")),
            (huffman("etcd.example:2379"), huffman("etcd.example:2379")),
            (plain("http://127.0.0.1:2379"), fine.clone()),
            (huffman("http://127.0.0.1:2379"), fine.clone()),
            (huffman("#initially=[127.0.0.1:2379]"), fine.clone()),
        ] {
            let data = b"\0\0\x02\0\0\0\0\0\x01hi";
            let sent = [BEGIN, &headers(&authority), data, &headers(&authority), b"\0\0"].concat();
            let want = [BEGIN, &headers(&becomes), data, &headers(&becomes), b"\0\0"].concat();
            for piece in [1, 7, sent.len()] {
                let (mut client, server) = tokio::io::duplex(piece);
                let write = async {
                    tokio::io::AsyncWriteExt::write_all(&mut client, &sent).await.unwrap();
                    drop(client);
                };
                let mut got = Vec::new();
                let mut renamed = Renamed::new(server);
                let ((), read) = tokio::join!(write, renamed.read_to_end(&mut got));
                read.unwrap();
                assert_eq!(got, want, "{authority:?} in pieces of {piece}");
            }
        }
    }

    #[test]
    fn nonsense_is_left_for_others_to_refuse() {
        for block in
            [&[][..], &[0x41], &[0x41, 0x7f, 0xff, 0xff, 0xff], &[0x41, 5, b'a'], &[0xff; 9]]
        {
            let frame = [&[0; FRAME], block].concat();
            assert!(matches!(name(&frame, 0), Name::Elsewhere), "{block:?}");
            assert!(matches!(name(&frame, PADDED | PRIORITY), Name::Elsewhere), "{block:?}");
        }
    }
}
