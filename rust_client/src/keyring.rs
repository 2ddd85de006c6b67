//! The group keys of a worker's session, which decrypt sealed messages. Messages in the clear are
//! ignored.
//!
//! A session has two keys during a rotation, and forgets the older key soon after. Each
//! message that is sealed with a group key has a number (`count`), but chunks have none. A message
//! whose `count` is at most the highest accepted `count` of its key is a replay.

use crate::base64;
use crate::digest::bytes_of_hex;
use crate::limits::GROUP_KEYS_MAX;
use crate::messages::{from_publisher, Announce, FromPublisher, SealedChunk, SealedMessage};
use crate::sealing::{nonce_of, GroupKey, Opening, Secret, Subject, CHUNK, LAYOUT};
use crate::transfer::Time;
use std::convert::TryInto;

struct CountedKey {
    key: GroupKey,
    count: u64, // highest count of an accepted message
}

/// The group keys of one worker, which accepts only sealed messages.
#[derive(Default)]
pub struct Keyring {
    group_keys: Vec<CountedKey>,             // newest last
    old_keys_expire_at: Option<Time>,        // when all keys but the newest are forgotten
    last: Option<(String, Vec<u8>, Secret)>, // the last version key that was used
    key_missing: bool,                       // a message needed an unknown key
}

impl Keyring {
    /// Begins a session with these keys. If there are two, the older one is valid until `until`.
    ///
    /// A key that was known before keeps its count, so that replays are ignored.
    pub fn begin(&mut self, keys: &[String], until: Time) {
        let before = std::mem::take(&mut self.group_keys);
        self.old_keys_expire_at = None;
        self.add(keys, until);
        for held in &mut self.group_keys {
            held.count = before.iter().find(|old| old.key.id == held.key.id).map_or(0, |old| old.count);
        }
    }

    /// Adds keys, the newest last. The keys before the newest stay valid until `until`. A key that
    /// is listed before a known key is older, and has expired if it is not known. Such a key is not
    /// added again: otherwise replays under that key would be accepted.
    pub fn add(&mut self, keys: &[String], until: Time) {
        let given: Vec<_> = keys.iter().map(|key| GroupKey::of_hex(key)).collect();
        let has = |key: &GroupKey| self.group_keys.iter().any(|held| held.key.id == key.id);
        let older = given.iter().rposition(has).map_or(0, |at| at + 1);
        for key in given.into_iter().skip(older) {
            if self.group_keys.iter().all(|held| held.key.id != key.id) {
                self.old_keys_expire_at = if self.group_keys.is_empty() { None } else { Some(until) };
                self.group_keys.push(CountedKey { key, count: 0 }); // E6
            }
        }
        self.keep_newest(GROUP_KEYS_MAX);
        self.key_missing = false;
    }

    /// Forgets an expired key.
    pub fn expire(&mut self, now: Time) {
        if self.old_keys_expire_at.map_or(false, |at| now >= at) {
            self.old_keys_expire_at = None;
            self.keep_newest(1);
        }
    }

    /// True if a message needed an unknown key, and no keys have arrived since.
    pub fn lacks_key(&self) -> bool {
        self.key_missing
    }

    fn keep_newest(&mut self, count: usize) {
        self.group_keys.drain(..self.group_keys.len().saturating_sub(count));
        self.last = None; // the key in `last` may be derived from a forgotten one
    }

    fn find(&mut self, id: &str) -> Option<usize> {
        let found = self.group_keys.iter().position(|held| held.key.id == id);
        self.key_missing |= found.is_none();
        found
    }

    /// Returns a published message, decrypted; a sealed chunk is returned as it is. Returns `None`
    /// for a message that is not authentic or not new, or is in the clear.
    ///
    /// With `counts`, the message is not accepted again. Otherwise only its header has been received,
    /// and the caller passes it again later.
    pub fn published(
        &mut self,
        message: FromPublisher,
        payload_count: usize,
        counts: bool,
    ) -> Option<FromPublisher> {
        match message {
            FromPublisher::SealedChunk(_) => Some(message), // E4
            FromPublisher::SealedMessage(sealed) => self.message(&sealed, payload_count, counts),
            _ => None, // E1
        }
    }

    /// Decrypts a message of the publisher, if the message is authentic and new.
    fn message(
        &mut self,
        sealed: &SealedMessage,
        payload_count: usize,
        counts: bool,
    ) -> Option<FromPublisher> {
        let at = self.find(&sealed.key)?;
        let held = &mut self.group_keys[at];
        if sealed.count <= held.count {
            return None; // E5
        }
        let plain = held.key.open_message(sealed.count, &base64::decode(&sealed.sealed)?)?;
        if counts {
            held.count = sealed.count;
        }
        let message = from_publisher(&plain, payload_count).ok()?;
        let published =
            matches!(message, FromPublisher::Announce(_) | FromPublisher::Beacon(_) | FromPublisher::End(_));
        published.then_some(message)
    }

    /// Returns the `Opening` of a chunk of the version or patch `subject`; `None` if the key is not
    /// known.
    pub fn opening(&mut self, subject: &Subject, chunk: &SealedChunk, size: usize) -> Option<Opening> {
        self.payload(subject, (CHUNK, chunk.index), size, &chunk.key, &chunk.tag)
    }

    /// Returns the decrypted payload of an announcement: the layout, or the whole version. Returns
    /// `None` if the payload is not authentic.
    pub fn decrypt(&mut self, announce: &Announce, sealed: &[u8]) -> Option<Vec<u8>> {
        let purpose = if announce.whole.is_some() { CHUNK } else { LAYOUT };
        let (key, tag) = (announce.key.as_ref()?, announce.tag.as_ref()?);
        let opening = self.payload(&Subject::of(announce), (purpose, 0), sealed.len(), key, tag)?;
        let mut plain = vec![0; sealed.len()];
        opening.decrypt(sealed, &mut plain).map(|_| plain)
    }

    fn payload(
        &mut self,
        subject: &Subject,
        (purpose, index): (u32, u64),
        size: usize,
        key: &str,
        tag: &str,
    ) -> Option<Opening> {
        let at = self.find(key)?;
        let names = subject.names();
        let known = self.last.as_ref().filter(|(id, of, _)| id == key && *of == names);
        let derive = || self.group_keys[at].key.version_key(subject);
        let secret = known.map_or_else(derive, |(.., secret)| *secret);
        self.last = Some((key.to_owned(), names, secret));
        let bound = subject.associated(purpose, index, size as u64);
        let tag = bytes_of_hex(tag).try_into().ok()?;
        Opening::new(&secret, &nonce_of(purpose, index), &bound, tag)
    }
}

#[cfg(all(test, feature = "keys"))]
mod tests {
    use super::*;
    use std::time::Duration;

    const KEYS: [&str; 3] = ["20", "40", "60"];

    fn key(at: usize) -> String {
        KEYS[at].repeat(32)
    }

    fn seconds(count: u64) -> Time {
        Duration::from_secs(count)
    }

    fn has(keyring: &mut Keyring, at: usize) -> bool {
        keyring.find(&GroupKey::of_hex(&key(at)).id).is_some()
    }

    #[test]
    fn two_keys_count_for_the_change_and_then_one() {
        let mut keyring = Keyring::default();
        keyring.begin(&[key(0)], seconds(5));
        keyring.add(&[key(1)], seconds(10));
        keyring.add(&[key(1)], seconds(20)); // the same again
        keyring.expire(seconds(9));
        assert!(has(&mut keyring, 0) && has(&mut keyring, 1) && !keyring.lacks_key());
        keyring.expire(seconds(10));
        assert!(!has(&mut keyring, 0) && has(&mut keyring, 1));
        assert!(keyring.lacks_key(), "somebody has asked for the older one");
        assert!(keyring.lacks_key(), "and again, where no hello could be said");
        keyring.add(&[key(1)], seconds(20));
        assert!(!keyring.lacks_key(), "keys were given");
    }

    #[test]
    fn a_key_that_is_told_before_one_that_is_here_is_older_and_over() {
        let mut keyring = Keyring::default();
        keyring.begin(&[key(0)], seconds(5));
        keyring.add(&[key(0), key(1)], seconds(10));
        keyring.group_keys[1].count = 7;
        keyring.expire(seconds(10));
        keyring.add(&[key(0), key(1)], seconds(20));
        keyring.expire(seconds(20));
        assert!(has(&mut keyring, 1) && !has(&mut keyring, 0));
        keyring.add(&[key(0), key(1)], seconds(30));
        assert_eq!(
            keyring.group_keys.iter().map(|held| held.count).collect::<Vec<_>>(),
            [7],
            "replays count"
        );
        keyring.add(&[key(0), key(2)], seconds(40)); // neither is known: their order decides
        assert!(has(&mut keyring, 0) && has(&mut keyring, 2) && !has(&mut keyring, 1));
        keyring.expire(seconds(40));
        assert!(has(&mut keyring, 2) && !has(&mut keyring, 0));
    }

    #[test]
    fn the_older_key_of_a_session_that_begins_with_two_is_forgotten_too() {
        let mut keyring = Keyring::default();
        keyring.begin(&[key(0), key(1)], seconds(5));
        keyring.last = Some((String::new(), Vec::new(), [0; 32]));
        keyring.expire(seconds(4));
        assert!(has(&mut keyring, 0) && has(&mut keyring, 1));
        keyring.expire(seconds(5));
        assert!(!has(&mut keyring, 0) && has(&mut keyring, 1));
        assert!(keyring.last.is_none(), "a key that was derived from it");
        keyring.begin(&[key(0), key(0)], seconds(5));
        assert_eq!(keyring.group_keys.len(), 1, "told twice");
    }

    #[test]
    fn no_more_than_two_keys_are_held() {
        let mut keyring = Keyring::default();
        keyring.begin(&[key(0)], seconds(5));
        keyring.add(&[key(1), key(2)], seconds(10));
        assert!(!has(&mut keyring, 0) && has(&mut keyring, 1) && has(&mut keyring, 2));
    }

    #[test]
    fn a_count_goes_on_in_the_next_session_under_the_same_key_alone() {
        let mut keyring = Keyring::default();
        keyring.begin(&[key(0)], seconds(5));
        keyring.group_keys[0].count = 7;
        keyring.begin(&[key(1), key(0)], seconds(5));
        assert_eq!(keyring.group_keys.iter().map(|held| held.count).collect::<Vec<_>>(), [0, 7]);
        keyring.begin(&[key(1)], seconds(5));
        keyring.begin(&[key(0)], seconds(5));
        assert_eq!(keyring.group_keys[0].count, 0, "it was forgotten with its key");
    }
}
