//! A watcher without Rust: for each id that changed it runs a command.
//!
//! ```text
//! /rooms/7/livemeta = {"on": true}  ──┐
//! /rooms/7/title    = Jazz            ├──► {"id": "7", "state": {"livemeta": {"on": true}, "title": "Jazz"}}
//! nothing under /rooms/7/             └──► {"id": "7", "state": null}               on the command's stdin
//! ```
//!
//! A value that is JSON stays what it is, other text becomes a string, and other bytes `{"base64": …}`; an
//! id that is no text likewise.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::{BufMut as _, Bytes, BytesMut};
use serde::{Serialize, Serializer};
use serde_json::value::{RawValue, to_raw_value};
use vedetta_core::{Changes, Feed, KeyRange, Page, Revision, Source, SourceError};

use crate::command::Command;
use crate::watcher::{BoxError, Effect, Id, Next, Reconcile, State, Watcher, Watching};

/// A command that brings ids about.
#[derive(Debug, Clone)]
pub struct Declared {
    /// What the command knows the watcher by, as `VEDETTA_WATCHER`.
    pub name: String,
    /// What to run. It is also told the id as `VEDETTA_ID`, if that can be a variable.
    pub command: Command,
    /// Key types that the command is shown and that do not make it run. Those that it writes itself are
    /// such: else each write after a failure would begin the waits anew.
    pub quiet: HashSet<String>,
}

impl Declared {
    /// Starts it. The limit of a run is the command's own, which waits until it has really ended.
    pub fn start<S: Source>(self, watcher: Watcher, source: S) -> Watching<Keys> {
        let Self { name, command, quiet } = self;
        let command = command.variable("VEDETTA_WATCHER", &name);
        watcher.timeout(None).start(Marked { source, quiet: quiet.into() }, Runs { name, command })
    }
}

/// The values of an id, by key type.
#[derive(Debug, Clone, Default)]
pub struct Keys(BTreeMap<Box<str>, Part>);

#[derive(Debug, Clone)]
struct Part {
    json: Arc<RawValue>,
    is_quiet: bool,
}

/// As the command gets it: key types and their values.
impl Serialize for Keys {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key_type, part)| (key_type, &*part.json)))
    }
}

impl State for Keys {
    fn apply(&mut self, key_type: &str, value: Option<&[u8]>) -> Result<Effect, BoxError> {
        let is_quiet = match value {
            Some(marked) => {
                let (mark, value) = marked.split_first().ok_or("a value without its mark")?;
                let is_quiet = *mark == QUIET;
                let json = as_json(value)?.into();
                self.0.insert(key_type.into(), Part { json, is_quiet });
                is_quiet
            }
            None => self.0.remove(key_type).is_some_and(|part| part.is_quiet),
        };
        Ok(if is_quiet { Effect::Quiet } else { Effect::Wanted })
    }
}

fn as_json(bytes: &[u8]) -> serde_json::Result<Box<RawValue>> {
    serde_json::from_slice(bytes).or_else(|_| to_raw_value(&Text(bytes)))
}

/// A string, or `{"base64": …}` of bytes that are none.
struct Text<'a>(&'a [u8]);

impl Serialize for Text<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match str::from_utf8(self.0) {
            Ok(text) => serializer.serialize_str(text),
            Err(_) => serializer.collect_map([("base64", BASE64_STANDARD.encode(self.0))]),
        }
    }
}

/// What the command gets.
#[derive(Serialize)]
struct Input<'a> {
    id: Text<'a>,
    state: Option<&'a Keys>,
}

struct Runs {
    name: String,
    command: Command,
}

impl Reconcile for Runs {
    type State = Keys;

    async fn reconcile(&self, id: &Id, state: Option<&Keys>) -> Result<Next, BoxError> {
        let input = serde_json::to_vec(&Input { id: Text(id.as_bytes()), state })?;
        let mut command = self.command.clone();
        if !id.as_bytes().contains(&0) {
            command = command.variable("VEDETTA_ID", OsStr::from_bytes(id.as_bytes()));
        }
        command.run(&input).await.inspect_err(|error| {
            tracing::warn!(watcher = self.name, %id, "a command failed: {}", error.briefly());
        })?;
        Ok(Next::Done)
    }
}

const LOUD: u8 = 0;
const QUIET: u8 = 1;

/// Marks each value with whether its key type is quiet: a state is made of nothing but the values.
struct Marked<S> {
    source: S,
    quiet: Arc<HashSet<String>>,
}

struct MarkedFeed<F> {
    feed: F,
    quiet: Arc<HashSet<String>>,
}

fn mark(quiet: &HashSet<String>, key: &[u8], value: &mut Bytes) {
    let key_type = key.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    let is_quiet = str::from_utf8(key_type).is_ok_and(|key_type| quiet.contains(key_type));
    let mut marked = BytesMut::with_capacity(value.len() + 1);
    marked.put_u8(if is_quiet { QUIET } else { LOUD });
    marked.put_slice(value);
    *value = marked.freeze();
}

impl<S: Source> Source for Marked<S> {
    type Feed = MarkedFeed<S::Feed>;

    async fn list(&self, range: KeyRange, at: Option<Revision>) -> Result<Page, SourceError> {
        let mut page = self.source.list(range, at).await?;
        for entry in &mut page.entries {
            mark(&self.quiet, &entry.key, &mut entry.value);
        }
        Ok(page)
    }

    async fn follow(
        &self,
        range: KeyRange,
        from: Revision,
    ) -> Result<(Self::Feed, Revision), SourceError> {
        let (feed, revision) = self.source.follow(range, from).await?;
        Ok((MarkedFeed { feed, quiet: Arc::clone(&self.quiet) }, revision))
    }
}

impl<F: Feed> Feed for MarkedFeed<F> {
    async fn next(&mut self) -> Result<Changes, SourceError> {
        let mut changes = self.feed.next().await?;
        for change in &mut changes.changes {
            if let Some(value) = &mut change.value {
                mark(&self.quiet, &change.key, value);
            }
        }
        Ok(changes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_stays_json_text_becomes_a_string_and_bytes_base64() {
        let mut keys = Keys::default();
        for (key_type, value) in [
            ("number", &b"12345678901234567890.50"[..]),
            ("object", br#" {"b": [1, null], "a": "x"} "#),
            ("string", br#""quoted""#),
            ("text", b"on air"),
            ("empty", b""),
            ("two", b"1 2"),
            ("bytes", b"\xff\x00"),
        ] {
            let marked = [&[LOUD], value].concat();
            assert_eq!(keys.apply(key_type, Some(&marked)).unwrap(), Effect::Wanted, "{key_type}");
        }
        let shown =
            |id: &[u8], state| serde_json::to_string(&Input { id: Text(id), state }).unwrap();
        let expected = r#"{"id":"7","state":{"bytes":{"base64":"/wA="},"empty":"","number":12345678901234567890.50,"object":{"b": [1, null], "a": "x"},"string":"quoted","text":"on air","two":"1 2"}}"#;
        assert_eq!(shown(b"7", Some(&keys)), expected);
        assert_eq!(shown(b"\xff", None), r#"{"id":{"base64":"/w=="},"state":null}"#);
    }

    #[test]
    fn a_quiet_key_type_is_quiet_when_it_is_put_and_when_it_is_deleted() {
        let quiet = HashSet::from(["mixer".to_owned()]);
        let mut keys = Keys::default();
        let mut put = |key: &str| {
            let mut value = Bytes::from_static(b"1");
            mark(&quiet, key.as_bytes(), &mut value);
            keys.apply(key.rsplit('/').next().unwrap(), Some(&value)).unwrap()
        };
        assert_eq!(put("/rooms/1/livemeta"), Effect::Wanted);
        assert_eq!(put("/rooms/mixer/title"), Effect::Wanted, "only the end of a key is its type");
        assert_eq!(put("/rooms/1/mixer"), Effect::Quiet);
        assert_eq!(keys.apply("mixer", None).unwrap(), Effect::Quiet);
        assert_eq!(keys.apply("title", None).unwrap(), Effect::Wanted);
        assert_eq!(serde_json::to_string(&keys).unwrap(), r#"{"livemeta":1}"#);
    }
}
