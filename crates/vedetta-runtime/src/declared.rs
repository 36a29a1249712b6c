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

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::{Serialize, Serializer};
use serde_json::value::{RawValue, to_raw_value};
use vedetta_core::Source;

use crate::command::Command;
use crate::watcher::{BoxError, Effect, Id, Next, Reconcile, State, Watcher, Watching};

/// A command that brings ids about.
#[derive(Debug, Clone)]
pub struct Declared {
    /// What the command knows the watcher by, as `VEDETTA_WATCHER`.
    pub name: String,
    /// What to run. It is also told the id as `VEDETTA_ID`, if that can be a variable.
    pub command: Command,
}

impl Declared {
    /// Starts it. The limit of a run is the command's own, which waits until it has really ended.
    pub fn start<S: Source>(self, watcher: Watcher, source: S) -> Watching<Keys> {
        let Self { name, command } = self;
        let command = command.variable("VEDETTA_WATCHER", &name);
        watcher.timeout(None).start(source, Runs { name, command })
    }
}

/// The values of an id, by key type.
#[derive(Debug, Clone, Default)]
pub struct Keys(BTreeMap<Box<str>, Arc<RawValue>>);

/// As the command gets it: key types and their values.
impl Serialize for Keys {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key_type, json)| (key_type, &**json)))
    }
}

impl State for Keys {
    fn apply(&mut self, key_type: &str, value: Option<&[u8]>) -> Result<Effect, BoxError> {
        match value {
            Some(value) => self.0.insert(key_type.into(), as_json(value)?.into()),
            None => self.0.remove(key_type),
        };
        Ok(Effect::Wanted)
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

/// No system takes a variable of any length; the command finds the id in its input, too.
const LONG: usize = 64 << 10;

struct Runs {
    name: String,
    command: Command,
}

impl Reconcile for Runs {
    type State = Keys;

    async fn reconcile(&self, id: &Id, state: Option<&Keys>) -> Result<Next, BoxError> {
        let input = serde_json::to_vec(&Input { id: Text(id.as_bytes()), state })?;
        let mut command = self.command.clone();
        if id.as_bytes().len() <= LONG && !id.as_bytes().contains(&0) {
            command = command.variable("VEDETTA_ID", OsStr::from_bytes(id.as_bytes()));
        }
        command.run(&input).await.inspect_err(|error| {
            tracing::warn!(watcher = self.name, %id, "a command failed: {}", error.briefly());
        })?;
        Ok(Next::Done)
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
            assert_eq!(keys.apply(key_type, Some(value)).unwrap(), Effect::Wanted, "{key_type}");
        }
        let shown =
            |id: &[u8], state| serde_json::to_string(&Input { id: Text(id), state }).unwrap();
        let expected = r#"{"id":"7","state":{"bytes":{"base64":"/wA="},"empty":"","number":12345678901234567890.50,"object":{"b": [1, null], "a": "x"},"string":"quoted","text":"on air","two":"1 2"}}"#;
        assert_eq!(shown(b"7", Some(&keys)), expected);
        assert_eq!(shown(b"\xff", None), r#"{"id":{"base64":"/w=="},"state":null}"#);
    }
}
