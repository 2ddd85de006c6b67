//! What a publisher with keys does to what it says: it seals all of it. (E2 to E5)

use super::Message;
use std::collections::BTreeMap;
use weightbus::base64;
use weightbus::digest::hex;
use weightbus::messages::*;
use weightbus::sealing::{self, nonce_of, GroupKey, Secret, Subject, AES_256_GCM, CHUNK, LAYOUT};

/// Returns bytes sealed, and their tag.
pub fn seal(key: &Secret, nonce: &[u8; 12], bound: &[u8], plain: &[u8]) -> (Vec<u8>, [u8; 16]) {
    let mut sealed = vec![0; plain.len()];
    let tag = sealing::seal(key, nonce, bound, plain, &mut sealed).expect("libcrypto");
    (sealed, tag)
}

/// Under one group key at a time.
pub struct Sealer {
    /// The group key, as a welcome has it.
    pub key: String,
    group: GroupKey,
    count: u64,
    announced: BTreeMap<(u64, u64), Announce>,
}

impl Sealer {
    pub fn new(number: u64) -> Sealer {
        let key = format!("{:064x}", number);
        Sealer { group: GroupKey::of_hex(&key), key, count: 0, announced: BTreeMap::new() }
    }

    /// Has another group key from now on.
    pub fn rekey(&mut self, number: u64) {
        let announced = std::mem::take(&mut self.announced);
        *self = Sealer { announced, ..Sealer::new(number) };
    }

    /// A message as it goes to one worker, on a connection that is encrypted.
    pub fn addressed(&mut self, (header, mut payloads): Message) -> Message {
        let message = match from_publisher(&header, payloads.len()).expect("a publisher says what is sound") {
            FromPublisher::Welcome(welcome) => {
                FromPublisher::Welcome(Welcome { keys: vec![self.key.clone()], ..welcome })
            }
            FromPublisher::Announce(mut announce) => {
                let subject = Subject::of(&announce);
                self.announced.insert((announce.epoch, announce.version), announce.clone());
                announce.encryption = Some(AES_256_GCM.to_owned());
                if let Some(payload) = payloads.first_mut() {
                    let purpose = if announce.whole.is_some() { CHUNK } else { LAYOUT };
                    announce.tag = Some(self.payload(&subject, purpose, 0, payload));
                    announce.key = Some(self.group.id.clone());
                }
                FromPublisher::Announce(announce)
            }
            FromPublisher::Chunk(Chunk { model, epoch, version, index, patch, .. }) => {
                let announce = &self.announced[&(epoch, version)];
                let offered = announce.patches.iter().find(|offered| Some(offered.id()) == patch);
                let subject = offered
                    .map_or_else(|| Subject::of(announce), |offered| Subject::of_patch(announce, offered));
                let tag = self.payload(&subject, CHUNK, index, &mut payloads[0]);
                let key = self.group.id.clone();
                FromPublisher::SealedChunk(SealedChunk {
                    model,
                    epoch,
                    version,
                    index,
                    key,
                    tag,
                    patch,
                    ..Default::default()
                })
            }
            other => other,
        };
        (encode(&message), payloads)
    }

    /// A message as it goes to all, on connections that everybody can read.
    pub fn published(&mut self, message: Message) -> Message {
        let (header, payloads) = self.addressed(message);
        match from_publisher(&header, payloads.len()) {
            Ok(FromPublisher::SealedChunk(_)) => return (header, payloads),
            message => drop(message.expect("it was sound before")),
        }
        self.count += 1;
        let sealed = self.group.seal_message(self.count, &header).expect("libcrypto");
        let (key, sealed) = (self.group.id.clone(), base64::encode(&sealed));
        let message = FromPublisher::SealedMessage(SealedMessage {
            key,
            count: self.count,
            sealed,
            ..Default::default()
        });
        (encode(&message), payloads)
    }

    fn payload(&self, subject: &Subject, purpose: u32, index: u64, payload: &mut Vec<u8>) -> String {
        let bound = subject.associated(purpose, index, payload.len() as u64);
        let (sealed, tag) =
            seal(&self.group.version_key(subject), &nonce_of(purpose, index), &bound, payload);
        *payload = sealed;
        hex(&tag)
    }
}
