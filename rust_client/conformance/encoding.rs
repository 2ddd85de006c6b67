//! Makes patches for `tests/deltas.py`, which compares them with those of Python.

use std::error::Error;
use std::fs;
use std::path::Path;
use weightbus::delta::{encode, Patch, PatchError, Side};
use weightbus::digest::digest_of;
use weightbus::layout::Layout;

const CHUNK_BYTES: u64 = 1 << 20;

/// Reads two versions, the files `base` and `target` with the layout `layout`, from a folder. Writes the
/// patch without classes to `flat`, and the patch with classes to `class`, after a check of each.
pub fn run(folder: &str) -> Result<(), Box<dyn Error>> {
    let folder = Path::new(folder);
    let read = |name| fs::read(folder.join(name));
    let (header, base, target) = (read("layout")?, read("base")?, read("target")?);
    let layout = Layout::parse(&header).map_err(|error| error.to_string())?;
    let [before, after] = [&base, &target].map(|data| digest_of(&layout.id, CHUNK_BYTES, data));
    let make_patch = |classes| -> Result<Vec<u8>, PatchError> {
        let sides = [(&base, &before), (&target, &after)].map(|(data, digest)| Side { data, digest });
        let patch = encode(&layout, CHUNK_BYTES, sides[0], sides[1], classes, &|| true)?;
        Patch::parse(&layout, &patch)?.compare(&base, &target, &|| true)?;
        Ok(patch)
    };
    for (name, classes) in [("flat", false), ("class", true)] {
        fs::write(folder.join(name), make_patch(classes).map_err(|error| error.to_string())?)?;
    }
    Ok(())
}
