//! What a file is, as ffprobe sees it.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use vedetta::runtime::{Command, CommandError, Watch};

/// No look at a file takes so long.
const PROBING: Duration = Duration::from_secs(300);

/// The programs that do the work: names, looked up in `PATH`, or paths.
#[derive(Debug, Clone)]
pub struct Tools {
    /// FFmpeg.
    pub ffmpeg: OsString,
    /// What comes with it to look at files.
    pub ffprobe: OsString,
}

impl Default for Tools {
    fn default() -> Self {
        Self { ffmpeg: "ffmpeg".into(), ffprobe: "ffprobe".into() }
    }
}

/// A video.
#[derive(Debug, Clone)]
pub struct Media {
    /// Where it is.
    pub path: PathBuf,
    /// Lines of a picture, as it is shown.
    pub height: u32,
    /// How long it is, if that can be said beforehand.
    pub duration: Option<Duration>,
    /// When it was last written.
    pub modified: SystemTime,
}

/// Why nothing is known of a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// It is not there or no video: trying again changes nothing.
    #[error("{0}")]
    Unfit(String),
    /// There was no looking at it.
    #[error("cannot look at it with ffprobe")]
    Failed(#[source] CommandError),
}

/// A path, so that nothing in it is taken for an option or for the address of something else.
pub(crate) fn argument(path: &Path) -> OsString {
    let mut argument = OsString::from("file:");
    argument.push(path);
    argument
}

/// Collects what ffprobe says, as `name=value` lines.
#[derive(Default)]
struct Said(Mutex<Vec<String>>);

impl Watch for Said {
    fn progress(&self, _: f64, _: Option<&str>) {}

    fn log(&self, _: &str) {}

    fn line(&self, line: &str) {
        self.0.lock().push(line.to_owned());
    }
}

impl Media {
    /// Looks at a file. A playlist can name other files, but nothing beyond the machine.
    pub async fn probe(tools: &Tools, path: &Path) -> Result<Self, ProbeError> {
        let what = "stream=width,height:stream_side_data=rotation:format=duration";
        let arguments =
            "-v error -protocol_whitelist file -select_streams V:0 -of flat -show_entries";
        let arguments = arguments.split(' ').chain([what]).map(OsStr::new).map(OsStr::to_owned);
        let arguments = arguments.chain([argument(path)]);
        let said = Said::default();
        let looked = Command::new(tools.ffprobe.clone(), arguments, PROBING);
        match looked.run_watched(b"", &said).await {
            Ok(_) => {}
            // It looked, and did not like it. Killed, it would have no code.
            Err(CommandError::Failed { status, stderr }) if status.code().is_some() => {
                return Err(ProbeError::Unfit(stderr));
            }
            Err(error) => return Err(ProbeError::Failed(error)),
        }
        let said = said.0.into_inner();
        let unfit = |why: &str| ProbeError::Unfit(format!("{}: {why}", path.display()));
        let (width, height) = (value(&said, ".width"), value(&said, ".height"));
        let (Some(width), Some(height)) = (width, height) else {
            return Err(unfit("there is no video in it"));
        };
        let modified = std::fs::metadata(path).and_then(|meta| meta.modified());
        let modified = modified.map_err(|error| unfit(&error.to_string()))?;
        let is_turned = value::<f64>(&said, ".rotation").is_some_and(|by| (by / 90.0) % 2.0 != 0.0);
        let duration = value(&said, "format.duration");
        Ok(Self {
            path: path.to_owned(),
            height: if is_turned { width } else { height },
            duration: duration.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
            modified,
        })
    }
}

/// The value of the first line with such a name; `N/A` is none.
fn value<T: std::str::FromStr>(lines: &[String], name: &str) -> Option<T> {
    let mut values = lines.iter().filter_map(|line| line.split_once('='));
    let (_, value) = values.find(|(found, _)| found.ends_with(name))?;
    value.trim_matches('"').parse().ok()
}
