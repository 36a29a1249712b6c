//! The programs that are not ours.

use std::path::PathBuf;

/// Where a program is.
pub fn find(name: &str) -> anyhow::Result<PathBuf> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&folders).map(|folder| folder.join(name));
    let is_program = |path: &PathBuf| {
        use std::os::unix::fs::PermissionsExt as _;
        path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    found.into_iter().find(is_program).ok_or_else(|| {
        anyhow::anyhow!(
            "there is no {name} here: `apt-get install --no-install-recommends janus ffmpeg`"
        )
    })
}
