//! What patches the core makes, and how long that takes: for `tests/deltas.py` and `benchmarks/patching.py`.

use serde_json::{json, Value};
use std::error::Error;
use std::fs;
use std::path::Path;
use std::time::Instant;
use weightbus::delta::{encode, Patch, Side};
use weightbus::digest::digest_of;
use weightbus::layout::Layout;

const CHUNK_BYTES: u64 = 1 << 20;

/// Writes the patches between two versions to `flat` and `class`, and prints the least seconds of some rounds: to make
/// each, decode it and compare.
pub fn run(folder: &str, rounds: &str) -> Result<(), Box<dyn Error>> {
    let folder = Path::new(folder);
    let read = |name| fs::read(folder.join(name));
    let (header, base, target) = (read("layout")?, read("base")?, read("target")?);
    let layout = Layout::parse(&header).map_err(|error| error.to_string())?;
    let [before, after] = [&base, &target].map(|data| digest_of(&layout.id, CHUNK_BYTES, data));
    let made = |classes| {
        let sides = [(&base, &before), (&target, &after)].map(|(data, digest)| Side { data, digest });
        let patch = encode(&layout, CHUNK_BYTES, sides[0], sides[1], classes, &|| true)?;
        Patch::parse(&layout, &patch)?.compare(&base, &target, &|| true)?;
        Ok(patch)
    };
    let rounds: usize = rounds.parse()?;
    let mut told = Value::default();
    for (name, classes) in [("flat", false), ("class", true)] {
        let mut best = f64::INFINITY;
        for _ in 0..rounds {
            let begun = Instant::now();
            let patch = made(classes).map_err(|error: weightbus::delta::PatchError| error.to_string())?;
            best = best.min(begun.elapsed().as_secs_f64());
            fs::write(folder.join(name), patch)?;
        }
        told[name] = json!(best);
    }
    println!("{}", told);
    Ok(())
}
