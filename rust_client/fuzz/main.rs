//! Fuzzes what believes nothing: headers, layouts, patches, ZMTP streams, and the machine fed with messages.
//!
//! fuzz VECTORS [SECONDS [SEED]]: cases begin as golden vectors and are changed at random. Any
//! bytes are accepted or refused; nothing panics, takes long, or breaks an invariant. A failure
//! prints the seed of its case, which alone is run again by `fuzz VECTORS 0 SEED`.

mod dice;
mod targets;

use dice::Dice;
use std::collections::BTreeMap;
use std::error::Error;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::Path;
use std::process::exit;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use targets::{Corpus, TARGETS};

const CASE_MAX: Duration = Duration::from_secs(2); // no case does more than parse a few kilobytes

fn main() {
    if let Err(error) = fuzz() {
        eprintln!("{}", error);
        exit(1);
    }
}

fn fuzz() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("usage: fuzz VECTORS [SECONDS [SEED]]")?;
    let seconds: u64 = arguments.next().map_or(Ok(20), |text| text.parse())?;
    let corpus = Corpus::read(Path::new(&folder))?;
    let seed = match arguments.next() {
        Some(text) => text.parse()?,
        None => SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64,
    };
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut cases: BTreeMap<&str, u64> = BTreeMap::new();
    for case in 0.. {
        run(&corpus, seed.wrapping_add(case), &mut cases)?;
        if Instant::now() >= end {
            break;
        }
    }
    let total: u64 = cases.values().sum();
    println!("{} cases in {} s, nothing found (seeds from {}): {:?}", total, seconds, seed, cases);
    Ok(())
}

fn run(corpus: &Corpus, seed: u64, cases: &mut BTreeMap<&str, u64>) -> Result<(), String> {
    let mut dice = Dice::new(seed);
    let (name, target) = TARGETS[dice.below(TARGETS.len())];
    let begun = Instant::now();
    let result = catch_unwind(AssertUnwindSafe(|| target(corpus, &mut dice)));
    result.map_err(|_| format!("{}: seed {} panicked", name, seed))?;
    if begun.elapsed() > CASE_MAX {
        return Err(format!("{}: seed {} took {:?}", name, seed, begun.elapsed()));
    }
    *cases.entry(name).or_default() += 1;
    Ok(())
}
