//! TLS to a server that shows who it is.

use std::fmt::Display;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::Socket;
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use tokio_rustls::{TlsConnector, client};

/// Whom to trust; nobody where connections are plain.
#[derive(Clone)]
pub(super) struct Tls(Option<Arc<ClientConfig>>);

impl Tls {
    /// For connections that are plain.
    pub(super) fn none() -> Self {
        Self(None)
    }

    /// Trusts whom the certificates in this file, in PEM, vouch for; or says what is wrong with it.
    pub(super) fn trust(file: &str) -> Result<Self, String> {
        let fault = |why: &dyn Display| format!("no certificate can be read from {file}: {why}");
        let mut authorities = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(file).map_err(|e| fault(&e))? {
            let certificate = certificate.map_err(|e| fault(&e))?;
            authorities.add(certificate).map_err(|e| fault(&e))?;
        }
        if authorities.is_empty() {
            return Err(fault(&"it has none"));
        }
        let provider = Arc::new(ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|e| fault(&e))?
            .with_root_certificates(authorities)
            .with_no_client_auth();
        Ok(Self(Some(Arc::new(config))))
    }
}

impl MakeTlsConnect<Socket> for Tls {
    type Stream = Encrypted;
    type TlsConnect = Handshake;
    type Error = io::Error;

    fn make_tls_connect(&mut self, host: &str) -> io::Result<Handshake> {
        Ok(Handshake { config: self.0.clone(), host: host.to_owned() })
    }
}

/// One that is about to begin.
pub(super) struct Handshake {
    config: Option<Arc<ClientConfig>>,
    host: String,
}

impl TlsConnect<Socket> for Handshake {
    type Stream = Encrypted;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Encrypted>> + Send + Sync>>;

    fn connect(self, socket: Socket) -> Self::Future {
        Box::pin(async move {
            let invalid = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
            let config = self.config.ok_or_else(|| invalid("TLS was not asked for"))?;
            let host = ServerName::try_from(self.host)
                .map_err(|_| invalid("TLS wants a host whose name can be checked"))?;
            TlsConnector::from(config).connect(host, socket).await.map(Encrypted)
        })
    }
}

/// A connection that nobody else can read.
pub(super) struct Encrypted(client::TlsStream<Socket>);

impl TlsStream for Encrypted {
    /// The certificate is checked, so the password need not be bound to it.
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl AsyncRead for Encrypted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Encrypted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
