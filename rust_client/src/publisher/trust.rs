//! Keys, as a publisher's machine knows them: who may say what, tickets, and what becomes of those whose key is
//! revoked. Where there are none everybody may do everything.

use super::effects::{Effect, Payload};
use super::grants::{ByKey, Grants, Role};
use super::machine::PublisherMachine;
use crate::messages::*;
use crate::transfer::Time;
use std::time::Duration;

const TICKET: &str = "ticket";
const TICKET_LIFE: Duration = Duration::from_secs(30); // a host is looked up and dialled in some ten
const REVOKED: &str = "this publisher does not allow the key any more: ask whoever keeps its folder of keys";

/// What a publisher with keys knows.
pub struct Trust {
    pub(super) grants: Grants,
    group: String, // the group key, as workers are told it
}

/// Whose a data connection is: name and key of a worker.
pub type Owner = (String, String);

impl PublisherMachine {
    /// Lets nobody in but those whose key is granted something, and tells them this group key.
    pub fn trust(mut self, by_key: ByKey, group: String) -> PublisherMachine {
        self.trust = Some(Trust { grants: Grants::new(by_key), group });
        self
    }

    /// Whether the owner of a key may connect.
    pub fn may_come(&self, key: &str) -> bool {
        self.trust.as_ref().map_or(true, |trust| trust.grants.of(key).is_some())
    }

    /// Whether a worker may have a data connection.
    pub fn may_read(&self, (name, key): &Owner) -> bool {
        self.trust.as_ref().map_or(true, |trust| trust.grants.may_read(name, key))
    }

    /// Whether the owner of a key may look on (K4).
    pub(super) fn may_look_on(&self, key: &str) -> bool {
        let grants = self.trust.as_ref().map(|trust| &trust.grants);
        grants.map_or(true, |grants| grants.of(key).map_or(false, |grant| grant.role == Role::Observer))
    }

    /// The group keys that a worker is told.
    pub(super) fn group_keys(&self) -> Vec<String> {
        self.trust.iter().map(|trust| trust.group.clone()).collect()
    }

    /// Refuses whoever has a key that is not allowed any more (K8).
    pub(super) fn refuse_revoked(&mut self, to: &[u8]) {
        self.refuse(to, "revoked", REVOKED, None);
    }

    /// Why a worker with this key may not be called so, if it may not: with a code (K3, K4).
    pub(super) fn misfit(&self, key: &str, name: &str) -> Option<(&'static str, String)> {
        let grant = self.trust.as_ref()?.grants.of(key)?;
        if !grant.fits(name) {
            let text =
                format!("its key is for the name {}; use that, or make a key for this one", grant.name);
            return Some(("wrong-name", text));
        }
        let observer = grant.role == Role::Observer;
        observer.then(|| {
            ("not-allowed", "an observer's key reads how things stand, and gets no weights".to_owned())
        })
    }

    /// Lets these keys in from now on, and no others.
    pub fn grant(&mut self, by_key: ByKey, now: Time) -> Vec<Effect> {
        if self.trust.as_mut().map_or(false, |trust| trust.grants.replace(by_key)) {
            self.revoke(now);
        }
        self.finish()
    }

    /// What keys may do has changed: sends those away that may not be here any more (K8).
    fn revoke(&mut self, now: Time) {
        self.perform(Effect::Screen); // before anything else is published
        let owner = |peer: &super::roster::Peer| (peer.hello.name.clone(), peer.key.clone());
        let gone: Vec<Owner> = self.roster.iter().map(owner).filter(|owner| !self.may_read(owner)).collect();
        for (name, _) in gone {
            if let Some(to) = self.roster.get(&name).map(|peer| peer.identity.clone()) {
                self.refuse_revoked(&to);
            }
            self.leave(&name, "its key was revoked", now);
        }
    }

    // Group keys.

    /// There is another group key: has everybody who is there say something, to which it is the answer (E6).
    ///
    /// Nobody is told a secret unasked: a connection may be another's by the time that it goes out.
    pub fn rekeyed(&mut self, group: String) -> Vec<Effect> {
        if let Some(trust) = &mut self.trust {
            trust.group = group;
        }
        let mut asked = Vec::new();
        for peer in self.roster.iter_mut() {
            peer.rekey();
            asked.extend(Some(peer.identity.clone()).filter(|_| !peer.lost()));
        }
        for to in asked {
            let message = FromPublisher::Ping(Ping::default());
            self.perform(Effect::Send { to, message, payload: Payload::None });
        }
        self.finish()
    }

    /// A worker has said something on its own connection: tells it a group key that is news.
    pub(super) fn tell_keys(&mut self, name: &str) {
        let due = self.roster.get_mut(name).map_or(false, |peer| peer.takes_key());
        if due {
            let (epoch, keys) = (self.epoch(), self.group_keys());
            self.say(name, FromPublisher::Rekey(Rekey { epoch, keys }));
        }
    }

    // Tickets.

    /// Gives a worker a ticket for its data connection, in place of one that it has not shown yet (K6).
    pub(super) fn ticket_for(&mut self, name: &str, now: Time) -> Vec<String> {
        let ticket = match self.draw.as_ref().and_then(|draw| draw()) {
            Some(drawn) => drawn,
            None => return Vec::new(),
        };
        self.roster.ticket(name, &ticket, now);
        vec![format!("{}.{}", TICKET, ticket)]
    }

    /// Whose ticket somebody has shown, for the only time; nothing: nobody's.
    pub fn redeem(&mut self, ticket: &str, now: Time) -> Option<Owner> {
        let (name, drawn_at) = self.roster.redeem(ticket)?;
        let peer = self.roster.get(&name).filter(|_| now.saturating_sub(drawn_at) < TICKET_LIFE)?;
        Some((name, peer.key.clone()))
    }

    /// Says of a worker that is there that somebody else's key came on its connection.
    pub(super) fn is_of_another(&self, name: Option<&str>, key: &str) -> bool {
        name.and_then(|name| self.roster.get(name)).map_or(false, |peer| peer.key != key)
    }
}
