//! The stream of a room: an FFmpeg from RTP to HLS, begun again whenever it ends or stalls.
//!
//! ```text
//! a port ──► FFmpeg ──► it listens: told where ──► fed: it gets on ──► …
//!   ▲          │ ended, or not fed for 5 s: stopped, waited for, its port given back
//!   └── wait ◄─┘ 0.1 s, 0.2 s … 10 s, and until it is known to be ours
//! ```
//!
//! Each FFmpeg gets another port than the one before it. FFmpeg ends with code 0 for many reasons, so any end
//! that nobody asked for is a failure.

use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use vedetta::core::{Backoff, explain};
use vedetta::runtime::{Command, Watch};

use crate::ports::{Pool, Port, is_bound};

/// One that was fed and gets on no more is stuck.
const STALLED: Duration = Duration::from_secs(5);
/// The first packet may take longer: Janus has to be told where to send.
const FIRST: Duration = Duration::from_secs(15);
/// One that went well for so long had no part in what came before.
const WELL: Duration = Duration::from_secs(30);
/// It is asked to end, once more after the first of these times, and killed after the second: it does not
/// hear the first time while it waits for a packet.
const STOP: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(4)];
/// When to look again whether it listens.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Nobody listens for so long.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);
/// In the environment of every FFmpeg: which mixer it is of.
pub const VARIABLE: &str = "LIVE_ROOMS_MIXER";
/// The playlist of a stream, in its folder.
pub const PLAYLIST: &str = "index.m3u8";
/// In the same folder: shows that it is ours.
pub const MARKER: &str = ".live-room";

/// What the sound is made into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Codec {
    /// AAC, which everything plays.
    Aac,
    /// The Opus that comes in: a third of the work, and not everything plays it.
    Copy,
}

/// How to make a stream.
#[derive(Debug, Clone)]
pub struct Making {
    /// The program.
    pub ffmpeg: PathBuf,
    /// Whose it is: the value of [`VARIABLE`].
    pub owner: OsString,
    /// Where it listens.
    pub host: Ipv4Addr,
    /// On one of these ports.
    pub pool: Pool,
    /// What it makes.
    pub codec: Codec,
    /// Seconds of sound in a segment.
    pub segment: u8,
}

/// Is told where a stream takes its packets. It tries until it has said so, and is dropped when that is no
/// longer true.
pub trait Announce: Send + Sync + 'static {
    /// Returns when it could be told. Until then no FFmpeg is begun: nobody would send to it.
    fn ready(&self) -> impl Future<Output = ()> + Send;

    /// This is the port.
    fn announce(&self, port: u16) -> impl Future<Output = ()> + Send;
}

/// A stream that is made, until it is stopped. Dropped, its FFmpeg is killed.
pub struct Stream {
    stop: CancellationToken,
    again: Arc<Notify>,
    port: watch::Receiver<Option<u16>>,
    task: tokio::sync::Mutex<JoinHandle<()>>,
}

impl Stream {
    /// Begins it in this folder. What it writes is called after the assignment, so that whoever had the
    /// room before and has not noticed yet does not write into it.
    pub fn start(
        making: Making,
        folder: PathBuf,
        generation: u64,
        announce: impl Announce,
    ) -> Self {
        let (stop, again) = (CancellationToken::new(), Arc::new(Notify::new()));
        let (told, port) = watch::channel(None);
        let maker = Maker { making, folder, generation, port: told, again: Arc::clone(&again) };
        let task = tokio::spawn(maker.run(announce, stop.clone())).into();
        Self { stop, again, port, task }
    }

    /// Where it takes its packets now; nothing while nobody listens.
    pub fn port(&self) -> Option<u16> {
        *self.port.borrow()
    }

    /// Says again where it takes its packets.
    pub fn announce_again(&self) {
        self.again.notify_one();
    }

    /// Ends it. When this returns its FFmpeg has ended and its port was given back.
    pub async fn stop(&self) {
        self.stop.cancel();
        let mut task = self.task.lock().await;
        if !task.is_finished() {
            // Nobody aborts it but our end.
            let _ = (&mut *task).await;
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.task.get_mut().abort();
    }
}

struct Maker {
    making: Making,
    folder: PathBuf,
    generation: u64,
    port: watch::Sender<Option<u16>>,
    again: Arc<Notify>,
}

impl Maker {
    async fn run(self, announce: impl Announce, stop: CancellationToken) {
        self.make(&announce, &stop).await;
        // The folder may be gone.
        let _ = tokio::fs::remove_file(self.sdp()).await;
    }

    async fn make(&self, announce: &impl Announce, stop: &CancellationToken) {
        let (backoff, mut failures) = (Backoff::default(), 0);
        while !stop.is_cancelled() {
            tokio::select! {
                () = announce.ready() => {}
                () = stop.cancelled() => return,
            }
            let begun = Instant::now();
            let taken = tokio::select! {
                taken = self.making.pool.take() => taken,
                () = stop.cancelled() => return,
            };
            let ended = match taken {
                Some(port) => self.once(port, announce, stop).await,
                None => Err("no port is free".to_owned()),
            };
            self.port.send_replace(None);
            let Err(why) = ended else { return };
            if begun.elapsed() > WELL {
                failures = 0;
            }
            let wait = backoff.delay(failures, 0.0);
            failures += 1;
            tracing::warn!(folder = %self.folder.display(), why, ?wait, "a stream broke off");
            tokio::select! {
                () = sleep(wait) => {}
                () = stop.cancelled() => {}
            }
        }
    }

    /// One FFmpeg, to its end: fine only if that was asked for. The port is given back when it has ended.
    async fn once(
        &self,
        port: Port,
        announce: &impl Announce,
        stop: &CancellationToken,
    ) -> Result<(), String> {
        let sdp = sdp(self.making.host, port.number());
        let prepared = prepare(&self.folder, self.generation, &self.sdp(), &sdp).await;
        prepared.map_err(|error| format!("{}: {error}", self.folder.display()))?;
        let fed = Fed::new();
        let stalled = Mutex::new(false);
        let end = async {
            tokio::select! {
                () = stop.cancelled() => {}
                () = fed.stalls() => *stalled.lock() = true,
            }
            // One that has got nothing would write an empty segment.
            if fed.reached().is_some() { &STOP[..] } else { &[] }
        };
        let command = self.command();
        let run = command.run_until(b"", &fed, end);
        let tell = async {
            // What is sent before is lost, and an FFmpeg that cannot even begin is not worth a word.
            while !is_bound(port.number()) {
                sleep(LOOK_AGAIN).await;
            }
            self.port.send_replace(Some(port.number()));
            loop {
                announce.announce(port.number()).await;
                self.again.notified().await;
            }
        };
        let ended = tokio::select! {
            ended = run => ended,
            () = tell => unreachable!("it tells for ever"),
        };
        match ended {
            _ if stop.is_cancelled() => Ok(()),
            Ok(_) if *stalled.lock() => Err("no packets came for too long".to_owned()),
            Ok(_) => Err(format!("FFmpeg ended by itself{}", fed.last_words())),
            Err(error) => Err(explain(&error)),
        }
    }

    /// What FFmpeg is told to take. Another assignment has another one: who had the room before may not know
    /// yet that it is no longer theirs.
    fn sdp(&self) -> PathBuf {
        self.folder.join(format!("room-{}.sdp", self.generation))
    }

    fn command(&self) -> Command {
        let mut arguments: Vec<OsString> = words(
            "-nostdin -hide_banner -nostats -loglevel warning -progress pipe:1 -stats_period 1 \
             -protocol_whitelist file,rtp,udp -listen_timeout 86400 -reorder_queue_size 0 \
             -use_wallclock_as_timestamps 1 -localaddr",
        );
        arguments.push(self.making.host.to_string().into());
        arguments.push("-i".into());
        arguments.push(self.sdp().into());
        arguments.extend(words(match self.making.codec {
            Codec::Aac => {
                "-af aresample=async=1:min_hard_comp=0.1:first_pts=0 -c:a aac -b:a 96k -ar 48000 -ac 2"
            }
            Codec::Copy => "-c:a copy",
        }));
        arguments.extend(["-hls_time".into(), self.making.segment.to_string().into()]);
        arguments.extend(words(
            "-f hls -hls_list_size 6 -hls_segment_type mpegts \
             -hls_flags delete_segments+append_list+omit_endlist+program_date_time+temp_file \
             -hls_segment_filename",
        ));
        arguments.push(self.folder.join(format!("seg_{}_%05d.ts", self.generation)).into());
        arguments.push(self.folder.join(PLAYLIST).into());
        Command::new(self.making.ffmpeg.clone().into_os_string(), arguments, LONGEST)
            .variable(VARIABLE, &self.making.owner)
    }
}

fn words(text: &str) -> Vec<OsString> {
    text.split_whitespace().map(Into::into).collect()
}

/// What FFmpeg is told of the packets that come.
fn sdp(host: Ipv4Addr, port: u16) -> String {
    format!(
        "v=0\r\no=- 0 0 IN IP4 {host}\r\ns=live-rooms\r\nc=IN IP4 {host}\r\nt=0 0\r\n\
         m=audio {port} RTP/AVP 100\r\na=rtpmap:100 opus/48000/2\r\na=recvonly\r\n"
    )
}

/// Makes the folder, and removes what the FFmpeg before left half done or would never have removed: segments
/// that the playlist does not name. What is of a later assignment than ours is not touched: the room has moved,
/// and somebody else streams it in the same folder.
async fn prepare(
    folder: &Path,
    generation: u64,
    sdp_path: &Path,
    sdp: &str,
) -> std::io::Result<()> {
    tokio::fs::create_dir_all(folder).await?;
    tokio::fs::write(folder.join(MARKER), "").await?;
    let playlist = tokio::fs::read_to_string(folder.join(PLAYLIST)).await.unwrap_or_default();
    let mut entries = tokio::fs::read_dir(folder).await?;
    while let Some(entry) = entries.next_entry().await? {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let is_old = generation_of(name).is_some_and(|of| of <= generation);
        if is_old && !playlist.lines().any(|line| line == name) {
            match tokio::fs::remove_file(entry.path()).await {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
                _ => {} // its FFmpeg may be faster
            }
        }
    }
    tokio::fs::write(sdp_path, sdp).await
}

/// The assignment that a file was made for, if it is a segment or an SDP, be it half done.
fn generation_of(name: &str) -> Option<u64> {
    let whole = name.strip_suffix(".tmp").unwrap_or(name);
    let segment = whole.strip_prefix("seg_").and_then(|rest| rest.split_once('_'));
    let segment = segment.map(|(generation, _)| generation);
    let sdp = || whole.strip_prefix("room-").and_then(|rest| rest.strip_suffix(".sdp"));
    segment.or_else(sdp)?.parse().ok()
}

/// Reads how far FFmpeg is, and what it complains of.
struct Fed {
    /// The last time that it got on, and how far it was.
    at: watch::Sender<(Option<i64>, Instant)>,
    last_words: Mutex<String>,
}

impl Fed {
    fn new() -> Self {
        Self { at: watch::Sender::new((None, Instant::now())), last_words: Mutex::default() }
    }

    /// Returns when no packets came for too long.
    async fn stalls(&self) {
        let mut at = self.at.subscribe();
        loop {
            let (reached, when) = *at.borrow_and_update();
            let limit = if reached.is_some() { STALLED } else { FIRST };
            tokio::select! {
                () = sleep_until(when + limit) => return,
                changed = at.changed() => if changed.is_err() { return },
            }
        }
    }

    /// How far it is; nothing if no packet came.
    fn reached(&self) -> Option<i64> {
        self.at.borrow().0
    }

    fn last_words(&self) -> String {
        let words = self.last_words.lock();
        if words.is_empty() { String::new() } else { format!(": {words}") }
    }
}

impl Watch for Fed {
    fn progress(&self, _: f64, _: Option<&str>) {}

    fn line(&self, line: &str) {
        // In the beginning it is `N/A`.
        let reached = line.strip_prefix("out_time_us=").and_then(|text| text.parse::<i64>().ok());
        if let Some(reached) = reached {
            self.at.send_if_modified(|(before, when)| {
                let gets_on = before.is_none_or(|before| reached > before);
                if gets_on {
                    (*before, *when) = (Some(reached), Instant::now());
                }
                gets_on
            });
        }
    }

    fn log(&self, line: &str) {
        tracing::debug!(line, "FFmpeg says");
        line.clone_into(&mut self.last_words.lock());
    }
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;
    use crate::ports::Ports;
    use crate::programs::find;

    const HOST: Ipv4Addr = Ipv4Addr::LOCALHOST;

    /// Tells a test the ports, while the test lets it.
    struct Told(watch::Sender<Vec<u16>>, watch::Receiver<bool>);

    impl Announce for Told {
        async fn ready(&self) {
            self.1.clone().wait_for(|ready| *ready).await.expect("the test goes on");
        }

        async fn announce(&self, port: u16) {
            self.0.send_modify(|ports| ports.push(port));
        }
    }

    struct Given {
        folder: tempfile::TempDir,
        pool: Pool,
        stream: Stream,
        ports: watch::Receiver<Vec<u16>>,
        ready: watch::Sender<bool>,
        owner: OsString,
    }

    fn given(codec: Codec) -> Given {
        given_with(find("ffmpeg").unwrap(), codec)
    }

    fn given_with(ffmpeg: PathBuf, codec: Codec) -> Given {
        let folder = tempfile::tempdir().unwrap();
        let first = 30_000 + fastrand::u16(..69) * 40;
        let ports: Ports = format!("{first}-{}", first + 39).parse().unwrap();
        let pool = Pool::new(HOST, ports);
        let owner = OsString::from(format!("stream-test-{:016x}", fastrand::u64(..)));
        let making = Making {
            ffmpeg,
            owner: owner.clone(),
            host: HOST,
            pool: pool.clone(),
            codec,
            segment: 1,
        };
        let (told, ports) = watch::channel(Vec::new());
        let (ready, is_ready) = watch::channel(true);
        let stream = Stream::start(making, folder.path().join("a room"), 7, Told(told, is_ready));
        Given { folder, pool, stream, ports, ready, owner }
    }

    impl Given {
        /// The port told last, after `before` if that was one. Somebody listens there.
        async fn port(&mut self, before: Option<u16>) -> u16 {
            let is_new = |ports: &Vec<u16>| ports.last().is_some_and(|port| Some(*port) != before);
            let told = testing::soon("a port", self.ports.wait_for(is_new)).await.unwrap();
            let port = *told.last().unwrap();
            let bound = std::net::UdpSocket::bind((HOST, port));
            assert!(bound.is_err(), "{port} was told before anybody listens there");
            port
        }

        /// A segment in which this tone is heard. On a busy machine an FFmpeg may not be fed in time: then it
        /// is sent to the next one.
        async fn heard(&self, tone: &mut Tone) -> PathBuf {
            let folder = self.folder.path().join("a room");
            let (hertz, ports) = (tone.hertz, self.ports.clone());
            let heard = async {
                loop {
                    let port = ports.borrow().last().copied();
                    if let Some(port) = port.filter(|port| *port != tone.port) {
                        *tone = send(hertz, port);
                    }
                    let list = std::fs::read_to_string(folder.join(PLAYLIST)).unwrap_or_default();
                    let newest = list.lines().rfind(|line| line.contains(".ts"));
                    if let Some(segment) = newest.map(|name| folder.join(name))
                        && loudness(&segment, hertz).await.is_some_and(|loud| loud > -35.0)
                    {
                        return segment;
                    }
                    sleep(Duration::from_millis(100)).await;
                }
            };
            testing::soon("a tone", heard).await
        }
    }

    /// Is sent until it is dropped.
    struct Tone {
        hertz: u32,
        port: u16,
        _child: tokio::process::Child,
    }

    /// Sends a tone as Janus would.
    fn send(hertz: u32, port: u16) -> Tone {
        let source = format!("sine=frequency={hertz}:sample_rate=48000");
        let child = tokio::process::Command::new("ffmpeg")
            .args([
                "-v", "error", "-re", "-f", "lavfi", "-i", &source, "-ac", "2", "-c:a", "libopus",
            ])
            .args(["-frame_duration", "20", "-payload_type", "100", "-f", "rtp"])
            .arg(format!("rtp://127.0.0.1:{port}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        Tone { hertz, port, _child: child }
    }

    /// How loud a file is around a frequency, by FFmpeg's own measure, in decibels.
    async fn loudness(file: &Path, hertz: u32) -> Option<f64> {
        let filter = format!("bandpass=f={hertz}:width_type=h:w=50,volumedetect");
        let measured = tokio::process::Command::new("ffmpeg")
            .args(["-nostdin", "-hide_banner", "-nostats", "-i"])
            .arg(file)
            .args(["-af", &filter, "-f", "null", "-"])
            .output()
            .await
            .unwrap();
        let said = String::from_utf8_lossy(&measured.stderr).into_owned();
        let mean = said.lines().find_map(|line| line.split_once("mean_volume: "));
        mean?.1.split(' ').next()?.parse().ok()
    }

    fn is_running(owner: &OsString) -> bool {
        let mark = format!("{VARIABLE}={}", owner.display());
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        processes.into_iter().any(|process| {
            let environment = std::fs::read(process.path().join("environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
        })
    }

    #[tokio::test]
    async fn a_tone_that_is_sent_is_in_the_stream_and_a_stop_leaves_nothing() {
        for codec in [Codec::Aac, Codec::Copy] {
            let mut given = given(codec);
            let mut tone = send(440, given.port(None).await);
            let segment = given.heard(&mut tone).await;
            let other = loudness(&segment, 2500).await.unwrap();
            assert!(other < -45.0, "{codec:?}: {other} dB");
            assert!(is_running(&given.owner));
            testing::soon("the stop", given.stream.stop()).await;
            assert!(!is_running(&given.owner) && given.pool.lent() == 0, "{codec:?}");
        }
    }

    #[tokio::test]
    async fn an_ffmpeg_that_ends_is_begun_again_on_another_port_and_the_stream_goes_on() {
        let mut given = given(Codec::Aac);
        let mut tone = send(440, given.port(None).await);
        given.heard(&mut tone).await;
        let (owner, first) = (given.owner.clone(), tone.port);
        let killed = tokio::task::spawn_blocking(move || crate::leftovers::kill_leftovers(&owner));
        assert_eq!(killed.await.unwrap().unwrap(), 1);
        drop(tone);
        let mut tone = send(1000, given.port(Some(first)).await);
        given.heard(&mut tone).await;
        testing::soon("the stop", given.stream.stop()).await;
        assert!(!is_running(&given.owner) && given.pool.lent() == 0);
    }

    #[tokio::test]
    async fn an_ffmpeg_that_cannot_begin_is_tried_again_after_longer_and_longer_waits() {
        let folder = tempfile::tempdir().unwrap();
        let (begun, program) = (folder.path().join("begun"), folder.path().join("ffmpeg"));
        let script = format!("#!/bin/sh\ndate +%s%N >> {}\nexit 1\n", begun.display());
        std::fs::write(&program, script).unwrap();
        let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&program, executable).unwrap();
        let given = given_with(program, Codec::Aac);
        let times = || {
            let text = std::fs::read_to_string(&begun).unwrap_or_default();
            text.lines().map(|line| line.parse::<u64>().unwrap()).collect::<Vec<_>>()
        };
        let tried = async {
            while times().len() < 5 {
                sleep(Duration::from_millis(50)).await;
            }
        };
        testing::soon("five tries", tried).await;
        testing::soon("the stop", given.stream.stop()).await;
        // Each wait is at least what it should be; how much more depends on how busy the machine is.
        for (pair, least) in times().windows(2).zip([100, 200, 400, 800]) {
            let waited = Duration::from_nanos(pair[1] - pair[0]);
            assert!(waited >= Duration::from_millis(least), "{waited:?}, not {least} ms");
        }
        assert_eq!(*given.ports.borrow(), [0_u16; 0], "nobody is told where nobody listens");
        assert!(!is_running(&given.owner) && given.pool.lent() == 0);
    }

    #[tokio::test]
    async fn a_stop_before_the_first_packet_and_after_the_last_leaves_nothing() {
        let mut given = given(Codec::Aac);
        let mut tone = send(440, given.port(None).await);
        given.heard(&mut tone).await;
        drop(tone); // it now waits for a packet, and does not hear the first signal
        testing::soon("the stop", given.stream.stop()).await;
        assert!(!is_running(&given.owner) && given.pool.lent() == 0);

        let mut given = self::given(Codec::Aac);
        given.port(None).await;
        testing::soon("the stop", given.stream.stop()).await;
        assert!(!is_running(&given.owner) && given.pool.lent() == 0);
    }

    #[tokio::test]
    async fn what_is_of_a_later_assignment_in_the_same_folder_is_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        let kept = ["index.m3u8", "index.m3u8.tmp", "room-8.sdp", "seg_7_00002.ts"];
        let kept = kept.iter().chain(&["seg_8_00001.ts", "seg_8_00002.ts.tmp", "thesis.txt"]);
        let old = ["room-6.sdp", "seg_6_00001.ts", "seg_7_00001.ts", "seg_7_00003.ts.tmp"];
        for name in kept.clone().chain(&old) {
            std::fs::write(folder.path().join(name), "seg_7_00002.ts\n").unwrap();
        }
        let sdp = folder.path().join("room-7.sdp");
        prepare(folder.path(), 7, &sdp, "ours").await.unwrap();
        let there = std::fs::read_dir(folder.path()).unwrap().flatten();
        let mut there: Vec<_> =
            there.map(|entry| entry.file_name().into_string().unwrap()).collect();
        there.sort_unstable();
        let mut wanted: Vec<_> = kept.copied().chain([MARKER, "room-7.sdp"]).collect();
        wanted.sort_unstable();
        assert_eq!(there, wanted);
        assert_eq!(std::fs::read(sdp).unwrap(), b"ours");
        let of_another = std::fs::read(folder.path().join("room-8.sdp")).unwrap();
        assert_eq!(of_another, b"seg_7_00002.ts\n");
    }

    #[tokio::test]
    async fn what_is_no_longer_fed_is_begun_again_elsewhere_once_that_can_be_told() {
        let mut given = given(Codec::Aac);
        let mut tone = send(440, given.port(None).await);
        given.heard(&mut tone).await;
        given.ready.send_replace(false);
        let (first, told) = (tone.port, given.ports.borrow().len());
        drop(tone);
        let ended = async {
            while given.pool.lent() > 0 || is_running(&given.owner) {
                sleep(Duration::from_millis(50)).await;
            }
        };
        testing::soon("it ends", ended).await;
        let again = given.ports.wait_for(|ports| ports.len() > told);
        let is_again = tokio::time::timeout(Duration::from_secs(1), again).await.is_ok();
        assert!(!is_again, "it is not known that it should be");
        given.ready.send_replace(true);
        let mut tone = send(1000, given.port(Some(first)).await);
        given.heard(&mut tone).await;
        testing::soon("the stop", given.stream.stop()).await;
        assert!(!is_running(&given.owner) && given.pool.lent() == 0);
        assert!(!given.folder.path().join("a room/room-7.sdp").exists());
    }
}
