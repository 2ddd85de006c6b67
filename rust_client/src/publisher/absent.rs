//! Explains why workers get no version: they left, were refused, misspelt the model's name, or never
//! apply what they receive.
//!
//! A misspelt name and a worker that never applies cause no error: the workers only wait. So the
//! publisher reports each such mistake once, with its probable cause. The texts and the delays are
//! those of the Python publisher.

use super::effects::WorkerEventKind;
use super::machine::PublisherMachine;
use super::roster::{Peer, Roster};
use crate::limits::TEXT_MAX;
use crate::messages::{FromPublisher, Hello, ProgressPhase, Refuse};
use crate::transfer::Time;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const ABSENT_MAX: usize = 64; // workers recorded as absent: a person reads no longer list
const ABSENT_AGAIN: Duration = Duration::from_secs(60); // until the same absence is reported again
const HINT_AFTER: Duration = Duration::from_secs(3); // how long a mistake lasts before it is reported
const HINT_CHECKS: u32 = 6; // checks within `HINT_AFTER`
const MIN_SIMILARITY: f64 = 0.8; // of a typo: `polcy` has 0.91 to `policy`, `policy_old` 0.75
const NAMES_COMPARED: usize = 16; // names compared in one check: workers can subscribe to any number
const NAMES_LISTED: usize = 3; // names listed in one message
const REPORTED_MAX: usize = 64; // models reported for each kind of mistake

struct Absence {
    models: BTreeSet<String>,
    code: String, // of the refusal, or `left`
    text: String,
    at: Time,
}

/// The workers that left or were refused, with the reasons. The notice of a publish that reached no
/// worker lists these reasons.
#[derive(Default)]
pub struct Absent(BTreeMap<String, Absence>);

impl Absent {
    /// Records that a worker is absent for the reason `code`. Returns true if the absence must be
    /// reported now: for the same reason, at most once in `ABSENT_AGAIN`. The number of recorded
    /// workers is bounded, because a peer can use any number of names.
    pub(super) fn note(&mut self, hello: &Hello, code: &str, text: &str, now: Time) -> bool {
        let recent = |absence: &Absence| now.saturating_sub(absence.at) < ABSENT_AGAIN;
        let models = hello.models.keys().cloned().collect();
        if let Some(before) = self.0.get_mut(&hello.name) {
            if before.code == code && recent(before) {
                before.models = models;
                before.text = text.to_owned();
                return false;
            }
        } else if self.0.len() >= ABSENT_MAX {
            let oldest = self.0.iter().min_by_key(|(_, absence)| absence.at);
            match oldest.filter(|(_, absence)| !recent(absence)).map(|(name, _)| name.clone()) {
                Some(name) => self.0.remove(&name),
                None => return false,
            };
        }
        let absence = Absence { models, code: code.to_owned(), text: text.to_owned(), at: now };
        self.0.insert(hello.name.clone(), absence);
        true
    }

    /// Forgets the absence of a worker that has joined.
    pub(super) fn remove(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// True if the recorded reason is that the worker left.
    pub fn has_left(&self, name: &str) -> bool {
        self.0.get(name).map_or(false, |absence| absence.code == "left")
    }

    /// Returns, for each absent worker that subscribed to the model, a text with the reason of its absence.
    pub fn reasons(&self, model: &str) -> impl Iterator<Item = String> + '_ {
        let model = model.to_owned();
        self.0.values().filter(move |absence| absence.models.contains(&model)).map(|a| a.text.clone())
    }
}

/// The likely mistakes of users that one publisher looks for.
#[derive(Default)]
pub struct Oversights {
    due: Time,
    suspected_typos: PersistentCondition,
    never_applied: PersistentCondition,
}

/// The names of the workers for which a condition holds, by model.
type WorkersByModel = BTreeMap<String, Vec<String>>;

impl PublisherMachine {
    /// If a check is due, reports likely mistakes that have lasted too long.
    pub(super) fn report_oversights(&mut self, now: Time) {
        if now < self.oversights.due {
            return;
        }
        let patience = HINT_AFTER.min(self.timing.lost_after * 3 / 5);
        self.oversights.due = now + patience / HINT_CHECKS;
        self.report_likely_typos(patience, now);
        self.report_never_applied(patience, now);
    }

    /// Finds models that workers subscribe to, that were never published, and whose names are similar
    /// to that of a published model. Reports these models, and refuses the subscriptions.
    fn report_likely_typos(&mut self, patience: Duration, now: Time) {
        let had = self.store.models.iter().filter(|(_, versions)| versions.any_published());
        let published: Vec<&str> = had.map(|(model, _)| model.as_str()).collect();
        if published.is_empty() {
            return;
        }
        let unknown = |peer: &Peer| {
            peer.hello.models.keys().filter(|model| !published.contains(&model.as_str())).cloned().collect()
        };
        let mut alike = live_workers_by_model(&self.roster, unknown);
        let mut meant = BTreeMap::new();
        for model in self.oversights.suspected_typos.unreported(alike.keys(), NAMES_COMPARED) {
            meant.insert(model.clone(), likely_meant(&model, published.iter().copied()).map(str::to_owned));
        }
        alike.retain(|model, _| matches!(meant.get(model), Some(Some(_))));
        for (model, names) in self.oversights.suspected_typos.held_since(alike, patience, now) {
            let meant = meant.remove(&model).flatten().unwrap_or_default();
            let apart =
                |name: &String| self.roster.get(name).map_or(false, |peer| peer.subscribes_to(&meant));
            let others: Vec<String> = names.into_iter().filter(|name| !apart(name)).collect();
            if others.is_empty() {
                continue; // a worker that subscribes to both models has misspelt neither
            }
            let who = names_text(&others, "wants", "want");
            let text = format!("{} '{}', of which nothing is published: is '{}' meant?", who, model, meant);
            if !self.calls.is_unreached(&meant) {
                // If `meant` reached no worker, the notice about that has already named the model.
                self.notify(WorkerEventKind::Notice, &others[0], text.clone());
            }
            let refuse = Refuse {
                code: "no-model".to_owned(), // P25
                text: text.chars().take(TEXT_MAX).collect(),
                model: Some(model),
                ..Default::default()
            };
            for name in others {
                self.send_header(&name, FromPublisher::Refuse(refuse.clone()));
            }
        }
    }

    /// Reports workers that have received a version but never applied one.
    fn report_never_applied(&mut self, patience: Duration, now: Time) {
        let waiting = |peer: &Peer| {
            let models = peer.incoming.keys().filter(|model| self.awaits_user(peer, model));
            models.cloned().collect()
        };
        let never_applied = live_workers_by_model(&self.roster, waiting);
        for (model, names) in self.oversights.never_applied.held_since(never_applied, patience, now) {
            let first = self.roster.get(&names[0]).and_then(|peer| peer.incoming.get(&model));
            let text = format!(
                "{} version {} of {}, and nothing there applies it: is start() called, or receive() where weights \
                 may change?",
                names_text(&names, "has", "have"),
                first.map_or(0, |incoming| incoming.version),
                model
            );
            self.notify(WorkerEventKind::Notice, &names[0], text);
        }
    }

    /// True if a worker has staged its first version, and only its user delays the apply.
    fn awaits_user(&self, peer: &Peer, model: &str) -> bool {
        let pending = self.store.models.get(model).and_then(|versions| versions.pending());
        peer.incoming.get(model).map_or(false, |incoming| {
            let awaits_commit = pending == Some(incoming.version);
            incoming.phase == ProgressPhase::Staged && !awaits_commit && peer.running_key(model) == (0, 0)
        })
    }
}

/// Calls `models` for each live worker that has a session here. Returns the workers' names by the
/// models that were returned.
fn live_workers_by_model(roster: &Roster, models: impl Fn(&Peer) -> Vec<String>) -> WorkersByModel {
    let mut found = WorkersByModel::new();
    for peer in roster.iter().filter(|peer| !peer.is_lost() && peer.in_session()) {
        for model in models(peer) {
            found.entry(model).or_default().push(peer.hello.name.clone());
        }
    }
    found
}

/// Returns the reason that a model reaches no worker: none has joined, or all subscribe to other models.
pub fn why_no_recipient(model: &str, roster: &Roster) -> String {
    let live = roster.iter().filter(|peer| !peer.is_lost() && !peer.is_relay());
    let wanted: BTreeSet<&str> = live.flat_map(|peer| peer.hello.models.keys()).map(String::as_str).collect();
    if wanted.is_empty() {
        return "no worker has joined".to_owned();
    }
    let shown: Vec<String> = wanted.iter().take(NAMES_LISTED).map(|name| format!("'{}'", name)).collect();
    let more = if wanted.len() > NAMES_LISTED { ", ..." } else { "" };
    let meant = likely_meant(model, wanted.iter().copied());
    let question = meant.map_or_else(String::new, |meant| format!(" (is '{}' meant?)", meant));
    let shown = shown.join(", ") + more + &question;
    format!("no worker wants '{}', and those that are there want {}", model, shown)
}

/// Since when a condition has held for each model, and at which workers. Each model is reported once.
#[derive(Default)]
struct PersistentCondition {
    since: BTreeMap<String, (Time, BTreeSet<String>)>,
    reported: BTreeSet<String>,
}

impl PersistentCondition {
    /// Returns at most `most` models that were not reported yet. Returns none after `REPORTED_MAX` reports.
    fn unreported<'a>(&self, found: impl Iterator<Item = &'a String>, most: usize) -> Vec<String> {
        if self.reported.len() >= REPORTED_MAX {
            return Vec::new();
        }
        found.filter(|model| !self.reported.contains(*model)).take(most).cloned().collect()
    }

    /// Records the workers for which the condition holds at `now`. Returns each model to report, with
    /// the workers for which the condition held at every check during `patience`.
    fn held_since(
        &mut self,
        mut found: WorkersByModel,
        patience: Duration,
        now: Time,
    ) -> Vec<(String, Vec<String>)> {
        let mut previous = std::mem::take(&mut self.since);
        let mut reported = Vec::new();
        for model in self.unreported(found.keys(), REPORTED_MAX) {
            let mut names = found.remove(&model).unwrap_or_default();
            let mut began = now; // begins anew if the previous check found only other workers
            if let Some((since, before)) = previous.remove(&model) {
                if names.iter().any(|name| before.contains(name)) {
                    began = since;
                    names.retain(|name| before.contains(name));
                }
            }
            self.since.insert(model.clone(), (began, names.iter().cloned().collect()));
            if now.saturating_sub(began) >= patience {
                self.reported.insert(model.clone());
                reported.push((model, names));
            }
        }
        reported
    }
}

/// Returns the names, followed by the verb `one` or `many`.
fn names_text(names: &[String], one: &str, many: &str) -> String {
    if names.len() == 1 {
        return format!("worker {} {}", names[0], one);
    }
    let shown = names[..names.len().min(NAMES_LISTED)].join(", ");
    let more = if names.len() > NAMES_LISTED { ", ..." } else { "" };
    format!("{} workers ({}{}) {}", names.len(), shown, more, many)
}

/// Returns the one of `names` that `name` is probably a typo of; `None` if no name is similar.
fn likely_meant<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let plain = without_counts(name);
    let first = |name: &str| name.bytes().next().map(|byte| byte.to_ascii_lowercase());
    names
        .filter(|other| without_counts(other) != plain)
        .filter(|other| first(other) == first(name)) // typos rarely change the first letter
        .map(|other| (similarity(other.as_bytes(), name.as_bytes()), other))
        .filter(|&(similarity, _)| similarity >= MIN_SIMILARITY)
        .max_by(|a, b| a.0.partial_cmp(&b.0).unwrap_or(Ordering::Equal).then(a.1.cmp(b.1)))
        .map(|(_, other)| other)
}

/// Returns a name without its counters: digits, and single letters after a separator. `actor_1` and
/// `actor_2`, or `actor-a` and `actor-b`, differ on purpose, and become equal.
fn without_counts(name: &str) -> String {
    let bytes = name.as_bytes();
    let is = |at: usize, kind: fn(&u8) -> bool| bytes.get(at).map_or(false, kind);
    let word: fn(&u8) -> bool = |byte| byte.is_ascii_alphanumeric() || *byte == b'_';
    let (mut plain, mut at) = (String::new(), 0);
    while at < bytes.len() {
        let separated = at + usize::from(matches!(bytes[at], b'.' | b'_' | b'-'));
        let mut end = separated;
        while is(end, u8::is_ascii_digit) {
            end += 1;
        }
        let letter = separated > at && is(separated, u8::is_ascii_alphabetic) && !is(separated + 1, word);
        if end > separated {
            at = end;
        } else if letter {
            at = separated + 1;
        } else {
            plain.push(char::from(bytes[at]));
            at += 1;
        }
    }
    plain
}

/// Returns how similar two names are, from 0 to 1: twice the total length of their common substrings,
/// divided by the sum of their lengths (Ratcliff and Obershelp, as in Python's `difflib`).
fn similarity(a: &[u8], b: &[u8]) -> f64 {
    2.0 * common_length(a, b) as f64 / (a.len() + b.len()).max(1) as f64
}

/// Returns the total length of the longest common substring, and of the common substrings before and
/// after that one.
fn common_length(a: &[u8], b: &[u8]) -> usize {
    let (mut a_at, mut b_at, mut longest) = (0, 0, 0);
    for (i, rest) in (0..a.len()).map(|i| (i, &a[i..])) {
        for j in 0..b.len() {
            let same = rest.iter().zip(&b[j..]).take_while(|(x, y)| x == y).count();
            if same > longest {
                (a_at, b_at, longest) = (i, j, same);
            }
        }
    }
    if longest == 0 {
        return 0;
    }
    common_length(&a[..a_at], &b[..b_at])
        + longest
        + common_length(&a[a_at + longest..], &b[b_at + longest..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::{from_worker, FromWorker};

    #[test]
    fn what_is_meant_by_a_name() {
        // The same cases as in Python's test.
        for (name, names, meant) in [
            ("polcy", &["policy", "critic"][..], Some("policy")),
            ("Policy", &["policy"], Some("policy")),
            ("polices", &["critic"], None),
            ("encoder", &["decoder"], None),
            ("policy_old", &["policy"], None),
            ("actor_2", &["actor_1"], None),
            ("actor-b", &["actor-a"], None),
            ("m", &["n"], None),
        ] {
            assert_eq!(likely_meant(name, names.iter().copied()), meant, "{}", name);
        }
    }

    #[test]
    fn the_latest_reason_of_an_absence_is_kept_and_reported_no_more_often() {
        let hello = |model: &str| {
            let fields = r#""wbp":1,"type":"hello","name":"w","epoch":0,"instance":"00000000000000000000000000000000""#;
            let header = format!(r#"{{{},"models":{{"{}":null}}}}"#, fields, model);
            match from_worker(header.as_bytes(), 0) {
                Ok(FromWorker::Hello(hello)) => hello,
                other => panic!("{:?}", other),
            }
        };
        let (mut absent, first) = (Absent::default(), Duration::from_secs(100));
        assert!(absent.note(&hello("a"), "limit", "it is full", first));
        assert!(!absent.note(&hello("b"), "limit", "it is full of others", first + ABSENT_AGAIN / 2));
        assert_eq!(absent.reasons("a").count(), 0);
        assert_eq!(absent.reasons("b").collect::<Vec<_>>(), ["it is full of others"]);
        assert!(absent.note(&hello("b"), "limit", "it is full", first + ABSENT_AGAIN));
    }

    #[test]
    fn what_lasts_is_told_once_and_what_passes_is_not() {
        let second = Duration::from_secs(1);
        let so = |names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            WorkersByModel::from([("m".to_owned(), names)])
        };
        let mut held_since = PersistentCondition::default();
        assert!(held_since.held_since(so(&["a"]), 2 * second, Time::ZERO).is_empty());
        assert!(held_since.held_since(so(&["b"]), 2 * second, second).is_empty(), "another");
        assert!(held_since.held_since(so(&["a", "b"]), 2 * second, 2 * second).is_empty(), "begun anew");
        let told = held_since.held_since(so(&["a", "b"]), 2 * second, 3 * second);
        assert_eq!(told, [("m".to_owned(), vec!["b".to_owned()])]);
        assert!(held_since.held_since(so(&["a", "b"]), 2 * second, 9 * second).is_empty(), "once");
    }
}
