//! Workers that join: who is let in, what they are told, and which publisher comes first.

use super::effects::{Effect, Payload, WorkerEventKind};
use super::machine::PublisherMachine;
use super::phases::{PeerEvent, PeerPhase};
use super::roster::Admission;
use crate::limits::INTEGER_MAX;
use crate::messages::*;
use crate::transfer::Time;
use std::collections::BTreeMap;
use std::time::Duration;

const EPOCH_CLOCK_MAX: u64 = 1 << 43; // the year 2248 in milliseconds: no later epoch is taken over from anybody
const DRIFT: f64 = 1.001; // a second of one host in those of another: clocks are off by a tenth of that
const RENAMING: &str = "renaming";
const UPSTREAM: &str = "upstream";

impl PublisherMachine {
    /// Somebody wants to join (P3).
    pub(super) fn hello(&mut self, from: &[u8], key: &str, hello: &Hello, now: Time) {
        if let Some((code, text)) = self.misfit(key, &hello.name) {
            return self.turn_away(from, hello, code, &text, now);
        }
        if self.runs_another(hello) {
            match self.epoch_above(hello) {
                None => {
                    let text = self.stale(hello);
                    return self.turn_away(from, hello, "stale-epoch", &text, now);
                }
                // It says hello again; whatever is said, workers start anew only so often.
                Some(_) if self.renewed_lately(now) => return,
                Some(epoch) => self.renew(epoch, hello, now),
            }
        }
        let other = self.roster.by_identity(from).filter(|&name| name != hello.name).map(str::to_owned);
        if let Some(other) = other {
            self.leave(&other, "its connection has taken another name", now);
        }
        self.admit(from, key, hello, now);
    }

    fn admit(&mut self, from: &[u8], key: &str, hello: &Hello, now: Time) {
        let admission = self.roster.admit(from, key, hello, now, self.timing.lost_after);
        match admission {
            Admission::New | Admission::Known => self.welcome(&hello.name, admission, now),
            Admission::Contested
                if self.roster.get(&hello.name).map_or(false, |peer| peer.phase.is(PeerPhase::Away)) =>
            {
                self.lose(&hello.name, PeerEvent::Contested, "its connection is closed", now);
                self.admit(from, key, hello, now);
            }
            Admission::Contested => self.say(&hello.name, FromPublisher::Ping(Ping::default())),
            Admission::Taken => {
                let text = self.name_taken(&hello.name);
                self.turn_away(from, hello, "name-taken", &text, now);
            }
            Admission::Full => {
                let text = "the roster is full: stop some workers, or start another publisher";
                self.turn_away(from, hello, "limit", text, now);
            }
        }
    }

    /// Refuses a worker; says so once, though it asks again and again.
    fn turn_away(&mut self, from: &[u8], hello: &Hello, code: &str, text: &str, now: Time) {
        self.refuse(from, code, text, None);
        let told = format!("worker {} is refused ({}): {}", hello.name, code, text);
        if self.absent.note(hello, code, &told, now) {
            self.tell(WorkerEventKind::Refused, &hello.name, told);
        }
    }

    fn name_taken(&self, name: &str) -> String {
        let its = self.roster.get(name).map(|peer| &peer.hello);
        let host = its.map(|hello| hello.host.as_str()).filter(|host| !host.is_empty()).unwrap_or("unknown");
        let pid = its.map_or(0, |hello| hello.pid);
        format!(
            "the name {:?} belongs to a living worker (host {}, process {}): give this one another name, or stop \
             that one",
            name, host, pid
        )
    }

    fn welcome(&mut self, name: &str, admission: Admission, now: Time) {
        self.absent.joined(name);
        if admission == Admission::New {
            self.tell(WorkerEventKind::Joined, name, format!("worker {} joined", name));
        }
        let hello = match self.roster.get(name) {
            Some(peer) => peer.hello.clone(),
            None => return,
        };
        let running: BTreeMap<String, Running> = hello
            .models
            .iter()
            .filter_map(|(model, running)| Some((model.clone(), running.clone()?)))
            .filter(|(model, running)| self.plausible(model, running))
            .collect();
        let runs: Vec<_> =
            running.iter().map(|(model, its)| (model.clone(), its.epoch, its.version)).collect();
        if let Some(peer) = self.roster.get_mut(name) {
            peer.welcomed(running);
        }
        let features = match self.trust {
            Some(_) => self.ticket_for(name, now),
            None => self.token_for(name), // K9: whoever sees a data connection could say it, too
        };
        let millis = |time: Duration| (time.as_millis() as u64).max(1);
        let welcome = Welcome {
            epoch: self.epoch(),
            data: self.data_endpoint.clone(),
            ping_ms: millis(self.timing.ping),
            lost_ms: millis(self.timing.lost_after).max(2),
            models: self.store.latest(name, hello.models.keys()),
            shared: None,
            age_ms: self.age.as_ref().map_or(0, |age| (age().as_millis() as u64).min(INTEGER_MAX)), // P1
            features,
            keys: self.group_keys(),
        };
        self.say(name, FromPublisher::Welcome(welcome));
        self.rename(name);
        self.back(name, now);
        for (model, epoch, version) in runs {
            if let Some(versions) = self.store.of(&model, epoch) {
                versions.left(name, version + 1);
            }
            self.arrived(name, &model, now);
        }
    }

    /// Tells a worker which of the versions that it runs are the latest under another name (P21).
    fn rename(&mut self, name: &str) {
        let peer = match self.roster.get(name) {
            Some(peer) if peer.hello.features.iter().any(|feature| feature == RENAMING) => peer,
            _ => return,
        };
        let mut renamed = Vec::new();
        for (model, was) in &peer.running {
            let versions = self.store.models.get(model);
            let latest = versions.and_then(|its| its.get(its.latest_for(name)?));
            let newer = latest.filter(|latest| self.store.key(latest.number) > (was.epoch, was.version));
            if let Some(latest) = newer.filter(|latest| latest.is_known_as(was)) {
                let (version, metadata) = (latest.number, latest.content.metadata.clone());
                let (model, epoch) = (model.clone(), self.epoch());
                renamed.push(Rename { model, epoch, version, was: was.clone(), metadata });
            }
        }
        for rename in renamed {
            self.say(name, FromPublisher::Rename(rename));
        }
    }

    /// Lets a worker say `applied` on its data connection, if it can (P22).
    fn token_for(&mut self, name: &str) -> Vec<String> {
        let peer = match self.roster.get(name) {
            Some(peer) if peer.hello.features.iter().any(|feature| feature == UPSTREAM) => peer,
            _ => return Vec::new(),
        };
        let mut token = peer.token.clone();
        if token.is_empty() {
            token = match self.draw.as_ref().and_then(|draw| draw()) {
                Some(drawn) => drawn,
                None => return Vec::new(),
            };
            self.roster.give(name, token.clone());
        }
        vec![format!("{}.{}", UPSTREAM, token)]
    }

    // Which publisher comes first.

    /// Whether a worker runs weights of a publisher that may be later than this one.
    fn runs_another(&self, hello: &Hello) -> bool {
        let had = |model: &str, number| self.store.models.get(model).map_or(false, |its| its.had(number));
        let unknown = |(model, running): (&String, &Option<Running>)| {
            running.as_ref().map_or(false, |its| its.epoch == self.epoch() && !had(model, its.version))
        };
        hello.epoch > self.epoch() || hello.models.iter().any(unknown)
    }

    /// The epoch that may be taken in place of a worker's; nothing if this publisher is no later one.
    ///
    /// It is higher by as much as is proven of the time between the starts of the two.
    fn epoch_above(&self, hello: &Hello) -> Option<u64> {
        let mine = (self.age.as_ref()?().as_secs_f64() * DRIFT * 1000.0).ceil() as u64;
        let later_by = hello.age_ms.checked_sub(mine).filter(|&later_by| later_by > 0)?;
        hello.epoch.checked_add(later_by).filter(|&epoch| epoch <= EPOCH_CLOCK_MAX)
    }

    fn stale(&self, hello: &Hello) -> String {
        let chosen = match self.age {
            None => "its epoch was chosen, and stays",
            Some(_) => "it did not start after that",
        };
        format!(
            "this publisher is of epoch {}, but {} runs weights of epoch {}, from another publisher, and {}: if the \
             other one is the newer, stop this one; if not, stop the other and restart this one, which then takes \
             over",
            self.epoch(),
            hello.name,
            hello.epoch,
            chosen
        )
    }

    fn renewed_lately(&self, now: Time) -> bool {
        self.renewed_at.map_or(false, |at| now.saturating_sub(at) < self.timing.lost_after)
    }

    /// Takes a later epoch. For workers it is as if the publisher had restarted.
    fn renew(&mut self, epoch: u64, hello: &Hello, now: Time) {
        let text = format!(
            "epoch {} becomes {}: {} runs weights of epoch {}, whose publisher started before this one; one of two \
             clocks is wrong",
            self.epoch(),
            epoch,
            hello.name,
            hello.epoch
        );
        self.tell(WorkerEventKind::Notice, "", text);
        let models: Vec<String> = self.store.models.keys().cloned().collect();
        for model in &models {
            let pending = self.store.models.get(model).and_then(|versions| versions.pending());
            if let Some(pending) = pending {
                self.give_up(model, pending, "its publisher takes a new epoch", now);
            }
            self.perform(Effect::Withdraw { model: model.clone() });
            self.end_pushes(model);
        }
        let before = self.store.renew(epoch);
        self.renewed_at = Some(now);
        self.calls_renewed(before, epoch);
        for model in &models {
            let latest = self.store.models.get(model).and_then(|versions| versions.latest());
            if let Some(latest) = latest {
                self.settled(model, latest);
            }
        }
        let mut told = Vec::new();
        for peer in self.roster.iter_mut() {
            peer.forget();
            told.extend(Some(peer.identity.clone()).filter(|_| !peer.lost()));
        }
        for to in told {
            let message = FromPublisher::Pong(Pong { epoch, ..Pong::default() }); // of another epoch than theirs
            self.perform(Effect::Send { to, message, payload: Payload::None });
        }
    }
}
