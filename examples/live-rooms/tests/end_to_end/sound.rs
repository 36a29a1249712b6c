//! What is in a stream, as FFmpeg hears it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, SystemTime};

/// A tone that is there has more than this, in dB; one at these levels fills about a tenth of its segment or more.
const THERE: f64 = -35.0;
/// One that is not there has less.
const ABSENT: f64 = -45.0;

/// Part of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) path: PathBuf,
    pub(crate) begun: SystemTime,
    pub(crate) ended: SystemTime,
}

impl Segment {
    /// How long after `since` it was complete.
    pub(crate) fn after(&self, since: SystemTime) -> Duration {
        self.ended.duration_since(since).unwrap_or_default()
    }
}

/// What a playlist has, oldest first.
pub(crate) fn segments(playlist: &Path) -> Vec<Segment> {
    let text = std::fs::read_to_string(playlist).unwrap_or_default();
    let (mut lasts, mut all) = (Duration::ZERO, Vec::new());
    for line in text.lines() {
        if let Some(length) = line.strip_prefix("#EXTINF:") {
            let seconds = length.trim_end_matches(',').parse().unwrap_or_default();
            lasts = Duration::from_secs_f64(seconds);
        } else if !line.starts_with('#') && !line.is_empty() {
            let path = playlist.with_file_name(line);
            // It may have been removed meanwhile.
            let Ok(ended) = path.metadata().and_then(|it| it.modified()) else { continue };
            all.push(Segment { path, begun: ended - lasts, ended });
        }
    }
    all
}

/// Whether each of these tones is in a segment; nothing if it can neither be said to be there nor not to be.
pub(crate) fn has(segment: &Segment, tones: &[u32]) -> Vec<Option<bool>> {
    let is_there = |level: f64| match level {
        level if level > THERE => Some(true),
        level if level < ABSENT => Some(false),
        _ => None,
    };
    levels(&segment.path, tones).into_iter().map(|level| level.and_then(is_there)).collect()
}

/// How loud the band around each of these tones is on the average, in dB.
fn levels(path: &Path, tones: &[u32]) -> Vec<Option<f64>> {
    let mut graph = format!("[0:a]asplit={}", tones.len());
    graph.extend(tones.iter().map(|hz| format!("[of{hz}]")));
    graph.extend(
        tones.iter().map(|hz| {
            format!(";[of{hz}]bandpass=f={hz}:width_type=h:w=50,volumedetect@{hz}[{hz}]")
        }),
    );
    let outputs: Vec<String> = tones.iter().map(|hz| format!("[{hz}]")).collect();
    let path = path.to_string_lossy();
    let mut arguments = vec!["-i", &*path, "-filter_complex", &*graph];
    arguments.extend(outputs.iter().flat_map(|output| ["-map", &**output]));
    arguments.extend(["-f", "null", "-"]);
    let output = ffmpeg(&arguments);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let level = |hz: &u32| {
        let of = format!("[volumedetect@{hz} ");
        let mut lines = told.lines().filter(|line| line.starts_with(&of));
        let mean = lines.find_map(|line| line.split_once("mean_volume: "))?.1;
        let mean = mean.split_whitespace().next()?;
        Some(mean.parse().unwrap_or(f64::NEG_INFINITY)) // `-inf` where there is nothing at all
    };
    tones.iter().map(level).collect()
}

/// A file of three seconds with a tone in it.
pub(crate) fn tone(folder: &Path, hz: u32) -> PathBuf {
    let path = folder.join(format!("{hz}.opus"));
    let source = sine(hz, Some(3));
    let encode = ["-ac", "1", "-c:a", "libopus", "-b:a", "48k", "-frame_duration", "20", "-y"];
    let name = path.to_string_lossy().into_owned();
    let done = ffmpeg(&[&["-f", "lavfi", "-i", &source], &encode[..], &[&name[..]]].concat());
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    path
}

/// What talks to an RTP port in a tone.
pub(crate) fn talker(hz: u32, port: u16) -> Command {
    let mut talker = Command::new("ffmpeg");
    talker.args(["-nostdin", "-loglevel", "error", "-re", "-f", "lavfi", "-i", &sine(hz, None)]);
    talker.args(["-ac", "2", "-c:a", "libopus", "-b:a", "64k", "-frame_duration", "20"]);
    talker.args(["-payload_type", "100", "-f", "rtp", &format!("rtp://127.0.0.1:{port}")]);
    talker.stdin(Stdio::null()).stdout(Stdio::null());
    talker
}

fn sine(hz: u32, seconds: Option<u32>) -> String {
    let length = seconds.map(|seconds| format!(":duration={seconds}")).unwrap_or_default();
    format!("sine=frequency={hz}:sample_rate=48000{length}")
}

fn ffmpeg(arguments: &[&str]) -> Output {
    let mut ffmpeg = Command::new("ffmpeg");
    ffmpeg.args(["-nostdin", "-hide_banner", "-nostats"]).args(arguments).stdin(Stdio::null());
    let output = tokio::task::block_in_place(|| ffmpeg.output());
    output.expect("FFmpeg can be run: apt-get install ffmpeg")
}
