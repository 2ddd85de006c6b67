//! Companions: versions of several models that are published as one. (C2)
//!
//! Each version names its companions in its announcement. A committed version stays staged until,
//! for each companion whose model this worker subscribes to, the companion or a newer version of
//! its model is committed, too. Then all become ready at once, and the user applies them at once.

use crate::follower::Follower;
use crate::staging::StagedVersion;
use crate::transfer::Key;
use std::collections::BTreeMap;

/// The models of a worker, whose committed versions may wait for companions.
pub struct Companions<'a> {
    followers: &'a mut [(Follower, u64)],
}

impl Companions<'_> {
    /// Returns the models of a worker, or `None` if no committed version waits for companions.
    pub fn awaited(followers: &mut [(Follower, u64)]) -> Option<Companions<'_>> {
        let awaited = followers.iter().any(|(follower, _)| follower.awaiting_companions().is_some());
        awaited.then_some(Companions { followers })
    }

    /// Makes ready each committed version whose companions are committed, too. Returns these versions.
    pub fn complete(self) -> Vec<StagedVersion> {
        let waiting = |(follower, _): &(Follower, u64)| {
            Some((follower.model().to_owned(), follower.awaiting_companions()?.0))
        };
        let mut found: BTreeMap<String, Key> = self.followers.iter().filter_map(waiting).collect();
        loop {
            let lacks = |(follower, _): &&(Follower, u64)| {
                found.contains_key(follower.model()) && self.lacks(follower, &found)
            };
            let lacking: Vec<&str> =
                self.followers.iter().filter(lacks).map(|(follower, _)| follower.model()).collect();
            if lacking.is_empty() {
                break;
            }
            found.retain(|model, _| !lacking.contains(&&model[..]));
        }
        let complete = |follower: &Follower| found.contains_key(follower.model());
        let ready = self.followers.iter_mut().filter(|(follower, _)| complete(follower));
        ready.filter_map(|(follower, _)| follower.release()).collect()
    }

    /// True if a model's committed version lacks a companion of a subscribed model: neither the
    /// companion nor a newer version is in `found`, ready or running.
    fn lacks(&self, follower: &Follower, found: &BTreeMap<String, Key>) -> bool {
        let (key, companions) = match follower.awaiting_companions() {
            Some(waiting) => waiting,
            None => return false,
        };
        companions.iter().any(|(model, &number)| {
            let subscribed = self.followers.iter().find(|(other, _)| other.model() == model);
            let companion = (key.0, number);
            let committed = found.get(model).map_or(false, |&other| other >= companion);
            subscribed.map_or(false, |(other, _)| !committed && !other.has_at_least(companion))
        })
    }
}
