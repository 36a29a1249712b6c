//! The v3 API over gRPC, and its JSON over HTTP.
//!
//! ```text
//! put ~a 1 prev_kv lease=7            ~ is the case's prefix, "" is empty, \0 a byte; then fields of the request
//! range ~a ~z limit=2 revision={1}    {1} is the first revision of the case
//! txn if value(~a)=1 version(~b..~c)>0 then put ~a 2 ; range ~a else txn [ if then del ~a else ]
//! s> watch ~ ~\xff watch_id=5         sent on the stream s;  s> cancel 5;  s> progress
//! s                                   one answer of it;  s*3 its answers until three events;  s- hang up
//! s~mark                              its events up to one that has the mark, or to the end of a watch
//! POST /v3/kv/put {"key":"<~a>"}      the gateway; <…> is base64
//! g: POST /v3/watch {}                an answer that goes on;  g+ one line of it;  g- hang up
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::net::SocketAddr;

use futures_util::future::join;
use prost_reflect::{
    DynamicMessage, FieldDescriptor, Kind, MessageDescriptor, ReflectMessage as _, Value,
};
use tonic::Status;

use crate::cases::{Case, Mismatch, Servers, parse};
use crate::support::grpc::{Client, Line, message, request};
use crate::support::http::{self, Connection};
use crate::support::{PATIENCE, soon};

/// The answer of one who does not answer.
const NOTHING: &str = "no answer";

/// Changes what is compared, to show that the comparison sees it.
pub(crate) type Lie = fn(&str, &mut String);

/// One of the two servers, and how far the case has come there.
struct Side {
    address: SocketAddr,
    client: Client,
    lines: BTreeMap<String, Line>,
    /// Answers of the gateway that go on.
    going: BTreeMap<String, Connection>,
    /// Events that came with others and were not asked for yet, by stream.
    unread: BTreeMap<String, VecDeque<String>>,
    /// The revision the case began with.
    base: i64,
    /// Ids the server chose, in the order they came.
    ids: Vec<i64>,
    lie: Option<Lie>,
}

/// Both servers.
pub(crate) struct Pair {
    sides: [Side; 2],
    cases: u32,
}

impl Pair {
    pub(crate) async fn new(addresses: [SocketAddr; 2], lie: Option<Lie>) -> Self {
        let side = async |address, lie| Side {
            address,
            client: Client::connect(address).await.expect("the server can be reached"),
            lines: BTreeMap::new(),
            going: BTreeMap::new(),
            unread: BTreeMap::new(),
            base: 0,
            ids: Vec::new(),
            lie,
        };
        let [etcd, ours] = addresses;
        Self { sides: [side(etcd, None).await, side(ours, lie).await], cases: 0 }
    }

    /// Runs a case under a prefix nobody used, up to the first difference, and takes its keys away.
    pub(crate) async fn run(&mut self, case: &Case) -> Result<(), Mismatch> {
        self.cases += 1;
        let prefix = format!("/case{}/", self.cases);
        let [etcd, ours] = &mut self.sides;
        soon(&format!("beginning {:?}", case.name), join(etcd.begin(), ours.begin())).await;
        let the_end = ["range ~ ~\\xff".to_owned(), "del ~ ~\\xff".to_owned()];
        let mut difference = None;
        for (at, line) in case.lines.iter().chain(&the_end).enumerate() {
            if difference.is_some() && at < case.lines.len() {
                continue;
            }
            let (etcd, ours) =
                join(etcd.try_step(&prefix, line), ours.try_step(&prefix, line)).await;
            if difference.is_none() && (etcd != ours || etcd == NOTHING) {
                difference = Some(Mismatch { at, etcd, ours });
            }
        }
        difference.map_or(Ok(()), Err)
    }
}

impl Side {
    async fn begin(&mut self) {
        self.lines.clear();
        self.going.clear();
        self.unread.clear();
        self.ids.clear();
        let mut nothing = request("KV/Range");
        nothing.set_field_by_name("key", Value::Bytes("nothing".into()));
        let answer =
            self.client.unary("KV/Range", &nothing).await.expect("the revision can be asked");
        self.base = revision(&answer);
    }

    /// As `step`, with what goes wrong as an answer too.
    async fn try_step(&mut self, prefix: &str, line: &str) -> String {
        let mut told = match tokio::time::timeout(PATIENCE / 4, self.step(prefix, line)).await {
            Ok(Ok(told)) => told,
            Ok(Err(status)) => format!("{:?}: {}", status.code(), status.message()),
            Err(_) => NOTHING.into(),
        };
        if let Some(lie) = self.lie {
            lie(line, &mut told);
        }
        told
    }

    /// Does what a line says, and answers what can be compared.
    async fn step(&mut self, prefix: &str, line: &str) -> Result<String, Status> {
        let broken = |broken: std::io::Error| Status::unknown(broken.to_string());
        if let Some((name, line)) = line.split_once(": ").filter(|(name, _)| name.len() == 1) {
            let bytes = self.gateway_request(prefix, line);
            let mut connection = Connection::open(self.address).await.map_err(broken)?;
            let head = connection.begin(&bytes).await.map_err(broken)?;
            self.going.insert(name.into(), connection);
            return Ok(self.gateway_told(&head));
        }
        if let Some(name) = line.strip_suffix('+').filter(|name| name.len() == 1) {
            let missing = || Status::unknown("nothing goes on under that name");
            let connection = self.going.get_mut(name).ok_or_else(missing)?;
            let chunk = connection.chunk().await.map_err(broken)?.unwrap_or_default();
            let answer = http::Answer { body: chunk, ..http::Answer::default() };
            return Ok(self.gateway_told(&answer));
        }
        if line.starts_with(|c: char| c.is_ascii_uppercase()) {
            return self
                .gateway(prefix, line)
                .await
                .map_err(|broken| Status::unknown(broken.to_string()));
        }
        if let Some((name, line)) = line.split_once("> ").filter(|(name, _)| name.len() == 1) {
            let (path, request) = self.parse(prefix, line);
            match self.lines.get(name) {
                Some(open) => open.send(&request).await,
                None => {
                    let open = self.client.line(path, &request).await?;
                    self.lines.insert(name.into(), open);
                }
            }
            return Ok(String::new());
        }
        if line.len() == 1 {
            let answer = self.open(line)?.next().await?;
            return Ok(answer.map_or("the end".into(), |answer| self.told(&answer)));
        }
        if let Some((name, events)) = line.split_once('*').filter(|(name, _)| name.len() == 1) {
            let least: usize = events.parse().expect("how many events");
            return self.events(name, |told| told.len() >= least).await;
        }
        if let Some((name, mark)) = line.split_once('~').filter(|(name, _)| name.len() == 1) {
            return self
                .events(name, |told| {
                    let last = told.last();
                    last.is_some_and(|last| last.contains(mark) || last.contains("canceled: true"))
                })
                .await;
        }
        if let Some(name) = line.strip_suffix('-').filter(|name| name.len() == 1) {
            self.lines.remove(name);
            self.going.remove(name);
            return Ok(String::new());
        }
        let (path, request) = self.parse(prefix, line);
        if path == "Lease/LeaseKeepAlive" {
            let answer = self.client.line(path, &request).await?.next().await?;
            return Ok(answer.map_or("the end".into(), |answer| self.told(&answer)));
        }
        let answer = self.client.unary(path, &request).await?;
        Ok(self.told(&answer))
    }

    fn open(&mut self, name: &str) -> Result<&mut Line, Status> {
        self.lines.get_mut(name).ok_or_else(|| Status::unknown("that stream is not open"))
    }

    /// Events until there are enough. How they come together in answers is the server's affair, and so is
    /// the order among the watches of a stream.
    async fn events(
        &mut self,
        name: &str,
        enough: impl Fn(&[String]) -> bool,
    ) -> Result<String, Status> {
        let mut told = Vec::new();
        while !enough(&told) {
            if let Some(event) = self.unread.entry(name.into()).or_default().pop_front() {
                told.push(event);
                continue;
            }
            let Some(answer) = self.open(name)?.next().await? else { break };
            let id = answer.get_field_by_name("watch_id").unwrap().as_i64().unwrap_or(0);
            let events = answer.get_field_by_name("events").unwrap().into_owned();
            let events = events.as_list().unwrap_or_default();
            if events.is_empty() {
                told.push(self.told(&answer));
            }
            for event in events {
                let mut text = format!("watch {id} ");
                self.tell(&mut text, "event", event);
                self.unread.entry(name.into()).or_default().push_back(text);
            }
        }
        told.sort_by_key(|told| told.split(' ').nth(1).map(str::to_owned));
        Ok(told.join("\n"))
    }

    fn gateway_request(&self, prefix: &str, line: &str) -> Vec<u8> {
        let (method, rest) = line.split_once(' ').expect("a method");
        let (target, body) = rest.split_once(' ').unwrap_or((rest, ""));
        let body = self.with_revisions(&encoded(prefix, body));
        http::request(self.address, method, target, None, body.as_bytes())
    }

    async fn gateway(&mut self, prefix: &str, line: &str) -> std::io::Result<String> {
        let bytes = self.gateway_request(prefix, line);
        let mut answer = Connection::open(self.address).await?.exchange(&bytes).await?;
        if line.contains("/maintenance/snapshot") && answer.status == 200 {
            answer.body = pieces(&answer.text()).into_bytes();
        }
        Ok(self.gateway_told(&answer))
    }

    fn gateway_told(&self, answer: &http::Answer) -> String {
        let mut text = answer.text();
        for field in ["revision", "mod_revision", "create_revision", "compact_revision"] {
            text = self.relative_in(&text, field);
        }
        for field in [
            "cluster_id",
            "member_id",
            "raft_term",
            "raftTerm",
            "raftIndex",
            "leader",
            "raftAppliedIndex",
            "dbSize",
            "dbSizeInUse",
        ] {
            text = replace(&text, field, |_| "<id>".into());
        }
        if let Some((before, hash)) = text.split_once("\"hash\":") {
            let end = hash.find(|c: char| !c.is_ascii_digit()).unwrap_or(hash.len());
            text =
                format!("{before}\"hash\":{}{}", if end > 0 { "<hash>" } else { "" }, &hash[end..]);
        }
        // Seconds pass between the two.
        text = replace(&text, "TTL", |ttl| match ttl.parse::<i64>() {
            Ok(ttl) if ttl > 50 => ((ttl + 99) / 100 * 100).to_string(),
            _ => ttl.into(),
        });
        // What is wrong with JSON is told in the words of the library that reads it.
        if answer.status == 400 && text.contains("\"code\":3") && !text.contains("etcdserver") {
            text = "no such JSON, code 3".into();
        }
        let content_type = answer.header("content-type").unwrap_or("(no type)");
        format!("{}\n{content_type}\n{text}", answer.status)
    }

    fn relative_in(&self, text: &str, field: &str) -> String {
        replace(text, field, |number| {
            number.parse().map_or("?".into(), |number| self.relative(number))
        })
    }

    /// `{2}` is the second revision after the case began.
    fn with_revisions(&self, line: &str) -> String {
        let mut whole = String::new();
        let mut rest = line;
        while let Some((before, after)) = rest.split_once('{') {
            whole.push_str(before);
            let number = after
                .split_once('}')
                .and_then(|(number, rest)| Some((number.parse::<i64>().ok()?, rest)));
            match number {
                Some((number, after)) => {
                    whole.push_str(&(self.base + number).to_string());
                    rest = after;
                }
                None => {
                    whole.push('{');
                    rest = after;
                }
            }
        }
        whole + rest
    }

    /// The call a line makes, and its request.
    fn parse(&self, prefix: &str, line: &str) -> (&'static str, DynamicMessage) {
        let line = self.with_revisions(line);
        let words: Vec<&str> = line.split_whitespace().collect();
        let (word, rest) = words.split_first().expect("a line is not empty");
        let (path, positions): (&'static str, &[&str]) = match *word {
            "range" => ("KV/Range", &["key", "range_end"]),
            "put" => ("KV/Put", &["key", "value"]),
            "del" => ("KV/DeleteRange", &["key", "range_end"]),
            "compact" => ("KV/Compact", &["revision"]),
            "grant" => ("Lease/LeaseGrant", &["ID", "TTL"]),
            "revoke" => ("Lease/LeaseRevoke", &["ID"]),
            "ttl" => ("Lease/LeaseTimeToLive", &["ID"]),
            "leases" => ("Lease/LeaseLeases", &[]),
            "keepalive" => ("Lease/LeaseKeepAlive", &["ID"]),
            "members" => ("Cluster/MemberList", &[]),
            "alarm" => ("Maintenance/Alarm", &["action"]),
            "status" => ("Maintenance/Status", &[]),
            "defragment" => ("Maintenance/Defragment", &[]),
            "hashkv" => ("Maintenance/HashKV", &["revision"]),
            "authenticate" => ("Auth/Authenticate", &["name", "password"]),
            "txn" => return ("KV/Txn", self.txn(prefix, &mut rest.iter().copied())),
            "watch" => {
                let create = self.fields(
                    prefix,
                    &message("WatchCreateRequest"),
                    &["key", "range_end"],
                    rest,
                );
                return ("Watch/Watch", wrapped("WatchRequest", "create_request", create));
            }
            "cancel" => {
                let cancel =
                    self.fields(prefix, &message("WatchCancelRequest"), &["watch_id"], rest);
                return ("Watch/Watch", wrapped("WatchRequest", "cancel_request", cancel));
            }
            "progress" => {
                let progress = DynamicMessage::new(message("WatchProgressRequest"));
                return ("Watch/Watch", wrapped("WatchRequest", "progress_request", progress));
            }
            "nothing" => return ("Watch/Watch", DynamicMessage::new(message("WatchRequest"))),
            other => panic!("no such line: {other}"),
        };
        (path, self.fields(prefix, &request(path).descriptor(), positions, rest))
    }

    /// Fills a message: first the fields by position, then by name; a name alone is `true`.
    fn fields(
        &self,
        prefix: &str,
        descriptor: &MessageDescriptor,
        positions: &[&str],
        words: &[&str],
    ) -> DynamicMessage {
        let mut filled = DynamicMessage::new(descriptor.clone());
        let mut positions = positions.iter();
        for word in words {
            let named = word.split_once('=').map(|(name, value)| (name, Some(value)));
            let named = named.unwrap_or((word, None));
            let field = descriptor.get_field_by_name(named.0);
            let (field, value) = match (field, named.1) {
                (Some(field), Some(value)) => (field, value),
                (Some(field), None) if matches!(field.kind(), Kind::Bool) => (field, "true"),
                _ => {
                    let name = positions.next().unwrap_or_else(|| panic!("what is {word}?"));
                    (descriptor.get_field_by_name(name).expect("a field"), *word)
                }
            };
            let value = self.value(prefix, &field, value);
            let value = if field.is_list() {
                let mut list = filled.get_field(&field).as_list().unwrap_or_default().to_vec();
                list.push(value);
                Value::List(list)
            } else {
                value
            };
            filled.set_field(&field, value);
        }
        filled
    }

    fn value(&self, prefix: &str, field: &FieldDescriptor, text: &str) -> Value {
        match field.kind() {
            Kind::Bytes => Value::Bytes(unescape(prefix, text).into()),
            Kind::String => Value::String(text.into()),
            Kind::Bool => Value::Bool(text == "true"),
            Kind::Int64 => Value::I64(self.number(text)),
            Kind::Uint64 => Value::U64(text.parse().expect("a number")),
            Kind::Enum(names) => {
                let number = names.get_value_by_name(text).map_or_else(
                    || text.parse().unwrap_or_else(|_| panic!("no {text} in {}", names.name())),
                    |value| value.number(),
                );
                Value::EnumNumber(number)
            }
            other => panic!("no text for {other:?}"),
        }
    }

    /// A number, or `#1`, the first id the server chose.
    fn number(&self, text: &str) -> i64 {
        match text.strip_prefix('#') {
            Some(which) => {
                let which: usize = which.parse().expect("which id");
                self.ids.get(which - 1).copied().unwrap_or(-1)
            }
            None => text.parse().unwrap_or_else(|_| panic!("not a number: {text}")),
        }
    }

    /// `if <compares> then <ops> else <ops>`, up to the end or a `]`.
    fn txn<'a>(&self, prefix: &str, words: &mut impl Iterator<Item = &'a str>) -> DynamicMessage {
        let mut txn = DynamicMessage::new(message("TxnRequest"));
        let (mut compares, mut success, mut failure) = (Vec::new(), Vec::new(), Vec::new());
        let mut part = "if";
        let mut op: Vec<&str> = Vec::new();
        let finish =
            |op: &mut Vec<&str>, part: &str, success: &mut Vec<Value>, failure: &mut Vec<Value>| {
                if !op.is_empty() {
                    let times = times(op.last());
                    op.truncate(op.len() - usize::from(times.is_some()));
                    let op = Value::Message(self.op(prefix, &std::mem::take(op)));
                    let ops = std::iter::repeat_n(op, times.unwrap_or(1));
                    if part == "then" { success.extend(ops) } else { failure.extend(ops) }
                }
            };
        while let Some(word) = words.next() {
            match word {
                "]" => break,
                "[" => {
                    let nested = wrapped("RequestOp", "request_txn", self.txn(prefix, words));
                    if part == "then" { &mut success } else { &mut failure }
                        .push(Value::Message(nested));
                    op.clear();
                }
                "if" => {}
                "then" | "else" | ";" => {
                    finish(&mut op, part, &mut success, &mut failure);
                    part = if word == ";" { part } else { word };
                }
                again if part == "if" && times(Some(&again)).is_some() => {
                    let last = compares.pop().expect("a compare to repeat");
                    compares.extend(std::iter::repeat_n(last, times(Some(&again)).unwrap_or(1)));
                }
                compare if part == "if" => {
                    compares.push(Value::Message(self.compare(prefix, compare)));
                }
                word => op.push(word),
            }
        }
        finish(&mut op, part, &mut success, &mut failure);
        txn.set_field_by_name("compare", Value::List(compares));
        txn.set_field_by_name("success", Value::List(success));
        txn.set_field_by_name("failure", Value::List(failure));
        txn
    }

    fn op(&self, prefix: &str, words: &[&str]) -> DynamicMessage {
        let (kind, name, positions) = match words[0] {
            "range" => ("request_range", "RangeRequest", ["key", "range_end"]),
            "put" => ("request_put", "PutRequest", ["key", "value"]),
            "del" => ("request_delete_range", "DeleteRangeRequest", ["key", "range_end"]),
            "empty" => return DynamicMessage::new(message("RequestOp")),
            // Its brackets have been read.
            other => panic!("no such operation: {other}"),
        };
        wrapped("RequestOp", kind, self.fields(prefix, &message(name), &positions, &words[1..]))
    }

    /// `value(~a)=1`, `mod_revision(~a..~z)>3`.
    fn compare(&self, prefix: &str, text: &str) -> DynamicMessage {
        let (target, rest) = text.split_once('(').expect("a target");
        let (key, rest) = rest.split_once(')').expect("a key");
        let (result, value) = [("!=", 3), (">", 1), ("<", 2), ("=", 0)]
            .into_iter()
            .find_map(|(op, number)| Some((number, rest.strip_prefix(op)?)))
            .expect("an operator");
        let (key, end) = key.split_once("..").map_or((key, None), |(key, end)| (key, Some(end)));
        let descriptor = message("Compare");
        let mut compare = DynamicMessage::new(descriptor.clone());
        let number = match target {
            "version" => 0,
            "create_revision" => 1,
            "mod_revision" => 2,
            "value" => 3,
            "lease" => 4,
            other => panic!("no target {other}"),
        };
        compare.set_field_by_name("result", Value::EnumNumber(result));
        compare.set_field_by_name("target", Value::EnumNumber(number));
        compare.set_field_by_name("key", Value::Bytes(unescape(prefix, key).into()));
        if let Some(end) = end {
            compare.set_field_by_name("range_end", Value::Bytes(unescape(prefix, end).into()));
        }
        if value != "unset" {
            let field = descriptor.get_field_by_name(target).expect("a target's field");
            compare.set_field(&field, self.value(prefix, &field, value));
        }
        compare
    }

    /// What is compared of an answer: all its fields, but for what cannot be the same.
    fn told(&mut self, answer: &DynamicMessage) -> String {
        let mut text = String::new();
        self.tell(&mut text, "answer", &Value::Message(answer.clone()));
        text
    }

    fn tell(&mut self, text: &mut String, name: &str, value: &Value) {
        let _ = match value {
            Value::Message(message) => {
                text.push('{');
                // We have no peers.
                let fields = message.fields().filter(|(field, _)| field.name() != "peerURLs");
                let mut fields: Vec<_> = fields.collect();
                fields.sort_by_key(|(field, _)| field.number());
                for (number, (field, value)) in fields.into_iter().enumerate() {
                    let _ =
                        write!(text, "{}{}: ", if number > 0 { ", " } else { "" }, field.name());
                    self.tell(text, field.name(), value);
                }
                write!(text, "}}")
            }
            Value::List(values) => {
                text.push('[');
                // The keys of a lease lie in a map there.
                let mut values = values.clone();
                if name == "keys" {
                    values.sort_by_key(|key| key.as_bytes().cloned());
                }
                for (number, value) in values.iter().enumerate() {
                    text.push_str(if number > 0 { ", " } else { "" });
                    self.tell(text, name, value);
                }
                write!(text, "]")
            }
            Value::Bytes(bytes) if bytes.len() > 200 => {
                write!(text, "{} bytes, crc {:08x}", bytes.len(), crc32fast::hash(bytes))
            }
            Value::Bytes(bytes) => write!(text, "\"{}\"", bytes.escape_ascii()),
            Value::I64(number) if name.ends_with("revision") => {
                write!(text, "{}", self.relative(*number))
            }
            Value::I64(number) if matches!(name, "ID" | "lease") => {
                write!(text, "{}", self.id(*number))
            }
            // Seconds pass between the two.
            Value::I64(ttl) if name == "TTL" && *ttl > 50 => {
                write!(text, "{}", (ttl + 99) / 100 * 100)
            }
            Value::I64(_) if name.starts_with("dbSize") => write!(text, "<size>"),
            Value::U64(number) if *number > 0 => write!(text, "<id>"),
            Value::U32(_) if name == "hash" => write!(text, "<hash>"),
            Value::String(address) if name == "clientURLs" => {
                write!(text, "{}", if address.starts_with("http://") { "<url>" } else { address })
            }
            Value::String(said) if name == "name" => write!(text, "<name {}>", !said.is_empty()),
            Value::I64(number) => write!(text, "{number}"),
            Value::U64(number) => write!(text, "{number}"),
            Value::Bool(flag) => write!(text, "{flag}"),
            Value::EnumNumber(number) => write!(text, "{number}"),
            other => write!(text, "{other:?}"),
        };
    }

    fn relative(&self, revision: i64) -> String {
        if revision == 0 { "0".into() } else { format!("{:+}", revision - self.base) }
    }

    /// Ids that a case chose are small; those of the server are named in the order they come.
    fn id(&mut self, id: i64) -> String {
        if id < 1_000_000_000_000 {
            return id.to_string();
        }
        let known = self.ids.iter().position(|known| *known == id).unwrap_or_else(|| {
            self.ids.push(id);
            self.ids.len() - 1
        });
        format!("#{}", known + 1)
    }
}

/// The form of a snapshot: its bytes are each server's own, and so is how many pieces they come in.
fn pieces(text: &str) -> String {
    let mut forms: Vec<String> = Vec::new();
    for line in text.lines() {
        let Ok(piece) = serde_json::from_str::<serde_json::Value>(line) else { return text.into() };
        let Some(result) = piece["result"].as_object() else { return text.into() };
        let mut form: Vec<&str> = result.keys().map(String::as_str).collect();
        form.sort_unstable();
        let form = form.join(" and ");
        if forms.last() != Some(&form) {
            forms.push(form);
        }
    }
    forms.join(", then ")
}

/// `x128` repeats what is before it.
fn times(word: Option<&&str>) -> Option<usize> {
    word?.strip_prefix('x')?.parse().ok()
}

fn wrapped(name: &str, field: &str, inner: DynamicMessage) -> DynamicMessage {
    let mut outer = DynamicMessage::new(message(name));
    outer.set_field_by_name(field, Value::Message(inner));
    outer
}

fn revision(answer: &DynamicMessage) -> i64 {
    let header = answer.get_field_by_name("header").expect("an answer has a header").into_owned();
    let header = header.as_message().expect("a header is a message");
    header.get_field_by_name("revision").and_then(|revision| revision.as_i64()).unwrap_or(0)
}

/// `~` is the prefix, `""` empty, `\0` and `\xff` bytes, `\s` a space, `*1000` a thousand bytes.
fn unescape(prefix: &str, text: &str) -> Vec<u8> {
    if text == "\"\"" {
        return Vec::new();
    }
    if let Some(length) = text.strip_prefix('*').and_then(|length| length.parse().ok()) {
        return vec![b'x'; length];
    }
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        match first {
            b'~' => bytes.extend(prefix.as_bytes()),
            b'\\' if rest.starts_with(b"0") => {
                bytes.push(0);
                rest = &rest[1..];
            }
            b'\\' if rest.starts_with(b"s") => {
                bytes.push(b' ');
                rest = &rest[1..];
            }
            b'\\' if rest.starts_with(b"x") => {
                bytes.push(
                    u8::from_str_radix(&text[text.len() - rest.len() + 1..][..2], 16)
                        .expect("a byte"),
                );
                rest = &rest[3..];
            }
            other => bytes.push(*other),
        }
    }
    bytes
}

/// `<~a>` in JSON becomes the base64 of the key.
fn encoded(prefix: &str, body: &str) -> String {
    use base64::Engine as _;
    let mut parts = body.split('<');
    let mut whole = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (text, rest) = part.split_once('>').expect("what is encoded ends with >");
        whole.push_str(&base64::engine::general_purpose::STANDARD.encode(unescape(prefix, text)));
        whole.push_str(rest);
    }
    whole
}

/// Puts something else for the number in quotes that each `"field":` has.
fn replace(text: &str, field: &str, other: impl Fn(&str) -> String) -> String {
    let marker = format!("\"{field}\":\"");
    let mut parts = text.split(&marker);
    let mut whole = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        whole.push_str(&marker);
        whole.push_str(&other(&part[..end]));
        whole.push_str(&part[end..]);
    }
    whole
}

async fn run_table(cases: &[Case], pair: &mut Pair) -> Vec<String> {
    let mut told = Vec::new();
    for case in cases {
        if let Err(mismatch) = pair.run(case).await {
            told.push(mismatch.tell(case));
        }
    }
    told
}

#[tokio::test(flavor = "multi_thread")]
async fn every_v3_request_of_the_table_is_answered_as_by_etcd() {
    let servers = Servers::start().await;
    let cases = parse(include_str!("v3.cases"));
    let requests: usize = cases.iter().map(|case| case.lines.len() + 2).sum();
    assert!(requests >= 300, "the table has only {requests} requests");
    let told = run_table(&cases, &mut Pair::new(servers.addresses(), None).await).await;
    let (failed, all) = (told.len(), cases.len());
    assert!(told.is_empty(), "{failed} of {all} cases differ\n{}", told.join("\n"));
}

/// Each lie is told by the second of two etcds: only the lie can make a difference.
#[tokio::test(flavor = "multi_thread")]
async fn a_lie_about_v3_is_seen() {
    fn swap(told: &mut String, from: &str, to: &str) {
        *told = told.replacen(from, to, 1);
    }
    let lies: &[(&str, Lie)] = &[
        ("a revision too far", |line, told| {
            if line.starts_with("put") {
                swap(told, "revision: +", "revision: +1");
            }
        }),
        ("no header", |_, told| swap(told, "{header: ", "{")),
        ("another count", |_, told| swap(told, "count: 2", "count: 1")),
        ("a previous value", |_, told| swap(told, "prev_kv: ", "prev_kv: {}")),
        ("an error's text", |line, told| {
            if line.starts_with("range \"\"") {
                swap(told, "key", "Key");
            }
        }),
        ("an event", |line, told| {
            if line.starts_with("s*") {
                swap(told, "type: 1", "type: 0");
            }
        }),
        ("the gateway's text", |_, told| swap(told, "application/json", "text/plain")),
    ];
    let case = parse(
        "== lies
        s> watch ~ ~\\xff prev_kv
        s
        put ~a 1
        put ~b 1
        put ~a 2 prev_kv
        range ~ ~\\xff
        range \"\"
        del ~a
        s*4
        POST /v3/kv/range {\"key\":\"<~b>\"}",
    );
    let (one, other) = (crate::support::Etcd::start().await, crate::support::Etcd::start().await);
    let addresses = [one.address, other.address];
    let told = run_table(&case, &mut Pair::new(addresses, None).await).await;
    assert!(told.is_empty(), "without a lie nothing differs: {}", told.join("\n"));
    for (name, lie) in lies {
        let told = run_table(&case, &mut Pair::new(addresses, Some(*lie)).await).await;
        assert_eq!(told.len(), 1, "{name} was not seen");
    }
}
