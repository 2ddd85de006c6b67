//! The publisher's machine plays the sequences of the golden vectors (`tests/vectors/README.md`).
#![allow(clippy::needless_update)] // in literals of messages, which later fields leave alone

mod defaults;

use defaults::Defaults;
use serde_json::{json, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::Arc;
use std::time::Duration;
use weightbus::checksum::crc32c;
use weightbus::delta::worth::Way;
use weightbus::limits::Timing;
use weightbus::messages::{encode, AnnounceCommit, Running};
use weightbus::publisher::content::{Content, Copier};
use weightbus::publisher::effects::Effect;
use weightbus::publisher::grants::{ByKey, Grant, Role};
use weightbus::publisher::machine::PublisherMachine;
use weightbus::publisher::offer::{Offer, VersionPatch};
use weightbus::publisher::publication::PublishTerms;
use weightbus::{Dtype, Require, TensorView, Wait, WorkerEventKind};

const TICK_MS: u64 = 100;
const AGE_MS: u64 = 10_000; // of the publisher when the first event comes
const START_MS: u64 = 20 * 366 * 86_400_000;

/// A publisher, a clock, and what came out of the last event.
struct Player {
    defaults: Defaults,
    machine: PublisherMachine,
    ms: Arc<AtomicU64>,
    calls: u64,
    sent: Vec<Value>,
    chunks: Vec<Vec<u8>>, // the bytes of each message of `sent`
    beacons: BTreeSet<String>,
    ends: Vec<Value>,
    told: Vec<String>,
    others: BTreeMap<&'static str, Value>,
}

impl Player {
    fn new(case: &Value) -> Player {
        let ms = Arc::new(AtomicU64::new(0));
        let (aged, clocked) = (ms.clone(), ms.clone());
        let age: Option<weightbus::publisher::machine::Age> =
            Some(Box::new(move || Duration::from_millis(AGE_MS + aged.load(Relaxed))));
        let tokens = AtomicU64::new(0);
        let start = case["start_ms"].as_u64().unwrap_or(START_MS);
        let mut machine = PublisherMachine::new(
            7,
            "tcp://*:9",
            Timing::default(),
            age.filter(|_| case["chosen"] != true),
            Some(Box::new(move || Some(format!("{:032x}", tokens.fetch_add(1, Relaxed))))),
        )
        .clock(Box::new(move || start + AGE_MS + clocked.load(Relaxed)));
        if case["keys"].is_object() {
            machine = machine.trust(grants(&case["keys"]), "12".repeat(32));
        }
        Player {
            defaults: Defaults::read(),
            machine,
            ms,
            calls: 0,
            sent: Vec::new(),
            chunks: Vec::new(),
            beacons: BTreeSet::new(),
            ends: Vec::new(),
            told: Vec::new(),
            others: BTreeMap::new(),
        }
    }

    fn now(&self) -> Duration {
        Duration::from_millis(self.ms.load(Relaxed))
    }

    fn step(&mut self, step: &Value) {
        self.sent.clear();
        self.chunks.clear();
        self.beacons.clear();
        self.ends.clear();
        self.told.clear();
        let nothing = [("closes", json!(false)), ("fails", json!(false)), ("forged", json!(false))];
        self.others = nothing.into_iter().chain(Some(("owner", Value::Null))).collect();
        let now = self.now();
        if let Some(from) = step["from"].as_str() {
            for number in 0..step["times"].as_u64().unwrap_or(1) {
                let here = |text: &str| text.replace('%', &number.to_string()).into_bytes();
                let header = match step["text"].as_str() {
                    Some(text) => here(text),
                    None => here(&step["message"].to_string()),
                };
                let (key, payloads) = (step["key"].as_str().unwrap_or(""), &step["payloads"]);
                let payloads = payloads.as_u64().unwrap_or(0) as usize;
                let effects = self.machine.receive_of(&here(from), key, &header, payloads, now);
                self.perform(effects);
            }
        } else if let Some(token) = step["token"].as_str() {
            let word = token.to_owned() + &step["message"].to_string();
            let effects = self.machine.receive_report(word.as_bytes(), now);
            self.others.insert("forged", json!(effects.is_none()));
            self.perform(effects.unwrap_or_default());
        } else if let Some(who) = step["closed"].as_str() {
            let effects = self.machine.unreachable(who.as_bytes(), now);
            self.perform(effects);
        } else if let Some(ms) = step["wait_ms"].as_u64() {
            for _ in 0..ms / TICK_MS {
                self.ms.fetch_add(TICK_MS, Relaxed);
                let effects = self.machine.tick(self.now());
                self.perform(effects);
            }
        } else if step["publish"].is_object() {
            self.publish(&step["publish"]);
        } else if step["offer"].is_object() {
            let names = step["offer"]["names"].as_array().into_iter().flatten();
            let names = names.map(|name| (number(&name[0]), number(&name[1]))).collect();
            self.machine.offer("m", Arc::new(content(&step["offer"])), names);
        } else if let Some(topic) = step["subscribes"].as_str() {
            if let Some(beacon) = self.machine.subscribed(topic) {
                self.send(topic, &encode(&beacon), None, false);
            }
        } else if step["allow"].is_object() {
            let effects = self.machine.grant(grants(&step["allow"]), now);
            self.perform(effects);
        } else if let Some(ticket) = step["ticket"].as_str() {
            let owner = self.machine.redeem(ticket, now);
            self.others.insert("owner", owner.map_or(Value::Null, |(name, key)| json!([name, key])));
        } else {
            assert_eq!(step["stop"], true, "{}", step);
            let effects = self.machine.close(now);
            self.perform(effects);
        }
    }

    fn publish(&mut self, call: &Value) {
        let (model, now) = (call["model"].as_str().unwrap(), self.now());
        let content = Arc::new(content(call));
        let mut offer = Offer::from(content.clone());
        offer.keep = call["keep"] == true;
        for patch in call["patches"].as_array().into_iter().flatten() {
            let base = Running {
                epoch: number(&patch["epoch"]),
                version: number(&patch["version"]),
                digest: patch["digest"].as_str().unwrap().to_owned(),
                ..Default::default()
            };
            let bytes = (0..number(&patch["nbytes"])).map(|at| at as u8).collect();
            offer.add_patch(VersionPatch::new(base, &content, bytes, Way { classes: true, work: 0.0 }));
        }
        self.calls += 1;
        match self.machine.publish(self.calls, model, offer, terms(call), now, now) {
            Ok(effects) => self.perform(effects),
            Err(_) => drop(self.others.insert("fails", json!(true))),
        }
    }

    /// Notes effects, and pushes all that may be pushed.
    fn perform(&mut self, effects: Vec<Effect>) {
        self.note(effects);
        while self.machine.is_comparing() {
            let effects = self.machine.compare();
            self.note(effects);
        }
        loop {
            let topics: Vec<String> = self.machine.pushing().cloned().collect();
            if topics.is_empty() {
                return;
            }
            for topic in topics {
                let effects = self.machine.push(&topic, self.now());
                self.note(effects);
            }
        }
    }

    fn note(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send { to, message, payload } => {
                    let to = String::from_utf8(to).unwrap();
                    self.send(&to, &encode(&message), payload.bytes(), true);
                }
                Effect::Answer { to, header } => {
                    self.send(&String::from_utf8(to).unwrap(), &header, None, true)
                }
                Effect::Broadcast { topic, message, payload } => {
                    self.send(&topic, &encode(&message), payload.bytes(), true)
                }
                Effect::HangUp => drop(self.others.insert("closes", json!(true))),
                Effect::Resolve { receipt, achieved, .. } => {
                    let workers = receipt.workers.iter();
                    let states: BTreeMap<_, _> =
                        workers.map(|(name, its)| (name.clone(), its.outcome.name())).collect();
                    let behind = receipt.workers.iter().filter(|(_, its)| !its.through.is_empty());
                    let through: BTreeMap<_, _> = behind.map(|(name, its)| (name, &its.through)).collect();
                    let mut end = json!({ "achieved": achieved, "workers": states });
                    if !through.is_empty() {
                        end["through"] = json!(through);
                    }
                    let patched = receipt.workers.iter().filter(|(_, its)| its.patched());
                    let patched = patched.filter(|(name, _)| through.contains_key(name));
                    let patched: BTreeMap<_, _> = patched.map(|(name, its)| (name, its.nbytes)).collect();
                    if !patched.is_empty() {
                        end["patched"] = json!(patched);
                    }
                    self.ends.push(end);
                }
                Effect::Notify(event) if event.kind != WorkerEventKind::Notice => {
                    self.told.push(format!("{} {}", event.kind.as_str(), event.worker));
                }
                _ => {}
            }
        }
    }

    fn send(&mut self, to: &str, header: &[u8], payload: Option<&[u8]>, counted: bool) {
        let mut message = self.defaults.filled(serde_json::from_slice(header).unwrap());
        if message["type"] == "beacon" && counted {
            let named = (number(&message["epoch"]), number(&message["version"]));
            let model = message["model"].as_str().unwrap();
            self.beacons.insert(format!("{} {} {}", model, named.0, named.1));
            return;
        }
        let payload = payload.unwrap_or_default();
        message["to"] = json!(to);
        message["payload"] = json!(payload.len());
        if message["type"] == "chunk" {
            assert_eq!(message["crc"], crc32c(payload));
            message["first"] = message.as_object_mut().unwrap().remove("index").unwrap();
            message["count"] = json!(1);
            if let Some(at) = self.sent.iter().rposition(|last| last["to"] == to) {
                if follows(&message, &self.sent[at]) {
                    let last = &mut self.sent[at];
                    self.chunks[at].extend_from_slice(payload);
                    last["count"] = json!(number(&last["count"]) + 1);
                    last["crc"] = json!(crc32c(&self.chunks[at]));
                    last["payload"] = json!(self.chunks[at].len());
                    return;
                }
            }
        }
        self.sent.push(message);
        self.chunks.push(payload.to_vec());
    }

    /// What the user sees of a worker.
    fn status(&self, name: &str) -> Value {
        let status = self.machine.status(self.now());
        status.get(name).map_or(Value::Null, |its| {
            let runs = its.models.iter().filter_map(|(model, key)| Some((model.clone(), (*key)?)));
            let running: BTreeMap<_, _> = runs.map(|(model, (e, v))| (model, json!([e, v]))).collect();
            let state = format!("{:?}", its.state).to_lowercase();
            json!({ "state": state, "running": running, "relay": its.relay, "through": its.through })
        })
    }

    /// Returns what is not as a step has it.
    fn faults(&self, expect: &Value) -> Vec<String> {
        let mut faults = Vec::new();
        let none = json!([]);
        let wanted = expect.get("sends").unwrap_or(&none);
        if let Some(wanted) = wanted.as_array() {
            let (found, right) = (by_recipient(&self.sent), by_recipient(wanted));
            let all: BTreeSet<&String> = found.keys().chain(right.keys()).collect();
            for to in all {
                let (found, right) = (found.get(to), right.get(to));
                let (found, right) = (json!(found.unwrap_or(&vec![])), json!(right.unwrap_or(&vec![])));
                if !contains(&found, &right) {
                    faults.push(format!("to {}: {}, not {}", to, found, right));
                }
            }
        }
        let ends = expect.get("ends").unwrap_or(&none);
        if ends.is_array() && json!(self.ends) != *ends {
            faults.push(format!("ends {}, not {}", json!(self.ends), ends));
        }
        if expect["tells"].is_array() && json!(self.told) != expect["tells"] {
            faults.push(format!("tells {:?}, not {}", self.told, expect["tells"]));
        }
        if expect["beacons"].is_array() && json!(self.beacons) != expect["beacons"] {
            faults.push(format!("beacons {:?}, not {}", self.beacons, expect["beacons"]));
        }
        for (name, value) in &self.others {
            let free = if *name == "owner" { Value::Null } else { json!(false) };
            if expect.get(*name).unwrap_or(&free) != value {
                faults.push(format!("{}: {}", name, value));
            }
        }
        for (name, status) in expect["status"].as_object().into_iter().flatten() {
            let found = self.status(name);
            let same = status.as_object().map_or(found.is_null(), |fields| {
                found.is_object() && fields.iter().all(|(field, value)| found[field] == *value)
            });
            if !same {
                faults.push(format!("{} is {}, not {}", name, found, status));
            }
        }
        faults
    }
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{} is not a number", value))
}

/// True if a chunk comes right after the last one.
fn follows(chunk: &Value, last: &Value) -> bool {
    let same = ["type", "model", "epoch", "version", "patch"].iter().all(|name| chunk[*name] == last[*name]);
    same && number(&chunk["first"]) == number(&last["first"]) + number(&last["count"])
}

fn by_recipient(messages: &[Value]) -> BTreeMap<String, Vec<&Value>> {
    let mut found = BTreeMap::<String, Vec<&Value>>::new();
    for message in messages {
        found.entry(message["to"].as_str().unwrap().to_owned()).or_default().push(message);
    }
    found
}

/// True if a value is the one wanted; an object may have other fields beside.
fn contains(value: &Value, wanted: &Value) -> bool {
    match (value, wanted) {
        (Value::Object(fields), Value::Object(wanted)) => wanted
            .iter()
            .all(|(name, wanted)| fields.get(name).map_or(false, |value| contains(value, wanted))),
        (Value::Array(values), Value::Array(wanted)) => {
            values.len() == wanted.len() && values.iter().zip(wanted).all(|(a, b)| contains(a, b))
        }
        _ => value == wanted,
    }
}

fn grants(keys: &Value) -> ByKey {
    let grant = |(key, about): (&String, &Value)| {
        let role = match about[1].as_str() {
            Some("observer") => Role::Observer,
            Some("relay") => Role::Relay,
            _ => Role::Worker,
        };
        (key.clone(), Grant { name: about[0].as_str().unwrap().to_owned(), role })
    };
    keys.as_object().unwrap().iter().map(grant).collect()
}

fn content(call: &Value) -> Content {
    let (nbytes, seed) = (number(&call["nbytes"]), number(&call["seed"]));
    let bytes: Vec<u8> = (0..nbytes).map(|at| (seed * 16 + at) as u8).collect();
    let tensor = TensorView { name: "w", dtype: Dtype::U8, shape: &[nbytes], bytes: &bytes };
    Copier::default().copy(&[tensor], number(&call["chunk_bytes"])).unwrap()
}

fn terms(call: &Value) -> PublishTerms {
    let ms = |name: &str, or: u64| Duration::from_millis(call[name].as_u64().unwrap_or(or));
    let names = |all: &Vec<Value>| all.iter().map(|name| name.as_str().unwrap().to_owned()).collect();
    PublishTerms {
        workers: call["workers"].as_array().map(names),
        require: call["require"].as_u64().map_or(Require::All, |count| Require::AtLeast(count as usize)),
        wait: match call["wait"].as_str() {
            Some("staged") => Wait::Staged,
            Some("none") => Wait::Nobody,
            _ => Wait::Applied,
        },
        commit: if call["commit"] == "together" { AnnounceCommit::Together } else { AnnounceCommit::Auto },
        timeout: ms("timeout_ms", 60_000),
        grace: ms("grace_ms", 5000),
        grace_of_gone: ms("gone_grace_ms", 0),
        expect: call["expect"].as_u64().unwrap_or(0) as usize,
    }
}

#[test]
fn the_publisher_plays_its_sequences() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/vectors/publisher_sequences.json");
    let table: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let cases = table["cases"].as_array().unwrap();
    assert!(cases.len() > 100, "only {} cases", cases.len());
    let mut faults = Vec::new();
    for case in cases {
        let mut player = Player::new(case);
        for (at, step) in case["steps"].as_array().unwrap().iter().enumerate() {
            player.step(step);
            let found = player.faults(&step["expect"]);
            if !found.is_empty() {
                faults.push(format!("{} {}: {}", case["name"], at, found.join("\n    ")));
                break; // all that follows would differ, too
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
