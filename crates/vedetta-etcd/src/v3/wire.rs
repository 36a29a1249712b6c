//! Messages that are written to the wire straight from what the store holds.
//!
//! A key goes from the store's memory into the answer without a copy in between. An event is encoded once,
//! whatever the number of watchers; each of their answers is the same bytes behind its own head. Both are
//! only ever written, so reading them skips what it finds.

use std::hash::{Hash, Hasher};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::encoding::{
    self, DecodeContext, WireType, bool as boolean, encode_key, encode_varint, encoded_len_varint,
    int64, key_len, skip_field, string,
};
use prost::{DecodeError, Message};
use vedetta_core::Revision;
use vedetta_kv::{Batch, Change, Event, LeaseId, Stamps};

use super::proto::ResponseHeader;

/// `mvccpb.KeyValue`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KeyValue(pub(crate) vedetta_kv::KeyValue);

impl KeyValue {
    fn numbers(&self) -> [(u32, i64); 4] {
        let key = &self.0;
        [
            (2, key.created().0.cast_signed()),
            (3, key.modified().0.cast_signed()),
            (4, key.version().cast_signed()),
            (6, key.lease().map_or(0, LeaseId::get)),
        ]
    }
}

impl Default for KeyValue {
    fn default() -> Self {
        Self(vedetta_kv::KeyValue::new(Stamps::default(), &[], &[]))
    }
}

impl Hash for KeyValue {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.key().hash(state);
    }
}

impl Message for KeyValue {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        put_bytes(1, self.0.key(), buf);
        let [created, modified, version, lease] = self.numbers();
        for (tag, number) in [created, modified, version] {
            put_number(tag, number, buf);
        }
        put_bytes(5, self.0.value(), buf);
        put_number(lease.0, lease.1, buf);
    }

    fn encoded_len(&self) -> usize {
        let numbers = self.numbers().into_iter().map(|(tag, number)| number_len(tag, number));
        bytes_len(1, self.0.key()) + bytes_len(5, self.0.value()) + numbers.sum::<usize>()
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        skip_field(wire_type, tag, buf, context)
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

/// `etcdserverpb.WatchResponse`.
#[derive(Debug, Default)]
pub(crate) struct WatchResponse {
    pub(crate) header: ResponseHeader,
    pub(crate) watch_id: i64,
    pub(crate) created: bool,
    pub(crate) canceled: bool,
    pub(crate) compact_revision: i64,
    pub(crate) cancel_reason: String,
    pub(crate) fragment: bool,
    pub(crate) events: Option<Events>,
}

/// Some events of a batch.
#[derive(Debug, Clone)]
pub(crate) struct Events {
    batch: Batch,
    previous: bool,
    skip: usize,
    take: usize,
    /// Bytes of them all, their tags included.
    len: usize,
    /// The revision of the last.
    last: Revision,
}

impl Events {
    /// All of `batch`; with the keys as they were before, when `previous`.
    pub(crate) fn all(batch: Batch, previous: bool) -> Self {
        let (mut take, mut len, mut last) = (0, 0, batch.last());
        for (revision, event) in encoded(&batch, previous) {
            take += 1;
            len += event.len();
            last = revision;
        }
        Self { batch, previous, skip: 0, take, len, last }
    }

    /// The revision of the last of them.
    pub(crate) fn last(&self) -> Revision {
        self.last
    }

    /// The first of them, about `most` bytes and one event at least, and what is left. Unless `anywhere`,
    /// what happened in one revision stays together.
    pub(crate) fn split(self, most: usize, anywhere: bool) -> (Self, Option<Self>) {
        if self.len < most {
            return (self, None);
        }
        let (mut take, mut len, mut last) = (0, 0, self.last);
        for (revision, event) in self.iter() {
            let may_cut = take > 0 && (anywhere || revision > last);
            if may_cut && len + event.len() >= most {
                break;
            }
            take += 1;
            len += event.len();
            last = revision;
        }
        let rest = Self {
            skip: self.skip + take,
            take: self.take - take,
            len: self.len - len,
            ..self.clone()
        };
        (Self { take, len, last, ..self }, (rest.take > 0).then_some(rest))
    }

    fn iter(&self) -> impl Iterator<Item = (Revision, &Bytes)> {
        encoded(&self.batch, self.previous).skip(self.skip).take(self.take)
    }
}

fn encoded(batch: &Batch, previous: bool) -> impl Iterator<Item = (Revision, &Bytes)> {
    batch.encoded(previous, move |event| encode_event(event, previous))
}

/// The tag of the events in a [`WatchResponse`].
const EVENTS: u32 = 11;

/// An event as it stands in a [`WatchResponse`], tag and length included.
fn encode_event(event: &Event, previous: bool) -> Bytes {
    let before = event.previous.as_ref().filter(|_| previous).cloned().map(KeyValue);
    let before_len = before.as_ref().map_or(0, |before| message_len(3, before.encoded_len()));
    let mut buf = BytesMut::new();
    match &event.change {
        Change::Put(now) => {
            let now = KeyValue(now.clone());
            open(&mut buf, message_len(2, now.encoded_len()) + before_len);
            encoding::message::encode(2, &now, &mut buf);
        }
        Change::Delete { key, .. } => {
            let modified = event.revision.0.cast_signed();
            let gone = bytes_len(1, key) + number_len(3, modified);
            open(&mut buf, key_len(1) + 1 + message_len(2, gone) + before_len);
            put_number(1, 1, &mut buf);
            encode_key(2, WireType::LengthDelimited, &mut buf);
            encode_varint(gone as u64, &mut buf);
            put_bytes(1, key, &mut buf);
            put_number(3, modified, &mut buf);
        }
    }
    if let Some(before) = before {
        encoding::message::encode(3, &before, &mut buf);
    }
    buf.freeze()
}

fn open(buf: &mut BytesMut, len: usize) {
    buf.reserve(message_len(EVENTS, len));
    encode_key(EVENTS, WireType::LengthDelimited, buf);
    encode_varint(len as u64, buf);
}

impl Message for WatchResponse {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        encoding::message::encode(1, &self.header, buf);
        put_number(2, self.watch_id, buf);
        for (tag, flag) in [(3, self.created), (4, self.canceled)] {
            put_flag(tag, flag, buf);
        }
        put_number(5, self.compact_revision, buf);
        if !self.cancel_reason.is_empty() {
            string::encode(6, &self.cancel_reason, buf);
        }
        put_flag(7, self.fragment, buf);
        for (_, event) in self.events.iter().flat_map(Events::iter) {
            buf.put_slice(event);
        }
    }

    fn encoded_len(&self) -> usize {
        let flags = [self.created, self.canceled, self.fragment];
        let reason = match self.cancel_reason.len() {
            0 => 0,
            _ => string::encoded_len(6, &self.cancel_reason),
        };
        encoding::message::encoded_len(1, &self.header)
            + number_len(2, self.watch_id)
            + flags.iter().filter(|&&flag| flag).count() * 2
            + number_len(5, self.compact_revision)
            + reason
            + self.events.as_ref().map_or(0, |events| events.len)
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        skip_field(wire_type, tag, buf, context)
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

// What is zero or empty is left out, as proto3 has it.

fn put_number(tag: u32, number: i64, buf: &mut impl BufMut) {
    if number != 0 {
        int64::encode(tag, &number, buf);
    }
}

fn number_len(tag: u32, number: i64) -> usize {
    if number == 0 { 0 } else { int64::encoded_len(tag, &number) }
}

fn put_flag(tag: u32, flag: bool, buf: &mut impl BufMut) {
    if flag {
        boolean::encode(tag, &flag, buf);
    }
}

fn put_bytes(tag: u32, bytes: &[u8], buf: &mut impl BufMut) {
    if !bytes.is_empty() {
        encode_key(tag, WireType::LengthDelimited, buf);
        encode_varint(bytes.len() as u64, buf);
        buf.put_slice(bytes);
    }
}

fn bytes_len(tag: u32, bytes: &[u8]) -> usize {
    if bytes.is_empty() { 0 } else { message_len(tag, bytes.len()) }
}

/// A field of `len` bytes, with its tag and its length.
fn message_len(tag: u32, len: usize) -> usize {
    key_len(tag) + encoded_len_varint(len as u64) + len
}

#[cfg(test)]
mod tests {
    use prost_reflect::{DynamicMessage, SerializeOptions};
    use serde_json::json;
    use vedetta_core::{KeyRange, Revision};
    use vedetta_kv::{Delete, Put, WatchOptions};

    use super::super::{gateway, tests};
    use super::*;

    /// A message as those read it who know nothing of this file.
    fn read(name: &str, message: &impl Message) -> serde_json::Value {
        let descriptor = gateway::MESSAGES.get_message_by_name(name).unwrap();
        let bytes = message.encode_to_vec();
        assert_eq!(bytes.len(), message.encoded_len());
        let read = DynamicMessage::decode(descriptor, &bytes[..]).unwrap();
        let options = SerializeOptions::new().use_proto_field_name(true);
        read.serialize_with_options(serde_json::value::Serializer, &options).unwrap()
    }

    #[test]
    fn a_key_is_written_with_all_its_numbers() {
        let stamps = Stamps {
            created: Revision(300),
            modified: Revision(1 << 40),
            version: 3,
            lease: LeaseId::new(-5),
        };
        let key = KeyValue(vedetta_kv::KeyValue::new(stamps, b"k", b"value"));
        let want = json!({"key": "aw==", "create_revision": "300", "mod_revision": "1099511627776",
                          "version": "3", "value": "dmFsdWU=", "lease": "-5"});
        assert_eq!(read("mvccpb.KeyValue", &key), want);
        assert_eq!(read("mvccpb.KeyValue", &KeyValue::default()), json!({}));
    }

    #[tokio::test]
    async fn events_are_written_whole_and_in_pieces() {
        let (_folder, store) = tests::store().await;
        store.put(Put::new("a", "1")).await.unwrap();
        store.put(Put::new("a", "2")).await.unwrap();
        store.delete(Delete { range: KeyRange::all(), previous: false }).await.unwrap();
        let options = WatchOptions { from: Some(Revision(2)), ..WatchOptions::default() };
        let batch = store.watch(KeyRange::all(), options).unwrap().next().await.unwrap();
        let response = |events| WatchResponse {
            header: ResponseHeader { revision: 4, ..ResponseHeader::default() },
            watch_id: -1,
            created: true,
            canceled: true,
            compact_revision: 7,
            cancel_reason: "why".into(),
            fragment: true,
            events: Some(events),
        };
        let key = |n: &str, value: &str| {
            json!({"key": "YQ==", "create_revision": "2", "mod_revision": (n.parse::<i64>().unwrap() + 1).to_string(),
                   "version": n, "value": value})
        };
        let (one, two) = (key("1", "MQ=="), key("2", "Mg=="));
        let gone = json!({"key": "YQ==", "mod_revision": "4"});
        let mut want = json!({"header": {"revision": "4"}, "watch_id": "-1", "created": true,
            "canceled": true, "compact_revision": "7", "cancel_reason": "why", "fragment": true,
            "events": [{"kv": one}, {"kv": two, "prev_kv": one},
                       {"type": "DELETE", "kv": gone, "prev_kv": two}]});
        let name = "etcdserverpb.WatchResponse";
        assert_eq!(read(name, &response(Events::all(batch.clone(), true))), want);
        let mut rest = Some(Events::all(batch.clone(), true));
        for event in want["events"].as_array().unwrap() {
            let (piece, more) = rest.unwrap().split(1, true);
            assert_eq!(read(name, &response(piece))["events"], json!([event]));
            rest = more;
        }
        assert!(rest.is_none());
        for event in want["events"].as_array_mut().unwrap() {
            event.as_object_mut().unwrap().remove("prev_kv");
        }
        assert_eq!(read(name, &response(Events::all(batch, false))), want);
    }
}
