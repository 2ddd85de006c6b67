//! Companions: versions of several models that are published as one. (C2)
//!
//! Each names the others in its announcement. It stays staged until it is committed, and so is each
//! of them that this worker wants, or a newer version of that model. Then they are ready at once,
//! and the user applies them at once.

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
        let awaited = followers.iter().any(|(follower, _)| follower.held().is_some());
        awaited.then_some(Companions { followers })
    }

    /// Makes every committed version ready whose companions are here. Returns these versions, which
    /// are to be applied at once.
    pub fn complete(self) -> Vec<StagedVersion> {
        let held =
            self.followers.iter().filter_map(|(follower, _)| Some((follower.model(), follower.held()?)));
        let mut found: BTreeMap<String, Key> =
            held.map(|(model, (key, _))| (model.to_owned(), key)).collect();
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

    /// True if a companion of the version that a model holds back is not here.
    fn lacks(&self, follower: &Follower, found: &BTreeMap<String, Key>) -> bool {
        let (key, companions) = match follower.held() {
            Some(held) => held,
            None => return false,
        };
        companions.iter().any(|(model, &number)| {
            let wanted = self.followers.iter().find(|(other, _)| other.model() == model);
            let companion = (key.0, number);
            let here = found.get(model).map_or(false, |&other| other >= companion);
            wanted.map_or(false, |(other, _)| !here && !other.offers(companion))
        })
    }
}
