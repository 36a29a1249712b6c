//! Who is to have which shard.
//!
//! Each of n members is due `count / n`, and the remainder goes, one each, to those that have more than
//! that already, so that as little as possible moves. Who has more than is due lets go of the rest, whatever
//! others do; who has less takes its part of what is free. Members that see the same divide the free
//! shards without a word: each counts off the parts of those before it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// What one member is to do next.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Moves {
    pub(super) let_go: Vec<u16>,
    pub(super) take: Vec<u16>,
}

/// What `me`, one of the `members`, is to do, given who owns each shard. Of its own, those that it does
/// not hold for certain are taken again, or let go first.
pub(super) fn moves<'a>(
    me: &str,
    members: impl IntoIterator<Item = &'a str>,
    owners: &[Option<&str>],
    held: &BTreeSet<u16>,
) -> Moves {
    let mut owned: BTreeMap<&str, usize> = members.into_iter().map(|name| (name, 0)).collect();
    for owner in owners.iter().flatten() {
        owned.entry(owner).and_modify(|count| *count += 1);
    }
    let mut order: Vec<(&str, usize)> = owned.into_iter().collect();
    let (each, left) = (owners.len() / order.len().max(1), owners.len() % order.len().max(1));
    // Stable: among equals by name. Who has too much is as good as who has already let go of it, so that
    // it does not matter who is quicker.
    order.sort_by_key(|(_, count)| Reverse((*count).min(each + 1)));
    let due = |rank: usize| each + usize::from(rank < left);

    let Some(rank) = order.iter().position(|(name, _)| *name == me) else {
        return Moves::default();
    };
    let with = |owner: Option<&str>| {
        let shards = (0..).zip(owners).filter(move |(_, now)| **now == owner);
        shards.map(|(shard, _)| shard).collect::<Vec<u16>>()
    };
    let mut mine = with(Some(me));
    mine.sort_by_key(|shard| !held.contains(shard)); // stable: the lowest first
    let let_go = mine.split_off(due(rank).min(mine.len()));

    let parts = order.iter().enumerate().map(|(at, (_, count))| due(at).saturating_sub(*count));
    let before = parts.clone().take(rank).sum();
    let part = parts.clone().nth(rank).unwrap_or(0);
    let mut take: Vec<u16> = mine.into_iter().filter(|shard| !held.contains(shard)).collect();
    take.extend(with(None).into_iter().skip(before).take(part));
    Moves { let_go, take }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn as_told(owners: &str) -> Vec<Option<&str>> {
        owners.split(' ').map(|owner| Some(owner).filter(|owner| *owner != "-")).collect()
    }

    /// What each of the members does when all see the same and are certain of what they have.
    fn told(members: &str, owners: &str) -> String {
        let owners = as_told(owners);
        let tell = |me: &str| {
            let held = (0..).zip(&owners).filter(|(_, owner)| **owner == Some(me));
            let held = held.map(|(shard, _)| shard).collect();
            let Moves { let_go, take } = moves(me, members.split(' '), &owners, &held);
            let sign = |sign: char| move |shard: u16| format!(" {sign}{shard}");
            let all = let_go.into_iter().map(sign('-')).chain(take.into_iter().map(sign('+')));
            format!("{me}{}", all.collect::<String>())
        };
        members.split(' ').map(tell).collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn what_is_free_is_divided_and_what_is_too_much_is_let_go() {
        for (members, owners, expected) in [
            ("a", "- - - -", "a +0 +1 +2 +3"),
            ("a b", "- - - -", "a +0 +1, b +2 +3"),
            ("a b", "- - - - -", "a +0 +1 +2, b +3 +4"),
            ("a b", "a a a a", "a -2 -3, b"),
            ("a b", "a a - -", "a, b +2 +3"),
            ("a b c", "c c c b", "a, b, c -2"),
            ("a b c", "c c - b", "a +2, b, c"),
            ("a b", "x x - -", "a +2 +3, b"), // x is on its way out, and not a member any more
            ("a b", "b b b a a", "a, b"),     // who has more keeps the one that is left over
            ("a b c", "a a a b b b b", "a, b -5 -6, c"), // whether a had more before or not
            ("a b c", "b", "a, b, c"),        // fewer shards than members
            ("a b c", "-", "a +0, b, c"),
        ] {
            assert_eq!(told(members, owners), expected, "{members}: {owners}");
        }
    }

    #[test]
    fn what_is_ours_but_not_for_certain_is_taken_again_or_let_go_first() {
        let owners = as_told("a a a a");
        let held = BTreeSet::from([2, 3]);
        let alone = moves("a", ["a"], &owners, &held);
        assert_eq!(alone, Moves { let_go: vec![], take: vec![0, 1] });
        let shared = moves("a", ["a", "b"], &owners, &held);
        assert_eq!(shared, Moves { let_go: vec![0, 1], take: vec![] });
        assert_eq!(moves("x", ["a", "b"], &owners, &held), Moves::default(), "not a member");
    }
}
