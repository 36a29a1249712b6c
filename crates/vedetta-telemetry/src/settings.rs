//! Where telemetry goes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use percent_encoding::percent_decode_str;
use ureq::Agent;
use ureq::http::{HeaderName, HeaderValue, Uri};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

/// The variables that OpenTelemetry's own programs heed, too.
const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const HEADERS: &str = "OTEL_EXPORTER_OTLP_HEADERS";
const CERTIFICATE: &str = "OTEL_EXPORTER_OTLP_CERTIFICATE";
const PROTOCOL: &str = "OTEL_EXPORTER_OTLP_PROTOCOL";
const SERVICE: &str = "OTEL_SERVICE_NAME";
const INTERVAL: &str = "OTEL_METRIC_EXPORT_INTERVAL";

/// How often numbers are sent, unless said otherwise.
const EVERY: Duration = Duration::from_secs(60);

/// Why telemetry cannot be sent anywhere.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// Give another address.
    #[error("{0} is not an address such as http://127.0.0.1:4318")]
    Url(&'static str),
    /// Let it go, or speak another.
    #[error("{PROTOCOL} is {0:?}: only http/protobuf is spoken")]
    Protocol(String),
    /// Write them otherwise.
    #[error("{HEADERS} is not a list such as name=value,name=value")]
    Headers,
    /// Give a number.
    #[error("{INTERVAL} is {0:?}: give a number of milliseconds from 100 on")]
    Interval(String),
    /// Give a part.
    #[error("telemetry.sample is {0}: give a number from 0 to 1")]
    Sample(f64),
    /// Give another file.
    #[error("{CERTIFICATE} cannot be used: {0}")]
    Authority(String),
    /// There is no room for a thread.
    #[error("cannot start the thread that sends telemetry")]
    Thread(#[source] std::io::Error),
}

/// Where telemetry goes, and how much of it.
#[derive(Clone)]
pub struct Settings {
    pub(crate) url: String,
    /// The same without what may be secret.
    pub(crate) shown: String,
    pub(crate) headers: Vec<(HeaderName, HeaderValue)>,
    pub(crate) sample: f64,
    authority: Option<PathBuf>,
    service: String,
    every: Duration,
}

impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Settings").field("to", &self.shown).finish_non_exhaustive()
    }
}

impl Settings {
    /// What the environment says, else the given address; nothing if there is none. Of traces that begin here the
    /// part `sample` is told.
    pub fn find(url: Option<&str>, sample: f64) -> Result<Option<Self>, SettingsError> {
        Self::read(url, sample, |name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn read(
        url: Option<&str>,
        sample: f64,
        set: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, SettingsError> {
        if !(0.0..=1.0).contains(&sample) {
            return Err(SettingsError::Sample(sample));
        }
        let (named, url) = match (set(ENDPOINT), url) {
            (Some(url), _) => (ENDPOINT, url),
            (None, Some(url)) => ("telemetry.otlp", url.to_owned()),
            (None, None) => return Ok(None),
        };
        // What it is may be secret.
        let wrong = || SettingsError::Url(named);
        let uri: Uri = url.parse().map_err(|_| wrong())?;
        let (Some("http" | "https"), Some(host)) = (uri.scheme_str(), uri.host()) else {
            return Err(wrong());
        };
        let port = uri.port().map(|port| format!(":{port}")).unwrap_or_default();
        let shown = format!("{}://{host}{port}", uri.scheme_str().unwrap_or_default());
        if let Some(protocol) = set(PROTOCOL).filter(|protocol| protocol != "http/protobuf") {
            return Err(SettingsError::Protocol(protocol));
        }
        let every = match set(INTERVAL) {
            None => EVERY,
            Some(text) => match text.parse() {
                Ok(ms @ 100..) => Duration::from_millis(ms),
                _ => return Err(SettingsError::Interval(text)),
            },
        };
        Ok(Some(Self {
            url: url.trim_end_matches('/').to_owned(),
            shown,
            headers: set(HEADERS).map(|text| headers(&text)).transpose()?.unwrap_or_default(),
            sample,
            authority: set(CERTIFICATE).map(PathBuf::from),
            service: set(SERVICE).unwrap_or_else(|| "vedetta".into()),
            every,
        }))
    }

    /// Where it goes, without what may be secret.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// How often numbers are to be sent.
    pub fn every(&self) -> Duration {
        self.every
    }

    /// Tries whether something answers there as a collector does.
    pub fn check(&self, limit: Duration) -> Result<(), String> {
        let agent = self.agent(limit).map_err(|error| error.to_string())?;
        let mut request = agent
            .post(format!("{}/v1/traces", self.url))
            .header("Content-Type", "application/x-protobuf");
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        // Nothing is told, which is allowed.
        let answer = request.send_empty().map_err(|error| error.to_string())?;
        if answer.status().is_success() {
            Ok(())
        } else {
            Err(format!("it answered {}", answer.status()))
        }
    }

    pub(crate) fn about(&self, more: &[(&str, &str)]) -> Vec<(String, String)> {
        let own = [
            ("service.name", self.service.as_str()),
            ("service.version", env!("CARGO_PKG_VERSION")),
        ];
        let all = own.iter().chain(more);
        all.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    pub(crate) fn agent(&self, limit: Duration) -> Result<Agent, SettingsError> {
        let config = Agent::config_builder()
            .tls_config(match &self.authority {
                Some(file) => trusting(file)?,
                None => TlsConfig::default(),
            })
            .proxy(None)
            .max_redirects(0)
            .http_status_as_error(false)
            .user_agent(concat!("vedetta/", env!("CARGO_PKG_VERSION")))
            .timeout_global(Some(limit));
        Ok(config.build().into())
    }
}

fn headers(text: &str) -> Result<Vec<(HeaderName, HeaderValue)>, SettingsError> {
    let each = text.split(',').filter(|pair| !pair.trim().is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').ok_or(SettingsError::Headers)?;
        let value = percent_decode_str(value.trim()).decode_utf8();
        let value = value.map_err(|_| SettingsError::Headers)?;
        let name = HeaderName::try_from(name.trim()).map_err(|_| SettingsError::Headers)?;
        let mut value = HeaderValue::try_from(&*value).map_err(|_| SettingsError::Headers)?;
        value.set_sensitive(true);
        Ok((name, value))
    });
    each.collect()
}

/// As who may sign the collector's certificate, those in a file in PEM.
fn trusting(file: &Path) -> Result<TlsConfig, SettingsError> {
    let bad = |why: String| SettingsError::Authority(why);
    let pem = std::fs::read(file).map_err(|error| bad(error.to_string()))?;
    let mut certificates = Vec::new();
    for item in parse_pem(&pem) {
        match item {
            Ok(PemItem::Certificate(certificate)) => certificates.push(certificate),
            Ok(_) => {}
            Err(error) => return Err(bad(error.to_string())),
        }
    }
    if certificates.is_empty() {
        return Err(bad("it has no certificate in it".into()));
    }
    Ok(TlsConfig::builder().root_certs(RootCerts::from(certificates)).build())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(url: Option<&str>, set: &[(&str, &str)]) -> Result<Option<Settings>, SettingsError> {
        let value = |name: &str| {
            let found = set.iter().find(|(set, _)| *set == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        Settings::read(url, 1.0, value)
    }

    #[test]
    fn it_is_off_unless_said_and_the_environment_goes_first() {
        assert!(read(None, &[]).unwrap().is_none());
        let file = Some("http://127.0.0.1:4318/");
        assert_eq!(read(file, &[]).unwrap().unwrap().url, "http://127.0.0.1:4318");
        let set = [(ENDPOINT, "https://user:secret@otel.example/in"), (HEADERS, "a=b%20c, D = e ")];
        let settings = read(file, &set).unwrap().unwrap();
        assert_eq!(settings.url, "https://user:secret@otel.example/in");
        let headers =
            settings.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes()));
        assert_eq!(headers.collect::<Vec<_>>(), [("a", &b"b c"[..]), ("d", b"e")]);
        assert_eq!(settings.shown(), "https://otel.example");
        let shown = format!("{settings:?}");
        assert!(!shown.contains("secret") && !shown.contains("b c"), "{shown}");
    }

    #[test]
    fn what_cannot_be_used_is_refused_without_its_secrets() {
        for (url, set, why) in [
            (Some("127.0.0.1:4318"), None, "telemetry.otlp is not an address"),
            (Some("ftp://secret@host"), None, "telemetry.otlp is not an address"),
            (None, Some((ENDPOINT, "secret")), "OTEL_EXPORTER_OTLP_ENDPOINT is not"),
            (Some("http://h"), Some((PROTOCOL, "grpc")), "only http/protobuf"),
            (Some("http://h"), Some((HEADERS, "secret")), "is not a list"),
            (Some("http://h"), Some((HEADERS, "a=sec\nret")), "is not a list"),
            (Some("http://h"), Some((INTERVAL, "soon")), "milliseconds"),
        ] {
            let set: Vec<_> = set.into_iter().collect();
            let error = read(url, &set).unwrap_err().to_string();
            assert!(error.contains(why) && !error.contains("secret"), "{error}");
        }
        assert!(Settings::read(None, 1.5, |_| None).is_err());
    }
}
