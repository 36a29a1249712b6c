//! Passwords: argon2id with 19 MiB, two passes, one lane.

use std::sync::LazyLock;

use argon2::password_hash::phc::PasswordHash;
use argon2::password_hash::{PasswordHasher as _, PasswordVerifier as _};
use argon2::{Algorithm, Argon2, Params, Version};

use crate::AccessError;

/// Shorter ones are guessed, longer ones are work for nothing.
const LENGTH: std::ops::RangeInclusive<usize> = 8..=1024;

fn argon2() -> Argon2<'static> {
    let params = Params::new(19 * 1024, 2, 1, None).unwrap_or_default();
    Argon2::new(Algorithm::Argon2id, Version::V0x13, params)
}

/// Whether it may be one.
pub(crate) fn check(password: &str) -> Result<(), AccessError> {
    if LENGTH.contains(&password.len()) {
        return Ok(());
    }
    let (least, most) = (LENGTH.start(), LENGTH.end());
    Err(AccessError::Invalid(format!("a password has {least} to {most} bytes")))
}

/// What is stored of it, as a PHC string.
pub(crate) fn hash(password: &str) -> Result<String, AccessError> {
    let hash = argon2().hash_password(password.as_bytes());
    hash.map(|hash| hash.to_string())
        .map_err(|error| AccessError::System(format!("cannot hash the password: {error}")))
}

/// Whether it is the one that was stored. Without one, the same work is done for a no.
pub(crate) fn verify(password: &str, stored: Option<&str>) -> bool {
    static NOBODY: LazyLock<String> = LazyLock::new(|| hash("nobody").unwrap_or_default());
    let nobody = NOBODY.as_str();
    let Ok(parsed) = PasswordHash::new(stored.unwrap_or(nobody)) else { return false };
    argon2().verify_password(password.as_bytes(), &parsed).is_ok() && stored.is_some()
}
