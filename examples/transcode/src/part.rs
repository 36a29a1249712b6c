//! Makes one resolution of one file.

use std::ffi::OsString;
use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use vedetta::runtime::{Command, CommandError, Watch};

use crate::ladder::Rung;
use crate::media::{Media, ProbeError, Tools, argument};

/// Longer than any film takes; a job has its own timeout.
const LONGEST: Duration = Duration::from_secs(7 * 86_400);

/// One resolution of one file.
#[derive(Debug, Clone)]
pub struct Part {
    /// What it is made of.
    pub source: Arc<Media>,
    /// What is made.
    pub rung: Rung,
    /// Where it goes.
    pub output: PathBuf,
}

/// Why a part was not made. It may be tried again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PartError {
    /// FFmpeg says why.
    #[error("FFmpeg failed")]
    Ffmpeg(#[source] CommandError),
    /// FFmpeg is content with what it made, and we are not.
    #[error("what FFmpeg made is no good: {0}")]
    Wrong(String),
    /// There was no looking at what was made.
    #[error(transparent)]
    Probe(ProbeError),
    /// The folder of the outputs cannot be written to.
    #[error("cannot write to {}", .0.display())]
    Folder(PathBuf, #[source] io::Error),
}

impl Part {
    /// This resolution of this file: `film.mov` becomes `film.mov.480p.mp4` in that folder.
    pub fn new(source: &Arc<Media>, rung: Rung, folder: &Path) -> Self {
        let mut name = source.path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{rung}.mp4"));
        Self { source: Arc::clone(source), rung, output: folder.join(name) }
    }

    /// Whether it was made before, of the file as it is now.
    pub async fn is_made(&self, tools: &Tools) -> Result<bool, PartError> {
        if !self.output.exists() {
            return Ok(false);
        }
        match Media::probe(tools, &self.output).await {
            Ok(made) => Ok(self.check(&made).is_ok() && made.modified >= self.source.modified),
            Err(ProbeError::Unfit(_)) => Ok(false),
            Err(error) => Err(PartError::Probe(error)),
        }
    }

    /// Whether something is what it should be.
    fn check(&self, made: &Media) -> Result<(), String> {
        if made.height != self.rung.height {
            return Err(format!("it has {} lines and not {}", made.height, self.rung.height));
        }
        let Some(wanted) = self.source.duration else { return Ok(()) };
        let is = made.duration.unwrap_or_default();
        // Sound comes in pieces of its own length, and the last picture may stay for long.
        if is.abs_diff(wanted) > Duration::from_millis(500) + wanted / 100 {
            return Err(format!("it lasts {is:?} and not {wanted:?}"));
        }
        Ok(())
    }

    /// The slots are the encoder's. With as many threads to decode and to scale it would be three times as many.
    fn arguments(&self, threads: u32, to: &Path) -> Vec<OsString> {
        let Rung { height, .. } = self.rung;
        let before =
            "-hide_banner -loglevel error -nostdin -y -protocol_whitelist file -threads 1 -i";
        // Of sound and pictures one each, and no pictures on the cover.
        let after = format!(
            "-map 0:V:0 -map 0:a:0? -vf scale=-2:{height} -filter_threads 1 \
             -c:v libx264 -preset veryfast -crf 23 -pix_fmt yuv420p -threads {threads} \
             -c:a aac -b:a 128k -movflags +faststart -f mp4 \
             -progress pipe:1 -nostats -stats_period 0.5"
        );
        let mut arguments: Vec<OsString> = before.split(' ').map(Into::into).collect();
        arguments.push(argument(&self.source.path));
        arguments.extend(after.split_ascii_whitespace().map(Into::into));
        arguments.push(argument(to));
        arguments
    }
}

/// Makes a part with so many threads of the encoder. `watch` is told how far it is, which is all only when this has returned.
///
/// Cancel safety: a dropped future kills FFmpeg and removes what it has written.
pub async fn run_part(
    tools: &Tools,
    part: &Part,
    threads: u32,
    watch: &dyn Watch,
) -> Result<(), PartError> {
    let folder = part.output.parent().unwrap_or(Path::new("."));
    let failed = |error| PartError::Folder(folder.to_owned(), error);
    remove_leftovers(&part.output).map_err(failed)?;
    let draft = Draft::begin(&part.output).map_err(failed)?;
    let arguments = part.arguments(threads, &draft.path);
    let ffmpeg = Command::new(tools.ffmpeg.clone(), arguments, LONGEST);
    let watching = Watching { whole: part.source.duration, watch };
    ffmpeg.run_watched(b"", &watching).await.map_err(PartError::Ffmpeg)?;
    match Media::probe(tools, &draft.path).await {
        Ok(made) => part.check(&made).map_err(PartError::Wrong)?,
        Err(ProbeError::Unfit(why)) => return Err(PartError::Wrong(why)),
        Err(error) => return Err(PartError::Probe(error)),
    }
    let output = part.output.clone();
    let published = tokio::task::spawn_blocking(move || draft.publish(&output)).await;
    published.map_err(io::Error::other).and_then(|done| done).map_err(failed)
}

/// Reads how far FFmpeg is.
struct Watching<'a> {
    whole: Option<Duration>,
    watch: &'a dyn Watch,
}

impl Watch for Watching<'_> {
    fn progress(&self, _: f64, _: Option<&str>) {}

    fn log(&self, line: &str) {
        self.watch.log(line);
    }

    fn line(&self, line: &str) {
        // In the beginning it is `N/A`, and it may be less than nothing.
        let done = line.strip_prefix("out_time_us=").and_then(|done| done.parse().ok());
        if let (Some(done), Some(whole)) = (done.map(Duration::from_micros), self.whole) {
            // Not all of it before it is known to be good.
            let progress = done.as_secs_f64() / whole.as_secs_f64();
            if progress.is_finite() {
                self.watch.progress(progress.min(0.99), None);
            }
        }
    }
}

/// An output that is being written. As long as it is, its lock is held: so a leftover of who was killed can
/// be told from what somebody still writes.
struct Draft {
    path: PathBuf,
    file: File,
}

const DRAFT: &str = ".part";

/// The drafts of an output are called like this, with a number and [`DRAFT`] after it.
fn drafts_of(output: &Path) -> OsString {
    let mut name = OsString::from(".");
    name.push(output.file_name().unwrap_or_default());
    name.push(".");
    name
}

impl Draft {
    fn begin(output: &Path) -> io::Result<Self> {
        let mut name = drafts_of(output);
        name.push(format!("{:016x}{DRAFT}", fastrand::u64(..)));
        let path = output.with_file_name(name);
        let file = File::create_new(&path)?;
        let draft = Self { path, file };
        draft.file.lock()?;
        Ok(draft)
    }

    /// Gives it its name. It is on the disk when this returns.
    fn publish(self, output: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        std::fs::rename(&self.path, output)?;
        File::open(output.parent().unwrap_or(Path::new(".")))?.sync_all()
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // Published, it is not there any more.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Removes drafts of this output that nobody writes any more.
fn remove_leftovers(output: &Path) -> io::Result<()> {
    let drafts = drafts_of(output);
    let folder = output.parent().unwrap_or(Path::new("."));
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let number = name.as_encoded_bytes().strip_prefix(drafts.as_encoded_bytes());
        let number = number.and_then(|rest| rest.strip_suffix(DRAFT.as_bytes()));
        if !number.is_some_and(|number| number.len() == 16 && number.is_ascii()) {
            continue;
        }
        // It may be gone by now.
        let Ok(file) = File::open(entry.path()) else { continue };
        match file.try_lock() {
            Ok(()) => std::fs::remove_file(entry.path())?,
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use parking_lot::Mutex;

    use super::*;

    #[derive(Default)]
    struct Seen(Mutex<Vec<f64>>);

    impl Watch for Seen {
        fn progress(&self, progress: f64, _: Option<&str>) {
            self.0.lock().push(progress);
        }

        fn log(&self, _: &str) {}
    }

    #[test]
    fn how_far_ffmpeg_is_it_says_itself() {
        let lines = [
            "frame=0",
            "out_time_us=N/A",
            "out_time_us=-21333",
            "out_time_us=1000000",
            "out_time=00:00:01.500000",
            "out_time_us=3000000",
            "out_time_us=4000000",
            "progress=end",
        ];
        for (whole, told) in [(Some(4), vec![0.25, 0.75, 0.99]), (Some(0), vec![]), (None, vec![])]
        {
            let seen = Seen::default();
            let watching = Watching { whole: whole.map(Duration::from_secs), watch: &seen };
            lines.iter().for_each(|line| watching.line(line));
            assert_eq!(*seen.0.lock(), told, "of {whole:?} seconds");
        }
    }

    #[test]
    fn the_encoder_has_the_slots_and_what_is_before_it_one_thread_each() {
        let (path, duration, modified) = ("a.mov".into(), None, SystemTime::UNIX_EPOCH);
        let source = Arc::new(Media { path, height: 480, duration, modified });
        let part = Part::new(&source, crate::LADDER[0], Path::new("made"));
        let arguments = part.arguments(8, Path::new("to.mp4"));
        let of = |name: &str| {
            let all = arguments.windows(2).filter(|pair| pair[0] == name);
            all.map(|pair| pair[1].to_str().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!((of("-threads"), of("-filter_threads")), (vec!["1", "8"], vec!["1"]));
        let at = |word: &str| arguments.iter().position(|argument| argument == word).unwrap();
        assert!(at("-threads") < at("-i"), "the first is of the decoder");
    }

    #[test]
    fn only_drafts_that_nobody_writes_are_leftovers() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("a.480p.mp4");
        let written = Draft::begin(&output).unwrap();
        let left = folder.path().join(".a.480p.mp4.0123456789abcdef.part");
        // Of a file with the name of our output.
        let anothers = folder.path().join(".a.480p.mp4.480p.mp4.0123456789abcdef.part");
        for path in [&left, &anothers, &output] {
            File::create(path).unwrap();
        }
        remove_leftovers(&output).unwrap();
        assert!(!left.exists() && anothers.exists() && written.path.exists() && output.exists());
        let path = written.path.clone();
        drop(written);
        assert!(!path.exists());
    }
}
