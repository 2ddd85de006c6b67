//! How long it takes to open sealed chunks: with their checksums as the worker does it, and AES alone.

use serde_json::{json, Value};
use std::time::{Duration, Instant};
use weightbus::sealing::{nonce_of, Gcm, Opening, CHUNK};

const CHUNK_BYTES: usize = 1 << 20;
const ROUNDS: usize = 5; // of which the best counts

/// Returns the seconds for so many bytes. They are not what was sealed, which takes as long, and is found out at the end.
pub fn opening(nbytes: usize) -> Option<Value> {
    let (key, tag) = ([7; 32], [0; 16]);
    let mut bytes = vec![1u8; nbytes];
    let open = |index: usize, chunk: &mut [u8]| {
        let mut opening = Opening::new(&key, &nonce_of(CHUNK, index as u64), &[], tag)?;
        chunk.chunks_mut(1 << 18).for_each(|piece| opening.take(piece)); // as much as is received at once
        Some(opening.proves().is_some())
    };
    let alone = |index: usize, chunk: &mut [u8]| {
        let mut gcm = Gcm::new(&key, &nonce_of(CHUNK, index as u64), &[])?;
        Some(gcm.in_place(chunk) && gcm.proves(&tag))
    };
    let (open_s, aes_s) = (best(&mut bytes, open)?, best(&mut bytes, alone)?);
    Some(json!({ "bytes": nbytes, "open_s": open_s.as_secs_f64(), "aes_s": aes_s.as_secs_f64() }))
}

fn best(bytes: &mut [u8], open: impl Fn(usize, &mut [u8]) -> Option<bool>) -> Option<Duration> {
    let mut best = Duration::MAX;
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        for (index, chunk) in bytes.chunks_mut(CHUNK_BYTES).enumerate() {
            assert!(!open(index, chunk)?, "a tag of zeros is right");
        }
        best = best.min(begun.elapsed());
    }
    Some(best)
}
