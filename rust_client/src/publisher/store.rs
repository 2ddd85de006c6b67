//! Keeps a publisher's versions in memory: the latest of each model, and others that are still in use (P9).
//!
//! A version is kept while it is the latest for some worker, waits for its commit, or is being received by
//! a worker. If a model has more than `VERSIONS_MAX`, the least needed versions are dropped, so that
//! memory is bounded whatever workers do.

use super::content::Content;
use super::offer::{Offer, VersionPatch};
use super::phases::{StateMachine, VersionEvent, VersionPhase, VERSIONS};
use crate::limits::EPOCHS_KEPT;
use crate::messages::{PatchId, Running};
use crate::transfer::{ChunkPlan, Key};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The most versions of one model in memory: the latest, one that waits for its commit or is for
/// named workers, and one that slow workers still receive.
pub const VERSIONS_MAX: usize = 3;
// If there are too many versions, versions in these phases are dropped, in this order.
const EVICTION_ORDER: [VersionPhase; 2] = [VersionPhase::Old, VersionPhase::Targeted];
const DIGESTS_KEPT: usize = 1000; // of dropped versions, to check late reports

/// A version in memory.
pub struct Version {
    pub phase: StateMachine<VersionPhase, VersionEvent>,
    pub content: Arc<Content>,
    /// The (epoch, version) pairs under which the same bytes were published before.
    pub names: BTreeSet<Key>,
    /// True if later patches may build on this one.
    pub keep: bool,
    /// Patches whose result is this version.
    pub patches: Vec<VersionPatch>,
    /// The workers that reported why they fetch the whole version although there are patches.
    pub unpatched: BTreeSet<String>,
    pub number: u64,
    /// The workers that the version is for; `None` for all.
    pub only: Option<Vec<String>>,
    /// The workers that still receive the version, which is kept for them.
    pub receivers: BTreeSet<String>,
    /// Checksums of tensors, which were computed for observers, by the offsets of the tensors.
    pub sums: BTreeMap<u64, u32>,
}

impl Version {
    /// Records that a worker begins to receive the version.
    pub fn add_receiver(&mut self, worker: &str) {
        self.receivers.insert(worker.to_owned());
    }

    /// Records the workers that the version is only for.
    pub fn restrict(&mut self, workers: &[String]) {
        self.only = Some(workers.to_vec());
    }

    /// Records that a worker reported why it uses no patch. Returns true for the worker's first report.
    pub fn note_unpatched(&mut self, worker: &str) -> bool {
        self.unpatched.insert(worker.to_owned())
    }

    /// True if a running version has the bytes of this version under an earlier (epoch, version) (P21).
    pub fn is_known_as(&self, running: &Running) -> bool {
        if running.digest.is_empty() || self.names.is_empty() {
            return self.names.contains(&(running.epoch, running.version));
        }
        running.digest == self.content.digest
    }

    /// Returns the chunks of this patch, or of the whole version if `patch` is `None`. Returns `None` if the
    /// version has no such patch.
    pub fn plan_of(&self, patch: Option<&PatchId>) -> Option<ChunkPlan> {
        match patch {
            None => Some(self.content.plan),
            Some(id) => self.patches.iter().find(|its| its.id == *id).map(|its| its.content.plan),
        }
    }

    /// Returns the number of chunks of this patch; of the whole version if it has no such patch.
    pub fn chunks_of(&self, patch: Option<&PatchId>) -> u64 {
        let patch = self.patches.iter().find(|its| Some(&its.id) == patch);
        patch.map_or(&self.content, |patch| &patch.content).plan.count()
    }
}

/// The versions of one model.
pub struct Versions {
    announced_layout: String,        // id of the layout of the last broadcast
    targeted: BTreeMap<String, u64>, // by worker, the newest version published to the worker by name
    by_number: BTreeMap<u64, Version>,
    digests: BTreeMap<u64, String>, // of dropped versions
    first: u64,                     // lowest number in this epoch
    count: u64,                     // highest number so far
}

impl Default for Versions {
    fn default() -> Versions {
        Versions {
            announced_layout: String::new(),
            targeted: BTreeMap::new(),
            by_number: BTreeMap::new(),
            digests: BTreeMap::new(),
            first: 1,
            count: 0,
        }
    }
}

impl Versions {
    /// Adds a version, and returns its number.
    pub fn add(&mut self, offer: impl Into<Offer>) -> u64 {
        let Offer { content, keep, patches, .. } = offer.into();
        self.count += 1; // P1
        let (unpatched, number, receivers) = (BTreeSet::new(), self.count, BTreeSet::new());
        let (phase, names, sums) = (StateMachine::new(VERSIONS), BTreeSet::new(), BTreeMap::new());
        let version =
            Version { phase, content, names, keep, patches, unpatched, number, only: None, receivers, sums };
        self.by_number.insert(number, version);
        number
    }

    /// Adds content that was published before under these (epoch, version) pairs. Returns its number here.
    pub fn restore(&mut self, content: Arc<Content>, names: BTreeSet<Key>) -> u64 {
        let number = self.add(content);
        if let Some(version) = self.by_number.get_mut(&number) {
            version.names = names;
        }
        number
    }

    /// True if a worker may run this version without reporting a digest: the version is no longer in memory,
    /// or it was published in an earlier epoch, in which the worker may have read it from shared memory
    /// (P12).
    pub fn may_lack_digest(&self, number: u64) -> bool {
        self.was_published(number) && self.get(number).map_or(true, |version| !version.names.is_empty())
    }

    /// Begins a new epoch, in which no worker has a version yet. `before` is the previous epoch.
    pub fn renew(&mut self, before: u64) {
        for version in self.by_number.values_mut() {
            version.receivers.clear();
            version.patches.clear(); // whose bases are of the previous epoch (D2)
        }
        self.prune();
        self.digests.clear();
        for version in self.by_number.values_mut() {
            version.names.insert((before, version.number));
            if version.names.len() > EPOCHS_KEPT {
                let oldest = version.names.iter().next().copied();
                oldest.map(|oldest| version.names.remove(&oldest));
            }
        }
        self.first = self.by_number.keys().next().copied().unwrap_or(self.count + 1);
    }

    pub fn get(&self, number: u64) -> Option<&Version> {
        self.by_number.get(&number)
    }

    pub fn get_mut(&mut self, number: u64) -> Option<&mut Version> {
        self.by_number.get_mut(&number)
    }

    /// Records the id of a layout that is broadcast. Returns true if the previous broadcast had the
    /// same layout.
    pub fn note_announced_layout(&mut self, layout: &str) -> bool {
        let known = self.announced_layout == layout;
        self.announced_layout = layout.to_owned();
        known
    }

    /// Returns the number of the latest committed version for all workers.
    pub fn latest(&self) -> Option<u64> {
        self.newest(VersionPhase::Latest)
    }

    /// Returns the number of the version that waits for its commit.
    pub fn pending(&self) -> Option<u64> {
        self.newest(VersionPhase::Pending)
    }

    fn newest(&self, phase: VersionPhase) -> Option<u64> {
        self.by_number.values().rev().find(|version| version.phase.is(phase)).map(|version| version.number)
    }

    /// Returns the number of the newest version that is committed for a worker.
    pub fn latest_for(&self, worker: &str) -> Option<u64> {
        self.latest().max(self.targeted.get(worker).copied())
    }

    /// Returns, by worker, the number of the newest version that was published to the worker by name. Leaves
    /// out versions older than the latest for all.
    pub fn targeted(&self) -> &BTreeMap<String, u64> {
        &self.targeted
    }

    /// Returns the committed and the pending versions for named workers, oldest first.
    pub fn for_named_workers(&self) -> impl Iterator<Item = &Version> {
        let is_for_named = |its: &Version| {
            its.phase.is(VersionPhase::Targeted) || its.phase.is(VersionPhase::Pending) && its.only.is_some()
        };
        self.by_number.values().filter(move |version| is_for_named(version))
    }

    /// True if any version was published or restored.
    pub fn any_published(&self) -> bool {
        self.count > 0
    }

    /// True if this epoch has or had a version of this number.
    pub fn was_published(&self, number: u64) -> bool {
        (self.first..=self.count).contains(&number)
    }

    /// Returns the digest of a version. Returns `None` if there never was such a version in this epoch, and
    /// an empty text if its digest is no longer known.
    pub fn known_digest(&self, number: u64) -> Option<&str> {
        if !self.was_published(number) {
            return None;
        }
        let here = self.by_number.get(&number).map(|version| version.content.digest.as_str());
        Some(here.or_else(|| self.digests.get(&number).map(String::as_str)).unwrap_or_default())
    }

    /// Commits a version for these workers, or for all if `None`. The version must be newer than all
    /// committed versions.
    pub fn commit(&mut self, number: u64, workers: Option<&[String]>) {
        match workers {
            None => self.targeted.clear(),
            Some(workers) => self.targeted.extend(workers.iter().map(|worker| (worker.clone(), number))),
        }
        for version in self.by_number.values_mut().filter(|version| version.number != number) {
            let latest = workers.is_some() && version.phase.is(VersionPhase::Latest);
            if !latest && !self.targeted.values().any(|&targeted| targeted == version.number) {
                version.phase.apply_event(VersionEvent::Newer);
            }
        }
        self.apply_event(number, workers.map_or(VersionEvent::ForAll, |_| VersionEvent::ForSome));
    }

    /// Applies an event to a version. If the version is then `Gone`, drops the version, and keeps its digest
    /// for a while.
    pub fn apply_event(&mut self, number: u64, event: VersionEvent) {
        let gone =
            |version: &mut Version| version.phase.apply_event(event) && version.phase.is(VersionPhase::Gone);
        if !self.by_number.get_mut(&number).map_or(false, gone) {
            return;
        }
        if let Some(version) = self.by_number.remove(&number) {
            self.digests.insert(number, version.content.digest.clone());
        }
        if self.digests.len() > DIGESTS_KEPT {
            let oldest = self.digests.keys().next().copied();
            oldest.map(|oldest| self.digests.remove(&oldest));
        }
        self.targeted.retain(|_, targeted| *targeted != number);
    }

    /// Records that a worker no longer receives versions below this number.
    pub fn end_receiving(&mut self, worker: &str, below: u64) {
        for (_, version) in self.by_number.range_mut(..below) {
            version.receivers.remove(worker);
        }
    }

    /// Records that a worker receives at most the version of this number; with 0, no version.
    pub fn keep_receiving_only(&mut self, worker: &str, number: u64) {
        for version in self.by_number.values_mut().filter(|version| version.number != number) {
            version.receivers.remove(worker);
        }
    }

    /// Records that a worker, which is gone, receives no version any more.
    pub fn forget_worker(&mut self, worker: &str) {
        self.keep_receiving_only(worker, 0);
    }

    /// Drops versions that no worker needs. If there are still too many, drops the least needed.
    pub fn prune(&mut self) {
        let idle = |version: &&Version| version.receivers.is_empty() && version.phase.is(VersionPhase::Old);
        let idle: Vec<u64> = self.by_number.values().filter(idle).map(|version| version.number).collect();
        for number in idle {
            self.apply_event(number, VersionEvent::NoReaders);
        }
        while self.by_number.len() > VERSIONS_MAX {
            let oldest = |&phase| self.by_number.values().find(|version| version.phase.is(phase));
            match EVICTION_ORDER.iter().find_map(oldest).map(|version| version.number) {
                Some(number) => self.apply_event(number, VersionEvent::Evicted),
                None => return,
            }
        }
    }
}

/// The versions of all models.
pub struct Store {
    pub epoch: u64,
    pub models: BTreeMap<String, Versions>,
}

impl Store {
    pub fn new(epoch: u64) -> Store {
        Store { epoch, models: BTreeMap::new() }
    }

    /// Returns the versions of a model. Adds the model if it is new.
    pub fn versions(&mut self, model: &str) -> &mut Versions {
        self.models.entry(model.to_owned()).or_default()
    }

    /// Returns the versions of a model; `None` if the model is new.
    pub fn find(&mut self, model: &str) -> Option<&mut Versions> {
        self.models.get_mut(model)
    }

    /// Begins a new epoch, in which no worker has a version yet. Returns the previous epoch.
    pub fn renew(&mut self, epoch: u64) -> u64 {
        let before = std::mem::replace(&mut self.epoch, epoch);
        self.models.values_mut().for_each(|versions| versions.renew(before));
        before
    }

    /// Returns the versions of a model, if `epoch` is the current one.
    pub fn in_epoch(&mut self, model: &str, epoch: u64) -> Option<&mut Versions> {
        self.models.get_mut(model).filter(|_| epoch == self.epoch)
    }

    /// Returns, by model, the number of the newest version for a worker.
    pub fn latest_by_model<'a>(
        &self,
        worker: &str,
        models: impl Iterator<Item = &'a String>,
    ) -> BTreeMap<String, u64> {
        let found = |model: &String| Some((model.clone(), self.models.get(model)?.latest_for(worker)?));
        models.filter_map(found).collect()
    }

    pub fn prune(&mut self) {
        for versions in self.models.values_mut() {
            versions.prune();
        }
    }

    /// Returns the (epoch, number) of a version of this epoch.
    pub fn key(&self, number: u64) -> Key {
        (self.epoch, number)
    }
}

#[cfg(test)]
mod tests {
    use super::super::content::Copier;
    use super::*;

    fn content() -> Arc<Content> {
        Arc::new(Copier::default().copy(&[], 1).unwrap())
    }

    #[test]
    fn memory_is_bounded_whatever_workers_do() {
        let mut versions = Versions::default();
        for at in 0..20u64 {
            let number = versions.add(content());
            versions.commit(number, Some(&[format!("w{}", at)])); // one worker each
            versions.get_mut(number).unwrap().receivers.insert("slow".to_owned());
            versions.prune();
            assert!(versions.by_number.len() <= VERSIONS_MAX);
            assert!(versions.get(number).is_some());
        }
        let number = versions.add(content());
        versions.commit(number, None);
        versions.get_mut(number).unwrap().receivers.insert("slow".to_owned());
        let pending = versions.add(content());
        for _ in 0..5 {
            let number = versions.add(content());
            versions.commit(number, Some(&["w".to_owned()]));
            versions.prune();
        }
        assert_eq!(versions.latest(), Some(number));
        assert!(versions.get(pending).is_some());
    }

    #[test]
    fn a_digest_is_remembered_for_a_while() {
        let mut versions = Versions::default();
        for _ in 0..DIGESTS_KEPT + 2 {
            let number = versions.add(content());
            versions.commit(number, None);
            versions.prune();
        }
        assert_eq!(versions.known_digest(1), Some(""));
        assert_eq!(versions.known_digest(2).map(str::len), Some(64));
        assert_eq!(versions.known_digest(DIGESTS_KEPT as u64 + 3), None);
        versions.renew(1);
        assert_eq!(versions.known_digest(2), None);
        assert!(versions.was_published(DIGESTS_KEPT as u64 + 2));
    }
}
