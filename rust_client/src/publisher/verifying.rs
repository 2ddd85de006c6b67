//! Verifies, on an observer's request, whether a worker's weights equal the published ones (P24).
//!
//! The worker sends checksums of its tensors, in the order of their names. The publisher computes its own
//! checksums, once for each version and in slices between other work. It compares both, and
//! reports to the observer which tensors differ. At most one request is open for each worker. If the worker does
//! not answer in time, the publisher reports that. No version is kept in memory for a request.
//!
//! ```text
//! verify ──> check ──> checked ──> comparison of the slices ──> verified
//! ```

use super::effects::{Effect, Identity};
use super::machine::PublisherMachine;
use super::observers::NO_OBSERVER;
use super::pages::PAGE_BYTES;
use super::store::Version;
use crate::checksum::crc32c_append;
use crate::layout::{Layout, TensorInfo};
use crate::limits::{DIFFERENCES_LISTED, ERROR_MAX, OBSERVERS_MAX, TEXT_MAX};
use crate::messages::{
    encode, Check, Checked, Difference, FromPublisher, ToObserver, Verified, Verify, CHECKING,
};
use crate::transfer::{Key, Time};
use crate::words::printable;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

const SLICE_BYTES: u64 = 1 << 22; // whose checksum takes a fraction of a millisecond

/// A request that a worker has not answered yet.
struct OpenCheck {
    asked: Verify,
    observer: Identity,
    key: Key,
    since: Time,
}

/// The verifications that observers have requested.
#[derive(Default)]
pub struct Checks {
    open: BTreeMap<String, OpenCheck>, // by worker
    comparisons: VecDeque<Comparison>,
    names: Option<(String, Arc<Vec<String>>)>, // of the last layout, with its id
}

impl Checks {
    /// Returns all names of a layout, sorted by their UTF-8 bytes.
    fn names_of(&mut self, layout: &Layout) -> Arc<Vec<String>> {
        match &self.names {
            Some((id, names)) if *id == layout.id => names.clone(),
            _ => {
                let mut names: Vec<String> = layout.names().map(str::to_owned).collect();
                names.sort_unstable();
                let names = Arc::new(names);
                self.names = Some((layout.id.clone(), names.clone()));
                names
            }
        }
    }
}

/// The comparison of a worker's checksums with those of a version.
struct Comparison {
    asked: Verify,
    observer: Identity,
    key: Key,
    names: Arc<Vec<String>>,
    sums: Vec<Option<u32>>,
    next: usize,      // index of the next checksum
    part: (u64, u32), // of the next tensor: the bytes that are done, and their checksum
    unlike: u64,      // names for which the worker has no checksum
    differing: u64,   // names whose checksums differ
    listed: Vec<Difference>,
    listed_bytes: usize,
}

impl Comparison {
    /// Returns the number of names to compare.
    fn count(&self) -> usize {
        let first = usize::try_from(self.asked.first).unwrap_or(usize::MAX);
        self.sums.len().min(self.names.len().saturating_sub(first))
    }

    /// Computes and compares the checksums of the next slice of bytes. Returns true after the last slice.
    fn step(&mut self, version: &mut Version) -> bool {
        let mut left = SLICE_BYTES;
        while self.next < self.count() && left > 0 {
            let name = &self.names[self.asked.first as usize + self.next];
            let found = version.content.header.layout.get(name).cloned();
            match (self.sums[self.next], found) {
                (Some(runs), Some(tensor)) => match self.sum(version, &tensor, &mut left) {
                    Some(published) => self.compare(published, runs),
                    None => return false,
                },
                _ => self.unlike += 1,
            }
            self.next += 1;
        }
        self.next == self.count()
    }

    /// Returns the checksum of a published tensor; `None` if the slice ends before the tensor ends.
    /// `left` is the number of bytes left in the slice.
    fn sum(&mut self, version: &mut Version, tensor: &TensorInfo, left: &mut u64) -> Option<u32> {
        if tensor.begin == tensor.end {
            return Some(0);
        }
        if let Some(sum) = version.sums.get(&tensor.begin) {
            return Some(*sum);
        }
        let begin = tensor.begin + self.part.0;
        let end = tensor.end.min(begin + *left);
        let sum = crc32c_append(self.part.1, &version.content.bytes()[begin as usize..end as usize]);
        *left -= end - begin;
        if end < tensor.end {
            self.part = (end - tensor.begin, sum);
            return None;
        }
        self.part = (0, 0);
        version.sums.insert(tensor.begin, sum);
        Some(sum)
    }

    /// Compares two checksums of the next tensor.
    fn compare(&mut self, published: u32, runs: u32) {
        if published == runs {
            return;
        }
        self.differing += 1;
        let name = printable(&self.names[self.asked.first as usize + self.next], ERROR_MAX);
        let difference = Difference { name, published, runs, ..Default::default() };
        let nbytes = serde_json::to_string(&difference).map_or(PAGE_BYTES, |text| text.len()) + 1;
        if self.listed.len() < DIFFERENCES_LISTED && self.listed_bytes + nbytes <= PAGE_BYTES {
            self.listed.push(difference);
            self.listed_bytes += nbytes;
        }
    }

    /// Returns the effect that sends the result to the observer.
    fn answer(self) -> Effect {
        let verified = Verified {
            epoch: self.key.0,
            version: self.key.1,
            count: self.count() as u64,
            names: self.names.len() as u64,
            unlike: self.unlike,
            differing: self.differing,
            differences: self.listed,
            ..answer_to(&self.asked)
        };
        Effect::Answer { to: self.observer, header: encode(&ToObserver::Verified(verified)) }
    }
}

impl PublisherMachine {
    /// Handles an observer's request: sends a check to the worker, or answers why that is not possible.
    pub(super) fn verify(&mut self, from: &[u8], key: &str, asked: Verify, now: Time) {
        if !self.may_observe(key) {
            return self.refuse(from, "not-allowed", NO_OBSERVER, None);
        }
        match self.verifiable(from, &asked) {
            Err((code, text)) => self.answer_unverified(from, &asked, code, text),
            Ok((to, key)) => {
                let (model, first) = (asked.model.clone(), asked.first);
                let check = Check { model, epoch: key.0, version: key.1, first, ..Default::default() };
                let worker = asked.worker.clone();
                self.checks
                    .open
                    .insert(worker, OpenCheck { asked, observer: from.to_vec(), key, since: now });
                self.perform(Effect::Answer { to, header: encode(&FromPublisher::Check(check)) });
            }
        }
    }

    /// Returns the connection and the running version of the worker to verify. If the worker cannot be
    /// verified, returns the code and the text of the reason.
    fn verifiable(&self, from: &[u8], asked: &Verify) -> Result<(Identity, Key), (&'static str, String)> {
        let refuse = |code, text: &str| Err((code, text.to_owned()));
        let Verify { worker, model, .. } = asked;
        let peer = match self.roster.get(worker).filter(|peer| peer.subscribes_to(model)) {
            Some(peer) => peer,
            None => return Err(("absent", format!("no worker {} with {} is there", worker, model))),
        };
        if peer.is_lost() {
            return refuse("absent", "it is lost: nothing is heard of it");
        }
        if let Some(relay) = peer.through.last() {
            return Err(("unsupported", format!("it is behind relay {}: ask that relay", relay)));
        }
        if !peer.hello.features.iter().any(|feature| feature == CHECKING) {
            let who = printable(&peer.hello.client, usize::MAX);
            let who = if who.is_empty() { "its program" } else { &who };
            let text = format!("{} computes no checksums of weights: it lacks `{}`", who, CHECKING);
            return Err(("unsupported", text));
        }
        let key = peer.running_key(model);
        if key == (0, 0) {
            return Err(("absent", format!("it runs no version of {} yet, or none any more", model)));
        }
        if !self.offers(model, key) {
            let text = format!("it runs version {}, whose bytes the publisher no longer has", key.1);
            return Err(("gone", text));
        }
        match self.checks.open.get(worker) {
            Some(open) if open.observer != from => {
                refuse("busy", "another observer verifies it now: ask again in a moment")
            }
            None if self.checks.open.len() >= OBSERVERS_MAX => {
                refuse("busy", "too many workers are being verified: ask again in a moment")
            }
            _ => Ok((peer.identity.clone(), key)),
        }
    }

    /// Handles a worker's answer to a check. Begins to compare the checksums if the answer is to the open
    /// request.
    pub(super) fn checked(&mut self, name: &str, answer: Checked) {
        let is_answered = |open: &OpenCheck| {
            let request = (&open.asked.model, open.asked.first, open.key);
            request == (&answer.model, answer.first, (answer.epoch, answer.version))
        };
        if !self.checks.open.get(name).map_or(false, is_answered) {
            return;
        }
        let OpenCheck { asked, observer, key, .. } = match self.checks.open.remove(name) {
            Some(open) => open,
            None => return,
        };
        if let Some(code) = answer.code {
            return self.answer_unverified(&observer, &asked, &code, printable(&answer.text, TEXT_MAX));
        }
        let version = self.store.in_epoch(&asked.model, key.0).and_then(|versions| versions.get(key.1));
        let names = match version {
            Some(version) => self.checks.names_of(&version.content.header.layout),
            None => return self.answer_replaced(&observer, &asked, key),
        };
        self.checks.comparisons.push_back(Comparison {
            asked,
            observer,
            key,
            names,
            sums: answer.sums,
            next: 0,
            part: (0, 0),
            unlike: 0,
            differing: 0,
            listed: Vec::new(),
            listed_bytes: 0,
        });
    }

    /// True if there is something to compare.
    pub fn is_comparing(&self) -> bool {
        !self.checks.comparisons.is_empty()
    }

    /// Compares one more slice. After the last slice, answers the observer.
    pub fn compare(&mut self) -> Vec<Effect> {
        if let Some(mut comparison) = self.checks.comparisons.pop_front() {
            let (model, key) = (&comparison.asked.model, comparison.key);
            let version = self.store.in_epoch(model, key.0).and_then(|versions| versions.get_mut(key.1));
            match version.map(|version| comparison.step(version)) {
                None => self.answer_replaced(&comparison.observer, &comparison.asked, key),
                Some(true) => self.perform(comparison.answer()),
                Some(false) => self.checks.comparisons.push_back(comparison),
            }
        }
        self.finish()
    }

    /// Answers the observers whose workers have not answered in time.
    pub(super) fn tick_checks(&mut self, now: Time) {
        let patience = self.timing.lost_after;
        let late = |open: &&OpenCheck| now.saturating_sub(open.since) >= patience;
        let late: Vec<String> =
            self.checks.open.values().filter(late).map(|o| o.asked.worker.clone()).collect();
        for worker in late {
            if let Some(open) = self.checks.open.remove(&worker) {
                let text = format!("it has not answered for {} s", patience.as_secs_f64());
                self.answer_unverified(&open.observer, &open.asked, "silent", text);
            }
        }
    }

    /// Answers an observer that the version was replaced before its comparison ended.
    fn answer_replaced(&mut self, observer: &[u8], asked: &Verify, key: Key) {
        self.answer_unverified(observer, asked, "gone", format!("version {} was replaced meanwhile", key.1));
    }

    /// Answers an observer that the worker was not verified, for this reason.
    fn answer_unverified(&mut self, observer: &[u8], asked: &Verify, code: &str, text: String) {
        let verified = Verified { code: Some(code.to_owned()), text, ..answer_to(asked) };
        self.perform(Effect::Answer {
            to: observer.to_vec(),
            header: encode(&ToObserver::Verified(verified)),
        });
    }
}

/// Returns an answer to a request without results.
fn answer_to(asked: &Verify) -> Verified {
    let Verify { worker, model, first, .. } = asked.clone();
    Verified { worker, model, first, ..Default::default() }
}
