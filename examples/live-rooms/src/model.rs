//! What is in the store: the keys and their values.
//!
//! ```text
//! /rooms/{id}/livemeta       what a room should be, and who runs it    written by `rooms`
//! /rooms/{id}/mixer          where its mixer takes RTP                 written by that mixer
//! /rooms/{id}/janus          in which Janus it is                      written by that manager
//! /mixers/{id}/heartbeat     a mixer lives; under a lease of 10 s      written by it
//! /mixers/{id}/state         may it have rooms?                        written by people, through `rooms`
//! /januses/{id}/…            the same for Janus
//! /placements                who placed the last room                  written with every placement
//! ```

use std::fmt;
use std::net::Ipv4Addr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use vedetta::runtime::State;
use vedetta::runtime::watcher::{BoxError, Effect};

/// How the keys of rooms begin.
pub const ROOMS: &str = "/rooms/";
/// Written with every placement, so that each is decided knowing all those before it.
pub const PLACEMENTS: &str = "/placements";
/// A module that gave no sign of life for so long is dead.
pub const TTL: Duration = Duration::from_secs(10);

/// Milliseconds since 1970.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// The key of a room's part.
pub fn room_key(id: &str, part: &str) -> String {
    format!("{ROOMS}{id}/{part}")
}

/// Whether this may be the id of a room or a module: it becomes part of keys, paths and addresses.
pub fn is_id(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=64).contains(&text.len()) && text.bytes().all(fits)
}

/// An id from the command line.
pub fn parse_id(text: &str) -> Result<String, String> {
    let why = "an id is 1 to 64 letters, digits, - and _";
    if is_id(text) { Ok(text.to_owned()) } else { Err(why.to_owned()) }
}

/// What a room is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// People may come, nothing is streamed yet.
    Created,
    /// It is mixed and streamed.
    OnAir,
    /// It is streamed no more; it may be started again.
    Stopped,
    /// It goes as soon as nobody runs anything for it.
    Removing,
}

/// What a room should be, and who runs it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LiveMeta {
    /// What it is at.
    pub status: Status,
    /// The mixer that is to stream it.
    pub mixer_id: Option<String>,
    /// The Janus that is to hold it.
    pub janus_id: Option<String>,
    /// Grows with each assignment.
    pub generation: u64,
    /// When it was created, in milliseconds since 1970; the other times, too.
    pub created_at: u64,
    /// When it was last started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<u64>,
    /// When it was to be removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removing_at: Option<u64>,
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
}

impl LiveMeta {
    /// A room that was just created.
    pub fn new(title: Option<String>, now: u64) -> Self {
        Self {
            status: Status::Created,
            mixer_id: None,
            janus_id: None,
            generation: 0,
            created_at: now,
            started_at: None,
            removing_at: None,
            title,
        }
    }

    /// The module of this kind that is to run it.
    pub fn assigned(&self, kind: Kind) -> Option<&str> {
        match kind {
            Kind::Mixer => self.mixer_id.as_deref(),
            Kind::Janus => self.janus_id.as_deref(),
        }
    }

    /// Whether a module of this kind is to run it.
    pub fn needs(&self, kind: Kind) -> bool {
        match kind {
            Kind::Mixer => self.status == Status::OnAir,
            Kind::Janus => self.status != Status::Removing,
        }
    }

    /// Whether this module is to run it.
    pub fn is_run_by(&self, kind: Kind, id: &str) -> bool {
        self.needs(kind) && self.assigned(kind) == Some(id)
    }

    /// The same with this module.
    #[must_use]
    pub fn assign(mut self, kind: Kind, id: &str) -> Self {
        self.generation += 1;
        match kind {
            Kind::Mixer => self.mixer_id = Some(id.to_owned()),
            Kind::Janus => self.janus_id = Some(id.to_owned()),
        }
        self
    }

    /// The same, to be removed.
    #[must_use]
    pub fn removing(mut self, now: u64) -> Self {
        if self.status != Status::Removing {
            (self.status, self.removing_at) = (Status::Removing, Some(now));
        }
        self
    }
}

/// Where a mixer takes the RTP of a room.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MixerAt {
    /// Whose it is.
    pub mixer_id: String,
    /// Where it listens.
    pub host: Ipv4Addr,
    /// The RTP port; that of RTCP is the next one.
    pub port: u16,
    /// What the packets are marked with.
    pub ssrc: u32,
    /// The assignment that it was begun for.
    pub generation: u64,
    /// Which process of that id it is, as in its [`Heartbeat`].
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub run: String,
}

/// In which Janus a room is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JanusAt {
    /// Whose it is.
    pub janus_id: String,
    /// What it is called there.
    pub room: String,
}

/// All of a room.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Room {
    /// What it should be; nothing if it is gone, and only leftovers are there.
    pub meta: Option<LiveMeta>,
    /// Where it is mixed.
    pub mixer: Option<MixerAt>,
    /// Where people meet.
    pub janus: Option<JanusAt>,
}

impl Room {
    /// The assignment, if this module is to run it.
    pub fn run_by(&self, kind: Kind, id: &str) -> Option<&LiveMeta> {
        self.meta.as_ref().filter(|meta| meta.is_run_by(kind, id))
    }

    /// Whether nothing of it should be left.
    pub fn is_gone(&self) -> bool {
        self.meta.as_ref().is_none_or(|meta| meta.status == Status::Removing)
    }

    /// Where the RTP of the room should go: to where its mixer takes it for this assignment. Whoever had the
    /// room before may still listen or send, at another port.
    pub fn target(&self) -> Option<&MixerAt> {
        let meta = self.meta.as_ref()?;
        let is_now = |mixer: &&MixerAt| mixer.generation == meta.generation;
        let mixer = self.mixer.as_ref().filter(is_now)?;
        meta.is_run_by(Kind::Mixer, &mixer.mixer_id).then_some(mixer)
    }
}

impl State for Room {
    fn apply(&mut self, key_type: &str, value: Option<&[u8]>) -> Result<Effect, BoxError> {
        match key_type {
            "livemeta" => self.meta = read(value)?,
            "mixer" => self.mixer = read(value)?,
            _ => self.janus = read(value)?,
        }
        Ok(Effect::Wanted)
    }
}

fn read<T: for<'a> Deserialize<'a>>(value: Option<&[u8]>) -> Result<Option<T>, BoxError> {
    Ok(value.map(serde_json::from_slice).transpose()?)
}

/// What marks the packets of a room: half of it is the room's, half the assignment's. So what is sent for
/// a room can be told from anything else, and for which assignment.
pub fn ssrc(room: &str, generation: u64) -> u32 {
    let hash = Sha256::digest(room);
    let [low, high, ..] = generation.to_le_bytes();
    // Never 0, which means any.
    u32::from_be_bytes([hash[0] | 1, hash[1], high, low])
}

/// Whether packets with this mark are of a room, whatever the assignment.
pub fn is_of_room(mark: u32, room: &str) -> bool {
    mark >> 16 == ssrc(room, 0) >> 16
}

/// What rooms are run by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Streams them.
    Mixer,
    /// Lets people meet.
    Janus,
}

impl Kind {
    /// How the keys of such modules begin.
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Mixer => "/mixers/",
            Self::Janus => "/januses/",
        }
    }

    /// The part of a room that such a module writes.
    pub fn part(self) -> &'static str {
        match self {
            Self::Mixer => "mixer",
            Self::Janus => "janus",
        }
    }

    /// The key of a module's part.
    pub fn key(self, id: &str, part: &str) -> String {
        format!("{}{id}/{part}", self.prefix())
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.part())
    }
}

/// A sign of life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Heartbeat {
    /// The machine.
    pub host: String,
    /// How many rooms it can run.
    pub capacity: u32,
    /// How many it runs.
    pub load: u32,
    /// Of the program.
    pub version: String,
    /// The process, on that machine.
    pub pid: u32,
    /// Where that number means something.
    #[serde(default)]
    pub machine: String,
    /// Tells this process from any other of the same id.
    #[serde(default)]
    pub run: String,
    /// It ends as soon as it has no rooms.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaving: bool,
}

/// What people say of a module. Stays when it is restarted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Marks {
    /// It may have rooms.
    pub ready: bool,
    /// It gets no more.
    pub cordoned: bool,
    /// Those it has go elsewhere.
    pub draining: bool,
}

/// All of a module.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Module {
    /// Nothing if it is dead.
    pub heartbeat: Option<Heartbeat>,
    /// What people say.
    pub marks: Marks,
}

impl Module {
    /// Whether it gave a sign of life lately.
    pub fn is_alive(&self) -> bool {
        self.heartbeat.is_some()
    }

    /// Whether rooms may stay with it.
    pub fn keeps_rooms(&self) -> bool {
        self.heartbeat.as_ref().is_some_and(|beat| !beat.leaving) && !self.marks.draining
    }

    /// Whether it may get more rooms, if it has so many.
    pub fn takes_rooms(&self, load: u32) -> bool {
        let has_room = self.heartbeat.as_ref().is_some_and(|beat| load < beat.capacity);
        has_room && self.keeps_rooms() && self.marks.ready && !self.marks.cordoned
    }
}

impl State for Module {
    fn apply(&mut self, key_type: &str, value: Option<&[u8]>) -> Result<Effect, BoxError> {
        if key_type == "state" {
            self.marks = read(value)?.unwrap_or_default();
            return Ok(Effect::Wanted);
        }
        let before = std::mem::replace(&mut self.heartbeat, read(value)?);
        // How much it has to do changes nothing for any room.
        let matters = |beat: &Option<Heartbeat>| beat.as_ref().map(|b| (b.leaving, b.capacity));
        let is_same = matters(&before) == matters(&self.heartbeat);
        Ok(if is_same { Effect::Quiet } else { Effect::Wanted })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_values_are_written_as_everybody_reads_them() {
        let text =
            r#"{"status":"onair","mixerId":"m1","janusId":null,"generation":3,"createdAt":5}"#;
        let meta: LiveMeta = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&meta).unwrap(), text);
        assert_eq!((meta.status, meta.mixer_id.as_deref()), (Status::OnAir, Some("m1")));
        let text = r#"{"mixerId":"m1","host":"127.0.0.1","port":42000,"ssrc":7,"generation":1}"#;
        let at: MixerAt = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&at).unwrap(), text);
        // By people.
        let marks: Marks = serde_json::from_str(r#"{"ready":true}"#).unwrap();
        assert_eq!(marks, Marks { ready: true, ..Marks::default() });
        let beat = r#"{"host":"h","capacity":2,"load":1,"version":"1","pid":7}"#;
        assert!(!serde_json::from_str::<Heartbeat>(beat).unwrap().leaving);
    }

    #[test]
    fn an_id_cannot_leave_its_place() {
        for id in ["a", "Room-7_b", &"x".repeat(64)] {
            assert!(is_id(id), "{id}");
        }
        for id in ["", "a/b", "..", "a.b", "ä", "a b", "a\0", &"x".repeat(65)] {
            assert!(!is_id(id), "{id}");
        }
    }

    #[test]
    fn packets_are_told_apart_by_room_and_assignment() {
        assert_ne!(ssrc("a", 1), ssrc("a", 2));
        assert_ne!(ssrc("a", 1), ssrc("b", 1));
        assert_ne!(ssrc("a", 0), 0);
        assert!(is_of_room(ssrc("a", 70_000), "a") && !is_of_room(ssrc("b", 1), "a"));
    }

    #[test]
    fn packets_go_to_the_mixer_of_the_assignment_and_to_no_former_one() {
        let at = |mixer: &str| MixerAt {
            mixer_id: mixer.into(),
            host: Ipv4Addr::LOCALHOST,
            port: 42000,
            ssrc: 1,
            generation: 1,
            run: String::new(),
        };
        let on_air = LiveMeta { status: Status::OnAir, ..LiveMeta::new(None, 0) };
        let mut room = Room { meta: Some(on_air.assign(Kind::Mixer, "b")), ..Room::default() };
        room.mixer = Some(at("a"));
        assert_eq!(room.target(), None);
        room.mixer = Some(at("b"));
        assert_eq!(room.target(), Some(&at("b")));
        // In another Janus: that the former one still sends to this port must not be heard.
        let meta = room.meta.take().map(|meta| meta.assign(Kind::Janus, "j"));
        room.meta = meta;
        assert_eq!(room.target(), None);
        room.mixer = Some(MixerAt { generation: 2, ..at("b") });
        assert!(room.target().is_some());
        room.meta.as_mut().unwrap().status = Status::Stopped;
        assert_eq!(room.target(), None);
    }

    #[test]
    fn only_what_matters_for_rooms_is_a_change_of_a_module() {
        let mut module = Module::default();
        let mut apply = |load: u32, capacity: u32, leaving: bool| {
            let beat = format!(
                r#"{{"host":"h","capacity":{capacity},"load":{load},"version":"1","pid":7,"leaving":{leaving}}}"#
            );
            module.apply("heartbeat", Some(beat.as_bytes())).unwrap()
        };
        assert_eq!(apply(0, 5, false), Effect::Wanted);
        assert_eq!(apply(1, 5, false), Effect::Quiet);
        assert_eq!(apply(1, 6, false), Effect::Wanted);
        assert_eq!(apply(1, 6, true), Effect::Wanted);
        assert_eq!(module.apply("heartbeat", None).unwrap(), Effect::Wanted);
        assert!(!module.is_alive());
    }
}
