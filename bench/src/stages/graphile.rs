//! graphile-worker, installed from npm beside the build, in a process of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context as _;

const VERSION: &str = "0.18.0";
const SCRIPT: &str = include_str!("graphile.mjs");

/// The installed package with our script beside it.
pub(super) struct Graphile(PathBuf);

impl Graphile {
    /// Installs it, unless that was done before.
    pub(super) fn install(target: &Path) -> anyhow::Result<Self> {
        let folder = target.join(format!("graphile-worker-{VERSION}"));
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("graphile.mjs"), SCRIPT)?;
        let package =
            format!(r#"{{"private": true, "dependencies": {{"graphile-worker": "{VERSION}"}}}}"#);
        fs::write(folder.join("package.json"), package)?;
        // Written by npm when all is there.
        if !folder.join("node_modules/.package-lock.json").exists() {
            let mut npm = Command::new("npm");
            npm.args([
                "install",
                "--no-audit",
                "--no-fund",
                "--ignore-scripts",
                "--loglevel=error",
            ]);
            let status = npm.current_dir(&folder).stdout(Stdio::null()).status();
            let status = status.context("npm is not there: install Node.js with npm")?;
            anyhow::ensure!(status.success(), "npm could not install graphile-worker: {status}");
        }
        Ok(Self(folder))
    }

    /// What the script prints, a figure a line.
    pub(super) fn measure(&self, what: &str, url: &str, count: u64) -> anyhow::Result<Vec<f64>> {
        let mut node = Command::new("node");
        node.current_dir(&self.0).args(["graphile.mjs", what, url, &count.to_string()]);
        super::figures(&mut node).context("node is not there, or failed: install Node.js")
    }
}
