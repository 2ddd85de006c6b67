//! Handles `hello`: decides which workers may join, sends them their welcome, and decides which of two
//! publishers takes precedence.

use super::effects::{Effect, Payload, WorkerEventKind};
use super::machine::PublisherMachine;
use super::phases::{PeerEvent, PeerPhase};
use super::roster::{is_relay, Admission};
use crate::limits::{EPOCH_CLOCK_MAX, EPOCH_LEAP_MAX_MS, INTEGER_MAX, RENEWAL_PAUSES};
use crate::messages::*;
use crate::transfer::Time;
use crate::words::escaped;
use std::collections::BTreeMap;
use std::time::Duration;

// How many seconds the clock of one host may count per second of another host: ten times the drift of
// real clocks.
const DRIFT: f64 = 1.001;

impl PublisherMachine {
    /// Handles a hello (P3).
    pub(super) fn hello(&mut self, from: &[u8], key: &str, hello: &Hello, now: Time) {
        if let Some((code, text)) = self.key_refusal(key, hello) {
            return self.refuse_hello((from, key), hello, code, &text, now);
        }
        if let Some(text) = contradiction(hello) {
            self.malformed += 1;
            return self.refuse_hello((from, key), hello, "malformed", &text, now);
        }
        if self.runs_unpublished(hello) {
            let text = self.stale_epoch_text(hello);
            return self.refuse_hello((from, key), hello, "stale-epoch", &text, now);
        }
        if hello.epoch > self.epoch() {
            // R10: the epoch may be that of workers behind a relay. Then the relay itself is admitted.
            let own = self.epoch();
            if is_relay(hello) && hello.models.values().flatten().all(|runs| runs.epoch <= own) {
                return self.renew_for_relay(from, key, hello, now);
            }
            let epoch = match self.epoch_above(hello) {
                Ok(epoch) => epoch,
                Err(text) => return self.refuse_hello((from, key), hello, "stale-epoch", &text, now),
            };
            match self.renewed_at.map(|at| now.saturating_sub(at)) {
                // Do not change the epoch again so soon, because each change makes all workers join again.
                // The worker repeats the ignored hello.
                Some(ago) if ago < self.timing.lost_after => return,
                Some(ago) if ago < self.renewal_pause => {
                    let text = format!(
                        "this publisher has taken another epoch {} s ago, for a worker that ran a later one, and takes \
                         the next after {} s: stop the other publisher, if there is one",
                        ago.as_secs(),
                        self.renewal_pause.as_secs()
                    );
                    return self.refuse_hello((from, key), hello, "stale-epoch", &text, now);
                }
                _ => self.renew(epoch, hello, now),
            }
        }
        let other = self.roster.by_identity(from).filter(|&name| name != hello.name).map(str::to_owned);
        if let Some(other) = other {
            self.leave(&other, "its connection has taken another name", now);
        }
        self.admit(from, key, hello, now);
    }

    /// Changes to an epoch above the one in a relay's hello, which is that of workers behind the relay,
    /// if that is possible now. Admits the relay in any case (R10).
    fn renew_for_relay(&mut self, from: &[u8], key: &str, hello: &Hello, now: Time) {
        let paused = self.renewed_at.map_or(false, |at| {
            let ago = now.saturating_sub(at);
            ago < self.timing.lost_after || ago < self.renewal_pause
        });
        if let (Ok(epoch), false) = (self.epoch_above(hello), paused) {
            self.renew(epoch, hello, now);
        }
        let other = self.roster.by_identity(from).filter(|&name| name != hello.name).map(str::to_owned);
        if let Some(other) = other {
            self.leave(&other, "its connection has taken another name", now);
        }
        self.admit(from, key, hello, now);
    }

    /// Admits or refuses a worker. If another instance has the worker's name, pings that instance.
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
            Admission::Contested => self.send_header(&hello.name, FromPublisher::Ping(Ping::default())),
            Admission::Taken => {
                let text = self.name_taken_text(&hello.name);
                self.refuse_hello((from, key), hello, "name-taken", &text, now);
            }
            Admission::Full => {
                let text = "the roster is full: stop some workers, or start another publisher";
                self.refuse_hello((from, key), hello, "limit", text, now);
            }
        }
    }

    /// Refuses a hello with this code and text. Notifies the user once, although the worker repeats its
    /// hello.
    fn refuse_hello(&mut self, (from, key): (&[u8], &str), hello: &Hello, code: &str, text: &str, now: Time) {
        self.refuse(from, code, text, None);
        let refusal = format!("worker {} is refused ({}): {}", hello.name, code, text);
        if self.absent.note(hello, code, &refusal, now) {
            self.notify_limited(WorkerEventKind::Refused, &hello.name, key, refusal, now);
        }
    }

    fn name_taken_text(&self, name: &str) -> String {
        let peer = self.roster.get(name);
        let last = peer.and_then(|peer| peer.through.last());
        let place = last.map_or_else(String::new, |relay| format!(" behind relay {}", relay));
        let hello = peer.map(|peer| &peer.hello);
        let host =
            hello.map(|hello| hello.host.as_str()).filter(|host| !host.is_empty()).unwrap_or("unknown");
        let pid = hello.map_or(0, |hello| hello.pid);
        format!(
            "the name {:?} belongs to a living worker{} (host {}, process {}): give this one another name, or stop \
             that one",
            name,
            place,
            escaped(host),
            pid
        )
    }

    /// Sends the welcome to a worker that was admitted, and the versions that the worker needs.
    fn welcome(&mut self, name: &str, admission: Admission, now: Time) {
        self.absent.remove(name);
        if admission == Admission::New {
            self.notify(WorkerEventKind::Joined, name, format!("worker {} joined", name));
        }
        let hello = match self.roster.get(name) {
            Some(peer) => peer.hello.clone(),
            None => return,
        };
        let running: BTreeMap<String, Running> = hello
            .models
            .iter()
            .filter_map(|(model, running)| Some((model.clone(), running.clone()?)))
            .filter(|(model, running)| self.is_plausible(model, running))
            .collect();
        let runs: Vec<_> =
            running.iter().map(|(model, its)| (model.clone(), its.epoch, its.version)).collect();
        if let Some(peer) = self.roster.get_mut(name) {
            peer.begin_session(running);
        }
        let mut features = Vec::new();
        if is_relay(&hello) {
            features.push(RELAY.to_owned());
        }
        features.extend(match self.trust {
            Some(_) => self.ticket_for(name, now),
            None => self.token_for(name), // K9: no token, since data connections are not encrypted
        });
        let millis = |time: Duration| (time.as_millis() as u64).max(1);
        let welcome = Welcome {
            epoch: self.epoch(),
            data: self.data_endpoint.clone(),
            ping_ms: millis(self.timing.ping),
            lost_ms: millis(self.timing.lost_after).max(2),
            models: self.store.latest_by_model(name, hello.models.keys()),
            age_ms: self.age.as_ref().map_or(0, |age| (age().as_millis() as u64).min(INTEGER_MAX)), // P1
            features,
            keys: self.group_keys(),
            ..Default::default()
        };
        self.send_header(name, FromPublisher::Welcome(welcome));
        self.send_renames(name);
        self.resume_worker(name, now);
        for (model, epoch, version) in runs {
            if let Some(versions) = self.store.in_epoch(&model, epoch) {
                versions.end_receiving(name, version + 1);
            }
            self.note_running(name, &model, "", now);
        }
    }

    /// Sends a worker a `rename` for each of its running versions whose bytes equal those of the latest
    /// version (P21).
    fn send_renames(&mut self, name: &str) {
        let peer = match self.roster.get(name) {
            Some(peer) if peer.hello.features.iter().any(|feature| feature == RENAMING) => peer,
            _ => return,
        };
        let mut renamed = Vec::new();
        for (model, running) in &peer.running {
            let versions = self.store.models.get(model);
            let latest = versions.and_then(|its| its.get(its.latest_for(name)?));
            let newer =
                latest.filter(|latest| self.store.key(latest.number) > (running.epoch, running.version));
            if let Some(latest) = newer.filter(|latest| latest.is_known_as(running)) {
                let (version, metadata) = (latest.number, latest.content.metadata.clone());
                let (model, epoch) = (model.clone(), self.epoch());
                renamed.push(Rename {
                    model,
                    epoch,
                    version,
                    was: running.clone(),
                    metadata,
                    ..Default::default()
                });
            }
        }
        for rename in renamed {
            self.send_header(name, FromPublisher::Rename(rename));
        }
    }

    /// Returns the feature that lets a worker send `applied` on its data connection, with the worker's
    /// token. Returns an empty list if the worker does not support that, or no token can be drawn (P22).
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
            self.roster.set_token(name, token.clone());
        }
        vec![format!("{}.{}", UPSTREAM, token)]
    }

    // Which of two publishers takes precedence.

    /// True if a worker runs a version of the current epoch that this publisher never published.
    fn runs_unpublished(&self, hello: &Hello) -> bool {
        let was_published =
            |model: &str, number| self.store.models.get(model).map_or(false, |its| its.was_published(number));
        hello.models.iter().any(|(model, running)| {
            running
                .as_ref()
                .map_or(false, |its| its.epoch == self.epoch() && !was_published(model, its.version))
        })
    }

    /// Returns the epoch to change to, because the hello has an epoch above this publisher's. The error
    /// gives the reason not to change.
    ///
    /// `hello.age_ms` is the age of the publisher of that epoch. This publisher may change its epoch if it
    /// started later. The new epoch is that of the hello plus the time between the two starts. It is at
    /// most `EPOCH_LEAP_MAX_MS` above this host's clock at this publisher's start, so that a false hello
    /// cannot raise it too far. Since this bound depends on the start, the epochs of later publishers
    /// are still higher if both are bounded.
    fn epoch_above(&self, hello: &Hello) -> Result<u64, String> {
        let age = match &self.age {
            Some(age) => age(),
            None => return Err(self.stale_epoch_text(hello)),
        };
        let mine = (age.as_secs_f64() * DRIFT * 1000.0).ceil() as u64;
        let later_by = match hello.age_ms.checked_sub(mine).filter(|&later_by| later_by > 0) {
            Some(later_by) => later_by,
            None => return Err(self.stale_epoch_text(hello)),
        };
        let latest = match self.time_ms() {
            Some(now) => {
                let started = now.saturating_sub(age.as_millis() as u64);
                started.saturating_add(EPOCH_LEAP_MAX_MS).min(EPOCH_CLOCK_MAX)
            }
            None => EPOCH_CLOCK_MAX,
        };
        let epoch = hello.epoch.saturating_add(later_by).min(latest);
        if epoch > hello.epoch {
            return Ok(epoch);
        }
        Err(format!(
            "{} runs weights of epoch {}, which is more than 366 days after this host's clock: set the clock, or start \
             the workers anew",
            hello.name, hello.epoch
        ))
    }

    /// Returns the refusal of a hello whose epoch this publisher does not take over from.
    fn stale_epoch_text(&self, hello: &Hello) -> String {
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

    /// Changes to a later epoch. For workers this is like a restart of the publisher.
    fn renew(&mut self, epoch: u64, hello: &Hello, now: Time) {
        let text = format!(
            "epoch {} becomes {}: {} runs weights of epoch {}, whose publisher started before this one; one of two \
             clocks is wrong",
            self.epoch(),
            epoch,
            hello.name,
            hello.epoch
        );
        self.notify(WorkerEventKind::Notice, "", text);
        let models: Vec<String> = self.store.models.keys().cloned().collect();
        for model in &models {
            let pending = self.store.models.get(model).and_then(|versions| versions.pending());
            if let Some(pending) = pending {
                self.end_pending_call(model, pending, "its publisher takes a new epoch", now);
            }
            self.perform(Effect::Withdraw { model: model.clone() });
            self.end_pushes(model);
        }
        let before = self.store.renew(epoch);
        if self.renewed_at.replace(now).is_some() {
            self.renewal_pause = (2 * self.renewal_pause).min(RENEWAL_PAUSES * self.timing.lost_after);
        }
        self.renew_calls(before, epoch);
        for model in &models {
            let latest = self.store.models.get(model).and_then(|versions| versions.latest());
            if let Some(latest) = latest {
                self.store_latest(model, latest);
            }
        }
        let mut recipients = Vec::new();
        for peer in self.roster.iter_mut() {
            peer.forget_deliveries();
            peer.observed.forget_failures(); // the new epoch uses the same numbers for other versions
            recipients.extend(Some(peer.identity.clone()).filter(|_| !peer.is_lost() && peer.in_session()));
        }
        for to in recipients {
            // A pong of another epoch makes the worker end its session and join again.
            let message = FromPublisher::Pong(Pong { epoch, ..Default::default() });
            self.perform(Effect::Send { to, message, payload: Payload::None });
        }
    }
}

/// Returns the refusal of a hello that contradicts itself: a running version has an epoch above
/// `hello.epoch`, the greatest epoch of applied versions.
fn contradiction(hello: &Hello) -> Option<String> {
    let runs = |(model, running): (_, &Option<Running>)| Some((model, running.clone()?));
    let (model, running) = hello.models.iter().filter_map(runs).find(|(_, r)| r.epoch > hello.epoch)?;
    Some(format!(
        "it runs version {} of {} from epoch {}, but says that it has applied from none above {}",
        running.version, model, running.epoch, hello.epoch
    ))
}
