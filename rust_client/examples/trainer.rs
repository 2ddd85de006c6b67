//! Fits a line by gradient descent, and publishes it after every step to whoever runs it.
//!
//!     cargo run --example trainer -- tcp://127.0.0.1:5555 --workers 1 --steps 20
//!
//! The twin of examples/numpy_trainer.py; workers in all languages take from it.

use std::error::Error;
use std::process::exit;
use weightbus::{Dtype, PublishOptions, Publisher, TensorView};

const TRUTH: ([f32; 3], f32) = ([1.0, 2.0, 3.0], 4.0);
const RATE: f32 = 0.2;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let Err(error) = train(&words) {
        eprintln!("{}", error);
        exit(1);
    }
}

fn train(words: &[String]) -> Result<(), Box<dyn Error>> {
    let (address, options) = words.split_first().ok_or("usage: trainer ADDRESS [--workers N] [--steps N]")?;
    let (mut workers, mut steps) = (1, 20);
    for option in options.chunks(2) {
        match option {
            [name, value] if name == "--workers" => workers = value.parse()?,
            [name, value] if name == "--steps" => steps = value.parse()?,
            _ => return Err(format!("unknown: {:?}", option).into()),
        }
    }
    let publisher = Publisher::builder(address).expect(workers).bind()?;
    println!("{}", publisher.address());
    let (mut slope, mut offset) = ([0.0; 3], 0.0);
    for _ in 0..steps {
        for (value, truth) in slope.iter_mut().zip(TRUTH.0) {
            *value += RATE * (truth - *value);
        }
        offset += RATE * (TRUTH.1 - offset);
        println!("{}", publish(&publisher, &slope, offset)?);
    }
    Ok(())
}

fn publish(
    publisher: &Publisher,
    slope: &[f32],
    offset: f32,
) -> Result<weightbus::Receipt, weightbus::Error> {
    let slope: Vec<u8> = slope.iter().flat_map(|value| value.to_le_bytes()).collect();
    let tensors = [
        TensorView { name: "slope", dtype: Dtype::F32, shape: &[3], bytes: &slope },
        TensorView { name: "offset", dtype: Dtype::F32, shape: &[], bytes: &offset.to_le_bytes() },
    ];
    publisher.publish("line", &tensors, &PublishOptions::default()) // all workers run it, or this is an error
}
