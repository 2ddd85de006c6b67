//! What a publisher puts up with: how much talk each connection may make that moves nothing along.
//!
//! A worker says hello a few times and pings once in a while; what it reports and fetches is work, and may come as
//! fast as it can. Talk beyond that is a flood: it is dropped unread and unanswered until the allowance is back.
//! Connections that no worker is known by share one more.

use super::effects::Identity;
use crate::messages::FromWorker;
use crate::observed::ToPublisher;
use crate::transfer::Time;
use std::collections::HashMap;
use std::time::Duration;

/// So much at once, and so much a second after that.
#[derive(Clone, Copy)]
pub struct Rate(pub f64, pub f64);

const TALK: Rate = Rate(64.0, 32.0); // units of one connection; a second is a ping interval if that is shorter
const STRANGERS: Rate = Rate(1024.0, 256.0); // messages of connections that have not joined
const NOTICES: Rate = Rate(16.0, 0.2); // events that one worker, or one key, can bring about by what it says
const SOURCES_MAX: usize = 1024; // of such events, who had some a moment ago; those beyond share one allowance
const CHEAP: f64 = 1.0; // a message that is answered at most
const DEAR: f64 = 4.0; // one that leads to more
const DEAR_BYTES: usize = 1 << 14; // so many more of a message cost as much again
const QUIET: Duration = Duration::from_secs(3); // without a flood, after which memory goes back to the system

/// What one peer has left; it begins with all that it may do at once.
pub struct Allowance {
    at: Time,
    spent: f64,
}

impl Allowance {
    pub fn new(now: Time) -> Allowance {
        Allowance { at: now, spent: 0.0 }
    }

    /// Spends some; false, and nothing spent, if there is less.
    pub fn take(&mut self, count: f64, Rate(burst, per_second): Rate, now: Time) -> bool {
        let back = now.saturating_sub(self.at).as_secs_f64() * per_second;
        self.spent = (self.spent - back).max(0.0);
        self.at = now;
        let enough = self.spent + count <= burst;
        self.spent += if enough { count } else { 0.0 };
        enough
    }

    /// Whether all of it is back, so that a new one would be the same.
    pub fn rested(&self, Rate(_, per_second): Rate, now: Time) -> bool {
        now.saturating_sub(self.at).as_secs_f64() * per_second >= self.spent
    }
}

/// The allowances of all connections to one publisher.
pub struct Patience {
    talk: Rate,
    strangers: Allowance,
    each: HashMap<Identity, Allowance>,
    refused_at: Option<Time>,
}

impl Patience {
    pub fn new(ping: Duration) -> Patience {
        // Workers ping as often as the welcome says.
        let faster = (1.0 / ping.as_secs_f64().max(0.001)).max(1.0);
        let talk = Rate(TALK.0, TALK.1 * faster);
        Patience { talk, strangers: Allowance::new(Time::ZERO), each: HashMap::new(), refused_at: None }
    }

    /// Whether another message of a stranger may be looked at.
    pub fn has_time(&mut self, now: Time) -> bool {
        let bears = self.strangers.take(1.0, STRANGERS, now);
        self.noted(bears, now)
    }

    /// Takes note of talk, of so many bytes; false if that is too much.
    pub fn bears(&mut self, from: &[u8], cost: f64, nbytes: usize, now: Time) -> bool {
        if cost == 0.0 {
            return true;
        }
        let cost = cost * (1 + nbytes / DEAR_BYTES) as f64;
        let fresh = || Allowance::new(now);
        let bears = self.each.entry(from.to_vec()).or_insert_with(fresh).take(cost, self.talk, now);
        self.noted(bears, now)
    }

    fn noted(&mut self, bears: bool, now: Time) -> bool {
        self.refused_at = if bears { self.refused_at } else { Some(now) };
        bears
    }

    /// Whether a flood is over, for a while by now: told once.
    pub fn recovered(&mut self, now: Time) -> bool {
        let over = self.refused_at.map_or(false, |at| now.saturating_sub(at) >= QUIET);
        self.refused_at = self.refused_at.filter(|_| !over);
        over
    }

    /// Forgets who has been quiet for a while.
    pub fn tick(&mut self, now: Time) {
        let talk = self.talk;
        self.each.retain(|_, each| !each.rested(talk, now));
    }
}

/// The allowances of those who bring about events.
#[derive(Default)]
pub struct Notices {
    each: HashMap<String, (Allowance, u64)>, // with what it was not told
}

impl Notices {
    /// Whether another event of a source may be told, and how many were not since the last one.
    pub fn take(&mut self, source: &str, now: Time) -> Option<u64> {
        let known = self.each.contains_key(source) || self.each.len() < SOURCES_MAX;
        let source = if known { source } else { "" };
        let (allowance, untold) =
            self.each.entry(source.to_owned()).or_insert_with(|| (Allowance::new(now), 0));
        if allowance.take(1.0, NOTICES, now) {
            return Some(std::mem::take(untold));
        }
        *untold += 1;
        None
    }

    /// Forgets who has been quiet for a while.
    pub fn tick(&mut self, now: Time) {
        self.each.retain(|_, (allowance, _)| !allowance.rested(NOTICES, now));
    }
}

/// What a message costs its sender: nothing if it is work. One that breaks the protocol is dear.
pub fn cost_of(message: Option<&ToPublisher>, known: bool) -> f64 {
    match message {
        None | Some(ToPublisher::Observe(_) | ToPublisher::Verify(_)) => DEAR,
        Some(ToPublisher::Worker(FromWorker::Hello(_))) => DEAR,
        // The work of others is talk of a stranger. A worker that comes back after a restart says
        // a good deal of it before it hears that it is not known.
        Some(_) if !known => CHEAP,
        Some(ToPublisher::Worker(FromWorker::Ping(_) | FromWorker::Pong(_) | FromWorker::Bye)) => CHEAP,
        Some(ToPublisher::Checked(_)) => CHEAP,
        Some(_) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_brings_about_many_events_hides_no_others() {
        let (mut notices, now) = (Notices::default(), Duration::from_secs(1));
        let told = (0..1000).filter(|_| notices.take("noisy", now).is_some()).count();
        assert_eq!((told, notices.take("other", now)), (16, Some(0)));
        assert_eq!(notices.take("noisy", now + Duration::from_secs(5)), Some(984), "and how many there were");
        assert_eq!(notices.take("noisy", now + Duration::from_secs(10)), Some(0), "once");
        for number in 0..2 * SOURCES_MAX {
            notices.take(&number.to_string(), now);
        }
        assert!(notices.each.len() <= SOURCES_MAX + 1);
        notices.tick(now + Duration::from_secs(100));
        assert!(notices.each.is_empty());
    }

    #[test]
    fn the_end_of_a_flood_is_told_once() {
        let mut patience = Patience::new(Duration::from_secs(1));
        let floods = |patience: &mut Patience, now| while patience.bears(b"peer", DEAR, 0, now) {};
        let at = Duration::from_secs;
        assert!(!patience.recovered(at(9)), "there was none");
        floods(&mut patience, at(10));
        assert!(!patience.recovered(at(12)));
        floods(&mut patience, at(12));
        assert!(!patience.recovered(at(14)), "it went on");
        assert!(patience.recovered(at(15)) && !patience.recovered(at(16)));
        while patience.has_time(at(20)) {}
        assert!(patience.recovered(at(30)), "strangers are one, too");
    }
}
