//! How the program ends: the one place where errors become exit codes.

use std::io::ErrorKind;
use std::process::ExitCode;

use vedetta::access::AccessError;
use vedetta::core::explain;

use crate::client::ClientError;
use crate::config::ConfigError;

/// For `--help`.
pub(crate) const HELP: &str = "\
Exit codes: 0 done, 1 failed, 2 wrong use, 3 not found, 4 conflict, 5 cannot reach the server.";

const FAILED: u8 = 1;
const WRONG_USE: u8 = 2;
const NOT_FOUND: u8 = 3;
const CONFLICT: u8 = 4;
const UNREACHABLE: u8 = 5;

/// A command whose answer is a "no", for which everything is said already.
#[derive(Debug, thiserror::Error)]
pub(crate) enum No {
    /// A check found something broken, and printed it.
    #[error("something is broken")]
    Broken,
    /// There is nothing to print.
    #[error("there is no such key")]
    NotFound,
}

/// Says what went wrong, in one line, and with which code to end.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    match code(error) {
        0 => {}
        _ if matches!(error.downcast_ref(), Some(No::Broken)) => {}
        _ => eprintln!("vedetta: {}", crate::output::one_line(&explain(error.as_ref()))),
    }
    ExitCode::from(code(error))
}

fn code(error: &anyhow::Error) -> u8 {
    for cause in error.chain() {
        if let Some(error) = cause.downcast_ref::<std::io::Error>()
            && error.kind() == ErrorKind::BrokenPipe
        {
            return 0; // whoever read our output has seen enough
        }
        if let Some(No::NotFound) = cause.downcast_ref() {
            return NOT_FOUND;
        }
        if cause.downcast_ref::<ConfigError>().is_some() {
            return WRONG_USE;
        }
        match cause.downcast_ref() {
            Some(AccessError::Invalid(_)) => return WRONG_USE,
            Some(AccessError::NoSuch(..)) => return NOT_FOUND,
            Some(AccessError::Exists(..)) => return CONFLICT,
            _ => {}
        }
        match cause.downcast_ref() {
            Some(ClientError::Unreachable { .. } | ClientError::Untrusted { .. }) => {
                return UNREACHABLE;
            }
            Some(ClientError::BadServer { .. } | ClientError::BadAuthority { .. }) => {
                return WRONG_USE;
            }
            Some(ClientError::Refused { status, .. }) => {
                return match status {
                    400 | 415 | 422 => WRONG_USE,
                    404 => NOT_FOUND,
                    409 => CONFLICT,
                    _ => FAILED,
                };
            }
            None => {}
        }
    }
    FAILED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_fail_has_its_code() {
        let refused = |status| ClientError::Refused { status, message: String::new() };
        for (error, expected) in [
            (anyhow::anyhow!("anything else"), 1),
            (anyhow::Error::from(refused(500)), 1),
            (refused(410).into(), 1),
            (refused(401).into(), 1),
            (refused(403).into(), 1),
            (AccessError::Invalid(String::new()).into(), 2),
            (AccessError::NoSuch("user", String::new()).into(), 3),
            (AccessError::Exists("user", String::new()).into(), 4),
            (refused(507).into(), 1),
            (No::Broken.into(), 1),
            (refused(422).into(), 2),
            (refused(400).into(), 2),
            (ConfigError::Folder("/".into()).into(), 2),
            (ClientError::BadServer { server: "x".into() }.into(), 2),
            (refused(404).into(), 3),
            (No::NotFound.into(), 3),
            (refused(409).into(), 4),
            (ClientError::Unreachable { server: "x".into(), why: String::new() }.into(), 5),
            (std::io::Error::from(ErrorKind::BrokenPipe).into(), 0),
        ] {
            assert_eq!(code(&error), expected, "{error:?}");
            assert_eq!(code(&error.context("while doing something")), expected);
        }
    }
}
