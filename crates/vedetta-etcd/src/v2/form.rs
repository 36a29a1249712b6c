//! What a request asks for: its query, and its form if it has one.

use axum::http::{HeaderMap, Method, header};
use bytes::Bytes;

use super::error::{Code, Error};
use super::path::Path;

/// A request on keys.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is a field of the form")]
pub(crate) struct Ask {
    pub(crate) path: Path,
    pub(crate) value: Bytes,
    pub(crate) dir: bool,
    pub(crate) recursive: bool,
    pub(crate) wait: bool,
    pub(crate) stream: bool,
    /// 0 is from now on.
    pub(crate) wait_index: u64,
    pub(crate) compare: Compare,
    pub(crate) prev_exist: Option<bool>,
    /// Keep the value, and tell no watcher.
    pub(crate) refresh: bool,
    /// In seconds.
    pub(crate) ttl: Option<u64>,
    pub(crate) no_value: bool,
}

/// What the node must have; empty and 0 are no condition.
#[derive(Debug, Clone)]
pub(crate) struct Compare {
    pub(crate) value: Bytes,
    pub(crate) index: u64,
}

impl Compare {
    pub(crate) fn is_given(&self) -> bool {
        !self.value.is_empty() || self.index != 0
    }
}

impl Ask {
    pub(crate) fn parse(
        path: Path,
        method: &Method,
        headers: &HeaderMap,
        query: &[u8],
        body: &[u8],
    ) -> Result<Self, Error> {
        let form = Form::read(method, headers, query, body)?;
        let invalid = |name: &str| {
            Error::request(Code::InvalidField, format!("invalid value for \"{name}\""))
        };
        let flag =
            |name: &str| form.flag(name).map_err(|()| invalid(name)).map(|f| f == Some(true));
        let index = |name: &str| {
            let text = format!("invalid value for \"{name}\"");
            form.number(name).map_err(|()| Error::request(Code::IndexNotANumber, text))
        };
        // The order decides which mistake is told of.
        let prev_index = index("prevIndex")?.unwrap_or(0);
        let wait_index = index("waitIndex")?.unwrap_or(0);
        let (recursive, _sorted, wait) = (flag("recursive")?, flag("sorted")?, flag("wait")?);
        let (dir, quorum, stream) = (flag("dir")?, flag("quorum")?, flag("stream")?);
        if wait && method != Method::GET {
            let text = "\"wait\" can only be used with GET requests";
            return Err(Error::request(Code::InvalidField, text));
        }
        let prev_value = form.get("prevValue").cloned();
        if prev_value.as_ref().is_some_and(Bytes::is_empty) {
            let text = "\"prevValue\" cannot be empty";
            return Err(Error::request(Code::PrevValueRequired, text));
        }
        let no_value = flag("noValueOnSuccess")?;
        let ttl = match form.get("ttl") {
            None => None,
            Some(text) if text.is_empty() => None,
            Some(_) => form
                .number("ttl")
                .map_err(|()| Error::request(Code::TtlNotANumber, "invalid value for \"ttl\""))?,
        };
        let nullable = |name: &str| {
            let text = format!("invalid value for {name}");
            form.flag(name).map_err(|()| Error::request(Code::InvalidField, text))
        };
        let prev_exist = nullable("prevExist")?;
        let refresh = nullable("refresh")? == Some(true);
        let value = form.get("value").cloned().unwrap_or_default();
        if refresh && !value.is_empty() {
            let text = "A value was provided on a refresh";
            return Err(Error::request(Code::RefreshValue, text));
        }
        if refresh && ttl.is_none() {
            return Err(Error::request(Code::RefreshTtlRequired, "No TTL value set"));
        }
        let compare = Compare { value: prev_value.unwrap_or_default(), index: prev_index };
        Ok(Self {
            path,
            value,
            dir,
            recursive,
            // Such a read takes the way of the writes there, where nobody waits.
            wait: wait && !quorum,
            stream,
            wait_index,
            compare,
            prev_exist,
            refresh,
            ttl,
            no_value,
        })
    }
}

/// Names and values, those of the body first: the first of a name counts.
struct Form(Vec<(Bytes, Bytes)>);

impl Form {
    fn read(
        method: &Method,
        headers: &HeaderMap,
        query: &[u8],
        body: &[u8],
    ) -> Result<Self, Error> {
        let mut pairs = Vec::new();
        if (method == Method::PUT || method == Method::POST) && is_form(headers)? {
            parse(body, &mut pairs)?;
        }
        parse(query, &mut pairs)?;
        Ok(Self(pairs))
    }

    fn get(&self, name: &str) -> Option<&Bytes> {
        self.0.iter().find(|(key, _)| key == name.as_bytes()).map(|(_, value)| value)
    }

    fn flag(&self, name: &str) -> Result<Option<bool>, ()> {
        match self.get(name).map(|value| &value[..]) {
            None => Ok(None),
            Some(b"1" | b"t" | b"T" | b"true" | b"TRUE" | b"True") => Ok(Some(true)),
            Some(b"0" | b"f" | b"F" | b"false" | b"FALSE" | b"False") => Ok(Some(false)),
            Some(_) => Err(()),
        }
    }

    fn number(&self, name: &str) -> Result<Option<u64>, ()> {
        let Some(text) = self.get(name) else { return Ok(None) };
        if !text.iter().all(u8::is_ascii_digit) {
            return Err(()); // Rust would take a plus sign
        }
        let text = str::from_utf8(text).map_err(drop)?;
        text.parse().map(Some).map_err(drop)
    }
}

/// Any other body is not looked at.
fn is_form(headers: &HeaderMap) -> Result<bool, Error> {
    let Some(kind) = headers.get(header::CONTENT_TYPE) else { return Ok(false) };
    let kind = kind.to_str().unwrap_or_default();
    if kind.is_empty() {
        return Ok(false);
    }
    let kind = kind.split(';').next().unwrap_or_default().trim();
    if kind.is_empty() || kind == "/" {
        return Err(Error::request(Code::InvalidForm, "mime: no media type"));
    }
    if kind.split('/').count() > 2 {
        let text = "mime: unexpected content after media subtype";
        return Err(Error::request(Code::InvalidForm, text));
    }
    Ok(kind.eq_ignore_ascii_case("application/x-www-form-urlencoded"))
}

fn parse(text: &[u8], pairs: &mut Vec<(Bytes, Bytes)>) -> Result<(), Error> {
    for pair in text.split(|&byte| byte == b'&').filter(|pair| !pair.is_empty()) {
        if pair.contains(&b';') {
            let text = "invalid semicolon separator in query";
            return Err(Error::request(Code::InvalidForm, text));
        }
        let equals = pair.iter().position(|&byte| byte == b'=');
        let (name, value) = match equals {
            Some(at) => (&pair[..at], &pair[at + 1..]),
            None => (pair, &[][..]),
        };
        let read = |text| {
            unescape(text, true).map_err(|bad| {
                let mut cause = b"invalid URL escape \"".to_vec();
                cause.extend_from_slice(&bad);
                cause.push(b'"');
                Error::request(Code::InvalidForm, cause)
            })
        };
        pairs.push((read(name)?.into(), read(value)?.into()));
    }
    Ok(())
}

/// Undoes percent-encoding; refuses an escape that is none, with its bytes.
pub(crate) fn unescape(text: &[u8], plus_is_space: bool) -> Result<Vec<u8>, Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, after @ ..] = rest {
        rest = after;
        out.push(match first {
            b'%' => {
                let digits =
                    after.first_chunk::<2>().and_then(|digits| str::from_utf8(digits).ok());
                let digits = digits.filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
                let Some(Ok(byte)) = digits.map(|digits| u8::from_str_radix(digits, 16)) else {
                    return Err([b"%", &after[..after.len().min(2)]].concat());
                };
                rest = &after[2..];
                byte
            }
            b'+' if plus_is_space => b' ',
            other => *other,
        });
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(method: &Method, query: &str, body: &str) -> Result<Ask, Error> {
        let mut headers = HeaderMap::new();
        let form = "application/x-www-form-urlencoded; charset=utf-8".parse().unwrap();
        headers.insert(header::CONTENT_TYPE, form);
        Ask::parse(Path::clean(b"/a"), method, &headers, query.as_bytes(), body.as_bytes())
    }

    fn code(query: &str) -> Code {
        ask(&Method::PUT, query, "").unwrap_err().code
    }

    #[test]
    fn the_body_comes_before_the_query() {
        let both = ask(&Method::PUT, "value=q&ttl=5&dir=T", "value=b+c%20%3d&value=x").unwrap();
        assert_eq!((&both.value[..], both.ttl, both.dir), (&b"b c ="[..], Some(5), true));
        let get = ask(&Method::GET, "value=q", "value=b").unwrap();
        assert_eq!(get.value, "q", "a GET has no form");
        assert_eq!(ask(&Method::PUT, "ttl=", "").unwrap().ttl, None);
        assert_eq!(ask(&Method::PUT, "prevExist=false", "").unwrap().prev_exist, Some(false));
    }

    #[test]
    fn the_first_mistake_is_told_of() {
        for (query, expected) in [
            ("prevIndex=a&recursive=b", Code::IndexNotANumber),
            ("waitIndex=-1", Code::IndexNotANumber),
            ("waitIndex=+1", Code::IndexNotANumber),
            ("prevIndex=", Code::IndexNotANumber),
            ("prevIndex=18446744073709551616", Code::IndexNotANumber),
            ("recursive=", Code::InvalidField),
            ("dir=yes&ttl=a", Code::InvalidField),
            ("wait=true", Code::InvalidField),
            ("prevValue=", Code::PrevValueRequired),
            ("ttl=1.5", Code::TtlNotANumber),
            ("ttl=-1", Code::TtlNotANumber),
            ("prevExist=", Code::InvalidField),
            ("refresh=true&value=x", Code::RefreshValue),
            ("refresh=true", Code::RefreshTtlRequired),
            ("a;b", Code::InvalidForm),
            ("a=%f", Code::InvalidForm),
        ] {
            assert_eq!(code(query), expected, "{query}");
        }
        assert!(ask(&Method::PUT, "refresh=false&value=x", "").is_ok());
        let bad = ask(&Method::PUT, "", "a=%zzz").unwrap_err();
        assert_eq!(bad, Error::request(Code::InvalidForm, "invalid URL escape \"%zz\""));
    }
}
