//! Checks what the owners of keys may do, and handles tickets, group keys and revocation. Without keys,
//! every peer may do everything.

use super::effects::{Effect, Payload};
use super::grants::{ByKey, Grant, Grants, Role};
use super::machine::PublisherMachine;
use super::roster::{is_relay, Peer};
use crate::limits::TICKET_SECONDS;
use crate::messages::*;
use crate::transfer::Time;
use std::time::Duration;

const TICKET_LIFE: Duration = Duration::from_secs(TICKET_SECONDS);
const REVOKED: &str = "this publisher does not allow the key any more: ask the owner of its folder of keys";

const NO_RELAY: &str = "its key is a worker's, which may not pass versions on: make a relay's with \
    `weightbus keygen DIR --relay NAME`";

/// The permissions and the group key of a publisher with keys.
pub struct Trust {
    pub(super) grants: Grants,
    group_key: String, // as it is sent to workers
}

/// The owner of a data connection: the name and the key of a worker.
pub type Owner = (String, String);

impl PublisherMachine {
    /// Makes the machine admit only peers with these keys, and send this group key to workers.
    pub fn trust(mut self, by_key: ByKey, group_key: String) -> PublisherMachine {
        self.trust = Some(Trust { grants: Grants::new(by_key), group_key });
        self
    }

    /// True if the owner of a key may connect.
    pub fn may_connect(&self, key: &str) -> bool {
        self.trust.as_ref().map_or(true, |trust| trust.grants.get(key).is_some())
    }

    /// True if a worker with this name and key may have a data connection.
    pub fn may_read(&self, (name, key): &Owner) -> bool {
        self.trust.as_ref().map_or(true, |trust| trust.grants.may_read(name, key))
    }

    /// True if the owner of a key may observe (K4).
    pub(super) fn may_observe(&self, key: &str) -> bool {
        let grants = self.trust.as_ref().map(|trust| &trust.grants);
        grants.map_or(true, |grants| grants.get(key).map_or(false, |grant| grant.role == Role::Observer))
    }

    /// Returns the group key for a worker, in a list; an empty list without keys.
    pub(super) fn group_keys(&self) -> Vec<String> {
        self.trust.iter().map(|trust| trust.group_key.clone()).collect()
    }

    /// Refuses a peer whose key is no longer allowed (K8).
    pub(super) fn refuse_revoked(&mut self, to: &[u8]) {
        self.refuse(to, "revoked", REVOKED, None);
    }

    /// Returns the code and the text of the refusal, if the owner of this key may not join under its name,
    /// or not as a relay. Returns `None` if the owner may join (K3, K4, K11).
    pub(super) fn key_refusal(&self, key: &str, hello: &Hello) -> Option<(&'static str, String)> {
        let grant = self.trust.as_ref()?.grants.get(key)?;
        if !grant.fits(&hello.name) {
            let text =
                format!("its key is for the name {}; use that, or make a key for this one", grant.name);
            return Some(("wrong-name", text));
        }
        let text = match grant.role {
            Role::Observer => "an observer's key may only watch: give a worker a key of its own",
            Role::Worker if is_relay(hello) => NO_RELAY,
            _ => return None,
        };
        Some(("not-allowed", text.to_owned()))
    }

    /// Allows these keys from now on, and no others. Removes workers whose keys are not allowed any more.
    pub fn grant(&mut self, by_key: ByKey, now: Time) -> Vec<Effect> {
        if self.trust.as_mut().map_or(false, |trust| trust.grants.replace(by_key)) {
            self.revoke(now);
        }
        self.finish()
    }

    /// Closes the data connections of workers whose keys are not allowed any more, and removes these workers
    /// (K8).
    fn revoke(&mut self, now: Time) {
        self.perform(Effect::CloseRevoked); // first, so that these workers can decrypt nothing more
        let grants = self.trust.as_ref().map(|trust| &trust.grants);
        let admits = |peer: &Peer, grant: &Grant| grant.admits(&peer.hello.name, peer.is_relay());
        let may_stay = |peer: &&Peer| {
            grants.map_or(true, |grants| grants.get(&peer.key).map_or(false, |grant| admits(peer, grant)))
        };
        let here = self.roster.iter().filter(|peer| peer.in_session());
        let revoked: Vec<String> =
            here.filter(|peer| !may_stay(peer)).map(|peer| peer.hello.name.clone()).collect();
        for name in revoked {
            if let Some(to) = self.roster.get(&name).map(|peer| peer.identity.clone()) {
                self.refuse_revoked(&to);
            }
            self.leave(&name, "its key was revoked", now);
        }
    }

    // Group keys.

    /// Sets a new group key, and pings every live worker. Each worker gets the key in reply to its next
    /// message (E6). A secret is only sent in reply to a message, because the connection could meanwhile
    /// belong to another peer.
    pub fn set_group_key(&mut self, group_key: String) -> Vec<Effect> {
        if let Some(trust) = &mut self.trust {
            trust.group_key = group_key;
        }
        let mut recipients = Vec::new();
        for peer in self.roster.iter_mut() {
            peer.require_key();
            recipients.extend(Some(peer.identity.clone()).filter(|_| !peer.is_lost() && peer.in_session()));
        }
        for to in recipients {
            let message = FromPublisher::Ping(Ping::default());
            self.perform(Effect::Send { to, message, payload: Payload::None });
        }
        self.finish()
    }

    /// Sends the group key to a worker that does not have it yet, in reply to a message on the worker's
    /// control connection.
    pub(super) fn send_group_key(&mut self, name: &str) {
        let due = self.roster.get_mut(name).map_or(false, |peer| peer.take_key_due());
        if due {
            let (epoch, keys) = (self.epoch(), self.group_keys());
            self.send_header(name, FromPublisher::Rekey(Rekey { epoch, keys, ..Default::default() }));
        }
    }

    // Tickets.

    /// Returns the feature with a new ticket for a worker's data connection. The worker's previous ticket
    /// becomes invalid (K6).
    pub(super) fn ticket_for(&mut self, name: &str, now: Time) -> Vec<String> {
        let ticket = match self.draw.as_ref().and_then(|draw| draw()) {
            Some(drawn) => drawn,
            None => return Vec::new(),
        };
        self.roster.set_ticket(name, &ticket, now);
        vec![format!("{}.{}", TICKET, ticket)]
    }

    /// Redeems a ticket, which is valid once and for a limited time. Returns the name and the key of its
    /// worker; `None` if the ticket is invalid.
    pub fn redeem(&mut self, ticket: &str, now: Time) -> Option<Owner> {
        let (name, drawn_at) = self.roster.redeem(ticket)?;
        let peer = self.roster.get(&name).filter(|_| now.saturating_sub(drawn_at) < TICKET_LIFE)?;
        Some((name, peer.key.clone()))
    }

    /// True if the worker `name`, which a connection claims to be, joined with another key than `key`, that of
    /// the connection.
    pub(super) fn belongs_to_other_key(&self, name: Option<&str>, key: &str) -> bool {
        name.and_then(|name| self.roster.get(name)).map_or(false, |peer| peer.key != key)
    }
}
