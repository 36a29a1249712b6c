//! Which forwarders a room should have: one, to its mixer. Code without effects.

use crate::bridge::Forwarder;
use crate::model::{MixerAt, is_of_room};

/// Something to be done about them, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Send to the mixer.
    Add,
    /// No longer send what this one sends.
    Stop(u64),
}

/// What makes `there` as it should be. The new one is begun before the old one is ended, so that nothing is
/// missed; but never do two send to one port, which would be noise. What others have a room send elsewhere is
/// not touched.
pub fn plan(room: &str, there: &[Forwarder], wanted: Option<&MixerAt>) -> Vec<Step> {
    let is_there = |forwarder: &&Forwarder, at: &MixerAt| {
        forwarder.port == at.port && forwarder.ip == at.host.to_string()
    };
    let fits = |forwarder: &&Forwarder, at: &MixerAt| {
        is_there(forwarder, at) && forwarder.ssrc == at.ssrc && forwarder.always_on
    };
    let kept = wanted.and_then(|at| there.iter().find(|forwarder| fits(forwarder, at)));
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for forwarder in there.iter().filter(|forwarder| !kept.is_some_and(|kept| kept == *forwarder)) {
        let stop = Step::Stop(forwarder.stream_id);
        if wanted.is_some_and(|at| is_there(&forwarder, at)) {
            before.push(stop);
        } else if is_of_room(forwarder.ssrc, room) {
            after.push(stop);
        }
    }
    if wanted.is_some() && kept.is_none() {
        before.push(Step::Add);
    }
    before.extend(after);
    before
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::model::ssrc;

    fn at(port: u16, generation: u64) -> MixerAt {
        let (host, ssrc) = (Ipv4Addr::LOCALHOST, ssrc("r", generation));
        MixerAt { mixer_id: "m".into(), host, port, ssrc, generation, run: String::new() }
    }

    fn to(stream_id: u64, port: u16, generation: u64) -> Forwarder {
        let (ip, ssrc) = ("127.0.0.1".to_owned(), ssrc("r", generation));
        Forwarder { stream_id, ip, port, ssrc, always_on: true }
    }

    #[test]
    fn a_room_ends_with_one_forwarder_to_its_mixer() {
        use Step::{Add, Stop};
        let foreign = Forwarder { ssrc: 7, ..to(9, 5004, 1) };
        let sleepy = Forwarder { always_on: false, ..to(1, 42000, 1) };
        let there = |all: &[&Forwarder]| all.iter().map(|f| (*f).clone()).collect::<Vec<_>>();
        let (old, new) = (to(1, 42000, 1), to(2, 42002, 1));
        for (there, wanted, steps) in [
            (there(&[]), None, vec![]),
            (there(&[]), Some(at(42000, 1)), vec![Add]),
            (there(&[&old]), Some(at(42000, 1)), vec![]),
            (there(&[&old]), None, vec![Stop(1)]),
            // A move: begun anew, then ended.
            (there(&[&old]), Some(at(42002, 1)), vec![Add, Stop(1)]),
            (there(&[&old, &new]), Some(at(42002, 1)), vec![Stop(1)]),
            // The same port for another assignment: never two at once.
            (there(&[&old]), Some(at(42000, 2)), vec![Stop(1), Add]),
            (there(&[&sleepy]), Some(at(42000, 1)), vec![Stop(1), Add]),
            // Twice the same.
            (there(&[&old, &to(3, 42000, 1)]), Some(at(42000, 1)), vec![Stop(3)]),
            // What others want is theirs, unless it is in our way.
            (there(&[&foreign]), None, vec![]),
            (there(&[&foreign, &old]), Some(at(42000, 1)), vec![]),
            (there(&[&foreign]), Some(at(5004, 1)), vec![Stop(9), Add]),
        ] {
            assert_eq!(plan("r", &there, wanted.as_ref()), steps, "{there:?} {wanted:?}");
        }
    }
}
