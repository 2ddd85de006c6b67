//! Chooses actions with the newest policy, in plain Rust: reads four numbers a line, prints the action.
//!
//!     echo "0.1 0 -0.2 0" | rust_inference tcp://localhost:5555
use std::error::Error;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;
use weightbus::{Model, Tensor, Weights, Worker};

const PATIENCE: Duration = Duration::from_secs(30);

/// Sequential(Linear(4, 8), Tanh(), Linear(8, 2)), with the names and shapes of torch's tensors.
fn policy() -> Result<Model, weightbus::Error> {
    Model::new([
        Tensor::new("0.weight", &[8, 4], vec![0f32; 32]),
        Tensor::new("0.bias", &[8], vec![0f32; 8]),
        Tensor::new("2.weight", &[2, 8], vec![0f32; 16]),
        Tensor::new("2.bias", &[2], vec![0f32; 2]),
    ])
}

fn linear(weights: &Weights, name: &str, input: &[f32]) -> Result<Vec<f32>, weightbus::Error> {
    let weight = weights.get::<f32>(&format!("{name}.weight"))?;
    let bias = weights.get::<f32>(&format!("{name}.bias"))?;
    let dot = |row: &[f32]| row.iter().zip(input).map(|(w, x)| w * x).sum::<f32>();
    Ok(weight.chunks(input.len()).zip(bias.iter()).map(|(row, b)| dot(row) + b).collect())
}

fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).ok_or("usage: rust_inference ADDRESS")?;
    let policy = policy()?;
    let worker = Arc::new(Worker::builder(address).model("policy", &policy).connect()?);
    worker.receive(PATIENCE)?.ok_or("no version has come")?;
    let receiver = worker.clone();
    let applying = std::thread::spawn(move || loop {
        match receiver.receive(PATIENCE) {
            Err(weightbus::Error::Closed { .. }) => break,
            Err(error) => eprintln!("{error}"), // the previous version still runs
            Ok(_) => {}
        }
    });
    for line in io::stdin().lines() {
        let state = line?.split_whitespace().map(str::parse).collect::<Result<Vec<f32>, _>>()?;
        if state.len() != 4 {
            return Err(format!("a state is four numbers, not {}", state.len()).into());
        }
        let weights = policy.read(); // no version is applied before the next line
        let hidden: Vec<f32> = linear(&weights, "0", &state)?.iter().map(|x| x.tanh()).collect();
        let scores = linear(&weights, "2", &hidden)?;
        let version = weights.version().map_or(0, |(_, version)| version);
        let action = usize::from(scores[1] > scores[0]);
        println!("version {version}: action {action} of {:.4} {:.4}", scores[0], scores[1]);
        io::stdout().flush()?;
    }
    worker.close();
    applying.join().map_err(|_| "the thread that applies has panicked")?;
    Ok(())
}
