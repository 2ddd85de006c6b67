//! The worker's state machine, without sockets, threads or clocks.
//!
//! A worker is outside a session, probes the publisher's shared memory, or is inside a session
//! (`phases::SESSIONS`). In a session, each message goes to the follower of its model. Outside,
//! staged and running versions stay as they are. The worker then repeats `hello`, so that it
//! rejoins a restarted publisher, or joins the publisher at the worker's next address.

use crate::addresses::Addresses;
use crate::ages::Ages;
use crate::companions::Companions;
use crate::effects::{Effect, Host};
use crate::follower::{Follower, ModelState};
use crate::keyring::Keyring;
use crate::limits::{Timing, BYTES_MAX};
use crate::messages::*;
use crate::patching::{Base, Patching};
use crate::phases::{next, Change, Session, SESSIONS};
use crate::reports;
use crate::sealing::{Opening, AES_256_GCM};
use crate::sources::{SourceChunk, SourceFetch};
use crate::transfer::{Key, Payload, Piece, Proof, Time};
use crate::words::escaped;
use crate::zmtp::{Place, Places, Published, PublishedPayload};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Returns the `Piece` that identifies a chunk, sealed or in the clear.
macro_rules! piece_of {
    ($chunk:expr) => {
        Piece { key: ($chunk.epoch, $chunk.version), patch: $chunk.patch.as_ref(), index: $chunk.index }
    };
}

/// A model that a worker subscribes to.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub model: String,
    /// Expected size of the versions in bytes; 0 if unknown.
    pub nbytes: u64,
}

/// State of a worker.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct State {
    /// Epoch of the session; `None` outside a session.
    pub epoch: Option<u64>,
    /// True if versions are copied from the publisher's memory.
    pub shared: bool,
    /// Malformed messages that were dropped.
    pub malformed: u64,
    /// State of each model, by id.
    pub models: BTreeMap<String, ModelState>,
}

/// The state machine of one worker.
pub struct WorkerMachine {
    timing: Timing,
    epoch: u64,
    malformed: u64, // malformed messages that were dropped
    shared: bool,   // the publisher is on this host, and its memory can be read
    session: Session,
    identity: Hello,
    followers: Vec<(Follower, u64)>, // with the expected bytes
    host: Arc<dyn Host>,
    keyring: Option<Keyring>, // decrypts sealed versions; None: versions come in the clear
    ages: Ages,
    addresses: Addresses,
    data: String,
    subscribed: bool,
    heard_at: Time, // last message of the session
    hello_at: Option<Time>,
    answered_at: Time,              // last message on the control channel
    unanswered_since: Option<Time>, // first hello or connection change after the last message
    redial_at: Option<Time>,        // set after a handshake failed for lack of the right key
    pinged_at: Option<Time>,
    ping_every: Duration,
}

impl WorkerMachine {
    /// Makes a worker of some models that accepts versions of at most `bytes_max` bytes.
    pub fn new(
        identity: Hello,
        models: &[Wanted],
        host: Arc<dyn Host>,
        bytes_max: u64,
        timing: Timing,
    ) -> WorkerMachine {
        let follower = |wanted: &Wanted| {
            (Follower::new(&wanted.model, host.clone(), bytes_max.min(BYTES_MAX), timing), wanted.nbytes)
        };
        WorkerMachine {
            timing,
            session: Session::Outside,
            epoch: 0,
            malformed: 0,
            shared: false,
            followers: models.iter().map(follower).collect(),
            identity,
            host,
            keyring: None,
            ages: Ages::default(),
            addresses: Addresses::new(1, &timing),
            data: String::new(),
            subscribed: false,
            heard_at: Time::ZERO,
            hello_at: None,
            answered_at: Time::ZERO,
            unanswered_since: None,
            redial_at: None,
            pinged_at: None,
            ping_every: timing.ping,
        }
    }

    /// Makes the worker accept only sealed messages. The encrypted control connection brings keys.
    pub fn require_sealed(&mut self) {
        self.keyring = Some(Keyring::default());
        self.followers.iter_mut().for_each(|(follower, _)| follower.require_sealed());
    }

    /// Makes the worker accept patches, and announce that in its hello.
    pub fn accept_patches(&mut self) {
        self.followers.iter_mut().for_each(|(follower, _)| follower.accept_patches());
    }

    /// Sets the number of control addresses, in order of preference; default: 1.
    pub fn use_addresses(&mut self, count: usize) {
        self.addresses = Addresses::new(count, &self.timing);
    }

    pub fn timing(&self) -> &Timing {
        &self.timing
    }

    /// Returns the state for display.
    pub fn state(&self) -> State {
        State {
            epoch: self.in_session().then_some(self.epoch),
            shared: self.shared,
            malformed: self.malformed,
            models: self
                .followers
                .iter()
                .map(|(follower, _)| (follower.model().to_owned(), follower.state()))
                .collect(),
        }
    }

    pub fn follower(&self, model: &str) -> Option<&Follower> {
        self.followers.iter().map(|(follower, _)| follower).find(|follower| follower.model() == model)
    }

    fn follower_mut(&mut self, model: &str) -> Option<&mut Follower> {
        self.followers.iter_mut().map(|(follower, _)| follower).find(|follower| follower.model() == model)
    }

    /// Calls `act` with the follower of a model, if there is one. Returns the effects.
    fn dispatch(&mut self, model: &str, act: impl FnOnce(&mut Follower) -> Vec<Effect>) -> Vec<Effect> {
        let mut effects = self.follower_mut(model).map_or_else(Vec::new, act);
        effects.extend(self.complete());
        effects
    }

    /// Makes every committed version ready that lacks no companion.
    fn complete(&mut self) -> Option<Effect> {
        let mut ready = Companions::awaited(&mut self.followers)?.complete();
        match ready.len() {
            0 | 1 => ready.pop().map(Effect::Ready),
            _ => Some(Effect::ReadyAtOnce(ready)),
        }
    }

    // Messages.

    /// Handles a message of the control channel. A malformed message is dropped.
    pub fn receive(&mut self, header: &[u8], payloads: &[&[u8]], now: Time) -> Vec<Effect> {
        let payload = payloads.first().map(|bytes| Payload::Bytes(bytes));
        let message = match self.decode(header, payloads.len()) {
            Some(message) => message,
            None => return Vec::new(),
        };
        self.answered_at = now;
        self.unanswered_since = None;
        match message {
            FromPublisher::Welcome(welcome) => self.welcome(welcome, now),
            message => self.handle(message, payload, now, false),
        }
    }

    /// Handles a published message.
    pub fn receive_published(&mut self, published: &Published<Ticket>, now: Time) -> Vec<Effect> {
        let effects = if self.in_session() { self.published(published, now) } else { Vec::new() };
        if let PublishedPayload::InPlace(ticket) = published.payload {
            self.cancel(ticket); // for a malformed or outdated message; no effect on a used ticket
        }
        effects
    }

    fn published(&mut self, published: &Published<Ticket>, now: Time) -> Vec<Effect> {
        let mut effects = Vec::new();
        if !self.subscribed {
            self.subscribed = true; // the first message shows that the subscription has arrived
            effects.push(self.ping(now));
        }
        let payload = match &published.payload {
            PublishedPayload::None => None,
            PublishedPayload::Bytes(bytes) => Some(Payload::Bytes(bytes)),
            PublishedPayload::InPlace(Ticket { lease, .. }) => Some(Payload::InPlace(*lease)),
        };
        let message = self.decode(&published.header, published.payload_count);
        match self.unseal(message, published.payload_count, true) {
            Some(FromPublisher::Welcome(_) | FromPublisher::Check(_)) | None => {}
            Some(FromPublisher::SealedChunk(chunk)) if !self.arrives(&chunk) => {} // E4: not authenticated
            Some(message) => effects.extend(self.handle(message, payload, now, true)),
        }
        effects
    }

    fn decode(&mut self, header: &[u8], payload_count: usize) -> Option<FromPublisher> {
        let message = from_publisher(header, payload_count).ok();
        self.malformed += u64::from(message.is_none());
        message
    }

    /// Returns a published message, decrypted if it was sealed; `None` if it must be ignored. For
    /// `counts`, see `Keyring::published`.
    fn unseal(
        &mut self,
        message: Option<FromPublisher>,
        payload_count: usize,
        counts: bool,
    ) -> Option<FromPublisher> {
        match &mut self.keyring {
            Some(keyring) => keyring.published(message?, payload_count, counts),
            None => message,
        }
    }

    /// Handles a decoded message. `pushed` is true if it came over the data connection.
    fn handle(
        &mut self,
        message: FromPublisher,
        payload: Option<Payload>,
        now: Time,
        pushed: bool,
    ) -> Vec<Effect> {
        if let FromPublisher::Ping(ping) = message {
            let pong = Pong { token: ping.token, ..Default::default() };
            return vec![Effect::Send(FromWorker::Pong(pong))];
        }
        if let FromPublisher::Refuse(refuse) = message {
            if self.in_session() {
                self.heard_at = now;
            }
            return self.refused(refuse, now);
        }
        if !self.in_session() || matches!(message, FromPublisher::SealedMessage(_)) {
            return Vec::new(); // no session, or a message that could not be decrypted
        }
        if epoch_of(&message) != Some(self.epoch) {
            // The publisher restarted, or our welcome was damaged. The answer to another hello
            // shows which.
            return if self.may_say_hello(now) { self.hello(now) } else { Vec::new() };
        }
        self.heard_at = now;
        match message {
            FromPublisher::Announce(announce) => self.announced(announce, payload, now, pushed),
            FromPublisher::Chunk(chunk) if self.keyring.is_none() => {
                self.chunk(&chunk.model, piece_of!(chunk), Proof::Crc(chunk.crc), payload, now, pushed)
            }
            FromPublisher::SealedChunk(chunk) if self.keyring.is_some() => {
                let opening = match payload {
                    Some(Payload::Bytes(bytes)) => self.opening(&chunk, bytes.len()),
                    _ => None, // the chunk was decrypted while it was received
                };
                self.chunk(&chunk.model, piece_of!(chunk), Proof::Sealed(opening), payload, now, pushed)
            }
            FromPublisher::Rekey(rekey) => {
                if let Some(keyring) = &mut self.keyring {
                    keyring.add(&rekey.keys, now + self.timing.lost_after); // E6
                }
                Vec::new()
            }
            FromPublisher::End(end) => self.dispatch(&end.model.clone(), |follower| follower.end(end, now)),
            FromPublisher::Commit(commit) => {
                self.dispatch(&commit.model, |follower| follower.committed(&commit))
            }
            FromPublisher::Abort(abort) => {
                self.dispatch(&abort.model, |follower| follower.aborted(&abort, now))
            }
            FromPublisher::Beacon(beacon) => {
                self.dispatch(&beacon.model, |follower| follower.hear_of(beacon.epoch, beacon.version, now))
            }
            FromPublisher::Rename(rename) => {
                self.dispatch(&rename.model.clone(), |follower| follower.renamed(rename, now))
            }
            FromPublisher::Pong(pong) => {
                for (follower, _) in &mut self.followers {
                    follower.answered(Duration::from_millis(pong.token));
                }
                self.hear_of(pong.epoch, &pong.models, now)
            }
            // Handled above; or part of a feature that this worker does not announce; or sealed or
            // in the clear although E1 forbids it.
            _ => Vec::new(),
        }
    }

    fn announced(
        &mut self,
        announce: Announce,
        payload: Option<Payload>,
        now: Time,
        pushed: bool,
    ) -> Vec<Effect> {
        let bytes = match payload {
            Some(Payload::Bytes(bytes)) => Some(bytes),
            _ => None,
        };
        let plain = match (&mut self.keyring, announce.encryption.as_deref()) {
            (None, None) => bytes.map(Cow::Borrowed),
            (Some(keyring), Some(AES_256_GCM)) => {
                match bytes.map(|bytes| keyring.decrypt(&announce, bytes)) {
                    Some(None) if announce.whole.is_none() => return Vec::new(), // its layout is requested again (E4)
                    plain => plain.flatten().map(Cow::Owned),
                }
            }
            _ => None, // the follower rejects its encryption
        };
        let bytes = plain.as_deref();
        let model = announce.model.clone();
        self.dispatch(&model, |follower| match announce.whole.clone() {
            Some(whole) => follower.announced_whole(announce, whole, bytes.unwrap_or_default(), now),
            None => follower.announced(announce, bytes, now, pushed),
        })
    }

    fn chunk(
        &mut self,
        model: &str,
        piece: Piece,
        proof: Proof,
        payload: Option<Payload>,
        now: Time,
        pushed: bool,
    ) -> Vec<Effect> {
        match payload {
            Some(payload) => {
                self.dispatch(model, |follower| follower.chunk(piece, proof, payload, now, pushed))
            }
            None => Vec::new(),
        }
    }

    fn hear_of(&mut self, epoch: u64, models: &BTreeMap<String, u64>, now: Time) -> Vec<Effect> {
        let heard = models.iter().map(|(model, &version)| {
            self.follower_mut(model).map_or_else(Vec::new, |follower| follower.hear_of(epoch, version, now))
        });
        heard.flatten().collect()
    }

    fn refused(&mut self, refuse: Refuse, now: Time) -> Vec<Effect> {
        match refuse.code.as_str() {
            "unknown-worker" => {
                self.change_session(Change::Unknown);
                if self.may_say_hello(now) {
                    self.hello(now)
                } else {
                    Vec::new()
                }
            }
            "gone" | "range" => match (self.in_session(), refuse.model) {
                (true, Some(model)) => {
                    self.dispatch(&model, |follower| follower.gone(refuse.epoch, refuse.version, now))
                }
                _ => Vec::new(),
            },
            "no-patch" => match (self.in_session(), refuse.model) {
                (true, Some(model)) => {
                    self.dispatch(&model, |follower| follower.no_patch((refuse.epoch, refuse.version), now))
                }
                _ => Vec::new(),
            },
            "name-taken" | "stale-epoch" | "limit" | "protocol-version" | "wrong-name" | "not-allowed"
            | "revoked" => self.turned_away(refuse.code, escaped(&refuse.text), now),
            _ => vec![Effect::Notice { code: escaped(&refuse.code), text: escaped(&refuse.text) }],
        }
    }

    // Joining.

    pub fn in_session(&self) -> bool {
        self.session == Session::Inside
    }

    /// True if a hello is due as soon as there is a connection.
    pub fn wants_to_join(&self, now: Time) -> bool {
        self.session == Session::Outside && self.may_say_hello(now)
    }

    /// Sets the number of tensors that the user's model has.
    pub fn expect_tensors(&mut self, model: &str, count: usize) {
        if let Some(follower) = self.follower_mut(model) {
            follower.expect_tensors(count);
        }
    }

    /// Returns the size in bytes of the largest payload that any model accepts.
    pub fn payload_bytes_max(&self) -> u64 {
        self.followers.iter().map(|(follower, _)| follower.payload_bytes_max()).max().unwrap_or(0)
    }

    /// Changes the session according to `SESSIONS`. Returns true if the table has this transition.
    fn change_session(&mut self, change: Change) -> bool {
        let session = next(SESSIONS, self.session, change);
        self.session = session.unwrap_or(self.session);
        session.is_some()
    }

    /// Returns the greatest epoch of the applied versions. Publishers of earlier epochs are not
    /// followed.
    pub fn applied_epoch(&self) -> u64 {
        self.followers.iter().map(|(follower, _)| follower.epoch()).max().unwrap_or(0)
    }

    /// True if enough time has passed since the last hello.
    pub fn may_say_hello(&self, now: Time) -> bool {
        self.hello_at.map_or(true, |at| now.saturating_sub(at) >= self.timing.hello_retry)
    }

    fn hello(&mut self, now: Time) -> Vec<Effect> {
        self.hello_at = Some(now);
        self.unanswered_since = self.unanswered_since.or(Some(now));
        let running =
            self.followers.iter().map(|(follower, _)| (follower.model().to_owned(), follower.running()));
        let patches = self.followers.iter().any(|(follower, _)| follower.accepts_patches());
        let epoch = self.applied_epoch();
        vec![reports::hello(&self.identity, running.collect(), epoch, self.ages.of(epoch, now), patches)]
    }

    fn welcome(&mut self, welcome: Welcome, now: Time) -> Vec<Effect> {
        if welcome.epoch < self.applied_epoch() {
            let text = format!(
                "the publisher is of epoch {}, but this worker runs weights of the later epoch {}: \
                 connect it to the newer publisher",
                welcome.epoch,
                self.applied_epoch()
            );
            let code = "stale-epoch".to_owned();
            if self.addresses.are_several() {
                return self.turned_away(code, text, now);
            }
            return vec![Effect::Refused { code, text }];
        }
        self.ages.heard(welcome.epoch, welcome.age_ms, self.applied_epoch(), now);
        let ticket = token_of(&welcome.features, TICKET).to_owned();
        if self.in_session() && welcome.epoch == self.epoch {
            return self.welcome_again(welcome, ticket, now);
        }
        if let Some(keyring) = &mut self.keyring {
            keyring.begin(&welcome.keys, now + self.timing.lost_after);
        }
        self.shared = welcome.shared.as_ref().map_or(false, |probe| self.probe(probe));
        self.change_session(Change::Welcomed);
        self.epoch = welcome.epoch;
        (self.heard_at, self.redial_at) = (now, None);
        self.addresses.joined(now);
        self.ping_every = self.timing.ping.min(Duration::from_millis(welcome.ping_ms));
        self.subscribed = false;
        let mut effects = vec![Effect::Joined { epoch: welcome.epoch }];
        if !ticket.is_empty() || welcome.data != self.data {
            self.data = welcome.data.clone();
            effects.push(Effect::Connect { endpoint: welcome.data.clone(), ticket });
            // K7
        }
        if self.shared {
            effects.push(self.ping(now)); // before anything is pushed or hashed for this worker
        }
        for (follower, nbytes) in &mut self.followers {
            effects.push(Effect::Subscribe { topic: control_topic(follower.model()), on: true });
            let version = welcome.models.get(follower.model()).copied().unwrap_or(0);
            effects.extend(follower.reconnected((welcome.epoch, version), *nbytes, self.shared, now));
        }
        effects
    }

    /// Tries to open the publisher's shared memory. Returns true if the memory can be read.
    fn probe(&mut self, shared: &Shared) -> bool {
        self.change_session(Change::Located);
        self.host.open(shared, 0).is_some()
    }

    /// Handles another welcome in the same session, which answers a repeated hello.
    fn welcome_again(&mut self, welcome: Welcome, ticket: String, now: Time) -> Vec<Effect> {
        self.heard_at = now;
        if let Some(keyring) = &mut self.keyring {
            keyring.add(&welcome.keys, now + self.timing.lost_after);
        }
        let mut effects = self.hear_of(welcome.epoch, &welcome.models, now);
        if !ticket.is_empty() {
            effects.push(Effect::Connect { endpoint: self.data.clone(), ticket });
        }
        effects
    }

    /// True if the publisher has been silent for too long, or the control connection is presumed
    /// dead, which TCP detects late.
    ///
    /// Each attempt to dial calls `changed`, which restarts the timeout of `unanswered_since`. If it
    /// passes during a long name lookup, the redial that follows does not interrupt the lookup.
    fn is_silent(&self, now: Time) -> bool {
        let for_so_long = |since, time| now.saturating_sub(since) >= time;
        let Timing { lost_after, deaf_after, .. } = self.timing;
        if self.unanswered_since.map_or(false, |since| for_so_long(since, lost_after)) {
            return true;
        }
        // A frame whose length was damaged swallows all messages until it is full.
        let deaf = for_so_long(self.answered_at, deaf_after);
        self.session != Session::Outside && (deaf || for_so_long(self.heard_at, lost_after))
    }

    /// Ends the session, if there is one, and dials the address again, or the next of several.
    fn reconnect(&mut self, now: Time) -> Vec<Effect> {
        (self.unanswered_since, self.redial_at) = (None, None);
        let lost = self.change_session(Change::Silent).then_some(Effect::Lost);
        let redial = if self.addresses.are_several() { self.change_over(now) } else { vec![Effect::Redial] };
        lost.into_iter().chain(redial).collect()
    }

    /// Handles a control connection that ended or could not be opened. With one address, `Control`
    /// dials again, and the session may go on.
    pub fn disconnected(&mut self, now: Time) -> Vec<Effect> {
        if self.addresses.are_several() {
            self.reconnect(now)
        } else {
            Vec::new()
        }
    }

    /// Ends the session, since the publisher refuses this worker. With several addresses, the next
    /// one is tried.
    fn turned_away(&mut self, code: String, text: String, now: Time) -> Vec<Effect> {
        self.change_session(Change::Refused);
        let mut effects = vec![Effect::Refused { code, text }];
        if self.addresses.are_several() {
            effects.extend(self.change_over(now));
        }
        effects
    }

    fn change_over(&mut self, now: Time) -> Vec<Effect> {
        let (to, pause) = self.addresses.advance(now);
        self.forget_publisher();
        vec![Effect::ChangeOver { to, pause }]
    }

    /// Forgets the state of the publisher at one address, before the worker dials another address.
    fn forget_publisher(&mut self) {
        (self.unanswered_since, self.hello_at) = (None, None);
        self.data.clear(); // on another host, the same text is another endpoint
    }

    /// Handles the result of a probe: the worker returns to the first address if a publisher answers.
    pub fn probed(&mut self, answers: bool, now: Time) -> Vec<Effect> {
        self.addresses.probed(now);
        if !answers || !self.in_session() || self.addresses.is_first() {
            return Vec::new();
        }
        let mut effects = self.close();
        self.change_session(Change::Silent);
        let to = self.addresses.go_back(now);
        self.forget_publisher();
        effects.push(Effect::ChangeOver { to, pause: Duration::ZERO });
        effects
    }

    /// Handles a handshake that failed for lack of the right key: the worker redials after a pause,
    /// or dials its next address. `why` is the error message.
    pub fn shut_out(&mut self, why: &str, now: Time) -> Vec<Effect> {
        if self.redial_at.is_some() {
            return Vec::new();
        }
        if !self.addresses.are_several() {
            self.redial_at = Some(now + self.timing.ping); // K5
        }
        self.turned_away("keys".to_owned(), why.to_owned(), now)
    }

    /// Handles the loss of the data connection and of its ticket. If a hello is due, returns it:
    /// the hello requests another ticket.
    pub fn without_ticket(&mut self, now: Time) -> Vec<Effect> {
        if self.in_session() && self.may_say_hello(now) {
            self.hello(now) // K7
        } else {
            Vec::new()
        }
    }

    /// Notes that the control connection opened or broke, or that an attempt to connect began or
    /// failed.
    pub fn changed(&mut self, now: Time) {
        self.unanswered_since = Some(now);
    }

    /// Handles an open control connection: returns a hello if one is due.
    pub fn connected(&mut self, now: Time) -> Vec<Effect> {
        if self.wants_to_join(now) {
            self.hello(now)
        } else {
            Vec::new()
        }
    }

    /// Returns a `bye`, even outside a session: the publisher may have received our hello although
    /// its welcome has not arrived.
    pub fn close(&self) -> Vec<Effect> {
        vec![Effect::Send(FromWorker::Bye(Bye::default()))]
    }

    // Reports of the user's threads.

    /// Notes that a user's thread has begun to apply a ready version.
    pub fn taken(&mut self, model: &str, key: Key) {
        if let Some(follower) = self.follower_mut(model) {
            follower.taken(key);
        }
    }

    /// Handles a ready version that was applied and runs now. `digest` is empty if the version was
    /// not hashed. Patches may build on `base`. `note` is a text about values that the model's
    /// dtypes cannot hold; empty if there are none.
    pub fn applied(
        &mut self,
        model: &str,
        key: Key,
        digest: &str,
        base: Option<Base>,
        note: &str,
        now: Time,
    ) -> Vec<Effect> {
        self.dispatch(model, |follower| follower.applied(key, digest, base, note, now))
    }

    /// Handles a ready version that was overwritten in shared memory before it was copied.
    pub fn stale(&mut self, model: &str, key: Key, now: Time) -> Vec<Effect> {
        self.dispatch(model, |follower| follower.gone_stale(key, now))
    }

    /// Handles a ready version that could not be applied. Unless `intact`, no version runs now.
    pub fn failed(&mut self, model: &str, key: Key, text: &str, intact: bool, now: Time) -> Vec<Effect> {
        self.dispatch(model, |follower| follower.failed(key, text, intact, now))
    }

    /// Handles a ready version that was not applied since a companion is torn.
    pub fn failed_for_now(&mut self, model: &str, key: Key, text: &str, now: Time) -> Vec<Effect> {
        self.dispatch(model, |follower| follower.failed_for_now(key, text, now))
    }

    /// Notes that a user's thread could not apply a version yet, so that the version is ready
    /// again.
    pub fn put_back(&mut self, model: &str, key: Key) {
        if let Some(follower) = self.follower_mut(model) {
            follower.put_back(key);
        }
    }

    /// Handles a ready version that was replaced before a thread took it.
    pub fn dropped(&mut self, model: &str, key: Key, now: Time) -> Vec<Effect> {
        self.dispatch(model, |follower| follower.dropped(key, now))
    }

    /// Handles the result of decoding a patch: the duration, or the reason that the patch cannot be
    /// used.
    pub fn decoded(&mut self, decoding: Patching, done: Result<Duration, String>, now: Time) -> Vec<Effect> {
        self.dispatch(&decoding.model.clone(), |follower| follower.decoded(decoding, done, now))
    }

    /// Returns the hello for a source of a version of this model (N1).
    pub fn hello_for(&self, model: &str) -> Hello {
        Hello { models: [(model.to_owned(), None)].into(), ..self.identity.clone() }
    }

    /// Handles a chunk of a version, from a source.
    pub fn source_chunk(&mut self, model: &str, key: Key, chunk: &SourceChunk, now: Time) -> Vec<Effect> {
        self.dispatch(model, |follower| follower.source_chunk(key, chunk, now))
    }

    /// Handles the end of a source's job; `done` is an error if the source has not sent all chunks.
    pub fn source_over(&mut self, job: &SourceFetch, done: Result<(), String>, now: Time) -> Vec<Effect> {
        let key = (job.subject.epoch, job.subject.version);
        self.dispatch(&job.subject.model, |follower| follower.source_over(key, job, done, now))
    }

    // Time.

    /// Returns the effects that are due.
    pub fn tick(&mut self, now: Time) -> Vec<Effect> {
        if let Some(keyring) = &mut self.keyring {
            keyring.expire(now);
        }
        if self.is_silent(now) || self.redial_at.map_or(false, |at| now >= at) {
            return self.reconnect(now);
        }
        if !self.in_session() {
            return Vec::new();
        }
        let mut effects = Vec::new();
        if self.addresses.take_probe(now) {
            effects.push(Effect::Probe);
        }
        let lacks = self.keyring.as_ref().map_or(false, Keyring::lacks_key);
        let outdated = self.applied_epoch() > self.epoch; // an overdue apply raised the epoch (W3)
        if (lacks || outdated) && self.may_say_hello(now) {
            effects.extend(self.hello(now)); // the welcome brings the key (E6)
        }
        effects.extend(self.followers.iter_mut().flat_map(|(follower, _)| follower.tick(now)));
        effects.extend(self.complete());
        if self.pinged_at.map_or(true, |at| now.saturating_sub(at) >= self.ping_every) {
            self.pinged_at = Some(now);
            effects.push(self.ping(now));
            effects.extend(self.followers.iter().flat_map(|(follower, _)| follower.repeat()));
        }
        effects
    }

    /// Returns a ping with the current time, which the pong repeats (W12, W18).
    fn ping(&self, now: Time) -> Effect {
        reports::ping(now, self.subscribed, self.shared)
    }
}

/// Returns the epoch of a message that is valid in one epoch only; `None` for other messages.
fn epoch_of(message: &FromPublisher) -> Option<u64> {
    match message {
        FromPublisher::Announce(announce) => Some(announce.epoch),
        FromPublisher::Chunk(chunk) => Some(chunk.epoch),
        FromPublisher::End(end) => Some(end.epoch),
        FromPublisher::Commit(commit) => Some(commit.epoch),
        FromPublisher::Abort(abort) => Some(abort.epoch),
        FromPublisher::Beacon(beacon) => Some(beacon.epoch),
        FromPublisher::Rename(rename) => Some(rename.epoch),
        FromPublisher::Pong(pong) => Some(pong.epoch),
        FromPublisher::SealedChunk(chunk) => Some(chunk.epoch),
        FromPublisher::Rekey(rekey) => Some(rekey.epoch),
        FromPublisher::Prepare(prepare) => Some(prepare.epoch),
        FromPublisher::Check(check) => Some(check.epoch),
        // This worker does not name the feature `parts`.
        FromPublisher::Piece(piece) => Some(piece.epoch),
        FromPublisher::Checksums(sums) => Some(sums.epoch),
        FromPublisher::Welcome(_)
        | FromPublisher::Refuse(_)
        | FromPublisher::Ping(_)
        | FromPublisher::SealedMessage(_) => None,
    }
}

impl WorkerMachine {
    /// True if the version of a chunk is arriving.
    fn arrives(&self, chunk: &SealedChunk) -> bool {
        self.follower(&chunk.model).map_or(false, |follower| follower.arrives((chunk.epoch, chunk.version)))
    }

    /// Returns the `Opening` of a chunk; `None` if the chunk's version is not arriving, or its
    /// encryption key is not known.
    fn opening(&mut self, chunk: &SealedChunk, size: usize) -> Option<Opening> {
        let key = (chunk.epoch, chunk.version);
        let subject = self.follower(&chunk.model)?.subject(key, chunk.patch.as_ref())?;
        self.keyring.as_mut()?.opening(&subject, chunk, size)
    }

    /// Leases the buffer space of a chunk whose payload is about to be received.
    fn lease(&mut self, model: &str, piece: Piece, size: usize, opening: Option<Opening>) -> Place<Ticket> {
        let follower = self.followers.iter().position(|(follower, _)| follower.model() == model);
        let found = follower.and_then(|at| Some((at, self.followers[at].0.lease(piece, size, opening)?)));
        found.map_or(Place::Nowhere, |(follower, lease)| Place::InBuffer(Ticket { follower, lease }))
    }
}

/// The lease for a pushed chunk: the index of the chunk's follower, and the id of the lease there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ticket {
    follower: usize,
    lease: u64,
}

impl Places for WorkerMachine {
    type Ticket = Ticket;

    fn place(&mut self, header: &[u8], size: usize) -> Place<Ticket> {
        if !self.in_session() {
            return Place::Nowhere;
        }
        let message = from_publisher(header, 1).ok();
        match self.unseal(message, 1, false) {
            Some(FromPublisher::Announce(announce)) if announce.epoch == self.epoch => {
                let expected = if announce.whole.is_some() { announce.nbytes } else { announce.layout_bytes };
                if self.follower(&announce.model).is_some() && size as u64 == expected {
                    return Place::NewMemory;
                }
                Place::Nowhere
            }
            Some(FromPublisher::Chunk(chunk)) if chunk.epoch == self.epoch && self.keyring.is_none() => {
                self.lease(&chunk.model, piece_of!(chunk), size, None)
            }
            Some(FromPublisher::SealedChunk(chunk)) if chunk.epoch == self.epoch => {
                match self.opening(&chunk, size) {
                    None => Place::Nowhere,
                    opening => self.lease(&chunk.model, piece_of!(chunk), size, opening),
                }
            }
            _ => Place::Nowhere,
        }
    }

    fn unfilled(&mut self, ticket: Ticket) -> Option<&mut [u8]> {
        self.followers.get_mut(ticket.follower)?.0.leased()?.unfilled(ticket.lease)
    }

    fn received(&mut self, ticket: Ticket, count: usize) {
        if let Some(transfer) =
            self.followers.get_mut(ticket.follower).and_then(|(follower, _)| follower.leased())
        {
            transfer.received(ticket.lease, count);
        }
    }

    fn cancel(&mut self, ticket: Ticket) {
        if let Some(transfer) =
            self.followers.get_mut(ticket.follower).and_then(|(follower, _)| follower.leased())
        {
            transfer.cancel(ticket.lease);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::AnyLayout;

    fn machine() -> WorkerMachine {
        let identity = Hello { name: "w".to_owned(), instance: "0".repeat(32), ..Hello::default() };
        let wanted = [Wanted { model: "m".to_owned(), nbytes: 0 }];
        WorkerMachine::new(identity, &wanted, Arc::new(AnyLayout), 1 << 20, Timing::default())
    }

    fn seconds(count: f64) -> Time {
        Duration::from_secs_f64(count)
    }

    fn tell(machine: &mut WorkerMachine, message: &str, at: f64) {
        let header = format!("{{\"wbp\":1,\"type\":{}}}", message);
        machine.receive(header.as_bytes(), &[], seconds(at));
    }

    fn inside(at: f64) -> WorkerMachine {
        let mut machine = machine();
        let welcome = r#""welcome","epoch":1,"data":"tcp://*:1","ping_ms":1000,"lost_ms":5000,"models":{}"#;
        tell(&mut machine, welcome, at);
        machine
    }

    #[test]
    fn silence_is_loss() {
        let mut machine = inside(100.0);
        machine.tick(seconds(104.9));
        assert!(machine.in_session());
        let effects = machine.tick(seconds(105.0));
        assert!(matches!(effects[..], [Effect::Lost, Effect::Redial]), "{:?}", effects);
        assert!(!machine.in_session());
        assert!(!machine.connected(seconds(105.0)).is_empty(), "it joins again");
    }

    #[test]
    fn whoever_gets_no_answer_calls_again_on_new_connections() {
        let mut machine = machine();
        assert!(machine.tick(seconds(200.0)).is_empty(), "nobody was there to say hello to");
        machine.connected(seconds(200.0));
        assert!(machine.tick(seconds(204.9)).is_empty());
        machine.connected(seconds(204.9)); // a repetition is not an answer
        let effects = machine.tick(seconds(205.0));
        assert!(matches!(effects[..], [Effect::Redial]), "{:?}", effects);
        assert!(machine.tick(seconds(211.0)).is_empty(), "the new connection is not there yet");
        machine.connected(seconds(212.0));
        tell(&mut machine, r#""refuse","code":"name-taken","text":"why""#, 212.0);
        assert!(machine.tick(seconds(217.0)).is_empty(), "it is refused, which is an answer");
    }

    #[test]
    fn a_connection_that_was_given_up_is_made_anew_though_no_hello_could_be_said() {
        let mut machine = machine();
        assert!(machine.tick(seconds(200.0)).is_empty(), "a name is being looked up");
        machine.changed(seconds(200.0));
        machine.changed(seconds(203.0));
        assert!(machine.tick(seconds(207.9)).is_empty(), "ZeroMQ is trying");
        assert!(matches!(machine.tick(seconds(208.0))[..], [Effect::Redial]));
        assert!(machine.tick(seconds(300.0)).is_empty(), "the new connection has not been tried yet");
        machine.changed(seconds(300.0));
        assert!(matches!(machine.tick(seconds(305.0))[..], [Effect::Redial]));
    }

    #[cfg(feature = "keys")]
    #[test]
    fn the_older_key_is_over_in_time_outside_a_session_too() {
        let keys = ["20", "40"].map(|digits| digits.repeat(32));
        let lacks_the_older_one = |machine: &mut WorkerMachine| {
            let key = crate::sealing::GroupKey::of_hex(&keys[0]).id;
            let sealed = SealedMessage { key, count: 1, ..Default::default() };
            let keyring = machine.keyring.as_mut().unwrap();
            keyring.published(FromPublisher::SealedMessage(sealed), 0, true);
            keyring.lacks_key()
        };
        let mut machine = machine();
        machine.require_sealed();
        let welcome =
            r#""welcome","epoch":1,"data":"tcp://*:1","ping_ms":1000,"lost_ms":5000,"models":{},"keys":"#;
        tell(&mut machine, &format!("{}[{:?}]", welcome, keys[0]), 100.0);
        tell(&mut machine, &format!(r#""rekey","epoch":1,"keys":[{:?}]"#, keys[1]), 100.0);
        tell(&mut machine, r#""refuse","code":"unknown-worker","text":"who?""#, 100.0);
        machine.tick(seconds(104.9));
        assert!(!machine.in_session() && !lacks_the_older_one(&mut machine));
        machine.tick(seconds(105.0));
        assert!(lacks_the_older_one(&mut machine));
    }

    #[test]
    fn a_control_connection_that_broke_ends_the_session_if_nothing_comes_of_it() {
        let mut machine = inside(100.0);
        machine.changed(seconds(100.0));
        machine.heard_at = seconds(104.0); // something was published
        assert!(!machine.tick(seconds(104.9)).iter().any(|effect| matches!(effect, Effect::Redial)));
        let effects = machine.tick(seconds(105.0));
        assert!(matches!(effects[..], [Effect::Lost, Effect::Redial]), "{:?}", effects);
    }
}
