//! What a command writes: the end of stderr for the error, and all of it as lines for who watches.
//!
//! Memory is bounded whatever is written, and reading never waits for anything but the command.

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use tokio::io::{AsyncRead, AsyncReadExt as _};

/// Bytes of stderr that are kept: the last ones, where the reason is.
pub(super) const KEPT: usize = 8 << 10;
/// Bytes of a line of stderr.
const LINE: usize = 4 << 10;
/// Bytes of a message beside the progress.
const MESSAGE: usize = 1 << 10;
/// Bytes of a line of stdout, which may hold the result.
const RESULT: usize = 1 << 20;

/// Is told what a command says, while it says it.
///
/// Reading goes on when it returns: one that waits stalls the command and everything else on its thread.
pub trait Watch: Sync {
    /// It has come this far, from 0 to 1. Of a message at most the first KiB is told.
    fn progress(&self, progress: f64, message: Option<&str>);

    /// It wrote this line to stderr, here without its end; what is no text is replaced. One that is longer
    /// than 4 KiB comes in pieces.
    fn log(&self, line: &str);

    /// It wrote this line to stdout, and it is no JSON object: for programs that have their own way to tell.
    fn line(&self, _line: &str) {}
}

/// Hands over what there is to read, until the end.
pub(super) async fn read(from: Option<impl AsyncRead + Unpin>, mut take: impl FnMut(&[u8])) {
    let Some(mut from) = from else { return };
    let mut piece = vec![0; 8 << 10];
    while let Ok(read @ 1..) = from.read(&mut piece).await {
        take(&piece[..read]);
    }
}

/// Reads progress and the result.
pub(super) struct Stdout<'a> {
    watch: Option<&'a dyn Watch>,
    lines: Lines,
    result: Option<Box<RawValue>>,
}

impl<'a> Stdout<'a> {
    pub(super) fn new(watch: Option<&'a dyn Watch>) -> Self {
        Self { watch, lines: Lines::new(RESULT), result: None }
    }

    pub(super) fn take(&mut self, bytes: &[u8]) {
        self.lines.take(bytes, |line, is_whole| {
            if is_whole {
                hear(line, self.watch, &mut self.result);
            }
        });
    }

    /// The last result there was.
    pub(super) fn end(mut self) -> Option<Box<RawValue>> {
        self.take(b"\n");
        self.result
    }
}

/// A line of stdout, as far as it means something. A field of the wrong type does not spoil the others.
#[derive(Deserialize)]
struct Said<'a> {
    #[serde(borrow, default, deserialize_with = "some")]
    progress: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "some")]
    message: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "some")]
    result: Option<&'a RawValue>,
}

/// `null` is a result, too.
fn some<'de, D: Deserializer<'de>>(from: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(from).map(Some)
}

fn hear(line: &[u8], watch: Option<&dyn Watch>, result: &mut Option<Box<RawValue>>) {
    let is_object = line.trim_ascii_start().starts_with(b"{"); // a list would do for the fields
    let said = is_object.then(|| serde_json::from_slice::<Said<'_>>(line));
    let Some(Ok(said)) = said else {
        if let Some(watch) = watch {
            watch.line(&String::from_utf8_lossy(line));
        }
        return;
    };
    let progress = said.progress.and_then(|json| serde_json::from_str::<f64>(json.get()).ok());
    if let (Some(watch), Some(progress)) = (watch, progress) {
        let message = said.message.and_then(|json| serde_json::from_str::<String>(json.get()).ok());
        let message = message.as_ref().map(|text| &text[..text.floor_char_boundary(MESSAGE)]);
        watch.progress(progress.clamp(0.0, 1.0), message);
    }
    if let Some(said) = said.result {
        *result = Some(said.to_owned());
    }
}

/// Keeps the last that was written and tells every line.
pub(super) struct Stderr<'a> {
    watch: Option<&'a dyn Watch>,
    lines: Lines,
    tail: Vec<u8>,
    is_cut: bool,
}

impl<'a> Stderr<'a> {
    pub(super) fn new(watch: Option<&'a dyn Watch>) -> Self {
        Self { watch, lines: Lines::new(LINE), tail: Vec::new(), is_cut: false }
    }

    pub(super) fn take(&mut self, bytes: &[u8]) {
        self.tail.extend_from_slice(bytes);
        let over = self.tail.len().saturating_sub(KEPT);
        self.is_cut |= over > 0;
        self.tail.drain(..over);
        self.tell(bytes);
    }

    fn tell(&mut self, bytes: &[u8]) {
        if let Some(watch) = self.watch {
            self.lines.take(bytes, |line, _| watch.log(&String::from_utf8_lossy(line)));
        }
    }

    /// The last that was written.
    pub(super) fn end(mut self) -> String {
        if !self.lines.held.is_empty() {
            self.tell(b"\n");
        }
        let text = String::from_utf8_lossy(&self.tail);
        let cut = if self.is_cut { "…" } else { "" };
        format!("{cut}{}", text.trim())
    }
}

/// Cuts what is written into lines without their ends, and what is longer than `limit` into pieces.
struct Lines {
    limit: usize,
    held: Vec<u8>,
    /// What is held goes on a line of which a piece was told.
    is_rest: bool,
}

impl Lines {
    fn new(limit: usize) -> Self {
        Self { limit, held: Vec::new(), is_rest: false }
    }

    /// Tells each line that ends in `bytes`, and whether it is whole.
    fn take(&mut self, mut bytes: &[u8], mut tell: impl FnMut(&[u8], bool)) {
        while !bytes.is_empty() {
            let room = bytes.len().min(self.limit - self.held.len());
            let end = bytes[..room].iter().position(|&byte| byte == b'\n');
            let (part, rest) = bytes.split_at(end.unwrap_or(room));
            self.held.extend_from_slice(part);
            bytes = rest;
            if end.is_some() {
                bytes = &bytes[1..];
                let line = self.held.strip_suffix(b"\r").unwrap_or(&self.held);
                if !(self.is_rest && line.is_empty()) {
                    tell(line, !self.is_rest);
                }
                self.held.clear();
                self.is_rest = false;
            } else if self.held.len() == self.limit {
                let cut = match str::from_utf8(&self.held) {
                    // The last character is not all there yet.
                    Err(error) if error.error_len().is_none() => error.valid_up_to(),
                    _ => self.limit,
                };
                tell(&self.held[..cut], false);
                self.held.drain(..cut);
                self.is_rest = true;
            }
        }
    }
}
