//! Chooses how a version arrives: by a patch if one of the offered patches fits, otherwise whole.
//!
//! A patch builds on the exact bytes of this worker's running version. It arrives in a separate
//! buffer, and is decoded in a separate thread. The decoded version is checked against the digest,
//! like any version. If the patch cannot be used after all, the whole version is fetched. The
//! running version does not change meanwhile.

use crate::effects::Effect;
use crate::layout::Layout;
use crate::limits::Timing;
use crate::messages::{data_topic, patch_topic, Announce, Patch, DELTA};
use crate::patching::{Base, Bytes};
use crate::phases::{Mode, Phase};
use crate::reports;
use crate::staging::Buffer;
use crate::transfer::{Key, Time, Transfer};
use crate::version_store::{VersionEntry, VersionStore};
use std::sync::Arc;

/// The patches of one model.
pub struct Patches {
    model: String,
    timing: Timing,
    accepted: bool,
    patch_topic: bool, // subscribed to chunks of patches, not of whole versions
    decoding: usize,   // number of patches being decoded; their versions may be outdated
}

impl Patches {
    pub fn new(model: &str, timing: Timing) -> Patches {
        Patches { model: model.to_owned(), timing, accepted: false, patch_topic: false, decoding: 0 }
    }

    pub fn accept(&mut self) {
        self.accepted = true;
    }

    pub fn accepted(&self) -> bool {
        self.accepted
    }

    /// Returns the topic of the chunks that are pushed to this worker.
    pub fn topic(&self) -> String {
        if self.patch_topic {
            patch_topic(&self.model)
        } else {
            data_topic(&self.model)
        }
    }

    /// Subscribes to chunks of patches if this version arrives as a patch, otherwise to chunks of
    /// whole versions: the next version is expected to arrive in the same way (D7).
    pub fn listen(&mut self, transfer: &Transfer, shared: bool, mode: Mode) -> Vec<Effect> {
        let (before, patched) = (self.topic(), transfer.patch().is_some());
        let changed = std::mem::replace(&mut self.patch_topic, patched) != patched;
        if !changed || shared || mode == Mode::CatchingUp {
            return Vec::new();
        }
        vec![
            Effect::Subscribe { topic: before, on: false },
            Effect::Subscribe { topic: self.topic(), on: true },
        ]
    }

    /// Begins the transfer of a version, either as a patch on the running version or whole (D4).
    pub fn transfer(
        &self,
        versions: &VersionStore,
        announce: Announce,
        layout: Arc<Layout>,
        buffer: Buffer,
        now: Time,
    ) -> Transfer {
        let with_buffer = |(patch, base): (Patch, Base)| match Buffer::unpooled(patch.nbytes) {
            Ok(buffer) => Ok((patch, base, buffer)),
            Err(error) => Err(format!("no memory for a patch of {} bytes ({})", patch.nbytes, error)),
        };
        match self.choose(&announce, versions).and_then(with_buffer) {
            Ok(patch) => {
                let first = announce.patches.first().map(Patch::id);
                let mut transfer = Transfer::of_patch(patch, announce, layout, buffer, now, self.timing);
                if transfer.patch() != first {
                    transfer.pull(); // only the first patch is pushed
                }
                transfer
            }
            Err(why) => Transfer::new(announce, layout, buffer, &why, now, self.timing),
        }
    }

    /// Returns the offered patch that fits, and its base. Otherwise returns the reason that no
    /// patch fits; empty if none was offered.
    fn choose(&self, announce: &Announce, versions: &VersionStore) -> Result<(Patch, Base), String> {
        if !self.accepted || announce.patches.is_empty() {
            return Err(String::new());
        }
        let runs = versions.in_phase(Phase::Running);
        let overwritten = versions.in_phase(Phase::Applying).is_some();
        let found = runs.and_then(|entry| {
            let base = entry.base().filter(|base| base.layout.id == announce.layout)?;
            let patch = announce.patches.iter().find(|patch| builds_on(patch, entry))?;
            let intact = !overwritten || matches!(base.bytes, Bytes::Kept(_));
            (intact && patch.nbytes <= announce.nbytes).then(|| (patch.clone(), base.clone()))
        });
        found.ok_or_else(|| why_unfit(announce, runs, overwritten))
    }

    /// Starts to decode a patch, once the patch and the digest of its version have arrived (D5).
    pub fn decode(&mut self, transfer: &mut Transfer) -> Vec<Effect> {
        let job = transfer.decode();
        self.decoding += usize::from(job.is_some());
        job.map(Effect::Decode).into_iter().collect()
    }

    /// Notes that the decoding of a patch has ended.
    pub fn decoded(&mut self) {
        self.decoding -= 1;
    }

    /// True if a patch is being decoded; its buffer will be free soon.
    pub fn decoding(&self) -> bool {
        self.decoding > 0
    }

    /// Handles a refusal: the publisher no longer has the requested patch, or never had it (D8).
    pub fn refused(&self, versions: &mut VersionStore, key: Key, now: Time) -> Vec<Effect> {
        match versions.arriving(key) {
            Some(transfer) if transfer.patch().is_some() && !transfer.decoding() => {
                self.give_up(versions, None, "the publisher does not have this patch", now)
            }
            _ => Vec::new(),
        }
    }

    /// Fetches the whole version instead of a patch that cannot be used (D5). `buffer` is the
    /// version's buffer, if the decoder has returned it. `why` is the reason.
    pub fn give_up(
        &self,
        versions: &mut VersionStore,
        buffer: Option<Buffer>,
        why: &str,
        now: Time,
    ) -> Vec<Effect> {
        let entry = match versions.in_phase_mut(Phase::Arriving) {
            Some(entry) => entry,
            None => return Vec::new(),
        };
        let (_, number) = entry.key();
        let text =
            format!("version {} of {} is fetched as a whole, not patched: {}", number, self.model, why);
        let mut effects = vec![Effect::Notice { code: "unpatched".to_owned(), text }];
        if let Some(transfer) = entry.receive_whole(buffer, why, now) {
            effects.extend(reports::fetches(transfer, now)); // D10
        }
        effects
    }
}

fn builds_on(patch: &Patch, entry: &VersionEntry) -> bool {
    patch.encoding == DELTA && (patch.epoch, patch.version) == entry.key() && patch.digest == entry.digest()
}

fn why_unfit(announce: &Announce, runs: Option<&VersionEntry>, overwritten: bool) -> String {
    let here = match runs {
        Some(entry) => {
            let (epoch, version) = entry.key();
            let bytes = match entry.base() {
                None => ", and its bytes were not kept",
                Some(_) if overwritten => ", and another is being applied",
                Some(_) => "",
            };
            format!("version {} of epoch {} runs here{}", version, epoch, bytes)
        }
        None => "nothing runs here".to_owned(),
    };
    let offered: Vec<String> = announce.patches.iter().map(|patch| patch.version.to_string()).collect();
    format!("{}; there are patches on {}", here, offered.join(", "))
}
