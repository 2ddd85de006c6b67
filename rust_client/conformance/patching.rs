//! How long a patch takes to apply: for `benchmarks/deltas.py`.

use serde_json::json;
use std::error::Error;
use std::fs;
use std::path::Path;
use std::time::Instant;
use weightbus::delta::Patch;
use weightbus::layout::Layout;

/// Prints the least seconds of some rounds: for the blocks alone, and with the digest of the target.
pub fn run(folder: &str, rounds: &str) -> Result<(), Box<dyn Error>> {
    let read = |name| fs::read(Path::new(folder).join(name));
    let rounds: usize = rounds.parse()?;
    let (header, base, patch) = (read("layout")?, read("base")?, read("patch")?);
    let layout = Layout::parse(&header).map_err(|error| error.to_string())?;
    let seconds = |digest: bool| -> Result<f64, Box<dyn Error>> {
        let mut data = base.clone();
        let begun = Instant::now();
        let patch = Patch::parse(&layout, &patch).map_err(|error| error.to_string())?;
        let known = patch.header.base.clone();
        let done = if digest { patch.apply(&mut data, Some(&known)) } else { patch.put(&mut data) };
        done.map_err(|error| error.to_string())?;
        Ok(begun.elapsed().as_secs_f64())
    };
    let best = |digest| -> Result<f64, Box<dyn Error>> {
        (0..rounds).try_fold(f64::INFINITY, |best: f64, _| Ok(best.min(seconds(digest)?)))
    };
    println!("{}", json!({ "blocks": best(false)?, "digest": best(true)? }));
    Ok(())
}
