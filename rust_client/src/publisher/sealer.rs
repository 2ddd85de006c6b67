//! Encrypts a publisher's messages: each chunk and layout once, for all receivers (E2 to E6).
//!
//! A version stays unencrypted in memory; its encrypted chunks have memory of their own. When the version
//! is released, the next version reuses the memory of the encrypted chunks.

use super::effects::Payload;
use crate::base64;
use crate::digest::hex;
use crate::messages::*;
use crate::sealing::{nonce_of, seal, GroupKey, Secret, Subject, AES_256_GCM, CHUNK, LAYOUT};
use crate::transfer::{ChunkPlan, Time};
use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// Returns 32 random bytes.
pub type DrawKey = Box<dyn FnMut() -> Secret + Send>;

/// Immutable encrypted bytes, and their authentication tag.
pub struct Sealed {
    pub bytes: Vec<u8>,
    pub tag: String,
    memory: Weak<MemoryPool>,
}

impl fmt::Debug for Sealed {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Sealed({} bytes)", self.bytes.len())
    }
}

impl Drop for Sealed {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.upgrade() {
            memory.give_back(std::mem::take(&mut self.bytes));
        }
    }
}

/// Free memory for the encrypted bytes of one model, by size: at most `bytes_max`, which two versions need.
struct MemoryPool {
    free: Mutex<FreeMemory>,
    bytes_max: u64,
}

#[derive(Default)]
struct FreeMemory {
    by_size: HashMap<usize, Vec<Vec<u8>>>,
    nbytes: u64,
}

impl MemoryPool {
    /// Returns memory of this size; `None` if the allocation fails.
    fn take(&self, size: usize) -> Option<Vec<u8>> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = free.by_size.get_mut(&size).and_then(Vec::pop) {
            free.nbytes -= size as u64;
            return Some(found);
        }
        drop(free);
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(size).ok()?;
        bytes.resize(size, 0);
        Some(bytes)
    }

    fn give_back(&self, bytes: Vec<u8>) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.nbytes + bytes.len() as u64 <= self.bytes_max {
            free.nbytes += bytes.len() as u64;
            free.by_size.entry(bytes.len()).or_default().push(bytes);
        }
    }
}

/// The encrypted chunks of a version, or of a patch, under the current group key.
struct SealedVersion {
    subject: Subject,
    key: Secret,
    content: Weak<dyn Any + Send + Sync>, // the unencrypted bytes; this is dropped after these
    chunks: BTreeMap<u64, Arc<Sealed>>,
}

/// Encrypts the messages of one publisher.
pub struct Sealer {
    draw: DrawKey,
    lifetime: Option<Duration>,
    key: Secret,
    group: GroupKey,
    rotated_at: Time,
    message_count: u64, // number of messages encrypted under the group key
    versions: Vec<SealedVersion>,
    layouts: BTreeMap<String, (Subject, Arc<Sealed>)>, // the last layout of each model
    memory: BTreeMap<String, Arc<MemoryPool>>,         // by model
}

impl Sealer {
    /// Returns a sealer with a new group key. A group key is due for replacement after `lifetime`, or never
    /// if that is `None`.
    pub fn new(mut draw: DrawKey, lifetime: Option<Duration>, now: Time) -> Sealer {
        let key = draw();
        Sealer {
            draw,
            lifetime,
            key,
            group: GroupKey::of_hex(&hex(&key)),
            rotated_at: now,
            message_count: 0,
            versions: Vec::new(),
            layouts: BTreeMap::new(),
            memory: BTreeMap::new(),
        }
    }

    /// Replaces the group key. Workers that do not get the new key cannot decrypt later messages (E6).
    pub fn rekey(&mut self, now: Time) {
        self.key = (self.draw)();
        (self.group, self.rotated_at, self.message_count) = (GroupKey::of_hex(&hex(&self.key)), now, 0);
        self.versions.clear();
        self.layouts.clear();
    }

    /// True if the group key is due for replacement.
    pub fn is_rekey_due(&self, now: Time) -> bool {
        self.lifetime.map_or(false, |life| now.saturating_sub(self.rotated_at) >= life)
    }

    /// Returns the group key, in hexadecimal, for messages to workers on encrypted connections.
    pub fn key(&self) -> String {
        hex(&self.key)
    }

    /// Encrypts the payload of a message to one worker; the connection encrypts the header. Returns `None`
    /// if memory for the encrypted payload cannot be allocated; then the message is lost.
    pub fn seal_for_one(
        &mut self,
        message: FromPublisher,
        payload: Payload,
    ) -> Option<(FromPublisher, Payload)> {
        match message {
            FromPublisher::Announce(announce) => self.announcement(announce, payload),
            FromPublisher::Chunk(chunk) => self.chunk(chunk, payload),
            other => Some((other, payload)),
        }
    }

    /// Encrypts a message to all subscribers, with its header, because data connections are not encrypted.
    /// Returns `None` if memory cannot be allocated; then the message is lost.
    pub fn seal_for_all(
        &mut self,
        message: FromPublisher,
        payload: Payload,
    ) -> Option<(FromPublisher, Payload)> {
        let (message, payload) = self.seal_for_one(message, payload)?;
        if matches!(message, FromPublisher::SealedChunk(_)) {
            return Some((message, payload));
        }
        self.message_count += 1; // E5
        let sealed = base64::encode(&self.group.seal_message(self.message_count, &encode(&message))?);
        let (key, count) = (self.group.id.clone(), self.message_count);
        Some((
            FromPublisher::SealedMessage(SealedMessage { key, count, sealed, ..Default::default() }),
            payload,
        ))
    }

    fn announcement(&mut self, mut announce: Announce, payload: Payload) -> Option<(FromPublisher, Payload)> {
        let sealed = match payload {
            Payload::Layout(content) => {
                let sealed = self.layout(Subject::of(&announce), &content.header.bytes)?;
                announce.tag = Some(sealed.tag.clone());
                Payload::SealedLayout(sealed)
            }
            Payload::Chunk(content, index) => {
                let subject = Subject::of(&announce);
                let sealed =
                    self.sealed_chunk(subject, index, content.chunk(index), &(content.clone() as _))?;
                announce.tag = Some(sealed.tag.clone());
                Payload::Sealed(sealed)
            }
            other => other,
        };
        announce.encryption = Some(AES_256_GCM.to_owned());
        announce.key = Some(self.group.id.clone());
        Some((FromPublisher::Announce(announce), sealed))
    }

    fn chunk(&mut self, chunk: Chunk, payload: Payload) -> Option<(FromPublisher, Payload)> {
        let Chunk { model, epoch, version, index, patch, .. } = chunk;
        let sealed = match payload {
            Payload::Chunk(content, index) => {
                let subject = subject_of(&model, (epoch, version), content.plan, patch.as_ref());
                self.sealed_chunk(subject, index, content.chunk(index), &(content.clone() as _))?
            }
            _ => return None, // a chunk always has a payload
        };
        let (key, tag) = (self.group.id.clone(), sealed.tag.clone());
        let chunk = SealedChunk { model, epoch, version, index, key, tag, patch, ..Default::default() };
        Some((FromPublisher::SealedChunk(chunk), Payload::Sealed(sealed)))
    }

    /// Returns an encrypted chunk of `content`, whose bytes are `plain`. Encrypts each chunk only once while
    /// `content` is in memory.
    fn sealed_chunk(
        &mut self,
        subject: Subject,
        index: u64,
        plain: &[u8],
        content: &Arc<dyn Any + Send + Sync>,
    ) -> Option<Arc<Sealed>> {
        let at = match self.versions.iter().position(|version| version.subject == subject) {
            Some(at) => at,
            None => {
                self.versions.retain(|version| version.content.strong_count() > 0); // frees their memory
                let (key, content) = (self.group.version_key(&subject), Arc::downgrade(content));
                self.versions.push(SealedVersion { subject, key, content, chunks: BTreeMap::new() });
                self.versions.len() - 1
            }
        };
        let version = &mut self.versions[at];
        if let Some(sealed) = version.chunks.get(&index) {
            return Some(sealed.clone());
        }
        let memory = memory_of(&mut self.memory, &version.subject);
        let sealed = encrypt(&version.key, &version.subject, (CHUNK, index), plain, &memory)?;
        version.chunks.insert(index, sealed.clone());
        Some(sealed)
    }

    fn layout(&mut self, subject: Subject, header: &[u8]) -> Option<Arc<Sealed>> {
        if let Some((_, sealed)) = self.layouts.get(&subject.model).filter(|(of, _)| *of == subject) {
            return Some(sealed.clone());
        }
        let key = self.group.version_key(&subject);
        let sealed = encrypt(&key, &subject, (LAYOUT, 0), header, &MemoryPool::new(0))?;
        self.layouts.insert(subject.model.clone(), (subject, sealed.clone()));
        Some(sealed)
    }

    /// Drops the encrypted bytes of versions that are no longer available, also of those whose unencrypted
    /// bytes stay in memory as bases of patches.
    pub fn tick(&mut self, is_available: impl Fn(&Subject) -> bool) {
        self.versions.retain(|version| version.content.strong_count() > 0 && is_available(&version.subject));
    }
}

impl MemoryPool {
    fn new(bytes_max: u64) -> Arc<MemoryPool> {
        Arc::new(MemoryPool { free: Mutex::default(), bytes_max })
    }
}

/// Returns the memory pool for a version: that of the previous version, if both have the same size. A
/// patch gets a pool that keeps nothing.
fn memory_of(known: &mut BTreeMap<String, Arc<MemoryPool>>, subject: &Subject) -> Arc<MemoryPool> {
    if subject.base != (0, 0) {
        return MemoryPool::new(0);
    }
    let bytes_max = 2 * subject.nbytes;
    match known.get(&subject.model) {
        Some(memory) if memory.bytes_max == bytes_max => memory.clone(),
        _ => {
            let memory = MemoryPool::new(bytes_max);
            known.insert(subject.model.clone(), memory.clone());
            memory
        }
    }
}

fn subject_of(
    model: &str,
    (epoch, version): (u64, u64),
    plan: ChunkPlan,
    patch: Option<&PatchId>,
) -> Subject {
    let ChunkPlan { nbytes, chunk_bytes } = plan;
    let encoding = patch.map_or("raw", |patch| &patch.encoding[..]).to_owned();
    let base = patch.map_or((0, 0), |patch| (patch.epoch, patch.version)); // D12
    Subject { model: model.to_owned(), epoch, version, nbytes, chunk_bytes, encoding, base }
}

/// Encrypts a payload with the key of its version (E3). Returns `None` if memory cannot be allocated, or
/// the encryption fails.
fn encrypt(
    key: &Secret,
    subject: &Subject,
    (purpose, index): (u32, u64),
    plain: &[u8],
    memory: &Arc<MemoryPool>,
) -> Option<Arc<Sealed>> {
    let mut bytes = memory.take(plain.len())?;
    let bound = subject.associated(purpose, index, plain.len() as u64);
    let tag = hex(&seal(key, &nonce_of(purpose, index), &bound, plain, &mut bytes)?);
    Some(Arc::new(Sealed { bytes, tag, memory: Arc::downgrade(memory) }))
}

#[cfg(all(test, feature = "keys"))]
mod tests {
    use super::super::content::{Content, Copier, TensorView};
    use super::*;
    use crate::dtype::Dtype;

    fn sealer() -> Sealer {
        let mut drawn = 0;
        let draw = move || {
            drawn += 1;
            [drawn; 32]
        };
        Sealer::new(Box::new(draw), Some(Duration::from_secs(5)), Time::ZERO)
    }

    fn content(copier: &mut Copier) -> Arc<Content> {
        let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &[1000], bytes: &[7; 1000] };
        Arc::new(copier.copy(&[tensor], 300).unwrap())
    }

    /// Returns a chunk as it is sent to one worker.
    fn chunk(sealer: &mut Sealer, content: &Arc<Content>, version: u64) -> (SealedChunk, Arc<Sealed>) {
        let (model, crc) = ("m".to_owned(), content.crcs[0]);
        let message = FromPublisher::Chunk(Chunk { model, epoch: 1, version, crc, ..Default::default() });
        match sealer.seal_for_one(message, Payload::Chunk(content.clone(), 0)) {
            Some((FromPublisher::SealedChunk(chunk), Payload::Sealed(sealed))) => (chunk, sealed),
            other => panic!("{:?}", other),
        }
    }

    #[test]
    fn a_chunk_is_sealed_once_and_gone_with_its_version() {
        let (mut sealer, mut copier) = (sealer(), Copier::default());
        let first = content(&mut copier);
        let (said, sealed) = chunk(&mut sealer, &first, 1);
        let (again, same) = chunk(&mut sealer, &first, 1);
        assert!(said == again && Arc::ptr_eq(&sealed, &same));
        let (weak, place) = (Arc::downgrade(&sealed), sealed.bytes.as_ptr());
        drop((first, sealed, same));
        assert!(weak.upgrade().is_some());
        let second = content(&mut copier);
        let (other, sealed) = chunk(&mut sealer, &second, 2);
        assert!(weak.upgrade().is_none(), "nothing is kept of a version that is gone");
        assert_eq!(sealed.bytes.as_ptr(), place, "its memory serves the next");
        assert_ne!(other.tag, said.tag, "each version has a key");
        let weak = Arc::downgrade(&sealed);
        drop(sealed);
        sealer.tick(|_| true);
        assert!(weak.upgrade().is_some());
        sealer.tick(|_| false);
        assert!(weak.upgrade().is_none(), "its bytes are kept for patches alone");
        let (_, sealed) = chunk(&mut sealer, &second, 2);
        let weak = Arc::downgrade(&sealed);
        drop((second, sealed));
        sealer.tick(|_| true);
        assert!(weak.upgrade().is_none());
    }

    #[test]
    fn another_group_key_seals_all_anew_and_counts_anew() {
        let (mut sealer, mut copier) = (sealer(), Copier::default());
        let content = content(&mut copier);
        let beacon = || {
            FromPublisher::Beacon(Beacon {
                model: "m".to_owned(),
                epoch: 1,
                version: 1,
                ..Default::default()
            })
        };
        let count = |sealer: &mut Sealer| match sealer.seal_for_all(beacon(), Payload::None) {
            Some((FromPublisher::SealedMessage(sealed), Payload::None)) => (sealed.count, sealed.key),
            other => panic!("{:?}", other),
        };
        let ((before, sealed), key) = (chunk(&mut sealer, &content, 1), sealer.key());
        let waiting = Arc::downgrade(&sealed); // as a subscriber's queue has it
        drop(sealed);
        assert_eq!((count(&mut sealer).0, count(&mut sealer).0), (1, 2));
        assert!(!sealer.is_rekey_due(Duration::from_secs(4)) && sealer.is_rekey_due(Duration::from_secs(5)));
        sealer.rekey(Duration::from_secs(5));
        assert!(!sealer.is_rekey_due(Duration::from_secs(9)));
        assert!(waiting.upgrade().is_none(), "what waits does not go out any more");
        let after = chunk(&mut sealer, &content, 1).0;
        assert!(sealer.key() != key && after.key != before.key && after.tag != before.tag);
        assert_eq!(count(&mut sealer), (1, after.key));
    }
}
