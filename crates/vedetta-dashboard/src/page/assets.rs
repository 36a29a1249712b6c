//! Styles and scripts, inside the program. Their address has a hash of all of them in it, so they can be kept
//! for good, and scripts can name each other by relative paths.

use std::fmt::Write as _;
use std::sync::LazyLock;

use axum::extract::Path;
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use sha2::{Digest as _, Sha256};

use crate::error::ApiError;

const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

const PLAIN: &str = "text/plain; charset=utf-8";

const FILES: [(&str, &str, &str); 10] = [
    ("icon.svg", "image/svg+xml", include_str!("../../assets/icon.svg")),
    ("page.css", STYLE, include_str!("../../assets/page.css")),
    ("page.js", SCRIPT, include_str!("../../assets/page.js")),
    ("live.js", SCRIPT, include_str!("../../assets/live.js")),
    ("format.js", SCRIPT, include_str!("../../assets/format.js")),
    ("chart.js", SCRIPT, include_str!("../../assets/chart.js")),
    ("stream.js", SCRIPT, include_str!("../../assets/stream.js")),
    ("vendor/uPlot.esm.js", SCRIPT, include_str!("../../assets/vendor/uPlot.esm.js")),
    ("vendor/uPlot.min.css", STYLE, include_str!("../../assets/vendor/uPlot.min.css")),
    // It goes wherever what it is for goes.
    ("vendor/uPlot.LICENSE", PLAIN, include_str!("../../assets/vendor/uPlot.LICENSE")),
];

static HASH: LazyLock<String> = LazyLock::new(|| {
    let mut hash = Sha256::new();
    FILES.iter().for_each(|(name, _, text)| {
        hash.update(name);
        hash.update(text);
    });
    hex(&hash.finalize()[..8])
});

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The address of a file.
pub(crate) fn asset(name: &str) -> String {
    format!("/assets/{}/{name}", *HASH)
}

pub(super) async fn serve(
    Path((hash, name)): Path<(String, String)>,
) -> Result<Response, ApiError> {
    let file = FILES.iter().find(|(file, ..)| *file == name && hash == *HASH);
    let (_, kind, text) = file.ok_or_else(ApiError::no_such_route)?;
    let kept = "public, max-age=31536000, immutable";
    Ok(([(header::CONTENT_TYPE, *kind), (header::CACHE_CONTROL, kept)], *text).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_wrote_is_as_they_published_it_and_has_its_licence() {
        let pinned = [
            (
                "vendor/uPlot.esm.js",
                "5dd9b3281aa64b461b42d9945f6adb2649d346502b12281a9ae0d46599a80eba",
            ),
            (
                "vendor/uPlot.min.css",
                "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
            ),
        ];
        let vendored = FILES.iter().filter(|(name, ..)| name.starts_with("vendor/"));
        assert_eq!(vendored.count(), pinned.len() + 1, "and the licence");
        for (name, expected) in pinned {
            let (.., text) = FILES.iter().find(|(file, ..)| *file == name).unwrap();
            assert_eq!(hex(&Sha256::digest(text)), expected, "{name}");
        }
        let (.., licence) =
            FILES.iter().find(|(file, ..)| *file == "vendor/uPlot.LICENSE").unwrap();
        for part in ["The MIT License", "Copyright (c)", "this permission notice shall be included"]
        {
            assert!(licence.contains(part), "{part}");
        }
    }

    #[test]
    fn our_scripts_write_text_and_never_markup() {
        let ours = FILES.iter().filter(|(name, kind, _)| *kind == SCRIPT && !name.contains('/'));
        for (name, _, text) in ours {
            for sink in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "DOMParser",
            ] {
                assert!(!text.contains(sink), "{name} has {sink}");
            }
        }
    }
}
