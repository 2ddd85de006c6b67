//! Builds the messages of a worker: `hello`, reports on the versions of a model, and fetches of
//! chunks. Reports are sent at once, and again with every ping (W17).

use crate::effects::Effect;
use crate::messages::{
    Applied, Failed, Fetch, FromWorker, Hello, PatchId, Ping, Progress, ProgressPhase, Running, Staged,
    COMPANIONS, DELTA, RENAMING,
};
use crate::phases::Phase;
use crate::transfer::{Key, Time, Transfer, Want};
use crate::version_store::{must_be_staged, VersionEntry, VersionStore};
use std::collections::BTreeMap;

/// Phases of versions that are complete, and not applied yet.
pub const NOT_APPLIED: [Phase; 3] = [Phase::Ready, Phase::Applying, Phase::Staged];

/// Returns a hello. `identity` has the fields that stay the same, and `models` the running
/// versions. `age_ms` is the time since the publisher of `epoch` started.
pub fn hello(
    identity: &Hello,
    models: BTreeMap<String, Option<Running>>,
    epoch: u64,
    age_ms: u64,
    patches: bool,
) -> Effect {
    let features = [RENAMING, COMPANIONS].into_iter().chain(patches.then_some(DELTA)); // W25, C2, D4
    let features = features.map(str::to_owned).collect();
    Effect::Send(FromWorker::Hello(Hello { models, epoch, age_ms, features, ..identity.clone() }))
}

/// Returns all current reports on a model, which include `failure`, the report of the last failure.
pub fn current(versions: &VersionStore, failure: Option<Effect>) -> Vec<Effect> {
    let applying = versions.in_phase(Phase::Applying); // may hang while later versions become ready
    let ready = versions.in_phases(&[Phase::Ready]).chain(versions.awaiting_companions()); // C2
    let newest = ready.max_by_key(|entry| entry.key());
    let arriving = if applying.is_none() { receiving(versions) } else { None };
    let idle = arriving.is_none();
    let mut effects: Vec<Effect> = arriving.into_iter().collect();
    effects.extend(staged(versions, &NOT_APPLIED));
    effects.extend(applied(versions));
    effects.extend(failure);
    if let Some(entry) = applying.or(newest).filter(|_| idle) {
        let phase = if applying.is_some() { ProgressPhase::Applying } else { ProgressPhase::Staged };
        effects.push(progress(entry, entry.key(), 0, phase, None));
    }
    effects
}

/// Returns the `fetch` messages that a transfer wants to send now.
pub fn fetches(transfer: &mut Transfer, now: Time) -> Vec<Effect> {
    let wants = transfer.wants(now);
    let fetch = |want| {
        let (first, count) = match want {
            Want::End => (0, 0),
            Want::Chunks { first, count } => (first, count),
        };
        let (model, (epoch, version)) = (transfer.model().to_owned(), transfer.key());
        let (patch, unpatched) = (transfer.patch(), transfer.unpatched_reason().to_owned()); // D10
        let fetch = Fetch { model, epoch, version, first, count, patch, unpatched, ..Default::default() };
        Effect::Send(FromWorker::Fetch(fetch))
    };
    wants.into_iter().map(fetch).collect()
}

/// Returns a progress report on the arriving version.
pub fn receiving(versions: &VersionStore) -> Option<Effect> {
    let entry = versions.in_phase(Phase::Arriving)?;
    let transfer = entry.transfer()?;
    let (key, chunks) = (transfer.key(), transfer.chunks_received() as u64);
    Some(progress(entry, key, chunks, ProgressPhase::Receiving, transfer.patch()))
}

fn progress(
    entry: &VersionEntry,
    (epoch, version): Key,
    chunks: u64,
    phase: ProgressPhase,
    patch: Option<PatchId>,
) -> Effect {
    let model = entry.announce().model.clone();
    let progress = Progress { model, epoch, version, chunks, phase, patch, ..Default::default() };
    Effect::Send(FromWorker::Progress(progress))
}

/// Returns a `staged` report for each version in these phases whose publisher requires one (W14).
pub fn staged(versions: &VersionStore, phases: &[Phase]) -> Vec<Effect> {
    let due = versions.in_phases(phases).filter(|entry| must_be_staged(entry.announce()));
    due.map(|entry| Effect::Send(FromWorker::Staged(staged_version(entry)))).collect()
}

/// Returns the `applied` report on the running version, with the patch by which it arrived (D11).
pub fn applied(versions: &VersionStore) -> Option<Effect> {
    let entry = versions.in_phase(Phase::Running)?;
    let Staged { model, epoch, version, digest, patch, .. } = staged_version(entry);
    let (note, decode_us) = (entry.note().to_owned(), entry.decode_us());
    let report = Applied { model, epoch, version, digest, patch, note, decode_us, ..Default::default() };
    Some(Effect::Send(FromWorker::Applied(report)))
}

/// Returns the report of a failure. `torn` is true if no version runs (W24).
pub fn failed(failure: &Failed, torn: bool) -> Effect {
    Effect::Send(FromWorker::Failed(Failed { intact: !torn, ..failure.clone() }))
}

/// Returns a ping with the current time, which the pong repeats (W12, W18).
pub fn ping(now: Time, subscribed: bool, shared: bool) -> Effect {
    let token = now.as_millis() as u64;
    Effect::Send(FromWorker::Ping(Ping { token, subscribed, shared, ..Default::default() }))
}

fn staged_version(entry: &VersionEntry) -> Staged {
    let (epoch, version) = entry.key();
    let (model, digest, patch) = (entry.announce().model.clone(), entry.digest().to_owned(), entry.patch());
    Staged { model, epoch, version, digest, patch, ..Default::default() }
}
