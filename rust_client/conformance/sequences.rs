//! Plays the sequences of the golden vectors with a worker's machine, a simulated clock, and a user that
//! applies each version at once.

use crate::vectors::{broken, bytes};
use serde_json::{json, Value};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use weightbus::effects::{Effect, Host};
use weightbus::layout::Layout;
use weightbus::limits::{Timing, BYTES_MAX};
use weightbus::machine::{Wanted, WorkerMachine};
use weightbus::messages::{encode, FromPublisher, FromWorker, Hello, Pong};
use weightbus::staging::StagedVersion;
use weightbus::zmtp::{Published, PublishedPayload};
use weightbus::{Dtype, Model, Tensor};

const TICK: Duration = Duration::from_millis(100);

/// Returns, for each step of a case, the messages that the worker sent, and the versions that it then runs.
pub fn play(folder: &Path, case: &Value) -> io::Result<Option<Value>> {
    let mut player = Player::new(case)?;
    let steps = case["steps"].as_array().ok_or_else(|| broken("steps"))?;
    let played: Vec<Value> = steps.iter().map(|step| player.step(folder, step)).collect::<io::Result<_>>()?;
    Ok(Some(json!({ "steps": played })))
}

/// The models that a version is applied to, by name.
struct Memory(BTreeMap<String, Model>);

impl Host for Memory {
    fn fault(&self, model: &str, layout: &Layout) -> Option<String> {
        self.0.get(model)?.fault(layout, false, false)
    }
}

struct Player {
    machine: WorkerMachine,
    now: Duration,
    sent: Vec<Value>,
    token: u64, // of the last ping
    runs: BTreeMap<String, u64>,
    applies: VecDeque<String>, // results of the next applies: `refused`, `torn`, or success
}

impl Player {
    fn new(case: &Value) -> io::Result<Player> {
        let models =
            case["models"].as_array().ok_or_else(|| broken("models"))?.iter().filter_map(Value::as_str);
        let wanted: Vec<Wanted> = models.map(|model| Wanted { model: model.to_owned(), nbytes: 0 }).collect();
        let identity = Hello { name: "w".to_owned(), instance: "0".repeat(32), ..Hello::default() };
        let bytes_max = case["bytes_max"].as_u64().unwrap_or(BYTES_MAX);
        let applies = case["applies"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let memory = Arc::new(Memory(memory(&case["in_place"])?));
        Ok(Player {
            machine: WorkerMachine::new(identity, &wanted, memory, bytes_max, Timing::default()),
            now: Duration::from_secs(1000),
            sent: Vec::new(),
            token: 0,
            runs: BTreeMap::new(),
            applies: applies.map(str::to_owned).collect(),
        })
    }

    fn step(&mut self, folder: &Path, step: &Value) -> io::Result<Value> {
        let frames = |channel: &str| -> io::Result<Option<Vec<Vec<u8>>>> {
            let frames = step[channel].as_array();
            frames.map(|frames| frames.iter().map(|frame| bytes(folder, frame)).collect()).transpose()
        };
        if let Some(milliseconds) = step["wait_ms"].as_u64() {
            self.wait(Duration::from_millis(milliseconds));
        } else if let Some(epoch) = step["pong"].as_u64() {
            let pong = FromPublisher::Pong(Pong { token: self.token, epoch, ..Default::default() });
            let effects = self.machine.receive(&encode(&pong), &[], self.now);
            self.perform(effects);
        } else if let Some(frames) = frames("data")? {
            let effects = self.machine.receive_published(&published(frames), self.now);
            self.perform(effects);
        } else if let Some(frames) = frames("control")? {
            let payloads: Vec<&[u8]> = frames.iter().skip(1).map(|frame| &frame[..]).collect();
            let header = frames.first().map_or(&[][..], |frame| &frame[..]);
            let effects = self.machine.receive(header, &payloads, self.now);
            self.perform(effects);
        }
        Ok(json!({ "sent": std::mem::take(&mut self.sent), "runs": self.runs }))
    }

    fn wait(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.now = until.min(self.now + TICK);
            let mut effects = self.machine.connected(self.now);
            effects.extend(self.machine.tick(self.now));
            self.perform(effects);
        }
    }

    fn perform(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send(message) => {
                    if let FromWorker::Ping(ping) = &message {
                        self.token = ping.token;
                    }
                    self.sent.push(serde_json::from_slice(&encode(&message)).unwrap_or(Value::Null));
                }
                Effect::Renamed { model, key, .. } => drop(self.runs.insert(model, key.1)),
                Effect::Ready(staged) => self.apply(staged),
                Effect::ReadyAtOnce(versions) => versions.into_iter().for_each(|staged| self.apply(staged)),
                _ => {}
            }
        }
    }

    /// Reports the result of an apply, as the case requires it.
    fn apply(&mut self, staged: StagedVersion) {
        let (model, key) = (staged.model.clone(), staged.key);
        drop(staged);
        self.machine.taken(&model, key);
        let effects = match self.applies.pop_front().as_deref() {
            Some("refused") => self.machine.failed(&model, key, "no", true, self.now),
            Some("torn") => {
                self.runs.insert(model.clone(), 0);
                self.machine.failed(&model, key, "no", false, self.now)
            }
            _ => {
                self.runs.insert(model.clone(), key.1);
                self.machine.applied(&model, key, "", None, "", self.now)
            }
        };
        self.perform(effects);
    }
}

fn published(frames: Vec<Vec<u8>>) -> Published<weightbus::machine::Ticket> {
    let payload_count = frames.len().saturating_sub(1);
    let mut frames = frames.into_iter();
    let header = frames.next().unwrap_or_default();
    let payload = frames.next().map_or(PublishedPayload::None, PublishedPayload::Bytes);
    Published { header, payload_count, payload }
}

/// Makes the models of a spec, which has the dtype and shape of each tensor, by model and name.
pub fn memory(spec: &Value) -> io::Result<BTreeMap<String, Model>> {
    let mut models = BTreeMap::new();
    for (model, tensors) in spec.as_object().into_iter().flatten() {
        let mut memory = Vec::new();
        for (name, tensor) in tensors.as_object().ok_or_else(|| broken("tensors by name"))? {
            let dtype =
                tensor["dtype"].as_str().and_then(Dtype::named).ok_or_else(|| broken("known dtype"))?;
            let shape = tensor["shape"].as_array().ok_or_else(|| broken("shape"))?;
            let shape: Option<Vec<u64>> = shape.iter().map(Value::as_u64).collect();
            memory.push(Tensor::zeros(name, dtype, &shape.ok_or_else(|| broken("shape of sizes"))?));
        }
        let made = Model::new(memory).map_err(|error| broken(&error.to_string()))?;
        models.insert(model.clone(), made);
    }
    Ok(models)
}
