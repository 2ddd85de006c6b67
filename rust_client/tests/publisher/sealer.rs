//! What a publisher with keys does to what it says: it seals all of it. (E2 to E5)

use super::Message;
use std::collections::BTreeMap;
use std::convert::TryInto;
use std::os::raw::{c_int, c_uchar, c_void};
use std::ptr::null_mut;
use weightbus::digest::hex;
use weightbus::messages::*;
use weightbus::sealing::{nonce_of, GroupKey, Secret, Subject, AES_256_GCM, CHUNK, LAYOUT, MESSAGE};

const GET_TAG: c_int = 0x10;

#[link(name = "crypto")]
extern "C" {
    fn EVP_aes_256_gcm() -> *const c_void;
    fn EVP_CIPHER_CTX_new() -> *mut c_void;
    fn EVP_CIPHER_CTX_free(context: *mut c_void);
    fn EVP_CIPHER_CTX_ctrl(context: *mut c_void, what: c_int, size: c_int, with: *mut c_void) -> c_int;
    fn EVP_EncryptInit_ex(
        context: *mut c_void,
        cipher: *const c_void,
        engine: *mut c_void,
        key: *const c_uchar,
        nonce: *const c_uchar,
    ) -> c_int;
    fn EVP_EncryptUpdate(
        context: *mut c_void,
        to: *mut c_uchar,
        count: *mut c_int,
        from: *const c_uchar,
        size: c_int,
    ) -> c_int;
    fn EVP_EncryptFinal_ex(context: *mut c_void, to: *mut c_uchar, count: *mut c_int) -> c_int;
}

/// Returns bytes sealed, and their tag.
pub fn seal(key: &Secret, nonce: &[u8; 12], bound: &[u8], plain: &[u8]) -> (Vec<u8>, [u8; 16]) {
    let (mut sealed, mut tag, mut count) = (vec![0; plain.len()], [0; 16], 0);
    // SAFETY: every buffer has as many bytes as are told.
    unsafe {
        let context = EVP_CIPHER_CTX_new();
        let none = null_mut();
        let done = [
            EVP_EncryptInit_ex(context, EVP_aes_256_gcm(), none, key.as_ptr(), nonce.as_ptr()),
            EVP_EncryptUpdate(context, null_mut(), &mut count, bound.as_ptr(), bound.len() as c_int),
            EVP_EncryptUpdate(context, sealed.as_mut_ptr(), &mut count, plain.as_ptr(), plain.len() as c_int),
            EVP_EncryptFinal_ex(context, tag.as_mut_ptr(), &mut count),
            EVP_CIPHER_CTX_ctrl(context, GET_TAG, 16, tag.as_mut_ptr().cast()),
        ];
        EVP_CIPHER_CTX_free(context);
        assert_eq!(done, [1; 5]);
    }
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
                FromPublisher::SealedChunk(SealedChunk { model, epoch, version, index, key, tag, patch })
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
        let size = header.len() as u64;
        let bound = [&MESSAGE.to_le_bytes()[..], &self.count.to_le_bytes(), &size.to_le_bytes()].concat();
        let nonce = nonce_of(MESSAGE, self.count);
        let (mut sealed, tag) = seal(&self.group.of_messages, &nonce, &bound, &header);
        sealed.extend_from_slice(&tag);
        let (key, sealed) = (self.group.id.clone(), base64(&sealed));
        let message = FromPublisher::SealedMessage(SealedMessage { key, count: self.count, sealed });
        (encode(&message), payloads)
    }

    fn payload(&self, subject: &Subject, purpose: u32, index: u64, payload: &mut Vec<u8>) -> String {
        let bound = subject.associated(purpose, index, payload.len() as u64);
        let (sealed, tag) = seal(&self.group.of_version(subject), &nonce_of(purpose, index), &bound, payload);
        *payload = sealed;
        hex(&tag)
    }
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let padded: [u8; 3] = [three, &[0; 3]].concat()[..3].try_into().unwrap();
        let bits = u32::from_be_bytes([0, padded[0], padded[1], padded[2]]);
        for at in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * at) & 63) as usize];
            text.push(if at <= three.len() { char::from(digit) } else { '=' });
        }
    }
    text
}
