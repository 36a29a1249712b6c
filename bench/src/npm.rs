//! Queues from npm, installed beside the build, measured by scripts of ours in a process of their own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context as _;

use crate::turns::figures;

/// A package with our scripts beside it.
pub(crate) struct Package(PathBuf);

impl Package {
    pub(crate) fn graphile_worker(target: &Path) -> anyhow::Result<Self> {
        Self::install(target, "graphile-worker", "0.18.0", include_str!("npm/graphile.mjs"))
    }

    pub(crate) fn pg_boss(target: &Path) -> anyhow::Result<Self> {
        Self::install(target, "pg-boss", "12.35.0", include_str!("npm/boss.mjs"))
    }

    /// Installs it, unless that was done before.
    fn install(target: &Path, name: &str, version: &str, script: &str) -> anyhow::Result<Self> {
        let folder = target.join(format!("{name}-{version}"));
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("measure.mjs"), include_str!("npm/measure.mjs"))?;
        fs::write(folder.join("queue.mjs"), script)?;
        let package = format!(r#"{{"private": true, "dependencies": {{"{name}": "{version}"}}}}"#);
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
            anyhow::ensure!(status.success(), "npm could not install {name}: {status}");
        }
        Ok(Self(folder))
    }

    /// What the script prints when it is told what to measure, in which database, and how many of each.
    pub(crate) fn measure(
        &self,
        what: &str,
        url: &str,
        counts: &[String],
    ) -> anyhow::Result<Vec<f64>> {
        let mut node = Command::new("node");
        node.current_dir(&self.0).args(["measure.mjs", what, url]);
        node.args(counts);
        figures(&mut node).context("node is not there, or failed: install Node.js")
    }
}
