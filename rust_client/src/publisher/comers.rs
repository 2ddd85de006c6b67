//! Control connections as the kernel sees them: what came on each, whatever libzmq makes of it.
//!
//! libzmq takes bytes before there are messages. It answers ZMTP's pings by itself, reads ahead, and collects the
//! frames of a message for as long as more come. So what the kernel says came on a connection is held against the
//! messages that came of it: the rest is *unseen*, and is memory or time that libzmq spends on a peer. A worker has next
//! to none; whoever has more is hung up on.
//!
//! The kernel counts for TCP alone, and only Linux tells. Elsewhere, and over ipc, which is a matter among users of one
//! host, messages alone are counted.

use super::effects::Identity;
use super::patience::{Allowance, Rate};
use crate::raw::hang_up::{spent, Hook, Host};
use crate::transfer::Time;
use std::collections::HashMap;
use std::os::unix::io::RawFd;
use std::time::Duration;

const UNSEEN: Rate = Rate(262_144.0, 64.0); // bytes of one connection; a worker pings and says hello in messages
const UNSEEN_ALL: f64 = 1_048_576.0; // of all, once all messages are taken; above it goes whoever has most
const UNSEEN_SMALL: f64 = 8192.0; // of one; less is not counted there, as libzmq reads so much at once
const LOOK: Duration = Duration::from_millis(50); // between two looks
const FLOODED: Duration = Duration::from_millis(10); // while much is unseen, or somebody has come a moment ago
const LOOKS: usize = 64; // connections at one look, those with much unseen aside
const NEW: Duration = Duration::from_secs(1); // such a moment
                                              // Of one host: connections that came a moment ago. Each may cost what libzmq reads at once: some thousand messages,
                                              // until it is found out.
const NEWCOMERS: Rate = Rate(16.0, 8.0);
const PROOF: Duration = Duration::from_millis(50); // in which whoever said something and floods nobody is no newcomer
const HOSTS_MAX: usize = 1024; // from which newcomers are taken within a moment
const DROPPED_KEPT: usize = 4096; // connections that were hung up on, and may have left something to be read

struct Comer {
    unseen: Allowance,
    came: u64,          // bytes that had come when it was looked at last
    seen: u64,          // bytes of its messages since
    large: bool,        // much of it is unseen, or it is new
    said: bool,         // anything
    hung_up: bool,      // what is left of it is dropped
    identity: Identity, // what the ROUTER calls it; empty until it has said anything
}

/// The connections of a ROUTER.
pub struct Comers {
    hook: Hook,
    each: HashMap<RawFd, Comer>, // by descriptor, of which there are only so many
    dropped: HashMap<Identity, RawFd>, // peers can choose the former
    hosts: HashMap<Host, Allowance>, // where newcomers came from a moment ago
    newcomers: HashMap<RawFd, (Host, Time)>, // of whose, and until when
    turns: Vec<RawFd>,           // those that are still to be looked at before all others again
    closed: Vec<Identity>,       // of which nobody was told yet
    next_look: Time,
    alert_until: Time,
}

impl Comers {
    pub fn new(hook: Hook) -> Comers {
        Comers {
            hook,
            each: HashMap::new(),
            dropped: HashMap::new(),
            hosts: HashMap::new(),
            newcomers: HashMap::new(),
            turns: Vec::new(),
            closed: Vec::new(),
            next_look: Time::ZERO,
            alert_until: Time::ZERO,
        }
    }

    /// Takes note of a new one, and hangs up on one that is one too many. With one of the last descriptors: without any,
    /// libzmq tries to accept the next one again and again, and the process can open nothing. And as each that is hung up
    /// on costs time until its last message, each host may have a few newcomers, and one more now and then. Who behaves
    /// is soon none, and makes room.
    pub fn accept(&mut self, descriptor: RawFd, now: Time) {
        let unseen = Allowance::new(now);
        self.each.insert(
            descriptor,
            Comer {
                unseen,
                came: 0,
                seen: 0,
                large: self.hook.counts(),
                said: false,
                hung_up: false,
                identity: Identity::new(),
            },
        );
        self.alert_until = now + NEW;
        self.next_look = self.next_look.min(now + FLOODED);
        if spent(descriptor) || !self.may_come(descriptor, now) {
            self.hang_up(descriptor);
        }
    }

    fn may_come(&mut self, descriptor: RawFd, now: Time) -> bool {
        if self.hosts.len() >= HOSTS_MAX {
            self.hosts.retain(|_, allowance| !allowance.rested(NEWCOMERS, now));
        }
        let (host, room) = (self.hook.host(descriptor), self.hosts.len() < HOSTS_MAX);
        if !room && !self.hosts.contains_key(&host) {
            return false;
        }
        let allowance = self.hosts.entry(host).or_insert_with(|| Allowance::new(now));
        let may = allowance.take(1.0, NEWCOMERS, now);
        if may {
            self.newcomers.insert(descriptor, (host, now + PROOF));
        }
        may
    }

    /// Makes room for others in the place of those that have shown to be no flood.
    fn let_newcomers_be(&mut self, now: Time) {
        let (each, hosts) = (&self.each, &mut self.hosts);
        self.newcomers.retain(|descriptor, (host, until)| match each.get(descriptor) {
            Some(comer) if !comer.hung_up && now >= *until && comer.said => {
                if let Some(allowance) = hosts.get_mut(host).filter(|_| !comer.large) {
                    allowance.give_back(1.0);
                }
                false
            }
            Some(comer) => !comer.hung_up,
            None => false,
        });
    }

    /// Takes note that one is closed; of its messages some may not have been taken yet.
    pub fn closed(&mut self, descriptor: RawFd) {
        let identity = self.each.remove(&descriptor).map(|each| each.identity);
        self.closed.extend(identity.filter(|identity| !identity.is_empty()));
    }

    /// The identities of those that were closed, each once. Take all messages first.
    pub fn take_closed(&mut self) -> Vec<Identity> {
        std::mem::take(&mut self.closed)
    }

    /// Whether `take_closed` has anything to tell.
    pub fn any_closed(&self) -> bool {
        !self.closed.is_empty()
    }

    /// Whether there is such a connection; one that was hung up on may be another by now.
    pub fn has(&self, descriptor: RawFd) -> bool {
        self.each.get(&descriptor).map_or(false, |each| !each.hung_up)
    }

    /// Takes note of a message of so many bytes; false if it is to be dropped, as its connection was hung up on.
    pub fn saw(&mut self, descriptor: RawFd, identity: &[u8], nbytes: usize) -> bool {
        let hung_up = match self.each.get_mut(&descriptor) {
            Some(each) => {
                each.seen += nbytes as u64;
                each.said = true;
                if each.identity != identity {
                    each.identity = identity.to_vec();
                }
                each.hung_up
            }
            None => false,
        };
        if hung_up {
            self.drop_of(identity, descriptor);
        }
        !hung_up
    }

    /// Nothing of a connection is of use any more: thousands of messages may come.
    pub fn drop_of(&mut self, identity: &[u8], descriptor: RawFd) {
        if self.dropped.len() >= DROPPED_KEPT {
            self.dropped.clear(); // what still comes of those is judged as anybody's
        }
        self.dropped.insert(identity.to_vec(), descriptor);
    }

    /// Whether that was said. It is told at little cost, since others wait meanwhile.
    pub fn dropped(&mut self, identity: &[u8], descriptor: RawFd) -> bool {
        match self.dropped.get(identity) {
            None => false,
            Some(&known) if known == descriptor => true,
            Some(_) => {
                self.dropped.remove(identity); // it is another's by now
                false
            }
        }
    }

    /// Closes a connection. libzmq has no call for that, but closes what it finds at its end.
    pub fn hang_up(&mut self, descriptor: RawFd) {
        if let Some(each) = self.each.get_mut(&descriptor) {
            each.hung_up = true;
            each.large = false;
        }
        self.hook.hang_up(descriptor);
    }

    /// When to look next, if ever.
    pub fn due(&self) -> Option<Time> {
        Some(self.next_look).filter(|_| !self.each.is_empty())
    }

    /// Hangs up on whoever has too much unseen, and on the largest if all have together. The latter only where all
    /// messages are taken (`drained`): who waits for us is no flood.
    pub fn look(&mut self, now: Time, drained: bool) {
        if self.due().map_or(true, |due| now < due) {
            return;
        }
        if self.hook.counts() {
            self.look_at_some(now);
            if drained {
                self.hang_up_on_the_largest();
            }
        }
        self.let_newcomers_be(now);
        let alert = now < self.alert_until || self.each.values().any(|each| each.large);
        self.next_look = now + if alert { FLOODED } else { LOOK };
    }

    /// Looks at whoever has much unseen, and in turns at the others: each look takes some microseconds.
    fn look_at_some(&mut self, now: Time) {
        if self.turns.is_empty() {
            self.turns
                .extend(self.each.iter().filter(|(_, each)| !each.large).map(|(&descriptor, _)| descriptor));
        }
        let mut due = self.turns.split_off(self.turns.len().saturating_sub(LOOKS));
        due.extend(self.each.iter().filter(|(_, each)| each.large).map(|(&descriptor, _)| descriptor));
        due.into_iter().for_each(|descriptor| self.look_at(descriptor, now));
    }

    fn look_at(&mut self, descriptor: RawFd, now: Time) {
        let each = match self.each.get_mut(&descriptor).filter(|each| !each.hung_up) {
            Some(each) => each,
            None => return,
        };
        match self.hook.came(descriptor).filter(|&came| came >= each.came) {
            Some(came) => {
                let unseen = (came - each.came) as f64 - each.seen as f64;
                (each.came, each.seen) = (came, 0);
                let bears = each.unseen.take(unseen, UNSEEN, now);
                each.large = each.unseen.spent() > UNSEEN_SMALL;
                if !bears {
                    self.hang_up(descriptor);
                }
            }
            None => self.closed(descriptor), // it is, or another one's by now
        }
    }

    fn hang_up_on_the_largest(&mut self) {
        let mut large: Vec<_> = self.each.iter().filter(|(_, each)| each.large).collect();
        large.sort_by(|(_, one), (_, other)| other.unseen.spent().total_cmp(&one.unseen.spent()));
        let mut left: f64 = large.iter().map(|(_, each)| each.unseen.spent()).sum();
        let mut over = Vec::new();
        for (&descriptor, each) in large {
            if left <= UNSEEN_ALL {
                break;
            }
            left -= each.unseen.spent();
            over.push(descriptor);
        }
        over.into_iter().for_each(|descriptor| self.hang_up(descriptor));
    }
}
