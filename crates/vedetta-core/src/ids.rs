use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash};

use hashbrown::{DefaultHashBuilder, HashTable};

use crate::Slot;

/// Gives each key a small number, and the number of a key that is gone to another.
pub struct Ids<K> {
    hasher: DefaultHashBuilder,
    slots: HashTable<u32>,
    keys: Vec<Option<K>>,
    free: Vec<u32>,
}

impl<K: Hash + Eq> Default for Ids<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: Hash + Eq> Ids<K> {
    /// No key is known.
    pub fn new() -> Self {
        Self {
            hasher: DefaultHashBuilder::default(),
            slots: HashTable::new(),
            keys: Vec::new(),
            free: Vec::new(),
        }
    }

    /// The number of a key, a new one if need be.
    ///
    /// # Panics
    ///
    /// With more than four billion keys.
    pub fn intern(&mut self, key: K) -> Slot {
        let Self { hasher, slots, keys, free } = self;
        let of = |slot: &u32| keys[*slot as usize].as_ref();
        let hash = hasher.hash_one(&key);
        if let Some(slot) = slots.find(hash, |slot| of(slot) == Some(&key)) {
            return Slot(*slot);
        }
        let slot = free.pop().unwrap_or_else(|| {
            keys.push(None);
            u32::try_from(keys.len() - 1).expect("fewer than four billion keys")
        });
        keys[slot as usize] = Some(key);
        let rehash =
            |slot: &u32| keys[*slot as usize].as_ref().map_or(0, |key| hasher.hash_one(key));
        slots.insert_unique(hash, slot, rehash);
        Slot(slot)
    }

    /// The number of a key that has one.
    pub fn find<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<Slot>
    where
        K: Borrow<Q>,
    {
        let is = |slot: &u32| self.keys[*slot as usize].as_ref().is_some_and(|k| k.borrow() == key);
        self.slots.find(self.hasher.hash_one(key), is).map(|slot| Slot(*slot))
    }

    /// The key of a number.
    pub fn key(&self, slot: Slot) -> Option<&K> {
        self.keys.get(slot.0 as usize)?.as_ref()
    }

    /// Forgets a key; its number goes to the next new one.
    pub fn release(&mut self, slot: Slot) -> Option<K> {
        let key = self.keys.get_mut(slot.0 as usize)?.take()?;
        let hash = self.hasher.hash_one(&key);
        if let Ok(entry) = self.slots.find_entry(hash, |other| *other == slot.0) {
            entry.remove();
        }
        self.free.push(slot.0);
        Some(key)
    }

    /// Forgets the keys that `keep` does not want.
    pub fn retain(&mut self, keep: impl Fn(Slot) -> bool) {
        let Self { slots, keys, free, .. } = self;
        slots.retain(|slot| {
            let keeps = keep(Slot(*slot));
            if !keeps {
                keys[*slot as usize] = None;
                free.push(*slot);
            }
            keeps
        });
    }

    /// The keys with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (Slot, &K)> {
        let slots = self.slots.iter().map(|slot| Slot(*slot));
        slots.filter_map(|slot| Some((slot, self.key(slot)?)))
    }

    /// How many keys are known.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether no key is known.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::collection::{btree_set, vec};
    use proptest::prelude::*;
    use proptest::test_runner::{Config, TestRunner};

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Intern(u8),
        Release(u8),
        ReleaseSlot(u32),
        Keep(BTreeSet<u8>),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            12 => (0..40_u8).prop_map(Step::Intern),
            6 => (0..40_u8).prop_map(Step::Release),
            1 => (0..50_u32).prop_map(Step::ReleaseSlot),
            1 => btree_set(0..40_u8, 0..40).prop_map(Step::Keep),
        ]
    }

    #[test]
    fn a_key_keeps_its_number_until_it_is_forgotten_and_numbers_stay_small() {
        let config = Config { failure_persistence: None, ..Config::default() };
        let lives = TestRunner::new(config).run(&vec(step(), 1..200), |steps| {
            let (mut ids, mut model) = (Ids::new(), BTreeMap::<String, Slot>::new());
            let mut most = 0;
            for step in steps {
                match step {
                    Step::Intern(key) => {
                        let slot = ids.intern(key.to_string());
                        let known = model.insert(key.to_string(), slot);
                        assert!(known.is_none_or(|known| known == slot));
                    }
                    Step::Release(key) => {
                        let key = key.to_string();
                        if let Some(slot) = model.remove(&key) {
                            assert_eq!(ids.release(slot), Some(key));
                            assert_eq!(ids.release(slot), None);
                        }
                    }
                    Step::ReleaseSlot(slot) => {
                        let released = ids.release(Slot(slot));
                        let known = model.iter().find(|(_, known)| known.0 == slot);
                        assert_eq!(released.as_ref(), known.map(|(key, _)| key));
                        model.retain(|_, known| known.0 != slot);
                    }
                    Step::Keep(keys) => {
                        model.retain(|key, _| keys.contains(&key.parse().unwrap()));
                        ids.retain(|slot| model.values().any(|kept| *kept == slot));
                    }
                }
                most = most.max(model.len());
                let mut known: Vec<_> = ids.iter().map(|(slot, key)| (key.clone(), slot)).collect();
                known.sort();
                assert_eq!(known, Vec::from_iter(model.clone()));
                assert_eq!((ids.len(), ids.is_empty()), (model.len(), model.is_empty()));
                for key in (0..40_u8).map(|key| key.to_string()) {
                    assert_eq!(ids.find(key.as_str()), model.get(&key).copied());
                }
                for (key, slot) in &model {
                    assert_eq!(ids.key(*slot), Some(key));
                    assert!((slot.0 as usize) < most, "forgotten numbers are given again");
                }
            }
            Ok(())
        });
        if let Err(why) = lives {
            panic!("{why}");
        }
    }
}
