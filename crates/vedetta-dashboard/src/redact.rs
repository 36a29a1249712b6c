//! What people are not shown: the values of what is called a password, a token and so on.
//!
//! In JSON the name of a field decides, however deep it lies. In texts, such as errors and logs, it is what
//! stands after such a name, and the password in an address. So a secret under an innocent name is shown: this
//! keeps honest mistakes off the screen, and is no way to keep secrets in payloads.

use serde_json::value::RawValue;
use vedetta_fleet::wire::{SupervisorInfo, WorkerInfo, Workers};
use vedetta_jobs::{Job, Json};

/// Instead of a value.
pub(crate) const MASK: &str = "•••• (redacted)";

/// What a name must have in it, in lower case.
const NAMES: [&str; 10] = [
    "password",
    "passwd",
    "secret",
    "token",
    "authorization",
    "cookie",
    "apikey",
    "api_key",
    "api-key",
    "credential",
];

/// A job as people see it.
pub(crate) fn job(mut job: Job) -> Job {
    hide(&mut job.payload);
    job.result.iter_mut().for_each(hide);
    job.error.iter_mut().chain(&mut job.message).chain([&mut job.log]).for_each(hide_in);
    job
}

/// Whether anything of a job is hidden from people.
pub(crate) fn has_secrets(job: &Job) -> bool {
    let mut texts = job.error.iter().chain(&job.message).chain([&job.log]);
    let mut values = job.result.iter().chain([&job.payload]);
    values.any(|value| json(value.get()).is_some()) || texts.any(|shown| text(shown).is_some())
}

/// Everybody who works, as people see them: what processes wrote before their ends may have anything in it.
pub(crate) fn workers(mut all: Workers) -> Workers {
    all.workers = all.workers.into_iter().map(worker).collect();
    all.supervisors = all.supervisors.into_iter().map(supervisor).collect();
    all
}

/// A worker as people see it.
pub(crate) fn worker(mut one: WorkerInfo) -> WorkerInfo {
    one.note.iter_mut().for_each(hide_in);
    one
}

/// A supervisor as people see it.
pub(crate) fn supervisor(mut one: SupervisorInfo) -> SupervisorInfo {
    if let Some(report) = &mut one.report {
        report.last_exit.iter_mut().chain(&mut report.stderr).for_each(hide_in);
    }
    one
}

/// Hides what is to be hidden in a text.
pub(crate) fn hide_in(shown: &mut String) {
    if let Some(hidden) = text(shown) {
        *shown = hidden;
    }
}

fn hide(value: &mut Json) {
    if let Some(hidden) = json(value.get()) {
        // It is as much JSON as it was; if not, nothing of it is shown.
        let masked = || format!("\"{MASK}\"");
        let hidden = RawValue::from_string(hidden).or_else(|_| RawValue::from_string(masked()));
        *value = hidden.unwrap_or_else(|_| RawValue::NULL.to_owned());
    }
}

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    NAMES.iter().any(|part| name.contains(part))
}

/// The same JSON with values hidden, and all else as it was written; `None` when there is nothing to hide.
pub(crate) fn json(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let (mut out, mut copied, mut at) = (String::new(), 0, 0);
    while at < bytes.len() {
        if bytes[at] != b'"' {
            at += 1;
            continue;
        }
        let end = string_end(bytes, at);
        let after = skip_space(bytes, end);
        // Only a name is followed by a colon.
        if bytes.get(after) != Some(&b':') {
            at = end;
            continue;
        }
        let value = skip_space(bytes, after + 1);
        let name = text.get(at..end).unwrap_or_default();
        let name = serde_json::from_str::<String>(name).unwrap_or_default();
        if !is_secret(&name) {
            at = value;
            continue;
        }
        let value_end = value_end(bytes, value);
        if matches!(text.get(value..value_end), Some("null" | "true" | "false")) {
            at = value_end;
            continue;
        }
        out.push_str(text.get(copied..value).unwrap_or_default());
        out.push('"');
        out.push_str(MASK);
        out.push('"');
        (copied, at) = (value_end, value_end);
    }
    finish(text, out, copied)
}

fn finish(text: &str, mut out: String, copied: usize) -> Option<String> {
    (copied > 0).then(|| {
        out.push_str(text.get(copied..).unwrap_or_default());
        out
    })
}

/// After the string that begins at `at`.
fn string_end(bytes: &[u8], at: usize) -> usize {
    let mut at = at + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

fn skip_space(bytes: &[u8], at: usize) -> usize {
    let space = bytes[at.min(bytes.len())..].iter().take_while(|byte| byte.is_ascii_whitespace());
    at + space.count()
}

/// After the value that begins at `at`.
fn value_end(bytes: &[u8], at: usize) -> usize {
    let (mut at, mut depth) = (at, 0_usize);
    while at < bytes.len() {
        match bytes[at] {
            b'"' => at = string_end(bytes, at),
            b'{' | b'[' => {
                depth += 1;
                at += 1;
            }
            b'}' | b']' if depth > 0 => {
                depth -= 1;
                at += 1;
            }
            b'}' | b']' | b',' if depth == 0 => return at,
            byte if byte.is_ascii_whitespace() && depth == 0 => return at,
            _ => {
                at += 1;
                continue;
            }
        }
        if depth == 0 {
            return at;
        }
    }
    bytes.len()
}

/// The same text with what follows such names hidden; `None` when there is nothing to hide.
pub(crate) fn text(text: &str) -> Option<String> {
    let lower = text.to_ascii_lowercase();
    let bytes = lower.as_bytes();
    let (mut out, mut copied, mut at) = (String::new(), 0, 0);
    while at < bytes.len() {
        let rest = &bytes[at..];
        let (next, hidden) = if NAMES.iter().any(|name| rest.starts_with(name.as_bytes())) {
            named(bytes, at)
        } else if rest.starts_with(b"bearer ") {
            (at + 7, Some((at + 7, word_end(bytes, at + 7))))
        } else if rest.starts_with(b"://") {
            (at + 3, address(bytes, at + 3))
        } else {
            (at + 1, None)
        };
        match hidden.filter(|(from, to)| from < to) {
            Some((from, to)) => {
                out.push_str(text.get(copied..from).unwrap_or_default());
                out.push_str(MASK);
                (copied, at) = (to, to);
            }
            None => at = next,
        }
    }
    finish(text, out, copied)
}

/// The end of the word with the name that begins at `at`, and what follows it: `name=value`, `"name": "value"`,
/// `--name value`.
fn named(bytes: &[u8], at: usize) -> (usize, Option<(usize, usize)>) {
    let is_word = |byte: &&u8| byte.is_ascii_alphanumeric() || b"_-".contains(*byte);
    let is_quote = |byte: &&u8| b"\\\"'`".contains(*byte);
    let end = at + bytes[at..].iter().take_while(is_word).count();
    let quotes = bytes[end..].iter().take_while(is_quote);
    let after = skip_space(bytes, end + quotes.count());
    let start = match bytes.get(after) {
        Some(b':' | b'=') => {
            let arrow = usize::from(bytes.get(after + 1) == Some(&b'>'));
            skip_blanks(bytes, after + 1 + arrow)
        }
        _ => {
            let begin = bytes[..at].iter().rev().take_while(is_word).count();
            let is_flag = bytes[at - begin..].starts_with(b"--");
            if !is_flag || after == end {
                return (end, None);
            }
            after
        }
    };
    let quotes = bytes[start..].iter().take_while(is_quote).count();
    let from = start + quotes;
    let until = |is_end: &dyn Fn(u8) -> bool| {
        let to = bytes[from..].iter().position(|byte| is_end(*byte));
        to.map_or(bytes.len(), |to| from + to)
    };
    // Those have spaces in them.
    let is_header = |name: &[u8]| bytes[at..end].windows(name.len()).any(|part| part == name);
    let to = match quotes.checked_sub(1).map(|last| bytes[start + last]) {
        Some(quote) => until(&|byte| byte == quote || byte == b'\n'),
        None if is_header(b"authorization") || is_header(b"cookie") => {
            until(&|byte| byte == b'\n' || byte == b'"')
        }
        None => word_end(bytes, from),
    };
    (end, Some((from, to)))
}

fn skip_blanks(bytes: &[u8], at: usize) -> usize {
    at + bytes[at..].iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count()
}

/// The end of the word at `at`; what was hidden already counts as one.
fn word_end(bytes: &[u8], at: usize) -> usize {
    let at = if bytes[at..].starts_with(MASK.as_bytes()) { at + MASK.len() } else { at };
    let is_end = |byte: &u8| byte.is_ascii_whitespace() || b",;&)}]\"'<>".contains(byte);
    bytes[at..].iter().position(is_end).map_or(bytes.len(), |end| at + end)
}

/// The password in `user:password@host`.
fn address(bytes: &[u8], at: usize) -> Option<(usize, usize)> {
    let is_end = |byte: &u8| byte.is_ascii_whitespace() || b"/?#\"'<>".contains(byte);
    let end = bytes[at..].iter().position(is_end).map_or(bytes.len(), |end| at + end);
    let user_end = at + bytes[at..end].iter().rposition(|byte| *byte == b'@')?;
    let colon = at + bytes[at..user_end].iter().position(|byte| *byte == b':')?;
    Some((colon + 1, user_end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_secret_names_are_hidden_at_any_depth_and_the_rest_stays_as_it_was_written() {
        for (written, shown) in [
            (r#"{"a":1.10,"b":[12345678901234567890]}"#, None),
            (r#""password""#, None),
            (r#"["password","x"]"#, None),
            ("null", None),
            ("", None),
            (r#"{"password":"x"}"#, Some(r#"{"password":"M"}"#)),
            (r#"{ "Password" :  "x" , "n":1.10}"#, Some(r#"{ "Password" :  "M" , "n":1.10}"#)),
            (
                r#"{"a":{"b":[{"api-KEY":{"c":"}\"]"}}],"d":2}}"#,
                Some(r#"{"a":{"b":[{"api-KEY":"M"}],"d":2}}"#),
            ),
            (
                r#"{"pass\u0077ord":"x","tokens":["a","b"]}"#,
                Some(r#"{"pass\u0077ord":"M","tokens":"M"}"#),
            ),
            (
                r#"{"secret":7,"x_secret_y":null,"has_token":true}"#,
                Some(r#"{"secret":"M","x_secret_y":null,"has_token":true}"#),
            ),
            (
                r#"{"a":"\"token\": \"shown\"","credentials":[]}"#,
                Some(r#"{"a":"\"token\": \"shown\"","credentials":"M"}"#),
            ),
        ] {
            let shown = shown.map(|text| text.replace("\"M\"", &format!("\"{MASK}\"")));
            assert_eq!(json(written), shown, "{written}");
        }
    }

    #[test]
    fn what_follows_secret_names_in_texts_is_hidden() {
        for (written, shown) in [
            ("it failed", None),
            ("the token is stale", None),
            ("no password was given", None),
            ("password=x y", Some("password=M y")),
            ("DB_PASSWORD: x, next", Some("DB_PASSWORD: M, next")),
            ("{\"token\": \"x y\", \"n\": 1}", Some("{\"token\": \"M\", \"n\": 1}")),
            ("{\\\"token\\\": \\\"x\\\"}", Some("{\\\"token\\\": \\\"M\"}")),
            ("Authorization: Basic eDp5\nnext", Some("Authorization: M\nnext")),
            ("Set-Cookie: a=b; c\nnext", Some("Set-Cookie: M\nnext")),
            ("sent Bearer abc.def to", Some("sent Bearer M to")),
            ("run --password x --token=y -v", Some("run --password M --token=M -v")),
            ("postgres://me:x@host/db failed", Some("postgres://me:M@host/db failed")),
            ("http://host:80/a@b", None),
            ("ünï password='x ü' ü", Some("ünï password='M' ü")),
            ("api_key=>x", Some("api_key=>M")),
            ("token-authorization: Basic x y", Some("token-authorization: M")),
            ("secret=", None),
        ] {
            let shown = shown.map(|text| text.replace('M', MASK));
            assert_eq!(text(written), shown, "{written}");
            if let Some(once) = shown {
                assert_eq!(text(&once).unwrap_or(once.clone()), once, "twice is as once");
            }
        }
    }

    #[test]
    fn nothing_makes_it_fall_over_or_take_long() {
        for piece in
            ["password", "\"token\":", "{", "\"", "\\", "://a:", "é", "bearer ", "=", "--secret "]
        {
            let long = piece.repeat(100_000 / piece.len());
            let _ = text(&long);
            let _ = json(&long);
            for cut in 0..40 {
                let _ = text(long.get(cut..).unwrap_or_default());
                let _ = json(long.get(..cut).unwrap_or_default());
            }
        }
    }
}
