//! The v2 API over HTTP/1.1.
//!
//! ```text
//! PUT ~/a?prevIndex={2} [Content-Type: text/plain] | value=1      ~ is /v2/keys/<the case>, {2} its second index,
//!                                                                 {#2} the name that POST makes of it
//! w: GET ~/a?wait=true                                            a request whose answer comes later
//! w                                                               its answer;  w+ one chunk of it;  w- hang up
//! w~mark                                                          its chunks up to one that has the mark
//! GET ~/a?wait=true&waitIndex={@-3}                               {@-3} is three before the index last told
//! *1050 PUT ~/a | value=1                                         so many times; the last answer is compared
//! forget {5}                                                      we compact up to there; etcd has forgotten by itself
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join;

use crate::cases::{Case, Mismatch, Servers, parse};
use crate::support::http::{Answer, Connection, request};
use crate::support::{PATIENCE, soon};

const FORM: &str = "application/x-www-form-urlencoded";

/// The answer of one who does not answer.
const NOTHING: &str = "no answer";

/// Headers whose values are compared; of the others (but `date`) only that they are there.
const TOLD: &[&str] =
    &["content-type", "allow", "location", "connection", "x-content-type-options"];

/// Changes an answer before it is compared, to show that the comparison sees it.
pub(crate) type Lie = fn(&str, &mut Answer);

/// One of the two servers, and how far the case has come there.
struct Side {
    address: SocketAddr,
    line: Option<Connection>,
    waiting: BTreeMap<String, Waiting>,
    /// The index the case began with.
    base: u64,
    /// The index that was last told.
    index: u64,
    /// The statistics that the case saw first.
    counted: Option<Counts>,
    lie: Option<Lie>,
}

/// Asks for what is counted.
const COUNTS: &str = "GET /v2/stats/store";

/// The numbers of `/v2/stats/store`, by name.
type Counts = BTreeMap<String, i64>;

/// A request whose answer is not complete.
struct Waiting {
    connection: Connection,
    head: Answer,
    sorted: bool,
}

/// Both servers.
pub(crate) struct Pair {
    sides: [Side; 2],
    cases: u32,
    /// The error codes that etcd answered and we too.
    codes: BTreeSet<u16>,
}

impl Pair {
    pub(crate) fn new(addresses: [SocketAddr; 2], lie: Option<Lie>) -> Self {
        let [etcd, ours] = addresses.map(|address| Side {
            address,
            line: None,
            waiting: BTreeMap::new(),
            base: 0,
            index: 0,
            counted: None,
            lie: None,
        });
        Self { sides: [etcd, Side { lie, ..ours }], cases: 0, codes: BTreeSet::new() }
    }

    /// Runs a case under a prefix nobody used, up to the first difference.
    pub(crate) async fn run(&mut self, case: &Case) -> Result<(), Mismatch> {
        self.cases += 1;
        let prefix = format!("case-{}x", letters(self.cases));
        let [etcd, ours] = &mut self.sides;
        let (etcd_began, ours_began) =
            soon("beginning a case", join(etcd.begin(), ours.begin())).await;
        etcd_began.and(ours_began).expect("a case can begin");
        let the_end = "GET ~?recursive=true&sorted=true".to_owned();
        for (at, line) in case.lines.iter().chain([&the_end]).enumerate() {
            let (etcd, ours) =
                join(etcd.try_step(&prefix, line), ours.try_step(&prefix, line)).await;
            if etcd != ours || etcd == NOTHING {
                return Err(Mismatch { at, etcd, ours });
            }
            self.codes.extend(error_code(&etcd));
        }
        Ok(())
    }

    /// Runs lines on the second server only, and answers what it said.
    pub(crate) async fn run_ours(&mut self, lines: &[&str]) -> Vec<String> {
        self.cases += 1;
        let prefix = format!("case-ours-{}x", letters(self.cases));
        let ours = &mut self.sides[1];
        ours.begin().await.expect("a case can begin");
        let mut told = Vec::new();
        for line in lines {
            told.push(ours.try_step(&prefix, line).await);
        }
        told
    }
}

/// The `errorCode` of an answer that has one.
fn error_code(told: &str) -> Option<u16> {
    let (_, rest) = told.split_once("{\"errorCode\":")?;
    rest.split_once(',')?.0.parse().ok()
}

/// A number in letters: nothing in a prefix looks like an index.
fn letters(number: u32) -> String {
    number.to_string().bytes().map(|digit| char::from(b'a' + digit - b'0')).collect()
}

impl Side {
    async fn begin(&mut self) -> std::io::Result<()> {
        self.waiting.clear();
        self.line = None;
        self.counted = None;
        let nothing =
            self.exchange(&request(self.address, "GET", "/v2/keys/_nothing", None, b"")).await?;
        self.base =
            nothing.header("x-etcd-index").and_then(|index| index.parse().ok()).unwrap_or(0);
        Ok(())
    }

    async fn exchange(&mut self, bytes: &[u8]) -> std::io::Result<Answer> {
        let line = match &mut self.line {
            Some(line) => line,
            None => self.line.insert(Connection::open(self.address).await?),
        };
        let answer = line.exchange(bytes).await?;
        if answer.header("connection") == Some("close") {
            self.line = None;
        }
        if let Some(index) = answer.header("x-etcd-index").and_then(|index| index.parse().ok()) {
            self.index = index;
        }
        Ok(answer)
    }

    /// As `step`, with what goes wrong as an answer too.
    async fn try_step(&mut self, prefix: &str, line: &str) -> String {
        match tokio::time::timeout(PATIENCE / 4, self.step(prefix, line)).await {
            Ok(Ok(told)) => told,
            Ok(Err(broken)) => format!("the connection broke: {broken}"),
            Err(_) => NOTHING.into(),
        }
    }

    /// Does what a line says, and answers what can be compared.
    async fn step(&mut self, prefix: &str, line: &str) -> std::io::Result<String> {
        let missing = || std::io::Error::other(format!("nothing waits under that name: {line}"));
        if let Some((times, line)) = line.strip_prefix('*').and_then(|line| line.split_once(' ')) {
            let bytes = self.request(prefix, line);
            let mut answer = self.exchange(&bytes).await?;
            for _ in 1..times.parse::<u32>().expect("how many times") {
                answer = self.exchange(&bytes).await?;
            }
            return Ok(self.told(line, answer, false));
        }
        if let Some(revision) = line.strip_prefix("forget ") {
            let revision = self.with_indexes(revision);
            let version =
                self.exchange(&request(self.address, "GET", "/version", None, b"")).await?;
            if version.text().contains("vedetta") {
                let body = format!("{{\"revision\":\"{revision}\",\"physical\":true}}");
                let target = "/v3/kv/compaction";
                let bytes = request(self.address, "POST", target, None, body.as_bytes());
                assert_eq!(self.exchange(&bytes).await?.status, 200, "it can be compacted");
            }
            return Ok(String::new());
        }
        if let Some(name) = line.strip_suffix('+') {
            let waiting = self.waiting.get_mut(name).ok_or_else(missing)?;
            let mut answer = waiting.head.clone();
            answer.body = waiting.connection.chunk().await?.unwrap_or_default();
            let sorted = waiting.sorted;
            return Ok(self.told(line, answer, sorted));
        }
        if let Some((name, mark)) = line.split_once('~').filter(|(name, _)| name.len() == 1) {
            let waiting = self.waiting.get_mut(name).ok_or_else(missing)?;
            let mut answer = waiting.head.clone();
            while let Some(chunk) = waiting.connection.chunk().await? {
                let last = String::from_utf8_lossy(&chunk).contains(mark);
                answer.body.extend(chunk);
                if last {
                    break;
                }
            }
            return Ok(self.told(line, answer, true));
        }
        if let Some(name) = line.strip_suffix('-').filter(|name| name.len() == 1) {
            self.waiting.remove(name).ok_or_else(missing)?;
            return Ok(String::new());
        }
        if line.len() == 1 {
            let Waiting { mut connection, head: mut answer, sorted } =
                self.waiting.remove(line).ok_or_else(missing)?;
            while let Some(chunk) = connection.chunk().await? {
                answer.body.extend(chunk);
            }
            return Ok(self.told(line, answer, sorted));
        }
        if let Some((name, line)) = line.split_once(": ").filter(|(name, _)| name.len() == 1) {
            let bytes = self.request(prefix, line);
            let mut connection = Connection::open(self.address).await?;
            let head = connection.begin(&bytes).await?;
            let told = self.told(line, head.clone(), true);
            let waiting = Waiting { connection, head, sorted: line.contains("sorted=true") };
            self.waiting.insert(name.into(), waiting);
            return Ok(told);
        }
        let bytes = self.request(prefix, line);
        let mut answer = self.exchange(&bytes).await?;
        // Watchers are gone a moment after whoever hung up.
        let watchers = format!("\"watchers\":{}}}", self.waiting.len());
        while line == COUNTS && !answer.text().contains(&watchers) {
            tokio::time::sleep(Duration::from_millis(5)).await;
            answer = self.exchange(&bytes).await?;
        }
        Ok(self.told(line, answer, line.contains("sorted=true")))
    }

    fn request(&self, prefix: &str, line: &str) -> Vec<u8> {
        let line = self.with_indexes(line);
        let (head, body) = line.split_once(" | ").unwrap_or((&line, ""));
        let (head, header) = match head.split_once(" [") {
            Some((head, header)) => (head, header.strip_suffix(']')),
            None => (head, None),
        };
        let (method, target) = head.split_once(' ').expect("a method and a target");
        let target = target.replace('~', &format!("/v2/keys/{prefix}"));
        let content_type = header.and_then(|header| header.strip_prefix("Content-Type: "));
        let content_type = content_type.or((!body.is_empty()).then_some(FORM));
        request(self.address, method, &target, content_type, body.as_bytes())
    }

    /// `{2}` is the second index after the case began.
    fn with_indexes(&self, line: &str) -> String {
        let mut parts = line.split('{');
        let mut whole = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let (number, rest) = part.split_once('}').expect("an index in braces");
            let (name, number) =
                number.strip_prefix('#').map_or((false, number), |number| (true, number));
            let (from, number) =
                number.strip_prefix('@').map_or((self.base, number), |number| (self.index, number));
            let offset: i64 = number.parse().expect("a number in braces");
            let index = from.saturating_add_signed(offset);
            let digits = if name { 20 } else { 0 };
            let _ = write!(whole, "{index:0digits$}");
            whole.push_str(rest);
        }
        whole
    }

    /// What is compared of an answer.
    fn told(&mut self, line: &str, mut answer: Answer, sorted: bool) -> String {
        if let Some(lie) = self.lie {
            lie(line, &mut answer);
        }
        // What is no HTTP is refused before the API sees it, in the words of the HTTP library.
        if answer.status == 400 && answer.header("content-type") != Some("application/json") {
            return "400, not by the API".into();
        }
        let mut headers: Vec<String> = Vec::new();
        for (name, value) in &answer.headers {
            match name.as_str() {
                "date" => {}
                // We have none: a page of another site may not ask.
                name if name.starts_with("access-control-") => {}
                "content-length" if answer.body.is_empty() => {
                    headers.push(format!("{name}: {value}"));
                }
                // The body itself is compared, and whether it is chunked depends on its size there.
                "content-length" | "transfer-encoding" => headers.push("a body".into()),
                "x-etcd-index" => headers.push(format!("{name}: {}", self.relative(value))),
                "x-raft-index" | "x-raft-term" => {
                    let good = value.parse::<u64>().is_ok_and(|value| value > 0);
                    headers.push(format!("{name}: {}", if good { "a number" } else { value }));
                }
                "x-etcd-cluster-id" => {
                    let good = u64::from_str_radix(value, 16).is_ok_and(|value| value > 0);
                    headers.push(format!("{name}: {}", if good { "an id" } else { value }));
                }
                name if TOLD.contains(&name) => headers.push(format!("{name}: {value}")),
                name => headers.push(name.to_owned()),
            }
        }
        headers.sort();
        let body = match line {
            COUNTS => self.counts(&answer.text()),
            line if line.starts_with("GET /v2/stats/") || line.starts_with("GET /v2/members") => {
                of_the_member(&answer.text().replace(&self.address.to_string(), "<address>"))
            }
            _ => self.body(&answer.text(), sorted),
        };
        format!("{}\n{}\n{body}", answer.status, headers.join("\n"))
    }

    /// What was counted since the case first asked, in the order it is told. Expiry is not counted here.
    fn counts(&mut self, text: &str) -> String {
        let inside = text.strip_prefix('{').and_then(|text| text.strip_suffix('}'));
        let pairs: Option<Vec<(String, i64)>> = inside.and_then(|inside| {
            let pairs = inside.split(',').map(|pair| {
                let (name, number) = pair.split_once(':')?;
                Some((name.trim_matches('"').to_owned(), number.parse().ok()?))
            });
            pairs.collect()
        });
        let Some(pairs) = pairs else { return text.into() };
        let before = self.counted.get_or_insert_with(|| pairs.iter().cloned().collect());
        let since = pairs.iter().map(|(name, number)| match name.as_str() {
            "expireCount" => name.clone(),
            "watchers" => format!("{name} {number}"),
            _ => format!("{name} {:+}", number - before.get(name).copied().unwrap_or(0)),
        });
        since.collect::<Vec<_>>().join("\n")
    }

    fn relative(&self, number: &str) -> String {
        match number.parse::<u64>() {
            Ok(0) => "0".into(),
            // Far from any index: a number the case itself sent.
            Ok(number) if number.abs_diff(self.base) < 100_000 => {
                format!("{:+}", number.cast_signed() - self.base.cast_signed())
            }
            _ => number.into(),
        }
    }

    /// A body as it came, but for numbers and times.
    fn body(&self, text: &str, sorted: bool) -> String {
        let mut text = text.replace(&self.address.to_string(), "<address>");
        for field in ["modifiedIndex", "createdIndex", "index"] {
            text = replace(&text, &format!("\"{field}\":"), |number| self.relative(number));
        }
        // Seconds pass between the two.
        text = replace(&text, "\"ttl\":", |number| {
            let ttl: u64 = number.parse().unwrap_or(0);
            if ttl > 50 { ttl.next_multiple_of(100).to_string() } else { number.into() }
        });
        text = times(&text);
        text = in_order_names(&text, |number| self.relative(number));
        text = cause(&text, |number| self.relative(number));
        if sorted { text } else { with_sorted_nodes(&text) }
    }
}

/// What a server says of itself, without ids and times if they look as they should, and without the
/// address that only peers use.
fn of_the_member(text: &str) -> String {
    let looks = |field: &str, value: &str| match field {
        "id" | "leader" => u64::from_str_radix(value, 16).is_ok_and(|id| id > 0).then_some("<id>"),
        "startTime" => {
            let form = value.replace(|c: char| c.is_ascii_digit(), "0");
            let good = form.starts_with("0000-00-00T00:00:00.") && form.ends_with('Z');
            good.then_some("<time>")
        }
        "uptime" => {
            let good = value.ends_with('s') && value.starts_with(|c: char| c.is_ascii_digit());
            let known = |c: char| c.is_ascii_digit() || matches!(c, '.' | 'h' | 'm' | 's' | 'µ');
            (good && value.chars().all(known)).then_some("<duration>")
        }
        "peerURLs" => value.starts_with("http://").then_some("<peer>"),
        _ => None,
    };
    let mut whole = text.to_owned();
    for field in ["id", "leader", "startTime", "uptime", "peerURLs"] {
        let marker = format!("\"{field}\":{}\"", if field == "peerURLs" { "[" } else { "" });
        let mut parts = whole.split(&marker);
        let mut other = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let (value, rest) = part.split_once('"').unwrap_or((part, ""));
            let _ = write!(other, "{marker}{}\"{rest}", looks(field, value).unwrap_or(value));
        }
        whole = other;
    }
    whole
}

/// Puts something else for the number that follows each `marker`.
fn replace(text: &str, marker: &str, other: impl Fn(&str) -> String) -> String {
    let mut parts = text.split(marker);
    let mut whole = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        whole.push_str(marker);
        whole.push_str(&other(&part[..end]));
        whole.push_str(&part[end..]);
    }
    whole
}

/// `2026-11-16T01:31:52.18611374Z` becomes `<time>`; a time in any other form stays.
fn times(text: &str) -> String {
    let marker = "\"expiration\":\"";
    let mut parts = text.split(marker);
    let mut whole = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (time, rest) = part.split_once('"').unwrap_or((part, ""));
        let form: String = time.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        let (seconds, fraction) = form.split_at(form.len().min(19));
        let fraction = fraction.strip_prefix('.').unwrap_or(fraction);
        let good = seconds == "0000-00-00T00:00:00"
            && fraction.len() <= 10
            && fraction.strip_suffix('Z').is_some_and(|digits| digits.chars().all(|c| c == '0'));
        whole.push_str(marker);
        whole.push_str(if good { "<time>" } else { time });
        whole.push('"');
        whole.push_str(rest);
    }
    whole
}

/// Names that POST gave, 20 digits, become what they count.
fn in_order_names(text: &str, other: impl Fn(&str) -> String) -> String {
    let mut whole = String::new();
    let mut rest = text;
    while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
        let digits =
            rest[start..].find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len() - start);
        whole.push_str(&rest[..start]);
        let number = &rest[start..start + digits];
        if digits == 20 {
            let _ = write!(whole, "<20 digits {}>", other(number.trim_start_matches('0')));
        } else {
            whole.push_str(number);
        }
        rest = &rest[start + digits..];
    }
    whole + rest
}

/// Indexes in a cause: `[7 != 9]`, `[1012/3]`.
fn cause(text: &str, other: impl Fn(&str) -> String) -> String {
    let Some((before, rest)) = text.split_once("\"cause\":\"") else { return text.into() };
    let mut whole = format!("{before}\"cause\":\"");
    let mut word = String::new();
    let mut inside = false;
    for c in rest.chars() {
        if c.is_alphanumeric() || matches!(c, '-' | '_' | '.') {
            word.push(c);
            continue;
        }
        let number = inside && !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
        whole.push_str(&if number { other(&word) } else { std::mem::take(&mut word) });
        word.clear();
        whole.push(c);
        inside = (inside || c == '[') && c != ']';
    }
    whole + &word
}

/// The nodes of each directory in order: etcd lists them as they lie in a map.
fn with_sorted_nodes(text: &str) -> String {
    let marker = "\"nodes\":[";
    let Some(start) = text.find(marker) else { return text.into() };
    let start = start + marker.len();
    let mut nodes: Vec<String> = Vec::new();
    let (mut depth, mut quoted, mut escaped, mut from, mut end) = (0, false, false, start, start);
    for (at, c) in text[start..].char_indices().map(|(at, c)| (start + at, c)) {
        if quoted {
            quoted = escaped || c != '"';
            escaped = !escaped && c == '\\';
            continue;
        }
        match c {
            '"' => quoted = true,
            '{' | '[' => depth += 1,
            ']' if depth == 0 => {
                end = at;
                break;
            }
            '}' | ']' => depth -= 1,
            ',' if depth == 0 => {
                nodes.push(with_sorted_nodes(&text[from..at]));
                from = at + 1;
            }
            _ => {}
        }
    }
    nodes.push(with_sorted_nodes(&text[from..end]));
    nodes.sort();
    format!("{}{}{}", &text[..start], nodes.join(","), with_sorted_nodes(&text[end..]))
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
async fn every_v2_request_of_the_table_is_answered_as_by_etcd() {
    let servers = Servers::start().await;
    let cases = parse(include_str!("v2.cases"));
    let requests: usize = cases.iter().map(|case| case.lines.len() + 1).sum();
    assert!(requests >= 300, "the table has only {requests} requests");
    let mut pair = Pair::new(servers.addresses(), None);
    let told = run_table(&cases, &mut pair).await;
    let (failed, all) = (told.len(), cases.len());
    assert!(told.is_empty(), "{failed} of {all} cases differ\n{}", told.join("\n"));
    // Every code that the keys API has for what a client can do wrong. 300 is for what happens to the server.
    let documented = [100, 101, 102, 104, 105, 107, 108, 201, 202, 203, 209, 210, 211, 212, 401];
    assert_eq!(pair.codes, BTreeSet::from(documented), "the codes that were compared");
}

/// Each lie is told by the second of two etcds: only the lie can make a difference.
#[tokio::test(flavor = "multi_thread")]
async fn a_lie_about_v2_is_seen() {
    fn in_body(answer: &mut Answer, from: &str, to: &str) {
        answer.body = answer.text().replacen(from, to, 1).into_bytes();
    }
    fn header(answer: &mut Answer, name: &str, to: Option<&str>) {
        answer.headers.retain(|(known, _)| known != name);
        answer.headers.extend(to.map(|to| (name.to_owned(), to.to_owned())));
    }
    let lies: &[(&str, Lie)] = &[
        ("another status", |_, answer| answer.status += u16::from(answer.status == 201)),
        ("an index too far", |line, answer| {
            let index: u64 = answer.header("x-etcd-index").unwrap().parse().unwrap();
            let more = u64::from(line.starts_with("DELETE"));
            header(answer, "x-etcd-index", Some(&(index + more).to_string()));
        }),
        ("no raft index", |_, answer| header(answer, "x-raft-index", None)),
        ("another type", |_, answer| header(answer, "content-type", Some("text/json"))),
        ("a value", |_, answer| in_body(answer, "\"value\":\"two\"", "\"value\":\"three\"")),
        ("an escape", |_, answer| in_body(answer, r"\u003c", "<")),
        ("fields in another order", |_, answer| {
            in_body(answer, r#""key":"/case-"#, r#""dir":true,"key":"/case-"#);
        }),
        ("no newline at the end", |_, answer| {
            answer.body.pop();
        }),
        ("an error's cause", |_, answer| in_body(answer, "[wrong != ", "[[wrong != ")),
        ("an error's code", |_, answer| in_body(answer, "\"errorCode\":101", "\"errorCode\":105")),
        ("a time with an offset", |_, answer| in_body(answer, "Z\",\"ttl\"", "+00:00\",\"ttl\"")),
        ("a missing node", |_, answer| in_body(answer, "\"nodes\":[", "\"nodes\":[{},")),
        ("a count", |line, answer| {
            if line == COUNTS {
                in_body(answer, ",\"setsFail\":", "0,\"setsFail\":");
            }
        }),
        ("an id that is none", |line, answer| {
            if line == "GET /v2/members" {
                in_body(answer, "\"id\":\"", "\"id\":\"x");
            }
        }),
        ("a word of itself", |_, answer| in_body(answer, "StateLeader", "StateFollower")),
        ("an event of a stream", |line, answer| {
            if line == "w+" {
                in_body(answer, "\"action\":\"set\"", "\"action\":\"update\"");
            }
        }),
    ];
    let case = parse(
        "== lies
        w: GET ~?wait=true&stream=true&recursive=true
        PUT ~/a | value=two%3C
        w+
        PUT ~/b | value=two&ttl=900
        PUT ~/a?prevValue=wrong | value=one
        DELETE ~/a
        w-
        GET /v2/stats/store
        PUT ~/c | value=1
        GET /v2/stats/store
        GET /v2/stats/self
        GET /v2/members",
    );
    let (one, other) = (crate::support::Etcd::start().await, crate::support::Etcd::start().await);
    let addresses = [one.address, other.address];
    let told = run_table(&case, &mut Pair::new(addresses, None)).await;
    assert!(told.is_empty(), "without a lie nothing differs: {}", told.join("\n"));
    for (name, lie) in lies {
        let told = run_table(&case, &mut Pair::new(addresses, Some(*lie))).await;
        assert_eq!(told.len(), 1, "{name} was not seen");
    }
}
