//! Runs the newest version of the model `line`, and prints a prediction with each version.
//!
//!     worker tcp://localhost:5555 --name w0
//!
//! The address may be a list, separated by commas, in order of preference.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use weightbus::{Error, Model, Tensor, Update, Weights, Worker};

static TERMINATED: AtomicBool = AtomicBool::new(false);

const CHECK_INTERVAL: Duration = Duration::from_millis(100); // between two checks whether to end

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::parse(std::env::args().skip(1))?;
    ctrlc::set_handler(|| TERMINATED.store(true, Ordering::Relaxed))?; // for SIGINT and SIGTERM
    let line =
        Model::new([Tensor::new("slope", &[3], vec![0f32; 3]), Tensor::new("offset", &[], vec![0f32])])?;
    let mut builder = Worker::builder(options.address).model("line", &line);
    if let Some(name) = options.name {
        builder = builder.name(name);
    }
    let worker = builder.connect()?;
    let mut quiet = Duration::ZERO;
    while quiet < options.patience && !TERMINATED.load(Ordering::Relaxed) {
        match worker.receive(CHECK_INTERVAL) {
            Ok(Some(update)) => {
                print_update(&worker, &update, &line.read())?;
                quiet = Duration::ZERO;
            }
            Ok(None) => quiet += CHECK_INTERVAL,
            Err(error) => {
                eprintln!("{}", error);
                quiet += CHECK_INTERVAL;
            }
        }
    }
    worker.close();
    Ok(())
}

/// Prints a prediction as a line of JSON.
fn print_update(worker: &Worker, update: &Update, weights: &Weights) -> Result<(), Error> {
    let slope = weights.get::<f32>("slope")?;
    let offset = weights.get::<f32>("offset")?[0];
    let y = slope[0] + 2.0 * slope[1] + 3.0 * slope[2] + offset; // 4.5 when the fit is perfect
    let row = serde_json::json!({
        "worker": worker.name(),
        "version": update.version,
        "prediction": (f64::from(y) * 10_000.0).round() / 10_000.0,
        "digest": update.digest,
    });
    let written = writeln!(io::stdout(), "{}", row).and_then(|()| io::stdout().flush());
    written.map_err(|error| Error::Io { what: "cannot write a line".to_owned(), error })
}

struct Options {
    address: String,
    name: Option<String>,
    patience: Duration,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options, String> {
        let usage = "usage: worker ADDRESS[,ADDRESS...] [--name NAME] [--patience SECONDS]";
        let mut options = Options { address: String::new(), name: None, patience: Duration::from_secs(30) };
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--name" => options.name = Some(arguments.next().ok_or(usage)?),
                "--patience" => {
                    let seconds = arguments.next().and_then(|text| text.parse().ok());
                    options.patience = seconds.and_then(duration).ok_or(usage)?;
                }
                _ if options.address.is_empty() => options.address = argument,
                _ => return Err(usage.to_owned()),
            }
        }
        if options.address.is_empty() {
            return Err(usage.to_owned());
        }
        Ok(options)
    }
}

fn duration(seconds: f64) -> Option<Duration> {
    (0.0..1e9).contains(&seconds).then(|| Duration::from_secs_f64(seconds))
}
