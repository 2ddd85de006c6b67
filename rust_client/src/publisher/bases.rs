//! Keeps the versions that patches may build on, and makes the patches.
//!
//! The thread that calls publish makes the patches, before any worker learns of the version. All
//! workers that run the same base get the same patch. The bytes of a patch never change.

use super::content::{Content, Copier, TensorView};
use super::offer::{Offer, VersionPatch};
use crate::delta::worth::{chosen, estimate, may_pay, sample, Pair, Way};
use crate::delta::{encode, Patch, PatchError, Side};
use crate::limits::WHOLE_BYTES_MAX;
use crate::messages::Running;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

const PACE: f64 = 1e-8; // seconds per byte, assumed until encoding and decoding are measured
const PACE_SHARE: f64 = 0.5; // weight of the newest measurement in the average
const PACE_EVERY: u32 = 32; // decisions until a new sample is measured, which corrects the averages
const SAMPLE_CHUNK_BYTES: u64 = 1 << 20;
const OFFER_SHARE: u32 = 2; // patches may take this part, a half, of the timeout: delivery takes the rest

/// How a version is sent to workers that accept patches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Encoding {
    /// The whole version.
    #[default]
    Raw,
    /// A patch on the worker's running version, if the publisher still has that version. This sends
    /// the fewest bytes.
    Delta,
    /// A patch like `Delta`, but without classes of elements: more bytes, which are faster to encode
    /// and decode.
    DeltaFlat,
    /// A patch of one of these kinds, or the whole version. The publisher measures the speeds of
    /// links, encoding and decoding, and sends what is likely to arrive first.
    Auto,
}

/// A worker that accepts patches, with the speeds of its link and of its decoding.
#[derive(Clone, Debug)]
pub struct PatchCandidate {
    pub running: Option<Running>,
    /// Bytes per second of the worker's link; infinite if unknown.
    pub rate: f64,
    /// Seconds per byte of a patch's cost (see `VersionPatch::work`) to decode patches without
    /// classes, and patches with classes. `None` if the worker has reported no such time.
    pub decode: [Option<f64>; 2],
}

impl Default for PatchCandidate {
    /// Returns a candidate with nothing known about the worker.
    fn default() -> PatchCandidate {
        PatchCandidate { running: None, rate: f64::INFINITY, decode: [None; 2] }
    }
}

/// The versions of one model that patches may build on.
#[derive(Clone)]
pub struct Bases {
    kept: VecDeque<Arc<Content>>, // newest last
    count: usize,
    bytes_max: u64, // of all kept versions
    // Averages of recent seconds per byte: for patches without classes, and for patches with classes.
    encode: Pair,
    decode: Pair,
    decisions: u32, // number of choices between a patch and the whole version
}

impl Bases {
    pub fn new(count: usize, bytes_max: u64) -> Bases {
        let (encode, decode) = ([PACE; 2], [PACE; 2]);
        Bases { kept: VecDeque::new(), count, bytes_max, encode, decode, decisions: 0 }
    }

    /// Returns the offer of a version: the version, and patches whose result is this version if
    /// `encoding` allows patches. Keeps the version as a base of later patches (D1, D2).
    ///
    /// `patch_candidates` are the workers that accept patches. `to_all` is false if the version is
    /// published to named workers: then the bases stay, because other workers run them. Making patches
    /// may take half of the time before `until`; a patch that would take longer is left out.
    pub fn offer(
        &mut self,
        content: Arc<Content>,
        encoding: Encoding,
        patch_candidates: &[PatchCandidate],
        to_all: bool,
        until: Instant,
    ) -> Offer {
        let nbytes = content.plan.nbytes;
        let whole = content.plan.count() <= 1 && nbytes <= WHOLE_BYTES_MAX;
        let unfit = whole || nbytes > self.bytes_max || self.count == 0;
        if encoding == Encoding::Raw || unfit || patch_candidates.is_empty() {
            if to_all {
                self.kept.clear();
            }
            return content.into();
        }
        if to_all {
            self.kept.retain(|base| can_patch(base, &content));
        }
        let mut offer = Offer { keep: true, ..content.clone().into() };
        let now = Instant::now();
        let deadline = now + until.saturating_duration_since(now) / OFFER_SHARE;
        for (running, base) in self.bases_of(&content, patch_candidates) {
            let way = match encoding {
                Encoding::Auto => {
                    let candidates = patch_candidates
                        .iter()
                        .filter(|candidate| candidate.running.as_ref() == Some(&running));
                    self.choose_way(&base, &content, candidates, deadline)
                }
                _ => Some(Way { classes: encoding == Encoding::Delta, work: 0.0 }),
            };
            let way = match way {
                Some(way) => way,
                None => continue,
            };
            let started = Instant::now();
            match make_patch(&base, &running.digest, &content, way.classes, deadline) {
                Ok(bytes) => {
                    self.record_encode_time(way, nbytes, started.elapsed());
                    if (bytes.len() as u64) < nbytes {
                        offer.add_patch(VersionPatch::new(running, &content, bytes, way));
                    }
                }
                Err(PatchError(text)) => {
                    offer.record_fault(format!("no patch on version {}: {}", running.version, text));
                }
            }
        }
        self.kept.push_back(content);
        while self.kept.len() > self.count || self.bytes() > self.bytes_max {
            self.kept.pop_front();
        }
        offer
    }

    /// Records that a patch to a version of `nbytes` bytes took this long to make.
    fn record_encode_time(&mut self, way: Way, nbytes: u64, took: Duration) {
        let work = way.work * nbytes as f64;
        if work > 0.0 {
            let known = &mut self.encode[usize::from(way.classes)];
            *known += PACE_SHARE * (took.as_secs_f64() / work - *known);
        }
    }

    /// Returns how to make the patch on a base; `None` if the whole version is likely to arrive sooner.
    ///
    /// All workers that run the base get the same patch, and the publish waits longest for the
    /// slowest. So this is the best patch for the slowest of the workers that gain time by a patch. A
    /// worker with a link of unknown rate is assumed to need no patch. A worker that has not decoded a
    /// patch yet is assumed to decode as fast as this process.
    ///
    /// Every `PACE_EVERY` decisions, this process measures a sample, and all workers are assumed to
    /// decode as fast as this process. Otherwise one slow decode of a worker could exclude patches forever.
    fn choose_way<'a>(
        &mut self,
        base: &Content,
        content: &Content,
        patch_candidates: impl Iterator<Item = &'a PatchCandidate>,
        deadline: Instant,
    ) -> Option<Way> {
        let mut slow: Vec<&PatchCandidate> =
            patch_candidates.filter(|candidate| candidate.rate.is_finite()).collect();
        slow.sort_by(|one, other| one.rate.total_cmp(&other.rate));
        if slow.is_empty() {
            return None;
        }
        let measured_now = self.decisions % PACE_EVERY == 0;
        if measured_now {
            let _ = self.measure(base, content, deadline); // if this fails, the old values stay
        }
        self.decisions += 1;
        let decode = |candidate: &PatchCandidate| match measured_now {
            true => self.decode,
            false => [0, 1].map(|classes| candidate.decode[classes].unwrap_or(self.decode[classes])),
        };
        let links = slow.into_iter().map(|candidate| (candidate.rate, decode(candidate)));
        let links: Vec<(f64, Pair)> =
            links.filter(|&(rate, decode)| may_pay(rate, self.encode, decode)).collect();
        if links.is_empty() {
            return None;
        }
        let would = estimate(&content.header.layout, base.bytes(), content.bytes());
        let nbytes = content.plan.nbytes as f64;
        links.into_iter().find_map(|(rate, decode)| chosen(nbytes, &would, rate, self.encode, decode))
    }

    /// Measures the speeds of encoding and decoding with a sample of the version. While no patches are
    /// made, nothing else measures these speeds.
    fn measure(&mut self, base: &Content, content: &Content, deadline: Instant) -> Result<(), String> {
        let (dtype, span) = sample(&content.header.layout).ok_or("there is nothing to measure")?;
        let shape = [span.len() as u64 * 8 / dtype.bits()];
        let of = |its: &Content| {
            let bytes = &its.bytes()[span.clone()];
            Copier::default()
                .copy(&[TensorView { name: "sample", dtype, shape: &shape, bytes }], SAMPLE_CHUNK_BYTES)
        };
        let (before, after) = (of(base)?, of(content)?);
        let layout = &after.header.layout;
        let work = estimate(layout, before.bytes(), after.bytes()).work * layout.nbytes as f64;
        for classes in [false, true] {
            let started = Instant::now();
            let text = |PatchError(text)| text;
            let patch = make_patch(&before, &before.digest, &after, classes, deadline).map_err(text)?;
            let encoded = Instant::now();
            let mut data = before.bytes().to_vec();
            Patch::parse(layout, &patch).and_then(|its| its.apply(&mut data, None)).map_err(text)?;
            self.encode[usize::from(classes)] = (encoded - started).as_secs_f64() / work;
            self.decode[usize::from(classes)] = encoded.elapsed().as_secs_f64() / work;
        }
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.kept.iter().map(|base| base.plan.nbytes).sum()
    }

    /// Returns the running versions of workers that are bases of patches, with their contents. The
    /// base that most workers run comes first.
    fn bases_of(
        &self,
        content: &Content,
        patch_candidates: &[PatchCandidate],
    ) -> Vec<(Running, Arc<Content>)> {
        let mut runs: Vec<(&Running, usize)> = Vec::new();
        for running in patch_candidates.iter().filter_map(|candidate| candidate.running.as_ref()) {
            match runs.iter_mut().find(|(known, _)| *known == running) {
                Some((_, count)) => *count += 1,
                None => runs.push((running, 1)),
            }
        }
        runs.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
        let base = |running: &Running| {
            self.kept.iter().find(|base| base.digest == running.digest && can_patch(base, content)).cloned()
        };
        let mut found: Vec<(Running, Arc<Content>)> = Vec::new();
        for (running, _) in runs {
            // A patch is named and encrypted by the (epoch, version) of its base, so there is only one
            // patch for each such pair. (E3)
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

/// True if a patch from one version to the other is possible: both need the same layout and chunk size.
fn can_patch(one: &Content, other: &Content) -> bool {
    one.header.layout.id == other.header.layout.id && one.plan.chunk_bytes == other.plan.chunk_bytes
}

/// Returns the patch from `base` to `target`, after a check that the patch decodes to `target`.
/// `digest` is the digest of the base.
fn make_patch(
    base: &Content,
    digest: &str,
    target: &Content,
    classes: bool,
    deadline: Instant,
) -> Result<Vec<u8>, PatchError> {
    let layout = &target.header.layout;
    let old = Side { data: base.bytes(), digest };
    let new = Side { data: target.bytes(), digest: &target.digest };
    let wanted = || Instant::now() < deadline;
    let patch = encode(layout, target.plan.chunk_bytes, old, new, classes, &wanted)?;
    Patch::parse(layout, &patch)?.compare(old.data, new.data, &wanted)?;
    Ok(patch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;

    const ELEMENTS: u64 = 1 << 18; // too large for an announcement

    /// A version whose first element has that value; the other elements are fixed.
    fn version(value: u16) -> Arc<Content> {
        let mut bytes: Vec<u8> = (0..2 * ELEMENTS).map(|at| at as u8).collect();
        bytes[..2].copy_from_slice(&value.to_le_bytes());
        let tensor = TensorView { name: "w", dtype: Dtype::BF16, shape: &[ELEMENTS], bytes: &bytes };
        Arc::new(Copier::default().copy(&[tensor], 1 << 20).unwrap())
    }

    fn runs(number: u64, content: &Content) -> PatchCandidate {
        let running =
            Running { epoch: 1, version: number, digest: content.digest.clone(), ..Default::default() };
        PatchCandidate { running: Some(running), ..PatchCandidate::default() }
    }

    fn new() -> PatchCandidate {
        PatchCandidate::default()
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn a_patch_builds_on_what_most_workers_run_and_leads_to_the_version() {
        let (first, second, third) = (version(1), version(2), version(3));
        let mut bases = Bases::new(2, u64::MAX);
        let offer = bases.offer(first.clone(), Encoding::Delta, &[new()], true, soon());
        assert!(offer.keep && offer.patches.is_empty());
        bases.offer(second.clone(), Encoding::Delta, &[new()], true, soon());
        let patch_candidates = [runs(1, &first), runs(2, &second), new(), runs(2, &second)];
        for encoding in [Encoding::Delta, Encoding::DeltaFlat] {
            let mut bases = bases.clone();
            let offer = bases.offer(third.clone(), encoding, &patch_candidates, true, soon());
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
        bases.offer(first.clone(), Encoding::Delta, &[new()], true, soon());
        bases.offer(second.clone(), Encoding::Delta, &[new()], true, soon());
        let patch_candidates = [runs(2, &first), runs(2, &second), runs(2, &second)];
        let offer = bases.offer(third, Encoding::Delta, &patch_candidates, true, soon());
        let on: Vec<String> = offer.patches.iter().map(|patch| patch.offered().digest).collect();
        assert!(on.len() == 1 && on[0] == second.digest);
    }

    #[test]
    fn what_is_kept_is_bounded_by_versions_and_by_bytes() {
        let versions: Vec<Arc<Content>> = (0..5).map(version).collect();
        for (mut bases, most) in [(Bases::new(3, u64::MAX), 3), (Bases::new(8, 4 * ELEMENTS + 1), 2)] {
            for (at, content) in versions.iter().enumerate() {
                bases.offer(content.clone(), Encoding::Delta, &[new()], true, soon());
                assert_eq!(bases.kept.len(), most.min(at + 1));
            }
        }
        let mut bases = Bases::new(3, 2 * ELEMENTS - 1); // less than one version
        assert!(!bases.offer(versions[0].clone(), Encoding::Delta, &[new()], true, soon()).keep);
    }

    #[test]
    fn nothing_is_kept_where_nobody_takes_patches_or_none_are_wanted() {
        let (first, second) = (version(1), version(2));
        let patch_candidates = [runs(1, &first)];
        let mut bases = Bases::new(2, u64::MAX);
        bases.offer(first.clone(), Encoding::Delta, &patch_candidates, true, soon());
        let offer = bases.offer(second.clone(), Encoding::Raw, &patch_candidates, false, soon()); // to some
        assert!(!offer.keep && bases.kept.len() == 1);
        bases.offer(second.clone(), Encoding::Delta, &[], true, soon());
        assert!(bases.kept.is_empty());
        bases.offer(first.clone(), Encoding::Delta, &patch_candidates, true, soon());
        bases.offer(second, Encoding::Raw, &patch_candidates, true, soon());
        assert!(bases.kept.is_empty());
    }

    #[test]
    fn a_patch_that_takes_too_long_is_none() {
        let (first, second) = (version(1), version(2));
        let patch_candidates = [runs(1, &first)];
        let mut bases = Bases::new(2, u64::MAX);
        bases.offer(first, Encoding::Delta, &patch_candidates, true, soon());
        let offer = bases.offer(second, Encoding::Delta, &patch_candidates, true, Instant::now());
        assert!(offer.keep && offer.patches.is_empty() && offer.faults.len() == 1);
    }

    #[test]
    fn a_patch_is_made_by_itself_where_it_pays() {
        let (first, second) = (version(1), version(2));
        for (rate, count) in [(f64::INFINITY, 0), (1e12, 0), (1e4, 1)] {
            let mut bases = Bases::new(2, u64::MAX);
            bases.encode = [1.0; 2]; // measures, though no patch seems to pay
            bases.offer(first.clone(), Encoding::Auto, &[new()], true, soon());
            let patch_candidates = [PatchCandidate { rate, ..runs(1, &first) }, runs(1, &first)];
            let offer = bases.offer(second.clone(), Encoding::Auto, &patch_candidates, true, soon());
            assert!(offer.keep && offer.patches.len() == count, "{}", rate);
            assert!(offer.patches.iter().all(|patch| patch.work >= second.plan.nbytes as f64));
        }
    }

    #[test]
    fn one_patch_is_for_the_slowest_that_gains_by_any_and_one_slow_encode_ends_none_for_ever() {
        let mut bases = Bases::new(2, u64::MAX);
        let (first, second) = (version(1), version(2));
        let slow = |rate: f64, decode: f64| PatchCandidate { rate, decode: [Some(decode); 2], ..new() };
        let (busy, link) = (slow(2e5, 1e-2), slow(1e6, 1e-10)); // `busy` decodes too slowly to gain
        let mut way = |patch_candidates: &[&PatchCandidate]| {
            bases.choose_way(&first, &second, patch_candidates.iter().copied(), soon())
        };
        assert!(way(&[&link]).is_some(), "and it has measured");
        assert!(way(&[&busy]).is_none());
        assert!(way(&[&link, &busy]).is_some());
        bases.encode = [1.0; 2];
        let mut made: Vec<bool> = Vec::new();
        for _ in 0..PACE_EVERY {
            made.push(bases.choose_way(&first, &second, [&link].into_iter(), soon()).is_some());
        }
        assert!(!made[0] && made.contains(&true));
    }
}
