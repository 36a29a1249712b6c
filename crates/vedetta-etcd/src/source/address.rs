use std::fmt;
use std::str::FromStr;

use axum::http::uri::Authority;

/// Where etcd listens unless told otherwise.
const PORT: u16 = 2379;

/// Why a text is no endpoint.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadEndpoint {
    /// Give one.
    #[error("no endpoint is given")]
    Missing,
    /// Write it as the message says.
    #[error(
        "{0:?} is no endpoint: write http://host:2379, https://host:2379 or etcd://a:2379,b:2379"
    )]
    Form(String),
    /// Give the user by itself. What was given is not repeated.
    #[error("an endpoint holds no user and no password: they are given by themselves")]
    Secret,
}

/// Where a node listens.
#[derive(Clone)]
pub(super) struct Address {
    /// A name or a number; of IPv6 without the brackets.
    pub(super) host: String,
    pub(super) port: u16,
    /// `None` if it is not said.
    pub(super) tls: Option<bool>,
}

impl FromStr for Address {
    type Err = BadEndpoint;

    fn from_str(text: &str) -> Result<Self, BadEndpoint> {
        if text.contains('@') {
            return Err(BadEndpoint::Secret);
        }
        let bad = || BadEndpoint::Form(text.to_owned());
        let (tls, rest) = match text.trim().split_once("://") {
            Some(("http", rest)) => (Some(false), rest),
            Some(("https", rest)) => (Some(true), rest),
            Some(_) => return Err(bad()),
            None => (None, text.trim()),
        };
        let place: Authority = rest.strip_suffix('/').unwrap_or(rest).parse().map_err(|_| bad())?;
        let host = place.host().trim_start_matches('[').trim_end_matches(']');
        let port = match place.as_str().rsplit_once(':') {
            Some((_, port)) if !port.ends_with(']') => port.parse().map_err(|_| bad())?,
            _ => PORT,
        };
        if host.is_empty() || port == 0 {
            return Err(bad());
        }
        Ok(Self { host: host.to_owned(), port, tls })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.tls {
            Some(true) => "https://",
            Some(false) => "http://",
            None => "",
        };
        if self.host.contains(':') {
            write!(f, "{scheme}[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{scheme}{}:{}", self.host, self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_understood_or_refused() {
        for (text, understood) in [
            ("http://a:1", Some("http://a:1")),
            ("https://a.b-c.d:65535/", Some("https://a.b-c.d:65535")),
            ("a", Some("a:2379")),
            (" a:1 ", Some("a:1")),
            ("https://10.0.0.1", Some("https://10.0.0.1:2379")),
            ("http://[::1]:7", Some("http://[::1]:7")),
            ("[::1]", Some("[::1]:2379")),
            ("", None),
            ("http://", None),
            ("http://:1", None),
            ("a:0", None),
            ("a:65536", None),
            ("a:b", None),
            ("a:", None),
            ("a/b", None),
            ("http://a:1/v3", None),
            ("ftp://a:1", None),
            ("a b", None),
        ] {
            let told = text.parse().map(|address: Address| address.to_string());
            let expected = understood.map(str::to_owned).ok_or(BadEndpoint::Form(text.to_owned()));
            assert_eq!(told, expected, "{text:?}");
        }
    }

    #[test]
    fn a_password_in_an_endpoint_is_refused_and_not_repeated() {
        let refused = "http://root:secret@a:1".parse::<Address>().err().unwrap();
        assert!(!format!("{refused} {refused:?}").contains("secret"));
    }
}
