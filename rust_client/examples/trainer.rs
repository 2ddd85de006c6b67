//! Fits a line to noisy data, and publishes it once a second to the workers that run it.
//!
//!     cargo run --example trainer -- tcp://127.0.0.1:5555
//!
//! Does the same as examples/numpy_trainer.py. Workers in any language can receive the line.

use std::error::Error;
use std::io::{self, Write};
use std::process::exit;
use std::sync::mpsc::{channel, RecvTimeoutError};
use std::time::Duration;
use weightbus::{Dtype, PublishOptions, Publisher, Receipt, Require, TensorView, WorkerState};

const TRUTH: ([f32; 3], f32) = ([2.0, -1.0, 0.5], 3.0); // slope and offset of the data
const LEARNING_RATE: f32 = 0.1;
const SECOND: Duration = Duration::from_secs(1);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Err(error) = train(&arguments) {
        eprintln!("{}", error);
        exit(1);
    }
}

fn train(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let builder = match arguments {
        [address] => Publisher::builder(address),
        [address, option] if option == "--insecure" => Publisher::builder(address).insecure(),
        _ => return Err("usage: trainer ADDRESS [--insecure]".into()),
    };
    let (stop, stopped) = channel();
    ctrlc::set_handler(move || stop.send(()).unwrap_or(()))?; // for SIGINT and SIGTERM
    let publisher = builder.bind()?;
    eprintln!("publishing at {}", publisher.address());
    let mut line = Line { slope: [0.0; 3], offset: 0.0 };
    let mut noise = Noise(publisher.epoch());
    loop {
        let loss = (0..5).map(|_| line.step(&mut noise)).fold(f32::INFINITY, f32::min);
        let receipt = publish(&publisher, &line)?;
        print_receipt(&publisher, &receipt, loss)?;
        if stopped.recv_timeout(SECOND) != Err(RecvTimeoutError::Timeout) {
            return Ok(());
        }
    }
}

/// Publishes the line. Requires no worker to run the version: a lost worker gets the newest version when
/// it returns.
fn publish(publisher: &Publisher, line: &Line) -> Result<Receipt, weightbus::Error> {
    let slope: Vec<u8> = line.slope.iter().flat_map(|value| value.to_le_bytes()).collect();
    let tensors = [
        TensorView { name: "slope", dtype: Dtype::F32, shape: &[3], bytes: &slope },
        TensorView { name: "offset", dtype: Dtype::F32, shape: &[], bytes: &line.offset.to_le_bytes() },
    ];
    let options =
        PublishOptions { require: Require::AtLeast(0), timeout: 10 * SECOND, ..PublishOptions::default() };
    publisher.publish("line", &tensors, &options)
}

/// Prints a receipt as a line of JSON.
fn print_receipt(publisher: &Publisher, receipt: &Receipt, loss: f32) -> Result<(), Box<dyn Error>> {
    let outcomes = receipt.workers.iter().map(|(name, worker)| (name.clone(), worker.outcome.name().into()));
    let roster = publisher.workers()?;
    let lost = roster.iter().filter(|(_, status)| status.state == WorkerState::Lost).map(|(name, _)| name);
    let row = serde_json::json!({
        "epoch": receipt.epoch,
        "version": receipt.version,
        "loss": (f64::from(loss) * 100_000.0).round() / 100_000.0,
        "workers": outcomes.collect::<serde_json::Map<_, _>>(),
        "lost": lost.collect::<Vec<_>>(),
        "digest": receipt.digest,
    });
    let mut out = io::stdout();
    writeln!(out, "{}", row)?;
    Ok(out.flush()?)
}

struct Line {
    slope: [f32; 3],
    offset: f32,
}

impl Line {
    /// Improves the line with one step of gradient descent on new data. Returns the mean squared error
    /// before the step.
    fn step(&mut self, noise: &mut Noise) -> f32 {
        const COUNT: usize = 64;
        let (mut slope, mut offset, mut loss) = ([0.0; 3], 0.0, 0.0); // gradients, and the error
        for _ in 0..COUNT {
            let x = [(); 3].map(|()| 2.0 * noise.draw());
            let y = dot(&TRUTH.0, &x) + TRUTH.1 + 0.01 * noise.draw();
            let error = dot(&self.slope, &x) + self.offset - y;
            slope.iter_mut().zip(x).for_each(|(sum, x)| *sum += error * x / COUNT as f32);
            offset += error / COUNT as f32;
            loss += error * error / COUNT as f32;
        }
        self.slope.iter_mut().zip(slope).for_each(|(value, gradient)| *value -= LEARNING_RATE * gradient);
        self.offset -= LEARNING_RATE * offset;
        loss
    }
}

fn dot(a: &[f32; 3], b: &[f32; 3]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Random numbers by xorshift64*, which needs no crate. The seed must not be zero.
struct Noise(u64);

impl Noise {
    /// Returns a random number from -1 to 1.
    fn draw(&mut self) -> f32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}
