//! The rules of the rooms: who may run them, and when they go. Code without effects.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::model::{Kind, Module, Room, Status};

/// How long things may take.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// A room that was not started by then goes.
    pub start_within: Duration,
    /// A room that is older goes.
    pub max_age: Duration,
    /// What did not let go of a room by then is no longer waited for.
    pub remove_within: Duration,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            start_within: Duration::from_secs(600),
            max_age: Duration::from_secs(12 * 3600),
            remove_within: Duration::from_secs(30),
        }
    }
}

/// What a room needs now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// Nothing, until something changes or this time has passed.
    Rest(Option<Duration>),
    /// Modules of these kinds.
    Place(Vec<Kind>),
    /// Without what dead modules of these kinds said of it, which it no longer needs.
    Clear(Vec<Kind>),
    /// To be removed, for this reason.
    Remove(&'static str),
    /// Nobody runs anything for it: its keys can go. Those that are kept are of modules that still have to
    /// let go of it themselves.
    Forget(Vec<Kind>),
}

/// What modules there are.
pub trait Modules {
    /// One of them.
    fn module(&self, kind: Kind, id: &str) -> Module;
}

/// What a room needs at `now`.
pub fn decide(room: &Room, now: u64, modules: &impl Modules, rules: &Rules) -> Decision {
    let holds = |kind| {
        let holder = match kind {
            Kind::Mixer => room.mixer.as_ref().map(|at| &at.mixer_id),
            Kind::Janus => room.janus.as_ref().map(|at| &at.janus_id),
        };
        holder.map(|id| modules.module(kind, id).is_alive())
    };
    let Some(meta) = &room.meta else {
        // What is left of one that is gone. Who lives takes care of it.
        let dead =
            [Kind::Mixer, Kind::Janus].into_iter().filter(|kind| holds(*kind) == Some(false));
        let dead: Vec<Kind> = dead.collect();
        return if dead.is_empty() { Decision::Rest(None) } else { Decision::Forget(dead) };
    };
    let left = |since: u64, limit: Duration| {
        let limit = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        Duration::from_millis(since.saturating_add(limit).saturating_sub(now))
    };
    if meta.status == Status::Removing {
        let left = left(meta.removing_at.unwrap_or(meta.created_at), rules.remove_within);
        let is_held = holds(Kind::Mixer) == Some(true) || holds(Kind::Janus) == Some(true);
        return if is_held && !left.is_zero() {
            Decision::Rest(Some(left))
        } else {
            Decision::Forget(vec![Kind::Mixer, Kind::Janus])
        };
    }
    let age_left = left(meta.created_at, rules.max_age);
    if age_left.is_zero() {
        return Decision::Remove("it is too old");
    }
    let mut rest = age_left;
    if meta.status == Status::Created {
        let start_left = left(meta.created_at, rules.start_within);
        if start_left.is_zero() {
            return Decision::Remove("it was never started");
        }
        rest = rest.min(start_left);
    }
    let is_left = |kind: &Kind| !meta.needs(*kind) && holds(*kind) == Some(false);
    let left: Vec<Kind> = [Kind::Mixer, Kind::Janus].into_iter().filter(is_left).collect();
    if !left.is_empty() {
        return Decision::Clear(left);
    }
    let lacks = |kind: &Kind| {
        let assigned = meta.assigned(*kind);
        meta.needs(*kind) && !assigned.is_some_and(|id| modules.module(*kind, id).keeps_rooms())
    };
    let lacking: Vec<Kind> = [Kind::Janus, Kind::Mixer].into_iter().filter(lacks).collect();
    if lacking.is_empty() { Decision::Rest(Some(rest)) } else { Decision::Place(lacking) }
}

/// How many rooms each module of a kind is assigned.
pub fn loads<'a>(rooms: impl IntoIterator<Item = &'a Room>, kind: Kind) -> BTreeMap<&'a str, u32> {
    let mut loads = BTreeMap::new();
    for meta in rooms.into_iter().filter_map(|room| room.meta.as_ref()) {
        if let (true, Some(id)) = (meta.needs(kind), meta.assigned(kind)) {
            *loads.entry(id).or_default() += 1;
        }
    }
    loads
}

/// What each room takes of the modules, and which rooms wait: so it is known when there may be a place for them.
#[derive(Debug, Default)]
pub struct Places {
    taken: BTreeMap<String, [Option<String>; 2]>,
    waiting: BTreeSet<String>,
}

impl Places {
    /// A room as it is now, and whether it waits. Whether it gave up a place while others wait.
    pub fn saw(&mut self, id: &str, room: Option<&Room>, waits: bool) -> bool {
        let meta = room.and_then(|room| room.meta.as_ref());
        let now = [Kind::Mixer, Kind::Janus].map(|kind| {
            let meta = meta.filter(|meta| meta.needs(kind))?;
            meta.assigned(kind).map(str::to_owned)
        });
        let before = if now == [None, None] {
            self.taken.remove(id)
        } else {
            self.taken.insert(id.to_owned(), now.clone())
        };
        if waits {
            self.waiting.insert(id.to_owned());
        } else {
            self.waiting.remove(id);
        }
        let before = before.unwrap_or_default();
        let gave_up = before.iter().zip(&now).any(|(was, is)| was.is_some() && was != is);
        gave_up && self.waiting.iter().any(|other| other != id)
    }
}

/// One that lives, is marked ready, is not cordoned and has room: the one with the fewest rooms, and any of
/// those if there are several. `random` answers with a number below the one given.
pub fn pick<'a>(
    modules: impl IntoIterator<Item = (&'a str, &'a Module)>,
    loads: &BTreeMap<&str, u32>,
    random: impl FnOnce(usize) -> usize,
) -> Option<&'a str> {
    let mut best = Vec::new();
    let mut least = u32::MAX;
    for (id, module) in modules {
        let load = loads.get(id).copied().unwrap_or(0);
        if !module.takes_rooms(load) || load > least {
            continue;
        }
        if load < least {
            least = load;
            best.clear();
        }
        best.push(id);
    }
    if best.is_empty() {
        return None;
    }
    best.sort_unstable();
    best.get(random(best.len())).copied()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::model::{Heartbeat, JanusAt, LiveMeta, Marks, MixerAt};

    const READY: Marks = Marks { ready: true, cordoned: false, draining: false };

    fn module(capacity: u32, marks: Marks) -> Module {
        let heartbeat = Heartbeat {
            host: "h".into(),
            capacity,
            load: 0,
            version: "1".into(),
            pid: 1,
            machine: String::new(),
            run: String::new(),
            leaving: false,
        };
        Module { heartbeat: Some(heartbeat), marks }
    }

    fn leaving(capacity: u32) -> Module {
        let mut module = module(capacity, READY);
        module.heartbeat.as_mut().unwrap().leaving = true;
        module
    }

    #[test]
    fn the_least_loaded_of_those_that_may_have_rooms_is_picked() {
        let all = [
            ("busy", module(9, READY)),
            ("dead", Module { heartbeat: None, marks: READY }),
            ("unready", module(9, Marks::default())),
            ("cordoned", module(9, Marks { cordoned: true, ..READY })),
            ("draining", module(9, Marks { draining: true, ..READY })),
            ("leaving", leaving(9)),
            ("full", module(1, READY)),
            ("a", module(9, READY)),
            ("b", module(9, READY)),
        ];
        let modules = || all.iter().map(|(id, module)| (*id, module));
        let loads = BTreeMap::from([("busy", 3), ("full", 1), ("a", 2), ("b", 2)]);
        assert_eq!(pick(modules(), &loads, |n| n - 1), Some("b"));
        let tied = pick(modules(), &loads, |n| {
            assert_eq!(n, 2, "a and b");
            0
        });
        assert_eq!(tied, Some("a"));
        let loads = BTreeMap::from([("busy", 9), ("full", 1), ("a", 9), ("b", 12)]);
        assert_eq!(pick(modules(), &loads, |_| 0), None, "nobody has room");
    }

    #[test]
    fn ties_are_broken_by_chance() {
        let all: Vec<_> = ["a", "b", "c"].map(|id| (id, module(9, READY))).into();
        let mut seen = BTreeSet::new();
        for seed in 0..64 {
            let mut random = fastrand::Rng::with_seed(seed);
            let modules = all.iter().map(|(id, module)| (*id, module));
            seen.extend(pick(modules, &BTreeMap::new(), |n| random.usize(..n)));
        }
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), ["a", "b", "c"]);
    }

    /// `m` and `j` live, whatever begins with `dead` does not.
    struct World;

    impl Modules for World {
        fn module(&self, _: Kind, id: &str) -> Module {
            match id {
                "draining" => module(9, Marks { draining: true, ..READY }),
                "cordoned" => module(9, Marks { cordoned: true, ..READY }),
                "leaving" => leaving(9),
                "m" | "j" => module(9, READY),
                _ => Module::default(),
            }
        }
    }

    fn room(status: Status, mixer: Option<&str>, janus: Option<&str>) -> Room {
        let mut meta = LiveMeta::new(None, 0);
        (meta.status, meta.removing_at) = (status, Some(1_000));
        meta.mixer_id = mixer.map(str::to_owned);
        meta.janus_id = janus.map(str::to_owned);
        Room { meta: Some(meta), ..Room::default() }
    }

    fn held(mut room: Room, mixer: Option<&str>, janus: Option<&str>) -> Room {
        room.mixer = mixer.map(|id| MixerAt {
            mixer_id: id.into(),
            host: Ipv4Addr::LOCALHOST,
            port: 42000,
            ssrc: 1,
            generation: 1,
            run: String::new(),
        });
        room.janus = janus.map(|id| JanusAt { janus_id: id.into(), room: "r".into() });
        room
    }

    #[test]
    fn a_room_gets_what_its_status_needs_and_loses_what_cannot_keep_it() {
        use Decision::Place;
        use Kind::{Janus, Mixer};
        use Status::{Created, OnAir, Stopped};
        let both = Place(vec![Janus, Mixer]);
        for (status, mixer, janus, wanted) in [
            (Created, None, None, Some(Place(vec![Janus]))),
            (Created, None, Some("j"), None),
            (OnAir, None, None, Some(both.clone())),
            (OnAir, None, Some("j"), Some(Place(vec![Mixer]))),
            (OnAir, Some("m"), Some("j"), None),
            (OnAir, Some("dead"), Some("j"), Some(Place(vec![Mixer]))),
            (OnAir, Some("m"), Some("dead"), Some(Place(vec![Janus]))),
            (OnAir, Some("draining"), Some("leaving"), Some(both)),
            (OnAir, Some("cordoned"), Some("cordoned"), None),
            (Stopped, Some("dead"), Some("j"), None),
            (Stopped, None, Some("dead"), Some(Place(vec![Janus]))),
        ] {
            let room = room(status, mixer, janus);
            let decided = decide(&room, 1_000, &World, &Rules::default());
            let rests = matches!(decided, Decision::Rest(Some(_)));
            match wanted {
                Some(wanted) => assert_eq!(decided, wanted, "{room:?}"),
                None => assert!(rests, "{room:?} {decided:?}"),
            }
        }
    }

    #[test]
    fn rooms_go_when_their_time_is_over() {
        let rules = Rules {
            start_within: Duration::from_secs(10),
            max_age: Duration::from_secs(60),
            remove_within: Duration::from_secs(5),
        };
        let decide = |room: &Room, now| decide(room, now, &World, &rules);
        let rest = |millis| Decision::Rest(Some(Duration::from_millis(millis)));
        let created = room(Status::Created, None, Some("j"));
        assert_eq!(decide(&created, 9_999), rest(1));
        assert_eq!(decide(&created, 10_000), Decision::Remove("it was never started"));
        let on_air = room(Status::OnAir, Some("m"), Some("j"));
        assert_eq!(decide(&on_air, 10_000), rest(50_000));
        assert_eq!(decide(&on_air, 60_000), Decision::Remove("it is too old"));
        // Also one that nobody can run.
        let unplaced = room(Status::OnAir, None, None);
        assert_eq!(decide(&unplaced, 60_000), Decision::Remove("it is too old"));
    }

    #[test]
    fn a_room_is_forgotten_once_nobody_who_lives_holds_it_or_they_took_too_long() {
        let rules = Rules { remove_within: Duration::from_secs(5), ..Rules::default() };
        let decide = |room: &Room, now| decide(room, now, &World, &rules);
        let all = Decision::Forget(vec![Kind::Mixer, Kind::Janus]);
        let removing = room(Status::Removing, Some("m"), Some("j"));
        assert_eq!(decide(&removing, 1_000), all, "nobody holds it");
        let rest = Decision::Rest(Some(Duration::from_secs(4)));
        let by_mixer = held(removing.clone(), Some("m"), None);
        let by_janus = held(removing.clone(), Some("dead"), Some("j"));
        for held in [by_mixer, by_janus] {
            assert_eq!(decide(&held, 2_000), rest, "{held:?}");
            assert_eq!(decide(&held, 6_000), all, "{held:?}");
        }
        assert_eq!(decide(&held(removing, Some("dead"), Some("dead")), 1_000), all);
    }

    #[test]
    fn of_a_room_that_is_gone_only_what_the_dead_left_is_removed() {
        let decide = |room: &Room| decide(room, 0, &World, &Rules::default());
        let left = held(Room::default(), Some("m"), Some("dead"));
        assert_eq!(decide(&left), Decision::Forget(vec![Kind::Janus]));
        let left = held(Room::default(), Some("m"), Some("j"));
        assert_eq!(decide(&left), Decision::Rest(None));
    }

    #[test]
    fn of_a_room_that_is_off_air_what_its_dead_mixer_said_is_removed_alone() {
        let decide = |room: &Room| decide(room, 0, &World, &Rules::default());
        for status in [Status::Created, Status::Stopped] {
            let room = room(status, None, Some("j"));
            let left = held(room.clone(), Some("dead"), Some("j"));
            assert_eq!(decide(&left), Decision::Clear(vec![Kind::Mixer]));
            let lives = held(room, Some("m"), Some("j"));
            assert!(matches!(decide(&lives), Decision::Rest(Some(_))), "it lets go by itself");
        }
        // On air, who gets it says so instead.
        let on_air = held(room(Status::OnAir, Some("dead"), Some("j")), Some("dead"), Some("j"));
        assert_eq!(decide(&on_air), Decision::Place(vec![Kind::Mixer]));
    }

    #[test]
    fn a_place_that_is_given_up_is_told_of_while_others_wait() {
        let on_air = |mixer| room(Status::OnAir, Some(mixer), Some("j"));
        let stopped = room(Status::Stopped, None, Some("j"));
        let waits = room(Status::OnAir, None, Some("j"));
        let removing = room(Status::Removing, Some("m"), Some("j"));
        let mut places = Places::default();
        for (id, room, waiting, told) in [
            ("a", Some(on_air("m")), false, false),
            ("a", Some(stopped.clone()), false, false), // nobody waits
            ("a", Some(on_air("m")), false, false),
            ("b", Some(waits), true, false),
            ("a", Some(on_air("m")), false, false),
            ("a", Some(stopped), false, true),
            ("a", Some(on_air("m")), false, false),
            ("a", Some(on_air("n")), false, true), // it has moved
            ("a", Some(removing), false, true),
            ("a", None, false, false),
            ("c", Some(on_air("m")), false, false),
            ("c", None, false, true),
            ("b", None, false, false), // it was the one that waited
            ("d", Some(on_air("m")), false, false),
            ("d", None, false, false),
        ] {
            assert_eq!(places.saw(id, room.as_ref(), waiting), told, "{id} {room:?}");
        }
    }

    #[test]
    fn loads_are_what_is_assigned_and_needed() {
        let rooms = [
            room(Status::OnAir, Some("m"), Some("j")),
            room(Status::OnAir, Some("m"), Some("k")),
            room(Status::Stopped, Some("m"), Some("j")),
            room(Status::Removing, Some("m"), Some("j")),
        ];
        assert_eq!(loads(&rooms, Kind::Mixer), BTreeMap::from([("m", 2)]));
        assert_eq!(loads(&rooms, Kind::Janus), BTreeMap::from([("j", 2), ("k", 1)]));
    }
}
