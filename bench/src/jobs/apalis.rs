//! apalis, built beside our build as a program of its own: its database driver cannot be linked with a newer
//! SQLite than it knows.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

use super::measure::{Counts, What};
use crate::turns::figures;

const VERSION: &str = "1.0.0";
const MANIFEST: &str = r#"
    package = { name = "apalis-bench", edition = "2024" }
    workspace = {}
    profile.release = { lto = "thin", codegen-units = 1 }

    [dependencies]
    anyhow = "1.0.104"
    apalis = { version = "=1.0.0", default-features = false }
    apalis-postgres = { version = "=1.0.0", default-features = false, features = ["migrate", "tokio"] }
    fastrand = "2.5.0"
    futures-util = "0.3.34"
    mimalloc = { version = "0.1.52", default-features = false }
    serde = { version = "1.0.229", features = ["derive"] }
    sqlx = { version = "0.9.0", default-features = false, features = ["postgres", "runtime-tokio"] }
    tokio = { version = "1.54.1", features = ["full"] }
"#;

/// The program that measures it.
pub(super) struct Apalis(PathBuf);

impl Apalis {
    /// Builds it, unless that was done before.
    pub(super) fn build(target: &Path) -> anyhow::Result<Self> {
        let folder = target.join(format!("apalis-{VERSION}"));
        fs::create_dir_all(folder.join("src"))?;
        fs::write(folder.join("Cargo.toml"), MANIFEST)?;
        for (name, text) in [
            ("main.rs", include_str!("apalis/main.rs")),
            ("measure.rs", include_str!("measure.rs")),
            ("figures.rs", include_str!("../figures.rs")),
        ] {
            let file = folder.join("src").join(name);
            // One that is written anew is built anew.
            if fs::read_to_string(&file).is_ok_and(|there| there == text) {
                continue;
            }
            fs::write(file, text)?;
        }
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        cargo.args(["build", "--release", "--quiet"]).current_dir(&folder);
        let status = cargo.env("CARGO_TARGET_DIR", folder.join("target")).status();
        let status = status.context("cargo is not there")?;
        anyhow::ensure!(status.success(), "apalis could not be built: {status}");
        Ok(Self(folder.join("target/release/apalis-bench")))
    }

    pub(super) fn measure(
        &self,
        what: What,
        url: &str,
        counts: Counts,
    ) -> anyhow::Result<Vec<f64>> {
        figures(Command::new(&self.0).args([what.name(), url]).args(counts.arguments()))
    }
}
