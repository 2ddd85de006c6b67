//! A worker that says on stdout what happens to it, one line of JSON for each event.

use crate::sequences::memory;
use serde_json::{json, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fs;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use weightbus::checksum::crc32c;
use weightbus::{Builder, Event, Model, Update, Worker};

static TERMINATED: AtomicBool = AtomicBool::new(false);

const LOOK: Duration = Duration::from_millis(100); // how often to look whether to end

/// What the command line asks for.
pub struct Options {
    pub address: String,
    pub name: String,
    pub models: Vec<String>,
    pub in_place: Option<String>,
    pub tensors: bool,
    pub bytes_max: Option<u64>,
    pub network: bool,
    pub seconds: f64,
    pub turn_down: Vec<u64>,
    pub spoil: Vec<u64>,
    pub apply_seconds: (f64, Option<Vec<u64>>), // and which versions take so long; nothing: all
    pub apply_timeout: Option<f64>,
    pub partial: bool,
    pub cast: bool,
    pub keys: Option<String>,
}

/// Applies whatever comes until SIGTERM, or until the time is over.
pub fn follow(options: Options) -> Result<(), Box<dyn Error>> {
    ctrlc::set_handler(|| TERMINATED.store(true, Ordering::Relaxed))?; // SIGTERM, too
    let end = Instant::now() + Duration::from_secs_f64(options.seconds);
    let memory = in_place(options.in_place.as_deref())?;
    let worker = connect(&options, &memory)?;
    let (done, mut told) = (AtomicBool::new(false), BTreeMap::new());
    std::thread::scope(|scope| {
        // Without checksums it is being measured: nobody else should take time. After a cast bytes differ.
        for (model, weights) in memory.iter().filter(|_| options.tensors && !options.cast) {
            let done = &done;
            scope.spawn(move || look_for_torn(model, weights, done));
        }
        while !TERMINATED.load(Ordering::Relaxed) && Instant::now() < end {
            match worker.receive(LOOK) {
                Ok(Some(update)) => {
                    applied(&update, memory.get(&update.model), options.tensors);
                    told.insert(update.model, (update.epoch, update.version));
                }
                Ok(None) => look(&worker, &mut told),
                Err(error) => eprintln!("{}", error), // `on_event` has said so on stdout
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    worker.close();
    Ok(())
}

fn connect(options: &Options, memory: &BTreeMap<String, Model>) -> Result<Worker, weightbus::Error> {
    let mut builder = Worker::builder(&options.address).name(&options.name).shared_memory(!options.network);
    for model in &options.models {
        builder = match memory.get(model) {
            Some(weights) => builder.model(model, weights),
            None => builder.snapshots(model),
        };
    }
    builder = builder.partial(options.partial).cast(options.cast);
    if let Some(file) = &options.keys {
        builder = builder.keys(file);
    }
    if let Some(bytes) = options.bytes_max {
        builder = builder.bytes_max(bytes);
    }
    if let Some(seconds) = options.apply_timeout {
        builder = builder.apply_timeout(Duration::from_secs_f64(seconds));
    }
    deciding(builder, options, memory.keys().cloned().collect()).on_event(report).connect()
}

/// The user's functions, if there is anything for them to do. Models of these names are in place.
fn deciding(builder: Builder, options: &Options, in_place: BTreeSet<String>) -> Builder {
    let (turn_down, spoil) = (options.turn_down.clone(), options.spoil.clone());
    let (seconds, slow) = options.apply_seconds.clone();
    if turn_down.is_empty() && spoil.is_empty() && seconds == 0.0 {
        return builder;
    }
    let (early, here) = (turn_down.clone(), in_place.clone());
    builder
        .before_apply(move |offer| {
            verdict(here.contains(offer.model) && early.contains(&offer.version), "turn down")
        })
        .apply(move |offer| {
            if slow.as_ref().map_or(true, |slow| slow.contains(&offer.version)) {
                wait(Duration::from_secs_f64(seconds));
            }
            if in_place.contains(offer.model) {
                return verdict(spoil.contains(&offer.version), "break");
            }
            verdict(turn_down.contains(&offer.version), "turn down")
        })
}

fn verdict(no: bool, what: &str) -> Result<(), Box<dyn Error>> {
    if no {
        Err(format!("told to {}", what).into())
    } else {
        Ok(())
    }
}

fn wait(time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end && !TERMINATED.load(Ordering::Relaxed) {
        std::thread::sleep(LOOK.min(end.saturating_duration_since(Instant::now())));
    }
}

/// Makes the models of `--in-place`.
fn in_place(file: Option<&str>) -> Result<BTreeMap<String, Model>, Box<dyn Error>> {
    let spec: Value = match file {
        Some(file) => serde_json::from_slice(&fs::read(file)?)?,
        None => json!({}),
    };
    Ok(memory(&spec)?)
}

fn applied(update: &Update, memory: Option<&Model>, tensors: bool) {
    let mut row = json!({
        "event": "applied",
        "model": update.model,
        "epoch": update.epoch,
        "version": update.version,
        "digest": update.digest,
        "metadata": update.metadata,
    });
    if tensors {
        row["tensors"] = match (memory, &update.snapshot) {
            (Some(model), _) => {
                let weights = model.read();
                weights.tensors().iter().map(|t| (t.name().to_owned(), json!(crc32c(t.bytes())))).collect()
            }
            (None, Some(snapshot)) => {
                let crc = |name: &str| snapshot.bytes(name).map_or(Value::Null, |bytes| json!(crc32c(bytes)));
                snapshot.tensors().map(|t| (t.name.clone(), crc(&t.name))).collect()
            }
            (None, None) => Value::Null,
        };
    }
    say(&row);
}

/// Says what runs by another name than was told last.
fn look(worker: &Worker, told: &mut BTreeMap<String, (u64, u64)>) {
    for (model, its) in worker.state().models {
        if let Some((epoch, version)) = its.running.filter(|runs| told.get(&model) != Some(runs)) {
            say(&json!({
                "event": "runs", "model": model, "epoch": epoch, "version": version, "metadata": its.metadata,
            }));
            told.insert(model, (epoch, version));
        }
    }
}

fn report(event: &Event) {
    match event {
        Event::Joined { epoch } => say(&json!({ "event": "joined", "epoch": epoch })),
        Event::Lost => say(&json!({ "event": "lost" })),
        Event::Refused { code, text } => {
            say(&json!({ "event": "refused", "code": code.as_str(), "text": text }))
        }
        Event::Rejected { model, epoch, version, code, text } => say(&json!({
            "event": "failed", "model": model, "epoch": epoch, "version": version, "code": code.as_str(), "text": text,
        })),
        other => eprintln!("{:?}", other),
    }
}

/// Reads a model all the time: all bytes of a version are the same in the scenarios that ask for it.
fn look_for_torn(model: &str, weights: &Model, done: &AtomicBool) {
    while !done.load(Ordering::Relaxed) {
        let weights = weights.read();
        let mut bytes = weights.tensors().iter().flat_map(|tensor| tensor.bytes().chunks(1 << 16));
        let first = weights.tensors().iter().find_map(|tensor| tensor.bytes().first());
        if first.map_or(false, |first| bytes.any(|piece| piece.iter().any(|byte| byte != first))) {
            say(&json!({ "event": "torn", "model": model, "version": weights.version().map(|(_, v)| v) }));
            return;
        }
        drop(bytes);
        drop(weights);
        std::thread::yield_now();
    }
}

fn say(row: &Value) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{}", row).and_then(|()| out.flush()); // nobody listens any more
}
