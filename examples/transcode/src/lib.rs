//! Makes media files into every resolution up to their own, as many at once as the machine has slots for.
//!
//! ```text
//!  {"file": "film.mov"} ──► one job ──┬─ 1080p, 32 slots ─► ffmpeg -threads 14 ─► film.mov.1080p.mp4
//!                                     ├─  720p, 16 slots ─► waits for its turn
//!                                     └─   … down to 144p, 1 slot
//! ```
//!
//! A job is a file, and takes no slots itself; its parts, one for each resolution, wait for their own, in one
//! line with those of all other files. So a large part takes the whole machine and small ones share it, and
//! a job that waits holds up nobody and keeps its lease all the while. What costs more slots than there are
//! takes all. As long as parts have or want all slots no further file is taken: another worker may have room.
//!
//! FFmpeg encodes with as many threads as a part holds slots, and reads, decodes and scales with one each.
//!
//! **A job may be repeated, by anybody and at any moment.** An output has its name only once it is whole, on
//! the disk and was looked at; one that is there, fits and is not older than the file is not made again. What
//! a worker that was killed has left half done is removed by who comes after.
//!
//! A file that is not there or is no video is dead at once, with ffprobe's words. When FFmpeg fails, the job
//! does, once its other parts have ended, and is tried again.

mod job;
mod ladder;
mod media;
mod part;
mod queue;
mod sample;

pub use job::{Asked, KIND, transcode, worker};
pub use ladder::{LADDER, Rung, ladder};
pub use media::{Media, ProbeError, Tools};
pub use part::{Part, PartError, run_part};
pub use queue::{Place, Queue};
pub use sample::sample;
