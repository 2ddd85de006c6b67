//! The versions that patches may build on, and the patches on them.
//!
//! They are made by whoever publishes, before anybody hears of the version: there is one patch on a base, for all
//! that run it, and its bytes never change.

use super::content::Content;
use super::offer::{Offer, VersionPatch};
use super::publishing::WHOLE_BYTES_MAX;
use crate::delta::{encode, Patch, PatchError, Side};
use crate::messages::Running;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

const OFFER_SHARE: u32 = 2; // patches may take that part of the time: the version itself takes some, too

/// How a version goes to workers that take patches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Encoding {
    /// As it is.
    #[default]
    Raw,
    /// By what has changed since the version that they run, where the publisher still has that: in the fewest bytes.
    Delta,
    /// The same without classes of elements: more bytes, which take less time to make and to decode.
    DeltaFlat,
}

/// The versions of one model that patches may build on.
pub struct Bases {
    kept: VecDeque<Arc<Content>>, // the newest last
    count: usize,
    bytes_max: u64, // of all of them
}

impl Bases {
    pub fn new(count: usize, bytes_max: u64) -> Bases {
        Bases { kept: VecDeque::new(), count, bytes_max }
    }

    /// Offers a version, by patches too if that is wanted, and keeps it for patches to come (D1, D2).
    ///
    /// `takers` is what each of those runs who take patches; what is not `to_all` leaves what is kept for the others
    /// as it is. Patches that take too much of the time `until` then are left out.
    pub fn offer(
        &mut self,
        content: Arc<Content>,
        encoding: Encoding,
        takers: &[Option<Running>],
        to_all: bool,
        until: Instant,
    ) -> Offer {
        let nbytes = content.plan.nbytes;
        let whole = content.plan.count() <= 1 && nbytes <= WHOLE_BYTES_MAX;
        let unfit = whole || nbytes > self.bytes_max || self.count == 0;
        if encoding == Encoding::Raw || unfit || takers.is_empty() {
            if to_all {
                self.kept.clear();
            }
            return content.into();
        }
        if to_all {
            self.kept.retain(|base| alike(base, &content));
        }
        let mut offer = Offer { keep: true, ..content.clone().into() };
        let now = Instant::now();
        let deadline = now + until.saturating_duration_since(now) / OFFER_SHARE;
        for (running, base) in self.bases_of(&content, takers) {
            match made(&base, &running, &content, encoding, deadline) {
                Ok(bytes) if (bytes.len() as u64) < nbytes => {
                    offer.patches.push(VersionPatch::new(running, &content, bytes));
                }
                Ok(_) => {}
                Err(PatchError(text)) => {
                    offer.faults.push(format!("no patch on version {}: {}", running.version, text));
                }
            }
        }
        self.kept.push_back(content);
        while self.kept.len() > self.count || self.bytes() > self.bytes_max {
            self.kept.pop_front();
        }
        offer
    }

    fn bytes(&self) -> u64 {
        self.kept.iter().map(|base| base.plan.nbytes).sum()
    }

    /// On what patches are to be made: first on what most of those run who take them.
    fn bases_of(&self, content: &Content, takers: &[Option<Running>]) -> Vec<(Running, Arc<Content>)> {
        let mut runs: Vec<(&Running, usize)> = Vec::new();
        for running in takers.iter().flatten() {
            match runs.iter_mut().find(|(known, _)| *known == running) {
                Some((_, count)) => *count += 1,
                None => runs.push((running, 1)),
            }
        }
        runs.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
        let base = |running: &Running| {
            self.kept.iter().find(|base| base.digest == running.digest && alike(base, content)).cloned()
        };
        let mut found: Vec<(Running, Arc<Content>)> = Vec::new();
        for (running, _) in runs {
            // A patch is named, and sealed, by number: one on each. (E3)
            let named =
                |(known, _): &(Running, _)| (known.epoch, known.version) == (running.epoch, running.version);
            if let (false, Some(base)) = (found.iter().any(named), base(running)) {
                found.push((running.clone(), base));
            }
        }
        found.truncate(self.count);
        found
    }
}

/// Whether there may be a patch from one to the other: its digests need one size of chunks.
fn alike(one: &Content, other: &Content) -> bool {
    one.header.layout.id == other.header.layout.id && one.plan.chunk_bytes == other.plan.chunk_bytes
}

/// The patch from one version to another, decoded and compared.
fn made(
    base: &Content,
    running: &Running,
    target: &Content,
    encoding: Encoding,
    deadline: Instant,
) -> Result<Vec<u8>, PatchError> {
    let layout = &target.header.layout;
    let old = Side { data: base.bytes(), digest: &running.digest };
    let new = Side { data: target.bytes(), digest: &target.digest };
    let classes = encoding == Encoding::Delta;
    let wanted = || Instant::now() < deadline;
    let patch = encode(layout, target.plan.chunk_bytes, old, new, classes, &wanted)?;
    Patch::parse(layout, &patch)?.compare(old.data, new.data, &wanted)?;
    Ok(patch)
}

#[cfg(test)]
mod tests {
    use super::super::content::{Copier, TensorView};
    use super::*;
    use crate::dtype::Dtype;
    use std::time::Duration;

    const ELEMENTS: u64 = 1 << 18; // more than goes along with an announcement

    /// A version of which one element is of that value, and the others are what they are.
    fn version(value: u16) -> Arc<Content> {
        let mut bytes: Vec<u8> = (0..2 * ELEMENTS).map(|at| at as u8).collect();
        bytes[..2].copy_from_slice(&value.to_le_bytes());
        let tensor = TensorView { name: "w", dtype: Dtype::BF16, shape: &[ELEMENTS], bytes: &bytes };
        Arc::new(Copier::default().copy(&[tensor], 1 << 20).unwrap())
    }

    fn runs(number: u64, content: &Content) -> Option<Running> {
        Some(Running { epoch: 1, version: number, digest: content.digest.clone() })
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn a_patch_builds_on_what_most_workers_run_and_leads_to_the_version() {
        let (first, second, third) = (version(1), version(2), version(3));
        let mut bases = Bases::new(2, u64::MAX);
        let offer = bases.offer(first.clone(), Encoding::Delta, &[None], true, soon());
        assert!(offer.keep && offer.patches.is_empty());
        bases.offer(second.clone(), Encoding::Delta, &[None], true, soon());
        let takers = [runs(1, &first), runs(2, &second), None, runs(2, &second)];
        for encoding in [Encoding::Delta, Encoding::DeltaFlat] {
            let mut bases = Bases { kept: bases.kept.clone(), ..bases };
            let offer = bases.offer(third.clone(), encoding, &takers, true, soon());
            let on: Vec<u64> = offer.patches.iter().map(|patch| patch.id.version).collect();
            assert_eq!(on, [2, 1]);
            let mut data = second.bytes().to_vec();
            let patch = &offer.patches[0].content;
            Patch::parse(&third.header.layout, patch.bytes()).unwrap().apply(&mut data, None).unwrap();
            assert!(data == third.bytes());
            assert!(patch.plan.nbytes < 200 && offer.faults.is_empty());
        }
    }

    #[test]
    fn there_is_one_patch_on_each_name_whatever_workers_say_that_they_run() {
        let (first, second, third) = (version(1), version(2), version(3));
        let mut bases = Bases::new(2, u64::MAX);
        bases.offer(first.clone(), Encoding::Delta, &[None], true, soon());
        bases.offer(second.clone(), Encoding::Delta, &[None], true, soon());
        let takers = [runs(2, &first), runs(2, &second), runs(2, &second)];
        let offer = bases.offer(third, Encoding::Delta, &takers, true, soon());
        let on: Vec<String> = offer.patches.iter().map(|patch| patch.offered().digest).collect();
        assert!(on.len() == 1 && on[0] == second.digest);
    }

    #[test]
    fn what_is_kept_is_bounded_by_versions_and_by_bytes() {
        let versions: Vec<Arc<Content>> = (0..5).map(version).collect();
        for (mut bases, most) in [(Bases::new(3, u64::MAX), 3), (Bases::new(8, 4 * ELEMENTS + 1), 2)] {
            for (at, content) in versions.iter().enumerate() {
                bases.offer(content.clone(), Encoding::Delta, &[None], true, soon());
                assert_eq!(bases.kept.len(), most.min(at + 1));
            }
        }
        let mut bases = Bases::new(3, 2 * ELEMENTS - 1); // less than one
        assert!(!bases.offer(versions[0].clone(), Encoding::Delta, &[None], true, soon()).keep);
    }

    #[test]
    fn nothing_is_kept_where_nobody_takes_patches_or_none_are_wanted() {
        let (first, second) = (version(1), version(2));
        let takers = [runs(1, &first)];
        let mut bases = Bases::new(2, u64::MAX);
        bases.offer(first.clone(), Encoding::Delta, &takers, true, soon());
        let offer = bases.offer(second.clone(), Encoding::Raw, &takers, false, soon()); // for some
        assert!(!offer.keep && bases.kept.len() == 1);
        bases.offer(second.clone(), Encoding::Delta, &[], true, soon());
        assert!(bases.kept.is_empty());
        bases.offer(first.clone(), Encoding::Delta, &takers, true, soon());
        bases.offer(second, Encoding::Raw, &takers, true, soon());
        assert!(bases.kept.is_empty());
    }

    #[test]
    fn a_patch_that_takes_too_long_is_none() {
        let (first, second) = (version(1), version(2));
        let takers = [runs(1, &first)];
        let mut bases = Bases::new(2, u64::MAX);
        bases.offer(first, Encoding::Delta, &takers, true, soon());
        let offer = bases.offer(second, Encoding::Delta, &takers, true, Instant::now());
        assert!(offer.keep && offer.patches.is_empty() && offer.faults.len() == 1);
    }
}
