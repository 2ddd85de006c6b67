//! What is sealed, and a worker that takes nothing else.
#![allow(clippy::needless_update)] // in literals of messages, which later fields leave alone
#![cfg(feature = "keys")]

mod publisher;

use proptest::prelude::*;
use publisher::sealer::{seal, Sealer};
use publisher::worker::{worker, AnyLayout};
use publisher::{receive_published, welcome, Message, Version, MODEL};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use weightbus::checksum::crc32c;
use weightbus::effects::Effect;
use weightbus::machine::WorkerMachine;
use weightbus::messages::*;
use weightbus::sealing::{nonce_of, GroupKey, Opening, CHUNK};
use weightbus::staging::{Source, StagedVersion};

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_pieces_it_comes_in_all_of_it_is_opened_or_nothing(
        plain in prop::collection::vec(any::<u8>(), 1..100_000),
        piece in 1..70_000usize,
        flipped: prop::sample::Index,
        bit in 0..8u32,
    ) {
        let (key, nonce, bound) = ([7; 32], nonce_of(CHUNK, 3), b"what it is bound to");
        let (sealed, tag) = seal(&key, &nonce, bound, &plain);
        let opening = || Opening::new(&key, &nonce, bound, tag).unwrap();
        let mut apart = vec![0; plain.len()];
        prop_assert_eq!(opening().decrypt(&sealed, &mut apart), Some(crc32c(&plain)));
        prop_assert_eq!(&apart, &plain);
        let (mut in_place, mut pieces) = (sealed.clone(), opening());
        in_place.chunks_mut(piece).for_each(|piece| pieces.decrypt_next(piece));
        prop_assert_eq!(pieces.verify(), Some(crc32c(&plain)));
        prop_assert_eq!(&in_place, &plain);
        let mut damaged = sealed.clone();
        damaged[flipped.index(plain.len())] ^= 1 << bit;
        prop_assert_eq!(opening().decrypt(&damaged, &mut apart), None);
        prop_assert_eq!(opening().decrypt(&sealed[1..], &mut apart[1..]), None);
        let mut bent = tag;
        bent[flipped.index(16)] ^= 1 << bit;
        prop_assert_eq!(Opening::new(&key, &nonce, bound, bent).unwrap().decrypt(&sealed, &mut apart), None);
    }
}

/// A worker inside a session, and what seals for it.
struct Session {
    machine: WorkerMachine,
    sealer: Sealer,
    now: Duration,
    ready: Vec<StagedVersion>,
    sent: Vec<FromWorker>,
}

impl Session {
    fn new(keyed: bool) -> Session {
        let mut machine = worker("w", "0".repeat(32), Arc::new(AnyLayout));
        if keyed {
            machine.require_sealed();
        }
        let (sealer, now) = (Sealer::new(1), Duration::from_secs(100));
        let mut session = Session { machine, sealer, now, ready: Vec::new(), sent: Vec::new() };
        let message = welcome(1, "tcp://*:1", BTreeMap::new());
        let message = if keyed { session.sealer.addressed(message) } else { message };
        session.control(message);
        assert!(session.machine.in_session());
        session
    }

    fn perform(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send(message) => self.sent.push(message),
                Effect::Ready(staged) => self.ready.push(staged),
                _ => {}
            }
        }
    }

    fn control(&mut self, (header, payloads): Message) {
        let payloads: Vec<&[u8]> = payloads.iter().map(|payload| &payload[..]).collect();
        let effects = self.machine.receive(&header, &payloads, self.now);
        self.perform(effects);
    }

    fn data(&mut self, message: Message) {
        let effects = receive_published(&mut self.machine, message, self.now);
        self.perform(effects);
    }

    fn publish(&mut self, version: &Version) {
        for message in version.pushed(1, true) {
            let sealed = self.sealer.published(message);
            self.data(sealed);
        }
    }

    /// The version that may be applied now, and its bytes.
    fn took(&mut self) -> Option<(u64, Vec<u8>)> {
        let staged = self.ready.pop()?;
        match &staged.source {
            Source::Buffer(buffer) => Some((staged.key.1, buffer.to_vec())),
            Source::Segment { .. } => None,
        }
    }

    fn hellos(&self) -> usize {
        self.sent.iter().filter(|sent| matches!(sent, FromWorker::Hello(_))).count()
    }
}

fn version(number: u64) -> Version {
    Version::of_bytes(number, (0..50).map(|at| at + number as u8).collect(), 16)
}

#[test]
fn what_is_pushed_sealed_is_opened_in_its_place() {
    let mut session = Session::new(true);
    session.publish(&version(1));
    assert_eq!(session.took(), Some((1, version(1).data)));
    let whole = Version::of_bytes(2, version(2).data, 64).whole(1);
    let whole = session.sealer.published(whole);
    session.data(whole);
    assert_eq!(session.took(), Some((2, version(2).data)));
}

#[test]
fn what_is_in_the_clear_has_no_effect() {
    let mut session = Session::new(true);
    for message in version(1).pushed(1, true) {
        session.data(message.clone());
        session.control(message);
    }
    assert_eq!(session.took(), None);
    let failed = session.sent.iter().find_map(|sent| match sent {
        FromWorker::Failed(failed) => Some(failed.code.as_str()),
        _ => None,
    });
    assert_eq!(failed, Some("unsupported"));
}

#[test]
fn a_worker_without_keys_takes_nothing_sealed() {
    let mut session = Session::new(false);
    session.publish(&version(1));
    for message in version(1).pushed(1, true) {
        let sealed = session.sealer.addressed(message);
        session.control(sealed);
    }
    assert_eq!(session.took(), None);
    for message in version(1).pushed(1, true) {
        session.data(message);
    }
    assert_eq!(session.took(), Some((1, version(1).data)));
}

#[test]
fn a_replay_has_no_effect() {
    let mut session = Session::new(true);
    let beacon = |session: &mut Session, number| {
        let header = encode(&FromPublisher::Beacon(Beacon {
            model: MODEL.to_owned(),
            epoch: 1,
            version: number,
            ..Default::default()
        }));
        session.sealer.published((header, Vec::new()))
    };
    let fetches = |session: &Session| {
        session
            .sent
            .iter()
            .filter(|sent| matches!(sent, FromWorker::Fetch(fetch) if fetch.version == 0))
            .count()
    };
    let first = beacon(&mut session, 1);
    session.data(first.clone());
    assert_eq!(fetches(&session), 1);
    session.now += Duration::from_secs(1);
    session.data(first);
    assert_eq!(fetches(&session), 1);
    let second = beacon(&mut session, 1);
    session.data(second);
    assert_eq!(fetches(&session), 2, "the same words, said again");
}

#[test]
fn a_change_of_keys_is_followed_and_one_that_was_missed_is_asked_for() {
    let mut session = Session::new(true);
    session.sealer.rekey(2);
    let rekey = FromPublisher::Rekey(Rekey {
        epoch: 1,
        keys: vec![session.sealer.key.clone()],
        ..Default::default()
    });
    session.control((encode(&rekey), Vec::new()));
    session.publish(&version(1));
    assert_eq!(session.took(), Some((1, version(1).data)));
    session.sealer.rekey(3);
    session.publish(&version(2));
    assert_eq!(session.took(), None, "nobody told the key");
    session.now += Duration::from_millis(1);
    let (now, before) = (session.now, session.hellos());
    session.machine.without_ticket(now); // for which a hello was said, whose answer is lost
    let effects = session.machine.tick(now);
    session.perform(effects);
    assert_eq!(session.hellos(), before, "it is too early");
    session.now += Duration::from_secs(1);
    let effects = session.machine.tick(session.now);
    session.perform(effects);
    assert_eq!(session.hellos(), before + 1, "it is not forgotten");
    let again = session.sealer.addressed(welcome(1, "tcp://*:1", BTreeMap::new()));
    session.control(again);
    session.publish(&version(3));
    assert_eq!(session.took(), Some((3, version(3).data)));
}

#[test]
fn the_header_of_a_sealed_chunk_is_neither_news_nor_a_sign_of_life() {
    let mut session = Session::new(true);
    let first = session.sealer.published(version(1).pushed(1, true).remove(0));
    session.data(first); // there is somebody
    let said = session.sent.len();
    let (key, tag) = (GroupKey::of_hex(&session.sealer.key).id, "0".repeat(32));
    let model = MODEL.to_owned();
    for (epoch, version) in [(1, (1 << 53) - 1), (2, 1)] {
        let forged = SealedChunk {
            model: model.clone(),
            epoch,
            version,
            index: 0,
            key: key.clone(),
            tag: tag.clone(),
            ..Default::default()
        };
        session.now += Duration::from_secs(4);
        session.data((encode(&FromPublisher::SealedChunk(forged)), vec![vec![0; 16]]));
    }
    assert_eq!(session.sent.len(), said, "{:?}", session.sent);
    let effects = session.machine.tick(session.now);
    assert!(matches!(effects[..], [Effect::Lost, Effect::Redial]), "{:?}", effects);
    let mut session = Session::new(true);
    let said = SealedChunk { model, epoch: 1, version: 1, index: 0, key, tag, ..Default::default() };
    session.control((encode(&FromPublisher::SealedChunk(said)), vec![vec![0; 16]]));
    assert!(matches!(session.sent[..], [FromWorker::Fetch(_)]), "what the publisher itself says is not news");
}

#[test]
fn each_ticket_is_for_one_connection() {
    let mut session = Session::new(true);
    let dials = |session: &mut Session, digit: &str| {
        let (header, payloads) = welcome(1, "tcp://*:1", BTreeMap::new());
        let text = String::from_utf8(header).unwrap();
        let features = format!("{{\"features\":[\"ticket.{}\"],\"wbp\"", digit.repeat(32));
        let text = text.replace("{\"wbp\"", &features);
        assert_eq!(payloads.len(), 0);
        let effects = session.machine.receive(text.as_bytes(), &[], session.now);
        effects
            .into_iter()
            .find_map(|effect| match effect {
                Effect::Connect { ticket, .. } => Some(ticket),
                _ => None,
            })
            .unwrap_or_default()
    };
    assert_eq!(dials(&mut session, "a"), "a".repeat(32));
    assert_eq!(dials(&mut session, "g"), "", "that is not a ticket");
    session.now += Duration::from_secs(1);
    let (now, before) = (session.now, session.hellos());
    let effects = session.machine.without_ticket(now);
    session.perform(effects);
    let effects = session.machine.without_ticket(now);
    session.perform(effects);
    assert_eq!(session.hellos(), before + 1, "asked for at the pace of hellos");
}

#[test]
fn a_worker_dials_again_after_a_refusal_for_want_of_keys() {
    let mut session = Session::new(true);
    let now = session.now;
    let refused = session.machine.shut_out("why", now);
    assert!(matches!(&refused[..], [Effect::Refused { code, text }] if code == "keys" && text == "why"));
    assert!(!session.machine.in_session());
    assert!(session.machine.shut_out("why", now).is_empty(), "it was said a moment ago");
    let ping = session.machine.timing().ping;
    assert!(session.machine.tick(now + ping / 2).is_empty());
    assert!(matches!(session.machine.tick(now + ping)[..], [Effect::Redial]));
    assert!(!session.machine.shut_out("why", now + ping).is_empty());
    let welcome = session.sealer.addressed(welcome(1, "tcp://*:1", BTreeMap::new()));
    session.now = now + ping;
    session.control(welcome);
    let effects = session.machine.tick(now + 2 * ping);
    let redials = effects.iter().any(|effect| matches!(effect, Effect::Redial));
    assert!(session.machine.in_session() && !redials, "a connection that has become good is left alone");
}
