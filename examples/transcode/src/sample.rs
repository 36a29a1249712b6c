//! Media to try it with.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use vedetta::runtime::{Command, CommandError};

use crate::media::{Tools, argument};

/// Making one takes no longer.
const MAKING: Duration = Duration::from_secs(600);

/// Has FFmpeg make a moving test picture of this height, 16 to 9, with a tone to it.
pub async fn sample(
    tools: &Tools,
    path: &Path,
    height: u32,
    rate: u32,
    seconds: u32,
) -> Result<(), CommandError> {
    let width = height * 16 / 9 / 2 * 2;
    let arguments = format!(
        "-loglevel error -nostdin -y -f lavfi -i testsrc2=size={width}x{height}:rate={rate}:duration={seconds} \
         -f lavfi -i sine=frequency=440:duration={seconds} \
         -c:v libx264 -preset ultrafast -pix_fmt yuv420p -c:a aac -f mp4"
    );
    let arguments = arguments.split_ascii_whitespace().map(OsString::from);
    let arguments = arguments.chain([argument(path)]);
    Command::new(tools.ffmpeg.clone(), arguments, MAKING).run(b"").await
}
