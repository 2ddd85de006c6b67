//! A worker that prints each of its events to stdout, as a line of JSON.

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

const CHECK_INTERVAL: Duration = Duration::from_millis(100); // between two checks whether to end

/// The options of the command line.
pub struct Options {
    pub address: String,
    pub name: String,
    pub models: Vec<String>,
    pub in_place: Option<String>,
    pub tensors: bool,
    pub bytes_max: Option<u64>,
    pub network: bool,
    pub seconds: f64,
    pub reject_versions: Vec<u64>,              // rejected before a byte changes
    pub fail_versions: Vec<u64>,                // fail after bytes have changed
    pub apply_seconds: (f64, Option<Vec<u64>>), // with the versions that take so long; `None`: all
    pub apply_timeout: Option<f64>,
    pub partial: bool,
    pub cast: bool,
    pub keys: Option<String>,
}

/// Applies every version until SIGTERM, or until the time is over.
pub fn follow(options: Options) -> Result<(), Box<dyn Error>> {
    ctrlc::set_handler(|| TERMINATED.store(true, Ordering::Relaxed))?; // for SIGINT and SIGTERM
    let end = Instant::now() + Duration::from_secs_f64(options.seconds);
    let memory = in_place(options.in_place.as_deref())?;
    let worker = connect(&options, &memory)?;
    let (done, mut printed) = (AtomicBool::new(false), BTreeMap::new());
    std::thread::scope(|scope| {
        // Without checksums, the worker is being measured, and no other thread may take time. After a cast,
        // the bytes of a version differ.
        for (model, weights) in memory.iter().filter(|_| options.tensors && !options.cast) {
            let done = &done;
            scope.spawn(move || look_for_torn(model, weights, done));
        }
        while !TERMINATED.load(Ordering::Relaxed) && Instant::now() < end {
            match worker.receive(CHECK_INTERVAL) {
                Ok(Some(update)) => {
                    print_applied(&update, memory.get(&update.model), options.tensors);
                    printed.insert(update.model, (update.epoch, update.version));
                }
                Ok(None) => print_renamed(&worker, &mut printed),
                Err(error) => eprintln!("{}", error), // `on_event` prints the event
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
    with_user_functions(builder, options, memory.keys().cloned().collect()).on_event(report).connect()
}

/// Adds the user's functions, if the options need any. `in_place` has the names of models in place.
fn with_user_functions(builder: Builder, options: &Options, in_place: BTreeSet<String>) -> Builder {
    let (rejected, failing) = (options.reject_versions.clone(), options.fail_versions.clone());
    let (seconds, slow) = options.apply_seconds.clone();
    if rejected.is_empty() && failing.is_empty() && seconds == 0.0 {
        return builder;
    }
    let (rejected_early, early_in_place) = (rejected.clone(), in_place.clone());
    builder
        .before_apply(move |offer| {
            verdict(
                early_in_place.contains(offer.model) && rejected_early.contains(&offer.version),
                "turn down",
            )
        })
        .apply(move |offer| {
            if slow.as_ref().map_or(true, |slow| slow.contains(&offer.version)) {
                wait(Duration::from_secs_f64(seconds));
            }
            if in_place.contains(offer.model) {
                return verdict(failing.contains(&offer.version), "break");
            }
            verdict(rejected.contains(&offer.version), "turn down")
        })
}

/// Returns an error if `fails`.
fn verdict(fails: bool, what: &str) -> Result<(), Box<dyn Error>> {
    if fails {
        Err(format!("told to {}", what).into())
    } else {
        Ok(())
    }
}

fn wait(time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end && !TERMINATED.load(Ordering::Relaxed) {
        std::thread::sleep(CHECK_INTERVAL.min(end.saturating_duration_since(Instant::now())));
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

fn print_applied(update: &Update, memory: Option<&Model>, tensors: bool) {
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

/// Prints each running version whose (epoch, version) is not the one that was printed last.
fn print_renamed(worker: &Worker, printed: &mut BTreeMap<String, (u64, u64)>) {
    for (model, its) in worker.state().models {
        if let Some((epoch, version)) = its.running.filter(|runs| printed.get(&model) != Some(runs)) {
            say(&json!({
                "event": "runs", "model": model, "epoch": epoch, "version": version, "metadata": its.metadata,
            }));
            printed.insert(model, (epoch, version));
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

/// Reads a model repeatedly, and prints an event if its bytes differ: in the scenarios that check this, all
/// bytes of a version are equal.
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
    let _ = writeln!(out, "{}", row).and_then(|()| out.flush()); // the reader may be gone
}
