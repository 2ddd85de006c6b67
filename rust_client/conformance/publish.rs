//! A publisher that reads commands as lines of JSON from stdin, and prints results and events as lines of
//! JSON to stdout.

use serde_json::{json, Value};
use std::error::Error;
use std::fs::File;
use std::io::{self, BufRead, Read, Seek, SeekFrom, Write};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;
use weightbus::{
    Encoding, Outcome, PublishOptions, Publisher, PublisherBuilder, Publishing, Receipt, Require, Wait,
    WorkerEvent, WorkerState,
};

type Fault = Box<dyn Error>;

/// Serves until standard input ends.
pub fn serve(arguments: &[String], usage: &str) -> Result<(), Fault> {
    let publisher = Arc::new(builder(arguments, usage)?.on_worker(tell).bind()?);
    say(&json!({
        "event": "bound",
        "address": publisher.address(),
        "data_address": publisher.data_address(),
        "epoch": publisher.epoch(),
    }));
    let mut waiting: Vec<JoinHandle<()>> = Vec::new();
    let mut tensors = Tensors::default();
    for line in io::stdin().lock().lines() {
        let command: Value = serde_json::from_str(&line?)?;
        waiting.retain(|thread| !thread.is_finished()); // each thread keeps its stack until then
        let id = command["id"].clone();
        match command["do"].as_str() {
            Some("publish") => match publish(&publisher, &command, &mut tensors) {
                Ok(publishing) => waiting.push(thread::spawn(move || answer(&id, publishing.wait()))),
                Err(error) => say(&json!({"event": "error", "id": id, "text": error.to_string()})),
            },
            Some("workers") => {
                let workers = workers(&publisher)?;
                say(&json!({"event": "workers", "id": id, "workers": workers}));
            }
            _ => return Err(format!("unknown command: {}", command).into()),
        }
    }
    publisher.close();
    waiting.into_iter().for_each(|thread| drop(thread.join()));
    Ok(())
}

fn tell(event: &WorkerEvent) {
    let kind = event.kind.as_str();
    say(&json!({"event": "worker", "kind": kind, "worker": event.worker, "text": event.text}));
}

/// Prints a line as one piece, from any thread.
fn say(line: &Value) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{}", line).and_then(|()| out.flush()); // the reader may be gone
}

fn builder(arguments: &[String], usage: &str) -> Result<PublisherBuilder, Fault> {
    let (address, rest) = arguments.split_first().ok_or(usage)?;
    let (mut builder, mut rest) = (Publisher::builder(address), rest.iter());
    let (mut ping, mut lost_after) = (1.0, 5.0);
    while let Some(option) = rest.next() {
        if option == "--insecure" {
            builder = builder.insecure();
            continue;
        }
        let value = rest.next().ok_or(usage)?;
        builder = match option.as_str() {
            "--data" => builder.data(value),
            "--advertise" => builder.advertise(value),
            "--epoch" => builder.epoch(value.parse()?),
            "--chunk-bytes" => builder.chunk_bytes(value.parse()?),
            "--state" => builder.state(value),
            "--history" => builder.history(value.parse()?),
            "--keys" => builder.keys(value),
            "--rekey" => builder.rekey(Duration::from_secs_f64(value.parse()?)),
            "--ping" => {
                ping = value.parse()?;
                builder
            }
            "--lost-after" => {
                lost_after = value.parse()?;
                builder
            }
            _ => return Err(usage.into()),
        };
    }
    Ok(builder.timing(Duration::from_secs_f64(ping), Duration::from_secs_f64(lost_after)))
}

fn publish(publisher: &Publisher, command: &Value, tensors: &mut Tensors) -> Result<Publishing, Fault> {
    let names = |list: &Vec<Value>| list.iter().filter_map(|name| Some(name.as_str()?.to_owned())).collect();
    let seconds = |field: &str| command[field].as_f64().map(Duration::from_secs_f64);
    let defaults = PublishOptions::default();
    let options = PublishOptions {
        workers: command["workers"].as_array().map(names),
        require: command["require"].as_u64().map_or(Require::All, |count| Require::AtLeast(count as usize)),
        wait: match command["wait"].as_str() {
            Some("staged") => Wait::Staged,
            Some("none") => Wait::Nobody,
            _ => Wait::Applied,
        },
        together: command["commit"] == "together",
        timeout: seconds("timeout").unwrap_or(defaults.timeout),
        grace: seconds("grace"),
        expect: command["expect"].as_u64().map(|count| count as usize),
        encoding: match command["encoding"].as_str() {
            Some("delta") => Encoding::Delta,
            Some("flat") => Encoding::DeltaFlat,
            Some("auto") => Encoding::Auto,
            _ => Encoding::Raw,
        },
        metadata: serde_json::from_value(command["metadata"].clone()).unwrap_or_default(),
    };
    let bytes = tensors.read(command["file"].as_str().ok_or("no file")?)?;
    Ok(publisher.publish_safetensors(command["model"].as_str().ok_or("no model")?, bytes, &options)?)
}

/// The tensors to publish. A trainer has them in memory, so reading them must cost little: the memory is
/// reused, and the file that was read last stays open.
#[derive(Default)]
struct Tensors {
    bytes: Vec<u8>,
    last: Option<(String, File)>,
}

impl Tensors {
    /// Reads a file again from its beginning, because another process may have written it anew.
    fn read(&mut self, path: &str) -> io::Result<&[u8]> {
        let known = self.last.take().filter(|(name, _)| name == path);
        let mut file = known.map_or_else(|| File::open(path), |(_, file)| Ok(file))?;
        self.bytes.clear();
        file.seek(SeekFrom::Start(0))?;
        file.read_to_end(&mut self.bytes)?;
        self.last = Some((path.to_owned(), file));
        Ok(&self.bytes)
    }
}

fn answer(id: &Value, result: Result<Receipt, weightbus::Error>) {
    let (receipt, achieved, text) = match result {
        Ok(receipt) => (receipt, true, String::new()),
        Err(error) => {
            let text = error.to_string();
            match error {
                weightbus::Error::Publish { receipt, .. } => (*receipt, false, text),
                _ => return say(&json!({"event": "error", "id": id, "text": text})),
            }
        }
    };
    let of = |(name, worker): (&String, &weightbus::WorkerReceipt)| {
        let seconds = worker.after.map(|after| after.as_secs_f64());
        let outcome: Outcome = worker.outcome;
        let its = json!({
            "state": outcome.name(),
            "seconds": seconds,
            "detail": worker.detail,
            "encoding": worker.encoding,
            "nbytes": worker.nbytes,
            "through": worker.through,
        });
        (name.clone(), its)
    };
    let workers: serde_json::Map<String, Value> = receipt.workers.iter().map(of).collect();
    say(&json!({
        "event": "receipt",
        "id": id,
        "achieved": achieved,
        "text": text,
        "model": receipt.model,
        "epoch": receipt.epoch,
        "version": receipt.version,
        "nbytes": receipt.nbytes,
        "seconds": receipt.took.as_secs_f64(),
        "digest": receipt.digest,
        "metadata": receipt.metadata,
        "workers": workers,
    }));
}

fn workers(publisher: &Publisher) -> Result<Value, Fault> {
    let mut workers = serde_json::Map::new();
    for (name, its) in publisher.workers()? {
        let state = match its.state {
            WorkerState::Live => "live",
            WorkerState::Stuck => "stuck",
            WorkerState::Lost => "lost",
        };
        let row = json!({
            "state": state,
            "road": match (its.shared_memory, its.pushed) {
                (true, _) => "shared",
                (false, true) => "pushed",
                (false, false) => "pulled",
            },
            "models": its.models,
            "phase": its.doing,
            "silent_s": its.silent.as_secs_f64(),
            "client": its.client,
            "host": its.host,
            "pid": its.pid,
            "relay": its.relay,
            "through": its.through,
        });
        workers.insert(name, row);
    }
    Ok(workers.into())
}
