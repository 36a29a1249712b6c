//! What proves an identity: 256 random bits, kept as their SHA-256.
//!
//! A slow hash is for what people choose; nobody guesses these.

use std::fmt;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use sha2::{Digest as _, Sha256};

use crate::AccessError;

/// Something that only its owner is to know. It does not show itself.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// A new one, with a beginning that says what it is.
    pub fn random(beginning: &str) -> Result<Self, AccessError> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes)
            .map_err(|error| AccessError::System(format!("no random numbers: {error}")))?;
        Ok(Self(format!("{beginning}{}", BASE64_URL_SAFE_NO_PAD.encode(bytes))))
    }

    /// The text itself, for its owner.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// What is stored of one.
pub(crate) fn hash(text: &str) -> [u8; 32] {
    Sha256::digest(text.as_bytes()).into()
}

/// Whether two texts are the same; how long that takes tells nothing about where they differ.
pub fn same(one: &str, other: &str) -> bool {
    // Whoever does not know the texts does not know their hashes.
    hash(one) == hash(other)
}
