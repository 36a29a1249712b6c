//! TLS: which files, and what can be wrong with them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

/// HTTP/2, as TLS calls it.
pub const HTTP2: &[u8] = b"h2";
/// HTTP/1.1, as TLS calls it.
pub const HTTP1: &[u8] = b"http/1.1";

/// What TLS needs, in PEM.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// The server's certificate, then those between it and its authority.
    pub cert: PathBuf,
    /// The certificate's private key.
    pub key: PathBuf,
    /// Who may sign clients' certificates. When given, a client must show one.
    pub client_ca: Option<PathBuf>,
}

/// Why there can be no TLS with these files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// Check the path, the permissions, and that it is PEM.
    #[error("cannot read {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: pem::Error,
    },
    /// Give a file with certificates.
    #[error("{} has no certificate in it", .0.display())]
    NoCertificate(PathBuf),
    /// Give the certificate and the key that belong together.
    #[error("the certificate in {} cannot be used with that key", path.display())]
    Unusable {
        /// The certificate's file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: rustls::Error,
    },
    /// Give both, or neither.
    #[error("a client's certificate and its key are given together")]
    HalfAnIdentity,
    /// Give certificates of authorities.
    #[error("the certificates in {} cannot vouch for clients", path.display())]
    NoAuthority {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: VerifierBuilderError,
    },
}

/// What a client needs for TLS, in PEM.
#[derive(Debug, Clone)]
pub struct ClientTls {
    /// Who may sign the server's certificate.
    pub ca: PathBuf,
    /// The client's own certificate, for servers that ask for one.
    pub cert: Option<PathBuf>,
    /// That certificate's private key.
    pub key: Option<PathBuf>,
}

/// TLS, ready for a server.
#[derive(Debug, Clone)]
pub struct Tls(ServerConfig);

impl Tls {
    /// For a server that speaks these protocols, the best one first.
    pub fn speaking(mut self, protocols: &[&[u8]]) -> Arc<ServerConfig> {
        self.0.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        Arc::new(self.0)
    }
}

impl TlsFiles {
    /// Reads the files.
    pub fn load(&self) -> Result<Tls, TlsError> {
        load(self).map(Tls)
    }
}

fn load(files: &TlsFiles) -> Result<ServerConfig, TlsError> {
    let provider = Arc::new(ring::default_provider());
    let versions = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|source| TlsError::Unusable { path: files.cert.clone(), source })?;
    let verified = match &files.client_ca {
        None => versions.with_no_client_auth(),
        Some(path) => {
            let verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::new(authorities(path)?), provider)
                    .build()
                    .map_err(|source| TlsError::NoAuthority { path: path.clone(), source })?;
            versions.with_client_cert_verifier(verifier)
        }
    };
    verified
        .with_single_cert(certificates(&files.cert)?, private_key(&files.key)?)
        .map_err(|source| TlsError::Unusable { path: files.cert.clone(), source })
}

impl ClientTls {
    /// Reads the files, for a client that speaks these protocols.
    pub fn load(&self, protocols: &[&[u8]]) -> Result<Arc<ClientConfig>, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let unusable = |path: &Path, source| TlsError::Unusable { path: path.to_owned(), source };
        let verified = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|source| unusable(&self.ca, source))?
            .with_root_certificates(authorities(&self.ca)?);
        let mut config = match (&self.cert, &self.key) {
            (None, None) => verified.with_no_client_auth(),
            (Some(cert), Some(key)) => verified
                .with_client_auth_cert(certificates(cert)?, private_key(key)?)
                .map_err(|source| unusable(cert, source))?,
            _ => return Err(TlsError::HalfAnIdentity),
        };
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        Ok(Arc::new(config))
    }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let unreadable = |source| TlsError::Unreadable { path: path.to_owned(), source };
    PrivateKeyDer::from_pem_file(path).map_err(unreadable)
}

fn authorities(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut authorities = RootCertStore::empty();
    authorities.add_parsable_certificates(certificates(path)?);
    Ok(authorities)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let unreadable = |source| TlsError::Unreadable { path: path.to_owned(), source };
    let all = CertificateDer::pem_file_iter(path).map_err(unreadable)?;
    let all: Vec<_> = all.collect::<Result<_, _>>().map_err(unreadable)?;
    if all.is_empty() {
        return Err(TlsError::NoCertificate(path.to_owned()));
    }
    Ok(all)
}
